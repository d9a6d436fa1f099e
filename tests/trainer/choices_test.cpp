// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the trainer takes of the library beside its divergences: decoupled PPO, M2PO, the reweighted support, the clamp
// of losses, filters of rollout with the sets that they kept, quantiles of ratios. Each changes what it should, and is
// refused by name elsewhere.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "config.hpp"
#include "files.hpp"
#include "in_flight.hpp"
#include "learner.hpp"
#include "opd/ratio_sketch.hpp"
#include "rollout.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"
#include "trainer/small_task.hpp"

using namespace trainer;
using opd::test::flags;
using opd::test::go;
using opd::test::scratch;
using opd::test::small_models;
using opd::test::with;

namespace {

// Ends in weights; stale tokens from the second mini-batch on.
flags tiny(const std::string& directory, const flags& more) {
    return with(with({"--run-dir=" + directory, "--quiet", "--steps=6", "--prompts=4", "--mini-batches=2",
                      "--rate=0.05", "--warmup=0", "--eval-prompts=4", "--eval-samples=0", "--eval-every=0",
                      "--log-every=1", "--threads=2", "--teacher-batch=4"},
                     small_models()),
                more);
}
struct ended {
    std::vector<float> weights;
    std::vector<nlohmann::json> log; ///< lines of distillation
};
ended trained(const flags& more) {
    const scratch dir;
    run r(parse_command_line(tiny(dir / "run", more)));
    REQUIRE(go(r) == exit_ok);
    ended out;
    std::string settings;
    out.weights = load_checkpoint(dir / "run/checkpoints/distill.ckpt", settings).student_weights;
    std::istringstream log(read_file(dir / "run/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
        auto j = nlohmann::json::parse(line);
        if (j.value("stage", "") == "distill" && j.contains("loss")) out.log.push_back(std::move(j));
    }
    CHECK(out.log.size() == 6);
    return out;
}
std::string refused(const flags& arguments) {
    try {
        (void)parse_command_line(arguments);
    } catch (const failure& e) {
        CHECK(e.code == exit_usage);
        return e.what();
    }
    FAIL("it was not refused");
    return {};
}
double sum_of(const ended& e, const char* key) {
    double sum = 0;
    for (const auto& line : e.log) sum += line.at(key).get<double>();
    return sum;
}

} // namespace

TEST_CASE("M2PO leaves out the tokens that carry the second moment, and only those") {
    const flags mc = {"--estimator=mc", "--m=4"};
    const ended plain = trained(mc), wide = trained(with(mc, {"--m2po=1000"})),
                tight = trained(with(mc, {"--m2po=1e-4"}));
    CHECK_FALSE(plain.log[0].contains("dropped"));
    CHECK(sum_of(wide, "dropped") == 0);
    CHECK(wide.weights == plain.weights); // within the budget nothing changes
    CHECK(sum_of(tight, "dropped") > 0);
    CHECK(tight.weights != plain.weights);
    const flags threshold = {"--estimator=threshold", "--budget=4"};
    CHECK(sum_of(trained(with(threshold, {"--m2po=1e-4"})), "dropped") > 0);
    CHECK(refused({"--m2po=0.04"}) == "--m2po is not used by --estimator reverse_kl");
    CHECK(refused({"--estimator=mc", "--surrogate=ppo_clip", "--m2po=0.04"}) ==
          "--m2po: the tokens that it leaves are unclipped; not with --surrogate ppo_clip");
    CHECK(refused({"--estimator=mc", "--m2po=-1"}).find("--m2po must be at least 0") == 0);
}

TEST_CASE("decoupled PPO clips against the student that its step began with") {
    const flags decoupled = {"--estimator=mc", "--m=4", "--surrogate=decoupled_ppo", "--ratio-cap=0"};
    const flags ppo = {"--estimator=mc", "--m=4", "--surrogate=ppo_clip"};
    // under sync mu is that student: the weight on it is 1, and what is left is PPO
    const ended a = trained(decoupled), b = trained(ppo);
    CHECK(a.weights.size() == b.weights.size());
    double apart = 0, far = 0;
    const ended other = trained({"--estimator=mc", "--m=4"});
    for (std::size_t i = 0; i < a.weights.size(); ++i) {
        apart = std::max(apart, static_cast<double>(std::abs(a.weights[i] - b.weights[i])));
        far = std::max(far, static_cast<double>(std::abs(other.weights[i] - b.weights[i])));
    }
    CHECK(apart < 1e-4);
    CHECK(far > 1e-2);
    // under a schedule it is not
    const flags late = {"--schedule=controlled", "--schedule-k=2"};
    CHECK(trained(with(decoupled, late)).weights != trained(with(ppo, late)).weights);
    CHECK(trained(with(decoupled, with(late, {"--ratio-cap=0.9"}))).weights != trained(with(decoupled, late)).weights);
    CHECK(refused({"--estimator=mc", "--shape=extrapolated"}).find("a reference policy") != std::string::npos);
}

TEST_CASE("corrections of rollout's log-probs by a preset's name") {
    const flags late = {"--estimator=mc", "--m=1", "--schedule=controlled", "--schedule-k=2"};
    const auto correct = [&](const char* name, const flags& more = {}) {
        return trained(with(late, with({std::string("--correction=") + name}, more)));
    };
    const ended bypass = correct("bypass"), tis = correct("tis");
    CHECK(bypass.weights == trained(with(late, {"--surrogate=ppo_clip"})).weights);
    CHECK(tis.weights == trained(with(late, {"--surrogate=decoupled_ppo", "--ratio-cap=2"})).weights);
    CHECK(tis.weights != bypass.weights);
    CHECK(correct("recompute", {"--accept-bias"}).weights != tis.weights); // without the weight
    const ended srs = correct("srs-k3-corr");
    CHECK(sum_of(srs, "dropped") > 0); // sequences of the step before the last
    CHECK(srs.weights != bypass.weights);
    CHECK(sum_of(correct("decoupled_k3_rs_token_tis"), "dropped") > 0); // out of the count
    CHECK(refused(with(late, {"--correction=recompute"})).find("accept_bias") != std::string::npos);
    CHECK(refused({"--estimator=mc", "--m=4", "--correction=srs-k3-corr"}) ==
          "--correction srs-k3-corr: decides over sequences of one draw a position; needs --m 1");
    CHECK(refused({"--estimator=mc", "--surrogate=ppo_clip", "--correction=bypass"}) ==
          "--surrogate is not used by --correction bypass");
    CHECK(refused({"--estimator=mc", "--correction=bypas"}).find("did you mean 'bypass'?") != std::string::npos);
    CHECK(refused({"--correction=bypass"}) == "--correction is not used by --estimator reverse_kl");
}

TEST_CASE("a stale student's support, reweighted") {
    const flags stale = {"--schedule=controlled", "--schedule-k=2", "--k=3"};
    const ended rw = trained(with(stale, {"--estimator=topk_rw"}));
    CHECK(rw.weights != trained(with(stale, {"--estimator=topk", "--topk-from=student"})).weights);
    CHECK(rw.log[0].at("student_mass").get<double>() > 0);
    CHECK(refused({"--estimator=topk_rw", "--topk-from=teacher"}) == "--topk-from is not used by --estimator topk_rw");
}

TEST_CASE("losses are clamped, and counted") {
    const ended plain = trained({}), wide = trained({"--loss-clamp=1000"}), tight = trained({"--loss-clamp=0.01"});
    CHECK_FALSE(plain.log[0].contains("clamped_rows"));
    CHECK(wide.weights == plain.weights);
    CHECK(sum_of(wide, "clamped_rows") == 0);
    CHECK(sum_of(tight, "clamped_rows") > 0);
    CHECK(tight.weights != plain.weights);
    for (const auto& line : tight.log) CHECK(line["loss"].get<double>() <= 0.01 + 1e-6);
    CHECK(refused({"--loss-clamp=-1"}).find("--loss-clamp must be at least 0") == 0);
}

TEST_CASE("quantiles of the ratios are logged of drawn tokens, in their order") {
    const ended mc = trained({"--estimator=mc", "--m=4"});
    bool spread = false;
    for (const auto& line : mc.log) {
        CHECK(line["ratio_p50"].get<double>() <= line["ratio_p90"].get<double>());
        CHECK(line["ratio_p90"].get<double>() <= line["ratio_p99"].get<double>());
        CHECK(line["ratio_p99"].get<double>() <= line["ratio_max"].get<double>() * 1.1);
        spread |= line["ratio_p50"].get<double>() < line["ratio_p99"].get<double>();
    }
    CHECK(spread);
    CHECK_FALSE(trained({}).log[0].contains("ratio_p50"));
}

TEST_CASE("rollout draws from what its filter keeps, records the sets, and the learner sees the same law") {
    const auto drawn = [](int top_k, double top_p, double min_p) {
        opd::thread_team team(2);
        sampling o = opd::test::small_sampling({draw_plan::kind::iid, 3});
        o.top_k = top_k, o.top_p = top_p, o.min_p = min_p, o.keep_sets = true;
        std::vector<request> requests;
        for (std::uint64_t i = 0; i < 6; ++i) requests.push_back(opd::test::small_prompt(i));
        return roll_out(*opd::test::small_weights(1, 0).model, team, requests, o);
    };
    for (const auto& [top_k, top_p, min_p] : {std::tuple{3, 1.0, 0.0}, {0, 0.6, 0.0}, {0, 1.0, 0.5}}) {
        CAPTURE(top_k);
        CAPTURE(top_p);
        for (const trajectory& t : drawn(top_k, top_p, min_p)) {
            REQUIRE(t.kept_counts.size() == t.response().size());
            auto at = t.kept_ids.begin();
            for (std::size_t i = 0; i < t.kept_counts.size(); ++i) {
                const auto end = at + t.kept_counts[i];
                if (top_k > 0) CHECK(t.kept_counts[i] == top_k);
                CHECK(t.kept_counts[i] < 15);
                CHECK(std::is_sorted(at, end));
                CHECK(std::binary_search(at, end, t.response()[i]));
                for (std::size_t j = 0; j < 3; ++j) CHECK(std::binary_search(at, end, t.draw_ids[3 * i + j]));
                at = end;
            }
            CHECK(at == t.kept_ids.end());
            // they travel
            opd::sched::archive_writer out;
            out(t);
            opd::sched::archive_reader in(out.bytes);
            trajectory back;
            in(back);
            CHECK(in.done());
            CHECK(back == t);
        }
    }
    // in a run no token has another log-prob in the learner than in rollout
    const flags filter = {"--rollout-top-k=4", "--rollout-top-p=0.9", "--rollout-min-p=0.01", "--mini-batches=1"};
    std::set<std::vector<float>> all;
    for (const flags& estimator : {flags{"--estimator=mc", "--m=4"}, flags{"--estimator=threshold", "--budget=4"},
                                   flags{"--estimator=topk", "--k=4"}, flags{}}) {
        const ended cut = trained(with(estimator, filter));
        CHECK(sum_of(cut, "mismatched") == 0);
        CHECK(all.insert(cut.weights).second);
        CHECK(all.insert(trained(with(estimator, {"--mini-batches=1"})).weights).second);
    }
    CHECK(trained(with({"--estimator=mc", "--m2po=1e-4", "--mini-batches=2"}, {"--rollout-top-k=4"}))
              .log[0]
              .contains("dropped"));
    CHECK(trained({"--estimator=mc", "--surrogate=decoupled_ppo", "--rollout-top-k=4"}).log.size() == 6);
    CHECK(refused({"--rollout-top-p=0.9", "--teacher-cache=hidden"}).find("not with --teacher-cache hidden") !=
          std::string::npos);
    CHECK(refused({"--rollout-top-p=0"}).find("--rollout-top-p must lie in (0, 1]") == 0);
    CHECK(refused({"--rollout-min-p=2"}).find("--rollout-min-p must lie in [0, 1]") == 0);
    CHECK(refused({"--rollout-top-k=-1"}).find("--rollout-top-k") == 0);
}

TEST_CASE("sequences in flight keep their sets through a checkpoint") {
    const scratch dir;
    const flags settings = {"--estimator=mc",   "--m=3",           "--rollout-top-k=5", "--schedule=async", "--tau=2",
                            "--driver=virtual", "--mini-batches=1"};
    const auto weights = [&](const std::string& name) {
        std::string text;
        return load_checkpoint(dir / (name + "/checkpoints/distill.ckpt"), text).student_weights;
    };
    run whole(parse_command_line(tiny(dir / "whole", settings)));
    REQUIRE(go(whole) == exit_ok);
    {
        run first(parse_command_line(tiny(dir / "part", settings)));
        first.stop_after(7); // 4 of the teacher, 3 of distillation
        REQUIRE(go(first) == exit_interrupted);
    }
    run second(parse_command_line(flags{"--run-dir=" + (dir / "part"), "--resume", "--quiet"}));
    REQUIRE(go(second) == exit_ok);
    CHECK(weights("part") == weights("whole"));
}

TEST_CASE("settings that are not chosen leave a run's settings as they were") {
    const auto settings = results_json(parse_command_line(flags{}).settings)["distill"];
    for (const char* key : {"m2po", "loss_clamp", "rollout_top_k", "rollout_top_p", "rollout_min_p"})
        CHECK_FALSE(settings.contains(key));
    const auto chosen = results_json(parse_command_line(flags{"--rollout-top-k=4", "--loss-clamp=2"}).settings);
    CHECK(chosen["distill"]["rollout_top_k"] == 4);
    CHECK(chosen["distill"]["loss_clamp"] == 2);
}

TEST_CASE("thirty-two sampled answers a prompt") {
    const scratch dir;
    run r(parse_command_line(tiny(dir / "run", {"--eval-samples=32", "--steps=1"})));
    REQUIRE(go(r) == exit_ok);
    const auto report = nlohmann::json::parse(read_file(dir / "run/report.json"));
    for (const char* who : {"teacher", "before", "after"}) {
        const double share = report["sampled_accuracy"][who].get<double>();
        CHECK(share >= 0);
        CHECK(std::abs(share * 128 - std::round(share * 128)) < 1e-9); // of 4 prompts
    }
}
