"""Kept features: equal to the model's, of several blocks in one pass, resumed, never those of other settings."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from probe_parts import DEPTH, WIDTH, photo_set, tiny_model, write_photos

import selectivit as sv
from selectivit.data.images import read_image
from selectivit.data.transforms import to_tensor
from selectivit.data.views import View
from selectivit.eval import feature_cache
from selectivit.eval.feature_cache import FeatureCache
from selectivit.eval.identity import model_identity
from selectivit.eval.token_table import TokenTable
from selectivit.features import features, preprocessing

WHOLE = View("whole", 32)


@pytest.fixture
def parts(tmp_path):
    model = tiny_model()
    paths = write_photos(tmp_path / "photos", 5)
    return FeatureCache(tmp_path / "cache", model, model_identity(model, "tiny"), batch_size=2), photo_set(paths), paths


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(feature_cache, "SHARD", {"dense": 2, "pooled": 2})


@pytest.fixture
def forwards(monkeypatch):
    """How many photos passed the model."""
    seen = []
    compute = feature_cache.block_features

    def counted(model, images, *more, **options):
        seen.append((len(images), *more))
        return compute(model, images, *more, **options)

    monkeypatch.setattr(feature_cache, "block_features", counted)
    return seen


def as_seen(model, path):
    expected = preprocessing(model)
    image = read_image(path).image
    return to_tensor(image, mean=expected.mean, std=expected.std, patch_size=expected.patch_size, size=32)[None]


@pytest.mark.parametrize("tokens", ["patch", "cls", "cls+patch"])
def test_kept_tokens_are_the_models(parts, small_files, tokens):
    cache, photos, paths = parts
    table = TokenTable(cache.blocks(photos, WHOLE, [0, -1], "dense"), tokens)
    assert table.width == WIDTH * 2 * (2 if tokens == "cls+patch" else 1)
    for i, path in enumerate(paths):
        wanted = []
        for layer in (0, -1):
            with torch.inference_mode():
                f = features(cache.model, as_seen(cache.model, path), layer=layer)
            cls = f.cls[0, :, None, None].expand(-1, *f.grid)
            wanted += [part for name, part in (("cls", cls), ("patch", f.map[0])) if name in tokens]
        assert torch.allclose(table.photo(i), torch.cat(wanted), rtol=2e-3, atol=2e-3)
    assert table.grids.tolist() == [[4, 5], [5, 4]] * 2 + [[4, 5]]


def test_pooled_tokens_are_means(parts):
    cache, photos, _ = parts
    dense, pooled = (TokenTable(cache.blocks(photos, WHOLE, [1], kind), "patch") for kind in ("dense", "pooled"))
    means = torch.stack([dense.photo(i).mean((1, 2)) for i in range(5)])
    torch.testing.assert_close(pooled.rows(torch.arange(5)), means, atol=2e-3, rtol=2e-3)


def test_rows_are_found_in_any_order(parts, small_files):
    cache, photos, _ = parts
    table = TokenTable(cache.blocks(photos, WHOLE, [2], "dense"), "cls+patch")
    whole = torch.cat([table.photo(i).flatten(1).t() for i in range(5)])
    pick = torch.randint(table.num_rows, (50,), generator=torch.Generator().manual_seed(0))
    assert table.num_rows == 100 and torch.equal(table.rows(pick), whole[pick])


def test_blocks_come_from_one_pass_and_are_kept(parts, forwards):
    cache, photos, _ = parts
    cache.blocks(photos, WHOLE, [0, 2], "dense")
    assert sum(n for n, *_ in forwards) == 5 and all(blocks == [0, 2] for _, blocks in forwards)
    forwards.clear()
    cache.blocks(photos, WHOLE, [2, 0, -1], "dense")
    assert forwards == []
    cache.blocks(photos, WHOLE, [1, 2], "dense")  # only what is missing
    assert all(blocks == [1] for _, blocks in forwards) and sum(n for n, *_ in forwards) == 5


def change(cache, photos, paths, what):
    """Another setting; gives the cache, the photos, the view."""
    from dataclasses import replace

    identity, model = cache.identity, cache.model
    if what == "weights":
        other = tiny_model(seed=1)
        return replace(cache, model=other, identity=model_identity(other, "tiny")), photos, WHOLE
    if what == "structure":  # the same weights in another number of heads
        other = tiny_model(num_heads=4)
        other.load_state_dict(model.state_dict())
        return replace(cache, model=other, identity=model_identity(other, "tiny")), photos, WHOLE
    if what == "swap":
        return replace(cache, identity={**identity, "attention": {"normalizer": "entmax", "alpha": 1.5}}), photos, WHOLE
    if what == "norm":
        return replace(cache, norm=False), photos, WHOLE
    if what == "size":
        return cache, photos, View("whole", 40)
    if what == "view":
        return cache, photos, View("centre", 32, resize=32)
    if what == "photos":
        Image.new("RGB", (40, 32)).save(paths[0])
        return cache, photo_set(paths), WHOLE
    return cache, photo_set(paths[:-1]), WHOLE  # fewer


@pytest.mark.parametrize("what", ["weights", "structure", "swap", "norm", "size", "view", "photos", "fewer"])
def test_other_settings_are_computed_anew(parts, forwards, what):
    cache, photos, paths = parts
    cache.blocks(photos, WHOLE, [-1], "dense")
    forwards.clear()
    other, photos, view = change(cache, photos, paths, what)
    other.blocks(photos, view, [-1], "dense")
    assert sum(n for n, *_ in forwards) == len(photos.photos)


def test_a_swapped_model_has_other_features(parts):
    from dataclasses import replace

    cache, photos, _ = parts
    plain = TokenTable(cache.blocks(photos, WHOLE, [-1], "dense"), "patch")
    with sv.swap_attention(cache.model, alpha=2.0):
        sparse = replace(cache, identity=model_identity(cache.model, "tiny", {"alpha": 2.0}))
        swapped = TokenTable(sparse.blocks(photos, WHOLE, [-1], "dense"), "patch")
    assert (swapped.photo(0) - plain.photo(0)).abs().max() > 1e-2
    assert torch.equal(TokenTable(cache.blocks(photos, WHOLE, [-1], "dense"), "patch").photo(0), plain.photo(0))


def test_a_file_of_other_settings_is_not_taken(parts, forwards):
    """Even in the right place under the right name: each file says what it was made with."""
    cache, photos, _ = parts
    cache.blocks(photos, WHOLE, [0, 1], "dense")
    (folder,) = cache.root.iterdir()
    from dataclasses import replace

    other = replace(cache, norm=False)
    other.blocks(photos, WHOLE, [0], "dense")
    (theirs,) = [f for f in cache.root.iterdir() if f != folder]
    name = "block-00/00000.safetensors"
    (folder / name).write_bytes((theirs / name).read_bytes())
    forwards.clear()
    cache.blocks(photos, WHOLE, [0], "dense")
    assert sum(n for n, *_ in forwards) == 5
    assert json.loads((folder / "settings.json").read_text())["model"]["norm"] is True


def test_an_interrupted_extraction_goes_on(parts, small_files, forwards, monkeypatch):
    cache, photos, _ = parts
    write, written = feature_cache.write_atomic, []

    def interrupted(path, data):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, data)

    monkeypatch.setattr(feature_cache, "write_atomic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.blocks(photos, WHOLE, [-1], "dense")
    monkeypatch.setattr(feature_cache, "write_atomic", write)
    forwards.clear()
    resumed = TokenTable(cache.blocks(photos, WHOLE, [-1], "dense"), "patch")
    assert sum(n for n, *_ in forwards) == 1  # two files of two photos were there
    from dataclasses import replace

    fresh = replace(cache, root=cache.root / "fresh")
    whole = TokenTable(fresh.blocks(photos, WHOLE, [-1], "dense"), "patch")
    assert all(torch.equal(resumed.photo(i), whole.photo(i)) for i in range(5))


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut"])
def test_a_damaged_file_is_made_anew(parts, small_files, damage):
    cache, photos, _ = parts
    before = TokenTable(cache.blocks(photos, WHOLE, [-1], "dense"), "patch").photo(2).clone()
    path = next(cache.root.glob(f"*/block-{DEPTH - 1:02d}/00001.safetensors"))
    content = path.read_bytes()
    path.unlink()  # the file may still be mapped into memory
    path.write_bytes(content[:-7] if damage == "cut" else damage)
    assert torch.equal(TokenTable(cache.blocks(photos, WHOLE, [-1], "dense"), "patch").photo(2), before)


def test_two_processes_share_the_files_and_give_the_same(parts, small_files):
    from dataclasses import replace

    cache, photos, _ = parts
    alone = TokenTable(cache.blocks(photos, WHOLE, [0, 1], "dense"), "patch")
    shared = replace(cache, root=cache.root / "shared")
    first = replace(shared, share=lambda files: files[1::2])

    def other_rank():
        first.blocks(photos, WHOLE, [0, 1], "dense")

    with pytest.raises(ValueError, match="is missing or of other settings"):
        other_rank()  # alone it has its own files only
    both = replace(shared, share=lambda files: files)
    together = TokenTable(both.blocks(photos, WHOLE, [0, 1], "dense"), "patch")
    for i in range(5):
        torch.testing.assert_close(together.photo(i), alone.photo(i), atol=1e-3, rtol=1e-3)


def test_photos_that_cannot_be_read_are_left_out_and_named(parts, small_files, tmp_path):
    cache, _, paths = parts
    for path in paths[2:4]:
        path.write_bytes(b"no picture")  # a whole file of the cache, too
    photos = photo_set(paths)
    tables = cache.blocks(photos, WHOLE, [-1], "dense")
    assert tables[0].readable == [True, True, False, False, True] and set(tables[0].problems) == set(
        map(str, paths[2:4])
    )
    table = TokenTable(tables, "cls+patch")
    with torch.inference_mode():
        f = features(cache.model, as_seen(cache.model, paths[4]))
    assert torch.allclose(table.photo(4)[WIDTH:], f.map[0], rtol=2e-3, atol=2e-3)
    assert torch.allclose(table.photo(4)[:WIDTH, 0, 0], f.cls[0], rtol=2e-3, atol=2e-3)
    for path in paths:
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match="none of the 5 photos of photos can be read; the last"):
        cache.blocks(photo_set(paths), WHOLE, [-1], "dense")


def test_what_is_refused(parts):
    cache, photos, _ = parts
    with pytest.raises(ValueError, match=r"expected blocks of 0 to 2, or -3 to -1 from the end, got \[3\]"):
        cache.blocks(photos, WHOLE, [3], "dense")
    with pytest.raises(ValueError, match="a crop of 30 px does not fit the model's patches of 8 px"):
        cache.blocks(photos, View("centre", 30, resize=32), [0], "dense")
    with pytest.raises(ValueError, match="expected --tokens cls, patch"):
        TokenTable(cache.blocks(photos, WHOLE, [0], "dense"), "all")
    headless = tiny_model(class_token=False, global_pool="avg", fc_norm=False)
    bare = FeatureCache(cache.root, headless, model_identity(headless, "bare"))
    with pytest.raises(ValueError, match="has no class token: expected --tokens patch"):
        TokenTable(bare.blocks(photos, WHOLE, [0], "dense"), "cls+patch")


def test_features_too_large_for_half_precision_are_told(parts):
    from dataclasses import replace

    cache, photos, _ = parts
    with torch.no_grad():
        cache.model.pos_embed.mul_(1e7)
    with pytest.raises(ValueError, match=r"not finite in half precision.*--norm true"):
        replace(cache, norm=False).blocks(photos, WHOLE, [0], "dense")
