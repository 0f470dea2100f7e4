"""`selectivit features` as processes: Ctrl-C, and several ranks under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from conftest import write_photo

COMMAND = (sys.executable, "-m", "selectivit.cli.main")
# A shell's background jobs, and so tests run in one, start with Ctrl-C ignored; a terminal's do not.
FROM_A_TERMINAL = (
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from selectivit.cli.main import main; sys.exit(main(sys.argv[1:]))",
)


@pytest.fixture
def many(tmp_path):
    for i in range(60):
        write_photo(tmp_path / "many" / f"{i:02}.png", size=(40, 40) if i % 3 else (64, 40), seed=i)
    return tmp_path / "many"


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_keeps_what_is_finished_and_a_second_run_goes_on(many, tiny_model, tmp_path, environment):
    out = tmp_path / "out"
    options = ["features", many, "--model", tiny_model, "--out", out, "--size", "320", "--batch-size", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*FROM_A_TERMINAL, *options], env=environment, **pipes)
    wait_for(lambda: len(list(out.glob("*.safetensors"))) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    text, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert text == "" and err == "selectivit features: interrupted, finished files are kept\n"
    finished = sorted(out.glob("*.safetensors"))
    assert 3 <= len(finished) < 60 and all(load_file(f)["map"].isfinite().all() for f in finished)
    index = json.loads((out / "features.json").read_text())
    assert len(index["photos"]) == len(finished) and index["stopped"] == "interrupted"
    assert not [p for p in out.iterdir() if p.name.startswith(".")]
    for file in sorted(many.iterdir())[len(finished) + 1 :]:
        file.unlink()
    done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(finished) + 1} done ({len(finished)} kept)" in done.stdout


TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(environment, *arguments):
    command = [*TWO_RANKS, "-m", "selectivit.cli.main", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_two_ranks_give_the_result_of_one(run, photos, tiny_model, tmp_path, environment):
    (photos / "bad.jpg").write_text("no photo")
    arguments = ("features", photos, "missing.jpg", "--model", tiny_model, "--size", 32, "--out")
    assert run(*arguments, tmp_path / "one")[0] == 1
    done = torchrun(environment, *arguments, tmp_path / "two")
    assert done.returncode == 1, done.stderr  # torchrun's way to say that a process ended with a status
    assert done.stdout.count("5 done (0 kept), 2 skipped") == 1
    one, two = (tmp_path / name for name in ("one", "two"))
    assert json.loads((one / "features.json").read_text()) == json.loads((two / "features.json").read_text())
    files = sorted(p.relative_to(one) for p in one.rglob("*.*"))
    assert files == sorted(p.relative_to(two) for p in two.rglob("*.*"))
    for file in files:
        if file.suffix == ".safetensors":
            a, b = load_file(one / file), load_file(two / file)
            assert a.keys() == b.keys()
            for key in a:
                torch.testing.assert_close(a[key], b[key], atol=1e-5, rtol=1e-5)


def test_all_ranks_succeed_and_more_ranks_than_photos_do_no_harm(photos, tiny_model, tmp_path, environment):
    arguments = ("features", photos / "a.jpg", "--model", tiny_model, "--size", 32, "--out", tmp_path / "out")
    done = torchrun(environment, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out/features.json").read_text())["photos"]) == 1
    assert os.listdir(tmp_path / "out") and "1 done" in done.stdout


AFTER_THE_RANKS = """
from pathlib import Path
from selectivit.cli.ranks import torchrun_ranks
with torchrun_ranks() as ranks:
    import torch._dynamo
    assert ranks.gather(ranks.rank) == [0, 1]
left = sorted(f.read_text().strip() for f in Path("/proc/self/task").glob("*/comm"))
assert not [name for name in left if "gloo" in name], left
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are listed in /proc")
def test_the_threads_of_the_ranks_end_with_them(tmp_path, environment):
    (tmp_path / "ranks.py").write_text(AFTER_THE_RANKS)
    command = [*TWO_RANKS, tmp_path / "ranks.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
