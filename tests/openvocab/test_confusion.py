"""Confusion and mean IoU: pixels counted where a segmenter put them, and masks that do not fit."""

from __future__ import annotations

import clips
import pytest
import torch

from selectivit.openvocab.confusion import class_iou, confusion, mean_iou
from selectivit.openvocab.segmenter import OpenVocabularySegmenter


@pytest.fixture(scope="module")
def segmenter():
    clip = clips.open_clip_vit(), clips.WordTokenizer()
    return OpenVocabularySegmenter(clip, ["road", "car|truck", "sky"], "entmax-qk")


def test_pixels_are_counted_by_their_true_class(segmenter):
    image = torch.randint(0, 256, (3, 40, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = segmenter(image).index_map
    mask = torch.randint(0, 3, (40, 56), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    mask[:7] = 255
    counts = confusion(segmenter, image, mask)
    assert counts.sum() == (mask != 255).sum()
    for true in range(3):
        for taken in range(3):
            assert counts[true, taken] == ((mask == true) & (found == taken)).sum()
    assert len(found.unique()) > 1  # else rows and columns could not be told apart


def test_iou_leaves_out_what_is_nowhere():
    counts = torch.tensor([[4, 1, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]])
    assert class_iou(counts).tolist()[:2] == [pytest.approx(4 / 7), pytest.approx(5 / 6)]
    assert class_iou(counts)[2].isnan() and class_iou(counts)[3] == 0
    assert mean_iou(counts) == pytest.approx((4 / 7 + 5 / 6) / 3)
    assert mean_iou(torch.zeros(2, 2)) != mean_iou(torch.zeros(2, 2))


def test_masks_that_do_not_fit_are_refused(segmenter):
    image = torch.zeros(3, 40, 56, dtype=torch.uint8)
    with pytest.raises(ValueError, match="its mask"):
        confusion(segmenter, image, torch.zeros(56, 40, dtype=torch.uint8))
    with pytest.raises(ValueError, match="holds 3, the classes are 0 to 2"):
        confusion(segmenter, image, torch.full((40, 56), 3, dtype=torch.uint8))
