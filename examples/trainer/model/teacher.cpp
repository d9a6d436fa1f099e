// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "model/teacher.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"

namespace trainer {

namespace {

index_t rows_of(const trajectory& t) { return static_cast<index_t>(t.tokens.size()) - 1; }
index_t prompt_rows(const trajectory& t) { return static_cast<index_t>(t.prompt_length) - 1; }

} // namespace

row_batch pack(std::span<const trajectory* const> trajectories, int entries) {
    for (const trajectory* t : trajectories)
        if (entries > 0 && t->draw_ids.size() != t->response().size() * static_cast<std::size_t>(entries))
            throw std::invalid_argument(fmt::format("pack: sample {} has {} draws for {} tokens of {}", t->sample,
                                                    t->draw_ids.size(), t->response().size(), entries));
    row_batch b;
    b.entries = entries;
    b.offsets = {0};
    // what is known of the response alone, `width` numbers a row, behind as many of the prompt
    const auto behind = [](auto& to, index_t prompt, auto fill, const auto& column) {
        to.insert(to.end(), static_cast<std::size_t>(prompt), fill);
        to.insert(to.end(), column.begin(), column.end());
    };
    for (const trajectory* t : trajectories) {
        const index_t rows = rows_of(*t), prompt = prompt_rows(*t);
        b.offsets.push_back(b.offsets.back() + rows);
        b.inputs.emplace_back(t->tokens.begin(), t->tokens.end() - 1);
        b.next.insert(b.next.end(), t->tokens.begin() + 1, t->tokens.end());
        b.mask.insert(b.mask.end(), static_cast<std::size_t>(prompt), std::uint8_t{0});
        b.mask.insert(b.mask.end(), static_cast<std::size_t>(rows - prompt), std::uint8_t{1});
        b.kept += rows - prompt;
        behind(b.log_mu, prompt, 0.0f, t->log_mu);
        behind(b.versions, prompt, static_cast<std::int32_t>(t->versions.front()), t->versions);
        if (!t->top_ids.empty()) behind(b.top, prompt, token{0}, t->top_ids);
        if (!t->kept_counts.empty()) {
            if (b.kept_offsets.empty()) b.kept_offsets.push_back(0);
            b.kept_offsets.insert(b.kept_offsets.end(), static_cast<std::size_t>(prompt), b.kept_offsets.back());
            for (const std::int32_t n : t->kept_counts) b.kept_offsets.push_back(b.kept_offsets.back() + n);
            b.kept_ids.insert(b.kept_ids.end(), t->kept_ids.begin(), t->kept_ids.end());
        }
        if (entries == 0) continue;
        for (index_t i = 0; i < prompt * entries; ++i) b.ids.push_back(static_cast<std::int32_t>(i % entries));
        b.ids.insert(b.ids.end(), t->draw_ids.begin(), t->draw_ids.end());
        behind(b.entry_log_mu, prompt * entries, 0.0f, t->draw_log_mu);
        behind(b.entry_weight, prompt * entries, 0.0f, t->draw_weight);
        behind(b.entry_exact, prompt * entries, std::uint8_t{0}, t->draw_exact);
    }
    b.rows = b.offsets.back();
    return b;
}

row_batch pack(std::span<const trajectory> trajectories, int entries) {
    std::vector<const trajectory*> each;
    for (const trajectory& t : trajectories) each.push_back(&t);
    return pack(each, entries);
}

void join(std::span<const scored_sequence* const> sequences, teacher_cache& cache) {
    cache = {};
    if (sequences.empty()) return;
    const teacher_cache& first = sequences.front()->cache;
    cache.what = first.what;
    cache.entries = first.entries;
    for (const scored_sequence* s : sequences)
        if (s->cache.what != cache.what || s->cache.entries != cache.entries)
            throw std::invalid_argument(fmt::format("join: sample {} was scored for another objective", s->sample));
    const auto joined = [&]<class T>(std::vector<T> teacher_cache::*column) {
        for (const scored_sequence* s : sequences)
            (cache.*column).insert((cache.*column).end(), (s->cache.*column).begin(), (s->cache.*column).end());
    };
    joined(&teacher_cache::logits);
    joined(&teacher_cache::states);
    joined(&teacher_cache::ids);
    joined(&teacher_cache::log_q);
    joined(&teacher_cache::log_tail);
    joined(&teacher_cache::next_log_q);
}

std::vector<scored_sequence> teacher_scorer::score(std::span<const trajectory* const> trajectories, int entries,
                                                   const cache_plan& plan) {
    const row_batch batch = pack(trajectories, entries);
    teacher_cache whole;
    score(batch, plan, whole);
    std::vector<scored_sequence> r;
    for (const trajectory* t : trajectories) {
        scored_sequence& s = r.emplace_back();
        s.sample = t->sample, s.cache.what = whole.what, s.cache.entries = whole.entries;
    }
    const auto share = [&]<class T>(std::vector<T> teacher_cache::*column, index_t width) {
        for (std::size_t i = 0; i < r.size(); ++i) {
            const auto at = [&](index_t row) { return (whole.*column).begin() + row * width; };
            (r[i].cache.*column).assign(at(batch.offsets[i]), at(batch.offsets[i + 1]));
        }
    };
    share(&teacher_cache::next_log_q, 1);
    if (whole.what == teacher_cache::kind::dense) {
        share(&teacher_cache::logits, model_.shape.vocabulary);
    } else if (whole.what == teacher_cache::kind::hidden) {
        share(&teacher_cache::states, whole.entries);
    } else {
        share(&teacher_cache::ids, whole.entries);
        share(&teacher_cache::log_q, whole.entries);
        if (whole.what == teacher_cache::kind::support) share(&teacher_cache::log_tail, 1);
    }
    return r;
}

void teacher_scorer::logits(std::span<const std::vector<token>> inputs, std::vector<float>& out) {
    forward(inputs, model_.shape.vocabulary, out);
}

void teacher_scorer::states(std::span<const std::vector<token>> inputs, std::vector<float>& out) {
    forward(inputs, 0, out);
}

// width: V for logits, 0 for what the head reads.
void teacher_scorer::forward(std::span<const std::vector<token>> inputs, index_t width, std::vector<float>& out) {
    const index_t d = model_.shape.width, columns = width > 0 ? width : d;
    std::vector<index_t> first{0};
    for (const auto& tokens : inputs) first.push_back(first.back() + std::ssize(tokens));
    out.resize(static_cast<std::size_t>(first.back() * columns));
    std::vector<index_t> order(inputs.size());
    // longest first, so that the threads finish together
    std::iota(order.begin(), order.end(), index_t{0});
    std::sort(order.begin(), order.end(), [&](index_t a, index_t b) {
        const auto x = inputs[static_cast<std::size_t>(a)].size(), y = inputs[static_cast<std::size_t>(b)].size();
        return x != y ? x > y : a < b;
    });
    backend_.team().run(static_cast<index_t>(inputs.size()), [&](index_t piece, int thread) {
        const auto i = static_cast<std::size_t>(order[static_cast<std::size_t>(piece)]);
        thread_state& s = states_[static_cast<std::size_t>(thread)];
        const segment whole{0, 0, static_cast<index_t>(inputs[i].size())};
        s.cache.resize(model_.shape, 1, whole.count);
        float* const mine = out.data() + first[i] * columns;
        const std::span<const std::int32_t> tokens(inputs[i]);
        if (width > 0) return forward_rows(model_, std::span(&whole, 1), tokens, s.cache, s.forward, false, mine);
        forward_states(model_, std::span(&whole, 1), tokens, s.cache, s.forward, false);
        std::copy_n(s.forward.n.data(), whole.count * d, mine);
    });
}

void next_log_probs(opd::cpu_backend& backend, const transformer<float>& model, const float* states,
                    const row_batch& batch, double temperature, std::size_t budget, std::vector<float>& log_p) {
    const index_t n = batch.rows;
    log_p.assign(static_cast<std::size_t>(n), 0.0f);
    with_heads(
        [&](const auto& head) {
            teacher_states<std::remove_cvref_t<decltype(head)>> source{
                .x = opd::view(states, n, index_t{model.shape.width}),
                .w = head,
                .temperature = static_cast<float>(temperature)};
            source.budget = budget_of_logits(source, budget);
            opd::token_logp(backend, source, opd::view(batch.next.data(), n, 1), opd::view(log_p.data(), n, 1),
                            opd::row_mask(batch.mask));
        },
        model_head(model));
}

const char* name_of(teacher_cache::kind k) {
    switch (k) {
    case teacher_cache::kind::dense:
        return "dense";
    case teacher_cache::kind::support:
        return "support";
    case teacher_cache::kind::samples:
        return "samples";
    case teacher_cache::kind::weighted:
        return "weighted";
    case teacher_cache::kind::hidden:
        return "hidden";
    }
    return "unknown";
}

std::shared_ptr<const scored_sequence> cache_meter::counted(const std::shared_ptr<cache_meter>& meter,
                                                            scored_sequence s) {
    if (!meter) return std::make_shared<const scored_sequence>(std::move(s));
    const auto bytes = static_cast<std::int64_t>(s.cache.bytes());
    meter->rows_ += s.cache.rows();
    meter->bytes_ += bytes;
    const std::int64_t now = meter->now_ += bytes;
    for (std::int64_t most = meter->most_; now > most && !meter->most_.compare_exchange_weak(most, now);) {}
    return {new scored_sequence(std::move(s)), [meter, bytes](const scored_sequence* gone) {
                meter->now_ -= bytes;
                delete gone;
            }};
}

void teacher_scorer::score(const row_batch& batch, const cache_plan& plan, teacher_cache& cache) {
    const index_t v_count = model_.shape.vocabulary;
    const bool dense = plan.what == teacher_cache::kind::dense;
    cache.what = plan.what;
    cache.entries = plan.entries;
    if (plan.what == teacher_cache::kind::hidden) {
        teacher_cache fresh; // of what was there memory is kept
        fresh.what = plan.what, fresh.entries = model_.shape.width;
        fresh.states = std::move(cache.states), fresh.next_log_q = std::move(cache.next_log_q);
        cache = std::move(fresh);
        std::vector<float>& whole = plan.codec ? whole_ : cache.states;
        states(batch.inputs, whole);
        next_log_probs(backend_, model_, whole.data(), batch, plan.temperature, plan.budget,
                       cache.next_log_q); // of the true teacher
        if (!plan.codec) return;
        encode_states(*plan.codec, backend_.team(), whole, cache.states);
        cache.entries = static_cast<int>(rank_of(*plan.codec));
        return;
    }
    std::vector<float>& z = dense ? cache.logits : scratch_;
    logits(batch.inputs, z);
    const index_t n = batch.rows;
    const auto width = static_cast<std::size_t>(dense ? 0 : plan.entries);
    const auto temperature = static_cast<float>(plan.temperature);
    const auto rows = opd::view(static_cast<const float*>(z.data()), n, v_count);
    const opd::row_mask mask(batch.mask);
    const bool support = plan.what == teacher_cache::kind::support, best = support && plan.teacher_top_k;
    const auto entries = static_cast<std::size_t>(n) * width;
    cache.next_log_q.assign(static_cast<std::size_t>(n), 0.0f);
    cache.ids = batch.ids;
    cache.ids.resize(entries);
    cache.log_q.assign(entries, 0.0f);
    cache.log_tail.assign(support ? static_cast<std::size_t>(n) : 0, 0.0f);
    const auto ids = opd::view(cache.ids.data(), n, plan.entries);
    const auto log_q = opd::view(cache.log_q.data(), n, plan.entries);
    const auto log_tail = opd::view(cache.log_tail.data(), n);

    opd::scores<> of_next{.ids = opd::view(batch.next.data(), n, 1), .log_p = opd::view(cache.next_log_q.data(), n, 1)};
    if (best) of_next.top_ids = ids, of_next.top_log_p = log_q, of_next.top_log_tail = log_tail;
    opd::score(backend_, rows, of_next, temperature, mask);
    if (dense || best) return;
    opd::scores<> of_entries{.ids = ids, .log_p = log_q};
    if (support) of_entries.log_tail = log_tail;
    opd::score(backend_, rows, of_entries, temperature, mask);
}

} // namespace trainer
