// The two products of a decoding step on vectors: lanes lie along the head axis, where K and V are contiguous.
#pragma once

#include "forward/decode_step.h"

namespace {

constexpr int kRowsPerPass = kLanes < 8 ? kLanes : 8;
constexpr int kAccumulators = kLanes < 16 ? 8 : 16;  // accumulators of the second product
constexpr int64_t kKeysPerPrefetch = 4;              // keys per prefetch step in the second product

// Rows are computed 1, 2, 4 or 8 at a time; the added rows are zeros.
INLINE int64_t round_up_rows(int64_t rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

// One load, as kVecs vectors of fp32. For bf16 these are the even and the odd elements, which takes two operations;
// widening in order takes four. Queries are stored in this order, and sums are reordered at the end; a last single
// vector keeps its order.
template <class T>
struct Load {
  static constexpr int kVecs = 1;
  INLINE void at(const T* p, Vec (&x)[1]) { x[0] = load_as_float(p); }
};
template <>
struct Load<BFloat16> {
  static constexpr int kVecs = 2;
  INLINE void at(const BFloat16* p, Vec (&x)[2]) {
    UVec both = (UVec)load((const float*)(const void*)p);
    x[0] = (Vec)(both << 16), x[1] = (Vec)(both & 0xffff0000u);
  }
};

// Scores of R query rows and kLanes / R keys.
template <int R, class T>
INLINE Vec decode_scores(const float* q, int64_t q_stride, const T* const* k, int64_t offset, int64_t dim) {
  constexpr int keys = kLanes / R, vecs = Load<T>::kVecs;
  Vec acc[kLanes] = {};
  int64_t d = 0;
  for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      Vec y[vecs];
      Load<T>::at(k[j] + offset + d, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r * keys + j] += load(q + r * q_stride + d + u * kLanes) * y[u];
    }
  }
  if (d < dim)
#pragma GCC unroll 16
    for (int j = 0; j < keys; j++) {
      Vec y = load_as_float(k[j] + offset + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r * keys + j] += load(q + r * q_stride + d) * y;
    }
  return lane_sums(acc);
}

// Scores of R rows and all keys of a step, scores[row][key]; the table of keys is padded to a multiple of kLanes.
template <int R, class T>
static void decode_score_step(const float* q, int64_t q_stride, const T* const* k, int64_t offset, int64_t dim,
                              int64_t keys, float* scores, StepPrefetch& shared) {
  constexpr int group = kLanes / R;
  StepPrefetch prefetch = shared;
  for (int64_t j = 0; j < keys; j += group) {
    prefetch.step();
    float found[kLanes];
    store(found, decode_scores<R>(q, q_stride, k + j, offset, dim));
    for (int r = 0; r < R; r++) memcpy(scores + r * kDecodeStepKeys + j, found + r * group, group * 4);
  }
  shared = prefetch;
}

// sums[row][d] += weights[row][key] * V[key][d] over the keys of a step, for `Loads` loads of columns.
template <int R, int Loads, class T>
INLINE void decode_value_columns(const float* weights, const T* const* v, int64_t offset, int64_t keys, float* sums_of,
                                 int64_t stride, StepPrefetch& shared) {
  constexpr int vecs = Load<T>::kVecs, columns = Loads * vecs;
  StepPrefetch prefetch = shared;
  Vec acc[R][columns];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) acc[r][c] = load(sums_of + r * stride + c * kLanes);
  for (int64_t j = 0; j < keys; j++) {
    if (j % kKeysPerPrefetch == 0) prefetch.step();
    const T* row = v[j] + offset;
#pragma GCC unroll 8
    for (int l = 0; l < Loads; l++) {
      Vec y[vecs];
      Load<T>::at(row + l * vecs * kLanes, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][l * vecs + u] += weights[r * kDecodeStepKeys + j] * y[u];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) store(sums_of + r * stride + c * kLanes, acc[r][c]);
  shared = prefetch;
}

// The number of loads of columns that R rows compute together.
template <int R, class T>
constexpr int value_loads() {
  constexpr int vecs = Load<T>::kVecs, limit = kAccumulators / R / vecs;
  return limit < 1 ? 1 : limit > 8 / vecs ? 8 / vecs : limit;
}
template <int R, class T>
static void decode_value_step(const float* weights, const T* const* v, int64_t offset, int64_t dim, int64_t keys,
                              float* sums_of, int64_t stride, StepPrefetch& prefetch) {
  constexpr int vecs = Load<T>::kVecs, loads = value_loads<R, T>();
  constexpr int64_t wide = loads * vecs * kLanes, narrow = vecs * kLanes;
  int64_t d = 0;
  for (; d + wide <= dim; d += wide)
    decode_value_columns<R, loads>(weights, v, offset + d, keys, sums_of + d, stride, prefetch);
  for (; d + narrow <= dim; d += narrow)
    decode_value_columns<R, 1>(weights, v, offset + d, keys, sums_of + d, stride, prefetch);
  for (; d < dim; d += kLanes)
    for (int r = 0; r < R; r++) {
      Vec acc = load(sums_of + r * stride + d);
      for (int64_t j = 0; j < keys; j++) acc += weights[r * kDecodeStepKeys + j] * load_as_float(v[j] + offset + d);
      store(sums_of + r * stride + d, acc);
    }
}

// Calls f(integral_constant R, row) so that each of `rows` rows (1, 2, 4 or 8) is in one pass.
template <class F>
INLINE void for_each_pass(int64_t rows, F f) {
  for (int64_t r = 0; r < rows;) {
    int64_t left = rows - r;
    if constexpr (kRowsPerPass == 8)
      if (left >= 8) {
        f(std::integral_constant<int, 8>(), r), r += 8;
        continue;
      }
    if (left >= 4) f(std::integral_constant<int, 4>(), r), r += 4;
    else if (left >= 2) f(std::integral_constant<int, 2>(), r), r += 2;
    else f(std::integral_constant<int, 1>(), r), r += 1;
  }
}

// `dim` elements as fp32, in the order of Load.
template <class T>
INLINE void load_row(const T* from, int64_t dim, float* to) {
  constexpr int vecs = Load<T>::kVecs;
  int64_t d = 0;
  for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
    Vec x[vecs];
    Load<T>::at(from + d, x);
    for (int u = 0; u < vecs; u++) store(to + d + u * kLanes, x[u]);
  }
  if (d < dim) store(to + d, load_as_float(from + d));
}

// Stores sums in the original order, as fp32.
template <class T>
INLINE void restore_order(const float* from, int64_t dim, float* to) {
  constexpr int vecs = Load<T>::kVecs;
  int64_t d = 0;
  if constexpr (vecs == 2)
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
      for (int i = 0; i < kLanes; i++) to[d + 2 * i] = from[d + i], to[d + 2 * i + 1] = from[d + kLanes + i];
  memcpy(to + d, from + d, (size_t)(dim - d) * 4);
}

// The vector engine. Queries and sums are rows in fp32, in the order of Load.
template <class Half>
struct DecodeVectors {
  typedef Half T;
  static constexpr int kBits = 0;
  static constexpr int64_t kScores = kMaxDecodeRows * kDecodeStepKeys;
  static bool fits(const Attention& a) { return a.qk_dim % kLanes == 0 && a.v_dim % kLanes == 0; }
  static int64_t q_floats(const Attention& a) { return kMaxDecodeRows * a.qk_dim; }
  static int64_t sum_floats(const Attention& a) { return kMaxDecodeRows * a.v_dim; }

  static void load_queries(const Attention& a, const T* const* from, int64_t rows, float* q) {
    for (int64_t r = 0; r < rows; r++) load_row(from[r], a.qk_dim, q + r * a.qk_dim);
    memset(q + rows * a.qk_dim, 0, (size_t)((round_up_rows(rows) - rows) * a.qk_dim) * 4);
  }
  static void clear_sums(const Attention& a, const HeadState& state) {
    memset(state.sums, 0, (size_t)(round_up_rows(state.rows) * a.v_dim) * 4);
  }
  // Prefetch steps of the products: one per vector of scores, one per kKeysPerPrefetch keys.
  static int64_t score_steps(const Attention&, int64_t rows, int64_t keys) {
    int64_t steps = 0;
    for_each_pass(round_up_rows(rows), [&](auto count, int64_t) { steps += (keys * count + kLanes - 1) / kLanes; });
    return steps;
  }
  static int64_t value_steps(const Attention& a, int64_t rows, int64_t keys) {
    int64_t steps = 0;
    for_each_pass(round_up_rows(rows), [&](auto count, int64_t) {
      constexpr int64_t narrow = Load<T>::kVecs * kLanes, wide = value_loads<decltype(count)::value, T>() * narrow;
      steps += (a.v_dim / wide + a.v_dim % wide / narrow) * ((keys + kKeysPerPrefetch - 1) / kKeysPerPrefetch);
    });
    return larger_of(steps, 1);
  }

  static float* to_scores(const HeadState&, float* scores, int64_t) { return scores; }
  static void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* scores,
                              StepPrefetch& prefetch) {
    for_each_pass(round_up_rows(state.rows), [&](auto count, int64_t r) {
      decode_score_step<decltype(count)::value>(state.q + r * a.qk_dim, a.qk_dim, step.k.row, n * a.k_h, a.qk_dim,
                                                step.keys, scores + r * kDecodeStepKeys, prefetch);
    });
  }
  static void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n,
                              const float* weights, const float* decay, StepPrefetch& prefetch) {
    for (int64_t r = 0; r < state.rows; r++)
      if (decay[r] != 1.0f)
        for (float *x = state.sums + r * a.v_dim, *stop = x + a.v_dim; x < stop; x += kLanes)
          store(x, load(x) * decay[r]);
    for_each_pass(round_up_rows(state.rows), [&](auto count, int64_t r) {
      decode_value_step<decltype(count)::value>(weights + r * kDecodeStepKeys, step.v.row, n * a.v_h, a.v_dim,
                                                step.keys, state.sums + r * a.v_dim, a.v_dim, prefetch);
    });
  }
  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    restore_order<T>(state.sums + r * a.v_dim, a.v_dim, to);
  }
};

}  // namespace
