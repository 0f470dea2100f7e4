"""A tiny student and teacher, a few small photos, and schedules of a few steps."""

from __future__ import annotations

import torch

from selectivit.models.create import create_model
from selectivit.train.schedule import Mix, Schedule, Stage
from selectivit.train.settings import DistillSettings

WIDTH = 24


def make_teacher(patch_size=14):
    import timm

    torch.manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=4 * patch_size,
        patch_size=patch_size,
        embed_dim=WIDTH,
        depth=2,
        num_heads=2,
        num_classes=0,
        dynamic_img_size=True,
    )
    for parameter in model.parameters():  # random attention is nearly uniform: sharpen it
        parameter.data.mul_(2)
    return model.eval()


def make_student(**arguments):
    torch.manual_seed(2)
    given = {"dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 24, "num_cores": 8, "out_dim": WIDTH, **arguments}
    return create_model("veca_tiny_patch14", **given)


def few_steps(steps=6, sizes=(28, 56), lr=2e-3):
    return Schedule((Stage((Mix(steps, dict.fromkeys(sizes, 1.0)),), lr=lr, min_lr=lr / 10, warmup=1),))


def quick(steps=6, **settings):
    given = {"schedule": few_steps(steps), "batch_size": 4, "validate_every": 3, "holdout": 2, "precision": "float32"}
    return DistillSettings(**{**given, **settings})


def write_photos(folder, count=12):
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        noise = torch.randint(0, 256, (5, 6, 3), generator=generator).to(torch.uint8)
        size = (72, 60) if i % 2 else (60, 80)
        Image.fromarray(noise.numpy()).resize(size, Image.Resampling.BICUBIC).save(folder / f"{i:02}.png")
    return folder


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
