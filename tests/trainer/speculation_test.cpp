// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Speculative rollout gives the bits of plain rollout: tokens, log mu, versions and draws of an engine, checkpoints of
// a run, over all pairs of {temperature} x {draw plan} x {batch} x {strategy} x {drafter} x {chunk} x {schedule} x
// {driver} x {preempted} x {resumed}; OPD_SPECULATION=triples takes all triples.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "opd/sched/archive.hpp"
#include "pipeline/rollout.hpp"
#include "pipeline/rollout_engine.hpp"
#include "run/run.hpp"
#include "settings/checkpoint.hpp"
#include "settings/files.hpp"
#include "trainer/commands.hpp"
#include "trainer/scratch.hpp"
#include "trainer/small_task.hpp"

namespace {

using namespace trainer;
using opd::test::small_shape;
using opd::test::small_task;

using kind = speculation_options::kind;

using opd::test::draw_plans;
using opd::test::small_weights;

// Several samples answer one prompt.
request prompt_of(std::uint64_t sample, std::uint64_t answers = 3) { return opd::test::small_prompt(sample, answers); }

sampling options(double temperature, draw_plan plan) { return opd::test::small_sampling(plan, temperature); }

// Knows what is going to be drawn, and grows trees with it, near it and without it; asks for everything there is to
// hear, and checks it.
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
            if (!hidden_ || random_() % 4 != 0) continue;
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
    draft_work propose(std::span<const draft_wish> wishes) override {
        for (const draft_wish& w : wishes) {
            CHECK(known_.at(w.lane) == w.sequence->tokens);
            CHECK(w.law.sample == w.sequence->sample);
            CHECK(w.law.position == w.sequence->tokens.size());
            const auto drawn = static_cast<std::int32_t>(w.sequence->response().size());
            CHECK(w.depth <= small_task().max_response() - drawn - 1); // the step draws one more
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
        return {};
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

// Rows of factors' values such that each `strength` factors have all their combinations somewhere.
std::vector<std::vector<std::size_t>> covering(const std::vector<std::size_t>& sizes, std::size_t strength) {
    using combination = std::vector<std::pair<std::size_t, std::size_t>>; // factors and values
    std::set<combination> left;
    const auto all = [&](auto&& self, combination so_far, std::size_t next) -> void {
        if (so_far.size() == strength) {
            left.insert(so_far);
            return;
        }
        for (std::size_t f = next; f < sizes.size(); ++f)
            for (std::size_t v = 0; v < sizes[f]; ++v) {
                so_far.emplace_back(f, v);
                self(self, so_far, f + 1);
                so_far.pop_back();
            }
    };
    all(all, {}, 0);
    const auto covers = [](const std::vector<std::size_t>& row, const combination& c) {
        return std::all_of(c.begin(), c.end(), [&](const auto& x) { return row[x.first] == x.second; });
    };
    std::vector<std::vector<std::size_t>> rows;
    std::mt19937 random(1);
    while (!left.empty()) {
        std::vector<std::size_t> best;
        std::ptrdiff_t most = 0;
        for (int attempt = 0; attempt < 30; ++attempt) {
            std::vector<std::size_t> row;
            for (const std::size_t n : sizes) row.push_back(random() % n);
            for (const auto& [f, v] : *left.begin()) row[f] = v;
            const auto n = std::count_if(left.begin(), left.end(), [&](const auto& c) { return covers(row, c); });
            if (n > most) most = n, best = row;
        }
        std::erase_if(left, [&](const combination& c) { return covers(best, c); });
        rows.push_back(best);
    }
    return rows;
}

drafters one(std::unique_ptr<drafter> d) {
    drafters r;
    r.push_back(std::move(d));
    return r;
}

// All pairs of factors; OPD_SPECULATION=triples: all triples.
std::size_t strength() {
    const char* wanted = std::getenv("OPD_SPECULATION");
    return wanted && std::string(wanted) == "triples" ? 3 : 2;
}

// How a batch is run; what becomes of it must not depend on any of this.
struct way {
    kind what = kind::off;
    opd::spec::strategy strategy = {8, 1, 8};
    bool draws_oracle = false, hidden = false; // the drafter
    index_t lanes = 4;
    int chunk = 3;
    int memory = 0;         // kv_tokens
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

outcome roll(const policy& weights, sampling o, const std::vector<request>& prompts, const way& w,
             const trajectories& truth) {
    o.prefill_chunk = w.chunk;
    o.speculate.what = w.what;
    o.speculate.fixed = w.strategy;
    o.speculate.retrieval.answers = 3; // as prompt_of has it
    o.kv_tokens = w.memory;
    const auto make = [&] {
        auto e = std::make_unique<rollout_engine>(weights, o, w.lanes, small_task().max_length());
        if (w.draws_oracle) e->draft_with(one(std::make_unique<oracle>(truth, w.seed, w.hidden)), o.speculate);
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
        if (w.preempted && random() % 40 == 0 && engine->running() > 0) {
            const auto all = engine->partials();
            const auto& victim = all[random() % all.size()];
            engine->abort(victim.lane);
            waiting.insert(waiting.begin() + static_cast<std::ptrdiff_t>(random() % (waiting.size() + 1)),
                           victim.sequence);
        }
        if (w.resumed && random() % 20 == 0) {
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
    const policy weights = small_weights(1, 7);
    constexpr double temperatures[] = {0.0, 0.6, 1.0};
    constexpr index_t batches[] = {1, 2, 3, 8, 17, 33};
    constexpr opd::spec::strategy strategies[] = {{1, 1, 1}, {8, 1, 3}, {3, 1, 8}, {12, 1, 20}, {}};
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < 48; ++i) prompts.push_back(prompt_of(900 + i));
    constexpr std::pair<int, double> filters[] = {{0, 1}, {3, 1}, {0, 0.7}, {6, 0.9}};
    std::map<std::array<std::size_t, 3>, trajectories> truths;
    std::int64_t followed = 0, retrieved = 0, gained = 0;
    std::uint32_t seed = 0;
    //                                  temperature, plan, batch, strategy, oracle, hears hidden, chunk, preempted,
    //                                  resumed, memory, filter
    for (const auto& f : covering({3, 4, 6, 5, 2, 2, 4, 2, 2, 3, 4}, strength())) {
        sampling o = options(temperatures[f[0]], draw_plans[f[1]]);
        std::tie(o.top_k, o.top_p) = filters[f[10]];
        trajectories& truth = truths[{f[0], f[1], f[10]}];
        if (truth.empty()) {
            opd::thread_team team(1);
            for (auto& t : roll_out(*weights.model, team, prompts, o, 7)) truth[t.sample] = t;
        }
        way w;
        w.strategy = strategies[f[3]];
        w.what = w.strategy.none() ? kind::automatic : kind::ngram;
        w.draws_oracle = f[4] == 1, w.hidden = f[5] == 1;
        w.lanes = batches[f[2]];
        w.chunk = std::array{1, 2, 5, 40}[f[6]];
        w.preempted = f[7] == 1, w.resumed = f[8] == 1;
        w.seed = ++seed;
        w.memory = std::array{0, 96, 200}[f[9]]; // of sequences that grow to 45, and drafts behind them
        CAPTURE(seed);
        const outcome got = roll(weights, o, prompts, w, truth);
        CHECK(got.got == truth);
        std::int64_t tokens = 0;
        for (const auto& [sample, t] : got.got) tokens += static_cast<std::int64_t>(t.response().size());
        CHECK(got.counts.tokens == tokens);
        CHECK(got.counts.verified <= got.counts.drafted);
        CHECK(got.counts.accepted <= got.counts.verified);
        CHECK(got.counts.steps <= tokens);
        (w.draws_oracle ? followed : retrieved) += got.counts.accepted;
        gained += tokens - got.counts.steps;
    }
    MESSAGE(seed << " ways, " << followed << " and " << retrieved << " drafts followed, " << gained << " steps saved");
    CHECK(followed > 1000);
    CHECK(retrieved > 1000);
    CHECK(gained > 2000);
}

TEST_CASE("what an adversary's drafts lead to has the law of the target, by chi-squared") {
    // every token but the likeliest, twice deep: whoever preferred drafts, or avoided them, would be seen
    class adversary final : public drafter {
    public:
        void begin(index_t, const trajectory&) override {}
        void hear(std::span<const lane_news>, const policy&) override {}
        void end(index_t, const trajectory&, bool) override {}
        draft_work propose(std::span<const draft_wish> wishes) override {
            for (const draft_wish& w : wishes)
                for (token a = 1; a < 15; ++a) w.tree->graft(std::array{a, static_cast<token>(a * 7 % 15)}, 1 + a % 5);
            return {};
        }
        std::string state() const override { return {}; }
        void restore(std::string_view) override {}
    };
    const policy weights = small_weights(3, 0);
    sampling o = options(0.8, draw_plans[0]);
    o.max_response = 3, o.end = 14;
    o.speculate.what = kind::ngram, o.speculate.fixed = {2, 1, 28};
    rollout_engine engine(weights, o, 16, small_task().max_length());
    engine.draft_with(one(std::make_unique<adversary>()), o.speculate);
    constexpr std::uint64_t samples = 8000;
    std::map<std::vector<token>, double> counts; // of the first two tokens
    std::vector<lane_trajectory> done;
    const request prompt = prompt_of(0);
    for (std::uint64_t next = 0; next < samples || engine.running() > 0;) {
        for (index_t lane = 0; lane < 16 && next < samples; ++lane)
            if (!engine.busy(lane)) engine.start(lane, request{next++, prompt.prompt});
        engine.step(done);
        for (const auto& d : done) {
            const auto r = d.sequence.response();
            counts[{r[0], r.size() > 1 ? r[1] : -1}] += 1;
        }
        done.clear();
    }
    CHECK(engine.counts().accepted > static_cast<std::int64_t>(samples / 4));

    // exact: p(a) p(b | a)
    const auto law = [&](std::vector<token> prefix, double temperature) {
        kv_cache<float> cache;
        cache.resize(small_shape(), 1, static_cast<index_t>(prefix.size()));
        forward_state<float> state;
        std::vector<float> logits(prefix.size() * 15);
        const segment all{0, 0, static_cast<index_t>(prefix.size())};
        forward_rows(*weights.model, std::span(&all, 1), std::span<const std::int32_t>(prefix), cache, state, false,
                     logits.data());
        std::vector<double> p(logits.end() - 15, logits.end());
        const double most = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& x : p) sum += x = std::exp((x - most) / temperature);
        for (double& x : p) x /= sum;
        return p;
    };
    const auto chi_squared = [&](double temperature) {
        double statistic = 0, degrees = -1, rest = 0, rest_expected = 0;
        const auto cell = [&](double seen, double expected) {
            statistic += (seen - expected) * (seen - expected) / expected;
            ++degrees;
        };
        const auto first = law(prompt.prompt, temperature);
        for (token a = 0; a < 15; ++a) {
            std::vector<token> prefix = prompt.prompt;
            prefix.push_back(a);
            const auto second = law(prefix, temperature);
            for (token b = a == 14 ? -1 : 0; b < (a == 14 ? 0 : 15); ++b) {
                const double expected =
                    samples * first[static_cast<std::size_t>(a)] * (b < 0 ? 1 : second[static_cast<std::size_t>(b)]);
                const auto seen = counts.find({a, b});
                const double n = seen == counts.end() ? 0 : seen->second;
                if (expected < 5)
                    rest += n, rest_expected += expected;
                else
                    cell(n, expected);
            }
        }
        if (rest_expected > 0) cell(rest, rest_expected);
        return std::pair{statistic, degrees + 10 * std::sqrt(2 * degrees)};
    };
    const auto [statistic, bound] = chi_squared(0.8);
    MESSAGE("chi-squared " << statistic << ", bound " << bound);
    CHECK(statistic <= bound);
    CHECK(chi_squared(1).first > chi_squared(1).second); // another law is noticed
}

TEST_CASE("memory for fewer tokens than run: who has drawn least waits and is read again, and no bit changes") {
    const policy weights = small_weights(1, 7);
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < 24; ++i) prompts.push_back(prompt_of(900 + i));
    const sampling o = options(1, draw_plans[1]);
    trajectories truth;
    index_t least = 0; // rows without memory's limit
    for (const int memory : {0, 1000, 200, 96, 64}) {
        CAPTURE(memory);
        way w{.lanes = 8, .memory = memory};
        const outcome got = roll(weights, o, prompts, w, {});
        if (memory == 0) truth = got.got, least = got.rows;
        CHECK(got.got == truth);
        CHECK(got.rows >= least);
        if (memory == 1000) CHECK(got.rows == least); // enough
        if (memory == 96) CHECK(got.rows > least);    // some was read twice
    }
    // the one that has drawn most is never stopped
    sampling mine = o;
    mine.kv_tokens = 64;
    rollout_engine engine(weights, mine, 8, small_task().max_length());
    for (index_t i = 0; i < 8; ++i) engine.start(i, prompts[static_cast<std::size_t>(i)]);
    std::vector<lane_trajectory> done;
    int steps = 0;
    bool advances = false;
    for (std::size_t drawn = 0; engine.running() > 0; ++steps) {
        engine.step(done);
        std::size_t most = 0;
        for (const auto& p : engine.partials()) most = std::max(most, p.sequence.response().size());
        if (done.empty() && advances) CHECK(most > drawn);
        advances = done.empty() && most > drawn; // the next one may have to be read again first
        drawn = most;
        done.clear();
    }
    CHECK(steps > 100);
    mine.kv_tokens = 32;
    CHECK_THROWS_WITH(rollout_engine(weights, mine, 8, small_task().max_length()), doctest::Contains("drafts take 64"));
}

TEST_CASE("new weights in mid-sequence: tokens are those of the engine that draws one a step, given the prefix") {
    const policy versions[] = {small_weights(1, 3), small_weights(2, 4)};
    int spanning = 0;
    for (std::uint32_t world = 0; world < 12; ++world) {
        std::mt19937 random(world);
        sampling o = options(1, draw_plans[world % 4]);
        const sampling plain = o;
        o.speculate.what = world % 2 == 0 ? kind::ngram : kind::automatic;
        rollout_engine engine(versions[0], o, 5, small_task().max_length());
        for (std::uint64_t i = 0; i < 5; ++i) engine.start(static_cast<index_t>(i), prompt_of(30 + i));
        std::vector<lane_trajectory> done;
        const auto at = static_cast<int>(2 + random() % 8);
        std::map<std::uint64_t, trajectory> before;
        for (int i = 0; engine.running() > 0; ++i) {
            if (i == at) {
                for (const auto& p : engine.partials()) before[p.sequence.sample] = p.sequence;
                engine.install(versions[1]);
            }
            engine.step(done);
            engine.took(1e-3);
        }
        for (const auto& d : done) {
            if (!before.contains(d.sequence.sample)) continue;
            rollout_engine other(versions[1], plain, 1, small_task().max_length());
            other.start(0, before.at(d.sequence.sample));
            std::vector<lane_trajectory> alone;
            while (other.running() > 0) other.step(alone);
            CHECK(alone[0].sequence == d.sequence);
            spanning += !before.at(d.sequence.sample).response().empty();
        }
    }
    CHECK(spanning > 20);
}

TEST_CASE("a step whose drafts lead to logits that are not finite keeps what came before, and fails where plain "
          "decoding does") {
    // one token's embedding breaks whatever comes after it
    transformer<float> model(small_shape());
    model.initialise(1);
    const request prompt = prompt_of(40);
    sampling o = options(1, draw_plans[1]);
    const auto drawn_until_failure = [&](const policy& weights, const trajectories& truth, bool drafts) {
        sampling mine = o;
        if (drafts) mine.speculate = {.what = kind::ngram, .fixed = {6, 1, 6}};
        rollout_engine engine(weights, mine, 1, small_task().max_length());
        if (drafts) engine.draft_with(one(std::make_unique<oracle>(truth, 1, false)), mine.speculate);
        engine.start(0, prompt);
        std::vector<lane_trajectory> done;
        for (;;) {
            try {
                engine.step(done);
            } catch (const failure& f) {
                return std::pair{engine.partials().at(0).sequence, std::string(f.what())};
            }
            if (engine.running() == 0) return std::pair{done[0].sequence, std::string()};
        }
    };
    const auto [whole, nothing] =
        drawn_until_failure({std::make_shared<const transformer<float>>(model), 1}, {}, false);
    REQUIRE(nothing.empty());
    int failed = 0;
    for (std::size_t at = whole.prompt_length; at + 1 < whole.tokens.size(); ++at) {
        const token bad = whole.tokens[at];
        if (std::find(whole.tokens.begin(), whole.tokens.begin() + static_cast<std::ptrdiff_t>(at), bad) !=
            whole.tokens.begin() + static_cast<std::ptrdiff_t>(at))
            continue;
        transformer<float> broken = model;
        broken.weights[static_cast<std::size_t>(broken.layout.embedding.offset + bad * broken.shape.width)] = NAN;
        broken.weights_changed();
        const policy weights{std::make_shared<const transformer<float>>(broken), 1};
        const auto plain = drawn_until_failure(weights, {}, false);
        const auto drafted = drawn_until_failure(weights, {{whole.sample, whole}}, true);
        CHECK(plain.second.find("not finite") != std::string::npos);
        CHECK(drafted == plain);
        ++failed;
    }
    CHECK(failed > 2);
}

TEST_CASE("retrieval: what was written before is drafted, kept within its limits, and comes back from its bytes") {
    const auto of = [](std::uint64_t sample, std::vector<token> prompt, const std::vector<token>& response) {
        trajectory t = begin_response({sample, std::move(prompt)});
        t.tokens.insert(t.tokens.end(), response.begin(), response.end());
        return t;
    };
    const policy target = small_weights(1, 1);
    const auto proposed = [&](retrieval_drafter& d, index_t lane, const trajectory& t, std::int32_t depth) {
        opd::spec::follow_rates rates;
        opd::spec::draft_builder tree;
        tree.begin(rates);
        const draft_wish w{lane, &t, {}, depth, 1, &tree};
        d.propose(std::span(&w, 1));
        std::vector<token> r;
        for (index_t n = 0; n < tree.size(); ++n) r.push_back(tree.token(n));
        return r;
    };
    using drafts = std::vector<token>;
    const retrieval_options o{.tokens = 60, .answers = 2};
    retrieval_drafter d(o);
    // in the text itself
    trajectory t = of(2, {1, 2, 3}, {4, 5, 6, 3, 4});
    d.begin(0, t);
    CHECK(proposed(d, 0, t, 2) == drafts{5, 6});
    CHECK(proposed(d, 0, t, 9) == drafts{5, 6, 3, 4});
    // in the prompt's other answer, whose tokens are heard of one step after the other
    trajectory other = of(3, {1, 2, 3}, {});
    d.begin(3, other);
    CHECK(proposed(d, 3, other, 3) == drafts{4, 5, 6});
    const drafts more = {4, 5};
    other.tokens.insert(other.tokens.end(), more.begin(), more.end());
    const lane_news news{.lane = 3, .first = 0, .rows = 4, .drawn = more};
    d.hear(std::span(&news, 1), target);
    CHECK(proposed(d, 3, other, 2) == drafts{6, 3});
    // another prompt knows nothing of it
    trajectory stranger = of(4, {1, 2, 7}, {});
    d.begin(1, stranger);
    CHECK(proposed(d, 1, stranger, 4).empty());
    // written and read, it proposes the same
    retrieval_drafter copy(o);
    copy.restore(d.state());
    CHECK(copy.state() == d.state());
    CHECK(proposed(copy, 3, other, 2) == drafts{6, 3});
    CHECK_THROWS(copy.restore("damaged"));
    // the next time that the prompt comes, from its last answers; the time after that, not from those before
    d.end(0, t, true), d.end(3, other, true), d.end(1, stranger, false);
    const trajectory next = of(8, {1, 2, 3}, {4, 5});
    d.begin(2, next);
    CHECK(proposed(d, 2, next, 2) == drafts{6, 3});
    d.end(2, next, true);
    const trajectory last = of(12, {1, 2, 3}, {4});
    d.begin(2, last);
    CHECK(proposed(d, 2, last, 9) == drafts{5});
    d.end(2, last, true);
    // what was begun longest ago goes where there is too much
    CHECK(d.memory().groups() == 2);
    const trajectory big = of(20, {5, 5}, std::vector<token>(46, 1));
    d.begin(0, big);
    CHECK(d.memory().groups() == 2); // the stranger went
    CHECK(d.memory().tokens() <= 60);
    const trajectory again = of(30, {1, 2, 7}, {});
    d.begin(1, again);
    CHECK(proposed(d, 1, again, 4).empty());
    // no room for a text: nothing is said of it, then or later
    retrieval_drafter small({.tokens = 7, .answers = 2});
    const trajectory fits = of(0, {1, 2}, {1, 2}), not_all = of(1, {1, 2}, {1, 2});
    small.begin(0, fits), small.begin(1, not_all);
    CHECK(proposed(small, 0, fits, 4) == drafts{1, 2});
    CHECK(proposed(small, 1, not_all, 4).empty());
}

TEST_CASE("auto drafts where it pays by what steps took, and not where it does not") {
    const policy weights = small_weights(1, 7);
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < 200; ++i) prompts.push_back(prompt_of(900 + i, 8));
    sampling o = options(0, draw_plans[0]);
    struct shares {
        double verified, drafted; // tokens a sequence's step
    };
    const auto share = [&](double a, double b, index_t lanes, index_t running, const trajectories* wrong = nullptr,
                           double asking = 0) {
        sampling mine = o;
        mine.speculate.what = kind::automatic;
        mine.speculate.running = running;
        mine.speculate.retrieval.answers = 8;
        rollout_engine engine(weights, mine, lanes, small_task().max_length());
        if (wrong) engine.draft_with(one(std::make_unique<oracle>(*wrong, 1, false)), mine.speculate);
        std::size_t next = 0;
        std::vector<lane_trajectory> done;
        for (;;) {
            for (index_t lane = 0; lane < lanes; ++lane)
                if (!engine.busy(lane) && next < prompts.size()) engine.start(lane, prompts[next++]);
            if (engine.running() == 0) break;
            const auto before = engine.counts().drafted;
            const index_t rows = engine.step(done);
            engine.took(a + b * static_cast<double>(rows) + (engine.counts().drafted > before ? asking : 0));
        }
        const auto c = engine.counts();
        return shares{static_cast<double>(c.verified) / static_cast<double>(c.steps),
                      static_cast<double>(c.drafted) / static_cast<double>(c.steps)};
    };
    const shares free_rows = share(1e-3, 1e-7, 4, 32), dear_rows = share(1e-7, 1e-3, 4, 32);
    MESSAGE(free_rows.verified << " of " << free_rows.drafted << ", " << dear_rows.verified << " of "
                               << dear_rows.drafted);
    CHECK(free_rows.verified > 0.5);
    CHECK(dear_rows.verified < 0.1);
    CHECK(dear_rows.drafted < 1);                                       // where none pays none is asked for
    CHECK(share(1e-3, 1e-7, 8, 2).verified < 0.5 * free_rows.verified); // too many run, but at the end
    // what is never followed is soon not verified any more, though such drafts are usually worth it
    trajectories truth, wrong;
    opd::thread_team team(1);
    for (auto& t : roll_out(*weights.model, team, prompts, o, 7)) {
        truth[t.sample] = t;
        for (auto i = t.prompt_length; i < t.tokens.size(); ++i) t.tokens[i] = (t.tokens[i] + 1) % 15;
        wrong[t.sample] = t;
    }
    const double right = share(1e-3, 2e-4, 4, 32, &truth).verified, never = share(1e-3, 2e-4, 4, 32, &wrong).verified;
    MESSAGE(right << " and " << never);
    CHECK(right > 0.5);
    CHECK(never < 0.1);
    // rows that cost nothing, of drafts that are right, in steps that take too long because there are any
    const double cheap = share(1e-3, 1e-7, 4, 32, &truth, 2e-3).verified,
                 dear = share(1e-3, 1e-7, 4, 32, &truth, 20e-3).verified;
    MESSAGE(cheap << " and " << dear << " where asking takes as long as 2 and 20 steps");
    CHECK(cheap > 0.5);
    CHECK(dear < 0.3 * cheap);
    // of two drafters the one that is followed, whichever place it has
    for (const bool second : {false, true}) {
        sampling mine = o;
        mine.speculate.what = kind::automatic;
        rollout_engine engine(weights, mine, 4, small_task().max_length());
        auto both = one(std::make_unique<oracle>(second ? wrong : truth, 1, false));
        both.push_back(std::make_unique<oracle>(second ? truth : wrong, 1, false));
        engine.draft_with(std::move(both), mine.speculate);
        std::size_t next = 0;
        std::vector<lane_trajectory> done;
        for (;;) {
            for (index_t lane = 0; lane < 4; ++lane)
                if (!engine.busy(lane) && next < prompts.size()) engine.start(lane, prompts[next++]);
            if (engine.running() == 0) break;
            engine.took(1e-3 + 1e-4 * static_cast<double>(engine.step(done)));
        }
        const auto& chosen = engine.counts().chosen;
        std::array<std::int64_t, 2> of = {};
        for (std::size_t i = 0; i < chosen.size(); ++i) {
            const std::string name = choice_name(mine.speculate, i);
            if (name != "none")
                of[name.starts_with("ngram") ? 0 : 1] += chosen[i]; // so the first and the second are called
        }
        MESSAGE(of[0] << " and " << of[1] << " steps by the first and the second drafter");
        CHECK(of[second] > 10 * of[!second]);
        const std::int64_t none = std::accumulate(chosen.begin(), chosen.end(), std::int64_t{0}) - of[0] - of[1];
        MESSAGE(none << " steps without drafts");
        CHECK(10 * none < of[0] + of[1]); // drafts gain much, so a step without is seldom looked at
        CHECK(engine.counts().timed_tokens_per_step() > engine.counts().break_even()); // they pay
        CHECK(engine.counts().tokens_per_second() > engine.counts().tokens_per_second_without());
    }
    // the plane through steps that cost a + b rows + c passes + d drafted rows
    step_fit fit;
    for (int i = 0; i < 100; ++i) fit.heard({.rows = 8}, 1e-3);
    CHECK(fit.known());
    CHECK(fit.of({.rows = 8}) / 1e-3 == doctest::Approx(1).epsilon(1e-6)); // whatever b is
    for (int i = 0; i < 3760; ++i) {
        const double rows = 8 + i % 5, passes = i % 3, drafted = passes * (1 + i % 7);
        const double usual = 2e-3 + 3e-4 * rows + 1e-4 * passes + 2e-4 * drafted;
        fit.heard({rows, passes, drafted},
                  i % 500 == 250 ? 100 * usual : usual); // now and then something else has the machine
    }
    CHECK(fit.of({.rows = 10}) / 5e-3 == doctest::Approx(1).epsilon(5e-2));
    CHECK(fit.of({.rows = 20}) / 8e-3 == doctest::Approx(1).epsilon(0.1));
    CHECK(fit.of_row() / 3e-4 == doctest::Approx(1).epsilon(0.1));
    CHECK((fit.of({10, 3, 0}) - fit.of({.rows = 10})) / 3e-4 == doctest::Approx(1).epsilon(0.4));
    CHECK((fit.of({10, 3, 12}) - fit.of({10, 3, 0})) / 2.4e-3 == doctest::Approx(1).epsilon(0.1));
    // what finished responses say of how long one will be
    length_record lengths(100);
    CHECK(lengths.remaining(0) == doctest::Approx(50));
    for (int i = 0; i < 1000; ++i) lengths.heard(i % 2 == 0 ? 10 : 60);
    CHECK(lengths.remaining(0) == doctest::Approx(35).epsilon(0.01));
    CHECK(lengths.remaining(20) == doctest::Approx(40).epsilon(0.01));
    CHECK(lengths.remaining(99) == 1);
}

TEST_CASE("auto branches where second guesses are right, and loses little where they are not, or drafts are dear") {
    struct habits {
        bool second_is_right = true, branches = true;
        std::size_t right = 3;   // of five first guesses; elsewhere the second is right, or nobody
        bool has_a_model = true; // which reads, when it is asked, what was drawn since
    };
    class guesser final : public drafter {
    public:
        guesser(const trajectories& truth, const habits& h) : truth_(truth), habits_(h) {}
        bool branches() const override { return habits_.branches; }
        void begin(index_t lane, const trajectory&) override { read_[lane] = 0; }
        void hear(std::span<const lane_news>, const policy&) override {}
        void end(index_t, const trajectory&, bool) override {}
        draft_work propose(std::span<const draft_wish> wishes) override {
            draft_work r;
            for (const draft_wish& w : wishes) {
                CHECK(w.children <= (habits_.branches ? 4 : 1));
                const auto& all = truth_.at(w.sequence->sample).tokens;
                const std::size_t from = w.sequence->tokens.size();
                if (habits_.has_a_model) {
                    const index_t nodes = (w.depth - 1) * w.children;
                    r.passes = std::max<index_t>(r.passes, w.depth), r.nodes += nodes;
                    r.rows += static_cast<index_t>(from - std::exchange(read_[w.lane], from)) + nodes;
                }
                const std::size_t depth = std::min(static_cast<std::size_t>(w.depth), all.size() - from);
                std::vector<token> right(all.begin() + static_cast<std::ptrdiff_t>(from),
                                         all.begin() + static_cast<std::ptrdiff_t>(from + depth)),
                    first = right, second = right;
                for (std::size_t d = 0; d < depth; ++d) {
                    if ((w.sequence->sample * 31 + (from + d) * 17) % 5 < habits_.right) continue;
                    first[d] = (right[d] + 1) % 15;
                    if (!habits_.second_is_right) second[d] = (right[d] + 2) % 15;
                }
                // a chain of first guesses; and where it errs, the second and what comes after it
                if (w.children > 1) w.tree->graft(second, 1);
                w.tree->graft(first, 3);
            }
            return r;
        }
        std::string state() const override { return {}; }
        void restore(std::string_view) override {}

    private:
        const trajectories& truth_;
        habits habits_;
        std::map<index_t, std::size_t> read_; // of each lane's sequence
    };
    const policy weights = small_weights(1, 7);
    std::vector<request> prompts;
    for (std::uint64_t i = 0; i < 250; ++i) prompts.push_back(prompt_of(900 + i, 8));
    const sampling o = options(1, draw_plans[0]);
    opd::thread_team team(1);
    trajectories truth;
    double tokens = 0;
    for (auto& t : roll_out(*weights.model, team, prompts, o, 7)) {
        tokens += static_cast<double>(t.response().size());
        truth[t.sample] = std::move(t);
    }
    struct costs {
        double step, row, pass, drafted;
    };
    const auto rate = [&](const std::vector<habits>& who, index_t lanes, const costs& c,
                          const std::optional<opd::spec::strategy>& fixed = {}) { // none: auto
        sampling mine = o;
        mine.speculate.what = !fixed ? kind::automatic : fixed->none() ? kind::off : kind::ngram;
        if (fixed) mine.speculate.fixed = *fixed;
        rollout_engine engine(weights, mine, lanes, small_task().max_length());
        drafters all;
        for (const habits& h : who) all.push_back(std::make_unique<guesser>(truth, h));
        if (mine.speculate.on()) engine.draft_with(std::move(all), mine.speculate);
        std::size_t next = 0;
        std::vector<lane_trajectory> done;
        for (double seconds = 0;;) {
            for (index_t lane = 0; lane < lanes; ++lane)
                if (!engine.busy(lane) && next < prompts.size()) engine.start(lane, prompts[next++]);
            if (engine.running() == 0) return tokens / seconds;
            const auto rows = static_cast<double>(engine.step(done));
            const draft_work w = engine.drafting();
            const double took = c.step + c.row * rows + c.pass * static_cast<double>(w.passes) +
                                c.drafted * static_cast<double>(w.rows);
            engine.took(took), seconds += took;
        }
    };
    for (const index_t lanes : {2, 8}) {
        const costs cheap = {1e-3, 2e-6, 0, 0}, rows = {1e-3, 3e-4, 0, 0};
        const habits tree, chain = {.branches = false};
        const habits useless = {.second_is_right = false},
                     useless_chain = {.second_is_right = false, .branches = false};
        const double pays = rate({tree}, lanes, cheap) / rate({chain}, lanes, cheap),
                     idle = rate({useless}, lanes, cheap) / rate({useless_chain}, lanes, cheap),
                     dear = rate({tree}, lanes, rows) / rate({chain}, lanes, rows);
        MESSAGE(lanes << " lanes: times the tokens a second of chains, where second guesses are right " << pays
                      << ", where they are not " << idle << ", where rows cost much " << dear);
        CHECK(pays > 1.2);
        CHECK(idle > 0.95);
        CHECK(dear > 0.95);
    }
    // a CPU: every row costs, a drafter's too, and one rollout is short. The model is always right, yet with two
    // sequences or more no draft pays, which is to be found out. Cases: sequences at once, least share of the best way
    const costs cpu = {2e-4, 9e-5, 3e-5, 3e-5};
    const habits retrieval = {.second_is_right = false, .branches = false, .right = 1, .has_a_model = false};
    const habits model = {.right = 5};
    for (const auto& [lanes, least] : {std::pair<index_t, double>{1, 0.95}, {2, 0.93}, {4, 0.88}, {16, 0.8}}) {
        double best = 0;
        for (const habits& h : {retrieval, model})
            for (const std::int32_t depth : {0, 1, 2, 4, 8})
                best = std::max(best, rate({h}, lanes, cpu, opd::spec::strategy{depth, 1, depth}));
        const double alone = rate({model}, lanes, cpu) / best, both = rate({retrieval, model}, lanes, cpu) / best;
        MESSAGE(lanes << " lanes, where every row costs: of the best of four chains and no drafts, one drafter "
                      << alone << ", two " << both);
        CHECK(alone > least);
        CHECK(both > least);
    }
}

// --- whole runs -----------------------------------------------------------------------------------------------------

namespace {

using opd::test::flags;
using opd::test::with;

command parse(const std::string& directory, const flags& more) {
    return parse_command_line(
        with(with({"--run-dir", directory, "--quiet", "--eval-prompts=8", "--eval-samples=1", "--eval-every=4",
                   "--eval-every-prompts=4", "--checkpoint-every=3", "--log-every=2", "--threads=2", "--estimator=mc",
                   "--steps=9", "--loss-limit=1e9", "--prompts=2"},
                  opd::test::small_models()),
             more));
}

// After so many steps it is interrupted.
exit_code go(const std::string& directory, const flags& f, int stop = 0) {
    trainer::run r(parse(directory, f));
    if (stop > 0) r.stop_after(stop);
    return opd::test::go(r);
}

void complete(const std::string& directory, const flags& f, bool resumed) {
    if (resumed)
        for (const int stop : {6, 3}) // of the teacher's 5 steps the last does not count
            REQUIRE(go(directory, with(f, stop == 6 ? flags{} : flags{"--resume"}), stop) == exit_interrupted);
    REQUIRE(go(directory, with(f, resumed ? flags{"--resume"} : flags{})) == exit_ok);
}

run_state state_of(const std::string& directory) {
    std::string settings;
    return load_checkpoint(directory + "/checkpoints/distill.ckpt", settings);
}

// What each step of distillation says of its drafts, and of its loss.
std::string drafts_of(const std::string& directory) {
    std::string r;
    std::istringstream lines(read_file(directory + "/log.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        const auto j = nlohmann::json::parse(line);
        if (j.value("stage", "") == "distill" && j.contains("schedule"))
            r += j["loss"].dump() + " " + j["schedule"].value("speculation", nlohmann::json()).dump() + "\n";
    }
    return r;
}

} // namespace

namespace {

// A drafter that learns from nothing while the student does.
const flags adapted = {"--adapt-drafter",   "--adapt-rows=40",      "--adapt-slices=5",
                       "--adapt-rate=1e-2", "--drafter-warmup=0",   "--drafter-heads=2",
                       "--drafter-ffn=8",   "--drafter-kv-heads=1", "--drafter-head-dim=4"};

} // namespace

TEST_CASE("a run that drafts ends in the bytes of one that does not") {
    const opd::test::scratch dir;
    const flags strategies[] = {{"--speculate=ngram", "--draft-depth=1", "--draft-verify=1"},
                                {"--speculate=ngram", "--draft-history=1"},
                                {"--speculate=ngram", "--draft-depth=3", "--draft-verify=5"},
                                {"--speculate=auto"},
                                {"--speculate=auto", "--draft-running=2"},
                                with({"--speculate=learned", "--draft-depth=3", "--drafter-loss=hass"}, adapted),
                                with({"--speculate=auto", "--drafter=eagle3", "--drafter-loss=eagle3"}, adapted)};
    const flags schedules[] = {{},
                               {"--schedule=step-off", "--schedule-k=1"},
                               {"--schedule=controlled", "--schedule-k=2"},
                               {"--schedule=async", "--tau=0"}};
    const flags virtually = {"--driver=virtual", "--rollout-workers=2"};
    std::map<std::string, std::string> plain; // directories by flags
    std::int64_t accepted = 0, updates = 0;
    int number = 0;
    //            temperature, answers, slots, strategy, schedule, virtual, parked, resumed, memory
    for (const auto& f : covering({3, 2, 3, 7, 4, 2, 2, 2, 2}, strength())) {
        const bool virtual_time = f[5] == 1, resumed = f[7] == 1;
        flags base = {std::array{"--temperature=0.01", "--temperature=0.6", "--temperature=1"}[f[0]],
                      std::array{"--answers=1", "--answers=3"}[f[1]],
                      std::array{"--slots=2", "--slots=3", "--slots=9"}[f[2]]};
        base = with(with(base, schedules[f[4]]), virtual_time ? virtually : flags{});
        if (f[6] == 1) base.push_back("--park-after=3");
        std::string key;
        for (const auto& x : base) key += x + " ";
        CAPTURE(key);
        CAPTURE(strategies[f[3]][0]);
        if (!plain.contains(key)) {
            plain[key] = dir / ("plain" + std::to_string(number));
            complete(plain[key], base, false);
        }
        const std::string drafted = dir / ("drafted" + std::to_string(number++));
        complete(drafted, with(with(base, strategies[f[3]]), f[8] == 1 ? flags{"--kv-tokens=100"} : flags{}), resumed);
        const auto line = nlohmann::json::parse(read_file(drafted + "/schedule.json"));
        accepted += line.at("speculation").at("accepted").get<std::int64_t>();
        if (line.at("speculation").contains("drafter"))
            updates += line["speculation"]["drafter"].at("updates").get<std::int64_t>();
        CHECK(read_file(drafted + "/consumed.jsonl") == read_file(plain[key] + "/consumed.jsonl"));
        if (!virtual_time) { // there the strategy is one of the settings
            for (const char* name : {"teacher", "student", "distill"})
                CHECK(read_file(drafted + "/checkpoints/" + name + ".ckpt") ==
                      read_file(plain[key] + "/checkpoints/" + name + ".ckpt"));
            continue;
        }
        const run_state mine = state_of(drafted), theirs = state_of(plain[key]);
        CHECK(mine.student_weights == theirs.student_weights);
        CHECK(checkpoint_bytes(mine, "") == checkpoint_bytes(theirs, ""));
    }
    MESSAGE(number << " runs, " << accepted << " drafts followed, " << updates << " updates of drafters");
    CHECK(accepted > 200);
    CHECK(updates > 200);
}

TEST_CASE("in virtual time a run that drafts is the same, interrupted or not") {
    const opd::test::scratch dir;
    const flags f = {"--driver=virtual",  "--rollout-workers=2",  "--slots=4",
                     "--answers=2",       "--schedule=async",     "--tau=3",
                     "--cost-step=1e-3",  "--cost-step-row=1e-5", "--cost-train=1.1e-2",
                     "--cost-score=2e-3", "--cost-sync=1e-4"};
    complete(dir / "off", f, false);
    const flags learns = with({"--speculate=learned", "--draft-depth=3", "--cost-draft=1e-5", "--cost-draft-row=1e-5",
                               "--cost-adapt=1e-4", "--cost-adapt-row=2e-6"},
                              adapted);
    const flags small = with(learns, {"--drafter=model", "--drafter-width=8"});
    int number = 0;
    for (const flags& s : {flags{"--speculate=ngram"}, flags{"--speculate=auto"}, learns, small,
                           with(learns, {"--park-after=4"}), with(learns, {"--outstanding=widest"}),
                           with(learns, {"--weight-update=abort"}), with(learns, {"--weight-update=finish_first"}),
                           with(learns, {"--weight-update=abort", "--outstanding=widest"})}) {
        const std::string whole = dir / ("whole" + std::to_string(number)),
                          parts = dir / ("parts" + std::to_string(number));
        CAPTURE(number);
        ++number;
        complete(whole, with(f, s), false);
        complete(parts, with(f, s), true);
        for (const char* file : {"/checkpoints/distill.ckpt", "/checkpoints/latest.ckpt", "/consumed.jsonl"})
            CHECK_MESSAGE(read_file(whole + file) == read_file(parts + file), file);
        CHECK(drafts_of(whole) == drafts_of(parts));
        CHECK(drafts_of(whole).find("accepted_per_step") != std::string::npos);
        // other weights meet other prefixes where steps bring more tokens
        CHECK(state_of(whole).student_weights != state_of(dir / "off").student_weights);
        if (s.size() < 3) continue;
        const auto schedule = nlohmann::json::parse(read_file(whole + "/schedule.json"));
        const auto told = schedule["speculation"]["drafter"];
        CHECK(told["updates"] > (number <= 4 ? 10 : 4)); // parked and with more in flight, workers idle less
        CHECK(told["recorded"] > 10);
        CHECK(told["age"].get<double>() >= 0);
        CHECK(told["age"].get<double>() < 4);
        CHECK(told["idle_used"].get<double>() > 0);
        CHECK(told["idle_used"].get<double>() <= 1 + 1e-9);
        CHECK(told["held_seconds"] == 0); // a slice has its time; it is not asked back
        // what two workers idled, how much of it was used, and the line of the run's table that says so
        const double idle = told["idle_seconds"], used = told["idle_used"];
        CHECK(idle == doctest::Approx(2 * (schedule["wall_seconds"].get<double>() -
                                           schedule["busy_seconds"]["rollout"].get<double>()))
                          .epsilon(1e-9));
        CHECK(used * idle == doctest::Approx(schedule["spare"]["seconds"].get<double>()).epsilon(1e-9));
        const std::string line =
            fmt::format("{:<16}{:>9.1f}% of {:.4g} s that rollout workers idled, {} updates, {:.2f} versions old",
                        "drafter trained", 100 * used, idle, told["updates"].get<int>(), told["age"].get<double>());
        CHECK(read_file(whole + "/report.html").find(line) != std::string::npos);
    }
    CHECK(drafts_of(dir / "off").find("accepted_per_step") == std::string::npos);
}

TEST_CASE("settings of speculation that do not fit are refused, with their names") {
    const auto refused = [](const flags& f, const char* what) {
        CHECK_THROWS_WITH_AS(parse("a", f), doctest::Contains(what), failure);
    };
    refused({"--speculate=on"}, "--speculate must be one of off, ngram, learned, auto, not 'on'");
    refused({"--speculate=learned", "--draft-history=10"}, "--draft-history is not used by --speculate learned");
    refused({"--speculate=ngram", "--draft-children=2"}, "--draft-children is not used by --speculate ngram");
    refused({"--speculate=learned", "--draft-children=0"}, "--draft-children must lie in [1, 64], not 0");
    refused({"--draft-depth=4"}, "--draft-depth is not used by --speculate off");
    refused({"--speculate=auto", "--draft-verify=4"}, "--draft-verify is not used by --speculate auto");
    refused({"--speculate=ngram", "--draft-running=4"}, "--draft-running is not used by --speculate ngram");
    refused({"--draft-history=10"}, "--draft-history is not used by --speculate off");
    refused({"--speculate=ngram", "--draft-depth=0"}, "--draft-depth must lie in [1, 64], not 0");
    refused({"--speculate=ngram", "--draft-verify=65"}, "--draft-verify must lie in [1, 64], not 65");
    refused({"--speculate=auto", "--draft-running=0"}, "--draft-running");
    refused({"--speculate=auto", "--draft-history=0"}, "--draft-history");
    refused({"--kv-tokens=-1"}, "--kv-tokens must lie in");
    CHECK_THROWS_WITH_AS(trainer::run(parse((opd::test::scratch() / "a"), {"--kv-tokens=40"})),
                         doctest::Contains("--kv-tokens must be at least 64"), failure);
    const auto one = [](const flags& f) { return fingerprint(parse("a", f).settings); };
    CHECK(one({"--speculate=ngram"}) == one({}));
    CHECK(one({"--speculate=ngram", "--driver=virtual"}) != one({"--driver=virtual"}));
}
