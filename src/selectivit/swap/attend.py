"""What a swapped attention module carries, and the one call its forward makes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selectivit.ops.selective import SOFTMAX, AttentionRule, selective_attention

STATE = "_selective"  # the plain attribute that holds a module's `Selective`: not a parameter, so not in the state dict


@dataclass(frozen=True)
class Call:
    """What one attention module saw in one forward.

    Args:
        q: queries, (B, H, N, D), after the host's norms and rotary embeddings.
        k: keys, (B, H, M, D).
        v: values, (B, H, M, D).
        scale: the host's own factor on the scores, usually D ** -0.5.
        attn_mask: None, or broadcastable to (B, H, N, M); bool (True may attend) or added to the scores.
        rule: the rule in force; the module's own, mostly softmax, when it is not swapped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    attn_mask: Tensor | None
    rule: AttentionRule


@dataclass
class Selective:
    """What a swapped or recorded module carries: its rule, and where its calls are noted.

    Args:
        rule: what the module does in place of its own; None leaves its own.
        host: the name of the attention implementation that the host would have used, where hosts name one.
        instead: called with q, k, v, the host's scale and the mask, gives (B, H, N, D) in place of the rule: for
            attention that no rule can say, such as scores that know the patches' places.
        calls: by thread, the list that a recording of that thread appends to.
        found: what `install` changed and what it found there; empty while it is not installed.
        native: the module's own rule: the host's softmax, or what our own attention was trained with.
    """

    rule: AttentionRule | None
    host: Any = None
    instead: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor] | None = None
    calls: dict[int, list[Call]] = field(default_factory=dict)
    found: tuple[tuple[Any, Any], ...] = ()
    native: AttentionRule = SOFTMAX


def state_of(module: nn.Module) -> Selective:
    """What a module carries; its own rule where a recording ended in another thread while the module was computing."""
    return getattr(module, STATE, None) or Selective(None, native=getattr(module, "rule", SOFTMAX))


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention under the rule that `module` carries, noted where a recording listens.

    Args:
        module: the swapped module.
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, D).
        scale: the host's own factor on the scores.
        attn_mask: None, or broadcastable to (B, H, N, M); bool (True may attend) or added to the scores.
        dropout_p: on the probabilities.

    Returns:
        (B, H, N, D).
    """
    state = state_of(module)
    if torch.is_autocast_enabled(q.device.type):
        # SDPA is on autocast's list, our ops are not: q_norm may leave q and k in float32 beside a bfloat16 v.
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(q.dtype)
    note(state, q, k, v, scale, attn_mask)
    if state.instead is not None:
        return state.instead(q, k, v, scale, attn_mask)
    return selective_attention(
        q, k, v, state.rule or state.native, scale=scale, attn_mask=attn_mask, dropout_p=dropout_p
    )


def note(state: Selective, q: Tensor, k: Tensor, v: Tensor, scale: float, attn_mask: Tensor | None) -> None:
    """Add a call to the recording that listens in this thread, if any; other threads' calls are not its business."""
    if state.calls:
        calls = state.calls.get(threading.get_ident())
        if calls is not None:
            calls.append(Call(q, k, v, scale, attn_mask, state.rule or state.native))
