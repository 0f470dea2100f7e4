// The library's face: a C ABI, the choice of the instruction set, and the threads.
#include <cstdlib>
#include <cstring>

#include "amx.h"
#include "kernel.h"
#include "saved.h"
#include "scratch.h"

#ifdef _WIN32
#define SELECTIVIT_API extern "C" __declspec(dllexport)
#else
#define SELECTIVIT_API extern "C" __attribute__((visibility("default")))
#endif

namespace selectivit {
namespace {

const Kernel* kernels[4];

int list_kernels() {
  int n = 0;
#ifdef SELECTIVIT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
#ifdef SELECTIVIT_AMX
    if (amx_granted()) kernels[n++] = &kAmxKernel;
#endif
    kernels[n++] = &kAvx512Kernel;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels[n++] = &kAvx2Kernel;
#endif
  kernels[n++] = &kPortableKernel;
  return n;
}
const int number_of_kernels = list_kernels();

const Kernel& chosen(int32_t which) { return *kernels[which < number_of_kernels ? which : number_of_kernels - 1]; }

// Equal consecutive shares of [0, total), one a thread; a single share needs no team at all.
template <class Body>
int share(int64_t total, int32_t threads, Body body) {
  if (threads > total) threads = static_cast<int32_t>(total);
  if (threads <= 1) {
    const int status = body(0, total);
    trim_rooms();
    return status;
  }
  int worst = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(max : worst)
  for (int32_t t = 0; t < threads; ++t) {
    const int status = body(total * t / threads, total * (t + 1) / threads);
    trim_rooms();
    if (status > worst) worst = status;
  }
  return worst;
}

int gather_keys(const Kernel& kernel, const Attention& a, const AttentionGradients& g, const UnitLists* lists) {
  const int64_t heads = a.batch * a.heads, units = units_per_head(a.n);
  int64_t entries = 0;
  for (int64_t u = 0; u < units * heads; ++u) {
    const Unit unit = unit_at(a, u);
    entries += lists[u].start[unit.end - unit.begin];
  }
  // Enough pieces for the threads, and small enough to order in a few megabytes; the result is the same for any.
  int64_t pieces = (a.threads + heads - 1) / heads;
  const int64_t by_memory = 1 + entries / heads / 500000;
  if (a.threads > heads) pieces *= 2;
  if (pieces < by_memory) pieces = by_memory;
  if (pieces > a.m) pieces = a.m;
  return share(heads * pieces, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t piece = i % pieces;
      const int status =
          kernel.backward_keys(a, g, i / pieces, a.m * piece / pieces, a.m * (piece + 1) / pieces, lists);
      if (status) return status;
    }
    return 0;
  });
}

}  // namespace
}  // namespace selectivit

using namespace selectivit;

SELECTIVIT_API int32_t selectivit_abi() { return 1; }
SELECTIVIT_API int32_t selectivit_kernels() { return number_of_kernels; }
SELECTIVIT_API const char* selectivit_kernel_name(int32_t which) { return chosen(which).name; }
SELECTIVIT_API int32_t selectivit_has_threads() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
SELECTIVIT_API int64_t selectivit_saved_bytes(int64_t heads, int64_t n, int64_t m) { return saved_total_bytes(heads, n, m); }

// 0: done. 1: declined (NaN or infinity in q or k: the caller's other path holds the policy). 2: out of memory.
SELECTIVIT_API int32_t selectivit_forward(const Attention* a, int32_t which) {
  const Kernel& kernel = chosen(which);
  const int64_t total = a->batch * a->heads * units_per_head(a->n);
  const int status =
      share(total, a->threads, [&](int64_t begin, int64_t end) { return kernel.forward(*a, begin, end); });
  if (status && a->saved)
    for (int64_t u = 0; u < total; ++u) saved_unit(*a, u).start[0] = -1;
  return status;
}

SELECTIVIT_API int32_t selectivit_backward(const Attention* a, const AttentionGradients* g, int32_t which) {
  const Kernel& kernel = chosen(which);
  const int64_t total = a->batch * a->heads * units_per_head(a->n);
  UnitLists* lists = static_cast<UnitLists*>(std::calloc(total, sizeof(UnitLists)));
  if (!lists) return 2;
  int status = share(total, a->threads, [&](int64_t begin, int64_t end) {
    return kernel.backward_rows(*a, *g, begin, end, lists);
  });
  if (!status) status = gather_keys(kernel, *a, *g, lists);
  for (int64_t u = 0; u < total; ++u) {
    std::free(lists[u].p);
    std::free(lists[u].owned);
  }
  std::free(lists);
  return status;
}

SELECTIVIT_API int32_t selectivit_entmax_rows(const Rows* a, int32_t which) {
  const Kernel& kernel = chosen(which);
  return share(a->rows, a->threads, [&](int64_t begin, int64_t end) { return kernel.entmax_rows(*a, begin, end); });
}
