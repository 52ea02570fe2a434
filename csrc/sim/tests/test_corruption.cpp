// Tests injected corruption of results.
#include <algorithm>
#include <cmath>

#include "helpers.h"

static int nothing(char*, size_t) { return 0; }

// Returns sixteen bytes of 0x3c after a launch that names them as an output of type `element`, to show which are
// corrupted.
static std::vector<unsigned char> struck(bpsim_stream stream, const char* name, bpsim_element element) {
  std::vector<unsigned char> got(16);
  char* const device = allocate(stream, 16);
  CHECK_OK(bpsim_memset_async(stream, device, 0x3c, 16));
  char other[16];
  const bpsim_range ranges[] = {{other, 16, BPSIM_F32, 0}, {device, 16, static_cast<uint8_t>(element), 1}};
  CHECK_OK(launch(stream, name, nothing, ranges, 2));
  CHECK_OK(bpsim_copy(stream, BPSIM_DEVICE_TO_HOST, got.data(), device, 16));
  CHECK_OK(bpsim_free(device));
  return got;
}
static std::vector<unsigned char> expected(std::initializer_list<std::pair<size_t, int>> changes) {
  std::vector<unsigned char> bytes(16, 0x3c);
  for (const auto& [at, value] : changes) bytes[at] = static_cast<unsigned char>(value);
  return bytes;
}

TEST(outputs_become_nan) {
  Session session([](bpsim_config& config) { config.faults = "corrupt@launch=mm,times=always"; });
  CHECK(struck(session.stream, "other", BPSIM_F32) == expected({}));
  // The middle element, as quiet NaN: 0x7fc00000, 0x7e00, 0x7fc0, 0x7ff8000000000000.
  CHECK(struck(session.stream, "mm", BPSIM_F32) == expected({{8, 0}, {9, 0}, {10, 0xc0}, {11, 0x7f}}));
  CHECK(struck(session.stream, "mm", BPSIM_F16) == expected({{8, 0}, {9, 0x7e}}));
  CHECK(struck(session.stream, "mm", BPSIM_BF16) == expected({{8, 0xc0}, {9, 0x7f}}));
  CHECK(struck(session.stream, "mm", BPSIM_F64) ==
        expected({{8, 0}, {9, 0}, {10, 0}, {11, 0}, {12, 0}, {13, 0}, {14, 0xf8}, {15, 0x7f}}));
  CHECK(struck(session.stream, "mm", BPSIM_OTHER) == expected({{8, 0x7c}}));
}

TEST(what_a_launch_says_that_it_writes_is_struck) {
  Session session([](bpsim_config& config) { config.faults = "corrupt@launch=rows"; });
  char* const device = allocate(session.stream, 4096);
  CHECK_OK(bpsim_memset_async(session.stream, device, 0x3c, 4096));
  const bpsim_range whole{device, 4096, BPSIM_F32, 1}, row{device + 64, 8, BPSIM_F32, 1};
  const auto work = [row](char*, size_t) { return bpsim_launch_detail(0, 0, &row) == BPSIM_OK ? 0 : 1; };
  CHECK_OK(launch(session.stream, "rows", work, &whole, 1));
  std::vector<unsigned char> got(4096), wanted(4096, 0x3c);
  CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, got.data(), device, 4096));
  const unsigned char nan[] = {0, 0, 0xc0, 0x7f};
  std::copy(nan, nan + 4, wanted.begin() + 68);
  CHECK(got == wanted);
}

TEST(outputs_get_flipped_bits) {
  Session session([](bpsim_config& config) { config.faults = "corrupt@launch=mm,times=always,kind=bitflip,elements=2"; });
  CHECK(struck(session.stream, "mm", BPSIM_F32) == expected({{7, 0x7c}, {15, 0x7c}}));
  CHECK(struck(session.stream, "mm", BPSIM_F16) == expected({{5, 0x7c}, {13, 0x7c}}));
  CHECK(struck(session.stream, "mm", BPSIM_OTHER) == expected({{4, 0x7c}, {12, 0x7c}}));
}

TEST(copies_get_corrupted) {
  Session session([](bpsim_config& config) { config.faults = "corrupt@copy=2;corrupt@copy=4,kind=bitflip"; });
  float* const device = allocate<float>(session.stream, 64);
  std::vector<float> sent(16, 1.0f), back(16);
  const auto wrong = [&] {
    int count = 0;
    for (const float each : back) count += !(each == 1.0f);
    return count;
  };
  CHECK_OK(bpsim_copy(session.stream, BPSIM_HOST_TO_DEVICE, device, sent.data(), 64));
  CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, back.data(), device, 64));
  CHECK_EQ(wrong(), 2);
  CHECK(std::isnan(back[8]) && std::isnan(back[9]));
  CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, back.data(), device, 64));
  CHECK_EQ(wrong(), 0);
  CHECK_OK(bpsim_copy(session.stream, BPSIM_DEVICE_TO_HOST, back.data(), device, 64));
  CHECK_EQ(wrong(), 1);
}

TEST(a_launch_without_outputs_cannot_be_corrupted) {
  Session session([](bpsim_config& config) { config.faults = "corrupt@launch=1"; });
  CHECK_OK(launch(session.stream, "bare", [] {}));
  CHECK_STATUS(bpsim_card_synchronize(0), BPSIM_LAUNCH_FAILED, "names no output");
}

TEST(launches_in_a_replay_are_struck_one_by_one) {
  Session session;
  int* const value = allocate<int>(session.stream, 4);
  int* const at = kernel(value);
  const bpsim_range range{value, 4, BPSIM_OTHER, 1};
  put(session.stream, value, 0);
  CHECK_OK(bpsim_card_synchronize(0));
  // Captured launches are not counted, only launches that run.
  CHECK_OK(bpsim_faults_add("corrupt@launch=add,nth=5"));
  CHECK_OK(bpsim_capture_begin(session.stream, 0));
  for (int i = 0; i < 3; ++i)
    CHECK_OK(launch(session.stream, "add", [at](char*, size_t) {
      *at += 1;
      return 0;
    }, &range, 1));
  CHECK_OK(bpsim_memset_async(session.stream, allocate(session.stream, 16), 0, 16));
  bpsim_graph graph = 0;
  CHECK_OK(bpsim_capture_end(session.stream, &graph));
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_EQ(get(session.stream, value), 3);
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_EQ(get(session.stream, value), (5 ^ (0x40 << 16)) + 1);  // the middle byte of four
  CHECK_OK(bpsim_graph_launch(session.stream, graph));
  CHECK_EQ(get(session.stream, value), (5 ^ (0x40 << 16)) + 4);
  CHECK_OK(bpsim_graph_destroy(graph));
}

TEST(faults_can_be_given_as_a_struct) {
  Session session;
  bpsim_fault fault{};
  fault.kind = BPSIM_FAULT_CORRUPT;
  fault.site = BPSIM_AT_LAUNCH;
  fault.name = "mm*";
  fault.card = -1;
  fault.stream = -1;
  fault.nth = 2;
  fault.times = 1;
  fault.corruption = BPSIM_CORRUPT_BITFLIP;
  fault.elements = 1;
  CHECK_OK(bpsim_fault_add(&fault));
  CHECK(struck(session.stream, "mm_1", BPSIM_F32) == expected({}));
  CHECK(struck(session.stream, "mm_2", BPSIM_F32) == expected({{11, 0x7c}}));
  CHECK(struck(session.stream, "mm_3", BPSIM_F32) == expected({}));
  fault.nth = 0;
  CHECK_STATUS(bpsim_fault_add(&fault), BPSIM_INVALID, "counting begins at 1");
  fault.nth = 1;
  fault.card = 2;
  CHECK_STATUS(bpsim_fault_add(&fault), BPSIM_INVALID, "names card 2");
  fault.kind = static_cast<bpsim_fault_kind>(7);
  CHECK_STATUS(bpsim_fault_add(&fault), BPSIM_INVALID, "not a value of its enumeration");
}
