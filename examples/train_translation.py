"""Train a translation model by a recipe: `hf-vaswani train`, spelled out.

    python examples/train_translation.py --config examples/recipes/multi30k_en_de_tiny.yaml
    accelerate launch --config_file examples/launch/eight_gpus.yaml examples/train_translation.py --config RECIPE
    torchrun --nproc-per-node 2 examples/train_translation.py --config RECIPE

One process or many: only the launch line changes. examples/README.md has one for each case.
"""

import argparse
import sys

from hf_vaswani.data import CorpusError
from hf_vaswani.training import CheckpointError, ConfigError, TrainingDiverged, leave_processes, load_config
from hf_vaswani.training.run import prepare_run

STOPPED_BY_SIGNAL = 128 + 15  # tells a scheduler that the run is to be started again with --resume


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a translation model by a recipe.")
    parser.add_argument("--config", required=True, metavar="RECIPE", help="YAML file; see examples/recipes")
    parser.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[], help="change a value"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in the output folder, if it holds one"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove the run in the output folder first")
    parser.add_argument("--dry-run", action="store_true", help="say what the run would cost, and train nothing")
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    if args.dry_run:  # the command line has the plan and its print-out
        from hf_vaswani.cli.main import main as command_line

        changes = [part for change in args.changes for part in ("--set", change)]
        return command_line(["train", args.config, *changes, "--dry-run"])
    config = load_config(args.config, args.changes)  # checked as a whole before anything is done
    run = prepare_run(config, resume=args.resume, overwrite=args.overwrite)  # tokenizer, text, batches, model
    result = run.train(resume=args.resume)  # updates, validation, checkpoints, and the mean of the last ones
    if run.accelerator.is_main_process:
        print(f"{result.updates:,} updates in {result.seconds:,.0f} s ({result.ended_by}): {run.output}")
    return STOPPED_BY_SIGNAL if result.ended_by == "signal" else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CheckpointError, ConfigError, CorpusError, TrainingDiverged) as error:
        sys.exit(f"train_translation.py: {error}")
    finally:
        leave_processes()
