// Defines a card: memory, streams, and the state that they share (failed, lost).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "allocator.h"
#include "arena.h"
#include "stream.h"
#include "trace.h"

namespace backplane::sim::driver {

class Driver;

class Card {
 public:
  static bpsim_status create(Driver& driver, int32_t index, uint64_t memory, std::unique_ptr<Card>* card);
  ~Card();

  Driver& driver() const { return driver_; }
  int32_t index() const { return index_; }
  const Arena& arena() const { return *arena_; }
  Allocator& allocator() { return *allocator_; }

  Stream& default_stream() { return *streams_[0].load(); }
  bpsim_status create_stream(Stream** stream);
  // Returns null for an index that was never used.
  Stream* stream_at(uint32_t index) const {
    return index < BPSIM_MAX_STREAMS ? streams_[index].load(std::memory_order_acquire) : nullptr;
  }
  template <class Visit>
  void each_stream(Visit&& visit) const {
    for (uint32_t i = 0; i < BPSIM_MAX_STREAMS; ++i) {
      Stream* const stream = stream_at(i);
      if (!stream) break;
      visit(*stream);
    }
  }

  // Returns whether submitted work runs.
  bool runs() const { return !failed_.load(std::memory_order_acquire) && !is_lost(); }
  bool is_lost() const { return lost_.load(std::memory_order_acquire); }
  // Records the failure of a launch; the first one is kept.
  void fail_with(const std::string& text);
  // The same, and reports it at the next call already, not only at the next synchronizing call.
  void fail_now(const std::string& text);
  void lose(const char* why);
  // Returns BPSIM_LOST, with its text.
  bpsim_status lost_status() const;
  // The status for a call that submits work: a failure is returned only after a synchronizing call has returned it.
  bpsim_status submit_status() const;
  // The status for a synchronizing call after it has waited.
  bpsim_status synchronized_status();
  bpsim_status reset();

  // Waits for every stream without reporting errors; returns false if waiting is impossible now (a capture, a worker, a
  // hang).
  bool drain();
  bpsim_status synchronize();

  // Refuses a synchronizing call on a worker, or during a capture, which the call makes invalid. `stream` null: the
  // call concerns the whole card.
  bpsim_status may_synchronize(const char* call, Stream* stream);
  std::atomic<int> captures{0};

  // Injected hangs end when this changes.
  std::atomic<uint64_t> releases{0};

  struct Counts {
    std::atomic<uint64_t> launches{0}, copies{0}, graph_launches{0}, dropped{0};
  } counts;
  Trace trace;

 private:
  Card(Driver& driver, int32_t index) : driver_(driver), index_(index) {}
  void wake_all_streams();

  Driver& driver_;
  const int32_t index_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Allocator> allocator_;
  std::mutex stream_mutex_;  // for creating streams
  std::atomic<Stream*> streams_[BPSIM_MAX_STREAMS] = {};

  mutable std::mutex state_mutex_;  // for the texts
  std::atomic<bool> failed_{false}, reported_{false}, lost_{false};
  std::string failure_, loss_;
};

}  // namespace backplane::sim::driver
