// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Real stages (stages.hpp) in virtual time: a model for virtual_driver that calls the same objects as thread_driver
// does, takes each call to last as long as a cost function says, and so makes a whole run a function of its seed.
// Calls of the teacher and the learner are made when their time is over; in virtual time they take none.
//
//   rollout   a quantum (step()) is run when it begins, and lasts step(worker, work) seconds: what it did is known
//             then, and heard of when it is over. `work` is what the stage's step() returns, or how many sequences ran.
//             start, abort and install take effect between two quanta, as on threads: what comes during one waits for
//             its end, and so does a transfer of weights; what comes at the moment of a quantum's beginning is in time
//             if the driver heard of it before. A worker that has weights and nothing to run does spare work, if it
//             offers any: a quantum of it lasts spare(worker, what it did) seconds, and is not cut short when something
//             comes
//   teacher   score() is called when score(sequences) seconds are over; what it throws fails the call
//   learner   train() likewise
//
// What a rollout stage throws ends the run with that exception. Stages are shared by copies of the driver.
//
// Snapshots hold what runs and what is between the stages, if what is sent and the rollout stage list their fields
// (archive.hpp); a restored driver then goes on as the one it was taken from would have. Of the weights only the
// version is theirs: the learner must be given the state that it had, and have published it, before restore().
#pragma once

#include <functional>

#include "opd/sched/conveyor.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "opd/sched/worker_loop.hpp"

namespace opd::sched {

/// Seconds of each call. `Work`: what a rollout stage's step() returns; `Spare`: what its spare() does.
template <class Rolled, class Work = index_t, class Spare = index_t>
struct stage_costs {
    using batch = std::span<const std::shared_ptr<const Rolled>>;
    std::function<double(std::int32_t worker, const Work&)> step = [](std::int32_t, const Work&) { return 1.0; };
    std::function<double(std::int32_t worker, const Spare&)> spare = [](std::int32_t, const Spare&) { return 1.0; };
    std::function<double(batch)> score = [](batch b) { return static_cast<double>(b.size()); };
    std::function<double(batch)> train = [](batch b) { return static_cast<double>(b.size()); };
    std::function<double(std::int32_t worker, version_t)> install = [](std::int32_t, version_t) { return 0.0; };
};

/// A real rollout stage as a worker in virtual time.
template <rollout_stage Stage, class Scored>
class timed_rollout {
public:
    using rolled_type = typename Stage::rolled_type;
    using command_type = worker_command<rolled_type, Scored>;
    using work_type = detail::work_of<Stage>;

    using spare_type = detail::spare_of<Stage>;

    timed_rollout(
        std::shared_ptr<Stage> s, std::int32_t number, std::function<double(const work_type&)> seconds,
        std::function<double(const spare_type&)> spare_seconds = [](const spare_type&) { return 1.0; })
        : stage_(std::move(s)), loop_(stage_, number), seconds_(std::move(seconds)),
          spare_seconds_(std::move(spare_seconds)) {}

    index_t running() const { return static_cast<index_t>(live_.size()); }
    version_t version() const { return version_; }

    void start(const ticket& t, std::shared_ptr<const rolled_type> prefix = {}) {
        live_.push_back(t);
        command({.what = command_type::kind::start, .ticket = t, .prefix = std::move(prefix)});
    }
    /// Calls parked(ticket, token_versions, sequence) once it has stopped, here or in advance(); not if it is
    /// finished by then.
    template <class Parked>
    void park(const ticket& t, Parked&& parked) {
        command({.what = command_type::kind::park, .ticket = t}, parked);
    }
    bool abort(const ticket& t) {
        if (!left(t)) return false;
        command({.what = command_type::kind::abort, .ticket = t});
        return true;
    }
    /// f(ticket, tokens of its response) for all that runs, if the stage counts them; of a quantum all of them.
    template <class F>
        requires detail::counts_drawn<Stage>
    void drawn(double, F&& f) const {
        for (const ticket& t : live_) f(t, *loop_.drawn(t));
    }
    void install(const weights& w) {
        version_ = w.version;
        command({.what = command_type::kind::install, .weights = w});
    }
    /// What the stage said at its last install(), once.
    double elasticity() { return std::exchange(elasticity_, untold); }
    /// Seconds until what is asked of it takes effect.
    double until_settled() const { return runs_ ? left_ : 0; }
    /// 0: a quantum is to begin.
    double next() const { return runs_ ? left_ : stage_->running() > 0 || may_spare() ? 0 : forever; }
    /// Whether nothing is to come of it but spare work.
    bool spares() const { return runs_ ? spare_ && waiting_.empty() : stage_->running() == 0 && may_spare(); }
    /// Whether it does spare work now.
    bool sparing() const { return runs_ && spare_; }

    /// Calls finished(ticket, token_versions, sequence) for what a quantum has finished that ends within dt, and
    /// likewise parked().
    template <class Out>
    void advance(double dt, Out&& finished) {
        advance(dt, finished, nothing);
    }
    template <class Out, class Parked>
    void advance(double dt, Out&& finished, Parked&& parked) {
        if (!runs_ && !begin()) return;
        left_ -= dt;
        if (left_ > 1e-9 * length_) return; // the caller's clock rounds
        runs_ = false;
        if (std::exchange(spare_, false)) {
            for (command_type& c : std::exchange(waiting_, {})) carry_out(c, parked);
            return;
        }
        loop_.tell(length_, [&](auto&& r) {
            if (r.failed) std::rethrow_exception(r.failed);
            if (!left(r.what.ticket)) return; // aborted during this quantum
            if (r.what.what == event::kind::parked)
                parked(r.what.ticket, r.what.versions, r.sequence);
            else
                finished(r.what.ticket, r.what.versions, r.sequence);
        });
        for (command_type& c : std::exchange(waiting_, {})) carry_out(c, parked);
    }

    template <class A>
        requires detail::lists_fields<Stage, A>
    void fields(A& a) {
        a(live_);
        detail::list_fields(a, waiting_, [&](command_type& c) {
            a(c.what, c.weights, c.ticket);
            detail::payload_fields(a, c.prefix);
        });
        a(runs_, spare_, spared_, left_, length_, elasticity_, version_, loop_, *stage_);
        detail::needs(!runs_ || (left_ >= 0 && length_ >= left_ && length_ < forever),
                      "more is left of a quantum than there was");
    }

private:
    // True if it ran here.
    bool left(const ticket& t) {
        const auto at = std::find(live_.begin(), live_.end(), t);
        if (at == live_.end()) return false;
        live_.erase(at);
        return true;
    }
    static void nothing(const ticket&, const token_versions&, const std::shared_ptr<const rolled_type>&) {}
    void command(command_type c) { command(std::move(c), nothing); }
    template <class Parked>
    void command(command_type c, Parked&& parked) {
        if (runs_)
            waiting_.push_back(std::move(c));
        else
            carry_out(c, parked);
    }
    template <class Parked>
    void carry_out(command_type& c, Parked&& parked) {
        spared_ = spared_ && c.what != command_type::kind::start && c.what != command_type::kind::install;
        loop_.obey(c, [&](auto&& r) {
            if (r.failed) std::rethrow_exception(r.failed);
            if (r.what.what == event::kind::synced) elasticity_ = r.what.elasticity;
            if (r.what.what == event::kind::parked && left(r.what.ticket))
                parked(r.what.ticket, r.what.versions, r.sequence);
        });
    }
    bool may_spare() const { return detail::spares<Stage> && !spared_ && version_ >= 0; }
    // False: there is nothing to do.
    bool begin() {
        if (stage_->running() > 0) {
            loop_.run();
            if (loop_.failed()) std::rethrow_exception(loop_.failed());
            length_ = seconds_(loop_.work());
        } else {
            if (!may_spare()) return false;
            const auto did = loop_.spare([](auto&& r) {
                if (r.failed) std::rethrow_exception(r.failed);
            });
            spare_ = did.has_value(), spared_ = !spare_;
            if (!did) return false;
            length_ = spare_seconds_(*did);
        }
        if (!(length_ > 0 && length_ < forever))
            throw invalid_input(spare_ ? "spare" : "step",
                                "takes " + std::to_string(length_) + " seconds; must be finite and positive");
        left_ = length_;
        return runs_ = true;
    }

    std::shared_ptr<Stage> stage_;
    rollout_actor<Stage, Scored> loop_;
    std::function<double(const work_type&)> seconds_;
    std::function<double(const spare_type&)> spare_seconds_;
    std::vector<ticket> live_; // started and neither finished nor aborted
    std::vector<command_type> waiting_;
    bool runs_ = false;            // a quantum
    bool spare_ = false;           // of spare work
    bool spared_ = false;          // there is none left
    double left_ = 0, length_ = 0; // of it
    double elasticity_ = untold;
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
    using work_type = detail::work_of<Rollout>;
    using spare_type = detail::spare_of<Rollout>;
    using costs_type = stage_costs<rolled_type, work_type, spare_type>;

    /// `make(worker)` makes a rollout stage, for a worker that comes for the first time or again.
    timed_stages(std::function<std::shared_ptr<Rollout>(std::int32_t)> make,
                 std::vector<std::shared_ptr<Teacher>> teachers, std::shared_ptr<Learner> learner,
                 costs_type costs = {})
        : make_(std::move(make)), teachers_(std::move(teachers)), learner_(std::move(learner)),
          costs_(std::move(costs)), calls_(teachers_.size()) {}

    timed_rollout<Rollout, scored_type> rollout(std::int32_t worker) {
        return {make_(worker), worker, [step = costs_.step, worker](const work_type& w) { return step(worker, w); },
                [spare = costs_.spare, worker](const spare_type& w) { return spare(worker, w); }};
    }
    void start(timed_rollout<Rollout, scored_type>& w, const ticket& t, version_t start, bool keeps) {
        w.start(t, payloads_.start(t, start, keeps));
    }
    void parked(const ticket& t, const token_versions&, std::shared_ptr<const rolled_type> prefix) {
        payloads_.parked(t, std::move(prefix));
    }
    void rolled(const ticket& t, const token_versions& versions, std::shared_ptr<const rolled_type> sequence) {
        payloads_.rolled(t, versions, std::move(sequence));
    }
    double teacher(std::uint64_t, std::int32_t worker, std::span<const ticket> tickets) {
        auto& call = calls_.at(static_cast<std::size_t>(worker));
        call.clear();
        for (const ticket& t : tickets) call.push_back(given(t, false).rolled);
        return costs_.score(call);
    }
    /// Which were scored.
    std::vector<ticket> scored(std::uint64_t, std::int32_t worker, std::span<const ticket> tickets) {
        const auto number = static_cast<std::size_t>(worker);
        const std::span<const std::shared_ptr<const rolled_type>> call(calls_.at(number));
        auto scores = teachers_[number]->score(call, std::stop_token{});
        if (scores.size() != tickets.size() || call.size() != tickets.size())
            throw std::runtime_error("opd: score() answers for each sequence");
        std::vector<ticket> done;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (!scores[i]) continue;
            done.push_back(tickets[i]);
            payloads_.scored(tickets[i], std::move(scores[i])); // unless it is stale, and gone meanwhile
        }
        return done;
    }
    double learner(std::uint64_t, const weights&, std::span<const ticket> tickets) {
        batch_.clear();
        std::vector<std::shared_ptr<const rolled_type>> rolled;
        for (const ticket& t : tickets) {
            batch_.push_back(given(t, true));
            rolled.push_back(batch_.back().rolled);
        }
        return costs_.train(rolled);
    }
    index_t learned(std::uint64_t job, const weights& from, std::span<const ticket>) {
        using view = typename conveyor<rolled_type, scored_type>::view_type;
        return static_cast<index_t>(
            learner_->train(std::span<const view>(batch_), train_call{job, from}, std::stop_token{}));
    }
    double sync(std::int32_t worker, const weights& w) const { return costs_.install(worker, w.version); }

    template <class A>
    void fields(A& a) {
        if constexpr (detail::lists_fields<rolled_type, A> && detail::lists_fields<scored_type, A>) {
            detail::shared_fields<rolled_type> rolled;
            detail::shared_fields<scored_type> scored;
            payloads_.fields(a, rolled, scored);
            detail::list_fields(a, batch_, [&](auto& v) { payloads_.view_fields(a, v, rolled, scored, false); });
            auto teachers = static_cast<std::uint64_t>(calls_.size());
            a(teachers);
            if (teachers != calls_.size()) throw invalid_input("snapshot", "is of another number of teachers");
            for (auto& call : calls_) detail::list_fields(a, call, [&](auto& p) { rolled(a, p, false); });
        } else {
            throw std::logic_error("opd: what these stages send has no fields(): their driver has no snapshots");
        }
    }

private:
    const auto& given(const ticket& t, bool scored) const {
        const auto& v = payloads_.view(t);
        if (!v.rolled || (scored && !v.scored))
            throw std::logic_error("opd: sequence " + std::to_string(t.sample) + " has no payload, or no score");
        return v;
    }
    std::function<std::shared_ptr<Rollout>(std::int32_t)> make_;
    std::vector<std::shared_ptr<Teacher>> teachers_;
    std::shared_ptr<Learner> learner_;
    costs_type costs_;
    conveyor<rolled_type, scored_type> payloads_;
    std::vector<std::vector<std::shared_ptr<const rolled_type>>> calls_;
    std::vector<sequence_view<rolled_type, scored_type>> batch_;
};

} // namespace opd::sched
