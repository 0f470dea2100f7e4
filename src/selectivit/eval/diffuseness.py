"""How diffuse attention is: what share of it stays on the query's own class, and how far it spreads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.features import preprocessing
from selectivit.ops.selective import AttentionRule, attention_weights
from selectivit.swap.attend import Call
from selectivit.swap.maps import run_forward
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites, unwrap
from selectivit.swap.swap import nothing_found, select_layers
from selectivit.swap.tap import eager

UNLABELLED = 255
MEASURES = ("same_class", "other_classes", "itself", "unlabelled", "prefix", "effective_tokens", "support_share")
"""What is measured of each query's weights. The first five are where its mass lies, and sum to 1: other patches of its
class, patches of other classes, the query itself, patches without a label, prefix tokens (CLS, registers)."""
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Diffuseness:
    """Sums over the queries of one or more photos.

    Args:
        layers: names of the attention modules.
        sums: (layers, rules, measures, heads) float64, in the order of `MEASURES`.
        queries: how many queries were summed: labelled patches that are not background.
    """

    layers: tuple[str, ...]
    sums: Tensor
    queries: int

    def means(self) -> Tensor:
        """The mean over queries, (layers, rules, measures, heads).

        Raises:
            ValueError: no query.
        """
        if not self.queries:
            raise ValueError("no patch has a class, so that no query can be said to stay on its own: check the masks")
        return self.sums / self.queries

    def __add__(self, other: Diffuseness) -> Diffuseness:
        return Diffuseness(self.layers, self.sums + other.sums, self.queries + other.queries)


def diffuseness(
    model: nn.Module,
    image: Tensor,
    mask: Tensor,
    rules: Sequence[AttentionRule],
    layers: int | Sequence[int] | None = None,
    *,
    background: int | None = None,
) -> Diffuseness:
    """Measure where the attention of a photo's labelled patches goes, by several rules at once.

    The model passes the photo once with its own softmax; each rule then makes weights of the same queries, keys and
    values, so that rules are compared on equal ground.

    Args:
        model: a model of any host that `swap_attention` knows; no text tower is needed.
        image: (3, H, W) or (1, 3, H, W), normalised, H and W multiples of the patch.
        mask: (H', W') class of each pixel of the same photo at any size, `UNLABELLED` where there is none. A patch has
            the class of most of its pixels.
        rules: normalizer and score source of each; sums of sources are means of their maps.
        layers: as for `swap_attention`: None all, -n the last n, a list those.
        background: a class whose patches are no queries, but count as another class.

    Returns:
        The sums; of several photos they add up.

    Raises:
        ValueError: a model without attention that is known, or whose layers do not attend among all patches.

    Example:
        >>> import torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32).eval()
        >>> mask = torch.zeros(32, 32, dtype=torch.long)
        >>> mask[:, 16:] = 1
        >>> found = diffuseness(vit, torch.randn(3, 32, 32), mask, [AttentionRule("softmax")])
        >>> found.queries, found.sums.shape
        (16, torch.Size([1, 1, 7, 2]))

    Source: the measure is that of arXiv 2607.07135; effective tokens are exp(entropy).
    """
    sites, skipped = find_sites(model)
    if not sites:
        raise ValueError(nothing_found(model, skipped))
    sites = select_layers(sites, layers)
    image = image if image.ndim == 4 else image[None]
    patch = preprocessing(model).patch_size
    grid = (image.shape[-2] // patch, image.shape[-1] // patch)
    classes = patch_classes(mask, grid).to(image.device)
    with torch.inference_mode():
        with recording(sites) as calls, eager():
            run_forward(unwrap(model), image, sites[-1])
        sums = [_layer(site.name, calls[site.name], classes, rules, background) for site in sites]
    queries = int(_queries(classes, background).numel())
    return Diffuseness(tuple(site.name for site in sites), torch.stack(sums), queries)


def patch_classes(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The class of each patch: that of most of its pixels.

    Args:
        mask: (H, W) of any size, `UNLABELLED` where there is no class.
        grid: (h, w) in patches.

    Returns:
        (h * w,) int64.

    Example:
        >>> patch_classes(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 255]]), (1, 2))
        tensor([0, 1])
    """
    side = 16  # samples of a patch in each direction
    size = (grid[0] * side, grid[1] * side)
    pixels = F.interpolate(mask[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()
    blocks = pixels.unflatten(1, (grid[1], side)).unflatten(0, (grid[0], side))  # (h, side, w, side)
    return blocks.transpose(1, 2).reshape(grid[0] * grid[1], -1).mode(-1).values


def _queries(classes: Tensor, background: int | None) -> Tensor:
    known = classes != UNLABELLED
    return (known if background is None else known & (classes != background)).nonzero()[:, 0]


def _layer(
    name: str, calls: Sequence[Call], classes: Tensor, rules: Sequence[AttentionRule], background: int | None
) -> Tensor:
    """Sums over queries of one layer, (rules, measures, heads)."""
    if len(calls) != 1:
        raise ValueError(f"expected {name!r} to attend once a forward, it did {len(calls)} times")
    call = calls[0]
    tokens, prefix = call.k.shape[2], call.k.shape[2] - len(classes)
    if call.q.shape[0] != 1 or call.q.shape[2] != tokens or prefix < 0:
        raise ValueError(
            f"{name!r} attends from {call.q.shape[2]} to {tokens} tokens of {call.q.shape[0]} windows: expected one "
            f"attention among all {len(classes)} patches"
        )
    sums = torch.zeros(len(rules), len(MEASURES), call.q.shape[1], dtype=torch.float64)
    for rows in _queries(classes, background).split(ROWS_AT_ONCE):
        maps: dict[Any, Tensor] = {}
        for i, rule in enumerate(rules):
            sums[i] += _measures(_weights(call, rule, rows + prefix, maps), rows, classes, prefix).cpu()
    return sums


def _weights(call: Call, rule: AttentionRule, rows: Tensor, maps: dict[Any, Tensor]) -> Tensor:
    """Weights (H, n, L) of some queries; maps of single sources are kept, since several sums share them."""
    parts = []
    for source in rule.scores.split("+"):
        key = (rule.normalizer, float(rule.alpha), rule.temperature, rule.seed, rule.layer, source)
        if key not in maps:
            one = replace(rule, scores=source)
            made = attention_weights(
                call.q, call.k, call.v, one, scale=call.scale, attn_mask=call.attn_mask, queries=rows
            )
            maps[key] = made[0]
        parts.append(maps[key])
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)


def _measures(weights: Tensor, rows: Tensor, classes: Tensor, prefix: int) -> Tensor:
    """Sums over queries of each measure, (measures, H); weights (H, n, L) of the patches `rows`."""
    patches = weights[..., prefix:]  # (H, n, N)
    # One product gives the mass on each class; patches without a label are class 0 here.
    numbers = torch.where(classes == UNLABELLED, 0, classes + 1)
    mass = patches @ F.one_hot(numbers).to(weights.dtype)  # (H, n, K + 1)
    own = mass.gather(-1, numbers[rows].view(1, -1, 1).expand(len(mass), -1, 1))[..., 0]
    itself = patches[:, torch.arange(len(rows), device=rows.device), rows]
    parts = [
        own - itself,
        mass[..., 1:].sum(-1) - own,
        itself,
        mass[..., 0],
        weights[..., :prefix].sum(-1),
        torch.special.entr(weights).sum(-1).exp(),
        weights.count_nonzero(dim=-1) / weights.shape[-1],
    ]
    return torch.stack(parts).double().sum(-1)
