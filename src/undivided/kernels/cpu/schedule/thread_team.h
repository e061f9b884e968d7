// Threads and their scratch memory.
//
// The threads are those of the OpenMP runtime that PyTorch has loaded, so that no second team competes for the cores.
// In a process without such a runtime, and in a library that is built without OpenMP, they are the library's own. The
// result of a unit does not depend on the thread that computes it.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "abi/attention.h"
#include "abi/tuning.h"

namespace undivided {

// Memory that a thread keeps for its next call.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = 0;
      if (posix_memalign(&memory_, 64, (size_t)bytes) != 0) return memory_ = nullptr, nullptr;
      size_ = bytes;
    }
    return (char*)memory_;
  }
  void shrink() {
    if (size_ <= tuning::kMaxKeptBytes) return;
    free(memory_);
    memory_ = nullptr, size_ = 0;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};
inline thread_local Scratch thread_scratch;  // of a unit of work
inline thread_local Scratch caller_scratch;  // of a call

// The control word of this thread's floating-point arithmetic: how it rounds, and whether it reads and writes subnormal
// numbers as 0. Each thread has its own.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fu;  // without the flags of past exceptions
#elif defined(__aarch64__)
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}
inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" ::"r"(mode));
#else
  (void)mode;
#endif
}
// The same mode, but subnormal numbers are read as they are.
inline uint64_t with_subnormal_inputs(uint64_t mode) {
#if defined(__x86_64__)
  return mode & ~(uint64_t)_MM_DENORMALS_ZERO_MASK;
#elif defined(__aarch64__)
  return mode & ~(uint64_t)(1 << 24 | 1);  // FZ and FIZ
#else
  return mode;
#endif
}
// Gives this thread a float mode for the lifetime of the object.
class FloatModeScope {
 public:
  explicit FloatModeScope(uint64_t mode) : previous_(float_mode()), changes_(mode != previous_) {
    if (changes_) set_float_mode(mode);
  }
  ~FloatModeScope() {
    if (changes_) set_float_mode(previous_);
  }
  FloatModeScope(const FloatModeScope&) = delete;
  FloatModeScope& operator=(const FloatModeScope&) = delete;

 private:
  const uint64_t previous_;
  const bool changes_;
};

// Runs body(data), which must not throw, on `threads` threads, or on fewer. thread_team.cc says what changes after a
// fork.
void run_team(void (*body)(void*), void* data, int64_t threads);
int64_t thread_number();  // of this thread in its team
bool has_openmp();        // whether the threads are those of the process's OpenMP runtime
bool is_forked();         // whether this process was forked after the library was loaded

// Offsets of the shares of the units, and the end of the last. A thread takes the units of its own share in order, so
// that memory which is adjacent stays in its caches, also from call to call, and then takes units of the other shares.
// (Two threads, against one share for both: a hundred heads of 16 tokens and more 1.1 to 1.5 times as fast, of
// 128 tokens 1.0 to 1.15.)
typedef std::vector<int64_t> Shares;

// Units that must start in order.
inline Shares one_share(int64_t units) { return {0, units}; }
inline Shares even_shares(int64_t units, int64_t threads) {
  const int64_t shares = std::max(std::min(units, threads), (int64_t)1);
  Shares starts;
  for (int64_t i = 0; i <= shares; i++) starts.push_back(i * units / shares);
  return starts;
}

// Runs body(unit, scratch) for every unit of the shares, with `bytes` of scratch per thread. All threads compute in the
// float mode of the caller, so that results do not depend on their number. A body should not allocate memory: if it
// throws, the units that have not started are left out, and the team has failed. Units that wait for each other must
// not throw.
template <class Body>
class Team {
 public:
  Team(const Shares& starts, int64_t bytes, Body body) : queues_(starts.size() - 1), bytes_(bytes), body_(body) {
    for (size_t i = 0; i < queues_.size(); i++) queues_[i].next = starts[i], queues_[i].stop = starts[i + 1];
  }

  int run(int64_t threads) {
    run_team(&Team::work, this, std::min(threads, queues_.back().stop));
    if (failed_) return kNoMemory;
    for (const Queue& queue : queues_)
      if (queue.next < queue.stop) return kNoMemory;
    return kOk;
  }

 private:
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t stop = 0;
  };

  static void work(void* data) noexcept {
    Team& team = *(Team*)data;
    const FloatModeScope scope(team.float_mode_);
    char* scratch = thread_scratch.reserve(team.bytes_);
    if (scratch == nullptr) return;  // other threads do the work, if they have memory
    try {
      team.run_units(scratch);
    } catch (...) {  // std::bad_alloc; it must not leave the thread while others work
      team.failed_ = true;
    }
    thread_scratch.shrink();
  }
  void run_units(char* scratch) {
    const size_t own = (size_t)thread_number(), count = queues_.size();
    for (size_t i = 0; i < count; i++) {
      Queue& queue = queues_[(own + i) % count];
      for (int64_t unit; !failed_ && queue.next < queue.stop && (unit = queue.next.fetch_add(1)) < queue.stop;)
        body_(unit, scratch);
    }
  }

  std::vector<Queue> queues_;
  const int64_t bytes_;
  const uint64_t float_mode_ = float_mode();
  std::atomic<bool> failed_{false};
  Body body_;
};

template <class Body>
int run_units(const Shares& starts, int64_t bytes, int64_t threads, Body body) {
  return Team<Body>(starts, bytes, body).run(threads);
}

}  // namespace undivided
