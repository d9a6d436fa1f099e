// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-speculation DIRECTORY [--worlds=preset,machine,virtual,…] [--rounds=3]
// [--steps=40]: rollout with drafts beside rollout without, from one teacher, one warm student of 6 layers (`opd-train
// --preset speculative`) and one drafter trained for it.
//
//   preset    whole steps of distillation on this machine, by responses a step: the same final weights (their digest),
//             and what each takes
//   machine   rollout alone, one thread, by how many sequences run at once: the long tail of a rollout is its first
//             rows
//   virtual   rollout, and whole steps, with the costs of a GPU (--cost-* of opd-train, `gpu` below)
// and, if asked for:
//   drafters  a narrow student of 6 layers: drafters of every loss, each trained for 5 times --steps updates on the
//             same responses: tokens a pass, by depth and in tokens a second with those costs, and what an update
//             costs; then what OSD adds (tables 7 and 8 of TLT in form)
//   adaptation   a small student that is distilled from little, with the drafter that it began with and with one that
//             learns while rollout idles (--adapt-drafter), in virtual time with those costs, 5 times --steps (figures
//             15 and 16 in form); then how much of the idle time is used, and what that delays
//   slices    a slice of a drafter's training packed and padded, what a checkpoint holds its worker up for (figure 17
//             in form), and what slices in hand hold rollout up for on threads
//   running, strategies, whole-steps   compare_rollouts.hpp
//
// Teacher, student and drafter are trained once and kept in DIRECTORY/base (moving, deep); plots are DIRECTORY/*.svg.
// Contenders take turns within a round; figures are medians over rounds of tokens a second, ratios within a round:
// median, smallest, largest. `off again` shows what such a ratio is worth on this machine.
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

#include "gnuplot.hpp"
#include "pipeline/rollout.hpp"
#include "schedule/stages.hpp"
#include "studies/compare_rollouts.hpp"
#include "studies/speculation_ways.hpp"

namespace {

using namespace trainer;

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

// Response tokens over the seconds of rollout, and over all.
std::pair<double, double> virtual_rates(const std::string& directory, const std::string& student, const way& w,
                                        index_t batch, const arguments& settings = preset) {
    const bool learned = std::any_of(w.settings.begin(), w.settings.end(),
                                     [](const std::string& a) { return a.starts_with("--draft-from="); });
    const auto report = report_of(
        directory + "/virtual",
        settings + w.settings + gpu + (learned ? gpu_drafter : arguments{}) +
            arguments{"--start-from=" + student, fmt::format("--steps={}", batch > 4 ? 12 : 16),
                      fmt::format("--prompts={}", std::max<index_t>(8, 2 * batch)), "--eval-prompts=32",
                      "--driver=virtual", "--rollout-workers=1", fmt::format("--slots={}", batch)})["schedule"];
    const double tokens = report["response_tokens"];
    return {tokens / report["busy_seconds"]["rollout"].get<double>(), tokens / report["wall_seconds"].get<double>()};
}

// --- a student that moves --------------------------------------------------------------------------------------------

// Steps whose rollout has a long tail: four workers, whose learner and teacher follow it.
const arguments long_tail = {"--driver=virtual",    "--rollout-workers=4",     "--slots=32",
                             "--speculate=learned", "--draft-depth=6",         "--draft-verify=6",
                             "--eval-prompts=64",   "--eval-samples=0",        "--eval-every=0",
                             "--log-every=1",       "--checkpoint-every=1000", "--drafter-ffn=96"};

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

// A student's responses to held-out prompts, or to training prompts.
std::vector<trajectory> responses_of(const config& c, const any_task& task, const transformer<float>& student,
                                     std::size_t count, bool held_out) {
    sampling o = sampling_of(c, task);
    o.speculate = {}, o.plan = {};
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t sample = (std::uint64_t{held_out ? 10u : 11u} << 56) + i;
        prompts.push_back({sample, task.prompt_tokens(held_out ? task.held_out_problem(static_cast<std::size_t>(i))
                                                               : task.training_problem(c.run.seed, sample))});
    }
    opd::thread_team threads(threads_of(c));
    auto all = roll_out(student, threads, prompts, o);
    std::erase_if(all, [](const trajectory& t) { return t.response().size() < 2; });
    return all;
}

std::vector<const trajectory*> pointers(const std::vector<trajectory>& all) {
    std::vector<const trajectory*> r;
    for (const trajectory& t : all) r.push_back(&t);
    return r;
}

// A drafter for a student, on responses of its own.
struct judged_drafter {
    expected_acceptance expected;
    followed_drafts followed;
    double tokens() const { return 1 + followed.length; } // a pass
};
judged_drafter judged(const config& c, const transformer<float>& student, const std::shared_ptr<const draft_model>& d,
                      const std::vector<trajectory>& responses) {
    opd::cpu_backend backend{.threads = threads_of(c)};
    draft_model own = *d;
    return {drafter_trainer(c, student, own, backend).measure(pointers(responses)),
            follow_drafts(c, student, d, backend.team(), pointers(responses), 3)};
}

template <class F>
double seconds_of(F&& f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// --- drafters by loss ------------------------------------------------------------------------------------------------

const arguments deep = {"--preset=quick",      "--quiet",          "--student-layers=6", "--student-max-steps=200",
                        "--student-warmup=20", "--drafter-ffn=96", "--drafter-depth=7",  "--drafter-batch=16"};

void compare_drafters(const std::string& directory, int updates) {
    const std::string student = student_in(directory + "/deep", deep), file = directory + "/deep/one.ckpt";
    const config base = config_of(deep);
    const auto task = task_of(base);
    const transformer<float> model = model_in(base, student);
    const std::vector<trajectory> learnt = responses_of(base, *task, model, 256, false),
                                  held_out = responses_of(base, *task, model, 64, true);
    const auto pool = pointers(learnt);
    opd::cpu_backend backend{.threads = threads_of(base)};

    // so many updates, from `first` on in a schedule of that many and those before
    const auto teach = [&](draft_model& d, const arguments& settings, int first, int count) {
        const config c = config_of(deep + settings);
        drafter_trainer train(c, model, d, backend);
        std::vector<double> seconds;
        std::vector<const trajectory*> batch;
        for (int step = first; step < first + count; ++step) {
            batch.clear();
            for (int i = 0; i < c.drafter.batch; ++i)
                batch.push_back(pool[static_cast<std::size_t>(step * c.drafter.batch + i) % pool.size()]);
            const double rate = cosine_rate(c.drafter.rate, 0.1, c.drafter.warmup, step - first, count);
            seconds.push_back(seconds_of([&] { train.step(batch, rate, step); }));
        }
        return of(seconds).median;
    };
    const double plain = virtual_rates(directory, student, {"off", {}}, 1, deep).first;
    const auto rate_with = [&](const draft_model& d) {
        save_drafter(file, d);
        return virtual_rates(
                   directory, student,
                   {"one", {"--speculate=learned", "--draft-depth=7", "--draft-verify=7", "--draft-from=" + file}}, 1,
                   deep)
            .first;
    };

    const arguments eagle = {"--drafter-loss=eagle"};
    const std::vector<way> ways = {{"eagle", eagle},
                                   {"hass", {"--drafter-loss=hass"}},
                                   {"eagle3", {"--drafter=eagle3", "--drafter-loss=eagle3"}},
                                   {"hidden, eagle3's loss", {"--drafter-loss=eagle3"}},
                                   {"eagle3, lk", {"--drafter=eagle3", "--drafter-loss=lk"}},
                                   {"lk", {"--drafter-loss=lk"}},
                                   {"osd", {"--drafter-loss=osd"}}};
    fmt::print("drafters for a student of 6 layers, {} updates each, on {} held-out prompts; one sequence at once, no "
               "drafts: {:.0f} tokens/s\n{:<22}{:>8}{:>10}{:>9}{:>8}   accepted by depth, drafted with the target's "
               "noise\n",
               updates, held_out.size(), plain, "", "tokens", "tokens/s", "speedup", "update");
    double of_eagle = 0;
    for (const way& w : ways) {
        const config c = config_of(deep + w.settings);
        draft_model d(c, c.student_model);
        const double update = teach(d, w.settings, 0, updates), rate = rate_with(d);
        if (of_eagle == 0) of_eagle = update;
        const judged_drafter j = judged(c, model, std::make_shared<const draft_model>(d), held_out);
        fmt::print("{:<22}{:>8.2f}{:>10.0f}{:>9.2f}{:>7.1f}x  ", w.name, j.tokens(), rate, rate / plain,
                   update / of_eagle);
        for (const double share : j.followed.by_depth) fmt::print("{:>7.3f}", share);
        fmt::print("\n");
        std::fflush(stdout);
    }

    // what OSD adds to as many updates of another loss, and those updates again beside it
    fmt::print("{:<22}{:>16}{:>16}{:>16}{:>16}\n", "tokens, tokens/s", "at first", "trained", "and as long", "and OSD");
    const std::vector<way> taught = {
        {"a model of its own", {"--drafter=model", "--drafter-loss=eagle", "--drafter-ce=1"}}, {"eagle", eagle}};
    for (const way& w : taught) {
        const config c = config_of(deep + w.settings);
        const arguments osd =
            w.name == "eagle" ? arguments{"--drafter-loss=osd"} : arguments{"--drafter=model", "--drafter-loss=osd"};
        fmt::print("{:<22}", w.name);
        const auto show = [&](const draft_model& d) {
            const judged_drafter j = judged(c, model, std::make_shared<const draft_model>(d), held_out);
            fmt::print("{:>16}", fmt::format("{:.2f}, {:.0f}", j.tokens(), rate_with(d)));
        };
        draft_model d(c, c.student_model);
        show(d);
        teach(d, w.settings, 0, updates);
        show(d);
        draft_model longer = d;
        teach(longer, w.settings, updates, updates);
        show(longer);
        teach(d, osd, updates, updates);
        show(d);
        fmt::print("\n");
        std::fflush(stdout);
    }
}

// --- a slice ---------------------------------------------------------------------------------------------------------

void compare_slices(const std::string& directory, int rounds) {
    const std::string student = student_in(directory + "/moving", moving);
    const config c = config_of(moving + arguments{"--drafter-ffn=96", "--drafter-loss=eagle"});
    const auto task = task_of(c);
    const transformer<float> model = model_in(c, student);
    const std::vector<trajectory> all = responses_of(c, *task, model, 256, false);
    draft_model d(c, c.student_model);
    opd::cpu_backend backend{.threads = 1};
    drafter_trainer train(c, model, d, backend);
    const auto width = static_cast<std::size_t>(d.features());
    std::vector<double> packed, padded, ratio;
    std::size_t tokens = 0, longest_of_all = 0;
    std::vector<float> gradient;
    for (int round = 0; round < rounds; ++round) {
        double seconds[2] = {};
        for (std::size_t first = 0; first + 16 <= all.size(); first += 16) {
            std::size_t longest = 0;
            for (std::size_t i = first; i < first + 16; ++i) longest = std::max(longest, all[i].tokens.size());
            std::vector<std::vector<token>> ids;
            std::vector<std::vector<float>> hidden;
            for (const bool pads : {false, true}) {
                ids.clear(), hidden.clear();
                std::vector<drafter_text> texts;
                for (std::size_t i = first; i < first + 16; ++i) {
                    ids.push_back(all[i].tokens);
                    if (pads) ids.back().resize(longest, 0);
                    hidden.emplace_back((ids.back().size() - 1) * width, 0.5f);
                }
                for (std::size_t i = 0; i < 16; ++i)
                    texts.push_back({ids[i], all[first + i].prompt_length, hidden[i], all[first + i].sample});
                seconds[pads] += seconds_of([&] { train.gradient(texts, 0, gradient); });
                if (round == 0 && !pads)
                    for (const auto& x : ids) tokens += x.size(), longest_of_all = std::max(longest_of_all, x.size());
            }
        }
        packed.push_back(1e3 * seconds[0]), padded.push_back(1e3 * seconds[1]);
        ratio.push_back(seconds[1] / seconds[0]);
    }
    fmt::print("slices of 16 responses of the gcd task, {:.1f} tokens long in the mean, {} at most, one thread\n"
               "packed {:.1f} ms, padded to the longest of the slice {:.1f} ms: {} times as long\n",
               static_cast<double>(tokens) / static_cast<double>(all.size()), longest_of_all, of(packed).median,
               of(padded).median, range(ratio));

    // a checkpoint: the student and its drafter, written by the worker; the drafter alone, by the worker; or by another
    // thread
    drafter_progress progress{1, 1, {}};
    progress.optimizer.m.assign(d.weights.weights.size(), 0.1f), progress.optimizer.v = progress.optimizer.m;
    const auto shared = std::make_shared<const draft_model>(d);
    background_file file(directory + "/behind.ckpt");
    const std::string rest(2 * sizeof(float) * model.weights.size(), 'x'); // the student's moments
    std::vector<double> whole, alone, behind;
    for (int i = 0; i < 20 * rounds; ++i) {
        whole.push_back(1e3 * seconds_of([&] {
                            const auto* bytes = reinterpret_cast<const char*>(model.weights.data());
                            write_file(directory + "/whole.ckpt",
                                       drafter_bytes(d, &progress) +
                                           std::string(bytes, model.weights.size() * sizeof(float)) + rest);
                        }));
        alone.push_back(1e3 * seconds_of([&] { write_file(directory + "/alone.ckpt", drafter_bytes(d, &progress)); }));
        behind.push_back(
            1e3 * seconds_of([&] { file.write([shared, progress] { return drafter_bytes(*shared, &progress); }); }));
        file.flush();
    }
    fmt::print("a checkpoint holds the worker up for {:.3f} ms with the student's state, {:.3f} ms with the drafter's "
               "alone, {:.3f} ms if another thread writes it: {:.1f} % of the first, {:.1f} % of the second\n",
               of(whole).median, of(alone).median, of(behind).median, 100 * of(behind).median / of(whole).median,
               100 * of(behind).median / of(alone).median);

    // on threads: as many slices as there is time for, which change no drafter
    const std::string base = directory + "/moving", frozen = drafter_in(base, moving + small_drafter);
    for (const int workers : {1, 2}) {
        std::vector<double> held, rollout;
        for (int round = 0; round < rounds; ++round) {
            const auto s =
                report_of(directory + "/threads",
                          moving + arguments{"--start-from=" + student, "--draft-from=" + frozen, "--speculate=learned",
                                             "--draft-depth=6", "--draft-verify=6", "--drafter-ffn=96", "--steps=100",
                                             "--eval-prompts=64", "--learner-threads=1", "--teachers=1",
                                             fmt::format("--rollout-workers={}", workers), "--adapt-drafter",
                                             "--adapt-slices=0", "--adapt-rate=1e-30"})["schedule"];
            const double busy = s["busy_seconds"]["rollout"];
            held.push_back(100 * s["speculation"]["drafter"]["held_seconds"].get<double>() / (workers * busy));
            rollout.push_back(10 * busy); // milliseconds a step
        }
        fmt::print(
            "on threads, {} rollout workers beside one thread of the learner, {} ms of rollout a step: slices in "
            "hand hold a worker up for {} % of it\n",
            workers, range(rollout), range(held));
    }
}

// One run distils the student with a drafter that learns, and stops now and then; what it began with is judged beside
// it, on the same student. Another says what drafts bring without. Slices are few enough for their own time
// (--adapt-slices); two short runs, one with as many as there is time for which change no drafter, say how much of the
// idle time is used, and what that delays.
void compare_adaptation(const std::string& directory, int steps) {
    const std::string base = directory + "/moving", student = student_in(base, moving);
    const std::string frozen = drafter_in(base, moving + small_drafter);
    const arguments common =
        moving + long_tail + gpu + gpu_drafter + arguments{"--start-from=" + student, "--draft-from=" + frozen};
    const arguments studied = common + arguments{fmt::format("--steps={}", steps)},
                    spot = gpu_spot + arguments{"--adapt-rows=256", "--adapt-drafter"},
                    learning = studied + spot + arguments{"--adapt-slices=8"};
    const std::string adapted = directory + "/adapted", stays = directory + "/frozen";
    const config c = config_of(learning);
    const auto task = task_of(c);
    const auto first = std::make_shared<const draft_model>(load_drafter(frozen));
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
        const transformer<float> model = model_in(c, look > 0 ? adapted + "/checkpoints/latest.ckpt" : student);
        const std::vector<trajectory> responses = responses_of(c, *task, model, 64, true);
        for (const auto& [name, d] : {std::pair{"as it was", first}, {"adapted", now}}) {
            const judged_drafter j = judged(c, model, d, responses);
            fmt::print("{:>6}{:>16}{:>10}{:>9.3f}{:>9.2f}  ", steps * look / looks, name, d == first ? 0 : updates,
                       j.expected.top_3, j.tokens());
            for (const double share : j.followed.by_depth) fmt::print("{:>7.3f}", share);
            fmt::print("\n");
            if (look == 0) break; // one and the same
        }
        std::fflush(stdout);
    }
    train(studied + arguments{"--run-dir=" + stays, "--overwrite"});
    if (state_in(adapted + "/checkpoints/distill.ckpt").student_weights !=
        state_in(stays + "/checkpoints/distill.ckpt").student_weights)
        throw failure(exit_numeric, "the student depends on its drafter");
    const double mine = tokens_at_the_end(adapted), theirs = tokens_at_the_end(stays);
    const auto told = schedule_in(adapted)["speculation"]["drafter"];
    fmt::print("tokens a pass in the last tenth of the steps: {:.2f} adapted, {:.2f} as it was: {:.2f} times; the "
               "drafter is {:.2f} versions old in the mean; 8 slices a step use {:.3f} of what rollout leaves idle\n",
               mine, theirs, mine / theirs, told["age"].get<double>(), told["idle_used"].get<double>());
    std::fflush(stdout);
    const int few = std::max(2, steps / 25);
    const arguments brief = common + arguments{fmt::format("--steps={}", few), "--overwrite"};
    train(brief + arguments{"--run-dir=" + directory + "/idle"});
    train(brief + spot + arguments{"--run-dir=" + directory + "/delayed", "--adapt-slices=0", "--adapt-rate=1e-30"});
    const auto plain = schedule_in(directory + "/idle"), delayed = schedule_in(directory + "/delayed");
    fmt::print("{} steps with as many slices as there is time for: of what rollout leaves idle {:.3f} is used; slices "
               "that change no drafter make the run {:.2f} % longer\n",
               few, delayed["speculation"]["drafter"]["idle_used"].get<double>(),
               100 * (delayed["wall_seconds"].get<double>() / plain["wall_seconds"].get<double>() - 1));
}

void compare(const std::string& directory, const std::set<std::string>& worlds, int rounds, int steps) {
    if (worlds.contains("drafters")) compare_drafters(directory, 5 * steps);
    if (worlds.contains("adaptation")) compare_adaptation(directory, 5 * steps);
    if (worlds.contains("slices")) compare_slices(directory, rounds);
    if (worlds.contains("running")) compare_running(directory);
    if (worlds.contains("strategies")) compare_strategies(directory);
    if (worlds.contains("whole-steps")) compare_whole_steps(directory, 5 * steps);
    if (!worlds.contains("preset") && !worlds.contains("machine") && !worlds.contains("virtual")) return;
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
        const transformer<float> model = model_in(c, student);
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
    comparison_options(
        app, directory, worlds,
        {"preset", "machine", "virtual", "drafters", "adaptation", "slices", "running", "strategies", "whole-steps"});
    app.add_option("--rounds", rounds)->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
    return comparison_main(app, argc, argv, [&] { compare(directory, worlds, rounds, steps); });
}
