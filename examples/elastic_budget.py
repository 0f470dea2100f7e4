"""Claim: one core-periphery model serves every budget: its cores are ordered, and the first few are a whole model.

python examples/elastic_budget.py veca-tiny examples/cat.jpg --size 448

Budget c takes the first c cores of the bank. Zeroing all others changes no bit of the answer, and a small budget keeps
most of the features of the whole bank. Source: VECA, arXiv 2605.12491 (nested dropout of cores).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch

import selectivit as sv
from selectivit.eval.cost import veca_cost


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a core-periphery model: veca-tiny, or a folder")
    parser.add_argument("photo")
    parser.add_argument("--size", type=int, default=448, help="shorter side in pixels (default 448)")
    options = parser.parse_args(argv)
    model = sv.load_model(options.model)
    images = sv.load_image(options.photo, sv.preprocessing(model), size=options.size)
    whole = sv.features(model, images).patch_tokens
    found, budget = {}, model.bank.num_cores
    while budget:
        part = sv.features(model, images, num_cores=budget).patch_tokens
        assert torch.equal(part, sv.features(_without(model, budget), images, num_cores=budget).patch_tokens)
        found[budget] = torch.cosine_similarity(whole, part, dim=-1).mean().item()
        gflops = veca_cost(model.config, tuple(images.shape[-2:]), budget).flops / 1e9
        print(f"{budget:4} cores: cosine to the whole bank's patches {found[budget]:.3f}, {gflops:6.2f} GFLOPs")
        budget //= 2
    print("zeroing the cores beyond a budget changed nothing, at any budget")
    return found


def _without(model, budget: int):
    """A copy whose cores beyond the budget are zero."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        place = 0
        for chunk in twin.bank.token_chunks:
            chunk[max(0, budget - place) :] = 0
            place += len(chunk)
    return twin


if __name__ == "__main__":
    main()
