"""`export_model`: from a folder of ours to another program's, run there and compared before it takes its name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..sharing.folders import whole_folder
from .foreign import ConversionError, Program
from .importing import check_target
from .proof import LIMIT, TOLERANCE, compare, default_count, faults, own_search, proof_sources, quiet_library
from .reduced_formats import check_reduced
from .report import Parity, Report

# Formats that compute as float32 does, up to rounding of sums.
_FULL = (None, "float32")


@dataclass(frozen=True)
class Exporter:
    """One road out.

    Args:
        module (`str`): its `export(model, tokenizer, out[, quantization])` writes a folder and gives facts and losses.
        program: makes the `Program` of a written folder; it is given the facts of its export too.
        formats (`tuple`): values of `quantization`; None is the model's own precision.
        tolerance (`float`): of float32 logits.
        unlike (`tuple`): settings of `generate()` that the other side does not carry; the check does without them.
    """

    module: str
    program: Callable[[Path, dict[str, Any]], Program]
    formats: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    unlike: tuple[str, ...] = ()


def _ctranslate2(out: Path, facts: dict[str, Any]) -> Program:
    from .ctranslate2_file import Ct2Folder

    return Ct2Folder(out).program(limit=LIMIT, **facts["search"])


def _onnx(out: Path, facts: dict[str, Any]) -> Program:
    from .onnx_runtime import program

    return program(out, limit=LIMIT)


def _marian(out: Path, facts: dict[str, Any]) -> Program:
    from .marian import program

    return program(out)


KINDS = {
    "ctranslate2": Exporter(
        "ctranslate2_export",
        _ctranslate2,
        ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16"),
        unlike=(
            "forced_prefix_ids",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "no_repeat_ngram_size",
            "repetition_penalty",
            "begin_suppress_tokens",
        ),
    ),
    "onnx": Exporter("onnx_export", _onnx, ("float32", "int8")),
    # LayerNorm's epsilon is a constant of MarianMTModel's code, ten times the paper's models'.
    "marian": Exporter("marian_export", _marian, tolerance=1e-3, unlike=("forced_prefix_ids",)),
}


def export_model(
    kind: str,
    model: str | Path,
    out: str | Path,
    *,
    quantization: str | None = None,
    sentences: Path | list[str] | None = None,
    count: int | None = None,
    overwrite: bool = False,
) -> Report:
    """Write a model for another program, and compare both on real sentences before the folder gets its name.

    In float32, logits and greedy outputs must be equal; a reduced format must give the same greedy outputs but for a
    stated share (`reduced_formats`). A failed check leaves nothing.

    Args:
        kind (`str`): one of `KINDS`. model (`str` or `Path`): a folder, or a name on the Hub.
        out (`str` or `Path`): the folder to come.
        quantization (`str`, *optional*): precision of the weights; None: float32.
        sentences (`Path` or `list[str]`, *optional*): lines to check with; None: bundled ones, or random ids.
        count (`int`, *optional*): how many of them; None: 32, of a large model 6.
        overwrite (`bool`): replace a conversion that is in `out`.

    Returns:
        `Report`, also in the folder as `conversion.json`.

    Raises:
        ConversionError: the other program has no place for something, the folder is taken, or the check failed.
        ImportError: the other program's library is not installed.
    """
    out = Path(out)
    if kind not in KINDS:
        raise ConversionError(f"There is no export to {kind!r}; there is one to {', '.join(KINDS)}.")
    road = KINDS[kind]
    if quantization is not None and quantization not in road.formats:
        known = ", ".join(road.formats) or "none"
        raise ConversionError(f"`quantization` {quantization!r} means nothing to an export to {kind}; it has {known}.")
    if count is not None and count < 1:
        raise ConversionError(f"At least one sentence is needed for the check, not {count}.")
    check_target(out, overwrite, Path(model))
    loaded, tokenizer = load(str(model))
    module = importlib.import_module(f".{road.module}", __package__)
    report = Report(
        direction="export",
        kind=kind,
        source=str(model),
        folder=str(out),
        tensors=0,
        parameters=loaded.num_parameters(),
    )
    formats = {"quantization": None if quantization in _FULL and kind == "onnx" else quantization}
    with whole_folder(out) as folder, quiet_library():
        facts, report.losses = module.export(loaded, tokenizer, folder, **(formats if road.formats else {}))
        report.tensors, report.choices = facts.pop("tensors"), facts.pop("choices")
        report.options = facts
        count = count or default_count(report.parameters)
        sources, origin = proof_sources(tokenizer, loaded.config, sentences, count)
        program = road.program(folder, facts)
        for name in road.unlike:  # the report says that they are lost, or how to pass them
            setattr(loaded.generation_config, name, None)
        if quantization in _FULL:
            report.parities.append(compare(loaded, program, sources, origin, road.tolerance))
            wrong = faults(report.parities[0], road.tolerance)
            if wrong:
                raise ConversionError(
                    f"The exported model does not do what this one does: {'; '.join(wrong)}. Nothing was kept.\n"
                    + report.text()
                )
        else:
            _prove_reduced(loaded, program, sources, origin, str(quantization), report)
        report.save(folder)
    return report


def load(model: str) -> tuple[Any, Any]:
    """A model of ours in float32 and evaluation mode, and its tokenizer, None where its folder has none.

    Raises:
        ConversionError: there is no such model, or it is another architecture.
    """
    from transformers import AutoTokenizer

    try:
        loaded: Any = VaswaniForConditionalGeneration.from_pretrained(model, dtype="float32").eval()
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError, StrictDataclassError) as error:
        raise _unloadable(model, error) from error
    folder = Path(model)
    if folder.is_dir() and not (folder / "tokenizer_config.json").is_file():
        return loaded, None
    try:
        return loaded, AutoTokenizer.from_pretrained(model)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise _unloadable(f"The tokenizer of {model}", error) from error


def _unloadable(what: str, error: Exception) -> ConversionError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConversionError(f"{what} cannot be loaded: {said}")


def _prove_reduced(
    model: Any, program: Program, sources: list[list[int]], origin: str, name: str, report: Report
) -> None:
    """Greedy and beam outputs of a reduced format against the full model's; raises where the format spoils it."""
    assert program.search is not None
    full, reduced = own_search(model, sources, 1), program.search(sources, 1)
    judged = check_reduced(name, full, reduced, [LIMIT] * len(sources), model.state_dict())
    judged.require()
    ours, theirs = own_search(model, sources, 4), program.search(sources, 4)
    parity = Parity(program.name, len(sources), origin, greedy_equal=judged.equal, greedy_compared=judged.lines)
    parity.beam_equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    parity.beam_compared, parity.length_ratio = len(sources), judged.length_ratio
    report.parities.append(parity)
    report.choices.append(f"The check of the reduced format: {judged.line()}.")
