"""What each attention head looks at, over a whole test set: one pass, sums alone are kept.

Letters: B batch, H heads, T queries, S keys; in the encoder both are source tokens, in the decoder both are what it
reads (the start token, then the target without its end), in cross-attention they are these and the source.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.progress import late_bar
from ..evaluation.bare import bare_model
from ..evaluation.perplexity import budgeted_batches
from .head_masks import Head, attention_modules
from .weights import eager_attention

COLUMNS = ("entropy", "distance", "previous", "same", "next", "start", "end", "rare")
Example = tuple[torch.Tensor, torch.Tensor]  # ids of a source and of its target, end tokens included


@dataclass(frozen=True)
class HeadStatistics:
    """Means over all query tokens of a test set.

    Args:
        head (`Head`): whose they are.
        entropy (`float`): of a query's weights, in nats: 0 looks at one token, log S at all of S alike.
        distance (`float`): |i - j| between query i and key j, in tokens, weighted by attention.
        previous, same, next (`float`): share of attention on key i - 1, i and i + 1 of query i. Together with the
            shares below they are parts of the attention of all queries; where there is no such key it is 0.
        start (`float`): share on the token that decoding starts from; only the decoder's self-attention has one.
        end (`float`): share on end tokens; the decoder does not read its own, so only the source has one.
        rare (`float`): share on the rarest token of the sentence.
        query_count (`int`): query tokens that were measured.

    Choice: decoder position i holds the token that is read there, i - 1 of the target, so that "same" is the token just
    written. In cross-attention it is compared with source position i as it stands, a measure of a monotonous order.

    Choice: the rarest token is the least frequent piece of a sentence, special ones apart, as in Voita et al. 2019,
    "Analyzing Multi-Head Self-Attention", section 5.2; where several are equally rare, all of them count.
    """

    head: Head
    entropy: float
    distance: float
    previous: float
    same: float
    next: float
    start: float
    end: float
    rare: float
    query_count: int


# --------------------------------------------------------------------------- text to batches
def tokenized(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Example]:
    """Ids of each pair (`Sequence[tuple[str, str]]`) with text on both sides.

    Raises:
        ValueError: there is none.
    """
    kept = [(src, tgt) for src, tgt in pairs if src.strip() and tgt.strip()]
    if not kept:
        raise ValueError("There is nothing to measure: no pair has text on both sides.")
    sources = tokenizer([src for src, _ in kept])["input_ids"]
    targets = tokenizer(text_target=[tgt for _, tgt in kept])["input_ids"]
    return [(torch.tensor(src), torch.tensor(tgt)) for src, tgt in zip(sources, targets, strict=True)]


def padded_batches(
    examples: Sequence[Example], pad: int, batch_tokens: int = 2048
) -> Iterator[dict[str, torch.Tensor]]:
    """Examples of like length together.

    Args:
        examples (`Sequence` of pairs of id tensors). pad (`int`): id that fills a source.
        batch_tokens (`int`): padded tokens on either side of a batch; an example over it is a batch by itself.

    Yields:
        `dict`: `input_ids` and `attention_mask` [B, S], `labels` [B, T] with -100 for padding.
    """
    src_lengths, tgt_lengths = (torch.tensor([len(one[side]) for one in examples]) for side in (0, 1))
    for batch in budgeted_batches(src_lengths, tgt_lengths, batch_tokens):
        rows = [examples[i][0] for i in batch]
        yield {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": pad_sequence([examples[i][1] for i in batch], batch_first=True, padding_value=-100),
        }


def piece_counts(examples: Sequence[Example]) -> tuple[Counter[int], Counter[int]]:
    """How often each id stands in the sources, and in the targets, of examples."""
    counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for sides in examples:
        for counter, ids in zip(counts, sides, strict=True):
            counter.update(ids.tolist())
    return counts


# --------------------------------------------------------------------------- one pass
def head_statistics(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    counts: tuple[Mapping[int, int], Mapping[int, int]] | None = None,
    batch_tokens: int = 2048,
) -> list[HeadStatistics]:
    """Statistics of every head over a test set.

    Args:
        model (`VaswaniForConditionalGeneration`): computes in its own precision and on its own device. Its attention
            is eager meanwhile, which alone gives weights, and afterwards what it was.
        tokenizer: its tokenizer.
        pairs (`Sequence[tuple[str, str]]`): source, target; those with a blank side are left out.
        counts (two mappings from id to `int`, *optional*): of source and target pieces in a training text, by which
            tokens are rare; None: those of `pairs`. An id that is not in them counts as 0 times.
        batch_tokens (`int`): padded tokens on either side of a batch: speed and memory, not the result.

    Returns:
        `list[HeadStatistics]`: in the order of `all_heads`.

    Raises:
        ValueError: no pair has text on both sides, or one is too long for a learned position table.
    """
    examples = tokenized(tokenizer, pairs)
    tables = _count_tables(model.config, tokenizer, counts or piece_counts(examples))
    sums = {
        (kind, layer): torch.zeros(one.out_proj.in_features // one.d_v, len(COLUMNS), dtype=torch.float64)
        for (kind, layer), one in attention_modules(model).items()
    }
    queries: Counter[str] = Counter()
    batches = padded_batches(examples, tokenizer.pad_token_id or 0, batch_tokens)
    with late_bar("heads", "pair", len(examples)) as bar, bare_model(model) as plain, eager_attention(plain):
        for batch in batches:
            inputs = {name: value.to(plain.device) for name, value in batch.items()}
            labels = inputs.pop("labels")
            decoder_ids = plain.prepare_decoder_input_ids_from_labels(labels)  # [B, T]
            source = _Tokens(inputs["input_ids"], inputs["attention_mask"].bool(), plain.config, tables[0])
            target = _Tokens(decoder_ids, labels != -100, plain.config, tables[1], is_decoder=True)
            sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
            with _watched(plain, sides, sums):
                plain(**inputs, decoder_input_ids=decoder_ids, use_cache=False, logits_to_keep=1)
            for kind, (query, _) in sides.items():
                queries[kind] += int(query.is_real.sum())
            bar.update(len(labels))
    return [
        HeadStatistics(
            head=Head(kind, layer, number),
            query_count=queries[kind],
            **dict(zip(COLUMNS, (row / queries[kind]).tolist(), strict=True)),
        )
        for (kind, layer), rows in sums.items()
        for number, row in enumerate(rows)
    ]


@contextmanager
def _watched(model: Any, sides: dict[str, Any], sums: dict[tuple[str, int], torch.Tensor]) -> Iterator[None]:
    """Inside, the weights of each attention are summed up as soon as they are made; none are kept."""

    def add(kind: str, total: torch.Tensor, module: Any, inputs: Any, output: Any) -> None:
        total += _sums(output[1], *sides[kind]).cpu()

    handles = [
        one.register_forward_hook(partial(add, place[0], sums[place]))
        for place, one in attention_modules(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Tokens:
    """What the sums need to know of the tokens of one side: [B, L] each.

    Args:
        ids (`torch.Tensor`): [B, L]. is_real (`torch.Tensor`): [B, L], False for padding.
        counts (`torch.Tensor`): [V], how often each piece occurs; -1 for special ones. is_decoder (`bool`): it starts.
    """

    def __init__(
        self, ids: torch.Tensor, is_real: torch.Tensor, config: Any, counts: torch.Tensor, is_decoder: bool = False
    ):
        self.is_real = is_real
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        is_end = torch.isin(ids, torch.tensor([one for one in ends if one is not None], device=ids.device))
        is_start = torch.zeros_like(is_real)
        is_start[:, 0] = is_decoder
        seen = counts.to(ids.device)[ids]  # [B, L]
        most = torch.iinfo(seen.dtype).max
        seen = seen.masked_fill((seen < 0) | is_start | ~is_real, most)
        is_rare = (seen == seen.amin(dim=1, keepdim=True)) & (seen < most)
        # Start and end, where they are one token, are told apart by place.
        self.kinds = torch.stack([is_start, is_end & ~is_start, is_rare]) & is_real  # [3, B, L]


def _sums(weights: torch.Tensor, query: _Tokens, key: _Tokens) -> torch.Tensor:
    """Sums over all real queries of a batch, [B, H, T, S] -> [H, 8], float64, in the order of `COLUMNS`."""
    real = weights * query.is_real[:, None, :, None]
    rows, columns = (torch.arange(n, device=weights.device, dtype=weights.dtype) for n in weights.shape[2:])
    distance = (rows[:, None] - columns).abs()  # [T, S]
    found = [-torch.xlogy(real, real).sum((2, 3)), (real * distance).sum((2, 3))]
    found += [real.diagonal(offset, 2, 3).sum(-1) for offset in (-1, 0, 1)]
    on_key = real.sum(2)  # [B, H, S]
    found += [(on_key * kind[:, None]).sum(-1) for kind in key.kinds]
    return torch.stack(found, dim=-1).double().sum(0)


def _count_tables(
    config: Any, tokenizer: Any, counts: tuple[Mapping[int, int], Mapping[int, int]]
) -> list[torch.Tensor]:
    """How often each source and each target piece occurs, -1 for special ones: [V] each."""
    special = set(tokenizer.all_special_ids)
    special |= {one for one in (config.decoder_start_token_id, config.pad_token_id) if one is not None}
    tables = []
    for rows, counter in zip((config.encoder_vocab_size, config.vocab_size), counts, strict=True):
        table = torch.zeros(rows, dtype=torch.long)
        for number, count in counter.items():
            if number < rows:
                table[number] = count
        table[[one for one in special if one < rows]] = -1
        tables.append(table)
    return tables
