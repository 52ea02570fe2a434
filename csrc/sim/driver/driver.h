/* This is the C API of the simulated NPU's driver: the equivalent, in software, of a vendor's driver library.
 *
 * It provides cards with their own memory that the host cannot access, streams that run launches in order on worker
 * threads, events, copies, graphs, and fault injection. It is plain C without torch; it needs libc and pthreads only.
 *
 * These rules hold for every call:
 *   - It returns a status. For every status except BPSIM_OK and BPSIM_NOT_READY, bpsim_last_error() returns the error
 *     text of the calling thread, with the mistake and the remedy. Results are written through pointers, only on
 *     BPSIM_OK unless the comment of a call states otherwise.
 *   - It may be made from any thread.
 *   - Environment variables are not read here: the caller passes values.
 *   - After a fork, in the child of a process that had called bpsim_init, every call returns BPSIM_FORKED and none
 *     waits, because worker threads do not survive a fork. Start processes with spawn.
 *   - Inside a launch (on a worker thread), calls that submit work or synchronize return BPSIM_INVALID, because they
 *     would wait for themselves. Memory calls, queries and destroying objects are allowed.
 *
 * Errors of launches are asynchronous, as on a real card. The card stores the failure of a launch with its name. Work
 * queued behind it on that card is dropped, work submitted meanwhile is accepted and dropped, and the next
 * synchronizing call (bpsim_*_synchronize, bpsim_*_query, bpsim_copy) returns BPSIM_LAUNCH_FAILED. From then on every
 * call that submits work or synchronizes on that card returns it too, until bpsim_card_reset.
 *
 * Nothing is shared between processes: a device pointer is invalid in another process, and handles cannot be exported.
 * Collectives between processes copy through host memory, in the layer above.
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
  BPSIM_NOT_READY = 1,       /* returned by queries: work is still in flight; not an error, no text */
  BPSIM_INVALID = 2,         /* the call is wrong: an argument, a pointer in the wrong place, a stale handle */
  BPSIM_NOT_INITIALIZED = 3, /* bpsim_init was not called, or bpsim_shutdown was */
  BPSIM_FORKED = 4,          /* initialized before fork */
  BPSIM_OUT_OF_MEMORY = 5,   /* of a card: the text has the request, free memory, limit and largest free block */
  BPSIM_LAUNCH_FAILED = 6,   /* a launch failed earlier; stays until bpsim_card_reset */
  BPSIM_TIMEOUT = 7,         /* from the watchdog: the text names the launch that hangs */
  BPSIM_LOST = 8,            /* the card has disappeared: every later call for it returns this */
  BPSIM_CAPTURE = 9,         /* not possible while capturing, or the capture is invalid; the text has the reason */
  BPSIM_SYSTEM = 10,         /* the operating system refused: no memory for the host, no thread, no mapping */
  BPSIM_RACE = 11            /* missing synchronization (bpsim_check_races): the work was not submitted */
} bpsim_status;

/* Returns the text of the calling thread's last error; never NULL; valid until the thread's next call. */
BPSIM_API const char* bpsim_last_error(void);
/* Returns the name of a status: "BPSIM_INVALID" and so on. */
BPSIM_API const char* bpsim_status_name(bpsim_status status);

/* ---- start and end ---------------------------------------------------------------------------------------------- */

/* A chip model, which estimates how long the same work would take on another chip. It only accounts time: execution
 * does not become slower. A launch takes launch_overhead_ns + max(bytes / memory_bandwidth, flops / flop_rate); a copy
 * between host and card, or between cards, launch_overhead_ns + bytes / link_bandwidth; a copy within a card moves its
 * bytes twice (read and write). A rate of 0 is not counted. While the model is on, event times are modelled times. */
typedef struct bpsim_model {
  int32_t on;
  double memory_bandwidth; /* bytes per second */
  double link_bandwidth;   /* bytes per second */
  double flop_rate;        /* FLOP per second */
  double launch_overhead_ns;
} bpsim_model;

#define BPSIM_MAX_CARDS 16
/* Per card, including the default stream. */
#define BPSIM_MAX_STREAMS 64

typedef struct bpsim_config {
  uint32_t struct_size;     /* sizeof(bpsim_config): set by bpsim_config_default */
  int32_t cards;            /* 1 .. BPSIM_MAX_CARDS; default 2 */
  uint64_t memory_bytes;    /* of each card; default 1 GiB; rounded down to 2 MiB, at least 2 MiB */
  uint32_t sync_timeout_ms; /* watchdog: a synchronizing call whose stream finishes nothing for this long returns
                               BPSIM_TIMEOUT; 0 (default): no time-out */
  int32_t spin_us;          /* how long an idle worker and a waiting host poll before they sleep; -1 (default): chosen
                               by the number of cores */
  int32_t check_launches;   /* 1: bpsim_enqueue checks that the ranges of a launch lie in allocated memory of the card;
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

/* Starts the driver, once per process (again after bpsim_shutdown). A second call meanwhile returns BPSIM_INVALID. */
BPSIM_API bpsim_status bpsim_init(const bpsim_config* config);
/* Stops the driver: the launch that runs on each stream ends, queued ones are dropped (destroyed, not run), hanging
 * ones are released, calls that wait in other threads return BPSIM_NOT_INITIALIZED, threads are joined, all memory is
 * returned. Called automatically at exit. A caller whose launches need something that ends earlier (an interpreter)
 * must call it before that, without holding a lock that a launch may need. A launch that does not end within 5 s is
 * abandoned with a message; its threads and memory are not freed. Does nothing if the driver is not initialized. */
BPSIM_API bpsim_status bpsim_shutdown(void);
/* Returns 1 or 0; 0 in a forked child too. */
BPSIM_API int bpsim_is_initialized(void);

BPSIM_API bpsim_status bpsim_card_count(int32_t* count);
/* Clears the failure of a launch after the card's streams have drained. A lost card stays lost. */
BPSIM_API bpsim_status bpsim_card_reset(int32_t card);
/* Installs the SIGSEGV/SIGBUS handler on top again if another one (faulthandler.enable) has replaced it. The previous
 * handler is called after the message, so a Python traceback follows it. */
BPSIM_API bpsim_status bpsim_install_fault_handler(void);
BPSIM_API bpsim_status bpsim_set_model(const bpsim_model* model);
BPSIM_API bpsim_status bpsim_set_sync_timeout(uint32_t milliseconds);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* A stream handle; never 0, and positive as int64_t. A stale handle is an error, not a crash. */
typedef uint64_t bpsim_stream;
/* A pool handle: a set of segments that allocations are drawn from. 0 is the card's general pool. */
typedef uint64_t bpsim_pool;

/* Allocates device memory. Device pointers are addresses that are invalid on the host: reading or writing one faults
 * with a message that names the card and the allocation. Allocations are aligned to 512 bytes and rounded up to them.
 *
 * `stream` is the stream that will use the memory; it determines the card. Allocation is stream-ordered: a block freed
 * while its stream still uses it may be allocated again at once on that stream, and on another one only when that work
 * is done. Therefore a launch needs no reference to the memory it uses: freeing right after enqueueing is correct.
 * `pool`: 0, or a pool of that card; while the stream is capturing, 0 means the pool of the capture.
 * 0 bytes return a null pointer. */
BPSIM_API bpsim_status bpsim_alloc(bpsim_stream stream, bpsim_pool pool, uint64_t bytes, void** pointer);
/* Frees a pointer of bpsim_alloc; NULL is allowed. Also works if the card is lost or has failed. */
BPSIM_API bpsim_status bpsim_free(void* pointer);
/* Records that another stream than the one of bpsim_alloc uses the memory: after bpsim_free it is not allocated again
 * before the work queued on `stream` up to then is done. */
BPSIM_API bpsim_status bpsim_record_stream(void* pointer, bpsim_stream stream);
/* Returns every unused segment to the system, except those of graphs' pools. */
BPSIM_API bpsim_status bpsim_empty_cache(int32_t card);

typedef struct bpsim_memory_stats {
  uint64_t limit;           /* the card's memory */
  uint64_t in_use;          /* held by the user, in rounded blocks */
  uint64_t in_use_peak;
  uint64_t requested;       /* held by the user, as requested */
  uint64_t reserved;        /* taken from the card: in_use, plus what the cache and pools keep */
  uint64_t reserved_peak;
  uint64_t pending;         /* freed, but waiting for another stream (bpsim_record_stream) */
  uint64_t suspended;       /* held by the user in suspended pools; not part of in_use and reserved */
  uint64_t largest_free;    /* the largest allocation that can succeed at once, with the cache emptied first */
  uint64_t allocations, frees; /* calls that succeeded */
  uint64_t out_of_memory;      /* calls that failed for lack of memory */
  uint64_t segments;           /* segments taken from the card at this time */
} bpsim_memory_stats;

BPSIM_API bpsim_status bpsim_memory_statistics(int32_t card, bpsim_memory_stats* stats);
/* Returns the bytes of host memory behind the card at this time, as the kernel counts them (slow: for tests). */
BPSIM_API bpsim_status bpsim_host_resident(int32_t card, uint64_t* bytes);
/* Sets the peaks to the current values. */
BPSIM_API bpsim_status bpsim_reset_peaks(int32_t card);

/* Creates a pool. Pools separate allocations: those of a graph, and those that are suspended together. */
BPSIM_API bpsim_status bpsim_pool_create(int32_t card, bpsim_pool* pool);
/* Destroys a pool, or does so when the last graph captured into it is destroyed. Blocks that the user still holds move
 * to the general pool and stay valid. A suspended pool is BPSIM_INVALID: resume it first. */
BPSIM_API bpsim_status bpsim_pool_destroy(bpsim_pool pool);
/* Releases the memory behind the pool (contents are lost, addresses stay) after the card's streams have drained. Until
 * bpsim_pool_resume, copies, graph replays and allocations that need it are errors. Resuming takes memory again, which
 * can return BPSIM_OUT_OF_MEMORY; the contents are undefined. */
BPSIM_API bpsim_status bpsim_pool_suspend(bpsim_pool pool);
BPSIM_API bpsim_status bpsim_pool_resume(bpsim_pool pool);

typedef enum bpsim_place {
  BPSIM_HOST = 0,          /* host memory that the driver does not manage */
  BPSIM_HOST_PINNED = 1,   /* from bpsim_host_alloc */
  BPSIM_DEVICE = 2,        /* held by the user */
  BPSIM_DEVICE_FREED = 3,  /* in the cache, or never allocated */
  BPSIM_DEVICE_ASLEEP = 4, /* held by the user in a suspended pool */
  BPSIM_HOST_FREED = 5     /* pinned memory after bpsim_host_free */
} bpsim_place;

typedef struct bpsim_block_info {
  bpsim_place place;
  int32_t card; /* -1 on the host */
  void* base;   /* of the allocation; NULL if there is none */
  uint64_t bytes;   /* as requested */
  uint64_t rounded; /* as allocated */
  bpsim_pool pool;
  bpsim_stream stream;
} bpsim_block_info;

/* Describes a pointer; interior pointers are allowed. */
BPSIM_API bpsim_status bpsim_pointer_info(const void* pointer, bpsim_block_info* info);
/* Lists the blocks that the user holds (of one pool, or of the card with pool 0), in order of address. Writes at most
 * `capacity` of them; `count` is how many there are. */
BPSIM_API bpsim_status bpsim_blocks(int32_t card, bpsim_pool pool, bpsim_block_info* blocks, uint64_t capacity,
                                    uint64_t* count);

/* Returns the kernel address of a device pointer: the address at which a launch, on a worker thread, reads and writes
 * its memory. Dereference it only inside a launch: the host is not stopped from doing so, but nothing orders its
 * access. The address may be computed anywhere, and is constant while the driver is initialized. Interior pointers are
 * allowed, null stays null; a pointer outside every card is BPSIM_INVALID. Costs a few nanoseconds. */
BPSIM_API bpsim_status bpsim_translate(const void* device_pointer, void** kernel_pointer);
/* Returns the range of a card's device pointers, and the constant difference kernel address - device pointer. */
BPSIM_API bpsim_status bpsim_card_range(int32_t card, uintptr_t* first, uint64_t* bytes, ptrdiff_t* kernel_offset);

/* Allocates pinned host memory, the only host memory that is copied truly asynchronously. Page-aligned. Freed memory
 * that copies in flight or graphs still use is kept until they are done. */
BPSIM_API bpsim_status bpsim_host_alloc(uint64_t bytes, void** pointer);
BPSIM_API bpsim_status bpsim_host_free(void* pointer);

/* ---- streams and launches ---------------------------------------------------------------------------------------- */

BPSIM_API bpsim_status bpsim_default_stream(int32_t card, bpsim_stream* stream);
/* Creates a stream. Its thread starts with its first work. */
BPSIM_API bpsim_status bpsim_stream_create(int32_t card, bpsim_stream* stream);
/* Waits for its work. The default stream, and one that is capturing, cannot be destroyed. */
BPSIM_API bpsim_status bpsim_stream_destroy(bpsim_stream stream);
BPSIM_API bpsim_status bpsim_stream_card(bpsim_stream stream, int32_t* card);
/* Returns the index of a stream on its card, 0 for the default stream: the value of `stream=` in a fault. */
BPSIM_API bpsim_status bpsim_stream_index(bpsim_stream stream, int32_t* index);
/* Returns BPSIM_OK when all work is done, else BPSIM_NOT_READY. */
BPSIM_API bpsim_status bpsim_stream_query(bpsim_stream stream);
/* Waits for the work of a stream; nearly free if the stream is idle. */
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

/* The function of a launch; runs on a worker thread. Returns 0 for success; any other value is a failure, optionally
 * with a text in `error`. An exception that escapes is a failure too. Must not wait for a thread that waits for it. */
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

/* Queues a launch. Takes ownership of `arg` in every case: `destroy` is called exactly once, after the launch has run,
 * on the worker. If the launch never runs (an error here, a dropped launch, a failed capture), `destroy` is called on
 * any thread, perhaps this one before the call returns. In a capture it is called when the graph is destroyed. A full
 * queue (1024 entries) makes the call wait. */
BPSIM_API bpsim_status bpsim_enqueue(bpsim_stream stream, const bpsim_launch* launch);

/* Returns 1 if bpsim_launch_detail has an effect on the launch that runs: the model is on, or the result is to be
 * corrupted. The work of a launch may depend on data on the card when it runs: the length of each context, the rows
 * that are written. Call both only inside the function of a launch; elsewhere the first returns 0 and the second
 * BPSIM_INVALID. */
BPSIM_API int bpsim_launch_is_watched(void);
/* Replaces the `bytes` and `flops` that the launch was queued with; in a graph, for this replay. `output`, if not NULL,
 * is what this run writes, instead of the ranges. */
BPSIM_API bpsim_status bpsim_launch_detail(double bytes, double flops, const bpsim_range* output);

typedef struct bpsim_counters {
  uint64_t launches, copies, graph_launches; /* submitted; the launches of a replayed graph are counted */
  uint64_t dropped;                          /* not run, after a failure or a loss */
  double modelled_busy_ns;                   /* over all streams */
} bpsim_counters;

BPSIM_API bpsim_status bpsim_card_counters(int32_t card, bpsim_counters* counters);
/* Returns the modelled clock of a stream: its busy time, advanced by the events that it waited for. */
BPSIM_API bpsim_status bpsim_stream_modelled_ns(bpsim_stream stream, double* nanoseconds);

/* ---- events ------------------------------------------------------------------------------------------------------ */

typedef uint64_t bpsim_event; /* never 0 */

BPSIM_API bpsim_status bpsim_event_create(int timing, bpsim_event* event);
/* May be called at any time; work that waits for the event still does. */
BPSIM_API bpsim_status bpsim_event_destroy(bpsim_event event);
/* Records the event on a stream, replacing an earlier record. In a capture the event marks a place in the graph, and
 * only the capturing stream can wait for it. */
BPSIM_API bpsim_status bpsim_event_record(bpsim_event event, bpsim_stream stream);
/* Returns BPSIM_OK when the recorded work is done or nothing was recorded; else BPSIM_NOT_READY. */
BPSIM_API bpsim_status bpsim_event_query(bpsim_event event);
BPSIM_API bpsim_status bpsim_event_synchronize(bpsim_event event);
/* Makes work queued on `stream` from now on wait for the recorded work, which may be on another card. In a capture, an
 * event from outside it is BPSIM_CAPTURE. */
BPSIM_API bpsim_status bpsim_stream_wait_event(bpsim_stream stream, bpsim_event event);
/* Returns the time between two timing events whose work is done (else BPSIM_NOT_READY); modelled time while the model
 * is on. */
BPSIM_API bpsim_status bpsim_event_elapsed_ns(bpsim_event start, bpsim_event end, double* nanoseconds);

/* ---- copies ------------------------------------------------------------------------------------------------------ */

typedef enum bpsim_direction {
  BPSIM_HOST_TO_DEVICE = 0,
  BPSIM_DEVICE_TO_HOST = 1,
  BPSIM_DEVICE_TO_DEVICE = 2, /* within the stream's card */
  BPSIM_PEER = 3              /* between two cards; the stream is of either */
} bpsim_direction;

/* Copies in stream order; truly asynchronous with pinned host memory and on the card. As on real cards, pageable host
 * memory is staged (host to device, up to 64 KiB: the source may be changed at once) or waited for. A pointer that does
 * not match the direction, a range that exceeds its allocation, or freed memory is BPSIM_INVALID; the text states what
 * the pointer is. In a capture, pageable memory is BPSIM_CAPTURE: a replay would read it long after it was freed. */
BPSIM_API bpsim_status bpsim_copy_async(bpsim_stream stream, bpsim_direction direction, void* to, const void* from,
                                        uint64_t bytes);
/* The same, but returns when the copy is done. */
BPSIM_API bpsim_status bpsim_copy(bpsim_stream stream, bpsim_direction direction, void* to, const void* from,
                                  uint64_t bytes);
/* 1: checks every copy and fill that runs from now on. A checksum of the source is computed before, one of the
 * destination after it; if they differ, the copy has failed, as a launch fails, with both in the text. Writing a source
 * while it is copied, which is an error, has the same effect. 0 (default): no checks. */
BPSIM_API bpsim_status bpsim_check_copies(int32_t on);
BPSIM_API bpsim_status bpsim_memset_async(bpsim_stream stream, void* to, int value, uint64_t bytes);

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

typedef uint64_t bpsim_graph;

typedef enum bpsim_capture_state { BPSIM_CAPTURE_NONE = 0, BPSIM_CAPTURE_ACTIVE = 1, BPSIM_CAPTURE_INVALID = 2 }
    bpsim_capture_state;

/* Begins a capture: work submitted to the stream is recorded and not run, until bpsim_capture_end. Memory allocated for
 * the stream comes from `pool` (0: the graph's own) and stays there until the graph is destroyed, freed or not, so a
 * replay never writes into memory of another user. Graphs that share a pool share its freed memory: they must not run
 * at the same time.
 * Waiting for the capturing stream or its card, pageable copies, waiting for events from outside, and another stream
 * waiting for an event of the capture return BPSIM_CAPTURE and make the capture invalid; so does any other
 * synchronizing call on the card by the thread that began the capture. */
BPSIM_API bpsim_status bpsim_capture_begin(bpsim_stream stream, bpsim_pool pool);
/* Ends the capture and returns the graph, or BPSIM_CAPTURE with the first mistake; the capture is over either way. */
BPSIM_API bpsim_status bpsim_capture_end(bpsim_stream stream, bpsim_graph* graph);
BPSIM_API bpsim_status bpsim_capture_status(bpsim_stream stream, bpsim_capture_state* state);
/* Runs all launches of the graph in order, as one entry of the queue, on any stream of the card that captured it.
 * First checks that the memory it was captured with (ranges of launches, copies) still belongs to the same allocations
 * or its pool; the error text names the launch that would use freed memory. */
BPSIM_API bpsim_status bpsim_graph_launch(bpsim_stream stream, bpsim_graph graph);
/* Destroys the graph; its launches and memory are freed when replays in flight have finished. */
BPSIM_API bpsim_status bpsim_graph_destroy(bpsim_graph graph);
BPSIM_API bpsim_status bpsim_graph_size(bpsim_graph graph, uint64_t* launches);
BPSIM_API bpsim_status bpsim_graph_pool(bpsim_graph graph, bpsim_pool* pool);

#ifdef __cplusplus
}
#endif

#include "driver_faults.h"  /* fault injection, race checks and traces */

#endif
