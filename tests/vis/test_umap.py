"""UMAP of patch features: what it gives, what it refuses, how it is drawn."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch

from selectivit.vis.compare import to_png
from selectivit.vis.core_paths import core_colours
from selectivit.vis.umap import CELL, CELLS, PhotoPatches, umap_figure, umap_points


@pytest.mark.timeout(900)  # Numba compiles for ten seconds of a whole core
def test_groups_stay_together_and_the_seed_decides():
    pytest.importorskip("umap", reason="umap-learn is the extra `umap`")
    torch.manual_seed(0)
    centres = torch.randn(3, 16)
    labels = torch.arange(3).repeat(20)
    features = centres[labels] + 0.1 * torch.randn(60, 16)
    threads = torch.get_num_threads()
    points = umap_points(features, neighbours=10, seed=3)
    assert torch.get_num_threads() == threads
    assert points.shape == (60, 2) and points.dtype == torch.float32
    nearest = torch.cdist(points, points).fill_diagonal_(torch.inf).argmin(1)
    assert (labels[nearest] == labels).float().mean() > 0.95
    assert torch.equal(points, umap_points(features, neighbours=10, seed=3))
    assert not torch.equal(points, umap_points(features, neighbours=10, seed=4))


def test_what_cannot_be_is_refused():
    features = torch.randn(8, 4)
    for wrong, told in (
        ({"neighbours": 8}, "2 to 7 neighbours for 8 patches, got 8"),
        ({"neighbours": 1}, "2 to 7 neighbours"),
        ({"neighbours": 3, "min_dist": 2.0}, "distance of 0 to 1"),
    ):
        with pytest.raises(ValueError, match=told):
            umap_points(features, **wrong)
    with pytest.raises(ValueError, match="at least 3 patches"):
        umap_points(features[:2], neighbours=2)
    with pytest.raises(ValueError, match="NaN or infinity"):
        umap_points(features.log(), neighbours=3)


def test_without_umap_learn_the_error_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def absent(name, *arguments):
        if name == "umap":
            raise ModuleNotFoundError("No module named 'umap'", name="umap")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'selectivit\[umap\]'"):
        umap_points(torch.randn(8, 4), neighbours=3)


def test_crops_stand_where_their_points_lie_framed_in_their_photos_colour():
    """Two photos, one red and one blue, a point each in two corners of the plane."""
    red, blue = torch.zeros(2, 30, 30, 3)
    red[..., 0], blue[..., 2] = 1, 1
    corner = torch.tensor([[1, 1]])
    photos = [
        PhotoPatches("red", red, (3, 3), corner, torch.tensor([[0.0, 0.0]])),
        PhotoPatches("blue", blue, (3, 3), corner, torch.tensor([[1.0, 1.0]])),
    ]
    canvas = np.asarray(umap_figure(photos).axes[1].images[0].get_array())
    painted = np.argwhere((canvas != 1).any(-1)) // CELL
    assert {tuple(cell) for cell in painted.tolist()} == {(CELLS - 1, 0), (0, CELLS - 1)}
    lower_left, upper_right = canvas[-CELL:, :CELL], canvas[:CELL, -CELL:]
    np.testing.assert_allclose(lower_left[CELL // 2, CELL // 2], (1, 0, 0), atol=1e-5)
    np.testing.assert_allclose(upper_right[CELL // 2, CELL // 2], (0, 0, 1), atol=1e-5)
    np.testing.assert_allclose(upper_right[1, 1], core_colours(2)[1], atol=1e-5)


def test_many_photos_have_a_key_of_several_rows():
    photo = PhotoPatches("a", torch.rand(8, 400, 3), (1, 20), torch.tensor([[0, 19]]), torch.rand(1, 2))
    figure = umap_figure([photo] * 8, title="a $ title")
    titled = [axes for axes in figure.axes if axes.get_title() == "a"]
    assert len(titled) == 8 and to_png(figure)[1:4] == b"PNG"
    assert sum(not axes.axison for axes in figure.axes) == 4  # the empty places of the second row
    with pytest.raises(ValueError, match="at least one photo"):
        umap_figure([])
