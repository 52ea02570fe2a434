// Exports the runtime's settings and queries as C functions for Python, and two operators.

#include "runtime/control.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <exception>
#include <string>

#include "runtime/counters.h"
#include "runtime/generator.h"
#include "runtime/state.h"

#define BPNPU_API extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

// Returns 0, or -1 with an error text: exceptions must not cross into C.
template <class F>
int attempt(F&& action) {
  try {
    action();
    return 0;
  } catch (const c10::Error& fault) {
    last_error = fault.what_without_backtrace();
  } catch (const std::exception& fault) {
    last_error = fault.what();
  }
  return -1;
}

}  // namespace

namespace sim = backplane::sim;

BPNPU_API const char* bpnpu_last_error() { return last_error.c_str(); }

BPNPU_API int bpnpu_configure(const bpsim_config* config) {
  return attempt([&] { sim::configure(*config); });
}

BPNPU_API int bpnpu_start() {
  return attempt([] { sim::start(); });
}

BPNPU_API int bpnpu_started() { return sim::started() ? 1 : 0; }
BPNPU_API int bpnpu_forked_after_start() { return sim::forked_after_start() ? 1 : 0; }
BPNPU_API int bpnpu_card_count() { return sim::card_count(); }
BPNPU_API int bpnpu_current_card() { return sim::current_card(); }

BPNPU_API int bpnpu_set_current_card(int index) {
  return attempt([&] { sim::set_current_card(static_cast<c10::DeviceIndex>(index)); });
}

BPNPU_API uint64_t bpnpu_current_stream(int index) {
  uint64_t handle = 0;
  attempt([&] { handle = sim::current_stream_of(static_cast<c10::DeviceIndex>(index)); });
  return handle;
}

BPNPU_API void bpnpu_set_compute_threads(int count) { sim::set_compute_threads(count); }
BPNPU_API int bpnpu_compute_threads() { return sim::compute_threads(); }
BPNPU_API void bpnpu_set_fallback(int policy) { sim::set_fallback(static_cast<sim::Fallback>(policy)); }
BPNPU_API void bpnpu_set_pool(uint64_t pool) { sim::set_current_pool(pool); }
BPNPU_API uint64_t bpnpu_current_pool() { return sim::current_pool(); }

// Returns 1 if registered, 0 if the operator has no CPU kernel, -1 on an error.
BPNPU_API int bpnpu_launch_cpu_kernel(const char* name) {
  bool done = false;
  const int status = attempt([&] { done = sim::launch_cpu_kernel(name); });
  return status != 0 ? status : (done ? 1 : 0);
}

// The text is valid until this thread's next call.
BPNPU_API const char* bpnpu_report() {
  thread_local std::string text;
  text = sim::report();
  return text.c_str();
}

BPNPU_API void bpnpu_reset_counters() { sim::reset_counters(); }

// PyTorch wraps generators for Python; an operator returns one without a Python extension module.
TORCH_LIBRARY(bpnpu, library) {
  library.def("default_generator(int card) -> Generator?", [](int64_t card) {
    return sim::default_generator(static_cast<c10::DeviceIndex>(card));
  });
  // torch.accelerator.synchronize would not do: it does nothing before the process has made its first tensor, although
  // streams and events may already be in use. This is an operator, so that its errors are PyTorch's.
  library.def("synchronize(int card) -> ()", [](int64_t card) { sim::synchronize(static_cast<c10::DeviceIndex>(card)); });
}
