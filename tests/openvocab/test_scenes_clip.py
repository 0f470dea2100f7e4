"""The small CLIP that comes with the package, end to end and offline: it segments scenes and tells attributes."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
import torch

import selectivit as sv
from selectivit.data.scene_folder import region_file
from selectivit.data.scene_layouts import ATTRIBUTES, BACKGROUNDS, CLASSES
from selectivit.data.scene_rendering import scene, to_image

pytest.importorskip("open_clip")

from selectivit.models.clip import load_clip
from selectivit.models.names import EMBEDDED
from selectivit.openvocab.presets import PRESETS
from selectivit.openvocab.regions import rank_regions, read_regions


@pytest.fixture(scope="module")
def clip():
    return load_clip("scenes")


@pytest.fixture(scope="module")
def scenes():
    return [scene(11, i) for i in range(8)]


def miou(maps, scenes, classes=CLASSES) -> float:
    """Mean IoU over the classes that are there or found."""
    counts = np.zeros((len(CLASSES), len(CLASSES)), np.int64)
    for found, made in zip(maps, scenes, strict=True):
        np.add.at(counts, (made.mask.ravel(), np.asarray(found).ravel()), 1)
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    iou = counts.diagonal() / np.maximum(union, 1)
    return float(np.mean([iou[CLASSES.index(name)] for name in classes if union[CLASSES.index(name)] > 0]))


def segmented(clip, scenes, preset):
    segmenter = sv.OpenVocabularySegmenter(clip, CLASSES, preset, templates="imagenet7")
    return [segmenter(to_image(made.image)).index_map for made in scenes]


def test_it_loads_without_a_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model, tokenizer = load_clip("scenes")
    entry = next(entry for entry in sv.list_models() if entry.name == "scenes")
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.params
    assert torch.equal(sv.load_model("scenes").visual.proj, model.visual.proj)
    assert tokenizer("a photo of a red ball").shape == (1, 32)
    assert sum(file.stat().st_size for file in EMBEDDED["scenes"].iterdir()) < 12e6


def test_words_of_the_scenes_are_whole_tokens(clip):
    for word in (*CLASSES, *(word for words in ATTRIBUTES.values() for word in words)):
        assert len(clip[1].encode(word)) == 1


def test_it_segments_scenes_and_not_by_chance(clip, scenes):
    found = segmented(clip, scenes, "clearclip")
    assert miou(found, scenes) > FLOOR and miou(found, scenes, BACKGROUNDS) > BACKGROUND_FLOOR
    # The same maps under the next class's name are worth nothing.
    assert miou([(maps + 1) % len(CLASSES) for maps in found], scenes) < 0.05


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_segments_scenes(clip, scenes, preset):
    assert miou(segmented(clip, scenes[:3], preset), scenes[:3], BACKGROUNDS) > PRESET_FLOOR


@pytest.mark.parametrize(("kind", "floor"), [("color", COLOR_FLOOR), ("shuffle_negatives", SHUFFLED_FLOOR)])
def test_it_tells_attributes_of_regions(clip, kind, floor, tmp_path):
    made = {f"{i}.png": scene(12, i) for i in range(12)}
    for name, one in made.items():
        to_image(one.image).save(tmp_path / name)
    (tmp_path / "regions.json").write_text(json.dumps(region_file(made, kind, 0)))
    regions = read_regions(tmp_path / "regions.json")
    found = rank_regions(clip, regions, tmp_path, "clearclip", protocol="crop").summary()
    chance = 1 / len(regions[0].captions)
    assert not chance > floor / 3 and found["top1"] > floor
