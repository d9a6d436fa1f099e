// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a user's three stages look like to a driver. One object of a class is one worker, and all its calls come from
// one thread; sequences travel as std::shared_ptr<const T>, so a stage that hangs or answers late can never race with
// a retry.
//
//   rollout   using rolled_type = …;
//     void start(const ticket&, std::shared_ptr<const rolled_type> prefix)      null: from the prompt
//     void abort(const ticket&)        forget it; its lane is free
//     void install(const weights&)     take exactly these weights; running prefixes are kept
//     void step(std::vector<finished_rollout<rolled_type>>& out, std::stop_token)
//                                      one quantum for all that is running; appends what is finished, and, marked as
//                                      parked, what it gives back as it stands: that goes on later, maybe elsewhere,
//                                      through start(); and what failed, alone, with the reason. May return a record
//                                      of what it did (rows decoded, drafted, verified), from which its cost in
//                                      virtual time follows (timed_stages.hpp)
//     void took(double seconds)        optional: how long that quantum was, before anything else is asked of it; in
//                                      virtual time what it costs there
//     double elasticity()              optional: of its pace in how many run, since it was asked last
//                                      (rollout_cost.hpp): keeps automatic M from more than rollout gains by
//     running()                        how many run
//     finished_rollout<rolled_type> park(const ticket&)
//                                      optional: stop it, its lane is free, and say what it has drawn (no token yet:
//                                      no sequence); without it nobody may ask
//     std::int64_t drawn(const ticket&) const
//                                      optional: tokens of its response so far, its prefix included, asked of what
//                                      is about to be aborted
//     std::optional<T> spare(std::stop_token)
//                                      optional: a short quantum of other work, such as training a drafter, while it
//                                      has its weights and the scheduler nothing for it to run; empty: there is
//                                      nothing to do until it has run something again, or has other weights. The
//                                      token is triggered when it is wanted. T: a record of what it did
//     void export_partials(std::vector<partial_rollout<rolled_type>>& out)
//                                      optional: prefixes of what is running; without it start() never gets one
//   teacher   using scored_type = …;
//     std::vector<std::shared_ptr<const scored_type>> score(std::span<const std::shared_ptr<const rolled_type>>,
//                                                           std::stop_token)
//                                      one entry a sequence, null: not scored (a partial answer)
//   learner
//     updates train(std::span<const sequence_view<rolled_type, scored_type>>, const train_call&, std::stop_token)
//                                      publishes the weights call.makes(), then returns how many optimizer updates
//                                      it made. A batch may be empty (all of it failed): then they are those it went
//                                      on from
//
// Publish by the call's job, and keep the last two: a worker that comes back while the learner trains gets those
// before. A learner that is lost after it has trained, but before its answer is heard, is asked to train the same
// batch again, in another call: it should publish what it has under the name of that call, instead of learning twice
// from it.
//
// A call that cannot have what it is about to read throws lost_payloads: those sequences are drawn again, and of a
// teacher's call the others are asked for at once. A call that fails otherwise throws. A call whose stop token is
// triggered should return or throw soon; what it answers then counts for nothing. The token is triggered by the thread
// that runs the driver: a stop callback must not call the driver.
#pragma once

#include <concepts>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What a stage throws when payloads cannot be had any more: their holder is gone, their store has dropped them. A
/// learner throws it before it has learnt from any of the batch.
class lost_payloads : public std::runtime_error {
public:
    /// `which`: sequences, by their place in the call; of start() there is one.
    explicit lost_payloads(std::vector<std::size_t> which, const std::string& why = "payloads are lost")
        : std::runtime_error(why), which_(std::move(which)) {}
    const std::vector<std::size_t>& which() const { return which_; }

private:
    std::vector<std::size_t> which_;
};

/// What a rollout stage gives back of one attempt: finished, parked or failed, `versions` saying what drew each token.
template <class Rolled>
struct finished_rollout {
    sched::ticket ticket;
    token_versions versions;
    std::shared_ptr<const Rolled> sequence;
    bool parked = false;            ///< not finished: what it has so far
    std::exception_ptr failed = {}; ///< not null: this attempt failed, for this reason
    template <class A>
    void fields(A& a) { // rollout_actor takes failed ones out before anybody writes these
        a(ticket, versions, parked);
        detail::payload_fields(a, sequence);
    }
};

/// What is drawn so far of a running sequence.
template <class Rolled>
struct partial_rollout {
    sched::ticket ticket;
    std::shared_ptr<const Rolled> sequence;
    template <class A>
    void fields(A& a) {
        a(ticket);
        detail::pointer_fields(a, sequence);
    }
};

/// A scored sequence, as the learner gets it.
template <class Rolled, class Scored>
struct sequence_view {
    sched::ticket ticket;
    version_t start = 0; ///< of its start
    token_versions versions;
    std::shared_ptr<const Rolled> rolled;
    std::shared_ptr<const Scored> scored;
    template <class A>
    void fields(A& a) {
        a(ticket, start, versions);
        detail::pointer_fields(a, rolled);
        detail::pointer_fields(a, scored);
    }
};

/// One call of the learner.
struct train_call {
    std::uint64_t job = 0; ///< names what is published
    weights from;          ///< that it goes on from
    weights makes() const { return {from.version + 1, job}; }
    template <class A>
    void fields(A& a) {
        a(job, from);
    }
};

/// What a rollout stage must have; the optional functions above are found by name.
template <class R>
concept rollout_stage = requires(R& r, const ticket& t, const weights& w,
                                 std::shared_ptr<const typename R::rolled_type> prefix,
                                 std::vector<finished_rollout<typename R::rolled_type>>& out, std::stop_token stop) {
    r.start(t, prefix);
    r.abort(t);
    r.install(w);
    r.step(out, stop);
    { r.running() } -> std::convertible_to<index_t>;
};

/// What a teacher stage must have: one score, or null, a sequence, in order.
template <class T, class Rolled>
concept teacher_stage = requires(T& t, std::span<const std::shared_ptr<const Rolled>> rolled, std::stop_token stop) {
    { t.score(rolled, stop) } -> std::convertible_to<std::vector<std::shared_ptr<const typename T::scored_type>>>;
};

/// What a learner stage must have: it publishes the new weights before it returns.
template <class L, class Rolled, class Scored>
concept learner_stage = requires(L& l, std::span<const sequence_view<Rolled, Scored>> batch, const train_call& call,
                                 std::stop_token stop) {
    { l.train(batch, call, stop) } -> std::convertible_to<index_t>;
};

namespace detail {
template <class R>
using step_result = decltype(std::declval<R&>().step(
    std::declval<std::vector<finished_rollout<typename R::rolled_type>>&>(), std::stop_token{}));
/// What step() says that it did; how many sequences ran, if it says nothing.
template <class R>
using work_of = std::conditional_t<std::is_void_v<step_result<R>>, index_t, std::remove_cvref_t<step_result<R>>>;
template <class R>
concept exports_partials = requires(R& r, std::vector<partial_rollout<typename R::rolled_type>>& out) {
    r.export_partials(out);
};
template <class R>
concept spares = requires(R& r) {
    { r.spare(std::stop_token{}).has_value() } -> std::convertible_to<bool>;
};
template <class R>
struct spare_record {
    using type = index_t;
};
template <spares R>
struct spare_record<R> {
    using type = typename decltype(std::declval<R&>().spare(std::stop_token{}))::value_type;
};
/// What spare() says that it did.
template <class R>
using spare_of = typename spare_record<R>::type;
template <class R>
concept counts_drawn = requires(const R& r, const ticket& t) {
    { r.drawn(t) } -> std::convertible_to<std::int64_t>;
};
template <class R>
concept parks = requires(R& r, const ticket& t) {
    { r.park(t) } -> std::same_as<finished_rollout<typename R::rolled_type>>;
};
} // namespace detail

} // namespace opd::sched
