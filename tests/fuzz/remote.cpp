// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Frames and messages from hostile peers. A remote driver and three workers are brought to some moment of a run; then
// one side hears bytes as they come, frames of before with edits and sealed again, and messages with edits in a
// session's own frames. Nothing but a refusal comes of what no program wrote: the scheduler keeps its invariants,
// peers stay within their number, and a worker that nobody forged goes on, or begins another life.
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz/damage.hpp"
#include "opd/sched/remote_driver.hpp"
#include "opd/sched/remote_worker.hpp"
#include "opd/sched/scheduler_checks.hpp"

namespace {

using namespace opd::fuzz;
using namespace opd::sched;

struct world {
    using payload = payload_ref;
    struct down {
        world* w;
        void send(const std::string& peer, std::string f) { w->to_peer(peer, std::move(f)); }
    };
    struct up {
        world* w;
        std::size_t from;
        void send(std::string f) { w->to_driver.push_back({from, std::move(f)}); }
    };
    struct hooks_type {};
    using driver_type = remote_driver<payload, payload, down, hooks_type>;
    using worker_type = remote_worker<payload, payload, up>;
    using command = worker_command<payload, payload>;
    using reply = worker_reply<payload, payload>;

    static settings how() {
        settings s;
        s.batch = 2, s.schedule = async{.tau = 1, .policy = staleness_policy::in_order}, s.sequences = 12;
        s.most_workers = 8, s.most_slots = 8;
        s.teacher_batch = 2, s.teacher_flush = 0;
        s.rollout_deadline = s.abort_deadline = s.teacher_deadline = s.learner_deadline = s.sync_deadline = 50;
        return s;
    }
    static remote_options limits() {
        remote_options o;
        o.frame = 1024, o.message = 8192, o.waiting = 65536, o.peers = 6, o.window = 4;
        return o;
    }
    world() {
        for (std::size_t i = 0; i < 3; ++i) {
            ups.push_back(std::make_unique<up>(up{this, i}));
            workers.push_back(
                std::make_unique<worker_type>(static_cast<stage>(i), 0, i == 0 ? 2 : 1, limits(), *ups[i]));
        }
    }
    void to_peer(const std::string& peer, std::string f) {
        if (peer.size() == 1 && peer[0] >= 'a' && peer[0] < 'd')
            to_worker.push_back({std::size_t(peer[0] - 'a'), std::move(f)});
    }
    static std::string name(std::size_t i) { return std::string(1, static_cast<char>('a' + i)); }
    void note(const std::string& f) {
        if (seen.size() < 64) seen.push_back(f);
    }
    /// A frame, or some time, goes by. Workers answer at once.
    void go_on() {
        if (!to_driver.empty()) {
            const auto [i, f] = std::move(to_driver.front());
            to_driver.pop_front();
            note(f);
            driver.hear(name(i), f, now);
        } else if (!to_worker.empty()) {
            const auto [i, f] = std::move(to_worker.front());
            to_worker.pop_front();
            note(f);
            workers[i]->hear(f, now);
        } else {
            now += 0.3;
        }
        driver.tick(now);
        for (std::size_t i = 0; i < workers.size(); ++i) turn(i);
    }
    void turn(std::size_t i) {
        worker_type& w = *workers[i];
        std::vector<command> commands;
        w.take(commands);
        using kind = command::kind;
        const auto there = std::make_shared<const payload>(payload{"payload/1/r1", 10, 3});
        for (const command& c : commands) {
            if (c.what == kind::begin) w.say({.what = event::up(static_cast<stage>(i), 0, c.slots).of_life(c.life)});
            if (c.what == kind::install)
                version = c.weights.version, w.say({.what = event::synced(0, c.weights.job).of_life(c.life)});
            if (c.what == kind::start)
                w.say({.what = event::rolled_out(c.ticket, {version, version, double(version), 5}), .sequence = there});
            if (c.what == kind::train) w.say({.what = event::learned(c.call.job).of_life(c.life)});
            if (c.what == kind::score) {
                reply r{.what = event::scored(c.job, 0).of_life(c.life), .tickets = c.tickets};
                r.scores.assign(c.tickets.size(), there);
                w.say(r);
            }
        }
        w.tick(now);
    }

    double now = 0;
    version_t version = 0;
    std::deque<std::pair<std::size_t, std::string>> to_driver, to_worker;
    std::vector<std::string> seen;
    down wire{this};
    hooks_type hooks;
    driver_type driver{how(), limits(), 7, wire, hooks};
    std::vector<std::unique_ptr<up>> ups;
    std::vector<std::unique_ptr<worker_type>> workers;
};

std::string sealed(std::string f) { // the checksum of what stands there now
    if (f.size() < 8) return f;
    f.resize(f.size() - 8);
    const std::uint64_t sum = detail::checksum(f);
    return f.append(reinterpret_cast<const char*>(&sum), sizeof sum);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    world w;
    for (auto before = c.below(120); before > 0; --before) w.go_on();
    for (int i = 0; i < 20 && !c.done(); ++i) {
        std::string f;
        if (c.once_in(8) || w.seen.empty()) {
            f = std::string(c.rest().substr(0, 100));
        } else {
            f = w.seen[c.bytes(1) % w.seen.size()];
            const auto how = c.below(4);
            if (how == 1) damage(c, f);
            if (how > 1) nudge(c, f);
            if (how != 1) f = sealed(f);
        }
        const auto who = static_cast<std::size_t>(c.below(12)); // strangers, too
        if (c.once_in(3))
            w.workers[who % 3]->hear(f, w.now);
        else
            w.driver.hear(who < 3 ? world::name(who) : "stranger" + std::to_string(who), f, w.now);
        w.driver.scheduler().check_invariants();
        for (auto more = c.below(4); more > 0; --more) w.go_on();
    }
    w.driver.scheduler().check_invariants();
    const remote_counts n = w.driver.counts();
    need(n.received >= n.broken + n.stale, "more frames are refused than came");
    return 0;
}
