// Implements the memory functions of the C API.
#include "process.h"

using namespace backplane::sim::driver;

namespace {

// Finds the pool for an allocation on this stream; `held` keeps it alive.
bpsim_status choose_pool(Driver& driver, Stream& stream, bpsim_pool handle, std::shared_ptr<Pool>* held, Pool** pool) {
  if (handle != 0) {
    const bpsim_status status = driver.find_pool(handle, held);
    if (status != BPSIM_OK) return status;
    if ((*held)->card != &stream.card())
      return fail(BPSIM_INVALID, "alloc: the pool belongs to card %d, the stream to card %d: use a pool of that card",
                  (*held)->card->index(), stream.card().index());
  } else if (stream.capturing.load()) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture) *held = stream.capture->pool;
  }
  *pool = *held ? held->get() : &stream.card().allocator().general();
  return BPSIM_OK;
}

bpsim_status strike_allocation(Driver& driver, Card& card, uint64_t bytes) {
  std::vector<Strike> strikes;
  driver.faults.match(BPSIM_AT_ALLOC, "", card.index(), -1, 0, &strikes);
  for (const Strike& strike : strikes) {
    if (strike.kind == BPSIM_FAULT_OOM) return card.allocator().out_of_memory(bytes, " (an injected fault)");
    card.lose("by an injected fault, at an allocation");
    return card.lost_status();
  }
  return BPSIM_OK;
}

bpsim_status no_device_pointer(Driver& driver, const char* call, const void* pointer) {
  return fail(BPSIM_INVALID, "%s: %p is %s: it must be a device pointer", call, pointer,
              driver.describe(pointer).c_str());
}

template <class Body>
bpsim_status with_pool(bpsim_pool handle, Body&& body) noexcept {
  return with_driver([&](Driver& driver) {
    std::shared_ptr<Pool> pool;
    const bpsim_status status = driver.find_pool(handle, &pool);
    if (status != BPSIM_OK) return status;
    if (pool->card->is_lost()) return pool->card->lost_status();
    return body(driver, *pool->card, pool);
  });
}

}  // namespace

extern "C" {

bpsim_status bpsim_alloc(bpsim_stream handle, bpsim_pool pool_handle, uint64_t bytes, void** pointer) {
  return with_stream(handle, [&](Driver& driver, Stream& stream) {
    std::shared_ptr<Pool> held;
    Pool* pool = nullptr;
    bpsim_status status = choose_pool(driver, stream, pool_handle, &held, &pool);
    if (status != BPSIM_OK) return status;
    if (bytes == 0) {
      *pointer = nullptr;
      return BPSIM_OK;
    }
    if (driver.faults.armed()) status = strike_allocation(driver, stream.card(), bytes);
    return status == BPSIM_OK ? stream.card().allocator().allocate(stream, *pool, bytes, pointer) : status;
  });
}

bpsim_status bpsim_free(void* pointer) {
  return with_driver([&](Driver& driver) {
    if (!pointer) return BPSIM_OK;
    Card* const card = driver.card_with(reinterpret_cast<uintptr_t>(pointer));
    if (!card) return no_device_pointer(driver, "free", pointer);
    const bpsim_status status = card->allocator().release(pointer);
    return status == BPSIM_OK && card->is_lost() ? card->lost_status() : status;
  });
}

bpsim_status bpsim_record_stream(void* pointer, bpsim_stream handle) {
  return with_stream(handle, [&](Driver& driver, Stream& stream) {
    if (!pointer) return BPSIM_OK;
    Card* const card = driver.card_with(reinterpret_cast<uintptr_t>(pointer));
    return card ? card->allocator().record_stream(pointer, stream)
                : no_device_pointer(driver, "record_stream", pointer);
  });
}

bpsim_status bpsim_empty_cache(int32_t index) {
  return with_card(index, [](Driver&, Card& card) {
    card.allocator().empty_cache();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_memory_statistics(int32_t index, bpsim_memory_stats* stats) {
  return with_card(index, [&](Driver&, Card& card) {
    card.allocator().statistics(stats);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_host_resident(int32_t index, uint64_t* bytes) {
  return with_card(index, [&](Driver&, Card& card) {
    *bytes = card.allocator().resident();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_reset_peaks(int32_t index) {
  return with_card(index, [](Driver&, Card& card) {
    card.allocator().reset_peaks();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_pool_create(int32_t index, bpsim_pool* pool) {
  return with_card(index, [&](Driver& driver, Card& card) {
    *pool = driver.pools.create(card, true)->handle;
    return BPSIM_OK;
  });
}

bpsim_status bpsim_pool_destroy(bpsim_pool handle) {
  return with_driver([&](Driver& driver) {
    std::shared_ptr<Pool> pool;
    const bpsim_status status = driver.find_pool(handle, &pool);
    if (status != BPSIM_OK) return status;
    if (!driver.pools.held(handle))
      return fail(BPSIM_INVALID, "pool_destroy: the pool belongs to a graph: destroy the graph");
    if (pool->asleep.load()) return fail(BPSIM_INVALID, "pool_destroy: the pool is suspended: resume it first");
    driver.pools.drop(handle);
    return pool->card->is_lost() ? pool->card->lost_status() : BPSIM_OK;
  });
}

bpsim_status bpsim_pool_suspend(bpsim_pool handle) {
  return with_pool(handle, [](Driver&, Card& card, const std::shared_ptr<Pool>& pool) {
    bpsim_status status = card.may_synchronize("bpsim_pool_suspend", nullptr);
    // Work on the pool's memory must be done; its failure is reported by other calls.
    if (status == BPSIM_OK) status = card.synchronize();
    if (status != BPSIM_OK && status != BPSIM_LAUNCH_FAILED) return status;
    return card.allocator().suspend(*pool);
  });
}

bpsim_status bpsim_pool_resume(bpsim_pool handle) {
  return with_pool(handle, [](Driver&, Card& card, const std::shared_ptr<Pool>& pool) {
    return card.allocator().resume(*pool);
  });
}

bpsim_status bpsim_pointer_info(const void* pointer, bpsim_block_info* info) {
  return with_driver([&](Driver& driver) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    *info = bpsim_block_info{BPSIM_HOST, -1, nullptr, 0, 0, 0, 0};
    Card* const card = driver.card_with(address);
    if (!card) {
      bool freed = false;
      const Pinned::Found found = driver.pinned.find(address, &freed);
      if (!found) return BPSIM_OK;
      info->place = freed ? BPSIM_HOST_FREED : BPSIM_HOST_PINNED;
      info->base = reinterpret_cast<void*>(found.start);
      info->bytes = info->rounded = found.bytes;
      return BPSIM_OK;
    }
    info->card = card->index();
    info->place = BPSIM_DEVICE_FREED;
    const Located found = card->allocator().locate(address);
    if (!found.block || found.state != BlockState::Used) return BPSIM_OK;
    info->place = found.asleep ? BPSIM_DEVICE_ASLEEP : BPSIM_DEVICE;
    info->base = reinterpret_cast<void*>(found.start);
    info->bytes = found.requested;
    info->rounded = found.bytes;
    info->pool = found.pool->handle;
    info->stream = found.stream->handle();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_blocks(int32_t index, bpsim_pool handle, bpsim_block_info* blocks, uint64_t capacity,
                          uint64_t* count) {
  return with_card(index, [&](Driver& driver, Card& card) {
    std::shared_ptr<Pool> pool;
    if (handle != 0) {
      const bpsim_status status = driver.find_pool(handle, &pool);
      if (status != BPSIM_OK) return status;
    }
    *count = card.allocator().blocks(pool.get(), blocks, capacity);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_translate(const void* device_pointer, void** kernel_pointer) {
  return with_driver([&](Driver& driver) {
    if (!device_pointer) {
      *kernel_pointer = nullptr;
      return BPSIM_OK;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(device_pointer);
    const Card* const card = driver.card_with(address);
    if (!card) return no_device_pointer(driver, "translate", device_pointer);
    *kernel_pointer = card->arena().kernel_pointer(address);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_card_range(int32_t index, uintptr_t* first, uint64_t* bytes, ptrdiff_t* kernel_offset) {
  return with_card(index, [&](Driver&, Card& card) {
    *first = card.arena().base();
    *bytes = card.arena().bytes();
    *kernel_offset = card.arena().kernel_offset();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_host_alloc(uint64_t bytes, void** pointer) {
  return with_driver([&](Driver& driver) {
    *pointer = nullptr;
    return bytes == 0 ? BPSIM_OK : driver.pinned.allocate(bytes, pointer);
  });
}

bpsim_status bpsim_host_free(void* pointer) {
  return with_driver(
      [&](Driver& driver) { return pointer ? driver.pinned.release(pointer) : BPSIM_OK; });
}

}  // extern "C"
