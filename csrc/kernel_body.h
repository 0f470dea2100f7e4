// The kernel's functions over the Simd of the including file, chosen by alpha.
#pragma once
#include "backward.h"
#include "kernel.h"
#include "rows.h"

namespace selectivit {
namespace {

template <class P>
int forward_range(const Attention& a, int64_t begin, int64_t end) {
  HeadState state;
  for (int64_t i = begin; i < end; ++i)
    if (const int status = forward_unit<Simd, P>(a, i, &state)) return status;
  return kDone;
}

template <class P>
int rows_range(const Attention& a, const AttentionGradients& g, int64_t begin, int64_t end, UnitLists* lists) {
  HeadState state;
  for (int64_t i = begin; i < end; ++i)
    if (const int status = backward_rows<Simd, P>(a, g, i, &state, lists + (i - begin))) return status;
  return kDone;
}

inline bool is_whole(float alpha) {
  const float inverse = 1 / (alpha - 1), nearest = std::round(inverse);
  return nearest <= 10 && std::fabs(inverse - nearest) < 1e-5f * nearest;
}

int forward(const Attention& a, int64_t begin, int64_t end) {
  if (a.alpha == 1.5f) return forward_range<Square<Simd>>(a, begin, end);
  if (is_whole(a.alpha)) return forward_range<Whole<Simd>>(a, begin, end);
  return forward_range<Real<Simd>>(a, begin, end);
}

int rows_of(const Attention& a, const AttentionGradients& g, int64_t begin, int64_t end, UnitLists* lists) {
  if (a.alpha == 1.5f) return rows_range<Square<Simd>>(a, g, begin, end, lists);
  if (is_whole(a.alpha)) return rows_range<Whole<Simd>>(a, g, begin, end, lists);
  return rows_range<Real<Simd>>(a, g, begin, end, lists);
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
