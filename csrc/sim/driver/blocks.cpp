// Implements the lookup of blocks by address and the bins of free blocks.

#include "blocks.h"

#include "stream.h"

namespace backplane::sim::driver {

BlockTable::BlockTable(const Arena& arena) : arena_(arena), chunks_(arena.bytes() / kChunk) {}

void BlockTable::enter(Segment* segment) {
  const uint64_t first = (segment->start() - arena_.base()) / kChunk;
  for (uint64_t i = 0; i < segment->size() / kChunk; ++i) chunks_[first + i].store(segment, std::memory_order_release);
}

void BlockTable::remove(const Segment* segment) {
  const uint64_t first = (segment->start() - arena_.base()) / kChunk;
  for (uint64_t i = 0; i < segment->size() / kChunk; ++i) chunks_[first + i].store(nullptr, std::memory_order_release);
}

Segment* BlockTable::segment_at(uintptr_t address) const {
  if (!arena_.contains(address)) return nullptr;
  return chunks_[(address - arena_.base()) / kChunk].load(std::memory_order_acquire);
}

const Block* BlockTable::find_without_lock(uintptr_t address) const {
  const Segment* const segment = segment_at(address);
  if (!segment) return nullptr;
  const Block* block = segment->first.load(std::memory_order_acquire);
  // Bounded, because links that change during the walk could form a circle.
  for (uint64_t steps = segment->size() / 512 + 1; block && steps; --steps) {
    if (address - block->start() < block->size()) return block;
    block = block->after.load(std::memory_order_acquire);
  }
  return nullptr;
}

unsigned Bins::bin_of(uint64_t bytes) {
  const uint64_t units = bytes / 512;
  if (units < 8) return static_cast<unsigned>(units);
  const unsigned exponent = 63u - static_cast<unsigned>(__builtin_clzll(units));
  const unsigned bin = (exponent - 2) * 8 + static_cast<unsigned>((units >> (exponent - 3)) & 7);
  return bin < kBins ? bin : kBins - 1;
}

void Bins::insert(Block* block) {
  const unsigned bin = bin_of(block->size());
  block->previous_in_bin = nullptr;
  block->next_in_bin = heads_[bin];
  if (heads_[bin]) heads_[bin]->previous_in_bin = block;
  heads_[bin] = block;
  occupied_[bin / 64] |= uint64_t{1} << (bin % 64);
}

void Bins::remove(Block* block) {
  const unsigned bin = bin_of(block->size());
  if (block->previous_in_bin)
    block->previous_in_bin->next_in_bin = block->next_in_bin;
  else
    heads_[bin] = block->next_in_bin;
  if (block->next_in_bin) block->next_in_bin->previous_in_bin = block->previous_in_bin;
  if (!heads_[bin]) occupied_[bin / 64] &= ~(uint64_t{1} << (bin % 64));
}

Block* Bins::find(uint64_t bytes, const Stream* stream) const {
  for (unsigned bin = bin_of(bytes); bin < kBins;) {
    const uint64_t rest = occupied_[bin / 64] >> (bin % 64);
    if (!rest) {
      bin = (bin / 64 + 1) * 64;
      continue;
    }
    bin += static_cast<unsigned>(__builtin_ctzll(rest));
    Block* best = nullptr;
    for (Block* block = heads_[bin]; block; block = block->next_in_bin) {
      if (block->size() < bytes || (best && best->size() <= block->size())) continue;
      if (block->stream && block->stream != stream && !block->stream->finished(block->sequence)) continue;
      best = block;
      if (best->size() == bytes) break;
    }
    if (best) return best;
    ++bin;
  }
  return nullptr;
}

}  // namespace backplane::sim::driver
