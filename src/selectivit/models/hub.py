"""The model hub, asked once and briefly: where it does not answer, the host libraries use what is on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Hub:
    """Whether the hub can be used.

    Args:
        available: it answers, and offline mode is not set.
        why_not: the reason in words, empty when available.
    """

    available: bool
    why_not: str = ""


def ask_hub(timeout: float = PROBE_TIMEOUT_S) -> Hub:
    """See within `timeout` whether the model hub answers.

    Args:
        timeout: seconds; an answer that takes longer counts as none.

    Returns:
        Whether it can be used, and why not.
    """
    from huggingface_hub import constants

    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return Hub(False, f"{variable} is set, so the model hub is not asked")
    if constants.HF_HUB_OFFLINE:
        return Hub(False, "HF_HUB_OFFLINE is set, so the model hub is not asked")
    failure: list[str] = ["no answer"]

    def probe() -> None:
        from huggingface_hub.utils import get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=timeout)
            failure.clear()  # any status is an answer
        except Exception as error:  # of whichever HTTP library the hub's client is built on
            failure[:] = [str(error) or type(error).__name__]

    # A thread, since looking up the host's name has no timeout of its own.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(timeout)
    if failure:
        return Hub(False, f"the model hub cannot be reached ({failure[0]})")
    return Hub(True)


@contextmanager
def use_hub() -> Iterator[Hub]:
    """Let host libraries load from the hub, or, when it cannot be used, from its local cache without waiting for it.

    Yields:
        Whether the hub can be used.
    """
    from huggingface_hub import constants

    hub = ask_hub()
    before = constants.HF_HUB_OFFLINE
    # timm, open_clip and transformers all read this when they load; otherwise each retries for a minute.
    constants.HF_HUB_OFFLINE = before or not hub.available
    try:
        yield hub
    finally:
        constants.HF_HUB_OFFLINE = before
