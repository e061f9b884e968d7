// The instruction set of this process.
#pragma once

#include "abi/kernels.h"

namespace undivided {

// The table of the level that UNDIVIDED_ISA names, if the processor and the compiler allow it; otherwise that of the
// fastest level that they allow, which is the highest except on Intel processors without AMX. Selected at the first
// call.
const Kernels& kernels();
// The table that runs this problem: that of the selected level, with two exceptions at a level with AMX. With
// batch_invariant, tiles would add in another order, and one batch element could make all of them repeat an attempt;
// and prefill does not make tiles of quantised keys. Both run on avx512_bf16, or, with bf16 on Intel's processors, on
// avx512: docs/decisions/2026-11-27-intel-without-amx.md.
const Kernels& kernels(const Attention& a);
// The table that decodes this problem: as above, but decoding does make tiles of quantised keys, if queries are bf16
// and head sizes fit.
const Kernels& decode_kernels(const Attention& a);

// Whether the processor is Intel's: some thresholds differ between vendors at one level (see Tuning).
bool is_intel();
// The family of AMD's processor, as in its manuals; 0 for other vendors.
uint32_t amd_family();
constexpr uint32_t kZen4 = 0x19, kZen5 = 0x1a;  // 0x19 is Zen 3 too, which has no AVX-512

// The value of a threshold on this processor: one for a family of AMD's, one for all others.
inline int64_t threshold(int64_t others, uint32_t family, int64_t of_family) {
  return amd_family() == family ? of_family : others;
}

// The name of a level that the processor and the compiler allow, 0 being the lowest; null after the highest.
const char* level_name(int level);

// Why a higher level of this processor cannot be used; null if the highest can.
const char* lost_level();

}  // namespace undivided
