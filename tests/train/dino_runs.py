"""A mini ViT under a name that `create_model` knows, and pretraining of a few steps."""

from __future__ import annotations

from selectivit.data.multi_crop import Crops
from selectivit.models import create
from selectivit.models.dino_vit_config import DinoVitConfig
from selectivit.train.dino_settings import DinoSettings

MINI = "dino_vit_mini_patch8"


def mini(arguments):
    """Two blocks whose weights are larger than usual: else their outputs would hardly depend on the photo."""
    model = create._dino_vit(DinoVitConfig(dim=24, depth=2, num_heads=2, patch_size=8), arguments)
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.ndim == 2 else 1)
    return model


create.BUILDERS[MINI] = mini


def quick(steps=6, **settings):
    given = {"model": MINI, "crops": Crops(32, local_size=16, num_local=2), "epochs": 3, "steps": steps}
    given |= {"batch_size": 4, "warmup_epochs": 1, "lr": 0.05, "teacher_momentum": 0.99, "weight_decay_end": 0.1}
    given |= {"out_dim": 64, "hidden_dim": 32, "bottleneck_dim": 256, "precision": "float32"}
    return DinoSettings(**{**given, **settings})
