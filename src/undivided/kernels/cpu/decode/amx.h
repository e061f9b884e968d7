// The two products of a decoding step on AMX, for 16-bit types and head sizes of whole tiles. K and V are read in
// place:
//
//     S[key][row] += K[key][d pair] * Q[d pair][row]         A: 16 keys of K, B: pairs of the queries, once per chunk
//     O[row][d]   += P[row][key, 0] * V[key][d, d + 1]       A: weights, B: 16 keys of V
//
// The second product contracts pairs of neighbours along d, of which only one is wanted: a weight beside a zero gives
// the even columns, a zero beside the weight the odd ones, in 2 x Rows rows of one tile. That is half of AMX's rate but
// needs no shuffle, and memory is slower still. An infinite or NaN value reaches its neighbour's column (0 * NaN is
// NaN), so non-finite sums are recomputed on vectors (see run_chunk). Groups of 16 keys that are not at one stride
// (small pages of a cache, the end of a sequence) are copied first.
#pragma once

#include "decode/step.h"
#include "gemm/amx.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kGroup = kTileRows;  // keys per tile
static_assert(kGroup == kStepAlignment);
static_assert(kMaxDecodeRows <= 8, "DecodeAmx holds no more");

// A pair whose lower half, and one whose upper half, is the weight.
INLINE void split_weights(Vec w, UVec& lower, UVec& upper, BFloat16) {
  UVec bits = (UVec)w + 0x8000;
  lower = bits >> 16, upper = bits & 0xffff0000u;
}
INLINE void split_weights(Vec w, UVec& lower, UVec& upper, Float16) {
  lower = (UVec)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)w, _MM_FROUND_TO_NEAREST_INT));
  upper = lower << 16;
}

// Transposes the scores of 16 keys, [key][Rows], to scores[row][key], for four rows.
template <int Rows>
INLINE void transpose_scores(const float* raw, float* scores) {
  Vec x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // keys i, i + 4, i + 8, i + 12
    __m512 y = _mm512_castps128_ps512(_mm_load_ps(raw + i * Rows));
    y = _mm512_insertf32x4(y, _mm_load_ps(raw + (i + 4) * Rows), 1);
    y = _mm512_insertf32x4(y, _mm_load_ps(raw + (i + 8) * Rows), 2);
    x[i] = (Vec)_mm512_insertf32x4(y, _mm_load_ps(raw + (i + 12) * Rows), 3);
  }
  __m512 a = _mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]), b = _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]);
  __m512 c = _mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]), d = _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]);
  store(scores, (Vec)_mm512_unpacklo_pd((__m512d)a, (__m512d)c));
  store(scores + kDecodeStepKeys, (Vec)_mm512_unpackhi_pd((__m512d)a, (__m512d)c));
  store(scores + 2 * kDecodeStepKeys, (Vec)_mm512_unpacklo_pd((__m512d)b, (__m512d)d));
  store(scores + 3 * kDecodeStepKeys, (Vec)_mm512_unpackhi_pd((__m512d)b, (__m512d)d));
}

// For up to `Rows` rows, 4 or 8. Queries are pairs [d block][d pair][row]; sums are [d block][2 x Rows][16], the rows'
// even columns, then their odd ones. Tiles of four rows are as fast as those of eight, but all of this must stay in L1
// while K and V pass through it.
template <class Half, int Rows>
class DecodeAmx {
 public:
  typedef Half T;
  // fp16 weights are scaled up to 2^15, so that small ones keep their bits
  static constexpr int kBits = kWeightBits<Half> == 0 ? 0 : 15;
  static constexpr int64_t kScores = kDecodeStepKeys * Rows;  // floats of a step's raw scores

  // A cache of less than a tile of keys would be copied; vectors are faster then.
  static bool fits(const Attention& a) {
    return a.qk_dim % kTileDepth == 0 && a.v_dim % kTileDepth == 0 && a.kv_len >= kGroup;
  }
  static int64_t q_floats(const Attention& a) { return a.qk_dim / kTileDepth * kQueryBlock; }
  static int64_t sum_floats(const Attention& a) { return a.v_dim / kTileDepth * kSumBlock; }

  static void load_queries(const Attention& a, const T* const* from, int64_t rows, float* q) {
    for (int64_t d = 0; d < a.qk_dim; d += kTileDepth, q += kQueryBlock) {
      Vec x[kLanes] = {};
#pragma GCC unroll 8
      for (int64_t r = 0; r < Rows; r++)
        if (r < rows) x[r] = load((const float*)(const void*)(from[r] + d));
      transpose(x);
      for (int i = 0; i < kLanes; i++) memcpy(q + i * Rows, &x[i], Rows * 4);
    }
  }

  static void clear_sums(const Attention& a, const HeadState& state) {
    memset(state.sums, 0, (size_t)sum_floats(a) * 4);
  }

  // Prefetch steps of the products: one per tile.
  static int64_t score_steps(const Attention& a, int64_t, int64_t keys) {
    return groups_of(keys) * (a.qk_dim / kTileDepth);
  }
  static int64_t value_steps(const Attention& a, int64_t, int64_t keys) {
    return groups_of(keys) * (a.v_dim / kTileDepth);
  }

  // Writes raw scores [key][Rows], which to_scores transposes.
  void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* raw,
                       StepPrefetch& prefetch) {
    const Operand k = {step.k.row, step.keys, a.k_s, n * a.k_h};
    const float* q = state.q;
    for_each_block(a.qk_dim, step.k.split_groups, [&](int64_t d, auto count, auto in_place) {
      score_blocks<decltype(count)::value, decltype(in_place)::value>(q, k, d, raw, prefetch);
      q += count * kQueryBlock;
    });
  }
  float* to_scores(const HeadState& state, const float* raw, int64_t keys) {
    for (int64_t g = 0; g < groups_of(keys); g++)
      for (int64_t r = 0; r < state.rows; r += 4)
        transpose_scores<Rows>(raw + g * kGroup * Rows + r, scores_ + r * kDecodeStepKeys + g * kGroup);
    return scores_;
  }

  void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, const float* weights,
                       const float* decay, StepPrefetch& prefetch) {
    for (int64_t r = 0; r < state.rows; r++) {
      for (int64_t g = 0; g < groups_of(step.keys); g++) {
        UVec lower, upper;
        split_weights(load(weights + r * kDecodeStepKeys + g * kGroup), lower, upper, T());
        store(pairs_ + g * kSumBlock + r * kLanes, (Vec)lower);
        store(pairs_ + g * kSumBlock + (r + Rows) * kLanes, (Vec)upper);
      }
      if (decay[r] == 1.0f) continue;
      for (int64_t at = r * kLanes; at < sum_floats(a); at += Rows * kLanes)
        store(state.sums + at, load(state.sums + at) * decay[r]);
    }
    const Operand v = {step.v.row, step.keys, a.v_s, n * a.v_h};
    float* sums = state.sums;
    for_each_block(a.v_dim, step.v.split_groups, [&](int64_t d, auto count, auto in_place) {
      value_blocks<decltype(count)::value, decltype(in_place)::value>(v, d, sums, prefetch);
      sums += count * kSumBlock;
    });
  }

  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const float* from = state.sums + r * kLanes;
    for (int64_t d = 0; d < a.v_dim; d += kTileDepth, from += kSumBlock) {
      const __m512 even = (__m512)load(from), odd = (__m512)load(from + Rows * kLanes);
      store(to + d, (Vec)_mm512_permutex2var_ps(even, low, odd));
      store(to + d + kLanes, (Vec)_mm512_permutex2var_ps(even, high, odd));
    }
  }

 private:
  static constexpr int64_t kQueryBlock = kTileRows * Rows, kSumBlock = 2 * Rows * kLanes;
  // Tiles 0 and 1 hold sums, 2 weights, 3 and 4 keys or values, 5 and 6 queries, 7 scores.
  static constexpr TileShape kSumsShape = {2 * Rows, 64}, kKeysShape = {kTileRows, 64},
                             kRowsShape = {kTileRows, 4 * Rows};
  static constexpr TileShape kShapes[8] = {kSumsShape, kSumsShape, kSumsShape, kKeysShape,
                                           kKeysShape, kRowsShape, kRowsShape, kRowsShape};

  static int64_t groups_of(int64_t keys) { return (keys + kGroup - 1) / kGroup; }

  // Rows of K or V.
  struct Operand {
    const T* const* row;
    int64_t keys, stride, offset;
  };
  // Loads columns [d, d + 32) of a group as tile N.
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

  // Calls f with a first column, the number of blocks to compute together from there, and whether rows are read in
  // place. Two blocks of a group's rows, then the next group's: L2 feeds L1 1.5 times as fast as with single blocks.
  template <class F>
  static void for_each_block(int64_t columns, uint32_t split_groups, F f) {
    if (split_groups) for_each_block(columns, f, std::false_type());
    else for_each_block(columns, f, std::true_type());
  }
  template <class F, class InPlace>
  static void for_each_block(int64_t columns, F f, InPlace in_place) {
    int64_t d = 0;
    for (; d + 2 * kTileDepth <= columns; d += 2 * kTileDepth) f(d, std::integral_constant<int, 2>(), in_place);
    if (d < columns) f(d, std::integral_constant<int, 1>(), in_place);
  }

  template <int Blocks, bool InPlace>
  void score_blocks(const float* q, const Operand& k, int64_t d, float* raw, StepPrefetch& shared) {
    StepPrefetch prefetch = shared;
    tile_load<5>((const char*)q, 4 * Rows);
    if constexpr (Blocks > 1) tile_load<6>((const char*)(q + kQueryBlock), 4 * Rows);
    for (int64_t g = 0; g < groups_of(k.keys); g++, raw += kGroup * Rows) {
      if (d == 0) tile_zero<7>();
      else tile_load<7>((const char*)raw, 4 * Rows);
      load_group<3, InPlace>(k, g, d), tile_multiply<7, 3, 5>(T()), prefetch.step();
      if constexpr (Blocks > 1)
        load_group<4, InPlace>(k, g, d + kTileDepth), tile_multiply<7, 4, 6>(T()), prefetch.step();
      tile_store<7>((char*)raw, 4 * Rows);
    }
    shared = prefetch;
  }

  template <int Blocks, bool InPlace>
  void value_blocks(const Operand& v, int64_t d, float* sums, StepPrefetch& shared) {
    StepPrefetch prefetch = shared;
    tile_load<0>((const char*)sums, 64);
    if constexpr (Blocks > 1) tile_load<1>((const char*)(sums + kSumBlock), 64);
    for (int64_t g = 0; g < groups_of(v.keys); g++) {
      tile_load<2>((const char*)(pairs_ + g * kSumBlock), 64);
      load_group<3, InPlace>(v, g, d), tile_multiply<0, 2, 3>(T()), prefetch.step();
      if constexpr (Blocks > 1)
        load_group<4, InPlace>(v, g, d + kTileDepth), tile_multiply<1, 2, 4>(T()), prefetch.step();
    }
    tile_store<0>((char*)sums, 64);
    if constexpr (Blocks > 1) tile_store<1>((char*)(sums + kSumBlock), 64);
    shared = prefetch;
  }

  alignas(64) float scores_[Rows * kDecodeStepKeys];
  alignas(64) float pairs_[kDecodeStepKeys / kGroup * kSumBlock] = {};  // unused rows stay 0
  alignas(64) char copies_[2 * kTileBytes];
  TileSetup setup_{kShapes};
};

}  // namespace

#endif
