"""`hf-vaswani import`: another program's checkpoint in, a folder of ours out, with proof."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from .output import UserError, note
from .translate import positive

# The same words as `interop.importing.KINDS`; spelled here so that `--help` loads nothing heavy. A test compares them.
KINDS = ("marian", "fairseq", "opennmt-py", "tensor2tensor", "sockeye", "joeynmt", "torch", "ctranslate2")


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "import",
        help="bring in a checkpoint of another program",
        description="Read weights, hyper-parameters and vocabulary of another program's Transformer, write a folder "
        "that translates, and compare both sides on real sentences before that folder gets its name. The report goes "
        "to standard output and into the folder (conversion.json).",
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("path", metavar="PATH", type=Path, help="the checkpoint: a file, or the folder it lies in")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to come")
    parser.add_argument("--config", type=Path, metavar="FILE", help="hyper-parameters, where they lie apart")
    parser.add_argument("--source-vocab", type=Path, metavar="FILE", help="vocabulary of the source, or of both sides")
    parser.add_argument("--target-vocab", type=Path, metavar="FILE", help="vocabulary of the target")
    parser.add_argument("--codes", type=Path, metavar="FILE", help="BPE codes of subword-nmt")
    parser.add_argument("--source-spm", type=Path, metavar="FILE", help="SentencePiece model of the source, or of both")
    parser.add_argument("--target-spm", type=Path, metavar="FILE", help="SentencePiece model of the target")
    parser.add_argument("--mapping", type=Path, metavar="FILE", help="YAML that names the tensors (KIND torch)")
    parser.add_argument("--source-language", metavar="CODE", help="such as de, for Moses tokenisation")
    parser.add_argument("--target-language", metavar="CODE", help="such as en, for Moses tokenisation")
    parser.add_argument("--moses", action="store_true", help="text was tokenised by Moses' scripts before training")
    parser.add_argument("--lowercase", action="store_true", help="text was lowercased before training")
    add_check_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion in OUT")
    parser.set_defaults(run=run)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """What the parity check runs on; import and export share it."""
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="lines to check with (default: bundled ones)")
    parser.add_argument(
        "--count", type=positive, metavar="N", help="sentences to check with (default: 32, of a large model 6)"
    )


@contextmanager
def conversion_faults(out: Path) -> Iterator[None]:
    """One sentence for what can go wrong in a conversion, either way.

    Raises:
        UserError: the checkpoint, the other program's library or the disk does not allow it.
    """
    from safetensors import SafetensorError

    from ..interop.foreign import ConversionError

    try:
        yield
    except (ConversionError, ImportError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}. Nothing was kept.") from error
    except SafetensorError as error:  # what that library makes of a full disk
        raise UserError(f"{out}: {error}. Nothing was kept.") from error


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the report goes to standard output."""
    from ..interop.foreign import ImportOptions
    from ..interop.importing import import_model

    options = ImportOptions(**{one.name: getattr(args, one.name) for one in fields(ImportOptions)})
    note(f"Reading {args.path}, then comparing both sides on sentences")
    with conversion_faults(args.out):
        report = import_model(
            args.kind,
            args.path,
            args.out,
            options=options,
            sentences=args.sentences,
            count=args.count,
            overwrite=args.overwrite,
        )
    print(report.text())
    return 0
