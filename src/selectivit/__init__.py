"""Selective token interaction for Vision Transformers.

Attention with exact zeros for training, the same as a training-free swap in pretrained models, and dense features.
Hosts (timm, open_clip, transformers) are imported when a model of theirs is used.
"""

from selectivit.data.load import load_image
from selectivit.export.files import export_features
from selectivit.features import Features, features, preprocessing
from selectivit.models.create import create_model
from selectivit.models.weights import list_models, load_model
from selectivit.openvocab.segmenter import OpenVocabularySegmenter, Segmentation
from selectivit.ops.attention import entmax_attention
from selectivit.ops.core_attention import core_attention
from selectivit.ops.entmax import entmax, entmax15, sparsemax
from selectivit.ops.entmax_loss import entmax_loss
from selectivit.swap.calibrate import calibrate_swap
from selectivit.swap.calibration import Calibration
from selectivit.swap.maps import attention_maps
from selectivit.swap.swap import Swap, restore_attention, swap_attention

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Features",
    "OpenVocabularySegmenter",
    "Segmentation",
    "Swap",
    "__version__",
    "attention_maps",
    "calibrate_swap",
    "core_attention",
    "create_model",
    "entmax",
    "entmax15",
    "entmax_attention",
    "entmax_loss",
    "export_features",
    "features",
    "list_models",
    "load_image",
    "load_model",
    "preprocessing",
    "restore_attention",
    "sparsemax",
    "swap_attention",
]
