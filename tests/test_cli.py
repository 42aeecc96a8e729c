"""The command line: what goes in, what comes out, and how faults are told."""

import io
import os
import shutil
import subprocess
import sys

import pytest
import torch

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.cli.main import main
from hf_vaswani.cli.output import UserError, check_new_folder
from hf_vaswani.sharing.folders import whole_folder

LINES = ["Ein Hund schläft.", "", "Zwei Katzen\u2028spielen.", "Kein Vogel singt."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model that says something different for each line, at most six tokens long."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = VaswaniTokenizer.train(LINES, vocab_size=290, allow_fewer=True)
    torch.manual_seed(4)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                      d_ff=24)
    )  # fmt: skip
    model.generation_config.max_new_tokens = 6
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def feed(monkeypatch):
    """Puts bytes on standard input."""

    def put(content: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))

    return put


def expected(folder, lines, **options):
    from transformers import pipeline

    return [one["translation_text"] for one in pipeline("translation", model=str(folder))(lines, **options)]


def lines_of(output: bytes):
    assert output.endswith(b"\n")
    return output.decode().removesuffix("\n").split("\n")


# ------------------------------------------------------------------ translate
def test_lines_of_standard_input_come_out_translated_in_order(folder, feed, capfdbinary):
    feed("\n".join(LINES).encode())  # without a last line feed
    assert main(["translate", str(folder)]) == 0
    output = capfdbinary.readouterr()
    assert [line.replace("\n", " ") for line in expected(folder, LINES)] == lines_of(output.out)
    assert lines_of(output.out)[1] == ""
    assert output.err == b""


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_a_file_is_read_like_standard_input(folder, tmp_path, capfdbinary, name):
    import gzip

    content = "\r\n".join([LINES[0], LINES[3], ""]).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert main(["translate", str(folder), str(path), "--batch-size", "1"]) == 0
    assert lines_of(capfdbinary.readouterr().out) == expected(folder, [LINES[0], LINES[3]])


def test_the_device_can_be_chosen(folder, feed, capfdbinary):
    feed(f"{LINES[0]}\n".encode())
    assert main(["translate", str(folder), "--device", "cpu"]) == 0
    assert lines_of(capfdbinary.readouterr().out) == expected(folder, [LINES[0]])


def test_nothing_in_gives_nothing_out(folder, feed, capfdbinary):
    feed(b"")
    assert main(["translate", str(folder)]) == 0
    assert capfdbinary.readouterr().out == b""


def test_the_width_of_the_search_is_passed_on(folder, feed, capfdbinary):
    outputs = []
    for beams in (1, 7):
        feed(LINES[0].encode())
        assert main(["translate", str(folder), "--beams", str(beams)]) == 0
        outputs.append(lines_of(capfdbinary.readouterr().out))
        assert outputs[-1] == expected(folder, [LINES[0]], num_beams=beams)
    assert outputs[0] != outputs[1]


def test_n_best_lists_carry_the_line_number_and_falling_scores(folder, feed, capfdbinary):
    feed(f"{LINES[0]}\n\n".encode())
    assert main(["translate", str(folder), "--n-best", "5", "--beams", "6"]) == 0
    rows = [line.split("\t") for line in lines_of(capfdbinary.readouterr().out)]
    assert {len(row) for row in rows} == {3}
    assert [row[0] for row in rows] == ["1"] * (len(rows) - 1) + ["2"]
    assert 1 < len(rows) - 1 <= 5
    scores = [float(row[1]) for row in rows if row[0] == "1"]
    assert scores == sorted(scores, reverse=True)
    assert len({row[2] for row in rows if row[0] == "1"}) == len(scores)


def test_n_best_of_one_still_has_its_columns(folder, feed, capfdbinary):
    feed(LINES[0].encode())
    assert main(["translate", str(folder), "--n-best", "1", "--beams", "2"]) == 0
    number, score, text = lines_of(capfdbinary.readouterr().out)[0].split("\t")
    assert (number, text) == ("1", expected(folder, [LINES[0]], num_beams=2)[0])
    assert float(score) < 0


def test_each_line_is_answered_before_the_next_is_read_with_a_batch_of_one(folder):
    from hf_vaswani.cli.translate import load_translator, write_translations

    stream, seen = io.BytesIO(), []

    def source():
        for line in (LINES[0], LINES[3]):
            seen.append(stream.getvalue().count(b"\n"))
            yield line

    write_translations(load_translator(str(folder)), source(), stream, {"batch_size": 1})
    assert seen == [0, 1]


def test_a_tab_in_a_translation_makes_no_fourth_column():
    from hf_vaswani.cli.translate import write_translations

    def translator(lines, **_):
        return ([{"translation_text": f"{line}\tb\nc", "score": -1.0}] for line in lines)

    columns, plain = io.BytesIO(), io.BytesIO()
    write_translations(translator, ["a"], columns, {}, is_n_best=True)
    write_translations(translator, ["a"], plain, {})
    assert (columns.getvalue(), plain.getvalue()) == (b"1\t-1.0000\ta b c\n", b"a\tb c\n")


def test_lines_before_a_fault_are_translated_and_the_fault_is_named(folder, feed, capfdbinary):
    feed(LINES[0].encode() + b"\nab\xe4\nnever read\n")
    assert main(["translate", str(folder)]) == 2
    output = capfdbinary.readouterr()
    assert lines_of(output.out) == expected(folder, [LINES[0]])
    assert output.err.decode().startswith("hf-vaswani translate: standard input, line 2: byte 3 (0xe4) is not UTF-8.")


def test_what_the_user_got_wrong_is_one_sentence_and_no_traceback(folder, feed, capfdbinary, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{}")
    for arguments, message in [
        (["translate", "no-such-folder"], "no-such-folder: no such folder."),
        (["translate", str(tmp_path / "gone")], "gone: no such folder."),
        (["translate", str(tmp_path / "empty")], "it has no config.json"),
        (["translate", str(tmp_path / "broken")], "cannot be loaded as a translation model"),
        (["translate", "./owner/name"], "./owner/name: no such folder."),
        (["translate", str(folder), str(tmp_path / "gone.txt")], "gone.txt: no such file."),
        (["translate", str(folder), str(tmp_path)], "cannot be read (Is a directory)"),
        (["translate", str(folder), "--device", "meta"], "--device meta: no such device here"),
        (["translate", str(folder), "--n-best", "5", "--beams", "3"], "needs --beams of at least 5; the search has 3"),
        (["translate", str(folder), "--device", "nonsense"], "--device nonsense: no such device here"),
        (["translate", str(folder), "--device", "cuda:7"], "--device cuda:7: no such device here"),
        (["translate", str(folder), "--n-best", "5"], "needs --beams of at least 5; the search has 4"),
    ]:
        feed(b"x\n")
        assert main(arguments) == 2
        output = capfdbinary.readouterr()
        assert output.out == b""
        error = output.err.decode()
        assert error.startswith("hf-vaswani translate: ")
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
def test_counts_must_be_whole_numbers_of_at_least_one(value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["translate", "m", "--beams", value])
    assert ended.value.code == 2
    assert "not a whole number of at least 1" in capsys.readouterr().err


def test_the_command_runs_as_a_program_and_a_broken_pipe_ends_it_quietly(folder, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    reader, writer = os.pipe()
    os.close(reader)  # whoever reads is gone before the first line
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hf_vaswani.cli", "translate", str(folder)],
            input=b"eins\n" * 3, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=200, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here that is always full")
def test_a_full_disk_under_the_output_is_one_sentence(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hf_vaswani.cli", "translate", str(folder)],
            input=b"eins\n", stdout=full, stderr=subprocess.PIPE, env=environment, timeout=200, check=False,
        )  # fmt: skip
    assert done.stderr == (
        b"hf-vaswani translate: standard output cannot be written: No space left on device. "
        b"The results are incomplete.\n"
    )
    assert done.returncode == 2


def test_damaged_weights_are_named_without_the_story_of_the_attempts(folder, feed, capfdbinary, tmp_path):
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    feed(b"x\n")
    assert main(["translate", str(tmp_path / "cut")]) == 2
    error = capfdbinary.readouterr().err.decode().splitlines()[-1]
    assert "damaged or were only half written" in error
    assert "Traceback" not in error


def test_stopping_by_hand_is_quiet(folder, feed, capfdbinary, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_vaswani.cli.translate.write_translations", interrupt)
    feed(b"x\n")
    assert main(["translate", str(folder)]) == 130
    assert capfdbinary.readouterr().err == b"hf-vaswani translate: stopped.\n"


def test_version_and_help(capsys):
    import hf_vaswani

    for arguments, text in [(["--version"], f"hf-vaswani {hf_vaswani.__version__}"), (["--help"], "quickstart")]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert text in capsys.readouterr().out


# ------------------------------------------------------------------ folders that are whole or absent
def test_a_folder_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with whole_folder(target) as unfinished:
        (unfinished / "a").write_text("new")
        assert not target.exists()
    assert (target / "a").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_fault_leaves_what_was_there_and_nothing_else(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("old")

    def fail():
        with whole_folder(target) as unfinished:
            (unfinished / "a").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_folder_replaces_the_old_one(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    with whole_folder(target) as unfinished:
        (unfinished / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_that_must_not_be_written_are_refused(tmp_path, monkeypatch):
    full, own = tmp_path / "full", tmp_path / "own"
    for path, name in [(full, "letter.txt"), (own, "report.json")]:
        path.mkdir()
        (path / name).write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    refused = {
        (full, False): "is not empty",
        (own, False): "is not empty",
        (full, True): "was not made by this command",
        (tmp_path / "file", True): "is a file",
        (tmp_path / "file" / "deeper", False): "not a folder that you may write to",
    }
    for (path, overwrite), message in refused.items():
        with pytest.raises(UserError, match=message):
            check_new_folder(path, overwrite, "report.json")
    for path, overwrite in [(own, True), (tmp_path / "empty", False), (tmp_path / "new" / "deeper", False)]:
        check_new_folder(path, overwrite, "report.json")
    monkeypatch.chdir(tmp_path / "empty")
    for path in (tmp_path, tmp_path / "empty"):
        with pytest.raises(UserError, match="current folder or above"):
            check_new_folder(path, True, "report.json")
