// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tuners choose how much to speculate, step by step. A *strategy* says how deep to draft, how many children a node has,
// and how many drafted tokens to verify. Its worth depends on the batch (a large batch leaves no room to verify more)
// and on how well the drafter does today. A tuner is a state machine without a clock and without random numbers of its
// own: the caller says how long a step took, and hands in numbers from (0, 1).
//
//   beg_mab         bucketed epsilon-greedy (TLT, algorithm 1): of the arms of the batch's bucket the one with the
//                   largest median reward over its last `window` steps; with probability epsilon any of them
//   ucb1            the same buckets; the largest mean reward plus a bonus for what was tried little (Auer et al. 2002)
//   fixed_table     a strategy for each range of batches
//   elastic_switch  whether to speculate at all, by how many sequences run, with hysteresis
//
// Buckets: arms that verify equally many tokens form a group. The groups in descending order get the ranges of batches
// [t_1, t_2), [t_2, t_3), …; the last range has no end. There is no speculation below t_1, nor where no arm of the
// bucket keeps verify * batch within `most_tokens`.
//
// Reward of a step: (accepted + 1)·batch/seconds (TLT), accepted the mean number of drafted tokens that a sequence
// kept. The default divides that by the batch: batches of one bucket differ, and TLT's reward favours an arm that was
// tried on larger ones.
//
// published_tuner.hpp has beg_mab as its authors' code has it, cost_profile.hpp a tuner by measured costs,
// any_tuner.hpp all of them in one type.
//
// Ranks that decode together need one decision. A tuner is a function of what it was told: two tuners that are asked
// for the same batches, hear the same steps and get the same numbers choose alike. So each rank hears `merged` of all
// ranks' steps (one all-gather of three numbers a step), is asked for its `batch`, and draws from `keyed_uniforms` of
// the step. Or one rank chooses, and tells the others.
//
// Source: TLT (Taming the Long Tail), section 5 and algorithm 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/rng.hpp"

namespace opd::spec {

/// How much to speculate in a step; {} is not at all.
struct strategy {
    std::int32_t depth = 0;  ///< of the tree of drafts
    std::int32_t top_k = 0;  ///< children a node
    std::int32_t verify = 0; ///< drafted tokens that the target looks at
    bool none() const { return verify == 0; }
    bool operator==(const strategy&) const = default;
    template <class A>
    void fields(A& a) {
        a(depth, top_k, verify);
    }
};

/// What a step is worth to a bandit; seconds are the step's.
enum class reward_kind : std::uint8_t {
    per_sequence,     ///< (accepted + 1)/seconds
    tokens_per_second ///< (accepted + 1)·batch/seconds
};
constexpr reward_kind last_of(reward_kind) { return reward_kind::tokens_per_second; }

/// Arms, buckets and memory of the bandits. `thresholds` are t_1, t_2, …, in sequences.
struct tuner_options {
    std::vector<strategy> arms = {{8, 4, 48}, {4, 4, 48}, {8, 4, 32}, {4, 4, 32},
                                  {6, 4, 16}, {3, 4, 16}, {4, 2, 8},  {2, 1, 8}};
    std::vector<index_t> thresholds = {1, 2, 5, 21}; ///< as many as there are different `verify`
    double epsilon = 0.1;                            ///< beg_mab
    double bonus = 1;                                ///< ucb1: times sqrt(2 ln n / n_arm) of the largest mean
    std::int32_t window = 300;                       ///< steps of an arm that count
    std::int32_t tries = 1;  ///< steps of an arm before it is compared with others: those that had fewest go first
    index_t most_tokens = 0; ///< verify * batch; 0: no limit
    reward_kind reward = reward_kind::per_sequence;
};

/// Numbers from (0, 1), one a call.
template <class U>
concept uniform_source = requires(U& u) {
    { u() } -> std::convertible_to<double>;
};

/// Numbers that are a function of (seed, step) and of how many were asked for: the same on every rank, and after a
/// restart.
class keyed_uniforms {
public:
    keyed_uniforms(std::uint64_t seed, std::uint64_t step) : noise_(seed, noise_stream::draft, step, chooser) {}
    double operator()() { return keyed_uniform(noise_, asked_++); }

private:
    static constexpr std::uint32_t chooser = 0xffffffffu; // no token has this position
    noise_row noise_;
    std::uint32_t asked_ = 0;
};

/// What one rank saw of a step.
struct step_observation {
    index_t batch = 0;   ///< sequences
    double accepted = 0; ///< drafted tokens that a sequence kept in the mean
    double seconds = 0;
};

/// What all ranks saw, in the same order on each: the largest batch, accepted a sequence, the time of the slowest.
/// Ranks without sequences count by their time alone.
inline step_observation merged(std::span<const step_observation> ranks) {
    if (ranks.empty()) throw invalid_input("ranks", "there is none");
    step_observation all;
    double tokens = 0, sequences = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
        const step_observation& x = ranks[r];
        if (x.batch < 0) throw invalid_input("batch", "must be at least 0", static_cast<index_t>(r));
        all.batch = std::max(all.batch, x.batch), all.seconds = std::max(all.seconds, x.seconds);
        if (x.batch > 0) tokens += x.accepted * static_cast<double>(x.batch), sequences += static_cast<double>(x.batch);
    }
    if (sequences > 0) all.accepted = tokens / sequences;
    return all;
}

namespace detail {

inline void check_step(index_t batch, double accepted, double seconds) {
    if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
    if (!(accepted >= 0) || !opd::detail::is_finite(accepted))
        throw invalid_input("accepted", "must be finite and at least 0");
    if (!(seconds > 0) || !opd::detail::is_finite(seconds))
        throw invalid_input("seconds", "must be finite and positive");
}
inline void check_arms(const std::vector<strategy>& arms) {
    if (arms.empty()) throw invalid_input("arms", "there is none");
    for (std::size_t i = 0; i < arms.size(); ++i) {
        if (arms[i].depth < 1 || arms[i].top_k < 1 || arms[i].verify < 1)
            throw invalid_input("arms", "depth, top_k and verify are at least 1", static_cast<index_t>(i));
        if (std::find(arms.begin(), arms.begin() + static_cast<std::ptrdiff_t>(i), arms[i]) !=
            arms.begin() + static_cast<std::ptrdiff_t>(i))
            throw invalid_input("arms", "is there twice", static_cast<index_t>(i));
    }
}
/// Numbers of tokens to verify that there are, descending.
inline std::vector<std::int32_t> verify_sizes(const std::vector<strategy>& arms) {
    std::vector<std::int32_t> sizes;
    for (const strategy& s : arms) sizes.push_back(s.verify);
    std::sort(sizes.begin(), sizes.end(), std::greater<>());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    return sizes;
}
/// Of values in any order; an even number of them: the mean of the middle two. At least one.
inline double median_of(std::vector<double>& x) {
    const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    if (x.size() % 2 == 1) return *middle;
    return (*middle + *std::max_element(x.begin(), middle)) / 2;
}

/// The last values, as many as it was made for.
struct reward_window {
    std::vector<double> values;
    std::size_t oldest = 0;
    void add(double x, std::int32_t most) {
        if (values.size() < static_cast<std::size_t>(most))
            values.push_back(x);
        else
            values[oldest] = x, oldest = (oldest + 1) % values.size();
    }
    template <class A>
    void fields(A& a) {
        a(values, oldest);
    }
    void check(std::int32_t most) const {
        if (values.size() > static_cast<std::size_t>(most) || (oldest != 0 && oldest >= values.size()))
            throw invalid_input("snapshot", "is of another window");
    }
};

/// Arms by bucket, and the rewards of each over a window.
class arm_table {
public:
    explicit arm_table(tuner_options o) : options(std::move(o)) {
        const auto refuse = [](const char* name, const std::string& why) { throw invalid_input(name, why); };
        check_arms(options.arms);
        sizes_ = verify_sizes(options.arms);
        if (options.thresholds.size() != sizes_.size())
            refuse("thresholds", "must be as many as there are different numbers of tokens to verify, " +
                                     std::to_string(sizes_.size()) + ", not " +
                                     std::to_string(options.thresholds.size()));
        for (std::size_t i = 0; i < options.thresholds.size(); ++i)
            if (options.thresholds[i] <= (i > 0 ? options.thresholds[i - 1] : 0))
                throw invalid_input("thresholds", "must be positive and rise", static_cast<index_t>(i));
        if (!(options.epsilon >= 0 && options.epsilon <= 1)) refuse("epsilon", "must lie in [0, 1]");
        if (!(options.bonus >= 0) || !opd::detail::is_finite(options.bonus))
            refuse("bonus", "must be finite and at least 0");
        if (options.window < 1) refuse("window", "must be at least 1");
        if (options.tries < 1 || options.tries > options.window) refuse("tries", "must lie in [1, window]");
        if (options.most_tokens < 0) refuse("most_tokens", "must be at least 0");
        rewards.resize(options.arms.size());
        for (reward_window& w : rewards) w.values.reserve(static_cast<std::size_t>(options.window));
        eligible.reserve(options.arms.size());
        sorted_.reserve(static_cast<std::size_t>(options.window));
    }

    /// Fills `eligible` with the arms for a batch, as configured.
    void find(index_t batch) {
        if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
        eligible.clear();
        const auto above = std::upper_bound(options.thresholds.begin(), options.thresholds.end(), batch);
        if (above == options.thresholds.begin()) return;
        const std::int32_t size = sizes_[static_cast<std::size_t>(above - options.thresholds.begin()) - 1];
        if (options.most_tokens > 0 && size > options.most_tokens / batch) return;
        for (std::size_t i = 0; i < options.arms.size(); ++i)
            if (options.arms[i].verify == size) eligible.push_back(i);
    }
    /// Of an arm that is none: nothing.
    void hear(const strategy& s, index_t batch, double accepted, double seconds) {
        check_step(batch, accepted, seconds);
        const auto at = std::find(options.arms.begin(), options.arms.end(), s);
        if (at == options.arms.end()) return;
        double r = (accepted + 1) / seconds;
        if (options.reward == reward_kind::tokens_per_second) r *= static_cast<double>(batch);
        rewards[static_cast<std::size_t>(at - options.arms.begin())].add(r, options.window);
    }
    /// Of the eligible arms with fewer than `tries` rewards the one with fewest, the first of these.
    std::optional<std::size_t> untried() const {
        std::optional<std::size_t> r;
        auto fewest = static_cast<std::size_t>(options.tries);
        for (const std::size_t i : eligible)
            if (const std::size_t n = rewards[i].values.size(); n < fewest) fewest = n, r = i;
        return r;
    }
    /// Of an arm's window; an even one: the mean of the middle two. It has been tried.
    double median(std::size_t arm) {
        const std::vector<double>& x = rewards[arm].values;
        sorted_.assign(x.begin(), x.end());
        return median_of(sorted_);
    }
    double mean(std::size_t arm) const {
        const std::vector<double>& x = rewards[arm].values;
        double sum = 0;
        for (const double r : x) sum += r;
        return sum / static_cast<double>(x.size());
    }
    /// The eligible arm of the largest value; ties to the first.
    template <class Value>
    strategy best(Value&& value) {
        std::size_t chosen = eligible.front();
        double most = value(chosen);
        for (const std::size_t i : eligible)
            if (const double v = value(i); v > most) most = v, chosen = i;
        return options.arms[chosen];
    }
    template <class A>
    void fields(A& a) {
        for (reward_window& w : rewards) {
            a(w);
            w.check(options.window);
        }
    }

    tuner_options options;
    std::vector<reward_window> rewards; // by arm
    std::vector<std::size_t> eligible;  // of the batch that was asked for last

private:
    std::vector<std::int32_t> sizes_; // of the groups, descending
    std::vector<double> sorted_;
};

} // namespace detail

/// TLT's bucketed epsilon-greedy tuner, algorithm 1 as printed.
class beg_mab {
public:
    explicit beg_mab(tuner_options o = {}) : arms_(std::move(o)) {}

    /// For a step of `batch` sequences. Draws nothing where there is nothing to choose, one number else, two where it
    /// explores.
    template <uniform_source U>
    strategy choose(index_t batch, U&& uniform) {
        arms_.find(batch);
        if (arms_.eligible.empty()) return {};
        const std::size_t n = arms_.eligible.size();
        if (n == 1) return arms_.options.arms[arms_.eligible.front()];
        if (static_cast<double>(uniform()) < arms_.options.epsilon) {
            const auto at = static_cast<std::size_t>(static_cast<double>(uniform()) * static_cast<double>(n));
            return arms_.options.arms[arms_.eligible[std::min(at, n - 1)]];
        }
        if (const auto i = arms_.untried()) return arms_.options.arms[*i];
        return arms_.best([&](std::size_t i) { return arms_.median(i); });
    }
    /// What a step with that strategy came to.
    void heard(const strategy& s, index_t batch, double accepted, double seconds) {
        arms_.hear(s, batch, accepted, seconds);
    }
    const tuner_options& options() const { return arms_.options; }
    template <class A>
    void fields(A& a) {
        a(arms_);
    }

private:
    detail::arm_table arms_;
};

/// Upper confidence bounds on mean rewards (Auer et al. 2002); no random numbers.
class ucb1 {
public:
    explicit ucb1(tuner_options o = {}) : arms_(std::move(o)) {}

    strategy choose(index_t batch) {
        arms_.find(batch);
        if (arms_.eligible.empty()) return {};
        if (const auto i = arms_.untried()) return arms_.options.arms[*i];
        double all = 0, most = 0;
        for (const std::size_t i : arms_.eligible) {
            all += static_cast<double>(arms_.rewards[i].values.size());
            most = std::max(most, arms_.mean(i));
        }
        return arms_.best([&](std::size_t i) {
            const auto n = static_cast<double>(arms_.rewards[i].values.size());
            return arms_.mean(i) + arms_.options.bonus * most * std::sqrt(2 * std::log(all) / n);
        });
    }
    void heard(const strategy& s, index_t batch, double accepted, double seconds) {
        arms_.hear(s, batch, accepted, seconds);
    }
    const tuner_options& options() const { return arms_.options; }
    template <class A>
    void fields(A& a) {
        a(arms_);
    }

private:
    detail::arm_table arms_;
};

/// The strategy of the last line whose batch is not above the one asked for; below the first: none.
class fixed_table {
public:
    struct line {
        index_t batch = 1;
        spec::strategy strategy;
    };
    explicit fixed_table(std::vector<line> lines) : lines_(std::move(lines)) {
        for (std::size_t i = 0; i < lines_.size(); ++i)
            if (lines_[i].batch <= (i > 0 ? lines_[i - 1].batch : 0))
                throw invalid_input("lines", "batches must be positive and rise", static_cast<index_t>(i));
    }
    strategy choose(index_t batch) const {
        const auto above =
            std::upper_bound(lines_.begin(), lines_.end(), batch, [](index_t b, const line& l) { return b < l.batch; });
        return above == lines_.begin() ? strategy{} : (above - 1)->strategy;
    }

private:
    std::vector<line> lines_;
};

/// On after `checks` checks in a row with at most `on_at` running, off with more than `off_at`. What turns on costs
/// the drafter's state of all that runs, so it should not flutter.
class elastic_switch {
public:
    struct options_type {
        index_t on_at = 32, off_at = 40;
        std::int32_t checks = 10;
    };
    explicit elastic_switch(const options_type& o) : options_(o) {
        if (o.on_at < 0 || o.off_at < o.on_at)
            throw invalid_input("off_at", "must be at least on_at, which is at least 0");
        if (o.checks < 1) throw invalid_input("checks", "must be at least 1");
    }
    elastic_switch() : elastic_switch(options_type{}) {}

    /// Once a step; whether to speculate now.
    bool check(index_t running) {
        if (running > options_.off_at) on_ = false;
        below_ = running <= options_.on_at ? std::min(below_ + 1, options_.checks) : 0;
        on_ = on_ || below_ == options_.checks;
        return on_;
    }
    bool on() const { return on_; }
    template <class A>
    void fields(A& a) {
        a(on_, below_);
        if (below_ < 0 || below_ > options_.checks) throw invalid_input("snapshot", "is of another switch");
    }

private:
    options_type options_;
    bool on_ = false;
    std::int32_t below_ = 0;
};

} // namespace opd::spec
