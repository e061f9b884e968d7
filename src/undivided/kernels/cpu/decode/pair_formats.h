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
template <class T>
struct PairFormat;

template <>
struct PairFormat<BFloat16> {
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

  INLINE __m512i load_row(const T* row, int64_t d, int64_t) { return _mm512_loadu_si512(row + d); }
  template <class F>
  INLINE void for_each_pair_of(__m512i x, __m512i y, int i, F f) {
    f(i, i % 2, x, y);
  }
  template <int R>
  using Scores = TwoChains<R>;
  template <int R>
  INLINE void scores(const float* q, const StepPart<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<PairFormat, R>(q, k, first, dim, prefetch, found);
  }

  static void pack_weights(const StepPart<T>&, int64_t, int64_t, const float* weights, int64_t rows, int64_t keys,
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
  static void add_values(const PairSums& to, const StepPart<T>& v, int64_t, int64_t dim, StepPrefetch& prefetch) {
    int64_t d = 0;
    for (; d + kLoads<R> * kPairColumns <= dim; d += kLoads<R> * kPairColumns)
      add_columns<R, kLoads<R>>(to, v, d, prefetch);
    for (; d < dim; d += kPairColumns) add_columns<R, 1>(to, v, d, prefetch);
  }
  template <int R, int Loads>
  INLINE void add_columns(const PairSums& to, const StepPart<T>& v, int64_t d, StepPrefetch& prefetch) {
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
struct PairFormat {  // numbers of 8 bits
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
  INLINE __m512i load_row(const T* row, int64_t d, int64_t dim) { return load_line(row, d, dim); }
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
  INLINE void scores(const float* q, const StepPart<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<PairFormat, R>(q, k, first, dim, prefetch, found);
    float scales[kLanes];
    for (int i = 0; i < kLanes; i++) scales[i] = k.scale[first + i][k.scale_offset];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) found[r] *= load(scales);
  }

  static void pack_weights(const StepPart<T>& v, int64_t, int64_t, const float* weights, int64_t rows, int64_t keys,
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
  static void add_values(const PairSums& to, const StepPart<T>& v, int64_t, int64_t dim, StepPrefetch& prefetch) {
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

// A block of 128 numbers has four groups, in the four quarters of a vector of bytes. Numbers are multiplied as number +
// kInt4Bias, which is exact; the bias is subtracted from the sums.
template <>
struct PairFormat<Int4> {
  typedef Int4 T;
  static constexpr int64_t kColumns = 128, kQueryBlock = 17 * kLanes, kSumBlock = 9 * kLanes;
  static int64_t blocks(int64_t dim) { return round_up(dim, kColumns) / kColumns; }
  static int64_t query_floats(int64_t dim) { return blocks(dim) * kQueryBlock; }
  static int64_t sum_floats(int64_t dim) { return blocks(dim) * kSumBlock; }
  static constexpr int64_t kWeightPairs = 4, kWeightColumns = kColumns;
  static constexpr int kKeysPerPrefetch = 4;

  // Lanes [4 g, 4 g + 4) of vector 4 i + t, which are those of four keys, have numbers 8 i + t and 8 i + t + 4 of group
  // g. The last vector starts the sums.
  static void pack_query(const BFloat16* q, int64_t dim, float* to, int64_t step) {
    const __m512i order = index_of([](int n) { return n / 8 * 8 + n % 8 / 2 + n % 2 * 4; });
    const __m512i one = (__m512i)_mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
    for (int64_t d = 0; d < dim; d += kColumns, to += 17 * step)
      for (int64_t g = 0; g < 4; g++) {
        const __m512i x = load_line(q, 2 * (d + g * kGroupSize), 2 * dim);
        uint32_t pairs[kLanes];
        _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, x));
        for (int64_t n = 0; n < kLanes; n++)
          _mm_storeu_si128((__m128i*)(to + n * step + 4 * g), _mm_set1_epi32((int)pairs[n]));
        const float sum = reduce_sum(dot_bf16(Vec{}, x, one));
        _mm_storeu_ps(to + 16 * step + 4 * g, _mm_set1_ps(-kInt4Bias * sum));
      }
  }
  // The scales of four keys, of the groups from column d on: [key][group].
  INLINE Vec four_scales(const StepPart<T>& part, int64_t j, int64_t d, int64_t dim) {
    const int64_t groups = (dim - d) / kGroupSize;
    const __mmask8 mask = groups >= 4 ? 15 : (__mmask8)((1 << groups) - 1);
    __m128 s[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) s[i] = _mm_maskz_loadu_ps(mask, part.scale[j + i] + part.scale_offset + d / kGroupSize);
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(s[0]), s[1], 1),
                 high = _mm256_insertf128_ps(_mm256_castps128_ps256(s[2]), s[3], 1);
    return (Vec)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  INLINE __m512i load_row(const T* row, int64_t d, int64_t dim) { return load_line(row, d / 2, dim / 2); }
  template <class F>
  INLINE void for_each_pair_of(__m512i x, __m512i y, int i, F f) {
    f(4 * i, 0, nibbles<0>(x), nibbles<0>(y)), f(4 * i + 1, 1, nibbles<1>(x), nibbles<1>(y));
    f(4 * i + 2, 0, nibbles<2>(x), nibbles<2>(y)), f(4 * i + 3, 1, nibbles<3>(x), nibbles<3>(y));
  }
  template <int R>
  struct Scores : TwoChains<R> {
    Vec sums[R] = {};
    INLINE_MEMBER void begin(const float* block) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) this->acc[r][0] = load(block + (16 * R + r) * kLanes), this->acc[r][1] = Vec{};
    }
    INLINE_MEMBER void end(const StepPart<T>& k, int64_t j, int64_t d, int64_t dim) {
      const __m512i by_group = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const Vec scale = (Vec)_mm512_permutexvar_ps(by_group, (__m512)four_scales(k, j, d, dim));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r] += (this->acc[r][0] + this->acc[r][1]) * scale;
    }
    INLINE_MEMBER Vec total(int r) const { return sums[r]; }
  };
  template <int R>
  INLINE void scores(const float* q, const StepPart<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<PairFormat, R>(q, k, first, dim, prefetch, found);
  }

  // [row][pair of keys][group]. The last vector of a block's sums gets those of the bias.
  static void pack_weights(const StepPart<T>& v, int64_t d, int64_t dim, const float* weights, int64_t rows,
                           int64_t keys, uint32_t* pairs, const PairSums& to) {
    const __m512i repeat = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    // of 8 keys, [key][group], to pairs of keys
    const __m512i order = index_of([](int n) { return n / 8 * 8 + n % 2 * 4 + n % 8 / 2; });
    const __m512i bias = (__m512i)_mm512_cvtne2ps_pbh(_mm512_set1_ps(-kInt4Bias), _mm512_set1_ps(-kInt4Bias));
    float* bias_sums = to.sums + d / kColumns * kSumBlock + 8 * kLanes;
    for (int64_t j = 0; j < keys; j += 8) {
      const Vec low = four_scales(v, j, d, dim), high = four_scales(v, j + 4, d, dim);
      for (int64_t r = 0; r < rows; r++) {
        const float* w = weights + r * kDecodeStepKeys + j;
        const Vec a = (Vec)_mm512_permutexvar_ps(repeat, _mm512_castps128_ps512(_mm_loadu_ps(w))) * low,
                  b = (Vec)_mm512_permutexvar_ps(repeat, _mm512_castps128_ps512(_mm_loadu_ps(w + 4))) * high;
        const __m512i both = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        _mm512_storeu_si512(pairs + (r * kStepPairs + j / 2) * 4, both);
        float* sums = bias_sums + r * to.stride;
        store(sums, dot_bf16(load(sums), both, bias));
      }
    }
  }
  template <int R>
  static int64_t value_passes(int64_t dim) {
    return 2 * blocks(dim);
  }
  template <int R>
  static void add_values(const PairSums& to, const StepPart<T>& v, int64_t d, int64_t dim, StepPrefetch& prefetch) {
    for (int half = 0; half < 2; half++) add_half<R>(to, v, d, dim, half, prefetch);
  }
  // Half of the columns of a block: lane 4 b + g of vector t is column 16 half + 4 b + t of group g.
  template <int R>
  INLINE void add_half(const PairSums& to, const StepPart<T>& v, int64_t d, int64_t dim, int half,
                       StepPrefetch& prefetch) {
    const __m512i order = index_of([&](int n) { return n / 2 % 4 * 8 + half * 4 + n / 8 + n % 2 * 32; });
    with_sums<R, 4>(to, d / kColumns * kSumBlock + half * 4 * kLanes, [&](Vec(&acc)[R][4]) {
      for_each_pair<kKeysPerPrefetch>(v, to.keys, prefetch, [&](int64_t j, const T* even, const T* odd) {
        const __m512i a = load_line(even, d / 2, dim / 2), b = odd ? load_line(odd, d / 2, dim / 2) : __m512i{};
        __m512i weight[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
          weight[r] =
              _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(to.weights + (r * kStepPairs + j / 2) * 4)));
        for_each_nibble(_mm512_permutex2var_epi16(a, order, b), [&](auto t, __m512i x) {
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) acc[r][t] = dot_bf16(acc[r][t], weight[r], x);
        });
      });
    });
  }
  static void restore_sums(const float* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += kColumns, from += kSumBlock) {
      const Vec all = load(from + 8 * kLanes);
      for (int half = 0; half < 2; half++) {
        __m512i x[4], y[4];
        for (int i = 0; i < 4; i++) x[i] = (__m512i)load(from + (half * 4 + i) * kLanes);
        transpose_parts(x, y);
        for (int g = 0; g < 4 && d + g * kGroupSize < dim; g++)
          store(to + d + g * kGroupSize + half * kLanes, (Vec)y[g] + (all[g] + all[g + 4] + all[g + 8] + all[g + 12]));
      }
    }
  }
};

}  // namespace

#endif
