// The two products of a decoding step on AMX, for 16-bit types, or 8-bit keys with bf16 queries, and head sizes of
// whole tiles. K and V of 16 bits are read in place; quantised ones become tiles first (see amx_quantized.h):
//
//     S[key][row] += K[key][d pair] * Q[d pair][row]         A: 16 keys of K, B: pairs of the queries, once per chunk
//     O[row][d]   += P[row][key, 0] * V[key][d, d + 1]       A: weights, B: 16 keys of V
//
// The second product contracts pairs of neighbours along d, of which only one is wanted: a weight beside a zero gives
// the even columns, a zero beside the weight the odd ones, in two rows of a tile for each row. That is half of AMX's
// rate but needs no shuffle, and memory is slower still. An infinite or NaN value reaches its neighbour's column (0 *
// NaN is NaN), so non-finite sums are recomputed on vectors (see run_chunk). Groups of 16 keys that are not at one
// stride (small pages of a cache, the end of a sequence) are copied first.
#pragma once

#include "decode/amx_quantized.h"

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kGroup = kTileRows;  // keys per tile
static_assert(kGroup == kStepAlignment);

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

// For up to `Rows` rows: 4, 8, 16 or 32. A tile holds the queries of up to 16 rows, or the weights of a unit of up to
// 8; 32 rows take two passes over the tiles of K and V, which are in L2 by then. Queries are pairs [pass][d block][d
// pair] [row]; sums are [unit][d block][2 x row][16], the rows' even columns, then their odd ones. Tiles of four rows
// are as fast as those of eight, but all of this must stay in L1 while K and V pass through it.
template <class Key, int Rows>
class DecodeAmx {
  static constexpr int kPassRows = Rows < kTilePassRows ? Rows : kTilePassRows, kPasses = Rows / kPassRows;
  static constexpr int kUnitRows = Rows < 8 ? Rows : 8, kUnits = Rows / kUnitRows;

 public:
  typedef Key T;
  typedef TileNumber<T> Number;
  // fp16 weights are scaled up to 2^15, so that small ones keep their bits
  static constexpr int kBits = kWeightBits<Number> == 0 ? 0 : 15;
  static constexpr int64_t kScores = kDecodeStepKeys * Rows;  // floats of a step's raw scores

  static int64_t max_rows(const Attention& a) {
    if (larger_of(a.qk_dim, a.v_dim) > kMaxTileColumns) return kFewDecodeRows;
    return kIsQuantized<T> || a.kv_len < kMinKeysOfTwoPasses ? kTilePassRows : kMaxTileRows;
  }
  // A cache of less than a tile of keys would be copied; vectors are faster then, and for few rows of quantised keys.
  static bool fits(const Attention& a) {
    if (kIsQuantized<T> && rows_of_group(a) < kMinTileRows<T>) return false;
    return a.qk_dim % kTileColumns<T> == 0 && a.v_dim % kTileColumns<T> == 0 && a.kv_len >= kGroup;
  }
  static int64_t q_floats(const Attention& a) { return kPasses * pass_floats(a); }
  static int64_t sum_floats(const Attention& a) { return kUnits * unit_floats(a); }

  static void load_queries(const Attention& a, const Number* const* from, int64_t rows, float* q) {
    for (int64_t first = 0; first < Rows; first += kPassRows)
      for (int64_t d = 0; d < a.qk_dim; d += kTileDepth, q += kQueryBlock) {
        Vec x[kLanes] = {};
#pragma GCC unroll 16
        for (int64_t r = 0; r < kPassRows; r++)
          if (first + r < rows) x[r] = query_of_tile<T>(from[first + r], d);
        transpose(x);
        for (int i = 0; i < kLanes; i++) memcpy(q + i * kPassRows, &x[i], kPassRows * 4);
      }
  }
  template <class Q>
  static void load_queries(const Attention&, const Q* const*, int64_t, float*) {}  // see DecodeAmx::fits

  static void clear_sums(const Attention& a, const HeadState& state) {
    memset(state.sums, 0, (size_t)sum_floats(a) * 4);
  }

  // Prefetch steps of the products: one per tile.
  static int64_t score_steps(const Attention& a, int64_t, int64_t keys) {
    return kPasses * groups_of(keys) * (a.qk_dim / kTileDepth);
  }
  static int64_t value_steps(const Attention& a, int64_t, int64_t keys) {
    return kPasses * groups_of(keys) * (a.v_dim / kTileDepth);
  }

  // Writes raw scores [pass][key][row], which to_scores transposes.
  void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* raw,
                       StepPrefetch& prefetch) {
    const Operand k = {keys_of(a, step, n), step.keys, a.k_s};
    const float* q = state.q;
    for (int pass = 0; pass < kPasses; pass++, raw += kPassScores) {
      for_each_block(a.qk_dim, step.k.split_groups, [&](int64_t d, auto count, auto in_place) {
        score_blocks<decltype(count)::value, decltype(in_place)::value>(q, k, d, raw, prefetch);
        q += count * kQueryBlock;
      });
      if constexpr (kIsQuantized<T>) multiply_by_key_scales<kPassRows>(k.rows, step.keys, raw);
    }
  }
  float* to_scores(const HeadState& state, const float* raw, int64_t keys) {
    for (int64_t r = 0; r < state.rows; r += 4) {
      const float* from = raw + r / kPassRows * kPassScores + r % kPassRows;
      for (int64_t g = 0; g < groups_of(keys); g++)
        transpose_scores<kPassRows>(from + g * kGroup * kPassRows, scores_ + r * kDecodeStepKeys + g * kGroup);
    }
    return scores_;
  }

  void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, const float* weights,
                       const float* decay, StepPrefetch& prefetch) {
    const Operand v = {values_of(a, step, n), step.keys, a.v_s};
    const int64_t unit = unit_floats(a);
    [[maybe_unused]] float scales[kDecodeStepKeys];
    if constexpr (kIsQuantized<T>) read_scales(v.rows, step.keys, scales);
    for (int64_t r = 0; r < state.rows; r++) {
      for (int64_t g = 0; g < groups_of(step.keys); g++) {
        Vec w = load(weights + r * kDecodeStepKeys + g * kGroup);
        if constexpr (kIsQuantized<T>) w *= load(scales + g * kGroup);
        UVec lower, upper;
        split_weights(w, lower, upper, Number());
        float* pairs = pairs_ + g * kPairFloats + row_of_units(r, kSumBlock);
        store(pairs, (Vec)lower), store(pairs + kUnitRows * kLanes, (Vec)upper);
      }
      if (decay[r] == 1.0f) continue;
      float* sums = state.sums + row_of_units(r, unit);
      for (int64_t at = 0; at < unit; at += kUnitRows * kLanes) store(sums + at, load(sums + at) * decay[r]);
    }
    for (int u = 0; u < kUnits; u += kUnits / kPasses) {
      float* sums = state.sums + u * unit;
      for_each_block(a.v_dim, step.v.split_groups, [&](int64_t d, auto count, auto in_place) {
        value_blocks<decltype(count)::value, decltype(in_place)::value>(v, d, pairs_ + u * kSumBlock, sums, unit,
                                                                        prefetch);
        sums += count * kSumBlock;
      });
    }
  }

  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const float* from = state.sums + row_of_units(r, unit_floats(a));
    for (int64_t d = 0; d < a.v_dim; d += kTileDepth, from += kSumBlock) {
      const __m512 even = (__m512)load(from), odd = (__m512)load(from + kUnitRows * kLanes);
      store(to + d, (Vec)_mm512_permutex2var_ps(even, low, odd));
      store(to + d + kLanes, (Vec)_mm512_permutex2var_ps(even, high, odd));
    }
    restore_columns<T>(to, a.v_dim);
  }

 private:
  static constexpr int64_t kQueryBlock = kTileRows * kPassRows, kSumBlock = 2 * kUnitRows * kLanes,
                           kPassScores = kDecodeStepKeys * kPassRows, kPairFloats = kUnits * kSumBlock;
  // Tiles 0 and 1 hold sums, 2 weights, 3 and 4 keys or values, 5 and 6 queries, 7 scores; during the second product of
  // 16 rows, 5 to 7 are the sums and weights of the second unit.
  static constexpr bool kTwoUnits = kPassRows == 2 * kUnitRows;
  static constexpr TileShape kSumsShape = {2 * kUnitRows, 64}, kKeysShape = {kTileRows, 64},
                             kRowsShape = {kTileRows, 4 * kPassRows};
  static constexpr TileShape kShapes[8] = {kSumsShape, kSumsShape, kSumsShape, kKeysShape,
                                           kKeysShape, kRowsShape, kRowsShape, kRowsShape};

  static int64_t pass_floats(const Attention& a) { return a.qk_dim / kTileDepth * kQueryBlock; }
  static int64_t unit_floats(const Attention& a) { return a.v_dim / kTileDepth * kSumBlock; }
  // Where row r begins in an array of units of so many floats.
  static int64_t row_of_units(int64_t r, int64_t floats) { return r / kUnitRows * floats + r % kUnitRows * kLanes; }
  static int64_t groups_of(int64_t keys) { return (keys + kGroup - 1) / kGroup; }

  // Rows of K or V.
  struct Operand {
    HeadRows<T> rows;
    int64_t keys, stride;
  };
  // Before load_group: converts columns [d, d + 64) of all groups, if they are quantised. A tile that is loaded just
  // after it was stored would wait for the stores.
  void convert_groups(const Operand& o, int64_t d) {
    if constexpr (kIsQuantized<T>)
      for (int64_t g = 0; g < groups_of(o.keys); g++) fill_tiles(o.rows, g * kGroup, d, copies_ + g * kCopyBytes);
  }
  // Loads columns [d, d + 32) of a group as tile N, 3 or 4.
  template <int N, bool InPlace>
  void load_group(const Operand& o, int64_t g, int64_t d) {
    char* copy = copies_ + (N - 3) * kTileBytes;
    if constexpr (kIsQuantized<T>) return tile_load<N>(copy + g * kCopyBytes, 64);
    const T* const* at = o.rows.row + g * kGroup;
    if constexpr (InPlace) return tile_load<N>((const char*)(at[0] + o.rows.offset + d), o.stride * 2);
    const int64_t count = smaller_of(kGroup, o.keys - g * kGroup);
    for (int64_t i = 0; i < count; i++) memcpy(copy + i * 64, at[i] + o.rows.offset + d, 64);
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
    convert_groups(k, d);
    tile_load<5>((const char*)q, 4 * kPassRows);
    if constexpr (Blocks > 1) tile_load<6>((const char*)(q + kQueryBlock), 4 * kPassRows);
    for (int64_t g = 0; g < groups_of(k.keys); g++, raw += kGroup * kPassRows) {
      if (d == 0) tile_zero<7>();
      else tile_load<7>((const char*)raw, 4 * kPassRows);
      load_group<3, InPlace>(k, g, d), tile_multiply<7, 3, 5>(Number()), prefetch.step();
      if constexpr (Blocks > 1)
        load_group<4, InPlace>(k, g, d + kTileDepth), tile_multiply<7, 4, 6>(Number()), prefetch.step();
      tile_store<7>((char*)raw, 4 * kPassRows);
    }
    shared = prefetch;
  }

  template <int Blocks, bool InPlace>
  void value_blocks(const Operand& v, int64_t d, const float* pairs, float* sums, int64_t unit, StepPrefetch& shared) {
    StepPrefetch prefetch = shared;
    convert_groups(v, d);
    char *first = (char*)sums, *second = (char*)(sums + unit);
    tile_load<0>(first, 64);
    if constexpr (Blocks > 1) tile_load<1>(first + kSumBlock * 4, 64);
    if constexpr (kTwoUnits) tile_load<5>(second, 64);
    if constexpr (kTwoUnits && Blocks > 1) tile_load<6>(second + kSumBlock * 4, 64);
    for (int64_t g = 0; g < groups_of(v.keys); g++, pairs += kPairFloats) {
      tile_load<2>((const char*)pairs, 64);
      if constexpr (kTwoUnits) tile_load<7>((const char*)(pairs + kSumBlock), 64);
      load_group<3, InPlace>(v, g, d), tile_multiply<0, 2, 3>(Number()), prefetch.step();
      if constexpr (kTwoUnits) tile_multiply<5, 7, 3>(Number());
      if constexpr (Blocks > 1)
        load_group<4, InPlace>(v, g, d + kTileDepth), tile_multiply<1, 2, 4>(Number()), prefetch.step();
      if constexpr (kTwoUnits && Blocks > 1) tile_multiply<6, 7, 4>(Number());
    }
    tile_store<0>(first, 64);
    if constexpr (Blocks > 1) tile_store<1>(first + kSumBlock * 4, 64);
    if constexpr (kTwoUnits) tile_store<5>(second, 64);
    if constexpr (kTwoUnits && Blocks > 1) tile_store<6>(second + kSumBlock * 4, 64);
    shared = prefetch;
  }

  alignas(64) float scores_[Rows * kDecodeStepKeys];
  alignas(64) float pairs_[kDecodeStepKeys / kGroup * kPairFloats] = {};  // unused rows stay 0
  static constexpr int64_t kCopyBytes = 2 * kTileBytes;
  alignas(64) char copies_[kIsQuantized<T> ? kDecodeStepKeys / kGroup * kCopyBytes : kCopyBytes];
  TileSetup setup_{kShapes};
};

}  // namespace

#endif
