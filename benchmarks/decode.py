"""Decoding a model of base size: ours beside MarianMT and CTranslate2 with the same weights.

    python benchmarks/decode.py
    python benchmarks/decode.py --batch 1

The weights are random (fixed seed), the sources random pieces, and every translation has exactly the same number of
tokens, as the end token is barred in all systems alike. The beams are those of one search without length penalty, so
the outputs in float32 can be compared token for token; bfloat16 and int8 round, and their equal share is only told.
MarianMT always adds biases in attention and before the softmax: zeros here, unless --biases gives ours such too.
"""

import argparse
import copy
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
import peers
import torch

OURS, OURS_HALF, MARIAN = "ours float32", "ours bfloat16", "MarianMT float32"
CTRANSLATE2, CTRANSLATE2_INT8 = "CTranslate2 float32", "CTranslate2 int8"
SYSTEMS = (OURS, OURS_HALF, MARIAN, CTRANSLATE2, CTRANSLATE2_INT8)
# The comparisons that are printed: ours, theirs.
PAIRS = ((OURS, MARIAN), (OURS, CTRANSLATE2), (OURS_HALF, MARIAN), (OURS_HALF, CTRANSLATE2_INT8))


def build(name: str, settings: dict[str, Any], folder: Path, model: Any = None) -> Callable[[], Any]:
    """One system, ready to decode all sentences.

    Args:
        name (`str`): one of `SYSTEMS`. settings (`dict`): of `settings_of`.
        folder (`Path`): for an export. model (*optional*): ours in float32, where it is built already.

    Returns:
        a callable that decodes; `tokens_of` reads what it returns.
    """
    model = model if model is not None else build_model(settings)
    sources = peers.random_sources(model.config, settings["sentences"], settings["source_tokens"])
    beams, new_tokens, batch = settings["beams"], settings["new_tokens"], settings["batch"]
    if name in (CTRANSLATE2, CTRANSLATE2_INT8):
        kind = name.split()[1]
        translator = peers.ctranslate2_of(model, folder / kind, kind)
        pieces = peers.pieces_of(sources.tolist())
        return lambda: peers.ctranslate2_search(translator, pieces, batch, beams, new_tokens)
    if name == OURS_HALF:
        model = copy.deepcopy(model).bfloat16()
    elif name == MARIAN:
        model = peers.marian_of(model)
    search = peers.fixed_search(model.config, beams, new_tokens)
    return lambda: peers.translate(model, sources, batch, search)


def build_model(settings: dict[str, Any]) -> Any:
    """Ours, with random weights of a fixed seed."""
    changes = {"attention_bias": settings["biases"], "output_bias": settings["biases"]}
    config = (peers.quick_config if settings["quick"] else peers.base_config)(**changes)
    return peers.random_model(config)


def tokens_of(result: Any) -> list[list[int]]:
    """New tokens of each sentence, whichever system they are of."""
    return result if isinstance(result[0], list) else peers.ids_of(result)


def make_in_child(name: str, settings: dict[str, Any]) -> Callable[[], list[list[int]]]:
    """For `measuring.alternate_in_children`: one system, whose files last as long as its process."""
    folder = tempfile.TemporaryDirectory()
    run = build(name, settings, Path(folder.name))

    def decode() -> list[list[int]]:
        assert Path(folder.name).is_dir()
        return tokens_of(run())

    return decode


def decode_in_child(name: str, settings: dict[str, Any]) -> Iterator[None]:
    """For `measuring.in_child`: one run of one system, measured beyond its weights."""
    with tempfile.TemporaryDirectory() as folder:
        run = build(name, settings, Path(folder))
        gc.collect()
        yield
        run()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes: given, or of base, or of a quick try."""
    sizes = (3, 3, 7, 6) if args.quick else (32, 32, 25, 30)
    batch, sentences, source_tokens, new_tokens = sizes
    batch = args.batch or batch
    # One by one, eight sentences are enough.
    sentences = args.sentences or (sentences if batch > 1 else min(sentences, 8))
    return {
        "sentences": sentences,
        "batch": batch,
        "beams": args.beams,
        "source_tokens": source_tokens,
        "new_tokens": new_tokens,
        "biases": args.biases,
        "quick": args.quick,
    }


def measure(names: Sequence[str], settings: dict[str, Any], repeats: int, with_memory: bool) -> dict[str, Any]:
    """Let the systems take turns.

    Returns:
        `dict`: "systems" (seconds, tokens/s and memory of each), "ratios" and "equal" (sentences alike) by pair.
    """
    timings = measuring.alternate_in_children(make_in_child, names, (settings,), repeats)
    tokens = settings["sentences"] * settings["new_tokens"]
    outputs = {name: timing.result for name, timing in timings.items()}
    for name, rows in outputs.items():
        if [len(row) for row in rows] != [settings["new_tokens"]] * settings["sentences"]:
            raise SystemExit(f"{name} did not write {settings['new_tokens']} tokens for each sentence.")
    figures: dict[str, Any] = {"systems": {}, "ratios": {}, "equal": {}}
    for name, timing in timings.items():
        figures["systems"][name] = {
            "median_s": round(timing.median, 4),
            "seconds": [round(one, 4) for one in timing.seconds],
            "tokens_per_s": round(tokens / timing.median, 1),
        }
        if with_memory:
            peak = measuring.peak_memory(decode_in_child, name, settings)
            figures["systems"][name]["peak_mib_beyond_weights"] = round(peak, 1)
    for ours, theirs in PAIRS:
        if ours in timings and theirs in timings:
            figures["ratios"][f"{ours} / {theirs}"] = measuring.ratio(timings, ours, theirs)
            alike = sum(a == b for a, b in zip(outputs[ours], outputs[theirs], strict=True))
            figures["equal"][f"{ours} = {theirs}"] = alike
    return figures


def print_profile(settings: dict[str, Any]) -> None:
    """Where ours spends its time, by operator, on standard error."""
    with tempfile.TemporaryDirectory() as folder:
        run = build(OURS, settings, Path(folder))
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.common_arguments(parser)
    parser.add_argument("--beams", type=int, default=4, help="1 is greedy search (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="sentences decoded together (default: 32)")
    parser.add_argument("--sentences", type=int, help="in all (default: 32, or 8 with --batch 1)")
    parser.add_argument("--biases", action="store_true", help="in attention and before the softmax, as MarianMT has")
    parser.add_argument("--memory", action="store_true", help="also peak memory beyond weights, in fresh processes")
    parser.add_argument("--profile", action="store_true", help="also print where ours spends its time")
    args = measuring.parse(parser, argv)
    settings = settings_of(args)
    names = [name for name in SYSTEMS if peers.has_ctranslate2() or not name.startswith("CTranslate2")]
    figures: dict[str, Any] = {"benchmark": "decode", "machine": measuring.machine(), "settings": settings}
    figures |= measure(names, settings, args.repeats, args.memory)
    measuring.report(
        f"Decoding, {settings['sentences']} sentences, {settings['batch']} at a time, beam {settings['beams']}",
        [
            {"system": name, **{key: value for key, value in one.items() if key != "seconds"}}
            for name, one in figures["systems"].items()
        ],
    )
    measuring.report(
        "How many times faster",
        [
            {"pair": pair, **one, "equal sentences": figures["equal"][pair.replace(" / ", " = ")]}
            for pair, one in figures["ratios"].items()
        ],
    )
    if len(names) < len(SYSTEMS):
        print("\nCTranslate2 is not installed and was left out: pip install ctranslate2", file=sys.stderr)
    if args.profile:
        print_profile(settings)
    measuring.emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
