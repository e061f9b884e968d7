// A block of query rows that see few keys each, on AMX: packed documents, windows, short sequences (see
// gemm/amx_short.h).
//
// Panels of 32 rows, one after another: all scores of a panel, one softmax, all results. Steps of 32 keys start where a
// document starts, so that a panel meets few steps, and quarters of a step that no row sees are skipped. Keys are
// packed when a panel first needs them, into a ring buffer.
#pragma once

#include "forward/own_values.h"
#include "forward/short_softmax.h"
#include "mask/panel.h"

namespace {

// The largest number of visible keys with which rows take this path; 0: none do.
INLINE int64_t max_short_keys(const Attention& a) {
  const bool plain = keeps_products(a) && !a.dense && !a.dropout;
  if (!plain || (a.ranges && a.columns != 2)) return 0;
  if (a.ranges || a.band) return kMaxShortKeys;
  return a.dtype == kFloat32 ? kMaxShortKeysUnmasked32 : kMaxShortKeysUnmasked;
}

}  // namespace

#if defined(UNDIVIDED_AMX)

namespace {

constexpr int64_t kShortRows = 2 * kTileRows;
constexpr int64_t kMaxShortSteps = kMaxShortKeys / kShortStep + 4;  // of a ring
// Steps of the ring: enough for `longest` keys that start anywhere in a step, and one more key for each further row of
// a panel.
INLINE int64_t ring_steps(int64_t longest) { return longest / kShortStep + 4; }

struct ShortPanel {
  int64_t first, rows;  // first: index in the row block
  int64_t from, to;     // keys that some row sees; empty if from >= to
  int64_t key;          // where its first step starts
  alignas(64) int32_t start[kShortRows], stop[kShortRows];
  int64_t head[kShortRows], at[kShortRows];  // of each row
  int64_t steps() const { return (to - key + kShortStep - 1) / kShortStep; }
};

struct ShortSpace {
  uint8_t* non_finite;  // one flag per row, if there are several; see has_non_finite_sums
  char* rest;           // free once all flags are known
  char *q, *scores, *sums, *k, *v;
  char* zeros;   // a row of zeros, as long as one of K or V
  char* halves;  // a step's rows of K in parts
  int64_t bytes;
};
template <class Mode>
static ShortSpace layout_short(const Attention& a, int64_t rows, char* base) {
  constexpr int P = kParts<Mode>;
  const int64_t k_bytes = round_up(a.qk_dim, kTileDepth) * kShortStep * 2 * P,
                v_bytes = round_up(a.v_dim, kTileDepth) * kShortStep * 2 * P;
  ShortSpace w;
  Arena arena{base};
  w.non_finite = (uint8_t*)arena.allocate(rows > 1 ? rows : 0), w.rest = base + arena.bytes;  // room for recompute_row
  w.q = arena.allocate(k_bytes);
  w.scores = arena.allocate(kMaxShortSteps * kStepScores<P>);
  w.sums = arena.allocate(round_up(a.v_dim, kTileDepth) * kShortRows * 4);
  w.k = arena.allocate(kMaxShortSteps * k_bytes), w.v = arena.allocate(kMaxShortSteps * v_bytes);
  w.zeros = arena.allocate(larger_of(a.qk_dim, a.v_dim) * (int64_t)sizeof(typename Mode::T));
  w.halves = arena.allocate(P > 1 ? k_bytes : 0);
  w.bytes = arena.bytes;
  return w;
}

template <class Mode>
class ShortBlock {
 public:
  typedef typename Mode::T T;
  typedef Part<Mode> Half;
  static constexpr int P = kParts<Mode>;

  ShortBlock(const Attention& a, const RowBlock& block, char* scratch)
      : a_(a), block_(block), w_(layout_short<Mode>(a, block.rows, scratch)),
        k_(key_rows<T>(a, block.batch, block.kv_head)), v_(value_rows<T>(a, block.batch, block.kv_head)),
        depth_((a.qk_dim + kTileDepth - 1) / kTileDepth), k_part_(depth_ * kGroupStride),
        v_part_(round_up(a.v_dim, kTileDepth) * kShortStep * 2), k_bytes_(P * k_part_), v_bytes_(P * v_part_),
        ring_(ring_steps(block.short_keys)), max_extent_((ring_ - 1) * kShortStep), streams_(are_streamed(a)),
        checks_finite_(block.rows > 1 && may_hide_pairs(a)) {
    memset(w_.zeros, 0, (size_t)larger_of(a.qk_dim, a.v_dim) * sizeof(T));
  }

  // False if some numbers do not fit the parts (see gemm/split.h); the results are invalid then.
  bool run() {
    ShortPanel panels[2], *p = &panels[0], *next = &panels[1];
    find_panel(0, *p);
    Prefetch first_panel;
    prefetch_panel(first_panel, *p);
    first_panel.pace_rows(1), first_panel.step_rows();
    while (true) {
      const int64_t next_row = p->first + p->rows;
      const bool is_last = next_row >= block_.rows;
      if (!is_last) find_panel(next_row, *next);
      compute(*p, is_last ? nullptr : next);
      if (is_last) break;
      std::swap(p, next);
    }
    if (streams_) _mm_sfence();
    if (P > 1 && range_check_.out_of_range()) return false;
    for (int64_t r = 0; any_non_finite_ && r < block_.rows; r++)
      if (w_.non_finite[r] && !explains_nan<T>(a_, block_, r, 0, a_.kv_len, w_.rest)) recompute_row(r);
    return true;
  }

 private:
  // Computes one row by itself, in scratch that is no longer in use.
  void recompute_row(int64_t r) const {
    RowBlock single_row = block_;
    single_row.row += r, single_row.rows = 1, single_row.next_block = nullptr;
    ShortBlock(a_, single_row, w_.rest).run();
  }

  // The offset, modulo 32, at which the steps of a row's keys start: that of its first key, if at least kMinEqualStarts
  // consecutive rows start at the same key, as in a document. It does not depend on the panel, so that a row's sums are
  // the same in any.
  int64_t phase_of(int64_t at) {
    if (!a_.ranges) return 0;
    const int32_t* range = a_.ranges + block_.batch * a_.ranges_b + at * 2;
    if (at == 0 || at != previous_ + 1 || range[0] != range[-2]) {
      int64_t alike = 1;
      while (alike < kMinEqualStarts && at + alike < a_.q_len && range[2 * alike] == range[0]) alike++;
      for (int64_t i = 1; alike < kMinEqualStarts && i <= at && range[-2 * i] == range[0]; i++) alike++;
      phase_ = alike >= kMinEqualStarts ? range[0] % kShortStep : 0;
    }
    previous_ = at;
    return phase_;
  }

  // Takes rows from `first` on whose steps start at the same offset. A panel ends where a document ends (unless
  // documents are very short), and before a row whose keys leave a gap to those of the panel, since a key in a gap may
  // hold anything.
  void find_panel(int64_t first, ShortPanel& p) {
    const int64_t limit = smaller_of(kShortRows, block_.rows - first);
    int64_t phase = 0, head = block_.first_head + (block_.row + first) / a_.q_len, at = (block_.row + first) % a_.q_len;
    p.first = first, p.from = p.to = p.key = 0;
    for (p.rows = 0; p.rows < limit; p.rows++) {
      Range s = ranges_of_row(a_, block_.batch, at).of[0];
      const Range previous = {p.rows > 0 ? p.start[p.rows - 1] : 0, p.rows > 0 ? p.stop[p.rows - 1] : 0};
      const bool follows =
          previous.start == s.start && previous.start < previous.stop && previous.stop <= s.stop && at > 0 && a_.ranges;
      const int64_t own = follows ? phase : phase_of(at);
      if (follows && s.stop - p.from <= max_extent_) p.to = larger_of(p.to, s.stop), previous_ = at;
      else if (s.start >= s.stop) s = {0, 0};
      else if (p.from >= p.to) phase = own, p.from = s.start, p.to = s.stop;
      else {
        const int64_t from = smaller_of(p.from, s.start), to = larger_of(p.to, s.stop);
        if (own != phase || s.start > p.to || s.stop < p.from || to - from > max_extent_) {
          previous_ = -1;  // looks at the row again
          break;
        }
        p.from = from, p.to = to;
      }
      p.start[p.rows] = (int32_t)s.start, p.stop[p.rows] = (int32_t)s.stop;
      p.head[p.rows] = head, p.at[p.rows] = at;
      if (++at == a_.q_len) at = 0, head++;
    }
    for (int64_t r = p.rows; r < kShortRows; r++) p.start[r] = p.stop[r] = 0;
    p.key = phase_start(p.from, phase);
  }
  static int64_t phase_start(int64_t key, int64_t phase) { return phase + round_down(key - phase, kShortStep); }

  // Rows of Q, or of the results.
  void prefetch_rows(Prefetch& prefetch, const void* base, int64_t b, int64_t h, int64_t s, int64_t columns,
                     const ShortPanel& p) const {
    for (int64_t r = 0; r < p.rows;) {
      const int64_t some = smaller_of(p.rows - r, a_.q_len - p.at[r]);
      prefetch.add((const T*)base + block_.batch * b + p.head[r] * h + p.at[r] * s, stride_in_bytes<T>(s), some,
                   columns * (int64_t)sizeof(T));
      r += some;
    }
  }
  void prefetch_panel(Prefetch& prefetch, const ShortPanel& p) const {
    prefetch_rows(prefetch, a_.q, a_.q_b, a_.q_h, a_.q_s, a_.qk_dim, p);
    const int64_t from = larger_of(p.from, smaller_of(packed_to_, p.to));
    prefetch.add(k_, from, p.to, a_.qk_dim);
    prefetch.add(v_, from, p.to, a_.v_dim);
  }

  int64_t step_of(int64_t key) const { return (key - origin_) / kShortStep; }
  int64_t slot(int64_t step) const { return (uint32_t)step % (uint32_t)ring_; }

  // Packs a panel's keys step by step, with zeros beyond those that some row sees so far.
  void pack(const ShortPanel& p) {
    const int64_t phase = p.key % kShortStep;
    const bool known = origin_ >= 0 && phase == origin_ % kShortStep && p.from >= packed_from_ &&
                       p.from <= packed_to_ && step_of(larger_of(packed_to_, p.to) - 1) - step_of(p.from) < ring_;
    // restarts at slot 0, where the previous document was
    if (!known) origin_ = p.key, packed_from_ = packed_to_ = p.from;
    if (p.to <= packed_to_) return;
    const int64_t unfinished = smaller_of(packed_to_, p.to - 1);
    packed_to_ = p.to;
    for (int64_t step = step_of(unfinished); step <= step_of(p.to - 1); step++) {
      const T *k[kShortStep], *v[kShortStep];
      const int64_t key = origin_ + step * kShortStep;
      for (int64_t i = 0; i < kShortStep; i++) {
        const bool in_use = key + i >= packed_from_ && key + i < packed_to_;
        k[i] = in_use ? k_(key + i) : (const T*)w_.zeros, v[i] = in_use ? v_(key + i) : (const T*)w_.zeros;
      }
      char *to_k = w_.k + slot(step) * k_bytes_, *to_v = w_.v + slot(step) * v_bytes_;
      if constexpr (P > 1) {
        split_key_pairs<Mode>(k, a_.qk_dim, w_.halves, to_k, k_part_, range_check_);
        split_value_pairs<Mode>(v, a_.v_dim, to_v, v_part_, range_check_);
      } else {
        pack_key_pairs(k, a_.qk_dim, to_k);
        pack_value_pairs(v, a_.v_dim, to_v);
      }
    }
  }

  // What a group of 16 rows sees, in units of 16 keys from the panel's first step.
  struct GroupExtent {
    int64_t first, last, rows;
    int64_t all_from, all_to;  // keys that all its rows see
  };
  GroupExtent group_extent(const ShortPanel& p, int64_t g) const {
    GroupExtent extent = {0, 0, larger_of(0, smaller_of(p.rows - g * kTileRows, kTileRows)), 0, 0};
    const __m512i start = _mm512_load_si512(p.start + g * kTileRows), stop = _mm512_load_si512(p.stop + g * kTileRows);
    const __mmask16 rows = (__mmask16)((1u << extent.rows) - 1), some = _mm512_mask_cmplt_epi32_mask(rows, start, stop);
    if (!some) return extent;
    extent.all_from = _mm512_mask_reduce_max_epi32(rows, start),
    extent.all_to = _mm512_mask_reduce_min_epi32(rows, stop);
    extent.first = (_mm512_mask_reduce_min_epi32(some, start) - p.key) / kTileRows;
    extent.last = (_mm512_mask_reduce_max_epi32(some, stop) - p.key + kTileRows - 1) / kTileRows;
    return extent;
  }

  void copy_queries(const ShortPanel& p) {
    for (int64_t r = 0; r < p.rows; r++) {
      const T* row = (const T*)a_.q + block_.batch * a_.q_b + p.head[r] * a_.q_h + p.at[r] * a_.q_s;
      const T* from = p.start[r] < p.stop[r] ? row : (const T*)w_.zeros;  // a row without keys may hold anything
      char* to = w_.q + r / kTileRows * P * depth_ * kTileBytes + r % kTileRows * 64;
      if constexpr (P > 1) {
        split_row<Mode>(from, a_.qk_dim, to, kTileBytes, depth_ * kTileBytes, range_check_);
      } else {
        for (int64_t d = 0; d < a_.qk_dim; d += kTileDepth, to += kTileBytes)
          _mm512_store_si512(to, load_halves(from, d, a_.qk_dim));
      }
    }
  }

  void compute(const ShortPanel& p, const ShortPanel* next) {
    alignas(64) float max_score[kShortRows], total[kShortRows];
    if (p.from >= p.to) {
      for (int64_t r = 0; r < kShortRows; r++) max_score[r] = -kInfinity, total[r] = 0;
      return write(p, max_score, total);
    }
    pack(p);
    copy_queries(p);
    const GroupExtent group[2] = {group_extent(p, 0), group_extent(p, 1)};
    const int64_t first = step_of(p.key), steps = p.steps();
    Prefetch prefetch;
    if (!streams_) prefetch_rows(prefetch, a_.out, a_.out_b, a_.out_h, a_.out_s, a_.v_dim, p);
    if (next) prefetch_panel(prefetch, *next);
    else if (block_.next_block) prefetch_next_block<T>(prefetch, a_, *block_.next_block);
    prefetch.pace_rows(p.rows + steps * (depth_ + (a_.v_dim + kTileDepth - 1) / kTileDepth));
    PendingTiles previous;
    for (int64_t t = 0; t < steps; t++) {
      int quarters = 0;
      for (int i = 0; i < 4; i++)
        quarters |= (group[i / 2].first <= 2 * t + i % 2 && 2 * t + i % 2 < group[i / 2].last) << i;
      const Operands operands = {
          w_.q, 64, P * depth_ * kTileBytes, depth_ * kTileBytes, w_.k + slot(first + t) * k_bytes_, k_part_};
      previous.quarters = score_step<Half, kScoreProducts<Mode>>(quarters, operands, depth_, previous, prefetch);
      previous.at = w_.scores + t * kStepScores<P>, previous.row = kScoreRow<P>;
    }
    previous.store_all();
    for (int64_t g = 0; g < 2; g++)
      if (group[g].rows) softmax(p, g, group[g], max_score + g * kTileRows, total + g * kTileRows, prefetch);
    multiply_v(first, steps, group, prefetch);
    write(p, max_score, total);
  }

  void softmax(const ShortPanel& p, int64_t g, const GroupExtent& extent, float* max_score, float* total,
               Prefetch& prefetch) const {
    char* scores = w_.scores + g * kScoreGroup<P>;
    for (int64_t j = extent.first; j < extent.last; j++) {
      const int64_t key = p.key + j * kTileRows;
      if (key >= extent.all_from && key + kTileRows <= extent.all_to) continue;
      mask_scores(p.start + g * kTileRows, p.stop + g * kTileRows, extent.rows, key,
                  scores + j / 2 * kStepScores<P> + j % 2 * 64, kScoreRow<P>);
    }
    softmax_rows<Mode>(scores, extent.first, extent.last, extent.rows, score_unit<Mode>(a_).log2, max_score, total,
                       prefetch);
  }

  void multiply_v(int64_t first, int64_t steps, const GroupExtent (&group)[2], Prefetch& prefetch) const {
    const char* v[kMaxShortSteps];
    GroupRun runs[kMaxShortSteps];
    int count = 0;
    for (int64_t t = 0; t < steps; t++) {
      int groups = 0;
      for (int g = 0; g < 2; g++) groups |= (group[g].first / 2 <= t && 2 * t < group[g].last) << g;
      v[t] = w_.v + slot(first + t) * v_bytes_;
      if (count > 0 && runs[count - 1].groups == groups) runs[count - 1].to++;
      else if (groups) runs[count++] = {t, t + 1, groups};
    }
    multiply_values_short<Mode>(runs, count, group[1].rows > 0, w_.scores, v, v_part_, a_.v_dim, w_.sums, prefetch);
  }

  // Large results are written past the caches: whole lines, which need not be read first.
  static bool are_streamed(const Attention& a) {
    const int64_t bytes = a.batch * a.heads * a.q_len * a.v_dim * (int64_t)sizeof(T);
    return bytes >= kMinStreamedBytes && a.v_dim % kTileDepth == 0 && (uintptr_t)a.out % 64 == 0 &&
           (a.out_b | a.out_h | a.out_s) % (64 / (int64_t)sizeof(T)) == 0;
  }

  void write(const ShortPanel& p, const float* max_score, const float* total) {
    constexpr float weight_scale = (float)(1 << kWeightBits<Half>);
    const float natural = score_unit<Mode>(a_).natural;
    alignas(64) float inverse[kShortRows], lse[kShortRows];
    for (int64_t r = 0; r < p.rows; r += kLanes) {
      const Vec high = load(max_score + r), l = load(total + r) / weight_scale;
      store(lse + r, ((high == -kInfinity) & (l == 0)) ? high : high * natural + log_of(l));
      Vec sink = {};
      for (int64_t i = 0; a_.sinks && i < kLanes && r + i < p.rows; i++)
        sink[i] = expf(a_.sinks[p.head[r + i]] - high[i] * natural);
      store(inverse + r, 1.0f / weight_scale / input_scale<Mode>() / (l + sink));
    }
    for (int64_t r = 0; r < p.rows; r++) {
      const int64_t head = p.head[r], at = p.at[r];
      T* to = out_row<T>(a_, block_.batch, head, at);
      const bool empty = is_empty(max_score[r], total[r]);
      if (a_.lse) a_.lse[block_.batch * a_.lse_b + head * a_.lse_h + at] = lse[r];
      const char* from = w_.sums + r * kPanelBytes;
      Vec zero_or_nan = {};
      for (int64_t d = 0; !empty && checks_finite_ && d < a_.v_dim; d += kTileDepth) {
        const float* x = (const float*)(from + d / kTileDepth * 2 * kGroupStride);
        zero_or_nan += load(x) * 0 + load(x + kLanes) * 0;
      }
      const bool non_finite = total[r] == total[r] && any(zero_or_nan != zero_or_nan);
      if (checks_finite_) w_.non_finite[p.first + r] = non_finite, any_non_finite_ |= non_finite;
      for (int64_t d = 0; d < a_.v_dim; d += kTileDepth, from += 2 * kGroupStride) {
        const Vec low = empty ? Vec{} : load((const float*)from) * inverse[r];
        const Vec high = empty ? Vec{} : load((const float*)(from + 64)) * inverse[r];
        if constexpr (P > 1) {
          if (streams_) stream_partial(low, to + d), stream_partial(high, to + d + kLanes);
          else store_partial(low, to + d, a_.v_dim - d), store_partial(high, to + d + kLanes, a_.v_dim - d - kLanes);
        } else {
          const __m512i x = join_columns(low, high, T());
          if (streams_) _mm512_stream_si512((__m512i*)(void*)(to + d), x);
          else if (d + kTileDepth <= a_.v_dim) _mm512_storeu_si512(to + d, x);
          else _mm512_mask_storeu_epi16(to + d, (__mmask32)((1u << (a_.v_dim - d)) - 1), x);
        }
      }
    }
  }

  static constexpr int64_t kMinEqualStarts = kTileRows / 2;
  const Attention& a_;
  const RowBlock& block_;
  const ShortSpace w_;
  const Rows<T> k_, v_;
  const int64_t depth_, k_part_, v_part_, k_bytes_, v_bytes_;  // sizes of a step in the ring, in bytes
  RangeCheck range_check_ = RangeCheck::of_mode<Mode>();
  const int64_t ring_, max_extent_;  // max_extent_: limit of the distance between the first and the last key of a panel
  // checks_finite_: whether sums may contain non-finite values of keys that their rows do not see
  const bool streams_, checks_finite_;
  bool any_non_finite_ = false;
  int64_t previous_ = -1, phase_ = 0;                      // the last row that phase_of looked at
  int64_t origin_ = -1, packed_from_ = 0, packed_to_ = 0;  // the key of slot 0; the keys in the ring
};

}  // namespace

#endif
