"""Train a small CLIP on rendered scenes: open_clip's model, tokenizer and loss, and nothing but captions.

    python examples/scenes/train_clip.py RUN_FOLDER
    python examples/scenes/judge_clip.py RUN_FOLDER/model    # how far it is, at any time
    python benchmarks/scenes_segmentation.py RUN_FOLDER/model

A run that was stopped goes on where it was when the same command is given again. RUN_FOLDER/model holds the model of
the last checkpoint, an open_clip folder that `load_model`, `load_clip`, every `--model` and open_clip itself read.

Colours and backgrounds come of themselves; shapes do not. Three things brought them, after the contrastive loss alone
on scenes of 112 px had not in 2000 steps:

- Beside CLIP's loss, the words of a caption are told from the image (a linear head on its feature, dropped afterwards).
  It learns from batches and learning rates where contrast does not yet. Source: Huang et al., SuperClass,
  arXiv 2411.03313; Mehta et al., CatLIP, arXiv 2404.15653.
- The first stage has one plain object on 4 × 4 patches, which costs a twentieth of a whole scene; what it teaches
  carries over to larger ones.
- Positions begin as waves, and attention as in trained models (`start_local`), so that neighbours are known at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from batches import MEAN, STD, WORDS, Batches, Stage
from open_clip.loss import ClipLoss
from open_clip.model import CLIP
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transformer import PatchDropout
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from vocabulary import write_merges

from selectivit.train.optimizers import MuonAdamW

CONTEXT, EMBED = 32, 192
VISION = {"image_size": 112, "patch_size": 8, "width": 192, "layers": 6, "head_width": 32}
TEXT = {"context_length": CONTEXT, "width": 192, "heads": 6, "layers": 3}
STAGES = (  # colours come of themselves; shapes where a single plain object is all there is; then ever more at once
    Stage(until=1500, side=32, things=(1, 1), radius=(10, 15), plain=1.0, captions=False),
    Stage(until=2500, side=64, things=(1, 1), radius=(12, 29), plain=0.5, shapes=0.3),
    Stage(until=3300, side=112, things=(1, 3), radius=(14, 45), plain=0.2, shapes=0.2, dropped=0.5),
    Stage(until=3450, side=112, things=(1, 4), radius=(14, 45), plain=0.1, shapes=0.2),
)
DECAY = STAGES[1].until  # the step from which the rate falls
EVERY = 50  # steps between checkpoints


class Window(nn.Module):
    """In place of open_clip's patch dropout: keep a square of patches, so that small scenes cost little."""

    def __init__(self, side: int, grid: int):
        super().__init__()
        self.side, self.grid, self.corner = side, grid, (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the class token and the square, (B, 1 + side², C) of (B, 1 + grid², C)."""
        if not self.training:
            return x
        patches = x[:, 1:].unflatten(1, (self.grid, self.grid))
        top, left = self.corner
        kept = patches[:, top : top + self.side, left : left + self.side].flatten(1, 2)
        return torch.cat([x[:, :1], kept], 1)


class Learner(nn.Module):
    """The model, and beside it a head that tells the words of a caption from an image's feature."""

    def __init__(self, vocab_size: int):
        super().__init__()
        # A smaller temperature than CLIP's first one: scenes of one four differ little.
        self.clip = CLIP(EMBED, VISION, TEXT | {"vocab_size": vocab_size}, init_logit_scale=math.log(35))
        self.words = nn.Linear(EMBED, len(WORDS))
        start_local(self.clip)

    def forward(self, images: Tensor, tokens: Tensor, words: Tensor, captions: bool) -> Tensor:
        """The loss: words of captions told from images, and, in stages with captions, CLIP's."""
        with torch.autocast(images.device.type, torch.bfloat16):
            seen = self.clip.encode_image(images, normalize=True)
            read = self.clip.encode_text(tokens, normalize=True) if captions else None
        loss = F.cross_entropy(self.words(10 * seen.float()), words)
        if read is None:
            return loss
        return loss + ClipLoss()(seen.float(), read.float(), self.clip.logit_scale.exp())


@torch.no_grad()
def start_local(model: CLIP) -> None:
    """Begin as trained Vision Transformers are found to be: places in waves, queries like keys, values like outputs.

    Source: Trockman and Kolter, arXiv 2305.09828.
    """
    tower, width = model.visual, VISION["width"]
    grid = VISION["image_size"] // VISION["patch_size"]
    tower.positional_embedding[0] = 0
    tower.positional_embedding[1:] = 0.2 * build_sincos2d_pos_embed([grid, grid], width)
    for block in tower.transformer.resblocks:
        query, key, value = block.attn.in_proj_weight.chunk(3)
        for rows in torch.arange(width).split(VISION["head_width"]):
            left, size, right = torch.linalg.svd(0.7 * _noise(width) + 0.7 * torch.eye(width))
            few = slice(len(rows))
            query[rows] = (left[:, few] * size[few].sqrt()).T
            key[rows] = size[few].sqrt()[:, None] * right[few]
        left, size, right = torch.linalg.svd(0.4 * _noise(width) - 0.4 * torch.eye(width))
        value.copy_(size.sqrt()[:, None] * right)
        block.attn.out_proj.weight.copy_(left * size.sqrt())


def _noise(width: int) -> Tensor:
    return torch.randn(width, width) / width**0.5


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    out = Path(options.out)
    tokenizer = SimpleTokenizer(str(write_merges(out / "model")), context_length=CONTEXT)
    torch.manual_seed(options.seed)
    learner = Learner(tokenizer.vocab_size)
    batches = Batches(STAGES, options.batch, tokenizer, options.seed)
    optimizer = MuonAdamW(learner, lr=options.lr, weight_decay=0.05)
    start = _resume(out, learner, optimizer)
    loader = DataLoader(batches, batch_size=None, sampler=range(start, len(batches)), num_workers=options.workers)
    began = time.time()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    # The fused backward of attention in bfloat16 is slower on CPUs than the plain one.
    plain = sdpa_kernel(SDPBackend.MATH) if not torch.cuda.is_available() else nullcontext()
    with Progress(*columns) as bar, plain:
        task = bar.add_task("steps", total=len(batches), completed=start)
        for step, (images, *texts) in enumerate(loader, start):
            _set_lr(optimizer, step, options.lr)
            stage = next(stage for stage in STAGES if step < stage.until)
            loss = train_step(learner, optimizer, stage, images, *texts)
            bar.update(task, advance=1, description=f"loss {loss:.3f}")
            if (step + 1) % EVERY == 0 or step + 1 == len(batches):
                _log(out, {"step": step + 1, "loss": round(loss, 4), "seconds": round(time.time() - began)})
                _checkpoint(out, learner, optimizer, step + 1)
                save_model(out / "model", learner.clip, tokenizer.vocab_size)


def train_step(learner: Learner, optimizer, stage: Stage, images: Tensor, tokens: Tensor, words: Tensor) -> float:
    """One step, in bfloat16 where that is safe."""
    learner.train()
    loss = learner(placed(learner.clip, images, stage), tokens, words, stage.captions)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        learner.clip.logit_scale.clamp_(0, math.log(100))
    return loss.item()


def placed(model: CLIP, images: Tensor, stage: Stage) -> Tensor:
    """Put small scenes somewhere on the model's grid, and have the other patches dropped."""
    side, size, patch = stage.side, VISION["image_size"], VISION["patch_size"]
    if side == size:
        model.visual.patch_dropout = PatchDropout(stage.dropped)
        return images
    window = Window(side // patch, size // patch)
    top, left = (int(i) for i in torch.randint(0, (size - side) // patch + 1, (2,)))
    window.corner = (top, left)
    model.visual.patch_dropout = window
    left_px, top_px, rest = left * patch, top * patch, size - side
    return F.pad(images, (left_px, rest - left_px, top_px, rest - top_px))


def _set_lr(optimizer, step: int, lr: float, warmup: int = 100) -> None:
    """Warm up, stay, and fall to nothing."""
    end = STAGES[-1].until
    factor = min(1, (step + 1) / warmup, (end - step) / (end - DECAY))
    for group in optimizer.param_groups:
        group["lr"] = lr * factor


def _resume(out: Path, model: nn.Module, optimizer) -> int:
    path = out / "checkpoint.pt"
    if not path.is_file():
        return 0
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    torch.set_rng_state(kept["rng"])
    return kept["step"]


def _checkpoint(out: Path, model: nn.Module, optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state | {"rng": torch.get_rng_state()}, out / "checkpoint.part")
    os.replace(out / "checkpoint.part", out / "checkpoint.pt")


def _log(out: Path, line: dict) -> None:
    with open(out / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def save_model(folder: Path, model: nn.Module, vocab_size: int) -> None:
    """Write an open_clip folder, its weights in half precision."""
    text = TEXT | {"vocab_size": vocab_size}
    config = {"model_cfg": {"embed_dim": EMBED, "vision_cfg": VISION, "text_cfg": text}}
    config["preprocess_cfg"] = {"mean": [MEAN] * 3, "std": [STD] * 3, "interpolation": "bilinear"}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    state = {name: tensor.detach().half().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.part", {"format": "pt"})
    os.replace(folder / "model.part", folder / "open_clip_model.safetensors")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder of the run: checkpoint, log and, in model/, the result")
    parser.add_argument("--batch", type=int, default=128, help="scenes a step, a multiple of 4")
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that render")
    return parser.parse_args()


if __name__ == "__main__":
    main()
