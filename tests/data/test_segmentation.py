"""Data sets with masks: every layout's ids become the right indices, and what does not fit is explained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from segmentation_folders import SIZE, ade20k, cityscapes, coco, context, indices, own, voc, write_image, write_mask

from selectivit.data.class_lists import ClassListError, standard_classes
from selectivit.data.images import ImageError
from selectivit.data.masks import MaskError, voc_colours
from selectivit.data.segmentation import LayoutError, layout_names, open_segmentation

SHARED = Path(os.environ.get("SELECTIVIT_SHARED", Path(__file__).parents[3] / "shared")) / "data"

# COCO's street sign, hat, shoe, eye glasses, plate, mirror, window, desk, door, blender and hair brush, counted from 0
STUFF_GAPS = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)

CASES = {
    "voc21": (lambda root: voc(root, 21), "background", "tvmonitor"),
    "voc20": (lambda root: voc(root, 20), "aeroplane", "tvmonitor"),
    "context60": (lambda root: context(root, 60), "background", "wood"),
    "context59": (lambda root: context(root, 59), "aeroplane", "wood"),
    "ade20k": (ade20k, "wall", "flag"),
    "coco_object": (lambda root: coco(root, 81, "_instanceTrainIds.png"), "background", "toothbrush"),
    "coco_stuff": (lambda root: coco(root, 171, "_labelTrainIds.png"), "person", "wood"),
    "coco_stuff, own ids": (lambda root: coco(root, 171, ".png", STUFF_GAPS), "person", "wood"),
    "cityscapes": (lambda root: cityscapes(root, "labelTrainIds"), "road", "bicycle"),
    "cityscapes, label ids": (lambda root: cityscapes(root, "labelIds"), "road", "bicycle"),
    "folder": (lambda root: own(root, names={0: "sky", 3: "road", 7: "car"}), "sky", "car"),
    "folder, no names": (own, "0", "4"),
    "folder, no splits": (lambda root: own(root, split=None), "0", "4"),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_become_indices_in_every_layout(case, tmp_path):
    make, first, last = CASES[case]
    truth = make(tmp_path)
    layout = case.split(",")[0]
    data = open_segmentation(tmp_path, layout)
    assert len(data) == 3 and data.layout == layout and data.ignore_index == 255
    assert (data.classes[0], data.classes[-1]) == (first, last)
    assert len(data.words) == len(data.classes) and data.source
    for i, want in enumerate(truth):
        found = data.mask(i)
        assert found.dtype == torch.uint8 and (found.numpy() == want).all()
        assert data.image(i).mode == "RGB" and data.image(i).size == SIZE
    with_background = {"voc20": "voc21", "context59": "context60"}.get(layout, layout)
    assert open_segmentation(tmp_path).layout == with_background  # found out


@pytest.mark.parametrize("below", ["VOCdevkit/VOC2012", "VOC2012"])
def test_a_folder_above_the_data_set_will_do(tmp_path, below):
    voc(tmp_path / below, 21)
    assert len(open_segmentation(tmp_path)) == 3


def test_standard_lists_have_their_sizes_and_words_that_differ():
    from selectivit.openvocab.prompts import parse_labels

    sizes = {"voc": 21, "context": 60, "ade20k": 150, "coco_object": 81, "coco_stuff": 171, "cityscapes": 19}
    for name, size in sizes.items():
        classes = standard_classes(name)
        assert len(classes.names) == len(set(classes.names)) == size
        assert len(parse_labels(["|".join(words) for words in classes.words])) == size  # refuses a word twice
    assert standard_classes("coco_stuff").names[80] == "banner"  # after the 80 things
    assert standard_classes("ade20k").names[12] == "person"


@pytest.mark.parametrize("kind", ["RGB", "sorted palette", "grey"])
def test_vocs_colours_are_read_as_well_as_its_indices(tmp_path, kind):
    truth = voc(tmp_path, 21)
    for i, name in enumerate("abc"):
        path = tmp_path / "SegmentationClass" / f"{name}.png"
        coloured = Image.open(path).convert("RGB")
        if kind == "RGB":
            coloured.save(path)
        elif kind == "grey":
            Image.fromarray(truth[i].astype(np.uint8)).save(path)
        else:  # as a program saves it that sorts the colours
            used, ids = np.unique(np.array(coloured).reshape(-1, 3), axis=0, return_inverse=True)
            image = Image.fromarray(ids.reshape(SIZE[::-1]).astype(np.uint8))
            image.putpalette(used.astype(np.uint8).tobytes())
            image.save(path)
    data = open_segmentation(tmp_path)
    assert all((data.mask(i).numpy() == want).all() for i, want in enumerate(truth))


def test_vocs_colours_are_pascals():
    colours = voc_colours()
    assert colours[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert colours[20].tolist() == [0, 64, 128] and colours[255].tolist() == [224, 224, 192]
    assert len(np.unique(colours, axis=0)) == 256


def test_sixteen_bit_ids_and_names_for_void(tmp_path):
    write_image(tmp_path / "images" / "a.png", 0)
    (tmp_path / "masks").mkdir()
    ids = np.full(SIZE[::-1], 3000, dtype=np.uint16)
    ids[0], ids[1] = 7, 9
    Image.fromarray(ids).save(tmp_path / "masks" / "a.png")
    (tmp_path / "classes.json").write_text(json.dumps({"9": "Unlabeled", "3000": "road", "7": "sky"}))
    data = open_segmentation(tmp_path)
    assert data.classes == ("sky", "road")
    assert data.mask(0)[:3, 0].tolist() == [0, 255, 1]


def test_pictures_without_a_mask_are_left_out_of_ones_own_folder_and_said(tmp_path):
    own(tmp_path)
    write_image(tmp_path / "images" / "val" / "more.png", 5)
    data = open_segmentation(tmp_path)
    assert len(data) == 3 and data.notes == ("1 pictures without a mask are left out",)


# ---- wrong layouts, splits and pairs


def refused(path, *words, layout=None, split="val", error=ValueError):
    with pytest.raises(error) as caught:
        open_segmentation(path, layout, split)
    for word in words:
        assert str(word) in str(caught.value)


def test_folders_that_are_none(tmp_path):
    refused(tmp_path / "no", "is no folder", error=LayoutError)
    refused(tmp_path, "none of the layouts", "leftImg8bit, gtFine", "images, masks", error=LayoutError)
    refused(tmp_path, "not laid out as voc21", "JPEGImages", layout="voc21", error=LayoutError)
    refused(tmp_path, "expected images and masks", layout="folder", error=LayoutError)
    refused(tmp_path, "did you mean 'context59'", *layout_names(), layout="contex59", error=LayoutError)


@pytest.mark.parametrize("case", CASES)
def test_splits_that_are_not_there_are_told_beside_those_that_are(case, tmp_path):
    CASES[case][0](tmp_path)
    there = {"ade20k": "validation", "coco_object": "val2017", "coco_stuff": "val2017"}.get(case.split(",")[0], "val")
    refused(tmp_path, "no split 'test'", there, layout=case.split(",")[0], split="test", error=LayoutError)


def test_two_layouts_in_one_folder_must_be_told_apart(tmp_path):
    coco(tmp_path, 81, "_instanceTrainIds.png")
    coco(tmp_path, 171, "_labelTrainIds.png")
    refused(tmp_path, "more than one layout", "coco_object, coco_stuff", error=LayoutError)
    assert len(open_segmentation(tmp_path, "coco_stuff").classes) == 171


def test_masks_and_pictures_that_do_not_pair(tmp_path):
    own(tmp_path / "a")
    write_mask(tmp_path / "a" / "masks" / "val" / "alone.png", indices(1, 5))
    refused(tmp_path / "a", "1 masks without a picture", "alone", error=LayoutError)
    own(tmp_path / "b")
    for path in list((tmp_path / "b" / "masks" / "val").iterdir()):
        path.rename(path.with_name(f"{path.stem}_mask.png"))
    refused(tmp_path / "b", "no picture has a mask of its name", "a_mask", "called alike", error=LayoutError)
    own(tmp_path / "c")
    write_image(tmp_path / "c" / "images" / "val" / "a.bmp", 1)
    refused(tmp_path / "c", "a.bmp", "a.png", "one name", error=LayoutError)
    ade20k(tmp_path / "d")
    write_image(tmp_path / "d" / "images" / "validation" / "more.jpg", 1)
    refused(tmp_path / "d", "1 pictures without a mask", "more", error=LayoutError)
    voc(tmp_path / "e", 21)
    (tmp_path / "e" / "SegmentationClass" / "b.png").unlink()
    refused(tmp_path / "e", "1 of 3 files", "b.png", error=LayoutError)
    voc(tmp_path / "f", 21)
    (tmp_path / "f" / "ImageSets" / "Segmentation" / "val.txt").write_text("\n")
    refused(tmp_path / "f", "lists nothing", error=LayoutError)


# ---- wrong masks


def all_masks(root: Path, change) -> None:
    for path in root.rglob("*.png"):
        if path.relative_to(root).parts[0] in ("masks", "annotations", "gtFine") or "Class" in path.parent.name:
            change(path)


def shift(by):
    def change(path):
        with Image.open(path) as image:
            ids = np.array(image).astype(int)
        write_mask(path, np.where(ids == 255, 255, ids + by) % 256)

    return change


@pytest.mark.parametrize(
    ("case", "by", "words"),
    [
        ("voc21", 1, ("21", "0…20, 255", "1…20, and 255")),
        ("context60", 1, ("60", "459")),
        ("ade20k", -1, ("255", "shifted down already")),
        ("coco_object", 10, ("90", "0…80, 255")),
        ("coco_stuff", 11, ("181", "0…170, 255", "11 gaps")),
        ("coco_stuff, own ids", -1, ("ids of the other kind",)),
        ("cityscapes", 14, ("*_labelIds.png",)),
        ("cityscapes, label ids", 1, ("34", "0…33")),
        ("folder", 1, ("0, 3, 7, 255", "classes.json")),
    ],
)
def test_ids_of_another_count_are_explained_on_opening(case, by, words, tmp_path):
    CASES[case][0](tmp_path)
    all_masks(tmp_path, shift(by))
    refused(tmp_path, "ids that are on no list", *words, layout=case.split(",")[0], error=MaskError)


def test_one_bad_mask_is_told_when_it_is_read_and_not_before(tmp_path):
    own(tmp_path, names={0: "sky", 1: "road", 2: "car"})
    write_mask(tmp_path / "masks" / "val" / "b.png", np.full(SIZE[::-1], 9))
    data = open_segmentation(tmp_path)
    assert (data.mask(0) != 255).any()
    with pytest.raises(MaskError, match=r"b\.png holds ids that are on no list: 9; expected 0…2, 255"):
        data.mask(1)


def test_masks_of_another_size(tmp_path):
    own(tmp_path)
    all_masks(tmp_path, lambda path: write_mask(path, indices(0, 5)[:4]))
    refused(tmp_path, "12 x 4 pixels", "12 x 8", "expected the same", error=MaskError)
    all_masks(tmp_path, lambda path: write_mask(path, indices(0, 5).T))
    refused(tmp_path, "8 x 12 pixels", "its sides are swapped", error=MaskError)


def test_the_size_of_a_turned_picture_is_the_one_seen(tmp_path):
    own(tmp_path, split=None)
    for path in (tmp_path / "images").iterdir():
        image = Image.open(path).transpose(Image.Transpose.ROTATE_90)
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path.with_suffix(".jpg"), exif=exif)
        path.unlink()
    data = open_segmentation(tmp_path)
    assert data.image(0).size == SIZE and data.mask(0).shape == SIZE[::-1]


def test_masks_that_are_all_void(tmp_path):
    ade20k(tmp_path)
    all_masks(tmp_path, lambda path: write_mask(path, np.zeros(SIZE[::-1])))
    refused(tmp_path, "nothing but void", "1…150", "'other'", error=LayoutError)
    own(tmp_path / "own")
    all_masks(tmp_path / "own", lambda path: write_mask(path, np.full(SIZE[::-1], 255)))
    refused(tmp_path / "own", "nothing but 255", error=LayoutError)


def test_colours_where_ids_are_expected(tmp_path):
    own(tmp_path)
    all_masks(tmp_path, lambda path: write_image(path, 3))
    refused(tmp_path, "holds colours (RGB)", "voc21", error=MaskError)
    voc(tmp_path / "voc", 21)
    all_masks(tmp_path / "voc", lambda path: write_image(path, 3))
    refused(tmp_path / "voc", "stands for no class", error=MaskError)


def test_grey_masks_of_three_channels_are_read(tmp_path):
    truth = own(tmp_path)
    all_masks(tmp_path, lambda path: Image.open(path).convert("RGB").save(path))
    assert (open_segmentation(tmp_path).mask(1).numpy() == truth[1]).all()


def test_lossy_and_damaged_masks(tmp_path):
    own(tmp_path)
    for path in list((tmp_path / "masks" / "val").iterdir()):
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()
    refused(tmp_path, "JPEG, which changes ids", error=MaskError)
    voc(tmp_path / "voc", 21)
    for name in "abc":
        path = tmp_path / "voc" / "SegmentationClass" / f"{name}.png"
        path.write_bytes(path.read_bytes()[:60])
    refused(tmp_path / "voc", "cannot be read as a mask", error=MaskError)
    voc(tmp_path / "image", 21)
    for name in "abc":
        (tmp_path / "image" / "JPEGImages" / f"{name}.jpg").write_text("no photo")
    refused(tmp_path / "image", "not a picture", error=ImageError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("3", "expected ids and names"),
        ('{"a": "sky"}', "expected ids and names"),
        ('{"0": 3}', "expected ids and names"),
        ('["sky", ""]', "expected ids and names"),
        ('{"0": "sky", "1": "Sky"}', "sky came more than once"),
        ('{"0": "void"}', "all of it is void"),
        ('{"-1": "sky"}', "0 to 65535"),
    ],
)
def test_class_lists_that_cannot_be_used(tmp_path, text, words):
    own(tmp_path)
    (tmp_path / "classes.json").write_text(text)
    refused(tmp_path, "classes.json", words, error=ClassListError)


def test_more_classes_than_an_index_can_tell_from_void(tmp_path):
    own(tmp_path)
    (tmp_path / "classes.json").write_text(json.dumps([f"class {i}" for i in range(300)]))
    refused(tmp_path, "300 classes", "at most 254", error=LayoutError)


# ---- real data


@pytest.mark.parametrize(
    ("name", "split", "count", "classes"), [("camvid", "val", 101, 11), ("coco256", "val", 100, 129)]
)
def test_real_folders(name, split, count, classes):
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not here")
    data = open_segmentation(SHARED / name, split=split)
    assert (len(data), len(data.classes), data.layout) == (count, classes, "folder")
    names = json.loads((SHARED / name / "classes.json").read_text())
    for i in range(0, count, 25):
        ids = np.array(Image.open(SHARED / name / "masks" / split / f"{data.name_of(i)}.png"))
        found = data.mask(i).numpy()
        for value in np.unique(ids):
            want = names[str(value)]
            got = np.unique(found[ids == value])
            assert len(got) == 1
            assert (got[0] == 255) if want in ("void", "unlabeled") else (data.classes[got[0]] == want)
