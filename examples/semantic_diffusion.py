"""Claim: the photo's meaning spreads: patches come to resemble the class token in the last blocks.

python examples/semantic_diffusion.py dinov2-small examples/cat.jpg examples/coffee.jpg

Mean cosine of patches and class token, block by block: softmax, then entmax-1.5 in the last blocks, nothing trained.
The paper trains with entmax from the start; whether a swap lowers the cosine depends on model and photos.
Source: arXiv 2605.23868 (semantic diffusion).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import selectivit as sv
from selectivit.eval.token_statistics import token_statistics
from selectivit.features import block_features, num_blocks


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a local folder; it must have a class token")
    parser.add_argument("photos", nargs="+")
    parser.add_argument("--size", type=int, default=224, help="shorter side in pixels (default 224)")
    parser.add_argument("--last", type=int, default=4, help="how many blocks take entmax (default 4)")
    options = parser.parse_args(argv)
    model = sv.load_model(options.model)
    photos = [sv.load_image(path, sv.preprocessing(model), size=options.size) for path in options.photos]
    blocks = list(range(num_blocks(model)))
    found = {"softmax": _similarity(model, photos, blocks)}
    with sv.swap_attention(model, "entmax", alpha=1.5, layers=-options.last):
        found["entmax"] = _similarity(model, photos, blocks)
    print("block   " + "".join(f"{block:7}" for block in blocks))
    for name, values in found.items():
        print(f"{name:8}" + "".join(f"{value:7.3f}" for value in values))
    return found


def _similarity(model, photos, blocks: list[int]) -> list[float]:
    """Mean over photos of the patches' mean cosine with the class token, for each block."""
    sums = [0.0] * len(blocks)
    for images in photos:
        raw, normed = (block_features(model, images, blocks, norm=norm) for norm in (False, True))
        for place, pair in enumerate(zip(raw, normed, strict=True)):
            value = token_statistics(*pair)[0]["cls_similarity"]
            if value is None:
                raise ValueError("expected a model with a class token, this one has none: choose another")
            sums[place] += value / len(photos)
    return sums


if __name__ == "__main__":
    main()
