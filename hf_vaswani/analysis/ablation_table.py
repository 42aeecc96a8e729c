"""Table 3 of a sweep beside the paper's: means over seeds, intervals, and which of the paper's orderings hold."""

import math
import os
import statistics
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .ablation import Measured, Sweep
from .ablation_rows import PAPER

_RESAMPLES = 1000
_SIGNIFICANT = 0.05
_RESAMPLING_SEED = "12345"


@dataclass
class TableRow:
    """One row: means over the seeds that were measured.

    Args:
        row (`str`): of Table 3. seeds (`list[int]`): measured ones. change (`str`): fields that differ from the base.
        perplexity, bleu (`float`): means. perplexity_spread, bleu_spread (`float`, *optional*): standard deviations
            over seeds; None for a single one.
        bleu_interval (`float`): half the width of the 95 % interval of a seed's BLEU under resampling of the lines,
            averaged over seeds.
        p_values (`list[float]`, *optional*): paired bootstrap of each seed against the base of the same seed; None for
            the base itself.
        parameters (`int`): of the model. updates (`int`): of a run. seconds (`float`): of training, mean.
    """

    row: str
    seeds: list[int]
    change: str
    perplexity: float
    perplexity_spread: float | None
    bleu: float
    bleu_spread: float | None
    bleu_interval: float
    p_values: list[float] | None
    parameters: int
    updates: int
    seconds: float


def table_rows(sweep: Sweep) -> list[TableRow]:
    """The table of all that a sweep has measured, in the paper's order.

    Choice: lines are resampled seed by seed, and a row is compared with the base of the same seed; the spread over
    seeds, which resampling cannot see, stands beside it.

    Source: Koehn 2004 (paired bootstrap), by sacreBLEU's own functions with 1,000 samples.
    """
    by_row: dict[str, list[Measured]] = {}
    for one in sweep.measured():
        by_row.setdefault(one.row, []).append(one)
    references, rows = sweep.references(), []
    tests = {seed: _bootstrap(sweep, references, by_row, seed) for seed in sweep.seeds}
    for row, runs in by_row.items():
        found = [tests[one.seed][row] for one in runs]
        rows.append(
            TableRow(
                row=row,
                seeds=[one.seed for one in runs],
                change=", ".join(f"{name} {_short(value)}" for name, value in runs[0].model.items()),
                perplexity=statistics.fmean(one.perplexity for one in runs),
                perplexity_spread=_spread([one.perplexity for one in runs]),
                bleu=statistics.fmean(one.bleu for one in runs),
                bleu_spread=_spread([one.bleu for one in runs]),
                bleu_interval=statistics.fmean(interval for interval, _ in found),
                p_values=None if row == "base" else [p for _, p in found if p is not None],
                parameters=runs[0].parameters,
                updates=runs[0].updates,
                seconds=statistics.fmean(one.seconds for one in runs),
            )
        )
    return rows


def _bootstrap(
    sweep: Sweep, references: list[str], by_row: dict[str, list[Measured]], seed: int
) -> dict[str, tuple[float, float | None]]:
    """Half an interval and a p-value for each row measured with a seed; no p-value without that seed's base."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest, Result

    from ..evaluation.bleu import sacrebleu_tokenizer_for

    names = [row for row, runs in by_row.items() if any(one.seed == seed for one in runs)]
    has_base = "base" in names
    ordered = (["base"] if has_base else []) + [row for row in names if row != "base"]
    found: dict[str, tuple[float, float | None]] = {}
    if not ordered:
        return found
    metric = {"BLEU": BLEU(tokenize=sacrebleu_tokenizer_for(sweep.config.target_language), references=[references])}
    systems: list[tuple[str, Sequence[str]]] = [(row, sweep.hypotheses(row, seed)) for row in ordered]
    with _fixed_resampling():
        test = PairedTest(systems, metric, references=None, test_type="bs", n_samples=_RESAMPLES)
        _, scores = test()
    for row, result in zip(ordered, scores["BLEU"], strict=True):
        assert isinstance(result, Result)
        assert result.ci is not None
        p_value = None if row == "base" or not has_base else result.p_value
        found[row] = (float(result.ci), None if p_value is None else float(p_value))
    return found


@contextmanager
def _fixed_resampling() -> Any:
    """sacreBLEU takes the seed of its resampling from the environment."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = _RESAMPLING_SEED
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before


# --------------------------------------------------------------------------- orderings
@dataclass(frozen=True)
class Ordering:
    """Two rows that the paper puts in an order, and what the sweep says of it.

    Args:
        better, worse (`str`): rows, by the paper. measure (`str`): "perplexity" or "BLEU".
        verdict (`str`): "holds", "reversed", or "within noise": the means differ by less than two standard errors of
            their difference over seeds. difference (`float`): how much better `better` is here, in that measure.
    """

    better: str
    worse: str
    measure: str
    verdict: str
    difference: float


def orderings(rows: Sequence[TableRow]) -> list[Ordering]:
    """All orders of the paper that a table can speak to: each row against the base, and rows of one group.

    Args:
        rows (`Sequence[TableRow]`): of one sweep, with at least two seeds each; with one seed there is no spread to
            tell noise by, and every difference counts.
    """
    found = []
    for place, one in enumerate(rows):
        for other in rows[place + 1 :]:
            if one.row != "base" and one.row[:2] != other.row[:2]:
                continue
            for measure in ("perplexity", "BLEU"):
                theirs = _gain(measure, _paper(one.row, measure), _paper(other.row, measure))
                if theirs == 0:
                    continue
                better, worse = (one, other) if theirs > 0 else (other, one)
                name = measure.lower()
                difference = _gain(measure, getattr(better, name), getattr(worse, name))
                noise = 2 * math.hypot(_standard_error(better, name), _standard_error(worse, name))
                verdict = "within noise" if abs(difference) <= noise else "holds" if difference > 0 else "reversed"
                found.append(Ordering(better.row, worse.row, measure, verdict, difference))
    return found


def _paper(row: str, measure: str) -> float:
    return PAPER[row].perplexity if measure == "perplexity" else PAPER[row].bleu


def _gain(measure: str, one: float, other: float) -> float:
    """How much better the first is: lower perplexity, higher BLEU."""
    return other - one if measure == "perplexity" else one - other


def _standard_error(row: TableRow, name: str) -> float:
    spread = getattr(row, f"{name}_spread")
    return 0.0 if spread is None else spread / math.sqrt(len(row.seeds))


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


# --------------------------------------------------------------------------- text
def as_markdown(rows: Sequence[TableRow], signature: str) -> str:
    """The table, the paper's columns beside it, and which orderings hold."""
    lines = [
        "| row | change | PPL | BLEU | ± lines | p < 0.05 against base | parameters | paper: PPL | BLEU | 10^6 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        paper = PAPER[one.row]
        hits = "" if one.p_values is None else f"{sum(p < _SIGNIFICANT for p in one.p_values)} of {len(one.p_values)}"
        lines.append(
            f"| {one.row} | {one.change} | {_with_spread(one.perplexity, one.perplexity_spread)} | "
            f"{_with_spread(one.bleu, one.bleu_spread)} | {one.bleu_interval:.2f} | {hits} | {one.parameters:,} | "
            f"{paper.perplexity:.2f} | {paper.bleu:.1f} | {paper.parameters or ''} |"
        )
    lines += [
        "",
        f"Means over {max((len(one.seeds) for one in rows), default=0)} seed(s), ± their standard deviation. "
        '"± lines": half the 95 % interval of one seed\'s BLEU under resampling of the lines; p: paired bootstrap '
        f"against the base of the same seed, {_RESAMPLES:,} samples. BLEU: {signature}. PPL is per piece.",
        "",
        *orderings_text(orderings(rows)),
    ]
    return "\n".join(lines) + "\n"


def orderings_text(found: Sequence[Ordering]) -> list[str]:
    """What came of the paper's orderings, a line a verdict."""
    lines = []
    for verdict, words in (
        ("holds", "The paper's order holds"),
        ("reversed", "The order is the reverse of the paper's"),
        ("within noise", "The difference is within two standard errors"),
    ):
        of_it = [f"{one.better} over {one.worse} ({one.measure}, {one.difference:+.2f})" for one in found]
        chosen = [text for text, one in zip(of_it, found, strict=True) if one.verdict == verdict]
        lines.append(f"- {words}: {'; '.join(chosen) if chosen else 'nowhere'}.")
    return lines


def as_tsv(rows: Sequence[TableRow]) -> str:
    """The same numbers, unrounded, with tabs between."""
    names = ["row", "seeds", "perplexity", "perplexity_sd", "bleu", "bleu_sd", "bleu_ci", "p_values", "parameters"]
    names += ["updates", "seconds", "paper_perplexity", "paper_bleu", "paper_parameters_millions"]
    lines = ["\t".join(names)]
    for one in rows:
        paper = PAPER[one.row]
        values = [one.row, ",".join(map(str, one.seeds)), one.perplexity, one.perplexity_spread, one.bleu]
        values += [one.bleu_spread, one.bleu_interval, ",".join(f"{p:.4f}" for p in one.p_values or [])]
        values += [one.parameters, one.updates, one.seconds, paper.perplexity, paper.bleu, paper.parameters]
        lines.append("\t".join("" if value is None else str(value) for value in values))
    return "\n".join(lines) + "\n"


def as_data(rows: Sequence[TableRow], signature: str) -> dict[str, Any]:
    """The same as plain values, orderings included."""
    return {
        "bleu_signature": signature,
        "rows": [asdict(one) | {"paper": asdict(PAPER[one.row])} for one in rows],
        "orderings": [asdict(one) for one in orderings(rows)],
    }


def _with_spread(value: float, spread: float | None) -> str:
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
