"""entmax attention under autograd: first derivatives in tiles, further ones through the composed whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from . import derivatives
from .entmax import entmax
from .entmax_autograd import _PullbackFunctorch, working_dtype
from .tiles import (
    attention_backward,
    attention_forward,
    masked_scores,
    query_tiles,
    rows_of,
    saved_for,
    unexpanded,
    without_hidden_keys,
)


def attend_in_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alpha_rows: Tensor | None,
    scale_rows: Tensor | None,
    alpha: float,
    scale: float,
) -> Tensor:
    """`attention_forward`'s output, joined to whichever kind of differentiation is under way, if any."""
    tensors = (q, k, v, mask, alpha_rows, scale_rows)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        return (
            _TiledAttention.apply(*tensors, alpha, scale, save)[0] if save else _run_forward(*tensors, alpha, scale)[0]
        )
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _TiledAttentionFunctorch.apply(*tensors, alpha, scale, save)[0]
    return _TiledAttentionEager.apply(*tensors, alpha, scale) if save else _run_forward(*tensors, alpha, scale)[0]


def _at_hand(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or wraps the tensors, so that the operator's dispatch (20 µs) may be left out."""
    for t in tensors:
        if t is not None and type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def _run_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_forward`, through the operator where someone needs to see it."""
    attend: Callable[..., Any] = attention_forward if _at_hand(*inputs[:6]) else torch.ops.selectivit.entmax_attention
    return attend(*inputs)


def _run_backward(backward: Callable[..., Any], grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    """`attention_backward` or its operator, without the autocast that may be on around a backward pass."""
    if not torch.compiler.is_compiling() and torch.is_autocast_enabled(grad.device.type):
        with torch.autocast(grad.device.type, enabled=False):
            return backward(grad, *rest)
    return backward(grad, *rest)


class _TiledAttention(torch.autograd.Function):
    """Attention whose first derivatives are the tiled closed form. This class alone is what torch.compile traces."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, alpha_rows: Any, scale_rows: Any, alpha: Any, scale: Any, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _run_forward(q, k, v, mask, alpha_rows, scale_rows, alpha, scale, save)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.alpha, ctx.scale, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for what is saved would cost as much as the gradients
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grads[0]), None, None, None


class _TiledAttentionEager(torch.autograd.Function):
    """The same for autograd alone, in one function: torch binds the arguments of a separate setup_context by name."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, tau, saved = _run_forward(*inputs, True)
        *tensors, ctx.alpha, ctx.scale = inputs
        ctx.save_for_backward(*tensors, tau, saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grads[0]), None, None


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, mask and the rows of α and scale; None for those that nobody asked for."""
    if grad is None:
        return (None,) * 6
    *tensors, tau, saved = ctx.saved_tensors
    needs = ctx.needs_input_grad
    inputs = (grad, tau, *tensors, ctx.alpha, ctx.scale, needs[3:6], saved)
    if torch.compiler.is_compiling():
        found = _run_backward(torch.ops.selectivit.entmax_attention_backward, *inputs)
    elif not torch.is_grad_enabled() and _at_hand(grad, *tensors):
        found = _run_backward(attention_backward, *inputs)
    else:
        found = _TiledGradients.apply(*inputs)
    dq, dk, dv, dmask, da, ds = found
    return (
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        dmask.to(tensors[3].dtype) if needs[3] else None,
        da if needs[4] else None,
        ds if needs[5] else None,
    )


class _TiledAttentionFunctorch(_TiledAttention):
    """The same with forward mode, which goes by tiles too, and vmap, which is one more leading dim."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
        if eager_transforms.JVP_NESTING > 1:  # torch switches the outer level off in here, and would give wrong numbers
            raise NotImplementedError(
                "entmax_attention has no forward-over-forward derivatives: put reverse mode inside, jacfwd(jacrev)"
            )
        return _tangent(ctx.saved_tensors, ctx.alpha, ctx.scale, tangents[:6]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        front = _batch_first(info, in_dims[:6], inputs[:6])
        return _TiledAttentionFunctorch.apply(*front, *inputs[6:]), (0, 0, None)


class _TiledGradients(torch.autograd.Function):
    """The gradients as a function of what they depend on; their own derivatives hold the whole matrix."""

    @staticmethod
    def forward(grad: Tensor, tau: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _run_backward(torch.ops.selectivit.entmax_attention_backward, grad, tau, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, _, *tensors, ctx.alpha, ctx.scale, ctx.needs, _ = inputs
        ctx.save_for_backward(grad, *tensors)
        ctx.save_for_forward(grad, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients, inputs, places = _composed_gradients(ctx)
        pull_back = torch.func.vjp(gradients, *inputs)[1]
        found = dict(zip(places, pull_back(tuple(grads[place - 1] for place in places[1:])), strict=True))
        return found[0], None, *(found.get(place) for place in range(1, 7)), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        if not torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "entmax_attention's gradients have no torch.autograd.forward_ad derivative: use torch.func.jvp or "
                "torch.func.hessian"
            )
        gradients, inputs, places = _composed_gradients(ctx)
        directions = (tangents[0], *tangents[2:8])
        along = [
            torch.zeros_like(x) if directions[place] is None else directions[place]
            for x, place in zip(inputs, places, strict=True)
        ]
        found = dict(zip(places[1:], torch.func.jvp(gradients, tuple(inputs), tuple(along))[1], strict=True))
        return tuple(found[place] if place in found else inputs[0].new_empty(0) for place in range(1, 7))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *numbers, saved = inputs[8:]
        front = _batch_first(info, in_dims[:8], inputs[:8])
        found = _TiledGradients.apply(*front, *numbers, saved_for(saved, *front[2:5]))
        return found, tuple(0 if t.ndim > 1 else None for t in found)


def _batch_first(info: Any, dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    return [
        None if t is None else t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


def _composed_gradients(ctx: Any) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[int]]:
    """Gradients from torch operations on the whole matrix, as a function of (grad, q, k, v, …), and its inputs.

    The places number them: 0 grad, 1 to 3 q, k and v, 4 to 6 the mask, α's and the scale's rows where they have
    gradients.
    """
    saved, alpha, scale = list(ctx.saved_tensors), ctx.alpha, ctx.scale
    places = [i for i, t in enumerate(saved) if t is not None and (i < 4 or ctx.needs[i - 4])]

    def attend(*some: Tensor) -> Tensor:
        tensors = list(saved)
        for place, t in zip(places[1:], some, strict=True):
            tensors[place] = t
        return _composed_attention(tensors[1:], alpha, scale)

    def gradients(grad: Tensor, *some: Tensor) -> tuple[Tensor, ...]:
        found = torch.func.vjp(attend, *some)[1](grad)
        work = working_dtype(some[0])  # the mask's gradient leaves the tiles in it
        return tuple(g.to(work) if place == 4 else g for place, g in zip(places[1:], found, strict=True))

    return gradients, [saved[i] for i in places], places


def _composed_attention(tensors: Sequence[Any], alpha: float, scale: float) -> Tensor:
    q, k, v, mask, alpha_rows, scale_rows = tensors
    work = working_dtype(q)
    with torch.autocast(q.device.type, enabled=False):
        hidden_k, hidden_v = without_hidden_keys(k.to(work), v.to(work), mask)
        scores = masked_scores(q.to(work), hidden_k, mask, scale if scale_rows is None else scale_rows)
        return (entmax(scores, alpha if alpha_rows is None else alpha_rows) @ hidden_v).to(q.dtype)


def _tangent(tensors: Sequence[Any], alpha: float, scale: float, tangents: Sequence[Tensor | None]) -> Tensor:
    """The output's derivative along tangents of q, k, v, the mask, α's rows and the scale's rows, tile by tile.

    Composed of operations that can be differentiated again; p is solved anew for every tile.
    """
    q, k, v, mask, alpha_rows, scale_rows = tensors
    dq, dk, dv, dmask, da, ds = tangents
    work, mask = working_dtype(q), mask if dmask is not None else unexpanded(mask)
    k, v = without_hidden_keys(k.to(work), v.to(work), mask)
    dk, dv = (torch.zeros_like(t) if d is None else d.to(work) for d, t in ((dk, k), (dv, v)))
    dk, dv = without_hidden_keys(dk, dv, mask)
    tiles = [torch.zeros(*q.shape[:-2], 0, v.shape[-1], dtype=work, device=q.device)]
    for rows in query_tiles(q, k.shape[-2]):
        wide_q, s = q[..., rows, :].to(work), scale if scale_rows is None else scale_rows[..., rows, :]
        a_rows, products = rows_of(alpha_rows, rows), wide_q @ k.mT
        scores = masked_scores(wide_q, k, rows_of(mask, rows), s)
        a = alpha if a_rows is None else a_rows
        p = entmax(scores, a)
        along = wide_q @ dk.mT * s
        if dq is not None:
            along = along + dq[..., rows, :].to(work) @ k.mT * s
        if ds is not None:
            along = along + products * ds[..., rows, :]
        if dmask is not None:
            along = along + dmask[..., rows, :]
        dp = _PullbackFunctorch.apply(scores, p, along, alpha, a_rows)
        if da is not None:
            dp = dp + da[..., rows, :] * derivatives.alpha_derivative(p, a)
        tiles.append(dp @ v + p @ dv)
    return torch.cat(tiles, -2).to(q.dtype)
