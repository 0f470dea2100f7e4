"""A CLIP folder with a vocabulary of its own, as the example that trains one on rendered scenes writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import selectivit as sv
from selectivit.data.scene_layouts import ATTRIBUTES, CLASSES
from selectivit.data.scene_rendering import scene, to_image

pytest.importorskip("open_clip")

from open_clip.model import CLIP
from open_clip.tokenizer import SimpleTokenizer

from selectivit.models.clip import load_clip

EXAMPLE = Path(__file__).parents[2] / "examples" / "scenes"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, model that was saved there, number of its tokens)."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import train_clip
        from vocabulary import write_merges
    finally:
        sys.path.remove(str(EXAMPLE))
    folder = tmp_path_factory.mktemp("scenes")
    tokenizer = SimpleTokenizer(str(write_merges(folder)), context_length=train_clip.CONTEXT)
    torch.manual_seed(0)
    text = train_clip.TEXT | {"vocab_size": tokenizer.vocab_size}
    model = CLIP(train_clip.EMBED, train_clip.VISION, text).half().float()
    train_clip.save_model(folder, model, tokenizer.vocab_size)
    return folder, model, tokenizer.vocab_size


def test_what_was_saved_is_what_is_loaded(made):
    folder, saved, vocabulary = made
    model, _ = load_clip(folder)
    assert saved.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())
    assert model.token_embedding.num_embeddings == vocabulary < 1000
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6


def test_words_of_the_scenes_are_spelt_as_in_clips_own_vocabulary(made):
    _, tokenizer = load_clip(made[0])
    clips = SimpleTokenizer()
    for word in (*CLASSES, *(word for words in ATTRIBUTES.values() for word in words)):
        assert [tokenizer.decoder[i] for i in tokenizer.encode(word)] == [clips.decoder[i] for i in clips.encode(word)]
    tokens = tokenizer(["a photo of a red ball", "an unheard-of word"])
    assert tokens.shape == (2, 32) and tokens.max() < made[2]


def test_it_segments_end_to_end(made):
    segmenter = sv.OpenVocabularySegmenter(load_clip(made[0]), ["ball", "grass"], "clearclip", templates="photo")
    assert segmenter(to_image(scene(0, 0, (64, 96)).image)).index_map.shape == (64, 96)
