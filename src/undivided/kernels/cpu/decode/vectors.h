// The two products of a decoding step on vectors: lanes lie along the head axis, where K and V are contiguous.
#pragma once

#include "decode/step.h"

namespace {

constexpr int kRowsPerPass = kLanes < 8 ? kLanes : 8;
// Sums in registers, of the first product and of the second. NEON's 32 registers are short: fewer than 16 sums wait for
// the latency of a multiply-add.
#if defined(UNDIVIDED_NEON)
constexpr int kScoreSums = 16, kValueSums = 16;
#else
constexpr int kScoreSums = kLanes, kValueSums = kLanes < 16 ? 8 : 16;
#endif
// Rows of the second product at a time: more than 4 need more accumulators than there are registers.
constexpr int kValueRows = kLanes < 16 ? 4 : 8;

// Rows are computed 8 at a time, and the rest 1, 2, 4 or 8; the added rows are zeros.
INLINE int64_t round_up_rows(int64_t rows) {
  const int64_t rest = rows % 8;
  return rows - rest + (rest > 4 ? 8 : rest > 2 ? 4 : rest);
}

// One load, as kVecs vectors of fp32. If it interleaves, these are the even and the odd elements: of bf16 they take two
// operations, and widening in order takes four. Queries are stored in this order, and sums are reordered at the end; a
// last single vector keeps its order.
template <class T>
struct Load {
#if defined(UNDIVIDED_NEON)
  static constexpr int kVecs = sizeof(T) == 1 ? 2 : 1;
#else
  static constexpr int kVecs = 1;
#endif
  static constexpr bool kInterleaves = false;
  INLINE void at(const T* p, Vec (&x)[kVecs]) {
    if constexpr (kVecs == 1) x[0] = load_as_float(p);
    else load_two(p, x);
  }
};
template <>
struct Load<BFloat16> {
  static constexpr int kVecs = 2;
  static constexpr bool kInterleaves = true;
  INLINE void at(const BFloat16* p, Vec (&x)[2]) {
    UVec both = (UVec)load((const float*)(const void*)p);
    x[0] = (Vec)(both << 16), x[1] = (Vec)(both & 0xffff0000u);
  }
};

template <>
struct Load<Int4> {
  static constexpr int kVecs = 2;
  static constexpr bool kInterleaves = true;
};

// Loads that read a cache line; int4 reads scales too.
template <class T>
constexpr int kLoadsPerLine = kHasGroups<T> ? 32 / kLanes : 64 / (kLanes * Load<T>::kVecs * (int)sizeof(T));

// Rows of K or V of the n-th head, and their scales.
template <class T>
struct HeadRows {
  const T* const* row;
  int64_t offset;
  const float* const* scale;
  int64_t scale_offset;

  // Loads from number d of row j on.
  INLINE void load_at(const HeadRows& rows, int64_t j, int64_t d, Vec (&y)[Load<T>::kVecs]) {
    const T* at = number_at(rows.row[j] + rows.offset, d);
    if constexpr (kHasGroups<T>) load_int4(at, rows.scale[j][rows.scale_offset + d / kGroupSize], y[0], y[1]);
    else Load<T>::at(at, y);
  }
};
template <class T>
INLINE HeadRows<T> keys_of(const Attention& a, const Step<T>& step, int64_t n) {
  if constexpr (kIsQuantized<T>) return {step.k.row, n * a.k_h, step.k_scale.row, n * a.k_scale_h};
  else return {step.k.row, n * a.k_h, nullptr, 0};
}
template <class T>
INLINE HeadRows<T> values_of(const Attention& a, const Step<T>& step, int64_t n) {
  if constexpr (kIsQuantized<T>) return {step.v.row, n * a.v_h, step.v_scale.row, n * a.v_scale_h};
  else return {step.v.row, n * a.v_h, nullptr, 0};
}

// The scale of each key, for whole vectors of keys.
template <class T>
INLINE void read_scales(const HeadRows<T>& keys, int64_t count, float* scales) {
  for (int64_t j = 0; j < round_up(count, kLanes); j++) scales[j] = keys.scale[j][keys.scale_offset];
}
// Multiplies numbers [row][key] by the scale of each key.
template <class T>
static void multiply_by_scales(const HeadRows<T>& of_keys, int64_t rows, int64_t keys, const float* from, float* to) {
  float scale[kDecodeStepKeys];
  read_scales(of_keys, keys, scale);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < keys; j += kLanes) {
      const int64_t at = r * kDecodeStepKeys + j;
      store(to + at, load(from + at) * load(scale + j));
    }
}

// For group number `index` of `Loads` loads: as many lines of the next step as these loads read. prefetch_beside()
// prefetches them. If the loads read less than a line, every few groups prefetch one here.
template <int Loads, class T>
INLINE const char* take_lines(StepPrefetch& prefetch, int64_t index) {
  constexpr int lines = Loads / kLoadsPerLine<T>;
  if constexpr (lines > 0) return prefetch.take<lines>();
  if (index % (kLoadsPerLine<T> / Loads) == 0) prefetch.prefetch(prefetch.take<1>());
  return nullptr;
}
// For load number `i` of a group: prefetches its line, if it is the first load of one.
template <int Loads, class T>
INLINE void prefetch_beside(const StepPrefetch& prefetch, const char* lines, int i) {
  if (Loads >= kLoadsPerLine<T> && i % kLoadsPerLine<T> == 0) prefetch.prefetch(lines + i / kLoadsPerLine<T> * 64);
}

// The number of keys whose scores R rows compute together.
template <int R>
constexpr int kScoreKeys = kScoreSums / R < kKeyPadding ? kScoreSums / R : kKeyPadding;

// The sums of R query rows and K keys, from key `first` on, to acc[row * stride + key].
template <int R, int K, class T>
INLINE void add_key_products(const float* q, int64_t q_stride, const HeadRows<T>& k, int64_t first, int64_t dim,
                             StepPrefetch& prefetch, Vec* acc, int stride) {
  constexpr int vecs = Load<T>::kVecs;
  const T* row[K];
  const float* scale[K] = {};
#pragma GCC unroll 8
  for (int j = 0; j < K; j++) {  // in registers, instead of loads for each product
    row[j] = k.row[first + j];
    if constexpr (kHasGroups<T>) scale[j] = k.scale[first + j];
  }
  const HeadRows<T> keys = {row, k.offset, scale, k.scale_offset};
  Vec sum[R][K] = {};
  int64_t d = 0;
  for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
    const char* lines = take_lines<K, T>(prefetch, d / (vecs * kLanes));
#pragma GCC unroll 8
    for (int j = 0; j < K; j++) {
      prefetch_beside<K, T>(prefetch, lines, j);
      Vec y[vecs];
      HeadRows<T>::load_at(keys, j, d, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r][j] += load(q + r * q_stride + d + u * kLanes) * y[u];
    }
  }
  if constexpr (vecs > 1 && !kHasGroups<T>)
    if (d < dim)
#pragma GCC unroll 8
      for (int j = 0; j < K; j++) {
        Vec y = load_as_float(row[j] + k.offset + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r][j] += load(q + r * q_stride + d) * y;
      }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < K; j++) acc[r * stride + j] = sum[r][j];
}

// Scores of R query rows and kScoreKeys<R> keys, from key `first` on: [row][key].
template <int R, class T>
INLINE void decode_scores(const float* q, int64_t q_stride, const HeadRows<T>& k, int64_t first, int64_t dim,
                          StepPrefetch& prefetch, float* scores) {
  constexpr int keys = kScoreKeys<R>, beside = keys < 8 ? keys : 8;  // 16 addresses do not fit the registers
  Vec acc[R * keys];
#pragma GCC unroll 2
  for (int j = 0; j < keys; j += beside)
    add_key_products<R, beside>(q, q_stride, k, first + j, dim, prefetch, acc + j, keys);
#pragma GCC unroll 4
  for (int i = 0; i < R * keys; i += kLanes) {
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; j++) sums[j] = acc[i + j];
    store(scores + i, lane_sums(sums));
  }
}

// Scores of R rows and all keys of a step, scores[row][key]; the table of keys is padded to a multiple of kKeyPadding.
template <int R, class T>
static void decode_score_step(const float* q, int64_t q_stride, const HeadRows<T>& k, int64_t dim, int64_t keys,
                              float* scores, StepPrefetch& shared) {
  constexpr int group = kScoreKeys<R>;
  StepPrefetch prefetch = shared;
  for (int64_t j = 0; j < keys; j += group) {
    float found[R * group];
    decode_scores<R>(q, q_stride, k, j, dim, prefetch, found);
    for (int r = 0; r < R; r++) memcpy(scores + r * kDecodeStepKeys + j, found + r * group, group * 4);
  }
  shared = prefetch;
}

// sums[row][d] += weights[row][key] * V[key][d] over the keys of a step, for `Loads` loads of columns from `first` on.
// Stride: of the rows of weights.
template <int R, int Loads, int64_t Stride, class T>
INLINE void decode_value_columns(const float* weights, const HeadRows<T>& v, int64_t first, int64_t keys, float* sums,
                                 int64_t stride, StepPrefetch& shared) {
  constexpr int vecs = Load<T>::kVecs, columns = Loads * vecs;
  StepPrefetch prefetch = shared;
  Vec acc[R][columns];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) acc[r][c] = load(sums + r * stride + c * kLanes);
  for (int64_t j = 0; j < keys; j++) {
    const char* lines = take_lines<Loads, T>(prefetch, j);
#pragma GCC unroll 8
    for (int l = 0; l < Loads; l++) {
      prefetch_beside<Loads, T>(prefetch, lines, l);
      Vec y[vecs];
      HeadRows<T>::load_at(v, j, first + l * vecs * kLanes, y);
#pragma GCC unroll 2
      for (int u = 0; u < vecs; u++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][l * vecs + u] += weights[r * Stride + j] * y[u];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) store(sums + r * stride + c * kLanes, acc[r][c]);
  shared = prefetch;
}

// The number of loads of columns that R rows compute together.
template <int R, class T>
constexpr int value_loads() {
  constexpr int vecs = Load<T>::kVecs, limit = kValueSums / R / vecs;
  return limit < 1 ? 1 : limit > 8 / vecs ? 8 / vecs : limit;
}
// As decode_value_columns, for column d and those after it: as many at a time as `Loads` loads have, then half as many,
// and so on to one load. Returns the first column that is left.
template <int R, int Loads, int64_t Stride, class T>
INLINE int64_t decode_value_groups(const float* weights, const HeadRows<T>& v, int64_t d, int64_t dim, int64_t keys,
                                   float* sums, int64_t stride, StepPrefetch& prefetch) {
  constexpr int64_t columns = Loads * Load<T>::kVecs * kLanes;
  for (; d + columns <= dim; d += columns)
    decode_value_columns<R, Loads, Stride>(weights, v, d, keys, sums + d, stride, prefetch);
  if constexpr (Loads == 1) return d;
  else return decode_value_groups<R, Loads / 2, Stride>(weights, v, d, dim, keys, sums, stride, prefetch);
}
template <int R, int64_t Stride = kDecodeStepKeys, class T>
static void decode_value_step(const float* weights, const HeadRows<T>& v, int64_t dim, int64_t keys, float* sums,
                              int64_t stride, StepPrefetch& prefetch) {
  int64_t d = decode_value_groups<R, value_loads<R, T>(), Stride>(weights, v, 0, dim, keys, sums, stride, prefetch);
  if constexpr (Load<T>::kVecs > 1 && !kHasGroups<T>)
    for (; d < dim; d += kLanes)
      for (int r = 0; r < R; r++) {
        Vec acc = load(sums + r * stride + d);
        for (int64_t j = 0; j < keys; j++) acc += weights[r * Stride + j] * load_as_float(v.row[j] + v.offset + d);
        store(sums + r * stride + d, acc);
      }
}

// Calls f(integral_constant R, row) so that each of `rows` rows is in one pass of 1, 2, 4 or 8 rows, at most Limit (4
// or 8).
template <int Limit = kRowsPerPass, class F>
INLINE void for_each_pass(int64_t rows, F f) {
  for (int64_t r = 0; r < rows;) {
    int64_t left = rows - r;
    if constexpr (Limit == 8)
      if (left >= 8) {
        f(std::integral_constant<int, 8>(), r), r += 8;
        continue;
      }
    if (left >= 4) f(std::integral_constant<int, 4>(), r), r += 4;
    else if (left >= 2) f(std::integral_constant<int, 2>(), r), r += 2;
    else f(std::integral_constant<int, 1>(), r), r += 1;
  }
}

// `dim` elements as fp32, in the order of Load<Key>.
template <class Key, class T>
INLINE void load_row(const T* from, int64_t dim, float* to) {
  constexpr int vecs = Load<Key>::kVecs;
  int64_t d = 0;
  if constexpr (Load<Key>::kInterleaves && std::is_same<Key, T>::value) {
    for (; d + vecs * kLanes <= dim; d += vecs * kLanes) {
      Vec x[vecs];
      Load<T>::at(from + d, x);
      for (int u = 0; u < vecs; u++) store(to + d + u * kLanes, x[u]);
    }
  } else if constexpr (Load<Key>::kInterleaves) {
    for (; d + vecs * kLanes <= dim; d += vecs * kLanes)
      for (int i = 0; i < vecs * kLanes; i++) to[d + i % vecs * kLanes + i / vecs] = to_float(from[d + i]);
  }
  for (; d < dim; d += kLanes) store(to + d, load_as_float(from + d));
}

// Stores sums in the original order, as fp32.
template <class T>
INLINE void restore_order(const float* from, int64_t dim, float* to) {
  int64_t d = 0;
  if constexpr (Load<T>::kInterleaves)
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
      for (int i = 0; i < kLanes; i++) to[d + 2 * i] = from[d + i], to[d + 2 * i + 1] = from[d + kLanes + i];
  memcpy(to + d, from + d, (size_t)(dim - d) * 4);
}

// The vector engine. Queries and sums are rows in fp32, in the order of Load. Numbers of 8 bits are multiplied as they
// are, and the scale of a key multiplies its scores and its weights.
template <class Key>
struct DecodeVectors {
  typedef Key T;  // of K and V
  static constexpr bool kScalesKeys = kIsQuantized<T> && !kHasGroups<T>;
  static constexpr int kBits = 0;  // weights are scaled up by 2^kBits
  static constexpr int64_t kScores = kMaxVectorRows * kDecodeStepKeys;
  // Tables without AMX are faster for quantised keys (see decode_kernels in level.h). More than kFewDecodeRows rows of
  // bf16 are prefilled on Zen 5, by dot products: 0.84 to 1.6 times as fast, mostly 1.1 to 1.3.
  static int64_t max_rows(const Attention&) {
    if (kHasAmx && kIsQuantized<T>) return 0;
    const bool prefills = kHasDot && std::is_same<T, BFloat16>::value && undivided::amd_family() == undivided::kZen5;
    return prefills ? kFewDecodeRows : kMaxVectorRows;
  }
  static bool fits(const Attention& a) { return a.qk_dim % kLanes == 0 && a.v_dim % kLanes == 0; }
  static int64_t q_floats(const Attention& a) { return kMaxVectorRows * a.qk_dim; }
  static int64_t sum_floats(const Attention& a) { return kMaxVectorRows * a.v_dim; }

  template <class Q>
  static void load_queries(const Attention& a, const Q* const* from, int64_t rows, float* q) {
    for (int64_t r = 0; r < rows; r++) load_row<T>(from[r], a.qk_dim, q + r * a.qk_dim);
    memset(q + rows * a.qk_dim, 0, (size_t)((round_up_rows(rows) - rows) * a.qk_dim) * 4);
  }
  static void clear_sums(const Attention& a, const HeadState& state) {
    memset(state.sums, 0, (size_t)(round_up_rows(state.rows) * a.v_dim) * 4);
  }
  // The products do not call StepPrefetch::step().
  static int64_t score_steps(const Attention&, int64_t, int64_t) { return 1; }
  static int64_t value_steps(const Attention&, int64_t, int64_t) { return 1; }

  static void scale_sums(const Attention& a, const HeadState& state, const float* decay) {
    for (int64_t r = 0; r < state.rows; r++)
      if (decay[r] != 1.0f)
        for (float *x = state.sums + r * a.v_dim, *stop = x + a.v_dim; x < stop; x += kLanes)
          store(x, load(x) * decay[r]);
  }

  static float* to_scores(const HeadState&, float* scores, int64_t) { return scores; }
  static void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* scores,
                              StepPrefetch& prefetch) {
    const HeadRows<T> keys = keys_of(a, step, n);
    for_each_pass(round_up_rows(state.rows), [&](auto count, int64_t r) {
      decode_score_step<decltype(count)::value>(state.q + r * a.qk_dim, a.qk_dim, keys, a.qk_dim, step.keys,
                                                scores + r * kDecodeStepKeys, prefetch);
    });
    if constexpr (kScalesKeys) multiply_by_scales(keys, state.rows, step.keys, scores, scores);
  }
  static void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n,
                              const float* weights, const float* decay, StepPrefetch& prefetch) {
    scale_sums(a, state, decay);
    const HeadRows<T> values = values_of(a, step, n);
    [[maybe_unused]] float scaled[kScalesKeys ? kScores : 1];
    if constexpr (kScalesKeys) {
      multiply_by_scales(values, round_up_rows(state.rows), step.keys, weights, scaled);
      weights = scaled;
    }
    for_each_pass<kValueRows>(round_up_rows(state.rows), [&](auto count, int64_t r) {
      decode_value_step<decltype(count)::value>(weights + r * kDecodeStepKeys, values, a.v_dim, step.keys,
                                                state.sums + r * a.v_dim, a.v_dim, prefetch);
    });
  }
  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    restore_order<T>(state.sums + r * a.v_dim, a.v_dim, to);
  }
};

}  // namespace
