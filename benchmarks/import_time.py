"""Seconds that an import takes in a fresh process: ours, and transformers with its Marian classes.

    python benchmarks/import_time.py

Each system is imported by a new interpreter in every round, in turn; what is compared is the time of the import
statement alone, without the interpreter's start. "ours, its classes used" also touches the three classes that a program
needs, which `import hf_vaswani` leaves for later. --profile prints the modules that take most, after `-X importtime`.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from measuring import alternate, common_arguments, emit, machine, parse, report

OURS, USED, MARIAN = "ours", "ours, its classes used", "transformers with Marian"
STATEMENTS = {
    OURS: "import hf_vaswani",
    USED: "from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer",
    MARIAN: "import transformers; from transformers import MarianConfig, MarianMTModel, MarianTokenizer",
}
_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter that runs this; what it says on an error is shown."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments[-1]!r} failed:\n{done.stderr}")
    return done


def seconds_of(statement: str) -> float:
    """Time of a statement in a fresh interpreter."""
    return float(python("-c", _TIMED.format(statement)).stdout.splitlines()[-1])


def top_modules(statement: str, count: int = 15) -> list[dict[str, Any]]:
    """The modules that took longest by themselves, without those that they import."""
    rows = []
    for line in python("-X", "importtime", "-c", statement).stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            own, total = (int(part) / 1000 for part in parts[:2])
            rows.append({"module": parts[2].strip(), "own ms": own, "with what it imports ms": total})
    return sorted(rows, key=lambda row: -row["own ms"])[:count]


def measure(repeats: int) -> dict[str, Any]:
    """Seconds by system, and what ours takes beyond transformers with its Marian classes.

    Args:
        repeats (`int`): rounds; where there are several, one comes before them, so that all files are in the
            system's cache.

    Returns:
        `dict`: "seconds" (medians), "rounds" (all of them), "more_s" (medians less transformers').
    """
    rounds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    # What counts is what each process says, not its whole life, so its runs are kept here.
    systems = {name: lambda n=name: rounds[n].append(seconds_of(STATEMENTS[n])) for name in STATEMENTS}
    alternate(systems, repeats, warmups=int(repeats > 1))
    rounds = {name: taken[-repeats:] for name, taken in rounds.items()}
    seconds = {name: statistics.median(taken) for name, taken in rounds.items()}
    more = {name: seconds[name] - seconds[MARIAN] for name in (OURS, USED)}
    return {"seconds": seconds, "rounds": rounds, "more_s": more}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, repeats=7)
    parser.add_argument("--profile", action="store_true", help="also print the modules that take most")
    args = parse(parser, argv)
    figures: dict[str, Any] = {"benchmark": "import_time", "machine": machine()}
    figures.update(measure(1 if args.quick else args.repeats))
    rows = [
        {"system": name, "s": median, "beyond transformers with Marian, s": figures["more_s"].get(name),
         "fastest s": min(figures["rounds"][name]), "slowest s": max(figures["rounds"][name])}
        for name, median in figures["seconds"].items()
    ]  # fmt: skip
    report("Import in a fresh process, median", rows)
    if args.profile:
        for name, statement in STATEMENTS.items():
            report(f"{name}: {statement}", top_modules(statement))
    emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
