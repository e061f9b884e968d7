// Starts a team of threads, in a forked process too.
#include "schedule/thread_team.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace undivided {
namespace {

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
      } catch (const std::system_error&) {
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

// only in a forked process; never deleted, because its thread runs until the process ends
TeamStarter* starter = nullptr;

const bool has_fork_handler = pthread_atfork(nullptr, nullptr, [] { starter = new TeamStarter; }) == 0;

}  // namespace

bool is_forked() { return starter != nullptr; }

void run_team(void (*body)(void*), void* data, int64_t threads) {
  if (threads < 2 || GOMP_parallel == nullptr || !has_fork_handler) return body(data);
  if (!is_forked()) return GOMP_parallel(body, data, (unsigned)threads, 0);
  if (!starter->run(body, data, (unsigned)threads)) body(data);
}

}  // namespace undivided
