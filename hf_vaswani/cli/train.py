"""`hf-vaswani train`: a run from its recipe, on one process or many."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from .output import UserError, note

_STOPPED_BY_SIGNAL = 128 + 15


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train a model by a recipe (YAML). On several devices the same command runs under a launcher: "
        "accelerate launch -m hf_vaswani.cli train RECIPE. A run that ended, in whatever way, goes on with --resume.",
    )
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="YAML file; see examples/recipes")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the recipe, such as training.updates=500; may be given several times",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in the output folder, if any")
    parser.add_argument("--overwrite", action="store_true", help="remove the run in the output folder first")
    parser.add_argument("--dry-run", action="store_true", help="say what the run would be and cost, and train nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the run's scores go to standard output."""
    from ..training import AveragingError, CheckpointError, ConfigError, TrainingDiverged, leave_processes, load_config
    from ..training.run import prepare_run

    if args.resume and args.overwrite:
        raise UserError("--resume and --overwrite are opposites: give one of them.")
    try:
        config = load_config(args.recipe, args.overrides)
        prepared = prepare_run(config, resume=args.resume, overwrite=args.overwrite, dry_run=args.dry_run)
        if args.dry_run:
            _show_plan(prepared)
            return 0
        result = prepared.train(resume=args.resume)
    except (AveragingError, CheckpointError, ConfigError, TrainingDiverged) as error:
        raise UserError(str(error)) from error
    finally:
        leave_processes()
    if result.ended_by == "signal":
        note(f"Stopped after update {result.updates:,}; go on with: {_again(args)}")
        return _STOPPED_BY_SIGNAL
    if prepared.accelerator.is_main_process:
        print(_summary(prepared, result), flush=True)
    return 0


def _show_plan(prepared: Any) -> None:
    from ..training.dry_run import dry_run
    from ..training.run import cache_folder

    plan = dry_run(
        prepared.model,
        prepared.sampler,
        prepared.corpus,
        prepared.collator,
        prepared.recipe,
        checkpoints=prepared.config.checkpoints,
        accelerator=prepared.accelerator,
        output=prepared.output,
    )
    if prepared.accelerator.is_main_process:
        print(plan, flush=True)
        note(f"Kept for the run: its tokenizer and its encoded text, in {cache_folder(prepared.config)}.")


def _again(args: argparse.Namespace) -> str:
    changes = "".join(f" --set {shlex.quote(one)}" for one in args.overrides)
    program = "python -m hf_vaswani.cli" if sys.argv[0].endswith("__main__.py") else "hf-vaswani"
    return f"{program} train {shlex.quote(str(args.recipe))}{changes} --resume"


def _summary(prepared: Any, result: Any) -> str:
    lines = [
        f"{result.updates:,} updates ({result.ended_by}), {result.epochs:.1f} epochs, {result.tgt_tokens:,} target "
        f"tokens in {result.seconds:,.0f} s; {result.skipped_count} updates skipped"
    ]
    if result.validations:
        last = result.validations[-1]
        best = "none was a number" if result.best_update is None else f"best at update {result.best_update:,}"
        scores = ", ".join(f"{k} {v:.2f}" if v < 1e6 else f"{k} {v:.2e}" for k, v in last.items() if k != "update")
        lines.append(f"last validation, update {last['update']:,}: {scores}; {best}")
    lines.append(f"model: {prepared.output / 'model'} (mean of {result.averaged_count} checkpoint(s))")
    return "\n".join(lines)
