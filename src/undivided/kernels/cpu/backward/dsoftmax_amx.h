// The backward on AMX (see gemm/amx.h and backward/driver.h): scores and dP of 32 keys and 32 rows stay in L1.
//
//     S^T, dP^T   A: K and V packed into tiles, B: Q^T and dO^T as packed rows have them      from zero, into 2 x 4 KiB
//     dQ^T        A: K^T, transposed once per unit, B: pairs of keys of dS^T                  once per key block
//     dV, dK      A: P^T and dS^T, which are written as tiles, B: pairs of rows               once per row block
#pragma once

#include "backward/dsoftmax.h"
#include "forward/panel_amx.h"

#if defined(UNDIVIDED_AMX)

namespace {

// Multiplies 32 rows of A, from group `group` on, with B, contracting `depth` pairs. The result stays in the tiles;
// their previous contents are stored to `done`.
template <class T, int N>
INLINE void multiply_block(const char* a, int64_t group, const float* b, int64_t depth, float* done) {
  constexpr int P = Products<N>::parts;
  const int64_t steps = depth * 2 / kTileDepth, part = steps * kTileBytes;
  const AmxOperand rows = {a + group * P * part, 64, kTileBytes, P * part, part, depth * kPanelBytes};
  multiply_first<T, true, kVectors, N>(rows.at, rows, (const char*)b, nullptr, (char*)done);
  for (int64_t s = 1; s < steps; s++)
    multiply_step<T, kVectors, N>(rows.at + s * kTileBytes, rows, (const char*)b + s * kGroupStride);
}

// Stores 32 16-bit numbers of a row of A.
INLINE void store_halves(BFloat16* to, Vec low, Vec high) {
  *(__m512i_u*)to = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

INLINE void store_halves(Float16* to, Vec low, Vec high) {
  store_from_float(to, low);
  store_from_float(to + kLanes, high);
}

// The same for numbers in parts.
template <int P, class Half>
INLINE void store_parts(Half* to, const PartVectors<Half, P>& low, const PartVectors<Half, P>& high) {
#pragma GCC unroll 3
  for (int p = 0; p < P; p++) *(__m512i_u*)(to + p * kBlockKeys * kPanel) = Parts<Half>::join(low[p], high[p]);
}

// Stores P and dS of two keys as rows of A, and dS also as pairs of keys.
template <class Half>
INLINE void store_dsoftmax(const DSoftmaxResult (&x)[2][kVectors], Half* weights, Half* scores, float* pairs) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    store_halves(weights + i * kPanel, x[i][0].weight, x[i][1].weight);
    store_halves(scores + i * kPanel, x[i][0].score, x[i][1].score);
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++) store(pairs + v * kLanes, pair_weights(x[0][v].score, x[1][v].score, Half()));
}
template <int P, class Half>
INLINE void store_dsoftmax_parts(const DSoftmaxResult (&x)[2][kVectors], Half* weights, Half* scores, float* pairs) {
  PartVectors<Half, P> parts[2][kVectors];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) split_into<Half, P>(x[i][v].weight, parts[i][v]);
    store_parts<P>(weights + i * kPanel, parts[i][0], parts[i][1]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) split_into<Half, P>(x[i][v].score, parts[i][v]);
    store_parts<P>(scores + i * kPanel, parts[i][0], parts[i][1]);
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++)
#pragma GCC unroll 3
    for (int p = 0; p < P; p++)
      store(pairs + p * kPairsPart + v * kLanes, Parts<Half>::pairs(parts[0][v][p], parts[1][v][p]));
}

// The largest gradient of a score that this type, or a sum of its parts, represents.
template <class Half>
constexpr float kMaxScoreGradient = std::is_same<Half, Float16>::value ? kMaxFloat16 : 0x1p100f;

// Weights and gradients of scores of kSoftmaxKeys keys, from `first` on.
template <class Mode, DSoftmaxKind kKind, bool kDrops>
static __attribute__((noinline)) void dsoftmax_block(const DSoftmaxInputs& d, int64_t first, Part<Mode>* weights,
                                                     Part<Mode>* scores, float* pairs) {
  constexpr bool checked = !std::is_same<typename Mode::T, BFloat16>::value;
  UVec largest = {};
  for (int64_t j = first; j < first + kSoftmaxKeys; j += 2) {
    DSoftmaxResult x[2][kVectors];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) x[i][v] = dsoftmax<kKind, kDrops>(d, j + i, v);
    if constexpr (kParts<Mode> == 1)
      store_dsoftmax(x, weights + j * kPanel, scores + j * kPanel, pairs + j / 2 * kPanel);
    else store_dsoftmax_parts<kParts<Mode>>(x, weights + j * kPanel, scores + j * kPanel, pairs + j / 2 * kPanel);
    for (int i = 0; checked && i < 2; i++)  // as an unsigned number NaN is the largest
      for (int v = 0; v < kVectors; v++)
        largest = (UVec)_mm512_max_epu32((__m512i)largest, (__m512i)((UVec)x[i][v].score << 1));
  }
  const UVec limit = (UVec)splat(kMaxScoreGradient<Part<Mode>>) << 1;
  if (checked && _mm512_cmpgt_epu32_mask((__m512i)largest, (__m512i)limit))
    __atomic_store_n(d.out_of_range, 1, __ATOMIC_RELAXED);
}

template <class Mode>
static void dsoftmax_blocks(const DSoftmaxInputs& d, int64_t first, Part<Mode>* weights, Part<Mode>* scores,
                            float* pairs) {
  const bool drops = d.a.dropout != 0;
  with_kind(d, [&](auto kind) {
    if (drops) dsoftmax_block<Mode, decltype(kind)::value, true>(d, first, weights, scores, pairs);
    else dsoftmax_block<Mode, decltype(kind)::value, false>(d, first, weights, scores, pairs);
  });
}

// to[i][lanes] += sums[i][lanes] * unscale[lanes] for i < count.
static void add_scaled(const float* sums, int64_t count, const Vec (&unscale)[kVectors], float* to) {
  for (int64_t i = 0; i < count * kPanel; i += kPanel)
    for (int v = 0; v < kVectors; v++)
      store(to + i + v * kLanes, load(to + i + v * kLanes) + load(sums + i + v * kLanes) * unscale[v]);
}

// multiply_key_gradients on AMX, for every column panel: out[key][kPanel] += A[slot][key] * B[slot], kSoftmaxKeys keys
// at a time; in fp32 through `sums`, multiplied by `unscale`.
template <class Mode>
static __attribute__((noinline)) void multiply_key_gradients_amx(const Weight<Mode>* a, int64_t a_slot, const float* b,
                                                                 int64_t b_panel, int64_t b_column, const Slots& slots,
                                                                 int64_t keys, int64_t columns, float* out,
                                                                 int64_t out_column, float unscale, float* sums) {
  typedef Part<Mode> Half;
  constexpr bool separate_sums = kIsFloat32<Mode>;
  constexpr int N = kProducts<Mode>;
  const Vec unscales[kVectors] = {splat(unscale), splat(unscale)};
  const AmxOperand rows = {nullptr, 64, 0, kTileBytes, kBlockKeys * kPanel * 2, b_column / kParts<Mode> * 4};
  char* done = nullptr;
  for (int64_t j = 0; j < keys; j += kSoftmaxKeys) {
    const char *tiles[kMaxSlots], *pairs[kMaxSlots];  // of A and B
    int count = 0;
    for (int n = 0; n < slots.count; n++)
      if (slots.start[n] <= j && slots.stop[n] > j) {
        tiles[count] = (const char*)(a + n * a_slot + j * kPanel);
        pairs[count++] = (const char*)(b + slots.panel[n] * b_panel);
      }
    for (int64_t c = 0; count && c < columns; c++) {
      char* to = (char*)(out + c * out_column + j * kPanel);
      multiply_first<Half, separate_sums, kVectors, N>(tiles[0], rows, pairs[0] + c * b_column * 4, to,
                                                       separate_sums && done ? (char*)sums : done);
      if (separate_sums && done) add_scaled(sums, kSoftmaxKeys, unscales, (float*)done);
      for (int n = 1; n < count; n++) multiply_step<Half, kVectors, N>(tiles[n], rows, pairs[n] + c * b_column * 4);
      done = to;
    }
  }
  if (!done) return;
  store_sums(separate_sums ? (char*)sums : done);
  if (separate_sums) add_scaled(sums, kSoftmaxKeys, unscales, (float*)done);
}

}  // namespace

#endif
