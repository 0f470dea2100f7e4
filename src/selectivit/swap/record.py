"""What attention modules see in a forward: their queries, keys, values and masks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from selectivit.swap.attend import STATE, Call, Selective
from selectivit.swap.install import Installed, install, uninstall
from selectivit.swap.sites import Site


@contextmanager
def recording(sites: Iterable[Site]) -> Iterator[dict[str, list[Call]]]:
    """Note every call of the given attention modules, swapped or not, while the block runs.

    The model computes what it would have computed: a module that is not swapped keeps the host's softmax, through
    the same fused kernel where the host uses it (else equal to rounding). The tensors are those of the forward,
    not copies, with their gradients.

    Args:
        sites: from `find_sites`.

    Yields:
        A dict from each site's name to the list of its calls so far.
    """
    calls: dict[str, list[Call]] = {}
    installed: list[Installed] = []
    listening: list[tuple[Selective, list[Call] | None]] = []
    try:
        for site in sites:
            state = vars(site.module).get(STATE)
            if state is None:
                installed.append(install(site, None))
                state = installed[-1].state
            listening.append((state, state.calls))
            state.calls = calls[site.name] = []
        yield calls
    finally:
        for state, before in reversed(listening):
            state.calls = before
        for item in reversed(installed):
            uninstall(item)
