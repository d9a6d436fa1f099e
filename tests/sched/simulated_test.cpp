// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "opd/sched/simulated.hpp"
#include "support/property.hpp"

using namespace opd::sched;

namespace {

struct finish {
    double time;
    ticket who;
    token_versions versions;
};

ticket on_lane(std::int32_t lane, sample_t sample = 0) {
    return {.sample = sample, .attempt = 1, .worker = 0, .incarnation = 1, .lane = lane};
}

// The engine without a shared clock and without a heap: every sequence counts its own tokens, everything is computed
// anew at every event.
// What is within 1e-6 of a step of its end has ended, as the engine has it.
struct naive_engine {
    struct sequence {
        ticket who;
        double done = 0, length = 0, prompt = 0;
        std::vector<version_t> token_version; // of the tokens that are done
    };
    engine_speed speed;
    std::map<std::int32_t, sequence> lanes;
    version_t version = 0;
    double stall = 0;
    bool paused = false;

    double step() const {
        return speed.factor * (speed.step + speed.step_per_sequence * static_cast<double>(lanes.size()));
    }
    void count(sequence& s) { // tokens whose step has ended were drawn by the present version
        while (static_cast<double>(s.token_version.size()) + 1 <= s.done + 1e-6) s.token_version.push_back(version);
    }
    void start(const ticket& t, double length, double prompt) {
        if (lanes.empty()) stall = 0;
        lanes[t.lane] = {t, 0, length, prompt, {}};
        stall += speed.factor * speed.prefill * prompt;
    }
    void install(version_t v) {
        paused = false;
        if (v == version) return;
        for (auto& [lane, s] : lanes) {
            count(s);
            stall += speed.factor * speed.rebuild * (s.prompt + s.done);
        }
        version = v;
    }
    double next() const {
        double r = forever;
        if (paused) return r;
        for (const auto& [lane, s] : lanes) r = std::min(r, stall + (s.length - s.done) * step());
        return r;
    }
    void advance(double dt, std::vector<finish>& out, double now) {
        if (paused) return;
        const double waited = std::min(dt, stall), gain = (dt - waited) / step();
        stall -= waited;
        if (stall < 1e-9) stall = 0;
        for (auto& [lane, s] : lanes) s.done += gain;
        for (auto i = lanes.begin(); i != lanes.end();) {
            sequence& s = i->second;
            if (stall > 0 || s.done < s.length - 1e-6) {
                ++i;
                continue;
            }
            s.done = s.length;
            count(s);
            token_versions v;
            v.tokens = static_cast<std::int64_t>(s.token_version.size());
            v.oldest = s.token_version.front(), v.newest = s.token_version.back();
            for (const version_t x : s.token_version) v.mean += static_cast<double>(x);
            v.mean /= static_cast<double>(v.tokens);
            out.push_back({now, s.who, v});
            i = lanes.erase(i);
        }
        if (lanes.empty()) stall = 0;
    }
};

void equal(const std::vector<finish>& a, const std::vector<finish>& b, double time_tolerance) {
    RC_ASSERT(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
        RC_ASSERT(a[i].who == b[i].who);
        RC_ASSERT(std::abs(a[i].time - b[i].time) <= time_tolerance * (1 + a[i].time));
        RC_ASSERT(a[i].versions.oldest == b[i].versions.oldest);
        RC_ASSERT(a[i].versions.newest == b[i].versions.newest);
        RC_ASSERT(a[i].versions.tokens == b[i].versions.tokens);
        RC_ASSERT(std::abs(a[i].versions.mean - b[i].versions.mean) <= 1e-9);
    }
}

std::string bytes_of(const simulated_rollout& e) {
    archive_writer w;
    w(e);
    return w.bytes;
}

const engine_speed by_half{.step = 0.5}; // exact in binary

} // namespace

TEST_CASE("independent sequences finish after their length") {
    simulated_rollout e(by_half, 3, 5);
    CHECK(e.next() == forever);
    e.start(on_lane(0, 10), 4, 0);
    e.start(on_lane(2, 11), 2, 0);
    CHECK(e.running() == 2);
    CHECK(e.next() == 1);
    std::vector<finish> out;
    const auto collect = [&](const ticket& t, const token_versions& v) { out.push_back({0, t, v}); };
    e.advance(0.5, collect);
    CHECK(out.empty());
    e.advance(e.next(), collect);
    REQUIRE(out.size() == 1);
    CHECK(out[0].who == on_lane(2, 11));
    CHECK(out[0].versions == token_versions{5, 5, 5, 2});
    e.start(on_lane(1, 12), 2, 0); // ties with lane 0
    CHECK(e.next() == 1);
    e.advance(1, collect);
    REQUIRE(out.size() == 3);
    CHECK(out[1].who.lane == 0);
    CHECK(out[2].who.lane == 1);
    CHECK(e.running() == 0);
    CHECK(e.next() == forever);
    CHECK(e.done().decoded == 8);
    CHECK(e.done().busy == 2);
}

TEST_CASE("processor sharing: the step grows with the sequences running") {
    simulated_rollout e({.step = 1, .step_per_sequence = 1}, 2);
    e.start(on_lane(0), 10, 0);
    CHECK(e.next() == 20); // 1 + 1·1 a step
    std::vector<ticket> out;
    const auto collect = [&](const ticket& t, const token_versions&) { out.push_back(t); };
    e.advance(8, collect); // 4 tokens
    e.start(on_lane(1), 3, 0);
    CHECK(e.next() == 9); // 3 tokens at 3 seconds
    e.advance(9, collect);
    REQUIRE(out.size() == 1);
    CHECK(out[0].lane == 1);
    CHECK(e.next() == 6); // 3 left at 2 seconds
    e.advance(6, collect);
    CHECK(out.size() == 2);
}

TEST_CASE("prefill, rebuild and pause stop all lanes for their time") {
    simulated_rollout e({.step = 0.5, .prefill = 0.25, .rebuild = 0.125, .factor = 2}, 2);
    const auto none = [](const ticket&, const token_versions&) { CHECK(false); };
    e.start(on_lane(0), 8, 4);
    CHECK(e.next() == 2 * (4 * 0.25 + 8 * 0.5));
    e.advance(2 + 3, none); // prefill, then 3 tokens
    e.start(on_lane(1), 100, 16);
    CHECK(e.next() == 8 + 5);
    e.advance(3, none);
    e.pause();
    CHECK(e.next() == forever);
    e.advance(1000, none);
    e.install(1); // context: 4 + 3 and 16 + 0
    CHECK_FALSE(e.paused());
    CHECK(e.next() == 5 + 2 * 0.125 * 23 + 5);
    e.install(1); // not a change
    CHECK(e.next() == 5 + 2 * 0.125 * 23 + 5);
    e.pause();
    e.resume();
    int finished = 0;
    e.advance(e.next(), [&](const ticket& t, const token_versions& v) {
        ++finished;
        CHECK(t.lane == 0);
        CHECK(v == token_versions{0, 1, 5.0 / 8, 8});
    });
    CHECK(finished == 1);
    CHECK(e.done().stalled == 2 + 8 + 5.75);
    CHECK(e.done().busy == 5 + 3 + 15.75);
}

TEST_CASE("elasticity: the fixed part of steps less the rebuilding, as a share of the time") {
    const auto none = [](const ticket&, const token_versions&) {};
    simulated_rollout e({.step = 0.5, .step_per_sequence = 0.25, .prefill = 0.25, .rebuild = 0.125, .factor = 2}, 2);
    CHECK(e.elasticity() == untold); // it has done nothing
    e.start(on_lane(0), 8, 4);
    e.start(on_lane(1), 8, 0);
    e.advance(2 + 4, none); // 2 s of prompts, 2 steps of 2·(1/2 + 2/4)
    CHECK(e.elasticity() == 2.0 / 6);
    CHECK(e.elasticity() == untold);
    e.install(1); // 2/8 s for each of 8 tokens
    e.advance(2 + 2, none);
    CHECK(e.elasticity() == (1.0 - 2.0) / 4);
    const auto late = [&](double rebuild) { // of the first step after an install
        simulated_rollout r({.step = 1, .rebuild = rebuild}, 1);
        r.start(on_lane(0), 100, 50);
        r.install(1);
        r.advance(0.5, none);
        return r.elasticity();
    };
    CHECK(late(10) == -1); // never below
    CHECK(late(0) == 1);   // nothing but fixed parts
}

TEST_CASE("lemma 3: where weights change with every batch, elasticity is the slope of log pace in log n") {
    struct measured {
        double pace, elasticity;
    };
    const engine_speed speed{.step = 1, .step_per_sequence = 0.05, .rebuild = 0.05};
    const auto keep_running = [&](opd::index_t n) {
        simulated_rollout e(speed, n);
        sample_t next = 0;
        const auto start = [&](std::int32_t lane) {
            const double length = 100 + 10 * static_cast<double>(next % 11);
            e.start({.sample = next++, .slot = static_cast<std::uint32_t>(lane), .worker = 0, .lane = lane}, length, 0);
        };
        opd::index_t finished = 0, batches = 0;
        double now = 0, begun = 0;
        for (std::int32_t l = 0; l < n; ++l) start(l);
        std::vector<std::int32_t> vacant;
        while (batches < 250) {
            const double dt = e.next();
            e.advance(dt, [&](const ticket& t, const token_versions&) { vacant.push_back(t.lane); });
            now += dt;
            for (const std::int32_t l : std::exchange(vacant, {})) {
                start(l);
                if (++finished % 40 != 0) continue;
                e.install(++batches);
                if (batches != 50) continue;
                begun = now;
                e.elasticity();
            }
        }
        return measured{1 / (now - begun), e.elasticity()};
    };
    bool rising = false, falling = false;
    for (const opd::index_t n : {8, 16, 32, 48}) {
        const double low = keep_running(n - n / 8).pace, high = keep_running(n + n / 8).pace;
        const double slope = std::log(high / low) / std::log(9.0 / 7.0);
        CHECK(keep_running(n).elasticity == doctest::Approx(slope).epsilon(0.02).scale(1));
        (slope > 0 ? rising : falling) = true;
    }
    CHECK((rising && falling));
}

TEST_CASE("breakpoints of versions are exact") {
    simulated_rollout e(by_half, 2, 3);
    const auto none = [](const ticket&, const token_versions&) { CHECK(false); };
    std::vector<token_versions> out;
    const auto collect = [&](const ticket&, const token_versions& v) { out.push_back(v); };
    e.start(on_lane(0), 10, 0);
    e.install(4);         // before the first token: 3 drew nothing
    e.advance(1.5, none); // 3 tokens
    e.install(6);
    e.install(7);          // 6 drew nothing
    e.advance(0.25, none); // half a token: its step ends under 9
    e.install(9);
    e.start(on_lane(1), 6, 0);
    e.advance(3, collect);
    e.advance(e.next(), collect);
    REQUIRE(out.size() == 2);
    CHECK(out[0] == token_versions{9, 9, 9, 6});
    CHECK(out[1] == token_versions{4, 9, (3 * 4 + 7 * 9) / 10.0, 10});
    CHECK_THROWS_AS(e.install(8), opd::invalid_input);
}

TEST_CASE("abort frees the lane, discards the tokens and leaves the others alone") {
    simulated_rollout e(by_half, 2);
    const auto none = [](const ticket&, const token_versions&) { CHECK(false); };
    e.start(on_lane(0, 1), 10, 0);
    e.start(on_lane(1, 2), 4, 0);
    e.advance(1, none);
    CHECK_FALSE(e.abort(on_lane(1, 3)));
    CHECK_FALSE(e.abort({2, 0, 2, 0, 1})); // another attempt
    CHECK_FALSE(e.abort(on_lane(7, 2)));
    CHECK(e.runs(on_lane(1, 2)));
    CHECK(e.abort(on_lane(1, 2)));
    CHECK_FALSE(e.abort(on_lane(1, 2)));
    CHECK_FALSE(e.runs(on_lane(1, 2)));
    CHECK(e.done().discarded == 2);
    CHECK(e.next() == 4);
    e.start(on_lane(1, 3), 1, 0);
    CHECK(e.next() == 0.5);
}

TEST_CASE("bad input is refused before anything changes") {
    CHECK_THROWS_AS(simulated_rollout(by_half, 0), opd::invalid_input);
    CHECK_THROWS_AS(simulated_rollout({.step = 0}, 1), opd::invalid_input);
    CHECK_THROWS_AS(simulated_rollout({.step = 1, .factor = 0}, 1), opd::invalid_input);
    CHECK_THROWS_AS(simulated_rollout({.step = 1, .rebuild = -1}, 1), opd::invalid_input);
    simulated_rollout e(by_half, 2);
    e.start(on_lane(1), 5, 1);
    const std::string before = bytes_of(e);
    CHECK_THROWS_AS(e.start(on_lane(1), 5, 1), opd::invalid_input);
    CHECK_THROWS_AS(e.start(on_lane(2), 5, 1), opd::invalid_input);
    CHECK_THROWS_AS(e.start(on_lane(-1), 5, 1), opd::invalid_input);
    CHECK_THROWS_AS(e.start(on_lane(0), std::nan(""), 1), opd::invalid_input);
    CHECK_THROWS_AS(e.start(on_lane(0), 5, -1), opd::invalid_input);
    CHECK_THROWS_AS(e.advance(-1, [](const ticket&, const token_versions&) {}), opd::invalid_input);
    CHECK(bytes_of(e) == before);

    simulated_rollout smaller(by_half, 1);
    archive_reader r(before);
    CHECK_THROWS_AS(r(smaller), opd::invalid_input);
    int refused = 0, accepted = 0;
    for (std::size_t cut = 0; cut < before.size(); ++cut) { // cut short, or a byte changed: refused or harmless
        simulated_rollout x(by_half, 2);
        archive_reader shorter(std::string_view(before).substr(0, cut));
        CHECK_THROWS_AS(shorter(x), opd::invalid_input);
        std::string damaged = before;
        damaged[cut] = static_cast<char>(damaged[cut] ^ 0x41);
        try {
            simulated_rollout y(by_half, 2);
            archive_reader other(damaged);
            other(y);
            y.advance(1, [](const ticket&, const token_versions&) {});
            ++accepted;
        } catch (const opd::invalid_input&) {
            ++refused;
        }
    }
    CHECK(refused > 20);
    CHECK(accepted > 20); // numbers that could be true
}

TEST_CASE("a random life of an engine") {
    property("equals the naive simulation, conserves work, and survives copies and snapshots", [] {
        const engine_speed speed{.step = *rc::gen::inRange(1, 20) / 16.0,
                                 .step_per_sequence = *rc::gen::element(0.0, 0.01, 0.3),
                                 .prefill = *rc::gen::element(0.0, 0.003),
                                 .rebuild = *rc::gen::element(0.0, 0.002),
                                 .factor = *rc::gen::element(1.0, 1.7)};
        const std::int32_t lanes = *rc::gen::inRange(1, 9);
        simulated_rollout fast(speed, lanes);
        naive_engine slow{speed, {}, 0, 0, false};
        std::vector<finish> a, b;
        std::map<std::int32_t, ticket> running;
        double now = 0, finished_tokens = 0, work = 0;
        version_t version = 0;
        sample_t sample = 0;
        const int events = *rc::gen::inRange(10, 200);
        for (int i = 0; i < events; ++i) {
            const int what = *rc::gen::inRange(0, 10);
            const std::int32_t lane = *rc::gen::inRange<std::int32_t>(0, lanes);
            if (what < 4) {
                if (running.count(lane)) continue;
                const ticket t = on_lane(lane, sample++);
                const double length = *rc::gen::inRange(1, 60), prompt = *rc::gen::inRange(0, 30);
                fast.start(t, length, prompt);
                slow.start(t, length, prompt);
                running[lane] = t;
            } else if (what == 4) {
                if (!running.count(lane)) continue;
                RC_ASSERT(fast.abort(running[lane]));
                slow.lanes.erase(lane);
                if (slow.lanes.empty()) slow.stall = 0;
                running.erase(lane);
            } else if (what == 5) {
                version += *rc::gen::inRange(0, 3);
                fast.install(version);
                slow.install(version);
            } else if (what == 6) {
                const bool pause = *rc::gen::inRange(0, 3) == 0;
                pause ? fast.pause() : fast.resume();
                slow.paused = pause;
            } else {
                RC_ASSERT(std::isinf(fast.next()) == std::isinf(slow.next()));
                double dt = 1;
                if (!std::isinf(fast.next())) {
                    RC_ASSERT(std::abs(fast.next() - slow.next()) <= 1e-9 * (1 + fast.next()));
                    // whole steps, whole ends and anything between
                    dt = what == 7 ? fast.next() : fast.next() * *rc::gen::inRange(0, 100) / 100.0;
                }
                const double before = fast.done().decoded, stalled = fast.done().stalled;
                const double rate = static_cast<double>(fast.running()) /
                                    (speed.factor * (speed.step + speed.step_per_sequence * fast.running()));
                const double waited = fast.paused() || fast.running() == 0 ? dt : 0;
                now += dt;
                simulated_rollout copy = fast;
                int copied = 0;
                copy.advance(dt, [&](const ticket&, const token_versions&) { ++copied; });
                const std::size_t seen = a.size();
                fast.advance(dt, [&](const ticket& t, const token_versions& v) {
                    a.push_back({now, t, v});
                    finished_tokens += static_cast<double>(v.tokens);
                    running.erase(t.lane);
                });
                RC_ASSERT(copied == static_cast<int>(a.size() - seen));
                RC_ASSERT(bytes_of(copy) == bytes_of(fast));
                slow.advance(dt, b, now);
                work += (dt - waited - (fast.done().stalled - stalled)) * (std::isnan(rate) ? 0 : rate);
                RC_ASSERT(fast.done().decoded >= before);
            }
            RC_ASSERT(fast.running() == static_cast<opd::index_t>(running.size()));
            simulated_rollout restored(speed, lanes, 77);
            const std::string bytes = bytes_of(fast);
            archive_reader r(bytes);
            r(restored);
            RC_ASSERT(r.done());
            RC_ASSERT(bytes_of(restored) == bytes);
            fast = restored;
        }
        equal(a, b, 1e-9);
        double in_progress = 0;
        for (const auto& [lane, s] : slow.lanes) in_progress += s.done;
        RC_ASSERT(std::abs(fast.done().decoded - finished_tokens - fast.done().discarded - in_progress) <= 1e-3);
        RC_ASSERT(std::abs(fast.done().decoded - work) <= 1e-3);
    });

    property("equals an integration in tiny steps", [] {
        const engine_speed speed{.step = 0.01, .step_per_sequence = *rc::gen::element(0.0, 0.004), .prefill = 0.001};
        const std::int32_t lanes = 4;
        simulated_rollout e(speed, lanes);
        const double dt = 1e-3;
        std::map<std::int32_t, double> left;
        double stall = 0;
        std::vector<double> euler, exact;
        for (std::int32_t i = 0; i < lanes; ++i) {
            const double length = *rc::gen::inRange(1, 400), prompt = *rc::gen::inRange(0, 100);
            e.start(on_lane(i), length, prompt);
            left[i] = length;
            stall += 0.001 * prompt;
        }
        for (double t = dt; !left.empty(); t += dt) {
            if (stall > 0) {
                stall -= dt;
                continue;
            }
            const double gain = dt / (speed.step + speed.step_per_sequence * static_cast<double>(left.size()));
            for (auto i = left.begin(); i != left.end();) {
                if ((i->second -= gain) > 1e-9) {
                    ++i;
                    continue;
                }
                euler.push_back(t);
                i = left.erase(i);
            }
        }
        double now = 0;
        while (e.running() > 0) {
            now += e.next();
            e.advance(e.next(), [&](const ticket&, const token_versions&) { exact.push_back(now); });
        }
        RC_ASSERT(euler.size() == exact.size());
        for (std::size_t i = 0; i < exact.size(); ++i) RC_ASSERT(std::abs(euler[i] - exact[i]) <= 10 * dt);
    });

    property("a long leap passes over every end at its time", [] {
        const engine_speed speed{.step = 0.5, .step_per_sequence = 0.25};
        simulated_rollout leap(speed, 8), steps(speed, 8);
        for (std::int32_t i = 0; i < 8; ++i) {
            const int length = *rc::gen::inRange(1, 50);
            leap.start(on_lane(i), length, 0);
            steps.start(on_lane(i), length, 0);
        }
        double now = 0;
        std::vector<ticket> a, b;
        const double until = *rc::gen::inRange(1, 200);
        leap.advance(until, [&](const ticket& t, const token_versions&) { a.push_back(t); });
        while (now + steps.next() <= until) {
            now += steps.next();
            steps.advance(steps.next(), [&](const ticket& t, const token_versions&) { b.push_back(t); });
        }
        RC_ASSERT(a == b);
    });
}

TEST_CASE("a driver whose clock is large and rounds makes progress") {
    // A week of virtual time, a clock in doubles, tiny steps: every call must end a sequence.
    simulated_rollout e({.step = 1e-4, .step_per_sequence = 1e-6, .prefill = 1e-6}, 4);
    sample_t sample = 0;
    for (std::int32_t i = 0; i < 4; ++i) e.start(on_lane(i, sample++), 10 + 3 * i, 7);
    double last = 604800;
    for (int i = 0; i < 100000; ++i) {
        const double when = last + e.next();
        int ended = 0;
        e.advance(when - last, [&](const ticket&, const token_versions&) { ++ended; });
        last = when;
        REQUIRE(ended > 0);
        for (std::int32_t lane = 0; lane < 4; ++lane)
            if (e.running() < 4) {
                try {
                    e.start(on_lane(lane, sample), 1 + static_cast<double>(sample * 7919 % 113), 7);
                    ++sample;
                } catch (const opd::invalid_input&) {} // that lane is running
            }
    }
    CHECK(sample > 100000);
}

TEST_CASE("a busy engine forgets the versions that nobody has seen") {
    simulated_rollout e(by_half, 2);
    const auto ignore = [](const ticket&, const token_versions&) {};
    std::size_t longest = 0;
    token_versions last;
    for (int i = 0; i < 20000; ++i) {
        const std::int32_t lane = i % 2;
        e.start(on_lane(lane, static_cast<sample_t>(i)), 8, 0); // two overlap always
        for (int k = 0; k < 4 && i > 0; ++k) {
            e.advance(0.5, [&](const ticket&, const token_versions& v) { last = v; });
            e.install(e.version() + 1);
        }
        longest = std::max(longest, bytes_of(e).size());
        if (i == 0) e.advance(2, ignore);
    }
    CHECK(longest < 10000);
    CHECK(last.newest - last.oldest == 7);
    CHECK(last.mean - static_cast<double>(last.oldest) == 3.5);
}

TEST_CASE("jobs and lengths") {
    simulated_job j{.fixed = 2, .per_item = 0.5, .per_token = 0.01};
    CHECK(j.seconds(0, 0, 4, 100) == 5);
    j.noise = {uniform{1, 2}};
    j.what = draw_of::teacher_time;
    j.seed = 4;
    CHECK(j.seconds(3, 1, 4, 100) == 5 * draw({uniform{1, 2}}, 4, draw_of::teacher_time, 3, 1));
    CHECK(j.seconds(3, 1, 4, 100) != j.seconds(3, 2, 4, 100));
    CHECK(j.seconds(3, 1, 4, 100) != j.seconds(4, 1, 4, 100));
    j.per_item = -1;
    CHECK_THROWS_AS(validate(j, "teacher"), opd::invalid_input);
    j = {.noise = {uniform{2, 1}}};
    CHECK_THROWS_AS(validate(j, "teacher"), opd::invalid_input);

    simulated_lengths l{.response = {lognormal{100, 1}}, .prompt = {uniform{10, 90}}, .seed = 9, .group = 4};
    validate(l, "lengths");
    const auto a = l.of({8, 0, 1, 0, 0}), b = l.of({11, 5, 1, 2, 3}), c = l.of({12, 0, 1, 0, 0});
    CHECK(a.prompt == b.prompt); // one group
    CHECK(a.prompt != c.prompt);
    CHECK(a.response != b.response);
    CHECK(a.response == l.of({8, 3, 2, 7, 1}).response);
    l.by_attempt = true;
    CHECK(l.of({8, 0, 1, 0, 0}).response != l.of({8, 0, 2, 0, 0}).response);
    l.group = 0;
    CHECK_THROWS_AS(validate(l, "lengths"), opd::invalid_input);
}
