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

// Outside [1.05, 2] the powers magnify float32's rounding, or the norm is not convex: the caller's other path serves.
bool alphas_served(const Attention& a) {
  if (!a.alphas) return true;
  for (int64_t head = 0; head < a.batch * a.heads; ++head) {
    const float alpha = a.alphas[offset(a.alpha_stride, a, head)];
    if (!(alpha >= 1.05f && alpha <= 2)) return false;
  }
  return true;
}

constexpr int64_t kGroupBytes = 64 << 20;  // of tiles, where a unit for every thread takes less

// Units [begin, end), a few at a time: their rows, then by keys what they add to dk and dv, in their order.
int backward_units(const Kernel& kernel, const Attention& a, const AttentionGradients& g, int64_t begin, int64_t end,
                   int32_t threads) {
  const int64_t per_head = units_per_head(a.n), size = unit_list_bytes(a);
  int64_t some = threads > 1 ? 4 * threads : 1;  // one alone stays in the cache; several threads need some to share
  if (some * size > kGroupBytes) some = threads;
  if (some > end - begin) some = end - begin;
  char* memory = static_cast<char*>(std::malloc(some * size + 64));
  UnitLists* lists = static_cast<UnitLists*>(std::malloc(some * sizeof(UnitLists)));
  int status = memory && lists ? 0 : 2;
  char* aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  for (int64_t i = 0; i < some && !status; ++i) lists[i] = unit_lists(a, aligned + i * size);
  for (int64_t at = begin; at < end && !status; at += some) {
    const int64_t until = at + some < end ? at + some : end;
    status = share(until - at, threads, [&](int64_t from, int64_t to) {
      return kernel.backward_rows(a, g, at + from, at + to, lists + from);
    });
    const int64_t first = at / per_head, heads = (until - 1) / per_head - first + 1;
    const int64_t pieces = threads < a.m ? threads : a.m;  // of each head's keys; the result is the same for any
    if (status) break;
    status = share(heads * pieces, threads, [&](int64_t from, int64_t to) {
      int worst = 0;
      for (int64_t i = from; i < to; ++i) {
        const int64_t head = first + i / pieces, piece = i % pieces;
        for (int64_t u = at; u < until && !worst; ++u)
          if (u / per_head == head)
            worst = kernel.backward_keys(a, g, u, a.m * piece / pieces, a.m * (piece + 1) / pieces, lists[u - at]);
      }
      return worst;
    });
  }
  std::free(lists);
  std::free(memory);
  return status;
}

}  // namespace
}  // namespace selectivit

using namespace selectivit;

SELECTIVIT_API int32_t selectivit_abi() { return 2; }
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

// 0: done. 1: declined (NaN or infinity in q or k, or an alpha not served: the caller's other path holds the policy).
// 2: out of memory.
SELECTIVIT_API int32_t selectivit_forward(const Attention* a, int32_t which) {
  const Kernel& kernel = chosen(which);
  const int64_t total = a->batch * a->heads * units_per_head(a->n);
  if (!alphas_served(*a)) return 1;
  const int status =
      share(total, a->threads, [&](int64_t begin, int64_t end) { return kernel.forward(*a, begin, end); });
  if (status && a->saved)
    for (int64_t u = 0; u < total; ++u) saved_unit(*a, u).start[0] = -1;
  return status;
}

SELECTIVIT_API int32_t selectivit_backward(const Attention* a, const AttentionGradients* g, int32_t which) {
  const Kernel& kernel = chosen(which);
  const int64_t heads = a->batch * a->heads, units = units_per_head(a->n);
  if (!alphas_served(*a)) return 1;
  // Whole heads where these share out well: their threads never wait for each other.
  if (heads % a->threads && heads < 4 * a->threads)
    return backward_units(kernel, *a, *g, 0, heads * units, a->threads);
  return share(heads, a->threads, [&](int64_t begin, int64_t end) {
    return backward_units(kernel, *a, *g, begin * units, end * units, 1);
  });
}

SELECTIVIT_API int32_t selectivit_entmax_rows(const Rows* a, int32_t which) {
  const Kernel& kernel = chosen(which);
  return share(a->rows, a->threads, [&](int64_t begin, int64_t end) { return kernel.entmax_rows(*a, begin, end); });
}
