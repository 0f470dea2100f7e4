"""Pure tensor functions."""
