"""Compare the budgets of a core-periphery model: how close it comes to its teacher on photos, and what that costs.

Writes budget.json and budget.png, and says which budget to take under a limit of time or of FLOPs.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from selectivit.cli.options import add_options, option, parse_numbers, pick_device, take
from selectivit.cli.progress import working
from selectivit.data.writing import check_writable, write_atomic, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from selectivit.eval.budget import BudgetPoint
    from selectivit.models.veca import Veca
    from selectivit.train.pair import Pair

HELP = "compare the budgets of a core-periphery model: closeness to its teacher against cost"


@dataclass(frozen=True)
class BudgetOptions:
    """What is compared, and where it is written."""

    teacher: str = option("dinov2-small", "NAME", "the model it was distilled from, or a local folder")
    out: str = option("out", "FOLDER", "folder for the results, made if it is not there")
    device: str = option(
        "auto", "DEVICE", "cpu, cuda, cuda:1 or mps; auto is a CUDA card if there is one, else the CPU"
    )
    budgets: str | None = option(None, "N,N,…", "numbers of cores; default: 1, 2, 4, … up to all")
    max_ms: float | None = option(None, "MS", "limit on the time of a forward of one photo, milliseconds")
    max_gflops: float | None = option(None, "GFLOPS", "limit on the GFLOPs of one photo")
    size: int | None = option(None, "PX", "side of the photos' middle crop; default: the model's own size")
    photos: int = option(64, "N", "photos that are compared at most")
    batch_size: int = option(8, "N", "photos that are compared at once")
    repeats: int = option(9, "N", "forwards whose median time is taken, in turns with the other budgets")
    precision: str = option("auto", "NAME", "bf16, float32, or auto: bf16 where the device computes in it")
    grid: str = option("refuse", "HOW", "a teacher's grid that differs from the student's: refuse or interpolate")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options.

    Args:
        parser: the command's parser.
    """
    parser.add_argument("model", type=str, help="core-periphery model: a folder, such as one that distill wrote")
    parser.add_argument(
        "paths", nargs="+", type=str, help="photos, folders, lists (.txt), tar shards (.tar), saved datasets"
    )
    add_options(parser, BudgetOptions)


def run(options: Namespace) -> int:
    """Compare, write, and say what to take.

    Args:
        options: the parsed options.

    Returns:
        The exit status: 0 all done; 1 some photos were skipped, or no budget keeps the limit.

    Raises:
        ValueError: a model without cores, budgets outside its bank, no photo that can be read.
        WriteError: the folder cannot be written to.
    """
    what, out = take(BudgetOptions, options), Path(options.out)
    for name, limit in (("--max-ms", what.max_ms), ("--max-gflops", what.max_gflops)):
        if limit is not None and not limit > 0:
            raise ValueError(f"expected {name} above 0, got {limit}")
    check_writable(out)
    pair, device = _pair(options.model, what)
    size = what.size or pair.expects["student"].image_size[0]
    side = pair.expects["student"].patch_size
    size = max(1, round(size / side)) * side
    crops, skipped = _crops(options.paths, size, what.photos)
    with working("comparing budgets"):
        points, teacher_ms = _measure(pair, crops, size, what, device)
    return _report(options.model, what, size, len(crops), points, teacher_ms, skipped, out)


def _pair(name: str, what: BudgetOptions) -> tuple[Pair, torch.device]:
    from safetensors.torch import load_file

    from selectivit.features import preprocessing
    from selectivit.models.veca import Veca
    from selectivit.models.weights import load_model
    from selectivit.train.export import HEAD
    from selectivit.train.pair import Pair

    device = pick_device(what.device)
    student = load_model(name)
    if not isinstance(student, Veca):
        raise ValueError(f"{name} is a {type(student).__name__} without cores: a budget needs a core-periphery model")
    size = what.size or preprocessing(student).image_size[0]
    pair = Pair(student, load_model(what.teacher), sizes=[size], grid=what.grid)
    if list(pair.head.parameters()):
        head = Path(name) / HEAD
        if not head.is_file():
            raise ValueError(
                f"{name} gives {student.config.out_dim or student.config.dim} features and {what.teacher} others: give "
                "the teacher it was distilled from"
            )
        pair.head.load_state_dict(load_file(head))
    pair.teacher.to(device)
    return pair.eval().to(device), device


def _crops(paths: list[str], size: int, at_most: int) -> tuple[list[Tensor], dict[str, str]]:
    from selectivit.data.photos import open_photos
    from selectivit.data.training_images import centre_crops

    found, problems = open_photos(paths)
    crops, unreadable = centre_crops(found, range(len(found)), size, at_most)
    if not crops:
        raise ValueError(f"no photo that can be read among {len(found)}: expected photos, or folders that hold some")
    return crops, {**dict.fromkeys(problems, "not found"), **dict(unreadable)}


def _budgets(text: str | None, num_cores: int) -> list[int]:
    if text is None:
        powers = [2**i for i in range(num_cores.bit_length()) if 2**i < num_cores]
        return [*powers, num_cores]
    budgets = parse_numbers("--budgets 8,16,64", text)
    if budgets[0] < 1 or budgets[-1] > num_cores:
        raise ValueError(f"expected --budgets of 1 to {num_cores} cores, got {text!r}")
    return budgets


def _measure(
    pair: Pair, crops: list[Tensor], size: int, what: BudgetOptions, device: torch.device
) -> tuple[list[BudgetPoint], float]:
    import torch

    from selectivit.eval.budget import BudgetPoint, median_times
    from selectivit.eval.cost import veca_cost
    from selectivit.train.agreement import Agreement, means
    from selectivit.train.precision import resolve_precision

    low = resolve_precision(what.precision, str(device)) == "bf16"

    def precision() -> Any:
        return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()

    student: Veca = pair.student  # pyright: ignore[reportAssignmentType]
    budgets = _budgets(what.budgets, student.config.num_cores)
    agreement, image = Agreement(crops, what.batch_size), crops[0][None].to(device)
    agreed = [means(agreement.sums(pair, device, budget, precision)) for budget in budgets]
    with torch.inference_mode(), precision():
        forwards = [partial(pair.study, image, budget) for budget in budgets]
        *times, teacher_ms = median_times([*forwards, partial(pair.teach, image)], what.repeats)
    costs = [veca_cost(student.config, (size, size), budget).flops / 1e9 for budget in budgets]
    points = [
        BudgetPoint(budget, found["patch_cosine"], found["global_cosine"], cost, ms)
        for budget, found, cost, ms in zip(budgets, agreed, costs, times, strict=True)
    ]
    return points, teacher_ms


def _report(
    model: str,
    what: BudgetOptions,
    size: int,
    count: int,
    points: list[BudgetPoint],
    teacher_ms: float,
    skipped: dict[str, str],
    out: Path,
) -> int:
    import torch

    from selectivit.eval.budget import recommend
    from selectivit.vis.budget import budget_picture

    chosen = recommend(points, max_ms=what.max_ms, max_gflops=what.max_gflops)
    content = {
        "settings": {"model": model, **asdict(what), "size": size, "threads": torch.get_num_threads()},
        "photos": count,
        "budgets": [asdict(point) for point in points],
        "teacher_ms": teacher_ms,
        "recommended": None if chosen is None else chosen.num_cores,
        "skipped": [{"source": name, "reason": reason} for name, reason in skipped.items()],
    }
    write_json(out / "budget.json", content)
    titles = {"time of a forward (ms)": ("ms", what.max_ms), "GFLOPs a photo": ("gflops", what.max_gflops)}
    costs = {title: [getattr(point, name) for point in points] for title, (name, _) in titles.items()}
    limits = {title: limit for title, (_, limit) in titles.items() if limit is not None}
    budgets, quality = [point.num_cores for point in points], [point.patch_cosine for point in points]
    about = f"{Path(model).name} beside {what.teacher}, {count} photos at {size} px"
    recommended = None if chosen is None else chosen.num_cores
    picture = budget_picture(budgets, quality, costs, limits, recommended, about)
    write_atomic(out / "budget.png", picture)
    print("cores  patch cosine  global cosine  GFLOPs        ms")
    for p in points:
        print(f"{p.num_cores:5}  {p.patch_cosine:12.4f}  {p.global_cosine:13.4f}  {p.gflops:6.2f}  {p.ms:8.2f}")
    print(f"teacher: {teacher_ms:.2f} ms")
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if chosen is None:
        cheapest = min(points, key=lambda p: (p.gflops, p.ms))
        text = f"the cheapest, {cheapest.num_cores} cores, takes {cheapest.ms:.2f} ms and {cheapest.gflops:.2f} GFLOPs"
        print(f"no budget keeps the limit: {text}", file=sys.stderr)
    else:
        print(f"recommended: {chosen.num_cores} cores")
    print(out / "budget.json", out / "budget.png", sep="\n")
    return 1 if skipped or chosen is None else 0
