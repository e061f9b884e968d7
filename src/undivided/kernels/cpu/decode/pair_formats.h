// How the rows of K and V of each type are read as pairs of bf16: PairFormat.
#pragma once

#include "decode/pair_products.h"

#if defined(__AVX512BF16__)

namespace {

// How numbers of a type are read:
//   query_floats(dim), pack_query   memory of a row's query, and its layout
//   scores<R>                       scores of R rows and keys [j, j + kLanes)
//   sum_floats(dim), restore_sums   memory of a row's sums, and their order
//   kWeightPairs, pack_weights      pairs of weights per row and pair of keys, for kWeightColumns columns
//   add_values<R>                   adds these columns of a step to the sums of R rows; calls prefetch.step()
//                                   value_passes<R>(dim) times per kKeysPerPrefetch keys
//   kKeysPerLine, add_lines         keys that share a vector, and their scores from the sums of its quarters
template <class T>
struct PairFormat;

// A vector has numbers of one key.
struct KeyPerLine {
  static constexpr int64_t kKeysPerLine = 1;
  INLINE Vec add_lines(const Vec (&sums)[4]) { return sum_quarters(sums); }
};

template <>
struct PairFormat<BFloat16> : KeyPerLine {
  typedef BFloat16 T;
  static constexpr int64_t kColumns = kPairColumns, kQueryBlock = 4 * kLanes;
  static int64_t query_floats(int64_t dim) { return dim / kColumns * kQueryBlock; }
  static int64_t sum_floats(int64_t dim) { return dim; }
  static constexpr int64_t kWeightPairs = 1, kWeightColumns = kAllColumns;
  static constexpr int kKeysPerPrefetch = 2;
  // Lanes [4 b, 4 b + 4) of vector i, which are those of four keys, have pair 4 b + i.
  static void pack_query(const T* q, int64_t dim, float* to, int64_t step) {
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    for (int64_t d = 0; d < dim; d += kColumns)
      for (int i = 0; i < 4; i++, to += step)
        _mm512_storeu_si512(
            to, _mm512_permutexvar_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(i)), _mm512_loadu_si512(q + d)));
  }

  INLINE __m512i load_row(const HeadRows<T>& k, int64_t first, int64_t i, int64_t d, int64_t) {
    return _mm512_loadu_si512(row_of(k, first + i) + d);
  }
  template <class F>
  INLINE void for_each_pair_of(__m512i x, __m512i y, int i, F f) {
    f(i, i % 2, x, y);
  }
  template <int R>
  using Scores = TwoChains<R>;
  template <int R>
  INLINE void scores(const float* q, const HeadRows<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<PairFormat, R>(q, k, first, dim, prefetch, found);
  }

  static void pack_weights(const HeadRows<T>&, int64_t, int64_t, const float* weights, int64_t rows, int64_t keys,
                           uint32_t* pairs, const PairSums&) {
    store_pairs(weights, nullptr, rows, keys, pairs);
  }
  // Loads of kPairColumns columns at once.
  template <int R>
  static constexpr int kLoads = R == 4 ? 2 : 4;
  template <int R>
  static int64_t value_passes(int64_t dim) {
    return dim / (kLoads<R> * kPairColumns) + dim % (kLoads<R> * kPairColumns) / kPairColumns;
  }
  template <int R>
  static void add_values(const PairSums& to, const HeadRows<T>& v, int64_t, int64_t dim, StepPrefetch& prefetch) {
    int64_t d = 0;
    for (; d + kLoads<R> * kPairColumns <= dim; d += kLoads<R> * kPairColumns)
      add_columns<R, kLoads<R>>(to, v, d, prefetch);
    for (; d < dim; d += kPairColumns) add_columns<R, 1>(to, v, d, prefetch);
  }
  template <int R, int Loads>
  INLINE void add_columns(const PairSums& to, const HeadRows<T>& v, int64_t d, StepPrefetch& prefetch) {
    with_sums<R, 2 * Loads>(to, d, [&](Vec(&acc)[R][2 * Loads]) {
      for_each_pair<kKeysPerPrefetch>(v, to.keys, prefetch, [&](int64_t j, const T* even, const T* odd) {
#pragma GCC unroll 4
        for (int l = 0; l < Loads; l++) {
          const int64_t at = d + l * kPairColumns;
          const __m512i x = _mm512_loadu_si512(even + at), y = odd ? _mm512_loadu_si512(odd + at) : __m512i{};
          const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const __m512i weight = _mm512_set1_epi32((int)to.weights[r * kStepPairs + j / 2]);
            acc[r][2 * l] = dot_bf16(acc[r][2 * l], weight, low);
            acc[r][2 * l + 1] = dot_bf16(acc[r][2 * l + 1], weight, high);
          }
        }
      });
    });
  }
  // Lane 4 b + i of the vectors of 32 columns is column 8 b + i, and 8 b + 4 + i.
  static void restore_sums(const float* from, int64_t dim, float* to) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < dim; d += kPairColumns) {
      const __m512 low = (__m512)load(from + d), high = (__m512)load(from + d + kLanes);
      store(to + d, (Vec)_mm512_permutex2var_ps(low, first, high));
      store(to + d + kLanes, (Vec)_mm512_permutex2var_ps(low, last, high));
    }
  }
};

template <class T>
struct PairFormat : KeyPerLine {  // numbers of 8 bits
  static constexpr int64_t kColumns = 64, kQueryBlock = kColumns;
  static int64_t query_floats(int64_t dim) { return round_up(dim, kColumns); }
  static int64_t sum_floats(int64_t dim) { return round_up(dim, kColumns); }
  static constexpr int64_t kWeightPairs = 1, kWeightColumns = kAllColumns;
  static constexpr int kKeysPerPrefetch = 4;

  // Lane 4 b + p of vector i has numbers 16 b + 4 i + 2 (p % 2) and the next one: two lanes for two pairs of a key.
  static void pack_query(const BFloat16* q, int64_t dim, float* to, int64_t step) {
    const __m512i first = _mm512_setr_epi32(0, 1, 0, 1, 8, 9, 8, 9, 16, 17, 16, 17, 24, 25, 24, 25);
    for (int64_t d = 0; d < dim; d += kColumns) {
      const __m512i low = load_line(q, 2 * d, 2 * dim), high = load_line(q, 2 * d + 64, 2 * dim);
      for (int i = 0; i < 4; i++, to += step)
        _mm512_storeu_si512(to,
                            _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, _mm512_set1_epi32(2 * i)), high));
    }
  }
  INLINE __m512i load_row(const HeadRows<T>& k, int64_t first, int64_t i, int64_t d, int64_t dim) {
    return load_line(row_of(k, first + i), d, dim);
  }
  template <class F>
  INLINE void for_each_pair_of(__m512i x, __m512i y, int i, F f) {
    __m512i low[2], high[2];  // keys 0 and 1 of four, and keys 2 and 3
    to_bf16<T>(x, low[0], high[0]), to_bf16<T>(y, low[1], high[1]);
    f(i, 0, low[0], low[1]), f(i, 1, high[0], high[1]);
  }
  template <int R>
  struct Scores : TwoChains<R> {  // chains are keys 0 and 1, and keys 2 and 3
    INLINE_MEMBER Vec total(int r) const {
      const __m512 low = (__m512)this->acc[r][0], high = (__m512)this->acc[r][1];
      return (Vec)_mm512_shuffle_ps(low, high, kEven) + (Vec)_mm512_shuffle_ps(low, high, kOdd);
    }
  };
  template <int R>
  INLINE void scores(const float* q, const HeadRows<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<PairFormat, R>(q, k, first, dim, prefetch, found);
    float scales[kLanes];
    for (int i = 0; i < kLanes; i++) scales[i] = k.scale[first + i][k.scale_offset];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) found[r] *= load(scales);
  }

  static void pack_weights(const HeadRows<T>& v, int64_t, int64_t, const float* weights, int64_t rows, int64_t keys,
                           uint32_t* pairs, const PairSums&) {
    float scales[kDecodeStepKeys];
    read_scales(v, keys, scales);
    store_pairs(weights, scales, rows, keys, pairs);
  }
  template <int R>
  static int64_t value_passes(int64_t dim) {
    return round_up(dim, kColumns) / kColumns;
  }
  template <int R>
  static void add_values(const PairSums& to, const HeadRows<T>& v, int64_t, int64_t dim, StepPrefetch& prefetch) {
    for (int64_t d = 0; d < dim; d += kColumns)
      with_sums<R, 4>(to, d, [&](Vec(&acc)[R][4]) {
        for_each_pair<kKeysPerPrefetch>(v, to.keys, prefetch, [&](int64_t j, const T* even, const T* odd) {
          const __m512i a = load_line(even, d, dim), b = odd ? load_line(odd, d, dim) : __m512i{};
          __m512i x[4];
          to_bf16<T>(_mm512_unpacklo_epi8(a, b), x[0], x[1]), to_bf16<T>(_mm512_unpackhi_epi8(a, b), x[2], x[3]);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const __m512i weight = _mm512_set1_epi32((int)to.weights[r * kStepPairs + j / 2]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) acc[r][c] = dot_bf16(acc[r][c], weight, x[c]);
          }
        });
      });
  }
  // Lane 4 b + i of vector c is column 16 b + 4 c + i.
  static void restore_sums(const float* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += kColumns) {
      Vec x[4];
      for (int i = 0; i < 4; i++) x[i] = load(from + d + i * kLanes);
      transpose_quarters(x);
      for (int i = 0; i < 4 && d + i * kLanes < dim; i++) store(to + d + i * kLanes, x[i]);
    }
  }
};

}  // namespace

#endif
