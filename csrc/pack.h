// Keys laid out for the score tiles: panels of 32 keys, dimension by dimension.
#pragma once
#include <cmath>
#include <cstring>

#include "problem.h"

namespace selectivit {
namespace {

struct KeyNorms {
  float norm, largest;  // greatest Euclidean norm and greatest |entry|; norm is not finite where an entry is not
};

template <class S>
inline float squared_norm(const float* x, int64_t d, float* largest) {
  typename S::F s = S::zero(), t = S::zero();
  for (int64_t i = 0; i < d; i += S::W) {
    const typename S::F v = S::load(x + i);
    s = S::fma(v, v, s);
    t = S::max(t, S::max(v, S::zero() - v));
  }
  const float top = S::top(t);
  if (top > *largest) *largest = top;
  return S::sum(s);
}

template <class S>
inline KeyNorms key_norms(const float* k, int64_t stride, int64_t m, int64_t d) {
  float greatest = 0, largest = 0, check = 0;
  for (int64_t j = 0; j < m; ++j) {
    const float s = squared_norm<S>(k + j * stride, d, &largest);
    check += s * 0;  // NaN as soon as one norm is NaN or infinite
    if (s > greatest) greatest = s;
  }
  return {check == 0 ? std::sqrt(greatest) : NAN, largest};
}

// Keys past the last are zeros; their scores are taken out later.
template <class S>
inline void pack_panels(const float* k, int64_t stride, int64_t m, int64_t d, float* panels) {
  float padded[16 * kMaxWidth];
  for (int64_t j = 0; j < padded_keys(m); j += 16) {
    const float* from = k + j * stride;
    int64_t from_stride = stride;
    if (j + 16 > m) {
      std::memset(padded, 0, sizeof padded);
      for (int64_t r = j; r < m; ++r) std::memcpy(padded + (r - j) * kMaxWidth, k + r * stride, d * sizeof(float));
      from = padded;
      from_stride = kMaxWidth;
    }
    float* to = panels + j / kPanelKeys * kPanelKeys * d + j % kPanelKeys;
    for (int64_t c = 0; c < d; c += 16) S::transpose(from + c, from_stride, to + c * kPanelKeys, kPanelKeys);
  }
}

}  // namespace
}  // namespace selectivit
