// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a run says before its first step, and after its last.
#include <cmath>
#include <cstdio>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "ledger_table.hpp"
#include "opd/version.hpp"
#include "pipeline/served.hpp"
#include "run/offline.hpp"
#include "run/plots.hpp"
#include "run/report_page.hpp"
#include "run/run.hpp"

namespace trainer {

std::string version_of_opd() {
    return fmt::format("{}.{}.{}", OPD_VERSION_MAJOR, OPD_VERSION_MINOR, OPD_VERSION_PATCH);
}

namespace {

// What was kept of the teacher, and in how much memory.
std::string cache_told(const nlohmann::ordered_json& c) {
    std::string t =
        fmt::format("\n{:<16}{:>10.0f} bytes a token ({})\n{:<16}{:>10} bytes in flight at most\n{:<16}{:>10} "
                    "bytes of logits at once in the learner\n",
                    "teacher cache", c["bytes_a_token"].get<double>(), c["kind"].get<std::string>(), "",
                    c["most_bytes_in_flight"].get<std::int64_t>(), "", c["learner_logit_bytes"].get<std::int64_t>());
    if (c.contains("rank"))
        t += fmt::format("{:<16}{:>10.3g} nats a token, KL(teacher, {} numbers of it) along its own responses; {:.3g} "
                         "along the student's\n",
                         "", c["kl_on_teacher"].get<double>(), c["rank"].get<int>(), c["kl_on_student"].get<double>());
    return t;
}

// Where the tokens of this process's part of the run ended.
std::string tokens_ended(const nlohmann::ordered_json& l, const std::string& schedule) {
    const auto of = [&](const char* key, auto& x) { l.at(key).get_to(x); };
    opd::sched::token_totals t;
    of("generated", t.generated), of("brought", t.brought), of("learnt", t.learnt), of("discarded", t.discarded);
    of("lost", t.lost), of("outstanding", t.outstanding), of("regenerated", t.regenerated);
    of("unreported_attempts", t.unreported), of("busy_seconds", t.busy_seconds), of("idle_seconds", t.idle_seconds);
    std::string text = "\n"; // a literal + a temporary: g++ 12 -O3 warns of memory that it makes up
    text += examples::ledger_table({{schedule, t}});
    if (t.unreported > 0) text += fmt::format("{} attempts ended without a word of what they drew\n", t.unreported);
    return text;
}

// Whether drafts paid, and what was chosen how often.
std::string drafts_paid(const nlohmann::ordered_json& s) {
    const auto& timed = s["with_drafts"];
    std::string t;
    if (s["tokens_per_step"].is_number())
        t +=
            fmt::format("\n{:<16}{:>10.2f} tokens a sequence and step\n", "drafts", s["tokens_per_step"].get<double>());
    if (timed["tokens_per_step"].is_number())
        t += fmt::format("{:<16}{:>10.2f} {:.2f} to break even; {:.0f} tokens/s, {:.0f} without\n", "steps with some",
                         timed["tokens_per_step"].get<double>(), timed["break_even"].get<double>(),
                         timed["tokens_per_second"].get<double>(), timed["tokens_per_second_without"].get<double>());
    std::int64_t all = 0;
    for (const auto& [name, steps] : s["choices"].items()) all += steps.get<std::int64_t>();
    for (const auto& [name, steps] : s["choices"].items())
        t += fmt::format("{:<16}{:>9.1f}% of steps\n", name, 100 * steps.get<double>() / static_cast<double>(all));
    if (s.contains("drafter") && s["drafter"]["idle_used"].is_number()) // of a run that had time to spare
        t += fmt::format("{:<16}{:>9.1f}% of {:.4g} s that rollout workers idled, {} updates, {:.2f} versions old\n",
                         "drafter trained", 100 * s["drafter"]["idle_used"].get<double>(),
                         s["drafter"]["idle_seconds"].get<double>(), s["drafter"]["updates"].get<std::int64_t>(),
                         s["drafter"]["age"].is_number() ? s["drafter"]["age"].get<double>() : 0.0);
    return t;
}

} // namespace

void run::report() {
    const auto number = [&](const char* who, const char* key) { return evaluations_[who][key].get<double>(); };
    const double teacher = number("teacher", "accuracy"), before = number("before", "accuracy"),
                 after = number("after", "accuracy");
    nlohmann::ordered_json j;
    const bool by_kl = task_->judged_by_kl();
    const double kl_before = by_kl ? held_out_kl(evaluations_["before"]) : 0,
                 kl_after = by_kl ? held_out_kl(evaluations_["after"]) : 0;
    const bool gap = by_kl ? kl_before > 0 : teacher > before;
    const double closed = by_kl ? 1 - kl_after / kl_before : (after - before) / (teacher - before);
    j["gap_closed"] = gap ? nlohmann::ordered_json(closed) : nlohmann::ordered_json();
    if (by_kl) {
        j["held_out_kl"] = {{"before", kl_before}, {"after", kl_after}};
        for (const char* who : {"teacher", "before", "after"})
            j["kl_on_teacher"][who] = evaluations_[who]["kl_on_teacher"];
    }
    j["accuracy"] = {{"teacher", teacher}, {"before", before}, {"after", after}};
    for (const char* key :
         {"valid", "step_validity", "sampled_accuracy", "kl_to_teacher", "mean_length", "p50_length", "p99_length"})
        for (const char* who : {"teacher", "before", "after"}) j[key][who] = evaluations_[who][key];
    j["estimator"] = settings_.distill.estimator;
    j["held_out_prompts"] = settings_.evaluation.prompts;
    double total = 0;
    for (std::size_t i = 0; i < clock_names.size(); ++i) {
        const auto tokens = static_cast<double>(state_.tokens[i]);
        j["tokens_per_second"][clock_names[i]] =
            seconds_[i] > 0 ? nlohmann::ordered_json(std::round(tokens / seconds_[i])) : nlohmann::ordered_json();
        j["seconds"][clock_names[i]] = seconds_[i];
        total += seconds_[i];
    }
    j["seconds"]["total"] = total;
    // from the file: a run that is resumed at its end has nothing else of it
    j["schedule"] = nlohmann::ordered_json::parse(read_file(directory_ + "/schedule.json"));
    j["threads"] = threads_of(settings_);
    j["version"] = version_of_opd();
    j["fingerprint"] = fingerprint(settings_);
    if (state_.rate.step >= 0) j["steps_changed_at"] = state_.rate.step; // else the settings say all
    write_file(directory_ + "/report.json", j.dump(2) + "\n");

    std::string t = fmt::format(
        "\n{:<16}{:>11}{:>13}{:>12}{:>10}{:>12}{:>10}\n", "", by_kl ? "grammatical" : "accuracy",
        settings_.evaluation.samples > 0 ? fmt::format("Avg@{}", settings_.evaluation.samples) : std::string("sampled"),
        "all valid", "steps ok", "KL(.|teach)", "length");
    for (const auto& [label, who] :
         {std::pair{"teacher", "teacher"}, std::pair{"student before", "before"}, std::pair{"student after", "after"}})
        t += fmt::format("{:<16}{:>11.4f}{:>13}{:>12.4f}{:>10.4f}{:>12.5f}{:>10.1f}\n", label, number(who, "accuracy"),
                         settings_.evaluation.samples > 0 ? fmt::format("{:.4f}", number(who, "sampled_accuracy"))
                                                          : std::string("-"),
                         number(who, "valid"), number(who, "step_validity"), number(who, "kl_to_teacher"),
                         number(who, "mean_length"));
    if (by_kl)
        t += fmt::format("\nKL to the teacher, mean of its prefixes and the student's: {:.4f} before, {:.4f} after\n",
                         kl_before, kl_after);
    t += gap ? fmt::format("\ngap closed      {:>10.3f}   ({} held-out prompts, {}, {})\n\n", closed,
                           settings_.evaluation.prompts, by_kl ? "KL" : "greedy", settings_.distill.estimator)
             : std::string("\ngap closed           none: the student before is not below the teacher\n\n");
    t += fmt::format("{:<16}{:>10}{:>14}\n", "stage", "seconds", "tokens/s");
    for (std::size_t i = 0; i < clock_names.size(); ++i)
        t += fmt::format("{:<16}{:>10.1f}{:>14}\n", clock_names[i], seconds_[i],
                         seconds_[i] > 0 ? fmt::format("{:.0f}", static_cast<double>(state_.tokens[i]) / seconds_[i])
                                         : std::string("-"));
    t += fmt::format("{:<16}{:>10.1f}\n", "total", total);
    if (j["schedule"].contains("offline")) t += offline_told(j["schedule"]["offline"]);
    if (j["schedule"].contains("served_teacher")) t += served_teacher::told(j["schedule"]["served_teacher"]);
    if (j["schedule"].contains("teacher_cache")) t += cache_told(j["schedule"]["teacher_cache"]);
    if (j["schedule"].contains("ledger")) t += tokens_ended(j["schedule"]["ledger"], settings_.schedule.kind);
    if (j["schedule"].contains("speculation")) t += drafts_paid(j["schedule"]["speculation"]);
    fmt::print("{}", t);
    std::fflush(stdout);

    const std::string ran = fmt::format("{}, {}, {}", settings_.distill.estimator,
                                        is_offline(settings_) ? "offline" : settings_.schedule.kind,
                                        gap ? fmt::format("gap closed {:.3f}", closed) : "no gap to close");
    if (const std::string problem = draw_plots(directory_, evaluations_, ran); !problem.empty())
        spdlog::warn("no plots: {}", problem);
    else
        spdlog::info("plots are in {}/plots", directory_);
    write_file(directory_ + "/report.html", report_page(settings_, j, t));
    spdlog::info("the report is {0}/report.html, its numbers are in {0}/report.json", directory_);
}

// What is to come, and how long it takes here.
void run::tell_plan() {
    if (state_.stage == stage::finished || arguments_.quiet) return;
    const transformer<float>& teacher = without_teacher(settings_) ? student_ : teacher_; // which has no part in it
    forecast_ = forecast_at(measured(settings_, *task_, teacher, student_, backend_), settings_);
    std::vector<std::string> what;
    const auto left = [&](int steps) { return steps - static_cast<int>(state_.step); };
    if (state_.stage == stage::teacher)
        what.push_back(fmt::format("{} steps of the teacher", left(settings_.teacher.steps)));
    if (state_.stage <= stage::student && settings_.student.max_steps > 0)
        what.push_back(fmt::format("at most {} of the student's warm-up", state_.stage == stage::student
                                                                              ? left(settings_.student.max_steps)
                                                                              : settings_.student.max_steps));
    what.push_back(fmt::format("{} of distillation ({}, {})",
                               state_.stage == stage::distill ? left(settings_.distill.steps) : settings_.distill.steps,
                               settings_.distill.estimator,
                               is_offline(settings_) ? "from " + settings_.distill.offline : settings_.schedule.kind));
    spdlog::info("into {}: {}; {} here. Ctrl-C writes a checkpoint and leaves, --list-settings says what can be set",
                 directory_, fmt::join(what, ", "), in_words(forecast_.from(state_.stage, state_.step)));
}

} // namespace trainer
