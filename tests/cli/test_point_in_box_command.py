"""`selectivit probe point-in-box`: the metric from end to end, what is left out, and what is kept."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import selectivit as sv

PIB = ("probe", "point-in-box")
SEEN = ("--resize", 36, "--size", 32, "--max-area", 0.5, "--device", "cpu", "--pictures", 2)


@pytest.fixture
def data(tmp_path):
    """Noise with a coloured square a photo; the box is the square's. The last photo has two of them."""
    generator = np.random.default_rng(0)
    root, entries, images = tmp_path / "data", [], []
    (root / "val2017").mkdir(parents=True)
    for i in range(7):
        pixels = generator.integers(0, 255, (48, 60, 3), dtype=np.uint8)
        left, top = int(generator.integers(4, 26)), int(generator.integers(2, 22))
        pixels[top : top + 24, left : left + 30] = (255, 40 * i, 0)
        Image.fromarray(pixels).save(root / "val2017" / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 60, "height": 48})
        entries.append({"id": i, "image_id": i, "category_id": 1 + i % 2, "bbox": [left, top, 30, 24]})
    entries.append({"id": 9, "image_id": 6, "category_id": 1, "bbox": [0, 0, 9, 9]})
    categories = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
    (root / "annotations").mkdir()
    content = {"images": images, "annotations": entries, "categories": categories}
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return root


def read(folder):
    return json.loads((folder / "point_in_box.json").read_text())


def by_hand(model, data, block):
    """Hits and best patches of the first six photos by torchvision's crop and a loop over patches."""
    expected, hits, places = sv.preprocessing(model), [], []
    entries = json.loads((data / "annotations" / "instances_val2017.json").read_text())["annotations"]
    for i in range(6):
        image = Image.open(data / "val2017" / f"{i}.png")
        image = v2.functional.center_crop(image.resize((45, 36), Image.Resampling.BICUBIC), [32])
        pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(image), torch.float32, scale=True)
        x = v2.functional.normalize(pixels, list(expected.mean), list(expected.std))[None]
        with torch.no_grad():
            found = sv.features(model, x, layer=block)
        best = torch.cosine_similarity(found.patch_tokens, found.cls[:, None], dim=-1).argmax().item()
        left, top, wide, high = entries[i]["bbox"]
        # 60 x 48 becomes 45 x 36, of which round(13 / 2) = 6 and 2 pixels are cut away.
        at = ((best % 4 + 0.5) * 8 + 6, (best // 4 + 0.5) * 8 + 2)
        places.append(best)
        hits.append(int(left * 0.75 <= at[0] < (left + wide) * 0.75 and top * 0.75 <= at[1] < (top + high) * 0.75))
    return hits, places


def test_the_metric_is_the_one_by_hand(run, data, tiny_model, tmp_path):
    status, out, err = run(*PIB, data, "--model", tiny_model, "--out", tmp_path / "out", *SEEN)
    assert status == 0, err
    (model,) = read(tmp_path / "out")["models"]
    loaded = sv.load_model(tiny_model)
    expected, best = zip(*(by_hand(loaded, data, block) for block in range(3)), strict=True)
    assert [[record["hits"][b] for record in model["records"]] for b in range(3)] == list(expected)
    assert [[record["best"][b] for record in model["records"]] for b in range(3)] == list(best)
    assert [b["pib"] for b in model["blocks"]] == [sum(hits) / 6 for hits in expected]
    assert 0 < sum(map(sum, expected)) < 18, "hits and misses, or the test shows nothing"
    assert model["left_out"] == {"several objects": 1} and "left out: 1 several objects" in out
    assert all(b["interval95"][0] <= b["pib"] <= b["interval95"][1] for b in model["blocks"])
    assert len(list((tmp_path / "out" / "pictures").glob("*.png"))) == 2
    assert (tmp_path / "out" / "point_in_box.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_takes_what_is_kept_and_other_settings_do_not(run, data, tiny_model, tmp_path, monkeypatch):
    arguments = (*PIB, data, "--model", tiny_model, "--out", tmp_path / "out", *SEEN[:-1], 0)
    assert run(*arguments)[0] == 0
    first = read(tmp_path / "out")

    def broken(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(sys.modules["selectivit.features"], "block_features", broken)  # sv.features is a function
    assert run(*arguments)[0] == 0
    assert read(tmp_path / "out")["models"] == first["models"]
    for more in (("--max-area", 0.6), ("--norm", "false"), ("--normalizer", "entmax")):
        with pytest.raises(AssertionError, match="computed again"):
            run(*arguments, *more)


def test_swaps_and_other_rules(run, data, tiny_model, tmp_path):
    options = ("--normalizer", "entmax", "--objects", "any", "--classes", "dog")
    status, out, _ = run(
        "probe", "point-in-box", data, "--model", tiny_model, "--out", tmp_path / "out", *SEEN, *options
    )
    models = read(tmp_path / "out")["models"]
    assert status == 0 and [m["label"] for m in models] == ["tiny", "tiny, entmax 1.5"]
    assert [m["photos"] for m in models] == [4, 4] and models[0]["left_out"] == {"no object": 3}
    assert models[0]["records"] != models[1]["records"] and "tiny, entmax 1.5, 4 photos" in out


def test_bad_photos_are_named_and_the_others_scored(run, data, tiny_model, tmp_path):
    (data / "val2017" / "0.png").unlink()
    (data / "val2017" / "1.png").write_bytes(b"no picture")
    Image.new("RGB", (10, 10)).save(data / "val2017" / "2.png")
    status, _, err = run(*PIB, data, "--model", tiny_model, "--out", tmp_path / "out", *SEEN)
    assert status == 1 and read(tmp_path / "out")["models"][0]["photos"] == 3
    told = {entry["source"]: entry["reason"] for entry in read(tmp_path / "out")["skipped"]}
    assert set(told) == {"0.png", "1", "2"} and "for 60 x 48 pixels" in told["2"] and "does not exist" in told["0.png"]
    assert err.count("skipped:") == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--classes", "horse"), "none of the 7 photos of data counts: 7 no object"),
        (("--objects", "two"), "objects one or any"),
        (("--max-area", 0), "largest area over 0"),
        (("--size", 30, "--resize", 36), "does not fit the model's patches of 8 px"),
        (("--against", "sum"), "--against cls or mean"),
        (("--source", "xml"), "holds no XML files"),
        (("--split", "train"), "instances_train"),
        (("--batch-size", 0), "--batch-size"),
        (("--model", "no/such/folder/here"), "no folder"),
    ],
)
def test_what_cannot_be(run, data, tiny_model, tmp_path, options, told):
    status, _, err = run(
        "probe", "point-in-box", data, "--model", tiny_model, "--out", tmp_path / "out", *SEEN, *options
    )
    assert status == 2 and told in err
