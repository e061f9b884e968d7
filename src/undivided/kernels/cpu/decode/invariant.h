// Decoding with batch_invariant: one query row per head. Each sum is added in the order of forward/block.h, so that
// results are bitwise equal to those of prefill:
//
//     scores    along the head axis, one key per lane; K is transposed in registers
//     softmax   key block by key block, from the sequence's first key on; totals along the keys
//     values    along the keys of a block, from zero, one column per lane
//
// Memory traffic is that of decode/chunk.h: the keys of all heads of a unit are read in steps, in the order of memory,
// K of a key block before its V, while the next step is prefetched. A unit has all keys of its heads.
#pragma once

#include "decode/chunk.h"

namespace {

// Whether a problem is decoded here: every row of a group sees the same keys, and sizes are whole vectors.
template <class Mode>
INLINE bool fits_invariant(const Attention& a) {
  constexpr int64_t step = Mode::Arith::kPairs ? 2 * kLanes : kLanes;
  return kMaxFewRows > 0 && a.q_len == 1 && rows_of_group(a) <= kMaxFewRows && !(a.ranges && a.columns > 2) &&
         !a.format && a.qk_dim % step == 0 && a.v_dim % step == 0;
}

// Calls f(integral_constant R, row) so that each of `rows` rows is in one pass; 3 and 4, or 7 and 8 rows, are the same.
template <class F>
INLINE void for_each_rows(int64_t rows, F f) {
  if (rows == 1) return f(std::integral_constant<int, 1>(), 0);
  if (rows == 2) return f(std::integral_constant<int, 2>(), 0);
  for (int64_t r = 0; r < rows; r += 4) f(std::integral_constant<int, 4>(), r);
}
INLINE int64_t padded_rows(int64_t rows) { return rows > 2 ? round_up(rows, 4) : rows; }

// Scores of R rows with a vector of keys, [row][key]; queries are [Scalar][row].
template <class Mode, int R>
static __attribute__((noinline)) void score_key_vector(const float* q, const typename Mode::T* const* row,
                                                       int64_t offset, int64_t count, float* scores, int64_t stride,
                                                       StepPrefetch& shared) {
  typedef typename Mode::Arith Arith;
  constexpr int64_t step = Arith::kPairs ? 2 : 1, chain = kMaxChain / step;
  StepPrefetch prefetch = shared;
  Vec sum[R] = {};
  for (int64_t from = 0; from < count; from += chain) {
    const int64_t to = smaller_of(from + chain, count);
    Vec acc[R] = {};
    for (int64_t c = from; c < to; c += kLanes) {
      prefetch.step();
      Vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) x[i] = load_lanes<Mode>(row[i] + offset + c * step);
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        add_rows_of<Arith>(acc, q + (c + i) * R, x[i], std::make_integer_sequence<int, R>());
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sum[r] = from > 0 ? sum[r] + acc[r] : acc[r];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store(scores + r * stride, sum[r]);
  shared = prefetch;
}

// sums[row][columns] += the weighted values of a step, for R rows and C vectors of columns from d on. weights:
// [row][key], or pairs of keys; the first key has index `first` there.
template <class Mode, int R, int C>
INLINE void add_step_values(const float* weights, int64_t weight_stride, const typename Mode::T* const* row,
                            int64_t offset, int64_t first, int64_t keys, float* sums, int64_t stride,
                            StepPrefetch& shared) {
  typedef typename Mode::Arith Arith;
  StepPrefetch prefetch = shared;
  Vec acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * stride + c * kLanes);
  if constexpr (!Arith::kPairs) {
    for (int64_t j = 0; j < keys; j++) {
      if (j % kKeysPerPrefetch == 0) prefetch.step();
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const Vec y = load_as_float(row[j] + offset + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r][c] += weights[r * weight_stride + first + j] * y;
      }
    }
  }
#if defined(__AVX512BF16__)
  if constexpr (Arith::kPairs) {
    const auto add = [&](int64_t pair, const BFloat16* even, const BFloat16* odd) {
#pragma GCC unroll 2
      for (int c = 0; c < C; c += 2) {
        const __m512i x = even ? _mm512_loadu_si512(even + offset + c * kLanes) : __m512i{};
        const __m512i y = odd ? _mm512_loadu_si512(odd + offset + c * kLanes) : __m512i{};
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const uint32_t weight = fetch<uint32_t>(weights + r * weight_stride + pair);
          Arith::add(acc[r][c], weight, (Vec)low), Arith::add(acc[r][c + 1], weight, (Vec)high);
        }
      }
    };
    int64_t j = first % 2;
    if (j) add(first / 2, nullptr, row[0]);  // a pair starts at an even key
    for (; j + 2 <= keys; j += 2) {
      prefetch.step();
      add((first + j) / 2, row[j], row[j + 1]);
    }
    if (j < keys) add((first + j) / 2, row[j], nullptr);
  }
#endif
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(sums + r * stride + c * kLanes, acc[r][c]);
  shared = prefetch;
}

// The keys of some heads of a sequence, as a unit of work.
template <class Mode>
class InvariantUnit {
 public:
  typedef typename Mode::T T;
  typedef typename Mode::Arith Arith;

  InvariantUnit(const Attention& a, int64_t heads, char* scratch)
      : a_(a), heads_(heads), rows_(rows_of_group(a)), padded_(padded_rows(rows_)) {
    Arena arena{scratch};
    const auto floats = [&](int64_t count) { return (float*)arena.allocate(heads * count * 4); };
    q_ = floats(padded_ * depth()), scores_ = floats(padded_ * kScoreStride);
    sums_ = floats(padded_ * a.v_dim), block_sums_ = floats(padded_ * a.v_dim);
    max_score_ = floats(padded_), total_ = floats(padded_);
    row_ = (float*)arena.allocate(a.v_dim * 4);
    steps_ = (StepRows<T>*)arena.allocate(2 * (int64_t)sizeof(StepRows<T>));
    bytes = arena.bytes;
  }

  void run(const KeyChunk& chunk, const KeyChunk* next_chunk) {
    batch_ = chunk.batch, head_ = chunk.kv_head, start_ = chunk.key, stop_ = chunk.key + chunk.keys;
    for (int64_t n = 0; n < heads_; n++) load_queries(n);
    for (int64_t i = 0; i < heads_ * padded_; i++) max_score_[i] = -kInfinity, total_[i] = 0;
    const int64_t bytes_of_key = heads_ * larger_of(a_.qk_dim, a_.v_dim) * (int64_t)sizeof(T);
    const auto keys_of = [&](int64_t bytes, int64_t min) {
      return larger_of(min, smaller_of(kDecodeStepKeys, bytes / bytes_of_key / min * min));
    };
    score_keys_ = keys_of(kInvariantKeyBytes, 16), value_keys_ = keys_of(kInvariantValueBytes, 4);
    StepRows<T>*steps = steps_, *next_steps = steps_ + 1;
    if (start_ < stop_) find(chunk, first_part(chunk), *steps);
    for (Part part = first_part(chunk); part.key < stop_;) {
      const Part next = after(part);
      const StepRows<T>& current = *steps;
      StepRows<T>& following = *next_steps;
      following.lines = following.regions = 0;
      if (next.key < stop_) find(chunk, next, following);
      else if (next_chunk && next_chunk->keys > 0) find(*next_chunk, first_part(*next_chunk), following);
      if (part.values) add_values(part, current, following);
      else multiply_scores(part, current, following);
      if (!part.values && next.values) finish_scores(part.key / kBlockKeys * kBlockKeys);
      if (part.values && !next.values) add_block_sums(), has_sums_ = true;
      std::swap(steps, next_steps);
      part = next;
    }
    for (int64_t n = 0; n < heads_; n++)
      for (int64_t r = 0; r < rows_; r++)
        if (chunk.partials) write_partial(n, r, chunk.partials + (n * rows_ + r) * partial_size(a_));
        else write(n, r);
  }

  int64_t bytes;

 private:
  static constexpr int64_t kScoreStride = kBlockKeys + 2 * kLanes;
  int64_t depth() const { return a_.qk_dim / (Arith::kPairs ? 2 : 1); }

  // A step: some keys of a key block, and whether their values are read.
  struct Part {
    int64_t key, keys;
    bool values;
  };
  Part part_at(int64_t key, int64_t stop, bool values) const {
    const int64_t keys = values ? value_keys_ : score_keys_, end = smaller_of(stop, (key / keys + 1) * keys);
    return {key, end - key, values};
  }
  int64_t block_stop(int64_t key) const { return smaller_of(stop_, (key / kBlockKeys + 1) * kBlockKeys); }
  Part first_part(const KeyChunk& chunk) const {
    const int64_t stop = smaller_of(chunk.key + chunk.keys, (chunk.key / kBlockKeys + 1) * kBlockKeys);
    return part_at(chunk.key, stop, false);
  }
  Part after(const Part& part) const {
    const int64_t key = part.key + part.keys, stop = block_stop(part.key);
    if (key < stop) return part_at(key, stop, part.values);
    if (!part.values) return part_at(larger_of(start_, part.key / kBlockKeys * kBlockKeys), stop, true);
    return key < stop_ ? part_at(key, block_stop(key), false) : Part{key, 0, false};
  }
  void find(const KeyChunk& chunk, const Part& part, StepRows<T>& rows) const {
    const Attention& a = *chunk.problem;
    const int64_t others = chunk.kv_heads - 1;
    if (part.values)
      rows.find(value_rows<T>(a, chunk.batch, chunk.kv_head), part.key, part.keys, others * a.v_h + a.v_dim);
    else rows.find(key_rows<T>(a, chunk.batch, chunk.kv_head), part.key, part.keys, others * a.k_h + a.qk_dim);
  }

  void load_queries(int64_t n) {
    float* to = q_ + n * padded_ * depth();
    memset(to, 0, (size_t)(padded_ * depth()) * 4);
    for (int64_t r = 0; r < rows_; r++) {
      const T* from = (const T*)a_.q + batch_ * a_.q_b + ((head_ + n) * rows_ + r) * a_.q_h;
      // [pass][Scalar][row]
      const int64_t width = padded_ < 4 ? padded_ : 4;
      float* lane = to + r / width * width * depth() + r % width;
      for (int64_t d = 0; d < depth(); d++) {
        if constexpr (Arith::kPairs) memcpy(lane + d * width, from + 2 * d, 4);
        else lane[d * width] = to_float(from[d]);
      }
    }
  }

  void multiply_scores(const Part& part, const StepRows<T>& current, const StepRows<T>& following) {
    const int64_t units = (part.keys + kLanes - 1) / kLanes * (depth() / kLanes) * (padded_ > 4 ? 2 : 1);
    StepPrefetch prefetch(following, heads_ * units);
    const int64_t at = part.key % kBlockKeys;
    for (int64_t j = 0; j < part.keys; j += kLanes)
      for (int64_t n = 0; n < heads_; n++)
        for_each_rows(padded_, [&](auto rows, int64_t r) {
          const int64_t row = n * padded_ + r;
          score_key_vector<Mode, decltype(rows)::value>(q_ + row * depth(), current.row + j, n * a_.k_h, depth(),
                                                        scores_ + row * kScoreStride + at + j, kScoreStride, prefetch);
        });
  }

  // Turns the scores of a key block into weights, and rescales the earlier sums.
  void finish_scores(int64_t block) {
    const int64_t from = larger_of(start_ - block, 0), to = smaller_of(stop_ - block, kBlockKeys);
    const int64_t first = from / kLanes * kLanes, last = round_up(to, kLanes);
    const float factor = score_unit<Mode>(a_).log2;
    memset(block_sums_, 0, (size_t)(heads_ * padded_ * a_.v_dim) * 4);
    for (int64_t i = 0; i < heads_ * padded_; i++) {
      float* s = scores_ + i * kScoreStride;
      if (!keeps_products(a_)) to_units(s, first, last);
      for (int64_t j = first; j < from; j++) s[j] = -kInfinity;  // last: a softcap would make it finite
      for (int64_t j = to; j < last; j++) s[j] = -kInfinity;
      Vec high = splat(-kInfinity);
      for (int64_t j = first; j < last; j += kLanes) high = larger(load(s + j), high);
      const float previous = max_score_[i], highest = reduce_max(high), now = highest > previous ? highest : previous;
      const Vec base = splat(now == -kInfinity ? 0 : now);
      decay_of(i) = previous == base[0] ? 1 : exp2_or_zero((splat(previous) - base) * factor)[0];
      max_score_[i] = now;
      for (int64_t j = first; j < last; j += kLanes) store(s + j, exp2_or_zero((load(s + j) - base) * factor));
    }
    for (int64_t i = 0; i < heads_ * padded_; i += 4) add_totals(i, smaller_of(heads_ * padded_ - i, 4), first, last);
  }
  // As apply_score_bias.
  void to_units(float* s, int64_t first, int64_t last) const {
    const float scale = (float)a_.scale, cap = (float)a_.softcap, inverse = cap != 0 ? (float)(a_.scale / a_.softcap) : 0;
    for (int64_t j = first; j < last; j += kLanes) {
      const Vec x = load(s + j);
      store(s + j, rounded(cap != 0 ? tanh_of(x * inverse) * cap : x * scale));
    }
  }
  // Adds the weights of some rows to their totals, key by key or pair by pair, and rounds pairs to bf16.
  void add_totals(int64_t first_row, int64_t rows, int64_t first, int64_t last) {
    const float* s = scores_ + first_row * kScoreStride;
    float sum[4] = {};
    for (int64_t j = first; j < last; j += Arith::kPairs ? 2 : 1)
      for (int64_t r = 0; r < rows; r++) {
        const float* weight = s + r * kScoreStride + j;
        if constexpr (Arith::kPairs) sum[r] += weight[0] + weight[1];
        else sum[r] += weight[0];
      }
    for (int64_t r = 0; r < rows; r++) {
      float& total = total_[first_row + r];
      total = total * decay_of(first_row + r) + sum[r];
      float* to = scores_ + (first_row + r) * kScoreStride;
      if constexpr (Arith::kPairs)
        for (int64_t j = first; j < last; j += kLanes) store_from_float((BFloat16*)(void*)to + j, load(to + j));
    }
  }

  void add_values(const Part& part, const StepRows<T>& current, const StepRows<T>& following) {
    constexpr int64_t keys_per_prefetch = Arith::kPairs ? 2 : kKeysPerPrefetch, width = kColumns * kLanes;
    const int64_t passes = (a_.v_dim / width + a_.v_dim % width / kNarrow) * (padded_ > 4 ? 2 : 1);
    StepPrefetch prefetch(following, larger_of(heads_ * passes * (part.keys / keys_per_prefetch), 1));
    const int64_t first = part.key % kBlockKeys;
    for (int64_t n = 0; n < heads_; n++)
      for_each_rows(padded_, [&](auto rows, int64_t r) {
        constexpr int R = decltype(rows)::value;
        const float* weights = scores_ + (n * padded_ + r) * kScoreStride;
        float* sums = block_sums_ + (n * padded_ + r) * a_.v_dim;
        const int64_t offset = n * a_.v_h;
        int64_t d = 0;
        for (; d + width <= a_.v_dim; d += width)
          add_step_values<Mode, R, kColumns>(weights, kScoreStride, current.row, offset + d, first, part.keys, sums + d,
                                             a_.v_dim, prefetch);
        for (; d < a_.v_dim; d += kNarrow)
          add_step_values<Mode, R, kNarrow / kLanes>(weights, kScoreStride, current.row, offset + d, first, part.keys,
                                                     sums + d, a_.v_dim, prefetch);
      });
  }
  void add_block_sums() {
    for (int64_t i = 0; i < heads_ * padded_; i++) {
      const Vec decay = splat(decay_of(i));
      float *sums = sums_ + i * a_.v_dim, *added = block_sums_ + i * a_.v_dim;
      for (int64_t d = 0; d < a_.v_dim; d += kLanes)
        store(sums + d, has_sums_ ? load(sums + d) * decay + load(added + d) : load(added + d));
    }
  }

  // The sums of a row in the order of columns; `to` is where they may be reordered.
  const float* ordered_sums(int64_t i, [[maybe_unused]] float* to) const {
    const float* sums = sums_ + i * a_.v_dim;
#if defined(__AVX512BF16__)
    if constexpr (Arith::kPairs) PairFormat<BFloat16>::restore_sums(sums, a_.v_dim, to), sums = to;
#endif
    return sums;
  }
  void write_partial(int64_t n, int64_t r, float* to) const {
    const int64_t i = n * padded_ + r;
    const float* sums = ordered_sums(i, to);
    if (sums != to) memcpy(to, sums, (size_t)a_.v_dim * 4);
    to[a_.v_dim] = max_score_[i] * score_unit<Mode>(a_).natural, to[a_.v_dim + 1] = total_[i];
  }
  // As write_rows.
  void write(int64_t n, int64_t r) {
    const int64_t i = n * padded_ + r, head = (head_ + n) * rows_ + r;
    T* to = (T*)a_.out + batch_ * a_.out_b + head * a_.out_h;
    const float natural = score_unit<Mode>(a_).natural, m = max_score_[i], l = total_[i];
    const bool empty = is_empty(m, l);
    if (a_.lse) a_.lse[batch_ * a_.lse_b + head * a_.lse_h] = empty ? m : m * natural + logf(l);
    const float sink = a_.sinks && !empty ? expf(a_.sinks[head] - m * natural) : 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / (l + sink);
    const float* sums = ordered_sums(i, row_);
    for (int64_t d = 0; d < a_.v_dim; d += kLanes)
      store_from_float(to + d, inverse != 0.0f ? load(sums + d) * inverse : Vec{});
  }

  static constexpr int kColumns = kLanes < 16 ? 2 : 4;  // vectors at once, so that the sums of four rows fit registers
  static constexpr int64_t kNarrow = Arith::kPairs ? 2 * kLanes : kLanes;
  float& decay_of(int64_t i) { return scores_[i * kScoreStride + kScoreStride - 1]; }

  const Attention& a_;
  const int64_t heads_, rows_, padded_;  // rows of a head, and rows that are computed
  int64_t batch_ = 0, head_ = 0, start_ = 0, stop_ = 0, score_keys_ = 0, value_keys_ = 0;
  bool has_sums_ = false;
  float *q_, *scores_, *sums_, *block_sums_, *max_score_, *total_, *row_;
  StepRows<T>* steps_;
};

}  // namespace
