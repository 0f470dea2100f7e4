// u^(1/eps) and u^(1/eps - 1) for the alphas that matter: eps = alpha - 1.
#pragma once
#include <cmath>

namespace selectivit {
namespace {

template <class S>
struct Square {  // alpha = 1.5
  static constexpr bool kSquare = true;
  explicit Square(float) {}
  typename S::F slope(typename S::F u) const { return u; }
  // A - A^(1 - eps), the rise of Newton's step on the norm; and A^(-eps).
  typename S::F rise(typename S::F a) const { return a - S::sqrt(a); }
  float rise(float a) const { return a - std::sqrt(a); }
  float inverse_norm(float a) const { return 1 / std::sqrt(a); }
};

template <class S>
struct Whole {  // 1/eps a small integer: alpha = 2, 1.333.., 1.25, 1.2, ...
  static constexpr bool kSquare = false;
  int power;
  float eps;
  explicit Whole(float alpha) : power(static_cast<int>(std::lround(1 / (alpha - 1)))), eps(1.0f / power) {}
  typename S::F slope(typename S::F u) const {
    if (power == 1) return S::where_positive(u, S::set(1));
    const typename S::F u2 = u * u, u4 = u2 * u2;
    const int e = power - 1;  // up to 9
    typename S::F x = e & 1 ? u : S::set(1);
    if (e & 2) x = x * u2;
    if (e & 4) x = x * u4;
    if (e & 8) x = x * (u4 * u4);
    return x;
  }
  typename S::F rise(typename S::F a) const;
  float rise(float a) const { return S::top(rise(S::set(a))); }
  float inverse_norm(float a) const { return std::pow(a, -eps); }
};

// log2 of positive floats: 2 atanh(t) / ln 2 around the nearest power of two; relative error about 1e-7.
template <class S>
inline typename S::F log2(typename S::F x) {
  const typename S::F m = S::mantissa(x), t = (m - S::set(1)) / (m + S::set(1)), t2 = t * t;
  typename S::F p = S::set(0.3205988979f);
  p = S::fma(p, t2, S::set(0.4121985831f));
  p = S::fma(p, t2, S::set(0.5770780164f));
  p = S::fma(p, t2, S::set(0.9617966939f));
  p = S::fma(p, t2, S::set(2.8853900818f));
  return S::fma(p, t, S::exponent(x));
}

template <class S>
inline typename S::F exp2(typename S::F x) {
  x = S::max(x, S::set(-126));
  const typename S::F n = S::round(x), f = x - n;
  typename S::F p = S::set(1.5403530e-4f);
  p = S::fma(p, f, S::set(1.3333558e-3f));
  p = S::fma(p, f, S::set(9.6181291e-3f));
  p = S::fma(p, f, S::set(5.5504109e-2f));
  p = S::fma(p, f, S::set(2.4022651e-1f));
  p = S::fma(p, f, S::set(6.9314718e-1f));
  p = S::fma(p, f, S::set(1));
  return S::times_power_of_two(p, n);
}

template <class S>
inline typename S::F raise(typename S::F u, float exponent) {
  const typename S::F safe = S::max(u, S::set(1e-30f));
  return S::where_positive(u, exp2<S>(log2<S>(safe) * S::set(exponent)));
}

template <class S>
inline typename S::F Whole<S>::rise(typename S::F a) const {
  return a - a * raise<S>(a, -eps);
}

template <class S>
struct Real {  // any other alpha in [1.05, 2]
  static constexpr bool kSquare = false;
  float eps;
  explicit Real(float alpha) : eps(alpha - 1) {}
  typename S::F slope(typename S::F u) const { return raise<S>(u, (1 - eps) / eps); }
  typename S::F rise(typename S::F a) const { return a - a * raise<S>(a, -eps); }
  float rise(float a) const { return S::top(rise(S::set(a))); }
  float inverse_norm(float a) const { return std::pow(a, -eps); }
};

}  // namespace
}  // namespace selectivit
