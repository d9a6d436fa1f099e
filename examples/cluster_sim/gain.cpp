// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "gain.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "opd/threads.hpp"
#include "simulate.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

constexpr double fixed_parts[] = {0, 0.125, 0.25, 0.5, 1, 2};                      // of the configured one
constexpr std::pair<double, double> loads[] = {{0.25, 1}, {1, 1}, {4, 1}, {1, 4}}; // learner, teacher
constexpr int most_gpus = 16;                                                      // whose splits are all tried
constexpr double nothing = 1.05;                                                   // a gain that is none

void scale(simulated_job& j, double factor) {
    for (double* t : {&j.fixed, &j.per_item, &j.per_token}) *t *= factor;
}

} // namespace

std::vector<gain_row> gain_of_async(const config& c, const std::function<void(double)>& progress) {
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, "--gain: " + what);
    };
    const entry* streaming = nullptr;
    std::vector<entry> synchronous;
    for (const entry& e : c.schedules) {
        if (is_synchronous(e)) synchronous.push_back(e);
        if (!streaming && std::holds_alternative<async>(e.schedule)) streaming = &e;
    }
    need(streaming != nullptr, "the configuration has no async schedule");
    need(!synchronous.empty(), "the configuration has no synchronous schedule");
    need(c.rollout.speed.step_per_sequence > 0,
         "rollout.step_per_sequence must be positive: a decode step without a fixed part would take no time");
    const int gpus = gpus_of(c, *streaming);
    need(gpus <= most_gpus,
         fmt::format("every split of the GPUs is tried, of at most {}; there are {}", most_gpus, gpus));
    need(!c.sensitivity.tails.empty(), "sensitivity.tails is empty");

    struct job {
        std::size_t row, cell;
        config c;
        entry e;
        outcome result = {};
    };
    std::vector<gain_row> rows;
    std::vector<job> jobs;
    for (const config::tail& tail : c.sensitivity.tails)
        for (const auto& [learner, teacher] : loads) {
            gain_row row;
            row.tail = tail, row.learner = learner, row.teacher = teacher;
            config changed = c;
            changed.lengths.response = tail_of(c.lengths.response, tail);
            row.longest = quantile(changed.lengths.response, 1 - 1.0 / static_cast<double>(c.batch)) /
                          mean(changed.lengths.response);
            scale(changed.learner.job, learner);
            scale(changed.teacher.job, teacher);
            for (const double part : fixed_parts) {
                changed.rollout.speed.step = part * c.rollout.speed.step;
                for (const entry& e : synchronous) {
                    // the first worker that comes would take the whole first batch
                    config spread = changed;
                    const index_t each = (c.batch + e.rollout_workers - 1) / e.rollout_workers;
                    spread.rollout.lanes = static_cast<int>(std::min<index_t>(c.rollout.lanes, each));
                    jobs.push_back({rows.size(), row.cells.size(), std::move(spread), e});
                }
                for (int w = 1; w * c.rollout.gpus < gpus; ++w)
                    for (int t = 1; w * c.rollout.gpus + t * c.teacher.gpus < gpus; ++t) {
                        config split = changed;
                        split.teacher.workers = t;
                        entry e = *streaming;
                        e.rollout_workers = w;
                        e.learner_gpus = gpus - w * c.rollout.gpus - t * c.teacher.gpus;
                        jobs.push_back({rows.size(), row.cells.size(), std::move(split), std::move(e)});
                    }
                row.cells.emplace_back().step = changed.rollout.speed.step;
            }
            rows.push_back(std::move(row));
        }

    std::atomic<std::size_t> done{0};
    opd::thread_team team(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    team.run(static_cast<index_t>(jobs.size()), [&](index_t i, int worker) {
        job& j = jobs[static_cast<std::size_t>(i)];
        j.result = simulate(j.c, j.e);
        const std::size_t n = ++done;
        if (worker == 0) progress(static_cast<double>(n) / static_cast<double>(jobs.size()));
    });

    std::vector<std::vector<std::pair<const job*, const job*>>> best(rows.size()); // sync, async
    for (const gain_row& r : rows) best[static_cast<std::size_t>(&r - rows.data())].resize(r.cells.size());
    for (const job& j : jobs) {
        auto& [sync, split] = best[j.row][j.cell];
        const job*& one = is_synchronous(j.e) ? sync : split;
        if (!one || j.result.throughput > one->result.throughput) one = &j;
    }
    for (std::size_t r = 0; r < rows.size(); ++r)
        for (std::size_t i = 0; i < rows[r].cells.size(); ++i) {
            const auto [sync, split] = best[r][i];
            gain_cell& cell = rows[r].cells[i];
            const double rate = sync->result.throughput;
            cell.gain = rate > 0 ? split->result.throughput / rate : 0;
            const auto& busy = sync->result.busy;
            const double workers = sync->e.rollout_workers * sync->c.rollout.gpus;
            const double scoring = teacher_workers_of(sync->c, sync->e) * sync->c.teacher.gpus;
            cell.whole = (busy[0] * workers + busy[1] * scoring + busy[2] * sync->e.learner_gpus) / sync->result.gpus;
            cell.rollout = split->e.rollout_workers * c.rollout.gpus;
            cell.learner = split->e.learner_gpus;
            cell.teacher = split->c.teacher.workers * c.teacher.gpus;
        }
    return rows;
}

std::string table(const config& c, const std::vector<gain_row>& rows) {
    std::string out =
        fmt::format("Async on its best split of the GPUs over the fastest synchronous row, by the fixed part of a "
                    "decode step, in ms\n"
                    "(and {:g} us a running sequence). In each cell: the gain; the gain over a sync without an idle "
                    "GPU; the split,\n"
                    "rollout + learner + teacher. {} steps, seed {}.\n\n{:>12} {:>9} {:>9}",
                    1e6 * c.rollout.speed.step_per_sequence, c.steps, c.seed, "longest/mean", "learner x", "teacher x");
    for (const gain_cell& cell : rows[0].cells) out += fmt::format("  {:<16g}", 1e3 * cell.step);
    std::size_t cells = 0, none = 0, covered = 0;
    for (const gain_row& r : rows) {
        out += fmt::format("\n{:>12.1f} {:>9g} {:>9g}", r.longest, r.learner, r.teacher);
        for (const gain_cell& cell : r.cells) {
            const std::string split = fmt::format("{}+{}+{}", cell.rollout, cell.learner, cell.teacher);
            out += fmt::format("  {:.2f} {:.2f} {:<6}", cell.gain, cell.over_work_conserving(), split);
            ++cells, none += cell.gain <= nothing, covered += cell.over_work_conserving() <= nothing;
        }
    }
    return out + fmt::format("\n\n{} of {} gain at most {:g}; over a sync without an idle GPU {} do\n", none, cells,
                             nothing, covered);
}

} // namespace cluster_sim
