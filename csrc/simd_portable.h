// Four floats at a time in the compiler's own vectors: NEON on Arm, SSE2 on old x86, anything else as it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace selectivit {
namespace {

struct Simd {
  static constexpr int W = 4;
  static constexpr int kTileRows = 4;
#ifdef __aarch64__
  static constexpr int kTileVectors = 4;  // 16 sums in 32 registers: a quarter fewer instructions than with 2
#else
  static constexpr int kTileVectors = 2;
#endif
  static constexpr bool kScreen = false;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));

  static F zero() { return F{}; }
  static F set(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F max(F a, F b) {
#ifdef __SSE__
    return _mm_max_ps(a, b);  // the same, NaN included, in one instruction instead of four
#else
    return a > b ? a : b;
#endif
  }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F sqrt(F a) { return F{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
  static float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  static float top(F a) {
    const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
  }
  static F where_positive(F x, F a) { return x > zero() ? a : zero(); }
  static int count_positive(F x) { return (x[0] > 0) + (x[1] > 0) + (x[2] > 0) + (x[3] > 0); }
  static I bits(F x) {
    I i;
    std::memcpy(&i, &x, sizeof i);
    return i;
  }
  static F floats(I i) {
    F x;
    std::memcpy(&x, &i, sizeof x);
    return x;
  }
  static F mantissa(F x) { return floats(bits(x) - ((bits(x) - 0x3f400000) & static_cast<int32_t>(0xff800000))); }
  static F exponent(F x) { return __builtin_convertvector((bits(x) - 0x3f400000) >> 23, F); }
  static F round(F x) {
    const F big = set(12582912.0f);  // 1.5 · 2^23: adding it leaves no bits for a fraction
    return (x + big) - big;
  }
  static F times_power_of_two(F x, F n) {
    const I e = (__builtin_convertvector(max(n, set(-126)), I) + 127) << 23;
    return x * floats(e);
  }
  static bool any(I g) {
    int64_t half[2];
    std::memcpy(half, &g, sizeof half);
    return half[0] | half[1];
  }
  static int keep_above(F x, F t, int32_t base, float* values, int32_t* indices, int n) {
    if (!any(x > t)) return n;
    for (int b = 0; b < W; ++b) {
      values[n] = x[b];
      indices[n] = base + b;
      n += x[b] > t[b];
    }
    return n;
  }
  static int keep_positive(F u, F x, const int32_t* from, float* values, int32_t* indices, int n) {
    for (int b = 0; b < W; ++b) {
      const int32_t id = from[b];
      values[n] = x[b];
      indices[n] = id;
      n += u[b] > 0;
    }
    return n;
  }
  static void transpose(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) out[i * out_stride + j] = in[j * in_stride + i];
  }
  static void sum4(F a, F b, F c, F d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
  }
};

}  // namespace
}  // namespace selectivit
