// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-cluster-sim: compares schedules on a simulated cluster.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <unistd.h>

#include "choosing_m.hpp"
#include "config.hpp"
#include "costs.hpp"
#include "gain.hpp"
#include "nearest.hpp"
#include "numbers.hpp"
#include "opd/sched/trace.hpp"
#include "opd/version.hpp"
#include "outcome.hpp"
#include "simulate.hpp"
#include "timeline/timeline.hpp"

namespace {

using namespace cluster_sim;

struct command {
    std::string config_file, preset_name = "node", out = "runs/cluster_sim", trace_of;
    std::vector<std::string> only;
    bool print_config = false, version = false, quiet = false, no_sensitivity = false, no_plots = false;
    bool choosing_m = false, quick = false, gain = false, costs = false;
    int seeds = 2, random = 0;
    std::uint64_t seed = 1;
    index_t steps = 0;
    double seconds = 0;
};

// Takes what the same setting takes in a file.
template <class T>
auto integer(const char* flag, T most = std::numeric_limits<T>::max()) {
    return [flag, most](const std::string& text) {
        const auto number = integer_of<T>(text);
        if (!number || *number < 0 || *number > most)
            throw failure(exit_usage, fmt::format("{} must be {}, not '{}'", flag, integer_range<T>(most), text));
        return std::to_string(*number);
    };
}

int run(int argc, char** argv) {
    command a;
    CLI::App app(
        "Simulates schedules of on-policy distillation on a cluster in virtual time: throughput, overlap, lags,\n"
        "waiting and cost of each.",
        "opd-cluster-sim");
    app.footer("Exit codes: 0 ok, 1 any other failure, 2 usage or configuration, 3 input file, 4 a run came to a\n"
               "standstill, 5 output, 7 not enough memory.");
    const auto* preset_option =
        app.add_option("--preset", a.preset_name, "built-in cluster: node (8 GPUs) or day (1,000 workers for a day)")
            ->capture_default_str();
    app.add_option("--config", a.config_file, "JSON file that describes cluster and schedules")
        ->excludes(app.get_option("--preset"));
    app.add_flag("--print-config", a.print_config, "print the configuration as a file that --config reads, and exit");
    app.add_option("--out", a.out, "directory for report.json, plots, trace and timeline")->capture_default_str();
    const auto* seed =
        app.add_option("--seed", a.seed, "seed of lengths and durations")->transform(integer<std::uint64_t>("--seed"));
    const auto* steps_option = app.add_option("--steps", a.steps, "train batches; 0: until --seconds")
                                   ->transform(integer<index_t>("--steps", std::numeric_limits<index_t>::max() / 2));
    const auto* seconds = app.add_option("--seconds", a.seconds, "virtual seconds; 0: until --steps");
    app.add_option("--only", a.only, "names of schedules to run; the first is compared with");
    app.add_option("--trace", a.trace_of, "schedule whose Chrome trace and timeline are written [the first async one]");
    app.add_flag("--no-sensitivity", a.no_sensitivity, "no table over tails and learner times");
    app.add_flag("--no-plots", a.no_plots, "no plots");
    app.add_flag("--quiet", a.quiet, "no progress");
    auto* choosing =
        app.add_flag("--choosing-m", a.choosing_m,
                     "instead: automatic M beside every fixed one, over loads, tails, bounds and policies");
    app.add_flag(
           "--gain", a.gain,
           "instead: async on its best split of the GPUs over the fastest synchronous schedule, by the fixed part of "
           "a decode step, tail and load")
        ->excludes(choosing);
    app.add_flag("--costs", a.costs,
                 "instead: async over the fastest synchronous schedule with weights' transfer, a bounded teacher's "
                 "cache and a late worker")
        ->excludes(choosing)
        ->excludes("--gain");
    app.add_flag("--quick", a.quick, "of --choosing-m: fewer loads and one bound")->needs(choosing);
    app.add_option("--seeds", a.seeds, "of --choosing-m: seeds to take the mean of")
        ->capture_default_str()
        ->check(CLI::Range(1, 100))
        ->needs(choosing);
    app.add_option("--random", a.random, "of --choosing-m: so many random loads instead of the cluster's")
        ->check(CLI::Range(1, 100000))
        ->needs(choosing);
    app.add_flag("--version", a.version, "print the version and exit");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        std::fputs(app.help().c_str(), stdout);
        return exit_ok;
    } catch (const CLI::ParseError& e) {
        throw failure(exit_usage, std::string(e.what()) + "\nopd-cluster-sim --help lists every option");
    }
    if (a.version) {
        fmt::print("opd-cluster-sim {}.{}.{}\n", OPD_VERSION_MAJOR, OPD_VERSION_MINOR, OPD_VERSION_PATCH);
        return exit_ok;
    }
    (void)preset_option;
    config c = a.config_file.empty() ? preset(a.preset_name) : load_config(a.config_file);
    if (*seed) c.seed = a.seed;
    if (*steps_option) c.steps = a.steps;
    if (*seconds) c.seconds = a.seconds;
    if (!a.only.empty()) {
        std::vector<entry> chosen;
        std::vector<std::string> names;
        for (const entry& e : c.schedules) names.push_back(e.name);
        for (const std::string& name : a.only) {
            const auto at = std::find(names.begin(), names.end(), name);
            if (at == names.end()) {
                const std::string near = nearest(name, names);
                throw failure(exit_usage, fmt::format("--only: no schedule is called '{}'{}", name,
                                                      near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
            }
            chosen.push_back(c.schedules[static_cast<std::size_t>(at - names.begin())]);
        }
        c.schedules = std::move(chosen);
        auto& study_of = c.sensitivity.schedules;
        std::erase_if(study_of, [&](const std::string& name) {
            return std::find(a.only.begin(), a.only.end(), name) == a.only.end();
        });
    }
    if (a.no_sensitivity || (c.sensitivity.schedules.empty() && !a.gain)) c.sensitivity = {};
    try {
        validate(c);
    } catch (const failure& e) {
        throw a.config_file.empty() ? e : failure(e.code, a.config_file + ": " + e.what());
    }
    // what a study computes, while it says how far it is
    const auto shown = [&](auto&& study) {
        const bool progress = !a.quiet && ::isatty(STDERR_FILENO);
        auto made = study([&](double share) {
            if (progress) fmt::print(stderr, "\r\033[K{:.0f} %", 100 * share);
        });
        if (progress) fmt::print(stderr, "\r\033[K");
        return made;
    };
    if (a.choosing_m) {
        const index_t steps = *steps_option ? a.steps : a.random > 0 ? 1000 : 300, least = a.random > 0 ? 210 : 60;
        if (steps < least)
            throw failure(exit_usage, fmt::format("--steps must be at least {} with --choosing-m{}, not {}", least,
                                                  a.random > 0 ? " --random" : "", steps));
        if (a.random > 0) {
            fmt::print("{}", table(shown([&](auto&& say) { return random_loads(a.random, steps, say); })));
            return exit_ok;
        }
        const auto rows = shown([&](auto&& say) { return choosing_m(c, steps, a.seeds, a.quick, say); });
        fmt::print("{}\n{}", table(rows), table(load_jumps(c, steps, a.seeds)));
        return exit_ok;
    }
    if (a.gain) {
        fmt::print("{}", table(c, shown([&](auto&& say) { return gain_of_async(c, say); })));
        return exit_ok;
    }
    if (a.costs) {
        fmt::print("{}", table(c, shown([&](auto&& say) { return costs_of_async(c, say); })));
        return exit_ok;
    }
    if (a.print_config) {
        fmt::print("{}\n", to_json(c).dump(2));
        return exit_ok;
    }
    if (a.trace_of.empty()) { // the first that streams, else the last
        a.trace_of = c.schedules.back().name;
        for (std::size_t i = c.schedules.size(); i-- > 0;)
            if (std::holds_alternative<opd::sched::async>(c.schedules[i].schedule)) a.trace_of = c.schedules[i].name;
    }
    if (std::none_of(c.schedules.begin(), c.schedules.end(), [&](const entry& e) { return e.name == a.trace_of; }))
        throw failure(exit_usage, fmt::format("--trace: no schedule is called '{}'", a.trace_of));
    std::error_code error;
    std::filesystem::create_directories(a.out, error);
    if (error) throw failure(exit_io, fmt::format("cannot create directory {}: {}", a.out, error.message()));

    const bool progress = !a.quiet && ::isatty(STDERR_FILENO);
    const auto say = [&](const std::string& what) {
        if (progress) fmt::print(stderr, "\r\033[K{}", what);
    };
    std::vector<outcome> all;
    bool stuck = false;
    opd::sched::trace recorded({.first = 20000, .last = 20000});
    for (const entry& e : c.schedules) {
        say(fmt::format("{} ({} of {})", e.name, all.size() + 1, c.schedules.size()));
        all.push_back(simulate(c, e, e.name == a.trace_of ? &recorded : nullptr));
        stuck |= !all.back().stuck.empty();
    }
    const auto rows = study(c, [&](double share) { say(fmt::format("sensitivity, {:.0f} %", 100 * share)); });
    say("");

    fmt::print("{}\n{}", table(c, all), ledgers(all));
    if (const std::string text = stalenesses(c, all); !text.empty()) fmt::print("\n{}", text);
    if (!rows.empty()) fmt::print("\n{}", table(c, rows));
    double host = 0, virtual_seconds = 0;
    std::int64_t events = 0;
    for (const outcome& o : all) host += o.host_seconds, virtual_seconds += o.seconds, events += o.events;
    fmt::print("\nsimulated {:.1f} hours in {:.2f} s: {:.2f} million events a second\n", virtual_seconds / 3600, host,
               host > 0 ? static_cast<double>(events) / host / 1e6 : 0.0);

    write_file(a.out + "/config.json", to_json(c).dump(2) + "\n");
    write_file(a.out + "/report.json", report(c, all, rows).dump(2) + "\n");
    recorded.write(a.out + "/trace.json");
    examples::timeline_options view; // a dozen steps: more cannot be told apart
    for (const outcome& o : all)
        if (o.what.name == a.trace_of) {
            view.title = o.what.name;
            view.to = o.steps > 0 ? std::min(o.seconds, 12 * o.seconds / static_cast<double>(o.steps)) : o.seconds;
        }
    write_file(a.out + "/timeline.svg", examples::timeline_svg(examples::timeline_of(recorded), view));
    if (!a.no_plots)
        if (const std::string why = draw_plots(a.out, c, all, rows); !why.empty())
            fmt::print(stderr, "no plots: {}\n", why);
    fmt::print("report, plots and trace are in {}\n", a.out);
    return stuck ? exit_stuck : exit_ok;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const failure& e) {
        fmt::print(stderr, "error: {}\n", e.what());
        return e.code;
    } catch (const std::bad_alloc&) {
        fmt::print(stderr, "error: not enough memory: workers, lanes and permits (tau, k, outstanding) take it\n");
        return exit_resources;
    } catch (const std::exception& e) {
        fmt::print(stderr, "error: {}\n", e.what());
        return exit_other;
    }
}
