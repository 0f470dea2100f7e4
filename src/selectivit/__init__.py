"""Selective token interaction for Vision Transformers.

Attention with exact zeros for training, the same as a training-free swap in pretrained models, and dense features.
Hosts (timm, open_clip, transformers) are imported when a model of theirs is used.
"""

from selectivit.ops.attention import entmax_attention
from selectivit.ops.entmax import entmax, entmax15, sparsemax
from selectivit.ops.entmax_loss import entmax_loss

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "entmax",
    "entmax15",
    "entmax_attention",
    "entmax_loss",
    "sparsemax",
]
