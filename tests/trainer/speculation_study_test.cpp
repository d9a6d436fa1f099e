// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rollouts by the clock of --cost-* (examples/trainer/studies/rollout_profile.hpp): what the clock says, that every
// sequence finishes with the tokens of plain rollout whatever drafts, and that auto comes near the best of the others.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pipeline/rollout.hpp"
#include "studies/rollout_profile.hpp"
#include "studies/speculation_ways.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"

using namespace trainer;
using opd::test::flags;
using opd::test::with;

namespace {

// A student that has learnt nothing, and a drafter that is the student: all its drafts are followed.
struct ground {
    const opd::test::scratch dir;
    const flags base = with(opd::test::small_models(), {"--driver=virtual", "--quiet", "--prefill-chunk=4"});
    const config settings = config_of(base);
    const std::unique_ptr<const any_task> task = task_of(settings);
    transformer<float> model{settings.student_model};

    ground() {
        model.initialise(3);
        draft_model own(drafter_kind::model, settings.student_model, settings.student_model);
        own.weights.weights = model.weights;
        save_drafter(dir / "own.ckpt", own);
    }
    std::vector<request> prompts(std::uint64_t first, std::size_t count) const {
        std::vector<request> r;
        for (std::uint64_t i = 0; i < count; ++i) r.push_back(request_of(*task, 1, first + i));
        return r;
    }
    profiled_rollout rollout(index_t lanes, const flags& costs, const flags& how = {}) const {
        const bool drafts = !how.empty();
        return {config_of(with(with(base, costs), drafts ? with(how, {"--draft-from=" + dir / "own.ckpt"}) : how)),
                *task, model, lanes};
    }
};

const flags chain = {"--speculate=learned", "--draft-depth=4", "--draft-verify=4"}, automatic = {"--speculate=auto"};

} // namespace

TEST_CASE("a profiled rollout: seconds by rows, who runs when, and the tokens of plain rollout") {
    const ground g;
    const flags costs = {"--cost-step=1", "--cost-step-row=0.25"};
    const auto prompts = g.prompts(100, 48);
    const rollout_profile p = g.rollout(48, costs).run(prompts);
    opd::thread_team one(1);
    sampling plain = sampling_of(g.settings, *g.task);
    CHECK(p.responses == roll_out(g.model, one, prompts, plain));
    // the prompt is read in chunks, all together; then every step draws a token of those that are left
    std::size_t longest = 0, rows = 0, tokens = 0;
    for (const trajectory& t : p.responses) {
        longest = std::max(longest, t.response().size());
        rows += t.tokens.size() - 1, tokens += t.response().size();
    }
    const std::size_t reads = (p.responses.front().prompt_length + 3) / 4;
    CHECK(p.tokens == static_cast<std::int64_t>(tokens));
    CHECK(p.seconds ==
          doctest::Approx(static_cast<double>(reads - 1 + longest) + 0.25 * static_cast<double>(rows)).epsilon(1e-12));
    CHECK(p.running.front().running == 48);
    CHECK(p.running.back().running == 0);
    CHECK(p.running.back().seconds == p.seconds);
    for (std::size_t i = 1; i < p.running.size(); ++i) {
        CHECK(p.running[i].seconds > p.running[i - 1].seconds);
        CHECK(p.running[i].running <= p.running[i - 1].running);
    }
    CHECK(p.running_at(0) == 48);
    CHECK(p.running_at(p.seconds) == 0);
    CHECK(p.full_seconds == 0); // nobody waited
    // more prompts than lanes: the figures of full batches are those from before the last one began
    const rollout_profile q = g.rollout(8, costs).run(prompts);
    CHECK(q.responses == p.responses);
    CHECK(q.full_seconds > 0);
    CHECK(q.full_seconds < q.seconds);
    CHECK(q.full_tokens < q.tokens);
    CHECK(q.full_tokens > q.tokens / 2);
    // passes of a drafter, and rows in them, have their seconds
    const rollout_profile free =
                              g.rollout(8, with(costs, {"--cost-draft=0", "--cost-draft-row=0"}), chain).run(prompts),
                          dear =
                              g.rollout(8, with(costs, {"--cost-draft=2", "--cost-draft-row=0"}), chain).run(prompts);
    CHECK(free.responses == p.responses);
    CHECK(dear.responses == p.responses);
    CHECK(free.running.size() == dear.running.size());
    CHECK(dear.seconds > free.seconds + static_cast<double>(free.running.size()));
    REQUIRE_FALSE(free.turns.empty());
    CHECK(free.turns.front().of.batch == 8);
    CHECK(free.turns.back().of.accepted > 1); // it drafts what is drawn, but at ends
    CHECK(free.turns.back().of.accepted <= 4);
}

TEST_CASE("a rollout with a tail: auto waits while many run, and comes near the best of the others") {
    const ground g;
    const flags deep = {"--speculate=learned", "--draft-depth=8", "--draft-verify=8"};
    // verifying pays for few sequences, and costs for many
    for (const auto& [lanes, row] : {std::pair{index_t{4}, "2e-4"}, {index_t{64}, "2e-3"}}) {
        const flags costs = {"--cost-step=8e-3", std::string("--cost-step-row=") + row},
                    drafts = with(costs, {"--cost-draft=6e-4", "--cost-draft-row=6e-6"});
        // enough turns that one that looks at the other drafter is one of many
        const auto prompts = g.prompts(7000, 400);
        const rollout_profile off = g.rollout(lanes, costs).run(prompts),
                              fixed = g.rollout(lanes, drafts, deep).run(prompts);
        auto adaptive = g.rollout(lanes, drafts, automatic);
        for (std::uint64_t before = 1; before <= 4; ++before) adaptive.run(g.prompts(9000 * before, 400));
        const rollout_profile chosen = adaptive.run(prompts);
        CHECK(fixed.responses == off.responses);
        CHECK(chosen.responses == off.responses);
        const double best = std::min(off.seconds, fixed.seconds);
        MESSAGE(lanes << " lanes: off " << off.seconds << " s, chain " << fixed.seconds << ", auto " << chosen.seconds);
        CHECK(chosen.seconds < 1.05 * best);
        CHECK((fixed.seconds < off.seconds) == (lanes == 4)); // neither is best everywhere
    }
}

TEST_CASE("what a tuner comes to of measured turns") {
    using opd::spec::strategy;
    const strategy shallow{2, 1, 2}, deep{8, 1, 8};
    opd::spec::tuner_options o;
    o.arms = {shallow, deep}, o.thresholds = {1, 5}; // deep for 1 to 4 sequences, shallow for more
    measured_turns of = {{shallow, {{{1, 1.0, 1.0}, 2.0}}}, {deep, {{{1, 4.0, 2.0}, 5.0}, {{1, 2.0, 2.0}, 3.0}}}};
    const tuned_rate few = tuned(opd::spec::beg_mab(o), of, 1, 400, 3),
                     many = tuned(opd::spec::beg_mab(o), of, 8, 400, 3);
    CHECK(few.most == deep);
    CHECK(few.share == 1);
    CHECK(few.rate() == doctest::Approx(2)); // its turns by turns: 5 and 3 tokens in 2 s each
    CHECK(many.most == shallow);
    CHECK(many.rate() == doctest::Approx(2));
    o.arms = {shallow, {3, 1, 2}}, o.thresholds = {1};
    of[1] = {{3, 1, 2}, {{{1, 1.5, 1.0}, 2.5}}};
    const tuned_rate one = tuned(opd::spec::beg_mab(o), of, 1, 2000, 3);
    CHECK(one.most == strategy{3, 1, 2});
    CHECK(one.share > 0.9);
    CHECK(one.share < 1); // now and then the other
    of.pop_back();
    CHECK_THROWS_AS(tuned(opd::spec::beg_mab(o), of, 1, 10, 3), opd::invalid_input);
}
