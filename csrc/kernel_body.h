// The kernel's functions over the Simd of the including file, chosen by alpha.
#pragma once
#include "backward.h"
#include "kernel.h"
#include "rows.h"

namespace selectivit {
namespace {

// Within the rounding of alpha: the power's error is that of ln p too, ten times as far off at small p.
inline bool is_whole(float alpha) {
  const float inverse = 1 / (alpha - 1), nearest = std::round(inverse);
  return nearest <= 10 && std::fabs(inverse - nearest) < 1e-6f * nearest;
}

// Heads may differ in alpha, so every unit chooses its own powers.
int forward(const Attention& a, int64_t begin, int64_t end) {
  HeadState state;
  for (int64_t i = begin; i < end; ++i) {
    const Attention own = of_unit(a, i);
    const int status = own.alpha == 1.5f     ? forward_unit<Simd, Square<Simd>>(own, i, &state)
                       : is_whole(own.alpha) ? forward_unit<Simd, Whole<Simd>>(own, i, &state)
                                             : forward_unit<Simd, Real<Simd>>(own, i, &state);
    if (status) return status;
  }
  return kDone;
}

int rows_of(const Attention& a, const AttentionGradients& g, int64_t begin, int64_t end, UnitLists* lists) {
  HeadState state;
  for (int64_t i = begin; i < end; ++i) {
    const Attention own = of_unit(a, i);
    UnitLists* to = lists + (i - begin);
    const int status = own.alpha == 1.5f     ? backward_rows<Simd, Square<Simd>>(own, g, i, &state, to)
                       : is_whole(own.alpha) ? backward_rows<Simd, Whole<Simd>>(own, g, i, &state, to)
                                             : backward_rows<Simd, Real<Simd>>(own, g, i, &state, to);
    if (status) return status;
  }
  return kDone;
}

int keys_of(const Attention& a, const AttentionGradients& g, int64_t unit, int64_t begin, int64_t end,
            const UnitLists& lists) {
  return backward_keys<Simd>(a, g, unit, begin, end, lists);
}

int rowwise(const Rows& a, int64_t begin, int64_t end) {
  if (a.alpha == 1.5f) return entmax_rows<Simd, Square<Simd>>(a, begin, end);
  if (is_whole(a.alpha)) return entmax_rows<Simd, Whole<Simd>>(a, begin, end);
  return entmax_rows<Simd, Real<Simd>>(a, begin, end);
}

}  // namespace
}  // namespace selectivit
