// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher that is kept in hidden states trains as one that is kept in logits does: the same weights bit for bit, for
// every divergence, under every schedule, interrupted or not, and without rows of V numbers. In the numbers of a codec
// it is the teacher at full rank, and says how far from it below.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "opd/opd.hpp"
#include "pipeline/codec.hpp"
#include "pipeline/learner.hpp"
#include "pipeline/rollout.hpp"
#include "run/run.hpp"
#include "schedule/stages.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;

using opd::test::flags;
using opd::test::go;
using opd::test::scratch;
using opd::test::small_sampling;
using opd::test::small_shape;
using opd::test::with;

transformer<float> model_of(std::uint64_t seed, bool tied = false, int width = 24, int vocabulary = 15) {
    model_shape shape = small_shape();
    shape.tied = tied, shape.width = width, shape.vocabulary = vocabulary;
    transformer<float> model(shape);
    model.initialise(seed);
    return model;
}

std::vector<trajectory> drawn(const transformer<float>& model, std::int32_t version, std::uint64_t first, int count,
                              double temperature = 1) {
    opd::thread_team team(2);
    std::vector<request> requests;
    for (int i = 0; i < count; ++i) requests.push_back(opd::test::small_prompt(first + static_cast<std::uint64_t>(i)));
    return roll_out(model, team, requests, small_sampling({}, temperature), version);
}

config settings(const char* estimator, const char* cache, double temperature = 1, const char* selector = "all") {
    config c;
    c.distill.estimator = estimator;
    c.distill.teacher_cache = cache;
    c.distill.temperature = temperature;
    c.distill.selector = selector;
    c.distill.selector_a = 0.5, c.distill.selector_b = 0.5;
    return c;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct trained {
    std::vector<learner_result> steps;
    std::vector<float> weights;
    std::size_t logits_at_once = 0;
};

// Three steps from stale batches, each drawn by the weights that the student began with.
trained train(const config& c, bool tied, int threads, int vocabulary = 15, int responses = 12) {
    transformer<float> student = model_of(1, tied, 24, vocabulary);
    const transformer<float> teacher = model_of(2, !tied, 16, vocabulary), old = student;
    opd::cpu_backend backend{.threads = threads};
    adamw_state state;
    learner learn(c, student, state, backend, head_of(teacher));
    teacher_scorer scorer(teacher, backend);
    trained r;
    for (std::int32_t version = 0; version < 3; ++version) {
        const auto trajectories =
            drawn(old, 0, static_cast<std::uint64_t>(version * responses), responses, c.distill.temperature);
        const row_batch batch = pack(trajectories, 0);
        teacher_cache cache;
        scorer.score(batch, cache_for(c), cache);
        r.steps.push_back(learn.step(batch, cache, 1e-2, version));
    }
    r.weights = student.weights;
    r.logits_at_once = learn.logits_at_once();
    return r;
}

} // namespace

TEST_CASE("hidden states of the teacher train as its logits do: the same weights bit for bit, for every divergence") {
    struct kind {
        const char *estimator, *selector;
        double temperature;
    };
    std::vector<kind> kinds = {
        {"reverse_kl", "eopd", 1}, {"reverse_kl", "tip", 1}, {"jsd", "prefix", 0.7}, {"forward_kl", "all", 3}};
    for (const auto& line : opd::choice::divergences) kinds.push_back({line.text.data(), "all", 1});
    std::vector<float> before;
    for (const kind& k : kinds)
        for (bool tied : {false, true}) {
            CAPTURE(k.estimator);
            CAPTURE(k.selector);
            CAPTURE(tied);
            const trained dense = train(settings(k.estimator, "dense", k.temperature, k.selector), tied, 1);
            CHECK(dense.steps[0].mismatched == 0);
            CHECK(dense.steps[0].gradient_norm > 0);
            for (int budget : {60, 60 * 7, 1 << 20}) { // a row, some, all
                CAPTURE(budget);
                config c = settings(k.estimator, "hidden", k.temperature, k.selector);
                c.distill.hidden_budget = budget;
                const trained hidden = train(c, tied, budget == 60 ? 1 : 2);
                CHECK(same_bits(hidden.weights, dense.weights));
                for (std::size_t i = 0; i < dense.steps.size(); ++i) {
                    const learner_result &a = hidden.steps[i], &b = dense.steps[i];
                    CHECK(a.loss == doctest::Approx(b.loss).epsilon(1e-13)); // rows are added up in other groups
                    CHECK(a.gradient_norm == b.gradient_norm);
                    CHECK(a.kl == b.kl);
                    CHECK(a.mismatched == b.mismatched);
                    CHECK(a.prefix.log_ratio() == b.prefix.log_ratio());
                    CHECK(a.diagnostics.kept == b.diagnostics.kept);
                    for (int bin = 0; bin < opd::diagnostics::staleness_bins; ++bin)
                        CHECK(a.diagnostics.staleness[bin] == b.diagnostics.staleness[bin]);
                }
            }
            CHECK_FALSE(same_bits(dense.weights, before)); // the comparison can fail
            before = dense.weights;
        }
}

TEST_CASE("log-probs from hidden states are those of the logits, bit for bit, however few rows are there at once") {
    const transformer<float> model = model_of(3, true);
    opd::cpu_backend backend{.threads = 2};
    const auto trajectories = drawn(model, 0, 0, 9);
    const row_batch batch = pack(trajectories, 0);
    teacher_scorer scorer(model, backend);
    std::vector<float> z, states;
    scorer.logits(batch.inputs, z);
    scorer.states(batch.inputs, states);
    REQUIRE(states.size() == static_cast<std::size_t>(batch.rows * 24));
    std::vector<float> expected(static_cast<std::size_t>(batch.rows));
    opd::token_logp(backend, opd::view(std::as_const(z).data(), batch.rows, 15),
                    opd::view(batch.next.data(), batch.rows, 1), opd::view(expected.data(), batch.rows, 1), 0.7f,
                    opd::row_mask(batch.mask));
    for (std::size_t budget : {std::size_t{1}, std::size_t{60}, std::size_t{60 * 50}, std::size_t{1} << 20}) {
        std::vector<float> log_p;
        next_log_probs(backend, model, states.data(), batch, 0.7, budget, log_p);
        CHECK(same_bits(log_p, expected));
    }
}

TEST_CASE("the learner's memory of logits is its budget, whatever the batch; in logits it grows with it") {
    constexpr int v = 300;
    const auto most = [&](const char* cache, int responses) {
        config c = settings("reverse_kl", cache);
        c.distill.hidden_budget = 20 * v * 4;
        return train(c, false, 1, v, responses).logits_at_once;
    };
    const std::size_t few = most("dense", 6), many = most("dense", 24);
    CHECK(few % (2 * v * 4) == 0);
    CHECK(many > 3 * few);
    CHECK(most("hidden", 6) == 2 * 20 * v * 4); // student and teacher
    CHECK(most("hidden", 24) == 2 * 20 * v * 4);

    // it is what the call asks memory for, beside states, and logits of up to 384 ids on their way
    constexpr int wide = 1000;
    const transformer<float> student = model_of(1, false, 24, wide), teacher = model_of(2, false, 16, wide);
    opd::cpu_backend backend{.threads = 1};
    const index_t n = 200;
    std::vector<float> x(static_cast<std::size_t>(n * 24), 0.1f), dx = x, y(static_cast<std::size_t>(n * 16), 0.1f),
                                                                  dw(static_cast<std::size_t>(wide * 24));
    const auto bytes = [&](std::size_t rows) {
        opd::student::hidden<float> s{opd::view(std::as_const(x).data(), n, 24), head_of(student),
                                      opd::view(dx.data(), n, 24), opd::view(dw.data(), wide, 24)};
        opd::teacher::hidden<float> t{opd::view(std::as_const(y).data(), n, 16), head_of(teacher)};
        s.budget = budget_of_logits(s, rows * wide * 4), t.budget = budget_of_logits(t, rows * wide * 4);
        return opd::workspace_bytes(backend, s, t, opd::reverse_kl{});
    };
    const double of_logits = 2 * 20 * wide * 4, more = static_cast<double>(bytes(40) - bytes(20));
    CHECK(more >= of_logits);
    CHECK(more <= of_logits + 32 * (4 * 64 + 384) * 4);
}

TEST_CASE("a head that does not fit the states is refused, and so is a loss that does not read them") {
    config c = settings("reverse_kl", "hidden");
    transformer<float> student = model_of(1);
    const transformer<float> teacher = model_of(2, false, 16);
    opd::cpu_backend backend{.threads = 1};
    adamw_state state;
    const auto trajectories = drawn(student, 0, 0, 3);
    const row_batch batch = pack(trajectories, 0);
    teacher_cache cache;
    teacher_scorer(teacher, backend).score(batch, cache_for(c), cache);
    CHECK(cache.entries == 16);
    CHECK(cache.logits.empty());
    CHECK_THROWS_WITH(learner(c, student, state, backend).step(batch, cache, 1e-2, 0),
                      doctest::Contains("hidden states of 16 numbers, and a teacher's head for 0"));
    c.distill.estimator = "mc";
    CHECK_THROWS_WITH(learner(c, student, state, backend, head_of(teacher)).step(batch, cache, 1e-2, 0),
                      doctest::Contains("not with --estimator mc"));
}

TEST_CASE("what is scored and not yet learnt from is counted") {
    const auto meter = std::make_shared<cache_meter>();
    const transformer<float> student = model_of(1), teacher = model_of(2, false, 16);
    for (const char* kind : {"dense", "hidden"}) {
        CAPTURE(kind);
        teacher_stage stage(teacher, settings("reverse_kl", kind), 1, nullptr, meter);
        std::vector<std::shared_ptr<const trajectory>> some;
        std::int64_t rows = 0;
        for (trajectory& t : drawn(student, 0, 0, 5)) {
            rows += static_cast<std::int64_t>(t.tokens.size()) - 1;
            some.push_back(std::make_shared<const trajectory>(std::move(t)));
        }
        const std::int64_t wide = kind == std::string("dense") ? 15 : 16, bytes = rows * (wide + 1) * 4;
        const std::int64_t rows_before = meter->rows(), bytes_before = meter->bytes();
        auto scored = stage.score(some);
        CHECK(meter->rows() - rows_before == rows);
        CHECK(meter->bytes() - bytes_before == bytes);
        CHECK(meter->in_flight() == bytes);
        const auto one = static_cast<std::int64_t>(scored.front()->cache.bytes());
        scored.erase(scored.begin());
        CHECK(meter->in_flight() == bytes - one);
        scored = stage.score(some); // the others go when these are there
        CHECK(meter->in_flight() == bytes);
        CHECK(meter->most_in_flight() == 2 * bytes - one);
        scored.clear();
        CHECK(meter->in_flight() == 0);
    }
}

namespace {

config of_rank(int rank) {
    config c = settings("reverse_kl", "hidden-lowrank");
    c.distill.cache_rank = rank;
    c.distill.cache_calibration = 24;
    return c;
}

command parse(const std::string& directory, const flags& more) {
    return parse_command_line(
        with(with({"--run-dir", directory, "--quiet", "--eval-prompts=8", "--eval-samples=0", "--eval-every=0",
                   "--checkpoint-every=4", "--log-every=3", "--threads=2", "--slots=6", "--steps=9", "--prompts=5"},
                  opd::test::small_models()),
             more));
}

exit_code complete(const std::string& directory, const flags& more) {
    run r(parse(directory, more));
    return go(r);
}

run_state end_of(const std::string& directory) {
    std::string settings;
    return load_checkpoint(directory + "/checkpoints/distill.ckpt", settings);
}

nlohmann::json report_of(const std::string& directory) {
    return nlohmann::json::parse(read_file(directory + "/report.json"));
}

// In virtual time, where stages overlap and what is stale is the same every time.
const flags stale = {"--driver=virtual",    "--schedule=async",  "--tau=4",
                     "--rollout-workers=3", "--score-batch=3",   "--cost-step=1e-4",
                     "--cost-score=2e-3",   "--cost-train=3e-2", "--cost-step-row=5e-4"};

} // namespace

TEST_CASE("numbers of a codec: the teacher at full rank, nearer to it the more there are, the same in any parts") {
    constexpr int v = 40, width = 16;
    const transformer<float> teacher = model_of(2, false, width, v), old = model_of(1, true, 24, v);
    opd::cpu_backend backend{.threads = 2}, serial{.threads = 1};
    const auto trajectories = drawn(old, 0, 0, 10);
    const row_batch batch = pack(trajectories, 0);
    // one step from what the teacher is kept as
    const auto learnt = [&](const config& c, const teacher_codec* codec) {
        transformer<float> student = old;
        adamw_state state;
        learner learn(c, student, state, backend, codec ? head_of(*codec) : head_of(teacher));
        cache_plan plan = cache_for(c);
        plan.codec = codec;
        teacher_cache cache;
        teacher_scorer(teacher, backend).score(batch, plan, cache);
        CHECK(cache.entries == (codec ? rank_of(*codec) : width));
        CHECK(std::ssize(cache.states) == batch.rows * cache.entries);
        return std::pair(learn.step(batch, cache, 1e-2, 0), student.weights);
    };
    const auto [exact, weights] = learnt(settings("reverse_kl", "hidden"), nullptr);
    double before = 1e9;
    for (int rank : {1, 4, 8, 12, 16}) {
        CAPTURE(rank);
        const config c = of_rank(rank);
        const teacher_codec codec = calibrated_codec(c, opd::test::small_task(), teacher, backend);
        const double kl = kl_of_codec(c, codec.codes, teacher, backend, batch);
        CAPTURE(kl);
        CHECK(kl < before);
        before = kl;
        CHECK(codec.kl_teacher >= 0);
        CHECK(codec.rows > 24);
        const auto [r, w] = learnt(c, &codec);
        CHECK(r.kl == exact.kl); // of the tokens that follow the true teacher is told
        CHECK(r.mismatched == 0);
        if (rank < width) {
            CHECK(kl > 1e-6);
            row_batch all = batch; // the prompt's rows do not count
            all.mask.assign(all.mask.size(), 1);
            CHECK(kl_of_codec(c, codec.codes, teacher, backend, all) != doctest::Approx(kl).epsilon(1e-6));
            CHECK(r.loss != doctest::Approx(exact.loss).epsilon(1e-5));
        } else {
            CHECK(kl < 1e-9);
            CHECK(codec.kl_teacher < 1e-9);
            CHECK(r.loss == doctest::Approx(exact.loss).epsilon(1e-5));
            CHECK(r.gradient_norm == doctest::Approx(exact.gradient_norm).epsilon(1e-4));
        }
        // neither threads nor the parts of a batch change a bit
        const teacher_codec again = calibrated_codec(c, opd::test::small_task(), teacher, serial);
        CHECK(same_bits(again.codes.encoder, codec.codes.encoder));
        CHECK(same_bits(again.codes.decoder, codec.codes.decoder));
        cache_plan plan = cache_for(c);
        plan.codec = &codec;
        teacher_cache whole, joined;
        teacher_scorer scorer(teacher, serial);
        scorer.score(batch, plan, whole);
        std::vector<scored_sequence> parts;
        for (const trajectory& t : trajectories) {
            const trajectory* one = &t;
            parts.push_back(scorer.score(std::span(&one, 1), 0, plan).front());
        }
        std::vector<const scored_sequence*> order;
        for (const auto& s : parts) order.push_back(&s);
        join(order, joined);
        CHECK(joined.entries == rank);
        CHECK(same_bits(joined.states, whole.states));
        CHECK(same_bits(joined.next_log_q, whole.next_log_q));
    }
}

TEST_CASE("whole runs: the cache of the teacher changes no weight, under any schedule") {
    const scratch dir;
    for (const flags& f : {flags{}, flags{"--student-tied", "--vocabulary=64", "--estimator=jsd", "--mini-batches=5"},
                           flags{"--schedule=step-off", "--schedule-k=2", "--estimator=skew_forward_kl"},
                           flags{"--schedule=async", "--tau=0"}, with(stale, {"--teacher-tied", "--vocabulary=64"})}) {
        CAPTURE(f);
        const std::string dense = dir / "dense", hidden = dir / "hidden";
        REQUIRE(complete(dense, with(f, {"--overwrite"})) == exit_ok);
        REQUIRE(complete(hidden, with(f, {"--overwrite", "--teacher-cache=hidden", "--hidden-budget=1280"})) ==
                exit_ok);
        const run_state a = end_of(dense), b = end_of(hidden);
        CHECK(same_bits(a.student_weights, b.student_weights));
        CHECK(a.evaluations == b.evaluations);
        CHECK(read_file(dense + "/consumed.jsonl") == read_file(hidden + "/consumed.jsonl"));
        const auto cache = report_of(hidden)["schedule"]["teacher_cache"],
                   wide = report_of(dense)["schedule"]["teacher_cache"];
        const int v = !f.empty() && (f.back() == "--vocabulary=64" || f[1] == "--vocabulary=64") ? 64 : 15;
        CHECK(cache["kind"] == "hidden");
        CHECK(cache["bytes_a_token"] == 4 * (12 + 1));
        CHECK(cache["learner_logit_bytes"].get<int>() == 2 * (1280 / (4 * v)) * 4 * v);
        CHECK(wide["kind"] == "dense");
        CHECK(wide["bytes_a_token"] == 4 * (v + 1));
        CHECK(wide["learner_logit_bytes"].get<int>() > 3 * 1280);
        CHECK(cache["most_bytes_in_flight"].get<int>() > 0);
        if (!f.empty() && f.front() == stale.front()) // the same sequences are there at the same times
            CHECK(cache["most_bytes_in_flight"].get<int>() * (v + 1) == wide["most_bytes_in_flight"].get<int>() * 13);
    }
}

TEST_CASE("a run from hidden states is the same interrupted or not; scored sequences in flight are kept") {
    const scratch dir;
    const flags f = with(stale, {"--teacher-cache=hidden", "--vocabulary=40"});
    REQUIRE(complete(dir / "whole", f) == exit_ok);
    int held_states = 0;
    for (int stop : {6, 8, 9, 11}) {
        CAPTURE(stop);
        const std::string directory = dir / ("stop" + std::to_string(stop));
        {
            run first(parse(directory, f));
            first.stop_after(stop);
            REQUIRE(go(first) == exit_interrupted);
        }
        std::string settings;
        held_states += load_checkpoint(directory + "/checkpoints/latest.ckpt", settings).in_flight.size() > 4000;
        run second(parse(directory, {"--resume", "--threads=1", "--hidden-budget=160"}));
        REQUIRE(go(second) == exit_ok);
        CHECK(read_file(directory + "/checkpoints/distill.ckpt") == read_file(dir / "whole/checkpoints/distill.ckpt"));
    }
    CHECK(held_states > 0);
    // logits in flight are no states
    const std::string other = dir / "dense";
    const auto stopped = [](const command& c) {
        run r(c);
        r.stop_after(8);
        REQUIRE(go(r) == exit_interrupted);
    };
    stopped(parse(other, with(stale, {"--vocabulary=40"})));
    CHECK_THROWS_WITH(run(parse(other, {"--resume", "--teacher-cache=hidden"})),
                      doctest::Contains("was made with other settings: distill.teacher_cache"));
    // on threads what was scored is scored again
    const flags on_threads = {"--schedule=async", "--tau=4", "--teacher-cache=hidden", "--vocabulary=40"};
    stopped(parse(dir / "threads", on_threads));
    run second(parse(dir / "threads", {"--resume"}));
    REQUIRE(go(second) == exit_ok);
    CHECK(second.state().step == 0);
}

TEST_CASE(
    "a run from a codec's numbers: the same on any threads, budget and interruption, and says how far the teacher is") {
    const scratch dir;
    const auto with_rank = [](int rank) {
        return with(stale, {"--teacher-cache=hidden-lowrank", "--vocabulary=40", "--cache-calibration=12",
                            "--cache-rank=" + std::to_string(rank)});
    };
    REQUIRE(complete(dir / "whole", with_rank(5)) == exit_ok);
    REQUIRE(complete(dir / "again", with(with_rank(5), {"--threads=1", "--hidden-budget=320"})) == exit_ok);
    const std::string bytes = read_file(dir / "whole/checkpoints/distill.ckpt");
    CHECK(read_file(dir / "again/checkpoints/distill.ckpt") == bytes);
    for (int stop : {8, 10}) {
        const std::string directory = dir / ("stop" + std::to_string(stop));
        {
            run first(parse(directory, with_rank(5)));
            first.stop_after(stop);
            REQUIRE(go(first) == exit_interrupted);
        }
        run second(parse(directory, {"--resume"}));
        REQUIRE(go(second) == exit_ok);
        CHECK(read_file(directory + "/checkpoints/distill.ckpt") == bytes);
    }
    REQUIRE(complete(dir / "full", with_rank(12)) == exit_ok);
    const auto few = report_of(dir / "whole")["schedule"]["teacher_cache"],
               all = report_of(dir / "full")["schedule"]["teacher_cache"];
    CHECK(few["kind"] == "hidden-lowrank");
    CHECK(few["rank"] == 5);
    CHECK(few["bytes_a_token"] == 4 * (5 + 1));
    CHECK(all["bytes_a_token"] == 4 * (12 + 1));
    CHECK(few["calibration_rows"].get<int>() >= 12);
    for (const char* where : {"kl_on_teacher", "kl_on_student"}) {
        CAPTURE(where);
        CHECK(few[where].get<double>() > 1e-5);
        CHECK(all[where].get<double>() < 1e-9);
    }
}

TEST_CASE("caches that an estimator does not read, and budgets below a row, are refused by name") {
    const auto refused = [](const flags& f, const char* text) {
        CAPTURE(text);
        try {
            parse("x", f);
            FAIL("it was taken");
        } catch (const failure& e) {
            CHECK(e.code == exit_usage);
            CHECK_MESSAGE(std::string(e.what()).find(text) != std::string::npos, e.what());
        }
    };
    for (const char* e : {"mc", "threshold", "topk", "tail_bucket"})
        refused({std::string("--estimator=") + e, "--teacher-cache=hidden"},
                "--teacher-cache is not used by --estimator");
    refused({"--teacher-cache=logits"}, "--teacher-cache must be dense, hidden or hidden-lowrank, not 'logits'");
    refused({"--teacher-cache=hidden", "--cache-rank=4"}, "--cache-rank is not used by --teacher-cache hidden");
    refused({"--cache-calibration=4"}, "--cache-calibration is not used by --teacher-cache dense");
    refused({"--teacher-cache=hidden-lowrank", "--cache-rank=13"},
            "--cache-rank must lie in [1, 12], the teacher's width, not 13");
    refused({"--teacher-cache=hidden-lowrank", "--cache-rank=0"}, "--cache-rank must lie in [1, 12]");
    refused({"--teacher-cache=hidden-lowrank", "--cache-rank=4", "--cache-calibration=0"},
            "--cache-calibration must lie in [1, 1000000], not 0");
    refused({"--hidden-budget=1000"}, "--hidden-budget is not used by --teacher-cache dense");
    refused({"--teacher-cache=hidden", "--hidden-budget=59"},
            "--hidden-budget must be at least 60, the bytes of a row of logits, not 59");
    refused({"--teacher-cache=hidden", "--vocabulary=2048", "--hidden-budget=8191"}, "must be at least 8192");
    refused({"--vocabulary=14"}, "--vocabulary must be 0 or lie in [15, 65536], not 14");
    const command c = parse("x", {"--teacher-cache=hidden", "--hidden-budget=4096", "--vocabulary=100"});
    const auto j = nlohmann::json::parse(to_json(c.settings).dump());
    config read;
    from_json(j, "x.json", read);
    CHECK(read.distill.teacher_cache == "hidden");
    CHECK(read.distill.hidden_budget == 4096);
    CHECK(read.task.vocabulary == 100);
    // a run is told apart by its cache, but for the one that all runs had; the budget is nobody's business
    CHECK(fingerprint(read) != fingerprint(parse("x", {"--vocabulary=100"}).settings));
    CHECK_FALSE(results_json(parse("x", {}).settings)["distill"].contains("teacher_cache"));
    CHECK(fingerprint(read) == fingerprint(parse("x", {"--teacher-cache=hidden", "--vocabulary=100"}).settings));
}

TEST_CASE("padding of the vocabulary has no text") {
    const std::vector<token> tokens = {0, 14, 15, 90};
    CHECK(gcd_task::text.decode(tokens) == "0$??");
    config c;
    c.task.vocabulary = 90;
    CHECK(with_task_shapes(c, opd::test::small_task()).student_model.vocabulary == 90);
    CHECK(with_task_shapes({}, opd::test::small_task()).teacher_model.vocabulary == 15);
}
