// entmax of rows of scores that someone already has: one pass for the lane maxima, one for the survivors, one write.
#pragma once
#include "scratch.h"
#include "threshold.h"

namespace selectivit {
namespace {

// Lane maxima of one row; returns NaN where the row holds NaN or +inf, else its maximum.
template <class S>
inline float row_lanes(const float* x, int64_t n, float* lanes) {
  using F = typename S::F;
  constexpr int kVectors = kLanes / S::W;
  F top[kVectors], check = S::zero();
  for (int c = 0; c < kVectors; ++c) top[c] = S::set(kMinusInf);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes)
    for (int c = 0; c < kVectors; ++c) {
      const F v = S::load(x + j + c * S::W);
      check = check + S::max(S::zero(), v) * S::zero();  // the second operand's NaN passes through max
      top[c] = S::max(top[c], v);
    }
  for (int c = 0; c < kVectors; ++c) S::store(lanes + c * S::W, top[c]);
  float bad = S::sum(check), most = kMinusInf;
  for (int64_t i = j; i < n; ++i) {
    bad += x[i] < __builtin_inff() ? 0.0f : NAN;
    if (x[i] > lanes[i - j]) lanes[i - j] = x[i];
  }
  for (int i = 0; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return bad == 0 ? most : NAN;
}

// tau of one row's lane maxima, from the left.
template <class S, class P>
inline float lanes_tau(const P& power, const float* lanes, float top, float eps) {
  alignas(64) float z[kLanes + 16];
  for (int i = 0; i < kLanes; ++i) z[i] = (lanes[i] - top) * eps;
  return newton<S>(power, z, kLanes, -1) - kSlack;
}

template <class S, class P>
int entmax_rows(const Rows& a, int64_t begin, int64_t end) {
  using F = typename S::F;
  const P power(a.alpha);
  const float eps = a.alpha - 1;
  float* values = static_cast<float*>(room(kValues, (a.n + kLanes) * sizeof(float)));
  int32_t* indices = static_cast<int32_t*>(room(kIndices, (a.n + kLanes) * sizeof(int32_t)));
  if (!values || !indices) return 2;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.scores + row * a.stride;
    float* p = a.p + row * a.n;
    alignas(64) float lanes[kLanes];
    const float top = row_lanes<S>(x, a.n, lanes);
    if (!(top > kMinusInf)) {
      for (int64_t j = 0; j < a.n; ++j) p[j] = top == kMinusInf ? 0.0f : NAN;
      a.tau_out[row] = top == kMinusInf ? 0.0f : NAN;
      continue;
    }
    const float tau = a.n > 4 * kLanes ? lanes_tau<S>(power, lanes, top, eps) : -1.0f;
    const F least = S::set(tau), most = S::set(top), factor = S::set(eps);
    int n = 0;
    int64_t j = 0;
    for (; j + S::W <= a.n; j += S::W)
      n = S::keep_above((S::load(x + j) - most) * factor, least, static_cast<int32_t>(j), values, indices, n);
    for (; j < a.n; ++j) {
      values[n] = (x[j] - top) * eps;
      indices[n] = static_cast<int32_t>(j);
      n += values[n] > tau;
    }
    const float threshold = newton<S>(power, values, n, tau);
    float sum;
    const int kept = probabilities<S>(power, values, indices, n, threshold, nullptr, &sum);
    std::memset(p, 0, a.n * sizeof(float));
    for (int i = 0; i < kept; ++i) p[indices[i]] = values[i] / sum;
    a.tau_out[row] = threshold;
  }
  return 0;
}

}  // namespace
}  // namespace selectivit
