// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/command_line.hpp"

#include <algorithm>
#include <filesystem>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "nearest.hpp"
#include "numbers.hpp"
#include "opd/version.hpp"
#include "settings/files.hpp"
#include "settings/options.hpp"

namespace trainer {

namespace {

bool given(const CLI::App& app, const std::string& flag) {
    const CLI::Option* o = app.get_option_no_throw(flag);
    return o != nullptr && o->count() > 0;
}

// Refuses settings that were given, by a flag or in the file, and are not looked at.
struct unused_check {
    const std::vector<unused_setting>& unused;
    const CLI::App& app;
    const nlohmann::json& file;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) const {
        const bool said = given(app, flag) || (file.contains(group_key) && file[group_key].contains(key));
        for (const unused_setting& u : unused)
            if (said && u.group == group_key && u.key == key)
                throw failure(exit_usage, fmt::format("{} is not used by {}", flag, u.by));
    }
};

// The settings that a file decides: no flag overrides it, or there is none.
struct file_check {
    const CLI::App& app;
    const nlohmann::json& file;
    std::map<std::string, std::string>& in_file;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) const {
        if (app.get_option_no_throw(flag) == nullptr || // or the file could alone
            (!given(app, flag) && file.contains(group_key) && file[group_key].contains(key)))
            in_file[flag] = group_key + "." + key;
    }
};

// The settings without a flag, by the flags of the table.
struct file_alone {
    option_names names;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) {
        if (!is_flag_of_train(flag)) names[flag] = group_key + "." + key;
    }
};

// What --list-settings prints.
struct setting_list {
    const option_names& alone;
    std::string text = {};
    std::string group_key = {};
    void group(const char* key, const char* title) {
        group_key = key;
        text += fmt::format("{}{}\n", text.empty() ? "" : "\n", title);
    }
    template <class T>
    void option(const char* key, const std::string& flag, const T& value, const char* help, bool) {
        text += fmt::format("  {}.{} = {}{}\n      {}\n", group_key, key, nlohmann::json(value).dump(),
                            alone.contains(flag) ? "" : " (" + flag + ")", renamed(help, alone));
    }
};

struct command_line {
    CLI::App& app;
    std::string title;
    const option_names* alone = nullptr; // what is no flag; null: all are
    void group(const char*, const char* t) { title = t; }
    template <class T>
    void option(const char*, const std::string& flag, T& value, const char* said, bool) {
        if (alone != nullptr && alone->contains(flag)) return;
        const std::string help = alone != nullptr ? renamed(said, *alone) : said;
        if constexpr (std::is_same_v<T, bool>)
            app.add_flag(flag + ",!--no-" + flag.substr(2), value, help)->group(title)->capture_default_str();
        else {
            CLI::Option* o = app.add_option(flag, value, help)->group(title)->capture_default_str()->take_last();
            if constexpr (std::is_integral_v<T>)
                o->transform([flag](const std::string& text) {
                    const auto number = ::integer_of<T>(text); // not one of a file that is compiled with this
                    if (!number)
                        throw failure(exit_usage,
                                      fmt::format("{} must be {}, not '{}'", flag, integer_range<T>(), text));
                    return std::to_string(*number);
                });
            else if constexpr (std::is_floating_point_v<T>)
                o->transform([flag](const std::string& text) {
                    if (text.empty()) throw failure(exit_usage, flag + " must be a number, not ''"); // it would be 0
                    return text;
                });
        }
    }
};

// Some of the settings, under other names.
struct some_options {
    command_line all;
    const option_names& names;
    void group(const char* key, const char* title) { all.group(key, title); }
    template <class T>
    void option(const char* key, const std::string& flag, T& value, const char* help, bool affects_results) {
        if (const auto at = names.find(flag); at != names.end())
            all.option(key, at->second, value, renamed(help, names).c_str(), affects_results);
    }
};
struct some_unused {
    const std::vector<unused_setting>& unused;
    const CLI::App& app;
    const option_names& names;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) const {
        const auto at = names.find(flag);
        if (at == names.end() || app.count(at->second) == 0) return;
        for (const unused_setting& u : unused)
            if (u.group == group_key && u.key == key)
                throw failure(exit_usage, fmt::format("{} is not used by {}", at->second, renamed(u.by, names)));
    }
};

} // namespace

void add_options(CLI::App& app, config& c, const option_names& names) {
    visit_options(c, some_options{{app, ""}, names});
}

void refuse_unused(const CLI::App& app, const config& c, const option_names& names) {
    const std::vector<unused_setting> unused = unused_settings(c);
    visit_options(c, some_unused{unused, app, names});
}

std::string renamed(const std::string& text, const option_names& names) {
    std::string r;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end =
            std::min(text.size(), text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-", at));
        const auto found = names.find(text.substr(at, end - at));
        r += found != names.end() ? found->second : text.substr(at, end - at);
        if (end < text.size()) r += text[end];
        at = end + 1;
    }
    return r;
}

std::string as_given(const command& c, const std::string& text) {
    const std::string r = renamed(text, c.in_file);
    return r != text && !c.file.empty() ? c.file + ": " + r : r;
}

command parse_command_line(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv{"opd-train"};
    for (const std::string& a : arguments) argv.push_back(a.c_str());
    return parse_command_line(static_cast<int>(argv.size()), argv.data(), true);
}

command parse_command_line(int argc, const char* const* argv, bool every_flag) {
    command r;
    std::string config_file, text, preset, task;
    nlohmann::json file = nlohmann::json::object();

    // First what decides the defaults: a preset, a configuration file, or the run that is resumed.
    {
        CLI::App first;
        first.set_help_flag();
        first.allow_extras();
        first.allow_config_extras();
        first.add_option("--config", config_file)->take_last();
        first.add_option("--preset", preset)->take_last();
        first.add_option("--task", task)->take_last();
        first.add_option("--run-dir", r.settings.run.directory)->take_last();
        first.add_flag("--resume", r.resume);
        first.add_flag("--train-drafter", r.train_drafter);
        first.add_option("--write-offline", r.write_offline)->take_last();
        try {
            first.parse(argc, argv);
        } catch (const CLI::ParseError& e) {
            throw failure(exit_usage, e.what());
        }
    }
    r.file = config_file;
    const bool named = r.settings.run.directory != config{}.run.directory;
    if (!named && !task.empty()) { // each task has a default of its own
        config defaults;
        apply_task(task, defaults);
        r.settings.run.directory = defaults.run.directory;
    }
    const std::string directory = r.settings.run.directory, saved = directory + "/config.json";
    const bool goes_on = config_file.empty() && (r.resume || r.train_drafter || !r.write_offline.empty());
    if (goes_on && std::filesystem::exists(saved)) r.file = saved;
    if (!r.file.empty()) { // it says the task, where no flag does
        config said;
        text = read_file(r.file); // once: it may be a pipe
        config_of_text(text, r.file, said);
        if (goes_on && !task.empty() && task != said.task.kind)
            throw failure(exit_usage, fmt::format("--{}: {} is a run of --task {}, not {}",
                                                  r.resume          ? "resume"
                                                  : r.train_drafter ? "train-drafter"
                                                                    : "write-offline",
                                                  directory, said.task.kind, task));
        if (task.empty()) task = said.task.kind;
    }
    if (!task.empty()) apply_task(task, r.settings);
    if (named || goes_on) r.settings.run.directory = directory;
    if (!preset.empty()) apply_preset(preset, r.settings);
    if (!r.file.empty()) {
        file = config_of_text(text, r.file, r.settings);
        if (named || goes_on) r.settings.run.directory = directory;
        if (r.train_drafter && goes_on) file.erase("drafter"); // defaults, not choices: flags may choose otherwise
        if (!r.write_offline.empty() && goes_on) file.erase("distill"); // likewise: of another estimator
    }

    CLI::App app("Trains a teacher on an embedded task, warms a weak student up, and closes the gap between them by\n"
                 "on-policy distillation with the opd library.",
                 "opd-train");
    app.footer(
        "Exit codes: 0 ok, 1 any other failure, 2 usage or configuration, 3 input file, 4 numeric guard, 5 output,\n"
        "6 served teacher, 7 too little memory or too few threads, 130 interrupted (a checkpoint was written;\n"
        "--resume goes on). More settings, which a file has (--config): --list-settings.");
    bool version = false;
    app.add_option("--config", config_file, "JSON file with settings; flags override it")->group("Files")->take_last();
    app.add_option("--preset", preset,
                   "settings to begin with, which a configuration file and flags override: quick: a smaller task, of "
                   "which half a minute closes most of the gap; speculative: a student of 6 layers, which rolls out "
                   "slowly enough for drafts to pay")
        ->group("Files")
        ->take_last();
    app.add_flag("--print-config", r.print_config, "print the settings as a file that --config reads, and exit")
        ->group("Files");
    bool list = false, list_settings = false;
    app.add_flag("--list-settings", list_settings, "say what a configuration file may have, and exit")->group("Files");
    app.add_flag("--list-estimators", list, "say what estimators, shapes, surrogates and baselines there are, and exit")
        ->group("Files");
    app.add_flag(
           "--resume", r.resume,
           "go on from the run directory's checkpoint, bit for bit; with another --steps, on to there, also where "
           "the run had finished")
        ->group("Files");
    app.add_flag("--train-drafter", r.train_drafter,
                 "train a drafter for the student in the run directory's last checkpoint, write "
                 "checkpoints/drafter.ckpt, say how much of its drafts is accepted, and exit")
        ->group("Files");
    app.add_option("--write-offline", r.write_offline,
                   "have the warm student of the run directory answer training prompts, have its teacher score each "
                   "token, write both to this folder as a data set, and exit; what was begun is gone on with")
        ->group("Files")
        ->take_last();
    CLI::Option* const sequences = app.add_option("--offline-sequences", r.offline_sequences,
                                                  "--write-offline: sequences of the data set, 16384 unless given")
                                       ->group("Files")
                                       ->take_last()
                                       ->check(CLI::Range(1, 1'000'000'000));
    app.add_flag("--overwrite", r.overwrite, "replace the run that the run directory holds")->group("Files");
    app.add_flag("--quiet", r.quiet, "no progress, only warnings and the final table")->group("Files");
    app.add_flag("--version", version, "print the version and exit")->group("Files");
    file_alone alone;
    if (!every_flag) visit_options(r.settings, alone);
    visit_options(r.settings, command_line{app, "", &alone.names});
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        r.text = app.help();
        return r;
    } catch (const CLI::ExtrasError& e) {
        std::string hint;
        for (int i = 1; i < argc; ++i) {
            const std::string flag = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
            for (const std::string_view dash : {"\u2013", "\u2014"}) // an en dash, an em dash
                if (flag.starts_with(dash))
                    hint += fmt::format("\n{}: begins with a dash that a text editor has made of --", flag);
            if (flag.size() < 3 || flag.compare(0, 2, "--") != 0) continue;
            const std::string name = flag.substr(2); // two dashes are no likeness
            std::vector<std::string> known;
            for (const CLI::Option* o : app.get_options())
                for (const std::string& other : o->get_lnames()) known.push_back(other);
            if (std::find(known.begin(), known.end(), name) != known.end()) continue;
            if (const auto at = alone.names.find(flag); at != alone.names.end())
                hint += fmt::format("\n{}: a file has that (--config): {}", flag, at->second);
            else if (const std::string near = nearest(name, known); !near.empty())
                hint += fmt::format("\n{}: did you mean --{}?", flag, near);
        }
        throw failure(exit_usage, e.what() + hint + "\nopd-train --help lists every option");
    } catch (const CLI::ParseError& e) {
        throw failure(exit_usage, std::string(e.what()) + "\nopd-train --help lists every option");
    }
    for (const CLI::Option* o : app.get_options())
        if (const auto& given = o->results(); given.size() > 1 && o->get_items_expected_max() > 0 &&
                                              given.front() != given.back() && !o->get_lnames().empty())
            r.warnings.push_back(fmt::format("--{} was given {} times; the last, {}, counts", o->get_lnames().front(),
                                             given.size(), given.back()));
    if (version) {
        r.text = fmt::format("opd-train {}.{}.{}\n", OPD_VERSION_MAJOR, OPD_VERSION_MINOR, OPD_VERSION_PATCH);
        return r;
    }
    if (list) {
        r.text = renamed(list_estimators(), alone.names);
        return r;
    }
    if (list_settings) {
        setting_list all{alone.names};
        visit_options(r.settings, all);
        r.text = all.text;
        return r;
    }
    if (r.train_drafter && (r.resume || r.overwrite))
        throw failure(exit_usage, std::string("--train-drafter and ") + (r.resume ? "--resume" : "--overwrite") +
                                      " exclude each other");
    if (r.write_offline.empty()) {
        if (sequences->count() > 0)
            throw failure(exit_usage, "--offline-sequences is not used by a run without --write-offline");
        if (!r.settings.run.scoring_teacher.empty() && r.settings.run.start_from.empty())
            throw failure(exit_usage, "--scoring-teacher is not used by a run without --start-from or --write-offline");
    } else if (r.resume || r.overwrite || r.train_drafter) {
        throw failure(exit_usage, "--write-offline excludes --resume, --overwrite and --train-drafter");
    }
    if (sequences->count() == 0) r.offline_sequences = 16'384;
    if (r.resume && r.overwrite) throw failure(exit_usage, "--resume and --overwrite exclude each other");
    visit_options(r.settings, file_check{app, file, r.in_file});
    try {
        validate(r.settings);
        const auto need_start = [&](const char* what) {
            if (r.settings.run.start_from.empty()) throw failure(exit_usage, what);
        };
        if (is_offline(r.settings)) {
            need_start("--offline: needs --start-from, the checkpoints/student.ckpt whose student drew the data set");
        } else if (is_served(r.settings) && r.write_offline.empty() && !r.train_drafter) {
            validate_served(r.settings);
            need_start(
                "--teacher-url: needs --start-from, the checkpoints/student.ckpt of a run, whose warm student is "
                "distilled into");
        }
        const std::vector<unused_setting> unused = unused_settings(r.settings);
        visit_options(r.settings, unused_check{unused, app, file});
    } catch (const failure& e) {
        throw failure(e.code, as_given(r, e.what()));
    }
    if (r.print_config) r.text = to_json(r.settings).dump(2) + "\n";
    return r;
}

} // namespace trainer
