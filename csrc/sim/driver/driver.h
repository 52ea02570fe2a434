/* The driver of the simulated NPU: what a vendor's driver library is to a real card, in software.
 *
 * Cards with memory of their own that the host cannot touch, streams that run launches in order on worker threads,
 * events, copies, graphs, and faults on demand. Plain C, no torch; libc and pthreads are all it needs.
 *
 * The rules that hold for every call:
 *   - It returns a status. On anything but BPSIM_OK and BPSIM_NOT_READY, bpsim_last_error() gives the text for the
 *     calling thread, which names the mistake and the remedy. Results are written through pointers, only on BPSIM_OK
 *     unless a call says otherwise.
 *   - It may be made from any thread.
 *   - Environment variables are not read here: the caller passes values.
 *   - After a fork, in the child of a process that had called bpsim_init, every call returns BPSIM_FORKED and nothing
 *     ever waits: worker threads do not survive a fork. Start processes with spawn.
 *   - Inside a launch (on a worker thread) these are refused with BPSIM_INVALID, because they would wait for
 *     themselves: everything that submits work or synchronises. Memory, queries and destroying things are allowed.
 *
 * Errors of launches are asynchronous, as on a real card. A launch that fails is remembered by its card with its name;
 * what was queued behind it on that card is dropped, work submitted meanwhile is accepted and dropped, and the next
 * synchronising call (bpsim_*_synchronize, bpsim_*_query, bpsim_copy) returns BPSIM_LAUNCH_FAILED. From then on every
 * call that submits work or synchronises on that card returns it too, until bpsim_card_reset.
 *
 * Nothing is shared between processes: a device pointer means nothing in another process, and there are no handles to
 * export. Collectives between processes copy through host memory, in the layer above.
 */
#ifndef BACKPLANE_SIM_DRIVER_H
#define BACKPLANE_SIM_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BPSIM_API __attribute__((visibility("default")))
#else
#define BPSIM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bpsim_status {
  BPSIM_OK = 0,
  BPSIM_NOT_READY = 1,       /* of the query calls: work is still in flight; not an error, no text */
  BPSIM_INVALID = 2,         /* the call is wrong: an argument, a pointer in the wrong place, a stale handle */
  BPSIM_NOT_INITIALISED = 3, /* bpsim_init was not called, or bpsim_shutdown was */
  BPSIM_FORKED = 4,          /* initialised before fork */
  BPSIM_OUT_OF_MEMORY = 5,   /* of a card: the text has what was asked, free, the limit, the largest free block */
  BPSIM_LAUNCH_FAILED = 6,   /* a launch failed earlier; stays until bpsim_card_reset */
  BPSIM_TIMEOUT = 7,         /* the watchdog: the text has the launch that hangs */
  BPSIM_LOST = 8,            /* the card has disappeared: every later call for it returns this */
  BPSIM_CAPTURE = 9,         /* not possible while capturing, or the capture is invalid; the text says why */
  BPSIM_SYSTEM = 10,         /* the operating system refused: no memory for the host, no thread, no mapping */
  BPSIM_RACE = 11            /* a synchronisation is missing (bpsim_check_races): the work was not submitted */
} bpsim_status;

/* The text of the calling thread's last error; never NULL; valid until the thread's next call. */
BPSIM_API const char* bpsim_last_error(void);
/* "BPSIM_INVALID" and so on. */
BPSIM_API const char* bpsim_status_name(bpsim_status status);

/* ---- start and end ---------------------------------------------------------------------------------------------- */

/* "How fast would this be on my chip?" Accounting only: real execution does not get slower. A launch is taken to last
 * launch_overhead_ns + max(bytes / memory_bandwidth, flops / flop_rate); a copy between host and card, or between
 * cards, launch_overhead_ns + bytes / link_bandwidth; a copy within a card moves its bytes twice (read and write).
 * A rate of 0 counts nothing. While it is on, event times are modelled times. */
typedef struct bpsim_model {
  int32_t on;
  double memory_bandwidth; /* bytes per second */
  double link_bandwidth;   /* bytes per second */
  double flop_rate;        /* FLOP per second */
  double launch_overhead_ns;
} bpsim_model;

#define BPSIM_MAX_CARDS 16
/* Per card, the default stream included. */
#define BPSIM_MAX_STREAMS 64

typedef struct bpsim_config {
  uint32_t struct_size;     /* sizeof(bpsim_config): set by bpsim_config_default */
  int32_t cards;            /* 1 .. BPSIM_MAX_CARDS; default 2 */
  uint64_t memory_bytes;    /* of each card; default 1 GiB; rounded down to 2 MiB, at least 2 MiB */
  uint32_t sync_timeout_ms; /* watchdog: a synchronising call that sees its stream finish nothing for this long returns
                               BPSIM_TIMEOUT; 0 (default): it waits for ever */
  int32_t spin_us;          /* how long an idle worker and a waiting host look before they sleep; -1 (default): by the
                               number of cores */
  int32_t check_launches;   /* 1: bpsim_enqueue checks that the ranges of a launch lie in live memory of the card;
                               default 0. Graph replay always checks. */
  int32_t check_races;      /* as for bpsim_check_races; default BPSIM_RACES_OFF */
  int32_t fault_handler;    /* 1 (default): install the SIGSEGV/SIGBUS handler that explains stray host accesses */
  bpsim_model model;        /* default: off */
  const char* faults;       /* as for bpsim_faults_add, or NULL (default) */
  /* Called on each worker thread before its first launch, so that the caller can prepare it; or NULL (default). */
  void (*worker_start)(int32_t card, uint64_t stream, void* arg);
  void* worker_start_arg;
} bpsim_config;

BPSIM_API void bpsim_config_default(bpsim_config* config);

/* Once per process (again after bpsim_shutdown). A second call while initialised is BPSIM_INVALID. */
BPSIM_API bpsim_status bpsim_init(const bpsim_config* config);
/* Stops: the launch that runs on each stream ends, queued ones are dropped (destroyed, not run), hanging ones are
 * released, calls that wait in other threads return BPSIM_NOT_INITIALISED, threads are joined, all memory is returned.
 * Done by itself at exit. A caller whose launches need something that goes away earlier (an interpreter) calls it
 * before that, without holding a lock that a launch may need. A launch that does not end within 5 s is left behind
 * with a message: then threads and memory stay. Called when not initialised it does nothing. */
BPSIM_API bpsim_status bpsim_shutdown(void);
/* 1 or 0; 0 in a forked child too. */
BPSIM_API int bpsim_is_initialised(void);

BPSIM_API bpsim_status bpsim_card_count(int32_t* count);
/* Clears the failure of a launch after the card's streams have drained. A lost card stays lost. */
BPSIM_API bpsim_status bpsim_card_reset(int32_t card);
/* Puts the SIGSEGV/SIGBUS handler back on top if somebody (faulthandler.enable) has replaced it since. The handler in
 * place before is called after the message, so a Python traceback follows it. */
BPSIM_API bpsim_status bpsim_install_fault_handler(void);
BPSIM_API bpsim_status bpsim_set_model(const bpsim_model* model);
BPSIM_API bpsim_status bpsim_set_sync_timeout(uint32_t milliseconds);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Streams are named by a number, never 0; a stale one is an error, not a crash. Positive as int64_t. */
typedef uint64_t bpsim_stream;
/* A set of segments that allocations are drawn from; 0 is the card's general pool. */
typedef uint64_t bpsim_pool;

/* Device pointers are addresses that are valid nowhere on the host: a read or write of one faults with a message that
 * names the card and the allocation. Allocations are aligned to 512 bytes and rounded up to them.
 *
 * `stream` is the one that will use the memory (it gives the card). Memory is handed out in stream order: a block freed
 * while its stream still works on it may be given out again at once on that stream, and on another one only when that
 * work is done. Therefore a launch needs no reference to the memory it uses: freeing right after enqueueing is right.
 * `pool`: 0, or a pool of that card; while the stream captures, 0 means the pool of the capture.
 * 0 bytes give a null pointer. */
BPSIM_API bpsim_status bpsim_alloc(bpsim_stream stream, bpsim_pool pool, uint64_t bytes, void** pointer);
/* Takes the pointer that bpsim_alloc gave, or NULL. Frees also where the card is lost or has failed. */
BPSIM_API bpsim_status bpsim_free(void* pointer);
/* Another stream than the one of bpsim_alloc uses the memory: after bpsim_free it is not given out before the work
 * queued on `stream` up to then is done. */
BPSIM_API bpsim_status bpsim_record_stream(void* pointer, bpsim_stream stream);
/* Returns every segment that nobody uses to the system (pools of graphs excepted). */
BPSIM_API bpsim_status bpsim_empty_cache(int32_t card);

typedef struct bpsim_memory_stats {
  uint64_t limit;           /* the card's memory */
  uint64_t in_use;          /* held by the user, in rounded blocks */
  uint64_t in_use_peak;
  uint64_t requested;       /* held by the user, as asked */
  uint64_t reserved;        /* taken from the card: in_use, plus what the cache and pools keep */
  uint64_t reserved_peak;
  uint64_t pending;         /* freed, and waiting for another stream (bpsim_record_stream) */
  uint64_t suspended;       /* held by the user in suspended pools; not part of in_use and reserved */
  uint64_t largest_free;    /* the largest allocation that can succeed at once, with the cache emptied first */
  uint64_t allocations, frees; /* calls that succeeded */
  uint64_t out_of_memory;      /* calls that did not, for want of memory */
  uint64_t segments;           /* pieces of memory taken from the card at this time */
} bpsim_memory_stats;

BPSIM_API bpsim_status bpsim_memory_statistics(int32_t card, bpsim_memory_stats* stats);
/* Bytes of the host's memory behind the card at this time, as the kernel counts them (slow: for tests). */
BPSIM_API bpsim_status bpsim_host_resident(int32_t card, uint64_t* bytes);
/* Peaks become the current values. */
BPSIM_API bpsim_status bpsim_reset_peaks(int32_t card);

/* Pools keep allocations apart: those of a graph, and those that sleep together. */
BPSIM_API bpsim_status bpsim_pool_create(int32_t card, bpsim_pool* pool);
/* The pool goes when the last graph captured into it does; blocks that the user still holds move to the general pool
 * and stay valid. A suspended pool is BPSIM_INVALID: resume it first. */
BPSIM_API bpsim_status bpsim_pool_destroy(bpsim_pool pool);
/* Sleep: gives the memory behind the pool back (contents are lost, addresses stay) after the card's streams have
 * drained. Until bpsim_pool_resume, copies, graph replays and allocations that need it are errors. Resuming takes the
 * memory again, which can be BPSIM_OUT_OF_MEMORY, and the contents are undefined. */
BPSIM_API bpsim_status bpsim_pool_suspend(bpsim_pool pool);
BPSIM_API bpsim_status bpsim_pool_resume(bpsim_pool pool);

typedef enum bpsim_place {
  BPSIM_HOST = 0,          /* host memory that the driver knows nothing of */
  BPSIM_HOST_PINNED = 1,   /* from bpsim_host_alloc */
  BPSIM_DEVICE = 2,        /* held by the user */
  BPSIM_DEVICE_FREED = 3,  /* in the cache, or never handed out */
  BPSIM_DEVICE_ASLEEP = 4, /* held by the user in a suspended pool */
  BPSIM_HOST_FREED = 5     /* pinned memory after bpsim_host_free */
} bpsim_place;

typedef struct bpsim_block_info {
  bpsim_place place;
  int32_t card; /* -1 on the host */
  void* base;   /* of the allocation; NULL where there is none */
  uint64_t bytes;   /* as asked */
  uint64_t rounded; /* as taken */
  bpsim_pool pool;
  bpsim_stream stream;
} bpsim_block_info;

/* What a pointer is; interior pointers are fine. */
BPSIM_API bpsim_status bpsim_pointer_info(const void* pointer, bpsim_block_info* info);
/* The blocks that the user holds (of one pool, or of the card with pool 0), in order of address. Writes at most
 * `capacity` of them; `count` is how many there are. */
BPSIM_API bpsim_status bpsim_blocks(int32_t card, bpsim_pool pool, bpsim_block_info* blocks, uint64_t capacity,
                                    uint64_t* count);

/* The address at which a launch, on a worker thread, reads and writes what a device pointer names. Only to be
 * dereferenced inside a launch (nothing stops the host from it, and nothing orders it there), but it may be computed
 * anywhere, and is the same for as long as the driver is initialised. Interior pointers are fine, null stays null; one
 * outside every card is BPSIM_INVALID. Costs a few nanoseconds. */
BPSIM_API bpsim_status bpsim_translate(const void* device_pointer, void** kernel_pointer);
/* The same as a constant: kernel pointer - device pointer, per card. And the range of its device pointers. */
BPSIM_API bpsim_status bpsim_card_range(int32_t card, uintptr_t* first, uint64_t* bytes, ptrdiff_t* kernel_offset);

/* Pinned host memory: the only host memory that is copied truly asynchronously. Page-aligned. Freed memory that copies
 * in flight or graphs still use stays until they are done. */
BPSIM_API bpsim_status bpsim_host_alloc(uint64_t bytes, void** pointer);
BPSIM_API bpsim_status bpsim_host_free(void* pointer);

/* ---- streams and launches ---------------------------------------------------------------------------------------- */

BPSIM_API bpsim_status bpsim_default_stream(int32_t card, bpsim_stream* stream);
/* Its thread starts with its first work. */
BPSIM_API bpsim_status bpsim_stream_create(int32_t card, bpsim_stream* stream);
/* Waits for its work; the default stream cannot be destroyed, nor one that captures. */
BPSIM_API bpsim_status bpsim_stream_destroy(bpsim_stream stream);
BPSIM_API bpsim_status bpsim_stream_card(bpsim_stream stream, int32_t* card);
/* 0 for the default stream; what `stream=` in a fault means. */
BPSIM_API bpsim_status bpsim_stream_index(bpsim_stream stream, int32_t* index);
/* BPSIM_OK when all work is done, else BPSIM_NOT_READY. */
BPSIM_API bpsim_status bpsim_stream_query(bpsim_stream stream);
/* Costs next to nothing when the stream is idle. */
BPSIM_API bpsim_status bpsim_stream_synchronize(bpsim_stream stream);
BPSIM_API bpsim_status bpsim_card_synchronize(int32_t card);

typedef enum bpsim_element {
  BPSIM_OTHER = 0, /* anything without a NaN: integers, booleans, fp8 */
  BPSIM_F32 = 1,
  BPSIM_F16 = 2,
  BPSIM_BF16 = 3,
  BPSIM_F64 = 4
} bpsim_element;

/* Memory that a launch reads or writes. */
typedef struct bpsim_range {
  const void* pointer; /* device pointer */
  uint64_t bytes;
  uint8_t element; /* bpsim_element */
  uint8_t written; /* 1: an output; injected corruption goes there */
} bpsim_range;

/* What a launch does; on a worker thread. 0 is success; anything else a failure, with a text in `error` if there is
 * one to tell. An exception that escapes is a failure too. Must not call back into whoever waits for it. */
typedef int (*bpsim_function)(void* arg, char* error, size_t error_bytes);
typedef void (*bpsim_destructor)(void* arg);

typedef struct bpsim_launch {
  const char* name;         /* for error texts, faults and traces; never freed (a literal, or interned); not NULL */
  bpsim_function function;  /* not NULL */
  void* arg;
  bpsim_destructor destroy; /* of arg; or NULL */
  const bpsim_range* ranges; /* optional; copied */
  uint32_t range_count;
  double bytes, flops; /* for the model; 0 where unknown */
} bpsim_launch;

/* Queues a launch. Takes `arg` in every case: `destroy` is called exactly once, after the launch has run, on the
 * worker; or where it will never run (an error here, a dropped launch, a failed capture) on some thread, perhaps this
 * one before the call returns. In a capture it runs when the graph is gone. A full queue (1024 entries) makes the call
 * wait. */
BPSIM_API bpsim_status bpsim_enqueue(bpsim_stream stream, const bpsim_launch* launch);

/* What a launch does may depend on data that is on the card when it runs: how long each context is, which rows are
 * written. Both calls are for the function of a launch; elsewhere the first gives 0 and the second is BPSIM_INVALID.
 * 1 where somebody asks: the model is on, or the result is to be corrupted. */
BPSIM_API int bpsim_launch_is_watched(void);
/* Takes the place of the `bytes` and `flops` that the launch was queued with; in a graph, for this replay. `output`, if
 * not NULL, is what this run writes, in place of the ranges. */
BPSIM_API bpsim_status bpsim_launch_detail(double bytes, double flops, const bpsim_range* output);

typedef struct bpsim_counters {
  uint64_t launches, copies, graph_launches; /* submitted; the launches of a replayed graph are counted */
  uint64_t dropped;                          /* not run, after a failure or a loss */
  double modelled_busy_ns;                   /* over all streams */
} bpsim_counters;

BPSIM_API bpsim_status bpsim_card_counters(int32_t card, bpsim_counters* counters);
/* The modelled clock of a stream: its busy time, moved forward by events that it waited for. */
BPSIM_API bpsim_status bpsim_stream_modelled_ns(bpsim_stream stream, double* nanoseconds);

/* ---- events ------------------------------------------------------------------------------------------------------ */

typedef uint64_t bpsim_event; /* never 0 */

BPSIM_API bpsim_status bpsim_event_create(int timing, bpsim_event* event);
/* At any time; work that waits for it still does. */
BPSIM_API bpsim_status bpsim_event_destroy(bpsim_event event);
/* Replaces an earlier record. In a capture: the event then stands for a place in the graph, and can only be waited for
 * by the stream that captures. */
BPSIM_API bpsim_status bpsim_event_record(bpsim_event event, bpsim_stream stream);
/* BPSIM_OK when the recorded work is done, or nothing was recorded; else BPSIM_NOT_READY. */
BPSIM_API bpsim_status bpsim_event_query(bpsim_event event);
BPSIM_API bpsim_status bpsim_event_synchronize(bpsim_event event);
/* Work queued on `stream` from now on waits for the recorded work, which may be on another card. In a capture, an event
 * from outside it is BPSIM_CAPTURE. */
BPSIM_API bpsim_status bpsim_stream_wait_event(bpsim_stream stream, bpsim_event event);
/* Between two timing events whose work is done (else BPSIM_NOT_READY); modelled time while the model is on. */
BPSIM_API bpsim_status bpsim_event_elapsed_ns(bpsim_event start, bpsim_event end, double* nanoseconds);

/* ---- copies ------------------------------------------------------------------------------------------------------ */

typedef enum bpsim_direction {
  BPSIM_HOST_TO_DEVICE = 0,
  BPSIM_DEVICE_TO_HOST = 1,
  BPSIM_DEVICE_TO_DEVICE = 2, /* within the stream's card */
  BPSIM_PEER = 3              /* between two cards; the stream is of either */
} bpsim_direction;

/* In stream order. Truly asynchronous with pinned host memory and on the card. As on real cards, pageable host memory
 * is staged (host to device, up to 64 KiB: the source may be changed at once) or waited for. A pointer that is not
 * where the direction says, a range that leaves its allocation, freed memory: BPSIM_INVALID with what it is instead.
 * In a capture, pageable memory is BPSIM_CAPTURE: a replay would read it when it is long gone. */
BPSIM_API bpsim_status bpsim_copy_async(bpsim_stream stream, bpsim_direction direction, void* to, const void* from,
                                        uint64_t bytes);
/* The same, and returns when it is done. */
BPSIM_API bpsim_status bpsim_copy(bpsim_stream stream, bpsim_direction direction, void* to, const void* from,
                                  uint64_t bytes);
/* 1: from now on every copy and fill that runs is checked. A checksum of the source is taken before, of the destination
 * after it; where they differ, the copy has failed, as a launch fails, with both in the text. A source that is written
 * while it is copied, which nobody may do, looks the same. 0 (as at the start): not. */
BPSIM_API bpsim_status bpsim_check_copies(int32_t on);
BPSIM_API bpsim_status bpsim_memset_async(bpsim_stream stream, void* to, int value, uint64_t bytes);

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

typedef uint64_t bpsim_graph;

typedef enum bpsim_capture_state { BPSIM_CAPTURE_NONE = 0, BPSIM_CAPTURE_ACTIVE = 1, BPSIM_CAPTURE_INVALID = 2 }
    bpsim_capture_state;

/* From here on, what is submitted to the stream is recorded and not run, until bpsim_capture_end. Memory allocated for
 * the stream comes from `pool` (0: one of the graph's own) and stays there until the graph is destroyed, freed or not,
 * so a replay never writes into memory that somebody else was given. Graphs that share a pool share its freed memory:
 * they must not run at the same time.
 * Waiting for the capturing stream or its card, pageable copies, waiting for events from outside, and another stream
 * waiting for an event of the capture are BPSIM_CAPTURE and make the capture invalid; so is any other synchronising
 * call on the card by the thread that began the capture. */
BPSIM_API bpsim_status bpsim_capture_begin(bpsim_stream stream, bpsim_pool pool);
/* The graph; or BPSIM_CAPTURE with the first mistake, and the capture is gone. */
BPSIM_API bpsim_status bpsim_capture_end(bpsim_stream stream, bpsim_graph* graph);
BPSIM_API bpsim_status bpsim_capture_status(bpsim_stream stream, bpsim_capture_state* state);
/* All its launches in order, as one entry of the queue, on any stream of the card that captured it. Checks first that
 * the memory it was captured with (ranges of launches, copies) is still held by the same allocations or its pool, and
 * says which launch would use memory that is gone. */
BPSIM_API bpsim_status bpsim_graph_launch(bpsim_stream stream, bpsim_graph graph);
/* Replays in flight finish first; its launches and memory go then. */
BPSIM_API bpsim_status bpsim_graph_destroy(bpsim_graph graph);
BPSIM_API bpsim_status bpsim_graph_size(bpsim_graph graph, uint64_t* launches);
BPSIM_API bpsim_status bpsim_graph_pool(bpsim_graph graph, bpsim_pool* pool);

#ifdef __cplusplus
}
#endif

#include "driver_faults.h"  /* faults on demand, and traces */

#endif
