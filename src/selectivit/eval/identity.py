"""What a model's features depend on, in a form that JSON holds and that two runs can compare."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from torch import nn

from selectivit.data.digest import tensors_digest
from selectivit.features import preprocessing
from selectivit.swap.sites import find_sites


def model_identity(model: nn.Module, name: str, attention: Any = "softmax") -> dict[str, Any]:
    """Tell a model by its weights, its structure and its attention.

    Args:
        model: not swapped yet.
        name: what it was asked for by.
        attention: "softmax", or all that decides the swap, as JSON can hold it.

    Returns:
        What JSON can hold.

    Raises:
        ValueError: a model without a known image tower.

    Example:
        >>> import torchvision
        >>> vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32)
        >>> sorted(model_identity(vit, "mine"))
        ['attention', 'dtype', 'heads', 'name', 'preprocessing', 'selectivit', 'structure_sha256', 'weights_sha256']
    """
    from selectivit import __version__

    expected = preprocessing(model)
    sites, _ = find_sites(model)
    config = getattr(model, "config", None)  # of VECA and transformers: what their layers do not print
    structure = re.sub(r" at 0x[0-9a-f]+", "", f"{model!r} {config!r}")  # addresses differ from run to run
    return {
        "selectivit": __version__,
        "name": name,
        "weights_sha256": tensors_digest(model.state_dict()),
        "structure_sha256": hashlib.sha256(structure.encode()).hexdigest(),
        "heads": [site.num_heads for site in sites],
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "preprocessing": [list(expected.mean), list(expected.std), expected.patch_size, list(expected.image_size)],
        "attention": attention,
    }
