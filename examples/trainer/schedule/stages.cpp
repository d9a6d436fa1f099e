// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "schedule/stages.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "pipeline/served.hpp"

namespace trainer {

namespace sched = opd::sched;

sched::token_versions versions_of(const trajectory& t) {
    sched::token_versions r;
    if (t.versions.empty()) return r;
    r.oldest = t.versions.front(); // they never decrease
    r.newest = t.versions.back();
    double sum = 0;
    for (const std::int32_t v : t.versions) sum += v;
    r.tokens = static_cast<std::int64_t>(t.versions.size());
    r.mean = sum / static_cast<double>(r.tokens);
    return r;
}

// --- rollout --------------------------------------------------------------------------------------------------------

void rollout_stage::count() {
    speculation_counts c = engine_->take_counts();
    if (spot_) c.aged = c.verified_steps, c.age = c.aged * std::max<std::int64_t>(0, engine_->version() - trained_on_);
    counts_->add(c);
}

void rollout_stage::draft_with(const drafter_version& d) {
    engine_->adapt(d.model);
    trained_on_ = d.trained_on;
}

std::optional<slice_work> rollout_stage::spare(std::stop_token stop) {
    if (!spot_ || !engine_) return {};
    return spot_->slice(number_, engine_->weights(), std::move(stop));
}

void rollout_stage::start(const sched::ticket& t, std::shared_ptr<const trajectory> prefix) {
    if (!engine_) throw std::logic_error("rollout_stage: a start before the first weights");
    const std::uint64_t sample = first_sample_ + t.sample;
    if (prefix && prefix->sample != sample)
        throw std::invalid_argument(
            fmt::format("rollout_stage: a prefix of sample {} for sample {}", prefix->sample, sample));
    if (spot_ && engine_->running() == 0) draft_with(spot_->take(number_));
    engine_->start(t.lane, prefix ? *prefix : begin_response(request_of(task_, options_.seed, sample, answers_)));
    tickets_[static_cast<std::size_t>(t.lane)] = t;
    had_[static_cast<std::size_t>(t.lane)] = prefix ? prefix->response().size() : 0;
}

sched::finished_rollout<trajectory> rollout_stage::park(const sched::ticket& t) {
    if (!engine_ || !engine_->busy(t.lane) || tickets_[static_cast<std::size_t>(t.lane)] != t)
        throw std::logic_error(fmt::format("rollout_stage: sequence {} does not run here", t.sample));
    auto drawn = std::make_shared<const trajectory>(engine_->drawn(t.lane));
    engine_->abort(t.lane);
    if (drawn->response().empty()) return {t, {}, nullptr, true};
    const sched::token_versions versions = versions_of(*drawn);
    return {t, versions, std::move(drawn), true};
}

std::int64_t rollout_stage::drawn(const sched::ticket& t) const {
    const bool here = engine_ && engine_->busy(t.lane) && tickets_[static_cast<std::size_t>(t.lane)] == t;
    return here ? static_cast<std::int64_t>(engine_->drawn(t.lane).response().size()) : 0;
}

void rollout_stage::abort(const sched::ticket& t) {
    if (engine_ && engine_->busy(t.lane) && tickets_[static_cast<std::size_t>(t.lane)] == t) engine_->abort(t.lane);
}

void rollout_stage::install(const sched::weights& w) {
    take_weights(w);
    if (spot_) draft_with(spot_->take(number_));
}

void rollout_stage::take_weights(const sched::weights& w) {
    const policy weights = weights_.how().deltas ? received_.take(weights_, w) : weights_.get(w);
    const bool first = !engine_;
    if (!first)
        engine_->install(weights);
    else
        engine_.emplace(weights, options_, static_cast<index_t>(tickets_.size()), task_.max_length());
    installed_ = w;
    if (spot_ && first)
        engine_->record_with(
            std::make_shared<response_recorder>([spot = spot_](recorded_response r) { spot->record(std::move(r)); }));
}

rollout_work rollout_stage::step(std::vector<sched::finished_rollout<trajectory>>& out, std::stop_token) {
    finished_.clear();
    const index_t rows = engine_ ? engine_->step(finished_) : 0;
    rows_ = rows, again_ = engine_ ? engine_->recomputed() : 0;
    for (lane_trajectory& f : finished_) {
        auto t = std::make_shared<const trajectory>(std::move(f.sequence));
        const sched::token_versions versions = versions_of(*t);
        out.push_back({tickets_[static_cast<std::size_t>(f.lane)], versions, std::move(t)});
    }
    const rollout_work work{rows, engine_ ? engine_->drafting() : draft_work{}};
    if (park_after_ == 0 || !engine_) return work;
    for (std::size_t lane = 0; lane < tickets_.size(); ++lane)
        if (const auto i = static_cast<index_t>(lane);
            engine_->busy(i) && engine_->drawn(i).response().size() >= had_[lane] + park_after_)
            out.push_back(park(tickets_[lane]));
    return work;
}

void rollout_stage::export_partials(std::vector<sched::partial_rollout<trajectory>>& out) const {
    if (!engine_) return;
    for (lane_trajectory& p : engine_->partials())
        out.push_back(
            {tickets_[static_cast<std::size_t>(p.lane)], std::make_shared<const trajectory>(std::move(p.sequence))});
}

// --- teacher --------------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<const scored_sequence>>
teacher_stage::score(std::span<const std::shared_ptr<const trajectory>> trajectories, std::stop_token stop) {
    std::vector<const trajectory*> pointers;
    for (const auto& t : trajectories) pointers.push_back(t.get());
    std::vector<std::shared_ptr<const scored_sequence>> r;
    if (served_) {
        for (const auto& s : served_->score(pointers, std::move(stop)))
            r.push_back(s ? cache_meter::counted(meter_, std::move(*s)) : nullptr);
        return r;
    }
    for (scored_sequence& s : scorer_.score(pointers, entries_, plan_))
        r.push_back(cache_meter::counted(meter_, std::move(s)));
    return r;
}

// --- learner --------------------------------------------------------------------------------------------------------

index_t learner_stage::train(std::span<const view> sequences, const sched::train_call& call, std::stop_token) {
    std::vector<std::uint64_t> samples;
    for (const auto& s : sequences) samples.push_back(s.rolled->sample);
    const sched::version_t version = call.from.version;
    if (version != last_.from.version) {
        learner_result r;
        if (!sequences.empty() && version < settings_.distill.steps) {
            r = learn(sequences, version);
            if (after_) after_(r, sequences, version);
        }
        last_ = {call.from, std::move(samples), r.updates, learn_.snapshot(static_cast<std::int32_t>(version) + 1)};
    } else if (call.from != last_.from || samples != last_.samples) {
        throw std::logic_error(
            fmt::format("the step at version {} was made, from other sequences or weights than now", version));
    }
    weights_.publish(call.makes(), last_.made);
    return last_.updates;
}

learner_result learner_stage::learn(std::span<const view> sequences, sched::version_t version) {
    const auto shares = static_cast<std::size_t>(settings_.distill.mini_batches);
    std::vector<std::vector<part>> updates;  // looked back from before the first of them
    for (std::size_t i = 0; i < shares; ++i) // a short batch may leave some empty
        if (const std::size_t first = sequences.size() * i / shares, end = sequences.size() * (i + 1) / shares;
            first < end)
            updates.push_back(parts_of(sequences.subspan(first, end - first)));
    learner_result r;
    for (const auto& parts : updates) r.add(update(parts, version, r.updates));
    return r;
}

std::vector<learner_stage::part> learner_stage::parts_of(std::span<const view> update) {
    const auto most = static_cast<std::size_t>(settings_.distill.micro_batch);
    const std::size_t at_once = most == 0 ? update.size() : most;
    std::vector<part> r;
    index_t kept = 0;
    for (std::size_t first = 0; first < update.size(); first += at_once) {
        part& p = r.emplace_back();
        p.sequences = update.subspan(first, std::min(at_once, update.size() - first));
        p.batch = packed(p.sequences);
        learn_.look_back(p.batch);
        kept += p.batch.kept;
    }
    if (r.size() > 1)
        for (part& p : r) p.batch.normaliser = static_cast<std::int32_t>(kept);
    return r;
}

row_batch learner_stage::packed(std::span<const view> sequences) const {
    std::vector<const trajectory*> rolled;
    for (const auto& s : sequences) rolled.push_back(s.rolled.get());
    return pack(rolled, entries_);
}

learner_result learner_stage::update(std::span<const part> parts, sched::version_t version, int updates) {
    learner_result r;
    double loss = 0;
    for (const part& p : parts) {
        std::vector<const scored_sequence*> scored;
        for (const auto& s : p.sequences) scored.push_back(s.scored.get());
        join(scored, cache_);
        const learner_result of_part = learn_.accumulate(p.batch, cache_, static_cast<std::int32_t>(version), updates);
        loss += of_part.loss; // each its share of the update's
        r.add(of_part);
    }
    r.loss = loss;
    learn_.finish(r, rate_of(settings_, rate_, version));
    return r;
}

} // namespace trainer
