"""k-NN and linear probes against scikit-learn, lightly and plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from selectivit.data.seeding import derived_seed
from selectivit.eval.fitting import FitSettings, Keeping, fit
from selectivit.eval.knn import accuracies, knn_probe, knn_votes
from selectivit.eval.linear import SgdSettings, logistic_fit, logistic_probe, sgd_probe


def blobs(count, width, classes, seed=0, spread=1.0):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=draw)
    return centres[labels] + spread * torch.randn(count, width, generator=draw), labels


@given(st.integers(1, 12), st.integers(2, 7), st.integers(0, 1000), st.sampled_from([0.07, 0.5]))
def test_votes_are_scikit_learns(k, classes, seed, temperature):
    neighbors = pytest.importorskip("sklearn.neighbors")
    bank, labels = blobs(12, 5, classes, seed)
    queries, _ = blobs(6, 5, classes, seed + 1)
    sk = neighbors.KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp(-d / temperature))
    sk.fit(bank.double().numpy(), labels.numpy())
    (votes,) = knn_votes(bank, labels, queries, ks=[k], temperature=temperature, num_classes=classes)
    shares = votes / votes.sum(1, keepdim=True)
    expected = torch.zeros_like(shares)
    expected[:, torch.from_numpy(sk.classes_)] = torch.from_numpy(sk.predict_proba(queries.double().numpy())).float()
    torch.testing.assert_close(shares, expected, atol=2e-4, rtol=2e-3)


def test_predictions_are_lightlys():
    benchmarking = pytest.importorskip("lightly.utils.benchmarking")
    bank, labels = blobs(80, 6, 5, spread=2.0)
    queries, _ = blobs(40, 6, 5, seed=3, spread=2.0)
    normed = F.normalize(bank), F.normalize(queries)
    found = knn_votes(bank, labels, queries, ks=[5, 20], temperature=0.07, num_classes=5)
    for k, votes in zip((5, 20), found, strict=True):
        theirs = benchmarking.knn_predict(normed[1], normed[0].t(), labels, num_classes=5, knn_k=k, knn_t=0.07)
        assert torch.equal(votes.argsort(1, descending=True), theirs)


def test_chunks_of_queries_change_nothing(monkeypatch):
    bank, labels = blobs(50, 4, 3)
    queries, _ = blobs(30, 4, 3, seed=1)
    whole = knn_votes(bank, labels, queries, ks=[7], temperature=0.07, num_classes=3)[0]
    alone = [knn_votes(bank, labels, q[None], ks=[7], temperature=0.07, num_classes=3)[0] for q in queries]
    torch.testing.assert_close(torch.cat(alone), whole)


def test_knn_probe_tells_each_k_and_what_it_left_out():
    x, y = blobs(30, 4, 6, spread=0.1)
    found = knn_probe(x, y, x, y, ks=[1, 10, 100], num_classes=6)
    assert [row["k"] for row in found["rows"]] == [1, 10] and found["left_out_k"] == [100]
    assert found["rows"][0]["top1"] == 1.0 and found["rows"][0]["top5"] == 1.0
    with pytest.raises(ValueError, match="expected --k of 1 to the 30 training photos"):
        knn_probe(x, y, x, y, ks=[100], num_classes=6)
    with pytest.raises(ValueError, match="temperature above 0"):
        knn_probe(x, y, x, y, ks=[1], temperature=0.0, num_classes=6)


def test_accuracies_are_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = torch.randn(50, 8), torch.arange(50) % 8
    found = accuracies(scores, labels)
    assert found["top1"] == pytest.approx(metrics.accuracy_score(labels, scores.argmax(1)))
    top5 = metrics.top_k_accuracy_score(labels.numpy(), scores.double().numpy(), k=5)
    assert found["top5"] == pytest.approx(top5) and "top5" not in accuracies(scores[:, :4], labels % 4)


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_logistic_regression_is_scikit_learns(strength):
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = blobs(120, 6, 4, spread=2.0)
    weights, biases = logistic_fit(x.double(), y, 4, strength)
    sk = linear_model.LogisticRegression(C=strength, max_iter=5000, tol=1e-9).fit(x.double().numpy(), y.numpy())
    np.testing.assert_allclose(weights.numpy(), sk.coef_, atol=1e-4)
    shift = biases.numpy() - sk.intercept_  # a constant on all biases changes no probability
    np.testing.assert_allclose(shift, shift.mean(), atol=1e-4)


def test_logistic_probe_chooses_on_training_photos_alone():
    x, y = blobs(200, 6, 4, spread=1.5)
    val, truth = blobs(80, 6, 4, seed=1, spread=1.5)
    found = logistic_probe(x, y, val, truth, 4, strengths=[1e-4, 1.0, 100.0])
    assert found == logistic_probe(x, y, val, truth, 4, strengths=[1e-4, 1.0, 100.0])
    wrong = logistic_probe(x, y, val, (truth + 1) % 4, 4, strengths=[1e-4, 1.0, 100.0])
    assert wrong["held_out"] == found["held_out"] and wrong["best"]["c"] == found["best"]["c"]
    assert found["best"]["c"] == max(found["held_out"], key=lambda row: row["top1"])["c"]
    alone = logistic_probe(x, y, val, truth, 4, strengths=[1.0])
    sk = pytest.importorskip("sklearn.linear_model").LogisticRegression(C=1.0, max_iter=5000, tol=1e-9)
    sk.fit(F.normalize(x).numpy(), y.numpy())
    assert alone["best"]["top1"] == pytest.approx(sk.score(F.normalize(val).numpy(), truth.numpy()), abs=0.013)
    with pytest.raises(ValueError, match="expected --strength above 0"):
        logistic_fit(x, y, 4, 0.0)


def plain_sgd(x, y, classes, lr, settings):
    """DINO's loop as its authors write it, for one rate."""
    head = torch.nn.Linear(x.shape[1], classes)
    draw = torch.Generator().manual_seed(derived_seed(settings.seed, "weights"))
    with torch.no_grad():
        head.weight.copy_(0.01 * torch.randn(classes, x.shape[1], generator=draw))
        head.bias.zero_()
    optimizer = torch.optim.SGD(head.parameters(), lr * settings.batch_size / 256, momentum=0.9, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs, eta_min=0)
    for epoch in range(settings.epochs):
        shuffle = torch.Generator().manual_seed(derived_seed(settings.seed, "order", epoch))
        for pick in torch.randperm(len(x), generator=shuffle).split(settings.batch_size):
            loss = F.cross_entropy(head(x[pick]), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return head


def test_every_rate_trains_as_dinos_own_loop():
    x, y = blobs(50, 6, 5, spread=1.5)
    val, truth = blobs(40, 6, 5, seed=1, spread=1.5)
    settings = SgdSettings(epochs=6, batch_size=16, rates=(0.01, 0.3, 3.0), seed=2)
    found = sgd_probe(lambda epoch: (x, y), val, truth, 5, settings)
    expected = [accuracies(plain_sgd(x, y, 5, lr, settings)(val), truth) for lr in settings.rates]
    assert [{k: v for k, v in row.items() if k != "lr"} for row in found["rows"]] == expected
    assert found["best"]["top1"] == max(row["top1"] for row in expected)
    assert found == sgd_probe(lambda epoch: (x, y), val, truth, 5, settings)


def test_each_epoch_sees_its_own_view():
    x, y = blobs(20, 4, 3)
    seen = []

    def views(epoch):
        seen.append(epoch)
        return x + epoch, y

    sgd_probe(views, x, y, 3, SgdSettings(epochs=4, batch_size=8, rates=(0.1,)))
    assert seen == [0, 0, 1, 2, 3]  # the first also tells how many photos there are


def test_a_rate_that_runs_away_leaves_the_others_alone():
    x, y = blobs(40, 6, 3, spread=0.3)
    settings = SgdSettings(epochs=8, batch_size=10, rates=(0.5, 3e39))
    found = sgd_probe(lambda epoch: (x, y), x, y, 3, settings)
    assert found["rows"][1].get("diverged") and found["best"]["lr"] == 0.5 and found["best"]["top1"] > 0.9
    only = sgd_probe(lambda epoch: (x, y), x, y, 3, SgdSettings(epochs=8, batch_size=10, rates=(0.5,)))
    assert only["rows"][0] == found["rows"][0]
    with pytest.raises(ValueError, match="rates above 0"):
        SgdSettings(rates=(0.0,))


FIT = FitSettings(steps=9, lr=0.1, weight_decay=0.01, warmup=2, decay="cosine", batch_size=4)


def trained(tmp_path, stop=None, identity="a", keep=True):
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    steps = []

    def loss_at(step):
        if step == stop:
            raise KeyboardInterrupt
        steps.append(step)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        return head(x).square().mean()

    keeping = Keeping(tmp_path / "unfinished.pt" if keep else None, identity, every=2)
    try:
        fit(head, loss_at, FIT.optimizer(head), FIT.factor, FIT.steps, keeping)
    except KeyboardInterrupt:
        pass
    return head.state_dict(), steps


def test_a_stopped_training_gives_the_same_head(tmp_path):
    whole, _ = trained(tmp_path, keep=False)
    _, first = trained(tmp_path, stop=5)
    resumed, rest = trained(tmp_path)
    assert first == [0, 1, 2, 3, 4] and rest == [4, 5, 6, 7, 8]  # from the checkpoint after four steps
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not (tmp_path / "unfinished.pt").exists()


def test_a_checkpoint_of_other_settings_is_not_gone_on_with(tmp_path):
    trained(tmp_path, stop=5, identity="b")
    assert trained(tmp_path)[1] == list(range(9))
    (tmp_path / "unfinished.pt").write_bytes(b"damaged")
    assert trained(tmp_path)[1] == list(range(9))


def test_losses_that_are_not_finite_are_told():
    head = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="the loss is nan at step 0"):
        fit(head, lambda step: head(torch.ones(1, 1)).sum() * float("nan"), FIT.optimizer(head), FIT.factor, 1)
    for wrong in ({"steps": 0}, {"lr": 0.0}, {"decay": "step"}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="expected"):
            FitSettings(**{**FIT.__dict__, **wrong})
