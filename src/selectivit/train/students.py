"""Students and teachers by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from selectivit.data.seeding import derived_seed, seeded
from selectivit.models.create import BUILDERS, create_model
from selectivit.models.weights import load_model
from selectivit.train.pair import width_of


def build_student(
    name: str | os.PathLike[str], teacher: nn.Module, *, seed: int, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a student.

    Args:
        name: of a model that `create_model` knows, made new: a core-periphery one ("veca_tiny_patch14") with its
            outputs in the teacher's width; else anything that `load_model` takes, with its weights.
        teacher: whose width the outputs get.
        seed: of the new weights.
        arguments: of `create_model`, such as num_cores.

    Returns:
        The student, in training mode.

    Raises:
        ValueError: an unknown name, or arguments for a model that is loaded.
    """
    given = dict(arguments or {})
    if str(name) in BUILDERS:
        if str(name).startswith("veca"):
            given.setdefault("out_dim", width_of(teacher))
        with seeded(derived_seed(seed, "weights")):
            return create_model(str(name), **given).train()
    if str(name).startswith("veca_") and not os.path.isdir(name):
        raise ValueError(f"unknown core-periphery model {str(name)!r}: expected one of {', '.join(BUILDERS)}")
    if given:
        raise ValueError(f"{name} is loaded with its weights: arguments ({', '.join(given)}) are for new models alone")
    return load_model(name).train()
