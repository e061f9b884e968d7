// The AMX micro-kernel: the two products of gemm/vector.h (lanes are query rows); one instruction computes 16 x 16
// outputs from 32 16-bit numbers of the contracted axis.
//
//     S^T[key][rows] += K[key][d]    * Q^T[d / 2][rows][2]      A: 16 rows of K, B: pairs of Q, as in gemm/vector.h
//     O^T[d][rows]   += V^T[d][key]  * P^T[key / 2][rows][2]    A: V transposed once per key block, B: pairs of weights
//
// C is two groups of A by the two vectors of rows, so that four multiply-adds (64 cycles) need four loads of 16 lines.
// Sums start from what C holds: with 16-bit types a chain over all keys adds nothing to the rounding of the weights
// (2^-9, 2^-12). TDPBF16PS reads subnormal bf16 as 0; TDPFP16PS reads subnormal fp16 exactly; both flush subnormal fp32
// sums. Instructions are inline assembly: GCC 12 has none for fp16, and its intrinsics do not declare that they read
// memory.
#pragma once

#include "gemm/vector.h"

#if defined(UNDIVIDED_AMX)

#if defined(UNDIVIDED_EMULATE_AMX)
#include "gemm/amx_emulated.h"
#else

namespace {

template <int N>
INLINE void tile_load(const char* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
INLINE void tile_store(char* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(N));
}
template <int C, int A, int B>
INLINE void tile_multiply(BFloat16) {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void tile_multiply(Float16) {  // tdpfp16ps as bytes, because older assemblers do not have it
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"(3 | (15 - B) << 3), "i"(0xc0 | C << 3 | A));
}
INLINE void tile_config(const uint8_t (&setup)[64]) { __asm__ volatile("ldtilecfg %0" : : "m"(setup)); }
INLINE void tile_release() { __asm__ volatile("tilerelease"); }

}  // namespace

#endif

namespace {

constexpr int64_t kTileRows = 16, kTileDepth = 32;  // of A, in rows and 16-bit numbers
constexpr int64_t kTileBytes = 1024;

struct TileShape {
  uint8_t rows, bytes;
};

// Configures the tiles during its lifetime. A thread with configured tiles pays for them at every context switch.
class TileSetup {
 public:
  TileSetup() {
    TileShape whole[8];
    for (TileShape& shape : whole) shape = {kTileRows, 64};
    begin(whole);
  }
  explicit TileSetup(const TileShape (&shapes)[8]) { begin(shapes); }
  ~TileSetup() { tile_release(); }

 private:
  static void begin(const TileShape (&shapes)[8]) {
    alignas(64) uint8_t setup[64] = {1};
    for (int i = 0; i < 8; i++) setup[16 + 2 * i] = shapes[i].bytes, setup[48 + i] = shapes[i].rows;
    tile_config(setup);
  }
};

// The A operand: the address, and the strides in bytes of its rows, its steps along the contracted axis and its groups
// of kTileRows rows.
struct AmxOperand {
  const char* at;
  int64_t row, step, group;
  int64_t part = 0, b_part = 0;  // of A and of B, if numbers are sums of parts (see gemm/split.h)
};

constexpr int64_t kPanelBytes = kPanel * 4;  // a row of B and of C

// Initialises tile N of C: the sums so far, or zero.
template <int N, bool kFromZero>
INLINE void begin_sum(const char* c) {
  if constexpr (kFromZero) tile_zero<N>();
  else tile_load<N>(c, kPanelBytes);
}

// The products of parts that make one product of two numbers (see gemm/split.h), by their number, in an order that
// reloads few tiles.
template <int N>
struct Products;
template <>
struct Products<1> {
  static constexpr int parts = 1, a[] = {0}, b[] = {0};
};
template <>
struct Products<3> {
  static constexpr int parts = 2, a[] = {1, 0, 0}, b[] = {0, 0, 1};
};
template <>
struct Products<4> {
  static constexpr int parts = 2, a[] = {1, 1, 0, 0}, b[] = {0, 1, 1, 0};
};
template <>
struct Products<6> {
  static constexpr int parts = 3, a[] = {2, 1, 1, 0, 0, 0}, b[] = {0, 0, 1, 1, 2, 0};
};

// The products of a step after the first one.
template <class T, int V, int N>
INLINE void multiply_parts(const char* a, const AmxOperand& rows, const char* b) {
  typedef Products<N> Order;
#pragma GCC unroll 6
  for (int i = 1; i < N; i++) {
    const char *x = a + Order::a[i] * rows.part, *y = b + Order::b[i] * rows.b_part;
    if (Order::a[i] != Order::a[i - 1]) tile_load<4>(x, rows.row), tile_load<5>(x + rows.group, rows.row);
    if (Order::b[i] != Order::b[i - 1]) {
      tile_load<6>(y, kPanelBytes);
      if constexpr (V == 2) tile_load<7>(y + 64, kPanelBytes);
    }
    tile_multiply<0, 4, 6>(T()), tile_multiply<2, 5, 6>(T());
    if constexpr (V == 2) tile_multiply<1, 4, 7>(T()), tile_multiply<3, 5, 7>(T());
  }
}

// One step of the contracted axis for 2 groups of A and the first V vectors of rows.
template <class T, int V = kVectors, int N = 1>
INLINE void multiply_step(const char* a, const AmxOperand& rows, const char* b) {
  const char* first = a + Products<N>::a[0] * rows.part;
  tile_load<6>(b, kPanelBytes), tile_load<4>(first, rows.row);
  if constexpr (V == 2) tile_load<7>(b + 64, kPanelBytes);
  tile_multiply<0, 4, 6>(T());
  if constexpr (V == 2) tile_multiply<1, 4, 7>(T());
  tile_load<5>(first + rows.group, rows.row);
  tile_multiply<2, 5, 6>(T());
  if constexpr (V == 2) tile_multiply<3, 5, 7>(T());
  if constexpr (N > 1) multiply_parts<T, V, N>(a, rows, b);
}

constexpr int64_t kGroupStride = kTileRows * kPanelBytes;  // from one group of C, or step of B, to the next

// The first step. It also stores the sums of the previous two groups to `done`, tile by tile: four stores in succession
// would delay the multiplications by a third of their time.
template <class T, bool kFromZero, int V = kVectors, int N = 1>
INLINE void multiply_first(const char* a, const AmxOperand& rows, const char* b, const char* c, char* done) {
  const char* first = a + Products<N>::a[0] * rows.part;
  tile_load<6>(b, kPanelBytes), tile_load<4>(first, rows.row);
  if constexpr (V == 2) tile_load<7>(b + 64, kPanelBytes);
  tile_load<5>(first + rows.group, rows.row);
  if (done) tile_store<0>(done, kPanelBytes);
  begin_sum<0, kFromZero>(c), tile_multiply<0, 4, 6>(T());
  if constexpr (V == 2) {
    if (done) tile_store<1>(done + 64, kPanelBytes);
    begin_sum<1, kFromZero>(c + 64), tile_multiply<1, 4, 7>(T());
  }
  if (done) tile_store<2>(done + kGroupStride, kPanelBytes);
  begin_sum<2, kFromZero>(c + kGroupStride), tile_multiply<2, 5, 6>(T());
  if constexpr (V == 2) {
    if (done) tile_store<3>(done + kGroupStride + 64, kPanelBytes);
    begin_sum<3, kFromZero>(c + kGroupStride + 64), tile_multiply<3, 5, 7>(T());
  }
  if constexpr (N > 1) multiply_parts<T, V, N>(a, rows, b);
}
// Stores the sums of two groups.
template <int V = kVectors>
INLINE void store_sums(char* to) {
  tile_store<0>(to, kPanelBytes), tile_store<2>(to + kGroupStride, kPanelBytes);
  if constexpr (V == 2) tile_store<1>(to + 64, kPanelBytes), tile_store<3>(to + kGroupStride + 64, kPanelBytes);
}

// C[groups * kTileRows][kPanel] += A * B, or = A * B if kFromZero; B holds `steps` x kTileDepth / 2 rows of pairs.
template <class T, int V = kVectors, bool kFromZero = false, class Prefetcher = NoPrefetch, int N = 1>
static __attribute__((noinline)) void multiply_amx(const AmxOperand& operand, const float* pairs, int64_t steps,
                                                   int64_t groups, float* sums, Prefetcher* prefetch = nullptr) {
  static_assert(kVectors == 2 && kLanes == 16, "C is 2 x 2 tiles");
  const AmxOperand rows = operand;
  const char *a = rows.at, *b = (const char*)pairs;
  char *c = (char*)sums, *done = nullptr;
  int64_t g = 0;
  for (; g + 2 <= groups; g += 2, a += 2 * rows.group, c += 2 * kGroupStride) {
    multiply_first<T, kFromZero, V, N>(a, rows, b, c, done);
    for (int64_t s = 1; s < steps; s++) {
      if (prefetch) prefetch->step();
      multiply_step<T, V, N>(a + s * rows.step, rows, b + s * kGroupStride);
    }
    done = c;
  }
  if (done) store_sums<V>(done);
  if (g == groups) return;
  begin_sum<0, kFromZero>(c), begin_sum<1, kFromZero>(c + 64);
  for (int64_t s = 0; s < steps; s++, a += rows.step, b += kGroupStride) {
    for (int i = 0; i < N; i++) {
      const char *x = a + Products<N>::a[i] * rows.part, *y = b + Products<N>::b[i] * rows.b_part;
      tile_load<6>(y, kPanelBytes), tile_load<4>(x, rows.row), tile_load<7>(y + 64, kPanelBytes);
      tile_multiply<0, 4, 6>(T()), tile_multiply<1, 4, 7>(T());
    }
  }
  tile_store<0>(c, kPanelBytes), tile_store<1>(c + 64, kPanelBytes);
}

}  // namespace

#endif
