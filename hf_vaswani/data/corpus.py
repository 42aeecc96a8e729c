"""Reading parallel text: lines and pairs of lines, with every fault named by file and line.

A line ends at "\\n" and nowhere else. "\\r\\n" counts as "\\n", and a last line without "\\n" is a line.

Choice: a carriage return inside a line (not before "\\n") becomes a blank. It neither ends the line, which would shift
every later pair, nor reaches the model as a character of the text. So do control characters that are white space, such
as a form feed; other control characters, and byte order marks at the start of any line, are removed. Tabs stay.
"""

import gzip
import io
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from .progress import late_bar

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

Pair: TypeAlias = tuple[str, str]
NumberedPair: TypeAlias = tuple[int, str, str]  # the line, source, target
TextPath: TypeAlias = str | os.PathLike[str] | Traversable

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the tab and the line feed
_BLANK_CONTROL = re.compile("[\x0b-\x0d\x1c-\x1f\x85]")
# First bytes of what is no plain text, in words, and the name that says so where `read_lines` knows one.
_CONTENTS = (
    (b"\x1f\x8b", "gzip data", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd data", ".zst"),
    (b"\xfd7zXZ", "xz data", None),
    (b"PK\x03\x04", "a zip archive", None),
    (b"\xff\xfe", "UTF-16 text", None),
    (b"\xfe\xff", "UTF-16 text", None),
)
_LOOK_AT = 8192  # bytes that tell text from binary data


class CorpusError(ValueError):
    """Text that cannot be used as it is; the message names the file, the line and the way out."""


# ---------------------------------------------------------------------- lines
def clean_line(line: str, removed: Counter[str] | None = None) -> str:
    """A line without what is no text: byte order marks at its start, and control characters.

    Args:
        line (`str`): without its end; line feeds and carriage returns inside become blanks.
        removed (`Counter`, *optional*): what was taken out is counted here, by kind.

    Returns:
        `str`: the line; usually the same object.
    """
    if line.startswith("\ufeff"):
        bare = line.lstrip("\ufeff")
        if removed is not None:
            removed["byte order marks"] += len(line) - len(bare)
        line = bare
    if "\n" in line or "\r" in line:
        line = line.replace("\r\n", " ").replace("\r", " ").replace("\n", " ")
    if _CONTROL.search(line):
        if removed is not None:
            removed["control characters"] += len(_CONTROL.findall(line))
        line = _CONTROL.sub("", _BLANK_CONTROL.sub(" ", line))
    return line


def decode_lines(stream: Iterable[bytes], name: str, removed: Counter[str] | None = None) -> Generator[str, None, None]:
    """Yield the lines of a binary stream as text, as soon as each is complete.

    Args:
        stream (iterable of `bytes`): a file open for reading bytes. name (`str`): what errors call it.
        removed (`Counter`, *optional*): counts byte order marks and control characters that were removed.

    Yields:
        `str`: one line without its end, see `clean_line`.

    Raises:
        CorpusError: for bytes that are not UTF-8, with the line and the byte.
    """
    return (clean_line(line, removed) for line in decode_as_written(stream, name))


def decode_as_written(stream: Iterable[bytes], name: str) -> Generator[str, None, None]:
    """As `decode_lines`, but nothing is taken out of a line except its end."""
    # A binary stream splits at b"\n" alone; a text stream would also split at "\r", and str.splitlines at ten others.
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{name}, line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. "
                "Convert the file to UTF-8, for example with iconv."
            ) from error
        yield line.removesuffix("\n").removesuffix("\r")


def read_lines(path: TextPath, removed: Counter[str] | None = None) -> Generator[str, None, None]:
    """Yield the lines of a text file, plain, gzip or zstd.

    Args:
        path: a path or a resource of `importlib.resources`; a name that ends in ".gz" or ".zst" is unpacked on the way.
        removed (`Counter`, *optional*): counts byte order marks and control characters that were removed.

    Yields:
        `str`: one line without its end.

    Raises:
        CorpusError: the file is missing, unreadable, not what its name says, cut short, binary, or not UTF-8.
    """
    with open_text(path) as stream:
        yield from decode_lines(stream, str(path), removed)


def count_lines(path: TextPath) -> int:
    """The number of lines that `read_lines` would give, without decoding them.

    Args:
        path: as for `read_lines`.

    Returns:
        `int`.

    Raises:
        CorpusError: as for `read_lines`, except for bytes that are not UTF-8.
    """
    count, last = 0, b"\n"
    with open_text(path) as stream, late_bar(f"counting lines of {Path(str(path)).name}", "B") as bar:
        while chunk := stream.read(2**20):
            count += chunk.count(b"\n")
            last = chunk[-1:]
            bar.update(len(chunk))
    return count + (last != b"\n")


@contextmanager
def open_text(path: TextPath) -> Iterator[Any]:
    """The unpacked bytes of a text file, to read in a `with` statement; faults are raised as `CorpusError`.

    Args:
        path: as for `read_lines`.

    Yields:
        a binary stream.
    """
    where: Path | Traversable = Path(path) if isinstance(path, (str, os.PathLike)) else path
    packing = next((name for name in (".gz", ".zst") if where.name.endswith(name)), None)
    try:
        with where.open("rb") as raw:
            stream: Any = raw if hasattr(raw, "peek") else io.BufferedReader(raw)  # type: ignore[type-var]
            if packing is None:
                _refuse_other_content(stream.peek(_LOOK_AT), path)
                yield stream
            else:
                with _unpacked(stream, packing) as text:
                    _refuse_other_content(text.peek(_LOOK_AT), path)
                    yield text
    except FileNotFoundError as error:
        raise CorpusError(f"{path}: no such file.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path}: the file is not a whole gzip file ({error}). Fetch or pack it again.") from error
    except OSError as error:
        if packing == ".zst" and error.errno is None:  # a fault of the content, not of the disk
            raise CorpusError(
                f"{path}: the file is not a whole zstd file ({error}). Fetch or pack it again."
            ) from error
        raise CorpusError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _unpacked(stream: Any, packing: str) -> Any:
    if packing == ".gz":
        return gzip.open(stream, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd"), 2**18)


def _refuse_other_content(head: bytes, path: TextPath) -> None:
    """Raises where the first bytes of a file are no text."""
    head = head[:_LOOK_AT]
    for magic, content, suffix in _CONTENTS:
        if head.startswith(magic):
            way_out = f"Give it a name that ends in {suffix}." if suffix else "Convert it to plain UTF-8 text first."
            raise CorpusError(f"{path}: the file holds {content}, not plain text. {way_out}")
    # Stray control characters in a text are few; in numbers, sounds and pictures they are many.
    strange = sum(byte < 9 or 13 < byte < 27 for byte in head)
    if strange >= 32 and strange > len(head) / 20:
        raise CorpusError(f"{path}: the file holds binary data, not text. Check the path.")


# ---------------------------------------------------------------------- pairs
def read_tsv(path: TextPath, src_column: int = 0, tgt_column: int = 1) -> Iterator[Pair]:
    """Yield the pairs of a file with tab-separated columns.

    Args:
        path: plain, ".gz" or ".zst". src_column, tgt_column (`int`): columns that hold source and target, from 0.

    Yields:
        `tuple[str, str]`: source, target.

    Raises:
        CorpusError: a line has another number of columns than line 1, or too few; the file and line are named.
    """
    return ((src, tgt) for _, src, tgt in tsv_pairs(path, src_column, tgt_column))


def tsv_pairs(
    path: TextPath,
    src_column: int,
    tgt_column: int,
    where: str | None = None,
    where_column: int = 0,
    removed: Counter[str] | None = None,
) -> Iterator[NumberedPair]:
    """As `read_tsv`, each pair after the number of its line; only of lines whose `where_column` holds `where`."""
    needed = max(src_column, tgt_column, where_column if where is not None else 0) + 1
    expected: int | None = None
    others: dict[str, None] = {}
    is_found = False
    for number, line in enumerate(read_lines(path, removed), start=1):
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
        if where is None or columns[where_column] == where:
            is_found = True
            yield number, columns[src_column], columns[tgt_column]
        elif not is_found and len(others) < 5:
            others[columns[where_column]] = None
    if others and not is_found:
        raise CorpusError(
            f"{path}: column {where_column} never holds {where!r}, but for example {', '.join(map(repr, others))}."
        )


def read_two_files(src_path: TextPath, tgt_path: TextPath) -> Iterator[Pair]:
    """Yield the pairs of two files in which line n of one belongs to line n of the other.

    Args:
        src_path, tgt_path: plain, ".gz" or ".zst", each of its own kind.

    Yields:
        `tuple[str, str]`: source, target.

    Raises:
        CorpusError: the files differ in their number of lines (both files, both counts, and the first line in which
            they differ in kind are named), or every line is the same in both.
    """
    return ((src, tgt) for _, src, tgt in two_file_pairs(src_path, tgt_path))


def two_file_pairs(
    src_path: TextPath, tgt_path: TextPath, removed: Counter[str] | None = None
) -> Iterator[NumberedPair]:
    """As `read_two_files`, each pair after the number of its line."""
    with closing(read_lines(src_path, removed)) as src_lines, closing(read_lines(tgt_path, removed)) as tgt_lines:
        yield from paired_lines(src_lines, tgt_lines, src_path, tgt_path)


def paired_lines(
    src_lines: Iterable[str], tgt_lines: Iterable[str], src_path: TextPath, tgt_path: TextPath
) -> Iterator[NumberedPair]:
    """As `two_file_pairs`, of lines that were read already; the paths are for messages."""
    src_count = tgt_count = 0
    place: str | None = None
    are_equal = True
    for src, tgt in zip_longest(src_lines, tgt_lines):
        src_count += src is not None
        tgt_count += tgt is not None
        # Past the end of the shorter file the rest is only counted, for the message.
        if src is not None and tgt is not None:
            place = place or _difference_in_kind(src_count, src, tgt, src_path, tgt_path)
            are_equal = are_equal and src == tgt
            yield src_count, src, tgt
    if src_count != tgt_count:
        place = place or "Up to the end of the shorter file no line is blank or much longer in one file alone"
        raise CorpusError(
            f"{src_path} has {src_count} lines, {tgt_path} has {tgt_count}: line n of one must belong to line n of "
            f"the other. {place}. Find where they part."
        )
    if src_count and are_equal:
        raise CorpusError(f"{src_path} and {tgt_path} hold the same text; one of them must be the translation.")


def _difference_in_kind(number: int, src: str, tgt: str, src_path: TextPath, tgt_path: TextPath) -> str | None:
    """Why two lines hardly belong together, in words; None where they may."""
    start = f"The first line in which they differ in kind is line {number}"
    is_blank = not src.strip(), not tgt.strip()
    if is_blank[0] != is_blank[1]:
        return f"{start}, blank in {src_path if is_blank[0] else tgt_path} alone"
    # Translations into a denser script are up to five times shorter.
    longer = max(len(src), len(tgt))
    if longer > 40 and longer > 6 * min(len(src), len(tgt)):
        return f"{start}, with {len(src)} letters in {src_path} and {len(tgt)} in {tgt_path}"
    return None


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
