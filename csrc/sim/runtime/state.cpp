// Starts the driver, keeps the current card, stream and pool of each thread, and turns driver statuses into exceptions.

#include "runtime/state.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/workers.h"

namespace backplane::sim {
namespace {

constexpr size_t kPooledStreams = 16;

struct Driver {
  std::mutex lock;
  bpsim_config config;
  std::string faults;
  std::atomic<bool> started{false};
  std::array<Card, BPSIM_MAX_CARDS> cards;
  std::array<std::vector<bpsim_stream>, BPSIM_MAX_CARDS> pool;
  std::array<size_t, BPSIM_MAX_CARDS> next{};

  Driver() { bpsim_config_default(&config); }
};

// Never destroyed: tensors may be freed after static destructors have run.
Driver& driver() {
  static Driver* const only = new Driver;
  return *only;
}

thread_local c10::DeviceIndex this_card = 0;
thread_local std::array<bpsim_stream, BPSIM_MAX_CARDS> this_stream{};
thread_local bpsim_pool this_pool = 0;

std::atomic<int> threads{0};
std::atomic<uint64_t> threads_set{0};

}  // namespace

void raise(bpsim_status status, const char* doing) {
  std::string text = std::string("bpnpu, ") + doing + ": " + bpsim_last_error();
  TORCH_CHECK_WITH(OutOfMemoryError, status != BPSIM_OUT_OF_MEMORY, text);
  TORCH_CHECK(status != BPSIM_INVALID && status != BPSIM_NOT_READY, text);
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, status, text);
}

void configure(const bpsim_config& config) {
  Driver& d = driver();
  std::lock_guard<std::mutex> hold(d.lock);
  TORCH_CHECK(!d.started.load(), "bpnpu is already in use; configure it before the first tensor");
  TORCH_CHECK(config.struct_size == sizeof(bpsim_config), "bpnpu: the configuration is of another driver version");
  d.config = config;
  d.faults = config.faults == nullptr ? "" : config.faults;
}

int card_count() { return driver().config.cards; }

bool started() { return driver().started.load(std::memory_order_acquire); }

bool forked_after_start() { return started() && bpsim_is_initialized() == 0; }

void start() {
  Driver& d = driver();
  if (C10_LIKELY(d.started.load(std::memory_order_acquire))) return;
  std::lock_guard<std::mutex> hold(d.lock);
  if (d.started.load()) return;
  bpsim_config config = d.config;
  config.faults = d.faults.empty() ? nullptr : d.faults.c_str();
  config.worker_start = &prepare_worker_thread;
  check(bpsim_init(&config), "starting");
  for (int32_t i = 0; i < config.cards; ++i) {
    Card& one = d.cards[i];
    check(bpsim_card_range(i, &one.first, &one.bytes, &one.kernel_offset), "starting");
    check(bpsim_default_stream(i, &one.default_stream), "starting");
  }
  d.started.store(true, std::memory_order_release);
}

const Card& card(c10::DeviceIndex index) {
  start();
  TORCH_CHECK(index >= 0 && index < card_count(), "bpnpu:", static_cast<int>(index), " does not exist; there are ",
              card_count(), " cards (BACKPLANE_SIM_CARDS)");
  return driver().cards[index];
}

c10::DeviceIndex current_card() { return this_card; }

void set_current_card(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < card_count(), "bpnpu:", static_cast<int>(index), " does not exist; there are ",
              card_count(), " cards (BACKPLANE_SIM_CARDS)");
  this_card = index;
}

bpsim_stream handle_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kType, "expected a stream of bpnpu, got one of ", stream.device());
  return stream.id() == 0 ? card(stream.device_index()).default_stream : static_cast<bpsim_stream>(stream.id());
}

bpsim_stream current_stream_of(c10::DeviceIndex index) {
  const Card& one = card(index);
  const bpsim_stream chosen = this_stream[index];
  return chosen == 0 ? one.default_stream : chosen;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  const bpsim_stream chosen = index >= 0 && index < BPSIM_MAX_CARDS ? this_stream[index] : 0;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), static_cast<c10::StreamId>(chosen));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  handle_of(stream);  // checks that it is a stream of bpnpu
  this_stream.at(stream.device_index()) = static_cast<bpsim_stream>(stream.id());
  return before;
}

c10::Stream pooled_stream(c10::DeviceIndex index) {
  card(index);
  Driver& d = driver();
  std::lock_guard<std::mutex> hold(d.lock);
  auto& pool = d.pool[index];
  if (pool.size() < kPooledStreams) {
    bpsim_stream made = 0;
    check(bpsim_stream_create(index, &made), "creating a stream");
    pool.push_back(made);
  }
  const bpsim_stream given = pool[d.next[index]++ % kPooledStreams];
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), static_cast<c10::StreamId>(given));
}

void synchronize(c10::DeviceIndex index) {
  if (!started()) return;  // no work was ever queued, and a process without a driver may still fork
  card(index);
  check(bpsim_card_synchronize(index), "synchronizing");
}

bpsim_pool current_pool() { return this_pool; }
void set_current_pool(bpsim_pool pool) { this_pool = pool; }

int compute_threads() { return threads.load(std::memory_order_relaxed); }
void set_compute_threads(int count) {
  threads.store(count, std::memory_order_relaxed);
  threads_set.fetch_add(1, std::memory_order_release);
}

// --- worker threads ---------------------------------------------------------------------------------------------------

void prepare_worker_thread(int32_t, uint64_t, void*) {
  // For the life of the thread: launches compute without recording autograd.
  new c10::InferenceMode(true);
  // PyTorch sets the number of OpenMP threads of a thread at its first parallel loop; after that we may set it.
  at::get_num_threads();
  follow_thread_count();
}

void follow_thread_count() {
  // Compares a counter of changes, not the numbers: the host may have set PyTorch's number since, and part of it
  // (MKL's) is not per thread.
  thread_local uint64_t applied = 0;
  const uint64_t set = threads_set.load(std::memory_order_acquire);
  if (C10_LIKELY(set == applied)) return;
  applied = set;
  if (const int wanted = compute_threads(); wanted > 0) at::set_num_threads(wanted);
}

}  // namespace backplane::sim
