// Implements an instance of the driver: construction, and lookup of cards, streams, pools and pointers.
#include <sched.h>

#include <algorithm>
#include <thread>

#include "process.h"

namespace backplane::sim::driver {
namespace {

int64_t cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int64_t>(std::thread::hardware_concurrency());
}

// The text belongs to the caller and may be freed.
bpsim_config without_faults(bpsim_config config) {
  config.faults = nullptr;
  return config;
}

}  // namespace

Driver::Driver(const bpsim_config& given) : config(without_faults(given)), races(*this), pinned(races) {
  const int64_t count = cores();
  spin.yields = count <= 4;
  spin.limit_ns = config.spin_us >= 0 ? int64_t{config.spin_us} * 1000 : count <= 1 ? 0 : 100000;
  sync_timeout_ns.store(int64_t{config.sync_timeout_ms} * 1000000);
}

bpsim_status Driver::create(const bpsim_config& config, std::unique_ptr<Driver>* driver) {
  if (config.cards < 1 || config.cards > BPSIM_MAX_CARDS)
    return fail(BPSIM_INVALID, "bpsim_init: cards is %d; it must be 1 to %d", config.cards, BPSIM_MAX_CARDS);
  const uint64_t memory = config.memory_bytes / kChunk * kChunk;
  if (memory == 0 || config.memory_bytes > (uint64_t{1} << 43))
    return fail(BPSIM_INVALID, "bpsim_init: a card cannot have %s of memory; use 2 MiB to 8 TiB",
                size_text(config.memory_bytes).c_str());
  std::vector<FaultRule> rules;
  bpsim_status status = parse_faults(config.faults, &rules);
  if (status != BPSIM_OK) return status;
  std::unique_ptr<Driver> made(new Driver(config));
  for (int32_t i = 0; i < config.cards; ++i) {
    std::unique_ptr<Card> card;
    status = Card::create(*made, i, memory, &card);
    if (status != BPSIM_OK) return status;
    made->cards.push_back(std::move(card));
  }
  status = made->add_faults(rules);
  if (status == BPSIM_OK) status = made->set_model(config.model);
  if (status == BPSIM_OK) status = made->check_races(config.check_races);
  if (status == BPSIM_OK) *driver = std::move(made);
  return status;
}

Driver::~Driver() {
  // Objects that hold memory of cards are destroyed before the cards.
  for (const auto& card : cards) card->each_stream([](Stream& stream) { stream.capture = nullptr; });
  graphs.clear();
  events.clear();
  pools.clear();
  cards.clear();
}

bpsim_status Driver::find_card(int32_t index, Card** card) {
  if (index < 0 || static_cast<size_t>(index) >= cards.size())
    return fail(BPSIM_INVALID, "there is no card %d: there are %zu cards, numbered from 0", index, cards.size());
  *card = cards[static_cast<size_t>(index)].get();
  return (*card)->is_lost() ? (*card)->lost_status() : BPSIM_OK;
}

bpsim_status Driver::find_stream(bpsim_stream handle, Stream** stream) {
  const uint64_t card = (handle >> 32) - 1;
  if (card < cards.size()) {
    Stream* const found = cards[card]->stream_at(static_cast<uint32_t>(handle & 0xff));
    if (found && found->handle() == handle && found->is_open()) {
      *stream = found;
      return BPSIM_OK;
    }
  }
  return fail(BPSIM_INVALID, "0x%llx is not a stream: it was destroyed, or never created",
              static_cast<unsigned long long>(handle));
}

bpsim_status Driver::find_pool(bpsim_pool handle, std::shared_ptr<Pool>* pool) {
  *pool = pools.find(handle);
  if (*pool) return BPSIM_OK;
  return fail(BPSIM_INVALID, "0x%llx is not a pool: it was destroyed, or never created",
              static_cast<unsigned long long>(handle));
}

Card* Driver::card_with(uintptr_t address) const {
  for (const auto& card : cards)
    if (card->arena().contains(address)) return card.get();
  return nullptr;
}

std::string Driver::describe(const void* pointer) {
  if (!pointer) return "a null pointer";
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (Card* const card = card_with(address)) {
    const Located found = card->allocator().locate(address);
    const std::string owner = "card " + std::to_string(card->index()) + "'s memory";
    if (!found.block) return owner + " that is not allocated";
    if (found.state != BlockState::Used) return "freed memory of card " + std::to_string(card->index());
    return owner + (found.asleep ? " in a suspended pool" : "");
  }
  for (const auto& card : cards)
    if (card->arena().contains_kernel(address))
      return "a kernel address of card " + std::to_string(card->index()) +
             "'s memory, not a device pointer";
  bool freed = false;
  if (pinned.find(address, &freed)) return freed ? "freed pinned host memory" : "pinned host memory";
  return "host memory";
}

bpsim_status Driver::check_device(const char* call, const char* what, uintptr_t address, uint64_t bytes,
                                  const Card* wanted) {
  const void* const pointer = reinterpret_cast<const void*>(address);
  Card* const card = card_with(address);
  if (!card || (wanted && card != wanted)) {
    const std::string place = wanted ? "card " + std::to_string(wanted->index()) + "'s memory" : "a card's memory";
    return fail(BPSIM_INVALID, "%s: %s (%p) must be %s, but is %s", call, what, pointer, place.c_str(),
                describe(pointer).c_str());
  }
  const Located found = card->allocator().locate(address);
  if (!found.block || found.state != BlockState::Used || found.asleep)
    return fail(BPSIM_INVALID, "%s: %s (%p) is %s", call, what, pointer, describe(pointer).c_str());
  const uint64_t offset = address - found.start;
  if (bytes > found.bytes - offset)
    return fail(BPSIM_INVALID, "%s: %s (%p, %s) exceeds its allocation on card %d: it begins at byte %llu of %s", call,
                what, pointer, size_text(bytes).c_str(), card->index(), static_cast<unsigned long long>(offset),
                size_text(found.requested).c_str());
  return BPSIM_OK;
}

bpsim_status Driver::add_faults(const std::vector<FaultRule>& rules) {
  for (const FaultRule& rule : rules)
    if (rule.card >= static_cast<int32_t>(cards.size()))
      return fail(BPSIM_INVALID, "faults: a rule names card %d, but there are %zu cards, numbered from 0", rule.card,
                  cards.size());
  if (!rules.empty()) faults.add(rules);
  return BPSIM_OK;
}

bpsim_status Driver::check_races(int mode) {
  if (mode < BPSIM_RACES_OFF || mode > BPSIM_RACES_FAIL)
    return fail(BPSIM_INVALID, "check_races: %d is not a mode; use off, report or fail", mode);
  races.set(static_cast<bpsim_races>(mode));
  return BPSIM_OK;
}

bpsim_status Driver::set_model(const bpsim_model& given) {
  const bpsim_status status = check_model(given);
  if (status != BPSIM_OK) return status;
  std::lock_guard<std::mutex> lock(model_mutex_);
  if (!given.on) {
    model.store(nullptr);
    return BPSIM_OK;
  }
  models_.push_back(std::make_unique<bpsim_model>(given));
  model.store(models_.back().get(), std::memory_order_release);
  return BPSIM_OK;
}

}  // namespace backplane::sim::driver
