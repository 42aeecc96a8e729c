"""Table 3 as one sweep: each row and seed a run of its own, measured when it has ended, never done twice."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data.progress import late_bar
from ..training.config import ConfigError, TrainingConfig
from ..training.run import MODEL, RESULT, cache_folder, load_tokenizer
from .ablation_rows import choose_rows, row_changes, update_factor

SWEEP, MEASURED, RECIPE, LOG, HYPOTHESES = "sweep.json", "measured.json", "recipe.yaml", "log.txt", "hypotheses.txt"


@dataclass(frozen=True)
class Measured:
    """One run of a sweep, measured on the recipe's validation text.

    Args:
        row (`str`), seed (`int`): which.
        perplexity (`float`): per piece, end tokens included. bleu (`float`): sacreBLEU by the paper's search.
        bleu_signature (`str`): its settings. parameters (`int`): of the model.
        updates (`int`), epochs (`float`), seconds (`float`): of the training. model (`dict`): fields of the row.
    """

    row: str
    seed: int
    perplexity: float
    bleu: float
    bleu_signature: str
    parameters: int
    updates: int
    epochs: float
    seconds: float
    model: dict[str, Any]


@dataclass
class Sweep:
    """All runs of an ablation.

    Args:
        config (`TrainingConfig`): the recipe; its `model` is the row "base", its `output` the sweep's folder.
        rows (`list[str]`): rows of Table 3. seeds (`list[int]`): each row is trained once with each.
    """

    config: TrainingConfig
    rows: list[str]
    seeds: list[int]

    @property
    def output(self) -> Path:
        """The sweep's folder."""
        return Path(self.config.output)

    def folder(self, row: str, seed: int) -> Path:
        """Where a run lies."""
        return self.output / f"{row}-seed{seed}"

    def run_config(self, row: str, seed: int) -> TrainingConfig:
        """The recipe of one run: the row's model and seed, the sweep's tokenizer and text, the last weights alone.

        Raises:
            ConfigError: the base model cannot be changed as the row asks.
        """
        config = self.config
        try:
            changes = row_changes(row, config.model_config(None))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return replace(
            config,
            output=str(self.folder(row, seed)),
            model=config.model | changes,
            data=replace(config.data, cache=str(cache_folder(config)), valid=[]),
            training=replace(config.training, seed=seed, updates=config.training.updates * update_factor(row)),
            checkpoints=replace(config.checkpoints, average_last=0),
        )

    def measured(self) -> list[Measured]:
        """What has been measured, in the order of rows and seeds."""
        found = []
        for row in self.rows:
            for seed in self.seeds:
                path = self.folder(row, seed) / MEASURED
                if path.is_file():
                    found.append(Measured(**json.loads(path.read_text(encoding="utf-8"))))
        return found

    def hypotheses(self, row: str, seed: int) -> list[str]:
        """The translations of a run that has been measured."""
        text = (self.folder(row, seed) / HYPOTHESES).read_text(encoding="utf-8")
        return text.split("\n")[:-1]

    def references(self) -> list[str]:
        """The target side of the validation text."""
        return [target for _, target in validation_pairs(self.config)]


def make_sweep(config: TrainingConfig, rows: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """Check a sweep as a whole, before the first run.

    Args:
        config (`TrainingConfig`): a recipe with validation text. rows (`Sequence[str]`): rows and groups of Table 3;
            "base" is always among them. seeds (`Sequence[int]`): of weights, order and dropout.

    Returns:
        `Sweep`.

    Raises:
        ConfigError: an unknown row, no seed, no validation text, a row that the base model is too small for, or an
            output folder that holds a sweep of another recipe.
    """
    try:
        sweep = Sweep(config, choose_rows(rows), sorted(set(seeds)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not sweep.seeds:
        raise ConfigError("A sweep needs at least one seed.")
    if not config.data.valid:
        raise ConfigError("data.valid names no corpus: an ablation is measured on it.")
    if config.start_from is not None:
        raise ConfigError("start_from brings its own model, and the rows of Table 3 need others: leave it out.")
    for row in sweep.rows:
        config_of_row = sweep.run_config(row, sweep.seeds[0])
        try:
            config_of_row.validate_model()
        except ValueError as error:
            raise ConfigError(f"Row {row}: {error}") from error
    path = sweep.output / SWEEP
    if path.is_file() and json.loads(path.read_text(encoding="utf-8"))["key"] != _key(config):
        raise ConfigError(
            f"{sweep.output} holds a sweep of another recipe: name another `output`, or remove that folder."
        )
    return sweep


def validation_pairs(config: TrainingConfig) -> list[tuple[str, str]]:
    """The validation text of a recipe, blank pairs left out as in training."""
    from ..data.sources import read_source

    languages = (config.source_language, config.target_language)
    pairs = [pair for source in config.data.valid for pair in read_source(source, *languages)]
    return [(src, tgt) for src, tgt in pairs if src.strip() and tgt.strip()]


# --------------------------------------------------------------------------- the sweep
def run_sweep(sweep: Sweep, parallel: int = 1, launcher: Sequence[str] = ()) -> dict[str, str]:
    """Train and measure all that has not been measured; a run that was broken off goes on from its checkpoint.

    Args:
        sweep (`Sweep`): what is to be done. parallel (`int`): runs at a time. Each has its share of the processor's
            threads, and, where there are accelerators, one of them to itself.
        launcher (`Sequence[str]`): words that start a run on several devices, such as ["accelerate", "launch",
            "--config_file", "eight_gpus.yaml"]; none: one process.

    Returns:
        `dict[str, str]`: runs that failed, by the name of their folder, with the last line of their log. All others
        have been measured.
    """
    sweep.output.mkdir(parents=True, exist_ok=True)
    _write(sweep.output / SWEEP, {"key": _key(sweep.config), "recipe": sweep.config.to_dict()})
    load_tokenizer(sweep.config)  # learnt once, before the runs look for it
    waiting = [(row, seed) for seed in sweep.seeds for row in sweep.rows]  # all rows of a seed, then the next seed
    waiting = [one for one in waiting if not (sweep.folder(*one) / MEASURED).is_file()]
    failed: dict[str, str] = {}
    places: list[int] = list(range(parallel))
    lock = threading.Lock()

    def one_run(row: str, seed: int) -> None:
        with lock:
            place = places.pop(0)
        try:
            _train(sweep, row, seed, place, parallel, launcher)
            with lock:  # one measurement at a time: it uses all threads of this process
                _measure(sweep, row, seed)
        finally:
            with lock:
                places.append(place)

    with ThreadPoolExecutor(parallel) as pool, late_bar("ablation", "run", len(waiting)) as bar:
        futures = {pool.submit(one_run, *one): one for one in waiting}
        try:
            for future in as_completed(futures):
                row, seed = futures[future]
                name = sweep.folder(row, seed).name
                try:
                    future.result()
                    done = Measured(**json.loads((sweep.folder(row, seed) / MEASURED).read_text(encoding="utf-8")))
                    _say(f"{name}: perplexity {done.perplexity:.2f}, BLEU {done.bleu:.2f}, {done.seconds:,.0f} s")
                except RunFailed as error:
                    failed[name] = str(error)
                    _say(f"{name}: failed: {error}")
                bar.update(1)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return failed


class RunFailed(RuntimeError):
    """A run ended without a model; the message is the last line of its log."""


def _train(sweep: Sweep, row: str, seed: int, place: int, parallel: int, launcher: Sequence[str]) -> None:
    """One run in a process of its own, so that no fault of it ends the sweep."""
    folder = sweep.folder(row, seed)
    if (folder / RESULT).is_file() and (folder / MODEL).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(yaml.safe_dump(sweep.run_config(row, seed).to_dict()), encoding="utf-8")
    environment = dict(os.environ)
    if parallel > 1 and "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // parallel))
    if parallel > 1 and torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = str(place % torch.cuda.device_count())
    command = [*launcher, "-m", "hf_vaswani.cli"] if launcher else [sys.executable, "-m", "hf_vaswani.cli"]
    command += ["train", str(folder / RECIPE), "--resume"]
    with open(folder / LOG, "ab") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # the run saves a checkpoint and ends
            process.wait()
            raise
    if status != 0:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunFailed(f"{lines[-1] if lines else 'no word'} (status {status}; see {folder / LOG})")


def _measure(sweep: Sweep, row: str, seed: int) -> None:
    """Perplexity and BLEU of a finished run on the validation text, written beside it."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    from ..data.dataset import tokenize_pairs
    from ..evaluation import evaluate_model, perplexity
    from ..modeling_vaswani import VaswaniForConditionalGeneration

    folder, config = sweep.folder(row, seed), sweep.config
    model = VaswaniForConditionalGeneration.from_pretrained(folder / MODEL)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
    pairs = validation_pairs(config)
    found = evaluate_model(
        model,
        tokenizer,
        [src for src, _ in pairs],
        [tgt for _, tgt in pairs],
        kinds=("sacrebleu",),
        target_language=config.target_language,
        progress=False,
    )
    (folder / HYPOTHESES).write_text("".join(f"{line}\n" for line in found.hypotheses), encoding="utf-8", newline="\n")
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    measured = Measured(
        row=row,
        seed=seed,
        perplexity=perplexity(model, tokenize_pairs(pairs, tokenizer), DataCollatorForSeq2Seq(tokenizer)),
        bleu=found.scores[0].score,
        bleu_signature=found.scores[0].signature,
        parameters=model.num_parameters(),
        updates=result["updates"],
        epochs=result["epochs"],
        seconds=result["seconds"],
        model=row_changes(row, config.model_config(None)),
    )
    _write(folder / MEASURED, asdict(measured))


def _key(config: TrainingConfig) -> str:
    """The same for recipes that make the same runs: all but where they lie."""
    content = config.to_dict() | {"output": None}
    content["training"] = content["training"] | {"seed": None}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.unfinished")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
