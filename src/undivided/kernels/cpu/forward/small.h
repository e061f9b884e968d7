// The forward of a head with at most one panel of rows and as many keys (see gemm/small.h).
//
//     S[row][keys] = Q[row] (broadcast) . K^T             score_rows
//     O[row][d]    = P[row][key] (broadcast) * V[key][d]  add_rows, with weights that are normalised already
#pragma once

#include "forward/own_values.h"
#include "gemm/small.h"
#include "mask/row_bias.h"
#include "simd/math.h"

namespace {

// The largest number of rows, and of keys, of a small head.
INLINE int64_t max_small_forward(const Attention& a) {
  const int64_t limit = a.dtype == kBFloat16  ? kTuning.max_small_forward_bf16
                        : a.dtype == kFloat16 ? kTuning.max_small_forward_fp16
                                              : kTuning.max_small_forward_32;
  return smaller_of(limit, kPanel);
}
// Whether the heads have so few rows and keys that neither AMX nor decoding pays off. A few rows with enough keys to
// need a transposition are left to decoding, which reads K row by row.
INLINE bool is_small_forward(const Attention& a) {
  const int64_t rows = rows_of_group(a);
  return !a.pages && !a.batch_invariant && !a.format && is_small(a, max_small_forward(a)) &&
         (a.kv_len <= kMinTransposedKeys || rows >= 8 || (a.dtype == kFloat32 && rows * 64 >= a.qk_dim));
}

struct SmallForwardSpace {
  float *kt, *weights;  // [d][kPanel], [row][kPanel]
  float *q, *k, *v;     // widened rows of 16-bit types
  int64_t bytes;
  SmallForwardSpace(const Attention& a, char* base) {
    Arena arena{base};
    const int64_t qk_bytes = a.qk_dim * kPanel * 4, v_bytes = a.v_dim * kPanel * 4,
                  widened = a.dtype == kFloat32 ? 0 : 1;
    kt = (float*)arena.allocate(qk_bytes), weights = (float*)arena.allocate(kPanel * kPanel * 4);
    q = (float*)arena.allocate(qk_bytes * widened), k = (float*)arena.allocate(qk_bytes * widened),
    v = (float*)arena.allocate(v_bytes * widened);
    bytes = arena.bytes;
  }
};

// Whether a panel's keys have no gap (a key in a gap may hold anything) and consecutive rows share keys (rows of two
// documents do not, and non-finite values must stay in their own).
static inline bool is_connected(const Attention& a, const RowBlock& block, const Panel& p) {
  if (p.segments > 1) return false;
  const int32_t* previous = nullptr;
  for (int64_t r = 0; a.ranges && r < p.rows; r++) {
    const Range own = keys_of_row(p, r);
    if (own.start >= own.stop) continue;
    const int32_t* range = ranges_at(a, block, r);
    if (previous && are_disjoint(a, previous, range)) return false;
    previous = range;
  }
  return true;
}

// Turns the products of the keys from `first` on into normalised weights, which add up to less than 1 if there is a
// sink. Returns false if the row sees no key. Unused lanes and keys that the row does not see become 0.
INLINE bool softmax_row(const Attention& a, const Panel& panel, int r, int64_t batch, int64_t head, int64_t row,
                        int64_t first, int64_t keys, float* weights) {
  const ScoreUnit unit = score_unit<Direct>(a);
  const bool has_bias = undivided::has_score_bias(a) || a.softcap != 0;
  if (has_bias) add_row_bias(a, batch, head, row, first, keys, weights);
  const float scale = keeps_products(a) || has_bias ? 1 : (float)a.scale;
  IVec lane = {};
  for (int i = 0; i < kLanes; i++) lane[i] = (int32_t)first + i;
  Vec high = splat(-kInfinity), total = {};
  for (int64_t j = 0; j < keys; j += kLanes) {
    const IVec key = lane + (int32_t)j;
    const IVec allowed = is_within(key, panel.start[0][r], panel.stop[0][r], panel.start[1][r], panel.stop[1][r]);
    const Vec x = allowed ? load(weights + j) * scale : splat(-kInfinity);
    high = larger(x, high);
    store(weights + j, x);
  }
  const float max_score = reduce_max(high), base = max_score == -kInfinity ? 0 : max_score;
  for (int64_t j = 0; j < keys; j += kLanes) {
    const Vec x = exp2_or_zero((load(weights + j) - base) * unit.log2);
    total += x;
    store(weights + j, x);
  }
  const float inverse = end_row(a, batch, head, row, max_score * unit.natural, reduce_sum(total));
  for (int64_t j = 0; j < keys && inverse != 0; j += kLanes) store(weights + j, load(weights + j) * inverse);
  return inverse != 0;
}

// Adds the values of a row again, those of its own keys only, if it met one that is not finite with a weight of 0. Its
// weights and `v` begin at key `first`.
template <class T>
INLINE void add_own_values(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t first,
                           const float* const* v, const Range& own, float* weights, T* out) {
  if (!has_non_finite(out, a.v_dim)) return;
  const float* values[kPanel];
  Range some = {0, 0};
  for (int64_t j = own.start; j < own.stop; j++) {
    if (!sees(a, batch, head, row, first + j)) continue;
    values[some.stop] = v[j], weights[some.stop++] = weights[j];
  }
  add_rows(weights, kPanel, 1, values, &some, a.v_dim, 1, &out);
}

// False if the rows are not connected; nothing is written then.
template <class T>
static bool run_small_block(const Attention& a, const RowBlock& block, char* scratch) {
  Panel panel;
  read_ranges(a, block, 0, panel);
  if (!is_connected(a, block, panel)) return false;
  const SmallForwardSpace w(a, scratch);
  const Range visible = panel.segments ? panel.segment[0] : Range{0, 0};
  const int64_t b = block.batch, n = block.kv_head, keys = visible.stop - visible.start;
  const bool alike = panel.covers(visible.start, visible.stop), hides = !alike || a.dense || a.bias;
  const float *q[kPanel], *k[kPanel], *v[kPanel];
  T* out[kPanel];
  int64_t rows = 0, from[kPanel];
  Range own[kPanel];  // keys of each row, relative to the first visible one
  auto place = [&](int64_t r) {
    return std::make_pair(block.first_head + (block.row + r) / a.q_len, (block.row + r) % a.q_len);
  };
  auto clear = [&](T* row) { memset(row, 0, (size_t)a.v_dim * sizeof(T)); };
  for (int64_t r = 0; r < block.rows; r++) {
    const auto [head, row] = place(r);
    out[rows] = out_row<T>(a, b, head, row);
    own[rows] = alike ? visible : keys_of_row(panel, r);
    if (own[rows].start >= own[rows].stop) {  // a row without keys may hold anything
      clear(out[rows]);
      end_row(a, b, head, row, -kInfinity, 0);
      continue;
    }
    q[rows] = as_floats((const T*)a.q + b * a.q_b + head * a.q_h + row * a.q_s, a.qk_dim, rows, w.q);
    own[rows] = {own[rows].start - visible.start, own[rows].stop - visible.start};
    from[rows++] = r;
  }
  if (rows == 0) return true;
  for (int64_t j = 0; j < keys; j++) {
    k[j] = as_floats((const T*)a.k + b * a.k_b + n * a.k_h + (visible.start + j) * a.k_s, a.qk_dim, j, w.k);
    v[j] = as_floats((const T*)a.v + b * a.v_b + n * a.v_h + (visible.start + j) * a.v_s, a.v_dim, j, w.v);
  }
  score_rows(q, rows, k, keys, a.qk_dim, w.kt, w.weights);
  bool has_keys[kPanel];
  for (int64_t i = 0; i < rows; i++) {
    const auto [head, row] = place(from[i]);
    has_keys[i] = softmax_row(a, panel, (int)from[i], b, head, row, visible.start, keys, w.weights + i * kPanel);
  }
  Vec zero_or_nan = {};
  add_rows(w.weights, kPanel, 1, v, own, a.v_dim, rows, out, hides ? &zero_or_nan : nullptr);
  const bool all_finite = !any(zero_or_nan != zero_or_nan);
  for (int64_t i = 0; i < rows; i++)
    if (!has_keys[i]) {
      clear(out[i]);  // 0 * NaN is NaN
    } else if (!all_finite) {
      const auto [head, row] = place(from[i]);
      add_own_values(a, b, head, row, visible.start, v, own[i], w.weights + i * kPanel, out[i]);
    }
  return true;
}

}  // namespace
