"""The page itself: what stands on it, and what happens on each event. Gradio's own state keeps readers apart."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from .attention_view import ATTENTION_JS, KINDS, MEAN, View, attention_html
from .candidates import (
    MOST_ALPHA,
    MOST_BEAMS,
    MOST_CANDIDATES,
    Found,
    LoadedModel,
    Refusal,
    Request,
    find_candidates,
)
from .own_host import OwnHost
from .panels import CANDIDATES_JS, CSS, PAGE_JS, alternatives_html, candidates_html, message_html

logger = logging.getLogger(__name__)

# Choice: one request computes at a time, these many wait; more are told so at once.
_WAITING = 32
# What a reader left behind is forgotten after an hour.
_FORGET_S = 3600
_TITLE = "Translate and look inside"


@dataclass(frozen=True)
class Limits:
    """Bounds of one request: most source pieces, and seconds of searching."""

    max_pieces: int = 256
    time_limit: float = 30.0


@dataclass
class _Panel:
    """The components of one model."""

    loaded: LoadedModel
    state: Any
    candidates: Any
    alternatives: Any
    kind: Any
    layer: Any
    head: Any
    words: Any
    attention: Any

    @property
    def view(self) -> list[Any]:
        return [self.kind, self.layer, self.head, self.words]

    @property
    def shown(self) -> list[Any]:
        return [self.state, self.candidates, self.alternatives, self.attention]


def make_app(models: Sequence[LoadedModel], limits: Limits | None = None, root_path: str = "") -> Any:
    """The page as an ASGI application.

    Args:
        models (`Sequence[LoadedModel]`): one, or two that are compared.
        limits (`Limits`, *optional*): of a request. root_path (`str`): the sub-path behind a proxy, such as "/demo".

    Raises:
        ImportError: Gradio is missing.
    """
    import fastapi
    import gradio as gr

    blocks = make_page(models, limits or Limits())
    theme = gr.themes.Base(
        primary_hue="blue",
        font=("system-ui", "sans-serif"),  # names of what is there already: nothing is fetched
        font_mono=("ui-monospace", "monospace"),
    )
    theme.set(
        block_title_text_color="*neutral_800",
        block_title_text_color_dark="*neutral_100",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_border_color="*neutral_500",
        input_border_color_dark="*neutral_400",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )
    app = gr.mount_gradio_app(
        fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None),
        blocks,
        path="/",
        root_path=root_path,
        theme=theme,
        css=CSS,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        show_error=False,
        max_file_size=1,
    )
    return OwnHost(app, root_path)


def make_page(models: Sequence[LoadedModel], limits: Limits) -> Any:
    """The page as `gradio.Blocks`.

    Args:
        models (`Sequence[LoadedModel]`): one, or two that are compared. limits (`Limits`): of a request.
    """
    import gradio as gr

    defaults = models[0].model.generation_config
    beams = min(defaults.num_beams or 1, MOST_BEAMS)
    alpha = defaults.length_penalty
    with gr.Blocks(title=f"{_TITLE}: {models[0].name}", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(f'<h1 class="vw-title">{_TITLE}</h1>', js_on_load=PAGE_JS, apply_default_css=False)
        text = gr.Textbox(
            label=f"Text to translate (one sentence, at most {limits.max_pieces:,} pieces; Enter translates)",
            lines=1,
            max_lines=8,
            autofocus=True,
            elem_id="vw-input",
        )
        with gr.Row(elem_id="vw-controls"):
            beam_control = gr.Slider(1, MOST_BEAMS, value=beams, step=1, label="Beam", elem_id="vw-beams", buttons=[])
            alpha_control = gr.Slider(
                0,
                MOST_ALPHA,
                value=min(max(1.0 if alpha is None else alpha, 0.0), MOST_ALPHA),
                step=0.1,
                label="Length penalty α",
                elem_id="vw-alpha",
                buttons=[],
            )
            count_control = gr.Slider(
                1, MOST_CANDIDATES, value=min(4, beams), step=1, label="Candidates", elem_id="vw-count", buttons=[]
            )
            button = gr.Button("Translate", variant="primary", elem_id="vw-translate", min_width=120)
        message = _own(gr, "vw-message")
        with gr.Row():
            panels = [_add_panel(gr, loaded, number) for number, loaded in enumerate(models)]

        def translate(text: str, beams: float, alpha: float, count: float, *views: Any) -> list[Any]:
            request = Request(text or "", int(beams), float(alpha), int(count), limits.max_pieces, limits.time_limit)
            faults, shown = [], []
            for number, panel in enumerate(panels):
                try:
                    found = find_candidates(panel.loaded, request)
                    shown += show(panel, found, views[4 * number : 4 * number + 4])
                except Exception as error:
                    faults.append((panel.loaded.name, plain_fault(error)))
                    shown += [None, "", "", ""]
            if len({fault for _, fault in faults}) == 1 and len(faults) == len(panels):
                faults = [("", faults[0][1])]  # the text is at fault, not one model
            named = [f"{name}: {fault}" if name and len(panels) > 1 else fault for name, fault in faults]
            return ["".join(message_html(one, is_fault=True) for one in named), *shown]

        inputs = [text, beam_control, alpha_control, count_control, *(one for panel in panels for one in panel.view)]
        outputs = [message, *(one for panel in panels for one in panel.shown)]
        for event in (text.submit, button.click):
            event(translate, inputs, outputs, **_event_options())
        for panel in panels:
            _connect(gr, panel, message)
    page.queue(max_size=_WAITING, default_concurrency_limit=1)
    return page


def show(panel: _Panel, found: Found, view: Sequence[Any]) -> list[Any]:
    """State, candidates, alternatives and attention of a result, in this order."""
    return [
        found,
        candidates_html(found),
        alternatives_html(panel.loaded.steps(found)),
        show_attention(panel, found, view),
    ]


def show_attention(panel: _Panel, found: Found, view: Sequence[Any]) -> str:
    """The attention alone."""
    kind, layer, head, in_words = view
    chosen = View(kind, int(layer), head if head == MEAN else int(head), bool(in_words))
    return attention_html(panel.loaded.attention(found), chosen)


def plain_fault(error: Exception) -> str:
    """What the reader is told of a fault; what is no fault of theirs also goes to the log, in full."""
    if isinstance(error, Refusal):
        return str(error)
    logger.error("The page could not answer a request.", exc_info=error)
    text = " ".join(str(error).split())[:300] or "no reason given"
    return f"The model could not do this ({type(error).__name__}: {text})."


def _event_options() -> dict[str, Any]:
    # One queue for everything that computes, whoever asks: the model is one.
    return {
        "concurrency_id": "model",
        "concurrency_limit": 1,
        "show_progress": "minimal",
        "api_visibility": "private",
    }


def _add_panel(gr: Any, loaded: LoadedModel, number: int) -> _Panel:
    def ident(name: str) -> str:
        return f"vw-{name}-{number}"

    layers, heads = _sizes(loaded.model, "cross")
    with gr.Column(min_width=420):
        gr.HTML(f'<h2 class="vw-head">{escape(loaded.name)}</h2>', js_on_load=None, apply_default_css=False)
        state = gr.State(None, time_to_live=_FORGET_S)
        candidates = _own(gr, ident("candidates"), CANDIDATES_JS)
        with gr.Group():
            kind = gr.Radio(
                [(name, kind) for kind, name in KINDS.items()], value="cross", label="Attention", elem_id=ident("kind")
            )
            layer = gr.Radio(layers, value=layers[-1], label="Layer, from 0", elem_id=ident("layer"))
            head = gr.Radio([MEAN, *heads], value=MEAN, label="Head, from 0", elem_id=ident("head"))
            words = gr.Checkbox(label="Whole words instead of pieces", elem_id=ident("words"))
        attention = _own(gr, ident("attention"), ATTENTION_JS)
        alternatives = _own(gr, ident("alternatives"))
    return _Panel(loaded, state, candidates, alternatives, kind, layer, head, words, attention)


def _own(gr: Any, name: str, script: str | None = None) -> Any:
    """A place for HTML of ours, without Gradio's looks for tables."""
    return gr.HTML(elem_id=name, js_on_load=script, apply_default_css=False)


def _sizes(model: Any, kind: str) -> tuple[list[str], list[str]]:
    """Names of the layers and heads of one kind of attention."""
    config = model.config
    side = "encoder" if kind == "encoder" else "decoder"
    layers = getattr(config, f"{side}_layers", None) or config.num_hidden_layers
    heads = getattr(config, f"{side}_attention_heads", None) or config.num_attention_heads
    return [str(i) for i in range(layers)], [str(i) for i in range(heads)]


def _connect(gr: Any, panel: _Panel, message: Any) -> None:
    """Choosing a candidate, a kind, a layer or a head."""

    def guarded(work: Callable[[], list[Any]], blank: int) -> list[Any]:
        try:
            return ["", *work()]
        except Exception as error:
            return [message_html(plain_fault(error), is_fault=True), *[gr.skip()] * blank]

    def pick(found: Found | None, kind: str, layer: str, head: str, words: bool, event: gr.EventData) -> list[Any]:
        def work() -> list[Any]:
            index = (event._data or {}).get("candidate")
            if found is None or not isinstance(index, int) or not 0 <= index < len(found.candidates):
                raise Refusal("These candidates are gone: translate once more.")
            return show(panel, replace(found, chosen=index), (kind, layer, head, words))

        return guarded(work, 4)

    def look(found: Found | None, *view: Any) -> list[Any]:
        return guarded(lambda: [show_attention(panel, found, view) if found else ""], 1)

    def change_kind(found: Found | None, kind: str, layer: str, head: str, words: bool) -> list[Any]:
        def work() -> list[Any]:
            layers, heads = _sizes(panel.loaded.model, kind)
            new_layer = layer if layer in layers else layers[-1]
            new_head = head if head in [MEAN, *heads] else MEAN
            html = show_attention(panel, found, (kind, new_layer, new_head, words)) if found else ""
            return [gr.Radio(layers, value=new_layer), gr.Radio([MEAN, *heads], value=new_head), html]

        return guarded(work, 3)

    inputs = [panel.state, *panel.view]
    panel.candidates.click(pick, inputs, [message, *panel.shown], **_event_options())
    panel.kind.input(change_kind, inputs, [message, panel.layer, panel.head, panel.attention], **_event_options())
    for control in (panel.layer, panel.head, panel.words):
        control.input(look, inputs, [message, panel.attention], **_event_options())
