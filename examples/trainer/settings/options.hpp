// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every setting of a run, in one table: `visit_options` names each once, and the command line, the configuration file,
// --print-config, --list-settings, --help and the fingerprint of a checkpoint all read that table.
//
// opd-train's command line takes what one run has otherwise than the next: `flags_of_train`. A configuration file takes
// all settings; so do runs that a program makes itself (parse_command_line of a vector).
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "settings/config.hpp"
#include "settings/estimator.hpp"

namespace CLI {
class App;
}

namespace trainer {

/// What --speculate takes.
std::string speculation_help();
/// What --staleness-policy takes, separated by commas.
std::string policy_names();

/// The flags of settings that opd-train's command line takes.
// clang-format off
inline constexpr std::string_view flags_of_train[] = {
    // the run, and what comes before distillation
    "--run-dir", "--start-from", "--scoring-teacher", "--seed", "--threads", "--checkpoint-every", "--task",
    "--teacher-steps", "--warmup-data", "--student-max-steps",
    // what is learnt, from what
    "--estimator", "--steps", "--prompts", "--answers", "--mini-batches", "--micro-batch", "--rate", "--temperature",
    "--k", "--topk-from", "--m", "--budget", "--shape", "--surrogate", "--baseline", "--selector", "--m2po",
    "--correction", "--teacher-cache", "--cache-rank", "--offline", "--accept-mismatch",
    // rollout and its schedule
    "--rollout-top-p", "--inject-mismatch", "--slots", "--kv-tokens", "--schedule", "--schedule-k", "--tau",
    "--staleness-policy", "--outstanding", "--park-after", "--rollout-workers", "--inject", "--publish", "--driver",
    // a served teacher, drafts, evaluation
    "--teacher-url", "--teacher-dialect", "--accept-teacher", "--speculate", "--draft-from", "--draft-depth",
    "--adapt-drafter", "--drafter", "--drafter-loss", "--eval-prompts", "--eval-every"};
// clang-format on
inline bool is_flag_of_train(std::string_view flag) {
    return std::ranges::find(flags_of_train, flag) != std::end(flags_of_train);
}

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
    v.option("gradient_checkpointing", "--gradient-checkpointing", c.distill.gradient_checkpointing,
             "keep of a layer's activations what enters the layer, and compute the others again on the way back: an "
             "update takes less memory, and up to a third more operations. Results do not depend on it",
             false);
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

/// A setting that belongs to another estimator, schedule, policy or driver than the one chosen.
struct unused_setting {
    std::string group, key;
    std::string by; ///< the choice that does not look at it: "--estimator reverse_kl"
};
/// All of them. Giving one, by its flag or in a file, is a usage failure.
std::vector<unused_setting> unused_settings(const config& c);

/// Settings of the table that another program takes: opd-train's flag, and its own.
using option_names = std::map<std::string, std::string>;
/// Adds their options.
void add_options(CLI::App& app, config& c, const option_names& names);
/// A usage failure if one was given that is not looked at.
void refuse_unused(const CLI::App& app, const config& c, const option_names& names);
/// A sentence about opd-train's flags as that program says it.
std::string renamed(const std::string& text, const option_names& names);

} // namespace trainer
