// Declares the driver of a process: its one instance, how calls reach it, and how it starts, forks and shuts down.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "card.h"
#include "error.h"
#include "event.h"
#include "faults.h"
#include "graph.h"
#include "handles.h"
#include "model.h"
#include "pinned.h"
#include "pool.h"
#include "races.h"
#include "waiting.h"

namespace backplane::sim::driver {

class Driver {
 public:
  static bpsim_status create(const bpsim_config& config, std::unique_ptr<Driver>* driver);
  ~Driver();

  // Finds a card by its index; returns BPSIM_LOST for a lost card.
  bpsim_status find_card(int32_t index, Card** card);
  // Finds an open stream by its handle; also one of a lost card, because callers handle that differently.
  bpsim_status find_stream(bpsim_stream handle, Stream** stream);
  bpsim_status find_pool(bpsim_pool handle, std::shared_ptr<Pool>* pool);
  // Returns the card whose device pointers include this address, or null.
  Card* card_with(uintptr_t address) const;
  // Checks that [address, address + bytes) lies in one allocation that the user holds; on `card`, if one is given. The
  // error text states what it is instead, and names `call` and `what`.
  bpsim_status check_device(const char* call, const char* what, uintptr_t address, uint64_t bytes, const Card* card);
  // Describes a pointer: "card 1's memory", "host memory", ...
  std::string describe(const void* pointer);
  // Returns an error if a rule names a card that does not exist.
  bpsim_status add_faults(const std::vector<FaultRule>& rules);
  bpsim_status set_model(const bpsim_model& model);
  bpsim_status check_races(int mode);

  // Makes every waiting call return, and drops what is queued.
  void interrupt();
  // Ends every thread, when no call is inside the driver. Returns false if one does not end; then nothing may be freed.
  bool join(int64_t deadline_ns);

  const bpsim_config config;
  SpinPolicy spin;
  std::atomic<int64_t> sync_timeout_ns{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> check_copies{false};
  std::atomic<const bpsim_model*> model{nullptr};  // null: off
  Races races;  // declared before everything that holds memory it has mapped

  std::vector<std::unique_ptr<Card>> cards;
  Faults faults;
  Pinned pinned;
  Pools pools;
  Handles<Event> events;
  Handles<Graph> graphs;

 private:
  explicit Driver(const bpsim_config& config);
  std::mutex model_mutex_;
  std::vector<std::unique_ptr<bpsim_model>> models_;  // including old ones, which a worker may be reading
};

// Keeps the driver alive for the duration of a call.
class Call {
 public:
  Call();
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bpsim_status status = BPSIM_OK;
  Driver* driver = nullptr;
};

bpsim_status start_driver(const bpsim_config& config);
bpsim_status stop_driver();
bool driver_runs();

// Wraps every function of the API: no exception crosses it.
template <class Body>
bpsim_status with_driver(Body&& body) noexcept {
  try {
    const Call call;
    return call.status == BPSIM_OK ? body(*call.driver) : call.status;
  } catch (const std::bad_alloc&) {
    return fail(BPSIM_SYSTEM, "the host is out of memory");
  } catch (const std::exception& thrown) {
    return fail(BPSIM_SYSTEM, "%s", thrown.what());
  }
}
template <class Body>
bpsim_status with_card(int32_t index, Body&& body) noexcept {
  return with_driver([&](Driver& driver) {
    Card* card = nullptr;
    const bpsim_status status = driver.find_card(index, &card);
    return status == BPSIM_OK ? body(driver, *card) : status;
  });
}
// Calls `body` with a stream of a card that is not lost.
template <class Body>
bpsim_status with_stream(bpsim_stream handle, Body&& body) noexcept {
  return with_driver([&](Driver& driver) {
    Stream* stream = nullptr;
    const bpsim_status status = driver.find_stream(handle, &stream);
    if (status != BPSIM_OK) return status;
    if (stream->card().is_lost()) return stream->card().lost_status();
    return body(driver, *stream);
  });
}

}  // namespace backplane::sim::driver
