"""Pretraining as processes: killed without warning, and shared by two.

The quick tests fork this process, which has Lightning loaded already; the slow ones start Python and torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("lightly")
pytest.importorskip("timm")

from dino_runs import quick
from run_dino import main
from test_distill_processes import environment, ranks, torchrun  # noqa: F401

from selectivit.train.pretrain import pretrain
from selectivit.train.settings import Running

RUN = Path(__file__).with_name("run_dino.py")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    pretrain([photos], out, quick(), Running(workers=0))
    return load_file(out / "final" / "model.safetensors")


def forked(photos, out, fatal, environments=({},)):
    """Run in forks of this process; gives their exit codes."""
    context = multiprocessing.get_context("fork")

    def run(more):
        os.environ.update(more)
        main(str(photos), str(out), fatal)

    processes = [context.Process(target=run, args=(more,)) for more in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("step", [1, 4])
def test_a_killed_run_goes_on_to_the_very_weights_of_an_unbroken_one(step, whole, photos, tmp_path):
    assert forked(photos, tmp_path, step) == [-9]
    pretrain([photos], tmp_path, quick(), Running(workers=0, checkpoint_every=2))
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_two_processes_with_half_a_batch_each_are_one(whole, photos, tmp_path):
    assert forked(photos, tmp_path, 0, ranks(2)) == [0, 0]
    found = load_file(tmp_path / "final" / "model.safetensors")
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 6))
def test_killed_after_any_step(step, whole, photos, tmp_path, environment):  # noqa: F811
    assert subprocess.run([sys.executable, RUN, photos, tmp_path, str(step)], env=environment).returncode == -9
    assert subprocess.run([sys.executable, RUN, photos, tmp_path, "0"], env=environment).returncode == 0
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_under_torchrun_killed_and_started_again(whole, photos, tmp_path, environment):  # noqa: F811
    assert torchrun(environment, RUN, photos, tmp_path, "3").returncode != 0
    done = torchrun(environment, RUN, photos, tmp_path, "0")
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "final" / "model.safetensors")
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], atol=1e-5, rtol=1e-4, msg=name)
