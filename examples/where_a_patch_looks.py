"""Claim: in every score source softmax leaves a patch a tail of weight on the background, and entmax cuts it off.

python examples/where_a_patch_looks.py dinov2-small examples/cat.jpg --size 448 --patch 16,24 --out patch.png

Draws the last layer's attention of one patch for qk, qq, kk and vv, softmax above, entmax below; grey is exactly zero.
Source: arXiv 2607.07135.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import selectivit as sv
from selectivit.vis.attention import draw_attention, patch_weights, weight_scale
from selectivit.vis.pictures import png

SCORES = ("qk", "qq", "kk", "vv")


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, str], float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a local folder")
    parser.add_argument("photo")
    parser.add_argument("--size", type=int, default=448, help="shorter side in pixels (default 448)")
    parser.add_argument("--patch", default="0,0", metavar="ROW,COLUMN", help="counted from 0 at the upper left")
    parser.add_argument("--alpha", type=float, default=1.2, help="entmax's α (default 1.2)")
    parser.add_argument("--out", default="patch.png", help="the picture (default patch.png)")
    options = parser.parse_args(argv)
    from matplotlib.figure import Figure

    model = sv.load_model(options.model)
    images = sv.load_image(options.photo, sv.preprocessing(model), size=options.size)
    f = sv.features(model, images)
    row, column = map(int, options.patch.split(","))
    weights, shares = {}, {}
    for normalizer in ("softmax", "entmax"):
        for scores in SCORES:
            with sv.swap_attention(model, normalizer, alpha=options.alpha, scores=scores, layers=-1):
                maps = sv.attention_maps(model, images)[0]
            prefix = maps.shape[-1] - f.patch_tokens.shape[1]
            weights[normalizer, scores] = maps[:, prefix + row * f.grid[1] + column].mean(0)
            shares[normalizer, scores] = (maps != 0).float().mean().item()
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    low = images[0].amin()
    photo = ((images[0] - low) / (images[0].amax() - low)).permute(1, 2, 0)
    norm = weight_scale(*weights.values())
    side = photo.shape[0] / f.grid[0], photo.shape[1] / f.grid[1]
    for axes, (key, values) in zip(figure.subplots(2, len(SCORES)).flat, weights.items(), strict=True):
        draw_attention(axes, photo, patch_weights(values, f.grid), norm)
        axes.plot((column + 0.5) * side[1], (row + 0.5) * side[0], "s", mfc="none", mec="red", ms=8)
        axes.set_title(f"{key[0]} {key[1]}, {100 * shares[key]:.0f} % of weights", fontsize=10)
    Path(options.out).write_bytes(png(figure))
    print(options.out)
    return shares


if __name__ == "__main__":
    main()
