// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What goes wrong in a run in virtual time: a model says so of an attempt, a call or a transfer.
#pragma once

#include <cstdint>

#include "opd/sched/types.hpp"

namespace opd::sched {

/// What goes wrong with one attempt, call or transfer.
struct fault {
    enum class kind : std::uint8_t {
        none,
        fail, ///< fails `after` seconds after its start (a transfer: is repeated, as `late`)
        hang, ///< never answers; an attempt can still be aborted
        late, ///< answers `after` seconds late, even if the worker is gone by then (a transfer: takes that much longer)
        twice,   ///< answers, and again `after` seconds later
        partial, ///< scoring only: of the tickets those are scored whose bit is set in `which` (position modulo 64)
        death,   ///< its worker dies `after` seconds after the start, is seen to, and returns `back` seconds later
        silence, ///< as death, but nobody is told: only deadlines find out
        gone ///< scoring, training: at its end it finds that payloads are lost, by `which` as partial; a scoring call
             ///< answers of the others. Somebody says so of the first of them `after` seconds later again
    };
    friend constexpr kind last_of(kind) { return kind::gone; }
    kind what = kind::none;
    double after = 0;
    double back = forever;   ///< death, silence
    std::uint64_t which = 0; ///< partial, gone
};

namespace detail {
// What the model says, if it says anything.
template <class Model>
fault fault_of_rollout(const Model& m, const ticket& t) {
    if constexpr (requires { m.rollout_fault(t); }) return m.rollout_fault(t);
    return {};
}
template <class Model>
fault fault_of_teacher(const Model& m, std::uint64_t job, std::int32_t worker) {
    if constexpr (requires { m.teacher_fault(job, worker); }) return m.teacher_fault(job, worker);
    return {};
}
template <class Model>
fault fault_of_learner(const Model& m, std::uint64_t job) {
    if constexpr (requires { m.learner_fault(job); }) return m.learner_fault(job);
    return {};
}
template <class Model>
fault fault_of_sync(const Model& m, std::int32_t worker, const weights& w, std::uint32_t life) {
    if constexpr (requires { m.sync_fault(worker, w, life); }) return m.sync_fault(worker, w, life);
    return {};
}
} // namespace detail
} // namespace opd::sched
