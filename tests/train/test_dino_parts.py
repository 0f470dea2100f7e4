"""DINO's schedules, loss, parameter groups, k-NN and the watch: against the authors' formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lightly")
pytest.importorskip("timm")

from dino_runs import quick

from selectivit.train.collapse import PATIENCE, CollapseWatch, Look, batch_sums
from selectivit.train.dino_loss import StepwiseDINOLoss
from selectivit.train.dino_pair import DinoPair
from selectivit.train.dino_schedule import DinoSchedule
from selectivit.train.dino_settings import DinoSettings
from selectivit.train.neighbours import knn_accuracy
from selectivit.train.self_distillation import split_decayed


def authors_cosine(base, final, steps, warmup=0):
    """`cosine_scheduler` of DINO's public code."""
    rise = np.linspace(0, base, warmup)
    places = np.arange(steps - warmup)
    fall = final + 0.5 * (base - final) * (1 + np.cos(np.pi * places / len(places)))
    return np.concatenate((rise, fall))


def test_schedules_are_the_authors_but_for_one_step():
    """lightly's reach their ends exactly and skip a warm-up's zero: that is one step's difference."""
    settings = DinoSettings(batch_size=64, epochs=100)
    schedule = DinoSchedule(settings, photos=64 * 50 + 3)
    assert schedule.steps == 5000
    for found, wanted in (
        (schedule.rate, authors_cosine(5e-4 * 64 / 256, 1e-6, 5000, 500)),
        (schedule.weight_decay, authors_cosine(0.04, 0.4, 5000)),
        (schedule.momentum, authors_cosine(0.996, 1, 5000)),
    ):
        most = np.abs(np.diff(wanted)).max()
        assert np.abs(np.array([found(step) for step in range(5000)]) - wanted).max() < 1.5 * most
    assert schedule.rate(499) == 5e-4 * 64 / 256 and schedule.rate(4999) == 1e-6 and schedule.momentum(4999) == 1
    assert schedule.last_layer_frozen(49) and not schedule.last_layer_frozen(50)


def test_steps_stretch_what_is_told_in_epochs():
    settings = DinoSettings(
        steps=1000, epochs=100, warmup_teacher_epochs=30, warmup_teacher_temperature=0.04, teacher_temperature=0.07
    )
    schedule = DinoSchedule(settings, photos=10)
    assert schedule.steps == 1000 and schedule.steps_of(10) == 100
    assert schedule.teacher_temperature(0) == 0.04 and schedule.teacher_temperature(150) == pytest.approx(0.055)
    assert schedule.teacher_temperature(300) == 0.07


def authors_loss(student, teacher, center, views, student_temperature, temperature):
    """`DINOLoss.forward` of DINO's public code."""
    students = (student / student_temperature).chunk(views)
    teachers = F.softmax((teacher - center) / temperature, dim=-1).chunk(2)
    losses = [
        torch.sum(-q * F.log_softmax(v, dim=-1), dim=-1).mean()
        for i, q in enumerate(teachers)
        for j, v in enumerate(students)
        if i != j
    ]
    return sum(losses) / len(losses)


@given(st.integers(1, 5), st.integers(2, 5), st.integers(2, 9))
def test_the_loss_is_the_authors(batch, views, out_dim):
    generator = torch.Generator().manual_seed(batch + 10 * views)
    student = torch.randn(views * batch, out_dim, generator=generator)
    teacher = torch.randn(2 * batch, out_dim, generator=generator)
    loss = StepwiseDINOLoss(out_dim, 0.1, 0.9)
    loss.move_center(torch.randn(out_dim, generator=generator))
    found = loss(list(teacher.split(batch)), list(student.split(batch)), teacher_temp=0.07)
    torch.testing.assert_close(found, authors_loss(student, teacher, loss.center[0], views, 0.1, 0.07))
    center = loss.center.clone()
    loss.move_center(teacher.mean(0))
    torch.testing.assert_close(loss.center, center * 0.9 + teacher.mean(0) * 0.1)


def test_biases_and_norms_are_not_decayed_and_the_rest_is():
    pair = DinoPair(quick(specialization=1, registers=2))
    decayed, plain = (set(map(id, group)) for group in split_decayed(pair))
    for part in (pair.student, pair.student_head):
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                small = name.endswith(".bias") or ".norm" in name or name.startswith("norm") or "gamma" in name
                assert (id(parameter) in plain) == small and (id(parameter) in decayed) != small, name
    assert id(pair.student.reg_token) in decayed and id(pair.student_head.last_layer.weight_v) in decayed
    assert not {id(p) for p in (*pair.teacher.parameters(), *pair.teacher_head.parameters())} & (decayed | plain)
    assert len(decayed) + len(plain) == len(pair.trained())


def test_groups_of_one_size_go_through_the_student_at_once():
    pair = DinoPair(quick(drop_path=0.0))
    calls = []
    pair.student.register_forward_hook(lambda _m, inputs, _out: calls.append(tuple(inputs[0].shape)))
    large = torch.randint(0, 256, (2, 3, 3, 32, 32), dtype=torch.uint8)
    small = torch.randint(0, 256, (4, 3, 3, 16, 16), dtype=torch.uint8)
    out = pair.study(large, small)
    assert out.shape == (18, 64) and calls == [(6, 3, 32, 32), (12, 3, 16, 16)]
    alone = pair.study(large[:, 1:2], small[:, 1:2])
    torch.testing.assert_close(out.unflatten(0, (6, 3))[:, 1], alone, atol=1e-5, rtol=1e-4)


def test_stochastic_depth_follows_the_photos_numbers():
    pair = DinoPair(quick(drop_path=0.5)).train()
    large = torch.randint(0, 256, (2, 2, 3, 32, 32), dtype=torch.uint8)
    small = torch.randint(0, 256, (1, 2, 3, 16, 16), dtype=torch.uint8)
    numbers = torch.ones(len(pair.drops), 3, 2)
    kept = pair.study(large, small, numbers)
    numbers[-1, 1, 0] = 0.0  # the last half-block of photo 0 in view 1
    changed = (pair.study(large, small, numbers) - kept).abs().amax(-1).unflatten(0, (3, 2))
    assert changed[1, 0] > 1e-4 and (changed > 1e-6).sum() == 1


def test_neighbours_are_those_of_the_authors_vote():
    generator = torch.Generator().manual_seed(0)
    bank, queries = (F.normalize(torch.randn(n, 6, generator=generator), dim=-1) for n in (50, 30))
    known, wanted = (torch.randint(0, 4, (n,), generator=generator) for n in (50, 30))
    votes = torch.zeros(30, 4)
    for place, (near, index) in enumerate(zip(*(queries @ bank.T).topk(7), strict=True)):
        for cosine, other in zip(near, index, strict=True):
            votes[place, known[other]] += math.exp(cosine / 0.07)
    expected = (votes.argmax(-1) == wanted).double().mean()
    assert knn_accuracy(bank, known, queries, wanted, 4, 7, 0.07) == pytest.approx(float(expected))
    assert knn_accuracy(bank, known, bank, known, 4, 1, 0.02) == 1.0
    more, all_of_them = (knn_accuracy(bank, known, queries, wanted, 4, k, 0.07) for k in (500, 50))
    assert more == all_of_them


def test_looks_are_the_entropies_of_the_outputs_and_add_up_over_parts():
    generator = torch.Generator().manual_seed(0)
    outputs, features = torch.randn(12, 8, generator=generator), torch.randn(12, 5, generator=generator)
    chances = (outputs * 3).softmax(-1)
    look = Look.at(batch_sums(outputs, chances, features), 8)
    entropy = torch.distributions.Categorical(chances).entropy().mean() / math.log(8)
    mean_entropy = torch.distributions.Categorical(chances.mean(0)).entropy() / math.log(8)
    assert look.teacher_entropy == pytest.approx(float(entropy), rel=1e-5)
    assert look.mean_entropy == pytest.approx(float(mean_entropy), rel=1e-5)
    assert look.information == pytest.approx(float(mean_entropy - entropy), rel=1e-4)  # K is less than the photos
    variance = F.normalize(features, dim=-1).var(0, correction=0).sum()
    assert look.feature_spread == pytest.approx(float(variance.sqrt()), rel=1e-5)
    parts = [batch_sums(outputs[i : i + 4], chances[i : i + 4], features[i : i + 4]) for i in (0, 4, 8)]
    assert Look.at(sum(parts), 8).information == pytest.approx(look.information, rel=1e-5)
    torch.testing.assert_close(look.mean_output, outputs.mean(0))


def look(entropy=0.5, information=0.3, spread=0.5):
    return Look(torch.zeros(4), entropy, 0.9, information, spread)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (look(entropy=0.999, information=0.0), "nearly uniform"),
        (look(information=0.001), "one and the same output"),
        (look(spread=0.001), "features of all photos"),
    ],
)
def test_the_watch_waits_for_what_lasts_and_tells_it_once(bad, words):
    watch = CollapseWatch(grace=5)
    assert not any(watch.judge(bad, step) for step in range(PATIENCE - 1))
    assert not watch.judge(look(), PATIENCE)  # a good look in between
    told = [watch.judge(bad, step) for step in range(100, 100 + 3 * PATIENCE)]
    assert [bool(text) for text in told] == [place == PATIENCE - 1 for place in range(3 * PATIENCE)]
    assert words in told[PATIENCE - 1] and told[PATIENCE - 1].startswith(f"step {100 + PATIENCE}: ")
    patient = CollapseWatch(grace=50)
    assert not any(patient.judge(bad, step) for step in range(50)) and patient.judge(bad, 50)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": "veca_tiny_patch16"}, "expected a model dino_vit"),
        ({"precision": "fp8"}, "precision to be one of"),
        ({"knn": "maybe"}, "knn to be one of auto, on, off"),
        ({"batch_size": 0}, "batch_size of at least 1"),
        ({"steps": 0}, "steps of at least 1"),
        ({"lr": 0.0}, "lr above 0"),
        ({"lr": float("nan")}, "lr above 0"),
        ({"knn_temperature": 0.01}, "knn_temperature of 0.02 or more"),
        ({"clip": -1.0}, "clip of 0 or more"),
        ({"teacher_momentum": 1.5}, "teacher_momentum of 0 to 1"),
        ({"warmup_epochs": 300.0}, "warmup_epochs of 0 to 100 epochs"),
    ],
)
def test_settings_that_cannot_be(wrong, told):
    with pytest.raises(ValueError, match=told):
        DinoSettings(**wrong)


def test_the_defaults_are_dinos():
    found = DinoSettings()
    assert (found.out_dim, found.hidden_dim, found.bottleneck_dim) == (65536, 2048, 256)
    assert (found.crops.global_size, found.crops.local_size, found.crops.num_local) == (224, 96, 8)
    assert (found.student_temperature, found.teacher_temperature, found.center_momentum) == (0.1, 0.04, 0.9)
    assert (found.lr, found.min_lr, found.warmup_epochs, found.clip) == (5e-4, 1e-6, 10, 3.0)
    assert (found.weight_decay, found.weight_decay_end, found.teacher_momentum) == (0.04, 0.4, 0.996)
    assert (found.drop_path, found.freeze_last_layer, found.knn_k, found.knn_temperature) == (0.1, 1, 20, 0.07)
