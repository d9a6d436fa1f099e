// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scores, and drawn tokens as passes over a batch read them.
#include "opd/score.hpp"

#include "opd/estimators/any.hpp"
#include "opd/estimators/token_table.hpp"
#include "rows.hpp"

namespace opd_c::kernel {
namespace {

void check_score_spans(const opd_score_call& c, bool ragged) {
    tensor_spans spans;
    spans.reads_matrix("score.z", c.z);
    spans.reads("score.mask", c.mask);
    spans.reads("score.offsets", c.offsets);
    spans.reads("score.kept_ids", c.kept_ids), spans.reads("score.kept_offsets", c.kept_offsets);
    if (ragged)
        spans.reads("score.ids", c.ids), spans.writes("score.log_p", c.log_p);
    else
        spans.reads_matrix("score.ids", c.ids), spans.writes_matrix("score.log_p", c.log_p);
    spans.writes("score.log_tail", c.log_tail);
    spans.writes_matrix("score.top_ids", c.top_ids), spans.writes_matrix("score.top_log_p", c.top_log_p);
    spans.writes("score.top_log_tail", c.top_log_tail);
    spans.writes("score.lse", c.lse), spans.writes("score.entropy", c.entropy);
    spans.check();
}

opd::result on_kept_sets(opd::cpu_backend& be, call_memory& memory, const opd_score_call& c, const id_tensor& ids,
                         const log_tensor& log_p, const opd::row_mask<>& mask, float temperature,
                         std::uint64_t* workspace) {
    const auto alone = [](const char* name, const DLTensor* t) {
        if (t != nullptr) refuse(name, "is given with kept sets, on which ids have log_p, and rows an lse, alone");
    };
    alone("score.offsets", c.offsets), alone("score.log_tail", c.log_tail), alone("score.top_ids", c.top_ids);
    alone("score.top_log_p", c.top_log_p), alone("score.top_log_tail", c.top_log_tail),
        alone("score.entropy", c.entropy);
    if (c.ids == nullptr) refuse("score.ids", "is a null pointer, and there are kept sets");
    if (c.log_p == nullptr) refuse("score.log_p", "is a null pointer, and there are kept sets");
    if (c.kept_offsets == nullptr) refuse("score.kept_offsets", "is a null pointer");
    if (c.kept_ids == nullptr) refuse("score.kept_ids", "is a null pointer");
    const id_tensor kept("score.kept_ids", c.kept_ids, memory, true);
    if (workspace == nullptr) kept.load();
    using tokens = opd::teacher::samples<std::int64_t, double>;
    opd::teacher::on_kept_sets<tokens, std::int64_t> cache;
    cache.ids = ids.matrix();
    cache.kept_ids = kept.vector();
    cache.kept_offsets = offsets("score.kept_offsets", c.kept_offsets);
    const opd::vector_view<double> lse = vector<double>("score.lse", c.lse);
    return with_view("score.z", c.z, [&](const auto& z) {
        return run(be, opd::detail::checked_kept_logp(z, cache, log_p.matrix(), temperature, mask, lse), workspace);
    });
}

void score_of(opd::cpu_backend& be, const opd_score_call& c, opd_result& result, std::uint64_t* workspace) {
    check_reserved("score", c);
    const dtype type = logits_type("score.z", c.z);
    (void)logits_matrix("score.z", c.z, type);
    const bool ragged = c.offsets != nullptr, kept = c.kept_ids != nullptr || c.kept_offsets != nullptr;
    check_score_spans(c, ragged);
    call_memory memory(be, workspace != nullptr);
    const opd::row_mask<> mask = opd_c::mask("score.mask", c.mask, c.has_ignore != 0, c.ignore);
    const id_tensor ids("score.ids", c.ids, memory, ragged), top_ids("score.top_ids", c.top_ids, memory);
    const log_tensor log_p("score.log_p", c.log_p, memory, ragged), top_log_p("score.top_log_p", c.top_log_p, memory),
        log_tail("score.log_tail", c.log_tail, memory, true),
        top_log_tail("score.top_log_tail", c.top_log_tail, memory, true);
    if (workspace == nullptr) ids.load();
    const auto temperature = static_cast<float>(or_default(c.temperature, 1.0));
    if (!opd::detail::temperature_in_range(temperature)) refuse("score.temperature", "must lie between 1e-6 and 1e6");
    opd::scores<std::int64_t, double> what;
    const opd::result r = renamed("score", [&] {
        if (kept) return on_kept_sets(be, memory, c, ids, log_p, mask, temperature, workspace);
        what = {.ids = ids.matrix(),
                .log_p = log_p.matrix(),
                .log_tail = log_tail.vector(),
                .top_ids = top_ids.matrix(),
                .top_log_p = top_log_p.matrix(),
                .top_log_tail = top_log_tail.vector(),
                .lse = vector<double>("score.lse", c.lse),
                .entropy = vector<double>("score.entropy", c.entropy),
                .offsets = offsets("score.offsets", c.offsets)};
        return with_rows("score.z", c.z, be, memory, [&](const auto& rows) {
            return run(be, opd::detail::checked_scores(opd::detail::job_rows(rows), what, temperature, mask),
                       workspace);
        });
    });
    if (workspace != nullptr) return void(*workspace += memory.used());
    if (ragged)
        log_p.store_lists(mask, what.offsets);
    else
        log_p.store(mask);
    top_ids.store(mask), top_log_p.store(mask), log_tail.store_line(mask), top_log_tail.store_line(mask);
    store(r, result);
}

// --- passes over a batch ---------------------------------------------------------------------------------------------

/// A column of the cache, (N,m) or left out.
template <class L>
opd::matrix_view<const L> column(const char* name, const DLTensor* t, index_t n, index_t m, bool needed = false) {
    const opd::matrix_view<const L> v = matrix<const L>(name, t);
    if (t == nullptr && needed) refuse(name, "is a null pointer");
    if (t != nullptr) opd::detail::check_matrix(name, v, n, m);
    return v;
}

template <class Cache>
void fill_table(const Cache& cache, const opd::matrix_view<const double>& log_p, const opd::row_mask<>& mask,
                const opd::any_objective& worth, const opd_teacher& t, const opd_token_table& table) {
    using L = typename Cache::log_type;
    const opd::matrix_view<const L> weight = column<L>("cache.weight", t.weight, log_p.rows, log_p.cols);
    for (index_t i = 0; i < log_p.rows * log_p.cols; ++i)
        table.id[i] = -1, table.log_p[i] = table.log_mu[i] = table.log_prox[i] = table.advantage[i] = 0;
    opd::for_each_token(log_p, cache, mask, [&](index_t r, index_t j, const opd::sampled_entry& x) {
        if (!weight.empty() && opd::detail::is_nan(weight(r, j))) return; // no token, of weighted ones
        const index_t i = r * log_p.cols + j;
        table.id[i] = x.id, table.log_p[i] = x.log_p, table.log_mu[i] = x.log_mu, table.log_prox[i] = x.log_prox;
        table.advantage[i] = worth(x);
    });
}

template <class L>
void tokens_of(const opd_tokens& of, const opd_teacher& t, const opd_token_table& table) {
    const opd::matrix_view<const double> log_p = matrix<const double>("tokens.log_p", of.log_p);
    const index_t n = log_p.rows, m = log_p.cols;
    opd::cpu_backend none;
    call_memory memory(none, false);
    opd::teacher::samples<std::int64_t, L> cache;
    const id_tensor ids("cache.ids", t.ids, memory);
    opd::detail::check_matrix("cache.ids", ids.matrix(), n, m);
    ids.load();
    cache.ids = ids.matrix();
    cache.log_mu = column<L>("cache.log_mu", t.log_mu, n, m, true);
    cache.log_q = column<L>("cache.log_q", t.log_q, n, m, true);
    cache.log_prox = column<L>("cache.log_prox", t.log_prox, n, m);
    cache.log_ref = column<L>("cache.log_ref", t.log_ref, n, m);
    cache.advantage = matrix<const L>("cache.advantage", t.advantage);
    if (t.advantage != nullptr)
        opd::detail::check_matrix("cache.advantage", cache.advantage, n, cache.advantage.cols == 1 ? 1 : m);
    cache.rollout.drawn_with = {.temperature = static_cast<float>(or_default(t.drawn_temperature, 1.0)),
                                .top_k = t.drawn_top_k,
                                .top_p = static_cast<float>(or_default(t.drawn_top_p, 1.0)),
                                .min_p = static_cast<float>(t.drawn_min_p)};
    if (t.raw_logprobs != 0) cache.rollout.mode = opd::logprob_mode::raw;
    cache.rollout.log_norm = vector<const L>("cache.log_norm", t.log_norm);
    opd::detail::check_filter(cache.rollout.drawn_with, "cache.drawn_with");
    opd::detail::check_vector("cache.log_norm", cache.rollout.log_norm, n);
    const opd::row_mask<> mask = opd_c::mask("tokens.mask", of.mask, of.has_ignore != 0, of.ignore);
    opd::detail::check_vector("tokens.mask", mask, n);

    const std::string_view name = of.of != nullptr ? of.of : "reverse_kl";
    const auto found = opd::choice::find(opd::choice::objectives, name);
    if (!found)
        refuse("tokens.of",
               "is '" + std::string(name.substr(0, 64)) + "'; opd_name(\"objective\", i) lists what it takes");
    const opd::any_objective worth{*found, of.a, of.b};
    worth.validate();
    const unsigned reads = worth.reads_columns();
    if ((reads & opd::column::log_ref) && t.log_ref == nullptr)
        refuse("cache.log_ref", "is left out, and tokens.of reads it");
    if ((reads & opd::column::advantage) && t.advantage == nullptr)
        refuse("cache.advantage", "is left out, and tokens.of reads it");

    const auto fill = [&](const auto& c) { renamed("cache", [&] { fill_table(c, log_p, mask, worth, t, table); }); };
    using plain = decltype(cache);
    const opd::teacher::missing_mu<plain> may_miss{cache};
    if (t.kept_ids == nullptr && t.kept_offsets == nullptr) {
        if (t.log_kept_q != nullptr) refuse("cache.log_kept_q", "is given without kept sets");
        return t.missing_mu != 0 ? fill(may_miss) : fill(cache);
    }
    const id_tensor kept("cache.kept_ids", t.kept_ids, memory, true);
    kept.load();
    const auto on_sets = [&](const auto& c) {
        opd::teacher::on_kept_sets<std::remove_cvref_t<decltype(c)>, std::int64_t> sets;
        static_cast<std::remove_cvref_t<decltype(c)>&>(sets) = c;
        sets.kept_ids = kept.vector(), sets.kept_offsets = offsets("cache.kept_offsets", t.kept_offsets);
        sets.log_kept_q = vector<const L>("cache.log_kept_q", t.log_kept_q);
        fill(sets);
    };
    t.missing_mu != 0 ? on_sets(may_miss) : on_sets(cache);
}

} // namespace

int score(void* backend, const opd_score_call& call, opd_result& result, std::uint64_t* workspace) {
    return guarded([&] { score_of(*static_cast<opd::cpu_backend*>(backend), call, result, workspace); });
}
int tokens(const opd_tokens& of, const opd_teacher& cache, const opd_token_table& table) {
    return guarded([&] {
        if (cache.log_mu == nullptr) refuse("cache.log_mu", "is a null pointer");
        switch (opd_c::type_of(*cache.log_mu)) {
        case dtype::float32:
            return tokens_of<float>(of, cache, table);
        case dtype::float64:
            return tokens_of<double>(of, cache, table);
        default:
            opd_c::detail::refuse_type("cache.log_mu", *cache.log_mu, "float32 or float64");
        }
    });
}

} // namespace opd_c::kernel
