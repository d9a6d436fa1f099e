// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/spot_training.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/sched/archive.hpp"
#include "settings/schedule.hpp"

namespace trainer {

// --- what is learnt from --------------------------------------------------------------------------------------------

void response_recorder::hear(std::span<const lane_news> news, const policy& target) {
    version_ = target.version;
    for (const lane_news& n : news) {
        std::vector<float>& hidden = hidden_of(n.lane);
        const std::size_t width = n.rows > 0 ? n.hidden.size() / static_cast<std::size_t>(n.rows) : 1;
        const std::size_t from = static_cast<std::size_t>(n.first) * width;
        if (from != 0 && from != hidden.size())
            throw std::logic_error(fmt::format("response_recorder: position {} after {} of lane {}", n.first,
                                               hidden.size() / width, n.lane));
        hidden.resize(from);
        hidden.insert(hidden.end(), n.hidden.begin(), n.hidden.end());
    }
}

void response_recorder::end(index_t lane, const trajectory& t, bool finished) {
    std::vector<float> hidden = std::exchange(hidden_of(lane), {});
    if (!finished) return;
    to_({t.sample, version_, t.tokens, t.prompt_length, std::move(hidden)});
}

namespace {

opd::spec::draft_response kept(recorded_response r) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(r.hidden.data());
    return {r.sample,
            std::move(r.tokens),
            static_cast<index_t>(r.prompt_length),
            r.version,
            {bytes, bytes + r.hidden.size() * sizeof(float)},
            0};
}

recorded_response recorded(const opd::spec::draft_response& r) {
    std::vector<float> hidden(r.hidden.size() / sizeof(float));
    std::memcpy(hidden.data(), r.hidden.data(), hidden.size() * sizeof(float));
    return {r.id, static_cast<std::int32_t>(r.policy), r.tokens, static_cast<std::uint64_t>(r.first),
            std::move(hidden)};
}

} // namespace

// --- the trainer ----------------------------------------------------------------------------------------------------

spot_trainer::spot_trainer(const config& c, std::shared_ptr<const draft_model> first, std::int32_t workers,
                           const std::string& file)
    : settings_(c), width_(first ? first->features() : 0),
      desks_(in_virtual_time(c) ? workers : std::max(1, threads_of(c) - learner_threads_of(c))), newest_{std::move(
                                                                                                     first)},
      buffer_(empty_buffer()), workers_(static_cast<std::size_t>(workers)) {
    if (!newest_.model) throw std::invalid_argument("spot_trainer: there is no drafter");
    if (!file.empty()) file_.emplace(file);
}

// --adapt-memory counts tokens.
opd::spec::draft_data_buffer spot_trainer::empty_buffer() const {
    const index_t token_bytes = static_cast<index_t>(sizeof(token)) + width_ * static_cast<index_t>(sizeof(float));
    return opd::spec::draft_data_buffer({.most_bytes = settings_.speculation.adapt_memory * token_bytes});
}

spot_trainer::worker_state& spot_trainer::of(std::int32_t worker) const {
    if (worker < 0 || static_cast<std::size_t>(worker) >= workers_.size())
        throw std::invalid_argument(fmt::format("spot_trainer: worker {} of {}", worker, workers_.size()));
    return workers_[static_cast<std::size_t>(worker)];
}

void spot_trainer::record(recorded_response r) {
    if (r.hidden.size() != static_cast<std::size_t>(r.rows() * width_))
        throw std::logic_error(fmt::format("spot_trainer: sample {} has {} hidden numbers at {} positions", r.sample,
                                           r.hidden.size(), r.rows()));
    // a layer's row pairs two positions: of two there is one, and none of a response of one token
    if (r.rows() < 2) return;
    const std::lock_guard lock(mutex_);
    ++counts_.recorded;
    buffer_.begin_step(std::max<std::int64_t>(buffer_.step(), r.version));
    // what a worker that died had finished may finish again
    if (r.version + 1 < buffer_.step() || buffer_.contains({false, r.sample})) return;
    buffer_.add(kept(std::move(r)));
}

// From where rollout asks for the worker of a slice to where the slice lets go of it.
class spot_trainer::overstay {
    using clock = std::chrono::steady_clock;

public:
    explicit overstay(spot_trainer& owner) : owner_(owner) {}
    ~overstay() {
        if (!since_) return;
        const std::lock_guard lock(owner_.mutex_);
        owner_.held_seconds_ += std::chrono::duration<double>(clock::now() - *since_).count();
    }
    overstay(const overstay&) = delete;
    overstay& operator=(const overstay&) = delete;
    void begin() { since_ = clock::now(); }

private:
    spot_trainer& owner_;
    std::optional<clock::time_point> since_;
};

// Where a slice is computed, from where the worker sits down until it leaves.
class spot_trainer::desk {
public:
    explicit desk(spot_trainer& owner) : owner_(owner) {}
    ~desk() {
        if (!taken_) return;
        const std::lock_guard lock(owner_.mutex_);
        --owner_.at_work_;
    }
    desk(const desk&) = delete;
    desk& operator=(const desk&) = delete;
    /// With the mutex held. False: there is none.
    bool take() {
        if (owner_.at_work_ >= owner_.desks_) return false;
        ++owner_.at_work_;
        return taken_ = true;
    }

private:
    spot_trainer& owner_;
    bool taken_ = false;
};

std::optional<slice_work> spot_trainer::slice(std::int32_t worker, const policy& target, std::stop_token stop) {
    settle(worker);
    worker_state& mine = of(worker);
    overstay held(*this);
    desk place(*this);
    const std::stop_callback asked(stop, [&held] { held.begin(); }); // its end waits for a call that runs
    std::vector<recorded_response> batch;
    drafter_version from;
    std::int64_t number = 0;
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(slices_version_, std::max(slices_version_, target.version)) < target.version)
            slices_made_ = 0;
        if (settings_.speculation.adapt_slices > 0 && slices_made_ >= settings_.speculation.adapt_slices) return {};
        const index_t room = std::max<index_t>(settings_.speculation.adapt_rows, buffer_.longest());
        for (const auto& place : buffer_.choose(room)) batch.push_back(recorded(buffer_.at(place)));
        if (batch.empty() || !place.take()) return {};
        ++slices_made_;
        number = counts_.slices + counts_.stopped;
        from = newest_;
    }
    if (!mine.with || mine.with->target.model != target.model)
        mine.with = std::make_unique<tools>(settings_, target, *from.model);
    tools& with = *mine.with;
    with.own.weights.weights = from.model->weights.weights;
    with.own.weights.weights_changed();
    std::vector<drafter_text> texts;
    pending made;
    slice_work did;
    for (const recorded_response& r : batch) {
        did.rows += r.rows();
        texts.push_back({r.tokens, static_cast<std::size_t>(r.prompt_length), r.hidden, r.sample});
        made.version = std::max(made.version, r.version);
    }
    made.step = with.trainer.gradient(texts, number, made.gradient, stop);
    const std::lock_guard lock(mutex_);
    if (made.step.stopped || stop.stop_requested()) { // rollout wants the worker: what it was at is nothing
        ++counts_.stopped;
        return slice_work{};
    }
    ++counts_.slices;
    counts_.rows += did.rows;
    made.any = made.step.rows > 0;
    mine.made = std::move(made);
    // on threads it is over now
    if (!in_virtual_time(settings_)) apply(mine.made);
    return did;
}

void spot_trainer::settle(std::int32_t worker) {
    const std::lock_guard lock(mutex_);
    apply(of(worker).made);
}

void spot_trainer::apply(pending& made) {
    if (!std::exchange(made.any, false)) return;
    auto next = std::make_shared<draft_model>(*newest_.model);
    const double rate = cosine_rate(settings_.speculation.adapt_rate, 1, settings_.drafter.warmup, newest_.updates,
                                    newest_.updates + 1);
    made.step.gradient_norm = adamw_step(settings_.optimizer, rate, made.gradient, optimizer_, next->weights);
    if (!std::isfinite(made.step.loss) || !std::isfinite(made.step.gradient_norm))
        throw failure(exit_numeric,
                      fmt::format("drafter update {}: loss {}, gradient norm {}; a lower --adapt-rate may "
                                  "help",
                                  newest_.updates, made.step.loss, made.step.gradient_norm));
    counts_.loss = made.step.loss, counts_.acceptance = made.step.acceptance;
    newest_ = {std::move(next), newest_.updates + 1, std::max(newest_.trained_on, made.version)};
    counts_.updates = newest_.updates;
    if (newest_.updates % settings_.speculation.adapt_checkpoint_every == 0) write();
}

// The weights are never changed again, so that the other thread can read them while training goes on; the optimizer's
// state is copied.
void spot_trainer::write() {
    if (!file_) return;
    file_->write([model = newest_.model, progress = drafter_progress{newest_.updates, newest_.trained_on, optimizer_}] {
        return drafter_bytes(*model, &progress);
    });
}

void spot_trainer::save() {
    {
        const std::lock_guard lock(mutex_);
        write();
    }
    if (file_) file_->flush();
}

void spot_trainer::go_on(draft_model d, drafter_progress progress) {
    const std::lock_guard lock(mutex_);
    const draft_model& mine = *newest_.model;
    if (d.kind != mine.kind || !(d.target == mine.target) || !(d.weights.shape == mine.weights.shape))
        throw std::invalid_argument("spot_trainer: it was a drafter of another shape");
    newest_ = {std::make_shared<const draft_model>(std::move(d)), progress.updates, progress.trained_on};
    optimizer_ = std::move(progress.optimizer);
    counts_.updates = newest_.updates;
}

drafter_version spot_trainer::take(std::int32_t worker) {
    settle(worker);
    const std::lock_guard lock(mutex_);
    return of(worker).drafts = newest_;
}

drafter_version spot_trainer::taken(std::int32_t worker) const {
    const std::lock_guard lock(mutex_);
    const worker_state& w = of(worker);
    return w.drafts.model ? w.drafts : newest_;
}

spot_counts spot_trainer::counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
}

double spot_trainer::held_seconds() const {
    const std::lock_guard lock(mutex_);
    return held_seconds_;
}

drafter_version spot_trainer::newest() const {
    const std::lock_guard lock(mutex_);
    return newest_;
}

// The shape is the first drafter's; each drafter once, the newest first.
std::string spot_trainer::state() const {
    const std::lock_guard lock(mutex_);
    opd::sched::archive_writer w;
    std::vector<const drafter_version*> all{&newest_};
    const auto place = [&](const drafter_version& v) {
        return std::find_if(all.begin(), all.end(), [&](const drafter_version* d) { return d->updates == v.updates; });
    };
    for (const worker_state& x : workers_)
        if (x.drafts.model && place(x.drafts) == all.end()) all.push_back(&x.drafts);
    w(static_cast<std::uint64_t>(all.size()));
    for (const drafter_version* d : all) w(d->updates, d->trained_on, d->model->weights.weights);
    w(optimizer_.m, optimizer_.v, optimizer_.step, buffer_, slices_version_, slices_made_, counts_);
    w(static_cast<std::uint64_t>(workers_.size()));
    for (const worker_state& x : workers_) {
        w(x.drafts.model ? static_cast<std::int64_t>(place(x.drafts) - all.begin()) : std::int64_t{-1});
        w(x.made.any, x.made.version, x.made.step.loss, x.made.step.acceptance, x.made.step.rows);
        w(x.made.any ? x.made.gradient : std::vector<float>{});
    }
    return std::move(w.bytes);
}

void spot_trainer::restore(std::string_view bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t size = newest_.model->weights.weights.size();
    const auto need = [](bool ok) {
        if (!ok) throw opd::invalid_input("snapshot", "is of another drafter");
    };
    opd::sched::archive_reader r(bytes);
    std::uint64_t count = 0;
    r(count);
    need(count >= 1 && count <= workers_.size() + 1);
    std::vector<drafter_version> all;
    for (std::uint64_t i = 0; i < count; ++i) {
        drafter_version d;
        std::vector<float> weights;
        r(d.updates, d.trained_on, weights);
        need(weights.size() == size && d.updates >= 0);
        auto model = std::make_shared<draft_model>(*newest_.model);
        model->weights.weights = std::move(weights);
        model->weights.weights_changed();
        d.model = std::move(model);
        all.push_back(std::move(d));
    }
    adamw_state optimizer;
    opd::spec::draft_data_buffer buffer = empty_buffer();
    std::int32_t version = 0;
    std::int64_t made = 0;
    spot_counts counts;
    r(optimizer.m, optimizer.v, optimizer.step, buffer, version, made, counts);
    need(optimizer.m.size() == optimizer.v.size() && (optimizer.m.empty() || optimizer.m.size() == size));
    for (const bool previous : {false, true})
        for (const std::uint64_t id : buffer.ids(previous)) {
            const opd::spec::draft_response& x = buffer.at({previous, id});
            need(x.first >= 1 && x.first < x.length() &&
                 x.hidden.size() == static_cast<std::size_t>((x.length() - 1) * width_) * sizeof(float));
        }
    std::uint64_t workers = 0;
    r(workers);
    need(workers == workers_.size());
    std::vector<worker_state> states(workers_.size());
    for (worker_state& x : states) {
        std::int64_t at = 0;
        r(at, x.made.any, x.made.version, x.made.step.loss, x.made.step.acceptance, x.made.step.rows, x.made.gradient);
        need(at >= -1 && at < std::ssize(all) && x.made.gradient.size() == (x.made.any ? size : 0));
        if (at >= 0) x.drafts = all[static_cast<std::size_t>(at)];
    }
    need(r.done());
    newest_ = all.front();
    optimizer_ = std::move(optimizer), buffer_ = std::move(buffer), counts_ = counts;
    slices_version_ = version, slices_made_ = made;
    workers_ = std::move(states);
}

} // namespace trainer
