// A tile of K and V as the micro-kernels take it: in place, converted, or packed.
#pragma once

#include "amx.h"
#include "modes.h"
#include "rows.h"

namespace {

// A tile of V is copied, for all panels but the only one, into groups of kBroadcasts columns: what a micro-kernel reads then
// lies in one run, where rows of V in place share few of L1's sets. Groups are a line apart beyond a power of two.
constexpr int64_t kColumnGroup = kTile * kBroadcasts + 16;
INLINE int64_t groups_of(int64_t columns) { return (columns + kBroadcasts - 1) / kBroadcasts; }

template <class T>
static void widen(const T* from, int64_t stride, int64_t rows, int64_t columns, const uint8_t* seen, float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += columns) {
    if (seen && !seen[j]) {
      memset(to, 0, (size_t)columns * 4);
      continue;
    }
    int64_t d = 0;
    for (; d + kLanes <= columns; d += kLanes) store(to + d, load_as_float(from + d));
    for (; d < columns; d++) to[d] = to_float(from[d]);
  }
}

// Rows as groups of kBroadcasts columns, kColumnGroup apart, each row by row; unseen rows give zeros.
static void group_columns(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += kBroadcasts) {
    int64_t d = 0;
    for (float* group = to; d + kBroadcasts <= columns; d += kBroadcasts, group += kColumnGroup) memcpy(group, from + d, kBroadcasts * 4);
    for (; d < columns; d++) to[d / kBroadcasts * kColumnGroup + d % kBroadcasts] = from[d];
  }
}

// Keys j and j + 1 side by side in 32 bits, from key `start` at v on; a key outside [start, stop) or unseen gives zeros.
static void interleave(const BFloat16* v, int64_t stride, int64_t start, int64_t stop, int64_t columns, const uint8_t* seen,
                       uint32_t* to) {
  for (int64_t j = start & ~(int64_t)1; j < stop; j += 2, to += columns) {
    const BFloat16* even = j >= start && (!seen || seen[j - start]) ? v + (j - start) * stride : nullptr;
    const BFloat16* odd = j + 1 < stop && (!seen || seen[j + 1 - start]) ? v + (j + 1 - start) * stride : nullptr;
    int64_t d = 0;
    for (; d + kLanes <= columns; d += kLanes) {
      UVec low = even ? __builtin_convertvector(*(const UnalignedHVec*)(even + d), UVec) : UVec{};
      UVec high = odd ? __builtin_convertvector(*(const UnalignedHVec*)(odd + d), UVec) : UVec{};
      store((float*)to + d, (Vec)(low | high << 16));
    }
    for (; d < columns; d++) to[d] = (even ? even[d].bits : 0u) | (uint32_t)(odd ? odd[d].bits : 0) << 16;
  }
}

// The next tile of keys, asked for line by line while a tile is worked on: the processor's own prefetching does not see so far.
template <class T>
class NextTile {
 public:
  // Keys [start, stop) within `steps` steps.
  NextTile(const Attention& a, const RowBlock& block, int64_t start, int64_t stop, int64_t steps)
      : rows_{key_rows<T>(a, block.batch, block.kv_head), value_rows<T>(a, block.batch, block.kv_head)},
        bytes_{a.qk_dim * (int64_t)sizeof(T), a.v_dim * (int64_t)sizeof(T)}, start_(start), stop_(stop), key_(start) {
    const int64_t lines = (lines_of(bytes_[0]) + lines_of(bytes_[1])) * larger_of(0, stop - start);
    lines_a_step_ = (lines + steps - 1) / steps;
  }

  inline __attribute__((always_inline)) void step() {
    for (int64_t i = 0; i < lines_a_step_ && side_ < 2; i++) {
      __builtin_prefetch((const char*)rows_[side_](key_) + at_, 0, 2);
      if ((at_ += kLineBytes) < bytes_[side_]) continue;
      at_ = 0;
      if (++key_ == stop_) side_++, key_ = start_;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  static int64_t lines_of(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

  const Rows<T> rows_[2];  // of K, of V
  const int64_t bytes_[2], start_, stop_;
  int64_t key_, at_ = 0, lines_a_step_;
  int side_ = 0;
};

// A tile as the micro-kernels take it: row `key` of K is at k + key * k_stride, of V (or pairs of V) at v + ...
template <class Mode>
struct Tile {
  int64_t start, stop;  // the keys that some panel needs
  const void* k;
  int64_t k_stride;
  const typename Mode::Tile* v;  // row (or pair) of key `start`
  int64_t v_stride;
  int64_t v_group;                // see weigh_tile
  const typename Mode::T* own_v;  // the row of key `start` as the caller has it
  int64_t own_v_stride;
};

// Where the copies of a tile lie.
struct TileSpace {
  char *k, *v;
  char *k_rows, *v_rows;  // of a tile that lies in several pages
  int64_t bytes;
};
template <class Mode>
static TileSpace carve_tile(const Attention& a, char* base) {
  TileSpace w;
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += round_up(bytes, 64);
    return p;
  };
  const bool odd = Mode::Arith::kPairs && a.qk_dim % 2, copies = sizeof(typename Mode::T) == 2;
  w.k = take(Mode::kTiled              ? kTile * round_up(a.qk_dim, kDkStep<Mode>) * 2
             : Mode::kConvertsK || odd ? kTile * (a.qk_dim + 1) * 4
                                       : 0);
  w.v = take(copies ? kTile * o_depth<Mode>(a) * 4 : groups_of(a.v_dim) * kColumnGroup * 4);
  w.k_rows = take(a.pages ? kTile * a.qk_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.v_rows = take(a.pages ? kTile * a.v_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.bytes = at;
  return w;
}

template <class Mode>
static Tile<Mode> prepare_tile(const Attention& a, const RowBlock& block, int64_t start, int64_t stop, const uint8_t* seen,
                               const TileSpace& w, bool shared) {
  typedef typename Mode::T T;
  const Rows<T> k_rows = key_rows<T>(a, block.batch, block.kv_head), v_rows = value_rows<T>(a, block.batch, block.kv_head);
  const T *k, *v;
  int64_t k_s = a.k_s, v_s = a.v_s;
  if (k_rows.together(start, stop) && !(Mode::kTiled && a.pages)) {  // steps reach beyond what is seen
    k = k_rows(start), v = v_rows(start);
  } else {
    collect(k_rows, start, stop, a.qk_dim, seen, (T*)w.k_rows);
    collect(v_rows, start, stop, a.v_dim, seen, (T*)w.v_rows);
    k = (T*)w.k_rows, v = (T*)w.v_rows, k_s = a.qk_dim, v_s = a.v_dim;
  }
  Tile<Mode> tile = {start, stop, k, k_s, nullptr, v_s, 0, v, v_s};
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled) {
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    pack_k(k, k_s, keys, stop - start, a.qk_dim, w.k);
    tile.k = w.k;
    transpose_v(v, v_s, keys, a.v_dim, seen, kTile / kTileDepth, w.v);
    tile.v = w.v;
    return tile;
  } else
#endif
  if constexpr (Mode::Arith::kPairs) {
    if (a.qk_dim % 2) {
      BFloat16* copy = (BFloat16*)w.k;
      tile.k = copy, tile.k_stride = a.qk_dim + 1;
      for (int64_t j = start; j < stop; j++, k += k_s, copy += a.qk_dim + 1) {
        memcpy(copy, k, (size_t)a.qk_dim * 2);
        copy[a.qk_dim].bits = 0;
      }
    }
    interleave(v, v_s, start, stop, a.v_dim, seen, (uint32_t*)w.v);
    tile.v = (uint32_t*)w.v, tile.v_stride = a.v_dim;
  } else if constexpr (Mode::kConvertsK) {
    widen(k, k_s, stop - start, a.qk_dim, nullptr, (float*)w.k);
    widen(v, v_s, stop - start, a.v_dim, nullptr, (float*)w.v);
    tile.k = w.k, tile.k_stride = a.qk_dim;
    tile.v = (float*)w.v, tile.v_stride = a.v_dim;
  } else if (shared) {
    group_columns(v, v_s, stop - start, a.v_dim, (float*)w.v);
    tile.v = (float*)w.v, tile.v_stride = kBroadcasts, tile.v_group = kColumnGroup;
  } else {
    tile.v = v;
  }
  return tile;
}

}  // namespace
