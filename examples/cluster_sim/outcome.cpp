// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "outcome.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "closed_forms.hpp"
#include "describe_json.hpp"
#include "gnuplot.hpp"
#include "ledger_table.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

// Columns as wide as their widest cell, the first to the left.
std::string aligned(const std::vector<std::vector<std::string>>& rows) {
    std::vector<std::size_t> width;
    for (const auto& row : rows)
        for (std::size_t i = 0; i < row.size(); ++i) {
            if (i == width.size()) width.push_back(0);
            width[i] = std::max(width[i], row[i].size());
        }
    std::string r;
    for (const auto& row : rows) {
        for (std::size_t i = 0; i < row.size(); ++i)
            r += i == 0 ? fmt::format("{:<{}}", row[i], width[i]) : fmt::format("  {:>{}}", row[i], width[i]);
        r += '\n';
    }
    return r;
}

std::string number(double x) {
    return x >= 1e6   ? fmt::format("{:.2f}M", x / 1e6)
           : x >= 1e4 ? fmt::format("{:.1f}k", x / 1e3)
                      : fmt::format("{:.0f}", x);
}

double speedup(const std::vector<outcome>& all, const outcome& o) {
    return all[0].throughput > 0 ? o.throughput / all[0].throughput : 0;
}

// Over the fastest synchronous schedule.
std::string fair_speedup(double best, const outcome& o) {
    return best > 0 ? fmt::format("{:.2f}", o.throughput / best) : "-";
}

// A gnuplot string: single quotes doubled, no markup.
std::string quoted(const std::string& text) {
    std::string r = "'";
    for (const char c : text) r += c == '\'' ? std::string("''") : std::string(1, c < ' ' && c >= 0 ? ' ' : c);
    return r + "'";
}
std::string cell(const std::string& text) { // of a data block
    std::string r = "\"";
    for (const char c : text) r += c == '"' || c == '\\' || (c < ' ' && c >= 0) ? ' ' : c;
    return r + "\"";
}

} // namespace

distribution tail_of(const distribution& base, const config::tail& t) {
    const double wanted = mean(base);
    const auto with = [&](double median) { return distribution{lognormal{median, t.sigma}, base.at_least, t.at_most}; };
    // The mean grows with the median, from at_least to at_most; bisect on the logarithm.
    double low = 1e-6 * wanted, high = 1e6 * wanted;
    for (int i = 0; i < 200 && low < high * (1 - 1e-12); ++i) {
        const double middle = std::sqrt(low * high);
        (mean(with(middle)) < wanted ? low : high) = middle;
    }
    return with(high);
}

double best_sync(const std::vector<outcome>& all) {
    double best = 0;
    for (const outcome& o : all)
        if (is_synchronous(o.what)) best = std::max(best, o.throughput);
    return best;
}

std::string table(const config& c, const std::vector<outcome>& all) {
    std::vector<std::vector<std::string>> rows = {
        {"schedule", "GPUs", "tokens/s", "speed-up", "over best sync", "overlap", "rollout", "teacher", "learner",
         "start lag", "max", "token lag", "max", "held", "ready s", "restarts", "failed", "waste", "GPU-s/Mtoken"}};
    const double best = best_sync(all);
    for (const outcome& o : all) {
        const auto share = [](double x) { return fmt::format("{:.0f}%", 100 * x); };
        const auto& start = o.lags[static_cast<int>(lag::start)];
        const auto& tokens = o.lags[static_cast<int>(lag::mean_token)];
        if (!o.stuck.empty()) {
            rows.push_back({o.what.name, fmt::format("{}", o.gpus), "stuck: " + o.stuck});
            continue;
        }
        rows.push_back(
            {o.what.name, fmt::format("{}", o.gpus), number(o.throughput), fmt::format("{:.2f}", speedup(all, o)),
             fair_speedup(best, o), fmt::format("{:.2f}", o.overlap), share(o.busy[0]), share(o.busy[1]),
             share(o.busy[2]), fmt::format("{:.2f}", start.mean), fmt::format("{:.0f}", start.max),
             fmt::format("{:.2f}", tokens.mean), fmt::format("{:.1f}", tokens.max), share(o.held),
             fmt::format("{:.1f}", o.ready), fmt::format("{}", o.restarts), fmt::format("{}", o.failed),
             share(o.generated > 0 ? o.wasted / o.generated : 0), fmt::format("{:.0f}", o.gpu_seconds_per_million())});
    }
    return fmt::format("{} (B = {}, mean response {:.0f} tokens, seed {})\n\n{}", c.title, c.batch,
                       mean(c.lengths.response), c.seed, aligned(rows));
}

std::string ledgers(const std::vector<outcome>& all) {
    std::vector<examples::ledger_row> rows;
    for (const outcome& o : all) {
        rows.push_back({o.what.name, o.ledger});
        if (o.what.sharing != sharing::none) rows.back().tokens.busy_seconds = 0; // others have its GPUs then: not idle
    }
    // github.com/marin-community/marin/issues/8936, comment of 2026-09-06: 32 + 8 H100, at most one update old,
    // responses of up to 4,096 tokens; "discarded during termination" was outstanding at the end
    token_totals marin;
    marin.generated = 5807538, marin.learnt = 3629028, marin.discarded = 1910321, marin.outstanding = 268189;
    rows.push_back({"marin#8936 (published)", marin});
    return examples::ledger_table(rows);
}

std::string stalenesses(const config& c, const std::vector<outcome>& all) {
    std::vector<std::vector<std::string>> rows = {
        {"mean start lag", "simulated", "C/B", "rho", "closed form", "teacher's/B", "difference", "M/B - 1"}};
    const auto batch = static_cast<double>(c.batch);
    for (const outcome& o : all) {
        if (!std::holds_alternative<async>(o.what.schedule) || !o.stuck.empty() || o.permits.empty()) continue;
        const staleness_load load{.concurrency = o.running, .batch = batch, .utilisation = 1 - o.waits};
        double permits = 0;
        for (const opd::index_t m : o.permits)
            permits += static_cast<double>(m) / static_cast<double>(o.permits.size());
        const auto figure = [](double x) { return fmt::format("{:.2f}", x); };
        rows.push_back({o.what.name, figure(o.settled_lag), figure(pre_queue_staleness(load)), figure(load.utilisation),
                        figure(mean_staleness(load)), figure(o.scoring / batch),
                        figure(o.settled_lag - mean_staleness(load)), figure(permits_staleness(permits, batch))});
    }
    return rows.size() > 1 ? aligned(rows) : std::string();
}

std::string table(const config& c, const std::vector<sensitivity_row>& rows) {
    if (rows.empty()) return {};
    std::vector<std::vector<std::string>> cells = {{"sigma", "cut", "longest/mean", "learner x", "rollout/learner"}};
    for (const std::string& name : c.sensitivity.schedules) cells[0].push_back(name);
    if (!rows[0].fair.empty())
        for (const std::string& name : c.sensitivity.schedules) cells[0].push_back(name + " / best sync");
    for (const sensitivity_row& r : rows) {
        cells.push_back({fmt::format("{:g}", r.tail.sigma), fmt::format("{:.0f}", r.tail.at_most),
                         fmt::format("{:.1f}", r.longest), fmt::format("{:g}", r.learner_scale),
                         fmt::format("{:.2f}", r.rollout_over_learner)});
        for (const double s : r.speedups) cells.back().push_back(fmt::format("{:.2f}", s));
        for (const double s : r.fair) cells.back().push_back(fmt::format("{:.2f}", s));
    }
    return fmt::format(
        "Speed-up over {}, and over the fastest synchronous row, by tail (lognormal, cut; mean {:.0f} as "
        "above) and learner time\n\n{}",
        c.schedules[0].name, mean(c.lengths.response), aligned(cells));
}

nlohmann::ordered_json report(const config& c, const std::vector<outcome>& all,
                              const std::vector<sensitivity_row>& rows) {
    nlohmann::ordered_json j;
    j["config"] = to_json(c);
    j["schedules"] = nlohmann::ordered_json::array();
    const double best = best_sync(all);
    for (const outcome& o : all) {
        nlohmann::ordered_json r;
        r["name"] = o.what.name;
        r["gpus"] = o.gpus;
        r["stuck"] = o.stuck.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(o.stuck);
        r["steps"] = o.steps;
        r["sequences"] = o.sequences;
        r["virtual_seconds"] = o.seconds;
        r["tokens_per_second"] = o.throughput;
        r["speedup"] = speedup(all, o);
        if (best > 0) r["speedup_over_best_sync"] = o.throughput / best;
        r["overlap"] = o.overlap;
        r["busy"] = {{"rollout", o.busy[0]}, {"teacher", o.busy[1]}, {"learner", o.busy[2]}};
        r["depth"] = {{"running", o.depth[0]}, {"teacher", o.depth[1]}, {"ready", o.depth[2]}};
        for (int l = 0; l < lag_count; ++l)
            r["lag"][name_of(static_cast<lag>(l))] = {
                {"mean", o.lags[l].mean}, {"p99", o.lags[l].p99}, {"max", o.lags[l].max}, {"bins", o.lags[l].bins}};
        r["held"] = o.held;
        r["ready_seconds"] = o.ready;
        r["restarts"] = o.restarts;
        r["failed"] = o.failed;
        r["tokens_generated"] = o.generated;
        r["tokens_wasted"] = o.wasted;
        r["ledger"] = examples::described(o.ledger);
        r["cache_full"] = o.blocked;
        r["gpu_seconds_per_million_tokens"] = o.gpu_seconds_per_million();
        r["host_seconds"] = o.host_seconds;
        r["events"] = o.events;
        j["schedules"].push_back(std::move(r));
    }
    j["sensitivity"] = nlohmann::ordered_json::array();
    for (const sensitivity_row& s : rows) {
        nlohmann::ordered_json r;
        r["sigma"] = s.tail.sigma;
        r["at_most"] = s.tail.at_most;
        r["longest_over_mean"] = s.longest;
        r["learner_scale"] = s.learner_scale;
        r["rollout_over_learner"] = s.rollout_over_learner;
        for (std::size_t i = 0; i < s.speedups.size(); ++i) r["speedup"][c.sensitivity.schedules[i]] = s.speedups[i];
        for (std::size_t i = 0; i < s.fair.size(); ++i)
            r["speedup_over_best_sync"][c.sensitivity.schedules[i]] = s.fair[i];
        j["sensitivity"].push_back(std::move(r));
    }
    return j;
}

std::string draw_plots(const std::string& directory, const config& c, const std::vector<outcome>& all,
                       const std::vector<sensitivity_row>& rows) {
    std::string data;
    for (std::size_t i = 0; i < all.size(); ++i) { // one row a schedule, the first on top
        const outcome& o = all[i];
        const auto& start = o.lags[static_cast<int>(lag::start)];
        const auto& tokens = o.lags[static_cast<int>(lag::mean_token)];
        data += fmt::format("{} {} {} {} {} {} {}\n", cell(o.what.name), all.size() - i, o.throughput, start.mean,
                            start.max, tokens.mean, o.gpu_seconds_per_million());
    }
    std::string script = fmt::format("$runs << EOD\n{}EOD\n", data);
    script += fmt::format("set terminal svg size 1100,{} noenhanced background rgb 'white'\n"
                          "set output 'schedules.svg'\nset multiplot layout 1,2 title {}\n",
                          160 + 34 * all.size(), quoted(c.title));
    double fastest = 1, latest = 1;
    for (const outcome& o : all) {
        fastest = std::max(fastest, o.throughput);
        latest = std::max(latest, o.lags[static_cast<int>(lag::start)].max);
    }
    script += fmt::format("set yrange [0.4:{}.6]\nset grid x\nset key below\nset style fill solid 0.7 noborder\n"
                          "set lmargin 24\nset bmargin 6\nset xlabel 'response tokens a second'\n"
                          "set xrange [0:{}]\nset format x '%.0s%c'\nset ytics scale 0\n",
                          all.size(), 1.18 * fastest);
    script +=
        "plot $runs using (0):2:(0):3:($2-0.32):($2+0.32):yticlabels(1) with boxxyerror lc rgb '#4477aa' notitle, "
        "$runs using 3:2:(sprintf(' %.2fx', $3/";
    script += fmt::format("{})) with labels left notitle\n", all[0].throughput > 0 ? all[0].throughput : 1.0);
    script += fmt::format("set lmargin 4\nset xlabel 'lag in versions'\nset format y ''\nset format x '%g'\n"
                          "unset ytics\nset xrange [{}:{}]\n",
                          -0.03 * latest, 1.06 * latest);
    script += "plot $runs using 4:2 with points pt 7 ps 1.2 lc rgb '#ee6677' title 'start, mean', "
              "$runs using 5:2 with points pt 9 ps 1.2 lc rgb '#aa3377' title 'start, maximum', "
              "$runs using 6:2 with points pt 6 ps 1.2 lc rgb '#228833' title 'tokens, mean'\n"
              "unset multiplot\nreset\n";
    if (!rows.empty()) {
        std::map<std::tuple<std::size_t, double, double>, std::string> curves; // by schedule and tail
        for (const sensitivity_row& r : rows)
            for (std::size_t i = 0; i < r.speedups.size(); ++i)
                curves[{i, r.tail.at_most, r.tail.sigma}] +=
                    fmt::format("{} {}\n", r.rollout_over_learner, r.speedups[i]);
        script += "set terminal svg size 800,520 noenhanced background rgb 'white'\nset output 'sensitivity.svg'\n"
                  "set grid\nset key outside right\nset logscale x 2\nset yrange [0:*]\n";
        script += fmt::format("set xlabel {}\nset ylabel {}\n",
                              quoted("rollout time / learner time under " + all[0].what.name),
                              quoted("speed-up over " + all[0].what.name));
        std::string plot;
        int index = 0;
        for (const auto& [key, points] : curves) {
            const auto [schedule, at_most, sigma] = key;
            script += fmt::format("$curve{} << EOD\n{}EOD\n", index, points);
            const std::string title =
                fmt::format("{}, sigma {:g}, cut {:.0f}", c.sensitivity.schedules[schedule], sigma, at_most);
            plot += fmt::format("{}$curve{} using 1:2 with linespoints lw 2 dt {} title {}", index == 0 ? "" : ", ",
                                index, schedule + 1, quoted(title));
            ++index;
        }
        script += "plot " + plot + "\n";
    }
    write_file(directory + "/plots.gp", script);
    return examples::run_gnuplot(directory, "plots.gp");
}

} // namespace cluster_sim
