"""Table 3 of the paper as one sweep: any of its rows, several seeds, at the size of the recipe's model.

    python examples/ablation.py examples/recipes/ablation_tatoeba.yaml --rows base,A-h1,C-N2,D,E --seeds 1,2,3
    python examples/ablation.py examples/recipes/wmt14_en_de_base.yaml --rows all --seeds 1 --set output=runs/table3 \
        --launcher "accelerate launch --config_file examples/launch/eight_gpus.yaml"

Start it again after any break: what is measured is not done again, and a run that was broken off goes on from its
checkpoint. Groups are A to E, rows have the names of the presets ("A-h1", "C-dff4096", "big").
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from transformers.utils import logging

from hf_vaswani.analysis.ablation import make_sweep, run_sweep
from hf_vaswani.analysis.ablation_table import as_data, as_markdown, as_tsv, table_rows
from hf_vaswani.data import CorpusError
from hf_vaswani.training import ConfigError, load_config


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and measure rows of Table 3.")
    parser.add_argument("recipe", help="YAML file whose `model` is the row base; see examples/recipes/ablation_*.yaml")
    parser.add_argument("--rows", default="all", help="rows and groups with commas between, or all (default)")
    parser.add_argument("--seeds", default="1,2,3", help="whole numbers with commas between (default: 1,2,3)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--launcher", default="", help="what starts a run on several devices: accelerate launch …")
    parser.add_argument("--table", action="store_true", help="train nothing: the table of what has been measured")
    parser.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[], help="change a value"
    )
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if args.parallel < 1:
        raise ConfigError(f"--parallel must be at least 1, got {args.parallel}.")
    try:
        seeds = [int(one) for one in args.seeds.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds are whole numbers with commas between, got {args.seeds!r}.") from error
    sweep = make_sweep(load_config(args.recipe, args.changes), args.rows.split(","), seeds)
    failed = {} if args.table else run_sweep(sweep, args.parallel, shlex.split(args.launcher))
    runs = sweep.measured()
    if not runs:
        raise ConfigError(f"{sweep.output} holds no run that has been measured.")
    rows, signature = table_rows(sweep), runs[0].bleu_signature
    data = json.dumps(as_data(rows, signature), indent=2) + "\n"
    for ending, text in (("md", as_markdown(rows, signature)), ("tsv", as_tsv(rows)), ("json", data)):
        Path(sweep.output, f"table.{ending}").write_text(text, encoding="utf-8")
    print(as_markdown(rows, signature), end="")
    for name, reason in failed.items():
        print(f"ablation.py: {name} failed and is not in the table: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, CorpusError) as error:
        sys.exit(f"ablation.py: {error}")
    except KeyboardInterrupt:
        sys.exit("ablation.py: stopped; start it again to go on.")
