"""`selectivit distill` from its options to the files it leaves."""

import json

import pytest

pytest.importorskip("lightning")

QUICK = ("--steps", 2, "--batch-size", 2, "--holdout", 1, "--workers", 0, "--validate-every", 1, "--device", "cpu")


def distill(run, photos, tiny_model, out, *more):
    return run("distill", photos, "--teacher", tiny_model, "--out", out, "--grid", "interpolate", *QUICK, *more)


def test_a_new_student_is_distilled_and_can_be_loaded(run, photos, tiny_model, tmp_path):
    from selectivit.models.veca import Veca

    more = ("--num-cores", 8, "--budgets", "2,8", "--card-note", "CC0")
    status, out, err = distill(run, photos, tiny_model, tmp_path / "out", *more)
    assert status == 0, err
    assert "on held-out photos: global cosine" in out and str(tmp_path / "out" / "final") in out
    assert "step 2/2, loss" in err and "images/s" in err
    student = Veca.from_pretrained(tmp_path / "out" / "final")
    assert student.config.num_cores == 8 and student.config.out_dim == 32
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["budgets"] == {"budgets": [2, 8], "weights": [1.0, 1.0]}
    assert "CC0" in (tmp_path / "out" / "best" / "README.md").read_text()
    status, out, err = distill(run, photos, tiny_model, tmp_path / "out", *more)
    assert status == 0 and "finished before" in err and "have the new note" in err
    status, out, err = distill(run, photos, tiny_model, tmp_path / "out", *more[:-2], "--card-note", "CC-BY")
    assert status == 0 and (tmp_path / "out" / "final" / "README.md").read_text().endswith("## Terms\n\nCC-BY\n")
    status, out, err = distill(run, photos, tiny_model, tmp_path / "out", *more[:-2])
    assert status == 0 and "stay as they are" in err
    status, _, err = distill(run, photos, tiny_model, tmp_path / "out", *more, "--seed", 1)
    assert status == 2 and "other settings" in err and "seed was 0, now 1" in err


def test_a_pretrained_student_becomes_sparse_and_keeps_its_factors(run, photos, tiny_model, tmp_path):
    from selectivit import Calibration, load_model, swap_attention

    (photos / "bad.jpg").write_text("no photo")
    sparse = ("--student", tiny_model, "--normalizer", "entmax", "--learn-scale", "true", "--holdout", 0)
    status, _, err = distill(run, photos, tiny_model, tmp_path / "out", *sparse, "--steps", 8)
    assert status == 1 and "skipped: " in err and "bad.jpg" in err
    calibration = Calibration.load(tmp_path / "out" / "final" / "calibration")
    assert len(calibration.factors) == 3
    with swap_attention(load_model(tmp_path / "out" / "final"), layers=None, scale=calibration) as swap:
        assert len(swap.replaced) == 3
    assert json.loads((tmp_path / "out" / "skipped.json").read_text())["count"] == 1


def test_what_cannot_be_is_said(run, photos, tiny_model, tmp_path):
    for more, told in (
        (("--learn-scale", "true"), "expected a swap for --learn-scale"),
        (("--student", tiny_model, "--num-cores", 4), "arguments (num_cores) are for new models alone"),
        (("--budgets", "2,x"), "expected numbers with commas between"),
        (("--budget-weights", "1"), "expected --budgets beside"),
        (("--grid", "refuse"), "patches and the teacher"),
        (("--schedule", "huge"), "expected schedule to be one of small, objects365"),
        (("--batch-size", 3, "--accumulate", 2), "2 parts divide evenly, got 3"),
        (("--student", "veca_tiny_patch15"), "veca_tiny_patch15"),
        (("--student", "veca_tiny_patch15", "--num-cores", 8), "expected one of veca_tiny_patch14"),
    ):
        status, _, err = distill(run, photos, tiny_model, tmp_path / "out", *more)
        assert status == 2 and told in err, (more, err)
    status, _, err = distill(run, "nowhere", tiny_model, tmp_path / "out")
    assert status == 2 and "no photo to train on" in err


def test_what_is_refused_leaves_no_run_behind(run, photos, tiny_model, tmp_path):
    status, _, err = distill(run, photos, tiny_model, tmp_path / "out", "--num-cores", 8, "--budgets", "8,128")
    assert status == 2 and "budgets of up to 8 cores" in err
    assert not (tmp_path / "out" / "run.json").exists()
    status, _, err = distill(run, photos, tiny_model, tmp_path / "out", "--student", tiny_model, "--budgets", "8")
    assert status == 2 and "has no cores" in err


def test_a_pretrained_student_keeps_what_it_knows(run, photos, tiny_model, tmp_path):
    """Student and teacher are one model: at the rate of new students four steps would take it apart."""
    options = ("--student", tiny_model, "--steps", 4, "--precision", "float32")
    status, _, err = distill(run, photos, tiny_model, tmp_path / "out", *options)
    assert status == 0, err
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert content["settings"]["lr"] == 1e-5
    assert content["result"]["validation"]["patch_cosine"] > 0.999


def test_weights_may_be_read_by_whom_other_files_may(run, photos, tiny_model, tmp_path):
    assert distill(run, photos, tiny_model, tmp_path / "out", "--num-cores", 8)[0] == 0
    for name in ("final", "best"):
        modes = {path.stat().st_mode for path in (tmp_path / "out" / name).rglob("*") if path.is_file()}
        assert len(modes) == 1
