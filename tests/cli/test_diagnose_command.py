"""`selectivit diagnose`: numbers against the obvious computation, every host, checkpoints, what is kept and skipped."""

import json
import math

import pytest
import torch

import selectivit as sv
from selectivit.cli.diagnosis import ATTENTION, CORE_ROWS, TOKENS, diagnose_photo
from selectivit.cli.variants import model_names, short_names
from selectivit.eval.token_statistics import token_statistics


def read(folder):
    return json.loads((folder / "diagnose.json").read_text())


def diagnose(run, tmp_path, *arguments):
    return run("diagnose", *arguments, "--out", tmp_path / "out", "--device", "cpu", "--pictures", 1)


def test_numbers_are_those_of_features_and_attention_maps(run, photos, tiny_model, tmp_path):
    status, out, err = diagnose(run, tmp_path, photos, "--model", tiny_model, "--normalizer", "entmax")
    assert status == 0, err
    plain, swapped = read(tmp_path / "out")["models"]
    assert [plain["label"], swapped["label"]] == ["tiny", "tiny, entmax 1.5"]
    model = sv.load_model(tiny_model)
    x = sv.load_image(photos / "a.jpg", sv.preprocessing(model))
    handles = ({}, {"normalizer": "entmax", "layers": None})
    for found, swap in zip((plain, swapped), handles, strict=True):
        (record,) = [r for r in found["photos"] if r["source"] == str(photos / "a.jpg")]
        handle = sv.swap_attention(model, **swap) if swap else None
        for block in range(3):
            weights = sv.attention_maps(model, x, block)  # (1, H, N, N)
            entropy = torch.special.entr(weights).sum(-1).mean().item()
            assert record["entropy"][block] == pytest.approx(entropy, abs=1e-5)
            assert record["relative_entropy"][block] == pytest.approx(entropy / math.log(weights.shape[-1]), abs=1e-5)
            assert record["support_share"][block] == pytest.approx((weights > 0).double().mean().item(), abs=1e-6)
            with torch.no_grad():
                raw, normed = (sv.features(model, x, layer=block, norm=norm) for norm in (False, True))
            (expected,) = token_statistics(raw, normed)
            for name in TOKENS:
                if expected[name] is not None:
                    assert record[name][block] == pytest.approx(expected[name], abs=1e-5)
        if handle is not None:
            handle.restore()
    assert plain["mean"]["support_share"] == [1, 1, 1] and max(swapped["mean"]["support_share"]) < 1
    rows = torch.tensor([r["patch_norm"] for r in plain["photos"]], dtype=torch.float64)
    assert plain["mean"]["patch_norm"] == pytest.approx(rows.mean(0).tolist()) and len(rows) == 5
    assert plain["missing"].keys() == {"register_norm"} and "tiny, entmax 1.5" in out
    assert (tmp_path / "out" / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (tmp_path / "out" / "pictures").iterdir()] == ["a.png"]


def test_a_second_run_takes_what_is_kept(run, photos, tiny_model, tmp_path, monkeypatch):
    arguments = ("diagnose", photos, "--model", tiny_model, "--out", tmp_path / "out", "--pictures", 0)
    assert run(*arguments)[0] == 0
    first = read(tmp_path / "out")

    def broken(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr("selectivit.cli.diagnosis.diagnose_photo", broken)
    assert run(*arguments)[0] == 0
    assert read(tmp_path / "out")["models"] == first["models"]
    for more in (("--size", 40), ("--outlier-factor", 3)):
        with pytest.raises(AssertionError, match="computed again"):
            run(*arguments, *more)
    (photos / "b.png").write_bytes((photos / "sub" / "d.png").read_bytes())
    assert run(*arguments)[0] == 0  # known by its content, wherever it lies


def test_an_interrupted_run_keeps_its_photos(run, photos, tiny_model, tmp_path, monkeypatch):
    from selectivit.cli import diagnosis

    real, count = diagnosis.diagnose_photo, []

    def stops(*arguments, **options):
        if len(count) == 3:
            raise KeyboardInterrupt
        count.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr("selectivit.cli.diagnosis.diagnose_photo", stops)
    arguments = ("diagnose", photos, "--model", tiny_model, "--out", tmp_path / "out", "--pictures", 0)
    assert run(*arguments)[0] == 130
    (file,) = (tmp_path / "out" / "kept").iterdir()
    assert len([line for line in file.read_text().splitlines() if line]) == 3
    count.clear()
    assert run(*arguments)[0] == 0 and len(count) == 2


def test_bad_photos_are_skipped(run, photos, tiny_model, tmp_path):
    (photos / "broken.jpg").write_bytes(b"nothing")
    status, _, err = diagnose(run, tmp_path, photos, "nowhere.jpg", "--model", tiny_model)
    content = read(tmp_path / "out")
    assert status == 1 and len(content["models"][0]["photos"]) == 5 and len(content["skipped"]) == 2
    assert "nowhere.jpg does not exist" in err and "broken.jpg" in err
    status, _, err = diagnose(run, tmp_path, photos / "broken.jpg", "--model", tiny_model)
    assert status == 2 and "none of the 1 photos can be used" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--outlier-factor", 1), "over 1"), (("--pictures", -1), "--pictures of 0 or more"), (("--size", 0), "size")],
)
def test_what_cannot_be(run, photos, tiny_model, tmp_path, options, told):
    status, _, err = run("diagnose", photos, "--model", tiny_model, "--out", tmp_path / "out", *options)
    assert status == 2 and told in err


def test_a_folder_of_checkpoints_is_a_line_each(run, photos, tiny_model, tmp_path):
    import shutil

    for step in (10, 9):
        shutil.copytree(tiny_model, tmp_path / "run" / f"step-{step}")
    status, _, err = diagnose(run, tmp_path, photos / "a.jpg", "--model", tmp_path / "run", "--model", tiny_model)
    assert status == 0, err
    assert [m["label"] for m in read(tmp_path / "out")["models"]] == ["step-9", "step-10", "tiny"]
    with pytest.raises(ValueError, match="neither a model"):
        model_names([str(photos)])


def test_models_may_stand_in_a_file_of_options(run, photos, tiny_model, tmp_path):
    (tmp_path / "options.json").write_text(json.dumps({"model": [tiny_model], "paths": [str(photos / "a.jpg")]}))
    status, _, err = run("diagnose", "--config", tmp_path / "options.json", "--out", tmp_path / "out", "--pictures", 0)
    assert status == 0, err
    assert [m["model"] for m in read(tmp_path / "out")["models"]] == [tiny_model]
    assert model_names(tiny_model) == [tiny_model]


def test_short_names_grow_until_they_differ(tmp_path):
    for name in ("a/x/best", "b/x/best"):
        (tmp_path / name).mkdir(parents=True)
    assert short_names([str(tmp_path / "a/x/best"), str(tmp_path / "b/x/best")]) == ["a/x/best", "b/x/best"]


def timm_model(**options):
    timm = pytest.importorskip("timm")
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    return timm.models.VisionTransformer(**(settings | options))


def transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, num_register_tokens=2
    )
    return transformers.Dinov2WithRegistersModel(config)


def open_clip_model():
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "head_width": 16}
    return open_clip.model.CLIP(16, vision, {"width": 16, "heads": 2, "layers": 1})


def torchvision_model():
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 48)


def veca_model():
    return sv.create_model(
        "veca_tiny_patch14", patch_size=8, dim=32, depth=3, num_heads=2, hidden_dim=24, num_cores=6, image_size=32
    )


HOSTS = {
    "timm": (timm_model, {"register_norm"}),
    "timm with registers": (lambda: timm_model(reg_tokens=2), set()),
    "timm without CLS": (
        lambda: timm_model(class_token=False, global_pool="avg", fc_norm=False),
        {"register_norm", "cls_norm", "cls_similarity"},
    ),
    "transformers": (transformers_model, set()),
    "open_clip": (open_clip_model, {"register_norm"}),
    "torchvision": (torchvision_model, {"register_norm"}),
    "VECA": (veca_model, set()),
}


@pytest.mark.parametrize("name", HOSTS)
def test_every_host_has_what_it_has_and_says_what_not(name):
    build, missing = HOSTS[name]
    torch.manual_seed(0)
    found = diagnose_photo(build().eval(), torch.randn(1, 3, 32, 48)).record
    assert found["missing"].keys() == missing and all(found["missing"].values()) and found["grid"] == [4, 6]
    for quantity in (*TOKENS, *ATTENTION):
        values = found[quantity]
        assert values is None if quantity in missing else len(values) == 3 and all(map(math.isfinite, values))
    assert found["note"] == (CORE_ROWS if name == "VECA" else None)


def test_vecas_attention_is_that_of_its_cores_at_the_budget():
    torch.manual_seed(0)
    model, x = veca_model().eval(), torch.randn(1, 3, 32, 48)
    found = diagnose_photo(model, x, num_cores=4).record
    with torch.no_grad():
        maps = model(x, 4, maps=(1,)).core_maps[0]  # (1, H, 4, 24)
    shares = maps / maps.sum(-1, keepdim=True)
    assert maps.shape[2] == 4
    assert found["entropy"][1] == pytest.approx(torch.special.entr(shares).sum(-1).mean().item(), abs=1e-5)


def test_a_veca_model_beside_a_swap_is_shown_as_it_is(run, photos, tmp_path):
    veca_model().save_pretrained(tmp_path / "veca")
    status, out, err = diagnose(run, tmp_path, photos / "a.jpg", "--model", tmp_path / "veca", "--normalizer", "entmax")
    assert status == 0, err
    content = read(tmp_path / "out")
    assert [m["label"] for m in content["models"]] == ["veca"]
    assert any("cannot be swapped" in note for note in content["notes"]) and CORE_ROWS in out
