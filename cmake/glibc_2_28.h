// Included before the sources if UNDIVIDED_GLIBC_2_28 is set. On a newer system the linker would select newer versions of
// these functions, which glibc 2.28 and GCC 8's C++ library lack; the older versions do the same. x86-64 only.
#pragma once
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
