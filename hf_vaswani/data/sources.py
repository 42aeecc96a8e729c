"""Where parallel text comes from: one `CorpusSource` for each corpus, read by `read_source`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from .corpus import (
    CorpusError,
    NumberedPair,
    Pair,
    TextPath,
    bundled_pairs,
    clean_line,
    count_lines,
    read_lines,
    tsv_pairs,
    two_file_pairs,
)
from .progress import late_bar
from .tmx import tmx_pairs

# The fields that say what a source is, and those that only one kind of source reads.
_KINDS = ("src", "tsv", "jsonl", "tmx", "dataset", "bundled")
_OF_KIND = {
    "tgt": ("src",),
    "src_column": ("tsv",),
    "tgt_column": ("tsv",),
    "where": ("tsv",),
    "where_column": ("tsv",),
    "src_field": ("jsonl", "dataset"),
    "tgt_field": ("jsonl", "dataset"),
    "config": ("dataset",),
    "split": ("dataset",),
}
_ROWS_AT_ONCE = 1000


@strict
@dataclass
class CorpusSource:
    """One corpus: exactly one of `src` with `tgt`, `tsv`, `jsonl`, `tmx`, `dataset` and `bundled`.

    Files may be plain, ".gz" or ".zst", in UTF-8.

    Args:
        src, tgt (`str`): two files; line n of one belongs to line n of the other.
        tsv (`str`): a file of tab-separated columns. src_column, tgt_column (`int`): those of the text, from 0.
        where (`str`), where_column (`int`): read only the lines of the TSV file that hold `where` in that column.
        jsonl (`str`): a file with one JSON object a line. src_field, tgt_field (`str`): names of the texts in it, with
            dots between levels; None: the languages' codes, also inside a field "translation".
        tmx (`str`): a translation memory.
        dataset (`str`): a folder written by `save_to_disk`, or a name on the Hub; `config` and `split` choose in it,
            `src_field` and `tgt_field` name its text columns. None: a feature "translation", or columns named by code.
        bundled (`str`): "train", "valid" or "test" of the English-German corpus in the package.
        weight (`float`): how often each pair comes in an epoch; see `TokenBatchSampler`.
    """

    src: str | None = None
    tgt: str | None = None
    tsv: str | None = None
    src_column: int = 0
    tgt_column: int = 1
    where: str | None = None
    where_column: int = 0
    jsonl: str | None = None
    src_field: str | None = None
    tgt_field: str | None = None
    tmx: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    bundled: str | None = None
    weight: float | int = 1.0

    def validate_source(self) -> None:
        """Raises where the fields do not name one corpus."""
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            given = " and ".join(f"`{name}`" for name in kinds) or "none"
            raise ValueError(f"A corpus is one of {', '.join(_KINDS)}; got {given}.")
        if (self.src is None) != (self.tgt is None):
            raise ValueError("`src` needs `tgt`: the file with the translations.")
        for field in fields(self):
            if kinds[0] not in _OF_KIND.get(field.name, _KINDS) and getattr(self, field.name) != field.default:
                raise ValueError(f"`{field.name}` has no meaning for `{kinds[0]}`: leave it out.")
        if min(self.src_column, self.tgt_column, self.where_column) < 0 or self.src_column == self.tgt_column:
            raise ValueError(
                f"`src_column` ({self.src_column}) and `tgt_column` ({self.tgt_column}) must be two columns, from 0."
            )
        if self.where is None and self.where_column:
            raise ValueError("`where_column` needs `where`: the value that the lines must hold there.")
        if (self.src_field is None) != (self.tgt_field is None) or self.src_field == self.tgt_field is not None:
            raise ValueError("`src_field` and `tgt_field` must name two fields, or be left out together.")
        if self.bundled not in (None, "train", "valid", "test"):
            raise ValueError(f'`bundled` must be "train", "valid" or "test", got {self.bundled!r}.')
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"`weight` must be a number from 0 up, got {self.weight}.")

    @property
    def kind(self) -> str:
        """Which of the fields names the corpus: "src", "tsv", "jsonl", "tmx", "dataset" or "bundled"."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.kind == "src":
            return f"{self.src} + {self.tgt}"
        if self.kind == "dataset":
            return f"{self.dataset}, {self.split}"
        return f"bundled {self.bundled}" if self.kind == "bundled" else str(getattr(self, self.kind))


def read_source(
    source: CorpusSource, source_language: str | None = None, target_language: str | None = None
) -> Iterator[Pair]:
    """Yield the pairs of a corpus as they stand in it, blank ones too.

    Args:
        source (`CorpusSource`): the corpus.
        source_language, target_language (`str`, *optional*): codes such as "de", where the corpus names its texts so.

    Yields:
        `tuple[str, str]`: source, target.

    Raises:
        CorpusError: for text that cannot be used; file and line are named.
    """
    return ((src, tgt) for _, src, tgt in numbered_pairs(source, source_language, target_language))


def numbered_pairs(
    source: CorpusSource,
    source_language: str | None = None,
    target_language: str | None = None,
    removed: Counter[str] | None = None,
) -> Iterator[NumberedPair]:
    """As `read_source`, each pair after the number of its line (of a dataset, its row, from 1).

    Args:
        source, source_language, target_language: as for `read_source`.
        removed (`Counter`, *optional*): counts, by kind, what was removed from the text.
    """
    languages = source_language, target_language
    if source.src is not None and source.tgt is not None:
        return two_file_pairs(source.src, source.tgt, removed)
    if source.tsv is not None:
        columns = source.src_column, source.tgt_column
        return tsv_pairs(source.tsv, *columns, source.where, source.where_column, removed)
    if source.jsonl is not None:
        return _jsonl_pairs(source, languages, removed)
    if source.tmx is not None:
        if not (source_language and target_language):
            raise CorpusError(f"{source.tmx}: set `source_language` and `target_language` to read a TMX file.")
        return tmx_pairs(source.tmx, source_language, target_language, removed)
    if source.dataset is not None:
        return _dataset_pairs(source, languages, removed)
    return ((number, *pair) for number, pair in enumerate(bundled_pairs(*_bundled(source, languages)), start=1))


def pair_count(source: CorpusSource) -> int | None:
    """Pairs of a corpus where counting is cheap, else None.

    Raises:
        CorpusError: two files of unequal length, before any work is done on them.
    """
    if source.src is not None and source.tgt is not None:
        counts = count_lines(source.src), count_lines(source.tgt)
        if counts[0] != counts[1]:
            for _ in two_file_pairs(source.src, source.tgt):
                pass  # its message also names the place
        return counts[0]
    if source.kind in ("tsv", "jsonl") and source.where is None:
        return count_lines(getattr(source, source.kind))
    return len(_dataset(source)) if source.kind == "dataset" else None


# ---------------------------------------------------------------------- kinds
def _bundled(source: CorpusSource, languages: tuple[str | None, str | None]) -> tuple[str, str]:
    direction = "-".join(code or "" for code in languages) if any(languages) else "de-en"
    if direction not in ("de-en", "en-de"):
        raise CorpusError(f"The bundled corpus is English-German, not {direction}.")
    assert source.bundled is not None
    return source.bundled, direction


def _jsonl_pairs(
    source: CorpusSource, languages: tuple[str | None, str | None], removed: Counter[str] | None
) -> Iterator[NumberedPair]:
    assert source.jsonl is not None
    # Of the file itself nothing is counted: its lines are JSON, and what they spell is counted below.
    with closing(read_lines(source.jsonl)) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{source.jsonl}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{place}: no valid JSON ({error}). Each line must be one object.") from error
            if not isinstance(row, dict):
                raise CorpusError(f"{place}: each line must be one JSON object, got {line[:40]!r}.")
            yield number, *_texts(row, source, languages, place, removed)


def _texts(
    row: dict[str, Any],
    source: CorpusSource,
    languages: tuple[str | None, str | None],
    place: str,
    removed: Counter[str] | None,
) -> Pair:
    """Source and target of one row of named values."""
    if source.src_field is not None:
        names: tuple[str | None, str | None] = source.src_field, source.tgt_field
    else:
        names = languages
        if None in names:
            raise CorpusError(f"{place}: set `src_field` and `tgt_field`, or both languages, to find the texts.")
        if isinstance(row.get("translation"), dict):
            row = row["translation"]
    src, tgt = (_field(row, str(name), place) for name in names)
    return clean_line(src, removed), clean_line(tgt, removed)


def _field(row: dict[str, Any], name: str, place: str) -> str:
    value: Any = row
    for level in [name] if name in row else name.split("."):
        if not isinstance(value, dict) or level not in value:
            raise CorpusError(f"{place}: no field {name!r}; fields there: {', '.join(map(str, row))}.")
        value = value[level]
    if value is None:  # a missing translation is a blank one, which is left out and counted
        return ""
    if not isinstance(value, str):
        raise CorpusError(f"{place}: field {name!r} must be a text, got {type(value).__name__}.")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise CorpusError(f"{place}: field {name!r} holds half a character (a lone surrogate). Write the file again.")
    return value


def _dataset_pairs(
    source: CorpusSource, languages: tuple[str | None, str | None], removed: Counter[str] | None
) -> Iterator[NumberedPair]:
    dataset, number = _dataset(source), 0
    for rows in dataset.iter(batch_size=_ROWS_AT_ONCE):
        for values in zip(*rows.values(), strict=True):
            number += 1
            row = dict(zip(rows, values, strict=True))
            yield number, *_texts(row, source, languages, f"{source.name}, row {number}", removed)


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it, rather than it holding files of other kinds."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _dataset(source: CorpusSource) -> Any:
    """The `datasets.Dataset` of a source, memory-mapped."""
    import datasets

    name = str(source.dataset)
    try:
        is_saved = _is_saved(Path(name))
        if is_saved:
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, source.config, split=source.split)
    except Exception as error:  # of many kinds: missing, offline, gated, damaged
        where = "cannot be read" if os.path.exists(name) else "no such folder, and not to be had from the Hub"
        raise CorpusError(f"{name}: {where} ({' '.join(str(error).split())}).") from error
    if is_saved and source.config is not None:
        raise CorpusError(f"{name}: `config` has no meaning for a folder of `save_to_disk`: leave it out.")
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise CorpusError(f"{name}: no split {source.split!r}; splits there: {', '.join(found)}.")
        return found[source.split].with_format(None)
    # A single dataset may be one split that was saved alone; its name is then the only one that it can be asked for.
    if is_saved and source.split not in ("train", str(found.split)):
        raise CorpusError(f"{name}: no split {source.split!r}; the folder holds a single dataset. Leave `split` out.")
    return found.with_format(None)


# ---------------------------------------------------------------------- identity
def content_key(source: CorpusSource, source_language: str | None, target_language: str | None) -> dict[str, Any]:
    """What a corpus holds, as plain values: equal exactly where the pairs are equal, wherever the files lie.

    Choice: files count by all their bytes, as a change of one letter with the same size and date is a change.

    Args:
        source, source_language, target_language: as for `read_source`.

    Returns:
        `dict`: for JSON.
    """
    key: dict[str, Any] = {f.name: getattr(source, f.name) for f in fields(source) if f.name in _OF_KIND}
    key["kind"] = source.kind
    if source.kind in ("tmx", "bundled") or (source.src_field is None and source.kind in ("jsonl", "dataset")):
        key["languages"] = [source_language, target_language]
    if source.kind == "src":
        del key["tgt"]
        key["content"] = [_file_hash([path]) for path in (source.src, source.tgt) if path is not None]
    elif source.kind == "bundled":
        root = files("hf_vaswani") / "assets" / "tatoeba_mini"
        key["content"] = _file_hash([root / f"en-de.{source.bundled}.tsv.gz"])
    elif source.kind == "dataset":
        folder = Path(str(source.dataset))
        if folder.is_dir():
            paths = folder.rglob("*.arrow" if _is_saved(folder) else "*")
            # What the library computed from a dataset, it keeps beside it, in files of this name.
            kept = sorted(path for path in paths if path.is_file() and not path.name.startswith("cache-"))
            key["content"] = _file_hash(kept)
        else:
            key["content"] = [source.dataset, _dataset(source)._fingerprint]
    else:
        key["content"] = _file_hash([getattr(source, source.kind)])
    return key


def _file_hash(paths: Iterable[TextPath]) -> str:
    total = hashlib.sha256()
    for path in paths:
        where = Path(path) if isinstance(path, (str, os.PathLike)) else path
        one = hashlib.sha256()
        if isinstance(where, Path) and where.exists() and not (where.is_file() or where.is_dir()):
            raise CorpusError(f"{path}: a pipe or a device cannot be read more than once. Save its text to a file.")
        try:
            with where.open("rb") as stream, late_bar(f"checking {where.name}", "B") as bar:
                while chunk := stream.read(2**20):
                    one.update(chunk)
                    bar.update(len(chunk))
        except FileNotFoundError as error:
            raise CorpusError(f"{path}: no such file.") from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror or error}).") from error
        total.update(one.digest())
    return total.hexdigest()
