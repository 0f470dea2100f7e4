"""Train a student to give a frozen teacher's dense features, on photos without labels.

The folder --out holds checkpoints, TensorBoard logs and the students `final` and `best`. A run that was stopped goes
on when the same command is given again, to the very weights of an unbroken one. Under torchrun the batch is split among
the processes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import SwapOptions, add_options, option, pick_device, take
from selectivit.cli.swapping import fitted_alpha, load_calibration, swapped, swaps
from selectivit.cli.training_progress import training_progress

if TYPE_CHECKING:
    from torch import nn

    from selectivit.swap.calibration import Calibration
    from selectivit.train.budget import BudgetDraw
    from selectivit.train.settings import DistillSettings

HELP = "train a student to give a frozen teacher's dense features"

CALIBRATED_ON = 4  # photos that a swap's factors start from
FURTHER_TRAINING_LR = 1e-5  # a new student's rate takes a pretrained one's features apart


@dataclass(frozen=True)
class PairOptions:
    """Who learns from whom, and where it is written."""

    student: str = option(
        "veca_tiny_patch14", "NAME", "core-periphery model, made new; or a pretrained model or folder, trained further"
    )
    teacher: str = option("dinov2-small", "NAME", "pretrained model, or a local folder; see `selectivit models`")
    num_cores: int | None = option(None, "N", "cores of a new core-periphery student; default: the model's own, 64")
    out: str = option("out", "FOLDER", "folder for the results, made if it is not there")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    seed: int = option(0, "N", "seed of all random numbers")
    card_note: str = option("", "TEXT", "for the model card: the terms under which the weights may be used")


@dataclass(frozen=True)
class TrainOptions:
    """How it is trained."""

    schedule: str = option("small", "NAME", "image sizes and rates by step: small, or objects365 (the paper's)")
    steps: int | None = option(None, "N", "optimiser steps that the schedule is stretched to; default: its own")
    batch_size: int = option(32, "N", "photos a step, of all processes together")
    accumulate: int = option(1, "N", "parts that a step is computed in, where memory is short")
    lr: float | None = option(
        None,
        "RATE",
        "peak learning rate of the first stage; default: the schedule's for a new student, 1e-5 for a pretrained one",
    )
    weight_decay: float = option(0.015, "RATE", "of weights; biases, norms and tokens have none")
    optimizer: str = option("muon", "NAME", "muon (on matrices in the blocks, AdamW on the rest) or adamw")
    global_cosine: float = option(1.0, "WEIGHT", "of the loss 1 - cos of the global tokens")
    patch_cosine: float = option(1.0, "WEIGHT", "of the loss 1 - cos of the patches")
    patch_mse: float = option(1.0, "WEIGHT", "of the squared difference of the patches")
    budgets: str | None = option(None, "N,N,…", "numbers of cores drawn from, such as 8,16,64; default: eighths")
    budget_weights: str | None = option(None, "W,W,…", "how often each is drawn; default: all alike")
    grid: str = option("refuse", "HOW", "a teacher's grid that differs from the student's: refuse or interpolate")
    augment: bool = option(True, "BOOL", "flips, and TrivialAugmentWide's colours, turns and shears")
    views: int | None = option(
        None, "N", "crops of each photo, whose teacher tokens are computed once and kept; default: a new crop each time"
    )
    teacher_cache: str | None = option(None, "FOLDER", "for these tokens; runs may share it; default: within --out")
    learn_scale: bool = option(False, "BOOL", "train the factors on the scores of a swapped student, one a head")
    precision: str = option("auto", "NAME", "bf16, float32, or auto: bf16 where the device computes in it")
    holdout: int = option(64, "N", "photos kept out of training, to compare student and teacher; a fifth at most")
    validate_every: int = option(500, "N", "steps between comparisons")
    checkpoint_every: int = option(200, "N", "steps between checkpoints")
    workers: int | None = option(None, "N", "processes that read photos; default: one a core that is left, at most 8")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument(
        "photos",
        nargs="+",
        type=str,
        help="photos, folders, lists (.txt), tar shards (.tar), saved datasets, or hf:NAME[:SPLIT]",
    )
    add_options(parser, PairOptions)
    add_options(parser, TrainOptions)
    add_options(parser, SwapOptions, normalizer="softmax")


def run(options: Namespace) -> int:
    """Train.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.

    Raises:
        ValueError: no photos, unknown models, models that do not fit, a folder with another run, numbers that are not
            finite.
        WriteError: the folder cannot be written to.
    """
    who, how, swap = take(PairOptions, options), take(TrainOptions, options), take(SwapOptions, options)
    _check_library()
    from selectivit.models.create import BUILDERS
    from selectivit.models.weights import load_model
    from selectivit.train.distill import distill
    from selectivit.train.settings import Running
    from selectivit.train.students import build_student

    settings = _settings(who, how)
    if settings.lr is None and who.student not in BUILDERS:
        settings = replace(settings, lr=FURTHER_TRAINING_LR)
    world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = pick_device(who.device, local_rank)
    if how.teacher_cache is not None and how.views is None:
        raise ValueError("expected --views beside --teacher-cache: crops that never come again are not worth keeping")
    cache = None if how.teacher_cache is None else Path(how.teacher_cache)
    running = Running(str(device) if world == 1 else device.type, how.workers, how.checkpoint_every, cache)
    first = int(os.environ.get("RANK", 0)) == 0
    student: Any = who.student
    if swaps(swap):
        student = build_student(who.student, load_model(who.teacher), seed=who.seed, arguments=_cores(who))
        swapped(student, swap, who.seed, _start(student, swap, how, options.photos))
    elif how.learn_scale:
        raise ValueError("expected a swap for --learn-scale, such as --normalizer entmax: softmax has no factors")
    with training_progress(shown=first) as tell:
        result = distill(
            student,
            who.teacher,
            options.photos,
            who.out,
            settings,
            running,
            student_arguments=None if swaps(swap) else _cores(who),
            card_note=who.card_note,
            tell=tell,
        )
    if first:
        _tell_result(result, bool(who.card_note))
    return 1 if result.skipped else 0


def _settings(who: PairOptions, how: TrainOptions) -> DistillSettings:
    from selectivit.train.losses import LossWeights
    from selectivit.train.settings import DistillSettings

    same = ("schedule", "steps", "batch_size", "accumulate", "lr", "weight_decay", "optimizer", "grid", "augment")
    same += ("views", "learn_scale", "precision", "holdout", "validate_every")
    return DistillSettings(
        **{name: getattr(how, name) for name in same},
        losses=LossWeights(how.global_cosine, how.patch_cosine, how.patch_mse),
        budgets=_draw(how),
        seed=who.seed,
    )


def _draw(how: TrainOptions) -> BudgetDraw | None:
    from selectivit.train.budget import BudgetDraw

    if how.budgets is None:
        if how.budget_weights is not None:
            raise ValueError("expected --budgets beside --budget-weights: the weights are theirs")
        return None
    try:
        budgets = tuple(int(part) for part in how.budgets.split(","))
        weights = tuple(float(part) for part in (how.budget_weights or ",".join("1" * len(budgets))).split(","))
    except ValueError:
        raise ValueError(
            f"expected numbers with commas between, such as --budgets 8,16 --budget-weights 1,2, got {how.budgets!r} "
            f"and {how.budget_weights!r}"
        ) from None
    return BudgetDraw(budgets, weights)


def _cores(who: PairOptions) -> dict[str, int] | None:
    return None if who.num_cores is None else {"num_cores": who.num_cores}


def _start(student: nn.Module, swap: SwapOptions, how: TrainOptions, photos: list[str]) -> Calibration | None:
    """The factors that the swap starts with: those given; else, where they are to be learnt, fitted on some photos."""
    calibration = load_calibration(swap)
    alpha = fitted_alpha(swap)
    if calibration is not None or not how.learn_scale or alpha is None:
        return calibration
    import torch

    from selectivit.cli.options import parse_layers
    from selectivit.data.photos import open_photos
    from selectivit.data.training_images import centre_crops
    from selectivit.features import preprocessing
    from selectivit.swap.calibrate import calibrate_swap
    from selectivit.train.tokens import normalise

    found, expected = open_photos(photos)[0], preprocessing(student)
    crops, _ = centre_crops(found, range(len(found)), 16 * expected.patch_size, CALIBRATED_ON)
    if not crops:
        raise ValueError("no photo can be read, to fit the swap's factors on")
    images = normalise(torch.stack(crops), expected.mean, expected.std)
    return calibrate_swap(student.eval(), images, alpha, scores=swap.scores, layers=parse_layers(swap.layers))


def _tell_result(result: Any, rewritten: bool) -> None:
    for name, reason in result.skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if result.kept:
        card = "its model cards have the new note" if rewritten else "its model cards stay as they are"
        print(f"this run was finished before: nothing is left to do, {card}", file=sys.stderr)
    if result.validation:
        numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.validation.items())
        print(f"on held-out photos: {numbers}")
    for folder in filter(None, (result.final, result.best)):
        print(folder)


def _check_library() -> None:
    if find_spec("lightning") is None:
        raise ImportError("training needs lightning, which is missing: pip install 'selectivit[train]'")
