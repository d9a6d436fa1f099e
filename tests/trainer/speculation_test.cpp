// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "opd/sched/archive.hpp"
#include "rollout.hpp"
#include "rollout_engine.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;
using opd::test::small_shape;
using opd::test::small_task;

using kind = speculation_options::kind;

policy weights_of(std::uint64_t seed, std::int32_t version) {
    transformer<float> model(small_shape());
    model.initialise(seed);
    return {std::make_shared<const transformer<float>>(std::move(model)), version};
}

// Several samples answer one prompt.
request prompt_of(std::uint64_t sample, std::uint64_t answers = 3) {
    return {sample, small_task().text.encode(small_task().prompt(small_task().draw(1, sample / answers)))};
}

sampling options(double temperature, draw_plan plan) {
    sampling o;
    o.greedy = temperature == 0;
    if (temperature > 0) o.temperature = temperature;
    o.seed = 5;
    o.end = gcd_task::end;
    o.max_response = small_task().max_response();
    o.prefill_chunk = 3;
    o.plan = plan;
    return o;
}

constexpr draw_plan plans[] = {{draw_plan::kind::none, 0},
                               {draw_plan::kind::iid, 3},
                               {draw_plan::kind::threshold, 4},
                               {draw_plan::kind::top_k, 2}};

// Knows what is going to be drawn, and grows trees with it, near it and without it; asks for everything there is to hear, and checks it.
class oracle : public drafter {
public:
    oracle(const std::map<std::uint64_t, trajectory>& truth, std::uint32_t seed, bool hidden)
        : truth_(truth), random_(seed), hidden_(hidden) {}

    bool reads_hidden() const override { return hidden_; }
    void begin(index_t lane, const trajectory& t) override {
        CHECK_FALSE(known_.contains(lane));
        known_[lane] = t.tokens;
        read_[lane] = 0;
    }
    void hear(std::span<const lane_news> news, const policy& target) override {
        for (const lane_news& n : news) {
            auto& known = known_.at(n.lane);
            const auto end = static_cast<std::size_t>(n.first + n.rows);
            const bool from_the_start = target.version != version_ && n.first == 0;
            CHECK((n.first == read_[n.lane] || n.first == 0 || from_the_start));
            read_[n.lane] = n.first + n.rows;
            known.insert(known.end(), n.drawn.begin(), n.drawn.end());
            // every token but the last has gone through the target
            if (!n.drawn.empty()) CHECK(end + 1 == known.size());
            CHECK(n.hidden.size() == (hidden_ ? static_cast<std::size_t>(n.rows * small_shape().width) : 0));
            if (!hidden_) continue;
            kv_cache<float> cache;
            cache.resize(small_shape(), 1, n.first + n.rows);
            forward_state<float> state;
            std::vector<float> logits(end * 15);
            const segment all{0, 0, n.first + n.rows};
            forward_rows(*target.model, std::span(&all, 1), std::span<const std::int32_t>(known).first(end), cache,
                         state, false, logits.data());
            CHECK(std::equal(n.hidden.begin(), n.hidden.end(), state.n.begin() + n.first * small_shape().width));
        }
        version_ = target.version;
    }
    void end(index_t lane, const trajectory& t, bool) override {
        CHECK(known_.at(lane) == t.tokens);
        known_.erase(lane);
    }
    void propose(std::span<const draft_wish> wishes) override {
        for (const draft_wish& w : wishes) {
            CHECK(known_.at(w.lane) == w.sequence->tokens);
            CHECK(w.law.sample == w.sequence->sample);
            CHECK(w.law.position == w.sequence->tokens.size());
            const auto& all = truth_.at(w.sequence->sample).tokens;
            const std::size_t from = w.sequence->tokens.size();
            for (std::uint32_t chains = random_() % 4; chains > 0; --chains) {
                std::vector<token> chain;
                for (std::int32_t d = 0; d < w.depth; ++d) {
                    const std::size_t at = from + static_cast<std::size_t>(d);
                    chain.push_back(at < all.size() && random_() % 8 != 0 ? all[at]
                                                                          : static_cast<token>(random_() % 15));
                }
                w.tree->graft(std::span<const token>(chain).first(random_() % (chain.size() + 1)), 3);
            }
        }
    }
    std::string state() const override {
        opd::sched::archive_writer w;
        for (const auto& [lane, tokens] : known_) w(lane, tokens, read_.at(lane));
        return std::move(w.bytes);
    }
    void restore(std::string_view state) override {
        opd::sched::archive_reader r(state);
        while (!r.done()) {
            index_t lane = 0, read = 0;
            std::vector<token> tokens;
            r(lane, tokens, read);
            known_[lane] = tokens;
            read_[lane] = read;
        }
    }

private:
    const std::map<std::uint64_t, trajectory>& truth_;
    std::mt19937 random_;
    bool hidden_;
    std::map<index_t, std::vector<token>> known_;
    std::map<index_t, index_t> read_;
    std::int32_t version_ = -1;
};

using trajectories = std::map<std::uint64_t, trajectory>;

// How a batch is run; what becomes of it must not depend on any of this.
struct way {
    kind what = kind::off;
    opd::spec::strategy strategy = {8, 1, 8};
    bool draws_oracle = false, hidden = false; // the drafter
    index_t lanes = 4;
    int chunk = 3;
    bool preempted = false; // some are taken out in mid-sequence, and go on later
    bool resumed = false;   // the engine is written and read
    std::uint32_t seed = 1;
};

struct outcome {
    trajectories got;
    speculation_counts counts;
    index_t rows = 0;
    std::int64_t steps = 0;
};

outcome run(const policy& weights, sampling o, const std::vector<request>& prompts, const way& w,
            const trajectories& truth) {
    o.prefill_chunk = w.chunk;
    o.speculate.what = w.what;
    o.speculate.fixed = w.strategy;
    const auto make = [&] {
        auto e = std::make_unique<rollout_engine>(weights, o, w.lanes, small_task().max_length());
        if (w.draws_oracle) e->draft_with(std::make_unique<oracle>(truth, w.seed, w.hidden), o.speculate);
        return e;
    };
    auto engine = make();
    std::mt19937 random(w.seed);
    std::vector<trajectory> waiting;
    for (auto p = prompts.rbegin(); p != prompts.rend(); ++p) waiting.push_back(begin_response(*p));
    outcome r;
    std::vector<lane_trajectory> done;
    while (!waiting.empty() || engine->running() > 0) {
        for (index_t lane = 0; lane < w.lanes && !waiting.empty(); ++lane)
            if (!engine->busy(lane)) engine->start(lane, std::move(waiting.back())), waiting.pop_back();
        if (w.preempted && random() % 4 == 0 && engine->running() > 0) {
            const auto all = engine->partials();
            const auto& victim = all[random() % all.size()];
            engine->abort(victim.lane);
            waiting.insert(waiting.begin() + static_cast<std::ptrdiff_t>(random() % (waiting.size() + 1)),
                           victim.sequence);
        }
        if (w.resumed && random() % 5 == 0) {
            opd::sched::archive_writer out;
            out(*engine);
            auto other = make();
            opd::sched::archive_reader in(out.bytes);
            in(*other);
            CHECK(in.done());
            opd::sched::archive_writer again;
            again(*other);
            CHECK(again.bytes == out.bytes);
            engine = std::move(other);
        }
        const index_t rows = engine->step(done);
        engine->took(1e-4 + 1e-6 * static_cast<double>(rows));
        r.rows += rows;
        ++r.steps;
        for (auto& d : done) REQUIRE(r.got.emplace(d.sequence.sample, std::move(d.sequence)).second);
        done.clear();
    }
    r.counts = engine->counts();
    return r;
}

} // namespace

TEST_CASE("drafts change no bit of what is drawn and recorded") {
    const policy weights = weights_of(1, 7);
    for (const double temperature : {0.0, 0.6, 1.0})
        for (const draw_plan& plan : plans) {
            std::vector<request> prompts;
            for (std::uint64_t i = 0; i < 24; ++i) prompts.push_back(prompt_of(900 + i));
            const sampling o = options(temperature, plan);
            opd::thread_team team(1);
            trajectories truth;
            for (auto& t : roll_out(*weights.model, team, prompts, o, 7)) truth[t.sample] = t;
            std::uint32_t seed = 0;
            for (const kind what : {kind::ngram, kind::automatic})
                for (const bool draws_oracle : {false, true})
                    for (const bool interrupted : {false, true}) {
                        way w{.what = what, .draws_oracle = draws_oracle, .seed = ++seed};
                        w.lanes = static_cast<index_t>(1 + seed % 9);
                        w.chunk = 1 + static_cast<int>(seed % 5);
                        w.strategy = {1 + static_cast<std::int32_t>(seed % 8), 1,
                                      1 + static_cast<std::int32_t>(seed % 7)};
                        w.preempted = w.resumed = interrupted;
                        w.hidden = draws_oracle && interrupted;
                        CAPTURE(seed);
                        const outcome got = run(weights, o, prompts, w, truth);
                        CHECK(got.got == truth);
                        std::int64_t tokens = 0;
                        for (const auto& [sample, t] : got.got)
                            tokens += static_cast<std::int64_t>(t.response().size());
                        CHECK(got.counts.tokens == tokens);
                        CHECK(got.counts.verified <= got.counts.drafted);
                        if (draws_oracle) CHECK(got.counts.accepted > 20);
                    }
        }
}
