// Rows of numbers in the formats of quantised caches, as `undivided.quantization` defines them: the largest magnitude
// of a row, or of a group for kInt4, becomes the largest number of the format. The bits are those of that definition,
// for NaN and infinity too.
#pragma once

#include "simd/quantized.h"

namespace {

template <class Number>
constexpr float kLargestNumber = 0;
template <>
constexpr float kLargestNumber<Int8> = 127;
template <>
constexpr float kLargestNumber<Float8E4M3> = 448;
template <>
constexpr float kLargestNumber<Float8E5M2> = 57344;
template <>
constexpr float kLargestNumber<Int4> = 7;

// NaN if there is one.
template <class T>
INLINE float row_magnitude(const T* row, int64_t columns) {
  IVec largest = {};
  for (int64_t d = 0; d < columns; d += kLanes) {
    const IVec bits = (IVec)load_columns(row + d, columns - d) & 0x7fffffff;  // NaN is above all numbers
    largest = largest > bits ? largest : bits;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits = bits > largest[i] ? bits : largest[i];
  return bits_to_float((uint32_t)bits);
}

// 0 for 0 / 0, and for NaN or infinity in the row. The quotient of a subnormal scale may be above the largest number.
INLINE Vec divided(Vec x, Vec scale, float largest) {
  const Vec quotient = x / scale, number = quotient == quotient ? quotient : Vec{};
  return smaller(larger(number, splat(-largest)), splat(largest));
}

// The nearest integer of small numbers, to even: adding a large number leaves it in the low bits.
INLINE IVec nearest_bits(Vec x, const Int8*) { return (IVec)(x + 0x1.8p23f) - (IVec)splat(0x1.8p23f); }

// The nearest numbers with so many bits of mantissa, to even.
template <int kMantissa, int kBias>
INLINE IVec nearest_float8(Vec x) {
  constexpr int kDropped = 23 - kMantissa, kFirstExponent = 128 - kBias;
  const IVec sign = (IVec)((UVec)x >> 24 & 0x80), magnitude = (IVec)x & 0x7fffffff;
  const IVec rounded_up = magnitude + ((1 << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1);
  const IVec normal = (rounded_up >> kDropped) - ((127 - kBias) << kMantissa);
  // a multiple of the smallest number, as in `nearest_bits`
  const Vec unit = splat(bits_to_float((uint32_t)(kFirstExponent + kDropped) << 23));
  const IVec subnormal = (IVec)((Vec)magnitude + unit) - (IVec)unit;
  return sign | (magnitude < (kFirstExponent << 23) ? subnormal : normal);
}
INLINE IVec nearest_bits(Vec x, const Float8E4M3*) { return nearest_float8<3, 7>(x); }
INLINE IVec nearest_bits(Vec x, const Float8E5M2*) { return nearest_float8<2, 15>(x); }

INLINE void store_bytes(void* to, IVec x, int64_t count) {
  const ByteVec bytes = __builtin_convertvector(x, ByteVec);
  if (count >= kLanes) {
    *(UnalignedByteVec*)to = bytes;
  } else {
    memcpy(to, &bytes, (size_t)count);
  }
}

template <class T, class Number>
INLINE void quantize_row(const T* row, int64_t columns, Number* to, float* scale) {
  constexpr float kLargest = kLargestNumber<Number>;
  *scale = row_magnitude(row, columns) / kLargest;
  for (int64_t d = 0; d < columns; d += kLanes) {
    const Vec x = divided(load_columns(row + d, columns - d), splat(*scale), kLargest);
    store_bytes(to + d, nearest_bits(x, to), columns - d);
  }
}
template <class T>
INLINE void quantize_row(const T* row, int64_t columns, Int4* to, float* scale) {
  for (int64_t group = 0; group < columns; group += kGroupSize, scale++, to += kGroupSize / 2) {
    int8_t numbers[kGroupSize];
    *scale = row_magnitude(row + group, kGroupSize) / kLargestNumber<Int4>;
    for (int d = 0; d < kGroupSize; d += kLanes) {
      const Vec x = divided(load_as_float(row + group + d), splat(*scale), kLargestNumber<Int4>);
      store_bytes(numbers + d, nearest_bits(x, (const Int8*)nullptr) + 8, kLanes);
    }
    for (int i = 0; i < kGroupSize / 2; i++) to[i].bits = (uint8_t)(numbers[2 * i] | numbers[2 * i + 1] << 4);
  }
}

}  // namespace
