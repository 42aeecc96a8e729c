"""The quickstart: one command from nothing to a translator."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from hf_vaswani.cli import quickstart as module
from hf_vaswani.cli.main import main
from hf_vaswani.data import bundled_pairs

DRAW = module._draw


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A corpus and a model of a fraction of the size, and an empty current folder."""
    sizes = {"train": 400, "test": 12}
    monkeypatch.setattr(
        module, "bundled_pairs", lambda split, direction: bundled_pairs(split, direction)[: sizes[split]]
    )
    monkeypatch.setattr(module, "VOCAB_SIZE", 320)
    # An untrained model talks at length, and a long picture takes long.
    monkeypatch.setattr(module, "_draw", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines[1:]]


def test_one_command_makes_a_translator_that_can_be_used_as_it_says(small, capfd, monkeypatch):
    monkeypatch.setattr(module, "_draw", DRAW)
    assert main(["quickstart", "--updates", "3", "--output", "my model"]) == 0
    out, err = capfd.readouterr()
    folder = small / "my model"

    # Standard output: ten held-out sentences, scores with their kind and signature, and what to type next.
    held_out = bundled_pairs("test")[:10]
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  source ")] == [
        src for src, _ in held_out
    ]
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  reference ")] == [
        tgt for _, tgt in held_out
    ]
    assert "held-out lines: sacreBLEU " in out
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in out
    assert "Training" in err
    assert "Training" not in out

    # The folder: complete, and nothing beside it.
    assert [path.name for path in small.iterdir()] == ["my model"]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "attention.png", "metrics.jsonl", "quickstart.json", "translations.txt", "README.md",
            "modeling_vaswani.py"} <= names  # fmt: skip
    assert (folder / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert "tatoeba.org" in (folder / "README.md").read_text(encoding="utf-8")
    report = json.loads((folder / "quickstart.json").read_text())
    assert (report["updates"], report["planned_updates"], report["direction"]) == (3, 3, "de-en")
    assert len(losses(folder)) == 3

    # The shell command and the snippet, as printed.
    command, snippet = out.split("Next, in a shell:\n\n")[1].split(f"\n\nor in Python ({module.this_python()}):\n\n")
    words = shlex.split(command)
    assert words[:3] == ["echo", "Wo ist mein Buch?", "|"]
    assert words[-2:] == ["translate", "my model"]
    (small / "text").write_text("Wo ist mein Buch?\n", encoding="utf-8")
    assert main([*words[-2:], "text"]) == 0
    translated = capfd.readouterr().out
    code = "\n".join(line.removeprefix("  ") for line in snippet.splitlines())
    assert code.count("\n") == 2
    exec(code, {})
    assert capfd.readouterr().out == translated
    assert translated.endswith("\n")


def test_the_same_seed_gives_the_same_losses_and_another_one_does_not(small):
    for name, seed in [("a", "5"), ("b", "5"), ("c", "6")]:
        assert main(["quickstart", "--updates", "4", "--output", name, "--seed", seed, "--threads", "1"]) == 0
    assert losses(small / "a") == losses(small / "b")
    assert losses(small / "a") != losses(small / "c")
    weights = [(small / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_minutes_are_a_plan_of_updates_and_a_limit(small, monkeypatch, capfd):
    monkeypatch.setattr(module, "UPDATES_PER_MINUTE", 8)
    assert main(["quickstart", "--minutes", "0.5", "--output", "planned"]) == 0
    assert len(losses(small / "planned")) == 4
    monkeypatch.setattr(module, "UPDATES_PER_MINUTE", 10**6)
    capfd.readouterr()
    assert main(["quickstart", "--minutes", "0.03", "--output", "stopped"]) == 0
    done = losses(small / "stopped")
    assert 0 < len(done) < 30_000
    assert f"--updates {len(done)} repeats exactly this run" in capfd.readouterr().err
    # What the clock cut short began like any other run.
    shared = min(len(done), 4)
    assert done[:shared] == losses(small / "planned")[:shared]


@pytest.mark.slow
def test_the_other_direction_reads_english(small, capfd):
    assert main(["quickstart", "--updates", "1", "--direction", "en-de", "--threads", "2"]) == 0
    out = capfd.readouterr().out
    assert f"  source     {bundled_pairs('test')[0][1]}\n" in out
    assert "echo 'Where is my book?'" in out
    report = json.loads((small / "quickstart" / "quickstart.json").read_text())
    assert (report["direction"], report["threads"]) == ("en-de", 2)


def test_a_full_output_folder_is_refused_before_training(small, capfd):
    (small / "quickstart").mkdir()
    (small / "quickstart" / "thesis.txt").write_text("years of work")
    for extra in ([], ["--overwrite"]):
        assert main(["quickstart", "--updates", "1", *extra]) == 2
        error = capfd.readouterr().err
        assert error.startswith("hf-vaswani quickstart: quickstart ")
        assert error.count("\n") == 1
    assert (small / "quickstart" / "thesis.txt").read_text() == "years of work"


def test_an_earlier_quickstart_is_replaced_only_when_asked(small, capfd):
    for arguments, code in [([], 0), ([], 2), (["--overwrite"], 0)]:
        assert main(["quickstart", "--updates", str(len(arguments) + 1), *arguments]) == code
    assert len(losses(small / "quickstart")) == 2


def test_without_matplotlib_there_is_no_picture_but_all_the_rest(small, capfd, monkeypatch):
    monkeypatch.setattr(module, "_draw", DRAW)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["quickstart", "--updates", "1"]) == 0
    out, err = capfd.readouterr()
    assert 'pip install "hf-vaswani[plots]"' in err
    assert "attention.png" not in out
    assert (small / "quickstart" / "model.safetensors").is_file()
    assert not (small / "quickstart" / "attention.png").exists()


def test_training_that_diverges_is_told_and_leaves_nothing(small, capfd, monkeypatch):
    monkeypatch.setattr(module, "RATE_FACTOR", 1e38)
    assert main(["quickstart", "--updates", "30"]) == 2
    assert "is no finite number" in capfd.readouterr().err
    assert list(small.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--minutes", "0"], ["--minutes", "nan"], ["--minutes", "inf"], ["--updates", "0"], ["--seed", "-1"],
     ["--seed", "x"], ["--direction", "de-fr"], ["--minutes", "1", "--updates", "1"], ["--threads", "0"]],
)  # fmt: skip
def test_nonsense_is_refused_before_anything_is_done(small, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", *arguments])
    assert ended.value.code == 2
    assert list(small.iterdir()) == []


def test_what_to_type_next_works_where_the_environment_is_not_active(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)  # the environment may lie in the folder that the tests are started from
    command = module.next_commands(folder, "de-en")[0].split(" | ")[1]
    assert command == f"{sys.executable} -m hf_vaswani.cli translate {folder}"
    monkeypatch.setattr(module.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert module.next_commands(folder, "de-en")[0].split(" | ")[1] == f"hf-vaswani translate {folder}"
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.chdir(Path(sys.executable).parents[1])
    assert module.this_python() == str(Path("bin") / Path(sys.executable).name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_run_reaches_its_promised_score(tmp_path):
    from hf_vaswani.cli.quickstart import DEFAULT_MINUTES, UPDATES_PER_MINUTE, quickstart

    result = quickstart(tmp_path / "out", round(DEFAULT_MINUTES * UPDATES_PER_MINUTE))
    assert result.bleu.score >= 40.0
