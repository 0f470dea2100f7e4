// The keys that any of 16 query rows attends to, and u of all 16 rows at each: from the saved lists, or, where a unit's
// survivors outgrew their room, from scores computed anew and the rows' thresholds.
#pragma once
#include <cmath>

#include "saved.h"
#include "scratch.h"
#include "tiles.h"

namespace selectivit {
namespace {

// What a block of 16 rows attends to.
struct Union {
  int32_t* keys;
  uint32_t* marks;      // bit r: row r attends to the key
  float* u;             // 16 a key
  int32_t* places;      // of the lists' entries, in u
  int64_t n;            // keys; -1 where memory is out
};

// From the lists of rows [first, first + rows) of a unit.
template <class S>
inline void union_of_lists(const SavedUnit& saved, int64_t first, int rows, int64_t m, Union* found) {
  const int64_t *start = saved.start + first, width = padded_keys(m) + 64;
  uint32_t* marks = static_cast<uint32_t*>(room(kStrip, 2 * width * sizeof(float)));
  found->places = static_cast<int32_t*>(room(kIndices, (start[rows] - start[0] + 4) * sizeof(int32_t)));
  found->n = -1;
  if (!marks || !found->places) return;
  int32_t* place = reinterpret_cast<int32_t*>(marks + width);  // of a key in the union; read where it was written
  std::memset(marks, 0, width * sizeof(float));
  for (int r = 0; r < rows; ++r) {
    const uint32_t mark = 0x3f800000u | 1u << r;  // as a float above 0, and not denormal
    for (int64_t i = start[r]; i < start[r + 1]; ++i) marks[saved.index[i]] |= mark;
  }
  const float* marked = reinterpret_cast<const float*>(marks);
  int n = 0;
  for (int64_t j = 0; j < padded_keys(m); j += S::W)
    n = S::keep_above(S::load(marked + j), S::zero(), static_cast<int32_t>(j), reinterpret_cast<float*>(found->marks),
                      found->keys, n);
  for (int i = 0; i < n; ++i) place[found->keys[i]] = i * kBlockRows;
  std::memset(found->u, 0, n * kBlockRows * sizeof(float));
  for (int r = 0; r < rows; ++r)
    for (int64_t i = start[r]; i < start[r + 1]; ++i) {
      const int32_t at = place[saved.index[i]] + r;
      found->places[i - start[0]] = at;
      found->u[at] = saved.u[i];
    }
  found->n = n;
}

// z of one key's 16 rows with the mask applied.
inline void mask_key(const Attention& a, int64_t head, int64_t row, int rows, int64_t key, float eps, float* z) {
  const int64_t at = offset(a.mask_stride, a, head) + row * a.mask_stride[2] + key * a.mask_stride[3];
  if (a.mask_kind == kBoolMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + at;
    for (int r = 0; r < rows; ++r) z[r] = mask[r * a.mask_stride[2]] ? z[r] : -__builtin_inff();
  } else {
    const float* mask = static_cast<const float*>(a.mask) + at;
    for (int r = 0; r < rows; ++r) z[r] += mask[r * a.mask_stride[2]] * eps;
  }
}

// turned: the 16 rows' queries, times scale and eps.
template <class S>
inline void union_of_scores(const Attention& a, int64_t head, int64_t row, int rows, const RowThreshold* thresholds,
                            const float* turned, float eps, Union* found) {
  alignas(64) float top[kBlockRows] = {}, tau[kBlockRows], norm[kBlockRows] = {};
  for (int r = 0; r < kBlockRows; ++r) tau[r] = __builtin_inff();
  for (int r = 0; r < rows; ++r) top[r] = thresholds[r].top, tau[r] = thresholds[r].tau, norm[r] = thresholds[r].norm;
  const float* k = a.k + offset(a.k_stride, a, head);
  int64_t n = 0;
  for (int64_t j = 0; j < a.m; j += kKeysAtOnce<S>) {
    const float* x[kKeysAtOnce<S>];
    alignas(64) float z[kKeysAtOnce<S> * kBlockRows];
    for (int i = 0; i < kKeysAtOnce<S>; ++i) x[i] = k + (j + i < a.m ? j + i : a.m - 1) * a.k_stride[2];
    dot_tile<S>(x, turned, a.d, z);
    for (int i = 0; i < kKeysAtOnce<S> && j + i < a.m; ++i) {
      if (a.mask_kind != kNoMask) mask_key(a, head, row, rows, j + i, eps, z + i * kBlockRows);
      typename S::F most = S::zero();
      for (int c = 0; c < kBlockRows; c += S::W) {
        typename S::F x = (S::load(z + i * kBlockRows + c) - S::load(top + c)) - S::load(tau + c);
        x = S::max(x, S::zero()) * S::load(norm + c);
        most = S::max(most, x);
        S::store(found->u + n * kBlockRows + c, x);
      }
      found->keys[n] = static_cast<int32_t>(j + i);
      n += S::count_positive(most) > 0;
    }
  }
  found->n = n;
}

// After union_of_scores: products that are added up in another order than the forward pass did leave p with a sum that is
// not quite 1 where scores are large.
template <class S, class P>
inline void renormalise(const P& power, int64_t n, float* p, float* slopes) {
  alignas(64) float of_p[kBlockRows], of_slopes[kBlockRows];
  for (int c = 0; c < kBlockRows; c += S::W) {
    typename S::F sum = S::zero();
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) sum = sum + S::load(p + j);
    S::store(of_p + c, sum);
  }
  bool off = false;
  for (int r = 0; r < kBlockRows; ++r) {
    const float sum = of_p[r] > 0 ? of_p[r] : 1;
    off = off || std::fabs(sum - 1) > 1e-5f;
    of_p[r] = 1 / sum;
    of_slopes[r] = of_p[r] / power.inverse_norm(sum);
  }
  if (!off) return;
  for (int c = 0; c < kBlockRows; c += S::W)
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) {
      S::store(p + j, S::load(p + j) * S::load(of_p + c));
      S::store(slopes + j, S::load(slopes + j) * S::load(of_slopes + c));
    }
}

}  // namespace
}  // namespace selectivit
