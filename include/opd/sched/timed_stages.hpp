// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Real stages (stages.hpp) in virtual time: a model for virtual_driver that calls the same objects as thread_driver does,
// takes each call to last as long as a cost function says, and so makes a whole run a function of its seed. Calls are made
// when their time is over; in virtual time they take none.
//
//   rollout   a quantum (step()) lasts step(worker, sequences that run) seconds. start, abort and install take effect
//             between two quanta, as on threads: what comes during one waits for its end, and so does a transfer of weights
//   teacher   score() is called when score(sequences) seconds are over; what it throws fails the call
//   learner   train() likewise
//
// What a rollout stage throws ends the run with that exception. Stages are shared by copies of the driver.
//
// Snapshots hold what runs and what is between the stages, if what is sent and the rollout stage list their fields
// (archive.hpp); a restored driver then goes on as the one it was taken from would have. Of the weights only the version is
// theirs: the learner must be given the state that it had, and have published it, before restore().
#pragma once

#include <functional>
#include <map>

#include "opd/sched/stages.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace opd::sched {

/// Seconds of each call.
template <class Rolled>
struct stage_costs {
    using batch = std::span<const std::shared_ptr<const Rolled>>;
    std::function<double(std::int32_t worker, index_t running)> step = [](std::int32_t, index_t) { return 1.0; };
    std::function<double(batch)> score = [](batch b) { return static_cast<double>(b.size()); };
    std::function<double(batch)> train = [](batch b) { return static_cast<double>(b.size()); };
    std::function<double(std::int32_t worker, version_t)> install = [](std::int32_t, version_t) { return 0.0; };
};

namespace detail {

/// Shared values in a snapshot: each once, and who shared one shares it again.
template <class T>
class shared_fields {
public:
    template <class A>
    void operator()(A& a, std::shared_ptr<const T>& p) {
        std::uint32_t number = 0; // null
        if constexpr (!A::reading) {
            if (p)
                number = numbers_.try_emplace(p.get(), static_cast<std::uint32_t>(numbers_.size() + 1)).first->second;
        }
        a(number);
        if (number > all_.size() + 1) throw invalid_input("snapshot", "is damaged: it shares what it does not have");
        if (number == all_.size() + 1) {
            if constexpr (A::reading) {
                auto read = std::make_shared<T>();
                a(*read);
                all_.push_back(std::move(read));
            } else {
                a(*p);
                all_.push_back(p);
            }
        }
        if constexpr (A::reading) p = number > 0 ? all_[number - 1] : nullptr;
    }

private:
    std::map<const T*, std::uint32_t> numbers_; // from 1
    std::vector<std::shared_ptr<const T>> all_;
};

} // namespace detail

/// A real rollout stage as a worker in virtual time.
template <rollout_stage Stage>
class timed_rollout {
public:
    using rolled_type = typename Stage::rolled_type;

    timed_rollout(std::shared_ptr<Stage> s, std::function<double(index_t running)> seconds)
        : stage_(std::move(s)), seconds_(std::move(seconds)) {}

    index_t running() const { return static_cast<index_t>(live_.size()); }
    version_t version() const { return version_; }

    void start(const ticket& t) {
        live_.push_back(t);
        command({command::kind::start, t, 0});
    }
    bool abort(const ticket& t) {
        const auto at = std::find(live_.begin(), live_.end(), t);
        if (at == live_.end()) return false;
        live_.erase(at);
        command({command::kind::abort, t, 0});
        return true;
    }
    void install(version_t v) {
        version_ = v;
        command({command::kind::install, {}, v});
    }
    /// Seconds until what is asked of it takes effect.
    double until_settled() const { return left_ < length_ ? left_ : 0; }
    double next() const { return left_; }

    /// Calls finished(ticket, token_versions, finished_rollout) for what a quantum has finished that ends within dt.
    template <class Out>
    void advance(double dt, Out&& finished) {
        if (left_ == forever) return;
        left_ -= dt;
        if (left_ > 1e-9 * length_) return; // the caller's clock rounds
        out_.clear();
        if constexpr (detail::steps_stoppably<Stage>)
            stage_->step(out_, std::stop_token{});
        else
            stage_->step(out_);
        for (const auto& f : out_) {
            const auto at = std::find(live_.begin(), live_.end(), f.ticket);
            if (at != live_.end()) {
                live_.erase(at);
                finished(f.ticket, f.versions, f);
            } else { // aborted during this quantum: it no longer runs
                std::erase_if(waiting_, [&](const struct command& c) {
                    return c.what == command::kind::abort && c.who == f.ticket;
                });
            }
        }
        for (const struct command& c : std::exchange(waiting_, {})) carry_out(c);
        begin();
    }

    template <class A>
        requires detail::lists_fields<Stage, A>
    void fields(A& a) {
        detail::list_fields(a, live_, [&](ticket& t) { detail::ticket_fields(a, t); });
        detail::list_fields(a, waiting_, [&](struct command& c) {
            a(c.what, c.version);
            detail::ticket_fields(a, c.who);
        });
        a(left_, length_, version_, *stage_);
    }

private:
    struct command {
        enum class kind { start, abort, install } what = kind::start;
        friend constexpr kind last_of(kind) { return kind::install; }
        ticket who;
        version_t version = 0;
    };
    void command(const struct command& c) {
        if (left_ < length_) { // in the middle of a quantum
            waiting_.push_back(c);
            return;
        }
        carry_out(c);
        begin();
    }
    void carry_out(const struct command& c) {
        switch (c.what) {
        case command::kind::start:
            if constexpr (detail::starts_fresh<Stage>)
                stage_->start(c.who);
            else
                stage_->start(c.who, nullptr);
            break;
        case command::kind::abort:
            stage_->abort(c.who);
            break;
        case command::kind::install:
            stage_->install(c.version);
            break;
        }
    }
    void begin() {
        const auto n = static_cast<index_t>(stage_->running());
        left_ = length_ = n > 0 ? seconds_(n) : forever;
        if (n > 0 && !(length_ > 0 && length_ < forever))
            throw invalid_input("step", "takes " + std::to_string(length_) + " seconds; must be finite and positive");
    }

    std::shared_ptr<Stage> stage_;
    std::function<double(index_t)> seconds_;
    std::vector<ticket> live_; // started and neither finished nor aborted
    std::vector<struct command> waiting_;
    std::vector<finished_rollout<rolled_type>> out_;
    double left_ = forever, length_ = forever; // of the present quantum; none: nothing runs
    version_t version_ = -1;
};

/// The model. Workers of the teacher have one slot.
template <rollout_stage Rollout, class Teacher, class Learner>
    requires teacher_stage<Teacher, typename Rollout::rolled_type> &&
        learner_stage<Learner, typename Rollout::rolled_type, typename Teacher::scored_type>
class timed_stages {
public:
    using rolled_type = typename Rollout::rolled_type;
    using scored_type = typename Teacher::scored_type;
    using view = sequence_view<rolled_type, scored_type>;

    /// `make(worker)` makes a rollout stage, for a worker that comes for the first time or again.
    timed_stages(std::function<std::shared_ptr<Rollout>(std::int32_t)> make,
                 std::vector<std::shared_ptr<Teacher>> teachers, std::shared_ptr<Learner> learner,
                 stage_costs<rolled_type> costs = {})
        : make_(std::move(make)), teachers_(std::move(teachers)), learner_(std::move(learner)),
          costs_(std::move(costs)), calls_(teachers_.size()) {}

    timed_rollout<Rollout> rollout(std::int32_t worker) {
        return {make_(worker), [step = costs_.step, worker](index_t n) { return step(worker, n); }};
    }
    void start(timed_rollout<Rollout>& w, const ticket& t) {
        view& p = of(t.slot);
        p = {};
        p.ticket = t;
        p.start = w.version();
        w.start(t);
    }
    void rolled(const ticket& t, const finished_rollout<rolled_type>& f) {
        view& p = of(t.slot);
        if (!(p.ticket == t)) return; // given up
        p.versions = f.versions;
        p.rolled = f.sequence;
    }
    double teacher(std::uint64_t, std::int32_t worker, std::span<const ticket> tickets) {
        auto& call = calls_.at(static_cast<std::size_t>(worker));
        call.clear();
        for (const ticket& t : tickets) call.push_back(of(t.slot).rolled);
        return costs_.score(call);
    }
    /// Which were scored.
    std::vector<ticket> scored(std::uint64_t, std::int32_t worker, std::span<const ticket> tickets) {
        const auto number = static_cast<std::size_t>(worker);
        const std::span<const std::shared_ptr<const rolled_type>> call(calls_[number]);
        const auto scores = [&] {
            if constexpr (detail::scores_stoppably<Teacher, rolled_type>)
                return teachers_[number]->score(call, std::stop_token{});
            else
                return teachers_[number]->score(call);
        }();
        if (scores.size() != tickets.size()) throw std::runtime_error("opd: score() answers for each sequence");
        std::vector<ticket> done;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (!scores[i]) continue;
            done.push_back(tickets[i]);
            view& p = of(tickets[i].slot);
            if (p.rolled == call[i]) p.scored = scores[i]; // else stale, and gone meanwhile
        }
        return done;
    }
    double learner(std::uint64_t, version_t, std::span<const ticket> tickets) {
        batch_.clear();
        std::vector<std::shared_ptr<const rolled_type>> rolled;
        for (const ticket& t : tickets) {
            batch_.push_back(of(t.slot));
            rolled.push_back(batch_.back().rolled);
        }
        return costs_.train(rolled);
    }
    index_t learned(std::uint64_t, version_t v, std::span<const ticket>) {
        if constexpr (detail::trains_stoppably<Learner, view>)
            return static_cast<index_t>(learner_->train(std::span<const view>(batch_), v, std::stop_token{}));
        else
            return static_cast<index_t>(learner_->train(std::span<const view>(batch_), v));
    }
    double sync(std::int32_t worker, version_t v) const { return costs_.install(worker, v); }

    template <class A>
    void fields(A& a) {
        if constexpr (detail::lists_fields<rolled_type, A> && detail::lists_fields<scored_type, A>) {
            detail::shared_fields<rolled_type> rolled;
            detail::shared_fields<scored_type> scored;
            for (std::vector<view>* list : {&payloads_, &batch_})
                detail::list_fields(a, *list, [&](view& p) {
                    detail::ticket_fields(a, p.ticket);
                    a(p.start, p.versions.oldest, p.versions.newest, p.versions.mean, p.versions.tokens);
                    rolled(a, p.rolled);
                    scored(a, p.scored);
                });
            auto teachers = static_cast<std::uint64_t>(calls_.size());
            a(teachers);
            if (teachers != calls_.size()) throw invalid_input("snapshot", "is of another number of teachers");
            for (auto& call : calls_) detail::list_fields(a, call, [&](auto& p) { rolled(a, p); });
        } else {
            throw std::logic_error("opd: what these stages send has no fields(): their driver has no snapshots");
        }
    }

private:
    view& of(std::uint32_t slot) {
        if (slot >= payloads_.size()) payloads_.resize(slot + std::size_t{1});
        return payloads_[slot];
    }
    std::function<std::shared_ptr<Rollout>(std::int32_t)> make_;
    std::vector<std::shared_ptr<Teacher>> teachers_;
    std::shared_ptr<Learner> learner_;
    stage_costs<rolled_type> costs_;
    std::vector<view> payloads_; // by slot
    std::vector<std::vector<std::shared_ptr<const rolled_type>>> calls_;
    std::vector<view> batch_;
};

} // namespace opd::sched
