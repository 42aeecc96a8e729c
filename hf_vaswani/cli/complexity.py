"""`hf-vaswani complexity`: Table 1 of the paper, as formulas and measured here."""

import argparse
import json
from pathlib import Path
from typing import Any

from .output import UserError, check_new_folder, note, plain_faults
from .translate import positive

MARKER = "complexity.json"


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "complexity",
        help="Table 1 of the paper: time and memory of its layers over length and width",
        description="Measure a self-attention, a recurrent (LSTM), a convolutional and a restricted self-attention "
        "layer over the length n and over the width d; print Table 1's formulas, the measured times and memory, the "
        "fitted exponents, and where self-attention overtakes the recurrent layer. Attention's core (softmax(Q K^T) V, "
        "which Table 1 is about) is measured apart from the whole layer with its projections.",
    )
    parser.add_argument(
        "--lengths",
        type=_numbers,
        default=[64, 128, 256, 512, 1024, 2048, 4096],
        metavar="N,N,...",
        help="lengths n, measured at --width (default: 64 to 4096, doubled each time)",
    )
    parser.add_argument(
        "--widths",
        type=_numbers,
        default=[128, 256, 512, 1024],
        metavar="D,D,...",
        help="widths d, measured at --length; multiples of --head-width (default: 128,256,512,1024)",
    )
    parser.add_argument("--width", type=positive, default=128, metavar="D", help="d while n grows (default: 128)")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="n while d grows (default: 512)")
    parser.add_argument(
        "--fit-from",
        type=positive,
        default=256,
        metavar="N",
        help="least n in the fits over n; below, the fixed cost of a call shows (default: 256)",
    )
    parser.add_argument("--window", type=positive, default=65, metavar="R", help="neighbourhood r, odd (default: 65)")
    parser.add_argument("--kernel", type=positive, default=3, metavar="K", help="kernel k, odd (default: 3)")
    parser.add_argument(
        "--head-width", type=positive, default=64, metavar="K", help="width of an attention head (default: 64)"
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences at a time (default: 1)")
    parser.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="samples of each time; the least counts (default: 5)"
    )
    parser.add_argument("--backward", action="store_true", help="measure the gradients too, not the forward pass alone")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:1 (default: cpu)")
    parser.add_argument(
        "--threads",
        type=positive,
        default=1,
        metavar="N",
        help="threads that compute on a processor (default: 1, whose own time is measured; with more it is wall-clock "
        "time, which other programs lengthen)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"write {MARKER}, complexity.png and complexity.svg there"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier call wrote there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the tables go to standard output."""
    if args.output is not None:
        check_new_folder(args.output, args.overwrite, MARKER)
    import torch

    from ..analysis.complexity_study import study_complexity
    from ..analysis.layer_costs import BenchSettings

    if args.output is not None:
        from ..analysis.attention import require_matplotlib

        try:
            require_matplotlib()
        except ImportError as error:
            raise UserError(str(error)) from error
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    threads_before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        settings = BenchSettings(
            kernel=args.kernel,
            window=args.window,
            head_width=args.head_width,
            batch=args.batch,
            repeats=args.repeats,
            backward=args.backward,
            device=args.device,
        )
        study = study_complexity(args.lengths, args.widths, args.width, args.length, settings, args.fit_from)
    except ValueError as error:
        raise UserError(str(error)) from error
    finally:
        torch.set_num_threads(threads_before)
    with plain_faults():
        print(study, flush=True)
    if args.output is not None:
        _write(study, args.output)
        note(f"Written to {args.output}: {MARKER}, complexity.png, complexity.svg")
    return 0


def _write(study: Any, output: Path) -> None:
    from ..analysis.complexity_plot import draw_complexity

    figure = draw_complexity(study)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / MARKER).write_text(json.dumps(study.to_dict(), indent=2) + "\n", encoding="utf-8")
        for ending in ("png", "svg"):
            figure.savefig(output / f"complexity.{ending}", dpi=130)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror or error}).") from error


def _numbers(text: str) -> list[int]:
    """A list of whole numbers above 0, such as 64,128."""
    return [positive(one) for one in text.split(",")]
