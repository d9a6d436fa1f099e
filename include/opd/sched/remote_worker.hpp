// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A worker's process, as seen by the scheduler's in another one (remote_driver.hpp). A state machine: time is an
// argument, and the loop around it is yours. It turns frames into commands for a worker loop (worker_loop.hpp), and
// what that replies into frames.
//
//   Transport   void send(std::string frame)     to the scheduler; may lose, double, delay, reorder, damage it
//
//   for (;;) {
//       what the transport has received, until worker.next_deadline():   worker.hear(bytes, now)
//       worker.take(commands)                                            for the worker loop, in order
//       what the loop has replied:                                       worker.say(reply)
//       worker.tick(now)                                                 what is due, and all that is to be sent
//       if (worker.over()) break;
//   }
//
// The stage computes for long, and heartbeats must not wait for it: run this loop on a thread of its own, with a
// mailbox (mailbox.hpp) to the stage's and one back.
//
// A session ends when the scheduler's process says so, dies, or is not heard of for `options.silence` seconds. The
// stop token of its calls is triggered then, and the next session begins, with `begin` as its first command: the loop
// forgets what it was at. What it still replies of an earlier life is dropped.
//
// A worker's number is chosen by who starts its process (an index of a supervisor), two at a time must not have the
// same one: the newer process takes it over. The learner is number 0.
//
// Errors: invalid_input: an option, `worker`, `slots`; `message` where a reply exceeds options.message.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/sched/commands.hpp"
#include "opd/sched/remote_link.hpp"

namespace opd::sched {

/// A worker's process: at most one session at a time. One thread's.
template <class Rolled, class Scored, class Transport>
class remote_worker {
public:
    using command = worker_command<Rolled, Scored>;
    using reply = worker_reply<Rolled, Scored>;
    struct counters {
        std::int64_t sessions = 0; ///< that were begun
        std::int64_t silent = 0;   ///< that ended since nothing was heard
        std::int64_t broken = 0;   ///< frames, or messages in them, that were none
        std::int64_t stale = 0;    ///< frames of other sessions, and of lives of the scheduler that are over
        std::int64_t late = 0;     ///< replies of lives that are over
    };

    /// `slots`: lanes of a rollout worker, calls that a teacher may be given at a time; a learner has one.
    remote_worker(sched::stage s, std::int32_t worker, std::int32_t slots, const remote_options& options,
                  Transport& transport)
        : options_((options.check(), options)), transport_(transport), stage_(s), number_(worker), slots_(slots),
          link_(options) {
        if (worker < 0 || (s == stage::learner && worker != 0))
            throw invalid_input("worker", "counts from 0, and the learner is 0; it is " + std::to_string(worker));
        if (slots < 1 || (s == stage::learner && slots != 1))
            throw invalid_input("slots", "must be at least 1, and 1 of a learner, not " + std::to_string(slots));
    }
    remote_worker(const remote_worker&) = delete;
    remote_worker& operator=(const remote_worker&) = delete;
    ~remote_worker() { stop_.request_stop(); }

    /// Takes what the transport has received from the scheduler.
    void hear(std::string_view bytes, double now) {
        pass(now);
        remote_frame f;
        try {
            f = read_frame(bytes, options_.frame);
        } catch (const invalid_input&) {
            ++totals_.broken;
            return;
        }
        const remote_head& h = f.head;
        if (over_) return;
        if (h.epoch < epoch_ || h.stage != stage_ || h.worker != number_) {
            ++totals_.stale;
            return;
        }
        const bool here = life_ > 0 && h.epoch == epoch_ && h.life == life_;
        switch (h.what) {
        case remote_kind::welcome:
            if (life_ > 0 || h.number != session_ || h.life == 0) {
                totals_.stale += !here;
                break;
            }
            begin(h.epoch, h.life);
            break;
        case remote_kind::data:
            if (!here) {
                ++totals_.stale;
                break;
            }
            heard_ = now_;
            take_messages(f);
            break;
        case remote_kind::gone:
            if (life_ > 0 ? here || h.epoch > epoch_ : h.number == session_)
                end(h.epoch);
            else
                ++totals_.stale;
            break;
        case remote_kind::over:
            if (life_ > 0) {
                ++totals_.stale; // it would say `halt`
                break;
            }
            halt();
            break;
        default:
            ++totals_.broken;
        }
    }
    /// Appends the commands that came since, in order: of the present life, after its `begin`.
    void take(std::vector<command>& out) {
        for (command& c : inbox_) out.push_back(std::move(c));
        inbox_.clear();
    }
    /// What the worker loop replies.
    void say(const reply& r) {
        const event& e = r.what;
        if (life_ == 0 || (e.what != event::kind::tick && e.incarnation != life_)) {
            ++totals_.late;
            return;
        }
        out_.bytes.clear();
        out_(remote_word::content, r);
        link_.post(out_.bytes);
    }
    /// Does what is due, and sends.
    void tick(double now) {
        pass(now);
        if (over_ && life_ == 0) return;
        if (life_ > 0 && heard_ + options_.silence <= now_) {
            ++totals_.silent;
            end(epoch_);
        }
        if (life_ > 0) {
            link_.flush(now_, [&](std::uint64_t number, std::uint64_t heard, std::string_view body) {
                transport_.send(frame_bytes(head(remote_kind::data, number, heard), body));
            });
        } else if (asked_ + options_.resend <= now_) {
            asked_ = now_;
            transport_.send(frame_bytes(head(remote_kind::hello, session_),
                                        {reinterpret_cast<const char*>(&slots_), sizeof slots_}));
        }
    }
    /// When tick() must be called at the latest.
    double next_deadline() const {
        if (over_ && life_ == 0) return forever;
        return life_ > 0 ? std::min(heard_ + options_.silence, link_.due()) : asked_ + options_.resend;
    }
    /// It leaves: the scheduler is told, and gives what it was at to others.
    void leave(double now) {
        pass(now);
        if (life_ > 0) transport_.send(frame_bytes(head(remote_kind::bye, session_)));
        life_ = 0;
        over_ = true;
        stop_.request_stop();
    }

    /// The run is finished, or the worker has left; `halt` is among its commands.
    bool over() const { return over_; }
    bool connected() const { return life_ > 0; }
    incarnation_t life() const { return life_; }   ///< 0: none
    std::uint64_t epoch() const { return epoch_; } ///< of the scheduler, the highest that was heard of
    const counters& totals() const { return totals_; }
    /// Learner: what lower jobs have published nobody will ask for, whatever happens to the scheduler's process.
    std::uint64_t keep_from() const { return keep_from_; }

private:
    void pass(double now) {
        now = std::max(now, now_);
        if (const double gap = now - now_; gap > 2 * options_.beat && now_ > -forever)
            heard_ += gap; // a process that was stopped has not listened
        now_ = now;
    }
    remote_head head(remote_kind what, std::uint64_t number, std::uint64_t heard = 0) const {
        return {.what = what,
                .stage = stage_,
                .worker = number_,
                .life = life_,
                .epoch = epoch_,
                .number = number,
                .heard = heard};
    }
    void begin(std::uint64_t epoch, incarnation_t life) {
        ++totals_.sessions;
        epoch_ = epoch, life_ = life;
        heard_ = now_;
        link_ = remote_link(options_);
        stop_ = std::stop_source();
        inbox_.clear();
        command c;
        c.what = command::kind::begin;
        c.life = life, c.slots = slots_, c.stop = stop_.get_token();
        inbox_.push_back(std::move(c));
    }
    void end(std::uint64_t epoch) {
        epoch_ = std::max(epoch_, epoch);
        life_ = 0;
        ++session_;
        asked_ = -forever;
        stop_.request_stop();
        inbox_.clear(); // what it is at is forgotten when the next life begins
    }
    void halt() {
        over_ = true;
        stop_.request_stop();
        inbox_.push_back(command{}); // halt
    }
    void take_messages(const remote_frame& f) {
        try {
            link_.take(f, now_, [&](std::string_view message) {
                archive_reader in(message);
                remote_word word{};
                in(word);
                if (word == remote_word::keep_from) {
                    std::uint64_t job = 0;
                    in(job);
                    keep_from_ = std::max(keep_from_, job);
                } else {
                    command c;
                    in(c);
                    if (c.what == command::kind::begin || c.life != life_)
                        throw invalid_input("message", "is a command of another life");
                    if (c.what == command::kind::halt)
                        halt();
                    else
                        inbox_.push_back(std::move(c));
                }
                if (!in.done()) throw invalid_input("message", "has more bytes than it needs");
                return !over_;
            });
        } catch (const invalid_input&) { // no scheduler of this library says that
            ++totals_.broken;
            end(epoch_);
        }
    }

    remote_options options_;
    Transport& transport_;
    sched::stage stage_;
    std::int32_t number_, slots_;
    double now_ = -forever;
    std::uint64_t epoch_ = 0;
    std::uint64_t session_ = 1; // that is asked for, or is
    incarnation_t life_ = 0;    // 0: it asks for one
    double asked_ = -forever, heard_ = -forever;
    remote_link link_;
    std::stop_source stop_;
    std::vector<command> inbox_;
    archive_writer out_;
    std::uint64_t keep_from_ = 0;
    bool over_ = false;
    counters totals_;
};

} // namespace opd::sched
