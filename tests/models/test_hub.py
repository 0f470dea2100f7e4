import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from selectivit.models.hub import ask_hub, use_hub


class Quiet(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_any_answer_counts(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert ask_hub().available
        with use_hub() as hub:
            assert hub.available and not constants.HF_HUB_OFFLINE
        server.shutdown()


def test_a_refusal_is_told_and_the_libraries_do_not_try(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening: connections are refused
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with use_hub() as hub:
            assert not hub.available and "cannot be reached" in hub.why_not
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE


def test_silence_is_not_waited_for(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert not ask_hub(timeout=0.3).available
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_is_honoured_even_when_set_late(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    hub = ask_hub()
    assert not hub.available and variable in hub.why_not


def test_the_setting_is_put_back_after_an_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RuntimeError), use_hub():
        assert constants.HF_HUB_OFFLINE
        raise RuntimeError
    assert not constants.HF_HUB_OFFLINE
