// Implements the start, fork and shutdown of the driver in a process.

#include "process.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "access_fault.h"

namespace backplane::sim::driver {
namespace {

// None of these has a destructor, because they may be used after static objects are destroyed.
std::atomic<Driver*> the_driver{nullptr};
std::atomic<int64_t> calls_inside{0};
std::atomic<bool> touched{false};  // from the start of bpsim_init to the end of bpsim_shutdown
std::atomic<bool> forked{false};
std::atomic<Driver*> left_behind{nullptr};  // keeps what could not be stopped reachable
Monitor& lifecycle = *new Monitor;          // one start or stop at a time

constexpr int64_t kPatience_ns = 5'000'000'000;

void in_forked_child() {
  if (touched.load()) forked.store(true);
}

void at_exit() {
  if (!forked.load()) stop_driver();
}

bpsim_status after_fork() {
  return fail(BPSIM_FORKED,
              "the simulated NPU was initialized before fork, and its worker threads do not exist in the child: start "
              "processes with spawn (multiprocessing: set_start_method('spawn'))");
}

bpsim_status not_started() {
  return fail(BPSIM_NOT_INITIALIZED, "the simulated NPU is not initialized (or was shut down): call bpsim_init first");
}

}  // namespace

Call::Call() {
  if (forked.load(std::memory_order_relaxed)) {
    status = after_fork();
    return;
  }
  // Checked first without counting: calls after the shutdown must not delay it.
  if (!the_driver.load(std::memory_order_relaxed)) {
    status = not_started();
    return;
  }
  // stop_driver clears the pointer before it reads this count, so one of the two sees the other.
  calls_inside.fetch_add(1, std::memory_order_seq_cst);
  driver = the_driver.load(std::memory_order_seq_cst);
  if (driver) return;
  calls_inside.fetch_sub(1, std::memory_order_release);
  status = not_started();
}

Call::~Call() {
  if (driver) calls_inside.fetch_sub(1, std::memory_order_release);
}

bool driver_runs() { return !forked.load() && the_driver.load() != nullptr; }

bpsim_status start_driver(const bpsim_config& config) {
  if (forked.load()) return after_fork();
  touched.store(true);  // before the lock: a child forked while it is held must not wait for it
  std::lock_guard<Monitor> lock(lifecycle);
  if (the_driver.load())
    return fail(BPSIM_INVALID,
                "the simulated NPU is already initialized: call bpsim_shutdown before another bpsim_init");
  static const bool prepared = [] {
    return pthread_atfork(nullptr, nullptr, in_forked_child) == 0 && std::atexit(at_exit) == 0;
  }();
  if (!prepared) return fail(BPSIM_SYSTEM, "the system refused the handlers for fork and exit");
  std::unique_ptr<Driver> driver;
  bpsim_status status = Driver::create(config, &driver);
  if (status == BPSIM_OK && config.fault_handler) {
    watch_accesses(driver.get());
    status = install_access_handler();
  }
  if (status != BPSIM_OK) {
    watch_accesses(nullptr);
    touched.store(left_behind.load() != nullptr);
    return status;
  }
  the_driver.store(driver.release(), std::memory_order_seq_cst);
  return BPSIM_OK;
}

bpsim_status stop_driver() {
  if (forked.load()) return after_fork();
  if (current_worker())
    return fail(BPSIM_INVALID, "bpsim_shutdown was called inside a launch: it would wait for itself");
  std::lock_guard<Monitor> lock(lifecycle);
  std::unique_ptr<Driver> driver(the_driver.exchange(nullptr, std::memory_order_seq_cst));
  if (!driver) return BPSIM_OK;
  const int64_t deadline = now_ns() + kPatience_ns;
  driver->interrupt();
  while (calls_inside.load(std::memory_order_seq_cst) != 0 && now_ns() < deadline) {
    const timespec moment{0, 50000};
    nanosleep(&moment, nullptr);
  }
  const bool stopped = calls_inside.load(std::memory_order_seq_cst) == 0 && driver->join(deadline);
  if (!stopped) {
    left_behind.store(driver.release());
    return fail(BPSIM_TIMEOUT, "a launch of the simulated NPU did not end: its threads and memory are not freed");
  }
  remove_access_handler();
  watch_accesses(nullptr);
  driver.reset();
  touched.store(left_behind.load() != nullptr);
  return BPSIM_OK;
}

void Driver::interrupt() {
  stopping.store(true);
  for (const auto& card : cards) card->each_stream([](Stream& stream) { stream.wake_all(); });
}

bool Driver::join(int64_t deadline) {
  for (const auto& card : cards) card->each_stream([](Stream& stream) { stream.request_stop(); });
  bool all = true;
  for (const auto& card : cards)
    card->each_stream([&](Stream& stream) {
      const char* const running = stream.running();
      if (stream.join(deadline)) return;
      all = false;
      std::fprintf(stderr, "backplane sim: launch '%s' on card %d, stream %d does not end; its thread is abandoned\n",
                   running ? running : "?", card->index(), stream.index());
    });
  return all;
}

}  // namespace backplane::sim::driver
