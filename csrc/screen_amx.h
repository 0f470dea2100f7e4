// The screen on AMX tiles: scores of 16 queries and 16 keys at a time in bfloat16 with float32 sums, and a rigorous
// bound. Survivors are computed anew in float32.
//
// Let q^ and k^ be q and k rounded to bfloat16, dq = q - q^, dk = k - k^ (both exact in float32). Then
//     q.k - q^.k^ = dq.k + q^.dk,   so   |q.k - q^.k^| <= |dq| |k| + |q^| |dk|,
// with the norms of the rounding errors as they are: a third of what 2^-8 |q| |k| would allow. Numbers below 2^-126,
// which the unit reads as zero, are packed as zero and so are part of dq and dk. The products of bfloat16 are exact in
// float32; whatever the order in which the unit adds them, a product passes through fewer than n = width + 24 roundings,
// each of at most 2^-24, which gives n 2^-24 |q^| |k^| (Cauchy and Schwarz; 6e-8 stands for 2^-24 and its second
// order), and a sum that is flushed to zero loses at most 2^-126, fewer than 2n times: 1e-35. The norms are computed in
// float32: kRounding covers their sums, kUnderflow the squares that vanish (256 of at most 2^-126).
//
// Eight bits would go at twice the rate, but their bound is four times as wide: on DINOv2-small's layer 6 at
// N = 257, 1370, 4097 exact scores leave 4.4, 1.5, 1.0 % of the keys, bfloat16 5.0, 1.9, 1.4 %, int8 with a scale per
// vector 7.6, 3.6, 2.9 %. A bound per panel of keys, or keys less their mean, gains bfloat16 less than a tenth of this.
#pragma once
#include <immintrin.h>

#include "scores.h"
#include "screen_pairs.h"
#include "tiles_amx.h"

namespace selectivit {
namespace {

using ScreenScore = float;

constexpr int kTileKeys = 16, kTileWidth = 32;  // of the unit: keys, and bfloat16 of a row
constexpr float kRounding = 1.00001f, kUnderflow = 2e-18f;

struct ScreenKeys {
  float norm;      // greatest norm of a key
  float rounding;  // greatest norm of a key's rounding error
};

// To the nearest bfloat16, ties to even, denormals to zero. Returns the squared norm of the rounding errors.
inline float round_to_bfloat16(const float* x, int64_t d, int16_t* to) {
  const __m512i tie = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1), high = _mm512_set1_epi32(~0xffff);
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < d; i += 16) {
    const __m512 value = _mm512_loadu_ps(x + i);
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i near = _mm512_maskz_and_epi32(normal, _mm512_add_epi32(_mm512_add_epi32(bits, tie), last), high);
    const __m512 off = _mm512_sub_ps(value, _mm512_castsi512_ps(near));
    squares = _mm512_fmadd_ps(off, off, squares);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
  }
  return _mm512_reduce_add_ps(squares);
}

inline float norm_at_most(float square) { return std::sqrt(square) * kRounding + kUnderflow; }

inline ScreenKeys pack_screen(const float* k, int64_t stride, int64_t m, int64_t d, KeyNorms norms, int32_t* panels) {
  float greatest = 0;
  pack_pairs<Simd>(k, stride, m, d, panels, [&](const float* key, int16_t* to) {
    const float square = round_to_bfloat16(key, d, to);
    if (square > greatest) greatest = square;
  });
  return {norms.norm * kRounding + kUnderflow, norm_at_most(greatest)};
}

struct ScreenRows {
  alignas(64) int16_t tiles[kBlockRows * kMaxWidth];  // 16 x 32 after 16 x 32
  float bound[kBlockRows];                            // on the error, in the units of z
};

inline void quantize_queries(const float* q, int64_t d, const ScreenKeys& keys, ScreenRows* rows) {
  const int64_t width = screen_width(d);
  alignas(64) int16_t row[kMaxWidth];
  for (int a = 0; a < kBlockRows; ++a) {
    float largest = 0;
    const float norm = norm_at_most(squared_norm<Simd>(q + a * kMaxWidth, d, &largest));
    std::memset(row, 0, sizeof row);
    const float off = norm_at_most(round_to_bfloat16(q + a * kMaxWidth, d, row)), rounded = norm + off;
    for (int64_t c = 0; c < width; c += kTileWidth)
      std::memcpy(rows->tiles + c * kBlockRows + a * kTileWidth, row + c, kTileWidth * sizeof(int16_t));
    const float sums = static_cast<float>(width + 24) * 6e-8f * rounded * (keys.norm + keys.rounding);
    // the last but one covers the rounding of float32's own sums
    rows->bound[a] = off * keys.norm + rounded * keys.rounding + sums + norm * keys.norm * 4e-6f + 1e-35f;
  }
}

// Scores of a panel of 32 keys: tiles lo and hi sum up, so that two panels in turn do not wait for each other.
template <int lo, int hi>
inline void screen_panel(const ScreenRows& rows, const int32_t* panel, int64_t width, float* strip, int64_t strip_width) {
  tile_zero<lo>();
  tile_zero<hi>();
  for (int64_t c = 0; c < width; c += kTileWidth) {
    const int32_t* keys = panel + c / 2 * kPanelKeys;
    tile_load<0>(rows.tiles + c * kBlockRows, kTileWidth * sizeof(int16_t));
    tile_load<1>(keys, kPanelKeys * sizeof(int32_t));
    tile_load<2>(keys + kTileKeys, kPanelKeys * sizeof(int32_t));
    tile_dot<lo, 0, 1>();
    tile_dot<hi, 0, 2>();
  }
  tile_store<lo>(strip, strip_width * sizeof(float));
  tile_store<hi>(strip + kTileKeys, strip_width * sizeof(float));
}

inline void raise_lanes(const float* strip, int64_t width, float* lanes) {
  for (int a = 0; a < kBlockRows; ++a)
    for (int c = 0; c < kLanes; c += Simd::W) {
      float* lane = lanes + a * kLanes + c;
      Simd::store(lane, Simd::max(Simd::load(lane), Simd::load(strip + a * width + c)));
    }
}

// Scores of a block, and lane maxima, a panel behind: what a tile has just stored is slow to read.
inline void screen_block(const ScreenRows& rows, const int32_t* panels, int64_t m, int64_t d, float* strip, float* lanes) {
  const int64_t padded = padded_keys(m), distance = strip_width(m), width = screen_width(d);
  for (int i = 0; i < kBlockRows * kLanes; ++i) lanes[i] = kMinusInf;
  for (int64_t j = 0; j < padded; j += kPanelKeys) {
    const int32_t* panel = panels + j * width / 2;
    if (j / kPanelKeys % 2) screen_panel<4, 5>(rows, panel, width, strip + j, distance);
    else screen_panel<6, 7>(rows, panel, width, strip + j, distance);
    if (j) raise_lanes(strip + j - kPanelKeys, distance, lanes);
  }
  for (int a = 0; a < kBlockRows; ++a)
    for (int64_t x = m; x < padded; ++x) strip[a * distance + x] = kMinusInf;
  raise_lanes(strip + padded - kPanelKeys, distance, lanes);
}

// Indices of the keys of row a whose score may exceed `threshold`.
inline int screen_survivors(const ScreenRows&, int, const float* strip, int64_t m, float threshold, int32_t* indices) {
  const __m512 least = _mm512_set1_ps(threshold);
  const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int n = 0;
  for (int64_t j = 0; j < padded_keys(m); j += 16) {
    const __mmask16 g = _mm512_cmp_ps_mask(_mm512_loadu_ps(strip + j), least, _CMP_GT_OQ);
    if (!g) continue;
    const __m512i id = _mm512_add_epi32(step, _mm512_set1_epi32(static_cast<int>(j)));
    _mm512_storeu_si512(indices + n, _mm512_maskz_compress_epi32(g, id));
    n += __builtin_popcount(g);
  }
  return n;
}

}  // namespace
}  // namespace selectivit
