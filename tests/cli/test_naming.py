from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from selectivit.cli.naming import name_outputs

ROOT = Path("/data/photos")


def names(*paths):
    return name_outputs([(ROOT, ROOT / path) for path in paths])


def test_a_photo_gives_its_name_and_sub_folder():
    assert names("a.jpg", "sub/a.jpg", "sub/deep/b.x.png") == ["a", "sub/a", "sub/deep/b.x"]


def test_same_stems_keep_their_suffixes():
    assert names("a.jpg", "a.png", "b.jpg") == ["a.jpg", "a.png", "b"]


def test_same_names_of_several_folders_keep_the_folder():
    sources = [(Path(f"/data/{d}"), Path(f"/data/{d}/a.jpg")) for d in ("x", "y")]
    assert name_outputs(sources) == ["x/a.jpg", "y/a.jpg"]


def test_a_file_named_like_anothers_longer_name():
    found = names("a.jpg", "a.png", "a.jpg.png")
    assert len(set(found)) == 3


def test_case_alone_does_not_tell_apart():
    found = names("a.jpg", "A.jpg")
    assert len({name.casefold() for name in found}) == 2


parts = st.sampled_from(["a", "A", "b", "a.jpg"])


@given(st.sets(st.tuples(st.sampled_from(["/p", "/q", "/p/a"]), parts, parts, st.sampled_from([".jpg", ".png"]))))
def test_no_two_names_are_alike(found):
    sources = {Path(root) / x / (y + suffix): Path(root) for root, x, y, suffix in found}
    result = name_outputs([(root, path) for path, root in sources.items()])
    assert len({name.casefold() for name in result}) == len(sources)
    assert not any(name.startswith("/") or ".." in name for name in result)
