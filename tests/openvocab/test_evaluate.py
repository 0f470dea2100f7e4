"""Scores on a data set: against plain counting, with the words, background and settings of its list."""

from __future__ import annotations

import json
from dataclasses import replace

import clips
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.class_lists import standard_classes
from selectivit.data.images import ImageError
from selectivit.data.segmentation import MaskError, open_segmentation
from selectivit.openvocab.evaluate import count_confusion, evaluate_segmentation, read_ahead, segmenter_for
from selectivit.openvocab.presets import PRESETS, Preset
from selectivit.openvocab.published import PUBLISHED, preset_for
from selectivit.openvocab.scores import SegmentationScores
from selectivit.openvocab.segmenter import OpenVocabularySegmenter

SMALL = Preset(scores="qq", normalizer="entmax", size=32, logit_scale=20.0, threshold=0.4, templates="none")
SIZES = ((40, 32), (48, 36), (33, 57))


@pytest.fixture(scope="module")
def clip():
    return clips.open_clip_vit(), clips.WordTokenizer()


def make(root, names, seed=0):
    """images/, masks/ and classes.json; pictures of several sizes, some void in each mask."""
    generator = np.random.default_rng(seed)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for i, (width, height) in enumerate(SIZES):
        noise = generator.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(root / "images" / f"{i}.png")
        mask = generator.integers(0, len(names), (height, width))
        mask[:5] = 255
        Image.fromarray(mask.astype(np.uint8)).save(root / "masks" / f"{i}.png")
    (root / "classes.json").write_text(json.dumps(names))
    return open_segmentation(root)


def counted(found, mask, classes):
    matrix = torch.zeros(classes, classes, dtype=torch.long)
    for i in range(classes):
        for j in range(classes):
            matrix[i, j] = int(((mask == i) & (found == j)).sum())
    return matrix


def test_the_scores_are_those_of_plain_counting_over_all_pictures(clip, tmp_path):
    data = make(tmp_path, ["sky", "road", "car", "tree"])
    segmenter = segmenter_for(clip, data, SMALL)
    seen = []
    scores = evaluate_segmentation(segmenter, data, tell=seen.append)
    assert seen == [0, 1, 2]
    want = sum(counted(segmenter(data.image(i)).index_map, data.mask(i), 4) for i in range(3))
    assert (scores.confusion == want).all() and scores.confusion.sum() == sum(w * (h - 5) for w, h in SIZES)
    assert len(set(want.sum(0).tolist()) - {0}) > 1  # the random model finds more than one class
    union = want.sum(0) + want.sum(1) - want.diagonal()
    torch.testing.assert_close(scores.iou, want.diagonal() / union)
    assert scores.miou == pytest.approx(float((want.diagonal() / union).mean()), abs=1e-6)
    assert scores.pixel_accuracy == pytest.approx(float(want.diagonal().sum() / want.sum()))
    assert scores.mean_accuracy == pytest.approx(float((want.diagonal() / want.sum(1)).mean()))
    some = evaluate_segmentation(segmenter, data, numbers=[2, 0])
    assert (some.confusion == want - counted(segmenter(data.image(1)).index_map, data.mask(1), 4)).all()


def test_reading_in_other_processes_changes_nothing(clip, tmp_path):
    data = make(tmp_path, ["sky", "road", "car"])
    here, there = list(read_ahead(data, [2, 0, 1])), list(read_ahead(data, [2, 0, 1], workers=2))
    for (a, image, mask), (b, image2, mask2) in zip(here, there, strict=True):
        assert a == b and image.tobytes() == image2.tobytes() and (mask == mask2).all()


@given(st.integers(2, 6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(0, 1))
def test_confusions_are_plain_counts(classes, height, width, seed, void):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, classes, (height, width), generator=generator, dtype=torch.int32)
    mask = torch.randint(0, classes, (height, width), generator=generator).to(torch.uint8)
    mask[torch.rand(mask.shape, generator=generator) < void] = 255
    assert (count_confusion(found, mask, classes) == counted(found, mask, classes)).all()


def test_the_index_map_alone_is_that_of_the_whole_segmentation(clip, tmp_path):
    data = make(tmp_path, ["sky", "road", "car"])
    for preset in (SMALL, replace(SMALL, window=24, stride=16)):
        segmenter = OpenVocabularySegmenter(clip, ["a", "b|c", "d"], preset, background=True, refine=True)
        assert (segmenter.index_map(data.image(1)) == segmenter(data.image(1)).index_map).all()


# ---- the scores themselves


def test_a_perfect_and_an_empty_segmentation():
    perfect = SegmentationScores(("a", "b", "c"), torch.diag(torch.tensor([5, 7, 0])))
    assert (perfect.miou, perfect.mean_accuracy, perfect.pixel_accuracy) == (1, 1, 1)
    assert perfect.table()[2] == {"name": "c", "iou": None, "accuracy": None, "pixels": 0, "predicted": 0}
    nothing = SegmentationScores(("a", "b"), torch.zeros(2, 2, dtype=torch.long))
    assert np.isnan(nothing.miou) and [row["iou"] for row in nothing.table()] == [None, None]
    with pytest.raises(ValueError, match="3 classes and a matrix"):
        SegmentationScores(("a", "b", "c"), torch.zeros(2, 2))


def test_a_class_found_where_there_is_none_counts_as_0():
    scores = SegmentationScores(("a", "b"), torch.tensor([[3, 1], [0, 0]]))
    assert scores.miou == pytest.approx((3 / 4 + 0) / 2) and scores.mean_accuracy == 0.75


def test_large_counts_do_not_blur():
    scores = SegmentationScores(("a", "b"), torch.tensor([[10**11, 1], [3, 10**11]]))
    assert scores.pixel_accuracy == pytest.approx(1, abs=1e-9) and scores.miou == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_labels_are_told(by):
    names = tuple(map(str, range(8)))
    good = torch.eye(8, dtype=torch.long) * 90 + 1
    assert SegmentationScores(names, good).shift() == 0
    assert SegmentationScores(names, good.roll(by, 1)).shift() == by
    one = torch.zeros(8, 8, dtype=torch.long)
    one[:, 3] = 50  # a model that finds the same everywhere says nothing about labels
    assert SegmentationScores(names, one).shift() == 0
    few = torch.zeros(8, 8, dtype=torch.long)
    few[0, 1] = few[1, 2] = few[2, 3] = 9  # only some classes occur
    assert SegmentationScores(names, few).shift() == 1


# ---- words, background, settings


class Known:
    """Opened data of a standard layout without its files: what `segmenter_for` looks at."""

    def __init__(self, layout, classes):
        self.layout, self.name = layout, layout
        self.classes, self.words = classes.names, classes.words


def test_words_and_background_come_from_the_class_list(clip):
    voc = standard_classes("voc")
    both = segmenter_for(clip, Known("voc21", voc), "sclip")
    assert len(both.labels) == 21 and both.has_background and both.labels[0].words[:2] == ("sky", "wall")
    assert both.labels[4].words == ("ship",) and both.threshold == 0.1
    words = segmenter_for(clip, Known("voc21", voc), "sclip", background="words")
    assert words.threshold is None and words.labels[0].words == both.labels[0].words
    below = segmenter_for(clip, Known("voc21", voc), "sclip", background="below", threshold=0.3)
    assert below.labels[0].words == () and below.threshold == 0.3
    none = segmenter_for(clip, Known("voc20", voc.foreground()), "sclip")
    assert not none.has_background and none.threshold is None and len(none.labels) == 20


def test_what_was_published_for_a_data_set_is_set(clip):
    assert segmenter_for(clip, Known("voc21", standard_classes("voc")), "sclip").preset.logit_scale == 65
    assert segmenter_for(clip, Known("cityscapes", standard_classes("cityscapes")), "maskclip").preset.size == 560
    assert preset_for("clearclip", "context60").threshold == 0.15
    assert preset_for(PRESETS["sclip"], "voc21") is PRESETS["sclip"]
    assert PUBLISHED.keys() <= PRESETS.keys()


def test_background_in_ones_own_folder(clip, tmp_path):
    data = make(tmp_path, ["Background", "road", "car"])
    segmenter = segmenter_for(clip, data, SMALL)
    assert segmenter.has_background and segmenter.threshold == 0.4
    scores = evaluate_segmentation(segmenter, data)
    want = sum(counted(segmenter(data.image(i)).index_map, data.mask(i), 3) for i in range(3))
    assert (scores.confusion == want).all() and scores.confusion[:, 0].sum() > 0


# ---- what is refused


def test_segmenters_of_other_classes(clip, tmp_path):
    data = make(tmp_path, ["sky", "road", "car"])
    with pytest.raises(ValueError, match="masks have 3 classes, without background, the segmenter 2 classes, without"):
        evaluate_segmentation(OpenVocabularySegmenter(clip, ["a", "b"], SMALL), data)
    with pytest.raises(ValueError, match="the segmenter 3 classes, with background"):
        evaluate_segmentation(OpenVocabularySegmenter(clip, ["a", "b"], SMALL, background=True), data)


def test_options_that_do_not_fit(clip, tmp_path):
    data = make(tmp_path / "a", ["sky", "road"])
    with pytest.raises(ValueError, match="no background class"):
        segmenter_for(clip, data, SMALL, threshold=0.5)
    with pytest.raises(ValueError, match="expected background both, words, below, got 'all'"):
        segmenter_for(clip, data, SMALL, background="all")
    (tmp_path / "a" / "classes.json").unlink()
    with pytest.raises(ValueError, match=r"mere numbers.*classes\.json"):
        segmenter_for(clip, open_segmentation(tmp_path / "a"), SMALL)
    with pytest.raises(ValueError, match="no threshold for background"):
        segmenter_for(clip, make(tmp_path / "b", ["background", "road", "car"]), "gem", background="below")


def test_bad_files_stop_a_call(clip, tmp_path):
    data = make(tmp_path, ["sky", "road"])
    segmenter = segmenter_for(clip, data, SMALL)
    Image.new("L", (3, 3)).save(tmp_path / "masks" / "1.png")
    with pytest.raises(MaskError, match=r"1\.png has 3 x 3 pixels"):
        evaluate_segmentation(segmenter, data)
    (tmp_path / "images" / "2.png").write_text("no picture")
    with pytest.raises(ImageError, match="not a picture"):
        evaluate_segmentation(segmenter, data, numbers=[2])
