import os

import pytest

from selectivit.data.images import find_images


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def test_folders_are_searched_sorted_and_hidden_files_skipped(tmp_path):
    names = ["b.JPG", "a/z.png", "a/a.webp", "c.txt", ".hidden.jpg", ".git/x.jpg", "a/.y/w.png", "d.tiff"]
    for name in names:
        touch(tmp_path / name)
    found, problems = find_images([tmp_path])
    assert [entry.name.as_posix() for entry in found] == ["a/a.webp", "a/z.png", "b.JPG", "d.tiff"]
    assert {entry.root for entry in found} == {tmp_path} and problems == []


def test_files_come_in_the_order_given_and_once(tmp_path):
    for name in ("b.jpg", "a.jpg", "sub/c.jpg"):
        touch(tmp_path / name)
    found, problems = find_images([tmp_path / "b.jpg", tmp_path, tmp_path / "sub" / ".." / "a.jpg", tmp_path / "sub"])
    assert [entry.path.name for entry in found] == ["b.jpg", "a.jpg", "c.jpg"]
    assert [entry.root for entry in found] == [tmp_path] * 3 and problems == []


def test_a_file_named_itself_may_have_any_ending_and_be_hidden(tmp_path):
    for name in ("photo", ".hidden.jpg"):
        touch(tmp_path / name)
    found, _ = find_images([tmp_path / "photo", str(tmp_path / ".hidden.jpg")])
    assert [entry.path.name for entry in found] == ["photo", ".hidden.jpg"]


def test_one_path_alone_is_not_taken_letter_by_letter(tmp_path):
    touch(tmp_path / "a.jpg")
    assert len(find_images(str(tmp_path))[0]) == 1


def test_what_is_asked_for_in_vain_is_reported(tmp_path):
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "texts" / "a.txt")
    touch(tmp_path / "a.jpg")
    found, problems = find_images([tmp_path / x for x in ("empty", "texts", "none.jpg", "a.jpg")])
    assert len(found) == 1 and len(problems) == 3
    assert "empty holds no pictures" in problems[0] and ".jpg" in problems[0]
    assert "texts holds no pictures" in problems[1]
    assert problems[2] == f"{tmp_path / 'none.jpg'} does not exist"


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_links_are_followed_and_circles_end(tmp_path):
    touch(tmp_path / "real" / "a.jpg")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "same.jpg").symlink_to(tmp_path / "real" / "a.jpg")
    found, problems = find_images([tmp_path / "set"])
    assert len(found) == 1 and problems == []


def test_a_folder_that_may_not_be_searched_is_reported(tmp_path, monkeypatch):
    touch(tmp_path / "closed" / "a.jpg")
    touch(tmp_path / "open" / "b.jpg")
    scan = os.scandir

    def scandir(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    found, problems = find_images([tmp_path])
    assert [entry.path.name for entry in found] == ["b.jpg"]
    assert problems == [f"{tmp_path / 'closed'} cannot be searched (Permission denied)"]


def test_pipes_and_devices_are_named_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    found, problems = find_images([tmp_path / "pipe.jpg", "/dev/zero"])
    assert found == [] and len(problems) == 2 and all("no ordinary file" in problem for problem in problems)
    assert find_images([tmp_path])[0] == []


def test_a_name_that_is_not_utf8_is_told_in_escapes(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/nu\xff.jpg")
    open(odd, "wb").close()
    found, problems = find_images([tmp_path])
    assert found == [] and "nu\\xff.jpg has a name that is not UTF-8" in problems[0]
