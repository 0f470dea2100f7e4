"""Boxes from VOC's XML, COCO's JSON and masks, on generated folders; and what does not fit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.boxes import Box, BoxError, boxes_in_crop, open_boxes
from selectivit.data.pairing import LayoutError


def picture(path, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 30)).save(path)


def xml(path, boxes, size=(40, 30)):
    objects = "".join(
        f"<object><name>{label}</name><part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax>"
        f"<ymax>2</ymax></bndbox></part><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax>"
        f"</bndbox></object>"
        for label, a, b, c, d in boxes
    )
    told = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<annotation><filename>{path.stem}.jpg</filename>{told}{objects}</annotation>")


def voc(root, names=("a", "b"), split="val"):
    for name in names:
        picture(root / "JPEGImages" / f"{name}.jpg")
        xml(root / "Annotations" / f"{name}.xml", [("dog", 5, 6, 14, 25)])
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    return root


def coco(root, boxes=((1, [4, 5, 10, 20]),), names=("a.jpg", "b.jpg"), size=(40, 30)):
    for name in names:
        picture(root / "val2017" / name)
    images = [{"id": i + 1, "file_name": n, "width": size[0], "height": size[1]} for i, n in enumerate(names)]
    entries = [{"id": i, "image_id": who, "category_id": 18, "bbox": box} for i, (who, box) in enumerate(boxes)]
    file = root / "annotations" / "instances_val2017.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"images": images, "annotations": entries, "categories": [{"id": 18, "name": "dog"}]}))
    return file


def masks(root, mask, classes=("background", "cat", "dog")):
    picture(root / "images" / "a.jpg", mask.shape[::-1])
    (root / "masks").mkdir()
    Image.fromarray(mask).save(root / "masks" / "a.png")
    (root / "classes.json").write_text(json.dumps(list(classes)))


def test_voc_counts_pixels_from_one_and_its_last_pixel_is_inside(tmp_path):
    data = open_boxes(voc(tmp_path))
    image, boxes = data.read(0)
    assert (data.kind, len(data), data.name_of(1), image.size) == ("xml", 2, "b", (40, 30))
    assert boxes == (Box("dog", 4, 5, 14, 25),)  # and not the box of its head


def test_coco_boxes_are_corner_and_size(tmp_path):
    file = coco(tmp_path, [(1, [4, 5, 10, 20]), (1, [0, 0, 40.4, 30])])
    for given_path in (tmp_path, file):
        data = open_boxes(given_path)
        assert data.kind == "json" and data.read(0)[1] == (Box("dog", 4, 5, 14, 25), Box("dog", 0, 0, 40, 30))
        assert data.read(1)[1] == ()


def test_a_mask_gives_the_box_around_all_pixels_of_a_class(tmp_path):
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[3:7, 10:13] = mask[20, 35] = 2
    mask[0, 0] = 1
    mask[29, 39] = 255
    masks(tmp_path, mask)
    data = open_boxes(tmp_path)
    assert data.kind == "masks"
    assert data.read(0)[1] == (Box("cat", 0, 0, 1, 1), Box("dog", 10, 3, 36, 21))


def test_xml_beside_pictures_needs_no_lists(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "alone.png")
    xml(tmp_path / "a.xml", [("dog", 1, 1, 40, 30)], size=None)
    data = open_boxes(tmp_path)
    assert len(data) == 1 and any("1 pictures without" in note for note in data.notes)
    assert data.read(0)[1] == (Box("dog", 0, 0, 40, 30),)


def test_splits_and_folders_of_pictures_are_chosen(tmp_path):
    voc(tmp_path / "VOCdevkit" / "VOC2012", ("a",))
    assert open_boxes(tmp_path).name_of(0) == "a"
    with pytest.raises(LayoutError, match=r"no split 'test'.*there are: val"):
        open_boxes(tmp_path, split="test")
    file = coco(tmp_path / "coco")
    (tmp_path / "coco" / "val2017").rename(tmp_path / "elsewhere")
    assert len(open_boxes(file, images=tmp_path / "elsewhere")) == 2
    with pytest.raises(LayoutError, match="none of the 2 pictures"):
        open_boxes(file)
    with pytest.raises(LayoutError, match="is no folder"):
        open_boxes(file, images=tmp_path / "nowhere")
    with pytest.raises(LayoutError, match=r"one file annotations/instances_train\*.json"):
        open_boxes(tmp_path / "coco", split="train")


@pytest.mark.parametrize(
    ("box", "told"),
    [
        (("dog", 5, 6, 60, 25), "lies outside its picture of 40 x 30"),
        (("dog", 45, 6, 60, 25), "lies outside"),
        (("dog", -9, 6, 10, 25), "lies outside"),
        (("dog", 14, 6, 5, 25), "has no area"),
        (("dog", "nan", 6, 5, 25), "has no area"),
        (("dog", "wide", 6, 5, 25), "in numbers"),
    ],
)
def test_boxes_outside_and_without_area_are_refused(tmp_path, box, told):
    picture(tmp_path / "a.jpg")
    xml(tmp_path / "a.xml", [box])
    with pytest.raises(BoxError, match=told):
        open_boxes(tmp_path).read(0)


def test_a_rounding_beyond_the_edge_is_cut(tmp_path):
    picture(tmp_path / "a.jpg")
    xml(tmp_path / "a.xml", [("dog", 0, 0, 41, 31)])
    assert open_boxes(tmp_path).read(0)[1] == (Box("dog", 0, 0, 40, 30),)


def test_annotations_of_another_size_are_refused(tmp_path):
    picture(tmp_path / "x" / "a.jpg")
    xml(tmp_path / "x" / "a.xml", [("dog", 1, 1, 5, 5)], size=(80, 60))
    with pytest.raises(BoxError, match=r"for 80 x 60 pixels.*has 40 x 30: take both from one source"):
        open_boxes(tmp_path / "x").read(0)
    file = coco(tmp_path / "coco", size=(30, 40))
    with pytest.raises(BoxError, match="turned by its EXIF"):
        open_boxes(file).read(0)


def test_what_is_listed_and_not_there_is_told(tmp_path):
    root = voc(tmp_path / "voc", ("a", "b", "c"))
    (root / "JPEGImages" / "b.jpg").unlink()
    (root / "Annotations" / "c.xml").unlink()
    data = open_boxes(root)
    assert data.names == ("a",)
    assert sorted(why.split("/")[-1] for _, why in data.missing) == [
        "b.jpg (or of another ending)",
        "c.xml does not exist",
    ]
    file = coco(tmp_path / "coco")
    (tmp_path / "coco" / "val2017" / "a.jpg").unlink()
    assert [name for name, _ in open_boxes(file).missing] == ["a.jpg"]


def test_files_that_are_no_annotations_are_refused(tmp_path):
    picture(tmp_path / "a.jpg")
    for text, told in (("<annotation>", "cannot be read as XML"), ("<html/>", "holds <html>")):
        (tmp_path / "a.xml").write_text(text)
        with pytest.raises(BoxError, match=told):
            open_boxes(tmp_path).read(0)
    (tmp_path / "a.xml").write_text("<annotation><object><name>x</name></object></annotation>")
    with pytest.raises(BoxError, match=r"<object> without <bndbox><xmin>"):
        open_boxes(tmp_path).read(0)
    file = tmp_path / "x.json"
    for text, told in (("{", "cannot be used"), ("[]", "cannot be used"), ('{"images": []}', "no 'categories'")):
        file.write_text(text)
        with pytest.raises(BoxError, match=told):
            open_boxes(file)
    file.write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(BoxError, match="lists no pictures"):
        open_boxes(file)


def test_json_whose_parts_do_not_fit_is_refused(tmp_path):
    file = coco(tmp_path, [(7, [1, 1, 2, 2])])
    with pytest.raises(BoxError, match="1 of 1 annotations, such as 0, are of pictures or categories"):
        open_boxes(file)


def test_masks_that_do_not_pair_are_refused(tmp_path):
    masks(tmp_path, np.ones((30, 40), dtype=np.uint8))
    (tmp_path / "images" / "a.jpg").rename(tmp_path / "images" / "other.jpg")
    with pytest.raises(LayoutError):
        open_boxes(tmp_path)


@pytest.mark.parametrize("kind", ["xml", "json"])
def test_a_kind_that_is_not_there_is_told(tmp_path, kind):
    masks(tmp_path, np.ones((30, 40), dtype=np.uint8))
    with pytest.raises(LayoutError, match="expected"):
        open_boxes(tmp_path, kind)
    with pytest.raises(LayoutError, match="xml, json, masks"):
        open_boxes(tmp_path, "csv")
    with pytest.raises(LayoutError, match="does not exist"):
        open_boxes(tmp_path / "nothing")


@given(
    st.integers(20, 90),
    st.integers(20, 90),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.sampled_from([14, 28]),
)
def test_the_crop_moves_boxes_as_it_moves_pixels(width, height, shares, size):
    left, right = sorted((shares[0] * width, shares[1] * width))
    top, bottom = sorted((shares[2] * height, shares[3] * height))
    if right - left < 1 or bottom - top < 1:
        return
    resize = 32
    seen = boxes_in_crop([Box("x", left, top, right, bottom)], (width, height), resize=resize, size=size)
    short = min(width, height)
    new = (int(resize * width / short), int(resize * height / short))  # the shorter side becomes 32
    shift = [round((side - size) / 2) for side in new]
    expected = [left * new[0] / width - shift[0], top * new[1] / height - shift[1]]
    expected += [right * new[0] / width - shift[0], bottom * new[1] / height - shift[1]]
    cut = torch.tensor(expected, dtype=torch.float64).clamp(0, size)
    if cut[2] - cut[0] < 1e-6 or cut[3] - cut[1] < 1e-6:
        assert len(seen) == 0 or (seen[0] - cut).abs().max() < 1e-3
    else:
        torch.testing.assert_close(seen[0], cut, atol=1e-3, rtol=0)
