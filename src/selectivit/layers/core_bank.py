"""The ordered bank of cores: their tokens, their places, and how they move from block to block."""

from __future__ import annotations

import operator

import torch
from jaxtyping import Float
from torch import Tensor, nn

CHUNK = 8  # cores in one parameter: those that no budget has reached yet get no gradient, as in the public code
CANDIDATES = 1000


class CoreBank(nn.Module):
    """Learnt core tokens and coordinates; the first num_cores of them serve at any budget.

    Coordinates are kept as ρ = atanh(u), so that tanh ρ stays inside the image however far they move.

    Args:
        num_cores: size of the bank.
        dim: width of the tokens.
        depth: number of blocks; before each but the first the cores move.

    Raises:
        ValueError: an empty bank.

    Example:
        >>> bank = CoreBank(num_cores=12, dim=8, depth=3)
        >>> tokens, rho = bank(num_cores=5)
        >>> tokens.shape, bank.move(rho, tokens[None], layer=1).shape
        (torch.Size([5, 8]), torch.Size([1, 5, 2]))

    Source: VECA, arXiv 2605.12491.
    """

    def __init__(self, num_cores: int, dim: int, depth: int) -> None:
        super().__init__()
        if num_cores < 1:
            raise ValueError(f"expected a bank of at least one core, got num_cores={num_cores}")
        self.num_cores = num_cores
        tokens = torch.randn(num_cores, dim) / dim**0.5
        coords = spread_points(num_cores).to(tokens).atanh()
        self.token_chunks = nn.ParameterList(nn.Parameter(t.clone()) for t in tokens.split(CHUNK))
        self.coord_chunks = nn.ParameterList(nn.Parameter(c.clone()) for c in coords.split(CHUNK))
        self.coord_heads = nn.ModuleList(nn.Linear(dim, 2) for _ in range(depth - 1))
        self.coord_steps = nn.Parameter(torch.full((depth - 1,), 0.01))

    def forward(self, num_cores: int) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c 2"]]:
        """The first cores as they enter the trunk.

        Args:
            num_cores: C, 1 to the size of the bank.

        Returns:
            Tokens (C, D) and raw coordinates ρ (C, 2).

        Raises:
            ValueError: a budget outside the bank.
            TypeError: a budget that is no whole number.
        """
        if not isinstance(num_cores, torch.SymInt):  # an input of what is exported stays one
            try:
                num_cores = operator.index(num_cores)
            except TypeError:
                raise TypeError(f"expected a whole number of cores as the budget, got {num_cores!r}") from None
        if not 1 <= num_cores <= self.num_cores:
            raise ValueError(f"expected a budget of 1 to {self.num_cores} cores, got num_cores={num_cores}")
        chunks = -(-num_cores // CHUNK) if isinstance(num_cores, int) else len(self.token_chunks)
        tokens, coords = list(self.token_chunks)[:chunks], list(self.coord_chunks)[:chunks]
        return torch.cat(tokens)[:num_cores], torch.cat(coords)[:num_cores]

    def move(
        self, rho: Float[Tensor, "*b c 2"], core_tokens: Float[Tensor, "b c d"], layer: int
    ) -> Float[Tensor, "b c 2"]:
        """The cores' raw coordinates before a block.

        Args:
            rho: (C, 2) or (B, C, 2), before the block above it.
            core_tokens: (B, C, D), the residual stream as it enters block `layer`.
            layer: 1 to depth − 1.

        Returns:
            (B, C, 2).
        """
        return rho + self.coord_steps[layer - 1] * self.coord_heads[layer - 1](core_tokens)


def spread_points(count: int) -> Float[Tensor, "c 2"]:
    """Points of (−0.95, 0.95)² far from each other, the first near the middle, by farthest-point sampling.

    Args:
        count: how many of 1000 uniform candidates to take (of `count`, where that is more).

    Returns:
        (count, 2) float32 on the CPU.

    Example:
        >>> spread_points(3).shape
        torch.Size([3, 2])
    """
    candidates = (torch.rand(max(CANDIDATES, count), 2, device="cpu", dtype=torch.float32) * 2 - 1) * 0.95
    chosen = candidates.norm(dim=-1).argmin()[None]
    distances = torch.full((len(candidates),), torch.inf, device="cpu")
    for _ in range(count - 1):
        distances = distances.minimum((candidates - candidates[chosen[-1]]).norm(dim=-1))
        chosen = torch.cat([chosen, distances.argmax()[None]])
    return candidates[chosen]
