"""Where attention scores come from: query-key as trained, or self-correlation of queries, keys or values.

Self-correlation (qq, kk, vv and their sums) is what SCLIP, NACLIP, ClearCLIP, GEM and CLIP Surgery use in place of qk
in the last layers of a frozen CLIP; "v" mixes nothing at all (MaskCLIP).
"""

from __future__ import annotations

PAIRS = {"qk": ("q", "k"), "qq": ("q", "q"), "kk": ("k", "k"), "vv": ("v", "v")}
VALUE_ONLY = "v"


def score_pairs(source: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of projections whose products are the scores; a sum has several, "v" has none.

    Args:
        source: "qk", "qq", "kk", "vv", a sum of these such as "qq+kk", or "v".

    Raises:
        ValueError: an unknown source.

    Example:
        >>> score_pairs("qq+kk")
        (('q', 'q'), ('k', 'k'))
    """
    if source == VALUE_ONLY:
        return ()
    names = source.split("+") if isinstance(source, str) else [source]
    if not all(name in PAIRS for name in names):
        raise ValueError(
            f"unknown score source {source!r}: use one of {', '.join(PAIRS)}, a sum of them such as 'qq+kk', "
            f"or {VALUE_ONLY!r} for the values without mixing"
        )
    return tuple(PAIRS[name] for name in names)
