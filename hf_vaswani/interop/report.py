"""What a conversion did, for people to read and for programs to load."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORT_FILE = "conversion.json"


@dataclass
class Parity:
    """One comparison of a converted model with what it came from.

    Args:
        against (`str`): the other side, as in "transformers 5.24.0, MarianMTModel".
        sentences (`int`): sources compared. source (`str`): where they are from.
        logit_difference (`float`, *optional*): the largest, over all columns of all sentences, in padded batches; None
            where the other side gives none.
        greedy_equal, beam_equal (`int`, *optional*): sentences with the same output; None where not compared.
        greedy_compared, beam_compared (`int`): sentences for that.
        ties (`int`): greedy outputs that part where two tokens are equally likely to within the tolerance; they count
            as equal.
        score_difference (`float`, *optional*): the largest difference between the scores of both sides' best beam-4
            outputs, both scored by the same model: 0 where the outputs are equal.
        log_prob_difference (`float`, *optional*): the largest of a token's log-probability, where logits are not given.
        length_ratio (`float`, *optional*): mean length of the converted model's greedy outputs over the original's.
    """

    against: str
    sentences: int
    source: str
    logit_difference: float | None = None
    greedy_equal: int | None = None
    greedy_compared: int = 0
    beam_equal: int | None = None
    beam_compared: int = 0
    ties: int = 0
    score_difference: float | None = None
    log_prob_difference: float | None = None
    length_ratio: float | None = None

    def lines(self) -> list[str]:
        """For people."""
        found = [f"against {self.against}, {self.sentences} sources ({self.source}):"]
        if self.logit_difference is not None:
            found.append(f"  largest logit difference, padded batches: {self.logit_difference:.2g}")
        if self.log_prob_difference is not None:
            found.append(f"  largest difference of a token's log-probability: {self.log_prob_difference:.2g}")
        if self.greedy_equal is not None:
            ties = f", {self.ties} of them but for a tie" if self.ties else ""
            found.append(f"  equal greedy outputs: {self.greedy_equal} of {self.greedy_compared}{ties}")
        if self.beam_equal is not None:
            found.append(f"  equal beam-4 outputs: {self.beam_equal} of {self.beam_compared}")
        if self.score_difference is not None:
            found.append(f"  largest difference of a beam-4 score: {self.score_difference:.2g}")
        if self.length_ratio is not None:
            found.append(f"  mean length ratio: {self.length_ratio:.3f}")
        return found


@dataclass
class Report:
    """The record of one conversion, also written beside the result as `conversion.json`.

    Args:
        direction (`str`): "import" or "export". kind (`str`): the other program. source, folder (`str`): from, to.
        tensors (`int`): mapped. parameters (`int`): of the model.
        options (`dict`): settings of the architecture that differ from the paper's base model, or of the format.
        choices (`list`): what was chosen where the source is silent, or filled in.
        losses (`list`): what does not survive.
        parities (`list[Parity]`): the proof.
    """

    direction: str
    kind: str
    source: str
    folder: str
    tensors: int
    parameters: int
    options: dict[str, Any] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    parities: list[Parity] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write `conversion.json` into a folder."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, default=str)
        (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")

    def text(self) -> str:
        """For people: a few lines for each part."""
        lines = [f"{self.direction} {self.kind}: {self.source} -> {self.folder}"]
        lines.append(f"tensors mapped: {self.tensors}; parameters: {self.parameters:,}")
        if self.options:
            lines.append("options: " + ", ".join(f"{name}={value!r}" for name, value in self.options.items()))
        for title, entries in (("chosen", self.choices), ("not carried over", self.losses)):
            lines += [f"{title}: {entry}" for entry in entries]
        for parity in self.parities:
            first, *rest = parity.lines()
            lines += [f"checked {first}", *rest]
        return "\n".join(lines)
