"""Open-vocabulary segmentation with a frozen CLIP, without training."""
