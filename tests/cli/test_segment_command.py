"""`selectivit segment`: what it writes, what it keeps, and what it does with bad input."""

import errno
import json
import os

import numpy as np
import pytest
from PIL import Image

from conftest import write_photo
from selectivit.cli import segmentation
from selectivit.data import writing


@pytest.fixture
def segment(run, tiny_clip, tmp_path):
    def call(*paths, out=tmp_path / "out", labels="road,car|truck,sky", **options):
        more = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
        more += [] if labels is None else ["--labels", labels]
        status, text, err = run("segment", *paths, "--model", tiny_clip, "--out", out, "--size", 32, *more)
        index = out / "segment.json"
        lines = [line for line in err.splitlines() if "it/s]" not in line]  # the host's own bars
        return status, text, "\n".join(lines), json.loads(index.read_text()) if index.is_file() else None

    return call


def states(index):
    return {entry["record"]: entry["state"] for entry in index["photos"]}


def test_every_photo_gets_its_three_files(segment, photos, tmp_path):
    status, text, err, index = segment(photos, templates="photo")
    assert (status, err) == (0, "") and "5 done (0 kept), 0 skipped" in text
    assert list(states(index)) == [f"{name}.segment.json" for name in ("a", "b", "c", "sub/a", "sub/d")]
    for entry in index["photos"]:
        record = json.loads((tmp_path / "out" / entry["record"]).read_text())
        assert record["settings"] == index["settings"] and record["entry"]["classes"] == entry["classes"]
        with Image.open(tmp_path / "out" / entry["index_map"]) as picture:
            assert picture.mode == "P" and picture.size == tuple(reversed(entry["image_size"]))
            pixels, colours = np.array(picture), picture.getpalette()
        assert [row["name"] for row in entry["classes"]] == ["road", "car", "sky"]
        for row in entry["classes"]:
            assert (pixels == row["index"]).sum() == row["pixels"]
            assert row["share"] == row["pixels"] / pixels.size
            assert colours[3 * row["index"] : 3 * row["index"] + 3] == row["colour"]
            assert 0 <= row["mean_score"] <= row["max_score"] <= 1
        with Image.open(tmp_path / "out" / entry["overlay"]) as picture:
            assert picture.width > picture.height
    assert not [p for p in (tmp_path / "out").rglob("*") if p.name.startswith(".")]


def test_the_indices_are_those_of_the_library(segment, photos, tiny_clip, tmp_path):
    from dataclasses import replace

    import selectivit as sv
    from selectivit.openvocab.presets import PRESETS

    segment(photos / "b.png", preset="sclip", background="wall,photo", threshold=0.2, refine="true", templates="none")
    preset = replace(PRESETS["sclip"], size=32)
    options = {"background": ["wall", "photo"], "threshold": 0.2, "refine": True, "templates": "none"}
    segmenter = sv.OpenVocabularySegmenter(tiny_clip, ["road", "car|truck", "sky"], preset, **options)
    want = segmenter(photos / "b.png")
    with Image.open(tmp_path / "out" / "b.index.png") as picture:
        assert (np.array(picture) == want.index_map.numpy()).all()
    record = json.loads((tmp_path / "out" / "b.segment.json").read_text())
    assert record["settings"]["classes"] == [["wall", "photo"], ["road"], ["car", "truck"], ["sky"]]
    assert record["entry"]["classes"][0]["name"] == "background"


def test_labels_from_a_file_and_background_below_a_threshold(segment, photos, tmp_path):
    (tmp_path / "labels.txt").write_text("road\n\n猫\ncar|truck\n", encoding="utf-8-sig")
    status, _, _, index = segment(
        photos / "a.jpg", labels=None, labels_file=tmp_path / "labels.txt", background="below", templates="none"
    )
    assert status == 0 and index["settings"]["threshold"] == 0.75
    assert [row["name"] for row in index["photos"][0]["classes"]] == ["background", "road", "猫", "car"]


def test_a_second_run_keeps_everything(segment, photos, tmp_path, monkeypatch):
    first = segment(photos)[3]
    monkeypatch.setattr(segmentation, "save_segmentation", lambda *_: pytest.fail("computed again"))
    status, text, _, second = segment(photos)
    assert status == 0 and "5 kept" in text
    assert [{**e, "state": ""} for e in first["photos"]] == [{**e, "state": ""} for e in second["photos"]]


@pytest.mark.parametrize("change", ["source", "labels", "preset", "damage", "picture gone"])
def test_what_has_changed_is_computed_again(segment, photos, tmp_path, change):
    segment(photos)
    out, options = tmp_path / "out", {}
    if change == "source":
        write_photo(photos / "a.jpg", size=(40, 40), seed=99)
    elif change == "labels":
        options = {"labels": "road,sky"}
    elif change == "preset":
        options = {"preset": "sclip"}
    elif change == "damage":
        (out / "a.segment.json").write_text("{")
    else:
        (out / "a.index.png").unlink()
    found = states(segment(photos, **options)[3])
    assert found["a.segment.json"] == "written"
    assert all((state == "written") == bool(options) for name, state in found.items() if name != "a.segment.json")
    assert (out / "a.index.png").is_file()


def test_writing_into_the_folder_that_is_read_loses_no_photo(segment, photos):
    content = {p: p.read_bytes() for p in photos.rglob("*.*")}
    assert segment(photos, out=photos)[0] == 0
    assert {p: p.read_bytes() for p in content} == content
    status, text, _, index = segment(photos, out=photos)  # its own pictures are not taken for photos
    assert status == 0 and "5 done (5 kept)" in text and len(index["photos"]) == 5


def test_photos_of_one_name_in_one_folder_are_kept_apart(segment, photos, tmp_path):
    other = write_photo(tmp_path / "other" / "a.jpg", seed=7)
    segment(photos / "a.jpg")
    index = segment(other)[3]
    assert list(states(index)) == ["a.segment.json", "a~2.segment.json"]
    assert states(index)["a.segment.json"] == "earlier"


# ---- bad input


def test_bad_photos_are_named_and_skipped(segment, photos):
    (photos / "text.jpg").write_text("no photo")
    (photos / "empty.png").write_bytes(b"")
    status, text, err, index = segment(photos, "missing.jpg")
    assert status == 1 and "5 done (0 kept), 3 skipped" in text
    for name in ("text.jpg", "empty.png", "missing.jpg"):
        assert sum(name in line for line in err.splitlines()) == 1
        assert sum(name in entry["reason"] for entry in index["skipped"]) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"labels": None}, "expected classes by --labels"),
        ({"labels": "road,,car"}, "expected labels such as"),
        ({"labels": "road,road"}, "more than once"),
        ({"labels": "road,dog,bird"}, "cannot tell 'dog' from 'bird'"),
        ({"labels_file": "x.txt"}, "one of the two"),
        ({"labels": None, "labels_file": "no.txt"}, "no.txt"),
        ({"preset": "entmax"}, "did you mean 'entmax-"),
        ({"preset": "gem", "background": "below"}, "no threshold"),
        ({"templates": "many"}, "unknown templates"),
        ({"threshold": 3}, "probability"),
    ],
)
def test_bad_options_exit_2(segment, photos, options, text):
    status, out, err, index = segment(photos, **options)
    assert status == 2 and out == "" and index is None
    assert text in err


def test_models_without_texts_are_refused(run, photos, tiny_model, tmp_path):
    status, _, err = run("segment", photos, "--labels", "a,b", "--model", tiny_model, "--out", tmp_path / "o")
    assert status == 2 and "error" in err
    status, _, err = run("segment", photos, "--labels", "a,b", "--model", "dinov2-small", "--out", tmp_path / "o")
    assert status == 2 and "no model of images and texts" in err


def test_a_full_disk_stops_the_work(segment, photos, monkeypatch):
    count, replace = [], os.replace

    def full(source, target):
        count.append(target)
        if len(count) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(writing.os, "replace", full)
    status, text, err, index = segment(photos)
    assert status == 1 and "stopped" in err and "1 done" in text
    assert "free some space" in index["stopped"]


def test_a_photo_too_large_for_memory_is_skipped(segment, photos, monkeypatch):
    from selectivit.openvocab.segmenter import OpenVocabularySegmenter

    whole = OpenVocabularySegmenter.__call__

    def small(self, image, **options):
        if image.size == (48, 32):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return whole(self, image, **options)

    monkeypatch.setattr(OpenVocabularySegmenter, "__call__", small)
    status, text, _, index = segment(photos)
    assert status == 1 and "3 done (0 kept), 2 skipped" in text
    assert all("not enough memory" in entry["reason"] for entry in index["skipped"])
