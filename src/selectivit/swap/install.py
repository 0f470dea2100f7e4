"""Put a rule on an attention module, and put back exactly what was there."""

from typing import Any

from torch import nn

from selectivit.ops.selective import AttentionRule
from selectivit.swap.attend import STATE, Selective
from selectivit.swap.sites import Edit, Site


class _Absent:
    """Stands for an attribute that was not there; a class, so that copies of a model hold the very same."""


def install(site: Site, rule: AttentionRule | None) -> Selective:
    """Make `site` follow `rule`; None keeps the module's own, for recordings.

    The state remembers what each edited attribute held, so that a copy of the model can be restored too: copied along,
    it names the copy's modules.
    """
    state = Selective(rule, host=site.implementation, native=site.native)
    edits = (Edit(site.module, STATE, state), *site.edits)
    state.found = tuple((edit, _read(edit.owner, edit.attribute)) for edit in edits)
    for edit in edits:
        setattr(edit.owner, edit.attribute, edit.value)
    return state


def uninstall(state: Selective) -> None:
    """Put back what `install` found, the very same objects."""
    for edit, value in reversed(state.found):
        if value is _Absent:
            delattr(edit.owner, edit.attribute)
        else:
            setattr(edit.owner, edit.attribute, value)
    state.found = ()


def is_current(module: nn.Module, state: Selective) -> bool:
    """Whether no later rule lies over this one."""
    return vars(module).get(STATE) is state


def _read(owner: nn.Module, attribute: str) -> Any:
    return type(owner) if attribute == "__class__" else vars(owner).get(attribute, _Absent)
