"""Classes of photos by weighted k nearest neighbours, as DINO judges features; nothing is trained.

DATA holds train/CLASS/*.jpg and val/CLASS/*.jpg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, take
from selectivit.cli.probes.folders import LabelledPhotos, SplitOptions, middle_crop
from selectivit.cli.probes.making import Probe, run_probe
from selectivit.cli.probes.setting import Setting, add_common

HELP = "classes of photos by weighted k nearest neighbours (DINO's protocol)"


@dataclass(frozen=True)
class KnnOptions:
    """How neighbours vote."""

    k: str = option("10,20,100,200", "N,N,…", "numbers of neighbours")
    temperature: float = option(0.07, "T", "a neighbour of cosine similarity s has exp(s / T) votes")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kind's options.

    Args:
        parser: the kind's parser.
    """
    parser.add_argument("data", type=str, help="folder with a folder a split and in it a folder a class")
    add_options(parser, KnnOptions)
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
        ValueError: data that cannot be used, or numbers that are none.
    """
    from selectivit.eval.knn import PROTOCOL, knn_probe

    how = take(KnnOptions, options)
    try:
        ks = sorted({int(part) for part in how.k.split(",")})
    except ValueError:
        raise ValueError(f"expected numbers with commas between, such as --k 10,20, got {how.k!r}") from None
    data = LabelledPhotos.open(Path(options.data), take(SplitOptions, options))
    view = middle_crop(setting)

    def make(layers: Sequence[int], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        (train, labels), (val, truth) = data.features(setting, view, layers)
        wanted = {"ks": ks, "temperature": how.temperature, "num_classes": data.num_classes}
        return knn_probe(train, labels, val, truth, **wanted), data.problems

    return Probe(
        "knn",
        PROTOCOL,
        [*data.describe(view), f"k = {', '.join(map(str, ks))}; temperature {how.temperature:g}"],
        {"data": data.record(), "view": view.record(), "k": ks, "temperature": how.temperature},
        lambda cache, layers: data.warm(cache, view, layers),
        make,
        ("top-1 accuracy, k-NN", headline, True),
    )


def headline(result: dict[str, Any]) -> float:
    """Top-1 accuracy at k = 20, or at the k that is nearest to it."""
    return min(result["rows"], key=lambda row: abs(row["k"] - 20))["top1"]


def tell(result: dict[str, Any]) -> None:
    """Print a result."""
    for row in result["rows"]:
        top5 = f"   top-5 {100 * row['top5']:6.2f} %" if "top5" in row else ""
        print(f"k = {row['k']:4}   top-1 {100 * row['top1']:6.2f} %{top5}")
    if "left_out_k" in result:
        print(f"left out, more than there are training photos: k = {', '.join(map(str, result['left_out_k']))}")


def run(options: Namespace) -> int:
    """Probe.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done, 1 some photos were skipped.
    """
    return run_probe(options, prepare, tell)
