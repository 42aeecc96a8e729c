"""Scripts, recipes and launch files under examples/: read, run and resumed, on as many processes as two cores bear."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.data import bundled_pairs, prepare_corpus, read_source
from hf_vaswani.data.corpus import read_lines
from hf_vaswani.training import load_config
from hf_vaswani.training.run import prepare_run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LAUNCH = EXAMPLES / "launch"
RECIPES = {path.stem: path for path in sorted((EXAMPLES / "recipes").glob("*.yaml"))}
DATA = ROOT.parent / "shared" / "data"
# Weights by formula; of the paper's own sizes, millions in its Table 3.
PARAMETERS = {
    "wmt14_en_de_base": (63_045_632, 65),
    "wmt14_en_de_big": (214_171_648, 213),
    "wmt14_en_fr_big": (209_051_648, None),
    "iwslt14_de_en": (36_757_504, None),
    "multi30k_en_de_tiny": (2_562_048, None),
    "tatoeba_de_en": (4_112_256, None),
    "ablation_tatoeba": (1_639_936, None),
    "parsing_craft": (1_895_936, None),
    "parsing_wsj": (133_906_432, None),
}
# Pieces of the tokenizers that recipes name by path.
PIECES = {"multi30k_en_de_tiny": 9712, "parsing_craft": 4000, "parsing_wsj": 16000}
TINY = """
output: {output}
source_language: de
target_language: en
data: {{train: [{{bundled: valid}}], valid: {valid}}}
tokenizer: {{vocab_size: 400}}
model: {{preset: base, d_model: 16, encoder_layers: 1, decoder_layers: 1, num_attention_heads: 2, d_ff: 24}}
batches: {{src_tokens: 600, tgt_tokens: 600, batches_per_update: 2}}
training: {{updates: 6, warmup_updates: 5}}
validation: {{num_beams: 1, every_updates: 1000}}
checkpoints: {{every_updates: 3, keep_last: 3, average_last: 2}}
"""


# ---------------------------------------------------------------------- recipes
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_loads_and_its_model_has_the_known_size(name):
    config = load_config(RECIPES[name])
    sizes = {**config.model, "vocab_size": PIECES.get(name, config.tokenizer.vocab_size)}
    assert (config.tokenizer.path is None) == (name not in PIECES)
    model_config = VaswaniConfig.from_preset(sizes.pop("preset"), **sizes)
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(model_config)
    by_formula, by_paper = PARAMETERS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == by_formula == _weights(model_config)
    if by_paper:
        assert abs(by_formula / 1e6 - by_paper) < 2.1  # what the paper's totals are off, for no stated reason
    assert config.output == f"runs/{name}"
    assert config.data.valid
    if config.checkpoints.average_last:
        # A validation between two checkpoints would add one, and the mean would take it in.
        assert config.validation.every_updates % config.checkpoints.every_updates == 0
        assert config.training.updates // config.checkpoints.every_updates >= config.checkpoints.average_last


def _weights(config):
    """Sections 3.1 to 3.4 of the paper: one shared matrix, no bias in attention, two norms or three a layer."""
    attention, norm = 4 * config.d_model**2, 2 * config.d_model
    feed_forward = 2 * config.d_model * config.d_ff + config.d_ff + config.d_model
    encoder = config.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    return config.vocab_size * config.d_model + encoder + decoder


def test_the_wmt_recipes_are_the_papers():
    base, big, french = (load_config(RECIPES[f"wmt14_{name}"]) for name in ("en_de_base", "en_de_big", "en_fr_big"))
    assert [one.training.updates for one in (base, big, french)] == [100_000, 300_000, 300_000]
    assert [one.checkpoints.average_last for one in (base, big, french)] == [5, 20, 20]
    assert [one.tokenizer.vocab_size for one in (base, big, french)] == [37_000, 37_000, 32_000]
    assert [one.model_config(None).dropout for one in (base, big, french)] == [0.1, 0.3, 0.1]
    for one in (base, big, french):
        assert (one.batches.src_tokens, one.batches.tgt_tokens) == (25_000, 25_000)
        assert (one.training.warmup_updates, one.training.rate_factor) == (4000, 1.0)
        assert one.training.max_grad_norm is None


@pytest.mark.slow
def test_the_multi30k_recipe_leaves_out_the_two_lines_without_translation_and_no_other(tmp_path):
    config = load_config(RECIPES["multi30k_en_de_tiny"])
    for source in (*config.data.train, *config.data.valid):
        source.src, source.tgt = (str(DATA.parent.parent / name[3:]) for name in (source.src, source.tgt))
        if not Path(source.src).is_file():
            pytest.skip("Multi30k is not in ../shared/data")
    codes, train = DATA / "multi30k" / "bpe10k.en-de.code", config.data.train[0]
    tokenizer = _codes_tokenizer(tmp_path / "codes", codes, train.src, train.tgt)
    assert len(tokenizer) == PIECES["multi30k_en_de_tiny"]
    assert _published_lines(tokenizer) >= 999
    corpus = prepare_corpus(config.data.train, tokenizer, tmp_path, max_ratio=config.data.max_ratio, workers=1)
    assert corpus.report[0].dropped == {"off in ratio": 2}
    assert corpus.report[0].first_lines == {"off in ratio": [16510, 16664]}


def _codes_tokenizer(out, codes, source, target, *more):
    """What examples/subword_nmt_tokenizer.py makes, through `AutoTokenizer`."""
    script = EXAMPLES / "subword_nmt_tokenizer.py"
    languages = ["--source-language", "en", "--target-language", "de", "--lowercase", *more]
    command = [sys.executable, str(script), str(codes), str(source), str(target), str(out), *languages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert done.stdout == f"{len(tokenizer)} pieces\n"
    return tokenizer


def _published_lines(tokenizer):
    """Lines of the German test 2016 that are cut as its published BPE text is."""
    raw, cut = (
        list(read_lines(DATA / "multi30k" / name))
        for name in ("raw/test_2016_flickr.de.gz", "bpe_sample/test.2016.de.gz")
    )
    pieces = tokenizer.get_tgt_vocab()
    names = {number: piece for piece, number in pieces.items()}
    found = [[names[number] for number in ids[:-1]] for ids in tokenizer(text_target=raw)["input_ids"]]
    wanted = [[piece if piece in pieces else "<unk>" for piece in line.split()] for line in cut]
    return sum(a == b for a, b in zip(found, wanted, strict=True))


def test_a_tokenizer_of_subword_nmt_codes_takes_raw_text_and_gives_it_back(tmp_path):
    (tmp_path / "codes").write_text("#version: 0.2\nm a\nma n</w>\ne i\nei n</w>\n")
    (tmp_path / "train.en").write_text("A man's dog.\n")
    (tmp_path / "train.de").write_text("Ein Mann, ein Hund.\n")
    files = [tmp_path / name for name in ("codes", "train.en", "train.de")]
    tokenizer = _codes_tokenizer(tmp_path / "made", *files)
    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<pad>", "</s>", "<s>", "<unk>"]
    ids = tokenizer(text_target="EIN Mann, ein Hund.")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ein mann, ein hund."
    assert ids[-1] == 1
    assert tokenizer.convert_ids_to_tokens(ids[:3]) == ["ein", "ma@@", "n@@"]
    again = subprocess.run(
        [sys.executable, str(EXAMPLES / "subword_nmt_tokenizer.py"), *map(str, files), str(tmp_path / "made"),
         "--source-language", "en", "--target-language", "de"], capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert again.returncode == 1
    assert "is there already" in again.stderr


def test_the_tatoeba_recipe_reads_german_to_english_of_its_own_part():
    config = load_config(RECIPES["tatoeba_de_en"])
    for source in (*config.data.train, *config.data.valid):
        source.tsv = str(DATA.parent.parent / source.tsv[3:])
        if not Path(source.tsv).is_file():
            pytest.skip("Tatoeba is not in ../shared/data")
    held_out = list(read_source(config.data.valid[0]))
    assert len(held_out) == 2001
    assert next(iter(read_source(config.data.train[0])))[1].isascii()  # the shortest English sentence comes first
    assert sum(" der " in src for src, _ in held_out) > 50 > 5 > sum(" der " in tgt for _, tgt in held_out)


# ---------------------------------------------------------------------- launch files
def test_launch_files_are_what_accelerate_reads():
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = {path.stem: load_config_from_file(str(path)) for path in LAUNCH.glob("*.yaml")}
    assert {name: (one.distributed_type.value, one.num_processes) for name, one in loaded.items()} == {
        "one_gpu": ("NO", 1),
        "eight_gpus": ("MULTI_GPU", 8),
        "fsdp2": ("FSDP", 8),
        "deepspeed_zero2": ("DEEPSPEED", 8),
    }
    assert loaded["fsdp2"].fsdp_config["fsdp_version"] == 2
    deepspeed = json.loads((ROOT / loaded["deepspeed_zero2"].deepspeed_config["deepspeed_config_file"]).read_text())
    assert deepspeed["zero_optimization"] == {"stage": 2}
    assert deepspeed["gradient_clipping"] == 0.0
    assert deepspeed["gradient_accumulation_steps"] == "auto"  # the loop knows how many, and says so to Accelerate


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_launch_scripts_parse_and_ask_for_a_recipe(name):
    path = LAUNCH / name
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    done = subprocess.run([str(path)], capture_output=True, text=True, env={**os.environ, "MASTER": "node0"})
    assert done.returncode != 0
    assert "name a recipe" in done.stderr


def test_the_readme_names_every_file_and_every_file_exists():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    here = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [path.name for path in here if path.name not in text and path.name != "README.md"]
    assert not missing
    named = {word.strip("`().,") for word in text.split() if word.startswith(("examples/", "`examples/"))}
    assert not [name for name in named if not (ROOT / name).exists() and "RECIPE" not in name]


# ---------------------------------------------------------------------- train_translation.py
def write_recipe(folder, output="run", valid="[]"):
    path = folder / "recipe.yaml"
    path.write_text(TINY.format(output=folder / output, valid=valid), encoding="utf-8")
    return path


def start(command, **changes):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **changes}
    return subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(command, expected=0, **changes):
    process = start(command, **changes)
    out, err = process.communicate(timeout=240)
    assert process.returncode == expected, err
    return out, err


def rows(folder, key="update"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if key in line]


def losses(folder):
    return [row["loss"] for row in rows(folder)]


@pytest.fixture(scope="module")
def one_process_run(tmp_path_factory):
    """Six updates of the tiny recipe in this process: what the others are held against."""
    folder = tmp_path_factory.mktemp("one")
    prepare_run(load_config(write_recipe(folder))).train()
    return folder / "run"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_script_trains_refuses_to_overwrite_and_resumes(tmp_path, one_process_run):
    command = [sys.executable, EXAMPLES / "train_translation.py", "--config", write_recipe(tmp_path)]
    run([*command, "--set", "training.updates=4"])
    _, err = run(command, expected=1)
    assert "--resume" in err
    assert "Traceback" not in err
    out, _ = run([*command, "--resume"])
    assert "6 updates" in out
    assert losses(tmp_path / "run") == losses(one_process_run)
    assert [row["start_after_update"] for row in rows(tmp_path / "run", "start_after_update")] == [0, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_dry_run_trains_nothing(tmp_path):
    recipe = write_recipe(tmp_path)
    out, _ = run([sys.executable, EXAMPLES / "train_translation.py", "--config", recipe, "--dry-run"])
    sizes = {"vocab_size": 400, "d_model": 16, "num_attention_heads": 2, "d_ff": 24}
    assert f"{_weights(VaswaniConfig(encoder_layers=1, decoder_layers=1, **sizes)):,}" in out
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_accelerate_launch_with_the_file_for_eight_takes_two(tmp_path, one_process_run):
    run([
        "accelerate", "launch", "--config_file", LAUNCH / "eight_gpus.yaml", "--num_processes", "2",
        "--mixed_precision", "no", EXAMPLES / "train_translation.py", "--config", write_recipe(tmp_path),
        *(["--set", "training.log_with=[tensorboard]"] if importlib.util.find_spec("tensorboard") else []),
    ])  # fmt: skip
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert rows(tmp_path / "run", "start_after_update")[0]["processes"] == 2
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process_run), abs=1e-5)


@pytest.mark.slow
def test_two_machines_meet_by_torchrun(tmp_path, one_process_run):
    command = [LAUNCH / "two_machines_torchrun.sh", write_recipe(tmp_path)]
    changes = {"MASTER": "localhost", "PORT": free_port(), "GPUS": "1", "RUN_ID": tmp_path.name}
    machines = [start(command, **changes) for _ in range(2)]
    for machine in machines:
        _, err = machine.communicate(timeout=240)
        assert machine.returncode == 0, err
    assert rows(tmp_path / "run", "start_after_update")[0]["processes"] == 2
    assert losses(tmp_path / "run") == pytest.approx(losses(one_process_run), abs=1e-5)


SRUN = """#!/usr/bin/env bash
# Two tasks of the command; passes SIGTERM on to all of their processes; ends with the highest exit status.
while [[ "$1" == --* ]]; do shift; done
tasks=()
trap 'for task in "${tasks[@]}"; do kill -TERM -"$task"; done' TERM
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 setsid "$@" &
  tasks+=($!)
done
echo $$ > "$STUBS/srun.pid"
worst=0
for task in "${tasks[@]}"; do
  wait "$task"; status=$?
  while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
  (( status > worst )) && worst=$status
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$STUBS/scontrol.log"
[ "$1" = show ] && printf 'localhost\\nelsewhere\\n'
exit 0
"""


def test_a_slurm_job_that_is_preempted_saves_queues_itself_again_and_goes_on(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {
        "PATH": path, "STUBS": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "x[0-1]",
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    command = [LAUNCH / "two_machines_slurm.sh", write_recipe(tmp_path)]
    command += ["--set", "checkpoints.every_updates=100000", "--set", "training.loader_workers=1", "--set"]
    first = start([*command, "training.updates=100000"], **job)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(rows(tmp_path / "run")) > 2):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 143, err
    assert (tmp_path / "scontrol.log").read_text().splitlines()[-1] == f"requeue {os.getpid()}"
    done = len(rows(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"update-{done:08d}"]
    run([*command, f"training.updates={done + 2}"], **job)
    assert [row["update"] for row in rows(tmp_path / "run")] == list(range(1, done + 3))
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1
    assert (tmp_path / "run" / "model" / "config.json").is_file()


FORCED = """
import sys
from accelerate.state import PartialState
from accelerate.utils import DistributedType

# Accelerate shards on accelerators alone; torch shards on CPUs as well.
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)

from hf_vaswani.training import load_config, run
run.make_accelerator = lambda recipe, folder=None: __import__("accelerate").Accelerator(project_dir=folder)
for updates, resume in ((4, False), (6, True)):
    config = load_config(sys.argv[1], [f"training.updates={updates}"])
    one = run.prepare_run(config, resume=resume)
    assert one.accelerator.distributed_type == DistributedType.FSDP, one.accelerator.distributed_type
    one.train(resume=resume)
"""


def test_fsdp2_trains_saves_and_resumes_as_one_process_does(tmp_path, one_process_run):
    script = tmp_path / "forced.py"
    script.write_text(FORCED, encoding="utf-8")
    recipe = write_recipe(tmp_path, valid="[{bundled: test}]")
    run([
        "accelerate", "launch", "--config_file", LAUNCH / "fsdp2.yaml", "--num_processes", "2",
        "--mixed_precision", "no", script, recipe,
    ], ACCELERATE_TORCH_DEVICE="cpu")  # fmt: skip
    folder = tmp_path / "run"
    assert losses(folder) == pytest.approx(losses(one_process_run), abs=1e-5)
    assert [row["start_after_update"] for row in rows(folder, "start_after_update")] == [0, 4]
    assert len(rows(folder, "validated_update")) == 2
    assert (folder / "checkpoints" / "update-00000006" / "sharded").is_dir()
    whole = VaswaniForConditionalGeneration.from_pretrained(folder / "checkpoints" / "update-00000006")
    other = VaswaniForConditionalGeneration.from_pretrained(one_process_run / "checkpoints" / "update-00000006")
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- finetune_with_trainer.py
@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A model without dropout, and text of 15 batches of 200 tokens, which two processes cannot share evenly."""
    folder = tmp_path_factory.mktemp("small")
    pairs = list(bundled_pairs("valid", "de-en"))[:95]
    tokenizer = VaswaniTokenizer.train((text for pair in pairs for text in pair), vocab_size=300, show_progress=False)
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2, "d_ff": 24}
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=len(tokenizer), dropout=0.0, **sizes))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for number, language in enumerate(("de", "en")):
        (folder / f"text.{language}").write_text("".join(f"{pair[number]}\n" for pair in pairs), encoding="utf-8")
    return folder


def finetune(output, *options, launcher=(sys.executable,)):
    return run([
        *launcher, EXAMPLES / "finetune_with_trainer.py", "--cpu", "--output", output, "--src-tokens", "400",
        "--tgt-tokens", "400", "--warmup-steps", "4", "--logging-steps", "1", "--save-steps", "3", *options,
    ])  # fmt: skip


def history(output, step):
    state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
    return [row for row in state["log_history"] if "loss" in row]


@pytest.fixture(scope="module")
def trained_alone(small_model):
    """Sixteen steps, each of two batches, on one process; the text is a recipe's."""
    text = [{"src": str(small_model / "text.de"), "tgt": str(small_model / "text.en")}]
    recipe = {"output": "unused", "target_language": "en", "data": {"train": text, "valid": text}}
    (small_model / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    options = ("--recipe", small_model / "recipe.yaml", "--model", small_model / "model", "--accumulation", "2")
    out, _ = finetune(small_model / "alone", *options, "--max-steps", "16")
    return out, history(small_model / "alone", 16)


def test_the_trainer_takes_the_papers_rate_update_by_update_and_scores(trained_alone):
    out, steps = trained_alone
    assert "eval_sacrebleu: " in out
    expected = [16**-0.5 * min(k**-0.5, k * 4**-1.5) for k in range(1, 17)]
    assert [row["learning_rate"] for row in steps] == pytest.approx(expected, rel=1e-12)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


def test_two_processes_and_a_break_within_the_second_epoch_change_nothing(small_model, trained_alone):
    output = small_model / "together"
    text = ("--train-src", small_model / "text.de", "--train-tgt", small_model / "text.en")
    two = ("torchrun", "--nproc-per-node", "2", "--master-port", free_port())
    _, alone = trained_alone
    finetune(output, *text, "--model", small_model / "model", "--max-steps", "12", launcher=two)
    assert 1 < history(output, 12)[-1]["epoch"] < 2
    finetune(output, *text, "--model", small_model / "model", "--max-steps", "16", "--resume", launcher=two)
    together = history(output, 16)
    assert [row["loss"] for row in together] == pytest.approx([row["loss"] for row in alone], abs=1e-5)
    assert [row["learning_rate"] for row in together] == [row["learning_rate"] for row in alone]
    assert [row["epoch"] for row in together] == [row["epoch"] for row in alone]


@pytest.mark.slow
def test_the_trainer_begins_from_a_preset(small_model, tmp_path):
    text = ("--train-src", small_model / "text.de", "--train-tgt", small_model / "text.en")
    finetune(tmp_path / "new", *text, "--preset", "tiny", "--vocab-size", "280", "--max-steps", "2")
    assert VaswaniForConditionalGeneration.from_pretrained(tmp_path / "new").config.vocab_size == 280
    assert VaswaniTokenizer.from_pretrained(tmp_path / "new")("Ja.")["input_ids"]


def test_the_trainer_keeps_an_earlier_run_and_refuses_half_a_corpus(tmp_path, monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("finetune", EXAMPLES / "finetune_with_trainer.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    (tmp_path / "checkpoint-7").mkdir()
    line = ["finetune", "--preset", "tiny", "--output", str(tmp_path), "--train-src", "a"]
    monkeypatch.setattr(sys, "argv", [*line, "--train-tgt", "b"])
    with pytest.raises(script.ConfigError, match="holds a run already: go on with it"):
        script.main()
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit):
        script.main()
    assert "--train-src and --train-tgt belong together" in capsys.readouterr().err
