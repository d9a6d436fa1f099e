/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Rows without a loss: drawing (opd/draw.hpp), kept sets, scoring (opd/score.hpp), penalties (opd/penalties.hpp); and
 * passes over a whole batch: M2PO, GSPO, whitening, credit, groups, weights of drafts, overlaps of ids.
 *
 *   opd_draw_call draw = {.struct_size = sizeof draw, .z = &z, .seed = 7, .sample = &sample, .position = &position,
 *                         .temperature = .7, .top_p = .95, .ids = &ids, .log_mu = &log_mu};
 *   if (opd_draw(&draw, NULL) != OPD_OK) puts(opd_last_error());
 *
 * Logits are float, bfloat16, half or double; ids int32 or int64; log-probs and weights float or double. Each tensor
 * has its own type: numbers are computed as in the C++ call, and rounded once where they are written.
 * docs/bindings/c-rows.md.
 */
#ifndef OPD_C_ROWS_H
#define OPD_C_ROWS_H

#include "opd/c/base.h"
#include "opd/c/evaluate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where rows of `mask` are left out, nothing of theirs is written. Bad rows (NaN, +inf, no mass) are counted in
 * result.diagnostics. */
typedef struct opd_draw_call {
    size_t struct_size;
    opd_engine* engine; /* NULL: one of one thread that the calling thread has */
    const DLTensor* z;  /* (N,V) */
    /* "greedy", "gumbel", "iid", "threshold", "head_tail", "gumbel_top": opd/draw.hpp. NULL: "gumbel" */
    const char* design;
    int64_t m;     /* draws; of head_tail beside its head; of threshold the budget. 0: what the columns of ids leave */
    int64_t h;     /* head_tail: ids taken for certain */
    int64_t first; /* iid: number of the first draw */
    /* The noise of a row is a function of these three. Not for greedy */
    uint64_t seed;
    const DLTensor* sample;   /* (N) uint64 or int64: unique in a run, never a batch slot */
    const DLTensor* position; /* (N) uint32 or int32 */
    const DLTensor* uniforms; /* (N,·) double in (0, 1), instead of sample and position */
    const DLTensor* mask;     /* (N) bool or integers, 0: left out; NULL: all rows */
    int32_t has_ignore;       /* 1: mask holds targets, and rows of `ignore` are left out */
    int32_t reserved;         /* 0 */
    int64_t ignore;
    /* What may be drawn: docs/concepts/filters.md */
    double temperature; /* 0: 1 */
    int64_t top_k;      /* 0: all */
    double top_p;       /* 0: 1, all */
    double min_p;
    /* Out. (N,columns): 1 of greedy and gumbel, m of iid, threshold and gumbel_top, h + m of head_tail */
    const DLTensor* ids;       /* int32 or int64; -1: an unused slot */
    const DLTensor* log_mu;    /* float or double */
    const DLTensor* weight;    /* float or double, or NULL */
    const DLTensor* exact;     /* uint8 or bool, or NULL: the id was taken for certain */
    const DLTensor* lse;       /* (N) double, or NULL: log-sum-exp of z/T over all ids */
    const DLTensor* log_kept;  /* (N) double, or NULL: log of the mass that the filter keeps */
    const DLTensor* cut_logit; /* (N) double, or NULL, and with it cut_id: the last id kept, for opd_kept_ids */
    const DLTensor* cut_id;    /* (N) int64 */
    const DLTensor* kept;      /* (N) int64, or NULL: how many ids are kept; 0 of bad rows */
    const DLTensor* log_tail;  /* (N) double, or NULL: of threshold and head_tail, the mass outside the certain ids */
    const DLTensor* kappa;     /* (N) double, or NULL: of gumbel_top */
} opd_draw_call;

/* `result` may be NULL. */
OPD_C_API int opd_draw(const opd_draw_call* draw, opd_result* result);
/* Bytes of arena that the same call needs. */
OPD_C_API int opd_draw_workspace_bytes(const opd_draw_call* draw, uint64_t* bytes);

/* The ids that a filter keeps of each row, ascending, row after row. In two calls: without `ids` it writes `offsets`,
 * and how many ids there are; with `ids` it reads `offsets`. */
typedef struct opd_kept_ids_call {
    size_t struct_size;
    opd_engine* engine;
    const DLTensor* z;    /* (N,V) */
    const DLTensor* mask; /* (N); rows left out keep nothing */
    int32_t has_ignore;
    int32_t reserved; /* 0 */
    int64_t ignore;
    /* What opd_draw wrote. Without cut_logit the filter below is run anew, by either call */
    const DLTensor* cut_logit; /* (N) double */
    const DLTensor* cut_id;    /* (N) int64 */
    const DLTensor* kept;      /* (N) int64; read by the first call */
    double temperature;        /* 0: 1 */
    int64_t top_k;             /* 0: all */
    double top_p;              /* 0: 1 */
    double min_p;
    const DLTensor* offsets; /* (N+1) int32 or int64: out of the first call, in of the second */
    const DLTensor* ids;     /* (total) int32 or int64, out; -1 in rows whose logits are not those of their cut */
} opd_kept_ids_call;

/* `total` may be NULL where ids are given; `result` may be NULL. */
OPD_C_API int opd_kept_ids(const opd_kept_ids_call* kept, int64_t* total, opd_result* result);
OPD_C_API int opd_kept_ids_workspace_bytes(const opd_kept_ids_call* kept, uint64_t* bytes);

/* What is not asked for stays NULL. */
typedef struct opd_score_call {
    size_t struct_size;
    opd_engine* engine;
    const DLTensor* z;  /* (N,V) */
    double temperature; /* p = softmax(z/T); 0: 1 */
    const DLTensor* mask;
    int32_t has_ignore;
    int32_t reserved; /* 0 */
    int64_t ignore;
    const DLTensor* ids;     /* (N,m) int32 or int64; with offsets (total). -1: an unused slot, whose log_p is -inf */
    const DLTensor* offsets; /* (N+1) int32 or int64: lists that differ in length */
    /* Tokens drawn under a filter: p is renormalised on what it kept. With these ids, log_p, lse alone; a token outside
     * its set: NaN */
    const DLTensor* kept_ids;     /* (kept) int32 or int64, ascending in a row */
    const DLTensor* kept_offsets; /* (N+1) */
    /* Out: log-probs float or double */
    const DLTensor* log_p;        /* as ids */
    const DLTensor* log_tail;     /* (N) log of the mass outside a row's ids */
    const DLTensor* top_ids;      /* (N,k) int32 or int64: the most probable ids, best first; -1: no more have mass */
    const DLTensor* top_log_p;    /* (N,k) */
    const DLTensor* top_log_tail; /* (N) */
    const DLTensor* lse;          /* (N) double */
    const DLTensor* entropy;      /* (N) double, nats */
} opd_score_call;

/* All that `score` asks for; `result`, which may be NULL, counts bad rows. */
OPD_C_API int opd_score(const opd_score_call* score, opd_result* result);
OPD_C_API int opd_score_workspace_bytes(const opd_score_call* score, uint64_t* bytes);

/* opd_score with one part of it. `engine` and the kept sets may be NULL; temperature 0: 1. */
OPD_C_API int opd_token_logp(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* ids,
                             const DLTensor* kept_ids, const DLTensor* kept_offsets, const DLTensor* log_p);
OPD_C_API int opd_top_k(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* top_ids,
                        const DLTensor* top_log_p);
OPD_C_API int opd_log_sum_exp(opd_engine* engine, const DLTensor* z, double temperature, const DLTensor* lse);

/* Repetition, frequency and presence penalties of what each row's text has already, before a draw; and the gradient
 * back through them. */
typedef struct opd_penalise_call {
    size_t struct_size;
    const DLTensor* z; /* (N,V) */
    const DLTensor* mask;
    int32_t has_ignore;
    int32_t reserved; /* 0 */
    int64_t ignore;
    const DLTensor* prompt_ids;     /* (total) int32 or int64, or NULL */
    const DLTensor* prompt_offsets; /* (N+1) int32 or int64 */
    const DLTensor* answer_ids;     /* likewise: what was answered before the row's token */
    const DLTensor* answer_offsets;
    double repetition; /* 0: 1, none */
    double presence;
    double frequency;
    const DLTensor* out; /* (N,V) of z's type or float: penalised rows. May be z itself. NULL: dz alone */
    const DLTensor* dz;  /* (N,V) of z's type or float, in place: from the gradient of penalised rows to that of z */
} opd_penalise_call;
OPD_C_API int opd_penalise(const opd_penalise_call* penalise);

/* --- passes over a batch: docs/concepts/frozen.md ------------------------------------------------------------- */

/* The drawn tokens of a micro-batch and what each is worth. */
typedef struct opd_tokens {
    size_t struct_size;
    const opd_teacher* cache; /* of OPD_SAMPLES or OPD_WEIGHTED: what opd_evaluate will be given */
    const DLTensor* log_p;    /* (N,m) double: opd_token_logp of the cache, on its kept sets where it has some */
    const DLTensor* mask;     /* (N) */
    int32_t has_ignore;
    int32_t reserved; /* 0 */
    int64_t ignore;
    const char* of; /* what tokens are worth: table "objective", as the estimator's; NULL: "reverse_kl" */
    double a, b;    /* the parameters that the table names: no default */
} opd_tokens;

/* advantage (N,m) double, out: of each token; 0 where there is none. */
OPD_C_API int opd_advantages(const opd_tokens* tokens, const DLTensor* advantage);

/* M2PO: add each micro-batch's squares to one line, join the lines of all ranks, freeze, keep. `form`: "drop", "clip",
 * "all"; NULL: "drop". */
typedef struct opd_m2po {
    size_t struct_size;
    const char* form;
    double tau; /* bound of the second moment; 0: 0.04 */
    /* Out, of opd_m2po_freeze; in, of opd_m2po_keep */
    double level;         /* square of the log-ratio from which tokens go, or at which to clip; infinity: none */
    double second_moment; /* mean of it over what is left */
    double low, high;     /* "clip": of the surrogate ppo_clip */
} opd_m2po;
/* squares (room) double, out: those of the micro-batch's eligible tokens, at most N m; *count: how many. */
OPD_C_API int opd_m2po_squares(const opd_m2po* m2po, const opd_tokens* tokens, const DLTensor* squares, int64_t* count);
/* squares (total) double: of all micro-batches and ranks, in any order. */
OPD_C_API int opd_m2po_freeze(opd_m2po* m2po, const DLTensor* squares);
/* keep (N,m) uint8 or bool, out: env.frozen_keep; *dropped, which may be NULL: how many tokens are. */
OPD_C_API int opd_m2po_keep(const opd_m2po* m2po, const opd_tokens* tokens, const DLTensor* keep, int64_t* dropped);

/* GSPO. sums (S,3) double: of each sequence Σ log-ratio, Σ advantage, tokens. Begin with 0, add every micro-batch;
 * those of ranks add up. sequence (N) int64: each row's, in [0, S). */
OPD_C_API int opd_gspo_add(const opd_tokens* tokens, const DLTensor* sequence, const DLTensor* sums);
/* log_ratio (N) double, out: env.frozen_sequence_log_ratio. advantage (N,m) double, out: env.frozen_advantage; NULL:
 * the token form. */
OPD_C_API int opd_gspo_fill(const DLTensor* sums, const DLTensor* sequence, const DLTensor* log_ratio,
                            const DLTensor* advantage);

/* A_t = Σ_l (γλ)^l A_{t+l} within each sequence, in place: advantage (N,m) double, offsets (S+1), mask (N) or NULL. */
OPD_C_API int opd_credit(const DLTensor* advantage, const DLTensor* offsets, double gamma_lambda, const DLTensor* mask);
/* GRPO, in place: reward (S) double, `group` answers to a prompt one after the other. epsilon 0: the mean alone is
 * taken off. */
OPD_C_API int opd_group_relative(const DLTensor* reward, int64_t group, double epsilon);

/* (A - mean) / (std + epsilon) over the whole batch: begin with counts of 0, add, merge those of ranks, apply. */
typedef struct opd_whitening {
    size_t struct_size;
    double epsilon; /* 0: 1e-8 */
    double count, mean, squares;
} opd_whitening;
/* advantage (N,m) float or double, mask (N) or NULL. */
OPD_C_API int opd_whitening_add(opd_whitening* whitening, const DLTensor* advantage, const DLTensor* mask);
OPD_C_API int opd_whitening_merge(opd_whitening* whitening, const opd_whitening* from);
/* out (N,m) float or double; may be `advantage` itself. */
OPD_C_API int opd_whitening_apply(const opd_whitening* whitening, const DLTensor* advantage, const DLTensor* out);

/* How far visited prefixes are from the student's own: begin with 0, add, merge. */
typedef struct opd_prefix_staleness {
    size_t struct_size;
    double rows, sum, least, most, ratios, squares; /* opd/estimators/sequences.hpp */
    double log_ratio;                               /* out: mean log-ratio of a prefix */
    double effective_share;                         /* out: effective sample size over rows */
} opd_prefix_staleness;
/* log_p, log_mu (N) float or double, one drawn token a row; offsets (S+1); mask (N) or NULL. */
OPD_C_API int opd_prefix_staleness_add(opd_prefix_staleness* staleness, const DLTensor* log_p, const DLTensor* log_mu,
                                       const DLTensor* offsets, const DLTensor* mask);
OPD_C_API int opd_prefix_staleness_merge(opd_prefix_staleness* staleness, const opd_prefix_staleness* from);

/* Weights of a draft's rows by their place in it (opd/estimators/draft_weights.hpp). `by`: "decaying" (parameter:
 * gamma) or "accepted_length" (smoothing; reads losses (N) float). offsets (D+1); weights (N) float, out. */
OPD_C_API int opd_draft_weights(const char* by, double parameter, const DLTensor* offsets, const DLTensor* losses,
                                const DLTensor* weights);

/* counts (OPD_RATIO_BINS) int64, as env.ratios has them: the ratio below which a share q of the tokens lies. */
#define OPD_RATIO_BINS 225
OPD_C_API int opd_ratio_quantile(const DLTensor* counts, double q, double* ratio);

/* What share of a support's ids another list has. */
typedef struct opd_overlap {
    size_t struct_size;
    int64_t rows, bad_rows, first_bad_row;
    double sum, mean; /* of the shares */
} opd_overlap;
/* ids (N,k), or (total) with offsets (N+1); others likewise. share (N) double, out, or NULL; mask (N) or NULL; overlap
 * may be NULL. */
OPD_C_API int opd_id_overlap(const DLTensor* ids, const DLTensor* offsets, const DLTensor* others,
                             const DLTensor* others_offsets, const DLTensor* share, const DLTensor* mask,
                             opd_overlap* overlap);
/* In place: of an id that stands twice in a row all but the first become -1. ids (N,k), or (total) with offsets;
 * *dropped may be NULL. */
OPD_C_API int opd_drop_repeats(const DLTensor* ids, const DLTensor* offsets, int64_t* dropped);

#ifdef __cplusplus
}
#endif
#endif
