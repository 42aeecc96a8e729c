"""Serving the page: the port is taken before anything is loaded, and signals end it in good order."""

import errno
import re
import socket
import webbrowser
from collections.abc import Callable
from typing import Any

# An answer that is under way at the end gets so long.
_LAST_S = 2


class AddressError(ValueError):
    """An address that cannot be used, in a sentence."""


def clean_prefix(text: str) -> str:
    """A sub-path as "/demo", however it was written; "" for none.

    Raises:
        AddressError: it is no path.
    """
    inner = text.strip("/")
    if not inner:
        return ""
    if not re.fullmatch(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*", inner):
        raise AddressError(
            f"--root-path {text}: give a path alone, such as /demo. Host and scheme come with each request, in the "
            "proxy's headers X-Forwarded-Host and X-Forwarded-Proto."
        )
    return f"/{inner}"


def open_port(host: str, port: int) -> socket.socket:
    """Take a port, so that nobody else gets it while the model is loaded.

    Args:
        host (`str`): a name or address of this machine. port (`int`): 0 takes any that is free.

    Raises:
        AddressError: the port is busy or may not be used, or this machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"--host {host}: there is no such address.") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(128)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressError(
                f"port {port} of {host} is in use by another program: end that one, or choose another port with --port "
                "(0 takes any that is free)."
            ) from error
        if error.errno == errno.EACCES:
            raise AddressError(f"port {port} may not be used by you: choose one from 1024 on with --port.") from error
        raise AddressError(f"--host {host}: it cannot be listened on ({error.strerror}).") from error
    return taken


def address_of(host: str, taken: socket.socket, prefix: str) -> str:
    """What to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"http://{f'[{name}]' if ':' in name else name}:{taken.getsockname()[1]}{prefix}/"


def serve(app: Any, taken: socket.socket, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
    """Answer requests until a signal comes.

    Args:
        app (`OwnHost`): an ASGI application. taken (`socket.socket`): that is listened on.
        on_ready: called once it answers. on_stop: called when a signal has come, before last answers are waited for.

    Raises:
        KeyboardInterrupt: Ctrl-C. What a handler of SIGTERM raises, where the caller has set one.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.close()
            await super().shutdown(sockets=sockets)

        def handle_exit(self, sig: int, frame: Any) -> None:
            on_stop()
            super().handle_exit(sig, frame)

    # Gradio reads the proxy's headers by itself.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, proxy_headers=False, timeout_graceful_shutdown=_LAST_S
    )
    Server(config).run(sockets=[taken])


def open_browser(address: str) -> bool:
    """Show an address in the user's browser; False where there is none."""
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
