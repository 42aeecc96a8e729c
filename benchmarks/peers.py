"""The systems beside ours, holding the same weights."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, MarianMTModel, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.interop import ctranslate2_export, marian_export

_PREFIX = "p"


# --------------------------------------------------------------------------- ours
def base_config(**changes: Any) -> VaswaniConfig:
    """The paper's base model (6 + 6 layers, 512 wide) with 32,000 pieces, such that a MarianMTModel can be the same.

    Args:
        changes: fields of `VaswaniConfig` that override these.

    Returns:
        `VaswaniConfig`: with the sines first and LayerNorm's epsilon as in MarianMT. The paper's model has no biases in
        attention and before the softmax, which MarianMT always has; give `attention_bias=True, output_bias=True` for
        those too.
    """
    fields = {"vocab_size": 32_000, "sinusoid_layout": "halves", "layer_norm_eps": 1e-5}
    return VaswaniConfig.from_preset("base", **{**fields, **changes})


def quick_config(**changes: Any) -> VaswaniConfig:
    """As `base_config`, but of a size that runs in a moment, to try a script."""
    tiny = {"vocab_size": 211, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 2}
    return base_config(**{**tiny, "d_ff": 48, **changes})


def random_model(config: VaswaniConfig, seed: int = 0) -> VaswaniForConditionalGeneration:
    """An untrained model that reads its source all the same: unlike sentences get unlike translations.

    The states of a decoder with initial weights have most of their length in common, so that one piece wins everywhere.
    Here the sublayers speak louder beside the residual, and the last LayerNorm takes out what random texts have in
    common and scales the logits to a spread of 3, near a trained model's. Biases of maps, where there are any, are not
    zero.

    Args:
        config (`VaswaniConfig`): of the model, post-norm. seed (`int`): of all draws.

    Returns:
        `VaswaniForConditionalGeneration` in evaluation mode, float32.
    """
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("fc2.weight"):
                parameter.mul_(3.0)
            elif name.endswith(".bias") and "layer_norm" not in name:
                parameter.normal_(std=0.02)
        source = random_sources(config, 8, 20, seed)
        target = random_sources(config, 8, 20, seed + 1)
        states = model.model(source, torch.ones_like(source), target).last_hidden_state.flatten(0, 1)  # [B*T, D]
        common = states.mean(dim=0)
        factor = 3.0 / (states - common).std()
        last: Any = model.model.decoder.layers[-1].feed_forward_residual.layer_norm
        last.weight.mul_(factor)
        last.bias.copy_(-common * factor)
    return model


def random_sources(config: VaswaniConfig, count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Sentences of one length without special pieces: [count, length], int64."""
    special = [config.pad_token_id, config.eos_token_id, config.bos_token_id, config.decoder_start_token_id]
    first = max((one for one in special if isinstance(one, int)), default=-1) + 1
    generator = torch.Generator().manual_seed(seed + 17)
    return torch.randint(first, config.encoder_vocab_size, (count, length), generator=generator)


# --------------------------------------------------------------------------- one search for all
def fixed_search(config: VaswaniConfig, beams: int, new_tokens: int) -> GenerationConfig:
    """Settings of `generate()` for ours and MarianMT alike: exactly so many new tokens, no length penalty.

    Args:
        config (`VaswaniConfig`): gives the special tokens. beams (`int`): width, 1 is greedy search.
        new_tokens (`int`): of each sentence; the end token is barred.
    """
    # What is left out, the library takes from the model's own settings; greedy search has no use for these two.
    search = (
        {"length_penalty": 0.0, "early_stopping": True}
        if beams > 1
        else {"length_penalty": 1.0, "early_stopping": False}
    )
    return GenerationConfig(
        num_beams=beams,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        length_penalty_type="power",
        max_length_offset=None,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        **search,
    )


def translate(model: Any, sources: torch.Tensor, batch: int, settings: GenerationConfig) -> list[list[int]]:
    """New tokens of each sentence by `generate()`, batch by batch.

    Args:
        model: ours or a MarianMTModel. sources (`torch.Tensor`): [sentences, S], no padding. batch (`int`): sentences.
        settings (`GenerationConfig`): of `fixed_search`.
    """
    rows: list[list[int]] = []
    for part in sources.split(batch):
        found = model.generate(part, attention_mask=torch.ones_like(part), generation_config=settings)
        rows += found[:, 1:].tolist()
    return rows


# --------------------------------------------------------------------------- transformers' MarianMT
def marian_of(model: Any) -> MarianMTModel:
    """A MarianMTModel with the weights of a model of ours, in its precision and on its device.

    A MarianMTModel has its sines first; for a model with sines and cosines in turn, the columns of d_model change
    place in all tensors, which leaves the function as it is. LayerNorm's epsilon, a constant there, is set to ours.

    Args:
        model (`VaswaniForConditionalGeneration`): stays as it is.

    Returns:
        `MarianMTModel` in the mode (training or evaluation) of `model`.

    Raises:
        ConversionError: the model's shape cannot be a MarianMTModel's.
    """
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            marian_export.export(model, None, Path(folder))
            marian: Any = MarianMTModel.from_pretrained(folder, dtype=model.dtype)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    marian.generation_config.max_length = None  # a length of the export's choice, and each call here gives its own
    for module in marian.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = model.config.layer_norm_eps
    return marian.to(model.device).train(model.training)


# --------------------------------------------------------------------------- CTranslate2
def has_ctranslate2() -> bool:
    """Whether CTranslate2 is installed."""
    return importlib.util.find_spec("ctranslate2") is not None


def piece(number: int) -> str:
    """Name of a piece in the vocabulary that `ctranslate2_of` makes for a model without tokenizer."""
    return f"{_PREFIX}{number}"


def ctranslate2_of(
    model: Any, folder: Path, compute_type: str = "float32", tokenizer: Any = None, threads: int | None = None
) -> Any:
    """A CTranslate2 translator with the weights of a model of ours.

    Args:
        model (`VaswaniForConditionalGeneration`): in float32.
        folder (`Path`): for the exported files; is made where it does not exist.
        compute_type (`str`): such as "float32" or "int8"; the weights are stored so too.
        tokenizer (*optional*): of the model; without one, piece number i is named `piece(i)`.
        threads (`int`, *optional*): intra-op threads; None: as many as torch has.

    Returns:
        `ctranslate2.Translator` on the CPU.

    Raises:
        ImportError: CTranslate2 is not installed.
    """
    if not has_ctranslate2():
        raise ImportError("CTranslate2 is not installed, so there is nothing to compare with: pip install ctranslate2")
    import ctranslate2

    ctranslate2_export.export(model, tokenizer or numbered_tokenizer(model.config), folder, compute_type)
    threads = threads or torch.get_num_threads()
    return ctranslate2.Translator(str(folder), device="cpu", compute_type=compute_type, intra_threads=threads)


def ctranslate2_search(translator: Any, sources: list[list[str]], batch: int, beams: int, new_tokens: int) -> Any:
    """The search of `fixed_search` in CTranslate2.

    Args:
        translator: of `ctranslate2_of`. sources (`list[list[str]]`): pieces.
        batch (`int`): sentences computed together. beams, new_tokens (`int`): as in `fixed_search`.

    Returns:
        CTranslate2's results; `ids_of` takes the tokens out.
    """
    return translator.translate_batch(
        sources,
        max_batch_size=batch,
        beam_size=beams,
        length_penalty=0.0,
        min_decoding_length=new_tokens,
        max_decoding_length=new_tokens,
        max_input_length=0,
    )


def pieces_of(rows: list[list[int]]) -> list[list[str]]:
    """Ids as the pieces of `numbered_tokenizer`."""
    return [[piece(number) for number in row] for row in rows]


def ids_of(results: Any) -> list[list[int]]:
    """Ids of the best hypothesis of each of CTranslate2's results."""
    return [[int(name[len(_PREFIX) :]) for name in one.hypotheses[0]] for one in results]


def numbered_tokenizer(config: VaswaniConfig) -> PreTrainedTokenizerFast:
    """A tokenizer of a model that has none: words `piece(0)`, `piece(1)`, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    rows = max(config.vocab_size, config.encoder_vocab_size)
    words = WordLevel({piece(number): number for number in range(rows)}, unk_token=piece(config.pad_token_id or 0))
    backend = Tokenizer(words)
    backend.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": config.pad_token_id, "eos_token": config.eos_token_id, "bos_token": config.bos_token_id}
    named = {name: piece(number) for name, number in special.items() if isinstance(number, int)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)
