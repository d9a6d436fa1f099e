// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A run that is killed without warning, again and again, and resumed each time, learns from every sequence exactly
// once; where timing decides nothing it ends in the same bytes as one that was left alone. A run of each kind, with
// groups of answers, parking and faults in the process among them; OPD_KILL_RUNS=<n> makes n of them.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "app/app.hpp"
#include "run/run.hpp"
#include "settings/files.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

namespace {

using namespace trainer;
namespace fs = std::filesystem;

using opd::test::flags;
using opd::test::scratch;
using opd::test::with;

constexpr int steps = 300, prompts = 6;

flags arguments(const std::string& directory, const flags& schedule) {
    flags r = with({"opd-train", "--run-dir", directory, "--quiet", "--eval-prompts=8", "--eval-samples=0",
                    "--eval-every=0", "--checkpoint-every=7", "--log-every=5", "--threads=2", "--estimator=mc",
                    "--steps=" + std::to_string(steps), "--prompts=" + std::to_string(prompts)},
                   opd::test::small_models());
    r.insert(r.end(), schedule.begin(), schedule.end());
    return r;
}

// opd-train in a process of its own.
pid_t launch(flags a) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) ::_exit(99);
        std::vector<const char*> argv;
        for (const auto& x : a) argv.push_back(x.c_str());
        ::_exit(app_main(static_cast<int>(argv.size()), argv.data(), true));
    }
    return child;
}

/// The exit code, or minus the signal.
int outcome(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

int wait_for(pid_t child) {
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return outcome(status);
}

// Of a run that goes on: what has not grown is not read again.
class distilled_steps {
public:
    explicit distilled_steps(const std::string& directory) : file_(directory + "/consumed.jsonl") {}
    std::int64_t now() {
        std::error_code none; // no file yet, or not any more: --overwrite takes it away
        const std::uintmax_t size = fs::file_size(file_, none);
        if (none) return size_ = 0, count_ = 0;
        if (size == size_) return count_;
        count_ = 0;
        std::ifstream lines(file_);
        for (std::string line; std::getline(lines, line);) ++count_;
        size_ = size;
        return count_;
    }

private:
    std::string file_;
    std::uintmax_t size_ = 0;
    std::int64_t count_ = 0;
};

void check_complete(const std::string& directory) {
    std::set<std::int64_t> seen;
    std::int64_t step = 0, count = 0;
    std::istringstream lines(read_file(directory + "/consumed.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        const auto j = nlohmann::json::parse(line);
        CHECK(j["step"] == ++step);
        for (const std::int64_t s : j["sequences"]) {
            seen.insert(s);
            ++count;
        }
    }
    CHECK(step == steps);
    CHECK(count == steps * prompts);
    CHECK(static_cast<std::int64_t>(seen.size()) == count);
    CHECK(*seen.begin() == 0);
    CHECK(*seen.rbegin() == steps * prompts - 1);
    CHECK(fs::exists(directory + "/report.json"));
}

// Runs with at most so many kills, each within some steps of distillation after the start, and then to the end. Returns
// how many there were: fewer where a run was done before, since this process had to wait for its turn.
int killed(const std::string& directory, const flags& schedule, std::uint32_t seed, int times) {
    std::mt19937 random(seed);
    distilled_steps done(directory);
    int kills = 0;
    for (bool ended = false; kills < times && !ended;) {
        flags a = arguments(directory, schedule);
        const bool resume = fs::exists(directory + "/checkpoints/latest.ckpt");
        a.push_back(resume ? "--resume" : "--overwrite"); // killed before the first checkpoint: nothing to go on from
        // the first one may come at any moment, the others in distillation
        const std::int64_t until = kills == 0 ? 0 : done.now() + 1 + static_cast<std::int64_t>(random() % 12);
        const pid_t child = launch(a);
        int status = 0;
        while (done.now() < until && !ended) {
            ended = ::waitpid(child, &status, WNOHANG) == child;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        if (!ended) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % (kills == 0 ? 8000 : 3000)));
            REQUIRE(::kill(child, SIGKILL) == 0);
            REQUIRE(::waitpid(child, &status, 0) == child);
        }
        ended = outcome(status) != -SIGKILL;
        REQUIRE((!ended || outcome(status) == exit_ok));
        kills += !ended;
    }
    flags a = arguments(directory, schedule);
    a.push_back("--resume");
    CHECK(wait_for(launch(a)) == exit_ok);
    return kills;
}

} // namespace

TEST_CASE("a second process on a run directory leaves, and the first loses no line") {
    const scratch dir;
    const std::string directory = dir / "run";
    const pid_t first = launch(arguments(directory, {}));
    distilled_steps done(directory);
    while (done.now() < 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(::kill(first, SIGSTOP) == 0); // or it could be done before the others have begun
    for (const char* how : {"--resume", "--overwrite"})
        CHECK(wait_for(launch(arguments(directory, {how}))) == exit_usage);
    REQUIRE(::kill(first, SIGCONT) == 0);
    CHECK(wait_for(first) == exit_ok);
    check_complete(directory);
}

TEST_CASE("kills at random moments lose and double no sequence, and change no byte where timing decides nothing") {
    const flags in_virtual_time = {"--driver=virtual",    "--slots=8",
                                   "--rollout-workers=4", "--prefill-chunk=3",
                                   "--cost-step=1e-4",    "--cost-step-row=5e-4",
                                   "--cost-score=2e-3",   "--cost-score-row=1e-5",
                                   "--cost-train=1.1e-2", "--cost-sync=1e-4"};
    struct kind {
        flags schedule;
        bool same_bytes = false;
    };
    std::vector<kind> kinds = {{{}, true},
                               {{"--schedule=step-off", "--schedule-k=1"}, true},
                               {{"--schedule=controlled", "--schedule-k=2"}, true},
                               {{"--schedule=async", "--tau=4"}},
                               {{"--schedule=async", "--tau=2", "--staleness-policy=edf", "--weight-update=abort"}},
                               {{"--schedule=async", "--tau=2", "--staleness-policy=in_order"}},
                               {{"--schedule=async", "--tau=3", "--staleness-policy=cohort_fifo"}},
                               {{"--schedule=async", "--tau=4"}, true},
                               {{"--schedule=step-off", "--schedule-k=2"}, true},
                               {{"--schedule=async", "--tau=2", "--prompts=2", "--answers=3"}},
                               {{"--schedule=async", "--tau=3", "--prompts=2", "--answers=3"}, true},
                               {{"--schedule=async", "--tau=3", "--park-after=4"}},
                               {{"--schedule=async", "--tau=4", "--prompts=2", "--answers=3", "--park-after=3"}, true},
                               {{"--schedule=sync", "--mini-batches=2"}, true},
                               {{"--schedule=async", "--tau=3", "--prompts=2", "--answers=3", "--park-after=4"}},
                               {{"--schedule=async", "--tau=3", "--prompts=2", "--answers=3", "--park-after=3"}, true},
                               {{"--speculate=learned"}, true},
                               {{"--schedule=async", "--tau=3", "--speculate=auto"}, true}};
    const auto also = [&kinds](std::size_t i, const flags& more) {
        kinds[i].schedule.insert(kinds[i].schedule.end(), more.begin(), more.end());
    };
    for (std::size_t i : {7, 8, 10, 12, 15, 17}) also(i, in_virtual_time);
    // a drafter that learns meanwhile
    for (std::size_t i : {16, 17})
        also(i, {"--adapt-drafter", "--adapt-rows=60", "--adapt-slices=3", "--drafter-heads=2", "--drafter-kv-heads=1",
                 "--drafter-head-dim=4", "--drafter-ffn=8"});
    also(16, {"--drafter-loss=hass"}), also(17, {"--drafter=eagle3", "--drafter-loss=eagle3"});
    // workers that die, dawdle and fall silent, in a process that is killed
    for (std::size_t i : {13, 14, 15})
        also(i, {"--inject=kill=0.01,delay=0.01,drop=0.005", "--inject-seconds=0.004", "--attempts=1000",
                 "--rollout-deadline=0.15", "--teacher-deadline=0.15", "--learner-deadline=0.15"});
    const char* wanted = std::getenv("OPD_KILL_RUNS");
    const int runs = wanted ? std::atoi(wanted) : static_cast<int>(kinds.size());
    int kills = 0;
    for (int i = 0; i < runs; ++i) {
        const kind& k = kinds[static_cast<std::size_t>(i) % kinds.size()];
        CAPTURE(i);
        const scratch dir;
        kills += killed(dir / "killed", k.schedule, static_cast<std::uint32_t>(i + 1), 5);
        check_complete(dir / "killed");
        if (!k.same_bytes) continue;
        REQUIRE(wait_for(launch(arguments(dir / "whole", k.schedule))) == exit_ok);
        for (const char* name : {"teacher.ckpt", "student.ckpt", "distill.ckpt"})
            CHECK(read_file(dir / (std::string("whole/checkpoints/") + name)) ==
                  read_file(dir / (std::string("killed/checkpoints/") + name)));
    }
    CHECK(kills >= 4 * runs);
}
