/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Your own three stages under opd's scheduler, from C. It says what to do next, and never waits: here one loop carries
 * its actions out in virtual time, one rollout worker of eight lanes, one teacher, one learner. Responses take 20 to 80
 * seconds, and policy "edf" keeps every one of them within tau = 2 updates of its start. Then the same schedule on a
 * virtual cluster, without a line of driver.
 *
 * A driver of your own replaces `later`: it sends actions to workers and hands their answers in as they come.
 */
#include <stdio.h>
#include <stdlib.h>

#include "opd/c/sched.h"

enum { lanes = 8, most = 256 };

/* Answers that are on their way. */
static struct {
    double time;
    opd_event event;
} answers[most];
static size_t answer_count;
static int64_t version; /* of the weights that the rollout worker has */
static long consumed, stale;
static int64_t most_lag;

static void check(int result) {
    if (result == OPD_OK) return;
    fprintf(stderr, "%s\n", opd_last_error());
    exit(1);
}

static void later(double time, opd_event event) {
    event.struct_size = sizeof event;
    answers[answer_count].time = time;
    answers[answer_count++].event = event;
}
/* The first to come; of several at once the one that was sent first. */
static size_t first_answer(void) {
    size_t first = 0;
    for (size_t i = 1; i < answer_count; ++i)
        if (answers[i].time < answers[first].time) first = i;
    return first;
}

/* [actions] */
/* Does what the scheduler asks for; true once the run is over. Every answer names what it answers. */
static int carry_out(const opd_action* a, double now) {
    opd_event answer = {
        .struct_size = sizeof answer, .worker = a->worker, .incarnation = a->incarnation, .job = a->job};
    switch (a->kind) {
    case OPD_ACTION_START: /* generate, one token a second */
        answer.kind = OPD_EVENT_ROLLED_OUT, answer.ticket = a->ticket;
        answer.versions.oldest = a->version, answer.versions.tokens = 20 + (int64_t)(a->ticket.sample * 7 % 61);
        later(now + (double)answer.versions.tokens, answer);
        break;
    case OPD_ACTION_SCORE: /* a->tickets[0, a->count) go to the teacher */
        answer.kind = OPD_EVENT_SCORED;
        later(now + 1, answer);
        break;
    case OPD_ACTION_TRAIN: /* learn from a->tickets, publish weights under the name a->job */
        answer.kind = OPD_EVENT_LEARNED, answer.count = 1;
        later(now + 5, answer);
        break;
    case OPD_ACTION_SYNC: /* install the weights that job a->job has published */
        version = a->version;
        answer.kind = OPD_EVENT_SYNCED, answer.worker = 0, answer.incarnation = 1;
        later(now + 1, answer);
        break;
    case OPD_ACTION_STEP: /* these were learnt from, by the update of the version before */
        for (size_t i = 0; i < a->count; ++i) {
            const int64_t lag = a->version - 1 - a->consumed[i].start;
            ++consumed, stale += (long)lag;
            if (lag > most_lag) most_lag = lag;
        }
        break;
    case OPD_ACTION_FINISHED:
        return 1;
    default: /* abort, park, lost, fail: of faults and deadlines, which this loop does not have */
        fprintf(stderr, "unexpected action %d\n", (int)a->kind);
        exit(1);
    }
    return 0;
}
/* [/actions] */

int main(void) {
    /* [run] */
    opd_scheduler_settings settings = {
        .struct_size = sizeof settings, .batch = 4, .schedule = "async", .policy = "edf", .tau = 2, .sequences = 400};
    opd_scheduler* scheduler;
    check(opd_scheduler_create(&settings, &scheduler));

    for (int stage = OPD_ROLLOUT; stage <= OPD_LEARNER; ++stage) /* the workers come, each in its first life */
        later(0, (opd_event){.kind = OPD_EVENT_WORKER_UP,
                             .stage = stage,
                             .incarnation = 1,
                             .slots = stage == OPD_ROLLOUT ? lanes : 1});
    double now = 0;
    for (int over = 0; !over;) {
        opd_event event = {.struct_size = sizeof event, .kind = OPD_EVENT_TICK};
        const size_t first = first_answer();
        double deadline;
        check(opd_scheduler_next_deadline(scheduler, &deadline));
        if (answer_count > 0 && answers[first].time <= deadline) { /* else nothing comes before something is due */
            event = answers[first].event, now = answers[first].time;
            for (size_t i = first + 1; i < answer_count; ++i) answers[i - 1] = answers[i];
            --answer_count;
        } else {
            now = deadline;
        }
        if (event.kind == OPD_EVENT_ROLLED_OUT) { /* weights that came meanwhile drew its last tokens */
            event.versions.newest = version;
            event.versions.mean = 0.5 * (double)(event.versions.oldest + version);
        }
        opd_action actions[16] = {{.struct_size = sizeof actions[0]}};
        size_t count;
        check(opd_scheduler_on(scheduler, &event, now, actions, 16, &count));
        while (count > 0) { /* more than 16 come in pieces */
            for (size_t i = 0; i < count; ++i) over |= carry_out(&actions[i], now);
            check(opd_scheduler_actions(scheduler, actions, 16, &count));
        }
    }
    opd_scheduler_destroy(scheduler);
    /* [/run] */
    printf("%ld sequences in %.0f s, mean start lag %.2f, at most %d of tau = 2\n", consumed, now,
           (double)stale / (double)consumed, (int)most_lag);

    /* [simulate] */
    opd_distribution response = {.struct_size = sizeof response, .law = "lognormal", .a = 40, .b = 0.5};
    opd_job scoring = {.struct_size = sizeof scoring, .fixed = 1},
            training = {.struct_size = sizeof training, .fixed = 5};
    opd_cluster cluster = {.struct_size = sizeof cluster,
                           .lanes = lanes,
                           .response = &response,
                           .step = 1,
                           .teacher = &scoring,
                           .learner = &training};
    opd_ledger ledger = {.struct_size = sizeof ledger};
    check(opd_simulate(&cluster, &settings, &ledger, NULL));
    printf(
        "simulated: %.0f s, consumed %.0f tokens, discarded %.0f, lost %.0f, rollout idle for %.0f %%, mean lag %.2f\n",
        ledger.seconds, ledger.consumed_tokens, ledger.discarded_tokens, ledger.lost_tokens,
        100 * ledger.idle[OPD_ROLLOUT], ledger.lag_mean[0]);
    /* [/simulate] */
    return consumed == 400 && most_lag <= 2 && ledger.finished && ledger.lag_max[0] <= 2 ? 0 : 1;
}
