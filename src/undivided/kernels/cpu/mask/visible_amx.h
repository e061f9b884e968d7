// Which pairs of a panel and a key block are visible, that is not forbidden by a boolean mask, by ranges or by a bias
// of -inf. One bit per pair, so that a mask adds no arithmetic to the softmax.
//
// The mask is stored row by row, one byte per key, but lanes are rows. One comparison turns 64 keys of a row into
// 64 bits; the bits of 32 rows are transposed as bytes (16 shuffles), then extracted one bit of every byte at a time:
// about one vector instruction per 16 pairs.
#pragma once

#include "mask/score_bias.h"
#include "simd/dropout.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kMaskKeys = 64;  // keys of a row of the mask that are read at once
static_assert(kPanel == 32 && kBlockKeys % kMaskKeys == 0, "a key's rows are 32 bits");

enum class Visibility { kNone, kSome, kAll };

// The boolean mask of each row.
struct MaskRows {
  const uint8_t* row[kPanel];  // the first entry
  int64_t from[kPanel], to[kPanel], stride;

  MaskRows(const Attention& a, const RowBlock& block, const Panel& p) : stride(a.dense_k) {
    int64_t at = (block.row + p.first) % a.q_len, head = block.first_head + (block.row + p.first) / a.q_len;
    for (int64_t r = 0; r < kPanel; r++) {  // lanes beyond the last row repeat it
      const MaskRow mask(a, block.batch, head, at);
      row[r] = mask.entries, from[r] = mask.from, to[r] = mask.to;
      if (r + 1 < p.rows && ++at == a.q_len) at = 0, head++;
    }
  }
  // kMaskKeys keys from `key` on; 1 before the first entry, 0 beyond the last one.
  uint64_t bits(int64_t r, int64_t key) const {
    if (key + kMaskKeys <= from[r]) return ~0ull;
    __m512i x;
    if (stride == 1 && key >= from[r] && key + kMaskKeys <= to[r]) {
      x = _mm512_loadu_si512(row[r] + (key - from[r]));
    } else {
      alignas(64) uint8_t some[kMaskKeys] = {};
      for (int64_t j = key; j < key + kMaskKeys && j < to[r]; j++)
        some[j - key] = j < from[r] ? 1 : row[r][(j - from[r]) * stride];
      x = _mm512_load_si512(some);
    }
    return _mm512_test_epi8_mask(x, x);
  }
};

// Transposes kMaskKeys keys of a mask into one bit per row, one LaneMask per key and vector.
static void read_mask(const MaskRows& rows, int64_t key, LaneMask* visible) {
  alignas(64) uint64_t bits[kPanel];
  // in this order the shuffles below, which work within 128 bits, keep the rows in order
  for (int r = 0; r < kPanel; r++) bits[r % 8 / 2 * 8 + r / 8 * 2 + r % 2] = rows.bits(r, key);
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  __m512i x[4];
  for (int i = 0; i < 4; i++) x[i] = _mm512_shuffle_epi8(_mm512_load_si512(bits + 8 * i), pairs);
  const __m512i low[2] = {_mm512_unpacklo_epi16(x[0], x[1]), _mm512_unpacklo_epi16(x[2], x[3])};
  const __m512i high[2] = {_mm512_unpackhi_epi16(x[0], x[1]), _mm512_unpackhi_epi16(x[2], x[3])};
  x[0] = _mm512_unpacklo_epi32(low[0], low[1]), x[1] = _mm512_unpackhi_epi32(low[0], low[1]);
  x[2] = _mm512_unpacklo_epi32(high[0], high[1]), x[3] = _mm512_unpackhi_epi32(high[0], high[1]);
  const __m512i apart = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // bytes of keys 16 i to 16 i + 7, then of the 8 after them
    __m512i y = _mm512_permutexvar_epi64(apart, x[i]);
#pragma GCC unroll 8
    for (int bit = 7; bit >= 0; bit--) {
      const uint64_t both = _mm512_movepi8_mask(y);
      const uint32_t first = (uint32_t)both, second = (uint32_t)(both >> 32);
      memcpy(visible + (16 * i + bit) * kVectors, &first, 4);
      memcpy(visible + (16 * i + 8 + bit) * kVectors, &second, 4);
      y = _mm512_add_epi8(y, y);
    }
  }
}

// Clears the keys outside of each row's ranges.
static void apply_ranges(const Panel& p, int64_t start, int64_t keys, LaneMask* visible) {
  for (int v = 0; v < p.vectors(); v++) {
    UVec first[2], count[2];
    for (int i = 0; i < 2; i++) {
      const IVec from = *(const UnalignedIVec*)(p.start[i] + v * kLanes),
                 to = *(const UnalignedIVec*)(p.stop[i] + v * kLanes);
      first[i] = (UVec)from, count[i] = (UVec)(to > from ? to - from : IVec{});
    }
    for (int64_t j = 0; j < keys; j++) {
      const UVec key = UVec{} + (uint32_t)(start + j);
      const LaneMask inside = _mm512_cmplt_epu32_mask((__m512i)(key - first[0]), (__m512i)count[0]) |
                              _mm512_cmplt_epu32_mask((__m512i)(key - first[1]), (__m512i)count[1]);
      visible[j * kVectors + v] &= inside;
    }
  }
}

// Which of the keys [start, stop) each row of the panel sees, by its mask and its ranges.
static void find_visible(const Attention& a, const RowBlock& block, const Panel& p, int64_t start, int64_t stop,
                         LaneMask* visible) {
  if (a.dense) {
    const MaskRows rows(a, block, p);
    for (int64_t key = start; key < stop; key += kMaskKeys) read_mask(rows, key, visible + (key - start) * kVectors);
  } else {
    memset(visible, 0xff, (size_t)(stop - start) * kVectors * sizeof(LaneMask));
  }
  if (!p.covers(start, stop)) apply_ranges(p, start, stop - start, visible);
}

// Whether all pairs are visible, and which keys some row sees.
static Visibility summarize(const LaneMask* visible, int64_t keys, int vectors, uint8_t* visible_keys) {
  const uint32_t every = vectors == kVectors ? ~0u : 0xffffu;
  uint32_t all = every, some = 0;
  for (int64_t j = 0; j < keys; j++) {
    uint32_t rows;
    memcpy(&rows, visible + j * kVectors, 4);
    rows &= every;
    all &= rows, some |= rows, visible_keys[j] = rows != 0;
  }
  return all == every ? Visibility::kAll : some == 0 ? Visibility::kNone : Visibility::kSome;
}

}  // namespace

#endif
