"""Features of any block at any size, against what each host computes by itself."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selectivit.features import block_features, features, num_blocks, preprocessing
from selectivit.swap.swap import swap_attention

sys.path.insert(0, str(Path(__file__).parent / "swap"))
from swap_hosts import (
    HOSTS,
    PATCH,
    SIZE,
    WIDTH,
    TokenEncoder,
    hf_both,
    hf_vision,
    images,
    open_clip_model,
    randomise,
    timm_dinov3,
    timm_eva,
    timm_eva02,
    timm_vit,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


WITH_IMAGES = [name for name, host in HOSTS.items() if host.image]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# --- other image sizes, as each host itself would take them ------------------------------------------------------

TIMM = {
    "vit": timm_vit,
    "vit no_embed_class": lambda **o: timm_vit(no_embed_class=True, reg_tokens=2, **o),
    "vit without class": lambda **o: timm_vit(class_token=False, global_pool="avg", fc_norm=False, **o),
    "eva cat": timm_eva,
    "eva mixed": lambda **o: timm_eva(rope_type="mixed", attn_type="rope", **o),
    "dinov3": timm_dinov3,
}


@pytest.mark.parametrize("kind", list(TIMM))
@torch.no_grad()
def test_timm_at_other_sizes_is_timms_dynamic_size(kind: str) -> None:
    fixed, dynamic = randomise(TIMM[kind]()), randomise(TIMM[kind](dynamic_img_size=True))
    dynamic.load_state_dict(fixed.state_dict())
    for height, width in [(32, 32), (40, 56), (16, 24), (32, 64)]:
        x = images(1, height, width)
        expected = dynamic.forward_features(x)
        for model in (fixed, dynamic):
            close(features(model, x).patch_tokens, expected[:, model.num_prefix_tokens :])
    with pytest.raises(AssertionError, match="doesn't match model"):
        fixed(images(1, 40, 56))  # the model itself still insists on its size


@torch.no_grad()
def test_open_clip_at_other_sizes_is_open_clips_resized_model() -> None:
    from open_clip.model import resize_pos_embed

    small, large = randomise(open_clip_model()), randomise(open_clip_model(image_size=(40, 56)), seed=5)
    state = small.state_dict()
    resize_pos_embed(state, large)
    large.load_state_dict(state)
    x = images(2, 40, 56)
    close(features(small, x).patch_tokens, features(large, x).patch_tokens)
    assert features(large, x).grid == (5, 7)


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "ViT", "Dinov2", "DINOv3ViT"])
@torch.no_grad()
def test_transformers_at_other_sizes_is_its_own_interpolation(family: str) -> None:
    model = randomise(hf_both(family) if family in ("CLIP", "Siglip") else hf_vision(family))
    tower = getattr(model, "vision_model", model)
    x = images(2, 40, 56)
    options = {} if family.lower().startswith("dino") else {"interpolate_pos_encoding": True}
    expected = tower(pixel_values=x, **options).last_hidden_state
    expected = tower.post_layernorm(expected) if family == "CLIP" else expected
    found = features(model, x)
    close(found.patch_tokens, expected[:, -35:])
    assert found.grid == (5, 7)


@torch.no_grad()
def test_torchvision_at_its_own_size_by_another_way() -> None:
    host = HOSTS["torchvision ViT"]
    model = randomise(host.build())
    other = features(model, images(1, 48, 32))
    assert other.grid == (6, 4) and other.cls is not None
    model.encoder.pos_embedding.zero_()  # positions gone, patches only: a map of equal patches is constant
    flat = features(model, torch.ones(1, 3, 48, 32)).map
    close(flat, flat[:, :, :1, :1].expand_as(flat))


@torch.no_grad()
def test_sizes_off_the_patch_are_resized_to_the_nearest_multiple() -> None:
    model = randomise(timm_vit())
    x = images(1, 35, 45)
    resized = F.interpolate(x, size=(32, 48), mode="bilinear", antialias=True)
    assert torch.equal(features(model, x).map, features(model, resized).map)
    assert features(model, images(1, 1, 3)).grid == (1, 1)


# --- blocks, norms, batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_IMAGES)
@torch.no_grad()
def test_every_block_is_what_leaves_it(name: str) -> None:
    host = HOSTS[name]
    model, x = randomise(host.build()), images()
    from selectivit.swap.sites import find_tower

    tower = find_tower(model)
    assert tower is not None
    blocks = [block for _, block in tower.host.blocks(tower.module)]
    for block_name, block in tower.host.blocks(tower.module):
        assert tower.module.get_submodule(block_name) is block
    outputs: list[Tensor] = []
    handles = [block.register_forward_hook(lambda m, i, out: outputs.append(out)) for block in blocks]
    host.forward(model, x)
    for handle in handles:
        handle.remove()
    assert len(outputs) == 3
    for layer, expected in enumerate(outputs):
        found = features(model, x, layer=layer, norm=False)
        assert torch.equal(found.patch_tokens, expected[:, host.prefix :])
        assert torch.equal(features(model, x, layer=layer - 3, norm=False).map, found.map)
    assert not any(block._forward_hooks for block in blocks)


@torch.no_grad()
def test_norm_is_the_models_final_one() -> None:
    model, x = randomise(timm_vit()), images()
    for layer in (0, -1):
        raw, normed = (features(model, x, layer=layer, norm=norm).patch_tokens for norm in (False, True))
        close(model.norm(raw), normed)
        assert not torch.allclose(raw, normed)
    pooled_first = randomise(timm_vit(global_pool="avg"))  # fc_norm comes after pooling: tokens have no norm
    assert torch.equal(features(pooled_first, x).map, features(pooled_first, x, norm=False).map)


@torch.no_grad()
def test_one_image_is_a_batch_of_one() -> None:
    model, x = randomise(timm_vit()), images(3)
    batch = features(model, x)
    for index, image in enumerate(x):
        close(features(model, image).map, batch.map[index : index + 1])


def test_gradients_flow_unless_turned_off() -> None:
    for name in WITH_IMAGES:
        model, x = randomise(HOSTS[name].build()), images(1, 40, 32).requires_grad_()
        features(model, x, layer=1).map.sum().backward()
        assert x.grad is not None and x.grad.abs().max() > 0, name
        touched = [n for n, p in model.named_parameters() if p.grad is not None]
        assert any("pos" in n and "emb" in n for n in touched) or "3" in name, name  # DINOv3 has no positions to learn
    with torch.no_grad():
        assert not features(model, x).map.requires_grad
    with torch.inference_mode():
        assert features(model, x).map.is_inference()


@torch.no_grad()
def test_later_blocks_are_not_run() -> None:
    model = randomise(timm_vit())
    ran: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda m, i, index=index: ran.append(index))
    features(model, images(), layer=1)
    assert ran == [0, 1]


@pytest.mark.parametrize("name", WITH_IMAGES)
@torch.no_grad()
def test_features_of_a_swapped_model(name: str) -> None:
    model, x = randomise(HOSTS[name].build()), images(1, 40, 32)
    plain = features(model, x)
    with swap_attention(model, alpha=1.5):
        swapped = features(model, x)
        assert torch.equal(features(model, x, layer=1, norm=False).map, features(model, x, layer=1, norm=False).map)
    assert (swapped.map - plain.map).abs().max() > 1e-3
    assert torch.equal(features(model, x).map, plain.map)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_features_come_in_the_models_dtype(dtype: torch.dtype) -> None:
    for name in ("timm DINOv3", "open_clip CLIP", "transformers DINOv2", "torchvision ViT"):
        model = randomise(HOSTS[name].build()).to(dtype)
        assert features(model, images(1, 40, 32)).map.dtype == dtype, name


@torch.no_grad()
def test_compiled_and_wrapped_models() -> None:
    model, x = randomise(timm_vit()), images()
    expected = features(model, x).map
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    close(features(compiled, x).map, expected)
    compiled(x)
    close(features(compiled, x).map, expected)
    close(features(nn.Sequential(nn.Identity(), model), x).map, expected)
    torch.compiler.reset()


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), TypeError, "torch.uint8"),
        ("photo.jpg", TypeError, "got str"),
        (torch.zeros(1, 1, 32, 32), ValueError, r"\(1, 1, 32, 32\)"),
        (torch.zeros(32, 32), ValueError, r"\(32, 32\)"),
        (torch.zeros(0, 3, 32, 32), ValueError, r"\(0, 3, 32, 32\)"),
        (torch.zeros(1, 3, 0, 32), ValueError, r"\(1, 3, 0, 32\)"),
    ],
)
def test_images_that_are_none(x: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        features(timm_vit(), x)


@pytest.mark.parametrize("layer", [3, -4, True, None])
def test_blocks_out_of_range(layer: Any) -> None:
    with pytest.raises(ValueError, match="this model has 3 blocks, 0 to 2"):
        features(timm_vit(), images(), layer=layer)


def test_models_without_a_known_tower() -> None:
    import timm

    with pytest.raises(ValueError, match="no image tower found in TokenEncoder"):
        features(TokenEncoder(), images())
    with pytest.raises(ValueError, match="no image tower found in Linear"):
        preprocessing(nn.Linear(2, 2))
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1), num_heads=(1, 1))
    with pytest.raises(ValueError, match="expected timm's VisionTransformer or Eva on plain patches, got Swin"):
        features(swin, images())


def test_dropped_patches_leave_no_map() -> None:
    with pytest.raises(ValueError, match="patch dropout"):
        features(timm_vit(patch_drop_rate=0.5).train(), images())


# --- preprocessing -----------------------------------------------------------------------------------------------


def test_preprocessing_says_what_the_model_was_trained_on() -> None:
    import timm

    siglip = timm.create_model("vit_base_patch16_siglip_224", depth=1, embed_dim=24, num_heads=2)
    assert preprocessing(siglip).mean == (0.5, 0.5, 0.5) and preprocessing(siglip).image_size == (224, 224)
    assert preprocessing(timm_eva02()).mean == preprocessing(hf_vision("Dinov2")).mean == (0.485, 0.456, 0.406)
    assert preprocessing(hf_both("CLIP")).std == preprocessing(open_clip_model()).std
    assert preprocessing(hf_vision("ViT")).std == (0.5, 0.5, 0.5)
    dino = hf_vision("ViT")
    dino.config._name_or_path = "facebook/dino-vits16"
    assert preprocessing(dino).mean == (0.485, 0.456, 0.406)
    own = open_clip_model()
    own.visual.preprocess_cfg = {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    assert preprocessing(own).mean == (0.1, 0.2, 0.3)
    with pytest.raises(ValueError, match="square patches, got 8 x 16"):
        preprocessing(timm_vit(patch_size=(8, 16)))
    assert preprocessing(timm_vit()).patch_size == PATCH and SIZE // PATCH == 4 and WIDTH == 32


# --- several blocks in one forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_IMAGES)
@torch.no_grad()
def test_several_blocks_are_each_what_it_is_alone(name: str) -> None:
    model, x = randomise(HOSTS[name].build()), images(2, 40, 32)
    for norm in (True, False):
        found = block_features(model, x, [1, -1, 0, 1], norm=norm)
        for layer, one in zip((1, -1, 0, 1), found, strict=True):
            alone = features(model, x, layer=layer, norm=norm)
            assert torch.equal(one.map, alone.map) and one.grid == alone.grid
            assert (one.cls is None) == (alone.cls is None) and (one.cls is None or torch.equal(one.cls, alone.cls))
    assert num_blocks(model) == 3 and not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_several_blocks_take_one_forward() -> None:
    model, ran = randomise(timm_vit()), []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda m, i, index=index: ran.append(index))
    block_features(model, images(), [1, 0])
    assert ran == [0, 1]


@torch.no_grad()
def test_several_blocks_of_a_core_periphery_model() -> None:
    from selectivit.models.create import create_model

    small = {"patch_size": 8, "dim": 16, "depth": 3, "num_heads": 2, "hidden_dim": 24, "num_cores": 6}
    model, x = create_model("veca_tiny_patch14", **small).eval(), images(2, 40, 32)
    for norm in (True, False):
        found = block_features(model, x, [2, 0, 1, 2], norm=norm, num_cores=3)
        for layer, one in zip((2, 0, 1, 2), found, strict=True):
            alone = features(model, x, layer=layer, norm=norm, num_cores=3)
            assert torch.equal(one.map, alone.map) and torch.equal(one.cores, alone.cores)
    assert num_blocks(model) == 3 and not any(block._forward_hooks for block in model.blocks)


def test_no_blocks_and_blocks_out_of_range() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        block_features(timm_vit(), images(), [])
    with pytest.raises(ValueError, match="this model has 3 blocks, 0 to 2"):
        block_features(timm_vit(), images(), [0, 3])
