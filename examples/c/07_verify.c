/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Two drafted tokens, verified against the target's probabilities: what is written has the target's law, whatever the
 * drafter thinks. Counts what is written first over 20,000 positions, and a tuner's choice.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "opd/c/base.h"
#include "opd/c/spec.h"

enum { V = 3, DRAFTED = 2, POSITIONS = 20000 };

/* Says what failed. */
static int wrong(const char* what) {
    fprintf(stderr, "%s: %s\n", what, opd_last_error());
    return 1;
}

int main(void) {
    /* row 0: after the prefix, row i + 1: after draft i; the drafter's laws q, from which it draws */
    float p[(DRAFTED + 1) * V] = {.5f, .3f, .2f, .1f, .1f, .8f, .4f, .4f, .2f};
    float q[(DRAFTED + 1) * V] = {.2f, .3f, .5f, .2f, .2f, .6f, 0, 0, 0};
    int32_t token[DRAFTED];
    int64_t laws[2] = {DRAFTED + 1, V}, chain[1] = {DRAFTED};
    const DLTensor dl_p = {.data = p, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = laws};
    const DLTensor dl_q = {.data = q, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = laws};
    const DLTensor dl_tokens = {
        .data = token, .device = {kDLCPU, 0}, .ndim = 1, .dtype = {kDLInt, 32, 1}, .shape = chain};
    const opd_drafts drafts = {.struct_size = sizeof drafts, .tokens = &dl_tokens};
    opd_verify_call call = {.struct_size = sizeof call, .drawn = "dense", .block = 1, .drafts = &drafts};
    call.p = &dl_p;
    call.q = &dl_q;
    call.seed = 7;
    uint32_t state = 1;
    long first[V] = {0}, accepted = 0;
    for (call.position = 0; call.position < POSITIONS; ++call.position) {
        for (int i = 0; i < DRAFTED; ++i) { /* drawn anew, from q */
            state = state * 1664525u + 1013904223u;
            double left = (state >> 8) / 16777216.0;
            for (token[i] = 0; token[i] < V - 1 && (left -= q[i * V + token[i]]) >= 0;) ++token[i];
        }
        opd_verdict verdict;
        if (opd_verify(&call, &verdict) != OPD_OK) return wrong("verify");
        ++first[verdict.accepted > 0 ? token[0] : verdict.next];
        accepted += (long)verdict.accepted;
    }
    printf("token  target  written\n");
    int same = 1;
    for (int v = 0; v < V; ++v) {
        const double written = (double)first[v] / POSITIONS;
        printf("%5d  %6.3f  %7.3f\n", v, p[v], written);
        same = same && fabs(written - p[v]) < 0.02;
    }
    printf("%.2f of %d drafts followed\n", (double)accepted / POSITIONS, DRAFTED);

    opd_tuner* tuner = NULL;
    opd_uniforms uniforms = {.struct_size = sizeof uniforms, .seed = 7, .step = 1};
    opd_strategy chosen;
    if (opd_tuner_create(NULL, &tuner) != OPD_OK) return wrong("tuner");
    if (opd_tuner_choose(tuner, 4, &uniforms, &chosen) != OPD_OK) return wrong("choose");
    if (opd_tuner_heard(tuner, &chosen, 4, 2.5, 0.03, &uniforms) != OPD_OK) return wrong("heard");
    printf("4 sequences: depth %d, %d children a node, %d verified\n", (int)chosen.depth, (int)chosen.top_k,
           (int)chosen.verify);
    opd_tuner_destroy(tuner);
    return same ? 0 : 1;
}
