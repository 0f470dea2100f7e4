"""Norms, outliers and similarities of tokens, against the obvious computation."""

import pytest
import torch

from selectivit.eval.token_statistics import outliers, token_statistics
from selectivit.features import Features


def tokens(patches, cls=None, registers=None, cores=None, grid=(3, 4)):
    return Features(patches.mT.unflatten(2, grid), patches, cls, registers, cores, grid)


def test_every_number_is_the_obvious_one():
    torch.manual_seed(0)
    patches, cls, registers = torch.randn(2, 12, 16), torch.randn(2, 16), torch.randn(2, 4, 16)
    patches[0, 3] *= 7
    raw = tokens(patches, cls, registers)
    normed = tokens(*(torch.nn.functional.layer_norm(t, (16,)) for t in (patches, cls, registers)))
    for i, found in enumerate(token_statistics(raw, normed)):
        norms = patches[i].norm(dim=-1)
        median = norms.sort().values[5].item()  # torch's median of an even number: the lower one
        assert found["patch_norm"] == pytest.approx(median)
        assert found["largest_norm"] == pytest.approx(norms.max().item() / median)
        assert found["outlier_share"] == pytest.approx((norms > 2 * median).double().mean().item())
        assert found["cls_norm"] == pytest.approx(cls[i].norm().item() / median)
        assert found["register_norm"] == pytest.approx(registers[i].norm(dim=-1).mean().item() / median)
        units = torch.nn.functional.normalize(normed.patch_tokens[i], dim=-1)
        whole = torch.nn.functional.normalize(normed.cls[i], dim=0)
        assert found["cls_similarity"] == pytest.approx((units @ whole).mean().item(), abs=1e-6)
        pairs = (units @ units.T)[~torch.eye(12, dtype=torch.bool)]
        assert found["patch_similarity"] == pytest.approx(pairs.mean().item(), abs=1e-6)
    assert token_statistics(raw, normed)[0]["outlier_share"] == pytest.approx(1 / 12)


def test_what_a_model_lacks_is_none():
    plain = tokens(torch.randn(1, 12, 8))
    (found,) = token_statistics(plain, plain)
    assert [found[name] for name in ("cls_norm", "cls_similarity", "register_norm")] == [None] * 3
    cores = torch.randn(1, 3, 8)
    veca = tokens(torch.randn(1, 12, 8), cores[:, 0], None, cores)
    (found,) = token_statistics(veca, veca)
    assert found["register_norm"] == pytest.approx(cores[0, 1:].norm(dim=-1).mean().item() / found["patch_norm"])
    one = tokens(torch.randn(1, 1, 8), grid=(1, 1))
    assert token_statistics(one, one)[0]["patch_similarity"] is None


def test_the_factor_draws_the_line():
    norms = torch.tensor([1.0, 1.0, 1.0, 2.5, 6.0])
    assert outliers(norms).sum() == 2 and outliers(norms, 3).sum() == 1
    patches = norms[None, :, None].repeat(1, 1, 4)
    found = tokens(patches, grid=(1, 5))
    assert token_statistics(found, found, outlier_factor=3)[0]["outlier_share"] == pytest.approx(0.2)


def test_tokens_that_are_not_finite_are_refused():
    broken = tokens(torch.full((1, 12, 8), float("nan")))
    with pytest.raises(ValueError, match="NaN or infinity"):
        token_statistics(broken, broken)
    fine = tokens(torch.ones(1, 12, 8))
    with pytest.raises(ValueError, match="over 1"):
        token_statistics(fine, fine, outlier_factor=1)
