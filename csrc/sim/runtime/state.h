// Declares the shared state of the runtime: the driver, started once, its cards, the current card and stream of a
// thread, and driver statuses as PyTorch's exceptions.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/macros/Macros.h>

#include <array>
#include <atomic>

#include "driver/driver.h"

namespace backplane::sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// Raises torch.OutOfMemoryError for a full card, torch.AcceleratorError (a RuntimeError) for a failed or lost card.
[[noreturn]] void raise(bpsim_status status, const char* doing);
inline void check(bpsim_status status, const char* doing) {
  if (C10_UNLIKELY(status != BPSIM_OK)) raise(status, doing);
}

struct Card {
  uintptr_t first = 0;
  uint64_t bytes = 0;
  ptrdiff_t kernel_offset = 0;
  bpsim_stream default_stream = 0;

  bool holds(const void* pointer) const { return reinterpret_cast<uintptr_t>(pointer) - first < bytes; }
};

// Copies the configuration and starts nothing. Raises once the driver runs.
void configure(const bpsim_config& config);
int card_count();
// Starts the driver at the first use of a card, so that a process that only queries has no threads and may fork.
void start();
bool started();
// Returns whether the driver was started in the parent of this process.
bool forked_after_start();
const Card& card(c10::DeviceIndex index);

c10::DeviceIndex current_card();
void set_current_card(c10::DeviceIndex index);

class CardGuard {
 public:
  explicit CardGuard(c10::DeviceIndex index) : before_(current_card()) { set_current_card(index); }
  ~CardGuard() { set_current_card(before_); }
  CardGuard(const CardGuard&) = delete;
  CardGuard& operator=(const CardGuard&) = delete;

 private:
  c10::DeviceIndex before_;
};

// A stream's id in PyTorch is the driver's handle, except that a card's default stream is 0.
bpsim_stream handle_of(const c10::Stream& stream);
bpsim_stream current_stream_of(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(const c10::Stream& stream);
// Returns one of a few streams in turn, because PyTorch never reports when a stream is no longer needed.
c10::Stream pooled_stream(c10::DeviceIndex index);
void synchronize(c10::DeviceIndex index);

// The pool that this thread's allocations come from; 0 is the card's general one.
bpsim_pool current_pool();
void set_current_pool(bpsim_pool pool);

// The number of threads that one launch may use.
int compute_threads();
void set_compute_threads(int count);

}  // namespace backplane::sim
