/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * A rollout's token under a filter, what the filter kept, what a teacher says of the token, and which tokens M2PO
 * leaves out. C99. */
#include <stdio.h>
#include <stdlib.h>

#include "opd/c/opd.h"

enum { N = 2, V = 8 };

static void check(int status) {
    if (status == OPD_OK) return;
    fprintf(stderr, "%s\n", opd_last_error());
    exit(1);
}
/* One dimension for columns of 0, else two. */
static DLTensor tensor(void* data, DLDataType type, int64_t* shape, int64_t rows, int64_t columns) {
    const DLDevice cpu = {kDLCPU, 0};
    DLTensor t = {0};
    shape[0] = rows, shape[1] = columns;
    t.data = data, t.device = cpu, t.ndim = columns > 0 ? 2 : 1, t.dtype = type, t.shape = shape;
    return t;
}

int main(void) {
    const DLDataType f32 = {kDLFloat, 32, 1}, f64 = {kDLFloat, 64, 1}, i32 = {kDLInt, 32, 1}, u32 = {kDLUInt, 32, 1},
                     u64 = {kDLUInt, 64, 1}, u8 = {kDLUInt, 8, 1};
    float logits[N][V] = {{1, 2, 3, 4, 5, 4, 3, 2}, {0, 0, 0, 6, 0, 0, 0, 0}},
          teacher[N][V] = {{5, 4, 3, 2, 1, 0, 0, 0}, {0}};
    uint64_t prompts[N] = {40, 41};
    uint32_t positions[N] = {0, 0};
    int32_t tokens[N], kept_ids[N * V], begin[N + 1];
    float log_mus[N], log_qs[N];
    double log_ps[N], squares[N];
    uint8_t keeps[N];
    int64_t s[12][2], total = 0, count = 0, dropped = 0;

    const DLTensor z = tensor(logits, f32, s[0], N, V), y = tensor(teacher, f32, s[1], N, V);
    const DLTensor sample = tensor(prompts, u64, s[2], N, 0), position = tensor(positions, u32, s[3], N, 0);
    const DLTensor ids = tensor(tokens, i32, s[4], N, 1), log_mu = tensor(log_mus, f32, s[5], N, 1),
                   log_q = tensor(log_qs, f32, s[6], N, 1);
    const DLTensor offsets = tensor(begin, i32, s[7], N + 1, 0), log_p = tensor(log_ps, f64, s[8], N, 1);
    DLTensor kept = tensor(kept_ids, i32, s[9], 0, 0), square = tensor(squares, f64, s[10], N, 0);
    const DLTensor keep = tensor(keeps, u8, s[11], N, 1);

    /* the token of each row, and its log mu under the filter */
    opd_draw_call draw = {0};
    draw.struct_size = sizeof draw;
    draw.z = &z, draw.seed = 7, draw.sample = &sample, draw.position = &position;
    draw.temperature = .7, draw.top_p = .9, draw.ids = &ids, draw.log_mu = &log_mu;
    check(opd_draw(&draw, NULL));

    /* what the filter kept: how many ids, then the ids */
    opd_kept_ids_call sets = {0};
    sets.struct_size = sizeof sets;
    sets.z = &z, sets.temperature = .7, sets.top_p = .9, sets.offsets = &offsets;
    check(opd_kept_ids(&sets, &total, NULL));
    kept.shape[0] = total, sets.ids = &kept;
    check(opd_kept_ids(&sets, NULL, NULL));

    /* the teacher's log q of the tokens; the student's log p on the kept sets */
    check(opd_token_logp(NULL, &y, 1, &ids, NULL, NULL, &log_q));
    check(opd_token_logp(NULL, &z, .7, &ids, &kept, &offsets, &log_p));

    /* M2PO over the batch */
    opd_teacher cache = {0};
    cache.struct_size = sizeof cache;
    cache.kind = OPD_SAMPLES, cache.ids = &ids, cache.log_mu = &log_mu, cache.log_q = &log_q;
    cache.kept_ids = &kept, cache.kept_offsets = &offsets;
    opd_tokens batch = {0};
    batch.struct_size = sizeof batch;
    batch.cache = &cache, batch.log_p = &log_p;
    opd_m2po m2po = {0};
    m2po.struct_size = sizeof m2po;
    check(opd_m2po_squares(&m2po, &batch, &square, &count));
    square.shape[0] = count;
    check(opd_m2po_freeze(&m2po, &square));
    check(opd_m2po_keep(&m2po, &batch, &keep, &dropped));

    for (int r = 0; r < N; ++r)
        printf("row %d: token %d of %d kept, log mu %.6f, log p %.6f, log q %.6f\n", r, (int)tokens[r],
               (int)(begin[r + 1] - begin[r]), (double)log_mus[r], log_ps[r], (double)log_qs[r]);
    printf("tokens dropped: %d\n", (int)dropped);
    /* at unchanged weights the ratio is 1, up to the rounding of log mu to float */
    for (int r = 0; r < N; ++r)
        if (log_ps[r] - (double)log_mus[r] > 1e-6 || log_ps[r] - (double)log_mus[r] < -1e-6) return 1;
    return dropped == 0 ? 0 : 1;
}
