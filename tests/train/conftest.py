"""Photos for the tests of training; without Lightning they are skipped."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchvision")

from tiny_runs import write_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of twelve photos."""
    return write_photos(tmp_path_factory.mktemp("train") / "photos")
