// The AMX instructions in C++, for builds with UNDIVIDED_EMULATE_AMX: sanitizers see the loads and stores of tiles, and
// processors without AMX run the level. What the processor answers with an invalid-opcode exception (a tile that is not
// configured, shapes that do not fit) ends the process here too.
//
// Source: Intel's Software Developer's Manual, volume 2, TILELOADD, TDPBF16PS and TDPFP16PS. Even and odd pairs have
// sums of their own, each step is one fused multiply-add that rounds to nearest, subnormal fp32 results are 0 and so
// are subnormal bf16 inputs.
#pragma once

#include "simd/math.h"

namespace {

struct Tile {
  uint8_t rows, bytes;
  alignas(64) char data[16][64];
};
thread_local Tile tiles[8];

INLINE void require(bool is_valid) {
  if (!is_valid) __builtin_trap();
}
INLINE Tile& configured_tile(int n) {
  require(tiles[n].rows > 0 && tiles[n].bytes > 0);
  return tiles[n];
}

void emulate_config(const uint8_t* setup) {
  require(setup[0] == 1);
  for (int i = 0; i < 8; i++) {
    const uint8_t bytes = setup[16 + 2 * i], rows = setup[48 + i];
    require(rows <= 16 && bytes <= 64 && bytes % 4 == 0 && setup[17 + 2 * i] == 0);
    memset(&tiles[i], 0, sizeof(Tile));
    tiles[i].rows = rows, tiles[i].bytes = bytes;
  }
}
void emulate_release() { memset(tiles, 0, sizeof(tiles)); }

__attribute__((noinline)) void emulate_load(int n, const char* from, int64_t stride) {
  Tile& tile = configured_tile(n);
  for (int r = 0; r < tile.rows; r++) memcpy(tile.data[r], from + r * stride, tile.bytes);
}
__attribute__((noinline)) void emulate_store(int n, char* to, int64_t stride) {
  const Tile& tile = configured_tile(n);
  for (int r = 0; r < tile.rows; r++) memcpy(to + r * stride, tile.data[r], tile.bytes);
}
void emulate_zero(int n) {
  Tile& tile = configured_tile(n);
  memset(tile.data, 0, sizeof(tile.data));
}

INLINE float flush_subnormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
INLINE float tile_number(const char* at, BFloat16) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flush_subnormal(x);
}
INLINE float tile_number(const char* at, Float16) {
  uint16_t half;
  memcpy(&half, at, 2);
  return _cvtsh_ss(half);
}

template <class T>
__attribute__((noinline)) void emulate_multiply(int c_tile, int a_tile, int b_tile) {
  Tile& c = configured_tile(c_tile);
  const Tile &a = configured_tile(a_tile), &b = configured_tile(b_tile);
  require(a.rows == c.rows && b.bytes == c.bytes && a.bytes == 4 * b.rows);
  require(c_tile != a_tile && c_tile != b_tile && a_tile != b_tile);
  const int columns = c.bytes / 4;
  alignas(64) float pairs[2][16][16];  // of B
  for (int k = 0; k < b.rows; k++)
    for (int i = 0; i < columns; i++)
      for (int odd = 0; odd < 2; odd++) pairs[odd][k][i] = tile_number(b.data[k] + 4 * i + 2 * odd, T());
  for (int r = 0; r < c.rows; r++) {
    alignas(64) float sums[2][16] = {}, total[16];
    for (int k = 0; k < b.rows; k++)
      for (int odd = 0; odd < 2; odd++) {
        const float x = tile_number(a.data[r] + 4 * k + 2 * odd, T());
        for (int i = 0; i < columns; i++)
          sums[odd][i] = flush_subnormal(__builtin_fmaf(x, pairs[odd][k][i], sums[odd][i]));
      }
    memcpy(total, c.data[r], c.bytes);
    for (int i = 0; i < columns; i++) {
      const float both = flush_subnormal(sums[0][i] + sums[1][i]);
      total[i] = flush_subnormal(flush_subnormal(total[i]) + both);
    }
    memcpy(c.data[r], total, c.bytes);
  }
}

template <int N>
INLINE void tile_load(const char* p, int64_t stride) {
  emulate_load(N, p, stride);
}
template <int N>
INLINE void tile_store(char* p, int64_t stride) {
  emulate_store(N, p, stride);
}
template <int N>
INLINE void tile_zero() {
  emulate_zero(N);
}
template <int C, int A, int B, class T>
INLINE void tile_multiply(T) {
  emulate_multiply<T>(C, A, B);
}
INLINE void tile_config(const uint8_t (&setup)[64]) { emulate_config(setup); }
INLINE void tile_release() { emulate_release(); }

}  // namespace
