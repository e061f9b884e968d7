// Threads, and the memory they keep.
//
// Threads are those of the OpenMP runtime that PyTorch has loaded: GOMP_parallel is a weak reference, bound by the loader
// to whatever runtime is there (none of our own, so no two teams fight over the cores), and without one work runs serially.
// Units are handed out by a counter; what a unit computes does not depend on who computes it.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "attention.h"

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace undivided {

// Scratch that a thread keeps for its next call, at most: a head of 2048 rows in the backward.
constexpr int64_t kMostKeptBytes = 8 << 20;

// Memory of a thread, kept for its next call.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = 0;
      if (posix_memalign(&memory_, 64, (size_t)bytes) != 0) return memory_ = nullptr, nullptr;
      size_ = bytes;
    }
    return (char*)memory_;
  }
  void shrink() {
    if (size_ <= kMostKeptBytes) return;
    free(memory_);
    memory_ = nullptr, size_ = 0;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};
inline thread_local Scratch thread_scratch;  // of a unit of work
inline thread_local Scratch caller_scratch;  // of a call

inline const pid_t loaded_by = getpid();

// Run body(unit) for every unit in [0, units) with `bytes` of scratch a thread.
template <class Body>
class Team {
 public:
  Team(int64_t units, int64_t bytes, Body body) : units_(units), bytes_(bytes), body_(body) {}

  int run(int64_t threads) {
    threads = std::min(threads, units_);
    // the team of a parent process does not survive a fork: waiting for it would never end
    if (threads > 1 && GOMP_parallel != nullptr && getpid() == loaded_by)
      GOMP_parallel(&Team::work, this, (unsigned)threads, 0);
    else
      work(this);
    return next_.load() >= units_ ? kOk : kNoMemory;
  }

 private:
  static void work(void* data) {
    Team& team = *(Team*)data;
    char* scratch = thread_scratch.at_least(team.bytes_);
    if (scratch == nullptr) return;  // others do the work, if they can
    for (int64_t i; (i = team.next_.fetch_add(1)) < team.units_;) team.body_(i, scratch);
    thread_scratch.shrink();
  }

  const int64_t units_, bytes_;
  Body body_;
  std::atomic<int64_t> next_{0};
};

template <class Body>
int run_units(int64_t units, int64_t bytes, int64_t threads, Body body) {
  return Team<Body>(units, bytes, body).run(threads);
}

}  // namespace undivided
