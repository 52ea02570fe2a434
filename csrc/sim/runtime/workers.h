// Declares what runs on the driver's worker threads before launches.
#pragma once

#include <cstdint>

namespace backplane::sim {

// The driver calls it on each of its threads before the first launch there.
void prepare_worker_thread(int32_t card, uint64_t stream, void*);
// Called before each launch, because the number of compute threads may have changed.
void follow_thread_count();

}  // namespace backplane::sim
