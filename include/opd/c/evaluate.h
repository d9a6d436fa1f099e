/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Loss and gradient of any estimator over a batch of rows: opd::evaluate (opd/evaluate.hpp) with everything chosen at
 * run time.
 *
 *   opd_student student = {.struct_size = sizeof student, .z = &z, .dz = &dz};
 *   opd_teacher teacher = {.struct_size = sizeof teacher, .y = &y};
 *   opd_call call = {.struct_size = sizeof call, .student = &student, .teacher = &teacher};
 *   opd_result result = {.struct_size = sizeof result};
 *   if (opd_evaluate(&call, &result) != OPD_OK) puts(opd_last_error());
 *
 * Formulas, bits and checks are those of the C++ call: the pages under docs/estimators/ hold for both. Numbers are
 * float, bfloat16, half or double; docs/bindings/c.md has the table of combinations.
 */
#ifndef OPD_C_EVALUATE_H
#define OPD_C_EVALUATE_H

#include "opd/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where the student's logits come from (opd/student.hpp, opd/hidden.hpp). */
typedef enum {
    OPD_LOGITS = 0,     /* z (N,V), dz (N,V) */
    OPD_ON_SUPPORT = 1, /* z (N,V), dz (N,k): dz[r,j] belongs to the support's ids[r,j]. "renormalised" alone */
    OPD_HIDDEN = 2      /* z = x W^T + b: hidden states x (N,D) and head w (V,D); out dx, dw, db */
} opd_student_kind;

/* The student: what of it is read, and where its gradient goes. Tensors of another kind than `kind` are NULL. */
typedef struct opd_student {
    size_t struct_size;
    int32_t kind;         /* opd_student_kind */
    int32_t keep_padding; /* 1: what lies in dz's padding stays; 0: zeroed */
    const DLTensor* z;
    const DLTensor* dz; /* NULL: value only. May be z itself */
    int64_t padding;    /* columns after each of dz's rows that belong to it */
    double temperature; /* p = softmax(z/T); 0: 1 */
    /* OPD_HIDDEN; gradients are float */
    const DLTensor* x;
    const DLTensor* w;
    const DLTensor* bias;  /* (V) or NULL */
    const DLTensor* dx;    /* (N,D) or NULL */
    const DLTensor* dw;    /* (V,D) or NULL */
    const DLTensor* db;    /* (V) or NULL */
    double soft_cap;       /* z = cap tanh((x W^T + b)/cap); 0: none */
    double beta_head;      /* dw = beta_head dw + ..., db likewise */
    uint64_t budget_bytes; /* most memory for logits; 0: 256 MiB */
} opd_student;

/* What is known of the teacher at each row (opd/teacher.hpp). */
typedef enum {
    OPD_DENSE = 0,          /* y (N,V') */
    OPD_SUPPORT = 1,        /* ids, log_q (N,k); log_tail (N) */
    OPD_RAGGED_SUPPORT = 2, /* ids, log_q (total); offsets (N+1) */
    OPD_SAMPLES = 3,        /* ids, log_mu, log_q (N,m), drawn i.i.d. from mu */
    OPD_WEIGHTED = 4,       /* the same with entry weights, as opd_draw writes them */
    OPD_TEACHER_HIDDEN = 5  /* y = x W^T + b */
} opd_teacher_kind;

/* Who drew the tokens of a cache of samples. */
typedef enum { OPD_STALE = 0, OPD_ON_POLICY = 1, OPD_OF_TEACHER = 2 } opd_law;
/* Whose best ids a support holds. */
typedef enum { OPD_BY_TEACHER = 0, OPD_BY_STALE_STUDENT = 1, OPD_BY_STUDENT = 2 } opd_chosen_by;

/* The teacher's cache. Tensors of another kind than `kind` are NULL. */
typedef struct opd_teacher {
    size_t struct_size;
    int32_t kind; /* opd_teacher_kind */
    int32_t law;  /* opd_law */
    /* OPD_DENSE, OPD_TEACHER_HIDDEN */
    const DLTensor* y;
    double temperature; /* q = softmax(y/T); 0: 1 */
    const DLTensor* x;
    const DLTensor* w;
    const DLTensor* bias;
    double soft_cap;
    uint64_t budget_bytes;
    int32_t lumped;        /* 1: vocabularies of different size, what lies beyond the common ids is one bucket */
    int32_t chosen_by;     /* opd_chosen_by, for "reweighted" */
    int64_t common;        /* lumped: ids [0, common) are the same for both; 0: as many as the smaller has */
    /* ids: int32 or int64; log-probs: float, with z in double double */
    const DLTensor* ids;   /* -1: an unused slot, in supports and OPD_WEIGHTED */
    const DLTensor* log_q;
    const DLTensor* log_mu;
    const DLTensor* log_tail; /* (N) log of the teacher's mass outside the support; NULL: from log_q */
    const DLTensor* offsets;  /* (N+1) int32 or int64, OPD_RAGGED_SUPPORT */
    const DLTensor* weight;   /* (N,B) */
    const DLTensor* exact;    /* (N,B) uint8 or bool: the inclusion is certain; NULL: none is */
    const DLTensor* log_prox; /* (N,m) proximal policy; NULL: log_mu */
    const DLTensor* log_ref;  /* (N,m) reference policy; NULL: log_mu */
    const DLTensor* advantage; /* (N,m) or (N,1), from outside */
    const DLTensor* baseline;  /* (N), for the baseline "given" */
    const DLTensor* mu_entropy; /* (N) nats, for estr */
    const DLTensor* log_tail_mu; /* (N) double: log of mu's mass outside the exact entries */
    int32_t missing_mu;          /* 1: a log mu of NaN has the ratio 1, counted */
    int32_t raw_logprobs;        /* 1: log_mu is of the model's own logits, before temperature and filter; with log_norm */
    double drawn_temperature;    /* of the rollout; 0: 1 */
    int64_t drawn_top_k;         /* 0: all */
    double drawn_top_p;          /* 0: 1 */
    double drawn_min_p;
    const DLTensor* log_norm;     /* (N) log of the sum of mu^(1/T) over what the filter kept */
    const DLTensor* kept_ids;     /* (total) what the filter kept of each row; NULL: no kept sets */
    const DLTensor* kept_offsets; /* (N+1) */
    const DLTensor* log_kept_q;   /* (N) log of the teacher's mass on the set; NULL: log_q is over the vocabulary */
    int64_t widest; /* most ids of a row, of a ragged support or kept sets: on a device, which cannot find it; 0: V */
} opd_teacher;

/* Which loss, by name. All of 0 and NULL: reverse KL by the default estimator of the teacher's kind. */
typedef struct opd_estimator {
    size_t struct_size;
    /* Table "estimator". NULL: of OPD_DENSE "dense", of supports "renormalised", of drawn tokens "mc". */
    const char* estimator;
    const char* of; /* table "divergence", of "mc" table "objective"; NULL: "reverse_kl" */
    double a, b;    /* the parameters that the table names: no default */
    /* of "mc" */
    const char* surrogate; /* NULL: "unclipped_is" */
    double low, high;      /* of ratios 1 - low, 1 + high; both 0: 0.2 */
    double dual;           /* PPO's dual clip; 0: none */
    double cap;            /* of truncated ratios; 0: none */
    int32_t mask_over_cap; /* 1: tokens beyond the cap are left out, not truncated */
    int32_t self_normalised;
    double estr_tau, estr_epsilon; /* 0: no ESTR */
    const char* baseline;          /* NULL: "exact_entries" */
    int32_t accept_bias;           /* 1: an estimator that descends something else than its name says is accepted */
    int32_t reserved;              /* 0 */
    const char* selector;          /* NULL: "all" */
    double selector_a, selector_b; /* the parameters that the table names */
} opd_estimator;

/* How the losses of rows become one number (opd/batch.hpp). */
typedef enum {
    OPD_TOKEN_MEAN = 0,
    OPD_SUM = 1,
    OPD_SEQUENCE_MEAN = 2,
    OPD_SEQUENCE_SUM_MEAN = 3,
    OPD_CONSTANT = 4
} opd_reduction;
/* What becomes of a row whose loss is infinite: floored at `floor_at` nats, left out, or the call fails. */
typedef enum { OPD_FLOOR = 0, OPD_SKIP = 1, OPD_RAISE = 2 } opd_infinite;
/* What becomes of a row whose gradient its type cannot hold: left out, or cut to the largest number. */
typedef enum { OPD_SKIP_ROW = 0, OPD_SATURATE = 1 } opd_overflow;
/* What bits must not depend on; docs/concepts/determinism.md. */
typedef enum { OPD_RUN_TO_RUN = 0, OPD_NOT_GUARANTEED = 1, OPD_TILING_INVARIANT = 2 } opd_determinism;

/* All of it is optional. See opd/batch.hpp for the formulas. */
typedef struct opd_env {
    size_t struct_size;
    int32_t reduction;        /* opd_reduction */
    int32_t has_ignore;       /* 1: mask holds targets, and rows of `ignore` are left out */
    int64_t ignore;
    const DLTensor* mask;     /* (N) bool or integers, 0: left out; NULL: all rows count */
    const DLTensor* weights;  /* (N) float or double; NULL: 1 */
    const DLTensor* offsets;  /* (S+1) int32 or int64: first row of each sequence, from 0 to N */
    const DLTensor* versions; /* (N) int32: the version that drew the row */
    int32_t version;          /* the student's now */
    int32_t on_infinite;      /* opd_infinite */
    double floor_at;          /* nats; 0: -30 */
    double normaliser;        /* the count to divide by; 0: this batch's */
    double beta;              /* dz = beta dz + gradient */
    double beta_loss;         /* losses = beta_loss losses + loss */
    const DLTensor* losses;   /* out (N) float: w_r L_r */
    const DLTensor* lse;      /* out (N) double: the student's log-sum-exp at its temperature */
    const DLTensor* given_lse; /* (N) double: used instead of a pass */
    const DLTensor* frozen_keep; /* (N,m) uint8 or bool */
    const DLTensor* frozen_weight; /* (N,m) double */
    const DLTensor* frozen_sequence_log_ratio; /* (N) double */
    const DLTensor* frozen_advantage;          /* (N,m) double */
    int32_t raise_bad;        /* 1: OPD_BAD_CONTENTS where more than bad_share of the kept rows are bad; 0: they are
                                 counted alone, even if all are bad, so a wrapper's default had better be 1 and .01 */
    int32_t on_overflow;      /* opd_overflow */
    double bad_share;         /* in [0, 1); 0: none may be bad */
    double loss_clamp;        /* 0: none */
    int32_t check_contents;   /* 1: a pass of its own refuses bad contents before anything is written */
    int32_t determinism;      /* opd_determinism */
    int32_t drop_and_renormalise; /* 1: of vocabularies of different size the common ids count alone */
    int32_t measure_entropy;      /* 1: entropies and overlap in the diagnostics, for one more pass */
    const DLTensor* ratios;       /* (bins) int64: importance ratios are added to it, see opd/ratio_sketch.hpp */
    const DLTensor* totals; /* (OPD_TOTALS) out, int64 or double: the loss, a double, and opd_diagnostics, as they are */
} opd_env;

/* Counts and sums that merge over micro-batches and ranks: opd/diagnostics.hpp says what each is. */
#define OPD_STALENESS_BINS 33
typedef struct opd_diagnostics {
    int64_t rows, kept, bad_rows, first_bad_row, infinite_rows, first_infinite_row, clamped_rows, careful_rows;
    double kept_loss;
    int64_t tokens;
    double ratio_sum, ratio_square_sum, ratio_max, k1_sum, k2_sum, k3_sum, teacher_kl_sum;
    int64_t positive_advantage, negative_advantage, zero_advantage, clipped_positive, clipped_negative, truncated, masked;
    int64_t saturated, baseline_missing, outside_kept, dropped, certain_mu, missing_mu, variance_rows;
    double loss_variance_sum;
    int64_t support_rows;
    double student_mass_sum, teacher_mass_sum, student_mass_min, teacher_mass_min;
    int64_t tail_floored, student_entropy_rows, teacher_entropy_rows, overlap_rows;
    double student_entropy_sum, teacher_entropy_sum, overlap_sum;
    int64_t selector_rows, selector_left_out;
    double selector_weight_sum;
    int64_t staleness[OPD_STALENESS_BINS], staleness_max, future_versions;
} opd_diagnostics;

/* Numbers of 8 bytes in env.totals. */
#define OPD_TOTALS (1 + sizeof(opd_diagnostics) / 8)

/* What a call came to. */
typedef struct opd_result {
    size_t struct_size;
    double loss; /* reduced */
    opd_diagnostics diagnostics;
} opd_result;

/* One call of opd_evaluate: `student` and `teacher` are needed, the others have defaults. */
typedef struct opd_call {
    size_t struct_size;
    opd_engine* engine; /* NULL: one of one thread that the calling thread has */
    const opd_student* student;
    const opd_teacher* teacher;
    const opd_estimator* estimator; /* NULL: the default of the teacher's kind */
    const opd_env* env;             /* NULL: every row, weight 1, mean over rows */
} opd_call;

/* Loss and gradient. `result` may be NULL: on a device the call then only enqueues, and env.totals has what there is
 * once the stream gets there. With a result it waits for the stream. */
OPD_C_API int opd_evaluate(const opd_call* call, opd_result* result);
/* Bytes of arena that the same call needs. */
OPD_C_API int opd_workspace_bytes(const opd_call* call, uint64_t* bytes);

/* to = to merged with from: what a call over both batches would have counted. */
OPD_C_API int opd_diagnostics_merge(opd_diagnostics* to, const opd_diagnostics* from);
/* What was dropped, cut or mended, in one line; at most `size` bytes with the final 0. Returns the length of the whole
 * line. */
OPD_C_API size_t opd_diagnostics_text(const opd_diagnostics* diagnostics, char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
