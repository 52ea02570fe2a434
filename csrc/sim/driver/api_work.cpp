// Implements the C API for streams, launches, events, copies and graphs.
#include "copies.h"
#include "process.h"
#include "submission.h"

using namespace backplane::sim::driver;

namespace {

template <class Body>
bpsim_status with_event(bpsim_event handle, Body&& body) noexcept {
  return with_driver([&](Driver& driver) {
    const std::shared_ptr<Event> event = driver.events.find(handle);
    if (!event)
      return fail(BPSIM_INVALID, "0x%llx is not an event: it was destroyed, or never created",
                  static_cast<unsigned long long>(handle));
    return body(driver, *event);
  });
}

template <class Body>
bpsim_status with_graph(bpsim_graph handle, Body&& body) noexcept {
  return with_driver([&](Driver& driver) {
    const std::shared_ptr<Graph> graph = driver.graphs.find(handle);
    if (!graph)
      return fail(BPSIM_INVALID, "0x%llx is not a graph: it was destroyed, or never created",
                  static_cast<unsigned long long>(handle));
    return body(driver, graph);
  });
}

}  // namespace

extern "C" {

bpsim_status bpsim_default_stream(int32_t index, bpsim_stream* stream) {
  return with_card(index, [&](Driver&, Card& card) {
    *stream = card.default_stream().handle();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_stream_create(int32_t index, bpsim_stream* handle) {
  return with_card(index, [&](Driver&, Card& card) {
    Stream* stream = nullptr;
    const bpsim_status status = card.create_stream(&stream);
    if (status == BPSIM_OK) *handle = stream->handle();
    return status;
  });
}

bpsim_status bpsim_stream_destroy(bpsim_stream handle) {
  return with_driver([&](Driver& driver) {
    Stream* stream = nullptr;
    bpsim_status status = driver.find_stream(handle, &stream);
    if (status != BPSIM_OK) return status;
    Card& card = stream->card();
    if (stream->index() == 0)
      return fail(BPSIM_INVALID, "the default stream of card %d cannot be destroyed", card.index());
    if (stream->capturing.load())
      return fail(BPSIM_INVALID, "stream %d of card %d is capturing: end the capture before destroying it",
                  stream->index(), card.index());
    status = card.may_synchronize("bpsim_stream_destroy", stream);
    const HostWait wait(driver, *stream);
    if (status == BPSIM_OK) status = stream->wait(stream->submitted());
    if (status == BPSIM_OK) wait.over();
    if (status == BPSIM_OK || status == BPSIM_LOST) stream->close();
    return status == BPSIM_OK && card.is_lost() ? card.lost_status() : status;
  });
}

bpsim_status bpsim_stream_card(bpsim_stream handle, int32_t* card) {
  return with_driver([&](Driver& driver) {
    Stream* stream = nullptr;
    const bpsim_status status = driver.find_stream(handle, &stream);
    if (status == BPSIM_OK) *card = stream->card().index();
    return status;
  });
}

bpsim_status bpsim_stream_index(bpsim_stream handle, int32_t* index) {
  return with_driver([&](Driver& driver) {
    Stream* stream = nullptr;
    const bpsim_status status = driver.find_stream(handle, &stream);
    if (status == BPSIM_OK) *index = stream->index();
    return status;
  });
}

bpsim_status bpsim_stream_query(bpsim_stream handle) {
  return with_stream(handle, [](Driver&, Stream& stream) {
    if (stream.capturing.load()) {
      const bpsim_status status = stream.card().may_synchronize("bpsim_stream_query", &stream);
      if (status != BPSIM_OK) return status;
    }
    const HostWait wait(stream.card().driver(), stream);
    if (!stream.idle()) return BPSIM_NOT_READY;
    wait.over();
    return stream.card().synchronized_status();
  });
}

bpsim_status bpsim_stream_synchronize(bpsim_stream handle) {
  return with_stream(handle, [](Driver&, Stream& stream) {
    bpsim_status status = stream.card().may_synchronize("bpsim_stream_synchronize", &stream);
    const HostWait wait(stream.card().driver(), stream);
    if (status == BPSIM_OK && !stream.idle()) status = stream.wait(stream.submitted());
    if (status == BPSIM_OK) wait.over();
    return status == BPSIM_OK ? stream.card().synchronized_status() : status;
  });
}

bpsim_status bpsim_stream_modelled_ns(bpsim_stream handle, double* nanoseconds) {
  return with_stream(handle, [&](Driver&, Stream& stream) {
    *nanoseconds = stream.modelled_ns();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_enqueue(bpsim_stream handle, const bpsim_launch* launch) {
  Task task;  // outside the call, so that the launch's argument is destroyed after the call has left the driver
  task.closure = Closure(*launch);
  return with_stream(handle, [&](Driver& driver, Stream& stream) {
    const bpsim_status status = may_submit(stream, launch->name ? launch->name : "bpsim_enqueue");
    if (status != BPSIM_OK) return status;
    if (!launch->name || !launch->function || (launch->range_count && !launch->ranges))
      return fail(BPSIM_INVALID,
                  "bpsim_enqueue: a launch needs a name and a function, and ranges if range_count is not 0");
    task.name = launch->name;
    task.bytes = launch->bytes;
    task.flops = launch->flops;
    return submit_task(driver, stream, std::move(task), launch->ranges, launch->range_count, nullptr);
  });
}

int bpsim_launch_is_watched(void) {
  const Stream* const worker = current_worker();
  return worker && worker->is_watched() ? 1 : 0;
}

bpsim_status bpsim_launch_detail(double bytes, double flops, const bpsim_range* output) {
  Stream* const worker = current_worker();
  if (!worker) return fail(BPSIM_INVALID, "bpsim_launch_detail: call it inside a launch only");
  worker->set_detail(bytes, flops, output);
  return BPSIM_OK;
}

bpsim_status bpsim_event_create(int timing, bpsim_event* event) {
  return with_driver([&](Driver& driver) {
    *event = driver.events.add(std::make_shared<Event>(timing != 0));
    return BPSIM_OK;
  });
}

bpsim_status bpsim_event_destroy(bpsim_event handle) {
  return with_driver([&](Driver& driver) {
    if (driver.events.remove(handle)) return BPSIM_OK;
    return fail(BPSIM_INVALID, "0x%llx is not an event: it was destroyed, or never created",
                static_cast<unsigned long long>(handle));
  });
}

bpsim_status bpsim_event_record(bpsim_event handle, bpsim_stream stream_handle) {
  return with_stream(stream_handle, [&](Driver&, Stream& stream) {
    return with_event(handle, [&](Driver& driver, Event& event) { return record_event(driver, event, stream); });
  });
}

bpsim_status bpsim_event_query(bpsim_event handle) {
  return with_event(handle, [](Driver&, Event& event) { return query_event(event); });
}

bpsim_status bpsim_event_synchronize(bpsim_event handle) {
  return with_event(handle, [](Driver&, Event& event) { return synchronize_event(event); });
}

bpsim_status bpsim_stream_wait_event(bpsim_stream stream_handle, bpsim_event handle) {
  return with_stream(stream_handle, [&](Driver&, Stream& stream) {
    return with_event(handle, [&](Driver& driver, Event& event) { return wait_for_event(driver, stream, event); });
  });
}

bpsim_status bpsim_event_elapsed_ns(bpsim_event start, bpsim_event end, double* nanoseconds) {
  return with_event(start, [&](Driver&, Event& first) {
    return with_event(end, [&](Driver& driver, Event& last) { return elapsed(driver, first, last, nanoseconds); });
  });
}

bpsim_status bpsim_copy_async(bpsim_stream handle, bpsim_direction direction, void* to, const void* from,
                              uint64_t bytes) {
  return with_stream(handle, [&](Driver& driver, Stream& stream) {
    return copy(driver, stream, direction, to, from, bytes, false);
  });
}

bpsim_status bpsim_copy(bpsim_stream handle, bpsim_direction direction, void* to, const void* from, uint64_t bytes) {
  return with_stream(handle, [&](Driver& driver, Stream& stream) {
    return copy(driver, stream, direction, to, from, bytes, true);
  });
}

bpsim_status bpsim_check_copies(int32_t on) {
  return with_driver([&](Driver& driver) {
    driver.check_copies.store(on != 0);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_memset_async(bpsim_stream handle, void* to, int value, uint64_t bytes) {
  return with_stream(handle,
                     [&](Driver& driver, Stream& stream) { return fill(driver, stream, to, value, bytes); });
}

bpsim_status bpsim_capture_begin(bpsim_stream handle, bpsim_pool pool) {
  return with_stream(handle, [&](Driver& driver, Stream& stream) { return begin_capture(driver, stream, pool); });
}

bpsim_status bpsim_capture_end(bpsim_stream handle, bpsim_graph* graph) {
  return with_driver([&](Driver& driver) {
    Stream* stream = nullptr;
    const bpsim_status status = driver.find_stream(handle, &stream);
    return status == BPSIM_OK ? end_capture(driver, *stream, graph) : status;
  });
}

bpsim_status bpsim_capture_status(bpsim_stream handle, bpsim_capture_state* state) {
  return with_stream(handle, [&](Driver&, Stream& stream) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    *state = !stream.capture            ? BPSIM_CAPTURE_NONE
             : stream.capture->spoilt() ? BPSIM_CAPTURE_INVALID
                                        : BPSIM_CAPTURE_ACTIVE;
    return BPSIM_OK;
  });
}

bpsim_status bpsim_graph_launch(bpsim_stream handle, bpsim_graph graph_handle) {
  return with_stream(handle, [&](Driver&, Stream& stream) {
    return with_graph(graph_handle, [&](Driver& driver, const std::shared_ptr<Graph>& graph) {
      return launch_graph(driver, stream, graph);
    });
  });
}

bpsim_status bpsim_graph_destroy(bpsim_graph handle) {
  return with_graph(handle, [&](Driver& driver, const std::shared_ptr<Graph>& graph) {
    if (graph->owns_pool && graph->pool->asleep.load())
      return fail(BPSIM_INVALID, "graph_destroy: the graph's pool is suspended: resume it first");
    driver.graphs.remove(handle);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_graph_size(bpsim_graph handle, uint64_t* launches) {
  return with_graph(handle, [&](Driver&, const std::shared_ptr<Graph>& graph) {
    *launches = graph->tasks.size();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_graph_pool(bpsim_graph handle, bpsim_pool* pool) {
  return with_graph(handle, [&](Driver&, const std::shared_ptr<Graph>& graph) {
    *pool = graph->pool->handle;
    return BPSIM_OK;
  });
}

}  // extern "C"
