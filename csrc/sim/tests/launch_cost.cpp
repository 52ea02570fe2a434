// Measures the cost of launches and synchronization. It is not a test: it prints numbers for a reader.
//
//   g++ -std=c++17 -O2 -pthread csrc/sim/tests/launch_cost.cpp csrc/sim/driver/*.cpp -o launch_cost && ./launch_cost
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../driver/driver.h"

namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
}

void must(bpsim_status status) {
  if (status == BPSIM_OK) return;
  std::printf("%s: %s\n", bpsim_status_name(status), bpsim_last_error());
  std::exit(1);
}

// Returns the nanoseconds of `body` per `count`: the median of several runs.
template <class Body>
double measured(double count, Body&& body) {
  std::vector<double> times;
  for (int run = 0; run < 15; ++run) {
    const double start = now();
    body();
    times.push_back((now() - start) / count);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void spin_for(double nanoseconds) {
  const double end = now() + nanoseconds;
  while (now() < end) {
  }
}

}  // namespace

// An argument sets spin_us.
int main(int count, char** words) {
  bpsim_config config;
  bpsim_config_default(&config);
  if (count > 1) config.spin_us = std::atoi(words[1]);
  must(bpsim_init(&config));
  bpsim_stream stream;
  must(bpsim_default_stream(0, &stream));
  bpsim_launch empty{};
  empty.name = "empty";
  empty.function = [](void*, char*, size_t) { return 0; };
  bpsim_launch busy = empty;
  busy.name = "busy";
  busy.function = [](void* arg, char*, size_t) {
    spin_for(*static_cast<double*>(arg));
    return 0;
  };
  double busy_ns = 40000;
  busy.arg = &busy_ns;

  must(bpsim_enqueue(stream, &empty));
  must(bpsim_stream_synchronize(stream));
  std::printf("enqueue, 500 in a row:            %8.0f ns each (host side)\n", measured(500, [&] {
                for (int i = 0; i < 500; ++i) must(bpsim_enqueue(stream, &empty));
              }));
  must(bpsim_stream_synchronize(stream));
  std::printf("enqueue and run, 100000 in a row: %8.0f ns each (through the worker)\n", measured(100000, [&] {
                for (int i = 0; i < 100000; ++i) must(bpsim_enqueue(stream, &empty));
                must(bpsim_stream_synchronize(stream));
              }));
  std::printf("synchronize an idle stream:       %8.0f ns\n", measured(1000, [&] {
                for (int i = 0; i < 1000; ++i) must(bpsim_stream_synchronize(stream));
              }));
  std::printf("synchronize an idle card:         %8.0f ns\n", measured(1000, [&] {
                for (int i = 0; i < 1000; ++i) must(bpsim_card_synchronize(0));
              }));
  std::printf("launch and synchronize:           %8.0f ns (worker awake)\n", measured(1000, [&] {
                for (int i = 0; i < 1000; ++i) {
                  must(bpsim_enqueue(stream, &empty));
                  must(bpsim_stream_synchronize(stream));
                }
              }));
  std::vector<double> woken;
  for (int i = 0; i < 101; ++i) {
    const timespec rest{0, 2000000};
    nanosleep(&rest, nullptr);
    const double start = now();
    must(bpsim_enqueue(stream, &empty));
    must(bpsim_stream_synchronize(stream));
    woken.push_back(now() - start);
  }
  std::sort(woken.begin(), woken.end());
  std::printf("launch and synchronize:           %8.0f ns (worker asleep)\n", woken[50]);
  void* pointer = nullptr;
  std::printf("allocate and free 4 KiB:          %8.0f ns\n", measured(1000, [&] {
                for (int i = 0; i < 1000; ++i) {
                  must(bpsim_alloc(stream, 0, 4096, &pointer));
                  must(bpsim_free(pointer));
                }
              }));
  char host[256] = {};
  must(bpsim_alloc(stream, 0, 4096, &pointer));
  std::printf("copy 256 B from the device:       %8.0f ns (idle, synchronous)\n", measured(1000, [&] {
                for (int i = 0; i < 1000; ++i) must(bpsim_copy(stream, BPSIM_DEVICE_TO_HOST, host, pointer, 256));
              }));
  std::printf("copy 256 B to the device:         %8.0f ns (asynchronous, staged)\n", measured(500, [&] {
                for (int i = 0; i < 500; ++i)
                  must(bpsim_copy_async(stream, BPSIM_HOST_TO_DEVICE, pointer, host, 256));
                must(bpsim_stream_synchronize(stream));
              }));

  // A step: 400 launches of 40 us, and then a wait. The overhead is the time beyond 16 ms of work.
  const double step = measured(1, [&] {
    for (int i = 0; i < 400; ++i) must(bpsim_enqueue(stream, &busy));
    must(bpsim_stream_synchronize(stream));
  });
  std::printf("step of 400 launches of 40 us:    %8.2f ms, %.1f %% above the work\n", step / 1e6,
              (step / (400 * busy_ns) - 1) * 100);
  // The same if the host needs 20 us between launches, as a Python program does.
  const double slow = measured(1, [&] {
    for (int i = 0; i < 400; ++i) {
      spin_for(20000);
      must(bpsim_enqueue(stream, &busy));
    }
    must(bpsim_stream_synchronize(stream));
  });
  std::printf("  with 20 us of host work each:   %8.2f ms, %.1f %% above the work\n", slow / 1e6,
              (slow / (400 * busy_ns) - 1) * 100);
  // The same if the host is the slower side: each launch finds the worker idle.
  busy_ns = 10000;
  const double bound = measured(1, [&] {
    for (int i = 0; i < 400; ++i) {
      spin_for(50000);
      must(bpsim_enqueue(stream, &busy));
    }
    must(bpsim_stream_synchronize(stream));
  });
  std::printf("  50 us of host, 10 us of work:   %8.2f ms, %.1f %% above the host\n", bound / 1e6,
              (bound / (400 * 50000) - 1) * 100);
  must(bpsim_capture_begin(stream, 0));
  for (int i = 0; i < 400; ++i) must(bpsim_enqueue(stream, &empty));
  bpsim_graph graph;
  must(bpsim_capture_end(stream, &graph));
  std::printf("replay of 400 empty launches:     %8.0f ns per launch\n", measured(400 * 100, [&] {
                for (int i = 0; i < 100; ++i) must(bpsim_graph_launch(stream, graph));
                must(bpsim_stream_synchronize(stream));
              }));
  must(bpsim_shutdown());
  return 0;
}
