// The backward's products on AMX (see amx.h and backward.h): for 32 keys and 32 rows at a time scores and dP stay in L1.
//
//     St, dPt   A: K and V packed into tiles, B: Qt and dOt as packed rows have them       from zero, into 2 x 4 KiB
//     dQt       A: Kt, transposed once a block of keys, B: pairs of keys of dSt            once a tile of keys
//     dV, dK    A: Pt and dSt, which are tiles as they are written, B: pairs of rows       once a block of rows
#pragma once

#include "derive.h"
#include "tiled.h"

#if defined(UNDIVIDED_AMX)

namespace {

// to[32][kPanel] = A * B
template <class T>
INLINE void multiply_block(const char* a, int64_t group, const float* b, int64_t steps, float* to) {
  const TileRows rows = {a, 64, kTileBytes, group};
  multiply_first<T, true>(a, rows, (const char*)b, nullptr, nullptr);
  for (int64_t s = 1; s < steps; s++) multiply_step<T>(a + s * kTileBytes, rows, (const char*)b + s * kBelow);
  char* c = (char*)to;
  tile_store<0>(c, kPanelBytes), tile_store<1>(c + 64, kPanelBytes);
  tile_store<2>(c + kBelow, kPanelBytes), tile_store<3>(c + kBelow + 64, kPanelBytes);
}

// 32 halves of a row of A.
INLINE void store_halves(BFloat16* to, Vec low, Vec high) {
  *(__m512i_u*)to = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

INLINE void store_halves(Float16* to, Vec low, Vec high) {
  store_from_float(to, low);
  store_from_float(to + kLanes, high);
}

// Weights and gradients of scores of kKeyBlock keys from j on: as rows of A, and the latter as pairs of keys besides.
template <class T, Kind kKind, bool kDrops>
static __attribute__((noinline)) void derive_block(const Derive& d, int64_t first, T* weights, T* scores, float* pairs) {
  constexpr bool checked = std::is_same<T, Float16>::value;
  Vec most = {};
  for (int64_t j = first; j < first + kKeyBlock; j += 2) {
    Derived x[2][kVectors];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) x[i][v] = derive<kKind, kDrops>(d, j + i, v);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      store_halves(weights + (j + i) * kPanel, x[i][0].weight, x[i][1].weight);
      store_halves(scores + (j + i) * kPanel, x[i][0].score, x[i][1].score);
      for (int v = 0; checked && v < kVectors; v++) most = larger((Vec)((UVec)x[i][v].score & 0x7fffffffu), most);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++)
      store(pairs + j / 2 * kPanel + v * kLanes, pair_weights(x[0][v].score, x[1][v].score, T()));
  }
  if (checked && any(most > kMostFloat16)) __atomic_store_n(d.exceeded, 1, __ATOMIC_RELAXED);
}

template <class T>
static void derive_blocks(const Derive& d, bool general, int64_t first, T* weights, T* scores, float* pairs) {
  const bool drops = d.a.dropout != 0;
  auto with = [&](auto kind) {
    constexpr Kind chosen = decltype(kind)::value;
    if (drops) derive_block<T, chosen, true>(d, first, weights, scores, pairs);
    else derive_block<T, chosen, false>(d, first, weights, scores, pairs);
  };
  if (general) with(std::integral_constant<Kind, kGeneral>());
  else if (d.ranged) with(std::integral_constant<Kind, kRanged>());
  else with(std::integral_constant<Kind, kCovered>());
}

// add_tile's sums, for every column panel: out[key][kPanel] += A[slot][key] * B[slot], keys in blocks of kKeyBlock.
template <class T>
static __attribute__((noinline)) void add_tile_blocks(const T* a, int64_t a_slot, const float* b, int64_t b_panel,
                                                      int64_t b_column, const Slots& slots, int64_t keys, int64_t columns,
                                                      float* out, int64_t out_column) {
  const TileRows rows = {nullptr, 64, 0, kTileBytes};
  char* done = nullptr;
  for (int64_t j = 0; j < keys; j += kKeyBlock) {
    const char *from[kMostSlots], *with[kMostSlots];
    int count = 0;
    for (int n = 0; n < slots.count; n++)
      if (slots.start[n] <= j && slots.stop[n] > j) {
        from[count] = (const char*)(a + n * a_slot + j * kPanel);
        with[count++] = (const char*)(b + slots.panel[n] * b_panel);
      }
    for (int64_t c = 0; count && c < columns; c++) {
      char* to = (char*)(out + c * out_column + j * kPanel);
      multiply_first<T, false>(from[0], rows, with[0] + c * b_column * 4, to, done);
      for (int n = 1; n < count; n++) multiply_step<T>(from[n], rows, with[n] + c * b_column * 4);
      done = to;
    }
  }
  if (!done) return;
  tile_store<0>(done, kPanelBytes), tile_store<1>(done + 64, kPanelBytes);
  tile_store<2>(done + kBelow, kPanelBytes), tile_store<3>(done + kBelow + 64, kPanelBytes);
}

}  // namespace

#endif
