"""`hf-vaswani cost`: Table 2 of the paper's training cost, for any recipe and device."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .output import UserError, note, plain_faults
from .translate import positive


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "cost",
        help="Table 2 of the paper: training cost of a recipe by the paper's method and by counted FLOPs",
        description="Print what a training costs: by the paper's method (time x devices x sustained rate) and by "
        "counting the matrix products, beside the two rows of the paper's Table 2. Nothing is trained. Time comes from "
        "--hours, --seconds-per-update or --text; without one, the time at the device's sustained rate is told.",
    )
    parser.add_argument("run_of", metavar="RECIPE_OR_PRESET", help="a recipe (YAML), or a preset such as base or big")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the recipe, such as training.updates=500; may be given several times",
    )
    parser.add_argument(
        "--device",
        help="k80, k40, m40, p100: the paper's sustained rates; t4, v100, a100, l4, h100, h200: with "
        "--sustained-tflops or --utilisation; cpu or cuda: measured here by a matrix product",
    )
    parser.add_argument("--devices", type=positive, metavar="N", help="how many (default: 8, as in the paper)")
    parser.add_argument("--hours", type=_above_0, metavar="H", help="time of the training")
    parser.add_argument("--seconds-per-update", type=_above_0, metavar="S", help="measured time of an update")
    parser.add_argument("--sustained-tflops", type=_above_0, metavar="T", help="measured rate of one device")
    parser.add_argument("--utilisation", type=_above_0, metavar="U", help="measured share of the peak, such as 0.4")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="for the device's rate (default: the recipe's, or fp32)"
    )
    parser.add_argument("--updates", type=positive, metavar="N", help="of a preset (default: the paper's)")
    parser.add_argument("--src-length", type=positive, default=32, metavar="N", help="source tokens of a pair, assumed")
    parser.add_argument("--tgt-length", type=positive, default=32, metavar="N", help="target tokens of a pair, assumed")
    parser.add_argument(
        "--vocab-size", type=positive, metavar="N", help="pieces (default: the recipe's tokenizer, or the preset's)"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="read the recipe's own text, count on its batches and measure the time of an update here, as "
        "hf-vaswani train --dry-run does",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the table goes to standard output."""
    from ..analysis.training_cost import CostRow, paper_rows
    from ..training import ConfigError, leave_processes

    if args.hours is not None and args.seconds_per_update is not None:
        raise UserError("--hours and --seconds-per-update say the same thing twice: give one of them.")
    has_time = args.hours is not None or args.seconds_per_update is not None
    if args.device is None and args.sustained_tflops is None:
        if has_time and not args.text:
            raise UserError("A time needs a device: give --device, or its rate with --sustained-tflops.")
        if args.utilisation is not None:
            raise UserError("--utilisation is a share of a device's peak: give --device.")
    if args.text and has_time:
        raise UserError("--text measures the time here: leave --hours and --seconds-per-update out.")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise UserError(f"{args.json} cannot be written: there is no folder {args.json.parent}.")
    try:
        planned = _by_text(args) if args.text else _by_count(args)
        row = CostRow(name=str(args.run_of), **_on_device(args, planned))
        table = [*paper_rows(args.src_length, args.tgt_length), row]
    except (ConfigError, ValueError) as error:
        raise UserError(str(error)) from error
    finally:
        leave_processes()
    with plain_faults():
        sys.stdout.write("\n".join(_lines(args, planned, table)) + "\n")
    if args.json is not None:
        values = {"run": planned["figures"], "rows": [one.to_dict() for one in table]}
        try:
            args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{args.json} cannot be written ({error.strerror or error}).") from error
    return 0


def _is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or Path(name).is_file()


def _by_count(args: argparse.Namespace) -> dict[str, Any]:
    """What a recipe or preset comes to, without its text."""
    from ..analysis.training_cost import count_training
    from ..configuration_vaswani import VaswaniConfig
    from ..training import load_config
    from ..training.config import BatchConfig
    from ..training.dry_run_cost import PAPER_RUNS, paper_size
    from ..training.recipe import Recipe

    if _is_recipe(args.run_of):
        if args.updates is not None:
            raise UserError("The recipe says how many updates: change it with --set training.updates=N.")
        recipe = load_config(args.run_of, args.overrides)
        config, updates, batches, training = _model_of(args, recipe), recipe.training.updates, *_parts(recipe)
    else:
        if args.overrides:
            raise UserError("--set changes a recipe; a preset has none.")
        changes = {} if args.vocab_size is None else {"vocab_size": args.vocab_size}
        config, batches, training = VaswaniConfig.from_preset(args.run_of, **changes), BatchConfig(), Recipe()
        size = paper_size(config)
        updates = args.updates or (training.updates if size is None else PAPER_RUNS[size][1])
    counted = count_training(
        config,
        updates,
        batches.src_tokens,
        batches.tgt_tokens,
        args.src_length,
        args.tgt_length,
        training.gradient_checkpointing,
    )
    size = paper_size(config)
    return {
        "counted": counted.flops,
        "updates": updates,
        "precision": training.precision,
        # The paper's own time belongs to its own run alone.
        "paper_hours": PAPER_RUNS[size][0] if size is not None and updates == PAPER_RUNS[size][1] else None,
        "figures": asdict(counted) | {"flops": counted.flops},
        "text": [
            f"{counted.parameters:,} parameters, {counted.vocab_size:,} pieces; {updates:,} updates of "
            f"{counted.pairs:,} pairs with {counted.src_length} source and {counted.tgt_length} target tokens each, "
            "which is assumed",
            f"{_power(counted.update_flops)} FLOPs an update, {_power(counted.flops)} the training: the matrix "
            "products of forward and backward, a multiply-add as two",
        ],
    }


def _parts(recipe: Any) -> tuple[Any, Any]:
    return recipe.batches, recipe.training


def _model_of(args: argparse.Namespace, recipe: Any) -> Any:
    """The configuration that a recipe's model will have."""
    from ..configuration_vaswani import VaswaniConfig
    from ..training.run import load_tokenizer

    if recipe.start_from is not None:
        try:
            return VaswaniConfig.from_pretrained(recipe.start_from)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"start_from: {recipe.start_from} holds no model that can be loaded: {reason}") from error
    config = recipe.model_config(None)
    config.vocab_size = args.vocab_size or recipe.tokenizer.vocab_size
    path = recipe.tokenizer.path
    if args.vocab_size is None and path is not None:
        if Path(path).is_dir():
            config.vocab_size = len(load_tokenizer(recipe))
        else:
            note(
                f"The tokenizer {path} is not here: {config.vocab_size:,} pieces are taken (--vocab-size N for others)."
            )
    return config


def _by_text(args: argparse.Namespace) -> dict[str, Any]:
    """What a recipe comes to on its own text, with the time measured here."""
    from ..training import load_config
    from ..training.dry_run import dry_run
    from ..training.run import prepare_run

    if not _is_recipe(args.run_of):
        raise UserError("--text needs a recipe: a preset names no text.")
    if args.vocab_size is not None or args.updates is not None:
        raise UserError("With --text the recipe decides pieces and updates: leave --vocab-size and --updates out.")
    prepared = prepare_run(load_config(args.run_of, args.overrides), dry_run=True)
    plan = dry_run(
        prepared.model,
        prepared.sampler,
        prepared.corpus,
        prepared.collator,
        prepared.recipe,
        process_count=1 if args.devices is None else args.devices,
        accelerator=prepared.accelerator,
        output=prepared.output,
    )
    hours = None if plan.time is None else plan.time.hours
    return {
        "counted": plan.cost.counted,
        "updates": plan.updates,
        "precision": prepared.accelerator.mixed_precision,
        "paper_hours": None,
        "measured": (hours, plan.memory.device, plan.text.device_count, plan.cost),
        "figures": plan.to_dict(),
        "text": [
            f"{plan.parameters.total:,} parameters; {plan.updates:,} updates of {plan.text.src_tokens:,.0f} source "
            f"and {plan.text.tgt_tokens:,.0f} target tokens on average and {100 * plan.text.padding:.1f} % padding",
            f"{_power(plan.cost.counted / plan.updates)} FLOPs an update, {_power(plan.cost.counted)} the training: "
            "the matrix products of forward and backward on its own batches, a multiply-add as two",
        ],
    }


def _on_device(args: argparse.Namespace, planned: dict[str, Any]) -> dict[str, Any]:
    """Device, time and rate of the run that was asked for."""
    from ..analysis.training_cost import PAPER_DEVICE, PAPER_DEVICE_COUNT, device_rate

    values: dict[str, Any] = {"counted": planned["counted"], "device_count": args.devices or PAPER_DEVICE_COUNT}
    precision = args.precision or planned["precision"]
    if "measured" in planned:
        hours, device, count, cost = planned["measured"]
        values |= {"device": device, "device_count": count, "hours": hours, "hours_of": "measured here"}
        values |= {"sustained_tflops": cost.sustained_tflops, "sustained_of": cost.sustained_of}
        if args.device is not None:
            raise UserError("--text measures on the device that is here: leave --device out.")
        if args.sustained_tflops is not None:
            values |= {"sustained_tflops": args.sustained_tflops, "sustained_of": "as given"}
        return values
    if args.device is None and args.sustained_tflops is None:
        return values
    rate, rate_of = device_rate(args.device or "", precision, args.sustained_tflops, args.utilisation)
    values |= {"device": args.device or "device", "sustained_tflops": rate, "sustained_of": rate_of}
    if args.hours is not None:
        values |= {"hours": args.hours, "hours_of": "as given"}
    elif args.seconds_per_update is not None:
        hours = args.seconds_per_update * planned["updates"] / 3600
        values |= {"hours": hours, "hours_of": f"{args.seconds_per_update:g} s x {planned['updates']:,} updates"}
    elif (args.device or "").upper() == PAPER_DEVICE and values["device_count"] == PAPER_DEVICE_COUNT:
        hours = planned["paper_hours"]
        values |= {"hours": hours, "hours_of": "" if hours is None else "the paper's"}
    return values


def _lines(args: argparse.Namespace, planned: dict[str, Any], table: list[Any]) -> list[str]:
    rows = [
        (
            *("run", "devices", "hours", "TFLOPS", "time x devices x rate", "published", "counted", "counted share"),
            "BLEU En-De, En-Fr",
        )
    ]
    for one in table:
        published = one.published
        rows.append(
            (
                one.name,
                "-" if one.device is None else f"{one.device_count} {one.device}",
                "-" if one.hours is None else f"{one.hours:.4g}",
                "-" if one.sustained_tflops is None else f"{one.sustained_tflops:.4g}",
                "-" if one.paper_method is None else _power(one.paper_method),
                "-" if published is None else _power(published.flops, 1),
                _power(one.counted),
                "-" if one.counted_share is None else f"{100 * one.counted_share:.1f} %",
                "-" if published is None else f"{published.bleu_en_de}, {published.bleu_en_fr}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [*planned["text"], ""]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    own = table[-1]
    lines.append("")
    if own.sustained_tflops is not None:
        lines.append(f"rate of one device: {own.sustained_tflops:.4g} TFLOPS, {own.sustained_of}")
    if own.hours is not None:
        lines.append(f"time: {_duration(own.hours)}, {own.hours_of}")
    elif own.hours_at_rate is not None:
        lines.append(
            f"time: not given; the counted FLOPs take {_duration(own.hours_at_rate)} on "
            f"{own.device_count} device{'s' * (own.device_count > 1)} if that rate is kept"
        )
    lines.append(
        "The paper's rows are counted at 37,000 pieces and 25,000 tokens a side and update, in pairs of "
        f"{args.src_length} and {args.tgt_length}. Counted share: counted / (time x devices x rate). BLEU: the "
        "paper's, tokenised, for En-De compound-split."
    )
    return lines


def _power(number: float, digits: int = 2) -> str:
    """3.28e18 for 3.28 * 10^18."""
    mantissa, exponent = f"{number:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _duration(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.3g} s"
    return f"{hours * 60:.3g} min" if hours < 1 else f"{hours:,.1f} h"


def _above_0(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
