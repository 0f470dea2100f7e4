"""Photos inside a tar file, as webdataset's shards hold them, read in any order by their places in the file."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from selectivit.data.find import SUFFIXES
from selectivit.data.images import ImageError, decode_image


@dataclass(frozen=True)
class Member:
    """One photo of a shard: its name, and where its bytes lie."""

    name: str
    offset: int
    size: int


class TarShard:
    """The photos of a tar file; captions, JSON and all else beside them are passed over.

    A stream that shuffles through a buffer cannot be entered at sample 123 456; an index of the file can. Making it
    reads the headers alone.

    Args:
        path: an uncompressed tar file.

    Raises:
        ValueError: no tar file, one cut short, or a compressed one.

    Example:
        >>> import io, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "shard.tar"
        >>> with tarfile.open(path, "w") as tar:
        ...     tar.addfile(tarfile.TarInfo("000.jpg"))
        >>> len(TarShard(path))
        1
    """

    def __init__(self, path: Path):
        self.path = path
        self.members: list[Member] = []
        size = path.stat().st_size
        try:
            with tarfile.open(path, "r:") as tar:
                for entry in tar:
                    vars(tar)["members"] = []  # else it keeps every header, also of a million
                    if not entry.isfile() or Path(entry.name).suffix.lower() not in SUFFIXES:
                        continue
                    if entry.offset_data + entry.size > size:
                        raise tarfile.ReadError(f"{entry.name} is cut short")
                    self.members.append(Member(entry.name, entry.offset_data, entry.size))
        except tarfile.TarError as error:
            raise ValueError(
                f"{path} cannot be read as a tar file ({error}): expected a whole, uncompressed shard"
            ) from error

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """The shard's path and the photo's name in it."""
        return f"{self.path}/{self.members[index].name}"

    def read(self, index: int, shorter_side: int | None = None) -> Image.Image:
        """Read and decode one photo.

        Args:
            index: its number in the shard.
            shorter_side: a hint, as for `read_image`.

        Returns:
            8-bit RGB.

        Raises:
            ImageError: it is no photo, or damaged.
        """
        member = self.members[index]
        try:
            with self.path.open("rb") as file:  # anew each time: workers must not share a place in the file
                file.seek(member.offset)
                content = file.read(member.size)
        except OSError as error:
            raise ImageError(f"{self.path} cannot be read ({error.strerror})") from error
        return decode_image(content, self.name(index), shorter_side=shorter_side).image
