// A panel of query rows: what its rows may see.
#pragma once

#include "vec.h"

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

}  // namespace
