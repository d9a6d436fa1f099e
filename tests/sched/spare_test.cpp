// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Spare work: what a rollout worker does while the scheduler has nothing for it to run. In the worker's loop, in
// virtual time and on threads; and that no figure takes it for rollout.
#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "opd/sched/recorder.hpp"
#include "opd/sched/thread_driver.hpp"
#include "opd/sched/timed_stages.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

struct text {
    std::uint64_t length = 0;
    template <class A>
    void fields(A& a) {
        a(length);
    }
};

// Sequences of 3 to 7 tokens, one a quantum; between them it may do spare work, `most` quanta a time.
class writer {
public:
    using rolled_type = text;
    struct trained {
        int rows = 0;
    };
    int most = 2, done = 0;
    std::uint64_t quanta = 0, spares = 0;

    void start(const ticket& t, std::shared_ptr<const text>) {
        lanes_.push_back({t, 0});
        done = 0;
    }
    void abort(const ticket& t) {
        std::erase_if(lanes_, [&](const lane& l) { return l.who == t; });
    }
    void install(const weights& w) {
        version_ = w.version;
        done = 0;
    }
    index_t running() const { return static_cast<index_t>(lanes_.size()); }
    void step(std::vector<finished_rollout<text>>& out, std::stop_token) {
        ++quanta;
        for (lane& l : lanes_) ++l.tokens;
        std::erase_if(lanes_, [&](const lane& l) {
            if (l.tokens < 3 + l.who.sample % 5) return false;
            const token_versions v{version_, version_, static_cast<double>(version_),
                                   static_cast<std::int64_t>(l.tokens)};
            out.push_back({l.who, v, std::make_shared<const text>(text{l.tokens})});
            return true;
        });
    }
    std::optional<trained> spare(std::stop_token) {
        if (!lanes_.empty() || version_ < 0) throw std::logic_error("spare work, with other work to do");
        if (done == most) return {};
        ++done, ++spares;
        return trained{10 * done};
    }
    template <class A>
    void fields(A& a) {
        a(most, done, quanta, spares, version_);
        detail::list_fields(a, lanes_, [&](lane& l) { a(l.who, l.tokens); });
    }

private:
    struct lane {
        ticket who;
        std::uint64_t tokens = 0;
    };
    version_t version_ = -1;
    std::vector<lane> lanes_;
};
struct judge {
    using scored_type = text;
    std::vector<std::shared_ptr<const text>> score(std::span<const std::shared_ptr<const text>> all, std::stop_token) {
        return {all.begin(), all.end()};
    }
};
struct pupil {
    std::function<void()> before = [] {};
    index_t train(std::span<const sequence_view<text, text>>, const train_call&, std::stop_token) {
        before();
        return 1;
    }
};

// What workers of the rollout stage are at, and for how long.
struct watch {
    std::map<std::int32_t, activity> now;
    std::map<std::int32_t, std::vector<std::pair<double, double>>> spare, work;
    std::map<std::int32_t, double> since;
    bool twice = false;
    void begin(stage s, std::int32_t w, double t, activity what) {
        if (s != stage::rollout) return;
        twice |= now[w] != activity::none;
        now[w] = what, since[w] = t;
    }
    void end(stage s, std::int32_t w, double t, activity what) {
        if (s != stage::rollout) return;
        twice |= now[w] != what;
        now[w] = activity::none;
        (what == activity::spare ? spare : work)[w].emplace_back(since[w], t);
    }
    void up(stage, std::int32_t, double) {}
    void down(stage, std::int32_t, double) {}
    void event(double, const opd::sched::event&, const actions&, const scheduler&) {}
};

using model = timed_stages<writer, judge, pupil>;
template <class Observer>
using driver = virtual_driver<model, Observer>;
model model_of(std::vector<std::shared_ptr<writer>>* made = nullptr, int most = 2) {
    model::costs_type costs;
    costs.step = [](std::int32_t, index_t) { return 1.0; };
    costs.spare = [](std::int32_t, const writer::trained& t) { return t.rows / 8.0; };
    costs.score = [](auto) { return 0.5; };
    costs.train = [](auto) { return 6.25; };
    costs.install = [](std::int32_t, version_t) { return 0.25; };
    return model(
        [made, most](std::int32_t) {
            auto w = std::make_shared<writer>();
            w->most = most;
            if (made) made->push_back(w);
            return w;
        },
        {std::make_shared<judge>()}, std::make_shared<pupil>(), costs);
}
template <class Driver>
void staff(Driver& d, int workers = 2) {
    d.bring_up(stage::rollout, workers, 2);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
}
const settings serially{.batch = 4, .schedule = opd::sched::sync{}, .sequences = 16, .teacher_batch = 4};

} // namespace

TEST_CASE("a worker does spare work when it is told that it may, until something is to run or nothing is left to do") {
    const auto stage = std::make_shared<writer>();
    rollout_actor<writer, text> actor(stage, 0);
    using command = worker_command<text, text>;
    using order = command::kind;
    std::string said;
    const auto hear = [&](auto&& r) {
        if (r.failed) said += "error ";
        if (r.spared) said += "spared ";
    };
    const auto obey = [&](order what, std::uint64_t job = 0) {
        command c{.what = what, .life = 1, .ticket = {.sample = 2, .worker = 0}, .weights = {0, job}};
        actor.obey(c, hear);
    };
    obey(order::begin);
    obey(order::spare);
    CHECK(!actor.spares()); // without weights
    obey(order::install);
    CHECK(!actor.spares()); // it is to be told
    obey(order::spare);
    CHECK(actor.spares());
    CHECK(actor.spare(hear)->rows == 10);
    obey(order::start);
    CHECK(!actor.spares());
    obey(order::abort);
    CHECK(!actor.spares());
    obey(order::spare);
    obey(order::install, 1);
    CHECK(!actor.spares());
    obey(order::spare);
    CHECK(actor.spare(hear)->rows == 10);
    CHECK(actor.spare(hear)->rows == 20);
    CHECK(said.empty());
    CHECK(!actor.spare(hear));
    CHECK(said == "spared ");
    CHECK(!actor.spares());
    obey(order::spare);
    obey(order::begin);
    CHECK(!actor.spares());
    obey(order::install);
    obey(order::spare);
    stage->start({}, nullptr); // behind the worker's back: it throws
    said.clear();
    CHECK(!actor.spare(hear));
    CHECK(said == "error spared ");
}

TEST_CASE("in virtual time idle workers do spare work, at its cost, and begin to roll out when that quantum is over") {
    std::vector<std::shared_ptr<writer>> workers;
    watch seen;
    driver<watch> d(serially, model_of(&workers), &seen);
    staff(d);
    CHECK(d.run());
    CHECK(d.first_exception() == nullptr);
    CHECK(!seen.twice);
    REQUIRE(workers.size() == 2);
    for (std::int32_t w = 0; w < 2; ++w) {
        CHECK(workers[std::size_t(w)]->spares == 8); // two in each of four steps
        double spare = 0;
        for (const auto& [from, to] : seen.spare[w]) {
            spare += to - from;
            for (const auto& [begin, end] : seen.work[w]) CHECK((to <= begin || end <= from));
        }
        CHECK(spare == 4 * (10 + 20) / 8.0);
    }
    std::vector<std::shared_ptr<writer>> plain; // who offers none is as fast, or faster
    driver<watch> p(serially, model_of(&plain, 0));
    staff(p);
    CHECK(p.run());
    CHECK(p.now() <= d.now());
    CHECK(plain[0]->quanta == workers[0]->quanta);
}

TEST_CASE("spare work that never ends keeps nobody, and a run that is stuck says so") {
    driver<watch> d(serially, model_of(nullptr, 1 << 30));
    staff(d);
    CHECK(d.run());
    driver<watch> stuck(serially, model_of(nullptr, 1 << 30));
    stuck.bring_up(stage::rollout, 2, 2);
    stuck.bring_up(stage::learner, 1); // and no teacher
    CHECK(!stuck.run());
    CHECK(stuck.next() == forever);
    CHECK(!stuck.run_until(1e6));
    stuck.bring_up(stage::teacher, 1);
    CHECK(stuck.run());
}

TEST_CASE("a driver that is restored in the middle of spare work goes on as it would have") {
    driver<watch> d(serially, model_of());
    staff(d);
    std::vector<std::string> states;
    std::vector<int> sparing;
    watch known;
    d.observe(&known);
    while (!d.finished()) {
        states.push_back(d.snapshot());
        int n = 0;
        for (const auto& [w, what] : known.now) n += what == activity::spare;
        sparing.push_back(n);
        d.run_until(d.next());
    }
    int in_the_middle = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
        driver<watch> r = driver<watch>::restore(serially, model_of(), states[i]);
        CHECK(r.snapshot() == states[i]);
        watch late;
        r.observe(&late);
        r.introduce();
        int n = 0;
        for (const auto& [w, what] : late.now) n += what == activity::spare;
        CHECK(n == sparing[i]);
        in_the_middle += n > 0;
        CHECK(r.run());
        CHECK(r.snapshot() == d.snapshot());
    }
    CHECK(in_the_middle > 4);
}

TEST_CASE("what dies while it does spare work, or comes back, does no harm") {
    watch seen;
    driver<watch> d({.batch = 2, .schedule = opd::sched::sync{}, .sequences = 24, .teacher_batch = 2},
                    model_of(nullptr, 3), &seen);
    staff(d, 3);
    for (int i = 1; i < 40; ++i) {
        d.at(2.125 * i, event::down(stage::rollout, i % 3));
        d.at(2.125 * i + 0.75, event::up(stage::rollout, i % 3, 2));
    }
    CHECK(d.run());
    CHECK(!seen.twice);
    CHECK(d.scheduler().totals().consumed == 24);
}

TEST_CASE("no figure takes spare work for rollout") {
    run_metrics plain(recorded()), with(recorded());
    recorder to_plain(plain), to_with(with);
    driver<recorder> p(serially, model_of(nullptr, 0), &to_plain), d(serially, model_of(nullptr, 1), &to_with);
    staff(p), staff(d);
    CHECK(p.run());
    CHECK(d.run());
    CHECK(p.now() == d.now()); // a quantum of 1.25 seconds is over before the learner is
    CHECK(plain.spare_seconds() == 0);
    CHECK(with.spare_seconds() == 2 * 4 * 1.25);
    CHECK(with.stages.overlap() == plain.stages.overlap());
    CHECK(with.stages.stage_time(stage::rollout) == plain.stages.stage_time(stage::rollout));
}

namespace {
// On threads: counts its spare quanta, which all workers do; one of them waits until it is wanted.
struct shared_state {
    std::mutex mutex;
    std::condition_variable changed;
    int spares = 0, cut_short = 0;
    bool wrong = false;
};
struct threaded : writer {
    shared_state& all;
    bool waits;
    threaded(shared_state& s, bool w) : all(s), waits(w) {}
    std::optional<trained> spare(std::stop_token stop) {
        {
            const std::lock_guard lock(all.mutex);
            ++all.spares;
            all.wrong |= running() > 0;
        }
        all.changed.notify_all();
        if (!waits) return done++ < 3 ? std::optional(trained{1}) : std::nullopt;
        std::atomic<bool> wanted = false;
        const std::stop_callback heard(stop, [&] {
            wanted = true;
            wanted.notify_all();
        });
        wanted.wait(false); // for good, were it not told
        const std::lock_guard lock(all.mutex);
        if (++all.cut_short % 2 == 1) throw std::runtime_error("interrupted"); // which is no failure of the run
        return trained{1};
    }
};
} // namespace

TEST_CASE("on threads idle workers do spare work while the learner is at work, and stop when they are wanted") {
    for (const bool waits : {false, true}) {
        shared_state all;
        thread_driver<threaded, judge, pupil> d(
            {.batch = 4, .schedule = opd::sched::sync{}, .sequences = 40, .teacher_batch = 4});
        for (int i = 0; i < 2; ++i) d.add_rollout(std::make_shared<threaded>(all, waits), 2);
        d.add_teacher(std::make_shared<judge>());
        const auto lesson = std::make_shared<pupil>();
        lesson->before = [&] { // not before both have begun to: in the time of this call nothing else is to run
            std::unique_lock lock(all.mutex);
            const int before = std::exchange(all.spares, 0);
            REQUIRE(before >= 0);
            const bool seen = before >= 2 || all.changed.wait_for(lock, std::chrono::seconds(20),
                                                                  [&] { return all.spares + before >= 2; });
            if (!seen) all.wrong = true;
        };
        d.set_learner(lesson);
        run_metrics figures(recorded());
        recorder to(figures);
        d.observe(to);
        const run_report report = d.run();
        CHECK(report.completed);
        CHECK(report.totals.consumed == 40);
        CHECK(report.exceptions == 0);
        CHECK(report.observer_exceptions == 0);
        CHECK(!all.wrong);
        CHECK(figures.spare_seconds() > 0);
        if (waits) CHECK(all.cut_short >= 20);
    }
}
