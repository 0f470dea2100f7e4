// The output of a row: the sum of p * v over its survivors.
#pragma once
#include "problem.h"

namespace selectivit {
namespace {

template <class S, int kVectors>
inline void mix_columns(const float* p, const int32_t* indices, int n, const float* v, int64_t stride, float factor,
                        float* out) {
  typename S::F acc[kVectors], other[kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) acc[c] = other[c] = S::zero();
  int j = 0;
  for (; j + 2 <= n; j += 2) {
    const float *x = v + indices[j] * stride, *y = v + indices[j + 1] * stride;
    const typename S::F px = S::set(p[j]), py = S::set(p[j + 1]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      acc[c] = S::fma(px, S::load(x + c * S::W), acc[c]);
      other[c] = S::fma(py, S::load(y + c * S::W), other[c]);
    }
  }
  if (j < n) {
    const float* x = v + indices[j] * stride;
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc[c] = S::fma(S::set(p[j]), S::load(x + c * S::W), acc[c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) S::store(out + c * S::W, (acc[c] + other[c]) * S::set(factor));
}

// out = factor * sum of p[j] * rows[indices[j]], over `width` columns (a multiple of 16).
template <class S>
inline void mix_rows(const float* p, const int32_t* indices, int n, const float* rows, int64_t stride, int64_t width,
                     float factor, float* out) {
  int64_t c = 0;
  for (; c + 4 * S::W <= width; c += 4 * S::W) mix_columns<S, 4>(p, indices, n, rows + c, stride, factor, out + c);
  for (; c < width; c += S::W) mix_columns<S, 1>(p, indices, n, rows + c, stride, factor, out + c);
}

constexpr int64_t kNearBytes = 24 << 10;  // of values that stay in the first cache while 16 rows read them

// One row's share of the keys below `end`: adds to `sums`, returns where the rest of its list begins.
template <class S>
inline int mix_part(const float* p, const int32_t* indices, int j, int n, int32_t end, const float* v, int64_t stride,
                    float* sums) {
  typename S::F acc[4];
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) acc[c] = S::load(sums + c * S::W);
  for (; j < n && indices[j] < end; ++j) {
    const float* x = v + indices[j] * stride;
    const typename S::F w = S::set(p[j]);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[c] = S::fma(w, S::load(x + c * S::W), acc[c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) S::store(sums + c * S::W, acc[c]);
  return j;
}

// The rows of a block that have long lists: keys in stretches that stay near, every row's part of each in turn.
template <class S>
inline void mix_block(const float* p, const int32_t* indices, int64_t list, const int* n, int rows, int64_t m,
                      const float* v, int64_t stride, int64_t width, const float* factors, float* out) {
  const int64_t columns = 4 * S::W, near = kNearBytes / (4 * columns);
  for (int64_t c = 0; c < width; c += columns) {
    int next[kBlockRows] = {};
    alignas(64) float sums[kBlockRows * 4 * S::W] = {};
    for (int64_t end = near; end < m + near; end += near)
      for (int r = 0; r < rows; ++r)
        next[r] = mix_part<S>(p + r * list, indices + r * list, next[r], n[r], static_cast<int32_t>(end), v + c, stride,
                              sums + r * columns);
    for (int r = 0; r < rows; ++r)
      for (int64_t i = 0; i < columns; ++i) out[r * width + c + i] = sums[r * columns + i] * factors[r];
  }
}

// values[j] = x . rows[indices[j]]: the survivors' products, four at a time. Writes up to a multiple of four.
template <class S>
inline void dot_rows(const float* x, const int32_t* indices, int n, const float* rows, int64_t stride, int64_t width,
                     float* values) {
  for (int j = 0; j < n; j += 4) {
    const float* row[4];
    for (int r = 0; r < 4; ++r) row[r] = rows + indices[j + r < n ? j + r : n - 1] * stride;
    typename S::F acc[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    for (int64_t c = 0; c < width; c += S::W) {
      const typename S::F y = S::load(x + c);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) acc[r] = S::fma(y, S::load(row[r] + c), acc[r]);
    }
    S::sum4(acc[0], acc[1], acc[2], acc[3], values + j);
  }
}

}  // namespace
}  // namespace selectivit
