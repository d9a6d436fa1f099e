// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a user's three stages look like to a driver. One object of a class is one worker, and all its calls come from one
// thread; sequences travel as std::shared_ptr<const T>, so a stage that hangs or answers late can never race with a retry.
//
//   rollout   using rolled_type = …;
//             void start(const ticket&)                        and/or
//             void start(const ticket&, std::shared_ptr<const rolled_type> partial)   null: from the prompt
//             void abort(const ticket&)                        forget it; its lane is free
//             void install(version_t)                          take these weights, the newest published; running prefixes
//                                                              are kept
//             void step(std::vector<finished_rollout<rolled_type>>& out[, std::stop_token])
//                                                              one quantum for all that is running; appends what is finished
//             running()                                        how many run
//             void export_partials(std::vector<partial_rollout<rolled_type>>& out)    optional: prefixes of what is running
//   teacher   using scored_type = …;
//             std::vector<std::shared_ptr<const scored_type>> score(std::span<const std::shared_ptr<const rolled_type>>
//                                                                   [, std::stop_token])
//                                                              one entry a sequence, null: not scored (a partial answer)
//   learner   updates train(std::span<const sequence_view<rolled_type, scored_type>>, version_t[, std::stop_token])
//                                                              publishes the weights of version + 1, then returns how many
//                                                              optimizer updates it made; `version` is the one that is
//                                                              trained from. A batch may be empty (all of it failed): then
//                                                              the weights of version + 1 are those of version
//
// Publish by version and keep the last two: while no worker is lost, the version that is installed is the newest published;
// but a worker that comes back while others finish under the old weights gets those before, and a learner that is lost after
// it has published and before it has answered is given the same version to train again.
//
// A call that fails throws. A call whose stop token is triggered should return or throw soon; what it answers then counts
// for nothing. The token is triggered under the driver's lock: a stop callback must not call the driver.
#pragma once

#include <concepts>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "opd/sched/types.hpp"

namespace opd::sched {

template <class Rolled>
struct finished_rollout {
    sched::ticket ticket;
    token_versions versions;
    std::shared_ptr<const Rolled> sequence;
};

/// What is drawn so far of a running sequence.
template <class Rolled>
struct partial_rollout {
    sched::ticket ticket;
    std::shared_ptr<const Rolled> sequence;
};

/// A scored sequence, as the learner gets it.
template <class Rolled, class Scored>
struct sequence_view {
    sched::ticket ticket;
    version_t start = 0; ///< of its start
    token_versions versions;
    std::shared_ptr<const Rolled> rolled;
    std::shared_ptr<const Scored> scored;
};

namespace detail {
template <class R>
concept starts_fresh = requires(R& r, const ticket& t) {
    r.start(t);
};
template <class R>
concept starts_partial = requires(R& r, const ticket& t, std::shared_ptr<const typename R::rolled_type> partial) {
    r.start(t, partial);
};
template <class R>
concept steps_stoppably = requires(R& r, std::vector<finished_rollout<typename R::rolled_type>>& out,
                                   std::stop_token stop) {
    r.step(out, stop);
};
template <class R>
concept steps = steps_stoppably<R> || requires(R& r, std::vector<finished_rollout<typename R::rolled_type>>& out) {
    r.step(out);
};
template <class R>
concept exports_partials = requires(R& r, std::vector<partial_rollout<typename R::rolled_type>>& out) {
    r.export_partials(out);
};
template <class T, class Rolled>
concept scores_stoppably = requires(T& t, std::span<const std::shared_ptr<const Rolled>> rolled, std::stop_token stop) {
    { t.score(rolled, stop) } -> std::convertible_to<std::vector<std::shared_ptr<const typename T::scored_type>>>;
};
template <class T, class Rolled>
concept scores = scores_stoppably<T, Rolled> || requires(T& t, std::span<const std::shared_ptr<const Rolled>> rolled) {
    { t.score(rolled) } -> std::convertible_to<std::vector<std::shared_ptr<const typename T::scored_type>>>;
};
template <class L, class View>
concept trains_stoppably = requires(L& l, std::span<const View> batch, version_t version, std::stop_token stop) {
    { l.train(batch, version, stop) } -> std::convertible_to<index_t>;
};
template <class L, class View>
concept trains = trains_stoppably<L, View> || requires(L& l, std::span<const View> batch, version_t version) {
    { l.train(batch, version) } -> std::convertible_to<index_t>;
};
} // namespace detail

template <class R>
concept rollout_stage = requires(R& r, const ticket& t, version_t v) {
    typename R::rolled_type;
    r.abort(t);
    r.install(v);
    { r.running() } -> std::convertible_to<index_t>;
}
&&(detail::starts_fresh<R> || detail::starts_partial<R>)&&detail::steps<R>;

template <class T, class Rolled>
concept teacher_stage = requires {
    typename T::scored_type;
}
&&detail::scores<T, Rolled>;

template <class L, class Rolled, class Scored>
concept learner_stage = detail::trains<L, sequence_view<Rolled, Scored>>;

} // namespace opd::sched
