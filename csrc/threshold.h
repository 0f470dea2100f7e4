// The threshold of a row: Newton on the norm, first on the lane maxima of 16 rows at once, then on the survivors.
//
// z = eps * score, T = max z + tau, u = (z - T)+. The T of any subset of a row is at most the row's own and Newton rises
// monotonically, so every entry that can matter stays above the T of the lanes.
#pragma once
#include <cmath>

#include "power.h"
#include "problem.h"
#include "scores.h"

namespace selectivit {
namespace {

constexpr float kSlack = 1e-5f;  // the lanes' T may stand this far above the exact one, by rounding

struct LaneThresholds {
  alignas(64) float top[kBlockRows];  // the greatest lane; -inf where the row is masked throughout
  alignas(64) float tau[kBlockRows];  // T - top, from the left
};

template <class S, class P>
inline void lane_thresholds(const P& power, const float* lanes, LaneThresholds* found) {
  using F = typename S::F;
  alignas(64) float turned[kLanes * kBlockRows];
  for (int c = 0; c < kLanes; c += 16) S::transpose(lanes + c, kLanes, turned + c * kBlockRows, kBlockRows);
  for (int r = 0; r < kBlockRows; r += S::W) {
    F top = S::load(turned + r);
    for (int i = 1; i < kLanes; ++i) top = S::max(top, S::load(turned + i * kBlockRows + r));
    S::store(found->top + r, top);
    top = S::max(top, S::set(-3e38f));  // a masked row: -inf minus this stays -inf
    for (int i = 0; i < kLanes; ++i) S::store(turned + i * kBlockRows + r, S::load(turned + i * kBlockRows + r) - top);
    F tau = S::set(-1);
    for (int step = 0; step < 8; ++step) {
      F a = S::zero(), b = S::set(1e-30f);
      for (int i = 0; i < kLanes; ++i) {
        const F u = S::max(S::load(turned + i * kBlockRows + r) - tau, S::zero()), s = power.slope(u);
        a = S::fma(s, u, a);
        b = b + s;
      }
      const F rise = S::max(power.rise(a) / b, S::zero());
      tau = tau + rise;
      if (!(S::top(rise) > 1e-3f)) break;
    }
    S::store(found->tau + r, tau - S::set(kSlack));
  }
}

// Takes the greatest of n values off all of them and returns it; the room behind is written up to a whole vector.
template <class S>
inline float relative_to_top(float* values, int n) {
  for (int i = n; i < n + S::W; ++i) values[i] = kMinusInf;
  typename S::F top = S::load(values);
  for (int j = S::W; j < n; j += S::W) top = S::max(top, S::load(values + j));
  const float greatest = S::top(top);
  for (int j = 0; j < n; j += S::W) S::store(values + j, S::load(values + j) - S::set(greatest));
  return greatest;
}

// T of n entries of z; the room behind them is written up to a whole vector.
template <class S, class P>
inline float newton(const P& power, float* values, int n, float threshold) {
  using F = typename S::F;
  for (int i = n; i < n + S::W; ++i) values[i] = kMinusInf;
  for (int step = 0; step < 40; ++step) {
    F a = S::zero(), b = S::zero();
    const F t = S::set(threshold);
    for (int j = 0; j < n; j += S::W) {
      const F u = S::max(S::load(values + j) - t, S::zero()), s = power.slope(u);
      a = S::fma(s, u, a);
      b = b + s;
    }
    const float total = S::sum(a), rise = power.rise(total) / S::sum(b);
    if (rise > 0) threshold += rise;
    if (total <= 1 + 1e-4f) break;  // what is left after this step is the square of what it mends
  }
  return threshold;
}

// Leaves p = u^(1/eps) (and u itself, where asked) for the entries above T, in place; returns how many. `sum` is that
// of p.
template <class S, class P>
inline int probabilities(const P& power, float* values, int32_t* indices, int n, float threshold, float* u_out, float* sum) {
  using F = typename S::F;
  const F t = S::set(threshold);
  int kept = 0;
  for (int j = 0; j < n; j += S::W) {
    const F u = S::load(values + j) - t;
    kept = S::keep_positive(u, u, indices + j, values, indices, kept);
  }
  for (int j = kept; j < kept + S::W; ++j) values[j] = 0;
  F total = S::zero();
  for (int j = 0; j < kept; j += S::W) {
    const F u = S::load(values + j), p = power.slope(u) * u;
    if (u_out) S::store(u_out + j, u);
    S::store(values + j, p);
    total = total + p;
  }
  *sum = S::sum(total);
  return kept;
}

}  // namespace
}  // namespace selectivit
