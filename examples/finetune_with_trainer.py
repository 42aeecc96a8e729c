"""Train with transformers' own `Seq2SeqTrainer`: of this package only text, tokenizer, model and sampler.

    python examples/finetune_with_trainer.py --model quickstart --train-src a.de --train-tgt a.en --output runs/further
    torchrun --nproc-per-node 2 examples/finetune_with_trainer.py --recipe examples/recipes/tatoeba_de_en.yaml \\
        --preset tiny --output runs/with_trainer

What the paper asks for and the trainer's own arguments do not give: batches by token budget, as many on each process;
the rate of update k at update k (`lr_scheduler_type="inverse_sqrt"` is one update late); Adam's constants; no clipping.
What train_translation.py has and the trainer has not: the mean of the last checkpoints (`hf-vaswani average` makes it),
and FSDP, under which the trainer takes no optimizer that is made beforehand.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import sacrebleu
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.data import CorpusError, CorpusSource, TokenBatchSampler, prepare_corpus, read_source, tokenize_pairs
from hf_vaswani.evaluation.bleu import sacrebleu_tokenizer_for
from hf_vaswani.training import ConfigError, TrainingConfig, leave_processes, load_config
from hf_vaswani.training.config import DataConfig


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a translation model with Seq2SeqTrainer: one that exists, or one from scratch.",
        epilog="The same line under `torchrun --nproc-per-node N` or `accelerate launch` uses N devices.",
    )
    start = parser.add_argument_group("what to begin with")
    start = start.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", metavar="NAME", help="a folder or Hub name: its weights and its tokenizer")
    start.add_argument("--preset", metavar="NAME", help="a new model: tiny, base, big ...; its tokenizer is learnt")
    text = parser.add_argument_group("text")
    text.add_argument("--recipe", metavar="YAML", help="take text and languages from this recipe's file")
    text.add_argument("--train-src", metavar="FILE", help="source sentences, one a line (also .gz and .zst)")
    text.add_argument("--train-tgt", metavar="FILE", help="their translations, line by line")
    text.add_argument("--eval-src", metavar="FILE", help="held-out sources: loss and BLEU while training")
    text.add_argument("--eval-tgt", metavar="FILE", help="their references")
    text.add_argument("--target-language", metavar="CODE", help='such as "de" or "zh": sets the tokenisation of BLEU')
    text.add_argument("--vocab-size", type=int, default=37_000, help="pieces to learn with --preset (%(default)s)")
    text.add_argument("--max-length", type=int, default=256, help="longest side in tokens (%(default)s)")
    run = parser.add_argument_group("training")
    run.add_argument("--output", required=True, metavar="DIR", help="folder for checkpoints and the model")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    run.add_argument("--max-steps", type=int, default=100_000, help="optimizer updates (%(default)s)")
    run.add_argument("--warmup-steps", type=int, default=4000, help="update with the highest rate (%(default)s)")
    run.add_argument("--rate-factor", type=float, default=1.0, help="times the paper's rate (%(default)s)")
    run.add_argument("--src-tokens", type=int, default=25_000, help="source tokens of an update, over all devices")
    run.add_argument("--tgt-tokens", type=int, default=25_000, help="target tokens of an update, over all devices")
    run.add_argument("--accumulation", type=int, default=1, help="batches that each device takes for an update")
    run.add_argument("--save-steps", type=int, default=1500, help="updates between checkpoints (%(default)s)")
    run.add_argument("--keep", type=int, default=5, help="checkpoints kept (%(default)s)")
    run.add_argument("--eval-steps", type=int, help="updates between evaluations (default: as --save-steps)")
    run.add_argument("--logging-steps", type=int, default=100, help="updates between two records (%(default)s)")
    run.add_argument("--seed", type=int, default=1, help="of weights, dropout and the order of batches")
    run.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    run.add_argument("--cpu", action="store_true", help="leave accelerators alone")
    args = parser.parse_args()
    if (args.recipe is None) == (args.train_src is None):
        parser.error("give either --recipe or --train-src with --train-tgt")
    for one, other in (("train_src", "train_tgt"), ("eval_src", "eval_tgt")):
        if (getattr(args, one) is None) != (getattr(args, other) is None):
            parser.error(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} belong together")
    return args


def find_text(args: argparse.Namespace) -> TrainingConfig:
    """Text and languages, from a recipe or from the file names."""
    if args.recipe:
        config = load_config(args.recipe)
    else:
        config = TrainingConfig(args.output, DataConfig([CorpusSource(src=args.train_src, tgt=args.train_tgt)]))
    if args.eval_src:
        config.data.valid = [CorpusSource(src=args.eval_src, tgt=args.eval_tgt)]
    config.target_language = args.target_language or config.target_language
    return config


def load_or_make(args: argparse.Namespace, config: TrainingConfig, settings: Seq2SeqTrainingArguments):
    """Model and tokenizer; a new tokenizer is learnt by the first process, and the others wait for it."""
    if args.model:
        return AutoModelForSeq2SeqLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    folder = Path(args.output) / "tokenizer"
    with settings.main_process_first(desc="the tokenizer"):
        if settings.process_index == 0 and not (args.resume and folder.is_dir()):
            pairs = (pair for source in config.data.train for pair in read_source(source, *languages(config)))
            learnt = VaswaniTokenizer.train((text for pair in pairs for text in pair), vocab_size=args.vocab_size)
            learnt.save_pretrained(folder)
    tokenizer = VaswaniTokenizer.from_pretrained(folder)
    model_config = VaswaniConfig.from_preset(args.preset, vocab_size=len(tokenizer))
    return VaswaniForConditionalGeneration(model_config), tokenizer


def languages(config: TrainingConfig) -> tuple[str | None, str | None]:
    return config.source_language, config.target_language


class TokenTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with batches of our own sampler."""

    def __init__(self, *args, batches: TokenBatchSampler, **kwargs):
        super().__init__(*args, callbacks=[EpochOfSampler(batches)], **kwargs)
        self.batches = batches

    def get_train_dataloader(self) -> DataLoader:
        # Whole batches are dealt to the processes in turn. `multiple_of` makes them come out even, so that no process
        # runs dry, and `even_batches`, which would take batches of the start once more, finds nothing to do.
        loader = DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class EpochOfSampler(TrainerCallback):
    """Tells the sampler its epoch. The trainer does too, but not where it resumes within an epoch on several processes:
    there two wrappers lie around the sampler, and the first epoch's order would come again."""

    def __init__(self, sampler: TokenBatchSampler):
        self.sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.sampler.set_epoch(int(state.epoch))


def paper_schedule(model, warmup: int, factor: float):
    """Adam and the rate of section 5.3, factor * d_model^-0.5 * min(k^-0.5, k * warmup^-1.5), for update k from 1."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    peak = factor * model.config.d_model**-0.5

    def rate(done: int) -> float:
        return peak * min((done + 1) ** -0.5, (done + 1) * warmup**-1.5)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def main() -> int:
    args = read_arguments()
    latest = get_last_checkpoint(args.output) if Path(args.output).is_dir() else None
    if latest and not args.resume:
        raise ConfigError(f"{args.output} holds a run already: go on with it (--resume), or name another --output.")
    config = find_text(args)
    has_eval = bool(config.data.valid)
    settings = Seq2SeqTrainingArguments(
        output_dir=args.output,
        max_steps=args.max_steps,
        gradient_accumulation_steps=args.accumulation,
        max_grad_norm=0.0,  # the trainer's own default clips to 1
        save_steps=args.save_steps,
        save_total_limit=args.keep,
        eval_strategy="steps" if has_eval else "no",
        eval_steps=args.eval_steps or args.save_steps,
        per_device_eval_batch_size=32,
        predict_with_generate=True,  # the model's own search: beam 4, at most source length + 50
        ddp_find_unused_parameters=False,
        logging_steps=args.logging_steps,
        report_to="none",
        seed=args.seed,
        bf16=args.bf16,
        use_cpu=args.cpu,
        disable_tqdm=not sys.stderr.isatty(),
    )
    torch.manual_seed(args.seed)
    model, tokenizer = load_or_make(args, config, settings)
    source_language, target_language = languages(config)
    share = settings.world_size * args.accumulation
    corpus = prepare_corpus(
        config.data.train,
        tokenizer,
        Path(args.output) / "cache",
        source_language=source_language,
        target_language=target_language,
        max_length=min(args.max_length, args.src_tokens // share, args.tgt_tokens // share),
        max_ratio=config.data.max_ratio,
    )
    try:
        batches = TokenBatchSampler(
            corpus.src_lengths,
            corpus.tgt_lengths,
            args.src_tokens // share,
            args.tgt_tokens // share,
            seed=args.seed,
            weights=corpus.weights,
            multiple_of=share,
        )
    except ValueError as error:
        raise ConfigError(f"--src-tokens, --tgt-tokens: {error}") from error
    held_out = [pair for source in config.data.valid for pair in read_source(source, *languages(config))]
    references = [tgt for src, tgt in held_out if src.strip() and tgt.strip()]  # tokenize_pairs leaves out the same
    tokenization = sacrebleu_tokenizer_for(target_language)

    def bleu(prediction) -> dict[str, float]:
        # Rows of several batches and processes are made equally long with -100, which is no token.
        ids = np.where(prediction.predictions < 0, tokenizer.pad_token_id, prediction.predictions)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        score = sacrebleu.corpus_bleu(texts, [references], tokenize=tokenization, force=True)
        return {"sacrebleu": score.score}

    trainer = TokenTrainer(
        model=model,
        args=settings,
        train_dataset=corpus,
        eval_dataset=tokenize_pairs(held_out, tokenizer) if has_eval else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=bleu,
        optimizers=paper_schedule(model, args.warmup_steps, args.rate_factor),
        batches=batches,
    )
    trainer.train(resume_from_checkpoint=latest)
    trainer.save_model()  # the weights of the last update, with tokenizer and configuration
    scores = trainer.evaluate() if has_eval else {}
    if trainer.is_world_process_zero():
        print("\n".join([*(f"{name}: {value:.4f}" for name, value in scores.items()), f"model: {args.output}"]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, CorpusError) as error:
        sys.exit(f"finetune_with_trainer.py: {error}")
    finally:
        leave_processes()
