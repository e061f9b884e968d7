// Modes: the types in which K and V reach the micro-kernels, and the sizes that follow.
#pragma once

#include <type_traits>

#include "abi/kernels.h"
#include "abi/row_ranges.h"
#include "gemm/vector.h"
#include "simd/arithmetic.h"

namespace {

using namespace undivided::tuning;
using undivided::partial_size;
using undivided::Range;
using undivided::ranges_of_row;
using undivided::RowBlock;
using undivided::RowRanges;
using undivided::rows_of_group;

constexpr int64_t kBlockKeys = kTuning.block_keys;

struct Direct {  // fp32, in place
  typedef float T;
  typedef Fma Arith;
  typedef float PackedV;
  static constexpr bool kConvertsK = false, kAmx = false;
};
template <class Half>
struct Widened {  // 16 bits, converted to fp32 one key block at a time
  typedef Half T;
  typedef Fma Arith;
  typedef float PackedV;
  static constexpr bool kConvertsK = true, kAmx = false;
};
#if defined(UNDIVIDED_BF16_DOT)
struct Paired {  // bf16 dot products: K in place (pairs along d), V interleaved (pairs of keys)
  typedef BFloat16 T;
  typedef Dot Arith;
  typedef uint32_t PackedV;
  static constexpr bool kConvertsK = false, kAmx = false;
};
#endif
#if defined(UNDIVIDED_AMX)
struct AmxPairs {
  static constexpr bool kPairs = true;
};
template <class Half>
struct Amx {  // AMX: K and V packed into tiles
  typedef Half T;
  typedef AmxPairs Arith;
  typedef char PackedV;
  static constexpr bool kConvertsK = false, kAmx = true;
};
template <class Half, class Number = float>
struct Split {  // AMX: fp32 as sums of two fp16 or three bf16, fp16 as sums of two bf16; see gemm/split.h
  typedef Number T;
  typedef AmxPairs Arith;
  typedef char PackedV;
  static constexpr bool kConvertsK = false, kAmx = true;
};
#endif

#if defined(UNDIVIDED_AMX)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

#if defined(UNDIVIDED_BF16_DOT)
constexpr bool kHasDot = true;  // of bf16
#else
constexpr bool kHasDot = false;
#endif

// 16-bit parts per number of Q, K, V and the weights (see gemm/split.h).
template <class Mode>
constexpr int kParts = 1;
// Q, K and V are scaled up by 2^kInputBits.
template <class Mode>
constexpr int kInputBits = 0;
// Products of parts per product of two numbers, and per product of Q and K.
template <class Mode>
constexpr int kProducts = kParts<Mode> * (kParts<Mode> + 1) / 2;
template <class Mode>
constexpr int kScoreProducts = kProducts<Mode>;
// The type of the parts: Part<Mode>.
template <class Mode>
struct PartOf {
  typedef typename Mode::T type;
};
#if defined(UNDIVIDED_AMX)
template <>
constexpr int kParts<Split<Float16>> = 2;
template <>
constexpr int kParts<Split<BFloat16>> = 3;
template <>
constexpr int kParts<Split<BFloat16, Float16>> = 2;
template <>
constexpr int kScoreProducts<Split<BFloat16, Float16>> = 4;
template <>
constexpr int kInputBits<Split<Float16>> = 8;
template <class Half, class Number>
struct PartOf<Split<Half, Number>> {
  typedef Half type;
};
#endif
template <class Mode>
constexpr bool kIsFloat32 = std::is_same<typename Mode::T, float>::value;
template <class Mode>
using Part = typename PartOf<Mode>::type;

// Multiples to which keys, the head size of Q and K, and that of V are padded.
template <class Mode>
constexpr int64_t kKeyStep = Mode::kAmx ? 32 : 1;
template <class Mode>
constexpr int64_t kDkStep = Mode::kAmx ? 32 : 1;
template <class Mode>
constexpr int64_t kDvStep = Mode::kAmx ? 16 : 1;

// Rows of Q^T, in 32-bit lanes.
template <class Mode>
INLINE int64_t q_depth(const Attention& a) {
  const int64_t dim = round_up(a.qk_dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (dim + 1) / 2 * kParts<Mode> : dim;
}
// Terms of a sum over this many keys, on vectors.
template <class Mode>
INLINE int64_t value_terms(int64_t keys) {
  return Mode::Arith::kPairs ? (keys + 1) / 2 : keys;
}
// Rows of O^T.
template <class Mode>
INLINE int64_t o_depth(const Attention& a) {
  return round_up(a.v_dim, kDvStep<Mode>);
}

}  // namespace
