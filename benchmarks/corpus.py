"""A whole file translated: `hf-vaswani translate` beside a plain program around MarianMT's `generate()`.

    python benchmarks/corpus.py
    python benchmarks/corpus.py --model MODEL --file test.en.gz

Both are commands that start, load the model, translate the file in order and end; all of that is timed. The plain
program takes 64 lines at a time in file order, pads them, and calls `generate()`, as a reader of the library's manual
would. Weights, pieces and search are the same: for the run, a copy of the model folder gets the only length penalty
that MarianMT knows (length ^ alpha) and its ends (an absolute limit; `early_stopping`), and LayerNorm's epsilon of its
code; MarianMT gets an export of that copy. Without --file, the German side of Multi30k's test of 2016.
"""

import argparse
import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "checkpoints" / "tatoeba-de-en"
FILE = ROOT.parent / "shared" / "data" / "multi30k" / "raw" / "test_2016_flickr.de.gz"
OURS, MARIAN = "hf-vaswani translate", "MarianMT, plain loop"
# Further runs of our command, and the options that make them: what sorting alone gains, and what rounding gains.
VARIANTS = {
    "file order": ["--window", "1", "--batch-size", "64", "--batch-tokens", "65536"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8": ["--dtype", "int8"],
}


# --------------------------------------------------------------------------- the plain program
def plain_loop(folder: str, file: str, batch: int, threads: int) -> None:
    """Translate a file with MarianMT, as one would without this package, onto standard output."""
    import torch
    from transformers import AutoTokenizer, MarianMTModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = MarianMTModel.from_pretrained(folder).eval()
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    for start in range(0, len(lines), batch):
        inputs = tokenizer(lines[start : start + batch], return_tensors="pt", padding=True)
        found = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        for text in tokenizer.batch_decode(found, skip_special_tokens=True):
            print(text, flush=True)


# --------------------------------------------------------------------------- one search for both
def prepare(model: Path, folder: Path, search: dict[str, Any]) -> tuple[Path, Path]:
    """Copies of a model folder for either side.

    Args:
        model (`Path`): a folder of ours. folder (`Path`): where the copies go.
        search (`dict`): settings of `generate()` for both.

    Returns:
        the folders for `hf-vaswani translate` and for MarianMT.
    """
    from transformers import AutoTokenizer, MarianMTModel
    from transformers.utils import logging

    from hf_vaswani import VaswaniForConditionalGeneration
    from hf_vaswani.interop import marian_export

    logging.disable_progress_bar()
    ours, marian = folder / "ours", folder / "marian"
    shutil.copytree(model, ours)
    marian.mkdir()
    _change(ours / "config.json", {"layer_norm_eps": 1e-5})
    own = {"length_penalty_type": "power", "max_length_offset": None}
    _change(ours / "generation_config.json", {**search, **own})
    loaded = VaswaniForConditionalGeneration.from_pretrained(ours).eval()
    tokenizer = AutoTokenizer.from_pretrained(ours)
    marian_export.export(loaded, tokenizer, marian)
    written = MarianMTModel.from_pretrained(marian).generation_config.to_dict()
    wrong = [name for name, value in search.items() if written[name] != value]
    if wrong:
        raise SystemExit(f"The export does not keep these settings of generate(): {', '.join(wrong)}.")
    return ours, marian


def _change(file: Path, changes: dict[str, Any]) -> None:
    fields = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_text(file: Path) -> str:
    """A file, plain or packed by gzip."""
    if not file.is_file():
        raise SystemExit(f"{file} does not exist; name a text to translate with --file.")
    raw = file.read_bytes()
    return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")


# --------------------------------------------------------------------------- the command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.common_arguments(parser, repeats=3)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a post-norm model of ours")
    parser.add_argument("--file", type=Path, default=FILE, help="text, plain or .gz")
    parser.add_argument("--lines", type=int, help="take only so many (default: all; 12 with --quick)")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="of the plain loop (default: %(default)s)")
    parser.add_argument("--length-penalty", type=float, default=0.6, help="alpha of length ^ alpha")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--early-stopping", choices=("false", "true", "never"), default="false")
    parser.add_argument("--also", nargs="*", choices=VARIANTS, help="further runs of ours (default: file order)")
    args = measuring.parse(parser, argv)
    stopping: dict[str, Any] = {"false": False, "true": True, "never": "never"}
    search = {
        "num_beams": args.beams,
        "length_penalty": args.length_penalty,
        "early_stopping": stopping[args.early_stopping],
        "max_new_tokens": args.max_new_tokens,
    }
    lines = read_text(args.file).splitlines()[: args.lines or (12 if args.quick else None)]
    with tempfile.TemporaryDirectory() as name:
        figures = measure(lines, Path(name), search, args)
    figures = {"benchmark": "corpus", "machine": measuring.machine(), **figures}
    systems = figures["systems"]
    measuring.report(
        f"{len(lines)} lines of {args.file.name}, beam {args.beams}, whole command",
        [{"system": name, **{k: v for k, v in one.items() if k != "seconds"}} for name, one in systems.items()],
    )
    measuring.report(
        "How many times faster than the plain loop",
        [
            {"system": pair.partition(" / ")[0], **one, "equal lines": figures["equal"][pair.partition(" / ")[0]]}
            for pair, one in figures["ratios"].items()
        ],
    )
    measuring.emit(figures, args.json)
    return 0


def measure(lines: list[str], folder: Path, search: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Let the commands take turns.

    Returns:
        `dict`: "settings", "systems" (seconds, lines/s, tokens/s and memory of each), "ratios" and "equal" (lines).
    """
    ours, marian = prepare(args.model, folder, search)
    text = folder / "source"
    text.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    environment = {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    translate = [sys.executable, "-m", "hf_vaswani.cli", "translate", str(ours), str(text)]
    commands = {OURS: [*translate, "--threads", str(args.threads)]}
    for name in args.also if args.also is not None else [] if args.quick else ["file order"]:
        commands[f"{OURS}, {name}"] = [*commands[OURS], *VARIANTS[name]]
    loop = [str(marian), str(text), str(args.batch), str(args.threads)]
    commands[MARIAN] = [sys.executable, str(Path(__file__).resolve()), _LOOP, *loop]
    timings = measuring.alternate(
        {
            name: lambda command=command: measuring.run_command(command, folder, environment)  # type: ignore[misc]
            for name, command in commands.items()
        },
        args.repeats,
        warmups=0 if args.quick else 1,
    )
    outputs = {name: timing.result.output.decode("utf-8").split("\n")[:-1] for name, timing in timings.items()}
    for name, output in outputs.items():
        if len(output) != len(lines):
            raise SystemExit(f"{name} wrote {len(output)} lines for {len(lines)}.")
    systems = {}
    for name, timing in timings.items():
        tokens = count_tokens(ours, outputs[name])
        systems[name] = {
            "median_s": round(timing.median, 2),
            "seconds": [round(one, 2) for one in timing.seconds],
            "lines_per_s": round(len(lines) / timing.median, 1),
            "tokens_per_s": round(tokens / timing.median, 1),
            "peak_mib": round(timing.result.peak_mib, 1),
        }
    own = [name for name in timings if name != MARIAN]
    return {
        "settings": {
            "model": args.model.name, "file": args.file.name, "lines": len(lines), "batch": args.batch,
            "quick": args.quick, **search,
        },
        "systems": systems,
        "ratios": {f"{name} / {MARIAN}": measuring.ratio(timings, name, MARIAN) for name in own},
        "equal": {name: sum(a == b for a, b in zip(outputs[name], outputs[MARIAN], strict=True)) for name in own},
    }  # fmt: skip


def count_tokens(folder: Path, lines: list[str]) -> int:
    """Pieces of the lines by the model's tokenizer, end tokens included."""
    from transformers import AutoTokenizer

    import hf_vaswani  # noqa: F401  (registers the tokenizer)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return sum(len(ids) for ids in tokenizer(text_target=lines)["input_ids"])


_LOOP = "--plain-loop"

if __name__ == "__main__":
    if sys.argv[1:2] == [_LOOP]:
        plain_loop(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
