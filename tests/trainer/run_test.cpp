// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include "app/app.hpp"
#include "run/forecast.hpp"
#include "run/plots.hpp"
#include "run/report_page.hpp"
#include "run/run.hpp"
#include "settings/checkpoint.hpp"
#include "settings/estimator.hpp"
#include "settings/files.hpp"
#include "settings/options.hpp"
#include "settings/schedule.hpp"
#include "support/address_space.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

namespace {

using namespace trainer;
namespace fs = std::filesystem;

// A directory that goes away with the test.
using opd::test::scratch;

// Seconds, not minutes: two digits, one layer, a few steps.
std::vector<std::string> tiny(const std::string& directory) {
    std::vector<std::string> r = {"opd-train", "--run-dir", directory, "--quiet"};
    for (const char* s : {"--max-operand=20",
                          "--max-task-steps=5",
                          "--teacher-width=8",
                          "--teacher-layers=1",
                          "--teacher-heads=2",
                          "--teacher-kv-heads=1",
                          "--teacher-head-dim=4",
                          "--teacher-ffn=12",
                          "--student-width=8",
                          "--student-layers=1",
                          "--student-heads=2",
                          "--student-kv-heads=2",
                          "--student-head-dim=4",
                          "--student-ffn=8",
                          "--student-tied",
                          "--teacher-steps=14",
                          "--teacher-batch=4",
                          "--student-max-steps=12",
                          "--student-batch=4",
                          "--student-check-every=5",
                          "--student-check-prompts=8",
                          "--student-target-accuracy=1",
                          "--steps=13",
                          "--prompts=4",
                          "--eval-prompts=12",
                          "--eval-samples=1",
                          "--eval-every=6",
                          "--eval-every-prompts=6",
                          "--checkpoint-every=3",
                          "--log-every=2",
                          "--threads=2"})
        r.push_back(s);
    return r;
}

std::vector<std::string> with(std::vector<std::string> a, std::initializer_list<const char*> more) {
    a.insert(a.end(), more.begin(), more.end());
    return a;
}

// With flags for all settings, or as a user can write them.
command parse(const std::vector<std::string>& arguments, bool every_flag = true) {
    std::vector<const char*> argv;
    for (const auto& a : arguments) argv.push_back(a.c_str());
    return parse_command_line(static_cast<int>(argv.size()), argv.data(), every_flag);
}

using opd::test::exit_of;

std::string failure_text(const std::vector<std::string>& arguments, exit_code code) {
    try {
        run(parse(arguments)).go();
    } catch (const failure& e) {
        CHECK(e.code == code);
        return e.what();
    }
    FAIL("it did not fail");
    return {};
}

bool contains(const std::string& text, const std::string& part) {
    CAPTURE(text);
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
    return text.find(part) != std::string::npos;
}

// What is told while it lives.
struct told_lines {
    std::ostringstream text;
    std::shared_ptr<spdlog::logger> before = spdlog::default_logger();
    told_lines() {
        spdlog::set_default_logger(
            std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
    }
    ~told_lines() { spdlog::set_default_logger(before); }
};

const char* const checkpoints[] = {"teacher.ckpt", "student.ckpt", "distill.ckpt", "latest.ckpt"};

// Runs silently: the table of a tiny run says nothing.
exit_code go(run& r) {
    std::fflush(stdout);
    const int keep = ::dup(STDOUT_FILENO);
    const bool silent = std::freopen("/dev/null", "w", stdout) != nullptr;
    const exit_code code = r.go();
    std::fflush(stdout);
    if (silent) ::dup2(keep, STDOUT_FILENO);
    ::close(keep);
    return code;
}

} // namespace

TEST_CASE("a run that was interrupted anywhere ends in the bytes of one that was not") {
    const scratch dir;
    run whole(parse(tiny(dir / "whole")));
    REQUIRE(go(whole) == exit_ok);
    for (const char* estimator : {"reverse_kl"}) {
        CAPTURE(estimator);
        // 14 teacher steps, 12 warm-up steps, 13 of distillation; at stage ends and next to them too
        for (int stop : {1, 7, 13, 14, 20, 24, 25, 30, 36}) {
            CAPTURE(stop);
            const std::string directory = dir / ("stop" + std::to_string(stop));
            {
                run first(parse(tiny(directory)));
                first.stop_after(stop);
                interrupted = false;
                REQUIRE(go(first) == exit_interrupted);
                CHECK_FALSE(fs::exists(directory + "/report.json"));
            }
            interrupted = false;
            run second(parse(with(tiny(directory), {"--resume"})));
            REQUIRE(go(second) == exit_ok);
            for (const char* name : checkpoints)
                CHECK(read_file(directory + "/checkpoints/" + name) ==
                      read_file(dir / (std::string("whole/checkpoints/") + name)));
            fs::remove_all(directory);
        }
    }
}

TEST_CASE("--resume with other --steps: the rate goes on from where it is, every sequence is learnt from once") {
    const scratch dir;
    interrupted = false;
    const auto short_ramp = [&](const std::string& name) {
        return with(tiny(dir / name), {"--warmup=2", "--log-every=1", "--eval-every=0"});
    };
    const auto stopped = [&](const std::vector<std::string>& arguments, int steps) {
        run r(parse(arguments));
        r.stop_after(steps);
        REQUIRE(go(r) == exit_interrupted);
        interrupted = false;
    };
    const auto resumed = [&](const std::vector<std::string>& arguments, std::initializer_list<const char*> more) {
        run r(parse(with(with(arguments, {"--resume"}), more)));
        REQUIRE(go(r) == exit_ok);
        CHECK(r.state().stage == stage::finished);
    };
    struct history {
        std::vector<double> rates; // by step
        std::vector<nlohmann::json> changes;
    };
    const auto history_of = [&](const std::string& name, int steps) {
        history h;
        std::istringstream log(read_file(dir / (name + "/log.jsonl")));
        for (std::string line; std::getline(log, line);) {
            const auto j = nlohmann::json::parse(line);
            if (j.contains("steps")) h.changes.push_back(j);
            if (j.value("stage", "") == "distill" && j.contains("loss")) {
                h.rates.push_back(j["rate"]);
                CHECK(j["step"] == h.rates.size());
            }
        }
        CHECK(h.rates.size() == static_cast<std::size_t>(steps));
        std::istringstream consumed(read_file(dir / (name + "/consumed.jsonl")));
        std::int64_t step = 0, next = 0;
        for (std::string line; std::getline(consumed, line);) {
            const auto j = nlohmann::json::parse(line);
            CHECK(j["step"] == ++step);
            for (const std::int64_t s : j["sequences"]) CHECK(s == next++);
        }
        CHECK(step == steps);
        CHECK(next == 4 * steps);
        CHECK(nlohmann::json::parse(read_file(dir / (name + "/config.json")))["distill"]["steps"] == steps);
        CHECK(fs::exists(dir / (name + "/report.json")));
        return h;
    };
    const double rate = 2e-3;
    const auto planned = [&](std::int64_t step) { return cosine_rate(rate, 0.1, 2, step, 13); };

    // finished: the rate has reached its floor, and stays there
    {
        run r(parse(short_ramp("finished")));
        REQUIRE(go(r) == exit_ok);
    }
    for (const char* steps : {"--steps=13", "--steps=20"}) resumed(short_ramp("finished"), {steps});
    history h = history_of("finished", 20);
    for (int s = 0; s < 20; ++s) CHECK(h.rates[static_cast<std::size_t>(s)] == doctest::Approx(planned(s)));
    REQUIRE(h.changes.size() == 1);
    CHECK(h.changes[0]["stage"] == "distill");
    CHECK(h.changes[0]["step"] == 13);
    CHECK(h.changes[0]["steps"] == nlohmann::json({{"from", 13}, {"to", 20}}));
    CHECK(h.changes[0]["rate"].get<double>() == doctest::Approx(0.1 * rate));
    CHECK(nlohmann::json::parse(read_file(dir / "finished/report.json"))["steps_changed_at"] == 13);

    // in the middle, to more and once again to more, and to fewer
    stopped(short_ramp("more"), 32); // 14 + 12 steps before distillation, of which two do not count
    {
        auto first = with(short_ramp("more"), {"--resume", "--steps=30"});
        stopped(first, 3);
    }
    resumed(short_ramp("more"), {"--steps=40"});
    h = history_of("more", 40);
    REQUIRE(h.changes.size() == 2);
    const auto at = h.changes[0]["step"].get<std::size_t>(), again = h.changes[1]["step"].get<std::size_t>();
    CHECK(at == 8);
    CHECK(again == 11);
    for (std::size_t s = 0; s <= at; ++s) CHECK(h.rates[s] == planned(static_cast<std::int64_t>(s)));
    const double then = planned_rate({8, planned(8)}, rate, 0.1, 2, 11, 30);
    CHECK(h.rates[again] == doctest::Approx(then));
    CHECK(h.changes[1]["rate"].get<double>() == doctest::Approx(then));
    for (std::size_t s = 3; s < 40; ++s) CHECK(h.rates[s] <= h.rates[s - 1]);
    CHECK(h.rates.back() > 0.1 * rate);
    CHECK(h.rates.back() < 0.11 * rate);

    stopped(short_ramp("fewer"), 32);
    resumed(short_ramp("fewer"), {"--steps=10"});
    h = history_of("fewer", 10);
    CHECK(h.rates[8] == planned(8));
    CHECK(h.rates[9] < planned(9));

    // before distillation, and while the rate warms up, nothing is different from a run that was to go so far
    {
        run r(parse(with(tiny(dir / "straight"), {"--steps=20"})));
        REQUIRE(go(r) == exit_ok);
    }
    for (const int stop : {3, 20, 30}) {
        CAPTURE(stop);
        const std::string directory = dir / std::to_string(stop);
        stopped(tiny(directory), stop);
        resumed(tiny(directory), {"--steps=20"});
        for (const char* name : {"distill.ckpt", "latest.ckpt"})
            CHECK(read_file(directory + "/checkpoints/" + name) ==
                  read_file(dir / (std::string("straight/checkpoints/") + name)));
        CHECK_FALSE(nlohmann::json::parse(read_file(directory + "/report.json")).contains("steps_changed_at"));
    }

    // refused
    const auto refused = [&](const char* name, std::initializer_list<const char*> more, const char* part) {
        const std::string before = read_file(dir / (std::string(name) + "/checkpoints/latest.ckpt"));
        contains(failure_text(with(with(short_ramp(name), {"--resume"}), more), exit_usage), part);
        CHECK(read_file(dir / (std::string(name) + "/checkpoints/latest.ckpt")) == before);
    };
    refused("finished", {"--steps=19"}, "--steps must be more than the 20 that");
    stopped(short_ramp("refused"), 32);
    for (const char* steps : {"--steps=8", "--steps=7", "--steps=0"})
        refused("refused", {steps}, "--steps must be more than the 8 that");
    refused("refused", {"--steps=30", "--rate=0.5"}, "made with other settings: distill.rate");
}

TEST_CASE("distillation can start from another run's teacher and warm student") {
    const scratch dir;
    run whole(parse(tiny(dir / "whole")));
    REQUIRE(go(whole) == exit_ok);
    const std::string from = "--start-from=" + dir / "whole/checkpoints/student.ckpt";
    run second(parse(with(tiny(dir / "second"), {from.c_str()})));
    REQUIRE(go(second) == exit_ok);
    CHECK(second.state().student_weights == whole.state().student_weights);
    CHECK(second.state().evaluations == whole.state().evaluations);
    // other settings of distillation are free
    run other(parse(with(tiny(dir / "other"), {from.c_str(), "--steps=5", "--seed=9", "--schedule=async"})));
    REQUIRE(go(other) == exit_ok);
    CHECK(other.state().student_weights != whole.state().student_weights);
    CHECK(other.state().teacher_weights == whole.state().teacher_weights);
    // teacher and student are evaluated on the prompts of this run, as it is at its end
    {
        const told_lines told;
        run fewer(
            parse(with(tiny(dir / "fewer"), {from.c_str(), "--steps=2", "--eval-prompts=5", "--eval-samples=0"})));
        REQUIRE(go(fewer) == exit_ok);
        contains(told.text.str(), "evaluated again");
        const auto evaluations = nlohmann::json::parse(fewer.state().evaluations);
        const auto report = nlohmann::json::parse(read_file(dir / "fewer/report.json"));
        for (const char* who : {"teacher", "before", "after"}) {
            CHECK(evaluations[who]["lengths"].size() == 5);
            CHECK(report["sampled_accuracy"][who].is_null()); // of no samples there is no mean
        }
        CHECK(report["tokens_per_second"]["teacher_training"].is_null());
    }
    // those of the models and the task are not
    contains(failure_text(with(tiny(dir / "a"), {from.c_str(), "--student-ffn=12"}), exit_usage), "student_model");
    contains(failure_text(with(tiny(dir / "b"), {from.c_str(), "--max-operand=21"}), exit_usage), "another task");
    const std::string late = "--start-from=" + dir / "whole/checkpoints/distill.ckpt";
    contains(failure_text(with(tiny(dir / "c"), {late.c_str()}), exit_usage), "not a warm student");
    const std::string missing = "--start-from=" + dir / "nowhere.ckpt";
    contains(failure_text(with(tiny(dir / "d"), {missing.c_str()}), exit_input), "nowhere.ckpt");
}

TEST_CASE("threads, slots and chunks change no byte") {
    const scratch dir;
    interrupted = false;
    run one(parse(with(tiny(dir / "a"), {"--threads=1"})));
    REQUIRE(go(one) == exit_ok);
    run three(parse(with(tiny(dir / "b"), {"--threads=3", "--slots=3", "--prefill-chunk=2"})));
    REQUIRE(go(three) == exit_ok);
    for (const char* name : checkpoints)
        CHECK(read_file(dir / (std::string("a/checkpoints/") + name)) ==
              read_file(dir / (std::string("b/checkpoints/") + name)));
    run other(parse(with(tiny(dir / "c"), {"--seed=2"})));
    REQUIRE(go(other) == exit_ok);
    CHECK(read_file(dir / "a/checkpoints/teacher.ckpt") != read_file(dir / "c/checkpoints/teacher.ckpt"));
}

TEST_CASE("every estimator runs, and the run directory holds what it promises") {
    const scratch dir;
    interrupted = false;
    for (std::string_view estimator : estimators) {
        CAPTURE(estimator);
        const std::string directory = dir / std::string(estimator);
        const std::string flag = "--estimator=" + std::string(estimator);
        const double begin = now();
        run r(parse(with(tiny(directory), {flag.c_str()})));
        REQUIRE(go(r) == exit_ok);
        const auto report = nlohmann::json::parse(read_file(directory + "/report.json"));
        CHECK(report["schedule"]["time"].get<double>() > 0);
        CHECK(report["schedule"]["time"].get<double>() <= now() - begin); // of distillation, not of the machine
        CHECK(report.contains("gap_closed"));
        for (const char* who : {"teacher", "before", "after"}) {
            CHECK(report["accuracy"][who].is_number());
            CHECK(fs::exists(directory + "/samples/" + who + ".jsonl"));
        }
        for (const char* stage : clock_names) {
            CHECK(report["tokens_per_second"][stage].get<double>() > 0);
            CHECK(report["seconds"][stage].get<double>() > 0);
        }
        const std::string log = read_file(directory + "/log.jsonl");
        const auto first = nlohmann::json::parse(log.substr(0, log.find('\n')));
        CHECK(first["version"].is_string());
        CHECK(first["config"]["distill"]["estimator"] == estimator);
        // the rollout's log-probs were the learner's at every logged step
        CHECK(log.find("\"mismatched\":0") != std::string::npos);
        CHECK(log.find("\"mismatched\":1") == std::string::npos);
    }
}

TEST_CASE("a run under another shape, surrogate and baseline") {
    const scratch dir;
    interrupted = false;
    run plain(parse(with(tiny(dir / "plain"), {"--estimator=mc"})));
    REQUIRE(go(plain) == exit_ok);
    run other(parse(with(tiny(dir / "other"), {"--estimator=mc", "--shape=mixed", "--shape-a=0.9",
                                               "--surrogate=ppo_clip", "--baseline=leave_one_out"})));
    REQUIRE(go(other) == exit_ok);
    const auto last_loss = [&](const char* which) {
        const std::string log = read_file(dir / (std::string(which) + "/log.jsonl"));
        const std::size_t last = log.rfind('\n', log.size() - 2) + 1;
        return nlohmann::json::parse(log.substr(last))["loss"].get<double>();
    };
    CHECK(last_loss("plain") != last_loss("other"));
}

TEST_CASE("a run whose rows a selector weighs") {
    const scratch dir;
    interrupted = false;
    int runs = 0;
    const auto last_loss = [&](std::initializer_list<const char*> more) {
        const std::string where = dir / std::to_string(runs++);
        run one(parse(with(tiny(where), more)));
        REQUIRE(go(one) == exit_ok);
        const std::string log = read_file(where + "/log.jsonl");
        const std::size_t last = log.rfind('\n', log.size() - 2) + 1;
        return nlohmann::json::parse(log.substr(last))["loss"].get<double>();
    };
    const double all = last_loss({});
    CHECK(last_loss({"--selector=tip", "--selector-a=0"}) == all); // H(p) >= 0: every row
    CHECK(last_loss({"--selector=prefix", "--selector-a=0"}) == 0);
    const double prefix = last_loss({"--selector=prefix", "--selector-a=3"});
    CHECK(prefix > 0); // of the response: a prompt's rows are no positions
    CHECK(prefix < all);
    CHECK(last_loss({"--selector=prefix", "--selector-a=3", "--selector-b=2"}) != prefix);
    CHECK(last_loss({"--selector=eopd", "--selector-a=0", "--selector-b=1"}) > all);
    CHECK(last_loss({"--selector=eopd", "--selector-a=100", "--selector-b=1"}) ==
          doctest::Approx(all).epsilon(1e-3)); // the same loss, by another sweep
    const double topk = last_loss({"--estimator=topk"});
    CHECK(last_loss({"--estimator=topk", "--selector=eopd", "--selector-a=0", "--selector-b=1"}) > topk);
    CHECK(last_loss({"--estimator=tail_bucket", "--selector=prefix", "--selector-a=0"}) == 0);
    const double mc = last_loss({"--estimator=mc"});
    CHECK(last_loss({"--estimator=mc", "--selector=band", "--selector-a=1000"}) == mc);
    CHECK(last_loss({"--estimator=threshold", "--selector=prefix", "--selector-a=0"}) == 0);
}

TEST_CASE("SIGINT writes a checkpoint and leaves with 130; the run goes on from it") {
    const scratch dir;
    const auto slow = with(tiny(dir / "run"), {"--teacher-steps=1000000", "--checkpoint-every=1000000"});
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) ::_exit(exit_of(slow));
    // the log's first line is there once the run is set up; then some steps are under way
    for (int i = 0; i < 2000 && !fs::exists(dir / "run/log.jsonl"); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(::kill(child, SIGINT) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == exit_interrupted);
    interrupted = false;
    run resumed(parse(with(slow, {"--resume"})));
    CHECK(resumed.state().stage == stage::teacher);
    CHECK(resumed.state().step > 0);
    const std::int64_t before = resumed.state().step;
    resumed.stop_after(2);
    CHECK(go(resumed) == exit_interrupted);
    CHECK(resumed.state().step == before + 2);
    interrupted = false;
}

TEST_CASE("exit codes and messages of a wrong command line") {
    const scratch dir;
    const auto base = tiny(dir / "run");
    CHECK(exit_of({"opd-train", "--no-such-flag"}) == exit_usage);
    CHECK(exit_of(with(base, {"--estimator=reverse"})) == exit_usage);
    CHECK(exit_of({"opd-train", "--config", dir / "missing.json"}) == exit_input);
    CHECK(exit_of(with(base, {"--run-dir=/dev/null/run"})) == exit_io);
    CHECK(exit_of(with(base, {"--loss-limit=0.001"})) == exit_numeric);

    contains(failure_text({"opd-train", "--stepz=3"}, exit_usage), "did you mean --steps?");
    contains(failure_text({"opd-train", "--steps=many"}, exit_usage), "--steps");
    for (const char* unlike : {"--offline", "--zzzzzz"}) {
        try {
            parse({"opd-train", unlike});
            FAIL("it was taken");
        } catch (const failure& e) {
            CHECK_MESSAGE(std::string(e.what()).find("did you mean") == std::string::npos, e.what());
        }
    }
    for (const char* dash : {"\u2014steps", "\u2013steps"})
        contains(failure_text({"opd-train", dash, "5"}, exit_usage), "begins with a dash that a text editor has made");
    CHECK(parse({"opd-train", "--steps=5", "--steps=6"}).warnings ==
          std::vector<std::string>{"--steps was given 2 times; the last, 6, counts"});
    CHECK(parse({"opd-train", "--steps=5", "--steps=5", "--quiet", "--quiet"}).warnings.empty());
    CHECK(exit_of(with(base, {("--run-dir=" + std::string(300, 'x')).c_str()})) == exit_io); // no name so long
    contains(failure_text(with(base, {"--estimator=reverse_k"}), exit_usage), "did you mean 'reverse_kl'?");
    contains(failure_text(with(base, {"--teacher-kv-heads=3"}), exit_usage),
             "--teacher-kv-heads (3) must divide --teacher-heads (2)");
    contains(failure_text(with(base, {"--rate=-1"}), exit_usage), "--rate must be positive and finite, not -1");
    contains(failure_text(with(base, {"--estimator=topk", "--k=16"}), exit_usage),
             "--k must be at most the vocabulary of 15");
    contains(failure_text(with(base, {"--eval-prompts=100000"}), exit_usage), "--eval-prompts must be at most");
    contains(failure_text(with(base, {"--resume", "--overwrite"}), exit_usage), "exclude each other");
    contains(failure_text(with(tiny(dir / "nothing"), {"--resume"}), exit_input), "there is no checkpoint");
}

TEST_CASE("numbers that a setting does not hold are refused under its name, with what it takes") {
    const auto refused = [](const std::string& flag, const std::string& value, const std::string& what) {
        contains(failure_text({"opd-train", flag, value}, exit_usage), flag + " must " + what);
    };
    const std::string whole = "be an integer from 0 to ";
    for (const char* value : {"-1", "1e23", "100000000000000000000000", "18446744073709551616", "1.5", "0x10", "+3",
                              " 3", "3 ", "-", "", "one"})
        refused("--seed", value, whole + "18446744073709551615, not '" + value + "'");
    CHECK(parse({"opd-train", "--seed", "18446744073709551615"}).settings.run.seed == ~std::uint64_t{0});
    CHECK(parse({"opd-train", "--seed=010"}).settings.run.seed == 10); // not octal

    // every integer there is, on the command line and in a file
    struct integers {
        std::vector<std::array<std::string, 3>> found = {}; // group, key, flag
        std::string group_key = {};
        void group(const char* key, const char*) { group_key = key; }
        void option(const char* key, const std::string& flag, const int&, const char*, bool) {
            found.push_back({group_key, key, flag});
        }
        void option(const char*, const std::string&, const bool&, const char*, bool) {}
        void option(const char*, const std::string&, const double&, const char*, bool) {}
        void option(const char*, const std::string&, const std::string&, const char*, bool) {}
        void option(const char*, const std::string&, const std::uint64_t&, const char*, bool) {}
    } all;
    config c;
    visit_options(c, all);
    CHECK(all.found.size() > 40);
    const auto read = [](const std::string& text) {
        config read_into;
        config_of_text(text, "my.json", read_into);
        validate(read_into);
    };
    for (const auto& [group, key, flag] : all.found) {
        for (const char* value : {"1e3", "2147483648", "-2147483649", "2.5", "1e400"}) {
            refused(flag, value, whole + "2147483647, not '" + value + "'");
            const std::string text = "{\"" + group + "\": {\"" + key + "\": " + value + "}}";
            CAPTURE(text);
            try {
                read(text);
                FAIL("it was taken");
            } catch (const failure& e) {
                CHECK(e.code == exit_usage);
                contains(e.what(), "my.json: " + group + "." + key);
            }
        }
        CHECK_THROWS_AS(parse({"opd-train", flag, "-1"}), failure); // of which none may be negative
    }

    refused("--threads", "10001", "lie in [0, 10000], not 10001");
    refused("--slots", "2147483647", "lie in [1, 1000000], not 2147483647");
    refused("--teacher-ffn", "2147483647", "lie in [1, 65536], not 2147483647");
    contains(failure_text({"opd-train", "--student-width=65536", "--student-layers=65536"}, exit_usage),
             "--student-layers, --student-heads");
    refused("--clip", "", "be a number, not ''");
    refused("--temperature", "1e-9",
            "lie in [1e-06, 1000000], not 1e-09"); // else the library would, under its own names
    contains(failure_text({"opd-train", "--estimator=alpha_divergence", "--alpha=1e5"}, exit_usage),
             "--alpha must lie in");
    for (const char* flag : {"--rate", "--epsilon", "--loss-limit", "--weight-decay", "--clip"})
        for (const char* value : {"nan", "inf", "1e400", "-1"})
            contains(failure_text({"opd-train", flag, value}, exit_usage), "finite, not ");
}

TEST_CASE("a refusal has the names that were written: flags, or the keys of a file") {
    const scratch dir;
    const std::string file = dir / "my.json";
    const auto refused = [&](const std::string& text, std::vector<std::string> flags, const std::string& what) {
        write_file(file, text);
        const std::vector<std::string> read = {"opd-train", "--config", file};
        flags.insert(flags.begin(), read.begin(), read.end());
        CHECK(failure_text(flags, exit_usage) == what);
    };
    // the library's names of these: teacher_flush, schedule.tau
    const std::string flush = " must be at most 1e9 seconds (64-bit nanoseconds end there)";
    refused("{}", {"--schedule=async", "--score-flush=1e10"}, "--score-flush" + flush);
    const std::string text = "{\"schedule\": {\"kind\": \"async\", \"score_flush\": 1e10}}";
    refused(text, {}, file + ": schedule.score_flush" + flush);
    refused(text, {"--score-flush=1e11"}, "--score-flush" + flush);
    refused("{\"schedule\": {\"kind\": \"async\", \"tau\": 1000000000}}", {},
            file + ": schedule.tau (tau + 1) batches must be below 2^31 sequences");
    refused("{\"teacher_model\": {\"heads\": 6}}", {"--teacher-kv-heads=4"},
            file + ": --teacher-kv-heads (4) must divide teacher_model.heads (6)");
    refused("{\"distill\": {\"rate\": 1e400}}", {}, file + ": distill.rate: number overflow parsing '1e400'");
    refused("{\"distill\": {\"m\": 4}}", {}, file + ": distill.m is not used by --estimator reverse_kl");

    // every setting of the library has a name here, whatever it is refused for
    using namespace opd::sched;
    const auto flag_of = [](settings s) {
        try {
            plan_of(s);
        } catch (const opd::invalid_input& e) {
            return in_options(e).substr(0, in_options(e).find(' '));
        }
        return std::string("taken");
    };
    CHECK(flag_of({.batch = 0}) == "--prompts");
    CHECK(flag_of({.sequences = -1}) == "--steps");
    CHECK(flag_of({.teacher_batch = 0}) == "--score-batch");
    CHECK(flag_of({.teacher_flush = 1e10}) == "--score-flush");
    CHECK(flag_of({.schedule = step_off{-1}}) == "--schedule-k");
    CHECK(flag_of({.schedule = async{.tau = -1}}) == "--tau");
    CHECK(flag_of({.schedule = async{.outstanding = 1}}) == "--outstanding");
    CHECK(flag_of({.schedule = async{.concurrency = 1}}) == "--concurrency");
    CHECK(flag_of({.schedule = async{.policy = staleness_policy::naive_wait}}) == "--staleness-policy");
}

#if !OPD_TEST_SANITIZED
TEST_CASE("refused memory and refused threads have an exit code of their own") {
    const scratch dir;
    const auto exit_within = [](const std::vector<std::string>& arguments, std::size_t gigabytes = 4) {
        return opd::test::within_address_space(gigabytes << 30, 120, [&] { return exit_of(arguments); });
    };
    CHECK(exit_within(with(tiny(dir / "a"), {"--threads=1000000"})) == exit_usage);
    CHECK(exit_within(with(tiny(dir / "b"), {"--threads=10000"})) == exit_resources);
    CHECK_FALSE(fs::exists(dir / "b")); // nothing is begun
    CHECK(exit_within(with(tiny(dir / "c"), {"--teacher-width=20000", "--teacher-ffn=20000"})) == exit_resources);
    CHECK(exit_within(with(tiny(dir / "d"), {"--steps=1", "--schedule=async", "--slots=1000000",
                                             "--student-head-dim=64"})) == exit_resources);
    // where no more sequences run than there are, no more memory is asked for
    // beside the empty lanes, of 3.4 kB each
    CHECK(exit_within(with(tiny(dir / "e"), {"--steps=1", "--slots=1000000"}), 5) == exit_ok);
}

TEST_CASE("what memory was refused for is said") {
    const scratch dir;
    // in a child, whose text is its exit code: 0 if all of it is there
    const auto said = [&](std::initializer_list<const char*> more, const char* part) {
        const auto arguments = with(tiny(dir / "run"), more);
        return opd::test::within_address_space(std::size_t{1} << 30, 120, [&] {
            try {
                run(parse(arguments)).go();
            } catch (const failure& e) {
                return std::string(e.what()).find(part) != std::string::npos ? int{e.code} : 1;
            }
            return 0;
        });
    };
    CHECK(said({"--teacher-width=20000", "--teacher-ffn=20000"}, "the teacher model: teacher_model.width") ==
          exit_resources);
    CHECK(said({"--overwrite", "--teacher-batch=1000000"}, "--teacher-batch") == exit_resources);
    CHECK(said({"--overwrite", "--steps=1", "--schedule=async", "--slots=1000000", "--student-head-dim=64"},
               "sequences: --slots sets how many") == exit_resources);
}
#endif

TEST_CASE("a full disk leaves no half of a file, and says how the run goes on") {
    const scratch dir;
    const std::string directory = dir / "run";
    {
        run first(parse(tiny(directory)));
        first.stop_after(30);
        interrupted = false;
        REQUIRE(go(first) == exit_interrupted);
    }
    interrupted = false;
    const std::string before = read_file(directory + "/checkpoints/latest.ckpt");
    const auto arguments = with(tiny(directory), {"--resume"});
    const command c = parse(arguments);
    // no file may be as large as a checkpoint
    const int code = opd::test::within_limit(RLIMIT_FSIZE, before.size() - 1, 120, [&] {
        try {
            run(c).go();
        } catch (const failure& e) {
            const std::string text = told(c, e);
            const bool said = text.find("latest.ckpt.tmp") != std::string::npos &&
                              text.find("--run-dir " + directory + " --resume goes on") != std::string::npos;
            return said ? int{e.code} : 1;
        }
        return 0;
    });
    CHECK(code == exit_io);
    for (const auto& entry : fs::recursive_directory_iterator(directory)) CHECK(entry.path().extension() != ".tmp");
    CHECK(read_file(directory + "/checkpoints/latest.ckpt") == before);
    run second(c);
    CHECK(go(second) == exit_ok);
    // a failure of another kind, or without a checkpoint, promises nothing
    CHECK(told(c, failure(exit_numeric, "not a number")) == "not a number");
    CHECK(told(parse(tiny(dir / "none")), failure(exit_io, "no room")) == "no room");
}

TEST_CASE("a failure that comes first is the one that is told, and an output that cannot be written has its code") {
    const scratch dir;
    const auto code_of = [&](const std::string& name, std::initializer_list<const char*> more) {
        fs::create_directories(dir / (name + "/trace.json.part/full")); // there the trace cannot be written
        try {
            run r(parse(with(tiny(dir / name), more)));
            return int{opd::test::go(r)};
        } catch (const failure& e) {
            CHECK_MESSAGE((std::string(e.what()).find("trace.json") != std::string::npos) == (e.code == exit_io),
                          e.what());
            return int{e.code};
        }
    };
    CHECK(code_of("trace", {}) == exit_io);
    CHECK(code_of("both", {"--rate=1e38", "--warmup=0"}) == exit_numeric);
}

TEST_CASE("a run says what it will do and how long that takes, why a warm-up ends, and that it is finished") {
    const scratch dir;
    std::vector<std::string> loud = tiny(dir / "run");
    std::erase(loud, "--quiet");
    {
        const told_lines told;
        run r(parse(with(loud, {"--student-target-accuracy=0"})));
        const int keep = ::dup(STDERR_FILENO); // progress
        REQUIRE(std::freopen("/dev/null", "w", stderr) != nullptr);
        CHECK(go(r) == exit_ok);
        std::fflush(stderr), ::dup2(keep, STDERR_FILENO), ::close(keep);
        contains(told.text.str(), "into " + dir / "run" +
                                      ": 14 steps of the teacher, at most 12 of the student's warm-up, "
                                      "13 of distillation (reverse_kl, sync); about ");
        contains(told.text.str(), "ends after 5 of at most 12 steps: its target_accuracy of 0 is reached");
    }
    const told_lines told;
    run again(parse(with(tiny(dir / "run"), {"--student-target-accuracy=0", "--resume"})));
    contains(told.text.str(), "is finished; --resume --steps N, beyond the 13 that it made, goes on with it");

    forecast f;
    f.stages = {{{10, 2, 5}, {20, 1, 3}, {30, 0.5, 1}}};
    CHECK(f.from(stage::teacher, 4) == 6 * 2 + 5 + 20 + 3 + 15 + 1);
    CHECK(f.after(stage::teacher) == 5 + 20 + 3 + 15 + 1);
    CHECK(f.after(stage::distill) == 1);
    CHECK(f.from(stage::finished, 0) == 0);
    CHECK(in_words(41.4) == "about 41 seconds");
    CHECK(in_words(600) == "about 10 minutes");
    CHECK(in_words(6000) == "about 1.7 hours");
    // a moment of each kind of work is measured; what it comes to is arithmetic
    const auto of = [&](std::initializer_list<const char*> more) {
        return with_task_shapes(parse(with(loud, more)).settings, *task_of(parse(loud).settings));
    };
    const config small = of({"--teacher-batch=4", "--student-batch=2", "--prompts=6", "--eval-prompts=10",
                             "--eval-samples=3", "--eval-every=0"});
    {
        opd::cpu_backend backend{.threads = 1};
        const pace p = measured(small, *task_of(small), transformer<float>(small.teacher_model),
                                transformer<float>(small.student_model), backend);
        for (const double part : {p.teacher.step, p.teacher.token, p.student.step, p.student.token})
            CHECK((part > 0 && part < 60));
        CHECK(p.answer >= 1);
    }
    const pace at{.teacher = {.step = 8, .token = 1}, .student = {.step = 4, .token = 0.5}, .answer = 10};
    const forecast is = forecast_at(at, small);
    CHECK(is.stages[0].steps == small.teacher.steps);
    CHECK(is.stages[0].step == 8);
    CHECK(is.stages[0].end == 10 * (1 + 3) * 10 * 1.0);
    CHECK(is.stages[1].steps == small.student.max_steps);
    CHECK(is.stages[1].step == 4 + small.student.check_prompts * 10 * 0.5 / small.student.check_every);
    CHECK(is.stages[1].end == 10 * (1 + 3) * 10 * 0.5);
    CHECK(is.stages[2].steps == small.distill.steps);
    const int answers = batch_of(small);
    CHECK(is.stages[2].step == doctest::Approx(answers * (4.0 / 2 + 8.0 / 4 / 3 + 10 * 0.5)).epsilon(1e-12));
    CHECK(is.stages[2].end == is.stages[1].end);
    const forecast four = forecast_at(at, of({"--teacher-batch=4", "--student-batch=2", "--prompts=24",
                                              "--eval-prompts=40", "--eval-samples=3", "--eval-every=0"}));
    CHECK(four.stages[2].step == doctest::Approx(4 * is.stages[2].step).epsilon(1e-12));
    CHECK(four.stages[2].end == 4 * is.stages[2].end);
}

TEST_CASE("report.html has the table, the settings that were changed, the plots, and commands that can be run") {
    const scratch dir;
    const std::string directory = dir / "run";
    run r(parse(tiny(directory)));
    {
        const opd::test::with_plots drawn;
        REQUIRE(go(r) == exit_ok);
    }
    const std::string page = read_file(directory + "/report.html");
    const auto report = nlohmann::ordered_json::parse(read_file(directory + "/report.json"));
    const auto count = [](const std::string& text, const std::string& part) {
        int n = 0;
        for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
        return n;
    };
    for (const char* part :
         {"student before", "gap closed", "teacher_scoring", "<td>teacher_model.width</td><td>8</td>",
          "<td>distill.steps</td><td>13</td><td>3600</td>", "KL(.|teach)"})
        contains(page, part);
    contains(page, report["fingerprint"].get<std::string>());
    CHECK(page.find("<td>distill.rate</td>") == std::string::npos); // as ever
    int drawn = 0;
    for (const auto& file : fs::directory_iterator(directory + "/plots")) drawn += file.path().extension() == ".svg";
    CHECK(count(page, "<svg") == drawn);
    CHECK((drawn > 0 || page.find("gnuplot draws them") != std::string::npos));
    for (const char* part : {"src=", "href=\"http", "<script"}) CHECK(page.find(part) == std::string::npos);
    for (const char* tag : {"pre", "table", "figure", "details", "dl", "body"})
        CHECK(count(page, std::string("<") + tag + ">") == count(page, std::string("</") + tag + ">"));

    // what it says to try is taken by the command line, in words of this run
    config c = parse(tiny(directory)).settings;
    const auto tries = [&](double gap) {
        nlohmann::ordered_json j = report;
        j["gap_closed"] = std::isnan(gap) ? nlohmann::ordered_json() : nlohmann::ordered_json(gap);
        std::string all;
        for (const next_try& t : what_to_try(c, j)) {
            std::vector<std::string> arguments = t.arguments;
            arguments.insert(arguments.begin(), "opd-train");
            CHECK_NOTHROW(parse(arguments, false));
            for (const std::string& a : t.arguments) all += a + " ";
        }
        return all;
    };
    contains(tries(0.5), "--resume --steps 26 ");
    contains(tries(0.5), "--schedule async --tau 4 ");
    contains(tries(0.5), "--write-offline " + directory + "/set ");
    CHECK(tries(0.99).find("--resume") == std::string::npos);
    contains(tries(NAN), "--student-max-steps 3 ");

    // nobody's names become markup or a shell's words
    c.run.directory = dir / "a <b> & 'c'";
    const std::string hostile = report_page(c, report, "1 < 2 & \"3\"");
    CHECK(hostile.find("<b> ") == std::string::npos);
    contains(hostile, "a &lt;b&gt; &amp; 'c'");
    contains(hostile, "1 &lt; 2 &amp; &quot;3&quot;");
    contains(hostile, "--run-dir '" + (dir / "a &lt;b&gt; &amp; '\\''c'\\''-seed'"));
}

TEST_CASE("plots leave out what a step has nothing of") {
    const scratch dir;
    std::ofstream(dir / "log.jsonl")
        << R"({"stage":"distill","step":1,"loss":1,"schedule":{"speculation":{"accepted_per_step":2.5,"tokens_per_step":3.5,"choices":{"none":3}}}})"
        << "\n"
        << R"({"stage":"distill","step":2,"loss":1,"schedule":{"speculation":{"accepted_per_step":null,"tokens_per_step":1.5,"choices":{"a":3}}}})"
        << "\n"
        << R"({"stage":"distill","step":3,"loss":1,"schedule":{"speculation":{"accepted_per_step":null,"tokens_per_step":null,"choices":{}}}})"
        << "\n";
    draw_plots(dir.path.string(), {{"before", {{"accuracy", 0.25}}}, {"after", {{"accuracy", 0.5}}}}, "mc, sync");
    const std::string script = read_file(dir / "plots/plots.gp");
    contains(script, "set title \"Loss\\nmc, sync\" noenhanced\n");
    contains(script, "$accuracy << EOD\n0 0.25\nEOD"); // from the student that began
    contains(script, "$after << EOD\n3 0.5\nEOD");
    contains(script, "$drafts << EOD\n1 2.5 3.5\n2 nan 1.5\nEOD");
    contains(script, "$choices << EOD\n1 0 1\n2 1 1\nEOD");
    CHECK(script.find("loss_mean") == std::string::npos);
}

TEST_CASE("a loss of many steps is drawn with its mean over a twentieth of them") {
    const scratch dir;
    {
        std::ofstream log(dir / "log.jsonl");
        for (int step = 1; step <= 40; ++step)
            log << R"({"stage":"distill","step":)" << step << R"(,"loss":)" << (step % 2 == 0 ? 3 : step) << "}\n";
    }
    draw_plots(dir.path.string(), {}, "mc, sync");
    const std::string script = read_file(dir / "plots/plots.gp");
    contains(script, "$loss_mean << EOD\n2 2\n3 3\n4 3\n5 4\n6 4\n");
    contains(script, "40 21\nEOD");
    contains(script, "$loss_mean using 1:2 with lines lw 3 title 'distill loss, mean of 2'");
}

TEST_CASE("configuration files are strict and can be read back") {
    const scratch dir;
    const auto write = [&](const std::string& text) {
        std::ofstream(dir / "c.json") << text;
        return std::vector<std::string>{"opd-train", "--config", dir / "c.json"};
    };
    contains(failure_text(write("{\"distil\": {}}"), exit_usage), "unknown key 'distil'; did you mean 'distill'?");
    contains(failure_text(write("{\"distill\": {\"stepz\": 1}}"), exit_usage),
             "unknown key 'stepz' in 'distill'; did you mean 'steps'?");
    contains(failure_text(write("{\"distill\": {\"steps\": \"ten\"}}"), exit_usage),
             "distill.steps must be an integer from 0 to 2147483647, not \"ten\"");
    contains(failure_text(write("{\"distill\": {\"steps\": 1e30}}"), exit_usage), "distill.steps must be an integer");
    contains(failure_text(write("{\"distill\": 3}"), exit_usage), "'distill' must be an object");
    contains(failure_text(write("[1]"), exit_usage), "a configuration is a JSON object");
    contains(failure_text(write("{\"seed\": 1}"), exit_usage), "settings stand in their groups; it is run.seed");
    contains(failure_text(write("{\"steps\": []}"), exit_usage),
             "it is teacher.steps or distill.steps or drafter.steps");
    contains(failure_text(write("{} // note"), exit_usage), "JSON has no comments");
    contains(failure_text(write("{"), exit_usage), "parse error");

    // a flag overrides the file, the file the default
    const auto from_file = parse(
        with(write("{\"distill\": {\"estimator\": \"mc\", \"steps\": 7, \"m\": 3}}"), {"--m=5", "--print-config"}));
    CHECK(from_file.settings.distill.steps == 7);
    CHECK(from_file.settings.distill.m == 5);
    std::ofstream(dir / "printed.json") << from_file.text;
    const auto again = parse({"opd-train", "--config", dir / "printed.json", "--print-config"});
    CHECK(again.text == from_file.text);
    CHECK(fingerprint(again.settings) == fingerprint(from_file.settings));
    CHECK(fingerprint(again.settings).size() == 32);
}

TEST_CASE("an estimator takes its own settings and refuses those that it would ignore") {
    const scratch dir;
    const std::vector<std::pair<const char*, std::vector<std::string>>> used_by = {
        {"--jsd-w=0.5", {"jsd"}},
        {"--jsd-o=0.5", {"jsd"}},
        {"--skew=0.1", {"skew_forward_kl", "skew_reverse_kl"}},
        {"--alpha=0.5", {"alpha_divergence"}},
        {"--k=4", {"topk", "topk_rw", "tail_bucket"}},
        {"--topk-from=teacher", {"topk", "tail_bucket"}},
        {"--m=4", {"mc"}},
        {"--budget=4", {"threshold"}},
        {"--shape=reverse_kl", {"mc", "threshold"}},
        {"--surrogate=unclipped_is", {"mc", "threshold"}},
        {"--baseline=exact_entries", {"mc", "threshold"}},
        {"--m2po=0", {"mc", "threshold"}},
        {"--accept-bias", {"mc", "threshold"}}};
    for (const std::string_view e : estimators) {
        const std::string estimator = "--estimator=" + std::string(e);
        for (const auto& [flag, users] : used_by) { // each with the value that it has anyhow
            CAPTURE(estimator);
            CAPTURE(flag);
            const std::string name = std::string(flag).substr(0, std::string(flag).find('='));
            if (std::find(users.begin(), users.end(), e) != users.end())
                CHECK(parse({"opd-train", estimator, flag}).settings.distill.estimator == e);
            else
                contains(failure_text({"opd-train", estimator, flag}, exit_usage),
                         name + " is not used by --estimator " + std::string(e));
        }
    }
    // what is printed is what is used; a file is held to the same rule
    const auto printed = parse({"opd-train", "--estimator=mc", "--m=8", "--print-config"});
    const auto j = nlohmann::json::parse(printed.text)["distill"];
    CHECK(j["m"] == 8);
    for (const char* key : {"jsd_w", "jsd_o", "skew", "alpha", "k", "topk_from", "budget"})
        CHECK_FALSE(j.contains(key));
    write_file(dir / "mc.json", printed.text);
    CHECK(parse({"opd-train", "--config", dir / "mc.json", "--print-config"}).text == printed.text);
    contains(failure_text({"opd-train", "--config", dir / "mc.json", "--estimator=reverse_kl"}, exit_usage),
             "distill.m is not used by --estimator reverse_kl");
}

TEST_CASE("a divergence of dense logits is the library's, with the settings that bear its name") {
    using kind = opd::choice::objective;
    const auto chosen = [](std::initializer_list<const char*> more) {
        return dense_estimator(parse(with({"opd-train"}, more)).settings);
    };
    for (const auto& line : opd::choice::divergences)
        CHECK(chosen({("--estimator=" + std::string(line.text)).c_str()})->which == line.which);
    for (const auto& line : part_estimators)
        CHECK_FALSE(chosen({("--estimator=" + std::string(line.text)).c_str()}).has_value());
    const auto jsd = chosen({"--estimator=jsd", "--jsd-w=0.3", "--jsd-o=0.7"});
    CHECK(jsd->which == kind::jsd);
    CHECK(jsd->a == 0.3);
    CHECK(jsd->b == 0.7);
    CHECK(chosen({"--estimator=skew_forward_kl", "--skew=0.25"})->a == 0.25);
    CHECK(chosen({"--estimator=skew_reverse_kl", "--skew=0.25"})->a == 0.25);
    CHECK(chosen({"--estimator=alpha_divergence", "--alpha=-2"})->a == -2);
    contains(failure_text({"opd-train", "--estimator=skew_forward"}, exit_usage), "did you mean 'skew_forward_kl'?");
}

TEST_CASE("shapes, surrogates and baselines: composed as the library composes them, refused in its words") {
    const auto mc = [](std::initializer_list<const char*> more) {
        return with(with({"opd-train"}, {"--estimator=mc"}), more);
    };
    const std::string list = parse({"opd-train", "--list-estimators"}).text, help = parse({"opd-train", "--help"}).text;
    for (const auto& line : opd::choice::objectives) contains(list, std::string(line.text) + " ");
    for (const std::string_view e : estimators) {
        contains(list, "\n  " + std::string(e) + " ");
        contains(help, std::string(e));
    }
    CHECK(parse(mc({"--shape=clipped", "--shape-a=5", "--surrogate=ppo_clip", "--dual-clip=3"}))
              .settings.distill.shape_a == 5);
    parse(mc({"--surrogate=score_function"})); // sync: the student's own tokens
    const auto refused = [&](std::initializer_list<const char*> more, const char* part) {
        contains(failure_text(mc(more), exit_usage), part);
    };
    refused({"--shape=total_variatoin"}, "did you mean 'total_variation'?");
    refused({"--surrogate=ppo"}, "--surrogate: 'ppo' is not one of unclipped_is");
    refused({"--schedule=async", "--surrogate=score_function"}, "descends something else");
    parse(mc({"--schedule=async", "--surrogate=score_function", "--accept-bias"}));
    refused({"--shape=old", "--schedule=async"}, "descends something else");
    refused({"--surrogate=k1", "--baseline=none"}, "descends nothing");
    refused({"--surrogate=k2"}, "it has no advantage");
    refused({"--baseline=value"}, "does not read this cache");
    refused({"--shape=extrapolated"}, "reads what this trainer does not record");
    refused({"--surrogate=gspo"}, "needs a pass over whole sequences");
    refused({"--shape=clipped", "--shape-a=-1"}, "shape::clipped.a");
    refused({"--shape-a=1"}, "--shape-a is not used by --shape reverse_kl");
    refused({"--clip-low=0.1"}, "--clip-low is not used by --surrogate unclipped_is");
    refused({"--surrogate=cispo", "--dual-clip=3"}, "--dual-clip is not used by --surrogate cispo");
    contains(failure_text({"opd-train", "--estimator=threshold", "--baseline=leave_one_out"}, exit_usage),
             "does not read this cache");
}

TEST_CASE("advice where a schedule and an estimator do not fit") {
    const auto advice = [](std::initializer_list<const char*> more, int vocabulary) {
        std::vector<std::string> arguments{"opd-train"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        std::string all;
        for (const std::string& line : advice_on(parse(arguments).settings, vocabulary)) all += line + "\n";
        return all;
    };
    CHECK(advice({"--schedule=async"}, 15).empty());
    CHECK(advice({"--schedule=async"}, 150000).empty());
    CHECK(advice({"--estimator=mc"}, 15).empty()); // sync: nothing is stale
    CHECK(advice({"--schedule=async", "--tau=0", "--estimator=mc"}, 15).empty());
    contains(advice({"--schedule=async", "--estimator=topk", "--topk-from=student"}, 15), "--estimator reverse_kl");
    contains(advice({"--schedule=step-off", "--estimator=tail_bucket", "--topk-from=student"}, 150000),
             "--estimator reverse_kl --teacher-cache hidden, or --estimator threshold");
    CHECK(advice({"--schedule=step-off", "--schedule-k=0", "--estimator=topk", "--topk-from=student"}, 15).empty());
    CHECK(advice({"--schedule=async", "--estimator=topk", "--topk-from=teacher"}, 15).empty());
    contains(advice({"--schedule=async", "--estimator=mc"}, 15), "with variance on top");
    contains(advice({"--schedule=async", "--estimator=mc"}, 150000), "less variance");
    CHECK(advice({"--schedule=async", "--estimator=threshold"}, 150000).empty());
}

TEST_CASE("selectors: refused where the rows do not know what they read") {
    const auto refused = [&](std::initializer_list<const char*> more, const char* part) {
        contains(failure_text(with({"opd-train"}, more), exit_usage), part);
    };
    const std::string list = parse({"opd-train", "--list-estimators"}).text;
    for (const auto& line : opd::choice::selectors) contains(list, "\n  " + std::string(line.text) + " ");
    refused({"--selector=agreeed"}, "did you mean 'agreed'?");
    refused({"--selector=band", "--selector-a=1"}, "reads what these rows do not know");
    refused({"--estimator=mc", "--selector=agreed"}, "reads what these rows do not know");
    refused({"--estimator=tail_bucket", "--selector=tip"}, "reads what these rows do not know");
    refused({"--estimator=jsd", "--selector=eopd"}, "mixes two divergences");
    refused({"--selector=eopd", "--selector-b=-1"}, "eopd: tau must be finite");
    refused({"--selector=prefix", "--selector-a=-1"}, "prefix: depth");
    refused({"--selector=prefix", "--selector-b=-1"}, "--selector-b must be at least 0");
    refused({"--selector-a=1"}, "--selector-a is not used by --selector all");
    refused({"--selector=agreed", "--selector-b=1"}, "--selector-b is not used by --selector agreed");
    CHECK(selector_of(parse({"opd-train", "--selector=prefix", "--selector-a=4", "--selector-b=10"}).settings, 25)
              .weights.a == 6);
}

TEST_CASE("a schedule takes its own settings and refuses those that it would ignore") {
    const scratch dir;
    const auto flags = [](std::initializer_list<const char*> more) { return with({"opd-train"}, more); };
    const auto refused = [&](std::initializer_list<const char*> more, const char* part) {
        CAPTURE(part);
        contains(failure_text(flags(more), exit_usage), part);
    };
    // given, even with the value that it has anyhow
    refused({"--tau=4"}, "--tau is not used by --schedule sync");
    refused({"--score-flush=1"}, "--score-flush is not used by --schedule sync");
    refused({"--schedule=step-off", "--score-flush=1"}, "--score-flush is not used by --schedule step-off");
    refused({"--rollout-workers=33"}, "--slots (32) must be at least --rollout-workers (33)");
    refused({"--teachers=-1"}, "--teachers must be at least 0, not -1");
    refused({"--teachers=10001"}, "--teachers must be at most 10000, not 10001");
    refused({"--score-batch=-1"}, "--score-batch must be at least 0, not -1");
    refused({"--mini-batches=0"}, "--mini-batches must divide --prompts times --answers, 32, not be 0");
    refused({"--mini-batches=5"}, "--mini-batches must divide --prompts times --answers, 32, not be 5");
    refused({"--attempts=0"}, "--attempts must be at least 1, not 0");
    refused({"--teacher-deadline=-1"}, "--teacher-deadline must be at least 0");
    refused({"--sync-deadline=2e9"}, "--sync-deadline must be at most 1e9 seconds");
    refused({"--inject-seconds=1"}, "--inject-seconds is not used by a run without --inject");
    refused({"--inject=kil=0.1"}, "names kill, delay and drop, not 'kil'; did you mean 'kill'?");
    refused({"--inject=kill"}, "takes shares of the calls in [0, 1], as in kill=0.01,drop=0.02, not 'kill'");
    refused({"--inject=kill=1.5"}, "not 'kill=1.5'");
    refused({"--inject=kill=0.6,delay=0.6"}, "takes shares that add up to 1 at most, not 1.2");
    refused({"--inject=drop=0.1", "--teacher-deadline=1"}, "drop needs --rollout-deadline, --teacher-deadline and");
    refused({"--inject=kill=0.1", "--inject-seconds=0"}, "--inject-seconds must lie in (0, 1e6], not 0");
    refused({"--schedule=async", "--weight-update=abort", "--park-after=3"},
            "--park-after is not used by --schedule async --weight-update abort");
    refused({"--schedule=async", "--park-after=-1"}, "--park-after must be at least 0, not -1");
    refused({"--schedule=async", "--driver=virtual", "--learner-threads=1"},
            "--learner-threads is not used by --driver virtual");
    refused({"--schedule=async", "--learner-threads=-1"}, "--learner-threads must lie in [0, 10000], not -1");
    refused({"--schedule=step-off", "--tau=1"}, "--tau is not used by --schedule step-off");
    refused({"--schedule=controlled", "--staleness-policy=edf"},
            "--staleness-policy is not used by --schedule control");
    refused({"--schedule=step-off", "--weight-update=keep"}, "--weight-update is not used by --schedule step-off");
    refused({"--schedule=async", "--schedule-k=1"}, "--schedule-k is not used by --schedule async");
    refused({"--schedule=async", "--concurrency=8"}, "--concurrency belongs to the policy areal");
    refused({"--schedule=async", "--concurrency=0"},
            "--concurrency is not used by --schedule async --staleness-policy edf");
    refused({"--schedule=async", "--staleness-policy=areal", "--outstanding=64"},
            "--outstanding must be widest under areal");
    refused({"--schedule=async", "--staleness-policy=areal", "--outstanding=widest"}, "--outstanding is not used by");
    // misspelt or impossible
    refused({"--schedule=asinc"},
            "--schedule: 'asinc' is not one of sync, step-off, controlled, async; did you mean 'async'?");
    refused({"--schedule=async", "--staleness-policy=edg"}, "did you mean 'edf'?");
    refused({"--schedule=async", "--staleness-policy=naive_wait"}, "is not one of capacity");
    refused({"--schedule=async", "--weight-update=finish-first"}, "did you mean 'finish_first'?");
    refused({"--schedule=async", "--tau=-1"}, "--tau must be at least 0, not -1");
    refused({"--schedule=async", "--outstanding=many"},
            "--outstanding must be by_policy, automatic, widest or a number");
    refused({"--schedule=async", "--outstanding=0"}, "--outstanding must be by_policy, automatic, widest or a number");
    refused({"--schedule=async", "--staleness-policy=in_order", "--outstanding=automatic"},
            "--outstanding cannot be automatic under in_order");
    refused({"--schedule=async", "--outstanding=31"}, "--outstanding must be at least the batch, 32, not 31");
    refused({"--schedule=async", "--tau=1", "--outstanding=65"}, "--outstanding must be at most (tau + 1)");
    refused({"--schedule=async", "--rollout-workers=-1"}, "--rollout-workers must be at least 0");
    refused({"--schedule=async", "--rollout-workers=33"}, "--slots (32) must be at least --rollout-workers (33)");
    refused({"--schedule=async", "--score-flush=-1"}, "--score-flush must be at least 0");

    refused({"--answers=0"}, "--answers must lie in [1, 1000000], not 0");
    refused({"--prompts=2000", "--answers=1000"}, "--prompts (2000) times --answers (1000) must be at most 1000000");
    refused({"--schedule=async", "--answers=4", "--outstanding=130"}, "--answers must divide batch and outstanding");
    refused({"--schedule=async", "--staleness-policy=areal", "--answers=4", "--concurrency=3"},
            "--concurrency must be at least group, 4");

    // what is taken becomes the scheduler's settings
    namespace sched = opd::sched;
    CHECK(std::holds_alternative<sched::sync>(schedule_of(parse(flags({})).settings).schedule));
    const auto async =
        schedule_of(parse(flags({"--schedule=async", "--tau=2", "--outstanding=64", "--staleness-policy=edf",
                                 "--weight-update=abort", "--steps=10", "--score-batch=3", "--score-flush=0.5"}))
                        .settings);
    REQUIRE(std::holds_alternative<sched::async>(async.schedule));
    CHECK(std::get<sched::async>(async.schedule).tau == 2);
    CHECK(std::get<sched::async>(async.schedule).outstanding == 64);
    CHECK(std::get<sched::async>(async.schedule).policy == sched::staleness_policy::edf);
    CHECK(std::get<sched::async>(async.schedule).update == sched::weight_update::abort);
    CHECK(async.batch == 32);
    CHECK(async.sequences == 320);
    CHECK(async.teacher_batch == 3);
    CHECK(async.teacher_flush == 0.5);
    const auto plain = schedule_of(parse(flags({"--schedule=async"})).settings);
    CHECK(plain.group == 1);
    const auto grouped =
        schedule_of(parse(flags({"--schedule=async", "--answers=4", "--prompts=6", "--steps=10"})).settings);
    CHECK(grouped.group == 4);
    CHECK(grouped.batch == 24);
    CHECK(grouped.sequences == 240);
    CHECK(std::get<sched::async>(plain.schedule).policy == sched::staleness_policy::edf);
    CHECK(sched::plan_of(plain).automatic);
    const auto off = schedule_of(parse(flags({"--schedule=step-off", "--schedule-k=3"})).settings);
    REQUIRE(std::holds_alternative<sched::step_off>(off.schedule));
    CHECK(std::get<sched::step_off>(off.schedule).k == 3);
    const auto still = schedule_of(parse(flags({"--schedule=controlled"})).settings);
    REQUIRE(std::holds_alternative<sched::controlled>(still.schedule));
    CHECK(std::get<sched::controlled>(still.schedule).k == 2);

    // what is printed is what is used, and can be read back; a file is held to the same rule
    const auto printed = parse(flags({"--schedule=async", "--tau=2", "--print-config"}));
    const auto j = nlohmann::json::parse(printed.text);
    CHECK(j["schedule"]["tau"] == 2);
    CHECK_FALSE(j["schedule"].contains("k"));
    write_file(dir / "async.json", printed.text);
    const std::string file = dir / "async.json";
    const auto again = parse({"opd-train", "--config", file, "--print-config"});
    CHECK(again.text == printed.text);
    CHECK(fingerprint(again.settings) == fingerprint(printed.settings));
    CHECK(fingerprint(again.settings) != fingerprint(parse(flags({"--schedule=async", "--tau=3"})).settings));
    contains(failure_text({"opd-train", "--config", file, "--schedule=step-off"}, exit_usage),
             "schedule.tau is not used by --schedule step-off");
    const auto untold = nlohmann::json::parse(parse(flags({"--print-config"})).text)["schedule"];
    CHECK(untold["kind"] == "sync");
    for (const char* key : {"tau", "k", "score_flush", "cost_step", "inject_seconds"}) CHECK(!untold.contains(key));
    for (const char* key : {"rollout_workers", "teachers", "driver", "inject"}) CHECK(untold.contains(key));
}

namespace {

// Each setting stands in the list by its key, with its flag or without.
struct setting_lines {
    std::string text;
    std::set<std::string> flags = {};
    std::string group_key = {};
    void group(const char* key, const char*) { group_key = key; }
    template <class T>
    void option(const char* key, const std::string& flag, const T&, const char*, bool) {
        flags.insert(flag);
        const std::string line = "\n  " + group_key + "." + key + " = ";
        const std::size_t at = text.find(line);
        REQUIRE_MESSAGE(at != std::string::npos, line);
        const std::string rest = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
        CHECK_MESSAGE(rest.ends_with(" (" + flag + ")") == is_flag_of_train(flag), rest);
    }
};

} // namespace

TEST_CASE("help names every flag with its default, --list-settings what a file may have beside them") {
    const auto help = parse({"opd-train", "--help"}, false).text;
    for (const char* part : {"--estimator", "reverse_kl", "--run-dir", "--resume", "--seed", "Exit codes", "3600"})
        contains(help, part);
    const auto lines_with = [](const std::string& text, const std::string& begin) {
        int n = 0;
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) n += line.starts_with(begin);
        return n;
    };
    CHECK(lines_with(help, "  -") <= 70);
    CHECK(lines_with(parse({"opd-train", "--help"}).text, "  -") > 170);

    setting_lines all{parse({"opd-train", "--list-settings"}, false).text};
    config c;
    visit_options(c, all);
    for (const std::string_view flag : flags_of_train) CHECK_MESSAGE(all.flags.contains(std::string(flag)), flag);
    for (const std::string& flag : all.flags) // no help speaks of a flag that is none
        if (!is_flag_of_train(flag)) {
            CAPTURE(flag);
            CHECK(help.find(flag + " ") == std::string::npos);
            CHECK(all.text.find(flag + " ") == std::string::npos);
        }
}

TEST_CASE("what only a file has: read from it, refused as a flag, and told by its key") {
    const scratch dir;
    const std::string file = dir / "my.json";
    const auto with_file = [&](const std::string& text, std::vector<std::string> flags) {
        write_file(file, text);
        flags.insert(flags.begin(), {"opd-train", "--config", file});
        return parse(flags, false);
    };
    CHECK(with_file("{\"distill\": {\"warmup\": 7}, \"teacher_model\": {\"layers\": 3}}", {"--rate=1"})
              .settings.distill.warmup == 7);
    const auto refused = [&](const std::string& text, const std::vector<std::string>& flags) {
        try {
            with_file(text, flags);
        } catch (const failure& e) {
            CHECK(e.code == exit_usage);
            return std::string(e.what());
        }
        FAIL_CHECK("it was not refused");
        return std::string();
    };
    contains(refused("{}", {"--warmup=7"}), "--warmup: a file has that (--config): distill.warmup");
    contains(refused("{}", {"--step=7"}), "--step: did you mean --steps?");
    CHECK(refused("{\"distill\": {\"skew\": 0.1}}", {}) ==
          file + ": distill.skew is not used by --estimator reverse_kl");
    CHECK(refused("{\"teacher_model\": {\"heads\": 6, \"kv_heads\": 4}}", {}) ==
          file + ": teacher_model.kv_heads (4) must divide teacher_model.heads (6)");
    // where no file was read, the keys all the same
    CHECK_THROWS_WITH_AS(parse({"opd-train", "--mini-batches=5"}, false),
                         "--mini-batches must divide --prompts times --answers, 32, not be 5", failure);
    CHECK_THROWS_WITH_AS(parse({"opd-train", "--schedule=async", "--driver=virtual", "--rollout-workers=64"}, false),
                         "--slots (32) must be at least --rollout-workers (64)", failure);
}

TEST_CASE("a run directory is neither lost nor mixed up") {
    const scratch dir;
    interrupted = false;
    {
        run first(parse(tiny(dir / "run")));
        first.stop_after(4);
        REQUIRE(go(first) == exit_interrupted);
        interrupted = false;
    }
    contains(failure_text(tiny(dir / "run"), exit_usage), "--resume goes on with it, --overwrite replaces it");
    contains(failure_text(with(tiny(dir / "run"), {"--resume", "--rate=0.5"}), exit_usage),
             "made with other settings: distill.rate");

    // a damaged checkpoint is recognised wherever the damage is
    const std::string path = dir / "run/checkpoints/latest.ckpt";
    const std::string good = read_file(path);
    for (std::size_t at : {std::size_t{0}, std::size_t{9}, std::size_t{200}, good.size() / 2, good.size() - 1}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 0x10);
        write_file(path, bad);
        contains(failure_text(with(tiny(dir / "run"), {"--resume"}), exit_input), "latest.ckpt");
    }
    std::string old = good;
    old[8] = 2;
    write_file(path, old);
    contains(failure_text(with(tiny(dir / "run"), {"--resume"}), exit_input),
             "checkpoint format 2, this program reads 4");
    write_file(path, good.substr(0, good.size() / 2));
    contains(failure_text(with(tiny(dir / "run"), {"--resume"}), exit_input), "damaged checkpoint");
    write_file(path, good);

    run again(parse(with(tiny(dir / "run"), {"--overwrite"})));
    CHECK(again.state().step == 0);
    CHECK_FALSE(fs::exists(path));
}

TEST_CASE("a run directory is one process's at a time") {
    const scratch dir;
    {
        run first(parse(tiny(dir / "run")));
        first.stop_after(4);
        const std::string who = "is in use by process " + std::to_string(::getpid()) + " on ";
        contains(failure_text(tiny(dir / "run"), exit_usage), who);
        contains(failure_text(with(tiny(dir / "run"), {"--overwrite"}), exit_usage), who);
        REQUIRE(go(first) == exit_interrupted);
        interrupted = false;
        contains(failure_text(with(tiny(dir / "run"), {"--resume"}), exit_usage), who);
        CHECK(exit_of(with(tiny(dir / "run"), {"--train-drafter", "--drafter-held-out=4"})) == exit_usage);
    }
    run second(parse(with(tiny(dir / "run"), {"--resume"})));
    CHECK(go(second) == exit_ok);
}

TEST_CASE("divergence stops the run with its own exit code") {
    const scratch dir;
    interrupted = false;
    contains(failure_text(with(tiny(dir / "a"), {"--teacher-rate=1e38", "--teacher-warmup=0"}), exit_numeric),
             "teacher step");
    contains(failure_text(with(tiny(dir / "b"), {"--loss-limit=0.01"}), exit_numeric), "--loss-limit 0.01");
}

TEST_CASE("a KL that rises for 100 steps is noticed once, a noisy one is not") {
    kl_watch watch;
    int warnings = 0;
    for (int i = 0; i < 400; ++i) warnings += watch.add(0.5 + (i % 2 ? 0.2 : -0.2));
    CHECK(warnings == 0);
    for (int i = 0; i < 100; ++i) warnings += watch.add(0.5 + 0.01 * i);
    CHECK(warnings == 1);
    for (int i = 0; i < 100; ++i) warnings += watch.add(1.5 + 0.01 * i);
    CHECK(warnings == 1);
    for (int i = 0; i < 40; ++i) warnings += watch.add(0.1);
    for (int i = 0; i < 120; ++i) warnings += watch.add(0.2 + 0.01 * i);
    CHECK(warnings == 2);
}
