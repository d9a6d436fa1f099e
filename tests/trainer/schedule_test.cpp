// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-tsan
//
// Whole runs with overlapping stages, on threads and in virtual time: the schedules that promise it end in the weights
// of sync, every sequence is learnt from once, interrupted or not, and the run directory says what happened. In virtual
// time every run is the same bit for bit, on however many threads and however often interrupted.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "run/run.hpp"
#include "schedule/in_flight.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"
#include "settings/schedule.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

namespace {

using namespace trainer;
namespace fs = std::filesystem;

using opd::test::scratch;

constexpr int steps = 17, prompts = 5;

using opd::test::flags;
using opd::test::go;
using opd::test::with;

command parse(const std::string& directory, const flags& more) {
    return parse_command_line(
        with(with({"--run-dir", directory, "--quiet", "--eval-prompts=8", "--eval-samples=0", "--eval-every=8",
                   "--eval-every-prompts=4", "--checkpoint-every=4", "--log-every=3", "--threads=2", "--slots=6",
                   "--estimator=mc", "--steps=" + std::to_string(steps), "--prompts=" + std::to_string(prompts)},
                  opd::test::small_models()),
             more));
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

// As many sequences a step as ever, of `answers` answers a prompt.
void check_each_once(const std::string& directory, int answers = 1, int steps_made = steps) {
    std::set<std::int64_t> seen;
    std::int64_t step = 0, count = 0;
    for (const auto& line : lines_of(directory + "/consumed.jsonl")) {
        CHECK(line["step"] == ++step);
        for (const std::int64_t s : line["sequences"]) {
            seen.insert(s);
            ++count;
        }
        CHECK(line.contains("prompts") == (answers > 1));
        for (std::size_t i = 0; answers > 1 && i < line["sequences"].size(); ++i)
            CHECK(line["prompts"].at(i).get<int>() == line["sequences"][i].get<int>() / answers);
    }
    CHECK(step == steps_made);
    CHECK(count == steps_made * prompts);
    CHECK(static_cast<std::int64_t>(seen.size()) == count);
    CHECK(*seen.begin() == 0);
    CHECK(*seen.rbegin() == count - 1);
}

// Rollout workers are at different points of their quanta when new weights come, and one that has them goes on while
// another has not: checkpoints find half-filled caches, begun quanta and calls, and things that wait for their end.
const flags virtually = {"--driver=virtual",      "--slots=8",           "--prefill-chunk=3",    "--rollout-workers=4",
                         "--score-batch=3",       "--cost-step=1e-4",    "--cost-step-row=5e-4", "--cost-score=2e-3",
                         "--cost-score-row=1e-5", "--cost-train=1.1e-2", "--cost-sync=1e-4"};

std::string checkpoint_of(const std::string& directory, const char* name = "distill") {
    return read_file(directory + "/checkpoints/" + name + ".ckpt");
}

// What a run says of distillation, line by line; the first line names the machine's threads.
std::string distillation_log(const std::string& directory) {
    std::string r;
    for (const auto& line : lines_of(directory + "/log.jsonl"))
        if (line.value("stage", "") == "distill") r += line.dump() + "\n";
    return r;
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
          flags{"--schedule=async", "--tau=0", "--rollout-workers=3", "--park-after=2"},
          flags{"--schedule=step-off", "--schedule-k=0", "--rollout-workers=2", "--park-after=1"},
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

TEST_CASE("answers to one prompt: k = 0 and tau = 0 end in the weights of sync; each is learnt from once") {
    const scratch dir;
    // as many sequences a step in all three runs; one answer is what a run has without being told
    REQUIRE(complete(dir / "untold", {}) == exit_ok);
    REQUIRE(complete(dir / "one", {"--answers=1"}) == exit_ok);
    for (const char* name : {"teacher", "student", "distill", "latest"})
        CHECK(checkpoint_of(dir / "one", name) == checkpoint_of(dir / "untold", name));
    CHECK(read_file(dir / "one/consumed.jsonl") == read_file(dir / "untold/consumed.jsonl"));
    const flags grouped = {"--prompts=1", "--answers=" + std::to_string(prompts)};
    REQUIRE(complete(dir / "sync", grouped) == exit_ok);
    check_each_once(dir / "sync", prompts);
    CHECK(weights_of(dir / "sync") != weights_of(dir / "one"));

    const flags four = {"--prompts=2", "--answers=4"};
    REQUIRE(complete(dir / "four", four) == exit_ok);
    int i = 0;
    for (const flags& how : {flags{}, virtually})
        for (const flags& f :
             {flags{"--schedule=step-off", "--schedule-k=0"}, flags{"--schedule=async", "--tau=0"},
              flags{"--schedule=async", "--tau=0", "--weight-update=abort", "--score-batch=3", "--score-flush=0"}}) {
            const std::string directory = dir / std::to_string(i++);
            CAPTURE(f[0]);
            REQUIRE(complete(directory, with(with(how, f), four)) == exit_ok);
            CHECK(weights_of(directory) == weights_of(dir / "four"));
            CHECK(read_file(directory + "/consumed.jsonl") == read_file(dir / "four/consumed.jsonl"));
        }
    for (const flags& f : {flags{"--schedule=step-off"}, flags{"--schedule=async", "--tau=2"},
                           flags{"--schedule=async", "--tau=3", "--staleness-policy=capacity", "--outstanding=widest"},
                           flags{"--schedule=async", "--tau=3", "--staleness-policy=retry", "--outstanding=10"},
                           flags{"--schedule=async", "--staleness-policy=areal"}}) {
        const std::string directory = dir / std::to_string(i++);
        CAPTURE(f);
        REQUIRE(complete(directory, with(grouped, f)) == exit_ok);
        check_each_once(directory, prompts);
    }
}

TEST_CASE("answers to one prompt: what is given up is made up for by whole prompts, and the last step is the last") {
    const scratch dir;
    for (const flags& how : {flags{"--slots=2", "--rollout-workers=2"}, virtually}) {
        const std::string directory = dir / how[0];
        REQUIRE(complete(directory, with(how, {"--schedule=async", "--tau=1", "--staleness-policy=drop", "--prompts=2",
                                               "--answers=3", "--outstanding=30"})) == exit_ok);
        std::set<int> seen;
        for (const auto& line : lines_of(directory + "/consumed.jsonl")) {
            CHECK(line["sequences"].size() == 6);
            for (const int s : line["sequences"]) seen.insert(s);
        }
        CHECK(seen.size() == std::size_t{6} * steps);
        if (how == virtually) CHECK(*seen.rbegin() >= 6 * steps); // some were given up
    }
}

TEST_CASE("answers to one prompt: sync is the same interrupted or not; resuming with another number is refused") {
    const scratch dir;
    const flags f = {"--prompts=2", "--answers=3"};
    REQUIRE(complete(dir / "whole", f) == exit_ok);
    for (int stop : {5, 6, 12}) {
        const std::string directory = dir / std::to_string(stop);
        {
            run first(parse(directory, f));
            first.stop_after(stop);
            REQUIRE(go(first) == exit_interrupted);
        }
        for (const flags& other : {flags{"--answers=2"}, flags{"--answers=1", "--prompts=6"}})
            CHECK_THROWS_WITH(complete(directory, with(with(f, other), {"--resume"})),
                              doctest::Contains("distill.answers"));
        REQUIRE(complete(directory, {"--resume", "--prompts=2", "--answers=3"}) == exit_ok);
        CHECK(checkpoint_of(directory) == checkpoint_of(dir / "whole"));
        CHECK(read_file(directory + "/consumed.jsonl") == read_file(dir / "whole/consumed.jsonl"));
    }
}

TEST_CASE("no steps: a schedule ends where it begins") {
    const scratch dir;
    for (const flags& how : {flags{"--schedule=async"}, with(virtually, {"--schedule=async"})}) {
        const std::string directory = dir / std::to_string(how.size());
        REQUIRE(complete(directory, with(how, {"--steps=0"})) == exit_ok);
        CHECK(read_file(directory + "/consumed.jsonl").empty());
    }
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

TEST_CASE("on threads latest.ckpt holds no machine's clock, and nothing else of a process where nothing is in flight") {
    const scratch dir;
    for (const flags& f :
         {flags{"--schedule=step-off", "--schedule-k=0"}, flags{"--schedule=step-off", "--schedule-k=2"},
          flags{"--schedule=controlled", "--schedule-k=2"}, flags{"--schedule=async", "--tau=0"},
          flags{"--schedule=async", "--tau=0", "--speculate=ngram", "--park-after=2"}}) {
        CAPTURE(f);
        const std::string one = dir / "one", other = dir / "other", parts = dir / "parts";
        for (const std::string& gone : {one, other, parts}) fs::remove_all(gone);
        REQUIRE(complete(one, f) == exit_ok);
        // under async the workers are one of the settings
        REQUIRE(complete(other, f[0] == "--schedule=async" ? f : with(f, {"--rollout-workers=3"})) == exit_ok);
        for (const int stop : {7, 5, 0}) {
            run part(parse(parts, with(f, stop == 7 ? flags{} : flags{"--resume"})));
            part.stop_after(stop);
            REQUIRE(go(part) == (stop > 0 ? exit_interrupted : exit_ok));
        }
        CHECK(checkpoint_of(other, "distill") == checkpoint_of(one, "distill"));
        CHECK(checkpoint_of(other, "latest") == checkpoint_of(one, "latest"));
        CHECK(checkpoint_of(parts, "latest") == checkpoint_of(one, "latest"));
    }
    // a scheduler that was kept takes events at any time of another clock
    for (const char* policy : {"edf", "capacity"}) {
        const flags f = {"--schedule=async", "--tau=4", "--outstanding=widest", "--slots=2",
                         std::string("--staleness-policy=") + policy};
        const std::string directory = dir / policy;
        run first(parse(directory, f));
        first.stop_after(7);
        REQUIRE(go(first) == exit_interrupted);
        std::string settings;
        const auto flight = in_flight_of(
            load_checkpoint(directory + "/checkpoints/latest.ckpt", settings).in_flight,
            [](auto sequences) { return std::vector<std::shared_ptr<const scored_sequence>>(sequences.size()); });
        CHECK(flight.sequences.size() > 0);
        auto machine = opd::sched::scheduler::restore(schedule_of(parse(directory, f).settings), flight.scheduler);
        opd::sched::actions out;
        CHECK_NOTHROW(machine.on(opd::sched::event{}, -1e300, out)); // a tick
    }
}

TEST_CASE("the learner's threads beside rollout's and the teacher's change no byte") {
    CHECK(learner_threads_of(parse("a", {"--schedule=async", "--threads=3"}).settings) == 3);
    CHECK(learner_threads_of(parse("a", {"--schedule=async", "--threads=3", "--learner-threads=1"}).settings) == 1);
    CHECK(learner_threads_of(parse("a", {"--threads=3"}).settings) == 3);
    const scratch dir;
    const flags off = {"--schedule=step-off", "--schedule-k=2"}; // the same run however the threads are timed
    REQUIRE(complete(dir / "all", off) == exit_ok);
    for (const char* threads : {"--learner-threads=1", "--learner-threads=3"}) {
        const std::string directory = dir / threads;
        REQUIRE(complete(directory, with(off, {threads})) == exit_ok);
        CHECK(weights_of(directory) == weights_of(dir / "all"));
        CHECK(fingerprint(parse(directory, with(off, {threads})).settings) ==
              fingerprint(parse(directory, off).settings));
    }
    // a run goes on with other threads
    {
        run first(parse(dir / "parts", with(off, {"--learner-threads=1"})));
        first.stop_after(10);
        REQUIRE(go(first) == exit_interrupted);
    }
    REQUIRE(complete(dir / "parts", with(off, {"--resume", "--learner-threads=2"})) == exit_ok);
    CHECK(weights_of(dir / "parts") == weights_of(dir / "all"));
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
                CHECK(flight.weights.version == state.step);
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
    const double begin = now();
    REQUIRE(complete(dir / "run", {"--schedule=async", "--tau=3"}) == exit_ok);
    const double seconds = now() - begin;
    const auto report = nlohmann::json::parse(read_file(dir / "run/report.json"));
    const auto& s = report["schedule"];
    CHECK(s["steps"] == steps);
    CHECK(s["time"].get<double>() > 0);
    CHECK(s["time"].get<double>() <= seconds); // of distillation, not of the machine
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
        if (line.value("stage", "") != "distill" || !line.contains("loss")) continue;
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
    const std::string picture = read_file(dir / "run/plots/timeline.svg"), page = read_file(dir / "run/report.html");
    CHECK(picture.find("What ran when, in the last steps") != std::string::npos);
    CHECK(page.find(picture) != std::string::npos);
    for (const char* clock : clock_names)
        if (std::string(clock) != "student_warmup") CHECK(report["seconds"][clock].get<double>() > 0);
    // two workers, once at the start and once a step, the last perhaps not; nobody waits for one that holds no weights
    // yet, which skips what is superseded
    const auto& moved = s["transfer"];
    CHECK(moved["count"].get<int>() >= steps);
    CHECK(moved["count"].get<int>() <= 2 * (steps + 1));
    CHECK(moved["bytes"].get<double>() ==
          moved["count"].get<double>() * static_cast<double>(weights_of(dir / "run").size() * sizeof(float)));
    CHECK(moved["max_seconds"].get<double>() >= moved["mean_seconds"].get<double>());
    CHECK(moved["closed_seconds"].get<double>() > 0);
    CHECK(moved["closed_seconds"].get<double>() < s["time"].get<double>());
    // in virtual time all four join at once, and none skips
    REQUIRE(complete(dir / "virtual", with(virtually, {"--schedule=async", "--tau=3"})) == exit_ok);
    const auto virtual_report = nlohmann::json::parse(read_file(dir / "virtual/report.json"));
    CHECK(virtual_report["schedule"]["transfer"]["count"].get<int>() >= 4 * steps);
    CHECK(virtual_report["schedule"]["transfer"]["count"].get<int>() <= 4 * (steps + 1));
    // and each works in the last steps, which the timeline shows; on threads one may rest that long
    const std::string timeline = read_file(dir / "virtual/plots/timeline.svg");
    for (const std::string lane : {"rollout 0", "rollout 1", "rollout 2", "rollout 3", "teacher 0", "learner 0"})
        CHECK_MESSAGE(timeline.find(lane) != std::string::npos, lane);
}

TEST_CASE("what fails on a stage's thread ends the run with its exit code") {
    const scratch dir;
    for (const char* schedule : {"--schedule=async", "--schedule=sync"})
        for (const flags& f : {flags{"--loss-limit=1e-9"}, flags{"--rate=1e38", "--warmup=0"}}) {
            const std::string directory = dir / (schedule + f[0]);
            run r(parse(directory, with({schedule, "--teacher-rate=1e-9"}, f)));
            try {
                go(r);
                FAIL("it did not fail");
            } catch (const failure& e) {
                CHECK(e.code == exit_numeric);
            }
        }
}

TEST_CASE("sync: workers, teachers, threads, calls and drivers change no byte; nor does an interruption") {
    const scratch dir;
    REQUIRE(complete(dir / "plain", {}) == exit_ok);
    check_each_once(dir / "plain");
    const auto looks = [](const std::string& directory) { // how good the student was, and when
        std::vector<nlohmann::json> r;
        for (const auto& line : lines_of(directory + "/log.jsonl"))
            if (line.value("stage", "") == "distill" && line.contains("accuracy")) r.push_back(line);
        return r;
    };
    CHECK(looks(dir / "plain").size() == 2); // --eval-every=8 of 17 steps
    int i = 0;
    for (const flags& f : {flags{"--threads=1"}, flags{"--threads=3", "--slots=3"}, flags{"--rollout-workers=4"},
                           flags{"--teachers=3", "--score-batch=1"}, flags{"--learner-threads=1", "--prefill-chunk=1"},
                           flags{"--park-after=2"}}) {
        CAPTURE(f);
        const std::string directory = dir / std::to_string(i++);
        REQUIRE(complete(directory, f) == exit_ok);
        for (const char* name : {"distill", "latest"})
            if (f[0] != "--park-after=2") CHECK(checkpoint_of(directory, name) == checkpoint_of(dir / "plain", name));
        CHECK(weights_of(directory) == weights_of(dir / "plain"));
        CHECK(read_file(directory + "/consumed.jsonl") == read_file(dir / "plain/consumed.jsonl"));
        CHECK(looks(directory) == looks(dir / "plain"));
    }
    REQUIRE(complete(dir / "virtual", virtually) == exit_ok);
    CHECK(weights_of(dir / "virtual") == weights_of(dir / "plain"));
    CHECK(looks(dir / "virtual") == looks(dir / "plain"));
    for (const flags& how : {flags{}, virtually})
        for (const int stop : {6, 9, 12, 20}) { // the teacher takes 5 steps, the last of which does not count
            CAPTURE(stop);
            const std::string directory = dir / std::to_string(i++), straight = dir / std::to_string(i++);
            {
                run first(parse(directory, with(how, {"--threads=3"})));
                first.stop_after(stop);
                REQUIRE(go(first) == exit_interrupted);
                CHECK(first.state().in_flight.empty());
                run other(parse(straight, how));
                other.stop_after(stop);
                REQUIRE(go(other) == exit_interrupted);
                CHECK(checkpoint_of(directory, "latest") == checkpoint_of(straight, "latest"));
            }
            REQUIRE(complete(directory, with(how, {"--resume", "--rollout-workers=4"})) == exit_ok);
            const std::string whole = dir / (how.empty() ? "plain" : "virtual");
            for (const char* name : {"distill", "latest"})
                CHECK(checkpoint_of(directory, name) == checkpoint_of(whole, name));
            CHECK(read_file(directory + "/consumed.jsonl") == read_file(whole + "/consumed.jsonl"));
            CHECK(looks(directory) == looks(whole));
        }
}

TEST_CASE(
    "mini-batches: one is what a run has untold; several are so many updates a step, under every schedule and driver") {
    const scratch dir;
    REQUIRE(complete(dir / "untold", {}) == exit_ok);
    REQUIRE(complete(dir / "one", {"--mini-batches=1"}) == exit_ok);
    CHECK(checkpoint_of(dir / "one") == checkpoint_of(dir / "untold"));
    const flags five = {"--mini-batches=5"};
    REQUIRE(complete(dir / "five", five) == exit_ok);
    CHECK(weights_of(dir / "five") != weights_of(dir / "one"));
    check_each_once(dir / "five");
    std::string settings;
    CHECK(load_checkpoint(dir / "five/checkpoints/distill.ckpt", settings).student_optimizer.step == 5 * steps);
    const auto report = nlohmann::json::parse(read_file(dir / "five/report.json"));
    CHECK(report["schedule"]["updates"] == 5 * steps);
    CHECK(report["schedule"]["version"] == steps);
    for (const auto& line : lines_of(dir / "five/log.jsonl"))
        if (line.value("stage", "") == "distill" && line.contains("loss")) {
            CHECK(line["mismatched"] == 0);
            if (line["step"] == 12)
                CHECK(std::abs(line["ratio_mean"].get<double>() - 1) > 1e-6); // stale within the step
        }
    int i = 0;
    for (const flags& how : {flags{}, virtually})
        for (const flags& f :
             {flags{"--schedule=async", "--tau=0"}, flags{"--schedule=controlled", "--schedule-k=0"}}) {
            const std::string directory = dir / std::to_string(i++);
            REQUIRE(complete(directory, with(with(how, f), five)) == exit_ok);
            CHECK(weights_of(directory) == weights_of(dir / "five"));
        }
    // a lag in updates is five times that in versions, where versions are whole
    const flags off = with(virtually, {"--schedule=step-off", "--schedule-k=2", "--mini-batches=5"});
    REQUIRE(complete(dir / "off", off) == exit_ok);
    const auto lag = nlohmann::json::parse(read_file(dir / "off/schedule.json"))["lag"]["start"];
    CHECK(lag["updates"]["mean"].get<double>() == doctest::Approx(5 * lag["versions"]["mean"].get<double>()));
    CHECK(lag["versions"]["max"] == 2);
    {
        run first(parse(dir / "parts", off));
        first.stop_after(10);
        REQUIRE(go(first) == exit_interrupted);
    }
    REQUIRE(complete(dir / "parts", with(off, {"--resume"})) == exit_ok);
    CHECK(checkpoint_of(dir / "parts") == checkpoint_of(dir / "off"));
    // what its own updates have made stale is not the student's own any more
    CHECK_NOTHROW(parse(dir / "x", {"--surrogate=score_function"}));
    CHECK_THROWS_WITH(parse(dir / "x", {"--surrogate=score_function", "--mini-batches=5"}),
                      doctest::Contains("descends something else"));
}

TEST_CASE("deltas: workers with weights of their own, joined, killed and resumed, make the run that shares them") {
    const scratch dir;
    const flags how = with(virtually, {"--schedule=async", "--tau=3", "--inject=kill=0.04,drop=0.04", "--attempts=100",
                                       "--inject-seconds=0.01", "--rollout-deadline=0.3", "--teacher-deadline=0.3",
                                       "--learner-deadline=0.3"});
    const flags deltas = {"--publish=deltas", "--check-publications"};
    REQUIRE(complete(dir / "shared", how) == exit_ok);
    REQUIRE(complete(dir / "deltas", with(how, deltas)) == exit_ok);
    CHECK(weights_of(dir / "deltas") == weights_of(dir / "shared"));
    CHECK(read_file(dir / "deltas/consumed.jsonl") == read_file(dir / "shared/consumed.jsonl"));
    const auto counts = nlohmann::json::parse(read_file(dir / "deltas/schedule.json"))["publications"];
    CHECK(counts["deltas"] > steps);
    CHECK(counts["whole"] > 0);
    CHECK(counts["checked"] > counts["deltas"]);
    CHECK_FALSE(nlohmann::json::parse(read_file(dir / "shared/schedule.json")).contains("publications"));
    {
        run first(parse(dir / "parts", how));
        first.stop_after(9);
        REQUIRE(go(first) == exit_interrupted);
    }
    REQUIRE(complete(dir / "parts", with(with(how, {"--resume"}), deltas)) == exit_ok); // all join again
    CHECK(weights_of(dir / "parts") == weights_of(dir / "shared"));
    REQUIRE(complete(dir / "threads", with(deltas, {"--schedule=step-off", "--schedule-k=1", "--rollout-workers=3"})) ==
            exit_ok);
    REQUIRE(complete(dir / "plain", {"--schedule=step-off", "--schedule-k=1"}) == exit_ok);
    CHECK(weights_of(dir / "threads") == weights_of(dir / "plain"));
    CHECK_THROWS_WITH(parse(dir / "x", {"--publish=delta"}), doctest::Contains("--publish must be shared or deltas"));
    CHECK_THROWS_WITH(parse(dir / "x", {"--check-publications"}), doctest::Contains("--publish shared"));
}

// --- faults ---------------------------------------------------------------------------------------------------------

TEST_CASE("faults: whoever dies, dawdles or falls silent, every sequence is learnt from once") {
    const scratch dir;
    REQUIRE(complete(dir / "well", {}) == exit_ok);
    const flags deadlines = {"--inject-seconds=0.01",  "--attempts=100",         "--rollout-deadline=0.3",
                             "--teacher-deadline=0.3", "--learner-deadline=0.3", "--sync-deadline=5"};
    int i = 0, lost = 0, retried = 0, late = 0;
    for (const flags& how : {flags{}, virtually})
        for (const flags& f :
             {flags{"--schedule=sync"}, flags{"--schedule=step-off", "--schedule-k=1"},
              flags{"--schedule=async", "--tau=3"}, flags{"--schedule=async", "--tau=2", "--weight-update=abort"},
              flags{"--schedule=async", "--tau=3", "--park-after=3", "--teachers=2"},
              flags{"--schedule=async", "--tau=2", "--prompts=1", "--answers=5", "--staleness-policy=capacity"}}) {
            CAPTURE(how.size());
            CAPTURE(f);
            // a deadline is waited for on threads alone; of sync it is known what should come of it
            const std::string shares =
                how.empty() ? "kill=0.04,delay=0.04,drop=0.02" : "kill=0.04,delay=0.04,drop=0.06";
            const std::string seed = f[0] == "--schedule=sync" ? "1" : std::to_string(i + 2);
            const flags all = with(with(with(how, f), deadlines), {"--inject=" + shares, "--seed=" + seed});
            const std::string directory = dir / std::to_string(i++);
            REQUIRE(complete(directory, all) == exit_ok);
            check_each_once(directory, f.size() > 3 && f[3] == "--answers=5" ? 5 : 1);
            const auto counts = nlohmann::json::parse(read_file(directory + "/schedule.json"));
            lost += counts["workers_lost"].get<int>(), retried += counts["retried"].get<int>();
            late += counts["late_replies"].get<int>();
            CHECK(counts["failed"] == 0);
            if (f[0] == "--schedule=sync") CHECK(weights_of(directory) == weights_of(dir / "well"));
            if (how.empty()) continue;
            // in virtual time the faults, too, are the same every time, interrupted or not
            const std::string again = dir / std::to_string(i++);
            {
                run first(parse(again, all));
                first.stop_after(12);
                REQUIRE(go(first) == exit_interrupted);
            }
            REQUIRE(complete(again, with(all, {"--resume"})) == exit_ok);
            CHECK(checkpoint_of(again) == checkpoint_of(directory));
        }
    MESSAGE("lost ", lost, ", retried ", retried, ", late ", late);
    CHECK(lost > 3);
    CHECK(retried > 50);
}

TEST_CASE("faults: a sequence that fails too often is given up, and made up for") {
    const scratch dir;
    for (const flags& how : {flags{}, virtually}) {
        const std::string directory = dir / std::to_string(how.size());
        REQUIRE(complete(directory, with(how, {"--schedule=async", "--tau=3", "--inject=drop=0.1", "--attempts=1",
                                               "--rollout-deadline=0.3", "--teacher-deadline=1",
                                               "--learner-deadline=1"})) == exit_ok);
        const auto counts = nlohmann::json::parse(read_file(directory + "/schedule.json"));
        CHECK(counts["failed"] > 0);
        CHECK(counts["sequences"] == steps * prompts);
    }
}

// --- virtual time ----------------------------------------------------------------------------------------------------

TEST_CASE("virtual time: the same run again, on however many threads") {
    const scratch dir;
    const flags f = with(virtually, {"--schedule=async", "--tau=4"});
    REQUIRE(complete(dir / "a", f) == exit_ok);
    check_each_once(dir / "a");
    REQUIRE_FALSE(distillation_log(dir / "a").empty());
    int i = 0;
    for (const char* threads : {"--threads=2", "--threads=1", "--threads=3"}) {
        const std::string again = dir / std::to_string(i++);
        CAPTURE(threads);
        REQUIRE(complete(again, with(f, {threads})) == exit_ok);
        CHECK(checkpoint_of(again) == checkpoint_of(dir / "a"));
        CHECK(distillation_log(again) == distillation_log(dir / "a"));
        for (const char* file : {"/consumed.jsonl", "/schedule.json", "/trace.json"})
            CHECK(read_file(again + file) == read_file(dir / "a" + file));
    }
    // the costs decide what meets which weights
    REQUIRE(complete(dir / "slow", with(f, {"--cost-step=1e-2"})) == exit_ok);
    CHECK(weights_of(dir / "slow") != weights_of(dir / "a"));
    // so do the slots, which are none of a result's business elsewhere
    CHECK(fingerprint(parse(dir / "b", with(f, {"--slots=9"})).settings) != fingerprint(parse(dir / "b", f).settings));
    CHECK(fingerprint(parse(dir / "b", {"--schedule=async", "--slots=9"}).settings) ==
          fingerprint(parse(dir / "b", {"--schedule=async"}).settings));
}

TEST_CASE("virtual time: k = 0 and tau = 0 end in the weights of sync, bit for bit, and k = 2 in those of threads") {
    const scratch dir;
    REQUIRE(complete(dir / "sync", {}) == exit_ok);
    int i = 0;
    for (const flags& f :
         {flags{"--schedule=step-off", "--schedule-k=0"}, flags{"--schedule=controlled", "--schedule-k=0"},
          flags{"--schedule=async", "--tau=0"}, flags{"--schedule=async", "--tau=0", "--weight-update=abort"},
          flags{"--schedule=async", "--tau=0", "--park-after=2"},
          flags{"--schedule=async", "--tau=0", "--weight-update=finish_first", "--staleness-policy=edf"}}) {
        const std::string directory = dir / std::to_string(i++);
        CAPTURE(f[0]);
        REQUIRE(complete(directory, with(virtually, f)) == exit_ok);
        const auto counts = nlohmann::json::parse(read_file(directory + "/schedule.json"));
        CHECK((counts["parked"] > 0) == (f.size() > 2 && f[2] == "--park-after=2"));
        CHECK(weights_of(directory) == weights_of(dir / "sync"));
        CHECK(read_file(directory + "/consumed.jsonl") == read_file(dir / "sync/consumed.jsonl"));
    }
    for (const char* kind : {"--schedule=step-off", "--schedule=controlled"}) {
        CAPTURE(kind);
        const std::string a = dir / (std::string("threads") + kind), b = dir / (std::string("virtual") + kind);
        REQUIRE(complete(a, {kind, "--schedule-k=2"}) == exit_ok);
        REQUIRE(complete(b, with(virtually, {kind, "--schedule-k=2"})) == exit_ok);
        CHECK(weights_of(b) == weights_of(a));
        CHECK(weights_of(b) != weights_of(dir / "sync"));
    }
}

TEST_CASE("virtual time: interrupted or not, the run is the same bit for bit") {
    const scratch dir;
    std::mt19937 random(2);
    int stops = 0;
    for (const flags& f :
         {flags{"--schedule=async", "--tau=4"}, flags{"--schedule=async", "--tau=4", "--weight-update=abort"},
          flags{"--schedule=async", "--tau=2", "--weight-update=finish_first", "--staleness-policy=edf"},
          flags{"--schedule=async", "--tau=3", "--staleness-policy=drop", "--estimator=threshold"},
          flags{"--schedule=async", "--tau=2", "--staleness-policy=retry", "--estimator=reverse_kl"},
          flags{"--schedule=async", "--staleness-policy=areal", "--concurrency=3"},
          flags{"--schedule=async", "--tau=2", "--prompts=2", "--answers=4"},
          flags{"--schedule=async", "--tau=3", "--park-after=3"},
          flags{"--schedule=async", "--tau=1", "--staleness-policy=retry", "--park-after=2", "--estimator=threshold"},
          flags{"--schedule=async", "--tau=1", "--staleness-policy=drop", "--prompts=2", "--answers=3",
                "--outstanding=30"},
          flags{"--schedule=controlled", "--schedule-k=2"}, flags{"--schedule=step-off", "--schedule-k=2"}}) {
        CAPTURE(f);
        const flags all = with(virtually, f);
        const std::string whole = dir / "whole", parts = dir / "parts";
        fs::remove_all(whole);
        fs::remove_all(parts);
        REQUIRE(complete(whole, all) == exit_ok);
        for (bool first = true;; first = false) {
            // other threads each time; never twice the same step, and not before distillation
            const int more = 1 + static_cast<int>(random() % 5) + (first ? 4 : 0);
            const flags how = {"--threads=" + std::to_string(1 + random() % 3)};
            run part(parse(parts, with(with(all, how), first ? flags{} : flags{"--resume"})));
            part.stop_after(more);
            const exit_code code = go(part);
            if (code == exit_ok) break;
            REQUIRE(code == exit_interrupted);
            // an uninterrupted run would have written these very bytes there
            const std::string straight = dir / "straight";
            fs::remove_all(straight);
            run other(parse(straight, all));
            other.stop_after(static_cast<int>(part.state().step) + 4); // the teacher's steps
            REQUIRE(go(other) == exit_interrupted);
            CHECK(checkpoint_of(parts, "latest") == checkpoint_of(straight, "latest"));
            ++stops;
        }
        CHECK(checkpoint_of(parts) == checkpoint_of(whole));
        CHECK(read_file(parts + "/consumed.jsonl") == read_file(whole + "/consumed.jsonl"));
    }
    CHECK(stops > 16);
}

TEST_CASE(
    "virtual time: sync's stages take turns: a teacher on four times the cores saves three quarters of its seconds") {
    const scratch dir;
    const auto report = [&](const std::string& name, const flags& costs) {
        REQUIRE(complete(dir / name, with(virtually, costs)) == exit_ok);
        return nlohmann::json::parse(read_file(dir / name + "/report.json"));
    };
    const auto one = report("one", {}), four = report("four", {"--cost-score=5e-4", "--cost-score-row=2.5e-6"});
    const double saved = one["schedule"]["time"].get<double>() - four["schedule"]["time"].get<double>();
    const double scoring = one["seconds"]["teacher_scoring"];
    CHECK(saved == doctest::Approx(0.75 * scoring).epsilon(1e-6));
    CHECK(one["seconds"]["learner"].get<double>() == doctest::Approx(four["seconds"]["learner"].get<double>()));
    CHECK(one["schedule"]["overlap"].get<double>() < 1);
    CHECK(weights_of(dir / "one") == weights_of(dir / "four"));
    // nothing runs when new weights come: four workers take a tenth of a millisecond each, at once
    const auto& moved = one["schedule"]["transfer"];
    CHECK(moved["count"] == 4 * (steps + 1));
    CHECK(moved["mean_seconds"].get<double>() == doctest::Approx(1e-4));
    CHECK(moved["closed_seconds"].get<double>() == doctest::Approx(1e-4 * steps));
}

TEST_CASE("--resume with other --steps, in the middle and at the end: every sequence is learnt from once") {
    const scratch dir;
    int i = 0;
    const auto extended = [&](const flags& f, int answers, bool gives_up) {
        CAPTURE(f);
        const std::string directory = dir / std::to_string(i++);
        {
            run first(parse(directory, f));
            first.stop_after(10);
            REQUIRE(go(first) == exit_interrupted);
        }
        int made = 0;
        for (const int to : {8, 21, 26, 31}) { // from 6, from the ends at 8 and 21, and from 24
            run more(parse(directory, with(f, {"--resume", "--steps=" + std::to_string(to)})));
            if (to == 26) {
                more.stop_after(3);
                REQUIRE(go(more) == exit_interrupted);
                CHECK(more.state().step == 24);
                continue;
            }
            REQUIRE(go(more) == exit_ok);
            made = to;
        }
        REQUIRE(complete(directory, with(f, {"--resume", "--steps=31"})) == exit_ok); // there is nothing left to do
        if (!gives_up) {
            check_each_once(directory, answers, made);
            return directory;
        }
        std::set<int> seen;
        std::size_t count = 0;
        for (const auto& line : lines_of(directory + "/consumed.jsonl"))
            for (const int s : line["sequences"]) seen.insert(s), ++count;
        CHECK(seen.size() == count);
        CHECK(lines_of(directory + "/consumed.jsonl").size() == static_cast<std::size_t>(made));
        return directory;
    };
    for (const flags& how : {flags{}, virtually}) {
        const flags group = {"--prompts=1", "--answers=5"};
        std::vector<nlohmann::json> changes;
        const std::string one = extended(with(how, {"--schedule=async", "--tau=4"}), 1, false);
        for (const auto& line : lines_of(one + "/log.jsonl"))
            if (line.contains("steps")) changes.push_back(line["steps"]);
        CHECK(changes == std::vector<nlohmann::json>{{{"from", 17}, {"to", 8}},
                                                     {{"from", 8}, {"to", 21}},
                                                     {{"from", 21}, {"to", 26}},
                                                     {{"from", 26}, {"to", 31}}});
        const std::string same = extended(with(how, {"--schedule=async", "--tau=4"}), 1, false);
        if (how == virtually) CHECK(checkpoint_of(one) == checkpoint_of(same));
        extended(with(how, {"--schedule=step-off", "--schedule-k=2"}), 1, false);
        extended(with(with(how, {"--schedule=async", "--tau=2", "--weight-update=abort"}), group), 5, false);
        extended(with(how, {"--schedule=async", "--tau=1", "--staleness-policy=drop", "--prompts=2", "--answers=3",
                            "--outstanding=30"}),
                 3, true);
        CHECK_THROWS_WITH(complete(one, with(how, {"--schedule=async", "--tau=4", "--resume", "--steps=30"})),
                          doctest::Contains("--steps must be more than the 31"));
    }
}

TEST_CASE("virtual time: what async promises of lags, and what it gains, by its own clock") {
    const scratch dir;
    for (const char* policy : {"capacity", "cohort_fifo", "edf", "in_order"}) {
        CAPTURE(policy);
        const std::string directory = dir / policy;
        REQUIRE(complete(directory, with(virtually, {"--schedule=async", "--tau=4",
                                                     "--staleness-policy=" + std::string(policy)})) == exit_ok);
        check_each_once(directory);
        const auto s = nlohmann::json::parse(read_file(directory + "/report.json"))["schedule"];
        const auto lag = [&](const char* which, const char* figure) {
            return s.at("lag").at(which).at("versions").at(figure).get<double>();
        };
        CHECK(lag("start", "mean") > 0);
        CHECK(lag("start", "mean") <= 4); // M/B - 1
        // capacity keeps the mean; the others keep every sequence
        if (std::string(policy) != "capacity") CHECK(lag("start", "max") <= 4);
        CHECK(lag("newest_token", "mean") <= lag("oldest_token", "mean"));
        CHECK(s["overlap"].get<double>() > 1);
    }
    const auto throughput = [&](const flags& f) {
        const std::string directory = dir / f[1];
        REQUIRE(complete(directory, with(virtually, f)) == exit_ok);
        return nlohmann::json::parse(read_file(directory + "/schedule.json"))["throughput"].get<double>();
    };
    CHECK(throughput({"--schedule=async", "--tau=4"}) > 1.2 * throughput({"--schedule=async", "--tau=0"}));
}

TEST_CASE(
    "virtual time: what a stage throws ends the run with its exit code, and more workers than lanes are refused") {
    const scratch dir;
    for (const flags& f : {flags{"--loss-limit=1e-9"}, flags{"--rate=1e38", "--warmup=0"}}) {
        run r(parse(dir / f[0], with(with(virtually, {"--schedule=async", "--teacher-rate=1e-9"}), f)));
        try {
            go(r);
            FAIL("it did not fail");
        } catch (const failure& e) {
            CHECK(e.code == exit_numeric);
        }
    }
    const auto refused = [&](const flags& f, const char* why) {
        CAPTURE(why);
        try {
            parse(dir / "x", f);
            FAIL("it was taken");
        } catch (const failure& e) {
            CHECK(e.code == exit_usage);
            CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
        }
    };
    refused({"--cost-step=1"}, "--cost-step is not used by --driver threads");
    refused({"--schedule=async", "--cost-sync=1"}, "--cost-sync is not used by --driver threads");
    refused({"--schedule=async", "--driver=virtua"}, "did you mean 'virtual'?");
    refused({"--schedule=async", "--driver=virtual", "--cost-train=-1"}, "--cost-train must lie in [0, 1e6], not -1");
    refused({"--schedule=async", "--driver=virtual", "--cost-score-row=nan"}, "--cost-score-row must lie in");
    refused({"--schedule=async", "--driver=virtual", "--cost-step=0", "--cost-step-row=0"}, "must not both be 0");
    refused({"--schedule=async", "--driver=virtual", "--rollout-workers=7"}, "--slots (6) must be at least");
}

TEST_CASE("damaged sequences in flight are recognised") {
    in_flight state;
    state.weights = {3, 9};
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
    CHECK(again.weights == state.weights);
    CHECK(again.scheduler == "abc");
    REQUIRE(again.sequences.size() == 1);
    CHECK(*again.sequences[0].sequence == t);
    CHECK(again.sequences[0].scored != nullptr);
    CHECK(to_bytes(again) == bytes);
    for (std::size_t size = 0; size < bytes.size(); ++size)
        CHECK_THROWS_WITH(in_flight_of(std::string_view(bytes).substr(0, size), score), doctest::Contains("in flight"));
    CHECK_THROWS_WITH(in_flight_of(bytes + "x", score), doctest::Contains("is too long"));
    // whole, but nothing that a run writes: weights, scheduler, count, ticket, then where, start and which sequence
    const std::size_t where = 16 + (8 + 3) + 8 + (8 + 5 * 4), which = where + 1 + 8;
    const auto refused = [&](std::size_t at, char byte) {
        std::string other = bytes;
        other.at(at) = byte;
        CAPTURE(at);
        CHECK_THROWS_WITH(in_flight_of(other, score), doctest::Contains("is damaged"));
    };
    refused(where, 7);
    refused(which, 2), refused(which, -1);
    const auto unfit = [&](auto change) {
        trajectory other = t;
        change(other);
        e.sequence = std::make_shared<const trajectory>(other);
        CHECK_THROWS_WITH(in_flight_of(to_bytes(state), score), doctest::Contains("does not fit together"));
    };
    unfit([](trajectory& x) { x.prompt_length = 4; });
    unfit([](trajectory& x) { x.prompt_length = 0; });
    unfit([](trajectory& x) { x.prompt_length = 3, x.log_mu = {}, x.versions = {}; }); // ready, and nothing drawn
    unfit([](trajectory& x) { x.log_mu = {}; });
    unfit([](trajectory& x) { x.versions = {2, 2}; });
    unfit([](trajectory& x) { x.draw_ids = {1}; });
    unfit([](trajectory& x) { x.tokens = {1, -2, 3}; });
    unfit([](trajectory& x) { x.tokens = {1, 2, 1'000'000}; });
}
