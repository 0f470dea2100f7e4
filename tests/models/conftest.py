import pytest


@pytest.fixture(autouse=True)
def no_hub_and_a_cache_of_its_own(request, tmp_path, monkeypatch):
    """Tests neither wait for the model hub, nor download, nor touch the user's cache; a network test undoes this."""
    monkeypatch.setenv("SELECTIVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if request.node.get_closest_marker("network") is None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
