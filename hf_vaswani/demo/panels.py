"""The page's own pieces of HTML: candidates, alternatives, messages. All text that comes from outside is escaped."""

from collections.abc import Sequence
from html import escape

from .alternatives import Step
from .candidates import Found

# Runs once for the list of candidates; the buttons in it come and go.
CANDIDATES_JS = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-candidate]');
  if (button && button.getAttribute('aria-pressed') !== 'true') {
    trigger('click', {candidate: Number(button.dataset.candidate)});
  }
});
"""

# Runs once: Enter alone translates by Gradio's own doing, Ctrl-Enter (or the command key) by this. Gradio gives each
# button of a choice a group of its own, without a name: arrow keys would do nothing, and "0" would be all that is read.
PAGE_JS = """
const choices = '[id^="vw-kind-"], [id^="vw-layer-"], [id^="vw-head-"]';
new MutationObserver(() => {
  for (const one of document.querySelectorAll(choices)) {
    const title = one.querySelector('[data-testid="block-info"]');
    if (title && one.getAttribute('role') !== 'radiogroup') {
      one.setAttribute('role', 'radiogroup');
      one.setAttribute('aria-label', title.innerText.trim());
    }
  }
}).observe(document.body, {childList: true, subtree: true});
document.addEventListener('keydown', (event) => {
  const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (step && event.target.matches('input[type="radio"]') && event.target.closest(choices)) {
    const all = Array.from(event.target.closest(choices).querySelectorAll('input[type="radio"]'));
    const next = all[(all.indexOf(event.target) + step + all.length) % all.length];
    event.preventDefault();
    next.focus();
    next.click();
  }
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && event.target.closest('#vw-input')) {
    event.preventDefault();
    document.getElementById('vw-translate').click();
  }
});
"""


def message_html(text: str, is_fault: bool = False) -> str:
    """A sentence for the reader, which screen readers say at once."""
    if not text:
        return ""
    kind = "fault" if is_fault else "hint"
    return f'<p class="vw-{kind}" role="{"alert" if is_fault else "status"}">{escape(text)}</p>'


def candidates_html(found: Found) -> str:
    """A table of candidates, best first; a button in each row chooses the one that is looked at.

    Args:
        found (`Found`): what the search found.
    """
    rows = []
    for number, one in enumerate(found.candidates):
        is_chosen = number == found.chosen
        end = "" if one.is_complete else ' <span class="vw-open">(stopped before its end)</span>'
        text = escape(one.text) if one.text.strip() else "<i>(empty)</i>"
        rows.append(
            f'<tr class="{"vw-chosen" if is_chosen else ""}"><td>{number + 1}</td>'
            f'<td class="vw-text"><button type="button" class="vw-pick" data-candidate="{number}" '
            f'aria-pressed="{"true" if is_chosen else "false"}" dir="auto">{text}{end}</button></td>'
            f"<td>{_signed(one.score)}</td><td>{_signed(one.log_prob)}</td><td>{len(one.ids)}</td></tr>"
        )
    notes = [*found.notes, f"{len(found.source_ids):,} source pieces, searched in {found.seconds:.2f} s."]
    return (
        '<div class="vw-scroll"><table class="vw-table vw-candidates"><caption>Candidates, best first. Choose one to '
        'look inside.</caption><thead><tr><th scope="col">#</th><th scope="col" class="vw-text">translation</th>'
        '<th scope="col" title="log-probability divided by the length penalty">score</th>'
        '<th scope="col" title="log-probability in nats">log P</th>'
        '<th scope="col" title="pieces, the end token included">pieces</th></tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="vw-note">{escape(" ".join(notes))}</p>'
    )


def alternatives_html(steps: Sequence[Step]) -> str:
    """A table with a row for each step: the piece that stands there, and the likeliest ones with their probabilities.

    Args:
        steps (`Sequence[Step]`): of one candidate.
    """
    rows = []
    for number, step in enumerate(steps, start=1):
        cells = []
        for place, (piece, prob) in enumerate(step.alternatives, start=1):
            mark = " vw-same" if place == step.rank and piece == step.piece else ""
            cells.append(f'<li class="vw-option{mark}">{_piece(piece)} {_percent(prob)}</li>')
        rows.append(
            f'<tr><td>{number}</td><th scope="row">{_piece(step.piece)}</th><td>{_percent(step.prob)}</td>'
            f'<td>{step.rank:,}</td><td class="vw-options"><ol>{"".join(cells)}</ol></td></tr>'
        )
    return (
        '<div class="vw-scroll" tabindex="0" role="region" aria-label="alternatives at each step">'
        '<table class="vw-table vw-steps"><caption>Alternatives at each step of the chosen candidate, given all '
        'pieces before it.</caption><thead><tr><th scope="col">step</th><th scope="col">chosen</th>'
        '<th scope="col">share</th><th scope="col">rank</th>'
        '<th scope="col" class="vw-options">likeliest pieces, best first</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _piece(text: str) -> str:
    return f'<span class="vw-p" dir="auto">{escape(text)}</span>'


def _signed(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _percent(prob: float) -> str:
    return f'<span class="vw-share">{100 * prob:.1f} %</span>'


CSS = """
.vw-title { font-size: 1.5rem; font-weight: 700; margin: 0; }
.vw-head { margin: 0; font-size: 1.15rem; font-weight: 700; overflow-wrap: anywhere; }
#vw-controls { align-items: center; }
#vw-translate { flex: 0 1 11rem; }
.vw-fault { border: 1px solid #b42318; border-left-width: 6px; background: #fff1ef; color: #7a1a12;
  padding: .6rem .8rem; border-radius: 4px; margin: 0 0 .4rem; overflow-wrap: anywhere; }
.vw-hint { border: 1px solid #5b6b82; border-left-width: 6px; background: #f1f5fb; color: #1f2d42;
  padding: .6rem .8rem; border-radius: 4px; margin: 0 0 .4rem; overflow-wrap: anywhere; }
.vw-note { font-size: .85rem; opacity: .85; margin: .3rem 0 0; overflow-wrap: anywhere; }
.vw-scroll { overflow-x: auto; max-width: 100%; }
.vw-table { border-collapse: collapse; width: 100%; font-size: .92rem; margin: 0; }
.vw-table caption { text-align: left; font-size: .88rem; padding: 0 0 .35rem; opacity: .9; }
.vw-table th, .vw-table td { padding: .25rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .35); font-variant-numeric: tabular-nums; }
.vw-table th { font-weight: 600; }
.vw-table .vw-text { text-align: left; white-space: normal; width: 100%; min-width: 11rem; }
.vw-pick { font: inherit; color: inherit; background: none; border: 1px solid transparent; border-radius: 4px;
  padding: .2rem .35rem; text-align: start; cursor: pointer; width: 100%; overflow-wrap: anywhere; }
.vw-pick:hover { border-color: currentColor; }
.vw-chosen .vw-pick { border-color: currentColor; font-weight: 600; }
.vw-open { font-weight: 400; font-style: italic; }
.vw-steps th, .vw-steps td { text-align: left; vertical-align: baseline; }
.vw-table .vw-options { white-space: normal; width: 100%; min-width: 12rem; }
.vw-options ol { display: flex; flex-wrap: wrap; gap: .15rem .3rem; list-style: none; margin: 0; padding: 0; }
.vw-option { padding: 0 .35rem; border: 2px solid transparent; border-radius: 4px; white-space: nowrap; }
.vw-same { border-color: #2f76d8; }
.vw-p { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre; }
.vw-share { font-size: .85em; opacity: .85; font-variant-numeric: tabular-nums; }
.vw-pick:focus-visible, .vw-piece:focus-visible, .vw-scroll:focus-visible { outline: 3px solid #1d5fbf;
  outline-offset: 1px; }
.vw-line-name { font-size: .88rem; margin: .5rem 0 .2rem; }
.vw-line { display: flex; flex-wrap: wrap; gap: .3rem; align-items: flex-start; }
.vw-piece { font: inherit; font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre;
  color: #111; background: #fff; border: 1px solid #7c8794; border-radius: 4px; padding: .15rem .4rem; cursor: pointer;
  display: inline-flex; flex-direction: column; align-items: center; min-width: 2.2rem; max-width: 100%; }
.vw-piece .vw-weight { font-size: .72rem; line-height: 1.1; min-height: .8rem; color: #111; }
.vw-piece.vw-asked { background: #1b2a41; color: #fff; border-color: #1b2a41; }
@media (max-width: 640px) {
  .vw-table th, .vw-table td { padding: .2rem .25rem; }
  .vw-table .vw-text { min-width: 6rem; }
  .vw-table .vw-options { min-width: 8rem; }
}
.vw-says { font-size: .9rem; min-height: 1.5em; margin: .5rem 0 0; overflow-wrap: anywhere; }
"""
