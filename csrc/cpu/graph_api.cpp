// Exports graphs as C functions for Python. A failed call leaves its error text for backplane_cpu_graph_error.

#include <string>

#include "graph.h"

#define BACKPLANE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using backplane::cpu::Graph;

thread_local std::string error;

template <class F>
int guarded(F&& call) {
  try {
    call();
    return 0;
  } catch (const c10::Error& thrown) {
    error = thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  return -1;
}

}  // namespace

BACKPLANE_EXPORT const char* backplane_cpu_graph_error() { return error.c_str(); }

BACKPLANE_EXPORT int backplane_cpu_graph_begin() { return guarded(&backplane::cpu::begin_graph); }

BACKPLANE_EXPORT int backplane_cpu_graph_end(Graph** graph) {
  return guarded([&] { *graph = backplane::cpu::end_graph().release(); });
}

BACKPLANE_EXPORT void backplane_cpu_graph_abandon() { backplane::cpu::abandon_graph(); }

BACKPLANE_EXPORT int backplane_cpu_graph_replay(Graph* graph) {
  return guarded([&] { graph->replay(); });
}

BACKPLANE_EXPORT int backplane_cpu_graph_replay_timed(Graph* graph) {
  return guarded([&] { graph->replay(true); });
}

// Returns an operator of the last timed replay, with the shape of its first result, and its duration; null past the
// last one. The text is valid until the next call.
BACKPLANE_EXPORT const char* backplane_cpu_graph_step(const Graph* graph, int64_t index, double* seconds) {
  thread_local std::string label;
  if (index < 0 || index >= static_cast<int64_t>(graph->seconds.size())) return nullptr;
  const backplane::cpu::GraphStep& step = graph->steps[index];
  *seconds = graph->seconds[index];
  label = step.op->name;
  if (!step.results.empty()) {
    label += " ->";
    for (const int64_t size : step.results.front().place.sizes()) {
      label += ' ';
      label += std::to_string(size);
    }
  }
  return label.c_str();
}

BACKPLANE_EXPORT void backplane_cpu_graph_destroy(Graph* graph) { delete graph; }

// Returns a statistic. 0: operators of a replay. 1: operators that it skips. 2: bytes. 3: results copied to their
// address so far.
BACKPLANE_EXPORT int64_t backplane_cpu_graph_figure(const Graph* graph, int which) {
  switch (which) {
    case 0: return static_cast<int64_t>(graph->steps.size());
    case 1: return graph->views;
    case 2: return static_cast<int64_t>(graph->pool->bytes());
    case 3: return graph->copies;
    default: return -1;
  }
}

// Returns the number of graphs of the process whose memory is still held, by the graph or by tensors that it returned.
BACKPLANE_EXPORT int64_t backplane_cpu_graph_memories() { return backplane::cpu::GraphPool::alive(); }
