/* This is the part of the driver's API that real drivers do not have: fault injection for tests, checks for missing
 * synchronization, and traces. driver.h includes it, and its rules apply here. */
#ifndef BACKPLANE_SIM_DRIVER_FAULTS_H
#define BACKPLANE_SIM_DRIVER_FAULTS_H

#include "driver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- fault injection --------------------------------------------------------------------------------------------- */

typedef enum bpsim_fault_kind {
  BPSIM_FAULT_OOM = 0,    /* an allocation is out of memory */
  BPSIM_FAULT_FAIL = 1,   /* a launch or copy fails */
  BPSIM_FAULT_HANG = 2,   /* a stream stops before a launch or copy, until it is released */
  BPSIM_FAULT_LOST = 3,   /* the card disappears before a launch, copy or allocation */
  BPSIM_FAULT_CORRUPT = 4 /* the result of a launch or copy is wrong */
} bpsim_fault_kind;

typedef enum bpsim_fault_site { BPSIM_AT_ALLOC = 0, BPSIM_AT_LAUNCH = 1, BPSIM_AT_COPY = 2 } bpsim_fault_site;
typedef enum bpsim_corruption { BPSIM_CORRUPT_NAN = 0, BPSIM_CORRUPT_BITFLIP = 1 } bpsim_corruption;

/* A fault counts the work that matches its filter (site, name, card, stream) in the order of submission, and is
 * injected from the nth match on, `times` times. Launches and copies of a replayed graph are matched one by one. */
typedef struct bpsim_fault {
  bpsim_fault_kind kind;
  bpsim_fault_site site;
  const char* name; /* of the launch or copy; * matches any text; NULL: every one; copied; not for allocations */
  int32_t card;     /* -1: every one */
  int32_t stream;   /* index; -1: every one; not for allocations */
  uint64_t nth;     /* 1 is the first */
  uint64_t times;   /* 0: always */
  bpsim_corruption corruption; /* NaN if the element type has one, else a flipped bit; in a copy eight bytes of ones,
                                  which are NaN in every floating-point type; a flipped bit is the highest one of the
                                  exponent */
  uint32_t elements;           /* number of elements, spread over the output; at least 1 */
} bpsim_fault;

BPSIM_API bpsim_status bpsim_fault_add(const bpsim_fault* fault);
/* Adds rules separated by ';', each of the form  kind@site=which[,key=value...]:
 *   kind   oom | fail | hang | lost | corrupt
 *   site   alloc (oom, lost) | launch | copy (both: all but oom)
 *   which  the number of the matching one, or a name in which * matches any text (not for alloc)
 *   keys   card=N  stream=N (index)  nth=N (with a name; default 1)  times=N|always (default 1)
 *          of corrupt: kind=nan|bitflip (default nan)  elements=N (default 1)
 * For example: oom@alloc=17;fail@launch=250;hang@launch=300,stream=0;lost@launch=400,card=1;
 *              corrupt@launch=matmul*,nth=3,kind=bitflip;corrupt@copy=5,kind=bitflip
 * Blanks around ';' are ignored. If any rule is wrong, none is added; the text has the rule and the mistake. */
BPSIM_API bpsim_status bpsim_faults_add(const char* spec);
/* Checks a specification without adding it. Works uninitialized, so that a mistake is found before the start. */
BPSIM_API bpsim_status bpsim_faults_check(const char* spec);
/* Removes all rules; faults that were already injected remain. */
BPSIM_API bpsim_status bpsim_faults_clear(void);
/* Returns how many faults were injected since bpsim_init. */
BPSIM_API bpsim_status bpsim_faults_struck(uint64_t* count);
/* Ends the hangs that were submitted up to now; their streams continue with the launch they stopped at. card -1: on
 * every card. */
BPSIM_API bpsim_status bpsim_release_hangs(int32_t card);
/* Makes the card lost at once, without a rule. */
BPSIM_API bpsim_status bpsim_lose_card(int32_t card);

/* ---- missing synchronization ------------------------------------------------------------------------------------- */

typedef enum bpsim_races {
  BPSIM_RACES_OFF = 0,
  BPSIM_RACES_REPORT = 1, /* writes a message to stderr, once for each pair of names, and continues */
  BPSIM_RACES_FAIL = 2    /* the call that submits the second of the two returns BPSIM_RACE */
} bpsim_races;

/* Checks from now on that two launches, copies or replayed graphs that access the same memory, of which one writes, are
 * ordered: by their stream, by an event that was waited for, or by a wait on the host between them. The check is made
 * when the second is submitted, from the requested synchronization and not from the actual execution, so it does not
 * depend on timing. A launch counts as accessing all of its ranges; work submitted before this call is not checked.
 * Pinned memory that is allocated from now on is watched too: until the host has waited for a copy into it, the host
 * must not access what is copied, and until it has waited for a copy from it, not write it. A violation is reported on
 * stderr and the host continues; with BPSIM_RACES_FAIL the card of the copy then fails, as after a failed launch. */
BPSIM_API bpsim_status bpsim_check_races(bpsim_races mode);
/* Returns how many races were found since bpsim_init. */
BPSIM_API bpsim_status bpsim_races_found(uint64_t* count);

/* ---- trace ------------------------------------------------------------------------------------------------------- */

typedef struct bpsim_trace_entry {
  const char* name; /* of the launch; copies are copy_h2d, copy_d2h, copy_d2d, copy_peer, memset */
  bpsim_stream stream;
  uint64_t number; /* of the launch or copy on its card, from 1 */
  int64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
  double modelled_ns;
  double bytes, flops;
} bpsim_trace_entry;

/* Records what runs on the card from now on, up to `capacity` entries (the first are kept); 0 stops and discards. */
BPSIM_API bpsim_status bpsim_trace_start(int32_t card, uint64_t capacity);
/* Returns at most `capacity` entries; `count` is how many were recorded, `missed` how many did not fit. */
BPSIM_API bpsim_status bpsim_trace_read(int32_t card, bpsim_trace_entry* entries, uint64_t capacity, uint64_t* count,
                                        uint64_t* missed);

#ifdef __cplusplus
}
#endif

#endif
