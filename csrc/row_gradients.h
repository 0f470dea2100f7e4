// What a row adds to the gradients of its alpha and of its scale.
#pragma once
#include "power.h"
#include "problem.h"

namespace selectivit {
namespace {

// y = -ln u and f = e^y - 1 - y = 1/u - 1 - y.
template <class S>
struct AlphaTerms {
  using F = typename S::F;
  F y, f;

  explicit AlphaTerms(F u) {
    u = S::max(u, S::set(1e-30f));
    y = log2<S>(u) * S::set(-0.69314718056f);
    F near = S::fma(S::set(1.0f / 5040), y, S::set(1.0f / 720));
    near = S::fma(near, y, S::set(1.0f / 120));
    near = S::fma(near, y, S::set(1.0f / 24));
    near = S::fma(near, y, S::set(1.0f / 6));
    near = S::fma(near, y, S::set(0.5f));
    near = near * y * y;
    const F far = S::set(1) / u - S::set(1) - y;  // cancels near u = 1, where the series stands
    f = far + S::where_positive(S::set(0.3f) - y, near - far);
  }
};

// Over the entries of one row: sums of p y, p f, and of d p y, d p f. Since sum d p = 0, the latter two count y and f from
// those of a mean u: in a row that is all but uniform they would be lost in what cancels.
template <class S>
struct AlphaSums {
  using F = typename S::F;
  const AlphaTerms<S> middle;
  F py = S::zero(), dpy = S::zero(), pf = S::zero(), dpf = S::zero();

  explicit AlphaSums(F mean) : middle(mean) {}

  void add(F u, F p, F d) {
    const AlphaTerms<S> at(u);
    py = S::fma(p, at.y, py);
    dpy = S::fma(d, p * (at.y - middle.y), dpy);
    pf = S::fma(p, at.f, pf);
    dpf = S::fma(d, p * (at.f - middle.f), dpf);
  }
};

// Per row the sum of dp_j * dp_j/dalpha, for 16 rows and n keys; slopes hold p / u. With l = ln p, y = -eps l = -ln u,
// psi = l^2 (e^y - 1 - y) / y^2 and H = -sum p l, the closed form (p / Z)(Psi - psi - eps (Psi l + psi H)) of
// ops/derivatives.py comes to four sums over the survivors. Since sum dp/dalpha = 0, dp counts from its mean under p,
// which leaves least to cancel.
template <class S>
inline void alpha_gradients(int64_t n, const float* slopes, const float* p, const float* dp, float eps, float* to) {
  using F = typename S::F;
  for (int c = 0; c < kBlockRows; c += S::W) {
    F total = S::zero(), weighted = S::zero(), weights = S::zero();
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) {
      const F x = S::load(p + j);
      total = total + x;
      weights = weights + S::load(slopes + j);
      weighted = S::fma(x, S::where_positive(x, S::load(dp + j)), weighted);
    }
    const F mean = S::where_positive(total, weighted / total);
    AlphaSums<S> sums(S::where_positive(weights, total / weights));
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) {
      const F x = S::load(p + j), s = S::load(slopes + j);
      sums.add(S::where_positive(s, x / s), x, S::where_positive(x, S::load(dp + j) - mean));
    }
    const F one = S::set(1), z = (one + sums.py + sums.pf) * S::set(eps * eps);
    S::store(to + c, (sums.pf * sums.dpy - sums.dpf * (one + sums.py)) / z);
  }
}

// q . dq, still without the scale, which is then put into dq: no division, since a scale may be 0.
template <class S>
inline float scale_gradient(const float* q, float* dq, int64_t width, float scale) {
  typename S::F product = S::zero();
  for (int64_t c = 0; c < width; c += S::W) {
    const typename S::F x = S::load(dq + c);
    product = S::fma(S::load(q + c), x, product);
    S::store(dq + c, x * S::set(scale));
  }
  return S::sum(product);
}

// 16 rows' scales, put into the gradients of their scores.
template <class S>
inline void scale_tile(float* ds, int64_t n, const float* scales) {
  for (int c = 0; c < kBlockRows; c += S::W)
    for (int64_t j = c; j < n * kBlockRows; j += kBlockRows) S::store(ds + j, S::load(ds + j) * S::load(scales + c));
}

}  // namespace
}  // namespace selectivit
