"""`hf-vaswani export`: a model of ours in, a folder for another program out, with proof."""

import argparse
from pathlib import Path
from typing import Any

from .import_model import add_check_options, conversion_faults
from .output import note

# The same words as `interop.exporting.KINDS`, and the formats of all kinds; a test compares them.
KINDS = ("ctranslate2", "onnx", "marian")
FORMATS = (
    "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "export",
        help="take a model to CTranslate2, ONNX Runtime or a MarianMT folder",
        description="Write a model in another program's format, run it there, and compare both sides on real "
        "sentences before the folder gets its name. The report goes to standard output and into the folder "
        "(conversion.json).",
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to come")
    parser.add_argument(
        "--quantization",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"precision of the weights: {', '.join(FORMATS)} (onnx: int8; marian: none)",
    )
    add_check_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion in OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the report goes to standard output."""
    from ..interop.exporting import export_model

    note(f"Writing {args.out}, then comparing both sides on sentences")
    with conversion_faults(args.out):
        report = export_model(
            args.kind,
            args.model,
            args.out,
            quantization=args.quantization,
            sentences=args.sentences,
            count=args.count,
            overwrite=args.overwrite,
        )
    print(report.text())
    return 0
