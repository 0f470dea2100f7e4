"""Muon for the matrices inside the blocks, AdamW for all the rest, as one optimiser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

OPTIMIZERS = ("muon", "adamw")
_IN_A_BLOCK = re.compile(r"(^|\.)((res)?blocks|layers?)\.\w*\d+\.")


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Sort the trained parameters by how they are stepped.

    Args:
        model: the student with its head.

    Returns:
        "matrices": weights of linear layers inside the blocks; "decayed": other weights of linear layers and
        convolutions; "plain": biases, norms, tokens, positions, coordinates and coordinate heads, not decayed.

    Example:
        >>> block = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 2)})
        >>> {kind: len(found) for kind, found in split_parameters(block).items()}
        {'matrices': 1, 'decayed': 1, 'plain': 2}

    Source: VECA, arXiv 2605.12491.
    """
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "decayed": [], "plain": []}
    weights = {
        id(weight)
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.MultiheadAttention))
        for weight in (getattr(module, "weight", None), getattr(module, "in_proj_weight", None))
        if weight is not None
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in weights or "coord" in name:
            kinds["plain"].append(parameter)
        elif parameter.ndim == 2 and _IN_A_BLOCK.search(name):
            kinds["matrices"].append(parameter)
        else:
            kinds["decayed"].append(parameter)
    return kinds


class MuonAdamW(Optimizer):
    """One optimiser of two rules over the groups of `split_parameters`.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both.

    Args:
        model: whose parameters that require gradients are trained.
        lr: learning rate of all groups.
        weight_decay: of matrices and decayed weights.
        muon: False steps the matrices with AdamW as well.

    Raises:
        ValueError: nothing to train.

    Example:
        >>> optimizer = MuonAdamW(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])}), lr=1e-3)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1]

    Source: Muon is Scalable for LLM Training, arXiv 2502.16982.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.015, muon: bool = True):
        kinds = split_parameters(model)
        if not any(kinds.values()):
            raise ValueError("expected a model with parameters that require gradients, found none to train")
        matrices = kinds.pop("matrices")
        if not muon:
            kinds["decayed"] = matrices + kinds["decayed"]
        decays = {"decayed": weight_decay, "plain": 0.0}
        rest = [{"params": found, "weight_decay": decays[kind]} for kind, found in kinds.items() if found]
        rules: list[Optimizer] = []
        if muon and matrices:
            rules.append(Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if rest:
            rules.append(AdamW(rest, lr=lr, fused=True))  # one pass over memory, on the CPU too
        self._rules = rules
        super().__init__([group for rule in rules for group in rule.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Let both rules see this optimiser's groups and state: whatever is loaded or set here is theirs."""
        groups = iter(self.param_groups)
        for rule in self._rules:
            rule.param_groups = [next(groups) for _ in rule.param_groups]
            rule.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Args:
            state_dict: of an optimiser over the same parameters.
        """
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step.

        Args:
            closure: computes loss and gradients.

        Returns:
            The loss, where there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for rule in self._rules:
            rule.step()
        return loss


def gradients_finite(parameters: Iterable[nn.Parameter]) -> tuple[bool, float]:
    """Look for NaN and infinity in the gradients.

    Args:
        parameters: those without a gradient are passed over.

    Returns:
        Whether all are finite, and their norm.

    Example:
        >>> gradients_finite([])
        (True, 0.0)
    """
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(nn.utils.get_total_norm(found)) if found else 0.0
    return bool(torch.isfinite(torch.tensor(norm))), norm
