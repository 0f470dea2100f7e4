"""VECA: the recorded outputs of the public code, budgets, sizes, training, compilation, what is refused."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import selectivit as sv
from selectivit.models.veca import Veca, VecaConfig

SMALL = VecaConfig(dim=32, depth=3, num_heads=2, hidden_dim=40, num_cores=12, patch_size=8, image_size=32)


def small(seed=0, **changes):
    torch.manual_seed(seed)
    model = Veca(VecaConfig(**{**SMALL.__dict__, **changes}))
    for name, parameter in model.named_parameters():  # untrained attention is nearly uniform: sharpen it
        parameter.data.mul_(30 if "coord_steps" in name else 4 if parameter.ndim == 2 and "chunks" not in name else 1)
    return model.eval()


def images(batch=2, height=32, width=48, seed=1):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def tokens(out):
    return torch.cat([out.cores, out.patch_tokens], 1)


@torch.no_grad()
def test_what_comes_out():
    out = small(out_dim=20)(images(), num_cores=5, maps=(0, -1))
    assert out.cls.shape == (2, 32) and torch.equal(out.cls, out.cores[:, 0]) and out.cores.shape == (2, 5, 32)
    assert out.patch_tokens.shape == (2, 24, 32) and out.grid == (4, 6)
    assert out.core_coords.shape == (3, 2, 5, 2) and out.core_coords.abs().max() < 1
    assert torch.equal(out.core_coords[0, 0], out.core_coords[0, 1])
    assert not torch.equal(out.core_coords[1, 0], out.core_coords[1, 1])  # every image moves its own cores
    assert out.projected_cls is not None and out.projected_cls.shape == (2, 20)
    assert out.projected_patches is not None and out.projected_patches.shape == (2, 24, 20)
    assert [m.shape for m in out.core_maps] == [(2, 2, 5, 24)] * 2
    assert [m.shape for m in out.patch_maps] == [(2, 2, 24, 5)] * 2
    plain = small()(images(1))
    assert plain.projected_cls is plain.projected_patches is None and plain.core_maps == ()
    assert plain.cores.shape == (1, 12, 32)


@torch.no_grad()
def test_maps_do_not_change_what_comes_out():
    model, x = small(), images()
    assert torch.equal(tokens(model(x)), tokens(model(x, maps=range(3))))


def test_training_and_inference_compute_the_same():
    model, x = small(), images()
    trained = model(x, 7)
    with torch.no_grad():
        inferred = model(x, 7)
    with torch.inference_mode():
        torch.testing.assert_close(tokens(model(x, 7)), tokens(inferred))
    torch.testing.assert_close(tokens(trained), tokens(inferred))
    torch.testing.assert_close(trained.core_coords, inferred.core_coords)


@torch.no_grad()
def test_a_budget_reads_no_later_core():
    model, x = small(), images()
    before = [tokens(model(x, c)) for c in (1, 5, 8, 9)]
    model.bank.token_chunks[1].data[1:] += 3
    model.bank.coord_chunks[1].data[1:] -= 2
    for budget, expected in zip((1, 5, 8, 9), before, strict=True):
        assert torch.equal(tokens(model(x, budget)), expected)
    assert not torch.allclose(tokens(model(x, 10))[:, 0], tokens(model(x, 9))[:, 0], atol=1e-3)


@torch.no_grad()
def test_images_of_a_batch_do_not_meet():
    model, x = small(), images(3)
    whole = tokens(model(x))
    for i in range(3):
        torch.testing.assert_close(tokens(model(x[i : i + 1]))[0], whole[i], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_patches_meet_through_cores_alone():
    """A patch far away reaches another one in two blocks, not in one."""
    for depth, reaches in ((1, False), (2, True)):
        model, x = small(depth=depth), images(1)
        other = x.clone()
        other[..., -8:, -8:] += 2
        change = (model(x).patch_tokens - model(other).patch_tokens).abs().amax(-1)[0]
        assert (change[:-1].max() > 1e-4) == reaches and change[-1] > 1e-2


@torch.no_grad()
def test_sizes_and_padding():
    model, padding = small(), small(pad=True)
    for height, width in ((8, 8), (64, 24), (16, 80)):
        assert model(images(1, height, width)).grid == (height // 8, width // 8)
    for height, width in ((35, 48), (32, 41), (5, 60)):
        with pytest.raises(ValueError, match=f"whole patches of 8 px, got {height} x {width}: resize them"):
            model(images(1, height, width))
        found = padding(images(1, height, width))
        padded = torch.zeros(1, 3, -(-height // 8) * 8, -(-width // 8) * 8)
        padded[..., :height, :width] = images(1, height, width)
        assert torch.equal(tokens(found), tokens(model(padded)))


@pytest.mark.parametrize("attention", ["entmax15", 1.7, "sparsemax"])
def test_attention_is_one_argument(attention):
    model, x = small(attention=attention), images()
    out = model(x, 6, maps=(0, 2))
    assert min((m == 0).float().mean() for m in out.core_maps) > 0.01
    assert not torch.allclose(out.cls, small()(x, 6).cls, atol=1e-3)
    out.cls.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_every_parameter_of_the_budget_learns():
    model = small(out_dim=10).train()
    out = model(images(), 12)
    assert out.projected_cls is not None and out.projected_patches is not None
    (out.projected_cls.sum() + out.projected_patches.square().sum()).backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not still


def test_coordinates_are_moved_in_training_alone():
    model, x = small().train(), images()
    with torch.no_grad():
        first, second = (model(x).cls for _ in range(2))
        still = small(coord_shift=0, coord_scale=1).train()(x).cls
        assert not torch.equal(first, second)
        torch.testing.assert_close(still, model.eval()(x).cls)


def test_checkpointing_keeps_the_gradients():
    x, found = images(), []
    for enable in (False, True):
        model = small()
        model.set_grad_checkpointing(enable)
        model(x, 6).cls.sin().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_bfloat16_autocast_and_float64():
    model, x = small(), images()
    expected = tokens(model(x, 6))
    with torch.autocast("cpu", torch.bfloat16):
        cast = tokens(model(x, 6))
    half = copy.deepcopy(model).bfloat16()(x.bfloat16(), 6)
    assert half.cls.dtype == torch.bfloat16 and half.core_coords.dtype == torch.float32
    for found in (cast, tokens(half)):
        assert (found.float() - expected).norm() < 0.05 * expected.norm()
    torch.testing.assert_close(
        tokens(copy.deepcopy(model).double()(x.double(), 6)).float(), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad):
    torch.compiler.reset()
    model, x = small(out_dim=8, depth=2), images()
    expected = model(x, 6, maps=(1,))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        found = compiled(x, 6, maps=(1,))
        torch.testing.assert_close(tokens(found), tokens(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.core_maps[0], expected.core_maps[0])
        if not grad:  # another size and budget
            torch.testing.assert_close(tokens(compiled(images(1, 16, 16), 3)), tokens(model(images(1, 16, 16), 3)))
    torch.compiler.reset()


@torch.no_grad()
def test_copies_and_threads():
    model, x = small(), images()
    expected, found = tokens(model(x)), []
    assert torch.equal(tokens(copy.deepcopy(model)(x)), expected)
    threads = [threading.Thread(target=lambda: found.append(tokens(model(x)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert len(found) == 4 and all(torch.allclose(f, expected, atol=1e-6) for f in found)


@pytest.mark.parametrize("layer", [0, 1, -1])
@torch.no_grad()
def test_features(layer):
    model, x = small(), images()
    found = sv.features(model, x, layer=layer, num_cores=5, norm=layer != 1)
    shallow = small(depth=layer % 3 + 1)
    if layer == -1:
        out = model(x, 5)
        assert torch.equal(found.patch_tokens, out.patch_tokens) and torch.equal(found.cores, out.cores)
        assert torch.equal(found.cls, out.cls) and found.registers is None
    assert found.map.shape == (2, 32, 4, 6) and found.cores.shape == (2, 5, 32)
    assert torch.equal(found.map[:, :, 1, 2], found.patch_tokens[:, 8])
    kept = {n: p for n, p in model.state_dict().items() if n in shallow.state_dict() and "coord_steps" not in n}
    kept["bank.coord_steps"] = model.bank.coord_steps[: layer % 3]
    shallow.load_state_dict(kept)
    if layer != 1:
        assert torch.equal(shallow(x, 5).patch_tokens, found.patch_tokens)
    else:
        torch.testing.assert_close(shallow(x, 5).patch_tokens, model.norm(found.patch_tokens))


@torch.no_grad()
def test_features_take_wrappers_single_images_and_other_sizes():
    model = small()
    assert sv.features(model, images(1)[0]).map.shape == (1, 32, 4, 6)
    assert sv.features(model, images(1, 35, 45)).grid == (4, 6)
    assert sv.features(copy.deepcopy(model).bfloat16(), images()).map.dtype == torch.bfloat16
    wrapped = torch.nn.Sequential(torch.nn.Identity(), model)
    assert torch.equal(sv.features(wrapped, images()).map, sv.features(model, images()).map)
    two = torch.nn.ModuleList([model, small()])
    with pytest.raises(ValueError, match=r"found 2 \(Veca, Veca\)"):
        sv.features(two, images())
    with pytest.raises(ValueError, match="3 blocks, 0 to 2"):
        sv.features(model, images(), layer=3)
    prepared = sv.preprocessing(small(mean=(0.5,) * 3))
    assert prepared.mean == (0.5,) * 3 and prepared.patch_size == 8 and prepared.image_size == (32, 32)


@torch.no_grad()
def test_features_of_a_padding_model_are_those_of_its_forward():
    model, x = small(pad=True), images(2, 35, 45)
    found = sv.features(model, x, num_cores=5)
    assert found.grid == (5, 6)
    assert torch.equal(found.patch_tokens, model(x, 5).patch_tokens)
    padded = torch.nn.functional.pad(x, (0, 3, 0, 5))
    assert torch.equal(found.map, sv.features(small(), padded, num_cores=5).map)


def test_features_of_other_models_have_no_budget():
    torchvision = pytest.importorskip("torchvision")
    vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32)
    with pytest.raises(ValueError, match="num_cores is a budget of cores, which VisionTransformer does not have"):
        sv.features(vit, images(1, 32, 32), num_cores=4)


def test_what_is_refused():
    model = small()
    for budget in (0, -1, 13):
        with pytest.raises(ValueError, match=f"budget of 1 to 12 cores, got num_cores={budget}"):
            model(images(), budget)
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\), got \(2, 32, 48\)"):
        model(images()[:, 0])
    with pytest.raises(ValueError, match=r"got \(0, 3, 32, 48\)"):
        model(images()[:0])
    with pytest.raises(TypeError, match=r"torch.float32, got torch.float64: convert"):
        model(images().double())
    with pytest.raises(ValueError, match="3 blocks, 0 to 2, or negatives: got 3"):
        model(images(), maps=(3,))
    with pytest.raises(TypeError, match=r"sequence of blocks as maps, got -1: give \(-1,\)"):
        model(images(), maps=-1)
    for budget in (2.0, "3"):
        with pytest.raises(TypeError, match=f"whole number of cores as the budget, got {budget!r}"):
            model(images(), budget)
    with pytest.raises(TypeError, match=r"images as a tensor .*, got ndarray"):
        model(images().numpy())
    with pytest.raises(ValueError, match="images are on meta, the model on cpu"):
        model(images().to("meta"))
    for dtype in (torch.uint8, torch.float64):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"float32, got {dtype}: convert"):
            model(images().to(dtype))
    for changes, text in (
        ({"num_cores": 2.5}, "expected num_cores as a whole number, got 2.5"),
        ({"depth": "3"}, "expected depth as a whole number, got '3'"),
        ({"attention": True}, "attention as a name or a number, got True"),
    ):
        with pytest.raises(TypeError, match=text):
            VecaConfig(**{**SMALL.__dict__, **changes})
    for changes, text in (
        ({"out_dim": 0}, "expected out_dim of at least 1, got 0"),
        ({"coord_shift": float("nan")}, "coord_shift >= 0"),
        ({"num_cores": 0}, "expected num_cores of at least 1, got 0"),
        ({"coord_scale": 0.5}, "coord_scale >= 1"),
        ({"num_heads": 3}, "divides dim 32, got 3"),
        ({"attention": "entmx"}, "unknown normalizer 'entmx'"),
    ):
        with pytest.raises(ValueError, match=text):
            Veca(VecaConfig(**{**SMALL.__dict__, **changes}))


def test_exported_at_any_batch_and_size():
    model, x = small(out_dim=8), images()
    batch, height, width = torch.export.Dim("b", min=2), torch.export.Dim("h", min=2), torch.export.Dim("w", min=2)
    sizes = ({0: batch, 2: 8 * height, 3: 8 * width},)
    program = torch.export.export(model, (x,), {"num_cores": 5, "maps": (1,)}, dynamic_shapes=(*sizes, None, (None,)))
    other = images(3, 24, 40)
    found, expected = program.module()(other, num_cores=5, maps=(1,)), model(other, 5, maps=(1,))
    torch.testing.assert_close(tokens(found), tokens(expected))
    torch.testing.assert_close(found.core_maps[0], expected.core_maps[0])
    assert found.projected_cls.shape == (3, 8) and found.core_coords.shape == (3, 3, 5, 2)


# --- create_model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [("veca_tiny_patch14", 5.47), ("veca_small_patch16", 21.6), ("veca_small_plus_patch16", 28.7),
     ("veca_base_patch16", 85.7), ("veca_large_patch16", 303)],
)  # fmt: skip
def test_named_sizes_are_the_published_ones(name, millions):
    with torch.device("meta"):
        model = sv.create_model(name)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    assert abs(parameters / millions - 1) < 0.005 and model.config.num_cores == 64
    assert model.config.patch_size == int(name[-2:])
    assert model.config.dim // model.config.num_heads == 64


def test_create_model_takes_what_differs_and_names_the_near():
    model = sv.create_model("veca_tiny_patch16", num_cores=9, depth=1, out_dim=7, attention=1.3)
    assert model.training and model.config.num_cores == 9 and model.output_proj.out_features == 7
    with pytest.raises(ValueError, match="unknown model 'veca_smal_patch16'; did you mean 'veca_small_patch16'"):
        sv.create_model("veca_smal_patch16")
    with pytest.raises(ValueError, match=r"known are .*load_model"):
        sv.create_model("x")
    with pytest.raises(TypeError, match=r"unknown argument 'heads': a VECA model takes dim, depth"):
        sv.create_model("veca_tiny_patch16", heads=3)


def test_the_start_is_the_published_one():
    model = sv.create_model("veca_tiny_patch16", depth=2)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.bias.abs().max() == 0, name
            assert abs(module.weight.std() / 0.02 - 1) < 0.15, name
