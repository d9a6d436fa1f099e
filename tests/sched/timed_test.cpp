// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Snapshots of real stages in virtual time: a driver that is restored at any event, with stages that were made anew,
// goes on as the one it was taken from would have; and what late observers and failed calls are told.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "opd/sched/rollout_cost.hpp"
#include "opd/sched/timed_stages.hpp"
#include "toy_stages.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

// The student's weights: their version's number of updates and a sum of all that was learnt from.
struct student {
    version_t version = 0;
    std::uint64_t sum = 0;
};

struct response {
    sample_t sample = 0;
    std::vector<std::uint64_t> tokens;
    std::vector<version_t> versions;
    template <class A>
    void fields(A& a) {
        a(sample, tokens, versions);
    }
};
struct verdict {
    std::uint64_t value = 0;
    template <class A>
    void fields(A& a) {
        a(value);
    }
};

class generator {
public:
    using rolled_type = response;
    explicit generator(const student& w) : source_(w) {}
    void start(const ticket& t, std::shared_ptr<const response>) { lanes_.push_back({t, {t.sample, {}, {}}}); }
    void abort(const ticket& t) {
        std::erase_if(lanes_, [&](const lane& l) { return l.who == t; });
    }
    void install(const weights& w) {
        if (w.version != source_.version) throw std::logic_error("other weights are published");
        mine_ = source_.sum;
        version_ = w.version;
    }
    index_t running() const { return static_cast<index_t>(lanes_.size()); }
    void step(std::vector<finished_rollout<response>>& out, std::stop_token) {
        for (lane& l : lanes_) {
            l.so_far.tokens.push_back(mine_ * 31 + l.so_far.sample * 7 + l.so_far.tokens.size());
            l.so_far.versions.push_back(version_);
        }
        std::erase_if(lanes_, [&](lane& l) {
            if (l.so_far.tokens.size() < 1 + l.who.sample * 5 % 11) return false;
            token_versions v;
            v.oldest = l.so_far.versions.front();
            v.newest = l.so_far.versions.back();
            for (const version_t x : l.so_far.versions) v.mean += static_cast<double>(x);
            v.tokens = static_cast<std::int64_t>(l.so_far.tokens.size());
            v.mean /= static_cast<double>(v.tokens);
            out.push_back({l.who, v, std::make_shared<const response>(std::move(l.so_far))});
            return true;
        });
    }
    template <class A>
    void fields(A& a) {
        a(mine_, version_, cost_, rows_);
        detail::list_fields(a, lanes_, [&](lane& l) { a(l.who, l.so_far); });
    }
    void took(double seconds) { cost_.add(rows_, 0, seconds); }
    double elasticity() { return cost_.elasticity(); }

private:
    struct lane {
        ticket who;
        response so_far;
    };
    const student& source_;
    std::uint64_t mine_ = 0;
    version_t version_ = -1;
    std::vector<lane> lanes_;
    rollout_cost cost_;
    double rows_ = 0; // of the last quantum
};

struct judge {
    using scored_type = verdict;
    bool refuses = false;
    int refusals = 0;
    std::vector<std::shared_ptr<const verdict>> score(std::span<const std::shared_ptr<const response>> all,
                                                      std::stop_token) {
        if (refuses) throw std::runtime_error("the judge refuses " + std::to_string(++refusals));
        std::vector<std::shared_ptr<const verdict>> r;
        for (const auto& s : all) r.push_back(std::make_shared<const verdict>(verdict{s->tokens.back() ^ 5}));
        return r;
    }
};

struct pupil {
    student& mine;
    index_t train(std::span<const sequence_view<response, verdict>> batch, const train_call& call, std::stop_token) {
        for (const auto& s : batch) {
            mine.sum = mine.sum * 1000003 + s.scored->value + static_cast<std::uint64_t>(s.start);
            for (const std::uint64_t t : s.rolled->tokens) mine.sum = mine.sum * 31 + t;
        }
        mine.version = call.makes().version;
        return 1;
    }
};

// Balances what it is told of workers that come, go, begin and end.
struct presence {
    int there = 0, busy = 0;
    void up(stage, std::int32_t, double) { ++there; }
    void down(stage, std::int32_t, double) { --there; }
    void begin(stage, std::int32_t, double, activity) { ++busy; }
    void end(stage, std::int32_t, double, activity) { --busy; }
};

using model = timed_stages<generator, judge, pupil>;
using driver = virtual_driver<model, presence>;

model model_of(student& w, bool refuses = false) {
    stage_costs<response> costs;
    costs.step = [](std::int32_t worker, index_t n) { return 0.3 + 0.17 * worker + 0.11 * static_cast<double>(n); };
    costs.score = [](auto b) { return 0.5 + 0.25 * static_cast<double>(b.size()); };
    costs.train = [](auto) { return 2.0; };
    costs.install = [](std::int32_t, version_t) { return 0.125; };
    auto teacher = std::make_shared<judge>();
    teacher->refuses = refuses;
    return model([&w](std::int32_t) { return std::make_shared<generator>(w); }, {teacher, teacher},
                 std::make_shared<pupil>(pupil{w}), costs);
}

void bring_up(driver& d) {
    d.bring_up(stage::rollout, 3, 4);
    d.bring_up(stage::teacher, 2);
    d.bring_up(stage::learner, 1);
}

TEST_CASE("a driver with real stages that is restored at any event goes on as it would have") {
    for (const weight_update update : {weight_update::keep, weight_update::abort, weight_update::finish_first}) {
        settings how;
        how.batch = 4;
        how.sequences = 60;
        how.teacher_batch = 3;
        how.teacher_flush = 0.7;
        how.schedule = async{.tau = 2, .update = update};
        student w;
        presence from_the_start;
        driver d(how, model_of(w), &from_the_start);
        bring_up(d);
        struct moment {
            std::string bytes;
            student published;
            presence known;
        };
        std::vector<moment> states; // after each event
        while (!d.finished()) {
            states.push_back({d.snapshot(), w, from_the_start});
            REQUIRE(d.step());
        }
        const std::string last = d.snapshot();
        CHECK(w.version == 15);
        REQUIRE(states.size() > 150);
        for (std::size_t i = 0; i < states.size(); i += 3) {
            INFO("after event " << i);
            student again = states[i].published;
            driver r = driver::restore(how, model_of(again), states[i].bytes);
            CHECK(r.snapshot() == states[i].bytes);
            presence late;
            r.observe(&late);
            r.introduce();
            CHECK(late.there == states[i].known.there);
            CHECK(late.busy == states[i].known.busy);
            CHECK(r.run());
            CHECK(r.snapshot() == last);
            CHECK(again.sum == w.sum);
            CHECK(late.busy == from_the_start.busy);
        }
        for (std::size_t n = 0; n < states[100].bytes.size(); n += 1 + n / 40) {
            student none = states[100].published;
            CHECK_THROWS_AS(driver::restore(how, model_of(none), states[100].bytes.substr(0, n)), opd::invalid_input);
        }
    }
}

TEST_CASE("what a stage says of its pace reaches automatic M in virtual time") {
    const auto permits_with = [](double told) {
        struct opinionated : generator {
            double told;
            opinionated(const student& w, double t) : generator(w), told(t) {}
            double elasticity() { return told; }
        };
        student w;
        stage_costs<response> costs;
        costs.step = [](std::int32_t, index_t n) { return 1.0 + static_cast<double>(n); };
        costs.score = [](auto) { return 0.01; };
        costs.train = [](auto) { return 0.01; };
        costs.install = [](std::int32_t, version_t) { return 0.01; };
        settings how;
        how.batch = 8, how.sequences = 8 * 30;
        how.schedule = async{.tau = 4};
        using stages = timed_stages<opinionated, judge, pupil>;
        virtual_driver<stages> d(how, stages([&](std::int32_t) { return std::make_shared<opinionated>(w, told); },
                                             {std::make_shared<judge>()}, std::make_shared<pupil>(pupil{w}), costs));
        d.bring_up(stage::rollout, 2, 16);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
        index_t most = 0;
        while (d.step()) most = std::max(most, d.scheduler().resolved().permits);
        return most;
    };
    CHECK(permits_with(-1) == 16); // where it begins
    CHECK(permits_with(untold) > 24);
    CHECK(permits_with(1) > 24);
}

TEST_CASE("what comes during a quantum takes effect at its end, in a worker that was restored too") {
    student published;
    const auto make = [&] {
        return timed_rollout<generator, verdict>(std::make_shared<generator>(published), 0,
                                                 [](index_t) { return 2.0; });
    };
    auto worker = make();
    worker.install({0, 0});
    CHECK(worker.until_settled() == 0);
    worker.start({.sample = 1, .worker = 0}); // six tokens
    std::vector<std::pair<sample_t, token_versions>> done;
    const auto finished = [&](const ticket& t, const token_versions& v, auto&&) { done.emplace_back(t.sample, v); };
    worker.advance(0.5, finished);
    CHECK(worker.until_settled() == 1.5);
    published.version = 1;
    worker.install({1, 7});
    worker.start({.sample = 0, .worker = 0}); // one token
    archive_writer to;
    to(worker);
    auto again = make();
    archive_reader{to.bytes}(again);
    for (auto* w : {&worker, &again}) {
        done.clear();
        w->advance(1.5, finished);
        CHECK(done.empty());
        CHECK(w->until_settled() == 0);
        w->advance(2, finished);
        REQUIRE(done.size() == 1);
        CHECK(done[0] == std::pair<sample_t, token_versions>(0, {1, 1, 1, 1}));
        for (int i = 0; i < 4; ++i) w->advance(2, finished);
        REQUIRE(done.size() == 2);
        CHECK(done[1] == std::pair<sample_t, token_versions>(1, {0, 1, 5.0 / 6, 6}));
    }
}

// When weights are installed, and responses are finished.
struct installs {
    std::vector<double> synced, rolled;
    void event(double now, const opd::sched::event& e, const actions&, const scheduler&) {
        if (e.what == opd::sched::event::kind::synced) synced.push_back(now);
        if (e.what == opd::sched::event::kind::rolled_out) rolled.push_back(now);
    }
};

TEST_CASE("a transfer of weights begins when a quantum is over, and nothing is drawn until its end") {
    student w;
    stage_costs<response> costs;
    costs.score = [](auto) { return 0.25; };
    costs.install = [](std::int32_t, version_t) { return 0.5; };
    installs seen;
    virtual_driver<model, installs> d({.batch = 1, .schedule = async{.tau = 1}, .sequences = 2, .teacher_batch = 1},
                                      model([&w](std::int32_t) { return std::make_shared<generator>(w); },
                                            {std::make_shared<judge>()}, std::make_shared<pupil>(pupil{w}), costs),
                                      &seen);
    d.bring_up(stage::rollout, 1, 2);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
    d.run_until(7); // a quantum takes a second, and so does a train step: learned at 2.75
    CHECK(seen.synced == std::vector<double>{0.5, 4});
    CHECK(seen.rolled == std::vector<double>{1.5, 7}); // one token, and six
}

TEST_CASE("a worker whose first transfer outlasts several versions passes over what is gone, and joins") {
    struct of_second {
        int rolled = 0;
        void event(double, const opd::sched::event& e, const actions&, const scheduler&) {
            if (e.what == opd::sched::event::kind::rolled_out) rolled += e.ticket.worker == 1;
        }
    };
    student w;
    stage_costs<response> costs;
    costs.score = [](auto) { return 0.25; };
    costs.install = [](std::int32_t worker, version_t v) { return worker == 1 && v == 0 ? 30 : 0.25; };
    of_second seen;
    virtual_driver<model, of_second> d({.batch = 1, .schedule = async{.tau = 1}, .sequences = 60, .teacher_batch = 1},
                                       model([&w](std::int32_t) { return std::make_shared<generator>(w); },
                                             {std::make_shared<judge>()}, std::make_shared<pupil>(pupil{w}), costs),
                                       &seen);
    d.bring_up(stage::rollout, 2, 1);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
    CHECK(d.run());
    CHECK(d.first_exception() == nullptr); // the generator throws at weights that are not the published ones
    CHECK(seen.rolled > 5);
}

// Drafts, and learns from its speed how many tokens: what it drafts next follows from how long the last quantum took.
struct speculator : generator {
    using generator::generator;
    struct work {
        index_t rows = 0, drafted = 0;
    };
    work step(std::vector<finished_rollout<response>>& out, std::stop_token stop) {
        const work w{running(), drafts};
        quanta.push_back(w);
        generator::step(out, stop);
        return w;
    }
    void took(double seconds) {
        times.push_back(seconds);
        drafts = seconds < 1.5 ? drafts + 1 : 1;
    }
    template <class A>
    void fields(A& a) {
        a(drafts, times);
        generator::fields(a);
    }
    index_t drafts = 1;
    std::vector<work> quanta;
    std::vector<double> times;
};

TEST_CASE(
    "a quantum costs what it did, its stage hears of that, and a run that learns from it is a function of its costs") {
    using spec_model = timed_stages<speculator, judge, pupil>;
    using spec_driver = virtual_driver<spec_model>;
    struct run {
        student w;
        std::vector<std::shared_ptr<speculator>> workers;
        spec_model model_of() {
            spec_model::costs_type costs;
            costs.step = [](std::int32_t, const speculator::work& x) {
                return 0.25 + 0.125 * static_cast<double>(x.rows) + 0.25 * static_cast<double>(x.drafted);
            };
            costs.install = [](std::int32_t, version_t) { return 0.125; };
            return spec_model(
                [this](std::int32_t) {
                    workers.push_back(std::make_shared<speculator>(w));
                    return workers.back();
                },
                {std::make_shared<judge>()}, std::make_shared<pupil>(pupil{w}), costs);
        }
    };
    const settings how{.batch = 2, .schedule = async{.tau = 2}, .sequences = 24, .teacher_batch = 2};
    const auto staff = [](spec_driver& d) {
        d.bring_up(stage::rollout, 2, 3);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
    };
    run first;
    spec_driver d(how, first.model_of());
    staff(d);
    std::string middle;
    student then;
    while (!d.finished()) {
        REQUIRE(d.step());
        if (d.events() == 60) middle = d.snapshot(), then = first.w;
    }
    REQUIRE(!middle.empty());
    for (const auto& s : first.workers) {
        REQUIRE(s->times.size() + 1 >= s->quanta.size()); // the last may not be over
        REQUIRE(s->times.size() > 10);
        index_t most = 0;
        for (std::size_t i = 0; i < s->times.size(); ++i) {
            CHECK(s->times[i] == 0.25 + 0.125 * double(s->quanta[i].rows) + 0.25 * double(s->quanta[i].drafted));
            if (i > 0) CHECK(s->quanta[i].drafted == (s->times[i - 1] < 1.5 ? s->quanta[i - 1].drafted + 1 : 1));
            most = std::max(most, s->quanta[i].drafted);
        }
        CHECK(most >= 4);
    }
    run second; // restored in the middle, where quanta are under way
    second.w = then;
    spec_driver e = spec_driver::restore(how, second.model_of(), middle);
    CHECK(e.run());
    CHECK(e.snapshot() == d.snapshot());
    CHECK(second.w.sum == first.w.sum);
}

TEST_CASE("a quantum begins when all of its moment is there, and is told of when it is over") {
    student published;
    const auto stage = std::make_shared<speculator>(published);
    timed_rollout<speculator, verdict> worker(stage, 0, [](const speculator::work& w) { return double(w.rows); });
    std::vector<sample_t> done;
    const auto finished = [&](const ticket& t, const token_versions&, auto&&) { done.push_back(t.sample); };
    CHECK(worker.next() == forever);
    worker.install({0, 0});
    worker.start({.sample = 0, .worker = 0}); // one token
    worker.start({.sample = 9, .worker = 0}); // two
    CHECK(worker.next() == 0);                // its length is known when it has begun
    CHECK(stage->quanta.empty());
    worker.start({.sample = 11, .worker = 0}); // one
    worker.advance(0, finished);
    REQUIRE(stage->quanta.size() == 1);
    CHECK(stage->quanta[0].rows == 3);
    CHECK(worker.next() == 3);
    CHECK(worker.until_settled() == 3); // also at its very beginning
    CHECK(worker.running() == 3);
    CHECK(worker.abort({.sample = 11, .worker = 0})); // finished, but nobody knows
    worker.start({.sample = 22, .worker = 0});
    worker.advance(2.5, finished);
    CHECK(done.empty());
    CHECK(stage->times.empty());
    worker.advance(0.5, finished);
    CHECK(done == std::vector<sample_t>{0});
    CHECK(stage->times == std::vector<double>{3});
    CHECK(worker.next() == 0);
    worker.advance(0, finished);
    CHECK(worker.next() == 2); // 9 and 22
}

TEST_CASE("run_until stops in time, also where quanta end without an event") {
    student w;
    presence known;
    driver d({.batch = 1, .sequences = 40, .teacher_batch = 1}, model_of(w), &known);
    bring_up(d);
    for (double t = 0.25; t < 20; t += 0.25) {
        d.run_until(t);
        REQUIRE(d.now() <= t);
        CHECK(d.next() > t);
    }
}

TEST_CASE("stages that list no fields have no snapshots") {
    using toys = timed_stages<toy::rollout, toy::teacher, toy::learner>;
    const auto shared = std::make_shared<toy::world>();
    settings how;
    how.batch = 4;
    how.sequences = 8;
    virtual_driver<toys> d(how,
                           toys([&](std::int32_t n) { return std::make_shared<toy::rollout>(shared, n, 4); },
                                {std::make_shared<toy::teacher>(shared, 0)}, std::make_shared<toy::learner>(shared)));
    CHECK_THROWS_AS(d.snapshot(), std::logic_error);
    d.bring_up(stage::rollout, 1, 4);
    d.step();
    CHECK_THROWS_AS(d.snapshot(), std::logic_error);
}

TEST_CASE("the first that a stage throws is kept") {
    settings how;
    how.batch = 4;
    how.sequences = 8;
    student w;
    driver fine(how, model_of(w));
    bring_up(fine);
    CHECK(fine.run());
    CHECK(fine.first_exception() == nullptr);
    student v;
    driver d(how, model_of(v, true));
    bring_up(d);
    d.run(200); // every sequence is given up, and there are always more
    REQUIRE(d.first_exception() != nullptr);
    CHECK_THROWS_WITH_AS(std::rethrow_exception(d.first_exception()), "the judge refuses 1", std::runtime_error);
}

} // namespace
