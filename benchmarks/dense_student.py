"""Train the control of a distilled VECA: a dense ViT of the same width, depth, SwiGLU and RoPE, in the same steps.

    python benchmarks/dense_student.py PHOTOS… --out FOLDER --steps 4000 --views 8 --teacher-cache FOLDER

What differs is the topology alone: each patch attends to all patches. timm's DINOv3 architecture at 192 wide, with one
class token, no registers and no LayerScale, as VECA has none. The options are those of `selectivit distill`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timm.models.eva import Eva

from selectivit.cli.training_progress import training_progress
from selectivit.train.distill import distill
from selectivit.train.settings import DistillSettings, Running


def dense_student(seed: int = 0, patch: int = 14) -> Eva:
    """A dense ViT of `veca_tiny`'s measures: 192 wide, 12 blocks of 3 heads, SwiGLU of 512."""
    torch.manual_seed(seed)
    return Eva(
        img_size=16 * patch,
        patch_size=patch,
        num_classes=0,
        global_pool="token",
        embed_dim=192,
        depth=12,
        num_heads=3,
        mlp_ratio=512 / 192,
        swiglu_mlp=True,
        use_abs_pos_emb=False,
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_rotate_half=True,
        rope_temperature=100.0,
        dynamic_img_size=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--teacher", default="dinov2-small")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--teacher-cache", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    settings = DistillSettings(steps=given.steps, views=given.views, seed=given.seed)
    running = Running(teacher_cache=given.teacher_cache)
    with training_progress(shown=True) as tell:
        result = distill(
            dense_student(given.seed), given.teacher, given.photos, given.out, settings, running, tell=tell
        )
    print(result.final, result.validation)


if __name__ == "__main__":
    main()
