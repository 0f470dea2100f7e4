"""Time of entmax attention in Triton over torch's softmax attention, and over adasplash where it is installed.

    python benchmarks/gpu_attention.py --out benchmarks/results/gpu_attention.json

On a machine with a CUDA card, within `--minutes`, of which Triton's compiler takes most. Every shape is checked against
float64 first, outputs and gradients; what is wrong is not timed, and the exit status is 1. `--check-only` runs the
checks alone; without a card it needs TRITON_INTERPRET=1 and takes tiny shapes: the script itself is known to run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import machine, write
from torch import Tensor

import selectivit as sv
from selectivit.ops.kernels import triton

SIZES = (197, 577, 1024, 1370, 2305, 4096)
ALPHAS = (1.5, 1.2, 2.0)
WIDTH = 64
SCORES = 1 << 28  # of one call, over all heads: some milliseconds, and every multiprocessor has work
SHARE_OF_MEMORY = 0.2
NEAR = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2), torch.float16: (1e-2, 2e-2)}  # output, gradients
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--minutes", type=float, default=5.0, help="what is left after these is named and not timed")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args()
    card = torch.cuda.is_available()
    if not card and not args.check_only:
        parser.error("timing needs a CUDA card; --check-only runs in Triton's interpreter with TRITON_INTERPRET=1")
    if not (args.out or args.check_only):
        parser.error("expected --out FILE.json")
    rows, wrong, late, stop = [], 0, [], time.monotonic() + 60 * args.minutes
    for n, dtype, alpha, kernel in cases(args.sizes, card):
        case = {"n": n, "dtype": str(dtype).removeprefix("torch."), "alpha": alpha, "kernel": kernel}
        if time.monotonic() > stop and not args.check_only:
            late.append(case)
            continue
        errors = check(n, dtype, alpha, kernel, "cuda" if card else "cpu")
        good = all(e <= bound for e, bound in zip(errors, (NEAR[dtype][0], *(NEAR[dtype][1],) * 3), strict=True))
        wrong += not good
        print(f"{case}: {'right' if good else 'WRONG, not timed'}, errors {[f'{e:.1e}' for e in errors]}", flush=True)
        row = {**case, "errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)), "right": good}
        rows += timed(row, n, dtype, alpha, kernel, args.rounds) if good and not args.check_only else [row]
    if late:
        print(f"not reached within {args.minutes:g} minutes: {late}")
    if args.out:
        question = "seconds of attention (B, H, N, 64) on a card, entmax in Triton over softmax"
        about = {**machine(), "card": torch.cuda.get_device_name() if card else "none: Triton's interpreter"}
        write(args.out, {"question": question, "machine": about, "kernel": triton.status(), "rows": rows, "late": late})
    return 1 if wrong else 0


def cases(sizes: list[int], card: bool) -> Iterator[tuple[int, torch.dtype, float, str]]:
    """What matters most comes first. The interpreter multiplies bfloat16's bits: float16 stands in for it there."""
    dtypes = (torch.bfloat16, torch.float32) if card else (torch.float16, torch.float32)
    for alpha in ALPHAS:
        for dtype in dtypes:
            both = dtype == torch.float32 and alpha == 1.5
            for kernel in (("on", "on tf32x3") if both else ("on",)) if card else ("interpreter",):
                yield from ((n, dtype, alpha, kernel) for n in (sizes if card else (40, 70)))


def draw(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def check(n: int, dtype: torch.dtype, alpha: float, kernel: str, device: str) -> list[float]:
    """Relative errors of the output and of the gradients of q, k and v against float64, which takes PyTorch's path."""
    shape = (1, 2, n, WIDTH if device == "cuda" else 16)
    tensors = [draw(*shape, seed=s, dtype=dtype, device=device).requires_grad_() for s in range(3)]
    grad = draw(*shape, seed=3, dtype=dtype, device=device)
    with triton.using(kernel):
        if not triton.supports(*tensors, None, alpha):
            raise RuntimeError(f"the Triton kernels do not serve here: {triton.status()}")
        out = sv.entmax_attention(*tensors, alpha=alpha)
        found = (out, *torch.autograd.grad(out, tensors, grad))
    wide = [t.detach().double().requires_grad_() for t in tensors]
    out = sv.entmax_attention(*wide, alpha=alpha)
    expected = (out, *torch.autograd.grad(out, wide, grad.double()))
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


def attends(alpha: float, kernel: str) -> dict[str, Attend]:
    def entmax(choice: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with triton.using(choice):
            return sv.entmax_attention(q, k, v, alpha=alpha)

    found: dict[str, Attend] = {
        "softmax": F.scaled_dot_product_attention,
        "selectivit": functools.partial(entmax, kernel),
        "selectivit in PyTorch": functools.partial(entmax, "off"),
    }
    if find_spec("adasplash") is not None:
        from adasplash import adasplash

        found["adasplash"] = lambda q, k, v: adasplash(q, k, v, alpha=alpha, is_causal=False)
    return found


def timed(row: dict[str, Any], n: int, dtype: torch.dtype, alpha: float, kernel: str, rounds: int) -> Iterator[Any]:
    """Forward, backward, and both; a method that fails is named with its error."""
    heads = 12
    batch = max(1, SCORES // (heads * n * n))
    free = torch.cuda.mem_get_info()[0] * SHARE_OF_MEMORY
    batch = max(1, min(batch, int(free / (heads * n * WIDTH * dtype.itemsize * 12))))
    leaves = [draw(batch, heads, n, WIDTH, seed=s, dtype=dtype, device="cuda").requires_grad_() for s in range(3)]
    grad = draw(batch, heads, n, WIDTH, seed=3, dtype=dtype, device="cuda")
    for what, build in (("forward", forward), ("backward", backward), ("both", both)):
        runs, failed = {}, {}
        for name, attend in attends(alpha, kernel).items():
            try:
                runs[name] = build(attend, leaves, grad, kernel if name == "selectivit" else "off")
                runs[name]()
            except Exception as error:  # the others are measured all the same
                failed[name] = f"{type(error).__name__}: {error}"[:300]
                runs.pop(name, None)
        seconds = on_card(runs, rounds)
        base = seconds["softmax"]["median_s"]
        ratios = {name: round(s["median_s"] / base, 3) for name, s in seconds.items()}
        print(f"  {what}, batch {batch}: {ratios} {failed or ''}", flush=True)
        yield {
            **row, "batch": batch, "heads": heads, "pass": what, "seconds": seconds, "over_softmax": ratios,
            "failed": failed,
        }  # fmt: skip


def on_card(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds by CUDA events, all of them in every round, so that a change of clock meets them all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if i >= 2:  # the first two warm up
                times[name].append(start.elapsed_time(end) / 1e3)
    return {
        name: {"median_s": statistics.median(t), "quartiles_s": statistics.quantiles(t, n=4)[::2], "rounds": rounds}
        for name, t in times.items()
    }


def forward(attend: Attend, leaves: list[Tensor], grad: Tensor, kernel: str) -> Callable[[], Any]:
    q, k, v = (t.detach() for t in leaves)
    return lambda: attend(q, k, v)


def backward(attend: Attend, leaves: list[Tensor], grad: Tensor, kernel: str) -> Callable[[], Any]:
    q, k, v = leaves
    out = attend(q, k, v)

    def run() -> Any:
        with triton.using(kernel):
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run


def both(attend: Attend, leaves: list[Tensor], grad: Tensor, kernel: str) -> Callable[[], Any]:
    q, k, v = leaves

    def run() -> Any:
        with triton.using(kernel):
            return torch.autograd.grad(attend(q, k, v), leaves, grad)

    return run


if __name__ == "__main__":
    sys.exit(main())
