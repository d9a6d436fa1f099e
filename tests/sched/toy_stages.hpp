// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Three stages that do next to nothing, check what they are given and do wrong what a test tells them to. A response
// has 1 + sample % 17 tokens; token i of sample s, drawn by version v, is (s, i, v).
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"
#include "opd/sched/thread_driver.hpp"

namespace toy {

using namespace opd::sched;
using opd::index_t;

struct sequence {
    sample_t sample = 0;
    std::vector<version_t> versions; // of each token
    std::uint32_t attempt = 0;       // that finished it
};
struct scores {
    sample_t sample = 0;
    std::size_t tokens = 0;
};
inline std::size_t length_of(sample_t s) { return 1 + static_cast<std::size_t>(s % 17); }

struct failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// What all stages of a run share. `fault` is asked before each call ("start", "step", "install", "abort", "score",
/// "train") with the worker and what it is about; it may throw, hang, or answer what the stage knows to do wrong.
struct world {
    enum class wrong { nothing, twice, stranger, future, forgets, partly, miscounts };
    std::function<wrong(const std::string& call, int worker, sample_t about, std::stop_token)> fault;
    std::set<sample_t> held,
        was_held;           ///< responses that do not end before release(); those that did not end before a resume
    bool forgetful = false; ///< the rollout stage loses sequences
    index_t budget = 0;     ///< tokens of an attempt, after which it parks; 0: all
    std::atomic<std::int64_t> drawn = 0; ///< tokens

    std::mutex mutex;
    std::condition_variable changed;
    weights published, before; ///< the latest call's: what it made and what it went on from
    std::map<std::pair<sample_t, std::uint32_t>, version_t> starts; // attempts that the scheduler has started
    std::vector<std::string> complaints;
    int stages = 0; // objects that live
    std::atomic<bool> training = false;
    std::int64_t resumed = 0;
    std::set<sample_t> released;
    std::map<sample_t, version_t> drawn_by; // where some are held: the latest token of each

    void complain(const std::string& s) {
        const std::lock_guard lock(mutex);
        complaints.push_back(s);
    }
    wrong ask(const std::string& call, int worker, sample_t about = 0, std::stop_token stop = {}) {
        return fault ? fault(call, worker, about, stop) : wrong::nothing;
    }
    /// Blocks until released; heeds nothing.
    class gate {
    public:
        void wait() {
            std::unique_lock lock(mutex_);
            ++waiting_;
            changed_.notify_all();
            changed_.wait(lock, [&] { return open_; });
        }
        void open() {
            const std::lock_guard lock(mutex_);
            open_ = true;
            changed_.notify_all();
        }
        void await_waiting(int n = 1) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return waiting_ >= n; });
        }

    private:
        std::mutex mutex_;
        std::condition_variable changed_;
        bool open_ = false;
        int waiting_ = 0;
    };
    /// Draws one more token. True: it does not end here.
    bool holds(sample_t s, version_t by) {
        if (held.empty()) return false; // it does not change during a run
        const std::lock_guard lock(mutex);
        drawn_by[s] = by;
        changed.notify_all();
        return held.count(s) > 0 && released.count(s) == 0;
    }
    void release(sample_t s) {
        const std::lock_guard lock(mutex);
        released.insert(s);
    }
    /// Until a token of it was drawn at that version or later.
    void await_token(sample_t s, version_t by) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return drawn_by.count(s) > 0 && drawn_by[s] >= by; });
    }
    void await_stages_gone() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stages == 0; });
    }
};

/// Counts itself, so that a test can wait for threads that were left behind.
class citizen {
public:
    explicit citizen(std::shared_ptr<world> w) : world_(std::move(w)) {
        const std::lock_guard lock(world_->mutex);
        ++world_->stages;
    }
    citizen(const citizen&) = delete;
    citizen& operator=(const citizen&) = delete;
    ~citizen() {
        const std::lock_guard lock(world_->mutex);
        --world_->stages;
        world_->changed.notify_all();
    }

protected:
    std::shared_ptr<world> world_;
};

class rollout : citizen {
public:
    using rolled_type = sequence;
    rollout(std::shared_ptr<world> w, int number, int lanes)
        : citizen(std::move(w)), number_(number), lanes_(static_cast<std::size_t>(lanes)) {}

    void start(const ticket& t, std::shared_ptr<const sequence> partial) {
        need_time();
        world_->ask("start", number_, t.sample);
        lane& l = lanes_.at(static_cast<std::size_t>(t.lane));
        if (l.busy) world_->complain("a lane is given twice");
        {
            const std::lock_guard lock(world_->mutex);
            const auto known = world_->starts.find({t.sample, t.attempt});
            if (known == world_->starts.end())
                world_->complaints.push_back("an attempt that the scheduler has not started");
            else if (known->second != version_)
                world_->complaints.push_back("a start at version " + std::to_string(known->second) +
                                             " on weights of version " + std::to_string(version_));
            world_->resumed += partial != nullptr;
        }
        if (partial && partial->sample != t.sample) world_->complain("another's prefix");
        if (partial && partial->versions.size() >= length_of(t.sample) && world_->was_held.count(t.sample) == 0)
            world_->complain("a prefix that is complete");
        l = {true, t, partial ? *partial : sequence{t.sample, {}, 0}, 0};
        l.what.attempt = t.attempt;
        ++running_;
    }
    void abort(const ticket& t) {
        need_time();
        lane& l = lanes_.at(static_cast<std::size_t>(t.lane));
        if (!l.busy || l.who != t) {
            if (!world_->forgetful) world_->complain("an abort of what does not run");
            return;
        }
        l.busy = false;
        --running_;
        world_->ask("abort", number_, t.sample); // what is to be aborted is, even if this throws
    }
    finished_rollout<sequence> park(const ticket& t) {
        need_time();
        lane& l = lanes_.at(static_cast<std::size_t>(t.lane));
        if (!l.busy || l.who != t) throw failed("parks what does not run");
        return take_out(l);
    }
    void install(const weights& w) {
        need_time();
        world_->ask("install", number_, static_cast<sample_t>(w.version));
        const std::lock_guard lock(world_->mutex);
        if (w != world_->published && w != world_->before)
            throw failed("version " + std::to_string(w.version) + " of job " + std::to_string(w.job) +
                         " is to be installed, but " + std::to_string(world_->published.version) + " of job " +
                         std::to_string(world_->published.job) + " is published");
        version_ = w.version;
    }
    void step(std::vector<finished_rollout<sequence>>& out, std::stop_token stop) {
        using wrong = world::wrong;
        need_time();
        for (lane& l : lanes_) {
            if (!l.busy) continue;
            const wrong w = world_->ask("step", number_, l.who.sample, stop);
            if (w == wrong::forgets) {
                l.busy = false;
                --running_;
                return;
            }
            if (world_->budget > 0 && l.drawn++ == world_->budget) {
                out.push_back(take_out(l));
                continue;
            }
            l.what.versions.push_back(version_);
            ++world_->drawn;
            const bool held = world_->holds(l.who.sample, version_);
            if (held || l.what.versions.size() < length_of(l.who.sample)) continue;
            token_versions v = versions_of(l.what);
            if (w == wrong::future) v.newest = version_ + 1000; // (+ 1 may have been published since)
            const auto made = std::make_shared<const sequence>(l.what);
            out.push_back({l.who, v, made});
            if (w == wrong::twice) out.push_back({l.who, v, std::make_shared<const sequence>()});
            if (w == wrong::stranger) {
                ticket other = l.who;
                ++other.worker;
                out.push_back({other, v, made});
            }
            l.busy = false;
            --running_;
        }
        untimed_ = true;
    }
    void took(double seconds) {
        if (!untimed_ || !(seconds >= 0 && seconds < 1e6)) world_->complain("a time of no quantum of its own");
        untimed_ = false;
    }
    index_t running() const { return running_; }
    std::int64_t drawn(const ticket& t) const {
        const lane& l = lanes_.at(static_cast<std::size_t>(t.lane));
        return l.busy && l.who == t ? static_cast<std::int64_t>(l.what.versions.size()) : 0;
    }
    void export_partials(std::vector<partial_rollout<sequence>>& out) const {
        for (const lane& l : lanes_)
            if (l.busy) out.push_back({l.who, std::make_shared<const sequence>(l.what)});
    }

private:
    void need_time() {
        if (untimed_) world_->complain("it was not told how long its last quantum took");
    }
    static token_versions versions_of(const sequence& s) {
        token_versions v{s.versions.front(), s.versions.back(), 0, static_cast<std::int64_t>(s.versions.size())};
        for (const version_t x : s.versions) v.mean += static_cast<double>(x);
        v.mean /= static_cast<double>(v.tokens);
        return v;
    }
    struct lane {
        bool busy = false;
        ticket who;
        sequence what;
        index_t drawn = 0; // by this attempt
    };
    finished_rollout<sequence> take_out(lane& l) {
        l.busy = false;
        --running_;
        if (l.what.versions.empty()) return {l.who, {}, nullptr, true};
        return {l.who, versions_of(l.what), std::make_shared<const sequence>(l.what), true};
    }
    int number_;
    std::vector<lane> lanes_;
    index_t running_ = 0;
    version_t version_ = -1;
    bool untimed_ = false; // after a quantum
};

class teacher : citizen {
public:
    using scored_type = scores;
    teacher(std::shared_ptr<world> w, int number) : citizen(std::move(w)), number_(number) {}

    std::vector<std::shared_ptr<const scores>> score(std::span<const std::shared_ptr<const sequence>> rolled,
                                                     std::stop_token stop) {
        std::vector<std::shared_ptr<const scores>> r;
        world::wrong w = world::wrong::nothing;
        for (const auto& s : rolled) {
            if (const auto one = world_->ask("score", number_, s->sample, stop); one != world::wrong::nothing) w = one;
            if (s->versions.size() < length_of(s->sample)) world_->complain("an incomplete sequence is to be scored");
            r.push_back(std::make_shared<const scores>(scores{s->sample, s->versions.size()}));
        }
        if (w == world::wrong::partly) r.front().reset();
        if (w == world::wrong::miscounts) r.pop_back();
        return r;
    }

private:
    int number_;
};

class learner : citizen {
public:
    explicit learner(std::shared_ptr<world> w) : citizen(std::move(w)) {}

    index_t train(std::span<const sequence_view<sequence, scores>> batch, const train_call& call,
                  std::stop_token stop) {
        const struct presence {
            std::atomic<bool>& is;
            explicit presence(std::atomic<bool>& x) : is(x) { is = true; }
            ~presence() { is = false; }
        } training(world_->training);
        world_->ask("train", 0, static_cast<sample_t>(call.from.version), stop);
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const auto& s = batch[i];
            if (i > 0 && batch[i - 1].ticket.sample >= s.ticket.sample) world_->complain("a batch out of order");
            if (!s.rolled || s.rolled->sample != s.ticket.sample) world_->complain("another's sequence");
            if (s.rolled && s.rolled->attempt != s.ticket.attempt) world_->complain("an attempt that was given up");
            if (!s.scored || s.scored->sample != s.ticket.sample) world_->complain("another's score");
            if (s.rolled && (s.rolled->versions.front() != s.versions.oldest || s.start > s.versions.oldest))
                world_->complain("versions that do not fit");
        }
        const std::lock_guard lock(world_->mutex);
        // from the latest weights; or, if nobody heard of those, from the ones before
        if (call.from != world_->published && call.from != world_->before)
            world_->complaints.push_back("a train step from weights that are none");
        if (stop.stop_requested()) throw failed("too late");
        world_->before = call.from;
        world_->published = call.makes();
        return 2;
    }
};

using driver = thread_driver<rollout, teacher, learner>;

using snapshot = run_snapshot<sequence, scores>;
using step = step_report<sequence, scores>;

/// A run with these stages, and what became of it.
struct run {
    settings how;
    thread_options options{.checkpoint_every = 1};
    int rollouts = 2, lanes = 4, teachers = 1;
    std::function<void(driver&)> prepare; // before run()
    std::function<void(driver&, const step&)> on_step;
    std::function<void(driver&, snapshot)> on_checkpoint;
    std::function<void(const opd::sched::event&, const actions&, const scheduler&)> on_event; // under the driver's lock
    const snapshot* from = nullptr;
    std::stop_token stop;
    std::function<void()> finished; // after run(), while the driver is there
    bool check_state = true;        // the scheduler's invariants, after every event
    std::shared_ptr<world> shared = std::make_shared<world>();

    run_report report;
    std::vector<std::set<sample_t>> batches; // by step
    std::vector<sample_t> consumed;          // in the order of the steps
    std::vector<step> steps;
    double worst_start_lag = 0;

    void event(double, const opd::sched::event& e, const actions& out, const scheduler& s) {
        {
            const std::lock_guard lock(shared->mutex);
            for (const action& a : out.items)
                if (a.what == action::kind::start) shared->starts[{a.ticket.sample, a.ticket.attempt}] = a.version;
        }
        if (check_state) s.check_invariants();
        if (on_event) on_event(e, out, s);
    }

    run& go() {
        driver::hooks_type hooks;
        driver* self = nullptr;
        version_t last = from ? from->weights.version : 0;
        if (from) shared->published = shared->before = from->weights;
        hooks.on_step = [&](const step& s) {
            if (s.version != ++last) shared->complain("a step out of order");
            batches.emplace_back();
            for (const auto& c : s.consumed) {
                batches.back().insert(c.ticket.sample);
                consumed.push_back(c.ticket.sample);
                worst_start_lag = std::max(worst_start_lag, static_cast<double>(s.version - 1 - c.start));
            }
            steps.push_back(s);
            if (on_step) on_step(*self, s);
        };
        if (on_checkpoint) hooks.on_checkpoint = [&](snapshot s) { on_checkpoint(*self, std::move(s)); };
        auto d = from ? std::make_unique<driver>(how, *from, options, std::move(hooks))
                      : std::make_unique<driver>(how, options, std::move(hooks));
        self = d.get();
        d->observe(*this);
        for (int i = 0; i < rollouts; ++i) d->add_rollout(std::make_shared<rollout>(shared, i, lanes), lanes);
        for (int i = 0; i < teachers; ++i) d->add_teacher(std::make_shared<teacher>(shared, i));
        d->set_learner(std::make_shared<learner>(shared));
        if (prepare) prepare(*d);
        report = d->run(stop);
        if (finished) finished();
        return *this;
    }
    std::string complaints() const {
        const std::lock_guard lock(shared->mutex);
        std::string all;
        for (const std::string& s : shared->complaints) all += s + "\n";
        return all;
    }
    /// Exactly 0 … n-1, each once.
    bool consumed_all(sample_t n) const {
        std::vector<sample_t> sorted = consumed;
        std::sort(sorted.begin(), sorted.end());
        if (sorted.size() != n) return false;
        for (sample_t i = 0; i < n; ++i)
            if (sorted[i] != i) return false;
        return true;
    }
    std::string first_exception() const {
        if (!report.first_exception) return "";
        try {
            std::rethrow_exception(report.first_exception);
        } catch (const std::exception& e) {
            return e.what();
        }
    }
};

} // namespace toy
