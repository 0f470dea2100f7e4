// Whether this process may use AMX tiles: the processor has them, and Linux, asked once, grants the room for their state.
#pragma once
#if defined(SELECTIVIT_AMX) && !defined(SELECTIVIT_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace selectivit {

#ifdef SELECTIVIT_AMX
inline bool amx_granted() {
#ifdef SELECTIVIT_EMULATE_AMX
  return true;
#else
  constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24;   // cpuid 7, edx
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (!(edx & kBfloat16) || !(edx & kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}
#endif

}  // namespace selectivit
