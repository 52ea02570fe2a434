// Provides what waiting needs: a clock, a bounded spin, and a condition variable on the monotonic clock.
//
// The condition variable is pthread's, because std::condition_variable waits with a call that older thread sanitizers
// do not intercept, and they then report races that do not exist.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <cerrno>
#include <cstdint>

namespace backplane::sim::driver {

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
}

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The time to poll before sleeping. Waking a sleeping thread costs microseconds on both sides, a launch less than one;
// but a core that polls does not compute. So polling is short, and with few cores it soon yields the core between two
// polls.
struct SpinPolicy {
  int64_t limit_ns = 0;
  bool yields = true;

  template <class Condition>
  bool until(Condition&& met) const {
    if (met()) return true;
    if (limit_ns <= 0) return false;
    const int64_t end = now_ns() + limit_ns;
    for (int round = 0; round == 0 || now_ns() < end; ++round) {
      if (yields && round > 3) {
        sched_yield();
        if (met()) return true;
        continue;
      }
      for (int look = 0; look < 16; ++look) {
        pause_core();
        if (met()) return true;
      }
    }
    return false;
  }
};

// A mutex and its condition variable; usable with std::lock_guard and std::unique_lock.
class Monitor {
 public:
  Monitor() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&mutex_, nullptr);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Monitor() {
    pthread_cond_destroy(&condition_);
    pthread_mutex_destroy(&mutex_);
  }
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }
  void wait() { pthread_cond_wait(&condition_, &mutex_); }
  // Returns false on time-out.
  bool wait_until(int64_t deadline_ns) {
    timespec time;
    time.tv_sec = static_cast<time_t>(deadline_ns / 1000000000);
    time.tv_nsec = static_cast<long>(deadline_ns % 1000000000);
    return pthread_cond_timedwait(&condition_, &mutex_, &time) != ETIMEDOUT;
  }

 private:
  pthread_mutex_t mutex_;
  pthread_cond_t condition_;
};

}  // namespace backplane::sim::driver
