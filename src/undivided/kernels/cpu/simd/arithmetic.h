// Arithmetic of sizes, and Arena, which cuts a scratch buffer into arrays.
#pragma once

#include "abi/fence.h"
#include "simd/vec.h"

namespace {

INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_down(int64_t n, int64_t step) { return n / step * step; }

// Allocates arrays from one buffer, each aligned to a cache line. With a null base it only counts the bytes.
struct Arena {
  char* base;
  int64_t bytes = 0;

  char* allocate(int64_t size) {
    char* array = base + bytes;
    bytes += round_up(size, 64) + kFenceBytes;
    if (kFenceBytes && base) fence(array, size, base + bytes);
    return array;
  }
};

}  // namespace
