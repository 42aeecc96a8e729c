"""From corpora to token ids on disk: encoded in parallel, filtered, counted, and kept for the next run."""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .corpus import CorpusError, NumberedPair
from .prepared import PreparedCorpus, SourceReport, read_summary, write_summary
from .progress import SILENT_S, late_bar
from .sources import CorpusSource, content_key, numbered_pairs, pair_count

_VERSION = 1  # of what is kept; another one makes older caches unfit
_PAIRS_AT_ONCE = 10_000
_LETTERS_AT_ONCE = 4_000_000
_SHOWN_LINES = 5
# Two texts in which tokenizers differ: special tokens, accents, other scripts, blanks.
_SAMPLE = ("Aa bb, 12 </s> <pad> ß\u0301 日本", "  x\ty ")
BLANK, OVER_LENGTH, OFF_RATIO = "blank on one side", "over length", "off in ratio"


def prepare_corpus(
    sources: Sequence[CorpusSource],
    tokenizer: Any,
    cache: str | os.PathLike[str],
    *,
    source_language: str | None = None,
    target_language: str | None = None,
    max_length: int = 256,
    max_ratio: float | None = None,
    workers: int | None = None,
) -> PreparedCorpus:
    """Encode corpora into memory-mapped files, or take what an earlier call has left.

    Pairs with a blank side, over length, or off in ratio are left out and counted; see `PreparedCorpus.report`. A
    corpus is encoded again when a byte of it, the tokenizer or a limit has changed. Several processes may call this at
    the same time: one encodes, the others wait. A call that was cut short leaves nothing that a later one trusts.

    Args:
        sources (`Sequence[CorpusSource]`): corpora, mixed by their weights.
        tokenizer: a tokenizer of transformers that ends each sentence with its end token.
        cache: folder for the encoded text.
        source_language, target_language (`str`, *optional*): codes, see `read_source`.
        max_length (`int`): longest side in tokens, end token included.
        max_ratio (`float`, *optional*): largest ratio of the two sides' tokens, end tokens included; None: any.
        workers (`int`, *optional*): threads that encode; None: one per core that this process may use.

    Returns:
        `PreparedCorpus`.

    Raises:
        CorpusError: a corpus cannot be read, is empty or loses every pair, none has a weight, or the folder cannot be
            written.
        ValueError: no source, a limit that makes no sense, or a tokenizer without end token.
    """
    if not sources:
        raise ValueError("There is no corpus to prepare.")
    if max_length < 1 or not (max_ratio is None or max_ratio >= 1) or (workers is not None and workers < 1):
        raise ValueError(f"`max_length` ({max_length}), `max_ratio` ({max_ratio}), `workers` ({workers}): from 1 up.")
    if not any(source.weight for source in sources):
        raise CorpusError("Every corpus has the weight 0: no pair would ever come.")
    encoder = _Encoder(tokenizer, max_length, max_ratio)
    folders, reports = [], []
    for source in sources:
        key = {
            "version": _VERSION,
            "encoder": encoder.key(),
            "corpus": content_key(source, source_language, target_language),
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        folder = Path(cache) / name
        report = read_summary(folder)
        if report is None:
            with _locked(folder, source.name):
                # Another process may have encoded it while this one waited.
                report = read_summary(folder)
                if report is None:
                    languages = source_language, target_language
                    report = _encode(source, languages, encoder, folder, workers or _core_count())
                    _say(str(report))
                else:
                    _say(f"{source.name}: encoded by another process")
        else:
            _say(f"{source.name}: encoded before, {report.kept_count:,} pairs of {report.read_count:,}")
        report.name, report.weight = source.name, float(source.weight)
        folders.append(folder)
        reports.append(report)
    return PreparedCorpus(folders, reports)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------- encoding
class _Encoder:
    """Turns chunks of numbered pairs into Arrow batches; threads may share one."""

    def __init__(self, tokenizer: Any, max_length: int, max_ratio: float | None):
        self.tokenizer, self.max_length, self.max_ratio = tokenizer, max_length, max_ratio
        ids = tokenizer(["Aa"])["input_ids"][0]
        end = getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError("The tokenizer has no end token: a model would never learn where a translation ends.")
        if ids[-1:] != [end]:
            raise ValueError(f"The tokenizer does not close a sentence with its end token (id {end}): it gave {ids}.")
        self._backend: Any = None

    def key(self) -> dict[str, Any]:
        """All that the ids and the choice of pairs depend on, besides the text."""
        # A tokenizer can keep a part of its work out of its own description, which a sample of its work then shows.
        sample = list(_SAMPLE)
        shown = {
            "class": type(self.tokenizer).__name__,
            "sample": [self.tokenizer(sample)["input_ids"], self.tokenizer(text_target=sample)["input_ids"]],
            "limits": [self.max_length, None if self.max_ratio is None else float(self.max_ratio)],
        }
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            shown["backend"] = hashlib.sha256(backend.to_str().encode()).hexdigest()
        else:  # written in Python: it has no such description, and rare words of two vocabularies may share an id
            vocabulary = sorted(self.tokenizer.get_vocab().items())
            shown["vocabulary"] = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
        return shown

    def settle(self, pairs: list[NumberedPair]) -> bool:
        """Choose the way of encoding by a sample of the text; whether threads may share it.

        The library below encodes twice as fast as the call around it, and lets other threads run. It is used where it
        gives the same ids, which a tokenizer with another form of targets, for example, does not.
        """
        self._backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            src, tgt = ([*(pair[side] for pair in pairs), *_SAMPLE] for side in (1, 2))
            # verbose=False: a text over the model's length is filtered here, and needs no warning.
            called = self.tokenizer(src, verbose=False)["input_ids"]
            called = called + self.tokenizer(text_target=tgt, verbose=False)["input_ids"]
            if called != [one.ids for one in self._backend.encode_batch_fast(src + tgt)]:
                self._backend = None
        return self._backend is not None

    def __call__(self, chunk: list[NumberedPair]) -> tuple[Any, np.ndarray, dict[str, list[int]]]:
        """An Arrow batch, its lengths [2, pairs], and the lines that were dropped, by reason."""
        import pyarrow as pa

        dropped: dict[str, list[int]] = {BLANK: [], OVER_LENGTH: [], OFF_RATIO: []}
        full = []
        for pair in chunk:
            if pair[1].strip() and pair[2].strip():
                full.append(pair)
            else:
                dropped[BLANK].append(pair[0])
        src_ids: list[list[int]] = []
        tgt_ids: list[list[int]] = []
        if full:
            if self._backend is not None:
                encoded = self._backend.encode_batch_fast([src for _, src, _ in full] + [tgt for _, _, tgt in full])
                ids = [one.ids for one in encoded]
                src_ids, tgt_ids = ids[: len(full)], ids[len(full) :]
            else:
                src_ids = self.tokenizer([src for _, src, _ in full], verbose=False)["input_ids"]
                tgt_ids = self.tokenizer(text_target=[tgt for _, _, tgt in full], verbose=False)["input_ids"]
        lengths = np.array([[len(ids) for ids in side] for side in (src_ids, tgt_ids)], np.int32).reshape(2, -1)
        is_over = (lengths > self.max_length).any(0)
        is_off = np.zeros_like(is_over)
        if self.max_ratio is not None:
            is_off = ~is_over & (lengths.max(0) > self.max_ratio * lengths.min(0))
        for reason, places in ((OVER_LENGTH, is_over), (OFF_RATIO, is_off)):
            dropped[reason] = [full[i][0] for i in np.flatnonzero(places)]
        kept = np.flatnonzero(~is_over & ~is_off)
        kind = pa.list_(pa.int32())
        columns = [pa.array([side[i] for i in kept], type=kind) for side in (src_ids, tgt_ids)]
        return pa.record_batch(columns, names=["input_ids", "labels"]), lengths[:, kept], dropped


def _encode(
    source: CorpusSource, languages: tuple[str | None, str | None], encoder: _Encoder, folder: Path, workers: int
) -> SourceReport:
    """Encode one corpus into its folder, which appears only when it is whole."""
    import pyarrow as pa

    total = pair_count(source)  # also refuses unequal files before the work
    report, removed = SourceReport(source.name), Counter[str]()
    partial = folder.with_name(folder.name + ".partial")
    lengths = [np.zeros((2, 0), np.int32)]
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")])
    try:
        # A lock is held, so whatever lies here was left by a process that is gone.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        pairs = numbered_pairs(source, *languages, removed)
        with (
            late_bar("encoding", "pair", total) as bar,
            pa.OSFile(str(partial / "pairs.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            for size, (batch, widths, dropped) in _encoded(_chunks(pairs), encoder, workers):
                writer.write_batch(batch)
                lengths.append(widths)
                report.read_count += size
                report.kept_count += batch.num_rows
                for reason, lines in dropped.items():
                    if lines:
                        report.dropped[reason] = report.dropped.get(reason, 0) + len(lines)
                        shown = report.first_lines.setdefault(reason, [])
                        shown += lines[: _SHOWN_LINES - len(shown)]
                bar.update(size)
        report.removed = dict(removed)
        _refuse_nothing(report)
        np.save(partial / "lengths.npy", np.concatenate(lengths, axis=1))
        write_summary(partial, report)
        for path in partial.iterdir():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        partial.rename(folder)
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _cannot_write(cache: Path, error: OSError) -> CorpusError:
    return CorpusError(
        f"{cache}: cannot keep the encoded text ({error.strerror or error}). Make room, or choose another cache folder."
    )


def _refuse_nothing(report: SourceReport) -> None:
    if not report.read_count:
        raise CorpusError(f"{report.name}: the corpus is empty.")
    if not report.kept_count:
        raise CorpusError(f"No pair is left to train on. {report}.")


def _chunks(pairs: Iterator[NumberedPair]) -> Iterator[list[NumberedPair]]:
    """Lists of pairs, each so small that several of them fit into memory, whatever the length of a line."""
    chunk: list[NumberedPair] = []
    letters = 0
    for pair in pairs:
        chunk.append(pair)
        letters += len(pair[1]) + len(pair[2])
        if len(chunk) >= _PAIRS_AT_ONCE or letters >= _LETTERS_AT_ONCE:
            yield chunk
            chunk, letters = [], 0
    if chunk:
        yield chunk


def _encoded(
    chunks: Iterator[list[NumberedPair]], encoder: _Encoder, workers: int
) -> Iterator[tuple[int, tuple[Any, np.ndarray, dict[str, list[int]]]]]:
    """The size and the encoding of each chunk, in order; at most two chunks a thread are in memory."""
    for chunk in chunks:
        can_share = encoder.settle(chunk[:100])
        break
    else:
        return
    if not can_share or workers == 1:
        yield from ((len(one), encoder(one)) for one in _chain(chunk, chunks))
        return
    with _own_threads(), closing(_in_order(encoder, _chain(chunk, chunks), workers)) as results:
        yield from results


def _chain(first: Any, others: Iterable[Any]) -> Iterator[Any]:
    yield first
    yield from others


def _in_order(
    function: Callable[[list[NumberedPair]], Any], chunks: Iterator[list[NumberedPair]], workers: int
) -> Generator[tuple[int, Any], None, None]:
    executor = ThreadPoolExecutor(workers)
    waiting: deque[tuple[int, Any]] = deque()
    try:
        for chunk in chunks:
            waiting.append((len(chunk), executor.submit(function, chunk)))
            if len(waiting) >= 2 * workers:
                size, future = waiting.popleft()
                yield size, future.result()
        while waiting:
            size, future = waiting.popleft()
            yield size, future.result()
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _own_threads() -> Iterator[None]:
    """Keep the tokenizer library from starting threads of its own, beside the workers."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


# ---------------------------------------------------------------------- one process at a time
@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Only one process of all encodes into this folder; the others wait, without a limit."""
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder) + ".lock")
        try:
            lock.acquire(timeout=SILENT_S)
        except Timeout:
            _say(f"{name}: waiting for another process that encodes it")
            lock.acquire()
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    try:
        yield
    finally:
        lock.release()
