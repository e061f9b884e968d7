// Packs K and V into the A operand: tiles of 1 KiB of consecutive memory. (K in place, with rows 256 bytes apart, took
// 1.5 times as long: such rows share a quarter of L1's sets.)
#pragma once

#include "gemm/amx.h"
#include "simd/transpose.h"

#if defined(UNDIVIDED_AMX)

namespace {

// Packs the rows of `keys` keys, padded with zeros to steps of kTileDepth columns and to `padded` keys.
template <class T>
static void pack_k(const T* k, int64_t stride, int64_t keys, int64_t padded, int64_t columns, char* to) {
  const int64_t steps = (columns + kTileDepth - 1) / kTileDepth;
  for (int64_t j = 0; j < padded; j++, k += stride) {
    char* row = to + j / kTileRows * steps * kTileBytes + j % kTileRows * 64;
    for (int64_t d = 0; d < columns; d += kTileDepth, row += kTileBytes) {
      if (j < keys && d + kTileDepth <= columns) {
        _mm512_store_si512(row, _mm512_loadu_si512(k + d));
        continue;
      }
      _mm512_store_si512(row, _mm512_setzero_si512());
      if (j < keys) memcpy(row, k + d, (size_t)(columns - d) * 2);
    }
  }
}

// Transposes 16 pairs of keys by 16 columns into one tile: row d holds 32 keys in order. Keys that no row sees become
// zeros.
template <class T>
INLINE void transpose_pairs(const T* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* visible,
                            char* tile) {
  Vec x[kLanes];
  for (int i = 0; i < kLanes; i++) {
    UVec half[2] = {};
    for (int odd = 0; odd < 2; odd++) {
      const int64_t j = 2 * i + odd;
      if (j >= keys || !visible[j]) continue;
      HVec h;
      if (columns >= kLanes) h = *(const UnalignedHVec*)(v + j * stride);
      else {
        h = HVec{};
        memcpy(&h, v + j * stride, (size_t)columns * 2);
      }
      half[odd] = __builtin_convertvector(h, UVec);
    }
    x[i] = (Vec)(half[0] | half[1] << 16);
  }
  transpose(x);
  for (int i = 0; i < kLanes; i++) store((float*)(tile + i * 64), x[i]);
}

// The same for 32 columns: two tiles, `group` bytes apart. Interleaving works within 128 bits, so columns 4 to 7, 12 to
// 15 and so on come from the upper halves.
template <class T>
INLINE void transpose_pairs_twice(const T* v, int64_t stride, int64_t keys, const uint8_t* visible, char* tile,
                                  int64_t group) {
  Vec low[kLanes], high[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    __m512i half[2];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const int64_t j = 2 * i + odd;
      half[odd] = j < keys && visible[j] ? _mm512_loadu_si512(v + j * stride) : _mm512_setzero_si512();
    }
    low[i] = (Vec)_mm512_unpacklo_epi16(half[0], half[1]), high[i] = (Vec)_mm512_unpackhi_epi16(half[0], half[1]);
  }
  transpose(low);
  transpose(high);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    const int64_t column = i / 4 * 8 + i % 4;
    char* to = tile + column / kTileRows * group + column % kTileRows * 64;
    store((float*)to, low[i]), store((float*)(to + 4 * 64), high[i]);
  }
}

// Packs V of `keys` keys for multiply_amx, `capacity` steps of kTileDepth keys per group of columns.
template <class T>
static void transpose_v(const T* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* visible,
                        int64_t capacity, char* to) {
  const int64_t group = capacity * kTileBytes;
  for (int64_t j = 0; j < keys; j += kTileDepth, v += kTileDepth * stride, visible += kTileDepth, to += kTileBytes) {
    int64_t d = 0;
    for (; d + 2 * kTileRows <= columns; d += 2 * kTileRows)
      transpose_pairs_twice(v + d, stride, keys - j, visible, to + d / kTileRows * group, group);
    for (; d < columns; d += kTileRows)
      transpose_pairs(v + d, stride, keys - j, columns - d, visible, to + d / kTileRows * group);
  }
}

}  // namespace

#endif
