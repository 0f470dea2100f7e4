#include "simd_portable.h"
// after the Simd it is built on
#include "kernel_body.h"

namespace selectivit {
extern const Kernel kPortableKernel;
const Kernel kPortableKernel = {"portable", forward, rows_of, keys_of, rowwise};
}  // namespace selectivit
