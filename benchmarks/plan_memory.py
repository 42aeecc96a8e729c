"""Memory, time and padding of planning an epoch over a synthetic corpus.

    python benchmarks/plan_memory.py

The lengths are drawn with a fixed seed: sources log-normal with a median of 24.5 tokens, targets about as long with a
spread of a fifth, both from 1 to 256. The figures, as one line of JSON on standard output: seconds for the sampler and
one epoch read batch by batch, peak memory above the imports in MiB (the lengths included), and the share of padding.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from hf_vaswani.data import TokenBatchSampler


def draw_lengths(pair_count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of a corpus like those of public parliaments and news.

    Args:
        pair_count (`int`): pairs. seed (`int`): of the draw.

    Returns:
        source and target lengths: [pairs] each, int32.
    """
    generator = np.random.default_rng(seed)
    src = np.clip(np.rint(generator.lognormal(3.2, 0.6, pair_count)), 1, 256)
    tgt = np.clip(np.rint(src * generator.lognormal(0.05, 0.18, pair_count) + 1), 1, 256)
    return torch.from_numpy(src.astype(np.int32)), torch.from_numpy(tgt.astype(np.int32))


def peak_mib() -> float:
    """Largest memory that this process has had so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measure(pair_count: int, budget: int, processes: int) -> dict[str, float]:
    """Plan one epoch and read it whole.

    Args:
        pair_count (`int`): pairs. budget (`int`): padded tokens a batch, on either side. processes (`int`): the number
            of batches is a multiple of it.

    Returns:
        `dict`: the figures.
    """
    before = peak_mib()
    src, tgt = draw_lengths(pair_count)
    start = time.perf_counter()
    sampler = TokenBatchSampler(src, tgt, budget, budget, seed=1, multiple_of=processes)
    sampler_s = time.perf_counter() - start
    plan = sampler.plan(0)
    plan_s = time.perf_counter() - start - sampler_s
    seen = np.zeros(pair_count, dtype=np.int8)
    for batch in plan:
        seen[batch] += 1
    total_s = time.perf_counter() - start
    if not (seen == 1).all() or len(plan) % processes:
        raise SystemExit("The plan is wrong: a pair is missing or comes twice, or the batches cannot be shared.")
    return {
        "pairs": pair_count,
        "batches": len(plan),
        "sampler_s": round(sampler_s, 2),
        "plan_s": round(plan_s, 2),
        "with_reading_s": round(total_s, 2),
        "peak_mib_above_imports": round(peak_mib() - before, 1),
        "padding": round(plan.token_counts().padding, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--budget", type=int, default=25_000, help="padded tokens a batch, on either side")
    parser.add_argument("--processes", type=int, default=8, help="the number of batches is a multiple of it")
    args = parser.parse_args(argv)
    figures = measure(args.pairs, args.budget, args.processes)
    print(json.dumps(figures))
    limits = {"with_reading_s": 60, "peak_mib_above_imports": 1000, "padding": 0.05}
    return int(any(figures[name] >= limit for name, limit in limits.items()))


if __name__ == "__main__":
    sys.exit(main())
