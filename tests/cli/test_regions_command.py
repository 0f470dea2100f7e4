"""`selectivit regions`: figures by subset, what is kept, missing photos, bad input, several processes."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from conftest import save_tiny_clip, write_photo
from selectivit.openvocab import region_ranking

WORDS = ["A", "red", "blue", "green", "glass", "cup", "."]
CAPTIONS = [{"id": i, "name": f"A {word} cup."} for i, word in enumerate(["red", "blue", "green", "glass"])]


@pytest.fixture(scope="session")
def region_clip(tmp_path_factory):
    pytest.importorskip("transformers")
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", WORDS)


@pytest.fixture
def benchmark(tmp_path):
    """Three photos and four annotation files, two of whose regions share a photo."""
    names = ["a.png", "b.png", "c.png"]
    for i, name in enumerate(names):
        write_photo(tmp_path / "photos" / name, size=(48, 32), seed=i)
    images = [{"id": i, "file_name": f"val2017/{n}", "width": 48, "height": 32} for i, n in enumerate(names)]
    (tmp_path / "fgovd").mkdir()
    for shift, name in enumerate(["1_attributes", "2_attributes", "3_attributes", "color"]):
        boxes = [
            {
                "id": 10 * i + j,
                "image_id": i,
                "bbox": [4 + 8 * j, 3, 20, 18.5],
                "category_id": (i + j + shift) % 4,
                "neg_category_ids": [(i + j + shift + n) % 4 for n in (1, 2, 3)],
            }
            for i in range(3)
            for j in range(2)
        ]
        content = {"images": images, "categories": CAPTIONS, "annotations": boxes}
        (tmp_path / "fgovd" / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def regions(run, region_clip, benchmark):
    def call(*files, out=benchmark / "out", images=benchmark / "photos", model=region_clip, **options):
        more = [x for name, value in options.items() for x in (f"--{name}", value)]
        files = files or (benchmark / "fgovd",)
        more += [] if images is None else ["--images", images]
        status, text, err = run("regions", *files, "--model", model, "--out", out, "--size", 32, *more)
        found = out / "regions.json"
        lines = [line for line in err.splitlines() if "it/s]" not in line]  # the host's own bars
        return status, text, "\n".join(lines), json.loads(found.read_text()) if found.is_file() else None

    return call


@pytest.mark.parametrize("protocol", ["roialign", "crop"])
def test_figures_are_those_of_the_library(regions, benchmark, region_clip, protocol):
    from selectivit.models.clip import load_clip
    from selectivit.openvocab.regions import read_regions

    status, text, err, found = regions(protocol=protocol, preset="naclip")
    assert (status, err) == (0, "")
    assert [row["subset"] for row in found["subsets"]] == ["hard", "medium", "easy", "color"]
    clip = load_clip(region_clip)
    for row in found["subsets"]:
        some = read_regions(row["file"])
        want = region_ranking.rank_regions(clip, some, benchmark / "photos", "naclip", protocol=protocol, size=32)
        assert found["ranks"][row["subset"]] == {str(number): rank for number, rank in want.ranks.items()}
        assert {key: row[key] for key in want.summary()} == want.summary()
        assert row["regions"] == row["regions_in_file"] == 6 and row["chance"] == 0.25
    top1 = [row["top1"] for row in found["subsets"]]
    assert found["mhme"] == pytest.approx(sum(top1[:3]) / 3) and f"mHME: {100 * found['mhme']:.2f} %" in text
    assert len({rank for ranks in found["ranks"].values() for rank in ranks.values()}) > 1  # ranks tell regions apart


def test_a_second_run_ranks_nothing_anew_and_a_change_does(regions, benchmark, monkeypatch):
    first = regions()[3]
    count, rank = [], region_ranking.rank_photo

    def counted(*arguments, **options):
        count.append(1)
        return rank(*arguments, **options)

    monkeypatch.setattr(region_ranking, "rank_photo", counted)
    assert regions()[3] == first and not count
    with open(benchmark / "out" / "regions.work" / "0.jsonl", "r+") as file:
        file.truncate(len(file.read()) - 9)  # as if the process had been killed while it wrote the last line
    assert regions()[3] == first and len(count) == 1
    write_photo(benchmark / "photos" / "b.png", size=(48, 32), seed=77)
    regions()
    assert len(count) == 2
    regions(preset="sclip", templates="photo")
    assert len(count) == 5


def test_missing_photos_are_counted_and_named(regions, benchmark):
    (benchmark / "photos" / "a.png").unlink()
    (benchmark / "photos" / "b.png").write_text("no photo")
    status, text, err, found = regions(benchmark / "fgovd" / "color.json")
    assert status == 1 and "2 photos are left out" in err and "a.png" in err and "b.png" in err
    assert [entry["photo"] for entry in found["missing"]] == ["val2017/a.png", "val2017/b.png"]
    assert found["subsets"][0]["regions"] == 2 and found["mhme"] is None
    assert "mHME: none without hard, medium, easy" in text


def test_a_scaled_photo_is_left_out(regions, benchmark):
    Image.open(benchmark / "photos" / "c.png").resize((24, 16)).save(benchmark / "photos" / "c.png")
    status, _, err, _ = regions()
    assert status == 1 and "24 x 16 px and its boxes were drawn on 48 x 32" in err


def test_nothing_left_exits_2(regions, benchmark):
    for name in "abc":
        (benchmark / "photos" / f"{name}.png").write_text("no photo")
    assert regions()[0] == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"images": None}, "by --images FOLDER"),
        ({"images": "nowhere"}, "there is no folder nowhere"),
        ({"images": "fgovd"}, "none of 3 photos is in fgovd: expected files such as val2017/a.png"),
        ({"protocol": "box"}, "unknown protocol 'box'"),
        ({"preset": "naclipp"}, "did you mean 'naclip'"),
        ({"templates": "many"}, "unknown templates"),
        ({"model": "dinov2-small"}, "no model of images and texts"),
    ],
)
def test_bad_options_exit_2(regions, options, text):
    status, out, err, found = regions(**options)
    assert status == 2 and out == "" and found is None
    assert text in err


def test_bad_annotation_files_exit_2(regions, benchmark):
    (benchmark / "empty").mkdir()
    assert "no annotation file in" in regions(benchmark / "empty")[2]
    assert "no.json" in regions(benchmark / "no.json")[2]
    (benchmark / "x.json").write_text("[1]")
    assert "x.json is no annotation file" in regions(benchmark / "x.json")[2]
    twice = regions(benchmark / "fgovd" / "color.json", benchmark / "fgovd")
    assert twice[0] == 2 and "several files are called 'color'" in twice[2]


def test_models_without_texts_are_refused(regions, tiny_model):
    status, _, err, _ = regions(model=tiny_model)
    assert status == 2 and "error" in err


def test_two_processes_give_the_numbers_of_one(regions, benchmark, region_clip, environment):
    (benchmark / "photos" / "b.png").unlink()
    one = regions()[3]
    out = benchmark / "two"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["regions", "fgovd", "--images", "photos", "--model", region_clip, "--out", out, "--size", "32"]
    command = [*launcher, "-m", "selectivit.cli.main", *map(str, options)]
    done = subprocess.run(command, env=environment, cwd=benchmark, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    two = json.loads((out / "regions.json").read_text())
    assert two["ranks"] == one["ranks"] and [m["photo"] for m in two["missing"]] == ["val2017/b.png"]
    assert len(os.listdir(out / "regions.work")) == 2
