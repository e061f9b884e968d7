// A few query rows against a long cache: decoding.
//
// Memory traffic. Every key and value is read once and used for all rows of its group (query heads x query rows, kFewRows at
// most), 2 operations an element and row: reading the cache is the whole cost. So lanes lie along the head axis, where K and
// V are contiguous: a multiply-add serves kLanes elements of one row, where lanes over rows would leave most of them idle.
// The cache is cut into chunks of keys, by sizes and lengths alone; a chunk is read in steps of kStep keys, and, where the
// rows of all heads lie side by side (bshd), for all heads at each step. While a step is computed the next one is prefetched,
// in the order of memory: hardware stops at each 4 KiB page. Rows are found through a table of a step's addresses, so that
// pages of a cache cost nothing. Partial results (sums, largest score, total) of the chunks are merged in order.
#pragma once

#include "decode_tiles.h"
#include "decode_vectors.h"

namespace {

using undivided::KeyChunk;

// A partial result of one row: Dv sums, largest score (log 2), total.
INLINE int64_t partial_size(const Attention& a) { return round_up(a.v_dim + 2, 16); }

struct FewSpace {
  Panel* panel;
  float *scores, *q, *sums, *most, *total;  // the latter four of one head after the other
  float* row;                               // sums of one row
  char* steps;
  int64_t bytes;
};

template <class Engine>
static FewSpace carve_few(const Attention& a, int64_t kv_heads, char* base) {
  Carving at{base};
  FewSpace space;
  space.panel = (Panel*)at.take((int64_t)sizeof(Panel));
  space.scores = (float*)at.take(kFewRows * kStep * 4);
  space.q = (float*)at.take(kv_heads * Engine::q_floats(a) * 4);
  space.sums = (float*)at.take(kv_heads * Engine::sum_floats(a) * 4);
  space.most = (float*)at.take(kv_heads * kFewRows * 4);
  space.total = (float*)at.take(kv_heads * kFewRows * 4);
  space.row = (float*)at.take(partial_size(a) * 4);
  space.steps = at.take(2 * (int64_t)sizeof(Step<typename Engine::T>));
  space.bytes = at.bytes;
  return space;
}

// The segments of a chunk, step by step.
template <class T>
struct Steps {
  const Panel& panel;
  Rows<T> k, v;
  int64_t key, stop, most;
  int segment = 0;

  static void find(const Rows<T>& k, const Rows<T>& v, int64_t key, int64_t keys, Step<T>& step) {
    step.key = key, step.keys = keys;
    find_rows(k, key, keys, step.k);
    find_rows(v, key, keys, step.v);
  }
  void next(Step<T>& step) {
    step.keys = 0;
    for (; segment < panel.segments; segment++) {
      const int64_t from = larger_of(panel.segment[segment].start, key), to = smaller_of(panel.segment[segment].stop, stop);
      if (from >= to) continue;
      find(k, v, from, smaller_of(most - from % kAligned, to - from), step);
      key = from + step.keys;
      return;
    }
  }
};

template <class Engine>
static void start_head(const Attention& a, const KeyChunk& chunk, int64_t n, FewRows& few, float* q) {
  typedef typename Engine::T T;
  const int64_t group = a.heads / a.kv_heads;
  const T* row[kFewRows];
  for (int64_t r = 0; r < few.rows; r++)
    row[r] = (const T*)a.q + chunk.batch * a.q_b + ((chunk.kv_head + n) * group + r / a.q_len) * a.q_h + r % a.q_len * a.q_s;
  Engine::load_queries(a, row, few.rows, q);
  Engine::clear_sums(a, few);
  for (int64_t r = 0; r < few.rows; r++) few.most[r] = -kInfinity, few.total[r] = 0;
}

// What the rows of a chunk come to: finish(few, r, row) is called for each, with room for its sums.
template <class Engine, class Finish>
static void sum_chunk(const Attention& a, const KeyChunk& chunk, const KeyChunk* following, char* scratch, Finish finish) {
  typedef typename Engine::T T;
  const int64_t rows = a.heads / a.kv_heads * a.q_len;
  const FewSpace space = carve_few<Engine>(a, chunk.kv_heads, scratch);
  Panel& p = *space.panel;
  RowBlock block = {chunk.batch, 0, 0, 0, rows, 0};
  read_ranges(a, block, 0, p);
  auto head = [&](int64_t n) -> FewRows {
    return {space.q + n * Engine::q_floats(a), space.sums + n * Engine::sum_floats(a), space.most + n * kFewRows,
            space.total + n * kFewRows, rows};
  };
  for (int64_t n = 0; n < chunk.kv_heads; n++) {
    FewRows few = head(n);
    start_head<Engine>(a, chunk, n, few, space.q + n * Engine::q_floats(a));
  }
  const int64_t key_bytes = chunk.kv_heads * (a.qk_dim + a.v_dim) * (int64_t)sizeof(T);
  const int64_t most = larger_of(kAligned, smaller_of(kStep, kStepBytes / key_bytes / kAligned * kAligned));
  Steps<T> steps = {p, key_rows<T>(a, chunk.batch, chunk.kv_head), value_rows<T>(a, chunk.batch, chunk.kv_head),
                    chunk.key, chunk.key + chunk.keys, most};
  Step<T>*step = (Step<T>*)space.steps, *next = step + 1;
  Engine engine;
  for (steps.next(*step); step->keys; std::swap(step, next)) {
    steps.next(*next);
    const int64_t then = next->keys;
    if (then == 0 && following)
      Steps<T>::find(key_rows<T>(a, following->batch, following->kv_head), value_rows<T>(a, following->batch, following->kv_head),
                     following->key, smaller_of(most, following->keys), *next);
    for (int64_t n = 0; n < chunk.kv_heads; n++) {
      FewRows few = head(n);
      float decay[kFewRows];
      Ahead ahead = ahead_of(next->k, next->keys, n, chunk.kv_heads, a.k_h, a.qk_dim, step->keys);
      engine.score(a, few, *step, n, space.scores, ahead);
      few_soften(a, p, few, step->key, step->keys, Engine::kBits, space.scores, decay);
      ahead = ahead_of(next->v, next->keys, n, chunk.kv_heads, a.v_h, a.v_dim, step->keys);
      engine.weigh(a, few, *step, n, space.scores, decay, ahead);
    }
    next->keys = then;
  }
  for (int64_t n = 0; n < chunk.kv_heads; n++)
    for (int64_t r = 0; r < rows; r++) finish(head(n), r, space.row);
}

INLINE bool all_finite(const float* x, int64_t count) {
  Vec zero = {};
  for (int64_t d = 0; d < count; d += kLanes) zero += load(x + d) * 0.0f;
  return sum(zero) == 0;
}

template <class Engine>
static void run_chunk(const Attention& a, const KeyChunk& chunk, const KeyChunk* following, float* partials,
                      char* scratch) {
  typedef Vectors<typename Engine::T> Apart;  // where a column's sums see no other column
  bool finite = true;
  float* to = partials;
  sum_chunk<Engine>(a, chunk, following, scratch, [&](const FewRows& few, int64_t r, float*) {
    Engine::store_sums(a, few, r, to);
    to[a.v_dim] = few.most[r], to[a.v_dim + 1] = few.total[r];
    if (!std::is_same<Engine, Apart>::value) finite = finite && all_finite(to, a.v_dim);
    to += partial_size(a);
  });
  if (finite) return;
  to = partials;
  sum_chunk<Apart>(a, chunk, nullptr, scratch, [&](const FewRows& few, int64_t r, float* row) {
    Apart::store_sums(a, few, r, row);
    const float scale = exp2f(few.most[r] - to[a.v_dim]);
    for (int64_t d = 0; d < a.v_dim; d++)
      if (!isfinite(to[d])) to[d] = row[d] * scale;
    to += partial_size(a);
  });
}

// One row's chunks, in order, into out and lse. `partials` is the row's first, which becomes their sum; the next chunk's lies
// `stride` further.
template <class T>
static void merge_row(const Attention& a, int64_t batch, int64_t head, int64_t row, float* partials, int64_t count,
                      int64_t stride) {
  const float *mosts = partials + a.v_dim, *totals = mosts + 1;
  float most = -kInfinity;
  for (int64_t c = 0; c < count; c++) most = mosts[c * stride] > most ? mosts[c * stride] : most;
  T* out = (T*)a.out + batch * a.out_b + head * a.out_h + row * a.out_s;
  float* lse = a.lse ? a.lse + batch * a.lse_b + head * a.lse_h + row : nullptr;
  if (most == -kInfinity) {
    if (lse) *lse = most;
    memset(out, 0, (size_t)a.v_dim * sizeof(T));
    return;
  }
  float total = 0;
  for (int64_t c = 0; c < count; c++) {
    const float weight = exp2f(mosts[c * stride] - most);
    const bool first = c == 0;
    if (weight == 0 && !first) continue;
    total += totals[c * stride] * weight;
    const float* from = partials + c * stride;
    for (int64_t d = 0; d < a.v_dim; d += kLanes)
      store(partials + d, first ? load(from + d) * weight : load(partials + d) + load(from + d) * weight);
  }
  if (lse) *lse = most * kLn2 + logf(total);
  const float inverse = 1.0f / (total + (a.sinks ? exp2f(a.sinks[head] * kLog2E - most) : 0.0f));
  for (int64_t d = 0; d < a.v_dim; d += kLanes) store_from_float(out + d, load(partials + d) * inverse);
}

}  // namespace
