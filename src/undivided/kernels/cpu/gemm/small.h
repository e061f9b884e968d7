// Products for heads of few rows and keys, forward (forward/small.h) and backward (backward/small.h): fp32, all rows
// with one panel of keys at a time; lanes are keys, and in the second product columns.
//
// The general kernels pack what they read and clear what they add to, which for 16 tokens takes longer than the
// products. Here at most the keys' rows are transposed; everything else is read in place, a few rows of about D floats
// that stay in L1, and results are stored once. Rows of 16-bit types are widened first.
#pragma once

#include "gemm/row_product.h"
#include "gemm/split_limits.h"
#include "gemm/transpose_rows.h"

namespace {

// Up to this many keys a score is one dot product of rows: a transposition takes as long for one key as for kLanes.
constexpr int64_t kMinTransposedKeys = kLanes / 4;
// Rows by vectors of columns that add_rows computes in registers: 6 x 4 sums, 4 operands and a broadcast in 32
// registers; 2 x 4 in 16.
constexpr int kSmallRows = kLanes == 16 ? 6 : 2, kSmallColumns = 4;

// Whether every head has at most `limit` rows and keys, and there is no dropout.
INLINE bool is_small(const Attention& a, int64_t limit) {
  return rows_of_group(a) <= limit && a.kv_len <= limit && !a.dropout && a.qk_dim % kLanes == 0 &&
         a.v_dim % kLanes == 0;
}

// From the first to the last key that a row of a panel sees; empty if start >= stop.
INLINE Range keys_of_row(const Panel& p, int64_t r) {
  const Range first = {p.start[0][r], p.stop[0][r]}, second = {p.start[1][r], p.stop[1][r]};
  if (second.start >= second.stop) return first;
  if (first.start >= first.stop) return second;
  return {smaller_of(first.start, second.start), larger_of(first.stop, second.stop)};
}

// A row in fp32. `copies` holds rows of `dim` floats.
INLINE const float* as_floats(const float* row, int64_t, int64_t, float*) { return row; }
template <class T>
INLINE const float* as_floats(const T* row, int64_t dim, int64_t index, float* copies) {
  float* to = copies + index * dim;
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load_as_float(row + d));
  return to;
}

template <class T>
static float dot_of(const T* x, const T* y, int64_t dim) {
  Vec total = {};
  float rest = 0;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) total += load_as_float(x + d) * load_as_float(y + d);
  for (; d < dim; d++) rest += to_float(x[d]) * to_float(y[d]);
  return reduce_sum(total) + rest;
}

// to[row][keys] = rows . keys. transposed: room for the transposed keys.
static inline void score_rows(const float* const* rows, int64_t count, const float* const* keys, int64_t key_count,
                              int64_t dim, float* transposed, float* to) {
  if (key_count <= kMinTransposedKeys) {
    for (int64_t r = 0; r < count; r++)
      for (int64_t j = 0; j < kLanes; j++) to[r * kPanel + j] = j < key_count ? dot_of(rows[r], keys[j], dim) : 0.0f;
    return;
  }
  const int vectors = (int)((key_count + kLanes - 1) / kLanes);
  for (int v = 0; v < vectors; v++) {
    const float* some[kLanes] = {};
    for (int64_t j = 0; j < smaller_of(key_count - v * kLanes, kLanes); j++) some[j] = keys[v * kLanes + j];
    transpose_rows<Direct>(some, dim, dim, transposed + v * kLanes);
  }
  for (int64_t r = 0; r < count;) {  // as many rows at once as have the same distance
    const int64_t stride = r + 1 < count ? rows[r + 1] - rows[r] : 0;
    int64_t stop = r + 1;
    while (stop < count && rows[stop] - rows[stop - 1] == stride) stop++;
    multiply_scores<Fma>(transposed, rows[r], stride, dim, stop - r, to + r * kPanel, vectors);
    r = stop;
  }
}

template <int R, int C, int... I>
INLINE void add_row(Vec (&acc)[R][C], const float* a, int64_t row_stride, const Vec (&row)[C],
                    std::integer_sequence<int, I...>) {
  ((acc[I / C][I % C] += a[I / C * row_stride] * row[I % C]), ...);
}
template <int R, int C, class T>
static __attribute__((noinline)) void add_row_group(const float* a, int64_t row_stride, int64_t step_stride,
                                                    const float* const* rows, int64_t count, int64_t d, T* const* out,
                                                    Vec* zero_or_nan) {
  Vec acc[R][C] = {};
  for (int64_t n = 0; n < count; n++, a += step_stride) {
    Vec row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) row[c] = load(rows[n] + d + c * kLanes);
    add_row(acc, a, row_stride, row, std::make_integer_sequence<int, R * C>());
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store_from_float(out[i] + d + c * kLanes, acc[i][c]);
  if (!zero_or_nan) return;
  Vec found[C] = {};  // C chains
#pragma GCC unroll 6
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) found[c] += acc[i][c] * 0;
  for (int c = 0; c < C; c++) *zero_or_nan += found[c];
}
// out[i][d] = sum over n in some[i] of a[i * row_stride + n * step_stride] * rows[n][d], for i < results. Results are
// computed together with their neighbours, over the n of all of them: a must be 0 where n is not in some[i].
// zero_or_nan, unless null, becomes NaN if some result is not finite.
template <class T>
static void add_rows(const float* a, int64_t row_stride, int64_t step_stride, const float* const* rows,
                     const Range* some, int64_t dim, int64_t results, T* const* out, Vec* zero_or_nan = nullptr) {
  int64_t d = 0;
  auto columns = [&](auto vectors) {  // all results for these columns, while their rows are in L1
    constexpr int C = decltype(vectors)::value;
    for (; d + C * kLanes <= dim; d += C * kLanes)
      for (int64_t i = 0; i < results; i += kSmallRows)
        with_rows<kSmallRows>(results - i, [&](auto r) {
          constexpr int R = decltype(r)::value;
          int64_t from = some[i].start, to = some[i].stop;
          for (int n = 1; n < R; n++) from = smaller_of(from, some[i + n].start), to = larger_of(to, some[i + n].stop);
          add_row_group<R, C>(a + i * row_stride + from * step_stride, row_stride, step_stride, rows + from, to - from,
                              d, out + i, zero_or_nan);
        });
  };
  columns(std::integral_constant<int, kSmallColumns>());
  columns(std::integral_constant<int, 1>());
}

}  // namespace
