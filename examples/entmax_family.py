"""Claim: α-entmax is softmax at α = 1, and from there on gives exact zeros, more of them with a larger α.

python examples/entmax_family.py --out entmax_family.png

Draws the weights of one row of scores for several α. Source: Peters, Niculae, Martins, arXiv 1905.05702.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import selectivit as sv
from selectivit.vis.pictures import dress, png

ALPHAS = (1.0, 1.2, 1.5, 2.0)


def main(argv: Sequence[str] | None = None) -> dict[float, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60, help="length of the row (default 60)")
    parser.add_argument("--spread", type=float, default=2.0, help="deviation of the scores (default 2)")
    parser.add_argument("--out", default="entmax_family.png", help="the picture (default entmax_family.png)")
    options = parser.parse_args(argv)
    from matplotlib.figure import Figure

    scores = torch.randn(options.tokens, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    scores = scores * options.spread
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes, found = figure.subplots(), {}
    for alpha in ALPHAS:
        p = sv.entmax(scores, alpha)
        found[alpha] = int((p != 0).sum())
        axes.plot(p.where(p != 0, torch.nan), marker=".", label=f"α = {alpha:g}: {found[alpha]} of {len(p)} not zero")
        print(f"alpha {alpha:g}: {found[alpha]} of {len(p)} weights are not zero, their sum is {p.sum():.6f}")
    axes.set(yscale="log", xlabel="token, by falling score", ylabel="weight")
    axes.legend(frameon=False, fontsize=8)
    dress(axes)
    Path(options.out).write_bytes(png(figure))
    return found


if __name__ == "__main__":
    main()
