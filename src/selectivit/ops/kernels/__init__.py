"""Compiled kernels, loaded when first asked for; the pure-PyTorch paths serve where there are none."""
