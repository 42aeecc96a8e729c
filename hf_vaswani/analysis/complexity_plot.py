"""The measured Table 1 drawn: time and memory of its layers over length and width, on logarithmic axes."""

from typing import Any

from .attention import require_matplotlib
from .complexity import CONVOLUTIONAL, RECURRENT, RESTRICTED, SELF_ATTENTION
from .complexity_study import LENGTH, MEMORY, TIME, WIDTH, ComplexityStudy
from .layer_costs import CORE, LAYER, Measurement

# Colour, marker and line. In grey the markers tell the layers apart; where a core is measured too, the whole layer is
# dashed with hollow markers.
_STYLES = {
    (SELF_ATTENTION, CORE): ("#0072B2", "o", "-"),
    (SELF_ATTENTION, LAYER): ("#0072B2", "o", "--"),
    (RECURRENT, LAYER): ("#D55E00", "s", "-"),
    (CONVOLUTIONAL, LAYER): ("#111111", "^", "-."),
    (RESTRICTED, CORE): ("#009E73", "D", "-"),
    (RESTRICTED, LAYER): ("#009E73", "D", "--"),
}
_NAMES = {
    (SELF_ATTENTION, CORE): "self-attention, core",
    (SELF_ATTENTION, LAYER): "self-attention, layer",
    (RECURRENT, LAYER): "recurrent (LSTM)",
    (CONVOLUTIONAL, LAYER): "convolutional",
    (RESTRICTED, CORE): "restricted, core",
    (RESTRICTED, LAYER): "restricted, layer",
}


def draw_complexity(study: ComplexityStudy) -> Any:
    """Draw time and memory over n and over d, with the fitted exponents and where self-attention overtakes.

    Args:
        study (`ComplexityStudy`).

    Returns:
        `matplotlib.figure.Figure`, outside of pyplot.

    Raises:
        ImportError: without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 11), layout="constrained")
    FigureCanvasAgg(figure)
    measures = [TIME] + [MEMORY] * any(s.measure == MEMORY for s in study.slopes)
    panels = figure.subplots(len(measures), 2, squeeze=False)
    for row, measure in enumerate(measures):
        _panel(panels[row][0], study, study.over_length, LENGTH, measure)
        _panel(panels[row][1], study, study.over_width, WIDTH, measure)
    _mark_overtaking(panels[0][0], study)
    passes = "forward and backward pass" if study.settings.backward else "forward pass"
    s = study.settings
    figure.suptitle(
        f"Table 1 measured: {passes}, batch {s.batch}, k = {s.kernel}, r = {s.window}, heads of {s.head_width} "
        f"({study.machine}, {study.clock})",
        fontsize="medium",
    )
    return figure


def _panel(axes: Any, study: ComplexityStudy, rows: list[Measurement], axis: str, measure: str) -> None:
    values = {}
    for key, (colour, marker, line) in _STYLES.items():
        own = [m for m in rows if (m.kind, m.part) == key]
        slope = study.slope(*key, axis, measure)
        if not own or slope is None:
            continue
        x = [m.length if axis == LENGTH else m.width for m in own]
        y = [1000 * m.seconds if measure == TIME else (m.peak_bytes or 0) / 2**20 for m in own]
        values[key] = (min(y), max(y))
        is_layer_of_core = line == "--"
        axes.plot(
            x,
            y,
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=6,
            markerfacecolor="white" if is_layer_of_core else colour,
            label=f"{_NAMES[key]}: ${axis}^{{{slope.law.exponent:.2f}}}$",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({m.length if axis == LENGTH else m.width for m in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    low, high = min(v[0] for v in values.values()), max(v[1] for v in values.values())
    axes.set_ylim(low / 1.6, high * (high / low) ** 0.55)  # room for the legend above the lines
    fixed = f"d = {study.width}" if axis == LENGTH else f"n = {study.length}"
    fitted = f", fitted from n = {study.fit_from}" if axis == LENGTH else ""
    axes.set_xlabel(f"length n (at {fixed})" if axis == LENGTH else f"width d (at {fixed})")
    axes.set_ylabel("milliseconds of a pass" if measure == TIME else "peak MiB beyond input and weights")
    axes.set_title(f"{measure} over {axis}{fitted}", fontsize="medium")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend(loc="upper left", fontsize="small", handlelength=4, ncols=1)


def _mark_overtaking(axes: Any, study: ComplexityStudy) -> None:
    low, _ = axes.get_ylim()
    lengths = [m.length for m in study.over_length]
    if min(lengths) <= study.width <= max(lengths):
        axes.axvline(study.width, color="#777777", linestyle=":", linewidth=1)
        axes.annotate("n = d", (study.width, low), xytext=(3, 56), textcoords="offset points", fontsize="small")
    for one in study.overtaking:
        if one.measured is not None:
            axes.axvline(one.measured, color="#0072B2", linestyle=":", linewidth=1)
            axes.annotate(
                f"{one.part} overtakes\nrecurrent, n = {one.measured:.0f}",
                (one.measured, low),
                xytext=(3, 4 if one.part == CORE else 30),
                textcoords="offset points",
                fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
            )
