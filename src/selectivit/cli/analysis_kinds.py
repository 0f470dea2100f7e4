"""The analyses: what each of them answers, and the cells of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from selectivit.cli.analysis_options import (
    BackbonesOptions,
    ControlsOptions,
    DiffusenessOptions,
    GainOptions,
    GridOptions,
    ResolutionOptions,
)

if TYPE_CHECKING:
    from selectivit.openvocab.presets import Preset

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Cell:
    """One number of a table: a model read one way.

    Args:
        model: its name.
        preset: how it is read.
        facts: what tells the cell from the others, column -> value.
    """

    model: str
    preset: Preset
    facts: dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One analysis.

    Args:
        help: what it answers, in a line.
        options: the dataclass of its own options.
        cells: from models, the base preset (softmax's place is taken by alpha's entmax) and options to cells.
        several: whether it takes several models.
        reads: whether it segments, and so takes `ReadingOptions` and needs a text tower.
    """

    help: str
    options: type[Any]
    cells: Callable[[Sequence[str], Preset, Any], list[Cell]]
    several: bool = False
    reads: bool = True


def numbers(text: str, kind: type[Number], name: str, least: float) -> list[Number]:
    """Read numbers with commas between.

    Args:
        text: such as "224,448".
        kind: int or float.
        name: of the option, for the error.
        least: the smallest that is allowed.

    Returns:
        The numbers, none twice.

    Raises:
        ValueError: something else, or one below the least.

    Example:
        >>> numbers("1,1.2", float, "alphas", 1)
        [1.0, 1.2]
    """
    try:
        found = [kind(part) for part in str(text).split(",")]
    except ValueError:
        found = []
    if not found or not all(number >= least for number in found):
        raise ValueError(f"expected --{name} as numbers of at least {least:g} with commas between, got {text!r}")
    return list(dict.fromkeys(found))


def sources(text: str) -> list[str]:
    """Read score sources with commas between.

    Args:
        text: such as "qk,qq+kk".

    Returns:
        The sources, none twice.

    Raises:
        ValueError: an unknown one.

    Example:
        >>> sources("qk, qq+kk")
        ['qk', 'qq+kk']
    """
    from selectivit.ops.scores import score_pairs

    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        score_pairs(name)
    return found


def _pairs(preset: Preset, scores: Iterable[str]) -> list[tuple[Preset, dict[str, Any]]]:
    """Softmax and entmax of each source."""
    return [
        (replace(preset, scores=name, normalizer=normalizer), {"scores": name, "normalizer": normalizer})
        for name in scores
        for normalizer in ("softmax", "entmax")
    ]


def _each_model(models: Sequence[str], preset: Preset, what: GainOptions | BackbonesOptions) -> list[Cell]:
    pairs = _pairs(preset, sources(what.scores))
    return [Cell(model, made, {"model": model, **facts}) for model in models for made, facts in pairs]


def _controls(models: Sequence[str], preset: Preset, what: ControlsOptions) -> list[Cell]:
    changes = {
        "softmax": {"normalizer": "softmax"},
        f"softmax, temperature {what.temperature:g}": {"normalizer": "softmax", "temperature": what.temperature},
        "random mask": {"normalizer": "random_mask"},
        "entmax": {"normalizer": "entmax"},
    }
    return [
        Cell(models[0], replace(preset, scores=name, **change), {"scores": name, "attention": label})
        for name in sources(what.scores)
        for label, change in changes.items()
    ]


def _resolution(models: Sequence[str], preset: Preset, what: ResolutionOptions) -> list[Cell]:
    return [
        Cell(models[0], replace(made, size=size), {"size": size, **facts})
        for size in numbers(what.sizes, int, "sizes", 1)
        for made, facts in _pairs(preset, sources(what.scores))
    ]


def _grid(models: Sequence[str], preset: Preset, what: GridOptions) -> list[Cell]:
    scores = sources(what.scores)
    if len(scores) > 1:
        raise ValueError(f"a grid is of one score source, got --scores {what.scores}")
    cells = []
    for depth in numbers(what.depths, int, "depths", 1):
        for alpha in numbers(what.alphas, float, "alphas", 1):
            rule = {"normalizer": "softmax"} if alpha == 1 else {"normalizer": "entmax", "alpha": alpha}
            made = replace(preset, scores=scores[0], layers=depth, **rule)
            cells.append(Cell(models[0], made, {"layers": depth, "alpha": alpha}))
    return cells


KINDS: dict[str, Kind] = {
    "diffuseness": Kind(
        "where attention goes: its query's own class, other classes, how many tokens; per layer, head and source",
        DiffusenessOptions,
        lambda models, preset, what: [],
        reads=False,
    ),
    "gain": Kind(
        "entmax's gain in mIoU over softmax against how diffuse softmax is, per score source",
        GainOptions,
        _each_model,
        several=True,
    ),
    "controls": Kind(
        "entmax against a random mask of equal support and against a temperature (mIoU)", ControlsOptions, _controls
    ),
    "resolution": Kind("softmax and entmax at several sizes of the photos (mIoU)", ResolutionOptions, _resolution),
    "backbones": Kind("softmax and entmax in several models (mIoU)", BackbonesOptions, _each_model, several=True),
    "grid": Kind("entmax in the last n layers, at several alphas (mIoU)", GridOptions, _grid),
}
