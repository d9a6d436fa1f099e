// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "study.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <mutex>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "at_once.hpp"
#include "gnuplot.hpp"
#include "numbers.hpp"
#include "settings/files.hpp"

namespace staleness_study {

namespace {

constexpr const char* header =
    "contender,k,seed,lag_least,lag_most,kl_own,kl_on_teacher,forward_kl,gap_closed,grammatical,ratio_p99,left_out,"
    "prefix_share,weights";

std::string markdown(const std::vector<std::vector<std::string>>& rows) {
    std::string t;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        t += fmt::format("| {} |\n", fmt::join(rows[r], " | "));
        if (r > 0) continue;
        for (std::size_t i = 0; i < rows[0].size(); ++i) t += "|---";
        t += "|\n";
    }
    return t;
}
std::string told(const estimate& e, int digits) {
    if (std::isnan(e.error)) return fmt::format("{:.{}f}", e.value, digits);
    return fmt::format("{:.{}f} ± {:.{}f}", e.value, digits, e.error, digits);
}

// The variance of y[s][i] within each i, over all i: a column's mean has it over the seeds.
std::pair<double, int> pooled(const std::vector<std::vector<double>>& y) {
    const auto seeds = static_cast<int>(y.size()), places = static_cast<int>(y.front().size());
    const int freedom = (seeds - 1) * places;
    if (freedom == 0) return {std::numeric_limits<double>::quiet_NaN(), 0};
    double squares = 0;
    for (std::size_t i = 0; i < y.front().size(); ++i) {
        double mean = 0;
        for (const auto& one : y) mean += one[i] / seeds;
        for (const auto& one : y) squares += (one[i] - mean) * (one[i] - mean);
    }
    return {squares / freedom, freedom};
}

} // namespace

double estimate::half_width() const {
    // 97.5 % quantiles of Student's t; beyond 10 degrees the expansion about the normal one is right to 1e-3
    constexpr double t[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228};
    if (freedom < 1) return std::numeric_limits<double>::infinity();
    const double z = 1.959964, n = freedom;
    const double quantile =
        freedom <= 10 ? t[freedom - 1]
                      : z + (z * z * z + z) / (4 * n) + (5 * std::pow(z, 5) + 16 * z * z * z + 3 * z) / (96 * n * n);
    return quantile * error;
}

estimate mean_at(std::size_t i, const std::vector<std::vector<double>>& y) {
    const auto [variance, freedom] = pooled(y);
    double mean = 0;
    for (const auto& one : y) mean += one[i] / static_cast<double>(y.size());
    return {mean, std::sqrt(variance / static_cast<double>(y.size())), freedom};
}

estimate slope(const std::vector<double>& x, const std::vector<std::vector<double>>& y) {
    double middle = 0, square = 0, product = 0;
    for (const double one : x) middle += one / static_cast<double>(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        const estimate mean = mean_at(i, y);
        square += (x[i] - middle) * (x[i] - middle), product += (x[i] - middle) * mean.value;
    }
    const auto [variance, freedom] = pooled(y);
    return {product / square, std::sqrt(variance / static_cast<double>(y.size()) / square), freedom};
}

std::string line_of(const cell& c) {
    return fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{}", c.contender, c.k, c.seed, c.lag_least, c.lag_most,
                       c.after.own, c.after.on_teacher, c.after.forward, c.gap_closed, c.after.grammatical, c.ratio_p99,
                       c.left_out, c.prefix_share, c.weights);
}

cell cell_of(const std::string& line) {
    std::vector<std::string> f;
    std::stringstream in(line);
    for (std::string one; std::getline(in, one, ',');) f.push_back(one);
    std::size_t next = 1;
    const auto refuse = [&](const std::string& what) {
        throw trainer::failure(trainer::exit_input, fmt::format("cells.csv: {} in '{}'", what, line));
    };
    if (f.size() != 14) refuse(fmt::format("{} fields for 14", f.size()));
    const auto number = [&]<class T>(T& to) {
        const std::string& text = f[next++];
        char* end = nullptr;
        const double x = std::strtod(text.c_str(), &end);
        if (text.empty() || *end != '\0') refuse(fmt::format("'{}' is no number", text));
        to = static_cast<T>(x);
    };
    cell c;
    c.contender = f[0];
    number(c.k), number(c.seed), number(c.lag_least), number(c.lag_most), number(c.after.own),
        number(c.after.on_teacher), number(c.after.forward), number(c.gap_closed), number(c.after.grammatical),
        number(c.ratio_p99), number(c.left_out), number(c.prefix_share);
    c.weights = f[13];
    return c;
}

study::study(const world& w, grid g, const std::string& directory, int threads) : w_(w), g_(std::move(g)) {
    const auto& weights = w.student.weights;
    const std::string own =
        trainer::results_json(w.settings).dump() + "\n" +
        trainer::hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)}) + "\n";
    const std::string cells = directory + "/cells.csv", settings = directory + "/settings.txt";
    if (!std::filesystem::exists(settings)) {
        trainer::write_file(settings, own);
    } else if (trainer::read_file(settings) != own) {
        throw trainer::failure(trainer::exit_usage,
                               fmt::format("{} holds a study with other settings or another student", directory));
    }
    if (std::filesystem::exists(cells)) {
        std::stringstream in(trainer::read_file(cells));
        std::string line;
        std::getline(in, line);
        if (line != header) throw trainer::failure(trainer::exit_input, cells + ": begins with other columns");
        while (std::getline(in, line)) {
            cell c = cell_of(line);
            cells_[{c.contender, c.k, c.seed}] = std::move(c);
        }
    }
    std::vector<std::tuple<const contender*, int, std::uint64_t>> missing;
    for (const std::uint64_t seed : g_.seeds)
        for (const int k : g_.ks)
            for (const contender& c : g_.contenders) {
                const auto seeds = seeds_of(c);
                if (std::ranges::count(seeds, seed) > 0 && !cells_.contains({c.name, k, seed}))
                    missing.push_back({&c, k, seed});
            }
    std::mutex mutex; // of the cells
    examples::at_once(threads, missing.size(), [&](std::size_t i) {
        const auto& [c, k, seed] = missing[i];
        cell done = run_cell(w, *c, k, seed);
        const std::lock_guard lock(mutex);
        fmt::print(stderr, "{:>4}/{} {:<24} k {:<3} seed {} gap closed {:.4f}\n", i + 1, missing.size(), c->name, k,
                   seed, done.gap_closed);
        cells_[{c->name, k, seed}] = std::move(done);
        trainer::write_file(cells, csv());
    });
    trainer::write_file(cells, csv());
}

// In the order of the grid, then whatever the file had beside it.
std::string study::csv() const {
    std::string t = std::string(header) + "\n";
    auto left = cells_;
    for (const contender& c : g_.contenders)
        for (const int k : g_.ks)
            for (const std::uint64_t seed : g_.seeds)
                if (const auto found = left.extract(place{c.name, k, seed})) t += line_of(found.mapped()) + "\n";
    for (const auto& [where, c] : left) t += line_of(c) + "\n";
    return t;
}

std::vector<std::uint64_t> study::seeds_of(const contender& c) const {
    const std::size_t n = c.seeds > 0 ? static_cast<std::size_t>(c.seeds) : g_.seeds.size();
    return {g_.seeds.begin(), g_.seeds.begin() + static_cast<std::ptrdiff_t>(std::min(n, g_.seeds.size()))};
}

template <class What>
std::vector<std::vector<double>> study::by_seed(const contender& c, What&& what) const {
    std::vector<std::vector<double>> y;
    for (const std::uint64_t seed : seeds_of(c)) {
        y.emplace_back();
        for (const int k : g_.ks) y.back().push_back(what(at(c, k, seed)));
    }
    return y;
}
std::vector<std::vector<double>> study::gaps(const contender& c) const {
    return by_seed(c, [](const cell& x) { return 100 * x.gap_closed; });
}

const contender* study::find(const std::string& name) const {
    const auto found = std::ranges::find(g_.contenders, name, &contender::name);
    return found == g_.contenders.end() ? nullptr : &*found;
}

std::string study::tables() const {
    std::vector<double> x;
    for (const int k : g_.ks) x.push_back(std::log2(k + 1.0));
    const std::size_t last = g_.ks.size() - 1;
    std::vector<std::string> groups;
    for (const contender& c : g_.contenders)
        if (std::ranges::count(groups, c.group) == 0) groups.push_back(c.group);
    std::string t =
        fmt::format("Before: KL along its own responses {:.3f}, along the teacher's {:.3f}; grammatical {:.3f}.\n\n"
                    "## Gap closed, in percent\n\nMean over {} seeds ± standard error; slope: points for each "
                    "doubling of k + 1.\n",
                    w_.before.own, w_.before.on_teacher, w_.before.grammatical, g_.seeds.size());
    for (const std::string& group : groups) {
        std::vector<std::vector<std::string>> rows = {{group}};
        for (const int k : g_.ks) rows[0].push_back(fmt::format("k = {}", k));
        rows[0].push_back("slope");
        for (const contender& c : g_.contenders) {
            if (c.group != group) continue;
            const auto y = gaps(c);
            rows.push_back({c.says});
            for (std::size_t i = 0; i < x.size(); ++i) rows.back().push_back(told(mean_at(i, y), 1));
            rows.back().push_back(told(slope(x, y), 2));
        }
        t += fmt::format("\n{}", markdown(rows));
    }
    t += fmt::format(
        "\n## What staleness does\n\nMeans over seeds. Grammatical and forward KL after, at k = {} and {}; at "
        "k = {}: the 99th percentile of p/mu over what was learnt from, the share of it that was cut or left "
        "out, and the effective share of the prefixes.\n\n",
        g_.ks.front(), g_.ks.back(), g_.ks.back());
    std::vector<std::vector<std::string>> rows = {
        {"", "grammatical", "forward KL", "p/mu, p99", "left out", "prefixes"}};
    for (const contender& c : g_.contenders) {
        const auto of = [&](std::size_t i, auto member) { return mean_at(i, by_seed(c, member)).value; };
        const auto grammatical = [](const cell& y) { return y.after.grammatical; };
        const auto forward = [](const cell& y) { return y.after.forward; };
        const double p99 = of(last, [](const cell& y) { return y.ratio_p99; });
        rows.push_back({c.says, fmt::format("{:.3f}, {:.3f}", of(0, grammatical), of(last, grammatical)),
                        fmt::format("{:.3f}, {:.3f}", of(0, forward), of(last, forward)),
                        p99 > 0 ? fmt::format("{:.3g}", p99) : "-",
                        fmt::format("{:.3f}", of(last, [](const cell& y) { return y.left_out; })),
                        fmt::format("{:.3f}", of(last, [](const cell& y) { return y.prefix_share; }))});
    }
    return t + markdown(rows) + statements();
}

std::string study::statements() const {
    std::string t = "\n## Statements\n\nDifferences are within a seed, in points of gap closed, ± half of the 95 % "
                    "interval.\n\n";
    std::vector<double> x;
    for (const int k : g_.ks) x.push_back(std::log2(k + 1.0));
    const std::size_t last = g_.ks.size() - 1;
    if (const contender* c = find("hidden")) {
        const auto y = gaps(*c);
        const estimate s = slope(x, y);
        std::vector<std::vector<double>> apart; // a seed's prompts are the same at every k
        for (const auto& one : y) apart.push_back({one[last] - one[0]});
        const estimate d = mean_at(0, apart);
        t +=
            fmt::format("- hidden states, reverse KL: slope {:.2f} ± {:.2f}, {}; k = {} less k = {}: {:.2f} ± {:.2f}\n",
                        s.value, s.half_width(),
                        y.size() < 2                          ? "of one seed"
                        : std::abs(s.value) <= s.half_width() ? "flat"
                                                              : "not flat",
                        g_.ks.back(), g_.ks.front(), d.value, d.half_width());
        if (const contender* dense = find("dense")) {
            bool same = true;
            for (const int k : g_.ks)
                for (const std::uint64_t seed : seeds_of(*dense))
                    same &= at(*c, k, seed).weights == at(*dense, k, seed).weights;
            t += fmt::format("- hidden states and logits end in {} weights at every k\n", same ? "the same" : "OTHER");
        }
    }
    const auto against = [&](const std::string& a, const std::string& b, const char* verdict) {
        const contender *mine = find(a), *theirs = find(b);
        if (!mine || !theirs) return;
        auto y = gaps(*mine);
        const auto z = gaps(*theirs);
        for (std::size_t s = 0; s < y.size(); ++s)
            for (std::size_t i = 0; i < y[s].size(); ++i) y[s][i] -= z[s][i];
        bool holds = true;
        std::string values;
        for (std::size_t i = 0; i < x.size(); ++i) {
            const estimate e = mean_at(i, y);
            holds &= e.value + e.half_width() >= 0;
            values += fmt::format("{}{:.2f} ± {:.2f} (k = {})", i ? ", " : "", e.value, e.half_width(), g_.ks[i]);
        }
        t += fmt::format("- {} less {}: {}{}\n", mine->says, theirs->says, values,
                         *verdict && y.size() > 1 ? fmt::format(": {} {}", holds ? "nowhere" : "SOMEWHERE", verdict)
                                                  : std::string());
    };
    for (const contender& c : g_.contenders)
        if (c.name.starts_with("threshold")) against(c.name, "mc" + c.name.substr(9), "worse");
    for (const contender& c : g_.contenders)
        if (c.name.ends_with("_no_is")) against(c.name.substr(0, c.name.size() - 6), c.name, "");
    for (const char* name : {"mc1_theta_clip", "mc1_old", "mc1_old_clip", "mc1_decoupled", "mc1_m2po", "mc1_estr"})
        against("mc1", name, "");
    for (const contender& c : g_.contenders)
        if (c.name.ends_with("_rw")) against(c.name, c.name.substr(0, c.name.size() - 3), "");
    return t;
}

std::string study::plot(const std::string& directory) const {
    std::string script =
        "set terminal svg size 1200,900 dynamic background 'white' font 'Arial,12'\nset output 'staleness.svg'\n"
        "set multiplot layout 2,2 title 'Gap closed by staleness, percent; bars: standard error'\nset grid\n"
        "set key below maxrows 4\nset logscale x 2\nset xlabel 'versions since the rollout + 1'\n";
    const auto panel = [&](const char* title, const std::vector<std::string>& groups) {
        std::string plots;
        int line = 0;
        for (const contender& c : g_.contenders) {
            if (std::ranges::count(groups, c.group) == 0 || c.name == "dense") continue;
            const auto y = gaps(c);
            const std::string data = fmt::format("d_{}", c.name);
            script += fmt::format("${} << EOD\n", data);
            for (std::size_t i = 0; i < g_.ks.size(); ++i) {
                const estimate e = mean_at(i, y);
                script += fmt::format("{} {} {}\n", g_.ks[i] + 1, std::max(e.value, -20.0),
                                      std::isnan(e.error) ? 0 : e.error);
            }
            ++line;
            script += "EOD\n";
            plots += fmt::format("{}${} using 1:2:3 with yerrorlines lt {} dt {} lw 1.5 title \"{}\"",
                                 plots.empty() ? "" : ", ", data, (line - 1) % 8 + 1, (line - 1) / 8 + 1, c.says);
        }
        if (!plots.empty()) script += fmt::format("set title '{}' noenhanced\nplot {}\n", title, plots);
    };
    script += "set key noenhanced\n";
    panel("divergences: whole rows, and top ids of the teacher", {"divergences"});
    panel("surrogates of one draw", {"surrogates"});
    panel("drawn ids, with IS and without", {"drawn"});
    panel("supports, filters, controls (cut at -20)", {"supports", "controls"});
    const std::string file = directory + "/staleness.gp";
    trainer::write_file(file, script + "unset multiplot\n");
    return examples::run_gnuplot(directory, "staleness.gp");
}

} // namespace staleness_study
