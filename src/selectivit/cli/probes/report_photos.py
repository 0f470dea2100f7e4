"""PCA of given photos by the models of a report: what their last blocks see, side by side."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.jobs import Outcome, find_photos
from selectivit.cli.options import SwapOptions, pick_device
from selectivit.cli.probes.report_runs import Run
from selectivit.cli.probes.report_tables import attention_in_words, labels
from selectivit.cli.reading import ready_photo
from selectivit.cli.swapping import swapped

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH = 320
"""Of a panel, px: three of them and the page stays light."""


@dataclass
class PhotoPanels:
    """One photo.

    Args:
        name: of the photo.
        photo: as the first model saw it, a PNG.
        panels: label -> PCA, a PNG of the photo's shape.
    """

    name: str
    photo: bytes
    panels: dict[str, bytes]


def panels_of(
    paths: Sequence[str], runs: Sequence[Run], size: int | None, device: str, tell: Callable[[str | None], None]
) -> tuple[list[PhotoPanels], list[str]]:
    """Draw photos through the models of a report.

    Args:
        paths: photos, and folders of photos.
        runs: of the report, by which models are known.
        size: the photos' shorter side, px; None is each model's own.
        device: where to compute.
        tell: called after each model.

    Returns:
        The photos, and what could not be drawn and why.

    Raises:
        ValueError: no photo can be read.
    """
    outcome = Outcome()
    photos = find_photos(paths, outcome, lambda _: False, first=True)
    drawn = {photo.name: PhotoPanels(photo.name, b"", {}) for photo in photos}
    problems = [str(problem["reason"]) for problem in outcome.skipped]
    for name, variants in _by_model(runs).items():
        try:
            model = _load(name, variants, device)
        except (ValueError, OSError, ImportError) as error:
            problems.append(f"no PCA of {name}: {error}")
            continue
        for photo in photos:
            try:
                found, shown = _maps(photo.path, model, variants, size, labels(runs), problems)
            except (ValueError, OSError) as error:
                problems.append(f"{photo.path}: {error}")
                continue
            drawn[photo.name].photo = drawn[photo.name].photo or _png(shown, (shown.shape[0], shown.shape[1]))
            drawn[photo.name].panels |= found
        tell(None)
    problems = list(dict.fromkeys(problems))
    for problem in problems:
        print(f"skipped: {problem}", file=sys.stderr)
    return [panels for panels in drawn.values() if panels.panels], problems


def _by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """A run of each attention and budget of a model, the model's own attention first."""
    found: dict[str, dict[str, Run]] = {}
    for run in runs:
        told = f"{attention_in_words(run.attention)} {run.num_cores}"
        known = found.setdefault(run.model, {}).setdefault(told, run)
        if known.identity == run.model != run.identity:  # one that says which weights it had
            found[run.model][told] = run
    return {
        model: sorted(each.values(), key=lambda run: isinstance(run.attention, dict)) for model, each in found.items()
    }


def _load(name: str, variants: Sequence[Run], device: str) -> nn.Module:
    from selectivit.eval.identity import model_identity
    from selectivit.models.weights import load_model

    model = load_model(name, device=str(pick_device(device))).eval()
    identity = model_identity(model, name)
    now = f"{identity['weights_sha256']} {identity['structure_sha256']}"
    if all(run.identity not in (now, run.model) for run in variants):
        raise ValueError("its weights or structure are no longer those that were probed")
    return model


def _maps(
    path: Path,
    model: nn.Module,
    variants: Sequence[Run],
    size: int | None,
    names: dict[str, str],
    problems: list[str],
) -> tuple[dict[str, bytes], Tensor]:
    """One photo through a model's attentions; they share their colours."""
    import torch

    from selectivit.features import features
    from selectivit.vis.pca import pca_maps

    ready = ready_photo(path, model, size)
    image = ready.image[None].to(next(model.parameters()).device)
    maps: dict[str, Tensor] = {}
    for run in variants:
        label = f"{names[run.identity]}, {attention_in_words(run.attention)}"
        label += "" if run.num_cores is None else f", {run.num_cores} cores"
        if isinstance(run.attention, dict) and run.attention.get("calibration") is not None:
            problems.append(f"no PCA of {label}: its calibration is known by its digest alone")
            continue
        swap = _swap(run.attention)
        with nullcontext() if swap is None else swapped(model, swap, run.seed), torch.inference_mode():
            maps[label] = features(model, image, num_cores=run.num_cores).map[0].float().cpu()
    colours = pca_maps(list(maps.values()))[0] if maps else []
    shape = (ready.shown.shape[0], ready.shown.shape[1])
    return {label: _png(each, shape) for label, each in zip(maps, colours, strict=True)}, ready.shown


def _swap(attention: Any) -> SwapOptions | None:
    if not isinstance(attention, dict):
        return None
    return SwapOptions(**{name: attention[name] for name in asdict(SwapOptions())})


def _png(picture: Tensor, size: tuple[int, int]) -> bytes:
    """A picture (h, w, 3) in 0..1 as a PNG of the photo's shape, patches as squares."""
    import torch
    from PIL import Image

    height, width = max(1, round(WIDTH * size[0] / size[1])), WIDTH
    image = Image.fromarray((picture.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())
    way = Image.Resampling.NEAREST if picture.shape[:2] != size else Image.Resampling.LANCZOS
    buffer = io.BytesIO()
    image.resize((width, height), way).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
