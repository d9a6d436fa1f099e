// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-distil with a teacher that is no directory: a server, and a data set that a server's scores were written to. What
// is learnt has the bits of the run with the same model in the process, or of its first step the loss. Of a server that
// hangs, halves, refuses and comes back every answer is learnt from once; of one that stays away nothing that was made
// is lost. What does not fit the student is refused by name, before anything is written.
#include "support/teacher_server.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "app/programs.hpp"
#include "hf/distil.hpp"
#include "hf/model_files.hpp"
#include "opd/data/order.hpp"
#include "opd/data/rollout_reader.hpp"
#include "opd/data/rollout_writer.hpp"
#include "pipeline/answering.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/rollout.hpp"
#include "run/run.hpp"
#include "settings/files.hpp"
#include "task/task.hpp"
#include "trainer/data_sets.hpp"
#include "trainer/scratch.hpp"

using namespace trainer;
using hf::distil_settings;
using opd::serve::dialect;
using opd::test::copy_set;
using opd::test::reaction;
using opd::test::scratch;
using opd::test::teacher_server;
using json = nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string golden = OPD_TEST_SOURCE_DIR "/tests/trainer/hf_golden/";
constexpr token first_end = 5, other_end = 9;
constexpr int ids = 40, longest_answer = 10;

void put(const fs::path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}
std::vector<float> weights_of(const std::string& path) { return hf::read_model_directory(path).weights; }
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
double apart(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
    return most;
}
std::vector<json> lines_of(const std::string& path) {
    std::vector<json> r;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) r.push_back(json::parse(line));
    return r;
}
/// Lines that are whole.
std::ptrdiff_t steps_in(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
}
/// What a log says whatever the clock says.
std::vector<json> timeless(const std::string& path) {
    std::vector<json> r = lines_of(path);
    for (json& line : r) line.erase("seconds");
    return r;
}
std::string refused(const std::function<void()>& call, exit_code code) {
    try {
        call();
    } catch (const failure& f) {
        CHECK(f.code == code);
        return f.what();
    }
    FAIL_CHECK("it was not refused");
    return {};
}
void says(const std::string& message, const std::string& part) {
    CAPTURE(message);
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
}

/// Ids alone: what a server says of prompts of ids.
class id_task : public any_task {
public:
    int vocabulary() const override { return ids; }
    token end_token() const override { return first_end; }
    int prompt_length() const override { return 3; }
    int max_response() const override { return longest_answer; }
    problem training_problem(std::uint64_t, std::uint64_t) const override { return {}; }
    std::size_t held_out_problems() const override { return 0; }
    problem held_out_problem(std::size_t) const override { return {}; }
    std::vector<token> prompt_tokens(problem) const override { return {}; }
    std::vector<token> solution_tokens(problem) const override { return {}; }
    std::string written(std::span<const token> t) const override {
        return json(std::vector(t.begin(), t.end())).dump();
    }
    verdict judged(problem, std::span<const token>) const override { return {}; }
    bool judged_by_kl() const override { return true; }
};

/// The teacher as a server of this project, and as the law of another.
struct served_llama {
    transformer<float> model = hf::model_directory(golden + "llama").model<float>();
    id_task task;
    teacher_answers answers{model, task, 1, ids, "llama"};
    http_service service{"127.0.0.1", 0, std::ref(answers)};
    std::string models = answers("GET", "/v1/models", "").body;
    std::thread serving{[this] { service.serve(); }};
    std::mutex mutex;
    std::map<std::vector<token>, std::vector<double>> laws; ///< a forward pass a prefix
    ~served_llama() {
        service.stop();
        serving.join();
    }
    void teach(teacher_server& server) {
        server.models = models;
        server.right.law.other = [this](std::span<const std::int32_t> prefix) {
            const std::lock_guard lock(mutex);
            std::vector<double>& law = laws[{prefix.begin(), prefix.end()}];
            if (!law.empty()) return law;
            std::vector<token> prompt(prefix.begin(), prefix.end());
            prompt.push_back(0); // asked for all ids in its place
            law.assign(ids, 0.0);
            const json q = {{"prompt", json::array({prompt})}, {"prompt_logprobs", ids}};
            const json a = json::parse(answers("POST", "/v1/completions", q.dump()).body);
            for (const auto& [id, entry] : a["choices"][0]["prompt_logprobs"].back().items())
                law[std::stoul(id)] = entry["logprob"].get<double>();
            return law;
        };
    }
};
served_llama& llama() {
    static served_llama made;
    return made;
}

std::vector<token> prompt_of_line(int i) { return {i, (7 * i) % ids, 3}; }

/// qwen2 learns from llama, on 20 prompts of three ids: 8 answers a step.
distil_settings small_run(const scratch& dir, const std::string& out) {
    distil_settings s;
    s.student = golden + "qwen2", s.teacher = golden + "llama";
    s.prompts = dir / "prompts.jsonl", s.out = dir / out, s.log = dir / (out + ".jsonl");
    s.ends = {first_end, other_end};
    s.max_response = longest_answer, s.held_out = 4, s.say_every = 4;
    auto& d = s.settings.distill;
    d.steps = 4, d.prompts = 4, d.answers = 2, d.warmup = 0, d.rate = 1e-2, d.estimator = "lightning";
    s.settings.run.threads = 2, s.settings.run.checkpoint_every = 1000;
    s.settings.served.silence = 20, s.settings.served.patience = 60;
    std::string lines;
    for (int i = 0; i < 20; ++i) lines += json{{"ids", prompt_of_line(i)}}.dump() + "\n";
    put(s.prompts, lines);
    spdlog::set_level(spdlog::level::off);
    return s;
}
/// With the flags of a test between them.
using edit = std::function<void(distil_settings&)>;
hf::distil_report distilled(const scratch& dir, const std::string& out, const std::string& teacher, const edit& how) {
    distil_settings s = small_run(dir, out);
    if (!teacher.empty()) s.teacher = teacher;
    how(s);
    interrupted = false;
    return hf::distil(s);
}
edit asks(const std::string& estimator, int entries, bool of_student = false) {
    return [=](distil_settings& s) {
        auto& d = s.settings.distill;
        d.estimator = estimator, d.m = d.k = d.budget = entries;
        if (of_student) d.topk_from = "student";
    };
}

/// What the student answers to the prompts of samples [0, count), with one draw a token, its own.
std::vector<trajectory> first_answers(std::uint64_t count, std::uint64_t seed = 1) {
    const transformer<float> student = hf::model_directory(golden + "qwen2").model<float>();
    sampling how;
    how.seed = seed, how.end = first_end, how.more_ends = {other_end}, how.max_response = longest_answer;
    how.plan = {draw_plan::kind::iid, 1};
    std::vector<request> requests;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t n = i / 2; // answers a prompt
        const opd::data::permutation order(16, seed, n / 16);
        requests.push_back({i, prompt_of_line(static_cast<int>(order(static_cast<opd::index_t>(n % 16))))});
    }
    opd::thread_team threads(1);
    return roll_out(student, threads, requests, how);
}

} // namespace

TEST_CASE("a run with a server ends in the bits of one with the directory that it serves") {
    const scratch dir;
    const std::string url = llama().service.url();
    const edit step_off = [](distil_settings& s) {
        asks("topk", 3)(s);
        s.settings.schedule.kind = "step-off", s.settings.schedule.k = 1;
    };
    const edit lora = [](distil_settings& s) { s.lora_rank = 2, s.settings.distill.micro_batch = 3; };
    const edit filtered = [](distil_settings& s) { asks("mc", 2)(s), s.settings.distill.rollout_top_p = 0.9; };
    int n = 0;
    for (const edit& how : {asks("lightning", 1), asks("mc", 1), asks("mc", 3), asks("threshold", 3), asks("topk", 3),
                            asks("topk", 3, true), asks("topk_rw", 3), step_off, lora, filtered}) {
        const std::string own = fmt::format("own-{}", n), far = fmt::format("far-{}", n++);
        CAPTURE(own);
        distilled(dir, own, "", how);
        const hf::distil_report r = distilled(dir, far, url, how);
        CHECK(same_bits(weights_of(dir / far), weights_of(dir / own)));
        CHECK(timeless(dir / (far + ".jsonl")) == timeless(dir / (own + ".jsonl")));
        CHECK(r.kl_before != r.kl_after);
        CHECK(!same_bits(weights_of(dir / far), weights_of(golden + "qwen2")));
    }
    // the tail is 1 - sum of what a list has, which float rounds
    distilled(dir, "own-tail", "", asks("tail_bucket", 3)), distilled(dir, "far-tail", url, asks("tail_bucket", 3));
    CHECK(apart(weights_of(dir / "own-tail"), weights_of(dir / "far-tail")) < 1e-3);
    CHECK(lines_of(dir / "far-tail.jsonl")[0]["loss"].get<double>() ==
          doctest::Approx(lines_of(dir / "own-tail.jsonl")[0]["loss"].get<double>()).epsilon(1e-6));
    // and in another dialect
    teacher_server sglang(dialect::sglang);
    llama().teach(sglang);
    distilled(dir, "sglang", sglang.url(), [](auto& s) { s.settings.served.dialect = "sglang"; });
    CHECK(same_bits(weights_of(dir / "sglang"), weights_of(dir / "own-0")));
}

TEST_CASE("what a served teacher makes of held-out answers is the mean of log p - log q over whole rows' draws") {
    const scratch dir;
    for (const int filter : {0, 3}) { // rollout's filter has no part in it
        const hf::distil_report r = distilled(dir, fmt::format("out-{}", filter), llama().service.url(), [&](auto& s) {
            asks("mc", 1)(s), s.settings.distill.rollout_top_k = filter, s.settings.distill.steps = 1;
        });
        const transformer<float> student = hf::model_directory(golden + "qwen2").model<float>();
        sampling how;
        how.seed = ~std::uint64_t{1}, how.end = first_end, how.more_ends = {other_end};
        how.max_response = longest_answer, how.plan = {draw_plan::kind::iid, 1};
        std::vector<request> requests;
        for (int i = 16; i < 20; ++i) requests.push_back({requests.size(), prompt_of_line(i)});
        opd::cpu_backend backend{.threads = 1};
        const auto drawn = roll_out(student, backend.team(), requests, how);
        std::vector<const trajectory*> each;
        for (const trajectory& t : drawn) each.push_back(&t);
        const auto scored =
            teacher_scorer(llama().model, backend).score(each, 1, {.what = teacher_cache::kind::samples, .entries = 1});
        double sum = 0;
        std::size_t tokens = 0;
        for (std::size_t i = 0; i < drawn.size(); ++i) {
            const auto log_q = std::span(scored[i].cache.next_log_q).last(drawn[i].log_mu.size());
            for (std::size_t t = 0; t < log_q.size(); ++t, ++tokens)
                sum += double{drawn[i].log_mu[t]} - double{log_q[t]};
        }
        CHECK(r.kl_before == doctest::Approx(sum / static_cast<double>(tokens)).epsilon(1e-9));
    }
}

TEST_CASE("of a server that hangs, halves, refuses and comes back every answer is learnt from once") {
    const scratch dir;
    const edit ask = [](distil_settings& s) { asks("topk", 3)(s), s.settings.distill.steps = 6; };
    for (const char* schedule : {"sync", "step-off", "async"}) {
        CAPTURE(schedule);
        const edit how = [&](distil_settings& s) {
            ask(s);
            s.settings.schedule.kind = schedule, s.settings.schedule.k = s.settings.schedule.tau = 1;
            s.settings.served.silence = 0.3;
        };
        teacher_server server(dialect::vllm);
        llama().teach(server);
        std::atomic<int> faults = 0;
        server.react = [&](int n, const json&) {
            reaction r;
            n -= 12;                        // some of the probe's and the first look's are spared
            if (n < 0 || n >= 30) return r; // it is back for good
            if (n % 9 == 1) r.does = reaction::hangs;
            if (n % 5 == 2) r = {reaction::says, 500, {}, "{}"};
            if (n % 7 == 3) r.does = reaction::halves;
            if (n % 7 == 5) r.does = reaction::closes;
            if (n % 8 == 6) r.edit = [](json& a) { a["choices"].erase(0); };
            faults += r.does != reaction{}.does || r.edit;
            return r;
        };
        const std::string own = std::string("own-") + schedule, far = std::string("far-") + schedule;
        distilled(dir, far, server.url(), how);
        CHECK(faults > 5);
        if (std::string(schedule) != "async") {
            distilled(dir, own, "", how);
            CHECK(same_bits(weights_of(dir / far), weights_of(dir / own)));
            CHECK(timeless(dir / (far + ".jsonl")) == timeless(dir / (own + ".jsonl")));
        } else {
            std::set<int> samples;
            for (const json& line : lines_of(dir / (far + ".jsonl")))
                for (const int i : line["samples"]) CHECK(samples.insert(i).second);
            CHECK(samples.size() == 48);
        }
    }
}

TEST_CASE("a server that stays away ends the run, which goes on with another from the step that it had reached") {
    const scratch dir;
    for (const char* schedule : {"sync", "step-off"}) {
        CAPTURE(schedule);
        const std::string name = schedule;
        const edit how = [&](distil_settings& s) {
            s.settings.distill.steps = 6;
            s.settings.schedule.kind = schedule, s.settings.schedule.k = 1;
        };
        distilled(dir, name + "-whole", "", how);
        const edit kept = [&](distil_settings& s) {
            how(s);
            s.checkpoint = dir / (name + ".ckpt"), s.out = dir / name, s.log = dir / (name + ".jsonl");
        };
        const int status = name == "sync" ? 503 : 400; // which is asked again until patience is over; which is not
        teacher_server away(dialect::vllm);
        llama().teach(away);
        away.react = [&](int, const json&) {
            const bool gone = steps_in(dir / (name + ".jsonl")) >= 3;
            return gone ? reaction{reaction::says, status, {}, "{}"} : reaction{};
        };
        const std::string said = refused(
            [&] {
                distilled(dir, name, away.url(), [&](auto& s) {
                    kept(s);
                    if (status == 503) s.settings.served.patience = 3;
                });
            },
            exit_peer);
        says(said, "--teacher: " + away.url() + " did not score a response");
        says(said, std::to_string(status));
        says(said, "--resume goes on from " + dir / (name + ".ckpt"));
        CHECK(!fs::exists(dir / name));
        const std::ptrdiff_t made = steps_in(dir / (name + ".jsonl"));
        if (name == "sync") {
            says(said, "stopped after 3 steps");
            CHECK(made == 3);
        }
        std::string settings; // the last step's, though a checkpoint was due after 1000
        CHECK(load_checkpoint(dir / (name + ".ckpt"), settings).step >= (name == "sync" ? 3 : 0));
        const edit on = [&](distil_settings& s) { kept(s), s.resume = true; };
        distilled(dir, name, llama().service.url(), on);
        CHECK(same_bits(weights_of(dir / name), weights_of(dir / (name + "-whole"))));
        CHECK(timeless(dir / (name + ".jsonl")) == timeless(dir / (name + "-whole.jsonl")));
        CHECK(!fs::exists(dir / (name + ".ckpt")));
    }

    // another model is another run
    const edit stopped = [&](distil_settings& s) { s.checkpoint = dir / "c", s.stop_after = 1; };
    refused([&] { distilled(dir, "other", llama().service.url(), stopped); }, exit_interrupted);
    const edit resumed = [&](distil_settings& s) { s.checkpoint = dir / "c", s.resume = true; };
    teacher_server other(dialect::vllm);
    llama().teach(other);
    json models = json::parse(llama().models);
    models["data"][0]["opd"]["teacher"] = "another";
    other.models = models.dump();
    says(refused([&] { distilled(dir, "other", other.url(), resumed); }, exit_usage), "models.teacher");

    // without a checkpoint nothing is there; before the first step nothing was
    const std::string gone = teacher_server(dialect::vllm, teacher_server::presence::gone).url();
    const edit short_patience = [](distil_settings& s) { s.settings.served.patience = 0.2; };
    says(refused([&] { distilled(dir, "none", gone, short_patience); }, exit_peer),
         "--teacher: " + gone + " cannot be reached");
    teacher_server late(dialect::vllm);
    llama().teach(late);
    const auto steps = [&](const char* name) { return steps_in(dir / (std::string(name) + ".jsonl")); };
    late.react = [&](int, const json&) {
        return steps("none") >= 2 ? reaction{reaction::says, 400, {}, "{}"} : reaction{};
    };
    says(refused([&] { distilled(dir, "none", late.url(), [](auto&) {}); }, exit_peer),
         "stopped after 2 steps: nothing is written");
    CHECK(!fs::exists(dir / "none"));

    // after the last step it is missed for the figure alone
    late.react = [&](int, const json&) {
        return steps("last") >= 4 ? reaction{reaction::says, 400, {}, "{}"} : reaction{};
    };
    const hf::distil_report r = distilled(dir, "last", late.url(), [](auto&) {});
    CHECK(std::isnan(r.kl_after));
    distilled(dir, "last-own", "", [](auto&) {});
    CHECK(same_bits(weights_of(dir / "last"), weights_of(dir / "last-own")));
}

TEST_CASE("at whichever call a server goes away for good, the run goes on with another") {
    const scratch dir;
    const edit how = [&](distil_settings& s) {
        s.settings.distill.steps = 6;
        s.settings.schedule.kind = "step-off", s.settings.schedule.k = 1;
    };
    distilled(dir, "whole", "", how);
    int from_a_step = 0;
    for (int call = 10; call < 50; ++call) {
        CAPTURE(call);
        const std::string name = std::to_string(call);
        const edit kept = [&](distil_settings& s) {
            how(s);
            s.checkpoint = dir / (name + ".ckpt"), s.log = dir / (name + ".jsonl");
        };
        teacher_server away(dialect::vllm);
        llama().teach(away);
        away.react = [&](int n, const json&) {
            return n < call ? reaction{} : reaction{reaction::says, 400, {}, "{}"};
        };
        try {
            distilled(dir, name, away.url(), kept);
            break; // it ends before that call
        } catch (const failure& e) {
            REQUIRE(e.code == exit_peer);
        }
        if (!fs::exists(dir / (name + ".ckpt"))) continue; // before the first step
        std::string settings;
        from_a_step += load_checkpoint(dir / (name + ".ckpt"), settings).step > 0;
        distilled(dir, name, llama().service.url(), [&](auto& s) { kept(s), s.resume = true; });
        CHECK(same_bits(weights_of(dir / name), weights_of(dir / "whole")));
        CHECK(timeless(dir / (name + ".jsonl")) == timeless(dir / "whole.jsonl"));
    }
    CHECK(from_a_step > 0);
}

TEST_CASE("servers and settings that do not fit are refused by name") {
    const scratch dir;
    const std::string url = llama().service.url();
    const auto usage = [&](const std::string& part, const edit& how, const std::string& teacher) {
        says(refused([&] { distilled(dir, "refused", teacher, how); }, exit_usage), part);
        CHECK(!fs::exists(dir / "refused"));
    };
    usage("--teacher: a served teacher says log-probs", asks("reverse_kl", 1), url);
    usage(
        "--teacher: 'https://127.0.0.1:1' does not begin with http://", [](auto&) {}, "https://127.0.0.1:1");
    usage(
        "not with --temperature 0.9", [](auto& s) { s.settings.distill.temperature = 0.9; }, url);
    usage(
        "--teacher-dialect llama_cpp does not give",
        [](auto& s) { asks("mc", 2)(s), s.settings.served.dialect = "llama_cpp"; }, url);
    usage(
        "--teacher is needed where there is no --data-set", [](auto& s) { s.teacher.clear(); }, "");
    const auto probed = [&](const std::string& part, const std::function<void(json&)>& change) {
        teacher_server server(dialect::vllm);
        llama().teach(server);
        json models = json::parse(llama().models);
        change(models["data"][0]);
        server.models = models.dump();
        says(refused([&] { distilled(dir, "refused", server.url(), [](auto&) {}); }, exit_peer), part);
        CHECK(!fs::exists(dir / "refused"));
    };
    probed("vocabulary: ", [](json& m) { m["opd"]["vocabulary"] = 39; });
    probed("tokenizer: ", [](json& m) { m["opd"]["tokenizer"] = "else"; });
    probed("context: ", [](json& m) { m["max_model_len"] = 12; });
    {
        teacher_server wide(dialect::vllm); // which does not say how many ids it knows
        wide.right.law.vocab = 64;
        says(refused([&] { distilled(dir, "refused", wide.url(), [](auto&) {}); }, exit_peer), "ids: ");
    }

    // the program
    const distil_settings s = small_run(dir, "api");
    const auto exits = [&](const std::vector<std::string>& more) {
        std::vector<std::string> words = {"opd-distil", "--student",         s.student,      "--prompts", s.prompts,
                                          "--end=5,9",  "--max-response=10", "--held-out=4", "--batch=4", "--answers=2",
                                          "--steps=2",  "--threads=2",       "--rate=1e-2",  "--warmup=0"};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<const char*> argv;
        for (const std::string& w : words) argv.push_back(w.c_str());
        interrupted = false;
        return distil_main(static_cast<int>(argv.size()), argv.data());
    };
    distilled(dir, "api", url, [](auto& a) { asks("topk", 3)(a), a.settings.distill.steps = 2; });
    CHECK(exits({"--teacher=" + url, "--out=" + dir / "main", "--estimator=topk", "--k=3", "--teacher-requests=2",
                 "--teacher-silence=20", "--teacher-patience=60", "--teacher-dialect=vllm", "--teacher-model=llama"}) ==
          exit_ok);
    CHECK(same_bits(weights_of(dir / "main"), weights_of(dir / "api")));
    const std::string to = "--out=" + dir / "refused", how = "--estimator=lightning";
    CHECK(exits({to, how}) == exit_usage); // no teacher
    CHECK(exits({to, how, "--teacher=" + url, "--accept-tokenizer"}) == exit_usage);
    CHECK(exits({to, how, "--teacher=" + url, "--accept-teacher=heat"}) == exit_usage);
    CHECK(exits({to, how, "--teacher=" + s.teacher, "--teacher-patience=3"}) == exit_usage);
    CHECK(exits({to, how, "--teacher=" + s.teacher, "--accept-mismatch=tokenizer"}) == exit_usage);
    CHECK(exits({to, how, "--teacher=http://127.0.0.1:1", "--teacher-patience=0.1"}) == exit_peer);
    CHECK(!fs::exists(dir / "refused"));
}

// --- data sets

namespace {

/// Writes answers as the lines of opd-score, and their scores by the server as a set; with `k` of its best ids.
void write_set(const std::string& folder, const std::vector<trajectory>& answers, int k,
               const std::string& ids_of = golden + "qwen2") {
    const std::string lines = folder + ".lines";
    std::string text;
    for (const trajectory& t : answers)
        text += json{{"prompt", std::vector(t.tokens.begin(), t.tokens.begin() + std::ptrdiff_t(t.prompt_length))},
                     {"response", std::vector(t.response().begin(), t.response().end())},
                     {"log_mu", t.log_mu}}
                    .dump() +
                "\n";
    put(lines, text);
    const std::vector<std::string> words = {"opd-score",          "--responses=" + lines,
                                            "--out=" + folder,    "--teacher-url=" + llama().service.url(),
                                            "--ids-of=" + ids_of, fmt::format("--k={}", k)};
    std::vector<const char*> argv;
    for (const std::string& w : words) argv.push_back(w.c_str());
    interrupted = false;
    REQUIRE(score_main(static_cast<int>(argv.size()), argv.data()) == exit_ok);
}
edit from(const std::string& folder, int steps) {
    return [=](distil_settings& s) {
        s.settings.distill.offline = folder, s.settings.distill.steps = steps;
        s.teacher.clear(), s.prompts.clear();
    };
}

} // namespace

TEST_CASE("the first step from a set has the loss and the gradient of the one with the teacher in the process") {
    const scratch dir;
    std::vector<trajectory> answers = first_answers(10);
    write_set(dir / "set", answers, 3);
    int n = 0;
    for (const edit& ask : {asks("lightning", 1), asks("mc", 1), asks("topk", 3), asks("tail_bucket", 3)}) {
        CAPTURE(n);
        const std::string own = fmt::format("own-{}", n), off = fmt::format("off-{}", n);
        distilled(dir, own, "", [&](auto& s) { ask(s), s.settings.distill.steps = 1; });
        const hf::distil_report r = distilled(dir, off, "", [&](auto& s) {
            ask(s), from(dir / "set", 1)(s), s.held_out = 2; // which leaves the step's eight
        });
        const json a = lines_of(dir / (own + ".jsonl"))[0], b = lines_of(dir / (off + ".jsonl"))[0];
        for (const char* figure : {"loss", "gradient", "kl"})
            CHECK(b[figure].get<double>() == doctest::Approx(a[figure].get<double>()).epsilon(1e-6));
        CHECK(b["tokens"] == a["tokens"]);
        CHECK(b["mismatched"] == 0);
        CHECK(b["drift"]["chi_squared"].get<double>() == doctest::Approx(0));
        std::vector<int> samples = b["samples"];
        std::sort(samples.begin(), samples.end());
        CHECK(samples == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
        CHECK(r.tokens == a["tokens"].get<std::int64_t>());

        // what is held out is measured from pi_ref's own tokens, each weighted by what the student makes of it now
        const std::vector<const trajectory*> last{&answers[8], &answers[9]};
        opd::cpu_backend backend{.threads = 1};
        const auto log_probs = [&](const transformer<float>& model) {
            return teacher_scorer(model, backend).score(last, 1, {.what = teacher_cache::kind::samples, .entries = 1});
        };
        const auto log_q = log_probs(llama().model);
        const auto expected = [&](const std::string& student) {
            const auto log_p = log_probs(hf::model_directory(student).model<float>());
            double sum = 0;
            std::size_t tokens = 0;
            for (std::size_t i = 0; i < last.size(); ++i) {
                const std::vector<float>& mu = last[i]->log_mu;
                const auto p = std::span(log_p[i].cache.next_log_q).last(mu.size());
                const auto q = std::span(log_q[i].cache.next_log_q).last(mu.size());
                for (std::size_t t = 0; t < mu.size(); ++t, ++tokens)
                    sum += std::exp(double{p[t]} - double{mu[t]}) * (double{p[t]} - double{q[t]});
            }
            return sum / static_cast<double>(tokens);
        };
        CHECK(r.kl_before == doctest::Approx(expected(golden + "qwen2")).epsilon(1e-6));
        CHECK(r.kl_after == doctest::Approx(expected(dir / off)).epsilon(1e-6));
        CHECK(r.kl_after != r.kl_before);
        ++n;
    }
}

TEST_CASE("from a set alone the student comes nearer, in parts and after a stop as in one go") {
    const scratch dir;
    write_set(dir / "set", first_answers(64), 0);
    const edit how = [&](distil_settings& s) {
        from(dir / "set", 24)(s);
        s.held_out = 16, s.settings.distill.rate = 5e-3;
    };
    const hf::distil_report whole = distilled(dir, "whole", "", how);
    CHECK(whole.kl_after < 0.9 * whole.kl_before);
    std::map<int, int> times;
    for (const json& line : lines_of(dir / "whole.jsonl"))
        for (const int i : line["samples"]) ++times[i];
    CHECK(times.size() == 48); // all that is not held out, once an epoch
    for (const auto& [sample, n] : times) {
        CHECK(sample < 48);
        CHECK(n == 4);
    }
    for (const int rank : {0, 2}) {
        CAPTURE(rank);
        const std::string unbroken = rank == 0 ? "whole" : "lora", parts = unbroken + "-parts";
        const edit ranked = [&](distil_settings& s) { how(s), s.lora_rank = rank; };
        if (rank > 0) distilled(dir, unbroken, "", ranked);
        const edit stops = [&](distil_settings& s) {
            ranked(s), s.checkpoint = dir / "c", s.stop_after = 7, s.resume = fs::exists(dir / "c");
        };
        for (int i = 0; i < 3; ++i)
            says(refused([&] { distilled(dir, parts, "", stops); }, exit_interrupted), "--resume");
        const hf::distil_report r = distilled(dir, parts, "", [&](auto& s) { stops(s), s.stop_after = -1; });
        CHECK(same_bits(weights_of(dir / parts), weights_of(dir / unbroken)));
        CHECK(timeless(dir / (parts + ".jsonl")) == timeless(dir / (unbroken + ".jsonl")));
        if (rank == 0) CHECK(r.kl_before == whole.kl_before);
    }
    const edit once = [&](distil_settings& s) { how(s), s.settings.distill.steps = 1; };
    distilled(dir, "one", "", once);
    distilled(dir, "micro", "", [&](auto& s) { once(s), s.settings.distill.micro_batch = 3; });
    const json a = lines_of(dir / "one.jsonl")[0], b = lines_of(dir / "micro.jsonl")[0];
    CHECK(b["loss"].get<double>() == doctest::Approx(a["loss"].get<double>()).epsilon(1e-6));
    CHECK(b["gradient"].get<double>() == doctest::Approx(a["gradient"].get<double>()).epsilon(1e-5));

    // another set is another run
    write_set(dir / "other", first_answers(64, 2), 0);
    const edit stops = [&](distil_settings& s) { how(s), s.checkpoint = dir / "d", s.stop_after = 2; };
    refused([&] { distilled(dir, "exchanged", "", stops); }, exit_interrupted);
    says(refused(
             [&] {
                 distilled(dir, "exchanged", "",
                           [&](auto& s) { stops(s), s.resume = true, s.settings.distill.offline = dir / "other"; });
             },
             exit_usage),
         "models.teacher");
}

TEST_CASE("a set that does not fit the student is refused by name, and accepted by name") {
    const scratch dir;
    write_set(dir / "set", first_answers(12), 3);
    fs::copy(golden + "qwen2", dir / "student");
    put(dir / "student/tokenizer.json", R"({"model": {"vocab": {"a": 0, "b": 1}}})");
    const auto vocabulary = [&] { return hf::print_of_tokenizer(hf::model_directory(dir / "student").source()); };
    const auto attempt = [&](
                             const std::string& set, const edit& more = [](auto&) {}) {
        return distilled(dir, "out", "", [&](distil_settings& s) {
            from(dir / set, 1)(s);
            s.student = dir / "student", s.held_out = 2, s.settings.distill.prompts = 2;
            more(s);
        });
    };
    const auto refuses = [&](
                             const std::string& set, const std::string& part, exit_code code,
                             const edit& more = [](auto&) {}) {
        const std::string said = refused([&] { attempt(set, more); }, code);
        says(said, part);
        CHECK(said.find("--offline") == std::string::npos);
        CHECK(!fs::exists(dir / "out"));
    };
    const auto passes = [&](
                            const std::string& set, const edit& more = [](auto&) {}) {
        attempt(set, more);
        CHECK(fs::exists(dir / "out/config.json"));
        fs::remove_all(dir / "out");
    };
    passes("set"); // which does not say whose ids it has
    copy_set(dir / "set", dir / "mine", {.tokenizer = vocabulary()}, ids);
    passes("mine");
    write_set(dir / "scored", first_answers(4), 0, dir / "student");
    CHECK(opd::data::rollout_set(dir / "scored").description().prints.tokenizer == vocabulary());
    copy_set(dir / "set", dir / "foreign", {.tokenizer = "another"}, ids);
    refuses("foreign", "tokenizer of the set is another", exit_usage);
    refuses("foreign", "--data-set: ", exit_usage);
    refuses("foreign", "--accept-mismatch tokenizer", exit_usage);
    refuses("foreign", "tokenizer of the set", exit_usage,
            [](auto& s) { s.settings.distill.accept_mismatch = "reference_policy"; });
    passes("foreign", [](auto& s) { s.settings.distill.accept_mismatch = "tokenizer"; });
    // the same tokens in other words are the same; another id for one is not
    put(dir / "student/tokenizer.json", R"({"model": {"vocab": {"b": 1, "a": 0}, "merges": []}})");
    passes("mine");
    put(dir / "student/tokenizer.json", R"({"model": {"vocab": {"b": 0, "a": 1}}})");
    refuses("mine", "tokenizer of the set is ", exit_usage);
    copy_set(dir / "set", dir / "drawn", {.reference_policy = "somebody"}, ids);
    refuses("drawn", "reference_policy of the set is somebody", exit_usage);
    copy_set(dir / "set", dir / "drawn-here", {.reference_policy = print_of_policy(weights_of(golden + "qwen2"), 1)},
             ids);
    passes("drawn-here");
    copy_set(dir / "set", dir / "wide", {}, ids + 1);
    refuses("wide", "has ids up to 41, the student knows 40", exit_input);
    {
        opd::data::rollout_writer out(dir / "long", {.vocab = ids});
        const std::vector<std::int32_t> tokens(65, 1);
        const std::vector<float> log(4, -1.0f);
        const std::vector<std::uint8_t> mask(4, 1);
        for (int i = 0; i < 5; ++i)
            out.add({.tokens = opd::view(tokens.data(), 65), .rows = 4, .mask = opd::view(mask.data(), 4), .sample = i},
                    opd::teacher::samples{opd::view(tokens.data(), 4, 1), opd::view(log.data(), 4, 1),
                                          opd::view(log.data(), 4, 1)});
        out.finish();
    }
    refuses("long", "has a sequence of 65 tokens", exit_input);
    refuses("nowhere", "set.json", exit_input);
    refuses("set", "--held-out must lie in [1, 11]", exit_usage, [](auto& s) { s.held_out = 12; });
    refuses("set", "has 3 of the teacher's best ids a row, not --k 4", exit_input, asks("topk", 4));
    refuses("mine", "", exit_input, [](auto& s) { // which has none
        asks("topk", 3)(s), s.settings.distill.accept_mismatch = "tokenizer";
    });
    refuses("set", "--data-set: a data set has one draw a token", exit_usage, asks("reverse_kl", 1));
    refuses("set", "--data-set: a data set has one draw a token", exit_usage, asks("mc", 2));
    refuses("set", "--teacher is not used by --data-set", exit_usage, [](auto& s) { s.teacher = golden + "llama"; });
    refuses("set", "--prompts is not used by --data-set", exit_usage, [](auto& s) { s.prompts = "p"; });
    refuses("set", "--schedule", exit_usage, [](auto& s) { s.settings.schedule.kind = "async"; });
    refuses("set", "--top-k", exit_usage, [](auto& s) { s.settings.distill.rollout_top_k = 3; });
    std::string shard = read_file(dir / "set/shard-000000.safetensors");
    shard[shard.size() - 5] ^= 1;
    put(dir / "set/shard-000000.safetensors", shard);
    refuses("set", "shard-000000.safetensors", exit_input);

    // the program
    const auto exits = [&](const std::vector<std::string>& more) {
        std::vector<std::string> words = {"opd-distil",
                                          "--student=" + golden + "qwen2",
                                          "--data-set=" + dir / "mine",
                                          "--estimator=lightning",
                                          "--held-out=2",
                                          "--batch=2",
                                          "--steps=2",
                                          "--threads=2",
                                          "--end=5,9"};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<const char*> argv;
        for (const std::string& w : words) argv.push_back(w.c_str());
        interrupted = false;
        return distil_main(static_cast<int>(argv.size()), argv.data());
    };
    CHECK(exits({"--out=" + dir / "main", "--mini-batches=2", "--micro-batch=1"}) == exit_ok);
    const std::string to = "--out=" + dir / "out";
    for (const char* unused : {"--teacher=a", "--teacher=http://127.0.0.1:1", "--prompts=p", "--schedule=async",
                               "--top-k=3", "--teacher-patience=3", "--accept-tokenizer", "--score-batch=1"}) {
        CAPTURE(unused);
        CHECK(exits({to, unused}) == exit_usage);
    }
    CHECK(!fs::exists(dir / "out"));
}
