// Keys laid out for a screen of 16-bit numbers: panels of 32 keys, per pair of dimensions 32 pairs.
#pragma once
#include "pack.h"

namespace selectivit {
namespace {

inline int64_t screen_width(int64_t d) { return (d + 31) / 32 * 32; }
inline int64_t screen_bytes(int64_t m, int64_t d) { return padded_keys(m) * screen_width(d) * 2; }

// `convert(key, to)` writes the d 16-bit numbers of one key; what pads them, and keys past the last, are zeros.
template <class S, class Convert>
inline void pack_pairs(const float* k, int64_t stride, int64_t m, int64_t d, int32_t* panels, Convert convert) {
  const int64_t pairs = screen_width(d) / 2;
  alignas(64) int32_t rows[16 * kMaxWidth / 2] = {};
  for (int64_t j = 0; j < padded_keys(m); j += 16) {
    for (int r = 0; r < 16; ++r) {
      int16_t* to = reinterpret_cast<int16_t*>(rows + r * pairs);
      if (j + r < m) convert(k + (j + r) * stride, to);
      else std::memset(to, 0, pairs * 4);
    }
    int32_t* to = panels + j / kPanelKeys * kPanelKeys * pairs + j % kPanelKeys;
    for (int64_t c = 0; c < pairs; c += 16)
      S::transpose(reinterpret_cast<const float*>(rows + c), pairs, reinterpret_cast<float*>(to + c * kPanelKeys),
                   kPanelKeys);
  }
}

}  // namespace
}  // namespace selectivit
