// Scores of a block of query rows against all keys of a head, in float32, with the running lane maxima.
#pragma once
#include "pack.h"

namespace selectivit {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// A tile: some rows against some vectors of keys in registers over the whole head width.
template <class S>
inline void score_tile(const float* q, const float* panel, int64_t d, float* strip, int64_t width, float* lanes) {
  typename S::F acc[S::kTileRows][S::kTileVectors];
#pragma GCC unroll 8
  for (int a = 0; a < S::kTileRows; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < S::kTileVectors; ++c) acc[a][c] = S::zero();
  for (int64_t i = 0; i < d; ++i) {
    typename S::F key[S::kTileVectors];
#pragma GCC unroll 4
    for (int c = 0; c < S::kTileVectors; ++c) key[c] = S::load(panel + i * kPanelKeys + c * S::W);
#pragma GCC unroll 8
    for (int a = 0; a < S::kTileRows; ++a) {
      const typename S::F x = S::set(q[a * kMaxWidth + i]);
#pragma GCC unroll 4
      for (int c = 0; c < S::kTileVectors; ++c) acc[a][c] = S::fma(x, key[c], acc[a][c]);
    }
  }
#pragma GCC unroll 8
  for (int a = 0; a < S::kTileRows; ++a)
#pragma GCC unroll 4
    for (int c = 0; c < S::kTileVectors; ++c) {
      S::store(strip + a * width + c * S::W, acc[a][c]);
      float* lane = lanes + a * kLanes + c * S::W;
      S::store(lane, S::max(S::load(lane), acc[a][c]));
    }
}

// q: (16, kMaxWidth) rows already multiplied by scale and eps. strip: (16, width). lanes: (16, 32).
template <class S>
inline void score_block(const float* q, const float* panels, int64_t m, int64_t d, float* strip, float* lanes) {
  const int64_t padded = padded_keys(m), width = strip_width(m);
  for (int i = 0; i < kBlockRows * kLanes; ++i) lanes[i] = kMinusInf;
  float last[kBlockRows * kLanes];
  for (int64_t j = 0; j < padded; j += kPanelKeys) {
    if (j + kPanelKeys > m) std::memcpy(last, lanes, sizeof last);
    for (int a = 0; a < kBlockRows; a += S::kTileRows)
      for (int c = 0; c < kPanelKeys; c += S::kTileVectors * S::W)
        score_tile<S>(q + a * kMaxWidth, panels + j * d + c, d, strip + a * width + j + c, width, lanes + a * kLanes + c);
  }
  if (m == padded) return;
  const int64_t j = padded - kPanelKeys;  // the last panel anew: its padding must count for nothing
  for (int a = 0; a < kBlockRows; ++a) {
    float* row = strip + a * width;
    for (int64_t x = m; x < padded; ++x) row[x] = kMinusInf;
    for (int x = 0; x < kPanelKeys; ++x) {
      const float before = last[a * kLanes + x];
      lanes[a * kLanes + x] = row[j + x] > before ? row[j + x] : before;
    }
  }
}

// Applies the mask to the strip; lanes anew. Returns whether a NaN or +inf came in with an additive mask.
template <class S>
inline bool mask_row(const Attention& a, int64_t head, int64_t row, float* strip, float eps, float* lanes) {
  const int64_t at = offset(a.mask_stride, a, head) + row * a.mask_stride[2], step = a.mask_stride[3];
  float bad = 0;
  if (a.mask_kind == kBoolMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + at;
    for (int64_t j = 0; j < a.m; ++j) strip[j] = mask[j * step] ? strip[j] : kMinusInf;
  } else {
    const float* mask = static_cast<const float*>(a.mask) + at;
    for (int64_t j = 0; j < a.m; ++j) {
      strip[j] += mask[j * step] * eps;
      bad += strip[j] < __builtin_inff() ? 0.0f : 1.0f;
    }
  }
  for (int i = 0; i < kLanes; i += S::W) {
    typename S::F x = S::set(kMinusInf);
    for (int64_t j = i; j < padded_keys(a.m); j += kLanes) x = S::max(x, S::load(strip + j));
    S::store(lanes + i, x);
  }
  return bad > 0;
}

}  // namespace
}  // namespace selectivit
