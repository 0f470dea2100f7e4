"""Options of a head's training that segmentation and depth share, and a data set without splits cut in two."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from selectivit.cli.options import option

if TYPE_CHECKING:
    from selectivit.data.depth import DepthData
    from selectivit.data.segmentation import SegmentationData
    from selectivit.eval.fitting import FitSettings

    Data = TypeVar("Data", DepthData, SegmentationData)

PROTOCOLS = ("fast", "dinov2")


@dataclass(frozen=True)
class TrainingOptions:
    """How the head is trained."""

    protocol: str = option("fast", "NAME", "fast (whole photos, features kept) or dinov2 (random crops, nothing kept)")
    steps: int | None = option(None, "N", "optimiser steps; default: the protocol's")
    lr: float | None = option(None, "RATE", "peak learning rate; default: the protocol's")
    weight_decay: float | None = option(None, "RATE", "of AdamW; default: the protocol's")
    head_batch: int | None = option(
        None, "N", "patches (segmentation) or photos (depth) a step; default: the protocol's"
    )
    checkpoint_every: int = option(200, "N", "steps between checkpoints of the head")


@dataclass(frozen=True)
class DenseSplitOptions:
    """The splits of the data."""

    layout: str | None = option(None, "NAME", "how the data set lies in its folder; default: found out")
    train_split: str = option("train", "NAME", "the split that is learnt from")
    val_split: str = option("val", "NAME", "the split that is scored")
    holdout: float | None = option(
        None, "SHARE", "for a folder without splits: the last share, in the order of names, is scored, such as 0.2"
    )


def fit_settings(how: TrainingOptions, default: FitSettings) -> FitSettings:
    """The protocol's settings with what was asked for in their place.

    Args:
        how: the options.
        default: the protocol's.

    Returns:
        The settings; the warm-up keeps its share of the steps.

    Raises:
        ValueError: numbers that are too small.
    """
    given = {"steps": how.steps, "lr": how.lr, "weight_decay": how.weight_decay, "batch_size": how.head_batch}
    changed = {name: value for name, value in given.items() if value is not None}
    if how.checkpoint_every < 1:
        raise ValueError(f"expected --checkpoint-every of 1 or more, got {how.checkpoint_every}")
    if how.steps is not None:
        changed["warmup"] = round(default.warmup * how.steps / default.steps)
    return dataclasses.replace(default, **changed)  # pyright: ignore[reportArgumentType]


def check_protocol(how: TrainingOptions) -> None:
    """Refuse a protocol that there is not.

    Raises:
        ValueError: another name.
    """
    if how.protocol not in PROTOCOLS:
        raise ValueError(f"expected --protocol {' or '.join(PROTOCOLS)}, got {how.protocol!r}")


def training_record(settings: FitSettings) -> dict[str, Any]:
    """What JSON holds of a training."""
    return asdict(settings)


def training_line(settings: FitSettings, unit: str) -> str:
    """A training in words."""
    return (
        f"head: {settings.steps} steps of {settings.batch_size} {unit}, AdamW, rate {settings.lr:g} after "
        f"{settings.warmup} steps, then {settings.decay} to 0, weight decay {settings.weight_decay:g}"
    )


def cut_in_two(whole: Data, holdout: float) -> tuple[Data, Data]:
    """The first and the last part of a data set in the order of names: neighbours in a film stay on one side.

    Args:
        whole: all of it.
        holdout: share of the last part.

    Returns:
        The part to learn from, and the part to score.

    Raises:
        ValueError: a share that leaves a part empty.
    """
    cut = len(whole) - round(holdout * len(whole))
    if not 0 < holdout < 1 or not 0 < cut < len(whole):
        raise ValueError(
            f"expected --holdout between 0 and 1 that leaves both parts some of {len(whole)}, got {holdout}"
        )
    pairs = sorted(whole.pairs)
    first = dataclasses.replace(whole, pairs=tuple(pairs[:cut]), split=f"first {cut} in the order of names")
    last = dataclasses.replace(whole, pairs=tuple(pairs[cut:]), split=f"last {len(pairs) - cut} in the order of names")
    return first, last
