"""What a dry run says to people: its figures line by line, what they leave out, and what will go wrong."""

from typing import TYPE_CHECKING, Any

from .checkpoint import is_sharded
from .config import CheckpointConfig
from .dry_run_cost import PAPER_RUNS, SUSTAINED_TFLOPS
from .recipe import Recipe

if TYPE_CHECKING:
    from .dry_run import DryRun

Rows = list[tuple[str, str]]  # label and value


def lines(run: "DryRun") -> list[str]:
    """The whole, a figure a line, each with its unit."""
    sections = [
        ("Length", _length(run)),
        ("Text of an update", _text(run)),
        ("Parameters", _parameters(run)),
        ("Cost of the whole training", _cost(run)),
        (f"Memory of each device, as measured on {run.memory.device}", _memory(run)),
        ("Time", _time(run)),
        ("Checkpoints", _checkpoints(run)),
    ]
    printed = ["Dry run: nothing was trained and nothing was written."]
    for title, rows in sections:
        printed += [title, *(f"  {label:<22} {value}" for label, value in rows)]
    return [*printed, *(f"Note: {one}" for one in run.notes), *(f"WARNING: {one}" for one in run.warnings)]


def _length(run: "DryRun") -> Rows:
    epoch = f"{run.updates_per_epoch:,} updates = {run.text.batches_per_epoch:,} batches / "
    return [
        ("updates", f"{run.updates:,} updates; the rate rises until update {run.warmup_updates:,}"),
        ("an epoch", f"{epoch}{_count(run.text.batches_per_update, 'batch', 'batches')} an update, rounded up"),
        ("epochs", f"{run.epochs:,.2f} epochs"),
    ]


def _text(run: "DryRun") -> Rows:
    text = run.text
    empty = text.device_count * text.accumulation - text.batches_per_update

    def product(limit: int, budget: int) -> str:
        less = f" - {empty} x {budget:,} tokens without a batch" if empty else ""
        return (
            f"{limit:,} tokens = {_count(text.device_count, 'device')} x {budget:,} tokens a batch x "
            f"{_count(text.accumulation, 'batch', 'batches')} accumulated{less}"
        )

    return [
        ("source, at most", product(text.src_limit, text.src_budget)),
        ("target, at most", product(text.tgt_limit, text.tgt_budget)),
        ("source, on average", f"{text.src_tokens:,.0f} tokens, padding left out"),
        ("target, on average", f"{text.tgt_tokens:,.0f} tokens, padding left out"),
        ("padding", f"{100 * text.padding:.2f} % of all places"),
    ]


def _parameters(run: "DryRun") -> Rows:
    found = run.parameters
    rows = [
        ("all", f"{found.total:,} parameters"),
        ("embedding", f"{found.embedding:,} parameters, pre-softmax matrix included"),
        ("other", f"{found.other:,} parameters"),
    ]
    if found.trained != found.total:
        rows.append(("trained", f"{found.trained:,} parameters; the others are frozen"))
    return rows


def _cost(run: "DryRun") -> Rows:
    cost = run.cost
    terms = f"{run.parameters.multiplied:,} parameters x {_power(cost.tgt_tokens)} target tokens"
    rows = [
        ("counted", f"{_power(cost.counted)} FLOPs in the matrix products, forward and backward, padding included"),
        ("6 N tokens", f"{_power(cost.formula)} FLOPs = 6 x {terms}"),
    ]

    def by_paper(flops: float, hours: float, devices: str, tflops: float) -> str:
        return f"{_power(flops)} FLOPs = {_hours(hours)} x {devices} x {tflops:.3g} TFLOPS sustained"

    if run.time is not None and cost.paper_method is not None:
        devices = _count(run.text.device_count, "device")
        method = by_paper(cost.paper_method, run.time.hours, devices, cost.sustained_tflops)
        rows.append(("the paper's method", f"{method} ({cost.sustained_of})"))
    if cost.paper_size is not None and cost.paper is not None:
        hours, updates = PAPER_RUNS[cost.paper_size]
        method = by_paper(cost.paper, hours, "8 P100", SUSTAINED_TFLOPS["P100"])
        rows.append((f"the paper's {cost.paper_size} model", f"{method}, {updates:,} updates"))
    return rows


def _memory(run: "DryRun") -> Rows:
    memory = run.memory
    shape = f"{memory.largest_rows:,} pairs x ({memory.largest_src} source + {memory.largest_tgt} target tokens)"
    if memory.activation_bytes is None:
        activations, more = f"MiB not measured, of the largest batch: {shape}", "more than "
    else:
        activations, more = f"{_size(memory.activation_bytes)}, measured with the largest batch: {shape}", ""
    has = "" if memory.available_bytes is None else f" of {_size(memory.available_bytes)}"
    rows = [
        ("weights", _size(memory.weights_bytes)),
        ("gradients", _size(memory.gradient_bytes)),
        ("Adam's states", _size(memory.adam_bytes)),
        ("activations", activations),
        ("together", f"{more}{_size(memory.total_bytes)}{has}"),
    ]
    if memory.snapshot_bytes:
        rows.append(("snapshots to average", f"{_size(memory.snapshot_bytes)} of main memory, on top"))
    return rows


def _time(run: "DryRun") -> Rows:
    found = run.time
    if found is None:
        return [("an update", "not measured, in seconds: the memory does not suffice")]
    return [
        ("an update", f"{_seconds(found.mean_s)} on average, after {found.timed_updates} batches tried here"),
        ("with middle batches", _seconds(found.middle_s)),
        ("with largest batches", _seconds(found.largest_s)),
        ("optimizer's part", _seconds(found.step_s)),
        ("target tokens", f"{found.tgt_tokens_per_s:,.0f} tokens a second, over all devices"),
        ("the run", f"{_hours(found.hours)} = {run.updates:,} updates x {_seconds(found.mean_s)}"),
    ]


def _checkpoints(run: "DryRun") -> Rows:
    plan = run.checkpoints
    if plan is None:
        return [("written", "0 checkpoints")]

    def some(numbers: list[int], rule: str = "") -> str:
        return f"{_count(len(numbers), 'checkpoint')}{rule}: {_updates(numbers)}"

    clock = "" if plan.every_minutes is None else f" or {plan.every_minutes:g} minutes"
    whole = f"{_size(plan.whole_bytes)} with the optimizer's state (newest {plan.resumable_count})"
    return [
        ("written", some(plan.written, f", every {_count(plan.every_updates, 'update')}{clock} and after the last")),
        ("kept", some(plan.kept, " and the best")),
        ("averaged", some(plan.averaged) if plan.averaged else "0 checkpoints: the last weights are the run's model"),
        ("size of one", f"{whole}, {_size(plan.weights_bytes)} without"),
        ("disk", f"{_size(plan.peak_bytes)} at the peak; {_size(plan.free_bytes)} free for {plan.folder}"),
    ]


def notes(run: "DryRun", recipe: Recipe, accelerator: Any) -> list[str]:
    """What the figures leave out."""
    found = []
    if run.text.device_count > 1:
        found.append(
            "All was measured on one device: the exchange of gradients takes more time, and under DDP memory for a "
            f"second copy of them, {_size(run.memory.gradient_bytes)}."
        )
    if accelerator is not None and is_sharded(accelerator):
        found.append("Memory is that of a whole copy of the model; sharding divides all but the activations.")
    if recipe.compile:
        found.append("Time and memory were measured without torch.compile, which needs minutes to start.")
    if recipe.gradient_checkpointing:
        found.append("The counted FLOPs hold the second forward pass of gradient checkpointing.")
    if run.checkpoints is not None:
        found.append(
            "A validation with a new best writes one more checkpoint where none is due. Bytes are those of weights and "
            "optimizer; tokenizer and JSON files come on top."
        )
    return found


def warnings(run: "DryRun", recipe: Recipe, rule: CheckpointConfig | None) -> list[str]:
    """What will go wrong, and what to do."""
    text, memory, plan = run.text, run.memory, run.checkpoints
    found = []
    if text.batches_per_update % text.device_count:
        found.append(
            f"{text.batches_per_update} batches an update cannot be shared evenly by {text.device_count} devices: some "
            "wait for the others."
        )
    less = "Lower `max_batch_tokens`, or set `gradient_checkpointing`."
    if run.time is None:
        found.append(
            f"A batch of {memory.largest_rows} pairs of {memory.largest_src} source and {memory.largest_tgt} target "
            f"tokens does not fit into the memory of {memory.device}. {less}"
        )
    elif memory.available_bytes is not None and memory.total_bytes > memory.available_bytes:
        found.append(
            f"{_size(memory.total_bytes)} of memory are needed, but {memory.device} has "
            f"{_size(memory.available_bytes)}. {less}"
        )
    if recipe.max_minutes is not None and run.time is not None and run.time.hours * 60 > recipe.max_minutes:
        reached = int(recipe.max_minutes * 60 / run.time.mean_s)
        found.append(
            f"The clock (`max_minutes` {recipe.max_minutes:g}) ends the run after about {reached:,} of {run.updates:,} "
            "updates."
        )
    if plan is not None and rule is not None:
        if plan.free_bytes < plan.peak_bytes:
            found.append(
                f"The checkpoints need {_size(plan.peak_bytes)} at their peak, but the disk of {plan.folder} has only "
                f"{_size(plan.free_bytes)} free. Make room, or lower `keep_last`."
            )
        if len(plan.written) < rule.average_last:
            found.append(
                f"{rule.average_last} checkpoints are to be averaged, but the run writes only {len(plan.written)}. "
                "Lower `every_updates` or `average_last`."
            )
        if rule.every_minutes is not None and run.time is None:
            found.append("Checkpoints by the clock (`every_minutes`) are not in the plan: no time was measured.")
    return found


def _count(number: int, unit: str, units: str | None = None) -> str:
    return f"{number:,} {unit if number == 1 else units or unit + 's'}"


def _size(count: int) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:,.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:,.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:,.3g} ms"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 1 else f"{hours:,.1f} h"


def _power(number: float) -> str:
    """3.28e18 for 3.28 * 10^18."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _updates(numbers: list[int]) -> str:
    shown = [f"{number:,}" for number in numbers]
    if len(shown) > 12:
        shown = [*shown[:3], "...", *shown[-3:]]
    return f"update{'s' if len(numbers) > 1 else ''} {', '.join(shown)}"
