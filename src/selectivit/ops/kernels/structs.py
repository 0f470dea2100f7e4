"""The structs of csrc/problem.h, field by field, as bytes that the library reads in place."""

from __future__ import annotations

import struct

ABI = 2

# Attention: pointers to q, k, v, mask, scale_rows, alphas, out, tau_out and saved; strides in elements of q, k and v (3
# each), mask (4), scale_rows (3) and alphas (2); batch, heads, n, m, d, e and saved_bytes; scale and alpha; mask_kind,
# screen and threads.
ATTENTION = struct.Struct("@9P 3q 3q 3q 4q 3q 2q 7q 2f 3i 0q")
# AttentionGradients: the pointer to grad, its strides (3), pointers to dq, dk, dv, dalpha and dscale.
GRADIENTS = struct.Struct("@P 3q 5P")
# Rows: pointers to scores, p and tau_out; rows, n and stride; alpha; threads.
ROWS = struct.Struct("@3P 3q f i")
