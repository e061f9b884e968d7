// A row of the boolean mask.
#pragma once

#include "gemm/modes.h"

namespace {

// The entries of one row of the boolean mask, which are those of keys [from, to). The row may attend to every earlier
// key, and to no later one.
struct MaskRow {
  const uint8_t* entries;
  int64_t from = 0, to;

  MaskRow(const Attention& a, int64_t batch, int64_t head, int64_t row)
      : entries(a.dense + batch * a.dense_b + head * a.dense_h + row * a.dense_q), to(a.kv_len) {
    if (!a.dense_from) return;
    from = a.dense_from[batch * a.dense_from_b + row] - a.dense_origin, to = from + a.dense_keys;
  }
  bool allows(int64_t key, int64_t stride) const { return key < from || (key < to && entries[(key - from) * stride]); }
};

}  // namespace
