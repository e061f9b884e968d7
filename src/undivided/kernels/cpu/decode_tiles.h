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

  // A cache of less than a tile of keys would be copied, and vectors are faster at it.
  static bool fits(const Attention& a) {
    return a.qk_dim % kTileDepth == 0 && a.v_dim % kTileDepth == 0 && a.kv_len >= kGroup;
  }
  static int64_t q_floats(const Attention& a) { return a.qk_dim / kTileDepth * kBlock; }
  static int64_t sum_floats(const Attention& a) { return a.v_dim / kTileDepth * kBlock; }

  static void load_queries(const Attention& a, const T* const* from, int64_t rows, float* q) {
    memset(q, 0, (size_t)q_floats(a) * 4);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < a.qk_dim; d += 2) memcpy(q + d / 2 * kLanes + r, from[r] + d, 4);
  }

  static void clear_sums(const Attention& a, const FewRows& few) { memset(few.sums, 0, (size_t)sum_floats(a) * 4); }

  void score(const Attention& a, const FewRows& few, const Step<T>& step, int64_t n, float* scores, Ahead& ahead) {
    Operand k = operand(step.k, step.keys, a.k_s, n * a.k_h);
    in_groups(k.groups, [&](auto count) { score_groups<decltype(count)::value>(few.q, k, a.qk_dim, ahead); });
    for (int64_t g = 0; g < k.groups; g++)
      for (int64_t r = 0; r < few.rows; r += 4) turn_scores(raw_ + g * kBlock + r, scores + r * kStep + g * kGroup);
  }

  void weigh(const Attention& a, const FewRows& few, const Step<T>& step, int64_t n, const float* weights,
             const float* decay, Ahead& ahead) {
    Operand v = operand(step.v, step.keys, a.v_s, n * a.v_h);
    for (int64_t r = 0; r < few.rows; r++) {
      for (int64_t g = 0; g < v.groups; g++) {
        UVec lower, upper;
        split_weights(load(weights + r * kStep + g * kGroup), lower, upper, T());
        store(pairs_ + g * kBlock + r * kLanes, (Vec)lower);
        store(pairs_ + g * kBlock + (r + kFewRows) * kLanes, (Vec)upper);
      }
      if (decay[r] == 1.0f) continue;
      for (int64_t at = r * kLanes; at < sum_floats(a); at += kFewRows * kLanes)
        store(few.sums + at, load(few.sums + at) * decay[r]);
    }
    for (int64_t d = 0; d < a.v_dim; d += 4 * kTileDepth)
      in_groups(smaller_of(4, (a.v_dim - d) / kTileDepth), [&](auto count) {
        weigh_blocks<decltype(count)::value>(v, d, a.v_dim, few.sums + d / kTileDepth * kBlock, ahead);
      });
  }

  static void store_sums(const Attention& a, const FewRows& few, int64_t r, float* to) {
    for (int64_t d = 0; d < a.v_dim; d += 2) {
      const float* from = few.sums + d / kTileDepth * kBlock + r * kLanes + d % kTileDepth / 2;
      to[d] = from[0], to[d + 1] = from[kFewRows * kLanes];
    }
  }

 private:
  static constexpr int64_t kBlock = kTileRows * kLanes;
  static constexpr int64_t kMostGroups = kStep / kGroup;

  // The rows of K or V in groups; whether each lies at one stride.
  struct Operand {
    const T* const* row;
    int64_t keys, groups, stride, offset;
    bool in_place[kMostGroups];
  };
  static Operand operand(const T* const* row, int64_t keys, int64_t stride, int64_t offset) {
    Operand o = {row, keys, (keys + kGroup - 1) / kGroup, stride, offset, {}};
    for (int64_t g = 0; g < o.groups; g++) {
      const T* const* at = row + g * kGroup;
      bool even = keys >= (g + 1) * kGroup;
      for (int64_t i = 1; i < kGroup && even; i++) even = at[i] - at[i - 1] == stride;
      o.in_place[g] = even;
    }
    return o;
  }

  // Columns [d, d + 32) of a group as tile N.
  template <int N>
  void load_group(const Operand& o, int64_t g, int64_t d) {
    const T* const* at = o.row + g * kGroup;
    if (o.in_place[g]) return tile_load<N>((const char*)(at[0] + o.offset + d), o.stride * 2);
    const int64_t count = smaller_of(kGroup, o.keys - g * kGroup);
    char* copy = copies_ + N % 2 * kTileBytes;
    for (int64_t i = 0; i < count; i++) memcpy(copy + i * 64, at[i] + o.offset + d, 64);
    memset(copy + count * 64, 0, (size_t)((kGroup - count) * 64));
    tile_load<N>(copy, 64);
  }

  template <class F>
  static void in_groups(int64_t count, F f) {
    if (count == 4) f(std::integral_constant<int, 4>());
    else if (count == 3) f(std::integral_constant<int, 3>());
    else if (count == 2) f(std::integral_constant<int, 2>());
    else f(std::integral_constant<int, 1>());
  }

  template <int Groups>
  void score_groups(const float* q, const Operand& k, int64_t dim, Ahead& shared) {
    Ahead ahead = shared;
    const int64_t share = (kGroup * kTileDepth + dim - 1) / dim;
    zero<Groups>();
    for (int64_t d = 0; d < dim; d += kTileDepth, q += kBlock) {
      tile_load<6>((const char*)q, 64);
      load_group<4>(k, 0, d), tile_multiply<0, 4, 6>(T()), Ahead::take(ahead, share);
      if constexpr (Groups > 1) load_group<5>(k, 1, d), tile_multiply<1, 5, 6>(T()), Ahead::take(ahead, share);
      if constexpr (Groups > 2) load_group<4>(k, 2, d), tile_multiply<2, 4, 6>(T()), Ahead::take(ahead, share);
      if constexpr (Groups > 3) load_group<5>(k, 3, d), tile_multiply<3, 5, 6>(T()), Ahead::take(ahead, share);
    }
    store_tiles<Groups>(raw_);
    shared = ahead;
  }

  template <int Blocks>
  void weigh_blocks(const Operand& v, int64_t d, int64_t dim, float* sums, Ahead& shared) {
    Ahead ahead = shared;
    const int64_t share = (kGroup * kTileDepth + dim - 1) / dim;
    load_tiles<Blocks>(sums);
    for (int64_t g = 0; g < v.groups; g++) {
      tile_load<6>((const char*)(pairs_ + g * kBlock), 64);
      load_group<4>(v, g, d), tile_multiply<0, 6, 4>(T()), Ahead::take(ahead, share);
      if constexpr (Blocks > 1) load_group<5>(v, g, d + 32), tile_multiply<1, 6, 5>(T()), Ahead::take(ahead, share);
      if constexpr (Blocks > 2) load_group<4>(v, g, d + 64), tile_multiply<2, 6, 4>(T()), Ahead::take(ahead, share);
      if constexpr (Blocks > 3) load_group<5>(v, g, d + 96), tile_multiply<3, 6, 5>(T()), Ahead::take(ahead, share);
    }
    store_tiles<Blocks>(sums);
    shared = ahead;
  }

  template <int Count>
  static void zero() {
    tile_zero<0>();
    if constexpr (Count > 1) tile_zero<1>();
    if constexpr (Count > 2) tile_zero<2>();
    if constexpr (Count > 3) tile_zero<3>();
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

  alignas(64) float raw_[kMostGroups * kBlock];
  alignas(64) float pairs_[kMostGroups * kBlock] = {};  // rows beyond the real ones stay 0
  alignas(64) char copies_[2 * kTileBytes];
  TileSetup setup_;
};

}  // namespace

#endif
