// Executes an entry of a stream's queue, on the worker thread.
#include <cstdio>
#include <cstring>
#include <exception>

#include "card.h"
#include "checksum.h"
#include "corruption.h"
#include "graph.h"
#include "process.h"
#include "stream.h"

namespace backplane::sim::driver {

void Stream::execute(Work& work) {
  switch (work.kind) {
    case Work::Kind::Run:
      run(work.task, work.task.counts_as_launch() ? work.launch : work.copy, work.strikes.data(), work.strikes.size());
      break;
    case Work::Kind::Replay:
      run_graph(work);
      break;
    case Work::Kind::Record:
      work.mark->modelled_ns.store(modelled_clock_.load(std::memory_order_relaxed));
      work.mark->real_ns.store(now_ns());
      work.mark->passed.store(true);
      break;
    case Work::Kind::Wait:
      await(work);
      break;
  }
}

void Stream::run_graph(Work& work) {
  uint64_t launch = work.launch, copy = work.copy;
  const Strike* strike = work.strikes.data();
  const Strike* const end = strike + work.strikes.size();
  uint64_t node = 0;
  for (Task& task : work.graph->tasks) {
    const Strike* const first = strike;
    while (strike != end && strike->node == node) ++strike;
    run(task, task.counts_as_launch() ? launch++ : copy++, first, static_cast<size_t>(strike - first));
    ++node;
  }
}

std::string Stream::named(const Task& task, uint64_t number) const {
  char text[256];
  std::snprintf(text, sizeof text, "card %d: %s '%s' (number %llu of the card, on stream %d)", card_.index(),
                task.counts_as_launch() ? "launch" : "copy", task.name, static_cast<unsigned long long>(number),
                index_);
  return text;
}

void Stream::run(Task& task, uint64_t number, const Strike* strikes, size_t count) {
  running_.store(task.name, std::memory_order_relaxed);
  running_number_.store(number, std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i)
    if (strikes[i].kind == BPSIM_FAULT_HANG) hang(strikes[i].releases);
  std::unique_lock<std::mutex> ticket;
  if (task.ticket) ticket = std::unique_lock<std::mutex>(task.ticket->mutex);
  const bool cancelled = task.ticket && task.ticket->cancelled;
  if (cancelled || !card_.runs() || driver_.stopping.load(std::memory_order_relaxed)) {
    card_.counts.dropped.fetch_add(1, std::memory_order_relaxed);
    running_.store(nullptr, std::memory_order_relaxed);
    return;
  }
  const bool traced = card_.trace.on();
  const int64_t start = traced ? now_ns() : 0;
  bool done = true;
  for (size_t i = 0; i < count && done; ++i) {
    if (strikes[i].kind == BPSIM_FAULT_LOST) {
      card_.lose(("by an injected fault, at " + named(task, number)).c_str());
      done = false;
    } else if (strikes[i].kind == BPSIM_FAULT_FAIL) {
      card_.fail_with(named(task, number) + " failed: an injected fault");
      done = false;
    }
  }
  const bool checked = done && !task.counts_as_launch() && driver_.check_copies.load(std::memory_order_relaxed);
  const uint64_t sent = checked ? checksum_of_source(task) : 0;
  const bpsim_model* const model = driver_.model.load(std::memory_order_acquire);
  watched_ = model != nullptr;
  for (size_t i = 0; i < count; ++i) watched_ |= strikes[i].kind == BPSIM_FAULT_CORRUPT;
  bytes_ = task.bytes;
  flops_ = task.flops;
  output_ = {};
  done = done && call(task, number);
  for (size_t i = 0; i < count && done; ++i)
    if (strikes[i].kind == BPSIM_FAULT_CORRUPT) corrupt(task, number, strikes[i]);
  if (checked && done) check_arrival(task, number, sent);
  double modelled = 0;
  if (model) {
    modelled = modelled_duration(*model, task.crosses_link, bytes_, flops_);
    account(modelled);
  }
  if (traced) card_.trace.add({task.name, handle(), number, start, now_ns(), modelled, bytes_, flops_});
  watched_ = false;
  running_.store(nullptr, std::memory_order_relaxed);
  ticks_.store(ticks_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

bool Stream::call(Task& task, uint64_t number) {
  if (task.kind == Task::Kind::Copy) {
    // Copies within a card may overlap: the user requested it, and a real engine would not refuse either.
    std::memmove(task.to, task.from, task.size);
    return true;
  }
  if (task.kind == Task::Kind::Fill) {
    std::memset(task.to, task.value, task.size);
    return true;
  }
  char error[512];
  error[0] = 0;
  int result = 1;
  try {
    result = task.closure(error, sizeof error);
  } catch (const std::exception& thrown) {
    std::snprintf(error, sizeof error, "it threw an exception: %s", thrown.what());
  } catch (...) {
    std::snprintf(error, sizeof error, "it threw an object that is not a std::exception");
  }
  if (result == 0) return true;
  error[sizeof error - 1] = 0;
  card_.fail_with(named(task, number) + " failed" + (error[0] ? ": " : ", without a reason") + error);
  return false;
}

void Stream::corrupt(const Task& task, uint64_t number, const Strike& strike) {
  if (!task.counts_as_launch()) {
    corrupt_bytes(task.to, task.size, strike);
    return;
  }
  const auto spoil = [&](const bpsim_range& range) {
    if (!range.written || range.bytes == 0) return false;
    const Card* const card = driver_.card_with(reinterpret_cast<uintptr_t>(range.pointer));
    if (!card) return false;
    corrupt_elements(card->arena().kernel_pointer(reinterpret_cast<uintptr_t>(range.pointer)), range.bytes,
                     static_cast<bpsim_element>(range.element), strike);
    return true;
  };
  bool any = spoil(output_);
  for (size_t i = 0; i < task.ranges.size() && !any; ++i)
    any = spoil(task.ranges[i]);  // one output is enough, and harder to find than all
  // An error is better than a test that wrongly assumes the fault was injected.
  if (!any)
    card_.fail_with(named(task, number) +
                    " matches a corrupt fault, but names no output (a bpsim_range with written=1)");
}

void Stream::set_detail(double bytes, double flops, const bpsim_range* output) {
  bytes_ = bytes;
  flops_ = flops;
  if (output) output_ = *output;
}

void Stream::check_arrival(const Task& task, uint64_t number, uint64_t sent) {
  const uint64_t arrived = checksum(task.to, task.size);
  if (arrived == sent) return;
  char text[256];
  std::snprintf(text, sizeof text,
                " failed: %llu bytes differ from their source (checksum %016llx, source %016llx). The link, the copy "
                "engine or the memory is at fault, not a launch",
                static_cast<unsigned long long>(task.size), static_cast<unsigned long long>(arrived),
                static_cast<unsigned long long>(sent));
  card_.fail_with(named(task, number) + text);
}

void Stream::hang(uint64_t releases) {
  std::lock_guard<Monitor> lock(monitor_);
  while (card_.releases.load() == releases && !interrupted() && !stop_.load()) monitor_.wait();
}

void Stream::await(const Work& work) {
  Stream& other = *work.awaited;
  const auto over = [&] {
    return other.finished(work.sequence) || interrupted() || other.card_.is_lost() || stop_.load();
  };
  // Set only while it really waits: the other stream may hang in work after the sequence that is awaited here.
  if (!over()) {
    awaiting_.store(&other);
    if (!driver_.spin.until(over)) {
      std::lock_guard<Monitor> lock(other.monitor_);
      for (;;) {
        if (work.sequence < other.wanted_.load()) other.wanted_.store(work.sequence, std::memory_order_seq_cst);
        if (over()) break;
        other.monitor_.wait();
      }
    }
    awaiting_.store(nullptr);
  }
  if (work.mark && work.mark->passed.load())
    modelled_clock_.store(std::max(modelled_clock_.load(std::memory_order_relaxed), work.mark->modelled_ns.load()));
}

void Stream::account(double nanoseconds) {
  modelled_clock_.store(modelled_clock_.load(std::memory_order_relaxed) + nanoseconds, std::memory_order_relaxed);
  modelled_busy_.store(modelled_busy_.load(std::memory_order_relaxed) + nanoseconds, std::memory_order_relaxed);
}

}  // namespace backplane::sim::driver
