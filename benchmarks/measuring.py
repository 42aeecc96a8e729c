"""What the benchmarks share: taking turns, times, memory, tables and figures.

A benchmark runs its systems one after the other in every round, so that a slow minute of the machine hits all of them
alike, and compares medians. Tables go to standard error, and one line of JSON to standard output.
"""

import argparse
import datetime
import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

_PACKAGES = ("torch", "transformers", "ctranslate2", "joeynmt", "hf_vaswani")
# What a measured process needs anyway, and what its server has therefore imported before.
_PRELOADED = (
    "torch",
    "hf_vaswani.modeling_vaswani",
    "hf_vaswani.interop.marian_export",
    "transformers.models.marian.modeling_marian",
)
# Runs one command and tells what it took. A program of its own, as a process counts the memory of the one that started
# it as its own, and a benchmark holds models.
_RUNNER = """
import json, os, subprocess, sys, time
out, *command = sys.argv[1:]
with open(out, "wb") as stream:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=stream)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss, usage.ru_utime + usage.ru_stime]))
"""


# --------------------------------------------------------------------------- the machine
def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures were measured on and with.

    Returns:
        `dict`: "cpu", "cores", "threads" (of torch), "accelerator" (its name, or None), "versions" and "date" (UTC).
    """
    import torch

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            if name == "hf_vaswani" and importlib.util.find_spec(name):
                versions[name] = "not installed, in the path"
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


# --------------------------------------------------------------------------- time
@dataclass(frozen=True)
class Timing:
    """What the runs of one system took.

    Args:
        seconds (`list[float]`): of each run, in order. median (`float`): of them. result: what the last run returned.
    """

    seconds: list[float]
    median: float
    result: Any


def alternate(
    systems: Mapping[str, Callable[[], Any]],
    repeats: int,
    warmups: int = 1,
    between: Callable[[], Any] | None = None,
) -> dict[str, Timing]:
    """Run the systems in turn (a b c, a b c, ...) and time each run.

    Args:
        systems (`Mapping[str, Callable]`): by name; each is called without arguments.
        repeats (`int`): timed rounds. warmups (`int`): rounds before them, not timed.
        between (`Callable`, *optional*): called before each run, not timed, such as `gc.collect`.

    Returns:
        `dict[str, Timing]`, in the order of the systems.

    Raises:
        ValueError: no round is asked for.
    """
    if repeats < 1 or warmups < 0:
        raise ValueError(f"`repeats` must be at least 1 and `warmups` at least 0, got {repeats} and {warmups}.")
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    results: dict[str, Any] = {}
    for number in range(warmups + repeats):
        for name, run in systems.items():
            results.pop(name, None)  # the result of an earlier round must not weigh on this one
            if between is not None:
                between()
            start = time.perf_counter()
            results[name] = run()
            took = time.perf_counter() - start
            if number >= warmups:
                seconds[name].append(took)
    return {name: Timing(took, statistics.median(took), results[name]) for name, took in seconds.items()}


def alternate_in_children(
    maker: Callable[..., Callable[[], Any]],
    systems: Sequence[str],
    arguments: Sequence[Any],
    repeats: int,
    warmups: int = 1,
) -> dict[str, Timing]:
    """The same, with each system in a process of its own, which waits while the others run.

    Two libraries with threads of their own disturb each other within one process: once CTranslate2 has run, torch's
    products take half as long again.

    Args:
        maker (`Callable`): at the top level of a module; called in the process as maker(system, *arguments), it gives
            what is to be timed, whose result must be picklable.
        systems (`Sequence[str]`), arguments: picklable. repeats, warmups (`int`): as for `alternate`.

    Raises:
        RuntimeError: a system failed; its own traceback is the message.
    """
    import torch

    context = _context()
    pipes, processes = {}, []
    try:
        for name in systems:
            pipes[name], theirs = context.Pipe()
            process = context.Process(
                target=_serve_runs, args=(theirs, torch.get_num_threads(), maker, (name, *arguments)), daemon=True
            )
            process.start()
            processes.append(process)
            theirs.close()
            _receive(pipes[name], name)  # one is made after the other
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        results: dict[str, Any] = {}
        for number in range(warmups + repeats):
            for name in systems:
                pipes[name].send("run")
                took, results[name] = _receive(pipes[name], name)
                if number >= warmups:
                    seconds[name].append(took)
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return {name: Timing(took, statistics.median(took), results[name]) for name, took in seconds.items()}


def _receive(pipe: Any, name: str) -> Any:
    try:
        is_done, told = pipe.recv()
    except EOFError:
        is_done, told = False, f"The process of {name} ended without a word (out of memory?)."
    if not is_done:
        raise RuntimeError(told)
    return told


def _serve_runs(pipe: Any, threads: int, maker: Callable[..., Callable[[], Any]], arguments: Sequence[Any]) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    try:
        run = maker(*arguments)
        pipe.send((True, None))
        while True:
            pipe.recv()
            gc.collect()
            start = time.perf_counter()
            result = run()
            pipe.send((True, (time.perf_counter() - start, result)))
    except EOFError:  # the other side is done
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def ratio(timings: Mapping[str, Timing], ours: str, theirs: str) -> dict[str, float]:
    """How many times faster `ours` is than `theirs`.

    Args:
        timings (`Mapping[str, Timing]`): of `alternate`. ours, theirs (`str`): names in it.

    Returns:
        `dict`: "median" of theirs over median of ours, and the "lowest" and "highest" quotient of one round.
    """
    rounds = [b / a for a, b in zip(timings[ours].seconds, timings[theirs].seconds, strict=True)]
    return {
        "median": round(timings[theirs].median / timings[ours].median, 3),
        "lowest": round(min(rounds), 3),
        "highest": round(max(rounds), 3),
    }


# --------------------------------------------------------------------------- memory
@dataclass(frozen=True)
class Child:
    """What a run in a process of its own took.

    Args:
        result: what the function returned. seconds (`float`): of its measured part.
        before_mib, peak_mib (`float`): resident memory before that part, and how far it rose above that.
    """

    result: Any
    seconds: float
    before_mib: float
    peak_mib: float


def in_child(function: Callable[..., Iterator[None]], *arguments: Any) -> Child:
    """Run a function in a fresh process, and measure its memory and time from its `yield` on.

        def work(size):
            model = load(size)      # before the yield: not measured
            yield
            return run(model)       # measured; the result must be picklable

    Args:
        function (`Callable`): a generator function of one `yield`, at the top level of a module.
        arguments: picklable.

    Returns:
        `Child`.

    Raises:
        RuntimeError: the function failed; its own traceback is the message.
    """
    import torch

    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, torch.get_num_threads(), function, arguments))
    process.start()
    sender.close()
    try:
        is_done, told = receiver.recv()
    except EOFError:
        is_done, told = False, f"The process of {function.__name__} ended without a word (out of memory?)."
    finally:
        process.join()
        receiver.close()
    if not is_done:
        raise RuntimeError(told)
    return told


def _context() -> Any:
    # Forked from a server that has only imported the libraries: nothing of this process's memory, and no second import.
    # A fork of this process itself could hang, as the threads that torch has started do not come along.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload([*_PRELOADED])
    return context


def peak_memory(function: Callable[..., Iterator[None]], *arguments: Any) -> float:
    """MiB by which resident memory rose at most after the function's `yield`; see `in_child`."""
    return in_child(function, *arguments).peak_mib


def _serve(sender: Any, threads: int, function: Callable[..., Iterator[None]], arguments: Sequence[Any]) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    try:
        stages: Any = function(*arguments)
        next(stages)
        before = _forget_peak()
        start = time.perf_counter()
        try:
            next(stages)
        except StopIteration as end:
            child = Child(end.value, time.perf_counter() - start, before, max(0.0, peak_mib() - before))
        else:
            raise TypeError(f"{function.__name__} yields more than once.")
        sender.send((True, child))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()


def peak_mib() -> float:
    """Largest resident memory that this process has had so far, in MiB."""
    status = _status("VmHWM")
    if status is not None:
        return status
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _forget_peak() -> float:
    """Let the peak start again from what is resident now, where the system can; gives the level to count from."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return peak_mib()
    return peak_mib()


def _status(field: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return int(found[0]) / 2**10 if found else None


# --------------------------------------------------------------------------- commands
@dataclass(frozen=True)
class Command:
    """What a command took, its start included.

    Args:
        seconds, cpu_seconds (`float`): by the clock, and of all its threads. peak_mib (`float`): resident memory.
        output (`bytes`): its standard output.
    """

    seconds: float
    cpu_seconds: float
    peak_mib: float
    output: bytes


def run_command(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Command:
    """Run a command whole, and measure it.

    Args:
        command (`Sequence[str]`): program and arguments. folder (`Path`): a place for its output while it runs.
        environment (`Mapping`, *optional*): variables beside those of this process.

    Returns:
        `Command`.

    Raises:
        RuntimeError: it failed; what it wrote to standard error is the message.
    """
    out = folder / "output"
    runner = [sys.executable, "-S", "-c", _RUNNER, str(out), *command]
    done = subprocess.run(runner, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    told = done.stdout.splitlines()
    status, seconds, peak, cpu_seconds = json.loads(told[-1]) if told else (done.returncode, 0.0, 0, 0.0)
    if status != 0 or not told:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{done.stderr}")
    output = out.read_bytes()
    out.unlink()
    return Command(seconds, cpu_seconds, peak / (2**20 if sys.platform == "darwin" else 2**10), output)


# --------------------------------------------------------------------------- the command line, tables and figures
def common_arguments(parser: argparse.ArgumentParser, repeats: int = 5) -> None:
    """Add what every benchmark takes: --threads, --repeats, --quick and --json. `parse` then obeys --threads.

    Args:
        parser (`ArgumentParser`): of the benchmark. repeats (`int`): the default of timed rounds.
    """
    parser.add_argument("--threads", type=_positive, default=cores(), help="of torch (default: all cores: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=repeats, help="timed rounds (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, let torch have as many threads as it says, and keep the library's bars to itself."""
    import torch
    from transformers.utils import logging

    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    return args


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between them, for argparse."""
    return [_positive(one) for one in text.split(",")]


def report(title: str, rows: Sequence[Mapping[str, Any]], stream: TextIO | None = None) -> None:
    """Print a plain table.

    Args:
        title (`str`): above it. rows (`Sequence[Mapping]`): one a line; the columns are all keys, in order of coming.
        stream (`TextIO`, *optional*): standard error by default.
    """
    stream = stream or sys.stderr
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    print(f"\n{title}", file=stream)
    for number, line in enumerate(cells):
        first, rest = line[:1], line[1:]
        aligned = [one.ljust(widths[0]) for one in first]
        aligned += [one.rjust(width) for one, width in zip(rest, widths[1:], strict=True)]
        print("  ".join(aligned).rstrip(), file=stream)
        if number == 0:
            print("  ".join("-" * width for width in widths), file=stream)
    stream.flush()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def emit(figures: Mapping[str, Any], path: Path | None = None) -> None:
    """Write the figures as one line of JSON on standard output, and into a file where one is named.

    Args:
        figures (`Mapping`): of plain values. path (`Path`, *optional*): the file of --json.
    """
    line = json.dumps(figures)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
