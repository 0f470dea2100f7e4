"""Factors on the scores that are learnt: one a head in every swapped layer, starting from a calibration."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from selectivit.ops.selective import AttentionRule
from selectivit.swap.attend import Selective, state_of
from selectivit.swap.sites import Site, find_sites


class LearntScale(nn.Module):
    """One trainable factor per head of a swap, kept as its logarithm so that it stays positive.

    The rules hold plain tensors, so the factors must be put in force before each forward, by `put`.

    Args:
        model: with a swap to entmax or sparsemax in force; its factors are the start, 1 where it has none.

    Raises:
        ValueError: a model that is not swapped, or one whose scores no factor changes.

    Example:
        >>> from selectivit.swap.swap import swap_attention
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> with swap_attention(model, scale=0.5):
        ...     learnt = LearntScale(model)
        ...     learnt.put()
        ...     model(torch.randn(1, 5, 16)).sum().backward()
        >>> learnt.factors()["self_attn"], learnt.logs[0].grad.shape
        (tensor([0.5000, 0.5000]), torch.Size([2]))
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        swapped = swapped_rules(model)
        if not swapped:
            raise ValueError("expected a model whose attention is swapped: call swap_attention first")
        self.names = tuple(site.name for site, _ in swapped)
        self._states: list[Selective] = [state_of(site.module) for site, _ in swapped]
        starts: list[nn.Parameter] = []
        for site, rule in swapped:
            if rule.normalizer not in ("entmax", "sparsemax") or rule.scores == "v":
                raise ValueError(
                    "expected a swap to entmax or sparsemax, whose factors can be learnt, got "
                    f"{rule.normalizer!r} over {rule.scores!r}"
                )
            scale = torch.as_tensor(1.0 if rule.scale is None else rule.scale).detach()
            weight = next(site.module.parameters())
            starts.append(nn.Parameter(scale.to(weight.device, torch.float32).expand(site.num_heads).log().clone()))
        self.logs = nn.ParameterList(starts)

    def put(self) -> None:
        """Put the factors in force for the next forward, with gradients where they are on."""
        for state, log in zip(self._states, self.logs, strict=True):
            assert state.rule is not None
            state.rule = replace(state.rule, scale=log.exp())

    def factors(self) -> dict[str, Tensor]:
        """The factors as they are now, detached.

        Returns:
            By attention module's name, (heads,).
        """
        return {name: log.detach().exp().clone() for name, log in zip(self.names, self.logs, strict=True)}


def swapped_rules(model: nn.Module) -> list[tuple[Site, AttentionRule]]:
    """The attention modules that a swap is in force on.

    Args:
        model: of any host, swapped or not.

    Returns:
        Each with its rule, in block order; empty for a model that is not swapped or has no known attention.

    Example:
        >>> swapped_rules(nn.TransformerEncoderLayer(16, 2))
        []
    """
    rules = [(site, state_of(site.module).rule) for site in find_sites(model)[0]]
    return [(site, rule) for site, rule in rules if rule is not None]
