// The instruction set of this process.
#pragma once

#include "abi/kernels.h"

namespace undivided {

// The table of the level that UNDIVIDED_ISA names, if the processor and the compiler allow it; else of the fastest that
// they allow, which is the highest but for Intel's processors without AMX. Selected at the first call.
const Kernels& kernels();

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
