"""A training run for tests that kill it: main([folder, updates, "key=value", ...])."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from accelerate import Accelerator
from conftest import TINY
from test_training import PadTo, copying_pairs

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data import TokenBatchSampler
from hf_vaswani.training import CheckpointFolder, Recipe, leave_processes, train
from hf_vaswani.training.config import CheckpointConfig


def main(arguments: list[str]) -> list:
    folder, updates = Path(arguments[0]), int(arguments[1])
    options = dict(argument.split("=") for argument in arguments[2:])
    kill_at, every = int(options.get("kill_at", 0)), int(options.get("every", 4))
    torch.set_num_threads(1)
    data = copying_pairs(count=41)
    sampler = TokenBatchSampler(data.src_lengths, data.tgt_lengths, 30, 30, seed=7)
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, "dropout": 0.2}))
    plain, calls = model.loss_function, [0]

    def loss_function(**kwargs):
        calls[0] += 1
        if calls[0] == kill_at and int(os.environ.get("RANK", 0)) == int(options.get("rank", 0)):
            os.kill(os.getpid(), signal.SIGKILL if options.get("signal") != "TERM" else signal.SIGTERM)
            time.sleep(float(options.get("after", 0)))
        return plain(**kwargs)

    model.loss_function = loss_function
    if "limit" in options:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(options["limit"]), int(options["limit"])))
    recipe = Recipe(
        updates=updates,
        warmup_updates=9,
        batches_per_update=int(options.get("batches", 1)),
        seed=3,
        precision=options.get("precision"),
    )
    accelerator = Accelerator(cpu=True, mixed_precision=options.get("precision"))
    result = train(
        model, data, sampler, PadTo(), recipe, folder / "metrics.jsonl", accelerator,
        checkpoints=CheckpointFolder(folder / "checkpoints", keep_last=3),
        checkpoint_plan=CheckpointConfig(every_updates=every, keep_last=3, average_last=0),
        resume=True,
    )  # fmt: skip
    outcome = [result.from_update, result.updates, result.ended_by, result.epochs]
    if accelerator.is_main_process:
        print(json.dumps(outcome), flush=True)
    return outcome


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        leave_processes()
