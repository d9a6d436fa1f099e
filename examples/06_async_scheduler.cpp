// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Your own three stages, run asynchronously on threads: as many sequences stream as the work needs, at most (tau + 1)·B
// with tau = 4, while the learner trains on what is scored. The policy is the default, capacity: tau bounds the mean
// start lag, and single sequences may be older; `.policy = sched::staleness_policy::edf` bounds every one. The stages
// here only count; yours draw tokens, score them and update weights.
#include <cstdio>
#include <map>
#include <numeric>

#include "opd/sched/recorder.hpp"
#include "opd/sched/thread_driver.hpp"

namespace sched = opd::sched;

// [stages]
struct response {
    std::vector<sched::version_t> versions; // of the weights that drew each token
};

struct my_rollout {
    using rolled_type = response;
    std::map<std::int32_t, std::pair<sched::ticket, response>> lanes; // what runs
    sched::version_t version = 0;

    void start(const sched::ticket& t, std::shared_ptr<const response>) { lanes[t.lane] = {t, {}}; } // from the prompt
    void abort(const sched::ticket& t) { lanes.erase(t.lane); }
    void install(const sched::weights& w) { version = w.version; } // prefixes are kept, their KV state is rebuilt
    opd::index_t running() const { return static_cast<opd::index_t>(lanes.size()); }
    void step(std::vector<sched::finished_rollout<response>>& out, std::stop_token) { // one token for everyone
        for (auto& [lane, what] : lanes) {
            auto& [ticket, r] = what;
            r.versions.push_back(version);
            if (r.versions.size() < 20 + ticket.sample * 7 % 61) continue; // no end token yet
            const auto n = r.versions.size();
            const double mean = std::accumulate(r.versions.begin(), r.versions.end(), 0.0) / double(n);
            const sched::token_versions drawn{r.versions.front(), r.versions.back(), mean, std::int64_t(n)};
            out.push_back({ticket, drawn, std::make_shared<const response>(r)});
        }
        for (const auto& done : out) lanes.erase(done.ticket.lane);
    }
};

struct my_teacher {
    using scored_type = double;
    using sequences = std::span<const std::shared_ptr<const response>>;
    std::vector<std::shared_ptr<const double>> score(sequences batch, std::stop_token) {
        std::vector<std::shared_ptr<const double>> scores; // one for each; null if it could not be scored
        for (const auto& r : batch) scores.push_back(std::make_shared<const double>(-0.5 * double(r->versions.size())));
        return scores;
    }
};

struct my_learner {
    using view = sched::sequence_view<response, double>;
    double mean_score = 0;
    sched::weights published; // install() asks for weights by this name
    opd::index_t train(std::span<const view> batch, const sched::train_call& call, std::stop_token) {
        mean_score = 0;
        for (const view& s : batch) mean_score += *s.scored / double(batch.size());
        published = call.makes();
        return 1; // optimizer updates
    }
};
// [/stages]

int main() {
    // [run]
    sched::async schedule{.tau = 4};
    sched::settings settings{.batch = 16, .schedule = schedule, .sequences = 1600};

    sched::thread_driver<my_rollout, my_teacher, my_learner> driver(settings);
    for (int worker = 0; worker < 2; ++worker) driver.add_rollout(std::make_shared<my_rollout>(), 8); // lanes each
    driver.add_teacher(std::make_shared<my_teacher>());
    driver.set_learner(std::make_shared<my_learner>());

    sched::run_metrics metrics(sched::recorded());
    sched::recorder recorder(metrics);
    driver.observe(recorder);
    const sched::run_report report = driver.run();
    // [/run]

    std::printf("%lld sequences in %lld steps, %lld tokens, %.0f tokens a second, overlap %.2f\n",
                static_cast<long long>(report.totals.consumed), static_cast<long long>(report.version),
                static_cast<long long>(report.totals.consumed_tokens), metrics.tokens.throughput().value_or(0),
                metrics.stages.overlap().value_or(0));
    std::printf("tau %lld, policy %s: the mean start lag is at most tau, a single sequence's may exceed it\n",
                static_cast<long long>(schedule.tau), sched::name_of(schedule.policy));
    for (const auto lag :
         {sched::lag::start, sched::lag::oldest_token, sched::lag::mean_token, sched::lag::newest_token})
        std::printf("%-13s lag: mean %.2f, at most %.2f versions\n", sched::name_of(lag), metrics.lags(lag).mean(),
                    metrics.lags(lag).max());
    const bool bounded = metrics.lags(sched::lag::start).mean() <= static_cast<double>(schedule.tau);
    return report.completed && report.totals.consumed == 1600 && bounded ? 0 : 1;
}
