// One instruction set's kernel: ranges of units, for one thread.
#pragma once
#include "lists.h"
#include "problem.h"

namespace selectivit {

struct Kernel {
  const char* name;
  int (*forward)(const Attention&, int64_t begin, int64_t end);
  int (*backward_rows)(const Attention&, const AttentionGradients&, int64_t begin, int64_t end, UnitLists*);
  int (*backward_keys)(const Attention&, const AttentionGradients&, int64_t unit, int64_t begin, int64_t end,
                       const UnitLists&);
  int (*entmax_rows)(const Rows&, int64_t begin, int64_t end);
};

extern const Kernel kPortableKernel;
#ifdef SELECTIVIT_X86
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
#endif
#ifdef SELECTIVIT_AMX
extern const Kernel kAmxKernel;
#endif

}  // namespace selectivit
