"""Which source pieces each target piece looks at: the attention of the decoder over the encoder's output, drawn.

Letters: H heads, S source length, T target length.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BLANK = "␣"
_INCH_PER_CELL = 0.32
_INCH_PER_LETTER = 0.1


@dataclass
class AttentionPicture:
    """A matrix of attention weights, the text of its rows and columns, and its drawing.

    Args:
        weights (`torch.Tensor`): [T, S], each row adds up to 1.
        tgt_pieces, src_pieces (`list[str]`): the text of T target and S source pieces, blanks shown as "␣".
        figure (`matplotlib.figure.Figure`): the drawing; a notebook shows it when it is the last value of a cell.
        score (`float`, *optional*): of the translation that was searched for; None where the target was given.
    """

    weights: torch.Tensor
    tgt_pieces: list[str]
    src_pieces: list[str]
    figure: Any
    score: float | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing; the ending of `path` chooses the kind (.png, .svg, .pdf)."""
        self.figure.savefig(Path(path), dpi=150, bbox_inches="tight")

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        stream = BytesIO()
        self.figure.savefig(stream, format="png", dpi=110, bbox_inches="tight")
        return stream.getvalue()


def attention_figure(
    model: Any,
    tokenizer: Any,
    source: str,
    target: str | None = None,
    layer: int = -1,
    heads: int | str = "mean",
) -> AttentionPicture:
    """Draw the cross-attention of one sentence and its translation.

    The weights come from one pass over the finished translation, so row t holds what the decoder looked at while it
    chose target piece t.

    Args:
        model: a seq2seq model of transformers. tokenizer: its tokenizer.
        source (`str`): the sentence. target (`str`, *optional*): a translation to explain; None: the model's own.
        layer (`int`): decoder layer; negative counts from the last.
        heads (`int` or `str`): one head, from 0, or "mean" over all heads of the layer.

    Returns:
        `AttentionPicture` with `weights` of shape [T, S].

    Raises:
        ImportError: without matplotlib; the message says what to install.
        ValueError: for a blank source, or a layer or head that the model does not have.

    Source: Vaswani et al. 2017, section 3.2.3 (encoder-decoder attention) and the figures of the appendix.
    """
    require_matplotlib()
    if not source.strip():
        raise ValueError("`source` is blank: there is no attention to draw.")
    was_training, kept_attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        with torch.no_grad():
            encoded = tokenizer(source, return_tensors="pt").to(model.device)
            inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}  # [1, S]
            if target is None:
                labels, score = _translate(model, inputs)
            else:
                labels, score = tokenizer(text_target=target, return_tensors="pt")["input_ids"], None
            # Only the eager form gives its weights back.
            model.set_attn_implementation("eager")
            output = model(**inputs, labels=labels.to(model.device), output_attentions=True)
    finally:
        model.set_attn_implementation(kept_attention)
        model.train(was_training)
    layers = output.cross_attentions
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"`layer` {layer} does not exist: the decoder has {len(layers)} layers, from 0.")
    per_head = layers[layer][0].float().cpu()  # [H, T, S]
    weights = _choose_heads(per_head, heads)  # [T, S]
    src_pieces = piece_texts(tokenizer, inputs["input_ids"][0].tolist())
    tgt_pieces = piece_texts(tokenizer, labels[0].tolist())
    index = layer % len(layers)
    title = f"cross-attention, decoder layer {index}, " + ("mean of heads" if heads == "mean" else f"head {heads}")
    return AttentionPicture(
        weights, tgt_pieces, src_pieces, draw_attention(weights, tgt_pieces, src_pieces, title), score
    )


def _translate(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float | None]:
    """The model's best translation, end token included and start token not: [1, T], and its score."""
    found = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
    ids = found.sequences[:, 1:]
    ends = model.generation_config.eos_token_id
    is_end = torch.isin(ids[0], torch.tensor(ends, device=ids.device))
    if is_end.any():
        ids = ids[:, : int(is_end.nonzero()[0]) + 1]
    scores = getattr(found, "sequences_scores", None)
    return ids, None if scores is None else float(scores[0])


def _choose_heads(per_head: torch.Tensor, heads: int | str) -> torch.Tensor:
    if heads == "mean":
        return per_head.mean(dim=0)
    if not isinstance(heads, int) or not 0 <= heads < len(per_head):
        raise ValueError(f'`heads` must be "mean" or a head from 0 to {len(per_head) - 1}, got {heads!r}.')
    return per_head[heads]


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
        texts.append(text.replace(" ", _BLANK).replace("▁", _BLANK).replace("\n", "↵").replace("\t", "→"))
    return texts


def _byte_of(letter: str) -> int:
    """The byte behind a letter of the byte-level alphabet: printable Latin-1 is itself, the rest begins at 256."""
    code = ord(letter)
    if code < 256:
        return code
    hidden = [*range(0x00, 0x21), *range(0x7F, 0xA1), 0xAD]
    return hidden[code - 256]


def require_matplotlib() -> None:
    """Say what to install where matplotlib is missing.

    Raises:
        ImportError: it is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('Drawing needs matplotlib. Run: pip install "hf-vaswani[plots]"') from error


def draw_attention(weights: torch.Tensor, tgt_pieces: list[str], src_pieces: list[str], title: str = "") -> Any:
    """Draw a matrix of attention weights, source pieces along the top and target pieces down the side.

    Args:
        weights (`torch.Tensor`): [T, S]. tgt_pieces, src_pieces (`list[str]`): T and S labels. title (`str`): above.

    Returns:
        `matplotlib.figure.Figure`, outside of pyplot: it needs no display and is freed like any object.

    Raises:
        ImportError: without matplotlib. ValueError: labels that do not fit the matrix.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = weights.shape
    if (rows, columns) != (len(tgt_pieces), len(src_pieces)):
        raise ValueError(
            f"The matrix is {rows} x {columns}, but there are {len(tgt_pieces)} target and {len(src_pieces)} source "
            "labels."
        )
    fonts, (tgt_labels, src_labels) = _readable([tgt_pieces, src_pieces])
    left = max(map(len, tgt_labels)) * _INCH_PER_LETTER
    top = max(map(len, src_labels)) * _INCH_PER_LETTER
    size = (max(3.5, columns * _INCH_PER_CELL + left + 1.2), max(2.5, rows * _INCH_PER_CELL + top + 0.8))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    axes.set_xticks(range(columns), src_labels, rotation=90, family=fonts, parse_math=False)
    axes.set_yticks(range(rows), tgt_labels, family=fonts, parse_math=False)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source")
    axes.set_ylabel("target")
    axes.set_title(title, fontsize="small")
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def _readable(groups: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Fonts that can show the labels, and the labels with what no installed font can show as "U+4E2D"."""
    from matplotlib import font_manager, ft2font

    needed = {ord(letter) for labels in groups for label in labels for letter in label}
    families = ["DejaVu Sans"]  # comes with matplotlib
    missing = needed - _letters_of(ft2font, font_manager.findfont("DejaVu Sans"))
    for entry in font_manager.fontManager.ttflist if missing else []:
        if entry.name in families or entry.style != "normal" or entry.name.startswith("Last Resort"):
            continue
        found = missing & _letters_of(ft2font, entry.fname)
        if found:
            families.append(entry.name)
            missing -= found
        if not missing:
            break

    def spell(label: str) -> str:
        return "".join(f"U+{ord(letter):04X}" if ord(letter) in missing else letter for letter in label)

    return families, [[spell(label) for label in labels] for labels in groups]


def _letters_of(ft2font: Any, path: str) -> set[int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return set(ft2font.FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return set()  # a font file that is listed but cannot be read
