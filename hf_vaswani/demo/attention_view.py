"""Attention as two lines of pieces: point at one, and the other line shows where the weight lies.

Letters: H heads, Q pieces that look, K pieces that are looked at.
"""

from dataclasses import dataclass
from html import escape

import torch

from ..analysis.weights import AttentionWeights
from ..analysis.words import merge_words

# What each kind of attention is called on the page.
KINDS = {"cross": "target to source", "encoder": "within the source", "decoder": "within the target"}
MEAN = "mean"

# Runs once for each view; the pieces in it come and go, so everything is asked of the element itself. Weights are whole
# thousandths, row after row, so that long sentences stay small.
ATTENTION_JS = """
let held = null;
const pieces = (side) => Array.from(element.querySelectorAll('.vw-piece[data-side="' + side + '"]'));
const find = (place) => place && pieces(place.side)[place.index];
const other = {looks: 'seen', seen: 'looks'};
function weights(place) {
  const view = element.querySelector('.vw-attention');
  const all = view.dataset.weights.split(',').map(Number);
  const width = Number(view.dataset.width);
  if (place.side === 'looks') return all.slice(place.index * width, (place.index + 1) * width);
  return all.filter((_, i) => i % width === place.index);
}
function clear() {
  for (const one of element.querySelectorAll('.vw-piece')) {
    one.classList.remove('vw-asked');
    one.style.background = '';
    one.querySelector('.vw-weight').textContent = '';
  }
  const says = element.querySelector('.vw-says');
  if (says) says.textContent = says.dataset.hint;
}
function show(place) {
  const asked = find(place);
  clear();
  if (!asked) return;
  asked.classList.add('vw-asked');
  const values = weights(place);
  const targets = pieces(other[place.side]);
  targets.forEach((one, i) => {
    const share = values[i] / 1000;
    one.style.background = 'rgb(' + [255, 255, 255].map((white, c) =>
      Math.round(white + ([86, 160, 240][c] - white) * share)).join(',') + ')';
    one.querySelector('.vw-weight').textContent = share >= 0.005 ? Math.round(100 * share) + '%' : '·';
  });
  const best = values.map((value, i) => [value, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const list = best.map(([value, i]) => targets[i].dataset.text + ' ' + (value / 10).toFixed(1) + ' %').join(', ');
  element.querySelector('.vw-says').textContent = asked.dataset.text +
    (place.side === 'looks' ? ' looks at: ' : ' is looked at by: ') + list;
}
const place = (node) => {
  const one = node && node.closest && node.closest('.vw-piece');
  return one ? {side: one.dataset.side, index: pieces(one.dataset.side).indexOf(one)} : null;
};
function hold(wanted) {
  const was = element.querySelectorAll('.vw-piece[aria-pressed="true"]');
  for (const one of was) one.setAttribute('aria-pressed', 'false');
  held = wanted;
  if (find(held)) find(held).setAttribute('aria-pressed', 'true');
  show(held);
}
element.addEventListener('mouseover', (event) => { const at = place(event.target); if (at) show(at); });
element.addEventListener('mouseleave', () => show(place(document.activeElement) || held));
element.addEventListener('focusin', (event) => { const at = place(event.target); if (at) show(at); });
element.addEventListener('focusout', () => show(held));
element.addEventListener('click', (event) => {
  const at = place(event.target);
  if (at) hold(held && held.side === at.side && held.index === at.index ? null : at);
});
element.addEventListener('keydown', (event) => {
  const at = place(event.target);
  if (!at) return;
  const line = pieces(at.side);
  const goal = {ArrowRight: at.index + 1, ArrowLeft: at.index - 1, Home: 0, End: line.length - 1}[event.key];
  let next = goal === undefined ? null : line[goal];
  if (event.key === 'ArrowUp' || event.key === 'ArrowDown') {
    const across = pieces(event.key === 'ArrowUp' ? 'seen' : 'looks');
    next = across[Math.min(at.index, across.length - 1)];
  }
  if (event.key === 'Escape') hold(null);
  if (goal !== undefined || next || event.key === 'Escape') event.preventDefault();
  if (!next) return;
  for (const one of pieces(next.dataset.side)) one.tabIndex = one === next ? 0 : -1;
  next.focus();
});
let sentence = null;
watch('value', () => {
  const view = element.querySelector('.vw-attention');
  const now = view ? view.dataset.sentence : null;
  if (now !== sentence) held = null;  // other pieces stand there now
  sentence = now;
  hold(held);
});
"""


@dataclass(frozen=True)
class View:
    """Which weights are shown.

    Args:
        kind (`str`): "cross", "encoder" or "decoder". layer (`int`): from 0. head (`int` or `str`): from 0, or "mean".
        in_words (`bool`): pieces of a word put together.
    """

    kind: str = "cross"
    layer: int = 0
    head: int | str = MEAN
    in_words: bool = False


def chosen_weights(found: AttentionWeights, view: View) -> torch.Tensor:
    """The matrix that is shown: [Q, K], rows add up to 1.

    Args:
        found (`AttentionWeights`). view (`View`).

    Raises:
        ValueError: there is no such kind, layer or head.
    """
    per_head = found.layer(view.kind, view.layer)  # [H, Q, K]
    if view.head == MEAN:
        return per_head.mean(dim=0)
    if not isinstance(view.head, int) or not 0 <= view.head < len(per_head):
        raise ValueError(f"head {view.head} does not exist: this layer has {len(per_head)} heads, from 0")
    return per_head[view.head]


def attention_html(found: AttentionWeights, view: View) -> str:
    """The two lines of pieces, with the weights between them.

    Args:
        found (`AttentionWeights`): of pieces. view (`View`).

    Raises:
        ValueError: there is no such kind, layer or head.
    """
    shown = merge_words(found) if view.in_words else found
    weights = chosen_weights(shown, view)  # [Q, K]
    looks, seen = shown.pieces_of_kind(view.kind)
    looks_name, seen_name = {
        "cross": ("Target: each piece, while it was chosen", "Source"),
        "encoder": ("Source: who looks", "Source: what is looked at"),
        "decoder": ("Target: each piece, while it was chosen", "Target: what had been read"),
    }[view.kind]
    thousandths = ",".join(map(str, (weights * 1000).round().int().flatten().tolist()))
    sentence = ",".join(map(str, [view.kind, view.in_words, *found.source_ids, "-", *found.target_ids]))
    head = "mean of heads" if view.head == MEAN else f"head {view.head}"
    hint = "Point at a piece, click it to hold it, or walk with Tab and the arrow keys."
    return (
        f'<div class="vw-attention" data-weights="{thousandths}" data-width="{weights.shape[1]}" '
        f'data-sentence="{sentence}"><p class="vw-note">Attention {KINDS[view.kind]}, layer {view.layer}, {head}.</p>'
        f"{_line('seen', seen_name, seen)}{_line('looks', looks_name, looks)}"
        f'<p class="vw-says" aria-live="polite" data-hint="{hint}">{hint}</p></div>'
    )


def _line(side: str, name: str, pieces: list[str]) -> str:
    buttons = "".join(
        f'<button type="button" class="vw-piece" data-side="{side}" data-text="{escape(piece, quote=True)}" '
        f'aria-pressed="false" tabindex="{-1 if i else 0}"><span dir="auto">{escape(piece)}</span>'
        '<span class="vw-weight" aria-hidden="true"></span></button>'
        for i, piece in enumerate(pieces)
    )
    return (
        f'<p class="vw-line-name">{name}</p>'
        f'<div class="vw-line" role="toolbar" aria-label="{escape(name, quote=True)}">{buttons}</div>'
    )
