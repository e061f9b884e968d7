// Decoding: a few query rows with a long cache.
//
// Memory traffic. Every key and value is read once and used for all rows of its group (query heads x query rows, at
// most kMaxDecodeRows), 2 operations per element and row: with few rows, reading the cache is the whole cost. At most 8
// rows, on AMX 16, are computed at a time; further rows read the keys of a step again, from L2. Lanes lie along the
// head axis, where K and V are contiguous: a multiply-add computes kLanes elements of one row, whereas with rows in
// lanes most lanes would be idle. The cache is cut into chunks of keys by sizes and lengths alone. A chunk is read in
// steps of kDecodeStepKeys keys, for all heads at once if their rows are adjacent ("bshd"). During a step the next one
// is prefetched in the order of memory, because the hardware's prefetcher stops at each 4 KiB page. Rows are found
// through a table of a step's addresses, so that paged caches cost nothing extra. The partial results of the chunks
// (sums, largest score, total) are merged in order.
#pragma once

#include "decode/amx.h"
#include "decode/pairs.h"

namespace {

using undivided::KeyChunk;

struct DecodeSpace {
  Panel* panel;
  float *scores, *q, *sums, *max_score, *total;  // the last four for each head in turn
  float* row;                                    // sums of one row
  char* steps;
  int64_t bytes;
};

template <class Engine>
static DecodeSpace layout_decode(const Attention& a, int64_t kv_heads, char* base) {
  Arena arena{base};
  DecodeSpace space;
  space.panel = (Panel*)arena.allocate((int64_t)sizeof(Panel));
  space.scores = (float*)arena.allocate(larger_of(2, kv_heads) * Engine::kScores * 4);
  space.q = (float*)arena.allocate(kv_heads * Engine::q_floats(a) * 4);
  space.sums = (float*)arena.allocate(kv_heads * Engine::sum_floats(a) * 4);
  space.max_score = (float*)arena.allocate(kv_heads * kRowSlots * 4);
  space.total = (float*)arena.allocate(kv_heads * kRowSlots * 4);
  space.row = (float*)arena.allocate(partial_size(a) * 4);
  space.steps = arena.allocate(3 * (int64_t)sizeof(Step<typename Engine::T>));
  space.bytes = arena.bytes;
  return space;
}

// The query head and row of row r of the n-th head of a chunk.
struct RowPlace {
  int64_t head, row;
};
INLINE RowPlace row_place(const KeyChunk& chunk, int64_t n, int64_t r) {
  const Attention& a = *chunk.problem;
  return {(chunk.kv_head + n) * (a.heads / a.kv_heads) + r / a.q_len, r % a.q_len};
}

// Iterates over the segments of a chunk in steps, without those that the mask or the bias hides from every row.
template <class T>
struct Steps {
  const KeyChunk& chunk;
  const Panel& panel;
  int64_t first;     // row of each head
  bool alone;        // whether to leave out every key that the only row does not see
  int64_t max_keys;  // keys per step
  int64_t key = chunk.key;
  int segment = 0;

  void find(const KeyChunk& chunk, int64_t from, int64_t keys, Step<T>& step) const {
    const Attention& a = *chunk.problem;
    step.key = from, step.keys = keys;
    const int64_t b = chunk.batch, h = chunk.kv_head, heads = chunk.kv_heads;
    step.k.find(key_rows<T>(a, b, h), from, keys, element_count<T>(a.qk_dim), heads, a.k_h);
    step.v.find(value_rows<T>(a, b, h), from, keys, element_count<T>(a.v_dim), heads, a.v_h);
    if constexpr (kIsQuantized<T>) {
      step.k_scale.find(key_scales(a, b, h), from, keys, scales_of<T>(a.qk_dim), heads, a.k_scale_h);
      step.v_scale.find(value_scales(a, b, h), from, keys, scales_of<T>(a.v_dim), heads, a.v_scale_h);
      // int4 has 2 lines of scales per 8 of numbers, 8 bits have 1 per 32 (Zen 5, with the numbers: 1.2 and 0.8)
      if constexpr (kHasGroups<T>) step.k.prefetch_with(step.k_scale), step.v.prefetch_with(step.v_scale);
      else step.k_scale.prefetch_all(), step.v_scale.prefetch_all();
    }
  }
  void next(Step<T>& step) {
    for (; segment < panel.segments; segment++) {
      const int64_t to = smaller_of(panel.segment[segment].stop, chunk.key + chunk.keys);
      for (key = larger_of(panel.segment[segment].start, key); key < to;) {
        const int64_t from = key, keys = seen_keys(from, smaller_of(max_keys - from % kStepAlignment, to - from));
        key = from + (keys < 0 ? -keys : keys);
        if (keys > 0) return find(chunk, from, keys, step);
      }
    }
    step.keys = 0;
  }

 private:
  // How many of the `count` keys from `from` on are the next step; negative: how many are hidden.
  int64_t seen_keys(int64_t from, int64_t count) const {
    const Attention& a = *chunk.problem;
    if (!a.dense && !a.bias) return count;
    if (!alone) return may_see(from, from + count) ? count : -count;
    const RowPlace at = row_place(chunk, 0, first);
    const auto is_seen = [&](int64_t j) { return sees(a, chunk.batch, at.head, at.row, j); };
    const bool first_seen = is_seen(from);
    int64_t alike = 1;
    while (alike < count && is_seen(from + alike) == first_seen) alike++;
    return first_seen ? alike : -alike;
  }
  // Whether some row may see keys [from, to).
  bool may_see(int64_t from, int64_t to) const {
    const int64_t group = chunk.problem->heads / chunk.problem->kv_heads;
    for (int64_t n = 0; n < chunk.kv_heads; n++) {
      const int64_t kv_head = chunk.kv_head + n;
      const RowBlock block = {chunk.batch, kv_head * group, kv_head, first, panel.rows, 0};
      if (may_see_keys(*chunk.problem, block, panel, from, to)) return true;
    }
    return false;
  }
};

// Calls f with a null pointer to the type of q and out.
template <class F>
INLINE void with_number(const Attention& a, F f) {
  if (a.dtype == kBFloat16) f((const BFloat16*)nullptr);
  else if (a.dtype == kFloat16) f((const Float16*)nullptr);
  else f((const float*)nullptr);
}

// Loads the queries of the n-th head of a chunk, and clears its sums.
template <class Engine>
static void start_head(const KeyChunk& chunk, int64_t n, int64_t first, HeadState& state, float* q) {
  typedef typename Engine::T T;
  const Attention& a = *chunk.problem;
  auto load = [&](auto type) {
    typedef decltype(type) Row;
    Row row[kMaxDecodeRows];
    for (int64_t r = 0; r < state.rows; r++) {
      const RowPlace at = row_place(chunk, n, first + r);
      row[r] = (Row)a.q + chunk.batch * a.q_b + at.head * a.q_h + at.row * a.q_s;
    }
    Engine::load_queries(a, row, state.rows, q);
  };
  if constexpr (kIsQuantized<T>) with_number(a, load);
  else load((const T*)nullptr);
  Engine::clear_sums(a, state);
  for (int64_t r = 0; r < kRowSlots; r++) state.max_score[r] = -kInfinity, state.total[r] = 0;
}

// Computes `rows` rows of each head of a chunk, from `first` on, and calls finish(state, n, r, row) for row r of the
// n-th head, with room for its sums. alone: there is one row, which meets no key that it does not see.
template <class Engine, class Finish>
static void sum_chunk(const KeyChunk& chunk, const KeyChunk* next_chunk, int64_t first, int64_t rows, bool alone,
                      char* scratch, Finish finish) {
  typedef typename Engine::T T;
  const Attention& a = *chunk.problem;
  const DecodeSpace space = layout_decode<Engine>(a, chunk.kv_heads, scratch);
  Panel& p = *space.panel;
  RowBlock block = {chunk.batch, 0, 0, first, rows, 0};
  read_ranges(a, block, 0, p);
  auto state_of = [&](int64_t n) -> HeadState {
    return {space.q + n * Engine::q_floats(a), space.sums + n * Engine::sum_floats(a), space.max_score + n * kRowSlots,
            space.total + n * kRowSlots, rows};
  };
  for (int64_t n = 0; n < chunk.kv_heads; n++) {
    HeadState state = state_of(n);
    start_head<Engine>(chunk, n, first, state, space.q + n * Engine::q_floats(a));
  }
  const int64_t key_bytes = chunk.kv_heads * element_count<T>(a.qk_dim + a.v_dim) * (int64_t)sizeof(T);
  const int64_t max_bytes =
      undivided::threshold(kTuning.decode_step_bytes, undivided::kZen5, kTuning.decode_step_bytes_zen5);
  const int64_t max_keys =
      larger_of(kStepAlignment, smaller_of(kDecodeStepKeys, max_bytes / key_bytes / kStepAlignment * kStepAlignment));
  Steps<T> steps = {chunk, p, first, alone, max_keys};
  Step<T>*previous = (Step<T>*)space.steps, *step = previous + 1, *next = previous + 2;
  float *scores = space.scores, *weights = scores + Engine::kScores;
  Engine engine;
  StepPrefetch k_prefetch, v_prefetch;
  auto finish_head = [&](const Step<T>& current, int64_t n, float* head_scores) {
    HeadState state = state_of(n);
    float decay[kRowSlots];
    float* found = engine.to_scores(state, head_scores, current.keys);
    for (int64_t r = 0; undivided::has_score_bias(a) && r < rows; r++) {
      const RowPlace at = row_place(chunk, n, first + r);
      add_row_bias(a, chunk.batch, at.head, at.row, current.key, current.keys, found + r * kDecodeStepKeys);
    }
    for_each_pass(round_up_rows(rows), [&](auto count, int64_t r) {
      decode_softmax<decltype(count)::value>(a, p, state, r, current.key, current.keys, Engine::kBits,
                                             found + r * kDecodeStepKeys, decay);
    });
    engine.multiply_values(a, state, current, n, found, decay, v_prefetch);
  };
  // The keys of all heads, then their values, because the hardware prefetches memory that is read in order. The values
  // of a single head follow the keys of its next step, so that they need not wait for the softmax.
  const bool lags = chunk.kv_heads == 1;
  bool has_previous = false;
  for (steps.next(*step); step->keys;) {
    steps.next(*next);
    const int64_t next_keys = next->keys;
    if (next_keys == 0 && next_chunk)
      steps.find(*next_chunk, next_chunk->key, smaller_of(max_keys, next_chunk->keys), *next);
    k_prefetch = StepPrefetch(*next, next->k, chunk.kv_heads * Engine::score_steps(a, rows, step->keys));
    v_prefetch = StepPrefetch(*next, next->v, chunk.kv_heads * Engine::value_steps(a, rows, step->keys));
    for (int64_t n = 0; n < chunk.kv_heads; n++)
      engine.multiply_scores(a, state_of(n), *step, n, scores + n * Engine::kScores, k_prefetch);
    if (!lags) {
      for (int64_t n = 0; n < chunk.kv_heads; n++) finish_head(*step, n, scores + n * Engine::kScores);
    } else {
      if (has_previous) finish_head(*previous, 0, weights);
      std::swap(scores, weights), has_previous = true;
    }
    k_prefetch.finish(), v_prefetch.finish();
    next->keys = next_keys;
    Step<T>* const free = previous;
    previous = step, step = next, next = free;
  }
  if (has_previous) finish_head(*previous, 0, weights);
  for (int64_t n = 0; n < chunk.kv_heads; n++)
    for (int64_t r = 0; r < rows; r++) finish(state_of(n), n, r, space.row);
}

// Whether the own values of row r of the n-th head of a chunk explain every NaN in its sums (see forward/own_values.h).
static inline bool is_explained(const KeyChunk& chunk, int64_t n, int64_t r, const float* sums, char* scratch) {
  const Attention& a = *chunk.problem;
  const RowPlace at = row_place(chunk, n, r);
  bool explained = false;
  with_number(a, [&](auto type) {
    typedef Pointee<decltype(type)> T;
    explained = explains_nan<T>(a, chunk.batch, chunk.kv_head + n, at.head, at.row, chunk.key, chunk.key + chunk.keys,
                                sums, scratch);
  });
  return explained;
}

// Computes a chunk and writes its partial results. A row whose sums are not finite, though its own values do not
// explain every NaN, is computed again by itself, by the engine that computes each column on its own.
template <class Engine>
static void run_chunk(const KeyChunk& chunk, const KeyChunk* next_chunk, char* scratch) {
  const Attention& a = *chunk.problem;
  typedef DecodeVectors<typename Engine::T> VectorEngine;  // computes each column on its own
  constexpr bool independent_columns = std::is_base_of<VectorEngine, Engine>::value;
  constexpr float unscale = 1.0f / (float)(1 << Engine::kBits);
  const int64_t rows = rows_of_group(a), size = partial_size(a);
  const float natural = score_unit<Direct>(a).natural;
  const bool checks_finite = !independent_columns || ((a.ranges || a.band) && a.q_len > 1) || a.dense || a.bias;
  bool non_finite = false;
  sum_chunk<Engine>(chunk, next_chunk, 0, rows, false, scratch,
                    [&](const HeadState& state, int64_t n, int64_t r, float*) {
                      float* to = chunk.partials + (n * rows + r) * size;
                      Engine::store_sums(a, state, r, to);
                      for (int64_t d = 0; Engine::kBits > 0 && d < a.v_dim; d++) to[d] *= unscale;
                      to[a.v_dim] = state.max_score[r] * natural, to[a.v_dim + 1] = state.total[r] * unscale;
                      if (checks_finite) non_finite |= has_non_finite_sums(to, a.v_dim, state.total[r]);
                    });
  for (int64_t i = 0; non_finite && i < chunk.kv_heads * rows; i++) {
    float* to = chunk.partials + i * size;
    if (!has_non_finite_sums(to, a.v_dim, to[a.v_dim + 1]) || is_explained(chunk, i / rows, i % rows, to, scratch))
      continue;
    const KeyChunk head = {&a, chunk.batch, chunk.kv_head + i / rows, 1, chunk.key, chunk.keys, nullptr};
    sum_chunk<VectorEngine>(head, nullptr, i % rows, 1, true, scratch,
                            [&](const HeadState& state, int64_t, int64_t r, float* row) {
                              VectorEngine::store_sums(a, state, r, row);
                              const float max_score = state.max_score[r] * natural,
                                          scale = max_score == to[a.v_dim] ? 1 : expf(max_score - to[a.v_dim]);
                              for (int64_t d = 0; d < a.v_dim; d++)
                                if (!isfinite(to[d])) to[d] = row[d] * scale;
                            });
  }
}

// Partial results that merge_row adds to a sum while the sum is in registers.
constexpr int kMergedChunks = 32;

// Merges the partial results of one row, in order, into out and lse. They are at `offset` of each place of `partials`;
// the first one receives the sum.
template <class T>
static void merge_row(const Attention& a, int64_t batch, int64_t head, int64_t row, float* const* partials,
                      int64_t count, int64_t offset) {
  const auto max_score_of = [&](int64_t c) { return partials[c][offset + a.v_dim]; };
  const auto total_of = [&](int64_t c) { return partials[c][offset + a.v_dim + 1]; };
  float max_score = -kInfinity, all = 0;
  for (int64_t c = 0; c < count; c++)
    max_score = max_score_of(c) > max_score ? max_score_of(c) : max_score, all += total_of(c);
  T* out = out_row<T>(a, batch, head, row);
  if (is_empty(max_score, all)) {
    end_row(a, batch, head, row, max_score, all);
    memset(out, 0, (size_t)a.v_dim * sizeof(T));
    return;
  }
  float total = 0, weights[kMergedChunks], *sums = partials[0] + offset;
  const float* from[kMergedChunks];
  bool is_first = true;
  for (int64_t c = 0; c < count;) {  // in registers, some chunks at a time
    int merged = 0;
    for (; c < count && merged < kMergedChunks; c++) {
      if (is_empty(max_score_of(c), total_of(c))) continue;  // adding its zeros could change the sign of a zero
      const float weight = expf(max_score_of(c) - max_score);
      total += total_of(c) * weight;
      from[merged] = partials[c] + offset, weights[merged] = weight, merged++;
    }
    for (int64_t d = 0; merged > 0 && d < a.v_dim; d += kLanes) {
      Vec sum = is_first ? load(from[0] + d) * weights[0] : load(sums + d);
      for (int i = is_first; i < merged; i++) sum += load(from[i] + d) * weights[i];
      store(sums + d, sum);
    }
    is_first &= merged == 0;
  }
  const float inverse = end_row(a, batch, head, row, max_score, total);
  for (int64_t d = 0; d < a.v_dim; d += kLanes) store_from_float(out + d, load(sums + d) * inverse);
}

}  // namespace
