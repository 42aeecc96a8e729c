"""A whole run from its recipe: tokenizer, text, model, training, and the model that comes of it."""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ..data.batches import TokenBatchSampler
from ..data.corpus import CorpusError, Pair
from ..data.preparation import prepare_corpus
from ..data.prepared import PreparedCorpus
from ..data.sources import CorpusSource, content_key, read_source
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..sharing.folders import whole_folder
from ..tokenization_vaswani import VaswaniTokenizer
from .averaging import AveragingError, average_weights
from .checkpoint import CheckpointFolder
from .config import ConfigError, TrainingConfig
from .loop import train
from .recipe import Recipe, make_accelerator
from .result import TrainingResult
from .validation import Validation

METRICS, CONFIG, RESULT, MODEL, CHECKPOINTS = "metrics.jsonl", "config.json", "result.json", "model", "checkpoints"
# What lies beside a model in the checkpoints of this package and of transformers' trainer, and is not of the model.
_OF_TRAINING = (".safetensors", ".pt", ".pth", ".bin", "progress.json", "trainer_state.json")


@dataclass
class Run:
    """Everything that a recipe asks for, ready to be trained.

    Args:
        config (`TrainingConfig`): what the file says. recipe (`Recipe`): what the loop is told, for this number of
            processes. accelerator (`accelerate.Accelerator`): devices.
        tokenizer, model, corpus (`PreparedCorpus`), sampler (`TokenBatchSampler`), collator: the parts.
        checkpoints (`CheckpointFolder`): of the output folder. validation (`Validation`, *optional*).
    """

    config: TrainingConfig
    recipe: Recipe
    accelerator: Any
    tokenizer: Any
    model: Any
    corpus: PreparedCorpus
    sampler: TokenBatchSampler
    collator: Any
    checkpoints: CheckpointFolder
    validation: Validation | None

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.config.output)

    def train(self, resume: bool = False) -> TrainingResult:
        """Train, and write the run's model: the mean of its last checkpoints."""
        config, accelerator = self.config, self.accelerator
        try:
            result = train(
                self.model,
                self.corpus,
                self.sampler,
                self.collator,
                self.recipe,
                self.output / METRICS,
                accelerator,
                self.checkpoints,
                config.checkpoints,
                self.validation,
                config.validation,
                resume,
                self._begin,
            )
        except OSError as error:
            if not str(error.filename or "").startswith(str(self.output)):
                raise
            raise ConfigError(f"{error.filename} cannot be written ({error.strerror}).") from error
        finally:
            # Not `end_training`, which would also part the processes, with the model still to be written.
            for tracker in accelerator.trackers:
                tracker.finish()
        if result.ended_by != "signal" and accelerator.is_main_process:
            try:
                self._write_model(result)
            except OSError as error:
                raise ConfigError(
                    f"{self.output / MODEL} cannot be written ({error.strerror or error}). The checkpoints are whole: "
                    "make room or give permission, then resume, which writes it."
                ) from error
        accelerator.wait_for_everyone()
        return result

    def _begin(self) -> None:
        """Note what is done now; not before it is known that the folder is of this run."""
        config, accelerator = self.config, self.accelerator
        if accelerator.is_main_process:
            _write_json(self.output / CONFIG, config.to_dict())
        if config.training.log_with:
            accelerator.init_trackers(self.output.name, config=_flat(config.to_dict()))

    def _write_model(self, result: TrainingResult) -> None:
        wanted, found = self.config.checkpoints.average_last, self.checkpoints.due()
        if not found:
            raise ConfigError(f"{self.checkpoints.root} holds no checkpoint: none could be written. See above.")
        if wanted > len(found):
            # Not an error here: a run that was shorter than planned has what it has, and says so.
            say(
                self.accelerator,
                f"The mean is of {len(found)} checkpoint(s): no more are there, {wanted} were wanted.",
            )
        chosen = [path for _, path in found[-max(1, wanted) :]]
        result.averaged_count = len(chosen)
        average_folder(chosen, self.output / MODEL)
        _write_json(self.output / RESULT, asdict(result) | {"averaged": [path.name for path in chosen]})


def average_folder(folders: list[Path], output: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model folder with the mean of several checkpoints' weights; the rest of the model is that of the last.

    Args:
        folders (`list[Path]`): model folders. output (`Path`): the new one.
        dtype (`torch.dtype`, *optional*): how the weights are stored; None: as in the checkpoints. The configuration,
            which decides what they are loaded as, stays as it was: half the room on disk, and full precision in use.
    """
    from safetensors.torch import save_file

    weights = average_weights(folders)
    if dtype is not None:
        weights = {name: value.to(dtype) for name, value in weights.items()}
    with whole_folder(output) as partial:
        try:
            for path in folders[-1].iterdir():
                if path.is_file() and path.suffix not in _OF_TRAINING and path.name not in _OF_TRAINING:
                    shutil.copy(path, partial / path.name)
        except FileNotFoundError as error:
            raise AveragingError(
                f"{folders[-1]} was removed while it was read: its run goes on. Ask again, or keep more of them with "
                "`checkpoints.keep_last`."
            ) from error
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})


def prepare_run(config: TrainingConfig, resume: bool = False, overwrite: bool = False, dry_run: bool = False) -> Run:
    """Do all that comes before the first update.

    Args:
        config (`TrainingConfig`): the recipe. resume (`bool`): the output folder may hold an unfinished run, which is
            gone on with. overwrite (`bool`): an earlier run in that folder is removed first. dry_run (`bool`): the run
            will not be started, so the folder may be anything; only the encoded text and the tokenizer are kept.

    Returns:
        `Run`.

    Raises:
        ConfigError: the output folder is taken or cannot be written to, or parts of the recipe do not fit together.
        CorpusError: text that cannot be used.
    """
    accelerator = _accelerator(config)
    output = Path(config.output)
    checkpoints = CheckpointFolder(output / CHECKPOINTS, config.checkpoints.keep_last)
    if not dry_run:
        _claim(output, checkpoints, accelerator, resume, overwrite)
    tokenizer = load_tokenizer(config)
    checkpoints.tokenizer = tokenizer
    cache = cache_folder(config)
    try:
        corpus = prepare_corpus(
            config.data.train,
            tokenizer,
            cache,
            source_language=config.source_language,
            target_language=config.target_language,
            max_length=config.data.max_length,
            max_ratio=config.data.max_ratio,
            workers=config.data.workers,
        )
    except CorpusError:
        raise
    except ValueError as error:
        raise ConfigError(f"tokenizer: {error}") from error
    share = config.batches.count_for(accelerator.num_processes)
    before = _batches_before(checkpoints) if resume else None
    if before not in (None, share) and config.batches.batches_per_update is None:
        say(accelerator, f"An update stays {before} batches, as this run began; a new one would take {share} here.")
        share = before
    sampler = TokenBatchSampler(
        corpus.src_lengths,
        corpus.tgt_lengths,
        max(1, config.batches.src_tokens // share),
        max(1, config.batches.tgt_tokens // share),
        seed=config.training.seed,
        too_long="drop",
        weights=corpus.weights,
    )
    if sampler.dropped_count:
        say(accelerator, f"{sampler.dropped_count:,} pairs do not fit into a batch and are left out.")
    if sampler.dropped_count == len(corpus):
        raise ConfigError(
            f"batches: no pair fits into a batch of {sampler.src_tokens} source and {sampler.tgt_tokens} target "
            "tokens: raise `src_tokens` and `tgt_tokens`, or cut an update into fewer batches."
        )
    from transformers import DataCollatorForSeq2Seq

    collator = DataCollatorForSeq2Seq(tokenizer)
    validation = None
    if config.data.valid:
        pairs = _read_all(config, config.data.valid)
        try:
            validation = Validation(pairs, tokenizer, collator, config.validation, config.target_language)
        except ValueError as error:
            raise ConfigError(f"validation: {error}") from error
    model = make_model(config, tokenizer)
    if validation is not None and model.config.position_encoding == "learned":
        longest, room = validation.longest, model.config.max_position_embeddings
        if longest > room:
            raise ConfigError(
                f"validation: its longest side has {longest} tokens, but the model has {room} learned positions: raise "
                "`model.max_position_embeddings`, or leave that pair out."
            )
    recipe = replace(config.training, batches_per_update=share)
    return Run(config, recipe, accelerator, tokenizer, model, corpus, sampler, collator, checkpoints, validation)


def _accelerator(config: TrainingConfig) -> Any:
    try:
        accelerator = make_accelerator(config.training, config.output)
    except ValueError as error:
        raise ConfigError(f"training: {error}") from error
    # Accelerate leaves out in silence what is not installed.
    wanted, found = config.training.log_with or [], {str(getattr(one, "name", one)) for one in accelerator.log_with}
    missing = [name for name in wanted if name != "all" and name not in {one.rsplit(".")[-1].lower() for one in found}]
    if missing:
        raise ConfigError(f"training.log_with: {', '.join(missing)} is not installed here (pip install {missing[0]}).")
    return accelerator


def make_model(config: TrainingConfig, tokenizer: Any) -> VaswaniForConditionalGeneration:
    """The model of a recipe with the weights that its seed gives, or those of `start_from`."""
    if config.start_from is None:
        torch.manual_seed(config.training.seed)
        model = VaswaniForConditionalGeneration(config.model_config(tokenizer))
    else:
        try:
            model = VaswaniForConditionalGeneration.from_pretrained(config.start_from, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"start_from: {config.start_from} holds no model that can be loaded: {_one_line(error)}"
            ) from error
        if model.config.vocab_size != len(tokenizer):
            raise ConfigError(
                f"{config.start_from} has {model.config.vocab_size} pieces and the tokenizer {len(tokenizer)}: they do "
                "not belong together. Leave `tokenizer` out to take the model's own."
            )
    longest = config.data.max_length
    if model.config.position_encoding == "learned" and model.config.max_position_embeddings < longest:
        raise ConfigError(
            f"`data.max_length` is {longest}, but the model has {model.config.max_position_embeddings} learned "
            "positions: lower the one or raise `model.max_position_embeddings`."
        )
    return model


def load_tokenizer(config: TrainingConfig) -> Any:
    """The tokenizer of a recipe: the one it names, or one learnt from its training text and kept in the cache.

    Of several processes the first learns it; the others wait at a lock, for as long as that takes.
    """
    wanted = config.tokenizer
    path = wanted.path or config.start_from
    if path is not None:
        from transformers import AutoTokenizer

        key = "tokenizer.path" if wanted.path else "start_from"
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: {path} holds no tokenizer that can be loaded: {_one_line(error)}") from error
        for name in ("pad_token", "eos_token", "bos_token"):
            if getattr(tokenizer, name) is None and (name != "bos_token" or config.start_from is None):
                raise ConfigError(f"{key}: the tokenizer in {path} has no `{name}`, which training needs.")
        return tokenizer
    cache = cache_folder(config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "tokenizer.lock").touch()
    except OSError as error:
        raise ConfigError(f"{cache} cannot be written to ({error.strerror or error}).") from error
    with FileLock(cache / "tokenizer.lock"):
        languages = (config.source_language, config.target_language)
        contents = [content_key(source, *languages) for source in config.data.train]
        settings = json.dumps([contents, asdict(wanted)], sort_keys=True)
        folder = cache / f"tokenizer-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
        if not folder.is_dir():
            pairs = (read_source(source, *languages) for source in config.data.train)
            texts = (text for pair in chain.from_iterable(pairs) for text in pair)
            print(f"Learning {wanted.vocab_size:,} subword pieces …", file=sys.stderr, flush=True)
            try:
                learnt = VaswaniTokenizer.train(
                    texts, vocab_size=wanted.vocab_size, normalization=wanted.normalization, show_progress=False
                )
            except CorpusError:
                raise
            except ValueError as error:
                raise ConfigError(f"tokenizer: {error}") from error
            try:
                with whole_folder(folder) as partial:
                    learnt.save_pretrained(partial)
            except OSError as error:
                raise ConfigError(f"{cache} cannot be written to ({error.strerror or error}).") from error
        return VaswaniTokenizer.from_pretrained(folder)


def cache_folder(config: TrainingConfig) -> Path:
    """Where a recipe keeps its tokenizer and its encoded text."""
    return Path(config.data.cache) if config.data.cache else Path(config.output) / "cache"


def say(accelerator: Any, text: str) -> None:
    """Tell how far a run is, on standard error, once for all processes."""
    if accelerator.is_main_process:
        print(text, file=sys.stderr, flush=True)


def _read_all(config: TrainingConfig, sources: list[CorpusSource]) -> list[Pair]:
    return [p for source in sources for p in read_source(source, config.source_language, config.target_language)]


def _batches_before(checkpoints: CheckpointFolder) -> int | None:
    """Batches of an update, as the run began with them, so that it can go on with another number of processes."""
    from .checkpoint import read_progress

    folder = checkpoints.resumable()
    return None if folder is None else (read_progress(folder)["run"] or {}).get("batches_per_update")


def _claim(output: Path, checkpoints: CheckpointFolder, accelerator: Any, resume: bool, overwrite: bool) -> None:
    """See that the output folder is free, or an earlier run of ours that may be gone on with or replaced."""
    problem, is_run = None, _is_of_a_run(output) or (bool(checkpoints.all()) and not (output / CONFIG).exists())
    if output.exists() and not output.is_dir():
        problem = f"{output} is a file: name another output folder."
    elif (output / CONFIG).exists() and not is_run:
        problem = f"{output} holds something else ({CONFIG} is not of a run): name another output folder."
    elif (output / MODEL).exists() and not is_run:
        problem = f"{output / MODEL} is there already and not of a run: name another output folder."
    elif (output / MODEL).exists() and not checkpoints.all() and not overwrite:
        problem = (
            f"{output} holds the model of a finished run, but no checkpoint to go on from: replace it (--overwrite), "
            "or name another output folder."
        )
    elif checkpoints.all() and not resume and not overwrite:
        problem = (
            f"{output} holds a run already, up to update {checkpoints.all()[-1][0]:,}: go on with it (--resume), "
            "replace it (--overwrite), or name another output folder."
        )
    accelerator.wait_for_everyone()  # all have looked before the first one changes anything
    if problem:
        raise ConfigError(problem)
    if accelerator.is_main_process:
        try:
            output.mkdir(parents=True, exist_ok=True)
            probe = output / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"{output} cannot be written to ({error.strerror or error}).") from error
        if overwrite and not resume:
            # Only what a run writes: the folder may hold other things too.
            for _, path in checkpoints.all():
                shutil.rmtree(path)
            if (output / MODEL).exists():
                shutil.rmtree((output / MODEL).resolve())
            (output / RESULT).unlink(missing_ok=True)
        checkpoints.clean()
    accelerator.wait_for_everyone()


def _is_of_a_run(output: Path) -> bool:
    try:
        found = json.loads((output / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"output", "data", "checkpoints"} <= set(found)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.unfinished")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level, which is all that trackers can show."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = inner if isinstance(inner, (int, float, str, bool)) else str(inner)
    return flat
