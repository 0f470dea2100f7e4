"""Read the tokens that leave one block of a model, whatever the block's host."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.swap.sites import as_index

Module = TypeVar("Module", bound=nn.Module)


class _ReachedError(Exception):
    """Ends a forward at the block that was asked for."""


def tap(block: nn.Module, run: Callable[[], Any]) -> Tensor:
    """The output of `block` while `run()` runs a model that holds it; what comes after the block is not run.

    Other threads may run the same model meanwhile: this hook stops the forward of its own thread alone.

    Raises:
        RuntimeError: when the forward never reached the block.
    """
    known = getattr(_together, "outputs", None)
    if known is not None and block in known:
        return known[block]
    caught: list[Tensor] = []
    reached, owner = _ReachedError(), threading.get_ident()

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == owner:
            caught.append(output[0] if isinstance(output, tuple) else output)
            if not torch.compiler.is_exporting():  # whose tracer takes no forward that ends early
                raise reached

    handle = block.register_forward_hook(hook)
    try:
        with eager():
            run()
    except _ReachedError as error:
        if error is not reached:
            raise
    finally:
        handle.remove()
    if caught:
        return caught[0]
    raise RuntimeError(f"the model's forward never reached {type(block).__name__}")


_together = threading.local()


@contextmanager
def together(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within it a forward notes what leaves each of these blocks, and later taps of them take that and run nothing.

    For one batch of images: tap the last of the blocks first, then the others.
    """
    outputs: dict[nn.Module, Tensor] = {}
    owner = threading.get_ident()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == owner:
            outputs[module] = output[0] if isinstance(output, tuple) else output

    handles = [block.register_forward_hook(hook) for block in blocks]  # before tap's own, which ends the forward
    _together.outputs = outputs
    try:
        yield
    finally:
        _together.outputs = None
        for handle in handles:
            handle.remove()


_LOCK = threading.Lock()
_eager: list[Any] = []  # one entry a holder; the first is the stance to leave, the others wait for nothing


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models eagerly, so that a look inside does not compile them anew.

    torch's stance is one for all threads: the first holder takes it, the last gives it back.
    """
    if "torch._dynamo" not in sys.modules or torch.compiler.is_exporting():  # a loop in the graph is compiled
        yield
        return
    with _LOCK:
        _eager.append(None if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _LOCK:
            _eager.pop() if len(_eager) > 1 else _eager.pop().__exit__(None, None, None)


def shadow(module: Module) -> Module:
    """A copy that shares all parameters and submodules, whose own attributes can change without touching `module`."""
    twin = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(vars(module)[name])
    return twin


def pick_block(blocks: Sequence[nn.Module], layer: int) -> nn.Module:
    """The block at `layer`, negatives from the end.

    Raises:
        ValueError: when there is no such block; the text says how many there are.
    """
    count = len(blocks)
    index = as_index(layer)
    if index is None or not -count <= index < count:
        raise ValueError(f"layer={layer!r} is out of range: this model has {count} blocks, 0 to {count - 1}")
    return blocks[index]


def resize_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix: int) -> Tensor:
    """Position embeddings (1, num_prefix + h * w, C) of an `old` grid, bicubic for a `new` one; prefix ones kept."""
    if old == new:
        return positions
    prefix, grid = positions[:, :num_prefix], positions[:, num_prefix:]
    grid = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, C, h, w)
    resized = F.interpolate(grid.float(), size=new, mode="bicubic", antialias=True).to(grid.dtype)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)
