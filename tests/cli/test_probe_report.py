"""`selectivit probe report`: what it puts together, what it refuses, and pages that need nothing beside them."""

import json
import re
import shlex
import shutil
import statistics
from html.parser import HTMLParser

import pytest
import torch

from conftest import make_classes, make_rooms, make_streets, write_photo
from selectivit.cli.main import main

QUICK = ("--size", 32, "--device", "cpu")
HEAD = ("--steps", 8, "--head-batch", 64)


def save_tiny(folder, seed):
    from timm.models._hub import save_for_hf

    timm = pytest.importorskip("timm")
    torch.manual_seed(seed)
    arguments = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    save_for_hf(model, str(folder), safe_serialization=True, model_args=arguments)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of every kind by two models, two attentions, three seeds; made once."""
    root = tmp_path_factory.mktemp("made")
    patch = pytest.MonkeyPatch()
    patch.setenv("SELECTIVIT_CACHE", str(root / "cache"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    one, two = save_tiny(root / "models" / "one", 0), save_tiny(root / "models" / "two", 1)
    classes, streets = make_classes(root / "classes"), make_streets(root / "streets")
    rooms = make_rooms(root / "rooms")

    def probe(*arguments):
        assert main(["probe", *map(str, arguments)]) == 0

    for name, model in (("one", one), ("two", two)):
        place = ("--model", model, "--out", root / "results" / name, *QUICK)
        probe("knn", classes, "--k", "1,5", *place)
        probe("linear", classes, "--epochs", 2, "--lr", "0.1,1", "--head-batch", 8, "--block", "last2", *place)
        probe("layers", "segmentation", streets, *HEAD, *place)
        for seed in (0, 1, 2):
            probe("segmentation", streets, *HEAD, *place, "--tokens", "cls+patch", "--seed", seed)
        probe("depth", rooms, "--holdout", 0.2, "--steps", 4, "--head-batch", 2, *place)
    swap = ("--normalizer", "sparsemax", "--layers", "-1")
    probe("segmentation", streets, *HEAD, *QUICK, "--model", one, *swap, "--out", root / "results" / "swapped")
    seen = ("--resize", 36, "--size", 32, "--max-area", 1, "--objects", "any", "--device", "cpu", "--pictures", 0)
    models = ("--model", one, "--model", two)
    probe("point-in-box", streets, *models, *seen, "--out", root / "results" / "pib")
    place = ("--model", one, "--out", root / "others", *QUICK)
    crops = ("--protocol", "dinov2", "--steps", 2, "--head-batch", 2)
    probe("linear", classes, "--protocol", "logistic", "--strength", "0.5,100", "--tokens", "cls+patch", *place)
    probe("segmentation", streets, *crops, "--crop", 32, "--norm", "false", "--block", "0,2", *place)
    swap = ("--normalizer", "entmax", "--alpha", 1.3, "--scores", "qq", "--layers", "0,")
    probe("depth", rooms, "--holdout", 0.3, *crops, "--crop", "24,32", "--eval-crop", "eigen", *swap, *place)
    patch.undo()
    return root


@pytest.fixture
def results(made, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(made / "results", tmp_path / "results", ignore=shutil.ignore_patterns("features"))


def report(run, tmp_path, *arguments, status=0):
    found, out, err = run("probe", "report", *arguments, "--out", tmp_path / "page")
    assert found == status, err
    return json.loads((tmp_path / "page" / "report.json").read_text()), out, err


def tables(content, task):
    return next((each["measured"] for each in content["tasks"] if each["task"] == task), [])


def rows(table):
    return {(row["model"], row["attention"], row["blocks"]): row["cells"] for row in table["rows"]}


class Strict(HTMLParser):
    """Every tag is closed in its order, and nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert name not in ("src", "href", "srcset") or value.startswith("data:image/png;base64,")
        assert tag not in ("script", "link", "iframe")
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "img":
            assert dict(attrs)["alt"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_page(folder):
    parser = Strict()
    text = (folder / "report.html").read_text()
    parser.feed(text)
    assert parser.open == [] and "url(" not in text and "@import" not in text
    return " ".join(parser.text)


def test_every_kind_stands_on_one_page_with_the_numbers_of_its_json(run, results, tmp_path):
    content, out, _ = report(run, tmp_path, results)
    assert [each["task"] for each in content["tasks"]] == ["knn", "linear", "segmentation", "depth", "point-in-box"]
    assert all(len(each["measured"]) == 1 for each in content["tasks"]), content["warnings"]
    (table,) = tables(content, "segmentation")
    cells = rows(table)
    runs = json.loads((results / "one" / "segmentation.json").read_text())["runs"]
    seeds = [100 * r["result"]["miou"] for r in runs if r["settings"]["tokens"] == "cls+patch"]
    cell = cells["one", "softmax", "2"]["mIoU %"]["cls+patch"]
    assert cell["mean"] == pytest.approx(statistics.fmean(seeds)) and cell["std"] == pytest.approx(
        statistics.stdev(seeds)
    )
    assert cell["seeds"] == [0, 1, 2] and len(set(seeds)) > 1
    blocks = {r["settings"]["blocks"][0]: 100 * r["result"]["miou"] for r in runs if r["settings"]["tokens"] == "patch"}
    assert table["curves"]["one, softmax, patch"] == [[b, pytest.approx(blocks[b])] for b in (0, 1, 2)]
    best = cells["one", "softmax", "best of 3"]["mIoU %"]["patch"]
    assert best["mean"] == pytest.approx(max(blocks.values())) and blocks[best["block"]] == max(blocks.values())
    assert set(cells) == {
        *(("one", "softmax", b) for b in ("2", "best of 3")),
        *(("two", "softmax", b) for b in ("2", "best of 3")),
        ("one", "sparsemax, layers -1", "2"),
    }
    (linear,) = tables(content, "linear")
    assert ("one", "softmax", "1, 2") in rows(linear)
    knn = json.loads((results / "two" / "knn.json").read_text())["runs"][0]["result"]["rows"][1]
    assert knn["k"] == 5  # the nearest to 20
    assert rows(tables(content, "knn")[0])["two", "softmax", "2"]["top-1 %"]["cls"]["mean"] == 100 * knn["top1"]
    point = json.loads((results / "pib" / "point_in_box.json").read_text())["models"][1]["blocks"][2]
    cell = rows(tables(content, "point-in-box")[0])["two", "softmax", "2"]["PiB %"]["cls"]
    assert cell["mean"] == 100 * point["pib"] and cell["interval"] == [100 * edge for edge in point["interval95"]]
    assert "in 5 tables" in out
    assert [row["attention"] for row in table["rows"] if row["model"] == "one"] == ["softmax"] * 2 + [
        "sparsemax, layers -1"
    ]


def test_page_and_markdown_say_the_same_and_need_nothing_beside_them(run, results, tmp_path):
    content, *_ = report(run, tmp_path, results)
    page, text = read_page(tmp_path / "page"), (tmp_path / "page" / "report.md").read_text()
    for each in content["tasks"]:
        for table in each["measured"]:
            for pair in table["about"]:
                assert pair[1] in page
            for row in table["rows"]:
                for by_tokens in row["cells"].values():
                    for cell in by_tokens.values():
                        assert any(f"{cell['mean']:.{digits}f}" in page for digits in (1, 2, 4))
                        assert any(f"{cell['mean']:.{digits}f}" in text for digits in (1, 2, 4))
    for name in re.findall(r"\]\((pictures/[^)]+)\)", text):
        assert (tmp_path / "page" / name).read_bytes().startswith(b"\x89PNG")
    assert text.count("pictures/curve.") == 2 and (tmp_path / "page" / "report.html").read_text().count("<img") == 2
    assert "2304.07193" in page and "shorter side 32 px" in page and "2 classes, learnt from 4 photos (train)" in page


def test_the_best_of_a_column_is_marked(run, results, tmp_path):
    content, *_ = report(run, tmp_path, results)
    for task, higher in (("segmentation", True), ("depth", False)):
        (table,) = tables(content, task)
        name = table["metrics"][0]["name"]
        assert table["metrics"][0]["higher_is_better"] is higher
        for tokens in table["tokens"]:
            cells = [row["cells"][name] for row in table["rows"] if not row["chosen"]]
            fixed = [each[tokens] for each in cells if tokens in each]
            best = (max if higher else min)(cell["mean"] for cell in fixed)
            assert {cell["mean"] == best for cell in fixed if cell["best"]} == {True}
            assert sum(cell["best"] for cell in fixed) >= 1
    (table,) = tables(content, "point-in-box")
    assert not any(cell["best"] for row in table["rows"] for cell in row["cells"]["chance %"].values())


def test_papers_numbers_stand_apart(run, results, tmp_path):
    content, *_ = report(run, tmp_path, results)
    for each in content["tasks"]:
        measured = json.dumps(each["measured"])
        for row in each["reported"]:
            assert "arXiv" in row["source"] and row["source"] not in measured
    page = read_page(tmp_path / "page")
    assert "48.78" in page and "Reported: Vision Transformers Need Better Token Interaction, arXiv 2605.23868" in page
    text = (tmp_path / "page" / "report.md").read_text()
    assert "| entmax-1.5 | 48.78 | 21.97 | 37.87 |" in text and "not measured here" in text


@pytest.mark.parametrize(("folder", "expected"), [("results", 16), ("others", 3)])
def test_the_commands_find_the_runs_that_they_stand_for(run, made, tmp_path, folder, expected):
    """Each command, its data put in, takes every result from where it lies."""
    results = shutil.copytree(made / folder, tmp_path / folder)
    content, *_ = report(run, tmp_path, results)
    data = {"segmentation": made / "streets", "depth": made / "rooms"}
    before = {path: path.read_text() for path in results.rglob("*.json")}
    count = 0
    for each in content["tasks"]:
        for line in [line for table in each["measured"] for line in table["commands"]]:
            words = shlex.split(line)
            assert words[:2] == ["selectivit", "probe"]
            words = [str(data[each["task"]]) if word == "DATA" else word for word in words[1:]]
            status, out, err = run(*words, "--device", "cpu", *(["--pictures", 0] * ("point-in-box" in words)))
            assert status == 0, err
            wanted = 3 if "layers" in words else 0 if "point-in-box" in words else 1
            assert out.count("(kept") == wanted, f"{line}\n{out}"
            count += 1
    after = {path: path.read_text() for path in results.rglob("*.json")}
    assert count == expected and {p.name for p in before if before[p] != after[p]} <= {"point_in_box.json"}
    for path in results.rglob("point_in_box.json"):  # its settings hold the folder, which the copy has moved
        assert json.loads(before[path])["models"] == json.loads(after[path])["models"]


def test_what_does_not_compare_stands_in_tables_of_its_own(run, results, tmp_path):
    path = results / "two" / "segmentation.json"
    content = json.loads(path.read_text())
    for each in content["runs"]:
        each["settings"]["view"]["size"] = 48
    path.write_text(json.dumps(content))
    (results / "two" / "layers.segmentation.json").unlink()
    depth = results / "two" / "depth.json"
    depth.write_text(
        depth.read_text().replace(
            json.loads(depth.read_text())["runs"][0]["settings"]["data"]["val"]["sha256"], "0" * 64
        )
    )
    found, _, err = report(run, tmp_path, results)
    assert len(tables(found, "segmentation")) == 2 and len(tables(found, "depth")) == 2
    assert any("2 tables do not compare" in text and "view size: 32 / 48" in text for text in found["warnings"])
    assert any("Depth" in text and "data val: other files" in text for text in found["warnings"])
    assert "do not compare" in err and "not to be compared with the others" in read_page(tmp_path / "page")
    for table in tables(found, "depth"):
        assert not any(cell["best"] for row in table["rows"] for by in row["cells"].values() for cell in by.values())


def test_a_seed_counts_once_and_other_findings_of_it_are_told(run, results, tmp_path):
    again = shutil.copytree(results / "one", tmp_path / "again")
    content, *_ = report(run, tmp_path, results, again)
    (table,) = tables(content, "segmentation")
    assert rows(table)["one", "softmax", "2"]["mIoU %"]["cls+patch"]["seeds"] == [0, 1, 2]
    assert not any("two runs" in text for text in content["warnings"])
    path = again / "depth.json"
    spoilt = json.loads(path.read_text())
    spoilt["runs"][0]["result"]["rmse"] += 1
    path.write_text(json.dumps(spoilt))
    content, *_ = report(run, tmp_path, results, again)
    (told,) = [text for text in content["warnings"] if "two runs" in text]
    assert str(path) in told and "the first is shown" in told
    first = json.loads((results / "one" / "depth.json").read_text())["runs"][0]["result"]["rmse"]
    assert rows(tables(content, "depth")[0])["one", "softmax", "2"]["RMSE m"]["cls+patch"]["mean"] == first


def test_a_curve_is_of_the_seeds_that_all_its_blocks_have(run, results, tmp_path):
    path = results / "one" / "segmentation.json"
    content = json.loads(path.read_text())
    last = next(r for r in content["runs"] if r["settings"]["blocks"] == [2] and r["settings"]["tokens"] == "patch")
    other = json.loads(json.dumps(last))
    other["settings"]["seed"], other["result"]["miou"] = 7, last["result"]["miou"] / 2
    content["runs"].append(other)
    path.write_text(json.dumps(content))
    found, *_ = report(run, tmp_path, results)
    (table,) = tables(found, "segmentation")
    assert table["curves"]["one, softmax, patch"][2] == [2, pytest.approx(100 * last["result"]["miou"])]
    cell = rows(table)["one", "softmax", "2"]["mIoU %"]["patch"]
    assert cell["seeds"] == [0, 7] and cell["mean"] == pytest.approx(75 * last["result"]["miou"])
    assert any("unequally many seeds: 1 and 2 seeds of patch" in text for text in found["warnings"])


def test_one_name_of_two_models_and_skipped_photos_are_told(run, results, tmp_path):
    path = results / "two" / "knn.json"
    content, other = json.loads(path.read_text()), json.loads((results / "one" / "knn.json").read_text())
    content["runs"][0]["settings"]["model"]["name"] = other["runs"][0]["settings"]["model"]["name"]
    content["runs"][0]["skipped"] = [{"source": f"{i}.png", "reason": "broken"} for i in range(5)]
    path.write_text(json.dumps(content))
    found, *_ = report(run, tmp_path, results / "one", path.parent)
    names = [row["model"] for row in tables(found, "knn")[0]["rows"]]
    assert names[0] != names[1] and all(re.fullmatch(r"one \([0-9a-f]{6}\)", name) for name in names)
    assert any("stands for 2 models" in text for text in found["warnings"])
    assert any("0.png: broken" in text and "and 2 more" in text for text in found["warnings"])


def test_what_is_unfinished_is_listed(run, results, tmp_path):
    (results / "one" / "unfinished").mkdir()
    torch.save({"identity": "x", "step": 40, "head": {}}, results / "one" / "unfinished" / "abc.pt")
    (results / "two" / "unfinished").mkdir()
    (results / "two" / "unfinished" / "cut.pt").write_bytes(b"cut off")
    (results / "pib" / "point_in_box.json").unlink()
    (results / "begun" / "features" / "0").mkdir(parents=True)
    (results / "begun" / "features" / "0" / "settings.json").write_text("{}")
    stopped = json.loads((results / "two" / "segmentation.json").read_text())
    stopped["runs"] = [r for r in stopped["runs"] if r["settings"]["blocks"] != [2]]
    (results / "two" / "segmentation.json").write_text(json.dumps(stopped))
    (results / "two" / "layers.segmentation.json").unlink()
    content, _, err = report(run, tmp_path, results, status=1)
    told = {(each["folder"].rpartition("/")[2], each["what"]) for each in content["unfinished"]}
    assert len(told) == 5 and {name for name, _ in told} == {"one", "two", "pib", "begun"}
    assert any("after step 40" in what for _, what in told)
    assert any("blocks 0 to 1 of 3" in what and "layers segmentation" in what for _, what in told)
    assert any("stopped after 4 photos" in what for _, what in told) and err.count("unfinished: ") == 5
    page = read_page(tmp_path / "page")
    assert all(what in page for _, what in told)
    status, _, err = run("probe", "report", results / "begun", "--out", tmp_path / "none")
    assert status == 2 and "no run is finished yet" in err and "features are kept" in err
    assert not (tmp_path / "none").exists()


def spoil(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def newer(content):
    content["runs"][0]["settings"]["model"]["selectivit"] = "99.0.0"


def unnamed(content):
    content["runs"][0]["settings"]["model"]["selectivit"] = None


def shapeless(content):
    del content["runs"][0]["settings"]["tokens"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: spoil(folder / "knn.json", newer), "written by selectivit 99.0.0, which this one"),
        (lambda folder: spoil(folder / "knn.json", unnamed), "written by selectivit None, which this one"),
        (lambda folder: spoil(folder / "knn.json", shapeless), "(KeyError: 'tokens')"),
        (lambda folder: (folder / "depth.json").write_text("{"), "depth.json cannot be read"),
        (lambda folder: (folder / "depth.json").write_text("[]"), "is not of the form"),
        (lambda folder: [path.unlink() for path in folder.glob("*.json")], "holds no result of a probe: expected knn"),
        (lambda folder: shutil.rmtree(folder), "which is no folder"),
    ],
)
def test_what_is_refused(run, results, tmp_path, change, told):
    change(results / "one")
    status, _, err = run("probe", "report", results / "two", results / "one", "--out", tmp_path / "page")
    assert status == 2 and told in err, err
    assert not (tmp_path / "page").exists()


def test_an_older_page_stays_whole_when_the_new_one_cannot_be_made(run, results, tmp_path):
    report(run, tmp_path, results)
    before = (tmp_path / "page" / "report.html").read_bytes()
    assert run("probe", "report", results, "--out", tmp_path / "page")[0] == 0
    assert (tmp_path / "page" / "report.html").read_bytes() == before  # the same results, the same page
    (results / "one" / "knn.json").write_text("{")
    assert run("probe", "report", results, "--out", tmp_path / "page")[0] == 2
    assert (tmp_path / "page" / "report.html").read_bytes() == before
    assert not list((tmp_path / "page").rglob(".*"))


def test_names_are_text_and_no_markup(run, results, tmp_path):
    title = "<script>alert(1)</script> | *x*"
    path = results / "one" / "depth.json"
    path.write_text(path.read_text().replace('"first 8 in', '"<b>first</b> 8 in'))
    report(run, tmp_path, results, "--title", title)
    assert title in read_page(tmp_path / "page")
    text = (tmp_path / "page" / "report.md").read_text()
    assert r"\<script\>alert(1)\</script\> \| \*x\*" in text and "<b>" not in text


def test_photos_in_every_models_colours(run, results, tmp_path):
    from PIL import Image

    photo = write_photo(tmp_path / "photos" / "a.png", size=(48, 32))
    content, *_ = report(run, tmp_path, results, "--photos", tmp_path / "photos", "--size", 32, "--device", "cpu")
    (drawn,) = content["photos"]
    assert list(drawn["panels"]) == ["one, softmax", "one, sparsemax, layers -1", "two, softmax"]
    pictures = [tmp_path / "page" / "pictures" / name for name in ("pca.0.0.png", *drawn["panels"].values())]
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.size == (320, 213)
    assert len({path.read_bytes() for path in pictures}) == 4
    page = read_page(tmp_path / "page")
    assert "one, sparsemax, layers -1" in page
    status, _, err = run("probe", "report", results, "--photos", tmp_path / "nowhere.png", "--out", tmp_path / "page")
    assert status == 2 and "no photo to work on" in err
    with open(photo, "wb") as file:
        file.write(b"nothing")
    write_photo(tmp_path / "photos" / "b.png")
    content, _, err = report(run, tmp_path, results, "--photos", tmp_path / "photos", status=1)
    assert [each["name"] for each in content["photos"]] == ["b"] and "a.png" in err


def test_a_model_that_has_changed_since_is_not_drawn(run, results, tmp_path, made):
    write_photo(tmp_path / "a.png")
    for name in ("one", "two"):
        for path in (results / name).glob("*.json"):
            path.write_text(path.read_text().replace(str(made / "models"), str(tmp_path / "models")))
    shutil.rmtree(results / "pib"), shutil.rmtree(results / "swapped")
    save_tiny(tmp_path / "models" / "one", 0), save_tiny(tmp_path / "models" / "two", 5)
    content, _, err = report(run, tmp_path, results, "--photos", tmp_path / "a.png", "--device", "cpu", status=1)
    assert list(content["photos"][0]["panels"]) == ["one, softmax"]
    assert "models/two: its weights or structure are no longer those that were probed" in err
    shutil.rmtree(tmp_path / "models" / "one")
    content, _, err = report(run, tmp_path, results, "--photos", tmp_path / "a.png", "--device", "cpu", status=1)
    assert content["photos"] == [] and "no PCA of" in err
