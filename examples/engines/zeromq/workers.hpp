// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A worker's process: the worker loop (opd/sched/worker_loop.hpp) on a thread of its own, with the stage; on this one
// the socket and the session, whose heartbeats wait for no stage. SIGTERM leaves; the end of the run ends it with 0,
// three installations in a row that fail, or a stage that cannot go on, with 1. Nothing is restarted here: that is a
// supervisor's.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "opd/sched/mailbox.hpp"
#include "opd/sched/remote_worker.hpp"
#include "opd/sched/worker_loop.hpp"
#include "task.hpp"
#include "trainer_stages.hpp"
#include "wire.hpp"

namespace engine {

using worker = sched::remote_worker<payload_ref, payload_ref, dealer>;
using command = worker::command;
using reply = worker::reply;

inline volatile std::sig_atomic_t asked_to_stop = 0, asked_to_close = 0;
inline void on_signals() {
    std::signal(SIGTERM, [](int) { asked_to_stop = 1; });
    std::signal(SIGINT, [](int) { asked_to_stop = 1; });
    std::signal(SIGUSR1, [](int) { asked_to_close = 1; });
}

/// What all processes take; both sides of a run need the same limits.
struct connection {
    std::string endpoint = "tcp://127.0.0.1:5555", keys;
    sched::remote_options options;

    explicit connection(CLI::App& app) {
        app.add_option("--endpoint", endpoint, "The scheduler's, as ZeroMQ writes it")->capture_default_str();
        app.add_option("--keys", keys, "Folder of the keys (opd-schedule --make-keys); without: loopback alone");
        app.add_option("--silence", options.silence, "Seconds after which a peer counts as dead")
            ->default_val(5.)
            ->check(CLI::PositiveNumber);
        app.add_option("--message-mib", mib_, "Size of the largest message")
            ->capture_default_str()
            ->check(CLI::Range(1, 1 << 20));
    }
    /// Once the command line is read.
    void check() {
        options.beat = options.silence / 5;
        options.resend = options.silence / 10;
        options.message = static_cast<std::uint64_t>(mib_) << 20;
        options.waiting = 4 * options.message;
        options.check();
    }

private:
    int mib_ = 64;
};

/// Between the two threads: commands one way, replies the other, where a byte wakes who polls the socket.
class channel {
public:
    channel() : wake_(eventfd(0, EFD_NONBLOCK)) {}
    ~channel() { ::close(wake_); }
    channel(const channel&) = delete;
    channel& operator=(const channel&) = delete;

    // the worker loop's
    bool receive(std::vector<command>& out, bool wait) {
        const std::size_t had = out.size();
        commands.receive(out, wait);
        return out.size() > had;
    }
    void send(reply r) {
        replies.post(std::move(r));
        wake();
    }
    // the session's
    void wake() const {
        const std::uint64_t one = 1;
        (void)!::write(wake_, &one, sizeof one);
    }
    void calm() const {
        std::uint64_t count = 0;
        (void)!::read(wake_, &count, sizeof count);
    }
    zmq::pollitem_t item() const { return {nullptr, wake_, ZMQ_POLLIN, 0}; }
    sched::detail::mailbox<command> commands;
    sched::detail::mailbox<reply> replies;

private:
    int wake_;
};

/// `loop` runs a worker loop over the channel until it is told to halt.
inline int serve(sched::stage s, std::int32_t number, std::int32_t slots, const connection& c,
                 const std::function<void(channel&, const std::atomic<std::uint64_t>& keep_from)>& loop) {
    on_signals();
    zmq::context_t context(1);
    dealer wire(context, c.endpoint, c.keys, c.options.frame);
    worker session(s, number, slots, c.options, wire);
    channel between;
    std::atomic<std::uint64_t> keep_from{0};
    std::atomic<bool> ended{false};
    std::thread stage([&] {
        try {
            loop(between, keep_from);
        } catch (const std::exception& e) {
            std::fprintf(stderr, "%s %d: %s\n", name_of(s), number, e.what());
        }
        ended = true;
        between.wake();
    });
    int failed_installs = 0;
    bool halted = false;
    std::vector<command> commands;
    std::vector<reply> replies;
    const auto turn = [&] {
        std::vector<zmq::pollitem_t> items = {wire.item(), between.item()};
        wait_for(items, session.next_deadline() - now());
        wire.receive([&](std::string_view bytes) { session.hear(bytes, now()); });
        keep_from = session.keep_from();
        if (asked_to_stop || session.over()) session.leave(now());
        session.take(commands);
        for (command& x : commands) between.commands.post(std::move(x));
        commands.clear();
        if (session.over() && !std::exchange(halted, true)) between.commands.post(command{}); // halt
        between.calm();
        between.replies.receive(replies, false);
        for (const reply& r : replies) {
            session.say(r);
            if (r.what.what == sched::event::kind::synced) failed_installs = 0;
            failed_installs += r.what.what == sched::event::kind::worker_down;
        }
        replies.clear();
        session.tick(now());
        if (failed_installs == 3) throw std::runtime_error("three installations in a row failed");
    };
    try {
        while (!ended) turn();
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s %d: %s\n", name_of(s), number, e.what());
        std::_Exit(1); // whatever the stage is at
    }
    stage.join();
    if (!session.over()) return 1; // the loop threw
    session.leave(now());
    return 0;
}

/// main() of a worker's program.
inline int run_worker(sched::stage s, int count, char** words) {
    CLI::App app(std::string("A ") + name_of(s) + " worker of a run whose scheduler is opd-schedule.");
    connection c(app);
    std::int32_t number = 0, slots = s == sched::stage::rollout ? 8 : 1;
    std::string folder = "run";
    double quantum = 0.001;
    if (s != sched::stage::learner) { // of which there is one, with one place
        app.add_option("--number", number, "Which worker of its stage this is")
            ->capture_default_str()
            ->check(CLI::NonNegativeNumber);
        app.add_option("--slots", slots, "Sequences at a time")->capture_default_str()->check(CLI::PositiveNumber);
    }
    app.add_option("--folder", folder, "Shared by all processes: payloads, weights")->capture_default_str();
    CLI::Option* const pace =
        app.add_option("--quantum", quantum, "Seconds of a step, a call: what a real stage would compute")
            ->capture_default_str()
            ->check(CLI::NonNegativeNumber);
    std::string config, checkpoint;
    CLI::Option* const trained =
        app.add_option("--config", config,
                       "Settings of opd-train, with run.start_from: the trainer's stages in place of a hash. "
                       "All processes of a run have the same")
            ->excludes(pace);
    if (s == sched::stage::learner)
        app.add_option("--write-student", checkpoint,
                       "Write what a finished run has learnt as a checkpoint of opd-train, and end")
            ->needs(trained);
    CLI11_PARSE(app, count, words)
    try {
        c.check();
        if (!checkpoint.empty()) {
            write_student(config, run_folder(folder), checkpoint);
            return 0;
        }
        return serve(s, number, slots, c, [&](channel& between, const std::atomic<std::uint64_t>& keep_from) {
            if (!config.empty()) {
                run_trainer_stage(s, config, run_folder(folder), number, slots, between, keep_from);
            } else if (s == sched::stage::rollout) {
                sched::rollout_actor<rollout_stage, payload_ref> actor(
                    std::make_shared<rollout_stage>(run_folder(folder), quantum), number);
                run_rollout(actor, between);
            } else if (s == sched::stage::teacher) {
                teacher_stage teacher(run_folder(folder), quantum);
                sched::run_teacher<teacher_stage, payload_ref>(teacher, number, between);
            } else {
                learner_stage student(run_folder(folder), quantum, keep_from);
                sched::run_learner<learner_stage, payload_ref, payload_ref>(student, between);
            }
        });
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", words[0], e.what());
        return 1;
    }
}

} // namespace engine
