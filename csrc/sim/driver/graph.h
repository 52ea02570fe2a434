// Defines a graph: tasks that were recorded instead of run, and the memory they use.
#pragma once

#include <cstdarg>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "allocator.h"
#include "pool.h"
#include "work.h"

namespace backplane::sim::driver {

class Driver;

class Graph {
 public:
  Graph(Card& on, std::shared_ptr<Pool> from, bool owns);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  Card& card;
  // Declared before the tasks, so that it is destroyed after them: what they hold may be in it.
  const std::shared_ptr<Pool> pool;
  const bool owns_pool;
  std::vector<Task> tasks;
  uint64_t launches = 0, copies = 0;

  // Makes the capture invalid; the first mistake is kept. Returns BPSIM_CAPTURE, with the text.
  [[gnu::format(printf, 2, 3)]] bpsim_status spoil(const char* format, ...);
  bool spoilt() const { return !mistake_.empty(); }
  bpsim_status mistake() const;
  // Records a task, under the stream's submitting().
  bpsim_status record(Driver& driver, Task&& task);
  // Checks that the memory still belongs to the same allocations.
  bpsim_status check_memory();

  const std::thread::id thread = std::this_thread::get_id();  // that began the capture

 private:
  struct Use {
    Card* card;
    const Block* block;
    uint64_t serial;
    uintptr_t address;
    size_t task;
  };
  std::vector<Use> uses_;  // memory outside the pool: one entry per allocation, with the first task that uses it
  std::unordered_set<uint64_t> seen_;
  std::string mistake_;
};

// Implement bpsim_capture_begin, bpsim_capture_end and bpsim_graph_launch.
bpsim_status begin_capture(Driver& driver, Stream& stream, bpsim_pool pool);
bpsim_status end_capture(Driver& driver, Stream& stream, bpsim_graph* graph);
bpsim_status launch_graph(Driver& driver, Stream& stream, const std::shared_ptr<Graph>& graph);

}  // namespace backplane::sim::driver
