"""How decoding grows with source length, translation length, batch, beam and vocabulary: ours beside MarianMT.

    python benchmarks/decode_scaling.py --plot scaling.png

One factor at a time changes, the others stay: base size, 32,000 pieces, 16 sentences of 25 tokens, beam 4, 20 new
tokens, float32, random weights that both hold. Memory is the highest rise above the loaded weights in a fresh process
for each point. From its rise with the lengths come the bytes that one more token costs, next to what the cache of keys
and values must hold by its shapes; the rest is work space and what an implementation copies.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
import peers

OURS, MARIAN = "ours", "MarianMT"
FIXED = {"source_tokens": 25, "new_tokens": 20, "batch": 16, "beams": 4, "vocab_size": 32_000}
FACTORS = {
    "source_tokens": [10, 25, 50, 100, 200],
    "new_tokens": [10, 20, 40, 80],
    "batch": [1, 4, 16, 64],
    "beams": [1, 2, 4, 8],
    "vocab_size": [4_000, 16_000, 32_000, 64_000],
}
QUICK_FIXED = {"source_tokens": 6, "new_tokens": 4, "batch": 2, "beams": 2, "vocab_size": 97}
QUICK_FACTORS = {
    "source_tokens": [6, 9],
    "new_tokens": [4, 6],
    "batch": [1, 2],
    "beams": [1, 2],
    "vocab_size": [61, 97],
}
_LABELS = {
    "source_tokens": "source tokens",
    "new_tokens": "new tokens",
    "batch": "sentences in a batch",
    "beams": "beams",
    "vocab_size": "vocabulary",
}


def build_model(point: dict[str, int], quick: bool) -> Any:
    """Ours, with random weights and the vocabulary of a point."""
    config = (peers.quick_config if quick else peers.base_config)(vocab_size=point["vocab_size"])
    return peers.random_model(config)


def decode(model: Any, config: Any, point: dict[str, int]) -> list[list[int]]:
    """Translate one batch: new tokens of each sentence."""
    sources = peers.random_sources(config, point["batch"], point["source_tokens"])
    search = peers.fixed_search(config, point["beams"], point["new_tokens"])
    return peers.translate(model, sources, point["batch"], search)


def decode_in_child(name: str, point: dict[str, int], quick: bool) -> Iterator[None]:
    """For `measuring.in_child`: one run at one point, measured beyond the weights."""
    model = build_model(point, quick)
    config = model.config
    if name == MARIAN:
        model = peers.marian_of(model)
    gc.collect()
    yield
    decode(model, config, point)


def cache_bytes(config: Any, dtype_bytes: int = 4) -> dict[str, int]:
    """What keys and values must take by their shapes.

    Args:
        config (`VaswaniConfig`): of the model. dtype_bytes (`int`): of one number.

    Returns:
        `dict`: bytes of one new token in one beam ("new_token"), and of one source token of a sentence, which its beams
        can share ("source_token").
    """
    width = config.num_attention_heads * (config.query_key_width + config.value_width)
    one = config.decoder_layers * width * dtype_bytes
    return {"new_token": one, "source_token": one}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Rise of the line of least squares through (x, y); 0 through a single x."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


# --------------------------------------------------------------------------- measuring
def measure(
    fixed: dict[str, int], factors: dict[str, list[int]], repeats: int, quick: bool, with_memory: bool
) -> list[dict[str, Any]]:
    """One row for each value of each factor: tokens/s, their ratio, equal outputs, and memory of both."""
    rows: list[dict[str, Any]] = []
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for factor, values in factors.items():
        for value in values:
            point = {**fixed, factor: value}
            key = tuple(point.values())
            if key not in known:  # the fixed point is part of several factors
                known[key] = _one_point(point, repeats, quick, with_memory)
            rows.append({"factor": factor, "value": value, **known[key]})
    return rows


def _one_point(point: dict[str, int], repeats: int, quick: bool, with_memory: bool) -> dict[str, Any]:
    ours = build_model(point, quick)
    models = {OURS: ours, MARIAN: peers.marian_of(ours)}
    timings = measuring.alternate(
        {name: lambda model=model: decode(model, ours.config, point) for name, model in models.items()},  # type: ignore[misc]
        repeats,
        between=gc.collect,
    )
    tokens = point["batch"] * point["new_tokens"]
    row: dict[str, Any] = {}
    for name, timing in timings.items():
        row[f"{name}_tokens_per_s"] = round(tokens / timing.median, 1)
    row["ratio"] = measuring.ratio(timings, OURS, MARIAN)["median"]
    row["equal"] = sum(a == b for a, b in zip(timings[OURS].result, timings[MARIAN].result, strict=True))
    if with_memory:
        for name in timings:
            row[f"{name}_peak_mib"] = round(measuring.peak_memory(decode_in_child, name, point, quick), 1)
    return row


def memory_a_token(rows: Sequence[dict[str, Any]], fixed: dict[str, int], config: Any) -> list[dict[str, Any]]:
    """Bytes that one more token costs, by shapes and as measured.

    A new token is one of one beam; a source token is one of a sentence, whose encoder states count as well.
    """
    shapes = cache_bytes(config)
    table = []
    for factor, name, divisor in (
        ("new_tokens", "new_token", fixed["batch"] * fixed["beams"]),
        ("source_tokens", "source_token", fixed["batch"]),
    ):
        entry: dict[str, Any] = {"one more": name, "cache_bytes_by_shape": shapes[name]}
        for system in (OURS, MARIAN):
            points = [(row["value"], row[f"{system}_peak_mib"] * 2**20) for row in rows if row["factor"] == factor]
            entry[f"{system}_bytes_measured"] = round(slope(points) / divisor)
        table.append(entry)
    return table


# --------------------------------------------------------------------------- the figure
def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One small plot a factor: tokens/s above, peak memory below where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    factors = list(dict.fromkeys(row["factor"] for row in rows))
    kinds = ["tokens_per_s"] + (["peak_mib"] if f"{OURS}_peak_mib" in rows[0] else [])
    figure, axes = pyplot.subplots(
        len(kinds), len(factors), figsize=(3 * len(factors), 2.6 * len(kinds)), squeeze=False, layout="constrained"
    )
    for line, kind in zip(axes, kinds, strict=True):
        for axis, factor in zip(line, factors, strict=True):
            own = [row for row in rows if row["factor"] == factor]
            for system, marker in ((OURS, "o-"), (MARIAN, "s--")):
                axis.plot([row["value"] for row in own], [row[f"{system}_{kind}"] for row in own], marker, label=system)
            axis.set_xscale("log", base=2)
            axis.set_xticks([row["value"] for row in own], [f"{row['value']:,}" for row in own])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel(_LABELS[factor])
            axis.grid(alpha=0.3)
        line[0].set_ylabel({"tokens_per_s": "tokens/s", "peak_mib": "MiB beyond weights"}[kind])
    axes[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.common_arguments(parser, repeats=3)
    parser.add_argument("--factors", nargs="+", choices=FACTORS, default=list(FACTORS), help="only these")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure into this file (.png, .svg, .pdf)")
    args = measuring.parse(parser, argv)
    fixed, factors = (QUICK_FIXED, QUICK_FACTORS) if args.quick else (FIXED, FACTORS)
    factors = {name: factors[name] for name in args.factors}
    rows = measure(fixed, factors, args.repeats, args.quick, not args.no_memory)
    figures: dict[str, Any] = {
        "benchmark": "decode_scaling",
        "machine": measuring.machine(),
        "settings": {"fixed": fixed, "quick": args.quick, "repeats": args.repeats},
        "points": rows,
    }
    measuring.report(f"Decoding; where not named, {', '.join(f'{v} {_LABELS[k]}' for k, v in fixed.items())}", rows)
    lengths = {"source_tokens", "new_tokens"}
    if not args.no_memory and lengths <= set(factors):
        config = (peers.quick_config if args.quick else peers.base_config)()
        figures["bytes_a_token"] = memory_a_token(rows, fixed, config)
        measuring.report("Memory of one more token", figures["bytes_a_token"])
    if args.plot:
        plot(rows, args.plot)
    measuring.emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
