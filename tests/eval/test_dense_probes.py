"""Segmentation and depth heads against torch, torchmetrics and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from probe_parts import table, tiny_model
from torch.nn import functional as F

from selectivit.data.depth import DepthData, DepthError
from selectivit.data.masks import IdTable
from selectivit.data.segmentation import SegmentationData
from selectivit.eval.crop_training import CropBatches, Crops, FrozenTokens, slide, windows
from selectivit.eval.depth import (
    DepthHead,
    cached_depth,
    depth_loss,
    gradient_loss,
    mean_only,
    score_depth,
    sig_loss,
    train_depth_head,
)
from selectivit.eval.depth_crops import train_depth_on_crops, whole_photo_depth
from selectivit.eval.depth_metrics import depth_metrics, mean_metrics, scored_pixels
from selectivit.eval.fitting import FitSettings
from selectivit.eval.segmentation import DenseHead, Labelled, Scores, patch_labels, score_head, soft_loss, train_head
from selectivit.eval.segmentation_crops import score_sliding, train_on_crops

CPU = torch.device("cpu")
QUICK = FitSettings(steps=60, lr=0.05, weight_decay=1e-4, warmup=6, decay="cosine", batch_size=64)


class Masks(SegmentationData):
    """Masks in memory."""

    def __init__(self, masks, classes, images=None):
        names = tuple(f"class {i}" for i in range(classes))
        pairs = tuple((f"photo {i}", None, None) for i in range(len(masks)))
        super().__init__("made", "folder", "val", names, tuple((n,) for n in names), "here", pairs, IdTable({0: 0}, ""))
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "images", images)

    def mask(self, i):
        if isinstance(self.masks[i], Exception):
            raise self.masks[i]
        return self.masks[i]

    def image(self, i):
        return self.images[i]


class Depths(DepthData):
    """Depth maps in memory."""

    def __init__(self, maps, images=None):
        super().__init__("made", "val", tuple((f"photo {i}", None, None) for i in range(len(maps))), 1000)
        object.__setattr__(self, "maps", maps)
        object.__setattr__(self, "images", images)

    def depth(self, i):
        if isinstance(self.maps[i], Exception):
            raise self.maps[i]
        return self.maps[i]

    def image(self, i):
        return self.images[i]


# --- segmentation ------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(st.integers(2, 5), st.integers(0, 99))
def test_scores_are_torchmetrics_and_scikit_learns(classes, seed):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(seed)
    scores, predicted, truth = Scores(tuple(map(str, range(classes))), 255), [], []
    for _ in range(3):
        logits = torch.randn(classes, 3, 4, generator=draw)
        mask = torch.randint(classes, (9, 7), generator=draw).byte()
        mask[0, :3] = 255
        scores.add(logits, mask)
        large = F.interpolate(logits[None], (9, 7), mode="bilinear", align_corners=False)[0].argmax(0)
        predicted.append(large[mask != 255])
        truth.append(mask[mask != 255].long())
    predicted, truth = torch.cat(predicted).numpy(), torch.cat(truth).numpy()
    found = scores.result()
    there = sorted(set(predicted) | set(truth))
    assert found.miou == pytest.approx(metrics.jaccard_score(truth, predicted, labels=there, average="macro"), abs=1e-6)
    assert found.pixel_accuracy == pytest.approx(metrics.accuracy_score(truth, predicted), abs=1e-6)
    each = dict(zip(there, metrics.jaccard_score(truth, predicted, labels=there, average=None), strict=True))
    for i in range(classes):
        assert found.iou[str(i)] == (pytest.approx(each[i], abs=1e-6) if i in each else None)


def test_classes_that_occur_nowhere_do_not_count():
    scores = Scores(("a", "b", "c"), 255)
    logits = torch.stack([torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)])
    scores.add(logits, torch.zeros(4, 4, dtype=torch.uint8))
    found = scores.result()
    assert found.miou == 1.0 and found.iou == {"a": 1.0, "b": None, "c": None}
    with pytest.raises(ValueError, match="no labelled pixel was scored"):
        Scores(("a",), 255).result()


def test_patch_labels_are_pixels_of_the_patch():
    mask = torch.arange(12 * 16).view(12, 16)
    found = patch_labels(mask, (3, 4))  # patches of 4 x 4 pixels: all of them
    blocks = mask.unflatten(0, (3, 4)).unflatten(2, (4, 4)).transpose(1, 2).flatten(0, 1).flatten(1)
    assert torch.equal(found, blocks)
    half = patch_labels(torch.tensor([[0, 1], [2, 3]]), (1, 1))
    assert sorted(half[0].tolist()) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_the_loss_is_torchs_cross_entropy_over_pixels():
    logits, labels = torch.randn(5, 4), torch.randint(4, (5, 16))
    labels[0], labels[1, :7] = 255, 255
    spread = logits[:, None].expand(-1, 16, -1).flatten(0, 1)
    expected = F.cross_entropy(spread, labels.flatten(), ignore_index=255)
    torch.testing.assert_close(soft_loss(logits, labels.byte(), 255), expected)
    assert soft_loss(logits[:1], labels[:1].byte(), 255) == 0


def test_the_head_is_batch_norm_and_a_1x1_convolution():
    head = DenseHead(6, 3, seed=0)
    maps = torch.randn(2, 6, 4, 5)
    norm, conv = torch.nn.BatchNorm2d(6), torch.nn.Conv2d(6, 3, 1)
    norm.load_state_dict(head[0].state_dict())
    conv.load_state_dict({"weight": head[1].weight[:, :, None, None], "bias": head[1].bias})
    torch.testing.assert_close(head.logits(maps), conv(norm(maps)))
    assert torch.equal(DenseHead(6, 3, seed=0)[1].weight, head[1].weight)
    assert not torch.equal(DenseHead(6, 3, seed=1)[1].weight, head[1].weight)


def scene(count, seed=0, noise=1.0, classes=3):
    """Maps whose patches tell their class, up to noise, with masks at another size."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, 5, generator=torch.Generator().manual_seed(99))
    maps, masks = [], []
    for i in range(count):
        grid = (4, 5) if i % 2 else (5, 4)
        labels = torch.randint(classes, grid, generator=draw)
        maps.append(centres[labels].permute(2, 0, 1) + noise * torch.randn(5, *grid, generator=draw))
        masks.append(labels.repeat_interleave(6, 0).repeat_interleave(6, 1).byte())
    return maps, masks


def test_a_trained_head_is_as_good_as_scikit_learns():
    linear_model = pytest.importorskip("sklearn.linear_model")
    maps, masks = scene(8)
    labelled = Labelled(Masks(masks, 3), table(maps))
    head = train_head(labelled, QUICK, seed=0, device=CPU)
    rows = torch.cat([m.flatten(1).t() for m in maps]).half().float()
    truth = torch.cat([patch_labels(k, tuple(m.shape[1:]))[:, 0] for m, k in zip(maps, masks, strict=True)])
    sk = linear_model.LogisticRegression(C=100, max_iter=2000).fit(rows.numpy(), truth.numpy())
    agree = (torch.from_numpy(sk.predict(rows.numpy())) == head(rows).argmax(1)).float().mean()
    assert agree > 0.95
    again = train_head(labelled, QUICK, seed=0, device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))
    other = train_head(labelled, QUICK, seed=1, device=CPU)
    assert not torch.equal(head[1].weight, other[1].weight)


def test_scoring_is_at_the_masks_own_resolution():
    metrics = pytest.importorskip("sklearn.metrics")
    maps, masks = scene(6, noise=1.5)
    head = train_head(Labelled(Masks(masks, 3), table(maps)), QUICK, seed=0, device=CPU)
    val_maps, val_masks = scene(4, seed=5, noise=1.5)
    val_masks[1][:, :4] = 255
    found = score_head(head, Labelled(Masks(val_masks, 3), table(val_maps)), CPU)
    predicted, truth = [], []
    for features, mask in zip(val_maps, val_masks, strict=True):
        logits = head.logits(features[None].half().float())
        large = F.interpolate(logits, mask.shape, mode="bilinear", align_corners=False)[0].argmax(0)
        predicted += large[mask != 255].tolist()
        truth += mask[mask != 255].tolist()
    assert found.miou == pytest.approx(metrics.jaccard_score(truth, predicted, average="macro"), abs=1e-6)
    assert 0.3 < found.miou < 1 and found.photos == 4


def test_bad_masks_are_named_and_void_ones_refused():
    maps, masks = scene(4)
    broken = Labelled(Masks([masks[0], DepthError("mask 1 is broken"), *masks[2:]], 3), table(maps))
    rows, _ = broken.patches()
    assert len(rows) == 60 and broken.problems == {"photo 1": "mask 1 is broken"}
    assert not ((rows >= 20) & (rows < 40)).any()
    void = Labelled(Masks([torch.full_like(mask, 255) for mask in masks], 3), table(maps))
    with pytest.raises(ValueError, match="no labelled pixel in the 4 masks of split 'val': all are void"):
        void.patches()


# --- crops and windows -------------------------------------------------------------------------------------------


@given(st.integers(4, 30), st.integers(4, 30), st.integers(1, 4), st.integers(1, 6))
def test_windows_cover_every_pixel(height, width, window, stride):
    stride = min(stride, window)
    seen = torch.zeros(height, width)
    for top, left in windows((height, width), (window, window), (stride, stride)):
        assert 0 <= top <= height - window and 0 <= left <= width - window
        seen[top : top + window, left : left + window] += 1
    assert seen.min() >= 1


def test_sliding_gives_back_what_is_local():
    image = torch.randn(3, 11, 17)
    found = slide(image, lambda x: 2 * x, (5, 6), (3, 4), batch_size=4)
    torch.testing.assert_close(found, 2 * image)


def picture(seed, size=(48, 40)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def test_batches_are_the_same_wherever_they_start():
    images = [picture(i) for i in range(3)]
    from selectivit.data.dense_crops import CropSettings

    def crops():
        read = lambda i: (images[i], torch.full((40, 48), i))  # noqa: E731
        return Crops(3, read, str, CropSettings((16, 16)), tiny_model(), seed=4)

    whole = CropBatches(crops(), 2, steps=5, workers=0)
    batches = [whole(step) for step in range(5)]
    late = CropBatches(crops(), 2, steps=5, workers=0)
    for step in (3, 4, 1):
        assert all(torch.equal(a, b) for a, b in zip(late(step), batches[step], strict=True))
    seen = torch.cat([labels[:, 0, 0] for _, labels in batches[:3]]).tolist()
    assert sorted(seen[:3]) == sorted(seen[3:]) == [0, 1, 2]  # every photo once an epoch


def test_frozen_tokens_put_blocks_and_cls_side_by_side():
    from selectivit.features import features

    model, x = tiny_model(), torch.randn(2, 3, 32, 40)
    found = FrozenTokens(model, (0, 2), "cls+patch")(x)
    with torch.no_grad():
        first, last = (features(model, x, layer=layer) for layer in (0, 2))
    expected = [t for f in (first, last) for t in (f.cls[:, :, None, None].expand(-1, -1, *f.grid), f.map)]
    torch.testing.assert_close(found, torch.cat(expected, 1))
    with pytest.raises(ValueError, match="has no class token"):
        FrozenTokens(tiny_model(class_token=False, global_pool="avg", fc_norm=False), (0,), "cls")(x)


def two_colours(count):
    """Photos of dark and bright halves, and masks of them."""
    images, masks = [], []
    for i in range(count):
        pixels = np.zeros((40, 48, 3), dtype=np.uint8)
        mask = np.zeros((40, 48), dtype=np.uint8)
        at = 8 * (1 + i % 4)
        pixels[:, at:], mask[:, at:] = 220, 1
        images.append(Image.fromarray(pixels))
        masks.append(torch.from_numpy(mask))
    return images, masks


def test_dinov2s_protocol_learns_and_repeats():
    images, masks = two_colours(4)
    data, front = Masks(masks, 2, images), FrozenTokens(tiny_model(), (0,), "patch")
    settings = FitSettings(steps=25, lr=0.05, weight_decay=1e-4, warmup=3, decay="linear", batch_size=4)
    head, problems = train_on_crops(data, front, 32, settings, seed=0)
    found, missed = score_sliding(head, data, front, 32, batch_size=3)
    assert found.miou > 0.8 and not problems and not missed
    again, _ = train_on_crops(data, front, 32, settings, seed=0)
    assert torch.equal(again[1].weight, head[1].weight)
    with pytest.raises(ValueError, match="a crop of 30 px does not fit"):
        train_on_crops(data, front, 30, settings, seed=0)


# --- depth -------------------------------------------------------------------------------------------------------


def test_depth_head_is_dinov2s():
    """Features scaled first and then a convolution, as DINOv2 writes it."""
    head, maps = DepthHead(6, 0.001, 10.0, seed=0), torch.randn(2, 6, 3, 4)
    conv = torch.nn.Conv2d(6, 256, 1)
    conv.load_state_dict({"weight": head.linear.weight[:, :, None, None], "bias": head.linear.bias})
    logits = conv(F.interpolate(maps, scale_factor=4, mode="bilinear", align_corners=False)).relu() + 0.1
    expected = torch.einsum("ikmn,k->imn", logits / logits.sum(1, keepdim=True), torch.linspace(0.001, 10, 256))
    torch.testing.assert_close(head(maps), expected)
    assert head.at(maps, (24, 30)).shape == (2, 24, 30) and bool((head(maps) > 0).all())


def test_sig_loss_is_the_published_formula():
    predicted, depth = torch.rand(2, 5, 6) + 1, torch.rand(2, 5, 6) + 1
    depth[0, :2] = 0
    seen = depth > 0
    g = torch.log(predicted[seen] + 1e-3) - torch.log(depth[seen] + 1e-3)
    pairs = list(zip(predicted, depth, strict=True))
    torch.testing.assert_close(sig_loss(pairs), torch.sqrt(torch.var(g) + 0.15 * g.mean() ** 2))
    torch.testing.assert_close(sig_loss(pairs, mean_only=True), torch.sqrt(0.15 * g.mean() ** 2))
    torch.testing.assert_close(depth_loss(pairs), sig_loss(pairs) + 0.5 * gradient_loss(pairs))
    torch.testing.assert_close(depth_loss(pairs, mean_only=True), sig_loss(pairs, True) + 0.5 * gradient_loss(pairs))


def test_the_first_steps_look_at_the_mean_alone():
    assert [mean_only(step, 38_400) for step in (0, 99, 100)] == [True, True, False]
    assert [mean_only(step, 60) for step in (5, 6)] == [True, False]


def test_gradient_loss_by_a_plain_loop():
    predicted, depth = torch.rand(15, 17) + 1, torch.rand(15, 17) + 1
    depth[3:6, 2:9] = 0
    expected = 0.0
    for step in (1, 2, 4, 6):
        p, d = predicted[::step, ::step].numpy(), depth[::step, ::step].numpy()
        error = np.log(p + 1e-3) - np.log(d + 1e-3)
        total = 0.0
        for y in range(d.shape[0]):
            for x in range(d.shape[1]):
                for dy, dx in ((2, 0), (0, 2)):
                    if y + dy < d.shape[0] and x + dx < d.shape[1] and d[y, x] > 0 and d[y + dy, x + dx] > 0:
                        total += abs(error[y, x] - error[y + dy, x + dx])
        expected += total / (d > 0).sum()
    assert gradient_loss([(predicted, depth)]).item() == pytest.approx(expected, rel=1e-4)


def test_photos_without_depth_do_no_harm():
    predicted, depth = (torch.rand(8, 8) + 1).requires_grad_(), torch.rand(8, 8) + 1
    loss = depth_loss([(predicted, torch.zeros(8, 8)), (predicted, depth)])
    torch.testing.assert_close(loss, depth_loss([(predicted, depth)]))
    nothing = depth_loss([(predicted, torch.zeros(8, 8))])
    nothing.backward()
    assert nothing == 0 and predicted.grad is not None and bool((predicted.grad == 0).all())


@given(st.integers(0, 99))
def test_metrics_are_scikit_learns(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(seed)
    depth, predicted = (5 * torch.rand(12, 10, generator=draw) + 0.1 for _ in range(2))
    depth[0] = 0
    found = depth_metrics(predicted, depth)
    d, p = depth[depth > 0].double().numpy(), predicted[depth > 0].double().numpy()
    assert found["rmse"] == pytest.approx(math.sqrt(metrics.mean_squared_error(d, p)))
    assert found["abs_rel"] == pytest.approx(metrics.mean_absolute_percentage_error(d, p))
    for n in (1, 2, 3):
        assert found[f"delta{n}"] == pytest.approx(np.mean(np.maximum(p / d, d / p) < 1.25**n))
    assert mean_metrics([found, found]) == pytest.approx(found)


@pytest.mark.parametrize(
    ("crop", "shape", "rows", "columns"),
    [
        ("eigen", (480, 640), (45, 471), (41, 601)),
        ("garg", (352, 1216), (143, 349), (43, 1172)),
        ("garg", (375, 1242), (153, 371), (44, 1197)),
        ("kitti-eigen", (352, 1216), (117, 321), (43, 1172)),
        ("none", (7, 9), (0, 7), (0, 9)),
    ],
)
def test_crops_of_the_benchmarks(crop, shape, rows, columns):
    expected = torch.zeros(shape, dtype=torch.bool)
    expected[rows[0] : rows[1], columns[0] : columns[1]] = True
    assert torch.equal(scored_pixels(torch.ones(shape), crop), expected)
    with pytest.raises(ValueError, match="expected --crop none, eigen"):
        scored_pixels(torch.ones(2, 2), "middle")


def slopes(count):
    """Maps that hold the depth of each patch, and depth maps four times as large."""
    draw = torch.Generator().manual_seed(3)
    coarse = [1 + 6 * torch.rand(2, 2, generator=draw) for _ in range(count)]
    small = [F.interpolate(c[None, None], (5, 6), mode="bilinear", align_corners=True)[0] for c in coarse]
    maps = [torch.cat([s, s.square() / 8, torch.randn(2, 5, 6, generator=draw) / 10]) for s in small]
    depths = [F.interpolate(s[None], (20, 24), mode="bilinear", align_corners=False)[0, 0] for s in small]
    return maps, depths


def test_a_depth_head_learns_and_repeats():
    maps, depths = slopes(6)
    data, tokens = Depths(depths), table(maps)
    settings = FitSettings(steps=60, lr=0.3, weight_decay=1e-2, warmup=10, decay="cosine", batch_size=3)
    head, problems = train_depth_head(data, tokens, settings, 0, CPU)
    found, missed = score_depth(data, cached_depth(head, tokens, CPU), "none")
    untrained = score_depth(data, cached_depth(DepthHead(4, 0.001, 10, 0), tokens, CPU), "none")[0]
    assert found["rmse"] < untrained["rmse"] / 5 and found["photos"] == 6 and not problems and not missed
    again, _ = train_depth_head(data, tokens, settings, 0, CPU)
    assert torch.equal(again.linear.weight, head.linear.weight)


def test_bad_depth_is_named_and_nothing_else_refused():
    maps, depths = slopes(4)
    bad = DepthError("map 1 holds 0 everywhere")
    data, tokens = Depths([depths[0], bad, *depths[2:]]), table(maps)
    settings = FitSettings(steps=8, lr=0.01, weight_decay=0.0, warmup=1, decay="cosine", batch_size=4)
    head, problems = train_depth_head(data, tokens, settings, 0, CPU)
    assert problems == {"photo 1": "map 1 holds 0 everywhere"}
    found, missed = score_depth(data, cached_depth(head, tokens, CPU), "none")
    assert found["photos"] == 3 and set(missed) == {"photo 1"}
    with pytest.raises(ValueError, match="none of the 4 photos has a depth map that can be used; the last: map 1"):
        train_depth_head(Depths([bad] * 4), tokens, settings, 0, CPU)
    with pytest.raises(ValueError, match="no photo could be scored; the last: map 1"):
        score_depth(Depths([bad] * 4), cached_depth(head, tokens, CPU), "none")


def test_depth_on_crops_runs_and_repeats():
    images = [picture(i) for i in range(2)]
    data = Depths([torch.full((40, 48), 2.0 + i) for i in range(2)], images)
    front = FrozenTokens(tiny_model(), (0, 1), "cls+patch")
    settings = FitSettings(steps=4, lr=0.01, weight_decay=0.0, warmup=1, decay="cosine", batch_size=2)
    head, _ = train_depth_on_crops(data, front, (16, 24), settings, seed=0)
    again, _ = train_depth_on_crops(data, front, (16, 24), settings, seed=0)
    assert torch.equal(head.linear.weight, again.linear.weight)
    found, _ = score_depth(data, whole_photo_depth(head, front, data), "none")
    assert found["photos"] == 2 and found["rmse"] < 4
