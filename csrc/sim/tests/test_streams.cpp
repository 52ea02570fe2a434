// Tests streams, launches and their failures.
#include <stdexcept>
#include <thread>

#include "helpers.h"

TEST(launches_run_in_order) {
  Session session;
  std::vector<int> order;  // only the worker writes; the synchronization must make it visible here
  for (int i = 0; i < 5000; ++i) CHECK_OK(launch(session.stream, "push", [&order, i] { order.push_back(i); }));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(order.size(), 5000u);
  for (int i = 0; i < 5000; ++i) CHECK_EQ(order[static_cast<size_t>(i)], i);
  CHECK_EQ(closures_alive.load(), 0);
  bpsim_counters counters{};
  CHECK_OK(bpsim_card_counters(0, &counters));
  CHECK_EQ(counters.launches, 5000u);
  CHECK_EQ(counters.dropped, 0u);
}

TEST(streams_run_at_the_same_time) {
  Session session;
  const bpsim_stream other = new_stream();
  Gate gate(session.stream);
  gate.wait_until_reached();
  std::atomic<bool> ran{false};
  CHECK_OK(launch(other, "flag", [&] { ran = true; }));
  CHECK_OK(bpsim_stream_synchronize(other));
  CHECK(ran.load());
  CHECK_OK(bpsim_stream_query(other));
  CHECK_STATUS(bpsim_stream_query(session.stream), BPSIM_NOT_READY, "");
  gate.open();
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_stream_query(session.stream));
}

TEST(threads_submit_to_one_stream) {
  Session session;
  int count = 0;  // not atomic: the stream orders the launches
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        CHECK_OK(launch(session.stream, "count", [&count] { ++count; }));
        if (i % 100 == 0) CHECK_OK(bpsim_stream_synchronize(session.stream));
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_EQ(count, 4000);
}

TEST(a_step_like_vllm_has) {
  // Launches, small copies and synchronization in turn, as fast as possible: a lost wake-up would hang here.
  Session session;
  int* const device = allocate<int>(session.stream, 4);
  int* const at = kernel(device);
  int32_t expected = 0;
  for (int step = 0; step < 300; ++step) {
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, &expected, 4));
    for (int i = 0; i < 10; ++i) CHECK_OK(launch(session.stream, "add", [at] { ++*at; }));
    expected += 10;
    if (step % 3 == 0)
      for (int i = 0; i < 50; ++i) doze();  // the worker falls asleep
    int32_t got = 0;
    CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, &got, device, 4));
    CHECK_EQ(got, expected);
    if (step == 100) break;
  }
}

TEST(streams_have_names_that_go_stale) {
  Session session;
  int32_t number = -1;
  CHECK_OK(bpsim_stream_card(session.other_card, &number));
  CHECK_EQ(number, 1);
  CHECK_OK(bpsim_stream_index(session.stream, &number));
  CHECK_EQ(number, 0);
  std::vector<bpsim_stream> all;
  for (int i = 1; i < BPSIM_MAX_STREAMS; ++i) all.push_back(new_stream());
  CHECK_OK(bpsim_stream_index(all.back(), &number));
  CHECK_EQ(number, BPSIM_MAX_STREAMS - 1);
  bpsim_stream one_more = 0;
  CHECK_STATUS(bpsim_stream_create(0, &one_more), BPSIM_INVALID, "already has 64 streams");
  bool ran = false;
  CHECK_OK(launch(all[3], "late", [&ran] { ran = true; }));
  CHECK_OK(bpsim_stream_destroy(all[3]));
  CHECK(ran);
  CHECK_STATUS(bpsim_stream_synchronize(all[3]), BPSIM_INVALID, "is not a stream");
  CHECK_STATUS(bpsim_stream_destroy(all[3]), BPSIM_INVALID, "is not a stream");
  const bpsim_stream renewed = new_stream();
  CHECK(renewed != all[3]);
  CHECK_OK(launch(renewed, "nothing", [] {}));
  CHECK_OK(bpsim_stream_synchronize(renewed));
  CHECK_STATUS(bpsim_stream_destroy(session.stream), BPSIM_INVALID, "default stream");
  CHECK_STATUS(bpsim_stream_synchronize(0), BPSIM_INVALID, "is not a stream");
  CHECK_STATUS(bpsim_stream_synchronize(~uint64_t{0}), BPSIM_INVALID, "is not a stream");
  CHECK_STATUS(bpsim_card_synchronize(2), BPSIM_INVALID, "there is no card 2: there are 2");
  CHECK_STATUS(bpsim_card_synchronize(-1), BPSIM_INVALID, "there is no card -1");
}

TEST(a_failed_launch_is_told_at_the_next_synchronization) {
  Session session;
  int ran = 0;
  Gate gate(session.stream);
  CHECK_OK(launch(session.stream, "bad_one", [](char* error, size_t bytes) {
    std::snprintf(error, bytes, "the reason");
    return 1;
  }));
  CHECK_OK(launch(session.stream, "after", [&ran] { ++ran; }));
  CHECK_OK(launch(session.stream, "worse", [](char*, size_t) { return 2; }));
  gate.open();
  bpsim_counters counters{};
  eventually([&] { return bpsim_card_counters(0, &counters) == BPSIM_OK && counters.dropped == 2; });
  // Until a synchronizing call, work is accepted and dropped.
  for (int i = 0; i < 100; ++i) CHECK_OK(launch(session.stream, "after", [&ran] { ++ran; }));
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_LAUNCH_FAILED,
               "card 0: launch 'bad_one' (number 2 of the card, on stream 0) failed: the reason");
  CHECK_EQ(ran, 0);
  CHECK_EQ(closures_alive.load(), 0);
  // From then on every call returns the failure.
  CHECK_STATUS(launch(session.stream, "after", [&ran] { ++ran; }), BPSIM_LAUNCH_FAILED, "bad_one");
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED, "bad_one");
  CHECK_STATUS(bpsim_stream_query(session.stream), BPSIM_LAUNCH_FAILED, "bad_one");
  CHECK_STATUS(launch(new_stream(), "after", [&ran] { ++ran; }), BPSIM_LAUNCH_FAILED, "bad_one");
  CHECK_EQ(closures_alive.load(), 0);
  char* const memory_still_works = allocate(session.stream, 16);
  CHECK_OK(bpsim_free(memory_still_works));
  // The other card is not affected.
  CHECK_OK(launch(session.other_card, "fine", [&ran] { ++ran; }));
  CHECK_OK(bpsim_card_synchronize(1));
  CHECK_EQ(ran, 1);
  CHECK_OK(bpsim_card_counters(0, &counters));
  CHECK_EQ(counters.dropped, 102u);
  CHECK_OK(bpsim_card_reset(0));
  CHECK_OK(launch(session.stream, "again", [&ran] { ++ran; }));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(ran, 2);
}

TEST(exceptions_and_silence_are_failures) {
  Session session;
  CHECK_OK(launch(session.stream, "thrower", []() { throw std::runtime_error("no such luck"); }));
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED, "it threw an exception: no such luck");
  CHECK_OK(bpsim_card_reset(0));
  CHECK_OK(launch(session.stream, "odd", []() { throw 5; }));
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED, "not a std::exception");
  CHECK_OK(bpsim_card_reset(0));
  CHECK_OK(launch(session.stream, "mute", [](char*, size_t) { return -1; }));
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_STATUS(bpsim_event_synchronize(event), BPSIM_LAUNCH_FAILED, "without a reason");
}

TEST(a_launch_cannot_submit_or_wait) {
  Session session;
  const bpsim_stream other = new_stream();
  const bpsim_event event = new_event();
  char* const device = allocate(session.stream, 64);
  std::atomic<int> refused{0};
  CHECK_OK(launch(session.stream, "nosy", [&] {
    char host[64];
    const bpsim_status all[] = {bpsim_stream_synchronize(session.stream),
                                bpsim_stream_synchronize(other),
                                bpsim_card_synchronize(0),
                                launch(other, "inner", [] {}),
                                bpsim_event_record(event, session.stream),
                                bpsim_stream_wait_event(other, event),
                                bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 64),
                                bpsim_copy_async(other, BPSIM_HOST_TO_DEVICE, device, host, 64),
                                bpsim_memset_async(other, device, 0, 64),
                                bpsim_capture_begin(other, 0),
                                bpsim_card_reset(0),
                                bpsim_shutdown()};
    for (const bpsim_status status : all)
      if (status == BPSIM_INVALID && std::strstr(bpsim_last_error(), "inside a launch")) ++refused;
    void* extra = nullptr;
    if (bpsim_alloc(session.stream, 0, 100, &extra) == BPSIM_OK && bpsim_free(extra) == BPSIM_OK) ++refused;
  }));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(refused.load(), 13);
  CHECK_EQ(closures_alive.load(), 0);
}

TEST(a_launch_needs_a_name_and_a_function) {
  Session session;
  static int destroyed;
  destroyed = 0;
  bpsim_launch what{};
  what.arg = &destroyed;
  what.destroy = [](void* arg) { ++*static_cast<int*>(arg); };
  CHECK_STATUS(bpsim_enqueue(session.stream, &what), BPSIM_INVALID, "needs a name and a function");
  CHECK_STATUS(bpsim_enqueue(12345, &what), BPSIM_INVALID, "is not a stream");
  what.name = "counted";
  what.function = [](void*, char*, size_t) { return 0; };
  what.range_count = 1;
  CHECK_STATUS(bpsim_enqueue(session.stream, &what), BPSIM_INVALID, "ranges if range_count is not 0");
  what.range_count = 0;
  CHECK_OK(bpsim_enqueue(session.stream, &what));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(destroyed, 4);
}

TEST(checked_launches_must_use_live_memory) {
  Session session([](bpsim_config& config) { config.check_launches = 1; });
  char* const device = allocate(session.stream, 1000);
  char host[16];
  bpsim_range range{device, 1024, BPSIM_F32, 1};
  const auto nothing = [](char*, size_t) { return 0; };
  CHECK_OK(launch(session.stream, "fits", nothing, &range, 1));
  range.bytes = 1025;
  CHECK_STATUS(launch(session.stream, "wide", nothing, &range, 1), BPSIM_INVALID,
               "wide: an output");
  range = {host, 16, BPSIM_F32, 0};
  CHECK_STATUS(launch(session.stream, "astray", nothing, &range, 1), BPSIM_INVALID, "but is host memory");
  CHECK_OK(bpsim_free(device));
  range = {device, 16, BPSIM_F32, 0};
  CHECK_STATUS(launch(session.stream, "late", nothing, &range, 1), BPSIM_INVALID, "is freed memory of card 0");
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(closures_alive.load(), 0);
}

TEST(workers_can_be_prepared) {
  static std::atomic<int> prepared;
  static thread_local int marked;
  prepared = 0;
  Session session([](bpsim_config& config) {
    config.worker_start = [](int32_t card, uint64_t, void* arg) {
      marked = card + 1;
      static_cast<std::atomic<int>*>(arg)->fetch_add(1);
    };
    config.worker_start_arg = &prepared;
  });
  CHECK_EQ(prepared.load(), 0);  // threads start with their first work
  std::atomic<int> seen{0};
  CHECK_OK(launch(session.other_card, "look", [&] { seen = marked; }));
  CHECK_OK(bpsim_card_synchronize(1));
  CHECK_EQ(seen.load(), 2);
  CHECK_EQ(prepared.load(), 1);
}
