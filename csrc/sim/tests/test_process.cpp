// Tests start, shutdown and fork, and defines the scenarios that a test observes from outside the process.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "helpers.h"

TEST(nothing_works_before_init_and_after_shutdown) {
  for (int round = 0; round < 2; ++round) {
    int32_t count = 0;
    void* pointer = nullptr;
    CHECK_EQ(bpsim_is_initialized(), 0);
    CHECK_STATUS(bpsim_card_count(&count), BPSIM_NOT_INITIALIZED, "call bpsim_init first");
    CHECK_STATUS(bpsim_alloc(1, 0, 16, &pointer), BPSIM_NOT_INITIALIZED, "call bpsim_init first");
    CHECK_STATUS(launch(1, "early", [] {}), BPSIM_NOT_INITIALIZED, "call bpsim_init first");
    CHECK_EQ(closures_alive.load(), 0);
    CHECK_OK(bpsim_shutdown());
    Session session([](bpsim_config& config) { config.cards = 3; });
    CHECK_OK(bpsim_card_count(&count));
    CHECK_EQ(count, 3);
    CHECK_EQ(bpsim_is_initialized(), 1);
    bpsim_config again;
    bpsim_config_default(&again);
    CHECK_STATUS(bpsim_init(&again), BPSIM_INVALID, "already initialized");
  }
}

TEST(the_configuration_is_checked) {
  bpsim_config config;
  bpsim_config_default(&config);
  CHECK_EQ(config.cards, 2);
  config.cards = 0;
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "cards is 0; it must be 1 to 16");
  config.cards = 17;
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "cards is 17");
  bpsim_config_default(&config);
  config.memory_bytes = MiB;
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "cannot have 1.0 MiB");
  bpsim_config_default(&config);
  config.model.on = 1;
  config.model.flop_rate = -5;
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "flop_rate is -5");
  bpsim_config_default(&config);
  config.struct_size -= 8;
  CHECK_STATUS(bpsim_init(&config), BPSIM_INVALID, "bpsim_config_default first");
  CHECK_STATUS(bpsim_init(nullptr), BPSIM_INVALID, "bpsim_config_default first");
  CHECK_EQ(bpsim_is_initialized(), 0);
}

TEST(shutdown_drops_what_is_queued_and_ends_waits) {
  int ran = 0;
  std::thread waiter;
  {
    Session session([](bpsim_config& config) { config.faults = "hang@launch=1"; });
    const bpsim_stream stream = session.stream;
    for (int i = 0; i < 100; ++i) CHECK_OK(launch(stream, "queued", [&ran] { ++ran; }));
    // Left open: a graph, an event, an allocation, a capture, and a stream that waits for the one that hangs.
    const bpsim_event event = new_event(true);
    CHECK_OK(bpsim_event_record(event, stream));
    CHECK_OK(bpsim_stream_wait_event(session.other_card, event));
    CHECK_OK(launch(session.other_card, "later", [&ran] { ++ran; }));
    const bpsim_stream side = new_stream();
    CHECK_OK(bpsim_capture_begin(side, 0));
    allocate(side, 100);
    CHECK_OK(launch(side, "captured", [&ran] { ++ran; }));
    bpsim_graph graph = 0;
    CHECK_OK(bpsim_capture_end(side, &graph));
    CHECK_OK(bpsim_graph_launch(stream, graph));
    CHECK_OK(bpsim_capture_begin(side, 0));
    CHECK_OK(launch(side, "captured", [&ran] { ++ran; }));
    void* pinned = nullptr;
    CHECK_OK(bpsim_host_alloc(100, &pinned));
    std::atomic<bool> waiting{false};
    waiter = std::thread([stream, &waiting] {
      waiting = true;
      CHECK_STATUS(bpsim_stream_synchronize(stream), BPSIM_NOT_INITIALIZED, "shut down");
    });
    eventually([&] { return waiting.load(); });
    for (int i = 0; i < 20; ++i) doze();
  }
  waiter.join();
  CHECK_EQ(ran, 0);
  CHECK_EQ(closures_alive.load(), 0);
}

TEST(threads_may_call_while_another_shuts_down) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    {
      Session session;
      const bpsim_stream stream = session.stream;
      for (int t = 0; t < 3; ++t)
        threads.emplace_back([&stop, stream] {
          while (!stop.load()) {
            void* pointer = nullptr;
            if (bpsim_alloc(stream, 0, 5000, &pointer) == BPSIM_OK) bpsim_free(pointer);
            launch(stream, "busy", [] {});
            bpsim_stream_synchronize(stream);
          }
        });
      for (int i = 0; i < 5; ++i) doze();
    }
    stop = true;
    for (auto& thread : threads) thread.join();
    CHECK_EQ(closures_alive.load(), 0);
  }
}

// In the child every call returns the error, and none waits, not even with work that hangs and locks that are held.
TEST(a_forked_child_is_told_to_spawn) {
  Session session([](bpsim_config& config) { config.faults = "hang@launch=1"; });
  CHECK_OK(launch(session.stream, "stuck", [] {}));
  char* const device = allocate(session.stream, 64);
  const bpsim_event event = new_event();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) CHECK_OK(bpsim_free(allocate(session.other_card, 100)));
  });
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    bpsim_config config;
    bpsim_config_default(&config);
    char host[64] = {};
    void* pointer = nullptr;
    bpsim_stream stream = 0;
    bpsim_memory_stats stats;
    bpsim_graph graph = 0;
    int32_t number = 0;
    const bpsim_status all[] = {
        bpsim_init(&config), bpsim_shutdown(), bpsim_card_count(&number), bpsim_card_reset(0),
        bpsim_alloc(session.stream, 0, 16, &pointer), bpsim_free(device), bpsim_empty_cache(0),
        bpsim_memory_statistics(0, &stats), bpsim_translate(device, &pointer), bpsim_host_alloc(16, &pointer),
        bpsim_default_stream(0, &stream), bpsim_stream_create(0, &stream), bpsim_stream_query(session.stream),
        bpsim_stream_synchronize(session.stream), bpsim_card_synchronize(0), launch(session.stream, "x", [] {}),
        bpsim_event_create(0, &stream), bpsim_event_record(event, session.stream),
        bpsim_event_synchronize(event), bpsim_event_destroy(event), bpsim_stream_wait_event(session.stream, event),
        bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 64),
        bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 64),
        bpsim_memset_async(session.stream, device, 0, 64), bpsim_capture_begin(session.stream, 0),
        bpsim_capture_end(session.stream, &graph), bpsim_graph_launch(session.stream, 1), bpsim_faults_clear(),
        bpsim_lose_card(0), bpsim_release_hangs(-1)};
    int wrong = bpsim_is_initialized();
    for (const bpsim_status status : all) wrong += status != BPSIM_FORKED;
    wrong += !std::strstr(bpsim_last_error(), "initialized before fork");
    wrong += !std::strstr(bpsim_last_error(), "spawn");
    _exit(wrong);
  }
  stop = true;
  busy.join();
  int result = -1;
  CHECK(waitpid(child, &result, 0) == child);
  CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0);
  // The parent continues.
  CHECK_OK(bpsim_release_hangs(-1));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
}

TEST(a_child_of_an_idle_process_may_start_its_own) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    bpsim_config config;
    bpsim_config_default(&config);
    const bool ok = bpsim_init(&config) == BPSIM_OK && bpsim_shutdown() == BPSIM_OK;
    _exit(ok ? 0 : 1);
  }
  int result = -1;
  CHECK(waitpid(child, &result, 0) == child);
  CHECK(WIFEXITED(result) && WEXITSTATUS(result) == 0);
}

static bpsim_stream start(void (*change)(bpsim_config&) = nullptr) {
  static Session* const session = new Session(change);  // no shutdown: the process ends without it
  return session->stream;
}

SCENARIO(host_reads) {
  volatile char* const block = allocate(start(), 1000);
  std::printf("%d\n", block[100]);
}
SCENARIO(host_writes) {
  bpsim_stream other = 0;
  start();
  bpsim_default_stream(1, &other);
  volatile int* const block = allocate<int>(other, 4096);
  block[0] = 1;
}
SCENARIO(host_reads_freed) {
  volatile char* const block = allocate(start(), 1000);
  bpsim_free(const_cast<char*>(block));
  std::printf("%d\n", block[0]);
}
SCENARIO(host_reads_nowhere) {
  volatile char* const block = allocate(start(), 1000);
  std::printf("%d\n", block[100 * MiB]);
}
SCENARIO(launch_forgets_to_translate) {
  const bpsim_stream stream = start();
  volatile int* const block = allocate<int>(stream, 4096);
  launch(stream, "careless", [block] { block[1] = 1; });
  bpsim_stream_synchronize(stream);
}
SCENARIO(launch_uses_returned_memory) {
  const bpsim_stream stream = start();
  int* const block = allocate<int>(stream, 4096);
  volatile int* const at = kernel(block);
  bpsim_free(block);
  bpsim_empty_cache(0);
  launch(stream, "late", [at] { *at = 1; });
  bpsim_stream_synchronize(stream);
}
static void say_previous(int, siginfo_t*, void*) {
  const char text[] = "the previous handler\n";
  if (write(STDERR_FILENO, text, sizeof text - 1) > 0) _exit(42);
}
static void set_previous() {
  struct sigaction action = {};
  action.sa_sigaction = say_previous;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}
SCENARIO(previous_handler_follows) {
  set_previous();
  volatile char* const block = allocate(start(), 1000);
  std::printf("%d\n", block[0]);
}
SCENARIO(other_faults_are_left_alone) {
  set_previous();
  start();
  int* volatile nowhere = reinterpret_cast<int*>(64);
  std::printf("%d\n", *nowhere);
}
SCENARIO(other_faults_kill_as_ever) {
  start();
  int* volatile nowhere = reinterpret_cast<int*>(64);
  std::printf("%d\n", *nowhere);
}
SCENARIO(a_signal_that_was_sent_kills) {
  start();
  raise(SIGSEGV);
  std::printf("survived\n");
}
SCENARIO(handler_comes_back_on_top) {
  volatile char* const block = allocate(start(), 1000);
  set_previous();
  CHECK_OK(bpsim_install_fault_handler());
  std::printf("%d\n", block[0]);
}
// Like faulthandler: restores the previous handler, which is ours, and raises the signal again.
static struct sigaction whom_it_replaced;
static void hands_back(int signal, siginfo_t*, void*) {
  static const char text[] = "a later handler\n";
  if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(43);
  sigaction(signal, &whom_it_replaced, nullptr);
  raise(signal);
}
SCENARIO(handlers_that_hand_back_do_not_take_turns_for_ever) {
  volatile char* const block = allocate(start(), 1000);
  struct sigaction later = {};
  later.sa_sigaction = &hands_back;
  later.sa_flags = SA_SIGINFO;
  CHECK_EQ(sigaction(SIGSEGV, &later, &whom_it_replaced), 0);
  CHECK_OK(bpsim_install_fault_handler());
  std::printf("%d\n", block[0]);
}
SCENARIO(no_handler) {
  volatile char* const block = allocate(start([](bpsim_config& config) { config.fault_handler = 0; }), 1000);
  std::printf("%d\n", block[0]);
}
SCENARIO(exit_with_work_queued) {
  const bpsim_stream stream = start();
  for (int i = 0; i < 500; ++i) launch(stream, "slow", [] { doze(); });
  std::printf("leaving\n");
}
SCENARIO(exit_while_hanging) {
  const bpsim_stream stream = start([](bpsim_config& config) { config.faults = "hang@launch=1"; });
  for (int i = 0; i < 5; ++i) launch(stream, "stuck", [] {});
  std::printf("leaving\n");
  std::exit(0);
}
SCENARIO(exit_with_endless_launch) {
  const bpsim_stream stream = start();
  static std::atomic<bool> running;
  launch(stream, "endless", [] {
    running = true;
    for (;;) doze();
  });
  eventually([] { return running.load(); });
}
// Deliberate errors that the sanitizers must find, so that their silence about the rest is evidence.
SCENARIO(planted_race) {
  const bpsim_stream stream = start(), other = new_stream();
  int* const value = kernel(allocate<int>(stream, 4));
  for (int i = 0; i < 1000; ++i) {
    launch(stream, "one", [value] { ++*value; });
    launch(other, "other", [value] { ++*value; });  // without an event
  }
  bpsim_card_synchronize(0);
}
SCENARIO(planted_leak) {
  const bpsim_stream stream = start();
  bpsim_launch what{};
  what.name = "leaks";
  what.function = [](void*, char*, size_t) { return 0; };
  what.arg = std::calloc(1, 100);  // without a destructor
  bpsim_enqueue(stream, &what);
  what.arg = nullptr;
  bpsim_stream_synchronize(stream);
}
