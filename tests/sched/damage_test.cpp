// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: always
//
// Damaged snapshots, of every kind that the library writes as bytes: each single bit that is flipped and each length
// that is cut is refused by invalid_input before anything is made of it. A seal is no signature: bytes that are changed
// and sealed again are refused too, or what they made stays in bounds. (The fuzzers of tests/fuzz look further.)
#include "script.hpp"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "opd/sched/simulated.hpp"
#include "opd/sched/staleness_queue.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace {

using namespace opd::test;
using opd::index_t;
using policy = staleness_policy;

/// `restore(bytes)` takes the bytes as they are, and no others.
template <class Restore>
void refuses_damage(const std::string& bytes, Restore restore) {
    restore(bytes);
    const auto taken = [&](const std::string& other) {
        try {
            restore(other);
        } catch (const opd::invalid_input& e) {
            return e.argument != "snapshot";
        }
        return true;
    };
    index_t accepted = 0;
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        std::string other = bytes;
        other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
        accepted += taken(other);
    }
    for (std::size_t n = 0; n < bytes.size(); ++n) accepted += taken(bytes.substr(0, n));
    accepted += taken(bytes + '\0');
    CHECK(accepted == 0);
}

/// Each byte one more and one less, each word the least or the largest number, sealed again. `go_on(bytes)` restores
/// and runs what it restored.
template <class GoOn>
void survives_forgery(const std::string& bytes, GoOn go_on) {
    const std::string body(unseal(bytes));
    index_t refused = 0;
    const auto look = [&](const std::string& other) {
        try {
            go_on(seal(other));
        } catch (const opd::invalid_input&) {
            ++refused;
        }
    };
    for (std::size_t i = 0; i < body.size(); ++i)
        for (const int change : {1, -1}) {
            std::string other = body;
            other[i] = static_cast<char>(other[i] + change);
            look(other);
        }
    for (std::size_t i = 0; i + 8 <= body.size(); ++i)
        for (const std::int64_t word :
             {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
            std::string other = body;
            std::memcpy(other.data() + i, &word, 8);
            look(other);
        }
    CHECK(refused > 0);
}

} // namespace

TEST_CASE("scheduler") {
    for (const bool streams : {true, false}) {
        settings o{.batch = 2, .teacher_batch = 1};
        if (streams)
            o.schedule = async{.tau = 2, .policy = policy::edf};
        else
            o.schedule = step_off{1};
        script t(o);
        t.staff(3);
        t.rolled(0);
        t.scored();
        t.rolled(1);
        refuses_damage(t.s.snapshot(), [&](const std::string& bytes) { scheduler::restore(o, bytes); });
        survives_forgery(t.s.snapshot(), [&](const std::string& bytes) {
            script again(o);
            again.s = scheduler::restore(o, bytes);
            again.score_job = t.score_job, again.train_job = t.train_job;
            again.scored(); // (which throws what is none of this test's where an invariant is broken)
            again.down(stage::rollout);
            again.up(stage::rollout, 0, 2);
            again.learned();
            again.of(event::kind::stop);
        });
    }
}

TEST_CASE("scheduler, with lanes that are kept by attempts which were given up") {
    settings o{.batch = 2, .schedule = async{.tau = 2}, .teacher_batch = 1, .rollout_deadline = 4};
    script t(o);
    t.staff(3);
    t.rolled(0);
    t.wait();
    survives_forgery(t.s.snapshot(), [&](const std::string& bytes) {
        script again(o);
        again.s = scheduler::restore(o, bytes);
        again.now = t.now;
        for (const sample_t n : {1, 2, 3}) again.aborted(t.begun.at(n)); // their next attempts begin
    });
}

TEST_CASE("staleness queue") {
    for (const staleness_policy p : {policy::capacity, policy::cohort_fifo, policy::edf, policy::drop, policy::retry,
                                     policy::in_order, policy::areal}) {
        const queue_options o{.batch = 2, .schedule = {.tau = 2, .policy = p}};
        staleness_queue<std::string> q(o);
        const auto put = [&](const char* item) {
            permit held = q.try_acquire();
            REQUIRE(q.push(held, item) == push_result::queued);
        };
        put("one"), put("two"), put("three");
        auto batch = q.pop();
        auto update = std::move(*batch).trained();
        std::move(update).synchronised();
        put("four"), put("five");
        const std::string bytes = q.snapshot([](archive_writer& to, const std::string& x) { to(x); });
        const auto read = [](archive_reader& from) {
            std::string x;
            from(x);
            return x;
        };
        refuses_damage(bytes, [&](const std::string& other) { staleness_queue<std::string>(o, other, read); });
        survives_forgery(bytes, [&](const std::string& other) {
            staleness_queue<std::string> again(o, other, read);
            if (permit held = again.try_acquire()) (void)again.push(held, "six");
            if (auto some = again.try_pop()) (void)(std::move(*some).trained()).synchronised();
        });
    }
}

namespace {
struct constant_times {
    simulated_rollout rollout(std::int32_t) const { return {engine_speed{.step = 0.25}, 64}; }
    void start(simulated_rollout& w, const ticket& k) const { w.start(k, 4, 0); }
    double teacher(std::uint64_t, std::int32_t, std::span<const ticket>) const { return 1; }
    double learner(std::uint64_t, const weights&, std::span<const ticket>) const { return 1; }
    double sync(std::int32_t, const weights&) const { return 1; }
};
} // namespace

TEST_CASE("virtual driver") {
    const settings o{.batch = 2, .schedule = async{.tau = 1}, .sequences = 20};
    constant_times times;
    virtual_driver<constant_times> d(o, times);
    d.bring_up(stage::rollout, 1, 3);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
    d.run(40);
    refuses_damage(d.snapshot(), [&](const std::string& bytes) { decltype(d)::restore(o, times, bytes); });
    survives_forgery(d.snapshot(), [&](const std::string& bytes) {
        auto again = decltype(d)::restore(o, times, bytes);
        for (int events = 0; events < 40 && again.step(); ++events) again.scheduler().check_invariants();
    });
}
