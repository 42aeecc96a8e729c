"""Looking inside a model."""

from .attention import AttentionPicture, attention_figure, draw_attention, draw_attentions
from .weights import AttentionWeights, attention_weights
from .words import merge_words, piece_texts

__all__ = [
    "AttentionPicture",
    "AttentionWeights",
    "attention_figure",
    "attention_weights",
    "draw_attention",
    "draw_attentions",
    "merge_words",
    "piece_texts",
]
