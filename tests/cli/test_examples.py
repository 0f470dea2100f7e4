"""The scripts of examples/ run offline on a small CLIP, print what they claim to, and are short."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from conftest import save_tiny_clip, write_masked

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
CLASSES = ("road", "car", "sky")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", [*CLASSES, "a", "red", "blue", "cup"])


@pytest.fixture
def data(tmp_path):
    return str(write_masked(tmp_path / "data", CLASSES, count=3))


def main(name):
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_short_and_listed(path):
    assert len(path.read_text().splitlines()) < 100
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()


def test_self_correlation(clip, data, capsys):
    found = main("self_correlation")([clip, data, "--size", "32", "--photos", "2"])
    assert set(found) == {"qk", "qq", "kk", "vv", "qq+kk", "qq+kk+vv"}
    assert len({round(value, 6) for pair in found.values() for value in pair}) > 4
    assert all(f"{value:.2f}" in capsys.readouterr().out for value in found["qk"][:1])


def test_gain_follows_diffuseness(clip, data, capsys):
    r = main("gain_follows_diffuseness")([clip, data, "--size", "32"])
    assert -1 <= r <= 1 and f"correlation: {r:.2f}" in capsys.readouterr().out


def test_denoising_not_sparsity(clip, data):
    found = main("denoising_not_sparsity")([clip, data, "--size", "32"])
    assert len(found) == 4 and len(set(found.values())) > 1


def test_size_and_backbone(clip, data):
    gains = main("size_and_backbone")([data, clip, "--sizes", "24", "32"])
    assert set(gains) == {(clip, 24), (clip, 32)}


def test_regions_and_attributes(clip, data, tmp_path, capsys):
    captions = [{"id": i, "name": f"a {word} cup"} for i, word in enumerate(("red", "blue"))]
    boxes = [
        {"id": i, "image_id": i, "bbox": [4, 4, 20, 20], "category_id": 0, "neg_category_ids": [1]} for i in range(3)
    ]
    images = [{"id": i, "file_name": f"{i}.png", "width": 48, "height": 40} for i in range(3)]
    (tmp_path / "x.json").write_text(json.dumps({"images": images, "categories": captions, "annotations": boxes}))
    found = main("regions_and_attributes")([clip, str(tmp_path / "x.json"), f"{data}/images", "--size", "32"])
    assert set(found) == {"qk", "qq", "kk", "vv"}
    assert "3 of 3 regions; drawing captions at random gives 50.00 %" in capsys.readouterr().out


def test_entmax_family(tmp_path):
    found = main("entmax_family")(["--out", str(tmp_path / "family.png")])
    assert found[1.0] == 60 > found[1.2] > found[1.5] > found[2.0] > 0
    assert (tmp_path / "family.png").stat().st_size > 5000


def test_calibrated_sparsity(tiny_model, photos, capsys):
    options = [tiny_model, str(photos / "a.jpg"), "--size", "64", "--max-support", "0.6"]
    found = main("calibrated_sparsity")(options)
    (plain, far), (share, near) = found["scores as they are"], found["calibrated"]
    assert plain < share < 1 and near > far
    assert f"{100 * share:5.1f} %, cosine to softmax's patches {near:.3f}" in capsys.readouterr().out


def test_semantic_diffusion(tiny_model, photos):
    found = main("semantic_diffusion")([tiny_model, str(photos / "a.jpg"), "--size", "32", "--last", "1"])
    softmax, entmax = found["softmax"], found["entmax"]
    assert softmax[:2] == entmax[:2] and softmax[2] != entmax[2]


def test_where_a_patch_looks(tiny_model, photos, tmp_path):
    options = [tiny_model, str(photos / "a.jpg"), "--size", "64", "--patch", "1,2", "--out", str(tmp_path / "p.png")]
    shares = main("where_a_patch_looks")(options)
    assert len(shares) == 8 and all(shares["softmax", source] == 1 for source in ("qk", "qq", "kk", "vv"))
    assert shares["entmax", "qk"] < 1 and (tmp_path / "p.png").stat().st_size > 5000


def test_elastic_budget(photos):
    found = main("elastic_budget")(["veca-tiny", str(photos / "a.jpg"), "--size", "28"])
    assert list(found) == [64, 32, 16, 8, 4, 2, 1]
    assert found[64] > 0.999 and found[64] > found[8] > found[1]
