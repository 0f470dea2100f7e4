"""Claim: the scale of the scores decides what an untrained swap of all layers keeps of softmax's features.

python examples/calibrated_sparsity.py dinov2-small examples/cat.jpg --size 224

Every layer takes entmax-1.5, once with its scores as they are and once with one fitted factor a layer and head.
Source: entmax, arXiv 1905.05702; the calibration is ours (docs/swap.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import selectivit as sv


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a local folder")
    parser.add_argument("photo", help="the factors are fitted on it, and it is looked at")
    parser.add_argument("--size", type=int, default=224, help="shorter side in pixels (default 224)")
    parser.add_argument("--max-support", type=float, default=0.25, help="bound on the share of weights (default 0.25)")
    options = parser.parse_args(argv)
    model = sv.load_model(options.model)
    images = sv.load_image(options.photo, sv.preprocessing(model), size=options.size)
    calibration = sv.calibrate_swap(model, images, max_support=options.max_support)
    softmax = sv.features(model, images).patch_tokens
    found = {}
    for name, scale in (("scores as they are", None), ("calibrated", calibration)):
        with sv.swap_attention(model, "entmax", alpha=1.5, layers=None, scale=scale) as swap:
            sparse = sv.features(model, images).patch_tokens
            layers = range(len(swap.replaced))
            shares = [(sv.attention_maps(model, images, layer=layer) != 0).float().mean() for layer in layers]
        cosine = torch.cosine_similarity(softmax, sparse, dim=-1).mean().item()
        found[name] = (torch.stack(shares).mean().item(), cosine)
        print(f"{name:20} non-zero weights {100 * found[name][0]:5.1f} %, cosine to softmax's patches {cosine:.3f}")
    return found


if __name__ == "__main__":
    main()
