// Implements the C API for the process, cards, faults and traces.
#include "access_fault.h"
#include "process.h"

using namespace backplane::sim::driver;

extern "C" {

const char* bpsim_last_error(void) { return last_error(); }

const char* bpsim_status_name(bpsim_status status) {
  switch (status) {
    case BPSIM_OK: return "BPSIM_OK";
    case BPSIM_NOT_READY: return "BPSIM_NOT_READY";
    case BPSIM_INVALID: return "BPSIM_INVALID";
    case BPSIM_NOT_INITIALIZED: return "BPSIM_NOT_INITIALIZED";
    case BPSIM_FORKED: return "BPSIM_FORKED";
    case BPSIM_OUT_OF_MEMORY: return "BPSIM_OUT_OF_MEMORY";
    case BPSIM_LAUNCH_FAILED: return "BPSIM_LAUNCH_FAILED";
    case BPSIM_TIMEOUT: return "BPSIM_TIMEOUT";
    case BPSIM_LOST: return "BPSIM_LOST";
    case BPSIM_CAPTURE: return "BPSIM_CAPTURE";
    case BPSIM_SYSTEM: return "BPSIM_SYSTEM";
    case BPSIM_RACE: return "BPSIM_RACE";
  }
  return "unknown status";
}

void bpsim_config_default(bpsim_config* config) {
  *config = bpsim_config{};
  config->struct_size = sizeof *config;
  config->cards = 2;
  config->memory_bytes = uint64_t{1} << 30;
  config->spin_us = -1;
  config->fault_handler = 1;
}

bpsim_status bpsim_init(const bpsim_config* config) {
  if (!config || config->struct_size != sizeof *config)
    return fail(BPSIM_INVALID, "bpsim_init: the configuration is of another driver version: fill it with "
                "bpsim_config_default first");
  try {
    return start_driver(*config);
  } catch (const std::exception& thrown) {
    return fail(BPSIM_SYSTEM, "bpsim_init: %s", thrown.what());
  }
}

bpsim_status bpsim_shutdown(void) {
  try {
    return stop_driver();
  } catch (const std::exception& thrown) {
    return fail(BPSIM_SYSTEM, "bpsim_shutdown: %s", thrown.what());
  }
}

int bpsim_is_initialized(void) { return driver_runs() ? 1 : 0; }

bpsim_status bpsim_card_count(int32_t* count) {
  return with_driver([&](Driver& driver) {
    *count = static_cast<int32_t>(driver.cards.size());
    return BPSIM_OK;
  });
}

bpsim_status bpsim_card_reset(int32_t index) {
  return with_card(index, [](Driver&, Card& card) { return card.reset(); });
}

bpsim_status bpsim_card_synchronize(int32_t index) {
  return with_card(index, [](Driver&, Card& card) {
    const bpsim_status status = card.may_synchronize("bpsim_card_synchronize", nullptr);
    return status == BPSIM_OK ? card.synchronize() : status;
  });
}

bpsim_status bpsim_card_counters(int32_t index, bpsim_counters* counters) {
  return with_card(index, [&](Driver&, Card& card) {
    *counters = bpsim_counters{card.counts.launches.load(), card.counts.copies.load(),
                               card.counts.graph_launches.load(), card.counts.dropped.load(), 0};
    card.each_stream([&](const Stream& stream) { counters->modelled_busy_ns += stream.modelled_busy_ns(); });
    return BPSIM_OK;
  });
}

bpsim_status bpsim_install_fault_handler(void) {
  return with_driver([](Driver& driver) {
    watch_accesses(&driver);
    return install_access_handler();
  });
}

bpsim_status bpsim_set_model(const bpsim_model* model) {
  return with_driver([&](Driver& driver) { return driver.set_model(*model); });
}

bpsim_status bpsim_set_sync_timeout(uint32_t milliseconds) {
  return with_driver([&](Driver& driver) {
    driver.sync_timeout_ns.store(int64_t{milliseconds} * 1000000);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_fault_add(const bpsim_fault* fault) {
  return with_driver([&](Driver& driver) {
    FaultRule rule;
    if (fault->kind < BPSIM_FAULT_OOM || fault->kind > BPSIM_FAULT_CORRUPT || fault->site < BPSIM_AT_ALLOC ||
        fault->site > BPSIM_AT_COPY || fault->corruption < BPSIM_CORRUPT_NAN ||
        fault->corruption > BPSIM_CORRUPT_BITFLIP)
      return fail(BPSIM_INVALID, "bpsim_fault_add: kind, site or corruption is not a value of its enumeration");
    rule.kind = fault->kind;
    rule.site = fault->site;
    rule.name = fault->name ? fault->name : "";
    rule.card = fault->card;
    rule.stream = fault->stream;
    rule.nth = fault->nth;
    rule.times = fault->times;
    rule.corruption = fault->corruption;
    rule.elements = fault->elements;
    const bpsim_status status = check_fault(rule, "by bpsim_fault_add");
    return status == BPSIM_OK ? driver.add_faults({rule}) : status;
  });
}

bpsim_status bpsim_faults_add(const char* spec) {
  return with_driver([&](Driver& driver) {
    std::vector<FaultRule> rules;
    const bpsim_status status = parse_faults(spec, &rules);
    return status == BPSIM_OK ? driver.add_faults(rules) : status;
  });
}

bpsim_status bpsim_faults_check(const char* spec) {
  try {
    std::vector<FaultRule> rules;
    return parse_faults(spec, &rules);
  } catch (const std::exception& thrown) {
    return fail(BPSIM_SYSTEM, "bpsim_faults_check: %s", thrown.what());
  }
}

bpsim_status bpsim_faults_clear(void) {
  return with_driver([](Driver& driver) {
    driver.faults.clear();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_faults_struck(uint64_t* count) {
  return with_driver([&](Driver& driver) {
    *count = driver.faults.struck();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_check_races(bpsim_races mode) {
  return with_driver([&](Driver& driver) { return driver.check_races(static_cast<int>(mode)); });
}

bpsim_status bpsim_races_found(uint64_t* count) {
  return with_driver([&](Driver& driver) {
    *count = driver.races.found();
    return BPSIM_OK;
  });
}

bpsim_status bpsim_release_hangs(int32_t index) {
  return with_driver([&](Driver& driver) {
    if (index < -1 || index >= static_cast<int32_t>(driver.cards.size()))
      return fail(BPSIM_INVALID, "there is no card %d: there are %zu cards, numbered from 0", index,
                  driver.cards.size());
    for (const auto& card : driver.cards) {
      if (index >= 0 && card->index() != index) continue;
      card->releases.fetch_add(1);
      card->each_stream([](Stream& stream) { stream.wake_all(); });
    }
    return BPSIM_OK;
  });
}

bpsim_status bpsim_lose_card(int32_t index) {
  return with_card(index, [](Driver&, Card& card) {
    card.lose("by bpsim_lose_card");
    return BPSIM_OK;
  });
}

bpsim_status bpsim_trace_start(int32_t index, uint64_t capacity) {
  return with_card(index, [&](Driver&, Card& card) {
    card.trace.start(capacity);
    return BPSIM_OK;
  });
}

bpsim_status bpsim_trace_read(int32_t index, bpsim_trace_entry* entries, uint64_t capacity, uint64_t* count,
                              uint64_t* missed) {
  return with_card(index, [&](Driver&, Card& card) {
    card.trace.read(entries, capacity, count, missed);
    return BPSIM_OK;
  });
}

}  // extern "C"
