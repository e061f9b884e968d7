// The library's entry points. Only kernels.cc is compiled with instruction set flags; no other .cc file is.
#include <vector>

#include "abi/check.h"
#include "schedule/schedule.h"

using namespace undivided;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Computes attention for one problem and returns a Status.
EXPORT int undivided_forward(const Attention* a) {
  if (!is_valid(*a)) return kBadRecord;
  Attention bounded = *a;
  bound_strides(bounded);
  try {
    return run_forward(bounded);
  } catch (...) {  // std::bad_alloc for the lists of units; nothing else throws
    return kNoMemory;
  }
}

// Computes the gradients of one problem from its forward's out and lse and returns a Status.
EXPORT int undivided_backward(const Attention* a, const Gradients* g) {
  if (!is_valid(*a, *g)) return kBadRecord;
  if (a->batch == 0 || a->heads == 0 || a->kv_heads == 0) return kOk;
  Attention bounded = *a;
  Gradients bounded_gradients = *g;
  bound_strides(bounded), bound_strides(bounded_gradients);
  try {
    return run_backward(bounded, bounded_gradients);
  } catch (...) {  // std::bad_alloc for the lists of units; nothing else throws
    return kNoMemory;
  }
}

// Writes new tokens to a cache and returns a Status. Nothing is written if the record is bad.
EXPORT int undivided_append(const Append* p) {
  if (!is_valid(*p)) return kBadRecord;
  Append bounded = *p;
  bound_strides(bounded);
  try {
    return run_append(bounded);
  } catch (...) {  // std::bad_alloc for the shares of threads; nothing else throws
    return kNoMemory;
  }
}

// Finds the ranges of keys that a forward of this problem reads once for several sequences; if `a` is null, those that
// the last forward on this thread has read so. Writes (number of sequences, first key, number of keys) for each of the
// first `limit` ranges, and returns the number of ranges, or -1 if the record is bad or there is not enough memory.
EXPORT int64_t undivided_shared_keys(const Attention* a, int64_t* found, int64_t limit) {
  if (a && !is_valid(*a)) return -1;
  try {
    Attention bounded{};
    if (a) bounded = *a, bound_strides(bounded);
    const std::vector<SharedKeys> shared = a ? shared_keys(bounded) : last_shared_keys();
    for (size_t i = 0; i < shared.size() && (int64_t)i < limit; i++) {
      const SharedKeys& keys = shared[i];
      *found++ = (int64_t)keys.sequences.size(), *found++ = keys.key, *found++ = keys.keys;
    }
    return (int64_t)shared.size();
  } catch (...) {
    return -1;
  }
}

EXPORT const char* undivided_level() { return kernels().name; }

// The name of a level that can run here, or null; see level.h.
EXPORT const char* undivided_level_name(int level) { return level_name(level); }

EXPORT const char* undivided_lost_level() { return lost_level(); }

EXPORT int undivided_has_openmp() { return has_openmp(); }

EXPORT int undivided_is_forked() { return is_forked(); }

// Runs independent multiply-adds of a Type and returns the number of operations, for the caller to time.
EXPORT double undivided_peak(int64_t dtype, int64_t repeats) { return kernels().peak(dtype, repeats); }
