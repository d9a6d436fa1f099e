// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/report_page.hpp"

#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "settings/estimator.hpp"
#include "settings/files.hpp"

namespace trainer {

namespace {

std::string escaped(const std::string& text) {
    std::string r;
    for (const char c : text) {
        if (c == '&')
            r += "&amp;";
        else if (c == '<')
            r += "&lt;";
        else if (c == '>')
            r += "&gt;";
        else if (c == '"')
            r += "&quot;";
        else
            r += c;
    }
    return r;
}

// As a shell takes them.
std::string command_line_of(const std::vector<std::string>& arguments) {
    std::string r = "opd-train";
    for (const std::string& a : arguments) {
        const bool plain = !a.empty() && a.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                                             "0123456789-_./=,:+") == std::string::npos;
        std::string quoted = "'";
        for (const char c : a) quoted += c == '\'' ? "'\\''" : std::string(1, c);
        r += " " + (plain ? a : quoted + "'");
    }
    return r;
}

// What the settings say otherwise than a run of the task with no flags.
std::string changed_settings(const config& c) {
    config usual;
    apply_task(c.task.kind, usual);
    const auto mine = to_json(c), theirs = to_json(usual);
    std::string rows;
    for (const auto& [group, settings] : mine.items())
        for (const auto& [key, value] : settings.items()) {
            const bool there = theirs.contains(group) && theirs[group].contains(key);
            if (there && theirs[group][key] == value) continue;
            rows += fmt::format("<tr><td>{}.{}</td><td>{}</td><td>{}</td></tr>\n", group, key, escaped(value.dump()),
                                there ? escaped(theirs[group][key].dump()) : std::string());
        }
    return rows;
}

constexpr std::pair<const char*, const char*> terms[] = {
    {"accuracy, grammatical", "share of greedy answers to held-out prompts that are right (gcd), or of drawn ones that "
                              "the grammar has"},
    {"Avg@n", "the same of n drawn answers a prompt"},
    {"all valid", "share of answers that are right in every step"},
    {"steps ok", "share of right steps, over all answers"},
    {"KL(.|teach)", "mean KL from the model to the teacher at the tokens of the model's own answers, nats"},
    {"length", "mean tokens of an answer"},
    {"gap closed", "(after - before) / (teacher - before) of the accuracy, or 1 - after / before of the KL: 1 is the "
                   "teacher"}};

constexpr std::pair<const char*, const char*> plots[] = {{"loss.svg", "Loss, by stage"},
                                                         {"accuracy.svg", "The student beside its teacher"},
                                                         {"lengths.svg", "Lengths of answers"},
                                                         {"running.svg", "Sequences in rollout"},
                                                         {"timeline.svg", "Overlap of the last steps"},
                                                         {"speculation.svg", "Drafts"},
                                                         {"choices.svg", "Drafting strategies"}};

} // namespace

std::vector<next_try> what_to_try(const config& c, const nlohmann::ordered_json& report) {
    std::vector<next_try> r;
    const std::string& directory = c.run.directory;
    const auto twin = [&](const char* name, std::vector<std::string> more) { // another run from the same warm student
        std::vector<std::string> a = {"--config",     directory + "/config.json",
                                      "--run-dir",    directory + "-" + name,
                                      "--start-from", directory + "/checkpoints/student.ckpt"};
        if (!c.run.start_from.empty()) a.back() = c.run.start_from; // it has warmed none up itself
        a.insert(a.end(), more.begin(), more.end());
        return a;
    };
    const auto& gap = report.at("gap_closed");
    if (gap.is_null())
        r.push_back({"The student was not below its teacher before distillation: a shorter warm-up leaves a gap.",
                     {"--config", directory + "/config.json", "--run-dir", directory + "-gap", "--student-max-steps",
                      fmt::format("{}", c.student.max_steps / 4)}});
    else if (gap.get<double>() < 0.95)
        r.push_back({"Part of the gap is left: the same run for twice as many steps.",
                     {"--run-dir", directory, "--resume", "--steps", fmt::format("{}", 2 * c.distill.steps)}});
    r.push_back({"Another seed says how much of a figure is chance.",
                 twin("seed", {"--seed", fmt::format("{}", c.run.seed + 1)})});
    if (is_offline(c) || is_served(c)) return r;
    const bool plain = c.schedule.kind == "sync" && c.schedule.inject.empty() && c.distill.inject_mismatch.empty();
    if (plain && dense_estimator(c))
        r.push_back({"Rollout, teacher and learner at once, no answer older than four updates.",
                     twin("async", {"--schedule", "async", "--tau", "4"})});
    if (plain && !filters_rollout(c) && c.run.start_from.empty())
        r.push_back({"The warm student's answers and the teacher's log-probs as a data set, for runs without a teacher "
                     "(--offline).",
                     {"--run-dir", directory, "--write-offline", directory + "/set"}});
    return r;
}

std::string report_page(const config& c, const nlohmann::ordered_json& report, const std::string& table) {
    const auto& gap = report.at("gap_closed");
    const std::string head = gap.is_null() ? "no gap to close" : fmt::format("gap closed {:.3f}", gap.get<double>());
    std::string page = fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{0}: {1}</title>\n<style>\n"
        "body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}\n"
        "pre {{ background: #f4f4f4; padding: .8em; overflow-x: auto; }}\n"
        "td, th {{ padding: .1em 1em .1em 0; text-align: left; }}\n"
        "svg {{ max-width: 100%; height: auto; }}\n</style>\n</head>\n<body>\n<h1>{0}: {1}</h1>\n"
        "<p>{2}, {3}, {4} steps; opd {5}, {6} threads, settings {7}.</p>\n",
        escaped(c.run.directory), head, escaped(c.distill.estimator),
        is_offline(c) ? std::string("from a data set") : escaped(c.schedule.kind), c.distill.steps,
        escaped(report.at("version").get<std::string>()), report.at("threads").get<int>(),
        escaped(report.at("fingerprint").get<std::string>()));
    page += "<h2>Result</h2>\n<pre>" + escaped(table) + "</pre>\n<dl>\n";
    for (const auto& [term, says] : terms)
        page += fmt::format("<dt><b>{}</b></dt><dd>{}</dd>\n", escaped(term), escaped(says));
    page += "</dl>\n";
    std::string drawn;
    for (const auto& [file, title] : plots) {
        const std::string path = c.run.directory + "/plots/" + file;
        if (!std::filesystem::exists(path)) continue;
        const std::string svg = read_file(path);
        const std::size_t begin = svg.find("<svg");
        if (begin != std::string::npos)
            drawn += fmt::format("<figure>\n{}<figcaption>{}</figcaption>\n</figure>\n", svg.substr(begin), title);
    }
    page += "<h2>Plots</h2>\n" + (drawn.empty() ? "<p>None: gnuplot draws them where it is installed.</p>\n" : drawn);
    const std::string changed = changed_settings(c);
    page += "<h2>Settings</h2>\n";
    page += changed.empty()
                ? fmt::format("<p>All are the defaults of --task {}.</p>\n", escaped(c.task.kind))
                : "<table>\n<tr><th>setting</th><th>here</th><th>default</th></tr>\n" + changed + "</table>\n";
    page += "<details><summary>All (config.json)</summary><pre>" + escaped(to_json(c).dump(2)) +
            "</pre></details>\n<h2>What to try next</h2>\n";
    for (const next_try& t : what_to_try(c, report))
        page += fmt::format("<p>{}</p>\n<pre>{}</pre>\n", escaped(t.why), escaped(command_line_of(t.arguments)));
    page += "<p>Every setting: <code>opd-train --list-settings</code>.</p>\n</body>\n</html>\n";
    return page;
}

} // namespace trainer
