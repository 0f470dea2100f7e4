"""`selectivit analyse`: each kind on a small folder, what is kept, bad input, several processes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import save_tiny_clip, write_masked
from selectivit.openvocab import evaluate

CLASSES = ["background", "road", "car", "sky"]


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    pytest.importorskip("transformers")
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", [*CLASSES, "a", "photo", "of", "."])


@pytest.fixture
def data(tmp_path):
    """Four photos with masks of blocks: classes 1 to 3 and void, or with background too."""

    def make(name="data", classes=CLASSES[1:]):
        return write_masked(tmp_path / name, classes)

    return make


@pytest.fixture
def analyse(run, clip_folder, tmp_path):
    def call(kind, data, out=tmp_path / "out", model=clip_folder, **options):
        more = [x for name, value in options.items() for x in (f"--{name}", value)]
        more += [] if kind == "diffuseness" or "templates" in options else ["--templates", "none"]
        status, text, err = run("analyse", kind, data, "--model", model, "--out", out, *more)
        found = out / f"analyse.{kind}.json"
        lines = [line for line in err.splitlines() if "it/s]" not in line]  # the host's own bars
        return status, text, "\n".join(lines), json.loads(found.read_text()) if found.is_file() else None

    return call


def check_picture(out, kind):
    with Image.open(out / f"analyse.{kind}.png") as picture:
        assert picture.width > 300 and len(np.unique(np.array(picture.convert("L")))) > 10


def library_miou(clip_folder, data, preset):
    """A plain loop over photos, by the formula."""
    import selectivit as sv
    from selectivit.models.clip import load_clip

    segmenter = sv.OpenVocabularySegmenter(load_clip(clip_folder), CLASSES[1:], preset, templates="none")
    here, either = torch.zeros(3), torch.zeros(3)
    for path in sorted((data / "images").iterdir()):
        mask = torch.from_numpy(np.array(Image.open(data / "masks" / path.name)))
        found = segmenter(path).index_map.masked_fill(mask == 255, 255)
        for i in range(3):
            here[i] += ((found == i) & (mask == i)).sum()
            either[i] += ((found == i) | (mask == i)).sum()
    return (here / either)[either > 0].mean().item()


# ---- the kinds


def test_mious_are_those_of_a_plain_loop(analyse, data, clip_folder, tmp_path):
    from dataclasses import replace

    from selectivit.openvocab.presets import PRESETS

    folder = data()
    status, text, err, found = analyse("controls", folder, scores="qk,qq", size=32, alpha=1.5, temperature=0.4)
    assert (status, err) == (0, "") and "mIoU" in text
    ways = {
        "softmax": {"normalizer": "softmax"},
        "softmax, temperature 0.4": {"normalizer": "softmax", "temperature": 0.4},
        "random mask": {"normalizer": "random_mask"},
        "entmax": {"normalizer": "entmax"},
    }
    assert [(c["scores"], c["attention"]) for c in found["cells"]] == [(s, w) for s in ("qk", "qq") for w in ways]
    for cell in found["cells"]:
        base = replace(PRESETS["entmax-qq"], size=32, alpha=1.5, scores=cell["scores"])
        want = library_miou(clip_folder, folder, replace(base, **ways[cell["attention"]]))
        assert cell["miou"] == pytest.approx(want, abs=1e-6)
        assert f"{100 * want:.2f}" in text and cell["pixels"] == 4 * (40 * 48 - 64)
    assert len({cell["miou"] for cell in found["cells"]}) > 3  # the ways differ
    check_picture(tmp_path / "out", "controls")


def test_gain_sets_miou_beside_diffuseness(analyse, data, clip_folder, tmp_path):
    other = save_tiny_clip(tmp_path / "clip2", [*CLASSES, "a"], seed=5)
    status, text, _, found = analyse("gain", data(), model=f"{clip_folder},{other}", scores="qk,vv", size=32)
    assert status == 0 and len(found["points"]) == 4 and "correlation of the gain" in text
    cells = {(c["model"], c["scores"], c["normalizer"]): c["miou"] for c in found["cells"]}
    for point in found["points"]:
        plain, sparse = (cells[point["model"], point["scores"], n] for n in ("softmax", "entmax"))
        assert point["gain"] == pytest.approx(sparse - plain)
    spread = analyse("diffuseness", data(), scores="qk,vv", size=32, layers=-1)[3]
    for point, rule in zip(found["points"], spread["rules"][::2], strict=False):
        mean = rule["layers"][0]["mean"]
        assert point["other_classes"] == pytest.approx(mean["other_classes"], abs=1e-5)
        assert point["effective_tokens"] == pytest.approx(mean["effective_tokens"], abs=1e-5)
    x, y = (np.array([p[name] for p in found["points"]]) for name in ("other_classes", "gain"))
    assert found["correlation"]["other_classes"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    check_picture(tmp_path / "out", "gain")


@pytest.mark.parametrize(
    ("kind", "options", "columns", "count"),
    [
        ("resolution", {"scores": "qq", "sizes": "24,32"}, ("size", "scores", "normalizer"), 4),
        ("grid", {"depths": "1,2", "alphas": "1,1.5,2", "size": 32}, ("layers", "alpha"), 6),
        ("backbones", {"scores": "qk", "size": 32}, ("model", "scores", "normalizer"), 2),
    ],
)
def test_tables_of_other_kinds(analyse, data, tmp_path, kind, options, columns, count):
    status, _, err, found = analyse(kind, data(), **options)
    assert (status, err) == (0, "") and len(found["cells"]) == count
    keys = [tuple(cell[column] for column in columns) for cell in found["cells"]]
    assert len(set(keys)) == count and all(0 <= cell["miou"] <= 1 for cell in found["cells"])
    assert len({cell["miou"] for cell in found["cells"]}) > 1
    check_picture(tmp_path / "out", kind)


def test_diffuseness_of_a_model_without_texts(analyse, data, tiny_model, tmp_path):
    status, text, err, found = analyse("diffuseness", data(), model=tiny_model, size=32, scores="qk,qq+kk")
    assert (status, err) == (0, "")
    assert [(rule["scores"], rule["normalizer"]) for rule in found["rules"]] == [
        (scores, normalizer) for scores in ("qk", "qq+kk") for normalizer in ("softmax", "entmax")
    ]
    for rule in found["rules"]:
        assert len(rule["layers"]) == 3 and rule["alpha"] == (1.2 if rule["normalizer"] == "entmax" else None)
        for layer in rule["layers"]:
            assert len(layer["heads"]["same_class"]) == 2
            parts = ("same_class", "other_classes", "itself", "unlabelled", "prefix")
            assert sum(layer["mean"][part] for part in parts) == pytest.approx(1, abs=1e-5)
    sparse, dense = (found["rules"][i]["layers"][-1]["mean"] for i in (1, 0))
    assert sparse["support_share"] < dense["support_share"] == 1
    assert "same class %" in text
    check_picture(tmp_path / "out", "diffuseness")


def test_background_is_a_class_by_threshold_or_words(analyse, data):
    folder = data("with", CLASSES)
    low = analyse("backbones", folder, scores="qk", size=32, threshold=0.0, background="below")[3]
    assert all(cell["class_iou"]["background"] == 0 for cell in low["cells"])
    high = analyse("backbones", folder, scores="qk", size=32, threshold=1.0, background="below")[3]
    assert all(cell["class_iou"]["car"] == 0 < cell["class_iou"]["background"] for cell in high["cells"])
    words = analyse("backbones", folder, scores="qk", size=32, background="words")[3]
    assert [cell["miou"] for cell in words["cells"]] != [cell["miou"] for cell in high["cells"]]
    few = analyse("diffuseness", folder, scores="qk", size=32)[3]["queries"]
    assert 0 < few < 4 * 19  # background patches are no queries


# ---- what is kept


def test_kinds_share_what_was_measured(analyse, data, monkeypatch):
    folder, count, made = data(), [], evaluate.count_confusion

    def counted(*arguments):
        count.append(1)
        return made(*arguments)

    monkeypatch.setattr(evaluate, "count_confusion", counted)
    first = analyse("backbones", folder, scores="qk", size=32)[3]
    assert len(count) == 8
    assert analyse("backbones", folder, scores="qk", size=32)[3] == first and len(count) == 8
    analyse("controls", folder, scores="qk", size=32)  # softmax and entmax are there
    assert len(count) == 16
    mask = np.array(Image.open(folder / "masks" / "2.png"))
    Image.fromarray((mask + 1) % 3 * (mask != 255) + 255 * (mask == 255).astype(np.uint8)).save(
        folder / "masks" / "2.png"
    )
    assert analyse("backbones", folder, scores="qk", size=32)[3] != first and len(count) == 18


def test_some_photos_only(analyse, data):
    assert analyse("diffuseness", data(), photos=2, size=32, scores="qk")[3]["photos"] == 2


def test_two_processes_give_the_numbers_of_one(analyse, data, clip_folder, tmp_path, environment):
    folder = data()
    (folder / "images" / "3.png").write_text("no photo")
    one = analyse("gain", folder, scores="qk,qq", size=32)
    assert one[0] == 1
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["analyse", "gain", folder, "--model", clip_folder, "--out", tmp_path / "two", "--size", "32"]
    options += ["--scores", "qk,qq", "--templates", "none"]
    command = [*launcher, "-m", "selectivit.cli.main", *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    two = json.loads((tmp_path / "two" / "analyse.gain.json").read_text())
    assert two["cells"] == one[3]["cells"] and [e["photo"] for e in two["skipped"]] == ["3"]
    for a, b in zip(two["points"], one[3]["points"], strict=True):
        assert a == pytest.approx(b)


# ---- bad input


def test_bad_photos_are_left_out_of_all_cells(analyse, data):
    folder = data()
    (folder / "images" / "1.png").write_text("no photo")
    mask = np.array(Image.open(folder / "masks" / "2.png"))
    Image.fromarray(mask[:-8]).save(folder / "masks" / "2.png")
    status, _, err, found = analyse("backbones", folder, scores="qk", size=32)
    assert status == 1 and found["photos"] == 2 and [e["photo"] for e in found["skipped"]] == ["1", "2"]
    assert "2 of 4 photos are left out" in err
    assert all(err.count(f"skipped: {entry['reason']}") == 1 for entry in found["skipped"])
    assert all(cell["pixels"] == 2 * (40 * 48 - 64) for cell in found["cells"])


def test_a_photo_too_large_for_one_cell_is_left_out_of_all(analyse, data, monkeypatch):
    count, made = [], evaluate.count_confusion

    def tight(*arguments):
        count.append(1)
        if len(count) == 2:  # the first photo's second cell
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return made(*arguments)

    monkeypatch.setattr(evaluate, "count_confusion", tight)
    status, _, err, found = analyse("backbones", data(), scores="qk", size=32)
    assert status == 1 and "not enough memory" in err and [e["photo"] for e in found["skipped"]] == ["0"]
    assert [cell["pixels"] for cell in found["cells"]] == [3 * (40 * 48 - 64)] * 2


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("diffuseness", {"scores": "qk,xx"}, "unknown score source 'xx'"),
        ("diffuseness", {"layers": "9,"}, "out of range"),
        ("diffuseness", {"photos": -1}, "--photos of 0"),
        ("controls", {"temperature": 0}, "temperature"),
        ("controls", {"preset": "naclipp"}, "did you mean 'naclip'"),
        ("controls", {"background": "sky"}, "expected background both, words, below"),
        ("controls", {"threshold": 0.5}, "no background class"),
        ("resolution", {"sizes": "big"}, "--sizes as numbers"),
        ("resolution", {"model": "a,b"}, "takes one model"),
        ("grid", {"alphas": "0.5"}, "--alphas as numbers of at least 1"),
        ("grid", {"scores": "qk,qq"}, "one score source"),
        ("grid", {"depths": "9"}, "1 to 2 of the tower's last blocks"),
        ("gain", {"model": "dinov2-small"}, "no model of images and texts"),
    ],
)
def test_bad_options_exit_2(analyse, data, kind, options, text):
    status, out, err, found = analyse(kind, data(), **options)
    assert status == 2 and out == "" and found is None
    assert text in err


def test_bad_data_exits_2(analyse, data, tmp_path):
    assert "is no folder" in analyse("gain", tmp_path / "nowhere")[2]
    (tmp_path / "empty").mkdir()
    assert analyse("gain", tmp_path / "empty")[0] == 2
    folder = data()
    (folder / "classes.json").write_text('["road", "car"]')  # the masks hold a third
    status, _, err, _ = analyse("diffuseness", folder)
    assert status == 2 and "classes.json" in err


def test_a_kind_is_needed(run):
    status, _, err = run("analyse")
    assert status == 2 and "diffuseness" in err
    assert run("analyse", "gains", "x")[0] == 2
