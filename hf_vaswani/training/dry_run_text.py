"""What a dry run says to people: its figures line by line, what they leave out, and what will go wrong."""

from typing import TYPE_CHECKING, Any

from .checkpoint import RESUMABLE_KEPT, is_sharded
from .config import CheckpointConfig
from .dry_run_cost import PAPER_RUNS, SUSTAINED_TFLOPS, paper_flops
from .recipe import Recipe

if TYPE_CHECKING:
    from .dry_run import CheckpointPlan, DryRun, UpdateText
    from .dry_run_measure import MemoryNeed

Rows = list[tuple[str, str]]  # label and value


def lines(run: "DryRun") -> list[str]:
    """The whole, a figure a line, each with its unit."""
    text, weights = run.text, run.parameters
    rate = f"the rate rises until update {run.warmup_updates:,}"
    batches = f"{text.batches_per_epoch:,} batches / {_count(text.batches_per_update, 'batch', 'batches')} an update"
    frozen = "" if weights.trained == weights.total else "; the others are frozen"
    sections = {
        "Length": [
            ("updates", f"{run.updates:,} updates; {rate}"),
            ("an epoch", f"{run.updates_per_epoch:,} updates = {batches}, rounded up"),
            ("epochs", f"{run.epochs:,.2f} epochs"),
        ],
        "Text of an update": [
            ("source, at most", _product(text, text.src_limit, text.src_budget)),
            ("target, at most", _product(text, text.tgt_limit, text.tgt_budget)),
            ("source, on average", f"{text.src_tokens:,.0f} tokens, padding left out"),
            ("target, on average", f"{text.tgt_tokens:,.0f} tokens, padding left out"),
            ("padding", f"{100 * text.padding:.2f} % of all places"),
        ],
        "Parameters": [
            ("all", f"{weights.total:,} parameters"),
            ("embedding", f"{weights.embedding:,} parameters, pre-softmax matrix included"),
            ("other", f"{weights.other:,} parameters"),
            ("trained", f"{weights.trained:,} parameters{frozen}"),
        ],
        "Cost of the whole training": _cost(run),
        f"Memory of each device, as measured on {run.memory.device}": _memory(run.memory),
        "Time": _time(run),
        "Checkpoints": _checkpoints(run.checkpoints),
    }
    printed = ["Dry run: nothing was trained."]
    for title, rows in sections.items():
        printed += [title, *(f"  {label:<22} {value}" for label, value in rows)]
    return [*printed, *(f"Note: {one}" for one in run.notes), *(f"WARNING: {one}" for one in run.warnings)]


def _product(text: "UpdateText", limit: int, budget: int) -> str:
    empty = text.device_count * text.accumulation - text.batches_per_update
    less = f" - {empty} x {budget:,} tokens without a batch" if empty else ""
    devices, accumulated = _count(text.device_count, "device"), _count(text.accumulation, "batch", "batches")
    return f"{limit:,} tokens = {devices} x {budget:,} tokens a batch x {accumulated} accumulated{less}"


def _cost(run: "DryRun") -> Rows:
    cost = run.cost

    def by_paper(hours: float, count: int, devices: str, rate: float) -> str:
        flops = _power(paper_flops(hours, count, rate))
        return f"{flops} FLOPs = {_hours(hours)} x {devices} x {rate:.3g} TFLOPS sustained"

    rows = [("counted", f"{_power(cost.counted)} FLOPs in the matrix products, forward and backward, with padding")]
    if run.time is not None:
        count = run.text.device_count
        method = by_paper(run.time.hours, count, _count(count, "device"), cost.sustained_tflops)
        rows.append(("the paper's method", f"{method} ({cost.sustained_of})"))
    if cost.paper_size is not None:
        hours, updates = PAPER_RUNS[cost.paper_size]
        method = by_paper(hours, 8, "8 P100", SUSTAINED_TFLOPS["P100"])
        rows.append((f"the paper's {cost.paper_size} model", f"{method}, {updates:,} updates"))
    return rows


def _memory(memory: "MemoryNeed") -> Rows:
    shape = f"{memory.largest_rows:,} pairs x ({memory.largest_src} source + {memory.largest_tgt} target tokens)"
    activations, more = f"MiB not measured, of the largest batch: {shape}", "more than "
    if memory.activation_bytes is not None:
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
    if run.time is None:
        return [("an update", "not measured, in seconds: the memory does not suffice")]
    mean, step = _seconds(run.time.mean_s), _seconds(run.time.step_s)
    return [
        ("an update", f"{mean} on average; {step} of them are the optimizer's"),
        ("target tokens", f"{run.time.tgt_tokens_per_s:,.0f} tokens a second, over all devices"),
        ("the run", f"{_hours(run.time.hours)} = {run.updates:,} updates x {mean}"),
    ]


def _checkpoints(plan: "CheckpointPlan | None") -> Rows:
    if plan is None:
        return [("written", "0 checkpoints")]

    def some(numbers: list[int], rule: str = "") -> str:
        return f"{_count(len(numbers), 'checkpoint')}{rule}: {_updates(numbers)}"

    clock = "" if plan.every_minutes is None else f" or {plan.every_minutes:g} minutes"
    whole = f"{_size(plan.whole_bytes)} with the optimizer's state (newest {min(len(plan.kept), RESUMABLE_KEPT)})"
    return [
        ("written", some(plan.written, f", every {_count(plan.every_updates, 'update')}{clock} and after the last")),
        ("kept", some(plan.kept, " and the best")),
        ("averaged", some(plan.averaged) if plan.averaged else "0 checkpoints: the last weights are the run's model"),
        ("size of one", f"{whole}, {_size(plan.weights_bytes)} without"),
        ("disk", f"{_size(plan.peak_bytes)} at the peak; {_size(plan.free_bytes)} free for {plan.folder}"),
    ]


def notes(run: "DryRun", recipe: Recipe, accelerator: Any) -> list[str]:
    """What the figures leave out."""
    many, copies = run.text.device_count > 1, _size(run.memory.gradient_bytes)
    sharded = accelerator is not None and is_sharded(accelerator)
    possible = [
        (many, f"Measured on one device: exchanging gradients takes more time, and under DDP {copies} more memory."),
        (sharded, "Memory is that of a whole copy of the model; sharding divides all but the activations."),
        (recipe.compile, "Time and memory were measured without torch.compile, which needs minutes to start."),
        (recipe.gradient_checkpointing, "The FLOPs hold the second forward pass of gradient checkpointing."),
        (run.checkpoints is not None, "A validation with a new best may write one more checkpoint where none is due."),
    ]
    return [note for holds, note in possible if holds]


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
