"""What `selectivit segment-eval` costs per picture beyond the tower and upsampling.

    python benchmarks/segment_eval_overhead.py DATA [--arch ViT-B-16] [--images 8] [--rounds 5] [--threads 1]

A plain loop over pictures that lie prepared in memory (dense tokens, cosines with the words, bilinear upsampling to the
label's size, argmax) against the command's own loop over the same pictures, which also reads pictures and masks,
prepares them, counts and saves. Both in turn in every round, in one process. The weights are random: they change no
time. A third and a fourth row say what reading and preparing alone take. On the CPU seconds of the processor count, so
that what else the machine does counts little; on a card seconds of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import open_clip
import torch
from measuring import machine, write
from torch.nn import functional as F

from selectivit.cli.ranks import Ranks
from selectivit.cli.segment_eval_job import ScoringJob
from selectivit.cli.segment_eval_parts import part_file, resume, save_part
from selectivit.data.pictures import as_picture
from selectivit.data.segmentation import SegmentationData, open_segmentation
from selectivit.openvocab.dense import dense_tokens
from selectivit.openvocab.evaluate import count_confusion, segmenter_for
from selectivit.openvocab.prompts import text_features
from selectivit.openvocab.segmenter import OpenVocabularySegmenter


@torch.no_grad()
def plain(segmenter: OpenVocabularySegmenter, texts: torch.Tensor, prepared: list) -> list[torch.Tensor]:
    """The tower, cosines and upsampling, and nothing else; one word a class."""
    found = []
    for pixels, target in prepared:
        tokens = F.normalize(dense_tokens(segmenter.model, pixels[None], segmenter.preset).map.float(), dim=1)
        cosines = torch.einsum("qe,behw->bqhw", texts, tokens)
        found.append(F.interpolate(cosines, target, mode="bilinear").argmax(1)[0].cpu())
    return found


def own(segmenter: OpenVocabularySegmenter, data: SegmentationData, numbers: list[int], folder: Path) -> ScoringJob:
    """What the command does with its share, saving included."""
    settings = {"benchmark": True}
    for left in folder.glob("*"):
        left.unlink()
    part, _ = resume(folder, settings, len(data.classes), Ranks())
    save = partial(save_part, part_file(folder, 0), settings=settings)
    job = ScoringJob(segmenter, data, part, save, lambda line: None)
    job.run(numbers)
    assert not job.skipped
    return job


def in_turn(candidates: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, list]:
    """Seconds of each candidate in every round, after one that counts for nothing."""
    seconds: dict[str, list] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = clock()
            run()
            if number:
                seconds[name].append(clock() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of a data set with masks")
    parser.add_argument("--layout", help="of the data set; default: found out")
    parser.add_argument("--arch", default="ViT-B-16", help="an architecture of open_clip")
    parser.add_argument("--preset", default="entmax-qq", help="one without windows")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/segment_eval_overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    data = open_segmentation(options.data, options.layout)
    model = open_clip.create_model(options.arch, pretrained=None).eval().to(options.device)
    clip = (model, open_clip.get_tokenizer(options.arch))
    segmenter = segmenter_for(clip, data, options.preset, templates="none")
    if segmenter.preset.window is not None or any(len(label.words) != 1 for label in segmenter.labels):
        raise SystemExit("expected a preset without windows and a data set with one word a class")
    texts = text_features(model, clip[1], [label.name for label in segmenter.labels], segmenter.templates)
    numbers = list(range(min(options.images, len(data))))
    read = [(as_picture(data.image(n)), data.mask(n)) for n in numbers]
    prepared = [(segmenter._ready(picture)[0], tuple(mask.shape)) for picture, mask in read]

    with tempfile.TemporaryDirectory() as folder:
        score = partial(own, segmenter, data, numbers, Path(folder))
        want = sum(
            count_confusion(found, mask, len(data.classes))
            for found, (_, mask) in zip(plain(segmenter, texts, prepared), read, strict=True)
        )
        differing = int((score().part.confusion - want).abs().sum())
        clock = time.process_time if options.device == "cpu" else time.perf_counter
        seconds = in_turn(
            {
                "tower and upsampling": partial(plain, segmenter, texts, prepared),
                "segment-eval": score,
                "reading": lambda: [(data.image(n), data.mask(n)) for n in numbers],
                "preparing": lambda: [segmenter._ready(picture) for picture, _ in read],
            },
            options.rounds,
            clock,
        )
    median = {name: statistics.median(values) for name, values in seconds.items()}
    record = {
        "machine": machine(),
        "data": data.name,
        "classes": len(data.classes),
        "arch": options.arch,
        "preset": options.preset,
        "images": len(numbers),
        "pixels_of_the_first": list(prepared[0][0].shape[1:]),
        "device": options.device,
        "seconds": seconds,
        "seconds_per_image": {name: value / len(numbers) for name, value in median.items()},
        "overhead": median["segment-eval"] / median["tower and upsampling"] - 1,
        "entries_of_the_confusion_that_differ": differing,
    }
    for name, value in record["seconds_per_image"].items():
        print(f"{name:<22} {1000 * value:9.1f} ms per image")
    print(f"overhead {100 * record['overhead']:.1f} %, {differing} counts differ")
    write(options.out, record)


if __name__ == "__main__":
    main()
