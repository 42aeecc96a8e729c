"""The pieces of a text made readable, and attention between pieces made attention between words."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .weights import AttentionWeights

BLANK = "␣"


def piece_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each piece, readable: blanks as "␣", and the bytes of a split letter in hexadecimal.

    Args:
        tokenizer: of transformers. ids (`list[int]`): pieces.

    Returns:
        `list[str]`: one text per id; special tokens as they are written.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    letters = set(ByteLevel.alphabet())
    special = set(tokenizer.all_special_ids)
    texts = []
    for one in ids:
        piece = tokenizer.convert_ids_to_tokens(one)
        text = piece if one in special else tokenizer.decode([one], skip_special_tokens=False)
        if "\ufffd" in text and all(letter in letters for letter in piece):
            raw = bytes(_byte_of(letter) for letter in piece).decode("utf-8", "surrogateescape")
            text = "".join(f"‹{ord(c) - 0xDC00:02X}›" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in raw)
        elif piece.startswith("▁") and not text.startswith((" ", "▁")):
            text = " " + text  # SentencePiece drops the blank before the first word when it decodes
        texts.append(text.replace(" ", BLANK).replace("▁", BLANK).replace("\n", "↵").replace("\t", "→"))
    return texts


def _byte_of(letter: str) -> int:
    """The byte behind a letter of the byte-level alphabet: printable Latin-1 is itself, the rest begins at 256."""
    code = ord(letter)
    if code < 256:
        return code
    hidden = [*range(0x00, 0x21), *range(0x7F, 0xA1), 0xAD]
    return hidden[code - 256]


def word_groups(pieces: list[str]) -> list[list[int]]:
    """Which pieces make up each word: a word begins where a piece begins with a blank, or after one that ends with it.

    Special tokens ("</s>", "<s>", "<pad>") stand alone. A piece with blanks inside stays whole.

    Args:
        pieces (`list[str]`): as `piece_texts` gives them.

    Returns:
        `list[list[int]]`: the places of the pieces, word by word, in order; every place once.
    """
    breaks = (BLANK, "↵", "→")
    groups: list[list[int]] = []
    starts_anew = True
    for place, piece in enumerate(pieces):
        is_special = piece.startswith("<") and piece.endswith(">") and len(piece) > 2
        if starts_anew or is_special or piece.startswith(breaks):
            groups.append([])
        groups[-1].append(place)
        starts_anew = is_special or piece.endswith(breaks)
    return groups


def merge_words(found: "AttentionWeights") -> "AttentionWeights":
    """Attention between words instead of pieces: what goes to a split word is summed, what comes from it is averaged.

    Rows add up to 1 as before.

    Args:
        found (`AttentionWeights`): of pieces.

    Returns:
        `AttentionWeights` with words for pieces; `source_ids` and `target_ids` stay those of the pieces.

    Source: Clark et al. 2019, "What Does BERT Look At?", section 4.1.
    """
    # What is read is grouped as it was written: the start token alone, then the target's words without its last piece.
    source, target = word_groups(found.source_pieces), word_groups(found.target_pieces)
    decoder = word_groups(found.decoder_pieces)

    def merged(layers: list[torch.Tensor], rows: list[list[int]], columns: list[list[int]]) -> list[torch.Tensor]:
        # [words, pieces] x [H, pieces, pieces] x [pieces, words]
        return [_mean_matrix(rows) @ weights @ _sum_matrix(columns) for weights in layers]

    def words(pieces: list[str], groups: list[list[int]]) -> list[str]:
        return [("".join(pieces[place] for place in group)).strip(BLANK) or BLANK for group in groups]

    return replace(
        found,
        encoder=merged(found.encoder, source, source),
        decoder=merged(found.decoder, target, decoder),
        cross=merged(found.cross, target, source),
        source_pieces=words(found.source_pieces, source),
        target_pieces=words(found.target_pieces, target),
        decoder_pieces=words(found.decoder_pieces, decoder),
    )


def _sum_matrix(groups: list[list[int]]) -> torch.Tensor:
    """[pieces, words]: 1 where a piece belongs to a word."""
    belongs = torch.zeros(sum(map(len, groups)), len(groups))
    for word, group in enumerate(groups):
        belongs[group, word] = 1.0
    return belongs


def _mean_matrix(groups: list[list[int]]) -> torch.Tensor:
    """[words, pieces]: each row the mean over the pieces of a word."""
    belongs = _sum_matrix(groups).T
    return belongs / belongs.sum(dim=1, keepdim=True)
