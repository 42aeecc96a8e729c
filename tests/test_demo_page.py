"""The page in headless Chromium: what a reader types, sees, points at and reaches by key; behind a proxy as well."""

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("gradio", reason="the page needs Gradio")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tatoeba-de-en"
EXAMPLE = Path(__file__).parents[1] / "examples" / "demo_nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.skipif(not (CHECKPOINT / "model.safetensors").is_file(), reason="the shipped model is not here"),
]
# What nobody should wait for longer, on a machine that is busy with other things.
START_S, ANSWER_MS, LIFE_S = 150, 60_000, 600


class Page:
    """A running `hf-vaswani demo`."""

    def __init__(self, arguments, folder):
        self.errors = folder / "errors.txt"
        self.started = time.monotonic()
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hf_vaswani.cli", "demo", *arguments, "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # What a shell starts in the background has SIGINT ignored, and a child inherits that.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
                env={
                    **os.environ,
                    "GRADIO_ANALYTICS_ENABLED": "True",
                },  # the page stays silent also where it is allowed
            )
        self.watch = threading.Timer(LIFE_S, self.process.kill)
        self.watch.daemon = True
        self.watch.start()
        reader = threading.Thread(target=self._read, daemon=True)
        self.address = ""
        reader.start()
        reader.join(START_S)
        assert self.address, self.errors.read_text()
        self.start_s = time.monotonic() - self.started

    def _read(self):
        self.address = self.process.stdout.readline().strip()

    def end(self, number=signal.SIGTERM):
        """The exit status after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.watch.cancel()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The shipped model with other weights: it answers otherwise."""
    from hf_vaswani import VaswaniForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(CHECKPOINT, folder)
    model = VaswaniForConditionalGeneration.from_pretrained(CHECKPOINT)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * weights.std() * 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(other_model, tmp_path_factory):
    arguments = [str(CHECKPOINT), "--compare", str(other_model), "--root-path", "demo"]
    page = Page(arguments, tmp_path_factory.mktemp("served"))
    yield page
    page.end()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens the page as a reader of their own; complains about faults in the browser, and about foreign hosts."""
    contexts, faults, requests = [], [], []

    def open_page(address, **settings):
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 1000}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(ANSWER_MS)
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("#vw-input textarea")
        page.requests = requests
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults
    hosts = {urlsplit(one).hostname for one in requests if not one.startswith(("data:", "blob:"))}
    assert hosts == {"127.0.0.1"}


def candidates(page, model=0):
    return page.locator(f"#vw-candidates-{model} .vw-pick")


def translate(page, text):
    """Type, press Enter, and wait for the answer to this text."""
    page.fill("#vw-input textarea", text)
    page.press("#vw-input textarea", "Enter")
    first = re.split(r"\W", text)[0]
    page.locator(f'#vw-attention-0 .vw-piece[data-side="seen"][data-text="{first}"]').first.wait_for()
    settle(page)


def settle(page):
    """Wait until nothing is under way."""
    page.wait_for_function("() => !document.querySelector('.generating, .eta-bar, .progress-text')")


def keep_picture(page, path):
    page.screenshot(path=path, full_page=True)
    print(f"picture: {path}")
    assert path.stat().st_size > 10_000


def piece(page, side, number, model=0):
    return page.locator(f'#vw-attention-{model} .vw-piece[data-side="{side}"]').nth(number)


def says(page, model=0):
    return page.locator(f"#vw-attention-{model} .vw-says")


def test_type_translate_change_the_beam_and_look_inside(served, visit, tmp_path):
    page = visit(served.address)
    translate(page, "Der Hund schläft.")
    assert candidates(page).count() == 4
    assert "dog" in candidates(page).first.inner_text()
    scores = page.locator("#vw-candidates-0 tbody td:nth-child(3)").all_inner_texts()
    values = [float(one.replace("−", "-")) for one in scores]
    assert values == sorted(values, reverse=True)
    # Alternatives of the first candidate: the likeliest pieces and their shares, as many steps as pieces.
    steps = page.locator("#vw-alternatives-0 tbody tr")
    assert str(steps.count()) == page.locator("#vw-candidates-0 tbody td:nth-child(5)").first.inner_text()
    assert steps.nth(1).locator("li").count() == 5
    # Attention: pointing at a piece shows where it looked; a click holds it while the head changes.
    piece(page, "looks", 1).hover()
    assert says(page).inner_text().startswith("␣dog looks at: ␣Hund")
    assert piece(page, "seen", 1).locator(".vw-weight").inner_text().endswith("%")
    piece(page, "looks", 1).click()
    mean = says(page).inner_text()
    page.mouse.move(5, 5)
    assert says(page).inner_text() == mean
    page.locator("#vw-head-0 label").nth(3).click()
    page.locator("#vw-attention-0 .vw-note", has_text="head 2").wait_for()
    page.wait_for_function(
        "old => document.querySelector('#vw-attention-0 .vw-says').innerText !== old", arg=mean
    )  # fmt: skip
    assert says(page).inner_text().startswith("␣dog looks at:")
    page.locator("#vw-layer-0 label").first.click()
    page.locator("#vw-attention-0 .vw-note", has_text="layer 0, head 2").wait_for()
    page.locator("#vw-kind-0 label").nth(1).click()
    page.locator("#vw-attention-0 .vw-note", has_text="within the source").wait_for()
    assert page.locator("#vw-layer-0 label").count() == 4  # the encoder has more layers than the decoder
    page.locator("#vw-words-0 input").click()
    page.locator('#vw-attention-0 .vw-piece[data-text="Hund"]').first.wait_for()
    # Another candidate, and another beam.
    candidates(page).nth(1).click()
    page.locator('#vw-candidates-0 [data-candidate="1"][aria-pressed="true"]').wait_for()
    settle(page)
    keep_picture(page, tmp_path / "page.png")
    page.fill("#vw-beams input[type=number]", "2")
    page.press("#vw-beams input[type=number]", "Tab")
    page.click("#vw-translate")
    page.locator("#vw-candidates-0 .vw-note", has_text="at most 2 candidates").wait_for()
    assert candidates(page).count() == candidates(page, 1).count() == 2


def test_two_models_stand_side_by_side(served, visit):
    page = visit(served.address)
    translate(page, "Kannst du mir bitte sagen, wo der Bahnhof ist?")
    assert page.locator(".vw-head").all_inner_texts() == ["tatoeba-de-en", "other"]
    left, right = (page.locator(f"#vw-candidates-{one} tbody").inner_text() for one in (0, 1))
    assert "station" in left
    assert left != right
    boxes = [page.locator(f"#vw-candidates-{one}").bounding_box() for one in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 2
    before = page.locator("#vw-candidates-1 tbody").inner_html()
    candidates(page).nth(2).click()
    page.locator('#vw-candidates-0 [data-candidate="2"][aria-pressed="true"]').wait_for()
    assert page.locator("#vw-candidates-1 tbody").inner_html() == before


def test_two_readers_at_once_do_not_meet(served, visit):
    one, two = visit(served.address), visit(served.address)
    texts = ("Der Hund schläft.", "Wo ist mein Buch?")
    for page, text in zip((one, two), texts, strict=True):
        page.fill("#vw-input textarea", text)
    for page in (one, two):
        page.press("#vw-input textarea", "Enter")  # both before either has its answer
    for page in (one, two):
        candidates(page).first.wait_for()
        settle(page)
    assert "dog" in candidates(one).first.inner_text()
    assert "book" in candidates(two).first.inner_text()
    candidates(one).nth(1).click()  # after the other's request, and still from one's own result
    one.locator('#vw-candidates-0 [data-candidate="1"][aria-pressed="true"]').wait_for()
    assert "dog" in candidates(one).first.inner_text()
    assert piece(one, "seen", 1).get_attribute("data-text") == "␣Hund"
    assert candidates(two).first.get_attribute("aria-pressed") == "true"


def test_an_empty_line_a_long_text_an_emoji_and_markup(served, visit, tmp_path):
    page = visit(served.address)
    page.press("#vw-input textarea", "Enter")
    assert "nothing to translate yet" in page.locator("#vw-message .vw-fault").inner_text()
    long = "Hund und Katze. " * 625
    assert len(long) == 10_000
    page.fill("#vw-input textarea", long)
    page.press("#vw-input textarea", "Enter")
    page.locator("#vw-message", has_text=re.compile(r"has 2,\d{3} pieces; the page takes at most 256")).wait_for()
    assert candidates(page).count() == 0
    assert page.locator(".vw-fault").count() == 1  # the text is at fault, not one model: it is said once
    keep_picture(page, tmp_path / "long.png")
    translate(page, "Das ist 😀 gut.")
    assert page.locator(".vw-fault").count() == 0
    bytes_of = [page.locator(f'#vw-attention-0 .vw-piece[data-text="‹{one}›"]').count() for one in ("F0", "9F")]
    assert bytes_of == [1, 1]
    translate(page, "Der Hund <img src=x onerror=document.title='!'> {{x}} ${document.title='!'}")
    assert page.locator('#vw-attention-0 .vw-piece[data-text*="<"]').count() >= 1
    assert page.title() != "!"
    assert page.locator("#vw-attention-0 img").count() == 0
    assert "Traceback" not in page.locator("body").inner_text()


def test_all_of_it_by_keyboard(served, visit):
    page = visit(served.address)
    page.wait_for_function("() => document.activeElement.closest('#vw-input')")  # one can type at once

    def walk(goal, key="Tab"):
        for _ in range(45):
            page.keyboard.press(key)
            if page.evaluate("goal => !!document.activeElement.closest(goal)", goal):
                return
        pytest.fail(f"{goal} is not reached by Tab")

    page.keyboard.type("Der Hund schläft.")
    page.keyboard.press("Control+Enter")
    candidates(page).first.wait_for()
    settle(page)
    walk("#vw-beams")
    for goal in ("#vw-alpha", "#vw-count", "#vw-translate", '[data-candidate="1"]'):
        walk(goal)
    page.keyboard.press("Enter")
    page.locator('#vw-candidates-0 [data-candidate="1"][aria-pressed="true"]').wait_for()
    settle(page)
    walk("#vw-head-0")
    page.keyboard.press("ArrowRight")
    page.locator("#vw-attention-0 .vw-note", has_text="head 0").wait_for()
    settle(page)
    walk('#vw-attention-0 [data-side="looks"]')
    page.keyboard.press("ArrowRight")
    assert says(page).inner_text().startswith("␣dog looks at:")
    page.keyboard.press("ArrowUp")
    assert says(page).inner_text().startswith("␣Hund is looked at by:")
    page.keyboard.press("Enter")  # held
    walk("#vw-alternatives-0")
    assert says(page).inner_text().startswith("␣Hund is looked at by:")
    walk('#vw-attention-0 [data-side="looks"]', "Shift+Tab")
    page.keyboard.press("Escape")
    assert says(page).inner_text().startswith("Point at a piece")
    groups = page.locator('[role="radiogroup"]')
    assert groups.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))") == [
        "Attention", "Layer, from 0", "Head, from 0",
    ] * 2  # fmt: skip
    # Everything that takes the focus says what it is.
    nameless = page.evaluate(
        """() => Array.from(document.querySelectorAll('input, textarea, button')).filter(one => one.offsetParent &&
        !(one.getAttribute('aria-label') || one.innerText.trim() || (one.labels && one.labels.length)))
        .map(one => one.outerHTML)"""
    )
    assert nameless == []


def test_on_a_narrow_dark_screen_nothing_runs_over_the_edge(served, visit, tmp_path):
    page = visit(served.address, viewport={"width": 400, "height": 800}, color_scheme="dark")
    translate(page, "Wo ist mein Buch?")
    keep_picture(page, tmp_path / "narrow.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("getComputedStyle(document.querySelector('.vw-piece')).color") == "rgb(17, 17, 17)"


class Proxy(BaseHTTPRequestHandler):
    """Does what the example for nginx says: takes the sub-path off, and sets the headers."""

    backend: tuple[str, int]
    asked: list[str]
    prefix = re.search(r"location (\S+) \{", EXAMPLE.read_text())[1]
    passed = re.search(r"proxy_pass http://[^/;]+(.*);", EXAMPLE.read_text())[1]
    set_headers = dict(re.findall(r"proxy_set_header (\S+) (\S+);", EXAMPLE.read_text()))

    def do_GET(self):
        self.asked.append(self.path)
        if not self.path.startswith(self.prefix):
            self.send_error(404)
            return
        path = self.passed + self.path[len(self.prefix) :] if self.passed else self.path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "host")}
        headers["Host"] = "inner.example"
        values = {"$http_host": self.headers["Host"], "$scheme": "http"}
        headers |= {name: values[value] for name, value in self.set_headers.items()}
        connection = http.client.HTTPConnection(*self.backend, timeout=60)
        connection.request(self.command, path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        try:
            while part := answer.read1(65536):
                self.wfile.write(part)  # as it comes: the page's events are one long answer
                self.wfile.flush()
        except OSError:
            pass  # the browser has left
        finally:
            connection.close()

    do_POST = do_HEAD = do_GET

    def log_message(self, *_):
        pass


def translate_through(visit, outer, **settings):
    """Style and events come through, and every request stays under the sub-path."""
    page = visit(outer, **settings)
    translate(page, "Der Hund schläft.")
    assert "dog" in candidates(page).first.inner_text()
    assert page.evaluate("getComputedStyle(document.querySelector('.vw-line')).display") == "flex"
    requests = [one for one in page.requests if not one.startswith(("data:", "blob:"))]
    assert len(requests) > 20
    assert [one for one in requests if not one.startswith(outer)] == []
    page.context.close()


def test_behind_a_reverse_proxy_with_a_sub_path(served, visit):
    """Row 138, with the headers of the example."""
    inner = urlsplit(served.address)
    asked: list[str] = []
    handler = type("Handler", (Proxy,), {"backend": (inner.hostname, inner.port), "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            translate_through(visit, f"http://127.0.0.1:{proxy.server_address[1]}/demo/")
            assert [one for one in asked if not one.startswith("/demo/")] == []  # also what the browser asks by itself
        finally:
            proxy.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not (NGINX and shutil.which("openssl")), reason="needs nginx and openssl")
def test_the_example_for_nginx_serves_the_page_over_https(served, visit, tmp_path):
    """Row 138: examples/demo_nginx.conf as it is, but for its addresses and the certificate."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-keyout", tmp_path / "example.org.key", "-out", tmp_path / "example.org.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    example = EXAMPLE.read_text()
    for old, new in (("8443 ssl", f"127.0.0.1:{port} ssl"), ("/etc/ssl", str(tmp_path)),
                     ("//127.0.0.1:7860", "//" + urlsplit(served.address).netloc)):  # fmt: skip
        assert old in example
        example = example.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/nginx.txt; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{example} }}\n"
    )
    nginx = subprocess.Popen([NGINX, "-p", tmp_path, "-e", tmp_path / "nginx.txt", "-c", tmp_path / "nginx.conf"])
    try:
        for _ in range(100):
            with socket.socket() as asking:
                if nginx.poll() is not None or asking.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        assert nginx.poll() is None, (tmp_path / "nginx.txt").read_text()
        translate_through(visit, f"https://127.0.0.1:{port}/demo/", ignore_https_errors=True)
    finally:
        nginx.terminate()
        nginx.wait(10)


def test_sigterm_ends_it_with_a_reader_there(served, visit):
    page = visit(served.address)
    translate(page, "Der Hund schläft.")
    page.goto("about:blank")
    assert served.end(signal.SIGTERM) == 128 + signal.SIGTERM
    errors = served.errors.read_text()
    assert "hf-vaswani demo: stopped." in errors
    assert "Traceback" not in errors
    print(f"the page with two models was ready after {served.start_s:.1f} s")


@pytest.mark.slow
def test_ctrl_c_ends_it_while_it_computes_and_the_next_start_finds_the_port_busy(tmp_path, visit):
    page = Page([str(CHECKPOINT), "--max-pieces", "4000", "--time-limit", "300"], tmp_path)
    try:
        port = urlsplit(page.address).port
        second = subprocess.run(
            [sys.executable, "-m", "hf_vaswani.cli", "demo", str(CHECKPOINT), "--port", str(port)],
            capture_output=True, text=True, timeout=START_S,
        )  # fmt: skip
        assert second.returncode == 2
        assert f"port {port} of 127.0.0.1 is in use" in second.stderr
        assert second.stderr.count("\n") == 1
        reader = visit(page.address)
        reader.fill("#vw-input textarea", "Hund und Katze. " * 625)
        reader.press("#vw-input textarea", "Enter")
        time.sleep(2)
        start = time.monotonic()
        assert page.end(signal.SIGINT) == 130
        assert time.monotonic() - start < 15
        assert "Traceback" not in page.errors.read_text()
        reader.goto("about:blank")
    finally:
        page.end()
