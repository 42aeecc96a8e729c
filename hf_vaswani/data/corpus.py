"""Reading parallel text: lines and pairs of lines, with every fault named by file and line.

A line ends at "\\n" and nowhere else. "\\r\\n" counts as "\\n", and a last line without "\\n" is a line.

Choice: a carriage return inside a line (not before "\\n") becomes a blank. It neither ends the line, which would shift
every later pair, nor reaches the model as a character of the text.
"""

import gzip
import os
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

Pair: TypeAlias = tuple[str, str]
TextPath: TypeAlias = str | os.PathLike[str] | Traversable

_BOM = b"\xef\xbb\xbf"


class CorpusError(ValueError):
    """Text that cannot be used as it is; the message names the file, the line and the way out."""


def decode_lines(stream: Iterable[bytes], name: str) -> Generator[str, None, None]:
    """Yield the lines of a binary stream as text, as soon as each is complete.

    Args:
        stream (iterable of `bytes`): a file open for reading bytes. name (`str`): what errors call it.

    Yields:
        `str`: one line without its end. A byte order mark before the first line is dropped.

    Raises:
        CorpusError: for bytes that are not UTF-8, with the line and the byte.
    """
    # A binary stream splits at b"\n" alone; a text stream would also split at "\r", and str.splitlines at ten others.
    for number, raw in enumerate(stream, start=1):
        if number == 1 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{name}, line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. "
                "Convert the file to UTF-8, for example with iconv."
            ) from error
        yield line.removesuffix("\n").removesuffix("\r").replace("\r", " ")


def read_lines(path: TextPath) -> Generator[str, None, None]:
    """Yield the lines of a text file, plain or gzip.

    Args:
        path: a path or a resource of `importlib.resources`; a name that ends in ".gz" is unpacked on the way.

    Yields:
        `str`: one line without its end.

    Raises:
        CorpusError: the file is missing, unreadable, not gzip although named so, cut short, or not UTF-8.
    """
    where: Path | Traversable = Path(path) if isinstance(path, (str, os.PathLike)) else path
    name = str(where)
    try:
        with where.open("rb") as raw:
            if where.name.endswith(".gz"):
                with gzip.open(raw, "rb") as unpacked:
                    yield from decode_lines(unpacked, name)
            else:
                yield from decode_lines(raw, name)
    except FileNotFoundError as error:
        raise CorpusError(f"{name}: no such file.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{name}: the file is not a whole gzip file ({error}). Fetch or pack it again.") from error
    except OSError as error:
        raise CorpusError(f"{name}: cannot be read ({error.strerror or error}).") from error


def read_tsv(path: TextPath, src_column: int = 0, tgt_column: int = 1) -> Iterator[Pair]:
    """Yield the pairs of a file with tab-separated columns.

    Args:
        path: plain or ".gz". src_column, tgt_column (`int`): columns that hold source and target, from 0.

    Yields:
        `tuple[str, str]`: source, target.

    Raises:
        CorpusError: a line has another number of columns than line 1, or too few; the file and line are named.
    """
    needed = max(src_column, tgt_column) + 1
    expected: int | None = None
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) < needed:
            raise CorpusError(
                f"{path}, line {number}: found {len(columns)} tab-separated column(s), needed at least {needed}."
            )
        expected = expected or len(columns)
        if len(columns) != expected:
            raise CorpusError(
                f"{path}, line {number}: found {len(columns)} tab-separated columns where line 1 has {expected}. "
                "A tab inside a sentence must be made a blank."
            )
        yield columns[src_column], columns[tgt_column]


def read_two_files(src_path: TextPath, tgt_path: TextPath) -> Iterator[Pair]:
    """Yield the pairs of two files in which line n of one belongs to line n of the other.

    Args:
        src_path, tgt_path: plain or ".gz", each of its own kind.

    Yields:
        `tuple[str, str]`: source, target.

    Raises:
        CorpusError: the files differ in their number of lines; both files and both counts are named.
    """
    with closing(read_lines(src_path)) as src_lines, closing(read_lines(tgt_path)) as tgt_lines:
        src_count = tgt_count = 0
        for src, tgt in zip_longest(src_lines, tgt_lines):
            src_count += src is not None
            tgt_count += tgt is not None
            # Past the end of the shorter file the rest is only counted, for the message.
            if src is not None and tgt is not None:
                yield src, tgt
    if src_count != tgt_count:
        raise CorpusError(
            f"{src_path} has {src_count} lines, {tgt_path} has {tgt_count}: line n of one must belong to line n of "
            "the other. Find where they part before training."
        )


def bundled_pairs(split: str, direction: str = "de-en") -> list[Pair]:
    """The corpus inside the package: 19,000 short, clean English-German pairs of tatoeba.org, and 500 + 500 held out.

    Args:
        split (`str`): "train", "valid" or "test". direction (`str`): "de-en" or "en-de".

    Returns:
        `list[tuple[str, str]]`: source, target.

    Raises:
        ValueError: for another split or direction.
    """
    if split not in ("train", "valid", "test") or direction not in ("de-en", "en-de"):
        raise ValueError(f"No bundled corpus {split!r}, {direction!r}: train, valid or test; de-en or en-de.")
    path = files("hf_vaswani") / "assets" / "tatoeba_mini" / f"en-de.{split}.tsv.gz"
    src_column, tgt_column = (0, 1) if direction == "en-de" else (1, 0)
    return list(read_tsv(path, src_column, tgt_column))
