// How K and V reach the micro-kernels, and what sizes follow from that.
#pragma once

#include <math.h>

#include "abi/attention.h"
#include "gemm/vector.h"

namespace {

using undivided::kTile;
using undivided::RowBlock;

struct Direct {  // fp32, in place
  typedef float T;
  typedef Fma Arith;
  typedef float Tile;
  static constexpr bool kConvertsK = false, kTiled = false;
};
template <class Half>
struct Widened {  // 16 bits converted to fp32, tile by tile
  typedef Half T;
  typedef Fma Arith;
  typedef float Tile;
  static constexpr bool kConvertsK = true, kTiled = false;
};
#if defined(__AVX512BF16__)
struct Paired {  // bf16 dot products: K in place (pairs along d), V interleaved (pairs of keys)
  typedef BFloat16 T;
  typedef Dot Arith;
  typedef uint32_t Tile;
  static constexpr bool kConvertsK = false, kTiled = false;
};
#endif
#if defined(UNDIVIDED_AMX)
struct TilePairs {
  static constexpr bool kPairs = true;
};
template <class Half>
struct Tiled {  // AMX: K and V packed into tiles
  typedef Half T;
  typedef TilePairs Arith;
  typedef char Tile;
  static constexpr bool kConvertsK = false, kTiled = true;
};
template <class Half, class Number = float>
struct Split {  // AMX: fp32 as sums of two fp16 or three bf16, fp16 of two bf16, see split.h
  typedef Number T;
  typedef TilePairs Arith;
  typedef char Tile;
  static constexpr bool kConvertsK = false, kTiled = true;
};
#endif

// How many 16-bit numbers stand for one of Q, K, V and the weights, side by side in whatever holds them, of which type, and by how
// many powers of two Q, K and V are scaled up.
template <class Mode>
constexpr int kParts = 1;
template <class Mode>
constexpr int kInputBits = 0;
// Products of parts that make one of numbers, and one of Q and K.
template <class Mode>
constexpr int kProducts = kParts<Mode> * (kParts<Mode> + 1) / 2;
template <class Mode>
constexpr int kScoreProducts = kProducts<Mode>;
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

// Keys are taken in steps of so many, and both head sizes are padded to multiples of the other two.
template <class Mode>
constexpr int64_t kKeyStep = Mode::kTiled ? 32 : 1;
template <class Mode>
constexpr int64_t kDkStep = Mode::kTiled ? 32 : 1;
template <class Mode>
constexpr int64_t kDvStep = Mode::kTiled ? 16 : 1;

INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_down(int64_t n, int64_t step) { return n / step * step; }

// Scores as kernels keep them up to the exponent: products of q and k as they are, where nothing but a positive scale comes between. The
// largest one is subtracted before anything is multiplied, so that what 2 is raised to is never above 0: rounded after a
// multiplication, numbers of 1e10 leave differences of 500. What `natural` and `log2` of a unit make of a score: natural units, and those
// of log 2.
struct ScoreUnit {
  float natural, log2;
};
INLINE bool keeps_products(const Attention& a) {
  return a.softcap == 0 && !a.bias && !a.slopes && 0x1p-100 <= a.scale && a.scale <= 0x1p100;
}
// Other scores are in natural units.
template <class Mode>
INLINE ScoreUnit score_unit(const Attention& a) {
  const double scale = Mode::kTiled ? ldexp(a.scale, -2 * kInputBits<Mode>) : a.scale;
  if (keeps_products(a)) return {(float)scale, (float)(scale * (double)kLog2E)};
  return {1, kLog2E};
}

// A row's base from here on is subtracted from scores as they are, or rounded: below, one multiply-add does, and its rounding is no more
// than 2^-16.
constexpr float kLargeBase = 0x1p8f;
INLINE IVec is_large(Vec base) { return (Vec)((UVec)base & 0x7fffffffu) >= kLargeBase; }

// Whether a row saw no key, by its largest score and its total: scores that are NaN are not the largest, but count in the total.
INLINE bool is_empty(float most, float total) { return most == -kInfinity && total == 0; }

// Whether a row's sums may hold what is not its own, as infinite and NaN values reach them with a weight of 0: those of other rows'
// keys, and, on tiles, of other columns. A row with a NaN score is NaN throughout.
INLINE bool is_mixed(const float* sums, int64_t count, float total) {
  Vec nothing = {};
  for (int64_t d = 0; d < count; d += kLanes) nothing += load(sums + d) * 0;
  return total == total && any(nothing != nothing);
}

// Memory cut into pieces that start at a line each; from null it only counts.
struct Carving {
  char* base;
  int64_t bytes = 0;

  char* take(int64_t size) {
    char* piece = base + bytes;
    bytes += round_up(size, 64);
    return piece;
  }
};

// Elements along Dk of Qt, in 32-bit lanes.
template <class Mode>
INLINE int64_t q_depth(const Attention& a) {
  const int64_t dim = round_up(a.qk_dim, kDkStep<Mode>);
  return Mode::Arith::kPairs ? (dim + 1) / 2 * kParts<Mode> : dim;
}
// Elements along Dv of Ot.
template <class Mode>
INLINE int64_t o_depth(const Attention& a) {
  return round_up(a.v_dim, kDvStep<Mode>);
}

}  // namespace
