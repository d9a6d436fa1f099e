// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every setting of a run, in one table: `visit_options` names each once, and the command line, the configuration file,
// --print-config, --help and the fingerprint of a checkpoint all read that table.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "opd/estimators/any.hpp"
#include "settings/failure.hpp"

namespace CLI {
class App;
}

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

/// Estimators that read a part of the teacher's row; those of the whole row are opd::choice::divergences.
enum class part_estimator { topk, topk_rw, tail_bucket, mc, threshold, lightning };
// clang-format off
inline constexpr opd::choice::name<part_estimator> part_estimators[] = {
    {"topk", part_estimator::topk, "KL(p||q), both renormalised on the k best ids of teacher or student"},
    {"topk_rw", part_estimator::topk_rw, "topk of the stale student's ids, each times p/mu: does not repair it"},
    {"tail_bucket", part_estimator::tail_bucket, "KL(p||q) on the k best ids, all others lumped"},
    {"mc", part_estimator::mc, "m draws from the student; --shape, --surrogate and --baseline say what of them"},
    {"threshold", part_estimator::threshold, "likewise, of B weighted entries: the likely ones for certain"},
    {"lightning", part_estimator::lightning, "the drawn token, log q - log p within --advantage-clip, no ratio"},
};
// clang-format on

/// What --estimator takes.
inline constexpr auto estimators = [] {
    std::array<std::string_view, opd::choice::divergences.size() + std::size(part_estimators)> names;
    std::size_t n = 0;
    for (const auto& line : opd::choice::divergences) names[n++] = line.text;
    for (const auto& line : part_estimators) names[n++] = line.text;
    return names;
}();
/// The same, in a sentence.
const char* estimator_help();

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
        int running = 32;
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

/// What --speculate takes.
std::string speculation_help();
/// What --staleness-policy takes, separated by commas.
std::string policy_names();

/// Calls v.group(key, title), then v.option(key, flag, value, help, affects_results) for each of the group's settings.
template <class Config, class Visitor>
void visit_options(Config& c, Visitor&& v) {
    v.group("run", "Run");
    v.option("directory", "--run-dir", c.run.directory, "directory of everything the run writes", false);
    v.option("start_from", "--start-from", c.run.start_from,
             "checkpoints/student.ckpt of another run of the same task and models: its teacher and student are taken, "
             "and distillation starts at once",
             true);
    v.option(
        "scoring_teacher", "--scoring-teacher", c.run.scoring_teacher,
        "a checkpoint whose teacher scores and judges, in place of the one that --start-from's student was warmed "
        "up beside (or, with --write-offline, of the run's): needs --accept-mismatch scoring_teacher to learn from",
        !c.run.scoring_teacher.empty());
    v.option("seed", "--seed", c.run.seed, "seed of weights, prompts and sampling", true);
    v.option("threads", "--threads", c.run.threads, "threads; 0: one per core. Results do not depend on it", false);
    v.option("checkpoint_every", "--checkpoint-every", c.run.checkpoint_every, "steps between checkpoints", false);
    v.option("log_every", "--log-every", c.run.log_every, "steps between lines of log.jsonl and of progress", false);
    v.option("loss_limit", "--loss-limit", c.run.loss_limit, "stop with exit code 4 when a loss exceeds this", true);

    v.group("task", "Task");
    // what settings were before there was a choice is what they are with gcd
    v.option("kind", "--task", c.task.kind,
             "gcd: the greatest common divisor by repeated subtraction, 15 symbols, judged by right answers; grammar: "
             "texts of the project's own grammar, some 2,300 words, judged by the KL to the teacher. It decides the "
             "defaults of many settings",
             c.task.kind != "gcd");
    v.option("max_words", "--max-words", c.task.max_words, "grammar: most words of a response, its end among them",
             c.task.kind == "grammar");
    v.option("max_operand", "--max-operand", c.task.max_operand, "gcd: largest operand", c.task.kind == "gcd");
    v.option("max_steps", "--max-task-steps", c.task.max_steps, "gcd: keep pairs with at most so many subtractions",
             c.task.kind == "gcd");
    v.option("held_out_one_in", "--held-out-one-in", c.task.held_out_one_in, "one prompt in so many is held out", true);
    v.option("vocabulary", "--vocabulary", c.task.vocabulary,
             "ids that both models know: those beyond the task's own are padding, which no text has and an "
             "untrained student draws like any other; 0: no padding",
             c.task.vocabulary > 0);

    const auto model = [&v](auto& m, const std::string& prefix) {
        v.option("width", prefix + "-width", m.width, "width of the residual stream", true);
        v.option("layers", prefix + "-layers", m.layers, "layers", true);
        v.option("heads", prefix + "-heads", m.heads, "query heads", true);
        v.option("kv_heads", prefix + "-kv-heads", m.kv_heads, "key-value heads; divides the query heads", true);
        v.option("head_dim", prefix + "-head-dim", m.head_dim, "width of a head, even", true);
        v.option("ffn", prefix + "-ffn", m.ffn, "feed-forward width", true);
        v.option("tied", prefix + "-tied", m.tied, "the output head is the embedding", true);
    };
    v.group("teacher_model", "Teacher model");
    model(c.teacher_model, "--teacher");
    v.group("student_model", "Student model");
    model(c.student_model, "--student");

    v.group("teacher", "Teacher (supervised)");
    v.option("steps", "--teacher-steps", c.teacher.steps, "steps", true);
    v.option("batch", "--teacher-batch", c.teacher.batch, "prompts a step", true);
    v.option("warmup", "--teacher-warmup", c.teacher.warmup, "steps of linear warm-up of the rate", true);
    v.option("rate", "--teacher-rate", c.teacher.rate, "learning rate, then a cosine to a tenth", true);
    // what settings were before there was a choice is what they are without; likewise the student's data
    v.option(
        "seed", "--teacher-seed", c.teacher.seed,
        "seed of the teacher's weights and prompts, so that one student can be warmed up beside several; 0: --seed",
        c.teacher.seed != 0);

    v.group("student", "Student warm-up (supervised, until it reaches an accuracy)");
    v.option("data", "--warmup-data", c.student.data,
             "what it learns from: solutions: the task's; teacher: the teacher's own answers to training prompts, each "
             "drawn once at --temperature (SFT on the teacher's trajectories, Lightning OPD)",
             c.student.data != "solutions");
    v.option("max_steps", "--student-max-steps", c.student.max_steps, "most steps; 0: no warm-up", true);
    v.option("batch", "--student-batch", c.student.batch, "prompts a step", true);
    v.option("warmup", "--student-warmup", c.student.warmup, "steps of linear warm-up of the rate", true);
    v.option("rate", "--student-rate", c.student.rate, "learning rate, constant", true);
    v.option("target_accuracy", "--student-target-accuracy", c.student.target_accuracy,
             "stop at this accuracy on training prompts: of greedy answers; grammar: the share of drawn ones that are "
             "grammatical",
             true);
    v.option("check_every", "--student-check-every", c.student.check_every, "steps between looks at it", true);
    v.option("check_prompts", "--student-check-prompts", c.student.check_prompts, "prompts of a look", true);

    v.group("distill", "Distillation (on-policy)");
    v.option("estimator", "--estimator", c.distill.estimator, estimator_help(), true);
    v.option("steps", "--steps", c.distill.steps, "steps; may change with --resume", true);
    v.option("prompts", "--prompts", c.distill.prompts, "prompts a step", true);
    v.option("answers", "--answers", c.distill.answers,
             "answers a prompt, each with noise of its own: a step learns from prompts * answers sequences", true);
    v.option("mini_batches", "--mini-batches", c.distill.mini_batches,
             "optimizer updates a step, each from an equal share of its sequences: from the second on they are stale",
             true);
    // what settings were before there was a choice is what they are without
    v.option(
        "micro_batch", "--micro-batch", c.distill.micro_batch,
        "sequences of an update whose activations the learner holds at once; their gradients are summed, each token "
        "with its weight in the whole update. 0: all",
        c.distill.micro_batch > 0);
    v.option("warmup", "--warmup", c.distill.warmup, "steps of linear warm-up of the rate", true);
    v.option("rate", "--rate", c.distill.rate, "learning rate, then a cosine to a tenth", true);
    v.option("temperature", "--temperature", c.distill.temperature, "of rollout, student and teacher", true);
    // what settings were before there was a choice is what they are with dense
    v.option(
        "teacher_cache", "--teacher-cache", c.distill.teacher_cache,
        "divergences over the whole vocabulary: what a scored response holds of the teacher's row: dense: its "
        "logits; hidden: what its head makes them of, from which the learner makes logits for a block of rows at a "
        "time; hidden-lowrank: that in fewer numbers, and not quite the teacher",
        c.distill.teacher_cache != "dense");
    v.option("hidden_budget", "--hidden-budget", c.distill.hidden_budget,
             "hidden: bytes of logits that the learner has at once, of the student and of the teacher each. Results do "
             "not depend on it",
             false);
    v.option("cache_rank", "--cache-rank", c.distill.cache_rank, "hidden-lowrank: numbers a row", true);
    v.option("cache_calibration", "--cache-calibration", c.distill.cache_calibration,
             "hidden-lowrank: responses of the teacher to training prompts on which the numbers are chosen", true);
    v.option("jsd_w", "--jsd-w", c.distill.jsd_w, "jsd: teacher's share of the mixture, in (0,1)", true);
    v.option("jsd_o", "--jsd-o", c.distill.jsd_o, "jsd: weight of KL(q|m), in [0,1]", true);
    v.option("skew", "--skew", c.distill.skew,
             "skew_forward_kl, skew_reverse_kl: share of the own distribution, in [0,1)", true);
    v.option("alpha", "--alpha", c.distill.alpha, "alpha_divergence: the exponent", true);
    v.option("k", "--k", c.distill.k, "topk, topk_rw, tail_bucket: size of the support", true);
    v.option("topk_from", "--topk-from", c.distill.topk_from, "topk, tail_bucket: whose top k, teacher or student",
             true);
    v.option("m", "--m", c.distill.m, "mc: draws a position", true);
    v.option("budget", "--budget", c.distill.budget, "threshold: entries a position", true);
    v.option("shape", "--shape", c.distill.shape,
             "mc, threshold: the divergence, or the shape of the log-ratio; --list-estimators says which", true);
    v.option("shape_a", "--shape-a", c.distill.shape_a, "mc, threshold: first parameter of the shape", true);
    v.option("shape_b", "--shape-b", c.distill.shape_b, "mc, threshold: second parameter of the shape", true);
    v.option("surrogate", "--surrogate", c.distill.surrogate, "mc, threshold: what becomes of the ratio", true);
    v.option("clip_low", "--clip-low", c.distill.clip_low,
             "ppo_clip, decoupled_ppo, cispo, a3po: 1 - low is the least ratio", true);
    v.option("clip_high", "--clip-high", c.distill.clip_high, "likewise: 1 + high is the largest", true);
    v.option("dual_clip", "--dual-clip", c.distill.dual_clip, "ppo_clip: largest ratio where A < 0; 0: none", true);
    v.option("ratio_cap", "--ratio-cap", c.distill.ratio_cap,
             "truncated_is, decoupled_ppo, a3po: the cap; 0: none, but of truncated_is", true);
    v.option("baseline", "--baseline", c.distill.baseline, "mc, threshold: subtracted from the advantage", true);
    v.option("selector", "--selector", c.distill.selector,
             "which rows count, by what the step finds out about them; --list-estimators says which", true);
    v.option("selector_a", "--selector-a", c.distill.selector_a, "first parameter of the selector", true);
    v.option("selector_b", "--selector-b", c.distill.selector_b,
             "second parameter; prefix: updates after which it is a token longer, 0: it stays", true);
    // what settings were before there was a choice is what they are without
    v.option("advantage_clip", "--advantage-clip", c.distill.advantage_clip,
             "lightning: largest |log q - log p| of a token, in nats", c.distill.estimator == "lightning");
    v.option("offline", "--offline", c.distill.offline,
             "learn from the data set of this folder, which --write-offline wrote with the student of --start-from: "
             "nothing is rolled out, and no teacher is in memory while the student learns. With --estimator lightning, "
             "mc --m 1, or topk and tail_bucket from a set that was written with them",
             is_offline(c));
    v.option("accept_mismatch", "--accept-mismatch", c.distill.accept_mismatch,
             "--offline, --scoring-teacher: fingerprints that may differ, separated by commas: scoring_teacher, "
             "sft_teacher, tokenizer, reference_policy",
             false);
    v.option("self_normalise", "--self-normalise", c.distill.self_normalise,
             "mc, threshold: weights divided by the sum of ratios of their row", true);
    v.option("accept_bias", "--accept-bias", c.distill.accept_bias,
             "mc, threshold: take an estimator that descends something else than its divergence", true);
    // what settings were before there was a choice is what they are without
    v.option(
        "m2po", "--m2po", c.distill.m2po,
        "mc, threshold: largest second moment of log p - log mu over the tokens of an update whose gradient pushes "
        "them on; those that carry more are left out (M2PO, which has 0.04). 0: none are",
        c.distill.m2po > 0);
    v.option(
        "correction", "--correction", c.distill.correction,
        "mc: what a trainer does about rollout's own log-probs, instead of --surrogate: 'recompute' and 'bypass' put "
        "the policy that the step began with, or rollout's, under the ratio; --list-estimators has all",
        !c.distill.correction.empty());
    v.option("loss_clamp", "--loss-clamp", c.distill.loss_clamp,
             "largest loss of a row, in nats: beyond it the row counts as that, with gradient 0. 0: none",
             c.distill.loss_clamp > 0);
    const bool filtered = filters_rollout(c);
    v.option("rollout_top_k", "--rollout-top-k", c.distill.rollout_top_k,
             "rollout draws from the k most probable ids; what was kept is recorded, and mc and threshold compare the "
             "student on it. 0: all",
             filtered);
    v.option("rollout_top_p", "--rollout-top-p", c.distill.rollout_top_p,
             "likewise from the fewest ids whose mass is so much; 1: all", filtered);
    v.option("rollout_min_p", "--rollout-min-p", c.distill.rollout_min_p,
             "likewise from those at least so probable as a share of the most probable; 0: all", filtered);
    v.option("inject_mismatch", "--inject-mismatch", c.distill.inject_mismatch,
             "rollout computes otherwise than the learner, to see what that does: bf16 (weights and logits), split=4 "
             "(products' sums in so many runs), temperature=1.02 (times --temperature), noise=0.02 (heavy-tailed, on "
             "logits), filter (what it kept is not reported); several separated by commas. The log then has figures "
             "of the mismatch",
             !c.distill.inject_mismatch.empty());
    // in virtual time they decide how long rollout takes, and so what meets which weights
    v.option("slots", "--slots", c.distill.slots,
             "sequences decoded together. Results do not depend on it, but under --driver virtual", in_virtual_time(c));
    v.option("prefill_chunk", "--prefill-chunk", c.distill.prefill_chunk,
             "prompt tokens a decoding step takes. Results do not depend on it, but under --driver virtual",
             in_virtual_time(c));
    v.option("kv_tokens", "--kv-tokens", c.distill.kv_tokens,
             "tokens whose keys and values a rollout worker has memory for; where it runs out, the sequences that have "
             "drawn least wait, and are read again. 0: room for all of every slot. Results do not depend on it, but "
             "under --driver virtual",
             in_virtual_time(c));

    v.group("schedule", "Schedule (of distillation's rollout, teacher and learner)");
    v.option("kind", "--schedule", c.schedule.kind, "sync, step-off, controlled, async", true);
    v.option("k", "--schedule-k", c.schedule.k,
             "step-off, controlled: updates between the start of a batch and the one that consumes it", true);
    v.option("tau", "--tau", c.schedule.tau,
             "async: staleness, in updates: bounds the mean start lag under capacity and areal, every sequence's under "
             "the other policies",
             true);
    v.option("staleness_policy", "--staleness-policy", c.schedule.staleness_policy,
             ("async: which sequences make a batch: " + policy_names()).c_str(), true);
    v.option(
        "outstanding", "--outstanding", c.schedule.outstanding,
        "async, but areal: sequences between start and update: a number; automatic: as many as the work needs; "
        "widest: (tau + 1) * prompts * answers; by_policy: automatic under capacity, edf, drop and retry, else widest",
        true);
    v.option("concurrency", "--concurrency", c.schedule.concurrency, "areal: most sequences in rollout; 0: no limit",
             true);
    v.option("weight_update", "--weight-update", c.schedule.weight_update,
             "async: what new weights do to running sequences: keep, abort, finish_first", true);
    v.option("park_after", "--park-after", c.schedule.park_after,
             "async: --weight-update keep: tokens that a worker draws of a response at a time; then the response is "
             "parked, whoever waits has its turn, and it goes on where there is room; 0: never",
             true);
    // what meets which weights depends on them under async alone, and what it takes in virtual time
    const bool timed = c.schedule.kind == "async" || in_virtual_time(c);
    v.option("rollout_workers", "--rollout-workers", c.schedule.rollout_workers,
             "rollout workers, which share out --slots; 0: as many as threads, under virtual 4", timed);
    v.option(
        "teachers", "--teachers", c.schedule.teachers,
        "teachers, each on a thread of its own; 0: as many as threads under sync and controlled, whose stages take "
        "turns, 4 with --teacher-url, else 1, as under virtual",
        timed);
    v.option("score_batch", "--score-batch", c.schedule.score_batch,
             "sequences a teacher call scores; 0: 8, and of a whole batch no more than an equal share", timed);
    v.option("score_flush", "--score-flush", c.schedule.score_flush,
             "async: seconds after which a teacher scores fewer; 0: at once", true);
    v.option("rollout_deadline", "--rollout-deadline", c.schedule.rollout_deadline,
             "seconds of an attempt at a response; past it the attempt is aborted, and made again. 0: none", true);
    v.option("teacher_deadline", "--teacher-deadline", c.schedule.teacher_deadline,
             "seconds of a teacher call before its worker counts as lost; 0: none", true);
    v.option("learner_deadline", "--learner-deadline", c.schedule.learner_deadline, "likewise of a learner's step",
             true);
    v.option("sync_deadline", "--sync-deadline", c.schedule.sync_deadline,
             "likewise of a rollout worker that installs weights, or lets go of an aborted attempt", true);
    v.option("attempts", "--attempts", c.schedule.attempts,
             "failures of a response, or of its scoring, before it is given up", true);
    v.option("inject", "--inject", c.schedule.inject,
             "faults, to see what becomes of them: shares of the calls whose worker dies (kill=0.01), whose answer is "
             "late (delay=0.01) or never comes (drop=0.01)",
             true);
    v.option("inject_seconds", "--inject-seconds", c.schedule.inject_seconds,
             "--inject: how late, and until a worker is back", true);
    v.option(
        "publish", "--publish", c.schedule.publish,
        "how rollout workers get new weights: shared (the learner's memory), deltas (each has its own, and is sent "
        "what changed). Results do not depend on it",
        false);
    v.option("check_publications", "--check-publications", c.schedule.check_publications,
             "--publish deltas: every worker compares what it made with the learner's weights, bit for bit; other bits "
             "end the run",
             false);
    v.option(
        "driver", "--driver", c.schedule.driver,
        "threads; virtual: one thing after the other, in an order and at times that follow from the costs below, so "
        "that the run is the same bit for bit wherever it runs",
        true);
    v.option(
        "learner_threads", "--learner-threads", c.schedule.learner_threads,
        "driver threads: threads of the learner, beside rollout's and the teachers'; 0: as many as --threads. Each "
        "update is the same whatever it is",
        false);
    v.option("cost_step", "--cost-step", c.schedule.cost_step,
             "virtual: seconds of a decoding step. These defaults are the CPU time of the default models on one core "
             "of an AMD EPYC (Zen 5) with -march=native",
             true);
    v.option("cost_step_row", "--cost-step-row", c.schedule.cost_step_row,
             "virtual: more for each token in it, of responses and prompts", true);
    v.option("cost_draft", "--cost-draft", c.schedule.cost_draft,
             "virtual: seconds of a pass through a learned drafter, one for each depth of the drafts", true);
    v.option("cost_draft_row", "--cost-draft-row", c.schedule.cost_draft_row, "virtual: more for each token in it",
             true);
    v.option("cost_adapt", "--cost-adapt", c.schedule.cost_adapt,
             "virtual: seconds of a slice of the drafter's training (--adapt-drafter)", true);
    v.option("cost_adapt_row", "--cost-adapt-row", c.schedule.cost_adapt_row, "virtual: more for each token in it",
             true);
    v.option("cost_score", "--cost-score", c.schedule.cost_score, "virtual: seconds of a teacher call", true);
    v.option("cost_score_row", "--cost-score-row", c.schedule.cost_score_row, "virtual: more for each token in it",
             true);
    v.option("cost_train", "--cost-train", c.schedule.cost_train, "virtual: seconds of a learner's step", true);
    v.option("cost_train_row", "--cost-train-row", c.schedule.cost_train_row, "virtual: more for each token in it",
             true);
    v.option("cost_sync", "--cost-sync", c.schedule.cost_sync, "virtual: seconds of installing weights", true);

    v.group("served", "Teacher over HTTP (docs/serve.md)");
    v.option("url", "--teacher-url", c.served.url,
             "http://host[:port][/prefix] of a server that scores responses in place of this process's teacher; of "
             "several replicas separated by commas. Distillation needs --start-from then, and --estimator lightning, "
             "mc, threshold, topk, topk_rw or tail_bucket. OPD_TEACHER_KEY in the environment is sent as bearer token",
             false);
    // another port is the same teacher; no teacher in the checkpoint is another run
    v.option("dialect", "--teacher-dialect", c.served.dialect,
             "what the server speaks: vllm, sglang, llama_cpp, openai_echo; candidates (mc, threshold, topk_rw, "
             "--topk-from student) take vllm or sglang",
             is_served(c));
    v.option("model", "--teacher-model", c.served.model, "its name, where the server has several models", is_served(c));
    v.option("requests", "--teacher-requests", c.served.requests, "requests under way at most", false);
    v.option("silence", "--teacher-silence", c.served.silence, "seconds of silence after which it is asked again",
             false);
    v.option("patience", "--teacher-patience", c.served.patience,
             "seconds that a response is asked for again, whatever fails; then the run ends with exit code 6, and "
             "--resume goes on",
             false);
    v.option("accept", "--accept-teacher", c.served.accept,
             "what the probe at the start may find and go on, separated by commas: vocabulary, tokenizer, context, "
             "ids, mass, shift, temperature, noise",
             false);

    v.group("drafter", "Drafter (--train-drafter, --adapt-drafter)");
    const bool learns = in_virtual_time(c) && c.speculation.adapt; // what is drafted decides how long rollout takes
    v.option(
        "kind", "--drafter", c.drafter.kind,
        "hidden: layers on the target's hidden states, with its embedding and head; eagle3: on three of its layers; "
        "model: a small model of its own",
        learns);
    v.option("width", "--drafter-width", c.drafter.width, "model: width of the residual stream", learns);
    v.option("layers", "--drafter-layers", c.drafter.layers, "layers", learns);
    v.option("heads", "--drafter-heads", c.drafter.heads, "query heads", learns);
    v.option("kv_heads", "--drafter-kv-heads", c.drafter.kv_heads, "key-value heads; divides the query heads", learns);
    v.option("head_dim", "--drafter-head-dim", c.drafter.head_dim, "width of a head, even", learns);
    v.option("ffn", "--drafter-ffn", c.drafter.ffn, "feed-forward width", learns);
    v.option("steps", "--drafter-steps", c.drafter.steps, "steps", false);
    v.option("batch", "--drafter-batch", c.drafter.batch, "responses a step", false);
    v.option("warmup", "--drafter-warmup", c.drafter.warmup, "steps of linear warm-up of the rate", learns);
    v.option("rate", "--drafter-rate", c.drafter.rate, "learning rate, then a cosine to a tenth", learns);
    v.option("responses", "--drafter-responses", c.drafter.responses,
             "responses of the target to learn from, drawn at --temperature", false);
    v.option("depth", "--drafter-depth", c.drafter.depth, "tokens of a draft, in the weights and in what is measured",
             learns);
    v.option("loss", "--drafter-loss", c.drafter.loss,
             "lk: expected acceptance, KL and hidden states; eagle: cross-entropy of the target's tokens and hidden "
             "states; hass: that and the likeliest ids, in a training-time test of three steps; eagle3: KL in one of "
             "seven; osd: KL and hidden states where its draft would be rejected",
             learns);
    v.option("test_steps", "--drafter-test-steps", c.drafter.test_steps,
             "hass, eagle3: steps of the training-time test; 0: as published", learns);
    v.option("top_k", "--drafter-top-k", c.drafter.top_k,
             "hass: ids of the target's that its distillation is of; 0: none", learns);
    v.option("ce", "--drafter-ce", c.drafter.ce, "eagle, hass: weight of the cross-entropy", learns);
    v.option("acceptance", "--drafter-acceptance", c.drafter.acceptance, "weight of -log sum min(p, q)", learns);
    v.option("kl", "--drafter-kl", c.drafter.kl, "weight of KL(target, drafter)", learns);
    v.option("hidden", "--drafter-hidden", c.drafter.hidden,
             "hidden: weight of the smooth L1 distance to the target's hidden states", learns);
    v.option("weights", "--drafter-weights", c.drafter.weights,
             "what a row counts by its place in its draft: accepted_length, decaying, none", learns);
    v.option("gamma", "--drafter-gamma", c.drafter.gamma, "decaying: rows to 1/e", learns);
    v.option("smoothing", "--drafter-smoothing", c.drafter.smoothing,
             "accepted_length: share of rows that count as accepted, whatever they are, in [0, 1]", learns);
    v.option("held_out", "--drafter-held-out", c.drafter.held_out, "held-out prompts to measure with", false);

    // as with slots: drafts decide how long rollout takes, and nothing else
    v.group("speculation", "Speculative rollout (the tokens are those of plain rollout, bit for bit)");
    v.option("kind", "--speculate", c.speculation.kind, speculation_help().c_str(), in_virtual_time(c));
    v.option("depth", "--draft-depth", c.speculation.depth, "one drafter: most tokens that a draft goes ahead",
             in_virtual_time(c));
    v.option("verify", "--draft-verify", c.speculation.verify,
             "one drafter: most drafted tokens of a sequence that a step verifies", in_virtual_time(c));
    v.option("children", "--draft-children", c.speculation.children,
             "learned: most drafts of one token, and most of a depth that are gone on from", in_virtual_time(c));
    v.option("from", "--draft-from", c.speculation.from,
             "learned, auto: checkpoints/drafter.ckpt of the run that made it; empty, with learned and --resume: the "
             "run's own",
             in_virtual_time(c));
    v.option("running", "--draft-running", c.speculation.running,
             "auto: begins to draft when so few sequences run on a worker, stops above a quarter more",
             in_virtual_time(c));
    v.option("history", "--draft-history", c.speculation.history,
             "tokens of prompts and responses that each rollout worker drafts from, about 200 bytes each",
             in_virtual_time(c));
    v.option(
        "adapt", "--adapt-drafter", c.speculation.adapt,
        "learned, auto: rollout workers train the drafter while they have nothing to run, on what the target's head "
        "reads in responses of this step and the last; begins with --draft-from, or knowing nothing",
        in_virtual_time(c));
    v.option("adapt_rate", "--adapt-rate", c.speculation.adapt_rate, "learning rate of that, after --drafter-warmup",
             in_virtual_time(c));
    v.option("adapt_rows", "--adapt-rows", c.speculation.adapt_rows,
             "tokens of a slice; between its passes a worker looks whether rollout wants it", in_virtual_time(c));
    v.option("adapt_memory", "--adapt-memory", c.speculation.adapt_memory,
             "tokens whose hidden states are kept at most", in_virtual_time(c));
    v.option("adapt_checkpoint_every", "--adapt-checkpoint-every", c.speculation.adapt_checkpoint_every,
             "updates of the drafter between its files (checkpoints/drafter.ckpt), which a thread of its own writes",
             false);
    v.option("adapt_slices", "--adapt-slices", c.speculation.adapt_slices,
             "slices between two versions of the student at most; 0: as many as there is time for", in_virtual_time(c));

    v.group("optimizer", "Optimizer (AdamW)");
    v.option("beta1", "--beta1", c.optimizer.beta1, "decay of the mean", true);
    v.option("beta2", "--beta2", c.optimizer.beta2, "decay of the square", true);
    v.option("epsilon", "--epsilon", c.optimizer.epsilon, "added to the root", true);
    v.option("decay", "--weight-decay", c.optimizer.decay, "weight decay of the matrices", true);
    v.option("clip", "--clip", c.optimizer.clip, "largest gradient norm; 0: no clipping", true);

    v.group("evaluation", "Evaluation");
    v.option("prompts", "--eval-prompts", c.evaluation.prompts, "held-out prompts", true);
    v.option("samples", "--eval-samples", c.evaluation.samples, "sampled responses a prompt for Avg@n; 0: none", true);
    v.option("every", "--eval-every", c.evaluation.every,
             "distillation steps between looks at the student's accuracy; 0: none", true);
    v.option("every_prompts", "--eval-every-prompts", c.evaluation.every_prompts, "held-out prompts of such a look",
             true);
}

/// The divergence of dense logits that a configuration names; none: it names another estimator.
std::optional<opd::any_dense> dense_estimator(const config& c);
/// The estimator of a part of the row; none: it names a divergence, or nothing.
inline std::optional<part_estimator> part_estimator_of(const config& c) {
    return opd::choice::find(part_estimators, c.distill.estimator);
}
/// The estimator of drawn tokens that a configuration names, checked for the law that its schedule draws under.
opd::any_sampled drawn_estimator(const config& c);
/// What --selector makes of the rows at a version of the student: weights, or EOPD's mixture.
struct row_choice {
    opd::any_selector weights = {};
    std::optional<opd::selector::eopd> eopd = {};
};
row_choice selector_of(const config& c, std::int32_t version);
/// What --list-estimators prints.
std::string list_estimators();

/// A setting that belongs to another estimator, schedule, policy or driver than the one chosen.
struct unused_setting {
    std::string group, key;
    std::string by; ///< the choice that does not look at it: "--estimator reverse_kl"
};
/// All of them. Giving one, by its flag or in a file, is a usage failure.
std::vector<unused_setting> unused_settings(const config& c);

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

/// The settings that results depend on.
nlohmann::ordered_json results_json(const config& c);

/// The settings that results depend on, as 32 hexadecimal digits.
std::string fingerprint(const config& c);

/// Settings of the table that another program takes: opd-train's flag, and its own.
using option_names = std::map<std::string, std::string>;
/// Adds their options.
void add_options(CLI::App& app, config& c, const option_names& names);
/// A usage failure if one was given that is not looked at.
void refuse_unused(const CLI::App& app, const config& c, const option_names& names);
/// A sentence about opd-train's flags as that program says it.
std::string renamed(const std::string& text, const option_names& names);

/// Settings as text, as results_json(c).dump() has them: "distill.rate, task.max_steps", where two differ.
std::string differences(const std::string& a, const std::string& b);

/// What the command line asks for.
struct command {
    config settings;
    bool resume = false;
    bool overwrite = false;
    bool quiet = false;
    bool print_config = false;
    bool train_drafter = false;
    std::string write_offline;                  ///< folder of the data set that is to be written; empty: none
    int offline_sequences = 0;                  ///< that it is to have
    std::string text;                           ///< what to print instead of running: --help, --version, --print-config
    std::vector<std::string> warnings;          ///< of what was given and does not count
    std::string file;                           ///< the configuration that was read; empty: none
    std::map<std::string, std::string> in_file; ///< "--rate" to "distill.rate": what it decides, since no flag does
};

/// `text` with settings under the names that the user gave them: "my.json: distill.rate must be …" for "--rate must be …".
std::string as_given(const command& c, const std::string& text);

/// Parses the command line; usage failures carry the message to print.
command parse_command_line(int argc, const char* const* argv);
/// The same, of `opd-train` and these.
command parse_command_line(const std::vector<std::string>& arguments);

} // namespace trainer
