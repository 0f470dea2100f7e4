// Eight floats at a time, AVX2 with FMA. No screen: 16-bit products are no faster here than float ones by enough.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace selectivit {
namespace {

struct Simd {
  static constexpr int W = 8;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVectors = 2;
  static constexpr bool kScreen = false;
  using F = __m256;
  using I = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float top(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static F where_positive(F x, F a) { return _mm256_and_ps(_mm256_cmp_ps(x, zero(), _CMP_GT_OQ), a); }
  static int count_positive(F x) { return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(x, zero(), _CMP_GT_OQ))); }
  static I shifted(F x) {  // moves the boundary between exponents from 1 to 0.75
    return _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x3f400000));
  }
  static F mantissa(F x) {
    const I e = _mm256_and_si256(shifted(x), _mm256_set1_epi32(static_cast<int>(0xff800000)));
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(x), e));
  }
  static F exponent(F x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(shifted(x), 23)); }
  static F round(F x) { return _mm256_round_ps(x, 8); }
  static F times_power_of_two(F x, F n) {
    const I e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(max(n, set(-126))), _mm256_set1_epi32(127)), 23);
    return x * _mm256_castsi256_ps(e);
  }
  static int keep_above(F x, F t, int32_t base, float* values, int32_t* indices, int n) {
    int g = _mm256_movemask_ps(_mm256_cmp_ps(x, t, _CMP_GT_OQ));
    if (!g) return n;
    alignas(32) float lane[8];
    _mm256_store_ps(lane, x);
    for (; g; g &= g - 1, ++n) {
      const int b = __builtin_ctz(g);
      values[n] = lane[b];
      indices[n] = base + b;
    }
    return n;
  }
  static int keep_positive(F u, F x, const int32_t* from, float* values, int32_t* indices, int n) {
    int g = _mm256_movemask_ps(_mm256_cmp_ps(u, zero(), _CMP_GT_OQ));
    alignas(32) float lane[8];
    _mm256_store_ps(lane, x);
    for (; g; g &= g - 1, ++n) {
      const int b = __builtin_ctz(g);
      values[n] = lane[b];
      indices[n] = from[b];
    }
    return n;
  }
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) out[i * out_stride + j] = in[j * in_stride + i];
  }
  static void sum4(F a, F b, F c, F d, float* out) {
    const F s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }
};

}  // namespace
}  // namespace selectivit
