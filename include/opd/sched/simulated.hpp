// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Simulated stages: how long things take, for discrete-event virtual time. No clock of their own: the caller says how
// much time passes.
//
// simulated_rollout is an inference engine whose running sequences share one decode step:
//
//   seconds a decode step = factor·(step + step_per_sequence·n),  n = sequences running
//   every running sequence gains one token a step
//   starting a sequence stops decoding for factor·prefill·(prompt tokens)
//   new weights stop it for factor·rebuild·(prompt and response tokens of all running sequences): KV states are rebuilt
//   between pause() and resume() or install() nothing happens (weights are being written)
//
// All running sequences advance at the same rate, so the engine keeps one clock in tokens, W; a sequence of L tokens
// that starts at W ends at W + L, and a heap over these ends finds the next: O(log lanes) a start, finish or abort,
// whatever n.
//
// A token counts for the version that is installed when its step ends; a sequence's token_versions are exact counts.
//
// simulated_job is the duration of a scoring call, a train step or a weight transfer:
//
//   seconds = noise·(fixed + per_item·items + per_token·tokens)
//
// Approximate: time is fluid, where an engine moves in whole steps (an error of at most one step at each change of
// n); a step does not depend on the length of contexts; prefill is not mixed into decode steps. Rounding: a token
// whose step ends within 1e-6 of a step of a change counts as ended.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/distributions.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Speed of one simulated rollout worker; the text above has the formulas.
struct engine_speed {
    double step = 0.02;           ///< seconds a decode step
    double step_per_sequence = 0; ///< further seconds per running sequence; 0: sequences do not slow each other
    double prefill = 0;           ///< seconds per prompt token
    double rebuild = 0;           ///< seconds per token of KV state after a change of weights
    double factor = 1;            ///< of all of them: 2 is a worker of half the speed
    bool operator==(const engine_speed&) const = default;
};

/// Throws invalid_input that names `argument` and the member: what is negative or not finite, or steps that take no
/// time.
inline void validate(const engine_speed& e, const std::string& argument) {
    const auto at_least_0 = [&](const char* name, double x) {
        if (!(x >= 0 && x < forever))
            throw invalid_input(argument + "." + name, "must be finite and at least 0, not " + std::to_string(x));
    };
    at_least_0("step", e.step);
    at_least_0("step_per_sequence", e.step_per_sequence);
    at_least_0("prefill", e.prefill);
    at_least_0("rebuild", e.rebuild);
    if (!(e.factor > 0 && e.factor < forever))
        throw invalid_input(argument + ".factor", "must be finite and positive, not " + std::to_string(e.factor));
    if (!(e.step + e.step_per_sequence > 0)) throw invalid_input(argument + ".step", "a decode step must take time");
}

/// An engine of `lanes` sequences at most. Times are seconds from now, never absolute.
class simulated_rollout {
public:
    /// What the engine has done; tokens as fractions of steps.
    struct totals {
        double busy = 0;      ///< seconds with a sequence running and not paused
        double stalled = 0;   ///< of them prefill and KV rebuilds
        double rebuilt = 0;   ///< KV rebuilds that were asked for
        double shared = 0;    ///< of busy, what steps take whatever runs
        double decoded = 0;   ///< tokens
        double discarded = 0; ///< of them tokens of aborted sequences
        template <class A>
        void fields(A& a) {
            a(busy, stalled, rebuilt, shared, decoded, discarded);
        }
        bool operator==(const totals&) const = default;
    };

    simulated_rollout(const engine_speed& speed, index_t lanes, version_t version = 0) : speed_(speed) {
        validate(speed, "speed");
        if (lanes < 1 || lanes > (index_t{1} << 30))
            throw invalid_input("lanes", "must lie in [1, 2^30], not " + std::to_string(lanes));
        lanes_.resize(static_cast<std::size_t>(lanes));
        heap_.reserve(static_cast<std::size_t>(lanes));
        history_.push_back({0, version});
    }

    index_t lanes() const { return static_cast<index_t>(lanes_.size()); }
    index_t running() const { return static_cast<index_t>(heap_.size()); }
    bool paused() const { return paused_ != 0; }
    version_t version() const { return history_.back().version; }
    const totals& done() const { return done_; }
    /// Of its pace in how many run (rollout_cost.hpp), since it was asked last.
    double elasticity() {
        const double busy = done_.busy - asked_.busy;
        const double gain = done_.shared - asked_.shared, loss = done_.rebuilt - asked_.rebuilt;
        asked_ = done_;
        return busy > 0 ? std::clamp((gain - loss) / busy, -1.0, 1.0) : untold;
    }

    bool runs(const ticket& t) const {
        return t.lane >= 0 && t.lane < lanes() && lanes_[at(t.lane)].place >= 0 && lanes_[at(t.lane)].who == t;
    }

    /// Starts a response of `length_tokens` (rounded, at least 1) to a prompt of `prompt_tokens` on the ticket's
    /// lane. Of the response `had` is there already: tokens of an attempt that was parked, read again as the prompt
    /// is. After `budget` further tokens it parks; 0: never.
    void start(const ticket& t, double length_tokens, double prompt_tokens, const token_versions& had = {},
               std::int64_t budget = 0) {
        if (t.lane < 0 || t.lane >= lanes())
            throw invalid_input("ticket", "lane " + std::to_string(t.lane) + " of " + std::to_string(lanes()));
        lane& l = lanes_[at(t.lane)];
        if (l.place >= 0) throw invalid_input("ticket", "lane " + std::to_string(t.lane) + " is running");
        if (!(length_tokens >= 0 && length_tokens < 1e15))
            throw invalid_input("length_tokens", "must lie in [0, 1e15), not " + std::to_string(length_tokens));
        if (!(prompt_tokens >= 0 && prompt_tokens < 1e15))
            throw invalid_input("prompt_tokens", "must lie in [0, 1e15), not " + std::to_string(prompt_tokens));
        const std::int64_t whole = std::max<std::int64_t>(1, std::llround(length_tokens));
        if (had.tokens < 0 || had.tokens >= whole || budget < 0)
            throw invalid_input("had", std::to_string(had.tokens) + " of " + std::to_string(whole) +
                                           " tokens, to go on for " + std::to_string(budget));
        if (heap_.empty()) forget();
        l.who = t;
        l.had = had;
        l.parks = budget > 0 && budget < whole - had.tokens;
        l.tokens = l.parks ? budget : whole - had.tokens;
        prompt_tokens += static_cast<double>(had.tokens);
        l.prompt = prompt_tokens;
        l.from = clock_;
        l.to = clock_ + static_cast<double>(l.tokens);
        l.first = forgotten_ + static_cast<std::int64_t>(history_.size()) - 1;
        context_ += prompt_tokens - clock_;
        stall_ += speed_.factor * speed_.prefill * prompt_tokens;
        heap_.push_back(t.lane);
        l.place = static_cast<std::int32_t>(heap_.size()) - 1;
        up(l.place);
    }

    /// f(ticket, whole tokens that its response has) for all that runs, dt <= next() seconds from now.
    template <class F>
    void drawn(double dt, F&& f) const {
        if (heap_.empty()) return;
        const double clock = paused_ ? clock_ : clock_ + std::max(0.0, dt - stall_) / step();
        for (const std::int32_t i : heap_) {
            const lane& l = lanes_[at(i)];
            const auto whole = static_cast<std::int64_t>(std::floor(std::min(clock, l.to) - l.from + rounding));
            f(l.who, l.had.tokens + std::min(l.tokens, whole));
        }
    }

    /// Gives the attempt up; false if it does not run.
    bool abort(const ticket& t) {
        if (!runs(t)) return false;
        const lane& l = lanes_[at(t.lane)];
        done_.discarded += std::min(clock_, l.to) - l.from;
        remove(t.lane);
        return true;
    }

    /// Calls parked(ticket, token_versions) with the whole tokens that it has, if it runs.
    template <class Parked>
    void park(const ticket& t, Parked&& parked) {
        if (!runs(t)) return;
        lane& l = lanes_[at(t.lane)];
        const double drawn = std::min(clock_, l.to) - l.from;
        l.tokens = std::min(l.tokens, static_cast<std::int64_t>(std::floor(drawn + rounding)));
        done_.discarded += std::max(0.0, drawn - static_cast<double>(l.tokens));
        const token_versions versions = versions_of(l);
        remove(t.lane);
        parked(t, versions);
    }

    /// New weights from now on; ends a pause.
    void install(const weights& w) { install(w.version); }
    void install(version_t version) {
        if (version < this->version())
            throw invalid_input("version", std::to_string(version) + " after " + std::to_string(this->version()));
        paused_ = 0;
        if (version == this->version()) return;
        if (heap_.empty()) {
            forget();
            history_.back().version = version;
            return;
        }
        // of all running sequences: prompt + (W - start)
        const double context = std::max(0.0, context_ + clock_ * static_cast<double>(running()));
        const double rebuild = speed_.factor * speed_.rebuild * context;
        stall_ += rebuild;
        done_.rebuilt += rebuild;
        if (history_.size() >= prune_at_) prune();
        history_.push_back({clock_, version});
    }

    void pause() { paused_ = 1; }
    void resume() { paused_ = 0; }

    /// Seconds until the next sequence finishes; `forever` if none does.
    double next() const {
        if (paused_ || heap_.empty()) return forever;
        return stall_ + std::max(0.0, lanes_[at(heap_[0])].to - clock_) * step();
    }

    /// Lets dt <= next() seconds pass; calls finished(const ticket&, const token_versions&) for what is done then, ties
    /// by lane. A longer dt passes over several ends, each at its own time and with its lane left empty.
    template <class Out>
    void advance(double dt, Out&& finished) {
        advance(dt, finished, [](const ticket&, const token_versions&) {});
    }
    /// Likewise parked() for those whose budget is used up.
    template <class Out, class Parked>
    void advance(double dt, Out&& finished, Parked&& parked) {
        if (!(dt >= 0)) throw invalid_input("dt", "must be at least 0, not " + std::to_string(dt));
        if (paused_) return;
        while (!heap_.empty()) {
            const double end = lanes_[at(heap_[0])].to, until = next();
            const double part = std::min(dt, until);
            const double waited = std::min(part, stall_);
            stall_ -= waited;
            if (stall_ <= rounding * step()) stall_ = 0; // the caller's clock rounds, here and below
            done_.stalled += waited;
            done_.busy += part;
            dt -= part;
            const double before = clock_;
            clock_ = part >= until ? std::max(clock_, end) : std::min(end, clock_ + (part - waited) / step());
            if (stall_ == 0 && end - clock_ <= rounding) clock_ = end;
            done_.decoded += (clock_ - before) * static_cast<double>(running());
            done_.shared += (clock_ - before) * speed_.factor * speed_.step;
            bool any = false;
            while (!heap_.empty() && lanes_[at(heap_[0])].to <= clock_ && stall_ == 0) {
                const std::int32_t which = heap_[0];
                const ticket who = lanes_[at(which)].who;
                const token_versions versions = versions_of(lanes_[at(which)]);
                const bool parks = lanes_[at(which)].parks;
                remove(which);
                any = true;
                if (parks)
                    parked(who, versions);
                else
                    finished(who, versions);
            }
            if (!any || dt <= 0) return;
        }
    }

    /// State to bytes and back; read into a worker with as many lanes.
    template <class A>
    void fields(A& a) {
        std::uint64_t count = lanes_.size();
        a(count);
        if (count != lanes_.size())
            throw invalid_input("snapshot",
                                "is of " + std::to_string(count) + " lanes, not " + std::to_string(lanes_.size()));
        a(lanes_, heap_, history_, forgotten_, prune_at_, clock_, stall_, context_, paused_, done_, asked_);
        if constexpr (A::reading) check();
    }

private:
    static constexpr double rounding = 1e-6; // of a step

    struct lane {
        ticket who;
        token_versions had;      // of an earlier attempt
        bool parks = false;      // after `tokens`
        std::int64_t tokens = 0; // L
        double prompt = 0;
        double from = 0, to = 0; // on the token clock
        std::int64_t first = 0;  // of the history, counted from the engine's beginning
        std::int32_t place = -1; // in the heap; -1: empty
        template <class A>
        void fields(A& a) {
            a(who, had, parks, tokens, prompt, from, to, first, place);
        }
    };
    struct change {
        double clock = 0; // from here on
        version_t version = 0;
        template <class A>
        void fields(A& a) {
            a(clock, version);
        }
    };

    static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }
    double step() const {
        return speed_.factor * (speed_.step + speed_.step_per_sequence * static_cast<double>(heap_.size()));
    }

    // An idle engine starts its clock anew: sums stay exact over any length of run.
    void forget() {
        history_ = {{0, version()}};
        forgotten_ = 0;
        clock_ = context_ = stall_ = 0;
    }

    // Drops the part of the history that no running sequence has seen. Its cost is that of the installs before it.
    void prune() {
        std::int64_t oldest = forgotten_ + static_cast<std::int64_t>(history_.size()) - 1;
        for (const std::int32_t i : heap_) oldest = std::min(oldest, lanes_[at(i)].first);
        history_.erase(history_.begin(), history_.begin() + (oldest - forgotten_));
        forgotten_ = oldest;
        prune_at_ = 2 * history_.size() + lanes_.size();
    }

    token_versions versions_of(const lane& l) const {
        token_versions r;
        r.tokens = l.tokens;
        double sum = 0; // of (version - oldest)·tokens
        std::int64_t before = 0;
        const auto first = static_cast<std::size_t>(l.first - forgotten_);
        for (std::size_t i = first; i < history_.size(); ++i) {
            std::int64_t until = l.tokens;
            if (i + 1 < history_.size())
                until = std::clamp(static_cast<std::int64_t>(std::floor(history_[i + 1].clock - l.from + rounding)),
                                   before, l.tokens);
            if (until == before) continue;
            if (before == 0) r.oldest = history_[i].version;
            r.newest = history_[i].version;
            sum += static_cast<double>(r.newest - r.oldest) * static_cast<double>(until - before);
            before = until;
        }
        if (l.tokens == 0) return l.had; // parked at once
        r.mean = static_cast<double>(r.oldest) + sum / static_cast<double>(l.tokens);
        return joined(l.had, r);
    }

    static token_versions joined(const token_versions& a, const token_versions& b) {
        if (a.tokens == 0) return b;
        const auto n = static_cast<double>(a.tokens), m = static_cast<double>(b.tokens);
        return {a.oldest, b.newest, (n * a.mean + m * b.mean) / (n + m), a.tokens + b.tokens};
    }

    bool before(std::int32_t a, std::int32_t b) const {
        const double x = lanes_[at(a)].to, y = lanes_[at(b)].to;
        return x < y || (x == y && a < b);
    }
    void put(std::int32_t place, std::int32_t which) {
        heap_[at(place)] = which;
        lanes_[at(which)].place = place;
    }
    void up(std::int32_t place) {
        const std::int32_t which = heap_[at(place)];
        while (place > 0) {
            const std::int32_t parent = (place - 1) / 2;
            if (!before(which, heap_[at(parent)])) break;
            put(place, heap_[at(parent)]);
            place = parent;
        }
        put(place, which);
    }
    void down(std::int32_t place) {
        const std::int32_t which = heap_[at(place)], n = static_cast<std::int32_t>(heap_.size());
        for (std::int32_t child; (child = 2 * place + 1) < n; place = child) {
            if (child + 1 < n && before(heap_[at(child + 1)], heap_[at(child)])) ++child;
            if (!before(heap_[at(child)], which)) break;
            put(place, heap_[at(child)]);
        }
        put(place, which);
    }
    void remove(std::int32_t which) {
        lane& l = lanes_[at(which)];
        context_ -= l.prompt - l.from;
        const std::int32_t place = l.place, last = heap_.back();
        l.place = -1;
        heap_.pop_back();
        if (which != last) {
            put(place, last);
            up(place);
            down(lanes_[at(last)].place);
        }
        if (heap_.empty()) forget();
    }

    // A damaged snapshot must not become an index.
    void check() const {
        const auto damaged = [](bool is) {
            if (is) throw invalid_input("snapshot", "is damaged: the lanes of a rollout worker contradict each other");
        };
        const auto number = [](auto x) { return std::abs(static_cast<double>(x)) < 0x1p60; };
        const auto count = static_cast<std::int64_t>(history_.size());
        damaged(history_.empty() || heap_.size() > lanes_.size() || forgotten_ < 0 || !number(forgotten_));
        damaged(!number(clock_) || !(stall_ >= 0 && number(stall_)) || !number(context_));
        for (const change& h : history_) damaged(!number(h.clock) || !number(h.version));
        std::size_t taken = 0;
        for (std::size_t i = 0; i < lanes_.size(); ++i) {
            const lane& l = lanes_[i];
            if (l.place == -1) continue;
            ++taken;
            damaged(l.place < 0 || at(l.place) >= heap_.size() || at(heap_[at(l.place)]) != i || at(l.who.lane) != i ||
                    l.first < forgotten_ || l.first >= forgotten_ + count || l.tokens < 1 ||
                    l.tokens > (std::int64_t{1} << 50) || l.had.tokens < 0 || l.had.tokens > (std::int64_t{1} << 50) ||
                    !number(l.from) || !number(l.to) || !number(l.prompt));
        }
        damaged(taken != heap_.size());
    }

    engine_speed speed_;
    std::vector<lane> lanes_;
    std::vector<std::int32_t> heap_; // running lanes, the next to finish first
    std::vector<change> history_;    // versions by token clock; the last is installed
    std::int64_t forgotten_ = 0;     // entries dropped before history_[0]
    std::uint64_t prune_at_ = 64;
    double clock_ = 0;        // W: tokens that a sequence running throughout would have gained
    double stall_ = 0;        // seconds of prefill and rebuild before decoding goes on
    double context_ = 0;      // sum over running sequences of prompt - start; plus n·W: their KV tokens
    std::uint8_t paused_ = 0; // a damaged snapshot must not become a bool
    totals done_, asked_;
};

/// Duration of a scoring call (items: sequences), a train step (items: sequences) or a weight transfer (items:
/// workers).
struct simulated_job {
    double fixed = 0;     ///< seconds
    double per_item = 0;  ///< further seconds an item
    double per_token = 0; ///< further seconds a token
    distribution noise = {constant{1}};
    draw_of what = draw_of::own;
    std::uint64_t seed = 0;

    /// Of attempt `attempt` at job `number`.
    double seconds(std::uint64_t number, std::uint32_t attempt, index_t items, double tokens) const {
        const double plain = fixed + per_item * static_cast<double>(items) + per_token * tokens;
        return plain * draw(noise, seed, what, number, attempt);
    }
};

inline void validate(const simulated_job& j, const std::string& argument) {
    for (const auto& [name, x] :
         {std::pair{"fixed", j.fixed}, std::pair{"per_item", j.per_item}, std::pair{"per_token", j.per_token}})
        if (!(x >= 0 && x < forever))
            throw invalid_input(argument + "." + name, "must be finite and at least 0, not " + std::to_string(x));
    validate(j.noise, argument + ".noise");
}

/// Sizes of sequences, drawn by key: every schedule meets the same ones.
struct simulated_lengths {
    distribution response = {lognormal{2000, 1}};
    distribution prompt = {constant{200}};
    std::uint64_t seed = 1;
    index_t group = 1;       ///< answers a prompt, which share its length; response lengths are independent
    bool by_attempt = false; ///< true: a sequence that starts again draws a new length

    struct sizes {
        double response, prompt; // tokens
    };
    sizes of(const ticket& t) const {
        const auto whole = [](double x) { return std::max(1.0, std::round(x)); };
        return {whole(draw(response, seed, draw_of::response_length, t.sample, by_attempt ? t.attempt : 0)),
                std::round(draw(prompt, seed, draw_of::prompt_length, t.sample / static_cast<sample_t>(group)))};
    }
};

inline void validate(const simulated_lengths& l, const std::string& argument) {
    validate(l.response, argument + ".response");
    validate(l.prompt, argument + ".prompt");
    if (l.group < 1) throw invalid_input(argument + ".group", "must be at least 1, not " + std::to_string(l.group));
}

} // namespace opd::sched
