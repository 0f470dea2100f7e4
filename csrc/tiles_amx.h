// The tile unit: eight registers of 16 rows of 64 bytes, all of them in use whole.
//
// Inline assembly and not the intrinsics: gcc's do not tell the compiler which memory they read, so that the stores that
// prepare it may be moved behind them or dropped. Under SELECTIVIT_EMULATE_AMX the same in plain C++, for machines
// without the unit; it stops the process where the unit would fault, and its state is as much a thread's own.
#pragma once
#include <cstdint>

#ifdef SELECTIVIT_EMULATE_AMX
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace selectivit {
namespace {

#ifndef SELECTIVIT_EMULATE_AMX

// As long as one lives, the thread's tiles are shaped; afterwards its state is as small as before.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    static_assert(sizeof shape == 64, "as ldtilecfg reads it");
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int t>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(t));
}
// Rows `stride` bytes apart.
template <int t>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(t) : "memory");
}
// c[i][j] += sum over the 32 bfloat16 of row i of a, with pairs: a[i][2p] b[p][2j] + a[i][2p + 1] b[p][2j + 1].
template <int c, int a, int b>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

#else

struct EmulatedTiles {
  bool shaped;
  alignas(64) uint16_t at[8][16][32];
};
thread_local EmulatedTiles emulated = {};

inline void must_be_shaped(bool shaped) {
  if (emulated.shaped == shaped) return;
  std::fprintf(stderr, "emulated AMX: %s\n", shaped ? "a tile used before ldtilecfg" : "ldtilecfg without tilerelease");
  std::abort();
}

struct Tiles {
  Tiles() {
    must_be_shaped(false);
    emulated = {};
    emulated.shaped = true;
  }
  ~Tiles() { emulated.shaped = false; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int t>
inline void tile_zero() {
  must_be_shaped(true);
  std::memset(emulated.at[t], 0, sizeof emulated.at[t]);
}
template <int t>
inline void tile_load(const void* from, int64_t stride) {
  must_be_shaped(true);
  for (int r = 0; r < 16; ++r) std::memcpy(emulated.at[t][r], static_cast<const char*>(from) + r * stride, 64);
}
template <int t>
inline void tile_store(void* to, int64_t stride) {
  must_be_shaped(true);
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, emulated.at[t][r], 64);
}

// Denormals in and out count as zero, as the unit has it whatever the thread's modes.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }
inline float widened(uint16_t bits) {
  const uint32_t whole = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &whole, 4);
  return flushed(x);
}

// In the order of Intel's description of TDPBF16PS: even and odd products each in their own fused sum from zero, every
// step rounded to nearest even; the two added; that added to c.
template <int c, int a, int b>
inline void tile_dot() {
  must_be_shaped(true);
  for (int i = 0; i < 16; ++i) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int p = 0; p < 16; ++p) {
      const float x = widened(emulated.at[a][i][2 * p]), y = widened(emulated.at[a][i][2 * p + 1]);
      for (int j = 0; j < 16; ++j) {
        even[j] = flushed(std::fma(x, widened(emulated.at[b][p][2 * j]), even[j]));
        odd[j] = flushed(std::fma(y, widened(emulated.at[b][p][2 * j + 1]), odd[j]));
      }
    }
    std::memcpy(sum, emulated.at[c][i], sizeof sum);
    for (int j = 0; j < 16; ++j) sum[j] = flushed(flushed(sum[j]) + flushed(even[j] + odd[j]));
    std::memcpy(emulated.at[c][i], sum, sizeof sum);
  }
}

#endif

}  // namespace
}  // namespace selectivit
