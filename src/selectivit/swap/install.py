"""Put a rule on an attention module, and put back exactly what was there."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from selectivit.ops.selective import AttentionRule
from selectivit.swap.attend import STATE, Selective
from selectivit.swap.sites import Edit, Site

_ABSENT = object()


@dataclass(frozen=True)
class Installed:
    """A rule on a site: the state that it carries and what each edited attribute held before."""

    site: Site
    state: Selective
    found: tuple[tuple[Edit, Any], ...]


def install(site: Site, rule: AttentionRule | None) -> Installed:
    """Make `site` follow `rule`; None keeps the host's softmax, for recordings."""
    state = Selective(rule, host=site.implementation)
    edits = (Edit(site.module, STATE, state), *site.edits)
    found = tuple((edit, _read(edit.owner, edit.attribute)) for edit in edits)
    for edit in edits:
        setattr(edit.owner, edit.attribute, edit.value)
    return Installed(site, state, found)


def uninstall(installed: Installed) -> None:
    """Put back what `install` found, the very same objects."""
    for edit, value in reversed(installed.found):
        if value is _ABSENT:
            delattr(edit.owner, edit.attribute)
        else:
            setattr(edit.owner, edit.attribute, value)


def is_current(installed: Installed) -> bool:
    """Whether no later rule lies over this one."""
    return vars(installed.site.module).get(STATE) is installed.state


def _read(owner: nn.Module, attribute: str) -> Any:
    return type(owner) if attribute == "__class__" else vars(owner).get(attribute, _ABSENT)
