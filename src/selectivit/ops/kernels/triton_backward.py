"""entmax attention backward in Triton: dq by query rows, dk and dv by keys; no search, no atomics.

The forward pass kept each row's maximum and shift, O₂ = Σs·v / Σs, and for long rows which groups of keys are live.
With δ = dO·O₂ the scores' gradient is dS = s ⊙ (dO·Vᵀ − δ).
"""

# The bodies are written in Triton's language, whose values pyright takes for Python's.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_blocks import load_rows, load_scale, lowest, masked, pack, powers, scores, without_hidden
from .triton_forward import store_rows


@triton.jit
def _first(count):
    """A word whose lowest `count` bits are set."""
    return pack(tl.arange(0, 64) < count)[0]


@triton.jit
def queries_backward(
    q, k, v, mask, scales, grad, out2, tops, shifts, words, deltas, dq, dscale,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    g_batch, g_head, g_row, g_column, mask_batch, mask_head, mask_row, mask_key, scale_batch, scale_head, scale_row,
    heads, n, m, blocks, scale, eps,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PIECES: tl.constexpr, LIVE: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr, HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Dq and the scale's gradient of ROWS query rows, and their δ for the other kernel; PIECES blocks to a bit."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    at_rows = row * n + rows
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    mask += batch * mask_batch + head * mask_head
    tile_q = load_rows(q + batch * q_batch + head * q_head, q_row, q_column, rows, n, D, D_PAD)
    tile_g = load_rows(grad + batch * g_batch + head * g_head, g_row, g_column, rows, n, E, E_PAD)
    factor = load_scale(scales + batch * scale_batch + head * scale_head, scale_row, rows, n, scale, HAS_SCALES)
    top = tl.load(tops + at_rows, mask=rows < n, other=0.0)
    shift = tl.load(shifts + at_rows, mask=rows < n, other=float("inf"))
    mean = load_rows(out2 + row * n * E, E, 1, rows, n, E, E_PAD)
    delta = tl.sum(tile_g.to(tl.float32) * mean.to(tl.float32), 1)
    tl.store(deltas + at_rows, delta, mask=rows < n)

    bits = tl.load(words + tl.program_id(0)) if LIVE else tl.full([], 0, tl.int64)
    count = tl.sum(((bits >> tl.arange(0, 64).to(tl.int64)) & 1).to(tl.int32), 0)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for i in range(0, count * PIECES if LIVE else tl.cdiv(m, KEYS)):
        place = i
        if LIVE:
            group, low = lowest(bits)
            place = group * PIECES + i % PIECES
            bits = tl.where(i % PIECES == PIECES - 1, bits ^ low, bits)
        keys = place * KEYS + tl.arange(0, KEYS)
        tile_k = load_rows(k, k_row, k_column, keys, m, D, D_PAD)
        tile_v = load_rows(v, v_row, v_column, keys, m, E, E_PAD)
        x = scores(tile_q, tile_k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND, PRECISION)
        _, s = powers((x - top[:, None]) * eps, shift[:, None], eps, POWER)
        along = tl.dot(tile_g, tl.trans(tile_v), input_precision=PRECISION) - delta[:, None]
        dx = tl.where(s == 0, 0.0, s * along).to(tile_k.dtype)
        acc = tl.dot(dx, without_hidden(tile_k, x, 0, KIND), acc, input_precision=PRECISION)
    store_rows(dq, row, rows, n, acc * factor[:, None], D, D_PAD)
    if HAS_SCALES:
        tl.store(dscale + at_rows, tl.sum(tile_q.to(tl.float32) * acc, 1), mask=rows < n)


@triton.jit
def _live_queries(words, row, blocks, group, REACH: tl.constexpr):
    """Which groups of REACH query blocks have the group of keys in their words, as bits, and how many do."""
    alive = tl.zeros([64], tl.int32)
    for i in range(0, REACH):
        block = tl.arange(0, 64) * REACH + i
        found = tl.load(words + row * blocks + block, mask=block < blocks, other=0)
        alive = alive | ((found >> group) & 1).to(tl.int32)
    return pack(alive > 0)


@triton.jit
def keys_backward(
    q, k, v, mask, scales, grad, tops, shifts, words, deltas, dk, dv,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    g_batch, g_head, g_row, g_column, mask_batch, mask_head, mask_row, mask_key, scale_batch, scale_head, scale_row,
    heads, n, m, blocks, live_blocks, keys_of_bit, scale, eps,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    REACH: tl.constexpr, PIECES: tl.constexpr, LIVE: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr,
    HAS_SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dk and dv of KEYS keys, over the query rows in order; the matrices stand transposed, keys first."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    start = (tl.program_id(0) % blocks) * KEYS
    keys = start + tl.arange(0, KEYS)
    q += batch * q_batch + head * q_head
    grad += batch * g_batch + head * g_head
    mask += batch * mask_batch + head * mask_head
    scales += batch * scale_batch + head * scale_head
    tile_k = load_rows(k + batch * k_batch + head * k_head, k_row, k_column, keys, m, D, D_PAD)
    tile_v = load_rows(v + batch * v_batch + head * v_head, v_row, v_column, keys, m, E, E_PAD)

    bits = tl.full([], 0, tl.int64)
    count = 0
    if LIVE:
        bits, count = _live_queries(words, row, live_blocks, start // keys_of_bit, REACH)
    acc_k = tl.zeros([KEYS, D_PAD], tl.float32)
    acc_v = tl.zeros([KEYS, E_PAD], tl.float32)
    for i in range(0, count * PIECES if LIVE else tl.cdiv(n, ROWS)):
        place = i
        if LIVE:
            group, low = lowest(bits)
            place = group * PIECES + i % PIECES
            bits = tl.where(i % PIECES == PIECES - 1, bits ^ low, bits)
        rows = place * ROWS + tl.arange(0, ROWS)
        at_rows = row * n + rows
        tile_q = load_rows(q, q_row, q_column, rows, n, D, D_PAD)
        tile_g = load_rows(grad, g_row, g_column, rows, n, E, E_PAD)
        factor = load_scale(scales, scale_row, rows, n, scale, HAS_SCALES)
        top = tl.load(tops + at_rows, mask=rows < n, other=0.0)
        shift = tl.load(shifts + at_rows, mask=rows < n, other=float("inf"))
        delta = tl.load(deltas + at_rows, mask=rows < n, other=0.0)
        x = tl.dot(tile_k, tl.trans(tile_q), input_precision=PRECISION) * factor[None, :]
        x = masked(x, mask, mask_row, mask_key, rows[None, :], keys[:, None], n, m, KIND)
        p, s = powers((x - top[None, :]) * eps, shift[None, :], eps, POWER)
        acc_v = tl.dot(p.to(tile_g.dtype), tile_g, acc_v, input_precision=PRECISION)
        along = tl.dot(tile_v, tl.trans(tile_g), input_precision=PRECISION) - delta[None, :]
        dx = (tl.where(s == 0, 0.0, s * along) * factor[None, :]).to(tile_q.dtype)
        acc_k = tl.dot(dx, without_hidden(tile_q, x, 0, KIND), acc_k, input_precision=PRECISION)
    store_rows(dk, row, keys, m, acc_k, D, D_PAD)
    store_rows(dv, row, keys, m, acc_v, E, E_PAD)
