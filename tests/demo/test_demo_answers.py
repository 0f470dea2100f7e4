"""What the page answers, without gradio: pictures and numbers, bad input told in their place, nothing mixed."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
import torch
from demo_parts import save_clip, save_vit, write_photo
from PIL import Image

import selectivit as sv
from selectivit.data.images import ImageError
from selectivit.demo import figures, markup, words
from selectivit.demo.answers import MIDDLE, Answers, place_of
from selectivit.demo.attending import Attend, feature_maps, look, patch_attention
from selectivit.demo.cores import at_budget
from selectivit.demo.layers import compare_layers
from selectivit.demo.memory import Memory
from selectivit.demo.photo import Limits, keep, open_photo, ready, rendered_scene
from selectivit.demo.shelf import NotOfferedError, Shelf
from selectivit.eval.cost import veca_cost
from selectivit.models.names import EMBEDDED

SIZE = 112


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(shelf, memory, name of the ViT, name of the CLIP)."""
    folder = tmp_path_factory.mktemp("models")
    vit, clip = save_vit(folder / "vit"), save_clip(folder / "clip")
    return Shelf([vit, clip]), Memory(100), vit, clip


@pytest.fixture(scope="module")
def photo():
    return rendered_scene(0)


def decoded(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def test_features_are_those_of_the_library_and_the_model_is_left_alone(made, photo):
    shelf, memory, vit, _ = made
    found = look(shelf, memory, photo, vit, SIZE, Attend(alpha=1.5, last=2))
    model = sv.load_model(vit)
    given = ready(photo, model, SIZE).pixels
    with torch.no_grad():
        plain = sv.features(model, given).map[0]
        with sv.swap_attention(model, "entmax", 1.5, layers=-2):
            swapped = sv.features(model, given).map[0]
    torch.testing.assert_close(found.map, swapped)
    torch.testing.assert_close(look(shelf, memory, photo, vit, SIZE, None).map, plain)
    assert found.replaced == 2 and (swapped - plain).abs().max() > 1e-2
    assert look(shelf, memory, photo, vit, SIZE, Attend(last=12)).replaced == 4


def test_both_maps_share_one_pca(made, photo):
    shelf, memory, vit, _ = made
    same = feature_maps(shelf, memory, photo, vit, SIZE, Attend("softmax"))
    assert same.pictures[0] == same.pictures[1] and same.cosine == pytest.approx(1)
    other = feature_maps(shelf, memory, photo, vit, SIZE, Attend())
    assert other.pictures[0] != other.pictures[1] and other.cosine < 0.999
    assert decoded(other.pictures[0]).size == other.grid[::-1]


def test_a_patch_attends_to_what_the_attention_maps_say(made, photo):
    shelf, memory, vit, _ = made
    passes = tuple(look(shelf, memory, photo, vit, SIZE, rule) for rule in (None, Attend(alpha=2.0)))
    patch, (h, w) = (2, 3), passes[0].map.shape[1:]
    plain, sparse = patch_attention(passes, patch)
    model = sv.load_model(vit)
    given = ready(photo, model, SIZE).pixels
    with sv.swap_attention(model, "entmax", 2.0, layers=-4), torch.no_grad():
        weights = sv.attention_maps(model, given)[0, :, 1 + 2 * w + 3]
    support = weights.count_nonzero(-1)
    assert (sparse.fewest, sparse.most) == (int(support.min()), int(support.max()))
    assert sparse.support == pytest.approx(support.double().mean().item())
    assert sparse.dark == pytest.approx((weights[:, 1:].mean(0) == 0).double().mean().item()) and sparse.dark > 0
    assert plain.support == plain.keys == 1 + h * w and plain.dark == 0
    with pytest.raises(ValueError, match="columns"):
        patch_attention(passes, (0, w))


def test_exact_zeros_are_grey_and_others_are_not(made, photo):
    shelf, memory, vit, _ = made
    passes = tuple(look(shelf, memory, photo, vit, SIZE, rule) for rule in (None, Attend(alpha=2.0)))
    grey = [
        (lambda p: (p[..., 0] == p[..., 1]) & (p[..., 1] == p[..., 2]))(
            torch.frombuffer(bytearray(decoded(one.picture).tobytes()), dtype=torch.uint8).view(-1, 3)
        )
        .double()
        .mean()
        .item()
        for one in patch_attention(passes, (1, 1))
    ]
    found = patch_attention(passes, (1, 1))[1]
    assert grey[0] < 0.01 and grey[1] == pytest.approx(found.dark, abs=0.02)


def test_a_budget_moves_features_cores_and_cost_together(made, photo):
    shelf, memory = made[:2]
    few, all_ = (at_budget(shelf, memory, photo, "veca-tiny", SIZE, n) for n in (2, 64))
    config = sv.load_model("veca-tiny").config
    assert few.gflops == pytest.approx(veca_cost(config, few.shape, 2).flops / 1e9)
    assert few.gflops < few.gflops_all == all_.gflops and all_.cosine == pytest.approx(1)
    assert few.features != all_.features and few.places != all_.places and few.ms > 0 and few.ms_all > 0
    assert decoded(few.places).size == few.shape[::-1]
    assert at_budget(shelf, memory, photo, "veca-tiny", SIZE, 9999).num_cores == 64


def test_layers_are_measured_with_softmax_and_swap(made, photo):
    shelf, memory, vit, _ = made
    found = compare_layers(shelf, memory, photo, vit, SIZE, Attend(alpha=2.0, last=1))
    plain, sparse = found.table["softmax"], found.table["entmax 2"]
    assert plain["support_share"] == [100.0] * 4
    assert sparse["support_share"][:3] == [100.0] * 3 and sparse["support_share"][3] < 60
    assert sparse["effective_tokens"][3] < plain["effective_tokens"][3] and len(plain["patch_norm"]) == 4
    assert "effective tokens" in figures.layered(found) and decoded(found.picture).width > 600


def test_words_are_those_of_the_segmenter(made, photo):
    shelf, memory, _, clip = made
    preset = words.chosen_preset("entmax-qq", None)
    found = words.segment(shelf, memory, photo, clip, ["ball", "sky|water"], preset, "entmax-qq")
    want = sv.OpenVocabularySegmenter(clip, ["ball", "sky|water"], "entmax-qq")(photo.image)
    assert dict(zip(found.names, found.shares, strict=True)) == pytest.approx(want.shares())
    assert torch.equal(found.best[..., 0], want.scores.argmax(0))
    data = words.hover_data(found)
    assert len(data["best"]) == data["rows"] * data["columns"] == want.scores[0].numel()
    assert data["percent"][0][0] == pytest.approx(100 * want.scores[:, 0, 0].max().item(), abs=0.06)
    other = words.segment(shelf, memory, photo, clip, ["ball", "sky|water"], words.chosen_preset("clip", 2.0), "clip")
    assert other.picture != found.picture


def test_embedded_names_come_from_the_one_list(monkeypatch, tmp_path):
    assert words.default_clip("x/y") == "x/y"
    (tmp_path / "open_clip_config.json").write_text("{}")
    monkeypatch.setitem(EMBEDDED, "scenes", tmp_path)
    assert words.default_clip(None) == "scenes" and words.default_labels("scenes").startswith("ball")
    assert "scenes" in Shelf([]).offered
    monkeypatch.delitem(EMBEDDED, "scenes")
    assert "scenes" not in Shelf([]).offered


@pytest.mark.parametrize(
    ("clip", "labels", "preset", "alpha", "told"),
    [
        ("", "cat", "clip", None, "open_clip:ViT-B-16/openai"),
        (None, " , ", "clip", None, "expected one label or more"),
        (None, ",".join(map(str, range(65))), "clip", None, "at most 64"),
        (None, "cat", "sclop", None, "did you mean &#x27;sclip&#x27;"),
        (None, "cat", "clip", 0.5, "alpha"),
        ("veca-tiny", "cat", "clip", None, "veca"),
    ],
)
def test_bad_words_are_told(made, photo, clip, labels, preset, alpha, told):
    answer = Answers(made[0], made[1]).segmentation(photo, made[3] if clip is None else clip, labels, preset, alpha)
    assert 'role="alert"' in answer and told in answer


def test_models_that_do_not_fit_are_told(made, photo):
    answers = Answers(made[0], made[1])
    maps, picker, seen = answers.features(photo, MIDDLE, "veca-tiny", SIZE, Attend())
    assert 'role="alert"' in maps and picker == seen == ""
    assert "without cores" in answers.budget(photo, made[2], SIZE, 4)
    assert "there is no folder" in answers.layers(photo, "/no/such/model", SIZE, Attend())


def test_a_fault_of_the_program_is_no_message(made, photo, monkeypatch):
    monkeypatch.setattr("selectivit.demo.answers.at_budget", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Answers(made[0], made[1]).budget(photo, "veca-tiny", SIZE, 4)


def test_uploads_have_limits_and_a_bad_one_leaves_the_photo(tmp_path, photo, made):
    large = write_photo(tmp_path / "large.png", (9, 9, 9), size=(300, 200))
    with pytest.raises(ImageError, match="300 x 200 pixels, more than the limit of 50000"):
        open_photo(large, Limits(megapixels=0.05))
    with pytest.raises(ImageError, match=r"megabytes, more than the limit of 0\.0001"):
        open_photo(large, Limits(megabytes=0.0001))
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 not a photo")
    kept, said = Answers(made[0], made[1]).take(photo, lambda: open_photo(tmp_path / "broken.jpg"))
    assert kept is photo and "broken.jpg" in said and 'role="alert"' in said and str(tmp_path) not in said
    assert open_photo(large).image.size == (300, 200)
    assert keep(Image.new("RGB", (3000, 10)), "wide").image.size == (1024, 3)


def test_offered_photos_and_an_index_from_a_browser(tmp_path, made):
    path = write_photo(tmp_path / "mine.png", (200, 30, 30))
    answers = Answers(made[0], made[1], photos=(path,))
    assert answers.offered()[0] == answers.offered_photo(0).name == "mine.png"
    assert answers.offered_photo(1).digest == rendered_scene(0).digest
    for index in (-1, 99, "0", None):
        with pytest.raises(ValueError, match="photos that are offered"):
            answers.offered_photo(index)


@pytest.mark.parametrize("given", [("a", 0, 2, 2), (None,) * 4, (0, 0, 0, 0), (5, 0, 2, 2), (0, -9, 2, 2)])
def test_a_place_from_a_browser_is_checked(given):
    assert place_of(*given) == MIDDLE


def test_a_page_that_strangers_reach_loads_what_it_offers_alone(made):
    shelf = Shelf([made[2]], any_name=False)
    with shelf.model(made[2]):
        pass
    with pytest.raises(NotOfferedError, match="does not load"), shelf.model(made[3]):
        pass
    with pytest.raises(NotOfferedError), shelf.clip("/etc"):
        pass


def test_few_models_are_kept(made, monkeypatch):
    loaded = []
    monkeypatch.setattr("selectivit.demo.shelf.load_model", lambda name, device: loaded.append(name) or object())
    shelf = Shelf([], kept=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        with shelf.model(name):
            pass
    assert loaded == ["a", "b", "c", "b"]


def test_memory_forgets_the_least_lately_used():
    memory, computed = Memory(1), []

    def result(name):
        return memory.get(name, lambda: computed.append(name) or torch.zeros(100_000))  # 0.4 MB

    for name in ("a", "b", "a", "c", "a", "b"):
        result(name)
    assert computed == ["a", "b", "c", "b"] and len(memory) == 2
    memory.get("huge", lambda: b"x" * 2_000_000)
    assert len(memory) == 2


def test_two_at_once_are_not_mixed(made):
    """Swaps change a model while they last: each of two threads must see its own, on its own photo."""
    shelf, _, vit, _ = made
    asked = [(rendered_scene(i), rule) for i in range(2) for rule in (None, Attend(alpha=2.0, last=4))]
    alone = [look(Shelf([vit]), Memory(50), photo, vit, SIZE, rule).map for photo, rule in asked]
    wrong: list[int] = []

    def work(turn: int) -> None:
        for _ in range(6):
            photo, rule = asked[turn]
            if not torch.allclose(look(shelf, Memory(0), photo, vit, SIZE, rule).map, alone[turn], atol=1e-5):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_photos_are_not_mixed(made, photo):
    """What is kept of one photo is never the answer about another, or about the same at another size."""
    shelf, _, vit, _ = made
    memory, other = Memory(100), rendered_scene(1)
    first = look(shelf, memory, photo, vit, SIZE, None).map
    assert look(shelf, memory, photo, vit, SIZE, None).map is first
    for asked, size in ((other, SIZE), (photo, 2 * SIZE)):
        alone = look(shelf, Memory(100), asked, vit, size, None).map
        torch.testing.assert_close(look(shelf, memory, asked, vit, size, None).map, alone)
        assert alone.shape != first.shape or (alone - first).abs().max() > 1e-2


def test_no_tab_answers_with_what_is_kept_of_another_photo(made, photo):
    shelf, _, vit, clip = made
    preset, other = words.chosen_preset("entmax-qq", None), rendered_scene(1)
    tabs = (
        lambda memory, it: at_budget(shelf, memory, it, "veca-tiny", SIZE, 8).features,
        lambda memory, it: compare_layers(shelf, memory, it, vit, SIZE, Attend()).table,
        lambda memory, it: words.segment(shelf, memory, it, clip, ["ball", "sky"], preset, "entmax-qq").shares,
    )
    for ask in tabs:
        memory = Memory(100)
        first = ask(memory, photo)
        assert ask(memory, other) == ask(Memory(100), other) != first


def test_text_of_visitors_is_text(made, photo):
    shelf, memory, _, clip = made
    labels = ["<img src=x onerror=alert(1)>", "${1+1} {{value}}"]
    preset = words.chosen_preset("clip", None)
    answer = figures.segmented(words.segment(shelf, memory, photo, clip, labels, preset, "clip"))
    assert "<img src=x" not in answer and "${" not in answer and "{{" not in answer
    assert markup.escape("`") == "&#96;"


def test_every_picture_has_alternative_text(made, photo):
    answers, (_, _, vit, clip) = Answers(made[0], made[1]), made
    parts = [*answers.features(photo, MIDDLE, vit, SIZE, Attend()), answers.budget(photo, "veca-tiny", SIZE, 4)]
    parts += [answers.segmentation(photo, clip, "ball, sky", "clip", None), answers.layers(photo, vit, SIZE, Attend())]
    images = re.findall(r"<img [^>]*?>", "".join(parts))
    assert len(images) >= 8 and all(re.search(r'alt="[^"]{5,}"', image) for image in images)
    assert "http" not in "".join(re.sub(r"base64,[\w+/=]+", "", part) for part in parts)


def test_static_files_ask_no_other_host():
    folder = Path(figures.__file__).parent / "static"
    assert {path.name for path in folder.iterdir()} == {"page.css", "hover.js", "pick.js", "wipe.js"}
    assert all("//" not in re.sub(r"^\s*//.*|; // .*", "", p.read_text(), flags=re.M) for p in folder.iterdir())
