"""`import_model`: from another program's checkpoint to a folder of ours, checked before it takes its name."""

import gc
import importlib
import os
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration_vaswani import VaswaniConfig
from ..generation_vaswani import paper_generation_config
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..sharing.folders import whole_folder
from .foreign import ConversionError, ForeignModel, ImportOptions
from .proof import compare, default_count, faults, plain_program, proof_sources, quiet_library
from .recognition import another_kind
from .report import Report

# The words of the command line, and the modules that read such checkpoints.
KINDS = {
    "marian": "marian",
    "fairseq": "fairseq",
    "opennmt-py": "opennmt",
    "tensor2tensor": "tensor2tensor",
    "sockeye": "sockeye",
    "joeynmt": "joeynmt",
    "torch": "torch_state",
    "ctranslate2": "ctranslate2_import",
}


def reader(kind: str) -> ModuleType:
    """The module that reads checkpoints of one kind.

    Raises:
        ConversionError: there is no such kind.
    """
    if kind not in KINDS:
        raise ConversionError(f"There is no import of {kind!r}; there is one of {', '.join(KINDS)}.")
    return importlib.import_module(f".{KINDS[kind]}", __package__)


def import_model(
    kind: str,
    path: str | Path,
    out: str | Path,
    *,
    options: ImportOptions | None = None,
    sentences: Path | list[str] | None = None,
    count: int | None = None,
    overwrite: bool = False,
) -> Report:
    """Turn a checkpoint of another program into a folder that `from_pretrained` and `AutoTokenizer` load.

    The folder is loaded once more and compared with the original, where that runs here, else with a plain float64
    forward pass over the file's tensors, before it gets its name; a failed check leaves nothing.

    Args:
        kind (`str`): one of `KINDS`. path (`str` or `Path`): the checkpoint. out (`str` or `Path`): the folder to come.
        options (`ImportOptions`, *optional*): what the checkpoint does not say.
        sentences (`Path` or `list[str]`, *optional*): lines to check with; None: bundled ones, or random ids.
        count (`int`, *optional*): how many of them; None: 32, of a large model 6.
        overwrite (`bool`): replace a model that is in `out`.

    Returns:
        `Report`, also in the folder as `conversion.json`.

    Raises:
        ConversionError: the checkpoint cannot be read or represented, the folder is taken, or the check failed.
    """
    path, out = Path(path), Path(out)
    options = options or ImportOptions()
    module = reader(kind)
    refuse_unused(options, module.OPTIONS, kind)
    check_target(out, overwrite, path)
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    if count is not None and count < 1:
        raise ConversionError(f"At least one sentence is needed for the check, not {count}.")
    try:
        foreign: ForeignModel = module.read(path, options)
    except ConversionError as error:
        raise ConversionError(f"{error}{another_kind(path, kind)}") from error
    model = build(foreign, path)
    report = Report(
        direction="import",
        kind=kind,
        source=str(path),
        folder=str(out),
        tensors=foreign.tensors_read or len(foreign.tensors),
        parameters=model.num_parameters(),
        options=_changed(model.config),
        choices=foreign.choices,
        losses=foreign.losses,
    )
    with whole_folder(out) as folder, quiet_library():
        model.save_pretrained(folder)
        if foreign.tokenizer is not None:
            foreign.tokenizer.save_pretrained(folder)
        del model
        _prove(foreign, folder, report, sentences, count or default_count(report.parameters))
        report.save(folder)
    return report


def refuse_unused(options: ImportOptions, used: frozenset[str], kind: str) -> None:
    """An option that a reader does not look at is a mistake of the caller's.

    Raises:
        ConversionError: naming it and those that this kind has.
    """
    for one in fields(options):
        if getattr(options, one.name) != one.default and one.name not in used:
            known = ", ".join(sorted(used)) or "none"
            raise ConversionError(f"`{one.name}` means nothing to an import of {kind}; its options: {known}.")


def check_target(out: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuse, before any work, a folder that must not or cannot be written.

    Args:
        out (`Path`): the folder to come. overwrite (`bool`): whether an earlier conversion may be replaced.
        source (`Path`, *optional*): what is converted; it must not lie in a folder that would be replaced.

    Raises:
        ConversionError: it is there already, is no folder that a conversion made, holds what is converted, or its
            parent cannot be written to.
    """
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConversionError(f"{out} cannot be made: {parent} is not a folder that you may write to.")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConversionError(f"{out} is a file; name a folder.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConversionError(f"{out} is there already and not empty: name another folder, or ask for --overwrite.")
    if not (out / "conversion.json").is_file():
        raise ConversionError(f"{out} was not made by a conversion (it has no conversion.json), so it stays as it is.")
    full = out.resolve()
    if full == Path.cwd() or full in Path.cwd().parents:
        raise ConversionError(f"{out} is the current folder or above it, and is not replaced.")
    if source is not None and source.exists() and full in (source.resolve(), *source.resolve().parents):
        raise ConversionError(f"{out} holds what is to be converted, and is not replaced: name another folder.")


def build(foreign: ForeignModel, path: Path) -> VaswaniForConditionalGeneration:
    """A model whose weights are the foreign tensors themselves, not copies.

    Raises:
        ConversionError: names or shapes are not those that the configuration asks for.
    """
    try:
        config = VaswaniConfig(**foreign.config, dtype="float32")
    except (StrictDataclassError, TypeError) as error:
        raise ConversionError(f"{path}: {error}") from error
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(config)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    missing, extra = sorted(set(wanted) - set(foreign.tensors)), sorted(set(foreign.tensors) - set(wanted))
    if missing or extra:
        raise ConversionError(
            f"{path}: the tensors do not fit the hyper-parameters: missing {', '.join(missing) or 'none'}; left over "
            f"{', '.join(extra) or 'none'}."
        )
    for name, tensor in wanted.items():
        found = tuple(foreign.tensors[name].shape)
        if found != tuple(tensor.shape):
            raise ConversionError(f"{path}: {name} is {found}, the hyper-parameters ask for {tuple(tensor.shape)}.")
        if not torch.isfinite(foreign.tensors[name]).all():
            raise ConversionError(f"{path}: {name} holds a number that is not finite.")
    model.load_state_dict({n: t.contiguous() for n, t in foreign.tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    settings = paper_generation_config(config)
    for name, value in foreign.generation.items():
        setattr(settings, name, value)
    model.generation_config = settings
    return model.eval()


def _changed(config: VaswaniConfig) -> dict[str, Any]:
    """Fields of the architecture that are not the paper's base model's."""
    base = VaswaniConfig()
    names = [name for name in VaswaniConfig.__annotations__ if name not in ("use_cache", "is_encoder_decoder")]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(base, name)}


def _prove(foreign: ForeignModel, folder: Path, report: Report, sentences: Path | list[str] | None, count: int) -> None:
    """Load what was written and compare; the report gets the figures.

    Raises:
        ConversionError: a comparison came out wrong.
    """
    from transformers import AutoTokenizer

    program = foreign.program() if foreign.program is not None else None
    if program is not None:
        # The file's own tensors have done their part; large ones would be held three times.
        foreign.tensors.clear()
        gc.collect()
    tokenizer = AutoTokenizer.from_pretrained(folder) if foreign.tokenizer is not None else None
    model: Any = VaswaniForConditionalGeneration.from_pretrained(folder).eval()
    sources, origin = proof_sources(tokenizer, model.config, sentences, count)
    report.parities.append(compare(model, program or plain_program(model, foreign.tensors), sources, origin))
    wrong = [fault for parity in report.parities for fault in faults(parity)]
    if wrong:
        raise ConversionError(
            f"The converted model does not do what {report.parities[0].against} does: {'; '.join(wrong)}. Nothing was "
            "kept. Is a hyper-parameter wrong?\n" + report.text()
        )
