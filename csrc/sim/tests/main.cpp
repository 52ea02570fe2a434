// Runs the tests of the driver.
//
//   driver_tests               runs every test
//   driver_tests NAME...       runs those tests
//   driver_tests scenario NAME runs a scenario, which may end the process or is observed from outside
#include "check.h"

std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}
std::vector<Test>& scenarios() {
  static std::vector<Test> list;
  return list;
}

int main(int count, char** words) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (count == 3 && std::strcmp(words[1], "scenario") == 0) {
    for (const Test& scenario : scenarios())
      if (std::strcmp(scenario.name, words[2]) == 0) {
        scenario.run();
        return failures.load() ? 1 : 0;
      }
    std::printf("there is no scenario %s\n", words[2]);
    return 2;
  }
  int run = 0;
  for (const Test& test : tests()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted = wanted || std::strcmp(words[i], test.name) == 0;
    if (!wanted) continue;
    const int before = failures.load();
    test.run();
    ++run;
    std::printf("%s %s\n", failures.load() == before ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d tests, %d failures\n", run, failures.load());
  return failures.load() || run == 0 ? 1 : 0;
}
