// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a worker does with its messages, whoever carries them: a thread's mailbox (thread_driver.hpp), virtual time
// (timed_stages.hpp) or, between processes, a socket. A worker receives commands, calls its stage and sends replies;
// it knows nothing of the scheduler, and the scheduler nothing of stages.
//
//   command                                        replies
//   begin{life, slots}     forget all, be up       worker_up, of this life
//   start{ticket, prefix}                          rolled_out{ticket, sequence} in time, rollout_failed or parked
//   abort{ticket}                                  aborted, unless the ticket was answered already
//   park{ticket}                                   parked{ticket, sequence}, likewise
//   spare{stop}                                    rollout, with nothing to run: spare quanta until something else
//                                                  is asked; none, but `spared` when there is nothing more to do
//   install{weights}                               synced{job, prefixes if they are wanted}, unless it is superseded
//                                                  before its turn; what it throws ends the life
//   score{job, sequences}                          scored{job, scores}, score_failed
//   train{call, batch}                             learned{job}, learn_failed
//   hook{function}         learner: between calls  none, but for what it throws
//   halt                                           the last one
//
// Commands of another life than the present are ignored, and so are weights of a lower job than those that were
// installed: they may come late. A worker goes to the newest weights: those that are superseded before their turn are
// not installed. Once it has installed some, it drops what it was told meanwhile, and the scheduler, which hears
// that, tells it again or has it wait; of what it was told twice it installs the first and answers both. Weights that
// cannot be installed are passed over if others have been asked for meanwhile: those may be gone when it gets to
// them. A reply is an event of the scheduler, with its payload beside it and the exception that a stage threw.
//
//   Channel   bool receive(std::vector<command>& out, bool wait)   appends what has come; waits for something if told
//             void send(reply)
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/commands.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/stages.hpp"

namespace opd::sched {

/// Rollout. obey() and step() are called when there are commands, and when something runs.
template <rollout_stage Stage, class Scored>
class rollout_actor {
public:
    using rolled_type = typename Stage::rolled_type;
    using command = worker_command<rolled_type, Scored>;
    using reply = worker_reply<rolled_type, Scored>;
    using work_type = detail::work_of<Stage>;

    rollout_actor(std::shared_ptr<Stage> s, std::int32_t number) : stage_(std::move(s)), number_(number) {}

    bool idle() const { return running_.empty(); }
    /// Tokens that the response of a running attempt has, those of a finished one that is not told of included; none:
    /// the stage does not count them.
    std::optional<std::int64_t> drawn(const ticket& t) const {
        if constexpr (detail::counts_drawn<Stage>) {
            for (const auto& f : out_)
                if (f.ticket == t) return f.versions.tokens;
            if (std::find(running_.begin(), running_.end(), t) == running_.end()) return 0; // it has not begun
            return static_cast<std::int64_t>(std::as_const(*stage_).drawn(t));
        } else {
            return {};
        }
    }
    /// Whether it does spare work while it is idle.
    bool spares() const { return spares_; }
    /// But for the stage's own state.
    template <class A>
    void fields(A& a) {
        a(life_, installed_, whole_, has_, running_);
        detail::list_fields(a, out_, [&](finished_rollout<rolled_type>& f) {
            a(f);
            detail::needs(f.sequence || (f.parked && f.versions.tokens == 0), "what is finished has no payload");
        });
    }

    /// `mail` is of what has come since: `others()`, whether it has other weights or another life; `drop()` drops
    /// other weights.
    template <class Send, class Mail>
    void obey(command& c, Send&& send, Mail&& mail) {
        using kind = typename command::kind;
        if (c.what == kind::begin) return begin(c, send);
        if (c.life != life_) return;
        const auto here = std::find(running_.begin(), running_.end(), c.ticket);
        event answer;
        reply r;
        bool installs = false;
        try {
            switch (c.what) {
            case kind::start:
                answer = event::rollout_failed(c.ticket);
                spares_ = false;
                stage_->start(c.ticket, std::move(c.prefix));
                running_.push_back(c.ticket);
                return;
            case kind::abort:
                if (here == running_.end()) return; // it was answered already
                answer = event::aborted(c.ticket);
                lets_go(c.ticket);
                running_.erase(here);
                stage_->abort(c.ticket);
                break;
            case kind::park:
                if (here == running_.end()) return;
                answer = event::rollout_failed(c.ticket);
                running_.erase(here);
                if constexpr (detail::parks<Stage>) {
                    auto had = stage_->park(c.ticket);
                    if (had.ticket != c.ticket || (had.versions.tokens > 0) != (had.sequence != nullptr))
                        throw std::logic_error(
                            "opd: a rollout stage parked another sequence, or tokens without payload");
                    answer = event::parked(c.ticket, had.versions);
                    r.sequence = std::move(had.sequence);
                } else {
                    stage_->abort(c.ticket);
                    throw std::logic_error("opd: a rollout stage without park() was told to park");
                }
                break;
            case kind::spare:
                spares_ = detail::spares<Stage> && installed_;
                spare_stop_ = c.stop;
                return;
            case kind::install:
                spares_ = false;
                if (installed_ && c.weights.job < has_) return;
                answer = event::down(sched::stage::rollout, number_).of_life(life_);
                if (!whole_ || c.weights.job != has_) { // else it was told twice
                    whole_ = false;
                    installs = true;
                    stage_->install(c.weights);
                }
                if constexpr (detail::exports_partials<Stage>)
                    if (c.exports) stage_->export_partials(r.prefixes);
                answer = event::synced(number_, c.weights.job).of_life(life_);
                if constexpr (requires { stage_->elasticity(); }) answer.elasticity = stage_->elasticity();
                installed_ = whole_ = true, has_ = c.weights.job;
                break;
            default:
                return;
            }
        } catch (const lost_payloads&) {
            if (c.what == kind::start)
                r.lost.push_back(c.ticket);
            else
                r.failed = std::current_exception();
        } catch (...) {
            r.failed = std::current_exception();
        }
        r.what = answer;
        if (answer.what == event::kind::worker_down) { // it has no weights to go on with
            if (mail.others()) return;
            forget(send);
            life_ = 0;
        }
        r.drawn = std::exchange(drawn_, {});
        if (installs && answer.what == event::kind::synced) mail.drop(); // before it is heard: then comes the next word
        send(std::move(r));
    }

    template <class Send>
    void obey(command& c, Send&& send) {
        struct {
            bool others() const { return false; }
            void drop() const {}
        } nothing;
        obey(c, send, nothing);
    }

    /// One quantum of all that runs: run(), timed, and tell().
    template <class Send>
    void step(Send&& send) {
        const auto begin = std::chrono::steady_clock::now();
        run();
        tell(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), send);
    }
    /// A quantum of spare work, by its record; empty: there is no more. What the stage throws ends it, too.
    template <class Send>
    std::optional<detail::spare_of<Stage>> spare(Send&& send) {
        std::optional<detail::spare_of<Stage>> did;
        reply r;
        if constexpr (detail::spares<Stage>) try {
                did = stage_->spare(spare_stop_);
            } catch (...) {
                r.failed = std::current_exception();
            }
        spares_ = did.has_value();
        if (did) return did;
        r.spared = true;
        r.what.incarnation = life_;
        send(std::move(r));
        return {};
    }
    /// The quantum itself. What it finished is out of running(), and waits for tell().
    void run() {
        failed_ = {};
        dead_.clear();
        out_.clear();
        try {
            if constexpr (std::is_void_v<detail::step_result<Stage>>) {
                work_ = static_cast<index_t>(stage_->running());
                stage_->step(out_, stop_);
            } else {
                work_ = stage_->step(out_, stop_);
            }
            for (const auto& f : out_) {
                if (!f.failed) continue;
                if (std::erase(running_, f.ticket) > 0) {
                    lets_go(f.ticket);
                    dead_.push_back(f.ticket);
                }
                if (!failed_) failed_ = f.failed;
            }
            std::erase_if(out_, [](const auto& f) { return f.failed != nullptr; });
            for (const auto& f : out_) {
                if (!f.sequence && !(f.parked && f.versions.tokens == 0))
                    throw std::logic_error("opd: a rollout stage finished a sequence without payload");
                std::erase(running_, f.ticket);
            }
            if (static_cast<index_t>(stage_->running()) < static_cast<index_t>(running_.size()))
                throw std::logic_error("opd: a rollout stage runs fewer sequences than it was given");
        } catch (...) {
            failed_ = std::current_exception();
            std::erase_if(out_, [](const auto& f) { return f.failed || (!f.sequence && !f.parked); });
            for (const auto& f : out_) std::erase(running_, f.ticket);
            for (const ticket& t : running_) lets_go(t);
            for (const ticket& t : running_) try {
                    stage_->abort(t);
                } catch (...) { // the first exception says why
                }
            dead_.insert(dead_.end(), running_.begin(), running_.end());
            running_.clear();
        }
    }
    /// What the last quantum did, and what it threw.
    const work_type& work() const { return work_; }
    const std::exception_ptr& failed() const { return failed_; }
    /// The stage hears how long it took, and send() what came of it.
    template <class Send>
    void tell(double seconds, Send&& send) {
        if constexpr (requires { stage_->took(seconds); })
            if (!failed_) try {
                    stage_->took(seconds);
                } catch (...) { // its sequences are none the worse for it
                    send(reply{.what = {}, .failed = std::current_exception()});
                }
        if (failed_) send(reply{.what = {}, .failed = std::exchange(failed_, {}), .drawn = std::exchange(drawn_, {})});
        for (auto& f : std::exchange(out_, {})) {
            if (f.ticket.worker != number_)
                send(reply{.what = {},
                           .failed = std::make_exception_ptr(
                               invalid_input("step", "a rollout stage answered another's ticket"))});
            else
                send(reply{.what =
                               f.parked ? event::parked(f.ticket, f.versions) : event::rolled_out(f.ticket, f.versions),
                           .sequence = std::move(f.sequence)});
        }
        for (const ticket& t : std::exchange(dead_, {})) send(reply{.what = event::rollout_failed(t)});
    }

private:
    template <class Send>
    void begin(const command& c, Send&& send) {
        forget(send);
        life_ = c.life;
        stop_ = c.stop;
        installed_ = whole_ = spares_ = false;
        send(reply{.what = event::up(sched::stage::rollout, number_, c.slots).of_life(life_),
                   .drawn = std::exchange(drawn_, {})});
    }
    // Its answer will say what it has drawn.
    void lets_go(const ticket& t) {
        try {
            if (const auto tokens = drawn(t)) drawn_.emplace_back(t, *tokens);
        } catch (...) { // then nobody knows
        }
    }
    template <class Send>
    void forget(Send&& send) {
        for (const ticket& t : running_) lets_go(t);
        for (const ticket& t : std::exchange(running_, {})) try {
                stage_->abort(t);
            } catch (...) {
                send(reply{.what = {}, .failed = std::current_exception()});
            }
    }

    std::shared_ptr<Stage> stage_;
    std::int32_t number_;
    incarnation_t life_ = 0; // 0: none
    std::stop_token stop_, spare_stop_;
    bool installed_ = false, spares_ = false;
    bool whole_ = false;    // no installation has failed since the last one
    std::uint64_t has_ = 0; // what made the weights that are installed
    std::vector<ticket> running_;
    std::vector<finished_rollout<rolled_type>> out_; // of the quantum that was run and not told, as are:
    work_type work_{};
    std::exception_ptr failed_;
    std::vector<ticket> dead_;
    std::vector<std::pair<ticket, std::int64_t>> drawn_; // by what was let go of, not told yet
};

namespace detail {
/// What has come behind the command in hand.
template <class Command, class Channel>
struct later_mail {
    using kind = typename Command::kind;
    Channel& channel;
    std::vector<Command>& all;
    const Command& now;
    std::size_t next;

    bool installs(const Command& c) const { return c.what == kind::install && c.life == now.life; }
    template <class Is>
    bool any(Is&& is) {
        channel.receive(all, false);
        return std::any_of(all.begin() + static_cast<std::ptrdiff_t>(next), all.end(), is);
    }
    bool others() {
        return any([&](const Command& c) { return c.what == kind::begin || installs(c); });
    }
    bool superseded() {
        return any([&](const Command& c) {
            return c.what == kind::begin || (installs(c) && c.weights.job > now.weights.job);
        });
    }
    void drop() {
        channel.receive(all, false);
        all.erase(std::remove_if(all.begin() + static_cast<std::ptrdiff_t>(next), all.end(),
                                 [&](const Command& c) { return installs(c); }),
                  all.end());
    }
};
} // namespace detail

/// Runs it until it is told to halt.
template <class Stage, class Scored, class Channel>
void run_rollout(rollout_actor<Stage, Scored>& w, Channel& channel) {
    using command = typename rollout_actor<Stage, Scored>::command;
    using kind = typename command::kind;
    const auto send = [&](auto&& r) { channel.send(std::move(r)); };
    for (std::vector<command> mail;; mail.clear()) {
        channel.receive(mail, w.idle() && !w.spares());
        for (std::size_t i = 0; i < mail.size(); ++i) {
            command c = std::move(mail[i]);
            if (c.what == kind::halt) return;
            detail::later_mail<command, Channel> since{channel, mail, c, i + 1};
            if (c.what != kind::install || !since.superseded()) w.obey(c, send, since);
        }
        if (!mail.empty()) continue;
        if (!w.idle())
            w.step(send);
        else if (w.spares())
            w.spare(send);
    }
}

namespace detail {
/// f of what is lost of a call, each once, by its place, the last first. False: the exception names nothing of it.
template <class List, class F>
bool take_out(const lost_payloads& e, List& call, F&& f) {
    std::vector<std::size_t> which = e.which();
    std::sort(which.begin(), which.end(), std::greater<>());
    which.erase(std::unique(which.begin(), which.end()), which.end());
    if (which.empty() || which.front() >= call.size()) return false;
    for (const std::size_t i : which) f(call[i]);
    return true;
}
/// The scores of what is there; what is not goes from the call to `lost`.
template <class Stage, class Command>
auto score_what_is_there(Stage& stage, Command& c, std::vector<ticket>& lost, const std::stop_token& stop) {
    using list = std::span<const typename decltype(c.sequences)::value_type>;
    for (;;) try {
            using scores = decltype(stage.score(list(c.sequences), stop));
            return c.sequences.empty() ? scores{} : stage.score(list(c.sequences), stop);
        } catch (const lost_payloads& e) {
            const bool named = take_out(e, c.sequences, [&](auto& p) {
                const auto i = &p - c.sequences.data();
                lost.push_back(c.tickets[static_cast<std::size_t>(i)]);
                c.sequences.erase(c.sequences.begin() + i);
                c.tickets.erase(c.tickets.begin() + i);
            });
            if (!named) throw;
        }
}
} // namespace detail

/// A teacher: one call after the other.
template <class Stage, class Rolled, class Channel>
    requires teacher_stage<Stage, Rolled>
void run_teacher(Stage& stage, std::int32_t number, Channel& channel) {
    using scored_type = typename Stage::scored_type;
    using command = worker_command<Rolled, scored_type>;
    incarnation_t life = 0;
    std::stop_token stop;
    for (std::vector<command> mail;; mail.clear()) {
        channel.receive(mail, true);
        for (command& c : mail) {
            worker_reply<Rolled, scored_type> r;
            if (c.what == command::kind::halt) return;
            if (c.what == command::kind::begin) {
                life = c.life, stop = c.stop;
                r.what = event::up(stage::teacher, number, c.slots);
            } else if (c.life != life) {
                continue;
            } else {
                try {
                    auto scores = detail::score_what_is_there(stage, c, r.lost, stop);
                    if (scores.size() != c.tickets.size())
                        throw std::logic_error("opd: a teacher scored " + std::to_string(scores.size()) + " of " +
                                               std::to_string(c.tickets.size()) +
                                               " sequences: one entry each, null where there is no score");
                    for (std::size_t i = 0; i < scores.size(); ++i) {
                        if (!scores[i]) continue;
                        r.tickets.push_back(c.tickets[i]);
                        r.scores.push_back(std::move(scores[i]));
                    }
                } catch (...) {
                    r.failed = std::current_exception();
                }
                r.what = r.tickets.empty() ? event::score_failed(c.job, number) : event::scored(c.job, number);
            }
            r.what.incarnation = life;
            c = {}; // what it refers to is somebody else's now
            channel.send(std::move(r));
        }
    }
}

/// The learner. Hooks run whatever life it is.
template <class Stage, class Rolled, class Scored, class Channel>
    requires learner_stage<Stage, Rolled, Scored>
void run_learner(Stage& stage, Channel& channel) {
    using command = worker_command<Rolled, Scored>;
    incarnation_t life = 0;
    std::stop_token stop;
    for (std::vector<command> mail;; mail.clear()) {
        channel.receive(mail, true);
        for (command& c : mail) {
            worker_reply<Rolled, Scored> r;
            if (c.what == command::kind::halt) return;
            if (c.what == command::kind::begin) {
                life = c.life, stop = c.stop;
                r.what = event::up(stage::learner, 0).of_life(life);
            } else if (c.what == command::kind::hook) {
                try {
                    c.hook();
                } catch (...) {
                    r.failed = std::current_exception();
                }
                r.of_hook = true;
            } else if (c.life != life) {
                continue;
            } else {
                try {
                    const auto updates =
                        stage.train(std::span<const sequence_view<Rolled, Scored>>(c.batch), c.call, stop);
                    r.what = event::learned(c.call.job, static_cast<index_t>(updates)).of_life(life);
                } catch (const lost_payloads& e) {
                    if (!detail::take_out(e, c.batch, [&](auto& v) { r.lost.push_back(v.ticket); }))
                        r.failed = std::current_exception();
                    r.what = event::learn_failed(c.call.job).of_life(life);
                } catch (...) {
                    r.failed = std::current_exception();
                    r.what = event::learn_failed(c.call.job).of_life(life);
                }
            }
            c = {};
            channel.send(std::move(r));
        }
    }
}

} // namespace opd::sched
