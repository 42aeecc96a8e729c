"""What a reader handed over, as a model that runs, and its logits from one padded batch."""

import numpy as np
import torch

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration


def loaded(foreign) -> VaswaniForConditionalGeneration:
    """A model with the tensors of an import, none of them missing or left over, and with its search settings."""
    model = VaswaniForConditionalGeneration(VaswaniConfig(**foreign.config)).eval()
    assert set(foreign.tensors) == set(model.state_dict()) - set(model.all_tied_weights_keys)
    model.load_state_dict(foreign.tensors, strict=False)
    for name, value in foreign.generation.items():
        setattr(model.generation_config, name, value)
    return model


def padded(rows: list[list[int]], pad: int = 0) -> torch.Tensor:
    """[B, L], filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)


def source_batch(model, rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """What `forward` and `generate` take of sources of unlike lengths."""
    mask = padded([[1] * len(row) for row in rows])
    return {"input_ids": padded(rows, model.config.pad_token_id), "attention_mask": mask}


@torch.no_grad()
def our_logits(model, sources, targets) -> list[np.ndarray]:
    """Logits of each pair, [T, V], from one padded batch; targets begin with the start token."""
    target = padded(targets, model.config.pad_token_id)
    found = model(**source_batch(model, sources), decoder_input_ids=target).logits
    return [row[: len(ids)].numpy() for row, ids in zip(found, targets, strict=True)]
