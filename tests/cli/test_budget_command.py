"""`selectivit budget`: closeness to the teacher against cost."""

import json

import pytest
import torch

from selectivit.eval.cost import veca_cost


@pytest.fixture
def student(tmp_path):
    from selectivit.models.create import create_model

    torch.manual_seed(0)
    model = create_model(
        "veca_tiny_patch14", patch_size=8, dim=16, depth=2, num_heads=2, hidden_dim=24, num_cores=6, out_dim=32
    )
    model.save_pretrained(tmp_path / "student")
    return model


def budget(run, photos, tiny_model, tmp_path, *more):
    options = ("--teacher", tiny_model, "--size", 32, "--repeats", 1, "--precision", "float32", "--device", "cpu")
    return run("budget", tmp_path / "student", photos, "--out", tmp_path / "out", *options, *more)


def test_every_budget_is_compared_and_one_recommended(run, photos, tiny_model, tmp_path, student):
    status, out, err = budget(run, photos, tiny_model, tmp_path)
    assert status == 0, err
    content = json.loads((tmp_path / "out" / "budget.json").read_text())
    points = content["budgets"]
    assert [point["num_cores"] for point in points] == [1, 2, 4, 6] and content["photos"] == 5
    assert [p["gflops"] for p in points] == [veca_cost(student.config, (32, 32), n).flops / 1e9 for n in (1, 2, 4, 6)]
    assert all(point["ms"] > 0 and -1 <= point["patch_cosine"] <= 1 for point in points)
    assert f"recommended: {content['recommended']} cores" in out
    assert (tmp_path / "out" / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_quality_is_the_cosine_to_the_teacher(run, photos, tiny_model, tmp_path, student):
    from selectivit import features, load_model
    from selectivit.data.photos import open_photos
    from selectivit.data.training_images import centre_crops
    from selectivit.train.tokens import normalise

    budget(run, photos, tiny_model, tmp_path, "--budgets", 2, "--photos", 3)
    (point,) = json.loads((tmp_path / "out" / "budget.json").read_text())["budgets"]
    crops, _ = centre_crops(open_photos([photos])[0], range(3), 32)
    teacher, cosines = load_model(tiny_model), []
    from selectivit import preprocessing

    for crop in crops:
        images = [normalise(crop[None], (e := preprocessing(m)).mean, e.std) for m in (student, teacher)]
        with torch.no_grad():
            ours = student.eval()(images[0], 2).projected_patches
            theirs = features(teacher, images[1]).patch_tokens
        cosines.append(torch.cosine_similarity(ours, theirs, dim=-1).mean())
    assert point["patch_cosine"] == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-5)


def test_limits_and_what_cannot_be(run, photos, tiny_model, tmp_path, student):
    status, _, err = budget(run, photos, tiny_model, tmp_path, "--max-gflops", 1e-9)
    assert status == 1 and "no budget keeps the limit" in err
    assert json.loads((tmp_path / "out" / "budget.json").read_text())["recommended"] is None
    gflops = veca_cost(student.config, (32, 32), 2).flops / 1e9
    status, out, _ = budget(run, photos, tiny_model, tmp_path, "--max-gflops", gflops, "--budgets", "2,6")
    assert status == 0 and "recommended: 2 cores" in out
    for more, told in ((("--budgets", "0,2"), "budgets of 1 to 6 cores"), (("--budgets", "x"), "commas between")):
        status, _, err = budget(run, photos, tiny_model, tmp_path, *more)
        assert status == 2 and told in err
    status, _, err = run("budget", tiny_model, photos, "--teacher", tiny_model)
    assert status == 2 and "without cores" in err
    status, _, err = budget(run, tmp_path / "nothing", tiny_model, tmp_path)
    assert status == 2 and "no photo that can be read" in err


def test_a_limit_of_nothing_is_refused_at_once(run, photos, tiny_model, tmp_path, student):
    status, _, err = budget(run, photos, tiny_model, tmp_path, "--max-ms", -1)
    assert status == 2 and "expected --max-ms above 0" in err
