// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What one simulated run came to, and the words and pictures that are made of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "config.hpp"
#include "opd/sched/meters/token_ledger.hpp"

namespace cluster_sim {

struct outcome {
    entry what;
    int gpus = 0;
    std::int64_t steps = 0, sequences = 0;
    double seconds = 0;               ///< of virtual time
    double throughput = 0;            ///< response tokens consumed a second, after the warm-up; 0: too few updates
    double overlap = 0;               ///< 0 to 3
    std::array<double, 3> busy = {};  ///< of rollout (mean over workers), teacher, learner: share of the time
    std::array<double, 3> depth = {}; ///< sequences running, with or before the teacher, scored: mean over time
    struct {
        double mean = 0, p99 = 0, max = 0;
        std::vector<std::int64_t> bins; ///< of lag 0, 1, …
    } lags[opd::sched::lag_count];
    double held = 0; ///< share of the time for which the policy kept the learner from a batch at hand
    double waits =
        0; ///< after the warm-up, share of the time for which the learner waits for a batch, held back or not
    double settled_lag = 0;            ///< mean start lag after the warm-up
    double running = 0, scoring = 0;   ///< after the warm-up, sequences in rollout; with or before the teacher: means
    double blocked = 0;                ///< share of the time for which the teacher's cache is full
    std::vector<opd::index_t> permits; ///< after each step
    double ready = 0;                  ///< seconds that a scored sequence waits for its update, mean
    std::int64_t failed = 0, restarts = 0;
    double generated = 0, wasted = 0; ///< tokens of attempts that are over, and of them those that no update will see
    opd::sched::token_totals ledger;  ///< of all that was drawn until the end: what was under way then is outstanding
    double host_seconds = 0;          ///< that the simulation took
    std::int64_t events = 0;
    std::string stuck; ///< why the run came to a standstill; empty: it did not

    double gpu_seconds_per_million() const { return throughput > 0 ? gpus * 1e6 / throughput : 0; }
};

/// Tokens a second of the fastest synchronous schedule among them; 0: there is none.
double best_sync(const std::vector<outcome>& all);

/// Speed-up over the first schedule, by tail and learner cost.
struct sensitivity_row {
    config::tail tail;
    double longest = 0; ///< of a batch over the mean length: the quantile at 1 - 1/B
    double learner_scale = 0;
    double rollout_over_learner = 0; ///< busy seconds of the stages in the first schedule
    std::vector<double> speedups;    ///< of config::sensitivity.schedules
    std::vector<double> fair;        ///< likewise, over the fastest synchronous schedule; empty: there is none
};

/// The law of the sensitivity study: lognormal, of this sigma and cut there, with the mean of `base`.
opd::sched::distribution tail_of(const opd::sched::distribution& base, const config::tail& t);

std::string table(const config& c, const std::vector<outcome>& all);
/// Where each row's tokens ended, beside published ledgers.
std::string ledgers(const std::vector<outcome>& all);
/// Mean start lags beside the closed forms of closed_forms.hpp; empty: nothing streams.
std::string stalenesses(const config& c, const std::vector<outcome>& all);
std::string table(const config& c, const std::vector<sensitivity_row>& rows);
nlohmann::ordered_json report(const config& c, const std::vector<outcome>& all,
                              const std::vector<sensitivity_row>& rows);

/// Writes schedules.svg and, if there are rows, sensitivity.svg into the directory. Returns what kept it from drawing
/// (gnuplot is not installed, say); empty if nothing did.
std::string draw_plots(const std::string& directory, const config& c, const std::vector<outcome>& all,
                       const std::vector<sensitivity_row>& rows);

} // namespace cluster_sim
