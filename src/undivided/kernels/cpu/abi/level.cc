// Selects the instruction set of this process. Compiled without instruction set flags.
#include "abi/level.h"

#include <stdlib.h>
#include <string.h>
#if defined(UNDIVIDED_AMX) && !defined(UNDIVIDED_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "abi/cpu_features.h"

namespace undivided {
namespace {

#if defined(UNDIVIDED_AMX) && !defined(UNDIVIDED_EMULATE_AMX)
// Linux enables the tile registers per process, on request.
bool request_tile_permission() {
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

// Why a level that the processor has cannot be used; null if every one can.
const char* lost_reason = nullptr;

// Places in kLevels.
#if defined(UNDIVIDED_X86)
enum { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16, kAmx };
#elif defined(UNDIVIDED_NEON)
enum { kGeneric, kNeon, kNeonBf16 };
#endif

const char* const kLeftOut = "this build leaves out the levels above";

#ifdef UNDIVIDED_X86
#ifndef UNDIVIDED_LEVELS  // how many were built, if not all (UNDIVIDED_HIGHEST_LEVEL in cmake/CMakeLists.txt)
#define UNDIVIDED_LEVELS 6
#endif
const Kernels* const kLevels[] = {
    &kernels_generic,
#if UNDIVIDED_LEVELS > 1
    &kernels_avx2,
#endif
#if UNDIVIDED_LEVELS > 2
    &kernels_avx512,
#endif
#if UNDIVIDED_LEVELS > 3
    &kernels_avx512_bf16,
#endif
#if defined(UNDIVIDED_AMX)
    &kernels_amx_bf16,    &kernels_amx,
#endif
};
int find_highest() {
  const CpuFeatures cpu = CpuFeatures::read();
#if defined(UNDIVIDED_EMULATE_AVX512)
  if (cpu.has_avx2()) return kAmx;
#elif defined(UNDIVIDED_EMULATE_AMX)
  if (cpu.has_avx512_bf16()) return kAmx;
#elif defined(UNDIVIDED_AMX)
  if (cpu.has_amx_bf16() && request_tile_permission()) return cpu.has_amx_fp16() ? kAmx : kAmxBf16;
  if (cpu.has_amx_bf16()) lost_reason = "the operating system denied this process the tile registers of AMX";
#else
  if (cpu.has_amx_bf16())
    lost_reason = UNDIVIDED_LEVELS < 6
                      ? kLeftOut
                      : "this build has no AMX: its assembler did not know it, or the system is not Linux";
#endif
  if (cpu.has_denied_vectors())
    lost_reason = "the operating system does not save vector registers that this processor has";
  return cpu.has_avx512_bf16() ? kAvx512Bf16 : cpu.has_avx512() ? kAvx512 : cpu.has_avx2() ? kAvx2 : kGeneric;
}
#elif defined(UNDIVIDED_NEON)
const Kernels* const kLevels[] = {
    &kernels_generic,
    &kernels_neon,
#ifdef UNDIVIDED_NEON_BF16
    &kernels_neon_bf16,
#endif
};
int find_highest() {
#ifdef UNDIVIDED_NEON_BF16
  if (has_neon_bf16()) return kNeonBf16;
#else
  if (has_neon_bf16()) lost_reason = "this build has no neon_bf16: its compiler did not know the instructions";
#endif
  return kNeon;
}
#else
const Kernels* const kLevels[] = {&kernels_generic};
int find_highest() {
  lost_reason = "there is no SIMD level for this processor";
  return 0;
}
#endif

int highest_level() {
  static const int highest = [] {
    const int supported = find_highest(), built = sizeof kLevels / sizeof *kLevels - 1;
    if (supported > built) lost_reason = kLeftOut;
    return supported < built ? supported : built;
  }();
  return highest;
}

// The level that runs unless UNDIVIDED_ISA names another: the highest, except on Intel's processors without usable AMX.
// Their bf16 dot products have half the rate of multiply-adds: docs/decisions/2026-11-27-intel-without-amx.md.
int default_level() {
  const int highest = highest_level();
  return is_intel() && strcmp(kLevels[highest]->name, "avx512_bf16") == 0 ? highest - 1 : highest;
}

bool has_tiles() {
  static const bool tiles = strncmp(kernels().name, "amx", 3) == 0;
  return tiles;
}

}  // namespace

bool is_intel() {
#ifdef UNDIVIDED_X86
  static const bool intel = CpuFeatures::read().intel;
  return intel;
#else
  return false;
#endif
}

uint32_t amd_family() {
#ifdef UNDIVIDED_X86
  static const CpuFeatures cpu = CpuFeatures::read();
  return cpu.amd ? cpu.family : 0;
#else
  return 0;
#endif
}

const char* lost_level() { return highest_level(), lost_reason; }

const char* level_name(int level) { return level < 0 || level > highest_level() ? nullptr : kLevels[level]->name; }

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const char* requested = getenv("UNDIVIDED_ISA");
    for (int i = 0; requested && i <= highest_level(); i++)
      if (strcmp(requested, kLevels[i]->name) == 0) return kLevels[i];
    return kLevels[default_level()];
  }();
  return *chosen;
}

const Kernels& kernels(const Attention& a) {
#if defined(UNDIVIDED_AMX)
  if (has_tiles() && (a.batch_invariant || a.format))
    return is_intel() && a.dtype == kBFloat16 ? kernels_avx512 : kernels_avx512_bf16;
#else
  (void)a;
#endif
  return kernels();
}

const Kernels& decode_kernels(const Attention& a) {
  const bool on_tiles = has_tiles() && a.format && !a.batch_invariant && kernels().can_decode(a);
  return on_tiles ? kernels() : kernels(a);
}

}  // namespace undivided
