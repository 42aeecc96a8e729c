"""One training step - forward, loss, backward, optimizer, gradients cleared - of ours and of peers.

    python benchmarks/train_step.py

Base size with a vocabulary of 37,000, 82 pairs of 25 and 25 tokens (2,050 on either side), no padding. Ours is called
as the training loop calls it (`skip_logits=True`), with the paper's label smoothing. Beside it:

* transformers' MarianMTModel with the same weights and its own loss (no smoothing: it has none);
* torch.nn.Transformer with one matrix for embeddings and output, and torch's label-smoothed cross-entropy;
* JoeyNMT with its own loss, where it is installed.

All have the same dropout, the same optimizer (the paper's Adam as our loop makes it) and the same tokens; each in
float32, and ours and MarianMT also under bfloat16 autocast. That ours and MarianMT do the same work is shown by their
losses without dropout and smoothing.

Memory is the most that the resident size of a fresh process rises in a step above weights, gradients and optimizer
state. These exist beforehand through a step of two tokens, and a step begins with the gradients gone, as in a loop. The
C library is told to give freed memory back at once (where it is glibc), else the peak would hold what earlier tensors
have left. That costs time, so these steps are not timed.

--compile runs ours under torch.compile as a recipe's `compile: true` does, over several lengths, and counts
compilations; --profile prints where the time of ours goes.
"""

import argparse
import ctypes
import gc
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from measuring import alternate, common_arguments, emit, in_child, machine, parse, ratio, report
from peers import base_config, marian_of, quick_config
from torch import nn
from transformers.utils import logging

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.modeling_vaswani import shift_right, sinusoid_table
from hf_vaswani.training.recipe import Recipe, make_accelerator
from hf_vaswani.training.schedule import paper_optimizer, set_learning_rate

SMOOTHING, RATE = 0.1, 1e-4
SYSTEMS = ("ours", "marian", "torch", "joeynmt")
LABELS = {"ours": "ours", "marian": "MarianMT", "torch": "torch.nn.Transformer", "joeynmt": "JoeyNMT"}


class Size(NamedTuple):
    """What a step is of: the model's size and the batch's shape."""

    is_quick: bool
    vocab_size: int
    pairs: int
    src_length: int
    tgt_length: int

    def config(self) -> Any:
        """Ours, with the biases in attention that MarianMT has, so that both train as many weights."""
        make = quick_config if self.is_quick else base_config
        return make(vocab_size=self.vocab_size, attention_bias=True, dropout=0.1, label_smoothing=SMOOTHING)


# --------------------------------------------------------------------------- the systems
class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it lacks: one matrix for embeddings and output, positions, and a loss."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.transformer = nn.Transformer(
            config.d_model, config.num_attention_heads, config.encoder_layers, config.decoder_layers, config.d_ff,
            config.dropout, batch_first=True,
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("table", sinusoid_table(1024, config.d_model), persistent=False)

    def place(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.d_model) + self.table[: ids.shape[1]])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        read = shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)
        causal = nn.Transformer.generate_square_subsequent_mask(labels.shape[1], device=labels.device)
        states = self.transformer(self.place(input_ids), self.place(read), tgt_mask=causal, tgt_is_causal=True)
        logits = nn.functional.linear(states, self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING)


def joeynmt_model(config: Any) -> nn.Module:
    """JoeyNMT's Transformer of the same size."""
    from types import SimpleNamespace

    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    names = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}
    special: dict[str, Any] = {f"{key}_token": value for key, value in names.items()}
    special |= {f"{key}_id": number for number, key in enumerate(names)}
    special |= {"sep_token": None, "sep_id": None, "lang_tags": []}
    vocabulary = Vocabulary([f"p{n}" for n in range(config.vocab_size - len(names))], SimpleNamespace(**special))
    side = {
        "type": "transformer", "num_heads": config.num_attention_heads, "hidden_size": config.d_model,
        "ff_size": config.d_ff, "dropout": config.dropout, "layer_norm": "post",
        "embeddings": {"embedding_dim": config.d_model, "scale": True, "dropout": config.dropout},
    }  # fmt: skip
    settings = {
        "encoder": {**side, "num_layers": config.encoder_layers},
        "decoder": {**side, "num_layers": config.decoder_layers},
        "tied_embeddings": True, "tied_softmax": True, "initializer": "xavier_uniform",
        "embed_initializer": "xavier_uniform",
    }  # fmt: skip
    model = build_model(settings, vocabulary, vocabulary)
    model.loss_function = ("crossentropy", SMOOTHING)
    return model


def random_batch(size: Size, seed: int = 1) -> dict[str, torch.Tensor]:
    """Source and target ids, none of them special; no padding."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, size.vocab_size, (size.pairs, size.src_length), generator=generator)
    tgt = torch.randint(4, size.vocab_size, (size.pairs, size.tgt_length), generator=generator)
    return {"input_ids": src, "attention_mask": torch.ones_like(src), "labels": tgt}


def make_model(system: str, size: Size) -> Any:
    """The model of a system, in training mode; ours and MarianMT have equal weights."""
    torch.manual_seed(0)
    if system == "torch":
        return TorchTransformer(size.config()).train()
    if system == "joeynmt":
        return joeynmt_model(size.config()).train()
    ours = VaswaniForConditionalGeneration(size.config()).train()
    return ours if system == "ours" else freeze_positions(marian_of(ours))


def freeze_positions(marian: Any) -> Any:
    """Leave the sinusoids of a MarianMTModel out of training: the library counts them among its parameters."""
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight.requires_grad_(False)
    return marian


def loss_of(system: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss per target token, as each system's own training computes it."""
    if system == "ours":
        count = torch.tensor(float(batch["labels"].numel()), device=batch["labels"].device)
        return model(**batch, num_items_in_batch=count, skip_logits=True).loss
    if system == "torch":
        return model(batch["input_ids"], batch["labels"])
    if system == "joeynmt":
        src, tgt = batch["input_ids"], batch["labels"]
        read = torch.cat([torch.full_like(tgt[:, :1], model.bos_index), tgt[:, :-1]], dim=1)
        # With its prompts and lengths left out, it takes what training gives it for plain text.
        total = model(
            return_type="loss", src=src, trg_input=read, trg=tgt, src_mask=torch.ones_like(src)[:, None].bool(),
            src_length=torch.full((len(src),), src.shape[1]), trg_mask=torch.ones_like(tgt)[:, None].bool(),
            src_prompt_mask=None, trg_prompt_mask=None,
        )[0]  # fmt: skip
        return total / tgt.numel()
    return model(**batch).loss


def make_step(
    system: str, model: Any, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, is_bf16: bool
) -> Callable[[], float]:
    """A function that does one step and returns its loss."""

    def step() -> float:
        with torch.autocast(batch["labels"].device.type, dtype=torch.bfloat16, enabled=is_bf16):
            loss = loss_of(system, model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """The paper's Adam, with a small fixed rate."""
    optimizer = paper_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    set_learning_rate(optimizer, RATE)
    return optimizer


def available_systems() -> list[str]:
    """The systems that can be run here."""
    return [name for name in SYSTEMS if name != "joeynmt" or importlib.util.find_spec("joeynmt")]


# --------------------------------------------------------------------------- equal work
def equal_losses(size: Size) -> dict[str, float]:
    """Loss per token of ours and of MarianMT, same weights and tokens, without dropout and smoothing."""
    batch = random_batch(size)
    losses = {}
    for system in ("ours", "marian"):
        model = make_model(system, size).eval()
        with torch.no_grad():
            losses[system] = float(loss_of(system, model, batch))
    return losses


# --------------------------------------------------------------------------- memory
def return_freed_memory() -> None:
    """From now on this process gives freed memory back to the system at once (glibc only)."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in ((-1, 0), (-3, 2**16)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            set_option(option, value)


def one_step(system: str, size: Size, is_bf16: bool) -> Iterator[None]:
    """One step in a process of its own, for `in_child`: measured once weights, gradients and Adam's state exist."""
    return_freed_memory()
    model = make_model(system, size)
    optimizer = make_optimizer(model)
    tiny = random_batch(size._replace(pairs=1, src_length=2, tgt_length=2))
    make_step(system, model, tiny, optimizer, is_bf16)()
    loss_of(system, model, tiny).backward()
    batch = random_batch(size)
    gc.collect()
    yield
    optimizer.zero_grad()
    make_step(system, model, batch, optimizer, is_bf16)()


def peak_of(system: str, size: Size, is_bf16: bool) -> float:
    """MiB beyond weights, gradients and optimizer state."""
    return in_child(one_step, system, size, is_bf16).peak_mib


# --------------------------------------------------------------------------- compilation
def measure_compiled(size: Size, lengths: Sequence[int], is_bf16: bool) -> dict[str, Any]:
    """Ours under torch.compile, at several lengths with as many tokens: compilations, and time against plain steps."""
    from accelerate.state import AcceleratorState
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    AcceleratorState._reset_state()  # else a second precision would be refused
    accelerator = make_accelerator(Recipe(compile=True, precision="bf16" if is_bf16 else "no"))
    compiled = accelerator.prepare(make_model("ours", size))
    plain = make_model("ours", size)
    optimizer, own = make_optimizer(compiled), make_optimizer(plain)
    tokens = size.pairs * size.src_length
    rows, seen = [], 0
    for length in lengths:
        shaped = size._replace(pairs=max(2, tokens // length), src_length=length, tgt_length=length + 1)
        batch = random_batch(shaped)
        steps = {
            "compiled": make_step("ours", compiled, batch, optimizer, is_bf16),
            "plain": make_step("ours", plain, batch, own, is_bf16),
        }
        timings = alternate(steps, repeats=2, warmups=1, between=gc.collect)
        graphs = int(counters["stats"]["unique_graphs"])
        rows.append(
            {
                "src length": length,
                "tgt length": length + 1,
                "compilations": graphs - seen,
                "compiled s": timings["compiled"].median,
                "plain s": timings["plain"].median,
                "speed": ratio(timings, "compiled", "plain")["median"],
            }
        )
        seen = graphs
    return {"rows": rows, "compilations": seen, "breaks": sum(counters["graph_break"].values())}


# --------------------------------------------------------------------------- profile
def print_profile(size: Size, is_bf16: bool) -> None:
    """Time of ours by operator, on standard error."""
    from torch.profiler import ProfilerActivity, profile

    model = make_model("ours", size)
    step = make_step("ours", model, random_batch(size), make_optimizer(model), is_bf16)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45)
    print(f"\nours, {'bfloat16 autocast' if is_bf16 else 'float32'}\n{table}", file=sys.stderr)


# --------------------------------------------------------------------------- all of it
def measure(size: Size, repeats: int, with_memory: bool) -> dict[str, Any]:
    """Time and memory of every system that is there.

    Args:
        size (`Size`): of the step. repeats (`int`): timed rounds. with_memory (`bool`): measure that too, in processes
            of their own.

    Returns:
        `dict`: "losses", "systems" (seconds, tokens/s and MiB by name), "ratios".
    """
    systems, batch = available_systems(), random_batch(size)
    tokens = batch["labels"].numel()
    losses = equal_losses(size)
    steps = {}
    for system in systems:
        model = make_model(system, size)
        optimizer = make_optimizer(model)
        for is_bf16 in (False, True) if system in ("ours", "marian") else (False,):
            steps[system + (" bf16" if is_bf16 else "")] = make_step(system, model, batch, optimizer, is_bf16)
    timings = alternate(steps, repeats, warmups=1, between=gc.collect)
    del steps, model, optimizer
    gc.collect()
    figures: dict[str, Any] = {"losses": losses, "systems": {}, "ratios": {}}
    for name, timing in timings.items():
        system, _, precision = name.partition(" ")
        figures["systems"][name] = {
            "seconds": timing.median,
            "target_tokens_per_s": tokens / timing.median,
            "peak_mib": peak_of(system, size, bool(precision)) if with_memory else None,
        }
    for ours, theirs in [
        ("ours", "marian"), ("ours bf16", "marian"), ("ours bf16", "marian bf16"), ("ours", "torch"),
        ("ours", "joeynmt"),
    ]:  # fmt: skip
        if theirs in timings:
            one = {"speed": ratio(timings, ours, theirs)}
            if with_memory:
                mine, other = (figures["systems"][name]["peak_mib"] for name in (ours, theirs))
                one["memory"] = round(mine / other, 3) if other else None
            figures["ratios"][f"{ours} / {theirs}"] = one
    return figures


def print_figures(figures: dict[str, Any]) -> None:
    """Tables on standard error."""
    rows = []
    for name, one in figures["systems"].items():
        system, _, precision = name.partition(" ")
        rows.append(
            {
                "system": LABELS[system],
                "precision": precision or "float32",
                "s a step": one["seconds"],
                "target tokens/s": one["target_tokens_per_s"],
                "MiB beyond weights, gradients, state": one["peak_mib"],
            }
        )
    report("One training step", rows)
    rows = [
        {"ratio": name, "speed": one["speed"]["median"], "lowest": one["speed"]["lowest"],
         "highest": one["speed"]["highest"], "memory": one.get("memory")}
        for name, one in figures["ratios"].items()
    ]  # fmt: skip
    report("Ratios (speed above 1 and memory below 1: ours is better)", rows)
    losses = figures["losses"]
    print(
        f"\nloss without dropout and smoothing: ours {losses['ours']:.7f}, MarianMT {losses['marian']:.7f}",
        file=sys.stderr,
    )
    if "joeynmt" not in figures["systems"]:
        print("JoeyNMT is not installed, so it was not measured.", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser, repeats=3)
    parser.add_argument("--pairs", type=int, help="sentence pairs of the batch (default: 82; --quick: 4)")
    parser.add_argument("--length", type=int, help="tokens of each side of a pair (default: 25; --quick: 6)")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory too")
    parser.add_argument("--profile", action="store_true", help="also print the time of ours by operator")
    parser.add_argument("--compile", action="store_true", help="measure ours under torch.compile instead")
    args = parse(parser, argv)
    logging.disable_progress_bar()
    length = args.length or (6 if args.quick else 25)
    pairs = args.pairs or (4 if args.quick else 82)
    size = Size(args.quick, 211 if args.quick else 37_000, pairs, length, length)
    figures: dict[str, Any] = {"benchmark": "train_step", "machine": machine(), "size": size._asdict()}
    if args.compile:
        lengths = [length, length + 3, 2 * length, max(2, length // 2)]
        for name, is_bf16 in (("float32", False),) if args.quick else (("float32", False), ("bf16", True)):
            figures[name] = measure_compiled(size, lengths, is_bf16)
            report(f"Ours under torch.compile, {name}", figures[name]["rows"])
    else:
        figures.update(measure(size, args.repeats, args.memory))
        print_figures(figures)
    if args.profile:
        print_profile(size, False)
        print_profile(size, True)
    emit(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
