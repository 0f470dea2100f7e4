"""The compiled CPU kernel under threads: counts changed at run time, several callers at once, fork after use."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import selectivit as sv
from selectivit.ops.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no compiled CPU kernel: {cpu.status()}")


@pytest.fixture(autouse=True)
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def both(seed, n=300, heads=2, alphas=(1.3, 1.5, 1.2), scales=(0.1, 0.2, 0.3)):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 32, generator=generator).requires_grad_() for _ in range(3))
    alpha, scale = (torch.tensor(x[:heads]).view(heads, 1, 1).requires_grad_() for x in (alphas, scales))
    out = sv.entmax_attention(q, k, v, alpha=alpha, scale=scale)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, alpha, scale))


@pytest.mark.parametrize("kernel", cpu.names())
@pytest.mark.parametrize("heads", (1, 2, 3))
@pytest.mark.parametrize("factor", (1, 0.1, 0.003))  # few keys, many, all
def test_results_do_not_depend_on_threads(kernel, heads, factor):
    scales = (0.1 * factor, 0.2 * factor, 0.3 * factor)
    with cpu.using(kernel):
        torch.set_num_threads(1)
        expected = both(0, heads=heads, scales=scales)
        for threads in (2, 5, 1, 3):
            torch.set_num_threads(threads)
            for a, b in zip(both(0, heads=heads, scales=scales), expected, strict=True):
                assert torch.equal(a, b)


def test_threads_changed_between_forward_and_backward():
    q = torch.randn(1, 2, 300, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = []
    for before, after in ((1, 1), (1, 4), (4, 1)):
        torch.set_num_threads(before)
        out = sv.entmax_attention(q, q, q)
        torch.set_num_threads(after)
        gradients.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_several_python_threads_at_once():
    torch.set_num_threads(2)
    expected = [both(seed, 100 + 30 * seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, right in zip(pool.map(lambda s: both(s, 100 + 30 * s), range(8)), expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_after_use():
    torch.set_num_threads(2)
    q = torch.randn(1, 2, 300, 32)
    grad, saved = torch.ones_like(q), torch.empty(cpu.saved_bytes(q, 300), dtype=torch.uint8)
    rest = (None, None, None, 1.5, 32**-0.5, saved)  # the calls alone: torch's own backward may wait for its threads

    def run():
        forward, backward = cpu.attention(q, q, q, *rest), cpu.attention_gradients(grad, q, q, q, *rest)
        assert forward is not None and backward is not None
        return forward[0], *backward[:3]

    expected = run()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True)) else 3)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child process hung in the kernel")
