// Tests pools, suspending, and pinned memory.
#include <thread>

#include "helpers.h"

TEST(pools_keep_allocations_apart) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  char* const general = allocate(session.stream, 4096);
  char* const pooled = allocate(session.stream, 4096, pool);
  CHECK_EQ(memory().segments, 2u);
  CHECK_OK(bpsim_free(pooled));
  CHECK(allocate(session.stream, 4096) != pooled);
  CHECK(allocate(session.stream, 4096, pool) == pooled);
  bpsim_block_info info{};
  CHECK_OK(bpsim_pointer_info(pooled, &info));
  CHECK_EQ(info.pool, pool);
  uint64_t count = 0;
  CHECK_OK(bpsim_blocks(0, pool, &info, 1, &count));
  CHECK_EQ(count, 1u);
  CHECK(info.base == pooled);
  void* none = nullptr;
  CHECK_STATUS(bpsim_alloc(session.other_card, pool, 16, &none), BPSIM_INVALID, "the pool belongs to card 0");
  CHECK_OK(bpsim_pool_destroy(pool));
  CHECK_STATUS(bpsim_pool_destroy(pool), BPSIM_INVALID, "is not a pool");
  // Memory that the user holds survives the pool, and belongs to the general pool from then on.
  CHECK_OK(bpsim_pointer_info(pooled, &info));
  CHECK_EQ(int(info.place), int(BPSIM_DEVICE));
  CHECK_EQ(info.pool, 0u);
  CHECK_OK(bpsim_free(pooled));
  CHECK_OK(bpsim_free(general));
}

TEST(a_suspended_pool_gives_its_memory_back) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  int* const awake = allocate<int>(session.stream, 4 * MiB);
  int* const sleeper = allocate<int>(session.stream, 16 * MiB, pool);
  CHECK_OK(bpsim_memset_async(session.stream, awake, 1, 4 * MiB));
  CHECK_OK(bpsim_memset_async(session.stream, sleeper, 1, 16 * MiB));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  uint64_t before = 0, after = 0;
  CHECK_OK(bpsim_host_resident(0, &before));
  const bpsim_memory_stats full = memory();
  CHECK_OK(bpsim_pool_suspend(pool));
  CHECK_OK(bpsim_host_resident(0, &after));
  CHECK_EQ(before - after, 16 * MiB);
  bpsim_memory_stats stats = memory();
  CHECK_EQ(full.reserved - stats.reserved, 16 * MiB);
  CHECK_EQ(full.in_use - stats.in_use, 16 * MiB);
  CHECK_EQ(stats.suspended, 16 * MiB);
  CHECK_STATUS(bpsim_pool_suspend(pool), BPSIM_INVALID, "already suspended");
  CHECK_STATUS(bpsim_pool_destroy(pool), BPSIM_INVALID, "resume it first");
  void* none = nullptr;
  CHECK_STATUS(bpsim_alloc(session.stream, pool, 16, &none), BPSIM_INVALID, "suspended");
  CHECK_STATUS(bpsim_memset_async(session.stream, sleeper, 1, 4), BPSIM_INVALID, "in a suspended pool");
  bpsim_block_info info{};
  CHECK_OK(bpsim_pointer_info(sleeper, &info));
  CHECK_EQ(int(info.place), int(BPSIM_DEVICE_ASLEEP));

  // Another allocation takes the memory: the pool cannot be resumed now.
  char* const greedy = allocate(session.stream, 40 * MiB);
  CHECK_STATUS(bpsim_pool_resume(pool), BPSIM_OUT_OF_MEMORY, "while resuming a pool");
  CHECK_OK(bpsim_free(greedy));
  CHECK_OK(bpsim_pool_resume(pool));
  CHECK_STATUS(bpsim_pool_resume(pool), BPSIM_INVALID, "not suspended");
  stats = memory();
  CHECK_EQ(stats.in_use, full.in_use);
  CHECK_EQ(stats.suspended, 0u);
  // The address is the same, the contents are not; memory outside the pool kept its contents.
  CHECK_EQ(get(session.stream, sleeper), 0);
  CHECK_EQ(get(session.stream, awake), 0x01010101);
  put(session.stream, sleeper, 7);
  CHECK_EQ(get(session.stream, sleeper), 7);
  CHECK_OK(bpsim_pool_suspend(pool));
  CHECK_OK(bpsim_free(sleeper));
  CHECK_EQ(memory().suspended, 0u);
  CHECK_OK(bpsim_pool_resume(pool));
  CHECK_OK(bpsim_free(awake));
  CHECK_OK(bpsim_pool_destroy(pool));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().reserved, 0u);
}

TEST(suspending_waits_for_work) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  int* const value = allocate<int>(session.stream, 4, pool);
  std::atomic<bool> done{false};
  int* const at = kernel(value);
  CHECK_OK(launch(session.stream, "slow", [&done, at] {
    for (int i = 0; i < 20; ++i) doze();
    *at = 3;
    done = true;
  }));
  CHECK_OK(bpsim_pool_suspend(pool));
  CHECK(done.load());
  CHECK_OK(bpsim_pool_resume(pool));
}

TEST(a_pool_that_another_card_works_on_stays) {
  Session session;
  bpsim_pool pool = 0;
  CHECK_OK(bpsim_pool_create(0, &pool));
  char* const shared = allocate(session.stream, 64, pool);
  CHECK_OK(bpsim_record_stream(shared, session.other_card));
  Gate gate(session.other_card);
  CHECK_OK(bpsim_free(shared));
  CHECK_STATUS(bpsim_pool_suspend(pool), BPSIM_INVALID, "a stream of another card still works on");
  gate.open();
  CHECK_OK(bpsim_card_synchronize(1));
  CHECK_OK(bpsim_pool_suspend(pool));
  CHECK_OK(bpsim_pool_resume(pool));
}

TEST(a_pool_may_go_to_sleep_while_an_allocation_waits) {
  Session session;
  const bpsim_stream other = new_stream();
  // The allocation checks all streams when it has waited; sometimes suspending is faster.
  for (int i = 0; i < 50; ++i) new_stream();
  for (int round = 0; round < 40; ++round) {
    bpsim_pool pool = 0;
    CHECK_OK(bpsim_pool_create(0, &pool));
    char* const large = allocate(session.stream, 40 * MiB);
    CHECK_OK(bpsim_record_stream(large, other));
    Gate gate(other);
    CHECK_OK(bpsim_free(large));
    void* got = nullptr;
    bpsim_status status = BPSIM_OK;
    std::thread allocating([&] { status = bpsim_alloc(session.stream, pool, 40 * MiB, &got); });
    gate.wait_until_reached();
    for (int i = 0; i < 5; ++i) doze();
    std::thread suspending([&] { CHECK_OK(bpsim_pool_suspend(pool)); });
    for (int i = 0; i < 5; ++i) doze();
    gate.open();
    allocating.join();
    suspending.join();
    // The allocation either succeeded, and its memory is suspended, or it was refused. It gets no memory of a pool that
    // is already suspended.
    CHECK(status == BPSIM_OK || status == BPSIM_INVALID);
    const bpsim_memory_stats stats = memory();
    CHECK_EQ(stats.in_use, 0u);
    CHECK_EQ(stats.suspended, status == BPSIM_OK ? 40 * MiB : 0u);
    CHECK_OK(bpsim_pool_resume(pool));
    if (status == BPSIM_OK) CHECK_OK(bpsim_free(got));
    CHECK_OK(bpsim_pool_destroy(pool));
    CHECK_OK(bpsim_empty_cache(0));
    CHECK_EQ(memory().reserved, 0u);
  }
}

TEST(pinned_memory_where_less_was_freed_is_pinned_as_a_whole) {
  Session session;
  constexpr size_t count = 32;
  // The system decides where the large one lies, so each of the small ones is freed last once.
  for (size_t last = 0; last < count; ++last) {
    void *small[count] = {}, *large = nullptr;
    for (void*& each : small) CHECK_OK(bpsim_host_alloc(256 * KiB, &each));
    for (size_t i = 0; i < count; ++i)
      if (i != last) CHECK_OK(bpsim_host_free(small[i]));
    CHECK_OK(bpsim_host_free(small[last]));
    CHECK_OK(bpsim_host_alloc(4 * MiB, &large));
    for (uint64_t at = 0; at < 4 * MiB; at += 64 * KiB) {
      bpsim_block_info info{};
      CHECK_OK(bpsim_pointer_info(static_cast<char*>(large) + at + 64 * KiB - 1, &info));
      CHECK_EQ(int(info.place), int(BPSIM_HOST_PINNED));
      CHECK_EQ(info.bytes, 4 * MiB);
    }
    CHECK_OK(bpsim_host_free(large));
  }
}

TEST(pinned_memory_is_known_and_outlives_its_use) {
  Session session;
  void* pinned = nullptr;
  CHECK_OK(bpsim_host_alloc(0, &pinned));
  CHECK(pinned == nullptr);
  CHECK_OK(bpsim_host_alloc(10000, &pinned));
  bpsim_block_info info{};
  CHECK_OK(bpsim_pointer_info(static_cast<char*>(pinned) + 9999, &info));
  CHECK_EQ(int(info.place), int(BPSIM_HOST_PINNED));
  CHECK_EQ(info.bytes, 10000u);
  CHECK(info.base == pinned);
  CHECK_OK(bpsim_pointer_info(static_cast<char*>(pinned) + 10000, &info));
  CHECK_EQ(int(info.place), int(BPSIM_HOST));

  char* const device = allocate(session.stream, 10000);
  std::memset(pinned, 5, 10000);
  Gate gate(session.stream);
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, pinned, 10000));
  CHECK_OK(bpsim_host_free(pinned));
  CHECK_OK(bpsim_pointer_info(pinned, &info));
  CHECK_EQ(int(info.place), int(BPSIM_HOST_FREED));
  CHECK_STATUS(bpsim_host_free(pinned), BPSIM_INVALID, "freed before");
  CHECK_STATUS(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, pinned, 16), BPSIM_INVALID,
               "freed pinned host memory");
  gate.open();
  CHECK_EQ(int(get(session.stream, device + 9999)), 5);
  CHECK_OK(bpsim_pointer_info(pinned, &info));
  CHECK_EQ(int(info.place), int(BPSIM_HOST));
  CHECK_STATUS(bpsim_host_free(&info), BPSIM_INVALID, "not pinned memory");
}
