// Dropout as a pure function of (seed, sequence, head, query position, key position): kernels/philox.py, vectorised.
//
// Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). A lane
// is a query row; one counter (j // 8, i, h, b) gives a row eight 16-bit draws, for the keys 8 * (j // 8) .. + 7. Even
// and odd lanes are computed separately, each in the low 32 bits of a 64-bit lane, which is what the multiplier reads:
// a round takes 2 products, 2 shifts and 2 three-way xors, about 0.8 instructions per entry. The high 32 bits are
// ignored.
#pragma once

#include "abi/kernels.h"
#include "simd/vec.h"

namespace {

using undivided::RowBlock;

typedef uint64_t Wide __attribute__((vector_size(kLanes * 4)));

// Which lanes of a vector are kept.
#if defined(__AVX512F__)
typedef __mmask16 LaneMask;
INLINE LaneMask keep_mask(UVec draw, uint32_t threshold) {
  return _mm512_cmpge_epu32_mask((__m512i)draw, _mm512_set1_epi32((int)threshold));
}
INLINE Vec zero_unless(LaneMask keep, Vec x) { return (Vec)_mm512_maskz_mov_ps(keep, (__m512)x); }
#else
typedef IVec LaneMask;
// both are below 2^17
INLINE LaneMask keep_mask(UVec draw, uint32_t threshold) { return (IVec)draw >= (int32_t)threshold; }
INLINE Vec zero_unless(LaneMask keep, Vec x) { return (Vec)((IVec)x & keep); }
#endif

// The low 32 bits of every lane times m.
INLINE Wide product(Wide x, uint32_t m) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(m));
#elif defined(UNDIVIDED_NEON)
  return (Wide)vmull_n_u32(vmovn_u64((uint64x2_t)x), m);
#else
  return (x & 0xffffffffu) * m;
#endif
}

// The Philox counters of a panel's rows.
struct DropoutRows {
  uint32_t position[kPanel], head[kPanel], sequence[kPanel];
};

static void read_dropout_rows(const Attention& a, const RowBlock& block, int64_t first, int64_t rows, DropoutRows& to) {
  for (int64_t r = 0; r < kPanel; r++) {
    const int64_t virtual_row = block.row + first + (r < rows ? r : rows - 1), row = virtual_row % a.q_len;
    to.position[r] = (uint32_t)a.dropout_row[block.batch * a.dropout_row_b + row];
    to.sequence[r] = (uint32_t)a.dropout_sequence[block.batch * a.dropout_sequence_b + row];
    to.head[r] = (uint32_t)(a.dropout_head + block.first_head + virtual_row / a.q_len);
  }
}

// The four words of kLanes rows for one group of eight keys.
INLINE void philox(const DropoutRows& rows, int v, uint32_t group, uint64_t seed, UVec (&words)[4]) {
  Wide c[4][2];
  const uint32_t* counters[3] = {rows.position, rows.head, rows.sequence};
  c[0][0] = c[0][1] = Wide{} + group;
#pragma GCC unroll 3
  for (int w = 0; w < 3; w++) {
    Wide both = (Wide)load((const float*)(const void*)(counters[w] + v * kLanes));
    c[w + 1][0] = both, c[w + 1][1] = both >> 32;
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Wide p0 = product(c[0][half], 0xD2511F53u), p1 = product(c[2][half], 0xCD9E8D57u);
      c[0][half] = (p1 >> 32) ^ c[1][half] ^ (Wide{} + k0), c[1][half] = p1;
      c[2][half] = (p0 >> 32) ^ c[3][half] ^ (Wide{} + k1), c[3][half] = p0;
    }
#pragma GCC unroll 4
  for (int w = 0; w < 4; w++) words[w] = (UVec)((c[w][0] & 0xffffffffu) | c[w][1] << 32);
}

// Which weights of a panel and keys [start, stop) are kept: keep[(key - start) * kVectors + v].
static __attribute__((noinline)) void draw_keep_masks(const Attention& a, int64_t batch, const DropoutRows& rows,
                                                      int64_t start, int64_t stop, LaneMask* keep) {
  const int32_t* keys = a.key_position + batch * a.key_position_b;
  const uint32_t threshold = (uint32_t)a.dropout;
  for (int64_t j = start; j < stop;) {
    const int32_t group = keys[j] >> 3;
    int64_t end = j + 1;
    while (end < stop && keys[end] >> 3 == group) end++;
    for (int v = 0; v < kVectors; v++) {
      UVec words[4];
      philox(rows, v, (uint32_t)group, (uint64_t)a.seed, words);
      for (int64_t i = j; i < end; i++) {
        UVec word = words[(keys[i] & 7) / 2];
        keep[(i - start) * kVectors + v] = keep_mask(keys[i] & 1 ? word >> 16 : word & 0xffffu, threshold);
      }
    }
    j = end;
  }
}

}  // namespace
