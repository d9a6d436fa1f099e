// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/distil.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "hf/lora.hpp"
#include "hf/prompts.hpp"
#include "hf/strict_json.hpp"
#include "model/teacher.hpp"
#include "opd/data/json.hpp"
#include "opd/data/order.hpp"
#include "opd/sched/thread_driver.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/served.hpp"
#include "pipeline/set_source.hpp"
#include "run/offline.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/in_flight.hpp"
#include "schedule/stages.hpp"
#include "settings/estimator.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"

namespace trainer::hf {

namespace {

using nlohmann::json;
namespace data = opd::data::detail;

// What settings are called that opd-distil has options of its own for.
const option_names& own_names() {
    static const option_names names = {
        {"--teacher-url", "--teacher"}, {"--offline", "--data-set"}, {"--accept-mismatch", "--accept-mismatch"}};
    return names;
}

double gigabytes(std::int64_t n) { return static_cast<double>(n) / 1e9; }

std::vector<token> ids_of(const json& j, const std::string& name, const std::string& file) {
    std::vector<token> r;
    for (const json& id : j.is_array() ? j : json::array({j}))
        r.push_back(static_cast<token>(data::as_count(id, name, file, (1 << 24) - 1)));
    return r;
}

// The id of each token that a tokenizer.json has; a list, as of a unigram model, is one entry.
std::map<std::string, json> ids_of_tokens(const std::string& text, const std::string& file) {
    const json j = strict_json(text, file);
    const json_value all(j, file), vocab = all.at("model").at("vocab");
    std::map<std::string, json> r;
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
}

// Prompts of training, epoch after epoch, each in an order of its own; those that are measured on alone stand behind.
// A problem is a prompt's number in the file. Answers have no judge. Of a data set all prompts are of the latter kind.
class prompt_task : public any_task {
public:
    /// `least`: of max_length().
    prompt_task(std::vector<std::vector<token>> prompts, std::size_t held_out, int vocabulary, token end, int most,
                int least)
        : prompts_(std::move(prompts)), held_out_(held_out), vocabulary_(vocabulary), longest_(least - most), end_(end),
          most_(most) {
        for (const auto& p : prompts_) longest_ = std::max(longest_, static_cast<int>(p.size()));
    }
    int vocabulary() const override { return vocabulary_; }
    token end_token() const override { return end_; }
    int prompt_length() const override { return longest_; }
    int max_response() const override { return most_; }
    problem training_problem(std::uint64_t seed, std::uint64_t n) const override {
        const std::uint64_t count = prompts_.size() - held_out_;
        const opd::data::permutation order(static_cast<std::int64_t>(count), seed, n / count);
        return {static_cast<std::uint64_t>(order(static_cast<std::int64_t>(n % count))), 0};
    }
    std::size_t held_out_problems() const override { return held_out_; }
    problem held_out_problem(std::size_t i) const override { return {prompts_.size() - held_out_ + i, 0}; }
    std::vector<token> prompt_tokens(problem p) const override { return prompts_[p.prompt]; }
    std::vector<token> solution_tokens(problem) const override { return {}; }
    std::string written(std::span<const token> tokens) const override {
        return json(std::vector<token>(tokens.begin(), tokens.end())).dump();
    }
    verdict judged(problem, std::span<const token>) const override { return {}; }
    bool judged_by_kl() const override { return true; }

    std::span<const std::vector<token>> held_out() const { return std::span(prompts_).last(held_out_); }
    /// Tells files of prompts apart.
    std::string print() const { return hash128(json(prompts_).dump()); }

private:
    std::vector<std::vector<token>> prompts_;
    std::size_t held_out_;
    int vocabulary_, longest_;
    token end_;
    int most_;
};

// KL(student || teacher) over whole rows, of answers that the student draws with noise of their own.
double held_out_kl(const transformer<float>& student, const transformer<float>& teacher, opd::cpu_backend& backend,
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

// log p - log q of a token. What has no mass counts as vLLM writes it.
double gap_of(float log_p, float log_q) { return double{log_p} - std::max(double{log_q}, -9999.0); }

// The same from the tokens alone, which are drawn from whole rows: the mean of log p - log q.
double held_out_gap(const transformer<float>& student, opd::cpu_backend& backend, served_teacher& teacher,
                    std::span<const std::vector<token>> prompts, sampling how, const draw_plan& own_tokens) {
    how.plan = own_tokens;
    how.seed = ~how.seed;
    how.top_k = 0, how.top_p = 1, how.min_p = 0, how.keep_sets = false;
    std::vector<request> requests;
    for (const auto& prompt : prompts) requests.push_back({requests.size(), prompt});
    const std::vector<trajectory> drawn = roll_out(student, backend.team(), requests, how);
    std::vector<const trajectory*> answers;
    for (const trajectory& t : drawn) answers.push_back(&t);
    const auto scored = teacher.score(answers);
    double sum = 0;
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < drawn.size(); ++i) {
        const std::vector<float>& log_p = drawn[i].log_mu;
        const auto log_q = std::span(scored[i]->cache.next_log_q).last(log_p.size());
        for (std::size_t t = 0; t < log_p.size(); ++t) sum += gap_of(log_p[t], log_q[t]);
        tokens += log_p.size();
    }
    return sum / static_cast<double>(tokens);
}

// One answer, as it is shown. A character that its last token did not complete is left out.
std::string sample_of(const transformer<float>& student, opd::cpu_backend& backend, const std::vector<token>& prompt,
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
    const auto a = ids_of_tokens(mine->second, my_file), b = ids_of_tokens(theirs->second, their_file);
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

std::string print_of_tokenizer(const model_source& source) {
    const auto at = source.kept.find("tokenizer.json");
    if (at == source.kept.end()) return {};
    const json ids = ids_of_tokens(at->second, source.path + "/tokenizer.json");
    return hash128(ids.dump(-1, ' ', false, json::error_handler_t::replace));
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

std::int64_t activation_bytes(const model_shape& s, std::int64_t sequences, std::int64_t length, int threads,
                              bool checkpointed) {
    const index_t d = s.width, f = s.ffn, q = s.q_width(), kv = s.kv_width(), rows = sequences * length;
    const bool large = model_layout(s).size * index_t{sizeof(float)} > transformer<float>::large_bytes;
    const index_t columns = (length + 15) / 16 * 16, workers = std::min<index_t>(threads, sequences);
    // layer_rows without x; keys and values; the gradient of qkv
    const index_t layer = rows * (3 * d + s.qkv_width() + (s.heads + s.kv_heads) + (q + kv) + 2 * s.heads + q + 3 * f +
                                  2 + s.qkv_width()) +
                          sequences * columns * 2 * kv;
    const index_t layers = s.layers * rows * d + (checkpointed ? 1 : s.layers) * layer;
    // what enters and leaves the last norm, d_x0; states and their gradient
    const index_t ends = rows * (5 * d + 1);
    // sums over a sequence
    const index_t norms = 2 * d + (s.qk_norm ? 2 * s.head_dim : 0), biases = s.attention_bias ? s.qkv_width() : 0;
    const index_t sums = sequences * (s.layers * (norms + biases + (s.output_bias ? d : 0)) + d);
    // on the way back; a large model's sequences go together, and threads share out what they do
    const index_t back = (large ? rows : workers * length) * (d + f + 2 * q + kv);
    const index_t attention = (large ? std::min<index_t>(threads, sequences * s.kv_heads) : workers) *
                              (2 * length + s.head_dim) * (columns + 16);
    const index_t scores = (large ? threads : sequences) * std::max<index_t>(query_tile, s.heads) * columns;
    return std::int64_t{sizeof(float)} * (layers + ends + sums + back + attention + scores);
}

const option_names& distil_options() {
    static const option_names names = [] {
        option_names r = {{"--prompts", "--batch"},
                          {"--rollout-top-k", "--top-k"},
                          {"--rollout-top-p", "--top-p"},
                          {"--rollout-min-p", "--min-p"},
                          {"--weight-decay", "--decay"}};
        std::istringstream same(
            "--seed --threads --checkpoint-every --estimator --answers --mini-batches --micro-batch "
            "--gradient-checkpointing --warmup --rate --temperature --hidden-budget --jsd-w --jsd-o --skew --alpha --k "
            "--topk-from --m --budget --shape --shape-a --shape-b --surrogate --clip-low --clip-high "
            "--dual-clip --ratio-cap --baseline --selector --selector-a --selector-b "
            "--advantage-clip --self-normalise --accept-bias --m2po --correction --loss-clamp "
            "--slots --prefill-chunk --kv-tokens --schedule --schedule-k --tau --staleness-policy "
            "--outstanding --concurrency --weight-update --park-after --rollout-workers --teachers "
            "--score-batch --score-flush --learner-threads --speculate --draft-depth --draft-verify "
            "--draft-running --draft-history --beta1 --beta2 --epsilon --clip --teacher-dialect --teacher-model "
            "--teacher-requests --teacher-silence --teacher-patience --accept-teacher");
        for (std::string flag; same >> flag;) r[flag] = flag;
        return r;
    }();
    return names;
}

const option_names& distil_names() {
    static const option_names names = [] {
        option_names r = distil_options();
        r.insert(own_names().begin(), own_names().end());
        return r;
    }();
    return names;
}

config settled(config c) {
    c.distill.teacher_cache = dense_estimator(c) && !filters_rollout(c) ? "hidden" : "dense";
    try {
        validate(c);
        if (is_served(c)) validate_served(c);
    } catch (const failure& e) {
        throw failure(e.code, renamed(e.what(), distil_names()));
    }
    const auto need = [](bool ok, const std::string& what) {
        if (!ok) throw failure(exit_usage, what);
    };
    need(c.distill.steps >= 1, "--steps must be at least 1");
    need(c.speculation.kind != "learned", "--speculate learned: opd-distil has no drafter; off, ngram or auto");
    need(!in_virtual_time(c), "--driver virtual: opd-distil runs on threads");
    need(!is_offline(c) || (c.schedule.kind == "sync" && !filters_rollout(c)),
         "--data-set: nothing is rolled out, so --schedule, --top-k, --top-p and --min-p are not used");
    need(c.distill.inject_mismatch.empty() && c.schedule.inject.empty(), "--inject: opd-distil has no faults");
    return c;
}

namespace {

namespace sched = opd::sched;

// Where a directory or file that will be written can be.
void need_parent(const char* flag, const std::string& path) {
    std::error_code none;
    const auto parent = std::filesystem::path(path).parent_path();
    if (!parent.empty() && !std::filesystem::is_directory(parent, none))
        throw failure(exit_io, fmt::format("{}: there is no directory {}", flag, parent.string()));
}

class distillation {
public:
    explicit distillation(const distil_settings& s);
    distil_report go();

private:
    void say_memory() const;
    storage student_storage() const;
    storage teacher_storage() const;
    std::string settings_text() const;
    void take_checkpoint();
    void save(std::string in_flight);
    void ask_teacher();
    double kl();
    double kl_of_set();
    const char* how_measured() const;
    std::string where_it_stops() const;
    void check_numbers(const learner_result& r) const;
    void stepped(const learner_result& r, std::span<const learner_stage::view> sequences);
    struct counts;
    void told(const learner_result& r, const counts& n);
    template <class Bytes>
    bool goes_on(Bytes&& in_flight);
    void in_turns();
    void on_threads();
    void from_set();
    std::string say_sample();
    // What is learnt: adapters, or all weights.
    std::vector<float>& learnt() { return lora_ ? lora_->values : student_->weights; }
    bool overlaps() const { return c_.schedule.kind != "sync"; }
    std::int64_t steps() const { return c_.distill.steps; }

    const distil_settings& s_;
    config c_;
    std::optional<model_directory> of_student_, of_teacher_; // then with no more positions than there will be; a served
                                                             // teacher has none, and no_model() in its place
    std::optional<text_files> text_;
    std::optional<set_source> set_; // in place of teacher and rollout
    std::optional<prompt_task> task_;
    std::vector<token> ends_;
    sampling how_;
    std::optional<transformer<float>> student_, teacher_;
    std::optional<lora> lora_;
    opd::cpu_backend backend_;
    set_scorer by_;                             // of a served teacher
    std::unique_ptr<served_teacher> of_tokens_; // the same, asked for drawn tokens alone
    std::optional<learner> learn_;
    run_state state_; // of it the step, the optimizer and what is in flight
    distil_report report_;
    line_file log_;
    double lags_ = 0; // over the tokens since the start of the process
    std::int64_t lagged_ = 0;
    std::chrono::steady_clock::time_point begin_;
    std::string settings_; // settings_text() of the start
    std::int64_t stop_after_;
    bool left_ = false; // interrupted
    // Of a served teacher, who may fail: what a checkpoint of the step whose weights are there would keep, if known.
    std::optional<std::string> flight_;
};

distillation::distillation(const distil_settings& s) : s_(s), stop_after_(s.stop_after) {
    if (s.stored != "float32" && s.stored != "bfloat16")
        throw failure(exit_usage, fmt::format("--storage must be float32 or bfloat16, not '{}'", s.stored));
    std::error_code none;
    if (std::filesystem::exists(s.out, none) && !std::filesystem::is_empty(s.out, none)) // said now, not after hours
        throw failure(exit_io, fmt::format("--out: {} is there already, and is no empty directory", s.out));
    if (s.resume && s.checkpoint.empty())
        throw failure(exit_usage, "--resume needs --checkpoint, the file to go on from");
    if (!s.checkpoint.empty()) {
        need_parent("--checkpoint", s.checkpoint);
        const bool there = std::filesystem::exists(s.checkpoint, none);
        if (s.resume && !there)
            throw failure(exit_input, fmt::format("--resume: there is no checkpoint {}", s.checkpoint));
        if (!s.resume && there)
            throw failure(exit_usage, fmt::format("--checkpoint: {} is there already; --resume goes on with it, or "
                                                  "remove it",
                                                  s.checkpoint));
    }
    config asked = s.settings;
    asked.served.url = is_url(s.teacher) ? s.teacher : std::string();
    c_ = settled(std::move(asked));
    const bool offline = is_offline(c_);
    for (const auto& [flag, given] : {std::pair{"--teacher", !s.teacher.empty()}, {"--prompts", !s.prompts.empty()}})
        if (given == offline)
            throw failure(exit_usage, fmt::format("{} {}", flag,
                                                  offline ? "is not used by --data-set"
                                                          : "is needed where there is no --data-set"));
    of_student_.emplace(s.student);
    const model_shape mine = of_student_->shape();
    int positions = mine.max_length;
    c_.student_model = mine;
    if (!without_teacher(c_)) {
        const model_shape theirs = of_teacher_.emplace(s.teacher).shape();
        if (mine.vocabulary != theirs.vocabulary)
            throw failure(exit_input, fmt::format("--teacher: {} has {} ids, and {} has {}", s.teacher,
                                                  theirs.vocabulary, s.student, mine.vocabulary));
        positions = std::min(positions, theirs.max_length);
        if (!s.accept_tokenizer) check_same_tokenizer(of_student_->source(), of_teacher_->source());
    }
    if (s.max_response < 1 || (s.max_response >= positions && !offline))
        throw failure(exit_usage,
                      fmt::format("--max-response must lie in [1, {}], not be {}", positions - 1, s.max_response));
    text_.emplace(text_files_of(of_student_->source()));
    std::vector<std::vector<token>> prompts;
    int most = s.max_response, least = 0;
    if (offline) {
        set_.emplace(c_, positions);
        const opd::index_t all = set_->sequences();
        if (s.held_out < 1 || s.held_out >= all)
            throw failure(exit_usage, fmt::format("--held-out must lie in [1, {}], as {} has {} sequences, not be {}",
                                                  all - 1, set_->folder(), all, s.held_out));
        set_->hold_out(s.held_out);
        if (const opd::index_t longest = set_->longest(); longest > positions)
            throw failure(exit_input, fmt::format("--data-set: {} has a sequence of {} tokens, {} takes {}",
                                                  set_->folder(), longest, s.student, positions));
        else
            least = static_cast<int>(longest);
        prompts = set_->prompts(set_->held_out());
        for (const auto& p : prompts) most = std::min(most, positions - static_cast<int>(p.size()));
    } else {
        for (prompt& p : prompts_of(read_file(s.prompts), s.prompts,
                                    {.vocabulary = mine.vocabulary,
                                    .most_tokens = static_cast<std::size_t>(positions - s.max_response),
                                    .tokenizer = text_->tokenizer ? &*text_->tokenizer : nullptr,
                                    .chat = text_->chat ? &*text_->chat : nullptr,
                                    .no_tokenizer = text_->no_tokenizer,
                                    .no_chat = text_->no_chat}))
            prompts.push_back(std::move(p.ids));
        if (s.held_out < 1 || s.held_out >= std::ssize(prompts))
            throw failure(exit_usage, fmt::format("--held-out must lie in [1, {}], as {} has {} prompts, not be {}",
                                                  prompts.size() - 1, s.prompts, prompts.size(), s.held_out));
    }
    for (const auto& [flag, value] : {std::pair{"--k", c_.distill.k}, std::pair{"--budget", c_.distill.budget}})
        if (value > mine.vocabulary)
            throw failure(exit_usage, fmt::format("{} must be at most the vocabulary of {} ids, not {}", flag,
                                                  mine.vocabulary, value));
    ends_ = s.ends.empty() ? end_tokens(of_student_->source()) : s.ends;
    for (const token id : ends_)
        if (id < 0 || id >= mine.vocabulary)
            throw failure(exit_usage, fmt::format("--end: id {} of a model of {}", id, mine.vocabulary));
    if (ends_.empty())
        throw failure(exit_usage, fmt::format("--end: neither generation_config.json nor config.json of {} has an "
                                              "eos_token_id; name the ids that end an answer",
                                              s.student));
    task_.emplace(std::move(prompts), static_cast<std::size_t>(s.held_out), mine.vocabulary, ends_.front(), most,
                  least);
    how_ = sampling_of(c_, *task_);
    how_.more_ends.assign(ends_.begin() + 1, ends_.end());
    if (const index_t memory = rollout_engine::least_memory(how_, task_->max_length());
        c_.distill.kv_tokens > 0 && c_.distill.kv_tokens < memory)
        throw failure(exit_usage, fmt::format("--kv-tokens must be at least {}, what a sequence and its drafts take, "
                                              "not {}",
                                              memory, c_.distill.kv_tokens));
    of_student_.emplace(s.student, task_->max_length());
    if (of_teacher_) of_teacher_.emplace(s.teacher, task_->max_length());
    c_.student_model = of_student_->shape();
    c_.teacher_model = of_teacher_ ? of_teacher_->shape() : c_.student_model;
    say_memory();
    student_.emplace(of_student_->model<float>(student_storage()));
    teacher_.emplace(of_teacher_ ? of_teacher_->model<float>(teacher_storage()) : no_model());
    if (offline)
        for (const std::string& line : set_->check({.tokenizer = print_of_tokenizer(of_student_->source()),
                                       .reference_policy = print_of_policy(*student_, c_.distill.temperature)}))
            spdlog::warn("--data-set: {}", line);
    backend_.threads = learner_threads_of(c_); // where the stages take turns, of all of them
    state_.stage = stage::distill;
}

// LoRA's base and values take the place of masters once they are made.
storage distillation::student_storage() const { return s_.stored == "bfloat16" ? storage::bfloat16 : storage::numbers; }
storage distillation::teacher_storage() const {
    return of_teacher_->source().types == "BF16" ? storage::bfloat16_by_itself : storage::numbers;
}

void distillation::say_memory() const {
    const model_shape& shape = of_student_->shape();
    const bool halves = student_storage() == storage::bfloat16;
    const model_bytes mine = bytes_of(shape, student_storage()),
                      theirs = of_teacher_ ? bytes_of(of_teacher_->shape(), teacher_storage()) : model_bytes{};
    const std::int64_t batch = batch_of(c_), update = batch / c_.distill.mini_batches, length = task_->max_length();
    const std::int64_t at_once =
        c_.distill.micro_batch > 0 ? std::min<std::int64_t>(c_.distill.micro_batch, update) : update;
    const std::int64_t gradient = bytes_of(shape).training / 3; // AdamW has two moments beside it
    const std::int64_t learning =
        (s_.lora_rank > 0 ? gradient + lora::bytes(shape, s_.lora_rank, of_student_->source().types == "BF16")
                          : mine.training) +
        (at_once < update ? gradient : 0); // and the sum of the parts before
    const bool checkpointed = c_.distill.gradient_checkpointing;
    const std::int64_t activations = activation_bytes(shape, at_once, length, learner_threads_of(c_), checkpointed);
    const std::int64_t engines = overlaps() ? rollout_workers_of(c_) : threads_of(c_);
    const std::int64_t lanes =
        std::clamp<std::int64_t>(c_.distill.slots / engines, 1, overlaps() ? most_threads : batch);
    const std::int64_t columns = c_.distill.kv_tokens > 0
                                     ? engines * c_.distill.kv_tokens
                                     : engines * lanes * ((length + how_.speculate.most() + 15) / 16 * 16);
    const std::int64_t cache = columns * shape.layers * 2 * shape.kv_width() * static_cast<std::int64_t>(sizeof(float));
    // the one that is being made, the last two, of which workers may hold one
    const std::int64_t copies = overlaps() ? 3 * mine.model : 0;
    spdlog::info("student {}", of_student_->source().describe());
    spdlog::info("teacher {}", of_teacher_ ? of_teacher_->source().describe() : set_ ? set_->folder() : s_.teacher);
    spdlog::info("memory: {:.3g} GB at most: student {:.3g}{}, {} {:.3g}, teacher {:.3g}{}, {} of {} answers of {} "
                 "tokens {:.3g}, "
                 "keys and values {:.3g}{}",
                 gigabytes(mine.model + learning + theirs.model + activations + cache + copies), gigabytes(mine.model),
                 halves ? " in bfloat16" : "",
                 s_.lora_rank > 0 ? "gradient, base and adapters"
                 : halves         ? "gradient, AdamW and float masters"
                                  : "gradient and AdamW",
                 gigabytes(learning), gigabytes(theirs.model),
                 of_teacher_ && teacher_storage() != storage::numbers ? " in bfloat16" : "",
                 checkpointed ? "checkpointed activations" : "activations", at_once, length, gigabytes(activations),
                 gigabytes(cache),
                 copies > 0 ? fmt::format(", weights of rollout {:.3g}", gigabytes(copies)) : std::string());
}

// --- checkpoints ----------------------------------------------------------------------------------------------------

// All that the bits of a run depend on: what a checkpoint was made with.
std::string distillation::settings_text() const {
    nlohmann::ordered_json j = results_json(c_);
    j["models"] = {
        {"student", student_->weights.empty() ? print_of_teacher(*student_) : print_of_teacher(student_->weights)},
        {"teacher", set_            ? set_->print()
                    : is_served(c_) ? by_.weights
                                    : print_of_teacher(*teacher_)}};
    j["answers"] = {
        {"prompts", task_->print()}, {"held_out", s_.held_out}, {"max_response", s_.max_response}, {"ends", ends_}};
    if (s_.stored != "float32") j["stored"] = s_.stored;
    j["lora"] = {{"rank", lora_ ? lora_->rank() : 0}, {"alpha", lora_ ? lora_->alpha() : 0.0}};
    return j.dump();
}

void distillation::take_checkpoint() {
    std::string saved;
    state_ = load_checkpoint(s_.checkpoint, saved);
    if (saved != settings_)
        throw failure(exit_usage, fmt::format("--resume: {} was made with other settings: {}", s_.checkpoint,
                                              differences(saved, settings_)));
    const auto fits = [&](const std::vector<float>& v) { return v.empty() || v.size() == learnt().size(); };
    const nlohmann::json before = nlohmann::json::parse(state_.evaluations);
    if (state_.student_weights.size() != learnt().size() || !fits(state_.student_optimizer.m) ||
        !fits(state_.student_optimizer.v) || state_.step > steps() || !before.contains("kl"))
        throw failure(exit_input, fmt::format("{}: does not fit the run that it says it is of", s_.checkpoint));
    if (set_) set_->go_to(state_.in_flight);
    learnt() = std::exchange(state_.student_weights, {});
    report_.kl_before = before["kl"].get<double>();
    report_.sample_before = before.value("sample", std::string());
    report_.tokens = state_.tokens[static_cast<std::size_t>(clock_name::rollout)];
    spdlog::info("going on from {} after {} of {} steps", s_.checkpoint, state_.step, steps());
}

void distillation::save(std::string in_flight) {
    state_.in_flight = std::move(in_flight);
    state_.tokens[static_cast<std::size_t>(clock_name::rollout)] = report_.tokens;
    state_.evaluations = json{{"kl", report_.kl_before}, {"sample", report_.sample_before}}.dump(
        -1, ' ', false, json::error_handler_t::replace);
    struct lent { // not copied: nobody looks at the weights meanwhile
        std::vector<float>&a, &b;
        lent(std::vector<float>& x, std::vector<float>& y) : a(x), b(y) { a.swap(b); }
        ~lent() { a.swap(b); }
    } const weights(learnt(), state_.student_weights);
    save_checkpoint(s_.checkpoint, state_, settings_);
}

std::string distillation::where_it_stops() const {
    return s_.checkpoint.empty()
               ? fmt::format("stopped after {} steps: nothing is written", state_.step)
               : fmt::format("stopped after {} steps; --resume goes on from {}", state_.step, s_.checkpoint);
}

// --- the teacher ----------------------------------------------------------------------------------------------------

// A served one, before anything is learnt from it.
void distillation::ask_teacher() {
    by_ = scorer_for(c_, *task_, &*student_, nullptr, backend_, {.responses = 16, .more_ends = how_.more_ends});
    config own = c_;
    own.distill.estimator = "lightning"; // which asks for drawn tokens
    of_tokens_ = std::make_unique<served_teacher>(own);
}

// On answers to the held-out prompts, or what is held out of the set.
double distillation::kl() {
    if (set_) return kl_of_set();
    if (!is_served(c_))
        return held_out_kl(*student_, *teacher_, backend_, task_->held_out(), how_,
                           static_cast<std::size_t>(c_.distill.hidden_budget));
    config own = c_;
    own.distill.estimator = "lightning";
    return held_out_gap(*student_, backend_, *of_tokens_, task_->held_out(), how_, draws_for(own));
}

// The same from tokens that pi_ref drew: the mean of (p/pi_ref) (log p - log q).
double distillation::kl_of_set() {
    double sum = 0;
    opd::index_t tokens = 0;
    const std::vector<opd::index_t> numbers = set_->held_out();
    const auto at_once = static_cast<std::size_t>(c_.distill.micro_batch > 0 ? c_.distill.micro_batch : batch_of(c_));
    for (std::size_t first = 0; first < numbers.size(); first += at_once) {
        const offline_batch b =
            set_->read(std::span(numbers).subspan(first, std::min(at_once, numbers.size() - first)));
        const std::vector<float> log_p = learn_->token_log_probs(b.rows);
        for (std::size_t i = 0; i < log_p.size(); ++i)
            if (b.rows.mask[i] != 0)
                sum += std::exp(double{log_p[i]} - double{b.rows.log_mu[i]}) * gap_of(log_p[i], b.cache.next_log_q[i]);
        tokens += b.rows.kept;
    }
    return sum / static_cast<double>(std::max<opd::index_t>(1, tokens));
}

const char* distillation::how_measured() const {
    return set_            ? "tokens of held-out sequences, drawn by pi_ref and weighted by p/pi_ref"
           : is_served(c_) ? "tokens drawn for held-out prompts"
                           : "answers to held-out prompts";
}

// --- steps ----------------------------------------------------------------------------------------------------------

void distillation::check_numbers(const learner_result& r) const {
    if (std::isfinite(r.loss) && std::isfinite(r.gradient_norm)) return;
    throw failure(exit_numeric, fmt::format("step {}: loss {} and gradient {}{}", state_.step, r.loss, r.gradient_norm,
                                            s_.checkpoint.empty() ? "" : "; the last checkpoint is intact"));
}

// What a step learnt from.
struct distillation::counts {
    std::int64_t tokens = 0, most = 0; // most: lag of one
    double lags = 0;                   // their sum
    std::vector<std::uint64_t> samples = {};
};

void distillation::stepped(const learner_result& r, std::span<const learner_stage::view> sequences) {
    counts n;
    for (const auto& s : sequences) {
        for (const std::int32_t version : s.rolled->versions) {
            ++n.tokens, n.lags += static_cast<double>(state_.step - version);
            n.most = std::max(n.most, state_.step - version);
        }
        if (overlaps()) n.samples.push_back(s.rolled->sample); // in turns they are the next ones
    }
    told(r, n);
}

// A step is made: counted, logged, told.
void distillation::told(const learner_result& r, const counts& n) {
    const std::int64_t step = state_.step++;
    report_.tokens += n.tokens;
    lags_ += n.lags, lagged_ += n.tokens;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin_;
    const double lag = n.lags / static_cast<double>(std::max<std::int64_t>(1, n.tokens));
    if (!s_.log.empty()) {
        json line = {{"step", step},
                     {"loss", r.loss},
                     {"kl", r.kl},
                     {"gradient", r.gradient_norm},
                     {"rate", r.rate},
                     {"tokens", n.tokens},
                     {"mismatched", r.mismatched},
                     {"lag", lag},
                     {"lag_most", n.most},
                     {"effective_share", r.prefix.effective_share()},
                     {"seconds", took.count()}};
        if (!n.samples.empty()) line["samples"] = n.samples;
        if (set_) line["drift"] = json(described(r.drift));
        log_.write(line.dump());
    }
    const bool at_interval = s_.say_every > 0 && step % s_.say_every == 0;
    if (step == 0 || step + 1 == steps() || at_interval)
        spdlog::info("step {}: loss {:.4f}, {} tokens in all, {:.0f} a second{}", step, r.loss, report_.tokens,
                     static_cast<double>(lagged_) / std::max(took.count(), 1e-9),
                     overlaps() ? fmt::format(", lag {:.2f}, {} at most", lag, n.most) : std::string());
    if (at_interval && step > 0 && step + 1 < steps()) say_sample();
}

// After a step: writes a checkpoint where one is due. False: it is time to leave.
template <class Bytes>
bool distillation::goes_on(Bytes&& in_flight) {
    if (left_ || state_.step >= steps()) return !left_;
    left_ = interrupted || (stop_after_ > 0 && --stop_after_ == 0);
    const bool due = left_ || state_.step % c_.run.checkpoint_every == 0;
    if (s_.checkpoint.empty() || !(due || is_served(c_))) return !left_;
    flight_ = in_flight();
    if (due) save(*flight_);
    return !left_;
}

// Rollout, teacher and learner one after the other, of the student's own weights.
void distillation::in_turns() {
    teacher_scorer scorer(*teacher_, backend_);
    publication none;
    learner_stage lesson(c_, *learn_, none, {});
    const cache_plan plan = cache_for(c_);
    const auto batch = static_cast<std::uint64_t>(batch_of(c_));
    while (state_.step < steps()) {
        std::vector<request> requests;
        for (std::uint64_t i = 0; i < batch; ++i)
            requests.push_back(request_of(*task_, c_.run.seed, state_.next_sample + i, c_.distill.answers));
        std::vector<trajectory> rolled =
            roll_out(*student_, backend_.team(), requests, how_, static_cast<std::int32_t>(state_.step));
        std::vector<const trajectory*> answers;
        for (const trajectory& t : rolled) answers.push_back(&t);
        std::vector<scored_sequence> scored =
            by_.score ? by_.score(answers) : scorer.score(answers, how_.plan.count, plan);
        std::vector<learner_stage::view> sequences(rolled.size());
        for (std::size_t i = 0; i < rolled.size(); ++i) {
            sequences[i].rolled = std::make_shared<const trajectory>(std::move(rolled[i]));
            sequences[i].scored = std::make_shared<const scored_sequence>(std::move(scored[i]));
        }
        const learner_result r = lesson.learn(sequences, state_.step);
        flight_.reset();
        check_numbers(r);
        state_.next_sample += batch;
        stepped(r, sequences);
        if (!goes_on([] { return std::string(); })) return;
    }
}

// The learner alone.
void distillation::from_set() {
    const auto place = [this] { return set_->place(); };
    while (state_.step < steps()) {
        const std::vector<opd::index_t> numbers = set_->next(batch_of(c_));
        const learner_result r =
            set_->learn(*learn_, numbers, rate_of(c_, {}, state_.step), static_cast<std::int32_t>(state_.step));
        flight_.reset();
        check_numbers(r);
        state_.next_sample += numbers.size();
        told(r, {.tokens = r.diagnostics.kept, .samples = {numbers.begin(), numbers.end()}});
        if (!goes_on(place)) return;
    }
}

// opd-train's stages under the library's scheduler, each worker on a thread of its own.
void distillation::on_threads() {
    using driver_type = sched::thread_driver<rollout_stage, teacher_stage, learner_stage>;
    sched::settings schedule = schedule_of(c_);
    publication weights;
    learner_result last;
    const auto lesson =
        std::make_shared<learner_stage>(c_, *learn_, weights, [&](const learner_result& r, auto&&, sched::version_t) {
            flight_.reset();
            check_numbers(r); // before anybody draws from such weights
            last = r;
        });
    const auto publish = [&](const sched::weights& name) {
        if (name.version != state_.step)
            throw failure(exit_input, fmt::format("{}: its sequences in flight are those of step {}, not {}",
                                                  s_.checkpoint, name.version, state_.step));
        weights.publish(name, learn_->snapshot(static_cast<std::int32_t>(name.version)));
    };
    const auto teacher = [&] {
        return std::make_shared<teacher_stage>(*teacher_, c_, 1, nullptr, nullptr, by_.served);
    };
    driver_type* running = nullptr;
    driver_type::hooks_type hooks; // on the learner's thread, which alone looks at what is written here
    hooks.on_step = [&](const driver_type::report_type& report) {
        if (left_ || state_.step >= steps()) return;
        state_.next_sample = schedule.first_sample + static_cast<std::uint64_t>(report.totals.admitted);
        stepped(last, report.consumed);
    };
    hooks.on_checkpoint = [&](in_flight state) {
        const bool on = goes_on([&] { return kept(schedule, state); });
        if (!on || (state_.step >= steps() && !state.sequences.empty())) running->stop_now();
    };
    // each step may be the one after which it is time to leave
    const sched::thread_options how{.shutdown_seconds = 120, .stop_on_error = true, .checkpoint_every = 1};
    std::unique_ptr<driver_type> driver;
    if (const std::string bytes = std::exchange(state_.in_flight, {}); !bytes.empty()) {
        const in_flight from = in_flight_of(
            bytes, [&](auto t) { return teacher()->score(t); }, task_->vocabulary());
        publish(from.weights);
        schedule = going_on(schedule, from);
        driver = std::make_unique<driver_type>(schedule, from, how, hooks);
    } else {
        schedule.first_version = state_.step;
        schedule.first_sample = state_.next_sample;
        schedule.sequences -= schedule.batch * state_.step;
        publish({.version = state_.step});
        driver = std::make_unique<driver_type>(schedule, how, hooks);
    }
    running = driver.get();
    const int workers = rollout_workers_of(c_);
    const index_t lanes = std::max(1, c_.distill.slots / workers);
    for (std::int32_t w = 0; w < workers; ++w)
        driver->add_rollout(std::make_shared<rollout_stage>(*task_, how_, std::uint64_t{0}, lanes, weights,
                                                            c_.distill.answers, c_.schedule.park_after, nullptr,
                                                            nullptr, w),
                            static_cast<std::int32_t>(lanes));
    for (int w = 0; w < teachers_of(c_); ++w) driver->add_teacher(teacher());
    driver->set_learner(lesson);
    const sched::run_report report = driver->run();
    if (!report.left_behind.empty()) { // they use what would be destroyed now
        spdlog::error("{} threads did not return", report.left_behind.size());
        std::_Exit(left_ ? exit_interrupted : exit_other);
    }
    if (report.first_exception) std::rethrow_exception(report.first_exception);
    if (!left_ && state_.step < steps())
        throw std::runtime_error(fmt::format("distillation ended at step {} of {}: {} answers were given up",
                                             state_.step, steps(), report.totals.failed));
}

std::string distillation::say_sample() {
    const std::string r = sample_of(*student_, backend_, task_->held_out().front(), how_, *text_);
    spdlog::info("answer: {}", on_a_line(r, *text_));
    return r;
}

distil_report distillation::go() {
    if (s_.lora_rank > 0 || s_.lora_alpha != 0) {
        try {
            lora_.emplace(*student_, s_.lora_rank, s_.lora_alpha != 0 ? s_.lora_alpha : 2.0 * s_.lora_rank,
                          c_.run.seed);
        } catch (const opd::invalid_input& e) {
            const std::string text = e.what(); // "opd: rank: must …"
            throw failure(exit_usage, (e.argument == "rank" ? "--lora" : "--lora-alpha") +
                                          text.substr(std::string("opd: ").size() + e.argument.size() + 1));
        }
    }
    if (lora_ && student_->in_bfloat16()) student_->weights = {}; // base and values are what it is rounded from
    learn_.emplace(c_, *student_, state_.student_optimizer, backend_, model_head(*teacher_));
    if (lora_)
        learn_->update_with([this](double rate, std::vector<float>& gradient) {
            return lora_->step(c_.optimizer, rate, gradient, state_.student_optimizer, *student_, backend_.team());
        });
    if (is_served(c_)) ask_teacher();
    if (!s_.checkpoint.empty()) settings_ = settings_text();
    if (!text_->tokenizer) spdlog::info("answers are shown as ids: {}", text_->no_tokenizer);
    const auto& prompt = task_->held_out().front();
    spdlog::info("prompt: {}",
                 text_->tokenizer ? on_a_line(text_->tokenizer->decode(prompt), *text_) : json(prompt).dump());
    if (s_.resume) {
        take_checkpoint();
        lora_ ? lora_->merge(*student_, backend_.team()) : student_->weights_changed();
    } else {
        report_.kl_before = kl();
        spdlog::info("before: KL(student, teacher) {:.4f} nats a token; {}, {} of them", report_.kl_before,
                     how_measured(), s_.held_out);
        report_.sample_before = say_sample();
        if (!s_.checkpoint.empty())
            save(set_ ? set_->place() : std::string()); // so that a place that cannot be written is known now
    }
    const auto earlier = [this](const std::string& line) { // steps that are about to be made again are dropped
        const json j = json::parse(line, nullptr, false);
        const auto step = j.is_object() ? j.find("step") : j.end();
        return step != j.end() && step->is_number_integer() && step->get<std::int64_t>() < state_.step;
    };
    if (!s_.log.empty()) log_.open(s_.log, s_.resume ? earlier : std::function<bool(const std::string&)>());
    begin_ = std::chrono::steady_clock::now();
    const char* who = "distillation: --batch, --answers, --micro-batch, --gradient-checkpointing, --max-response and "
                      "--slots set how much";
    with_memory_for(who, [&] {
        try {
            if (state_.step < steps()) set_ ? from_set() : overlaps() ? on_threads() : in_turns();
        } catch (const failure& e) {
            if (e.code != exit_peer) throw;
            if (!s_.checkpoint.empty() && flight_) save(*flight_);
            throw failure(exit_peer, fmt::format("{}; {}", e.what(), where_it_stops()));
        }
    });
    if (left_) throw failure(exit_interrupted, where_it_stops());
    report_.lag = lags_ / static_cast<double>(std::max<std::int64_t>(1, lagged_));
    try {
        report_.kl_after = kl();
        spdlog::info("after: KL(student, teacher) {:.4f} nats a token", report_.kl_after);
    } catch (const failure& e) { // what was learnt is written all the same
        if (e.code != exit_peer) throw;
        report_.kl_after = std::numeric_limits<double>::quiet_NaN();
        spdlog::warn("after: KL(student, teacher) is not known: {}", renamed(e.what(), own_names()));
    }
    report_.sample_after = say_sample();
    std::optional<adapter_files> adapter;
    if (lora_) adapter = lora_->files(s_.student);
    write_model_directory(s_.out, *student_, &of_student_->source(), s_.how, adapter ? &*adapter : nullptr);
    spdlog::info("written: {} as {}", s_.out, s_.how.type);
    if (!s_.checkpoint.empty()) std::filesystem::remove(s_.checkpoint);
    return report_;
}

} // namespace

distil_report distil(const distil_settings& s) {
    try {
        return distillation(s).go();
    } catch (const failure& e) {
        throw failure(e.code, renamed(e.what(), own_names()));
    }
}

} // namespace trainer::hf
