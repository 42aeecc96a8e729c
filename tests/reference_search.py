"""Beam search and exhaustive search as plain loops, written from the rule and from nothing of the package.

`step(prefix)` gives the log-probabilities of the next token, a list over the vocabulary.
"""

import itertools


def penalty(length, alpha, kind):
    return ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha


def exhaustive(step, vocab, end, limit, alpha, kind):
    """All sequences that end, and all of full length that do not: (score, tokens), best first."""
    found = []
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if end in tokens[:-1] or (tokens[-1] != end and length < limit):
                continue
            total = sum(step(tokens[:n])[tokens[n]] for n in range(length))
            found.append((total / penalty(length, alpha, kind), tokens))
    return sorted(found, key=lambda one: -one[0])


def beam_search(step, vocab, end, limit, alpha, kind, beams):
    """Runs every sentence to its limit, so that no early end can hide a mistake: (score, tokens), best first."""
    open_beams, finished = [(0.0, ())], []
    for length in range(1, limit + 1):
        candidates = [
            (total + log_p, (*tokens, token))
            for total, tokens in open_beams
            for token, log_p in enumerate(step(tokens))
            if token < vocab
        ]
        candidates.sort(key=lambda one: -one[0])
        kept = []
        for rank, (total, tokens) in enumerate(candidates[: 2 * beams]):
            if tokens[-1] == end or length == limit:
                if rank < beams:
                    finished.append((total / penalty(length, alpha, kind), tokens))
            elif len(kept) < beams:
                kept.append((total, tokens))
        open_beams = kept
    return sorted(finished, key=lambda one: -one[0])
