// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The cells of the staleness study (examples/staleness_study) are opd-train's controlled schedule: the same weights,
// bit for bit. Lags ramp to k and stay; what is made of batches beside opd-train's options is what it says; slopes and
// their errors are those of regression.
#include "commands.hpp"
#include "scratch.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "schedule/stages.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"
#include "study.hpp"

using namespace staleness_study;
using opd::test::flags;
using opd::test::with;

namespace {

flags settings() {
    return {"--task=grammar",       "--quiet",
            "--max-words=12",       "--teacher-width=8",
            "--teacher-layers=1",   "--teacher-heads=2",
            "--teacher-kv-heads=1", "--teacher-head-dim=4",
            "--teacher-ffn=8",      "--student-width=8",
            "--student-layers=1",   "--student-heads=2",
            "--student-kv-heads=1", "--student-head-dim=4",
            "--student-ffn=8",      "--teacher-steps=4",
            "--teacher-batch=4",    "--student-max-steps=0",
            "--eval-prompts=4",     "--eval-every=0",
            "--prompts=2",          "--mini-batches=2",
            "--warmup=1",           "--steps=6",
            "--threads=1"};
}

std::string weights_of(const std::string& checkpoint) {
    std::string ignored;
    const auto w = trainer::load_checkpoint(checkpoint, ignored).student_weights;
    return trainer::hash128({reinterpret_cast<const char*>(w.data()), w.size() * sizeof(float)});
}

trainer::exit_code train(const flags& arguments) {
    trainer::run r(trainer::parse_command_line(arguments));
    return opd::test::go(r);
}

// A teacher and a student that has not learnt.
struct start {
    opd::test::scratch directory;
    std::string student;
    start() {
        REQUIRE(train(with(settings(), {"--run-dir=" + directory / "base", "--steps=0"})) == 0);
        student = directory / "base/checkpoints/student.ckpt";
    }
};

const contender& named(const std::vector<contender>& all, const std::string& name) {
    const auto found = std::ranges::find(all, name, &contender::name);
    REQUIRE(found != all.end());
    return *found;
}

} // namespace

TEST_CASE("a cell is a run of opd-train with --schedule controlled, bit for bit, and its lag is k") {
    const start from;
    const world w(from.student, settings());
    const auto all = contenders(6);
    for (const auto& [name, k] : {std::pair{"hidden", 2}, std::pair{"threshold4", 3}, std::pair{"mc1_decoupled", 1},
                                  std::pair{"mc6_top_p", 2}, std::pair{"student_topk6_rw", 0}}) {
        CAPTURE(name);
        const contender& c = named(all, name);
        const cell mine = run_cell(w, c, k, 7);
        const std::string run = from.directory / (std::string("run-") + name);
        REQUIRE(train(with(with(settings(), c.options),
                           {"--run-dir=" + run, "--start-from=" + from.student, "--seed=7", "--schedule=controlled",
                            "--schedule-k=" + std::to_string(k)})) == 0);
        CHECK(mine.weights == weights_of(run + "/checkpoints/latest.ckpt"));
        CHECK(mine.lag_least == k);
        CHECK(mine.lag_most == k);
        std::vector<int> lags(6);
        for (int t = 0; t < 6; ++t) lags[std::size_t(t)] = std::min(t, k);
        CHECK(mine.lags == lags);
        CHECK(run_cell(w, c, k, 7).weights == mine.weights);
        CHECK(run_cell(w, c, k, 8).weights != mine.weights);
        CHECK(run_cell(w, c, k + 1, 7).weights != mine.weights);
    }
}

TEST_CASE("entries beside opd-train's: head and tail of mu, and the teacher's best") {
    const start from;
    const world w(from.student, settings());
    opd::cpu_backend backend{.threads = 1};
    std::vector<trainer::request> prompts;
    std::vector<std::uint64_t> samples;
    for (std::uint64_t i = 0; i < 3; ++i) prompts.push_back(trainer::request_of(*w.task, 3, i)), samples.push_back(i);
    auto how = trainer::sampling_of(w.settings, *w.task);
    const auto rolled = trainer::roll_out(w.student, backend.team(), prompts, how);
    trainer::row_batch batch = trainer::pack(rolled, 0);
    const auto v = std::size_t(w.student.shape.vocabulary);
    const auto log_probs = [&](const trainer::transformer<float>& model) {
        std::vector<float> z;
        trainer::teacher_scorer(model, backend).logits(batch.inputs, z);
        std::vector<double> p(z.begin(), z.end());
        for (std::size_t r = 0; r < std::size_t(batch.rows); ++r) {
            double sum = 0;
            for (std::size_t i = 0; i < v; ++i) sum += std::exp(p[r * v + i]);
            for (std::size_t i = 0; i < v; ++i) p[r * v + i] -= std::log(sum);
        }
        return p;
    };
    for (const twist what : {twist::head_tail, twist::teacher_forward}) {
        const bool head_tail = what == twist::head_tail;
        constexpr std::size_t count = 6, head = 3;
        make_entries(what, int(count), batch, w.student, w.teacher, 3, samples, backend);
        const auto mu = log_probs(w.student), q = log_probs(w.teacher);
        for (std::size_t r = 0; r < std::size_t(batch.rows); ++r) {
            if (batch.mask[r] == 0) {
                CHECK(std::accumulate(batch.entry_weight.begin() + std::ptrdiff_t(r * count),
                                      batch.entry_weight.begin() + std::ptrdiff_t((r + 1) * count), 0.0) == 0);
                continue;
            }
            const auto& of = head_tail ? mu : q;
            const double* row = of.data() + r * v;
            std::vector<double> sorted(row, row + v);
            std::ranges::sort(sorted, std::greater());
            double certain = 0;
            for (std::size_t j = 0; j < count; ++j) {
                const std::size_t e = r * count + j;
                const auto id = std::size_t(batch.ids[e]);
                CHECK(double(batch.entry_log_mu[e]) == doctest::Approx(row[id]).epsilon(1e-5));
                const bool exact = !head_tail || j < head;
                CHECK(batch.entry_exact[e] == exact);
                if (exact) {
                    CHECK(row[id] >= sorted[(head_tail ? head : count) - 1] - 1e-5);
                    CHECK(double(batch.entry_weight[e]) == doctest::Approx(std::exp(row[id])).epsilon(1e-5));
                    certain += std::exp(row[id]);
                } else {
                    CHECK(row[id] <= sorted[head] + 1e-5);
                    CHECK(double(batch.entry_weight[e]) ==
                          doctest::Approx((1 - certain) / (count - head)).epsilon(1e-4));
                }
            }
        }
    }
}

TEST_CASE("what has no option changes what is learnt, and ESTR leaves draws out") {
    const start from;
    flags steps = settings();
    std::ranges::replace(steps, std::string("--steps=6"), std::string("--steps=12"));
    const world w(from.student, with(steps, {"--rate=0.05"}));
    const auto all = contenders(6);
    const cell learnt = run_cell(w, named(all, "mc6"), 4, 1), constant = run_cell(w, named(all, "constant"), 4, 1);
    CHECK(learnt.weights != constant.weights);
    CHECK(run_cell(w, named(all, "constant_no_is"), 4, 1).weights != constant.weights);
    const cell one = run_cell(w, named(all, "mc1"), 8, 1), estr = run_cell(w, named(all, "mc1_estr"), 8, 1);
    CHECK(one.left_out == 0);
    CHECK(estr.left_out > 0);
    CHECK(estr.left_out < 1);
    CHECK(one.ratio_p99 > 1);
    CHECK(run_cell(w, named(all, "mc6_top_p"), 2, 1).weights !=
          run_cell(w, named(all, "mc6_top_p_no_sets"), 2, 1).weights);
    CHECK(run_cell(w, named(all, "teacher_forward"), 2, 1).weights !=
          run_cell(w, named(all, "hidden_forward"), 2, 1).weights);
}

TEST_CASE("slopes, means and errors are those of regression on all points") {
    opd::test::property("slope", [] {
        const auto seeds = *rc::gen::inRange<std::size_t>(2, 6), places = *rc::gen::inRange<std::size_t>(2, 6);
        std::vector<double> x(places);
        for (std::size_t i = 0; i < places; ++i) x[i] = double(i) + *rc::gen::inRange(0, 9) / 10.0;
        std::vector<std::vector<double>> y(seeds, std::vector<double>(places));
        for (auto& one : y)
            for (double& value : one) value = *rc::gen::inRange(-1000, 1000) / 10.0;
        // by the normal equations over all points, and the spread within each x
        double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0, within = 0;
        for (std::size_t i = 0; i < places; ++i) {
            double sum = 0, squares = 0;
            for (const auto& one : y) {
                n += 1, sx += x[i], sy += one[i], sxx += x[i] * x[i], sxy += x[i] * one[i];
                sum += one[i], squares += one[i] * one[i];
            }
            within += squares - sum * sum / double(seeds);
            const estimate m = mean_at(i, y);
            RC_ASSERT(std::abs(m.value - sum / double(seeds)) < 1e-9);
        }
        const double expected = (n * sxy - sx * sy) / (n * sxx - sx * sx);
        const double variance = within / double((seeds - 1) * places);
        const estimate s = slope(x, y);
        RC_ASSERT(std::abs(s.value - expected) < 1e-8 * (1 + std::abs(expected)));
        RC_ASSERT(std::abs(s.error - std::sqrt(variance * n / (n * sxx - sx * sx))) < 1e-8 * (1 + s.error));
        RC_ASSERT(s.freedom == int((seeds - 1) * places));
    });
    CHECK(std::isnan(slope({0, 1}, {{1, 2}}).error)); // one seed tells no error
    for (const auto& [freedom, t] :
         {std::pair{1, 12.706}, std::pair{8, 2.306}, std::pair{12, 2.179}, std::pair{32, 2.037}})
        CHECK(estimate{0, 1, freedom}.half_width() == doctest::Approx(t).epsilon(1e-3));
}

TEST_CASE("a line of cells.csv is read as it was written; another is refused") {
    cell c;
    c.contender = "mc1", c.k = 64, c.seed = 3, c.lag_least = c.lag_most = 64;
    c.after = {.own = 0.1234567890123, .on_teacher = 1.0 / 3, .forward = 2e-7, .grammatical = 0.25};
    c.gap_closed = -0.5, c.ratio_p99 = 1.5, c.left_out = 0.01, c.prefix_share = 0.9, c.weights = "abc";
    CHECK(line_of(cell_of(line_of(c))) == line_of(c));
    CHECK(cell_of(line_of(c)).after.on_teacher == c.after.on_teacher);
    CHECK_THROWS_WITH_AS(cell_of("mc1,64"), doctest::Contains("fields"), trainer::failure);
    std::string damaged = line_of(c);
    damaged.replace(damaged.find("-0.5"), 4, "-0.x");
    CHECK_THROWS_WITH_AS(cell_of(damaged), doctest::Contains("-0.x"), trainer::failure);
}
