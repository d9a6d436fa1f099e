// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the trainer takes of the library beside its divergences: decoupled PPO, M2PO, the reweighted support, the clamp
// of losses, filters of rollout with the sets that they kept, quantiles of ratios. Each changes what it should, and is
// refused by name elsewhere. And what is done to rollout on purpose (--inject-mismatch), in runs and in the cells of
// the mismatch study (examples/mismatch_study).
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "mismatch_study/study.hpp"
#include "model/injection.hpp"
#include "opd/ratio_sketch.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "schedule/in_flight.hpp"
#include "settings/config.hpp"
#include "settings/files.hpp"
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

namespace {

std::vector<trajectory> rolled_with(const injection& what, const policy& weights, sampling o = {}, int threads = 1) {
    opd::thread_team team(threads);
    sampling base = opd::test::small_sampling({draw_plan::kind::iid, 3}, 0.9);
    base.inject = what, base.keep_tops = true, base.slots = o.slots, base.prefill_chunk = o.prefill_chunk;
    base.speculate = o.speculate;
    base.top_k = o.top_k;
    std::vector<request> requests;
    for (std::uint64_t i = 0; i < 9; ++i) requests.push_back(opd::test::small_prompt(i));
    return roll_out(*weights.model, team, requests, base, weights.version);
}

// log softmax of a row of logits, in double.
std::vector<double> log_probs(const float* z, std::size_t v, double temperature) {
    std::vector<double> p;
    for (std::size_t i = 0; i < v; ++i) p.push_back(double(z[i]) / temperature);
    const double most = *std::ranges::max_element(p);
    double sum = 0;
    for (const double x : p) sum += std::exp(x - most);
    for (double& x : p) x -= most + std::log(sum);
    return p;
}

// To nearest, ties to even: by the float's bits.
float to_bf16(float x) {
    auto bits = std::bit_cast<std::uint32_t>(x);
    bits += 0x7fffu + (bits >> 16 & 1u);
    return std::bit_cast<float>(bits & 0xffff0000u);
}

} // namespace

TEST_CASE(
    "an injected mismatch is the law that rollout draws from, and r_corr and its figures are those of enumeration") {
    constexpr std::size_t v = 15;
    constexpr double temperature = 0.9;
    const policy weights = opd::test::small_weights(3, 0);
    config c;
    c.student_model = opd::test::small_shape();
    c.distill.temperature = temperature, c.distill.estimator = "mc", c.distill.m = 3;
    c.distill.inject_mismatch = "noise=0"; // the learner's figures; its weights are exact whatever rollout does
    std::vector<std::pair<const char*, injection>> kinds = {
        {"none", {}},
        {"bf16", {.bf16 = true}},
        {"split", {.split = 5}},
        {"temperature", {.temperature = 1.3}},
        {"noise", {.noise = 0.2}},
        {"filter", {.filter = true}},
        {"all", {.bf16 = true, .split = 3, .temperature = 0.8, .noise = 0.1}}};
    for (const auto& [name, what] : kinds) {
        CAPTURE(name);
        sampling how;
        how.top_k = what.filter ? 4 : 0;
        const auto rolled = rolled_with(what, weights, how);
        transformer<float> student = *weights.model, engine = *weights.model;
        engine.split = what.split;
        if (what.bf16)
            for (float& w : engine.weights) w = to_bf16(w);
        engine.weights_changed();
        adamw_state state;
        opd::cpu_backend backend{.threads = 1};
        learner learn(c, student, state, backend);
        row_batch batch = pack(rolled, 3);
        learn.look_back(batch);
        std::vector<float> exact, other;
        teacher_scorer(*weights.model, backend).logits(batch.inputs, exact);
        teacher_scorer(engine, backend).logits(batch.inputs, other);
        double sum = 0, k3 = 0, most = 0, flips = 0, n = 0;
        for (std::size_t s = 0; s < rolled.size(); ++s)
            for (std::int64_t at = batch.offsets[s]; at < batch.offsets[s + 1]; ++at) {
                const auto r = std::size_t(at);
                if (batch.mask[r] == 0) continue;
                float* z = other.data() + r * v;
                inject({.noise = what.noise}, 5, rolled[s].sample, std::uint32_t(at - batch.offsets[s] + 1), {z, v});
                if (what.bf16)
                    for (std::size_t i = 0; i < v; ++i) z[i] = to_bf16(z[i]);
                const std::vector<double> p = log_probs(exact.data() + r * v, v, temperature);
                std::vector<double> mu = log_probs(z, v, temperature * what.temperature);
                if (what.filter) { // the four most probable ids, ties to the lower
                    std::vector<std::size_t> order(v);
                    std::iota(order.begin(), order.end(), 0u);
                    std::ranges::stable_sort(order, [&](auto a, auto b) { return z[a] > z[b]; });
                    double mass = 0;
                    for (int i = 0; i < 4; ++i) mass += std::exp(mu[order[std::size_t(i)]]);
                    for (std::size_t i = 0; i < v; ++i)
                        mu[order[i]] = i < 4 ? mu[order[i]] - std::log(mass) : -std::numeric_limits<double>::infinity();
                }
                const auto y = std::size_t(batch.next[r]);
                CHECK(double(batch.log_mu[r]) == doctest::Approx(mu[y]).epsilon(2e-5));
                CHECK(double(batch.log_old[r]) == doctest::Approx(p[y]).epsilon(2e-5));
                const auto top = [&](const float* row) { return token(std::max_element(row, row + v) - row); };
                CHECK(batch.top[r] == top(z));
                CHECK(batch.old_top[r] == top(exact.data() + r * v));
                const double d = p[y] - mu[y];
                n += 1, sum += d, most = std::max(most, std::abs(d)), k3 += std::exp(d) - 1 - d;
                flips += batch.top[r] != batch.old_top[r];
            }
        teacher_cache cache;
        teacher_scorer(*opd::test::small_weights(8, 0).model, backend).score(batch, cache_for(c), cache);
        const opd::mismatch m = learn.step(batch, cache, 1e-3, 0).mismatch;
        CHECK(double(m.delta.tokens) == n);
        CHECK(m.delta.mean() == doctest::Approx(sum / n).epsilon(1e-3).scale(1e-4));
        CHECK(m.delta.abs_max == doctest::Approx(most).epsilon(1e-3).scale(1e-2));
        CHECK(m.corr.k3() == doctest::Approx(k3 / n).epsilon(1e-2).scale(1e-6));
        CHECK(m.train.k3() == 0);
        CHECK(double(m.flips) == flips);
        CHECK(m.compared == m.delta.tokens);
        const bool none = std::string(name) == "none";
        CHECK((m.exact == m.delta.tokens) == none);
        CHECK((m.rollout.contribution_size(true) > 0) == !none);
        if (std::string(name) == "split") CHECK(m.delta.abs_max < 1e-4);
        if (what.filter) CHECK(m.delta.mean() < -1e-3); // mu has more of each id that it left
        if (std::string(name) == "noise") CHECK(m.delta.abs_max > 5 * m.quantile(0.5));
        // as rollout is, a function of weights, seed and sample: threads, slots, chunks and drafts change nothing
        how.slots = 3, how.prefill_chunk = 2;
        CHECK(rolled_with(what, weights, how, 2) == rolled);
        how.speculate.what = drafting::ngram;
        CHECK(rolled_with(what, weights, how) == rolled);
    }
}

TEST_CASE("injected noise is Student's t of two degrees, keyed by sample, position and id") {
    std::vector<float> all;
    for (std::uint64_t sample = 0; sample < 40; ++sample)
        for (std::uint32_t position = 0; position < 20; ++position) {
            std::vector<float> z(30, 0.0f), again(11, 0.0f);
            inject({.noise = 0.5}, 7, sample, position, z);
            inject({.noise = 0.5}, 7, sample, position, again);
            CHECK(std::equal(again.begin(), again.end(), z.begin()));
            all.insert(all.end(), z.begin(), z.end());
        }
    CHECK(std::set(all.begin(), all.end()).size() > all.size() * 99 / 100);
    for (const double a : {0.5, 1.0, 3.0, 8.0}) { // P(|x| > a) = 1 - a / sqrt(2 + a²)
        const double expected = 1 - a / std::sqrt(2 + a * a), n = double(all.size());
        const double share = double(std::ranges::count_if(all, [&](float x) { return std::abs(x) > 0.5 * a; })) / n;
        CHECK(std::abs(share - expected) < 4 * std::sqrt(expected * (1 - expected) / n));
    }
    CHECK(std::abs(double(std::ranges::count_if(all, [](float x) { return x > 0; })) / double(all.size()) - 0.5) <
          0.013);
    std::vector<float> z = {1, 2, 3};
    inject({}, 7, 1, 1, z);
    CHECK(z == std::vector<float>{1, 2, 3});
}

TEST_CASE("runs with an injected mismatch: figures in the log, none where nothing is injected, the same when resumed") {
    const flags mc = {"--estimator=mc", "--m=1", "--correction=tis"};
    const ended plain = trained(mc), nothing = trained(with(mc, {"--inject-mismatch=noise=0,split=1,temperature=1"}));
    CHECK(nothing.weights == plain.weights);
    CHECK(nothing.log[0]["mismatch"]["argmax_flips"] == 0);
    CHECK_FALSE(plain.log[0]["mismatch"].contains("argmax_flips")); // rollout's ids are not recorded
    CHECK_FALSE(trained({"--estimator=mc", "--m=1"}).log[0].contains("mismatch"));
    for (const ended* exact : {&plain, &nothing})
        for (const auto& line : exact->log) {
            const auto& m = line["mismatch"];
            CHECK(m["delta_max"] == 0);
            CHECK(m["exact"] == 1);
            CHECK(m["tokens"].get<int>() > 10);
            CHECK(m["corr"]["k3"] == 0);
            CHECK(m["train"]["k3"].get<double>() > 0); // of the second mini-batch
            CHECK(m["train"] == m["rollout"]);
        }
    for (const flags& kind : {flags{"--inject-mismatch=bf16"}, flags{"--inject-mismatch=split=4"},
                              flags{"--inject-mismatch=temperature=1.2"}, flags{"--inject-mismatch=noise=0.1"},
                              flags{"--inject-mismatch=filter", "--rollout-top-k=4"}}) {
        CAPTURE(kind[0]);
        const ended other = trained(with(mc, kind));
        CHECK(other.weights != plain.weights);
        CHECK(sum_of(other, "mismatched") > 0);
        const auto& m = other.log[0]["mismatch"];
        CHECK(m["delta_max"].get<double>() > 0);
        CHECK(m["delta_max"].get<double>() >= m["delta_abs_mean"].get<double>());
        CHECK(m["delta_p50"].get<double>() <= m["delta_p99"].get<double>());
        CHECK(m["corr"]["k3"].get<double>() > 0);
        CHECK(m["train"] != m["rollout"]);
        CHECK(trained(with(kind, {"--teacher-cache=dense"})).log[0]["mismatch"]["tokens"].get<int>() > 10);
    }
    // in flight, with what was recorded of it
    const scratch dir;
    const flags settings = with(mc, {"--inject-mismatch=bf16,split=2,noise=0.1,temperature=1.2", "--schedule=async",
                                     "--tau=2", "--driver=virtual"});
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

    CHECK(refused({"--inject-mismatch=bf17"}).find("did you mean 'bf16'?") != std::string::npos);
    CHECK(refused({"--inject-mismatch=bf16=1"}) ==
          "--inject-mismatch takes bf16 and filter without a number, not 'bf16=1'");
    CHECK(refused({"--inject-mismatch=split=1.5"}).find("n an integer from 1 to 64, not 'split=1.5'") !=
          std::string::npos);
    CHECK(refused({"--inject-mismatch=split"}).find("not 'split'") != std::string::npos);
    CHECK(refused({"--inject-mismatch=temperature=0"}).find("f in [0.1, 10]") != std::string::npos);
    CHECK(refused({"--inject-mismatch=noise=-1"}).find("s in [0, 10]") != std::string::npos);
    CHECK(refused({"--inject-mismatch=filter"}).find("needs --rollout-top-k") != std::string::npos);
    CHECK(refused({"--offline=x", "--start-from=y", "--estimator=lightning", "--inject-mismatch=bf16"}) ==
          "--inject-mismatch is not used by --offline");
}

TEST_CASE("a cell of the mismatch study is a run of opd-train, bit for bit, and its windows are read as written") {
    using namespace mismatch_study;
    const scratch dir;
    const flags settings = with(small_models(), {"--quiet", "--steps=5", "--prompts=4", "--rate=0.05", "--warmup=0",
                                                 "--eval-prompts=4", "--eval-samples=0", "--eval-every=0",
                                                 "--threads=1", "--teacher-batch=4", "--estimator=mc", "--m=1"});
    {
        run base(parse_command_line(with(settings, {"--run-dir=" + (dir / "base")})));
        REQUIRE(go(base) == exit_ok);
    }
    const std::string student = dir / "base/checkpoints/student.ckpt";
    const world w(student, settings);
    const auto all = treatments();
    const auto treated = [&](const std::string& name) {
        return *std::ranges::find(all, name, &mismatch_study::choice::name);
    };
    for (const auto& engine : engines()) {
        const auto treatment = treated(engine.name == "noise"  ? "reinforce"
                                       : engine.name == "bf16" ? "tis_srs_k3_corr"
                                                               : "recompute");
        CAPTURE(engine.name);
        const std::string where = dir / engine.name;
        run alone(parse_command_line(with(with(with(settings, engine.options), treatment.options),
                                          {"--run-dir=" + where, "--start-from=" + student, "--seed=7"})));
        REQUIRE(go(alone) == exit_ok);
        std::string text;
        const auto weights = load_checkpoint(where + "/checkpoints/latest.ckpt", text).student_weights;
        const auto cell = run_cell(w, engine, treatment, 7, 2);
        REQUIRE(cell.size() == 2);
        CHECK(cell[0].step == 3);
        CHECK(cell[1].step == 5);
        CHECK(cell[1].weights ==
              hash128({reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)}));
        CHECK(run_cell(w, engine, treatment, 8, 1)[0].weights != cell[1].weights);
        for (const window& one : cell) {
            const told_window told{engine.name, treatment.name, 7, one};
            CHECK(line_of(window_of(line_of(told))) == line_of(told));
            CHECK((one.x[figure::delta_max] == 0) == (engine.name == "exact"));
        }
    }
    CHECK_THROWS_WITH_AS(window_of("exact,tis"), doctest::Contains("fields"), failure);
    std::string damaged = line_of({"exact", "tis", 1, {.weights = "abc"}});
    damaged.replace(damaged.find(",0,0"), 4, ",0,x");
    CHECK_THROWS_WITH_AS(window_of(damaged), doctest::Contains("'x' is no number"), failure);
    CHECK(pooled_error({{1, 3}, {5, 5}}) == doctest::Approx(std::sqrt(2.0 / 2 / 2)));
    CHECK(std::isnan(pooled_error({{1}, {2}})));
}

TEST_CASE("settings that are not chosen leave a run's settings as they were") {
    const auto settings = results_json(parse_command_line(flags{}).settings)["distill"];
    for (const char* key : {"m2po", "loss_clamp", "rollout_top_k", "rollout_top_p", "rollout_min_p", "inject_mismatch"})
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
