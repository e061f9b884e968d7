// A block of query rows with every key that they may attend to: prefill and training.
//
// Only what a panel's rows may attend to is computed: the union of their ranges, as a short list of segments, each cut
// at the edges of the key blocks; if only some vectors of rows see a key, only those (see panel_vector.h). A row's
// result does not depend on which rows share its panel, so the order of every sum is a function of the problem alone.
//
// Memory traffic. Wide blocks of R rows take one key block after another, each for all panels: a key block is read from
// memory once, and R / kPanel times from L2. A multiply-add is 2 operations, and a block of 128 keys has 128 * (Dk +
// Dv) elements, so R rows do 2 * R operations per element read: 768 for R = 384, about ten times what a core needs to
// hide DRAM. Per panel, Q^T (Dk rows of kPanel lanes: 24 KiB at Dk = 128) and the scores of a key block (24 KiB) share
// L1; the output O^T passes through L1 once per key block, 1 / kBlockKeys of the multiply-adds. Narrow blocks (windows,
// documents, short sequences) take one panel after another, each with all of its keys: Q^T and O^T stay in L1, and key
// blocks are packed when a panel first needs them, and kept. The next key block, or the next panel's Q, keys and
// results, are prefetched a few lines at a time.
#pragma once

#include "forward/own_values.h"
#include "forward/panel_amx.h"
#include "forward/panel_vector.h"
#include "forward/short_block.h"
#include "forward/small.h"
#include "gemm/prefetch.h"

namespace {

// The largest distance between the first and the last key of a narrow block; see kMaxNarrowBytes.
template <class Mode>
INLINE int64_t max_narrow_keys(const Attention& a) {
  return kMaxNarrowBytes / (2 * kParts<Mode> * larger_of(a.qk_dim + a.v_dim, 1)) / kBlockKeys * kBlockKeys;
}

template <class Mode>
class Block {
 public:
  typedef typename Mode::T T;

  Block(const Attention& a, const RowBlock& block, char* scratch)
      : a_(a), block_(block), k_(key_rows<T>(a, block.batch, block.kv_head)),
        v_(value_rows<T>(a, block.batch, block.kv_head)), checks_finite_(block.rows > 1 && may_hide_pairs(a)) {
    const RowKeys keys = keys_of_block(a, block);
    from_ = larger_of(keys.extent.start, block.key), to_ = smaller_of(keys.extent.stop, block.key_stop);
    first_block_key_ = from_ / kBlockKeys * kBlockKeys;
    narrow_ =  // a panel of few rows keeps no packed keys for others
        (Mode::kAmx || block.rows > kMaxFewRows) && to_ - first_block_key_ <= max_narrow_keys<Mode>(a) &&
        keys.longest * (a.qk_dim + a.v_dim) * (Mode::kAmx ? 2 * kParts<Mode> : (int64_t)sizeof(T)) <=
            kTuning.max_row_bytes;
    row_major_ = std::is_same<Mode, Direct>::value && narrow_ && sums_in_rows(a, block, keys);
    w_ = layout_block<Mode>(a, block.rows, narrow_ ? larger_of(0, to_ - first_block_key_) : kAllKeys, scratch);
    panel_count_ = 0;
    for (int64_t first = 0; first < block.rows; first += w_.panels[panel_count_++].rows)
      read_ranges(a, block, first, w_.panels[panel_count_], narrow_ ? rows_of_panel(a, block, first) : kPanel);
  }

  // False if some numbers do not fit this mode's parts (see gemm/split.h); the results are invalid then.
  bool run() {
    if (checks_finite_ && block_.rows > 0)  // rows > 1 then, which gcc 14 does not see: it warns of a negative size
      memset(w_.non_finite, 0, (size_t)block_.rows);
    if (narrow_) run_panels();
    else run_key_blocks();
    if (kParts<Mode> > 1 && range_check_.out_of_range()) return false;
    for (int64_t r = 0; any_non_finite_ && r < block_.rows; r++)
      if (w_.non_finite[r] && !explains_nan<T>(a_, block_, r, from_, to_, w_.rest)) recompute_row(r);
    return true;
  }

 private:
  // One panel after another, each with all of its keys.
  void run_panels() {
    for (int64_t block_key = first_block_key_; block_key < to_; block_key += kBlockKeys)
      key_block_at(block_key).start = kEmpty;
    if (panel_count_ > 0 && w_.panels[0].segments && !Mode::kAmx) {
      prefetched_to_ = smaller_of(smaller_of(keys_stop(w_.panels[0]), to_), first_block_key_ + kBlockKeys);
      prefetch_keys(from_, prefetched_to_, 1).step();
    } else {
      prefetched_to_ = from_;
    }
    for (int64_t i = 0; i < panel_count_; i++) {
      Panel& p = w_.panels[i];
      const PanelSums sums = w_.sums_of<Mode>(a_, 0);
      begin(p, sums);
      Prefetch prefetch = prefetch_for_panel(i);
      for (int64_t block_key = first_block_key_; block_key < to_; block_key += kBlockKeys) {
        const int64_t stop = smaller_of(block_key + kBlockKeys, to_);
        if (!meets(p, block_key, stop)) continue;
        KeyBlock<Mode>& key_block = key_block_at(block_key);
        if (key_block.start == kEmpty) place_key_block(i, block_key, key_block);
        const int64_t needed_to = round_up(smaller_of(keys_stop(p), stop), kPackStep);
        if (key_block.packed_to < smaller_of(needed_to, key_block.stop))
          pack(key_block, smaller_of(needed_to, key_block.stop));
        step(p, sums, key_block, block_key, stop, prefetch);
      }
      finish(p, sums);
    }
  }

  // One key block after another, each for all panels.
  void run_key_blocks() {
    Prefetch first = prefetch_keys(from_, smaller_of(first_block_key_ + kBlockKeys, to_), panel_count_);
    if (!Mode::kAmx) first.touch_far_rows();
    for (int64_t i = 0; i < panel_count_; i++) {
      if (!Mode::kAmx) first.step();  // AMX packs K first, row by row, in the order of the hardware's prefetcher
      begin(w_.panels[i], w_.sums_of<Mode>(a_, i));
    }
    for (int64_t block_key = first_block_key_; block_key < to_; block_key += kBlockKeys) {
      const int64_t stop = smaller_of(block_key + kBlockKeys, to_);
      bool met = false;
      for (int64_t i = 0; i < panel_count_; i++) met |= meets(w_.panels[i], block_key, stop);
      if (!met) continue;
      KeyBlock<Mode>& key_block = w_.key_blocks<Mode>()[0];
      place_key_block(0, block_key, key_block);
      pack(key_block, key_block.stop);
      Prefetch prefetch = prefetch_keys(stop, smaller_of(stop + kBlockKeys, to_), panel_count_ * work_of(kBlockKeys));
      if (stop == to_ && block_.next_block) {
        prefetch_next_block<T>(prefetch, a_, *block_.next_block, kBlockKeys);
        prefetch.pace(panel_count_ * work_of(stop - block_key));
      }
      if (!Mode::kAmx) prefetch.touch_far_rows();
      for (int64_t i = 0; i < panel_count_; i++)
        step(w_.panels[i], w_.sums_of<Mode>(a_, i), key_block, block_key, stop, prefetch);
    }
    for (int64_t i = 0; i < panel_count_; i++) finish(w_.panels[i], w_.sums_of<Mode>(a_, i));
  }

  void begin(Panel& p, const PanelSums& sums) {
    if (p.segments) {
      transpose_q<Mode>(a_, block_, p.first, p.rows, sums.qt, range_check_);
      if (a_.dropout) read_dropout_rows(a_, block_, p.first, p.rows, *sums.dropout_rows);
    }
    p.has_sums = false, p.row_major = row_major_;
    memset(sums.total, 0, (size_t)kPanel * 4);
    for (int64_t r = 0; r < kPanel; r++) sums.max_score[r] = -kInfinity;
  }
  void finish(const Panel& p, const PanelSums& sums) {
    if (!p.has_sums) memset(sums.ot, 0, (size_t)(o_depth<Mode>(a_) * kPanel) * 4);
    auto write = block_.partials ? write_partials<Mode> : write_rows<Mode>;
    if constexpr (std::is_same<Mode, Direct>::value)
      if (p.row_major) write = write_row_sums;
    write(a_, block_, p.first, p.rows, sums.ot, sums.max_score, sums.total);
    if (checks_finite_ && p.has_sums) find_non_finite(p, sums);
  }

  void find_non_finite(const Panel& p, const PanelSums& sums) {
    if (p.row_major && !has_non_finite_sums(sums.ot, p.rows * a_.v_dim, 0)) return;
    for (int64_t r = 0; p.row_major && r < p.rows; r++)
      mark(p.first + r, has_non_finite_sums(sums.ot + r * a_.v_dim, a_.v_dim, sums.total[r]));
    for (int64_t r = 0; !p.row_major && r < p.rows; r += kLanes) {
      Vec zero_or_nan[4] = {};  // four independent chains of additions
      const float* column = sums.ot + r;
      int64_t d = 0;
      for (; d + 4 <= a_.v_dim; d += 4, column += 4 * kPanel)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) zero_or_nan[i] += load(column + i * kPanel) * 0;
      for (; d < a_.v_dim; d++, column += kPanel) zero_or_nan[0] += load(column) * 0;
      const Vec all = zero_or_nan[0] + zero_or_nan[1] + zero_or_nan[2] + zero_or_nan[3], total = load(sums.total + r);
      const IVec lanes = (all != all) & (total == total);
      if (!any(lanes)) continue;
      for (int64_t i = 0; i < smaller_of(p.rows - r, kLanes); i++) mark(p.first + r + i, lanes[i] != 0);
    }
  }
  void mark(int64_t row, bool non_finite) { w_.non_finite[row] = non_finite, any_non_finite_ |= non_finite; }
  // Computes one row by itself, in scratch that is no longer in use.
  void recompute_row(int64_t r) {
    RowBlock single_row = block_;
    single_row.row += r, single_row.rows = 1, single_row.next_block = nullptr;
    if (single_row.partials) single_row.partials += r * partial_size(a_);
    Block(a_, single_row, w_.rest).run();
  }

  // Whether a panel sees some of the keys [start, stop). Each call advances next_segment, so keys must come in order.
  static bool meets(Panel& p, int64_t start, int64_t stop) {
    while (p.next_segment < p.segments && p.segment[p.next_segment].stop <= start) p.next_segment++;
    return p.next_segment < p.segments && p.segment[p.next_segment].start < stop;
  }

  // One past the last key that a panel sees; the panel must have segments.
  static int64_t keys_stop(const Panel& p) { return p.segment[p.segments - 1].stop; }
  KeyBlock<Mode>& key_block_at(int64_t start) { return w_.key_blocks<Mode>()[(start - first_block_key_) / kBlockKeys]; }

  // Places the key block that starts at block_key, for panels from `first` on.
  void place_key_block(int64_t first, int64_t block_key, KeyBlock<Mode>& key_block) {
    const int64_t block_stop = smaller_of(block_key + kBlockKeys, to_);
    int64_t from = block_stop, to = block_key, reads = 0;  // reads: how often panels read a key, in all
    uint8_t visible[kBlockKeys] = {};                      // a key in a gap may share a pair with a visible one
    for (int64_t i = first; i < panel_count_; i++) {
      const Panel& p = w_.panels[i];
      for (int s = p.next_segment; s < p.segments && p.segment[s].start < block_stop; s++) {
        const int64_t start = larger_of(p.segment[s].start, block_key),
                      stop = smaller_of(p.segment[s].stop, block_stop);
        if (start >= stop) continue;
        from = smaller_of(from, start), to = larger_of(to, stop), reads += stop - start;
        if (Mode::Arith::kPairs || a_.pages || a_.format)
          memset(visible + (start - block_key), 1, (size_t)(stop - start));
      }
    }
    const int64_t panels = to > from ? (reads + (to - from) / 2) / (to - from) : 0;
    from = round_down(from, kKeyStep<Mode>), to = round_up(to, kKeyStep<Mode>);
    const int64_t index = narrow_ ? (block_key - first_block_key_) / kBlockKeys : 0;
    begin_key_block<Mode>(a_, block_, from, to, w_.key_block_space<Mode>(a_, index), panels, row_major_, key_block);
    memcpy(key_block.visible, visible + (from - block_key), (size_t)(block_key + kBlockKeys - from));
  }

  // Packs the keys before `stop`. If some numbers do not fit the parts, those of masked keys may be the cause: they are
  // cleared, and the keys are packed again.
  void pack(KeyBlock<Mode>& key_block, int64_t stop) {
    [[maybe_unused]] const int64_t start = key_block.packed_to;
    [[maybe_unused]] const RangeCheck previous = range_check_;
    pack_keys(a_, block_, stop, key_block, range_check_);
#if defined(UNDIVIDED_AMX)
    if constexpr (kParts<Mode> > 1) {
      if (!range_check_.out_of_range() || previous.out_of_range() || !(a_.dense || a_.bias)) return;
      clear_masked_keys(key_block, start, stop);
      key_block.packed_to = start, range_check_ = previous;
      pack_keys(a_, block_, stop, key_block, range_check_);
    }
#endif
  }
#if defined(UNDIVIDED_AMX)
  // Clears keys that a dense mask or a bias hides from every row: they may hold anything.
  void clear_masked_keys(KeyBlock<Mode>& key_block, int64_t start, int64_t stop) {
    uint8_t visible[kBlockKeys] = {}, visible_to_panel[kBlockKeys];
    for (int64_t i = 0; i < panel_count_; i++) {
      const Panel& p = w_.panels[i];
      fill_score_bias(a_, block_, p.first, p, start, stop, w_.score_bias, visible_to_panel);
      for (int64_t j = 0; j < stop - start; j++) visible[j] |= visible_to_panel[j];
    }
    for (int64_t j = 0; j < stop - start; j++) key_block.visible[start - key_block.start + j] &= visible[j];
  }
#endif

  // One panel with the keys [block_key, block_stop) of a key block that it sees.
  void step(Panel& p, const PanelSums& sums, const KeyBlock<Mode>& key_block, int64_t block_key, int64_t block_stop,
            Prefetch& prefetch) {
    for (int s = p.next_segment; s < p.segments && p.segment[s].start < block_stop; s++) {
      const int64_t start = round_down(larger_of(p.segment[s].start, block_key), kKeyStep<Mode>);
      int64_t stop = round_up(smaller_of(p.segment[s].stop, block_stop), kKeyStep<Mode>);
      while (s + 1 < p.segments &&  // in the same step
             p.segment[s + 1].start < (fills_gaps(a_) ? block_stop : smaller_of(stop, block_stop)))
        stop = round_up(smaller_of(p.segment[++s].stop, block_stop), kKeyStep<Mode>);
      if constexpr (Mode::kAmx) amx_step<Mode>(a_, block_, p, sums, key_block, start, stop, w_, prefetch, range_check_);
      else panel_step<Mode>(a_, block_, p, sums, key_block, start, stop, w_, prefetch);
    }
  }

  // Prefetches keys [start, stop) within this many steps.
  Prefetch prefetch_keys(int64_t start, int64_t stop, int64_t steps) const {
    Prefetch prefetch;
    if (!a_.format) {  // the types of the rows are those of the caller's memory
      prefetch.add(k_, start, stop, a_.qk_dim);
      prefetch.add(v_, start, stop, a_.v_dim);
    }
    prefetch.pace(steps);
    return prefetch;
  }

  // During panel i: the results of its rows, the next panel's Q, and keys that no earlier panel needed.
  Prefetch prefetch_for_panel(int64_t i) {
    Prefetch prefetch;
    const Panel& p = w_.panels[i];
    if (!block_.partials)
      prefetch_rows(prefetch, (const T*)a_.out + block_.batch * a_.out_b, a_.out_h, a_.out_s, a_.v_dim, p);
    if (i + 1 < panel_count_) {
      const Panel& next = w_.panels[i + 1];
      prefetch_rows(prefetch, (const T*)a_.q + block_.batch * a_.q_b, a_.q_h, a_.q_s, a_.qk_dim, next);
    }
    const Panel& next = w_.panels[smaller_of(i + 1, panel_count_ - 1)];
    for (int s = 0; s < next.segments && !a_.format; s++) {
      const int64_t start = larger_of(next.segment[s].start, prefetched_to_),
                    stop = smaller_of(round_up(next.segment[s].stop, kPackStep), to_);
      prefetch.add(k_, start, stop, a_.qk_dim);
      prefetch.add(v_, start, stop, a_.v_dim);
      prefetched_to_ = larger_of(prefetched_to_, stop);
    }
    if (i + 1 == panel_count_ && block_.next_block) prefetch_next_block<T>(prefetch, a_, *block_.next_block);
    int64_t steps = 0;
    for (int s = 0; s < p.segments; s++) {
      const int64_t keys = smaller_of(p.segment[s].stop, to_) - larger_of(p.segment[s].start, from_);
      if (keys > 0) steps += work_of(keys);
    }
    prefetch.pace(steps);
    if (!Mode::kAmx) prefetch.touch_far_rows();
    return prefetch;
  }
  // The number of prefetch steps that a panel takes for this many keys.
  int64_t work_of(int64_t keys) const {
    if (Mode::kAmx)
      return (keys + kKeyStep<Mode> - 1) / kKeyStep<Mode> * (kKeyStep<Mode> / 2 + a_.qk_dim / 32 + a_.v_dim / 32);
    const int64_t blocks = keys / kBlockKeys, rest = keys % kBlockKeys;
    return prefetch_steps(keys, q_depth<Mode>(a_)) + blocks * prefetch_steps(a_.v_dim, value_terms<Mode>(kBlockKeys)) +
           prefetch_steps(a_.v_dim, value_terms<Mode>(rest));
  }
  void prefetch_rows(Prefetch& prefetch, const T* base, int64_t h, int64_t s, int64_t columns, const Panel& p) {
    int64_t row = block_.row + p.first, left = p.rows;
    while (left > 0) {
      const int64_t at = row % a_.q_len, some = smaller_of(left, a_.q_len - at);
      prefetch.add(base + (block_.first_head + row / a_.q_len) * h + at * s, stride_in_bytes<T>(s), some,
                   columns * (int64_t)sizeof(T));
      row += some, left -= some;
    }
  }

  static constexpr int64_t kEmpty = -1;
  const Attention& a_;
  const RowBlock& block_;
  const Rows<T> k_, v_;
  Workspace w_;
  RangeCheck range_check_ = RangeCheck::of_mode<Mode>();
  int64_t from_, to_, first_block_key_;  // keys that some row sees
  int64_t panel_count_;
  int64_t prefetched_to_ = 0;  // keys before this one have been prefetched
  bool narrow_, row_major_;
  const bool checks_finite_;  // whether sums may contain non-finite values of keys that their rows do not see
  bool any_non_finite_ = false;
};

// False if some numbers do not fit this mode.
template <class Mode>
static bool run_block(const Attention& a, const RowBlock& block, char* scratch) {
#if defined(UNDIVIDED_AMX)
  std::conditional_t<Mode::kAmx, TileSetup, char> tiles{};
  std::conditional_t<Mode::kAmx && !kIsFloat32<Mode>, FlushToZero, char> flush{};
  (void)tiles, (void)flush;
  if constexpr (Mode::kAmx)
    if (block.short_keys) return ShortBlock<Mode>(a, block, scratch).run();
#endif
  if constexpr (!Mode::kAmx)
    if (is_small_forward(a) && run_small_block<typename Mode::T>(a, block, scratch)) return true;
  return Block<Mode>(a, block, scratch).run();
}

// Scratch bytes of a block of this many rows, for whichever path it takes.
template <class Mode>
static int64_t block_bytes(const Attention& a, int64_t rows, [[maybe_unused]] bool is_short) {
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kAmx)
    if (is_short) return layout_short<Mode>(a, rows, nullptr).bytes;
#endif
  const int64_t narrow =
      layout_block<Mode>(a, rows, smaller_of(max_narrow_keys<Mode>(a), round_up(a.kv_len, kBlockKeys)), nullptr).bytes;
  const int64_t small = !Mode::kAmx && is_small_forward(a) ? SmallForwardSpace(a, nullptr).bytes : 0;
  return larger_of(small, larger_of(narrow, layout_block<Mode>(a, rows, kAllKeys, nullptr).bytes));
}

}  // namespace
