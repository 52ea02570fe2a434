// Tests capture and replay of graphs.
#include "helpers.h"

static bpsim_graph captured(bpsim_stream stream) {
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(stream, &graph));
  return graph;
}
static bpsim_capture_state capture_state(bpsim_stream stream) {
  bpsim_capture_state state = BPSIM_CAPTURE_NONE;
  CHECK_OK(bpsim_capture_status(stream, &state));
  return state;
}

TEST(a_capture_records_and_a_launch_replays) {
  Session session;
  int* const value = allocate<int>(session.stream, 4);
  int* const at = kernel(value);
  put(session.stream, value, 1);
  CHECK_EQ(int(capture_state(session.stream)), int(BPSIM_CAPTURE_NONE));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_EQ(int(capture_state(session.stream)), int(BPSIM_CAPTURE_ACTIVE));
  CHECK_OK(launch(session.stream, "add", [at] { *at += 1; }));
  CHECK_OK(launch(session.stream, "double", [at] { *at *= 2; }));
  const bpsim_graph graph = captured(session.stream);
  CHECK_EQ(get(session.stream, value), 1);
  CHECK_EQ(closures_alive.load(), 2);
  int expected = 1;
  const bpsim_stream other = new_stream();
  for (int i = 0; i < 5; ++i) {
    CHECK_OK(bpsim_graph_launch(i % 2 ? other : session.stream, graph));
    CHECK_OK(bpsim_card_synchronize(0));
    expected = (expected + 1) * 2;
    CHECK_EQ(get(session.stream, value), expected);
  }
  uint64_t size = 0;
  CHECK_OK(bpsim_graph_size(graph, &size));
  CHECK_EQ(size, 2u);
  bpsim_counters counters{};
  CHECK_OK(bpsim_card_counters(0, &counters));
  CHECK_EQ(counters.graph_launches, 5u);
  CHECK_EQ(counters.launches, 1u + 5 * 2);
  CHECK_STATUS(bpsim_graph_launch(session.other_card, graph), BPSIM_INVALID, "captured on card 0");
  CHECK_OK(bpsim_graph_destroy(graph));
  CHECK_EQ(closures_alive.load(), 0);
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_INVALID, "is not a graph");
  CHECK_STATUS(bpsim_graph_destroy(graph), BPSIM_INVALID, "is not a graph");
}

TEST(a_replay_reads_its_inputs_again) {
  Session session;
  int* const input = allocate<int>(session.stream, 4);
  int* const output = allocate<int>(session.stream, 4);
  void* pinned = nullptr;
  CHECK_OK(bpsim_host_alloc(4, &pinned));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, input, pinned, 4));
  CHECK_OK(bpsim_memset_async(session.stream, output, 0, 4));
  int *const from = kernel(input), *const to = kernel(output);
  CHECK_OK(launch(session.stream, "square", [from, to] { *to += *from * *from; }));
  const bpsim_graph graph = captured(session.stream);
  for (int i = 1; i < 4; ++i) {
    *static_cast<int*>(pinned) = i;
    CHECK_OK(bpsim_graph_launch(session.stream, graph));
    CHECK_EQ(get(session.stream, output), i * i);
  }
  // The graph keeps its pinned memory.
  CHECK_OK(bpsim_host_free(pinned));
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_EQ(get(session.stream, output), 9);
  CHECK_OK(bpsim_graph_destroy(graph));
}

TEST(memory_of_a_capture_is_nobody_elses) {
  Session session;
  const bpsim_stream other = new_stream();
  char* const cached = allocate(session.stream, 4096);
  CHECK_OK(bpsim_free(cached));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  char* const scratch = allocate(session.stream, 4096);
  CHECK(scratch != cached);
  CHECK(allocate(other, 4096) == cached);  // another stream is not part of the capture
  int* const at = kernel(reinterpret_cast<int*>(scratch));
  CHECK_OK(launch(session.stream, "scribble", [at] { *at = -1; }));
  CHECK_OK(bpsim_free(scratch));
  CHECK(allocate(session.stream, 4096) == scratch);  // within the capture it is used again
  char* const result = allocate(session.stream, 4096);
  CHECK_OK(bpsim_free(scratch));
  const bpsim_graph graph = captured(session.stream);
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().segments, 2u);
  // Everything allocated from now on lies elsewhere, and a replay does not write to it.
  std::vector<char*> others;
  for (int i = 0; i < 600; ++i) {
    others.push_back(allocate(session.stream, 4096));
    CHECK(others.back() != scratch);
  }
  for (char* each : others) CHECK_OK(bpsim_memset_async(session.stream, each, 1, 4096));
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  for (char* each : others) CHECK_EQ(int(get(session.stream, each)), 1);
  bpsim_pool pool = 0;
  bpsim_block_info info{};
  CHECK_OK(bpsim_graph_pool(graph, &pool));
  CHECK_OK(bpsim_pointer_info(result, &info));
  CHECK_EQ(info.pool, pool);
  CHECK_STATUS(bpsim_pool_destroy(pool), BPSIM_INVALID, "belongs to a graph");
  CHECK_OK(bpsim_graph_destroy(graph));
  CHECK_STATUS(bpsim_pool_destroy(pool), BPSIM_INVALID, "is not a pool");
  // Memory that the user holds outlives the graph; the rest returns to the general pool.
  CHECK_OK(bpsim_pointer_info(result, &info));
  CHECK_EQ(int(info.place), int(BPSIM_DEVICE));
  CHECK_OK(bpsim_free(result));
  for (char* each : others) CHECK_OK(bpsim_free(each));
  CHECK_OK(bpsim_free(cached));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().reserved, 0u);
}

TEST(graphs_can_share_a_pool) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  CHECK_OK(bpsim_capture_begin(session.stream, pool));
  char* const scratch = allocate(session.stream, 4096);
  CHECK_OK(bpsim_free(scratch));
  const bpsim_graph first = captured(session.stream);
  CHECK_OK(bpsim_capture_begin(session.stream, pool));
  CHECK(allocate(session.stream, 4096) == scratch);
  CHECK_OK(bpsim_free(scratch));
  const bpsim_graph second = captured(session.stream);
  CHECK_OK(bpsim_pool_destroy(pool));
  CHECK_OK(bpsim_graph_destroy(first));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().segments, 1u);
  CHECK_OK(bpsim_graph_destroy(second));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().segments, 0u);
  CHECK_OK(bpsim_pool_create(1, &pool));
  CHECK_STATUS(bpsim_capture_begin(session.stream, pool), BPSIM_INVALID, "the pool belongs to card 1");
}

// Each mistake is refused at once, and the capture cannot end with a graph.
TEST(mistakes_spoil_a_capture) {
  Session session;
  static bpsim_stream stream, other;
  static char* device;
  static char host[64];
  static bpsim_event outside, inside;
  static bpsim_graph ready;
  stream = session.stream;
  other = new_stream();
  device = allocate(stream, 64);
  outside = new_event();
  inside = new_event();
  CHECK_OK(launch(other, "work", [] {}));
  CHECK_OK(bpsim_event_record(outside, other));
  CHECK_OK(bpsim_stream_synchronize(other));
  CHECK_OK(bpsim_capture_begin(stream, 0));
  ready = captured(stream);
  const struct {
    const char* text;
    bpsim_status (*make)();
  } mistakes[] = {
      {"bpsim_stream_synchronize was called while stream 0 of card 0 is capturing",
       [] { return bpsim_stream_synchronize(stream); }},
      {"bpsim_stream_synchronize was called", [] { return bpsim_stream_synchronize(other); }},
      {"bpsim_card_synchronize was called", [] { return bpsim_card_synchronize(0); }},
      {"bpsim_stream_query was called", [] { return bpsim_stream_query(stream); }},
      {"bpsim_copy was called", [] { return bpsim_copy(stream, BPSIM_DEVICE_TO_HOST, host, device, 64); }},
      {"pageable host memory", [] { return bpsim_copy_async(stream, BPSIM_HOST_TO_DEVICE, device, host, 64); }},
      {"pageable host memory", [] { return bpsim_copy_async(stream, BPSIM_DEVICE_TO_HOST, host, device, 64); }},
      {"work outside the capture", [] { return bpsim_stream_wait_event(stream, outside); }},
      {"marks a place in a graph", [] { return bpsim_stream_wait_event(other, inside); }},
      {"marks a place in a graph", [] { return bpsim_event_synchronize(inside); }},
      {"marks a place in a graph", [] { return bpsim_event_query(inside); }},
      {"bpsim_event_synchronize was called", [] { return bpsim_event_synchronize(outside); }},
      {"a graph cannot be part of another", [] { return bpsim_graph_launch(stream, ready); }},
  };
  for (const auto& mistake : mistakes) {
    CHECK_OK(bpsim_capture_begin(stream, 0));
    CHECK_OK(launch(stream, "fine", [] {}));
    CHECK_OK(bpsim_event_record(inside, stream));
    CHECK_OK(bpsim_stream_wait_event(stream, inside));  // its own event: no effect
    const bpsim_status status = mistake.make();
    if (status != BPSIM_CAPTURE || !std::strstr(bpsim_last_error(), mistake.text))
      FAILED("%s instead of '%s': %s\n", bpsim_status_name(status), mistake.text, bpsim_last_error());
    CHECK_EQ(int(capture_state(stream)), int(BPSIM_CAPTURE_INVALID));
    CHECK_STATUS(launch(stream, "late", [] {}), BPSIM_CAPTURE, "the capture is invalid");
    bpsim_graph none = 0;
    const bpsim_status end = bpsim_capture_end(stream, &none);
    if (end != BPSIM_CAPTURE || none != 0 || !std::strstr(bpsim_last_error(), mistake.text))
      FAILED("the end returned %s instead of '%s': %s\n", bpsim_status_name(end), mistake.text, bpsim_last_error());
    CHECK_EQ(closures_alive.load(), 0);
    CHECK_EQ(int(capture_state(stream)), int(BPSIM_CAPTURE_NONE));
  }
  CHECK_STATUS(bpsim_event_synchronize(inside), BPSIM_CAPTURE, "Record it again outside");
  bpsim_graph none = 0;
  CHECK_STATUS(bpsim_capture_end(stream, &none), BPSIM_CAPTURE, "is not capturing");
  CHECK_OK(bpsim_capture_begin(stream, 0));
  CHECK_STATUS(bpsim_capture_begin(stream, 0), BPSIM_CAPTURE, "is already capturing");
  CHECK_OK(bpsim_capture_begin(other, 0));
  CHECK_STATUS(bpsim_stream_destroy(other), BPSIM_INVALID, "end the capture");
  CHECK_OK(bpsim_graph_destroy(captured(other)));
  CHECK_OK(bpsim_graph_destroy(captured(stream)));
  CHECK_OK(bpsim_stream_synchronize(stream));
  // Waiting for the other card is allowed while this one is capturing.
  CHECK_OK(bpsim_capture_begin(stream, 0));
  CHECK_OK(bpsim_card_synchronize(1));
  CHECK_OK(bpsim_graph_destroy(captured(stream)));
}

TEST(a_replay_with_memory_that_is_gone_is_refused) {
  Session session;
  int* const weight = allocate<int>(session.stream, 4);
  int* const output = allocate<int>(session.stream, 4);
  const bpsim_range ranges[] = {{output, 4, BPSIM_OTHER, 1}, {weight, 4, BPSIM_OTHER, 0}};
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(launch(session.stream, "matmul", [](char*, size_t) { return 0; }, ranges, 2));
  const bpsim_graph graph = captured(session.stream);
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_OK(bpsim_free(weight));
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_INVALID,
               "'matmul' (task 0 of the graph) uses the allocation");
  // The same address again is not the same allocation.
  CHECK(allocate<int>(session.stream, 4) == weight);
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_INVALID, "was freed or suspended");
  CHECK_OK(bpsim_graph_destroy(graph));
  // Freed memory cannot be captured.
  CHECK_OK(bpsim_free(weight));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_STATUS(launch(session.stream, "late", [](char*, size_t) { return 0; }, ranges, 2), BPSIM_INVALID,
               "late: an input");
  bpsim_graph none = 0;
  CHECK_STATUS(bpsim_capture_end(session.stream, &none), BPSIM_CAPTURE, "is freed memory of card 0");
}

TEST(a_graph_does_not_run_asleep) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  int* const weight = allocate<int>(session.stream, 4, pool);
  const bpsim_range range{weight, 4, BPSIM_OTHER, 0};
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  int* const result = allocate<int>(session.stream, 4);
  int *const from = kernel(weight), *const to = kernel(result);
  CHECK_OK(launch(session.stream, "copy", [from, to](char*, size_t) {
    *to = *from;
    return 0;
  }, &range, 1));
  const bpsim_graph graph = captured(session.stream);
  CHECK_OK(bpsim_pool_suspend(pool));
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_INVALID, "freed or suspended");
  CHECK_OK(bpsim_pool_resume(pool));
  put(session.stream, weight, 11);
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_EQ(get(session.stream, result), 11);
  bpsim_pool own = 0;
  CHECK_OK(bpsim_graph_pool(graph, &own));
  CHECK_OK(bpsim_pool_suspend(own));
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_INVALID, "the graph's pool is suspended");
  CHECK_STATUS(bpsim_graph_destroy(graph), BPSIM_INVALID, "resume it first");
  // Left suspended: the shutdown must handle it.
}

TEST(a_graph_may_be_destroyed_while_it_runs) {
  Session session;
  std::atomic<int> ran{0};
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(bpsim_free(allocate(session.stream, 4096)));
  for (int i = 0; i < 10; ++i) CHECK_OK(launch(session.stream, "count", [&ran] { ++ran; }));
  const bpsim_graph graph = captured(session.stream);
  Gate gate(session.stream);
  for (int i = 0; i < 3; ++i) CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_OK(bpsim_graph_destroy(graph));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().segments, 1u);
  gate.open();
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(ran.load(), 30);
  CHECK_EQ(closures_alive.load(), 0);
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().segments, 0u);
}

TEST(a_graph_that_fails_drops_its_rest) {
  Session session;
  std::atomic<int> ran{0};
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(launch(session.stream, "count", [&ran] { ++ran; }));
  CHECK_OK(launch(session.stream, "breaks", [](char*, size_t) { return 1; }));
  CHECK_OK(launch(session.stream, "count", [&ran] { ++ran; }));
  const bpsim_graph graph = captured(session.stream);
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_STATUS(bpsim_stream_synchronize(session.stream), BPSIM_LAUNCH_FAILED, "'breaks' (number 2");
  CHECK_EQ(ran.load(), 1);
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_LAUNCH_FAILED, "breaks");
  CHECK_OK(bpsim_graph_destroy(graph));
}
