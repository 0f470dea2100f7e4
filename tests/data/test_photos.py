"""Photos by number: folders, lists, tar shards, saved datasets."""

from __future__ import annotations

import io
import tarfile

import pytest
from PIL import Image

from selectivit.data.images import ImageError
from selectivit.data.photos import PhotoFiles, Photos, PhotoSubset, open_photos
from selectivit.data.shards import TarShard


def png(colour, size=(20, 10)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    for i, name in enumerate(("b.png", "a.png", "sub/c.png")):
        (tmp_path / "photos" / name).write_bytes(png((i, 0, 0)))
    return tmp_path / "photos"


def reds(photos):
    return [photos.read(i).getpixel((0, 0))[0] for i in range(len(photos))]


def test_folders_lists_and_files_come_in_one_order(folder, tmp_path):
    (folder / "list.txt").write_text("# mine\nb.png\n\nsub/c.png\nmissing.png\n")
    photos, problems = open_photos([folder, folder / "a.png", folder / "list.txt", tmp_path / "nothing"])
    assert [photos.name(i).removeprefix(f"{folder}/") for i in range(len(photos))] == [
        *("a.png", "b.png", "sub/c.png"),
        "a.png",
        *("b.png", "sub/c.png", "missing.png"),
    ]
    assert problems == [f"{tmp_path / 'nothing'} does not exist"]
    assert [photos.read(i).getpixel((0, 0))[0] for i in range(6)] == [1, 0, 2, 1, 0, 2]
    with pytest.raises(ImageError, match=r"missing.png does not exist"):
        photos.read(6)
    with pytest.raises(IndexError, match="0 to 6, got 7"):
        photos.name(7)


def test_a_list_that_is_no_text(folder):
    (folder / "list.txt").write_bytes(b"\xff\xfe\x00photo")
    with pytest.raises(ValueError, match="not a list of paths in UTF-8"):
        open_photos([folder / "list.txt"])


def test_a_shard_is_read_in_any_order_and_its_captions_passed_over(tmp_path):
    members = [
        (f"{i:03}.{kind}", png((i, 0, 0)) if kind == "png" else b"words") for i in range(5) for kind in ("png", "txt")
    ]
    path = write_tar(tmp_path / "a.tar", members)
    photos, problems = open_photos([path, path])
    assert not problems and len(photos) == 10 and photos.name(7) == f"{path}/002.png"
    assert [photos.read(i).getpixel((0, 0))[0] for i in (4, 0, 8)] == [4, 0, 3]


def test_shards_that_are_damaged(tmp_path):
    path = write_tar(
        tmp_path / "a.tar", [("0.png", png((1, 0, 0), (400, 300))), ("1.png", b"no photo"), ("2.png", b"")]
    )
    shard = TarShard(path)
    assert shard.read(0).size == (400, 300)
    for index, message in ((1, "not a picture"), (2, "is empty")):
        with pytest.raises(ImageError, match=rf"a.tar/{index}.png.*{message}"):
            shard.read(index)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"a.tar cannot be read as a tar file .*cut short"):
        TarShard(path)
    path.write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match="expected a whole, uncompressed shard"):
        TarShard(path)


def test_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"label": [0, 1, 2], "photo": [{"bytes": png((i, 0, 0)), "path": None} for i in range(2)] + [None]}
    features = datasets.Features({"label": datasets.Value("int64"), "photo": datasets.Image()})
    table = datasets.Dataset.from_dict(rows, features=features)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "split")
    for name in ("one", "split"):
        photos, _ = open_photos([tmp_path / name])
        assert len(photos) == 3 and photos.read(1).getpixel((0, 0)) == (1, 0, 0)
        assert photos.name(1) == f"{tmp_path / name}[1]"
        with pytest.raises(ImageError, match=r"\[2\] holds no image"):
            photos.read(2)
    datasets.Dataset.from_dict({"label": [1]}).save_to_disk(tmp_path / "none")
    with pytest.raises(ValueError, match="no column of images; its columns are label"):
        open_photos([tmp_path / "none"])


def test_a_dataset_that_is_not_there(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*_, **__):
        raise ConnectionError("no hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match="hf:some/photos:test cannot be loaded: no hub"):
        open_photos(["hf:some/photos:test"])


def test_subsets_and_empty_sources(folder):
    files = PhotoFiles([str(folder / name) for name in ("a.png", "b.png")])
    photos = Photos([PhotoFiles([]), files, PhotoFiles([]), files])
    assert reds(photos) == [1, 0, 1, 0] and reds(PhotoSubset(photos, [3, 0])) == [0, 1]
    assert len(Photos([])) == 0
