// Backward over the survivors alone: per entry four operations of a head's width, where softmax needs five products of
// whole matrices. First by rows (dq, and the scores' gradients), then by keys: each key gathers from its survivors in
// the order of the rows, so that nothing is accumulated in memory and no result depends on the number of threads.
#pragma once
#include <cstdlib>

#include "forward.h"
#include "lists.h"
#include "row_gradients.h"

namespace selectivit {
namespace {

// Survivors of a unit: those saved, or found again.
template <class S, class P>
int gather_unit(const Attention& a, int64_t index, HeadState* state, UnitLists* lists) {
  if (a.saved) {
    const SavedUnit saved = saved_unit(a, index);
    if (saved.start[0] == 0) {
      lists->start = saved.start;
      lists->u = saved.u;
      lists->index = saved.index;
      return kDone;
    }
  }
  const Unit unit = unit_at(a, index);
  const int64_t rows = unit.end - unit.begin, capacity = rows * a.m + 16;
  char* memory = static_cast<char*>(room(kLists, (rows + 1) * 8 + capacity * 8));
  if (!memory) return kNoMemory;
  int64_t* start = reinterpret_cast<int64_t*>(memory);
  float* u = reinterpret_cast<float*>(start + rows + 1);
  Sink sink{start, u, reinterpret_cast<int32_t*>(u + capacity), 0, capacity, false};
  start[0] = 0;
  const int status = Forward<S, P>(a, state).run(unit, nullptr, nullptr, &sink);
  if (status != kDone) return status;
  if (sink.full) return kDeclined;  // a row of NaN
  char* own = static_cast<char*>(std::malloc((rows + 1) * 8 + (sink.used + 16) * 8));
  if (!own) return kNoMemory;
  std::memcpy(own, start, (rows + 1) * 8);
  float* own_u = reinterpret_cast<float*>(own + (rows + 1) * 8);
  int32_t* own_index = reinterpret_cast<int32_t*>(own_u + sink.used + 16);
  std::memcpy(own_u, sink.u, sink.used * 4);
  std::memcpy(own_index, sink.index, sink.used * 4);
  lists->owned = own;
  lists->start = reinterpret_cast<int64_t*>(own);
  lists->u = own_u;
  lists->index = own_index;
  return kDone;
}

// p and the gradient of one row's scores, from u and the products dp = dO . v.
template <class S, class P>
inline void score_gradients(const P& power, const float* u, const float* dp, int64_t n, float scale, float* p, float* ds) {
  using F = typename S::F;
  F weights = S::zero(), weighted = S::zero();
  int64_t j = 0;
  alignas(64) float tail_u[S::W] = {}, tail_dp[S::W] = {};
  for (; j + S::W <= n; j += S::W) {
    const F x = S::load(u + j), s = power.slope(x);
    S::store(p + j, s * x);
    S::store(ds + j, s);
    weights = weights + s;
    weighted = S::fma(s, S::load(dp + j), weighted);
  }
  if (j < n) {  // zeros past the last entry add nothing
    for (int64_t i = j; i < n; ++i) tail_u[i - j] = u[i], tail_dp[i - j] = dp[i];
    const F x = S::load(tail_u), s = power.slope(x);
    S::store(p + j, s * x);
    S::store(ds + j, s);
    weights = weights + s;
    weighted = S::fma(s, S::load(tail_dp), weighted);
  }
  const float mean = S::sum(weighted) / S::sum(weights);
  for (int64_t i = 0; i < n; ++i) ds[i] *= (dp[i] - mean) * scale;
}

template <class S, class P>
int backward_rows(const Attention& a, const AttentionGradients& g, int64_t index, HeadState* state, UnitLists* lists) {
  const int status = gather_unit<S, P>(a, index, state, lists);
  if (status != kDone) return status;
  const Unit unit = unit_at(a, index);
  const int64_t rows = unit.end - unit.begin, used = lists->start[rows];
  lists->p = static_cast<float*>(std::malloc((used + 16) * 2 * sizeof(float)));
  float* dp = static_cast<float*>(room(kValues, padded_keys(a.m) * sizeof(float)));
  if (!lists->p || !dp) return kNoMemory;
  lists->ds = lists->p + used + 16;
  const P power(a.alpha);
  const float *k = a.k + offset(a.k_stride, a, unit.head), *v = a.v + offset(a.v_stride, a, unit.head);
  const float *q = a.q + offset(a.q_stride, a, unit.head), *grad = g.grad + offset(g.grad_stride, a, unit.head);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = lists->start[r], n = lists->start[r + 1] - at, row = unit.begin + r;
    const int32_t* ids = lists->index + at;
    dot_rows<S>(grad + row * g.grad_stride[2], ids, static_cast<int>(n), v, a.v_stride[2], a.e, dp);
    const float scale = row_scale(a, unit.head, row);
    float *p = lists->p + at, *ds = lists->ds + at, *dq = g.dq + (unit.head * a.n + row) * a.d;
    score_gradients<S>(power, lists->u + at, dp, n, g.dscale ? 1 : scale, p, ds);
    mix_rows<S>(ds, ids, static_cast<int>(n), k, a.k_stride[2], a.d, 1, dq);
    if (g.dscale) g.dscale[unit.head * a.n + row] = scale_gradient<S>(q + row * a.q_stride[2], dq, a.d, scale, ds, n);
    if (g.dalpha) g.dalpha[unit.head * a.n + row] = alpha_gradient<S>(lists->u + at, p, dp, n, a.alpha - 1);
  }
  return kDone;
}

// dk and dv of keys [begin, end) of a head.
template <class S>
int backward_keys(const Attention& a, const AttentionGradients& g, int64_t head, int64_t begin, int64_t end,
                  const UnitLists* lists) {
  const int64_t keys = end - begin, units = units_per_head(a.n);
  int64_t* next = static_cast<int64_t*>(room(kOrder, (keys + 2) * sizeof(int64_t)));
  if (!next) return kNoMemory;
  std::memset(next, 0, (keys + 2) * sizeof(int64_t));
  for (int64_t unit = 0; unit < units; ++unit) {
    const UnitLists& l = lists[head * units + unit];
    const int64_t used = l.start[unit_at(a, head * units + unit).end - unit_at(a, head * units + unit).begin];
    for (int64_t j = 0; j < used; ++j) {
      const uint64_t key = static_cast<uint64_t>(l.index[j] - begin);
      if (key < static_cast<uint64_t>(keys)) ++next[key + 2];
    }
  }
  for (int64_t key = 1; key <= keys; ++key) next[key + 1] += next[key];
  const int64_t total = next[keys + 1], space = total + 16;  // next[key + 1]: where the key's entries begin
  float* p = static_cast<float*>(room(kProducts, space * 3 * sizeof(float)));
  if (!p) return kNoMemory;
  float* ds = p + space;
  int32_t* rows = reinterpret_cast<int32_t*>(ds + space);
  for (int64_t unit = 0; unit < units; ++unit) {
    const UnitLists& l = lists[head * units + unit];
    const Unit u = unit_at(a, head * units + unit);
    for (int64_t r = u.begin; r < u.end; ++r)
      for (int64_t j = l.start[r - u.begin]; j < l.start[r - u.begin + 1]; ++j) {
        const uint64_t key = static_cast<uint64_t>(l.index[j] - begin);
        if (key >= static_cast<uint64_t>(keys)) continue;
        const int64_t to = next[key + 1]++;  // ends as where the next key's entries begin
        p[to] = l.p[j];
        ds[to] = l.ds[j];
        rows[to] = static_cast<int32_t>(r);
      }
  }
  const float *q = a.q + offset(a.q_stride, a, head), *grad = g.grad + offset(g.grad_stride, a, head);
  for (int64_t key = 0; key < keys; ++key) {
    const int64_t at = next[key], at_row = head * a.m + begin + key;
    const int n = static_cast<int>(next[key + 1] - at);
    mix_rows<S>(p + at, rows + at, n, grad, g.grad_stride[2], a.e, 1, g.dv + at_row * a.e);
    mix_rows<S>(ds + at, rows + at, n, q, a.q_stride[2], a.d, 1, g.dk + at_row * a.d);
  }
  return kDone;
}

}  // namespace
}  // namespace selectivit
