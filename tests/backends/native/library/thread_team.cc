// Runs units of work on a team many times, from two callers at once and after a fork. Exit code 0: every unit ran once.
#include "schedule/thread_team.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <set>
#include <thread>

namespace {

constexpr int64_t kUnits = 64, kThreads = 4;

// The number of threads that took part, or -1 if a unit did not run once. `waits`: each unit takes a millisecond.
int64_t run_once(bool waits) {
  std::atomic<int> runs[kUnits] = {}, numbers[kThreads] = {};
  const int status = undivided::run_units(undivided::even_shares(kUnits, kThreads), 1 << 10, kThreads,
                                          [&](int64_t unit, char* scratch) {
                                            scratch[unit] = 1;
                                            runs[unit]++, numbers[undivided::thread_number()]++;
                                            if (waits) usleep(1000);
                                          });
  for (const auto& count : runs)
    if (status != kOk || count != 1) return -1;
  int64_t threads = 0;
  for (const auto& count : numbers) threads += count > 0;
  return threads;
}
bool all_run() {
  for (int i = 0; i < 2000; i++)
    if (run_once(false) < 1) return false;
  return true;
}

// A unit that throws ends the team with a status, after every thread has left it; the next call runs.
bool ends_with_a_status() {
  const auto units = undivided::even_shares(kUnits, kThreads);
  for (int64_t bad = 0; bad < kUnits; bad++) {
    std::atomic<int> running{0};
    const int status = undivided::run_units(units, 64, kThreads, [&](int64_t unit, char*) {
      if (unit == bad) throw std::bad_alloc();
      running++, usleep(100), running--;
    });
    if (status != kNoMemory || running != 0) return false;
  }
  return run_once(false) > 0;
}

// Every thread computes in the float mode of the caller, and keeps its own.
bool has_the_callers_mode() {
#if defined(__x86_64__)
  const uint64_t before = undivided::float_mode(), flushes = before | 0x8040;  // subnormal numbers are 0
  for (const uint64_t mode : {flushes, before}) {
    std::atomic<int> others{0};
    undivided::set_float_mode(mode);
    undivided::run_units(undivided::even_shares(kUnits, kThreads), 64, kThreads, [&](int64_t, char*) {
      others += undivided::float_mode() != mode;
      usleep(100);
    });
    if (others != 0 || undivided::float_mode() != mode) return false;
  }
#endif
  return true;
}

}  // namespace

int main() {
  if (run_once(true) != kThreads) return puts("the team is too small"), 1;
  if (!ends_with_a_status()) return puts("a unit that throws"), 1;
  if (!has_the_callers_mode()) return puts("a thread has a float mode of its own"), 1;
  bool other = false;
  std::thread caller([&] { other = all_run(); });
  const bool own = all_run();
  caller.join();
  if (!own || !other) return puts("a unit was lost with two callers"), 1;
  if (const pid_t child = fork(); child == 0) {
    _exit(undivided::is_forked() && run_once(true) == kThreads && all_run() ? 0 : 1);
  } else {
    int status = 1;
    if (waitpid(child, &status, 0) != child || status != 0) return puts("the forked process failed"), 1;
  }
  return undivided::is_forked();
}
