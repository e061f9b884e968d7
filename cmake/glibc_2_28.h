// Included before the sources if UNDIVIDED_GLIBC_2_28 is set, so that the library runs with glibc 2.28 and with the C++
// library of GCC 8. x86-64 only.
#pragma once

#include <new>

// On a newer system the linker would select newer versions of these functions; the older versions do the same.
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

// std::allocator of GCC 11 and later calls this function for an impossible size. It has no older version.
namespace std {
inline __attribute__((noreturn, visibility("hidden"))) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std
