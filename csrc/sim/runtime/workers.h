// The threads on which launches run.
#pragma once

#include <cstdint>

namespace backplane::sim {

// Called by the driver on each of its threads before the first launch there.
void prepare_worker_thread(int32_t card, uint64_t stream, void*);
// Called before each launch: the number of compute threads may have been changed since.
void follow_thread_count();

}  // namespace backplane::sim
