"""Crops that come again, and the teacher's tokens of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import few_steps, make_student, make_teacher, quick, write_photos

from selectivit.data.photos import PhotoFiles
from selectivit.data.training_images import Sample, TrainingImages, collate
from selectivit.data.writing import WriteError
from selectivit.train import teacher_cache
from selectivit.train.distill import distill
from selectivit.train.pair import Pair
from selectivit.train.settings import DistillSettings, Running
from selectivit.train.teacher_cache import TeacherCache

VIEWS = 2


def settings(**given):
    return quick(12, **{"views": VIEWS, "holdout": 0, "validate_every": 12, **given})


def weights(out):
    return load_file(out / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("views")
    distill(make_student(), make_teacher(), [photos], out, settings(), Running(workers=0))
    return out


@pytest.fixture
def taught(monkeypatch):
    """How many crops the teacher has seen."""
    seen, plain = [], Pair.teach
    monkeypatch.setattr(Pair, "teach", lambda self, images: (seen.append(len(images)), plain(self, images))[1])
    return seen


def test_each_photo_has_as_many_crops_as_asked_for_and_they_come_in_turns(photos):
    images = TrainingImages(PhotoFiles(sorted(map(str, photos.iterdir()))), 0, views=VIEWS)
    count = len(images.photos)
    epochs = [{found.slot: found.image for found in (images[Sample(e * count + i, 28)] for i in range(count))}
              for e in range(2 * VIEWS)]  # fmt: skip
    assert sorted(epochs[0].keys() | epochs[1].keys()) == list(range(VIEWS * count))
    for first, again in zip(epochs[:VIEWS], epochs[VIEWS:], strict=True):
        assert first.keys() == again.keys() and all(torch.equal(first[slot], again[slot]) for slot in first)
    assert not torch.equal(epochs[0][0], epochs[1][1])


def test_cached_tokens_are_the_teachers(photos, tmp_path):
    images = TrainingImages(PhotoFiles(sorted(map(str, photos.iterdir()))), 0, views=VIEWS)
    pair = Pair(make_student(), make_teacher(), sizes=[28], grid="refuse")
    for _ in range(2):
        cache = TeacherCache(tmp_path, {"seed": 0}, pair)
        for first in (0, 3, 6):
            batch = collate([images[Sample(first + i, 28)] for i in range(5)])
            found, wanted = cache.teach(batch), pair.teach(batch.images)
            torch.testing.assert_close(found.global_token, wanted.global_token, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(found.patch_tokens, wanted.patch_tokens, atol=2e-3, rtol=2e-3)
            assert found.grid == wanted.grid and torch.equal(found.patch_tokens, cache.teach(batch).patch_tokens)
        cache.close()


def test_the_teacher_sees_each_crop_once_over_runs(whole, photos, tmp_path, taught):
    running = Running(workers=0, teacher_cache=tmp_path / "shared")
    one = replace(few_steps(12), stages=few_steps(12, sizes=(28,)).stages)
    distill(make_student(), make_teacher(), [photos], tmp_path / "a", settings(schedule=one), running)
    first, crops = sum(taught), VIEWS * 12
    assert crops <= first <= crops + 12 * (teacher_cache.CHUNK_CPU - 1)  # filled up to whole chunks
    assert len(taught) < 12
    distill(make_student(), make_teacher(), [photos], tmp_path / "b", settings(schedule=one), running)
    assert sum(taught) == first
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)
    distill(make_student(), make_teacher(), [photos], tmp_path / "c", settings(schedule=one, seed=1), running)
    assert sum(taught) == 2 * first and len(list((tmp_path / "shared").iterdir())) == 2


def test_it_learns_what_it_would_learn_without_the_cache(photos, tmp_path, whole, monkeypatch):
    def uncached(self, batch):
        return self.pair.teach(batch.images)

    monkeypatch.setattr(TeacherCache, "teach", uncached)
    distill(make_student(), make_teacher(), [photos], tmp_path, settings(), Running(workers=0))
    found, wanted = weights(tmp_path), weights(whole)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=2e-2, rtol=2e-2, msg=name)


@pytest.mark.parametrize("step", [2, 7])
def test_a_stopped_run_ends_with_the_same_weights(step, whole, photos, tmp_path):
    class Stop(Exception):
        pass

    def stop(report):
        if report.step == step:
            raise Stop

    running = Running(workers=0, checkpoint_every=2)
    with pytest.raises(Stop):
        distill(make_student(), make_teacher(), [photos], tmp_path, settings(), running, tell=stop)
    distill(make_student(), make_teacher(), [photos], tmp_path, settings(), running)
    found, wanted = weights(tmp_path), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_edited_photo_is_taught_anew(tmp_path):
    photos = write_photos(tmp_path / "photos", 3)
    images = TrainingImages(PhotoFiles(sorted(map(str, photos.iterdir()))), 0, augment=False, views=1)
    pair = Pair(make_student(), make_teacher(), sizes=[28], grid="refuse")
    cache = TeacherCache(tmp_path / "cache", {}, pair)
    before = cache.teach(collate([images[Sample(i, 28)] for i in range(3)]))
    cache.close()
    edited = str(images.photos.name(images[Sample(1, 28)].slot))
    Image.new("RGB", (80, 60), (200, 10, 10)).save(edited)
    batch = collate([images[Sample(i, 28)] for i in range(3)])
    cache = TeacherCache(tmp_path / "cache", {}, pair)
    after = cache.teach(batch)
    torch.testing.assert_close(after.patch_tokens, pair.teach(batch.images).patch_tokens, atol=2e-3, rtol=2e-3)
    assert torch.equal(after.patch_tokens[0], before.patch_tokens[0])
    assert not torch.allclose(after.patch_tokens[1], before.patch_tokens[1], atol=1e-1)
    cache.close()


def test_marks_that_were_not_made_safe_are_not_believed(tmp_path, photos, taught):
    images = TrainingImages(PhotoFiles(sorted(map(str, photos.iterdir()))), 0, views=1)
    pair = Pair(make_student(), make_teacher(), sizes=[28], grid="refuse")
    batch = collate([images[Sample(i, 28)] for i in range(8)])
    TeacherCache(tmp_path, {}, pair).teach(batch)  # never closed: as after a loss of power
    again = TeacherCache(tmp_path, {}, pair)
    again.teach(batch)
    assert sum(taught) == 16
    again.close()
    TeacherCache(tmp_path, {}, pair).teach(batch)
    assert sum(taught) == 16


def test_tokens_are_on_the_disk_before_their_marks(tmp_path, photos, monkeypatch):
    images = TrainingImages(PhotoFiles(sorted(map(str, photos.iterdir()))), 0, views=1)
    cache = TeacherCache(tmp_path, {}, Pair(make_student(), make_teacher(), sizes=[28], grid="refuse"))
    cache.teach(collate([images[Sample(i, 28)] for i in range(3)]))
    done, real = [], (os.pwrite, os.fsync)
    monkeypatch.setattr(os, "pwrite", lambda *given: (done.append("mark"), real[0](*given))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("safe"), real[1](file))[1])
    cache.close()
    assert done == ["safe", "mark", "mark", "mark"]


def test_a_full_disk_is_told(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache.os, "pwrite", lambda file, data, place: len(data) - 1)
    with pytest.raises(WriteError, match="No space left on device"):
        distill(make_student(), make_teacher(), [photos], tmp_path, settings(), Running(workers=0))


def test_bad_numbers_of_crops_are_refused():
    with pytest.raises(ValueError, match="expected views of at least 1, got 0"):
        DistillSettings(views=0)


def test_other_numbers_of_crops_are_another_run(whole, photos):
    assert json.loads((whole / "run.json").read_text())["settings"]["views"] == VIEWS
    with pytest.raises(ValueError, match="views was 2, now 3"):
        distill(make_student(), make_teacher(), [photos], whole, settings(views=3), Running(workers=0))
