// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Two streams of versions side by side: the policy's, which counts train batches, and the drafter's, which counts the
// updates of it that were committed (spot_coordinator.hpp). No rule of a scheduler asks for a drafter's age: a drafted
// token is verified, whoever drafted it, so any drafter at any age gives the same bytes. Its age costs speed alone, and
// is measured:
//
//   behind        committed updates that the drafter in use lacks
//   since_trained policy versions since the one on whose responses it was trained
//
//   version_streams now;                        // on the learner's side
//   now.policy_is(v);  now.drafter_is(made);    // v: of a step; made: of a commit
//   meter.add(now.age_of(has), drafted, kept);  // after a pass: what the worker drafted with, and what was kept of it
//
// Throws invalid_input: `policy`, `drafter` where a version goes back; `drafted`, `kept` below 0 or kept > drafted.
//
// Source: TLT section 4.2 (an evolving target makes a drafter stale).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Weights of the drafter, by the update that made them: its session's epoch and its round. Version 0: those of the
/// start, of no epoch.
struct drafter_weights {
    version_t version = 0;
    std::uint64_t epoch = 0, round = 0;
    version_t policy = 0; ///< of the policy when the update was committed
    bool operator==(const drafter_weights&) const = default;
    template <class A>
    void fields(A& a) {
        a(version, epoch, round, policy);
    }
};

/// How old the weights are that draft, in updates and in policy versions.
struct drafter_age {
    version_t behind = 0, since_trained = 0;
    bool operator==(const drafter_age&) const = default;
};

/// Where both streams stand: the policy's version, and the drafter that was committed last.
class version_streams {
public:
    version_t policy() const { return policy_; }
    const drafter_weights& drafter() const { return drafter_; }
    void policy_is(version_t v) {
        if (v < policy_) throw invalid_input("policy", back(v, policy_));
        policy_ = v;
    }
    void drafter_is(const drafter_weights& w) {
        if (w.version < drafter_.version) throw invalid_input("drafter", back(w.version, drafter_.version));
        drafter_ = w;
    }
    /// Of weights that are in use; of such as were committed after a snapshot and forgotten with it, 0 behind.
    drafter_age age_of(const drafter_weights& has) const {
        return {std::max<version_t>(0, drafter_.version - has.version), std::max<version_t>(0, policy_ - has.policy)};
    }
    template <class A>
    void fields(A& a) {
        a(policy_, drafter_);
        if constexpr (A::reading) {
            detail::count_range sound;
            sound(policy_, drafter_.version, drafter_.policy);
            detail::needs(sound.holds, "a version is negative");
        }
    }

private:
    static std::string back(version_t to, version_t from) {
        return "goes from version " + std::to_string(from) + " back to " + std::to_string(to);
    }
    version_t policy_ = 0;
    drafter_weights drafter_;
};

/// Passes, drafted tokens and kept ones by the drafter's age; meters of several workers are merged.
class drafter_meter {
public:
    static constexpr int bins = 17; ///< ages 0 … 15; the last: 16 and more
    struct bin {
        std::int64_t passes = 0, drafted = 0, kept = 0;
        bool operator==(const bin&) const = default;
        /// Kept of drafted; 0 where nothing was.
        double share() const { return drafted > 0 ? static_cast<double>(kept) / static_cast<double>(drafted) : 0; }
        template <class A>
        void fields(A& a) {
            a(passes, drafted, kept);
        }
    };
    void add(const drafter_age& age, std::int64_t drafted, std::int64_t kept) {
        if (drafted < 0) throw invalid_input("drafted", "is " + std::to_string(drafted));
        if (kept < 0 || kept > drafted)
            throw invalid_input("kept", "is " + std::to_string(kept) + " of " + std::to_string(drafted));
        count(behind_, age.behind, drafted, kept);
        count(since_, age.since_trained, drafted, kept);
        ++passes_, sum_behind_ += age.behind, sum_since_ += age.since_trained;
        oldest_.behind = std::max(oldest_.behind, age.behind);
        oldest_.since_trained = std::max(oldest_.since_trained, age.since_trained);
    }
    void merge(const drafter_meter& o) {
        for (int i = 0; i < bins; ++i) {
            join(behind_[std::size_t(i)], o.behind_[std::size_t(i)]);
            join(since_[std::size_t(i)], o.since_[std::size_t(i)]);
        }
        passes_ += o.passes_, sum_behind_ += o.sum_behind_, sum_since_ += o.sum_since_;
        oldest_.behind = std::max(oldest_.behind, o.oldest_.behind);
        oldest_.since_trained = std::max(oldest_.since_trained, o.oldest_.since_trained);
    }
    std::int64_t passes() const { return passes_; }
    double mean_behind() const { return mean(sum_behind_); } ///< over passes
    double mean_since_trained() const { return mean(sum_since_); }
    const drafter_age& oldest() const { return oldest_; }
    const std::array<bin, bins>& by_behind() const { return behind_; }
    const std::array<bin, bins>& by_since_trained() const { return since_; }
    template <class A>
    void fields(A& a) {
        for (bin& b : behind_) a(b);
        for (bin& b : since_) a(b);
        a(passes_, sum_behind_, sum_since_, oldest_.behind, oldest_.since_trained);
    }

private:
    static void join(bin& to, const bin& b) { to.passes += b.passes, to.drafted += b.drafted, to.kept += b.kept; }
    static void count(std::array<bin, bins>& of, version_t age, std::int64_t drafted, std::int64_t kept) {
        join(of[static_cast<std::size_t>(std::clamp<version_t>(age, 0, bins - 1))], {1, drafted, kept});
    }
    double mean(std::int64_t sum) const {
        return passes_ > 0 ? static_cast<double>(sum) / static_cast<double>(passes_) : 0;
    }
    std::array<bin, bins> behind_, since_;
    std::int64_t passes_ = 0, sum_behind_ = 0, sum_since_ = 0;
    drafter_age oldest_;
};

} // namespace opd::sched
