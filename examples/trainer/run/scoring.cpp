// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "run/scoring.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/prints.hpp"
#include "run/offline.hpp"
#include "run/progress.hpp"
#include "run/run.hpp"
#include "settings/command_line.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"

namespace trainer {

set_scorer scorer_for(const config& c, const any_task& task, const transformer<float>* student,
                      const transformer<float>* teacher, opd::cpu_backend& backend, const probe_draws& draws) {
    if (!is_served(c)) {
        const auto scorer = std::make_shared<teacher_scorer>(*teacher, backend);
        const std::string print = print_of_teacher(teacher->weights);
        return {[scorer, plan = cache_for(c), entries = draws_for(c).count](auto each) {
                    return scorer->score(each, entries, plan);
                },
                print, print};
    }
    if (c.distill.temperature != 1)
        throw failure(exit_usage,
                      fmt::format("--teacher-url: servers say log-probs at temperature 1: not with --temperature {}",
                                  c.distill.temperature));
    const auto served = std::make_shared<served_teacher>(c);
    server_identity is;
    if (student != nullptr) {
        const served_probe probe = served->probe(task, *student, teacher, backend, draws);
        spdlog::info("teacher probe: {}", probe.told());
        for (const std::string& sentence : probe.accepted) spdlog::warn("teacher probe: accepted: {}", sentence);
        is = probe.identity;
    } else {
        is = served->identity();
        spdlog::warn("the served teacher is not probed: there is no --reference, whose student would answer");
    }
    return {[served](std::span<const trajectory* const> each) {
                std::vector<scored_sequence> r;
                for (const auto& s : served->score(each)) r.push_back(std::move(*s));
                return r;
            },
            !is.teacher.empty()
                ? is.teacher
                : hash128(fmt::format("served: {} {}", c.served.dialect, is.model.empty() ? c.served.url : is.model)),
            is.teacher, served};
}

loaded_run load_run(const std::string& path) {
    loaded_run r;
    std::string saved;
    r.state = load_checkpoint(path, saved);
    const auto j = nlohmann::json::parse(saved, nullptr, false);
    if (!j.is_object()) throw failure(exit_input, fmt::format("{}: its settings are none", path));
    if (j.contains("task") && j["task"].contains("kind") && j["task"]["kind"].is_string())
        apply_task(j["task"]["kind"].get<std::string>(), r.settings);
    try {
        from_json(j, path, r.settings);
    } catch (const failure& e) {
        throw failure(exit_input, e.what());
    }
    r.settings = with_task_shapes(r.settings, *task_of(r.settings));
    return r;
}

transformer<float> model_with(const model_shape& shape, std::vector<float> weights, const std::string& path) {
    transformer<float> model(shape);
    if (weights.size() != model.weights.size())
        throw failure(exit_input,
                      fmt::format("{}: {} weights for a model of {}{}", path, weights.size(), model.weights.size(),
                                  weights.empty() ? ": a run without a teacher in its process keeps none" : ""));
    model.weights = std::move(weights);
    model.weights_changed();
    return model;
}

void refuse_other_notes(const char* flag, const std::string& folder, const opd::data::rollout_set& set,
                        const std::map<std::string, std::string>& notes) {
    for (const auto& [name, value] : notes)
        if (const auto had = set.description().notes.find(name);
            had == set.description().notes.end() || had->second != value)
            throw failure(exit_usage, fmt::format("{}: {} was begun with another {}", flag, folder, name));
}

index_t add_scored(opd::data::rollout_writer& out, const trajectory& t, const teacher_cache& q, bool lists) {
    const index_t n = std::ssize(t.log_mu), k = q.entries;
    const index_t skip = std::ssize(q.next_log_q) - n; // the prompt's rows
    const std::vector<std::uint8_t> mask(static_cast<std::size_t>(n), 1);
    const opd::data::rollout sequence{.tokens = opd::view(t.tokens.data(), std::ssize(t.tokens)),
                                      .rows = n,
                                      .mask = opd::view(mask.data(), n),
                                      .sample = static_cast<std::int64_t>(t.sample)};
    const opd::teacher::samples own_tokens{opd::view(t.draw_ids.data(), n, 1), opd::view(t.log_mu.data(), n, 1),
                                           opd::view(q.next_log_q.data() + skip, n, 1)};
    if (lists)
        out.add(sequence, own_tokens,
                opd::teacher::support{opd::view(q.ids.data() + skip * k, n, k),
                                      opd::view(q.log_q.data() + skip * k, n, k),
                                      opd::view(q.log_tail.data() + skip, n)});
    else
        out.add(sequence, own_tokens);
    return n;
}

namespace {

// The lines of a file, as trajectories. What is wrong is a failure of kind exit_input that names the line.
class response_lines {
public:
    response_lines(const std::string& path, index_t vocabulary, index_t longest, bool needs_log_mu)
        : path_(path), vocabulary_(vocabulary), longest_(longest), needs_log_mu_(needs_log_mu), file_(path) {
        if (!file_) throw failure(exit_input, fmt::format("--responses: cannot read {}", path));
    }
    index_t line() const { return line_; } ///< of the last one

    // No sequence at the end of the file.
    std::optional<trajectory> next() {
        std::string text;
        do {
            if (!std::getline(file_, text)) {
                if (file_.bad()) refuse("cannot be read");
                return {};
            }
            ++line_;
        } while (text.find_first_not_of(" \t\r") == std::string::npos);
        const auto j = nlohmann::json::parse(text, nullptr, false);
        if (!j.is_object()) refuse("is no JSON object");
        for (const auto& [key, value] : j.items())
            if (key != "prompt" && key != "response" && key != "log_mu" && key != "sample")
                refuse(fmt::format("has '{}'; known are prompt, response, log_mu and sample", key));
        trajectory t;
        t.tokens = ids(j, "prompt");
        t.prompt_length = t.tokens.size();
        const std::vector<token> response = ids(j, "response");
        t.tokens.insert(t.tokens.end(), response.begin(), response.end());
        if (longest_ > 0 && std::ssize(t.tokens) > longest_)
            refuse(fmt::format("has {} tokens; the model takes {}", t.tokens.size(), longest_));
        t.sample = static_cast<std::uint64_t>(line_ - 1);
        if (const auto at = j.find("sample"); at != j.end()) {
            if (!at->is_number_unsigned()) refuse("has a sample that is no integer from 0");
            t.sample = at->get<std::uint64_t>();
        }
        const std::size_t n = response.size();
        if (const auto at = j.find("log_mu"); at != j.end()) {
            if (!at->is_array() || at->size() != n) refuse(fmt::format("has a log_mu that is not {} numbers", n));
            for (const auto& x : *at) {
                if (!x.is_number() || !(x.get<double>() <= 1e-3)) refuse("has a log_mu that is no log-prob");
                t.log_mu.push_back(x.get<float>());
            }
        } else if (needs_log_mu_) {
            refuse("has no log_mu, and there is no --reference to compute it with");
        }
        t.versions.assign(n, 0);
        t.draw_ids.assign(response.begin(), response.end()); // its one draw a row
        t.draw_log_mu = t.log_mu;
        t.draw_log_mu.resize(n);
        t.draw_weight.assign(n, 1.0f), t.draw_exact.assign(n, 0);
        return t;
    }
    [[noreturn]] void refuse(const std::string& why) const {
        throw failure(exit_input, fmt::format("--responses: {}, line {}: {}", path_, line_, why));
    }

private:
    std::vector<token> ids(const nlohmann::json& j, const char* key) const {
        const auto at = j.find(key);
        if (at == j.end() || !at->is_array() || at->empty()) refuse(fmt::format("has no {}, a list of token ids", key));
        std::vector<token> r;
        for (const auto& x : *at) {
            if (!x.is_number_integer() || x < 0 || x >= vocabulary_)
                refuse(fmt::format("has the id {} in {}; known are {}", x.dump(), key, vocabulary_));
            r.push_back(x.get<token>());
        }
        return r;
    }
    const std::string path_;
    const index_t vocabulary_, longest_;
    const bool needs_log_mu_;
    std::ifstream file_;
    index_t line_ = 0;
};

} // namespace

exit_code score_responses(const score_settings& s) {
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    const bool served = is_served(s.settings);
    need(!(served && !s.teacher.empty()), "--teacher and --teacher-url exclude each other");
    need(served || !s.teacher.empty() || !s.reference.empty(),
         "who scores? --teacher or --reference names a checkpoint, --teacher-url a server");
    std::optional<loaded_run> reference, scorer;
    if (!s.reference.empty()) reference = load_run(s.reference);
    if (!s.teacher.empty()) scorer = load_run(s.teacher);
    const loaded_run* const any = reference ? &*reference : scorer ? &*scorer : nullptr;
    need(any != nullptr || s.vocabulary > 0,
         "--vocabulary or --ids-of: needed where no checkpoint says how many ids there are");
    need(any == nullptr || s.vocabulary == 0, "--vocabulary and --ids-of: a checkpoint says it where there is one");

    config c = any ? any->settings : config{};
    c.run = s.settings.run, c.served = s.settings.served;
    c.distill = config{}.distill, c.schedule = config{}.schedule, c.speculation = config{}.speculation;
    c.distill.temperature = s.settings.distill.temperature;
    c.distill.estimator = s.k > 0 ? "topk" : "lightning"; // what the estimator reads is what is asked for
    c.distill.k = std::max(1, s.k);
    if (!any) c.teacher_model.vocabulary = c.student_model.vocabulary = s.vocabulary;
    validate(c);
    const index_t v = c.student_model.vocabulary;
    need(s.k <= v, fmt::format("--k must be at most the {} ids that there are, not {}", v, s.k));
    if (reference && scorer)
        need(scorer->settings.student_model.vocabulary == v,
             fmt::format("--teacher: {} knows {} ids, --reference {}", s.teacher,
                         scorer->settings.student_model.vocabulary, v));
    const auto own_task = task_of(c);
    opd::cpu_backend backend;
    backend.threads = threads_of(c);

    opd::data::fingerprints prints;
    std::optional<transformer<float>> student, teacher;
    if (reference) {
        student = model_with(reference->settings.student_model, reference->state.student_weights, s.reference);
        prints.reference_policy = print_of_policy(student->weights, c.distill.temperature);
        if (!reference->state.teacher_weights.empty()) {
            prints.sft_teacher = print_of_teacher(reference->state.teacher_weights);
            teacher = model_with(reference->settings.teacher_model, reference->state.teacher_weights, s.reference);
        }
    }
    if (scorer) teacher = model_with(scorer->settings.teacher_model, scorer->state.teacher_weights, s.teacher);
    prints.tokenizer = any ? print_of_tokenizer(*own_task, static_cast<int>(v)) : s.tokenizer;
    need(served || teacher.has_value(), fmt::format("--reference: {} holds no teacher's weights: --teacher names a "
                                                    "checkpoint that does",
                                                    s.reference));
    const set_scorer by =
        scorer_for(c, *own_task, student ? &*student : nullptr, teacher ? &*teacher : nullptr, backend);
    prints.scoring_teacher = by.print;
    std::optional<teacher_scorer> policy; // pi_ref, as the teacher of its own tokens
    cache_plan own{.what = teacher_cache::kind::samples, .entries = 1, .temperature = c.distill.temperature};
    if (student) policy.emplace(*student, backend);

    const std::map<std::string, std::string> notes = {{"task", any ? c.task.kind : "unknown"},
                                                      {"temperature", fmt::format("{}", c.distill.temperature)},
                                                      {"k", std::to_string(s.k)}};
    const index_t longest = any ? index_t{c.student_model.max_length} : 0;
    response_lines lines(s.responses, v, longest, !reference);
    const auto begin = now();
    try {
        opd::data::writer_settings how{.vocab = v, .id_bits = s.id_bits, .fingerprints = prints, .notes = notes};
        how.shard_bytes = s.shard_bytes;
        how.log_probs = s.log_probs == "f16"    ? opd::data::dtype::f16
                        : s.log_probs == "bf16" ? opd::data::dtype::bf16
                                                : opd::data::dtype::f32;
        opd::data::rollout_writer out(s.out, how);
        for (const std::string& piece : out.recovered()) spdlog::info("removed: {}", piece);
        if (out.sequences() > 0) {
            const opd::data::rollout_set set(s.out, {.unfinished = true});
            refuse_other_notes("--out", s.out, set, notes);
            spdlog::info("{} has {} sequences", s.out, out.sequences());
        }
        for (index_t i = out.sequences(); i > 0; --i)
            if (!lines.next())
                throw failure(exit_usage,
                              fmt::format("--out: {} has more sequences than {} has lines", s.out, s.responses));
        constexpr std::size_t some = 256;
        std::int64_t tokens = 0;
        for (bool more = true; more && !interrupted;) {
            std::vector<trajectory> drawn;
            std::vector<index_t> numbers; // of their lines
            while (drawn.size() < some && more) {
                auto t = lines.next();
                more = t.has_value();
                if (more) drawn.push_back(std::move(*t)), numbers.push_back(lines.line());
            }
            if (drawn.empty()) break;
            std::vector<const trajectory*> each;
            for (const trajectory& t : drawn) each.push_back(&t);
            if (policy) {
                const std::vector<scored_sequence> mine = policy->score(each, 1, own);
                for (std::size_t i = 0; i < drawn.size(); ++i) {
                    const std::vector<float>& p = mine[i].cache.next_log_q; // of prompt and response
                    const std::span<const float> of_response = std::span(p).last(drawn[i].response().size());
                    double off = 0;
                    for (std::size_t j = 0; j < drawn[i].log_mu.size(); ++j)
                        off = std::max(off, std::abs(double{drawn[i].log_mu[j]} - double{of_response[j]}));
                    if (off > 0.01)
                        throw failure(exit_input, fmt::format("--responses: {}, line {}: its log_mu is up to {:.3g} "
                                                              "nats from that of --reference",
                                                              s.responses, numbers[i], off));
                    drawn[i].log_mu.assign(of_response.begin(), of_response.end());
                }
            }
            const std::vector<scored_sequence> scored = by.score(each);
            for (std::size_t i = 0; i < drawn.size(); ++i)
                tokens += add_scored(out, drawn[i], scored[i].cache, s.k > 0);
        }
        if (interrupted) {
            spdlog::warn("stopped: {} keeps {} sequences; the same command goes on", s.out, out.kept_sequences());
            return exit_interrupted;
        }
        if (out.sequences() == 0) throw failure(exit_input, fmt::format("--responses: {} has no line", s.responses));
        out.finish();
        spdlog::info("{}: {} sequences, {} tokens of responses in this call, {:.1f} s", s.out, out.sequences(), tokens,
                     now() - begin);
    } catch (const opd::invalid_input& e) {
        throw failure(exit_input, e.what());
    } catch (const opd::error& e) {
        throw failure(exit_io, e.what());
    }
    return exit_ok;
}

} // namespace trainer
