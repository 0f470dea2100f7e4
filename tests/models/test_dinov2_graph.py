import pytest
import timm
import torch
from exported import Export, run_graph
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

from selectivit.models.cache import WeightsError
from selectivit.models.dinov2 import DINOv2, as_dinov2
from selectivit.models.dinov2_graph import fingerprint, state_from_graph


def tiny(**changed):
    options = {"img_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 0}
    return VisionTransformer(**{**options, "init_values": 1e-5, "dynamic_img_size": True, **changed}).eval()


def without(graph, name):
    del graph.initializer[[entry.name for entry in graph.initializer].index(name)]
    return graph


def test_the_mapped_weights_compute_what_the_graph_computes():
    exported = Export().model()
    model = tiny()
    model.load_state_dict(state_from_graph(exported.graph))  # strict: nothing missing, nothing left over
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.forward_features(images)
    theirs = run_graph(exported, images)
    assert ours.shape == theirs.shape == (1, 17, 24) and theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_query_and_key_are_not_mistaken_for_one_another():
    exported = Export().model()
    state = state_from_graph(exported.graph)
    query, key, value = state["blocks.0.attn.qkv.weight"].chunk(3)
    state["blocks.0.attn.qkv.weight"] = torch.cat([key, query, value])
    model = tiny()
    model.load_state_dict(state)
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model.forward_features(images) - run_graph(exported, images)).abs().max() > 1e-2


@pytest.mark.parametrize("depth", [1, 11])
def test_every_block_is_found(depth):
    state = state_from_graph(Export(dim=6, heads=1, depth=depth, grid=2).model().graph)
    tiny(img_size=4, embed_dim=6, depth=depth, num_heads=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backbone.embeddings.cls_token", "cls_token"),
        ("backbone.encoder.layer.1.attention.attention.key.bias", "key.bias"),
        ("onnx::MatMul_3", "onnx::MatMul_3"),
        ("onnx::Concat_98", "position table"),
        ("onnx::Reshape_99", "position table"),
    ],
)
def test_a_graph_that_lacks_something_is_refused(name, expected):
    with pytest.raises(WeightsError, match=f"exported DINOv2, but it has no .*{expected}"):
        state_from_graph(without(Export().model().graph, name))


def test_another_graph_is_refused():
    graph = Export().model().graph
    for entry in graph.initializer:
        entry.name = entry.name.replace("backbone", "encoder")
    with pytest.raises(WeightsError, match="expected the graph of an exported DINOv2"):
        state_from_graph(graph)


def test_the_fingerprint_depends_on_names_shapes_types_and_values():
    base = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    assert fingerprint(base) == fingerprint({"b": torch.ones(3, 2).T, "a": torch.arange(6.0)})
    changed = [
        {**base, "a": torch.arange(6.0) + 1e-6},
        {**base, "a": torch.arange(6.0).view(2, 3)},
        {**base, "a": torch.arange(6.0).double()},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"]},
    ]
    assert len({fingerprint(each) for each in [base, *changed]}) == 6


def shake(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("grid", [(3, 3), (2, 4), (6, 5), (1, 1)])
def test_the_position_table_is_resized_without_blur(grid):
    model = as_dinov2(shake(tiny()))
    state = model.state_dict()
    table = state["pos_embed"][:, 1:].view(1, 4, 4, 24).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=grid, mode="bicubic", antialias=False).flatten(2).transpose(1, 2)
    fixed = tiny(img_size=(2 * grid[0], 2 * grid[1]), dynamic_img_size=False)
    fixed.load_state_dict({**state, "pos_embed": torch.cat([state["pos_embed"][:, :1], table], dim=1)})
    images = torch.randn(2, 3, 2 * grid[0], 2 * grid[1])
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(images), fixed.forward_features(images))


def test_at_its_own_size_it_is_the_host_model_to_the_bit():
    plain = shake(tiny())
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = plain.forward_features(images)
        model = as_dinov2(plain)
        assert model is plain and isinstance(model, DINOv2)
        assert torch.equal(model.forward_features(images), expected)


def test_models_of_another_layout_are_refused():
    for model in (tiny(reg_tokens=2), tiny(dynamic_img_size=False), tiny(no_embed_class=True)):
        with pytest.raises(ValueError, match="expected a timm DINOv2 without registers"):
            as_dinov2(model)


def test_the_layout_is_that_of_timms_own_dinov2():
    model = timm.create_model("vit_small_patch14_dinov2", depth=1, dynamic_img_size=True, weight_init="skip")
    assert as_dinov2(model).pos_embed.shape == (1, 1 + 37 * 37, 384)
