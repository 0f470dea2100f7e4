"""A core-periphery model at a budget: its features, where its cores are, what it costs and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selectivit.demo.memory import Memory
from selectivit.demo.photo import Photo, ready
from selectivit.demo.shelf import Shelf
from selectivit.eval.budget import median_times
from selectivit.eval.cost import veca_cost
from selectivit.models.veca import Veca
from selectivit.vis.pca import pca_maps
from selectivit.vis.pixels import paths_png, picture_png
from selectivit.vis.statistics import mean_cosine

ANCHORS = (1, 4, 16)
"""Budgets that are coloured with every other, so that colours keep their meaning while the budget moves."""
REPEATS = 2


@dataclass(frozen=True)
class Forward:
    """One forward.

    Args:
        map: features of the patches, (C, h, w).
        coords: of the cores, x and y in −1..1, (layers, cores, 2).
        shown: the photo as the model saw it, (H, W, 3) in 0..1.
        gflops: of it, by formula.
    """

    map: Tensor
    coords: Tensor
    shown: Tensor
    gflops: float


@dataclass(frozen=True)
class Budget:
    """A budget and what it gives.

    Args:
        num_cores: cores in use.
        largest: cores that the model has.
        features: in PCA colours, PNG, a pixel a patch.
        places: the cores' ways over the photo, PNG.
        grid: rows and columns of patches.
        shape: height and width of the photo as the model saw it, pixels.
        gflops: of one forward, by formula.
        gflops_all: the same with all cores.
        ms: of one forward, median, milliseconds.
        ms_all: the same with all cores.
        cosine: mean cosine of the patches to those with all cores.
    """

    num_cores: int
    largest: int
    features: bytes
    places: bytes
    grid: tuple[int, int]
    shape: tuple[int, int]
    gflops: float
    gflops_all: float
    ms: float
    ms_all: float
    cosine: float


def num_cores(shelf: Shelf, name: str) -> int:
    """How many cores a model has.

    Args:
        shelf: of models.
        name: of the model.

    Returns:
        Their number.

    Raises:
        ValueError: a model without cores, or an unknown name.
        WeightsError: weights that cannot be had.
    """
    with shelf.model(name) as model:
        return _veca(model, name).config.num_cores


def at_budget(shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, budget: int) -> Budget:
    """Look at one budget beside the whole bank.

    Args:
        shelf: of models.
        memory: of results.
        photo: the photo.
        name: of the model.
        size: of the shorter side, pixels.
        budget: number of cores; outside the bank the nearest that there is.

    Returns:
        What it gives.

    Raises:
        ValueError: a model without cores, or an unknown name.
        WeightsError: weights that cannot be had.
    """
    largest = num_cores(shelf, name)
    budget = min(max(1, budget), largest)
    anchors = [_forward(shelf, memory, photo, name, size, n) for n in (*ANCHORS, largest) if n <= largest]
    whole, here = anchors[-1], _forward(shelf, memory, photo, name, size, budget)
    colours, _ = pca_maps([*(each.map for each in anchors), here.map])
    shape, grid = (here.shown.shape[0], here.shown.shape[1]), (here.map.shape[1], here.map.shape[2])
    ms, ms_all = _milliseconds(shelf, memory, photo, name, size, (budget, largest))
    return Budget(
        num_cores=budget,
        largest=largest,
        features=picture_png(colours[-1]),
        places=paths_png(here.shown, here.coords),
        grid=grid,
        shape=shape,
        gflops=here.gflops,
        gflops_all=whole.gflops,
        ms=ms,
        ms_all=ms_all,
        cosine=mean_cosine([whole.map, here.map])[0],
    )


def _forward(shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, budget: int) -> Forward:
    def compute() -> Forward:
        with shelf.model(name) as model, torch.inference_mode():
            veca, given = _veca(model, name), ready(photo, model, size)
            out = veca(given.pixels, budget)
            cost = veca_cost(veca.config, (given.pixels.shape[2], given.pixels.shape[3]), budget)
        features = out.patch_tokens[0].T.unflatten(1, out.grid).float().cpu()
        return Forward(features, out.core_coords[:, 0].float().cpu(), given.shown, cost.flops / 1e9)

    return memory.get(("forward", photo.digest, name, size, budget), compute)


def _milliseconds(
    shelf: Shelf, memory: Memory, photo: Photo, name: str, size: int, budgets: tuple[int, ...]
) -> list[float]:
    """The median time of a forward at each budget, in turns; measured once for photos of one shape."""

    def compute() -> list[float]:
        with shelf.model(name) as model, torch.inference_mode():
            veca, given = _veca(model, name), ready(photo, model, size)
            return median_times([partial(veca, given.pixels, n) for n in budgets], REPEATS)

    return memory.get(("time", photo.image.size, name, size, budgets), compute)


def _veca(model: Any, name: str) -> Veca:
    if not isinstance(model, Veca):
        raise ValueError(
            f"{name} is a {type(model).__name__} without cores: expected a core-periphery model (VECA), such as "
            "veca-tiny or a folder that `selectivit distill` wrote"
        )
    return model
