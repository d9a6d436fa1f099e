// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/offline.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/set_source.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/stages.hpp"
#include "settings/estimator.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"

namespace trainer {

nlohmann::ordered_json described(const opd::offline_drift& d) {
    return {{"ratio_mean", d.ratio_mean()},
            {"ratio_deviation", d.ratio_deviation()},
            {"chi_squared", d.chi_squared()},
            {"effective_share", d.effective_share()},
            {"log_ratio_deviation", d.log_ratio_deviation()},
            {"sequence_effective_share", d.sequence_effective_share()}};
}

std::string offline_told(const nlohmann::ordered_json& j) {
    const auto& d = j["drift"];
    const auto of = [&](const char* key) { return d[key].is_number() ? d[key].get<double>() : 0.0; };
    return fmt::format("\n{:<16}{:>10} sequences, {} tokens of responses; {:.1f} epochs of them were learnt from\n"
                       "{:<16}{:>10.4f} mean of p/pi_ref over tokens, deviation {:.3g}, chi-squared {:.3g}, effective "
                       "share {:.3f}\n{:<16}{:>10.3g} nats, deviation of a sequence's log-ratio\n",
                       "data set", j["sequences"].get<std::int64_t>(), j["response_tokens"].get<std::int64_t>(),
                       j["epochs"].get<double>(), "drift", of("ratio_mean"), of("ratio_deviation"), of("chi_squared"),
                       of("effective_share"), "", of("log_ratio_deviation"));
}

namespace {

// A checkpoint whose settings are those of c in some groups.
run_state checkpoint_like(const config& c, const char* flag, const std::string& path,
                          std::initializer_list<const char*> groups) {
    std::string saved;
    run_state state = load_checkpoint(path, saved);
    const auto theirs = nlohmann::json::parse(saved), mine = nlohmann::json(results_json(c));
    for (const char* group : groups)
        if (theirs.value(group, nlohmann::json()) != mine[group])
            throw failure(exit_usage, fmt::format("{}: {} was made with another {}", flag, path, group));
    return state;
}

// How far two teachers are apart along what pi_ref draws: Delta = log q_sft - log q of a token, and
// sigma_Delta² = E[(sum over a sequence of |Delta|)²] (assumption 3.4, with |Delta| in the sum: docs/offline.md).
struct teacher_gap {
    std::int64_t sequences = 0, tokens = 0;
    double sum = 0, squares = 0;
    void add(std::size_t n, std::span<const float> sft, std::span<const float> scoring) { // of its last n tokens
        double of_sequence = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const double a = sft[sft.size() - n + i], b = scoring[scoring.size() - n + i];
            of_sequence += std::abs(a - b);
        }
        ++sequences, tokens += static_cast<std::int64_t>(n);
        sum += of_sequence, squares += of_sequence * of_sequence;
    }
    double mean() const { return sum / static_cast<double>(tokens); }
    double sigma() const { return std::sqrt(squares / static_cast<double>(sequences)); }
};

} // namespace

// --- opd-train --write-offline --------------------------------------------------------------------------------------

exit_code write_offline(const command& arguments, std::size_t shard_bytes) {
    config c = arguments.settings;
    const auto own_task = task_of(c);
    const any_task& task = *own_task;
    c = with_task_shapes(c, task);
    const auto part = part_estimator_of(c);
    const bool lists = part == part_estimator::topk || part == part_estimator::tail_bucket; // the teacher's k best ids
    if (lists && c.distill.topk_from != "teacher")
        throw failure(exit_usage,
                      "--write-offline: --topk-from student: a set outlives the student whose ids those are");
    config scored_as = c;              // has log q of the tokens in any case
    c.distill.estimator = "lightning"; // whose one draw a token is the token itself
    if (!lists) scored_as = c;
    const cache_plan plan = cache_for(scored_as);
    if (filters_rollout(c))
        throw failure(exit_usage, "--write-offline: not with --rollout-top-k, --rollout-top-p, --rollout-min-p: pi_ref "
                                  "draws from the whole vocabulary");
    const std::string& folder = arguments.write_offline;
    const std::string warm =
        c.run.start_from.empty() ? c.run.directory + "/checkpoints/student.ckpt" : c.run.start_from;
    if (!std::filesystem::exists(warm))
        throw failure(exit_input, fmt::format("--write-offline: there is no {}: --run-dir names a run that warmed a "
                                              "student up, or --start-from its student.ckpt",
                                              warm));
    run_state state = checkpoint_like(c, "--write-offline", warm, {"task", "teacher_model", "student_model"});
    opd::data::fingerprints prints;
    prints.sft_teacher = print_of_teacher(state.teacher_weights);
    prints.reference_policy = print_of_policy(state.student_weights, c.distill.temperature);
    prints.tokenizer = print_of_tokenizer(task, c.student_model.vocabulary);
    const transformer<float> student = model_with(c.student_model, std::move(state.student_weights), warm);
    const std::string& scorer = c.run.scoring_teacher.empty() ? warm : c.run.scoring_teacher;
    const transformer<float> sft = model_with(c.teacher_model, state.teacher_weights, warm);
    if (!c.run.scoring_teacher.empty())
        state = checkpoint_like(c, "--scoring-teacher", scorer, {"task", "teacher_model"});
    const transformer<float> teacher = model_with(c.teacher_model, std::move(state.teacher_weights), scorer);

    opd::cpu_backend backend;
    backend.threads = threads_of(c);
    if (is_served(c) && !c.run.scoring_teacher.empty())
        throw failure(exit_usage, "--scoring-teacher and --teacher-url exclude each other");
    const set_scorer by = scorer_for(scored_as, task, &student, &teacher, backend);
    prints.scoring_teacher = by.print;
    if (prints.sft_teacher != prints.scoring_teacher)
        spdlog::warn("{} has another teacher than {}: --offline will refuse the set without --accept-mismatch "
                     "scoring_teacher",
                     is_served(c) ? c.served.url : scorer, warm);

    const sampling options = sampling_of(c, task);
    teacher_scorer score_again(sft, backend);
    teacher_gap gap;
    std::map<std::string, std::string> notes = {{"task", c.task.kind},
                                                {"seed", std::to_string(c.run.seed)},
                                                {"temperature", fmt::format("{}", c.distill.temperature)},
                                                {"answers", std::to_string(c.distill.answers)}};
    if (lists) notes["k"] = std::to_string(plan.entries);
    if (c.student.data != "solutions") notes["warmup_data"] = c.student.data; // what sft_teacher is the teacher of
    return of_set(exit_io, [&] {
        opd::data::rollout_writer out(
            folder,
            {.vocab = c.student_model.vocabulary, .shard_bytes = shard_bytes, .fingerprints = prints, .notes = notes});
        for (const std::string& piece : out.recovered()) spdlog::info("removed: {}", piece);
        const opd::index_t all = arguments.offline_sequences, before = out.sequences();
        if (before > 0) { // fingerprints were compared; what else decides the tokens was not
            const opd::data::rollout_set set(folder, {.unfinished = true});
            refuse_other_notes("--write-offline", folder, set, notes);
            spdlog::info("{} has {} of {} sequences", folder, before, all);
        }
        constexpr opd::index_t some = 256; // sequences at once: whatever it is, the set is the same
        const std::uint64_t base = (static_cast<std::uint64_t>(stage::distill) + 1) << 56; // the online run's samples
        std::int64_t tokens = 0;
        const double begin = now();
        double rolled = 0;
        while (out.sequences() < all && !interrupted) {
            const opd::index_t first = out.sequences();
            std::vector<request> requests;
            for (opd::index_t i = first; i < std::min(first + some, all); ++i)
                requests.push_back(
                    request_of(task, c.run.seed, base + static_cast<std::uint64_t>(i), c.distill.answers));
            const double start = now();
            const std::vector<trajectory> drawn = roll_out(student, backend.team(), requests, options);
            rolled += now() - start;
            std::vector<const trajectory*> each;
            for (const trajectory& t : drawn) each.push_back(&t);
            const std::vector<scored_sequence> scored = by.score(each);
            if (prints.sft_teacher != prints.scoring_teacher && gap.sequences < 1024)
                for (const std::vector<scored_sequence> other = score_again.score(each, options.plan.count, plan);
                     const std::size_t i : std::views::iota(std::size_t{0}, drawn.size()))
                    gap.add(drawn[i].log_mu.size(), other[i].cache.next_log_q, scored[i].cache.next_log_q);
            for (std::size_t i = 0; i < drawn.size(); ++i) tokens += add_scored(out, drawn[i], scored[i].cache, lists);
            if (!arguments.quiet && (out.sequences() / some) % 8 == 0)
                spdlog::info("{} of {} sequences", out.sequences(), all);
        }
        if (interrupted) {
            spdlog::warn("stopped: {} keeps {} of {} sequences; the same command goes on", folder, out.kept_sequences(),
                         all);
            return exit_interrupted;
        }
        out.finish();
        const double seconds = now() - begin;
        spdlog::info("{}: {} sequences, {} tokens of responses in this call: {:.1f} s of rollout, {:.1f} s of scoring "
                     "and writing",
                     folder, out.sequences(), tokens, rolled, seconds - rolled);
        if (gap.sequences > 0)
            spdlog::info("along {} of them the two teachers differ by {:.4f} nats a token (mean |log q_sft - log q|); "
                         "sigma_Delta is {:.3g} nats",
                         gap.sequences, gap.mean(), gap.sigma());
        return exit_ok;
    });
}

// --- opd-train --offline --------------------------------------------------------------------------------------------

void run::distill_offline() {
    const config& c = settings_;
    set_source set(c, task_->max_length());
    if (state_.in_flight.empty()) // a run that goes on has compared them
        for (const std::string& line : set.check({.sft_teacher = sft_print_,
                                       .scoring_teacher = scoring_print_,
                                       .tokenizer = print_of_tokenizer(*task_, c.student_model.vocabulary),
                                       .reference_policy = print_of_policy(student_.weights, c.distill.temperature)}))
            spdlog::warn("--offline: {}", line);
    else
        set.go_to(state_.in_flight);
    state_.in_flight = set.place();

    learner learn(c, student_, state_.student_optimizer, learner_backend_ ? *learner_backend_ : backend_);
    double& seconds = seconds_[static_cast<std::size_t>(clock_name::learner)];
    shown_seconds_ = seconds;
    shown_step_ = state_.step;
    while (state_.step < c.distill.steps) {
        const double start = now();
        const auto version = static_cast<std::int32_t>(state_.step);
        const std::vector<opd::index_t> numbers = set.next(batch_of(c));
        const learner_result r = set.learn(learn, numbers, rate_of(c, state_.rate, state_.step), version);
        seconds += now() - start;
        state_.next_sample += numbers.size();
        state_.in_flight = set.place();
        distilled(r, learn.snapshot(version + 1), {numbers.begin(), numbers.end()}, seconds, {});
        if (state_.step < c.distill.steps && !end_of_step()) return;
    }
    progress_.clear();

    opd::offline_drift drift;
    constexpr opd::index_t most = 2048; // sequences, the first of the set
    std::vector<opd::index_t> some;
    for (opd::index_t i = 0; i < std::min(most, set.sequences()); ++i) {
        some.push_back(i);
        if (std::ssize(some) < batch_of(c) && i + 1 < std::min(most, set.sequences())) continue;
        const offline_batch b = set.read(some);
        drift.merge(drift_of(c, b.rows, b.cache, learn.token_log_probs(b.rows)));
        some.clear();
    }
    nlohmann::ordered_json j;
    j["set"] = set.folder();
    j["sequences"] = set.sequences();
    j["response_tokens"] = set.response_tokens();
    j["epochs"] = static_cast<double>(c.distill.steps) * batch_of(c) / static_cast<double>(set.sequences());
    j["drift"] = described(drift);
    j["drift"]["gradient_gap_bound"] = drift.gradient_gap_bound();
    write_file(directory_ + "/schedule.json", nlohmann::ordered_json({{"offline", j}}).dump() + "\n");
    evaluations_["after"] = to_json(evaluate(student_, "after"));
    finish_stage(stage::finished, set.place());
}

} // namespace trainer
