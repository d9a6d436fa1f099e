// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/config.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "model/injection.hpp"
#include "nearest.hpp"
#include "numbers.hpp"
#include "opd/estimators/correction_presets.hpp"
#include "opd/version.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"
#include "speculation/drafters.hpp"
#include "task/grammar.hpp"
#include "task/task.hpp"

namespace trainer {

std::string speculation_help() {
    std::string all;
    for (const drafting_name& line : draftings) all += fmt::format("{}: {}; ", line.text, line.says);
    return all + "results do not depend on it, but under --driver virtual";
}

std::string policy_names() {
    std::vector<std::string> names;
    for (const opd::sched::staleness_policy p : opd::sched::staleness_policies()) names.emplace_back(name_of(p));
    return fmt::format("{}", fmt::join(names, ", "));
}

namespace {

// Beyond these a mistake is likelier than a purpose; products of what remains fit in 64 bits.
constexpr int most_at_once = 1'000'000; // sequences, prompts, draws
constexpr int most_wide = 65'536;       // of a model
constexpr double most_weights = 2e9;

struct json_writer {
    nlohmann::ordered_json out = {};
    std::vector<unused_setting> unused;
    bool results_only = false;
    std::string group_key = {};
    void group(const char* key, const char*) {
        group_key = key;
        if (results_only && group_key == "served") return; // of a run without one they are what they were before
        out[group_key] = nlohmann::ordered_json::object();
    }
    template <class T>
    void option(const char* key, const std::string&, const T& value, const char*, bool affects_results) {
        if (results_only && !affects_results) return;
        const auto left_out = [&](const unused_setting& u) { return u.group == group_key && u.key == key; };
        if (std::any_of(unused.begin(), unused.end(), left_out)) return;
        out[group_key][key] = value;
    }
};

struct json_reader {
    const nlohmann::json& in;
    const std::string& source;
    std::vector<std::string> groups;
    std::vector<std::pair<std::string, std::vector<std::string>>> keys;

    void group(const char* key, const char*) {
        groups.push_back(key);
        keys.push_back({key, {}});
    }
    template <class T>
    void option(const char* key, const std::string&, T& value, const char*, bool) {
        keys.back().second.push_back(key);
        const auto g = in.find(groups.back());
        if (g == in.end() || !g->is_object()) return;
        const auto found = g->find(key);
        if (found == g->end()) return;
        const auto wrong = [&](const std::string& expected) {
            throw failure(exit_usage, fmt::format("{}: {}.{} must be {}, not {}", source, groups.back(), key, expected,
                                                  found->dump()));
        };
        if constexpr (std::is_same_v<T, bool>) {
            if (!found->is_boolean()) wrong("true or false");
        } else if constexpr (std::is_same_v<T, std::string>) {
            if (!found->is_string()) wrong("a string");
        } else if constexpr (std::is_integral_v<T>) {
            if (!is_integer_of<T>(*found)) wrong(integer_range<T>());
        } else {
            if (!found->is_number()) wrong("a number");
        }
        value = found->template get<T>();
    }
    void check_keys() const {
        const auto unknown = [&](const std::string& name, const std::vector<std::string>& known,
                                 const std::string& in_) {
            const std::string near = nearest(name, known);
            throw failure(exit_usage,
                          fmt::format("{}: unknown key '{}'{}{}", source, name, in_,
                                      near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
        };
        if (!in.is_object()) throw failure(exit_usage, fmt::format("{}: a configuration is a JSON object", source));
        for (const auto& [name, value] : in.items()) {
            const auto g = std::find_if(keys.begin(), keys.end(), [&n = name](const auto& k) { return k.first == n; });
            if (g == keys.end()) {
                std::vector<std::string> full; // a setting, without its group
                for (const auto& [group, settings] : keys)
                    if (std::find(settings.begin(), settings.end(), name) != settings.end())
                        full.push_back(group + "." + name);
                if (!full.empty())
                    throw failure(exit_usage,
                                  fmt::format("{}: unknown key '{}': settings stand in their groups; it is {}", source,
                                              name, fmt::join(full, " or ")));
                unknown(name, groups, "");
            }
            if (!value.is_object())
                throw failure(exit_usage, fmt::format("{}: '{}' must be an object of settings", source, name));
            for (const auto& [key, ignored] : value.items())
                if (std::find(g->second.begin(), g->second.end(), key) == g->second.end())
                    unknown(key, g->second, fmt::format(" in '{}'", name));
        }
    }
};

// Refuses settings that were given, by a flag or in the file, and are not looked at.
struct unused_check {
    const std::vector<unused_setting>& unused;
    const CLI::App& app;
    const std::map<std::string, std::string>& in_file;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) const {
        for (const unused_setting& u : unused)
            if (u.group == group_key && u.key == key && (app.count(flag) > 0 || in_file.contains(flag)))
                throw failure(exit_usage, fmt::format("{} is not used by {}", flag, u.by));
    }
};

// The settings that a file decides: no flag overrides it.
struct file_check {
    const CLI::App& app;
    const nlohmann::json& file;
    std::map<std::string, std::string>& in_file;
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) const {
        if (app.count(flag) == 0 && file.contains(group_key) && file[group_key].contains(key))
            in_file[flag] = group_key + "." + key;
    }
};

struct command_line {
    CLI::App& app;
    std::string title;
    void group(const char*, const char* t) { title = t; }
    template <class T>
    void option(const char*, const std::string& flag, T& value, const char* help, bool) {
        if constexpr (std::is_same_v<T, bool>)
            app.add_flag(flag + ",!--no-" + flag.substr(2), value, help)->group(title)->capture_default_str();
        else {
            CLI::Option* o = app.add_option(flag, value, help)->group(title)->capture_default_str()->take_last();
            if constexpr (std::is_integral_v<T>)
                o->transform([flag](const std::string& text) {
                    const auto number = integer_of<T>(text);
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

nlohmann::ordered_json to_json(const config& c) {
    json_writer w{.unused = unused_settings(c)};
    visit_options(c, w);
    return w.out;
}

namespace {

bool composes(std::optional<part_estimator> e) { return e == part_estimator::mc || e == part_estimator::threshold; }
bool reads_draws(std::optional<part_estimator> e) { return composes(e) || e == part_estimator::lightning; }

template <class Table>
auto chosen(const char* flag, const Table& table, const std::string& text) {
    if (const auto kind = opd::choice::find(table, text)) return *kind;
    std::vector<std::string> known;
    for (const auto& line : table) known.emplace_back(line.text);
    const std::string near = nearest(text, known);
    throw failure(exit_usage, fmt::format("{}: '{}' is not one of {}{}", flag, text, fmt::join(known, ", "),
                                          near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
}

opd::choice::surrogate surrogate_of(opd::correction_loss loss) {
    switch (loss) {
    case opd::correction_loss::ppo_clip:
        return opd::choice::surrogate::ppo_clip;
    case opd::correction_loss::score_function:
        return opd::choice::surrogate::score_function;
    default:
        return opd::choice::surrogate::unclipped_is;
    }
}

const opd::correction_preset* correction_of(const config& c) {
    const std::string& name = c.distill.correction;
    if (name.empty()) return nullptr;
    (void)chosen("--correction", opd::correction_presets, name);
    for (const opd::correction_preset& p : opd::correction_presets)
        if (p.text == name) return &p;
    return nullptr; // not reached
}

} // namespace

opd::any_sampled drawn_estimator(const config& c) {
    const auto& d = c.distill;
    opd::any_sampled e;
    if (part_estimator_of(c) == part_estimator::lightning) { // opd::lightning: its bias is its choice
        e.of = {opd::choice::objective::clipped, d.advantage_clip};
        e.surrogate.which = opd::choice::surrogate::score_function;
        e.baseline = {opd::choice::baseline::exact_entries};
        e.accept_bias = true;
        return e;
    }
    e.of = {chosen("--shape", opd::choice::objectives, d.shape), d.shape_a, d.shape_b};
    e.surrogate = {.which = chosen("--surrogate", opd::choice::surrogates, d.surrogate),
                   .low = d.clip_low,
                   .high = d.clip_high,
                   .dual = d.dual_clip,
                   .cap = d.ratio_cap};
    const opd::correction_preset* preset = correction_of(c);
    if (preset != nullptr) {
        e.surrogate.which = surrogate_of(preset->loss);
        e.surrogate.correct = preset->which;
        e.surrogate.correct.passed = true; // loss_of_drawn makes the pass
    }
    e.baseline = {chosen("--baseline", opd::choice::baselines, d.baseline)};
    e.weighting = {d.self_normalise};
    e.accept_bias = d.accept_bias;
    try { // the library's own sentences
        e.validate();
        const opd::teacher::samples<std::int32_t> samples{};
        const opd::teacher::weighted<std::int32_t> weighted{};
        const auto check = [&](const auto& cache) {
            if (c.schedule.kind == "sync" && c.distill.mini_batches == 1 && !is_offline(c))
                e.validate_cache(opd::teacher::on_policy{cache});
            else
                e.validate_cache(cache);
        };
        part_estimator_of(c) == part_estimator::mc ? check(samples) : check(weighted);
    } catch (const opd::invalid_input& refused) {
        throw failure(exit_usage,
                      fmt::format("--shape {} {} --baseline {}: {}", d.shape,
                                  preset != nullptr ? "--correction " + d.correction : "--surrogate " + d.surrogate,
                                  d.baseline, refused.what()));
    }
    if (preset != nullptr && preset->which.needs_pass() && d.m != 1)
        throw failure(exit_usage, fmt::format("--correction {}: decides over sequences of one draw a position; needs "
                                              "--m 1",
                                              d.correction));
    if (preset != nullptr && d.m2po > 0)
        throw failure(exit_usage, "--m2po: the tokens that it leaves are unclipped; not with --correction");
    if (e.surrogate.which == opd::choice::surrogate::gspo)
        throw failure(exit_usage,
                      "--surrogate gspo: needs a pass over whole sequences (opd::gspo_fit), which this trainer "
                      "does not make");
    if ((e.reads_columns() & ~opd::column::log_prox) != 0)
        throw failure(exit_usage,
                      fmt::format("--shape {} --surrogate {} --baseline {}: reads what this trainer does not "
                                  "record: a reference policy, a reward, a given baseline",
                                  d.shape, d.surrogate, d.baseline));
    if (d.m2po > 0 && e.surrogate.which != opd::choice::surrogate::unclipped_is)
        throw failure(
            exit_usage,
            fmt::format("--m2po: the tokens that it leaves are unclipped; not with --surrogate {}", d.surrogate));
    e.accept_bias = true; // checked above, for the law that the schedule draws under
    return e;
}

// The names that stand in `all`, separated by commas; all of them are known.
template <class Known>
static std::vector<std::string> names_in(const char* flag, const std::string& all, const Known& known) {
    std::vector<std::string> names;
    for (std::size_t at = 0; at < all.size();) {
        const std::size_t end = std::min(all.size(), all.find(',', at));
        names.push_back(all.substr(at, end - at));
        at = end + 1;
        if (std::ranges::find(known, names.back()) == std::end(known))
            throw failure(exit_usage,
                          fmt::format("{}: '{}' is not one of {}", flag, names.back(), fmt::join(known, ", ")));
    }
    return names;
}

std::vector<std::string> accepted_mismatches(const config& c) {
    return names_in("--accept-mismatch", c.distill.accept_mismatch, mismatches);
}

std::vector<std::string> accepted_verdicts(const config& c) {
    return names_in("--accept-teacher", c.served.accept, probe_verdicts);
}

served_lists lists_for(const config& c) {
    const auto part = part_estimator_of(c);
    if (part == part_estimator::lightning || (part == part_estimator::mc && c.distill.m == 1))
        return served_lists::none; // the one draw is rollout's own token
    const bool best = (part == part_estimator::topk || part == part_estimator::tail_bucket);
    return best && c.distill.topk_from == "teacher" ? served_lists::best : served_lists::candidates;
}

// Of the settings that distil from a served teacher; those of its server alone are validate()'s.
static void validate_served(const config& c) {
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, "--teacher-url: " + what);
    };
    need(part_estimator_of(c).has_value(),
         fmt::format("a served teacher says log-probs of given tokens and of its best, no whole row: with --estimator "
                     "lightning, mc, threshold, topk, topk_rw or tail_bucket, not {}",
                     c.distill.estimator));
    need(c.distill.temperature == 1,
         fmt::format("servers say log-probs at temperature 1: not with --temperature {}", c.distill.temperature));
    need(lists_for(c) != served_lists::candidates || c.served.dialect == "vllm" || c.served.dialect == "sglang",
         fmt::format("--estimator {} asks for the log-probs of ids that rollout recorded, which --teacher-dialect {} "
                     "does not give: lightning, mc --m 1, or topk and tail_bucket with --topk-from teacher do without",
                     c.distill.estimator, c.served.dialect));
    need(!c.run.start_from.empty(),
         "needs --start-from, the checkpoints/student.ckpt of a run, whose warm student is distilled into");
}

std::optional<opd::any_dense> dense_estimator(const config& c) {
    using kind = opd::choice::objective;
    const auto& d = c.distill;
    const auto which = opd::choice::find(opd::choice::divergences, d.estimator);
    if (!which) return {};
    opd::any_dense e{*which};
    if (*which == kind::jsd) e.a = d.jsd_w, e.b = d.jsd_o;
    if (*which == kind::skew_forward_kl || *which == kind::skew_reverse_kl) e.a = d.skew;
    if (*which == kind::alpha_divergence) e.a = d.alpha;
    return e;
}

row_choice selector_of(const config& c, std::int32_t version) {
    using kind = opd::choice::selector;
    const auto& d = c.distill;
    const kind which = chosen("--selector", opd::choice::selectors, d.selector);
    const auto refuse = [&](const std::string& why) {
        throw failure(exit_usage, fmt::format("--selector {} --estimator {}: {}", d.selector, d.estimator, why));
    };
    const auto part = part_estimator_of(c);
    const bool on_support = part == part_estimator::topk, dense = dense_estimator(c).has_value();
    const unsigned known = dense || on_support ? opd::fact::of_dense
                           : reads_draws(part) ? opd::fact::of_tokens
                                               : opd::fact::of_buckets;
    row_choice out;
    try { // the library's own sentences
        if (which == kind::eopd) {
            if (d.estimator != "reverse_kl" && !on_support) refuse("mixes two divergences: of reverse_kl and topk");
            out.eopd = opd::selector::eopd{d.selector_a, d.selector_b};
            out.eopd->validate();
            return out;
        }
        out.weights = {which, d.selector_a, d.selector_b};
        if (which == kind::prefix && d.selector_b > 0)
            out.weights.a = opd::selector::prefix::at_step(version, d.selector_a, d.selector_b).depth;
        if (which == kind::prefix && !(d.selector_b >= 0)) refuse("--selector-b must be at least 0");
        out.weights.validate();
        out.weights.validate_for(known);
    } catch (const opd::invalid_input& refused) {
        refuse(refused.what());
    }
    return out;
}

const char* estimator_help() {
    const auto names = [](const auto& table) {
        std::vector<std::string_view> r;
        for (const auto& line : table) r.push_back(line.text);
        return fmt::format("{}", fmt::join(r, ", "));
    };
    static const std::string text = fmt::format("dense teacher logits: {}; a part of them: {}",
                                                names(opd::choice::divergences), names(part_estimators));
    return text.c_str();
}

std::string list_estimators() {
    std::string out;
    const auto table = [&](const std::string& title, const auto& lines) {
        out += (out.empty() ? "" : "\n") + title + ":\n";
        for (const auto& line : lines) out += fmt::format("  {:<18} {}\n", line.text, line.says);
    };
    table("--estimator, from dense logits of the teacher (a, b: --jsd-w, --jsd-o, --skew, --alpha)",
          opd::choice::divergences);
    table("--estimator, from a support or drawn tokens", part_estimators);
    const char* of_drawn = " (with --estimator mc or threshold)";
    table(std::string("--shape") + of_drawn, opd::choice::objectives);
    table(std::string("--surrogate") + of_drawn, opd::choice::surrogates);
    out += "\n--correction (with --estimator mc; S: PPO's clip, or what the line says):\n";
    for (const opd::correction_preset& p : opd::correction_presets)
        out += fmt::format("  {:<26} {}{}; {}\n", p.text, opd::says(p.which),
                           p.loss == opd::correction_loss::ppo_clip         ? ""
                           : p.loss == opd::correction_loss::score_function ? ", S = score_function"
                                                                            : ", S = unclipped_is",
                           p.source);
    table(std::string("--baseline") + of_drawn, opd::choice::baselines);
    table("--selector (a, b: --selector-a, --selector-b)", opd::choice::selectors);
    return out + "\nPairs that do not compose are refused with the reason.\n";
}

std::vector<unused_setting> unused_settings(const config& c) {
    std::vector<unused_setting> r;
    const auto only = [&r](bool used, const char* group, const std::string& by,
                           std::initializer_list<const char*> keys) {
        if (used) return;
        for (const char* key : keys) r.push_back({group, key, by});
    };
    const std::string& e = c.distill.estimator;
    const std::string estimator = "--estimator " + e;
    using kind = opd::choice::objective;
    const auto dense = opd::choice::find(opd::choice::divergences, e);
    const auto part = part_estimator_of(c);
    only(dense == kind::jsd, "distill", estimator, {"jsd_w", "jsd_o"});
    only(dense == kind::skew_forward_kl || dense == kind::skew_reverse_kl, "distill", estimator, {"skew"});
    only(dense == kind::alpha_divergence, "distill", estimator, {"alpha"});
    const bool of_support = part == part_estimator::topk || part == part_estimator::tail_bucket;
    only(of_support || part == part_estimator::topk_rw, "distill", estimator, {"k"});
    only(of_support, "distill", estimator, {"topk_from"});
    only(part == part_estimator::mc, "distill", estimator, {"m"});
    only(part == part_estimator::threshold, "distill", estimator, {"budget"});
    only(dense.has_value(), "distill", estimator, {"teacher_cache"});
    const std::string& cache = c.distill.teacher_cache;
    only(dense && cache != "dense", "distill", dense ? "--teacher-cache " + cache : estimator, {"hidden_budget"});
    only(dense && cache == "hidden-lowrank", "distill", dense ? "--teacher-cache " + cache : estimator,
         {"cache_rank", "cache_calibration"});
    const bool drawn = composes(part);
    only(part == part_estimator::lightning, "distill", estimator, {"advantage_clip"});
    only(is_offline(c) || !c.run.scoring_teacher.empty(), "distill", "a run without --offline or --scoring-teacher",
         {"accept_mismatch"});
    only(!is_offline(c), "distill", "--offline",
         {"rollout_top_k", "rollout_top_p", "rollout_min_p", "inject_mismatch", "micro_batch"});
    only(!is_offline(c), "schedule", "--offline",
         {"kind",
          "k",
          "tau",
          "staleness_policy",
          "outstanding",
          "concurrency",
          "weight_update",
          "park_after",
          "rollout_workers",
          "teachers",
          "score_batch",
          "score_flush",
          "attempts",
          "inject",
          "publish",
          "inject_seconds",
          "driver",
          "rollout_deadline",
          "teacher_deadline",
          "sync_deadline",
          "learner_deadline"});
    only(!is_offline(c), "served", "--offline", {"url"});
    only(is_served(c), "served", "a run without --teacher-url",
         {"dialect", "model", "requests", "silence", "patience", "accept"});
    const std::string &shape = c.distill.shape, &surrogate = c.distill.surrogate;
    const auto one_of = [](const std::string& x, std::initializer_list<const char*> names) {
        return std::find(names.begin(), names.end(), x) != names.end();
    };
    only(drawn, "distill", estimator, {"shape", "surrogate", "baseline", "self_normalise", "accept_bias", "m2po"});
    only(part == part_estimator::mc, "distill", estimator, {"correction"});
    const opd::correction_preset* preset = drawn ? correction_of(c) : nullptr;
    only(preset == nullptr, "distill", "--correction " + c.distill.correction, {"surrogate"});
    const std::string by_shape = drawn ? "--shape " + shape : estimator;
    const std::string by_surrogate = preset != nullptr ? "--correction " + c.distill.correction
                                     : drawn           ? "--surrogate " + surrogate
                                                       : estimator;
    const bool clips = preset != nullptr ? preset->loss == opd::correction_loss::ppo_clip
                                         : one_of(surrogate, {"ppo_clip", "decoupled_ppo", "cispo", "a3po"});
    only(drawn && one_of(shape, {"jsd", "skew_forward_kl", "skew_reverse_kl", "alpha_divergence", "clipped", "mixed",
                                 "box_cox", "scaled", "band"}),
         "distill", by_shape, {"shape_a"});
    only(drawn && shape == "jsd", "distill", by_shape, {"shape_b"});
    only(drawn && clips, "distill", by_surrogate, {"clip_low", "clip_high"});
    only(drawn && clips && (preset != nullptr || surrogate == "ppo_clip"), "distill", by_surrogate, {"dual_clip"});
    only(drawn && preset == nullptr && one_of(surrogate, {"truncated_is", "decoupled_ppo", "a3po"}), "distill",
         by_surrogate, {"ratio_cap"});

    const std::string& selector = c.distill.selector;
    only(c.task.kind == "grammar", "task", "--task " + c.task.kind, {"max_words"});
    only(c.task.kind == "gcd", "task", "--task " + c.task.kind, {"max_operand", "max_steps"});
    only(selector != "all", "distill", "--selector " + selector, {"selector_a"});
    only(one_of(selector, {"tip", "prefix", "eopd"}), "distill", "--selector " + selector, {"selector_b"});

    const auto& s = c.schedule;
    const bool async = s.kind == "async";
    bool own_admission = false; // its policy's rule, instead of --outstanding
    for (const opd::sched::staleness_policy p : opd::sched::staleness_policies())
        own_admission |= async && s.staleness_policy == name_of(p) && traits_of(p).own_admission;
    const std::string schedule = "--schedule " + s.kind;
    const std::string policy = schedule + (async ? " --staleness-policy " + s.staleness_policy : "");
    only(s.kind == "step-off" || s.kind == "controlled", "schedule", schedule, {"k"});
    only(async, "schedule", schedule, {"tau", "staleness_policy", "weight_update"});
    only(async && !own_admission, "schedule", policy, {"outstanding"});
    only(own_admission, "schedule", policy, {"concurrency"});
    only(!async || s.weight_update == "keep", "schedule", schedule + " --weight-update " + s.weight_update,
         {"park_after"});
    only(async, "schedule", schedule, {"score_flush"});
    only(!s.inject.empty(), "schedule", "a run without --inject", {"inject_seconds"});
    only(s.publish == "deltas", "schedule", "--publish " + s.publish, {"check_publications"});
    only(!in_virtual_time(c), "schedule", "--driver " + s.driver, {"learner_threads"});
    const std::string& speculate = c.speculation.kind;
    only(speculate != "off" && speculate != "auto", "speculation", "--speculate " + speculate, {"depth", "verify"});
    only(speculate == "learned", "speculation", "--speculate " + speculate, {"children"});
    only(speculate == "learned" || speculate == "auto", "speculation", "--speculate " + speculate, {"from"});
    only(speculate == "auto", "speculation", "--speculate " + speculate, {"running"});
    only(speculate == "ngram" || speculate == "auto", "speculation", "--speculate " + speculate, {"history"});
    only(in_virtual_time(c), "schedule", "--driver " + s.driver,
         {"cost_step", "cost_step_row", "cost_score", "cost_score_row", "cost_train", "cost_train_row", "cost_sync"});
    only(in_virtual_time(c) && (speculate == "learned" || speculate == "auto"), "schedule",
         fmt::format("--driver {} --speculate {}", s.driver, speculate), {"cost_draft", "cost_draft_row"});
    const bool learns = speculate == "learned" || speculate == "auto", adapts = learns && c.speculation.adapt;
    only(learns, "speculation", "--speculate " + speculate, {"adapt"});
    only(adapts, "speculation", "a run without --adapt-drafter",
         {"adapt_rate", "adapt_rows", "adapt_memory", "adapt_slices", "adapt_checkpoint_every"});
    only(in_virtual_time(c) && adapts, "schedule",
         in_virtual_time(c) ? "a run without --adapt-drafter" : "--driver " + s.driver,
         {"cost_adapt", "cost_adapt_row"});

    const auto& d = c.drafter;
    only(d.kind == "model", "drafter", "--drafter " + d.kind, {"width"});
    only(d.kind == "hidden", "drafter", "--drafter " + d.kind, {"hidden"});
    only(d.loss != "eagle3", "drafter", "--drafter-loss " + d.loss, {"hidden"});
    only(d.loss == "hass" || d.loss == "eagle3", "drafter", "--drafter-loss " + d.loss, {"test_steps"});
    only(d.loss == "hass", "drafter", "--drafter-loss " + d.loss, {"top_k"});
    only(d.loss == "lk", "drafter", "--drafter-loss " + d.loss, {"acceptance", "kl", "weights", "gamma", "smoothing"});
    only(d.loss == "eagle" || d.loss == "hass", "drafter", "--drafter-loss " + d.loss, {"ce"});
    only(d.weights == "decaying", "drafter", "--drafter-weights " + d.weights, {"gamma"});
    only(d.weights == "accepted_length", "drafter", "--drafter-weights " + d.weights, {"smoothing"});
    return r;
}

void from_json(const nlohmann::json& j, const std::string& source, config& c) {
    json_reader r{j, source, {}, {}};
    config changed = c;
    if (j.is_object()) visit_options(changed, r);
    r.check_keys();
    c = changed;
}

namespace {

// A run of minutes on two cores. Embeddings of 2,300 words are most of the models; tied, they are learnt sooner.
void grammar_defaults(config& c) {
    c.run.directory = "runs/grammar";
    for (model_shape* m : {&c.teacher_model, &c.student_model}) m->width = 64, m->ffn = 192, m->tied = true;
    c.teacher.steps = 2500, c.teacher.batch = 64, c.teacher.rate = 8e-3;
    c.student.max_steps = 500, c.student.rate = 4e-3, c.student.target_accuracy = 0.25;
    c.student.check_every = 50, c.student.check_prompts = 128;
    c.distill.steps = 1200, c.distill.rate = 4e-3;
    c.distill.k = 64, c.distill.m = 64, c.distill.budget = 64;
    c.evaluation.prompts = 512, c.evaluation.samples = 0, c.evaluation.every_prompts = 128;
}

constexpr std::string_view task_names[] = {"gcd", "grammar"};

// A task of two digits that both models learn within a minute.
void quick(config& c) {
    c.task.max_operand = 99, c.task.max_steps = 10;
    c.teacher.steps = 1000;
    c.student.max_steps = 400, c.student.target_accuracy = 0.4, c.student.check_prompts = 128;
    c.distill.steps = 1200, c.distill.rate = 4e-3;
    c.evaluation.prompts = 300, c.evaluation.samples = 0, c.evaluation.every = 100, c.evaluation.every_prompts = 100;
}

// The same task, with less of everything.
void quick_grammar(config& c) {
    c.teacher.steps = 500;
    c.student.max_steps = 250;
    c.distill.steps = 200;
    c.evaluation.prompts = 128, c.evaluation.every = 100;
}

// A target that is deep beside its drafter's one layer; what it has learnt of the task is of no importance.
void speculative(config& c) {
    auto& m = c.student_model;
    m.width = 256, m.layers = 6, m.heads = 8, m.kv_heads = 4, m.head_dim = 32, m.ffn = 512;
    c.teacher.steps = 1200;
    c.student.max_steps = 160, c.student.rate = 1e-3, c.student.batch = 16, c.student.check_every = 40,
    c.student.check_prompts = 128;
    c.distill.steps = 40, c.distill.prompts = 4, c.distill.rate = 3e-4, c.distill.warmup = 5;
    c.evaluation.prompts = 200, c.evaluation.samples = 0, c.evaluation.every = 0;
    auto& d = c.drafter;
    d.heads = 2, d.kv_heads = 1, d.head_dim = 32, d.ffn = 128, d.width = 64;
    d.steps = 300, d.responses = 384, d.batch = 16, d.rate = 2e-3;
}

} // namespace

static void task_named(const std::string& name) {
    if (std::ranges::find(task_names, name) != std::end(task_names)) return;
    const std::string near = nearest(name, {std::begin(task_names), std::end(task_names)});
    throw failure(exit_usage, fmt::format("--task: '{}' is not one of {}{}", name, fmt::join(task_names, ", "),
                                          near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
}

void apply_task(const std::string& name, config& c) {
    task_named(name);
    c.task.kind = name;
    if (name == "grammar") grammar_defaults(c);
}

void apply_preset(const std::string& name, config& c) {
    const bool grammar = c.task.kind == "grammar";
    if (name == "quick") return grammar ? quick_grammar(c) : quick(c);
    if (name == "speculative" && grammar)
        throw failure(exit_usage, "--preset speculative: its sizes are those of --task gcd; not with --task grammar");
    if (name == "speculative") return speculative(c);
    const std::vector<std::string> known = {"quick", "speculative"};
    const std::string near = nearest(name, known);
    throw failure(exit_usage, fmt::format("--preset: '{}' is not one of {}{}", name, fmt::join(known, ", "),
                                          near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
}

nlohmann::json config_of_text(std::string_view text, const std::string& source, config& c) {
    nlohmann::json j;
    try {
        j = parse_json(text);
    } catch (const std::runtime_error& e) {
        throw failure(exit_usage, fmt::format("{}: {}", source, e.what()));
    }
    from_json(j, source, c);
    return j;
}

nlohmann::json load_config(const std::string& path, config& c) { return config_of_text(read_file(path), path, c); }

void validate(const config& c) {
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    const auto at_least = [&](const char* flag, auto value, auto least) {
        need(value >= least, fmt::format("{} must be at least {}, not {}", flag, least, value));
    };
    const auto count = [&](const char* flag, int value, int least) { // of what is held in memory at once
        need(value >= least && value <= most_at_once,
             fmt::format("{} must lie in [{}, {}], not {}", flag, least, most_at_once, value));
    };
    const auto positive = [&](const char* flag, double value) {
        need(std::isfinite(value) && value > 0, fmt::format("{} must be positive and finite, not {}", flag, value));
    };
    const auto not_negative = [&](const char* flag, double value) {
        need(std::isfinite(value) && value >= 0, fmt::format("{} must be at least 0 and finite, not {}", flag, value));
    };
    const auto within = [&](const char* flag, double value, double low, double high) {
        need(value >= low && value <= high, fmt::format("{} must lie in [{}, {}], not {}", flag, low, high, value));
    };
    need(!c.run.directory.empty(), "--run-dir must name a directory");
    need(c.run.threads >= 0 && c.run.threads <= most_threads,
         fmt::format("--threads must lie in [0, {}], not {}", most_threads, c.run.threads));
    at_least("--checkpoint-every", c.run.checkpoint_every, 1);
    at_least("--log-every", c.run.log_every, 1);
    positive("--loss-limit", c.run.loss_limit);
    task_named(c.task.kind);
    need(c.task.max_words >= 12 && c.task.max_words <= grammar::longest,
         fmt::format("--max-words must lie in [12, {}], not {}", grammar::longest, c.task.max_words));
    at_least("--max-operand", c.task.max_operand, 3);
    need(c.task.max_operand <= 9999, fmt::format("--max-operand must be at most 9999, not {}", c.task.max_operand));
    // no pair takes more subtractions than its larger operand
    need(c.task.max_steps >= 1 && c.task.max_steps <= 9999,
         fmt::format("--max-task-steps must lie in [1, 9999], not {}", c.task.max_steps));
    at_least("--held-out-one-in", c.task.held_out_one_in, 2);
    need(c.task.vocabulary == 0 || (c.task.vocabulary >= gcd_task::text.vocabulary() && c.task.vocabulary <= most_wide),
         fmt::format("--vocabulary must be 0 or lie in [{}, {}], not {}", gcd_task::text.vocabulary(), most_wide,
                     c.task.vocabulary));
    const auto model = [&](const model_shape& m, const std::string& prefix) {
        for (const auto& [name, value] : {std::pair{"-width", m.width},
                                          {"-layers", m.layers},
                                          {"-heads", m.heads},
                                          {"-kv-heads", m.kv_heads},
                                          {"-head-dim", m.head_dim},
                                          {"-ffn", m.ffn}})
            need(value >= 1 && value <= most_wide,
                 fmt::format("{}{} must lie in [1, {}], not {}", prefix, name, most_wide, value));
        need(m.heads % m.kv_heads == 0,
             fmt::format("{0}-kv-heads ({1}) must divide {0}-heads ({2})", prefix, m.kv_heads, m.heads));
        need(m.head_dim % 2 == 0, fmt::format("{}-head-dim must be even, not {}", prefix, m.head_dim));
        // a layer's matrices, in double: the product of four such numbers leaves 64 bits
        const double weights =
            1.0 * m.layers * m.width * (static_cast<double>(2 * m.q_width() + 2 * m.kv_width()) + 3.0 * m.ffn);
        need(weights <= most_weights,
             fmt::format("{0}-width, {0}-layers, {0}-heads, {0}-head-dim and {0}-ffn make a model of {1:.2g} weights; "
                         "{2:.2g} is the most",
                         prefix, weights, most_weights));
    };
    model(c.teacher_model, "--teacher");
    model(c.student_model, "--student");
    at_least("--teacher-steps", c.teacher.steps, 1);
    count("--teacher-batch", c.teacher.batch, 1);
    at_least("--teacher-warmup", c.teacher.warmup, 0);
    positive("--teacher-rate", c.teacher.rate);
    need(c.student.data == "solutions" || c.student.data == "teacher",
         fmt::format("--warmup-data must be solutions or teacher, not '{}'", c.student.data));
    at_least("--student-max-steps", c.student.max_steps, 0);
    count("--student-batch", c.student.batch, 1);
    at_least("--student-warmup", c.student.warmup, 0);
    positive("--student-rate", c.student.rate);
    within("--student-target-accuracy", c.student.target_accuracy, 0, 1);
    at_least("--student-check-every", c.student.check_every, 1);
    count("--student-check-prompts", c.student.check_prompts, 1);
    if (std::find(estimators.begin(), estimators.end(), c.distill.estimator) == estimators.end()) {
        const std::string near = nearest(c.distill.estimator, {estimators.begin(), estimators.end()});
        throw failure(exit_usage,
                      fmt::format("--estimator: '{}' is not one of {}{}", c.distill.estimator,
                                  fmt::join(estimators, ", "),
                                  near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
    }
    at_least("--steps", c.distill.steps, 0);
    count("--prompts", c.distill.prompts, 1);
    count("--answers", c.distill.answers, 1);
    need(std::int64_t{c.distill.prompts} * c.distill.answers <= most_at_once,
         fmt::format("--prompts ({}) times --answers ({}) must be at most {}", c.distill.prompts, c.distill.answers,
                     most_at_once));
    need(c.distill.mini_batches >= 1 && batch_of(c) % c.distill.mini_batches == 0,
         fmt::format("--mini-batches must divide --prompts times --answers, {}, not be {}", batch_of(c),
                     c.distill.mini_batches));
    at_least("--micro-batch", c.distill.micro_batch, 0);
    if (c.distill.micro_batch > 0) {
        const auto whole = [&](bool ok, const std::string& by) { // what is decided over all tokens of an update
            need(ok, fmt::format("--micro-batch: not with {}, which looks at the whole update", by));
        };
        whole(!(c.distill.m2po > 0), "--m2po");
        whole(c.distill.correction.empty(), "--correction");
        whole(c.distill.selector == "all", "--selector " + c.distill.selector);
    }
    at_least("--warmup", c.distill.warmup, 0);
    positive("--rate", c.distill.rate);
    within("--temperature", c.distill.temperature, 1e-6, 1e6); // what the library takes; likewise alpha
    const std::string& cache = c.distill.teacher_cache;
    need(cache == "dense" || cache == "hidden" || cache == "hidden-lowrank",
         fmt::format("--teacher-cache must be dense, hidden or hidden-lowrank, not '{}'", cache));
    if (cache == "hidden-lowrank")
        need(c.distill.cache_rank >= 1 && c.distill.cache_rank <= c.teacher_model.width,
             fmt::format("--cache-rank must lie in [1, {}], the teacher's width, not {}", c.teacher_model.width,
                         c.distill.cache_rank));
    count("--cache-calibration", c.distill.cache_calibration, 1);
    const int known = c.task.kind == "grammar" ? grammar::shipped().vocabulary() : gcd_task::text.vocabulary();
    const int row = static_cast<int>(sizeof(float)) * std::max(c.task.vocabulary, known);
    need(c.distill.hidden_budget >= row,
         fmt::format("--hidden-budget must be at least {}, the bytes of a row of logits, not {}", row,
                     c.distill.hidden_budget));
    need(c.distill.jsd_w > 0 && c.distill.jsd_w < 1,
         fmt::format("--jsd-w must lie in (0, 1), not {}", c.distill.jsd_w));
    within("--jsd-o", c.distill.jsd_o, 0, 1);
    need(c.distill.skew >= 0 && c.distill.skew < 1, fmt::format("--skew must lie in [0, 1), not {}", c.distill.skew));
    within("--alpha", c.distill.alpha, -1000, 1000);
    at_least("--k", c.distill.k, 1);
    need(c.distill.topk_from == "teacher" || c.distill.topk_from == "student",
         fmt::format("--topk-from must be teacher or student, not '{}'", c.distill.topk_from));
    if (reads_draws(part_estimator_of(c))) drawn_estimator(c); // names what it refuses
    selector_of(c, 0);
    positive("--advantage-clip", c.distill.advantage_clip);
    accepted_mismatches(c);
    if (is_offline(c)) {
        const auto part = part_estimator_of(c);
        const bool lists = part == part_estimator::topk || part == part_estimator::tail_bucket;
        need(part == part_estimator::lightning || (part == part_estimator::mc && c.distill.m == 1) ||
                 (lists && c.distill.topk_from == "teacher"),
             fmt::format(
                 "--offline: a data set has one draw a token, and where it was asked for the teacher's best ids: "
                 "with --estimator lightning, mc --m 1, or topk and tail_bucket, not {}",
                 part == part_estimator::mc ? fmt::format("--m {}", c.distill.m)
                 : lists                    ? "--topk-from " + c.distill.topk_from
                                            : "--estimator " + c.distill.estimator));
        need(!c.run.start_from.empty(),
             "--offline: needs --start-from, the checkpoints/student.ckpt whose student drew the data set");
    }
    not_negative("--m2po", c.distill.m2po);
    not_negative("--loss-clamp", c.distill.loss_clamp);
    at_least("--rollout-top-k", c.distill.rollout_top_k, 0);
    need(c.distill.rollout_top_p > 0 && c.distill.rollout_top_p <= 1,
         fmt::format("--rollout-top-p must lie in (0, 1], not {}", c.distill.rollout_top_p));
    need(c.distill.rollout_min_p >= 0 && c.distill.rollout_min_p <= 1,
         fmt::format("--rollout-min-p must lie in [0, 1], not {}", c.distill.rollout_min_p));
    need(
        !filters_rollout(c) || !dense_estimator(c) || cache == "dense",
        fmt::format("--rollout-top-k, --rollout-top-p, --rollout-min-p: not with --teacher-cache {}, whose learner has "
                    "no logits to tell what of them was kept",
                    cache));
    injection_of(c); // names what it refuses
    count("--m", c.distill.m, 1);
    at_least("--budget", c.distill.budget, 1);
    count("--slots", c.distill.slots, 1);
    at_least("--prefill-chunk", c.distill.prefill_chunk, 1);
    need(c.distill.kv_tokens >= 0 && c.distill.kv_tokens <= 1'000'000'000,
         fmt::format("--kv-tokens must lie in [0, 1000000000], not {}", c.distill.kv_tokens));
    schedule_of(c); // names what it refuses
    const auto& t = c.served;
    for (std::size_t at = 0; at < t.url.size(); at = std::min(t.url.size(), t.url.find(',', at)) + 1)
        need(
            t.url.compare(at, 7, "http://") == 0,
            fmt::format("--teacher-url: '{}' does not begin with http:// (TLS is a proxy's affair)", t.url.substr(at)));
    need(t.dialect == "vllm" || t.dialect == "sglang" || t.dialect == "llama_cpp" || t.dialect == "openai_echo",
         fmt::format("--teacher-dialect must be vllm, sglang, llama_cpp or openai_echo, not '{}'", t.dialect));
    need(t.requests >= 1 && t.requests <= 4096,
         fmt::format("--teacher-requests must lie in [1, 4096], not {}", t.requests));
    within("--teacher-silence", t.silence, 1e-3, 1e6);
    within("--teacher-patience", t.patience, 1e-3, 1e6);
    accepted_verdicts(c);
    const auto& d = c.drafter;
    need(d.kind == "hidden" || d.kind == "eagle3" || d.kind == "model",
         fmt::format("--drafter must be hidden, eagle3 or model, not '{}'", d.kind));
    model({.width = d.kind == "model" ? d.width : c.student_model.width,
           .layers = d.layers,
           .heads = d.heads,
           .kv_heads = d.kv_heads,
           .head_dim = d.head_dim,
           .ffn = d.ffn},
          "--drafter");
    at_least("--drafter-steps", d.steps, 1);
    count("--drafter-batch", d.batch, 1);
    at_least("--drafter-warmup", d.warmup, 0);
    positive("--drafter-rate", d.rate);
    count("--drafter-responses", d.responses, d.batch);
    need(d.depth >= 1 && d.depth <= 64, fmt::format("--drafter-depth must lie in [1, 64], not {}", d.depth));
    not_negative("--drafter-acceptance", d.acceptance);
    not_negative("--drafter-kl", d.kl);
    not_negative("--drafter-hidden", d.hidden);
    need(d.loss == "lk" || d.loss == "eagle" || d.loss == "hass" || d.loss == "eagle3" || d.loss == "osd",
         fmt::format("--drafter-loss must be lk, eagle, hass, eagle3 or osd, not '{}'", d.loss));
    need((d.loss != "hass" && d.loss != "eagle3") || d.kind != "model",
         fmt::format("--drafter-loss {} is of a drafter on hidden states, not --drafter model", d.loss));
    need(d.test_steps >= 0 && d.test_steps <= 64,
         fmt::format("--drafter-test-steps must lie in [0, 64], not {}", d.test_steps));
    at_least("--drafter-top-k", d.top_k, 0);
    positive("--drafter-ce", d.ce);
    need(d.acceptance + d.kl > 0, "--drafter-acceptance and --drafter-kl must not both be 0");
    need(d.weights == "accepted_length" || d.weights == "decaying" || d.weights == "none",
         fmt::format("--drafter-weights must be accepted_length, decaying or none, not '{}'", d.weights));
    positive("--drafter-gamma", d.gamma);
    within("--drafter-smoothing", d.smoothing, 0, 1);
    count("--drafter-held-out", d.held_out, 1);
    const auto& g = c.speculation;
    std::vector<std::string_view> kinds;
    for (const drafting_name& line : draftings) kinds.push_back(line.text);
    need(std::ranges::find(kinds, g.kind) != kinds.end(),
         fmt::format("--speculate must be one of {}, not '{}'", fmt::join(kinds, ", "), g.kind));
    constexpr int most_drafts = 64; // a sequence and step: beyond, verifying them is a prefill
    for (const auto& [flag, value] :
         {std::pair{"--draft-depth", g.depth}, {"--draft-verify", g.verify}, {"--draft-children", g.children}})
        need(value >= 1 && value <= most_drafts,
             fmt::format("{} must lie in [1, {}], not {}", flag, most_drafts, value));
    count("--draft-running", g.running, 1);
    positive("--adapt-rate", g.adapt_rate);
    count("--adapt-rows", g.adapt_rows, 1);
    need(g.adapt_memory >= g.adapt_rows && g.adapt_memory <= 500'000'000,
         fmt::format("--adapt-memory must lie in [--adapt-rows, 500000000], not {}", g.adapt_memory));
    at_least("--adapt-slices", g.adapt_slices, 0);
    at_least("--adapt-checkpoint-every", g.adapt_checkpoint_every, 1);
    need(g.history >= 1 && g.history <= 500'000'000,
         fmt::format("--draft-history must lie in [1, 500000000], not {}", g.history));
    within("--beta1", c.optimizer.beta1, 0, 0.9999999);
    within("--beta2", c.optimizer.beta2, 0, 0.9999999);
    positive("--epsilon", c.optimizer.epsilon);
    not_negative("--weight-decay", c.optimizer.decay);
    not_negative("--clip", c.optimizer.clip);
    at_least("--eval-prompts", c.evaluation.prompts, 1);
    count("--eval-samples", c.evaluation.samples, 0);
    at_least("--eval-every", c.evaluation.every, 0);
    at_least("--eval-every-prompts", c.evaluation.every_prompts, 1);
}

nlohmann::ordered_json results_json(const config& c) {
    json_writer w{.unused = unused_settings(c), .results_only = true};
    visit_options(c, w);
    return w.out;
}

std::string fingerprint(const config& c) { return hash128(results_json(c).dump()); }

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
    return r != text ? c.file + ": " + r : r;
}

std::string differences(const std::string& a, const std::string& b) {
    const auto x = nlohmann::json::parse(a, nullptr, false), y = nlohmann::json::parse(b, nullptr, false);
    std::string r;
    const auto add = [&](const nlohmann::json& these, const nlohmann::json& those, bool both) {
        for (const auto& [group, settings] : these.items())
            for (const auto& [key, value] : settings.items())
                if (!those.contains(group) || !those[group].contains(key) || (both && those[group][key] != value))
                    r += (r.empty() ? "" : ", ") + group + "." + key;
    };
    add(y, x, true);
    add(x, y, false); // settings that only the one has
    return r;
}

command parse_command_line(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv{"opd-train"};
    for (const std::string& a : arguments) argv.push_back(a.c_str());
    return parse_command_line(static_cast<int>(argv.size()), argv.data());
}

command parse_command_line(int argc, const char* const* argv) {
    command r;
    std::string config_file, preset, task;
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
        load_config(r.file, said);
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
        file = load_config(r.file, r.settings);
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
        "--resume goes on).");
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
    bool list = false;
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
    visit_options(r.settings, command_line{app, ""});
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
            if (const std::string near = nearest(name, known); !near.empty())
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
        r.text = list_estimators();
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
        if (is_served(r.settings) && !is_offline(r.settings) && r.write_offline.empty() && !r.train_drafter)
            validate_served(r.settings);
        const std::vector<unused_setting> unused = unused_settings(r.settings);
        visit_options(r.settings, unused_check{unused, app, r.in_file});
    } catch (const failure& e) {
        throw failure(e.code, as_given(r, e.what()));
    }
    if (r.print_config) r.text = to_json(r.settings).dump(2) + "\n";
    return r;
}

injection injection_of(const config& c) {
    injection out;
    const auto refuse = [](const std::string& why) { throw failure(exit_usage, "--inject-mismatch " + why); };
    std::istringstream parts(c.distill.inject_mismatch);
    for (std::string part; std::getline(parts, part, ',');) {
        const std::size_t equals = part.find('=');
        const std::string name = part.substr(0, equals);
        constexpr double none = -1; // lies in none of the intervals
        const double value = equals == std::string::npos ? none : number_of(part.substr(equals + 1)).value_or(none);
        const auto takes = [&](bool ok, const char* what) {
            if (!ok) refuse(fmt::format("takes {}, not '{}'", what, part));
        };
        if (name == "bf16" || name == "filter") {
            takes(equals == std::string::npos, "bf16 and filter without a number");
            (name == "bf16" ? out.bf16 : out.filter) = true;
        } else if (name == "split") {
            takes(value >= 1 && value <= 64 && value == std::floor(value), "split=n, n an integer from 1 to 64");
            out.split = static_cast<int>(value);
        } else if (name == "temperature") {
            takes(value >= 0.1 && value <= 10, "temperature=f, f in [0.1, 10]");
            out.temperature = value;
        } else if (name == "noise") {
            takes(value >= 0 && value <= 10, "noise=s, s in [0, 10]");
            out.noise = value;
        } else {
            const std::string near = nearest(name, {"bf16", "split", "temperature", "noise", "filter"});
            refuse(fmt::format("names bf16, split, temperature, noise and filter, not '{}'{}", name,
                               near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
        }
    }
    if (out.filter && !filters_rollout(c))
        refuse("filter: rollout has none to keep quiet about; needs --rollout-top-k, --rollout-top-p or "
               "--rollout-min-p");
    return out;
}

} // namespace trainer
