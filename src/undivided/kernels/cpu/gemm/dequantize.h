// Rows of quantised keys or values as numbers of another type, for the key blocks of prefill.
#pragma once

#include <type_traits>

#include "mask/pages.h"
#include "simd/quantized.h"

namespace {

template <class T, class To>
INLINE void dequantize_row(const T* from, const float* scale, int64_t columns, To* to) {
  int64_t d = 0;
  for (; d + kLanes <= columns; d += kLanes) store_from_float(to + d, load_as_float(from + d) * *scale);
  for (; d < columns; d++) from_float(to_float(from[d]) * *scale, to + d);
}
template <class To>
INLINE void dequantize_row(const Int4* from, const float* scale, int64_t columns, To* to) {
  for (int64_t d = 0; d < columns; d += 2, from++) {
    const float s = scale[d / kGroupSize];
    from_float((float)((from->bits & 15) - 8) * s, to + d), from_float((float)((from->bits >> 4) - 8) * s, to + d + 1);
  }
}

// Rows [start, stop) one after another; rows that no query sees become 0.
template <class T, class To>
static void dequantize_rows(const Rows<T>& rows, const Rows<float>& scales, int64_t start, int64_t stop,
                            int64_t columns, const uint8_t* visible, To* to) {
  for (int64_t j = start; j < stop; j++, to += columns) {
    if (visible[j - start]) dequantize_row(rows(j), scales(j), columns, to);
    else memset(to, 0, (size_t)columns * sizeof(To));
  }
}
// Keys [start, stop) and their values.
template <class To>
static void dequantize(const Attention& a, int64_t batch, int64_t head, int64_t start, int64_t stop,
                       const uint8_t* visible, To* k, To* v) {
  with_format(a.format, [&](auto type) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(type)>> T;
    dequantize_rows(key_rows<T>(a, batch, head), key_scales(a, batch, head), start, stop, a.qk_dim, visible, k);
    dequantize_rows(value_rows<T>(a, batch, head), value_scales(a, batch, head), start, stop, a.v_dim, visible, v);
  });
}

}  // namespace
