"""The embedded CLIP of rendered scenes: what it was trained for, end to end, on scenes that it has not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import selectivit as sv
from selectivit.cli.main import main
from selectivit.data.scene_layouts import ATTRIBUTES, CLASSES, SHAPES, draw_layout
from selectivit.data.scene_rendering import render, scene, to_image
from selectivit.models.clip import load_clip
from selectivit.models.names import EMBEDDED, ENTRIES
from selectivit.openvocab.presets import PRESETS
from selectivit.openvocab.prompts import find_templates, text_features

pytest.importorskip("open_clip")
pytest.importorskip("ftfy")


@pytest.fixture(scope="module")
def clip():
    return load_clip("scenes")


def test_open_clip_itself_reads_the_folder(clip):
    import open_clip

    model, _ = open_clip.create_model_from_pretrained(f"local-dir:{EMBEDDED['scenes']}")
    pixels = torch.randn(2, 3, 112, 112)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().encode_image(pixels), clip[0].encode_image(pixels))
    (entry,) = (entry for entry in ENTRIES if entry.name == "scenes")
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.params


def told(clip, layouts, kind, words):
    """Share of the scenes whose own word is the nearest."""
    model, tokenizer = clip
    pixels = torch.from_numpy(np.stack([render(layout).image for layout in layouts])).permute(0, 3, 1, 2) / 255
    expected = sv.preprocessing(model)
    mean, std = (torch.tensor(values)[:, None, None] for values in (expected.mean, expected.std))
    with torch.no_grad():
        seen = F.normalize(model.encode_image((pixels - mean) / std), dim=-1)
    nearest = (seen @ text_features(model, tokenizer, list(words), find_templates("photo")).T).argmax(1)
    hits = [words[n] == getattr(layout.things[0], kind) for n, layout in zip(nearest, layouts, strict=True)]
    return sum(hits) / len(hits)


def test_it_tells_shapes_and_colours_by_words(clip):
    """Chance is 0.1 for both."""
    layouts = [draw_layout(np.random.default_rng([77, i]), (112, 112), (1, 1), (28, 48)) for i in range(100)]
    plain = [
        replace(layout, things=(replace(layout.things[0], pattern="plain", material="matte"),)) for layout in layouts
    ]
    assert told(clip, plain, "shape", SHAPES) > 0.85
    assert told(clip, plain, "color", ATTRIBUTES["color"]) > 0.9


def miou(clip, preset, scenes):
    segmenter = sv.OpenVocabularySegmenter(clip, CLASSES, preset)
    counts = torch.zeros(len(CLASSES), len(CLASSES))
    for made in scenes:
        found = segmenter(to_image(made.image)).index_map.flatten().long()
        right = torch.from_numpy(made.mask).flatten().long()
        counts += torch.bincount(right * len(CLASSES) + found, minlength=len(CLASSES) ** 2).view_as(counts)
    iou = counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag()).clamp_min(1)
    return iou[: len(SHAPES)].mean().item(), iou[len(SHAPES) :].mean().item()


def test_it_segments_scenes_that_it_has_not_seen(clip):
    """Chance is 0.03 or so."""
    scenes = [scene(123, i, size=(112, 144)) for i in range(12)]
    preset = replace(PRESETS["selectivit"], size=112, window=None, stride=None, templates="photo")
    objects, backgrounds = miou(clip, preset, scenes)
    assert backgrounds > 0.45 and objects > 0.1


def test_the_command_segments_with_it(tmp_path, capsys):
    made = scene(123, 0, size=(112, 144))
    to_image(made.image).save(tmp_path / "scene.png")
    labels = ",".join(CLASSES)
    arguments = ["segment", tmp_path / "scene.png", "--model", "scenes", "--labels", labels, "--preset", "selectivit"]
    assert main([*map(str, arguments), "--size", "112", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    with Image.open(tmp_path / "out" / "scene.index.png") as picture:
        found = torch.from_numpy(np.array(picture)).long()
    right = torch.from_numpy(made.mask).long()
    assert found.shape == right.shape
    assert (found == right).float().mean() > 0.3
