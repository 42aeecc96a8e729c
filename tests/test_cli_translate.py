"""`hf-vaswani translate`: precision, batches and threads, the closing line, and what happens when it is stopped."""

import gc
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer, VaswaniTranslationPipeline
from hf_vaswani.cli.main import main
from hf_vaswani.cli.output import Terminated, UserError, stop_at_sigterm
from hf_vaswani.cli.translate import closing_line, load_translator, write_translations

LINES = ["Ein Hund schläft.", "", "Zwei Katzen\u2028spielen.", "Kein Vogel singt."]
TRAINED = Path(__file__).parents[1] / "checkpoints" / "tatoeba-de-en"
GERMAN = [
    "Wo ist mein Buch?", "Tom lacht.", "", "Ich habe heute keine Zeit, aber morgen komme ich.", "31",
    "Das Wetter ist schön.", "Kannst du mir helfen?", "Sie hat zwei Brüder und eine Schwester.",
]  # fmt: skip


def save_model(path, **settings):
    tokenizer = VaswaniTokenizer.train(LINES, vocab_size=290, allow_fewer=True, show_progress=False)
    torch.manual_seed(4)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                      d_ff=24)
    )  # fmt: skip
    model.generation_config.update(**{"max_new_tokens": 6, **settings})
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model that says something different for each line, at most six tokens long."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The trained model as a folder of CTranslate2 in float32."""
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    from hf_vaswani.interop.exporting import export_model

    out = tmp_path_factory.mktemp("converted") / "ct2"
    export_model("ctranslate2", TRAINED, out, quantization="float32", count=1)
    return out


@pytest.fixture
def feed(monkeypatch):
    """Puts lines on standard input."""

    def put(lines):
        content = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))

    return put


@pytest.fixture
def translate(feed, capfdbinary):
    """Runs the command over lines, and gives the lines that come out."""

    def run(folder, lines, *options):
        feed(lines)
        assert main(["translate", str(folder), *options]) == 0
        return capfdbinary.readouterr().out.decode().removesuffix("\n").split("\n")

    return run


@pytest.fixture
def loaded(monkeypatch):
    """What the command loads, and the threads that it computes with."""
    import hf_vaswani.cli.translate as module

    seen = []

    def remember(translator, *args, **kwargs):
        seen.append((translator, torch.get_num_threads()))
        return write_translations(translator, *args, **kwargs)

    monkeypatch.setattr(module, "write_translations", remember)
    return seen


@pytest.fixture
def shapes(monkeypatch):
    """The sizes of the batches that a pipeline makes."""
    found = []
    plain = VaswaniTranslationPipeline.preprocess

    def preprocess(self, sources, **kwargs):
        inputs = plain(self, sources, **kwargs)
        found.append(tuple(inputs["input_ids"].shape))
        return inputs

    monkeypatch.setattr(VaswaniTranslationPipeline, "preprocess", preprocess)
    return found


# ------------------------------------------------------------------ precision
def test_the_precision_is_the_folders_unless_another_is_asked_for(folder, translate, loaded, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    VaswaniForConditionalGeneration.from_pretrained(folder, dtype="bfloat16").save_pretrained(half)
    for place, options in [
        (folder, []), (half, []), (half, ["--dtype", "auto"]), (half, ["--dtype", "float32"]),
        (folder, ["--dtype", "bfloat16"]), (folder, ["--dtype", "float16"]),
    ]:  # fmt: skip
        assert len(translate(place, LINES[:1], *options)) == 1
    found = [str(translator.model.dtype).removeprefix("torch.") for translator, _ in loaded]
    assert found == ["float32", "bfloat16", "bfloat16", "float32", "bfloat16", "float16"]


def test_int8_runs_by_ctranslate2_and_leaves_no_folder(translate, loaded, monkeypatch, tmp_path):
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    from hf_vaswani.interop.exporting import export_model

    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    texts = translate(TRAINED, GERMAN, "--dtype", "int8", "--device", "cpu")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert loaded[0][0].model.translator.compute_type.startswith("int8")
    assert [texts[2], texts[4]] == ["", "31"]
    assert "my book?" in texts[0]
    export_model("ctranslate2", TRAINED, tmp_path / "int8", quantization="int8", count=1)
    assert translate(tmp_path / "int8", GERMAN) == texts
    assert loaded[1][0].model.translator.compute_type == loaded[0][0].model.translator.compute_type


def test_a_folder_of_ctranslate2_translates_as_its_model_does(converted, translate, loaded):
    for options in ([], ["--beams", "1"], ["--batch-size", "1"], ["--beams", "3", "--batch-tokens", "20"]):
        assert translate(converted, GERMAN, *options) == translate(TRAINED, GERMAN, *options)
    assert loaded[0][0].model.translator.compute_type == "float32"
    translate(converted, GERMAN[:1], "--dtype", "int8")
    assert loaded[-1][0].model.translator.compute_type.startswith("int8")


@pytest.mark.parametrize("beams", ["1", "4"])
def test_candidates_of_ctranslate2_have_the_scores_of_the_model(converted, translate, beams):
    rows = {
        name: [line.split("\t") for line in translate(name, GERMAN[:2], "--n-best", beams, "--beams", beams)]
        for name in (converted, TRAINED)
    }
    assert len(rows[TRAINED]) >= 2 * int(beams) - 1
    best = {name: [next(row for row in found if row[0] == number) for number in "12"] for name, found in rows.items()}
    for theirs, ours in zip(best[converted], best[TRAINED], strict=True):
        assert theirs[2] == ours[2]
        assert float(theirs[1]) == pytest.approx(float(ours[1]), abs=1e-3)
    for number in "12":
        scores = [float(row[1]) for row in rows[converted] if row[0] == number]
        assert scores == sorted(scores, reverse=True)


def test_settings_of_the_search_reach_ctranslate2(converted):
    translator = load_translator(str(converted))
    ours = load_translator(str(TRAINED))
    word = translator.tokenizer("Why", add_special_tokens=False)["input_ids"]
    text = GERMAN[3]
    plain = translator(text)
    for settings in (
        {"max_new_tokens": 3}, {"max_length": 4}, {"max_length_offset": -9}, {"min_new_tokens": 25},
        {"forced_prefix_ids": word}, {"suppress_tokens": [translator.tokenizer("I")["input_ids"][0]]},
        {"num_beams": 1, "repetition_penalty": 3.0}, {"length_penalty_type": "power", "length_penalty": -9.0},
    ):  # fmt: skip
        assert translator(text, **settings) != plain, settings
        # Two beams may end at different times; a greedy search is the same everywhere.
        greedy = {**settings, "num_beams": 1}
        assert translator(text, **greedy) == ours(text, **greedy), settings
    assert translator(text, forced_prefix_ids=word)[0]["translation_text"].startswith("Why")


def test_each_sentence_keeps_its_own_limit_in_a_batch(converted):
    translator = load_translator(str(converted))
    texts = [GERMAN[0], GERMAN[3] * 3]
    apart = [translator(text, max_length_offset=-3, min_new_tokens=30)[0] for text in texts]
    assert translator(texts, max_length_offset=-3, min_new_tokens=30) == apart
    sizes = [len(translator.tokenizer(one["translation_text"])["input_ids"]) for one in apart]
    assert sizes[0] < 9 < 20 < sizes[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"begin_suppress_tokens": [5]}, r"begin_suppress_tokens=\[5\]"),
        ({"forced_eos_token_id": 1}, "forced_eos_token_id=1"),
    ],
)
def test_what_ctranslate2_cannot_do_is_refused(folder, tmp_path, settings, message):
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    save_model(tmp_path / "model", **settings)
    with pytest.raises(UserError, match=f"does not have this setting of the model's search: {message}"):
        load_translator(str(tmp_path / "model"), dtype="int8")


def test_folders_and_devices_that_ctranslate2_cannot_use_are_named(folder, converted, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(converted, bare)
    (bare / "conversion.json").unlink()
    with pytest.raises(UserError, match=r"no report of `hf-vaswani export ctranslate2`.*import ctranslate2"):
        load_translator(str(bare))
    lost = tmp_path / "lost"
    shutil.copytree(converted, lost)
    report = (lost / "conversion.json").read_text()
    forced = "The forced beginning ['a'] must be passed as `target_prefix`."
    (lost / "conversion.json").write_text(report.replace('"losses": [', f'"losses": ["{forced}", '))
    with pytest.raises(UserError, match="cannot translate as its model did: The forced beginning"):
        load_translator(str(lost))
    for device in ("cuda:99", "mps", "nonsense"):
        with pytest.raises(UserError, match=f"--device {device}: CTranslate2 has no such device here"):
            load_translator(str(folder), device, "int8")


def test_without_ctranslate2_the_way_to_it_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    (tmp_path / "model.bin").touch()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").touch()
    for name, dtype in ((folder, "int8"), (tmp_path, None)):
        with pytest.raises(UserError, match=r"not installed\. Run: pip install 'hf-vaswani\[ctranslate2\]'"):
            load_translator(str(name), dtype=dtype)


# ------------------------------------------------------------------ batches
def test_batches_are_as_large_as_was_asked(folder, translate, shapes):
    lines = ["ab", "abcdefgh", "abc", "abcdefg"]
    expected = translate(folder, lines)
    assert [rows for rows, _ in shapes] == [4]
    shapes.clear()
    assert translate(folder, lines, "--batch-size", "3") == expected
    assert [rows for rows, _ in shapes] == [3, 1]
    shapes.clear()
    longest = shapes_of(folder, lines)
    assert translate(folder, lines, "--batch-tokens", str(2 * longest)) == expected
    assert shapes[0][0] == 2
    assert max(rows * columns for rows, columns in shapes) <= 2 * longest
    shapes.clear()
    translate(folder, ["a"] * 200)
    translate(folder, ["a"] * 200, "--beams", "8")
    assert [rows for rows, _ in shapes] == [128, 72, 64, 64, 64, 8]


def shapes_of(folder, lines):
    tokenizer = VaswaniTokenizer.from_pretrained(folder)
    return max(len(ids) for ids in tokenizer(lines)["input_ids"])


def test_the_window_says_how_far_lines_are_sorted(folder, translate, shapes):
    lines = ["ab", "abcdefgh"] * 4
    found = {}
    for window in ("1", "2", "4"):
        shapes.clear()
        found[window] = translate(folder, lines, "--batch-size", "2", "--window", window)
        widths = [columns for _, columns in shapes]
        long, short = max(widths), min(widths)
        assert widths == {"1": [long] * 4, "2": [long, short] * 2, "4": [long] * 2 + [short] * 2}[window]
    assert found["1"] == found["2"] == found["4"]


# ------------------------------------------------------------------ threads, and the closing line
@pytest.fixture
def threads(monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    os.environ.pop("RAYON_NUM_THREADS", None)


def test_threads_are_set_everywhere(folder, translate, loaded, threads, monkeypatch):
    translate(folder, LINES[:1], "--threads", "3")
    assert loaded[0][1] == 3
    assert os.environ["RAYON_NUM_THREADS"] == "3"
    ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    given = []
    plain = ctranslate2.Translator
    monkeypatch.setattr(
        ctranslate2, "Translator", lambda *args, **kwargs: given.append(kwargs) or plain(*args, **kwargs)
    )
    translate(folder, LINES[:1], "--threads", "2", "--dtype", "int8")
    assert [one["intra_threads"] for one in given] == [2]


def test_the_closing_line_counts_lines_tokens_and_time(folder, feed, capfd):
    feed(LINES)
    assert main(["translate", str(folder), "--stats"]) == 0
    shown = re.fullmatch(r"4 lines, (\d+) tokens out in (\d+\.\d) s \([\d,]+ tokens/s\)\n", capfd.readouterr().err)
    assert shown
    translator = load_translator(str(folder))
    rows = [translator.model.generate(**translator.tokenizer(LINES[i], return_tensors="pt")) for i in (0, 2, 3)]
    assert int(shown.group(1)) == sum(row.shape[1] - 1 for row in rows)
    feed(LINES)
    assert main(["translate", str(folder)]) == 0
    assert capfd.readouterr().err == ""
    assert closing_line(1014, 13100, 9.8) == "1,014 lines, 13,100 tokens out in 9.8 s (1,337 tokens/s)"
    assert closing_line(1, 0, 0.0) == "1 line, 0 tokens out in 0.0 s (0 tokens/s)"


@pytest.mark.parametrize(
    ("is_terminal", "is_seen"), [((True, False), True), ((True, True), False), ((False, False), False)]
)
def test_on_a_terminal_the_line_comes_unasked_where_no_results_appear(
    folder, feed, capfd, monkeypatch, is_terminal, is_seen
):
    feed(LINES)
    for stream, answer in zip((sys.stderr, sys.stdout), is_terminal, strict=True):
        monkeypatch.setattr(stream, "isatty", lambda answer=answer: answer, raising=False)
    assert main(["translate", str(folder)]) == 0
    assert ("4 lines, " in capfd.readouterr().err) == is_seen


def test_no_bar_stands_between_results_on_a_terminal(folder, feed, monkeypatch):
    seen = []
    monkeypatch.setattr("hf_vaswani.cli.translate.write_translations", lambda *args, **_: seen.append(args[3]) or 0)
    for is_terminal in (True, False):
        feed(LINES)
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer, raising=False)
        assert main(["translate", str(folder)]) == 0
    assert [options.get("progress") for options in seen] == [False, None]


# ------------------------------------------------------------------ stopped
class Running:
    """The command as a process whose lines of standard input come one by one."""

    def __init__(self, *arguments):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_vaswani.cli", "translate", *map(str, arguments)], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # What a shell starts in the background has SIGINT ignored, and a child inherits that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def put(self, line):
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self):
        """Status, what was still written, and the errors."""
        try:
            output, errors = self.process.communicate(timeout=100)
        finally:
            self.process.kill()  # of one that has ended: nothing
        return self.process.returncode, output, errors


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that does not end a sentence for very long."""
    return save_model(tmp_path_factory.mktemp("endless"), max_new_tokens=100_000, suppress_tokens=[1])


@pytest.mark.parametrize(
    ("number", "status", "options"),
    [(signal.SIGINT, 130, []), (signal.SIGTERM, 143, []), (signal.SIGINT, 130, ["--dtype", "int8", "--beams", "290"])],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C in CTranslate2"],
)
def test_a_signal_in_the_middle_of_a_batch_keeps_what_was_printed(endless, number, status, options):
    if "int8" in options:
        pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    running = Running(endless, "--batch-size", "1", *options)
    running.put("31")
    assert running.process.stdout.readline() == b"31\n"
    running.put(LINES[0])
    time.sleep(1.0)  # it has begun
    start = time.perf_counter()
    running.process.send_signal(number)
    assert running.end() == (status, b"", b"hf-vaswani translate: stopped.\n")
    assert time.perf_counter() - start < 30.0


def test_a_signal_while_it_waits_for_a_line_ends_it(folder):
    running = Running(folder, "--batch-size", "1")
    running.put(LINES[0])
    assert running.process.stdout.readline().endswith(b"\n")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (130, b"", b"hf-vaswani translate: stopped.\n")


def test_a_reader_that_has_enough_ends_it_quietly(folder):
    running = Running(folder, "--batch-size", "1")
    running.put(LINES[0])
    assert running.process.stdout.readline().endswith(b"\n")  # head -1
    running.process.stdout.close()
    running.put(LINES[3])
    assert running.process.wait(timeout=100) == 141
    assert running.process.stderr.read() == b""
    running.process.stdin.close()
    running.process.stderr.close()


def test_a_handler_of_sigterm_that_was_there_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), stop_at_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------ a long life
@pytest.mark.slow
def test_two_thousand_requests_take_no_more_memory_and_threads_than_two_hundred(folder, threads):
    torch.set_num_threads(1)
    translator = load_translator(str(folder))
    generator = random.Random(5)
    process, memory, counts, times = psutil.Process(), {}, set(), []
    words = [*"abcdefghijklmnopqrstuvwxyz", "Hund", "Katzen", "Vogel", "schläft"]
    for call in range(1, 2001):
        text = " ".join(generator.choices(words, k=generator.randint(1, 100)))
        start = time.perf_counter()
        translator(text)
        times.append(time.perf_counter() - start)
        if call in (200, 2000):
            gc.collect()
            memory[call] = process.memory_info().rss
        if call >= 200:
            counts.add(process.num_threads())
    print(f"first call {times[0] * 1000:.0f} ms, tenth {times[9] * 1000:.0f} ms; {memory[2000] / 2**20:.0f} MiB")
    assert memory[2000] < 1.05 * memory[200]
    assert len(counts) == 1
    assert torch.get_num_threads() == 1
