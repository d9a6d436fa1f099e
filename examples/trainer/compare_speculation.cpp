// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-speculation DIRECTORY [--worlds=preset,machine,virtual,adaptation] [--rounds=3] [--steps=40]: rollout with drafts
// beside rollout without, from one teacher, one warm student of 6 layers (`opd-train --preset speculative`) and one drafter
// trained for it.
//
//   preset    whole steps of distillation on this machine, by responses a step: the same final weights (their digest), and what each takes
//   machine   rollout alone, one thread, by how many sequences run at once: the long tail of a rollout is its first rows
//   virtual   rollout, and whole steps, with the costs of a GPU (--cost-* of opd-train, `gpu` below)
//   adaptation   if asked for: a small student that is distilled from little, with the drafter that it began with and with one
//             that learns while rollout idles (--adapt-drafter), in virtual time with those costs, ten times --steps
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
#include <sstream>
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

std::string drafter_in(const std::string& base, const arguments& settings) {
    const std::string drafter = base + "/checkpoints/drafter.ckpt";
    if (std::filesystem::exists(drafter)) return drafter;
    fmt::print("training a drafter, once\n");
    std::fflush(stdout);
    if (const exit_code code =
            train_drafter(parse_command_line(settings + arguments{"--run-dir=" + base, "--train-drafter"}));
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

// --- a student that moves ---------------------------------------------------------------------------------------------

// Steps whose rollout has a long tail: four workers, whose learner and teacher follow it.
const arguments moving = {"--preset=quick", "--quiet", "--student-max-steps=40"},
                long_tail = {"--driver=virtual",    "--rollout-workers=4",     "--slots=32",
                             "--speculate=learned", "--draft-depth=6",         "--draft-verify=6",
                             "--eval-prompts=64",   "--eval-samples=0",        "--eval-every=0",
                             "--log-every=1",       "--checkpoint-every=1000", "--drafter-ffn=96"},
                gpu_spot = {"--cost-adapt=2e-3", "--cost-adapt-row=1.8e-5"};

nlohmann::json schedule_in(const std::string& where) {
    return nlohmann::json::parse(read_file(where + "/schedule.json"));
}

// Mean over the last tenth of the steps of tokens that a sequence got of a pass.
double tokens_at_the_end(const std::string& where) {
    std::vector<double> all;
    std::istringstream lines(read_file(where + "/log.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        const auto j = nlohmann::json::parse(line);
        if (j.contains("schedule") && j["schedule"].contains("speculation"))
            all.push_back(j["schedule"]["speculation"]["tokens_per_step"].get<double>());
    }
    const std::size_t n = std::max<std::size_t>(1, all.size() / 10);
    double sum = 0;
    for (std::size_t i = all.size() - n; i < all.size(); ++i) sum += all[i];
    return sum / static_cast<double>(n);
}

// A drafter for a student, on held-out prompts.
struct judged_drafter {
    expected_acceptance expected;
    followed_drafts followed;
};
judged_drafter judged(const config& c, const any_task& task, const transformer<float>& student,
                      const std::shared_ptr<const draft_model>& d) {
    sampling o = sampling_of(c, task);
    o.speculate = {}, o.plan = {};
    std::vector<request> prompts;
    for (std::size_t i = 0; i < 64; ++i)
        prompts.push_back({(std::uint64_t{10} << 56) + i, task.prompt_tokens(task.held_out_problem(i))});
    opd::eigen_backend backend{.threads = threads_of(c)};
    const auto responses = roll_out(student, backend.team(), prompts, o);
    std::vector<const trajectory*> all;
    for (const trajectory& t : responses)
        if (t.response().size() > 1) all.push_back(&t);
    draft_model own = *d;
    return {drafter_trainer(c, student, own, backend).measure(all),
            follow_drafts(c, student, d, backend.team(), all, 3)};
}

// One run distils the student with a drafter that learns, and stops now and then; what it began with is judged beside it, on the same
// student. Two more say what drafts bring in each case, and a last one what slices delay where they change no drafter.
void compare_adaptation(const std::string& directory, int steps) {
    const std::string base = directory + "/moving", student = student_in(base, moving);
    const std::string frozen = drafter_in(base, moving + arguments{"--drafter-ffn=96", "--drafter-steps=200"});
    const arguments common = moving + long_tail + gpu + gpu_drafter +
                             arguments{"--start-from=" + student, "--draft-from=" + frozen,
                                       fmt::format("--steps={}", steps)},
                    learning = common + gpu_spot + arguments{"--adapt-drafter", "--adapt-slices=0"};
    const std::string adapted = directory + "/adapted", stays = directory + "/frozen", idle = directory + "/delayed";
    const config c = config_of(learning);
    const auto task = task_of(c);
    const auto first = std::make_shared<const draft_model>(load_drafter(frozen));
    transformer<float> model(c.student_model);
    fmt::print(
        "a student that moves, {} steps: drafts of its first drafter and of one that learns while rollout idles, "
        "on 64 held-out prompts\n{:>6}{:>10}{:>16}{:>9}{:>9}   accepted by depth, drafted with the target's noise\n",
        steps, "step", "drafter", "updates", "top 3", "tokens");
    constexpr int looks = 5;
    for (int look = 0; look <= looks; ++look) {
        std::int64_t updates = 0;
        std::shared_ptr<const draft_model> now = first;
        if (look > 0) {
            const int at = steps * look / looks, before = steps * (look - 1) / looks;
            train(learning + arguments{"--run-dir=" + adapted, look == 1 ? "--overwrite" : "--resume"},
                  look < looks ? at - before : 0);
            drafter_progress progress;
            now = std::make_shared<const draft_model>(load_drafter(adapted + "/checkpoints/drafter.ckpt", &progress));
            updates = progress.updates;
        }
        model.weights = state_in(look > 0 ? adapted + "/checkpoints/latest.ckpt" : student).student_weights;
        model.weights_changed();
        for (const auto& [name, d] : {std::pair{"as it was", first}, {"adapted", now}}) {
            const judged_drafter j = judged(c, *task, model, d);
            fmt::print("{:>6}{:>16}{:>10}{:>9.3f}{:>9.2f}  ", steps * look / looks, name, d == first ? 0 : updates,
                       j.expected.top_3, 1 + j.followed.length);
            for (const double share : j.followed.by_depth) fmt::print("{:>7.3f}", share);
            fmt::print("\n");
        }
        std::fflush(stdout);
    }
    train(common + arguments{"--run-dir=" + stays, "--overwrite"});
    train(learning + arguments{"--run-dir=" + idle, "--overwrite", "--adapt-rate=1e-30"});
    if (state_in(adapted + "/checkpoints/distill.ckpt").student_weights !=
        state_in(stays + "/checkpoints/distill.ckpt").student_weights)
        throw failure(exit_numeric, "the student depends on its drafter");
    const double mine = tokens_at_the_end(adapted), theirs = tokens_at_the_end(stays);
    const auto told = schedule_in(adapted)["speculation"]["drafter"], delayed = schedule_in(idle);
    fmt::print("tokens a pass in the last tenth of the steps: {:.2f} adapted, {:.2f} as it was: {:.2f} times\n", mine,
               theirs, mine / theirs);
    fmt::print(
        "of what rollout leaves idle {:.3f} is used; slices that change no drafter make the run {:.2f} % longer; "
        "its drafter is {:.2f} versions old in the mean\n",
        delayed["speculation"]["drafter"]["idle_used"].get<double>(),
        100 * (delayed["wall_seconds"].get<double>() / schedule_in(stays)["wall_seconds"].get<double>() - 1),
        told["age"].get<double>());
}

void compare(const std::string& directory, const std::set<std::string>& worlds, int rounds, int steps) {
    if (worlds.contains("adaptation")) compare_adaptation(directory, 10 * steps);
    if (worlds.size() == worlds.count("adaptation")) return;
    const std::string base = directory + "/base", student = student_in(base, preset),
                      drafter = drafter_in(base, preset);
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
    comparison_options(app, directory, worlds, {"preset", "machine", "virtual", "adaptation"});
    app.add_option("--rounds", rounds)->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
    return comparison_main(app, argc, argv, [&] { compare(directory, worlds, rounds, steps); });
}
