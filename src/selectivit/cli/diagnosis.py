"""One photo through one model: its tokens and its attention, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selectivit.cli.variants import Variant
from selectivit.eval.token_statistics import NO_CLS, NO_REGISTERS, outliers, token_statistics
from selectivit.features import Features, block_features, num_blocks
from selectivit.models.veca import Veca
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites, unwrap
from selectivit.vis.statistics import AttentionStatistics, attention_statistics, weight_statistics
from selectivit.vis.token_maps import TokenMaps

if TYPE_CHECKING:
    from selectivit.swap.attend import Call

TOKENS = (
    "patch_norm",
    "largest_norm",
    "outlier_share",
    "cls_norm",
    "register_norm",
    "cls_similarity",
    "patch_similarity",
)
ATTENTION = ("entropy", "relative_entropy", "effective_tokens", "support_size", "support_share")
DRAWN_BLOCKS = 4

CORE_ROWS = "attention of its cores over the patches (its patches attend to the cores alone)"


@dataclass(frozen=True)
class Looked:
    """What one photo shows.

    Args:
        record: what JSON can hold: a list a quantity, one number a block; None where the model has no such quantity.
        raw: tokens of all blocks as they leave them.
        normed: the same after the final norm.
    """

    record: dict[str, Any]
    raw: Sequence[Features]
    normed: Sequence[Features]


@dataclass(frozen=True)
class Diagnosed:
    """One variant over all photos.

    Args:
        variant: whose.
        records: photo -> record.
        skipped: photo -> why it could not be used.
        pictures: photo -> the photo as the model saw it, and its maps by name of the block.
    """

    variant: Variant
    records: dict[str, Any]
    skipped: dict[str, str]
    pictures: dict[str, tuple[Tensor, Mapping[str, Any]]]

    def column(self, quantity: str) -> Tensor | None:
        """A quantity of all photos, (photos, blocks) float64; None where the model does not have it."""
        rows = [record[quantity] for record in self.records.values()]
        return None if any(row is None for row in rows) else torch.tensor(rows, dtype=torch.float64)

    def missing(self) -> dict[str, str]:
        """Why quantities are not there."""
        return next(iter(self.records.values()))["missing"]


def diagnose_photo(
    model: nn.Module, images: Tensor, *, outlier_factor: float = 2.0, num_cores: int | None = None
) -> Looked:
    """Look at every block.

    Args:
        model: in eval mode, swapped or not.
        images: (1, 3, H, W), normalised.
        outlier_factor: a patch is an outlier over this many times the median norm.
        num_cores: budget of a VECA model; None is its whole bank.

    Returns:
        What was seen; means over heads and queries of attention.

    Raises:
        ValueError: a model without a known image tower, tokens that are not finite.
    """
    blocks = range(num_blocks(model))
    sites, skipped = find_sites(model)
    with torch.inference_mode():
        with recording(sites) as calls:
            raw = block_features(model, images, blocks, norm=False, num_cores=num_cores)
        normed = block_features(model, images, blocks, num_cores=num_cores)
        statistics, note = _attention(model, images, calls, skipped, num_cores)
    tokens = [token_statistics(r, n, outlier_factor=outlier_factor)[0] for r, n in zip(raw, normed, strict=True)]
    record: dict[str, Any] = {}
    for name in TOKENS:
        column = [row[name] for row in tokens]
        record[name] = None if any(value is None for value in column) else column
    record |= _columns(statistics)
    record["grid"] = list(raw[0].grid)
    record["missing"] = _missing(record, raw[0], note)
    record["note"] = note if statistics else None
    return Looked(record, raw, normed)


def _attention(
    model: nn.Module,
    images: Tensor,
    calls: Mapping[str, list[Call]],
    skipped: Mapping[str, str],
    num_cores: int | None,
) -> tuple[list[AttentionStatistics], str | None]:
    """The statistics of every attention layer, and what should be known of them, or why there are none."""
    # One layer at a time, and its queries in parts: the N x N weights of all layers would not fit.
    made = [call[0] for call in calls.values() if call]
    if made:
        return [attention_statistics(c.q, c.k, c.v, c.rule, scale=c.scale, attn_mask=c.attn_mask) for c in made], None
    veca = next((module for module in unwrap(model).modules() if isinstance(module, Veca)), None)
    if veca is not None:
        maps = veca(images, num_cores, maps=range(veca.config.depth)).core_maps  # each (1, H, C, N)
        return [weight_statistics(m) for m in maps], CORE_ROWS
    reasons = "; ".join(dict.fromkeys(skipped.values()))
    return [], f"none of its attention modules is known{': ' if reasons else ''}{reasons}"


def _columns(statistics: Sequence[AttentionStatistics]) -> dict[str, Any]:
    if not statistics:
        return dict.fromkeys(ATTENTION)
    entropy = [s.entropy.mean().item() for s in statistics]
    return {
        "entropy": entropy,
        # 1 is uniform: photos and models of other numbers of tokens can be compared.
        "relative_entropy": [
            e / log(s.num_tokens) if s.num_tokens > 1 else 0.0 for e, s in zip(entropy, statistics, strict=True)
        ],
        "effective_tokens": [s.effective_tokens.mean().item() for s in statistics],
        "support_size": [s.support_size.mean().item() for s in statistics],
        "support_share": [s.support_share.mean().item() for s in statistics],
    }


def _missing(record: Mapping[str, Any], found: Features, note: str | None) -> dict[str, str]:
    reasons = dict.fromkeys(ATTENTION, note or "")
    reasons |= {"cls_norm": NO_CLS, "cls_similarity": NO_CLS, "register_norm": NO_REGISTERS}
    reasons["patch_similarity"] = "the photo is one patch"
    if found.cls is not None and found.cores is not None:
        reasons["register_norm"] = "the model uses one core"
    return {name: reasons[name] for name in (*TOKENS, *ATTENTION) if record[name] is None}


def token_maps(looked: Looked, outlier_factor: float) -> dict[str, Any]:
    """What is drawn of one photo.

    Args:
        looked: the photo.
        outlier_factor: as it was measured with.

    Returns:
        The arguments of `TokenMaps` without the label.
    """
    count = len(looked.normed)
    columns = min(DRAWN_BLOCKS, count)
    blocks = [(i + 1) * count // columns - 1 for i in range(columns)]
    raw, last = looked.raw[-1], looked.normed[-1]
    norms = raw.map[0].float().norm(dim=0).cpu()
    similarity = None
    if last.cls is not None:
        similarity = torch.cosine_similarity(last.map[0].float(), last.cls[0].float()[:, None, None], dim=0).cpu()
    return {
        "maps": {f"block {b}": looked.normed[b].map[0].float().cpu() for b in blocks},
        "norms": norms,
        "outliers": outliers(norms.flatten(), outlier_factor).view_as(norms),
        "similarity": similarity,
    }


def row(label: str, maps: Mapping[str, Any]) -> TokenMaps:
    """Name what `token_maps` gave after its model."""
    return TokenMaps(label, **maps)
