import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from selectivit.data.images import MAX_PIXELS, ImageError, read_image


def noise(height=24, width=40, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png_claiming(width, height):
    """A tiny PNG whose header claims any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_an_ordinary_picture_is_read_unchanged_and_without_notes(tmp_path):
    pixels = noise()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    loaded = read_image(tmp_path / "a.png")
    assert loaded.notes == () and loaded.image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(loaded.image), pixels)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tif", "bmp", "ppm"])
def test_every_usual_format_is_read(tmp_path, suffix):
    Image.new("RGB", (31, 17), (200, 100, 50)).save(tmp_path / f"a.{suffix}")
    loaded = read_image(str(tmp_path / f"a.{suffix}"))
    assert loaded.image.size == (31, 17)
    np.testing.assert_allclose(np.asarray(loaded.image)[8, 8], [200, 100, 50], atol=3)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_an_animation_the_first_frame_is_used_and_said(tmp_path, suffix):
    frames = [Image.new("RGB", (20, 12), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:])
    loaded = read_image(tmp_path / f"a.{suffix}")
    assert loaded.notes == ("3 frames or pages: the first is used",)
    np.testing.assert_allclose(np.asarray(loaded.image)[5, 5], [250, 0, 0], atol=6)


def test_cmyk_is_converted_and_noted(tmp_path):
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.jpg")
    loaded = read_image(tmp_path / "a.jpg")
    assert "CMYK" in loaded.notes[0]
    np.testing.assert_allclose(np.asarray(loaded.image)[4, 4], [0, 255, 255], atol=4)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_grey_keeps_its_brightness(tmp_path, suffix):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    loaded = read_image(tmp_path / f"a.{suffix}")
    assert "16-bit" in loaded.notes[0]
    np.testing.assert_array_equal(np.asarray(loaded.image)[0, :, 0], [0, 1, 128, 255])


@pytest.mark.parametrize(("largest", "shown"), [(200, 200), (2000, 2000 // 257)])
def test_32_bit_grey_that_holds_8_bits_keeps_its_brightness(tmp_path, largest, shown):
    Image.fromarray(np.array([[0, largest]], dtype=np.int32), "I").save(tmp_path / "a.tif")
    loaded = read_image(tmp_path / "a.tif")
    assert loaded.notes and abs(int(np.asarray(loaded.image)[0, 1, 0]) - shown) <= 1


def test_32_bit_grey_is_stretched_and_noted(tmp_path):
    Image.fromarray(np.array([[-100, 100_100, 200_100]], dtype=np.int32)).save(tmp_path / "a.tif")
    loaded = read_image(tmp_path / "a.tif")
    assert "from -100 to 200100" in loaded.notes[0]
    np.testing.assert_array_equal(np.asarray(loaded.image)[0, :, 0], [0, 128, 255])


def test_float_grey_is_scaled_and_bad_values_are_named(tmp_path):
    Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32)).save(tmp_path / "a.tif")
    loaded = read_image(tmp_path / "a.tif")
    assert "not finite" in loaded.notes[0] and "0 to 1" in loaded.notes[1]
    np.testing.assert_array_equal(np.asarray(loaded.image)[0, :, 0], [0, 128, 255, 0])


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_has_three_equal_channels(tmp_path, mode):
    Image.fromarray(noise(channels=1)).convert(mode).save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png").image)
    assert pixels.shape == (24, 40, 3) and pixels.std() > 0
    assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white_and_noted(tmp_path, mode):
    image = Image.new("RGBA", (10, 10), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 5, 10))
    if mode == "P":
        image = image.convert("P")
        image.putpixel((0, 0), 255)
        image.paste(255, (0, 0, 5, 10))
        image.save(tmp_path / "a.png", transparency=255)
    else:
        image.convert(mode).save(tmp_path / "a.png")
    loaded = read_image(tmp_path / "a.png")
    assert loaded.notes == ("transparent parts are laid on white",)
    pixels = np.asarray(loaded.image)
    assert (pixels[:, :5] == 255).all() and (pixels[:, 6:] < 60).all()


def test_half_transparent_is_mixed_with_white(tmp_path):
    Image.new("RGBA", (3, 3), (0, 0, 0, 128)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").image.getpixel((1, 1)) == (127, 127, 127)


def test_an_alpha_channel_that_hides_nothing_is_not_noted(tmp_path):
    Image.new("RGBA", (3, 3), (10, 20, 30, 255)).save(tmp_path / "a.png")
    loaded = read_image(tmp_path / "a.png")
    assert loaded.notes == () and loaded.image.getpixel((1, 1)) == (10, 20, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_honoured(tmp_path, orientation):
    upright = Image.fromarray(noise(16, 32)).resize((64, 32), Image.Resampling.NEAREST)
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = upright if undo is None else upright.transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    loaded = read_image(tmp_path / "a.png")
    assert loaded.notes == ()
    np.testing.assert_array_equal(np.asarray(loaded.image), np.asarray(upright))


def test_a_broken_exif_block_does_not_lose_the_picture(tmp_path):
    Image.fromarray(noise()).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff\x01")
    assert read_image(tmp_path / "a.jpg").image.size == (40, 24)


def test_one_pixel(tmp_path):
    Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").image.getpixel((0, 0)) == (1, 2, 3)


def test_ten_thousand_by_ten_thousand_is_read_without_a_warning(tmp_path):
    Image.new("RGB", (10_000, 10_000), (9, 8, 7)).save(tmp_path / "a.jpg")
    loaded = read_image(tmp_path / "a.jpg", shorter_side=500)
    assert loaded.notes == ()
    assert min(loaded.image.size) >= 1000 and max(loaded.image.size) <= 2500
    whole = read_image(tmp_path / "a.jpg")
    assert whole.image.size == (10_000, 10_000) and whole.notes == ()


def test_reduced_decoding_agrees_with_scaling(tmp_path):
    Image.fromarray(noise(8, 12)).resize((960, 640), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg", quality=95)
    whole = read_image(tmp_path / "a.jpg").image
    reduced = read_image(tmp_path / "a.jpg", shorter_side=80).image
    assert reduced.size == (240, 160) and whole.size == (960, 640)
    difference = np.asarray(whole.resize((120, 80)), float) - np.asarray(reduced.resize((120, 80)), float)
    assert np.abs(difference).mean() < 1.5
    assert read_image(tmp_path / "a.jpg", shorter_side=400).image.size == (960, 640)


@pytest.mark.parametrize("side", [int(MAX_PIXELS**0.5) + 10, 60_000])
def test_a_bomb_is_refused_with_the_limit(tmp_path, side):
    (tmp_path / "a.png").write_bytes(png_claiming(side, side))
    with pytest.raises(ImageError, match=r"a\.png .*178956970.*scale it down"):
        read_image(tmp_path / "a.png")


def test_our_limit_holds_where_that_of_pil_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "a.png").write_bytes(png_claiming(60_000, 60_000))
    with pytest.raises(ImageError, match="60000 x 60000 pixels, more than the limit of 178956970"):
        read_image(tmp_path / "a.png")


def test_what_is_not_there_or_not_a_picture_is_named(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("not a picture " * 100)
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name, expected in {
        "none.jpg": "does not exist",
        ".": "is a folder",
        "empty.jpg": "empty",
        "text.jpg": "not a picture",
        "page.eps": "not a picture",
        "a\0b.jpg": "cannot be read",
        "x" * 300 + ".jpg": "cannot be read",
    }.items():
        with pytest.raises(ImageError, match=expected) as error:
            read_image(tmp_path / name)
        assert str(tmp_path) in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match="no ordinary file"):
        read_image(tmp_path / "pipe.jpg")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ImageError, match=r"a\.png cannot be read \(Permission denied\): allow"):
        read_image(tmp_path / "a.png")


def encoded(suffix):
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 96)).save(buffer, format=suffix)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["jpeg", "png", "webp", "tiff", "bmp", "gif"])
@settings(derandomize=True, max_examples=12, deadline=None)
@given(part=st.floats(0.05, 0.9))
def test_a_file_cut_short_is_refused(tmp_path_factory, suffix, part):
    path = tmp_path_factory.mktemp("cut") / f"a.{suffix}"
    whole = encoded(suffix)
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ImageError, match=r"a\.\w+ is (damaged or cut short|not a picture)"):
        read_image(path)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), suffix=st.sampled_from(["jpeg", "png", "webp", "tiff", "gif"]))
def test_damaged_files_give_a_picture_or_an_image_error(tmp_path_factory, data, suffix):
    content = bytearray(encoded(suffix))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_bytes(content)
    try:
        assert read_image(path).image.mode == "RGB"
    except ImageError as error:
        assert str(path) in str(error)
