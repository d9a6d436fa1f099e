// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher that follows the student: which of its weights, and when. Self-distillation from a copy that lags behind,
// or from an average, is a second stream of versions beside the student's.
//
//   teacher_stream::lagged(behind, every)     the student as it was `behind` versions ago, renewed every `every`
//                                             versions
//   teacher_stream::averaged(decay, every)    θ_T ← decay θ_T + (1 - decay) θ_S every `every` versions
//
//   on the learner, after version v:    if (auto u = stream.at(v)) install(*u);      before the next batch is scored
//
// Everything is a function of the student's version alone: no state, so a run that resumes has the same teacher, and
// workers agree without talking. The teacher's own version counts its renewals from 0, the weights at the start.
//
// Lag: a row that is scored while the student is at v reads a teacher of student version u with behind ≤ v - u <
// behind + every, once v ≥ behind (of an average: of the last student that went in, behind = 0). The learner keeps
// the weights of `kept()` versions for it, those for which `keeps(u)`. This bounds what the teacher lags, which adds
// to no row's staleness: a score is of the prefix that was drawn, by whatever teacher the run wants.
//
// Throws invalid_input: behind, every, decay outside their range.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "opd/error.hpp"

namespace opd::sched {

/// What becomes of the teacher: its weights are `keep` times what they were and the rest those of student `from`.
struct teacher_update {
    std::int64_t version; ///< the teacher's, from now on
    std::int64_t from;    ///< the student's version that goes in
    double keep;          ///< 0: a copy
    friend bool operator==(const teacher_update&, const teacher_update&) = default;
};

/// Made by lagged() or averaged(); a value without state, the same on every worker.
class teacher_stream {
public:
    static teacher_stream lagged(std::int64_t behind, std::int64_t every = 1) {
        if (behind < 0) throw invalid_input("behind", "must be at least 0");
        return {behind, every, 0};
    }
    static teacher_stream averaged(double decay, std::int64_t every = 1) {
        if (!(decay > 0 && decay < 1)) throw invalid_input("decay", "must lie strictly between 0 and 1");
        return {0, every, decay};
    }

    /// What is due when the student has come to version v ≥ 1.
    std::optional<teacher_update> at(std::int64_t v) const {
        const std::int64_t from = v - behind_;
        if (from < 1 || from % every_ != 0) return std::nullopt;
        return teacher_update{from / every_, from, decay_};
    }
    /// The teacher's version while the student is at v.
    std::int64_t version(std::int64_t v) const { return v < behind_ ? 0 : (v - behind_) / every_; }
    /// The student's version that went into it last; 0: the start.
    std::int64_t source(std::int64_t v) const { return version(v) * every_; }
    /// Whether a student version's weights go in later, so that the learner keeps them until then.
    bool keeps(std::int64_t u) const { return behind_ > 0 && u >= 1 && u % every_ == 0; }
    /// The most that it keeps at a time.
    std::int64_t kept() const { return behind_ == 0 ? 0 : (behind_ + every_ - 1) / every_; }

private:
    teacher_stream(std::int64_t behind, std::int64_t every, double decay)
        : behind_(behind), every_(every), decay_(decay) {
        if (every < 1) throw invalid_input("every", "must be at least 1");
    }
    std::int64_t behind_, every_;
    double decay_;
};

/// The update of one tensor of weights; n numbers each.
inline void apply(const teacher_update& u, std::span<const float> student, std::span<float> teacher) {
    if (student.size() != teacher.size())
        throw invalid_input("teacher", "has " + std::to_string(teacher.size()) + " weights, the student " +
                                           std::to_string(student.size()));
    for (std::size_t i = 0; i < teacher.size(); ++i)
        teacher[i] = u.keep == 0 ? student[i] : float(u.keep * double(teacher[i]) + (1 - u.keep) * double(student[i]));
}

} // namespace opd::sched
