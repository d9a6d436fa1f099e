// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What of the settings is refused, and what of them is not looked at.
#include <algorithm>
#include <cmath>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "model/injection.hpp"
#include "nearest.hpp"
#include "numbers.hpp"
#include "settings/options.hpp"
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

} // namespace

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

void validate_served(const config& c) {
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
         {"rollout_top_k", "rollout_top_p", "rollout_min_p", "inject_mismatch"});
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
