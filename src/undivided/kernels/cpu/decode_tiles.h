// The two products of a step on AMX, for 16-bit types and head sizes of whole tiles. K and V are read in place, as they lie:
//
//     S[key][row] += K[key][d pair] * Q[d pair][row]         A: 16 keys of K, B: pairs of the queries, made once a chunk
//     O[row][d]   += P[row][key, 0] * V[key][d, d + 1]       A: weights, B: 16 keys of V
//
// The second product contracts pairs of neighbours along d, of which one is wanted: a weight beside a zero gives the even
// columns, a zero beside it the odd ones, in 2 x kFewRows rows of one tile. That is half of AMX's rate, and no shuffle:
// memory is slower still. An infinite or NaN value reaches its neighbour's column (0 * NaN is NaN): sums that are not finite
// are computed again in vectors (see run_chunk). Groups of 16 keys that do not lie at one
// stride (a cache's small pages, a sequence's end) are copied first.
#pragma once

#include "amx.h"
#include "decode_step.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kGroup = kTileRows;  // keys of a tile
static_assert(kGroup == kAligned);

// A pair whose lower, whose upper half is the weight.
INLINE void split_weights(Vec w, UVec& lower, UVec& upper, BFloat16) {
  UVec bits = (UVec)w + 0x8000;
  lower = bits >> 16, upper = bits & 0xffff0000u;
}
INLINE void split_weights(Vec w, UVec& lower, UVec& upper, Float16) {
  lower = (UVec)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)w, _MM_FROUND_TO_NEAREST_INT));
  upper = lower << 16;
}

// Scores of 16 keys [key][16 rows] as scores[row][key], for four rows.
INLINE void turn_scores(const float* raw, float* scores) {
  Vec x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // keys i, i + 4, i + 8, i + 12
    __m512 y = _mm512_castps128_ps512(_mm_load_ps(raw + i * kLanes));
    y = _mm512_insertf32x4(y, _mm_load_ps(raw + (i + 4) * kLanes), 1);
    y = _mm512_insertf32x4(y, _mm_load_ps(raw + (i + 8) * kLanes), 2);
    x[i] = (Vec)_mm512_insertf32x4(y, _mm_load_ps(raw + (i + 12) * kLanes), 3);
  }
  __m512 a = _mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]), b = _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]);
  __m512 c = _mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]), d = _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]);
  store(scores, (Vec)_mm512_unpacklo_pd((__m512d)a, (__m512d)c));
  store(scores + kStep, (Vec)_mm512_unpackhi_pd((__m512d)a, (__m512d)c));
  store(scores + 2 * kStep, (Vec)_mm512_unpacklo_pd((__m512d)b, (__m512d)d));
  store(scores + 3 * kStep, (Vec)_mm512_unpackhi_pd((__m512d)b, (__m512d)d));
}

// Queries are [d block][d pair][row] pairs, sums are [d block][2 x kFewRows][16]: the rows' even columns, then their odd ones.
template <class Half>
class Tiles {
 public:
  typedef Half T;
  // weights of fp16 reach 2^15: small ones keep their bits
  static constexpr int kBits = kWeightBits<Half> == 0 ? 0 : 15;

  static constexpr int64_t kBlock = kTileRows * kLanes, kMostGroups = kStep / kGroup;
  static constexpr int64_t kScores = kMostGroups * kBlock;  // floats of a step's raw scores

  // A cache of less than a tile of keys would be copied, and vectors are faster at it.
  static bool fits(const Attention& a) {
    return a.qk_dim % kTileDepth == 0 && a.v_dim % kTileDepth == 0 && a.kv_len >= kGroup;
  }
  static int64_t q_floats(const Attention& a) { return a.qk_dim / kTileDepth * kBlock; }
  static int64_t sum_floats(const Attention& a) { return a.v_dim / kTileDepth * kBlock; }

  static void load_queries(const Attention& a, const T* const* from, int64_t rows, float* q) {
    for (int64_t d = 0; d < a.qk_dim; d += kTileDepth, q += kBlock) {
      Vec x[kLanes] = {};
#pragma GCC unroll 8
      for (int64_t r = 0; r < kFewRows; r++)
        if (r < rows) x[r] = load((const float*)(const void*)(from[r] + d));
      transpose(x);
      for (int i = 0; i < kLanes; i++) store(q + i * kLanes, x[i]);
    }
  }

  static void clear_sums(const Attention& a, const FewRows& few) { memset(few.sums, 0, (size_t)sum_floats(a) * 4); }

  // Turns at prefetching in the products of a step: one a tile.
  static int64_t score_turns(const Attention& a, int64_t, int64_t keys) { return groups_of(keys) * (a.qk_dim / kTileDepth); }
  static int64_t weigh_turns(const Attention& a, int64_t, int64_t keys) { return groups_of(keys) * (a.v_dim / kTileDepth); }

  // Into `raw` [key][16 rows], which `turned` makes scores.
  void score(const Attention& a, const FewRows& few, const Step<T>& step, int64_t n, float* raw, Ahead& ahead) {
    const Operand k = {step.k.row, step.keys, a.k_s, n * a.k_h};
    for (int64_t d = 0; d < a.qk_dim; d += 4 * kTileDepth)
      in_blocks(a.qk_dim - d, step.k.apart, [&](auto count, auto in_place) {
        score_blocks<decltype(count)::value, decltype(in_place)::value>(few.q + d / kTileDepth * kBlock, k, d, raw, ahead);
      });
  }
  float* turned(const FewRows& few, const float* raw, int64_t keys) {
    for (int64_t g = 0; g < groups_of(keys); g++)
      for (int64_t r = 0; r < few.rows; r += 4) turn_scores(raw + g * kBlock + r, scores_ + r * kStep + g * kGroup);
    return scores_;
  }

  void weigh(const Attention& a, const FewRows& few, const Step<T>& step, int64_t n, const float* weights,
             const float* decay, Ahead& ahead) {
    const int64_t groups = groups_of(step.keys);
    for (int64_t r = 0; r < few.rows; r++) {
      for (int64_t g = 0; g < groups; g++) {
        UVec lower, upper;
        split_weights(load(weights + r * kStep + g * kGroup), lower, upper, T());
        store(pairs_ + g * kBlock + r * kLanes, (Vec)lower);
        store(pairs_ + g * kBlock + (r + kFewRows) * kLanes, (Vec)upper);
      }
      if (decay[r] == 1.0f) continue;
      for (int64_t at = r * kLanes; at < sum_floats(a); at += kFewRows * kLanes)
        store(few.sums + at, load(few.sums + at) * decay[r]);
    }
    const Operand v = {step.v.row, step.keys, a.v_s, n * a.v_h};
    for (int64_t d = 0; d < a.v_dim; d += 4 * kTileDepth)
      in_blocks(a.v_dim - d, step.v.apart, [&](auto count, auto in_place) {
        weigh_blocks<decltype(count)::value, decltype(in_place)::value>(v, d, few.sums + d / kTileDepth * kBlock, ahead);
      });
  }

  static void store_sums(const Attention& a, const FewRows& few, int64_t r, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const float* from = few.sums + r * kLanes;
    for (int64_t d = 0; d < a.v_dim; d += kTileDepth, from += kBlock) {
      const __m512 even = (__m512)load(from), odd = (__m512)load(from + kFewRows * kLanes);
      store(to + d, (Vec)_mm512_permutex2var_ps(even, low, odd));
      store(to + d + kLanes, (Vec)_mm512_permutex2var_ps(even, high, odd));
    }
  }

 private:
  static int64_t groups_of(int64_t keys) { return (keys + kGroup - 1) / kGroup; }

  // Rows of K or V.
  struct Operand {
    const T* const* row;
    int64_t keys, stride, offset;
  };
  // Columns [d, d + 32) of a group as tile N.
  template <int N, bool InPlace>
  void load_group(const Operand& o, int64_t g, int64_t d) {
    const T* const* at = o.row + g * kGroup;
    if constexpr (InPlace) return tile_load<N>((const char*)(at[0] + o.offset + d), o.stride * 2);
    const int64_t count = smaller_of(kGroup, o.keys - g * kGroup);
    char* copy = copies_ + N % 2 * kTileBytes;
    for (int64_t i = 0; i < count; i++) memcpy(copy + i * 64, at[i] + o.offset + d, 64);
    memset(copy + count * 64, 0, (size_t)((kGroup - count) * 64));
    tile_load<N>(copy, 64);
  }

  // Call f with how many blocks of columns are computed together, and whether rows are read in place.
  template <class F>
  static void in_blocks(int64_t columns, uint32_t apart, F f) {
    if (apart) in_blocks(columns, f, std::false_type());
    else in_blocks(columns, f, std::true_type());
  }
  template <class F, class InPlace>
  static void in_blocks(int64_t columns, F f, InPlace in_place) {
    if (columns >= 4 * kTileDepth) f(std::integral_constant<int, 4>(), in_place);
    else if (columns >= 3 * kTileDepth) f(std::integral_constant<int, 3>(), in_place);
    else if (columns >= 2 * kTileDepth) f(std::integral_constant<int, 2>(), in_place);
    else f(std::integral_constant<int, 1>(), in_place);
  }

  // Both products read a group's rows from one end to the other before the next group's: L1 is filled from L2 half as fast again
  // as by columns. The processor renames tiles, so that one is enough for what is read, and one for the scores.
  template <int Blocks, bool InPlace>
  void score_blocks(const float* q, const Operand& k, int64_t d, float* raw, Ahead& shared) {
    Ahead ahead = shared;
    load_tiles<Blocks>(q);
    for (int64_t g = 0; g < groups_of(k.keys); g++) {
      char* const to = (char*)(raw + g * kBlock);
      if (d == 0) tile_zero<7>();
      else tile_load<7>(to, 64);
      load_group<4, InPlace>(k, g, d), tile_multiply<7, 4, 0>(T()), ahead.take();
      if constexpr (Blocks > 1) load_group<5, InPlace>(k, g, d + 32), tile_multiply<7, 5, 1>(T()), ahead.take();
      if constexpr (Blocks > 2) load_group<4, InPlace>(k, g, d + 64), tile_multiply<7, 4, 2>(T()), ahead.take();
      if constexpr (Blocks > 3) load_group<5, InPlace>(k, g, d + 96), tile_multiply<7, 5, 3>(T()), ahead.take();
      tile_store<7>(to, 64);
    }
    shared = ahead;
  }

  template <int Blocks, bool InPlace>
  void weigh_blocks(const Operand& v, int64_t d, float* sums, Ahead& shared) {
    Ahead ahead = shared;
    load_tiles<Blocks>(sums);
    for (int64_t g = 0; g < groups_of(v.keys); g++) {
      tile_load<6>((const char*)(pairs_ + g * kBlock), 64);
      load_group<4, InPlace>(v, g, d), tile_multiply<0, 6, 4>(T()), ahead.take();
      if constexpr (Blocks > 1) load_group<5, InPlace>(v, g, d + 32), tile_multiply<1, 6, 5>(T()), ahead.take();
      if constexpr (Blocks > 2) load_group<4, InPlace>(v, g, d + 64), tile_multiply<2, 6, 4>(T()), ahead.take();
      if constexpr (Blocks > 3) load_group<5, InPlace>(v, g, d + 96), tile_multiply<3, 6, 5>(T()), ahead.take();
    }
    store_tiles<Blocks>(sums);
    shared = ahead;
  }

  template <int Count>
  static void load_tiles(const float* from) {
    tile_load<0>((const char*)from, 64);
    if constexpr (Count > 1) tile_load<1>((const char*)(from + kBlock), 64);
    if constexpr (Count > 2) tile_load<2>((const char*)(from + 2 * kBlock), 64);
    if constexpr (Count > 3) tile_load<3>((const char*)(from + 3 * kBlock), 64);
  }
  template <int Count>
  static void store_tiles(float* to) {
    tile_store<0>((char*)to, 64);
    if constexpr (Count > 1) tile_store<1>((char*)(to + kBlock), 64);
    if constexpr (Count > 2) tile_store<2>((char*)(to + 2 * kBlock), 64);
    if constexpr (Count > 3) tile_store<3>((char*)(to + 3 * kBlock), 64);
  }

  alignas(64) float scores_[kFewRows * kStep];
  alignas(64) float pairs_[kMostGroups * kBlock] = {};  // rows beyond the real ones stay 0
  alignas(64) char copies_[2 * kTileBytes];
  TileSetup setup_;
};

}  // namespace

#endif
