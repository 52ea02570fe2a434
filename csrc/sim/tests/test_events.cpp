// Tests events, the chip model, and traces.
#include <cmath>

#include "helpers.h"

TEST(events_order_streams) {
  Session session;
  const bpsim_stream other = new_stream();
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_query(event));        // never recorded: nothing to wait for
  CHECK_OK(bpsim_event_synchronize(event));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  int value = 0;  // not atomic: the event orders the streams
  for (int round = 0; round < 50; ++round) {
    CHECK_OK(launch(session.stream, "write", [&value, round] { value = round * 2; }));
    CHECK_OK(bpsim_event_record(event, session.stream));
    CHECK_OK(bpsim_stream_wait_event(other, event));
    CHECK_OK(launch(other, "increment", [&value] { ++value; }));
    CHECK_OK(bpsim_event_record(event, other));
    CHECK_OK(bpsim_event_synchronize(event));
    CHECK_EQ(value, round * 2 + 1);
  }
}

TEST(an_event_is_its_last_record_when_waited_for) {
  Session session;
  const bpsim_stream other = new_stream();
  const bpsim_event event = new_event();
  std::atomic<bool> ran{false};
  Gate first(session.stream);
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_OK(launch(other, "flag", [&] { ran = true; }));
  first.wait_until_reached();
  CHECK_STATUS(bpsim_event_query(event), BPSIM_NOT_READY, "");
  // Recorded again and destroyed: work that already waits still waits for the first record.
  CHECK_OK(bpsim_event_record(event, new_stream()));
  CHECK_OK(bpsim_event_query(event));
  CHECK_OK(bpsim_event_destroy(event));
  CHECK_STATUS(bpsim_event_query(event), BPSIM_INVALID, "is not an event");
  CHECK_STATUS(bpsim_event_destroy(event), BPSIM_INVALID, "is not an event");
  for (int i = 0; i < 10; ++i) doze();
  CHECK(!ran.load());
  first.open();
  CHECK_OK(bpsim_stream_synchronize(other));
  CHECK(ran.load());
}

TEST(events_work_between_cards) {
  Session session;
  int* const here = allocate<int>(session.stream, 4);
  int* const there = allocate<int>(session.other_card, 4);
  const bpsim_event event = new_event(true);
  for (int i = 0; i < 20; ++i) {
    put(session.stream, here, i);
    CHECK_OK(bpsim_event_record(event, session.stream));
    CHECK_OK(bpsim_stream_wait_event(session.other_card, event));
    CHECK_OK(bpsim_copy_async(session.other_card, BPSIM_PEER, there, here, 4));
    CHECK_EQ(get(session.other_card, there), i);
  }
}

TEST(elapsed_time_is_that_of_the_work) {
  Session session;
  const bpsim_event start = new_event(true), end = new_event(true), plain = new_event();
  double elapsed = -1;
  CHECK_STATUS(bpsim_event_elapsed_ns(start, end, &elapsed), BPSIM_INVALID, "the first event was never recorded");
  CHECK_OK(bpsim_event_record(start, session.stream));
  CHECK_OK(launch(session.stream, "sleep", [] {
    const timespec time{0, 5000000};
    nanosleep(&time, nullptr);
  }));
  Gate gate(session.stream);
  CHECK_OK(bpsim_event_record(end, session.stream));
  CHECK_STATUS(bpsim_event_elapsed_ns(start, end, &elapsed), BPSIM_NOT_READY, "");
  gate.open();
  CHECK_OK(bpsim_event_synchronize(end));
  CHECK_OK(bpsim_event_elapsed_ns(start, end, &elapsed));
  CHECK(elapsed >= 5e6);  // nanosleep does not return early
  CHECK_OK(bpsim_event_record(plain, session.stream));
  CHECK_STATUS(bpsim_event_elapsed_ns(start, plain, &elapsed), BPSIM_INVALID, "created with timing");
}

TEST(modelled_time_is_by_the_stated_rates) {
  Session session([](bpsim_config& config) { config.model = {1, 1e9, 1e8, 2e12, 500}; });
  const bpsim_stream other = new_stream();
  const bpsim_event start = new_event(true), middle = new_event(true), end = new_event(true);
  const auto nothing = [](char*, size_t) { return 0; };
  CHECK_OK(bpsim_event_record(start, session.stream));
  CHECK_OK(launch(session.stream, "by_bytes", nothing, nullptr, 0, 4000, 1e6));   // 4000 B at 1 GB/s: 4000 ns
  CHECK_OK(bpsim_event_record(middle, session.stream));
  CHECK_OK(launch(session.stream, "by_flops", nothing, nullptr, 0, 1000, 2e7));   // 2e7 FLOP at 2 TFLOP/s: 10000 ns
  char* const device = allocate(session.stream, 2000);
  char host[1000] = {};
  CHECK_OK(bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 1000));  // at 0.1 GB/s: 10000 ns
  CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_DEVICE, device + 1000, device, 1000));  // twice 1000 B: 2000 ns
  CHECK_OK(bpsim_event_record(end, session.stream));
  CHECK_OK(bpsim_card_synchronize(0));
  const double expected = (500 + 4000) + (500 + 10000) + (500 + 10000) + (500 + 2000);
  double got = 0;
  CHECK_OK(bpsim_event_elapsed_ns(start, end, &got));
  CHECK(std::abs(got - expected) < 1e-6);
  CHECK_OK(bpsim_stream_modelled_ns(session.stream, &got));
  CHECK(std::abs(got - expected) < 1e-6);
  // Another stream that waits for `middle` begins there.
  CHECK_OK(bpsim_stream_wait_event(other, middle));
  CHECK_OK(launch(other, "short", nothing, nullptr, 0, 100, 0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_stream_modelled_ns(other, &got));
  CHECK(std::abs(got - (4500 + 600)) < 1e-6);
  bpsim_counters counters{};
  CHECK_OK(bpsim_card_counters(0, &counters));
  CHECK(std::abs(counters.modelled_busy_ns - (expected + 600)) < 1e-6);
  bpsim_model wrong{1, -1, 0, 0, 0};
  CHECK_STATUS(bpsim_set_model(&wrong), BPSIM_INVALID, "memory_bandwidth is -1");
  wrong = {1, 0, 0, std::nan(""), 0};
  CHECK_STATUS(bpsim_set_model(&wrong), BPSIM_INVALID, "flop_rate");
  const bpsim_model off{};
  CHECK_OK(bpsim_set_model(&off));
  CHECK_OK(launch(session.stream, "free_of_charge", nothing, nullptr, 0, 1e9, 1e9));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_stream_modelled_ns(session.stream, &got));
  CHECK(std::abs(got - expected) < 1e-6);
}

TEST(a_launch_says_what_it_does_when_it_runs) {
  Session session([](bpsim_config& config) { config.model = {1, 1e9, 0, 1e9, 0}; });
  double amount = 100;
  int watched = 0;
  const auto work = [&](char*, size_t) {
    watched += bpsim_launch_is_watched();
    return bpsim_launch_detail(amount, 3 * amount, nullptr) == BPSIM_OK ? 0 : 1;
  };
  double got = 0;
  CHECK_OK(launch(session.stream, "by_data", work, nullptr, 0, 1e9, 1e9));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_stream_modelled_ns(session.stream, &got));
  CHECK(std::abs(got - 300) < 1e-6);
  // The next launch reports no detail and counts as queued.
  CHECK_OK(launch(session.stream, "by_request", [](char*, size_t) { return 0; }, nullptr, 0, 50, 0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_stream_modelled_ns(session.stream, &got));
  CHECK(std::abs(got - 350) < 1e-6);
  // Every replay of a graph reports its detail again.
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(launch(session.stream, "by_data", work, nullptr, 0, 1e9, 1e9));
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(session.stream, &graph));
  for (const double next : {1000.0, 10.0}) {
    amount = next;
    CHECK_OK(bpsim_graph_launch(session.stream, graph));
    CHECK_OK(bpsim_card_synchronize(0));
  }
  CHECK_OK(bpsim_stream_modelled_ns(session.stream, &got));
  CHECK(std::abs(got - (350 + 3000 + 30)) < 1e-6);
  CHECK_OK(bpsim_graph_destroy(graph));
  CHECK_EQ(watched, 3);
  const bpsim_model off{};
  CHECK_OK(bpsim_set_model(&off));
  CHECK_OK(launch(session.stream, "unwatched", work, nullptr, 0, 0, 0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_EQ(watched, 3);
  CHECK_EQ(bpsim_launch_is_watched(), 0);
  CHECK_STATUS(bpsim_launch_detail(1, 1, nullptr), BPSIM_INVALID, "inside a launch only");
}

TEST(a_trace_says_what_ran) {
  Session session;
  char* const device = allocate(session.stream, 64);
  CHECK_OK(launch(session.stream, "before", [] {}));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_trace_start(0, 3));
  CHECK_OK(launch(session.stream, "one", [](char*, size_t) { return 0; }, nullptr, 0, 8, 9));
  CHECK_OK(bpsim_memset_async(session.stream, device, 0, 64));
  CHECK_OK(launch(session.stream, "two", [] {}));
  CHECK_OK(launch(session.stream, "three", [] {}));
  CHECK_OK(bpsim_card_synchronize(0));
  bpsim_trace_entry entries[4];
  uint64_t count = 0, missed = 0;
  CHECK_OK(bpsim_trace_read(0, entries, 4, &count, &missed));
  CHECK_EQ(count, 3u);
  CHECK_EQ(missed, 1u);
  CHECK(std::strcmp(entries[0].name, "one") == 0 && std::strcmp(entries[1].name, "memset") == 0);
  CHECK_EQ(entries[0].number, 2u);
  CHECK_EQ(entries[1].number, 1u);
  CHECK_EQ(entries[2].number, 3u);
  CHECK_EQ(entries[0].stream, session.stream);
  CHECK(entries[0].bytes == 8 && entries[0].flops == 9 && entries[1].bytes == 64);
  CHECK(entries[0].start_ns <= entries[0].end_ns && entries[0].end_ns <= entries[1].start_ns);
  CHECK_OK(bpsim_trace_start(0, 0));
  CHECK_OK(launch(session.stream, "after", [] {}));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_trace_read(0, entries, 4, &count, &missed));
  CHECK_EQ(count, 0u);
}
