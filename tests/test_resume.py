"""A run that dies and goes on is the run that never died, bit for bit."""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_vaswani.training.checkpoint import CheckpointFolder

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
UPDATES = 26  # more than two epochs of the script's corpus


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def start(folder, updates=UPDATES, processes=1, **options):
    """Run the script in forked processes, which saves the imports, to its end, whatever that is."""
    folder.mkdir(exist_ok=True)
    arguments = [str(folder), str(updates), *(f"{key}={value}" for key, value in options.items())]
    outputs = [[folder.parent / f"{folder.name}.{name}{rank}" for name in ("out", "err")] for rank in range(processes)]
    port = _free_port()
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=_child, args=(arguments, outputs[rank], rank, processes, port)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + 200
    while any(child.exitcode is None for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            # One has died; the launcher of a real run ends the others.
            time.sleep(0.5)
            for child in children:
                child.kill()
        children[0].join(0.1)
    assert all(child.exitcode is not None for child in children), "the run hangs"
    worst = next((child.exitcode for child in children if child.exitcode), 0)
    return Done(worst, outputs[0][0].read_text(), "".join(err.read_text() for _, err in outputs))


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _child(arguments, outputs, rank, processes, port):
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # The parent's objects are pytest's captures; the child writes to its own files.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    if processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    import resume_script

    resume_script.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()


def finished(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["update"], line["loss"], line["learning_rate"], line["tgt_tokens"]) for line in lines if "update" in line
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    _, updates, _, epochs = finished(start(folder))
    assert (updates, epochs > 2) == (UPDATES, True)
    found = records(folder)
    assert [update for update, *_ in found] == list(range(1, UPDATES + 1))
    return found


def test_a_run_killed_at_random_updates_goes_on_with_the_same_losses_bit_for_bit(unbroken, tmp_path):
    generator = random.Random(5)
    for _ in range(3):
        assert start(tmp_path, kill_at=generator.randint(5, 9)).returncode == -9
    from_update, updates, _, _ = finished(start(tmp_path))
    assert 0 < from_update < updates == UPDATES
    assert records(tmp_path) == unbroken


def test_a_run_goes_on_over_the_end_of_an_epoch(unbroken, tmp_path):
    # A checkpoint after every update, so that the run is resumed at every place of an epoch, its end among them.
    for updates in range(2, UPDATES + 1, 6):
        finished(start(tmp_path, updates=updates, every=1))
    finished(start(tmp_path, every=1))
    assert records(tmp_path) == unbroken


def test_a_run_without_a_checkpoint_yet_begins_anew(unbroken, tmp_path):
    assert start(tmp_path, kill_at=3).returncode == -9
    assert finished(start(tmp_path))[0] == 0
    assert records(tmp_path) == unbroken


def test_two_processes_killed_and_resumed_equal_two_that_were_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(start(whole, updates=17, processes=2, batches=2))
    assert start(broken, updates=17, processes=2, batches=2, kill_at=11, rank=1).returncode != 0
    assert finished(start(broken, updates=17, processes=2, batches=2))[0] == 8
    assert records(broken) == records(whole)


def test_another_number_of_processes_and_another_precision_go_on_and_say_so(tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    finished(start(whole, updates=14, batches=2))
    finished(start(changed, updates=7, batches=2, processes=2, every=7))
    done = start(changed, updates=14, batches=2)
    assert finished(done)[0] == 7
    assert "Resuming with processes 1, where it was 2" in done.stderr
    for (_, loss, *rest), (_, other, *others) in zip(records(changed), records(whole), strict=True):
        assert loss == pytest.approx(other, abs=1e-5)
        assert rest[1:] == others[1:]
    done = start(changed, updates=16, batches=2, precision="bf16")
    assert finished(done)[:2] == [14, 16]
    assert "Resuming with precision bf16, where it was no" in done.stderr


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(unbroken, tmp_path):
    finished(start(tmp_path, updates=8))
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    # No file may grow past this size: the metrics still fit, the optimizer's state does not.
    done = start(tmp_path, updates=13, limit=20_000)
    assert done.returncode == 1
    assert done.stderr.count("could not be written to /") == 2
    assert "The checkpoint of update 12" in done.stderr
    assert "CheckpointError: Training ended after update 13, which could not be written to disk" in done.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert after == before
    # The run lost what came after its last checkpoint, and makes the same of it again.
    assert finished(start(tmp_path))[0] == 8
    assert records(tmp_path) == unbroken


def test_a_run_that_is_told_to_end_saves_first(unbroken, tmp_path):
    done = start(tmp_path, kill_at=7, signal="TERM")
    assert finished(done)[1:3] == [7, "signal"]
    assert [update for update, _ in CheckpointFolder(tmp_path / "checkpoints").all()] == [4, 7]
    assert finished(start(tmp_path))[0] == 7
    assert records(tmp_path) == unbroken
