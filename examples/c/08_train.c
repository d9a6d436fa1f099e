/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * On-policy distillation in one file of C99, in the manner of llm.c: model, forward, backward and Adam are written out
 * here, libopd draws the rollouts and computes loss and dz. The student predicts a token from the two before it: their
 * embeddings, one tanh layer, a head. The teacher is a wider network of the same kind with random weights; only its
 * logits are read. The backward is first checked against finite differences. There are few enough contexts to measure
 * the KL over all of them: it must fall by 90 %.
 *
 *   08_train [dense|samples] [seed]
 *
 *   dense    reverse KL of each visited row, from all logits of the teacher (default)
 *   samples  its estimate from the teacher's log-probs of 8 tokens a row, which the student draws
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opd/c/opd.h"

enum {
    V = 32,           /* tokens of the vocabulary */
    C = 2,            /* tokens of a context */
    CONTEXTS = V * V, /* V^C */
    E = 8,            /* numbers of an embedding */
    STUDENT = 40,     /* hidden units */
    TEACHER = 96,     /* hidden units */
    B = 16,           /* rollouts a step */
    T = 16,           /* tokens of a rollout */
    N = B * T,        /* rows of logits a step; row t B + b predicts token t of rollout b */
    M = 8,            /* tokens of each row that the loss from samples draws */
    STEPS = 300
};

static void fail(const char* why) {
    fprintf(stderr, "08_train: %s\n", why);
    exit(1);
}
static void check(int status) {
    if (status != OPD_OK) fail(opd_last_error());
}
static float* floats(size_t count) {
    float* p = calloc(count, sizeof *p);
    if (p == NULL) fail("out of memory");
    return p;
}

/* A contiguous matrix as a tensor; its shape lives as long as the block in which this stands. */
#define TENSOR(data, code, bits, rows, columns)                                                                        \
    { (data), {kDLCPU, 0}, 2, {(code), (bits), 1}, (int64_t[]){(rows), (columns)}, NULL, 0 }

/* --- the model -------------------------------------------------------------------------------------------------- */

enum { EMBEDDING, W1, B1, W2, B2, TENSORS };
static const char* const tensor_names[TENSORS] = {"embedding", "w1", "b1", "w2", "b2"};

/* All tensors lie in one block, so that Adam sees a vector. Gradients and Adam's moments have the same shape. */
typedef struct {
    int hidden;
    size_t size[TENSORS], count;
    float *tensor[TENSORS], *memory;
} model;

static model make_model(int hidden) {
    model m = {.hidden = hidden, .size = {V * E, (size_t)(C * E * hidden), (size_t)hidden, (size_t)(hidden * V), V}};
    for (int k = 0; k < TENSORS; ++k) m.count += m.size[k];
    float* p = m.memory = floats(m.count);
    for (int k = 0; k < TENSORS; ++k) m.tensor[k] = p, p += m.size[k];
    return m;
}

/* splitmix64: weights and prompts. What the student draws has libopd's keyed noise. */
static double random01(uint64_t* state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (double)((x ^ x >> 31) >> 11) / 9007199254740992.0;
}
static int below(uint64_t* state, int n) { return (int)(random01(state) * n); }
/* `head` is the standard deviation of a logit, roughly: how sharp the distributions are. */
static void randomise(model* m, float head, uint64_t* state) {
    const float bound[TENSORS] = {1.7f, 1.7f / sqrtf(C * E), 0, 1.7f * head / sqrtf((float)m->hidden), 0};
    for (int k = 0; k < TENSORS; ++k)
        for (size_t i = 0; i < m->size[k]; ++i) m->tensor[k][i] = bound[k] * (float)(2 * random01(state) - 1);
}

/* What the forward computes of each row, or the gradient of the same. */
typedef struct {
    float *x, *h, *z; /* (rows, C E) embeddings, (rows, hidden) after tanh, (rows, V) logits */
} activations;

static activations make_activations(size_t rows, int hidden) {
    activations a = {floats(rows * C * E), floats(rows * (size_t)hidden), floats(rows * V)};
    return a;
}
static void free_activations(activations a) { free(a.x), free(a.h), free(a.z); }

/* out (rows, O) = in (rows, I) w (I, O) + bias. `restrict` lets compilers vectorise the inner loops. */
static void linear_forward(float* restrict out, const float* in, const float* w, const float* bias, int rows, int I,
                           int O) {
    for (int r = 0; r < rows; ++r, in += I, out += O) {
        for (int o = 0; o < O; ++o) out[o] = bias[o];
        for (int i = 0; i < I; ++i)
            for (int o = 0; o < O; ++o) out[o] += in[i] * w[i * O + o];
    }
}
/* Writes din, adds to dw and dbias. */
static void linear_backward(float* restrict din, float* restrict dw, float* restrict dbias, const float* dout,
                            const float* in, const float* w, int rows, int I, int O) {
    for (int r = 0; r < rows; ++r, in += I, din += I, dout += O) {
        for (int o = 0; o < O; ++o) dbias[o] += dout[o];
        for (int i = 0; i < I; ++i) {
            float sum = 0;
            for (int o = 0; o < O; ++o) sum += dout[o] * w[i * O + o];
            din[i] = sum;
            for (int o = 0; o < O; ++o) dw[i * O + o] += in[i] * dout[o];
        }
    }
}

/* context (rows, C) */
static void forward(const model* m, const int32_t* context, int rows, activations a) {
    for (int i = 0; i < rows * C; ++i) memcpy(a.x + i * E, m->tensor[EMBEDDING] + context[i] * E, E * sizeof(float));
    linear_forward(a.h, a.x, m->tensor[W1], m->tensor[B1], rows, C * E, m->hidden);
    for (int i = 0; i < rows * m->hidden; ++i) a.h[i] = tanhf(a.h[i]);
    linear_forward(a.z, a.h, m->tensor[W2], m->tensor[B2], rows, m->hidden, V);
}
/* From d.z, which the loss wrote, to `gradient`, which is added to. */
static void backward(const model* m, const int32_t* context, int rows, activations a, activations d, model* gradient) {
    float** g = gradient->tensor;
    linear_backward(d.h, g[W2], g[B2], d.z, a.h, m->tensor[W2], rows, m->hidden, V);
    for (int i = 0; i < rows * m->hidden; ++i) d.h[i] *= 1 - a.h[i] * a.h[i];
    linear_backward(d.x, g[W1], g[B1], d.h, a.x, m->tensor[W1], rows, C * E, m->hidden);
    for (int i = 0; i < rows * C; ++i)
        for (int e = 0; e < E; ++e) g[EMBEDDING][context[i] * E + e] += d.x[i * E + e];
}

/* `mean`, `square`: running means of gradients and of their squares. `t`: steps, this one included. Leaves a gradient
 * of 0. */
static void adam(model* m, model* gradient, model* mean, model* square, int t, float rate) {
    const float beta1 = 0.9f, beta2 = 0.99f;
    const float unbias1 = 1 - powf(beta1, (float)t), unbias2 = 1 - powf(beta2, (float)t);
    for (size_t i = 0; i < m->count; ++i) {
        const float g = gradient->memory[i];
        const float m1 = mean->memory[i] = beta1 * mean->memory[i] + (1 - beta1) * g;
        const float m2 = square->memory[i] = beta2 * square->memory[i] + (1 - beta2) * g * g;
        m->memory[i] -= rate * (m1 / unbias1) / (sqrtf(m2 / unbias2) + 1e-8f);
        gradient->memory[i] = 0;
    }
}

/* --- rollouts and losses, by libopd ----------------------------------------------------------------------------- */

/* A step's rows. The noise of a row is a function of the seed and of these two. */
typedef struct {
    int32_t context[N * C];
    uint64_t sample[N];   /* number of the rollout in the whole run */
    uint32_t position[N]; /* of the token in its rollout */
} batch;

/* The student writes B texts after prompts of C random tokens. `a` keeps what the backward needs: the weights that drew
 * are those that learn, so there is no second forward. Returns the mean of -log mu, which estimates the entropy. */
static double roll_out(const model* student, activations a, batch* rows, uint64_t seed, int step, uint64_t* state) {
    int32_t text[B][C + T], token[B];
    float log_mus[B];
    double entropy = 0;
    for (int b = 0; b < B; ++b)
        for (int c = 0; c < C; ++c) text[b][c] = below(state, V);
    for (int t = 0; t < T; ++t) {
        const int r = t * B; /* the first row of this position */
        for (int b = 0; b < B; ++b) {
            memcpy(rows->context + (r + b) * C, text[b] + t, C * sizeof(int32_t));
            rows->sample[r + b] = (uint64_t)step * B + (uint64_t)b, rows->position[r + b] = (uint32_t)t;
        }
        const activations here = {a.x + r * C * E, a.h + r * student->hidden, a.z + r * V};
        forward(student, rows->context + r * C, B, here);
        const DLTensor z = TENSOR(here.z, kDLFloat, 32, B, V), ids = TENSOR(token, kDLInt, 32, B, 1),
                       log_mu = TENSOR(log_mus, kDLFloat, 32, B, 1),
                       sample = TENSOR(rows->sample + r, kDLUInt, 64, B, 1),
                       position = TENSOR(rows->position + r, kDLUInt, 32, B, 1);
        const opd_draw_call draw = {.struct_size = sizeof draw,
                                    .z = &z,
                                    .seed = seed,
                                    .sample = &sample,
                                    .position = &position,
                                    .ids = &ids,
                                    .log_mu = &log_mu};
        check(opd_draw(&draw, NULL));
        for (int b = 0; b < B; ++b) text[b][t + C] = token[b], entropy -= (double)log_mus[b] / N;
    }
    return entropy;
}

/* The mean loss of the rows; writes dz where the student has one. */
static double evaluate(const opd_student* student, const opd_teacher* teacher, const opd_estimator* estimator) {
    const opd_call call = {.struct_size = sizeof call, .student = student, .teacher = teacher, .estimator = estimator};
    opd_result result = {.struct_size = sizeof result};
    check(opd_evaluate(&call, &result));
    return result.loss;
}

/* Mean KL(student || teacher) of `count` rows; its gradient in dz unless that is NULL. */
static double dense_loss(float* student_logits, float* teacher_logits, float* gradient, int count) {
    const DLTensor z = TENSOR(student_logits, kDLFloat, 32, count, V),
                   y = TENSOR(teacher_logits, kDLFloat, 32, count, V), dz = TENSOR(gradient, kDLFloat, 32, count, V);
    const opd_student student = {.struct_size = sizeof student, .z = &z, .dz = gradient ? &dz : NULL};
    const opd_teacher teacher = {.struct_size = sizeof teacher, .kind = OPD_DENSE, .y = &y};
    const opd_estimator estimator = {.struct_size = sizeof estimator, .estimator = "dense", .of = "reverse_kl"};
    return evaluate(&student, &teacher, &estimator);
}

/* The same from M draws a row, for which the teacher is asked for log-probs alone: what a server of teachers gives. */
static double samples_loss(float* student_logits, float* teacher_logits, float* gradient, batch* rows, uint64_t seed) {
    static int32_t drawn[N * M];
    static float log_mus[N * M], log_qs[N * M];
    const DLTensor z = TENSOR(student_logits, kDLFloat, 32, N, V), y = TENSOR(teacher_logits, kDLFloat, 32, N, V),
                   dz = TENSOR(gradient, kDLFloat, 32, N, V), ids = TENSOR(drawn, kDLInt, 32, N, M),
                   log_mu = TENSOR(log_mus, kDLFloat, 32, N, M), log_q = TENSOR(log_qs, kDLFloat, 32, N, M),
                   sample = TENSOR(rows->sample, kDLUInt, 64, N, 1),
                   position = TENSOR(rows->position, kDLUInt, 32, N, 1);
    const opd_draw_call draw = {.struct_size = sizeof draw,
                                .z = &z,
                                .design = "iid",
                                .m = M,
                                .seed = seed,
                                .sample = &sample,
                                .position = &position,
                                .ids = &ids,
                                .log_mu = &log_mu};
    check(opd_draw(&draw, NULL));
    check(opd_token_logp(NULL, &y, 1, &ids, NULL, NULL, &log_q)); /* the teacher's part */

    const opd_student student = {.struct_size = sizeof student, .z = &z, .dz = &dz};
    const opd_teacher teacher = {.struct_size = sizeof teacher,
                                 .kind = OPD_SAMPLES,
                                 .law = OPD_ON_POLICY,
                                 .ids = &ids,
                                 .log_mu = &log_mu,
                                 .log_q = &log_q};
    const opd_estimator estimator = {
        .struct_size = sizeof estimator, .estimator = "mc", .of = "reverse_kl", .baseline = "leave_one_out"};
    return evaluate(&student, &teacher, &estimator);
}

/* --- the run ---------------------------------------------------------------------------------------------------- */

/* The backward against central differences of the dense loss over all contexts: of each tensor in three random
 * directions, in which every parameter moves. (The loss from samples is no function whose differences are its gradient;
 * its dz takes the same backward.) */
static void check_backward(model* m, const int32_t* all, float* y, uint64_t* state) {
    enum { DIRECTIONS = 3 };
    const float length = 0.01f; /* of a parameter's move */
    activations a = make_activations(CONTEXTS, m->hidden), d = make_activations(CONTEXTS, m->hidden);
    model gradient = make_model(m->hidden), direction = make_model(m->hidden), weights = make_model(m->hidden);
    memcpy(weights.memory, m->memory, m->count * sizeof(float));
    forward(m, all, CONTEXTS, a);
    dense_loss(a.z, y, d.z, CONTEXTS);
    backward(m, all, CONTEXTS, a, d, &gradient);
    double worst = 0;
    for (int k = 0; k < TENSORS * DIRECTIONS; ++k) {
        const int tensor = k / DIRECTIONS;
        const float *g = gradient.tensor[tensor], *was = weights.tensor[tensor];
        float *s = direction.tensor[tensor], *p = m->tensor[tensor];
        double slope = 0, square = 0, loss[2];
        for (size_t i = 0; i < m->size[tensor]; ++i) {
            s[i] = below(state, 2) ? length : -length;
            slope += (double)(g[i] * s[i]), square += (double)(g[i] * g[i]);
        }
        for (int side = 0; side < 2; ++side) {
            for (size_t i = 0; i < m->size[tensor]; ++i) p[i] = side ? was[i] + s[i] : was[i] - s[i];
            forward(m, all, CONTEXTS, a);
            loss[side] = dense_loss(a.z, y, NULL, CONTEXTS);
        }
        memcpy(p, was, m->size[tensor] * sizeof(float));
        const double difference = (loss[1] - loss[0]) / 2;
        const double error = fabs(difference - slope) / (sqrt(square) * (double)length); /* of a typical slope */
        if (!(error < 0.01)) {                                                           /* NaN, too */
            fprintf(stderr, "%s: slope %g, finite difference %g\n", tensor_names[tensor], slope, difference);
            fail("the backward is wrong");
        }
        if (error > worst) worst = error;
    }
    printf("backward: finite differences agree within %.1g\n", worst);
    free_activations(a), free_activations(d);
    free(gradient.memory), free(direction.memory), free(weights.memory);
}

int main(int argc, char** argv) {
    const char* loss_name = argc > 1 ? argv[1] : "dense";
    const int from_samples = strcmp(loss_name, "samples") == 0;
    char* end = "";
    const uint64_t seed = argc > 2 ? strtoull(argv[2], &end, 10) : 7;
    if (argc > 3 || *end != 0 || (argc > 2 && end == argv[2]) || (!from_samples && strcmp(loss_name, "dense") != 0))
        fail("usage: 08_train [dense|samples] [seed]");

    uint64_t state = seed;
    model teacher = make_model(TEACHER), student = make_model(STUDENT), gradient = make_model(STUDENT),
          mean = make_model(STUDENT), square = make_model(STUDENT);
    randomise(&teacher, 3, &state);
    randomise(&student, 0.1f, &state);

    /* every context there is, for the evaluation */
    static int32_t all[CONTEXTS * C];
    for (int i = 0; i < CONTEXTS; ++i) all[i * C] = i / V, all[i * C + 1] = i % V;
    activations teacher_all = make_activations(CONTEXTS, TEACHER), student_all = make_activations(CONTEXTS, STUDENT);
    forward(&teacher, all, CONTEXTS, teacher_all);
    check_backward(&student, all, teacher_all.z, &state);
    forward(&student, all, CONTEXTS, student_all);
    const double before = dense_loss(student_all.z, teacher_all.z, NULL, CONTEXTS);

    static batch rows;
    activations a = make_activations(N, STUDENT), d = make_activations(N, STUDENT), y = make_activations(N, TEACHER);
    for (int step = 0; step < STEPS; ++step) {
        const double entropy = roll_out(&student, a, &rows, seed, step, &state);
        forward(&teacher, rows.context, N, y); /* of what the student visited */
        const double loss = from_samples ? samples_loss(a.z, y.z, d.z, &rows, seed) : dense_loss(a.z, y.z, d.z, N);
        backward(&student, rows.context, N, a, d, &gradient);
        adam(&student, &gradient, &mean, &square, step + 1, 0.04f * (1 - (float)step / STEPS));
        if (step % 50 == 0 || step == STEPS - 1) printf("step %3d  loss %.4f  entropy %.3f\n", step, loss, entropy);
    }

    forward(&student, all, CONTEXTS, student_all);
    const double after = dense_loss(student_all.z, teacher_all.z, NULL, CONTEXTS);
    printf("%s: mean KL(student || teacher) over all %d contexts: %.4f before, %.4f after\n", loss_name, CONTEXTS,
           before, after);

    free_activations(a), free_activations(d), free_activations(y);
    free_activations(teacher_all), free_activations(student_all);
    free(teacher.memory), free(student.memory), free(gradient.memory), free(mean.memory), free(square.memory);
    if (!(after <= 0.1 * before)) fail("the KL has not fallen by 90 %");
    return 0;
}
