"""All figures of one GPU: training of base and big, and decoding beside MarianMT with the same weights.

    bash benchmarks/gpu.sh          (which also looks for a GPU and takes wheels from a folder)

Training: bfloat16 autocast, V = 37,000, an update of 25,000 source and 25,000 target tokens in pairs of 25, with and
without torch.compile; target tokens a second, and the model FLOPs utilisation: FLOPs of the model's matrix products by
what the device could do in bfloat16 without sparsity. Where memory is too small, the update is halved until it fits.
Decoding: base with V = 32,000 and random weights, sources of 25 tokens, exactly 30 new ones, in bfloat16 and float32.

The run ends by itself within --minutes: what no longer fits is left out, and the table says so.
"""

import argparse
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measuring import emit, machine, report
from peers import base_config, fixed_search, marian_of, quick_config, random_model, random_sources
from train_step import Size, make_step, random_batch
from transformers.utils import logging

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.training.dry_run_cost import count_flops
from hf_vaswani.training.schedule import paper_optimizer, set_learning_rate

# Dense bfloat16 TFLOP/s by what a device is called, from the makers' data sheets; the first that fits counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
}


# --------------------------------------------------------------------------- FLOPs
def step_flops(model: Any, size: Size) -> int:
    """FLOPs of the matrix products of a step, forward and backward, counted on two pairs: pairs of a length cost alike.

    Args:
        model: ours. size (`Size`): of the step. The model's gradients are cleared.

    Choice: attention counts all T^2 places, as Chowdhery et al. 2022, appendix B, have it, though half are masked.
    """
    batch = {key: value.to(model.device) for key, value in random_batch(size._replace(pairs=2)).items()}
    flops = count_flops(model, batch)
    model.zero_grad()
    return flops * size.pairs // 2


def peak_tflops(name: str | None) -> float | None:
    """What a device can do in bfloat16 without sparsity; None for one that is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if name and part.lower() in name.lower()), None)


# --------------------------------------------------------------------------- the clock
class OutOfTime(Exception):
    """The minutes are up in the middle of a measurement."""


class Clock:
    """Leaves out what no longer fits into the minutes, and breaks off what has begun and does not end."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + minutes * 60

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raise `OutOfTime` where the block is still at work when the minutes are up."""

        def ring(*_: Any) -> None:
            raise OutOfTime

        if self.left <= 0:
            raise OutOfTime
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, warmups: int, repeats: int) -> float:
    """Median of the runs, the device's work included."""
    taken = []
    for number in range(warmups + repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if number >= warmups:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


# --------------------------------------------------------------------------- training
def train_case(name: str, is_compiled: bool, device: str, is_tiny: bool, peak: float | None) -> dict[str, Any]:
    """Tokens a second and utilisation of one size; the update is halved until it fits into memory."""
    if is_tiny:
        config = quick_config(dropout=0.1, d_ff=48 if name == "base" else 64)
    else:
        config = VaswaniConfig.from_preset(name, vocab_size=37_000)
    pairs, length = (6, 5) if is_tiny else (1000, 25)
    while True:
        try:
            return _train_case(config, pairs, length, is_compiled, device, is_tiny, peak)
        except torch.cuda.OutOfMemoryError:
            if pairs < 100:
                raise
        # Here, outside of the handler, nothing holds the tensors of the failed update any more.
        pairs //= 2
        gc.collect()
        torch.cuda.empty_cache()


def _train_case(
    config: VaswaniConfig, pairs: int, length: int, is_compiled: bool, device: str, is_tiny: bool, peak: float | None
) -> dict[str, Any]:
    size = Size(is_tiny, config.vocab_size, pairs, length, length)
    torch.manual_seed(0)
    model: Any = VaswaniForConditionalGeneration(config).to(device).train()
    flops = step_flops(model, size)
    optimizer = paper_optimizer(model.parameters())
    set_learning_rate(optimizer, 1e-4)
    if is_compiled:
        torch._dynamo.reset()
        # The rehearsal traces as any compilation does, without generating code, which takes minutes on a CPU.
        model = torch.compile(model, dynamic=True, backend="aot_eager" if is_tiny else "inductor")
    batch = {key: value.to(device) for key, value in random_batch(size).items()}
    step = make_step("ours", model, batch, optimizer, is_bf16=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(step, device, warmups=1 if is_tiny else 3, repeats=1 if is_tiny else 7)
    return {
        "tokens": pairs * length,
        "seconds": seconds,
        "tokens_per_s": pairs * length / seconds,
        "model_tflops": flops / seconds / 1e12,
        "utilisation": None if peak is None else flops / seconds / (peak * 1e12),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


# --------------------------------------------------------------------------- decoding
def decode_cases(precision: str, device: str, is_tiny: bool) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What to decode in one precision: a description, and a function that returns the figures of both systems."""
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[precision]
    ours = random_model(quick_config() if is_tiny else base_config())
    models = {"ours": ours, "MarianMT": marian_of(ours)}
    models = {name: model.to(device, dtype).eval() for name, model in models.items()}
    batches, src_length, new_tokens = ((1, 3), 7, 6) if is_tiny else ((1, 64, 512), 25, 30)

    def decode(batch: int, beams: int) -> dict[str, Any]:
        sources = random_sources(ours.config, batch, src_length).to(device)
        search = fixed_search(ours.config, beams, new_tokens)
        figures, outputs = {}, {}
        for name, model in models.items():

            def run(name: str = name, model: Any = model) -> None:
                outputs[name] = model.generate(
                    input_ids=sources, attention_mask=torch.ones_like(sources), generation_config=search
                )

            seconds = seconds_of(run, device, warmups=1, repeats=1 if is_tiny else 3)
            figures[name] = {"seconds": seconds, "tokens_per_s": batch * new_tokens / seconds}
        same = [torch.equal(a[-new_tokens:], b[-new_tokens:]) for a, b in zip(*outputs.values(), strict=True)]
        return {**figures, "equal_sentences": sum(same)}

    for beams in (1, 4):
        for batch in batches:
            yield {"batch": batch, "beams": beams}, lambda batch=batch, beams=beams: decode(batch, beams)


# --------------------------------------------------------------------------- all of it
def guarded(clock: Clock, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a piece of work, or {"left_out": why}."""
    try:
        with clock.limit():
            return work()
    except OutOfTime:
        return {"left_out": "no time left"}
    except torch.cuda.OutOfMemoryError:
        return {"left_out": "out of memory"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(device: str, is_tiny: bool, minutes: float, peak: float | None, with_compile: bool) -> dict[str, Any]:
    """Everything, the cheap and most wanted first.

    Args:
        device (`str`): "cuda" or "cpu". is_tiny (`bool`): the rehearsal. minutes (`float`): after which it ends.
        peak (`float`, *optional*): TFLOP/s of the device, for the utilisation.
        with_compile (`bool`): also training under torch.compile.

    Returns:
        `dict`: "training" and "decoding", lists of rows.
    """
    clock = Clock(minutes)
    training, decoding = [], []

    def train_both(is_compiled: bool) -> None:
        for name in ("base", "big"):
            row = {"model": name, "compiled": is_compiled}
            one = guarded(clock, lambda n=name: train_case(n, is_compiled, device, is_tiny, peak))
            training.append({**row, **one})
            print(training[-1], file=sys.stderr, flush=True)

    train_both(False)
    for precision in ("bf16", "float32"):
        for row, work in decode_cases(precision, device, is_tiny):
            decoding.append({"precision": precision, **row, **guarded(clock, work)})
            print(decoding[-1], file=sys.stderr, flush=True)
    if with_compile:
        train_both(True)
    return {"training": training, "decoding": decoding}


def print_tables(figures: dict[str, Any], stream: Any) -> None:
    """The tables, for people."""
    head = figures["machine"]["accelerator"] or figures["machine"]["cpu"]
    peak = figures["peak_tflops"]
    told = f"peak {peak:g} TFLOP/s in bf16" if peak else "unknown device, give --peak-tflops for the utilisation"
    rows = [
        {"model": row["model"], "compiled": "yes" if row["compiled"] else "no", "tokens an update": row.get("tokens"),
         "target tokens/s": row.get("tokens_per_s"), "model TFLOP/s": row.get("model_tflops"),
         "utilisation %": 100 * row["utilisation"] if row.get("utilisation") is not None else None,
         "peak GiB": row.get("peak_gib"), "left out": row.get("left_out", "")}
        for row in figures["training"]
    ]  # fmt: skip
    report(f"Training on {head} ({told}), bf16 autocast", rows, stream)
    rows = []
    for row in figures["decoding"]:
        ours, theirs = (row.get(name, {}).get("tokens_per_s") for name in ("ours", "MarianMT"))
        rows.append(
            {"precision": row["precision"], "batch": row["batch"], "beam": row["beams"], "ours, tokens/s": ours,
             "MarianMT, tokens/s": theirs, "ratio": ours / theirs if ours and theirs else None,
             "equal sentences": row.get("equal_sentences"), "left out": row.get("left_out", "")}
        )  # fmt: skip
    report(f"Decoding on {head}", rows, stream)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="the run ends after so many (default: %(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of the device, where it is not known")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="also training under torch.compile"
    )
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every part at a tiny size on the CPU")
    args = parser.parse_args(argv)
    if not args.cpu_rehearsal and not torch.cuda.is_available():
        print("There is no GPU that torch can use here: nothing was measured.", file=sys.stderr)
        return 3
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = "cpu" if args.cpu_rehearsal else "cuda"
    figures: dict[str, Any] = {"benchmark": "gpu", "machine": machine(), "is_rehearsal": args.cpu_rehearsal}
    name = None if args.cpu_rehearsal else figures["machine"]["accelerator"]
    figures["peak_tflops"] = args.peak_tflops or peak_tflops(name)
    start = time.monotonic()
    figures.update(measure(device, args.cpu_rehearsal, args.minutes, figures["peak_tflops"], args.compile))
    figures["minutes"] = (time.monotonic() - start) / 60
    print_tables(figures, sys.stderr)
    out = os.environ.get("OUT")
    if out:
        with open(Path(out) / "gpu.txt", "w", encoding="utf-8") as stream:
            print_tables(figures, stream)
    emit(figures, Path(out) / "gpu.json" if out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
