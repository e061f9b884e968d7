// fp32 on AMX, whose tiles hold 16-bit numbers: each number is a sum of two fp16 or three bf16 parts, and a product of
// two numbers takes three or six products of parts. fp16 on tiles of bf16 is a sum of two parts.
//
//     two fp16     x = x0 + x1,       |x1| <= 2^-11 |x|
//                  x y = x1 y0 + x0 y0 + x0 y1
//     three bf16   x = x0 + x1 + x2,  |x1| <= 2^-9 |x|,  |x2| <= 2^-17 |x|
//                  x y = x2 y0 + x1 y0 + x1 y1 + x0 y1 + x0 y2 + x0 y0
//
// Accuracy. Three bf16 hold the 24 bits of fp32, and the omitted products are below 2^-25 |x y|. Two fp16 hold 23 or
// 24 bits (an error of at most 2^-24 |x|, half of fp32's last bit), and the omitted products are below 2^-22 |x y|,
// 2^-25 on average: less than the rounding of fp32 sums. Each product is exact in fp32. A tile adds 32 of them to one
// sum, and that to the sum so far, which takes fewer roundings than a chain of multiply-adds. fp16 is exactly a sum of
// two bf16; scores take all four products, so that the log-sum-exp equals that of other kernels, the rest three, whose
// error of up to 2^-18 is below the rounding of the results to fp16 (2^-12).
//
// Speed. A tile instruction computes 8192 products of parts in 16 cycles: 8192 products of fp32 take 96 cycles with six
// products, 48 with three, and 256 on vectors.
//
// Range. fp16 spans 40 powers of two, subnormal numbers included. Q, K and V are scaled up by 2^kInputBits; the error
// of a number is then at most 2^-25, below 2^-24 of its row's largest number if that is at least 2^-9, and numbers must
// stay below 255. Tiles read bf16 below 2^-126 as 0, and infinite numbers cannot be split. RangeCheck therefore tracks
// the largest number of each row: if fp16 does not fit, the whole problem is repeated with bf16, and if that does not
// fit, on vectors.
#pragma once

#include "gemm/amx.h"
#include "gemm/modes.h"
#include "simd/transpose.h"

namespace {

// The factor by which the numbers of Q, K and V are scaled up.
template <class Mode>
constexpr float input_scale() {
  return (float)(1 << kInputBits<Mode>);
}

#if defined(UNDIVIDED_AMX)
// for counts below kLanes
INLINE __mmask16 first_lanes(int64_t count) { return (__mmask16)(count > 0 ? (1u << count) - 1 : 0); }
INLINE Vec load_partial(const float* p, int64_t count) {
  return count >= kLanes ? load(p) : (Vec)_mm512_maskz_loadu_ps(first_lanes(count), p);
}
INLINE Vec load_partial(const Float16* p, int64_t count) {
  return count >= kLanes ? load_as_float(p) : (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
INLINE void store_partial(Vec x, float* p, int64_t count) {
  if (count >= kLanes) store(p, x);
  else _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)x);
}
INLINE void store_partial(Vec x, Float16* p, int64_t count) {
  if (count >= kLanes) store_from_float(p, x);
  else _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

// Magnitudes as unsigned integers, in the order of the numbers; NaN is the largest.
INLINE UVec max_magnitudes(UVec magnitudes, Vec x) {
  return (UVec)_mm512_max_epu32((__m512i)magnitudes, (__m512i)((UVec)x << 1));
}
INLINE UVec magnitude(float x) { return (UVec)splat(x) << 1; }

// The largest magnitudes of a row, per lane. (A separate pass over whole rows also loads them fastest from memory if
// they are transposed next.)
template <class T>
static UVec row_magnitudes(const T* row, int64_t dim) {
  UVec magnitudes = {};
  for (int64_t d = 0; d < dim; d += kLanes) magnitudes = max_magnitudes(magnitudes, load_partial(row + d, dim - d));
  return magnitudes;
}
template <class T>
static float largest_magnitude(const T* row, int64_t dim) {
  return bits_to_float(_mm512_reduce_max_epu32((__m512i)row_magnitudes(row, dim)) >> 1);
}
#endif

constexpr float kMaxFloat16 = 65504;

// Whether some row so far has numbers that the parts cannot represent.
class RangeCheck {
 public:
  // The range of this mode: that of fp16; or that of bf16, for products of two numbers, or of more that are at least
  // `low`.
  template <class Mode>
  static RangeCheck of_mode(float low = 0x1p-80f) {
    return std::is_same<Part<Mode>, Float16>::value ? RangeCheck(0.5f, kMaxFloat16, input_scale<Mode>())
                                                    : RangeCheck(low, 0x1p100f, 1);
  }
  // low and high bound the largest number of a row after multiplication by `scale`, unless it is 0.
#if defined(UNDIVIDED_AMX)
  RangeCheck(float low, float high, float scale) : low_(magnitude(low / scale)), high_(magnitude(high / scale)) {}
  void add(UVec magnitudes) {  // of a row
    out_of_range_ |= !_mm512_cmpge_epu32_mask((__m512i)magnitudes, (__m512i)low_) &&
                     _mm512_test_epi32_mask((__m512i)magnitudes, (__m512i)magnitudes);
    largest_ = (UVec)_mm512_max_epu32((__m512i)largest_, (__m512i)magnitudes);
  }
  bool out_of_range() const { return out_of_range_ || _mm512_cmpge_epu32_mask((__m512i)largest_, (__m512i)high_); }

 private:
  UVec low_, high_, largest_ = {};
  bool out_of_range_ = false;
#else
  RangeCheck(float, float, float) {}
  bool out_of_range() const { return false; }
#endif
};

}  // namespace

#if defined(UNDIVIDED_AMX)

namespace {

// How a number is split: split_off subtracts one part from x; `last` is the rest. Parts of two vectors are put into
// pairs lane by lane, or one vector after the other.
template <class Half>
struct Parts;

template <>
struct Parts<BFloat16> {  // in the upper 16 bits, with garbage below
  typedef UVec Vector;
  INLINE Vector split_off(Vec& x) {
    const UVec rounded = (UVec)x + 0x8000;
    x -= (Vec)(rounded & 0xffff0000u);
    return rounded;
  }
  INLINE Vector last(Vec x) { return (UVec)x; }
  INLINE Vec pairs(Vector even, Vector odd) {
    return (Vec)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(even >> 16), (__m512i)odd);
  }
  INLINE __m512i join(Vector low, Vector high) {
    alignas(64) static const uint16_t upper[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16((__m512i)low, _mm512_load_si512(upper), (__m512i)high);
  }
};

template <>
struct Parts<Float16> {
  typedef __m256i Vector;
  INLINE Vector split_off(Vec& x) {
    const Vector part = last(x);
    x -= (Vec)_mm512_cvtph_ps(part);
    return part;
  }
  INLINE Vector last(Vec x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
  INLINE Vec pairs(Vector even, Vector odd) {
    return (Vec)_mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
  }
  INLINE __m512i join(Vector low, Vector high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
};

template <class Half, int P>
using PartVectors = typename Parts<Half>::Vector[P];

// All parts of x.
template <class Half, int P>
INLINE void split_into(Vec x, PartVectors<Half, P>& parts) {
#pragma GCC unroll 2
  for (int p = 0; p < P - 1; p++) parts[p] = Parts<Half>::split_off(x);
  parts[P - 1] = Parts<Half>::last(x);
}
// Pairs of the parts of two vectors, lane by lane.
template <class Half, int P>
INLINE void split_pairs(Vec even, Vec odd, Vec (&pairs)[P]) {
  PartVectors<Half, P> e, o;
  split_into<Half, P>(even, e), split_into<Half, P>(odd, o);
#pragma GCC unroll 3
  for (int p = 0; p < P; p++) pairs[p] = Parts<Half>::pairs(e[p], o[p]);
}

template <class Mode>
INLINE Vec scaled_up(Vec x) {
  return kInputBits<Mode> == 0 ? x : x * input_scale<Mode>();
}

// A row, scaled up, in order: kTileDepth numbers of each part, `part` bytes apart; the next kTileDepth numbers are
// `step` bytes further on.
template <class Mode>
INLINE void split_row(const typename Mode::T* row, int64_t columns, char* to, int64_t step, int64_t part,
                      RangeCheck& range_check) {
  typedef Part<Mode> Half;
  UVec magnitudes = {};
  for (int64_t d = 0; d < columns; d += kTileDepth, to += step) {
    const Vec x = load_partial(row + d, columns - d), y = load_partial(row + d + kLanes, columns - d - kLanes);
    magnitudes = max_magnitudes(max_magnitudes(magnitudes, x), y);
    constexpr int P = kParts<Mode>;
    PartVectors<Half, P> low, high;
    split_into<Half, P>(scaled_up<Mode>(x), low), split_into<Half, P>(scaled_up<Mode>(y), high);
    for (int p = 0; p < P; p++) _mm512_store_si512(to + p * part, Parts<Half>::join(low[p], high[p]));
  }
  range_check.add(magnitudes);
}

// Transposes kLanes rows (a null pointer is a row of zeros), multiplied by `scale`, into pairs: to[part][d / 2][lane],
// zeros up to `depth` pairs.
template <class Mode>
static void split_rows(const typename Mode::T* const (&row)[kLanes], int64_t dim, int64_t depth, float* to,
                       RangeCheck& range_check, float scale = input_scale<Mode>()) {
  for (int i = 0; i < kLanes; i++)
    if (row[i]) range_check.add(row_magnitudes(row[i], dim));
  for (int64_t d = 0; d < 2 * depth; d += kLanes) {
    Vec x[kLanes], parts[kParts<Mode>];
    for (int i = 0; i < kLanes; i++) x[i] = row[i] && d < dim ? load_partial(row[i] + d, dim - d) * scale : Vec{};
    transpose(x);
    for (int i = 0; i < kLanes; i += 2) {
      split_pairs<Part<Mode>, kParts<Mode>>(x[i], x[i + 1], parts);
      for (int p = 0; p < kParts<Mode>; p++) store(to + (p * depth + (d + i) / 2) * kPanel, parts[p]);
    }
  }
}

// pack_k for split numbers: groups of kTileRows keys, each with all parts. Keys that no row sees become zeros.
template <class Mode>
static void split_k(const typename Mode::T* k, int64_t stride, int64_t keys, int64_t padded, int64_t columns,
                    const uint8_t* visible, char* to, RangeCheck& range_check) {
  const int64_t steps = (columns + kTileDepth - 1) / kTileDepth, part = steps * kTileBytes;
  for (int64_t j = 0; j < padded; j++, k += stride) {
    char* row = to + j / kTileRows * kParts<Mode> * part + j % kTileRows * 64;
    if (j < keys && visible[j]) {
      split_row<Mode>(k, columns, row, kTileBytes, part, range_check);
      continue;
    }
    for (int64_t i = 0; i < steps * kParts<Mode>; i++) _mm512_store_si512(row + i * kTileBytes, _mm512_setzero_si512());
  }
}

// transpose_v for split numbers: groups of kTileRows columns, each with all parts of `capacity` steps.
template <class Mode>
static void split_v(const typename Mode::T* v, int64_t stride, int64_t keys, int64_t columns, const uint8_t* visible,
                    int64_t capacity, char* to, RangeCheck& range_check) {
  const int64_t part = capacity * kTileBytes;
  for (int64_t j = 0; j < keys; j += kTileDepth, v += kTileDepth * stride, visible += kTileDepth, to += kTileBytes) {
    for (int64_t key = 0; key < kTileDepth && j + key < keys; key++)
      if (visible[key]) range_check.add(row_magnitudes(v + key * stride, columns));
    for (int64_t d = 0; d < columns; d += kTileRows) {
      Vec x[kParts<Mode>][kLanes];
      for (int i = 0; i < kLanes; i++) {
        Vec pair[2], parts[kParts<Mode>];
        for (int odd = 0; odd < 2; odd++) {
          const int64_t key = 2 * i + odd;
          pair[odd] =
              scaled_up<Mode>(j + key < keys && visible[key] ? load_partial(v + key * stride + d, columns - d) : Vec{});
        }
        split_pairs<Part<Mode>, kParts<Mode>>(pair[0], pair[1], parts);
        for (int p = 0; p < kParts<Mode>; p++) x[p][i] = parts[p];
      }
      for (int p = 0; p < kParts<Mode>; p++) {
        transpose(x[p]);
        char* tile = to + d / kTileRows * kParts<Mode> * part + p * part;
        for (int i = 0; i < kLanes; i++) store((float*)(tile + i * 64), x[p][i]);
      }
    }
  }
}

}  // namespace

#endif
