// fp32 on bf16 tiles: each number is a sum of three bf16, and a product of two numbers six products of theirs.
//
//     x = x0 + x1 + x2,  |x1| <= 2^-9 |x|,  |x2| <= 2^-17 |x|          exact: 3 x 8 bits are the 24 that fp32 has
//     x y = x2 y0 + x1 y0 + x1 y1 + x0 y1 + x0 y2 + x0 y0              what is left out is below 2^-25 |x y|
//
// Each product is exact in fp32, where tiles add them up: 32 to one sum first, and that to the sum so far, so that there are fewer
// roundings than in a chain of multiply-adds. A tile instruction does 8192 products of halves in 16 cycles; six of them are
// 8192 products of fp32 in 96, for which vectors take 256.
//
// Tiles take what is below 2^-126 as 0, which the parts of small numbers are, and infinite numbers have no parts. So `Irregular`
// watches: where a problem has a number of 2^100 or more (weights go up to 2^15), one below 2^-100 other than 0, or NaN, all of it is
// done again in vectors.
#pragma once

#include "amx.h"
#include "modes.h"

namespace {

// Splitting numbers has to be shared by so many rows or keys. (Granite Rapids, times as fast as vectors, full / causal: 192 tokens
// 1.1 / 1.0, 256 1.1 to 1.3 / 1.05, 512 1.2 to 1.5 / 1.1 to 1.3, 2048 1.5 at D = 64 and 128, 1.2 at 32; documents of 64-512 tokens all in
// tiles .95.)
constexpr int64_t kFewestSplitRows = 128, kFewestSplitKeys = 256, kFewestSplitColumns = 32;
INLINE bool splits(const Attention& a) {
  return a.q_len * (a.heads / a.kv_heads) >= kFewestSplitRows && smaller_of(a.qk_dim, a.v_dim) >= kFewestSplitColumns;
}
// Documents whose rows see no more are left to vectors.
INLINE int64_t most_unsplit_keys(const Attention& a) { return a.ranges && a.columns != 2 ? 0 : kFewestSplitKeys - 1; }

// Whether some number seen so far has no parts.
class Irregular {
 public:
#if defined(UNDIVIDED_AMX)
  inline __attribute__((always_inline)) void see(Vec x) {
    const UVec size = (UVec)x << 1;  // in the order of |x|
    most_ = (UVec)_mm512_max_epu32((__m512i)most_, (__m512i)size);
    least_ = (UVec)_mm512_min_epu32((__m512i)least_, (__m512i)(size - 1));  // of zero the largest
  }
  bool found() const {
    return (_mm512_cmpge_epu32_mask((__m512i)most_, _mm512_set1_epi32((int)size_of(kLargest))) |
            _mm512_cmplt_epu32_mask((__m512i)least_, _mm512_set1_epi32((int)size_of(kSmallest) - 1))) != 0;
  }

 private:
  static constexpr int kLargest = 100, kSmallest = -100;  // as powers of two
  static constexpr uint32_t size_of(int power) { return (uint32_t)(127 + power) << 24; }
  UVec most_ = {}, least_ = ~UVec{};
#else
  bool found() const { return false; }
#endif
};

}  // namespace

#if defined(UNDIVIDED_AMX)

namespace {

// The next part of x, in the upper halves and with something below them; x loses it.
INLINE UVec take_part(Vec& x) {
  const UVec rounded = (UVec)x + 0x8000;
  x -= (Vec)(rounded & 0xffff0000u);
  return rounded;
}
INLINE Vec join_parts(UVec even, UVec odd) {
  return (Vec)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(even >> 16), (__m512i)odd);
}
// Pairs of the parts of two numbers in each lane.
INLINE void split_pairs(Vec even, Vec odd, Vec (&parts)[3]) {
#pragma GCC unroll 2
  for (int p = 0; p < 2; p++) {
    const UVec e = take_part(even), o = take_part(odd);
    parts[p] = join_parts(e, o);
  }
  parts[2] = join_parts((UVec)even, (UVec)odd);
}

// The upper halves of all lanes, one vector's behind the other's.
INLINE __m512i upper_halves(UVec low, UVec high) {
  alignas(64) static const uint16_t upper[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                               33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16((__m512i)low, _mm512_load_si512(upper), (__m512i)high);
}

INLINE Vec load_some(const float* p, int64_t count) {
  return count >= kLanes ? load(p) : (Vec)_mm512_maskz_loadu_ps(count > 0 ? (__mmask16)((1u << count) - 1) : 0, p);
}

// kLanes rows, or null pointers for rows of zeros, into lanes as pairs: to[part][d / 2][lane], zeros up to `depth` pairs.
static void split_rows(const float* const (&row)[kLanes], int64_t dim, int64_t depth, float* to, Irregular& irregular) {
  for (int64_t d = 0; d < 2 * depth; d += kLanes) {
    Vec x[kLanes], parts[3];
    for (int i = 0; i < kLanes; i++) {
      x[i] = row[i] && d < dim ? load_some(row[i] + d, dim - d) : Vec{};
      irregular.see(x[i]);
    }
    transpose(x);
    for (int i = 0; i < kLanes; i += 2) {
      split_pairs(x[i], x[i + 1], parts);
      for (int p = 0; p < 3; p++) store(to + (p * depth + (d + i) / 2) * kPanel, parts[p]);
    }
  }
}

// pack_k: groups of kTileRows keys, each of three parts. Unseen keys give zeros.
static void split_k(const float* k, int64_t stride, int64_t keys, int64_t padded, int64_t columns, const uint8_t* seen, char* to,
                    Irregular& irregular) {
  const int64_t steps = (columns + kTileDepth - 1) / kTileDepth, part = steps * kTileBytes;
  for (int64_t j = 0; j < padded; j++, k += stride) {
    char* row = to + j / kTileRows * 3 * part + j % kTileRows * 64;
    const bool is_seen = j < keys && seen[j];
    for (int64_t d = 0; d < columns; d += kTileDepth, row += kTileBytes) {
      Vec low = is_seen ? load_some(k + d, columns - d) : Vec{};
      Vec high = is_seen && d + kLanes < columns ? load_some(k + d + kLanes, columns - d - kLanes) : Vec{};
      irregular.see(low), irregular.see(high);
      for (int p = 0; p < 3; p++) {
        const UVec l = p < 2 ? take_part(low) : (UVec)low, h = p < 2 ? take_part(high) : (UVec)high;
        _mm512_store_si512(row + p * part, upper_halves(l, h));
      }
    }
  }
}

// transpose_v: groups of kTileRows columns, each of three parts of `capacity` steps.
static void split_v(const float* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* seen, int64_t capacity, char* to,
                    Irregular& irregular) {
  const int64_t part = capacity * kTileBytes;
  for (int64_t j = 0; j < keys; j += kTileDepth, v += kTileDepth * stride, seen += kTileDepth, to += kTileBytes)
    for (int64_t d = 0; d < columns; d += kTileRows) {
      Vec x[3][kLanes];
      for (int i = 0; i < kLanes; i++) {
        Vec pair[2], parts[3];
        for (int odd = 0; odd < 2; odd++) {
          const int64_t key = 2 * i + odd;
          pair[odd] = j + key < keys && seen[key] ? load_some(v + key * stride + d, columns - d) : Vec{};
          irregular.see(pair[odd]);
        }
        split_pairs(pair[0], pair[1], parts);
        for (int p = 0; p < 3; p++) x[p][i] = parts[p];
      }
      for (int p = 0; p < 3; p++) {
        transpose(x[p]);
        char* tile = to + d / kTileRows * 3 * part + p * part;
        for (int i = 0; i < kLanes; i++) store((float*)(tile + i * 64), x[p][i]);
      }
    }
}

}  // namespace

#endif
