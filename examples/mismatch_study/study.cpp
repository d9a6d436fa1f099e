// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "study.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <mutex>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "at_once.hpp"
#include "gnuplot.hpp"
#include "numbers.hpp"
#include "settings/files.hpp"

namespace mismatch_study {

namespace {

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

double mean_of(const std::vector<double>& x) {
    double sum = 0;
    for (const double one : x) sum += one;
    return sum / static_cast<double>(x.size());
}

const choice* named(const std::vector<choice>& all, const std::string& name) {
    const auto found = std::ranges::find(all, name, &choice::name);
    return found == all.end() ? nullptr : &*found;
}

} // namespace

std::string header() { return fmt::format("engine,treatment,seed,step,{},weights", fmt::join(figure_names, ",")); }

std::string line_of(const told_window& w) {
    return fmt::format("{},{},{},{},{},{}", w.engine, w.treatment, w.seed, w.what.step, fmt::join(w.what.x, ","),
                       w.what.weights);
}

told_window window_of(const std::string& line) {
    std::vector<std::string> f;
    std::stringstream in(line);
    for (std::string one; std::getline(in, one, ',');) f.push_back(one);
    const auto refuse = [&](const std::string& what) {
        throw trainer::failure(trainer::exit_input, fmt::format("windows.csv: {} in '{}'", what, line));
    };
    constexpr std::size_t fields = 5 + figure::count;
    if (f.size() != fields) refuse(fmt::format("{} fields for {}", f.size(), fields));
    const auto read = [&]<class T>(T& to, const std::string& text, const std::optional<T>& value) {
        if (!value) refuse(fmt::format("'{}' is no number", text));
        to = *value;
    };
    told_window w{.engine = f[0], .treatment = f[1], .what = {}};
    read(w.seed, f[2], integer_of<std::uint64_t>(f[2])), read(w.what.step, f[3], integer_of<int>(f[3]));
    for (std::size_t i = 0; i < figure::count; ++i) read(w.what.x[i], f[4 + i], number_of(f[4 + i]));
    w.what.weights = f.back();
    return w;
}

double pooled_error(const std::vector<std::vector<double>>& lists) {
    double squares = 0, freedom = 0;
    for (const auto& list : lists) {
        const double mean = mean_of(list);
        for (const double x : list) squares += (x - mean) * (x - mean);
        freedom += static_cast<double>(list.size()) - 1;
    }
    if (freedom == 0) return std::numeric_limits<double>::quiet_NaN();
    return std::sqrt(squares / freedom / static_cast<double>(lists.front().size()));
}

study::study(const world& w, grid g, const std::string& directory, int threads) : w_(w), g_(std::move(g)) {
    const auto& weights = w.student.weights;
    const std::string own =
        fmt::format("{}\n{} windows\n{}\n", trainer::results_json(w.settings).dump(), g_.windows,
                    trainer::hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)}));
    const std::string cells = directory + "/windows.csv", settings = directory + "/settings.txt";
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
        if (line != header()) throw trainer::failure(trainer::exit_input, cells + ": begins with other columns");
        while (std::getline(in, line)) {
            told_window one = window_of(line);
            cells_[{one.engine, one.treatment, one.seed}].push_back(std::move(one.what));
        }
        std::erase_if(cells_, [&](const auto& c) { return std::ssize(c.second) != g_.windows; });
    }
    std::vector<std::tuple<const choice*, const choice*, std::uint64_t>> missing;
    for (const std::uint64_t seed : g_.seeds)
        for (const choice& t : g_.treatments)
            for (const choice& e : g_.engines)
                if (!cells_.contains({e.name, t.name, seed})) missing.push_back({&e, &t, seed});
    std::mutex mutex; // of the cells
    examples::at_once(threads, missing.size(), [&](std::size_t i) {
        const auto& [e, t, seed] = missing[i];
        std::vector<window> done = run_cell(w, *e, *t, seed, g_.windows);
        const std::lock_guard lock(mutex);
        fmt::print(stderr, "{:>4}/{} {:<12} {:<16} seed {} accuracy {:.4f}\n", i + 1, missing.size(), e->name, t->name,
                   seed, done.back().x[figure::accuracy]);
        cells_[{e->name, t->name, seed}] = std::move(done);
        trainer::write_file(cells, csv());
    });
    trainer::write_file(cells, csv());
}

// In the order of the grid, then whatever the file had beside it.
std::string study::csv() const {
    std::string text = header() + "\n";
    const auto add = [&](const place& where, const std::vector<window>& cell) {
        const auto& [engine, treatment, seed] = where;
        for (const window& one : cell) text += line_of({engine, treatment, seed, one}) + "\n";
    };
    auto left = cells_;
    for (const choice& t : g_.treatments)
        for (const choice& e : g_.engines)
            for (const std::uint64_t seed : g_.seeds)
                if (const auto found = left.extract(place{e.name, t.name, seed})) add(found.key(), found.mapped());
    for (const auto& [where, cell] : left) add(where, cell);
    return text;
}

template <class What>
std::vector<double> study::by_seed(const choice& engine, const choice& treatment, What&& what) const {
    std::vector<double> y;
    for (const std::uint64_t seed : g_.seeds) y.push_back(what(at(engine, treatment, seed)));
    return y;
}

double study::mean(const choice& engine, const choice& treatment, figure::id of) const {
    return mean_of(by_seed(engine, treatment, [of](const std::vector<window>& cell) {
        double sum = 0;
        for (const window& one : cell) sum += one.x[of];
        return sum / static_cast<double>(cell.size());
    }));
}

// Treatments by engines; the error is pooled over a row.
template <class What>
std::string study::table(const std::string& corner, What&& what, int digits) const {
    std::vector<std::vector<std::string>> rows = {{corner}};
    for (const choice& e : g_.engines) rows[0].push_back(e.says);
    rows[0].push_back("±");
    for (const choice& t : g_.treatments) {
        rows.push_back({t.says});
        std::vector<std::vector<double>> lists;
        for (const choice& e : g_.engines) {
            lists.push_back(by_seed(e, t, what));
            rows.back().push_back(fmt::format("{:.{}f}", mean_of(lists.back()), digits));
        }
        const double error = pooled_error(lists);
        rows.back().push_back(std::isnan(error) ? "-" : fmt::format("{:.{}f}", error, digits));
    }
    return markdown(rows);
}

std::string study::tables() const {
    const double before = w_.before.accuracy, gap = w_.of_teacher.accuracy - before;
    std::string t = fmt::format("Before: accuracy {:.3f}, KL to the teacher {:.4f}; the teacher's accuracy {:.3f}.\n\n"
                                "## Gap closed, in percent\n\nAccuracy of greedy answers of the exact model; mean over "
                                "{} seeds, ±: the standard error of an entry, pooled over its row.\n\n",
                                before, w_.before.kl, w_.of_teacher.accuracy, g_.seeds.size());
    if (!(gap > 0))
        t += "There is none: the student before is not below the teacher.\n";
    else
        t += table(
            "gap closed, %",
            [&](const std::vector<window>& c) { return 100 * (c.back().x[figure::accuracy] - before) / gap; }, 1);
    t += "\n## KL to the teacher after, in 1e-3 nats a token\n\n";
    t += table(
        "KL", [](const std::vector<window>& c) { return 1000 * c.back().x[figure::kl]; }, 2);
    t += "\n## Rewards of rollout, in percent\n\nShare of right answers of rollout itself, over the last window.\n\n";
    t += table(
        "right, %", [](const std::vector<window>& c) { return 100 * c.back().x[figure::reward]; }, 1);
    const auto over = [](figure::id of, double times) {
        return [=](const std::vector<window>& c) {
            double sum = 0;
            for (const window& one : c) sum += times * one.x[of];
            return sum / static_cast<double>(c.size());
        };
    };
    t += "\n## What is left out, in percent of the tokens\n\nRejected with their sequence, or masked:\n\n";
    t += table("rejected, %", over(figure::rejected, 100), 2);
    t += "\nCut by PPO's clip:\n\n";
    t += table("clipped, %", over(figure::clipped, 100), 2);

    t += "\n## The mismatch\n\nOf the runs with the first treatment, over all windows; the largest of all seeds.\n\n";
    const choice& first = g_.treatments.front();
    std::vector<std::vector<std::string>> rows = {
        {"", "mean δ", "mean size of δ", "99 % of it", "largest", "δ = 0, %", "argmax flips, %", "K3(r_corr)"}};
    for (const choice& e : g_.engines) {
        const auto of = [&](figure::id f) { return mean(e, first, f); };
        double most = 0;
        for (const std::uint64_t seed : g_.seeds)
            for (const window& one : at(e, first, seed)) most = std::max(most, one.x[figure::delta_max]);
        rows.push_back({e.says, fmt::format("{:.1e}", of(figure::delta_mean)),
                        fmt::format("{:.1e}", of(figure::delta_abs)), fmt::format("{:.1e}", of(figure::delta_p99)),
                        fmt::format("{:.1e}", most), fmt::format("{:.1f}", 100 * of(figure::exact)),
                        fmt::format("{:.3f}", 100 * of(figure::flips)), fmt::format("{:.1e}", of(figure::k3_corr))});
    }
    t += markdown(rows);

    t += "\n## Estimators of KL, and contributions by the sign of A\n\nr is r_train under recompute, r_rollout under "
         "bypass. C(r) = -(r - 1) A.\n\n";
    rows = {{"", "K1(r)", "K3(r)", "C(r), A > 0", "C(r), A < 0", "C(r_rollout), A > 0", "C(r_rollout), A < 0"}};
    for (const char* name : {"recompute", "bypass"})
        if (const choice* of = named(g_.treatments, name))
            for (const choice& e : g_.engines) {
                const bool train = of->name == "recompute";
                const auto m = [&](figure::id f) { return fmt::format("{:.2e}", mean(e, *of, f)); };
                rows.push_back({of->says + ", " + e.says, m(train ? figure::k1_train : figure::k1_rollout),
                                m(train ? figure::k3_train : figure::k3_rollout),
                                m(train ? figure::c_train_positive : figure::c_rollout_positive),
                                m(train ? figure::c_train_negative : figure::c_rollout_negative),
                                m(figure::c_rollout_positive), m(figure::c_rollout_negative)});
            }
    return t + markdown(rows);
}

std::string study::plot(const std::string& directory) const {
    std::string script = "set terminal svg size 1200,800 dynamic background 'white' font 'Arial,12'\nset grid\n"
                         "set key below noenhanced\nset xlabel 'step'\n";
    int data = 0;
    struct line {
        const choice *engine, *treatment;
        figure::id of;
        std::string says;
    };
    const auto panel = [&](const std::string& title, const std::vector<line>& lines, bool log = false) {
        std::string plots;
        for (const line& l : lines) {
            script += fmt::format("$d{} << EOD\n", ++data);
            for (std::size_t i = 0; i < static_cast<std::size_t>(g_.windows); ++i) {
                const std::vector<double> y =
                    by_seed(*l.engine, *l.treatment, [&](const std::vector<window>& c) { return c[i].x[l.of]; });
                script += fmt::format("{} {}\n", at(*l.engine, *l.treatment, g_.seeds.front())[i].step, mean_of(y));
            }
            script += "EOD\n";
            const auto number = static_cast<int>(&l - lines.data());
            plots += fmt::format("{}$d{} with linespoints lt {} dt {} lw 1.5 ps 0.4 title \"{}\"",
                                 plots.empty() ? "" : ", ", data, number % 8 + 1, number / 8 + 1, l.says);
        }
        if (plots.empty()) return;
        script +=
            fmt::format("{} logscale y\nset title '{}' noenhanced\nplot {}\n", log ? "set" : "unset", title, plots);
    };
    const auto picture = [&](const char* name, const char* title, const auto& panels) {
        script += fmt::format("set output '{}.svg'\nset multiplot layout 2,2 title '{}'\n", name, title);
        panels();
        script += "unset multiplot\n";
    };
    const auto with = [&](const char* treatment, figure::id of, std::vector<line> so_far = {}, const char* says = "") {
        if (const choice* t = named(g_.treatments, treatment))
            for (const choice& e : g_.engines) so_far.push_back({&e, t, of, e.says + says});
        return so_far;
    };
    picture("figure2", "REINFORCE: engines of rollout (VeXact, figure 2)", [&] {
        panel("right answers of rollout", with("reinforce", figure::reward));
        panel("held-out accuracy", with("reinforce", figure::accuracy));
        panel("mean of delta", with("reinforce", figure::delta_mean));
        panel("gradient norm", with("reinforce", figure::gradient_norm), true);
    });
    picture("figure3", "recompute and bypass (VeXact, figure 3)", [&] {
        for (const auto& [title, of] :
             {std::pair{"right answers of rollout", figure::reward}, std::pair{"held-out accuracy", figure::accuracy},
              std::pair{"loss", figure::loss}, std::pair{"gradient norm", figure::gradient_norm}})
            panel(title, with("bypass", of, with("recompute", of, {}, ", recompute"), ", bypass"),
                  of == figure::gradient_norm);
    });
    picture("figure4", "K1 and K3 of the ratio in the loss (VeXact, figure 4)", [&] {
        panel("recompute: K1(r_train)", with("recompute", figure::k1_train));
        panel("recompute: K3(r_train)", with("recompute", figure::k3_train));
        panel("bypass: K1(r_rollout)", with("bypass", figure::k1_rollout));
        panel("bypass: K3(r_rollout)", with("bypass", figure::k3_rollout));
    });
    picture("figure5", "recompute: C(r) = -(r - 1) A by the sign of A (VeXact, figure 5)", [&] {
        panel("C(r_train), A > 0", with("recompute", figure::c_train_positive));
        panel("C(r_train), A < 0", with("recompute", figure::c_train_negative));
        panel("C(r_rollout), A > 0", with("recompute", figure::c_rollout_positive));
        panel("C(r_rollout), A < 0", with("recompute", figure::c_rollout_negative));
    });
    // every treatment with the engine that is furthest off, beside the exact one
    const choice* worst = &g_.engines.front();
    for (const choice& e : g_.engines)
        if (mean(e, g_.treatments.front(), figure::k3_corr) > mean(*worst, g_.treatments.front(), figure::k3_corr))
            worst = &e;
    const std::string title = fmt::format("corrections of {} (VeXact, figure 6)", worst->says);
    picture("figure6", title.c_str(), [&] {
        for (const auto& [says, of] :
             {std::pair{"right answers of rollout", figure::reward}, std::pair{"held-out accuracy", figure::accuracy},
              std::pair{"loss", figure::loss}, std::pair{"rejected share", figure::rejected}}) {
            std::vector<line> lines;
            if (const choice* t = named(g_.treatments, "recompute"))
                lines.push_back({&g_.engines.front(), t, of, "exact, recompute"});
            for (const choice& t : g_.treatments) lines.push_back({worst, &t, of, t.says});
            panel(says, lines);
        }
    });
    trainer::write_file(directory + "/figures.gp", script);
    return examples::run_gnuplot(directory, "figures.gp");
}

} // namespace mismatch_study
