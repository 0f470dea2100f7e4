"""The command line's probes on small folders: results, kept features, resumed runs, bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from conftest import save

# A shell's background jobs, and so tests run in one, start with Ctrl-C ignored; a terminal's do not.
FROM_A_TERMINAL = (
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from selectivit.cli.main import main; sys.exit(main(sys.argv[1:]))",
)
QUICK = ("--size", 32, "--device", "cpu")


@pytest.fixture
def probe(run, tiny_model, tmp_path):
    def call(*arguments, out="out", model=tiny_model):
        quick = () if "--size" in arguments else QUICK
        return run("probe", *arguments, "--model", model, "--out", tmp_path / out, *quick)

    return call


def runs(tmp_path, kind, out="out"):
    return json.loads((tmp_path / out / f"{kind}.json").read_text())["runs"]


def test_knn(probe, classes, tmp_path):
    status, out, err = probe("knn", classes, "--k", "1,5,100")
    assert status == 0, err
    assert "data: " in out and "3 classes, train 18 photos, val 9 photos" in out and "eval_knn.py" in out
    (run,) = runs(tmp_path, "knn")
    assert [row["k"] for row in run["result"]["rows"]] == [1, 5] and run["result"]["left_out_k"] == [100]
    assert run["result"]["rows"][0]["top1"] > 0.6 and run["settings"]["blocks"] == [2] and run["skipped"] == []
    assert (
        run["settings"]["view"] == {"kind": "centre", "size": 32, "resize": 37}
        and "2104.14294" in run["protocol"]["source"]
    )


def test_the_same_numbers_twice_and_kept_once(probe, classes, tmp_path):
    for out in ("one", "two"):
        assert probe("linear", classes, "--epochs", 3, "--lr", "0.1,1", "--head-batch", 8, out=out)[0] == 0
    one, two = runs(tmp_path, "linear", "one"), runs(tmp_path, "linear", "two")
    assert one == two and len(one[0]["result"]["rows"]) == 2
    status, out, _ = probe("linear", classes, "--epochs", 3, "--lr", "0.1,1", "--head-batch", 8, out="one")
    assert status == 0 and "kept from an earlier run" in out
    assert probe("linear", classes, "--epochs", 3, "--lr", "0.1,1", "--head-batch", 8, "--seed", 1, out="one")[0] == 0
    both = runs(tmp_path, "linear", "one")
    assert both[0] == one[0] and both[1]["settings"]["seed"] == 1 and len(both) == 2


def test_views_of_the_linear_probe_are_kept(probe, classes, tmp_path):
    assert probe("linear", classes, "--epochs", 4, "--views", 2, "--block", "last2")[0] == 0
    settings = [json.loads(p.read_text()) for p in (tmp_path / "out" / "features").glob("*/settings.json")]
    views = sorted(json.dumps(s["view"], sort_keys=True) for s in settings)
    assert len(views) == 3 and sum("random" in view for view in views) == 2
    assert runs(tmp_path, "linear")[0]["settings"]["blocks"] == [1, 2]


def test_logistic(probe, classes, tmp_path):
    status, out, err = probe(
        "linear", classes, "--protocol", "logistic", "--tokens", "cls+patch", "--strength", "1,100"
    )
    assert status == 0, err
    assert "of the held-out training photos" in out and "best: c" in out
    assert runs(tmp_path, "linear")[0]["result"]["best"]["top1"] > 0.6


def test_segmentation(probe, streets, tmp_path):
    status, out, err = probe("segmentation", streets, "--steps", 40, "--head-batch", 64)
    assert status == 0, err
    assert "2 classes, learnt from 4 photos (train), scored on 2 (val)" in out and "mIoU" in out
    (run,) = runs(tmp_path, "segmentation")
    assert set(run["result"]["iou"]) == {"dark", "bright"} and run["result"]["miou"] > 0.7
    assert run["settings"]["training"]["steps"] == 40 and run["settings"]["training"]["warmup"] == 4
    assert not (tmp_path / "out" / "unfinished").exists() or not any((tmp_path / "out" / "unfinished").iterdir())


def test_segmentation_as_dinov2(probe, streets, tmp_path):
    arguments = ("--protocol", "dinov2", "--steps", 3, "--head-batch", 2, "--crop", 32)
    status, out, err = probe("segmentation", streets, *arguments)
    assert status == 0, err
    assert "crops and windows of 32 x 32 px, windows 21 px apart" in out and "2304.07193" in out
    assert runs(tmp_path, "segmentation")[0]["settings"]["protocol"] == "dinov2"
    assert not (tmp_path / "out" / "features").exists()


def test_depth_of_a_folder_without_splits(probe, rooms, tmp_path):
    status, _, err = probe("depth", rooms)
    assert status == 2 and "has no split 'train'" in err and "--holdout 0.2" in err
    arguments = ("--holdout", 0.2, "--steps", 20, "--head-batch", 2)
    status, out, err = probe("depth", rooms, *arguments)
    assert status == 0, err
    assert "learnt from 8 photos (folder, first 8 in the order of names), scored on 2" in out and "RMSE" in out
    (run,) = runs(tmp_path, "depth")
    assert set(run["result"]) == {"rmse", "abs_rel", "delta1", "delta2", "delta3", "photos"}
    assert run["settings"]["tokens"] == "cls+patch" and run["settings"]["data"]["scored_crop"] == "none"
    assert probe("depth", rooms, *arguments, "--eval-crop", "eigen")[0] == 0
    assert [r["settings"]["data"]["scored_crop"] for r in runs(tmp_path, "depth")] == ["none", "eigen"]


def test_depth_as_dinov2_and_on_another_data_set(probe, rooms, tmp_path):
    import shutil

    for i, path in enumerate(sorted(rooms.glob("*.color.png"))):
        split = "train" if i < 6 else "val"
        for end in ("color", "depth"):
            target = tmp_path / "split" / split / path.name.replace("color", end)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.with_name(path.name.replace("color", end)), target)
    arguments = ("--protocol", "dinov2", "--steps", 2, "--head-batch", 2, "--crop", "24,32")
    status, out, err = probe("depth", tmp_path / "split", *arguments)
    assert status == 0, err
    assert "crops of 24 x 32 px" in out
    arguments = ("--eval-on", rooms, "--val-split", "all", "--steps", 2, "--head-batch", 2)
    status, out, err = probe("depth", tmp_path / "split", *arguments)
    assert status == 0, err
    assert "learnt from 6 photos (folder, train), scored on 10 (folder, all)" in out


def test_every_block_in_one_table_and_one_plot(probe, streets, tmp_path):
    quick = ("--steps", 20, "--head-batch", 64)
    status, out, err = probe("layers", "segmentation", streets, *quick)
    assert status == 0, err
    assert "each of 0, 1, 2" in out and "best: block" in out
    (series,) = runs(tmp_path, "layers.segmentation")
    assert [point["block"] for point in series["result"]["points"]] == [0, 1, 2]
    alone = runs(tmp_path, "segmentation")
    assert [r["result"] for r in alone] == [point["result"] for point in series["result"]["points"]]
    with Image.open(tmp_path / "out" / "layers.segmentation.png") as picture:
        assert picture.size[0] > 500
    status, out, _ = probe("layers", "segmentation", streets, *quick, "--tokens", "cls+patch", "--block", "0,2")
    assert status == 0 and len(runs(tmp_path, "layers.segmentation")) == 2
    status, out, _ = probe("layers", "segmentation", streets, *quick)
    assert status == 0 and out.count("(kept)") == 3 and len(runs(tmp_path, "layers.segmentation")) == 2


def test_blocks_of_a_first_and_a_second_run_stand_in_one_series(probe, classes, tmp_path):
    for blocks in ("0,2", "1"):
        assert probe("layers", "knn", classes, "--block", blocks, "--k", "3")[0] == 0
    (series,) = runs(tmp_path, "layers.knn")
    assert [point["block"] for point in series["result"]["points"]] == [0, 1, 2]


def test_a_swap_has_features_and_results_of_its_own(probe, streets, tmp_path):
    quick = ("--steps", 10, "--head-batch", 64)
    assert probe("segmentation", streets, *quick)[0] == 0
    status, out, _ = probe("segmentation", streets, *quick, "--normalizer", "sparsemax", "--layers", "-1")
    assert status == 0 and "sparsemax, layers -1" in out
    plain, swapped = runs(tmp_path, "segmentation")
    assert plain["settings"]["model"]["attention"] == "softmax"
    assert swapped["settings"]["model"]["attention"]["normalizer"] == "sparsemax"
    assert plain["result"] != swapped["result"]
    assert len(list((tmp_path / "out" / "features").iterdir())) == 4  # two splits of each


def test_features_are_shared_between_folders_and_heads(probe, streets, tmp_path, monkeypatch):
    from selectivit.eval import feature_cache

    quick = ("--steps", 10, "--head-batch", 64, "--cache", tmp_path / "kept")
    assert probe("segmentation", streets, *quick)[0] == 0

    def no_forward(*_, **__):
        raise AssertionError("the features were there")

    monkeypatch.setattr(feature_cache, "block_features", no_forward)
    for more in (("--seed", 3), ("--lr", 0.1), ("--tokens", "cls+patch")):
        status, _, err = probe("segmentation", streets, *quick, *more, out="other")
        assert status == 0, err
    assert len(runs(tmp_path, "segmentation", "other")) == 3


def test_a_core_periphery_model(run, classes, tmp_path):
    import selectivit as sv

    small = {"patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2, "hidden_dim": 24, "num_cores": 6}
    sv.create_model("veca_tiny_patch14", **small).save_pretrained(tmp_path / "veca")
    arguments = ("--model", tmp_path / "veca", "--out", tmp_path / "out", *QUICK, "--k", "1", "--block", "all")
    assert run("probe", "layers", "knn", classes, *arguments)[0] == 0
    assert run("probe", "layers", "knn", classes, *arguments, "--num-cores", 2)[0] == 0
    assert len(runs(tmp_path, "layers.knn")) == 2
    status, _, err = run("probe", "knn", classes, *arguments[:-2], "--num-cores", 7)
    assert status == 2 and "7" in err


# --- what is skipped and what is refused -------------------------------------------------------------------------


def test_bad_photos_and_masks_are_named_and_left_out(probe, streets, classes, tmp_path):
    (classes / "val" / "dark" / "0.png").write_bytes(b"no picture")
    status, _, err = probe("knn", classes, "--k", "1")
    assert status == 1 and "0.png is not a picture" in err
    assert [entry["source"][-10:] for entry in runs(tmp_path, "knn")[0]["skipped"]] == ["dark/0.png"]
    save(streets / "masks" / "train" / "1.png", np.full((32, 48), 9, dtype=np.uint8))
    status, _, err = probe("segmentation", streets, "--steps", 5, "--head-batch", 16)
    assert status == 1 and "holds ids that are on no list: 9" in err
    assert len(runs(tmp_path, "segmentation")[0]["skipped"]) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("knn", "nowhere"), "it is no folder"),
        (("knn", "classes", "--val-split", "test"), "has no split 'test'"),
        (("knn", "classes", "--k", "a"), "expected numbers with commas between"),
        (("knn", "classes", "--k", "100"), "expected --k of 1 to the 18 training photos"),
        (("knn", "classes", "--block", "3"), "expected --block of 0 to 2"),
        (("knn", "classes", "--block", "first"), "expected --block -1, numbers such as"),
        (("knn", "classes", "--tokens", "all"), "expected --tokens cls, patch, cls+patch"),
        (("knn", "classes", "--size", "36"), "a crop of 36 px does not fit the model's patches of 8 px"),
        (("knn", "classes", "--batch-size", "0"), "expected --batch-size and --size of 1 or more"),
        (("linear", "classes", "--protocol", "best"), "expected --protocol dino or logistic"),
        (("linear", "classes", "--lr", "x"), "expected numbers with commas between for --lr"),
        (("linear", "classes", "--epochs", "0"), "expected epochs"),
        (("segmentation", "classes"), "has none of the layouts"),
        (("segmentation", "streets", "--val-split", "night"), "has no split 'night'"),
        (("segmentation", "streets", "--protocol", "slow"), "expected --protocol fast or dinov2"),
        (("segmentation", "streets", "--protocol", "dinov2", "--crop", "30"), "a crop of 30 px does not fit"),
        (("segmentation", "streets", "--steps", "0"), "expected steps"),
        (("depth", "rooms", "--holdout", "1.5"), "expected --holdout between 0 and 1"),
        (("depth", "rooms", "--holdout", "0.2", "--eval-crop", "middle"), "expected --eval-crop none, eigen"),
        (("depth", "rooms", "--holdout", "0.2", "--units", "1"), "check --units"),
        (("depth", "rooms", "--holdout", "0.2", "--protocol", "dinov2", "--crop", "10"), "expected --crop HEIGHT"),
    ],
)  # fmt: skip
def test_bad_input(probe, classes, streets, rooms, tmp_path, arguments, told):
    kind, data, *more = arguments
    status, _, err = probe(kind, tmp_path / data, *more)
    assert status == 2 and told in err, err
    assert not list(tmp_path.glob("out/*.json"))


def test_masks_that_are_all_void_and_depth_that_is_none(probe, streets, rooms, tmp_path):
    (streets / "masks" / "val" / "0.png").rename(streets / "masks" / "val" / "x.png")
    status, _, err = probe("segmentation", streets)
    assert status == 2 and "without a picture" in err
    for path in (streets / "masks" / "train").iterdir():
        save(path, np.full((32, 48), 2, dtype=np.uint8))
    status, _, err = probe("segmentation", streets)
    assert status == 2 and "hold nothing but void" in err
    for path in rooms.glob("*.depth.png"):
        save(path, np.zeros((32, 48), dtype=np.uint16))
    status, _, err = probe("depth", rooms, "--holdout", 0.2)
    assert status == 2 and "holds 0 everywhere, which stands for no depth" in err


def test_a_killed_run_goes_on_and_ends_the_same(probe, streets, tmp_path, tiny_model, environment):
    arguments = ["probe", "segmentation", streets, "--model", tiny_model, "--size", 32, "--device", "cpu"]
    arguments += ["--steps", 600, "--head-batch", 8, "--checkpoint-every", 10, "--out", tmp_path / "killed"]
    process = subprocess.Popen([*FROM_A_TERMINAL, *map(str, arguments)], env=environment, stderr=subprocess.PIPE)
    unfinished, start = tmp_path / "killed" / "unfinished", time.monotonic()
    while not (unfinished.is_dir() and any(p.suffix == ".pt" for p in unfinished.iterdir())):
        assert process.poll() is None and time.monotonic() - start < 200, process.stderr.read().decode()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    if process.returncode == 0:
        pytest.skip("the training was over before the signal came")
    assert process.returncode == 130 and b"interrupted" in err
    assert not (tmp_path / "killed" / "segmentation.json").exists()
    same = ("--steps", 600, "--head-batch", 8)
    assert probe("segmentation", streets, *same, out="killed")[0] == 0
    assert probe("segmentation", streets, *same, out="whole")[0] == 0
    assert runs(tmp_path, "segmentation", "killed") == runs(tmp_path, "segmentation", "whole")


def test_results_that_cannot_be_read_are_told(probe, classes, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "knn.json").write_text("no json")
    status, _, err = probe("knn", classes, "--k", "1")
    assert status == 0 and "could not be read: earlier results are not kept" in err and len(runs(tmp_path, "knn")) == 1


def test_config_file(run, classes, tiny_model, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"model: {tiny_model}\nsize: 32\nk: '3'\nblock: '0,1'\ndevice: cpu\n")
    assert run("probe", "knn", classes, "--config", config)[0] == 0
    assert runs(tmp_path, "knn")[0]["settings"]["blocks"] == [0, 1]


def test_two_processes_find_what_one_finds(probe, classes, tiny_model, tmp_path, environment):
    from selectivit.eval.token_table import read_shard

    arguments = [
        "probe",
        "layers",
        "knn",
        classes,
        "--model",
        tiny_model,
        "--out",
        tmp_path / "two",
        *QUICK,
        "--k",
        "1,5",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "selectivit.cli.main"]
    done = subprocess.run([*torchrun, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert probe("layers", "knn", classes, "--k", "1,5", out="one")[0] == 0
    assert runs(tmp_path, "layers.knn", "two") == runs(tmp_path, "layers.knn", "one")
    assert read_shard(next((tmp_path / "two" / "features").rglob("*.safetensors")), "of other settings") is None
