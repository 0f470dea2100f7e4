"""`selectivit features`: what it writes, what it keeps, and what it does with bad input."""

import errno
import importlib
import io
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from conftest import write_photo
from selectivit.cli import extraction
from selectivit.data import writing


@pytest.fixture
def features(run, tiny_model, tmp_path):
    def call(*paths, out=tmp_path / "out", **options):
        more = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
        status, text, err = run("features", *paths, "--model", tiny_model, "--out", out, "--size", 32, *more)
        index = out / "features.json"
        return status, text, err, json.loads(index.read_text()) if index.is_file() else None

    return call


def states(index):
    return {entry["features"]: entry["state"] for entry in index["photos"]}


def test_every_photo_gets_features_and_a_picture(features, photos, tmp_path):
    from PIL import Image

    status, text, err, index = features(photos)
    assert (status, err) == (0, "")
    assert "5 done (0 kept), 0 skipped" in text
    names = ["a", "b", "c", "sub/a", "sub/d"]
    assert list(states(index)) == [f"{name}.safetensors" for name in names]
    for entry in index["photos"]:
        tensors = load_file(tmp_path / "out" / entry["features"])
        height, width = entry["image_size"]
        assert tuple(tensors["map"].shape) == (32, height // 8, width // 8) == (32, *entry["grid"])
        assert tensors["cls"].shape == (32,) and "registers" not in tensors
        with Image.open(tmp_path / "out" / entry["picture"]) as picture:
            assert picture.size == (2 * width + 8, height)
    assert not [p for p in (tmp_path / "out").rglob("*") if p.name.startswith(".")]


def test_the_numbers_are_those_of_the_library(features, photos, tiny_model, tmp_path):
    import selectivit as sv
    from selectivit.data.images import read_image
    from selectivit.data.transforms import to_tensor

    features(photos, batch_size=2)
    model = sv.load_model(tiny_model)
    p = sv.preprocessing(model)
    for name in ("a", "b", "c"):
        file = next(photos.glob(f"{name}.*"))
        image = to_tensor(read_image(file).image, mean=p.mean, std=p.std, patch_size=p.patch_size, size=32)
        with torch.no_grad():
            want = sv.features(model, image[None]).map[0]
        torch.testing.assert_close(
            load_file(tmp_path / "out" / f"{name}.safetensors")["map"], want, atol=1e-5, rtol=1e-5
        )


def test_metadata_says_where_the_numbers_come_from(features, photos, tiny_model, tmp_path):
    from safetensors import safe_open

    features(photos / "a.jpg", layer=1)
    with safe_open(tmp_path / "out" / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata["settings"])
    assert settings["model"] == tiny_model and settings["layer"] == 1 and settings["size"] == 32
    assert metadata["source"].endswith("a.jpg") and len(metadata["source_sha256"]) == 64


def test_a_second_run_keeps_everything(features, photos, tmp_path, monkeypatch):
    first = features(photos)[3]
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.safetensors")}
    monkeypatch.setattr(extraction.Extraction, "_compute", lambda *_: pytest.fail("computed again"))
    status, text, _, second = features(photos)
    assert status == 0 and "5 kept" in text
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert [{**e, "state": ""} for e in first["photos"]] == [{**e, "state": ""} for e in second["photos"]]


@pytest.mark.parametrize("change", ["source", "layer", "swap", "damage", "picture gone"])
def test_what_has_changed_is_computed_again(features, photos, tmp_path, change):
    features(photos)
    out, options = tmp_path / "out", {}
    before = load_file(out / "a.safetensors")["map"].clone()  # else a window on a file that is about to change
    if change == "source":
        write_photo(photos / "a.jpg", size=(40, 40), seed=99)
    elif change == "layer":
        options = {"layer": 0}
    elif change == "swap":
        options = {"normalizer": "entmax"}
    elif change == "damage":
        (out / "a.safetensors").write_bytes(b"cut short")
    else:
        (out / "a.pca.png").unlink()
    found = states(features(photos, **options)[3])
    assert found["a.safetensors"] == "written"
    assert all((state == "written") == bool(options) for name, state in found.items() if name != "a.safetensors")
    assert (out / "a.pca.png").is_file()
    after = load_file(out / "a.safetensors")["map"]
    changed = not torch.allclose(after, before, atol=1e-4)  # the last bits depend on what is computed at once
    assert changed == (change in ("source", "layer", "swap"))


def test_other_weights_under_the_same_name_are_noticed(run, features, photos, tiny_model, tmp_path):
    from safetensors.torch import save_file

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    again = ("features", photos, "--model", model, "--out", tmp_path / "o", "--size", 32)
    run(*again)
    assert "5 kept" in run(*again)[1]
    tensors = load_file(model / "model.safetensors")
    tensors["cls_token"] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "0 kept" in run(*again)[1]


def test_clashing_names_are_kept_apart(features, photos, tmp_path):
    shutil.copy(photos / "b.png", photos / "a.png")
    index = features(photos)[3]
    assert list(states(index))[:2] == ["a.jpg.safetensors", "a.png.safetensors"]
    a, b = (load_file(tmp_path / "out" / f"a.{kind}.safetensors")["map"] for kind in ("jpg", "png"))
    assert a.shape != b.shape


def test_a_photo_that_is_given_twice_is_computed_once(features, photos):
    assert len(features(photos, photos / "a.jpg")[3]["photos"]) == 5


def test_writing_into_the_folder_that_is_read_loses_no_photo(features, photos):
    content = {p: p.read_bytes() for p in photos.rglob("*.*")}
    assert features(photos, out=photos)[0] == 0
    assert {p: p.read_bytes() for p in content} == content
    status, text, _, index = features(photos, out=photos)  # its own pictures are not taken for photos
    assert status == 0 and "5 done (5 kept)" in text and len(index["photos"]) == 5


def test_a_calibrated_swap(features, run, photos, tiny_model, tmp_path):
    fit = ("--model", tiny_model, "--size", 32, "--save-calibration", tmp_path / "cal", "--max-support", 1)
    assert run("compare", photos / "a.jpg", *fit)[0] == 0
    plain = features(photos / "b.png", out=tmp_path / "plain")[3]
    found = features(photos / "b.png", out=tmp_path / "swap", normalizer="entmax", calibration=tmp_path / "cal")[3]
    assert found["settings"]["attention"]["calibration"] and plain["settings"]["attention"] == "softmax"
    a, b = (load_file(tmp_path / f / "b.safetensors")["map"] for f in ("plain", "swap"))
    assert not torch.equal(a, b)
    status, _, err, _ = features(photos, normalizer="entmax", alpha=1.3, calibration=tmp_path / "cal")
    assert status == 2 and "fitted for alpha=1.5" in err


# ---- bad input


def bad_photos(folder):
    (folder / "text.jpg").write_text("no photo")
    (folder / "empty.png").write_bytes(b"")
    whole = (folder / "a.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    return {"text.jpg", "empty.png", "cut.jpg"}


def test_bad_photos_are_named_and_skipped(features, photos):
    bad = bad_photos(photos)
    status, text, err, index = features(photos, "missing.jpg")
    assert status == 1 and "5 done (0 kept), 4 skipped" in text
    assert len(index["photos"]) == 5
    for name in {*bad, "missing.jpg"}:
        assert sum(name in line for line in err.splitlines()) == 1
        assert sum(name in entry["reason"] for entry in index["skipped"]) == 1


def test_odd_photos_are_read_and_noted(features, tmp_path):
    from PIL import Image

    folder = tmp_path / "odd"
    folder.mkdir()
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("CMYK", (40, 40)).save(folder / "cmyk.jpg")
    Image.new("I;16", (40, 40)).save(folder / "deep.png")
    frames = [Image.new("L", (40, 40), 50 * i) for i in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    status, _, _, index = features(folder)
    assert status == 0
    notes = {entry["features"]: " ".join(entry["notes"]) for entry in index["photos"]}
    assert "first" in notes["moving.safetensors"] and "CMYK" in notes["cmyk.safetensors"]
    assert "16-bit" in notes["deep.safetensors"] and notes["one.safetensors"] == ""


def test_nothing_to_do_exits_2(features, tmp_path):
    (tmp_path / "none").mkdir()
    status, out, err, index = features(tmp_path / "none", "missing.jpg")
    assert status == 2 and out == "" and index is None
    assert "missing.jpg" in err and "no pictures" in err


def test_only_bad_photos_exit_2(features, tmp_path):
    (tmp_path / "bad.jpg").write_text("no photo")
    status, _, err, index = features(tmp_path / "bad.jpg")
    assert status == 2 and "bad.jpg" in err and index["photos"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 3}, "3 blocks"),
        ({"size": 0}, "at least 1, got 0"),
        ({"batch_size": 0}, "--batch-size 1"),
        ({"normalizer": "relu"}, "relu"),
        ({"normalizer": "entmax", "alpha": 0.5}, "alpha"),
        ({"normalizer": "entmax", "alpha": "nan"}, "alpha"),
        ({"scores": "qx"}, "qx"),
        ({"scores": "kk", "layers": "-9"}, "expected the last 1 to 3"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"calibration": "nowhere"}, "nowhere"),
    ],
)
def test_settings_that_cannot_be_exit_2(features, photos, options, words):
    status, out, err, _ = features(photos, **options)
    assert status == 2 and out == "" and words in err


def test_a_model_that_is_not_there_exits_2(run, photos):
    status, _, err = run("features", photos, "--model", "./nowhere")
    assert status == 2 and "nowhere" in err


def test_a_target_that_cannot_be_written_exits_2_before_the_work(features, photos, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, out, err, _ = features(photos, out=tmp_path / "file" / "out")
    assert status == 2 and out == "" and "cannot write" in err and "choose" in err
    assert (tmp_path / "file").read_text() == "in the way"


class FullDisk(io.FileIO):
    """A file on a disk with room for so many large files; the next is cut short. An index still fits, if it may."""

    room, index_fits = 0, True

    def write(self, data):
        is_index = ".json" in self.name.name
        if (is_index and not self.index_fits) or (not is_index and len(data) > 2000 and self.room == 0):
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        type(self).room -= not is_index and len(data) > 2000
        return super().write(data)


@pytest.mark.parametrize(("good", "index_fits", "status"), [(0, True, 2), (2, True, 1), (2, False, 1), (5, False, 1)])
def test_a_full_disk_stops_with_what_is_done(features, photos, tmp_path, monkeypatch, good, index_fits, status):
    out = tmp_path / "out"
    monkeypatch.setattr(FullDisk, "room", 2 * good)  # a picture and features each
    monkeypatch.setattr(FullDisk, "index_fits", index_fits)
    monkeypatch.setattr(writing, "open", FullDisk, raising=False)
    found, _, err, index = features(photos, batch_size=1)
    assert found == status and "No space left" in err and "free some space" in err
    assert len(list(out.rglob("*.safetensors"))) == good
    assert (index is not None) == index_fits
    if index:
        assert len(index["photos"]) == good and "No space left" in index["stopped"]
    assert not [p for p in out.rglob("*") if p.name.startswith(".")]
    monkeypatch.undo()
    again = features(photos)
    assert again[0] == 0 and f"5 done ({good} kept)" in again[1]


@pytest.fixture
def little_memory(monkeypatch):
    """Let the model run out of memory, as torch tells it, on batches of more than so many pixels in all."""
    library = importlib.import_module("selectivit.features")  # the name in the package is the function

    compute, calls = library.features, []

    def limit(pixels):
        def features(model, images, **more):
            calls.append(len(images))
            if images[:, 0].numel() > pixels:
                torch.empty(2**46)  # torch's own error
            return compute(model, images, **more)

        monkeypatch.setattr(library, "features", features)
        return calls

    return limit


def test_batches_too_large_for_memory_are_computed_one_by_one(features, photos, little_memory):
    calls = little_memory(32 * 48)
    status, text, _, index = features(photos)
    assert status == 0 and "5 done (0 kept), 0 skipped" in text and len(index["photos"]) == 5
    assert sorted(calls) == [1, 1, 1, 1, 1, 2, 3]


def test_a_photo_too_large_for_memory_is_skipped_and_named(features, photos, little_memory):
    write_photo(photos / "long.jpg", size=(320, 32))
    little_memory(32 * 48)
    status, text, err, index = features(photos)
    assert status == 1 and "5 done (0 kept), 1 skipped" in text
    (skipped,) = index["skipped"]
    assert skipped["source"].endswith("long.jpg") and "not enough memory for 32 x 320 pixels" in skipped["reason"]
    assert "long.jpg: not enough memory" in err and "--size" in err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_photo_too_large_to_read_is_skipped_and_named(features, photos, monkeypatch, error):
    read = extraction.ready_photo

    def ready(path, *more):
        if path.name == "b.png":
            raise error
        return read(path, *more)

    monkeypatch.setattr(extraction, "ready_photo", ready)
    status, _, err, index = features(photos)
    assert status == 1 and len(index["photos"]) == 4 and "b.png: not enough memory to read it" in err


def test_no_photo_that_fits_exits_2(features, photos, little_memory):
    little_memory(1)
    status, _, err, index = features(photos)
    assert status == 2 and index["photos"] == [] and len(index["skipped"]) == 5 and "not enough memory" in err


def test_other_errors_are_no_lack_of_memory(features, photos, monkeypatch):
    library = importlib.import_module("selectivit.features")  # the name in the package is the function

    def fault(*_, **__):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(library, "features", fault)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        features(photos)


def test_the_index_keeps_what_earlier_runs_wrote(features, photos, tmp_path):
    first = features(photos / "a.jpg", photos / "b.png")[3]
    second = features(photos / "c.jpg")[3]
    assert states(second) == {"a.safetensors": "earlier", "b.safetensors": "earlier", "c.safetensors": "written"}
    assert [{**e, "state": "written"} for e in second["photos"][:2]] == first["photos"]
    (tmp_path / "out" / "a.pca.png").unlink()
    third = features(photos / "c.jpg", photos / "b.png")[3]
    assert states(third) == {"b.safetensors": "kept", "c.safetensors": "kept"}
    assert all("settings" not in entry for entry in third["photos"])


def test_another_photo_of_the_same_name_does_not_replace_the_first(features, photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_photo(other / "a.png", seed=7)
    first = features(next(photos.glob("a.*")))[3]
    kept = (tmp_path / "out" / "a.safetensors").read_bytes()
    assert states(features(other / "a.png")[3]) == {"a.safetensors": "earlier", "a~2.safetensors": "written"}
    assert (tmp_path / "out" / "a.safetensors").read_bytes() == kept and first["photos"][0]["grid"]
    assert states(features(other / "a.png")[3]) == {"a.safetensors": "earlier", "a~2.safetensors": "kept"}


def test_a_photo_that_was_edited_replaces_its_own_features(features, tmp_path):
    photo = tmp_path / "a.png"
    write_photo(photo, seed=1)
    features(photo)
    write_photo(photo, seed=2)
    assert states(features(photo)[3]) == {"a.safetensors": "written"}


def test_the_index_says_which_settings_earlier_runs_had(features, photos):
    first = features(photos / "a.jpg", layer=0)[3]
    for photo in ("b.png", "c.jpg"):
        index = features(photos / photo)[3]
        entry = index["photos"][0]
        assert entry["state"] == "earlier" and entry["settings"] == first["settings"] != index["settings"]
    assert [("settings" in e) for e in index["photos"]] == [True, False, False]
    back = features(photos / "sub" / "d.png", layer=0)[3]
    assert [e.get("settings", back["settings"])["layer"] for e in back["photos"]] == [0, -1, -1, 0]
    assert "settings" not in back["photos"][0]


@pytest.mark.parametrize("content", ["no json", "[]", '{"photos": 3}', '{"photos": [{}], "settings": {}}'])
def test_an_index_that_is_none_of_ours_is_told(features, photos, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "features.json").write_text(content)
    status, _, err, index = features(photos / "a.jpg")
    assert status == 0 and "could not be read" in err and len(index["photos"]) == 1


def test_config_file(run, photos, tiny_model, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"model: {tiny_model}\nsize: 32\nlayers: -1\nscores: kk\nbatch-size: 2\n")
    assert run("features", photos / "a.jpg", "--config", config)[0] == 0
    settings = json.loads((tmp_path / "out/features.json").read_text())["settings"]
    assert settings["attention"]["scores"] == "kk" and settings["size"] == 32


def test_a_core_periphery_model_takes_a_number_of_cores(run, photos, tiny_model, tmp_path):
    import selectivit as sv

    small = {"patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 24, "num_cores": 6}
    sv.create_model("veca_tiny_patch14", **small).save_pretrained(tmp_path / "veca")
    options = ("--model", tmp_path / "veca", "--out", tmp_path / "out", "--size", 32)
    status, _, err = run("features", photos, *options, "--num-cores", 3)
    assert status == 0, err
    assert load_file(tmp_path / "out" / "a.safetensors")["cores"].shape == (3, 16)
    assert run("features", photos, *options, "--num-cores", 7)[0] == 2
    status, _, err = run("features", photos, "--model", tiny_model, "--out", tmp_path / "two", "--num-cores", 3)
    assert status == 2 and "does not have" in err
