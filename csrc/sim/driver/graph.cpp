// Implements capture and replay of graphs.

#include "graph.h"

#include <cstdio>

#include "card.h"
#include "error.h"
#include "process.h"
#include "submission.h"

namespace backplane::sim::driver {

Graph::Graph(Card& on, std::shared_ptr<Pool> from, bool owns) : card(on), pool(std::move(from)), owns_pool(owns) {
  pool->graphs.fetch_add(1);
}

Graph::~Graph() { pool->graphs.fetch_sub(1); }

bpsim_status Graph::spoil(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (mistake_.empty()) mistake_ = text;
  return fail(BPSIM_CAPTURE, "%s", text);
}

bpsim_status Graph::mistake() const { return fail(BPSIM_CAPTURE, "the capture is invalid: %s", mistake_.c_str()); }

bpsim_status Graph::record(Driver& driver, Task&& task) {
  if (spoilt()) return mistake();
  const bpsim_status status = check_ranges(driver, task.name, task.ranges.data(), task.ranges.size());
  if (status != BPSIM_OK) {
    const std::string text = last_error();
    spoil("%s", text.c_str());
    return fail(status, "%s", text.c_str());
  }
  for (const bpsim_range& range : task.ranges) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(range.pointer);
    Card* const owner = range.bytes ? driver.card_with(address) : nullptr;
    if (!owner) continue;
    const Located found = owner->allocator().locate(address);
    if (found.pool == pool.get()) continue;
    // Serial numbers are per card.
    const uint64_t key = found.serial * BPSIM_MAX_CARDS + static_cast<uint64_t>(owner->index());
    if (seen_.insert(key).second) uses_.push_back({owner, found.block, found.serial, found.start, tasks.size()});
  }
  ++(task.counts_as_launch() ? launches : copies);
  tasks.push_back(std::move(task));
  return BPSIM_OK;
}

bpsim_status Graph::check_memory() {
  if (pool->asleep.load())
    return fail(BPSIM_INVALID, "graph launch: the graph's pool is suspended: resume it first");
  for (const Use& use : uses_)
    if (!use.card->allocator().holds(use.block, use.serial))
      return fail(BPSIM_INVALID,
                  "graph launch: '%s' (task %zu of the graph) uses the allocation %p of card %d, which was freed or "
                  "suspended since the capture. Keep what a graph reads and writes alive as long as the graph",
                  tasks[use.task].name, use.task, reinterpret_cast<void*>(use.address), use.card->index());
  return BPSIM_OK;
}

bpsim_status begin_capture(Driver& driver, Stream& stream, bpsim_pool pool) {
  Card& card = stream.card();
  if (current_worker()) return card.may_synchronize("bpsim_capture_begin", &stream);
  bpsim_status status = card.submit_status();
  if (status != BPSIM_OK) return status;
  std::shared_ptr<Pool> into;
  if (pool == 0) {
    into = driver.pools.create(card, false);
  } else {
    status = driver.find_pool(pool, &into);
    if (status != BPSIM_OK) return status;
    if (into->card != &card)
      return fail(BPSIM_INVALID, "capture: the pool belongs to card %d, the stream to card %d", into->card->index(),
                  card.index());
    if (into->asleep.load()) return fail(BPSIM_INVALID, "capture: the pool is suspended: resume it first");
  }
  std::lock_guard<std::mutex> lock(stream.submitting());
  if (stream.capture)
    return fail(BPSIM_CAPTURE, "capture: stream %d of card %d is already capturing: end that capture first",
                stream.index(), card.index());
  stream.capture = std::make_shared<Graph>(card, std::move(into), pool == 0);
  stream.capturing.store(true);
  card.captures.fetch_add(1);
  return BPSIM_OK;
}

bpsim_status end_capture(Driver& driver, Stream& stream, bpsim_graph* graph) {
  std::shared_ptr<Graph> captured;
  {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (!stream.capture)
      return fail(BPSIM_CAPTURE, "capture: stream %d of card %d is not capturing: begin one first", stream.index(),
                  stream.card().index());
    captured = std::move(stream.capture);
    stream.capture = nullptr;
    stream.capturing.store(false);
    stream.card().captures.fetch_sub(1);
  }
  if (stream.card().is_lost()) return stream.card().lost_status();
  if (captured->spoilt()) return captured->mistake();
  *graph = driver.graphs.add(std::move(captured));
  return BPSIM_OK;
}

bpsim_status launch_graph(Driver& driver, Stream& stream, const std::shared_ptr<Graph>& graph) {
  Card& card = stream.card();
  bpsim_status status = may_submit(stream, "bpsim_graph_launch");
  if (status != BPSIM_OK) return status;
  if (&graph->card != &card)
    return fail(BPSIM_INVALID, "graph launch: the graph was captured on card %d, the stream belongs to card %d",
                graph->card.index(), card.index());
  if (stream.capturing.load()) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture)
      return stream.capture->spoil(
          "graph launch: stream %d of card %d is capturing, and a graph cannot be part of another. Capture its "
          "launches again instead",
          stream.index(), card.index());
  }
  status = graph->check_memory();
  if (status == BPSIM_OK && driver.races.on()) status = driver.races.submit(stream, *graph);
  if (status != BPSIM_OK) return status;
  Work work;
  work.kind = Work::Kind::Replay;
  work.graph = graph;
  if (driver.faults.armed()) {
    uint64_t node = 0;
    for (const Task& task : graph->tasks) match_faults(driver, stream, task, node++, &work.strikes);
  }
  work.launch = card.counts.launches.fetch_add(graph->launches) + 1;
  work.copy = card.counts.copies.fetch_add(graph->copies) + 1;
  card.counts.graph_launches.fetch_add(1);
  return stream.submit(std::move(work));
}

}  // namespace backplane::sim::driver
