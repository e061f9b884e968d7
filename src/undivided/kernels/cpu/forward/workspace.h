// The memory of a block of rows.
#pragma once

#include "gemm/key_block.h"
#include "mask/panel.h"
#include "simd/dropout.h"

namespace {

// What a panel keeps from one piece of keys to the next. most: the largest score so far, in its unit.
struct Sums {
  float *qt, *ot, *most, *total;
  DropRows* drops;
};

struct Workspace {
  uint8_t* mixed;  // of each row, if there are several: see is_mixed
  char* rest;      // free once all are known
  Panel* panels;
  float *scores, *extra, *tile_sums;
  char *v_own, *sums, *tile_list, *tile_copies;
  Kept *kept, *seen;
  int64_t sums_bytes, bytes;

  template <class Mode>
  Sums sums_of(const Attention& a, int64_t slot) const {
    char* at = sums + slot * sums_bytes;
    const int64_t q = q_depth<Mode>(a) * kPanel, o = o_depth<Mode>(a) * kPanel;
    float* f = (float*)at;
    return {f, f + q, f + q + o, f + q + o + kPanel, (DropRows*)(f + q + o + 2 * kPanel)};
  }
  template <class Mode>
  Tile<Mode>* tiles() const {
    return (Tile<Mode>*)tile_list;
  }
  template <class Mode>
  TileSpace tile_space(const Attention& a, int64_t index) const {
    return carve_tile<Mode>(a, tile_copies + index * carve_tile<Mode>(a, nullptr).bytes);
  }
};

// `keys`: how many to keep tiles of, for one panel at a time; kEveryKey: one tile, for all panels at once.
constexpr int64_t kEveryKey = -1;
template <class Mode>
static Workspace carve(const Attention& a, int64_t rows, int64_t keys, char* base) {
  Workspace w;
  Carving at{base};
  const bool narrow = keys != kEveryKey, extras = a.bias || a.dense || a.slopes;
  const int64_t whole = (rows + kPanel - 1) / kPanel, panels = narrow && has_cuts(a) ? rows / kFewestCutRows + 1 : whole;
  const int64_t tiles = narrow ? keys / kTile + 2 : 1;
  w.mixed = (uint8_t*)at.take(rows > 1 ? rows : 0), w.rest = base + at.bytes;  // room for a row by itself
  w.panels = (Panel*)at.take(panels * (int64_t)sizeof(Panel));
  w.sums_bytes = (q_depth<Mode>(a) + o_depth<Mode>(a) + 2) * kPanel * 4 + (a.dropout ? (int64_t)sizeof(DropRows) : 0);
  w.sums_bytes = round_up(w.sums_bytes, 64);
  w.sums = at.take((narrow ? 1 : whole) * w.sums_bytes);
  // of AMX two blocks of scores, then weights
  w.scores = (float*)at.take((kTile + 2) * kPanel * 4 + (kParts<Mode> - 1) * kTile / 2 * kPanel * 4);
  w.tile_sums = (float*)at.take(Mode::kTiled && kIsFloat32<Mode> ? o_depth<Mode>(a) * kPanel * 4 : 0);
  w.extra = (float*)at.take(extras ? kTile * kPanel * 4 : 0);
  w.v_own = at.take(extras ? kTile * o_depth<Mode>(a) * larger_of(4, 2 * kParts<Mode>) : 0);
  w.kept = (Kept*)at.take(a.dropout ? (kTile + 2) * kVectors * (int64_t)sizeof(Kept) : 0);
  w.seen = (Kept*)at.take(Mode::kTiled ? (kTile + 64) * kVectors * (int64_t)sizeof(Kept) : 0);
  w.tile_list = at.take(tiles * (int64_t)sizeof(Tile<Mode>));
  w.tile_copies = at.take(tiles * carve_tile<Mode>(a, nullptr).bytes);
  w.bytes = at.bytes;
  return w;
}

}  // namespace
