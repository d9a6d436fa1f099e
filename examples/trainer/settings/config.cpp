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

struct preset {
    std::string_view name, text;
};
// presets/*.json, as the build found them: <task>.json holds a task's own defaults, <task>-<preset>.json a preset.
constexpr preset presets[] = {
#include "presets.inc"
};

const preset* find_preset(const std::string& name) {
    const auto found = std::ranges::find(presets, name, &preset::name);
    return found == std::end(presets) ? nullptr : found;
}

constexpr std::string_view task_names[] = {"gcd", "grammar"};

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
    if (const preset* own = find_preset(name)) config_of_text(own->text, fmt::format("presets/{}.json", name), c);
}

void apply_preset(const std::string& name, config& c) {
    const std::string full = c.task.kind + "-" + name;
    if (const preset* found = find_preset(full)) {
        config_of_text(found->text, fmt::format("presets/{}.json", full), c);
        return;
    }
    std::vector<std::string> known, others; // of this task, of others
    for (const preset& p : presets)
        if (const auto dash = p.name.find('-'); dash != p.name.npos) {
            (p.name.substr(0, dash) == c.task.kind ? known : others).emplace_back(p.name.substr(dash + 1));
        }
    if (std::ranges::find(others, name) != others.end())
        throw failure(exit_usage, fmt::format("--preset {}: not with --task {}, which has {}", name, c.task.kind,
                                              fmt::join(known, ", ")));
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
