"""A distilled student as a folder: weights, configuration, factors of its swap, model card."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from selectivit.data.writing import write_atomic, write_error
from selectivit.models.saving import save_model
from selectivit.swap.calibrate import measure_swap
from selectivit.swap.learn_scale import swapped_rules
from selectivit.swap.sites import find_sites
from selectivit.train.pair import Pair
from selectivit.train.tokens import normalise

DISTILLED = "Distilled from a frozen teacher's dense features by selectivit (measured here)."
HEAD, CARD, CALIBRATION = "distillation_head.safetensors", "README.md", "calibration"
TERMS = "\n## Terms\n\n"


def export_student(folder: Path, pair: Pair, card: str, crops: Sequence[Tensor]) -> str:
    """Write a student; each file is there whole or not at all, and an earlier student in the folder is replaced.

    Args:
        folder: made if it is not there.
        pair: student and head.
        card: the model card, with {use} where it says how the folder is read.
        crops: (3, S, S) uint8, at least one for a swapped student: its factors are described by their support on them.

    Returns:
        How the folder is read, in words.

    Raises:
        WriteError: no space, no permission.
    """

    def fill(scratch: Path) -> str:
        loads = save_model(pair.student, str(scratch))
        calibrated = save_calibration(scratch / CALIBRATION, pair, crops)
        use = usage(loads, swap_call(pair.student, calibrated))
        if isinstance(pair.head, nn.Linear):
            tensors = {name: t.contiguous() for name, t in pair.head.state_dict().items()}
            (scratch / HEAD).write_bytes(save(tensors))
            use += f"\n\nIts tokens reach the teacher's width through the linear map in {HEAD}."
        return use

    return write_folder(folder, fill, card)


def write_folder(folder: Path, fill: Callable[[Path], str], card: str) -> str:
    """Write a model's folder; each file is there whole or not at all, and an earlier model in it is replaced.

    Args:
        folder: made if it is not there.
        fill: writes the model into the folder that it is given, and says how it is read again.
        card: the model card, with {use} where it says so.

    Returns:
        How the folder is read, in words.

    Raises:
        WriteError: no space, no permission.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
            use = fill(Path(scratch))
            (Path(scratch) / CARD).write_text(card.replace("{use}", use), encoding="utf-8")
            _place(Path(scratch), folder)
    except OSError as error:
        raise write_error(folder, error) from error
    except Exception as error:  # safetensors has an error of its own for a full disk
        if "No space left" in str(error):
            raise write_error(folder, OSError(28, "No space left on device")) from error
        raise
    return use


def save_calibration(folder: Path, pair: Pair, crops: Sequence[Tensor]) -> bool:
    """Write the factors of a student's swap, for its weights as they are now.

    Args:
        folder: made if it is not there.
        pair: the student.
        crops: (3, S, S) uint8.

    Returns:
        False where there are none: no swap, none with factors, or several rules.
    """
    rules = [(site, rule) for site, rule in swapped_rules(pair.student) if rule.scale is not None]
    kinds = {(rule.normalizer, float(rule.alpha), rule.scores) for _, rule in rules if not _per_head(rule.alpha)}
    if len(kinds) != 1 or next(iter(kinds))[0] not in ("entmax", "sparsemax"):
        return False
    ((_, alpha, scores),) = kinds
    with pair.evaluating():
        if pair.learnt is not None:
            pair.learnt.put()
        factors = {}
        for site, _ in rules:
            scale = torch.as_tensor(dict(_now(pair.student))[site.name]).detach().float()
            factors[site.name] = scale.expand(site.num_heads).clone()
        expected, device = pair.expects["student"], next(pair.student.parameters()).device
        images = normalise(torch.stack(list(crops)).to(device), expected.mean, expected.std)
        measure_swap(pair.student, images, factors, alpha, scores).save(folder)
    return True


def usage(loads: str, swap: str) -> str:
    """How a folder is read, in Markdown, for the model card: code that runs as it stands where it can.

    Args:
        loads: as `save_model` gives it.
        swap: as `swap_call` gives it.

    Returns:
        Markdown.

    Example:
        >>> print(usage("selectivit.load_model(FOLDER)", ""))
        ```python
        import selectivit as sv
        <BLANKLINE>
        FOLDER = "."  # where this card lies
        model = sv.load_model(FOLDER)
        ```
    """
    code = ["import selectivit as sv", "", 'FOLDER = "."  # where this card lies']
    words = loads
    if loads == "selectivit.load_model(FOLDER)":
        words, code = "", [*code, "model = sv.load_model(FOLDER)"]
    if swap.startswith("sv."):
        code.append(swap)
    elif swap:
        words += ("; then " if words else "After loading, ") + swap
    block = "\n".join(["```python", *code, "```"]) if len(code) > 3 else ""
    return "\n\n".join(filter(None, [words, block]))


def swap_call(student: nn.Module, calibrated: bool) -> str:
    """How the swap of a student is made anew, for its model card.

    Args:
        student: swapped or not.
        calibrated: whether its factors were saved.

    Returns:
        A line of Python, with `sv` for the library and FOLDER for the student's; words where rules differ by layer;
        empty where there is no swap.

    Example:
        >>> from selectivit.swap.swap import swap_attention
        >>> model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> with swap_attention(model, alpha=1.5):
        ...     swap_call(model, False)
        "sv.swap_attention(model, 'entmax', 1.5, 'qk', [0])"
    """
    rules = swapped_rules(student)
    kinds = {(rule.normalizer, str(rule.alpha), rule.scores) for _, rule in rules}
    if not rules:
        return ""
    if len(kinds) > 1 or any(_per_head(rule.alpha) for _, rule in rules):
        return "swap its attention by the rules that run.json lists"
    places = [place for place, site in enumerate(find_sites(student)[0]) if site.name in {s.name for s, _ in rules}]
    rule = rules[0][1]
    scale = f', scale=sv.Calibration.load(FOLDER + "/{CALIBRATION}")' if calibrated else ""
    return f"sv.swap_attention(model, {rule.normalizer!r}, {float(rule.alpha)}, {rule.scores!r}, {places}{scale})"


def model_card(title: str, facts: Mapping[str, Any], command: str, note: str, made: str = DISTILLED) -> str:
    """Write what a stranger needs to know about the weights.

    Args:
        title: of the model.
        facts: sections' names to what they hold; dictionaries become lists.
        command: that made it.
        note: the author's own words, such as the terms of use; empty leaves a line that says they are missing.
        made: how it came about, in a sentence.

    Returns:
        Markdown, with {use} still to be filled.

    Example:
        >>> print(model_card("tiny", {"teacher": "dinov2-small"}, "selectivit distill …", "CC0").splitlines()[0])
        # tiny
    """
    lines = [f"# {title}", "", made, ""]
    lines += ["## Use", "", "{use}", "", "## Command", "", "```", command, "```", ""]
    for name, held in facts.items():
        lines += [f"## {name}", ""]
        if isinstance(held, Mapping):
            lines += [
                f"- {key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in held.items()
            ]
        else:
            lines.append(str(held))
        lines.append("")
    missing = "Not stated. Weights inherit terms from the teacher and the photos: state them with --card-note."
    return "\n".join(lines) + TERMS + (note or missing) + "\n"


def rewrite_terms(out: Path, note: str) -> None:
    """Put another note at the end of the model cards of a run.

    Args:
        out: the run's folder, with the students "final" and "best".
        note: the author's own words.

    Raises:
        WriteError: no space, no permission.
        ValueError: a card that has lost its heading of the terms, so that the note has no place.
    """
    for path in (out / "final" / CARD, out / "best" / CARD):
        if path.is_file():
            before, heading, _ = path.read_text(encoding="utf-8").partition(TERMS)
            if not heading:
                raise ValueError(f"{path} has no heading '## Terms': write the note into it by hand")
            write_atomic(path, (before + TERMS + note + "\n").encode())


def _now(student: nn.Module) -> list[tuple[str, Any]]:
    return [(site.name, rule.scale) for site, rule in swapped_rules(student)]


def _per_head(alpha: Any) -> bool:
    return isinstance(alpha, Tensor) and alpha.numel() > 1


def _place(scratch: Path, folder: Path) -> None:
    usual = scratch / "usual"
    usual.touch()  # with the permissions that files here get; safetensors writes for its writer alone
    mode = usual.stat().st_mode
    usual.unlink()
    for source in sorted(scratch.rglob("*")):
        if source.is_file():
            target = folder / source.relative_to(scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as file:
                os.fsync(file.fileno())
            source.chmod(mode)
            os.replace(source, target)
