// Provides the launches and helpers that the tests use.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <functional>
#include <memory>

#include "check.h"

inline void doze() {
  const timespec moment{0, 200000};
  nanosleep(&moment, nullptr);
}

// Waits for a condition that must become true; the test runner ends a test that hangs.
template <class Condition>
void eventually(Condition&& met) {
  while (!met()) doze();
}

// Launches a C++ function, and counts the closures that are not yet destroyed.
inline std::atomic<int> closures_alive{0};
struct Closure {
  std::function<int(char*, size_t)> run;
  explicit Closure(std::function<int(char*, size_t)> f) : run(std::move(f)) { closures_alive.fetch_add(1); }
  ~Closure() { closures_alive.fetch_sub(1); }
};

inline bpsim_status launch(bpsim_stream stream, const char* name, std::function<int(char*, size_t)> run,
                           const bpsim_range* ranges = nullptr, uint32_t count = 0, double bytes = 0,
                           double flops = 0) {
  bpsim_launch what{};
  what.name = name;
  what.function = [](void* arg, char* error, size_t size) { return static_cast<Closure*>(arg)->run(error, size); };
  what.arg = new Closure(std::move(run));
  what.destroy = [](void* arg) { delete static_cast<Closure*>(arg); };
  what.ranges = ranges;
  what.range_count = count;
  what.bytes = bytes;
  what.flops = flops;
  return bpsim_enqueue(stream, &what);
}
inline bpsim_status launch(bpsim_stream stream, const char* name, std::function<void()> run) {
  return launch(stream, name, [run](char*, size_t) {
    run();
    return 0;
  });
}

// Queues a launch that keeps its stream busy until the gate is opened.
class Gate {
 public:
  explicit Gate(bpsim_stream stream) {
    auto open = open_;
    auto reached = reached_;
    CHECK_OK(launch(stream, "gate", [open, reached] {
      reached->store(true);
      while (!open->load()) doze();
    }));
  }
  ~Gate() { open(); }
  void open() { open_->store(true); }
  void wait_until_reached() {
    eventually([&] { return reached_->load(); });
  }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<bool>> reached_ = std::make_shared<std::atomic<bool>>(false);
};

template <class T = char>
T* allocate(bpsim_stream stream, uint64_t bytes, bpsim_pool pool = 0) {
  void* pointer = nullptr;
  CHECK_OK(bpsim_alloc(stream, pool, bytes, &pointer));
  return static_cast<T*>(pointer);
}

template <class T>
T* kernel(T* device) {
  void* pointer = nullptr;
  CHECK_OK(bpsim_translate(device, &pointer));
  return static_cast<T*>(pointer);
}

// Writes through the driver, with a launch.
template <class T>
void put(bpsim_stream stream, T* device, T value) {
  T* const at = kernel(device);
  CHECK_OK(launch(stream, "put", [at, value] { *at = value; }));
}
// Reads with a synchronous copy.
template <class T>
T get(bpsim_stream stream, const T* device) {
  T value{};
  CHECK_OK(bpsim_copy(stream, BPSIM_DEVICE_TO_HOST, &value, device, sizeof value));
  return value;
}

inline bpsim_memory_stats memory(int32_t card = 0) {
  bpsim_memory_stats stats{};
  CHECK_OK(bpsim_memory_statistics(card, &stats));
  return stats;
}
inline bpsim_stream new_stream(int32_t card = 0) {
  bpsim_stream stream = 0;
  CHECK_OK(bpsim_stream_create(card, &stream));
  return stream;
}
inline bpsim_event new_event(bool timing = false) {
  bpsim_event event = 0;
  CHECK_OK(bpsim_event_create(timing, &event));
  return event;
}
