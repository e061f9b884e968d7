// A panel of query rows, and the keys that its rows see.
#pragma once

#include <string.h>

#include "gemm/modes.h"

namespace {

constexpr int kMaxSegments = 2 * kPanel;

// The keys that a panel of at most kPanel rows sees.
struct Panel {
  int32_t start[2][kPanel], stop[2][kPanel];
  int64_t first, rows;  // first: index in the row block
  bool has_sums;        // whether its sums have been written
  bool row_major;       // whether its sums are stored row by row; see gemm/row_product.h
  Range common[2];      // keys that every row sees through its first range, and through its second
  // Of each vector of rows: from the first to the last key that some row sees through a range, and the keys that every
  // row sees through its first range.
  Range vector_extent[2][kVectors], vector_common[kVectors];
  int segments, next_segment;  // next_segment: the first one that later key blocks may touch
  Range segment[kMaxSegments];

  // Vectors that hold rows.
  int vectors() const { return (int)((rows + kLanes - 1) / kLanes); }
  // Whether every row sees keys [from, to) through the same one of its ranges.
  bool covers(int64_t from, int64_t to) const {
    return (common[0].start <= from && to <= common[0].stop) || (common[1].start <= from && to <= common[1].stop);
  }
};

// Which keys are in one of two ranges. A bound is a vector, or one number for all lanes.
template <class Bound>
INLINE IVec is_within(IVec key, Bound start, Bound stop, Bound second_start, Bound second_stop) {
  return ((key >= start) & (key < stop)) | ((key >= second_start) & (key < second_stop));
}

// Whether the keys in gaps between the segments of a key block are computed too, with weights of 0. Each row then adds
// its keys of a block in one step, so that its sums do not depend on what the other rows of its panel see.
INLINE bool fills_gaps(const Attention& a) { return a.batch_invariant && a.columns == 4; }

// The union of the ranges of all rows, as ascending segments that do not touch.
static void find_segments(Panel& p) {
  p.segments = p.next_segment = 0;
  for (int side = 0; side < 2; side++)
    for (int r = 0; r < p.rows; r++) {
      Range s = {p.start[side][r], p.stop[side][r]};
      if (s.stop <= s.start) continue;
      Range* last_segment = p.segments > 0 ? &p.segment[p.segments - 1] : nullptr;
      if (last_segment && last_segment->start <= s.start && s.start <= last_segment->stop) {  // most rows
        last_segment->stop = larger_of(last_segment->stop, s.stop);
        continue;
      }
      // rows are nearly sorted, so the search starts at the end; segments that touch are joined
      int first = p.segments;
      while (first > 0 && p.segment[first - 1].stop >= s.start) first--;
      int last = first;
      while (last < p.segments && p.segment[last].start <= s.stop) {
        s.start = smaller_of(s.start, p.segment[last].start);
        s.stop = larger_of(s.stop, p.segment[last].stop);
        last++;
      }
      int grown = 1 - (last - first);
      if (grown != 0) memmove(&p.segment[last + grown], &p.segment[last], sizeof(Range) * (size_t)(p.segments - last));
      p.segment[first] = s;
      p.segments += grown;
    }
}

// The ranges of row `row` of a block, a.columns numbers.
INLINE const int32_t* ranges_at(const Attention& a, const RowBlock& block, int64_t row) {
  return a.ranges + block.batch * a.ranges_b + (block.row + row) % a.q_len * a.columns;
}

// The keys that each vector of rows sees, and those that the whole panel sees. sides: 2 if rows have second ranges.
static void find_common_keys(Panel& p, int sides) {
  for (int side = 0; side < sides; side++) {
    int64_t common_start = 0, common_stop = INT32_MAX;
    for (int v = 0; v < p.vectors(); v++) {
      int32_t first = INT32_MAX, last = 0, start = 0, stop = INT32_MAX;
      for (int r = v * kLanes; r < (v + 1) * kLanes; r++) {
        const int32_t from = p.start[side][r], to = p.stop[side][r];
        first = from < to && from < first ? from : first, last = from < to && to > last ? to : last;
        start = from > start ? from : start, stop = to < stop ? to : stop;
      }
      p.vector_extent[side][v] = {first, last};
      if (side == 0) p.vector_common[v] = {start, stop};
      common_start = larger_of(common_start, start), common_stop = smaller_of(common_stop, stop);
    }
    p.common[side] = {common_start, common_stop};
  }
  if (sides == 2) return;
  p.common[1] = {0, 0};
  for (int v = 0; v < p.vectors(); v++) p.vector_extent[1][v] = {0, 0};
}

// Makes p the panel of at most `rows` rows of a block from row `first` of the block on, with the ranges of these rows.
static void read_ranges(const Attention& a, const RowBlock& block, int64_t first, Panel& p, int64_t rows = kPanel) {
  p.first = first, p.rows = smaller_of(block.rows - first, rows);
  int64_t row = (block.row + first) % a.q_len;
  for (int r = 0; r < kPanel; r++) {
    const RowRanges keys = ranges_of_row(a, block.batch, row);
    for (int side = 0; side < 2; side++)
      p.start[side][r] = (int32_t)keys.of[side].start, p.stop[side][r] = (int32_t)keys.of[side].stop;
    // lanes beyond the last row repeat it; their results are never stored
    if (r + 1 < p.rows && ++row == a.q_len) row = 0;
  }
  find_common_keys(p, a.ranges && a.columns == 4 ? 2 : 1);
  if (a.ranges || a.band) {
    find_segments(p);
  } else {
    p.segment[0] = {0, a.kv_len};
    p.segments = a.kv_len > 0, p.next_segment = 0;
  }
}

// Writes which of the keys [start, stop) lie in a segment.
[[maybe_unused]] static void mark_segments(const Panel& p, int64_t start, int64_t stop, uint8_t* visible) {
  memset(visible, 0, (size_t)(stop - start));
  for (int s = 0; s < p.segments; s++) {
    const int64_t from = larger_of(p.segment[s].start, start), to = smaller_of(p.segment[s].stop, stop);
    if (from < to) memset(visible + (from - start), 1, (size_t)(to - from));
  }
}

// Whether two rows have no key in common.
INLINE bool are_disjoint(const Attention& a, const int32_t* x, const int32_t* y) {
  for (int64_t i = 0; i < a.columns; i += 2)
    for (int64_t j = 0; j < a.columns; j += 2)
      if (larger_of(x[i], y[j]) < smaller_of(x[i + 1], y[j + 1])) return false;
  return true;
}

// A panel ends where the next row shares no key with the previous one, so that no row computes keys of another
// document; very short documents share a vector. A row's result does not depend on the other rows of its panel, unless
// there is a dense mask (see changes_scores): then panels are full.
constexpr int64_t kMinDocumentRows = kLanes / 2;
INLINE bool has_cuts(const Attention& a) { return a.ranges && !a.dense; }
static int64_t rows_of_panel(const Attention& a, const RowBlock& block, int64_t first) {
  const int64_t limit = smaller_of(block.rows - first, kPanel);
  if (!has_cuts(a)) return limit;
  for (int64_t r = kMinDocumentRows; r < limit; r++)
    if (are_disjoint(a, ranges_at(a, block, first + r - 1), ranges_at(a, block, first + r))) return r;
  return limit;
}

// The keys that the rows of a block see. extent: from the first to the last one. longest: the largest distance between
// the first and the last key of a row. pairs: the number of (row, key) pairs.
struct RowKeys {
  Range extent;
  int64_t longest, pairs;
};
static RowKeys keys_of_block(const Attention& a, const RowBlock& block) {
  if (!a.ranges && !a.band) return {{0, a.kv_len}, a.kv_len, block.rows * a.kv_len};
  RowKeys keys = {{a.kv_len, 0}, 0, 0};
  int64_t row = block.row % a.q_len;
  for (int64_t r = 0; r < block.rows; r++) {
    const RowRanges own = ranges_of_row(a, block.batch, row);
    Range seen = {a.kv_len, 0};
    own.extend(seen), own.extend(keys.extent);
    keys.longest = larger_of(keys.longest, seen.stop - seen.start), keys.pairs += own.count();
    if (++row == a.q_len) row = 0;
  }
  return keys;
}

// The keys [from, to) of a panel in groups of `group`, and the vectors that have a row which sees some of them.
[[maybe_unused]] static Runs runs_of(const Panel& p, int64_t from, int64_t to, int64_t group) {
  static_assert(kBlockKeys / kBroadcasts <= Runs::kMax);
  if (p.covers(from, to)) return Runs(to - from, p.vectors());
  int64_t start[kVectors], stop[kVectors];
  for (int v = 0; v < p.vectors(); v++) {
    start[v] = to, stop[v] = from;
    for (int side = 0; side < 2; side++) {
      const Range& extent = p.vector_extent[side][v];
      const int64_t first = larger_of(extent.start, from), last = smaller_of(extent.stop, to);
      if (first < last) start[v] = smaller_of(start[v], first), stop[v] = larger_of(stop[v], last);
    }
  }
  Runs runs;
  runs.vectors = p.vectors();
  for (int64_t key = from; key < to; key += group) {
    int first = 0, last = p.vectors();
    while (first < last - 1 && !(start[first] < key + group && stop[first] > key)) first++;
    while (last > first + 1 && !(start[last - 1] < key + group && stop[last - 1] > key)) last--;
    Run run = {key - from, smaller_of(key + group, to) - from, first, last - first};
    Run* previous = runs.count > 0 ? &runs.run[runs.count - 1] : nullptr;
    if (previous && previous->first == run.first && previous->vectors == run.vectors) previous->stop = run.stop;
    else runs.run[runs.count++] = run;
  }
  return runs;
}

}  // namespace
