"""Translates with a folder of ONNX graphs: the network runs in ONNX Runtime, the search is the package's own.

    model = VaswaniOnnxModel.from_pretrained("folder")
    translate = pipeline("translation", model=model, tokenizer=AutoTokenizer.from_pretrained("folder"))

`generate()`, the pipeline and `evaluate_model` do as with the model itself, beam search by the paper's rules included.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..configuration_vaswani import VaswaniConfig
from ..generation_vaswani import VaswaniGenerationMixin
from ..modeling_vaswani import VaswaniPreTrainedModel
from .foreign import Program
from .onnx_export import DECODER, DECODER_WITH_PAST, ENCODER, cache_names

_MISSING = "ONNX Runtime is not installed. Run: pip install 'hf-vaswani[onnx]', or pip install onnxruntime"
_PROOF_BATCH = 16


class VaswaniOnnxModel(VaswaniPreTrainedModel, VaswaniGenerationMixin, GenerationMixin):
    """A model without weights of its own: encoder and decoder are sessions of ONNX Runtime.

    Make one with `from_pretrained`. It has no gradient, attention weights or loss. Tensors that come in may be on any
    device; what comes out is on `model.device`, where the search runs ("cpu" unless `model.to(...)` says otherwise).

    Args:
        config (`VaswaniConfig`), generation_config (`GenerationConfig`): of the exported model.
        sessions (`dict`): one `onnxruntime.InferenceSession` for each of the three graphs, by file name.
        folder (`Path`): where they come from; `save_pretrained` copies it.
    """

    main_input_name = "input_ids"

    def __init__(
        self, config: VaswaniConfig, generation_config: GenerationConfig, sessions: dict[str, Any], folder: Path
    ):
        super().__init__(config)
        self.generation_config = generation_config
        self.sessions, self.folder = sessions, folder
        self.encoder = _OnnxEncoder(self)
        self._device = torch.device("cpu")
        self.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: Any,
        threads: int | None = None,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> "VaswaniOnnxModel":
        """Open the graphs of a folder that `export` wrote.

        Args:
            pretrained_model_name_or_path (`str` or `Path`): the folder.
            threads (`int`, *optional*): of one operator. Default: ONNX Runtime's own, one for each processor core.
            providers (`Sequence`): where ONNX Runtime computes, best first, as its `InferenceSession` takes them.

        Returns:
            `VaswaniOnnxModel`.

        Raises:
            OSError: the folder, or a file in it, is missing. ValueError: a file is damaged, or the graphs do not fit
            config.json. ImportError: ONNX Runtime is not installed.
        """
        folder = Path(pretrained_model_name_or_path)
        lacking = [
            name
            for name in (ENCODER, DECODER, DECODER_WITH_PAST, "config.json", "generation_config.json")
            if not (folder / name).is_file()
        ]
        if lacking:
            raise OSError(
                f"{folder} has no {', '.join(lacking)}, so it is no folder of ONNX graphs. Write one with "
                "`hf-vaswani export onnx MODEL OUT`."
            )
        if threads is not None and threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}.")
        config = VaswaniConfig.from_pretrained(folder)
        sessions = {name: _open(folder / name, threads, providers) for name in (ENCODER, DECODER, DECODER_WITH_PAST)}
        _check_fit(config, sessions, folder)
        return cls(config, GenerationConfig.from_pretrained(folder), sessions, folder)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Copy the folder's graphs and weights; the configurations are written as they are now."""
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.onnx*"):
            if path.resolve() != (target / path.name).resolve():
                shutil.copyfile(path, target / path.name)
        self.config.save_pretrained(target)
        self.generation_config.save_pretrained(target)

    # ------------------------------------------------------------------ what the library asks a model for
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.float32

    def to(self, device: Any = None, dtype: Any = None, **kwargs: Any) -> "VaswaniOnnxModel":  # type: ignore[override]
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype not in (None, torch.float32):
            raise ValueError(f"The graphs compute as they were exported, not in {dtype}.")
        self._device = self._device if device is None else torch.device(device)
        return self

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        # Only its size is real; the rows are in the graphs.
        return nn.Embedding(self.config.encoder_vocab_size, self.config.d_model, device="meta")

    # ------------------------------------------------------------------ the network
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        r"""Predict target tokens.

        Args:
            input_ids (`torch.LongTensor`): [B, S]. attention_mask: [B, S], 1 for real tokens, padding on either side.
            decoder_input_ids (`torch.LongTensor`): [B, T]; with a cache, only the new columns.
            encoder_outputs (*optional*): of an earlier call, in place of `input_ids`.
            cache (`EncoderDecoderCache`, *optional*): of an earlier call; it is filled further.
            logits_to_keep (`int`): only the last n columns get logits; 0 means all.

        Returns:
            `Seq2SeqLMOutput`: `logits` [B, T, V], `cache` unless `use_cache=False`.

        Raises:
            ValueError: an empty batch, padding without a mask, more positions than a learned table has, or an argument
            that the graphs have no input for. IndexError: an id outside the vocabulary.
        """
        _refuse(kwargs)
        _check_cache(cache)
        if decoder_attention_mask is not None and not bool(decoder_attention_mask.bool().all()):
            raise ValueError("The ONNX graphs have no mask over the target: give `decoder_input_ids` without padding.")
        if decoder_input_ids is None:
            raise ValueError("Pass `decoder_input_ids`.")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        states = encoder_outputs[0]
        past = cache.get_seq_length() if cache is not None else 0
        rows, columns = decoder_input_ids.shape
        self._check_ids(decoder_input_ids, self.config.vocab_size, "decoder_input_ids")
        self._check_length(past + columns)
        if attention_mask is None:
            attention_mask = torch.ones(rows, states.shape[1], dtype=torch.long)
        feed = {"input_ids": _array(decoder_input_ids), "encoder_attention_mask": _array(attention_mask.long())}
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past:
            assert cache is not None
            found = self._further(feed, cache)
        else:
            found = self._run(DECODER, {**feed, "encoder_hidden_states": _array(states)})
            cache = self._fill(cache, found) if use_cache or cache is not None else None
        logits = self._tensor(found["logits"])
        result = Seq2SeqLMOutput(
            logits=logits[:, -logits_to_keep:] if logits_to_keep else logits,
            cache=cache,
            encoder_last_hidden_state=states,
        )
        return result if return_dict is not False else result.to_tuple()

    def _run(self, name: str, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = self.sessions[name]
        names = [one.name for one in session.get_outputs()]
        return dict(zip(names, session.run(names, feed), strict=True))

    def _further(self, feed: dict[str, np.ndarray], cache: EncoderDecoderCache) -> dict[str, np.ndarray]:
        """One or more columns after those in the cache, which takes them up."""
        own: list[Any] = cache.self_attention_cache.layers
        cross: list[Any] = cache.cross_attention_cache.layers
        for n, (mine, theirs) in enumerate(zip(own, cross, strict=True)):
            parts: tuple[Any, ...] = (mine.keys, mine.values, theirs.keys, theirs.values)
            feed.update(zip(cache_names("past_key_values", n), map(_array, parts), strict=True))
        found = self._run(DECODER_WITH_PAST, feed)
        for n, layer in enumerate(own):
            key, value = cache_names("present", n, ("decoder",))
            layer.keys, layer.values = self._tensor(found[key]), self._tensor(found[value])
        return found

    def _fill(self, cache: EncoderDecoderCache | None, found: dict[str, np.ndarray]) -> EncoderDecoderCache:
        if cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        for n in range(self.config.decoder_layers):
            keys, values, source_keys, source_values = (self._tensor(found[one]) for one in cache_names("present", n))
            cache.self_attention_cache.update(keys, values, n)
            cache.cross_attention_cache.update(source_keys, source_values, n)
            cache.is_updated[n] = True
        return cache

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # ------------------------------------------------------------------ checks that a graph cannot make
    def _check_ids(self, ids: torch.Tensor, rows: int, name: str) -> None:
        if not ids.numel():
            raise ValueError(f"`{name}` is empty: its shape is {tuple(ids.shape)}. Leave out batches without text.")
        outside = ids[(ids < 0) | (ids >= rows)]  # a graph counts a negative id from the end
        if outside.numel():
            raise IndexError(
                f"Token id {int(outside[0])} in `{name}` is outside the vocabulary of {rows} rows. Do tokenizer and "
                "model belong together?"
            )

    def _check_length(self, length: int) -> None:
        rows = self.config.max_position_embeddings
        if self.config.position_encoding == "learned" and length > rows:
            raise ValueError(
                f"The sequence has {length} positions, but the learned position table has {rows} rows "
                "(`max_position_embeddings`). Split the text, or use a model with sinusoidal positions."
            )


class _OnnxEncoder(nn.Module):
    """What `generate()` calls once for each batch."""

    main_input_name = "input_ids"

    def __init__(self, model: VaswaniOnnxModel):
        super().__init__()
        self.__dict__["model"] = model  # not a part of it, but its owner

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        model: VaswaniOnnxModel = self.__dict__["model"]
        _refuse(kwargs)
        if input_ids is None:
            raise ValueError("Pass `input_ids`, or `encoder_outputs` of an earlier call.")
        model._check_ids(input_ids, model.config.encoder_vocab_size, "input_ids")
        model._check_length(input_ids.shape[1])
        pad = model.config.pad_token_id
        if attention_mask is None:
            if pad is not None and bool((input_ids == pad).any()):
                raise ValueError(
                    f"`input_ids` holds the padding id {pad}, but there is no `attention_mask`, so the padding would "
                    "be read as text. Pass the tokenizer's `attention_mask` too."
                )
            attention_mask = torch.ones_like(input_ids)
        feed = {"input_ids": _array(input_ids), "attention_mask": _array(attention_mask.long())}
        return BaseModelOutput(last_hidden_state=model._tensor(model._run(ENCODER, feed)["last_hidden_state"]))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


def _refuse(arguments: dict[str, Any]) -> None:
    """An argument that would change the result, and that the graphs cannot follow, is an error."""
    for name, value in arguments.items():
        if value is not None and value is not False and name != "return_dict":
            raise ValueError(f"`{name}` cannot be used with ONNX graphs: they have no input or output for it.")


def _check_cache(cache: Any) -> None:
    """The graphs give longer keys and values back at every step, which only a cache that grows can hold."""
    if cache is None:
        return
    if not isinstance(cache, EncoderDecoderCache):
        raise ValueError(f"`cache` must be an `EncoderDecoderCache`, not {type(cache).__name__}.")
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if kinds:
        raise ValueError(
            f"ONNX graphs need a cache that grows (`DynamicCache`), not layers of type {', '.join(kinds)}."
        )


def _open(path: Path, threads: int | None, providers: Sequence[Any]) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(_MISSING) from error
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot open {path}: {error}") from error


def _check_fit(config: VaswaniConfig, sessions: dict[str, Any], folder: Path) -> None:
    """Compare what the graphs say of their shapes with config.json."""
    (logits,) = (one for one in sessions[DECODER].get_outputs() if one.name == "logits")
    (states,) = (one for one in sessions[ENCODER].get_outputs() if one.name == "last_hidden_state")
    past = [one.name for one in sessions[DECODER_WITH_PAST].get_inputs() if one.name.endswith(".decoder.key")]
    found = {"vocab_size": logits.shape[-1], "d_model": states.shape[-1], "decoder_layers": len(past)}
    wrong = [
        f"{name} {value}, not {getattr(config, name)}"
        for name, value in found.items()
        if value != getattr(config, name)
    ]
    if wrong:
        raise ValueError(f"The graphs in {folder} have {'; '.join(wrong)} as its config.json says. Export it again.")


# --------------------------------------------------------------------------- for the proof
def program(out: Path, limit: int | None = None) -> Program:
    """The graphs of an exported folder as the program to compare with, in padded batches.

    Args:
        out (`Path`): the folder. limit (`int`, *optional*): the most new tokens of a search, which then ends when no
            hypothesis can win any more. None: as generation_config.json says.
    """
    import onnxruntime

    model = VaswaniOnnxModel.from_pretrained(out)
    settings: dict[str, Any] = {} if limit is None else {"max_new_tokens": limit, "early_stopping": "never"}
    settings |= {"do_sample": False, "num_return_sequences": 1}  # samples cannot be compared
    filler = model.config.pad_token_id or 0

    def batches(rows: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at in range(0, len(rows), _PROOF_BATCH):
            part = [torch.tensor(row) for row in rows[at : at + _PROOF_BATCH]]
            masks = [torch.ones_like(row) for row in part]
            yield pad_sequence(part, batch_first=True, padding_value=filler), pad_sequence(masks, batch_first=True)

    def logits(sources: list[list[int]], targets: list[list[int]]) -> list[np.ndarray]:
        results: list[np.ndarray] = []
        for (ids, mask), (target, real) in zip(batches(sources), batches(targets), strict=True):
            found = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
            results += [rows[: int(length)].numpy() for rows, length in zip(found, real.sum(-1), strict=True)]
        return results

    def search(sources: list[list[int]], num_beams: int) -> list[list[int]]:
        results: list[list[int]] = []
        for ids, mask in batches(sources):
            found = model.generate(input_ids=ids, attention_mask=mask, num_beams=num_beams, **settings)
            results += [_without_filling(row, model.config) for row in found[:, 1:].tolist()]
        return results

    return Program(f"onnxruntime {onnxruntime.__version__}", logits, search)


def _without_filling(row: list[int], config: VaswaniConfig) -> list[int]:
    """Cut behind the end token, or where there is none, take the padding off."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stop = next((place + 1 for place, one in enumerate(row) if one in ends), None)
    while stop is None and row and row[-1] == config.pad_token_id:
        row = row[:-1]
    return row[:stop]
