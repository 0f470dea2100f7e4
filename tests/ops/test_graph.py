"""entmax as it is exported: against the reference in float64, at any length, with the rows at the edge."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import selectivit as sv
from selectivit.ops.graph import plain_operators
from selectivit.ops.reference import attention_reference, entmax_reference

ALPHAS = (1.0, 1.02, 1.2, 1.5, 2.0, 3.0)
PER_HEAD = (1.0, 1.01, 1.3, 1.5, 1.9, 2.0)


class AllAlphas(torch.nn.Module):
    """One graph of every α, as numbers and as one tensor of a number per head."""

    def forward(self, scores):  # (6, N, M)
        numbers = [sv.entmax(scores[i], alpha) for i, alpha in enumerate(ALPHAS)]
        return torch.stack(numbers), sv.entmax(scores, torch.tensor(PER_HEAD).view(-1, 1, 1))


@pytest.fixture(scope="module")
def exported():
    rows, columns = torch.export.Dim("rows", min=1), torch.export.Dim("columns", min=2)
    with torch.no_grad(), plain_operators():
        return torch.export.export(AllAlphas(), (torch.randn(6, 5, 9),), dynamic_shapes=({1: rows, 2: columns},))


@pytest.fixture(scope="module", params=["torch", "onnx"])
def run(exported, request):
    if request.param == "torch":
        return exported.module()
    onnxruntime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's ONNX exporter, about its own code
        proto = torch.onnx.export(exported, dynamo=True, verbose=False).model_proto
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return lambda scores: [torch.from_numpy(out) for out in session.run(None, {name: scores.numpy()})]


def check(found, expected_of, scores):
    for out, alphas in zip(found, (ALPHAS, PER_HEAD), strict=True):
        for i, alpha in enumerate(alphas):
            torch.testing.assert_close(out[i].double(), expected_of(scores[i], alpha), atol=2e-6, rtol=1e-4)


@given(st.integers(1, 7), st.integers(2, 300), st.floats(-2, 2), st.integers(0, 100))
@settings(max_examples=8)
def test_at_any_length_as_the_reference(run, rows, columns, spread, seed):
    scores = torch.randn(6, rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**spread
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.2] = -math.inf
    check(run(scores), entmax_reference, scores)


def test_zeros_are_exact(run):
    scores = 5 * torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(0))
    found, _ = run(scores)
    for i, alpha in enumerate(ALPHAS):
        assert torch.equal(found[i] == 0, sv.entmax(scores[i], alpha) == 0)
    assert (found[3] == 0).float().mean() > 0.5 and not (found[0] == 0).any()


def test_rows_at_the_edge(run):
    scores = torch.zeros(6, 4, 5)
    scores[:, 0] = -math.inf
    scores[:, 1, 2] = math.nan
    scores[:, 2, 3] = 1e8
    for found in run(scores):
        assert (found[:, 0] == 0).all() and found[:, 1].isnan().all()
        torch.testing.assert_close(found[:, 2, 3], torch.ones(6))
        torch.testing.assert_close(found[:, 3], torch.full((6, 5), 0.2))


def test_a_long_flat_row_and_one_that_falls_geometrically(run):
    flat = torch.zeros(6, 1, 4096)
    falling = -(1.02 ** torch.arange(600.0)).expand(6, 1, -1)  # Newton takes many steps down such a row
    for scores in (flat, falling):
        check(run(scores), entmax_reference, scores)


def test_no_operator_of_ours_is_in_the_graph(exported):
    names = {str(n.target) for m in exported.graph_module.modules() if hasattr(m, "graph") for n in m.graph.nodes}
    assert any("while_loop" in name for name in names) and not any("selectivit" in name for name in names)
    assert not any("sort" in name for name in names)


def test_an_alpha_per_head_above_two_is_not_a_number():
    class Steep(torch.nn.Module):
        def forward(self, scores):
            return sv.entmax(scores, torch.tensor([1.5, 2.5]).view(-1, 1, 1))

    with torch.no_grad(), plain_operators():
        found = torch.export.export(Steep(), (torch.randn(2, 3, 4),)).module()(torch.randn(2, 3, 4))
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_attention_with_mask_scale_and_half_precision():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return sv.entmax_attention(q, k, v, alpha=1.5, attn_mask=mask, scale=0.7)

    q, k, v = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2] = False
    with torch.no_grad(), plain_operators():
        for dtype, within in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            inputs = (q.to(dtype), k.to(dtype), v.to(dtype), mask)
            found = torch.export.export(Attention(), inputs).module()(*inputs)
            expected = attention_reference(*inputs[:3], alpha=1.5, attn_mask=mask, scale=0.7)
            assert found.dtype == dtype and (found[..., 2, :] == 0).all()
            torch.testing.assert_close(found.double(), expected, atol=within, rtol=within)
