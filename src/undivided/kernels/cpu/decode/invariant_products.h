// The products of decoding with batch_invariant, each sum in the order of gemm/vector.h: lanes are keys, then columns.
#pragma once

#include "decode/chunk.h"
#include "gemm/dequantize.h"

namespace {

// Calls f with the number of rows that are computed, 1, 2, 4 or 8, as a constant.
template <class F>
INLINE void with_padded_rows(int64_t rows, F f) {
  if (rows == 1) return f(std::integral_constant<int, 1>());
  if (rows == 2) return f(std::integral_constant<int, 2>());
  if constexpr (kMaxFewRows > 4)
    if (rows > 4) return f(std::integral_constant<int, 8>());
  f(std::integral_constant<int, 4>());
}

// The sums of K vectors of keys and R rows, chain after chain.
template <int K, int R>
INLINE void add_chain(const Vec (&acc)[K][R], bool has_earlier, Vec (&sum)[K][R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int k = 0; k < K; k++) sum[k][r] = has_earlier ? sum[k][r] + acc[k][r] : acc[k][r];
}
template <int K, int R>
INLINE void store_scores(const Vec (&sum)[K][R], float* scores, int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int k = 0; k < K; k++) store(scores + r * stride + k * kLanes, sum[k][r]);
}

// Calls f(c, k, x) with x[i] = Scalars c + i of the k-th of K vectors of keys, one key per lane, for all `count`
// Scalars of a row; k is a constant.
template <class Mode, int K = 1, class F>
INLINE void for_each_key_lanes(const typename Mode::T* const* row, int64_t offset, int64_t from, int64_t to,
                               StepPrefetch& prefetch, F f) {
  constexpr int64_t step = Mode::Arith::kPairs ? 2 : 1;
  for (int64_t c = from; c < to; c += kLanes) {
    const auto take = [&](auto k) INLINE_LAMBDA {
      prefetch.step();
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] = load_lanes<Mode>(row[k.value * kLanes + i] + offset + c * step);
      transpose(x);
      f(c, k, x);
    };
    take(std::integral_constant<int, 0>());
    if constexpr (K == 2) take(std::integral_constant<int, 1>());
  }
}

// Vectors of keys that score_keys_in_lanes takes together: the sum of a key and a row is a chain, and one or two chains
// would wait for themselves.
constexpr int key_vectors_at_once(int rows) { return rows <= 2 ? 2 : 1; }
// Scores of R rows with K vectors of keys, [row][key]; queries are [Scalar][row].
template <class Mode, int R, int K>
static __attribute__((noinline)) void score_keys_in_lanes(const float* q, const typename Mode::T* const* row,
                                                          int64_t offset, int64_t count, float* scores, int64_t stride,
                                                          StepPrefetch& shared) {
  typedef typename Mode::Arith Arith;
  constexpr int64_t chain = kMaxChain / (Arith::kPairs ? 2 : 1);
  StepPrefetch prefetch = shared;
  Vec sum[K][R] = {};
  for (int64_t from = 0; from < count; from += chain) {
    Vec acc[K][R] = {};
    for_each_key_lanes<Mode, K>(row, offset, from, smaller_of(from + chain, count), prefetch,
                                [&](int64_t c, auto k, const Vec(&x)[kLanes]) INLINE_LAMBDA {
#pragma GCC unroll 16
                                  for (int i = 0; i < kLanes; i++)
                                    add_rows_of<Arith>(acc[k.value], q + (c + i) * R, x[i],
                                                       std::make_integer_sequence<int, R>());
                                });
    add_chain(acc, from > 0, sum);
  }
  store_scores(sum, scores, stride);
  shared = prefetch;
}

// Scores in two steps, for more rows, or keys that are in L1: transposes `vectors` vectors of keys, to
// [Scalar][vector], and multiplies K vectors, which share the reads of the queries.
template <class Mode>
static __attribute__((noinline)) void transpose_keys(const typename Mode::T* const* row, int64_t offset, int64_t count,
                                                     int64_t vectors, float* keys, StepPrefetch& shared) {
  StepPrefetch prefetch = shared;
  for (int64_t v = 0; v < vectors; v++)
    for_each_key_lanes<Mode>(row + v * kLanes, offset, 0, count, prefetch,
                             [&](int64_t c, auto, const Vec(&x)[kLanes]) INLINE_LAMBDA {
#pragma GCC unroll 16
                               for (int i = 0; i < kLanes; i++) store(keys + ((c + i) * vectors + v) * kLanes, x[i]);
                             });
  shared = prefetch;
}
#if defined(__AVX512BF16__)
// The same of quantised keys.
[[maybe_unused]] static __attribute__((noinline)) void transpose_quantized(int64_t format, const Int8* const* row,
                                                                           int64_t offset, const float* const* scale,
                                                                           int64_t scale_offset, int64_t count,
                                                                           int64_t vectors, float* keys,
                                                                           StepPrefetch& shared) {
  StepPrefetch prefetch = shared;
  with_format(format, [&](auto type) {
    typedef Pointee<decltype(type)> T;
    for (int64_t v = 0; v < vectors; v++, row += kLanes, scale += kLanes)
      for (int64_t c = 0; c < count; c += kLanes) {
        prefetch.step();
        Vec x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++)
          x[i] = (Vec)dequantized_pairs((const T*)(const void*)(row[i] + offset), scale[i] + scale_offset, 2 * c);
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) store(keys + ((c + i) * vectors + v) * kLanes, x[i]);
      }
  });
  shared = prefetch;
}
#endif
// The same for numbers of 8 bits: transposes four of them per lane, to [four numbers][vector]. `count`: numbers of a
// row, a multiple of 4 kLanes.
[[maybe_unused]] static __attribute__((noinline)) void transpose_bytes(const Int8* const* row, int64_t offset,
                                                                       int64_t count, int64_t vectors, float* keys) {
  for (int64_t v = 0; v < vectors; v++, row += kLanes)
    for (int64_t c = 0; c < count / 4; c += kLanes) {
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] = load((const float*)(const void*)(row[i] + offset + 4 * c));
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(keys + ((c + i) * vectors + v) * kLanes, x[i]);
    }
}
// Four numbers of 8 bits per lane as fp32, or as two pairs of bf16.
template <class Arith>
constexpr int kOfFour = Arith::kPairs ? 2 : 4;
template <class Arith, class T>
INLINE void widen_four(Vec four, Vec (&x)[kOfFour<Arith>]) {
#if defined(__AVX512BF16__)
  if constexpr (Arith::kPairs) {
    __m512i lower, upper;
    look_up((__m512i)four, (const T*)nullptr, lower, upper);
    upper = with_sign(upper, (__m512i)four);
    x[0] = (Vec)_mm512_permutex2var_epi8(lower, _mm512_load_si512(kZipIndex.first), upper);
    x[1] = (Vec)_mm512_permutex2var_epi8(lower, _mm512_load_si512(kZipIndex.last), upper);
    return;
  }
#endif
  if constexpr (!Arith::kPairs) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      x[i] = widened_bytes((UVec)((IVec)((UVec)four << (24 - 8 * i)) >> 24), (const T*)nullptr);
  }
}
// As score_transposed, of numbers of 8 bits. Calls prefetch.step() once per kBytesPerPrefetch numbers of a row: with
// the lines of a whole transposition at once, decoding from memory took 1.1 times as long.
constexpr int64_t kBytesPerPrefetch = 16;
template <class Arith, class T, int R, int K>
static __attribute__((noinline)) void score_bytes(const float* q, const float* keys, int64_t count, float* scores,
                                                  int64_t stride, StepPrefetch& shared) {
  StepPrefetch prefetch = shared;
  constexpr int each = kOfFour<Arith>;
  constexpr int64_t chain = kMaxChain / 4;
  Vec sum[K][R] = {};
  for (int64_t from = 0; from < count; from += chain) {
    Vec acc[K][R] = {};
    for (int64_t c = from, to = smaller_of(from + chain, count); c < to; c++) {
      if (c % (kBytesPerPrefetch / 4) == 0) prefetch.step();
      Vec x[K][each];
#pragma GCC unroll 2
      for (int k = 0; k < K; k++) widen_four<Arith, T>(load(keys + (c * K + k) * kLanes), x[k]);
#pragma GCC unroll 4
      for (int i = 0; i < each; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int k = 0; k < K; k++)
            Arith::add(acc[k][r], fetch<typename Arith::Scalar>(q + (c * each + i) * R + r), x[k][i]);
    }
    add_chain(acc, from > 0, sum);
  }
  store_scores(sum, scores, stride);
  shared = prefetch;
}
template <class Arith, int R, int K>
static __attribute__((noinline)) void score_transposed(const float* q, const float* keys, int64_t count, float* scores,
                                                       int64_t stride) {
  constexpr int64_t chain = kMaxChain / (Arith::kPairs ? 2 : 1);
  Vec sum[K][R] = {};
  for (int64_t from = 0; from < count; from += chain) {
    Vec acc[K][R] = {};
    for (int64_t c = from, to = smaller_of(from + chain, count); c < to; c++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int k = 0; k < K; k++)
          Arith::add(acc[k][r], fetch<typename Arith::Scalar>(q + c * R + r), load(keys + (c * K + k) * kLanes));
    add_chain(acc, from > 0, sum);
  }
  store_scores(sum, scores, stride);
}

// Vectors of columns whose sums fit registers together. Fewer rows take more: each sum is a chain of its own, which
// waits for itself.
constexpr int columns_at_once(int rows) { return kLanes < 16 ? 8 / rows : rows > 2 ? 4 : 8; }
// Keys per prefetch step in the second product: as many numbers per step, whatever the number of columns.
constexpr int64_t keys_per_prefetch(int rows) { return 4 * columns_at_once(4) / columns_at_once(rows); }

// sums[row][columns] += the weighted values of a step, for R rows and C vectors of columns from d on. weights:
// [row][key], or pairs of keys; the first key has index `first` there.
template <class Mode, int R, int C, class T>
INLINE void add_step_values(const float* weights, int64_t weight_stride, const T* const* row, int64_t offset,
                            int64_t first, int64_t keys, float* sums, int64_t stride, StepPrefetch& prefetch) {
  typedef typename Mode::Arith Arith;
  Vec acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * stride + c * kLanes);
  if constexpr (!Arith::kPairs) {
    for (int64_t j = 0; j < keys; j++) {
      if (j % keys_per_prefetch(R) == 0) prefetch.step();
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        const Vec y = load_as_float(row[j] + offset + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r][c] += weights[r * weight_stride + first + j] * y;
      }
    }
  }
#if defined(__AVX512BF16__)
  if constexpr (Arith::kPairs) {
    const auto add = [&](int64_t pair, auto even_at, auto odd_at) INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int c = 0; c < C; c += 2) {
        const __m512i x = even_at(c), y = odd_at(c);
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const uint32_t weight = fetch<uint32_t>(weights + r * weight_stride + pair);
          Arith::add(acc[r][c], weight, (Vec)low), Arith::add(acc[r][c + 1], weight, (Vec)high);
        }
      }
    };
    const auto none = [](int) { return __m512i{}; };
    const auto values = [&](int64_t j) {
      return [at = row[j] + offset](int c) { return _mm512_loadu_si512(at + c * kLanes); };
    };
    int64_t j = first % 2;
    if (j) add(first / 2, none, values(0));  // a pair starts at an even key
    for (; j + 2 <= keys; j += 2) {
      prefetch.step();
      add((first + j) / 2, values(j), values(j + 1));
    }
    if (j < keys) add((first + j) / 2, values(j), none);
  }
#endif
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(sums + r * stride + c * kLanes, acc[r][c]);
}

// Vectors of columns per pass over the keys, at least.
template <class Arith>
constexpr int kMinColumns = Arith::kPairs ? 2 : 1;
// add_step_values for column d and those after it: C vectors at a time, then half as many, and so on.
template <class Mode, int R, int C, class T>
INLINE void add_value_groups(const float* weights, int64_t weight_stride, const T* const* row, int64_t offset,
                             int64_t first, int64_t keys, int64_t d, int64_t columns, float* sums,
                             StepPrefetch& prefetch) {
  for (; d + C * kLanes <= columns; d += C * kLanes)
    add_step_values<Mode, R, C>(weights, weight_stride, row, offset + d, first, keys, sums + d, columns, prefetch);
  if constexpr (C > kMinColumns<typename Mode::Arith>)
    add_value_groups<Mode, R, C / 2>(weights, weight_stride, row, offset, first, keys, d, columns, sums, prefetch);
}
template <class Mode, int R, class T>
static __attribute__((noinline)) void add_all_values(const float* weights, int64_t weight_stride, const T* const* row,
                                                     int64_t offset, int64_t first, int64_t keys, int64_t columns,
                                                     float* sums, StepPrefetch& prefetch) {
  add_value_groups<Mode, R, columns_at_once(R)>(weights, weight_stride, row, offset, first, keys, 0, columns, sums,
                                                prefetch);
}
// How often add_all_values reads all keys.
template <class Arith>
INLINE int64_t passes_of_values(int64_t rows, int64_t columns) {
  int64_t passes = 0, left = columns / kLanes;
  for (int64_t beside = columns_at_once((int)smaller_of(rows, 4)); beside >= kMinColumns<Arith>; beside /= 2)
    passes += left / beside, left %= beside;
  return passes * (rows > 4 ? 2 : 1);
}

// Rows of quantised numbers as numbers of another type, one after another.
template <class To>
static __attribute__((noinline)) void dequantize_step(int64_t format, const Int8* const* row, int64_t offset,
                                                      const float* const* scale, int64_t scale_offset, int64_t rows,
                                                      int64_t columns, To* to) {
  with_format(format, [&](auto type) {
    typedef Pointee<decltype(type)> T;
    for (int64_t j = 0; j < rows; j++)
      dequantize_row((const T*)(const void*)(row[j] + offset), scale[j] + scale_offset, columns, to + j * columns);
  });
}

}  // namespace
