// A panel of query rows: what its rows may see.
#pragma once

#include <string.h>

#include "modes.h"

namespace {

struct Segment {
  int64_t start, stop;
};
constexpr int kMostSegments = 2 * kPanel;

// What a panel of kPanel virtual rows may see.
struct Panel {
  int32_t start[2][kPanel], stop[2][kPanel];
  int64_t rows;
  int64_t covered[2][2];  // keys that every row sees through its first, its second range
  int segments, next;     // next: the first segment that the tiles to come may touch
  Segment segment[kMostSegments];

  // That hold its rows.
  int vectors() const { return (int)((rows + kLanes - 1) / kLanes); }
  // Whether every row sees keys [from, to) through one of its ranges.
  bool covers(int64_t from, int64_t to) const {
    return (covered[0][0] <= from && to <= covered[0][1]) || (covered[1][0] <= from && to <= covered[1][1]);
  }
};

static void find_segments(Panel& p) {
  p.segments = p.next = 0;
  for (int side = 0; side < 2; side++)
    for (int r = 0; r < p.rows; r++) {
      Segment s = {p.start[side][r], p.stop[side][r]};
      if (s.stop <= s.start) continue;
      // rows come nearly in order, so the place is found from the end; neighbours that touch are joined
      int first = p.segments;
      while (first > 0 && p.segment[first - 1].stop >= s.start) first--;
      int last = first;
      while (last < p.segments && p.segment[last].start <= s.stop) {
        s.start = smaller_of(s.start, p.segment[last].start);
        s.stop = larger_of(s.stop, p.segment[last].stop);
        last++;
      }
      int grown = 1 - (last - first);
      if (grown != 0)
        memmove(&p.segment[last + grown], &p.segment[last], sizeof(Segment) * (size_t)(p.segments - last));
      p.segment[first] = s;
      p.segments += grown;
    }
}

static void read_ranges(const Attention& a, const RowBlock& block, int64_t first, Panel& p) {
  p.rows = smaller_of(block.rows - first, kPanel);
  for (int r = 0; r < kPanel; r++) {
    // lanes beyond the last row repeat it: what they compute is never stored
    int64_t row = (block.row + first + smaller_of(r, p.rows - 1)) % a.q_len;
    p.start[0][r] = p.start[1][r] = p.stop[1][r] = 0;
    p.stop[0][r] = (int32_t)a.kv_len;
    if (a.band) {
      p.start[0][r] = (int32_t)larger_of(0, row + a.first);
      p.stop[0][r] = (int32_t)larger_of(0, smaller_of(a.kv_len, row + a.last));
    }
    if (!a.ranges) continue;
    const int32_t* range = a.ranges + block.batch * a.ranges_b + row * a.columns;
    p.start[0][r] = range[0], p.stop[0][r] = range[1];
    if (a.columns == 4) p.start[1][r] = range[2], p.stop[1][r] = range[3];
  }
  for (int side = 0; side < 2; side++) {
    int64_t start = 0, stop = a.kv_len;
    for (int r = 0; r < kPanel; r++) {
      start = larger_of(start, p.start[side][r]);
      stop = smaller_of(stop, p.stop[side][r]);
    }
    p.covered[side][0] = start, p.covered[side][1] = stop;
  }
  if (a.ranges || a.band) {
    find_segments(p);
  } else {
    p.segment[0] = {0, a.kv_len};
    p.segments = a.kv_len > 0, p.next = 0;
  }
}

}  // namespace
