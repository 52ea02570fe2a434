// Implements the submission of tasks: checks, faults, and recording or queueing.

#include "submission.h"

#include "card.h"
#include "error.h"
#include "graph.h"
#include "process.h"
#include "stream.h"

namespace backplane::sim::driver {

bpsim_status may_submit(Stream& stream, const char* call) {
  if (Stream* const worker = current_worker())
    return fail(BPSIM_INVALID, "%s was called inside a launch ('%s'): only the host may submit work", call,
                worker->running() ? worker->running() : "?");
  return stream.card().submit_status();
}

bpsim_status check_ranges(Driver& driver, const char* name, const bpsim_range* ranges, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (ranges[i].bytes == 0) continue;
    const uintptr_t address = reinterpret_cast<uintptr_t>(ranges[i].pointer);
    const bpsim_status status = driver.check_device(name, ranges[i].written ? "an output" : "an input", address,
                                                    ranges[i].bytes, nullptr);
    if (status != BPSIM_OK) return status;
  }
  return BPSIM_OK;
}

void match_faults(Driver& driver, Stream& stream, const Task& task, uint64_t node, std::vector<Strike>* strikes) {
  driver.faults.match(task.counts_as_launch() ? BPSIM_AT_LAUNCH : BPSIM_AT_COPY, task.name, stream.card().index(),
                      stream.index(), node, strikes);
  for (Strike& strike : *strikes)
    if (strike.node == node) strike.releases = stream.card().releases.load();
}

bpsim_status submit_task(Driver& driver, Stream& stream, Task&& task, const bpsim_range* ranges, size_t count,
                         uint64_t* sequence) {
  if (stream.capturing.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture) {
      task.ranges.assign(ranges, ranges + count);
      return stream.capture->record(driver, std::move(task));
    }
  }
  if (driver.config.check_launches && task.counts_as_launch()) {
    const bpsim_status status = check_ranges(driver, task.name, ranges, count);
    if (status != BPSIM_OK) return status;
  }
  if (driver.races.on()) {
    const bpsim_status status = driver.races.submit(stream, task, ranges, count);
    if (status != BPSIM_OK) return status;
  }
  Work work;
  if (driver.faults.armed()) {
    match_faults(driver, stream, task, 0, &work.strikes);
    if (!work.strikes.empty()) task.ranges.assign(ranges, ranges + count);
  }
  auto& counts = stream.card().counts;
  if (task.counts_as_launch())
    work.launch = counts.launches.fetch_add(1, std::memory_order_relaxed) + 1;
  else
    work.copy = counts.copies.fetch_add(1, std::memory_order_relaxed) + 1;
  work.task = std::move(task);
  const bpsim_status status = stream.submit(std::move(work), sequence);
  return status;
}

}  // namespace backplane::sim::driver
