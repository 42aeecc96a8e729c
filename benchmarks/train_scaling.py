"""How training time and memory of ours depend on lengths, tokens a batch, vocabulary and processes, one at a time.

    python benchmarks/train_scaling.py --plot training_scaling.png

A step is that of train_step.py: base size, float32 (--bf16: under autocast), no padding. Unless it is the factor that
changes, a batch is 64 pairs of 32 and 32 tokens (2,048 on either side), and the vocabulary 37,000 pieces. "length" is
of both sides, with fewer pairs for longer ones, so that their tokens stay; "source length" and "target length" leave
pairs and other side as they are. Every point runs in processes of its own, once for time and once for memory beyond
weights, gradients and optimizer state (train_step.py tells how). Processes are joined by gloo, each with a batch of its
own and an equal share of the threads: their figures are the tokens of all together, and the memory of the largest.

Memory per token is the slope over tokens a batch: what one more source token and one more target token cost together.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from measuring import common_arguments, emit, in_child, machine, parse, report
from train_step import Size, make_model, make_optimizer, make_step, random_batch, return_freed_memory

FACTORS = {
    "length": [8, 16, 32, 64, 128, 256],
    "source length": [8, 32, 128],
    "target length": [8, 32, 128],
    "tokens a batch": [512, 1024, 2048, 4096],
    "vocabulary": [4_000, 8_000, 16_000, 37_000],
    "processes": [1, 2],
}
QUICK = {"length": [4, 8], "tokens a batch": [32, 64], "processes": [1, 2]}


# --------------------------------------------------------------------------- points
def size_at(factor: str, value: int, is_quick: bool) -> Size:
    """The step in which one factor has this value and all others their usual one."""
    pairs, length, vocabulary = (8, 4, 211) if is_quick else (64, 32, 37_000)
    usual = Size(is_quick, vocabulary, pairs, length, length)
    tokens = pairs * length
    changes: Mapping[str, dict[str, int]] = {
        "length": {"pairs": max(1, tokens // value), "src_length": value, "tgt_length": value},
        "source length": {"src_length": value},
        "target length": {"tgt_length": value},
        "tokens a batch": {"pairs": max(1, value // length)},
        "vocabulary": {"vocab_size": value},
        "processes": {},
    }
    return usual._replace(**changes[factor])


def worker(
    size: Size, is_bf16: bool, repeats: int, for_memory: bool, rank: int, world: int, threads: int, folder: str
) -> Iterator[None]:
    """One process of a point, for `in_child`: a step to warm up, then `repeats` steps, whose seconds it returns."""
    torch.set_num_threads(threads)
    if for_memory:
        return_freed_memory()
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(minutes=10)
        )
    model: Any = make_model("ours", size)
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    step = make_step("ours", model, random_batch(size, seed=rank), optimizer := make_optimizer(model), is_bf16)
    tiny = random_batch(size._replace(pairs=1, src_length=2, tgt_length=2))
    make_step("ours", model, tiny, optimizer, is_bf16)()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # so that memory is counted from above the gradients
    gc.collect()
    yield
    optimizer.zero_grad()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    if world > 1:
        torch.distributed.destroy_process_group()
    return seconds[1:]


def run_point(size: Size, is_bf16: bool, world: int, repeats: int, for_memory: bool) -> tuple[float, float]:
    """Median seconds of a step, and MiB of the process that took most."""
    threads = max(1, torch.get_num_threads() // world)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:
        waiting = [
            pool.submit(in_child, worker, size, is_bf16, repeats, for_memory, rank, world, threads, folder)
            for rank in range(world)
        ]
        children = [one.result() for one in waiting]
    return statistics.median(children[0].result), max(child.peak_mib for child in children)


def measure(factors: Mapping[str, Sequence[int]], is_quick: bool, is_bf16: bool, repeats: int) -> list[dict[str, Any]]:
    """Every point of every factor.

    Args:
        factors (`Mapping`): values by factor. is_quick, is_bf16 (`bool`): of the step. repeats (`int`): timed steps.

    Returns:
        `list[dict]`: a row a point; the usual point is measured once and comes with every factor.
    """
    known: dict[tuple[Size, int], dict[str, float]] = {}
    rows = []
    for factor, values in factors.items():
        for value in values:
            size, world = size_at(factor, value, is_quick), value if factor == "processes" else 1
            if (size, world) not in known:
                seconds, _ = run_point(size, is_bf16, world, repeats, for_memory=False)
                _, peak = run_point(size, is_bf16, world, 1, for_memory=True)
                src, tgt = (world * size.pairs * length for length in (size.src_length, size.tgt_length))
                known[size, world] = {
                    "src_tokens": src, "tgt_tokens": tgt, "seconds": seconds, "tokens_per_s": (src + tgt) / seconds,
                    "peak_mib": peak,
                }  # fmt: skip
                print(f"{factor} {value:,}: {seconds:.2f} s, {peak:,.0f} MiB", file=sys.stderr)
            rows.append({"factor": factor, "value": value, **known[size, world]})
    return rows


def kib_per_token(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Least-squares slope of memory over tokens a batch, source and target token together; None with one point."""
    points = [(row["tgt_tokens"], row["peak_mib"] * 1024) for row in rows if row["factor"] == "tokens a batch"]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# --------------------------------------------------------------------------- plot
def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Small multiples: a column a factor, tokens/s above and memory below."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    factors = list(dict.fromkeys(row["factor"] for row in rows))
    figure, axes = pyplot.subplots(2, len(factors), figsize=(2.6 * len(factors), 4.6), sharey="row", squeeze=False)
    for column, factor in enumerate(factors):
        points = [row for row in rows if row["factor"] == factor]
        for line, (name, title) in enumerate((("tokens_per_s", "tokens/s"), ("peak_mib", "MiB"))):
            one = axes[line][column]
            one.plot([row["value"] for row in points], [row[name] for row in points], marker="o")
            one.set_xscale("log", base=2)
            one.set_xticks([row["value"] for row in points], [f"{row['value']:,}" for row in points], fontsize=7)
            one.minorticks_off()
            one.set_ylim(bottom=0)
            one.grid(alpha=0.3)
            if column == 0:
                one.set_ylabel(f"source + target {title}" if line == 0 else f"{title} beyond weights and state")
        axes[1][column].set_xlabel(factor)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and figures, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, repeats=2)
    parser.add_argument("--factors", nargs="+", choices=FACTORS, metavar="FACTOR", help=f"of: {', '.join(FACTORS)}")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw there")
    parser.add_argument("--from-json", type=Path, metavar="PATH", help="draw the figures of an earlier run")
    args = parse(parser, argv)
    if args.from_json:
        if not args.plot:
            parser.error("--from-json draws: say where with --plot")
        plot(json.loads(args.from_json.read_text(encoding="utf-8"))["points"], args.plot)
        return 0
    chosen = QUICK if args.quick else FACTORS
    if args.factors:
        chosen = {name: (QUICK if args.quick else FACTORS).get(name, FACTORS[name][:2]) for name in args.factors}
    rows = measure(chosen, args.quick, args.bf16, args.repeats)
    figures = {
        "benchmark": "train_scaling", "machine": machine(), "precision": "bf16" if args.bf16 else "float32",
        "points": rows, "kib_per_token": kib_per_token(rows),
    }  # fmt: skip
    report("One training step of ours; MiB beyond weights, gradients and optimizer state", rows)
    if figures["kib_per_token"] is not None:
        print(f"\n{figures['kib_per_token']:.0f} KiB per source and target token", file=sys.stderr)
    if args.plot:
        plot(rows, args.plot)
    emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
