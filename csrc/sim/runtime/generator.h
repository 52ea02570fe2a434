// Declares the random generator of a card.
#pragma once

#include <ATen/core/Generator.h>

#include "runtime/state.h"

namespace backplane::sim {

// Launches draw in stream order from a host generator that belongs to this one, so a seed gives the same numbers as on
// the CPU. Reading or changing the state waits for the queued draws.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex index);
  SimGenerator(c10::DeviceIndex index, at::Generator numbers);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return kType; }

  // Returns the host generator for a launch on the card; the launch takes the generator's lock when it runs.
  at::Generator numbers_for_launch();

 private:
  SimGenerator* clone_impl() const override;
  void settle() const;

  at::Generator numbers_;
  mutable std::atomic<bool> queued_{false};
  std::atomic<bool> recorded_{false};  // by a graph, whose replays are not visible here: one may always be in flight
};

at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// Returns the host generator behind the generator given to an operator, or behind the card's default one.
at::Generator numbers_for_launch(const std::optional<at::Generator>& given, c10::DeviceIndex index);

}  // namespace backplane::sim
