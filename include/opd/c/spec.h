/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Speculative rollout: verification without loss, trees of drafts, drafters that need no model, tuners. opd/spec/ with
 * everything chosen at run time: rules, decisions and bits are those of the C++ calls, docs/spec/ holds for both.
 *
 *   opd_drafts drafts = {.struct_size = sizeof drafts, .tokens = &tokens};
 *   opd_verify_call call = {.struct_size = sizeof call, .drawn = "dense", .drafts = &drafts, .p = &p, .q = &q};
 *   opd_verdict verdict;
 *   if (opd_verify(&call, &verdict) != OPD_OK) puts(opd_last_error());
 *
 * Tokens are int32 or int64, and fit in 32 bits. Callbacks run under the lock of the handle that they are asked for:
 * they may call the library, but not with that handle. Everything lies in the host's memory.
 */
#ifndef OPD_C_SPEC_H
#define OPD_C_SPEC_H

#include "opd/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- verification (opd/spec/verify.hpp) --- */

/* Drafted tokens below a prefix; of a batch, those of all sequences, one after the other. Children of a node are in the
 * order in which they were drafted. Row 0 of a sequence's laws is the one after its prefix, row i + 1 that after its
 * node i: with S sequences, those of sequence s begin at row offsets[s] + s. */
typedef struct opd_drafts {
    size_t struct_size;
    const DLTensor* tokens;  /* (n); NULL: nothing was drafted */
    const DLTensor* parents; /* (n) int32 or int64: an earlier node of its sequence, or -1: the prefix; NULL: chains */
    const DLTensor* offsets; /* (S+1) int32 or int64: first node of each sequence, from 0 to n; NULL: one sequence */
} opd_drafts;

/* What is written: the tokens of the nodes on the way to `node`, then `next`. */
typedef struct opd_verdict {
    int64_t accepted; /* drafted tokens that are followed */
    int64_t node;     /* the last of them, of its sequence; -1: none */
    int32_t next;
    int32_t reserved; /* 0 */
} opd_verdict;

/* Where chance comes from, instead of keyed coins. */
typedef struct opd_coins {
    size_t struct_size;
    void* context;
    int (*accept)(void* context, double p);                           /* 1 with probability p, else 0 */
    int64_t (*draw)(void* context, const double* weights, int64_t n); /* i with probability weights[i] over their sum */
} opd_coins;

/* One tree of drafts, or with offsets in `drafts` a batch of S of them, and the laws that judge it. */
typedef struct opd_verify_call {
    size_t struct_size;
    /* How drafts were drawn, table "proposal": "one_hot", "dense", "iid_siblings", "without_replacement". No default:
     * who judges drafts as what they are not is biased, and nothing shows. */
    const char* drawn;
    int32_t block; /* 1: chains of "dense" judged as a whole (verify_block) */
    /* Of keyed coins; of a batch `samples` and `positions` instead */
    uint32_t position; /* that of the token after the prefix */
    uint64_t seed;
    uint64_t sample;
    const opd_drafts* drafts;
    const DLTensor* p;         /* (n + S, V) probabilities of the target: float, bfloat16, half or double */
    const DLTensor* q;         /* (n + S, V) of what a row's children were drawn from, likewise; NULL with "one_hot" */
    const DLTensor* samples;   /* (S) 32- or 64-bit integers */
    const DLTensor* positions; /* (S) likewise */
    const opd_coins* coins;    /* NULL: a function of seed, sample and position */
} opd_verify_call;

/* verdicts: (S). */
OPD_C_API int opd_verify(const opd_verify_call* call, opd_verdict* verdicts);

/* A row that the target draws from. */
typedef struct opd_due {
    int64_t sequence;
    int64_t row; /* of this sequence's laws */
} opd_due;

/* The target's own tokens decide: the text is that of plain decoding, whatever was drafted. One of `own` and `draw`. */
typedef struct opd_follow_call {
    size_t struct_size;
    const opd_drafts* drafts;
    const DLTensor* own; /* (n + S): the token that the target draws after each row; read where it matters */
    /* Writes the token that the target draws from each of n rows, ascending by sequence: one call a round, for all
     * sequences that go on. What it returns must be 0. */
    int (*draw)(void* context, const opd_due* due, int64_t n, int32_t* tokens);
    void* context;
} opd_follow_call;

/* verdicts: (S). */
OPD_C_API int opd_follow(const opd_follow_call* call, opd_verdict* verdicts);

/* --- trees of drafts (opd/spec/draft_tree.hpp) --- */

/* How often nodes of a kind (a cell) are followed: one a drafter. */
typedef struct opd_follow_rates opd_follow_rates;
typedef struct opd_follow_rates_options {
    size_t struct_size;
    double memory;       /* trials of a cell that count; 0: 200 */
    double prior_weight; /* trials that the prior is worth; 0: 4 */
} opd_follow_rates_options;
/* `options` may be NULL, here and wherever a handle is made. */
OPD_C_API int opd_follow_rates_create(const opd_follow_rates_options* options, opd_follow_rates** out);
OPD_C_API void opd_follow_rates_destroy(opd_follow_rates* rates);
/* Cells: of a child by score (depth from 1, rank from 0, gap to the best other), of a chain's token, of all children of
 * a rank. */
OPD_C_API int opd_follow_rates_by_rank(int32_t depth, int32_t rank, double gap, int32_t* cell);
OPD_C_API int opd_follow_rates_by_match(int32_t depth, int32_t matched, int32_t* cell);
OPD_C_API int opd_follow_rates_any_gap(int32_t depth, int32_t rank, int32_t* cell);
/* The estimated probability that such a node is followed, and the trials that count; either may be NULL. */
OPD_C_API int opd_follow_rates_of(opd_follow_rates* rates, int32_t cell, double* rate, double* tried);
OPD_C_API int opd_follow_rates_learn(opd_follow_rates* rates, int32_t cell, int followed);

/* How the target takes the token after the prefix. */
typedef struct opd_draft_law {
    size_t struct_size;
    int32_t greedy;    /* 1: the most probable token; filter and noise play no part, and must be 0 */
    uint32_t position; /* of the token after the prefix: the prefix's length */
    uint64_t seed;
    uint64_t sample;
    int64_t top_k;     /* 0: all */
    float temperature; /* 0: 1 */
    float top_p;       /* 0: 1 */
    float min_p;
    int32_t reserved; /* 0 */
} opd_draft_law;

/* A tree that grows: begin, grow and graft, select, and after verification learn. Nodes are numbered as they come, -1
 * is the prefix. */
typedef struct opd_draft_tree opd_draft_tree;
typedef struct opd_draft_node {
    int64_t parent;
    double reach; /* the probability that the node is followed */
    int32_t token;
    int32_t depth;
} opd_draft_node;
OPD_C_API int opd_draft_tree_create(opd_draft_tree** out);
OPD_C_API void opd_draft_tree_destroy(opd_draft_tree* tree);
/* An empty tree. It keeps `rates` alive until its next begin. */
OPD_C_API int opd_draft_tree_begin(opd_draft_tree* tree, opd_follow_rates* rates);
/* At most top_k children of `parent` from the drafter's logits after it, z (V): float, bfloat16, half or double.
 * `count`: how many; may be NULL, as all such counts may. `law` may be NULL. */
OPD_C_API int opd_draft_tree_grow(opd_draft_tree* tree, int64_t parent, const DLTensor* z, const opd_draft_law* law,
                                  int64_t top_k, int64_t* count);
/* A retrieved chain below the prefix, of which the last `matched` tokens were found. `added`: nodes that are new. */
OPD_C_API int opd_draft_tree_graft(opd_draft_tree* tree, const DLTensor* chain, int32_t matched, int64_t* added);
/* Nodes without tokens, as a drafter's tree of that shape usually is; begin anew before anything is drafted. */
OPD_C_API int opd_draft_tree_imagine(opd_draft_tree* tree, int32_t depth, int64_t top_k);
OPD_C_API int opd_draft_tree_size(opd_draft_tree* tree, int64_t* size);
OPD_C_API int opd_draft_tree_node(opd_draft_tree* tree, int64_t node, opd_draft_node* out);
/* The nodes of a depth by falling reach, at most `most`. */
OPD_C_API int opd_draft_tree_best_of_depth(opd_draft_tree* tree, int32_t depth, int64_t* nodes, int64_t most,
                                           int64_t* count);
/* Falling: reaches of all nodes, (size). */
OPD_C_API int opd_draft_tree_gains(opd_draft_tree* tree, double* gains, int64_t size);
/* The `verify` nodes of largest reach, in the order of their numbers: writes the first `count` of each tensor, (at
 * least min(verify, size)) int32 or int64: what opd_drafts takes, and the nodes' numbers. Any of the three may be NULL.
 * */
OPD_C_API int opd_draft_tree_select(opd_draft_tree* tree, int64_t verify, const DLTensor* tokens,
                                    const DLTensor* parents, const DLTensor* nodes, int64_t* count);
/* What became of the nodes that were selected last. */
OPD_C_API int opd_draft_tree_learn(opd_draft_tree* tree, opd_follow_rates* rates, const opd_verdict* verdict);

/* --- how many drafts each sequence gets (opd/spec/draft_budget.hpp) --- */

/* A point of a cost: straight lines between points, rows rising. */
typedef struct opd_cost_point {
    int64_t rows;
    double seconds;
} opd_cost_point;
OPD_C_API int opd_step_seconds(const opd_cost_point* points, int64_t count, int64_t rows, double* seconds);

/* What opd_draft_share() is asked: R sequences, what their drafts promise, what rows cost
 * (opd/spec/draft_budget.hpp). */
typedef struct opd_draft_budget {
    size_t struct_size;
    const DLTensor* gains;     /* (total) double: of each sequence's nodes, falling, in [0, 1]; NULL: none */
    const DLTensor* offsets;   /* (R+1) int32 or int64: first gain of each sequence, from 0 to total */
    const DLTensor* remaining; /* (R) double: tokens that a sequence is expected to write yet; NULL: 1 each */
    const opd_cost_point* cost; /* of the target, by rows */
    int64_t cost_count;
    int64_t most_rows;       /* of the target in a step, sequences and drafts; 0: no limit */
    double tail;             /* how much long sequences count for; 0: 1 */
    double draft_seconds;    /* what drafting costs a step where anything is drafted */
    double seconds_per_node; /* and for each node that is verified */
    int32_t all_alike;       /* 1: `tail` is 0, and must be */
    int32_t reserved;        /* 0 */
} opd_draft_budget;
/* shares: (R) int32 or int64, drafted tokens of each sequence. `value`: tokens, weighted, a second; may be NULL. */
OPD_C_API int opd_draft_budget_share(const opd_draft_budget* budget, const DLTensor* shares, double* value);

/* --- drafters without a model --- */

/* After which words which token came, in fixed memory (opd/spec/ngram_table.hpp). */
typedef struct opd_ngram_table opd_ngram_table;
typedef struct opd_ngram_options {
    size_t struct_size;
    uint64_t bytes;   /* never more; 0: 1 MiB */
    int32_t shortest; /* tokens of a key; 0: 2 */
    int32_t longest;  /* at most 16; 0: 5 */
} opd_ngram_options;
OPD_C_API int opd_ngram_table_create(const opd_ngram_options* options, opd_ngram_table** out);
OPD_C_API void opd_ngram_table_destroy(opd_ngram_table* table);
/* The tokens of a text (n) from number `first` on; first = n - 1: the last one, after those before. */
OPD_C_API int opd_ngram_table_learn(opd_ngram_table* table, const DLTensor* text, int64_t first);
/* What came after `before`: writes the first `count` of `out`, (most) int32 or int64. Keys have at least `least`
 * tokens, 0: 1. `matched`: tokens of the key of the first draft. */
OPD_C_API int opd_ngram_table_draft(opd_ngram_table* table, const DLTensor* before, int32_t least, const DLTensor* out,
                                    int64_t* count, int32_t* matched);
OPD_C_API int opd_ngram_table_clear(opd_ngram_table* table);
/* Keys that it has room for, bytes that it holds; either may be NULL. */
OPD_C_API int opd_ngram_table_capacity(opd_ngram_table* table, int64_t* keys, uint64_t* bytes);

/* Where a text's end occurred before: `length` tokens, which in text `text` end before `position`; length 0: nowhere.
 * */
typedef struct opd_match {
    int32_t length, text, position;
} opd_match;

/* Texts that grow token by token (opd/spec/suffix_automaton.hpp). */
typedef struct opd_suffix_automaton opd_suffix_automaton;
typedef struct opd_memory_options {
    size_t struct_size;
    int64_t most_tokens; /* what is beyond is not learnt; at most 2^29; 0: 2^20 of an automaton, 2^22 of groups */
} opd_memory_options;
OPD_C_API int opd_suffix_automaton_create(const opd_memory_options* options, opd_suffix_automaton** out);
OPD_C_API void opd_suffix_automaton_destroy(opd_suffix_automaton* automaton);
/* A new text, empty; its number from 0. */
OPD_C_API int opd_suffix_automaton_begin(opd_suffix_automaton* automaton, int32_t* text);
/* `learnt`: 0 where there was no room; may be NULL. */
OPD_C_API int opd_suffix_automaton_append(opd_suffix_automaton* automaton, int32_t text, const DLTensor* tokens,
                                          int32_t* learnt);
/* Nothing of this text is learnt any more. */
OPD_C_API int opd_suffix_automaton_end(opd_suffix_automaton* automaton, int32_t text);
OPD_C_API int opd_suffix_automaton_longest(opd_suffix_automaton* automaton, int32_t text, opd_match* match);
OPD_C_API int opd_suffix_automaton_draft(opd_suffix_automaton* automaton, int32_t text, int32_t least,
                                         const DLTensor* out, int64_t* count);
/* The first `count` texts; the number of every other is less by that. */
OPD_C_API int opd_suffix_automaton_forget(opd_suffix_automaton* automaton, int32_t count);
/* Any may be NULL. */
OPD_C_API int opd_suffix_automaton_holds(opd_suffix_automaton* automaton, int64_t* tokens, int32_t* texts,
                                         uint64_t* bytes);

/* An automaton a prompt, of this epoch's answers and the last one's (opd/spec/prompt_groups.hpp). */
typedef struct opd_prompt_groups opd_prompt_groups;
typedef struct opd_text_id {
    uint64_t prompt;
    int64_t number; /* -1: there was no room, nothing of it is learnt or drafted */
} opd_text_id;
OPD_C_API int opd_prompt_groups_create(const opd_memory_options* options, opd_prompt_groups** out);
OPD_C_API void opd_prompt_groups_destroy(opd_prompt_groups* groups);
/* An answer to a prompt, in this epoch; tokens: of the prompt and of the answer so far; NULL: none. */
OPD_C_API int opd_prompt_groups_begin(opd_prompt_groups* groups, uint64_t prompt, int64_t epoch, const DLTensor* tokens,
                                      opd_text_id* text);
OPD_C_API int opd_prompt_groups_append(opd_prompt_groups* groups, const opd_text_id* text, const DLTensor* tokens,
                                       int32_t* learnt);
/* Nothing more will be written to it. */
OPD_C_API int opd_prompt_groups_end(opd_prompt_groups* groups, const opd_text_id* text);
OPD_C_API int opd_prompt_groups_longest(opd_prompt_groups* groups, const opd_text_id* text, opd_match* match);
OPD_C_API int opd_prompt_groups_draft(opd_prompt_groups* groups, const opd_text_id* text, int32_t least,
                                      const DLTensor* out, int64_t* count);
/* Any may be NULL. */
OPD_C_API int opd_prompt_groups_holds(opd_prompt_groups* groups, int64_t* groups_now, int64_t* tokens, uint64_t* bytes);

/* --- tuners (opd/spec/any_tuner.hpp) --- */

/* How deep to draft, how many children a node has, how many drafted tokens to verify. All 0: no speculation. */
typedef struct opd_strategy {
    int32_t depth, top_k, verify; /* of an arm: 1 to 2^30 */
} opd_strategy;
typedef struct opd_table_line {
    int64_t batch; /* from this one on */
    opd_strategy strategy;
} opd_table_line;
typedef enum { OPD_PER_SEQUENCE = 0, OPD_TOKENS_PER_SECOND = 1 } opd_reward;

typedef struct opd_tuner opd_tuner;
/* A member that the named tuner does not have must be 0. */
typedef struct opd_tuner_options {
    size_t struct_size;
    const char* tuner;        /* table "tuner"; NULL: "beg_mab" */
    const opd_strategy* arms; /* (arm_count); NULL: TLT's eight. All but fixed_table */
    int64_t arm_count;
    const int64_t* thresholds; /* (threshold_count); NULL: 1, 2, 5, 21. beg_mab, published_beg_mab, ucb1 */
    int64_t threshold_count;
    double epsilon;             /* 0: 0.1. beg_mab, published_beg_mab */
    double bonus;               /* 0: 1. ucb1 */
    int32_t no_exploration;     /* 1: epsilon and bonus are 0, and must be. beg_mab, published_beg_mab, ucb1 */
    int32_t window;             /* steps of an arm that count, at most 2^24; 0: 300. beg_mab, published_beg_mab, ucb1 */
    int32_t tries;              /* steps of an arm before it is compared; 0: 1. beg_mab, published_beg_mab, ucb1 */
    int32_t reward;             /* opd_reward. beg_mab, ucb1 */
    int64_t most_tokens;        /* verify * batch; 0: no limit. beg_mab, ucb1, cost_profile */
    const opd_table_line* lines; /* (line_count). fixed_table */
    int64_t line_count;
    const opd_cost_point* target; /* (target_count) seconds of the target by rows; NULL: 1 + 0.01 rows. cost_profile */
    int64_t target_count;
    const opd_cost_point* drafter; /* (drafter_count) of a pass of the drafter; NULL: it costs nothing. cost_profile */
    int64_t drafter_count;
    double memory; /* steps that count; 0: 100. cost_profile */
    double doubt;  /* 0: 0.05. cost_profile */
} opd_tuner_options;
OPD_C_API int opd_tuner_create(const opd_tuner_options* options, opd_tuner** out);
OPD_C_API void opd_tuner_destroy(opd_tuner* tuner);

/* Numbers from (0, 1) of one step: a function of (seed, step) and of how many were asked for, the same on every rank.
 * One struct for a step's choose and heard. */
typedef struct opd_uniforms {
    size_t struct_size;
    uint64_t seed;
    uint64_t step;
    uint32_t asked; /* 0 at first; the library counts here; at most 65536 */
    int32_t reserved; /* 0 */
    double (*draw)(void* context); /* instead, a number of the caller's; NULL: keyed */
    void* context;
} opd_uniforms;
/* For a step of `batch` sequences, 1 to 2^31 - 1. `uniforms` may be NULL but for beg_mab and published_beg_mab. */
OPD_C_API int opd_tuner_choose(opd_tuner* tuner, int64_t batch, opd_uniforms* uniforms, opd_strategy* chosen);
/* What the step came to: drafted tokens that a sequence kept in the mean, seconds. `uniforms` may be NULL but for
 * published_beg_mab. */
OPD_C_API int opd_tuner_heard(opd_tuner* tuner, const opd_strategy* strategy, int64_t batch, double accepted,
                              double seconds, opd_uniforms* uniforms);
/* What cost_profile expects of a strategy; OPD_UNSUPPORTED of others. Any may be NULL. */
OPD_C_API int opd_tuner_predict(opd_tuner* tuner, const opd_strategy* strategy, int64_t batch,
                                double* tokens_per_second, double* accepted, double* seconds);

/* What one rank saw of a step. */
typedef struct opd_step_observation {
    int64_t batch;   /* sequences */
    double accepted; /* drafted tokens that a sequence kept in the mean */
    double seconds;
} opd_step_observation;
/* What all ranks saw: the largest batch, accepted a sequence, the time of the slowest. */
OPD_C_API int opd_step_merged(const opd_step_observation* ranks, int64_t count, opd_step_observation* merged);

/* Whether to speculate at all (elastic_switch). */
typedef struct opd_elastic_switch opd_elastic_switch;
typedef struct opd_elastic_options {
    size_t struct_size;
    int64_t on_at;  /* sequences that run; 0: 32 */
    int64_t off_at; /* 0: 40 */
    int32_t checks; /* in a row; 0: 10 */
    int32_t reserved; /* 0 */
} opd_elastic_options;
OPD_C_API int opd_elastic_switch_create(const opd_elastic_options* options, opd_elastic_switch** out);
OPD_C_API void opd_elastic_switch_destroy(opd_elastic_switch* elastic);
/* Once a step. */
OPD_C_API int opd_elastic_switch_check(opd_elastic_switch* elastic, int64_t running, int32_t* on);

/* Which drafter drafts (opd/spec/drafter_selector.hpp). Number 0 exists from the beginning. */
typedef struct opd_drafter_selector opd_drafter_selector;
typedef struct opd_drafter_selector_options {
    size_t struct_size;
    int64_t drafters; /* at most 2^20; 0: 2 */
    double memory;    /* steps that count; 0: 100 */
    int32_t tries;    /* 0: 3 */
    int32_t again;    /* of one nearly as good as the best; 0: 200 */
} opd_drafter_selector_options;
OPD_C_API int opd_drafter_selector_create(const opd_drafter_selector_options* options, opd_drafter_selector** out);
OPD_C_API void opd_drafter_selector_destroy(opd_drafter_selector* selector);
OPD_C_API int opd_drafter_selector_set_exists(opd_drafter_selector* selector, int64_t drafter, int now);
OPD_C_API int opd_drafter_selector_exists(opd_drafter_selector* selector, int64_t drafter, int32_t* now);
OPD_C_API int opd_drafter_selector_choose(opd_drafter_selector* selector, int64_t batch, int64_t* drafter);
OPD_C_API int opd_drafter_selector_heard(opd_drafter_selector* selector, int64_t drafter, int64_t batch,
                                         double accepted, double seconds);
/* Tokens a second that a sequence gets; 0: nothing is known. */
OPD_C_API int opd_drafter_selector_predicted(opd_drafter_selector* selector, int64_t drafter, int64_t batch,
                                             double* tokens_per_second);

/* --- snapshots --- */

/* State as bytes, for checkpoints. `length`: how many there are; `bytes` may be NULL, to ask for it. A restore wants a
 * handle that was made with the same options; bytes that are damaged or of another kind are refused, and leave it as it
 * was. */
OPD_C_API int opd_tuner_snapshot(opd_tuner* tuner, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_tuner_restore(opd_tuner* tuner, const void* bytes, size_t size);
OPD_C_API int opd_elastic_switch_snapshot(opd_elastic_switch* elastic, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_elastic_switch_restore(opd_elastic_switch* elastic, const void* bytes, size_t size);
OPD_C_API int opd_drafter_selector_snapshot(opd_drafter_selector* selector, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_drafter_selector_restore(opd_drafter_selector* selector, const void* bytes, size_t size);
OPD_C_API int opd_follow_rates_snapshot(opd_follow_rates* rates, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_follow_rates_restore(opd_follow_rates* rates, const void* bytes, size_t size);
OPD_C_API int opd_ngram_table_snapshot(opd_ngram_table* table, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_ngram_table_restore(opd_ngram_table* table, const void* bytes, size_t size);
OPD_C_API int opd_suffix_automaton_snapshot(opd_suffix_automaton* automaton, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_suffix_automaton_restore(opd_suffix_automaton* automaton, const void* bytes, size_t size);
OPD_C_API int opd_prompt_groups_snapshot(opd_prompt_groups* groups, void* bytes, size_t size, size_t* length);
OPD_C_API int opd_prompt_groups_restore(opd_prompt_groups* groups, const void* bytes, size_t size);

#ifdef __cplusplus
}
#endif
#endif
