"""Table 1 of the paper as one experiment: what is measured, the slopes, where attention overtakes, and its text.

Letters: n length, d width, k kernel, r neighbourhood.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .complexity import (
    FORMULAS,
    LAYER_TYPES,
    RECURRENT,
    SELF_ATTENTION,
    LayerCount,
    PowerLaw,
    count_layer,
    fit_power_law,
    overtaking_point,
)
from .layer_costs import CORE, LAYER, PARTS, BenchSettings, Measurement, is_thread_time, measure_layers
from .layer_paths import path_length, sequential_steps

LENGTH, WIDTH = "n", "d"
TIME, MEMORY = "time", "memory"
Rows = list[tuple[str, ...]]  # cells of a table, its head first


@dataclass(frozen=True)
class Slope:
    """An exponent that was fitted.

    Args:
        kind, part (`str`): of layer. axis (`str`): "n" or "d", what grows. measure (`str`): "time" or "memory".
        law (`PowerLaw`): the fit. paper (`int`, *optional*): Table 1's exponent of operations; None for memory, and
            for a whole layer of attention, whose projections of order n d^2 the table leaves out.
    """

    kind: str
    part: str
    axis: str
    measure: str
    law: PowerLaw
    paper: int | None


@dataclass(frozen=True)
class Overtaking:
    """From which length on a layer of self-attention takes longer than the recurrent one.

    Args:
        part (`str`): "core" or "layer" of self-attention. measured (`float`, *optional*): n, between measured points;
            None where they do not cross in the range. counted (`float`): n at which the multiply-adds as built are
            equal. paper (`int`): n = d, at which n^2 d = n d^2.
    """

    part: str
    measured: float | None
    counted: float
    paper: int


@dataclass(frozen=True)
class Connection:
    """Steps and path of a layer type, counted and found on the layer itself.

    Args:
        length (`int`): n. counted (`LayerCount`): by formula. steps (`int`): longest chain of products found.
        path (`int`): found by gradient.
    """

    kind: str
    length: int
    counted: LayerCount
    steps: int
    path: int


@dataclass(frozen=True)
class ComplexityStudy:
    """The whole experiment; `str()` gives it for reading, `to_dict()` for a file.

    Args:
        settings (`BenchSettings`). width (`int`): d while n grows. length (`int`): n while d grows.
        over_length, over_width (`list[Measurement]`). fit_from (`int`): least n in the fits over n.
        slopes (`list[Slope]`), overtaking (`list[Overtaking]`), connections (`list[Connection]`).
        counts (`dict[str, LayerCount]`): multiply-adds at `length` and `width`, by layer type.
        clock (`str`): which time was taken. machine (`str`): on what.
    """

    settings: BenchSettings
    width: int
    length: int
    fit_from: int
    over_length: list[Measurement]
    over_width: list[Measurement]
    slopes: list[Slope]
    overtaking: list[Overtaking]
    connections: list[Connection]
    counts: dict[str, LayerCount]
    clock: str
    machine: str

    def slope(self, kind: str, part: str, axis: str, measure: str = TIME) -> Slope | None:
        """One of the slopes; None where it could not be fitted."""
        return next(
            (s for s in self.slopes if (s.kind, s.part, s.axis, s.measure) == (kind, part, axis, measure)), None
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values: seconds, bytes, multiply-adds."""
        return {"formulas": {kind: asdict(FORMULAS[kind]) for kind in LAYER_TYPES}, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def study_complexity(
    lengths: list[int],
    widths: list[int],
    width: int,
    length: int,
    settings: BenchSettings,
    fit_from: int = 256,
    parts: tuple[tuple[str, str], ...] = PARTS,
) -> ComplexityStudy:
    """Measure the layers of Table 1 over n at a fixed d, and over d at a fixed n.

    Args:
        lengths (`list[int]`): n, each measured at d = `width`. widths (`list[int]`): d, each at n = `length`.
        settings (`BenchSettings`): layers and measuring.
        fit_from (`int`): lengths below it are measured and drawn, but not fitted: there the fixed cost of a call shows,
            and the projections of self-attention outweigh its core.
        parts: what is measured, see `layer_costs.PARTS`.

    Returns:
        `ComplexityStudy`.

    Raises:
        ValueError: too few sizes for a fit, a width that heads do not divide, or too little memory for a size.

    Source: Vaswani et al. 2017, Table 1 and section 4.
    """
    lengths, widths = sorted(set(lengths)), sorted(set(widths))
    if len([n for n in lengths if n >= fit_from]) < 2:
        raise ValueError(f"A fit over n needs at least two lengths from {fit_from} on, got {lengths}.")
    if len(widths) < 2:
        raise ValueError(f"A fit over d needs at least two widths, got {widths}.")
    sizes = list(dict.fromkeys([*((n, width) for n in lengths), *((length, d) for d in widths)]))
    found = measure_layers(sizes, settings, parts)
    over_length = [m for m in found if m.width == width and m.length in lengths]
    over_width = [m for m in found if m.length == length and m.width in widths]
    slopes = []
    for axis, rows in ((LENGTH, [m for m in over_length if m.length >= fit_from]), (WIDTH, over_width)):
        for kind, part in parts:
            own = [m for m in rows if (m.kind, m.part) == (kind, part)]
            x = [float(m.length if axis == LENGTH else m.width) for m in own]
            is_tabled = part == CORE or (kind, CORE) not in PARTS
            paper = FORMULAS[kind].exponents[axis == WIDTH] if is_tabled else None
            slopes.append(Slope(kind, part, axis, TIME, fit_power_law(x, [m.seconds for m in own]), paper))
            peaks = [float(m.peak_bytes) for m in own if m.peak_bytes]
            if len(peaks) == len(own):
                slopes.append(Slope(kind, part, axis, MEMORY, fit_power_law(x, peaks), None))
    device = torch.device(settings.device)
    near = max(33, 2 * settings.window - 1)  # long enough for more than one layer of each kind
    connections = [
        Connection(
            kind,
            near,
            count_layer(kind, near, settings.head_width, settings.kernel, settings.window),
            sequential_steps(kind, near, settings),
            path_length(kind, near, settings),
        )
        for kind in LAYER_TYPES
    ]
    return ComplexityStudy(
        settings=settings,
        width=width,
        length=length,
        fit_from=fit_from,
        over_length=over_length,
        over_width=over_width,
        slopes=slopes,
        overtaking=_overtaking(over_length, width),
        connections=connections,
        counts={kind: count_layer(kind, length, width, settings.kernel, settings.window) for kind in LAYER_TYPES},
        clock="processor time of one thread" if is_thread_time(device) else "wall-clock time",
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}, {_threads()}",
    )


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread" if count == 1 else f"{count} threads"


def _overtaking(rows: list[Measurement], width: int) -> list[Overtaking]:
    def seconds(kind: str, part: str) -> list[float]:
        return [m.seconds for m in rows if (m.kind, m.part) == (kind, part)]

    lengths = [float(m.length) for m in rows if (m.kind, m.part) == (RECURRENT, LAYER)]
    result = []
    # 2 n^2 d [+ 4 n d^2] against the LSTM's 8 n d^2.
    for part, counted in ((CORE, 4.0 * width), (LAYER, 2.0 * width)):
        own = seconds(SELF_ATTENTION, part)
        if own and lengths:
            crossing = overtaking_point(lengths, own, seconds(RECURRENT, LAYER))
            result.append(Overtaking(part, crossing, counted, width))
    return result


# --------------------------------------------------------------------------- text
def _lines(study: ComplexityStudy) -> list[str]:
    k, r = study.settings.kernel, study.settings.window
    near = study.connections[0].length
    formulas: Rows = [
        ("layer", "operations", "sequential", "path", f"steps found, n={near}", "path found", "path counted")
    ]
    for one in study.connections:
        formula = FORMULAS[one.kind]
        found = (str(one.steps), str(one.path), str(one.counted.path))
        formulas.append((one.kind, formula.operations, formula.sequential, formula.path, *found))
    counts: Rows = [("layer", "table", "core", "projections")]
    counts += [(kind, f"{c.formula:,}", f"{c.core:,}", f"{c.projections:,}") for kind, c in study.counts.items()]
    slopes: Rows = [("layer", "part", "time over n", "time over d", "memory over n", "memory over d")]
    for kind, part in dict.fromkeys((s.kind, s.part) for s in study.slopes):
        cells = [_exponent(study.slope(kind, part, a, m)) for m in (TIME, MEMORY) for a in (LENGTH, WIDTH)]
        slopes.append((kind, part, *cells))
    crossings: Rows = [("self-attention", "measured", "by multiply-adds as built", "by the table (n = d)")]
    for crossing in study.overtaking:
        measured = "not in this range" if crossing.measured is None else f"{crossing.measured:.0f}"
        crossings.append((crossing.part, measured, f"{crossing.counted:.0f}", str(crossing.paper)))
    passes = "forward and backward" if study.settings.backward else "forward"
    how = f"ms and peak MiB of a {passes} pass; {study.clock}, {study.machine}"
    return [
        f"Table 1, k = {k}, r = {r}. Steps found: the longest chain of matrix products. Path found: layers (recurrent: "
        "steps) until the last position depends on the first; the kernels are contiguous, the table's are dilated.",
        *_aligned(formulas),
        "",
        f"Multiply-adds at n = {study.length}, d = {study.width}: the table's product, the layer's own core, its "
        "projections (all of order n d^2)",
        *_aligned(counts),
        "",
        f"Measured over n at d = {study.width}: {how}",
        *_aligned(_measured(study.over_length, LENGTH)),
        "",
        f"Measured over d at n = {study.length}: {how}",
        *_aligned(_measured(study.over_width, WIDTH)),
        "",
        f"Fitted exponents; over n from n = {study.fit_from} on. In brackets those of the table.",
        *_aligned(slopes),
        "",
        "Self-attention takes longer than the recurrent layer from this n on",
        *_aligned(crossings),
    ]


def _measured(found: list[Measurement], axis: str) -> Rows:
    sizes = list(dict.fromkeys(m.length if axis == LENGTH else m.width for m in found))
    rows: Rows = [("layer", "part", "", *(f"{axis}={size}" for size in sizes))]
    for kind, part in dict.fromkeys((m.kind, m.part) for m in found):
        own = [m for m in found if (m.kind, m.part) == (kind, part)]
        rows.append((kind, part, "ms", *(f"{1000 * m.seconds:.3g}" for m in own)))
        if all(m.peak_bytes is not None for m in own):
            rows.append(("", "", "MiB", *(f"{(m.peak_bytes or 0) / 2**20:.3g}" for m in own)))
    return rows


def _exponent(slope: Slope | None) -> str:
    if slope is None:
        return "not measured"
    paper = "" if slope.paper is None else f" ({slope.paper})"
    return f"{slope.law.exponent:.2f} ± {slope.law.error:.2f}{paper}"


def _aligned(rows: Rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
