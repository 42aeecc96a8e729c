"""`hf-vaswani demo`: a page to translate on and look inside."""

import argparse
from pathlib import Path
from typing import Any

from .output import Terminated, UserError, note, stop_at_once, stop_at_sigterm
from .translate import load_translator, positive


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "demo",
        help="a page in the browser: candidates, alternatives, attention, two models side by side",
        description="Serve a page on which a text is translated and looked into: candidates with their scores, "
        "alternatives at each step, the attention between pieces, and a second model beside the first. The page needs "
        "no network: everything comes from this machine. Its address is written to standard output; Ctrl-C ends it.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the Hub")
    parser.add_argument("--compare", metavar="MODEL2", help="a second model, shown beside the first")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine alone; 0.0.0.0 lets anyone in who can reach it)",
    )
    parser.add_argument("--port", type=_port, default=7860, help="port to listen on; 0 takes any (default: 7860)")
    parser.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="the sub-path under which a reverse proxy shows the page, such as /demo",
    )
    parser.add_argument(
        "--max-pieces",
        type=positive,
        default=256,
        metavar="N",
        help="most source pieces of a text, the end token included; longer ones are refused (default: 256)",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds after which a search ends with what it has (default: 30)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    parser.add_argument("--open", action="store_true", help="show the page in the browser once it is ready")
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, which is a whole number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from ..demo.server import AddressError, address_of, clean_prefix, open_port

    try:
        prefix = clean_prefix(args.root_path)
        taken = open_port(args.host, args.port)
    except AddressError as error:
        raise UserError(str(error)) from error
    with taken, stop_at_sigterm():
        _serve(args, prefix, taken, address_of(args.host, taken, prefix))
    return 0


def _serve(args: argparse.Namespace, prefix: str, taken: Any, address: str) -> None:
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise UserError(
            f'The page needs Gradio, which is not installed ({error}). Run: pip install "hf-vaswani[demo]"'
        ) from error
    from ..demo.app import Limits, make_app
    from ..demo.candidates import LoadedModel
    from ..demo.server import open_browser, serve

    paths = [args.model, *([args.compare] if args.compare else [])]
    models = [
        LoadedModel.from_pipeline(name, load_translator(path, args.device))
        for name, path in zip(_names(paths), paths, strict=True)
    ]

    def ready() -> None:
        print(address, flush=True)
        note("The page is ready; Ctrl-C ends it.")
        if args.open and not open_browser(address):
            note("No browser could be opened: type the address above into one.")

    def stop() -> None:
        for one in models:
            one.stop()

    app = make_app(models, Limits(args.max_pieces, args.time_limit), prefix)
    try:
        serve(app, taken, ready, stop)
    except (KeyboardInterrupt, Terminated) as error:
        if any(one.is_computing for one in models):
            stop_at_once(args.command, error)
        raise


def _names(paths: list[str]) -> list[str]:
    """What the page calls models: the last part of each path where that tells them apart."""
    short = [Path(path).name or path for path in paths]
    if len(set(short)) == len(short):
        return short
    return paths if len(set(paths)) == len(paths) else [f"{path} ({n})" for n, path in enumerate(paths, start=1)]
