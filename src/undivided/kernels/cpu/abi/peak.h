// The peak rate of multiply-adds on one core.
#pragma once

#include "gemm/amx.h"
#include "gemm/modes.h"

namespace {

// Forces x into a register, so that the compiler does not remove its computation.
INLINE void force_register(Vec& x) { __asm__ volatile("" : "+" UNDIVIDED_REGISTER(x)); }

// The multiply-adds of the micro-kernel with its loads of vectors, from L1: the limit of the arithmetic units. Without
// loads an Intel core runs AVX-512 at a clock that no product of matrices reaches (Emerald Rapids: 2.99 GHz instead of
// 2.79; see docs/decisions/2026-11-30-clock-of-products.md).
template <class Arith>
double vector_peak(int64_t repeats) {
  constexpr int64_t steps = 8;
  alignas(64) float operands[steps * kPanel];
  for (float& x : operands) x = 1e-30f;
  Vec acc[kBroadcasts][kVectors] = {};
  typename Arith::Scalar x = {};
  for (int64_t n = 0; n < repeats; n++) {
    const float* from = operands + n % steps * kPanel;
    Vec y[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) y[v] = load(from + v * kLanes), force_register(y[v]);
#pragma GCC unroll 8
    for (int i = 0; i < kBroadcasts; i++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Arith::add(acc[i][v], x, y[v]);
        force_register(acc[i][v]);
      }
  }
  return (double)repeats * kBroadcasts * kVectors * kLanes * (Arith::kPairs ? 4 : 2);
}
#if defined(UNDIVIDED_NEON_DOT)
double matrix_peak(int64_t repeats) {
  Vec acc[kBroadcasts][kVectors] = {}, y = splat(1e-30f);
  for (int64_t n = 0; n < repeats; n++) {
#pragma GCC unroll 8
    for (int i = 0; i < kBroadcasts; i++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        multiply_matrices(acc[i][v], y, y);
        force_register(acc[i][v]);
      }
  }
  return (double)repeats * kBroadcasts * kVectors * kLanes * 8;  // 4 multiply-adds per lane
}
#endif
#if defined(UNDIVIDED_AMX)
template <class T>
double amx_peak(int64_t repeats) {
  TileSetup setup;
  for (int64_t n = 0; n < repeats; n++) {
    tile_multiply<0, 4, 6>(T()), tile_multiply<1, 4, 7>(T());
    tile_multiply<2, 5, 6>(T()), tile_multiply<3, 5, 7>(T());
  }
  return (double)repeats * 4 * kTileRows * kLanes * kTileDepth * 2;
}
#endif

template <class Half>
double peak(int64_t dtype, int64_t repeats) {
#if defined(UNDIVIDED_AMX)
  if (dtype == kBFloat16) return amx_peak<BFloat16>(repeats);
  if (dtype == kFloat16 && std::is_same<Half, Float16>::value) return amx_peak<Float16>(repeats);
#endif
#if defined(UNDIVIDED_NEON_DOT)
  if (dtype == kBFloat16) return matrix_peak(repeats);
#elif defined(UNDIVIDED_BF16_DOT)
  if (dtype == kBFloat16) return vector_peak<Dot>(repeats);
#endif
  (void)dtype;
  return vector_peak<Fma>(repeats);
}

}  // namespace
