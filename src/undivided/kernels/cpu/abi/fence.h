// Fences of the scratch memory, in builds with AddressSanitizer only: an access between two arrays of it is an error.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(UNDIVIDED_FENCES)
#include <sanitizer/asan_interface.h>
#endif

namespace {

#if defined(UNDIVIDED_FENCES)
constexpr int64_t kFenceBytes = 128;

// Allows access to the array alone, of the memory from its start to `end`, and fills it with NaN.
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
