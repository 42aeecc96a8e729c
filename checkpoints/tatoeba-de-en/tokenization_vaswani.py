"""A lossless subword tokenizer: one joint byte-level BPE for source and target, trained on raw text."""

import gzip
import hashlib
import heapq
import importlib
import io
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging, to_py_obj

logger = logging.get_logger(__name__)

# Their order gives the ids 0, 1 and 2 that VaswaniConfig expects.
_SPECIAL_TOKENS = ("<pad>", "</s>", "<s>")
_NORMALIZERS = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}
# Where no piece may cross. In turn: a run of letters with their combining marks and joiners, each digit alone (numbers
# are copied in translation), a run of other signs with theirs, and blanks, of which a word takes the last one along.
_LETTERS = r" ?[\p{L}\p{M}][\p{L}\p{M}\x{200C}\x{200D}]*"
_WORDS = _LETTERS + r"| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}][^\s\p{L}\p{N}]*|\s+(?!\S)|\s+"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())  # 256 letters, one for each byte
# What no piece is learned from: the byte order mark, and control characters but tab, line feed and carriage return.
_STRAY = re.compile("[\ufeff\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Measured bytes that a held text takes beside itself, and the trainer for each byte of a word that it has not met yet.
_TEXT_COST, _WORD_BYTE_COST = 150, 120
# The trainer's time grows with the square of a word's length, and one of 100,000 letters would take a minute.
_LONG_RUN = 128
_LONG_RUNS = re.compile(rf"\S{{{_LONG_RUN}}}(?=\S)|\s{{{_LONG_RUN}}}(?=\s)")


class VaswaniTokenizer(PreTrainedTokenizerFast):
    r"""Raw text to ids and back, without loss, by one byte-level BPE vocabulary shared by source and target.

    `decode(encode(text)) == text` for every Unicode string, unless a normalization was asked for; no token is unknown,
    as every byte is a piece. Text that spells a special token, such as "</s>", is text; a call whose text carries
    control tokens on purpose, such as a language tag, passes `split_special_tokens=False`.

    Args:
        pad_token, eos_token, bos_token (`str`): control tokens; the end token closes every encoded text.
        split_special_tokens (`bool`): whether text that spells a special token is ordinary text.
        training_report (`dict`, *optional*): what `train` read and used.
        kwargs: as for `PreTrainedTokenizerFast`: `tokenizer_object`, `tokenizer_file`, or `vocab` and `merges`.

    Source: Vaswani et al. 2017, section 5.1: one shared BPE vocabulary of about 37,000 pieces for English-German.
    Choice: learned on bytes of raw text; the paper does not say how its text was split into words.
    """

    def __init__(
        self,
        *,
        pad_token: str | AddedToken = "<pad>",
        eos_token: str | AddedToken = "</s>",
        bos_token: str | AddedToken = "<s>",
        split_special_tokens: bool = True,
        training_report: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        vocab, merges = kwargs.pop("vocab", None), kwargs.pop("merges", None)
        if vocab and not (kwargs.get("tokenizer_object") or kwargs.get("tokenizer_file")):
            kwargs["tokenizer_object"] = _untrained(models.BPE(vocab, [tuple(pair) for pair in merges or ()]))
        if "add_bos_token" in kwargs or getattr(kwargs.get("tokenizer_object"), "post_processor", True) is None:
            # The parent class rewrites the template in these cases, and would leave out the end token.
            kwargs.setdefault("add_eos_token", True)
        # The clean-up is pinned, as it would make decoding differ from the inverse of encoding.
        kwargs.update(pad_token=pad_token, eos_token=eos_token, bos_token=bos_token, clean_up_tokenization_spaces=False)
        super().__init__(split_special_tokens=split_special_tokens, training_report=training_report, **kwargs)
        self.training_report = training_report
        around = self.encode("")  # what the template adds; the parent class does not look
        self._add_bos_token, self._add_eos_token = self.bos_token_id in around, self.eos_token_id in around

    # ------------------------------------------------------------------ training
    @classmethod
    def train(
        cls,
        files_or_iterator: str | os.PathLike | Iterable[Any],
        vocab_size: int = 37000,
        *,
        normalization: str | None = None,
        reserved: Sequence[str] = (),
        extra_special_tokens: Sequence[str] = (),
        min_frequency: int = 2,
        allow_fewer: bool = False,
        max_memory_mib: int | None = 4096,
        model_max_length: int | None = None,
        show_progress: bool | None = None,
    ) -> "VaswaniTokenizer":
        """Learns one joint vocabulary from the text of both languages.

        The same texts give the same vocabulary, whatever their order, the files they lie in, and the number of threads.
        Encoding keeps every character; learning leaves byte order marks and control characters out, and counts them.

        Args:
            files_or_iterator: a path or a list of paths (plain, .gz or .zst, UTF-8, a text a line; only a line feed
                ends one), or any iterable of `str`, such as a column of a dataset. A string alone and a `pathlib.Path`
                are paths. A list of strings is paths if all are existing files, texts if none is; else it is refused.
            vocab_size (`int`): pieces in all, with the special, reserved and 256 byte pieces.
            normalization (`str`, *optional*): "nfc" (one code for composed and decomposed letters) or "nfkc" (also
                folds wide and other variants); None keeps every character and makes decoding exact.
            reserved (`Sequence[str]`): strings that are always one piece, such as placeholders, with the last ids.
                Of two that overlap in a text, the one that begins first counts, then the longer one.
            extra_special_tokens (`Sequence[str]`): more control tokens, such as language tags, with the ids from 3.
            min_frequency (`int`): how often a pair of pieces has to occur to become one piece.
            allow_fewer (`bool`): accept a smaller vocabulary where the text cannot give `vocab_size` pieces.
            max_memory_mib (`int`, *optional*): about how much memory, in MiB, the training may take. Of more text a
                sample over all of it is used, with its size in `training_report`. None: all texts, and no bound.
            model_max_length (`int`, *optional*): pieces that `truncation=True` keeps, with the end token; None: all.
            show_progress (`bool`, *optional*): a bar on standard error; None: if that is a terminal.

        Returns:
            `VaswaniTokenizer`; its `training_report` holds "texts_read", "texts_used", "min_frequency", and what was
            left out of the texts: "byte_order_marks", "control_characters".

        Raises:
            ValueError: for a size that the text cannot give (the largest possible one is named), a damaged file (with
                its line), or a special or reserved string that ordinary text could spell.
            TypeError: for a text that is no `str`, with its number.
            ImportError: for a .zst file where pyarrow is missing.

        Choice: no text is too long. A run of more than 128 letters or signs without a blank is learned in parts.
        """
        if normalization not in (None, *_NORMALIZERS):
            raise ValueError(f"`normalization` must be None, 'nfc' or 'nfkc', got {normalization!r}.")
        if isinstance(reserved, str) or isinstance(extra_special_tokens, str):
            raise TypeError("`reserved` and `extra_special_tokens` must be lists of strings, got one string.")
        specials = [*_SPECIAL_TOKENS, *extra_special_tokens]
        if "" in (names := [*specials, *reserved]) or len(set(names)) < len(names):
            raise ValueError(f"Special and reserved strings must be non-empty and distinct, got {names}.")
        backend = _untrained(models.BPE(), normalization)
        for token in extra_special_tokens:
            if _can_be_piece(backend, token):
                raise ValueError(f"Text could spell the special token {token!r}. Use brackets and ASCII: '<tag>'.")
        added_count = len(set(reserved) - _ALPHABET)
        if vocab_size < (least := len(specials) + len(_ALPHABET) + added_count):
            parts = f"{len(specials)} special tokens, {len(_ALPHABET)} bytes, {added_count} reserved pieces"
            raise ValueError(f"`vocab_size` must be at least {least} here ({parts}), got {vocab_size}.")

        report = _new_report(min_frequency)
        found, origin = _texts(files_or_iterator)
        # Bars of our own, as the trainer's print empty lines to standard output.
        hidden = not (sys.stderr.isatty() if show_progress is None else show_progress)
        found = logging.tqdm(found, desc="Reading texts", unit=" texts", disable=hidden)
        texts = logging.tqdm(_sample(_checked(found, report), max_memory_mib, report), desc="Training", disable=hidden)
        if reserved:
            cut = re.compile("|".join(map(re.escape, sorted(reserved, key=len, reverse=True))))
            texts = (part for text in texts for part in cut.split(text))
        texts = (part for text in texts for part in _parts(text))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - added_count,
            min_frequency=min_frequency,
            special_tokens=[AddedToken(token, normalized=False, special=True) for token in specials],
            initial_alphabet=sorted(_ALPHABET),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        tokenizer = cls(
            tokenizer_object=backend,
            extra_special_tokens=list(extra_special_tokens),
            model_max_length=model_max_length,
            training_report=report,
        )
        tokenizer.add_tokens([AddedToken(string, normalized=False, special=False) for string in reserved])
        if (most := len(tokenizer)) < vocab_size and not allow_fewer:
            raise ValueError(
                f"{origin} can give at most {most} pieces, `vocab_size` is {vocab_size} ({report['texts_used']} texts, "
                f"`min_frequency` {min_frequency}). Ask for {most} or fewer, pass `allow_fewer=True`, or add text."
            )
        return tokenizer

    def train_new_from_iterator(self, text_iterator: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        reserved = self.reserved  # which the parent class forgets
        tokenizer = super().train_new_from_iterator(text_iterator, vocab_size - len(reserved), *args, **kwargs)
        tokenizer.training_report = None
        tokenizer.add_tokens([AddedToken(string, normalized=False, special=False) for string in reserved])
        return tokenizer

    # ------------------------------------------------------------------ text to ids and back
    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        try:
            return super()._encode_plus(text, text_pair=text_pair, **kwargs)
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(text, "text")
            _refuse_surrogates(text_pair, "text pair")
            raise

    def decode(self, token_ids: Any, skip_special_tokens: bool = True, **kwargs: Any) -> Any:
        """The text of one sequence of ids, or the list of texts of a batch.

        Args:
            token_ids (`int`, `list`, `np.ndarray` or `torch.Tensor`): ids of shape (T) or (B, T); -100, the label that
                losses ignore, counts as padding.
            skip_special_tokens (`bool`): leave control tokens out.
            kwargs: as for `PreTrainedTokenizerFast.decode`.

        Returns:
            `str` or `list[str]`.
        """
        return super().decode(self._ignored_as_padding(to_py_obj(token_ids)), skip_special_tokens, **kwargs)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = True, *args: Any, **kwargs: Any) -> list[str]:
        """As `decode`, for a batch; always a list."""
        return super().batch_decode(sequences, skip_special_tokens, *args, **kwargs)

    def _ignored_as_padding(self, ids: Any) -> Any:
        if isinstance(ids, list):
            return [self._ignored_as_padding(i) for i in ids]
        return self.pad_token_id if ids == -100 else ids

    # ------------------------------------------------------------------ the vocabulary
    @property
    def normalization(self) -> str | None:
        """Name of the Unicode normalization of all input, "nfc" or "nfkc"; None: text stays as it is."""
        normalizer = self.backend_tokenizer.normalizer
        return None if normalizer is None else type(normalizer).__name__.lower()

    @property
    def reserved(self) -> list[str]:
        """Strings that are one piece each and never split, in order of their ids."""
        return [token.content for _, token in sorted(self.added_tokens_decoder.items()) if not token.special]

    def reserved_mismatch(self, source_text: str, target_text: str) -> dict[str, tuple[int, int]]:
        """Reserved strings that a translation lost or doubled, each with its counts (in the source, in the target)."""
        src, tgt = (Counter(self.encode(text, add_special_tokens=False)) for text in (source_text, target_text))
        ids = {piece: self.convert_tokens_to_ids(piece) for piece in self.reserved}
        return {piece: (src[i], tgt[i]) for piece, i in ids.items() if src[i] != tgt[i]}

    def get_src_vocab(self) -> dict[str, int]:
        """Piece to id on the source side, which is also the target's."""
        return self.get_vocab()

    def get_tgt_vocab(self) -> dict[str, int]:
        """Piece to id on the target side, which is also the source's."""
        return self.get_vocab()

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        backend, known = self.backend_tokenizer, self.added_tokens_encoder
        if backend.token_to_id("Ġ") is None:  # a foreign vocabulary, not spelled in bytes
            return super()._add_tokens(new_tokens, special_tokens=special_tokens)
        for token in new_tokens:
            is_special, name = special_tokens or getattr(token, "special", False), str(token)
            is_piece = name not in known and backend.token_to_id(name) is not None and _can_be_piece(backend, name)
            # The vocabulary spells bytes by letters: an accented letter may be there as a byte of another one.
            if is_piece and (is_special or not name.isascii()):
                raise ValueError(f"{name!r} is a piece that ordinary text can give. Take a longer string.")
        added_count = super()._add_tokens(new_tokens, special_tokens=special_tokens)
        # The decoder takes letters of its alphabet for bytes, so an added token made of them is first spelled in bytes.
        rules = [
            decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), _BYTES.pre_tokenize_str(token)[0][0])
            for token in self.added_tokens_encoder
            if not token.isascii() and set(token) <= _ALPHABET
        ]
        if rules:
            backend.decoder = decoders.Sequence([*rules, decoders.ByteLevel()])
        return added_count

    # ------------------------------------------------------------------ saving and loading
    def _save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        # The lengths of the last call would travel in the file, and cut the texts of whoever reads it alone.
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        return super()._save_pretrained(*args, **kwargs)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        # The tokenizer file is complete. For a class with an own `__init__`, the parent class would keep the vocabulary
        # of it alone, without normalization and reserved pieces.
        native = super().convert_to_native_format
        return kwargs if kwargs.get("tokenizer_file") else native(trust_remote_code=trust_remote_code, **kwargs)


# ---------------------------------------------------------------------- helpers
def _untrained(model: models.Model, normalization: str | None = None) -> Tokenizer:
    backend = Tokenizer(model)
    if normalization is not None:
        backend.normalizer = _NORMALIZERS[normalization]()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), _BYTES])
    backend.decoder = decoders.ByteLevel()
    return backend


def _can_be_piece(backend: Tokenizer, string: str) -> bool:
    """Whether the vocabulary could come to hold, for some text, a piece that is spelled like this string."""
    runs = backend.pre_tokenizer.pre_tokenize_str(string)
    return set(string) <= _ALPHABET and not (string.isascii() and len(runs) > 1)


def _texts(source: Any) -> tuple[Iterator[Any], str]:
    """The texts of any source, and what to call it in a message."""
    if isinstance(source, (str, os.PathLike)):
        return _lines(source), str(source)
    if isinstance(source, (list, tuple)):
        files = [os.path.isfile(item) if isinstance(item, str) else isinstance(item, os.PathLike) for item in source]
        if source and all(files):
            return (line for path in source for line in _lines(path)), ", ".join(map(str, source))
        if any(files):
            wrong = repr(source[files.index(False)])[:100]
            raise ValueError(f"Only some of the list are files: {wrong} is none. For texts, pass `iter(texts)`.")
        return iter(source), "The list (taken as texts, since none of it is an existing file)"
    return iter(source), "The text"


def _lines(path: str | os.PathLike) -> Iterator[str]:
    """Lines of a plain, gzip or Zstandard file; only a line feed ends a line."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                except UnicodeDecodeError as error:
                    place = f"{path}, line {number}, byte {error.start + 1}"
                    raise ValueError(f"{place}: not UTF-8. Convert the file first.") from None
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a missing file, say
            raise
        kind = "Zstandard" if os.fspath(path).endswith(".zst") else "gzip"
        raise ValueError(f"{path}, after line {number}: damaged {kind} data ({error}).") from None


def _open(path: str | os.PathLike) -> BinaryIO:
    """The unpacked bytes of a file, packed as its name says."""
    name = os.fspath(path)
    if name.endswith(".gz"):
        return gzip.open(path)  # type: ignore[return-value]
    if not name.endswith(".zst"):
        return open(path, "rb")
    try:
        # Not by a statement: this file travels to the Hub, whose readers would then all need the library.
        pyarrow = importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError(f"{path}: a .zst file is read through pyarrow (`pip install pyarrow`).") from None
    return io.BufferedReader(pyarrow.input_stream(name, compression="zstd"))


def _new_report(min_frequency: int) -> dict[str, int]:
    names = ("texts_read", "texts_used", "byte_order_marks", "control_characters")
    return {**dict.fromkeys(names, 0), "min_frequency": min_frequency}


def _checked(source: Iterator[Any], report: dict[str, int]) -> Iterator[str]:
    """The texts, counted, and without the characters that no piece is to be learned from."""
    for text in source:
        report["texts_read"] += 1
        if not isinstance(text, str):
            raise TypeError(f"Text {report['texts_read']} is of type {type(text).__name__}, expected str.")
        _refuse_surrogates(text, f"text {report['texts_read']}")
        if stray := _STRAY.findall(text):
            report["byte_order_marks"] += (marks := stray.count("\ufeff"))
            report["control_characters"] += len(stray) - marks
            # One that parts words, such as U+0085, still parts them.
            text = _STRAY.sub(lambda one: " " if one[0].isspace() else "", text)
        yield text


def _sample(texts: Iterator[str], limit_mib: int | None, report: dict[str, int]) -> Iterator[str]:
    """All texts, or an even sample of them that keeps text and training near the limit of memory."""
    if limit_mib is None:
        return (yield from (text for report["texts_used"], text in enumerate(texts, 1)))
    # Those with the smallest digests stay, as many as fit, so that the order of the texts makes no difference.
    held: list[tuple[int, str]] = []
    word_counts: Counter[str] = Counter()  # the held texts that each word is in
    limit, room = 2**64, limit_mib * 2**20
    for text in texts:
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        if number >= limit:
            continue
        heapq.heappush(held, (-number, text))
        words = set(text.split())
        new_bytes = sum(len(word.encode()) for word in words if word not in word_counts)
        room -= _TEXT_COST + sys.getsizeof(text) + _WORD_BYTE_COST * new_bytes
        word_counts.update(words)
        while room < 0 and len(held) > 1:
            number, text = heapq.heappop(held)
            limit, room = -number, room + _TEXT_COST + sys.getsizeof(text)
            for word in set(text.split()):
                word_counts[word] -= 1
                if not word_counts[word]:
                    del word_counts[word]
                    room += _WORD_BYTE_COST * len(word.encode())
    word_counts.clear()  # the trainer needs the room
    report["texts_used"] = len(held)
    if len(held) < report["texts_read"]:
        part = f"{len(held)} of {report['texts_read']} texts, an even sample"
        logger.warning(f"Training on {part}, for `max_memory_mib={limit_mib}`. Raise it, or pass None, to use more.")
    yield from (held.pop()[1] for _ in range(len(held)))


def _parts(text: str) -> list[str]:
    """A text, cut within its runs of over `_LONG_RUN` characters with or without blanks."""
    # U+0000 is free for this, as no checked text has it.
    return _LONG_RUNS.sub("\\g<0>\0", text).split("\0") if len(text) > _LONG_RUN else [text]


def _refuse_surrogates(text: Any, where: str) -> None:
    """Raises for half a character in a text, or in any text of a nested list."""
    if isinstance(text, str) and (hit := re.search("[\ud800-\udfff]", text)):
        place = f"{where}, character {hit.start() + 1}: U+{ord(hit[0]):04X}"
        raise ValueError(f"{place} is a lone surrogate, no character. Decode the source of this text again.")
    for number, item in enumerate(text, 1) if isinstance(text, (list, tuple)) else ():
        _refuse_surrogates(item, f"{where} {number}")


VaswaniTokenizer.register_for_auto_class("AutoTokenizer")
