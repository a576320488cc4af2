// What the processor at hand can run, and the system lets it run.
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace headrace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

namespace {

// Asks Linux for the tiles' state (arch_prctl(2), since 5.16): a thread that used a tile without it would be killed. The
// permission is the process's, for threads it starts later and for forked children too.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool processor_has_amx() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kWanted = 1u << 22 | 1u << 23 | 1u << 24;  // AMX-BF16, AVX512-FP16, AMX-TILE
  if ((d & kWanted) != kWanted) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kAvx512Bf16)) return false;
  unsigned low, high;  // of XCR0: the system keeps the tiles' configuration (17) and data (18)
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  return (low & kTileState) == kTileState;
#else
  return false;
#endif
}

}  // namespace

bool has_amx() {
  static const bool has = has_avx512() && processor_has_amx() && may_use_tiles();  // asked once a process
  return has;
}

}  // namespace headrace
