"""Regions and captions (FG-OVD): does a region resemble its right caption more than captions that differ a little?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.openvocab.dense import dense_tokens, image_tower
from selectivit.openvocab.presets import Preset
from selectivit.openvocab.prompts import find_templates, text_features
from selectivit.swap.sites import host_of, unwrap

PROTOCOLS = ("dense", "crop")


@dataclass(frozen=True)
class Region:
    """A box in a photo, and what might be in it.

    Args:
        number: of the annotation.
        photo: file name, with folders as the file gives them.
        box: (left, top, width, height) in pixels of the photo.
        captions: the right one first, then its hard negatives.
    """

    number: int
    photo: str
    box: tuple[float, float, float, float]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class RegionRanks:
    """How the right captions ranked.

    Args:
        ranks: by the annotation's number: 1 is right; a negative as near as the right caption comes before it.
        missing: photos that were not there or could not be read, with the reason.
    """

    ranks: dict[int, int]
    missing: dict[str, str]

    def summary(self) -> dict[str, float]:
        """Share of regions whose right caption came first, the mean and the median rank.

        Raises:
            ValueError: no region was ranked.
        """
        if not self.ranks:
            raise ValueError(f"no region was ranked: {len(self.missing)} photos are missing")
        ranks = torch.tensor(list(self.ranks.values()), dtype=torch.float64)
        middle = ranks.quantile(0.5).item()
        return {"top1": (ranks == 1).double().mean().item(), "mean_rank": ranks.mean().item(), "median_rank": middle}


def read_regions(path: str | os.PathLike[str]) -> list[Region]:
    """Read an annotation file of FG-OVD.

    Args:
        path: JSON in LVIS style: `category_id` is the right caption, `neg_category_ids` its negatives.

    Returns:
        The regions in the file's order.

    Raises:
        ValueError: no JSON, another layout, an image or caption that is not in the file, or an empty box.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        photos = {image["id"]: image["file_name"] for image in content["images"]}
        captions = {category["id"]: category["name"] for category in content["categories"]}
        return [_region(entry, photos, captions) for entry in content["annotations"]]
    except KeyError as error:
        raise ValueError(f"{path} is no annotation file of FG-OVD: {error} is missing") from error
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no annotation file of FG-OVD: {error}") from error


def _region(entry: dict[str, Any], photos: dict[int, str], captions: dict[int, str]) -> Region:
    left, top, width, height = map(float, entry["bbox"])
    if not (width > 0 and height > 0):
        raise ValueError(f"annotation {entry['id']} has an empty box: {entry['bbox']}")
    wanted = [entry["category_id"], *entry["neg_category_ids"]]
    box = (left, top, width, height)
    return Region(entry["id"], photos[entry["image_id"]], box, tuple(captions[number] for number in wanted))


def rank_regions(
    clip: tuple[nn.Module, Any],
    regions: Iterable[Region],
    folder: str | os.PathLike[str],
    preset: str | Preset = "entmax-qq",
    *,
    protocol: str = "dense",
    size: int = 224,
    templates: str | Sequence[str] = "none",
) -> RegionRanks:
    """Rank each region's captions by their cosine with it.

    Args:
        clip: (model, tokenizer), in eval mode.
        regions: from `read_regions`.
        folder: where the photos lie, under the names that the file gives, or without their folders.
        preset: how CLIP is read in the dense protocol.
        protocol: "dense": the photo is squashed to a square and its map pooled over the box (RoIAlign, 1 × 1); "crop":
            the box is cut out, squashed to the model's own size and embedded as an image.
        size: side of the square in pixels.
        templates: prompts around the captions.

    Returns:
        The ranks, and the photos that are missing.

    Raises:
        ValueError: an unknown protocol, or a model whose patches and texts share no space.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}: use one of {', '.join(PROTOCOLS)}")
    model, tokenizer = clip
    image_tower(model)
    by_photo: dict[str, list[Region]] = {}
    for region in regions:
        by_photo.setdefault(region.photo, []).append(region)
    ranks: dict[int, int] = {}
    missing: dict[str, str] = {}
    for name, some in by_photo.items():
        try:
            picture = _picture(Path(folder), name)
        except (ValueError, OSError) as error:
            missing[name] = str(error)
            continue
        boxes = torch.tensor([region.box for region in some])
        with torch.no_grad():
            found = (
                _dense(model, picture, boxes, preset, size) if protocol == "dense" else _crops(model, picture, boxes)
            )
        for region, feature in zip(some, F.normalize(found.float(), dim=-1), strict=True):
            texts = text_features(model, tokenizer, region.captions, find_templates(templates))
            ranks[region.number] = rank_of_first(texts @ feature)
    return RegionRanks(ranks, missing)


def rank_of_first(scores: Tensor) -> int:
    """The rank of the first of some scores, ties against it.

    Args:
        scores: (N,).

    Returns:
        From 1 to N; N where the first is NaN.

    Example:
        >>> rank_of_first(torch.tensor([0.5, 0.7, 0.5, 0.1]))
        3
    """
    return 1 + int((~(scores[1:] < scores[0])).sum())


def _picture(folder: Path, name: str) -> Any:
    from selectivit.data.images import read_image

    places = [folder / name, folder / Path(name).name]
    return read_image(next((place for place in places if place.is_file()), places[0])).image


def _squashed(model: nn.Module, picture: Any, size: tuple[int, int]) -> Tensor:
    """A picture as the model takes it, (1, 3, H, W), its aspect given up."""
    from selectivit.data.transforms import to_tensor

    tower = image_tower(model)
    expected = tower.host.preprocessing(tower.module)
    resized = picture.resize((size[1], size[0]), 3)  # 3 is PIL's bicubic
    pixels = to_tensor(resized, mean=expected.mean, std=expected.std, patch_size=expected.patch_size)
    parameter = next(tower.module.parameters())
    return pixels[None].to(parameter.device, parameter.dtype)


def _dense(model: nn.Module, picture: Any, boxes: Tensor, preset: str | Preset, size: int) -> Tensor:
    """Features of boxes (R, 4) in pixels, (R, E)."""
    found = dense_tokens(model, _squashed(model, picture, (size, size)), preset).map[0]  # (E, h, w)
    height, width = found.shape[-2:]
    scale = torch.tensor([width / picture.width, height / picture.height] * 2)
    return pooled(found, (boxes * scale).to(found.device))


def _crops(model: nn.Module, picture: Any, boxes: Tensor) -> Tensor:
    """Embeddings of boxes (R, 4) that are cut out, (R, E)."""
    whole = unwrap(model)
    tower = image_tower(whole)
    size = tower.host.preprocessing(tower.module).image_size
    found = []
    for left, top, width, height in boxes.tolist():
        (first, last), (upper, lower) = _whole(left, width, picture.width), _whole(top, height, picture.height)
        crop = picture.crop((first, upper, last, lower))
        found.append(host_of(whole).encode_image(whole, _squashed(whole, crop, size)))
    return torch.cat(found)


def _whole(start: float, length: float, side: int) -> tuple[int, int]:
    """The whole pixels of a stretch: at least one, none beyond the picture."""
    first = min(max(0, int(start)), side - 1)
    return first, min(side, max(round(start + length), first + 1))


def pooled(values: Tensor, boxes: Tensor) -> Tensor:
    """The mean of a map over boxes, sampled between its cells: RoIAlign with one bin, aligned.

    Args:
        values: (E, h, w).
        boxes: (R, 4), left, top, width and height in cells; cell i reaches from i to i + 1.

    Returns:
        (R, E), float32.

    Example:
        >>> pooled(torch.arange(4.0).reshape(1, 2, 2), torch.tensor([[0.0, 0.0, 2.0, 2.0]]))
        tensor([[1.5000]])

    Source: Mask R-CNN, arXiv 1703.06870.
    """
    boxes = boxes.float()
    across = torch.stack([_weights(values.shape[2], left, wide) for left, _, wide, _ in boxes])  # (R, w)
    down = torch.stack([_weights(values.shape[1], top, tall) for _, top, _, tall in boxes])  # (R, h)
    return torch.einsum("rh,ehw,rw->re", down, values.float(), across)


def _weights(cells: int, start: Tensor, length: Tensor) -> Tensor:
    """How much each cell of a row counts for a stretch of it: one sample for each begun cell, spread evenly."""
    samples = max(1, int(torch.ceil(length)))
    place = start + (torch.arange(samples, device=start.device) + 0.5) * (length / samples) - 0.5
    place = place.clamp(0, cells - 1)
    centres = torch.arange(cells, device=start.device)
    return (1 - (place[:, None] - centres).abs()).clamp_min(0).mean(0)
