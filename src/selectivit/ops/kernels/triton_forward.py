"""entmax attention forward in Triton: rows short enough to stay in registers, and long ones in three passes."""

# The bodies are written in Triton's language, whose values pyright takes for Python's.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_blocks import (
    MAX_STEPS,
    TINY,
    load_rows,
    load_scale,
    lowest,
    pack,
    powers,
    scores,
    shift_of_lanes,
    step,
    support_floor,
    top_of,
    without_hidden,
)


@triton.jit
def store_rows(pointer, row, rows, n, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a contiguous (batch · heads, N, WIDTH) tensor."""
    columns = tl.arange(0, PADDED)
    places = (row * n + rows)[:, None] * WIDTH + columns[None, :]
    inside = (rows < n)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + places, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    out, tau, out2, tops, shifts, row, rows, n, acc, acc2, total, slope, top, shift,
    E: tl.constexpr, E_PAD: tl.constexpr, POWER: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Divide by Σp and store; for the backward pass also O₂ = Σs·v / Σs, the row's maximum and its shift."""
    store_rows(out, row, rows, n, acc / tl.maximum(total, TINY)[:, None], E, E_PAD)
    at_rows = row * n + rows
    tl.store(tau + at_rows, shift - 1 if POWER == -1 else shift, mask=rows < n)
    if SAVE:
        tl.store(tops + at_rows, top, mask=rows < n)
        tl.store(shifts + at_rows, shift, mask=rows < n)
        store_rows(out2, row, rows, n, acc2 / tl.maximum(slope, TINY)[:, None], E, E_PAD)


@triton.jit
def strip_forward(
    q, k, v, mask, scales, out, tau, out2, tops, shifts, words,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    mask_batch, mask_head, mask_row, mask_key, scale_batch, scale_head, scale_row,
    heads, n, m, blocks, scale, eps,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr, HAS_SCALES: tl.constexpr,
    SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program holds ROWS query rows against all keys, CHUNKS blocks of KEYS in registers: every score once."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    mask += batch * mask_batch + head * mask_head
    tile_q = load_rows(q + batch * q_batch + head * q_head, q_row, q_column, rows, n, D, D_PAD)
    factor = load_scale(scales + batch * scale_batch + head * scale_head, scale_row, rows, n, scale, HAS_SCALES)

    raw = ()
    lanes = tl.full([ROWS, KEYS], float("-inf"), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        keys = chunk * KEYS + tl.arange(0, KEYS)
        tile_k = load_rows(k, k_row, k_column, keys, m, D, D_PAD)
        x = scores(tile_q, tile_k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND, PRECISION)
        lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
        raw = raw + (x,)  # noqa: RUF005, Triton knows no star here
    top, broken = top_of(lanes)
    strip = ()
    for chunk in tl.static_range(CHUNKS):
        strip = strip + ((raw[chunk] - top[:, None]) * eps,)  # noqa: RUF005

    shift = shift_of_lanes(lanes, top, broken, eps, POWER)
    steps = 0
    unsettled = True
    while unsettled:
        p, s = powers(strip[0], shift[:, None], eps, POWER)
        for chunk in tl.static_range(1, CHUNKS):
            more_p, more_s = powers(strip[chunk], shift[:, None], eps, POWER)
            p += more_p
            s += more_s
        shift, unsettled = step(tl.sum(p, 1), tl.sum(s, 1), shift, eps)
        steps += 1
        unsettled = unsettled & (steps < MAX_STEPS)

    acc = tl.zeros([ROWS, E_PAD], tl.float32)
    acc2 = tl.zeros([ROWS, E_PAD], tl.float32)
    total = tl.zeros([ROWS, KEYS], tl.float32)
    slope = tl.zeros([ROWS, KEYS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        keys = chunk * KEYS + tl.arange(0, KEYS)
        p, s = powers(strip[chunk], shift[:, None], eps, POWER)
        tile_v = load_rows(v, v_row, v_column, keys, m, E, E_PAD)
        tile_v = without_hidden(tile_v, strip[chunk], 0, KIND)
        acc = tl.dot(p.to(tile_v.dtype), tile_v, acc, input_precision=PRECISION)
        total += p
        if SAVE:
            acc2 = tl.dot(s.to(tile_v.dtype), tile_v, acc2, input_precision=PRECISION)
            slope += s
    _finish(
        out, tau, out2, tops, shifts, row, rows, n, acc, acc2, tl.sum(total, 1), tl.sum(slope, 1), top, shift,
        E, E_PAD, POWER, SAVE,
    )  # fmt: skip


@triton.jit
def _live(table, top, shift, rows, n, groups, eps, POWER: tl.constexpr):
    """Which groups of keys hold an entry above the shift for some row, as bits, and how many do.

    The shift only rises, so what is out stays out. Rows that are NaN keep everything.
    """
    out = (table - top[:, None]) * eps <= (shift + support_floor(POWER))[:, None]
    alive = tl.where(out, 0, 1) * tl.where(rows < n, 1, 0)[:, None]
    return pack((tl.max(alive, 0) > 0) & (tl.arange(0, 64) < groups))


@triton.jit
def long_forward(
    q, k, v, mask, scales, out, tau, out2, tops, shifts, words,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    mask_batch, mask_head, mask_row, mask_key, scale_batch, scale_head, scale_row,
    heads, n, m, blocks, scale, eps,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr, HAS_SCALES: tl.constexpr,
    SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Three passes over the keys: maxima of KEYS lanes and of 64 groups of blocks; Newton; output. Dead groups drop."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    mask += batch * mask_batch + head * mask_head
    tile_q = load_rows(q + batch * q_batch + head * q_head, q_row, q_column, rows, n, D, D_PAD)
    factor = load_scale(scales + batch * scale_batch + head * scale_head, scale_row, rows, n, scale, HAS_SCALES)

    lanes = tl.full([ROWS, KEYS], float("-inf"), tl.float32)
    table = tl.full([ROWS, 64], float("-inf"), tl.float32)
    places = tl.arange(0, 64)[None, :]
    for block in range(0, tl.cdiv(m, KEYS)):
        keys = block * KEYS + tl.arange(0, KEYS)
        tile_k = load_rows(k, k_row, k_column, keys, m, D, D_PAD)
        x = scores(tile_q, tile_k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND, PRECISION)
        lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
        table = tl.where(places == block // GROUP, tl.maximum(table, tl.max(x, 1)[:, None]), table)
    top, broken = top_of(lanes)
    shift = shift_of_lanes(lanes, top, broken, eps, POWER)

    steps = 0
    unsettled = True
    while unsettled:
        bits, count = _live(table, top, shift, rows, n, tl.cdiv(m, GROUP * KEYS), eps, POWER)
        total = tl.zeros([ROWS, KEYS], tl.float32)
        slope = tl.zeros([ROWS, KEYS], tl.float32)
        for i in range(0, count * GROUP):
            group, low = lowest(bits)
            keys = (group * GROUP + i % GROUP) * KEYS + tl.arange(0, KEYS)
            bits = tl.where(i % GROUP == GROUP - 1, bits ^ low, bits)
            tile_k = load_rows(k, k_row, k_column, keys, m, D, D_PAD)
            x = scores(tile_q, tile_k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND, PRECISION)
            p, s = powers((x - top[:, None]) * eps, shift[:, None], eps, POWER)
            total += p
            slope += s
        shift, unsettled = step(tl.sum(total, 1), tl.sum(slope, 1), shift, eps)
        steps += 1
        unsettled = unsettled & (steps < MAX_STEPS)

    bits, count = _live(table, top, shift, rows, n, tl.cdiv(m, GROUP * KEYS), eps, POWER)
    if SAVE:
        tl.store(words + tl.program_id(0), bits)
    acc = tl.zeros([ROWS, E_PAD], tl.float32)
    acc2 = tl.zeros([ROWS, E_PAD], tl.float32)
    total = tl.zeros([ROWS, KEYS], tl.float32)
    slope = tl.zeros([ROWS, KEYS], tl.float32)
    for i in range(0, count * GROUP):
        group, low = lowest(bits)
        keys = (group * GROUP + i % GROUP) * KEYS + tl.arange(0, KEYS)
        bits = tl.where(i % GROUP == GROUP - 1, bits ^ low, bits)
        tile_k = load_rows(k, k_row, k_column, keys, m, D, D_PAD)
        tile_v = load_rows(v, v_row, v_column, keys, m, E, E_PAD)
        x = scores(tile_q, tile_k, mask, mask_row, mask_key, rows, keys, n, m, factor, KIND, PRECISION)
        tile_v = without_hidden(tile_v, x, 0, KIND)
        p, s = powers((x - top[:, None]) * eps, shift[:, None], eps, POWER)
        acc = tl.dot(p.to(tile_v.dtype), tile_v, acc, input_precision=PRECISION)
        total += p
        if SAVE:
            acc2 = tl.dot(s.to(tile_v.dtype), tile_v, acc2, input_precision=PRECISION)
            slope += s
    _finish(
        out, tau, out2, tops, shifts, row, rows, n, acc, acc2, tl.sum(total, 1), tl.sum(slope, 1), top, shift,
        E, E_PAD, POWER, SAVE,
    )  # fmt: skip
