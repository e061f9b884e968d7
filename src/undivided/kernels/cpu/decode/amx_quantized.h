// Rows of 8-bit keys and values as tiles of bf16, which is exact, and the order of their columns. Scales of rows
// multiply scores and weights.
#pragma once

#include "decode/pair_products.h"
#include "gemm/amx.h"

#if defined(UNDIVIDED_AMX)

namespace {

// The numbers of the tiles that hold rows of type T.
template <class T>
using TileNumber = std::conditional_t<kIsQuantized<T>, BFloat16, T>;
// Rows per key head from which on tiles are faster than vectors.
template <class T>
constexpr int64_t kMinTileRows = std::is_same<T, Float8E4M3>::value ? kMinTileRowsE4M3 : kMinTileRowsQuantized;
// Columns of the tiles that are filled together: two of quantised rows, of which the first one has the first 8 of each
// 16 columns, the second one the others.
template <class T>
constexpr int64_t kTileColumns = kIsQuantized<T> ? 2 * kTileDepth : kTileDepth;

// The 32 columns of a query that the tile of columns [d, d + 32) multiplies.
template <class T>
INLINE Vec query_of_tile(const TileNumber<T>* q, int64_t d) {
  const auto columns = [&](int64_t at) { return load((const float*)(const void*)(q + at)); };
  if constexpr (!kIsQuantized<T>) return columns(d);
  const bool is_second = d % kTileColumns<T> != 0;
  if (is_second) return pick_quarters<kOdd>(columns(d - kTileDepth), columns(d));
  return pick_quarters<kEven>(columns(d), columns(d + kTileDepth));
}
// Puts the columns of a row of sums, tile after tile, into the order of the head.
template <class T>
INLINE void restore_columns(float* sums, int64_t dim) {
  if constexpr (!kIsQuantized<T>) return;
  for (int64_t d = 0; d < dim; d += kTileColumns<T>) {
    Vec x[4];  // two of each tile
    for (int i = 0; i < 4; i++) x[i] = load(sums + d + i * kLanes);
    for (int i = 0; i < 2; i++) {
      store(sums + d + 2 * i * kLanes, pick_quarters<kFirstTwo>(x[i], x[2 + i]));
      store(sums + d + (2 * i + 1) * kLanes, pick_quarters<kLastTwo>(x[i], x[2 + i]));
    }
  }
}

// Fills the two tiles of columns [d, d + 64) of 16 rows from row `first` on: 1 KiB each, one after the other.
template <class T>
INLINE void fill_tiles(const HeadRows<T>& rows, int64_t first, int64_t d, char* tiles) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < kTileRows; i++) {
    __m512i x, y;
    to_bf16<T>(_mm512_loadu_si512(rows.row[first + i] + rows.offset + d), x, y);
    _mm512_store_si512(tiles + i * 64, x), _mm512_store_si512(tiles + kTileBytes + i * 64, y);
  }
}

// Multiplies scores [key][Rows] by the scale of each key.
template <int Rows, class T>
INLINE void multiply_by_key_scales(const HeadRows<T>& keys, int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j++) {
    const float scale = keys.scale[j][keys.scale_offset];
    for (int r = 0; r < Rows; r++) scores[j * Rows + r] *= scale;
  }
}

}  // namespace

#endif
