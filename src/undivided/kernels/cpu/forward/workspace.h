// The scratch memory of a block of rows.
#pragma once

#include "gemm/key_block.h"
#include "mask/panel.h"
#include "simd/dropout.h"

namespace {

// What a panel keeps from one step of keys to the next. max_score: the largest score so far (on AMX the base), in its
// unit.
struct PanelSums {
  float *qt, *ot, *max_score, *total;
  DropoutRows* dropout_rows;
};

struct Workspace {
  uint8_t* non_finite;  // one flag per row, if there are several; see has_non_finite_sums
  char* rest;           // free once all flags are known
  Panel* panels;
  float *scores, *score_bias, *block_sums;
  char *v_own, *sums, *key_block_list, *key_block_copies;
  LaneMask *keep, *visible;
  int64_t sums_bytes, bytes;

  template <class Mode>
  PanelSums sums_of(const Attention& a, int64_t slot) const {
    char* at = sums + slot * sums_bytes;
    const int64_t q = q_depth<Mode>(a) * kPanel, o = o_depth<Mode>(a) * kPanel;
    float* f = (float*)at;
    return {f, f + q, f + q + o, f + q + o + kPanel, (DropoutRows*)(f + q + o + 2 * kPanel)};
  }
  template <class Mode>
  KeyBlock<Mode>* key_blocks() const {
    return (KeyBlock<Mode>*)key_block_list;
  }
  template <class Mode>
  KeyBlockSpace key_block_space(const Attention& a, int64_t index) const {
    return layout_key_block<Mode>(a, key_block_copies + index * layout_key_block<Mode>(a, nullptr).bytes);
  }
};

// keys: how many of them have key blocks that are kept, for one panel at a time; kAllKeys: one key block, for all
// panels at once.
constexpr int64_t kAllKeys = -1;
template <class Mode>
static Workspace layout_block(const Attention& a, int64_t rows, int64_t keys, char* base) {
  Workspace w;
  Arena arena{base};
  const bool narrow = keys != kAllKeys, has_score_bias = undivided::has_score_bias(a);
  const int64_t whole = (rows + kPanel - 1) / kPanel,
                panels = narrow && has_cuts(a) ? rows / kMinDocumentRows + 1 : whole;
  const int64_t key_blocks = narrow ? keys / kBlockKeys + 2 : 1;
  w.non_finite = (uint8_t*)arena.allocate(rows > 1 ? rows : 0), w.rest = base + arena.bytes;  // room for recompute_row
  w.panels = (Panel*)arena.allocate(panels * (int64_t)sizeof(Panel));
  w.sums_bytes =
      (q_depth<Mode>(a) + o_depth<Mode>(a) + 2) * kPanel * 4 + (a.dropout ? (int64_t)sizeof(DropoutRows) : 0);
  w.sums_bytes = round_up(w.sums_bytes, 64);
  w.sums = arena.allocate((narrow ? 1 : whole) * w.sums_bytes);
  // on AMX two steps of scores, then weights
  w.scores = (float*)arena.allocate((kBlockKeys + 2) * kPanel * 4 + (kParts<Mode> - 1) * kBlockKeys / 2 * kPanel * 4);
  w.block_sums = (float*)arena.allocate(Mode::kAmx && kIsFloat32<Mode> ? o_depth<Mode>(a) * kPanel * 4 : 0);
  w.score_bias = (float*)arena.allocate(Mode::kAmx && has_score_bias ? kBlockKeys * kPanel * 4 : 0);
  w.v_own = arena.allocate(
      has_score_bias || fills_gaps(a) ? kBlockKeys * o_depth<Mode>(a) * larger_of(4, 2 * kParts<Mode>) : 0);
  w.keep = (LaneMask*)arena.allocate(a.dropout ? (kBlockKeys + 2) * kVectors * (int64_t)sizeof(LaneMask) : 0);
  w.visible = (LaneMask*)arena.allocate(Mode::kAmx ? (kBlockKeys + 64) * kVectors * (int64_t)sizeof(LaneMask) : 0);
  w.key_block_list = arena.allocate(key_blocks * (int64_t)sizeof(KeyBlock<Mode>));
  w.key_block_copies = arena.allocate(key_blocks * layout_key_block<Mode>(a, nullptr).bytes);
  w.bytes = arena.bytes;
  return w;
}

}  // namespace
