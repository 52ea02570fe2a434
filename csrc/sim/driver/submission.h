// Declares the submission of a task to a stream: the checks, the faults, and the choice between running and recording
// it.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

class Driver;
class Stream;

// Refuses work that is submitted inside a launch, or to a card that is lost or has failed.
bpsim_status may_submit(Stream& stream, const char* call);
// Checks that every range lies in an allocation that the user holds.
bpsim_status check_ranges(Driver& driver, const char* name, const bpsim_range* ranges, size_t count);
void match_faults(Driver& driver, Stream& stream, const Task& task, uint64_t node, std::vector<Strike>* strikes);
// Records the task if the stream is capturing, else queues it. A task that is not accepted stays with the caller.
bpsim_status submit_task(Driver& driver, Stream& stream, Task&& task, const bpsim_range* ranges, size_t count,
                         uint64_t* sequence);

}  // namespace backplane::sim::driver
