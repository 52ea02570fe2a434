/* The part of the driver's API that real drivers do not have: faults on demand, for tests, checks for missing
 * synchronisation, and traces.
 * Included by driver.h; the rules there hold here. */
#ifndef BACKPLANE_SIM_DRIVER_FAULTS_H
#define BACKPLANE_SIM_DRIVER_FAULTS_H

#include "driver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- faults on demand -------------------------------------------------------------------------------------------- */

typedef enum bpsim_fault_kind {
  BPSIM_FAULT_OOM = 0,    /* an allocation is out of memory */
  BPSIM_FAULT_FAIL = 1,   /* a launch or copy fails */
  BPSIM_FAULT_HANG = 2,   /* a stream stops before a launch or copy, until it is released */
  BPSIM_FAULT_LOST = 3,   /* the card disappears before a launch, copy or allocation */
  BPSIM_FAULT_CORRUPT = 4 /* the result of a launch or copy is wrong */
} bpsim_fault_kind;

typedef enum bpsim_fault_site { BPSIM_AT_ALLOC = 0, BPSIM_AT_LAUNCH = 1, BPSIM_AT_COPY = 2 } bpsim_fault_site;
typedef enum bpsim_corruption { BPSIM_CORRUPT_NAN = 0, BPSIM_CORRUPT_BITFLIP = 1 } bpsim_corruption;

/* Each fault counts what matches its filter (site, name, card, stream; in the order of submission) and strikes from
 * the nth match on, `times` times. The launches of a replayed graph are matched one by one; copies in it too. */
typedef struct bpsim_fault {
  bpsim_fault_kind kind;
  bpsim_fault_site site;
  const char* name; /* of the launch or copy, with * for anything; NULL: every one; copied; not for allocations */
  int32_t card;     /* -1: every one */
  int32_t stream;   /* index; -1: every one; not for allocations */
  uint64_t nth;     /* 1 is the first */
  uint64_t times;   /* 0: for ever */
  bpsim_corruption corruption; /* NaN where the element has one, else a flipped bit; in a copy eight bytes of ones,
                                  which are NaN in every floating-point type; a flipped bit is the highest of the
                                  exponent */
  uint32_t elements;           /* how many, spread over the output; at least 1 */
} bpsim_fault;

BPSIM_API bpsim_status bpsim_fault_add(const bpsim_fault* fault);
/* Rules separated by ';', each  kind@site=which[,key=value...]:
 *   kind   oom | fail | hang | lost | corrupt
 *   site   alloc (oom, lost) | launch | copy (both: all but oom)
 *   which  the number of the matching one, or a name with * for anything (not for alloc)
 *   keys   card=N  stream=N (index)  nth=N (with a name; default 1)  times=N|always (default 1)
 *          of corrupt: kind=nan|bitflip (default nan)  elements=N (default 1)
 * For example: oom@alloc=17;fail@launch=250;hang@launch=300,stream=0;lost@launch=400,card=1;
 *              corrupt@launch=matmul*,nth=3,kind=bitflip;corrupt@copy=5,kind=bitflip
 * Blanks around ';' are ignored. Nothing is added if any rule is wrong; the text names the rule and the mistake. */
BPSIM_API bpsim_status bpsim_faults_add(const char* spec);
/* The same check without a driver: a spec can be refused before anything starts. Works uninitialised. */
BPSIM_API bpsim_status bpsim_faults_check(const char* spec);
/* Forgets all rules; what has struck already stays so. */
BPSIM_API bpsim_status bpsim_faults_clear(void);
/* How often a rule has struck since bpsim_init. */
BPSIM_API bpsim_status bpsim_faults_struck(uint64_t* count);
/* Hangs that were submitted up to now end, and their streams go on with the launch they stopped at; card -1: on every
 * card. */
BPSIM_API bpsim_status bpsim_release_hangs(int32_t card);
/* At once, without a rule. */
BPSIM_API bpsim_status bpsim_lose_card(int32_t card);

/* ---- missing synchronisation ------------------------------------------------------------------------------------- */

typedef enum bpsim_races {
  BPSIM_RACES_OFF = 0,
  BPSIM_RACES_REPORT = 1, /* tells it on stderr, once for each pair of names, and goes on */
  BPSIM_RACES_FAIL = 2    /* the call that submits the second of the two returns BPSIM_RACE */
} bpsim_races;

/* From now on, two launches, copies or replayed graphs that touch the same memory, of which one writes, must be ordered:
 * by their stream, by an event that was waited for, or by a wait on the host between them. This is judged when the
 * second is submitted, from what was asked for and not from what ran, so it does not depend on the moment. A launch
 * counts as touching all of its ranges; what was submitted before this call is not known.
 * Pinned memory that is allocated from now on is watched as well: until the host has waited for a copy into it, the host
 * may not touch what is copied, and until it has waited for a copy from it, not write it. A host that does is told on
 * stderr and goes on; with BPSIM_RACES_FAIL the copy's card has failed from there on, as by a launch that fails. */
BPSIM_API bpsim_status bpsim_check_races(bpsim_races mode);
/* How many were found since bpsim_init. */
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

/* Records what runs on the card from now on, up to `capacity` entries (the first ones are kept); 0 stops and forgets.*/
BPSIM_API bpsim_status bpsim_trace_start(int32_t card, uint64_t capacity);
/* Copies at most `capacity` entries; `count` is how many were recorded, `missed` how many did not fit. */
BPSIM_API bpsim_status bpsim_trace_read(int32_t card, bpsim_trace_entry* entries, uint64_t capacity, uint64_t* count,
                                        uint64_t* missed);

#ifdef __cplusplus
}
#endif

#endif
