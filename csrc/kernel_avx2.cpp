#include "simd_avx2.h"
// after the Simd it is built on
#include "kernel_body.h"

namespace selectivit {
extern const Kernel kAvx2Kernel;
const Kernel kAvx2Kernel = {"AVX2", forward, rows_of, keys_of, rowwise};
}  // namespace selectivit
