"""Whether a folder holds this very run, to go on with, or another one, to keep out of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from selectivit.data.writing import WriteError, write_json
from selectivit.train.checkpoints import CHECKPOINT

RUN, SKIPPED = "run.json", "skipped.json"


def claim_folder(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Look for an earlier run in a folder.

    Args:
        out: the run's folder.
        settings: all that decides the result, as JSON can hold it.

    Returns:
        What the earlier run of the same settings wrote into run.json; None where there is none.

    Raises:
        ValueError: the folder holds a run of other settings, or a run.json that cannot be read.
    """
    path = out / RUN
    if not path.is_file():
        if (out / CHECKPOINT).exists():
            raise ValueError(f"{out} holds a {CHECKPOINT} without its {RUN}: choose another --out")
        return None
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        before = earlier["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): choose another --out") from error
    differing = differences(before, json.loads(json.dumps(settings)))
    if differing:
        told = "; ".join(differing[:6]) + ("; …" if len(differing) > 6 else "")
        raise ValueError(
            f"{out} holds a run with other settings ({told}): give the same settings to go on, or another --out"
        )
    return earlier


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Name what differs between two trees of settings.

    Args:
        before: of the earlier run.
        now: of this one.
        name: of the trees' root.

    Returns:
        Such as "seed was 0, now 1".

    Example:
        >>> differences({"seed": 0, "losses": {"patch_mse": 1.0}}, {"seed": 0, "losses": {"patch_mse": 2.0}})
        ['losses.patch_mse was 1.0, now 2.0']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in dict.fromkeys([*before, *now]):
            found += differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
        return found
    return [] if before == now else [f"{name} was {_short(before)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def write_run(out: Path, settings: Mapping[str, Any], state: str, result: Mapping[str, Any]) -> None:
    """Write run.json.

    Args:
        out: the run's folder.
        settings: all that decides the result.
        state: "running", "stopped" or "done"; a run that was killed is still "running".
        result: what came out so far.

    Raises:
        WriteError: the folder cannot be written.
    """
    write_json(out / RUN, {"state": state, "settings": dict(settings), "result": dict(result)})


def note_stop(out: Path, settings: Mapping[str, Any], step: int, error: BaseException) -> None:
    """Write into run.json that a run stopped, and why.

    Args:
        out: the run's folder.
        settings: as for `write_run`.
        step: of the last checkpoint.
        error: what stopped it.
    """
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    with suppress(WriteError):  # a full disk is told by the error itself
        write_run(out, settings, "stopped", {"step": step, "reason": reason})


def write_skipped(out: Path, skipped: Mapping[str, str]) -> None:
    """Write skipped.json, where anything was skipped.

    Args:
        out: the run's folder.
        skipped: names to reasons.

    Raises:
        WriteError: the folder cannot be written.
    """
    if skipped:
        listed = [{"source": name, "reason": reason} for name, reason in sorted(skipped.items())]
        write_json(out / SKIPPED, {"count": len(listed), "skipped": listed})
