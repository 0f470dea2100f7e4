"""What the Triton kernels share: a block of scores, u's powers, Newton's step, and lists of live blocks in 64 bits.

Words as in ops/threshold.py: z = ε(x − max x), and p = (z − shift)₊^β with β = 1/ε. The shift is τ, or σ = 1 + τ where
α is so close to 1 that p is computed through its logarithm.
"""

# The bodies are written in Triton's language, whose values pyright takes for Python's.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# A mask's KIND: 0 none, 1 bool, 2 added. POWER: 1, 2, 3, … is β itself, 0 any other β, −1 close to softmax.
LANE_STEPS = tl.constexpr(6)
WITHIN = tl.constexpr(1e-4)  # Σp − 1 before the last step, which squares it
MAX_STEPS = tl.constexpr(40)  # Newton needs 1 to 4; the bound only guards against rounding that never settles
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def load_rows(pointer, row_stride, column_stride, rows, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix, (rows, PADDED); zeros beyond its edges, which change no product."""
    columns = tl.arange(0, PADDED)
    places = rows.to(tl.int64)[:, None] * row_stride + columns[None, :] * column_stride
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + places, mask=inside, other=0.0)


@triton.jit
def load_scale(pointer, row_stride, rows, num_rows, scale, HAS_SCALES: tl.constexpr):
    """The factor of every row."""
    factor = tl.zeros(rows.shape, tl.float32) + scale
    if HAS_SCALES:
        factor = tl.load(pointer + rows.to(tl.int64) * row_stride, mask=rows < num_rows, other=0.0).to(tl.float32)
    return factor


@triton.jit
def masked(x, pointer, row_stride, column_stride, rows, keys, n, m, KIND: tl.constexpr):
    """Scores with the mask applied, −inf beyond the last key; rows and keys broadcast to the shape of x."""
    if KIND == 0:
        return tl.where(keys < m, x, float("-inf"))
    inside = (keys < m) & (rows < n)
    places = pointer + rows.to(tl.int64) * row_stride + keys.to(tl.int64) * column_stride
    if KIND == 1:
        return tl.where(tl.load(places, mask=inside, other=0) != 0, x, float("-inf"))
    added = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(added == float("-inf"), added, x + added)


@triton.jit
def scores(
    q, k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Scores of query rows (axis 0) and keys (axis 1) in float32, the factor applied there."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor[:, None]
    return masked(x, mask, mask_row, mask_key, rows[:, None], keys[None, :], n, m, KIND)


@triton.jit
def without_hidden(t, x, AXIS: tl.constexpr, KIND: tl.constexpr):
    """Zero the rows of t that the mask hides from this whole block: 0 · NaN in a product would leak them."""
    if KIND == 0:
        return t
    seen = tl.max((x != float("-inf")).to(tl.int32), AXIS) > 0
    return tl.where(seen[:, None], t, 0.0).to(t.dtype)


@triton.jit
def log1p(y):
    """ln(1 + y) for −1 ≤ y ≤ 0, to the relative accuracy of float32 near 0."""
    t = y / (2 + y)
    t2 = t * t
    series = 2 * t * (1 + t2 * (1 / 3 + t2 * (1 / 5 + t2 * (1 / 7 + t2 * (1 / 9)))))
    return tl.where(y > -0.3, series, tl.log(1 + y))


@triton.jit
def support_floor(POWER: tl.constexpr):
    """What z − shift must exceed to be in the support."""
    return -1.0 if POWER == -1 else 0.0


@triton.jit
def powers(z, shift, eps, POWER: tl.constexpr):
    """(u^β, u^(β − 1)); the second, the sensitivity s, is 0 off the support and only there."""
    u = tl.maximum(z - shift, support_floor(POWER), propagate_nan=tl.PropagateNan.ALL)
    if POWER == -1:
        log_p = log1p(u) / eps
        return tl.exp(log_p), tl.exp(log_p * (1 - eps))
    if POWER == 1:
        return u, tl.where(u == 0, 0.0, tl.where(u > 0, 1.0, u))
    if POWER == 2:
        return u * u, u
    if POWER == 0:
        slope = tl.where(u == 0, 0.0, tl.exp2(tl.log2(u) * (1 / eps - 1)))
        return u * slope, slope
    slope = u
    for _ in tl.static_range(POWER - 2):
        slope *= u
    return u * slope, slope


@triton.jit
def rise(total, slope, eps):
    """Newton's step on ‖u‖_β − 1: S₀(1 − S₀^(−ε)) / S₁, never to the left; 1 − … without cancellation."""
    total = tl.maximum(total, TINY)
    x = tl.maximum(eps * tl.log(total), 0.0)
    series = x * (1 - x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x * (1 / 720))))))
    return total * tl.where(x < 0.25, series, 1 - tl.exp(-x)) / tl.maximum(slope, TINY)


@triton.jit
def top_of(lanes):
    """Row maxima from lane maxima, 0 where all is masked; and NaN where a NaN or +inf may be attended, else 0."""
    top = tl.max(lanes, 1)
    broken = tl.max(tl.where(lanes < float("inf"), 0, 1), 1) > 0
    sound = (top > float("-inf")) & (top < float("inf"))
    return tl.where(sound, top, 0.0), tl.where(broken, float("nan"), 0.0)


@triton.jit
def shift_of_lanes(lanes, top, broken, eps, POWER: tl.constexpr):
    """The shift solved on a row's lane maxima: at most the row's own, and close to it. NaN for broken rows."""
    z = (lanes - top[:, None]) * eps
    shift = broken + (0.0 if POWER == -1 else -1.0)
    for _ in tl.static_range(LANE_STEPS):
        p, slope = powers(z, shift[:, None], eps, POWER)
        shift += rise(tl.sum(p, 1), tl.sum(slope, 1), eps)
    return shift


@triton.jit
def step(total, slope, shift, eps):
    """One step for every row, and whether any row needs another evaluation after it."""
    moved = shift + rise(total, slope, eps)
    unsettled = (total > 1 + WITHIN) & (moved > shift)
    return moved, tl.max(unsettled.to(tl.int32), 0) > 0


@triton.jit
def pack(alive):
    """64 flags as the bits of one word, and how many there are."""
    places = tl.arange(0, 64).to(tl.int64)
    return tl.sum(tl.where(alive, tl.full([64], 1, tl.int64) << places, 0), 0), tl.sum(alive.to(tl.int32), 0)


@triton.jit
def lowest(bits):
    """The place of the lowest bit that is set, out of the exponent of that power of two as a float."""
    low = bits & -bits
    return ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127, low
