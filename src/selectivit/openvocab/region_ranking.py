"""From a photo's boxes to the ranks of their captions, by a frozen CLIP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.openvocab.dense import dense_tokens, image_tower
from selectivit.openvocab.pooling import pooled
from selectivit.openvocab.presets import Preset
from selectivit.openvocab.prompts import find_templates, text_features
from selectivit.openvocab.regions import Region, RegionRanks
from selectivit.swap.sites import host_of, unwrap

PROTOCOLS = ("roialign", "crop")


def rank_regions(
    clip: tuple[nn.Module, Any],
    regions: Iterable[Region],
    folder: str | os.PathLike[str],
    preset: str | Preset = "entmax-qq",
    *,
    protocol: str = "roialign",
    size: int = 224,
    templates: str | Sequence[str] = "none",
) -> RegionRanks:
    """Rank each region's captions by their cosine with it.

    Args:
        clip: (model, tokenizer), in eval mode.
        regions: from `read_regions`.
        folder: where the photos lie, under the names that the file gives, or without their folders.
        preset: how CLIP is read under "roialign".
        protocol: "roialign": the photo is squashed to a square and its map pooled over the box (RoIAlign, 1 × 1);
            "crop": the box is cut out, squashed to the model's own size and embedded as an image.
        size: side of the square in pixels.
        templates: prompts around the captions.

    Returns:
        The ranks, and the photos that are missing.

    Raises:
        ValueError: an unknown protocol, or a model whose patches and texts share no space.

    Example:
        >>> rank_regions(clip, read_regions("3_attributes.json"), "coco").summary()  # doctest: +SKIP
        {'top1': 0.16, 'mean_rank': 4.1, 'median_rank': 4.0}
    """
    check_protocol(clip, protocol, size)
    ranks: dict[int, int] = {}
    missing: dict[str, str] = {}
    for name, some in by_photo(regions).items():
        try:
            picture = region_photo(find_region_photo(folder, name), some)
        except (ValueError, OSError) as error:
            missing[name] = str(error)
            continue
        found = rank_photo(clip, picture, some, preset, protocol=protocol, size=size, templates=templates)
        ranks |= {region.number: rank for region, rank in zip(some, found, strict=True)}
    return RegionRanks(ranks, missing)


def check_protocol(clip: tuple[nn.Module, Any], protocol: str, size: int) -> None:
    """Refuse what no region could be ranked with.

    Args:
        clip: (model, tokenizer).
        protocol: one of `PROTOCOLS`.
        size: side of the square in pixels.

    Raises:
        ValueError: another protocol, a size below one patch, or a model whose patches and texts share no space.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}: use one of {', '.join(PROTOCOLS)}")
    tower = image_tower(clip[0])
    patch = tower.host.preprocessing(tower.module).patch_size
    if size < patch:
        raise ValueError(f"expected a size of at least one patch ({patch} px), got {size}")


def by_photo(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """Regions by the photo that they lie in, in the order of its first."""
    found: dict[str, list[Region]] = {}
    for region in regions:
        found.setdefault(region.photo, []).append(region)
    return found


def find_region_photo(folder: str | os.PathLike[str], name: str) -> Path:
    """Where a photo should lie.

    Args:
        folder: of the photos.
        name: as the annotation file gives it, such as val2017/000000000139.jpg.

    Returns:
        The photo under that name, or under its last part; the first where neither is there.
    """
    places = [Path(folder) / name, Path(folder) / Path(name).name]
    return next((place for place in places if place.is_file()), places[0])


def region_photo(path: Path, regions: Sequence[Region]) -> Any:
    """Read a photo that boxes were drawn on.

    Args:
        path: of the photo.
        regions: its regions.

    Returns:
        The picture, RGB.

    Raises:
        ImageError: not there, or no picture.
        ValueError: it is of another size than the annotations say, so that the boxes would not fit.
    """
    from selectivit.data.images import read_image

    picture = read_image(path).image
    for region in regions:
        if region.photo_size not in (None, picture.size):
            expected = " x ".join(map(str, region.photo_size))
            raise ValueError(
                f"{path} is {picture.width} x {picture.height} px and its boxes were drawn on {expected} px: give the "
                "photo at its original size"
            )
    return picture


@torch.no_grad()
def rank_photo(
    clip: tuple[nn.Module, Any],
    picture: Any,
    regions: Sequence[Region],
    preset: str | Preset = "entmax-qq",
    *,
    protocol: str = "roialign",
    size: int = 224,
    templates: str | Sequence[str] = "none",
) -> list[int]:
    """Rank the captions of one photo's regions; arguments as for `rank_regions`.

    Args:
        clip: (model, tokenizer), in eval mode.
        picture: PIL image, RGB.
        regions: of this photo.
        preset: how CLIP is read under "roialign".
        protocol: one of `PROTOCOLS`.
        size: side of the square in pixels.
        templates: prompts around the captions.

    Returns:
        A rank for each region.
    """
    model, tokenizer = clip
    boxes = torch.tensor([region.box for region in regions])
    found = _dense(model, picture, boxes, preset, size) if protocol == "roialign" else _crops(model, picture, boxes)
    captions = list(dict.fromkeys(caption for region in regions for caption in region.captions))
    texts = text_features(model, tokenizer, captions, find_templates(templates))  # all at once: short batches are slow
    place = {caption: i for i, caption in enumerate(captions)}
    ranks = []
    for region, feature in zip(regions, F.normalize(found.float(), dim=-1), strict=True):
        ranks.append(rank_of_first(texts[[place[caption] for caption in region.captions]] @ feature))
    return ranks


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
