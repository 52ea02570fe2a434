// Provides a minimal test framework: a list of tests, checks that report and count, and a driver for the duration of a
// test.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../driver/driver.h"

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& tests();     // run by default
std::vector<Test>& scenarios();  // run by name, in their own process, which they may end
inline std::atomic<int> failures{0};

struct Register {
  Register(std::vector<Test>& list, const char* name, void (*run)()) { list.push_back({name, run}); }
};
#define TEST(name)                                             \
  static void name();                                          \
  static const Register register_##name(tests(), #name, name); \
  static void name()
#define SCENARIO(name)                                             \
  static void name();                                              \
  static const Register register_##name(scenarios(), #name, name); \
  static void name()

#define FAILED(...) (failures.fetch_add(1), std::printf("%s:%d: ", __FILE__, __LINE__), std::printf(__VA_ARGS__))
#define CHECK(condition) ((condition) ? (void)0 : (void)FAILED("%s does not hold\n", #condition))
#define CHECK_EQ(left, right) check_equal((left), (right), __FILE__, __LINE__, #left)
#define CHECK_OK(call) CHECK_STATUS(call, BPSIM_OK, "")
// Checks the status and, for errors, a part of the text.
#define CHECK_STATUS(call, status, part) check_status((call), (status), (part), __FILE__, __LINE__, #call)

template <class Left, class Right>
void check_equal(const Left& left, const Right& right, const char* file, int line, const char* what) {
  if (left == right) return;
  failures.fetch_add(1);
  std::printf("%s:%d: %s is %s, not %s\n", file, line, what, std::to_string(left).c_str(),
              std::to_string(right).c_str());
}

inline void check_status(bpsim_status got, bpsim_status wanted, const char* part, const char* file, int line,
                         const char* what) {
  const bool silent = wanted == BPSIM_OK || wanted == BPSIM_NOT_READY;
  if (got == wanted && (silent || std::strstr(bpsim_last_error(), part))) return;
  failures.fetch_add(1);
  std::printf("%s:%d: %s returned %s, not %s with '%s'. Its text: %s\n", file, line, what, bpsim_status_name(got),
              bpsim_status_name(wanted), part, got == BPSIM_OK ? "" : bpsim_last_error());
}

constexpr uint64_t KiB = 1024, MiB = 1024 * KiB;

// Starts the driver for the duration of a test, with two small cards unless `change` modifies the configuration.
struct Session {
  explicit Session(void (*change)(bpsim_config&) = nullptr) {
    bpsim_config config;
    bpsim_config_default(&config);
    config.memory_bytes = 64 * MiB;
    if (change) change(config);
    CHECK_OK(bpsim_init(&config));
    bpsim_default_stream(0, &stream);
    if (config.cards > 1) bpsim_default_stream(1, &other_card);
  }
  ~Session() { CHECK_OK(bpsim_shutdown()); }
  bpsim_stream stream = 0, other_card = 0;  // the default streams of cards 0 and 1
};
