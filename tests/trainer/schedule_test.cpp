// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan
//
// Whole runs with overlapping stages on threads: the schedules that promise it end in the weights of sync, every sequence is
// learnt from once, interrupted or not, and the run directory says what happened.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "checkpoint.hpp"
#include "files.hpp"
#include "in_flight.hpp"
#include "run.hpp"

namespace {

using namespace trainer;
namespace fs = std::filesystem;

struct scratch {
    fs::path path;
    scratch() {
        std::string name = (fs::temp_directory_path() / "opd-train-test-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~scratch() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

constexpr int steps = 17, prompts = 5;

using flags = std::vector<std::string>;

command parse(const std::string& directory, const flags& more) {
    flags a = {"opd-train",
               "--run-dir",
               directory,
               "--quiet",
               "--max-operand=30",
               "--max-task-steps=6",
               "--teacher-width=12",
               "--teacher-layers=1",
               "--teacher-heads=2",
               "--teacher-kv-heads=1",
               "--teacher-head-dim=6",
               "--teacher-ffn=12",
               "--student-width=12",
               "--student-layers=1",
               "--student-heads=2",
               "--student-kv-heads=1",
               "--student-head-dim=6",
               "--student-ffn=12",
               "--teacher-steps=5",
               "--student-max-steps=0",
               "--eval-prompts=8",
               "--eval-samples=0",
               "--eval-every=8",
               "--eval-every-prompts=4",
               "--checkpoint-every=4",
               "--log-every=3",
               "--threads=2",
               "--slots=6",
               "--estimator=mc",
               "--steps=" + std::to_string(steps),
               "--prompts=" + std::to_string(prompts)};
    a.insert(a.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const auto& x : a) argv.push_back(x.c_str());
    return parse_command_line(static_cast<int>(argv.size()), argv.data());
}

flags with(flags a, const flags& more) {
    a.insert(a.end(), more.begin(), more.end());
    return a;
}

// Runs silently: the table of a tiny run says nothing.
exit_code go(run& r) {
    struct silence {
        int keep = ::dup(STDOUT_FILENO);
        bool silent = (std::fflush(stdout), std::freopen("/dev/null", "w", stdout)) != nullptr;
        ~silence() {
            std::fflush(stdout);
            if (silent) ::dup2(keep, STDOUT_FILENO);
            ::close(keep);
            interrupted = false;
        }
    } silence;
    interrupted = false;
    return r.go();
}

exit_code complete(const std::string& directory, const flags& more) {
    run r(parse(directory, more));
    return go(r);
}

std::vector<float> weights_of(const std::string& directory) {
    std::string settings;
    return load_checkpoint(directory + "/checkpoints/distill.ckpt", settings).student_weights;
}

std::vector<nlohmann::json> lines_of(const std::string& path) {
    std::vector<nlohmann::json> r;
    std::istringstream lines(read_file(path));
    for (std::string line; std::getline(lines, line);) r.push_back(nlohmann::json::parse(line));
    return r;
}

void check_each_once(const std::string& directory) {
    std::set<std::int64_t> seen;
    std::int64_t step = 0, count = 0;
    for (const auto& line : lines_of(directory + "/consumed.jsonl")) {
        CHECK(line["step"] == ++step);
        for (const std::int64_t s : line["sequences"]) {
            seen.insert(s);
            ++count;
        }
    }
    CHECK(step == steps);
    CHECK(count == steps * prompts);
    CHECK(static_cast<std::int64_t>(seen.size()) == count);
    CHECK(*seen.begin() == 0);
    CHECK(*seen.rbegin() == count - 1);
}

} // namespace

TEST_CASE("k = 0 and tau = 0 end in the weights of sync, bit for bit") {
    const scratch dir;
    REQUIRE(complete(dir / "sync", {}) == exit_ok);
    const auto reference = weights_of(dir / "sync");
    int i = 0;
    for (const flags& f :
         {flags{"--schedule=step-off", "--schedule-k=0"}, flags{"--schedule=controlled", "--schedule-k=0"},
          flags{"--schedule=async", "--tau=0"}, flags{"--schedule=async", "--tau=0", "--staleness-policy=edf"},
          flags{"--schedule=async", "--tau=0", "--weight-update=finish_first", "--rollout-workers=3"},
          flags{"--schedule=async", "--tau=0", "--weight-update=abort", "--score-batch=1", "--score-flush=0"}}) {
        const std::string directory = dir / std::to_string(i++);
        CAPTURE(f[0]);
        REQUIRE(complete(directory, f) == exit_ok);
        CHECK(weights_of(directory) == reference);
        CHECK(read_file(directory + "/consumed.jsonl") == read_file(dir / "sync/consumed.jsonl"));
    }
    REQUIRE(complete(dir / "stale", {"--schedule=step-off", "--schedule-k=1"}) == exit_ok);
    CHECK(weights_of(dir / "stale") != reference);
}

TEST_CASE("k updates off: interrupted or not, the weights are the same") {
    const scratch dir;
    for (const char* kind : {"--schedule=step-off", "--schedule=controlled"}) {
        CAPTURE(kind);
        const flags f = {kind, "--schedule-k=2"};
        const std::string whole = dir / (std::string("whole") + kind);
        REQUIRE(complete(whole, f) == exit_ok);
        for (int stop : {6, 7, 10, 13, 20}) { // the teacher takes 5 steps, the last of which does not count
            CAPTURE(stop);
            const std::string directory = dir / (std::to_string(stop) + kind);
            {
                run first(parse(directory, f));
                first.stop_after(stop);
                REQUIRE(go(first) == exit_interrupted);
                CHECK(first.state().step == stop - 4);
            }
            REQUIRE(complete(directory, with(f, {"--resume"})) == exit_ok);
            CHECK(weights_of(directory) == weights_of(whole));
            CHECK(read_file(directory + "/consumed.jsonl") == read_file(whole + "/consumed.jsonl"));
        }
    }
}

TEST_CASE("async: interrupted at every second step, every sequence is learnt from once") {
    const scratch dir;
    int with_partials = 0, with_scores = 0;
    for (const char* policy : {"capacity", "edf", "in_order", "areal"})
        for (const char* update : {"keep", "abort", "finish_first"}) {
            CAPTURE(policy);
            CAPTURE(update);
            // few lanes and permits for all: something is in rollout when the first steps are complete
            const flags f = {"--schedule=async",
                             "--tau=40",
                             "--slots=1",
                             "--rollout-workers=1",
                             "--staleness-policy=" + std::string(policy),
                             "--weight-update=" + std::string(update)};
            const std::string directory = dir / (std::string(policy) + update);
            {
                run first(parse(directory, f));
                first.stop_after(5);
                REQUIRE(go(first) == exit_interrupted);
            }
            for (;;) {
                std::string settings;
                const auto state = load_checkpoint(directory + "/checkpoints/latest.ckpt", settings);
                const auto flight = in_flight_of(state.in_flight, [&](auto sequences) {
                    with_scores += !sequences.empty();
                    return std::vector<std::shared_ptr<const scored_sequence>>(sequences.size());
                });
                CHECK(flight.version == state.step);
                for (const auto& e : flight.sequences)
                    with_partials += e.sequence && e.where <= opd::sched::outstanding_sequence::place::rollout;
                run next(parse(directory, with(f, {"--resume"})));
                next.stop_after(2);
                const exit_code code = go(next);
                if (code == exit_ok) break;
                REQUIRE(code == exit_interrupted);
            }
            check_each_once(directory);
        }
    CHECK(with_scores > 0);
    // on a busy machine it can be that nothing was in rollout at any of these moments
    for (int attempt = 0; with_partials == 0 && attempt < 50; ++attempt) {
        const std::string directory = dir / ("again" + std::to_string(attempt));
        run first(parse(directory, {"--schedule=async", "--tau=40", "--slots=1", "--rollout-workers=1"}));
        first.stop_after(5);
        REQUIRE(go(first) == exit_interrupted);
        std::string settings;
        const auto flight = in_flight_of(
            load_checkpoint(directory + "/checkpoints/latest.ckpt", settings).in_flight,
            [](auto sequences) { return std::vector<std::shared_ptr<const scored_sequence>>(sequences.size()); });
        for (const auto& e : flight.sequences)
            with_partials += e.sequence && e.where <= opd::sched::outstanding_sequence::place::rollout;
    }
    CHECK(with_partials > 0);
}

TEST_CASE("a run directory says how stale, how busy and how fast") {
    const scratch dir;
    REQUIRE(complete(dir / "run", {"--schedule=async", "--tau=3"}) == exit_ok);
    const auto report = nlohmann::json::parse(read_file(dir / "run/report.json"));
    const auto& s = report["schedule"];
    CHECK(s["steps"] == steps);
    CHECK(s["sequences"] == steps * prompts);
    CHECK(s["throughput"].get<double>() > 0);
    CHECK(s["overlap"].get<double>() > 0);
    CHECK(s["overlap"].get<double>() < 3);
    const auto mean = [&](const char* lag) { return s.at("lag").at(lag).at("versions").at("mean").get<double>(); };
    CHECK(mean("start") <= 3); // M/B - 1
    CHECK(mean("oldest_token") <= mean("start") + 1e-9);
    CHECK(mean("mean_token") <= mean("oldest_token") + 1e-9);
    CHECK(mean("newest_token") <= mean("mean_token") + 1e-9);
    CHECK(mean("newest_token") >= 0);
    int with_schedule = 0;
    for (const auto& line : lines_of(dir / "run/log.jsonl")) {
        if (line.value("stage", "") != "distill") continue;
        ++with_schedule;
        CHECK(line["schedule"]["version"] == line["step"]);
        CHECK(line["schedule"]["depth"].contains("ready"));
        CHECK(line["mismatched"] == 0);
    }
    CHECK(with_schedule >= steps / 3);
    const auto trace = nlohmann::json::parse(read_file(dir / "run/trace.json"));
    std::set<std::string> kinds;
    for (const auto& e : trace["traceEvents"])
        if (e["ph"] == "X") kinds.insert(e["name"].get<std::string>());
    for (const char* kind : {"rollout", "teacher", "learner"}) CHECK(kinds.count(kind) == 1);
    for (const char* clock : clock_names)
        if (std::string(clock) != "student_warmup") CHECK(report["seconds"][clock].get<double>() > 0);
}

TEST_CASE("what fails on a stage's thread ends the run with its exit code") {
    const scratch dir;
    for (const flags& f : {flags{"--loss-limit=1e-9"}, flags{"--rate=1e38", "--warmup=0"}}) {
        const std::string directory = dir / f[0];
        run r(parse(directory, with({"--schedule=async", "--teacher-rate=1e-9"}, f)));
        try {
            go(r);
            FAIL("it did not fail");
        } catch (const failure& e) {
            CHECK(e.code == exit_numeric);
        }
    }
}

TEST_CASE("damaged sequences in flight are recognised") {
    in_flight state;
    state.version = 3;
    state.scheduler = "abc";
    auto& e = state.sequences.emplace_back();
    e.where = opd::sched::outstanding_sequence::place::ready;
    trajectory t;
    t.sample = 7;
    t.tokens = {1, 2, 3};
    t.prompt_length = 2;
    t.log_mu = {-0.5f};
    t.versions = {2};
    e.sequence = std::make_shared<const trajectory>(t);
    const std::string bytes = to_bytes(state);
    const auto score = [](auto sequences) {
        return std::vector<std::shared_ptr<const scored_sequence>>(sequences.size(),
                                                                   std::make_shared<const scored_sequence>());
    };
    const in_flight again = in_flight_of(bytes, score);
    CHECK(again.version == 3);
    CHECK(again.scheduler == "abc");
    REQUIRE(again.sequences.size() == 1);
    CHECK(*again.sequences[0].sequence == t);
    CHECK(again.sequences[0].scored != nullptr);
    CHECK(to_bytes(again) == bytes);
    for (std::size_t size = 0; size < bytes.size(); ++size)
        CHECK_THROWS_WITH(in_flight_of(std::string_view(bytes).substr(0, size), score), doctest::Contains("in flight"));
    CHECK_THROWS_WITH(in_flight_of(bytes + "x", score), doctest::Contains("is too long"));
}
