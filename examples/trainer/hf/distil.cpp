// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/distil.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "files.hpp"
#include "hf/prompts.hpp"
#include "hf/strict_json.hpp"
#include "learner.hpp"
#include "opd/data/json.hpp"
#include "opd/data/order.hpp"
#include "rollout.hpp"
#include "run.hpp"
#include "schedule.hpp"
#include "teacher.hpp"

namespace trainer::hf {

namespace {

using nlohmann::json;
namespace data = opd::data::detail;

double gigabytes(std::int64_t n) { return static_cast<double>(n) / 1e9; }

std::vector<token> ids_of(const json& j, const std::string& name, const std::string& file) {
    std::vector<token> r;
    for (const json& id : j.is_array() ? j : json::array({j}))
        r.push_back(static_cast<token>(data::as_count(id, name, file, (1 << 24) - 1)));
    return r;
}

// The trainer's settings, for models of these shapes.
config with_shapes(config c, const model_shape& student, const model_shape& teacher) {
    c.student_model = student, c.teacher_model = teacher;
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    need(c.distill.steps >= 1, "--steps must be at least 1");
    need(c.distill.prompts >= 1 && c.distill.answers >= 1, "--batch and --answers must be at least 1");
    need(c.distill.rate > 0, "--rate must be positive");
    need(c.distill.temperature > 0, "--temperature must be positive");
    need(std::find(estimators.begin(), estimators.end(), c.distill.estimator) != estimators.end(),
         fmt::format("--estimator: '{}' is not one of {}", c.distill.estimator, fmt::join(estimators, ", ")));
    if (dense_estimator(c) && !filters_rollout(c)) c.distill.teacher_cache = "hidden";
    return c;
}

// Prompts of training, epoch after epoch, each in an order of its own.
class prompt_order {
public:
    prompt_order(std::span<const std::vector<token>> prompts, std::uint64_t seed) : prompts_(prompts), seed_(seed) {}
    const std::vector<token>& at(std::int64_t n) const {
        const std::int64_t count = std::ssize(prompts_);
        const opd::data::permutation order(count, seed_, static_cast<std::uint64_t>(n / count));
        return prompts_[static_cast<std::size_t>(order(n % count))];
    }

private:
    std::span<const std::vector<token>> prompts_;
    std::uint64_t seed_;
};

// KL(student || teacher) over whole rows, of answers that the student draws with noise of their own.
double held_out_kl(const transformer<float>& student, const transformer<float>& teacher, opd::eigen_backend& backend,
                   std::span<const std::vector<token>> prompts, sampling how, std::size_t budget) {
    how.plan = {};
    how.seed = ~how.seed;
    std::vector<request> requests;
    for (const auto& prompt : prompts) requests.push_back({requests.size(), prompt});
    const row_batch rows = pack(roll_out(student, backend.team(), requests, how), 0);
    std::vector<float> of_student, of_teacher;
    teacher_scorer(student, backend).states(rows.inputs, of_student);
    teacher_scorer(teacher, backend).states(rows.inputs, of_teacher);
    return mean_reverse_kl(backend, rows, student, of_student, teacher, of_teacher, budget);
}

// One answer, as it is shown. A character that its last token did not complete is left out.
std::string sample_of(const transformer<float>& student, opd::eigen_backend& backend, const std::vector<token>& prompt,
                      sampling how, const text_files& text) {
    how.plan = {};
    how.seed = ~how.seed; // as in held_out_kl()
    const request r{0, prompt};
    const trajectory t = roll_out(student, backend.team(), {&r, 1}, how).front();
    const std::vector<token> answer(t.response().begin(), t.response().end());
    if (!text.tokenizer) return json(answer).dump();
    std::string shown;
    text_stream stream(*text.tokenizer);
    for (const token id : answer) shown += stream.add(id);
    return shown;
}
// On one line, quoted where it is text.
std::string on_a_line(const std::string& sample, const text_files& text) {
    return text.tokenizer ? json(sample).dump(-1, ' ', false, json::error_handler_t::replace) : sample;
}

} // namespace

text_files text_files_of(const model_source& source) {
    text_files r;
    const auto kept = [&](const char* name) -> const std::string* {
        const auto at = source.kept.find(name);
        return at == source.kept.end() ? nullptr : &at->second;
    };
    const std::string tokenizer = source.path + "/tokenizer.json", config = source.path + "/tokenizer_config.json";
    try {
        if (const std::string* const json = kept("tokenizer.json"))
            r.tokenizer.emplace(*json, tokenizer);
        else
            r.no_tokenizer = fmt::format("there is no {}; give ids", tokenizer);
    } catch (const failure& e) {
        r.no_tokenizer = e.what();
    }
    try {
        const std::string *const json = kept("tokenizer_config.json"), *const jinja = kept("chat_template.jinja");
        r.chat = chat_template_of(json ? *json : "{}", config,
                                  jinja ? std::optional<std::string_view>(*jinja) : std::nullopt);
    } catch (const failure& e) {
        r.no_chat = e.what();
    }
    return r;
}

void check_same_tokenizer(const model_source& student, const model_source& teacher) {
    const auto mine = student.kept.find("tokenizer.json"), theirs = teacher.kept.find("tokenizer.json");
    if (mine == student.kept.end() || theirs == teacher.kept.end() || mine->second == theirs->second) return;
    const std::string my_file = student.path + "/tokenizer.json", their_file = teacher.path + "/tokenizer.json";
    const auto ids = [](const std::string& text, const std::string& file) {
        const json j = strict_json(text, file);
        const json_value all(j, file), vocab = all.at("model").at("vocab");
        std::map<std::string, json> r; // of a token; a list, as of a unigram model, is one entry
        if (vocab.raw().is_object())
            r = vocab.raw().get<std::map<std::string, json>>();
        else
            r[""] = vocab.raw();
        if (all.has("added_tokens"))
            for (std::size_t i = 0; i < all.at("added_tokens").list().size(); ++i) {
                const json_value t = all.at("added_tokens").at(i);
                r[t.at("content").text()] = t.at("id").raw();
            }
        return r;
    };
    const auto a = ids(mine->second, my_file), b = ids(theirs->second, their_file);
    const auto other = [](const auto& in, const auto& of) {
        return std::count_if(in.begin(), in.end(), [&](const auto& t) {
            const auto at = of.find(t.first);
            return at == of.end() || at->second != t.second;
        });
    };
    if (a != b)
        throw failure(exit_input, fmt::format("--teacher: {} and {} have different vocabularies: {} tokens of the one "
                                              "have no or another id in the other, {} of the other in the one; "
                                              "--accept-tokenizer goes on where that is meant",
                                              their_file, my_file, other(b, a), other(a, b)));
}

std::vector<token> end_tokens(const model_source& source) {
    try {
        const auto of = [](const json& j, const std::string& file) {
            const auto at = j.is_object() ? j.find("eos_token_id") : j.end();
            return at == j.end() || at->is_null() ? std::vector<token>() : ids_of(*at, "eos_token_id", file);
        };
        const auto kept = source.kept.find("generation_config.json");
        std::vector<token> r;
        if (const std::string file = source.path + "/generation_config.json"; kept != source.kept.end())
            r = of(data::parse_json(kept->second, file), file);
        return r.empty() ? of(source.config.all, source.path + "/config.json") : r;
    } catch (const opd::invalid_input& e) {
        throw failure(exit_input, e.what());
    }
}

std::int64_t activation_bytes(const model_shape& s, std::int64_t rows) {
    const index_t d = s.width, f = s.ffn, q = s.q_width(), kv = s.kv_width();
    // layer_rows; keys and values; layer_gradients
    const index_t forward = 4 * d + s.qkv_width() + (s.heads + s.kv_heads) + (q + kv) + 2 * s.heads + q + 3 * f + 2;
    const index_t backward = 2 * d + 2 * f + s.qkv_width();
    return static_cast<std::int64_t>(sizeof(float)) * rows * (s.layers * (forward + 2 * kv + backward) + 4 * d);
}

distil_report distil(const distil_settings& s) {
    std::error_code none;
    if (std::filesystem::exists(s.out, none) && !std::filesystem::is_empty(s.out, none)) // said now, not after hours
        throw failure(exit_io, fmt::format("--out: {} is there already, and is no empty directory", s.out));
    const model_directory of_student(s.student), of_teacher(s.teacher);
    model_shape student_shape = of_student.shape(), teacher_shape = of_teacher.shape();
    if (student_shape.vocabulary != teacher_shape.vocabulary)
        throw failure(exit_input, fmt::format("--teacher: {} has {} ids, and {} has {}", s.teacher,
                                              teacher_shape.vocabulary, s.student, student_shape.vocabulary));
    const int positions = std::min(student_shape.max_length, teacher_shape.max_length);
    if (s.max_response < 1 || s.max_response >= positions)
        throw failure(exit_usage,
                      fmt::format("--max-response must lie in [1, {}], not be {}", positions - 1, s.max_response));
    if (!s.accept_tokenizer) check_same_tokenizer(of_student.source(), of_teacher.source());
    const text_files text = text_files_of(of_student.source());
    std::vector<std::vector<token>> prompts;
    for (prompt& p : prompts_of(read_file(s.prompts), s.prompts,
                                {.vocabulary = student_shape.vocabulary,
                                .most_tokens = static_cast<std::size_t>(positions - s.max_response),
                                .tokenizer = text.tokenizer ? &*text.tokenizer : nullptr,
                                .chat = text.chat ? &*text.chat : nullptr,
                                .no_tokenizer = text.no_tokenizer,
                                .no_chat = text.no_chat}))
        prompts.push_back(std::move(p.ids));
    const auto held_out = static_cast<std::size_t>(std::max(s.held_out, 0));
    if (s.held_out < 1 || held_out >= prompts.size())
        throw failure(exit_usage, fmt::format("--held-out must lie in [1, {}], as {} has {} prompts, not be {}",
                                              prompts.size() - 1, s.prompts, prompts.size(), s.held_out));
    const auto longest =
        static_cast<std::int64_t>(std::max_element(prompts.begin(), prompts.end(), [](const auto& a, const auto& b) {
                                      return a.size() < b.size();
                                  })->size());
    const int length = static_cast<int>(longest) + s.max_response;
    const config c = with_shapes(s.settings, student_shape, teacher_shape);
    const std::int64_t batch = std::int64_t{c.distill.prompts} * c.distill.answers;
    std::vector<token> ends = s.ends.empty() ? end_tokens(of_student.source()) : s.ends;
    for (const token id : ends)
        if (id < 0 || id >= student_shape.vocabulary)
            throw failure(exit_usage, fmt::format("--end: id {} of a model of {}", id, student_shape.vocabulary));
    if (ends.empty())
        throw failure(exit_usage, fmt::format("--end: neither generation_config.json nor config.json of {} has an "
                                              "eos_token_id; name the ids that end an answer",
                                              s.student));

    // the models as they run: with no more positions than there will be
    const model_directory student_files(s.student, length), teacher_files(s.teacher, length);
    const model_bytes mine = bytes_of(student_files.shape()), theirs = bytes_of(teacher_files.shape());
    const std::int64_t activations = activation_bytes(student_files.shape(), batch * length);
    spdlog::info("student {}", of_student.source().describe());
    spdlog::info("teacher {}", of_teacher.source().describe());
    spdlog::info("memory: {:.3g} GB at most: student {:.3g}, gradient and AdamW {:.3g}, teacher {:.3g}, activations of "
                 "{} answers of {} tokens {:.3g}",
                 gigabytes(mine.model + mine.training + theirs.model + activations), gigabytes(mine.model),
                 gigabytes(mine.training), gigabytes(theirs.model), batch, length, gigabytes(activations));
    transformer<float> student = student_files.model<float>();
    const transformer<float> teacher = teacher_files.model<float>();

    opd::eigen_backend backend{.threads = threads_of(c)};
    adamw_state state;
    learner learn(c, student, state, backend, head_of(teacher));
    teacher_scorer scorer(teacher, backend);
    sampling how;
    how.temperature = c.distill.temperature;
    how.top_k = c.distill.rollout_top_k, how.top_p = c.distill.rollout_top_p, how.min_p = c.distill.rollout_min_p;
    how.keep_sets = filters_rollout(c);
    how.seed = c.run.seed;
    how.end = ends.front();
    how.more_ends.assign(ends.begin() + 1, ends.end());
    how.max_response = s.max_response;
    how.slots = c.distill.slots, how.prefill_chunk = c.distill.prefill_chunk, how.kv_tokens = c.distill.kv_tokens;
    how.plan = draws_for(c);

    const std::span<const std::vector<token>> all(prompts), kept_back = all.last(held_out);
    const prompt_order order(all.first(all.size() - held_out), c.run.seed);
    const auto budget = static_cast<std::size_t>(c.distill.hidden_budget);
    line_file log;
    if (!s.log.empty()) log.open(s.log, nullptr);
    distil_report report;
    report.kl_before = held_out_kl(student, teacher, backend, kept_back, how, budget);
    spdlog::info("before: KL(student, teacher) {:.4f} nats a token of answers to {} held-out prompts", report.kl_before,
                 held_out);
    const auto say_sample = [&] {
        const std::string r = sample_of(student, backend, kept_back.front(), how, text);
        spdlog::info("answer: {}", on_a_line(r, text));
        return r;
    };
    if (!text.tokenizer) spdlog::info("answers are shown as ids: {}", text.no_tokenizer);
    spdlog::info("prompt: {}", text.tokenizer ? on_a_line(text.tokenizer->decode(kept_back.front()), text)
                                              : json(kept_back.front()).dump());
    report.sample_before = say_sample();
    const auto begin = std::chrono::steady_clock::now();
    teacher_cache cache;
    for (std::int64_t step = 0; step < c.distill.steps; ++step) {
        if (interrupted) throw failure(exit_interrupted, fmt::format("stopped in step {}: nothing is written", step));
        std::vector<request> requests;
        for (std::int64_t i = 0; i < batch; ++i) {
            const std::int64_t sample = step * batch + i;
            requests.push_back({static_cast<std::uint64_t>(sample), order.at(sample / c.distill.answers)});
        }
        const row_batch rows =
            pack(roll_out(student, backend.team(), requests, how, static_cast<std::int32_t>(step)), how.plan.count);
        scorer.score(rows, cache_for(c), cache);
        const learner_result r = learn.step(rows, cache, rate_of(c, {}, step), static_cast<std::int32_t>(step));
        if (!std::isfinite(r.loss) || !std::isfinite(r.gradient_norm))
            throw failure(exit_numeric, fmt::format("step {}: loss {} and gradient {}", step, r.loss, r.gradient_norm));
        report.tokens += rows.kept;
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (!s.log.empty())
            log.write(json{{"step", step},
                           {"loss", r.loss},
                           {"kl", r.kl},
                           {"gradient", r.gradient_norm},
                           {"rate", r.rate},
                           {"tokens", rows.kept},
                           {"mismatched", r.mismatched},
                           {"seconds", took.count()}}
                          .dump());
        const bool at_interval = s.say_every > 0 && step % s.say_every == 0;
        if (step == 0 || step + 1 == c.distill.steps || at_interval)
            spdlog::info("step {}: loss {:.4f}, {} tokens in all, {:.0f} a second", step, r.loss, report.tokens,
                         static_cast<double>(report.tokens) / std::max(took.count(), 1e-9));
        if (at_interval && step > 0 && step + 1 < c.distill.steps) say_sample();
    }
    report.kl_after = held_out_kl(student, teacher, backend, kept_back, how, budget);
    spdlog::info("after: KL(student, teacher) {:.4f} nats a token", report.kl_after);
    report.sample_after = say_sample();
    write_model_directory(s.out, student.shape, student.weights, &of_student.source(), s.how);
    spdlog::info("written: {} as {}", s.out, s.how.type);
    return report;
}

} // namespace trainer::hf
