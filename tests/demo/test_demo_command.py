"""`selectivit demo`: starts, serves, and ends by Ctrl-C; what cannot be is said before."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from demo_parts import save_vit, write_photo

pytest.importorskip("gradio")
pytest.importorskip("jsonargparse")

from selectivit.cli.main import main

# A shell's background jobs, and so tests run in one, start with Ctrl-C ignored; a terminal's do not.
FROM_A_TERMINAL = (
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from selectivit.cli.main import main; sys.exit(main(sys.argv[1:]))",
)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vit(tmp_path_factory.mktemp("model") / "vit")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_it_serves_until_it_is_interrupted(vit, port, tmp_path):
    (tmp_path / "photos").mkdir()
    write_photo(tmp_path / "photos" / "red.png", (200, 30, 30))
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no photo")
    command = [*FROM_A_TERMINAL, "demo", str(tmp_path / "photos"), "--model", vit]
    command += ["--clip", "/no/such/clip", "--port", str(port), "--size", "112", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert f"http://127.0.0.1:{port}/" in line, process.stderr.read()
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20).read().decode()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                _, said = process.communicate(timeout=30)
            finally:
                process.kill()  # nothing, where it has ended
    assert "<title>" in page or "gradio_config" in page
    assert process.returncode == 0 and "ended" in said and "Traceback" not in said
    assert "broken.jpg is not a picture" in said and "/no/such/clip is not ready" in said


def test_a_port_that_is_taken_is_told(vit, port, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert main(["demo", "--model", vit, "--size", "112", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--max-megabytes", "0"], "--max-megapixels above 0"),
        (["no/such/photo.jpg"], "no photo can be read"),
        (["--veca", "no/such/folder/"], "there is no folder"),
    ],
)
def test_what_cannot_be_is_told(given, told, vit, port, capsys):
    assert main(["demo", *given, "--model", vit, "--size", "112", "--port", str(port)]) == 2
    assert told in capsys.readouterr().err


def test_strangers_may_name_what_is_offered_alone(vit):
    from selectivit.cli.demo import DemoOptions, prepare

    small = {"model": vit, "size": 112}
    assert prepare(DemoOptions(**small), [])[0].shelf.any_name
    assert not prepare(DemoOptions(**small, host="0.0.0.0"), [])[0].shelf.any_name
    assert prepare(DemoOptions(**small, host="0.0.0.0", any_model=True), [])[0].shelf.any_name
