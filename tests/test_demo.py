"""The page without a browser: candidates, alternatives, attention, HTML, address, and what stands before Gradio."""

import argparse
import asyncio
import builtins
import math
import re
import socket
import threading
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import pytest
import torch

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.analysis.weights import attention_of
from hf_vaswani.analysis.words import merge_words
from hf_vaswani.cli import demo as command
from hf_vaswani.cli.output import UserError
from hf_vaswani.demo import Candidate, LoadedModel, Refusal, Request, Step, find_candidates, forced_log_probs
from hf_vaswani.demo.attention_view import View, attention_html, chosen_weights
from hf_vaswani.demo.candidates import MOST_CHARACTERS, length_factor
from hf_vaswani.demo.own_host import ICON, MOST_BYTES, OwnHost, own_page
from hf_vaswani.demo.panels import alternatives_html, candidates_html, message_html
from hf_vaswani.demo.server import AddressError, address_of, clean_prefix, open_port

SOURCE = "Ein Hund schläft."
MARKUP = '<b>Hund</b> "&" {{x}} ${1+1} \''


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train([SOURCE, "A dog is asleep."] * 3, vocab_size=275, allow_fewer=True)


@pytest.fixture
def loaded(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer))
    model.generation_config.max_length_offset = 3
    return LoadedModel("tiny", model, tokenizer)


# ------------------------------------------------------------------ candidates
@pytest.mark.parametrize(("beams", "alpha", "count"), [(3, 0.6, 2), (5, 1.7, 5), (2, 0.0, 1)])
def test_candidates_and_scores_are_those_of_generate(loaded, beams, alpha, count):
    found = find_candidates(loaded, Request(SOURCE, beams=beams, alpha=alpha, count=count))
    expected = loaded.model.generate(
        **loaded.tokenizer(SOURCE, return_tensors="pt"), num_beams=beams, length_penalty=alpha,
        num_return_sequences=count, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert len(found.candidates) == count
    for one, row, score in zip(found.candidates, expected.sequences, expected.sequences_scores, strict=True):
        assert list(one.ids) == row[1 : 1 + len(one.ids)].tolist()
        assert set(row[1 + len(one.ids) :].tolist()) <= {loaded.tokenizer.pad_token_id}
        assert one.score == pytest.approx(score.item(), abs=1e-4)
        assert one.text == loaded.tokenizer.decode(row, skip_special_tokens=True)
        assert one.is_complete == (one.ids[-1] == loaded.tokenizer.eos_token_id)


def test_log_probability_is_that_of_the_loss_and_the_score_is_divided_by_the_penalty(loaded):
    found = find_candidates(loaded, Request(SOURCE, beams=1, alpha=0.6, count=1))
    one = found.candidate
    inputs = loaded.tokenizer(SOURCE, return_tensors="pt")
    loss = loaded.model(**inputs, labels=torch.tensor([one.ids])).loss.item()
    assert one.log_prob == pytest.approx(-loss * len(one.ids), abs=1e-4)
    assert one.score == pytest.approx(one.log_prob / ((5 + len(one.ids)) / 6) ** 0.6)
    loaded.model.generation_config.length_penalty_type = "power"
    assert length_factor(loaded.model, 7, 0.5) == pytest.approx(math.sqrt(7))


def test_a_narrow_beam_has_fewer_candidates_and_says_so(loaded):
    found = find_candidates(loaded, Request(SOURCE, beams=2, count=4))
    assert len(found.candidates) == 2
    assert "at most 2 candidates" in " ".join(found.notes)


def test_text_that_cannot_be_translated_is_refused_in_words(loaded):
    def refusal(text, **settings):
        with pytest.raises(Refusal) as caught:
            find_candidates(loaded, Request(text, **settings))
        return str(caught.value)

    assert "nothing to translate" in refusal(" \n\t ")
    pieces = len(loaded.tokenizer(SOURCE * 40)["input_ids"])
    assert f"has {pieces:,} pieces" in refusal(SOURCE * 40, max_pieces=31)
    assert "at most 31" in refusal(SOURCE * 40, max_pieces=31)
    assert f"{MOST_CHARACTERS + 1:,}" in refusal("a" * (MOST_CHARACTERS + 1))
    assert "Character 3" in refusal("ab\ud83d")
    assert "from 1 to 16" in refusal(SOURCE, beams=17)
    assert "from 0 to 2" in refusal(SOURCE, alpha=float("nan"))
    assert "from 1 to 8" in refusal(SOURCE, count=0)
    loaded.longest_input = 5
    assert "tiny can take at most 5" in refusal(SOURCE)


def test_a_text_at_the_limit_is_translated_and_line_breaks_are_blanks(loaded):
    ids = loaded.tokenizer(SOURCE)["input_ids"]
    plain = find_candidates(loaded, Request(SOURCE, max_pieces=len(ids)))
    broken = find_candidates(loaded, Request("Ein \r\n\n Hund\nschläft.\n", max_pieces=len(ids)))
    assert broken.source_ids == plain.source_ids == tuple(ids)
    assert "Line breaks" in " ".join(broken.notes)
    assert not plain.notes


def test_a_search_ends_with_its_time_and_at_the_end_of_the_program(loaded):
    loaded.model.generation_config.max_length_offset = 40
    whole = find_candidates(loaded, Request(SOURCE, beams=2))
    cut = find_candidates(loaded, Request(SOURCE, beams=2, time_limit=1e-9))
    assert len(cut.candidate.ids) == 1 < max(len(one.ids) for one in whole.candidates)
    assert "stopped after 1e-09 seconds" in " ".join(cut.notes)
    loaded.stop()
    assert len(find_candidates(loaded, Request(SOURCE, beams=2)).candidate.ids) == 1


def test_broken_weights_are_told(loaded):
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not numbers"):
        forced_log_probs(loaded.model, [5, 6, 1], [2, 7, 1])


# ------------------------------------------------------------------ looking inside
def test_alternatives_are_the_likeliest_pieces_of_each_step(loaded):
    found = find_candidates(loaded, Request(SOURCE, beams=3))
    steps = loaded.steps(found)
    ids = found.candidate.ids
    assert len(steps) == len(ids)
    source = torch.tensor([found.source_ids])
    for place, step in enumerate(steps):
        read = torch.tensor([[found.start_id, *ids[:place]]])  # only what came before: no later piece can tell
        logits = loaded.model(input_ids=source, decoder_input_ids=read).logits[0, -1].double().tolist()
        total = math.fsum(math.exp(value) for value in logits)
        probs = sorted((math.exp(value) / total for value in logits), reverse=True)
        own = math.exp(logits[ids[place]]) / total
        assert [prob for _, prob in step.alternatives] == pytest.approx(probs[:5], abs=1e-6)
        assert step.prob == pytest.approx(own, abs=1e-6)
        assert step.rank == 1 + sum(value > logits[ids[place]] for value in logits)


def test_attention_view_shows_the_chosen_layer_and_head(loaded):
    found = find_candidates(loaded, Request(SOURCE))
    weights = loaded.attention(found)
    expected = attention_of(loaded.model, loaded.tokenizer, list(found.source_ids), list(found.candidate.ids))
    torch.testing.assert_close(chosen_weights(weights, View("cross", 2, 1)), expected.cross[2][1])
    torch.testing.assert_close(chosen_weights(weights, View("encoder", 1)), expected.encoder[1].mean(0))
    html = attention_html(weights, View("decoder", 0, 0))
    length = len(found.candidate.ids)
    values = [int(one) for one in re.search(r'data-weights="([\d,]+)"', html).group(1).split(",")]
    assert values == [round(one) for one in (expected.decoder[0][0] * 1000).flatten().tolist()]
    assert f'data-width="{length}"' in html
    assert html.count('data-side="looks"') == html.count('data-side="seen"') == length
    assert html.count('tabindex="0"') == 2  # one stop on each line; the arrow keys go on from there
    with pytest.raises(ValueError, match="head 2 does not exist"):
        chosen_weights(weights, View("cross", 0, 2))
    with pytest.raises(ValueError, match="3 layers"):
        chosen_weights(weights, View("cross", 3))


def test_words_are_put_together_on_request(loaded):
    found = find_candidates(loaded, Request(SOURCE))
    weights = loaded.attention(found)
    html = attention_html(weights, View("encoder", in_words=True))
    words = merge_words(weights).source_pieces
    assert len(words) < len(weights.source_pieces)
    assert re.findall(r'data-side="seen" data-text="([^"]*)"', html) == [escape(word) for word in words]


def test_text_from_outside_is_escaped(loaded):
    found = find_candidates(loaded, Request(MARKUP))
    html = attention_html(loaded.attention(found), View())
    texts = re.findall(r'data-side="seen" data-text="([^"]*)"', html)
    assert "&lt;" in texts
    assert "<b>" not in html
    shown = replace(found, candidates=(Candidate(MARKUP, (1,), -1.0, -1.0, is_complete=False),))
    assert "<b>" not in candidates_html(shown)
    assert "&lt;b&gt;Hund&lt;/b&gt;" in candidates_html(shown)
    assert "stopped before its end" in candidates_html(shown)
    assert message_html(MARKUP, is_fault=True).count("<") == 2
    steps = [Step("<i>", 0.25, 1, [("<i>", 0.25), ("<u>", 0.125)])]
    assert "<i>" not in alternatives_html(steps)
    assert "25.0 %" in alternatives_html(steps)


def test_reading_attention_and_searching_at_once_do_not_mix(loaded):
    expected = find_candidates(loaded, Request(SOURCE))
    weights = loaded.attention(expected)
    faults = []

    def search():
        for _ in range(6):
            if find_candidates(loaded, Request(SOURCE)).candidates != expected.candidates:
                faults.append("search")

    def look():
        for _ in range(12):
            found = loaded.attention(expected)
            if not all(map(torch.equal, found.cross, weights.cross)):
                faults.append("attention")

    threads = [threading.Thread(target=one) for one in (search, look, look)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not faults
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.is_computing


# ------------------------------------------------------------------ address
def test_a_sub_path_is_read_however_it_is_written():
    assert [clean_prefix(text) for text in ("", "/", "demo", "/demo", "demo/", "/a/b-c/")] == [
        "", "", "/demo", "/demo", "/demo", "/a/b-c",
    ]  # fmt: skip
    for wrong in ("https://example.org/demo", "/a b", '/"x', "/a//b", "/../x?"):
        with pytest.raises(AddressError, match="path alone"):
            clean_prefix(wrong)


def test_a_busy_port_is_named_with_what_to_do():
    with open_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address_of("127.0.0.1", taken, "/demo") == f"http://127.0.0.1:{port}/demo/"
        assert address_of("::", taken, "") == f"http://[::1]:{port}/"
        assert address_of("0.0.0.0", taken, "") == f"http://127.0.0.1:{port}/"
        with pytest.raises(AddressError, match=rf"port {port} .* in use .* --port"):
            open_port("127.0.0.1", port)
    with pytest.raises(AddressError, match=r"--host 203\.0\.113\.9"):
        open_port("203.0.113.9", 0)


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["demo", *words])


def test_the_command_refuses_before_it_loads_anything(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use"):
            command.run(parse("no-such-folder", "--port", port))
    with pytest.raises(UserError, match="path alone"):
        command.run(parse("no-such-folder", "--port", "0", "--root-path", "http://x/y"))
    for words in (["--port", "65536"], ["--port", "x"], ["--time-limit", "0"], ["--time-limit", "nan"],
                  ["--max-pieces", "0"]):  # fmt: skip
        with pytest.raises(SystemExit):
            parse("model", *words)
        assert words[0] in capsys.readouterr().err


def test_without_gradio_the_command_says_what_to_install(monkeypatch):
    plain = builtins.__import__

    def importing(name, *rest):
        if name == "gradio":
            raise ImportError("No module named 'gradio'")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(UserError, match=r'pip install "hf-vaswani\[demo\]"'):
        command.run(parse("checkpoints/tatoeba-de-en", "--port", "0"))


def test_models_are_named_apart():
    assert command._names(["runs/a/", "runs/b"]) == ["a", "b"]
    assert command._names(["x/model", "y/model"]) == ["x/model", "y/model"]
    assert command._names(["m", "m"]) == ["m (1)", "m (2)"]


# ------------------------------------------------------------------ what stands before Gradio
def ask(app, path, method="GET", headers=()):
    """Status and body of one request to an ASGI application."""
    got = []

    parts = [{"type": "http.request", "body": b""}]

    async def receive():
        if not parts:  # the client stays
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message):
        got.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers], "server": ("127.0.0.1", 7860),
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in got[1:])
    headers = dict(got[0]["headers"])
    assert int(headers.get(b"content-length", len(body))) == len(body)
    return got[0]["status"], body.decode()


async def echo(scope, receive, send):
    """Answers with the path in two parts; the head of the page names another host."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"999")]})
    accepted = dict(scope["headers"]).get(b"accept-encoding", b"none").decode()
    head = b'<base href="./" /><meta property="og:image"'
    rest = f' content="https://x/y.jpg"/>{scope["path"]} {accepted}'.encode()
    await send({"type": "http.response.body", "body": head, "more_body": True})
    await send({"type": "http.response.body", "body": rest})


def test_the_sub_path_may_be_there_or_not_and_the_page_stays_under_it():
    app = OwnHost(echo, "/demo")
    for path in ("/", "/demo", "/demo/"):
        assert ask(app, path, headers=[("accept-encoding", "br")]) == (200, ICON + '<base href="/demo/" />/ none')
    own = OwnHost(echo)
    assert ask(own, "/") == (200, ICON + '<base href="./" />/ none')
    with pytest.raises(AssertionError):  # all but the page itself is passed on untouched, also its wrong length
        ask(app, "/demo/config")
    assert own_page('<link rel="manifest" href="/manifest.json" />x', "") == "x"


def test_large_requests_and_files_are_refused():
    app = OwnHost(echo, "/demo")
    assert ask(app, "/gradio_api/queue/join", "POST", [("content-length", str(MOST_BYTES + 1))])[0] == 413
    assert ask(app, "/gradio_api/queue/join", "POST", [("content-length", "x")])[0] == 413
    assert ask(app, "/gradio_api/queue/join", "POST", [("content-length", "9" * 5000)])[0] == 413
    assert ask(app, "/gradio_api/queue/join", "POST", [("transfer-encoding", "chunked")])[0] == 411
    assert ask(app, "/demo/gradio_api/upload", "POST")[0] == 404


def test_answers_that_stay_open_end_when_the_page_closes():
    async def until_left(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"left"})

    app = OwnHost(until_left)

    async def run():
        sent, bodies = [], [{"type": "http.request", "body": b"", "more_body": True}]

        async def receive():
            return bodies.pop() if bodies else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/gradio_api/heartbeat/a", "headers": []}
        answer = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0.05)
        assert not answer.done()
        app.close()
        await asyncio.wait_for(answer, 5)
        return sent

    assert asyncio.run(run())[1]["body"] == b"left"


class _Addresses(HTMLParser):
    """All that a page's tags refer to, as the browser would resolve it."""

    def __init__(self, page, address):
        super().__init__()
        self.base, self.found = address, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if tag == "base" and name == "href":
                self.base = urljoin(self.base, value)
            elif name in ("src", "href"):
                self.found.append(urljoin(self.base, value))


@pytest.mark.parametrize("path", ["/", "/demo", "/demo/"])
def test_behind_a_proxy_the_page_names_only_its_public_address(loaded, path):
    """Row 138: the page with style behind a sub-path, and no plain-http address behind an https proxy."""
    pytest.importorskip("gradio")
    from hf_vaswani.demo.app import make_app

    app = make_app([loaded], root_path=clean_prefix("demo"))
    forwarded = [("host", "127.0.0.1:7860"), ("x-forwarded-host", "example.org:8443"), ("x-forwarded-proto", "https")]
    status, page = ask(app, path, headers=forwarded)
    assert status == 200
    assert "http://" not in page
    assert "127.0.0.1" not in page
    assert set(re.findall(r"https://[^\"' <)\\]*", page)) == {"https://example.org:8443/demo"}
    found = _Addresses(page, "https://example.org:8443/demo").found
    icons = [one for one in found if one.startswith("data:")]
    found = [one for one in found if one not in icons]
    assert len(icons) == 1  # else the browser asks for one outside of the sub-path
    assert len(found) >= 2  # style and script
    assert all(one.startswith("https://example.org:8443/demo/") for one in found)
    for one in found:
        assert ask(app, urlsplit(one).path)[0] == 200
    # Without a proxy's headers the page is this machine's.
    page = ask(app, path, headers=[("host", "127.0.0.1:7860")])[1]
    assert set(re.findall(r"https?://[^\"' <)\\]*", page)) == {"http://127.0.0.1:7860/demo"}
