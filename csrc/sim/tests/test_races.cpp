// Tests that missing synchronization is found where it is missing, and nowhere else.
#include <unistd.h>

#include <random>
#include <vector>

#include "helpers.h"

namespace {

void failing(bpsim_config& config) { config.check_races = BPSIM_RACES_FAIL; }
void reporting(bpsim_config& config) { config.check_races = BPSIM_RACES_REPORT; }

bpsim_status touch(bpsim_stream stream, const char* name, const char* at, uint64_t bytes, bool writes) {
  const bpsim_range range{at, bytes, BPSIM_OTHER, static_cast<uint8_t>(writes)};
  return launch(stream, name, [](char*, size_t) { return 0; }, &range, 1);
}
bpsim_status reads(bpsim_stream stream, const char* at, uint64_t bytes = 64) {
  return touch(stream, "reader", at, bytes, false);
}
bpsim_status writes(bpsim_stream stream, const char* at, uint64_t bytes = 64) {
  return touch(stream, "writer", at, bytes, true);
}

void order(bpsim_stream first, bpsim_stream second) {
  const bpsim_event event = new_event();
  CHECK_OK(bpsim_event_record(event, first));
  CHECK_OK(bpsim_stream_wait_event(second, event));
  CHECK_OK(bpsim_event_destroy(event));
}

uint64_t races_found() {
  uint64_t count = 0;
  CHECK_OK(bpsim_races_found(&count));
  return count;
}

char* pinned(uint64_t bytes) {
  void* pointer = nullptr;
  CHECK_OK(bpsim_host_alloc(bytes, &pointer));
  return static_cast<char*>(pointer);
}

}  // namespace

TEST(a_read_that_does_not_wait_for_the_write_is_a_race) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  const char* const at = allocate(session.stream, 256);
  CHECK_OK(writes(session.stream, at, 256));
  CHECK_OK(bpsim_stream_query(other));  // on the wrong stream
  CHECK_STATUS(reads(other, at + 32), BPSIM_RACE,
               "missing synchronization: 'reader' on stream 1 of card 0 reads bytes 32 to 96 of the allocation");
  CHECK_STATUS(reads(other, at), BPSIM_RACE, "which 'writer' on stream 0 of card 0 writes");
  CHECK_STATUS(reads(other, at), BPSIM_RACE, "Record an event on stream 0 of card 0 after 'writer' and let stream 1");
  order(session.stream, other);
  CHECK_OK(reads(other, at));
  CHECK_EQ(races_found(), 3u);
  // The other direction: memory that is still read must not be overwritten.
  CHECK_OK(reads(session.stream, at));
  CHECK_STATUS(writes(session.stream, at), BPSIM_RACE, "writes bytes 0 to 64 of the allocation");
  CHECK_OK(writes(session.stream, at + 128));  // which no stream has read
  order(other, session.stream);
  CHECK_OK(writes(session.stream, at));
  CHECK_STATUS(writes(other, at), BPSIM_RACE, "either may come first");
}

TEST(a_race_is_found_although_the_first_had_long_been_done) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  const char* const at = allocate(session.stream, 64);
  std::atomic<bool> ran{false};
  const bpsim_range range{at, 64, BPSIM_OTHER, 1};
  const auto run = [&](char*, size_t) {
    ran = true;
    return 0;
  };
  CHECK_OK(launch(session.stream, "writer", run, &range, 1));
  eventually([&] { return ran.load(); });
  CHECK_STATUS(reads(other, at), BPSIM_RACE, "missing");
}

TEST(every_way_of_waiting_counts) {
  Session session(failing);
  const bpsim_stream other = new_stream(), third = new_stream();
  const char* const at = allocate(session.stream, 64);
  const bpsim_event event = new_event();
  char value = 0;
  for (int way = 0; way < 7; ++way) {
    CHECK_OK(writes(session.stream, at));
    CHECK_STATUS(reads(other, at), BPSIM_RACE, "missing");
    if (way == 0) CHECK_OK(bpsim_stream_synchronize(session.stream));
    if (way == 1) CHECK_OK(bpsim_card_synchronize(0));
    if (way == 2) eventually([&] { return bpsim_stream_query(session.stream) == BPSIM_OK; });
    if (way == 3) CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, &value, at, 1));
    if (way == 4) {
      order(session.stream, third);
      order(third, other);
    }
    if (way >= 5) CHECK_OK(bpsim_event_record(event, session.stream));
    if (way == 5) CHECK_OK(bpsim_event_synchronize(event));
    if (way == 6) eventually([&] { return bpsim_event_query(event) == BPSIM_OK; });
    CHECK_OK(reads(other, at));
    order(other, session.stream);
  }
}

TEST(an_event_knows_what_was_there_when_it_was_recorded) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  const char* const at = allocate(session.stream, 128);
  const bpsim_event event = new_event();
  CHECK_OK(writes(session.stream, at));
  CHECK_OK(bpsim_event_record(event, session.stream));
  CHECK_OK(writes(session.stream, at + 64));
  CHECK_OK(bpsim_stream_wait_event(other, event));
  CHECK_OK(reads(other, at));
  CHECK_STATUS(reads(other, at + 64), BPSIM_RACE, "bytes 64 to 128");
}

TEST(a_replayed_graph_touches_what_its_launches_do) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  const char* const input = allocate(session.stream, 64);
  const char* const result = allocate(session.stream, 64);
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  CHECK_OK(touch(session.stream, "step", input, 64, false));
  CHECK_OK(touch(session.stream, "last", result, 64, true));
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(session.stream, &graph));
  CHECK_EQ(races_found(), 0u);
  CHECK_OK(writes(other, input));
  CHECK_STATUS(bpsim_graph_launch(session.stream, graph), BPSIM_RACE, "'step' on stream 0 of card 0 reads");
  order(other, session.stream);
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_STATUS(reads(other, result), BPSIM_RACE, "which 'last' on stream 0 of card 0 writes");
  order(session.stream, other);
  CHECK_OK(reads(other, result));
  CHECK_OK(bpsim_graph_destroy(graph));
}

TEST(memory_that_was_freed_too_early_is_a_race) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  for (const bool recorded : {false, true}) {
    char* const at = allocate(session.stream, 4096);
    CHECK_OK(writes(session.stream, at));
    order(session.stream, other);
    Gate gate(other);
    CHECK_OK(reads(other, at));
    if (recorded) CHECK_OK(bpsim_record_stream(at, other));
    CHECK_OK(bpsim_free(at));
    char* const again = allocate(session.stream, 4096);
    CHECK_EQ(again == at, !recorded);
    if (recorded)
      CHECK_OK(writes(session.stream, again));
    else
      CHECK_STATUS(writes(session.stream, again), BPSIM_RACE, "because its use on stream 1 of card 0 was not recorded");
    gate.open();
    CHECK_OK(bpsim_stream_synchronize(other));
    CHECK_OK(writes(session.stream, again));
    CHECK_OK(bpsim_free(again));
  }
  // The allocator has already waited for freed memory that it gives to another stream.
  char* const mine = allocate(session.stream, 1 * MiB);
  CHECK_OK(writes(session.stream, mine));
  CHECK_OK(bpsim_free(mine));
  eventually([&] {
    doze();
    char* const theirs = allocate(other, 1 * MiB);  // kept, so that the next allocation is another block
    CHECK_OK(writes(other, theirs));
    return theirs == mine;
  });
}

TEST(memory_whose_owner_waited_for_its_readers_may_be_freed) {
  Session session(failing);
  const bpsim_stream reader = new_stream(), third = new_stream();
  char* const at = allocate(session.stream, 1 * MiB);
  CHECK_OK(writes(session.stream, at));
  order(session.stream, reader);
  CHECK_OK(reads(reader, at));
  order(reader, session.stream);
  CHECK_OK(bpsim_free(at));
  eventually([&] {
    doze();
    char* const theirs = allocate(third, 1 * MiB);  // kept, so that the next allocation is another block
    CHECK_OK(writes(third, theirs));
    return theirs == at;
  });
}

TEST(copies_race_on_both_sides) {
  Session session(failing);
  const bpsim_stream other = new_stream();
  char* const device = allocate(session.stream, 4096);
  char* const host = pinned(4096);
  std::memset(host, 7, 4096);
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 4096));
  CHECK_STATUS(bpsim_copy_async(other, BPSIM_DEVICE_TO_HOST, host, device, 4096), BPSIM_RACE, "'copy_d2h'");
  CHECK_STATUS(bpsim_memset_async(other, device, 0, 1), BPSIM_RACE, "'memset' on stream 1 of card 0 writes bytes 0 to 1");
  char* const elsewhere = allocate(other, 4096);
  CHECK_STATUS(bpsim_copy_async(other, BPSIM_DEVICE_TO_HOST, host, elsewhere, 4096), BPSIM_RACE, "pinned host memory");
  CHECK_OK(bpsim_copy_async(other, BPSIM_HOST_TO_DEVICE, elsewhere, host, 4096));  // both read it
  CHECK_EQ(static_cast<int>(host[5]), 7);                                          // the host may read it too
  CHECK_OK(bpsim_card_synchronize(0));
  host[5] = 8;
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host, 4096));
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 4096));
  CHECK_OK(bpsim_stream_synchronize(session.stream));
  CHECK_EQ(static_cast<int>(host[5]), 8);
  CHECK_EQ(races_found(), 3u);
  CHECK_OK(bpsim_host_free(host));
}

TEST(a_report_goes_on_and_off_is_off) {
  Session session;
  const bpsim_stream other = new_stream();
  const char* const at = allocate(session.stream, 64);
  CHECK_OK(writes(session.stream, at));
  CHECK_OK(reads(other, at));
  CHECK_STATUS(bpsim_check_races(static_cast<bpsim_races>(3)), BPSIM_INVALID, "off, report or fail");
  CHECK_OK(bpsim_check_races(BPSIM_RACES_FAIL));
  CHECK_OK(reads(other, at));  // earlier work is not checked
  CHECK_OK(writes(other, at));
  CHECK_OK(bpsim_check_races(BPSIM_RACES_OFF));
  CHECK_OK(reads(session.stream, at));
  CHECK_EQ(races_found(), 0u);
}

// Compares random work with the plain definition: two accesses are ordered if a path leads from one to the other. Every
// access is one byte, so that the last accesses are an array.
TEST(random_work_races_where_no_path_leads) {
  Session session(reporting);
  constexpr int kStreams = 4, kBytes = 6;
  const bpsim_stream streams[kStreams] = {session.stream, new_stream(), new_stream(), session.other_card};
  const char* const at = allocate(session.stream, kBytes);
  // A node per step of the program; `before` holds the nodes with an edge to it.
  std::vector<std::vector<size_t>> before;
  const auto node = [&](std::vector<size_t> from) {
    before.push_back(std::move(from));
    return before.size() - 1;
  };
  const auto reaches = [&](size_t from, size_t to) {
    std::vector<size_t> open{to};
    std::vector<bool> seen(before.size());
    while (!open.empty()) {
      const size_t here = open.back();
      open.pop_back();
      if (here == from) return true;
      if (seen[here]) continue;
      seen[here] = true;
      open.insert(open.end(), before[here].begin(), before[here].end());
    }
    return false;
  };
  const size_t start = node({});
  size_t host = start, last[kStreams];
  std::fill(last, last + kStreams, start);
  struct Event {
    bpsim_event event;
    size_t node;
  };
  std::vector<Event> events;
  std::vector<size_t> readers[kBytes];
  size_t writer[kBytes];
  std::fill(writer, writer + kBytes, start);
  std::mt19937 random(5);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  int racing = 0;
  for (int step = 0; step < 3000; ++step) {
    const int who = below(kStreams);
    switch (below(8)) {
      case 0: {
        const bpsim_event event = new_event();
        CHECK_OK(bpsim_event_record(event, streams[who]));
        events.push_back({event, node({last[who], host})});
        break;
      }
      case 1:
        if (events.empty()) break;
        CHECK_OK(bpsim_stream_wait_event(streams[who], events.back().event));
        last[who] = node({last[who], events.back().node});
        break;
      case 2:
        if (below(4) == 0) {
          CHECK_OK(bpsim_stream_synchronize(streams[who]));
          host = node({host, last[who]});
        }
        break;
      default: {
        const int byte = below(kBytes);
        const bool write = below(3) == 0;
        const size_t here = node({last[who], host});
        bool race = writer[byte] != start && !reaches(writer[byte], here);
        for (const size_t reader : readers[byte]) race = race || (write && !reaches(reader, here));
        const uint64_t found = races_found();
        CHECK_OK(touch(streams[who], write ? "w" : "r", at + byte, 1, write));
        CHECK_EQ(races_found() != found, race);
        racing += race;
        last[who] = here;
        if (write) {
          writer[byte] = here;
          readers[byte].clear();
        } else {
          readers[byte].push_back(here);
        }
      }
    }
  }
  CHECK(racing > 200 && racing < 2000);
}

// ---- what is reported to the host; the sanitizers have their own handlers
// ---------------------------------------------

static void host_is_too_early(void (*change)(bpsim_config&), bool into) {
  Session session(change);
  char* const device = allocate(session.stream, 64);
  char* const host = pinned(64);
  const bpsim_direction direction = into ? BPSIM_DEVICE_TO_HOST : BPSIM_HOST_TO_DEVICE;
  CHECK_OK(bpsim_copy_async(session.stream, direction, into ? host : device, into ? device : host, 64));
  for (int i = 0; i < 20; ++i) doze();  // the copy is done by now, but the host has not waited for it
  if (into)
    std::printf("read %d\n", host[3]);
  else
    host[3] = 1;
  std::printf("went on\n");
  const bool fails = change == failing;
  CHECK_STATUS(touch(session.stream, "next", device, 64, false), fails ? BPSIM_LAUNCH_FAILED : BPSIM_OK, "missing");
  if (fails) CHECK_OK(bpsim_card_reset(0));
  CHECK_OK(bpsim_card_synchronize(0));
  CHECK_EQ(races_found(), 1u);
}

SCENARIO(host_reads_what_a_copy_writes) { host_is_too_early(failing, true); }
SCENARIO(host_writes_what_a_copy_reads) { host_is_too_early(failing, false); }
SCENARIO(host_is_told_and_goes_on) { host_is_too_early(reporting, false); }

// More pages than the guard remembers as opened for reading.
SCENARIO(reads_beside_many_copies_are_the_hosts) {
  constexpr uint64_t count = 70;
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  Session session(failing);
  char* const device = allocate(session.stream, 64);
  char* const host = pinned(count * page);
  for (uint64_t i = 0; i < count; ++i) {
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, host + i * page, device, 64));
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host + i * page + 128, 64));
  }
  for (int round = 0; round < 2; ++round)
    for (uint64_t i = 0; i < count; ++i) CHECK_EQ(static_cast<int>(host[i * page + 128]), 0);
  CHECK_EQ(races_found(), 0u);
  std::printf("went on\n");
  host[128] = 1;
  CHECK_EQ(races_found(), 1u);
}

SCENARIO(neighbours_of_a_copy_are_the_hosts) {
  Session session(failing);
  char* const device = allocate(session.stream, 64);
  char* const host = pinned(4096);
  for (int round = 0; round < 3; ++round) {
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 64));
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host + 128, 64));
    host[64] = 1;                              // beside both
    CHECK_EQ(static_cast<int>(host[128]), 0);  // the copy reads it too
    CHECK_OK(bpsim_stream_synchronize(session.stream));
    host[0] = host[128] = 0;
  }
  CHECK_EQ(races_found(), 0u);
  std::printf("went on\n");
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, host, device, 64));
  CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, host + 128, 64));
  CHECK_EQ(static_cast<int>(host[128]), 0);
  CHECK_EQ(races_found(), 0u);
  host[128] = 1;
  CHECK_EQ(races_found(), 1u);
}
