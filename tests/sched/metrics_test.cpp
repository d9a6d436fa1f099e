// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Every meter against a naive one that keeps all it was told; the overlap of schedules whose overlap is known; what a
// run describes, in the JSON that the examples make of it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <rapidcheck.h>
#include <string>
#include <utility>
#include <vector>

#include "describe_json.hpp"
#include "opd/sched/metrics.hpp"
#include "support/property.hpp"

using namespace opd::sched;
using nlohmann::json;
using opd::test::property;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

bool near(double a, double b, double relative = 1e-12) {
    return std::abs(a - b) <= relative * (1 + std::max(std::abs(a), std::abs(b)));
}

struct interval {
    int stage, worker;
    double begin, end;
};
struct edge { // what a driver would say, in order of time
    double time;
    bool begins;
    int stage, worker;
};

double union_length(std::vector<std::pair<double, double>> list) {
    std::sort(list.begin(), list.end());
    double total = 0, upto = -infinity;
    for (const auto& [b, e] : list) {
        total += std::max(0.0, e - std::max(b, upto));
        upto = std::max(upto, e);
    }
    return total;
}

// Times on a grid of 1/4 s, so that intervals touch and coincide; ends come before beginnings or after them as it
// happens.
rc::Gen<std::vector<interval>> some_intervals(int workers) {
    return rc::gen::container<std::vector<interval>>(rc::gen::exec([workers] {
        const double begin = *rc::gen::inRange(0, 400) / 4.0;
        return interval{*rc::gen::inRange(0, 3), *rc::gen::inRange(0, workers), begin,
                        begin + *rc::gen::inRange(0, 60) / 4.0};
    }));
}
std::vector<edge> edges_of(const std::vector<interval>& list) {
    std::multimap<double, edge> sorted; // equal times stay in order: no interval ends before it begins
    for (const interval& i : list) {
        sorted.insert({i.begin, {i.begin, true, i.stage, i.worker}});
        sorted.insert({i.end, {i.end, false, i.stage, i.worker}});
    }
    std::vector<edge> edges;
    for (const auto& entry : sorted) edges.push_back(entry.second);
    return edges;
}
stage stage_of(int s) { return static_cast<stage>(s); }

} // namespace

TEST_CASE("busy time is the length of the union") {
    property("of any intervals", [] {
        const auto list = *some_intervals(1);
        stage_meter meter(1);
        std::vector<std::pair<double, double>> plain;
        double first = infinity, last = -infinity;
        for (const interval& i : list) {
            plain.push_back({i.begin, i.end});
            first = std::min(first, i.begin);
            last = std::max(last, i.end);
        }
        for (const edge& e : edges_of(list))
            e.begins ? meter.begin(stage::rollout, 0, e.time) : meter.end(stage::rollout, 0, e.time);
        RC_ASSERT(meter.worker_time(stage::rollout, 0) == union_length(plain)); // the grid is exact in binary
        RC_ASSERT(meter.wall_time() == (list.empty() ? 0.0 : last - first));
        RC_ASSERT(meter.busy_workers(stage::rollout) == 0);
        RC_ASSERT(meter.skew() == 0.0);
    });

    stage_meter meter(1);
    const auto busy_time = [](const stage_meter& m) { return m.worker_time(stage::rollout, 0); };
    meter.begin(stage::rollout, 0, 10);
    meter.begin(stage::rollout, 0, 11);
    meter.end(stage::rollout, 0, 12);
    CHECK(meter.busy_workers(stage::rollout) == 1);
    CHECK(busy_time(meter) == 2.0); // up to the latest time
    meter.observe(15);
    CHECK(busy_time(meter) == 5.0);
    CHECK(meter.wall_time() == 5.0);
    meter.end(stage::rollout, 0, 16);
    meter.observe(100);
    CHECK(busy_time(meter) == 6.0);
    CHECK(meter.wall_time() == 6.0); // ends with the last interval
    meter.begin(stage::rollout, 0, 101);
    meter.begin(stage::rollout, 0, 101);
    meter.down(stage::rollout, 0, 103);
    CHECK(busy_time(meter) == 8.0);
    meter.up(stage::rollout, 0, 104);
    CHECK_THROWS_AS(meter.end(stage::rollout, 0, 105), opd::invalid_input);
    CHECK_THROWS_AS(meter.begin(stage::rollout, 0, not_a_number), opd::invalid_input);
    CHECK_THROWS_AS(meter.begin(stage::rollout, 0, infinity), opd::invalid_input);
    CHECK(busy_time(meter) == 8.0);

    stage_meter late(1); // a stamp older than its predecessor counts as that, and is reported
    late.begin(stage::rollout, 0, 5);
    late.end(stage::rollout, 0, 7);
    late.begin(stage::rollout, 0, 6.5);
    late.end(stage::rollout, 0, 8);
    CHECK(busy_time(late) == 3.0);
    CHECK(late.skew() == 0.5);
}

TEST_CASE("ten million short intervals late in the day lose nothing") {
    stage_meter meter(1);
    const double tick = 0x1p-20; // a microsecond, exact in binary
    for (int i = 0; i < 10'000'000; ++i) {
        meter.begin(stage::rollout, 0, 65536 + 2 * i * tick);
        meter.end(stage::rollout, 0, 65536 + (2 * i + 1) * tick);
    }
    CHECK(meter.merged_time(stage::rollout) == 10'000'000 * tick);
    CHECK(meter.worker_time(stage::rollout, 0) == 10'000'000 * tick);

    stage_meter stages(3); // thirds are not exact: the sum of so many is
    for (int i = 0; i < 1'000'000; ++i) {
        stages.begin(stage::rollout, 1, 65536 + 2 * i * tick);
        stages.end(stage::rollout, 1, 65536 + (2 * i + 1) * tick);
    }
    CHECK(near(stages.shared_time(stage::rollout), 1'000'000 * tick / 3, 1e-15));
}

TEST_CASE("overlap is the paper's for a constant number of workers") {
    property("of any intervals", [] {
        const int workers = *rc::gen::inRange(1, 5);
        const auto list = *some_intervals(workers);
        stage_meter meter(workers, workers, workers);
        std::vector<std::pair<double, double>> by_stage[3];
        std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> by_worker;
        double first = infinity, last = -infinity;
        for (const interval& i : list) {
            by_stage[i.stage].push_back({i.begin, i.end});
            by_worker[{i.stage, i.worker}].push_back({i.begin, i.end});
            first = std::min(first, i.begin);
            last = std::max(last, i.end);
        }
        for (const edge& e : edges_of(list))
            e.begins ? meter.begin(stage_of(e.stage), e.worker, e.time)
                     : meter.end(stage_of(e.stage), e.worker, e.time);

        double times[3] = {0, union_length(by_stage[1]), union_length(by_stage[2])};
        for (int s = 0; s < 3; ++s) {
            double mean = 0;
            for (int w = 0; w < workers; ++w) {
                const double one = union_length(by_worker[{s, w}]);
                mean += one / workers;
                RC_ASSERT(meter.worker_time(stage_of(s), w) == one);
            }
            RC_ASSERT(near(meter.shared_time(stage_of(s)), mean));
            RC_ASSERT(meter.merged_time(stage_of(s)) == union_length(by_stage[s]));
            if (s == 0) times[0] = mean;
        }
        if (list.empty() || last == first) {
            RC_ASSERT(!meter.overlap());
        } else {
            RC_ASSERT(near(*meter.overlap(), (times[0] + times[1] + times[2]) / (last - first)));
            RC_ASSERT(*meter.overlap() <= 3 + 1e-12);
        }
    });
}

TEST_CASE("overlap where workers come and go is the mean share of present workers that are busy") {
    property("of any comings and goings", [] {
        // A naive model in steps of one second: who is present and who is busy in each.
        const int workers = 4, steps = *rc::gen::inRange(1, 60);
        stage_meter meter(0, 0, 0);
        bool up[4] = {}, busy[4] = {};
        double shared = 0, merged = 0, first = -1, last = 0;
        double each[4] = {};
        for (int t = 0; t < steps; ++t) {
            for (int w = 0; w < workers; ++w) {
                const int what = *rc::gen::inRange(0, 6);
                if (what == 0 && !up[w]) {
                    meter.up(stage::rollout, w, t);
                    up[w] = true;
                } else if (what == 1 && up[w]) {
                    if (busy[w]) last = t;
                    meter.down(stage::rollout, w, t); // ends what is open
                    up[w] = busy[w] = false;
                } else if (what >= 2 && what < 4 && up[w] && !busy[w]) {
                    meter.begin(stage::rollout, w, t);
                    busy[w] = true;
                    if (first < 0) first = t;
                    last = t;
                } else if (what == 4 && busy[w]) {
                    meter.end(stage::rollout, w, t);
                    busy[w] = false;
                    last = t;
                }
            }
            const auto n = std::count(up, up + workers, true), b = std::count(busy, busy + workers, true);
            RC_ASSERT(meter.workers(stage::rollout) == n);
            RC_ASSERT(meter.busy_workers(stage::rollout) == b);
            if (b > 0) {
                shared += double(b) / double(n);
                merged += 1;
                last = t + 1;
            }
            for (int w = 0; w < workers; ++w)
                if (busy[w]) each[w] += 1;
        }
        meter.observe(steps);
        RC_ASSERT(near(meter.shared_time(stage::rollout), shared));
        RC_ASSERT(meter.merged_time(stage::rollout) == merged);
        for (int w = 0; w < workers; ++w) RC_ASSERT(meter.worker_time(stage::rollout, w) == each[w]);
        RC_ASSERT(meter.wall_time() == (first < 0 ? 0.0 : last - first));
    });
}

TEST_CASE("overlap of known schedules") {
    SUBCASE("serial: 1") {
        stage_meter meter(4);
        double t = 100;
        for (int step = 0; step < 10; ++step) {
            for (int w = 0; w < 4; ++w) meter.begin(stage::rollout, w, t);
            t += 3;
            for (int w = 0; w < 4; ++w) meter.end(stage::rollout, w, t);
            meter.begin(stage::teacher, 0, t);
            t += 1;
            meter.end(stage::teacher, 0, t);
            meter.begin(stage::learner, 0, t);
            t += 2;
            meter.end(stage::learner, 0, t);
        }
        CHECK(near(meter.overlap().value(), 1.0));
        CHECK(meter.stage_time(stage::rollout) == 30.0);
        CHECK(meter.stage_time(stage::teacher) == 10.0);
        CHECK(meter.stage_time(stage::learner) == 20.0);
    }
    SUBCASE("all always busy: 3, also while they still are") {
        stage_meter meter(7, 2, 3);
        CHECK(!meter.overlap());
        const int workers[] = {7, 2, 3};
        for (int s = 0; s < 3; ++s)
            for (int w = 0; w < workers[s]; ++w) meter.begin(stage_of(s), w, 5);
        CHECK(!meter.overlap());
        meter.observe(9);
        CHECK(near(meter.overlap().value(), 3.0));
        CHECK(meter.wall_time() == 4.0);
    }
    SUBCASE("one of four rollout workers waits for the slowest: its share counts, the teacher's union does not") {
        stage_meter meter(4, 4, 1);
        for (int w = 0; w < 3; ++w) meter.begin(stage::rollout, w, 0);
        for (int w = 0; w < 2; ++w) meter.begin(stage::teacher, w, 0);
        for (int w = 0; w < 3; ++w) meter.end(stage::rollout, w, 8);
        for (int w = 0; w < 2; ++w) meter.end(stage::teacher, w, 8);
        CHECK(meter.overlap().value() == 0.75 + 1.0);
        CHECK(meter.shared_time(stage::teacher) == 4.0);
    }
}

TEST_CASE("stage_meter refuses what cannot be") {
    stage_meter meter(1);
    CHECK_THROWS_AS(meter.begin(stage::rollout, 1, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.begin(stage::rollout, -1, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.end(stage::rollout, 0, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.up(stage::rollout, 0, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.up(stage::rollout, -1, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.up(stage::rollout, stage_meter::max_workers, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.down(stage::teacher, 3, 0), opd::invalid_input);
    CHECK_THROWS_AS(meter.begin(stage::rollout, 0, not_a_number), opd::invalid_input);
    CHECK_THROWS_AS(stage_meter(-1), opd::invalid_input);
    CHECK_THROWS_AS(stage_meter(stage_meter::max_workers + 1), opd::invalid_input);
    CHECK(meter.busy_workers(stage::rollout) == 0);
    CHECK(!meter.overlap());
    meter.begin(stage::rollout, 0, 1); // and works on
    meter.down(stage::rollout, 0, 3);
    CHECK_THROWS_AS(meter.end(stage::rollout, 0, 4), opd::invalid_input);
    CHECK(meter.merged_time(stage::rollout) == 2.0);
}

TEST_CASE("throughput discards the first five updates") {
    property("equals the formula", [] {
        const int warmup = *rc::gen::inRange(1, 8), updates = *rc::gen::inRange(0, 30);
        throughput_meter meter(warmup);
        std::vector<double> t{*rc::gen::inRange(0, 100) / 8.0};
        std::vector<std::int64_t> n{0}, p{0};
        meter.start(t[0]);
        for (int j = 1; j <= updates; ++j) {
            t.push_back(t.back() + *rc::gen::inRange(0, 50) / 8.0);
            n.push_back(*rc::gen::inRange(0, 10000));
            p.push_back(*rc::gen::inRange(0, 1000));
            meter.step(t.back(), n.back(), p.back());
            RC_ASSERT(meter.step_seconds() == std::optional<double>(t[std::size_t(j)] - t[std::size_t(j - 1)]));
            if (*meter.step_seconds() > 0)
                RC_ASSERT(meter.step_rate() ==
                          std::optional<double>(double(n.back() + p.back()) / *meter.step_seconds()));
            else
                RC_ASSERT(!meter.step_rate());
        }
        double tokens = 0, all = 0;
        for (int j = warmup + 1; j <= updates; ++j) {
            tokens += double(n[std::size_t(j)]);
            all += double(n[std::size_t(j)] + p[std::size_t(j)]);
        }
        if (updates <= warmup || t.back() == t[std::size_t(warmup)]) {
            RC_ASSERT(!meter.throughput());
            RC_ASSERT(!meter.total_throughput());
        } else {
            const double seconds = t.back() - t[std::size_t(warmup)];
            RC_ASSERT(meter.throughput() == std::optional<double>(tokens / seconds));
            RC_ASSERT(meter.total_throughput() == std::optional<double>(all / seconds));
            RC_ASSERT(meter.mean_step_seconds() == std::optional<double>(seconds / (updates - warmup)));
        }
    });

    throughput_meter meter;
    for (int j = 1; j <= 5; ++j) meter.step(10.0 * j, 1'000'000);
    CHECK(!meter.throughput());
    meter.step(60, 300);
    CHECK(meter.throughput() == 30.0);
    CHECK(meter.response_tokens() == 5'000'300);
    CHECK_THROWS_AS(meter.step(59, 1), opd::invalid_input);
    CHECK_THROWS_AS(meter.step(61, -1), opd::invalid_input);
    CHECK_THROWS_AS(meter.step(61, 1, -1), opd::invalid_input);
    CHECK_THROWS_AS(meter.step(not_a_number, 1), opd::invalid_input);
    CHECK_THROWS_AS(meter.start(61), opd::invalid_input);
    CHECK_THROWS_AS(throughput_meter(0), opd::invalid_input);
    CHECK(meter.steps() == 6);
    CHECK(meter.throughput() == 30.0);
}

TEST_CASE("lag histograms are exact for integers within their bound") {
    property("mean, maximum, quantiles", [] {
        const auto lags = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 40));
        lag_histogram h(50);
        for (const int x : lags) h.add(x);
        auto sorted = lags;
        std::sort(sorted.begin(), sorted.end());
        RC_ASSERT(h.count() == std::int64_t(lags.size()));
        RC_ASSERT(h.beyond() == 0);
        double sum = 0;
        for (const int x : lags) sum += x;
        RC_ASSERT(near(h.mean(), lags.empty() ? 0.0 : sum / double(lags.size())));
        RC_ASSERT(h.max() == (sorted.empty() ? 0.0 : sorted.back()));
        for (int percent = 0; percent <= 100; ++percent) {
            const double q = percent / 100.0;
            double want = 0;
            for (std::size_t i = 0; i < sorted.size(); ++i)
                if (std::int64_t(i + 1) * 100 >= std::int64_t(percent) * std::int64_t(sorted.size())) {
                    want = sorted[i];
                    break;
                }
            RC_ASSERT(h.quantile(q) == want);
        }
    });
    property("what lies beyond the bound is counted, and has the maximum as its quantile", [] {
        const auto lags = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 40));
        lag_histogram h(20);
        std::vector<std::int64_t> want(21);
        for (const int x : lags) {
            h.add(x);
            if (x <= 20) ++want[std::size_t(x)];
        }
        RC_ASSERT(h.count() == std::int64_t(lags.size()));
        RC_ASSERT(h.beyond() == std::count_if(lags.begin(), lags.end(), [](int x) { return x > 20; }));
        auto bins = h.bins();
        bins.resize(21);
        RC_ASSERT(bins == want);
        RC_ASSERT(h.quantile(1) == (lags.empty() ? 0 : *std::max_element(lags.begin(), lags.end())));
    });

    lag_histogram parts(4, 16);
    parts.add(1.0);
    parts.add(1.99);
    for (int i = 0; i < 2; ++i) parts.add(2.0);
    CHECK(parts.quantile(0.25) == 1.0);
    CHECK(parts.quantile(0.5) == 1.9375); // the lower end of its bin
    CHECK(parts.quantile(1.0) == 2.0);
    for (int i = 0; i < 6; ++i) parts.add(175);
    CHECK(parts.quantile(0.4) == 2.0);
    CHECK(parts.quantile(0.41) == 175.0);
    CHECK(parts.mean() == (1.0 + 1.99 + 4.0 + 6 * 175) / 10);
    parts.add(4.0); // the bound itself is within
    CHECK(parts.beyond() == 6);

    CHECK_THROWS_AS(parts.add(-1), opd::invalid_input);
    CHECK_THROWS_AS(parts.add(not_a_number), opd::invalid_input);
    CHECK_THROWS_AS(parts.quantile(1.5), opd::invalid_input);
    CHECK_THROWS_AS(parts.quantile(not_a_number), opd::invalid_input);
    CHECK_THROWS_AS(lag_histogram(-1), opd::invalid_input);
    CHECK_THROWS_AS(lag_histogram(4, 0), opd::invalid_input);
    CHECK(parts.count() == 11);
}

TEST_CASE("lags in optimizer updates") {
    property("equal those of a table", [] {
        const version_t first = *rc::gen::inRange(0, 10);
        const int earlier = *rc::gen::inRange(0, 5);
        const auto steps = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 4));
        update_count count(first, earlier);
        std::map<version_t, std::int64_t> at; // updates up to a version
        for (version_t v = first - 5; v <= first; ++v) at[v] = (v - first) * earlier;
        for (std::size_t i = 0; i < steps.size(); ++i) {
            count.advance(steps[i]);
            at[first + version_t(i) + 1] = at[first + version_t(i)] + steps[i];
        }
        const version_t now = first + version_t(steps.size());
        RC_ASSERT(count.version() == now);
        RC_ASSERT(count.updates() == at[now]);
        for (const auto& [v, n] : at) {
            RC_ASSERT(count.since(double(v)) == double(at[now] - n));
            if (v < now) RC_ASSERT(near(count.since(double(v) + 0.5), double(at[now]) - double(n + at[v + 1]) / 2));
        }
    });
    update_count steady(0, 4); // memory grows with changes, not with versions
    for (int i = 0; i < 10000; ++i) steady.advance(4);
    CHECK(steady.entries() == 1);
    steady.advance(3);
    for (int i = 0; i < 10000; ++i) steady.advance(4);
    CHECK(steady.entries() == 3);
    CHECK(steady.since(9999) == 4 + 3 + 40000);
    CHECK_THROWS_AS(update_count(0, -1), opd::invalid_input);
    CHECK_THROWS_AS(update_count().advance(-1), opd::invalid_input);
}

TEST_CASE("the four lags of a sequence") {
    lag_meter meter;
    for (int i = 0; i < 10; ++i) meter.step(4);
    meter.add(3, {4, 9, 7.25, 100});
    meter.add(10, {10, 10, 10, 1});
    meter.add(2, {0, 0, 0, 0}); // an empty response: nothing but a start
    CHECK(meter(lag::start).count() == 3);
    CHECK(meter(lag::start).max() == 8.0);
    CHECK(meter(lag::start).mean() == 5.0);
    CHECK(meter(lag::oldest_token).count() == 2);
    CHECK(meter(lag::oldest_token).max() == 6.0);
    CHECK(meter(lag::mean_token).max() == 2.75);
    CHECK(meter(lag::mean_token).quantile(1) == 2.75); // sixteenths
    CHECK(meter(lag::newest_token).max() == 1.0);
    CHECK(meter(lag::start, lag_unit::updates).max() == 32.0);
    CHECK(meter(lag::mean_token, lag_unit::updates).max() == 11.0);
    CHECK(meter(lag::newest_token, lag_unit::updates).quantile(0.5) == 0.0);
    CHECK(meter.batch_max(lag::start) == 0.0); // of the last finished batch
    meter.step(4);
    CHECK(meter.batch_max(lag::start) == 8.0);
    CHECK(meter.batch_mean(lag::oldest_token) == 3.0);
    CHECK(meter.batch_mean(lag::oldest_token, lag_unit::updates) == 12.0);
    meter.step(4);
    CHECK(meter.batch_max(lag::start) == 0.0);

    CHECK_THROWS_AS(meter.add(13, {12, 12, 12, 1}), opd::invalid_input);
    CHECK_THROWS_AS(meter.add(12, {12, 13, 12, 1}), opd::invalid_input);
    CHECK_THROWS_AS(meter.add(1, {3, 2, 2.5, 1}), opd::invalid_input);
    CHECK_THROWS_AS(meter.add(1, {1, 3, 4, 1}), opd::invalid_input);
    CHECK_THROWS_AS(meter.add(1, {1, 3, not_a_number, 1}), opd::invalid_input);
    CHECK_THROWS_AS(meter.add(1, {1, 3, 2, -1}), opd::invalid_input);
    CHECK(meter(lag::start).count() == 3);
}

TEST_CASE("levels are weighted by time") {
    property("means, quantiles and profiles equal those of a table", [] {
        struct change {
            int level;
            double seconds;
        };
        const auto changes = *rc::gen::container<std::vector<change>>(rc::gen::exec([] {
            return change{*rc::gen::inRange(0, 9), *rc::gen::inRange(0, 40) / 16.0};
        }));
        const double origin = *rc::gen::inRange(0, 1000) / 16.0;
        level_meter meter(6, 8, 1.0 / 16);
        std::map<int, double> at;
        double t = origin, area = 0;
        std::int64_t top = 0;
        for (const change& c : changes) {
            meter.set(c.level, t);
            t += c.seconds;
            area += c.level * c.seconds;
            at[c.level] += c.seconds;
            top = std::max<std::int64_t>(top, c.level);
        }
        meter.observe(t);
        RC_ASSERT(meter.max() == top);
        if (t > origin) RC_ASSERT(near(meter.mean(), area / (t - origin)));
        RC_ASSERT(meter.seconds() == (changes.empty() ? 0.0 : t - origin));
        for (const auto& [level, seconds] : at)
            if (level <= 6) RC_ASSERT(meter.seconds_at(level) == seconds);
        for (const double q : {0.0, 0.25, 0.5, 1.0}) {
            double upto = 0;
            std::int64_t want = 0;
            for (const auto& [level, seconds] : at) {
                if (seconds <= 0) continue;
                want = std::min(level, 7);
                upto += seconds;
                if (level <= 6 && upto >= q * (t - origin)) break;
            }
            RC_ASSERT(meter.quantile(q) == want);
        }
        RC_ASSERT(near(meter.integral(), area));
        // the course: each span's mean, and no more spans than allowed
        RC_ASSERT(meter.spans() <= 8u);
        RC_ASSERT(meter.span_seconds() * 8 >= t - origin);
        for (std::size_t i = 0; i < meter.spans(); ++i) {
            const double left = double(i) * meter.span_seconds();
            const double right = std::min(left + meter.span_seconds(), t - origin);
            double sum = 0, begin = 0;
            for (const change& c : changes) {
                sum += c.level * std::max(0.0, std::min(right, begin + c.seconds) - std::max(left, begin));
                begin += c.seconds;
            }
            if (right > left) RC_ASSERT(near(meter.span_mean(i), sum / (right - left)));
        }
    });
    level_meter long_lived; // a day of a thousand events keeps 256 spans
    for (int i = 0; i <= 1000; ++i) long_lived.set(i % 2, i * 86.4);
    CHECK(long_lived.spans() <= 256);
    CHECK(long_lived.spans() > 128);
    CHECK(near(long_lived.span_mean(100), 0.5, 0.2));
    CHECK(near(long_lived.seconds_at(1), 43200));

    level_meter endless; // nor does any time keep it busy
    endless.set(1, -1.7e308);
    endless.observe(1.7e308);
    CHECK(endless.spans() <= 256);

    level_meter meter;
    CHECK(meter.mean() == 0.0);
    meter.set(7, 3);
    CHECK(meter.mean() == 7.0);
    CHECK_THROWS_AS(meter.set(-1, 4), opd::invalid_input);
    CHECK_THROWS_AS(level_meter(0, 7), opd::invalid_input);
    CHECK_THROWS_AS(level_meter(0, 8, 0.0), opd::invalid_input);

    depth_meter depths;
    depths.set(queue::running, 4, 0);
    depths.set(queue::running, 2, 1);
    depths.set(queue::ready, 1, 0);
    depths.hold(1);
    depths.hold(2); // already held
    depths.observe(4);
    CHECK(depths(queue::running).mean() == 2.5);
    CHECK(depths(queue::ready).mean() == 1.0);
    CHECK(depths(queue::teacher).max() == 0);
    CHECK(depths.held_time() == 3.0);
    depths.release(5);
    depths.release(6); // already released
    CHECK(depths.held_time() == 4.0);
    depths.observe(9);
    CHECK(depths.held_time() == 4.0);
    CHECK(depths(queue::running).seconds_at(2) == 8.0);
}

TEST_CASE("what a meter describes is written as JSON: groups, numbers, null for what is unknown or no number") {
    const auto all = examples::described(figures{[](auto&& visit) {
        visit("whole", std::numeric_limits<std::int64_t>::min());
        visit("real", 0.1);
        visit("known", std::optional<double>(0.5)), visit("unknown", std::optional<double>());
        visit("nan", not_a_number), visit("up", infinity), visit("down", -infinity);
        visit("list", std::vector<double>{1, infinity});
        visit("nothing", figures{[](auto&&) {}});
        visit("group", figures{[](auto&& in) { in("inner", figures{[](auto&& innermost) { innermost("x", 1); }}); }});
    }});
    CHECK(all.dump() == R"({"whole":-9223372036854775808,"real":0.1,"known":0.5,"unknown":null,"nan":null,"up":null,)"
                        R"("down":null,"list":[1.0,null],"nothing":{},"group":{"inner":{"x":1}}})");
    property("doubles come back bit for bit", [](double x) {
        if (!std::isfinite(x)) return;
        const auto text = examples::described(figures{[x](auto&& visit) { visit("x", x); }}).dump();
        RC_ASSERT(json::parse(text)["x"].get<double>() == x);
    });
}

TEST_CASE("transfers: from being told to having them, of the weights that were asked for last") {
    transfer_meter m;
    m.asked(0, 7, 10);
    m.asked(1, 7, 10);
    m.close(10);
    m.installed(0, 7, 10.5);
    m.installed(0, 7, 11); // it said so
    m.installed(2, 7, 11); // nobody asked
    m.asked(1, 8, 11);     // before it had the others
    m.installed(1, 7, 11.25);
    m.installed(1, 8, 13);
    m.open(12);
    m.asked(0, 8, 12);
    m.gone(0);
    m.installed(0, 8, 20); // of a life that is over
    m.asked(3, 9, 21);
    m.installed(3, 9, 21.5);
    m.observe(30);
    CHECK(m.count() == 3);
    CHECK(m.seconds() == 3);
    CHECK(m.longest() == 2);
    CHECK(m.closed_seconds() == 2);
    const json without = examples::described(m);
    CHECK(without["mean_seconds"] == 1.0);
    CHECK(without["bytes"].is_null());
    m.bytes = 100;
    CHECK(examples::described(m)["bytes"] == 300.0);
    CHECK(examples::described(transfer_meter{})["mean_seconds"].is_null());
    CHECK_THROWS_AS(m.asked(0, 9, std::numeric_limits<double>::infinity()), opd::invalid_input);
}

TEST_CASE("a run describes what its meters say") {
    run_metrics_options options;
    options.rollout_workers = 2;
    run_metrics metrics(options);
    constexpr double begin = 1000; // a machine's clock does not start with the run
    metrics.start(begin);
    double t = begin;
    json last;
    for (int j = 1; j <= 7; ++j) { // one rollout worker of two busy for 2 s, then the teacher 1 s, then the learner 1 s
        metrics.depths.set(queue::running, 3, t);
        metrics.stages.begin(stage::rollout, 0, t);
        metrics.stages.end(stage::rollout, 0, t + 2);
        metrics.depths.set(queue::running, 0, t + 2);
        metrics.stages.begin(stage::teacher, 0, t + 2);
        metrics.stages.end(stage::teacher, 0, t + 3);
        metrics.depths.hold(t + 2.5);
        metrics.depths.release(t + 3);
        for (int i = 0; i < 3; ++i)
            metrics.consumed(std::max(0, j - 2), {std::max(0, j - 2), j - 1, double(j - 1), 100}, 10);
        metrics.stages.begin(stage::learner, 0, t + 3);
        metrics.stages.end(stage::learner, 0, t + 4);
        metrics.count(tally::retried);
        t += 4;
        metrics.step(t, 4);
        last = examples::described(metrics.last_step());
        CHECK(last["step"] == j);
        CHECK(last["version"] == j);
        CHECK(last["time"] == 4.0 * j);
        CHECK(last["updates"] == 4 * j);
        CHECK(last["sequences"] == 3);
        CHECK(last["response_tokens"] == 300);
        CHECK(last["prompt_tokens"] == 30);
        CHECK(last["step_seconds"] == 4.0);
        CHECK(last["step_tokens_per_second"] == 82.5);
        CHECK(last["throughput"].is_null() == (j <= 5));
        CHECK(last["busy"]["rollout"] == 0.25);
        CHECK(last["busy"]["teacher"] == 0.25);
        CHECK(last["overlap"] == 0.75);
        CHECK(last["run_overlap"] == 0.75);
        CHECK(last["lag"]["start"]["max"] == (j == 1 ? 0 : 1));
        CHECK(last["lag"]["start"]["mean_updates"] == (j == 1 ? 0 : 4));
        CHECK(last["lag"]["newest_token"]["max"] == 0);
        CHECK(last["depth"]["running"]["mean"] == 1.5);
        CHECK(last["held_seconds"] == 0.5);
        CHECK(last["retried"] == j);
        CHECK(last["failed"] == 0);
    }
    CHECK(last["throughput"] == 75.0);
    metrics.observe(begin + 30);
    CHECK(examples::described(metrics.last_step())["time"] == last["time"]); // the step was where it was
    const json summary = examples::described(metrics);
    CHECK(summary["steps"] == 7);
    CHECK(summary["time"] == 30.0);
    CHECK(summary["sequences"] == 21);
    CHECK(summary["response_tokens"] == 2100);
    CHECK(summary["throughput"] == 75.0);
    CHECK(summary["total_throughput"] == 82.5);
    CHECK(summary["overlap"] == 0.75);
    CHECK(summary["wall_seconds"] == 28.0);
    CHECK(summary["busy_seconds"]["rollout"] == 7.0);
    CHECK(summary["merged_busy_seconds"]["rollout"] == 14.0);
    CHECK(summary["lag"]["start"]["versions"]["bins"] == json({3, 18}));
    CHECK(summary["lag"]["start"]["updates"]["bins"] == json({3, 0, 0, 0, 18}));
    CHECK(summary["lag"]["start"]["versions"]["p50"] == 1);
    CHECK(summary["held"]["seconds"] == 3.5);
    CHECK(summary["running_profile"]["p95"] == 3);
    CHECK(summary["running_profile"]["p50"] == 0);
    CHECK(summary["running_profile"]["seconds"] == 30.0);
    CHECK(summary["clock_skew"] == 0.0);

    run_metrics unstarted; // without a start the first step's own time is unknown
    unstarted.step(3, 1);
    const json line = examples::described(unstarted.last_step());
    CHECK(line["step_seconds"].is_null());
    CHECK(line["busy"]["rollout"].is_null());
    CHECK(line["overlap"].is_null());
    CHECK(line["held_seconds"].is_null());
    CHECK_THROWS_AS(unstarted.consumed(0, {0, 0, 0, 1}, -1), opd::invalid_input);
}
