// Weights on AMX: pairs of 16-bit numbers, relative to a base.
#pragma once

#include "gemm/amx.h"
#include "simd/math.h"

#if defined(UNDIVIDED_AMX)

namespace {

// Flushes subnormal results to 0 during its lifetime: a weight that underflows would cost 200 cycles.
class FlushToZero {
 public:
  FlushToZero() : previous_(_mm_getcsr()) { _mm_setcsr(previous_ | _MM_FLUSH_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(previous_); }

 private:
  const unsigned previous_;
};

// How far a row's scores may rise above its base, in powers of two, before its sums are rescaled, which is rare after
// the first key blocks. Weights reach 2^8 then. Those of fp16 are scaled up as far as its range allows, so that small
// ones keep their bits.
constexpr float kHeadroom = 8;
template <class T>
constexpr int kWeightBits = 0;
template <>
constexpr int kWeightBits<Float16> = 7;

INLINE Vec pair_weights(Vec even, Vec odd, BFloat16) {  // ties, one in 2^16, round up
  UVec low = ((UVec)even + 0x8000) >> 16, high = (UVec)odd + 0x8000;
  return (Vec)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)high);
}
INLINE Vec pair_weights(Vec even, Vec odd, Float16) { return pair_halves(even, odd, Float16()); }

// ot[i][rows] *= decay[rows] for i < count.
static void rescale(const Vec* decay, int64_t count, float* ot) {
  const Vec low = decay[0], high = decay[1];
  for (int64_t i = 0; i < count; i++, ot += kPanel) {
    store(ot, load(ot) * low);
    store(ot + kLanes, load(ot + kLanes) * high);
  }
}

}  // namespace

#endif
