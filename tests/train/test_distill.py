"""The whole loop in this process: it learns, goes on where it was, and keeps what was good when something fails."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import make_student, make_teacher, quick, same, write_photos

from selectivit import Calibration, features, load_model, swap_attention
from selectivit.models.veca import Veca
from selectivit.swap.learn_scale import LearntScale
from selectivit.train import agreement
from selectivit.train import keeper as keeping
from selectivit.train.distill import distill
from selectivit.train.distillation import NotFiniteError
from selectivit.train.settings import Running

HERE = Running(workers=0, checkpoint_every=2)


class Stop(Exception):
    """Ends a run from outside, as a crash would: nothing is saved on the way."""


def stop_at(step):
    def tell(report):
        if report.step == step:
            raise Stop

    return tell


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """An unbroken run and its student."""
    out, student = tmp_path_factory.mktemp("whole"), make_student()
    return out, student, distill(student, make_teacher(), [photos], out, quick(), HERE)


def test_it_learns_and_writes_what_it_says(photos, tmp_path):
    reports = []
    settings = quick(40, batch_size=8, validate_every=20)
    result = distill(
        make_student(), make_teacher(), [photos], tmp_path, settings, HERE, card_note="CC0", tell=reports.append
    )
    losses = [report.values["loss"] for report in reports]
    assert [report.step for report in reports] == list(range(1, 41))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert result.validation["patch_cosine"] > 0.3 and not result.skipped
    card = (result.final / "README.md").read_text()
    assert "CC0" in card and "photos seen: 320" in card and "load_model(FOLDER)" in card
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "done"
    assert list((tmp_path / "logs").glob("events*"))
    assert not list(tmp_path.rglob(".*"))


def test_the_written_students_are_the_trained_ones(whole):
    _, student, result = whole
    assert same(Veca.from_pretrained(result.final), student)
    assert result.best is not None and Veca.from_pretrained(result.best).config == student.config
    assert result.best_validation["step"] in (3, 6)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_run_stopped_anywhere_ends_with_the_same_weights(step, whole, photos, tmp_path):
    with pytest.raises(Stop):
        distill(make_student(), make_teacher(), [photos], tmp_path, quick(), HERE, tell=stop_at(step))
    student = make_student()
    result = distill(student, make_teacher(), [photos], tmp_path, quick(), HERE)
    assert same(student, whole[1])
    assert (result.validation, result.best_validation) == (whole[2].validation, whole[2].best_validation)
    one, other = (load_file(found / "model.safetensors") for found in (result.best, whole[2].best))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_student_stays_the_best_over_a_stop(photos, tmp_path, monkeypatch):
    falling = iter(0.9 - 0.1 * i for i in range(9))
    monkeypatch.setattr(agreement, "means", lambda sums: {"global_cosine": 0.0, "patch_cosine": next(falling)})
    settings = quick(validate_every=1)
    with pytest.raises(Stop):
        distill(make_student(), make_teacher(), [photos], tmp_path, settings, HERE, tell=stop_at(3))
    result = distill(make_student(), make_teacher(), [photos], tmp_path, settings, HERE)
    assert result.best_validation == {"global_cosine": 0.0, "patch_cosine": 0.9, "step": 0}
    # It was compared before the first step, and nothing bettered it: the best is the student as it came.
    assert same(Veca.from_pretrained(result.best), make_student())
    assert "photos seen: 0" in (result.best / "README.md").read_text()


def test_a_new_student_is_not_compared_before_it_learns(photos, tmp_path, monkeypatch):
    falling = iter(0.9 - 0.1 * i for i in range(9))
    monkeypatch.setattr(agreement, "means", lambda sums: {"global_cosine": 0.0, "patch_cosine": next(falling)})
    tiny = {"dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 24, "num_cores": 8}
    result = distill("veca_tiny_patch14", make_teacher(), [photos], tmp_path, quick(2), HERE, student_arguments=tiny)
    assert result.best_validation["step"] == 2 and result.best_validation["patch_cosine"] == 0.9


def test_parts_of_a_step_add_up_to_it(whole, photos, tmp_path):
    student = make_student()
    with pytest.raises(Stop):
        distill(student, make_teacher(), [photos], tmp_path, quick(accumulate=2), HERE, tell=stop_at(3))
    student = make_student()
    result = distill(student, make_teacher(), [photos], tmp_path, quick(accumulate=2), HERE)
    assert result.validation["patch_cosine"] == pytest.approx(whole[2].validation["patch_cosine"], abs=1e-4)
    for (name, a), b in zip(student.named_parameters(), whole[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-2, msg=name)


def test_workers_change_nothing(whole, photos, tmp_path):
    student = make_student()
    distill(student, make_teacher(), [photos], tmp_path, quick(), replace(HERE, workers=2))
    assert same(student, whole[1])


def test_a_finished_run_is_kept_and_other_settings_are_refused(whole, photos):
    out, _, result = whole
    before = (out / "final" / "model.safetensors").stat().st_mtime_ns
    again = distill(make_student(), make_teacher(), [photos], out, quick(), HERE)
    assert again.kept and again.validation == result.validation
    assert (out / "final" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"other settings \(seed was 0, now 1\)"):
        distill(make_student(), make_teacher(), [photos], out, quick(seed=1), HERE)
    with pytest.raises(ValueError, match=r"student.weights_sha256 was"):
        distill(make_student(num_cores=4), make_teacher(), [photos], out, quick(), HERE)


def test_numbers_that_are_not_finite_stop_it_with_the_last_good_checkpoint_kept(photos, tmp_path, monkeypatch):
    from selectivit.train import distillation

    real, calls = distillation.distillation_losses, []

    def broken(*arguments):
        calls.append(1)
        parts = real(*arguments)
        return {**parts, "loss": parts["loss"] * float("nan")} if len(calls) == 4 else parts

    with monkeypatch.context() as patch:
        patch.setattr(distillation, "distillation_losses", broken)
        with pytest.raises(NotFiniteError, match="not finite at step 3"):
            distill(make_student(), make_teacher(), [photos], tmp_path, quick(), HERE)
    state = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert state["global_step"] == 2
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["state"] == "stopped" and content["result"]["step"] == 2
    assert "not finite at step 3" in content["result"]["reason"]
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())


def test_a_full_disk_is_told_and_the_last_good_checkpoint_kept(photos, tmp_path, monkeypatch):
    from selectivit.data.writing import WriteError

    real, saves = torch.save, []

    def full(content, file, *rest):
        saves.append(1)
        if len(saves) == 2:
            file.write(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        return real(content, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(WriteError, match=r"checkpoint.ckpt: No space left on device; free some space"):
            distill(make_student(), make_teacher(), [photos], tmp_path, quick(), HERE)
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["global_step"] == 2
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_is_named(photos, tmp_path):
    with pytest.raises(Stop):
        distill(make_student(), make_teacher(), [photos], tmp_path, quick(), HERE, tell=stop_at(3))
    with open(tmp_path / "checkpoint.ckpt", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=r"checkpoint.ckpt cannot be read .*delete it"):
        distill(make_student(), make_teacher(), [photos], tmp_path, quick(), HERE)


def test_photos_that_cannot_be_read_are_skipped_and_listed(tmp_path):
    folder = write_photos(tmp_path / "photos", 10)
    (folder / "03.png").write_bytes(b"no photo")
    settings = quick(8, holdout=0)
    result = distill(make_student(), make_teacher(), [folder, tmp_path / "none"], tmp_path / "out", settings, HERE)
    assert set(result.skipped) == {str(folder / "03.png"), f"{tmp_path / 'none'} does not exist"}
    assert result.best is None and result.validation == {}
    listed = json.loads((tmp_path / "out" / "skipped.json").read_text())
    assert listed["count"] == 2 and "not a picture" in json.dumps(listed)


def test_no_photo_is_an_error(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match="no photo to train on"):
        distill(make_student(), make_teacher(), [tmp_path / "photos"], tmp_path / "out", quick(), HERE)
    (tmp_path / "photos" / "a.png").write_bytes(b"no photo")
    with pytest.raises(ValueError, match="none of the 1 photos can be read"):
        distill(make_student(), make_teacher(), [tmp_path / "photos"], tmp_path / "out", quick(), HERE)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused_before_any_step(photos, tmp_path):
    other = make_teacher(patch_size=7)
    with pytest.raises(ValueError, match="2 x 2 patches and the teacher 4 x 4"):
        distill(make_student(), other, [photos], tmp_path / "a", quick(), HERE)
    result = distill(make_student(), other, [photos], tmp_path / "b", quick(2, grid="interpolate"), HERE)
    assert result.final.is_dir()


def test_a_student_of_another_width_gets_a_head(photos, tmp_path):
    student = make_student(out_dim=None)
    result = distill(student, make_teacher(), [photos], tmp_path, quick(3), HERE)
    head = load_file(result.final / "distillation_head.safetensors")
    assert head["weight"].shape == (24, 16) and Veca.from_pretrained(result.final).config.out_dim is None


def test_a_swapped_teacher_copy_learns_its_factors(photos, tmp_path, monkeypatch):
    """A softmax ViT becomes a sparse one with the same features: its factors are trained and saved as a calibration."""
    student = make_teacher()
    start = torch.tensor([0.3, 0.7])
    swap_attention(student, alpha=1.5, layers=None, scale=start)
    settings = quick(12, learn_scale=True, lr=2e-2, optimizer="adamw")
    result = distill(student, make_teacher(), [photos], tmp_path, settings, HERE)
    calibration = Calibration.load(result.final / "calibration")
    factors = calibration.factors["blocks.0.attn"]
    assert factors.shape == (2,) and (factors - start).abs().min() > 1e-3
    assert 0 < calibration.mean_support() < 1
    (code,) = re.findall(r"```python\n(.*?)```", (result.final / "README.md").read_text(), re.DOTALL)
    names = {}
    with monkeypatch.context() as inside:
        inside.chdir(result.final)
        exec(code, names)  # the card's own words
    again = load_model(result.final)
    images = torch.randn(1, 3, 56, 56)
    with torch.no_grad(), swap_attention(again, alpha=1.5, layers=None, scale=calibration):
        found, wanted = features(again, images).map, features(student.eval(), images).map
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(features(names["model"], images).map, found)
        assert not torch.allclose(found, features(make_teacher(), images).map, atol=1e-3)


def test_factors_to_learn_need_a_swap(photos, tmp_path):
    with pytest.raises(ValueError, match="swap_attention first"):
        distill(make_teacher(), make_teacher(), [photos], tmp_path, quick(learn_scale=True), HERE)
    model = make_teacher()
    swap_attention(model, "random_mask")
    with pytest.raises(ValueError, match="entmax or sparsemax"):
        LearntScale(model)


def test_gradients_reach_the_factors():
    model = make_teacher()
    swap_attention(model, alpha=1.5, layers=None, scale=0.5)
    learnt = LearntScale(model)
    model.double()
    images, weights = torch.randn(1, 3, 56, 56).double(), torch.randn(1, 24, 4, 4).double()

    def loss():
        learnt.put()
        return (features(model, images).map * weights).mean()

    loss().backward()
    gradient = learnt.logs[0].grad.clone()
    with torch.no_grad():
        learnt.logs[0] += torch.tensor([1e-2, 0.0])
        up = loss()
        learnt.logs[0] -= torch.tensor([2e-2, 0.0])
        down = loss()
    assert abs(gradient[0]) > 0
    torch.testing.assert_close((up - down) / 2e-2, gradient[0], rtol=0.02, atol=1e-7, check_dtype=False)


def test_bf16_runs_and_agrees_roughly(whole, photos, tmp_path):
    result = distill(make_student(), make_teacher(), [photos], tmp_path, quick(precision="bf16"), HERE)
    assert result.validation["patch_cosine"] == pytest.approx(whole[2].validation["patch_cosine"], abs=0.05)
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_signals_are_given_back(photos, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    distill(make_student(), make_teacher(), [photos], tmp_path, quick(2), HERE)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture
def terminal():
    """SIGINT as a terminal's programs have it: those in the background start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_at_the_end_of_the_step_and_the_run_goes_on(whole, photos, tmp_path, terminal):
    def interrupt(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        distill(
            make_student(),
            make_teacher(),
            [photos],
            tmp_path,
            quick(),
            replace(HERE, checkpoint_every=99),
            tell=interrupt,
        )
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["global_step"] == 4
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["state"], content["result"]) == ("stopped", {"step": 4, "reason": "interrupted"})
    student = make_student()
    distill(student, make_teacher(), [photos], tmp_path, quick(), HERE)
    assert same(student, whole[1])
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "done"


def test_a_note_on_a_finished_run_is_put_into_its_cards(photos, tmp_path):
    result = distill(make_student(), make_teacher(), [photos], tmp_path, quick(2), HERE)
    cards = [folder / "README.md" for folder in (result.final, result.best)]
    before = [card.read_text() for card in cards]
    assert all("Not stated" in text for text in before)
    for note in ("CC-BY-4.0", "Research only\n\nsee ## Terms\n\nof the photos"):
        assert distill(make_student(), make_teacher(), [photos], tmp_path, quick(2), HERE, card_note=note).kept
        for card, text in zip(cards, before, strict=True):
            assert card.read_text() == text.partition("Not stated")[0] + note + "\n"
    cards[0].write_text("mine")
    with pytest.raises(ValueError, match="no heading '## Terms'"):
        distill(make_student(), make_teacher(), [photos], tmp_path, quick(2), HERE, card_note="CC0")


def test_the_report_is_frozen():
    with pytest.raises(AttributeError):
        keeping.StepReport(1, 2, 3.0, 1.0, {}, {}).step = 2


def test_a_batch_that_cannot_be_split_leaves_nothing_behind(photos, tmp_path):
    with pytest.raises(ValueError, match="divide evenly"):
        distill(make_student(), make_teacher(), [photos], tmp_path / "run", quick(batch_size=4, accumulate=3))
    assert not (tmp_path / "run").exists()
