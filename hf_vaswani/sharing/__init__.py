"""Handing a trained model to others: its card, and the upload of its folder."""

from .card import Measurement, check_card, model_card, push_folder

__all__ = ["Measurement", "check_card", "model_card", "push_folder"]
