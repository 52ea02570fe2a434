// Implements the protection of pinned memory with double mappings and mprotect.

#include "pinned_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace backplane::sim::driver {

PinnedGuard::PinnedGuard() : page_(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE))) {
  readable_.reserve(64);  // a signal handler must not allocate
}

std::shared_ptr<void> PinnedGuard::map(uint64_t bytes) {
  const uint64_t whole = (bytes + page_ - 1) / page_ * page_;
  const int file = memfd_create("backplane-pinned", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void* views[2] = {MAP_FAILED, MAP_FAILED};
  if (ftruncate(file, static_cast<off_t>(whole)) == 0)
    for (void*& view : views) view = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (views[0] == MAP_FAILED || views[1] == MAP_FAILED) {
    for (void* const view : views)
      if (view != MAP_FAILED) munmap(view, whole);
    return nullptr;
  }
  // A child process would write into the parent's memory.
  for (void* const view : views) madvise(view, whole, MADV_DONTFORK);
  const auto address = [](void* view) { return reinterpret_cast<uintptr_t>(view); };
  std::lock_guard<std::mutex> lock(mutex_);
  mappings_.push_back({address(views[0]), address(views[1]), whole});
  return std::shared_ptr<void>(views[0], [this](void* view) { unmap(reinterpret_cast<uintptr_t>(view)); });
}

void PinnedGuard::unmap(uintptr_t user) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(mappings_.begin(), mappings_.end(), [&](const auto& one) { return one.user == user; });
  if (found == mappings_.end()) return;
  const auto inside = [&](const Flight& flight) { return flight.first - user < found->bytes; };
  flights_.erase(std::remove_if(flights_.begin(), flights_.end(), inside), flights_.end());
  munmap(reinterpret_cast<void*>(found->user), found->bytes);
  munmap(reinterpret_cast<void*>(found->copies), found->bytes);
  mappings_.erase(found);
}

const PinnedGuard::Mapping* PinnedGuard::mapping_at(uintptr_t address) const {
  for (const Mapping& mapping : mappings_)
    if (address - mapping.user < mapping.bytes) return &mapping;
  return nullptr;
}

uintptr_t PinnedGuard::for_copies(uintptr_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Mapping* const mapping = mapping_at(address);
  return mapping ? mapping->copies + (address - mapping->user) : address;
}

void PinnedGuard::add(const Flight& flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_at(flight.first)) return;  // allocated before the checks were enabled
  // The same copy of a later step: the last one counts.
  for (Flight& other : flights_)
    if (other.first == flight.first && other.last == flight.last && other.written == flight.written &&
        other.stream == flight.stream) {
      other = flight;
      return protect(flight.first, flight.last);
    }
  flights_.push_back(flight);
  protect(flight.first, flight.last);
}

void PinnedGuard::land(const Clock& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < flights_.size();) {
    const Flight flight = flights_[i];
    if (flight.position > known.of(flight.stream)) {
      ++i;
      continue;
    }
    flights_[i] = flights_.back();
    flights_.pop_back();
    protect(flight.first, flight.last);
  }
}

void PinnedGuard::forget_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.clear();
  for (const Mapping& mapping : mappings_) protect(mapping.user, mapping.user + mapping.bytes);
}

// Sets the access rights of every page in the range to what the copies in flight allow.
void PinnedGuard::protect(uintptr_t first, uintptr_t last) {
  const uintptr_t start = first / page_ * page_;
  const uintptr_t end = (last + page_ - 1) / page_ * page_;
  const auto inside = [&](uintptr_t page) { return page - start < end - start; };
  readable_.erase(std::remove_if(readable_.begin(), readable_.end(), inside), readable_.end());
  uintptr_t run = start;
  int allowed = allowed_in(start);
  for (uintptr_t page = start + page_; page <= end; page += page_) {
    const int next = page < end ? allowed_in(page) : -1;
    if (next == allowed) continue;
    mprotect(reinterpret_cast<void*>(run), page - run, allowed);
    run = page;
    allowed = next;
  }
}

int PinnedGuard::allowed_in(uintptr_t page) const {
  int allowed = PROT_READ | PROT_WRITE;
  for (const Flight& flight : flights_)
    if (flight.first < page + page_ && page < flight.last) allowed &= flight.written ? PROT_NONE : PROT_READ;
  return allowed;
}

bool PinnedGuard::touched(uintptr_t address, Flight* flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_at(address)) return false;
  const uintptr_t page = address / page_ * page_;
  for (const Flight& one : flights_)
    if (one.first <= address && address < one.last && (flight->position == 0 || one.written)) *flight = one;
  // A copy in flight only reads the byte, and the page is closed because of another copy: reading is allowed. Whether
  // the access is a read shows when it is repeated.
  const bool closed = allowed_in(page) == PROT_NONE;
  const bool tried = std::find(readable_.begin(), readable_.end(), page) != readable_.end();
  if (flight->position != 0 && !flight->written && closed && !tried) {
    if (readable_.size() == readable_.capacity()) {  // protects the oldest again; a later read of it faults again
      const uintptr_t oldest = readable_.front();
      readable_.erase(readable_.begin());
      mprotect(reinterpret_cast<void*>(oldest), page_, allowed_in(oldest));
    }
    readable_.push_back(page);
    *flight = {};
    mprotect(reinterpret_cast<void*>(page), page_, PROT_READ);
    return true;
  }
  mprotect(reinterpret_cast<void*>(page), page_, PROT_READ | PROT_WRITE);
  return true;
}

}  // namespace backplane::sim::driver
