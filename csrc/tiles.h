// Dense products over chosen keys: 16 query rows stand side by side, and a tile of the result stays in registers.
#pragma once
#include "problem.h"

namespace selectivit {
namespace {

// Rows turned for the tiles: dimension by dimension, 16 rows each. Rows past the last are zeros.
template <class S>
inline void turn_rows(const float* x, int64_t stride, int rows, int64_t width, float* turned) {
  float padded[kBlockRows * 16];
  for (int64_t c = 0; c < width; c += 16) {
    if (rows == kBlockRows) {
      S::transpose(x + c, stride, turned + c * kBlockRows, kBlockRows);
      continue;
    }
    for (int i = 0; i < kBlockRows * 16; ++i) padded[i] = i / 16 < rows ? x[i / 16 * stride + c + i % 16] : 0.0f;
    S::transpose(padded, 16, turned + c * kBlockRows, kBlockRows);
  }
}

template <class S>
constexpr int kKeysAtOnce = S::W / 2;  // keys against 16 turned rows at once

// out[j][r] = x[j] . row r.
template <class S>
inline void dot_tile(const float* const* x, const float* turned, int64_t width, float* out) {
  constexpr int V = kBlockRows / S::W, K = kKeysAtOnce<S>;
  typename S::F acc[K][V];
#pragma GCC unroll 8
  for (int a = 0; a < K; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) acc[a][c] = S::zero();
  for (int64_t i = 0; i < width; ++i) {
    typename S::F row[V];
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) row[c] = S::load(turned + i * kBlockRows + c * S::W);
#pragma GCC unroll 8
    for (int a = 0; a < K; ++a) {
      const typename S::F y = S::set(x[a][i]);
#pragma GCC unroll 4
      for (int c = 0; c < V; ++c) acc[a][c] = S::fma(y, row[c], acc[a][c]);
    }
  }
#pragma GCC unroll 8
  for (int a = 0; a < K; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) S::store(out + a * kBlockRows + c * S::W, acc[a][c]);
}

template <class S>
constexpr int kSums = S::kTileRows / 2;  // sums of weighted rows at once

// to[a] += sum over i of weight(a, i) * row(i), over kVectors vectors of columns; in the order of i, one rounding each,
// so that the result depends on neither the grouping of the sums nor the pieces that i comes in.
template <class S, int kVectors, class Weight, class Row>
inline void add_columns(float* const* to, int64_t column, int64_t steps, Weight weight, Row row) {
  constexpr int A = kSums<S>;
  typename S::F acc[A][kVectors];
#pragma GCC unroll 4
  for (int a = 0; a < A; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc[a][c] = S::load(to[a] + column + c * S::W);
  for (int64_t i = 0; i < steps; ++i) {
    const float* x = row(i) + column;
    typename S::F y[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) y[c] = S::load(x + c * S::W);
#pragma GCC unroll 4
    for (int a = 0; a < A; ++a) {
      const typename S::F w = S::set(weight(a, i));
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) acc[a][c] = S::fma(w, y[c], acc[a][c]);
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < A; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) S::store(to[a] + column + c * S::W, acc[a][c]);
}

template <class S, class Weight, class Row>
inline void add_rows(float* const* to, int64_t width, int64_t steps, Weight weight, Row row) {
  int64_t c = 0;
  for (; c + 4 * S::W <= width; c += 4 * S::W) add_columns<S, 4>(to, c, steps, weight, row);
  for (; c < width; c += S::W) add_columns<S, 1>(to, c, steps, weight, row);
}

// A weighted sum of the marked of 16 rows.
struct MarkedSum {
  float* to;
  const float *weights, *rows;
  int64_t stride;
};

// to += weights[r] * row r over the marked rows, for two sums at once; one rounding each, as in add_columns.
template <class S, int kVectors>
inline void add_marked_columns(uint32_t marked, const MarkedSum& x, const MarkedSum& y, int64_t column) {
  typename S::F a[kVectors], b[kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    a[c] = S::load(x.to + column + c * S::W);
    b[c] = S::load(y.to + column + c * S::W);
  }
  for (; marked; marked &= marked - 1) {
    const int r = __builtin_ctz(marked);
    const typename S::F v = S::set(x.weights[r]), w = S::set(y.weights[r]);
    const float *from = x.rows + r * x.stride + column, *other = y.rows + r * y.stride + column;
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      a[c] = S::fma(v, S::load(from + c * S::W), a[c]);
      b[c] = S::fma(w, S::load(other + c * S::W), b[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    S::store(x.to + column + c * S::W, a[c]);
    S::store(y.to + column + c * S::W, b[c]);
  }
}

// Columns [begin, end) of one sum.
template <class S>
inline void add_marked_rest(uint32_t marked, const MarkedSum& x, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c += S::W) {
    typename S::F a = S::load(x.to + c);
    for (uint32_t left = marked; left; left &= left - 1) {
      const int r = __builtin_ctz(left);
      a = S::fma(S::set(x.weights[r]), S::load(x.rows + r * x.stride + c), a);
    }
    S::store(x.to + c, a);
  }
}

template <class S>
inline void add_marked(uint32_t marked, const MarkedSum& x, int64_t x_width, const MarkedSum& y, int64_t y_width) {
  const int64_t both = x_width < y_width ? x_width : y_width;
  int64_t c = 0;
  for (; c + 4 * S::W <= both; c += 4 * S::W) add_marked_columns<S, 4>(marked, x, y, c);
  for (; c + S::W <= both; c += S::W) add_marked_columns<S, 1>(marked, x, y, c);
  add_marked_rest<S>(marked, x, c, x_width);
  add_marked_rest<S>(marked, y, c, y_width);
}

}  // namespace
}  // namespace selectivit
