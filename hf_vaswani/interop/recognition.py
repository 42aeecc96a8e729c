"""What another program's files look like, for the sentence behind a refusal; nothing of them is run."""

import json
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

# A checkpoint of torch by words that stand in it: all of them, from which program.
_WORDS = (
    ({"model_state", "optimizer_state"}, "joeynmt"), ({"vocab", "opt", "generator"}, "opennmt-py"),
    ({"embedding_source.embedding.weight"}, "sockeye"), ({"model", "args"}, "fairseq"), ({"model", "cfg"}, "fairseq"),
)  # fmt: skip
_NAMES = {
    "marian": "Marian", "fairseq": "fairseq", "opennmt-py": "OpenNMT-py", "tensor2tensor": "Tensor2Tensor",
    "sockeye": "Sockeye", "joeynmt": "JoeyNMT", "ctranslate2": "CTranslate2",
}  # fmt: skip
_MOST_OPERATIONS = 20_000


def another_kind(path: Path, kind: str) -> str:
    """A sentence that tells whose model this is, with a blank before it; empty where it is not known or of `kind`.

    Args:
        path (`Path`): a file or a folder that a reader refused. kind (`str`): that reader's.
    """
    try:
        found = recognised(path)
    except Exception:  # a guess is not worth an error of its own
        return ""
    if found is None or found == kind:
        return ""
    return f" {path} looks like a model of {_NAMES[found]}: try the kind {found}."


def recognised(path: Path) -> str | None:
    """The kind of import that a file or a folder looks made for; None where nothing tells."""
    if path.is_dir():
        signs: tuple[tuple[str, Callable[[Path], bool]], ...] = (
            ("ctranslate2", lambda p: (p / "model.bin").is_file() and _any(p, "*vocabulary.*")),
            ("marian", _is_marian),
            ("joeynmt", lambda p: (p / "config.yaml").is_file() and _any(p, "*.ckpt")),
            ("sockeye", lambda p: (p / "config").is_file() and _any(p, "params.*")),
            ("fairseq", lambda p: _any(p, "dict.*.txt") and _any(p, "*.pt")),
            ("tensor2tensor", lambda p: _any(p, "*.ckpt*.index")),
        )
        return next((kind for kind, is_one in signs if is_one(path)), None)
    if path.name.endswith(".index") and ".ckpt" in path.name:
        return "tensor2tensor"
    if not path.is_file():
        return None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            if "special:model.yml.npy" in entries:
                return "marian"
            pickled = next((name for name in entries if name.endswith("/data.pkl")), None)
            if pickled is not None:
                with archive.open(pickled) as file:
                    words = _words(pickletools.genops(file))
                return next((kind for wanted, kind in _WORDS if wanted <= words), None)
        return None
    # A file that says nothing by itself belongs to the folder that it lies in.
    return recognised(path.parent) if path.name in ("model.bin", "config.json", "model.safetensors") else None


def _any(folder: Path, pattern: str) -> bool:
    return any(True for _ in folder.glob(pattern))


def _is_marian(folder: Path) -> bool:
    if (folder / "config.json").is_file():
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == "marian"
    return _any(folder, "*.npz")


def _words(operations: Iterable[tuple]) -> set[str]:
    """The strings of a pickle, taken from its bytes."""
    return {argument for _, argument, _ in islice(operations, _MOST_OPERATIONS) if isinstance(argument, str)}
