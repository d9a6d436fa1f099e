// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "teacher.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"

namespace trainer {

row_batch pack(std::span<const trajectory* const> trajectories, int entries) {
    row_batch b;
    b.entries = entries;
    const auto width = static_cast<std::size_t>(entries);
    for (const trajectory* pointer : trajectories) {
        const trajectory& t = *pointer;
        if (width > 0 && t.draw_ids.size() != t.response().size() * width)
            throw std::invalid_argument(fmt::format("pack: sample {} has {} draws for {} tokens of {}", t.sample,
                                                    t.draw_ids.size(), t.response().size(), entries));
        b.inputs.emplace_back(t.tokens.begin(), t.tokens.end() - 1);
        b.rows += static_cast<index_t>(t.tokens.size()) - 1;
        for (std::size_t r = 0; r + 1 < t.tokens.size(); ++r) {
            const bool kept = r + 1 >= t.prompt_length;
            const std::size_t i = kept ? r + 1 - t.prompt_length : 0; // response token
            b.mask.push_back(kept);
            b.next.push_back(t.tokens[r + 1]);
            b.log_mu.push_back(kept ? t.log_mu[i] : 0.0f);
            b.versions.push_back(kept ? t.versions[i] : t.versions.front());
            b.kept += kept;
            for (std::size_t e = 0; e < width; ++e) {
                const std::size_t at = i * width + e;
                b.ids.push_back(kept ? t.draw_ids[at] : static_cast<std::int32_t>(e));
                b.entry_log_mu.push_back(kept ? t.draw_log_mu[at] : 0.0f);
                b.entry_weight.push_back(kept ? t.draw_weight[at] : 0.0f);
                b.entry_exact.push_back(kept ? t.draw_exact[at] : std::uint8_t{0});
            }
        }
    }
    return b;
}

row_batch pack(std::span<const trajectory> trajectories, int entries) {
    std::vector<const trajectory*> pointers;
    for (const trajectory& t : trajectories) pointers.push_back(&t);
    return pack(std::span<const trajectory* const>(pointers), entries);
}

void join(std::span<const scored_sequence* const> sequences, teacher_cache& cache) {
    cache = {};
    if (sequences.empty()) return;
    const teacher_cache& first = sequences.front()->cache;
    cache.what = first.what;
    cache.entries = first.entries;
    for (const scored_sequence* s : sequences) {
        if (s->cache.what != cache.what || s->cache.entries != cache.entries)
            throw std::invalid_argument(fmt::format("join: sample {} was scored for another objective", s->sample));
        const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
        append(cache.logits, s->cache.logits);
        append(cache.ids, s->cache.ids);
        append(cache.log_q, s->cache.log_q);
        append(cache.log_tail, s->cache.log_tail);
        append(cache.next_log_q, s->cache.next_log_q);
    }
}

std::vector<scored_sequence> teacher_scorer::score(std::span<const trajectory* const> trajectories, int entries,
                                                   const cache_plan& plan) {
    const row_batch batch = pack(trajectories, entries);
    teacher_cache whole;
    score(batch, plan, whole);
    std::vector<scored_sequence> r;
    index_t first = 0;
    for (std::size_t i = 0; i < trajectories.size(); ++i) {
        const auto rows = static_cast<index_t>(batch.inputs[i].size());
        const auto part = [&](const auto& from, index_t width) {
            return std::remove_cvref_t<decltype(from)>(from.begin() + first * width,
                                                       from.begin() + (first + rows) * width);
        };
        scored_sequence s;
        s.sample = trajectories[i]->sample;
        s.cache.what = whole.what;
        s.cache.entries = whole.entries;
        s.cache.next_log_q = part(whole.next_log_q, 1);
        if (whole.what == teacher_cache::kind::dense) {
            s.cache.logits = part(whole.logits, model_.shape.vocabulary);
        } else {
            s.cache.ids = part(whole.ids, whole.entries);
            s.cache.log_q = part(whole.log_q, whole.entries);
            if (whole.what == teacher_cache::kind::support) s.cache.log_tail = part(whole.log_tail, 1);
        }
        first += rows;
        r.push_back(std::move(s));
    }
    return r;
}

void teacher_scorer::logits(std::span<const std::vector<token>> inputs, std::vector<float>& out) {
    const index_t v = model_.shape.vocabulary;
    std::vector<index_t> first, order(inputs.size());
    index_t rows = 0;
    for (const auto& tokens : inputs) {
        first.push_back(rows);
        rows += static_cast<index_t>(tokens.size());
    }
    out.resize(static_cast<std::size_t>(rows * v));
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
        forward_rows(model_, std::span(&whole, 1), std::span<const std::int32_t>(inputs[i]), s.cache, s.forward, false,
                     out.data() + first[i] * v);
    });
}

void teacher_scorer::score(const row_batch& batch, const cache_plan& plan, teacher_cache& cache) {
    const index_t v_count = model_.shape.vocabulary;
    const bool dense = plan.what == teacher_cache::kind::dense;
    std::vector<float>& z = dense ? cache.logits : scratch_;
    logits(batch.inputs, z);
    cache.what = plan.what;
    cache.entries = plan.entries;
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
