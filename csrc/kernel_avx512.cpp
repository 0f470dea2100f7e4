#include "simd_avx512.h"
#define SELECTIVIT_SCREEN "screen_avx512.h"
// after the Simd it is built on
#include "kernel_body.h"

namespace selectivit {
extern const Kernel kAvx512Kernel;
const Kernel kAvx512Kernel = {"AVX-512", forward, rows_of, keys_of, rowwise};
}  // namespace selectivit
