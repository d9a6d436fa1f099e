// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/plots.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "gnuplot.hpp"
#include "settings/files.hpp"

namespace trainer {

std::string draw_plots(const std::string& run_directory, const nlohmann::json& evaluations, const std::string& run) {
    const std::string directory = run_directory + "/plots";
    make_directory(directory);

    // the curves, from the log
    std::map<std::string, std::string> loss;     // by stage
    std::vector<std::pair<long, double>> losses; // of distillation
    std::string accuracy, drafts;
    long last = 0;
    std::vector<std::pair<long, nlohmann::json>> choices; // steps of rollout by strategy, at steps of distillation
    std::set<std::string> strategies;
    std::istringstream log(read_file(run_directory + "/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
        const auto j = nlohmann::json::parse(line, nullptr, false);
        if (!j.is_object() || !j.contains("stage")) continue;
        const std::string stage = j["stage"];
        const auto number = [&](const char* key) {
            return j.contains(key) && j[key].is_number() ? fmt::format("{}", j[key].get<double>()) : std::string("nan");
        };
        if (j.contains("loss"))
            loss[stage] += fmt::format("{} {} {}\n", j["step"].get<long>(), number("loss"), number("kl"));
        if (stage == "distill" && j.contains("loss") && j["loss"].is_number())
            losses.emplace_back(j["step"].get<long>(), j["loss"].get<double>());
        if (stage == "distill") last = std::max(last, j["step"].get<long>());
        if (j.contains("accuracy") && stage == "distill")
            accuracy += fmt::format("{} {}\n", j["step"].get<long>(), number("accuracy"));
        const auto schedule = j.value("schedule", nlohmann::json::object());
        if (schedule.contains("speculation")) {
            // of steps without rollout, as the last under async, and of those without drafts, there is nothing to draw
            const auto& s = schedule["speculation"];
            const auto mean = [&](const char* key) {
                return s[key].is_number() ? fmt::format("{}", s[key].get<double>()) : std::string("nan");
            };
            if (s["tokens_per_step"].is_number())
                drafts += fmt::format("{} {} {}\n", j["step"].get<long>(), mean("accepted_per_step"),
                                      mean("tokens_per_step"));
        }
        if (!schedule.contains("speculation") || schedule["speculation"].value("choices", nlohmann::json()).empty())
            continue;
        choices.emplace_back(j["step"].get<long>(), schedule["speculation"]["choices"]);
        for (const auto& [name, steps] : choices.back().second.items()) strategies.insert(name);
    }
    std::string script = "set grid\nset key top right\n";
    const auto terminal = [&](const char* file, const char* title) {
        script += fmt::format("set terminal svg size 800,480 background rgb 'white'\nset output '{}'\n"
                              "set title \"{}\\n{}\" noenhanced\n",
                              file, title, run);
    };
    const auto data = [&](const std::string& name, const std::string& rows) {
        script += fmt::format("${} << EOD\n{}EOD\n", name, rows);
    };

    if (!loss.empty()) {
        std::string curves;
        for (const auto& [stage, rows] : loss) {
            data("loss_" + stage, rows);
            curves += fmt::format("{}$loss_{} using 1:2 with lines lw 2 title '{} loss'", curves.empty() ? "" : ", ",
                                  stage, stage);
            if (stage == "distill")
                curves += fmt::format(", $loss_{} using 1:3 with lines dt 2 title 'sampled KL'", stage);
        }
        if (const std::size_t window = losses.size() / 20; window > 1) { // a loss is one batch's
            std::string rows;
            double sum = 0;
            for (std::size_t i = 0; i < losses.size(); ++i) {
                sum += losses[i].second - (i >= window ? losses[i - window].second : 0);
                if (i + 1 >= window) rows += fmt::format("{} {}\n", losses[i].first, sum / static_cast<double>(window));
            }
            data("loss_mean", rows);
            curves += fmt::format(", $loss_mean using 1:2 with lines lw 3 title 'distill loss, mean of {}'", window);
        }
        terminal("loss.svg", "Loss");
        script += "set xlabel 'step of the stage'\nset ylabel 'nats'\nset logscale y\nset format y '%g'\nplot " +
                  curves + "\nunset logscale\n";
    }

    const auto value = [&](const char* who) {
        return evaluations.contains(who) ? evaluations[who].value("accuracy", 0.0) : 0.0;
    };
    const bool by_kl = evaluations.contains("before") && evaluations["before"].contains("kl_on_teacher");
    terminal("accuracy.svg",
             by_kl ? "Grammatical responses to held-out prompts" : "Greedy accuracy on held-out prompts");
    script += "set xlabel 'distillation step'\nset ylabel 'share correct'\nset yrange [0:1]\nset key bottom right\n";
    std::string curves = fmt::format("{} with lines dt 2 lw 2 title 'teacher'", value("teacher"));
    data("accuracy", fmt::format("0 {}\n", value("before")) + accuracy);
    curves += ", $accuracy using 1:2 with linespoints lw 2 title 'student'";
    if (evaluations.contains("after")) {
        data("after", fmt::format("{} {}\n", last, value("after")));
        curves += ", $after using 1:2 with points pt 7 ps 1.5 title 'student after'";
    }
    script += "plot " + curves + "\nunset yrange\n";

    std::string histograms;
    for (const char* who : {"teacher", "before", "after"}) {
        if (!evaluations.contains(who) || !evaluations[who].contains("lengths")) continue;
        std::map<int, int> count;
        for (const auto& length : evaluations[who]["lengths"]) ++count[length.get<int>() / 8 * 8];
        if (count.empty()) continue;
        // what nobody has is 0: a step needs neighbours
        for (int i = std::max(0, count.begin()->first - 8), last = count.rbegin()->first + 8; i <= last; i += 8)
            count[i];
        std::string rows;
        for (const auto& [length, n] : count) rows += fmt::format("{} {}\n", length, n);
        data(std::string("lengths_") + who, rows);
        histograms += fmt::format("{}$lengths_{} using 1:2 with histeps lw 2 title '{}'",
                                  histograms.empty() ? "" : ", ", who, who);
    }
    if (!histograms.empty()) {
        terminal("lengths.svg", by_kl ? "Lengths of responses" : "Lengths of greedy responses");
        script += "set xlabel 'tokens'\nset ylabel 'responses'\nset key top right\nset yrange [0:*]\nplot " +
                  histograms + "\n";
    }
    if (!drafts.empty()) {
        data("drafts", drafts);
        terminal("speculation.svg", "Drafted tokens that were followed, and tokens a step");
        script += "set xlabel 'distillation step'\nset ylabel 'tokens'\nset yrange [0:*]\nset key bottom right\nplot "
                  "$drafts using 1:2 with lines lw 2 title 'followed, of a sequence whose drafts were verified', "
                  "$drafts using 1:3 with lines lw 2 title 'written, of a sequence'\n";
    }
    if (strategies.size() > 1) { // boxes, each from 0 to its share and those before
        std::string rows, bands;
        for (const auto& [step, steps] : choices) {
            double all = 0, below = 0;
            for (const auto& [name, n] : steps.items()) all += n.get<double>();
            rows += fmt::format("{}", step);
            for (const std::string& name : strategies)
                rows += fmt::format(" {}", (below += steps.value(name, 0.0)) / std::max(1.0, all));
            rows += "\n";
        }
        std::size_t column = strategies.size() + 1;
        for (auto name = strategies.rbegin(); name != strategies.rend(); ++name, --column) // the highest first
            bands +=
                fmt::format("{}$choices using 1:{} with boxes title '{}'", bands.empty() ? "" : ", ", column, *name);
        data("choices", rows);
        terminal("choices.svg", "What steps of rollout were to do: drafter, depth/children/tokens to verify");
        script +=
            "set xlabel 'distillation step'\nset ylabel 'share of steps'\nset yrange [0:1]\nset key outside right\n"
            "set style fill solid 1.0\nplot " +
            bands + "\nset key inside\n";
    }
    if (const std::string schedule = run_directory + "/schedule.json"; std::filesystem::exists(schedule)) {
        const auto profile = nlohmann::json::parse(read_file(schedule)).value("running_profile", nlohmann::json());
        std::string rows;
        if (profile.contains("means"))
            for (std::size_t i = 0; i < profile["means"].size(); ++i)
                rows += fmt::format("{} {}\n", profile["span_seconds"].get<double>() * static_cast<double>(i),
                                    profile["means"][i].get<double>());
        if (!rows.empty()) {
            data("running", rows);
            terminal("running.svg", "Sequences that run: the long tail of each rollout");
            script += "set xlabel 'seconds of distillation'\nset ylabel 'sequences'\nset yrange [0:*]\nset key off\n"
                      "plot $running using 1:2 with steps lw 2\n";
        }
    }
    write_file(directory + "/plots.gp", script);
    return examples::run_gnuplot(directory, "plots.gp");
}

} // namespace trainer
