// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/config.hpp"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "nearest.hpp"
#include "numbers.hpp"
#include "settings/files.hpp"
#include "settings/options.hpp"

namespace trainer {

namespace {

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

} // namespace

nlohmann::ordered_json to_json(const config& c) {
    json_writer w{.unused = unused_settings(c)};
    visit_options(c, w);
    return w.out;
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

void task_named(const std::string& name) {
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

nlohmann::ordered_json results_json(const config& c) {
    json_writer w{.unused = unused_settings(c), .results_only = true};
    visit_options(c, w);
    return w.out;
}

std::string fingerprint(const config& c) { return hash128(results_json(c).dump()); }

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

} // namespace trainer
