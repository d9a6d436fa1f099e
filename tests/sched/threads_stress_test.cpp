// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan
// optimise: always
//
// The thread driver under stress: random schedules, workers and tiny work; stages that throw, answer double, in part or
// late; deadlines that expire; workers killed and revived, pauses, checkpoints and questions from another thread; stops
// at random moments, and a resume from the last snapshot until all is done. Built with -fsanitize=thread it must report
// nothing.
//
// In every run: the scheduler's invariants after every event, the stages' own checks, conservation; over all lives of a
// run every sequence is consumed once (under `drop`: at most once).
#include <atomic>
#include <cstdlib>
#include <doctest/doctest.h>
#include <random>

#include "toy_stages.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;
using wrong = toy::world::wrong;

std::uint64_t mixed(std::uint64_t x) { // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/// Random numbers that any thread may draw.
class dice {
public:
    explicit dice(std::uint64_t seed) : seed_(seed) {}
    std::uint64_t draw() { return mixed(seed_ ^ mixed(count_.fetch_add(1, std::memory_order_relaxed))); }
    std::uint64_t below(std::uint64_t n) { return draw() % n; }
    bool one_in(std::uint64_t n) { return n > 0 && below(n) == 0; }

private:
    std::uint64_t seed_;
    std::atomic<std::uint64_t> count_ = 0;
};

struct plan_of_chaos {
    settings how;
    int rollouts, lanes, teachers;
    std::uint64_t throws, lies, hangs, work; // one in so many calls; 0: none. work: spins a call, at most
    bool kills, stops;
    sample_t n;
};

plan_of_chaos chaos(dice& d) {
    plan_of_chaos p;
    settings& s = p.how;
    s.batch = static_cast<index_t>(1 + d.below(8));
    s.group = 1;
    const auto depth = static_cast<index_t>(d.below(4));
    switch (d.below(5)) {
    case 0:
        s.schedule = opd::sched::sync{};
        break;
    case 1:
        s.schedule = step_off{depth};
        break;
    case 2:
        s.schedule = controlled{depth};
        break;
    default: {
        async a;
        a.tau = depth;
        a.policy = static_cast<staleness_policy>(d.below(7));
        a.update = static_cast<weight_update>(d.below(3));
        s.schedule = a;
    }
    }
    p.n = static_cast<sample_t>(s.batch) * (4 + d.below(12));
    s.sequences = static_cast<index_t>(p.n);
    s.teacher_batch = static_cast<index_t>(1 + d.below(6));
    s.teacher_flush = d.one_in(3) ? 0 : 1e-6 * static_cast<double>(d.below(1000));
    s.rollout_attempts = s.teacher_attempts = s.learner_attempts = 1 << 20; // nothing fails for good
    p.throws = d.one_in(2) ? 20 + d.below(200) : 0;
    p.lies = d.one_in(2) ? 20 + d.below(200) : 0;
    p.hangs = d.one_in(3) ? 50 + d.below(200) : 0;
    if (p.hangs) {
        s.rollout_deadline = s.abort_deadline = s.sync_deadline = s.teacher_deadline = 0.002;
    } else if (d.one_in(3)) { // deadlines that expire now and then, for no reason
        s.rollout_deadline = s.abort_deadline = s.sync_deadline = s.teacher_deadline =
            1e-6 * static_cast<double>(200 + d.below(3000));
    }
    p.work = d.below(2000);
    p.rollouts = static_cast<int>(1 + d.below(6));
    p.lanes = static_cast<int>(1 + d.below(5));
    p.teachers = static_cast<int>(1 + d.below(3));
    p.kills = d.one_in(2);
    p.stops = d.one_in(2);
    return p;
}

/// Another thread's part: each time a step is complete it does something to the run.
class troublemaker {
public:
    troublemaker(toy::driver& d, const plan_of_chaos& p, dice& random)
        : thread_([this, &d, &p, &random](std::stop_token stop) {
              std::vector<worker_name> dead;
              std::unique_lock lock(mutex_);
              while (changed_.wait(lock, stop, [&] { return steps_ > 0; })) {
                  steps_ = 0;
                  lock.unlock();
                  for (const worker_name& w : dead) d.revive(w.stage, w.worker);
                  dead.clear();
                  if (p.kills && random.one_in(2)) {
                      const auto s = static_cast<stage>(random.below(3));
                      const std::uint64_t count = s == stage::rollout   ? static_cast<std::uint64_t>(p.rollouts)
                                                  : s == stage::teacher ? static_cast<std::uint64_t>(p.teachers)
                                                                        : 1;
                      const auto w = static_cast<std::int32_t>(random.below(count));
                      d.kill(s, w);
                      if (count > 1 && d.workers(s) > 0 && random.one_in(2))
                          dead.push_back({s, w}); // there are others, as long as no deadline takes them too
                      else
                          d.revive(s, w);
                  }
                  if (random.one_in(8)) {
                      d.pause();
                      (void)d.where();
                      d.resume();
                  }
                  if (random.one_in(4)) d.request_checkpoint();
                  (void)d.totals();
                  lock.lock();
                  if (!dead.empty() && steps_ == 0) { // nobody may be left to make a step
                      lock.unlock();
                      for (const worker_name& w : dead) d.revive(w.stage, w.worker);
                      dead.clear();
                      lock.lock();
                  }
              }
          }) {}
    void step() {
        const std::lock_guard lock(mutex_);
        ++steps_;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable_any changed_;
    int steps_ = 0;
    std::jthread thread_;
};

void survive(std::uint64_t seed) {
    CAPTURE(seed);
    dice random(seed);
    const plan_of_chaos p = chaos(random);
    const bool drops = std::holds_alternative<async>(p.how.schedule) &&
                       std::get<async>(p.how.schedule).policy == staleness_policy::drop;
    std::vector<sample_t> consumed;
    std::optional<toy::snapshot> saved;
    bool done = false;
    for (int life = 0; !done; ++life) {
        REQUIRE(life < 100);
        toy::run r;
        r.how = p.how;
        r.rollouts = p.rollouts, r.lanes = p.lanes, r.teachers = p.teachers;
        r.options.drain_seconds = 1e-5 * static_cast<double>(random.below(1000));
        r.options.checkpoint_every = static_cast<index_t>(random.below(4));
        r.shared->forgetful = p.lies > 0 || p.throws > 0;
        r.shared->fault = [&](const std::string& call, int, sample_t, std::stop_token stop) {
            volatile std::uint64_t sink = 0;
            for (std::uint64_t i = p.work ? random.below(p.work) : 0; i > 0; --i) sink = sink + i;
            if (random.one_in(p.throws)) throw toy::failed("stress");
            if (call != "train" && random.one_in(p.hangs)) { // until its deadline is past and it is told
                std::mutex m;
                std::condition_variable_any never;
                std::unique_lock lock(m);
                if (call == "score" || call == "step") never.wait(lock, stop, [] { return false; });
            }
            if (call == "step" && random.one_in(p.lies)) {
                constexpr wrong lies[] = {wrong::twice, wrong::stranger, wrong::future, wrong::forgets};
                return lies[random.below(4)];
            }
            if (call == "score" && random.one_in(p.lies)) return random.one_in(2) ? wrong::partly : wrong::miscounts;
            return wrong::nothing;
        };
        r.from = saved ? &*saved : nullptr;
        const version_t first = saved ? saved->weights.version : 0;
        const version_t cut = p.stops ? first + 1 + static_cast<version_t>(random.below(8)) : 1 << 30;
        const std::uint64_t way = random.below(3);
        std::optional<toy::snapshot> next = saved;
        std::optional<troublemaker> trouble;
        r.prepare = [&](toy::driver& d) { trouble.emplace(d, p, random); };
        r.on_step = [&](toy::driver& d, const toy::step& s) {
            trouble->step();
            if (s.version != cut) return;
            if (way == 0) d.stop_now();
            if (way == 1) d.request_stop();
            if (way == 2) d.close();
        };
        r.on_checkpoint = [&](toy::driver&, toy::snapshot s) { next = std::move(s); };
        r.finished = [&] { trouble.reset(); };
        r.go();
        CHECK(r.complaints() == "");
        CHECK(r.report.left_behind.empty());
        CHECK(r.report.totals.admitted == r.report.totals.consumed + r.report.totals.failed);
        const std::string first_exception = r.first_exception();
        CHECK(r.report.observer_exceptions == 0); // the scheduler's invariants among them
        if (p.throws == 0 && p.lies == 0) CHECK(first_exception == "");
        done = r.report.completed && (way != 2 || r.report.totals.consumed == static_cast<std::int64_t>(p.n));
        for (const toy::step& s : r.steps)
            if (done || (next && s.version <= next->weights.version))
                for (const auto& c : s.consumed) consumed.push_back(c.ticket.sample);
        saved = std::move(next);
    }
    std::sort(consumed.begin(), consumed.end());
    REQUIRE(consumed.size() == p.n);
    CHECK(std::adjacent_find(consumed.begin(), consumed.end()) == consumed.end());
    if (!drops) CHECK(consumed.back() == p.n - 1);
}

} // namespace

TEST_CASE("random runs on threads survive") {
    const char* one = std::getenv("OPD_STRESS_SEED");
    const char* many = std::getenv("OPD_STRESS_RUNS");
    if (one) return survive(std::strtoull(one, nullptr, 10));
    const std::uint64_t runs = many ? std::strtoull(many, nullptr, 10) : 300;
    for (std::uint64_t seed = 1; seed <= runs; ++seed) survive(seed);
}

TEST_CASE("many workers") {
    toy::run r;
    r.check_state = false;
    async a;
    a.tau = 4;
    r.how.batch = 64;
    r.how.schedule = a;
    r.how.sequences = 6400;
    r.how.teacher_batch = 8;
    r.how.teacher_flush = 0.0002;
    r.rollouts = 24;
    r.lanes = 16;
    r.teachers = 8;
    r.go();
    CHECK(r.complaints() == "");
    CHECK(r.report.completed);
    CHECK(r.report.exceptions == 0);
    CHECK(r.consumed_all(6400));
}
