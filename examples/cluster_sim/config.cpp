// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "config.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "nearest.hpp"
#include "numbers.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

// What the library says of its own setting, said of the key that sets it; "opd: " goes from the rest.
std::string in_keys(const opd::invalid_input& e) {
    static constexpr std::pair<std::string_view, const char*> keys[] = {{"teacher_batch", "teacher.batch"},
                                                                        {"teacher_flush", "teacher.flush"},
                                                                        {"schedule.k", "k"},
                                                                        {"schedule.tau", "tau"},
                                                                        {"schedule.outstanding", "outstanding"},
                                                                        {"schedule.concurrency", "concurrency"},
                                                                        {"schedule.policy", "policy"},
                                                                        {"teacher.per_item", "teacher.per_sequence"},
                                                                        {"learner.per_item", "learner.per_sequence"},
                                                                        {"sync.per_item", "sync.per_worker"}};
    std::string text = e.what();
    text.erase(0, std::string_view("opd: ").size());
    for (const auto& [setting, key] : keys)
        if (e.argument == setting) text.replace(0, setting.size(), key);
    return text;
}

// One JSON object whose keys are all known in the end.
class reader {
public:
    reader(const nlohmann::json& j, std::string where) : j_(j), where_(std::move(where)) {
        if (!j.is_object()) fail("an object", j);
    }

    bool has(const char* key) {
        known_.push_back(key);
        return j_.contains(key);
    }
    template <class T>
    void operator()(const char* key, T& value) {
        if (has(key)) read(j_.at(key), value, key);
    }
    template <class F>
    void object(const char* key, F&& f) {
        if (!has(key)) return;
        reader inner(j_.at(key), path(key));
        f(inner);
        inner.finish();
    }
    template <class F>
    void list(const char* key, F&& f) {
        if (!has(key)) return;
        const auto& a = j_.at(key);
        if (!a.is_array()) fail_at(key, "a list", a);
        for (std::size_t i = 0; i < a.size(); ++i) f(a[i], fmt::format("{}[{}]", path(key), i));
    }
    std::string name(const char* key, const std::vector<std::string>& choices, const std::string& otherwise) {
        std::string value = otherwise;
        (*this)(key, value);
        if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
            const std::string near = nearest(value, choices);
            throw failure(exit_usage, fmt::format("{}: '{}' is not one of {}{}", path(key), value,
                                                  fmt::join(choices, ", "), hint(near)));
        }
        return value;
    }
    void finish() const {
        for (const auto& [key, value] : j_.items())
            if (std::find(known_.begin(), known_.end(), key) == known_.end())
                throw failure(exit_usage,
                              fmt::format("{}: unknown key '{}'{}", where_, key, hint(nearest(key, known_))));
    }
    std::string path(const std::string& key) const { return where_ + "." + key; }

private:
    static std::string hint(const std::string& near) {
        return near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near);
    }
    [[noreturn]] void fail(const std::string& expected, const nlohmann::json& got) const {
        throw failure(exit_usage, fmt::format("{} must be {}, not {}", where_, expected, got.dump()));
    }
    [[noreturn]] void fail_at(const std::string& key, const std::string& expected, const nlohmann::json& got) const {
        throw failure(exit_usage, fmt::format("{} must be {}, not {}", path(key), expected, got.dump()));
    }
    template <class T>
    void read(const nlohmann::json& in, T& value, const char* key) const {
        if constexpr (std::is_same_v<T, bool>) {
            if (!in.is_boolean()) fail_at(key, "true or false", in);
        } else if constexpr (std::is_same_v<T, std::string>) {
            if (!in.is_string()) fail_at(key, "a string", in);
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
            if (!in.is_array() || !std::all_of(in.begin(), in.end(), [](const auto& x) { return x.is_string(); }))
                fail_at(key, "a list of strings", in);
        } else if constexpr (std::is_same_v<T, std::vector<double>>) {
            if (!in.is_array() || !std::all_of(in.begin(), in.end(), [](const auto& x) { return x.is_number(); }))
                fail_at(key, "a list of numbers", in);
        } else if constexpr (std::is_unsigned_v<T>) {
            if (!is_integer_of<T>(in)) fail_at(key, integer_range<T>(), in);
        } else if constexpr (std::is_integral_v<T>) {
            constexpr T most = std::numeric_limits<T>::max() / 2;
            if (!is_integer_of<T>(in) || in.get<T>() < 0 || in.get<T>() > most)
                fail_at(key, integer_range<T>(most), in);
        } else {
            if (!in.is_number()) fail_at(key, "a number", in);
        }
        value = in.get<T>();
    }

    const nlohmann::json& j_;
    std::string where_;
    std::vector<std::string> known_;
};

distribution read_distribution(const nlohmann::json& j, const std::string& where) {
    if (j.is_number()) return {constant{j.get<double>()}};
    reader r(j, where);
    distribution d;
    static const std::vector<std::string> laws = {"constant", "uniform",   "exponential",    "lognormal",
                                                  "pareto",   "empirical", "quantile_table", "mixture"};
    const std::string law = r.name("law", laws, "");
    if (law == "constant") {
        constant l;
        r("value", l.value);
        d.law = l;
    } else if (law == "uniform") {
        uniform l;
        r("low", l.low), r("high", l.high);
        d.law = l;
    } else if (law == "exponential") {
        exponential l;
        r("mean", l.mean);
        d.law = l;
    } else if (law == "lognormal") {
        lognormal l;
        r("median", l.median), r("sigma", l.sigma);
        d.law = l;
    } else if (law == "pareto") {
        pareto l;
        r("alpha", l.alpha), r("minimum", l.minimum), r("cap", l.cap);
        d.law = l;
    } else if (law == "empirical") {
        std::vector<double> values;
        r("values", values);
        d.law = empirical_of(std::move(values));
    } else if (law == "quantile_table") {
        quantile_table l;
        r("u", l.u), r("x", l.x);
        d.law = l;
    } else {
        mixture l;
        r("weights", l.weights);
        r.list("parts", [&](const nlohmann::json& part, const std::string& at) {
            l.parts.push_back(read_distribution(part, at));
        });
        d.law = l;
    }
    r("at_least", d.at_least), r("at_most", d.at_most);
    r.finish();
    try {
        validate(d, where);
    } catch (const opd::invalid_input& e) {
        throw failure(exit_usage, in_keys(e));
    }
    return d;
}

nlohmann::ordered_json write_distribution(const distribution& d) {
    nlohmann::ordered_json j;
    const auto name = [&](const char* law) { j["law"] = law; };
    struct {
        nlohmann::ordered_json& j;
        decltype(name)& law;
        void operator()(const constant& l) const { law("constant"), j["value"] = l.value; }
        void operator()(const uniform& l) const { law("uniform"), j["low"] = l.low, j["high"] = l.high; }
        void operator()(const exponential& l) const { law("exponential"), j["mean"] = l.mean; }
        void operator()(const lognormal& l) const { law("lognormal"), j["median"] = l.median, j["sigma"] = l.sigma; }
        void operator()(const pareto& l) const {
            law("pareto"), j["alpha"] = l.alpha, j["minimum"] = l.minimum;
            if (l.cap < forever) j["cap"] = l.cap;
        }
        void operator()(const empirical& l) const { law("empirical"), j["values"] = l.values; }
        void operator()(const quantile_table& l) const { law("quantile_table"), j["u"] = l.u, j["x"] = l.x; }
        void operator()(const mixture& l) const {
            law("mixture"), j["weights"] = l.weights, j["parts"] = nlohmann::ordered_json::array();
            for (const distribution& part : l.parts) j["parts"].push_back(write_distribution(part));
        }
    } const write{j, name};
    std::visit(write, d.law);
    if (d.at_least > 0) j["at_least"] = d.at_least;
    if (d.at_most < forever) j["at_most"] = d.at_most;
    return j;
}

void read_law(reader& r, const nlohmann::json& j, const char* key, distribution& d) {
    if (r.has(key)) d = read_distribution(j.at(key), r.path(key));
}

const std::vector<std::string> kinds = {"sync", "step_off", "controlled", "async"};

std::vector<std::string> policy_names() {
    std::vector<std::string> r;
    for (const staleness_policy p : staleness_policies()) r.emplace_back(name_of(p));
    return r;
}
std::vector<std::string> update_names() {
    std::vector<std::string> r;
    for (int i = 0; i <= static_cast<int>(weight_update::finish_first); ++i)
        r.emplace_back(name_of(static_cast<weight_update>(i)));
    return r;
}
const std::vector<std::string> sharing_names = {name_of(sharing::none), name_of(sharing::rollout_and_learner),
                                                name_of(sharing::all)};
int position(const std::vector<std::string>& names, const std::string& name) {
    return static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin());
}

entry read_entry(const nlohmann::json& j, const std::string& where) {
    reader r(j, where);
    entry e;
    r("name", e.name);
    const std::string kind = r.name("kind", kinds, "");
    if (kind == "sync") {
        e.schedule = opd::sched::sync{};
    } else if (kind == "step_off") {
        step_off s;
        r("k", s.k);
        e.schedule = s;
    } else if (kind == "controlled") {
        controlled s;
        r("k", s.k);
        e.schedule = s;
    } else {
        async s;
        r("tau", s.tau), r("concurrency", s.concurrency);
        if (j.contains("outstanding") && j.at("outstanding").is_string())
            s.outstanding = r.name("outstanding", {"automatic", "widest"}, "") == "widest" ? widest : automatic;
        else
            r("outstanding", s.outstanding);
        s.policy = staleness_policies()[static_cast<std::size_t>(
            position(policy_names(), r.name("policy", policy_names(), "capacity")))];
        s.update = static_cast<weight_update>(position(update_names(), r.name("update", update_names(), "keep")));
        e.schedule = s;
    }
    r("rollout_workers", e.rollout_workers), r("learner_gpus", e.learner_gpus);
    e.sharing = static_cast<sharing>(position(sharing_names, r.name("sharing", sharing_names, "none")));
    r.finish();
    return e;
}

nlohmann::ordered_json write_entry(const entry& e) {
    nlohmann::ordered_json j;
    j["name"] = e.name;
    j["kind"] = kinds[e.schedule.index()];
    if (const auto* s = std::get_if<step_off>(&e.schedule)) j["k"] = s->k;
    if (const auto* s = std::get_if<controlled>(&e.schedule)) j["k"] = s->k;
    if (const auto* s = std::get_if<async>(&e.schedule)) {
        j["tau"] = s->tau;
        if (s->outstanding == automatic || s->outstanding == widest)
            j["outstanding"] = s->outstanding == automatic ? "automatic" : "widest";
        else if (s->outstanding != by_policy)
            j["outstanding"] = s->outstanding;
        j["policy"] = name_of(s->policy);
        j["update"] = name_of(s->update);
        if (s->concurrency > 0) j["concurrency"] = s->concurrency;
    }
    j["rollout_workers"] = e.rollout_workers;
    j["learner_gpus"] = e.learner_gpus;
    j["sharing"] = name_of(e.sharing);
    return j;
}

void read_job(reader& r, const nlohmann::json& j, simulated_job& job, const char* per_item) {
    r("fixed", job.fixed), r(per_item, job.per_item), r("per_token", job.per_token);
    read_law(r, j, "noise", job.noise);
}
void write_job(nlohmann::ordered_json& j, const simulated_job& job, const char* per_item) {
    j["fixed"] = job.fixed;
    j[per_item] = job.per_item;
    j["per_token"] = job.per_token;
    j["noise"] = write_distribution(job.noise);
}

// --- the built-in configurations -------------------------------------------------------------------------------------

// Times of an 8-billion-parameter student and a teacher with 3 billion active parameters, estimated from arithmetic and
// memory traffic of a 2024-25 accelerator; README.md derives them. They are estimates, not measurements.
config node() {
    config c;
    c.title = "AsyncOPD's node: 8 GPUs, one of them the teacher's";
    c.lengths.response = {lognormal{2500, 0.9}, 1, 8192};
    c.lengths.prompt = {lognormal{150, 0.5}, 16, 1024};
    c.rollout.lanes = 256;
    c.rollout.speed = {.step = 0.008, .step_per_sequence = 7.5e-5, .prefill = 2e-5, .rebuild = 2e-5, .factor = 1};
    c.teacher.batch = 8;
    c.teacher.flush = 0.05;
    c.teacher.job = {.fixed = 0.05, .per_token = 2e-5};
    c.learner.job = {.fixed = 1, .per_token = 1e-4};
    c.sync = {.fixed = 2};
    const auto add = [&](const std::string& name, const schedule& s, int workers, int gpus,
                         sharing shared = sharing::none) {
        c.schedules.push_back({name, s, workers, gpus, shared});
    };
    add("sync", opd::sched::sync{}, 7, 7, sharing::rollout_and_learner);
    add("sync, all GPUs", opd::sched::sync{}, 8, 8, sharing::all);
    add("one-step-off", step_off{1}, 4, 3);
    add("two-step-off", step_off{2}, 4, 3);
    const auto stream = [&](const std::string& name, staleness_policy p, index_t outstanding, weight_update u) {
        add(name, async{.tau = 4, .outstanding = outstanding, .policy = p, .update = u}, 4, 3);
    };
    using enum staleness_policy;
    stream("async", capacity, automatic, weight_update::keep);
    stream("async edf", edf, automatic, weight_update::keep);
    stream("async M=5B", capacity, widest, weight_update::keep);
    stream("async M=5B, abort", capacity, widest, weight_update::abort);
    stream("async M=5B, finish-first", capacity, widest, weight_update::finish_first);
    stream("async cohort_fifo", cohort_fifo, widest, weight_update::keep);
    stream("async edf M=3B", edf, 768, weight_update::keep);
    stream("async drop", drop, widest, weight_update::keep);
    stream("async retry", retry, widest, weight_update::keep);
    stream("async in_order", in_order, widest, weight_update::keep);
    stream("async areal", areal, widest, weight_update::keep);
    c.sensitivity.tails = {{0, 8192}, {0.5, 8192}, {0.9, 8192}, {0.9, 16384}, {1.2, 32768}};
    c.sensitivity.learner_scales = {0.25, 0.5, 1, 2, 4};
    c.sensitivity.schedules = {"two-step-off", "async M=5B"};
    return c;
}

// 1,000 rollout GPUs with 8,000 lanes for a day. Long answers: a lane turns over in minutes.
config day() {
    config c;
    c.title = "1,000 rollout workers for a day";
    c.batch = 8192;
    c.steps = 0;
    c.seconds = 86400;
    c.lengths.response = {lognormal{6000, 1.0}, 1, 32768};
    c.lengths.prompt = {lognormal{150, 0.5}, 16, 1024};
    c.rollout.lanes = 8;
    c.rollout.speed = {.step = 0.012, .step_per_sequence = 1e-4, .prefill = 2e-5, .rebuild = 2e-5, .factor = 1};
    c.rollout.factor = {mixture{{0.98, 0.02}, {{uniform{0.97, 1.05}}, {uniform{1.5, 3}}}}}; // 2 % stragglers
    c.teacher.workers = 48;
    c.teacher.batch = 8;
    c.teacher.flush = 0.25;
    c.teacher.job = {.fixed = 0.05, .per_token = 2e-5, .noise = {lognormal{1, 0.1}}};
    c.learner.job = {.fixed = 2, .per_token = 1e-4, .noise = {lognormal{1, 0.05}}};
    c.sync = {.fixed = 3, .per_item = 0.002};
    const auto add = [&](const std::string& name, const schedule& s, int workers, int gpus,
                         sharing shared = sharing::none) {
        c.schedules.push_back({name, s, workers, gpus, shared});
    };
    add("sync", opd::sched::sync{}, 1000, 128);
    add("sync, all GPUs", opd::sched::sync{}, 1176, 1176, sharing::all);
    add("two-step-off", step_off{2}, 1000, 128);
    add("async", async{}, 1000, 128);
    add("async edf M=3B", async{.outstanding = 3 * 8192, .policy = staleness_policy::edf}, 1000, 128);
    return c;
}

} // namespace

bool is_synchronous(const entry& e) {
    const auto* off = std::get_if<step_off>(&e.schedule);
    const auto* serial = std::get_if<controlled>(&e.schedule);
    return std::holds_alternative<opd::sched::sync>(e.schedule) || (off && off->k == 0) || (serial && serial->k == 0);
}

int gpus_of(const config& c, const entry& e) {
    const int rollout = e.rollout_workers * c.rollout.gpus;
    if (e.sharing == sharing::none) return rollout + e.learner_gpus + c.teacher.workers * c.teacher.gpus;
    const int pool = std::max(rollout, e.learner_gpus);
    return e.sharing == sharing::all ? pool : pool + c.teacher.workers * c.teacher.gpus;
}

int teacher_workers_of(const config& c, const entry& e) {
    return e.sharing == sharing::all ? gpus_of(c, e) / c.teacher.gpus : c.teacher.workers;
}

double transfer_seconds(const config& c, const entry& e, int worker) {
    if (e.sharing != sharing::none) return 0;
    const double copy = c.weights.bytes / c.weights.bandwidth;
    int node = worker + 1;
    const int children = c.weights.fan_out;
    if (children == 0) return node * copy;
    double seconds = 0;
    for (; node > 0; node = (node - 1) / children) seconds += ((node - 1) % children + 1) * copy;
    return seconds;
}

const std::vector<std::string>& preset_names() {
    static const std::vector<std::string> names = {"node", "day"};
    return names;
}

config preset(const std::string& name) {
    if (name == "node") return node();
    if (name == "day") return day();
    throw failure(exit_usage, fmt::format("--preset: '{}' is not one of {}", name, fmt::join(preset_names(), ", ")));
}

nlohmann::ordered_json to_json(const config& c) {
    nlohmann::ordered_json j;
    j["title"] = c.title;
    j["seed"] = c.seed;
    j["batch"] = c.batch;
    j["group"] = c.group;
    j["steps"] = c.steps;
    j["seconds"] = c.seconds;
    j["warmup"] = c.warmup;
    j["lengths"]["response"] = write_distribution(c.lengths.response);
    j["lengths"]["prompt"] = write_distribution(c.lengths.prompt);
    j["lengths"]["redraw"] = c.lengths.redraw;
    auto& rollout = j["rollout"];
    rollout["lanes"] = c.rollout.lanes;
    rollout["gpus"] = c.rollout.gpus;
    rollout["step"] = c.rollout.speed.step;
    rollout["step_per_sequence"] = c.rollout.speed.step_per_sequence;
    rollout["prefill"] = c.rollout.speed.prefill;
    rollout["rebuild"] = c.rollout.speed.rebuild;
    rollout["factor"] = write_distribution(c.rollout.factor);
    const auto& late = c.rollout.joiners;
    rollout["joiners"] = {
        {"count", late.count}, {"after", late.after}, {"every", late.every}, {"install", late.install}};
    auto& teacher = j["teacher"];
    teacher["workers"] = c.teacher.workers;
    teacher["gpus"] = c.teacher.gpus;
    teacher["batch"] = c.teacher.batch;
    teacher["flush"] = c.teacher.flush;
    teacher["cache"] = c.teacher.cache;
    write_job(teacher, c.teacher.job, "per_sequence");
    write_job(j["learner"], c.learner.job, "per_sequence");
    j["learner"]["turn"] = c.learner.turn;
    auto& sync = j["sync"];
    sync["fixed"] = c.sync.fixed;
    sync["per_worker"] = c.sync.per_item;
    sync["noise"] = write_distribution(c.sync.noise);
    j["weights"] = {{"bytes", c.weights.bytes},
                    {"bandwidth", c.weights.bandwidth},
                    {"fan_out", c.weights.fan_out},
                    {"meanwhile", c.weights.meanwhile}};
    j["schedules"] = nlohmann::ordered_json::array();
    for (const entry& e : c.schedules) j["schedules"].push_back(write_entry(e));
    auto& sensitivity = j["sensitivity"];
    sensitivity["tails"] = nlohmann::ordered_json::array();
    for (const config::tail& t : c.sensitivity.tails)
        sensitivity["tails"].push_back({{"sigma", t.sigma}, {"at_most", t.at_most}});
    sensitivity["learner_scales"] = c.sensitivity.learner_scales;
    sensitivity["schedules"] = c.sensitivity.schedules;
    return j;
}

config from_json(const nlohmann::json& j, const std::string& source) {
    config c = node();
    reader r(j, source);
    r("title", c.title), r("seed", c.seed), r("batch", c.batch), r("group", c.group), r("steps", c.steps);
    r("seconds", c.seconds), r("warmup", c.warmup);
    r.object("lengths", [&](reader& in) {
        read_law(in, j.at("lengths"), "response", c.lengths.response);
        read_law(in, j.at("lengths"), "prompt", c.lengths.prompt);
        in("redraw", c.lengths.redraw);
    });
    r.object("rollout", [&](reader& in) {
        in("lanes", c.rollout.lanes), in("gpus", c.rollout.gpus), in("step", c.rollout.speed.step);
        in("step_per_sequence", c.rollout.speed.step_per_sequence), in("prefill", c.rollout.speed.prefill);
        in("rebuild", c.rollout.speed.rebuild);
        read_law(in, j.at("rollout"), "factor", c.rollout.factor);
        in.object("joiners", [&](reader& late) {
            auto& l = c.rollout.joiners;
            late("count", l.count), late("after", l.after), late("every", l.every), late("install", l.install);
        });
    });
    r.object("teacher", [&](reader& in) {
        in("workers", c.teacher.workers), in("gpus", c.teacher.gpus), in("batch", c.teacher.batch);
        in("flush", c.teacher.flush), in("cache", c.teacher.cache);
        read_job(in, j.at("teacher"), c.teacher.job, "per_sequence");
    });
    r.object("learner", [&](reader& in) {
        read_job(in, j.at("learner"), c.learner.job, "per_sequence");
        in("turn", c.learner.turn);
    });
    r.object("sync", [&](reader& in) {
        in("fixed", c.sync.fixed), in("per_worker", c.sync.per_item);
        read_law(in, j.at("sync"), "noise", c.sync.noise);
    });
    r.object("weights", [&](reader& in) {
        in("bytes", c.weights.bytes), in("bandwidth", c.weights.bandwidth), in("fan_out", c.weights.fan_out);
        in("meanwhile", c.weights.meanwhile);
    });
    if (j.contains("schedules")) { // the built-in names go with them
        c.schedules.clear();
        c.sensitivity = {};
    }
    r.list("schedules",
           [&](const nlohmann::json& e, const std::string& where) { c.schedules.push_back(read_entry(e, where)); });
    r.object("sensitivity", [&](reader& in) {
        if (j.at("sensitivity").contains("tails")) c.sensitivity.tails.clear();
        in.list("tails", [&](const nlohmann::json& t, const std::string& where) {
            reader one(t, where);
            config::tail tail;
            one("sigma", tail.sigma), one("at_most", tail.at_most);
            one.finish();
            c.sensitivity.tails.push_back(tail);
        });
        in("learner_scales", c.sensitivity.learner_scales);
        in("schedules", c.sensitivity.schedules);
    });
    r.finish();
    return c;
}

config config_of_text(const std::string& text, const std::string& source) {
    nlohmann::json j;
    try {
        j = parse_json(text);
    } catch (const std::runtime_error& e) {
        throw failure(exit_usage, fmt::format("{}: {}", source, e.what()));
    }
    return from_json(j, source);
}

config load_config(const std::string& path) { return config_of_text(read_file(path), path); }

void validate(const config& c) {
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    need(c.steps > 0 || c.seconds > 0, "steps or seconds must be positive: else no run would end");
    need(c.warmup >= 1, "warmup must be at least 1: the clock starts after an update");
    need(std::isfinite(c.seconds) && c.seconds >= 0, "seconds must be finite and at least 0");
    need(c.steps == 0 || c.steps > c.warmup,
         fmt::format("steps ({}) must exceed warmup ({}): else there is no throughput", c.steps, c.warmup));
    // beyond these a mistake is likelier than a purpose; all GPUs fit in an int
    constexpr int most = 1'000'000, most_gpus = 1'000;
    const auto within = [&](const std::string& name, int value, int largest) {
        need(value >= 1 && value <= largest, fmt::format("{} must lie in [1, {}], not {}", name, largest, value));
    };
    within("rollout.lanes", c.rollout.lanes, most);
    within("rollout.gpus", c.rollout.gpus, most_gpus);
    within("teacher.gpus", c.teacher.gpus, most_gpus);
    within("teacher.workers", c.teacher.workers, most);
    const auto at_least_0 = [&](const char* name, double x) {
        need(std::isfinite(x) && x >= 0, fmt::format("{} must be finite and at least 0", name));
    };
    at_least_0("learner.turn", c.learner.turn);
    at_least_0("teacher.cache", c.teacher.cache);
    at_least_0("weights.bytes", c.weights.bytes);
    need(std::isfinite(c.weights.bandwidth) && c.weights.bandwidth > 0,
         "weights.bandwidth must be finite and positive");
    need(c.weights.fan_out >= 0 && c.weights.fan_out <= most,
         fmt::format("weights.fan_out must lie in [0, {}], not {}", most, c.weights.fan_out));
    at_least_0("rollout.joiners.after", c.rollout.joiners.after);
    at_least_0("rollout.joiners.every", c.rollout.joiners.every);
    at_least_0("rollout.joiners.install", c.rollout.joiners.install);
    need(!c.schedules.empty(), "schedules must not be empty");
    try {
        opd::sched::validate(c.lengths.response, "lengths.response");
        opd::sched::validate(c.lengths.prompt, "lengths.prompt");
        opd::sched::validate(c.rollout.speed, "rollout");
        opd::sched::validate(c.rollout.factor, "rollout.factor");
        opd::sched::validate(c.teacher.job, "teacher");
        opd::sched::validate(c.learner.job, "learner");
        opd::sched::validate(c.sync, "sync");
    } catch (const opd::invalid_input& e) {
        throw failure(exit_usage, in_keys(e));
    }
    need(quantile(c.rollout.factor, 0x1p-52) > 0, "rollout.factor must be positive");
    std::set<std::string> names;
    for (const entry& e : c.schedules) {
        need(!e.name.empty(), "schedules: a name is missing");
        need(names.insert(e.name).second, fmt::format("schedules: '{}' occurs twice", e.name));
        within(fmt::format("schedules, '{}': rollout_workers", e.name), e.rollout_workers, most);
        within(fmt::format("schedules, '{}': learner_gpus", e.name), e.learner_gpus, most);
        need(c.rollout.joiners.count >= 0 && c.rollout.joiners.count < e.rollout_workers,
             fmt::format("rollout.joiners.count must lie in [0, {}], not {}: one of the workers of '{}' is there from "
                         "the start",
                         e.rollout_workers - 1, c.rollout.joiners.count, e.name));
        const bool serial = is_synchronous(e) || std::holds_alternative<controlled>(e.schedule);
        need(e.sharing == sharing::none || serial,
             fmt::format("schedules, '{}': sharing '{}' needs a schedule whose stages take turns", e.name,
                         name_of(e.sharing)));
        need(teacher_workers_of(c, e) >= 1,
             fmt::format("schedules, '{}': a teacher worker takes {} GPUs (teacher.gpus), and the stages share {}",
                         e.name, c.teacher.gpus, gpus_of(c, e)));
        settings s;
        s.batch = c.batch, s.group = c.group, s.schedule = e.schedule;
        s.teacher_batch = c.teacher.batch, s.teacher_flush = c.teacher.flush;
        try {
            (void)plan_of(s);
        } catch (const opd::invalid_input& x) {
            throw failure(exit_usage, fmt::format("schedules, '{}': {}", e.name, in_keys(x)));
        }
    }
    for (const config::tail& t : c.sensitivity.tails) {
        need(std::isfinite(t.sigma) && t.sigma >= 0, "sensitivity.tails: sigma must be finite and at least 0");
        need(
            t.at_most > mean(c.lengths.response),
            fmt::format("sensitivity.tails: at_most must lie above the mean length, {:.0f}", mean(c.lengths.response)));
    }
    for (const double scale : c.sensitivity.learner_scales)
        need(std::isfinite(scale) && scale > 0, "sensitivity.learner_scales must be finite and positive");
    for (const std::string& name : c.sensitivity.schedules)
        need(names.count(name) > 0, fmt::format("sensitivity.schedules: no schedule is called '{}'", name));
}

std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    if (!in || !(text << in.rdbuf()))
        throw failure(exit_input, fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    return text.str();
}

void write_file(const std::string& path, const std::string& text) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out << text;
    out.close();
    if (!out) throw failure(exit_io, fmt::format("cannot write {}: {}", path, std::strerror(errno)));
}

} // namespace cluster_sim
