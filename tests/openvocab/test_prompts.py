"""Labels, templates, and text features: what they are, when they are kept, and what is refused."""

from __future__ import annotations

import clips
import pytest
import torch
from torch.nn import functional as F

from selectivit.openvocab.prompts import check_different, find_templates, parse_labels, text_features


def test_templates_are_those_of_open_clip():
    from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

    for name, known in (("imagenet80", OPENAI_IMAGENET_TEMPLATES), ("imagenet7", SIMPLE_IMAGENET_TEMPLATES)):
        assert [t.replace("{}", "cat") for t in find_templates(name)] == [f("cat") for f in known]
    assert find_templates("none") == ("{}",)


@pytest.mark.parametrize("templates", ["imagenet", "source", [], ["no place"], ["{} {}"]])
def test_bad_templates(templates):
    with pytest.raises(ValueError, match=r"template"):
        find_templates(templates)


def test_labels_in_any_script_and_with_synonyms():
    found = parse_labels([" person |man", "猫", "дорога", "traffic  light"])
    assert [label.name for label in found] == ["person", "猫", "дорога", "traffic light"]
    assert found[0].words == ("person", "man")


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([], "at least one"),
        ("road,car", "list of labels"),
        (["road", ""], "expected labels"),
        (["road", "car| "], "expected labels"),
        ([3], "expected labels"),
        (["road", "Road"], "more than once"),
        (["person|man", "man"], "more than once"),
    ],
)
def test_bad_labels(labels, text):
    with pytest.raises(ValueError, match=text):
        parse_labels(labels)


def test_features_are_the_mean_over_templates():
    model, tokenizer = clips.open_clip_vit(), clips.WordTokenizer()
    templates = ("a photo of a {}.", "art of the {}.", "{}")
    found = text_features(model, tokenizer, ["cat", "dog"], templates)
    for word, feature in zip(("cat", "dog"), found, strict=True):
        each = [F.normalize(model.encode_text(tokenizer([t.format(word)]))[0], dim=0) for t in templates]
        torch.testing.assert_close(feature, F.normalize(sum(each) / 3, dim=0).detach(), atol=1e-5, rtol=1e-5)


def test_features_are_kept_until_something_changes():
    model, tokenizer = clips.open_clip_vit(), clips.WordTokenizer()
    first = text_features(model, tokenizer, ["cat", "dog"], ("{}",))
    calls = tokenizer.calls
    assert torch.equal(text_features(model, tokenizer, ["dog", "cat"], ["{}"]), first.flip(0))
    assert tokenizer.calls == calls
    text_features(model, tokenizer, ["cat", "bird"], ("{}",))  # the new word alone
    assert tokenizer.calls == calls + 1
    text_features(model, tokenizer, ["cat"], ("a {}",))
    assert tokenizer.calls == calls + 2
    with torch.no_grad():
        model.text_projection.mul_(-1)
    torch.testing.assert_close(text_features(model, tokenizer, ["cat"], ("{}",)), -first[:1])
    other = clips.WordTokenizer(vocab_size=300)
    assert not torch.allclose(text_features(model, other, ["cat"], ("{}",)), -first[:1], atol=1e-3)


def test_transformers_tokenizers_and_processors():
    words = ["cat", "dog", "photo", "of", "a", "."]
    for family in ("CLIP", "Siglip", "Siglip2"):
        model, tokenizer = clips.transformers_model(family), clips.transformers_tokenizer(words)
        found = text_features(model, tokenizer, ["cat", "dog"], ("a photo of a {}.",))
        ids = torch.full((2, 16), 1)
        for row, word in zip(ids, (4, 5), strict=True):
            row[:8] = torch.tensor([2, 8, 6, 7, 8, word, 9, 3])
        want = F.normalize(model.get_text_features(input_ids=ids).pooler_output, dim=-1)
        torch.testing.assert_close(found, want.detach(), atol=1e-5, rtol=1e-5)

        class Processor:
            def __init__(self, inner):
                self.tokenizer = inner

        again = text_features(model, Processor(tokenizer), ["cat", "dog"], ("a photo of a {}.",))
        torch.testing.assert_close(again, found)


def test_words_that_cannot_be_told_apart_are_named():
    words = ["cat", "猫", "犬"]
    found = text_features(clips.transformers_model("CLIP"), clips.transformers_tokenizer(["cat"]), words, ("{}",))
    with pytest.raises(ValueError, match="cannot tell '猫' from '犬'"):
        check_different(found, words)


def test_a_tokenizer_of_another_model_is_named():
    with pytest.raises(ValueError, match="another model's"):
        text_features(clips.open_clip_vit(), clips.WordTokenizer(vocab_size=5000), ["cat"], ("{}",))
    with pytest.raises(ValueError, match="another model's"):
        words = [f"w{i}" for i in range(700)]
        text_features(clips.transformers_model("CLIP"), clips.transformers_tokenizer(words), ["w699"], ("{}",))
    with pytest.raises(ValueError, match="gives a tensor"):
        text_features(clips.open_clip_vit(), lambda texts: {"input_ids": texts}, ["cat"], ("{}",))


def test_two_thousand_labels():
    model, tokenizer = clips.open_clip_vit(), clips.WordTokenizer(vocab_size=600)
    atoms = list({int(tokenizer([str(i)])[0, 0]): str(i) for i in range(200)}.values())  # no two of one number
    words, tokenizer.calls = [f"{a} {b}" for a in atoms[:50] for b in atoms[:40]], 0
    assert text_features(model, tokenizer, words, ("{}",)).shape == (2000, clips.EMBED)
    assert tokenizer.calls < 20
