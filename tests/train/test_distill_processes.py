"""Distillation as processes: killed without warning, and shared by two.

The quick tests fork this process, which has Lightning loaded already; the slow ones start Python and torchrun.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_tiny import main
from safetensors.torch import load_file
from tiny_runs import make_student, make_teacher, quick

from selectivit.train.distill import distill
from selectivit.train.settings import Running

RUN = Path(__file__).with_name("run_tiny.py")
# Python warns of forks beside threads; these tests have none that hold a lock.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    distill(make_student(), make_teacher(), [photos], out, quick(), Running(workers=0))
    return load_file(out / "final" / "model.safetensors")


def forked(photos, out, fatal, environments=({},)):
    """Run in forks of this process; gives their exit codes."""
    context = multiprocessing.get_context("fork")

    def run(environment):
        os.environ.update(environment)
        main(str(photos), str(out), fatal)

    processes = [context.Process(target=run, args=(environment,)) for environment in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def ranks(count):
    """What torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0, "NODE_RANK": 0}
    each = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in environment.items()} for environment in each]


def assert_one_run(out, whole):
    found = load_file(out / "final" / "model.safetensors")
    for name in whole:
        # Muon orthogonalises the blocks' matrices in bfloat16: the last bit of a gradient may move one of theirs.
        atol = 1e-4 if name.startswith("blocks.") and whole[name].ndim == 2 else 1e-5
        torch.testing.assert_close(found[name], whole[name], atol=atol, rtol=1e-4, msg=name)
    assert json.loads((out / "run.json").read_text())["state"] == "done"


def test_a_killed_run_goes_on_to_the_very_weights_of_an_unbroken_one(whole, photos, tmp_path):
    assert forked(photos, tmp_path, 3) == [-9]
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["global_step"] == 2
    distill(make_student(), make_teacher(), [photos], tmp_path, quick(), Running(workers=0, checkpoint_every=2))
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_two_processes_with_half_a_batch_each_are_one(whole, photos, tmp_path):
    assert forked(photos, tmp_path, 0, ranks(2)) == [0, 0]
    assert_one_run(tmp_path, whole)


@pytest.fixture(scope="module")
def environment():
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def torchrun(environment, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, *map(str, arguments)], env=environment, capture_output=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 6))
def test_killed_after_any_step(step, whole, photos, tmp_path, environment):
    assert subprocess.run([sys.executable, RUN, photos, tmp_path, str(step)], env=environment).returncode == -9
    assert subprocess.run([sys.executable, RUN, photos, tmp_path, "0"], env=environment).returncode == 0
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_under_torchrun_killed_and_started_again(whole, photos, tmp_path, environment):
    assert torchrun(environment, RUN, photos, tmp_path, "3").returncode != 0
    done = torchrun(environment, RUN, photos, tmp_path, "0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_one_run(tmp_path, whole)
