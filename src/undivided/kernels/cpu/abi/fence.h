// Fences in the scratch memory, in builds with AddressSanitizer only: an access between two of its arrays is an error.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(UNDIVIDED_FENCES)
#include <sanitizer/asan_interface.h>
#endif

namespace {

#if defined(UNDIVIDED_FENCES)
constexpr int64_t kFenceBytes = 128;

// Fills an array with NaN, and forbids access to the memory between its end and `end`.
inline void fence(char* array, int64_t size, char* end) {
  __asan_unpoison_memory_region(array, (size_t)(end - array));
  memset(array, 0xff, (size_t)size);
  __asan_poison_memory_region(array + size, (size_t)(end - array - size));
}
#else
constexpr int64_t kFenceBytes = 0;
inline void fence(char*, int64_t, char*) {}
#endif

}  // namespace
