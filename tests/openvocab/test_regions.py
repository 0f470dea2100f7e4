"""FG-OVD: its files, pooling over boxes, ranks, and both protocols."""

from __future__ import annotations

import json
import os
from pathlib import Path

import clips
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

import selectivit as sv
from selectivit.openvocab.dense import dense_tokens
from selectivit.openvocab.pooling import pooled
from selectivit.openvocab.region_ranking import rank_of_first, rank_regions
from selectivit.openvocab.regions import (
    Region,
    RegionRanks,
    chance,
    mean_hard_medium_easy,
    read_regions,
    subset_name,
)

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("SELECTIVIT_SHARED", ROOT / ".." / "shared")) / "data"

FILE = {
    "images": [{"id": 5, "file_name": "val2017/a.png", "width": 64, "height": 48}],
    "categories": [
        {"id": 1, "name": "A red cup."},
        {"id": 2, "name": "A blue cup."},
        {"id": 3, "name": "A glass cup."},
    ],
    "annotations": [
        {"id": 9, "image_id": 5, "bbox": [8, 4, 30, 20.5], "category_id": 2, "neg_category_ids": [1, 3]},
        {"id": 11, "image_id": 5, "bbox": [0, 0, 64, 48], "category_id": 3, "neg_category_ids": [1]},
    ],
}


@pytest.fixture
def folder(tmp_path):
    pixels = torch.randint(0, 256, (6, 8, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    Image.fromarray(pixels.numpy()).resize((64, 48), Image.Resampling.BICUBIC).save(tmp_path / "a.png")
    (tmp_path / "regions.json").write_text(json.dumps(FILE))
    return tmp_path


def test_files_are_read(folder):
    first, second = read_regions(folder / "regions.json")
    assert first == Region(
        9, "val2017/a.png", (8, 4, 30, 20.5), ("A blue cup.", "A red cup.", "A glass cup."), (64, 48)
    )
    assert second.captions == ("A glass cup.", "A red cup.")


def change(**parts):
    return FILE | parts


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "no annotation file"),
        (json.dumps([1]), "no annotation file"),
        (json.dumps(change(categories=FILE["categories"][:1])), "is missing"),
        (json.dumps(change(images=[])), "is missing"),
        (json.dumps({"images": []}), "'categories' is missing"),
        (json.dumps(change(annotations=[FILE["annotations"][0] | {"bbox": [1, 1, 0, 3]}])), "empty box"),
        (json.dumps(change(annotations=[])), "holds no regions"),
        (json.dumps(change(annotations=[FILE["annotations"][0]] * 2)), "bear one number"),
        (json.dumps(change(annotations=[FILE["annotations"][0] | {"neg_category_ids": [2]}])), "among the negatives"),
    ],
)
def test_bad_files(tmp_path, content, text):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_regions(tmp_path / "x.json")


@pytest.mark.parametrize(("name", "count", "negatives"), [("3_attributes", 1299, 10), ("pattern", 467, 7)])
def test_the_official_files(name, count, negatives):
    path = SHARED / "fgovd" / f"{name}.json"
    if not path.is_file():
        pytest.skip("the official files are not here")
    found = read_regions(path)
    assert len(found) == count
    counts = [len(region.captions) - 1 for region in found]
    assert max(set(counts), key=counts.count) == negatives


@given(
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    place=st.tuples(*[st.floats(0.0, 0.9)] * 2),
    size=st.tuples(*[st.floats(0.02, 1.0)] * 2),
)
def test_pooling_is_torchvisions_roi_align(h, w, place, size):
    from torchvision.ops import roi_align

    values = torch.randn(3, h, w)
    left, top = place[0] * w, place[1] * h
    wide, tall = min(size[0] * w, w - left), min(size[1] * h, h - top)
    box = torch.tensor([[0, left, top, left + wide, top + tall]])
    want = roi_align(values[None], box, (1, 1), aligned=True).flatten(1)
    torch.testing.assert_close(pooled(values, torch.tensor([[left, top, wide, tall]])), want, atol=1e-4, rtol=1e-4)


def test_ties_count_against_the_right_caption():
    assert rank_of_first(torch.tensor([0.5, 0.4, 0.3])) == 1
    assert rank_of_first(torch.tensor([0.5, 0.5, 0.6])) == 3
    assert rank_of_first(torch.tensor([float("nan"), 0.5, 0.6])) == 3
    found = RegionRanks({1: 1, 2: 1, 3: 4, 4: 6}, {}).summary()
    assert found == {"top1": 0.5, "mean_rank": 3.0, "median_rank": 2.5}
    with pytest.raises(ValueError, match="no region"):
        RegionRanks({}, {"a": "gone"}).summary()


@pytest.mark.parametrize("protocol", ["roialign", "crop"])
@pytest.mark.parametrize("name", ["open_clip CLIP", "timm SigLIP", "transformers SigLIP 2", "transformers CLIP"])
def test_both_protocols_against_their_steps(folder, protocol, name):
    from torchvision.ops import roi_align

    model = clips.CLIPS[name]()
    words = ["A", "red", "blue", "glass", "cup", "."]
    tokenizer = clips.transformers_tokenizer(words) if name.startswith("transformers") else clips.WordTokenizer()
    regions = read_regions(folder / "regions.json")
    found = rank_regions((model, tokenizer), regions, folder, "naclip", protocol=protocol, size=32)
    expected, picture = sv.preprocessing(model), Image.open(folder / "a.png")

    def squash(image):
        resized = image.resize((32, 32), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).float() / 255
        return ((pixels - torch.tensor(expected.mean)) / torch.tensor(expected.std)).permute(2, 0, 1)[None]

    for region in regions:
        left, top, wide, tall = region.box
        with torch.no_grad():
            if protocol == "roialign":
                dense = dense_tokens(model, squash(picture), "naclip").map
                box = torch.tensor([[0, left / 16, top / 12, (left + wide) / 16, (top + tall) / 12]])
                feature = roi_align(dense, box, (1, 1), aligned=True).flatten()
            else:
                crop = picture.crop((int(left), int(top), round(left + wide), round(top + tall)))
                feature = clips.encode_image(model, squash(crop))[0]
            from selectivit.openvocab.prompts import text_features

            scores = text_features(model, tokenizer, region.captions, ("{}",)) @ F.normalize(feature, dim=0)
        assert found.ranks[region.number] == 1 + int((scores[1:] >= scores[0]).sum())
    assert not found.missing


def test_missing_photos_are_named(folder):
    clip = clips.open_clip_vit(), clips.WordTokenizer()
    (folder / "b.png").write_text("no photo")
    more = [Region(1, "gone.jpg", (0, 0, 3, 3), ("a", "b")), Region(2, "b.png", (0, 0, 3, 3), ("a", "b"))]
    found = rank_regions(clip, [*read_regions(folder / "regions.json"), *more], folder, size=32)
    assert set(found.ranks) == {9, 11} and set(found.missing) == {"gone.jpg", "b.png"}
    assert "does not exist" in found.missing["gone.jpg"]
    with pytest.raises(ValueError, match="protocol"):
        rank_regions(clip, more, folder, protocol="box")


def test_captions_that_are_cut_to_the_same_tie(folder):
    """Two captions that differ behind the tokenizer's last place are one to the model: the right one comes last."""
    clip = clips.open_clip_vit(), clips.WordTokenizer()
    long = " ".join(f"w{i}" for i in range(30))
    found = rank_regions(clip, [Region(1, "a.png", (0, 0, 64, 48), (f"{long} red", f"{long} blue"))], folder, size=32)
    assert found.ranks == {1: 2}


def test_a_photo_of_another_size_is_refused(folder):
    """A photo that was scaled would give features of other places without a word."""
    Image.open(folder / "a.png").resize((32, 24)).save(folder / "a.png")
    found = rank_regions((clips.open_clip_vit(), clips.WordTokenizer()), read_regions(folder / "regions.json"), folder)
    assert not found.ranks and "32 x 24 px and its boxes were drawn on 64 x 48" in found.missing["val2017/a.png"]


def test_the_benchmark_s_names_and_mean():
    assert [subset_name(f"x/{name}.json") for name in ("1_attributes", "shuffle_negatives", "mine")] == [
        "hard",
        "trivial",
        "mine",
    ]
    assert mean_hard_medium_easy({"hard": 0.1, "easy": 0.3}) is None
    assert mean_hard_medium_easy({"hard": 0.1, "medium": 0.2, "easy": 0.6, "trivial": 1.0}) == pytest.approx(0.3)
    assert chance([Region(1, "", (0, 0, 1, 1), ("a", "b")), Region(2, "", (0, 0, 1, 1), tuple("abcd"))]) == 0.375
