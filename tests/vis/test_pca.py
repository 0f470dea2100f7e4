import pytest
import torch

from selectivit.vis.pca import pca_maps


def random_maps(seed=0, channels=16):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(channels, channels, generator=generator) * torch.arange(channels, 0, -1)
    return [
        (basis @ torch.randn(channels, h * w, generator=generator)).view(channels, h, w) for h, w in ((6, 9), (4, 5))
    ]


def test_colours_lie_in_the_unit_cube_and_have_the_maps_shapes():
    colours, explained = pca_maps(random_maps())
    assert [tuple(c.shape) for c in colours] == [(6, 9, 3), (4, 5, 3)]
    assert all(c.min() >= 0 and c.max() <= 1 and c.dtype == torch.float32 for c in colours)
    assert explained.shape == (3,) and 0 < explained.sum() <= 1
    assert explained.tolist() == sorted(explained.tolist(), reverse=True)


def test_repeated_calls_are_bit_identical_whatever_the_random_state():
    torch.manual_seed(1)
    first, share = pca_maps(random_maps())
    torch.manual_seed(2)
    second, same_share = pca_maps(random_maps())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(share, same_share)


def test_equal_features_have_equal_colours_in_every_map():
    a, b = random_maps()
    b[:, 0, 0] = a[:, 2, 3]
    first, second = pca_maps([a, b])[0]
    assert torch.equal(second[0, 0], first[2, 3])


def test_the_fit_is_joint():
    """Split in two or in one piece, the same patches get the same colours; alone, a map gets others."""
    whole = random_maps()[0]
    together = pca_maps([whole])[0][0]
    left, right = pca_maps([whole[:, :, :4], whole[:, :, 4:]])[0]
    torch.testing.assert_close(torch.cat([left, right], 1), together, atol=1e-6, rtol=0)
    assert not torch.allclose(pca_maps([whole[:, :, :4]])[0][0], left, atol=1e-2)


def test_agrees_with_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    maps = random_maps()
    tokens = torch.cat([m.flatten(1).T for m in maps]).double().numpy()
    pca = decomposition.PCA(3, svd_solver="full").fit(tokens)
    projected = torch.from_numpy(pca.transform(tokens))
    signs = projected.pow(3).mean(0).sign()
    colours, explained = pca_maps(maps, percentiles=(0, 100))
    flat = torch.cat([c.flatten(0, 1) for c in colours])
    for i in range(3):
        want = projected[:, i] * signs[i]
        want = (want - want.min()) / (want.max() - want.min())
        torch.testing.assert_close(flat[:, i].double(), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(explained, torch.from_numpy(pca.explained_variance_ratio_))


def test_a_small_change_of_the_features_changes_the_colours_little():
    for seed in range(20):
        a = random_maps(seed, channels=200)[0]
        noisy = a + 1e-3 * a.std() * torch.randn(a.shape, generator=torch.Generator().manual_seed(seed))
        assert (pca_maps([noisy])[0][0] - pca_maps([a])[0][0]).abs().mean() < 0.05, seed


def test_without_skewness_the_largest_loading_is_positive():
    """Two patches, v and -v, are symmetric: the first gets the bright colour, since its largest value is positive."""
    v = torch.tensor([1.0, -3.0, 2.0])
    dark, bright = pca_maps([torch.stack([v, -v], 1)[:, None]])[0][0][0, :, 0]
    assert (dark, bright) == (0, 1)


def test_an_outlier_does_not_take_the_colours():
    a = random_maps()[0]
    plain = pca_maps([a])[0][0]
    wide = torch.cat([a.repeat(1, 4, 4), 1e3 * a[:, :1, :1].expand(-1, 24, 1)[:, :, :1]], 2)
    wide[:, 1:, -1] = a[:, :1, 0]
    assert pca_maps([wide])[0][0][:6, :9].std() > 0.3 * plain.std()


@pytest.mark.parametrize("constant", [0.0, 3.14159, 1e6])
def test_constant_features_are_neutral(constant):
    colours, explained = pca_maps([torch.full((8, 3, 4), constant)])
    assert torch.equal(colours[0], torch.full((3, 4, 3), 0.5)) and explained.sum() == 0


@pytest.mark.parametrize("channels", [1, 2])
def test_fewer_than_three_channels_leave_the_rest_neutral(channels):
    colours, explained = pca_maps([torch.randn(channels, 5, 5, generator=torch.Generator().manual_seed(0))])
    assert (colours[0][..., channels:] == 0.5).all() and colours[0][..., channels - 1].std() > 0
    assert explained.sum().item() == pytest.approx(1)


def test_a_single_patch_works():
    assert (pca_maps([torch.randn(8, 1, 1)])[0][0] == 0.5).all()


def test_half_precision_features_work():
    maps = random_maps()
    half = pca_maps([m.bfloat16() for m in maps])[0]
    assert (half[0] - pca_maps(maps)[0][0]).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ([], "at least one"),
        ([torch.zeros(4, 4)], r"\(4, 4\)"),
        ([torch.zeros(4, 2, 2), torch.zeros(5, 2, 2)], "4 and 5"),
        ([torch.full((4, 2, 2), float("nan"))], "NaN"),
    ],
)
def test_bad_maps_are_named(maps, message):
    with pytest.raises(ValueError, match=message):
        pca_maps(maps)
