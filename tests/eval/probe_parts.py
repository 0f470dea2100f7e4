"""A tiny model, a few photos and tokens made by hand, for the tests of probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from selectivit.data.digest import stat_digest
from selectivit.data.photos import PhotoFiles
from selectivit.eval.feature_cache import PhotoSet
from selectivit.eval.token_table import BlockTokens, TokenTable

PATCH, WIDTH, DEPTH = 8, 16, 3


def tiny_model(seed: int = 0, **options) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    settings = {"img_size": 32, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2}
    model = VisionTransformer(**(settings | {"num_classes": 0} | options)).eval()
    for parameter in model.parameters():  # random attention is nearly uniform: sharpen it, so that a swap shows
        parameter.data.mul_(3)
    return model


def write_photos(folder: Path, count: int, sizes=((32, 40), (40, 32))) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (*sizes[i % len(sizes)], 3), dtype=np.uint8)
        paths.append(folder / f"{i:03d}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def photo_set(paths: list[Path]) -> PhotoSet:
    return PhotoSet(PhotoFiles([str(p) for p in paths]), stat_digest(paths, paths[0].parent), "photos")


def table(maps: list[Tensor], cls: Tensor | None = None, tokens: str = "patch", per_file: int = 2) -> TokenTable:
    """A table of maps (D, h, w), in files of a few photos."""
    rows = [m.flatten(1).t().half() for m in maps]
    files = tuple(torch.cat(rows[i : i + per_file]) for i in range(0, len(rows), per_file))
    grids = torch.tensor([m.shape[1:] for m in maps])
    return TokenTable([BlockTokens(files, None if cls is None else cls.half(), grids, {})], tokens)
