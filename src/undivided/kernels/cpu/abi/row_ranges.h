// The keys that the mask shows a query row: its table of ranges, the band, or every key.
#pragma once

#include "abi/attention.h"

namespace undivided {

// Keys or rows [start, stop); none if stop <= start.
struct Range {
  int64_t start, stop;
};

// The keys of one query row, within [0, kv_len). The second range is empty, unless the mask's table has two of each
// row.
struct RowRanges {
  Range of[2];

  int64_t count() const {
    int64_t keys = 0;
    for (const Range& x : of) keys += x.stop > x.start ? x.stop - x.start : 0;
    return keys;
  }
  bool contains(int64_t key) const {
    return (of[0].start <= key && key < of[0].stop) || (of[1].start <= key && key < of[1].stop);
  }
  // Extends `extent`, from the first to the last key, by the keys of this row.
  void extend(Range& extent) const {
    for (const Range& x : of) {
      if (x.start >= x.stop) continue;
      if (x.start < extent.start) extent.start = x.start;
      if (x.stop > extent.stop) extent.stop = x.stop;
    }
  }
};

static inline int64_t clamp_key(const Attention& a, int64_t key) {
  return key < 0 ? 0 : key < a.kv_len ? key : a.kv_len;
}

// The ranges of query row `row` of a sequence.
static inline RowRanges ranges_of_row(const Attention& a, int64_t batch, int64_t row) {
  if (a.band) return {{{clamp_key(a, row + a.band_start), clamp_key(a, row + a.band_stop)}, {0, 0}}};
  if (!a.ranges) return {{{0, a.kv_len}, {0, 0}}};
  const int32_t* range = a.ranges + batch * a.ranges_b + row * a.columns;
  if (a.columns == 2) return {{{range[0], range[1]}, {0, 0}}};
  return {{{range[0], range[1]}, {range[2], range[3]}}};
}

}  // namespace undivided
