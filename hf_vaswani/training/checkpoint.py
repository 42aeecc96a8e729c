"""Checkpoints on disk, each written whole or not at all.

    checkpoints/update-00001500/    a model that `from_pretrained` loads, with its tokenizer, and beside it
        progress.json               where the run stood; names every file of the folder with its size
        optimizer.safetensors       Adam's moments by parameter name (`sharded/` instead under FSDP and DeepSpeed)

A folder is filled under another name and renamed at the end, so one that has its name is whole.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file

PROGRESS, OPTIMIZER, SHARDED = "progress.json", "optimizer.safetensors", "sharded"
_NAME = re.compile(r"update-(\d{8,})")
RESUMABLE_KEPT = 2  # older checkpoints are kept for their weights alone


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another run; the message names it and the way out."""


@dataclass
class Progress:
    """All that a run has to remember, besides weights and moments.

    Dropout and the order of batches are functions of seed, epoch and batch number, so no random state is among it.

    Args:
        update (`int`): optimizer updates done. epoch (`int`), batch (`int`): the next batch, both from 0.
        tgt_tokens (`int`): target tokens trained on. skipped_count, skipped_in_a_row (`int`): updates without a finite
            gradient. seconds (`float`): of training, over all starts.
        best_value (`float`, *optional*), best_update (`int`, *optional*), without_best (`int`): of the validations.
        run (`dict`): what has to be the same on resuming. setting (`dict`): what may differ, and is said.
    """

    update: int = 0
    epoch: int = 0
    batch: int = 0
    tgt_tokens: int = 0
    skipped_count: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    best_value: float | None = None
    best_update: int | None = None
    without_best: int = 0
    run: dict[str, Any] | None = None
    setting: dict[str, Any] | None = None


def is_sharded(accelerator: Any) -> bool:
    """Whether each process holds only a part of the weights."""
    from accelerate.utils import DistributedType

    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def plain_model(accelerator: Any, model: Any) -> Any:
    """The model without its wrappers; of a sharded one a whole copy, on the main process (None elsewhere).

    Every process must call it.
    """
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not is_sharded(accelerator):
        return inner
    weights = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    copy = type(inner)(inner.config)
    copy.load_state_dict(weights)
    copy.generation_config = inner.generation_config
    return copy.to(accelerator.device)


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        root: the folder that holds them; made when the first is written.
        keep_last (`int`): the newest so many that were due stay, and the best.
        tokenizer (*optional*): saved with each, so that each can translate.
    """

    def __init__(self, root: str | os.PathLike[str], keep_last: int = 5, tokenizer: Any = None):
        if keep_last < 1:
            raise ValueError(f"`keep_last` must be at least 1, got {keep_last}.")
        self.root, self.keep_last, self.tokenizer = Path(root), keep_last, tokenizer

    def all(self) -> list[tuple[int, Path]]:
        """Every whole checkpoint, as (update, folder), oldest first."""
        if not self.root.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.root.iterdir() if path.is_dir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def due(self) -> list[tuple[int, Path]]:
        """Those whose time had come, an even row, and the newest of all where the run ended with it.

        One that was written for its score alone is not among them, nor one with which the run only paused: the mean
        of the last few does not depend on interruptions.
        """
        found = self.all()
        return [(update, path) for update, path in found if _is_due(path, is_newest=path == found[-1][1])]

    def resumable(self) -> Path | None:
        """The newest checkpoint that a run can go on from."""
        folders = [path for _, path in self.all() if (path / OPTIMIZER).is_file() or (path / SHARDED).is_dir()]
        return folders[-1] if folders else None

    def save(
        self,
        progress: Progress,
        model: Any,
        optimizer: Any,
        accelerator: Any,
        is_due: bool = True,
        is_end: bool = False,
    ) -> Path | None:
        """Write one checkpoint, then remove those that are no longer kept. Every process must call it.

        Args:
            progress (`Progress`): where the run stands. model, optimizer: as `Accelerator.prepare` gave them.
            is_due (`bool`): False for one that is only written because it is the best so far, or at a run's end.
            is_end (`bool`): the run, or this start of it, ends here.

        Returns:
            `Path`, or None where it could not be written (full disk, no permission): that is said on standard error,
            nothing of it is left, and the checkpoints before it are untouched.
        """
        final = self.root / f"update-{progress.update:08d}"
        is_there = final.exists()
        accelerator.wait_for_everyone()  # all have looked before the first one writes
        if is_there:
            if is_end and accelerator.is_main_process:
                _mark_as_end(final)
            return final
        whole = plain_model(accelerator, model)
        partial = final.with_name(f".{final.name}.unfinished")
        fault: Exception | None = None
        try:
            if accelerator.is_main_process:
                self.clean()
                partial.mkdir(parents=True)
        except OSError as error:
            fault = error
        if is_sharded(accelerator):
            accelerator.wait_for_everyone()
            if partial.is_dir():
                accelerator.save_state(str(partial / SHARDED))
            accelerator.wait_for_everyone()
        if accelerator.is_main_process and fault is None:
            try:
                with _without_bars():
                    whole.save_pretrained(partial)
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(partial)
                if not is_sharded(accelerator):
                    save_file(_moments(whole, optimizer), partial / OPTIMIZER)
                self._seal(partial, final, progress, accelerator, {"is_due": is_due, "is_end": is_end})
            except (OSError, SafetensorError) as error:
                fault = error
        if fault is not None:
            shutil.rmtree(partial, ignore_errors=True)
            print(
                f"The checkpoint of update {progress.update} could not be written to {self.root}: {fault}. Earlier "
                "ones are untouched, and training goes on; make room or give permission before the next is due.",
                file=sys.stderr,
                flush=True,
            )
        elif accelerator.is_main_process:
            try:
                self._prune(progress)
            except OSError as error:
                print(
                    f"A checkpoint that is no longer kept could not be removed: {error}.", file=sys.stderr, flush=True
                )
        accelerator.wait_for_everyone()
        return final if final.is_dir() else None

    def _seal(self, partial: Path, final: Path, progress: Progress, accelerator: Any, reasons: dict[str, bool]) -> None:
        """Bring everything to the disk, and only then give the folder its name."""
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        state = asdict(progress) | {
            **reasons,
            "files": {str(p.relative_to(partial)): p.stat().st_size for p in paths},
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler.state_dict()
        (partial / PROGRESS).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        for path in [*paths, partial / PROGRESS]:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        partial.rename(final)
        _sync_folder(self.root)

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        if self.root.is_dir():
            for path in self.root.glob(".update-*.unfinished"):
                shutil.rmtree(path)

    def _prune(self, progress: Progress) -> None:
        folders, due = self.all(), self.due()
        kept = {update for update, _ in [*due[-self.keep_last :], *folders[-RESUMABLE_KEPT:]]} | {progress.best_update}
        for update, path in folders:
            if update not in kept:
                # Renamed first: a folder that is half removed must not look like a checkpoint.
                doomed = path.with_name(f".{path.name}.unfinished")
                path.rename(doomed)
                shutil.rmtree(doomed)
        for _, path in folders[:-RESUMABLE_KEPT]:
            if path.is_dir():
                (path / OPTIMIZER).unlink(missing_ok=True)
                shutil.rmtree(path / SHARDED, ignore_errors=True)

    def load(self, folder: Path, model: Any, optimizer: Any, accelerator: Any) -> Progress:
        """Put weights, moments and progress of a checkpoint back. Every process must call it.

        Args:
            folder (`Path`): a checkpoint. model, optimizer: as `Accelerator.prepare` gave them.

        Returns:
            `Progress`.

        Raises:
            CheckpointError: a file is missing, cut short or does not fit the model.
        """
        state = read_progress(folder)
        for name, size in state["files"].items():
            path = folder / name
            if (name == OPTIMIZER or not name.startswith(SHARDED)) and not path.is_file():
                raise CheckpointError(f"{path} is missing. Remove {folder} to resume from the checkpoint before it.")
            if path.is_file() and path.stat().st_size != size:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes instead of {size}. Remove {folder} to resume from the "
                    "checkpoint before it."
                )
        try:
            if is_sharded(accelerator):
                if not (folder / SHARDED).is_dir():
                    raise CheckpointError(
                        f"{folder} was written without sharding; to go on under FSDP or DeepSpeed, start a new run "
                        "from its weights."
                    )
                accelerator.load_state(str(folder / SHARDED))
            else:
                if not (folder / OPTIMIZER).is_file():
                    raise CheckpointError(f"{folder} was written by a sharded run: resume it under the same launcher.")
                inner = accelerator.unwrap_model(model, keep_torch_compile=False)
                load_model(inner, folder / "model.safetensors")
                _restore_moments(inner, optimizer, load_file(folder / OPTIMIZER))
        except (SafetensorError, RuntimeError, KeyError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{folder} does not fit this model or is damaged: {reason}") from error
        if accelerator.scaler is not None and state.get("scaler"):
            accelerator.scaler.load_state_dict(state["scaler"])
        return Progress(**{f.name: state[f.name] for f in fields(Progress)})


def read_progress(folder: Path) -> dict[str, Any]:
    """The progress file of a checkpoint.

    Raises:
        CheckpointError: it is missing or no JSON of this kind.
    """
    try:
        state = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        missing = {"files", *(f.name for f in fields(Progress))} - set(state if isinstance(state, dict) else {})
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint: its {PROGRESS} cannot be read ({error}). Remove it to resume from the one "
            "before it."
        ) from error
    if missing:
        raise CheckpointError(
            f"{folder / PROGRESS} lacks {', '.join(sorted(missing))}: it is no checkpoint of ours. Remove the folder "
            "to resume from the checkpoint before it."
        )
    return state


def _is_due(folder: Path, is_newest: bool) -> bool:
    try:
        state = read_progress(folder)
    except CheckpointError:
        return True  # whoever damaged it will be told when it is used
    return bool(state.get("is_due", True) or (is_newest and state.get("is_end", False)))


def _mark_as_end(folder: Path) -> None:
    """Note that the run ended with a checkpoint that was written for its score."""
    state = read_progress(folder)
    if not (state.get("is_due", True) or state.get("is_end", False)):
        partial = folder / f".{PROGRESS}.unfinished"
        try:
            partial.write_text(json.dumps(state | {"is_end": True}, indent=2) + "\n", encoding="utf-8")
            partial.replace(folder / PROGRESS)
        except OSError as error:
            print(f"{folder} is left out of the mean: {error}.", file=sys.stderr, flush=True)
            partial.unlink(missing_ok=True)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the library's own bars out of the run's."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The optimizer's state with the parameters' names, which outlive any order of them."""
    state: Mapping[Any, dict[str, torch.Tensor]] = _inner_optimizer(optimizer).state
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in state.get(parameter, {}).items()
    }


def _restore_moments(model: Any, optimizer: Any, saved: dict[str, torch.Tensor]) -> None:
    inner = _inner_optimizer(optimizer)
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for place, value in saved.items():
        name, key = place.rsplit("/", 1)
        by_name.setdefault(name, {})[key] = value
    parameters = dict(model.named_parameters())
    unknown = sorted(set(by_name) - set(parameters))
    if unknown:
        raise KeyError(f"the optimizer's state names {unknown[0]}, which this model has not")
    for name, values in by_name.items():
        parameter = parameters[name]
        # Adam counts steps in a scalar that stays in main memory.
        inner.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in values.items()}


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
