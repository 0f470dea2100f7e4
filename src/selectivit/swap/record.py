"""What attention modules see in a forward: their queries, keys, values and masks."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from selectivit.swap.attend import STATE, Call, Selective
from selectivit.swap.install import install, is_current, uninstall
from selectivit.swap.sites import Site

_LOCK = threading.Lock()  # recordings of several threads share what the first installs and the last takes away


@contextmanager
def recording(sites: Iterable[Site]) -> Iterator[dict[str, list[Call]]]:
    """Note every call that this thread makes of the given attention modules, swapped or not, while the block runs.

    The model computes what it would have computed: a module that is not swapped keeps the host's softmax, through
    the same fused kernel where the host uses it (else equal to rounding). The tensors are those of the forward,
    not copies, with their gradients. Other threads may use and record the same model; swapping it meanwhile, or
    restoring it, is not safe.

    Args:
        sites: from `find_sites`.

    Yields:
        A dict from each site's name to the list of its calls so far.

    Raises:
        RuntimeError: at the end of the block, when a swap made inside it still lies over a module.
    """
    calls: dict[str, list[Call]] = {}
    listening: list[tuple[Site, Selective, list[Call] | None]] = []
    thread = threading.get_ident()
    try:
        with _LOCK:
            for site in sites:
                state = vars(site.module).get(STATE) or install(site, None)
                listening.append((site, state, state.calls.get(thread)))
                calls[site.name] = state.calls[thread] = []
        yield calls
    finally:
        with _LOCK:
            covered = [site.name for site, state, before in reversed(listening) if not _leave(site, state, before)]
        if covered:
            raise RuntimeError(
                f"a swap made while {', '.join(covered)} was recorded is still in force: restore it first"
            )


def _leave(site: Site, state: Selective, before: list[Call] | None) -> bool:
    """Stop listening, and take away what only recordings needed; False where a swap lies over it."""
    thread = threading.get_ident()
    if before is None:
        state.calls.pop(thread, None)
    else:
        state.calls[thread] = before
    if state.rule is not None or state.calls or not state.found:
        return True
    if not is_current(site.module, state):
        return False
    uninstall(state)
    return True
