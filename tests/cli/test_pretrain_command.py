"""`selectivit pretrain` from its options to the files it leaves."""

import json

import pytest

pytest.importorskip("lightning")
pytest.importorskip("lightly")
pytest.importorskip("timm")

QUICK = ("--model", "dino_vit_tiny_patch16", "--global-size", 32, "--local-size", 16, "--num-local", 1, "--steps", 2)
QUICK += ("--epochs", 2, "--warmup-epochs", 1, "--batch-size", 2, "--out-dim", 64, "--hidden-dim", 32, "--workers", 0)
QUICK += ("--device", "cpu", "--precision", "float32")


def pretrain(run, photos, out, *more):
    return run("pretrain", photos, "--out", out, *QUICK, *more)


def test_a_preset_is_trained_and_its_teacher_loads(run, photos, tmp_path):
    from selectivit import load_model

    (photos / "bad.jpg").write_text("no photo")
    options = ("--preset", "entmax15", "--registers", 2, "--specialization", 3, "--steps", 4, "--card-note", "CC0")
    status, out, err = pretrain(run, photos, tmp_path / "out", *options)
    assert status == 1 and "skipped: " in err and "bad.jpg" in err, err
    assert "no k-NN on the way" in err and "step 4/4, loss" in err and "images/s" in err and "min left" in err
    assert "teacher's entropy" in out and "information" in out and str(tmp_path / "out" / "final") in out
    model = load_model(tmp_path / "out" / "final")
    config = model.config
    assert (config.attention, config.registers, config.specialization, config.image_size) == ("entmax15", 2, 3, 32)
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["crops"]["local_scale"] == [0.05, 0.4] and settings["teacher_momentum"] == 0.996
    assert "Lightning" not in err and "litlogger" not in err
    status, _, err = pretrain(run, photos, tmp_path / "out", *options)
    assert "finished before" in err
    status, _, err = pretrain(run, photos, tmp_path / "out", *options, "--seed", 1)
    assert status == 2 and "seed was 0, now 1" in err


def test_a_folder_of_classes_is_tested_by_nearest_neighbours(run, photos, tmp_path):
    for place, path in enumerate(sorted(photos.rglob("*.*"))):
        target = tmp_path / "classes" / "ab"[place % 2] / f"{place}{path.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    status, out, err = pretrain(run, tmp_path / "classes", tmp_path / "out", "--validate-every", 1, "--knn", "on")
    assert status == 0, err
    assert "k-NN " in out and str(tmp_path / "out" / "best") in out and "images/s, k-NN " in err


def test_what_cannot_be_is_said(run, photos, tmp_path):
    for more, told in (
        (("--preset", "sparse"), "expected --preset to be one of cls, register4, specialization, entmax15"),
        (("--model", "vit_small_patch16"), "expected a model dino_vit"),
        (("--model", "dino_vit_huge_patch16"), "unknown model 'dino_vit_huge_patch16'"),
        (("--global-size", 40), "image_size in whole patches of 16 px, got 40"),
        (("--local-size", 20), "small crops in whole patches of 16 px, got 20"),
        (("--local-scale", "0.4"), "--local-scale 0.4,1"),
        (("--attention", "soft"), "unknown normalizer 'soft'"),
        (("--attention", "0.5"), "alpha"),
        (("--specialization", "most"), "third, half"),
        (("--knn", "on"), "two sub-folders or more"),
        (("--batch-size", 3, "--accumulate", 2), "2 parts divide evenly, got 3"),
        (("--lr", 0), "lr above 0"),
    ):
        status, _, err = pretrain(run, photos, tmp_path / "out", *more)
        assert status == 2 and told in err, (more, err)
    status, _, err = pretrain(run, "nowhere", tmp_path / "out")
    assert status == 2 and "no photo to train on" in err
    assert not (tmp_path / "out" / "run.json").exists()
