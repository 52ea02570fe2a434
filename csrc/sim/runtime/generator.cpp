// Implements the random generator of a card.

#include "runtime/generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace backplane::sim {

SimGenerator::SimGenerator(c10::DeviceIndex index)
    : SimGenerator(index, at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

SimGenerator::SimGenerator(c10::DeviceIndex index, at::Generator numbers)
    : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      numbers_(std::move(numbers)) {}

void SimGenerator::settle() const {
  if (queued_.exchange(false) || recorded_.load()) synchronize(device().index());
}

void SimGenerator::set_current_seed(uint64_t seed) {
  settle();
  numbers_.set_current_seed(seed);
}

void SimGenerator::set_offset(uint64_t) { TORCH_CHECK(false, "a generator of bpnpu has no offset; use its state"); }
uint64_t SimGenerator::get_offset() const { TORCH_CHECK(false, "a generator of bpnpu has no offset; use its state"); }

uint64_t SimGenerator::current_seed() const { return numbers_.current_seed(); }

uint64_t SimGenerator::seed() {
  settle();
  return numbers_.seed();
}

void SimGenerator::set_state(const c10::TensorImpl& state) {
  settle();
  numbers_.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  settle();
  return numbers_.unsafeGetGeneratorImpl()->get_state();
}

SimGenerator* SimGenerator::clone_impl() const {
  settle();
  return new SimGenerator(device().index(), numbers_.clone());
}

at::Generator SimGenerator::numbers_for_launch() {
  queued_.store(true);
  bpsim_capture_state state = BPSIM_CAPTURE_NONE;
  check(bpsim_capture_status(current_stream_of(device().index()), &state), "drawing random numbers");
  if (state != BPSIM_CAPTURE_NONE) recorded_.store(true);
  return numbers_;
}

at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < card_count(); ++i) made->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  if (index < 0) index = current_card();
  TORCH_CHECK(static_cast<size_t>(index) < all->size(), "bpnpu:", static_cast<int>(index), " does not exist");
  return (*all)[index];
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<SimGenerator>(index < 0 ? current_card() : index);
}

at::Generator numbers_for_launch(const std::optional<at::Generator>& given, c10::DeviceIndex index) {
  const bool own = given.has_value() && given->defined();
  const at::Generator& chosen = own ? *given : default_generator(index);
  TORCH_CHECK(chosen.device().type() == kType, "expected a generator of bpnpu, got one of ", chosen.device());
  TORCH_CHECK(chosen.device().index() == index, "expected a generator of bpnpu:", static_cast<int>(index),
              ", the device of the tensor, got one of ", chosen.device());
  return static_cast<SimGenerator*>(chosen.unsafeGetGeneratorImpl())->numbers_for_launch();
}

}  // namespace backplane::sim
