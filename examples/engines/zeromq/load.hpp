// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-load: many workers whose stages take no time, in one process and on one thread, each with a session and a
// socket of its own. What it asks of the scheduler's process is what that many real workers would, at the rate that
// they can.
#pragma once

#include "workers.hpp"

namespace engine {

/// A worker that answers at once.
class instant_worker {
public:
    instant_worker(zmq::context_t& context, const connection& c, sched::stage s, std::int32_t number,
                   std::int32_t slots)
        : stage_(s), number_(number), wire_(context, c.endpoint, c.keys, c.options.frame),
          session_(s, number, slots, c.options, wire_) {}

    zmq::pollitem_t item() { return wire_.item(); }
    double next_deadline() const { return session_.next_deadline(); }
    bool over() const { return session_.over(); }
    void turn(bool readable) {
        const double time = now();
        if (readable) {
            wire_.receive([&](std::string_view bytes) { session_.hear(bytes, time); });
            session_.take(commands_);
            for (const command& c : commands_) obey(c);
            commands_.clear();
        } else if (session_.next_deadline() > time) {
            return;
        }
        if (session_.over())
            session_.leave(time);
        else
            session_.tick(time);
    }

private:
    using kind = command::kind;
    using event = sched::event;
    void obey(const command& c) {
        switch (c.what) {
        case kind::begin:
            return session_.say({.what = event::up(stage_, number_, c.slots).of_life(c.life)});
        case kind::install:
            version_ = c.weights.version;
            return session_.say({.what = event::synced(number_, c.weights.job).of_life(c.life)});
        case kind::start:
            return session_.say({.what = event::rolled_out(c.ticket, {version_, version_, double(version_), 100}),
                                 .sequence = payload_});
        case kind::score: {
            reply r{.what = event::scored(c.job, number_).of_life(c.life), .tickets = c.tickets};
            r.scores.assign(c.tickets.size(), payload_);
            return session_.say(r);
        }
        case kind::train:
            return session_.say({.what = event::learned(c.call.job).of_life(c.life)});
        default: // nothing runs that could be let go of
            return;
        }
    }
    sched::stage stage_;
    std::int32_t number_;
    dealer wire_;
    worker session_;
    std::vector<command> commands_;
    sched::version_t version_ = 0;
    rolled_ptr payload_ = std::make_shared<const payload_ref>(payload_ref{"payload/1234567/r65537", 4096, 1});
};

inline int run_load(int count, char** words) {
    CLI::App app("Many workers whose stages take no time, in one process: to measure opd-schedule.");
    connection c(app);
    std::int32_t workers = 64, teachers = 7, slots = 32;
    app.add_option("--workers", workers, "One learner, the teachers, rollout workers")->capture_default_str();
    app.add_option("--teachers", teachers, "Among them")->capture_default_str();
    app.add_option("--slots", slots, "Sequences at a time of a rollout worker")
        ->capture_default_str()
        ->check(CLI::PositiveNumber);
    CLI11_PARSE(app, count, words)
    try {
        c.check();
        if (teachers < 1 || workers < teachers + 2)
            throw std::invalid_argument("--workers are at least one rollout worker, the teachers and a learner");
        on_signals();
        zmq::context_t context(1);
        std::vector<std::unique_ptr<instant_worker>> all;
        for (std::int32_t i = 0; i < workers; ++i) {
            const sched::stage s = i == 0          ? sched::stage::learner
                                   : i <= teachers ? sched::stage::teacher
                                                   : sched::stage::rollout;
            const std::int32_t number = i == 0 ? 0 : i <= teachers ? i - 1 : i - 1 - teachers;
            all.push_back(std::make_unique<instant_worker>(context, c, s, number, i > teachers ? slots : 1));
        }
        std::vector<zmq::pollitem_t> items;
        for (const auto& w : all) items.push_back(w->item());
        for (std::size_t over = 0; over < all.size() && !asked_to_stop;) {
            double next = now() + 1;
            for (const auto& w : all) next = std::min(next, w->next_deadline());
            wait_for(items, next - now());
            over = 0;
            for (std::size_t i = 0; i < all.size(); ++i) {
                all[i]->turn((items[i].revents & ZMQ_POLLIN) != 0);
                over += all[i]->over();
            }
        }
        return 0;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", words[0], e.what());
        return 1;
    }
}

} // namespace engine
