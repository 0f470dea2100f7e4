// Sixteen floats at a time, AVX-512 with VNNI: the screen multiplies 16-bit integers, 32 products an instruction.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace selectivit {
namespace {

struct Simd {
  static constexpr int W = 16;
  static constexpr int kTileRows = 8;     // of the float32 score tile, with kTileVectors vectors of keys
  static constexpr int kTileVectors = 2;
  static constexpr bool kScreen = true;
  using F = __m512;
  using I = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }
  static float top(F a) { return _mm512_reduce_max_ps(a); }
  static F where_positive(F x, F a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_GT_OQ), a); }
  static int count_positive(F x) { return __builtin_popcount(_mm512_cmp_ps_mask(x, zero(), _CMP_GT_OQ)); }
  static I shifted(F x) {  // moves the boundary between exponents from 1 to 0.75
    return _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x3f400000));
  }
  static F mantissa(F x) {
    const I e = _mm512_and_si512(shifted(x), _mm512_set1_epi32(static_cast<int>(0xff800000)));
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(x), e));
  }
  static F exponent(F x) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(shifted(x), 23)); }
  static F round(F x) { return _mm512_roundscale_ps(x, 8); }
  static F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }

  // Appends the entries of x above t, with their indices base, base + 1, ... Writes a whole vector: compressing
  // straight to memory is slow.
  static int keep_above(F x, F t, int32_t base, float* values, int32_t* indices, int n) {
    const __mmask16 g = _mm512_cmp_ps_mask(x, t, _CMP_GT_OQ);
    if (!g) return n;
    const I id = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                  _mm512_set1_epi32(base));
    _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(g, x));
    _mm512_storeu_si512(indices + n, _mm512_maskz_compress_epi32(g, id));
    return n + __builtin_popcount(g);
  }
  // Keeps (x, index) where u > 0: the last compaction, in place (n never passes j).
  static int keep_positive(F u, F x, const int32_t* from, float* values, int32_t* indices, int n) {
    const __mmask16 g = _mm512_cmp_ps_mask(u, zero(), _CMP_GT_OQ);
    const I id = _mm512_loadu_si512(from);
    _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(g, x));
    _mm512_storeu_si512(indices + n, _mm512_maskz_compress_epi32(g, id));
    return n + __builtin_popcount(g);
  }
  // out[i][j] = in[j][i] for a 16 x 16 block.
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    F r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = load(in + i * in_stride);
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {  // r[4i + c]: column c of each 128-bit lane, rows 4i to 4i + 3
      const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 2]);
      const __m512d c = _mm512_castps_pd(t[4 * i + 1]), d = _mm512_castps_pd(t[4 * i + 3]);
      r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
      r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    for (int c = 0; c < 4; ++c) {
      const F a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
      const F d = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
      store(out + c * out_stride, _mm512_shuffle_f32x4(a, b, 0x88));
      store(out + (4 + c) * out_stride, _mm512_shuffle_f32x4(d, e, 0x88));
      store(out + (8 + c) * out_stride, _mm512_shuffle_f32x4(a, b, 0xdd));
      store(out + (12 + c) * out_stride, _mm512_shuffle_f32x4(d, e, 0xdd));
    }
  }
  // Sums of four vectors at once.
  static void sum4(F a, F b, F c, F d, float* out) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const F s = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
};

}  // namespace
}  // namespace selectivit
