"""A small vocabulary for open_clip's own tokenizer: the merges of CLIP's byte pairs that the known words need.

CLIP's 49 408 tokens would take more room than the rest of a small model. `SimpleTokenizer` reads any list of merges; of
CLIP's own list those are kept, in their order, that spell the words of the scenes' captions and of the prompt templates
as CLIP does: in one token each, but for a few ("checkered" has two). Any other text is spelt in shorter pieces.
"""

from __future__ import annotations

import gzip
import re
from itertools import pairwise
from pathlib import Path

from open_clip.tokenizer import SimpleTokenizer, default_bpe

from selectivit.data.scene_layouts import ATTRIBUTES, BACKGROUNDS, FULL, PLACES, SHAPES, SHORT
from selectivit.openvocab.prompts import find_templates

NAME = "bpe_merges.txt.gz"
MORE = "small large big tiny object thing background picture scene image shape color colour pattern material made of"


def known_words() -> list[str]:
    """Words that are spelt as CLIP spells them."""
    texts = [*SHAPES, *BACKGROUNDS, *FULL, *PLACES, *SHORT, *find_templates("imagenet80"), MORE, "there is the an and"]
    texts += [word for words in ATTRIBUTES.values() for word in words]
    texts += [f"{word}s" for word in SHAPES]
    return sorted({word for text in texts for word in re.findall(r"[a-z]+", text.lower())})


def write_merges(folder: Path) -> Path:
    """Write the merges into a folder.

    Args:
        folder: where.

    Returns:
        The file.
    """
    whole = SimpleTokenizer()
    kept: set[tuple[str, str]] = set()
    for word in known_words():
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            rank, place = min(
                (whole.bpe_ranks.get(pair, len(whole.bpe_ranks)), i) for i, pair in enumerate(pairwise(parts))
            )
            if rank == len(whole.bpe_ranks):
                break
            kept.add((parts[place], parts[place + 1]))
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
    ordered = sorted(kept, key=whole.bpe_ranks.__getitem__)
    header = gzip.open(default_bpe()).readline().decode().strip()
    folder.mkdir(parents=True, exist_ok=True)
    content = "\n".join([header, *(" ".join(pair) for pair in ordered)])
    (folder / NAME).write_bytes(gzip.compress(content.encode(), mtime=0))
    return folder / NAME
