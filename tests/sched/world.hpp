// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A world around a scheduler: everybody who owes it an answer, and what can go wrong with them. `choices` lists what may
// happen next, `take` lets it happen. Checked after every event: the scheduler's invariants; starts only at the present
// version, on a worker that has it, on a free lane, with the gate open; nothing consumed or given up twice; the policy's
// bound for every consumed sequence. A broken rule throws.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/sched/scheduler.hpp"

namespace opd::test {

using namespace opd::sched;
using opd::index_t;
using policy = staleness_policy;

struct world_options {
    settings s;
    std::vector<std::int32_t> slots = {2}; // of the rollout workers
    int faults = 1;
    bool keep_prefixes = false; // of the crashes
    bool resizes = false;       // the number of permits changes
    // what the explorer must find
    bool loses_replies = false;      // a hung attempt with no deadline
    bool lies_about_weights = false; // answers a synchronisation before it is done
    index_t promised = -1;           // a bound that does not hold
};

struct attempt {
    ticket t;
    bool aborted = false, hung = false;
    template <class A>
    void fields(A& a) {
        a(t.sample, t.slot, t.attempt, t.worker, t.lane, aborted, hung);
    }
};
struct call {
    std::uint64_t job = 0;
    std::int32_t worker = 0;
    std::vector<ticket> tickets;
};
struct installation {
    version_t version = 0;
    timer deadline;
};
struct rollout_worker {
    bool up = false;
    version_t installed = -1;
    std::vector<installation> owed;
};

struct finding : std::runtime_error {
    using std::runtime_error::runtime_error;
};
inline void require(bool holds, const char* what) {
    if (!holds) throw finding(what);
}

/// One thing that may happen next.
struct choice {
    enum kind {
        rolled,
        crossed,
        aborted,
        scored,
        learned,
        installed,
        flush,
        abort_timer,
        teacher_up,
        learner_up,
        rollout_up,
        resume,
        first_fault,
        roll_fails = first_fault,
        roll_hangs,
        roll_vanishes,
        score_fails,
        score_partly,
        score_hangs,
        learn_fails,
        learn_hangs,
        install_hangs,
        rollout_dies,
        teacher_dies,
        learner_dies,
        twice_rolled,
        twice_scored,
        twice_learned,
        crash,
        pause,
        close,
        resize
    } what;
    std::size_t which = 0;
};
inline const char* name_of(choice::kind k) {
    constexpr const char* names[] = {"rolled",        "crossed",       "aborted",      "scored",       "learned",
                                     "installed",     "flush",         "abort_timer",  "teacher_up",   "learner_up",
                                     "rollout_up",    "resume",        "roll_fails",   "roll_hangs",   "roll_vanishes",
                                     "score_fails",   "score_partly",  "score_hangs",  "learn_fails",  "learn_hangs",
                                     "install_hangs", "rollout_dies",  "teacher_dies", "learner_dies", "twice_rolled",
                                     "twice_scored",  "twice_learned", "crash",        "pause",        "close",
                                     "resize"};
    return names[k];
}

class world {
public:
    explicit world(const world_options& o)
        : s(o.s), faults_(o.faults), permits_(s.resolved().permits), rollout_(o.slots.size()) {
        tell(o, event::up(stage::learner, 0));
        tell(o, event::up(stage::teacher, 0));
        for (std::size_t w = 0; w < o.slots.size(); ++w) come(o, w);
    }

    /// What is possible; first what is no fault.
    std::vector<choice> choices(const world_options& o) const {
        std::vector<choice> list;
        const auto add = [&](choice::kind k, std::size_t which = 0) { list.push_back({k, which}); };
        for (std::size_t i = 0; i < running_.size(); ++i) {
            if (running_[i].aborted) {
                add(choice::aborted, i);
                if (running_[i].hung)
                    add(choice::abort_timer, i);
                else
                    add(choice::crossed, i);
            } else {
                add(choice::rolled, i);
            }
        }
        for (std::size_t i = 0; i < calls_.size(); ++i) add(choice::scored, i);
        if (train_ != 0) add(choice::learned);
        for (std::size_t w = 0; w < rollout_.size(); ++w) {
            if (!rollout_[w].up)
                add(choice::rollout_up, w);
            else if (!rollout_[w].owed.empty())
                add(choice::installed, w);
        }
        if (flush_.number != 0) add(choice::flush);
        if (!teacher_) add(choice::teacher_up);
        if (!learner_) add(choice::learner_up);
        if (paused_) add(choice::resume);
        if (faults_ == 0) return list;
        for (std::size_t i = 0; i < running_.size(); ++i)
            if (!running_[i].aborted) {
                add(choice::roll_fails, i);
                add(choice::roll_hangs, i);
                if (o.loses_replies) add(choice::roll_vanishes, i);
            }
        for (std::size_t i = 0; i < calls_.size(); ++i) {
            add(choice::score_fails, i);
            add(choice::score_hangs, i);
            if (calls_[i].tickets.size() > 1) add(choice::score_partly, i);
        }
        if (train_ != 0) {
            add(choice::learn_fails);
            add(choice::learn_hangs);
        }
        for (std::size_t w = 0; w < rollout_.size(); ++w) {
            if (rollout_[w].up) add(choice::rollout_dies, w);
            if (rollout_[w].up && !rollout_[w].owed.empty()) add(choice::install_hangs, w);
        }
        if (teacher_) add(choice::teacher_dies);
        if (learner_) add(choice::learner_dies);
        if (past_rolled_.attempt != 0) add(choice::twice_rolled);
        if (past_scored_ != 0) add(choice::twice_scored);
        if (past_learned_ != 0) add(choice::twice_learned);
        if (!paused_) add(choice::pause);
        if (!closed_) add(choice::close);
        if (o.resizes) {
            const plan& p = s.resolved();
            add(choice::resize, static_cast<std::size_t>(p.batch));
            add(choice::resize, static_cast<std::size_t>((p.depth + 1) * p.batch));
        }
        add(choice::crash);
        return list;
    }

    void take(const world_options& o, const choice& c) {
        const ticket past_rolled = past_rolled_;
        const std::uint64_t past_scored = past_scored_, past_learned = past_learned_;
        if (c.what >= choice::first_fault) {
            if (--faults_ == 0) past_rolled_ = {}, past_scored_ = past_learned_ = 0; // matter to faults alone
            perfect_ = false;
        }
        switch (c.what) {
        case choice::rolled:
        case choice::crossed: {
            const ticket t = remove(running_, c.which).t;
            if (faults_ > 0) past_rolled_ = t;
            tell(o, event::rolled_out(t, tokens_of(t)));
            break;
        }
        case choice::aborted:
            tell(o, event::aborted(remove(running_, c.which).t));
            break;
        case choice::abort_timer:
            tell(o, event::fired({timer::kind::abort, running_[c.which].t, 0, -1}));
            break;
        case choice::scored:
        case choice::score_partly: {
            const call done = remove(calls_, c.which);
            if (faults_ > 0) past_scored_ = done.job;
            const std::span<const ticket> some(done.tickets);
            tell(o, event::scored(done.job, 0, c.what == choice::scored ? some.first(0) : some.subspan(1)));
            break;
        }
        case choice::learned:
            if (faults_ > 0) past_learned_ = train_;
            tell(o, event::learned(std::exchange(train_, 0)));
            break;
        case choice::installed: {
            rollout_worker& w = rollout_[c.which];
            const version_t v = w.owed.front().version;
            w.owed.erase(w.owed.begin());
            if (!o.lies_about_weights) w.installed = v;
            tell(o, event::synced(static_cast<std::int32_t>(c.which), v));
            break;
        }
        case choice::flush:
            tell(o, event::fired(std::exchange(flush_, timer{})));
            break;
        case choice::teacher_up:
            teacher_ = true;
            tell(o, event::up(stage::teacher, 0));
            break;
        case choice::learner_up:
            learner_ = true;
            tell(o, event::up(stage::learner, 0));
            break;
        case choice::rollout_up:
            come(o, c.which);
            break;
        case choice::resume:
            paused_ = false;
            tell(o, event::of(event::kind::resume));
            break;
        case choice::roll_fails:
            tell(o, event::rollout_failed(remove(running_, c.which).t));
            break;
        case choice::roll_hangs:
            running_[c.which].hung = true;
            tell(o, event::fired({timer::kind::rollout, running_[c.which].t, 0, -1}));
            break;
        case choice::roll_vanishes:
            remove(running_, c.which);
            break;
        case choice::score_fails:
            tell(o, event::score_failed(remove(calls_, c.which).job, 0));
            break;
        case choice::score_hangs:
            tell(o, event::fired({timer::kind::teacher, {}, calls_[c.which].job, -1}));
            break;
        case choice::learn_fails:
            tell(o, event::learn_failed(std::exchange(train_, 0)));
            break;
        case choice::learn_hangs:
            tell(o, event::fired({timer::kind::learner, {}, train_, -1}));
            break;
        case choice::install_hangs:
            tell(o, event::fired(rollout_[c.which].owed.back().deadline));
            break;
        case choice::rollout_dies:
            die(stage::rollout, static_cast<std::int32_t>(c.which));
            tell(o, event::down(stage::rollout, static_cast<std::int32_t>(c.which)));
            break;
        case choice::teacher_dies:
            die(stage::teacher, 0);
            tell(o, event::down(stage::teacher, 0));
            break;
        case choice::learner_dies:
            die(stage::learner, 0);
            tell(o, event::down(stage::learner, 0));
            break;
        case choice::twice_rolled:
            tell(o, event::rolled_out(past_rolled, {0, s.version(), 0, 1}));
            break;
        case choice::twice_scored:
            tell(o, event::scored(past_scored, 0));
            break;
        case choice::twice_learned:
            tell(o, event::learned(past_learned));
            break;
        case choice::pause:
            paused_ = true;
            tell(o, event::of(event::kind::pause));
            break;
        case choice::close:
            closed_ = true;
            tell(o, event::of(event::kind::close));
            break;
        case choice::resize:
            permits_ = std::max(permits_, static_cast<index_t>(c.which));
            tell(o, event::of(event::kind::resize, static_cast<index_t>(c.which)));
            break;
        case choice::crash:
            s = scheduler::restore(o.s, s.snapshot());
            s.abandon_workers(o.keep_prefixes);
            s.check_invariants();
            flush_ = {};
            for (std::size_t w = 0; w < rollout_.size(); ++w) die(stage::rollout, static_cast<std::int32_t>(w));
            die(stage::teacher, 0);
            die(stage::learner, 0);
            teacher_ = learner_ = true;
            tell(o, event::up(stage::learner, 0));
            tell(o, event::up(stage::teacher, 0));
            for (std::size_t w = 0; w < rollout_.size(); ++w) come(o, w);
            break;
        }
    }

    std::uint64_t hash() const {
        archive_writer a;
        a(s.snapshot(), running_, train_, flush_.number, teacher_, learner_, paused_, closed_, perfect_, faults_, done_,
          lag_sum_, past_scored_, past_learned_, past_rolled_.sample, past_rolled_.attempt);
        for (const call& c : calls_) a(c.job);
        for (const rollout_worker& w : rollout_) {
            a(w.up, w.installed, static_cast<std::uint64_t>(w.owed.size()));
            for (const installation& i : w.owed) a(i.version);
        }
        return opd::sched::detail::checksum(a.bytes);
    }

    scheduler s;

private:
    template <class T>
    static T remove(std::vector<T>& list, std::size_t i) {
        T x = std::move(list[i]);
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        return x;
    }
    token_versions tokens_of(const ticket& t) const {
        const version_t newest = rollout_[static_cast<std::size_t>(t.worker)].installed;
        version_t oldest = newest;
        s.for_each([&](const outstanding_sequence& q) {
            if (q.ticket == t) oldest = q.start;
        });
        return {oldest, newest, 0.5 * static_cast<double>(oldest + newest), 3};
    }
    void come(const world_options& o, std::size_t w) {
        rollout_[w] = {.up = true, .installed = -1, .owed = {}};
        tell(o, event::up(stage::rollout, static_cast<std::int32_t>(w), o.slots[w]));
    }
    void die(stage g, std::int32_t w) {
        if (g == stage::rollout) {
            for (std::size_t i = running_.size(); i-- > 0;)
                if (running_[i].t.worker == w) {
                    const ticket t = remove(running_, i).t;
                    if (faults_ > 0) past_rolled_ = t;
                }
            rollout_[static_cast<std::size_t>(w)] = {};
        } else if (g == stage::teacher) {
            if (faults_ > 0 && !calls_.empty()) past_scored_ = calls_[0].job;
            calls_.clear();
            teacher_ = false;
        } else {
            if (faults_ > 0 && train_ != 0) past_learned_ = train_;
            train_ = 0;
            learner_ = false;
        }
    }

    void tell(const world_options& o, const event& e) {
        const bool was_finished = s.finished();
        actions out;
        s.on(e, out);
        s.check_invariants();
        require(s.where().outstanding() <= permits_, "more is outstanding than there are permits");
        const index_t concurrency = s.resolved().concurrency;
        require(concurrency == 0 || s.where().waiting + s.where().rollout <= concurrency,
                "more in rollout than allowed");
        for (const action& a : out.items) see(o, out, a, was_finished);
    }

    void see(const world_options& o, const actions& out, const action& a, bool was_finished) {
        switch (a.what) {
        case action::kind::start: {
            const rollout_worker& w = rollout_[static_cast<std::size_t>(a.worker)];
            require(w.up && a.version == s.version() && w.installed == a.version, "a start without the weights");
            // whole batches: those of a batch that was admitted before the update run on the weights of before
            require(s.gate_open() || !s.resolved().streaming, "a start while the gate is closed");
            for (const attempt& r : running_)
                require(r.t.worker != a.worker || r.t.lane != a.ticket.lane, "two attempts on one lane");
            require(!is_done(a.ticket.sample), "a start of what is done");
            running_.push_back({a.ticket, false, false});
            break;
        }
        case action::kind::abort:
            for (attempt& r : running_)
                if (r.t == a.ticket) r.aborted = true;
            break;
        case action::kind::score: {
            const auto list = out.of(a);
            require(teacher_ && calls_.empty(), "a call to a teacher that is dead or busy");
            require(static_cast<index_t>(list.size()) <= o.s.teacher_batch && !list.empty(), "a call's size");
            calls_.push_back({a.job, a.worker, {list.begin(), list.end()}});
            break;
        }
        case action::kind::train:
            require(learner_ && train_ == 0 && a.version == s.version(), "a batch for a learner that is dead or busy");
            train_ = a.job;
            break;
        case action::kind::sync:
            require(rollout_[static_cast<std::size_t>(a.worker)].up, "weights for a dead worker");
            rollout_[static_cast<std::size_t>(a.worker)].owed.push_back({a.version, {}});
            break;
        case action::kind::step: {
            const plan& p = s.resolved();
            for (const consumed_sequence& c : out.consumed_by(a)) {
                finish(c.ticket.sample);
                const auto lags = c.lags(a.version - 1);
                require(lags[3] >= 0 && lags[2] >= lags[3] && lags[1] >= lags[2] && lags[0] >= lags[1],
                        "the lags are not in order");
                const auto start = static_cast<index_t>(lags[0]);
                const index_t cohorts = (permits_ + p.batch - 1) / p.batch - 1;
                if (o.promised >= 0) {
                    require(start <= o.promised, "the lag exceeds what was promised");
                } else if (!p.streaming) {
                    require(start <= p.depth, "the lag exceeds k");
                    require(!perfect_ || start == std::min<index_t>(a.version - 1, p.depth),
                            "the lag is not min(v, k)");
                } else if (p.policy == policy::edf || p.policy == policy::drop || p.policy == policy::retry) {
                    require(start <= p.depth, "the lag exceeds tau");
                } else if (p.policy == policy::cohort_fifo || p.policy == policy::in_order) {
                    require(start <= cohorts, "the lag exceeds ceil(M/B) - 1");
                } else if (p.policy == policy::capacity) {
                    lag_sum_ += start + 1;
                }
            }
            require(lag_sum_ <= permits_ * a.version, "the mean lag exceeds M/B - 1");
            break;
        }
        case action::kind::fail:
            finish(a.ticket.sample);
            break;
        case action::kind::lost:
            die(a.stage, a.worker);
            break;
        case action::kind::set_timer:
            if (a.timer.what == timer::kind::flush) flush_ = a.timer;
            if (a.timer.what == timer::kind::sync)
                rollout_[static_cast<std::size_t>(a.timer.worker)].owed.back().deadline = a.timer;
            break;
        case action::kind::finished:
            require(!was_finished, "finished twice");
            require(closed_ || s.totals().consumed >= o.s.sequences, "finished before enough was consumed");
            require(s.totals().admitted == s.totals().consumed + s.totals().failed, "something was lost");
            break;
        }
    }
    bool is_done(sample_t n) const { return n < done_.size() && done_[static_cast<std::size_t>(n)] != 0; }
    void finish(sample_t n) {
        require(!is_done(n), "consumed or given up twice");
        if (n >= done_.size()) done_.resize(static_cast<std::size_t>(n) + 1);
        done_[static_cast<std::size_t>(n)] = 1;
    }

    int faults_;
    index_t permits_; // the most that there were
    std::vector<rollout_worker> rollout_;
    std::vector<attempt> running_;
    std::vector<call> calls_;
    std::uint64_t train_ = 0; // job
    timer flush_;
    bool teacher_ = true, learner_ = true, paused_ = false, closed_ = false, perfect_ = true;
    std::vector<std::uint8_t> done_; // by sequence: consumed or given up
    index_t lag_sum_ = 0;
    ticket past_rolled_;
    std::uint64_t past_scored_ = 0, past_learned_ = 0;
};

} // namespace opd::test
