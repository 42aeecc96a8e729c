"""What structural pruning of heads saves: time and size of the pruned model beside the whole and the masked one.

    python benchmarks/prune.py

A base model with random weights (time does not depend on their values) loses half of its heads, then all but one of
each attention. Passes over given targets and beam searches take turns; "gap" is the largest difference of a logit
between the pruned and the masked model, which should be the same.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import alternate, common_arguments, emit, machine, parse, ratio, report

WHOLE, MASKED, PRUNED = "whole", "masked", "pruned"


def spec_of(kept: Sequence[int]) -> str:
    """The heads that go where only the numbered ones of each attention stay."""
    gone = [number for number in range(8) if number not in kept]
    return ",".join(f"{kind}.*.{number}" for kind in ("encoder", "decoder", "cross") for number in gone)


def measure(kept: Sequence[int], sentences: int, length: int, repeats: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Times, sizes and the gap for one choice of heads.

    Args:
        kept (`Sequence[int]`): heads of each attention that stay. sentences, length (`int`): of the batch, in tokens.
        repeats (`int`): rounds. changes (`dict`): of the base configuration.
    """
    import torch

    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
    from hf_vaswani.analysis.head_masks import masked_heads, parse_heads
    from hf_vaswani.analysis.pruning import prune_heads

    torch.manual_seed(1)
    config = VaswaniConfig.from_preset("base", **changes)
    model = VaswaniForConditionalGeneration(config).eval()
    heads = parse_heads(spec_of(kept), model)
    smaller = prune_heads(model, heads)
    ids = torch.randint(3, config.vocab_size, (sentences, length))
    limits = {"max_new_tokens": length, "min_new_tokens": length, "num_beams": 4}

    @torch.inference_mode()
    def forward(one: Any) -> Any:
        return one(input_ids=ids, labels=ids).logits

    def masked() -> Any:
        with masked_heads(model, heads):
            return forward(model)

    passes = alternate({WHOLE: lambda: forward(model), MASKED: masked, PRUNED: lambda: forward(smaller)}, repeats)
    gap = float((passes[PRUNED].result - passes[MASKED].result).abs().max())
    searches = alternate(
        {
            WHOLE: lambda: model.generate(input_ids=ids, **limits),
            PRUNED: lambda: smaller.generate(input_ids=ids, **limits),
        },
        repeats,
    )
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, one in ((WHOLE, model), (PRUNED, smaller)):
            one.save_pretrained(Path(folder, name))
            sizes[name] = Path(folder, name, "model.safetensors").stat().st_size
    return {
        "forward_s": {name: timing.median for name, timing in passes.items()},
        "search_s": {name: timing.median for name, timing in searches.items()},
        "forward_over_masked": ratio(passes, PRUNED, MASKED),
        "forward_over_whole": ratio(passes, PRUNED, WHOLE),
        "search_over_whole": ratio(searches, PRUNED, WHOLE),
        "bytes": sizes,
        "gap": gap,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, repeats=5)
    parser.add_argument("--sentences", type=int, default=8, help="in a batch (default: 8)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sentence (default: 64)")
    args = parse(parser, argv)
    size = {"vocab_size": 37000}
    if args.quick:
        size = {"vocab_size": 500, "d_model": 64, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
    figures: dict[str, Any] = {"benchmark": "prune", "machine": machine(), "choices": {}}
    rows = []
    for name, kept in (("4 of 8 heads", range(4)), ("1 of 8 heads", range(1))):
        one = measure(
            list(kept),
            2 if args.quick else args.sentences,
            9 if args.quick else args.length,
            1 if args.quick else args.repeats,
            size,
        )
        figures["choices"][name] = one
        rows.append(
            {
                "kept": name,
                "pass: whole s": one["forward_s"][WHOLE],
                "masked s": one["forward_s"][MASKED],
                "pruned s": one["forward_s"][PRUNED],
                "masked / pruned": one["forward_over_masked"]["median"],
                "whole / pruned": one["forward_over_whole"]["median"],
                "search, whole / pruned": one["search_over_whole"]["median"],
                "bytes, pruned / whole": round(one["bytes"][PRUNED] / one["bytes"][WHOLE], 3),
                "gap": one["gap"],
            }
        )
    report(f"Heads taken out of a base model, {args.sentences} x {args.length} tokens", rows)
    emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
