"""Constituency parsing as translation: sentences in, bracket strings out (Vaswani et al. 2017, section 6.3)."""

from .brackets import BracketScores, score_trees
from .linear import TOP, linear_text, linearize, reserved_pieces
from .predictions import parse_sentences, read_predictions
from .repair import Repairs, rebuild
from .trees import Tree, TreebankError, read_treebank, read_trees

__all__ = [
    "TOP",
    "BracketScores",
    "Repairs",
    "Tree",
    "TreebankError",
    "linear_text",
    "linearize",
    "parse_sentences",
    "read_predictions",
    "read_treebank",
    "read_trees",
    "rebuild",
    "reserved_pieces",
    "score_trees",
]
