// Starts a team of threads, in a forked process too.
#include "schedule/thread_team.h"

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

// Weak references, which the loader binds to the runtime that PyTorch has loaded.
#ifndef UNDIVIDED_NO_OPENMP
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
extern "C" int omp_get_thread_num() __attribute__((weak));
#endif

namespace undivided {
namespace {

#ifndef UNDIVIDED_NO_OPENMP

// A thread that starts the teams of a forked process.
//
// GNU OpenMP keeps a thread's team for its next parallel region. A forked child inherits the record of the team, but
// not its threads, and would wait for them forever. OpenMP offers no query for whether a thread has a team, and ending
// the team before the fork would discard what the parent has set for its threads, such as CPU affinity. But a team
// belongs to the thread that started it (libgomp/team.c), so a thread created after the fork can start a new one.
class TeamStarter {
 public:
  // False if no thread can be created, or another caller is using it.
  bool run(void (*body)(void*), void* data, unsigned threads) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return false;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!started_) try {
        std::thread([this] { serve(); }).detach();
        started_ = true;
      } catch (const std::exception&) {  // no thread, or no memory
        return false;
      }
    body_ = body, data_ = data, threads_ = threads;
    changed_.notify_all();
    changed_.wait(lock, [this] { return body_ == nullptr; });
    return true;
  }

 private:
  [[noreturn]] void serve() {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      changed_.wait(lock, [this] { return body_ != nullptr; });
      GOMP_parallel(body_, data_, threads_, 0);
      body_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  unsigned threads_ = 0;
};
#endif

thread_local int64_t own_number = 0;  // in an OwnTeam

// A team of the library's own threads, which sleep between calls. The caller is number 0.
class OwnTeam {
 public:
  // False if another caller is using it.
  bool run(void (*body)(void*), void* data, int64_t threads) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      create_helpers(threads - 1);
      body_ = body, data_ = data, members_ = busy_ = std::min(threads - 1, helpers_), call_++;
    }
    started_.notify_all();
    body(data);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
    return true;
  }

 private:
  // Fewer if no more can be created.
  void create_helpers(int64_t count) {
    try {
      for (; helpers_ < count; helpers_++)
        std::thread([this, number = helpers_ + 1, last = call_] { serve(number, last); }).detach();
    } catch (const std::exception&) {  // no thread, or no memory
    }
  }

  [[noreturn]] void serve(int64_t number, uint64_t last) {
    own_number = number;
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      started_.wait(lock, [&] { return call_ != last; });
      last = call_;
      if (number > members_) continue;
      lock.unlock();
      body_(data_);  // the caller changes neither before every member has finished
      lock.lock();
      if (--busy_ == 0) finished_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable started_, finished_;
  int64_t helpers_ = 0, members_ = 0, busy_ = 0;
  uint64_t call_ = 0;
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
};

// Teams are never deleted, because their threads run until the process ends. A forked process gets new ones.
OwnTeam* own_team = new OwnTeam;
#ifndef UNDIVIDED_NO_OPENMP
TeamStarter* starter = nullptr;  // only in a forked process
#endif
bool forked = false;

const bool has_fork_handler = pthread_atfork(nullptr, nullptr, [] {
                                forked = true;
                                own_team = new OwnTeam;
#ifndef UNDIVIDED_NO_OPENMP
                                starter = new TeamStarter;
#endif
                              }) == 0;

bool run_own_team(void (*body)(void*), void* data, int64_t threads) { return own_team->run(body, data, threads); }

#ifndef UNDIVIDED_NO_OPENMP
bool run_openmp_team(void (*body)(void*), void* data, int64_t threads) {
  if (forked) return starter->run(body, data, (unsigned)threads);
  GOMP_parallel(body, data, (unsigned)threads, 0);
  return true;
}
#else
constexpr auto run_openmp_team = run_own_team;
#endif

}  // namespace

bool has_openmp() {
#ifdef UNDIVIDED_NO_OPENMP
  return false;
#else
  return GOMP_parallel != nullptr && omp_get_thread_num != nullptr;
#endif
}

bool is_forked() { return forked; }

int64_t thread_number() {
#ifndef UNDIVIDED_NO_OPENMP
  if (has_openmp()) return omp_get_thread_num();
#endif
  return own_number;
}

void run_team(void (*body)(void*), void* data, int64_t threads) {
  if (threads < 2 || !has_fork_handler) return body(data);
  const auto run = has_openmp() ? run_openmp_team : run_own_team;
  if (!run(body, data, threads)) body(data);
}

}  // namespace undivided
