// Which instruction set this process runs. Compiled without instruction set flags.
#include "level.h"

#include <stdlib.h>
#include <string.h>
#ifdef UNDIVIDED_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace undivided {
namespace {

#ifdef UNDIVIDED_AMX
// Whether the processor multiplies tiles, and the kernel lends this process their registers (it must be asked once).
bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
bool has_fp16_tiles() {
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 21 & 1);
}
#endif

#ifdef UNDIVIDED_X86
const Kernels* const kLevels[] = {
    &kernels_generic, &kernels_avx2, &kernels_avx512, &kernels_avx512_bf16,
#ifdef UNDIVIDED_AMX
    &kernels_amx_bf16, &kernels_amx,
#endif
};
int highest_level() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")))
    return 0;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return 1;
  if (!__builtin_cpu_supports("avx512bf16")) return 2;
#ifdef UNDIVIDED_AMX
  if (has_tiles()) return has_fp16_tiles() ? 5 : 4;
#endif
  return 3;
}
#else
const Kernels* const kLevels[] = {&kernels_generic};
int highest_level() { return 0; }
#endif

}  // namespace

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    int highest = highest_level();
    const char* wanted = getenv("UNDIVIDED_ISA");
    for (int i = 0; wanted && i < highest; i++)
      if (strcmp(wanted, kLevels[i]->name) == 0) return kLevels[i];
    return kLevels[highest];
  }();
  return *chosen;
}

}  // namespace undivided
