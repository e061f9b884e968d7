// Decoding with batch_invariant: few query rows per key/value head. Each sum is added in the order of forward/block.h,
// so that results are bitwise equal to those of prefill:
//
//     scores    along the head axis, one key per lane; K is transposed in registers
//     softmax   key block by key block, from the sequence's first key on; totals along the keys
//     values    along the keys of a block, from zero, one column per lane
//
// Keys that a row does not see have a weight of 0 in it, which changes no sum. Quantised keys and values become the
// numbers that prefill multiplies: 8 bits in registers, and their scales multiply scores and weights; 4 bits in
// registers too on multiply-adds, else in L1, a few keys of a head at a time.
//
// Memory traffic is that of decode/chunk.h: the keys of all heads of a unit are read in steps, in the order of memory,
// K of a key block before its V, while the next step is prefetched. A unit has a piece of the keys of its heads.
#pragma once

#include "decode/invariant_keys.h"

namespace {

// Whether a problem is decoded here: few rows, and sizes of whole vectors.
template <class Mode>
INLINE bool fits_invariant(const Attention& a) {
  constexpr int64_t step = Mode::Arith::kPairs ? 2 * kLanes : kLanes;
  return kMaxFewRows > 0 && rows_of_group(a) <= kMaxFewRows && a.qk_dim % step == 0 && a.v_dim % step == 0;
}

// The rows of some heads of a sequence, `rows` per key/value head, as a unit of work.
template <class Mode, bool kQuantized>
class InvariantUnit {
 public:
  typedef typename Mode::T T;
  typedef InvariantKeys<Mode, kQuantized> Keys;
  typedef typename Keys::KeyStepRows KeyStepRows;
  typedef typename Keys::Key Key;
  typedef typename Keys::Products Products;
  typedef typename Products::Arith Arith;

  InvariantUnit(const Attention& a, int64_t heads, int64_t rows, char* scratch)
      : InvariantUnit(a, heads, rows, scratch, Arena{scratch}) {}

  // first_row: of its rows in each group.
  void run(const KeyChunk& chunk, const KeyChunk* next_chunk, int64_t first_row = 0) {
    batch_ = chunk.batch, head_ = chunk.kv_head, first_row_ = first_row;
    read_ranges(a_, RowBlock{chunk.batch, 0, 0, first_row, rows_, 0}, 0, *panel_);
    for (int64_t n = 0; n < heads_; n++) load_queries(n);
    for (int64_t i = 0; i < heads_ * padded_; i++) max_score_[i] = -kInfinity, total_[i] = 0;
    memset(sums_, 0, (size_t)(heads_ * padded_ * sum_stride_) * 4);
    const int64_t bytes_of_key = heads_ * keys_.max_element_count() * (int64_t)sizeof(Key);
    const auto keys_of_step = [&](int64_t bytes, int64_t min) {
      return larger_of(min, smaller_of(kDecodeStepKeys, bytes / bytes_of_key / min * min));
    };
    const int64_t score_keys = keys_of_step(kQuantized ? kInvariantQuantizedBytes : kInvariantKeyBytes, 16),
                  value_keys = keys_of_step(kQuantized ? kInvariantQuantizedBytes : kInvariantValueBytes, 4);
    const KeySteps all_steps(*panel_, chunk.key, chunk.key + chunk.keys, score_keys, value_keys);
    KeyStepRows *current = steps_, *following = steps_ + 1;
    KeyStep step = all_steps.first();
    if (step.keys > 0) keys_.find(chunk, step, *current);
    while (step.keys > 0) {
      const KeyStep next = all_steps.after(step);
      following->rows.lines = following->rows.regions = 0;
      if (next.keys > 0) keys_.find(chunk, next, *following);
      else if (next_chunk && next_chunk->keys > 0)
        keys_.find(*next_chunk, {next_chunk->key, smaller_of(next_chunk->keys, score_keys), false, 0, 0}, *following);
      if (step.is_values) add_values(step, *current, following->rows);
      else multiply_scores(step, *current, following->rows);
      if (!step.is_values && next.is_values) softmax(next.key, step.key + step.keys);
      if (step.is_values && !next.is_values) add_block_sums();
      std::swap(current, following);
      step = next;
    }
    write_all(chunk);
  }

  int64_t bytes;

 private:
  InvariantUnit(const Attention& a, int64_t heads, int64_t rows, char* scratch, Arena arena)
      : a_(a), heads_(heads), rows_(rows), padded_(round_up_rows(rows)), keys_(a, kQuantized || padded_ > 4, arena),
        sum_stride_(Keys::kWidens && Arith::kPairs && keys_.scales_rows ? round_up(a.v_dim, 4 * kLanes) : a.v_dim) {
    const auto floats = [&](int64_t count) { return (float*)arena.allocate(count * 4); };
    const int64_t all = heads * padded_;
    panel_ = (Panel*)arena.allocate((int64_t)sizeof(Panel));
    q_ = floats(all * depth()), scores_ = floats(all * kScoreStride);
    sums_ = floats(all * sum_stride_), block_sums_ = floats(all * sum_stride_);
    step_weights_ = floats(kQuantized ? padded_ * kWeightStride : 0);
    max_score_ = floats(all), total_ = floats(all), row_ = floats(a.v_dim);
    steps_ = (KeyStepRows*)arena.allocate(2 * (int64_t)sizeof(KeyStepRows));
    non_finite_ = (uint8_t*)arena.allocate(checks_finite() ? heads * rows : 0);
    bytes = arena.bytes, rest_ = scratch ? scratch + bytes : nullptr;
    if (checks_finite()) bytes += InvariantUnit(a, 1, 1, nullptr).bytes;
  }

  static constexpr int64_t kScoreStride = kBlockKeys + 2 * kLanes;
  static constexpr int64_t kWeightStride = kDecodeStepKeys / (Arith::kPairs ? 2 : 1);  // of the weights of a step
  int64_t depth() const { return a_.qk_dim / (Arith::kPairs ? 2 : 1); }
  // Whether rows may have a weight of 0 for keys that other rows see.
  bool checks_finite() const { return a_.q_len > 1 && rows_ > 1 && (a_.ranges || a_.band); }

  // Row r of a group: its query head, and its place there.
  int64_t head_of(int64_t n, int64_t r) const {
    return (head_ + n) * (a_.heads / a_.kv_heads) + (first_row_ + r) / a_.q_len;
  }
  int64_t place_of(int64_t r) const { return (first_row_ + r) % a_.q_len; }

  void load_queries(int64_t n) {  // [Scalar][row]
    float* to = q_ + n * padded_ * depth();
    memset(to, 0, (size_t)(padded_ * depth()) * 4);
    for (int64_t r = 0; r < rows_; r++) {
      const T* from = (const T*)a_.q + batch_ * a_.q_b + head_of(n, r) * a_.q_h + place_of(r) * a_.q_s;
      for (int64_t d = 0; d < depth(); d++) {
        if constexpr (Arith::kPairs) memcpy(to + d * padded_ + r, from + 2 * d, 4);
        else to[d * padded_ + r] = to_float(from[d]);
      }
    }
  }

  void multiply_scores(const KeyStep& step, const KeyStepRows& current, const StepRows<Key>& following) {
    const int64_t vectors_of_keys = (step.keys + kLanes - 1) / kLanes;
    int64_t steps = vectors_of_keys * (depth() / kLanes);  // of prefetch, per head
    if (keys_.reads_bytes) steps = (vectors_of_keys + 1) / 2 * (a_.qk_dim / kBytesPerPrefetch);
    if (keys_.reads_nibbles) steps = (vectors_of_keys + 1) / 2 * (a_.qk_dim / kNibblesPerPrefetch);
    StepPrefetch prefetch(following, heads_ * steps);
    const int64_t at = step.key % kBlockKeys;
    for (int64_t j = 0, vectors; j < step.keys; j += vectors * kLanes) {
      vectors = step.keys - j > kLanes && (kQuantized || key_vectors_at_once((int)padded_) > 1) ? 2 : 1;
      for (int64_t n = 0; n < heads_; n++)
        with_padded_rows(padded_, [&](auto rows) {
          constexpr int R = decltype(rows)::value;
          const float* q = q_ + n * padded_ * depth();
          float* scores = scores_ + n * padded_ * kScoreStride + at + j;
          if constexpr (!kQuantized && R <= 4) {
            const auto multiply = vectors == 2 ? score_keys_in_lanes<Products, R, key_vectors_at_once(R)>
                                               : score_keys_in_lanes<Products, R, 1>;
            multiply(q, current.rows.row + j, n * a_.k_h, depth(), scores, kScoreStride, prefetch);
          } else if (keys_.reads_nibbles) {
            keys_.template score_four_bits<R>(q, current, j, vectors, n, scores, kScoreStride, prefetch);
          } else if (keys_.reads_bytes) {
            score_bytes_of<R>(q, current, j, vectors, n, scores, prefetch);
          } else {
            const float* keys = keys_.transpose(current, j, vectors, n, prefetch);
            const auto multiply = vectors == 2 ? score_transposed<Arith, R, 2> : score_transposed<Arith, R, 1>;
            multiply(q, keys, depth(), scores, kScoreStride);
          }
          if constexpr (kQuantized)
            if (keys_.scales_rows) scale_scores(current, j, vectors, n, scores);
        });
    }
  }
  template <int R>
  void score_bytes_of(const float* q, const KeyStepRows& from, int64_t j, int64_t vectors, int64_t n, float* scores,
                      StepPrefetch& prefetch) {
    if constexpr (Keys::kWidens) {
      const float* keys = keys_.transpose_stored(from, j, vectors, n);
      keys_.with_row_format([&](auto type) {
        typedef Pointee<decltype(type)> Byte;
        const auto multiply = vectors == 2 ? score_bytes<Arith, Byte, R, 2> : score_bytes<Arith, Byte, R, 1>;
        multiply(q, keys, a_.qk_dim / 4, scores, kScoreStride, prefetch);
      });
    }
  }
  void scale_scores(const KeyStepRows& from, int64_t j, int64_t vectors, int64_t n, float* scores) const {
    for (int64_t k = 0; k < vectors; k++, scores += kLanes) {
      float scale[kLanes];
      for (int64_t i = 0; i < kLanes; i++) scale[i] = from.scales.row[j + k * kLanes + i][n * a_.k_scale_h];
      for (int64_t r = 0; r < padded_; r++) {
        float* s = scores + r * kScoreStride;
        store(s, load(s) * load(scale));
      }
    }
  }

  // Turns the scores of a key block into weights, and sets the factors of the earlier sums. [start, stop): from the
  // first to the last key of the block that some row sees.
  void softmax(int64_t start, int64_t stop) {
    const int64_t block = KeySteps::block_of(start), from = start - block, to = stop - block;
    const int64_t first = from / kLanes * kLanes, last = round_up(to, kLanes);
    const float factor = score_unit<Products>(a_).log2;
    const bool covered = panel_->covers(start, stop);
    memset(block_sums_, 0, (size_t)(heads_ * padded_ * sum_stride_) * 4);
    for (int64_t i = 0; i < heads_ * padded_; i++) {
      float* s = scores_ + i * kScoreStride;
      if (!keeps_products(a_)) scale_products(s, first, last);
      // last: a softcap would make them finite
      if (!covered) apply_ranges(s, i % padded_, block, first, last);
      for (int64_t j = first; j < from; j++) s[j] = -kInfinity;
      for (int64_t j = to; j < last; j++) s[j] = -kInfinity;
      Vec high = splat(-kInfinity);
      for (int64_t j = first; j < last; j += kLanes) high = larger(load(s + j), high);
      const float previous = max_score_[i], highest = reduce_max(high), now = highest > previous ? highest : previous;
      const Vec base = splat(now == -kInfinity ? 0 : now);
      decay_of(i) = previous == base[0] ? 1 : exp2_or_zero((splat(previous) - base) * factor)[0];
      max_score_[i] = now;
      const WeightMap<Arith> map(base, factor);
      for (int64_t j = first; map.has_large() && j < last; j += kLanes) store(s + j, map.shifted(load(s + j)));
      for (int64_t j = first; j < last; j += kLanes) store(s + j, map.weight(load(s + j)));
    }
    for (int64_t i = 0; i < heads_ * padded_; i += 4) add_totals(i, smaller_of(heads_ * padded_ - i, 4), first, last);
  }
  // As scale_products in forward/softmax.h, with one key per lane.
  void scale_products(float* s, int64_t first, int64_t last) const {
    const ScoreMap map(a_);
    for (int64_t j = first; j < last; j += kLanes) {
      const Vec x = load(s + j);
      store(s + j, rounded(map.cap != 0 ? tanh_of(x * map.inverse) * map.cap : x * map.scale));
    }
  }
  // As apply_ranges in forward/softmax.h, with one key per lane: masks the scores of a block outside of row r's ranges.
  void apply_ranges(float* s, int64_t r, int64_t block, int64_t first, int64_t last) const {
    const Panel& p = *panel_;
    IVec key = isplat((int32_t)(block + first));
    for (int i = 0; i < kLanes; i++) key[i] += i;
    for (int64_t j = first; j < last; j += kLanes, key += kLanes) {
      const IVec allowed = is_within(key, p.start[0][r], p.stop[0][r], p.start[1][r], p.stop[1][r]);
      store(s + j, allowed ? load(s + j) : splat(-kInfinity));
    }
  }
  // Adds the weights of up to four rows to their totals, key by key or pair by pair, and rounds pairs to bf16 unless
  // they are multiplied by scales first.
  void add_totals(int64_t first_row, int64_t rows, int64_t first, int64_t last) {
    typedef float Four __attribute__((vector_size(16)));  // side by side: each is a chain of additions
    float* const s = scores_ + first_row * kScoreStride;
    const float* weights[4];
    for (int64_t r = 0; r < 4; r++) weights[r] = s + (r < rows ? r : 0) * kScoreStride;
    const auto at = [&](int64_t j) { return Four{weights[0][j], weights[1][j], weights[2][j], weights[3][j]}; };
    Four sum = {};
    for (int64_t j = first; j < last; j += Arith::kPairs ? 2 : 1) sum += Arith::kPairs ? at(j) + at(j + 1) : at(j);
    for (int64_t r = 0; r < rows; r++) {
      float& total = total_[first_row + r];
      total = total * decay_of(first_row + r) + sum[r];
      float* to = s + r * kScoreStride;
      if constexpr (Arith::kPairs)
        for (int64_t j = first; j < last && !keys_.scales_rows; j += kLanes)
          store_from_float((BFloat16*)(void*)to + j, load(to + j));
    }
  }

  void add_values(const KeyStep& step, const KeyStepRows& current, const StepRows<Key>& following) {
    const int64_t keys_per_step = Arith::kPairs ? 2 : keys_per_prefetch((int)smaller_of(padded_, 4));
    if constexpr (Keys::kWidens && Arith::kPairs)
      if (keys_.scales_rows) return add_byte_pairs(step, current, following);
    const int64_t passes = passes_of_values<Arith>(padded_, a_.v_dim);
    StepPrefetch prefetch(following, larger_of(heads_ * passes * (step.keys / keys_per_step), 1));
    const int64_t first = step.key % kBlockKeys;
    for (int64_t n = 0; n < heads_; n++) {
      const float* weights = scores_ + n * padded_ * kScoreStride;
      int64_t stride = kScoreStride, at = first;
      if constexpr (kQuantized)
        if (keys_.scales_rows) at = scale_weights(step, current, n), weights = step_weights_, stride = kWeightStride;
      const auto for_rows = [&](auto f) INLINE_LAMBDA {  // f(R, weights, sums), of at most four rows
        for (int64_t r = 0; r < padded_; r += 4)
          with_padded_rows(smaller_of(padded_, 4), [&](auto R) INLINE_LAMBDA {
            f(std::integral_constant<int, (R.value > 4 ? 4 : R.value)>(), weights + r * stride,
              block_sums_ + (n * padded_ + r) * a_.v_dim);
          });
      };
      const auto add = [&](const auto* const* row, int64_t offset) {
        for_rows([&](auto R, const float* from, float* sums) INLINE_LAMBDA {
          add_all_values<Products, R.value>(from, stride, row, offset, at, step.keys, a_.v_dim, sums, prefetch);
        });
      };
      if constexpr (Keys::kWidens && !Arith::kPairs)
        if (keys_.scales_rows) {
          keys_.with_row_format([&](auto type) { add((decltype(type)*)(const void*)current.rows.row, n * a_.v_h); });
          continue;
        }
      if (keys_.reads_nibbles) {
        for_rows([&](auto R, const float* from, float* sums) {
          keys_.template add_four_bits<R.value, kScoreStride>(from + at, current, step.keys, n, sums, prefetch);
        });
      } else {
        const auto [row, offset] = keys_.values(current, step.keys, n);
        add(row, offset);
      }
    }
  }
  // The weights of a step, multiplied by the scales of its values, to step_weights_. Returns the place of the first key
  // there: 1 if it is the second of a pair.
  int64_t scale_weights(const KeyStep& step, const KeyStepRows& from, int64_t n) {
    const int64_t first = step.key % kBlockKeys, place = Arith::kPairs ? first % 2 : 0, count = place + step.keys;
    float scale[kDecodeStepKeys + kLanes];
    scale[0] = 0;
    for (int64_t j = 0; j < step.keys; j++) scale[place + j] = from.scales.row[j][n * a_.v_scale_h];
    for (int64_t j = count; j < round_up(count, kLanes); j++) scale[j] = 0;
    for (int64_t r = 0; r < padded_; r++) {
      const float* weights = scores_ + (n * padded_ + r) * kScoreStride + first - place;
      float* to = step_weights_ + r * kWeightStride;
      for (int64_t j = 0; j < count; j += kLanes) {
        const Vec x = load(weights + j) * load(scale + j);
        if constexpr (Arith::kPairs) store_from_float((BFloat16*)(void*)to + j, x);
        else store(to + j, x);
      }
    }
    return place;
  }
  // add_values for numbers of 8 bits on bf16 dot products.
  void add_byte_pairs([[maybe_unused]] const KeyStep& step, [[maybe_unused]] const KeyStepRows& current,
                      [[maybe_unused]] const StepRows<Key>& following) {
#if defined(__AVX512BF16__)
    keys_.with_row_format([&](auto type) {
      typedef Pointee<decltype(type)> Byte;
      typedef PairFormat<Byte> Format;
      static_assert(kWeightStride == kStepPairs);
      const int64_t steps = Format::template value_passes<1>(a_.v_dim) * (step.keys / Format::kKeysPerPrefetch);
      StepPrefetch prefetch(following, larger_of(heads_ * (padded_ > 4 ? 2 : 1) * steps, 1));
      for (int64_t n = 0; n < heads_; n++) {
        const int64_t place = scale_weights(step, current, n);
        HeadRows<Byte> rows = {(const Byte* const*)(const void*)current.rows.row, n * a_.v_h, nullptr, 0};
        const auto add = [&](const uint32_t* weights, int64_t keys) {
          for_each_pass<kRowsOfPairs>(padded_, [&](auto count, int64_t r) {
            const PairSums to = {block_sums_ + (n * padded_ + r) * sum_stride_, sum_stride_,
                                 weights + r * kWeightStride, keys};
            Format::template add_values<decltype(count)::value>(to, rows, 0, a_.v_dim, prefetch);
          });
        };
        const uint32_t* weights = (const uint32_t*)(const void*)step_weights_;
        if (place > 0) {  // the second key of a pair, alone
          uint32_t alone[kMaxFewRows * kWeightStride];
          for (int64_t r = 0; r < padded_; r++) alone[r * kWeightStride] = weights[r * kWeightStride] >> 16;
          add(alone, 1);
          rows.row++, weights++;
        }
        add(weights, step.keys - place);
      }
    });
#endif
  }
  void add_block_sums() {
    for (int64_t i = 0; i < heads_ * padded_; i++) {
      const Vec decay = splat(decay_of(i));
      float *sums = sums_ + i * sum_stride_, *added = block_sums_ + i * sum_stride_;
      for (int64_t d = 0; d < sum_stride_; d += kLanes) store(sums + d, load(sums + d) * decay + load(added + d));
    }
  }

  // A row whose sums may contain values that it does not see is computed again, alone.
  void __attribute__((noinline)) write_all(const KeyChunk& chunk) {
    bool any_non_finite = false;
    for (int64_t n = 0; n < heads_; n++)
      for (int64_t r = 0; r < rows_; r++) {
        const int64_t i = n * padded_ + r;
        if (chunk.partials) write_partial(i, chunk.partials + (n * rows_ + r) * partial_size(a_));
        else write(n, r);
        if (!checks_finite()) continue;
        non_finite_[n * rows_ + r] = has_non_finite_sums(sums_ + i * sum_stride_, sum_stride_, total_[i]);
        any_non_finite |= non_finite_[n * rows_ + r] != 0;
      }
    for (int64_t i = 0; any_non_finite && i < heads_ * rows_; i++)
      if (non_finite_[i]) {
        float* partials = chunk.partials ? chunk.partials + i * partial_size(a_) : nullptr;
        const KeyChunk head = {&a_, chunk.batch, head_ + i / rows_, 1, chunk.key, chunk.keys, partials};
        InvariantUnit(a_, 1, 1, rest_).run(head, nullptr, i % rows_);
      }
  }
  // The sums of a row in the order of columns; `to` is where they may be reordered.
  const float* ordered_sums(int64_t i, float* to) const {
    const float* sums = sums_ + i * sum_stride_;
    if (keys_.reads_nibbles) return restore_order<Int4>(sums, a_.v_dim, to), to;
#if defined(__AVX512BF16__)
    if constexpr (Arith::kPairs) {
      const auto restore = keys_.scales_rows ? PairFormat<Int8>::restore_sums : PairFormat<BFloat16>::restore_sums;
      restore(sums, a_.v_dim, to), sums = to;
    }
#endif
    return sums;
  }
  void write_partial(int64_t i, float* to) const {
    const float* sums = ordered_sums(i, to);
    if (sums != to) memcpy(to, sums, (size_t)a_.v_dim * 4);
    to[a_.v_dim] = max_score_[i] * score_unit<Products>(a_).natural, to[a_.v_dim + 1] = total_[i];
  }
  // As write_rows in forward/query_rows.h.
  void write(int64_t n, int64_t r) {
    const int64_t i = n * padded_ + r, head = head_of(n, r), place = place_of(r);
    T* to = out_row<T>(a_, batch_, head, place);
    const float max_score = rounded(max_score_[i] * score_unit<Products>(a_).natural),
                inverse = end_row(a_, batch_, head, place, max_score, total_[i]);
    const float* sums = ordered_sums(i, row_);
    for (int64_t d = 0; d < a_.v_dim; d += kLanes)
      store_from_float(to + d, inverse != 0.0f ? load(sums + d) * inverse : Vec{});
  }

  float& decay_of(int64_t i) { return scores_[i * kScoreStride + kScoreStride - 1]; }

  const Attention& a_;
  const int64_t heads_, rows_, padded_;  // rows of a head, and rows that are computed
  Keys keys_;
  const int64_t sum_stride_;
  int64_t batch_ = 0, head_ = 0, first_row_ = 0;
  Panel* panel_;
  float *q_, *scores_, *sums_, *block_sums_, *max_score_, *total_, *row_;
  KeyStepRows* steps_;
  float* step_weights_;  // of one step
  uint8_t* non_finite_;
  char* rest_;
};

}  // namespace
