"""Looking inside a model."""

from .attention import AttentionPicture, attention_figure, draw_attention, piece_texts

__all__ = ["AttentionPicture", "attention_figure", "draw_attention", "piece_texts"]
