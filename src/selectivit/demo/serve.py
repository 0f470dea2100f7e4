"""Serve the page: to this machine alone unless asked otherwise, and without a word to anyone else."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.demo.answers import Answers

if TYPE_CHECKING:
    import gradio as gr

    from selectivit.demo.page import Start

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SILENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
MISSING = "the web page needs gradio: pip install 'selectivit[demo]'"


def launch(answers: Answers, start: Start, host: str = "127.0.0.1", port: int = 7860, root_path: str = "") -> gr.Blocks:
    """Start serving, in threads of this process.

    Args:
        answers: to what is asked.
        start: what the page begins with.
        host: address to listen on.
        port: to listen on.
        root_path: path that a proxy serves the page under, such as "/demo".

    Returns:
        The running page: `local_url` is where, `close()` ends it.

    Raises:
        ImportError: gradio is missing.
        OSError: the port is taken or not allowed.
    """
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    _check_port(host, port)
    _reach_itself(host)
    need_gradio()
    from gradio.themes import Default

    from selectivit.demo.page import STATIC, build

    page = build(answers, start)
    fonts: dict[str, Any] = {  # of the visitor's system: the theme's own would come from elsewhere
        "font": ["system-ui", "sans-serif"],
        "font_mono": ["ui-monospace", "monospace"],
    }
    page.queue(max_size=64, api_open=False).launch(
        server_name=host,
        server_port=port,
        root_path=root_path,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        inbrowser=False,
        inline=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        max_file_size=round(answers.limits.megabytes * 1e6),
        state_session_capacity=200,
        theme=Default(**fonts),
        css_paths=[Path(STATIC / "page.css")],
    )
    return page


def need_gradio() -> None:
    """Say how to install gradio where it is missing.

    Raises:
        ImportError: it is.
    """
    try:
        importlib.import_module("gradio")
    except ModuleNotFoundError as error:
        raise ImportError(f"{MISSING} ({error})") from error


def _check_port(host: str, port: int) -> None:
    """Say that a port is not to be had before anything is built for it."""
    try:
        where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(where[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where[4])
    except (OSError, OverflowError) as error:
        raise OSError(
            f"cannot listen on {host}:{port} ({error}): give a --port that is free, and a --host of this machine"
        ) from error


def _reach_itself(host: str) -> None:
    """Gradio asks itself whether it is there: that must not go through a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join(dict.fromkeys([*known, *LOOPBACK, host]))
