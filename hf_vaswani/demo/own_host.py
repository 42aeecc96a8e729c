"""What stands before Gradio: nothing from other hosts, one sub-path, small requests only, and an end in good order."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Choice: a request carries a text of at most MOST_CHARACTERS letters and some settings; this leaves room for escapes.
MOST_BYTES = 2 * 2**20
# Previews for other sites point to pictures on other hosts; the manifest stands outside of any sub-path.
_FOREIGN = re.compile(r'<meta\s+(?:property="og:|name="twitter:)[^>]*>\s*|<link\s+rel="manifest"[^>]*>\s*', re.ASCII)
_BASE = re.compile(r'<base\s+href="[^"]*"')
# Two pieces, one of which looks at the other. It stands in the page: a browser asks for an icon at the root of the host
# otherwise, outside of any sub-path.
_ICON_SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M3 4L13 12" stroke="#1d5fbf" '
    b'stroke-width="2"/><g fill="#1b2a41"><circle cx="3" cy="4" r="2.5"/><circle cx="13" cy="4" r="2.5"/>'
    b'<circle cx="3" cy="12" r="2.5"/><circle cx="13" cy="12" r="2.5"/></g></svg>'
)
ICON = f'<link rel="icon" href="data:image/svg+xml;base64,{b64encode(_ICON_SVG).decode()}" />'


class OwnHost:
    """Wraps Gradio's application.

    The page that it gives out names no other host, and all its files lie under the sub-path. Requests may come with
    the sub-path (as from a browser on this machine, or a proxy that leaves it on) or without it (from a proxy that
    takes it off). Large requests, and files sent by anyone, are refused: the page takes neither.

    Args:
        app: an ASGI application. prefix (`str`): the sub-path, such as "/demo"; "" for none.
    """

    def __init__(self, app: Any, prefix: str = ""):
        self.app, self.prefix = app, prefix
        self._open: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """Tell every answer that is under way that its reader has left; from within the event loop.

        The page keeps two answers open for as long as it is shown. Without this they last until they are cut off.
        """
        for end in self._open:
            if not end.done():
                end.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if self.prefix and (path == self.prefix or path.startswith(self.prefix + "/")):
            path = path[len(self.prefix) :] or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if path.startswith("/gradio_api/upload"):
            await _refuse(send, 404, "This page takes no files.")
        elif b"transfer-encoding" in headers:
            await _refuse(send, 411, "A request must say its length: this one comes in chunks.")
        elif not length.isdigit() or len(length) > 12 or int(length) > MOST_BYTES:
            await _refuse(send, 413, f"A request may have at most {MOST_BYTES:,} bytes.")
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = asyncio.get_running_loop().create_future()
        self._open.add(end)

        async def receive_or_end() -> MutableMapping[str, Any]:
            asked = asyncio.ensure_future(receive())
            try:
                await asyncio.wait({asked, end}, return_when=asyncio.FIRST_COMPLETED)
                return asked.result() if asked.done() else {"type": "http.disconnect"}
            finally:
                asked.cancel()

        try:
            await self._pass_on(scope, receive_or_end, send)
        finally:
            self._open.discard(end)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/" and scope["method"] == "GET":
            # Packed text could not be read here.
            plain = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
            await self.app({**scope, "headers": plain}, receive, _Rewriter(send, self.prefix))
        else:
            await self.app(scope, receive, send)


class _Rewriter:
    """Holds a page back until all of it is there, and sends it on without what lies elsewhere."""

    def __init__(self, send: Send, prefix: str):
        self.send, self.prefix = send, prefix
        self.start: dict[str, Any] = {}
        self.body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.start = dict(message)
            return
        self.body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = own_page(self.body.decode("utf-8"), self.prefix).encode("utf-8")
        kept = [(name, value) for name, value in self.start["headers"] if name.lower() != b"content-length"]
        await self.send({**self.start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await self.send({"type": "http.response.body", "body": body})


def own_page(page: str, prefix: str) -> str:
    """A page of Gradio's with an icon, and without the parts that name other hosts or files outside of its sub-path.

    Args:
        page (`str`): HTML. prefix (`str`): the sub-path; with one, relative addresses lie under it also where the page
            was asked for without a slash at its end.
    """
    page = _FOREIGN.sub("", page)
    return _BASE.sub(lambda base: ICON + (f'<base href="{prefix}/"' if prefix else base.group()), page, count=1)


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
