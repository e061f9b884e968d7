// Transposes rows of a tensor into lanes.
#pragma once

#include "gemm/modes.h"
#include "simd/transpose.h"

namespace {

// kLanes fp32 numbers, or kLanes pairs of bf16, of a row.
template <class Mode>
INLINE Vec load_lanes(const typename Mode::T* p) {
  if constexpr (Mode::Arith::kPairs) return load((const float*)(const void*)p);
  else return load_as_float(p);
}
template <class Mode>
INLINE float load_lane(const typename Mode::T* p, bool whole) {
  if constexpr (Mode::Arith::kPairs) return bits_to_float(p[0].bits | (whole ? (uint32_t)p[1].bits << 16 : 0));
  else return to_float(*p);
}

// Transposes kLanes rows (a null pointer is a row of zeros) into to[d][lane]; zeros from `dim` to `depth`.
template <class Mode>
static void transpose_rows(const typename Mode::T* const (&row)[kLanes], int64_t dim, int64_t depth, float* to) {
  constexpr int step = Mode::Arith::kPairs ? 2 : 1;
  const int64_t whole = dim / step;
  int64_t d = 0;
  for (; d + kLanes <= whole; d += kLanes) {
    Vec x[kLanes];
    for (int i = 0; i < kLanes; i++) x[i] = row[i] ? load_lanes<Mode>(row[i] + d * step) : Vec{};
    transpose(x);
    for (int i = 0; i < kLanes; i++) store(to + (d + i) * kPanel, x[i]);
  }
  for (; d < depth; d++)
    for (int i = 0; i < kLanes; i++)
      to[d * kPanel + i] = row[i] && d * step < dim ? load_lane<Mode>(row[i] + d * step, d < whole) : 0.0f;
}

}  // namespace
