"""α-entmax as autograd, vmap and torch.compile see it: one operator and its pull-backs, also to a learnable α."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import derivatives
from .kernels import cpu
from .threshold import solve_rows

TILE_ELEMENTS = 1 << 18  # on CPU a tile of 1 MB stays in the cache through the solver's passes
DEVICE_TILE_ELEMENTS = 1 << 26  # on an accelerator only memory bounds the tile


def working_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for every other floating dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("selectivit::entmax", mutates_args=())
def entmax_forward(scores: Tensor, alpha: float, alpha_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Solve along the last dim, tile by tile: (p in the scores' dtype, τ in the working dtype, shape (…, 1))."""
    if alpha_rows is not None and not bool(((alpha_rows >= 1) & (alpha_rows < math.inf)).all()):
        low, high = alpha_rows.min().item(), alpha_rows.max().item()
        raise ValueError(f"every alpha must be a finite number >= 1, got values from {low:g} to {high:g}")
    n = scores.shape[-1]
    work = working_dtype(scores)
    p = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    tau = torch.zeros(*scores.shape[:-1], 1, dtype=work, device=scores.device)
    if scores.numel() == 0:
        return p, tau
    flat, flat_p, flat_tau = scores.reshape(-1, n), p.view(-1, n), tau.view(-1, 1)
    flat_alpha = None if alpha_rows is None else alpha_rows.reshape(-1, 1)
    step = max(1, (TILE_ELEMENTS if scores.device.type == "cpu" else DEVICE_TILE_ELEMENTS) // n)
    fast = alpha_rows is None and cpu.supports_rows(scores, alpha)
    step = len(flat) if fast and scores.dtype == work else step
    for start in range(0, len(flat), step):
        tile = slice(start, start + step)
        if fast:
            flat_p[tile], flat_tau[tile] = cpu.entmax_rows(flat[tile].to(work), alpha)
            continue
        a = alpha if flat_alpha is None else flat_alpha[tile]
        flat_p[tile], flat_tau[tile] = solve_rows(flat[tile].to(work), a)
    return p, tau


@entmax_forward.register_fake
def _(scores: Tensor, alpha: float, alpha_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = scores.new_empty((*scores.shape[:-1], 1), dtype=working_dtype(scores))
    return scores.new_empty(scores.shape), rows


class _Entmax(torch.autograd.Function):
    """The part that torch.compile traces: forward and (twice) backward."""

    @staticmethod
    def forward(scores: Tensor, alpha: float, alpha_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.selectivit.entmax(scores, alpha, alpha_rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, ctx.alpha, alpha_rows = inputs
        p, tau = output
        ctx.mark_non_differentiable(tau)
        ctx.save_for_backward(scores, p, alpha_rows)
        ctx.save_for_forward(scores, p, alpha_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]
        scores, p, alpha_rows = ctx.saved_tensors
        if alpha_rows is None or not ctx.needs_input_grad[2]:
            function = _Pullback if torch.compiler.is_compiling() else _PullbackFunctorch
            return function.apply(scores, p.detach(), g, ctx.alpha, alpha_rows), None, None
        pullback = _AlphaPullback if torch.compiler.is_compiling() else _AlphaPullbackFunctorch
        dx, da = pullback.apply(scores, p.detach(), g, alpha_rows)
        return dx, None, da


class _EntmaxFunctorch(_Entmax):
    """The same with forward mode and vmap, which torch.compile's tracer does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        dx, _, da = tangents
        scores, p, alpha_rows = ctx.saved_tensors
        alpha = ctx.alpha if alpha_rows is None else alpha_rows
        tangent = torch.zeros_like(p)
        if dx is not None:
            tangent = tangent + _PullbackFunctorch.apply(scores, p, dx, ctx.alpha, alpha_rows)
        if da is not None:
            tangent = tangent + da * derivatives.alpha_derivative(p, alpha)
        return tangent.to(p.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        scores, alpha, alpha_rows = args
        scores, alpha_rows = _batch_first(info, (in_dims[0], in_dims[2]), scores, alpha_rows)
        return _EntmaxFunctorch.apply(scores, alpha, alpha_rows), (0, 0)


class _Pullback(torch.autograd.Function):
    """J·g as a function of scores and g, so that its own derivative is the closed form and not one through p^(2−α)."""

    @staticmethod
    def forward(scores: Tensor, p: Tensor, g: Tensor, alpha: float, alpha_rows: Tensor | None) -> Tensor:
        a = alpha if alpha_rows is None else alpha_rows
        work = working_dtype(p)
        return derivatives.jacobian_product(p.to(work), a, g.to(work)).to(p.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, p, g, ctx.alpha, alpha_rows = inputs
        ctx.save_for_backward(p, g, alpha_rows)
        ctx.save_for_forward(p, g, alpha_rows)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's stub: ctx positional-only)
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        h = grads[0]
        p, g, alpha_rows = ctx.saved_tensors
        a, work = ctx.alpha if alpha_rows is None else alpha_rows, working_dtype(p)
        wide_p, wide_g, wide_h = p.to(work), g.to(work), h.to(work)
        dx = derivatives.second_product(wide_p, a, wide_g, wide_h).to(p.dtype)
        return dx, None, derivatives.jacobian_product(wide_p, a, wide_h).to(p.dtype), None, None


class _PullbackFunctorch(_Pullback):
    """The same with forward mode (for Hessians) and vmap."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dx, _, dg, *_ = tangents
        p, g, alpha_rows = ctx.saved_tensors
        a = ctx.alpha if alpha_rows is None else alpha_rows
        tangent = torch.zeros_like(g)
        if dx is not None:
            tangent = tangent + derivatives.second_product(p, a, g, dx)
        if dg is not None:
            tangent = tangent + derivatives.jacobian_product(p, a, dg)
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        scores, p, g, alpha, rows = args
        dims = (*in_dims[:3], in_dims[4])
        scores, p, g, rows = _batch_first(info, dims, scores, p, g, rows)
        return _PullbackFunctorch.apply(scores, p, g, alpha, rows), 0


class _AlphaPullback(torch.autograd.Function):
    """The pull-back of g to scores and to a learnable α; its own derivative is taken through `_composed`."""

    @staticmethod
    def forward(scores: Tensor, p: Tensor, g: Tensor, alpha_rows: Tensor) -> tuple[Tensor, Tensor]:
        wide_p, wide_g = p.to(alpha_rows.dtype), g.to(alpha_rows.dtype)
        dx = derivatives.jacobian_product(wide_p, alpha_rows, wide_g).to(p.dtype)
        return dx, (wide_g * derivatives.alpha_derivative(wide_p, alpha_rows)).sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's stub: ctx positional-only)
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        scores, p, g, alpha_rows = ctx.saved_tensors
        with torch.enable_grad():
            x, upstream, alpha = (t.detach().double().requires_grad_() for t in (scores, g, alpha_rows))
            found = torch.autograd.grad(_composed(x, alpha, p.double()), (x, alpha), upstream, create_graph=True)
            again = torch.autograd.grad(found, (x, upstream, alpha), [h.double() for h in grads])
        dx, dg, da = (d.to(t.dtype) for d, t in zip(again, (scores, g, alpha_rows), strict=True))
        return dx, None, dg, da


class _AlphaPullbackFunctorch(_AlphaPullback):
    """The same with vmap."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _AlphaPullbackFunctorch.apply(*_batch_first(info, in_dims, *args)), (0, 0)


def _batch_first(info: Any, dims: tuple[Any, ...], *tensors: Tensor | None) -> list[Any]:
    """Move the mapped dim in front, where it is one more row dim; repeat what is not mapped."""
    return [
        None if t is None else t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


def _composed(scores: Tensor, alpha: Tensor, p: Tensor) -> Tensor:
    """α-entmax from differentiable torch operations: two of Newton's steps from the solution, exact to third order.

    For second derivatives alone. ε is kept at 1e-4 or more, where the difference quotients of float64 still hold.
    """
    eps = alpha - 1
    eps = eps + (eps.clamp_min(1e-4) - eps).detach()
    support, top = p > 0, scores.detach().amax(-1, keepdim=True)
    seen = support.any(-1, keepdim=True)  # a row that is masked throughout stays at zeros, with zero derivatives
    z = eps * torch.where(support, scores - top, 0.0)
    highest = torch.where(seen, p.amax(-1, keepdim=True), 1.0)
    sigma = -torch.expm1(eps.detach() * highest.log())
    log_p = torch.log1p(z - sigma) / eps
    for _ in range(2):
        s0 = torch.where(seen, torch.where(support, log_p.exp(), 0.0).sum(-1, keepdim=True), 1.0)
        s1 = torch.where(seen, torch.where(support, ((1 - eps) * log_p).exp(), 0.0).sum(-1, keepdim=True), 1.0)
        sigma = sigma - s0 * torch.expm1(-eps * s0.log()) / s1
        log_p = torch.log1p(z - sigma) / eps
    return torch.where(support, log_p.exp(), 0.0)
