/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Schedulers of rollout, teacher and learner (opd/sched.hpp): events in, actions out; the staleness queue; the virtual
 * cluster.
 *
 *   opd_scheduler_settings settings = {
 *       .struct_size = sizeof settings, .batch = 16, .schedule = "async", .policy = "edf"};
 *   opd_scheduler* scheduler;
 *   if (opd_scheduler_create(&settings, &scheduler) != OPD_OK) puts(opd_last_error());
 *
 *   opd_event came = {.struct_size = sizeof came, .kind = OPD_EVENT_WORKER_UP, .stage = OPD_ROLLOUT, .incarnation = 1,
 *                     .slots = 8};
 *   opd_action actions[64] = {{.struct_size = sizeof actions[0]}};
 *   opd_scheduler_on(scheduler, &came, seconds(), actions, 64, &count);       carry out actions[0, count), in order
 *
 * docs/sched/schedules.md, policies.md and faults.md say what the settings do, drivers.md what a driver owes the
 * scheduler. Batches, bounds and snapshots are those of the C++ scheduler, byte for byte. Policies and schedules are
 * named: opd_name("schedule", i), opd_name("staleness_policy", i), opd_name("weight_update", i), opd_name("law", i).
 */
#ifndef OPD_C_SCHED_H
#define OPD_C_SCHED_H

#include "opd/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The number 0 itself, in members of which 0 means a default that is not 0; their comments name it. */
#define OPD_ZERO (-1)
/* Of `outstanding`: "automatic" is as many as the work needs, "widest" (tau + 1) batches. */
#define OPD_BY_POLICY 0
#define OPD_AUTOMATIC (-1)
#define OPD_WIDEST (-2)

/* The stages, in the order in which a sequence passes them. */
typedef enum { OPD_ROLLOUT = 0, OPD_TEACHER = 1, OPD_LEARNER = 2 } opd_stage;

/* Where a sequence is between its admission and the end of the step that consumed it. */
typedef enum {
    OPD_PLACE_NONE = 0,
    OPD_WAITING = 1,
    OPD_IN_ROLLOUT = 2,
    OPD_QUEUED = 3,
    OPD_SCORING = 4,
    OPD_READY = 5,
    OPD_TRAINING = 6
} opd_place;

/* Why a sequence was given up. */
typedef enum {
    OPD_FAILED_ROLLOUT = 0, /* too many failed attempts */
    OPD_FAILED_TEACHER = 1,
    OPD_FAILED_LEARNER = 2,
    OPD_FAILED_STALE = 3,  /* policy "drop" */
    OPD_FAILED_STOPPED = 4 /* OPD_EVENT_STOP */
} opd_failure;
#define OPD_FAILURES 5

/* One attempt at rolling one sequence out. A reply carries the ticket that it answers. */
typedef struct opd_ticket {
    uint64_t sample; /* number of the sequence, unique in a run; of answer sample % group to prompt sample / group */
    uint32_t slot;   /* of its permit, in [0, M) */
    uint32_t attempt;
    int32_t worker;
    uint32_t incarnation; /* which life of the worker, from 1 */
    int32_t lane;         /* in [0, slots of the worker) */
} opd_ticket;

/* Which versions of the weights drew the tokens of a response. */
typedef struct opd_token_versions {
    int64_t oldest, newest;
    double mean; /* weighted by tokens */
    int64_t tokens;
} opd_token_versions;

/* ---- settings */

/* opd::sched::settings (opd/sched/settings.hpp) with its schedule. Seconds are those that the caller hands in. */
typedef struct opd_scheduler_settings {
    size_t struct_size;
    int64_t batch;        /* B, sequences a train batch; 0: 256 */
    const char* schedule; /* NULL: "async" */
    int64_t k;            /* "step_off", "controlled": updates between a batch's start and its own; 0: 2; OPD_ZERO: 0 */
    int64_t tau;          /* "async", in train batches; 0: 4; OPD_ZERO: 0 */
    int64_t outstanding;  /* "async": M, permits: a number, OPD_BY_POLICY, OPD_AUTOMATIC or OPD_WIDEST */
    const char* policy;   /* "async"; NULL: "capacity" */
    const char* update;   /* "async": what becomes of running sequences when the weights change; NULL: "keep" */
    int64_t concurrency;  /* policy "areal": most sequences in rollout; 0: no limit */
    int32_t negative_control; /* 1: allows "naive_wait", which deadlocks */
    int32_t rollout_attempts; /* failures of a sequence in rollout before it fails for good; 0: 3 */
    int32_t teacher_attempts; /* likewise in scoring; 0: 3 */
    int32_t learner_attempts; /* of a train step before its sequences fail; 0: 1 */
    int64_t group;            /* answers a prompt; 0: 1 */
    int64_t sequences;        /* to be consumed, then the run ends; 0: no end */
    int64_t available;        /* what the prompt source can give; 0: no end */
    int64_t first_version;    /* of the weights that it begins with */
    uint64_t first_sample;    /* of its first sequence */
    int64_t teacher_batch;    /* sequences a scoring call; 0: 8 */
    double teacher_flush;     /* seconds after which a smaller call is made; 0: 0.05; OPD_ZERO: at once */
    int32_t fruitless_steps;  /* steps' worth of sequences that fail in a row, then the run has failed; 0: 5; OPD_ZERO:
                                 it goes on */
    int32_t most_workers;     /* of a stage; 0: 65536 */
    int32_t most_slots;       /* of a worker; 0: 65536 */
    int32_t measure;          /* 1: keeps the metrics of opd_scheduler_metrics() */
    double rollout_deadline;  /* seconds of an attempt, past which it is aborted; 0: none, here and below */
    double abort_deadline;    /* to let go of an aborted or parked attempt, past which the worker is lost; likewise: */
    double teacher_deadline;
    double learner_deadline;
    double sync_deadline;
    /* of the metrics */
    int64_t warmup;           /* updates that the throughput leaves out; 0: 5 */
    int64_t lag_bound;        /* lags beyond it share a bin; 0: 1024 */
    int64_t earlier_updates;  /* optimizer updates in each version before first_version; 0: 1; OPD_ZERO: 0 */
    int32_t payload_attempts; /* losses of what was drawn of a sequence before it fails for good; 0: 10 */
    int32_t reserved;         /* 0 */
} opd_scheduler_settings;

/* ---- events and actions */

/* What a driver tells the scheduler. Behind each: which members of opd_event count. */
typedef enum {
    OPD_EVENT_WORKER_UP = 0, /* stage, worker, incarnation, slots: a new life; or of this one, other slots */
    OPD_EVENT_WORKER_DOWN = 1,
    OPD_EVENT_ROLLED_OUT = 2,     /* ticket, versions */
    OPD_EVENT_ROLLOUT_FAILED = 3, /* ticket */
    OPD_EVENT_ABORTED = 4,        /* ticket */
    OPD_EVENT_PARKED = 5,         /* ticket, versions of the tokens that it has, which the driver keeps */
    OPD_EVENT_SCORED = 6,         /* job, worker, incarnation; tickets: which; none: all */
    OPD_EVENT_SCORE_FAILED = 7,   /* job, worker, incarnation */
    OPD_EVENT_LEARNED = 8,        /* job, incarnation; count: optimizer updates */
    OPD_EVENT_LEARN_FAILED = 9,   /* job, incarnation */
    OPD_EVENT_SYNCED = 10,        /* worker, incarnation, job; elasticity, where it is known */
    OPD_EVENT_WEIGHTS_LOST = 11,  /* job: what it published cannot be had any more */
    OPD_EVENT_TICK = 12,          /* nothing but time passes */
    OPD_EVENT_PAUSE = 13,         /* nothing new starts */
    OPD_EVENT_RESUME = 14,
    OPD_EVENT_PARK = 15,        /* ticket: it is to be parked */
    OPD_EVENT_RESIZE = 16,      /* count: permits M */
    OPD_EVENT_CLOSE = 17,       /* nothing new is admitted; what is outstanding is finished */
    OPD_EVENT_STOP = 18,        /* everything outstanding is given up */
    OPD_EVENT_PAYLOAD_LOST = 19 /* tickets, or ticket if there are none: what they drew, or its score, cannot be had any
                                   more; job: of the call that found so, to a train call the answer; else 0 */
} opd_event_kind;

/* What a driver tells the scheduler. Members that the kind does not name are not read: leave them 0. */
typedef struct opd_event {
    size_t struct_size;
    int32_t kind;   /* opd_event_kind */
    int32_t stage;  /* opd_stage of the worker, of OPD_EVENT_WORKER_UP and _DOWN; the other kinds say it themselves */
    int32_t worker; /* of kinds with a ticket that of the ticket; of the learner 0 */
    uint32_t incarnation; /* which life of the worker, from 1; of kinds with a ticket that of the ticket */
    int32_t slots;        /* 0: it drains */
    int32_t has_elasticity;
    opd_ticket ticket;
    opd_token_versions versions;
    uint64_t job;
    int64_t count;
    double elasticity; /* of the worker's pace, in [-1, 1] (opd/sched/rollout_cost.hpp); with has_elasticity */
    const opd_ticket* tickets;
    size_t ticket_count;
} opd_event;

/* What the scheduler asks for. Behind each: which members of opd_action count. */
typedef enum {
    OPD_ACTION_START = 0, /* roll ticket.sample out, from weights of `version` */
    OPD_ACTION_ABORT = 1, /* let go of ticket */
    OPD_ACTION_PARK = 2,  /* stop ticket, keep what it has drawn */
    OPD_ACTION_SCORE = 3, /* job, worker, tickets */
    OPD_ACTION_TRAIN =
        4, /* job, from, version, tickets by sample; none: publish the weights of `from` as version + 1 */
    OPD_ACTION_SYNC =
        5, /* worker installs the weights that `job` published, of `version`; worker -1: every rollout worker */
    OPD_ACTION_LOST = 6,    /* stage, worker: it missed a deadline */
    OPD_ACTION_STEP = 7,    /* for information: consumed, the version is now this */
    OPD_ACTION_FAIL = 8,    /* for information: ticket was given up, why, where */
    OPD_ACTION_FINISHED = 9 /* nothing is outstanding and nothing will come */
} opd_action_kind;

/* A sequence that an update consumed, at `version` of its step less 1. */
typedef struct opd_consumed {
    opd_ticket ticket;
    int64_t start; /* version of its start */
    opd_token_versions versions;
} opd_consumed;

/* What the scheduler asks for. */
typedef struct opd_action {
    size_t struct_size;
    int32_t kind;  /* opd_action_kind */
    int32_t stage; /* opd_stage */
    int32_t why;   /* opd_failure */
    int32_t where; /* opd_place */
    int32_t worker;
    uint32_t incarnation; /* of the worker */
    opd_ticket ticket;
    int64_t version;
    uint64_t job;
    uint64_t from; /* job that published the weights to go on from; 0: those that the run began with */
    /* The scheduler's memory: good until the next call that returns actions of this scheduler, or destroys it. */
    const opd_ticket* tickets;
    const opd_consumed* consumed; /* OPD_ACTION_STEP */
    size_t count;                 /* of tickets, or of consumed */
} opd_action;

typedef struct opd_scheduler opd_scheduler;
/* Makes a scheduler at time 0 with nothing outstanding, and frees one. */
OPD_C_API int opd_scheduler_create(const opd_scheduler_settings* settings, opd_scheduler** out);
OPD_C_API void opd_scheduler_destroy(opd_scheduler* scheduler);

/* Takes an event at the time `now`, in seconds on any clock that never runs backwards, then what is due by then, and
 * writes the first `capacity` actions that it led to, in order. Those that do not fit stay, and the next call returns
 * them first. actions[0].struct_size says how large each element is. An event that is refused has changed nothing. */
OPD_C_API int opd_scheduler_on(opd_scheduler* scheduler, const opd_event* event, double now, opd_action* actions,
                               size_t capacity, size_t* count);
/* The same of events[0, event_count), each of events[0].struct_size bytes. What is refused is named by its row,
 * opd_last_error_row(); then *taken events before it were taken, and their actions stay for opd_scheduler_actions().
 * `taken` may be NULL. */
OPD_C_API int opd_scheduler_on_many(opd_scheduler* scheduler, const opd_event* events, size_t event_count, double now,
                                    opd_action* actions, size_t capacity, size_t* count, size_t* taken);
/* What did not fit, without an event: *count is 0 when nothing is left. */
OPD_C_API int opd_scheduler_actions(opd_scheduler* scheduler, opd_action* actions, size_t capacity, size_t* count);
/* When an event must be handed in at the latest, OPD_EVENT_TICK if nothing else happens; infinity: no need. */
OPD_C_API int opd_scheduler_next_deadline(opd_scheduler* scheduler, double* deadline);

/* ---- what it knows */

/* Counts since the scheduler began, those before a snapshot included (opd/sched/scheduler.hpp). */
typedef struct opd_scheduler_counters {
    size_t struct_size;
    int64_t admitted, consumed, consumed_tokens, failed;
    int64_t failed_by[OPD_FAILURES]; /* by opd_failure */
    int64_t retries, preempted, restarts, parked, late, duplicates, lost_workers, lost_weights, updates, short_batches,
        empty_batches, lost_payloads;
} opd_scheduler_counters;
/* Running totals: opd/sched/scheduler.hpp says what each is. */
OPD_C_API int opd_scheduler_totals(opd_scheduler* scheduler, opd_scheduler_counters* counters);

/* Where the scheduler stands. */
typedef struct opd_scheduler_state {
    size_t struct_size;
    int64_t version;                                            /* completed train batches */
    uint64_t weights_job;                                       /* what published the weights of it */
    uint64_t needed_from;                                       /* nobody needs what lower jobs published */
    uint64_t cursor;                                            /* number of the next sequence */
    int64_t permits;                                            /* M now */
    int64_t slack;                                              /* "edf": see opd/sched/scheduler.hpp; else -1 */
    int64_t waiting, rollout, queued, scoring, ready, training; /* sequences there */
    uint64_t pending;                                           /* actions that no call has returned yet */
    int32_t gate_open, finished, held_back;
    int32_t failed_stage; /* opd_stage for which the run ended as failed; -1: it did not */
} opd_scheduler_state;
/* Fills `state`; changes nothing. */
OPD_C_API int opd_scheduler_look(opd_scheduler* scheduler, opd_scheduler_state* state);

/* A sequence that holds a permit. */
typedef struct opd_outstanding {
    opd_ticket ticket;
    int64_t start;               /* version of its start; -1: none yet */
    opd_token_versions versions; /* of the tokens that it has, once rolled out or parked */
    int32_t where;               /* opd_place */
    int32_t reserved;
} opd_outstanding;
/* Every sequence that holds a permit, by slot: *count of them. More than `capacity` are refused; with capacity 0 only
 * counted. */
OPD_C_API int opd_scheduler_outstanding(opd_scheduler* scheduler, opd_outstanding* sequences, size_t capacity,
                                        size_t* count);
/* The latest life of a worker that was heard of (0: none), and whether it is up. */
OPD_C_API int opd_scheduler_worker(opd_scheduler* scheduler, int32_t stage, int32_t worker, uint32_t* incarnation,
                                   int32_t* up);
/* Recounts everything: OPD_INTERNAL with the broken invariant. For tests. */
OPD_C_API int opd_scheduler_check(opd_scheduler* scheduler);

/* ---- snapshots */

/* All of the state, equal bytes for equal states: *size bytes. With `bytes` NULL only the size. Refused while actions
 * wait that no call has returned: they are not in it. */
OPD_C_API int opd_scheduler_snapshot(opd_scheduler* scheduler, void* bytes, size_t capacity, size_t* size);
/* As it was. Schedule, batch and group must be those of then; limits, deadlines and attempts may differ. Metrics begin
 * anew. */
OPD_C_API int opd_scheduler_restore(const opd_scheduler_settings* settings, const void* bytes, size_t size,
                                    opd_scheduler** out);
/* After opd_scheduler_restore() in a new process, where no worker is yet: docs/sched/faults.md. `keep_prefixes` 1: the
 * driver has the tokens of what was in rollout; `reopen` 1: a pause, a close and an end are forgotten. */
OPD_C_API int opd_scheduler_abandon_workers(opd_scheduler* scheduler, int32_t keep_prefixes, int32_t reopen);

/* ---- metrics */

/* What the metrics hear of a worker. */
typedef enum {
    OPD_WORKER_UP = 0, /* with nothing running */
    OPD_WORKER_DOWN = 1,
    OPD_WORK_BEGINS = 2, /* it is busy with its stage's work */
    OPD_WORK_ENDS = 3,
    OPD_SPARE_BEGINS = 4, /* what a rollout worker does for want of sequences */
    OPD_SPARE_ENDS = 5
} opd_worker_change;
/* For the busy times and the overlap of the metrics, which the scheduler cannot know: a worker comes, goes, begins or
 * ends to be busy. */
OPD_C_API int opd_scheduler_observe(opd_scheduler* scheduler, int32_t change, int32_t stage, int32_t worker,
                                    double now);
/* The run up to `now` as JSON (docs/sched/metrics.md has the names): *length bytes and a final 0. With `text` NULL only
 * the length. With settings.measure alone. */
OPD_C_API int opd_scheduler_metrics(opd_scheduler* scheduler, double now, char* text, size_t capacity, size_t* length);

/* ---- the staleness queue */

/* Between threads that generate and a learner (docs/sched/queue.md). Items are the caller's numbers; any thread may
 * call. A permit is a number, too: it is out until it is pushed and trained on, or released. */
typedef struct opd_queue opd_queue;
typedef struct opd_queue_settings {
    size_t struct_size;
    int64_t batch;       /* B; 0: 256 */
    int64_t tau;         /* 0: 4; OPD_ZERO: 0 */
    int64_t outstanding; /* M: a number, OPD_BY_POLICY or OPD_WIDEST, which here are the same */
    const char* policy;  /* NULL: "capacity" */
    int64_t concurrency; /* policy "areal" */
    int64_t group;       /* most permits taken at once; 0: 1 */
    int32_t negative_control;
    int32_t reserved; /* 0 */
} opd_queue_settings;

/* The right of one sequence to be outstanding; given back by a push that is consumed, or by opd_queue_release(). */
typedef struct opd_permit {
    uint64_t permit; /* never 0 */
    int64_t version; /* of the weights that its sequence starts with */
    uint32_t slot;   /* in [0, M), unique among outstanding sequences */
    uint32_t reserved;
} opd_permit;

/* What became of an item; OPD_PUSH_STALE leaves permit and item with the caller. */
typedef enum { OPD_PUSHED = 0, OPD_PUSH_STALE = 1, OPD_PUSH_ABORTED = 2 } opd_push;

/* `seconds` is how long a call may wait: 0 not at all, infinity for ever. */
OPD_C_API int opd_queue_create(const opd_queue_settings* settings, opd_queue** out);
/* Ends every wait in it, too. */
OPD_C_API void opd_queue_destroy(opd_queue* queue);
/* `n` permits under the present version, all or none, first come first served; *got 0: none, since the time was over or
 * the queue is closed. */
OPD_C_API int opd_queue_acquire(opd_queue* queue, size_t n, double seconds, opd_permit* permits, int32_t* got);
/* Items under their permits, all or none. *pushed is an opd_push: unless OPD_PUSHED, permits stay with the caller. */
OPD_C_API int opd_queue_push(opd_queue* queue, const uint64_t* permits, const int64_t* items, size_t n,
                             int32_t* pushed);
/* Gives a permit back: its sequence failed. */
OPD_C_API int opd_queue_release(opd_queue* queue, uint64_t permit);
/* Its sequence starts again under the present version, once the gate is open: *version; -1: not in time, or aborted. */
OPD_C_API int opd_queue_restart(opd_queue* queue, uint64_t permit, double seconds, int64_t* version);

/* A batch that a pop has taken. */
typedef struct opd_queue_batch {
    size_t struct_size;
    uint64_t
        batch; /* its name; 0: there is none, since the time was over or the queue is aborted, or closed and empty */
    int64_t version; /* of the weights before its update */
    size_t count;
} opd_queue_batch;
/* The next batch: items[0, count), with the version that each was started with (`versions` may be NULL). capacity: B at
 * least. One batch is out at a time. */
OPD_C_API int opd_queue_pop(opd_queue* queue, double seconds, int64_t* items, int64_t* versions, size_t capacity,
                            opd_queue_batch* out);
/* It was trained on: the gate closes, nothing starts on old weights. */
OPD_C_API int opd_queue_trained(opd_queue* queue, uint64_t batch);

/* An item that the new version made stale. */
typedef struct opd_stale {
    int64_t item;
    int64_t version;   /* of its start */
    opd_permit permit; /* policy "retry": restarted under the new version; "drop": permit 0 */
} opd_stale;
/* The new weights are out: the version moves, permits return, the gate opens. */
OPD_C_API int opd_queue_synchronised(opd_queue* queue, uint64_t batch);
/* What became too old in the queue by that, of "drop" and "retry", oldest call first: *count of them; 0 when nothing is
 * left. */
OPD_C_API int opd_queue_stale(opd_queue* queue, opd_stale* stale, size_t capacity, size_t* count);
/* Instead of opd_queue_trained(): its items go back in front. Instead of opd_queue_synchronised(): the queue aborts,
 * since weights that were trained are not out. */
OPD_C_API int opd_queue_give_up(opd_queue* queue, uint64_t batch);
/* No more permits; what is out is still pushed and consumed, the last batch may be short. */
OPD_C_API int opd_queue_close(opd_queue* queue);
/* Ends every wait. */
OPD_C_API int opd_queue_abort(opd_queue* queue);
/* Items that lay in the queue when it was aborted: *count of them; 0 when nothing is left. */
OPD_C_API int opd_queue_aborted_items(opd_queue* queue, int64_t* items, size_t capacity, size_t* count);

/* At any moment: acquired = consumed + returned + dropped + discarded + outstanding. */
typedef struct opd_queue_state {
    size_t struct_size;
    int64_t version;
    int64_t acquired, consumed, returned, dropped, discarded, retried, put_back, batches;
    int64_t outstanding, ready, training, waiting_producers, waiting_learners;
    int32_t closed, aborted;
} opd_queue_state;
OPD_C_API int opd_queue_look(opd_queue* queue, opd_queue_state* state);
/* Version, counts and the items that lie in it, as a size query first. Sequences whose permits are out are not in it.
 */
OPD_C_API int opd_queue_snapshot(opd_queue* queue, void* bytes, size_t capacity, size_t* size);
OPD_C_API int opd_queue_restore(const opd_queue_settings* settings, const void* bytes, size_t size, opd_queue** out);

/* ---- the virtual cluster */

/* A law of lengths, tokens, or of factors on durations (opd/sched/distributions.hpp). */
typedef struct opd_distribution {
    size_t struct_size;
    const char* law; /* "constant" (a), "uniform" (a to b), "exponential" (mean a), "lognormal" (median a, sigma b),
                      * "pareto" (alpha a, minimum b, below c; c 0: no cap), "empirical" (x), "quantile_table" (x at u),
                      * "mixture" (parts, weights) */
    double a, b, c;
    double at_least, at_most;             /* what lies outside moves there; at_most 0: no bound */
    const double* x;                      /* (n) measured values in any order, or quantiles */
    const double* u;                      /* (n) of "quantile_table", from 0 to 1 */
    const double* weights;                /* (n) of "mixture" */
    const struct opd_distribution* parts; /* (n) of "mixture", each of parts[0].struct_size bytes */
    size_t n;
} opd_distribution;

/* seconds = noise (fixed + per_item items + per_token tokens) */
typedef struct opd_job {
    size_t struct_size;
    double fixed, per_item, per_token;
    const opd_distribution* noise; /* NULL: 1 */
} opd_job;

/* Rollout workers of one kind, teachers, one learner: opd/sched/simulated.hpp has the formulas. Draws depend on the
 * seed and on what they are for alone: every schedule meets the same lengths. */
typedef struct opd_cluster {
    size_t struct_size;
    uint64_t seed;                         /* 0: 1 */
    int32_t rollout_workers;               /* 0: 1 */
    int32_t lanes;                         /* sequences at once on each; 0: 64 */
    int32_t teachers;                      /* 0: 1 */
    int32_t teacher_slots;                 /* calls at once on each; 0: 1 */
    const opd_distribution* response;      /* tokens; NULL: lognormal, median 2000, sigma 1 */
    const opd_distribution* prompt;        /* tokens; NULL: 200 */
    int32_t redraw;                        /* 1: a sequence that starts again draws a new length */
    int32_t reserved;                      /* 0 */
    int64_t park_after;                    /* tokens of an attempt, after which it is parked; 0: never */
    double step;                           /* seconds a decode step; 0: 0.02; OPD_ZERO: 0 */
    double step_per_sequence;              /* further seconds per running sequence */
    double prefill;                        /* seconds per prompt token */
    double rebuild;                        /* seconds per token of KV state after a change of weights */
    double speed_factor;                   /* of all of them; 0: 1 */
    const opd_distribution* worker_factor; /* of each rollout worker's times, drawn once a worker; NULL: 1 */
    const opd_job* teacher; /* of a scoring call: items are sequences; NULL: takes no time, here and below */
    const opd_job* learner; /* of a train step */
    const opd_job* sync;    /* of installing weights on a worker, one item */
    /* What comes from outside, on top of the workers: workers that come (incarnation 0: the driver numbers lives) and
     * go, pause, resume, resize, close, stop. */
    const opd_event* events; /* (event_count), each of events[0].struct_size bytes */
    const double* times;     /* (event_count) seconds from the start */
    size_t event_count;
    /* The run ends with the first of these, or when the scheduler has finished. */
    int64_t steps;        /* 0: no limit */
    double seconds;       /* of virtual time; 0: no limit */
    uint64_t most_events; /* 0: no limit */
} opd_cluster;

/* Tokens: generated = consumed + discarded + lost + outstanding. Lags in versions, of start, oldest, mean and newest
 * token. */
typedef struct opd_ledger {
    size_t struct_size;
    int64_t steps, sequences; /* updates, and what they consumed */
    int64_t version, permits; /* at the end */
    double seconds;           /* of virtual time */
    /* Whole tokens, each in one figure (opd/sched/meters/token_ledger.hpp): generated is the sum of the others. */
    double generated_tokens, consumed_tokens;
    double discarded_tokens;   /* by the rules: too stale, or begun anew because the weights changed */
    double lost_tokens;        /* by faults: of attempts that failed, missed a deadline or ended with their worker */
    double outstanding_tokens; /* of sequences that are under way at the end */
    double lag_mean[4], lag_max[4];
    double busy_seconds[3]; /* by opd_stage; of rollout the mean over workers */
    double idle[3];         /* share of the time that the stage was not busy */
    double overlap;         /* 0 to 3; 0 where no time has passed */
    double throughput;      /* consumed tokens a second after the warm-up; 0: too few updates */
    double held_seconds;    /* for which the policy kept the learner from a batch at hand */
    opd_scheduler_counters counters;
    uint64_t events;
    int32_t finished;     /* 1: the scheduler has finished */
    int32_t stuck;        /* 1: nothing was left to happen, and it had not: a deadlock */
    int32_t failed_stage; /* opd_stage for which the run ended as failed; -1: it did not */
    int32_t reserved;
} opd_ledger;

typedef struct opd_report opd_report;
/* Runs the schedule on the cluster in virtual time. `ledger` and `report` may be NULL. */
OPD_C_API int opd_simulate(const opd_cluster* cluster, const opd_scheduler_settings* settings, opd_ledger* ledger,
                           opd_report** report);
/* {"ledger": {…}, "metrics": {…}}, good until the report is destroyed; NULL for what is no report. */
OPD_C_API const char* opd_report_json(const opd_report* report);
OPD_C_API void opd_report_destroy(opd_report* report);

#ifdef __cplusplus
}
#endif
#endif
