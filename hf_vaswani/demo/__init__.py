"""A page on which people translate by hand and look inside: candidates, alternatives, attention, two models."""

from .alternatives import Step, forced_log_probs, steps_of
from .candidates import Candidate, Found, LoadedModel, Refusal, Request, find_candidates

__all__ = [
    "Candidate",
    "Found",
    "LoadedModel",
    "Refusal",
    "Request",
    "Step",
    "find_candidates",
    "forced_log_probs",
    "steps_of",
]
