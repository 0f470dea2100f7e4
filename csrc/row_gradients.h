// What a row adds to the gradients of its alpha and of its scale.
#pragma once
#include "power.h"
#include "values.h"

namespace selectivit {
namespace {

// Over the entries of one row: sums of d p y, p y, d p f and p f, with y = -ln u and f = e^y - 1 - y = 1/u - 1 - y.
template <class S>
struct AlphaSums {
  using F = typename S::F;
  F py = S::zero(), dpy = S::zero(), pf = S::zero(), dpf = S::zero();

  void add(F u, F p, F d) {
    u = S::max(u, S::set(1e-30f));
    const F y = log2<S>(u) * S::set(-0.69314718056f);
    F near = S::fma(S::set(1.0f / 5040), y, S::set(1.0f / 720));
    near = S::fma(near, y, S::set(1.0f / 120));
    near = S::fma(near, y, S::set(1.0f / 24));
    near = S::fma(near, y, S::set(1.0f / 6));
    near = S::fma(near, y, S::set(0.5f));
    near = near * y * y;
    const F far = S::set(1) / u - S::set(1) - y;  // cancels near u = 1, where the series stands
    const F f = far + S::where_positive(S::set(0.3f) - y, near - far);
    py = S::fma(p, y, py);
    dpy = S::fma(d, p * y, dpy);
    pf = S::fma(p, f, pf);
    dpf = S::fma(d, p * f, dpf);
  }
};

// The sum of dp_j * dp_j/dalpha. With l = ln p, y = -eps l = -ln u, psi = l^2 (e^y - 1 - y) / y^2 and H = -sum p l, the
// closed form (p / Z)(Psi - psi - eps (Psi l + psi H)) of ops/derivatives.py comes to four sums over the survivors.
// Since sum dp/dalpha = 0, dp counts from its mean under p, which leaves least to cancel.
template <class S>
inline float alpha_gradient(const float* u, const float* p, const float* dp, int64_t n, float eps) {
  if (n == 0) return 0;
  double total = 0, weighted = 0;
  for (int64_t j = 0; j < n; ++j) {
    total += p[j];
    weighted += p[j] * dp[j];
  }
  const float mean = static_cast<float>(weighted / total);
  AlphaSums<S> sums;
  const typename S::F from = S::set(mean);
  int64_t j = 0;
  for (; j + S::W <= n; j += S::W) sums.add(S::load(u + j), S::load(p + j), S::load(dp + j) - from);
  if (j < n) {
    alignas(64) float tail_u[S::W], tail_p[S::W], tail_dp[S::W];
    for (int i = 0; i < S::W; ++i) {
      const bool inside = j + i < n;
      tail_u[i] = inside ? u[j + i] : 1;  // u = 1 with p = 0 adds nothing
      tail_p[i] = inside ? p[j + i] : 0;
      tail_dp[i] = inside ? dp[j + i] : mean;
    }
    sums.add(S::load(tail_u), S::load(tail_p), S::load(tail_dp) - from);
  }
  const float py = S::sum(sums.py), pf = S::sum(sums.pf);
  return (pf * S::sum(sums.dpy) - S::sum(sums.dpf) * (1 + py)) / (eps * eps * (1 + py + pf));
}

// q . dq, both still without the scale, which is then put into dq and ds: no division, since a scale may be 0.
template <class S>
inline float scale_gradient(const float* q, float* dq, int64_t width, float scale, float* ds, int64_t n) {
  typename S::F product = S::zero();
  for (int64_t c = 0; c < width; c += S::W) {
    const typename S::F x = S::load(dq + c);
    product = S::fma(S::load(q + c), x, product);
    S::store(dq + c, x * S::set(scale));
  }
  for (int64_t i = 0; i < n; ++i) ds[i] *= scale;
  return S::sum(product);
}

}  // namespace
}  // namespace selectivit
