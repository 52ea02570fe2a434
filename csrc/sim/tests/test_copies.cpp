// Tests copies: their result, their order, and the checks of their pointers.
#include <numeric>

#include "helpers.h"

TEST(copies_carry_bytes_in_every_direction) {
  Session session;
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{1000}, 64 * KiB, 64 * KiB + 1, 5 * MiB}) {
    std::vector<unsigned char> sent(bytes), back(bytes);
    std::iota(sent.begin(), sent.end(), static_cast<unsigned char>(bytes));
    auto* const a = allocate(session.stream, bytes);
    auto* const b = allocate(session.stream, bytes);
    auto* const c = allocate(session.other_card, bytes);
    for (const bool wait : {false, true}) {
      const auto copy = wait ? bpsim_copy : bpsim_copy_async;
      std::fill(back.begin(), back.end(), static_cast<unsigned char>(0));
      CHECK_OK(copy(session.stream, BPSIM_HOST_TO_DEVICE, a, sent.data(), bytes));
      CHECK_OK(copy(session.stream, BPSIM_DEVICE_TO_DEVICE, b, a, bytes));
      CHECK_OK(copy(session.stream, BPSIM_PEER, c, b, bytes));
      CHECK_OK(bpsim_card_synchronize(0));
      CHECK_OK(copy(session.other_card, BPSIM_DEVICE_TO_HOST, back.data(), c, bytes));
      // A copy to pageable memory is complete when the call returns.
      CHECK(back == sent);
    }
    for (char* const each : {a, b, c}) CHECK_OK(bpsim_free(each));
  }
}

TEST(asynchronous_is_what_it_says) {
  Session session;
  int* const device = allocate<int>(session.stream, 4);
  void* memory_pinned = nullptr;
  CHECK_OK(bpsim_host_alloc(4, &memory_pinned));
  int* const pinned = static_cast<int*>(memory_pinned);
  int pageable = 1;
  *pinned = 1;
  {
    // Pageable memory is staged, so a later change of the source has no effect.
    Gate gate(session.stream);
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, &pageable, 4));
    pageable = 2;
    gate.open();
    CHECK_EQ(get(session.stream, device), 1);
  }
  {
    // Pinned memory is read when the stream reaches the copy. A program that changes it earlier has a missing
    // synchronization, and here it shows every time.
    Gate gate(session.stream);
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, pinned, 4));
    *pinned = 2;
    gate.open();
    CHECK_EQ(get(session.stream, device), 2);
  }
  {
    Gate gate(session.stream);
    put(session.stream, device, 3);
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, pinned, device, 4));
    CHECK_EQ(*pinned, 2);
    gate.open();
    CHECK_OK(bpsim_stream_synchronize(session.stream));
    CHECK_EQ(*pinned, 3);
  }
  CHECK_OK(bpsim_host_free(pinned));
}

TEST(fills_fill) {
  Session session;
  char* const device = allocate(session.stream, 3000);
  CHECK_OK(bpsim_memset_async(session.stream, device, 0x11, 3000));
  CHECK_OK(bpsim_memset_async(session.stream, device + 1, 0x22, 2998));
  CHECK_OK(bpsim_memset_async(session.stream, device, 0x33, 0));
  CHECK_EQ(int(get(session.stream, device)), 0x11);
  CHECK_EQ(int(get(session.stream, device + 1)), 0x22);
  CHECK_EQ(int(get(session.stream, device + 2998)), 0x22);
  CHECK_EQ(int(get(session.stream, device + 2999)), 0x11);
}

TEST(pointers_in_the_wrong_place_are_named) {
  Session session;
  char host[64] = {};
  char* const here = allocate(session.stream, 64);
  char* const there = allocate(session.other_card, 64);
  char* const gone = allocate(session.stream, 2 * MiB);
  CHECK_OK(bpsim_free(gone));
  void* pinned = nullptr;
  CHECK_OK(bpsim_host_alloc(64, &pinned));
  const struct {
    bpsim_direction direction;
    void* to;
    const void* from;
    uint64_t bytes;
    const char* text;
  } mistakes[] = {
      {BPSIM_HOST_TO_DEVICE, host, here, 64, "the destination"},
      {BPSIM_HOST_TO_DEVICE, host, host, 64, "must be card 0's memory, but is host memory"},
      {BPSIM_HOST_TO_DEVICE, pinned, host, 64, "but is pinned host memory"},
      {BPSIM_HOST_TO_DEVICE, there, host, 64, "must be card 0's memory, but is card 1's memory"},
      {BPSIM_HOST_TO_DEVICE, here, there, 64, "the source"},
      {BPSIM_HOST_TO_DEVICE, here, there, 64, "must be host memory, but is card 1's memory"},
      {BPSIM_HOST_TO_DEVICE, gone, host, 64, "is freed memory of card 0"},
      {BPSIM_HOST_TO_DEVICE, gone + 100 * MiB, host, 64, "card 0's memory that is not allocated"},
      {BPSIM_HOST_TO_DEVICE, nullptr, host, 64, "but is a null pointer"},
      {BPSIM_HOST_TO_DEVICE, here, nullptr, 64, "must be host memory, but is a null pointer"},
      {BPSIM_HOST_TO_DEVICE, here, kernel(there), 64, "a kernel address of card 1's memory"},
      {BPSIM_HOST_TO_DEVICE, here + 500, host, 64, "exceeds its allocation on card 0: it begins at byte 500"},
      {BPSIM_HOST_TO_DEVICE, here, static_cast<char*>(pinned) + 32, 64, "exceeds its pinned memory"},
      {BPSIM_DEVICE_TO_HOST, here, here, 64, "must be host memory, but is card 0's memory"},
      {BPSIM_DEVICE_TO_HOST, gone, here, 64, "must be host memory, but is freed memory of card 0"},
      {BPSIM_DEVICE_TO_HOST, host, host, 64, "must be card 0's memory, but is host memory"},
      {BPSIM_DEVICE_TO_DEVICE, here, there, 64, "must be card 0's memory, but is card 1's memory"},
      {BPSIM_DEVICE_TO_DEVICE, here, host, 64, "but is host memory"},
      {BPSIM_PEER, here, here, 64, "a copy within a card is copy_d2d"},
      {BPSIM_PEER, here, host, 64, "must be a card's memory, but is host memory"},
  };
  for (const auto& mistake : mistakes)
    for (const auto copy : {bpsim_copy, bpsim_copy_async}) {
      const bpsim_status status = copy(session.stream, mistake.direction, mistake.to, mistake.from, mistake.bytes);
      if (status != BPSIM_INVALID || !std::strstr(bpsim_last_error(), mistake.text))
        FAILED("%s instead of '%s': %s\n", bpsim_status_name(status), mistake.text, bpsim_last_error());
    }
  CHECK_STATUS(bpsim_memset_async(session.stream, there, 0, 64), BPSIM_INVALID, "but is card 1's memory");
  CHECK_STATUS(bpsim_memset_async(session.stream, host, 0, 64), BPSIM_INVALID, "but is host memory");
  CHECK_OK(bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, nullptr, nullptr, 0));
  CHECK_OK(bpsim_host_free(pinned));
}

TEST(a_peer_copy_is_for_a_stream_of_either_card) {
  Session session([](bpsim_config& config) { config.cards = 3; });
  char* const a = allocate(session.stream, 64);
  char* const b = allocate(session.other_card, 64);
  bpsim_stream third = 0;
  CHECK_OK(bpsim_default_stream(2, &third));
  CHECK_STATUS(bpsim_copy_async(third, BPSIM_PEER, a, b, 64), BPSIM_INVALID,
               "the stream belongs to card 2, but the copy is from card 1 to card 0");
  CHECK_OK(bpsim_copy(session.stream, BPSIM_PEER, a, b, 64));
  CHECK_OK(bpsim_copy(session.other_card, BPSIM_PEER, a, b, 64));
}

TEST(freeing_right_after_an_asynchronous_copy_is_right) {
  Session session;
  void* pinned = nullptr;
  CHECK_OK(bpsim_host_alloc(64 * KiB, &pinned));
  for (int i = 0; i < 200; ++i) {
    char* const device = allocate(session.stream, 64 * KiB);
    CHECK_OK(bpsim_memset_async(session.stream, device, i, 64 * KiB));
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_HOST, pinned, device, 64 * KiB));
    CHECK_OK(bpsim_free(device));
    // The same memory again, for later work on the same stream.
    char* const next = allocate(session.stream, 64 * KiB);
    CHECK(next == device);
    CHECK_OK(bpsim_memset_async(session.stream, next, 0xee, 64 * KiB));
    CHECK_OK(bpsim_free(next));
    CHECK_OK(bpsim_stream_synchronize(session.stream));
    CHECK_EQ(int(static_cast<unsigned char*>(pinned)[64 * KiB - 1]), i % 256);
  }
  CHECK_OK(bpsim_host_free(pinned));
}

// Makes a copy in each direction, one of which is corrupted, and checks the error text.
static void check_struck(const char* faults, const char* text) {
  Session session;
  CHECK_OK(bpsim_faults_add(faults));
  CHECK_OK(bpsim_check_copies(1));
  for (const uint64_t bytes : {1, 7, 8, 31, 32, 1000, 100000}) {
    char* const device = allocate(session.stream, bytes);
    char* const other = allocate(session.stream, bytes);
    std::vector<char> sent(bytes, 'x'), back(bytes);
    bpsim_status status = bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, sent.data(), bytes);
    if (status == BPSIM_OK) CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_DEVICE, other, device, bytes));
    if (status == BPSIM_OK) status = bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, back.data(), other, bytes);
    if (status == BPSIM_OK) CHECK_OK(bpsim_memset_async(session.stream, other, 200, bytes));
    if (status == BPSIM_OK) status = bpsim_card_synchronize(0);
    CHECK_STATUS(status, BPSIM_LAUNCH_FAILED, text);
    CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED, "bytes differ from their source");
    CHECK_OK(bpsim_card_reset(0));
    CHECK_OK(bpsim_free(device));
    CHECK_OK(bpsim_free(other));
  }
}

TEST(a_corrupted_copy_is_found_where_copies_are_checked) {
  check_struck("corrupt@copy=copy_h2d,times=always", "copy 'copy_h2d'");
  check_struck("corrupt@copy=copy_d2d,times=always,kind=bitflip", "copy 'copy_d2d'");
  check_struck("corrupt@copy=copy_d2h,times=always,kind=bitflip", "copy 'copy_d2h'");
  check_struck("corrupt@copy=memset,times=always,kind=bitflip", "copy 'memset'");
}

TEST(whole_copies_pass_the_check) {
  Session session;
  CHECK_OK(bpsim_check_copies(1));
  for (const uint64_t bytes : {1, 7, 8, 31, 32, 33, 1000, 100000}) {
    char* const device = allocate(session.stream, bytes + 64);
    std::vector<char> sent(bytes), back(bytes);
    for (uint64_t i = 0; i < bytes; ++i) sent[i] = static_cast<char>(i * 37);
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_HOST_TO_DEVICE, device, sent.data(), bytes));
    // An overlapping copy: the source has changed afterwards.
    CHECK_OK(bpsim_copy_async(session.stream, BPSIM_DEVICE_TO_DEVICE, device + 5, device, bytes));
    CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, back.data(), device + 5, bytes));
    CHECK(back == sent);
    CHECK_OK(bpsim_memset_async(session.stream, device, -56, bytes));
    CHECK_OK(bpsim_card_synchronize(0));
    CHECK_OK(bpsim_free(device));
  }
  CHECK_OK(bpsim_check_copies(0));
  CHECK_OK(bpsim_faults_add("corrupt@copy=1"));
  char* const device = allocate(session.stream, 8);
  CHECK_OK(bpsim_memset_async(session.stream, device, 0, 8));
  CHECK_OK(bpsim_card_synchronize(0));
}
