// Tests fault injection.
#include "helpers.h"

TEST(fault_specs_are_checked) {
  const char* const good[] = {
      "",
      "  ",
      "oom@alloc=17;fail@launch=250;hang@launch=300,stream=0;lost@launch=400,card=1",
      "corrupt@launch=matmul*,nth=3,kind=nan ; corrupt@copy=5,kind=bitflip",
      "corrupt@launch=aten::mm.out,elements=7,times=always",
      "lost@alloc=1",
      "fail@copy=copy_d2h,times=2",
  };
  for (const char* spec : good) CHECK_OK(bpsim_faults_check(spec));
  const struct {
    const char* spec;
    const char* text;
  } wrong[] = {
      {"fail", "begins with kind@site=which"},
      {"fail@launch", "begins with kind@site=which"},
      {"boom@launch=1", "'boom' is not a kind of fault; use one of oom, fail, hang, lost, corrupt"},
      {"fail@lunch=1", "'lunch' is not a site; use one of alloc, launch, copy"},
      {"fail@launch=", "'' is neither a number nor the name"},
      {"fail@launch=-3", "'-3' is neither a number nor the name"},
      {"fail@launch=3x", "'3x' is neither a number nor the name"},
      {"fail@launch=99999999999999999999999", "is neither a number"},
      {"fail@launch=0", "counting begins at 1"},
      {"fail@launch=mm,nth=0", "counting begins at 1"},
      {"fail@launch=mm,nth=x", "nth must be a number, not 'x'"},
      {"fail@launch=5,nth=2", "nth= needs a name"},
      {"oom@launch=1", "only an allocation can be out of memory"},
      {"corrupt@alloc=1", "an allocation can only be oom or lost"},
      {"oom@alloc=1,stream=0", "allocations have no name and no stream="},
      {"oom@alloc=matmul", "allocations have no name"},
      {"fail@launch=1,kind=nan", "'kind' is a key of corrupt only"},
      {"corrupt@launch=1,kind=zero", "'zero' is not a kind of corruption; use one of nan, bitflip"},
      {"corrupt@launch=1,elements=0", "elements must be at least 1"},
      {"fail@launch=1,times=0", "times must be a number of at least 1, or always"},
      {"fail@launch=1,card=x", "'x' is not a card number"},
      {"fail@launch=1,card=99", "there is no card 99"},
      {"fail@launch=1,stream=64", "there is no stream 64"},
      {"fail@launch=1,card=0,card=1", "'card' is given twice"},
      {"fail@launch=1,color=red", "'color' is not a key; use one of card, stream, nth, times, kind, elements"},
      {"fail@launch=1,card", "'card' is not of the form key=value"},
      {"fail@launch=1;;fail@launch=2", "an empty rule"},
      {"fail@launch=1;", "an empty rule"},
      {"fail@launch=1;lost@copy=z z", "fault 'lost@copy=z z'"},
  };
  for (const auto& each : wrong) {
    const bpsim_status status = bpsim_faults_check(each.spec);
    if (status != BPSIM_INVALID || !std::strstr(bpsim_last_error(), each.text))
      FAILED("'%s': %s instead of '%s': %s\n", each.spec, bpsim_status_name(status), each.text, bpsim_last_error());
  }
  CHECK_STATUS(bpsim_faults_check("boom@launch=1"), BPSIM_INVALID, "An example: oom@alloc=17;");
  bpsim_config config;
  bpsim_config_default(&config);
  config.faults = "fail@launch=1,card=2";
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "a rule names card 2, but there are 2");
  config.faults = "rubbish";
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "fault 'rubbish'");
  CHECK_EQ(bpsim_is_initialized(), 0);
  Session session;
  // If one rule is wrong, none is added.
  CHECK_STATUS(bpsim_faults_add("fail@launch=1;rubbish"), BPSIM_INVALID, "rubbish");
  CHECK_OK(launch(session.stream, "fine", [] {}));
  CHECK_OK(bpsim_card_synchronize(0));
}

TEST(the_nth_allocation_is_out_of_memory) {
  Session session([](bpsim_config& config) { config.faults = "oom@alloc=3,card=0"; });
  void* pointer = nullptr;
  for (int i = 1; i <= 5; ++i) {
    CHECK_OK(bpsim_alloc(session.other_card, 0, 100, &pointer));
    if (i == 3)
      CHECK_STATUS(bpsim_alloc(session.stream, 0, 100, &pointer), BPSIM_OUT_OF_MEMORY,
                   "out of memory (an injected fault): requested 100 bytes");
    else
      CHECK_OK(bpsim_alloc(session.stream, 0, 100, &pointer));
  }
  uint64_t struck = 0;
  CHECK_OK(bpsim_faults_struck(&struck));
  CHECK_EQ(struck, 1u);
}

TEST(launches_fail_by_number_and_by_name) {
  Session session([](bpsim_config& config) { config.faults = "fail@launch=3;fail@copy=2"; });
  for (int i = 0; i < 3; ++i) CHECK_OK(launch(session.stream, "step", [] {}));
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED,
               "launch 'step' (number 3 of the card, on stream 0) failed: an injected fault");
  CHECK_OK(bpsim_card_reset(0));
  char* const device = allocate(session.stream, 16);
  char host[16] = {};
  CHECK_OK(bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 16));
  CHECK_STATUS(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 16), BPSIM_LAUNCH_FAILED,
               "copy 'copy_d2h' (number 2 of the card");
  CHECK_OK(bpsim_card_reset(0));
  CHECK_OK(bpsim_faults_clear());
  CHECK_OK(bpsim_faults_add("fail@launch=m*l_b*16,nth=2,times=2,card=1,stream=0"));
  const bpsim_stream side = new_stream(1);
  std::atomic<int> ran{0};
  for (int i = 0; i < 5; ++i) {
    CHECK_OK(launch(session.stream, "matmul_bf16", [&] { ++ran; }));   // on another card
    CHECK_OK(bpsim_card_synchronize(0));
    CHECK_OK(launch(side, "matmul_bf16", [&] { ++ran; }));             // on another stream
    CHECK_OK(launch(session.other_card, "matmul_f32", [&] { ++ran; }));
    CHECK_OK(bpsim_card_synchronize(1));
    CHECK_OK(launch(session.other_card, "matmul_bf16", [&] { ++ran; }));
    const bool struck = i == 1 || i == 2;
    CHECK_STATUS(bpsim_card_synchronize(1), struck ? BPSIM_LAUNCH_FAILED : BPSIM_OK, "matmul_bf16");
    if (struck) CHECK_OK(bpsim_card_reset(1));
  }
  CHECK_EQ(ran.load(), 5 * 4 - 2);
}

TEST(a_hanging_stream_times_out_and_is_released) {
  Session session([](bpsim_config& config) {
    config.faults = "hang@launch=attention,nth=2";
    config.sync_timeout_ms = 500;
  });
  std::atomic<int> ran{0};
  char* const device = allocate(session.stream, 64);
  CHECK_OK(bpsim_memset_async(session.stream, device, 7, 64));
  for (int i = 0; i < 3; ++i) CHECK_OK(launch(session.stream, "attention", [&ran] { ++ran; }));
  eventually([&] { return ran.load() == 1; });
  const bpsim_stream other = new_stream();
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_OK(launch(other, "dependent", [&ran] { ++ran; }));
  const char* const where = "it hangs in 'attention' (number 2)";
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_TIMEOUT, where);
  CHECK_STATUS(bpsim_event_synchronize(event), BPSIM_TIMEOUT, where);
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_TIMEOUT, where);
  CHECK_STATUS(bpsim_stream_query(session.stream), BPSIM_NOT_READY, "");
  CHECK_STATUS(bpsim_stream_synchronize(other), BPSIM_TIMEOUT,
               "it hangs in a wait for card 0, stream 0, which is in 'attention' (number 2)");
  // A copy that times out does not access the caller's memory afterwards.
  char kept[64] = {};
  CHECK_STATUS(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, kept, device, 64), BPSIM_TIMEOUT, where);
  {
    std::unique_ptr<char[]> mine(new char[64]());
    CHECK_STATUS(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, mine.get(), device, 64), BPSIM_TIMEOUT, where);
    CHECK_STATUS(bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, mine.get(), 64), BPSIM_TIMEOUT, where);
  }
  // A full queue does not block forever either.
  bpsim_status status = BPSIM_OK;
  for (int i = 0; i < 2000 && status == BPSIM_OK; ++i) status = launch(session.stream, "more", [] {});
  CHECK_STATUS(status, BPSIM_TIMEOUT, where);
  CHECK_OK(bpsim_release_hangs(0));
  CHECK_OK(bpsim_set_sync_timeout(0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_EQ(ran.load(), 4);
  CHECK_EQ(int(kept[0]), 0);
  CHECK_STATUS(bpsim_release_hangs(5), BPSIM_INVALID, "there is no card 5");
}

TEST(a_hang_that_was_waited_for_is_told_at_once_to_all_that_it_holds_up) {
  Session session([](bpsim_config& config) {
    config.faults = "hang@launch=stuck";
    config.sync_timeout_ms = 500;
  });
  const bpsim_stream other = new_stream();
  CHECK_OK(launch(session.stream, "stuck", [] {}));
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_STATUS(bpsim_stream_synchronize(other), BPSIM_TIMEOUT, "it hangs in a wait for card 0, stream 0");
  CHECK_OK(bpsim_set_sync_timeout(3600 * 1000));
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_TIMEOUT, "it hangs in 'stuck'");
  CHECK_STATUS(bpsim_stream_synchronize(other), BPSIM_TIMEOUT, "it hangs in a wait for card 0, stream 0");
  CHECK_OK(bpsim_release_hangs(0));
  CHECK_OK(bpsim_card_synchronize(0));
}

TEST(a_hang_that_was_waited_for_is_told_at_once_to_streams_that_wait_for_it) {
  Session session([](bpsim_config& config) {
    config.faults = "hang@launch=stuck";
    config.sync_timeout_ms = 500;
  });
  const bpsim_stream streams[] = {session.stream, new_stream(), session.other_card, new_stream()};
  const bpsim_event before = new_event();
  CHECK_OK(launch(session.stream, "fine", [] {}));
  CHECK_OK(bpsim_event_record(before, session.stream));
  CHECK_OK(launch(session.stream, "stuck", [] {}));
  // A chain of four: each stream waits for the previous one.
  for (int i = 1; i < 4; ++i) {
    const bpsim_event event = new_event();
    CHECK_OK(bpsim_event_record(event, streams[i - 1]));
    CHECK_OK(bpsim_stream_wait_event(streams[i], event));
    CHECK_OK(launch(streams[i], "dependent", [] {}));
  }
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_TIMEOUT, "it hangs in 'stuck'");
  CHECK_OK(bpsim_set_sync_timeout(3600 * 1000));
  for (int i = 3; i > 0; --i)
    CHECK_STATUS(bpsim_stream_synchronize(streams[i]), BPSIM_TIMEOUT, "card 0, stream 0, which is in 'stuck'");
  CHECK_STATUS(bpsim_card_synchronize(1), BPSIM_TIMEOUT, "it hangs in a wait for card 0");
  // Work before the hang is done, and so is work that waits only for that.
  CHECK_OK(bpsim_event_synchronize(before));
  const bpsim_stream free = new_stream(1);
  CHECK_OK(bpsim_stream_wait_event(free, before));
  CHECK_OK(launch(free, "independent", [] {}));
  CHECK_OK(bpsim_stream_synchronize(free));
  CHECK_STATUS(bpsim_stream_synchronize(streams[1]), BPSIM_TIMEOUT, "which is in 'stuck'");
  CHECK_OK(bpsim_release_hangs(0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_card_synchronize(1));
}

TEST(a_hang_that_is_over_is_not_told_of_later_work) {
  Session session([](bpsim_config& config) {
    config.faults = "hang@launch=stuck";
    config.sync_timeout_ms = 2000;
  });
  // The first stream finishes as many entries before the hang as the other one, later, before its slow launch.
  for (int i = 0; i < 3; ++i) CHECK_OK(launch(session.stream, "fine", [] {}));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_OK(launch(session.stream, "stuck", [] {}));
  const bpsim_stream other = new_stream();
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_STATUS(bpsim_stream_synchronize(other), BPSIM_TIMEOUT, "it hangs in a wait for card 0, stream 0");
  CHECK_OK(bpsim_release_hangs(0));
  CHECK_OK(bpsim_card_synchronize(0));
  std::atomic<int> reached{0};
  for (int i = 1; i <= 6; ++i) {
    CHECK_OK(launch(other, "slow", [&reached, i] {
      reached.store(i);
      const timespec time{0, 100000000};
      nanosleep(&time, nullptr);
    }));
    eventually([&] { return reached.load() == i; });
    CHECK_OK(bpsim_stream_synchronize(other));
  }
}

TEST(slow_work_is_no_hang) {
  Session session([](bpsim_config& config) { config.sync_timeout_ms = 4000; });
  // Each is far below the time-out, which a busy machine stretches, and nine of them are above it.
  const auto nap = [] {
    const timespec time{0, 500000000};
    nanosleep(&time, nullptr);
  };
  // On one stream while another waits, and within a graph.
  for (int i = 0; i < 3; ++i) CHECK_OK(launch(session.stream, "nap", nap));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  for (int i = 0; i < 9; ++i) CHECK_OK(launch(session.stream, "nap", nap));
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(session.stream, &graph));
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  const bpsim_stream other = new_stream();
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_OK(bpsim_stream_synchronize(other));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
}

TEST(a_lost_card_answers_nothing_else) {
  Session session([](bpsim_config& config) { config.faults = "lost@launch=2,card=0"; });
  char host[64] = {};
  char* const device = allocate(session.stream, 64);
  const bpsim_event event = new_event(true);
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(session.stream, &graph));
  const bpsim_stream extra = new_stream();
  int ran = 0;
  for (int i = 0; i < 4; ++i) {
    const bpsim_status status = launch(session.stream, "step", [&ran] { ++ran; });
    CHECK(status == BPSIM_OK || status == BPSIM_LOST);
  }
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_LOST,
               "card 0 is lost (by an injected fault, at card 0: launch 'step' (number 2");
  void* pointer = nullptr;
  bpsim_stream stream = 0;
  bpsim_memory_stats stats;
  bpsim_counters counters;
  uint64_t number = 0;
  double time = 0;
  const bpsim_status all[] = {
      bpsim_card_synchronize(0), bpsim_card_reset(0), bpsim_stream_query(session.stream),
      bpsim_stream_synchronize(extra), bpsim_alloc(session.stream, 0, 16, &pointer), bpsim_free(device),
      bpsim_record_stream(device, extra), bpsim_empty_cache(0), bpsim_memory_statistics(0, &stats),
      bpsim_reset_peaks(0), bpsim_pool_create(0, &pool), bpsim_pool_suspend(pool), bpsim_pool_resume(pool),
      bpsim_default_stream(0, &stream), bpsim_stream_create(0, &stream), launch(session.stream, "late", [] {}),
      bpsim_card_counters(0, &counters), bpsim_stream_modelled_ns(session.stream, &time),
      bpsim_event_record(event, session.stream), bpsim_stream_wait_event(session.stream, event),
      bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 64),
      bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 64),
      bpsim_memset_async(session.stream, device, 0, 64), bpsim_capture_begin(session.stream, 0),
      bpsim_graph_launch(session.stream, graph), bpsim_lose_card(0), bpsim_trace_start(0, 1),
      bpsim_host_resident(0, &number), bpsim_stream_destroy(extra), bpsim_pool_destroy(pool)};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
    if (all[i] != BPSIM_LOST) FAILED("call %zu returned %s\n", i, bpsim_status_name(all[i]));
  CHECK_OK(bpsim_event_destroy(event));
  CHECK_OK(bpsim_graph_destroy(graph));
  // No call waits for a lost card, so its queued work is destroyed without one.
  eventually([] { return closures_alive.load() == 0; });
  CHECK_EQ(ran, 1);
  // The other card still works.
  char* const there = allocate(session.other_card, 64);
  CHECK_OK(bpsim_copy(session.other_card, BPSIM_HOST_TO_DEVICE, there, host, 64));
  CHECK_OK(bpsim_faults_add("lost@alloc=2,card=1"));
  CHECK_OK(bpsim_alloc(session.other_card, 0, 16, &pointer));
  CHECK_STATUS(bpsim_alloc(session.other_card, 0, 16, &pointer), BPSIM_LOST, "at an allocation");
}

TEST(losing_a_card_ends_waits) {
  Session session([](bpsim_config& config) { config.faults = "hang@launch=stuck"; });
  CHECK_OK(launch(session.stream, "stuck", [] {}));
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(bpsim_stream_wait_event(session.other_card, event));
  bool ran = false;
  CHECK_OK(launch(session.other_card, "goes_on", [&ran] { ran = true; }));
  CHECK_OK(launch(new_stream(), "loser", [] { bpsim_lose_card(0); }));
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_LOST, "by bpsim_lose_card");
  CHECK_OK(bpsim_card_synchronize(1));
  CHECK(ran);
}
