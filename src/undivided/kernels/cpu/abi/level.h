// The instruction set of this process.
#pragma once

#include "abi/kernels.h"

namespace undivided {

// The table of the level that UNDIVIDED_ISA names, if the processor and the compiler allow it; else of the fastest that
// they allow, which is the highest but for Intel's processors without AMX. Selected at the first call.
const Kernels& kernels();
// The table that runs this problem: that of the level, or on Intel's AMX of avx512, if bf16 runs by dot products at the
// level (with batch_invariant or quantised keys): docs/decisions/2026-11-27-intel-without-amx.md.
const Kernels& kernels(const Attention& a);

// Whether the processor is Intel's: some thresholds differ between vendors at one level (see Tuning).
bool is_intel();
// The family of AMD's processor, as in its manuals; 0 for other vendors.
uint32_t amd_family();
constexpr uint32_t kZen4 = 0x19, kZen5 = 0x1a;  // 0x19 is Zen 3 too, which has no AVX-512

// The name of a level that the processor and the compiler allow, 0 being the lowest; null after the highest.
const char* level_name(int level);

// Why a higher level of this processor cannot be used; null if the highest can.
const char* lost_level();

}  // namespace undivided
