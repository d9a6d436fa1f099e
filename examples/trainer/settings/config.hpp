// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every setting of a run, what follows from some of them, and the file that holds them.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "settings/failure.hpp"

namespace trainer {

/// Calls work(). Where the system refuses memory in it, the failure says for what.
template <class Work>
decltype(auto) with_memory_for(const std::string& what, Work&& work) {
    const auto refused = [&] { return failure(exit_resources, "not enough memory for " + what); };
    try {
        return work();
    } catch (const std::bad_alloc&) {
        throw refused();
    } catch (const std::length_error&) { // more than a vector takes
        throw refused();
    }
}

inline constexpr int most_threads = 10'000;

struct config {
    struct {
        std::string directory = "runs/gcd";
        std::string start_from;      // empty: train a teacher and warm a student up
        std::string scoring_teacher; // empty: start_from's own
        std::uint64_t seed = 1;
        int threads = 0; // 0: all cores
        int checkpoint_every = 500;
        int log_every = 50;
        double loss_limit = 100;
    } run;
    struct {
        std::string kind = "gcd"; // or grammar
        int max_words = 48;       // grammar: of a response
        int max_operand = 199;
        int max_steps = 24;
        int held_out_one_in = 8;
        int vocabulary = 0; // ids of the models; 0: the task's symbols
    } task;
    model_shape teacher_model, student_model; // vocabulary and max_length come from the task
    struct {
        int steps = 2600;
        int batch = 32;
        int warmup = 50;
        double rate = 4e-3;
        std::uint64_t seed = 0; // 0: the run's
    } teacher;
    struct {
        std::string data = "solutions"; // or teacher
        int max_steps = 1500;
        int batch = 32;
        int warmup = 50;
        double rate = 2e-3;
        double target_accuracy = 0.5;
        int check_every = 20;
        int check_prompts = 512;
    } student;
    struct {
        std::string estimator = "reverse_kl";
        int steps = 3600;
        int prompts = 32;
        int answers = 1; // a prompt
        int mini_batches = 1;
        int warmup = 50;
        int micro_batch = 0; // sequences; 0: all of an update
        bool gradient_checkpointing = false;
        double rate = 2e-3;
        double temperature = 1;
        std::string teacher_cache = "dense"; // of a divergence over the whole vocabulary
        int hidden_budget = 4 << 20;         // bytes
        int cache_rank = 16;                 // hidden-lowrank
        int cache_calibration = 256;         // responses
        double jsd_w = 0.5;
        double jsd_o = 0.5;
        double skew = 0.1;
        double alpha = 0.5;
        int k = 4;
        std::string topk_from = "teacher";
        int m = 4;
        int budget = 4;
        // what drawn tokens are made of: names of opd/estimators/any.hpp
        std::string shape = "reverse_kl";
        double shape_a = 0.5, shape_b = 0.5;
        std::string surrogate = "unclipped_is";
        double clip_low = 0.2, clip_high = 0.2, dual_clip = 0;
        double ratio_cap = 2;
        std::string baseline = "exact_entries";
        std::string selector = "all";
        double selector_a = 0, selector_b = 0;
        bool self_normalise = false, accept_bias = false;
        double advantage_clip = 5;   // nats, of lightning
        std::string offline;         // a data set to learn from; empty: rollout and teacher run
        std::string accept_mismatch; // names of fingerprints, separated by commas
        double m2po = 0;             // the second moment; 0: none
        std::string correction;      // a name of opd/estimators/correction_presets.hpp; empty: none
        double loss_clamp = 0;       // nats; 0: none
        std::string inject_mismatch; // kinds of injection.hpp, separated by commas; empty: none
        // what rollout draws from
        int rollout_top_k = 0;
        double rollout_top_p = 1, rollout_min_p = 0;
        int slots = 32;
        int prefill_chunk = 8;
        int kv_tokens = 0; // a rollout worker; 0: all of every slot
    } distill;
    struct {
        std::string kind = "sync";
        int k = 2;
        int tau = 4;
        std::string staleness_policy = "edf";
        std::string outstanding = "by_policy"; // or a number
        int concurrency = 0;                   // 0: no limit
        std::string weight_update = "keep";
        int park_after = 0;        // tokens; 0: never
        int rollout_workers = 0;   // 0: as many as threads
        int teachers = 0;          // 0: as many as threads, or one
        int score_batch = 0;       // 0: 8, or less
        double score_flush = 0.05; // seconds
        // seconds; 0: none
        double rollout_deadline = 0, teacher_deadline = 0, learner_deadline = 0, sync_deadline = 0;
        int attempts = 3;
        std::string inject; // kill=…,delay=…,drop=…
        double inject_seconds = 0.05;
        std::string publish = "shared";
        bool check_publications = false;
        std::string driver = "threads";
        int learner_threads = 0; // 0: as many as threads
        // virtual seconds of a call, and of each of its rows
        double cost_step = 1.5e-6, cost_step_row = 2.25e-6;
        double cost_draft = 1e-6, cost_draft_row = 1.2e-6;
        double cost_adapt = 2e-5, cost_adapt_row = 4e-6;
        double cost_score = 1e-5, cost_score_row = 1.5e-6;
        double cost_train = 1e-4, cost_train_row = 5.3e-6;
        double cost_sync = 1e-5;
    } schedule;
    struct {
        std::string url; // of replicas, separated by commas; empty: the teacher is in this process
        std::string dialect = "vllm";
        std::string model;
        int requests = 8;
        double silence = 30, patience = 600; // seconds
        std::string accept;                  // verdicts of the probe, separated by commas
    } served;
    struct {
        std::string kind = "hidden"; // eagle3, model
        int width = 32;              // model
        int layers = 1, heads = 4, kv_heads = 2, head_dim = 16, ffn = 128;
        int steps = 400;
        int batch = 32;
        int warmup = 20;
        double rate = 3e-3;
        int responses = 512;
        int depth = 8;
        std::string loss = "lk"; // eagle, hass, eagle3, osd
        int test_steps = 0;      // 0: as published
        int top_k = 10;
        double acceptance = 1, kl = 0.2, hidden = 1, ce = 0.1;
        std::string weights = "accepted_length"; // decaying, none
        double gamma = 4, smoothing = 0.5;
        int held_out = 64;
    } drafter;
    struct {
        std::string kind = "off";
        int depth = 8;
        int verify = 8;
        int children = 1;
        std::string from; // empty: the run directory's own drafter
        int running = 128;
        int history = 1'000'000; // tokens
        bool adapt = false;
        double adapt_rate = 1e-3;
        int adapt_rows = 128;      // of a slice
        int adapt_memory = 16'384; // rows
        int adapt_slices = 32;     // of a policy version; 0: no limit
        int adapt_checkpoint_every = 10;
    } speculation;
    adamw optimizer;
    struct {
        int prompts = 2000;
        int samples = 4;
        int every = 300;
        int every_prompts = 500;
    } evaluation;
};

/// Sequences a step of distillation learns from.
inline int batch_of(const config& c) { return c.distill.prompts * c.distill.answers; }

/// Rollout draws from a part of the row.
inline bool filters_rollout(const config& c) {
    return c.distill.rollout_top_k > 0 || c.distill.rollout_top_p < 1 || c.distill.rollout_min_p > 0;
}

/// The log has figures of the mismatch between rollout and learner.
inline bool tells_mismatch(const config& c) {
    return c.distill.offline.empty() && !(c.distill.correction.empty() && c.distill.inject_mismatch.empty());
}

/// The run learns from a data set: it rolls nothing out, and no teacher is asked.
inline bool is_offline(const config& c) { return !c.distill.offline.empty(); }

/// The teacher is behind --teacher-url.
inline bool is_served(const config& c) { return !c.served.url.empty(); }

/// No teacher is in memory while the student learns; --start-from has the one that models are evaluated with.
inline bool without_teacher(const config& c) { return is_offline(c) || is_served(c); }

/// What an estimator wants a served teacher to say beside the log-probs of the tokens themselves.
enum class served_lists { none, best, candidates };
served_lists lists_for(const config& c);

/// What --accept-teacher takes: what the probe of a served teacher (served.hpp) may find.
inline constexpr std::string_view probe_verdicts[] = {"vocabulary", "tokenizer", "context",     "ids",
                                                      "mass",       "shift",     "temperature", "noise"};
/// The names that --accept-teacher has; one that does not exist is a usage failure.
std::vector<std::string> accepted_verdicts(const config& c);

/// What --accept-mismatch takes: fingerprints of a data set (opd/data/manifest.hpp).
inline constexpr std::string_view mismatches[] = {"scoring_teacher", "sft_teacher", "tokenizer", "reference_policy"};
/// The names that --accept-mismatch has; one that does not exist is a usage failure.
std::vector<std::string> accepted_mismatches(const config& c);

/// Distillation's clock is the run's own.
inline bool in_virtual_time(const config& c) { return c.schedule.driver == "virtual"; }

/// All settings, grouped: what --print-config prints and --config reads. Without those that are unused.
nlohmann::ordered_json to_json(const config& c);

/// Overwrites the settings that `j` names. Unknown keys and wrong types are usage failures that name the key, the file
/// and, for a key, the nearest one that exists.
void from_json(const nlohmann::json& j, const std::string& source, config& c);

/// Changes the settings to the defaults of a task; an unknown name is a usage failure.
void apply_task(const std::string& name, config& c);

/// Changes the settings to those of a preset of their task; an unknown name is a usage failure.
void apply_preset(const std::string& name, config& c);

/// Reads the text of a configuration into c. Returns what it says.
nlohmann::json config_of_text(std::string_view text, const std::string& source, config& c);

/// The same of a file.
nlohmann::json load_config(const std::string& path, config& c);

/// Throws a usage failure that names the setting.
void validate(const config& c);
/// The same of the settings that distil from a served teacher; those of its server alone are validate()'s.
void validate_served(const config& c);
/// A usage failure where there is no such task.
void task_named(const std::string& name);

/// The settings that results depend on.
nlohmann::ordered_json results_json(const config& c);

/// The settings that results depend on, as 32 hexadecimal digits.
std::string fingerprint(const config& c);

/// Settings as text, as results_json(c).dump() has them: "distill.rate, task.max_steps", where two differ.
std::string differences(const std::string& a, const std::string& b);

} // namespace trainer
