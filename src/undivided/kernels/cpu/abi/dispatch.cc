// The library's entry points. Like all .cc files but kernels.cc, compiled without instruction set flags.
#include "schedule/schedule.h"

using namespace undivided;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Attention of one problem; see Status.
EXPORT int undivided_forward(const Attention* a) {
  if (a->size != (int64_t)sizeof(Attention) || a->dtype < kFloat32 || a->dtype > kFloat16) return kBadRecord;
  if (a->batch == 0 || a->heads == 0 || a->q_len == 0 || a->kv_heads == 0) return kOk;
  try {
    return is_decoding(*a) ? run_chunks(*a) : run_blocks(*a);
  } catch (...) {  // the list of blocks did not fit; nothing else throws
    return kNoMemory;
  }
}

// Gradients of one problem, whose out and lse are those of its forward; see Status.
EXPORT int undivided_backward(const Attention* a, const Gradients* g) {
  if (a->size != (int64_t)sizeof(Attention) || g->size != (int64_t)sizeof(Gradients)) return kBadRecord;
  if (a->dtype < kFloat32 || a->dtype > kFloat16) return kBadRecord;
  if (a->batch == 0 || a->heads == 0 || a->kv_heads == 0) return kOk;
  try {
    return run_backward(*a, *g);
  } catch (...) {  // the list of units did not fit; nothing else throws
    return kNoMemory;
  }
}

EXPORT const char* undivided_level() { return kernels().name; }

// The levels that could run here, see level.h.
EXPORT const char* undivided_level_name(int level) { return level_name(level); }

EXPORT int undivided_is_forked() { return is_forked(); }

// Run independent multiply-adds of a Type; the number of operations, for the caller to time.
EXPORT double undivided_peak(int64_t dtype, int64_t repeats) { return kernels().peak(dtype, repeats); }
