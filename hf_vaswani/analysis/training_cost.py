"""Table 2 of the paper: what a training costs, by the paper's method and by count, for any run and device."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..configuration_vaswani import VaswaniConfig
from ..training.dry_run_cost import PAPER_RUNS, SUSTAINED_TFLOPS, count_flops, paper_flops, sustained_tflops

PAPER_DEVICE, PAPER_DEVICE_COUNT = "P100", 8
# Published peaks in TFLOPS without sparsity: half precision with tensor cores, plain float32. A run sustains less.
PEAK_TFLOPS = {
    "T4": (65.0, 8.1),
    "V100": (125.0, 15.7),
    "A100": (312.0, 19.5),
    "L4": (121.0, 30.3),
    "H100": (989.0, 67.0),
    "H200": (989.0, 67.0),
}


@dataclass(frozen=True)
class PublishedCost:
    """A row of Table 2.

    Args:
        flops (`float`): training cost as printed. bleu_en_de, bleu_en_fr (`float`): tokenised BLEU on newstest2014, for
            En-De compound-split.

    Source: Vaswani et al. 2017, Table 2.
    """

    flops: float
    bleu_en_de: float
    bleu_en_fr: float


TABLE_2 = {"base": PublishedCost(3.3e18, 27.3, 38.1), "big": PublishedCost(2.3e19, 28.4, 41.8)}


@dataclass(frozen=True)
class CountedCost:
    """Operations of a training, counted; a multiply-add is two.

    Args:
        parameters, vocab_size (`int`): of the model; the larger side's vocabulary.
        updates (`int`). pairs (`int`), src_length, tgt_length (`int`): of an update, and tokens of each pair.
        update_flops (`float`): of the matrix products of an update, forward and backward.
    """

    parameters: int
    vocab_size: int
    updates: int
    pairs: int
    src_length: int
    tgt_length: int
    update_flops: float

    @property
    def flops(self) -> float:
        """Of the whole training."""
        return self.update_flops * self.updates


@dataclass(frozen=True)
class CostRow:
    """A run in the table.

    Args:
        name (`str`): of the run. device (`str`, *optional*), device_count (`int`): on what.
        hours (`float`, *optional*), hours_of (`str`): how long, and how that is known.
        sustained_tflops (`float`, *optional*), sustained_of (`str`): of one device, and how that is known.
        counted (`float`): operations by count. published (`PublishedCost`, *optional*): as the paper prints it.
    """

    name: str
    counted: float
    device: str | None = None
    device_count: int = PAPER_DEVICE_COUNT
    hours: float | None = None
    hours_of: str = ""
    sustained_tflops: float | None = None
    sustained_of: str = ""
    published: PublishedCost | None = None

    @property
    def paper_method(self) -> float | None:
        """Time x devices x sustained rate; None without both."""
        if self.hours is None or self.sustained_tflops is None:
            return None
        return paper_flops(self.hours, self.device_count, self.sustained_tflops)

    @property
    def counted_share(self) -> float | None:
        """Counted operations as a share of the paper's method: what the matrix products made of that rate."""
        return None if self.paper_method is None else self.counted / self.paper_method

    @property
    def hours_at_rate(self) -> float | None:
        """Hours that the counted operations take at the sustained rate: the least time, if that rate is kept."""
        if self.sustained_tflops is None:
            return None
        return self.counted / (self.device_count * self.sustained_tflops * 1e12) / 3600

    def to_dict(self) -> dict[str, Any]:
        """As plain values: hours, TFLOPS, operations, shares from 0 to 1."""
        own = {name: getattr(self, name) for name in ("paper_method", "counted_share", "hours_at_rate")}
        return asdict(self) | own


def count_training(
    config: VaswaniConfig,
    updates: int,
    src_tokens: int = 25_000,
    tgt_tokens: int = 25_000,
    src_length: int = 32,
    tgt_length: int = 32,
    gradient_checkpointing: bool = False,
) -> CountedCost:
    """Count the operations of a training without its text: every pair is of the same length, and updates are full.

    Args:
        config (`VaswaniConfig`): the model. updates (`int`).
        src_tokens, tgt_tokens (`int`): of an update, padding included. src_length, tgt_length (`int`): tokens of a
            pair, end tokens included. They change little: only attention's own products grow with length.
        gradient_checkpointing (`bool`): count the second forward pass too.

    Returns:
        `CountedCost`: by `count_flops` on a model of that size, one pair, times the pairs of an update.

    Raises:
        ValueError: a number below 1, or a pair longer than an update.
    """
    from transformers.initialization import no_init_weights

    from ..modeling_vaswani import VaswaniForConditionalGeneration

    numbers = {"updates": updates, "src_length": src_length, "tgt_length": tgt_length}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    pairs = min(src_tokens // src_length, tgt_tokens // tgt_length)
    if pairs < 1:
        raise ValueError(
            f"A pair of {src_length} source and {tgt_length} target tokens does not fit into an update of {src_tokens} "
            f"and {tgt_tokens}."
        )
    with no_init_weights():  # the values do not matter to the count, and drawing them takes longer than it
        model = VaswaniForConditionalGeneration(config)
    model.tie_weights()
    model.train()
    if gradient_checkpointing:
        model.activation_checkpointing_enable()
    # Any id but that of padding, which would be taken for padding.
    real = 1 if config.pad_token_id == 0 else 0
    source, target = (torch.full((1, n), real) for n in (src_length, tgt_length))  # [1, S], [1, T]
    update_flops = float(pairs * count_flops(model, {"input_ids": source, "labels": target}))
    return CountedCost(
        parameters=model.num_parameters(),
        vocab_size=max(config.vocab_size, config.source_vocab_size or 0),
        updates=updates,
        pairs=pairs,
        src_length=src_length,
        tgt_length=tgt_length,
        update_flops=update_flops,
    )


def paper_rows(src_length: int = 32, tgt_length: int = 32) -> list[CostRow]:
    """Table 2's two rows, base and big, with what is counted for them at 25,000 tokens a side and 37,000 pieces.

    Args:
        src_length, tgt_length (`int`): tokens of a pair; the paper does not say.

    Returns:
        `list[CostRow]`: base, big.

    Source: Vaswani et al. 2017, Table 2, sections 5.1, 5.2 and 6.1.
    """
    rows = []
    for size, published in TABLE_2.items():
        hours, updates = PAPER_RUNS[size]
        counted = count_training(
            VaswaniConfig.from_preset(size), updates, src_length=src_length, tgt_length=tgt_length
        ).flops
        rate, rate_of = device_rate(PAPER_DEVICE)
        rows.append(
            CostRow(
                name=f"the paper's {size}",
                counted=counted,
                device=PAPER_DEVICE,
                hours=hours,
                hours_of="the paper's",
                sustained_tflops=rate,
                sustained_of=rate_of,
                published=published,
            )
        )
    return rows


def device_rate(
    name: str, precision: str | None = None, sustained: float | None = None, utilisation: float | None = None
) -> tuple[float, str]:
    """What one device sustains, and how that is known.

    A published peak is no sustained rate, and is never taken for one: for the devices that came after the paper a
    measured rate, or a measured share of the peak, has to be given.

    Args:
        name (`str`): such as "P100" or "a100"; or "cpu", "cuda", "cuda:1", which are measured here by a matrix product.
        precision (`str`, *optional*): "bf16", "fp16", or another for float32.
        sustained (`float`, *optional*): in TFLOPS, if known. utilisation (`float`, *optional*): share of the published
            peak, above 0 and at most 1.

    Returns:
        `tuple[float, str]`: TFLOPS, and the words for it.

    Raises:
        ValueError: a device that is not known here, or one whose sustained rate is not.

    Source: Vaswani et al. 2017, footnote to section 6.1, for K80, K40, M40 and P100.
    """
    if sustained is not None and utilisation is not None:
        raise ValueError("A sustained rate and a share of the peak say the same thing twice: give one of them.")
    if sustained is not None:
        if not 0 < sustained < float("inf"):
            raise ValueError(f"A sustained rate must be a number above 0, got {sustained}.")
        return sustained, "as given"
    known = name.upper()
    if known in PEAK_TFLOPS:
        is_half = precision in ("bf16", "fp16")
        peak, kind = PEAK_TFLOPS[known][not is_half], "half-precision" if is_half else "float32"
        if utilisation is None:
            raise ValueError(
                f"What {known} sustains is not published: {peak:g} TFLOPS is its {kind} peak, which no training "
                "reaches. Give a measured rate (--sustained-tflops) or a measured share of the peak (--utilisation)."
            )
        if not 0 < utilisation <= 1:
            raise ValueError(f"A share of the peak is above 0 and at most 1, got {utilisation}.")
        return peak * utilisation, f"{100 * utilisation:g} % of the published {kind} peak of {peak:g}"
    if utilisation is not None:
        raise ValueError(f"No peak is on record for {name}, so a share of it means nothing: give a sustained rate.")
    if known in SUSTAINED_TFLOPS:
        return SUSTAINED_TFLOPS[known], "the paper's figure"
    try:
        here = torch.device(name.lower())
        torch.zeros(1, device=here)
    except (RuntimeError, AssertionError, NotImplementedError):
        names = ", ".join([*SUSTAINED_TFLOPS, *PEAK_TFLOPS])
        raise ValueError(
            f"Nothing is known of a device {name!r}. On record: {names}; measured here: cpu"
            f"{', cuda' if torch.cuda.is_available() else ''}. For any other give its rate (--sustained-tflops)."
        ) from None
    return sustained_tflops(here, precision)
