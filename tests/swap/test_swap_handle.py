"""The verb itself: which layers, nested swaps, copies, factors, and errors that say what to do."""

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from swap_hosts import HOSTS, WIDTH, images, open_clip_model, randomise, timm_vit
from torch import Tensor, nn

from selectivit.swap.maps import attention_maps
from selectivit.swap.sites import POOLS, find_sites, find_tower
from selectivit.swap.swap import Swap, restore_attention, swap_attention

NAMES = tuple(f"blocks.{index}.attn" for index in range(3))


@pytest.fixture
def vit() -> nn.Module:
    return randomise(timm_vit())


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (-1, NAMES[2:]),
        (1, NAMES[2:]),
        (-2, NAMES[1:]),
        (2, NAMES[1:]),
        (3, NAMES),
        (None, NAMES),
        ([0], NAMES[:1]),
        ([-1, 0], (NAMES[0], NAMES[2])),
        ((1, 1, -2), (NAMES[1],)),
    ],
)
def test_layers_by_timms_rule(vit: nn.Module, layers, expected) -> None:
    with swap_attention(vit, layers=layers) as swap:
        assert swap.replaced == expected
        assert [site.name for site in swap.sites] == list(expected)


@pytest.mark.parametrize("layers", [0, 4, -4, [], [3], [-4], [0, 7], True, [True], ["0"]])
def test_layers_out_of_range(vit: nn.Module, layers) -> None:
    with pytest.raises(ValueError, match=r"layer"):
        swap_attention(vit, layers=layers)
    with pytest.raises(ValueError, match=r"3|ints"):
        swap_attention(vit, layers=4 if layers in ([], True) else layers)
    assert all(not name.startswith("_selective") for module in vit.modules() for name in vars(module))


@pytest.mark.parametrize(
    "options",
    [
        {"scores": "kq"},
        {"scores": "qq+zz"},
        {"scores": ""},
        {"normalizer": "relu"},
        {"alpha": 0.5},
        {"alpha": float("nan")},
        {"temperature": 0.0},
        {"combine": "max"},
        {"scale": -1.0},
        {"scale": torch.ones(3)},
        {"scale": "big"},
    ],
)
@torch.no_grad()
def test_wrong_rules_change_nothing(vit: nn.Module, options: dict) -> None:
    x = images()
    before = vit(x)
    with pytest.raises(ValueError):
        swap_attention(vit, layers=None, **options)
    assert torch.equal(vit(x), before)


def test_a_model_without_attention() -> None:
    with pytest.raises(ValueError, match="no attention found in Sequential"):
        swap_attention(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_nothing_that_can_be_swapped_lists_what_was_found() -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1), num_heads=(1, 1))
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0\.attn and 1 more: WindowAttention"):
        swap_attention(swin)
    parallel = timm_vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock)
    with pytest.raises(ValueError, match=r"blocks\.0 and 2 more: computes attention inside the block"):
        swap_attention(parallel)
    with pytest.raises(ValueError, match="differential attention"):
        swap_attention(timm_vit(attn_layer="diff"))
    with pytest.raises(ValueError, match="differential attention"):
        attention_maps(timm_vit(attn_layer="diff"), images())


def test_unknown_code_is_skipped_and_named() -> None:
    from timm.layers.attention import Attention

    class Own(Attention):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x

    vit = timm_vit(attn_layer=Own)
    vit.blocks[0].attn = Attention(WIDTH, 2)
    with swap_attention(vit, layers=None) as swap:
        assert swap.replaced == ("blocks.0.attn",)
        assert "subclass of timm's Attention" in swap.skipped["blocks.1.attn"]


def test_pooling_and_text_are_skipped_with_reasons() -> None:
    with swap_attention(HOSTS["timm SigLIP"].build()) as swap:
        assert swap.skipped == {"attn_pool": POOLS}
    with swap_attention(HOSTS["transformers SigLIP"].build()) as swap:
        assert swap.skipped["vision_model.head"] == POOLS
        assert "outside the image tower" in swap.skipped["text_model.encoder.layers.0.self_attn"]
    with swap_attention(HOSTS["open_clip CoCa"].build()) as swap:
        assert swap.skipped["visual.attn_pool"] == POOLS
    with pytest.raises(ValueError, match="scaled cosine"):
        swap_attention(open_clip_model(scaled_cosine_attn=True))


def test_two_towers_are_ambiguous() -> None:
    pair = nn.ModuleDict({"student": timm_vit(), "teacher": timm_vit()})
    with pytest.raises(ValueError, match=r"found 2 \(student, teacher\)"):
        find_tower(pair)
    with swap_attention(nn.Sequential(nn.Identity(), timm_vit())) as swap:
        assert swap.replaced == ("1.blocks.2.attn",)


@torch.no_grad()
def test_nested_swaps_restore_in_reverse(vit: nn.Module) -> None:
    x = images()
    plain = vit(x)
    outer = swap_attention(vit, alpha=1.2, layers=None)
    first = vit(x)
    inner = swap_attention(vit, alpha=2.0, scores="qq", layers=-1)
    assert not torch.equal(vit(x), first)
    with pytest.raises(RuntimeError, match=r"another swap lies over blocks\.2\.attn"):
        outer.restore()
    inner.restore()
    assert torch.equal(vit(x), first)
    outer.restore()
    outer.restore()
    inner.restore()
    assert torch.equal(vit(x), plain)


@pytest.mark.parametrize("name", ["transformers CLIP", "nn.TransformerEncoder"])
@torch.no_grad()
def test_nested_swaps_on_hosts_with_more_to_put_back(name: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    plain = host.forward(model, x)
    with swap_attention(model, alpha=1.2, layers=None):
        first = host.forward(model, x)
        with swap_attention(model, alpha=2.0):
            assert not torch.equal(host.forward(model, x), first)
        assert torch.equal(host.forward(model, x), first)
    assert torch.equal(host.forward(model, x), plain)


@torch.no_grad()
def test_an_error_inside_the_block_restores(vit: nn.Module) -> None:
    x = images()
    plain = vit(x)
    with pytest.raises(KeyError), swap_attention(vit, layers=None):
        raise KeyError
    assert torch.equal(vit(x), plain)


@pytest.mark.parametrize("name", list(HOSTS))
@torch.no_grad()
def test_copies_and_pickles_stay_swapped(name: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    plain = host.forward(model, x)
    with swap_attention(model, alpha=1.5, layers=None):
        swapped = host.forward(model, x)
        twin = copy.deepcopy(model)
        stored = io.BytesIO()
        pickle.dump(model, stored)
        fresh = randomise(host.build(), seed=3)
        fresh.load_state_dict(model.state_dict())
    assert torch.equal(host.forward(twin, x), swapped)
    stored.seek(0)
    loaded = pickle.load(stored)
    assert torch.equal(host.forward(loaded, x), swapped)
    assert torch.equal(host.forward(model, x), plain)
    assert torch.equal(host.forward(fresh, x), plain)


def test_save_pretrained_holds_no_trace(tmp_path) -> None:
    from transformers import Dinov2Model

    host = HOSTS["transformers DINOv2"]
    model, x = randomise(host.build()), images()
    with torch.no_grad():
        plain = host.forward(model, x)
        with swap_attention(model, layers=None):
            model.save_pretrained(tmp_path)
        assert "selectivit" not in (tmp_path / "config.json").read_text()
        torch.testing.assert_close(host.forward(Dinov2Model.from_pretrained(tmp_path).eval(), x), plain)


@torch.no_grad()
def test_scale_by_number_head_and_calibration(vit: nn.Module) -> None:
    x, factors = images(), torch.tensor([0.3, 0.7])
    outputs = []
    calibration = SimpleNamespace(factors=dict.fromkeys(NAMES, factors))
    for scale in (factors, calibration):
        with swap_attention(vit, scale=scale, layers=None):
            outputs.append(vit(x))
            maps = attention_maps(vit, x, 1)
            torch.testing.assert_close(attention_maps(vit, x, 1, heads=[1]), maps[:, 1:])
    assert torch.equal(*outputs)
    with swap_attention(vit, scale=0.5, layers=None):
        half = vit(x)
    with swap_attention(vit, temperature=2.0, layers=None):
        torch.testing.assert_close(vit(x), half)
    assert not torch.allclose(half, outputs[0])
    with pytest.raises(ValueError, match=r"no factors for 'blocks\.1\.attn'; it has blocks\.0\.attn"):
        swap_attention(vit, scale=SimpleNamespace(factors={NAMES[0]: factors}), layers=None)
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(2,\)"):
        swap_attention(vit, scale=SimpleNamespace(factors={name: torch.ones(3) for name in NAMES}))


def test_learnt_alpha_and_scale_get_gradients(vit: nn.Module) -> None:
    alpha, scale = torch.tensor([1.4, 1.6], requires_grad=True), torch.ones(2, requires_grad=True)
    with swap_attention(vit, alpha=alpha, scale=scale, layers=None) as swap:
        vit(images()).sum().backward()
        assert isinstance(swap, Swap) and "replaced" in repr(swap)
    assert alpha.grad is not None and (alpha.grad != 0).all()
    assert scale.grad is not None and (scale.grad != 0).all()


@pytest.mark.parametrize("scores", ["qq", "kk", "vv", "qq+kk+vv", "v"])
@torch.no_grad()
def test_every_score_source(vit: nn.Module, scores: str) -> None:
    x = images()
    plain = vit(x)
    with swap_attention(vit, scores=scores) as swap:
        site = swap.sites[0]
        found = attention_maps(vit, x)
        assert not torch.allclose(vit(x), plain)
    assert site.name == NAMES[2]
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    if scores == "v":
        assert torch.equal(found, torch.eye(17).expand_as(found))


def test_sites_of_a_swapped_model_are_the_same(vit: nn.Module) -> None:
    plain, _ = find_sites(vit)
    with swap_attention(vit, layers=None):
        swapped, _ = find_sites(vit)
    assert [site.name for site in plain] == [site.name for site in swapped]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (np.int64(-2), NAMES[1:]),
        (np.array([0, 2]), NAMES[::2]),
        (torch.tensor(1), NAMES[2:]),
        ([np.int8(-3)], NAMES[:1]),
    ],
)
def test_layers_of_numpy_and_torch(vit: nn.Module, layers, expected) -> None:
    with swap_attention(vit, layers=layers) as swap:
        assert swap.replaced == expected
    assert attention_maps(vit, images(), np.int64(1), heads=np.int64(0), queries=np.arange(2)).shape == (2, 1, 2, 17)


@pytest.mark.parametrize("layers", [1.0, "all", [1.0], np.array([True]), np.bool_(True), np.array([0.5]), object()])
def test_layers_of_other_kinds(vit: nn.Module, layers) -> None:
    with pytest.raises(ValueError, match=r"layers must"):
        swap_attention(vit, layers=layers)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 2, 1), (2, 1)])
def test_an_alpha_for_other_heads_is_refused_at_once(vit: nn.Module, shape) -> None:
    with pytest.raises(ValueError, match=r"alpha has shape .* expected \(2,\)"):
        swap_attention(vit, alpha=torch.full(shape, 1.5))
    with swap_attention(vit, alpha=torch.full((2,), 1.5)), swap_attention(vit, alpha=torch.tensor(1.5)):
        vit(images())


def test_one_number_per_head_as_the_operators_take_it(vit: nn.Module) -> None:
    alpha, scale = torch.tensor([1.3, 1.8]), torch.tensor([0.5, 0.9])
    with swap_attention(vit, alpha=alpha, scale=scale):
        expected = vit(images())
    with swap_attention(vit, alpha=alpha.view(2, 1, 1), scale=scale.view(2, 1, 1)):
        assert torch.equal(vit(images()), expected)
    assert not torch.equal(vit(images()), expected)


@pytest.mark.parametrize("name", list(HOSTS))
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@torch.no_grad()
def test_copies_of_swapped_models_are_restored(name: str, way: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    plain = host.forward(model, x)
    classes = [type(module) for module in model.modules()]
    with swap_attention(model, layers=None) as outer, swap_attention(model, scores="kk", layers=-1):
        twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        swapped = host.forward(model, x)
        assert torch.equal(host.forward(twin, x), swapped)
        assert restore_attention(twin) == outer.replaced
        assert torch.equal(host.forward(twin, x), plain) and torch.equal(host.forward(model, x), swapped)
        assert restore_attention(twin) == ()
        with swap_attention(twin, layers=None):
            assert not torch.equal(host.forward(twin, x), plain)
    assert [type(module) for module in twin.modules()] == classes
    assert not any("_selective" in vars(module) for module in twin.modules())
    assert [set(vars(module)) for module in twin.modules()] == [set(vars(module)) for module in model.modules()]


@torch.no_grad()
def test_a_handle_is_at_rest_once_its_swap_is_taken_away(vit: nn.Module) -> None:
    x = images()
    plain = vit(x)
    with swap_attention(vit, layers=None):
        with swap_attention(vit, scores="kk"):
            assert restore_attention(vit) == NAMES
        assert torch.equal(vit(x), plain)
    assert torch.equal(vit(x), plain)
