// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A witness that does not trust a scheduler: it watches events and actions alone, keeps its own account of every
// sequence, lane, call, weight and permit, and throws `violation` when a promise is broken.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"
#include "support/dice.hpp"

namespace opd::test {

using namespace opd::sched;

/// The largest start lag that the schedule promises; none under capacity and areal.
inline std::optional<version_t> promised_lag(const plan& p, index_t most_permits) {
    if (!p.streaming) return p.depth;
    switch (p.policy) {
    case staleness_policy::capacity:
    case staleness_policy::areal:
        return std::nullopt;
    case staleness_policy::cohort_fifo:
    case staleness_policy::in_order:
        return (most_permits + p.batch - 1) / p.batch - 1;
    default:
        return p.depth;
    }
}

class witness {
public:
    explicit witness(const sched::settings& s)
        : settings_(s), plan_(plan_of(s)), permits_(plan_.permits), most_permits_(plan_.permits) {}

    /// For mutations of the witness itself: it then believes in another promise.
    index_t permits_believed_less = 0;
    version_t lag_believed_less = 0;
    index_t room_believed_more = 0; ///< permits, and a scoring call that is smaller by as much

    std::uint64_t hash() const { return hash_; }
    std::int64_t consumed() const { return consumed_; }
    std::int64_t failed() const { return failed_; }
    version_t version() const { return version_; }
    version_t largest_lag() const { return largest_lag_; }
    double mean_lag() const { return consumed_ ? static_cast<double>(lag_sum_) / static_cast<double>(consumed_) : 0; }
    bool finished() const { return finished_; }
    /// Samples of every step, in the order in which the learner got them.
    const std::vector<std::vector<sample_t>>& batches() const { return batches_; }

    template <class Scheduler>
    void event(double t, const sched::event& e, const actions& out, const Scheduler& s) {
        require(t >= now_, "time runs backwards");
        now_ = t;
        mix(std::bit_cast<std::uint64_t>(t));
        mix(static_cast<std::uint64_t>(e.what));
        was_open_ = gate_open();
        const std::int64_t admitted = admitted_;
        hear(e, s);
        if (s.failed() && !stopped_) stop(); // as if it had been told to
        for (const action& a : out.items) see(a, out);
        s.check_invariants();
        if (plan_.automatic) {
            const index_t chosen = s.resolved().permits;
            require(chosen == permits_ || std::any_of(out.items.begin(), out.items.end(), is_step),
                    "automatic permits changed between two steps");
            require(chosen >= plan_.batch && chosen <= (plan_.depth + 1) * plan_.batch,
                    "automatic permits beyond the bound");
            require(chosen % settings_.group == 0 || chosen == (plan_.depth + 1) * plan_.batch,
                    "automatic permits for a part of a group");
            permits_ = chosen;
            most_permits_ = std::max(most_permits_, permits_);
        }
        compare(s);
        admitted_ = s.totals().admitted;
        if (admitted_ != admitted) {
            whole_.emplace_back(static_cast<sample_t>(admitted), static_cast<sample_t>(admitted_));
            require(plan_.streaming || admitted_ - admitted <= plan_.batch, "more than a batch at a time");
            require(was_open_ || gate_open(), "admitted while the gate was closed");
            require(!paused_ && !closed_, "admitted while paused or closed");
            require((admitted_ - admitted) % settings_.group == 0, "half a group was admitted");
            require(s.where().outstanding() <= cap() - permits_believed_less, "more outstanding than permits");
        }
        if (!finished_ && gate_open()) nobody_idles(s);
        if (plan_.policy == staleness_policy::drop && plan_.streaming)
            for (const sequence& q : sequences_)
                require(!started(q) || q.where == training || q.start >= version_ - plan_.depth,
                        "a stale sequence was kept");
    }

    /// All workers are gone, and with them what they did; a synchronisation that was not over never happened.
    void crash() {
        for (auto& all : workers_)
            for (auto& w : all) w = {.life = w.life};
        for (sequence& q : sequences_) {
            if (q.where == rollout) q.where = waiting;
            if (q.where == scoring) q.where = rolled;
            if (q.where == training) q.where = ready;
            if (started(q) && q.where != rollout && q.versions.newest > version_) q.where = waiting; // weights are gone
            if (q.where == waiting) q.kept = false;
        }
        if (!plan_.streaming && plan_.depth == 0 && whole_.size() == static_cast<std::size_t>(version_) + 2) {
            std::erase_if(later_, [&](const auto& l) { return l.second == version_ + 1; }); // it has its own back
            whole_.pop_back();
        }
        jobs_.clear();
        training_.clear();
        training_job_.reset();
        learned_ = syncing_ = remaking_ = false;
    }

private:
    static bool is_step(const action& a) { return a.what == action::kind::step; }
    enum place { unseen, waiting, rollout, rolled, scoring, ready, training, consumed_place, failed_place };
    struct sequence {
        place where = unseen;
        version_t start = -1;
        ticket t;
        token_versions versions;
        std::uint64_t job = 0;
        bool kept = false; // it goes on from what it had when it was parked
        bool lost = false; // and was drawn again
    };
    struct worker {
        bool up = false;
        incarnation_t life = 0; // the present one, or the last that is over
        std::int32_t slots = 0, jobs = 0;
        bool answers = false;
        std::uint64_t has = 0; // what made the weights that it installed
        std::map<std::int32_t, ticket> lanes = {};
    };
    struct job {
        std::int32_t worker;
        std::vector<ticket> tickets;
    };

    static void require(bool holds, const char* what) {
        if (!holds) throw violation(what);
    }
    void mix(std::uint64_t x) {
        hash_ = (hash_ ^ x) * 0x9E3779B97F4A7C15ull;
        hash_ ^= hash_ >> 29;
    }
    void mix(const ticket& t) {
        mix(t.sample);
        mix(std::uint64_t{t.attempt} << 32 | t.slot);
        mix(static_cast<std::uint64_t>(t.worker) << 32 | static_cast<std::uint32_t>(t.lane));
    }
    bool gate_open() const { return !learned_ && !syncing_ && !remaking_; }
    static bool started(const sequence& q) { return q.where >= rollout && q.where <= training; }
    sequence& of(const ticket& t) {
        if (t.sample >= sequences_.size()) sequences_.resize(t.sample + 1);
        return sequences_[t.sample];
    }
    worker& of(stage s, std::int32_t number) {
        auto& all = workers_[static_cast<std::size_t>(s)];
        require(number >= 0, "a worker has a number");
        if (static_cast<std::size_t>(number) >= all.size()) all.resize(static_cast<std::size_t>(number) + 1);
        return all[static_cast<std::size_t>(number)];
    }
    bool runs(const ticket& t) { return of(t).where == rollout && of(t).t == t; }

    void gone(stage s, std::int32_t number) {
        worker& w = of(s, number);
        if (!w.up) return;
        w = {.life = w.life};
        if (s == stage::rollout) {
            for (sequence& q : sequences_)
                if (q.where == rollout && q.t.worker == number) q.where = waiting;
        } else if (s == stage::teacher) {
            std::erase_if(jobs_, [&](const auto& j) {
                if (j.second.worker != number) return false;
                for (const ticket& t : j.second.tickets)
                    if (of(t).where == scoring && of(t).job == j.first) of(t).where = rolled;
                return true;
            });
        } else if (!learned_) {
            training_job_.reset(); // the same again
        }
    }
    /// What is said in a life that is over is not heard; a new life ends the one before.
    bool heard(const sched::event& e) {
        worker& w = of(e.stage, e.worker);
        if (w.up && e.incarnation == w.life) return true;
        if (e.incarnation <= w.life) return false;
        gone(e.stage, e.worker);
        if (e.what == sched::event::kind::worker_up) return true;
        w.life = e.incarnation - (e.what != sched::event::kind::worker_down);
        return false;
    }

    template <class Scheduler>
    void hear(const sched::event& e, const Scheduler& s) {
        using kind = sched::event::kind;
        if (e.from_worker() && !heard(e)) return;
        switch (e.what) {
        case kind::worker_up: {
            worker& w = of(e.stage, e.worker);
            if (!w.up) w = {};
            w.up = true;
            w.life = e.incarnation;
            w.slots = e.slots;
            break;
        }
        case kind::worker_down:
            gone(e.stage, e.worker);
            break;
        case kind::rolled_out:
        case kind::rollout_failed:
        case kind::aborted:
        case kind::parked: {
            worker& w = of(stage::rollout, e.ticket.worker);
            const auto lane = w.lanes.find(e.ticket.lane);
            const bool mine = lane != w.lanes.end() && lane->second == e.ticket;
            if (runs(e.ticket)) {
                require(mine, "a running sequence has a lane");
                sequence& q = of(e.ticket);
                q.where = e.what == kind::rolled_out ? rolled : waiting;
                const bool had = q.kept;
                if (e.what == kind::parked) q.kept = e.versions.tokens > 0;
                if (e.what == kind::rolled_out || (e.what == kind::parked && q.kept)) {
                    require(!had || e.versions.tokens >= q.versions.tokens, "tokens were lost");
                    q.versions = e.versions;
                    require(q.versions.oldest >= q.start && q.versions.newest >= q.versions.oldest &&
                                q.versions.newest <= version_ + (syncing_ || remaking_),
                            "versions along a sequence");
                }
            }
            if (mine) w.lanes.erase(lane);
            break;
        }
        case kind::scored:
        case kind::score_failed: {
            const auto at = jobs_.find(e.job);
            if (at == jobs_.end() || at->second.worker != e.worker) break;
            for (const ticket& t : at->second.tickets) {
                if (of(t).where != scoring || of(t).job != e.job) continue; // stale, and gone meanwhile
                const bool named =
                    e.tickets.empty() || std::find(e.tickets.begin(), e.tickets.end(), t) != e.tickets.end();
                of(t).where = e.what == kind::scored && named ? ready : rolled;
            }
            --of(stage::teacher, e.worker).jobs;
            jobs_.erase(at);
            break;
        }
        case kind::learned:
            if (training_job_ == e.job && !learned_) {
                learned_ = true;
                made_.insert(e.job);
                if (!remaking_) cursor_at_gate_ = s.cursor();
            }
            break;
        case kind::learn_failed:
            if (training_job_ == e.job && !learned_) training_job_.reset();
            break;
        case kind::synced: {
            worker& w = of(stage::rollout, e.worker);
            require(made_.contains(e.job), "weights that nobody made");
            w.answers = w.answers || e.job == (syncing_ ? *training_job_ : weights_); // else nobody waits for it yet
            w.has = std::max(w.has, e.job);
            break;
        }
        case kind::weights_lost:
            if (!learned_ || training_job_ != e.job) break;
            remaking_ = true;
            learned_ = syncing_ = false;
            training_job_.reset();
            break;
        case kind::tick:
            break;
        case kind::pause:
            paused_ = true;
            break;
        case kind::resume:
            paused_ = false;
            break;
        case kind::park:
            break;
        case kind::resize:
            permits_ = e.count;
            most_permits_ = std::max(most_permits_, permits_);
            break;
        case kind::close:
            closed_ = true;
            break;
        case kind::stop:
            stop();
            break;
        case kind::payload_lost:
            lose(e.tickets.empty() ? std::span(&e.ticket, 1) : e.tickets, e.job, s);
            break;
        }
    }
    template <class Scheduler>
    void lose(std::span<const ticket> tickets, std::uint64_t by, const Scheduler& s) {
        const bool trains = training_job_ == by && !learned_ && by != 0;
        std::vector<sequence*> all;
        for (const ticket& t : tickets) {
            sequence& q = of(t);
            const bool has = (q.where >= rolled && q.where <= training) || (q.where != unseen && q.kept);
            if (has && q.where <= training && q.t.attempt == t.attempt && (q.where != training || trains))
                all.push_back(&q);
        }
        const auto in_training = [](const sequence* q) { return q->where == training; };
        if (std::any_of(all.begin(), all.end(), in_training)) {
            training_job_.reset();
            if (!remaking_)
                for (const ticket& t : std::exchange(training_, {})) of(t).where = ready;
        }
        for (sequence* q : all) {
            q->lost = true;
            q->kept = false;
            if (q->where == training) { // the version comes without it
                std::erase_if(training_, [&](const ticket& t) { return t.sample == q->t.sample; });
                bool goes_on = false;
                s.for_each([&](const outstanding_sequence& o) { goes_on |= o.ticket.sample == q->t.sample; });
                if (goes_on && !plan_.streaming) {
                    if (whole_.size() == static_cast<std::size_t>(version_) + 1) whole_.emplace_back();
                    later_[q->t.sample] = version_ + 1;
                    put_off_ = true;
                }
            }
            if (q->where >= rolled) q->where = waiting;
        }
    }
    void stop() {
        closed_ = stopped_ = true;
        if (learned_) return; // the update was made: its step is
        remaking_ = false;
        training_.clear();
        training_job_.reset();
    }

    void see(const action& a, const actions& out) {
        mix(static_cast<std::uint64_t>(a.what));
        mix(a.ticket);
        mix(static_cast<std::uint64_t>(a.version));
        mix(a.job);
        mix(static_cast<std::uint64_t>(a.worker));
        require(!finished_ || a.what == action::kind::sync || a.what == action::kind::lost, "work after the end");
        mix(a.from);
        switch (a.what) {
        case action::kind::start: {
            sequence& q = of(a.ticket);
            worker& w = of(stage::rollout, a.ticket.worker);
            require(q.where == unseen || q.where == waiting, "started what was not waiting");
            require(a.ticket.attempt > (q.where == unseen ? 0 : q.t.attempt), "attempts count up");
            require(a.version == version_, "started on another version than the present one");
            require(!paused_, "started while paused");
            require(gate_open() || (!plan_.streaming && !syncing_ && a.ticket.sample < cursor_at_gate_),
                    "started between the end of an update and the end of its synchronisation");
            require(w.up && w.answers && w.has == weights_, "started on a worker without the present weights");
            require(a.ticket.incarnation == w.life, "started in another life");
            require(a.ticket.lane >= 0 && a.ticket.lane < w.slots && !w.lanes.contains(a.ticket.lane),
                    "started on a lane that is taken");
            w.lanes[a.ticket.lane] = a.ticket;
            q.where = rollout;
            if (!q.kept) q.start = version_;
            q.t = a.ticket;
            break;
        }
        case action::kind::abort:
            if (runs(a.ticket)) of(a.ticket).where = waiting;
            break;
        case action::kind::park:
            require(runs(a.ticket), "asked to park what does not run");
            break;
        case action::kind::score: {
            worker& w = of(stage::teacher, a.worker);
            require(w.up && w.jobs < w.slots, "a scoring call on a teacher that has no room");
            ++w.jobs;
            require(a.count > 0 && static_cast<index_t>(a.count) <= settings_.teacher_batch, "size of a scoring call");
            job& j = jobs_[a.job];
            require(j.tickets.empty(), "a job's number is used twice");
            j.worker = a.worker;
            for (const ticket& t : out.of(a)) {
                mix(t);
                require(of(t).where == rolled && of(t).t.sample == t.sample, "scored what was not rolled out");
                of(t).where = scoring;
                of(t).job = a.job;
                j.tickets.push_back(t);
            }
            break;
        }
        case action::kind::train: {
            require(!training_job_ && (gate_open() || remaking_), "two updates at a time");
            require(of(stage::learner, 0).up, "an update without a learner");
            require(a.version == version_ && a.from == weights_, "an update of other weights");
            training_job_ = a.job;
            const auto tickets = out.of(a);
            if (remaking_ || !training_.empty()) {
                require(std::equal(tickets.begin(), tickets.end(), training_.begin(), training_.end(),
                                   [](const ticket& x, const ticket& y) { return x.sample == y.sample; }),
                        "another batch than the one that was asked for before");
                break;
            }
            training_.assign(tickets.begin(), tickets.end());
            for (std::size_t i = 0; i < training_.size(); ++i) {
                mix(training_[i]);
                require(i == 0 || training_[i - 1].sample < training_[i].sample, "a batch is not sorted");
                require(of(training_[i]).where == ready, "trained on what is not ready");
                of(training_[i]).where = training;
            }
            check_size();
            break;
        }
        case action::kind::sync: {
            require(a.worker < 0 || of(stage::rollout, a.worker).up, "weights for a worker that is gone");
            require(made_.contains(a.job), "weights that nobody made");
            if (a.worker < 0) {
                require(learned_ && a.version == version_ + 1 && a.job == training_job_,
                        "weights that are not there yet");
                syncing_ = true;
                if (plan_.streaming && plan_.update != weight_update::keep)
                    for (sequence& q : sequences_) q.kept = q.kept && q.where != waiting;
            } else if (syncing_) {
                require(a.version == version_ + 1 && a.job == training_job_, "other weights than are being installed");
            } else {
                require(a.version == version_ && a.job == weights_, "other weights than those of the version");
            }
            break;
        }
        case action::kind::step:
            step(a, out);
            break;
        case action::kind::fail: {
            sequence& q = of(a.ticket);
            require(q.where != consumed_place && q.where != failed_place, "failed what was over");
            require(a.why != failure::stopped || stopped_, "a reason that is none");
            require(a.why != failure::stale ||
                        (plan_.policy == staleness_policy::drop && plan_.streaming && q.start < version_ - plan_.depth),
                    "dropped what was not stale");
            if (q.where == training) // with its update
                std::erase_if(training_, [&](const ticket& t) { return t.sample == a.ticket.sample; });
            q.where = failed_place;
            ++failed_;
            break;
        }
        case action::kind::lost:
            require(of(a.stage, a.worker).up, "lost a worker that was gone");
            require(of(a.stage, a.worker).life == a.incarnation, "lost another life");
            gone(a.stage, a.worker);
            break;
        case action::kind::finished:
            end();
            break;
        }
    }

    // Full, unless it is the last; whole batches are exactly those that were admitted together and did not fail.
    void check_size() const {
        if (plan_.streaming) {
            if (static_cast<index_t>(training_.size()) == plan_.batch) return;
            require(!training_.empty() && static_cast<index_t>(training_.size()) < plan_.batch, "size of a batch");
            for (const sequence& q : sequences_)
                require(q.where == unseen || q.where >= training, "a short batch, and it was not the last");
            return;
        }
        require(static_cast<std::size_t>(version_) < whole_.size(), "a batch that was never admitted");
        const auto [first, last] = whole_[static_cast<std::size_t>(version_)];
        std::size_t i = 0;
        std::vector<sample_t> members;
        for (const auto& [n, version] : later_)
            if (version == version_) members.push_back(n);
        for (sample_t n = first; n < last; ++n)
            if (!later_.contains(n)) members.push_back(n);
        for (const sample_t n : members) {
            const place where = n < sequences_.size() ? sequences_[n].where : unseen;
            if (where == failed_place || where == unseen) continue;
            require(i < training_.size() && training_[i].sample == n, "a batch is not whole");
            ++i;
        }
        require(i == training_.size(), "a batch of strangers");
    }

    // What may be outstanding. AReaL's rule counts updates, so that after a short batch it is more than (tau + 1)·B.
    index_t cap() const {
        if (!plan_.streaming || plan_.policy != staleness_policy::areal) return permits_;
        return (plan_.depth + version_ + 1) * plan_.batch - consumed_;
    }
    // Who could work and may, does.
    template <class Scheduler>
    void nobody_idles(const Scheduler& s) const {
        const census c = s.where();
        const bool lane = std::any_of(workers_[0].begin(), workers_[0].end(), [&](const worker& w) {
            const auto taken =
                std::count_if(w.lanes.begin(), w.lanes.end(), [&](const auto& l) { return l.first < w.slots; });
            return w.up && w.answers && w.has == weights_ && taken < w.slots;
        });
        if (lane && !paused_) {
            require(c.waiting == 0, "a sequence waits while a lane is vacant");
            index_t wanted = std::numeric_limits<index_t>::max();
            if (settings_.sequences > 0) wanted = settings_.sequences - consumed_ - c.outstanding();
            if (settings_.available > 0)
                wanted = std::min(wanted, settings_.available - static_cast<index_t>(s.cursor()));
            if (plan_.streaming && plan_.policy != staleness_policy::areal && !closed_ && wanted > 0)
                require(permits_ - c.outstanding() < settings_.group,
                        "a lane is vacant, permits are free, nothing starts");
        }
        const bool teacher = std::any_of(workers_[1].begin(), workers_[1].end(),
                                         [](const worker& w) { return w.up && w.jobs < w.slots; });
        if (plan_.streaming && teacher)
            require(c.queued < settings_.teacher_batch - room_believed_more,
                    "a full call waits while a teacher is idle");
        const bool learner = !workers_[2].empty() && workers_[2][0].up && !training_job_;
        const bool any_batch = plan_.policy == staleness_policy::capacity || plan_.policy == staleness_policy::areal ||
                               plan_.policy == staleness_policy::drop || plan_.policy == staleness_policy::retry;
        if (plan_.streaming && learner && any_batch)
            require(c.ready < plan_.batch, "a batch waits while the learner is idle");
    }
    void step(const action& a, const actions& out) {
        require(a.version == version_ + 1, "versions count up by one");
        require(learned_ && (syncing_ || stopped_), "a step without an update");
        require(a.job == training_job_, "a step of another update");
        for (const worker& w : workers_[0])
            require(stopped_ || !w.answers || w.has == a.job, "the gate opened before everybody had the weights");
        const auto list = out.consumed_by(a);
        require(list.size() == training_.size(), "consumed is not what was trained on");
        cap_sum_ += plan_.policy == staleness_policy::areal ? cap()
                    : plan_.automatic                       ? admitted_ - consumed_ - failed_ // what is out
                                                            : most_permits_;
        version_t least = std::numeric_limits<version_t>::max();
        for (std::size_t i = 0; i < list.size(); ++i) {
            mix(list[i].ticket);
            sequence& q = of(list[i].ticket);
            require(list[i].ticket.sample == training_[i].sample && q.where == training, "consumed a stranger");
            require(list[i].start == q.start && list[i].versions == q.versions, "versions of a consumed sequence");
            q.where = consumed_place;
            const version_t lag = version_ - q.start;
            require(lag >= 0, "consumed before its start");
            least = std::min(least, lag);
            largest_lag_ = std::max(largest_lag_, lag);
            lag_sum_ += lag;
            ++consumed_;
        }
        ++version_;
        if (const auto most = promised_lag(plan_, most_permits_))
            require(largest_lag_ <= *most - lag_believed_less, "a sequence was staler than its policy allows");
        else // every sequence is outstanding at lag + 1 steps, and at most so many are at each
            require(lag_sum_ + consumed_ <= cap_sum_ - lag_believed_less * version_, "the mean lag exceeds M/B - 1");
        // exactly, but for batches at the end that make up for failed sequences
        const bool again = std::any_of(list.begin(), list.end(), [&](const auto& c) { return of(c.ticket).lost; });
        if (!plan_.streaming && !list.empty() && !again &&
            whole_[static_cast<std::size_t>(version_ - 1)].second <= static_cast<sample_t>(settings_.sequences))
            require(put_off_ ? least <= std::min<version_t>(version_ - 1, plan_.depth)
                             : least == std::min<version_t>(version_ - 1, plan_.depth),
                    "the lag of whole batches is not min(b, k)");
        batches_.emplace_back();
        for (const ticket& t : training_) batches_.back().push_back(t.sample);
        training_.clear();
        training_job_.reset();
        weights_ = a.job;
        learned_ = syncing_ = remaking_ = false;
        was_open_ = true;
        if (plan_.policy == staleness_policy::retry && plan_.streaming)
            for (sequence& q : sequences_) {
                if (q.start < version_ - plan_.depth) q.kept = false;
                if (started(q) && q.start < version_ - plan_.depth && q.where != rollout)
                    q.where = waiting; // rollout: by abort
            }
    }

    void end() {
        finished_ = true;
        for (const sequence& q : sequences_)
            require(q.where >= consumed_place || q.where == unseen, "finished with sequences outstanding");
        require(stopped_ || closed_ ||
                    (consumed_ >= settings_.sequences && consumed_ < settings_.sequences + settings_.group) ||
                    consumed_ + failed_ == settings_.available,
                "finished too early");
    }

    // What the scheduler says of itself.
    template <class Scheduler>
    void compare(const Scheduler& s) {
        require(s.version() == version_ && s.gate_open() == gate_open(), "version and gate");
        require(s.totals().consumed == consumed_ && s.totals().failed == failed_, "consumed and failed");
        require(s.finished() == finished_, "finished");
        std::int64_t outstanding = 0, here = 0;
        s.for_each([&](const outstanding_sequence& o) {
            using at = outstanding_sequence::place;
            ++outstanding;
            const place where = o.ticket.sample < sequences_.size() ? sequences_[o.ticket.sample].where : unseen;
            here += where != unseen;
            const place expected = o.where == at::rollout    ? rollout
                                   : o.where == at::queued   ? rolled
                                   : o.where == at::scoring  ? scoring
                                   : o.where == at::ready    ? ready
                                   : o.where == at::training ? training
                                                             : waiting;
            require(where == expected || (where == unseen && expected == waiting), "a sequence is somewhere else");
        });
        require(s.totals().admitted == outstanding + consumed_ + failed_, "a sequence was lost");
        std::int64_t seen = 0;
        for (const sequence& q : sequences_) seen += q.where >= waiting && q.where <= training;
        require(seen == here, "a sequence that was started has no permit");
        if (finished_) {
            require(static_cast<sample_t>(consumed_ + failed_) == s.cursor(), "every sequence has one end");
            for (const sequence& q : sequences_) require(q.where >= consumed_place, "every sequence has an end");
        }
    }

    sched::settings settings_;
    plan plan_;
    index_t permits_, most_permits_;
    double now_ = 0;
    std::uint64_t hash_ = 0;
    version_t version_ = 0, largest_lag_ = 0;
    std::int64_t lag_sum_ = 0, cap_sum_ = 0, consumed_ = 0, failed_ = 0, admitted_ = 0;
    sample_t cursor_at_gate_ = 0;
    std::set<std::uint64_t> made_ = {0}; // weights that were published, by their job
    std::uint64_t weights_ = 0;          // of the version
    bool remaking_ = false;              // weights were lost before all had them
    bool learned_ = false, syncing_ = false, paused_ = false, closed_ = false, stopped_ = false, finished_ = false;
    bool was_open_ = true; // the gate, at some time during the event
    std::vector<sequence> sequences_;
    std::array<std::vector<worker>, stage_count> workers_;
    std::map<std::uint64_t, job> jobs_;
    std::optional<std::uint64_t> training_job_;
    std::vector<ticket> training_;
    std::vector<std::vector<sample_t>> batches_;
    std::vector<std::pair<sample_t, sample_t>> whole_; // admissions: first, last + 1
    std::map<sample_t, version_t> later_;              // that left their batch, and which they are in
    bool put_off_ = false; // one has: it holds a permit a step longer, so a batch may start later, and be less stale
};

} // namespace opd::test
