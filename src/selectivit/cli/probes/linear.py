"""Classes of photos by a linear classifier: DINO's protocol over a grid of rates, or logistic regression.

DATA holds train/CLASS/*.jpg and val/CLASS/*.jpg. DINO's protocol sees a new random crop of every photo in every epoch;
their features are kept, so that --views 10 costs a tenth of its 100 epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, take
from selectivit.cli.probes.folders import LabelledPhotos, SplitOptions, middle_crop
from selectivit.cli.probes.making import Probe, run_probe
from selectivit.cli.probes.setting import Setting, add_common

if TYPE_CHECKING:
    import torch

    from selectivit.eval.feature_cache import FeatureCache

HELP = "classes of photos by a linear classifier (DINO's protocol, or logistic regression)"


@dataclass(frozen=True)
class LinearOptions:
    """How the classifier is trained."""

    protocol: str = option("dino", "NAME", "dino (SGD on random crops, a grid of rates) or logistic (L-BFGS, fast)")
    epochs: int = option(100, "N", "passes over the photos (dino)")
    views: int | None = option(None, "N", "random crops a photo, taken in turns; default: one an epoch (dino)")
    lr: str | None = option(None, "RATE,…", "learning rates for a batch of 256; default: seven, 1e-4 to 0.1 (dino)")
    head_batch: int = option(1024, "N", "photos a step (dino)")
    strength: str | None = option(None, "C,…", "C to choose from; default: six, 0.01 to 1000 (logistic)")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kind's options.

    Args:
        parser: the kind's parser.
    """
    parser.add_argument("data", type=str, help="folder with a folder a split and in it a folder a class")
    add_options(parser, LinearOptions)
    add_options(parser, SplitOptions)
    add_common(parser, tokens="cls")


def prepare(setting: Setting, options: Namespace) -> Probe:
    """Open the data.

    Args:
        setting: the model.
        options: of the kind.

    Returns:
        The probe.

    Raises:
        ValueError: data that cannot be used, or numbers that do not fit.
    """
    how = take(LinearOptions, options)
    data = LabelledPhotos.open(Path(options.data), take(SplitOptions, options))
    if how.protocol == "dino":
        return _dino(setting, how, data)
    if how.protocol == "logistic":
        return _logistic(setting, how, data)
    raise ValueError(f"expected --protocol dino or logistic, got {how.protocol!r}")


def _dino(setting: Setting, how: LinearOptions, data: LabelledPhotos) -> Probe:
    from selectivit.data.views import View
    from selectivit.eval.linear import DINO, RATES, SgdSettings, sgd_probe

    view = middle_crop(setting)
    training = SgdSettings(how.epochs, how.head_batch, _numbers(how.lr, "--lr", RATES), setting.where.seed)
    count = how.epochs if how.views is None else how.views
    if count < 1:
        raise ValueError(f"expected --views of 1 or more, got {count}")
    crops = [View("random", view.size, number=number) for number in range(min(count, how.epochs))]

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        val, truth = data.of_split(1, setting, view, layers)
        warm(setting.cache, layers)

        def views(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
            return data.of_split(0, setting, crops[epoch % len(crops)], layers)

        steps = how.epochs * training.steps_per_epoch(len(views(0)[0]))
        keeping = setting.keeping(settings, every=max(1, steps // how.epochs))
        with setting.progress("training steps", steps) as tell_step:
            found = sgd_probe(views, val, truth, data.num_classes, training, keeping, tell_step)
        return found, data.problems

    def warm(cache: FeatureCache, layers: Sequence[int]) -> None:
        cache.blocks(data.sets[1], view, layers, "pooled")
        for crop in crops:
            cache.blocks(data.sets[0], crop, layers, "pooled")

    told = f"training: random resized crops {view.size} px and flips, {len(crops)} views a photo, {how.epochs} epochs"
    decides = {
        "data": data.record(),
        "view": view.record(),
        "training": {"views": len(crops), "crop": view.size, "epochs": how.epochs, "batch": how.head_batch},
        "rates": list(training.rates),
        "protocol": "dino",
    }
    return Probe("linear", DINO, [*data.describe(view), told], decides, warm, make, _HEADLINE)


def _logistic(setting: Setting, how: LinearOptions, data: LabelledPhotos) -> Probe:
    from selectivit.eval.linear import LOGISTIC, STRENGTHS, logistic_probe

    view = middle_crop(setting)
    strengths = _numbers(how.strength, "--strength", STRENGTHS)

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        (train, labels), (val, truth) = data.features(setting, view, layers)
        with setting.progress("fits", len(strengths) + 1) as tell_fit:
            wanted = {"strengths": strengths, "seed": setting.where.seed, "tell": tell_fit}
            found = logistic_probe(train, labels, val, truth, data.num_classes, **wanted)
        return found, data.problems

    decides = {"data": data.record(), "view": view.record(), "strengths": list(strengths), "protocol": "logistic"}
    lines = data.describe(view)
    return Probe("linear", LOGISTIC, lines, decides, lambda cache, b: data.warm(cache, view, b), make, _HEADLINE)


def _numbers(text: str | None, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        return tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise ValueError(f"expected numbers with commas between for {name}, got {text!r}") from None


_HEADLINE = ("top-1 accuracy, linear", lambda result: result["best"]["top1"], True)


def tell(result: dict[str, Any]) -> None:
    """Print a result."""
    for row in result.get("rows", []):
        top5 = f"   top-5 {100 * row['top5']:6.2f} %" if "top5" in row else ""
        print(f"lr {row['lr']:8g}   top-1 {100 * row['top1']:6.2f} %{top5}{'   diverged' if 'diverged' in row else ''}")
    for row in result.get("held_out", []):
        print(f"C {row['c']:8g}   top-1 {100 * row['top1']:6.2f} % of the held-out training photos")
    best = dict(result["best"])
    name = "lr" if "lr" in best else "c"
    top5 = f", top-5 {100 * best['top5']:.2f} %" if "top5" in best else ""
    print(f"best: {name} {best[name]:g}, top-1 {100 * best['top1']:.2f} %{top5}")


def run(options: Namespace) -> int:
    """Probe.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.
    """
    return run_probe(options, prepare, tell)
