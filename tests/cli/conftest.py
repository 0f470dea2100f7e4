"""A tiny model in a local folder, a few small photos, and the command line called in this process."""

import os

import pytest
import torch

WORDS = ["road", "car", "truck", "sky", "wall", "猫", "photo", "of", "a", "."]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random ViT that timm wrote: 3 layers, 2 heads, patches of 8 px, made for 32 px."""
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    torch.manual_seed(0)
    arguments = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    for parameter in model.parameters():  # random attention is nearly uniform: sharpen it, so that a swap shows
        parameter.data.mul_(3)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_for_hf(model, str(folder), safe_serialization=True, model_args=arguments)
    return str(folder)


def save_tiny_clip(folder, words, seed=0):
    """A random CLIP that transformers writes, with a tokenizer of a few words: 2 layers, patches of 8 px."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "[BOS]", "[EOS]", *words])}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    text = sizes | special | {"vocab_size": max(20, len(vocabulary)), "max_position_embeddings": 16}
    vision = sizes | {"patch_size": 8, "image_size": 32}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    torch.manual_seed(seed)
    model = transformers.CLIPModel(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """A tiny CLIP in a local folder that knows ten words."""
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", WORDS)


def write_photo(path, size=(48, 32), seed=0, **options):
    from PIL import Image

    noise = torch.randint(0, 256, (size[1] // 8, size[0] // 8, 3), generator=torch.Generator().manual_seed(seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.to(torch.uint8).numpy()).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    return path


@pytest.fixture
def photos(tmp_path):
    """A folder of five photos in two sizes, one in a sub-folder."""
    folder = tmp_path / "photos"
    for i, name in enumerate(("a.jpg", "b.png", "c.jpg", "sub/a.jpg", "sub/d.png")):
        write_photo(folder / name, size=(48, 32) if i % 2 else (40, 40), seed=i)
    return folder


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call the command line; gives the exit status, stdout and stderr."""
    from selectivit.cli.main import main

    monkeypatch.setenv("SELECTIVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


@pytest.fixture
def environment(tmp_path):
    """The environment of a subprocess that neither downloads nor writes to the user's cache."""
    return {
        **os.environ,
        "SELECTIVIT_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def write_masked(folder, classes, count=4):
    """Photos of 48 x 40 px with masks of 8 x 8 px blocks, one of them void, as `open_segmentation` takes a folder."""
    import json

    import numpy as np
    from PIL import Image

    for i in range(count):
        write_photo(folder / "images" / f"{i}.png", size=(48, 40), seed=i)
        blocks = np.random.default_rng(i).integers(0, len(classes), (5, 6)).astype(np.uint8)
        blocks[0, 0] = 255
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(folder / "masks" / f"{i}.png")
    (folder / "classes.json").write_text(json.dumps(list(classes)))
    return folder


def save(path, pixels):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_classes(root):
    """Dark, grey and light photos, six of each to learn from and three to be scored on."""
    import numpy as np

    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name, (low, high) in {"dark": (0, 60), "grey": (100, 150), "light": (200, 255)}.items():
            for i in range(count):
                shape = (40, 44, 3) if i % 2 else (44, 40, 3)
                save(root / split / name / f"{i}.png", draw.integers(low, high, shape, dtype=np.uint8))
    return root


def make_streets(root):
    """Photos with dark left and bright right parts, and masks of them."""
    import numpy as np

    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            mask = np.zeros((32, 48), dtype=np.uint8)
            mask[:, 16 + 8 * (i % 2) :] = 1
            mask[:2] = 2
            pixels = np.where(mask[..., None] == 1, 200, 30) + draw.integers(0, 40, (32, 48, 3))
            save(root / "images" / split / f"{i}.png", pixels.astype(np.uint8))
            save(root / "masks" / split / f"{i}.png", mask)
    (root / "classes.json").write_text('{"0": "dark", "1": "bright", "2": "void"}')
    return root


def make_rooms(root):
    """Ten frames whose brightness is their depth."""
    import numpy as np

    for i in range(10):
        depth = np.tile(np.linspace(1000 + 100 * i, 4000, 48).astype(np.uint16), (32, 1))
        depth[0] = 65535
        pixels = np.repeat((depth[..., None] / 20).clip(0, 255), 3, -1).astype(np.uint8)
        save(root / f"f{i:02d}.color.png", pixels)
        save(root / f"f{i:02d}.depth.png", depth)
    return root


@pytest.fixture
def classes(tmp_path):
    return make_classes(tmp_path / "classes")


@pytest.fixture
def streets(tmp_path):
    return make_streets(tmp_path / "streets")


@pytest.fixture
def rooms(tmp_path):
    return make_rooms(tmp_path / "rooms")
