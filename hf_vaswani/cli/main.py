"""The command `hf-vaswani`. Standard output carries results only; all else goes to standard error."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from ..data.corpus import CorpusError
from . import (
    attention,
    average,
    complexity,
    cost,
    demo,
    evaluate,
    export_model,
    heads,
    import_model,
    prune,
    quickstart,
    score,
    self_test,
    train,
    translate,
)
from .output import Terminated, UserError, stopped

_BROKEN_PIPE = 128 + 13  # what a shell reports of a program that SIGPIPE ended


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="hf-vaswani", description="The 2017 Transformer as a translation model: try it, train it, use it."
    )
    parser.add_argument("--version", action="version", version=f"hf-vaswani {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    quickstart.add_parser(commands)
    translate.add_parser(commands)
    train.add_parser(commands)
    evaluate.add_parser(commands)
    average.add_parser(commands)
    score.add_parser(commands)
    self_test.add_parser(commands)
    import_model.add_parser(commands)
    export_model.add_parser(commands)
    attention.add_parser(commands)
    heads.add_parser(commands)
    prune.add_parser(commands)
    complexity.add_parser(commands)
    cost.add_parser(commands)
    demo.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv (`Sequence[str]`, *optional*): arguments; None: those of the process.

    Returns:
        `int`: 0 when all went well, 2 for what the user must put right, 130 when stopped by hand, 141 when the reader
        of the output went away, 143 after SIGTERM.
    """
    if argv is None:
        # The modules stay until the end: looking at them again and again, and once more on the way out, takes a second.
        gc.freeze()
    args = build_parser().parse_args(argv)
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
    try:
        return args.run(args)
    except (UserError, CorpusError) as error:
        print(f"hf-vaswani {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (KeyboardInterrupt, Terminated) as error:
        return stopped(args.command, error)


if __name__ == "__main__":
    sys.exit(main())
