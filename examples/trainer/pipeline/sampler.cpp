// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/sampler.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"
#include "settings/config.hpp"

namespace trainer {

sampler::sampler(const sampling& options, index_t vocabulary)
    : o_(options), v_(vocabulary), width_(1 + options.plan.count) {}

void sampler::clear() {
    rows_.clear();
    z_.clear();
}

void sampler::add(trajectory& t, const float* z) {
    rows_.push_back(&t);
    z_.insert(z_.end(), z, z + v_);
    if (o_.inject.changes_logits())
        inject(o_.inject, o_.seed, t.sample, static_cast<std::uint32_t>(t.tokens.size()),
               std::span(z_).last(static_cast<std::size_t>(v_)));
}

void sampler::draw(std::int32_t version) {
    const auto n = static_cast<index_t>(rows_.size());
    const auto entries = static_cast<std::size_t>(n * width_);
    ids_.resize(entries);
    log_mu_.resize(entries);
    weight_.assign(entries, 0.0f);
    exact_.assign(entries, std::uint8_t{0});
    samples_.clear();
    positions_.clear();
    for (const trajectory* t : rows_) {
        samples_.push_back(t->sample);
        positions_.push_back(static_cast<std::uint32_t>(t->tokens.size()));
    }
    // columns [first, first + count) of the step's table
    const auto columns = [&](index_t first, index_t count) {
        return opd::drawn<token, float, float>{
            opd::view(ids_.data() + first, n, count, width_), opd::view(log_mu_.data() + first, n, count, width_),
            opd::view(weight_.data() + first, n, count, width_), opd::view(exact_.data() + first, n, count, width_)};
    };
    const auto z = opd::view(std::as_const(z_).data(), n, v_);
    const opd::draw_keys<> keys{
        o_.seed, opd::view(std::as_const(samples_).data(), n), opd::view(std::as_const(positions_).data(), n), {}};
    const opd::draw_options<> options{.filter = o_.filter()};
    opd::draw_options<> first = options;
    if (o_.keep_sets) {
        cut_.resize(static_cast<std::size_t>(n)), kept_.resize(static_cast<std::size_t>(n));
        first.cut = opd::view(cut_.data(), n), first.kept = opd::view(kept_.data(), n);
    }
    const opd::result drawn = o_.greedy ? opd::draw(backend_, z, opd::design::greedy{}, keys, columns(0, 1), first)
                                        : opd::draw(backend_, z, opd::design::gumbel{}, keys, columns(0, 1), first);
    if (const index_t r = drawn.diagnostics.first_bad_row; r >= 0) {
        const trajectory& t = *rows_[static_cast<std::size_t>(r)];
        throw failure(exit_numeric, fmt::format("rollout: logits of sample {} at position {} are not finite", t.sample,
                                                t.tokens.size()));
    }
    if (o_.keep_sets) {
        kept_first_.assign(1, 0);
        for (const index_t k : kept_) kept_first_.push_back(kept_first_.back() + k);
        kept_ids_.resize(static_cast<std::size_t>(kept_first_.back()));
        opd::kept_ids(backend_, z, opd::view(std::as_const(cut_).data(), n), opd::row_offsets<>(kept_first_),
                      opd::view(kept_ids_.data(), kept_first_.back()));
    }
    const int count = o_.plan.count;
    switch (o_.plan.what) {
    case draw_plan::kind::none:
        break;
    case draw_plan::kind::iid: // draw 0 is the rollout's token
        for (index_t r = 0; r < n; ++r) {
            const auto first = static_cast<std::size_t>(r * width_);
            ids_[first + 1] = ids_[first], log_mu_[first + 1] = log_mu_[first];
        }
        if (count > 1)
            opd::draw(backend_, z, opd::design::iid{.m = count - 1, .first = 1}, keys, columns(2, count - 1), options);
        for (index_t r = 0; r < n; ++r)
            std::fill_n(weight_.begin() + r * width_ + 1, count, 1.0f / static_cast<float>(count));
        break;
    case draw_plan::kind::threshold:
        opd::draw(backend_, z, opd::design::threshold{count}, keys, columns(1, count), options);
        break;
    case draw_plan::kind::top_k:
        opd::top_k(backend_, z, columns(1, count).ids, columns(1, count).log_mu, options.filter.temperature);
        break;
    }
    for (index_t r = 0; r < n; ++r) {
        trajectory& t = *rows_[static_cast<std::size_t>(r)];
        const auto first = static_cast<std::size_t>(r * width_), end = first + static_cast<std::size_t>(width_);
        t.tokens.push_back(ids_[first]);
        t.log_mu.push_back(log_mu_[first]);
        t.versions.push_back(version);
        if (o_.keep_tops) {
            const auto row = z_.begin() + r * v_;
            t.top_ids.push_back(static_cast<token>(std::max_element(row, row + v_) - row));
        }
        if (o_.keep_sets) {
            const auto row = static_cast<std::size_t>(r);
            t.kept_counts.push_back(static_cast<std::int32_t>(kept_[row]));
            t.kept_ids.insert(t.kept_ids.end(), kept_ids_.begin() + kept_first_[row],
                              kept_ids_.begin() + kept_first_[row + 1]);
        }
        for (std::size_t e = first + 1; e < end; ++e) {
            t.draw_ids.push_back(ids_[e]);
            t.draw_log_mu.push_back(ids_[e] < 0 ? 0.0f : log_mu_[e]);
            t.draw_weight.push_back(weight_[e]);
            t.draw_exact.push_back(exact_[e]);
        }
    }
}

} // namespace trainer
