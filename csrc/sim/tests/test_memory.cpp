// Tests allocation, statistics, limits, and stream-ordered reuse.
#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "helpers.h"

TEST(memory_is_aligned_reused_and_counted) {
  Session session;
  void* nothing = &session;
  CHECK_OK(bpsim_alloc(session.stream, 0, 0, &nothing));
  CHECK(nothing == nullptr);
  CHECK_OK(bpsim_free(nullptr));
  char* const first = allocate(session.stream, 1000);
  CHECK_EQ(reinterpret_cast<uintptr_t>(first) % 512, 0u);
  bpsim_memory_stats stats = memory();
  CHECK_EQ(stats.limit, 64 * MiB);
  CHECK_EQ(stats.in_use, 1024u);
  CHECK_EQ(stats.requested, 1000u);
  CHECK_EQ(stats.reserved, 2 * MiB);
  CHECK_EQ(stats.segments, 1u);
  char* const second = allocate(session.stream, 3 * MiB);
  stats = memory();
  CHECK_EQ(stats.in_use, 1024 + 3 * MiB);
  CHECK_EQ(stats.reserved, 22 * MiB);
  CHECK_OK(bpsim_free(first));
  CHECK(allocate(session.stream, 900) == first);
  CHECK_OK(bpsim_free(first));
  CHECK_OK(bpsim_free(second));
  stats = memory();
  CHECK_EQ(stats.in_use, 0u);
  CHECK_EQ(stats.requested, 0u);
  CHECK_EQ(stats.in_use_peak, 1024 + 3 * MiB);
  CHECK_EQ(stats.reserved, 22 * MiB);
  CHECK_EQ(stats.allocations, 3u);
  CHECK_EQ(stats.frees, 3u);
  CHECK_OK(bpsim_reset_peaks(0));
  CHECK_EQ(memory().in_use_peak, 0u);
  CHECK_EQ(memory().reserved_peak, 22 * MiB);
  CHECK_EQ(memory(1).reserved, 0u);
  CHECK_EQ(memory(1).allocations, 0u);
}

TEST(memory_runs_out_with_numbers) {
  Session session;
  char* const most = allocate(session.stream, 40 * MiB);
  void* none = nullptr;
  CHECK_STATUS(bpsim_alloc(session.stream, 0, 30 * MiB, &none), BPSIM_OUT_OF_MEMORY,
               "requested 30.0 MiB (31457280 bytes); 24.0 MiB (25165824 bytes) of 64.0 MiB (67108864 bytes) are free, "
               "the largest free block has 24.0 MiB (25165824 bytes)");
  CHECK(none == nullptr);
  CHECK_STATUS(bpsim_alloc(session.stream, 0, uint64_t{1} << 60, &none), BPSIM_OUT_OF_MEMORY, "card 0");
  CHECK_EQ(memory().out_of_memory, 2u);
  CHECK_EQ(memory().in_use, 40 * MiB);
  // The other card has its own memory.
  char* const there = allocate(session.other_card, 60 * MiB);
  CHECK_OK(bpsim_free(there));
  // The cache is emptied for it.
  CHECK_OK(bpsim_free(most));
  CHECK_EQ(memory().reserved, 40 * MiB);
  char* const now = allocate(session.stream, 64 * MiB);
  CHECK_EQ(memory().reserved, 64 * MiB);
  CHECK_OK(bpsim_free(now));
}

TEST(the_largest_free_block_can_be_had) {
  Session session;
  std::vector<char*> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(allocate(session.stream, 5 * MiB));
  for (size_t i = 0; i < blocks.size(); i += 2) CHECK_OK(bpsim_free(blocks[i]));
  const uint64_t largest = memory().largest_free;
  CHECK(largest >= 5 * MiB && largest < 30 * MiB);
  void* none = nullptr;
  CHECK_STATUS(bpsim_alloc(session.stream, 0, largest + 1, &none), BPSIM_OUT_OF_MEMORY, "largest free block");
  CHECK_OK(bpsim_free(allocate(session.stream, largest)));
  for (size_t i = 1; i < blocks.size(); i += 2) CHECK_OK(bpsim_free(blocks[i]));
  CHECK_EQ(memory().largest_free, 64 * MiB);
}

TEST(emptying_the_cache_returns_memory_to_the_system) {
  Session session;
  uint64_t resident = 1;
  CHECK_OK(bpsim_host_resident(0, &resident));
  CHECK_EQ(resident, 0u);
  char* const used = allocate(session.stream, 16 * MiB);
  CHECK_OK(bpsim_memset_async(session.stream, used, 1, 16 * MiB));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_OK(bpsim_host_resident(0, &resident));
  CHECK_EQ(resident, 16 * MiB);
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().reserved, 16 * MiB);
  CHECK_OK(bpsim_free(used));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().reserved, 0u);
  CHECK_EQ(memory().segments, 0u);
  CHECK_OK(bpsim_host_resident(0, &resident));
  CHECK_EQ(resident, 0u);
}

TEST(a_block_in_flight_goes_to_its_own_stream_only) {
  Session session;
  const bpsim_stream other = new_stream();
  constexpr uint64_t bytes = 12 * MiB;  // a segment of its own, so that the address identifies the block
  char* const block = allocate(session.stream, bytes);
  Gate gate(session.stream);
  CHECK_OK(bpsim_free(block));
  char* const elsewhere = allocate(other, bytes);
  CHECK(elsewhere != block);
  char* const again = allocate(session.stream, bytes);
  CHECK(again == block);
  CHECK_OK(bpsim_free(again));
  gate.open();
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK(allocate(other, bytes) == block);
}

TEST(work_in_flight_is_never_disturbed) {
  // Each launch writes its block, and a later one of the same stream checks its contents. Blocks are freed as soon as
  // the second is queued, on several streams at once: a block allocated too early shows as a wrong number.
  Session session([](bpsim_config& config) { config.memory_bytes = 8 * MiB; });
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      const bpsim_stream stream = t ? new_stream() : session.stream;
      std::mt19937 random(static_cast<uint32_t>(t));
      for (uint64_t i = 0; i < 800; ++i) {
        const uint64_t count = random() % 20000 + 1, value = t * 1000000 + i;
        void* pointer = nullptr;
        if (bpsim_alloc(stream, 0, count * 8, &pointer) != BPSIM_OK) continue;
        uint64_t* const at = static_cast<uint64_t*>(kernel(pointer));
        CHECK_OK(launch(stream, "write", [=] { std::fill_n(at, count, value); }));
        CHECK_OK(launch(stream, "look", [=, &wrong] {
          wrong += static_cast<int>(std::count_if(at, at + count, [=](uint64_t each) { return each != value; }));
        }));
        CHECK_OK(bpsim_free(pointer));
      }
      CHECK_OK(bpsim_stream_synchronize(stream));
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_recorded_stream_holds_the_block) {
  Session session;
  const bpsim_stream other = new_stream();
  char* const block = allocate(session.stream, 4096);
  CHECK_OK(bpsim_record_stream(block, other));
  CHECK_OK(bpsim_record_stream(block, other));
  CHECK_OK(bpsim_record_stream(block, session.stream));
  Gate gate(other);
  CHECK_OK(bpsim_free(block));
  CHECK_EQ(memory().pending, 4096u);
  CHECK_EQ(memory().in_use, 0u);
  CHECK(allocate(session.stream, 4096) != block);
  gate.open();
  CHECK_OK(bpsim_stream_synchronize(other));
  CHECK(allocate(session.stream, 4096) == block);
  CHECK_EQ(memory().pending, 0u);
  CHECK_STATUS(bpsim_record_stream(&session, other), BPSIM_INVALID, "is host memory");
}

TEST(out_of_memory_waits_for_work_in_flight_first) {
  Session session;
  const bpsim_stream other = new_stream();
  char* const block = allocate(session.stream, 60 * MiB);
  Gate gate(session.stream);
  CHECK_OK(bpsim_free(block));
  std::thread opener([&] {
    gate.wait_until_reached();
    doze();
    gate.open();
  });
  CHECK_OK(bpsim_free(allocate(other, 50 * MiB)));
  opener.join();
}

TEST(wrong_frees_are_refused) {
  Session session;
  char* const block = allocate(session.stream, 4096);
  char host = 0;
  CHECK_STATUS(bpsim_free(block + 16), BPSIM_INVALID, "16 bytes into the allocation");
  CHECK_STATUS(bpsim_free(&host), BPSIM_INVALID, "is host memory");
  CHECK_STATUS(bpsim_free(kernel(block)), BPSIM_INVALID, "not a device pointer");
  CHECK_STATUS(bpsim_free(block + 512 * MiB / 4), BPSIM_INVALID, "never allocated");
  CHECK_OK(bpsim_free(block));
  CHECK_STATUS(bpsim_free(block), BPSIM_INVALID, "freed before");
  void* none = nullptr;
  CHECK_STATUS(bpsim_alloc(session.stream + 5, 0, 16, &none), BPSIM_INVALID, "is not a stream");
  CHECK_STATUS(bpsim_alloc(session.stream, 77, 16, &none), BPSIM_INVALID, "is not a pool");
  CHECK_STATUS(bpsim_translate(&host, &none), BPSIM_INVALID, "is host memory");
}

TEST(pointers_say_what_they_are) {
  Session session;
  char* const block = allocate(session.other_card, 1000);
  bpsim_block_info info{};
  CHECK_OK(bpsim_pointer_info(block + 10, &info));
  CHECK_EQ(int(info.place), int(BPSIM_DEVICE));
  CHECK_EQ(info.card, 1);
  CHECK(info.base == block);
  CHECK_EQ(info.bytes, 1000u);
  CHECK_EQ(info.rounded, 1024u);
  CHECK_EQ(info.stream, session.other_card);
  bpsim_block_info list[2];
  uint64_t count = 0;
  CHECK_OK(bpsim_blocks(1, 0, list, 2, &count));
  CHECK_EQ(count, 1u);
  CHECK(list[0].base == block);
  uintptr_t first = 0;
  uint64_t bytes = 0;
  ptrdiff_t offset = 0;
  CHECK_OK(bpsim_card_range(1, &first, &bytes, &offset));
  CHECK(reinterpret_cast<uintptr_t>(block) - first < bytes);
  CHECK(block + offset == kernel(block));
  CHECK_OK(bpsim_free(block));
  CHECK_OK(bpsim_pointer_info(block, &info));
  CHECK_EQ(int(info.place), int(BPSIM_DEVICE_FREED));
  CHECK_OK(bpsim_pointer_info(&info, &info));
  CHECK_EQ(int(info.place), int(BPSIM_HOST));
  CHECK_EQ(info.card, -1);
}

// Compares with a plain model: live blocks never overlap, and the counters are the sums of what is held.
static void churn(bpsim_stream stream, uint32_t seed, int rounds, std::map<uintptr_t, uint64_t>& live) {
  std::mt19937 random(seed);
  std::map<uintptr_t, uint64_t> mine;
  for (int i = 0; i < rounds; ++i) {
    if (mine.empty() || random() % 5 < 3) {
      const uint64_t bytes = random() % 8 == 0 ? random() % (3 * MiB) + 1 : random() % 20000 + 1;
      void* pointer = nullptr;
      const bpsim_status status = bpsim_alloc(stream, 0, bytes, &pointer);
      if (status == BPSIM_OUT_OF_MEMORY) {
        // Frees the largest of its blocks to make room.
        if (mine.empty()) continue;
        auto largest = std::max_element(mine.begin(), mine.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
        CHECK_OK(bpsim_free(reinterpret_cast<void*>(largest->first)));
        mine.erase(largest);
        continue;
      }
      CHECK_OK(status);
      const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
      const auto after = mine.lower_bound(address);
      CHECK(after == mine.end() || address + bytes <= after->first);
      CHECK(after == mine.begin() || std::prev(after)->first + std::prev(after)->second <= address);
      mine[address] = bytes;
      if (i % 16 == 0) CHECK_OK(bpsim_memset_async(stream, pointer, i, bytes));
    } else {
      auto chosen = mine.begin();
      std::advance(chosen, random() % mine.size());
      CHECK_OK(bpsim_free(reinterpret_cast<void*>(chosen->first)));
      mine.erase(chosen);
    }
  }
  live = mine;
}

TEST(random_allocations_do_not_overlap) {
  Session session;
  std::map<uintptr_t, uint64_t> live;
  churn(session.stream, 1, 6000, live);
  uint64_t rounded = 0, asked = 0;
  for (const auto& [address, bytes] : live) {
    rounded += (bytes + 511) / 512 * 512;
    asked += bytes;
  }
  CHECK_EQ(memory().in_use, rounded);
  CHECK_EQ(memory().requested, asked);
  CHECK(memory().reserved >= rounded && memory().reserved <= 64 * MiB);
  for (const auto& [address, bytes] : live) CHECK_OK(bpsim_free(reinterpret_cast<void*>(address)));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_OK(bpsim_empty_cache(0));
  CHECK_EQ(memory().reserved, 0u);
}

TEST(threads_allocate_at_the_same_time) {
  Session session;
  std::map<uintptr_t, uint64_t> live[4];
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { churn(i % 2 ? new_stream() : session.stream, i + 10, 1500, live[i]); });
  for (auto& thread : threads) thread.join();
  std::map<uintptr_t, uint64_t> all;
  uint64_t rounded = 0;
  for (const auto& each : live)
    for (const auto& [address, bytes] : each) {
      CHECK(all.emplace(address, bytes).second);
      rounded += (bytes + 511) / 512 * 512;
    }
  uintptr_t end = 0;
  for (const auto& [address, bytes] : all) {
    CHECK(address >= end);
    end = address + bytes;
  }
  CHECK_EQ(memory().in_use, rounded);
}
