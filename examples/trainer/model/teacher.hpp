// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From trajectories to a batch of rows, and from the teacher to what the cache holds of it at every row.
//
// A row is one input position of a trajectory; row r of a trajectory predicts its token r + 1. Rows before the last
// prompt token predict the prompt and are masked out.
//
// What the teacher says of a sequence does not depend on what it is scored with: a batch can be scored in any parts, in
// any order, and `join` of the parts has the bits of scoring it at once.
//
// A teacher whose whole row is wanted is kept as its V logits a row (dense) or as the D numbers that its head makes
// them of (hidden): the learner has that head, makes the logits for a block of rows at a time, and no row of V is kept
// or sent.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/hidden.hpp"
#include "task/trajectory.hpp"

namespace trainer {

/// env.on_bad of every loss that a model learns from or is judged by: a model that has gone to NaN stops the run, and
/// does not train on with a gradient of 0.
inline constexpr opd::bad most_bad = opd::bad::raise_above(0.01);

/// Trajectories as rows: what teacher and learner both read.
struct row_batch {
    std::vector<std::vector<token>> inputs; ///< per sequence
    std::vector<std::int64_t> offsets;      ///< (sequences + 1) first rows
    index_t rows = 0;                       ///< N
    index_t kept = 0;                       ///< response positions
    std::vector<std::uint8_t> mask;         ///< (N)
    std::vector<token> next;                ///< (N) the token that follows
    std::vector<float> log_mu;              ///< (N) of it; 0 where masked
    std::vector<std::int32_t> versions;     ///< (N) of the policy that drew it
    int entries = 0;                        ///< B, m or k recorded a position; 0: none
    std::int32_t normaliser = 0;            ///< of a part of an update: the whole's kept; 0: all are here
    std::vector<std::int32_t> ids;          ///< (N, entries)
    std::vector<float> entry_log_mu;        ///< (N, entries)
    std::vector<float> entry_log_prox;      ///< (N, entries) of the proximal policy, where an estimator reads it
    std::vector<float> entry_weight;        ///< (N, entries)
    std::vector<std::uint8_t> entry_exact;  ///< (N, entries)
    std::vector<std::int64_t>
        kept_offsets;                   ///< (N+1) of a rollout that filters: where a row's kept ids begin; else empty
    std::vector<std::int32_t> kept_ids; ///< (their sum)
    std::vector<token> top;             ///< (N) rollout's most probable id, where it was recorded; else empty
    // the learner's own at the weights that its step began with, for the figures of mismatch; empty: none are asked for
    std::vector<float> log_old; ///< (N) log p of the token that follows; 0 where masked
    std::vector<token> old_top; ///< (N) the most probable id, where `top` is
};

row_batch pack(std::span<const trajectory> trajectories, int entries);
row_batch pack(std::span<const trajectory* const> trajectories, int entries);

/// What is kept of the teacher at the rows of a batch.
struct teacher_cache {
    enum class kind { dense, support, samples, weighted, hidden } what = kind::dense;
    friend constexpr kind last_of(kind) { return kind::hidden; }
    std::vector<float> logits;     ///< (N,V) dense
    std::vector<float> states;     ///< (N,D) hidden: what the teacher's head reads; (N,r) in the numbers of a codec
    int entries = 0;               ///< the others; hidden: D or r
    std::vector<std::int32_t> ids; ///< (N, entries)
    std::vector<float> log_q;      ///< (N, entries)
    std::vector<float> log_tail;   ///< (N) support: log of the teacher's mass outside it
    std::vector<float> next_log_q; ///< (N) of the token that follows; 0 where masked

    index_t rows() const { return static_cast<index_t>(next_log_q.size()); }
    /// Of all columns: what is sent to the learner, and kept until it is learnt from.
    std::size_t bytes() const {
        return sizeof(float) * (logits.size() + states.size() + log_q.size() + log_tail.size() + next_log_q.size()) +
               sizeof(std::int32_t) * ids.size();
    }
    template <class A>
    void fields(A& a) {
        a(what, logits, entries, ids, log_q, log_tail, next_log_q);
        if (what == kind::hidden) a(states);
    }
};
const char* name_of(teacher_cache::kind k);

/// What is kept of the teacher at the rows of one sequence.
struct scored_sequence {
    std::uint64_t sample = 0;
    teacher_cache cache; ///< (N) its rows
    template <class A>
    void fields(A& a) {
        a(sample, cache);
    }
};

/// Counts what teachers have scored and no learner has learnt from yet. For all threads.
class cache_meter {
public:
    /// The sequence, counted as long as anybody has it.
    static std::shared_ptr<const scored_sequence> counted(const std::shared_ptr<cache_meter>& meter, scored_sequence s);

    std::int64_t rows() const { return rows_; }           ///< scored so far
    std::int64_t bytes() const { return bytes_; }         ///< of these
    std::int64_t in_flight() const { return now_; }       ///< bytes
    std::int64_t most_in_flight() const { return most_; } ///< bytes

private:
    std::atomic<std::int64_t> rows_{0}, bytes_{0}, now_{0}, most_{0};
};

/// The cache of a batch whose sequences are these, in this order: pack the trajectories in the same one.
void join(std::span<const scored_sequence* const> sequences, teacher_cache& cache);

/// What makes fewer numbers of hidden states: codec.hpp.
struct teacher_codec;
index_t rank_of(const teacher_codec& codec);
/// (N,D) to (N,r).
void encode_states(const teacher_codec& codec, opd::thread_team& threads, const std::vector<float>& states,
                   std::vector<float>& codes);
/// The head that reads them, (V,r).
opd::matrix_view<const float> head_of(const teacher_codec& codec);

/// What the learner's estimator needs.
struct cache_plan {
    teacher_cache::kind what = teacher_cache::kind::dense;
    int entries = 0;           ///< k, m or B; hidden: D
    bool teacher_top_k = true; ///< support: the teacher's top k, else the ids that rollout recorded
    double temperature = 1;
    const teacher_codec* codec = nullptr;      ///< hidden: the states are kept in its numbers
    std::size_t budget = std::size_t{4} << 20; ///< hidden: bytes of logits at once, for the tokens that follow
};

/// The head of a model in storage::numbers, (V,D).
inline opd::matrix_view<const float> head_of(const transformer<float>& model) {
    return opd::view(model.at(model.layout.head), model.shape.vocabulary, model.shape.width);
}

/// A head (V,D) as its model stores it: for the library's calls one of their caller's own (opd::own_head).
struct model_head {
    stored_numbers numbers;
    index_t rows = 0, columns = 0, stride = 0;

    model_head() = default;
    model_head(opd::matrix_view<const float> w) : numbers{w.data}, rows(w.rows), columns(w.cols), stride(w.stride) {}
    explicit model_head(const transformer<float>& m)
        : numbers(m.numbers()), rows(m.shape.vocabulary), columns(m.shape.width), stride(columns) {
        const index_t at = m.layout.head.offset;
        m.in_bfloat16() ? void(numbers.halves += at) : void(numbers.floats += at);
    }
    bool in_bfloat16() const { return numbers.halves != nullptr; }
    opd::matrix_view<const float> view() const { return opd::view(numbers.floats, rows, columns, stride); }
    index_t vocab() const { return rows; }
    index_t width() const { return columns; }
    void copy(index_t id, index_t d, index_t count, float* to) const { numbers.copy(id * stride + d, count, to); }
};
template <class Head>
using student_states = opd::student::hidden<float, float, opd::space::host, Head>;
template <class Head>
using teacher_states = opd::teacher::hidden<float, opd::space::host, Head>;
/// f(heads…) with views where all of them are floats, which the library reads in place.
template <class Function>
auto with_heads(Function&& f, const model_head& a) {
    return a.in_bfloat16() ? f(a) : f(a.view());
}
template <class Function>
auto with_heads(Function&& f, const model_head& a, const model_head& b) {
    return a.in_bfloat16() || b.in_bfloat16() ? f(a, b) : f(a.view(), b.view());
}

/// The budget of a source of hidden states that has `bytes` of its logits there at a time, one row at least.
template <class Hidden>
std::size_t budget_of_logits(const Hidden& source, std::size_t bytes) {
    const std::size_t row = sizeof(float) * static_cast<std::size_t>(source.vocab());
    return opd::budget_of_rows(source, std::max<opd::index_t>(1, static_cast<opd::index_t>(bytes / row)));
}
/// log p of the tokens that follow (N), 0 where masked, from what the model's head reads (N,D), with `budget` bytes of
/// logits at a time.
void next_log_probs(opd::cpu_backend& backend, const transformer<float>& model, const float* states,
                    const row_batch& batch, double temperature, std::size_t budget, std::vector<float>& log_p);

class teacher_scorer {
public:
    teacher_scorer(const transformer<float>& model, opd::cpu_backend& backend)
        : model_(model), backend_(backend), states_(static_cast<std::size_t>(backend.team().size())) {}

    /// Fills the cache for all rows of the batch.
    void score(const row_batch& batch, const cache_plan& plan, teacher_cache& cache);

    /// The same for each of some trajectories by itself; `entries` are recorded a position.
    std::vector<scored_sequence> score(std::span<const trajectory* const> trajectories, int entries,
                                       const cache_plan& plan);

    /// The model's logits at all rows of some sequences. (N,V)
    void logits(std::span<const std::vector<token>> inputs, std::vector<float>& out);

    /// What its head makes them of. (N,D)
    void states(std::span<const std::vector<token>> inputs, std::vector<float>& out);

private:
    void forward(std::span<const std::vector<token>> inputs, index_t width, std::vector<float>& out);
    struct thread_state {
        kv_cache<float> cache;
        forward_state<float> forward;
    };
    const transformer<float>& model_;
    opd::cpu_backend& backend_;
    std::vector<thread_state> states_;
    std::vector<float> scratch_; // (N,V)
    std::vector<float> whole_;   // (N,D) states that a codec makes less of
};

} // namespace trainer
