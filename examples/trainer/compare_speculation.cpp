// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-speculation DIRECTORY [--worlds=preset,machine,virtual] [--rounds=3] [--steps=40]: rollout with drafts beside rollout
// without, from one teacher, one warm student of 6 layers (`opd-train --preset speculative`) and one drafter trained for it.
//
//   preset    whole steps of distillation on this machine, by responses a step: the same final weights (their digest), and what each takes
//   machine   rollout alone, one thread, by how many sequences run at once: the long tail of a rollout is its first rows
//   virtual   rollout, and whole steps, with the costs of a GPU (--cost-* of opd-train, `gpu` below)
//
// Teacher, student and drafter are trained once and kept in DIRECTORY/base; plots are DIRECTORY/*.svg. Contenders take turns within a
// round; figures are medians over rounds of tokens a second, ratios within a round: median, smallest, largest. `off again` shows what
// such a ratio is worth on this machine.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "checkpoint.hpp"
#include "comparisons.hpp"
#include "drafter_training.hpp"
#include "gnuplot.hpp"
#include "rollout.hpp"
#include "stages.hpp"

namespace {

using namespace trainer;

const arguments preset = {"--preset=speculative", "--quiet"};

struct way {
    std::string name;
    arguments settings;
};

run_state state_in(const std::string& checkpoint) {
    std::string settings;
    return load_checkpoint(checkpoint, settings);
}

std::string digest(const std::vector<float>& weights) {
    return hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)});
}

std::string drafter_in(const std::string& base) {
    const std::string drafter = base + "/checkpoints/drafter.ckpt";
    if (std::filesystem::exists(drafter)) return drafter;
    fmt::print("training a drafter, once\n");
    std::fflush(stdout);
    if (const exit_code code =
            train_drafter(parse_command_line(preset + arguments{"--run-dir=" + base, "--train-drafter"}));
        code != exit_ok)
        throw failure(code, "the training of the drafter was interrupted");
    return drafter;
}

std::string range(const std::vector<double>& x) {
    const spread s = of(x);
    return fmt::format("{:.2f} ({:.2f}-{:.2f})", s.median, s.least, s.most);
}

void compare_steps(const std::string& directory, const std::string& student, const std::vector<way>& ways, int rounds,
                   int steps) {
    const std::string& off = ways.front().name;
    fmt::print("whole steps, {} a run: times as fast as {}\n{:<14}{:>10}{:>9}{:>19}{:>19}{:>15}{:>13}    {}\n", steps,
               off, "", "responses", "seconds", "step", "its rollout", "rollout's part", "tokens/step",
               "final weights");
    for (const int responses : {2, 4, 8, 16}) {
        std::map<std::string, std::vector<double>> seconds, rollout;
        std::map<std::string, nlohmann::json> last;
        std::map<std::string, std::string> made;
        for (int round = 0; round < rounds; ++round)
            for (const way& w : ways) {
                const std::string where = directory + "/steps-" + std::to_string(&w - ways.data());
                const auto report =
                    report_of(where, preset + w.settings +
                                         arguments{"--start-from=" + student, fmt::format("--steps={}", steps),
                                                   fmt::format("--prompts={}", responses), "--eval-prompts=32"});
                seconds[w.name].push_back(report["schedule"]["wall_seconds"]);
                rollout[w.name].push_back(report["schedule"]["busy_seconds"]["rollout"]);
                last[w.name] = report["schedule"];
                made[w.name] = digest(state_in(where + "/checkpoints/latest.ckpt").student_weights);
            }
        for (const way& w : ways) {
            std::vector<double> step, its_rollout, part;
            for (std::size_t r = 0; r < seconds[w.name].size(); ++r) {
                step.push_back(seconds[off][r] / seconds[w.name][r]);
                its_rollout.push_back(rollout[off][r] / rollout[w.name][r]);
                part.push_back(rollout[w.name][r] / seconds[w.name][r]);
            }
            const auto& s = last[w.name];
            fmt::print("{:<14}{:>10}{:>9.1f}{:>19}{:>19}{:>15.2f}{:>13.2f}    {}\n", w.name, responses,
                       of(seconds[w.name]).median, range(step), range(its_rollout), of(part).median,
                       s.contains("speculation") ? s["speculation"]["tokens_per_step"].get<double>() : 1, made[w.name]);
            if (made[w.name] != made[off]) throw failure(exit_numeric, w.name + " ends in other weights than " + off);
        }
        std::fflush(stdout);
    }
}

// Tokens a second of one thread that runs `batch` sequences at once.
double machine_rate(const transformer<float>& student, const any_task& task, const config& c, index_t batch,
                    std::size_t round) {
    sampling o = sampling_of(c, task);
    o.slots = static_cast<int>(batch);
    std::vector<request> prompts;
    const auto count = static_cast<std::uint64_t>(std::max<index_t>(8, 3 * batch));
    for (std::uint64_t i = 0; i < count; ++i)
        prompts.push_back(request_of(task, c.run.seed, (std::uint64_t{9} << 56) + round * 4096 + i));
    opd::thread_team one(1);
    const auto begin = std::chrono::steady_clock::now();
    const auto all = roll_out(student, one, prompts, o);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    double tokens = 0;
    for (const trajectory& t : all) tokens += static_cast<double>(t.response().size());
    return tokens / seconds;
}

config config_of(const arguments& a) {
    const config c = parse_command_line(a).settings;
    return with_task_shapes(c, *task_of(c));
}

constexpr std::array<index_t, 6> batches = {1, 2, 4, 8, 16, 32};

// What is measured of ways by batch, in rounds: [batch][way][round].
using grid = std::array<std::vector<std::vector<double>>, batches.size()>;

// The first way is what the others are compared with. Writes DIRECTORY/`file`.svg.
void print(const std::string& directory, const std::string& file, const std::string& title,
           const std::vector<way>& ways, const grid& rates) {
    fmt::print("{}: tokens/s of {}, times that of the others\n{:>6}{:>10}", title, ways.front().name, "batch", "");
    for (std::size_t w = 1; w < ways.size(); ++w) fmt::print("{:>19}", ways[w].name);
    fmt::print("{:>22}\n", "auto/best fixed");
    std::string rows;
    for (std::size_t b = 0; b < batches.size(); ++b) {
        fmt::print("{:>6}{:>10.0f}", batches[b], of(rates[b][0]).median);
        rows += fmt::format("{} 1", batches[b]);
        double best = 1, chosen = 0;
        for (std::size_t w = 1; w < ways.size(); ++w) {
            std::vector<double> ratio;
            for (std::size_t r = 0; r < rates[b][w].size(); ++r) ratio.push_back(rates[b][w][r] / rates[b][0][r]);
            const double median = of(ratio).median;
            fmt::print("{:>19}", ratio.size() > 1 ? range(ratio) : fmt::format("{:.2f}", median));
            rows += fmt::format(" {}", median);
            double& most = ways[w].name == "auto" ? chosen : best;
            most = std::max(most, median);
        }
        fmt::print("{:>22.2f}\n", chosen / best);
        rows += "\n";
    }
    std::fflush(stdout);
    std::string lines;
    for (std::size_t w = 0; w < ways.size(); ++w)
        lines += fmt::format("{}$rates using 1:{} with linespoints lw 2 {} title '{}'", w == 0 ? "" : ", ", w + 2,
                             ways[w].name == "auto" ? "lc rgb '#d02090'" : "", ways[w].name);
    write_file(directory + "/" + file + ".gp",
               fmt::format("set terminal svg size 800,480 background rgb 'white'\nset output '{}.svg'\nset title '{}'\n"
                           "set grid\nset logscale x 2\nset xlabel 'sequences at once'\n"
                           "set ylabel 'times as many tokens a second as without drafts'\nset yrange [0:*]\n"
                           "$rates << EOD\n{}EOD\nplot {}\n",
                           file, title, rows, lines));
    if (const std::string problem = examples::run_gnuplot(directory, file + ".gp"); !problem.empty())
        fmt::print(stderr, "no plot: {}\n", problem);
}

// A decoding step reads a model of 7 billion weights in 8 ms and computes a row of it in 75 us; a drafter of one layer, with the model's
// head, is a thirteenth of it; a teacher of four times the size scores; and the learner computes three times a row.
const arguments gpu = {"--cost-step=8e-3", "--cost-step-row=7.5e-5", "--cost-score-row=3e-4",
                       "--cost-train-row=2.25e-4"},
                gpu_drafter = {"--cost-draft=6e-4", "--cost-draft-row=6e-6"};

// Response tokens over the seconds of rollout, and over all.
std::pair<double, double> virtual_rates(const std::string& directory, const std::string& student, const way& w,
                                        index_t batch) {
    const bool learned = std::any_of(w.settings.begin(), w.settings.end(),
                                     [](const std::string& a) { return a.starts_with("--draft-from="); });
    const auto report = report_of(
        directory + "/virtual",
        preset + w.settings + gpu + (learned ? gpu_drafter : arguments{}) +
            arguments{"--start-from=" + student, fmt::format("--steps={}", batch > 4 ? 12 : 16),
                      fmt::format("--prompts={}", std::max<index_t>(8, 2 * batch)), "--eval-prompts=32",
                      "--driver=virtual", "--rollout-workers=1", fmt::format("--slots={}", batch)})["schedule"];
    const double tokens = report["response_tokens"];
    return {tokens / report["busy_seconds"]["rollout"].get<double>(), tokens / report["wall_seconds"].get<double>()};
}

void compare(const std::string& directory, const std::set<std::string>& worlds, int rounds, int steps) {
    const std::string base = directory + "/base", student = student_in(base, preset), drafter = drafter_in(base);
    const arguments from = {"--draft-from=" + drafter};
    const auto ngram = [](int depth) {
        return way{fmt::format("ngram {}", depth), {"--speculate=ngram", fmt::format("--draft-depth={}", depth)}};
    };
    const auto learned = [&](int depth) {
        return way{fmt::format("learned {}", depth),
                   arguments{"--speculate=learned", fmt::format("--draft-depth={}", depth)} + from};
    };
    const way off{"off", {}}, again{"off again", {}}, best{"auto", arguments{"--speculate=auto"} + from};
    if (worlds.contains("preset"))
        compare_steps(directory, student,
                      {off, again, ngram(3), learned(6), {"auto, ngram", {"--speculate=auto"}}, best}, rounds, steps);
    const std::vector<way> all = {off, again, ngram(2), ngram(4), ngram(8), learned(2), learned(4), learned(8), best};
    if (worlds.contains("machine")) {
        const config c = config_of(preset);
        const auto task = task_of(c);
        transformer<float> model(c.student_model);
        model.weights = state_in(student).student_weights;
        model.weights_changed();
        grid rates;
        for (std::size_t b = 0; b < batches.size(); ++b) {
            rates[b].resize(all.size());
            for (int round = 0; round < rounds; ++round)
                for (std::size_t w = 0; w < all.size(); ++w)
                    rates[b][w].push_back(machine_rate(model, *task, config_of(preset + all[w].settings), batches[b],
                                                       static_cast<std::size_t>(round)));
        }
        print(directory, "machine", "Rollout on this machine, one thread", all, rates);
    }
    if (worlds.contains("virtual")) {
        std::vector<way> timed = all; // whatever the machine does: off is off
        timed.erase(timed.begin() + 1);
        grid rollout, step;
        for (std::size_t b = 0; b < batches.size(); ++b)
            for (const way& w : timed) {
                const auto [r, s] = virtual_rates(directory, student, w, batches[b]);
                rollout[b].push_back({r}), step[b].push_back({s});
            }
        print(directory, "virtual-rollout", "Rollout with the costs of a GPU, in virtual time", timed, rollout);
        print(directory, "virtual-step", "Whole steps with the costs of a GPU, in virtual time", timed, step);
    }
}

} // namespace

int main(int argc, char** argv) {
    CLI::App app("Rollout with drafts beside rollout without, from one teacher, one warm student and one drafter.");
    std::string directory;
    std::set<std::string> worlds = {"preset", "machine", "virtual"};
    int rounds = 3, steps = 40;
    comparison_options(app, directory, worlds, {"preset", "machine", "virtual"});
    app.add_option("--rounds", rounds)->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
    return comparison_main(app, argc, argv, [&] { compare(directory, worlds, rounds, steps); });
}
