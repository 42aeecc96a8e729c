"""What a training run is told: one YAML file, checked before anything is done.

    output: runs/my_model
    source_language: de
    target_language: en
    data:
      train: [{src: train.de.gz, tgt: train.en.gz}]
      valid: [{src: valid.de, tgt: valid.en}]
    tokenizer: {vocab_size: 10000}
    model: {preset: base}
    training: {updates: 100000}

All that is left out is the paper's base run. Paths are seen from the current folder.
"""

import difflib
import os
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ..configuration_vaswani import VaswaniConfig
from ..data.sources import CorpusSource
from .recipe import Recipe

_TOKENIZER_FIELDS = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "unk_token_id")


# What the loop alone can be told, and what decides it in a whole run.
_ELSEWHERE = {
    "batches_per_update": "`batches.batches_per_update`",
    "average_last": "`checkpoints.average_last`",
    "average_every": "`checkpoints.every_updates`",
}


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the key and the way out."""


@strict
@dataclass
class DataConfig:
    """The text of a run.

    Args:
        train, valid (`list[CorpusSource]`): corpora; several are mixed, each by its `weight`. valid may be empty.
        max_length (`int`): longest side in tokens, end token included; longer pairs are left out and counted.
        max_ratio (`float`, *optional*): largest ratio of the two lengths, in tokens; None: any.
        cache (`str`, *optional*): folder of the encoded text; None: "cache" in the run's folder.
        workers (`int`, *optional*): threads that encode; None: one per core.
    """

    train: list[CorpusSource] = field(default_factory=list)
    valid: list[CorpusSource] = field(default_factory=list)
    max_length: int = 256
    max_ratio: float | int | None = None
    cache: str | None = None
    workers: int | None = None

    def validate_data(self) -> None:
        if not self.train:
            raise ValueError("`train` names no corpus; give at least one, such as {src: a.de, tgt: a.en}.")
        if self.max_length < 1:
            raise ValueError(f"`max_length` must be at least 1, got {self.max_length}.")
        if self.max_ratio is not None and self.max_ratio < 1:
            raise ValueError(f"`max_ratio` must be at least 1, got {self.max_ratio}.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {self.workers}.")


@strict
@dataclass
class TokenizerConfig:
    """Which pieces text is made of.

    Args:
        path (`str`, *optional*): a folder or Hub name to load; None: one is learnt from the training text.
        vocab_size (`int`): pieces to learn, jointly for both languages. normalization (`str`, *optional*): "nfc",
            "nfkc" or None, see `VaswaniTokenizer.train`.
    """

    path: str | None = None
    vocab_size: int = 37_000
    normalization: str | None = None

    def validate_tokenizer(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"`vocab_size` must be at least 1, got {self.vocab_size}.")
        if self.normalization not in (None, "nfc", "nfkc"):
            raise ValueError(f'`normalization` must be "nfc", "nfkc" or null, got {self.normalization!r}.')


@strict
@dataclass
class BatchConfig:
    """How much text an update sees, whatever the number of devices.

    Args:
        src_tokens, tgt_tokens (`int`): budgets of one update, padding included, over all devices.
        max_batch_tokens (`int`, *optional*): what one device can hold at a time, on either side. An update is cut into
            as many batches as this and the number of processes ask for. None: one batch per process.
        batches_per_update (`int`, *optional*): that number, where it is to be the same on every machine.

    Source: Vaswani et al. 2017, section 5.1: about 25,000 source and 25,000 target tokens.
    """

    src_tokens: int = 25_000
    tgt_tokens: int = 25_000
    max_batch_tokens: int | None = None
    batches_per_update: int | None = None

    def validate_batches(self) -> None:
        for name in ("src_tokens", "tgt_tokens", "max_batch_tokens", "batches_per_update"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.max_batch_tokens is not None and self.batches_per_update is not None:
            raise ValueError("`max_batch_tokens` and `batches_per_update` say the same thing twice: give one of them.")

    def count_for(self, process_count: int) -> int:
        """Batches of one update on so many processes."""
        if self.batches_per_update is not None:
            return self.batches_per_update
        most = max(self.src_tokens, self.tgt_tokens)
        needed = 1 if self.max_batch_tokens is None else -(-most // self.max_batch_tokens)
        return -(-needed // process_count) * process_count


@strict
@dataclass
class ValidationConfig:
    """Measuring the model while it is trained.

    Args:
        every_updates (`int`, *optional*): interval; None: with every checkpoint that is due by updates.
        bleu (`bool`): translate the validation text too, besides its perplexity. num_beams (`int`, *optional*): for
            that; None: the model's own search, which is what the command line uses.
        metric (`str`): "perplexity" or "bleu": what "best" means.
        patience (`int`, *optional*): end the run after so many validations in a row without a new best; None: never.
    """

    every_updates: int | None = None
    bleu: bool = True
    num_beams: int | None = None
    metric: str = "perplexity"
    patience: int | None = None

    def validate_validation(self) -> None:
        if self.metric not in ("perplexity", "bleu"):
            raise ValueError(f'`metric` must be "perplexity" or "bleu", got {self.metric!r}.')
        if self.metric == "bleu" and not self.bleu:
            raise ValueError("`metric` is bleu, but `bleu` is false: nothing would be translated.")
        for name in ("every_updates", "num_beams", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")


@strict
@dataclass
class CheckpointConfig:
    """What is kept on disk.

    Args:
        every_updates (`int`), every_minutes (`float`, *optional*): a checkpoint is due at whichever comes first.
        keep_last (`int`): the newest so many are kept, besides the best; all but the newest two keep only weights.
        average_last (`int`): the run's model is the mean of the last so many; 0: the last weights as they are.

    Source: Vaswani et al. 2017, section 6.1: the mean of the last 5 checkpoints, written at 10-minute intervals, about
    1,500 updates of the base model apart.
    """

    every_updates: int = 1500
    every_minutes: float | int | None = None
    keep_last: int = 5
    average_last: int = 5

    def validate_checkpoints(self) -> None:
        for name in ("every_updates", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.every_minutes is not None and not 0 < self.every_minutes < float("inf"):
            raise ValueError(f"`every_minutes` must be a number above 0, got {self.every_minutes}.")
        if not 0 <= self.average_last <= self.keep_last:
            raise ValueError(
                f"`average_last` is {self.average_last}, but only `keep_last` = {self.keep_last} are kept: raise "
                "`keep_last` or lower `average_last`."
            )


@strict
@dataclass
class TrainingConfig:
    """A whole run.

    Args:
        output (`str`): the run's folder. source_language, target_language (`str`, *optional*): codes such as "de"; they
            choose the fields of translation datasets and the tokenisation of BLEU.
        data, tokenizer, batches, training, validation, checkpoints: see each.
        model (`dict`): `preset` and any field of `VaswaniConfig`; sizes and ids of the vocabulary follow the tokenizer.
        start_from (`str`, *optional*): a folder or Hub name whose weights, configuration and tokenizer the run begins
            with, to train a model further on other text.
    """

    output: str
    data: DataConfig
    source_language: str | None = None
    target_language: str | None = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: dict = field(default_factory=dict)
    start_from: str | None = None
    batches: BatchConfig = field(default_factory=BatchConfig)
    training: Recipe = field(default_factory=Recipe)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate_run(self) -> None:
        if not self.output.strip():
            raise ValueError("`output` is blank: name the run's folder.")
        for name, place in _ELSEWHERE.items():
            if getattr(self.training, name) != getattr(Recipe(), name):
                raise ValueError(f"`training.{name}` is not set here: the recipe of a whole run has {place}.")

    def validate_model(self) -> None:
        if self.start_from is not None and self.model:
            raise ValueError("`start_from` brings its own model, so `model` must be left out.")
        taken = sorted(set(self.model) & {"vocab_size", "source_vocab_size", *_TOKENIZER_FIELDS})
        if taken:
            raise ValueError(f"`model` sets {', '.join(taken)}, which the tokenizer decides: leave it out.")
        self.model_config(None)

    def model_config(self, tokenizer: Any) -> VaswaniConfig:
        """The model's configuration for a tokenizer; without one, with the default vocabulary."""
        chosen = {k: v for k, v in self.model.items() if k != "preset"}
        if tokenizer is not None:
            chosen["vocab_size"] = len(tokenizer)
            chosen["decoder_start_token_id"] = tokenizer.bos_token_id
            for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
                chosen[name] = getattr(tokenizer, name)
        return VaswaniConfig.from_preset(self.model.get("preset", "base"), **chosen)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, the way the YAML file has them."""
        return asdict(self)


class _OnceLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice in a mapping is an error, not a change that nobody sees."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = set()
        for key, _ in getattr(node, "value", []):
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in found:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"`{key.value}` stands twice in one mapping", key.start_mark
                    )
                found.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a recipe.

    Args:
        path: a YAML file. overrides (`Sequence[str]`): changes such as "training.updates=500" or
            "data.train.0.src=other.de"; the value is YAML.

    Returns:
        `TrainingConfig`.

    Raises:
        ConfigError: the file is missing or no YAML mapping, a key is unknown, or a value has the wrong type or makes no
            sense; the key is named.
    """
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_OnceLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start + 1} is not UTF-8; a recipe is a YAML text.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys such as `output` and `data`.")
    for override in overrides:
        _override(raw, override)
    try:
        return _build(TrainingConfig, raw, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _override(raw: dict, text: str) -> None:
    """Put one `section.key=value` into the raw mapping."""
    place, found, value = text.partition("=")
    keys = place.split(".")
    if not found or not all(keys):
        raise ConfigError(f"{text!r} is no change of a recipe: write it as section.key=value.")
    here: Any = raw
    for depth, key in enumerate(keys):
        if isinstance(here, list):
            if not key.isdecimal() or int(key) >= len(here):
                raise ConfigError(f"{text!r}: {'.'.join(keys[:depth])} has {len(here)} entries, and no {key!r}.")
            here_key: Any = int(key)
        elif isinstance(here, dict):
            here_key = key
        else:
            raise ConfigError(f"{text!r}: {'.'.join(keys[:depth])} is a single value, so it has no {key!r}.")
        if depth == len(keys) - 1:
            try:
                here[here_key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ConfigError(f"{text!r}: the value is no valid YAML.") from error
        elif isinstance(here, dict):
            here[here_key] = here.get(here_key) or {}
            here = here[here_key]
        else:
            here = here[here_key]


def _build(kind: Any, raw: Any, place: str) -> Any:
    """Make a dataclass of a mapping, and what it holds with it."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{place or 'the recipe'}: a mapping is needed, got {raw!r}.")
    known, hints = [f.name for f in fields(kind)], get_type_hints(kind)
    values = {}
    for key, value in raw.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}."
            raise ConfigError(f"{where}: unknown key; {hint}")
        values[key] = _value(hints[key], value, where)
    try:
        return kind(**values)
    except StrictDataclassError as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{place + ': ' if place else ''}{' '.join(str(cause).split())}") from error
    except (TypeError, ValueError) as error:
        reason = str(error).replace(f"{kind.__name__}.__init__() ", "")
        raise ConfigError(f"{place + ': ' if place else ''}{reason}") from error


def _value(hint: Any, value: Any, place: str) -> Any:
    """A value as its field wants it: nested dataclasses built, and numbers that YAML takes for text (1e-3) read."""
    if is_dataclass(hint):
        return _build(hint, {} if value is None else value, place)
    if get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
        if not isinstance(value, list):
            raise ConfigError(f"{place}: a list is needed, got {value!r}.")
        return [_build(get_args(hint)[0], one, f"{place}.{number}") for number, one in enumerate(value)]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if float in options and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
