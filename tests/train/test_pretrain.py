"""DINO's pretraining in this process: it learns, goes on where it was, tests by k-NN, and tells of a collapse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("lightly")
pytest.importorskip("timm")

from dino_runs import MINI, quick
from tiny_runs import write_photos

import selectivit as sv
from selectivit.data.multi_crop import Crops
from selectivit.train import self_distillation
from selectivit.train.dino_settings import PRESETS
from selectivit.train.pretrain import pretrain
from selectivit.train.settings import Running
from selectivit.train.step_module import NotFiniteError

HERE = Running(workers=0, checkpoint_every=2)


class Stop(Exception):
    """Ends a run from outside, as a crash would: nothing is saved on the way."""


def stop_at(step):
    def tell(report):
        if report.step == step:
            raise Stop

    return tell


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Two classes: reddish and bluish photos."""
    from PIL import Image

    root = tmp_path_factory.mktemp("labelled")
    for place, name in enumerate(("red", "blue")):
        write_photos(root / name, 10)
        for path in sorted((root / name).iterdir()):
            image = Image.open(path).point(lambda value: value // 3)
            shift = [0, 0, 0]
            shift[2 * place] = 160
            Image.merge("RGB", [c.point(lambda v, s=s: v + s) for c, s in zip(image.split(), shift, strict=True)]).save(
                path
            )
    return root


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return pretrain([photos], out, quick(), HERE)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns_and_its_teacher_loads(preset, photos, tmp_path):
    reports, steps = [], 24
    settings = quick(steps, batch_size=6, **PRESETS[preset])
    result = pretrain([photos], tmp_path, settings, HERE, card_note="CC0", tell=reports.append)
    far = [report.values["divergence"] for report in reports]
    assert [report.step for report in reports] == list(range(1, steps + 1))
    assert sum(far[-8:]) / 8 < 0.9 * sum(far[:2]) / 2 and not result.warnings and not result.skipped
    for name in ("teacher_entropy", "mean_entropy", "information", "feature_spread"):
        assert all(0 < report.values[name] < 1 for report in reports)
    model = sv.load_model(result.final)
    assert model.config.drop_path == 0 and model.config.image_size == 32
    assert all(getattr(model.config, name) == value or value == "third" for name, value in PRESETS[preset].items())
    assert model.config.specialization == (1 if preset == "specialization" else 0)
    card = (result.final / "README.md").read_text()
    assert "CC0" in card and "DINO" in card and "load_model(FOLDER)" in card and "Distilled" not in card
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "done"
    assert list((tmp_path / "logs").glob("events*")) and not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_run_stopped_anywhere_ends_with_the_same_weights(step, whole, photos, tmp_path):
    with pytest.raises(Stop):
        pretrain([photos], tmp_path, quick(), HERE, tell=stop_at(step))
    result = pretrain([photos], tmp_path, quick(), HERE)
    assert same(result.final, whole.final) and result.values == whole.values


def test_parts_of_a_step_add_up_to_it(whole, photos, tmp_path):
    """Centre, entropies and stochastic depth do not depend on how a batch is split."""
    result = pretrain([photos], tmp_path, quick(accumulate=2), HERE)
    for name, wanted in weights(whole.final).items():
        torch.testing.assert_close(weights(result.final)[name], wanted, atol=1e-5, rtol=1e-4, msg=name)
    for name, wanted in whole.values.items():
        assert result.values[name] == pytest.approx(wanted, rel=1e-3), name


def test_workers_change_nothing(whole, photos, tmp_path):
    assert same(pretrain([photos], tmp_path, quick(), replace(HERE, workers=2)).final, whole.final)


def test_a_finished_run_is_kept_and_other_settings_are_refused(whole, photos):
    out = whole.final.parent
    again = pretrain([photos], out, quick(), HERE)
    assert again.kept and again.values == whole.values
    with pytest.raises(ValueError, match=r"other settings \(attention was .softmax., now .entmax15.\)"):
        pretrain([photos], out, quick(attention="entmax15"), HERE)


def test_the_teacher_is_the_running_mean_of_the_student_and_never_trained(photos, tmp_path):
    from selectivit.train.checkpoints import WholeCheckpoints

    def state(folder):
        return WholeCheckpoints().load_checkpoint(folder / "checkpoint.ckpt")["state_dict"]

    pretrain([photos], tmp_path / "still", quick(3, teacher_momentum=1.0), HERE)
    pretrain([photos], tmp_path / "equal", quick(3, teacher_momentum=0.0), replace(HERE, checkpoint_every=1))
    still = state(tmp_path / "still")
    name = "blocks.0.attn.qkv.weight"
    assert not torch.equal(still[f"pair.teacher.{name}"], still[f"pair.student.{name}"])
    from selectivit.train.dino_pair import DinoPair

    assert torch.equal(still[f"pair.teacher.{name}"], DinoPair(quick(3)).teacher.state_dict()[name])
    with pytest.raises(Stop):
        pretrain(
            [photos],
            tmp_path / "equal2",
            quick(30, teacher_momentum=0.0),
            replace(HERE, checkpoint_every=1),
            tell=stop_at(2),
        )
    equal = state(tmp_path / "equal2")
    torch.testing.assert_close(equal[f"pair.teacher.{name}"], equal[f"pair.student.{name}"], atol=1e-3, rtol=0.1)


def test_the_last_layer_is_frozen_in_the_first_epoch(photos, tmp_path):
    from selectivit.train.checkpoints import WholeCheckpoints
    from selectivit.train.dino_pair import DinoPair

    name = "pair.student_head.last_layer.weight_v"
    start = DinoPair(quick()).student_head.last_layer.weight_v
    for step, frozen in ((2, True), (3, False)):  # six steps are three epochs
        with pytest.raises(Stop):
            pretrain([photos], tmp_path / str(step), quick(), replace(HERE, checkpoint_every=1), tell=stop_at(step))
        state = WholeCheckpoints().load_checkpoint(tmp_path / str(step) / "checkpoint.ckpt")["state_dict"]
        assert torch.equal(state[name], start) == frozen


def test_photos_in_sub_folders_are_tested_by_nearest_neighbours(labelled, tmp_path):
    reports = []
    settings = quick(6, validate_every=3, knn_k=3, knn_queries=4, knn_bank=12)
    result = pretrain([labelled], tmp_path, settings, HERE, tell=reports.append)
    assert result.validation["knn_top1"] == 1.0 and result.best is not None and not result.notes
    assert [("knn_top1" in report.validation) for report in reports] == [False, False, True, True, True, True]
    record = json.loads((tmp_path / "run.json").read_text())["settings"]["nearest_neighbours"]
    assert record == {"classes": 2, "bank": 12, "queries": 4, "k": 3, "temperature": 0.07}
    assert "knn_top1" in (result.best / "README.md").read_text()


def test_nearest_neighbours_need_classes(labelled, photos, tmp_path):
    assert pretrain([photos], tmp_path / "a", quick(1), HERE).notes == [
        "the photos have no classes: no k-NN on the way"
    ]
    for where in (photos, photos.parent, labelled / "red"):  # no sub-folder, a single one
        with pytest.raises(ValueError, match="two sub-folders or more"):
            pretrain([where], tmp_path / "b", quick(1, knn="on"), HERE)
    assert not pretrain([labelled], tmp_path / "c", quick(1, knn="off"), HERE).notes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"teacher_temperature": 5.0, "warmup_teacher_temperature": 5.0}, "nearly uniform"),
        (
            {"center_momentum": 1.0, "teacher_temperature": 1e-3, "warmup_teacher_temperature": 1e-3, "out_dim": 2},
            "one and the same",
        ),
    ],
)
def test_a_collapse_is_told_early_and_once(settings, told, photos, tmp_path):
    reports = []
    result = pretrain([photos], tmp_path, quick(30, **settings), HERE, tell=reports.append)
    found = [warning for warning in result.warnings if told in warning]
    assert len(found) == 1 and "may help" in found[0]
    first = next(report.step for report in reports if report.warnings)
    assert first <= 21  # the centre's loss takes ten steps to show, and ten more count as lasting
    assert json.loads((tmp_path / "run.json").read_text())["result"]["warnings"] == list(result.warnings)


def test_numbers_that_are_not_finite_stop_it_with_the_last_good_checkpoint_kept(photos, tmp_path, monkeypatch):
    real, calls = self_distillation.StepwiseDINOLoss.forward, []

    def broken(self, *arguments, **options):
        calls.append(1)
        loss = real(self, *arguments, **options)
        return loss * float("nan") if len(calls) == 4 else loss

    with monkeypatch.context() as patch:
        patch.setattr(self_distillation.StepwiseDINOLoss, "forward", broken)
        with pytest.raises(NotFiniteError, match="not finite at step 3"):
            pretrain([photos], tmp_path, quick(), HERE)
    state = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())


def test_photos_that_cannot_be_read_are_skipped_and_none_is_an_error(tmp_path):
    folder = write_photos(tmp_path / "photos", 6)
    (folder / "03.png").write_bytes(b"no photo")
    result = pretrain([folder, tmp_path / "none"], tmp_path / "out", quick(4), HERE)
    assert set(result.skipped) == {str(folder / "03.png"), f"{tmp_path / 'none'} does not exist"}
    assert json.loads((tmp_path / "out" / "skipped.json").read_text())["count"] == 2
    (tmp_path / "bad").mkdir()
    with pytest.raises(ValueError, match="no photo to train on"):
        pretrain([tmp_path / "bad"], tmp_path / "b", quick(), HERE)
    (tmp_path / "bad" / "a.png").write_bytes(b"no photo")
    with pytest.raises(ValueError, match="none of the 1 photos can be read"):
        pretrain([tmp_path / "bad"], tmp_path / "b", quick(), HERE)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("crops", "told"),
    [
        (Crops(36, local_size=16), "image_size in whole patches of 8 px, got 36: 32 is one"),
        (Crops(32, local_size=20), "small crops in whole patches of 8 px, got 20: 16 is one"),
    ],
)
def test_crops_that_are_no_whole_patches_are_refused(crops, told, photos, tmp_path):
    with pytest.raises(ValueError, match=told):
        pretrain([photos], tmp_path / "out", quick(crops=crops), HERE)
    assert not (tmp_path / "out").exists()


def test_without_small_crops_and_in_bf16(photos, tmp_path):
    result = pretrain([photos], tmp_path, quick(4, crops=Crops(32, num_local=0), precision="bf16"), HERE)
    assert result.values["loss"] > 0


def test_tar_shards_are_read(photos, tmp_path):
    import tarfile

    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for path in sorted(photos.iterdir())[number::2]:
                tar.add(path, arcname=f"{'ab'[number]}/{path.name}")
    shards = [tmp_path / "0.tar", tmp_path / "1.tar"]
    result = pretrain(shards, tmp_path / "out", quick(3), HERE)
    assert not result.skipped and (tmp_path / "out" / "final" / "model.safetensors").is_file()


def test_the_presets_are_of_vit_small():
    from selectivit.train.dino_settings import DinoSettings

    assert set(PRESETS) == {"cls", "register4", "specialization", "entmax15"}
    assert {DinoSettings(**preset).model for preset in PRESETS.values()} == {"dino_vit_small_patch16"} != {MINI}
