"""The JSON files that probes wrote, each as runs of one form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selectivit.data.digest import names_digest

KINDS = ("knn", "linear", "segmentation", "depth")
POINT = "point_in_box.json"
FILES = (*(f"{kind}.json" for kind in KINDS), *(f"layers.{kind}.json" for kind in KINDS), POINT)
OF_THE_MODEL = ("model", "tokens", "blocks", "norm", "num_cores", "seed")
"""Settings of a run that rows and columns tell apart; all others must be equal for two runs to be compared."""
POINT_RULES = ("split", "objects", "max_area", "classes", "resize", "size")


@dataclass(frozen=True)
class Run:
    """One number of a probe, or several of one head, with all that it depends on.

    Args:
        task: knn, linear, segmentation, depth or point-in-box.
        path: the JSON that holds it.
        model: as it was asked for.
        identity: of weights and structure; of Point-in-Box, which does not record them, the name.
        attention: "softmax" or another of the model's own, or the options of a swap.
        norm: whether the tokens passed the final norm.
        num_cores: a core-periphery model's budget; None is its own.
        blocks: whose tokens stand side by side.
        tokens: cls, patch or cls+patch.
        seed: of the run.
        conditions: what must be equal for two runs to be compared.
        protocol: in words.
        result: what was found.
        settings: as the JSON holds them.
        version: of selectivit.
        depth: blocks of the model, 0 where it is not known.
        notes: what else should be known.
        skipped: photos that could not be used, and why.
    """

    task: str
    path: Path
    model: str
    identity: str
    attention: Any
    norm: bool
    num_cores: int | None
    blocks: tuple[int, ...]
    tokens: str
    seed: int
    conditions: dict[str, Any]
    protocol: dict[str, str]
    result: dict[str, Any]
    settings: dict[str, Any]
    version: str
    depth: int = 0
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def variant(self) -> str:
        """What tells a model with its attention, budget and norm from others, whatever the seed."""
        attention = self.attention
        if isinstance(attention, dict):
            attention = {name: value for name, value in attention.items() if name != "seed"}
        return json.dumps([self.identity, attention, self.num_cores, self.norm], sort_keys=True)


def runs_of(path: Path) -> list[Run]:
    """Read one JSON of a probe.

    Args:
        path: one of `FILES` in a folder of results.

    Returns:
        Its runs, in its order; a block of Point-in-Box or of `layers` is a run.

    Raises:
        ValueError: damaged, or written by another version.
    """
    content, name = _content(path), path.name
    try:
        if name == POINT:
            return list(_points(path, content))
        if name.startswith("layers."):
            return list(_series(path, content))
        return [_run(path, name.removesuffix(".json"), each) for each in content["runs"]]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} is not of the form that selectivit {_ours()} writes ({type(error).__name__}: {error}): was it "
            "written by another version? Make it anew in another folder"
        ) from error


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): make the result anew, or leave its folder out") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not of the form that selectivit {_ours()} writes: make the result anew")
    return content


def _ours() -> str:
    from selectivit import __version__

    return __version__


def _known(path: Path, version: Any) -> str:
    """The version that wrote a result; an error where it is one that came after this."""

    def parts(text: Any) -> tuple[int, ...]:
        with contextlib.suppress(ValueError, AttributeError):
            return tuple(int(part) for part in text.split(".")[:2])
        return ()

    if not parts(version) or parts(version) > parts(_ours()):
        raise ValueError(
            f"{path} was written by selectivit {version}, which this one, {_ours()}, does not know: make the "
            "report with that version, or the result with this one"
        )
    return version


def _run(path: Path, task: str, entry: dict[str, Any]) -> Run:
    settings, model = entry["settings"], entry["settings"]["model"]
    version = _known(path, model["selectivit"])
    conditions = {name: value for name, value in settings.items() if name not in OF_THE_MODEL}
    conditions["data"] = {name: value for name, value in settings["data"].items() if name != "root"}
    return Run(
        task,
        path,
        model["name"],
        f"{model['weights_sha256']} {model['structure_sha256']}",
        model["attention"],
        settings["norm"],
        settings["num_cores"],
        tuple(settings["blocks"]),
        settings["tokens"],
        settings["seed"],
        conditions,
        dict(entry["protocol"]),
        dict(entry["result"]),
        settings,
        version,
        len(model["heads"]),
        tuple(entry.get("notes", ())),
        tuple(f"{each['source']}: {each['reason']}" for each in entry.get("skipped", ())),
    )


def _series(path: Path, content: dict[str, Any]) -> Iterator[Run]:
    """The blocks of `probe layers`, each as the run that it is."""
    task = path.name.removeprefix("layers.").removesuffix(".json")
    for series in content["runs"]:
        for point in series["result"]["points"]:
            settings = {**series["settings"], "blocks": [point["block"]]}
            entry = {"settings": settings, "protocol": series["protocol"], "result": point["result"]}
            yield _run(path, task, entry | {"skipped": series.get("skipped", ())})


def _points(path: Path, content: dict[str, Any]) -> Iterator[Run]:
    """Point-in-Box of each model and block."""
    settings, version = content["settings"], _known(path, content["versions"]["selectivit"])
    rules = {name: settings[name] for name in POINT_RULES}
    protocol = {"name": "Point-in-Box", "scored": content["protocol"], "source": "arXiv 2605.23868"}
    skipped = tuple(f"{each['source']}: {each['reason']}" for each in content["skipped"])
    for model in content["models"]:
        names = [record["name"] for record in model["records"]]
        data = {**content["data"], "scored": len(names), "sha256": names_digest(sorted(names))}
        for block in model["blocks"]:
            yield Run(
                "point-in-box",
                path,
                model["model"],
                model["model"],
                model["attention"],
                settings["norm"],
                settings["num_cores"],
                (block["block"],),
                settings["against"],
                settings["seed"],
                {"data": data, "rules": rules},
                protocol,
                {**block, "chance": model["chance"]},
                {**settings, "models": list(dict.fromkeys(each["model"] for each in content["models"]))},
                version,
                len(model["blocks"]),
                tuple(content["notes"]),
                skipped,
            )
