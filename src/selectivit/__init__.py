"""Selective token interaction for Vision Transformers."""
