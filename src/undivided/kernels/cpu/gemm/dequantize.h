// Rows of quantised keys or values as numbers of another type, for the key blocks of prefill. If a row has one scale,
// it is left out: scales of keys multiply scores, those of values multiply weights, which every order of decoding can
// do. Numbers with a scale per group are multiplied by it.
#pragma once

#include <type_traits>

#include "mask/pages.h"
#include "simd/quantized.h"
#include "simd/transpose.h"

namespace {

// Whether the numbers of a row have one scale, which multiplies scores or weights.
INLINE bool has_row_scales(const Attention& a) { return a.format && a.format != kInt4; }

// Two vectors of numbers, one after the other, or number by number in turns.
template <class To>
INLINE void store_in_order(To* to, Vec first, Vec second) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same<To, BFloat16>::value)
    return _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#endif
  store_from_float(to, first), store_from_float(to + kLanes, second);
}
template <class To, int... I>
INLINE void store_zipped(To* to, Vec even, Vec odd, std::integer_sequence<int, I...>) {
  if constexpr (std::is_same<To, BFloat16>::value) return store((float*)(void*)to, pair_bf16(even, odd));
  store_from_float(to, shuffle<(I % 2 * kLanes + I / 2)...>(even, odd));
  store_from_float(to + kLanes, shuffle<(I % 2 * kLanes + kLanes / 2 + I / 2)...>(even, odd));
}

#if defined(__AVX512BF16__)
// 32 numbers of a row from number d on, as bf16.
template <class T>
INLINE __m512i dequantized_pairs(const T* row, [[maybe_unused]] const float* scale, int64_t d) {
  if constexpr (kHasGroups<T>) {
    Vec even, odd;
    load_int4(row + d / 2, scale[d / kGroupSize], even, odd);
    return (__m512i)pair_bf16(even, odd);
  } else {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)load_as_float(row + d + kLanes), (__m512)load_as_float(row + d));
  }
}
#endif

template <class T, class To>
INLINE void dequantize_row(const T* from, const float*, int64_t columns, To* to) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= columns; d += 2 * kLanes)
    store_in_order(to + d, load_as_float(from + d), load_as_float(from + d + kLanes));
  for (; d + kLanes <= columns; d += kLanes) store_from_float(to + d, load_as_float(from + d));
  for (; d < columns; d++) from_float(to_float(from[d]), to + d);
}
template <class To>
INLINE void dequantize_row(const Int4* from, const float* scale, int64_t columns, To* to) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= columns; d += 2 * kLanes) {
    Vec even, odd;
    load_int4(from + d / 2, scale[d / kGroupSize], even, odd);
    store_zipped(to + d, even, odd, Lanes());
  }
  for (; d < columns; d += 2) {
    const int bits = from[d / 2].bits;
    const float s = scale[d / kGroupSize];
    from_float((float)((bits & 15) - 8) * s, to + d), from_float((float)((bits >> 4) - 8) * s, to + d + 1);
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
    typedef Pointee<decltype(type)> T;
    dequantize_rows(key_rows<T>(a, batch, head), key_scales(a, batch, head), start, stop, a.qk_dim, visible, k);
    dequantize_rows(value_rows<T>(a, batch, head), value_scales(a, batch, head), start, stop, a.v_dim, visible, v);
  });
}

}  // namespace
