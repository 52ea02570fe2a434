// Implements recording, waiting for and timing events.

#include "event.h"

#include "card.h"
#include "error.h"
#include "graph.h"
#include "process.h"
#include "stream.h"
#include "submission.h"

namespace backplane::sim::driver {
namespace {

// Refuses to wait for an event that was recorded in a capture: it marks no submitted work.
bpsim_status refuse_captured(const Event::Record& record, const char* call) {
  constexpr const char* text =
      "%s: the event was recorded while stream %d of card %d was capturing, so it marks a place in a graph and not "
      "submitted work. Record it again outside the capture, after bpsim_graph_launch";
  if (const auto graph = record.capture.lock()) {
    std::lock_guard<std::mutex> lock(record.stream->submitting());
    // Only a capture that is still in progress can become invalid.
    if (record.stream->capture == graph)
      return graph->spoil(text, call, record.stream->index(), record.stream->card().index());
  }
  return fail(BPSIM_CAPTURE, text, call, record.stream->index(), record.stream->card().index());
}

}  // namespace

Event::Record Event::record() {
  std::lock_guard<std::mutex> lock(mutex_);
  return record_;
}

void Event::set(Record record) {
  std::lock_guard<std::mutex> lock(mutex_);
  record_ = std::move(record);
}

bpsim_status record_event(Driver& driver, Event& event, Stream& stream) {
  const bpsim_status status = may_submit(stream, "bpsim_event_record");
  if (status != BPSIM_OK) return status;
  Event::Record record;
  record.stream = &stream;
  if (stream.capturing.load()) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture) {
      record.captured = true;
      record.capture = stream.capture;
      event.set(std::move(record));
      return BPSIM_OK;
    }
  }
  if (driver.races.on()) record.known = std::make_shared<const Clock>(driver.races.known_after(stream));
  if (event.timing || driver.model.load()) {
    record.mark = std::make_shared<Mark>();
    Work work;
    work.kind = Work::Kind::Record;
    work.mark = record.mark;
    const bpsim_status submitted = stream.submit(std::move(work), &record.sequence);
    if (submitted != BPSIM_OK) return submitted;
  } else {
    record.sequence = stream.submitted();
  }
  event.set(std::move(record));
  return BPSIM_OK;
}

bpsim_status query_event(Event& event) {
  const Event::Record record = event.record();
  if (!record.stream) return BPSIM_OK;
  if (record.captured) return refuse_captured(record, "bpsim_event_query");
  Card& card = record.stream->card();
  if (card.is_lost()) return card.lost_status();
  if (!record.stream->finished(record.sequence)) return BPSIM_NOT_READY;
  if (record.known) card.driver().races.host_waited(*record.known);
  return card.synchronized_status();
}

bpsim_status synchronize_event(Event& event) {
  const Event::Record record = event.record();
  if (!record.stream) return BPSIM_OK;
  if (record.captured) return refuse_captured(record, "bpsim_event_synchronize");
  Card& card = record.stream->card();
  if (card.is_lost()) return card.lost_status();
  bpsim_status status = card.may_synchronize("bpsim_event_synchronize", record.stream);
  if (status == BPSIM_OK) status = record.stream->wait(record.sequence);
  if (status == BPSIM_OK && record.known) card.driver().races.host_waited(*record.known);
  return status == BPSIM_OK ? card.synchronized_status() : status;
}

bpsim_status wait_for_event(Driver& driver, Stream& stream, Event& event) {
  const bpsim_status status = may_submit(stream, "bpsim_stream_wait_event");
  if (status != BPSIM_OK) return status;
  const Event::Record record = event.record();
  if (stream.capturing.load()) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture) {
      if (!record.stream || (record.captured && record.capture.lock() == stream.capture)) return BPSIM_OK;
      return stream.capture->spoil(
          "bpsim_stream_wait_event: stream %d of card %d is capturing, and the event marks work outside the capture "
          "(stream %d of card %d), which a replay could not wait for. Wait for it before the capture begins; forks to "
          "other streams cannot be captured",
          stream.index(), stream.card().index(), record.stream->index(), record.stream->card().index());
    }
  }
  if (!record.stream) return BPSIM_OK;
  if (record.captured) return refuse_captured(record, "bpsim_stream_wait_event");
  if (record.known) driver.races.stream_waited(stream, *record.known);
  // A stream works in order, so it need not wait for itself.
  if (record.stream == &stream) return BPSIM_OK;
  if (!driver.model.load() && record.stream->finished(record.sequence)) return BPSIM_OK;
  Work work;
  work.kind = Work::Kind::Wait;
  work.awaited = record.stream;
  work.sequence = record.sequence;
  work.mark = record.mark;
  return stream.submit(std::move(work));
}

bpsim_status elapsed(Driver& driver, Event& start, Event& end, double* nanoseconds) {
  if (!start.timing || !end.timing)
    return fail(BPSIM_INVALID, "bpsim_event_elapsed_ns: both events must be created with timing");
  const Event::Record first = start.record(), last = end.record();
  for (const Event::Record* record : {&first, &last}) {
    if (!record->stream)
      return fail(BPSIM_INVALID, "bpsim_event_elapsed_ns: the %s event was never recorded",
                  record == &first ? "first" : "second");
    if (record->captured) return refuse_captured(*record, "bpsim_event_elapsed_ns");
    if (record->stream->card().is_lost()) return record->stream->card().lost_status();
    if (!record->stream->finished(record->sequence)) return BPSIM_NOT_READY;
  }
  *nanoseconds = driver.model.load()
                     ? last.mark->modelled_ns.load() - first.mark->modelled_ns.load()
                     : static_cast<double>(last.mark->real_ns.load() - first.mark->real_ns.load());
  return BPSIM_OK;
}

}  // namespace backplane::sim::driver
