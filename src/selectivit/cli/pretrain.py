"""Train a ViT without labels by DINO's recipe, with softmax or entmax.

The folder --out holds checkpoints, TensorBoard logs and the teachers `final` and `best` (by k-NN, where the photos lie
in one sub-folder a class). A run that was stopped goes on when the same command is given again, to the very weights of
an unbroken one. Under torchrun the batch is split among the processes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, pick_device, take
from selectivit.cli.training_progress import training_progress

if TYPE_CHECKING:
    from selectivit.train.dino_settings import DinoSettings
    from selectivit.train.pretrain import PretrainResult

HELP = "train a ViT without labels by DINO's recipe, with softmax or entmax"


@dataclass(frozen=True)
class ModelOptions:
    """The model, and where it is written."""

    preset: str = option("cls", "NAME", "cls (DINO's own), register4, specialization or entmax15: sets the next three")
    attention: str | None = option(None, "NAME", "softmax, entmax15, sparsemax, or entmax's alpha as a number")
    registers: int | None = option(None, "N", "learnt tokens beside the class token, dropped at the output")
    specialization: str | None = option(
        None, "BLOCKS", "early blocks with weights of the class token's own: third, half, none, or a number"
    )
    model: str = option("dino_vit_small_patch16", "NAME", "dino_vit_{tiny,small,base}_patch{8,16}")
    drop_path: float = option(0.1, "P", "chance of skipping half a block for a crop, rising to this in the last block")
    out: str = option("out", "FOLDER", "folder for the results, made if it is not there")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    seed: int = option(0, "N", "seed of all random numbers")
    card_note: str = option("", "TEXT", "for the model card: the terms under which the weights may be used")


@dataclass(frozen=True)
class CropOptions:
    """The crops of a photo: two large ones, some small ones."""

    global_size: int = option(224, "PX", "side of the large crops, whole patches")
    global_scale: str = option("0.4,1", "LEAST,MOST", "share of the photo's area in a large crop")
    local_size: int = option(96, "PX", "side of the small crops, whole patches")
    local_scale: str = option("0.05,0.4", "LEAST,MOST", "share of the photo's area in a small crop")
    num_local: int = option(8, "N", "small crops a photo")


@dataclass(frozen=True)
class LearningOptions:
    """How it is trained; the defaults are DINO's."""

    epochs: int = option(200, "N", "passes over the photos")
    steps: int | None = option(
        None, "N", "optimiser steps in place of those of the epochs, which are stretched to them"
    )
    batch_size: int = option(512, "N", "photos a step, of all processes together")
    accumulate: int = option(1, "N", "parts that a step is computed in, where memory is short")
    lr: float = option(5e-4, "RATE", "peak learning rate for a batch of 256; it is scaled with the batch")
    min_lr: float = option(1e-6, "RATE", "learning rate at the end")
    warmup_epochs: float = option(10.0, "EPOCHS", "over which the learning rate rises")
    weight_decay: float = option(0.04, "RATE", "at the start; biases and norms have none")
    weight_decay_end: float = option(0.4, "RATE", "at the end of its cosine")
    clip: float = option(3.0, "NORM", "largest norm of each parameter's own gradient; 0 does not clip")
    freeze_last_layer: float = option(1.0, "EPOCHS", "in which the head's last layer stays as it is")
    teacher_momentum: float = option(0.996, "SHARE", "of itself that the teacher keeps, at the start of a cosine to 1")
    student_temperature: float = option(0.1, "T", "of the student's softmax")
    teacher_temperature: float = option(0.04, "T", "of the teacher's softmax, after its warm-up")
    warmup_teacher_temperature: float = option(0.04, "T", "of the teacher's softmax, at the start")
    warmup_teacher_epochs: float = option(0.0, "EPOCHS", "over which it changes")
    center_momentum: float = option(0.9, "SHARE", "of the running mean that is taken from the teacher's outputs")
    out_dim: int = option(65536, "N", "outputs of the head")
    hidden_dim: int = option(2048, "N", "width of the head's hidden layers")
    bottleneck_dim: int = option(256, "N", "width in front of the head's last layer")
    norm_last_layer: bool = option(True, "BOOL", "keep the norms of the last layer's weights at 1")
    precision: str = option("auto", "NAME", "bf16, float32, or auto: bf16 where the device computes in it")


@dataclass(frozen=True)
class WatchOptions:
    """What is looked at on the way."""

    knn: str = option(
        "auto", "WHEN", "k-NN on photos kept out of training: auto where sub-folders are classes, on, off"
    )
    knn_k: int = option(20, "N", "neighbours")
    knn_temperature: float = option(0.07, "T", "of their votes")
    knn_bank: int = option(5000, "N", "labelled photos among which they are looked for, at most")
    knn_queries: int = option(1000, "N", "photos kept out of training and classified; a fifth at most")
    validate_every: int | None = option(None, "N", "steps between tests by k-NN; default: a pass over the photos")
    checkpoint_every: int = option(200, "N", "steps between checkpoints")
    workers: int | None = option(None, "N", "processes that read photos; default: one a core that is left, at most 8")


GROUPS = (ModelOptions, CropOptions, LearningOptions, WatchOptions)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument(
        "photos",
        nargs="+",
        type=str,
        help="photos, folders, lists (.txt), tar shards (.tar), saved datasets, or hf:NAME[:SPLIT]; without labels",
    )
    for group in GROUPS:
        add_options(parser, group)


def run(options: Namespace) -> int:
    """Train.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.

    Raises:
        ValueError: no photos, an unknown model or preset, crops that do not fit, a folder with another run, numbers
            that are not finite.
        WriteError: the folder cannot be written to.
    """
    _check_libraries()
    from selectivit.train.pretrain import pretrain
    from selectivit.train.settings import Running

    who, watch = take(ModelOptions, options), take(WatchOptions, options)
    settings = _settings(options)
    world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = pick_device(who.device, local_rank)
    running = Running(str(device) if world == 1 else device.type, watch.workers, watch.checkpoint_every)
    first = int(os.environ.get("RANK", 0)) == 0
    with training_progress(shown=first) as tell:
        result = pretrain(options.photos, who.out, settings, running, card_note=who.card_note, tell=tell)
    if first:
        _tell_result(result)
    return 1 if result.skipped else 0


def _settings(options: Namespace) -> DinoSettings:
    from selectivit.data.multi_crop import Crops
    from selectivit.train.dino_settings import PRESETS, DinoSettings

    who, cut = take(ModelOptions, options), take(CropOptions, options)
    if who.preset not in PRESETS:
        raise ValueError(f"expected --preset to be one of {', '.join(PRESETS)}, got {who.preset!r}")
    chosen = {name: getattr(who, name) for name in ("attention", "registers", "specialization")}
    chosen = {**PRESETS[who.preset], **{name: _number(given) for name, given in chosen.items() if given is not None}}
    scales = _shares("global", cut.global_scale), _shares("local", cut.local_scale)
    crops = Crops(cut.global_size, scales[0], cut.local_size, scales[1], cut.num_local)
    known = {field.name for field in fields(DinoSettings)}
    plain = {
        name: value
        for group in (ModelOptions, LearningOptions, WatchOptions)
        for name, value in vars(take(group, options)).items()
        if name in known and name not in ("attention", "registers", "specialization")
    }
    return DinoSettings(**plain, **chosen, crops=crops)


def _number(given: str | int) -> str | int | float:
    """A number where the text is one: of blocks, or entmax's alpha."""
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def _shares(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"expected two numbers with a comma between, such as --{name}-scale 0.4,1, got {text!r}"
        ) from None
    return low, high


def _tell_result(result: PretrainResult) -> None:
    for name, reason in result.skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    for note in result.notes:
        print(note, file=sys.stderr)
    if result.kept:
        print("this run was finished before: nothing is left to do, its model card stays as it is", file=sys.stderr)
    values: Any = result.values
    told = [f"loss {values['loss']:.4f}", f"teacher's entropy {values['teacher_entropy']:.3f} of ln K"]
    told.append(f"information {values['information']:.3f}, spread of features {values['feature_spread']:.3f}")
    if result.validation:
        told.append(f"k-NN {result.validation['knn_top1']:.4f}")
    print(", ".join(told))
    for folder in filter(None, (result.final, result.best)):
        print(folder)


def _check_libraries() -> None:
    missing = [name for name in ("lightning", "lightly", "timm") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"pretraining needs {' and '.join(missing)}, which is missing: pip install 'selectivit[pretrain]'"
        )
