"""Where a model's attention lives: the image tower, its attention modules, and why others are left alone."""

import importlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from selectivit.ops.selective import SOFTMAX, AttentionRule

# A class of one of these packages or modules is known to the matching file of this folder, loaded when such a class
# is met.
HOSTS = {
    "timm": "selectivit.swap.timm",
    "open_clip": "selectivit.swap.open_clip",
    "transformers": "selectivit.swap.transformers",
    "torchvision": "selectivit.swap.torch_mha",
    "torch": "selectivit.swap.torch_mha",
    "selectivit.layers.selective_attention": "selectivit.swap.ours",
}
POOLS = "pools with learnt queries: left on softmax"
_NAMED_LIKE_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Edit:
    """One attribute to change while a site is swapped; `__class__` is an attribute like any other."""

    owner: nn.Module
    attribute: str
    value: Any


@dataclass(frozen=True)
class Site:
    """One attention module whose forward is known well enough to be swapped.

    Args:
        name: the module's name in the model, as in `named_modules`.
        module: the module itself.
        num_heads: its number of heads.
        host: timm, open_clip, transformers or torch.
        edits: what to change, beside the rule, so that the module asks for our attention.
        implementation: the attention implementation that the host names for it, where it names one.
        cross: True where queries and keys are known to come from different sequences.
        projection: the module that mixes the heads' outputs, where there is one.
        native: the rule that the module follows where no swap is in force.
    """

    name: str
    module: nn.Module
    num_heads: int
    host: str
    edits: tuple[Edit, ...] = ()
    implementation: str | None = None
    cross: bool = False
    projection: nn.Module | None = None
    native: AttentionRule = SOFTMAX


@dataclass(frozen=True)
class Tokens:
    """The tokens that leave one block: (B, L, C), class token first, then other prefix tokens, then patches.

    Args:
        tokens: (B, num_prefix + h * w, C).
        num_prefix: how many tokens come before the patches.
        has_cls: whether the first token is a class token.
        num_registers: how many of the prefix tokens, the last ones, are registers.
        grid: (h, w) in patches.
    """

    tokens: Tensor
    num_prefix: int
    has_cls: bool
    num_registers: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class Halves:
    """The two halves of a transformer block, each as what it adds to the tokens (B, L, C).

    Args:
        norm: what the attention half does first; nothing in blocks that norm afterwards.
        attention: takes what `norm` gives, and gives what the attention half adds.
        ffn: takes the tokens, and gives what the feed-forward half adds.
    """

    norm: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """What a model expects of its images.

    Args:
        mean: per channel, subtracted from values in [0, 1].
        std: per channel, divides what is left.
        patch_size: side of a patch in pixels.
        image_size: (height, width) in pixels that the model was built for.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch_size: int
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Tower:
    """The image tower of a model: its name in the model, the module, and the file that knows its host."""

    name: str
    module: nn.Module
    host: ModuleType


def as_index(value: Any) -> int | None:
    """`value` as an int, where it is a whole number of any kind (numpy's and torch's too, but no bool), else None."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s and data parallel's wrappers; anything else as it is."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def host_of(module: nn.Module) -> ModuleType:
    """The file of this folder that knows the module's class; plain torch where no other does."""
    for base in type(module).__mro__:
        for name in (base.__module__, base.__module__.partition(".")[0]):
            if name in HOSTS:
                return importlib.import_module(HOSTS[name])
    return importlib.import_module(HOSTS["torch"])


def find_tower(model: nn.Module) -> Tower | None:
    """The image tower of a known host inside `model`, or None.

    Raises:
        ValueError: when there are several.
    """
    towers: list[Tower] = []
    for name, module in unwrap(model).named_modules():
        if any(not tower.name or name.startswith(tower.name + ".") for tower in towers):
            continue
        host = host_of(module)
        if host.is_tower(module):
            towers.append(Tower(name, module, host))
    if len(towers) > 1:
        names = ", ".join(tower.name for tower in towers)
        raise ValueError(f"expected one image tower, found {len(towers)} ({names}): pass the one you mean")
    return towers[0] if towers else None


def find_sites(model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    """The attention modules that can be swapped, in block order, and the rest with the reason.

    Args:
        model: a model of any host, compiled or not. Where it has an image tower, only that is searched.

    Returns:
        The sites, and a dict from the names of other attention-like modules to why they are left alone.
    """
    tower = find_tower(model)
    sites: list[Site] = []
    known: dict[str, str] = {}  # left alone for a reason of its own
    unknown: dict[str, str] = {}  # only named like attention: perhaps a block around the real one
    for name, module, parents in _walk(unwrap(model)):
        found = host_of(module).site(name, module, parents)
        if tower and tower.name and not name.startswith(tower.name + "."):
            outside = f"outside the image tower {tower.name!r}"
            if found is not None:
                known[name] = outside
            elif _NAMED_LIKE_ATTENTION.search(type(module).__name__):
                unknown[name] = outside
        elif isinstance(found, Site):
            sites.append(found)
        elif found is not None:
            known[name] = found
        elif _NAMED_LIKE_ATTENTION.search(type(module).__name__):
            (known if "Pool" in type(module).__name__ else unknown)[name] = _why(module)
    inner = [site.name for site in sites] + list(known)
    skipped = {name: why for name, why in known.items() if not _inside(name, known)}
    for name, why in unknown.items():
        if not _inside(name, {**known, **unknown}) and not any(other.startswith(name + ".") for other in inner):
            skipped[name] = why
    return sites, skipped


def _why(module: nn.Module) -> str:
    kind = type(module)
    if "Pool" in kind.__name__:
        return POOLS
    return f"{kind.__qualname__} of {kind.__module__} is not one of the attention modules whose forward is known"


def _inside(name: str, others: Mapping[str, str]) -> bool:
    """Whether one of the modules named in `others` holds the one called `name`."""
    return any(name.startswith(other + ".") for other in others)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module once, with its name and its parents, the nearest last."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        steps = name.split(".") if name else []
        parents = [".".join(steps[:depth]) for depth in range(len(steps))]
        yield name, module, tuple(modules[parent] for parent in parents if parent in modules)
