// The screen: scores in 16-bit integers with exact 32-bit sums, twice the rate of float32, and a rigorous bound.
//
// A vector x is kept as round(s x) with s chosen so that |round(s x)| stays below 2^15.5 in norm: by Cauchy and Schwarz
// no partial sum of a product of two of them leaves 32 bits. Rounding errors are at most sqrt(d)/2/s in norm, so
//     |q.k - screen(q.k)| <= |dq| |k| + |q^| |dk|,
// some 1e-4 of |q| |k|: forty times closer than bfloat16 at the same rate. Survivors are computed anew in float32.
#pragma once
#include "scores.h"
#include "screen_pairs.h"

namespace selectivit {
namespace {

using ScreenScore = int32_t;

constexpr float kLargestNorm = 46000;  // squared, with the rounding of 256 entries, still below 2^31

struct ScreenKeys {
  float scale;      // of the stored integers
  float norm;       // greatest norm of a key
  float rounding;   // greatest norm of a key's rounding error
};

inline float integer_scale(float norm, float largest) {
  const float a = kLargestNorm / norm, b = 32700 / largest, s = a < b ? a : b;
  return s < 1e30f ? s : 1e30f;
}
inline float rounding_norm(int64_t d, float scale) { return 0.5001f * std::sqrt(static_cast<float>(d)) / scale; }

// In place: the compiler copies the sum before and after the intrinsic of the same name.
inline void add_products(__m512i* sum, __m512i x, __m512i y) {
  asm("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(y));
}

inline void quantize(const float* x, int64_t d, float scale, int16_t* to) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < d; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), s))));
}

inline ScreenKeys pack_screen(const float* k, int64_t stride, int64_t m, int64_t d, KeyNorms norms, int32_t* panels) {
  const float scale = integer_scale(norms.norm, norms.largest);
  pack_pairs<Simd>(k, stride, m, d, panels, [&](const float* key, int16_t* to) { quantize(key, d, scale, to); });
  return {scale, norms.norm, rounding_norm(d, scale)};
}

struct ScreenRows {
  alignas(64) int32_t pairs[kBlockRows * kMaxWidth / 2];
  float unit[kBlockRows];   // float score = integer * unit
  float bound[kBlockRows];  // on the error, in the units of z
};

inline void quantize_queries(const float* q, int64_t d, const ScreenKeys& keys, ScreenRows* rows) {
  for (int a = 0; a < kBlockRows; ++a) {
    float largest = 0;
    const float norm = std::sqrt(squared_norm<Simd>(q + a * kMaxWidth, d, &largest));
    const float scale = integer_scale(norm, largest), off = rounding_norm(d, scale);
    quantize(q + a * kMaxWidth, d, scale, reinterpret_cast<int16_t*>(rows->pairs + a * kMaxWidth / 2));
    rows->unit[a] = 1 / (scale * keys.scale);
    // the last term covers the rounding of float32's own sums
    rows->bound[a] = off * keys.norm + (norm + off) * keys.rounding + norm * keys.norm * 4e-6f;
  }
}

template <bool kLast>
inline void screen_tile(const int32_t* q, const int32_t* panel, int64_t pairs, int32_t* strip, int64_t width,
                        int32_t* lanes, int64_t left) {
  __m512i acc[8][2];
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a) acc[a][0] = acc[a][1] = _mm512_setzero_si512();
  for (int64_t i = 0; i < pairs; ++i) {
    const __m512i k0 = _mm512_loadu_si512(panel + i * kPanelKeys), k1 = _mm512_loadu_si512(panel + i * kPanelKeys + 16);
#pragma GCC unroll 8
    for (int a = 0; a < 8; ++a) {
      const __m512i x = _mm512_set1_epi32(q[a * kMaxWidth / 2 + i]);
      add_products(&acc[a][0], x, k0);
      add_products(&acc[a][1], x, k1);
    }
  }
  const uint32_t keep = kLast ? static_cast<uint32_t>((1ull << left) - 1) : ~0u;
  const __m512i lowest = _mm512_set1_epi32(INT32_MIN);
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m512i x = kLast ? _mm512_mask_mov_epi32(lowest, static_cast<__mmask16>(keep >> (16 * c)), acc[a][c]) : acc[a][c];
      _mm512_storeu_si512(strip + a * width + c * 16, x);
      int32_t* lane = lanes + a * kLanes + c * 16;
      _mm512_storeu_si512(lane, _mm512_max_epi32(_mm512_loadu_si512(lane), x));
    }
}

// Integer scores of a block, and lane maxima in the units of z.
inline void screen_block(const ScreenRows& rows, const int32_t* panels, int64_t m, int64_t d, int32_t* strip, float* lanes) {
  alignas(64) int32_t most[kBlockRows * kLanes];
  for (int i = 0; i < kBlockRows * kLanes; ++i) most[i] = INT32_MIN;
  const int64_t width = strip_width(m), whole = m / kPanelKeys * kPanelKeys, stored = screen_width(d) / 2;
  for (int64_t j = 0; j < whole; j += kPanelKeys)
    for (int a = 0; a < kBlockRows; a += 8)
      screen_tile<false>(rows.pairs + a * kMaxWidth / 2, panels + j * stored, d / 2, strip + a * width + j, width,
                         most + a * kLanes, 0);
  if (whole < m)
    for (int a = 0; a < kBlockRows; a += 8)
      screen_tile<true>(rows.pairs + a * kMaxWidth / 2, panels + whole * stored, d / 2, strip + a * width + whole, width,
                        most + a * kLanes, m - whole);
  for (int a = 0; a < kBlockRows; ++a)
    for (int i = 0; i < kLanes; ++i)
      lanes[a * kLanes + i] = most[a * kLanes + i] == INT32_MIN ? kMinusInf : most[a * kLanes + i] * rows.unit[a];
}

// Indices of the keys of row a whose score may exceed `threshold`.
inline int screen_survivors(const ScreenRows& rows, int a, const int32_t* strip, int64_t m, float threshold,
                            int32_t* indices) {
  const float scaled = threshold / rows.unit[a];
  const int32_t t = scaled <= -2147483000.0f ? INT32_MIN + 1 : static_cast<int32_t>(std::floor(scaled)) - 1;
  const __m512i least = _mm512_set1_epi32(t);
  const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int n = 0;
  for (int64_t j = 0; j < padded_keys(m); j += 16) {
    const __mmask16 g = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(strip + j), least);
    if (!g) continue;
    _mm512_storeu_si512(indices + n, _mm512_maskz_compress_epi32(g, _mm512_add_epi32(step, _mm512_set1_epi32(static_cast<int>(j)))));
    n += __builtin_popcount(g);
  }
  return n;
}

}  // namespace
}  // namespace selectivit
