"""Time of entmax attention over torch's softmax attention and the entmax package's, in one process, interleaved.

    python benchmarks/attention_speed.py --out benchmarks/results/attention_speed_cpu.json --qkv qkv.safetensors

`--qkv` holds q_N, k_N, v_N of shape (1, 6, N, 64) of a real layer; `--record PHOTO` makes such a file from the middle
layer of DINOv2-small first. Normal scores of three widths are timed in any case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import interleaved, machine, photo_batch, write
from torch import Tensor

import selectivit as sv
from selectivit.ops.kernels import cpu

SIZES = {257: 224, 1370: 518, 4097: 896}  # tokens: pixels a side
ROUNDS = {257: 200, 1370: 40, 4097: 10}
PACKAGE_UP_TO = 1370  # the package takes ten seconds a run at 4097: once there
ALL_KERNELS_UP_TO = 1370  # the slower ones are timed up to here
Case = tuple[str, int, Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--qkv", type=Path)
    parser.add_argument("--record", type=Path, metavar="PHOTO")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args()
    if args.record:
        record(args.record, args.qkv)
    rows = []
    for name, n, q, k, v in cases(args.qkv, args.sizes):
        rounds = max(3, round(ROUNDS.get(n, 10) * args.rounds))
        for factor in (1.0, 0.12):
            for alpha in (1.5, 1.2, 2.0) if name == "DINOv2-small, layer 6" else (1.5,):
                rows += timed(name, n, q, k, v, alpha, factor, rounds)
        if name == "DINOv2-small, layer 6":
            rows += timed_package(name, n, q, k, v) + timed_bfloat16(name, n, q, k, v, rounds)
    question = "seconds of attention (1, 6, N, 64), entmax over softmax"
    write(args.out, {"question": question, "machine": machine(), "kernel": cpu.status(), "rows": rows})


def record(photo: Path, out: Path) -> None:
    """Keep the middle layer's q, k and v of one photo at three sizes."""
    from safetensors.torch import save_file

    from selectivit.swap.record import recording
    from selectivit.swap.sites import find_sites

    model = sv.load_model("dinov2-small")
    sites = find_sites(model)[0]
    kept = {}
    for n, side in SIZES.items():
        image = photo_batch(model, [photo], side)
        with torch.no_grad(), recording(sites) as calls:
            model(image)
        call = calls[sites[len(sites) // 2].name][0]
        kept |= {f"{c}_{n}": t.contiguous().clone() for c, t in zip("qkv", (call.q, call.k, call.v), strict=True)}
    save_file(kept, out)


def cases(qkv: Path | None, sizes: list[int]) -> Iterator[Case]:
    real: dict[str, Tensor] = {}
    if qkv:
        from safetensors.torch import load_file

        real = load_file(qkv)
    for n in sizes:
        if f"q_{n}" in real:
            yield "DINOv2-small, layer 6", n, *(real[f"{c}_{n}"] for c in "qkv")
        for width in (0.5, 2.0, 8.0):
            q, k, v = (torch.randn(1, 6, n, 64, generator=torch.Generator().manual_seed(s)) for s in range(3))
            yield f"normal scores, deviation {width:g}", n, q * width, k, v


def timed(name: str, n: int, q: Tensor, k: Tensor, v: Tensor, alpha: float, factor: float, rounds: int) -> list[Any]:
    """Forward, backward, and both, over every kernel that this machine can run."""
    kernels = [*cpu.names()[:1], *(f"{kernel} float32" for kernel in cpu.names()[:1]), *cpu.names()[1:]] or ["off"]
    if n > ALL_KERNELS_UP_TO:
        kernels = kernels[:2]
    scale = factor * q.shape[-1] ** -0.5

    def entmax(kernel: str, *t: Tensor) -> Tensor:
        with cpu.using(kernel):
            return sv.entmax_attention(*t, alpha=alpha, scale=scale)

    def softmax(_: str, *t: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*t)

    found = []
    support = float((sv.entmax(q[:, :, ::8] @ k.mT * scale, alpha) > 0).float().mean())
    for what, build in (("forward", forward), ("backward", backward), ("both", both)):
        row = {"scores": name, "n": n, "alpha": alpha, "factor": factor, "support": round(support, 4), "pass": what}
        seconds, ratios = {}, {}
        for kernel in kernels:  # in pairs: a third candidate would cool the caches of both
            runs = {"softmax": build(softmax, "", q, k, v), kernel: build(entmax, kernel, q, k, v)}
            pair = interleaved(runs, rounds if what == "forward" else max(3, rounds // 3))
            seconds[kernel] = pair
            ratios[kernel] = round(pair[kernel]["median_s"] / pair["softmax"]["median_s"], 3)
        found.append({**row, "seconds": seconds, "over_softmax": ratios})
        print(f"{name} x {factor}, N = {n}, alpha {alpha}, support {support:.3f}, {what}: {ratios}", flush=True)
    return found


Attend = Callable[..., Tensor]


def forward(attend: Attend, kernel: str, *tensors: Tensor) -> Callable[[], Any]:
    return lambda: attend(kernel, *tensors)


def backward(attend: Attend, kernel: str, *tensors: Tensor) -> Callable[[], Any]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = attend(kernel, *leaves)
    grad = torch.ones_like(out)

    def run() -> Any:
        with cpu.using(kernel or "off"):
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run


def both(attend: Attend, kernel: str, *tensors: Tensor) -> Callable[[], Any]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    grad = torch.ones(*tensors[0].shape[:-1], tensors[2].shape[-1])

    def run() -> Any:
        with cpu.using(kernel or "off"):
            return torch.autograd.grad(attend(kernel, *leaves), leaves, grad)

    return run


def timed_package(name: str, n: int, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
    from entmax import entmax15

    runs = {
        "entmax package": lambda: entmax15(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v,
        "selectivit": lambda: sv.entmax_attention(q, k, v),
    }
    seconds = interleaved(runs, 5 if n <= PACKAGE_UP_TO else 1)
    times = round(seconds["entmax package"]["median_s"] / seconds["selectivit"]["median_s"], 1)
    print(f"{name}, N = {n}: {times} times as fast as the entmax package", flush=True)
    return [{"scores": name, "n": n, "pass": "forward", "seconds": seconds, "times_as_fast_as_package": times}]


def timed_bfloat16(name: str, n: int, q: Tensor, k: Tensor, v: Tensor, rounds: int) -> list[Any]:
    half = [t.bfloat16() for t in (q, k, v)]
    runs = {
        "softmax": lambda: F.scaled_dot_product_attention(*half),
        "selectivit": lambda: sv.entmax_attention(*half),
    }
    seconds = interleaved(runs, rounds)
    ratio = round(seconds["selectivit"]["median_s"] / seconds["softmax"]["median_s"], 3)
    print(f"{name}, N = {n}, bfloat16 forward: {ratio}", flush=True)
    return [{"scores": name, "n": n, "dtype": "bfloat16", "pass": "forward", "seconds": seconds, "over_softmax": ratio}]


if __name__ == "__main__":
    main()
