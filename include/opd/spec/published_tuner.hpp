// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// TLT's tuner as its published code has it, which is not quite what the paper says: to compare with what others have
// measured, or to reproduce it. Beside beg_mab (tuner.hpp, which is algorithm 1 as printed):
//
//   arms       are sorted by their names, depth_topk_verify, as strings: 12_2_32 before 4_2_32; ties go to the first of
//              these
//   batches    below the first threshold speculate too, with any arm
//   instances  one a group of batches, each with windows of its own: 1, 2, …, 31, then by 8 up to 120, then by 32 up to
//              256, the last one open
//   reward     length · batch/seconds, where length is not that of the step but a cached one: the median of (accepted +
//              1) over the arm's windows of all instances *without* the present step, computed anew with probability
//              0.1 or where it is 0 or was never computed
//   so         an arm's first reward is 0, whatever it was worth, and an arm that is tried once loses against any other
//              until chance takes it again
//
// A single arm: its own step's length, and nothing is drawn. The published settings have one arm a bucket, so that
// nothing is ever chosen: a table by batch (`published_arms`). Their numbers come from one generator a rank, so ranks
// may disagree; here they come from the caller.
//
// Source: the code that accompanies TLT (Taming the Long Tail), as of 2026.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// One arm a bucket.
inline const std::array<strategy, 4> published_arms = {{{8, 4, 48}, {8, 4, 32}, {8, 4, 16}, {8, 4, 8}}};

/// TLT's tuner with the differences above; else prefer beg_mab.
class published_beg_mab {
public:
    /// Of the options `bonus`, `most_tokens` and `reward` are not looked at: this tuner has no such thing.
    explicit published_beg_mab(tuner_options o = {});

    template <uniform_source U>
    strategy choose(index_t batch, U&& uniform);

    /// What a step with that strategy came to; draws a number, for the cache, unless there is but one arm. Returns
    /// the reward.
    template <uniform_source U>
    double heard(const strategy& s, index_t batch, double accepted, double seconds, U&& uniform);

    const tuner_options& options() const { return options_; }
    template <class A>
    void fields(A& a) {
        for (instance& i : instances_)
            for (arm& x : i.arms) {
                a(x.rewards, x.lengths);
                x.rewards.check(options_.window), x.lengths.check(options_.window);
            }
        const std::size_t arms = cached_.size();
        a(cached_);
        if (cached_.size() != arms) throw invalid_input("snapshot", "is of other arms");
    }

private:
    struct arm {
        detail::reward_window rewards, lengths;
    };
    struct instance {
        index_t from = 1; // batch
        std::vector<arm> arms;
    };
    static std::string name(const strategy& s) {
        return std::to_string(s.depth) + "_" + std::to_string(s.top_k) + "_" + std::to_string(s.verify);
    }
    instance& of(index_t batch) {
        const auto above = std::upper_bound(instances_.begin(), instances_.end(), batch,
                                            [](index_t b, const instance& i) { return b < i.from; });
        return *(above - 1);
    }
    tuner_options options_;
    std::vector<std::int32_t> sizes_; // numbers of tokens to verify, descending
    std::vector<instance> instances_;
    std::vector<double> cached_; // length, of each arm
    std::vector<double> all_;
    std::vector<std::size_t> eligible_;
};

inline published_beg_mab::published_beg_mab(tuner_options o) : options_(std::move(o)) {
    (void)detail::arm_table(options_); // refuses what cannot be
    std::sort(options_.arms.begin(), options_.arms.end(),
              [](const strategy& a, const strategy& b) { return name(a) < name(b); });
    sizes_ = detail::verify_sizes(options_.arms);
    for (index_t from = 1; from <= 256; from += from < 32 ? 1 : from < 128 ? 8 : 32)
        instances_.push_back({from, std::vector<arm>(options_.arms.size())});
    cached_.assign(options_.arms.size(), 0);
}

template <uniform_source U>
strategy published_beg_mab::choose(index_t batch, U&& uniform) {
    if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
    if (options_.arms.size() == 1) return options_.arms[0];
    const auto above = std::upper_bound(options_.thresholds.begin(), options_.thresholds.end(), batch);
    const bool below_all = above == options_.thresholds.begin();
    eligible_.clear();
    for (std::size_t i = 0; i < options_.arms.size(); ++i)
        if (below_all ||
            options_.arms[i].verify == sizes_[static_cast<std::size_t>(above - options_.thresholds.begin()) - 1])
            eligible_.push_back(i);
    const std::size_t n = eligible_.size();
    if (n == 1 && !below_all) return options_.arms[eligible_.front()];
    if (static_cast<double>(uniform()) < options_.epsilon) {
        const auto at = static_cast<std::size_t>(static_cast<double>(uniform()) * static_cast<double>(n));
        return options_.arms[eligible_[std::min(at, n - 1)]];
    }
    const instance& here = of(batch);
    std::size_t best = eligible_.front();
    double most = -1;
    for (const std::size_t i : eligible_) {
        all_ = here.arms[i].rewards.values;
        const double r = all_.empty() ? std::numeric_limits<double>::infinity() : detail::median_of(all_);
        if (r > most) most = r, best = i;
    }
    return options_.arms[best];
}

template <uniform_source U>
double published_beg_mab::heard(const strategy& s, index_t batch, double accepted, double seconds, U&& uniform) {
    detail::check_step(batch, accepted, seconds);
    const auto found = std::find(options_.arms.begin(), options_.arms.end(), s);
    if (found == options_.arms.end()) return 0;
    const auto i = static_cast<std::size_t>(found - options_.arms.begin());
    double length = accepted + 1;
    if (options_.arms.size() > 1) {
        const bool anew = static_cast<double>(uniform()) < 0.1;
        if (anew || cached_[i] == 0) {
            all_.clear();
            for (const instance& x : instances_)
                all_.insert(all_.end(), x.arms[i].lengths.values.begin(), x.arms[i].lengths.values.end());
            cached_[i] = all_.empty() ? 0 : detail::median_of(all_);
        }
        length = cached_[i];
    }
    const double reward = length * static_cast<double>(batch) / seconds;
    arm& here = of(batch).arms[i];
    here.rewards.add(reward, options_.window);
    here.lengths.add(accepted + 1, options_.window);
    return reward;
}

} // namespace opd::spec
