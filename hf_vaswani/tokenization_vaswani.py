"""A lossless subword tokenizer: one joint byte-level BPE for source and target, trained on raw text."""

import codecs
import gzip
import heapq
import os
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
_IGNORED_LABEL = -100


class VaswaniTokenizer(PreTrainedTokenizerFast):
    r"""Raw text to ids and back, without loss, by one byte-level BPE vocabulary shared by source and target.

    `decode(encode(text)) == text` for every Unicode string, unless a normalization was asked for. There is no unknown
    token, because every byte is a piece. Text that spells a special token, such as "</s>", is text; pass
    `split_special_tokens=False` to a call whose text carries control tokens on purpose, such as a language tag.

    Args:
        pad_token, eos_token, bos_token (`str`): control tokens; the end token closes every encoded text.
        split_special_tokens (`bool`): whether text that spells a special token is ordinary text.
        training_report (`dict`, *optional*): what `train` read and used.
        kwargs: as for `PreTrainedTokenizerFast`; `tokenizer_object`, `tokenizer_file`, or `vocab` and `merges` of a
            byte-level BPE hold the vocabulary.

    Choice: byte-level BPE with blanks kept inside the pieces. Source: Vaswani et al. 2017, section 5.1, has BPE with a
    shared vocabulary of about 37,000 pieces (English-German) on text tokenized beforehand.
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
        kwargs["clean_up_tokenization_spaces"] = False  # pinned: decoding is the inverse of encoding
        kwargs.update(pad_token=pad_token, eos_token=eos_token, bos_token=bos_token)
        super().__init__(split_special_tokens=split_special_tokens, training_report=training_report, **kwargs)
        self.training_report = training_report
        around = self.encode("")  # what the template adds, which the parent class cannot tell
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

        Args:
            files_or_iterator: a path or a list of paths (plain or .gz, UTF-8, one text a line; only a line feed ends
                a line, with or without a carriage return before it), or texts: any iterable of `str`, such as a
                generator or a column of a dataset. A string alone and a `pathlib.Path` are always paths. A list of
                strings is paths if all of them are existing files, texts if none is, and refused if only some are.
            vocab_size (`int`): pieces in all, with the special, reserved and 256 byte pieces.
            normalization (`str`, *optional*): "nfc" (one code for composed and decomposed letters) or "nfkc" (also
                folds wide and other variants); None keeps every character and makes decoding exact.
            reserved (`Sequence[str]`): strings that are one piece each, never split and never part of another, such
                as placeholders. Of two that overlap in a text, the one that begins first counts, then the longer.
                They hold the last ids.
            extra_special_tokens (`Sequence[str]`): more control tokens, such as language tags, with the ids from 3.
            min_frequency (`int`): how often a pair of pieces has to occur to become one piece.
            allow_fewer (`bool`): accept a smaller vocabulary where the text cannot give `vocab_size` pieces.
            max_memory_mib (`int`, *optional*): about how much memory, in MiB, text and training may take. Texts past
                it are sampled evenly over the whole input, and `training_report` says how many were used. None: all
                texts are used and none is held, but the words of the trainer can grow without bound.
            model_max_length (`int`, *optional*): pieces that `truncation=True` keeps, with the end token; None: all.
            show_progress (`bool`, *optional*): a bar on standard error; None: if that is a terminal.

        Returns:
            `VaswaniTokenizer`; its `training_report` holds "texts_read", "texts_used" and "min_frequency".

        Raises:
            ValueError: for a wish that the text cannot meet (the message names the largest size), a damaged file
                (with its line), or a special or reserved string that ordinary text could spell.
            TypeError: for a text that is no `str`, with its number.
        """
        if normalization is not None and normalization not in _NORMALIZERS:
            raise ValueError(f"`normalization` must be None, 'nfc' or 'nfkc', got {normalization!r}.")
        if isinstance(reserved, str) or isinstance(extra_special_tokens, str):
            raise TypeError("`reserved` and `extra_special_tokens` must be lists of strings, got one string.")
        if min_frequency < 1:
            raise ValueError(f"`min_frequency` must be at least 1, got {min_frequency}.")
        specials = [*_SPECIAL_TOKENS, *extra_special_tokens]
        names = [*specials, *reserved]
        if "" in names or len(set(names)) < len(names):
            raise ValueError(f"Special and reserved strings must be non-empty and distinct, got {names}.")
        backend = _untrained(models.BPE(), normalization)
        for token in extra_special_tokens:
            runs = backend.pre_tokenizer.pre_tokenize_str(token)
            if set(token) <= _ALPHABET and not (token.isascii() and len(runs) > 1):
                raise ValueError(f"Text could spell the special token {token!r}. Use brackets and ASCII: '<tag>'.")
        added_count = len(set(reserved) - _ALPHABET)
        if vocab_size < (least := len(specials) + len(_ALPHABET) + added_count):
            raise ValueError(
                f"`vocab_size` must be at least {least} here ({len(specials)} special tokens, {len(_ALPHABET)} bytes, "
                f"{added_count} reserved pieces), got {vocab_size}."
            )

        report = {"texts_read": 0, "texts_used": 0, "min_frequency": min_frequency}
        source, origin = _texts(files_or_iterator)
        texts = _sample(_checked(source, report), max_memory_mib, report)
        if reserved:
            cut = re.compile("|".join(map(re.escape, sorted(reserved, key=len, reverse=True))))
            texts = (part for text in texts for part in cut.split(text))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - added_count,
            min_frequency=min_frequency,
            special_tokens=[AddedToken(token, normalized=False, special=True) for token in specials],
            initial_alphabet=sorted(_ALPHABET),
            show_progress=sys.stderr.isatty() if show_progress is None else show_progress,
        )
        backend.train_from_iterator(texts, trainer)
        tokenizer = cls(
            tokenizer_object=backend,
            extra_special_tokens=list(extra_special_tokens),
            model_max_length=model_max_length,
            training_report=report,
        )
        tokenizer.add_tokens([AddedToken(string, normalized=False, special=False) for string in reserved])
        if len(tokenizer) < vocab_size and not allow_fewer:
            raise ValueError(
                f"{origin} can give at most {len(tokenizer)} pieces, `vocab_size` is {vocab_size} (texts: "
                f"{report['texts_used']}, `min_frequency`: {min_frequency}). Ask for {len(tokenizer)} or fewer, pass "
                "`allow_fewer=True` to take what there is, or add text."
            )
        return tokenizer

    def train_new_from_iterator(self, text_iterator: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        # The parent class forgets added tokens that are not special.
        reserved = self.reserved
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
        ids = self._ignored_as_padding(to_py_obj(token_ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens, **kwargs)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = True, *args: Any, **kwargs: Any) -> list[str]:
        """As `decode`, for a batch; always a list."""
        return super().batch_decode(sequences, skip_special_tokens, *args, **kwargs)

    def _ignored_as_padding(self, ids: Any) -> Any:
        if isinstance(ids, (list, tuple)):
            return [self._ignored_as_padding(i) for i in ids]
        return self.pad_token_id if ids == _IGNORED_LABEL else ids

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
        known = self.added_tokens_encoder
        for token in new_tokens:
            is_special = special_tokens or getattr(token, "special", False)
            is_piece = str(token) not in known and self.backend_tokenizer.token_to_id(str(token)) is not None
            # The vocabulary spells bytes by letters: an accented letter may be there as a byte of another one.
            if is_piece and (is_special or not str(token).isascii()):
                raise ValueError(f"{str(token)!r} is a piece that ordinary text can give. Take a longer string.")
        added_count = super()._add_tokens(new_tokens, special_tokens=special_tokens)
        # The decoder takes letters of its alphabet for bytes, so an added token made of them is first spelled in bytes.
        rules = [
            decoders.Replace(Regex(rf"\A{re.escape(token)}\z"), _BYTES.pre_tokenize_str(token)[0][0])
            for token in self.added_tokens_encoder
            if not token.isascii() and set(token) <= _ALPHABET
        ]
        if rules:
            self.backend_tokenizer.decoder = decoders.Sequence([*rules, decoders.ByteLevel()])
        return added_count

    # ------------------------------------------------------------------ loading
    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        # The tokenizer file is complete. The parent class would keep only its vocabulary for a class with an own
        # `__init__`, and lose the reserved pieces and the normalization.
        if kwargs.get("tokenizer_file"):
            return kwargs
        return super().convert_to_native_format(trust_remote_code=trust_remote_code, **kwargs)


# ---------------------------------------------------------------------- helpers
def _untrained(model: models.Model, normalization: str | None = None) -> Tokenizer:
    backend = Tokenizer(model)
    if normalization is not None:
        backend.normalizer = _NORMALIZERS[normalization]()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), _BYTES])
    backend.decoder = decoders.ByteLevel()
    return backend


def _texts(source: Any) -> tuple[Iterator[Any], str]:
    """The texts of any source, and what to call it in a message."""
    if isinstance(source, (str, os.PathLike)):
        return _lines(source), str(source)
    if isinstance(source, (list, tuple)):
        files = [os.path.isfile(item) if isinstance(item, str) else isinstance(item, os.PathLike) for item in source]
        if source and all(files):
            return (line for path in source for line in _lines(path)), ", ".join(map(str, source))
        if any(files):
            raise ValueError(
                f"Some items of the list are files, but {source[files.index(False)]!r:.100} is none. Correct the path, "
                "or pass `iter(texts)` if these are texts."
            )
        return iter(source), "The list (taken as texts, since none of it is an existing file)"
    return iter(source), "The text"


def _lines(path: str | os.PathLike) -> Iterator[str]:
    """Lines of a plain or gzip file; only a line feed ends a line."""
    number = 0
    try:
        with gzip.open(path) if os.fspath(path).endswith(".gz") else open(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}, byte {error.start + 1}: not UTF-8. Convert the file first.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip data ({error}).") from None


def _checked(source: Iterator[Any], report: dict[str, int]) -> Iterator[str]:
    for text in source:
        report["texts_read"] += 1
        if not isinstance(text, str):
            raise TypeError(f"Text {report['texts_read']} is of type {type(text).__name__}, expected str.")
        _refuse_surrogates(text, f"text {report['texts_read']}")
        yield text


def _sample(texts: Iterator[str], limit_mib: int | None, report: dict[str, int]) -> Iterator[str]:
    """All texts, or an even sample of them that keeps text and training near the limit of memory."""
    if limit_mib is None:
        for report["texts_used"], text in enumerate(texts, 1):
            yield text
        return
    # Every text draws a number, and those with the smallest ones stay, as many as fit.
    held: list[tuple[float, int, str]] = []
    draw, limit, room = random.Random(0).random, 1.0, limit_mib * 2**20
    for text in texts:
        if (number := draw()) < limit:
            # Measured: a held text costs 250 bytes and its letters; the trainer holds 120 bytes for each byte of a
            # word that it has not met before, as runs without blanks (Thai, Chinese) nearly always are.
            cost = 250 + 3 * len(text) + 120 * sum(len(run.encode()) for run in text.split() if len(run) > 24)
            heapq.heappush(held, (-number, cost, text))
            room -= cost
            while room < 0 and len(held) > 1:
                number, cost, _ = heapq.heappop(held)
                limit, room = -number, room + cost
    report["texts_used"] = len(held)
    if len(held) < report["texts_read"]:
        logger.warning(
            f"The vocabulary is trained on an even sample of {len(held)} of {report['texts_read']} texts, to stay near "
            f"`max_memory_mib={limit_mib}`. Raise it, or pass None, to use more."
        )
    yield from (held.pop()[2] for _ in range(len(held)))


def _refuse_surrogates(text: Any, where: str) -> None:
    """Raises for half a character in a text, or in any text of a nested list."""
    if isinstance(text, str) and (hit := re.search("[\ud800-\udfff]", text)):
        raise ValueError(
            f"{where}, character {hit.start() + 1}: lone surrogate U+{ord(hit[0]):04X}, which is no character but half "
            "of one. Decode the source of this text again."
        )
    for number, item in enumerate(text, 1) if isinstance(text, (list, tuple)) else ():
        _refuse_surrogates(item, f"{where} {number}")


VaswaniTokenizer.register_for_auto_class("AutoTokenizer")
