"""Softmax and a swap, layer by layer: support and entropy of attention, norms and likeness of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from selectivit.demo.attending import Attend, swapped
from selectivit.demo.memory import Memory
from selectivit.demo.photo import Photo, ready
from selectivit.demo.shelf import Shelf
from selectivit.eval.token_statistics import NO_CLS, token_statistics
from selectivit.features import block_features, num_blocks
from selectivit.swap.record import recording
from selectivit.swap.sites import find_sites
from selectivit.swap.swap import nothing_found
from selectivit.vis.blocks import Line, Panel, blocks_figure
from selectivit.vis.compare import to_png
from selectivit.vis.statistics import attention_statistics

COLUMNS = {
    "support_share": ("support: weights that are not 0", "% of all keys"),
    "effective_tokens": ("entropy: effective tokens, exp(entropy)", "tokens a query uses"),
    "patch_norm": ("norm of patches, median", "norm"),
    "largest_norm": ("largest norm over the median", "times"),
    "cls_similarity": ("likeness of patches to CLS", "mean cosine"),
    "patch_similarity": ("likeness of two patches", "mean cosine"),
}
"""Quantity -> its title and unit."""


@dataclass(frozen=True)
class Layers:
    """Numbers by layer.

    Args:
        picture: of the curves, PNG.
        table: variant -> quantity -> a number a layer; empty where the model has no such quantity.
    """

    picture: bytes
    table: Mapping[str, Mapping[str, Sequence[float]]]


def compare_layers(shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, attend: Attend) -> Layers:
    """Measure every layer with softmax and with a swap.

    Args:
        shelf: of models.
        memory: of results.
        photo: the photo.
        name: of the model.
        size: of the shorter side, pixels.
        attend: the swap.

    Returns:
        The numbers and their picture.

    Raises:
        ValueError: a model whose attention cannot be swapped, or a rule that does not exist.
        WeightsError: weights that cannot be had.
    """
    name, table = shelf.check(name), {}
    for label, rule in (("softmax", None), (attend.title, attend)):
        key = ("layers", photo.digest, name, size, rule)
        table[label] = memory.get(key, partial(_measure, shelf, photo, name, size, rule))
    panels = [
        Panel(title, unit, [Line(label, rows[column]) for label, rows in table.items()], missing=NO_CLS)
        for column, (title, unit) in COLUMNS.items()
    ]
    return Layers(to_png(blocks_figure(panels, columns=3)), table)


def _measure(shelf: Shelf, photo: Photo, name: str, size: int, attend: Attend | None) -> dict[str, list[float]]:
    with shelf.model(name) as model:
        given = ready(photo, model, size)
        sites, skipped = find_sites(model)
        if not sites:
            raise ValueError(nothing_found(model, skipped))
        blocks = range(num_blocks(model))
        with swapped(model, attend, len(sites)), torch.inference_mode():
            with recording(sites) as calls:
                raw = block_features(model, given.pixels, blocks, norm=False)
            normed = block_features(model, given.pixels, blocks)
            made = [calls[site.name][0] for site in sites if calls[site.name]]
            attention = [
                attention_statistics(c.q, c.k, c.v, c.rule, scale=c.scale, attn_mask=c.attn_mask) for c in made
            ]
    tokens = [token_statistics(r, n)[0] for r, n in zip(raw, normed, strict=True)]
    found = {
        "support_share": [100 * each.support_share.mean().item() for each in attention],
        "effective_tokens": [each.effective_tokens.mean().item() for each in attention],
    }
    for column in COLUMNS:
        if column not in found:
            values = [row[column] for row in tokens]
            found[column] = [value for value in values if value is not None]
    return found
