"""A model that CTranslate2 runs, with as much of `generate()` as the translation pipeline asks of a model."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from ..generation_vaswani import length_penalty_factor
from ..interop.ctranslate2_export import export, register
from ..interop.ctranslate2_file import read_settings, read_vocabularies
from ..interop.exporting import load
from ..interop.foreign import ConversionError
from ..interop.proof import quiet_library
from ..pipeline_vaswani import VaswaniTranslationPipeline

# What CTranslate2 can do of `generate()`, and fields that change no search.
_CARRIED = {
    "num_beams", "num_return_sequences", "length_penalty", "length_penalty_type", "early_stopping", "max_length",
    "max_new_tokens", "max_length_offset", "min_new_tokens", "suppress_tokens", "bad_words_ids", "repetition_penalty",
    "no_repeat_ngram_size", "forced_prefix_ids", "forced_bos_token_id",
}  # fmt: skip
_HARMLESS = {
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation", "return_dict_in_generate", "output_scores", "output_logits", "temperature", "top_k",
    "top_p",
}  # fmt: skip
_POLL_SECONDS = 0.002


def convert(name: str, device: str, threads: int) -> VaswaniTranslationPipeline:
    """The pipeline of a folder or Hub name of ours, converted to int8 in a temporary folder that is gone afterwards.

    Args:
        name (`str`): as for `from_pretrained`. device (`str`): "cpu", "cuda" or "cuda:N". threads (`int`): on the CPU.

    Raises:
        ImportError: CTranslate2 is not installed. ConversionError: it cannot represent the model, or its search.
    """
    register()
    with TemporaryDirectory(prefix="hf-vaswani-") as folder, quiet_library():
        model, tokenizer = load(name)
        facts, _ = export(model, tokenizer, Path(folder), "int8")
        settings = model.generation_config
        del model
        made = Ct2Model(Path(folder), facts["position_rows"], settings, tokenizer, "int8", device, threads)
    return VaswaniTranslationPipeline(model=made, tokenizer=tokenizer, device="cpu")


def open_folder(folder: Path, compute_type: str, device: str, threads: int) -> VaswaniTranslationPipeline:
    """The pipeline of a folder that `hf-vaswani export ctranslate2` wrote, with the search that its report keeps.

    Args:
        folder (`Path`): with `model.bin`. compute_type (`str`): CTranslate2's name; "default" is as stored.
        device, threads: as for `convert`.

    Raises:
        ImportError: CTranslate2 is not installed. ConversionError: the folder is another program's, or incomplete.
    """
    register()
    try:
        report = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
        facts, losses = report["options"], report["losses"]
        search, arguments = facts["search"], facts["translate_batch"]
        rows = facts["position_rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{folder} has no report of `hf-vaswani export ctranslate2` (conversion.json), so nothing says how to "
            "search with it. Bring it in with `hf-vaswani import ctranslate2`, and translate with what that writes."
        ) from error
    lost = [one for one in losses if "`target_prefix`" in one or "does not exist there" in one]
    if lost:
        raise ConversionError(
            f"{folder} cannot translate as its model did: {' '.join(lost)} Use the model it came from."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Choice: the limit of the paper, as the folder does not keep its model's.
    settings = GenerationConfig(
        num_beams=arguments["beam_size"],
        length_penalty=search["length_penalty"],
        length_penalty_type=search["length_penalty_type"],
        early_stopping=True if search["patience"] == 1 else "never",
        max_length_offset=50,
        min_new_tokens=search["min_length"],
        suppress_tokens=search["suppressed"] or None,
        no_repeat_ngram_size=arguments.get("no_repeat_ngram_size"),
        repetition_penalty=arguments.get("repetition_penalty"),
    )
    made = Ct2Model(folder, rows, settings, tokenizer, compute_type, device, threads)
    return VaswaniTranslationPipeline(model=made, tokenizer=tokenizer, device="cpu")


class Ct2Model(torch.nn.Module):
    """Stands where the pipeline expects a model of transformers.

    Args:
        folder (`Path`): of CTranslate2; it is not needed any more once this is made.
        rows (`int`): its positions: the most tokens of a source, and of a translation.
        settings (`GenerationConfig`): the search where a call says nothing else.
        tokenizer: of the folder. compute_type, device, threads: as for `open_folder`.

    `is_computing` stays True after an exception, such as Ctrl-C, left CTranslate2 at work: it ends no batch early, and
    the end of its translator, even that of the process, waits for it.
    """

    is_computing = False
    input_modalities = output_modalities = ("text",)  # the pipeline's `repr` shows them

    def __init__(
        self,
        folder: Path,
        rows: int,
        settings: GenerationConfig,
        tokenizer: Any,
        compute_type: str,
        device: str,
        threads: int,
    ):
        super().__init__()
        import ctranslate2

        self.source, self.target, _ = read_vocabularies(folder)
        names = read_settings(folder)
        self.ids = {piece: number for number, piece in enumerate(self.target)}
        self.start, end = self.ids[names["decoder_start_token"]], self.ids[names["eos_token"]]
        ends = settings.eos_token_id
        self.ends = list(ends) if isinstance(ends, list) else [end]
        kind, _, number = device.partition(":")
        try:
            self.translator = ctranslate2.Translator(
                str(folder), kind, device_index=int(number or 0), compute_type=compute_type, intra_threads=threads
            )
        except (ValueError, RuntimeError) as error:
            raise ConversionError(f"CTranslate2 cannot run this on {device}: {error}") from error
        self.device = torch.device(device)
        pad = tokenizer.pad_token_id
        self.pad = end if pad is None else pad
        settings.eos_token_id, settings.pad_token_id = self.ends, self.pad
        settings.decoder_start_token_id = self.start
        self.generation_config = settings
        self.rows = rows
        # CTranslate2's table of positions does not grow, whatever the kind.
        self.config = SimpleNamespace(
            is_encoder_decoder=True,
            encoder_vocab_size=len(self.source),
            vocab_size=len(self.target),
            max_position_embeddings=rows,
            pad_token_id=self.pad,
        )
        self._options({})  # what cannot be done is told before any text is read

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        """Search as `generate()` of our models does, as far as CTranslate2 goes.

        Args:
            input_ids, attention_mask (`torch.Tensor`): [B, S], padded on the right.
            kwargs: settings of the search, on top of `generation_config`.

        Returns:
            `sequences` [B * num_return_sequences, 1 + new tokens] and `sequences_scores` [B * num_return_sequences].

        Raises:
            ConversionError: CTranslate2 lacks a setting. FloatingPointError: scores are not numbers.
        """
        settings, options = self._options(kwargs)
        lengths = attention_mask.sum(-1).tolist()
        sources = [
            [self.source[one] for one in row[:length]] for row, length in zip(input_ids.tolist(), lengths, strict=True)
        ]
        limits = [self._limit(settings, length) for length in lengths]
        found = self._search(sources, max(limits), options, settings)
        # One call has one limit. The few that went past their own are searched again with it.
        for limit in {own for own, group in zip(limits, found, strict=True) if any(len(ids) > own for ids, _ in group)}:
            late = [i for i, own in enumerate(limits) if own == limit and any(len(ids) > own for ids, _ in found[i])]
            again = self._search([sources[i] for i in late], limit, options, settings)
            for i, group in zip(late, again, strict=True):
                found[i] = group
        wanted = settings["num_return_sequences"] or 1
        chosen = [one for group in found for one in (group + [group[-1]] * wanted)[:wanted]]
        longest = max(len(ids) for ids, _ in chosen)
        rows = [[self.start, *ids, *[self.pad] * (longest - len(ids))] for ids, _ in chosen]
        return SimpleNamespace(
            sequences=torch.tensor(rows), sequences_scores=torch.tensor([score for _, score in chosen])
        )

    def _options(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of a search, and the same as arguments of `translate_batch`; refuses what it does not have."""
        own = self.generation_config.to_diff_dict()
        settings: dict[str, Any] = dict.fromkeys(_CARRIED) | own | kwargs
        neutral = vars(GenerationConfig())
        strange = [
            f"{name}={value!r}"
            for name, value in settings.items()
            if name not in _CARRIED | _HARMLESS and value not in (None, False, neutral.get(name))
        ]
        if strange:
            raise ConversionError(
                f"CTranslate2 does not have this setting of the model's search: {', '.join(sorted(strange))}. "
                "Translate without it (--dtype float32), or take the setting out of generation_config.json."
            )
        beams, alpha = settings["num_beams"] or 1, settings["length_penalty"]
        is_own_rule = beams == 1 or settings["length_penalty_type"] == "gnmt"
        barred = [[one] for one in settings["suppress_tokens"] or ()] + list(settings["bad_words_ids"] or ())
        suppressed = [[self.target[one] for one in ids] for ids in barred]
        suppressed += [[piece] for piece in self.target if piece.startswith("<unused_")]  # rows without a piece
        options = {
            "beam_size": beams,
            # For the paper's rule it hands over the whole final beam with sums of log-probabilities.
            "num_hypotheses": beams if is_own_rule else (settings["num_return_sequences"] or 1),
            "length_penalty": 0.0 if is_own_rule else float(1.0 if alpha is None else alpha),
            # Measured: 2 finds what a search finds that only ends when nothing can win any more.
            "patience": 1.0 if settings["early_stopping"] is True else 2.0,
            "min_decoding_length": settings["min_new_tokens"] or 0,
            "repetition_penalty": settings["repetition_penalty"] or 1.0,
            "no_repeat_ngram_size": settings["no_repeat_ngram_size"] or 0,
            "suppress_sequences": suppressed or None,
            "end_token": self.ends if len(self.ends) > 1 else None,
        }
        return settings, options

    def _limit(self, settings: dict[str, Any], source_length: int) -> int:
        """The most new tokens for a source, as in our `generate()`."""
        if settings["max_new_tokens"] is not None:
            limit = settings["max_new_tokens"]
        elif settings["max_length"] is not None:
            limit = settings["max_length"] - 1  # which counts the start token
        else:
            limit = source_length + settings["max_length_offset"] if settings["max_length_offset"] is not None else 20
        return max(1, min(limit, self.rows))

    def _search(
        self, sources: Sequence[list[str]], limit: int, options: dict[str, Any], settings: dict[str, Any]
    ) -> list[list[tuple[list[int], float]]]:
        """Of each source the ids of its candidates, end token included, and their scores, best first."""
        forced = settings["forced_prefix_ids"] or settings["forced_bos_token_id"]
        prefix = [self.target[one] for one in (forced if isinstance(forced, list) else [forced])] if forced else None
        pending = self.translator.translate_batch(
            list(sources),
            target_prefix=[prefix] * len(sources) if prefix else None,
            max_decoding_length=limit,
            max_input_length=0,
            return_end_token=True,
            return_scores=True,
            asynchronous=True,
            **{**options, "min_decoding_length": min(limit, options["min_decoding_length"])},
        )
        # A call that waits inside the library would hear of Ctrl-C only at its end.
        self.is_computing = True
        while not all(one.done() for one in pending):
            time.sleep(_POLL_SECONDS)
        self.is_computing = False
        groups = []
        alpha = 1.0 if settings["length_penalty"] is None else float(settings["length_penalty"])
        kind = settings["length_penalty_type"] or "power"
        for result in (one.result() for one in pending):
            group = []
            for pieces, score in zip(result.hypotheses, result.scores, strict=True):
                if score != score:
                    raise FloatingPointError(
                        "The model's scores are not numbers, so no translation can be chosen. A weight that is not "
                        "finite is the usual cause."
                    )
                if options["length_penalty"] == 0.0:
                    score /= length_penalty_factor(max(1, len(pieces)), alpha, kind)
                group.append(([self.ids[piece] for piece in pieces], score))
            groups.append(sorted(group, key=lambda one: -one[1]))
        return groups
