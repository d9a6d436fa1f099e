// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stages that take turns on the same GPUs: the step is the sum of the stages, each on all of them; none overlaps
// another; the same sequences are consumed as elsewhere; and what async is compared with is the fastest such row.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "cluster_sim/gain.hpp"
#include "cluster_sim/simulate.hpp"

namespace {

using namespace cluster_sim;
namespace sched = opd::sched;

constexpr int gpus = 8;

// Equal sequences without prompts, which divide evenly: every stage's time can be written down.
config even() {
    config c;
    c.batch = 32, c.steps = 20, c.warmup = 2;
    c.lengths.response = {sched::constant{100}}, c.lengths.prompt = {sched::constant{0}};
    c.rollout.lanes = 4; // a batch on eight workers: from the first step on
    c.rollout.speed = {.step = 0.01, .step_per_sequence = 0.002, .prefill = 0, .rebuild = 0, .factor = 1};
    c.teacher.batch = 2;
    c.teacher.job = {.fixed = 0.25, .per_item = 0.5, .per_token = 1e-3};
    c.learner.job = {.fixed = 0.75, .per_item = 0.25, .per_token = 2e-3};
    c.learner.turn = 0.125;
    c.sync = {.fixed = 0.5};
    c.schedules = {{"all", sched::sync{}, gpus, gpus, sharing::all}};
    return c;
}

config uneven() {
    config c = preset("node");
    c.steps = 20;
    c.sensitivity = {};
    c.schedules = {{"all", sched::sync{}, gpus, gpus, sharing::all}};
    return c;
}

std::string refusal_of(const config& c) {
    try {
        validate(c);
    } catch (const failure& e) {
        CHECK(e.code == exit_usage);
        return e.what();
    }
    return "";
}

std::string refusal_of(const std::string& text) {
    try {
        const config c = config_of_text(text, "c.json");
        return refusal_of(c);
    } catch (const failure& e) {
        CHECK(e.code == exit_usage);
        return e.what();
    }
}

using intervals = std::vector<std::pair<double, double>>;
intervals spans_of(const sched::trace& t, sched::stage s) {
    intervals r;
    t.each_span([&](const sched::trace_event& e) {
        if (e.where.process == sched::process_of(s)) r.push_back({e.begin, e.begin + e.duration});
    });
    return r;
}

bool overlap(const intervals& a, const intervals& b) {
    constexpr double rounding = 1e-6;
    for (const auto& x : a)
        for (const auto& y : b)
            if (x.first < y.second - rounding && y.first < x.second - rounding) return true;
    return false;
}

} // namespace

TEST_CASE("all stages share: a step is the sum of the stages, each on all GPUs") {
    const config c = even();
    validate(c);
    const double batch = 32, length = 100;
    const double rollout = length * (0.01 + 0.002 * batch / gpus);
    const double teacher = batch / (2 * gpus) * (0.25 + 2 * (0.5 + 1e-3 * length)); // two calls of two a GPU
    const double learner = 0.125 + 0.75 + batch * (0.25 + 2e-3 * length) / gpus;
    const double step = rollout + teacher + learner + 0.5;
    const outcome all = simulate(c, c.schedules[0]);
    CHECK(all.stuck == "");
    CHECK(all.gpus == gpus);
    CHECK(all.throughput == doctest::Approx(batch * length / step).epsilon(1e-4));
    CHECK(all.overlap == doctest::Approx(1 - 0.5 / step).epsilon(1e-4)); // busy but for the transfer of weights
    CHECK(all.busy[1] == doctest::Approx(teacher / step).epsilon(1e-4));

    // the teacher alone on a GPU of its own: eight times its calls, and the others on seven
    const entry own{"own", sched::sync{}, 4, 4, sharing::rollout_and_learner};
    const double apart =
        length * (0.01 + 0.002 * batch / 4) + gpus * teacher + 0.125 + 0.75 + batch * (0.25 + 2e-3 * length) / 4 + 0.5;
    config wide = c;
    wide.rollout.lanes = 8;
    CHECK(simulate(wide, own).throughput == doctest::Approx(batch * length / apart).epsilon(1e-4));
    CHECK(gpus_of(c, own) == 5);

    // workers of two GPUs: half as many calls at once
    config two = c;
    two.teacher.gpus = 2;
    CHECK(teacher_workers_of(two, two.schedules[0]) == 4);
    CHECK(simulate(two, two.schedules[0]).throughput ==
          doctest::Approx(batch * length / (step + teacher)).epsilon(1e-4));
}

TEST_CASE("all stages share: none overlaps another, and every sequence is consumed once") {
    for (const sched::schedule& schedule :
         {sched::schedule{sched::sync{}}, sched::schedule{sched::step_off{0}}, sched::schedule{sched::controlled{2}}}) {
        CAPTURE(schedule.index());
        config c = uneven();
        c.schedules[0].schedule = schedule;
        validate(c);
        sched::trace recorded({.first = 100000, .last = 100000});
        const outcome o = simulate(c, c.schedules[0], &recorded);
        const intervals rollout = spans_of(recorded, sched::stage::rollout);
        const intervals teacher = spans_of(recorded, sched::stage::teacher);
        const intervals learner = spans_of(recorded, sched::stage::learner);
        const auto steps = static_cast<std::size_t>(c.steps), batch = static_cast<std::size_t>(c.batch);
        CHECK(rollout.size() >= steps * batch);
        CHECK(teacher.size() >= steps * batch / static_cast<std::size_t>(c.teacher.batch));
        CHECK(learner.size() == steps);
        CHECK_FALSE(overlap(teacher, rollout));
        CHECK_FALSE(overlap(teacher, learner));
        CHECK_FALSE(overlap(rollout, learner));
        CHECK(o.overlap < 1);
        CHECK(o.sequences == c.steps * c.batch);
        CHECK(o.wasted == 0);
        if (schedule.index() < 2) { // controlled has begun the next
            const outcome apart = simulate(c, {"apart", schedule, 7, 7, sharing::rollout_and_learner});
            CHECK(o.generated == apart.generated); // the same sequences
            CHECK(o.throughput > apart.throughput);
            CHECK(o.lags[0].max == 0);
        }
    }
    // the control: async does overlap
    sched::trace recorded({.first = 100000, .last = 100000});
    simulate(uneven(), {"async", sched::async{}}, &recorded);
    CHECK(overlap(spans_of(recorded, sched::stage::teacher), spans_of(recorded, sched::stage::rollout)));
    CHECK(overlap(spans_of(recorded, sched::stage::rollout), spans_of(recorded, sched::stage::learner)));
}

TEST_CASE("sharing is read, printed and refused") {
    const config node = preset("node");
    CHECK(node.schedules[0].sharing == sharing::rollout_and_learner);
    CHECK(node.schedules[1].sharing == sharing::all);
    const config again = config_of_text(to_json(node).dump(), "again.json");
    CHECK(to_json(again) == to_json(node));
    CHECK(again.schedules[1].sharing == sharing::all);
    CHECK(to_json(node)["schedules"][1]["sharing"] == "all");

    const auto one = [](const std::string& what) {
        return refusal_of(R"({"schedules": [{"name": "a", "kind": )" + what + "}]}");
    };
    CHECK(one(R"("sync")") == "");
    CHECK(one(R"("controlled", "k": 3, "sharing": "all")") == "");
    for (const char* kind : {R"("async")", R"("step_off", "k": 1)"})
        for (const char* what : {"all", "rollout_and_learner"})
            CHECK(one(std::string(kind) + R"(, "sharing": ")" + what + '"') ==
                  "schedules, 'a': sharing '" + std::string(what) + "' needs a schedule whose stages take turns");
    CHECK(one(R"("sync", "sharing": "al")") ==
          "c.json.schedules[0].sharing: 'al' is not one of none, rollout_and_learner, all; did you mean 'all'?");
    CHECK(one(R"("sync", "time_shared": true)").find("unknown key 'time_shared'") != std::string::npos);
    CHECK(refusal_of(R"({"teacher": {"gpus": 16}, "schedules": [{"name": "a", "kind": "sync", "rollout_workers": 8,
                         "learner_gpus": 8, "sharing": "all"}]})") ==
          "schedules, 'a': a teacher worker takes 16 GPUs (teacher.gpus), and the stages share 8");
}

TEST_CASE("speed-ups are over the fastest synchronous row too") {
    config c = preset("node");
    c.steps = 12;
    std::vector<outcome> all;
    for (const entry& e : c.schedules)
        if (e.name == "sync" || e.name == "sync, all GPUs" || e.name == "async") all.push_back(simulate(c, e));
    CHECK(best_sync(all) == all[1].throughput);
    const auto j = report(c, all, {});
    CHECK(j["schedules"][1]["speedup_over_best_sync"] == 1.0);
    CHECK(j["schedules"][2]["speedup_over_best_sync"].get<double>() ==
          doctest::Approx(all[2].throughput / all[1].throughput));
    CHECK(j["schedules"][2]["speedup"].get<double>() > j["schedules"][2]["speedup_over_best_sync"].get<double>());
    all = {all[2]};
    CHECK(best_sync(all) == 0);
    CHECK_FALSE(report(c, all, {})["schedules"][0].contains("speedup_over_best_sync"));
}

TEST_CASE("what async gains: nothing without a fixed part, and the more of it the more") {
    config c = preset("node");
    c.steps = 24;
    c.sensitivity.tails = {{0.9, 8192}};
    const auto rows = gain_of_async(c, [](double) {});
    REQUIRE(rows.size() == 4);
    const gain_row& row = rows[1]; // loads as configured
    REQUIRE(row.cells.size() == 6);
    CHECK(row.cells[0].step == 0);
    CHECK(row.cells[4].step == c.rollout.speed.step);
    CHECK(row.cells[0].gain < 1.1);
    CHECK(row.cells[4].gain > 2);
    CHECK(row.cells[5].gain > row.cells[4].gain);
    for (const gain_row& r : rows)
        for (const gain_cell& cell : r.cells) {
            CHECK(cell.rollout + cell.learner + cell.teacher == gpus);
            CHECK(cell.whole <= 1);
            CHECK(cell.whole > 0.5);
            CHECK(cell.over_work_conserving() < cell.gain);
        }
    // no split is better than the one it names
    const entry e{"async", sched::async{}, row.cells[4].rollout, row.cells[4].learner};
    config named = c;
    named.lengths.response = tail_of(c.lengths.response, c.sensitivity.tails[0]);
    const double best = simulate(named, e).throughput,
                 other = simulate(named, {"async", sched::async{}, 3, 4}).throughput;
    CHECK(row.cells[4].teacher == 1);
    CHECK(best > other);
    const double sync = simulate(named, {"all", sched::sync{}, gpus, gpus, sharing::all}).throughput;
    CHECK(row.cells[4].gain == doctest::Approx(best / sync));
    CHECK(table(c, rows) == table(c, gain_of_async(c, [](double) {}))); // on however many threads

    const auto refused = [](config changed) {
        try {
            gain_of_async(changed, [](double) {});
        } catch (const failure& f) {
            return std::string(f.what());
        }
        return std::string();
    };
    config changed = c;
    changed.rollout.speed.step_per_sequence = 0;
    CHECK(refused(changed).find("step_per_sequence must be positive") != std::string::npos);
    changed = c;
    std::erase_if(changed.schedules, [](const entry& x) { return is_synchronous(x); });
    CHECK(refused(changed) == "--gain: the configuration has no synchronous schedule");
    CHECK(refused(preset("day")).find("every split of the GPUs is tried, of at most 16") != std::string::npos);
}
