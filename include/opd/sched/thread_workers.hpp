// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The workers of a run on threads: each a thread with a mailbox, its lives, what it is asked and has not answered,
// and whether it is there. The driver's loop owns all of this but the mailboxes, under its mutex; worker_loop.hpp
// says what a worker does.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "opd/error.hpp"
#include "opd/sched/commands.hpp"
#include "opd/sched/mailbox.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/thread_report.hpp"
#include "opd/sched/worker_loop.hpp"

namespace opd::sched::detail {

template <class Rollout, class Teacher, class Learner>
class thread_workers {
public:
    using rolled_type = typename Rollout::rolled_type;
    using scored_type = typename Teacher::scored_type;
    using clock = std::chrono::steady_clock;
    using command = worker_command<rolled_type, scored_type>;
    using reply = worker_reply<rolled_type, scored_type>;
    using order = typename command::kind;

    struct worker {
        sched::stage kind = stage::rollout;
        std::int32_t number = -1;
        std::int32_t most = 1; // slots that it was added with
        std::int32_t slots = 1;
        incarnation_t life = 0;  // the latest that it was told to begin
        std::stop_source stop;   // of its calls in this life
        bool begins = false;     // told to, and not yet up
        bool up = false;         // as the scheduler has it
        bool killed = false;     // nothing is heard of it
        bool returned = false;   // its thread has nothing left to do
        std::int64_t load = 0;   // what it has not answered: sequences, calls, and 1 for weights
        std::stop_source spare;  // of its spare work,
        bool sparing = false;    // which it is at, as far as is known
        bool installing = false; // told to, and has not answered
        int failed_installs = 0; // in a row
        mailbox<command> mail;
    };
    // What a worker said; `from` null: nobody, the loop is to look up.
    struct message {
        std::shared_ptr<worker> from;
        reply said;
        bool asked_to_stop = false;
        bool returned = false;
    };
    template <class Stage>
    struct worker_of : worker {
        std::shared_ptr<Stage> stage;
    };
    using inbox = mailbox<message>;

    std::function<void(const worker&, worker_change)> changed; ///< told of presence, work and spare work
    std::shared_ptr<inbox> replies = std::make_shared<inbox>();
    std::vector<std::shared_ptr<worker_of<Rollout>>> rollouts;
    std::vector<std::shared_ptr<worker_of<Teacher>>> teachers;
    std::vector<std::shared_ptr<worker_of<Learner>>> learners; // one
    std::vector<std::pair<std::shared_ptr<worker>, std::jthread>> threads;
    bool over = false;                                  // halted: nobody begins anything
    std::array<std::int32_t, stage_count> present = {}; // workers that are up

    static std::size_t index_of(auto stage_or_worker) { return static_cast<std::size_t>(stage_or_worker); }
    template <class F>
    void for_all(F&& f) {
        for (const auto& w : learners) f(*w);
        for (const auto& w : teachers) f(*w);
        for (const auto& w : rollouts) f(*w);
    }
    worker& named(const worker_name& n) {
        worker* found = nullptr;
        for_all([&](worker& w) {
            if (w.kind == n.stage && w.number == n.worker) found = &w;
        });
        if (!found)
            throw invalid_input("worker",
                                std::string("no ") + name_of(n.stage) + " worker " + std::to_string(n.worker));
        return *found;
    }

    /// When nobody of that stage will have been there for so long.
    std::optional<clock::time_point> stranded_at(stage s, clock::duration after) const {
        const auto& since = stranded_[index_of(s)];
        return since ? std::optional(*since + after) : std::nullopt;
    }

    // --- what they are asked

    void post(worker& w, command c) {
        c.life = w.life;
        w.mail.post(std::move(c));
    }
    /// A command that will be answered, if the worker lives.
    void ask(worker& w, command c) {
        load(w, +1);
        post(w, std::move(c));
    }
    void load(worker& w, std::int64_t more) {
        const bool was_busy = w.load > 0;
        w.load += more;
        if (w.load > 0) end_spare(w);
        if (was_busy != (w.load > 0)) tell(w, w.load > 0 ? worker_change::begin : worker_change::end);
    }
    /// It has answered all that it was asked, and the scheduler had nothing more for it.
    void offer_spare(worker& w) {
        if constexpr (spares<Rollout>) {
            if (over || w.kind != stage::rollout || !w.up || w.load > 0 || w.sparing) return;
            w.sparing = true;
            w.spare = std::stop_source();
            post(w, {.what = order::spare, .stop = w.spare.get_token()});
            tell(w, worker_change::begin_spare);
        }
    }
    void end_spare(worker& w) {
        if (!std::exchange(w.sparing, false)) return;
        w.spare.request_stop();
        tell(w, worker_change::end_spare);
    }

    // --- their lives

    /// It forgets what it was doing and announces itself, in a later life than was `heard` of.
    void begin_life(worker& w, incarnation_t heard) {
        if (over || w.up || w.begins) return;
        w.life = std::max(w.life, heard) + 1;
        w.stop = std::stop_source();
        w.begins = true;
        w.killed = false;
        post(w, {.what = order::begin, .stop = w.stop.get_token(), .slots = w.slots});
    }
    /// It has.
    void come(worker& w) {
        w.begins = false;
        w.up = true;
        ++present[index_of(w.kind)];
        stranded_[index_of(w.kind)].reset();
        tell(w, worker_change::up);
    }
    /// The scheduler counts it as gone, or is about to.
    void end_life(worker& w) {
        if (std::exchange(w.up, false)) {
            end_spare(w);
            load(w, -w.load);
            tell(w, worker_change::down);
            if (--present[index_of(w.kind)] == 0) stranded_[index_of(w.kind)] = clock::now();
        }
        w.begins = false;
        w.load = 0;
        w.installing = false;
        drop_work(w);
    }
    void halt() {
        over = true;
        for_all([this](worker& w) {
            end_spare(w);
            drop_work(w);
            w.mail.post({.what = order::halt});
        });
    }

    // --- their threads

    template <class Stage>
    std::shared_ptr<worker_of<Stage>> add(stage kind, std::vector<std::shared_ptr<worker_of<Stage>>>& all,
                                          std::shared_ptr<Stage> s, std::int32_t slots) {
        auto w = std::make_shared<worker_of<Stage>>();
        w->kind = kind;
        w->number = static_cast<std::int32_t>(all.size());
        w->most = w->slots = slots;
        w->stage = std::move(s);
        all.push_back(w);
        return w;
    }
    /// `keeps` is what its thread shares, if it is left behind.
    template <class Stage>
    void launch(const std::shared_ptr<worker_of<Stage>>& w, std::shared_ptr<void> keeps) {
        threads.emplace_back(w, std::jthread([w, keeps = std::move(keeps), to = replies] {
                                 channel line{w, to};
                                 work(w->stage, w->number, line);
                                 to->post({w, {}, false, true});
                             }));
    }

private:
    // A worker's end of the line.
    struct channel {
        std::shared_ptr<worker> self;
        std::shared_ptr<inbox> to;
        std::stop_token stop = {};
        void receive(std::vector<command>& out, bool wait) {
            self->mail.receive(out, wait);
            for (const command& c : out)
                if (c.what == order::begin) stop = c.stop;
        }
        void send(reply&& r) { to->post({self, std::move(r), stop.stop_requested(), false}); }
    };

    void tell(const worker& w, worker_change what) { changed(w, what); }
    static void drop_work(worker& w) {
        w.stop.request_stop();
        w.mail.discard([](const command& c) { return c.what != order::hook; });
    }
    static void work(const std::shared_ptr<Rollout>& s, std::int32_t number, channel& line) {
        rollout_actor<Rollout, scored_type> w(s, number);
        run_rollout(w, line);
    }
    static void work(const std::shared_ptr<Teacher>& s, std::int32_t number, channel& line) {
        run_teacher<Teacher, rolled_type>(*s, number, line);
    }
    static void work(const std::shared_ptr<Learner>& s, std::int32_t, channel& line) {
        run_learner<Learner, rolled_type, scored_type>(*s, line);
    }

    std::array<std::optional<clock::time_point>, stage_count> stranded_; // since when there are none
};

} // namespace opd::sched::detail
