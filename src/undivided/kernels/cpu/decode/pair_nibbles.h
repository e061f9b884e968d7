// How rows of 4-bit numbers are read as pairs of bf16: PairFormat<Int4>, and NibblePairs<2> for heads of 64.
#pragma once

#include "decode/pair_formats.h"

#if defined(__AVX512BF16__)

namespace {

// A vector of bytes, a line, has four groups in its quarters: those of one key, or of two keys with two groups each, so
// that heads of 64 fill it. Numbers are multiplied as number + kInt4Bias, which is exact; the bias is subtracted from
// the sums.
template <int Keys>
struct NibblePairs {
  typedef Int4 T;
  static constexpr int64_t kKeysPerLine = Keys, kGroups = 4 / Keys, kColumns = kGroups * kGroupSize;
  static constexpr int64_t kQueryBlock = 17 * kLanes, kSumBlock = 9 * kLanes;
  static int64_t blocks(int64_t dim) { return round_up(dim, kColumns) / kColumns; }
  static int64_t query_floats(int64_t dim) { return blocks(dim) * kQueryBlock; }
  static int64_t sum_floats(int64_t dim) { return blocks(dim) * kSumBlock; }
  static constexpr int64_t kWeightPairs = 4, kWeightColumns = kColumns;
  static constexpr int kKeysPerPrefetch = 4 * Keys;

  // Lanes [4 g, 4 g + 4) of vector 4 i + t, which are those of four lines, have numbers 8 i + t and 8 i + t + 4 of the
  // group in quarter g. The last vector starts the sums.
  static void pack_query(const BFloat16* q, int64_t dim, float* to, int64_t step) {
    const __m512i order = index_of([](int n) { return n / 8 * 8 + n % 8 / 2 + n % 2 * 4; });
    const __m512i one = (__m512i)_mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
    for (int64_t d = 0; d < dim; d += kColumns, to += 17 * step)
      for (int64_t g = 0; g < 4; g++) {
        const __m512i x = load_line(q, 2 * (d + g % kGroups * kGroupSize), 2 * dim);
        uint32_t pairs[kLanes];
        _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, x));
        for (int64_t n = 0; n < kLanes; n++)
          _mm_storeu_si128((__m128i*)(to + n * step + 4 * g), _mm_set1_epi32((int)pairs[n]));
        const float sum = reduce_sum(dot_bf16(Vec{}, x, one));
        _mm_storeu_ps(to + 16 * step + 4 * g, _mm_set1_ps(-kInt4Bias * sum));
      }
  }
  // The scales of four lines, the first of which begins with key j: [line][quarter], from column d on.
  INLINE Vec four_scales(const HeadRows<T>& rows, int64_t j, int64_t d, int64_t dim) {
    __m128 s[4];
    if constexpr (Keys == 2) {
      const auto two = [&](int64_t key) { return (const __m64*)(rows.scale[key] + rows.scale_offset); };
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        s[i] = _mm_loadh_pi(_mm_loadl_pi(_mm_setzero_ps(), two(j + 2 * i)), two(j + 2 * i + 1));
    } else {
      const int64_t groups = (dim - d) / kGroupSize;
      const __mmask8 mask = groups >= 4 ? 15 : (__mmask8)((1 << groups) - 1);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        s[i] = _mm_maskz_loadu_ps(mask, rows.scale[j + i] + rows.scale_offset + d / kGroupSize);
    }
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(s[0]), s[1], 1),
                 high = _mm256_insertf128_ps(_mm256_castps128_ps256(s[2]), s[3], 1);
    return (Vec)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  // The numbers of key j, or those of keys j and `other`, from column d on.
  INLINE __m512i load_keys(const HeadRows<T>& rows, int64_t j, int64_t other, int64_t d, int64_t dim) {
    if constexpr (Keys == 1) return load_line(row_of(rows, j), d / 2, dim / 2);
    const __m256i low = _mm256_loadu_si256((const __m256i*)row_of(rows, j)),
                  high = _mm256_loadu_si256((const __m256i*)row_of(rows, other));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  INLINE __m512i load_row(const HeadRows<T>& k, int64_t first, int64_t i, int64_t d, int64_t dim) {
    return load_keys(k, first + Keys * i, first + Keys * i + 1, d, dim);
  }
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
    INLINE_MEMBER void end(const HeadRows<T>& k, int64_t first, int64_t line, int64_t d, int64_t dim) {
      const __m512i by_quarter = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512 scales = (__m512)four_scales(k, first + Keys * line, d, dim);
      const Vec scale = (Vec)_mm512_permutexvar_ps(by_quarter, scales);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r] += (this->acc[r][0] + this->acc[r][1]) * scale;
    }
    INLINE_MEMBER Vec total(int r) const { return sums[r]; }
  };
  INLINE Vec add_lines(const Vec (&sums)[4]) {
    if constexpr (Keys == 1) return sum_quarters(sums);
    // of keys 2 i, then of keys 2 i + 1, of each four lines
    const Vec x = pick_quarters<kEven>(sums[0], sums[1]) + pick_quarters<kOdd>(sums[0], sums[1]);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return (Vec)_mm512_permutexvar_ps(in_order, (__m512)x);
  }
  template <int R>
  INLINE void scores(const float* q, const HeadRows<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                     Vec (&found)[R]) {
    pair_scores<NibblePairs, R>(q, k, first, dim, prefetch, found);
  }

  // [row][pair of lines][quarter]: of each quarter, the weights of the two keys that a pair of lines has there. The
  // last vector of a block's sums gets those of the bias.
  static void pack_weights(const HeadRows<T>& v, int64_t d, int64_t dim, const float* weights, int64_t rows,
                           int64_t keys, uint32_t* pairs, const PairSums& to) {
    const __m512i repeat = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                  repeat_twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    // of eight lines' keys, [key][group], to pairs of neighbours
    const __m512i order = index_of([](int n) {
      const int quarter = n % 8 / 2;
      return n / 8 * 8 + quarter / (int)kGroups * 2 * (int)kGroups + n % 2 * (int)kGroups + quarter % (int)kGroups;
    });
    const auto repeated = [&](const float* w) {  // the weights of four lines' keys, for each group
      if constexpr (Keys == 1) return _mm512_permutexvar_ps(repeat, _mm512_castps128_ps512(_mm_loadu_ps(w)));
      return _mm512_permutexvar_ps(repeat_twice, _mm512_castps256_ps512(_mm256_loadu_ps(w)));
    };
    const __m512i bias = (__m512i)_mm512_cvtne2ps_pbh(_mm512_set1_ps(-kInt4Bias), _mm512_set1_ps(-kInt4Bias));
    float* bias_sums = to.sums + d / kColumns * kSumBlock + 8 * kLanes;
    for (int64_t j = 0; j < keys; j += 8 * Keys) {
      const Vec low = four_scales(v, j, d, dim), high = four_scales(v, j + 4 * Keys, d, dim);
      for (int64_t r = 0; r < rows; r++) {
        const float* w = weights + r * kDecodeStepKeys + j;
        const Vec a = (Vec)repeated(w) * low, b = (Vec)repeated(w + 4 * Keys) * high;
        const __m512i both = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        _mm512_storeu_si512(pairs + (r * kStepPairs + j / (2 * Keys)) * 4, both);
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
  static void add_values(const PairSums& to, const HeadRows<T>& v, int64_t d, int64_t dim, StepPrefetch& prefetch) {
    for (int half = 0; half < 2; half++) add_half<R>(to, v, d, dim, half, prefetch);
  }
  // Half of the columns of a block: lane 4 b + g of vector t is column 16 half + 4 b + t of the group in quarter g.
  template <int R>
  INLINE void add_half(const PairSums& to, const HeadRows<T>& v, int64_t d, int64_t dim, int half,
                       StepPrefetch& prefetch) {
    const __m512i order = index_of([&](int n) { return n / 2 % 4 * 8 + half * 4 + n / 8 + n % 2 * 32; });
    with_sums<R, 4>(to, d / kColumns * kSumBlock + half * 4 * kLanes, [&](Vec(&acc)[R][4]) {
      const auto add_lines = [&](int64_t j, __m512i even, __m512i odd) {
        __m512i weight[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
          weight[r] = _mm512_broadcast_i32x4(
              _mm_loadu_si128((const __m128i*)(to.weights + (r * kStepPairs + j / (2 * Keys)) * 4)));
        for_each_nibble(_mm512_permutex2var_epi16(even, order, odd), [&](auto t, __m512i x) {
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) acc[r][t] = dot_bf16(acc[r][t], weight[r], x);
        });
      };
      if constexpr (Keys == 1)
        for_each_pair<kKeysPerPrefetch>(v, to.keys, prefetch, [&](int64_t j, const T* even, const T* odd) {
          add_lines(j, load_line(even, d / 2, dim / 2), odd ? load_line(odd, d / 2, dim / 2) : __m512i{});
        });
      else  // keys beyond the last have a row in the table, and the weight 0
        for_each_four(to.keys, prefetch, [&](int64_t j) {
          add_lines(j, load_keys(v, j, j + 2, d, dim), load_keys(v, j + 1, j + 3, d, dim));
        });
    });
  }
  // Calls f(j) for every four keys, and prefetch.step() once per eight.
  template <class F>
  INLINE void for_each_four(int64_t keys, StepPrefetch& shared, F f) {
    StepPrefetch prefetch = shared;
    int64_t j = 0;
    for (; j + 8 <= keys; j += 8) prefetch.step(), f(j), f(j + 4);
    for (; j < keys; j += 4) f(j);
    shared = prefetch;
  }
  static void restore_sums(const float* from, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; d += kColumns, from += kSumBlock) {
      const Vec all = load(from + 8 * kLanes);
      for (int half = 0; half < 2; half++) {
        __m512i x[4], y[4];
        for (int i = 0; i < 4; i++) x[i] = (__m512i)load(from + (half * 4 + i) * kLanes);
        transpose_words(x, y);
        for (int g = 0; g < kGroups && d + g * kGroupSize < dim; g++) {
          Vec sum = {};
          for (int quarter = g; quarter < 4; quarter += (int)kGroups)
            sum += (Vec)y[quarter] + (all[quarter] + all[quarter + 4] + all[quarter + 8] + all[quarter + 12]);
          store(to + d + g * kGroupSize + half * kLanes, sum);
        }
      }
    }
  }
};

template <>
struct PairFormat<Int4> : NibblePairs<1> {};

}  // namespace

#endif
