// Rows whose support is most of the keys: Newton and p on the strip as it stands, and a dense product with the values.
#pragma once
#include "threshold.h"
#include "tiles.h"

namespace selectivit {
namespace {

constexpr float kWhole = 0.6f;       // share of candidates above which rows are taken whole
constexpr int64_t kNearKeys = 48;    // keys whose rows stay in the first cache while several tiles use them

// Entries of a row of the strip above top + tau.
template <class S>
inline int64_t count_above(const float* strip, int64_t m, float top, float tau) {
  int64_t n = 0;
  for (int64_t j = 0; j < padded_keys(m); j += S::W) n += S::count_positive(S::load(strip + j) - S::set(top) - S::set(tau));
  return n;
}

// p in place of a row's z, zeros up to the padded width; returns T. `sum` is that of p.
template <class S, class P>
inline float whole_row(const P& power, float* strip, int64_t m, float top, float start, float* sum) {
  for (int64_t j = 0; j < padded_keys(m); j += S::W) S::store(strip + j, S::load(strip + j) - S::set(top));
  const float threshold = newton<S>(power, strip, static_cast<int>(m), start);
  const typename S::F t = S::set(threshold);
  typename S::F total = S::zero();
  for (int64_t j = 0; j < padded_keys(m); j += S::W) {
    const typename S::F u = S::max(S::load(strip + j) - t, S::zero());
    const typename S::F p = power.slope(u) * u;
    S::store(strip + j, p);
    total = total + p;
  }
  *sum = S::sum(total);
  return threshold;
}

// out = factor * p . v for rows [begin, end) of a block; v is finite.
template <class S>
inline void mix_whole(const float* strip, int64_t list, int begin, int end, int64_t m, const float* v, int64_t stride,
                      int64_t width, const float* factors, float* out) {
  alignas(64) float sums[kBlockRows * kMaxWidth] = {};
  for (int64_t j = 0; j < m; j += kNearKeys)
    for (int r = begin / kSums<S> * kSums<S>; r < end; r += kSums<S>) {
      float* to[kSums<S>];
      for (int i = 0; i < kSums<S>; ++i) to[i] = sums + (r + i) * width;
      add_rows<S>(
          to, width, m - j < kNearKeys ? m - j : kNearKeys, [&](int i, int64_t s) { return strip[(r + i) * list + j + s]; },
          [&](int64_t s) { return v + (j + s) * stride; });
    }
  for (int r = begin; r < end; ++r)
    for (int64_t c = 0; c < width; ++c) out[r * width + c] = sums[r * width + c] * factors[r];
}

}  // namespace
}  // namespace selectivit
