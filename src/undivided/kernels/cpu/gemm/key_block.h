// A key block: K and V in the form that the micro-kernels read, in place, converted or packed.
#pragma once

#include <type_traits>

#include "gemm/amx_pack.h"
#include "gemm/dequantize.h"
#include "gemm/split.h"
#include "mask/pages.h"

namespace {

// V is copied into groups of kBroadcasts columns if enough panels read it and its rows are far apart: a micro-kernel
// then reads consecutive memory, where rows in place share few of L1's sets. The padding of one line keeps groups from
// being a power of two apart.
constexpr int64_t kColumnGroup = kBlockKeys * kBroadcasts + 16;
INLINE int64_t groups_of(int64_t columns) { return (columns + kBroadcasts - 1) / kBroadcasts; }

template <class T>
static void widen(const T* from, int64_t stride, int64_t rows, int64_t columns, const uint8_t* visible, float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += columns) {
    if (visible && !visible[j]) {
      memset(to, 0, (size_t)columns * 4);
      continue;
    }
    int64_t d = 0;
    for (; d + kLanes <= columns; d += kLanes) store(to + d, load_as_float(from + d));
    for (; d < columns; d++) to[d] = to_float(from[d]);
  }
}

// Copies rows into groups of kBroadcasts columns, kColumnGroup apart, each stored row by row.
[[maybe_unused]] static void group_columns(const float* from, int64_t stride, int64_t rows, int64_t columns,
                                           float* to) {
  for (int64_t j = 0; j < rows; j++, from += stride, to += kBroadcasts) {
    int64_t d = 0;
    for (float* group = to; d + kBroadcasts <= columns; d += kBroadcasts, group += kColumnGroup)
      memcpy(group, from + d, kBroadcasts * 4);
    for (; d < columns; d++) to[d / kBroadcasts * kColumnGroup + d % kBroadcasts] = from[d];
  }
}

#if defined(__AVX512BW__)
// Indices that take numbers first, first + 1, ... of two vectors in turns.
INLINE __m512i zip_index(int first) {
  typedef uint16_t Numbers __attribute__((vector_size(64)));
  Numbers index;
  for (int i = 0; i < 32; i++) index[i] = (uint16_t)(first + i / 2 + i % 2 * 32);
  return (__m512i)index;
}
#endif

// Puts keys j and j + 1 side by side in 32 bits, from key `start` at v on; keys outside [start, stop), or that no row
// sees, become zeros.
[[maybe_unused]] static void interleave(const BFloat16* v, int64_t stride, int64_t start, int64_t stop, int64_t columns,
                                        const uint8_t* visible, uint32_t* to) {
  for (int64_t j = start & ~(int64_t)1; j < stop; j += 2, to += columns) {
    const BFloat16* even = j >= start && (!visible || visible[j - start]) ? v + (j - start) * stride : nullptr;
    const BFloat16* odd = j + 1 < stop && (!visible || visible[j + 1 - start]) ? v + (j + 1 - start) * stride : nullptr;
    int64_t d = 0;
#if defined(__AVX512BW__)
    for (; d + 32 <= columns; d += 32) {
      const __m512i low = even ? _mm512_loadu_si512(even + d) : __m512i{},
                    high = odd ? _mm512_loadu_si512(odd + d) : __m512i{};
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(low, zip_index(0), high));
      _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(low, zip_index(16), high));
    }
#endif
    for (; d + kLanes <= columns; d += kLanes) {
      UVec low = even ? load_halves(even + d) : UVec{}, high = odd ? load_halves(odd + d) : UVec{};
      store((float*)to + d, (Vec)(low | high << 16));
    }
    for (; d < columns; d++) to[d] = (even ? even[d].bits : 0u) | (uint32_t)(odd ? odd[d].bits : 0) << 16;
  }
}

// Elements between rows of a copy of K: an odd number of cache lines, with room for one more column.
template <class T>
INLINE int64_t padded_stride(int64_t columns) {
  constexpr int64_t line = 64 / sizeof(T);
  return round_up(columns, 2 * line) + line;
}

// Memory for the copies of a key block.
struct KeyBlockSpace {
  char *k, *v;
  char *k_rows, *v_rows;  // rows gathered from several pages, or dequantised
  int64_t bytes;
};
template <class Mode>
static KeyBlockSpace layout_key_block(const Attention& a, char* base) {
  typedef typename Mode::T T;
  KeyBlockSpace w;
  Arena arena{base};
  const bool copies = Mode::kAmx || sizeof(typename Mode::T) == 2;
  w.k = arena.allocate(Mode::kAmx         ? kBlockKeys * round_up(a.qk_dim, kDkStep<Mode>) * 2 * kParts<Mode>
                       : Mode::kConvertsK ? kBlockKeys * a.qk_dim * 4
                                          : kBlockKeys * padded_stride<T>(a.qk_dim) * (int64_t)sizeof(T));
  w.v = arena.allocate(copies ? kBlockKeys * o_depth<Mode>(a) * larger_of(4, 2 * kParts<Mode>)
                              : groups_of(a.v_dim) * kColumnGroup * 4);
  const bool gathers = a.pages || (a.format && !Mode::kConvertsK);
  w.k_rows = arena.allocate(gathers ? kBlockKeys * a.qk_dim * (int64_t)sizeof(T) : 0);
  w.v_rows = arena.allocate(gathers ? kBlockKeys * a.v_dim * (int64_t)sizeof(T) : 0);
  w.bytes = arena.bytes;
  return w;
}

// A key block: row `key` of K is at k + (key - start) * k_stride, and likewise the rows (or pairs of rows) of V.
template <class Mode>
struct KeyBlock {
  typedef typename Mode::T T;
  int64_t start, stop;  // the keys that some panel needs
  int64_t packed_to;    // keys before this one are packed
  const void* k;
  int64_t k_stride;
  const typename Mode::PackedV* v;  // row (or pair) of key `start`
  int64_t v_stride;
  int64_t v_group;               // see multiply_values
  const T *source_k, *source_v;  // the row of key `start` in the caller's memory, or gathered from pages
  int64_t source_k_stride, source_v_stride;
  bool gathers_pages, copies_k, copies_v;
  KeyBlockSpace space;
  uint8_t visible[kBlockKeys];                     // by some panel, from `start` on
  float k_scale[kBlockKeys], v_scale[kBlockKeys];  // of each row from `start` on, if rows have one (has_row_scales)
};

// Initialises a block of keys [start, stop) without packing any. `panels`: how often panels read it.
template <class Mode>
static void begin_key_block(const Attention& a, const RowBlock& block, int64_t start, int64_t stop,
                            const KeyBlockSpace& w, int64_t panels, bool row_major, KeyBlock<Mode>& key_block) {
  typedef typename Mode::T T;
  const Rows<T> k = key_rows<T>(a, block.batch, block.kv_head), v = value_rows<T>(a, block.batch, block.kv_head);
  key_block.start = key_block.packed_to = start, key_block.stop = stop, key_block.space = w;
  // a block within one page is read in place, except on AMX, whose steps reach beyond the visible keys
  key_block.gathers_pages = !k.is_contiguous(start, stop) || (Mode::kAmx && a.pages) || a.format;
  key_block.source_k = key_block.gathers_pages ? (const T*)w.k_rows : k(start),
  key_block.source_k_stride = key_block.gathers_pages ? a.qk_dim : a.k_s;
  key_block.source_v = key_block.gathers_pages ? (const T*)w.v_rows : v(start),
  key_block.source_v_stride = key_block.gathers_pages ? a.v_dim : a.v_s;
  key_block.k = key_block.source_k, key_block.k_stride = key_block.source_k_stride;
  key_block.v = (const typename Mode::PackedV*)w.v, key_block.v_stride = a.v_dim, key_block.v_group = 0;
  const int64_t bytes = a.batch * a.kv_len * a.kv_heads * (a.qk_dim + a.v_dim) * (int64_t)sizeof(T);
  auto is_worth_a_copy = [&](int64_t stride, int64_t min_panels) {
    return stride_in_bytes<T>(stride) >= kMinFarStride && panels >= (bytes >= kTuning.two_panel_bytes ? 2 : min_panels);
  };
  key_block.copies_k = Mode::kAmx || Mode::kConvertsK || (Mode::Arith::kPairs && a.qk_dim % 2) ||
                       is_worth_a_copy(key_block.source_k_stride, kTuning.min_copy_panels);
  key_block.copies_v = true;
  if constexpr (std::is_same<Mode, Direct>::value) {
    key_block.copies_v = !row_major && is_worth_a_copy(key_block.source_v_stride, kTuning.min_copy_panels_of_v);
    if (key_block.copies_v) key_block.v_stride = kBroadcasts, key_block.v_group = kColumnGroup;
    else key_block.v = key_block.source_v, key_block.v_stride = key_block.source_v_stride;
  }
  if (!key_block.copies_k) return;
  key_block.k = w.k;
  key_block.k_stride = Mode::kConvertsK ? a.qk_dim : padded_stride<T>(a.qk_dim);
}

#if defined(UNDIVIDED_AMX)
// Packs V of `keys` keys for the second product.
template <class Mode>
static void pack_v(const typename Mode::T* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* visible,
                   char* to, [[maybe_unused]] RangeCheck& range_check) {
  if constexpr (kParts<Mode> > 1)
    split_v<Mode>(v, stride, keys, columns, visible, kBlockKeys / kTileDepth, to, range_check);
  else transpose_v(v, stride, keys, columns, visible, kBlockKeys / kTileDepth, to);
}
#endif

// The scales of keys [start, stop); 0 for keys that no row sees.
template <class Mode>
static void read_row_scales(const Attention& a, const RowBlock& block, int64_t start, int64_t stop,
                            KeyBlock<Mode>& key_block) {
  const Rows<float> k = key_scales(a, block.batch, block.kv_head), v = value_scales(a, block.batch, block.kv_head);
  for (int64_t j = start; j < stop; j++) {
    const int64_t at = j - key_block.start;
    const bool visible = key_block.visible[at];
    key_block.k_scale[at] = visible ? *k(j) : 0, key_block.v_scale[at] = visible ? *v(j) : 0;
  }
}

// Packs the keys up to `stop`, a multiple of kPackStep or the block's last key.
constexpr int64_t kPackStep = 32;
template <class Mode>
static void pack_keys(const Attention& a, const RowBlock& block, int64_t stop, KeyBlock<Mode>& key_block,
                      [[maybe_unused]] RangeCheck& range_check) {
  typedef typename Mode::T T;
  const int64_t start = key_block.packed_to, first = start - key_block.start, count = stop - start;
  const uint8_t* visible = key_block.visible + first;
  if (a.format) {
    if (has_row_scales(a)) read_row_scales(a, block, start, stop, key_block);
    if constexpr (Mode::kConvertsK) {
      dequantize(a, block.batch, block.kv_head, start, stop, visible, (float*)key_block.space.k + first * a.qk_dim,
                 (float*)key_block.space.v + first * a.v_dim);
      key_block.packed_to = stop;
      return;
    } else if constexpr (!Mode::kAmx) {
      dequantize(a, block.batch, block.kv_head, start, stop, visible, (T*)key_block.space.k_rows + first * a.qk_dim,
                 (T*)key_block.space.v_rows + first * a.v_dim);
    }
  } else if (key_block.gathers_pages) {
    gather_pages(key_rows<T>(a, block.batch, block.kv_head), start, stop, a.qk_dim, visible,
                 (T*)key_block.space.k_rows + first * a.qk_dim);
    gather_pages(value_rows<T>(a, block.batch, block.kv_head), start, stop, a.v_dim, visible,
                 (T*)key_block.space.v_rows + first * a.v_dim);
  }
  const T *k = key_block.source_k + first * key_block.source_k_stride,
          *v = key_block.source_v + first * key_block.source_v_stride;
  const int64_t k_s = key_block.source_k_stride, v_s = key_block.source_v_stride;
  key_block.packed_to = stop;
#if defined(UNDIVIDED_AMX)
  if constexpr (Mode::kAmx) {
    const int64_t keys = smaller_of(stop, a.kv_len) - start;
    char* packed = key_block.space.k + first * round_up(a.qk_dim, kDkStep<Mode>) * 2 * kParts<Mode>;
    if constexpr (kParts<Mode> > 1) split_k<Mode>(k, k_s, keys, count, a.qk_dim, visible, packed, range_check);
    else pack_k(k, k_s, keys, count, a.qk_dim, packed);
    pack_v<Mode>(v, v_s, keys, a.v_dim, visible, key_block.space.v + first / kTileDepth * kTileBytes, range_check);
    return;
  } else
#endif
      if constexpr (Mode::Arith::kPairs) {
    BFloat16* copy = (BFloat16*)key_block.space.k + first * key_block.k_stride;
    for (int64_t j = 0; key_block.copies_k && j < count; j++, copy += key_block.k_stride) {
      memcpy(copy, k + j * k_s, (size_t)a.qk_dim * 2);
      copy[a.qk_dim].bits = 0;
    }
    interleave(v, v_s, start, stop, a.v_dim, visible,
               (uint32_t*)key_block.space.v + (start / 2 - key_block.start / 2) * a.v_dim);
  } else if constexpr (Mode::kConvertsK) {
    widen(k, k_s, count, a.qk_dim, nullptr, (float*)key_block.space.k + first * a.qk_dim);
    widen(v, v_s, count, a.v_dim, nullptr, (float*)key_block.space.v + first * a.v_dim);
  } else {
    float* copy = (float*)key_block.space.k + first * key_block.k_stride;
    for (int64_t j = 0; key_block.copies_k && j < count; j++)
      memcpy(copy + j * key_block.k_stride, k + j * k_s, (size_t)a.qk_dim * 4);
    if (key_block.copies_v) group_columns(v, v_s, count, a.v_dim, (float*)key_block.space.v + first * kBroadcasts);
  }
}

}  // namespace
