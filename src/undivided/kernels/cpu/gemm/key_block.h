// A tile of K and V as the micro-kernels take it: in place, converted, or packed.
#pragma once

#include <type_traits>

#include "gemm/amx_pack.h"
#include "gemm/split.h"
#include "mask/pages.h"

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

// Rows of K further apart than this, in bytes, are copied: they share so few of L1's sets that they drive each other out.
constexpr int64_t kFarApart = 2048;
// Floats between rows of the copy: an odd number of lines.
INLINE int64_t row_apart(int64_t columns) { return round_up(columns, 32) + 16; }

// Where the copies of a tile lie.
struct TileSpace {
  char *k, *v;
  char *k_rows, *v_rows;  // of a tile that lies in several pages
  int64_t bytes;
};
template <class Mode>
static TileSpace carve_tile(const Attention& a, char* base) {
  TileSpace w;
  Carving at{base};
  const bool odd = Mode::Arith::kPairs && a.qk_dim % 2, copies = Mode::kTiled || sizeof(typename Mode::T) == 2;
  w.k = at.take(Mode::kTiled              ? kTile * round_up(a.qk_dim, kDkStep<Mode>) * 2 * kParts<Mode>
                : Mode::kConvertsK || odd ? kTile * (a.qk_dim + 1) * 4
                : copies                  ? 0
                                          : kTile * row_apart(a.qk_dim) * 4);
  w.v = at.take(copies ? kTile * o_depth<Mode>(a) * larger_of(4, 2 * kParts<Mode>) : groups_of(a.v_dim) * kColumnGroup * 4);
  w.k_rows = at.take(a.pages ? kTile * a.qk_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.v_rows = at.take(a.pages ? kTile * a.v_dim * (int64_t)sizeof(typename Mode::T) : 0);
  w.bytes = at.bytes;
  return w;
}

// A tile as the micro-kernels take it: row `key` of K is at k + key * k_stride, of V (or pairs of V) at v + ...
template <class Mode>
struct Tile {
  typedef typename Mode::T T;
  int64_t start, stop;  // the keys that some panel needs
  int64_t packed;       // those before it are ready
  const void* k;
  int64_t k_stride;
  const typename Mode::Tile* v;  // row (or pair) of key `start`
  int64_t v_stride;
  int64_t v_group;         // see weigh_tile
  const T *own_k, *own_v;  // the rows of key `start` as the caller has them, or collected from pages
  int64_t own_k_stride, own_v_stride;
  bool collects, copies_k, copies_v;
  TileSpace space;
  uint8_t seen[kTile];  // by some panel, from `start` on
};

// A tile of keys [start, stop), none of which are packed yet. Where it is not shared by several panels, or read row by row, V may
// stay in place.
template <class Mode>
static void begin_tile(const Attention& a, const RowBlock& block, int64_t start, int64_t stop, const TileSpace& w, bool shared,
                       bool by_rows, Tile<Mode>& tile) {
  typedef typename Mode::T T;
  const Rows<T> k = key_rows<T>(a, block.batch, block.kv_head), v = value_rows<T>(a, block.batch, block.kv_head);
  tile.start = tile.packed = start, tile.stop = stop, tile.space = w;
  // in a page of its own, or not in any; steps reach beyond what is seen
  tile.collects = !k.together(start, stop) || (Mode::kTiled && a.pages);
  tile.own_k = tile.collects ? (const T*)w.k_rows : k(start), tile.own_k_stride = tile.collects ? a.qk_dim : a.k_s;
  tile.own_v = tile.collects ? (const T*)w.v_rows : v(start), tile.own_v_stride = tile.collects ? a.v_dim : a.v_s;
  tile.k = tile.own_k, tile.k_stride = tile.own_k_stride;
  tile.v = (const typename Mode::Tile*)w.v, tile.v_stride = a.v_dim, tile.v_group = 0;
  tile.copies_k = Mode::kTiled || Mode::kConvertsK || (Mode::Arith::kPairs && a.qk_dim % 2);
  tile.copies_v = true;
  if constexpr (std::is_same<Mode, Direct>::value) {
    tile.copies_k = shared && tile.own_k_stride * 4 >= kFarApart, tile.copies_v = shared;
    if (by_rows) tile.copies_v = tile.own_v_stride * 4 >= kFarApart;
    if (by_rows && tile.copies_v) tile.v_stride = a.v_dim;
    else if (shared && !by_rows) tile.v_stride = kBroadcasts, tile.v_group = kColumnGroup;
    else tile.v = tile.own_v, tile.v_stride = tile.own_v_stride;
  }
  if (!tile.copies_k) return;
  tile.k = w.k;
  tile.k_stride = Mode::kConvertsK ? a.qk_dim : Mode::Arith::kPairs ? a.qk_dim + 1 : row_apart(a.qk_dim);
}

#if defined(UNDIVIDED_AMX)
// V of `keys` keys as the second product takes it.
template <class Mode>
static void put_v(const typename Mode::T* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* seen, char* to,
                  [[maybe_unused]] Irregular& irregular) {
  if constexpr (kParts<Mode> > 1) split_v<Mode>(v, stride, keys, columns, seen, kTile / kTileDepth, to, irregular);
  else transpose_v(v, stride, keys, columns, seen, kTile / kTileDepth, to);
}
#endif

// The keys of a tile from those that are packed up to `stop`: a multiple of kPackStep, or the tile's last.
constexpr int64_t kPackStep = 32;
template <class Mode>
static void pack_keys(const Attention& a, const RowBlock& block, int64_t stop, Tile<Mode>& tile,
                      [[maybe_unused]] Irregular& irregular) {
  typedef typename Mode::T T;
  const int64_t start = tile.packed, first = start - tile.start, count = stop - start;
  const uint8_t* seen = tile.seen + first;
  if (tile.collects) {
    collect(key_rows<T>(a, block.batch, block.kv_head), start, stop, a.qk_dim, seen, (T*)tile.space.k_rows + first * a.qk_dim);
    collect(value_rows<T>(a, block.batch, block.kv_head), start, stop, a.v_dim, seen, (T*)tile.space.v_rows + first * a.v_dim);
  }
  const T *k = tile.own_k + first * tile.own_k_stride, *v = tile.own_v + first * tile.own_v_stride;
  const int64_t k_s = tile.own_k_stride, v_s = tile.own_v_stride;
  tile.packed = stop;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kTiled) {
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    char* packed = tile.space.k + first * round_up(a.qk_dim, kDkStep<Mode>) * 2 * kParts<Mode>;
    if constexpr (kParts<Mode> > 1) split_k<Mode>(k, k_s, keys, count, a.qk_dim, seen, packed, irregular);
    else pack_k(k, k_s, keys, count, a.qk_dim, packed);
    put_v<Mode>(v, v_s, keys, a.v_dim, seen, tile.space.v + first / kTileDepth * kTileBytes, irregular);
    return;
  } else
#endif
  if constexpr (Mode::Arith::kPairs) {
    BFloat16* copy = (BFloat16*)tile.space.k + first * tile.k_stride;
    for (int64_t j = 0; tile.copies_k && j < count; j++, copy += tile.k_stride) {
      memcpy(copy, k + j * k_s, (size_t)a.qk_dim * 2);
      copy[a.qk_dim].bits = 0;
    }
    interleave(v, v_s, start, stop, a.v_dim, seen, (uint32_t*)tile.space.v + (start / 2 - tile.start / 2) * a.v_dim);
  } else if constexpr (Mode::kConvertsK) {
    widen(k, k_s, count, a.qk_dim, nullptr, (float*)tile.space.k + first * a.qk_dim);
    widen(v, v_s, count, a.v_dim, nullptr, (float*)tile.space.v + first * a.v_dim);
  } else {
    float* copy = (float*)tile.space.k + first * tile.k_stride;
    for (int64_t j = 0; tile.copies_k && j < count; j++) memcpy(copy + j * tile.k_stride, k + j * k_s, (size_t)a.qk_dim * 4);
    if (tile.copies_v && tile.v_group == 0) widen(v, v_s, count, a.v_dim, nullptr, (float*)tile.space.v + first * a.v_dim);
    else if (tile.copies_v) group_columns(v, v_s, count, a.v_dim, (float*)tile.space.v + first * kBroadcasts);
  }
}

}  // namespace
