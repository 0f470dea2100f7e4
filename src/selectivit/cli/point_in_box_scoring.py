"""The loop of Point-in-Box: which photos count, their batches, and their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selectivit.cli.journal import Journal, key_of
from selectivit.cli.progress import progress
from selectivit.cli.ranks import Ranks
from selectivit.cli.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor, nn

    from selectivit.cli.point_in_box import PointInBoxOptions
    from selectivit.data.boxes import BoxData
    from selectivit.eval.point_in_box import Rules, Score, Target


@dataclass
class Job:
    """Photos with their targets, and what became of the others.

    Args:
        data: pictures and boxes.
        rules: which photos count.
        what: the options.
        left_out: reason -> how many photos do not count.
        skipped: photo -> why it cannot be used.
    """

    data: BoxData
    rules: Rules
    what: PointInBoxOptions
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)

    def load(self, i: int, patch_size: int) -> tuple[Any, Target] | None:
        """The i-th photo and its target; None where it does not count or cannot be used, which is noted."""
        from selectivit.data.images import ImageError
        from selectivit.eval.point_in_box import target

        try:
            image, boxes = self.data.read(i)
        except (ImageError, OSError) as error:
            self.skipped[self.data.name_of(i)] = str(error)
            return None
        found = target(boxes, image.size, self.rules, patch_size)
        if isinstance(found, str):
            self.left_out[found] += 1
            return None
        return image, found


@dataclass(frozen=True)
class Scored:
    """One variant's results.

    Args:
        variant: whose.
        records: photo -> its hits per block, its best patches and the share of patches inside.
        left_out: reason -> photos.
        skipped: photo -> why it cannot be used.
        pictures: photo -> crop (H, W, 3), boxes (n, 4) and the scores of all blocks (blocks, h, w).
    """

    variant: Variant
    records: dict[str, Any]
    left_out: dict[str, int]
    skipped: dict[str, str]
    pictures: dict[str, tuple[Tensor, Tensor, Tensor]]

    def scores(self) -> list[Score]:
        """The metric, block by block."""
        from selectivit.eval.point_in_box import Score

        hits = [record["hits"] for record in self.records.values()]
        return [Score(sum(block), len(hits)) for block in zip(*hits, strict=True)]

    def chance(self) -> float:
        """What patches drawn at random score."""
        return sum(record["chance"] for record in self.records.values()) / len(self.records)


def score(variant: Variant, model: nn.Module, job: Job, ranks: Ranks, *, out: Path, seed: int) -> Scored:
    """Score every photo of this process, and put the processes' results together.

    Args:
        variant: whose model it is.
        model: in eval mode, swapped or not.
        job: the photos; filled with what does not count.
        ranks: the processes.
        out: the folder for the results; records are kept below it.
        seed: of the swap.

    Returns:
        The results, the same in every process.

    Raises:
        ValueError: no photo counts, a crop that is not of whole patches, a model without a class token.
    """
    from selectivit.data.digest import stat_digest
    from selectivit.data.views import View, check_whole_patches
    from selectivit.features import preprocessing

    what, data = job.what, job.data
    check_whole_patches(what.size, preprocessing(model).patch_size)
    view = View("centre", what.size, resize=what.resize)
    root = data.pictures[0].parent
    settings = {
        "kind": "point-in-box",
        "model": variant.identity,
        "data": [data.kind, stat_digest(data.pictures, root), stat_digest(data.sources, root)],
        "rules": {**asdict(job.rules), "labels": sorted(job.rules.labels) if job.rules.labels else None},
        "view": view.record(),
        "tokens": [what.against, what.norm, what.num_cores],
        "seed": seed,
    }
    share = list(ranks.share(range(len(data))))
    records: dict[str, Any] = {}
    pictures: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    with (
        Journal(out / "kept", ranks) as journal,
        progress(f"photos, {variant.label}", len(share), shown=ranks.rank == 0) as tell,
    ):
        worker = _Worker(model, view, job, journal, partial(key_of, settings), records, pictures)
        for i in share:
            worker.take(i)
            tell(None)
        worker.flush()
    parts = ranks.gather((records, dict(job.left_out), job.skipped, pictures))
    left_out = sum((Counter(part[1]) for part in parts), Counter())
    merged = {name: record for part in parts for name, record in part[0].items()}
    ordered = {name: merged[name] for name in data.names if name in merged}
    if not ordered:
        raise ValueError(_nothing(data, left_out, {n: w for part in parts for n, w in part[2].items()}))
    skipped = {name: why for part in parts for name, why in part[2].items()}
    drawn = {name: picture for part in parts for name, picture in part[3].items()}
    first = [name for name in ordered if name in drawn][: what.pictures]
    return Scored(variant, ordered, dict(left_out), skipped, {name: drawn[name] for name in first})


def _nothing(data: BoxData, left_out: Counter[str], skipped: dict[str, str]) -> str:
    reasons = [f"{count} {reason}" for reason, count in left_out.most_common()]
    reasons += [f"{len(skipped)} cannot be used, such as {next(iter(skipped.values()))}"] if skipped else []
    return (
        f"none of the {len(data)} photos of {data.name} counts: {'; '.join(reasons)}. More count with --objects any, "
        "--max-area 1 and other --classes"
    )


class _Worker:
    """Scores photos in batches; those whose records are kept are not computed again, but for pictures."""

    def __init__(
        self,
        model: nn.Module,
        view: Any,
        job: Job,
        journal: Journal,
        key: Callable[[str], str],
        records: dict[str, Any],
        pictures: dict[str, tuple[Tensor, Tensor, Tensor]],
    ):
        from selectivit.features import preprocessing

        self.model, self.view, self.job, self.journal, self.key = model, view, job, journal, key
        self.records, self.pictures = records, pictures
        self.expected = preprocessing(model)
        self.waiting: list[tuple[str, Tensor, Target]] = []
        self.drawn = 0

    def take(self, i: int) -> None:
        """Note a kept record, or let the photo wait for its batch."""
        name = self.job.data.name_of(i)
        record = self.journal.get(self.key(name))
        draws = self.drawn < self.job.what.pictures
        if record is not None and not (draws and "hits" in record):
            if "hits" in record:
                self.records[name] = record
            else:
                self.job.left_out[record["left_out"]] += 1
            return
        before = Counter(self.job.left_out)
        found = self.job.load(i, self.expected.patch_size)
        if found is None:
            for reason in self.job.left_out - before:
                self.journal.add(self.key(name), {"left_out": reason})
            return
        image, target = found
        looks = {"mean": self.expected.mean, "std": self.expected.std, "patch_size": self.expected.patch_size}
        self.drawn += draws
        self.waiting.append((name, self.view(image, i, **looks), target))
        if len(self.waiting) >= self.job.what.batch_size:
            self.flush()

    def flush(self) -> None:
        """Score the photos that wait."""
        if not self.waiting:
            return
        import torch

        images = torch.stack([image for _, image, _ in self.waiting])
        scores = self._scores(images)  # (B, blocks, h, w)
        best = scores.flatten(2).argmax(2)  # (B, blocks)
        for (name, image, target), row, places in zip(self.waiting, scores, best, strict=True):
            hits = target.inside.flatten()[places]
            record = {"hits": hits.int().tolist(), "best": places.tolist(), "chance": round(target.chance, 6)}
            self.records[name] = record
            self.journal.add(self.key(name), record)
            if len(self.pictures) < self.job.what.pictures:
                mean, std = (torch.tensor(x).view(3, 1, 1) for x in (self.expected.mean, self.expected.std))
                self.pictures[name] = ((image * std + mean).permute(1, 2, 0), target.boxes, row)
        self.waiting = []

    def _scores(self, images: Tensor) -> Tensor:
        import torch

        from selectivit.eval.point_in_box import patch_scores
        from selectivit.features import block_features, num_blocks

        what, device = self.job.what, next(self.model.parameters()).device
        with torch.inference_mode():
            blocks = block_features(
                self.model, images.to(device), range(num_blocks(self.model)), norm=what.norm, num_cores=what.num_cores
            )
            return torch.stack([patch_scores(found, what.against).cpu() for found in blocks], 1)
