// Implements what PyTorch requires of every accelerator: the device guard (current card, streams, events) and the
// hooks.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime/generator.h"
#include "runtime/memory.h"

namespace backplane::sim {
namespace {

// PyTorch passes events as opaque pointers; ours are the driver's handles.
bpsim_event event_of(void* event) { return reinterpret_cast<bpsim_event>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_card()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_card(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < card_count()) set_current_card(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(card_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(settled(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, settled(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pooled_stream(settled(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return pooled_stream(settled(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return ready(bpsim_stream_query(handle_of(stream)), "stream query");
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(bpsim_stream_synchronize(handle_of(stream)), "synchronizing a stream");
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    if (!started()) return false;
    bpsim_capture_state state = BPSIM_CAPTURE_NONE;
    check(bpsim_capture_status(handle_of(stream), &state), "capture status");
    return state != BPSIM_CAPTURE_NONE;
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "an event of bpnpu:", static_cast<int>(index),
                " cannot be recorded on a stream of ", stream.device());
    const bpsim_stream on = handle_of(stream);
    if (*event == nullptr) {
      bpsim_event made = 0;
      check(bpsim_event_create(flag == c10::EventFlag::BACKEND_DEFAULT, &made), "creating an event");
      *event = reinterpret_cast<void*>(made);
    }
    check(bpsim_event_record(event_of(*event), on), "recording an event");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    check(bpsim_stream_wait_event(handle_of(stream), event_of(event)), "waiting for an event");
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ready(bpsim_event_query(event_of(event)), "event query");
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(bpsim_event_synchronize(event_of(event)), "waiting for an event");
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "elapsed_time: both events must be recorded first");
    double nanoseconds = 0;
    check(bpsim_event_elapsed_ns(event_of(from), event_of(to), &nanoseconds), "elapsed time");
    return nanoseconds * 1e-6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) bpsim_event_destroy(event_of(event));
  }

 private:
  static c10::DeviceIndex settled(c10::Device device) { return device.has_index() ? device.index() : current_card(); }
  static bool ready(bpsim_status status, const char* doing) {
    if (status == BPSIM_NOT_READY) return false;
    check(status, doing);
    return true;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return card_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return started(); }
  void init() const override { start(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(card_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_card(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_card(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current_card();
    set_current_card(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_card() : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

  at::Device getDeviceFromPtr(void* data) const override {
    bpsim_block_info info;
    check(bpsim_pointer_info(data, &info), "querying the card of a pointer");
    TORCH_CHECK(info.card >= 0, "this pointer is not a device pointer of bpnpu");
    return c10::Device(kType, static_cast<c10::DeviceIndex>(info.card));
  }
  bool isPinnedPtr(const void* data) const override {
    if (!started()) return false;
    bpsim_block_info info;
    return bpsim_pointer_info(data, &info) == BPSIM_OK && info.place == BPSIM_HOST_PINNED;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

// Runs when the library is loaded. Python sets the name of the backend and its module.
struct Registration {
  Registration() {
    register_allocators();
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registration;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace backplane::sim
