// The two products of a decoding step on bf16 dot products, for bf16 queries with keys in bf16 or quantised:
//
//     S[row][key] += Q[row][d pair] * K[key][d pair]
//     O[row][d]   += P[row][key pair] * V[key pair][d]       pairs of two rows of V, interleaved in registers
//
// Quantised numbers become bf16 exactly, in registers; scales multiply scores and weights. Four rows share the work on
// a key; with eight, their sums would not fit the registers.
#pragma once

#include "decode/pair_nibbles.h"

#if defined(__AVX512BF16__)

namespace {

template <class Key, class Format = PairFormat<Key>>
struct DecodePairs : DecodeVectors<Key> {
  typedef DecodeVectors<Key> Base;
  typedef Key T;
  static bool fits(const Attention& a) {
    const auto fits = [](int64_t dim) {
      return Format::kKeysPerLine == 1 ? dim % kPairColumns == 0 : dim == Format::kColumns;
    };
    return a.dtype == kBFloat16 && fits(a.qk_dim) && fits(a.v_dim);
  }
  static int64_t max_rows(const Attention&) { return kMaxVectorRows; }
  static int64_t q_floats(const Attention& a) { return kMaxVectorRows * Format::query_floats(a.qk_dim); }
  static int64_t sum_floats(const Attention& a) { return kMaxVectorRows * Format::sum_floats(a.v_dim); }

  template <class Q>
  static void load_queries(const Attention& a, const Q* const* from, int64_t rows, float* q) {
    const int64_t size = Format::query_floats(a.qk_dim);
    memset(q, 0, (size_t)(round_up_rows(rows) * size) * 4);
    if constexpr (std::is_same<Q, BFloat16>::value)
      for_each_pass<kRowsOfPairs>(round_up_rows(rows), [&](auto count, int64_t r) {
        for (int64_t i = 0; i < count && r + i < rows; i++)
          Format::pack_query(from[r + i], a.qk_dim, q + r * size + i * kLanes, count * kLanes);
      });
  }
  static void clear_sums(const Attention& a, const HeadState& state) {
    memset(state.sums, 0, (size_t)(round_up_rows(state.rows) * Format::sum_floats(a.v_dim)) * 4);
  }
  static int64_t score_steps(const Attention& a, int64_t rows, int64_t keys) {
    const int64_t blocks = (a.qk_dim + Format::kColumns - 1) / Format::kColumns;
    int64_t steps = 0;
    for_each_pass<kRowsOfPairs>(round_up_rows(rows), [&](auto, int64_t) {
      steps += (keys + kLanes - 1) / kLanes * 2 / Format::kKeysPerLine * blocks;
    });
    return steps;
  }
  static int64_t value_steps(const Attention& a, int64_t rows, int64_t keys) {
    int64_t steps = 0;
    for_each_pass<kRowsOfPairs>(round_up_rows(rows), [&](auto count, int64_t) {
      steps += Format::template value_passes<decltype(count)::value>(a.v_dim) * (keys / Format::kKeysPerPrefetch);
    });
    return larger_of(steps, 1);
  }

  static void multiply_scores(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n, float* scores,
                              StepPrefetch& shared) {
    const HeadRows<T> keys = keys_of(a, step, n);
    const int64_t size = Format::query_floats(a.qk_dim);
    StepPrefetch prefetch = shared;
    for_each_pass<kRowsOfPairs>(round_up_rows(state.rows), [&](auto count, int64_t r) {
      constexpr int R = decltype(count)::value;
      for (int64_t j = 0; j < step.keys; j += kLanes) {
        Vec found[R];
        Format::template scores<R>(state.q + r * size, keys, j, a.qk_dim, prefetch, found);
        for (int i = 0; i < R; i++) store(scores + (r + i) * kDecodeStepKeys + j, found[i]);
      }
    });
    shared = prefetch;
  }
  static void multiply_values(const Attention& a, const HeadState& state, const Step<T>& step, int64_t n,
                              const float* weights, const float* decay, StepPrefetch& prefetch) {
    constexpr int64_t stride = Format::kWeightPairs * kStepPairs;
    const int64_t size = Format::sum_floats(a.v_dim);
    for (int64_t r = 0; r < state.rows; r++)
      if (decay[r] != 1.0f)
        for (float *x = state.sums + r * size, *stop = x + size; x < stop; x += kLanes) store(x, load(x) * decay[r]);
    const HeadRows<T> values = values_of(a, step, n);
    const int64_t rows = round_up_rows(state.rows);
    alignas(64) uint32_t pairs[kMaxVectorRows * stride];
    for (int64_t d = 0; d < a.v_dim; d += smaller_of(Format::kWeightColumns, a.v_dim)) {
      const PairSums all = {state.sums, size, pairs, step.keys};
      Format::pack_weights(values, d, a.v_dim, weights, rows, step.keys, pairs, all);
      for_each_pass<kRowsOfPairs>(rows, [&](auto count, int64_t r) {
        const PairSums to = {state.sums + r * size, size, pairs + r * stride, step.keys};
        Format::template add_values<decltype(count)::value>(to, values, d, a.v_dim, prefetch);
      });
    }
  }
  static void store_sums(const Attention& a, const HeadState& state, int64_t r, float* to) {
    Format::restore_sums(state.sums + r * Format::sum_floats(a.v_dim), a.v_dim, to);
  }
};

// Whether dot products pay off for bf16 keys.
INLINE bool are_pairs_faster(const Attention& a) {
  const int64_t rows = rows_of_group(a);
  return rows == 1 || rows >= undivided::threshold(kTuning.min_dot_rows, undivided::kZen4, kTuning.min_dot_rows_zen4);
}

}  // namespace

#endif
