// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// M chosen by the scheduler, `async{.outstanding = automatic}`: as many permits as the work needs, since more of them
// buy staleness and no speed.
//
// The rule: when the learner asks, a batch should lie ready and little more. At each step, before its permits return,
//
//   x  = 2.1·B + U - B·held/T - l                         U: upstream, that is waiting, in rollout, queued or being
//                                                         scored
//   x  = max(x, 2·B·starved/T)                            where starved/T > 1/50
//   l += x/2 where x > 0, else x/4
//   f  = 1 - (1 - idle/T)·full
//   t += f > 1/1000 ? B·f : (B/20 - queue)/4              queue: the teacher's at its shortest since the last step
//   r += B·(unused + e)/2                                 e: the elasticity of rollout (rollout_cost.hpp); not told: r
//                                                         = l
//   m  = min(l, t, r), within [B, (tau + 1)·B]
//   l, t, r: at least B, at most m + B/2, so that those that do not limit stay near
//   M  = m in whole groups, or (tau + 1)·B while that is probed or kept
//
// T: seconds since the last step. Of them, held: in which a batch lay ready and the policy held it back (edf:
// deadlines are short then, not permits); starved: in which the learner waited and no batch lay ready; idle: those of
// a teacher, in the mean. full: sequences of scoring calls over those of full ones; unused: the mean share of rollout
// workers that run nothing. What is ready at one moment does not show that the learner starves: where lengths are
// equal or calls are large, sequences come in crowds. Where no time passes, counts alone decide: l. No length,
// latency or speed is estimated here; `now` comes with the events, so equal events give equal M.
//
// The probe: r climbs the nearer of two hills, and the pace may be highest at (tau + 1)·B: where lengths are equal,
// whole batches run in step. widest_probe compares the paces of both, each over a window of steps:
//
//   own    M = m. The last window is the own pace. Then, if r alone limits m, probe; else rest.
//   probe  M = (tau + 1)·B, to settle and for a window. Then, if a tenth faster, kept; else rest.
//   kept   M = (tau + 1)·B for two rests, as long as each window is a tenth faster. Then own, to settle and for a
//          window.
//   rest   own, for 6·2^k times what a probe takes; k: of probes so far, at most 4.
//
// Meanwhile l, t and r stay, so that m is what it was. Probes that fail take at most 1/13 of the steps from the first
// on, and a hundredth at last.
//
// M <= (tau + 1)·B at all times, so every policy's bound stands, also while M falls and more than M are out. What M
// is worth: docs/sched/outstanding.md.
//
// Lemma 1. If the learner never waits, a sequence that is upstream at n steps has a start lag of at least n + 1, under
// every policy; so the mean lag is at least 1 + E n. Proof. Without waiting each batch begins at a step. A sequence
// that starts at version v and is upstream at n steps can at the earliest join the batch that begins at the step to
// version v + n + 1. It is consumed n + 1 versions after its start. Just before permits return, B·E n are upstream in
// the mean (Little's formula, counted at steps). So M = 2·B + mean upstream is the least M that keeps a learner fed,
// and its mean lag M/B - 1 = 1 + E n attains the bound. The rule pays 0.1 more.
//
// Lemma 2. Take J steps in which all permits are in use, nothing was held, no bound was met (a probe meets one) and l
// is the smallest of the three. Then the ready sequences at the ask fall short of 1.1·B by at most half of what they
// exceed it by, in the mean, up to 2·tau·B/J (and rounding, less than 2). Where the learner never starved for more
// than 2 % of a step, it is just half. Proof. Before permits return M = B + U + ready. So l changes by half of a
// shortfall, by a quarter of an excess, and by more where the learner starved. Sum over the steps: l stays in [B, (tau
// + 1)·B].
//
// Lemma 3. Let workers run n sequences each, and let a quantum take a + b·n. Let weights change once with every batch
// of K tokens a worker, and let rebuilding a running prefix take R seconds in the mean. Then T, the seconds of a batch,
// has d log T/d log n = -(a·quanta - n·R)/T, the elasticity with the other sign. Proof. A batch takes K/n quanta, so
// T = K·a/n + K·b + n·R, and n·dT/dn = -K·a/n + n·R. So the pace is greatest at n = √(K·a/R).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "opd/sched/archive.hpp"
#include "opd/sched/settings.hpp"

namespace opd::sched::detail {

enum class probe_phase : std::uint8_t { own, probe, kept };
constexpr probe_phase last_of(probe_phase) { return probe_phase::kept; }

/// Whether M is (tau + 1)·B for now, as the paces of both say. Counts are of steps.
class widest_probe {
public:
    explicit widest_probe(index_t depth) : settle_(depth + 8) {}

    bool wide() const { return phase_ != probe_phase::own; }
    /// A step took so many seconds; `limits`: of m, rollout alone is the limit.
    void step(double seconds, bool limits) {
        seconds_ += seconds;
        if (--left_ % window != 0) return;
        const double took = std::exchange(seconds_, 0); // by a whole window, where it matters below
        const bool faster = took < gain * own_, over = left_ == 0;
        switch (phase_) {
        case probe_phase::own:
            if (!over) return;
            own_ = took;
            return limits ? go(probe_phase::probe, probe_takes()) : go(probe_phase::own, rest());
        case probe_phase::probe:
            if (!over) return;
            doubled_ = std::min(doubled_ + 1, doublings);
            return faster ? go(probe_phase::kept, 2 * rest()) : go(probe_phase::own, rest());
        case probe_phase::kept:
            if (over || !faster) go(probe_phase::own, probe_takes());
        }
    }
    /// Paces that were seen mean nothing: the clock may be another.
    void forget() { go(probe_phase::own, std::max(wide() ? 0 : left_, probe_takes())); }

    // Steps of a pace: lengths scatter, and crowds come once in a few steps.
    static constexpr index_t window = 24;
    // Of the own seconds. Less is within the noise of a window, and not worth a lag of tau.
    static constexpr double gain = 0.9;
    // Steps until l, t and r have come to rest, and a window of them.
    static constexpr index_t first = 64;
    // Probes' times that pass first until another; doubled from the first failure on: at most 1/13 of the time.
    static constexpr index_t apart = 6;
    // Then it is a hundredth. No more, since loads change.
    static constexpr index_t doublings = 4;

    template <class A>
    void fields(A& a) {
        a(phase_, left_, doubled_, seconds_, own_);
    }
    /// Whether what was read can be.
    bool sound() const {
        if (doubled_ < 0 || doubled_ > doublings) return false; // rest() shifts by it
        const index_t most = std::max({first, probe_takes(), (wide() ? 2 : 1) * rest()});
        const auto is = [](double x) { return x >= 0 && x <= 1e300; };
        return left_ >= 1 && left_ <= most && is(seconds_) && is(own_);
    }

private:
    void go(probe_phase to, index_t steps) { phase_ = to, left_ = steps, seconds_ = 0; }
    index_t probe_takes() const { return settle_ + window; }
    index_t rest() const { return (apart * probe_takes() / window * window) << doubled_; } // whole windows

    index_t settle_; // what began at another M is consumed within depth + 1; the rest is a margin
    probe_phase phase_ = probe_phase::own;
    index_t left_ = first, doubled_ = 0;
    double seconds_ = 0, own_ = 0; // of the window so far, of the own pace's window
};

class outstanding_control {
public:
    explicit outstanding_control(const plan& p)
        : batch_(static_cast<double>(p.batch)), least_(p.least), most_(p.most), group_(p.group), depth_(p.depth),
          probe_(p.depth) {
        start_at(p.permits);
    }

    /// From here on, as if it had always been so.
    void start_at(index_t permits) {
        for_learner_ = for_teacher_ = for_rollout_ = static_cast<double>(permits);
        probe_ = widest_probe(depth_);
        forget();
    }
    /// What was seen means nothing: the clock may be another.
    void forget() {
        begun_ = false;
        probe_.forget();
        forget_step();
    }
    /// `seconds` in which the learner waited for a batch that was held back, or for one that was not there; teachers
    /// and rollout workers were idle to a share, and so many sequences waited for teachers.
    void pass(double seconds, bool held, bool starved, double idle, index_t queue, double rollout_idle) {
        seconds = std::min(seconds, 1e9); // the clock of a restored scheduler may be anything
        since_ += seconds;
        held_ += held ? seconds : 0;
        starved_ += starved ? seconds : 0;
        idle_ += idle * seconds;
        rollout_idle_ += rollout_idle * seconds;
        queue_ = queue_ < 0 ? queue : std::min(queue_, queue);
    }
    /// By a rollout worker that installs weights.
    void told(double elasticity) {
        elasticity_ += elasticity;
        told_ += 1;
    }
    /// A scoring call began, full to this share.
    void called(double full) {
        full_ += full;
        calls_ += 1;
    }
    /// M from this step on; `before` until now.
    index_t step(index_t upstream, index_t before) {
        const double seconds = since_;
        const bool first = !std::exchange(begun_, true); // the first tells of the start, not of the work
        if (!first && !probe_.wide()) follow(static_cast<double>(upstream));
        forget_step();
        if (first) return before;
        probe_.step(seconds, for_rollout_ < std::min({for_learner_, for_teacher_, static_cast<double>(most_)}));
        if (probe_.wide()) return most_;
        const auto whole = static_cast<index_t>(std::ceil(limit() / static_cast<double>(group_))) * group_;
        return std::clamp(whole, least_, most_);
    }

    /// How much more than a batch should lie ready, in batches.
    static constexpr double ahead = 0.1;

    template <class A>
    void fields(A& a) {
        a(for_learner_, for_teacher_, for_rollout_, since_, held_, starved_, idle_, rollout_idle_, elasticity_, told_,
          full_, calls_, queue_, begun_, probe_);
    }
    /// Whether what was read can be.
    bool sound() const {
        const double top = 1.5 * static_cast<double>(most_) + 1;
        const auto is = [](double x, double most) { return x >= 0 && x <= most; };
        return is(for_learner_, top) && is(for_teacher_, top) && is(for_rollout_, top) && is(since_, 1e300) &&
               is(held_, since_ * (1 + 1e-6)) && is(starved_, since_ * (1 + 1e-6)) && is(idle_, since_ * (1 + 1e-6)) &&
               is(rollout_idle_, since_ * (1 + 1e-6)) && is(calls_, 1e15) && is(full_, calls_ * (1 + 1e-6)) &&
               is(told_, 1e15) && std::abs(elasticity_) <= told_ && queue_ >= -1 && probe_.sound();
    }

private:
    double within(double x, double most) const { return std::clamp(x, batch_, most); }
    double limit() const {
        return within(std::min({for_learner_, for_teacher_, for_rollout_}), static_cast<double>(most_));
    }
    void forget_step() {
        since_ = held_ = starved_ = idle_ = rollout_idle_ = elasticity_ = told_ = full_ = calls_ = 0;
        queue_ = -1;
    }
    // l, t and r, by what was seen since the last step.
    void follow(double upstream) {
        const bool timed = since_ > 0, told = timed && told_ > 0;
        const double held = timed ? held_ / since_ : 0, starved = timed ? starved_ / since_ : 0;
        const double idle = timed ? idle_ / since_ : 0, full = calls_ > 0 ? full_ / calls_ : 1;
        const double unused = timed ? rollout_idle_ / since_ : 0, gain = told_ > 0 ? elasticity_ / told_ : 1;
        const auto queue = static_cast<double>(queue_);
        double missing = (2 + ahead) * batch_ + upstream - batch_ * held - for_learner_;
        if (starved > 0.02) missing = std::max(missing, 2 * batch_ * starved);
        for_learner_ += missing / (missing > 0 ? 2 : 4);
        const double free = 1 - (1 - idle) * full; // of what teachers could take
        for_teacher_ += free > 1e-3 ? batch_ * free : (batch_ / 20 - queue) / 4;
        if (!timed) for_teacher_ = for_learner_;
        for_rollout_ += batch_ * (unused + gain) / 2;
        if (!told) for_rollout_ = for_learner_;
        const double m = limit();
        for (double* x : {&for_learner_, &for_teacher_, &for_rollout_}) *x = within(*x, m + batch_ / 2);
    }

    double batch_;
    index_t least_, most_, group_, depth_;
    double for_learner_ = 0, for_teacher_ = 0, for_rollout_ = 0;
    // since the last step
    double since_ = 0, held_ = 0, starved_ = 0, idle_ = 0, rollout_idle_ = 0; // seconds
    double elasticity_ = 0, told_ = 0;                                        // sum and number of what was told
    double full_ = 0, calls_ = 0;                                             // likewise of scoring calls
    index_t queue_ = -1;                                                      // none seen
    bool begun_ = false;
    widest_probe probe_;
};

} // namespace opd::sched::detail
