"""One epoch of Multi30k, English to German, tiny size: our training loop and transformers' Seq2SeqTrainer on MarianMT.

    python benchmarks/epoch.py

Both have the recipe examples/recipes/multi30k_en_de_tiny.yaml: its tokenizer, size, initial weights, dropout, Adam and
rates. Ours takes batches of 8,192 tokens from `TokenBatchSampler`; the trainer has
`train_sampling_strategy="group_by_length"` and as many pairs a batch as give it the same mean of target tokens an
update. MarianMT is trained with its own loss, which has no label smoothing; --smooth asks the trainer for the recipe's,
which makes it slower. Text is encoded and models are made before the clock starts; neither validates or saves.

The text is ../shared/data/multi30k beside the repository, or what --data names: a folder with `raw/train.en.gz`,
`raw/train.de.gz` and the codes `bpe10k.en-de.code`.
"""

import argparse
import contextlib
import gc
import gzip
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import Timing, alternate, common_arguments, emit, machine, parse, ratio, report
from peers import marian_of
from torch.optim.lr_scheduler import LambdaLR
from train_step import freeze_positions
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.utils import logging

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data import TokenBatchSampler, prepare_corpus
from hf_vaswani.data.sources import CorpusSource
from hf_vaswani.training import train
from hf_vaswani.training.config import load_config
from hf_vaswani.training.recipe import Recipe
from hf_vaswani.training.schedule import learning_rate, paper_optimizer, set_learning_rate

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "recipes" / "multi30k_en_de_tiny.yaml"
OURS, PEER = "ours", "Seq2SeqTrainer on MarianMT"


class Examples(torch.utils.data.Dataset):
    """Encoded pairs in memory, for both sides alike."""

    def __init__(self, pairs: list[dict[str, list[int]]]):
        self.pairs = pairs
        self.src_lengths, self.tgt_lengths = (
            torch.tensor([len(one[name]) for one in pairs], dtype=torch.int32) for name in ("input_ids", "labels")
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return dict(self.pairs[index])


class CountingCollator:
    """A collator that notes how many places its batches have, and how many hold a token."""

    def __init__(self, collator: Callable[[list[Any]], Any]):
        self.collator = collator
        self.clear()

    def clear(self) -> None:
        self.batches = self.src = self.tgt = self.places = 0

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collator(examples)
        self.batches += 1
        self.src += sum(len(one["input_ids"]) for one in examples)
        self.tgt += sum(len(one["labels"]) for one in examples)
        self.places += batch["input_ids"].numel() + batch["labels"].numel()
        return batch

    def figures(self) -> dict[str, float]:
        return {
            "updates": self.batches,
            "target_tokens": self.tgt,
            "target_tokens_an_update": self.tgt / max(1, self.batches),
            "padding": 1 - (self.src + self.tgt) / max(1, self.places),
        }


# --------------------------------------------------------------------------- text
def encode(config: Any, data: Path, work: Path, pair_count: int | None) -> tuple[Any, list[dict[str, list[int]]]]:
    """The recipe's tokenizer and the encoded pairs, the first `pair_count` of them.

    Args:
        config (`TrainingConfig`): the recipe. data (`Path`): folder of the text.
        work (`Path`): for tokenizer and cache.
        pair_count (`int`, *optional*): None: all.
    """
    files = []
    for end in ("en", "de"):
        whole, cut = data / "raw" / f"train.{end}.gz", work / f"train.{end}"
        with gzip.open(whole, "rt", encoding="utf-8", newline="\n") as lines:
            cut.write_text("".join(line for n, line in enumerate(lines) if pair_count is None or n < pair_count),
                           encoding="utf-8", newline="\n")  # fmt: skip
        files.append(cut)
    script, codes = ROOT / "examples" / "subword_nmt_tokenizer.py", data / "bpe10k.en-de.code"
    arguments = [sys.executable, script, codes, *files, work / "tokenizer", "--source-language", "en"]
    done = subprocess.run(
        [*map(str, arguments), "--target-language", "de", "--lowercase"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"The tokenizer could not be made:\n{done.stderr}")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    corpus = prepare_corpus(
        [CorpusSource(src=str(files[0]), tgt=str(files[1]))], tokenizer, work / "cache",
        source_language=config.source_language, target_language=config.target_language,
        max_length=config.data.max_length, max_ratio=config.data.max_ratio,
    )  # fmt: skip
    return tokenizer, [corpus[index] for index in range(len(corpus))]


# --------------------------------------------------------------------------- the two
def make_trainer(
    model: Any, examples: Examples, collator: Any, recipe: Recipe, pairs: int, smoothing: float, tokenizer: Any
) -> Seq2SeqTrainer:
    """The library's trainer with what it can have of the recipe, and no log, validation or checkpoint.

    Args:
        model (`MarianMTModel`): is trained in place. examples (`Examples`): the text. collator: pads.
        recipe (`Recipe`): rates and seed. pairs (`int`): of a batch. smoothing (`float`): of labels, by the trainer.
        tokenizer: tells it which field's length to group by.
    """
    optimizer = paper_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    set_learning_rate(optimizer, 1.0)
    d_model = model.config.d_model
    rates = LambdaLR(optimizer, lambda n: learning_rate(n + 1, d_model, recipe.warmup_updates, recipe.rate_factor))
    arguments = Seq2SeqTrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        num_train_epochs=1,
        per_device_train_batch_size=pairs,
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=smoothing,
        max_grad_norm=0.0,
        use_cpu=not torch.cuda.is_available(),
        seed=recipe.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Seq2SeqTrainer(
        model, arguments, data_collator=collator, train_dataset=examples, processing_class=tokenizer,
        optimizers=(optimizer, rates),
    )  # fmt: skip


def measure(config: Any, tokenizer: Any, pairs: list[dict[str, list[int]]], args: argparse.Namespace) -> dict[str, Any]:
    """Time both, in turn, each from the same initial weights.

    Args:
        config (`TrainingConfig`): the recipe. tokenizer: for padding. pairs: encoded.
        args (`Namespace`): --repeats, --smooth, --quick, --tokens.

    Returns:
        `dict`: "systems" (seconds, target tokens/s, padding, updates by name), "ratio".
    """
    recipe = config.training
    torch.manual_seed(recipe.seed)
    # The biases that MarianMT always has in attention, so that both train as many weights.
    fields = {"sinusoid_layout": "halves", "layer_norm_eps": 1e-5, "attention_bias": True}
    initial = VaswaniForConditionalGeneration(
        VaswaniConfig.from_dict({**config.model_config(tokenizer).to_dict(), **fields})
    )
    smoothing = initial.config.label_smoothing if args.smooth else 0.0
    examples = Examples(pairs)
    sampler = TokenBatchSampler(examples.src_lengths, examples.tgt_lengths, args.tokens, args.tokens, seed=recipe.seed)
    batch_size = max(1, round(len(pairs) / len(sampler.plan(0))))
    collators = {name: CountingCollator(DataCollatorForSeq2Seq(tokenizer)) for name in (OURS, PEER)}

    rounds: dict[str, list[float]] = {OURS: [], PEER: []}

    def run_ours() -> float:
        collators[OURS].clear()
        model = VaswaniForConditionalGeneration(initial.config)
        model.load_state_dict(initial.state_dict())
        one_epoch = replace(recipe, updates=len(sampler.plan(0)))
        start = time.perf_counter()
        result = train(model, examples, sampler, collators[OURS], one_epoch)
        rounds[OURS].append(time.perf_counter() - start)
        return result.losses[-1]

    def run_peer() -> float:
        collators[PEER].clear()
        trainer = make_trainer(
            freeze_positions(marian_of(initial)), examples, collators[PEER], recipe, batch_size, smoothing, tokenizer
        )
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):  # it prints its summary, and our figures go there
            result = trainer.train()
        rounds[PEER].append(time.perf_counter() - start)
        return result.training_loss

    # Making a model is not of the epoch, so each run times its own training.
    done = alternate({OURS: run_ours, PEER: run_peer}, args.repeats, warmups=0, between=gc.collect)
    timings = {name: Timing(rounds[name], statistics.median(rounds[name]), one.result) for name, one in done.items()}
    systems = {}
    for name, timing in timings.items():
        counted = collators[name].figures()
        systems[name] = {
            "seconds": timing.median,
            "target_tokens_per_s": counted["target_tokens"] / timing.median,
            "loss": timing.result,
            **counted,
        }
    return {"pairs": len(pairs), "pairs_a_batch_of_the_trainer": batch_size, "smoothing_of_the_trainer": smoothing,
            "systems": systems, "ratio": ratio(timings, OURS, PEER)}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, repeats=3)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "multi30k", help="folder")
    parser.add_argument("--pairs", type=int, help="only the first so many pairs (default: all; --quick: 300)")
    parser.add_argument("--tokens", type=int, help="padded tokens a batch, on either side (default: the recipe's)")
    parser.add_argument("--smooth", action="store_true", help="let the trainer smooth labels too")
    args = parse(parser, argv)
    logging.disable_progress_bar()
    if not (args.data / "raw" / "train.en.gz").is_file():
        raise SystemExit(f"{args.data} has no raw/train.en.gz: name the folder of Multi30k with --data.")
    config = load_config(RECIPE)
    args.tokens = args.tokens or (512 if args.quick else config.batches.tgt_tokens)
    with tempfile.TemporaryDirectory() as work:
        tokenizer, pairs = encode(config, args.data, Path(work), args.pairs or (300 if args.quick else None))
        figures: dict[str, Any] = {"benchmark": "epoch", "machine": machine(), "tokens_a_batch": args.tokens}
        figures.update(measure(config, tokenizer, pairs, args))
    rows = [
        {"system": name, "s": one["seconds"], "target tokens/s": one["target_tokens_per_s"], "updates": one["updates"],
         "target tokens an update": one["target_tokens_an_update"], "padding %": 100 * one["padding"]}
        for name, one in figures["systems"].items()
    ]  # fmt: skip
    report(f"One epoch of {figures['pairs']:,} pairs of Multi30k", rows)
    one = figures["ratio"]
    print(f"\nours / trainer: {one['median']} ({one['lowest']} to {one['highest']})", file=sys.stderr)
    emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
