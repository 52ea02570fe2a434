// Maps handles to objects that the user holds, and detects stale handles.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace backplane::sim::driver {

template <class T>
class Handles {
 public:
  uint64_t add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t index;
    if (spare_.empty()) {
      index = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      index = spare_.back();
      spare_.pop_back();
    }
    Slot& slot = slots_[index];
    slot.object = std::move(object);
    return (static_cast<uint64_t>(slot.generation) << 32) | (index + 1);
  }

  // Returns null for an invalid handle.
  std::shared_ptr<T> find(uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot* const slot = at(handle);
    return slot ? slot->object : nullptr;
  }

  // Returns the object, so that it is destroyed outside the lock.
  std::shared_ptr<T> remove(uint64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot* const slot = at(handle);
    if (!slot) return nullptr;
    slot->generation = (slot->generation + 1) & 0x7fffffffu;
    spare_.push_back(static_cast<uint32_t>((handle & 0xffffffffu) - 1));
    return std::move(slot->object);
  }

  void clear() {
    std::vector<Slot> gone;
    std::lock_guard<std::mutex> lock(mutex_);
    gone.swap(slots_);
    spare_.clear();
  }

 private:
  struct Slot {
    std::shared_ptr<T> object;
    uint32_t generation = 0;
  };
  Slot* at(uint64_t handle) {
    const uint64_t index = (handle & 0xffffffffu) - 1;
    if (index >= slots_.size()) return nullptr;
    Slot& slot = slots_[index];
    return slot.object && slot.generation == handle >> 32 ? &slot : nullptr;
  }

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> spare_;
};

}  // namespace backplane::sim::driver
