"""The tokenizer of an imported model: another toolkit's vocabulary, or two, and the steps its text went through."""

import copy
import importlib
import os
import re
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import to_py_obj

from .foreign_segmentation_vaswani import Characters, Subtokens, SubwordNMT, Words
from .foreign_sentencepiece_vaswani import SentencePiece
from .tokenization_vaswani import _refuse_surrogates

_SIDES = ("source", "target")
# Files of the toolkit that a segmentation needs: the source's, and the target's where it has its own.
_FILES = {"subword-nmt": ("codes_file", "target_codes_file"), "sentencepiece": ("source_spm_file", "target_spm_file")}


class _Vocabulary(NamedTuple):
    """One side's: ids by name, names by id, control tokens, and the tokens that were added to those and the pieces."""

    ids: dict[str, int]
    names: dict[int, str]
    controls: frozenset[str]
    added: frozenset[str]

    def cut(self, text: str, finds_controls: bool) -> list[str]:
        """The text around added tokens, and these at the odd places."""
        tokens = self.added | self.controls if finds_controls else self.added
        longest_first = sorted(tokens, key=len, reverse=True)
        return re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if tokens else [text]


class VaswaniForeignTokenizer(PreTrainedTokenizerFast):
    """Text to the ids of another toolkit's vocabulary and back, by the same steps as there.

    Source and target may have vocabularies of their own: `tokenizer(text)` uses the source's,
    `tokenizer(text_target=text)` and decoding the target's. Text that spells a control token, such as "</s>", is text.

    Args:
        segmentation (`str`): "words", "characters", "subword-nmt", "sentencepiece" or "subtokens" (Tensor2Tensor's).
        continuation (`str`): what a subword-nmt piece ends in that does not end its word.
        character_space (`str`, *optional*): how a blank is spelled in a vocabulary of characters; None: as itself.
        moses (`dict`, *optional*): Moses' tokenisation before, detokenisation after: "source" and "target" language,
            "aggressive_hyphens", "escape", "normalize".
        lowercase (`bool`): text is lowercased, after Moses.
        restrict (`bool`): a piece that the vocabulary lacks is cut further, where the toolkit can (subword-nmt,
            SentencePiece); else it is unknown at once.
        separate_vocabularies, separate_segmentation (`bool`): the target has its own vocabulary, codes or model.
        split_special_tokens (`bool`): whether text that spells a control token is ordinary text.
        kwargs: as for `PreTrainedTokenizerFast`, with `target_tokenizer_object`, and paths `target_tokenizer_file`,
            `codes_file`, `target_codes_file`, `source_spm_file`, `target_spm_file`.

    Choice: `get_vocab` and the conversion of tokens are the source's, as encoding is; length and size are the target's,
    which are those of the matrix that `resize_token_embeddings` changes. Decoding keeps the unknown token in any case:
    the toolkits show it, and a text without it would hide that a word is missing.
    """

    vocab_files_names = {
        "tokenizer_file": "tokenizer.json", "target_tokenizer_file": "target_tokenizer.json", "codes_file": "bpe.codes",
        "target_codes_file": "target_bpe.codes", "source_spm_file": "source.spm", "target_spm_file": "target.spm",
    }  # fmt: skip
    model_input_names = ["input_ids", "attention_mask"]
    _source: Tokenizer | None = None

    def __init__(
        self,
        *,
        segmentation: str = "words",
        continuation: str = "@@",
        character_space: str | None = None,
        moses: dict[str, Any] | None = None,
        lowercase: bool = False,
        restrict: bool = False,
        separate_vocabularies: bool = False,
        separate_segmentation: bool = False,
        split_special_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        target, target_file = kwargs.pop("target_tokenizer_object", None), kwargs.pop("target_tokenizer_file", None)
        paths = {name: kwargs.pop(name, None) for names in _FILES.values() for name in names}
        self._files: dict[str, bytes] = {}  # as they are
        for name in _FILES.get(segmentation, ())[: 2 if separate_segmentation else 1]:
            if paths[name] is None:
                raise ValueError(f"Segmentation {segmentation!r} needs `{name}` ({self.vocab_files_names[name]}).")
            self._files[name] = Path(paths[name]).read_bytes()
        self._target: Tokenizer | None = None
        if separate_vocabularies:
            if target is None and target_file is None:
                raise ValueError(
                    "A target vocabulary of its own needs `target_tokenizer_file` (target_tokenizer.json)."
                )
            self._target = Tokenizer.from_file(str(target_file)) if target is None else copy.deepcopy(target)
        self._make_transient()
        # All of this goes into the saved configuration. The clean-up is pinned, as joining is exact already.
        options = {
            "segmentation": segmentation, "continuation": continuation, "character_space": character_space,
            "moses": moses, "lowercase": lowercase, "restrict": restrict, "split_special_tokens": split_special_tokens,
            "separate_vocabularies": separate_vocabularies, "separate_segmentation": separate_segmentation,
        }  # fmt: skip
        for name, value in options.items():
            setattr(self, name, value)
        kwargs.update(options, clean_up_tokenization_spaces=False)
        super().__init__(**kwargs)
        for side in _SIDES:  # a damaged file speaks up now
            self._segmenter(side)

    # ------------------------------------------------------------------ the two sides
    @property
    def _tokenizer(self) -> Any:  # type: ignore[override]
        """The backend of the side that this thread is on."""
        return self._backend(getattr(self._here, "side", "source"))

    @_tokenizer.setter
    def _tokenizer(self, backend: Any) -> None:
        self._source = backend

    def _backend(self, side: str) -> Any:
        return self._target if side == "target" and self._target is not None else self._source

    def _switch_to_input_mode(self) -> None:
        self._here.side = "source"

    def _switch_to_target_mode(self) -> None:
        self._here.side = "target"

    def _make_transient(self) -> None:
        """What is not saved: locks, the side each thread is on, and what is made from the rest when needed."""
        self._here, self._lock = threading.local(), threading.RLock()
        self._made: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_here", "_lock", "_made")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_transient()

    def _vocabulary(self, side: str) -> _Vocabulary:
        if (vocabulary := self._made.get(("vocabulary", side))) is None:
            ids: dict[str, int] = self._backend(side).get_vocab(with_added_tokens=True)
            tokens = self._backend(side).get_added_tokens_decoder().values()
            controls = frozenset(str(token) for token in tokens if token.special)
            self._made["vocabulary", side] = vocabulary = _Vocabulary(
                ids,
                {number: name for name, number in ids.items()},
                controls,
                frozenset(map(str, tokens)) - controls,
            )
        return vocabulary

    @property
    def _unknown(self) -> str | None:
        token = self._special_tokens_map.get("unk_token")  # the attribute complains where there is none
        return None if token is None else str(token)

    def _segmenter(self, side: str) -> Any:
        uses_pieces = self.restrict or self.segmentation == "subtokens"
        if not self.separate_segmentation and (self._target is None or not uses_pieces):
            side = "source"  # which does the same
        if (segmenter := self._made.get(("segmenter", side))) is None:
            vocabulary = self._vocabulary(side)
            pieces = frozenset(vocabulary.ids) - vocabulary.controls
            known = pieces if self.restrict else None
            files = _FILES.get(self.segmentation, ("tokenizer_file", "target_tokenizer_file"))
            file = files[side == "target" and self.separate_segmentation]
            make = {
                "words": Words,
                "characters": lambda: Characters(self.character_space),
                "subword-nmt": lambda: SubwordNMT(self._files[file].decode(), self.continuation, known),
                "sentencepiece": lambda: SentencePiece(self._files[file], known),
                "subtokens": lambda: Subtokens(pieces, {letter for name in pieces for letter in name}),
            }
            if self.segmentation not in make:
                raise ValueError(f"`segmentation` must be one of {', '.join(make)}, got {self.segmentation!r}.")
            try:
                self._made["segmenter", side] = segmenter = make[self.segmentation]()
            except ValueError as error:
                raise ValueError(f"{self.vocab_files_names[file]}: {error}") from None
        return segmenter

    # ------------------------------------------------------------------ text to ids
    def _pieces(self, text: Any, side: str, is_text_only: bool) -> list[str]:
        """The names that a text is looked up by, unknown pieces as the unknown token."""
        if not isinstance(text, str):
            raise TypeError(f"A text is of type {type(text).__name__}, expected str.")
        vocabulary, unknown, names = self._vocabulary(side), self._unknown, []
        for i, part in enumerate(vocabulary.cut(text, finds_controls=not is_text_only)):
            if i % 2:
                names.append(part)
                continue
            for piece in self._segmenter(side).split(self._before(part, side)) if part else ():
                if piece in vocabulary.ids and piece not in vocabulary.controls:
                    names.append(piece)
                elif unknown is not None:
                    names.append(unknown)
                else:
                    raise ValueError(f"The {side} vocabulary has no piece {piece!r}, and no unknown token.")
        return names

    def _before(self, text: str, side: str) -> str:
        """Moses and lowercasing."""
        if self.moses is not None:
            language = self.moses[side]
            if self.moses["normalize"]:
                text = _moses("MosesPunctNormalizer", language).normalize(text)
            text = _moses("MosesTokenizer", language).tokenize(
                text,
                aggressive_dash_splits=self.moses["aggressive_hyphens"],
                return_str=True,
                escape=self.moses["escape"],
            )
        return text.lower() if self.lowercase else text

    def _encode_plus(  # type: ignore[override]
        self,
        text: Any,
        text_pair: Any = None,
        is_split_into_words: bool = False,
        split_special_tokens: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        side = getattr(self._here, "side", "source")
        is_text_only = self.split_special_tokens if split_special_tokens is None else split_special_tokens

        def cut(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                parts = [cut(part) for part in item]
                return [piece for part in parts for piece in part] if is_split_into_words else tuple(parts)
            return self._pieces(item, side, is_text_only)

        try:
            _refuse_surrogates(text, "text")
            _refuse_surrogates(text_pair, "text pair")
            is_batch = isinstance(text, (list, tuple)) and (
                not is_split_into_words or bool(text and isinstance(text[0], (list, tuple)))
            )
            is_cut = bool(text) or isinstance(text, str)
            if is_cut:
                text = [cut(item) for item in text] if is_batch else cut(text)
                if text_pair is not None:
                    text_pair = [cut(item) for item in text_pair] if is_batch else cut(text_pair)
            if kwargs.get("return_offsets_mapping"):
                raise NotImplementedError("Pieces are no parts of the raw text here, so they have no offsets in it.")
            with self._lock:  # the backend keeps the lengths of each call
                return super()._encode_plus(
                    text, text_pair=text_pair, is_split_into_words=is_cut, split_special_tokens=is_text_only, **kwargs
                )
        except BaseException:
            self._switch_to_input_mode()
            raise

    # ------------------------------------------------------------------ ids to text
    def decode(self, token_ids: Any, skip_special_tokens: bool = True, side: str = "target", **kwargs: Any) -> Any:
        """The text of one sequence of ids, or the list of texts of a batch.

        Args:
            token_ids (`int`, `list`, `np.ndarray` or `torch.Tensor`): ids of shape (T) or (B, T); -100, the label that
                losses ignore, counts as padding, and ids without a piece as nothing.
            skip_special_tokens (`bool`): leave control tokens out; the unknown token is none.
            side (`str`): "target", or "source" for ids of source text.
            kwargs: as for `PreTrainedTokenizerFast.decode`.

        Returns:
            `str` or `list[str]`.
        """
        return super().decode(to_py_obj(token_ids), skip_special_tokens, side=side, **kwargs)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = True, *args: Any, **kwargs: Any) -> list[str]:
        """As `decode`, for a batch; always a list."""
        return super().batch_decode(sequences, skip_special_tokens, *args, **kwargs)

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        side: str = "target",
        **kwargs: Any,
    ) -> str:
        if side not in _SIDES:
            raise ValueError(f"`side` must be 'source' or 'target', got {side!r}.")
        vocabulary, pad = self._vocabulary(side), self.pad_token_id
        parts: list[Any] = [[]]
        for one in [token_ids] if isinstance(token_ids, int) else token_ids:
            name = vocabulary.names.get(pad if one == -100 else int(one))
            if name in vocabulary.added or (name in vocabulary.controls and name != self._unknown):
                if not skip_special_tokens or name in vocabulary.added:
                    parts += [name, []]
            elif name is not None:
                parts[-1].append(name)
        texts = [part if isinstance(part, str) else self._joined(part, side) for part in parts if part]
        return ("" if self.segmentation in ("characters", "subtokens") else " ").join(texts)

    def _joined(self, pieces: list[str], side: str) -> str:
        text = self._segmenter(side).join(pieces)
        if self.moses is None:
            return text
        return _moses("MosesDetokenizer", self.moses[side]).detokenize(text.split(), unescape=self.moses["escape"])

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces of the target."""
        return self._joined(tokens, "target")

    # ------------------------------------------------------------------ the vocabularies
    def __len__(self) -> int:
        return self._backend("target").get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Pieces of the target vocabulary, without added tokens."""
        return self._backend("target").get_vocab_size(with_added_tokens=False)

    def get_src_vocab(self) -> dict[str, int]:
        """Piece to id on the source side."""
        return dict(self._vocabulary("source").ids)

    def get_tgt_vocab(self) -> dict[str, int]:
        """Piece to id on the target side."""
        return dict(self._vocabulary("target").ids)

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None and token in self._vocabulary("target").controls:  # the start, say, may be the target's alone
            found = self._vocabulary("target").ids[token]
        if found is None and self._unknown is not None:
            found = self._tokenizer.token_to_id(self._unknown)
        return found

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        sides = [self._source] if self._target is None else [self._source, self._target]
        vocabularies: list[dict[str, int]] = [backend.get_vocab() for backend in sides]  # type: ignore[union-attr]
        is_one = vocabularies[0] == vocabularies[-1]
        for token in map(str, new_tokens):
            if not is_one and not any(token in vocabulary for vocabulary in vocabularies):
                raise ValueError(f"{token!r} would need a row in two matrices, of which only the target's can grow.")
        added_count = 0
        for backend, vocabulary in zip(sides, vocabularies, strict=True):
            here = [token for token in new_tokens if is_one or str(token) in vocabulary]
            added_count = (backend.add_special_tokens if special_tokens else backend.add_tokens)(here)  # type: ignore
        self._made.clear()
        return added_count

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("This vocabulary belongs to its model. `VaswaniTokenizer.train` learns a new one.")

    # ------------------------------------------------------------------ saving and loading
    def _save_pretrained(
        self,
        save_directory: Any,
        file_names: Any,
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> Any:
        def place(name: str) -> str:
            file = self.vocab_files_names[name]
            return os.path.join(save_directory, f"{filename_prefix}-{file}" if filename_prefix else file)

        backends = {"tokenizer_file": self._source, "target_tokenizer_file": self._target}
        written = []
        with self._lock:
            for name, backend in backends.items():
                if backend is not None:
                    # The lengths of the last call would travel in the file.
                    backend.no_truncation()
                    backend.no_padding()
                    backend.save(place(name))
                    written.append(place(name))
        for name, content in self._files.items():
            Path(place(name)).write_bytes(content)
            written.append(place(name))
        return (*file_names, *written)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        # The parent class would keep the bare vocabulary of the file, for a class with an own `__init__`.
        native = super().convert_to_native_format
        return kwargs if kwargs.get("tokenizer_file") else native(trust_remote_code=trust_remote_code, **kwargs)


# ---------------------------------------------------------------------- helpers
@lru_cache(64)
def _moses(kind: str, language: str) -> Any:
    """One of the classes of sacremoses for a language; making one takes long."""
    try:
        # Not by a statement: this file travels to the Hub, whose readers would then all need the library.
        sacremoses = importlib.import_module("sacremoses")
    except ImportError:
        raise ImportError("This tokenizer's text goes through Moses' rules (`pip install sacremoses`).") from None
    return getattr(sacremoses, kind)(language)


VaswaniForeignTokenizer.register_for_auto_class("AutoTokenizer")
