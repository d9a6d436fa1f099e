// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The readers of files: checkpoints, sequences in flight, configurations, traces, config.json of transformers. A file
// that a program would write is damaged by a list of edits and its checksum made to fit again, so that what lies behind
// it is reached. A reader refuses it with its own kind of error, or what it read is written as the same bytes, or the
// same configuration, again.
#include <memory>
#include <vector>

#include "cluster_sim/config.hpp"
#include "fuzz/damage.hpp"
#include "fuzz/damaged_json.hpp"
#include "opd/sched/archive.hpp"
#include "timeline/read_trace.hpp"
#include "timeline/timeline.hpp"
#include "trainer/hf/model_config.hpp"
#include "trainer/schedule/in_flight.hpp"
#include "trainer/settings/checkpoint.hpp"
#include "trainer/settings/config.hpp"
#include "trainer/settings/files.hpp"

namespace {

using namespace opd::fuzz;
namespace sched = opd::sched;

// --- the trainer -----------------------------------------------------------------------------------------------------

trainer::config some_config(choices& c) {
    trainer::config r;
    r.distill.estimator = c.of({"reverse_kl", "jsd", "topk", "mc", "threshold", "alpha_divergence"});
    r.schedule.kind = c.of({"sync", "async", "step-off"});
    r.schedule.staleness_policy = c.of({"capacity", "areal", "edf"});
    if (r.schedule.kind == "async") r.schedule.driver = c.of({"threads", "virtual"});
    return r;
}

void checkpoint(choices& c) {
    trainer::run_state s;
    s.stage = c.of({trainer::stage::distill, trainer::stage::teacher, trainer::stage::finished});
    s.step = 12;
    s.teacher_weights = {1, 2, 3};
    s.student_weights = {4, 5};
    s.teacher_optimizer.m = s.teacher_optimizer.v = {0.5F, 0.25F, 0};
    s.evaluations = "{\"teacher\":{\"accuracy\":0.5}}";
    s.in_flight = "abc";
    std::string bytes = trainer::checkpoint_bytes(s, "{\"run\":{\"seed\":1}}");
    bytes.resize(bytes.size() - 32);
    damage(c, bytes);
    bytes += trainer::hash128(bytes);
    if (c.once_in(16)) damage(c, bytes);
    std::string settings;
    trainer::run_state read;
    try {
        read = trainer::checkpoint_of(bytes, "a.ckpt", settings);
    } catch (const trainer::failure& e) {
        return need(e.code == trainer::exit_input, "a checkpoint is refused as something else than a bad input");
    }
    need(trainer::checkpoint_bytes(read, settings) == bytes, "a checkpoint that was read is written as other bytes");
    need(trainer::name_of(read.stage) != std::string("unknown"), "a checkpoint of no stage was taken");
}

void in_flight(choices& c) {
    trainer::in_flight state;
    state.weights = {3, 9};
    state.scheduler = "abc";
    for (std::int64_t i = c.below(4); i >= 0; --i) {
        auto& e = state.sequences.emplace_back();
        e.where = static_cast<sched::outstanding_sequence::place>(1 + c.below(6));
        trainer::trajectory t;
        t.sample = 7;
        t.tokens = {1, 2, 3, 4};
        t.prompt_length = 2;
        t.log_mu = {-0.5F, -1};
        t.versions = {2, 3};
        if (c.once_in(2))
            t.draw_ids = {3, 1, 4, 1}, t.draw_log_mu = t.draw_weight = {-1, -2, -1, -2}, t.draw_exact = {1, 0, 0, 1};
        if (!c.once_in(4)) e.sequence = std::make_shared<const trainer::trajectory>(t);
    }
    std::string bytes = to_bytes(state);
    damage(c, bytes);
    const auto score = [](auto sequences) { // looks at what a teacher looks at
        std::vector<std::shared_ptr<const trainer::scored_sequence>> r;
        for (const auto& t : sequences) {
            need(t->prompt_length > 0 && !t->response().empty() && t->versions.size() == t->response().size() &&
                     t->log_mu.size() == t->response().size() && t->draw_ids.size() % t->response().size() == 0,
                 "a sequence in flight does not fit together");
            r.push_back(std::make_shared<const trainer::scored_sequence>());
        }
        return r;
    };
    trainer::in_flight read;
    try {
        read = trainer::in_flight_of(bytes, score);
    } catch (const trainer::failure& e) {
        return need(e.code == trainer::exit_input,
                    "sequences in flight are refused as something else than a bad input");
    }
    need(to_bytes(read) == bytes, "sequences in flight that were read are written as other bytes");
}

void trainer_config(choices& c) {
    const std::string text = damaged_json(c, trainer::to_json(some_config(c)));
    trainer::config read;
    try {
        trainer::config_of_text(text, "c.json", read);
        trainer::validate(read);
    } catch (const trainer::failure& e) {
        return need(e.code == trainer::exit_usage, "a configuration is refused as something else than a usage error");
    }
    trainer::config again;
    trainer::config_of_text(trainer::to_json(read).dump(), "again.json", again);
    trainer::validate(again);
    need(trainer::to_json(again) == trainer::to_json(read), "a configuration is printed as another one");
}

void model_config(choices& c) {
    using nlohmann::json;
    const auto family = c.of({"llama", "qwen2", "qwen3"});
    json j = {{"model_type", family},
              {"vocab_size", 40},
              {"hidden_size", 16},
              {"intermediate_size", 28},
              {"num_hidden_layers", 2},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"head_dim", 6},
              {"hidden_act", "silu"},
              {"max_position_embeddings", 64},
              {"rms_norm_eps", 1e-5},
              {"tie_word_embeddings", true},
              {"eos_token_id", {1, 2}},
              {"rope_parameters", {{"rope_type", c.of({"default", "linear", "llama3"})}, {"rope_theta", 1e4}}}};
    json& rope = j["rope_parameters"];
    if (rope["rope_type"] != "default") rope["factor"] = 8;
    if (rope["rope_type"] == "llama3")
        rope["low_freq_factor"] = 1, rope["high_freq_factor"] = 4, rope["original_max_position_embeddings"] = 32;
    const std::string text = damaged_json(c, j);
    trainer::hf::model_config read;
    try {
        read = trainer::hf::config_of(text, "config.json");
    } catch (const trainer::failure& e) { // no JSON
        return need(e.code == trainer::exit_input && std::string(e.what()).find("config.json") != std::string::npos,
                    "a refusal does not name its file");
    } catch (const opd::invalid_input& e) {
        return need(std::string(e.what()).find("config.json") != std::string::npos, "a refusal does not name its file");
    }
    const auto again = [](const json& written) { return trainer::hf::config_of(written.dump(), "again.json"); };
    json written;
    try {
        written = trainer::hf::config_for(read.shape, nullptr, "float32");
        need(again(written).shape == read.shape, "a shape is written as another one");
        written = trainer::hf::config_for(read.shape, &read, "bfloat16");
    } catch (const opd::invalid_input& e) { // what transformers takes of no llama
        return need(e.argument == "shape", "a shape is refused as something else");
    }
    need(again(written).shape == read.shape, "a config.json is written as one of another shape");
    for (const auto& [key, value] : read.all.items())
        need(key == "torch_dtype" || key == "dtype" || written.at(key) == value, "a key is written as another one");
}

// --- the schedulers --------------------------------------------------------------------------------------------------

void trace(choices& c) {
    sched::trace recorded;
    recorded.span({sched::process_of(sched::stage::rollout), 0}, "decode", 0, 6);
    recorded.span({sched::process_of(sched::stage::teacher), 1}, "score", 6, 7);
    recorded.span({sched::process_of(sched::stage::learner), 0}, "update", 7, 9.5);
    recorded.gate(9.5, 10, 1);
    recorded.counter("running", 0, {{"n", 8.0}});
    recorded.instant({sched::process_of(sched::stage::rollout), 0}, "fault", 2);
    const std::string text = damaged_json(c, nlohmann::json::parse(recorded.json()));
    examples::timeline_options options;
    if (c.once_in(2)) options.from = 1, options.to = c.of({2.0, 1e9, 1.0});
    try {
        const std::string svg =
            examples::timeline_svg(examples::timeline_of(recorded_by(nlohmann::json::parse(text))), options);
        need(svg.starts_with("<svg") || svg.starts_with("<?xml"), "a timeline is no SVG");
    } catch (const opd::error&) {
    } catch (const nlohmann::json::exception&) {}
}

void cluster_config(choices& c) {
    const auto& names = cluster_sim::preset_names();
    const auto& name = names[static_cast<std::size_t>(c.below(static_cast<std::int64_t>(names.size())))];
    const std::string text = damaged_json(c, cluster_sim::to_json(cluster_sim::preset(name)));
    cluster_sim::config read;
    try {
        read = cluster_sim::config_of_text(text, "c.json");
        cluster_sim::validate(read);
    } catch (const cluster_sim::failure& e) {
        return need(e.code == cluster_sim::exit_usage,
                    "a configuration is refused as something else than a usage error");
    }
    const auto again = cluster_sim::config_of_text(cluster_sim::to_json(read).dump(), "again.json");
    cluster_sim::validate(again);
    need(cluster_sim::to_json(again) == cluster_sim::to_json(read), "a configuration is printed as another one");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(6)) {
    case 0:
        checkpoint(c);
        break;
    case 1:
        in_flight(c);
        break;
    case 2:
        trainer_config(c);
        break;
    case 3:
        trace(c);
        break;
    case 4:
        model_config(c);
        break;
    default:
        cluster_config(c);
    }
    return 0;
}
