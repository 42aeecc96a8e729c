"""What the loop is made of: the metrics file, signals, and the loading of batches."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from test_training import PadTo, copying_pairs, run

from hf_vaswani.training import Recipe
from hf_vaswani.training.loader import RankBatches, rank_loader
from hf_vaswani.training.metrics import MetricsFile
from hf_vaswani.training.signals import stop_signals


# ------------------------------------------------------------------ metrics and signals
def test_skipped_updates_and_broken_lines_are_dropped_where_a_run_goes_on(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(
        b'{"update": 4}\n{"skipped_update": 4, "skipped": 1}\n{"validated_update": 4}\n'
        b'{"skipped_update": 5, "skipped": 2}\n'
        b'{"update": 5}\n{"start_after_update": 4}\n7\n\xff\xfe\n{"update": 4, "lo'
    )
    file = MetricsFile(path, after_update=4, after_skipped=1)
    file.write(update=5, loss=float("inf"))
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"update": 4},
        {"skipped_update": 4, "skipped": 1},
        {"validated_update": 4},
        {"start_after_update": 4},
        {"update": 5, "loss": "inf"},
    ]


def test_metrics_wait_for_room_on_the_disk_and_no_line_is_lost_or_cut(tmp_path, capsys):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(update=1)
    stream, is_full = file._stream, True

    class Full:
        def __getattr__(self, name):
            return getattr(stream, name)

        def write(self, data):
            return stream.write(data[:5] if is_full else data)

    file._stream = Full()
    file.write(update=2)
    file.write(update=3)
    assert (tmp_path / "m.jsonl").read_text() == '{"update": 1}\n'
    assert capsys.readouterr().err.count("Training goes on") == 1
    is_full = False
    file.write(update=4)
    file.close()
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_what_never_found_room_is_counted_at_the_end(tmp_path, capsys):
    file = MetricsFile(tmp_path / "m.jsonl")
    file._stream.close()
    file._stream = Path("/dev/full").open("wb", buffering=0) if Path("/dev/full").exists() else None  # noqa: SIM115
    if file._stream is None:
        pytest.skip("this system has no device that is always full")
    file.write(update=1)
    file.close()
    assert "lacks its last 1 lines" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_its_echo_is_passed_over_and_a_later_one_ends(monkeypatch, number):
    now, asked = [100.0], []
    monkeypatch.setattr("hf_vaswani.training.signals.time.monotonic", lambda: now[0])
    before = signal.getsignal(number)
    with stop_signals(lambda: asked.append(1)):
        signal.raise_signal(number)
        now[0] += 0.5  # a launcher passes on what the terminal has sent already
        signal.raise_signal(number)
        assert asked == [1]
        now[0] += 0.6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


# ------------------------------------------------------------------ loading
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals between processes")
def test_loading_processes_give_the_same_batches_and_outlive_a_signal_to_the_group(make_model):
    data, plan = copying_pairs(), [[0], [1, 2], [3], [4, 5], [6]]
    alone, helped = (rank_loader(data, plan, 1, PadTo(), 2, workers=workers) for workers in (0, 1))
    batches = iter(helped)
    assert len(batches._workers) == 1
    found = [next(batches)]
    os.kill(batches._workers[0].pid, signal.SIGTERM)
    found += batches
    assert [batch["input_ids"].tolist() for batch in found] == [batch["input_ids"].tolist() for batch in alone]
    assert [len(batch["labels"]) for batch in found] == [2, 1, 2, 1]
    losses = [run(make_model(), Recipe(updates=4, loader_workers=workers)).losses for workers in (0, 2)]
    assert losses[0] == losses[1]


def test_a_filler_has_no_label_and_the_text_is_dealt_in_turn():
    data, plan = copying_pairs(), [[0], [1], [2], [3], [4]]
    shares = [list(RankBatches(plan, 0, 3, rank, 2)) for rank in (0, 1)]
    # Three batches an update on two processes: the second turn of the second process is empty.
    assert shares == [[[0], [2], [3], []], [[1], [], [4], []]]
    filler = list(rank_loader(data, plan, 0, PadTo(), 3, 1, 2))[1]
    assert (filler["labels"] == -100).all()
