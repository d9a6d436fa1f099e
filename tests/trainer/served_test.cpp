// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// A teacher over HTTP: opd-serve-teacher's answers, and a server of each dialect whose law is the same model. A run
// with it ends in the bits of the run with the teacher in its process, under every schedule; of a server that hangs,
// halves, refuses and comes back every response is learnt from once; one that stays away ends the run, which goes on.
// The probe refuses what is not that teacher, by name. opd-score writes what --write-offline writes.
#include "support/teacher_server.hpp"

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "app/programs.hpp"
#include "opd/data/rollout_reader.hpp"
#include "pipeline/answering.hpp"
#include "pipeline/prints.hpp"
#include "pipeline/served.hpp"
#include "run/offline.hpp"
#include "run/scoring.hpp"
#include "settings/files.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

using namespace trainer;
using opd::serve::dialect;
using opd::test::exit_of;
using opd::test::flags;
using opd::test::go;
using opd::test::reaction;
using opd::test::refusal;
using opd::test::scratch;
using opd::test::small_models;
using opd::test::teacher_server;
using opd::test::with;
namespace fs = std::filesystem;
using json = nlohmann::json;

namespace {

constexpr int batch = 8;

flags tiny(const std::string& directory, const flags& more) {
    return with(with({"--run-dir=" + directory, "--quiet", "--prompts=" + std::to_string(batch), "--rate=0.01",
                      "--warmup=0", "--eval-prompts=8", "--eval-samples=0", "--eval-every=0", "--log-every=1",
                      "--checkpoint-every=1", "--threads=2"},
                     small_models()),
                with({"--teacher-steps=60", "--student-max-steps=8", "--student-target-accuracy=1",
                      "--student-check-prompts=4"},
                     more));
}

// A run with a teacher of some steps and a student that has learnt less, and the parts of opd-serve-teacher around it.
struct warm {
    scratch dir;
    std::string student = dir / "base/checkpoints/student.ckpt";
    std::unique_ptr<loaded_run> of;
    std::unique_ptr<transformer<float>> teacher;
    std::unique_ptr<const any_task> task;
    std::unique_ptr<teacher_answers> answers;
    std::unique_ptr<http_service> service;
    std::thread serving;
    std::string models; ///< what it says at /v1/models
    struct memory {
        std::mutex mutex;
        std::map<std::vector<token>, std::vector<double>> laws;
    };
    std::shared_ptr<memory> laws = std::make_shared<memory>(); ///< a forward pass a prefix: once for all servers of it

    warm() {
        run r(parse_command_line(tiny(dir / "base", {"--steps=0"})));
        REQUIRE(go(r) == exit_ok);
        of = std::make_unique<loaded_run>(load_run(student));
        teacher = std::make_unique<transformer<float>>(
            model_with(of->settings.teacher_model, of->state.teacher_weights, student));
        task = task_of(of->settings);
        answers = std::make_unique<teacher_answers>(*teacher, *task, 1, 15, "teacher");
        service = std::make_unique<http_service>("127.0.0.1", 0, std::ref(*answers));
        serving = std::thread([this] { service->serve(); });
        models = (*answers)("GET", "/v1/models", "").body;
    }
    ~warm() {
        service->stop();
        serving.join();
    }
    flags learner(const std::string& directory, const flags& more) const {
        return tiny(directory, with({"--start-from=" + student, "--steps=4"}, more));
    }
    flags served(const std::string& directory, const std::string& url, const flags& more) const {
        return learner(directory,
                       with({"--teacher-url=" + url, "--teacher-silence=20", "--teacher-patience=60"}, more));
    }
    /// Makes it, or another model, the law of a server.
    void teach(teacher_server& server, double temperature = 1, teacher_answers* other = nullptr) const {
        server.right.law.other = [=, says = other ? other : answers.get(),
                                  known = other || temperature != 1 ? std::make_shared<memory>() : laws,
                                  longest = teacher->shape.max_length](std::span<const std::int32_t> prefix) {
            const std::lock_guard lock(known->mutex);
            std::vector<double>& law = known->laws[{prefix.begin(), prefix.end()}];
            if (!law.empty()) return law;
            law.assign(15, -std::log(15.0));
            if (std::ssize(prefix) >= longest) return law; // of a token that nobody needs
            std::vector<token> prompt(prefix.begin(), prefix.end());
            prompt.push_back(0); // asked for all ids in its place
            const json q = {{"prompt", json::array({prompt})}, {"prompt_logprobs", 15}};
            const json a = json::parse((*says)("POST", "/v1/completions", q.dump()).body);
            double sum = 0;
            for (const auto& [id, entry] : a["choices"][0]["prompt_logprobs"].back().items()) {
                double& x = law[std::stoul(id)];
                x = entry["logprob"].get<double>() / temperature;
                sum += std::exp(x);
            }
            if (temperature != 1)
                for (double& x : law) x -= std::log(sum);
            return law;
        };
    }
};
const warm& base() {
    static const warm made;
    return made;
}

struct ended {
    std::vector<float> student;
    std::string consumed;
    json report;
};
ended run_of(const flags& arguments, exit_code code = exit_ok) {
    const command c = parse_command_line(arguments);
    run r(c);
    REQUIRE(go(r) == code);
    const std::string& d = c.settings.run.directory;
    return {r.state().student_weights, read_file(d + "/consumed.jsonl"), json::parse(read_file(d + "/report.json"))};
}

// How often each sequence was learnt from.
std::map<std::int64_t, int> learnt(const std::string& consumed) {
    std::map<std::int64_t, int> times;
    std::istringstream lines(consumed);
    for (std::string line; std::getline(lines, line);) {
        const json j = json::parse(line);
        for (const std::int64_t s : j["sequences"]) ++times[s];
    }
    return times;
}

void contains(const std::string& text, const std::string& part) {
    CAPTURE(text);
    CHECK(text.find(part) != std::string::npos);
}

} // namespace

TEST_CASE("opd-serve-teacher is asked at the url that it writes, and leaves on SIGTERM") { // first: it forks
    const scratch dir;
    run r(parse_command_line(tiny(dir / "base", {"--steps=0"})));
    REQUIRE(go(r) == exit_ok);
    const std::string checkpoint = dir / "base/checkpoints/student.ckpt", file = dir / "url";
    const pid_t child = ::fork();
    if (child == 0) {
        const bool silent = std::freopen("/dev/null", "w", stdout) && std::freopen("/dev/null", "w", stderr);
        const std::vector<const char*> argv{"opd-serve-teacher", "--checkpoint", checkpoint.c_str(), "--port=0",
                                            "--url-file",        file.c_str(),   "--threads=1"};
        ::_exit(silent ? serve_main(static_cast<int>(argv.size()), argv.data()) : 99);
    }
    REQUIRE(child > 0);
    for (int i = 0; i < 6000 && !fs::exists(file); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::string url = read_file(file);
    url.erase(url.find('\n'));
    config c = load_run(checkpoint).settings;
    c.served.url = url;
    c.distill.estimator = "lightning";
    const server_identity is = served_teacher(c).identity();
    CHECK(is.model == "teacher");
    CHECK(is.vocabulary == 15);
    CHECK(is.context == c.teacher_model.max_length + 1);
    CHECK(is.teacher == print_of_teacher(r.state().teacher_weights));
    ::kill(child, SIGTERM);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    const char* const none[] = {"opd-serve-teacher"};
    CHECK(serve_main(1, none) == exit_usage);
    const char* const no_file[] = {"opd-serve-teacher", "--checkpoint=/nowhere"};
    CHECK(serve_main(2, no_file) == exit_input);
}

TEST_CASE("a run with opd-serve-teacher ends in the bits of one with the teacher in its process") {
    const scratch dir;
    const std::string url = base().service->url();
    const std::vector<flags> asks{
        {"--estimator=lightning"},        {"--estimator=mc", "--m=1"},
        {"--estimator=mc", "--m=3"},      {"--estimator=threshold", "--budget=3"},
        {"--estimator=topk", "--k=3"},    {"--estimator=topk", "--k=3", "--topk-from=student"},
        {"--estimator=topk_rw", "--k=3"}, {"--estimator=mc", "--m=2", "--rollout-top-p=0.9"}};
    const std::vector<flags> schedules{{"--schedule=sync"},
                                       {"--schedule=sync", "--mini-batches=2", "--answers=2"},
                                       {"--schedule=step-off", "--schedule-k=2", "--driver=virtual"},
                                       {"--schedule=controlled", "--schedule-k=1", "--driver=virtual"},
                                       {"--schedule=async", "--tau=2", "--driver=virtual"}};
    for (std::size_t i = 0; i < asks.size(); ++i)
        for (std::size_t j = 0; j < schedules.size(); ++j) {
            if (j > 0 && i != 4) continue;
            const flags how = with(with(asks[i], schedules[j]), {"--overwrite"});
            CAPTURE(asks[i].front() + " " + schedules[j].front());
            const ended own = run_of(base().learner(dir / "own", how));
            const ended far = run_of(base().served(dir / "far", url, how));
            CHECK(far.student == own.student);
            CHECK(far.consumed == own.consumed);
            const auto& told = far.report["schedule"]["served_teacher"];
            CHECK(told["scored"] == std::ssize(learnt(far.consumed)));
            CHECK(told["retries"] == 0);
            CHECK(told["probe"]["sigma_delta"] == 0.0);
            CHECK(told["probe"]["reference_sigma_delta"].get<double>() < 1e-4);
            CHECK(told["probe"]["temperature"] == "good");
            CHECK(told["probe"]["noise"] == "good");
        }
    // the tail is 1 - sum of what a list has, which float rounds
    const flags tail{"--estimator=tail_bucket", "--k=3"};
    const ended own = run_of(base().learner(dir / "own-tail", tail)),
                far = run_of(base().served(dir / "far-tail", url, tail));
    double most = 0, off = 0;
    for (std::size_t i = 0; i < own.student.size(); ++i)
        most = std::max(most, std::abs(double{own.student[i]})),
        off = std::max(off, std::abs(double{own.student[i]} - double{far.student[i]}));
    CHECK(off < 1e-3 * most);
    // no checkpoint of such a run has a teacher, and it goes on without
    std::string settings;
    CHECK(load_checkpoint(dir / "far/checkpoints/latest.ckpt", settings).teacher_weights.empty());
}

TEST_CASE("the same in every other dialect") {
    const scratch dir;
    for (const auto& [ask, dialects] : std::vector<std::pair<flags, std::vector<dialect>>>{
             {{"--estimator=lightning"}, {dialect::sglang, dialect::llama_cpp, dialect::openai_echo}},
             {{"--estimator=topk", "--k=4"}, {dialect::sglang, dialect::llama_cpp, dialect::openai_echo}},
             {{"--estimator=threshold", "--budget=3"}, {dialect::sglang}}}) {
        const ended own = run_of(base().learner(dir / "own", with(ask, {"--overwrite"})));
        for (const dialect d : dialects) {
            CAPTURE(ask.front() + " " + to_string(d));
            teacher_server server(d);
            base().teach(server);
            const ended far =
                run_of(base().served(dir / "far", server.url(),
                                     with(ask, {"--overwrite", std::string("--teacher-dialect=") + to_string(d)})));
            CHECK(far.student == own.student);
            CHECK(far.consumed == own.consumed);
            CHECK(far.report["schedule"]["served_teacher"]["probe"]["tokens"].get<int>() > 900);
        }
    }
}

TEST_CASE("of a server that hangs, halves, refuses and comes back every response is learnt from once") {
    const scratch dir;
    const flags ask{"--estimator=topk", "--k=3", "--steps=8"};
    const ended own = run_of(base().learner(dir / "own", ask));
    for (const flags& schedule : std::vector<flags>{
             {"--schedule=sync"}, {"--schedule=step-off", "--schedule-k=1"}, {"--schedule=async", "--tau=2"}}) {
        CAPTURE(schedule.front());
        teacher_server server(dialect::vllm);
        base().teach(server);
        server.react = [](int n, const json&) {
            reaction r;
            n -= 32;                        // the probe's
            if (n < 0 || n >= 24) return r; // it is back for good
            if (n % 9 == 1) r.does = reaction::hangs;
            if (n % 5 == 2) r = {reaction::says, 500, {}, "{}"};
            if (n % 7 == 3) r.does = reaction::halves;
            if (n % 7 == 5) r.does = reaction::closes;
            if (n % 8 == 6) r.edit = [](json& a) { a["choices"].erase(0); };
            return r;
        };
        const ended far = run_of(base().served(dir / "far", server.url(),
                                               with(with(ask, schedule), {"--overwrite", "--teacher-silence=0.3"})));
        const auto times = learnt(far.consumed);
        CHECK(std::ssize(times) == 8 * batch);
        for (const auto& [sample, n] : times) CHECK(n == 1);
        CHECK(far.report["schedule"]["served_teacher"]["retries"].get<int>() > 0);
        if (schedule.front() != "--schedule=sync") continue;
        CHECK(far.student == own.student);
        CHECK(far.consumed == own.consumed);
    }
}

TEST_CASE("a server that stays away ends the run, which goes on with another") {
    const scratch dir;
    const flags ask{"--estimator=lightning", "--steps=8"};
    for (const flags& schedule : std::vector<flags>{{"--schedule=sync"}, {"--schedule=step-off", "--driver=virtual"}}) {
        const ended whole = run_of(base().learner(dir / "whole", with(with(ask, schedule), {"--overwrite"})));
        std::atomic<int> n = 0;
        teacher_server server(dialect::vllm);
        base().teach(server);
        // all laws are known once a run has ended: the next one's patience is not spent on them, be the machine slow
        run_of(base().served(dir / "known", server.url(), with(with(ask, schedule), {"--overwrite"})));
        server.react = [&n](int, const json&) {
            return n++ < 40 ? reaction{} : reaction{reaction::says, 503, {}, "{\"detail\": \"gone\"}"};
        };
        const flags first = base().served(dir / "parts", server.url(),
                                          with(with(ask, schedule), {"--overwrite", "--teacher-patience=3"}));
        const std::string text = refusal(first, exit_peer);
        contains(text, server.url());
        contains(text, "gone");
        const ended far = run_of({"--run-dir=" + dir / "parts", "--resume", "--quiet",
                                  "--teacher-url=" + base().service->url(), "--teacher-patience=60"});
        CHECK(far.student == whole.student);
        CHECK(far.consumed == whole.consumed);
    }
    CHECK(exit_of(with({"opd-train"},
                       base().served(dir / "none", teacher_server(dialect::vllm, teacher_server::presence::gone).url(),
                                     with(ask, {"--teacher-patience=0.1"})))) == exit_peer);
}

TEST_CASE("the probe refuses by name what is not the teacher, and goes on where it is told to") {
    const scratch dir;
    const auto attempt = [&](const teacher_server& server, const flags& more = {}) {
        return base().served(dir / "run", server.url(),
                             with({"--estimator=lightning", "--steps=1", "--overwrite",
                                   std::string("--teacher-dialect=") + to_string(server.speaks)},
                                  more));
    };
    const auto refused = [&](teacher_server& server, const std::string& verdict, bool goes_on = true) {
        CAPTURE(verdict);
        contains(refusal(attempt(server), exit_peer), verdict + ": ");
        if (verdict == "temperature")
            contains(refusal(attempt(server, {"--accept-teacher=noise,shift"}), exit_peer), verdict + ": ");
        if (!goes_on) return;
        const ended r = run_of(attempt(server, {"--accept-teacher=" + verdict}));
        const auto& accepted = r.report["schedule"]["served_teacher"]["probe"]["accepted"];
        REQUIRE(accepted.size() == 1);
        contains(accepted[0], verdict + ": ");
    };
    {
        teacher_server hot(dialect::vllm); // processed with a temperature
        base().teach(hot, 1.5);
        refused(hot, "temperature");
    }
    {
        teacher_server noisy(dialect::openai_echo);
        base().teach(noisy);
        std::atomic<std::uint64_t> n = 0;
        noisy.right.error = [&] { return -8 * opd::test::toy_law::uniform(n++); }; // never above 0
        refused(noisy, "noise");
    }
    {
        teacher_server other(dialect::vllm); // 32 ids, of which the student knows 15
        refused(other, "ids", false);
    }
    {
        teacher_server late(dialect::openai_echo); // each score is that of the token before
        const auto student =
            model_with(base().of->settings.student_model, base().of->state.student_weights, base().student);
        teacher_answers same(student, *base().task, 1, 15, "student"); // whose scores show a shift best
        base().teach(late, 1, &same);
        late.react = [](int, const json&) {
            reaction r;
            r.edit = [](json& a) {
                for (json& c : a["choices"]) {
                    json& own = c["logprobs"]["token_logprobs"];
                    own.erase(1);
                    own.push_back(own.back());
                }
            };
            return r;
        };
        contains(refusal(attempt(late), exit_peer), "shift: ");
    }
    const auto saying = [&](const std::function<void(json&)>& edit) { // of itself
        auto server = std::make_unique<teacher_server>(dialect::vllm);
        base().teach(*server);
        json models = json::parse(base().models);
        edit(models["data"][0]);
        server->models = models.dump();
        return server;
    };
    refused(*saying([](json& m) { m["opd"]["vocabulary"] = 14; }), "vocabulary");
    refused(*saying([](json& m) { m.erase("opd"), m["meta"]["n_vocab"] = 12; }), "vocabulary");
    refused(*saying([](json& m) { m["opd"]["tokenizer"] = "else"; }), "tokenizer");
    refused(*saying([](json& m) { m["max_model_len"] = 20; }), "context");
    run_of(attempt(*saying([](json& m) { m["opd"]["vocabulary"] = 16; }))); // padding, of which no list has any
    run_of(attempt(*saying([](json& m) { m = "nonsense"; })));
    contains(refusal(attempt(*saying([](json&) {}), {"--accept-teacher=heat"}), exit_usage),
             "--accept-teacher: 'heat' is not one of vocabulary, tokenizer");
}

TEST_CASE("settings that a served teacher cannot meet are refused by name") {
    const scratch dir;
    const auto usage = [&](const flags& more, const std::string& part) {
        contains(refusal(base().served(dir / "run", "http://127.0.0.1:1", more), exit_usage), part);
    };
    usage({"--estimator=reverse_kl"}, "not reverse_kl");
    usage({"--estimator=topk", "--temperature=0.9"}, "not with --temperature 0.9");
    usage({"--estimator=mc", "--m=2", "--teacher-dialect=llama_cpp"}, "--teacher-dialect llama_cpp does not give");
    usage({"--estimator=topk", "--topk-from=student", "--teacher-dialect=openai_echo"}, "does not give");
    usage({"--estimator=lightning", "--teacher-dialect=vlm"}, "not 'vlm'");
    usage({"--estimator=lightning", "--teacher-requests=0"}, "--teacher-requests must lie in");
    usage({"--estimator=lightning", "--offline=" + dir / "set"}, "--teacher-url is not used by --offline");
    contains(refusal(base().served(dir / "run", "https://127.0.0.1:1", {"--estimator=lightning"}), exit_usage), "TLS");
    contains(refusal(tiny(dir / "run", {"--estimator=lightning", "--teacher-url=http://127.0.0.1:1"}), exit_usage),
             "needs --start-from");
    contains(refusal(base().learner(dir / "run", {"--teacher-patience=3"}), exit_usage),
             "--teacher-patience is not used by a run without --teacher-url");
}

TEST_CASE("what opd-serve-teacher answers to requests that are none") {
    teacher_answers& server = *base().answers;
    const auto status = [&](const std::string& path, const std::string& body) {
        return server("POST", path, body).status;
    };
    const std::string c = "/v1/completions", g = "/inference/v1/generate";
    CHECK(status(c, R"({"prompt": [[1, 2, 3]], "prompt_logprobs": 15})") == 200);
    CHECK(status(c, R"({"prompt": [1, 2, 3]})") == 200);
    for (const char* body :
         {"", "[]", "{", R"({"prompt": "text"})", R"({"prompt": ["text"]})", R"({"prompt": []})", R"({"prompt": [[]]})",
          R"({"prompt": [[1, 15]]})", R"({"prompt": [[1, -1]]})", R"({"prompt": [[1, 0.5]]})",
          R"({"prompt": [[1, 2]], "prompt_logprobs": 16})", R"({"prompt": [[1, 2]], "prompt_logprobs": "1"})"}) {
        CAPTURE(body);
        const http_reply r = server("POST", c, body);
        CHECK(r.status == 400);
        CHECK(json::parse(r.body)["error"]["message"].get<std::string>() != "");
    }
    CHECK(status(c, json({{"prompt", {std::vector<int>(1000, 1)}}}).dump()) == 400);
    CHECK(status(c, R"({"prompt": [[1, 2]], "model": "other"})") == 404);
    CHECK(status("/v1/chat/completions", "{}") == 404);
    for (const char* body :
         {R"({"token_ids": [1, 2]})", R"({"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": []}})",
          R"({"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [[15]]}})",
          R"({"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [3]}})",
          R"({"token_ids": [1, 2], "sampling_params": {"prompt_logprob_start": 2, "prompt_logprob_token_ids": []}})"})
        CHECK(status(g, body) == 400);
    CHECK(status(g, R"({"token_ids": [1, 2], "sampling_params": {"prompt_logprob_token_ids": [[0, 3]]}})") == 200);
    CHECK(server("GET", "/health", "").status == 200);
    CHECK_THROWS_AS(http_service("127.0.0.1", std::stoi(base().service->url().substr(17)), std::ref(server)), failure);
}

// --- opd-score

namespace {

int score(const flags& arguments) {
    std::vector<const char*> argv{"opd-score"};
    for (const std::string& a : arguments) argv.push_back(a.c_str());
    interrupted = false;
    return score_main(static_cast<int>(argv.size()), argv.data());
}

// A set of one draw a row: its sequences as lines, and its columns.
struct columns {
    std::vector<std::string> lines;
    std::vector<std::int32_t> tokens, ids, best;
    std::vector<float> log_mu, log_q, list, tail;
    bool operator==(const columns& o) const {
        return tokens == o.tokens && ids == o.ids && log_mu == o.log_mu && log_q == o.log_q;
    }
};
columns columns_of(const std::string& folder, bool lists = false) {
    const opd::data::rollout_set set(folder);
    columns r;
    for (index_t i = 0; i < set.sequences(); ++i) {
        opd::data::rollouts one = set.read(i, 1);
        const auto tokens = one.tokens();
        const auto samples = one.cache<opd::teacher::samples<std::int32_t>>();
        const index_t n = one.rows();
        const std::vector<std::int32_t> all(tokens.data, tokens.data + tokens.size);
        r.tokens.insert(r.tokens.end(), all.begin(), all.end());
        r.ids.insert(r.ids.end(), samples.ids.row(0), samples.ids.row(0) + n);
        r.log_mu.insert(r.log_mu.end(), samples.log_mu.row(0), samples.log_mu.row(0) + n);
        r.log_q.insert(r.log_q.end(), samples.log_q.row(0), samples.log_q.row(0) + n);
        r.lines.push_back(json({{"prompt", std::vector(all.begin(), all.end() - n)},
                                {"response", std::vector(all.end() - n, all.end())},
                                {"log_mu", std::vector(samples.log_mu.row(0), samples.log_mu.row(0) + n)}})
                              .dump());
        if (!lists) continue;
        const auto support = one.cache<opd::teacher::support<std::int32_t>>();
        for (index_t t = 0; t < n; ++t) {
            r.best.insert(r.best.end(), support.ids.row(t), support.ids.row(t) + support.ids.cols);
            r.list.insert(r.list.end(), support.log_q.row(t), support.log_q.row(t) + support.ids.cols);
            r.tail.push_back(support.log_tail[t]);
        }
    }
    return r;
}
void write_lines(const std::string& path, const std::vector<std::string>& lines, std::size_t n) {
    std::ofstream out(path);
    for (std::size_t i = 0; i < n; ++i) out << lines[i] << "\n";
}

} // namespace

TEST_CASE("opd-score writes what --write-offline writes, with any teacher, and opd-train --offline learns the same") {
    const scratch dir;
    const std::string url = base().service->url(), lines = dir / "lines.jsonl", ckpt = base().student;
    const auto write = [&](const std::string& folder, const flags& more) {
        interrupted = false;
        return write_offline(parse_command_line(
            with({"--run-dir=" + base().dir / "base", "--quiet", "--write-offline=" + folder, "--offline-sequences=24"},
                 more)));
    };
    REQUIRE(write(dir / "set", {}) == exit_ok);
    REQUIRE(write(dir / "far", {"--teacher-url=" + url}) == exit_ok); // the trainer's own rollout, scored elsewhere
    const columns whole = columns_of(dir / "set");
    CHECK(columns_of(dir / "far") == whole);
    CHECK(read_file(dir / "far/index.jsonl") == read_file(dir / "set/index.jsonl")); // fingerprints and bytes
    write_lines(lines, whole.lines, 10);
    const flags common{"--responses=" + lines, "--reference=" + ckpt, "--threads=2"};
    REQUIRE(score(with(common, {"--out=" + dir / "own"})) == exit_ok);
    write_lines(lines, whole.lines, 24); // there are more now: it goes on
    REQUIRE(score(with(common, {"--out=" + dir / "own"})) == exit_ok);
    CHECK(columns_of(dir / "own") == whole);
    REQUIRE(score(with(common, {"--out=" + dir / "served", "--teacher-url=" + url})) == exit_ok);
    CHECK(columns_of(dir / "served") == whole);
    REQUIRE(score({"--responses=" + lines, "--out=" + dir / "bare", "--teacher-url=" + url, "--vocabulary=15"}) ==
            exit_ok);
    CHECK(columns_of(dir / "bare") == whole); // no checkpoint at all: log_mu is in the lines
    const auto prints = [&](const char* set) { return opd::data::rollout_set(dir / set).description().prints; };
    CHECK(prints("own") == prints("set"));
    CHECK(prints("served") == prints("set"));
    CHECK(prints("bare").scoring_teacher == prints("set").scoring_teacher);
    CHECK(prints("bare").reference_policy == "");

    REQUIRE(score(with(common, {"--out=" + dir / "own-k", "--k=4", "--id-bits=8"})) == exit_ok);
    REQUIRE(score(with(common, {"--out=" + dir / "far-k", "--k=4", "--teacher-url=" + url})) == exit_ok);
    const columns own_k = columns_of(dir / "own-k", true), far_k = columns_of(dir / "far-k", true);
    CHECK(own_k == whole);
    CHECK(far_k == whole);
    CHECK(far_k.best == own_k.best);
    CHECK(far_k.list == own_k.list);
    REQUIRE(own_k.tail.size() == far_k.tail.size());
    for (std::size_t i = 0; i < own_k.tail.size(); ++i) // of mass, to what float leaves of 1 - sum
        CHECK(std::abs(std::exp(double{own_k.tail[i]}) - std::exp(double{far_k.tail[i]})) < 3e-7);

    const auto student = [&](const char* set) {
        return run_of(base().learner(dir / "run", {"--estimator=lightning", "--offline=" + dir / set, "--overwrite"}))
            .student;
    };
    const auto learnt_from_set = student("set");
    CHECK(student("own") == learnt_from_set);
    CHECK(student("far-k") == learnt_from_set);
}

TEST_CASE("opd-score refuses lines that do not fit, and teachers that are none, by name") {
    const scratch dir;
    const std::string lines = dir / "lines.jsonl", ckpt = base().student;
    std::ofstream(lines) << R"({"prompt": [1, 2], "response": [3, 14]})"
                         << "\n\n"
                         << R"({"prompt": [1, 2], "response": [3]})"
                         << "\n";
    const auto refused = [&](const std::string& second, const std::string& part, bool reference = true) {
        std::ofstream(lines) << R"({"prompt": [1, 2], "response": [3, 14]})"
                             << "\n"
                             << second << "\n";
        score_settings s;
        s.responses = lines, s.out = dir / "set";
        (reference ? s.reference : s.teacher) = ckpt;
        try {
            interrupted = false;
            score_responses(s);
            FAIL_CHECK("it was not refused");
        } catch (const failure& e) {
            CHECK(e.code == exit_input);
            contains(e.what(), part);
        }
        CHECK_FALSE(fs::exists(dir / "set/shard-000000.safetensors"));
    };
    refused("{", "line 2: is no JSON object");
    refused(R"({"prompt": [1, 2]})", "line 2: has no response");
    refused(R"({"prompt": [], "response": [1]})", "line 2: has no prompt");
    refused(R"({"prompt": [1], "response": [15]})", "line 2: has the id 15 in response; known are 15");
    refused(R"({"prompt": [1], "response": [1.5]})", "line 2: has the id 1.5");
    refused(R"({"prompt": [1], "response": [1], "logmu": [0]})", "line 2: has 'logmu'");
    refused(R"({"prompt": [1], "response": [1], "log_mu": [0.5]})", "log_mu that is no log-prob");
    refused(R"({"prompt": [1], "response": [1], "log_mu": []})", "not 1 numbers");
    refused(R"({"prompt": [1], "response": [1], "log_mu": [-90]})", "nats from that of --reference");
    refused(R"({"prompt": [1], "response": [1], "sample": -1})", "sample that is no integer");
    refused(json({{"prompt", std::vector<int>(500, 1)}, {"response", {1}}}).dump(), "has 501 tokens");
    refused(R"({"prompt": [1], "response": [1]})", "line 1: has no log_mu", false);

    const flags to{"--responses=" + lines, "--out=" + dir / "set"};
    CHECK(score(with(to, {})) == exit_usage);
    CHECK(score(with(to, {"--teacher=" + ckpt, "--teacher-url=http://127.0.0.1:1"})) == exit_usage);
    CHECK(score(with(to, {"--teacher-url=http://127.0.0.1:1"})) == exit_usage); // how many ids?
    CHECK(score(with(to, {"--reference=" + ckpt, "--vocabulary=15"})) == exit_usage);
    CHECK(score(with(to, {"--reference=" + ckpt, "--k=16"})) == exit_usage);
    CHECK(score(with(to, {"--reference=" + ckpt, "--teacher-url=http://127.0.0.1:1", "--temperature=2"})) ==
          exit_usage);
    CHECK(score({"--responses=/nowhere", "--out=" + dir / "set", "--reference=" + ckpt}) == exit_input);
    CHECK(score({"--help"}) == exit_ok);
}
