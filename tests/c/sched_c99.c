/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * The header is C99: it is included, and a scheduler is made and asked for its first actions.
 */
#include "opd/c/sched.h"

#include <stdio.h>

int main(void) {
    opd_scheduler_settings settings = {.struct_size = sizeof settings, .batch = 4, .policy = "edf"};
    opd_event up = {
        .struct_size = sizeof up, .kind = OPD_EVENT_WORKER_UP, .stage = OPD_ROLLOUT, .incarnation = 1, .slots = 8};
    opd_action actions[4] = {{.struct_size = sizeof actions[0]}};
    opd_scheduler* scheduler = NULL;
    size_t count = 0;
    if (opd_scheduler_create(&settings, &scheduler) != OPD_OK ||
        opd_scheduler_on(scheduler, &up, 0.0, actions, 4, &count) != OPD_OK) {
        puts(opd_last_error());
        return 1;
    }
    opd_scheduler_destroy(scheduler);
    if (count != 1 || actions[0].kind != OPD_ACTION_SYNC) return 1; /* the first weights, before anything starts */
    if (opd_scheduler_on(scheduler, &up, 1.0, actions, 4, &count) != OPD_INVALID_INPUT) return 1;
    return 0;
}
