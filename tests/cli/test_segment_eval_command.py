"""`selectivit segment-eval`: what it scores, keeps and takes up again, and what it does with bad data sets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import save_tiny_clip, write_photo
from selectivit.cli import segment_eval_job

NAMES = ("sky", "road", "car", "wall")
SHARED = Path(os.environ.get("SELECTIVIT_SHARED", Path(__file__).parents[3] / "shared")) / "data"


def write_mask(path, size, seed, classes=4):
    ids = np.random.default_rng(seed).integers(0, classes, (size[1], size[0]))
    ids[0] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ids.astype(np.uint8)).save(path)


@pytest.fixture
def data(tmp_path):
    """Five pictures of two sizes with masks of four classes."""
    root = tmp_path / "data"
    for i in range(5):
        size = (48, 32) if i % 2 else (40, 56)
        write_photo(root / "images" / "val" / f"{i}.png", size=size, seed=i)
        write_mask(root / "masks" / "val" / f"{i}.png", size, i)
    (root / "classes.json").write_text(json.dumps(NAMES))
    return root


@pytest.fixture
def evaluate(run, tiny_clip, tmp_path):
    def call(path, *more, out=tmp_path / "out", model=tiny_clip):
        arguments = ("--model", model, "--size", 32, "--templates", "none")
        status, text, err = run("segment-eval", path, "--out", out, *arguments, *more)
        report = out / "segment-eval.json"
        lines = [line for line in err.splitlines() if "it/s]" not in line]  # the host's own bars
        return status, text, "\n".join(lines).strip(), json.loads(report.read_text()) if report.is_file() else None

    return call


def counted(found, mask, classes):
    pairs = [(int(t), int(f)) for t, f in zip(mask.flatten(), found.flatten(), strict=True) if t != 255]
    matrix = np.zeros((classes, classes), dtype=int)
    for pair in pairs:
        matrix[pair] += 1
    return matrix


def test_the_report_holds_what_plain_counting_finds(evaluate, data, tiny_clip, tmp_path):
    from dataclasses import replace

    import selectivit as sv
    from selectivit.openvocab.presets import PRESETS

    status, text, err, report = evaluate(data, "--preset", "sclip")
    assert (status, err) == (0, "")
    segmenter = sv.OpenVocabularySegmenter(tiny_clip, NAMES, replace(PRESETS["sclip"], size=32), templates="none")
    want = np.zeros((4, 4), dtype=int)
    for i in range(5):
        found = segmenter(data / "images" / "val" / f"{i}.png").index_map.numpy()
        want += counted(found, np.array(Image.open(data / "masks" / "val" / f"{i}.png")), 4)
    assert report["confusion"] == want.tolist() and report["pixels"] == want.sum()
    iou = want.diagonal() / (want.sum(0) + want.sum(1) - want.diagonal())
    assert report["miou"] == pytest.approx(iou.mean(), abs=1e-6)
    assert [row["name"] for row in report["classes"]] == list(NAMES)
    for i, row in enumerate(report["classes"]):
        assert row["iou"] == pytest.approx(iou[i], abs=1e-6) and row["pixels"] == want[i].sum()
        assert row["words"] == [NAMES[i]]
        assert re.search(rf"^{NAMES[i]} +{iou[i]:.4f}", text, re.MULTILINE)
    assert f"mIoU {iou.mean():.4f}" in text and "5 done (0 kept), 0 skipped" in text
    settings = report["settings"]
    assert settings["data"] == {"name": "data", "layout": "folder", "split": "val", "pictures": 5}
    assert settings["preset_settings"]["size"] == 32 and settings["words_source"].endswith("classes.json")
    assert report["images"] == 5 and report["skipped"] == [] and report["notes"] == []
    assert not [p for p in (tmp_path / "out").rglob("*") if p.name.startswith(".")]


def test_a_standard_layout_is_scored_with_its_words_background_and_settings(evaluate, tmp_path):
    from selectivit.data.class_lists import standard_classes

    root = tmp_path / "VOC2012"
    for i, name in enumerate(("2007_000001", "2007_000002")):
        write_photo(root / "JPEGImages" / f"{name}.jpg", size=(48, 32), seed=i)
        write_mask(root / "SegmentationClass" / f"{name}.png", (48, 32), i, classes=21)
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("2007_000001\n2007_000002\n")
    known = {part for words in standard_classes("voc").words for word in words for part in word.split()}
    save_tiny_clip(tmp_path / "clip", sorted(known))
    options = ("--preset", "sclip")
    status, _, err, report = evaluate(tmp_path, *options, model=tmp_path / "clip", out=tmp_path / "with")
    assert (status, err) == (0, "") and report["images"] == 2
    assert report["settings"]["data"]["layout"] == "voc21" and report["settings"]["has_background"]
    assert report["settings"]["threshold"] == 0.1 and report["settings"]["preset_settings"]["logit_scale"] == 65
    assert report["classes"][4]["name"] == "boat" and report["classes"][4]["words"] == ["ship"]
    assert "SCLIP" in report["settings"]["words_source"] and report["pixels"] == 2 * 48 * 31
    more = (*options, "--layout", "voc20")
    status, _, _, report = evaluate(tmp_path, *more, model=tmp_path / "clip", out=tmp_path / "without")
    assert status == 0 and len(report["classes"]) == 20 and not report["settings"]["has_background"]
    assert report["pixels"] < 2 * 48 * 31


# ---- going on


def test_a_second_run_takes_over_what_was_counted(evaluate, data, monkeypatch):
    first = evaluate(data, "--limit", 2)
    assert first[0] == 0 and first[3]["images"] == 2
    scored = []
    whole = segment_eval_job.ScoringJob._confusion

    def watched(self, image, mask):
        scored.append(mask)
        return whole(self, image, mask)

    monkeypatch.setattr(segment_eval_job.ScoringJob, "_confusion", watched)
    status, text, _, report = evaluate(data)
    assert status == 0 and "5 done (2 kept)" in text and len(scored) == 3
    again = evaluate(data)
    assert "5 done (5 kept)" in again[1] and len(scored) == 3 and again[3] == report
    fresh = evaluate(data, out=Path("fresh"))[3]
    assert fresh == report and len(scored) == 8
    status, _, err, _ = evaluate(data, "--limit", 2)
    assert status == 2 and "more than --limit 2" in err


def test_an_interruption_loses_nothing_that_was_counted(evaluate, data, monkeypatch):
    whole, count = segment_eval_job.ScoringJob._confusion, []

    def stops(self, image, mask):
        count.append(mask)
        if len(count) == 3:
            raise KeyboardInterrupt
        return whole(self, image, mask)

    monkeypatch.setattr(segment_eval_job.ScoringJob, "_confusion", stops)
    status, _, err, report = evaluate(data)
    assert status == 130 and "interrupted" in err and report is None
    status, text, _, report = evaluate(data)
    assert status == 0 and "5 done (2 kept)" in text and len(count) == 6
    assert report == evaluate(data, out=Path("fresh"))[3]


@pytest.mark.parametrize("change", ["preset", "split of another size", "damage"])
def test_counts_of_other_settings_are_refused(evaluate, data, tmp_path, change):
    evaluate(data)
    more = ()
    if change == "preset":
        more, words = ("--preset", "naclip"), "preset: entmax-qq there, naclip here"
    elif change == "damage":
        (tmp_path / "out" / "segment-eval.parts" / "0.safetensors").write_bytes(b"no tensors")
        words = "0.safetensors is damaged"
    else:
        write_photo(data / "images" / "val" / "3.png", size=(48, 32), seed=77)
        words = "files_sha256"
    status, text, err, _ = evaluate(data, *more)
    assert status == 2 and text == "" and words in err and "remove" in err


def torchrun(environment, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "selectivit.cli.main", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_two_ranks_give_the_numbers_of_one(evaluate, data, tiny_clip, tmp_path, environment):
    (data / "images" / "val" / "2.png").write_text("no photo")
    status, _, _, one = evaluate(data, out=tmp_path / "one")
    assert status == 1 and one["images"] == 4
    evaluate(data, "--limit", 2, out=tmp_path / "two")  # what one process began, two go on with
    arguments = ("--model", tiny_clip, "--size", 32, "--templates", "none", "--out", tmp_path / "two")
    done = torchrun(environment, "segment-eval", data, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("4 done (2 kept), 1 skipped") == 1 and done.stdout.count("mIoU") == 1
    assert json.loads((tmp_path / "two" / "segment-eval.json").read_text()) == one
    assert len(list((tmp_path / "two" / "segment-eval.parts").iterdir())) == 2
    status, text, _, again = evaluate(data, out=tmp_path / "two")  # and one with what two counted
    assert status == 1 and "4 done (4 kept)" in text and again == one


# ---- bad input


def test_bad_pictures_and_masks_are_named_and_skipped(evaluate, data):
    (data / "images" / "val" / "0.png").write_text("no photo")
    write_mask(data / "masks" / "val" / "1.png", (9, 9), 1)
    write_mask(data / "masks" / "val" / "2.png", (40, 56), 1, classes=30)
    status, text, err, report = evaluate(data)
    assert status == 1 and "2 done (0 kept), 3 skipped" in text and report["images"] == 2
    reasons = [entry["reason"] for entry in report["skipped"]]
    assert [entry["name"] for entry in report["skipped"]] == ["0", "1", "2"]
    for reason, words in zip(reasons, ("not a picture", "has 9 x 9 pixels", "on no list"), strict=True):
        assert words in reason and reason in err


def test_odd_masks_are_noted(evaluate, data):
    Image.new("L", (48, 32), 255).save(data / "masks" / "val" / "1.png")
    for i in (0, 2, 3, 4):
        path = data / "masks" / "val" / f"{i}.png"
        ids = np.array(Image.open(path))
        Image.fromarray(np.where(ids == 2, 255, ids).astype(np.uint8)).save(path)
    status, _, err, report = evaluate(data)
    assert status == 0
    assert report["notes"][0] == "1 masks hold nothing but void: 1"
    assert report["notes"][1].startswith("1 classes are in none of these masks: car")
    assert all(f"note: {note}" in err for note in report["notes"])
    assert report["classes"][2]["accuracy"] is None


def test_labels_that_look_shifted_are_told(evaluate, data, tiny_clip):
    """Masks made of the model's own answers, one class on."""
    from dataclasses import replace

    import selectivit as sv
    from selectivit.openvocab.presets import PRESETS

    segmenter = sv.OpenVocabularySegmenter(tiny_clip, NAMES, replace(PRESETS["entmax-qq"], size=32), templates="none")
    for i in range(5):
        found = segmenter(data / "images" / "val" / f"{i}.png").index_map.numpy()
        Image.fromarray(np.where(found == 3, 255, found + 1).astype(np.uint8)).save(data / "masks" / "val" / f"{i}.png")
    report = evaluate(data)[3]
    assert report["miou"] < 0.1 and any("shifted by one" in note and "before" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split", "test"), "no split 'test'"),
        (("--layout", "voc21"), "not laid out as voc21"),
        (("--layout", "vok21"), "did you mean 'voc21'"),
        (("--preset", "entmax"), "did you mean 'entmax-"),
        (("--threshold", "0.4"), "no background class"),
        (("--background", "none"), "expected background both, words, below"),
        (("--limit", "0"), "--limit 1 or more"),
        (("--templates", "many"), "unknown templates"),
        (("--model", "dinov2-small"), "no model of images and texts"),
    ],
)
def test_bad_options_exit_2(evaluate, data, options, words):
    status, text, err, report = evaluate(data, *options)
    assert status == 2 and text == "" and report is None
    assert words in err


def test_folders_without_names_or_scores_exit_2(evaluate, data, tmp_path):
    status, _, err, _ = evaluate(tmp_path / "nothing")
    assert status == 2 and "is no folder" in err
    (data / "classes.json").unlink()
    status, _, err, _ = evaluate(data)
    assert status == 2 and "mere numbers" in err
    (data / "classes.json").write_text(json.dumps(NAMES))
    for path in (data / "images" / "val").iterdir():
        path.write_text("no photo")
    status, _, err, report = evaluate(data)
    assert status == 2 and report is None and "not a picture" in err


def test_a_picture_too_large_for_memory_is_skipped(evaluate, data, monkeypatch):
    whole = segment_eval_job.ScoringJob._confusion

    def small(self, image, mask):
        if image.size == (48, 32):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return whole(self, image, mask)

    monkeypatch.setattr(segment_eval_job.ScoringJob, "_confusion", small)
    status, text, _, report = evaluate(data)
    assert status == 1 and "3 done (0 kept), 2 skipped" in text
    assert all("not enough memory" in entry["reason"] for entry in report["skipped"])


# ---- real data


@pytest.mark.parametrize(("name", "classes"), [("camvid", 11), ("coco256", 129)])
def test_real_data_runs_and_counts_every_labelled_pixel(run, tmp_path, name, classes):
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not here")
    open_clip = pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    torch.manual_seed(0)
    model = open_clip.model.CLIP(16, vision, text)
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "open_clip_config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "clip" / "open_clip_model.safetensors")
    arguments = ("--model", tmp_path / "clip", "--size", 64, "--limit", 4, "--templates", "none")
    status, _, err = run("segment-eval", SHARED / name, "--out", tmp_path / "out", *arguments)
    assert status == 0, err
    report = json.loads((tmp_path / "out" / "segment-eval.json").read_text())
    masks = sorted((SHARED / name / "masks" / "val").iterdir())[:4]
    void = 11 if name == "camvid" else 0
    names = json.loads((SHARED / name / "classes.json").read_text())
    ids = np.concatenate([np.array(Image.open(path)).flatten() for path in masks])
    assert report["pixels"] == (ids != void).sum() and len(report["classes"]) == classes
    counts = {row["name"]: row["pixels"] for row in report["classes"]}
    for value in np.unique(ids[ids != void]):
        assert counts[names[str(value)]] == (ids == value).sum()
