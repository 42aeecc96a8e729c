"""Beam and greedy search over a `FoldedDecoder`: the rules of transformers' own loops, with less work a step.

A sentence leaves the batch once its result can no longer change. What was chosen is kept as pointers, a row of parents
and a row of tokens for each step, and put together at the end.

Letters: B open sentences, K beams, C candidates of a step, R results of a sentence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# The score that stands for "no hypothesis", here as in the library.
IMPOSSIBLE = -1.0e9
# Sentences that are done leave as soon as they are this share of the batch: leaving copies the others' states.
_SHARE_TO_LEAVE = 0.125


@dataclass
class Rules:
    """What ends a hypothesis, and what may come next.

    Args:
        end_ids (`torch.Tensor`): token ids that end a hypothesis. pad_id (`int`): fills behind an end.
        most (`int`): new tokens of any sentence. limits (`torch.Tensor`, *optional*): [B], new tokens of each.
        least (`int`): new tokens before an end token may come. prefix (`list[int]`): tokens that come first.
        processors (*optional*): further logits processors of the library, which look at whole rows.
        check (callable): given the best scores of a step and its number from 1; raises where they are no numbers.
    """

    end_ids: torch.Tensor
    pad_id: int
    most: int
    check: Callable[[torch.Tensor, int], None]
    limits: torch.Tensor | None = None
    least: int = 0
    prefix: list[int] = field(default_factory=list)
    processors: Any = None

    def banned(self, step: int) -> list[int]:
        """Token ids that may not come at a step, counted from 0."""
        return self.end_ids.tolist() if step < self.least else []

    def ends(self, tokens: torch.Tensor, step: int, sentences: torch.Tensor) -> torch.Tensor:
        """Whether each chosen token [B, ...] is the last of its hypothesis."""
        is_end = torch.isin(tokens, self.end_ids)
        if step + 1 >= self.most:
            return torch.ones_like(is_end)
        if self.limits is None:
            return is_end
        is_over = step + 1 >= self.limits[sentences]
        return is_end | is_over.view(-1, *[1] * (tokens.dim() - 1))


def candidates(
    decoder: Any, hidden: torch.Tensor, rules: Rules, count: int, step: int, prompts: torch.Tensor | None, is_beam: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best next tokens of each row, and their scores: log-probabilities in a beam search, else logits.

    Args:
        hidden (`torch.Tensor`): [N, D]. count (`int`): C. prompts (`torch.Tensor`, *optional*): [N, 1 + step], what
            was chosen so far, for processors.

    Returns:
        scores [N, C], highest first, and ids [N, C].
    """
    if rules.processors is not None:
        scores = decoder.logits(hidden)
        scores = rules.processors(prompts, scores.log_softmax(dim=-1) if is_beam else scores)
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
    if step < len(rules.prefix):
        scores = torch.full((len(hidden), count), -torch.inf, device=hidden.device)
        scores[:, 0] = 0.0
        return scores, torch.full(scores.shape, rules.prefix[step], device=hidden.device)
    values, ids, total = decoder.best(hidden, count, rules.banned(step), needs_sum=is_beam)
    return (values if total is None else values - total[:, None]), ids


@dataclass
class Finished:
    """The best ended hypotheses of each sentence, as pointers to where they ended: [B, K] each."""

    scores: torch.Tensor
    lengths: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def none(cls, batch: int, num_beams: int, device: Any) -> "Finished":
        scores = torch.full((batch, num_beams), IMPOSSIBLE, device=device)
        zeros = torch.zeros(batch, num_beams, dtype=torch.long, device=device)
        return cls(scores, zeros, zeros.clone(), zeros.clone())

    @property
    def is_there(self) -> torch.Tensor:
        """[B, K]: whether there is a hypothesis in each place."""
        return self.lengths > 0

    def add(
        self, scores: torch.Tensor, is_new: torch.Tensor, length: int, parents: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Take hypotheses [B, C] in, where they are new and among the best."""
        merged = torch.cat([self.scores, torch.where(is_new, scores, IMPOSSIBLE)], dim=1)
        self.scores, places = merged.topk(self.scores.shape[1], dim=1)
        lengths = torch.where(is_new, length, 0)
        self.lengths = torch.cat([self.lengths, lengths], dim=1).gather(1, places)
        self.parents = torch.cat([self.parents, parents], dim=1).gather(1, places)
        self.tokens = torch.cat([self.tokens, tokens], dim=1).gather(1, places)

    def parts(self) -> list[torch.Tensor]:
        return [self.scores, self.lengths, self.parents, self.tokens]

    def write_to(self, other: "Finished", rows: torch.Tensor) -> None:
        for mine, theirs in zip(self.parts(), other.parts(), strict=True):
            theirs[rows] = mine

    def kept(self, rows: torch.Tensor) -> "Finished":
        return Finished(*(one[rows] for one in self.parts()))


@dataclass
class BeamResult:
    """sequences [B R, 1 + L], scores [B R], and the beam that each token was added to, -1 behind the end: [B R, L]."""

    sequences: torch.Tensor
    scores: torch.Tensor
    beam_indices: torch.Tensor


def beam_search(
    decoder: Any,
    prompt: torch.Tensor,
    rules: Rules,
    penalty: Any,
    early_stopping: bool | str,
    returned: int,
    can_improve: Callable[[torch.Tensor, Finished, int, torch.Tensor], torch.Tensor],
) -> BeamResult:
    """Search with K beams.

    Args:
        decoder (`FoldedDecoder`). prompt (`torch.Tensor`): [B, K], the token that each hypothesis starts from.
        rules (`Rules`). penalty: a hypothesis of n tokens scores log P / n ** penalty.
        early_stopping: True ends a sentence at its K-th hypothesis. returned (`int`): R.
        can_improve (callable): given running scores [B, K], what is finished, the number of tokens so far, and the
            sentences' numbers, says which of them [B, 1] might still get better.

    Returns:
        `BeamResult`.
    """
    batch, num_beams = prompt.shape
    device = prompt.device
    count = max(2, 1 + len(rules.end_ids)) * num_beams
    running = torch.zeros(batch, num_beams, device=device)
    running[:, 1:] = IMPOSSIBLE  # all beams start alike: only the first counts
    sentences = torch.arange(batch, device=device)
    everything = Finished.none(batch, num_beams, device)
    finished = everything.kept(sentences)
    is_done = torch.zeros(batch, dtype=torch.bool, device=device)
    is_top = torch.arange(count, device=device) < num_beams
    chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    tokens = prompt
    text = prompt.reshape(-1, 1) if rules.processors is not None else None
    step = 0
    while True:
        hidden = decoder.step(tokens)
        scores, ids = candidates(decoder, hidden, rules, count, step, text, is_beam=True)
        total = (scores.view(len(sentences), num_beams, -1) + running[:, :, None]).flatten(1)
        best, places = total.topk(count, dim=1)  # [B, C]
        parents, new = places // count, ids.reshape(len(sentences), -1).gather(1, places)
        is_end = rules.ends(new, step, sentences)
        is_new = is_end & is_top & ~is_done[:, None]
        if device.type != "cpu" or bool(is_new.any()):  # elsewhere looking costs more than adding nothing
            finished.add(best / (step + 1) ** penalty, is_new, step + 1, parents, new)
        running, order = (best + is_end * IMPOSSIBLE).topk(num_beams, dim=1)
        parents, tokens = parents.gather(1, order), new.gather(1, order)
        chosen.append((sentences, parents, tokens))
        step += 1
        is_done = is_done | ~can_improve(running, finished, step, sentences)[:, 0] | is_end.all(dim=1)
        if early_stopping is True:
            is_done |= finished.is_there.all(dim=1)
        done_count = _look(best, is_done, rules, step)
        if done_count == len(sentences):
            break
        decoder.reorder(parents)
        if text is not None:  # what processors know about a sentence goes by its place in the batch
            rows = (parents + torch.arange(len(sentences), device=device)[:, None] * num_beams).flatten()
            text = torch.cat([text[rows], tokens.reshape(-1, 1)], dim=1)
        elif done_count >= _SHARE_TO_LEAVE * len(sentences):
            finished.write_to(everything, sentences)
            rows = (~is_done).nonzero()[:, 0]
            decoder.keep(rows)
            finished, sentences, is_done = finished.kept(rows), sentences[rows], is_done[rows]
            running, tokens = running[rows], tokens[rows]
    finished.write_to(everything, sentences)
    return _put_together(everything, chosen, prompt, rules.pad_id, returned)


def _look(best: torch.Tensor, is_done: torch.Tensor, rules: Rules, step: int) -> int:
    """How many sentences are done; the one look a step at what an accelerator holds.

    Raises whatever `rules.check` raises, where a score is no number.
    """
    is_bad, done_count = torch.stack([torch.isnan(best).any(), is_done.sum()]).tolist()
    if is_bad:
        rules.check(best, step)
    return done_count


def _put_together(
    finished: Finished, chosen: Sequence[tuple[torch.Tensor, ...]], prompt: torch.Tensor, pad_id: int, returned: int
) -> BeamResult:
    """Follow the pointers back from where the best hypotheses ended."""
    batch, num_beams = prompt.shape
    scores, lengths, parents, last = (one[:, :returned] for one in finished.parts())
    longest = int(lengths.max())
    device = prompt.device
    sequences = torch.full((batch, returned, 1 + longest), pad_id, device=device)
    sequences[:, :, 0] = prompt[:, :1]
    beams = torch.full((batch, returned, longest), -1, dtype=torch.int32, device=device)
    offset = torch.arange(batch, device=device)[:, None] * num_beams
    place = torch.zeros_like(parents)  # the beam whose last token is the one at this step
    for step in range(longest - 1, -1, -1):
        sentences, its_parents, its_tokens = chosen[step]
        all_parents, all_tokens = torch.zeros(2, batch, num_beams, dtype=torch.long, device=device)
        all_parents[sentences], all_tokens[sentences] = its_parents, its_tokens
        is_last, is_inside = lengths == step + 1, lengths > step
        token = torch.where(is_last, last, all_tokens.gather(1, place))
        parent = torch.where(is_last, parents, all_parents.gather(1, place))
        sequences[:, :, 1 + step] = torch.where(is_inside, token, pad_id)
        beams[:, :, step] = torch.where(is_inside, parent + offset, -1)
        place = torch.where(is_inside, parent, 0)
    return BeamResult(sequences.flatten(0, 1), scores.flatten(), beams.flatten(0, 1))


def greedy_search(decoder: Any, prompt: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Take the likeliest token each time.

    Args:
        decoder (`FoldedDecoder`): of one beam. prompt (`torch.Tensor`): [B, 1]. rules (`Rules`).

    Returns:
        `torch.Tensor`: [B, 1 + L], with padding behind an end.
    """
    batch, device = len(prompt), prompt.device
    sentences = torch.arange(batch, device=device)
    is_done = torch.zeros(batch, dtype=torch.bool, device=device)
    columns, tokens, text = [prompt], prompt, prompt
    step = 0
    while True:
        hidden = decoder.step(tokens)
        scores, ids = candidates(decoder, hidden, rules, 1, step, text, is_beam=False)
        tokens = ids.masked_fill(is_done[:, None], rules.pad_id)
        column = torch.full((batch, 1), rules.pad_id, device=device)
        column[sentences] = tokens
        columns.append(column)
        is_done = is_done | rules.ends(tokens[:, 0], step, sentences)
        step += 1
        done_count = _look(scores, is_done, rules, step)
        if done_count == len(sentences):
            return torch.cat(columns, dim=1)
        if rules.processors is not None:
            text = torch.cat([text, tokens], dim=1)
        elif done_count >= _SHARE_TO_LEAVE * len(sentences):
            rows = (~is_done).nonzero()[:, 0]
            decoder.keep(rows)
            sentences, is_done, tokens = sentences[rows], is_done[rows], tokens[rows]
