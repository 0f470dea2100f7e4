"""Folders of classes, and what is refused."""

import pytest

from selectivit.data.image_folder import check_same_classes, open_image_folder


def make(root, **splits):
    for split, classes in splits.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                (root / split / name / f"{i}.jpg").write_bytes(b"x")
    return root


def test_photos_are_in_the_order_of_classes_and_names(tmp_path):
    make(tmp_path, train={"b": 2, "a": 1})
    (tmp_path / "train" / ".hidden").mkdir()
    data = open_image_folder(tmp_path, "train")
    assert data.classes == ("a", "b") and data.labels == (0, 1, 1) and len(data) == 3
    assert [p.split("/")[-2:] for p in data.photos.paths] == [["a", "0.jpg"], ["b", "0.jpg"], ["b", "1.jpg"]]


def test_what_is_refused(tmp_path):
    make(tmp_path, train={"a": 1, "b": 1}, val={"a": 1, "c": 1}, one={"a": 1}, none={}, hollow={"a": 1, "b": 0})
    (tmp_path / "none").mkdir(exist_ok=True)
    for split, text in {
        "test": "has no split 'test'.*the folders there are: hollow, none, one, train, val",
        "one": r"has one class only \(a\): expected two or more",
        "none": "has no folders of classes",
        "hollow": "b holds no pictures.*remove the folder or fill it",
    }.items():
        with pytest.raises(ValueError, match=text):
            open_image_folder(tmp_path, split)
    with pytest.raises(ValueError, match="it is no folder"):
        open_image_folder(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="only in train: b; only in val: c"):
        check_same_classes(open_image_folder(tmp_path, "train"), open_image_folder(tmp_path, "val"))
