"""`masw app`: the dashboard in a browser, served on this machine alone unless a host says otherwise."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from masw.errors import MaswError, UsageError


def app(
    port: Annotated[int, typer.Option(help="Port to serve on.", min=1, max=65535)] = 8501,
    host: Annotated[
        str, typer.Option(help="Address to serve on; the default is reachable from this machine alone.")
    ] = "127.0.0.1",
    pair: Annotated[
        str | None, typer.Option(help="Pair that the settings start with: a preset, or DRAFT:TARGET. Default: one that is here.")
    ] = None,
    adaptor: Annotated[list[Path] | None, typer.Option(help="Adaptor to offer beside the shipped ones (repeatable).")] = None,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Serve the dashboard: live runs on your own documents, races, traces, a memory calculator. Ctrl-C ends it."""
    from masw.adaptor import read_info
    from masw.catalogue import resolve_pair
    from masw.devices import resolve_device, resolve_dtype

    if importlib.util.find_spec("streamlit") is None or importlib.util.find_spec("plotly") is None:
        raise UsageError("the app needs streamlit and plotly; install them with: pip install 'masw[app]'")
    resolve_dtype(dtype, resolve_device(device))
    if pair is not None:
        resolve_pair(pair)
    for path in adaptor or ():
        read_info(path)
    check_port(host, port)
    script = folder() / "main.py"
    environment = {
        **os.environ,
        "MASW_APP_PAIR": pair or os.environ.get("MASW_APP_PAIR", ""),
        "MASW_APP_ADAPTORS": os.pathsep.join(str(p.absolute()) for p in adaptor or ()),
        "MASW_APP_DEVICE": device,
        "MASW_APP_DTYPE": dtype,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(package().parent), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [
        sys.executable, "-m", "streamlit", "run", str(script), f"--server.port={port}", f"--server.address={host}",
        f"--server.headless={'false' if browser else 'true'}",
    ]  # fmt: skip
    typer.echo(f"masw: http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}  (Ctrl-C ends it)", err=True)
    server = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda number, frame: server.terminate())
    try:
        code = server.wait()
    except KeyboardInterrupt:
        server.terminate()
        server.wait()
        return
    if code not in (0, -signal.SIGTERM):
        raise MaswError(f"the server ended with code {code}; the lines above say why")


def folder() -> Path:
    """The app's scripts: inside an installed package, beside it in a checkout."""
    installed = package() / "_app"
    return installed if installed.is_dir() else package().parent / "app"


def package() -> Path:
    import masw

    return Path(masw.__file__).parent


def check_port(host: str, port: int) -> None:
    """Raises UsageError when nothing can be served there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise UsageError(f"host '{host}' is unknown; use 127.0.0.1") from None
    with socket.socket(family, kind, protocol) as probe:
        if os.name == "posix":  # a port whose last user just left is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            free = f"; try --port {port + 1}" if port < 65535 else ""
            raise UsageError(f"port {port} on {host} cannot be used ({error.strerror or error}){free}") from None
