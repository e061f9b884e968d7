// Micro-kernels on bf16 dot products: the scores of sixteen keys, and the weighted sums of pairs of values. Formats say
// how rows are read (decode/pair_formats.h).
#pragma once

#include "decode/vectors.h"
#include "simd/quantized_pairs.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int kRowsOfPairs = 4;
constexpr int64_t kStepPairs = kDecodeStepKeys / 2, kPairColumns = 32, kAllColumns = INT64_MAX;

template <class T>
INLINE const T* row_of(const HeadRows<T>& rows, int64_t j) {
  return rows.row[j] + rows.offset;
}

// What the second product of some rows adds to their sums, and with which weights.
struct PairSums {
  float* sums;
  int64_t stride;
  const uint32_t* weights;
  int64_t keys;
};
// Sums of R rows and C vectors of columns, in registers while `add` runs.
template <int R, int C, class F>
INLINE void with_sums(const PairSums& to, int64_t at, F add) {
  Vec acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[r][c] = load(to.sums + r * to.stride + at + c * kLanes);
  add(acc);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(to.sums + r * to.stride + at + c * kLanes, acc[r][c]);
}
// Calls f(j, row j, row j + 1) for every pair of keys; a missing last row is null. Calls prefetch.step() once per
// `Keys` keys.
template <int Keys, class T, class F>
INLINE void for_each_pair(const HeadRows<T>& v, int64_t keys, StepPrefetch& shared, F f) {
  StepPrefetch prefetch = shared;
  int64_t j = 0;
  for (; j + Keys <= keys; j += Keys) {
    prefetch.step();
#pragma GCC unroll 2
    for (int64_t i = j; i < j + Keys; i += 2) f(i, row_of(v, i), row_of(v, i + 1));
  }
  for (; j < keys; j += 2) f(j, row_of(v, j), j + 1 < keys ? row_of(v, j + 1) : (const T*)nullptr);
  shared = prefetch;
}
// Weights, multiplied by the scale of each key if there are scales, as [row][pair].
INLINE void store_pairs(const float* weights, const float* scales, int64_t rows, int64_t keys, uint32_t* pairs) {
  for (int64_t j = 0; j < keys; j += kLanes) {
    const Vec scale = scales ? load(scales + j) : splat(1);
    for (int64_t r = 0; r < rows; r++)
      store_from_float((BFloat16*)(pairs + r * kStepPairs) + j, load(weights + r * kDecodeStepKeys + j) * scale);
  }
}

// Scores of R rows and keys [first, first + kLanes). Lane 4 b + j of a vector belongs to line j of four and to quarter
// b of it: K is transposed in 4 x 4 blocks only, and the quarters are added at the end. Eight lines at a time make
// enough independent sums to hide the latency of a dot product. Queries are [block][vector][row], with constant
// strides, so that one register addresses them.
template <class Format, int R, class T>
INLINE void pair_scores(const float* q, const HeadRows<T>& k, int64_t first, int64_t dim, StepPrefetch& prefetch,
                        Vec (&found)[R]) {
  Vec sums[R][4];
#pragma GCC unroll 1
  for (int64_t g = 0; g < 4 / Format::kKeysPerLine; g += 2) {
    typename Format::template Scores<R> scores[2];
    const float* block = q;
#pragma GCC unroll 1
    for (int64_t d = 0; d < dim; d += Format::kColumns, block += R * Format::kQueryBlock) {
      prefetch.step();
      __m512i words[2][4];
#pragma GCC unroll 2
      for (int u = 0; u < 2; u++) {
        __m512i row[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) row[i] = Format::load_row(k, first, 4 * (g + u) + i, d, dim);
        transpose_words(row, words[u]);
        scores[u].begin(block);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        Format::for_each_pair_of(words[0][i], words[1][i], i, [&](int n, int chain, __m512i x, __m512i y) {
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const __m512i pairs = _mm512_loadu_si512(block + (n * R + r) * kLanes);
            scores[0].acc[r][chain] = dot_bf16(scores[0].acc[r][chain], pairs, x);
            scores[1].acc[r][chain] = dot_bf16(scores[1].acc[r][chain], pairs, y);
          }
        });
#pragma GCC unroll 2
      for (int u = 0; u < 2; u++) scores[u].end(k, first, 4 * (g + u), d, dim);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][g] = scores[0].total(r), sums[r][g + 1] = scores[1].total(r);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) found[r] = Format::add_lines(sums[r]);
}
// The sums of R rows and four keys, in two chains.
template <int R>
struct TwoChains {
  Vec acc[R][2] = {};
  INLINE_MEMBER void begin(const float*) {}
  template <class T>
  INLINE_MEMBER void end(const HeadRows<T>&, int64_t, int64_t, int64_t, int64_t) {}
  INLINE_MEMBER Vec total(int r) const { return acc[r][0] + acc[r][1]; }
};

}  // namespace

#endif
