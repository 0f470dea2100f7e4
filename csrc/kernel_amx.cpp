#include "simd_avx512.h"
#define SELECTIVIT_SCREEN "screen_amx.h"
// after the Simd it is built on
#include "kernel_body.h"

namespace selectivit {
namespace {

int forward_on_tiles(const Attention& a, int64_t begin, int64_t end) {
  const Tiles tiles;
  return forward(a, begin, end);
}

int rows_on_tiles(const Attention& a, const AttentionGradients& g, int64_t begin, int64_t end, UnitLists* lists) {
  const Tiles tiles;
  return rows_of(a, g, begin, end, lists);
}

}  // namespace

extern const Kernel kAmxKernel;
#ifdef SELECTIVIT_EMULATE_AMX
const Kernel kAmxKernel = {"AMX (emulated)", forward_on_tiles, rows_on_tiles, keys_of, rowwise};
#else
const Kernel kAmxKernel = {"AMX", forward_on_tiles, rows_on_tiles, keys_of, rowwise};
#endif
}  // namespace selectivit
