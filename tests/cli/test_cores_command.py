"""`selectivit cores` and `selectivit umap`: what they write, what they keep, and what they refuse."""

import json

import pytest
import torch

from conftest import write_photo

PICTURES = ("budgets", "attention", "paths", "listening")


@pytest.fixture
def veca(tmp_path):
    from selectivit.models.create import create_model

    torch.manual_seed(0)
    model = create_model("veca_tiny_patch14", patch_size=8, dim=16, depth=3, num_heads=2, hidden_dim=24, num_cores=6)
    with torch.no_grad():  # random attention is nearly uniform, and cores hardly move: make both show
        for block in model.blocks:
            block.attn.qkv.weight.mul_(30)
        model.bank.coord_steps.fill_(1.0)
    model.save_pretrained(tmp_path / "veca")
    return model.eval()


@pytest.fixture
def cores(run, veca, tmp_path):
    def call(*paths, **options):
        more = [x for name, value in options.items() for x in (f"--{name}", value)]
        sizes = () if "sizes" in options else ("--sizes", "32,48")
        return run("cores", *paths, "--model", tmp_path / "veca", "--out", tmp_path / "out", *sizes, *more)

    return call


def test_four_pictures_and_the_numbers_of_the_model(cores, veca, tmp_path, photos):
    status, out, err = cores(photos / "a.jpg", budgets="2,6")
    assert status == 0 and "1 done (0 kept), 0 skipped" in out, err
    for name in PICTURES:
        assert (tmp_path / "out" / f"a.{name}.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "out" / "a.cores.json").read_text())

    import selectivit as sv

    # both sizes are as near to 224, the model's own, as they get: the larger one is nearer
    image = sv.load_image(photos / "a.jpg", sv.preprocessing(veca), size=48)
    with torch.no_grad():
        out = veca(image, 2, maps=range(3))
    assert record["size"] == 48 and tuple(record["grid"]) == out.grid
    few = record["budgets"][0]
    torch.testing.assert_close(torch.tensor(few["core_coords"]), out.core_coords[:, 0], rtol=0, atol=1e-5)
    winners = torch.stack([m[0].mean(0) for m in out.patch_maps]).argmax(-1)
    shares = torch.stack([(winners == core).double().mean(-1) for core in range(2)], -1)
    torch.testing.assert_close(torch.tensor(few["listener_shares"]).double(), shares, rtol=0, atol=1e-5)
    assert few["moved"][0] == [0, 0] and max(few["moved"][2]) > 0

    with torch.no_grad():
        whole = veca(image, 6, maps=range(3))
    p = torch.stack([m[0].mean(0) for m in whole.core_maps])
    p = p / p.sum(-1, keepdim=True)
    effective = (-(p * p.log()).sum(-1)).exp()
    torch.testing.assert_close(torch.tensor(record["attention"]["effective_patches"]), effective, rtol=1e-3, atol=0)
    cosine = torch.cosine_similarity(out.patch_tokens, whole.patch_tokens, dim=-1).mean().item()
    (entry,) = [e for e in record["maps"] if (e["size"], e["num_cores"]) == (48, 2)]
    assert entry["cosine_to_largest_budget"] == pytest.approx(cosine, abs=1e-5)


def test_results_are_kept_until_photo_or_settings_change(cores, tmp_path, photos):
    both, options = (photos / "a.jpg", photos / "b.png"), {"sizes": "32", "budgets": "3"}
    assert cores(*both, **options)[0] == 0
    index = json.loads((tmp_path / "out" / "cores.json").read_text())
    assert [entry["state"] for entry in index["photos"]] == ["written"] * 2
    before = (tmp_path / "out" / "a.paths.png").stat().st_mtime_ns
    assert "2 done (2 kept)" in cores(*both, **options)[1]
    assert (tmp_path / "out" / "a.paths.png").stat().st_mtime_ns == before
    write_photo(photos / "b.png", seed=9)
    assert "2 done (1 kept)" in cores(*both, **options)[1]
    assert "1 done (0 kept)" in cores(photos / "a.jpg", sizes="32", budgets="2")[1]


def test_pictures_it_wrote_are_no_photos(cores, tmp_path, photos):
    cores(photos / "a.jpg")
    assert "1 done" in cores(tmp_path / "out", photos / "a.jpg")[1]


def test_a_bad_photo_is_named_and_skipped(cores, tmp_path, photos):
    (photos / "c.jpg").write_bytes(b"no picture")
    status, out, err = cores(photos / "c.jpg", photos / "a.jpg")
    assert status == 1 and "1 done" in out and "c.jpg" in err
    assert json.loads((tmp_path / "out" / "cores.json").read_text())["skipped"][0]["source"].endswith("c.jpg")


@pytest.mark.parametrize("size", [(400, 16), (16, 400), (1, 1)])
def test_photos_of_any_aspect(cores, tmp_path, size):
    status, _, err = cores(write_photo(tmp_path / "odd.png", size=(max(8, size[0]), max(8, size[1]))), sizes="16")
    assert status == 0, err


def test_chosen_cores_and_what_cannot_be(cores, run, tiny_model, tmp_path, photos):
    photo = photos / "a.jpg"
    assert cores(photo, cores="5,2", budgets="1,6")[0] == 0
    assert json.loads((tmp_path / "out" / "a.cores.json").read_text())["attention"]["drawn"] == [2, 5]
    for options, told in (
        ({"budgets": "0,2"}, "--budgets of 1 to 6 cores"),
        ({"budgets": "7"}, "--budgets of 1 to 6 cores"),
        ({"budgets": "x"}, "commas between"),
        ({"cores": "6"}, "--cores of 0 to 5"),
        ({"cores": "3", "budgets": "2"}, "--cores of 0 to 1"),
        ({"sizes": "0"}, "--sizes of 1 pixel or more"),
    ):
        status, _, err = cores(photo, **options)
        assert status == 2 and told in err, (options, err)
    status, _, err = run("cores", photo, "--model", tiny_model)
    assert status == 2 and "without cores" in err and "selectivit compare" in err
    status, _, err = cores(tmp_path / "nothing.jpg")
    assert status == 2 and "no photo to work on" in err


@pytest.mark.timeout(900)  # Numba compiles for ten seconds of a whole core
def test_umap_of_any_model(run, tiny_model, tmp_path, photos):
    pytest.importorskip("umap", reason="umap-learn is the extra `umap`")
    (photos / "c.jpg").write_bytes(b"no picture")
    options = ("--out", tmp_path / "out", "--neighbours", 5, "--points", 60)
    status, out, err = run("umap", photos, "--model", tiny_model, *options)
    assert status == 1 and "60 patches of 4 photos" not in out and "c.jpg" in err
    found = json.loads((tmp_path / "out" / "umap.json").read_text())
    assert [len(photo["points"]) for photo in found["photos"]] == [12] * 4  # 60 among the five that were asked for
    for photo in found["photos"]:
        assert len({tuple(place) for place in photo["patches"]}) == 12
        assert all(0 <= r < photo["grid"][0] and 0 <= c < photo["grid"][1] for r, c in photo["patches"])
    assert (tmp_path / "out" / "umap.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = run("umap", photos / "a.jpg", "--model", tiny_model, "--out", tmp_path / "out")
    assert status == 2 and "neighbours" in err


def test_umap_refuses_before_it_computes(run, tiny_model, photos):
    for option, told in (("--photos", "--photos of 1 or more"), ("--points", "--points of 1 or more")):
        status, _, err = run("umap", photos, "--model", tiny_model, option, 0)
        assert status == 2 and told in err


def test_the_picture_of_umap_is_no_photo(photos):
    from selectivit.cli.jobs import Outcome, find_photos

    (photos / "a.jpg").rename(photos / "umap.png")
    assert len(find_photos([str(photos)], Outcome(), lambda photo: False, first=True)) == 5
    (photos / "umap.json").write_text("{}")
    assert len(find_photos([str(photos)], Outcome(), lambda photo: False, first=True)) == 4
