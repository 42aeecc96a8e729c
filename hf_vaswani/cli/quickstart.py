"""`hf-vaswani quickstart`: from nothing to a translator that can be used, on two CPU cores, in minutes."""

import argparse
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..configuration_vaswani import VaswaniConfig
from ..data import TokenBatchSampler, bundled_pairs, tokenize_pairs
from ..data.corpus import Pair
from ..evaluation import CorpusScore, chrf_score, perplexity, sacrebleu_score
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..sharing.folders import whole_folder
from ..tokenization_vaswani import VaswaniTokenizer
from ..training import Recipe, TrainingDiverged, TrainingResult, train
from .output import UserError, check_new_folder, note
from .translate import load_translator, positive

REPORT = "quickstart.json"
SHOWN_COUNT = 10

# Choice: what 19,000 short pairs can fill and two cores can do in minutes; chosen on the valid lines. The paper's base
# run has 37,000 pieces, batches of 25,000 tokens, 4,000 updates of warm-up, factor 1 and the mean of 5 checkpoints.
# So few updates want small batches, whose noise in turn wants a lower rate: with factor 1.6 training falls apart.
VOCAB_SIZE = 2000
BATCH_TOKENS = 512
WARMUP_UPDATES = 500
RATE_FACTOR = 0.7
AVERAGE_LAST = 10
AVERAGE_EVERY = 50
# The plan is counted in updates, so that it is the same on every machine; the clock is only a limit, a fifth above what
# the machine needed that this was chosen on.
UPDATES_PER_MINUTE = 600
DEFAULT_MINUTES = 4.0
# Matrices this small gain little from a second thread, and two threads that wait for each other on busy cores are
# slower than one.
DEFAULT_THREADS = 1


@dataclass
class QuickstartResult:
    """What a quickstart made and measured.

    Args:
        folder (`Path`): model, tokenizer, picture and report. training (`TrainingResult`): the run.
        bleu, chrf (`CorpusScore`): on the held-out test lines. perplexity (`float`): there, per token.
        shown (`list[tuple[str, str, str]]`): source, translation and reference of some of these lines.
        picture_is_drawn (`bool`): False where matplotlib is missing. seconds (`float`): of the whole command.
    """

    folder: Path
    training: TrainingResult
    bleu: CorpusScore
    chrf: CorpusScore
    perplexity: float
    shown: list[tuple[str, str, str]]
    picture_is_drawn: bool
    seconds: float


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "quickstart",
        help="train a small German-English translator on the bundled corpus; minutes on two CPU cores",
        description="Train a small translator on the bundled corpus of 19,000 short sentence pairs, score it on 500 "
        "held-out lines, show ten of them, draw its attention, and say what to type next. The same seed gives the "
        "same losses.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=_minutes,
        default=None,
        metavar="N",
        help=f"length of the training (default: {DEFAULT_MINUTES:g}): {UPDATES_PER_MINUTE} updates per minute are "
        "planned, and a machine too slow for them stops after N minutes",
    )
    length.add_argument("--updates", type=positive, metavar="N", help="exactly N updates, however long they take")
    parser.add_argument(
        "--output", type=Path, default=Path("quickstart"), metavar="DIR", help="new folder (default: ./quickstart)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier quickstart in that folder")
    parser.add_argument("--seed", type=_seed, default=1, metavar="S", help="of weights, order and dropout (default: 1)")
    parser.add_argument(
        "--direction", choices=("de-en", "en-de"), default="de-en", help="languages, from-to (default: de-en)"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=DEFAULT_THREADS,
        metavar="N",
        help="CPU threads (default: %(default)s); 2 save a fifth of the time where nothing else runs, and cost several "
        "times as much where something does; another number may change the last digits of the losses",
    )
    parser.set_defaults(run=run)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Carry the command out, and tell the user what came of it."""
    check_new_folder(args.output, args.overwrite, REPORT)
    minutes = args.minutes or (None if args.updates else DEFAULT_MINUTES)
    updates = args.updates or max(1, round((minutes or 0) * UPDATES_PER_MINUTE))
    torch.set_num_threads(args.threads)
    try:
        result = quickstart(args.output, updates, minutes, args.seed, args.direction)
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    print(summary(result, args.direction), flush=True)
    return 0


def quickstart(
    output: Path, updates: int, minutes: float | None = None, seed: int = 1, direction: str = "de-en"
) -> QuickstartResult:
    """Train, score, show and save.

    Args:
        output (`Path`): the folder to make; it appears at the very end, complete. updates (`int`): planned.
        minutes (`float`, *optional*): limit of the training. seed (`int`): of weights, order and dropout.
        direction (`str`): "de-en" or "en-de".

    Returns:
        `QuickstartResult`.
    """
    start = time.perf_counter()
    train_pairs, test_pairs = bundled_pairs("train", direction), bundled_pairs("test", direction)
    note(f"Read {len(train_pairs):,} training pairs; learning {VOCAB_SIZE:,} subword pieces …")
    tokenizer = VaswaniTokenizer.train(
        (text for pair in train_pairs for text in pair), vocab_size=VOCAB_SIZE, show_progress=False
    )
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(small_config(tokenizer))
    note(f"Training {model.num_parameters():,} parameters for {updates:,} updates …")
    with whole_folder(output) as folder:
        training = _train(model, tokenizer, train_pairs, updates, minutes, seed, folder / "metrics.jsonl")
        if training.stopped_early:
            note(
                f"Stopped by the clock after {training.updates:,} of {updates:,} updates; with more --minutes it would "
                f"get further. --updates {training.updates} repeats exactly this run."
            )
        note(f"Trained for {training.seconds:.0f} s; translating {len(test_pairs)} held-out lines …")
        model.eval()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # What is scored is what was saved, loaded the way a user loads it.
        translator = load_translator(str(folder))
        sources, references = [src for src, _ in test_pairs], [tgt for _, tgt in test_pairs]
        hypotheses = [one["translation_text"] for one in translator(sources, batch_size=64)]
        result = QuickstartResult(
            folder=output,
            training=training,
            bleu=sacrebleu_score(hypotheses, references),
            chrf=chrf_score(hypotheses, references),
            perplexity=perplexity(translator.model, tokenize_pairs(test_pairs, tokenizer), _collator(tokenizer)),
            shown=list(zip(sources, hypotheses, references, strict=True))[:SHOWN_COUNT],
            picture_is_drawn=_draw(translator, sources, folder / "attention.png"),
            seconds=time.perf_counter() - start,
        )
        (folder / "translations.txt").write_bytes("".join(f"{line}\n" for line in hypotheses).encode("utf-8"))
        (folder / REPORT).write_text(json.dumps(_report(result, seed, direction), indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_card(result, direction), encoding="utf-8")
    return result


def small_config(tokenizer: VaswaniTokenizer) -> VaswaniConfig:
    """The preset "tiny", made for a tokenizer."""
    return VaswaniConfig.from_preset(
        "tiny",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def _collator(tokenizer: VaswaniTokenizer) -> Any:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(tokenizer)


def _train(
    model: VaswaniForConditionalGeneration,
    tokenizer: VaswaniTokenizer,
    pairs: list[Pair],
    updates: int,
    minutes: float | None,
    seed: int,
    metrics_path: Path,
) -> TrainingResult:
    dataset = tokenize_pairs(pairs, tokenizer)
    sampler = TokenBatchSampler(dataset.src_lengths, dataset.tgt_lengths, BATCH_TOKENS, BATCH_TOKENS, seed=seed)
    recipe = Recipe(
        updates=updates,
        max_minutes=minutes,
        warmup_updates=WARMUP_UPDATES,
        rate_factor=RATE_FACTOR,
        average_last=AVERAGE_LAST,
        average_every=AVERAGE_EVERY,
        seed=seed,
    )
    result = train(model, dataset, sampler, _collator(tokenizer), recipe, metrics_path)
    model.cpu()  # it may have been trained elsewhere
    return result


def _draw(translator: Any, sources: list[str], path: Path) -> bool:
    """Draw the attention over the first held-out line of 5 to 8 words; False without matplotlib."""
    from ..analysis import attention_figure

    source = next((one for one in sources if 5 <= len(one.split()) <= 8), sources[0])
    try:
        attention_figure(translator.model, translator.tokenizer, source).save(path)
    except ImportError as error:
        note(str(error))
        return False
    return True


def _report(result: QuickstartResult, seed: int, direction: str) -> dict[str, Any]:
    training = result.training
    return {
        "hf_vaswani": __version__,
        "torch": torch.__version__,
        "direction": direction,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "updates": training.updates,
        "planned_updates": training.planned_updates,
        "skipped_updates": training.skipped_count,
        "averaged_snapshots": training.averaged_count,
        "epochs": round(training.epochs, 2),
        "training_seconds": round(training.seconds, 1),
        "seconds": round(result.seconds, 1),
        "tgt_tokens_per_second": round(training.tgt_tokens / max(training.seconds, 1e-9)),
        "test_sacrebleu": result.bleu.score,
        "test_sacrebleu_signature": result.bleu.signature,
        "test_chrf": result.chrf.score,
        "test_chrf_signature": result.chrf.signature,
        "test_perplexity": result.perplexity,
    }


def _card(result: QuickstartResult, direction: str) -> str:
    src, tgt = direction.split("-")
    return f"""---
library_name: transformers
pipeline_tag: translation
language: [{src}, {tgt}]
---

# A quickstart translator, {src} to {tgt}

Trained by `hf-vaswani quickstart` (hf_vaswani {__version__}) on 19,000 short, plain sentences, to show how the pieces
fit together. It knows about two thousand words and no long sentences: it is no translator for real work.

- {result.bleu}
- {result.chrf}
- perplexity {result.perplexity:.2f} per subword token

All on the 500 held-out lines of the bundled corpus; their translations are in `translations.txt`.

Training data: sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0 FR, changed (selected,
punctuation normalised).
"""


def summary(result: QuickstartResult, direction: str) -> str:
    """What the user reads at the end: scores, examples, and what to type next."""
    training = result.training
    lines = [f"{SHOWN_COUNT} held-out sentences:", ""]
    for source, translation, reference in result.shown:
        lines += [f"  source     {source}", f"  model      {translation}", f"  reference  {reference}", ""]
    lines += [
        f"{training.updates:,} updates, {training.epochs:.1f} epochs, "
        f"{training.tgt_tokens / max(training.seconds, 1e-9):,.0f} target tokens/s; "
        f"mean of the last {training.averaged_count} snapshots",
        f"500 held-out lines: {result.bleu}",
        f"500 held-out lines: {result.chrf}",
        f"500 held-out lines: perplexity {result.perplexity:.2f} per subword token",
        f"The whole command took {result.seconds:.0f} s.",
        "",
        f"The model is in {result.folder}" + (", with attention.png." if result.picture_is_drawn else "."),
        "",
        "Next, in a shell:",
        "",
        *[f"  {command}" for command in next_commands(result.folder, direction)],
        "",
        f"or in Python ({this_python()}):",
        "",
        *[f"  {line}" for line in next_snippet(result.folder, direction)],
    ]
    return "\n".join(lines)


def _example(direction: str) -> str:
    return "Wo ist mein Buch?" if direction.startswith("de") else "Where is my book?"


def this_python() -> str:
    """What to type for the interpreter that runs this, which in an environment that is not active is no `python`."""
    if shutil.which("python") == sys.executable:
        return "python"
    own = Path(sys.executable)
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)


def next_commands(folder: Path, direction: str) -> list[str]:
    """Shell lines that use the new model."""
    is_on_path = shutil.which("hf-vaswani") == str(Path(sys.executable).parent / "hf-vaswani")
    program = "hf-vaswani" if is_on_path else f"{shlex.quote(this_python())} -m hf_vaswani.cli"
    return [f"echo {shlex.quote(_example(direction))} | {program} translate {shlex.quote(str(folder))}"]


def next_snippet(folder: Path, direction: str) -> list[str]:
    """Python lines that use the new model."""
    return [
        "import hf_vaswani, transformers",
        f'translate = transformers.pipeline("translation", model={json.dumps(str(folder), ensure_ascii=False)})',
        f'print(translate({json.dumps(_example(direction), ensure_ascii=False)})[0]["translation_text"])',
    ]
