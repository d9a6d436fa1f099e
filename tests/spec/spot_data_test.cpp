// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: no
//
// What spot training reads and what speculation captures: the buffer of responses against a list of all that ever came,
// and the plan of graphs against every choice that there is.
#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/spec/captured_graphs.hpp"
#include "opd/spec/draft_data_buffer.hpp"
#include "opd/spec/graph_pool.hpp"
#include "support/property.hpp"
#include "support/refusal.hpp"

namespace {

using namespace opd::spec;
using opd::index_t;
using opd::test::refusal;
using opd::test::says;
using place = draft_data_buffer::place;

draft_response response(std::uint64_t id, index_t length, index_t hidden = 0) {
    draft_response r;
    r.id = id, r.tokens.assign(static_cast<std::size_t>(length), static_cast<std::int32_t>(id));
    r.hidden.assign(static_cast<std::size_t>(length * hidden), 7);
    return r;
}
draft_data_buffer copied(const draft_data_buffer& b) {
    opd::sched::archive_writer w;
    w(b);
    opd::sched::archive_reader r(w.bytes);
    draft_data_buffer read(b.options());
    r(read);
    return read;
}

// All that came, and the rule said at once: the first by rank that fit, of what fits alone.
struct ledger {
    draft_buffer_options o;
    struct seen {
        std::uint64_t id;
        index_t length, bytes;
    };
    std::vector<seen> now, last;
    index_t last_bytes() const {
        return sum(kept(last, static_cast<index_t>(o.previous_share * double(o.most_bytes))));
    }
    static index_t sum(const std::vector<seen*>& v) {
        index_t n = 0;
        for (const seen* x : v) n += x->bytes;
        return n;
    }
    static std::vector<seen*> kept(const std::vector<seen>& all, index_t room) {
        std::vector<seen*> order;
        for (const seen& x : all)
            if (x.bytes <= room) order.push_back(const_cast<seen*>(&x));
        std::sort(order.begin(), order.end(), [](const seen* a, const seen* b) {
            return a->length != b->length ? a->length > b->length : a->id < b->id;
        });
        index_t bytes = 0;
        std::vector<seen*> out;
        for (seen* x : order) {
            if ((bytes += x->bytes) > room) break;
            out.push_back(x);
        }
        return out;
    }
    std::vector<seen*> of_now() const { return kept(now, o.most_bytes - last_bytes()); }
    std::vector<seen*> of_last() const {
        return kept(last, static_cast<index_t>(o.previous_share * double(o.most_bytes)));
    }
    void step() {
        std::vector<seen> next;
        for (const seen* x : of_now()) next.push_back({x->id, x->length, x->bytes});
        last = next, now.clear();
    }
    std::vector<place> choose(index_t most) {
        uses_at_start = uses;
        std::vector<place> out;
        index_t tokens = 0, previous = 0;
        std::set<const seen*> taken;
        const auto best = [&](const std::vector<seen*>& from) {
            seen* b = nullptr;
            for (seen* x : from) // by rank, so the first of the least used is it
                if (!taken.contains(x) && x->length <= most - tokens &&
                    (b == nullptr || uses_at_start[x] < uses_at_start[b]))
                    b = x;
            return b;
        };
        for (;;) {
            seen *a = best(of_now()), *b = best(of_last());
            if (a == nullptr && b == nullptr) return out;
            const bool turn = tokens == 0 ? o.previous_share > 0 : double(previous) < o.previous_share * double(tokens);
            seen* const x = a == nullptr || (b != nullptr && turn) ? b : a;
            taken.insert(x);
            uses[x]++;
            tokens += x->length;
            if (x == b) previous += x->length;
            out.push_back({x == b, x->id});
        }
    }
    std::map<const seen*, std::int64_t> uses, uses_at_start;
};
std::vector<std::uint64_t> ids(const std::vector<ledger::seen*>& v) {
    std::vector<std::uint64_t> out;
    for (const ledger::seen* x : v) out.push_back(x->id);
    return out;
}

} // namespace

TEST_CASE("the buffer keeps and chooses what the rule says of all that came, in any order, also after a restart") {
    property("as a list of everything",
             [] {
                 const auto most = *rc::gen::inRange<index_t>(200, 3000);
                 const double share = *rc::gen::element(0.0, 0.25, 0.5, 0.9);
                 ledger all{{most, share}, {}, {}, {}, {}};
                 draft_data_buffer b({most, share});
                 std::uint64_t id = 0;
                 for (std::int64_t step = 1; step <= 4; ++step) {
                     b.begin_step(step);
                     all.step(), all.uses.clear();
                     RC_ASSERT(b.ids(true) == ids(all.of_last()));
                     const auto lengths = *rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 200));
                     all.now.reserve(lengths.size());
                     std::vector<std::uint64_t> order; // ids by any order: those of a step rise, or not
                     for (std::size_t i = 0; i < lengths.size(); ++i) order.push_back(id + (i * 7919) % 1009);
                     id += 1009;
                     for (std::size_t i = 0; i < lengths.size(); ++i) {
                         const index_t hidden = lengths[i] % 3;
                         const draft_response r = response(order[i], lengths[i], hidden);
                         all.now.push_back({order[i], lengths[i], draft_data_buffer::bytes_of(r)});
                         const bool kept = b.add(r);
                         RC_ASSERT(kept == b.contains({false, order[i]}));
                         RC_ASSERT(b.bytes() <= most);
                     }
                     RC_ASSERT(b.ids(false) == ids(all.of_now()));
                     draft_data_buffer backwards({most, share}); // this step alone
                     backwards.begin_step(step);
                     draft_data_buffer forwards = backwards;
                     for (std::size_t i = 0; i < lengths.size(); ++i) {
                         forwards.add(response(order[i], lengths[i], lengths[i] % 3));
                         const std::size_t j = lengths.size() - 1 - i;
                         backwards.add(response(order[j], lengths[j], lengths[j] % 3));
                     }
                     RC_ASSERT(forwards.ids(false) == backwards.ids(false));
                     for (int round = 0; round < 4; ++round) {
                         const auto budget = *rc::gen::inRange<index_t>(1, 500);
                         draft_data_buffer other = copied(b);
                         const std::vector<place> chosen = b.choose(budget);
                         RC_ASSERT(chosen == all.choose(budget));
                         RC_ASSERT(chosen == other.choose(budget));
                         b = copied(b);
                     }
                 }
             },
             {.cases = 60});
}

TEST_CASE("the long ones of the last step make up for this step's short ones") {
    draft_data_buffer b({.most_bytes = 20000, .previous_share = 0.5});
    b.begin_step(1);
    for (std::uint64_t i = 0; i < 20; ++i) b.add(response(i, 10 + static_cast<index_t>(i * i)));
    b.begin_step(2);
    CHECK(b.ids(true).front() == 19);
    CHECK(b.bytes() <= 10000);
    for (std::uint64_t i = 0; i < 8; ++i) b.add(response(100 + i, 12));
    index_t previous = 0, tokens = 0;
    for (const place& p : b.choose(800)) {
        tokens += b.at(p).length();
        previous += p.previous ? b.at(p).length() : 0;
    }
    CHECK(previous >= 300);
    CHECK(tokens <= 800);
    CHECK(b.totals().chosen_tokens == tokens);
    CHECK(b.totals().chosen_previous_tokens == previous);
    b.begin_step(4); // step 3 had none
    CHECK(b.size() == 0);
    CHECK(b.choose(100).empty());
    CHECK(b.totals().forgotten > 8);
}

TEST_CASE("hidden states come later, count, and may displace others") {
    draft_data_buffer b({.most_bytes = 3 * (128 + 400), .previous_share = 0});
    b.begin_step(1);
    for (std::uint64_t i = 0; i < 3; ++i) CHECK(b.add(response(i, 100)));
    CHECK(b.attach(0, std::vector<std::uint8_t>(500)));
    CHECK(b.ids(false) == std::vector<std::uint64_t>{0, 1});
    CHECK(b.totals().displaced == 1);
    CHECK_FALSE(b.attach(2, std::vector<std::uint8_t>(100))); // it is gone
    CHECK_FALSE(b.attach(1, std::vector<std::uint8_t>(2000)));
    CHECK(b.at({false, 1}).hidden.empty());
    CHECK_FALSE(b.attach(1, std::vector<std::uint8_t>(700))); // it fits alone, behind the other it does not
    CHECK(b.ids(false) == std::vector<std::uint64_t>{0});
    CHECK_FALSE(b.add(response(9, 100)));
    CHECK(b.at({false, 0}).hidden.size() == 500);
    b.begin_step(2); // nothing of a step that is over, without a share
    CHECK(b.size() == 0);
}

TEST_CASE("hidden states have a row a token, or none for the last; the longest response is known") {
    draft_data_buffer b({.most_bytes = 10000});
    CHECK(b.longest() == 0);
    draft_response r = response(1, 9);
    for (const std::size_t rows : {8, 9}) {
        r.id = rows, r.hidden.assign(rows * 20, std::uint8_t(rows));
        CHECK(b.add(r));
        CHECK(b.at({false, rows}).hidden.size() == rows * 20);
    }
    r.id = 3, r.hidden.resize(7 * 20);
    CHECK(says(refusal([&] { b.add(r); }), "hidden: has 140 bytes for 9 tokens"));
    CHECK(copied(b).bytes() == b.bytes());
    b.begin_step(1);
    CHECK(b.longest() == 9);
    b.add(response(4, 5));
    CHECK(b.longest() == 9);
    b.add(response(5, 11));
    CHECK(b.longest() == 11);
}

TEST_CASE("what is no response, option or snapshot is refused by name, and changes nothing") {
    CHECK(says(refusal([] { draft_data_buffer({.most_bytes = 0}); }), "most_bytes"));
    CHECK(says(refusal([] { draft_data_buffer({.previous_share = 1}); }), "previous_share"));
    CHECK(says(refusal([] { draft_data_buffer({.previous_share = std::nan("")}); }), "previous_share"));
    draft_data_buffer b({.most_bytes = 1000});
    b.begin_step(2);
    b.add(response(1, 10));
    const auto bytes = [&] {
        opd::sched::archive_writer w;
        w(b);
        return w.bytes;
    };
    const std::string before = bytes();
    CHECK(says(refusal([&] { b.begin_step(1); }), "step: goes from 2 back to 1"));
    CHECK(says(refusal([&] { b.add(response(2, 0)); }), "tokens"));
    CHECK(says(refusal([&] { b.add(response(1, 20)); }), "id: 1 is there already in step 2"));
    draft_response r = response(3, 4);
    r.first = 5;
    CHECK(says(refusal([&] { b.add(r); }), "first"));
    r.first = 0, r.hidden.resize(7);
    CHECK(says(refusal([&] { b.add(r); }), "hidden"));
    CHECK(says(refusal([&] { b.attach(1, std::vector<std::uint8_t>(7)); }), "hidden"));
    CHECK(says(refusal([&] { b.at({true, 1}); }), "id"));
    CHECK(bytes() == before);
    CHECK(says(refusal([&] {
                   draft_data_buffer other({.most_bytes = 999});
                   opd::sched::archive_reader a(before);
                   a(other);
               }),
               "other options"));
    int refused = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
        std::string damaged = before;
        damaged[i] = static_cast<char>(damaged[i] ^ 0x40);
        draft_data_buffer other({.most_bytes = 1000});
        refused += refusal([&] {
                       opd::sched::archive_reader a(damaged);
                       a(other);
                       other.choose(100);
                       other.begin_step(other.step());
                   }) != "";
    }
    CHECK(refused > 30);
}

// --- graphs ----------------------------------------------------------------------------------------------------------

namespace {

double worth_of(const graph_plan& p, std::uint32_t choice) {
    double w = 0;
    for (std::size_t i = 0; i < p.graphs.size(); ++i) w += choice >> i & 1 ? p.graphs[i].worth : 0;
    return w;
}
index_t bytes_of(const graph_plan& p, std::uint32_t choice) {
    index_t n = 0;
    for (std::size_t i = 0; i < p.graphs.size(); ++i) n += choice >> i & 1 ? p.graphs[i].bytes : 0;
    return n;
}
rc::Gen<strategy> arms() {
    return rc::gen::map(rc::gen::tuple(rc::gen::inRange(1, 3), rc::gen::inRange(1, 3), rc::gen::inRange(0, 3)),
                        [](const auto& t) {
                            return strategy{std::get<0>(t), std::get<1>(t), 4 * std::get<2>(t)};
                        });
}

} // namespace

TEST_CASE("a plan has the keys that some batch needs, and at start half of what the best choice is worth or more") {
    std::mt19937 random(7);
    const auto in = [&](index_t low, index_t high) { return low + static_cast<index_t>(random() % (high - low + 1)); };
    int best = 0, cases = 0;
    for (int trial = 0; trial < 600; ++trial) {
        CAPTURE(trial);
        std::vector<index_t> buckets;
        for (index_t b = 0; buckets.size() < 3;) buckets.push_back(b += in(1, 4));
        std::vector<graph_use> uses(static_cast<std::size_t>(in(0, 3)));
        for (graph_use& u : uses) {
            u.arm = {static_cast<std::int32_t>(in(1, 2)), static_cast<std::int32_t>(in(1, 2)),
                     static_cast<std::int32_t>(4 * in(0, 2))};
            u.first = in(1, 13);
            u.last = in(0, 2) == 0 ? 0 : u.first + in(0, 5);
            u.share = static_cast<double>(in(0, 9));
        }
        const linear_graph_bytes cost{in(1, 50), in(0, 4), in(1, 50), in(0, 4)};
        const graph_plan everything = plan_graphs(uses, buckets, cost, index_t{1} << 40);
        const index_t budget = in(0, everything.bytes + 1);
        const graph_plan p = plan_graphs(uses, buckets, cost, budget);
        // the keys, batch by batch
        std::map<graph_key, std::set<std::int32_t>> needed;
        for (index_t batch = 1; batch <= buckets.back(); ++batch) {
            index_t bucket = 0;
            for (const index_t b : buckets)
                if (b >= batch && bucket == 0) bucket = b;
            for (std::size_t u = 0; u < uses.size(); ++u) {
                const strategy& a = uses[u].arm;
                if (batch < uses[u].first || (uses[u].last > 0 && batch > uses[u].last)) continue;
                needed[{graph_kind::target, bucket, a.verify + 1, 0, 0}].insert(static_cast<std::int32_t>(u));
                if (a.verify > 0)
                    needed[{graph_kind::draft, bucket, 0, a.top_k, a.depth}].insert(static_cast<std::int32_t>(u));
            }
        }
        REQUIRE(p.graphs.size() == needed.size());
        std::uint32_t at_start = 0;
        index_t bytes = 0;
        for (std::size_t i = 0; i < p.graphs.size(); ++i) {
            const planned_graph& g = p.graphs[i];
            const std::set<std::int32_t> who(g.uses.begin(), g.uses.end());
            REQUIRE(needed.at(g.key) == who);
            REQUIRE(who.size() == g.uses.size());
            double worth = 0;
            for (const std::int32_t u : who) worth += uses[static_cast<std::size_t>(u)].share;
            REQUIRE(g.worth == worth);
            REQUIRE(g.bytes == cost(g.key));
            at_start |= static_cast<std::uint32_t>(g.at_start) << i;
            bytes += g.bytes;
        }
        REQUIRE(p.bytes == bytes);
        REQUIRE(p.bytes_at_start == bytes_of(p, at_start));
        REQUIRE(p.bytes_at_start <= budget);
        if (p.graphs.size() > 12) continue;
        double most = 0;
        for (std::uint32_t c = 0; c < 1u << p.graphs.size(); ++c)
            if (bytes_of(p, c) <= budget) most = std::max(most, worth_of(p, c));
        REQUIRE(2 * worth_of(p, at_start) >= most);
        if (budget >= p.bytes) REQUIRE(worth_of(p, at_start) == most);
        const bool some = at_start != 0 && p.bytes_at_start < p.bytes;
        cases += some, best += some && worth_of(p, at_start) == most;
    }
    MESSAGE("the best in " << best << " of " << cases);
    CHECK(2 * best > cases);
}

TEST_CASE("one graph of much worth goes before many that fit beside each other") {
    const std::vector<graph_use> uses{{{1, 1, 1}, 1, 1, 3}, {{}, 2, 2, 20}};
    const std::vector<index_t> buckets{1, 2};
    const auto bytes = [](const graph_key& k) { return k.batch == 1 ? index_t{1} : index_t{100}; };
    graph_plan p = plan_graphs(uses, buckets, bytes, 100);
    CHECK(p.bytes == 102);
    CHECK(p.bytes_at_start == 100);
    CHECK(p.find({graph_kind::target, 2, 1, 0, 0})->at_start);
    p = plan_graphs(uses, buckets, bytes, 99);
    CHECK(p.bytes_at_start == 2);
}

namespace {
/// Bytes of three ways to capture for the same arms (table 5 in form).
struct graph_footprint {
    index_t single = 0;   ///< one arm at every bucket, the dearest of them
    index_t multiple = 0; ///< every arm at every bucket, each with graphs of its own
    index_t bucketed = 0; ///< each arm where it is used, equal keys once
};
graph_footprint footprint_of(std::span<const graph_use> uses, std::span<const index_t> buckets,
                             const graph_bytes& bytes_of) {
    graph_footprint f;
    f.bucketed = plan_graphs(uses, buckets, bytes_of, 0).bytes;
    std::vector<strategy> seen;
    for (const graph_use& u : uses) {
        if (std::find(seen.begin(), seen.end(), u.arm) != seen.end()) continue;
        seen.push_back(u.arm);
        index_t arm = 0;
        for (const index_t b : buckets)
            for (const graph_key& k : graph_keys(u.arm, b)) arm += opd::spec::detail::checked_bytes(bytes_of, k);
        f.single = std::max(f.single, arm);
        f.multiple += arm;
    }
    return f;
}

} // namespace

// The arms and thresholds of TLT's tuner, one of each bucket, and table 5 in form: GB of Llama-3-8B's graphs there,
// MiB of a linear cost here, which the ratios follow from.
TEST_CASE("captured by buckets, apart and merged: little more than one strategy, far less than each on its own") {
    const std::vector<index_t> buckets{1, 2, 4, 8, 16, 24, 32, 40, 48, 64};
    const std::vector<graph_use> uses{
        {{8, 4, 48}, 1, 1}, {{8, 4, 32}, 2, 4}, {{6, 4, 16}, 5, 20}, {{4, 2, 8}, 21, 0}, {{}, 33, 0}};
    const linear_graph_bytes cost{60000, 2, 8000, 1};
    std::vector<graph_use> arms(uses.begin(), uses.begin() + 4);
    const graph_footprint f = footprint_of(uses, buckets, cost), without = footprint_of(arms, buckets, cost);
    MESSAGE("single " << without.single << ", multiple " << without.multiple << ", bucketed " << without.bucketed
                      << ", and with plain decoding beside drafts " << f.bucketed);
    // TLT: 7.81, 30.39, 10.69 GB
    CHECK(double(without.multiple) / double(without.single) == doctest::Approx(3.9).epsilon(0.03));
    CHECK(double(f.bucketed) / double(without.single) == doctest::Approx(1.37).epsilon(0.05));
    CHECK(f.bucketed > without.bucketed);
    // by hand: one bucket, two arms with one draft graph and two target graphs
    const std::vector<graph_use> two{{{3, 2, 4}}, {{3, 2, 6}}};
    const std::vector<index_t> one{2};
    const graph_footprint g = footprint_of(two, one, linear_graph_bytes{10, 1, 5, 1});
    CHECK(g.multiple == (10 + 2 * 5 + 5 + 12) + (10 + 2 * 7 + 5 + 12));
    CHECK(g.single == 10 + 2 * 7 + 5 + 12);
    CHECK(g.bucketed == (10 + 2 * 5) + (10 + 2 * 7) + (5 + 12));
}

TEST_CASE("a pool's books: within the budget, the one used longest ago goes, and never for the other of its step") {
    std::int64_t met = 0;
    property(
        "as lists say",
        [&] {
            const std::vector<index_t> buckets{1, 2, 4};
            const std::vector<graph_use> uses{{{2, 2, 4}, 1, 1}, {{}, 4, 4}};
            const linear_graph_bytes cost{*rc::gen::inRange<index_t>(1, 20), 1, *rc::gen::inRange<index_t>(1, 20), 1};
            const index_t budget = *rc::gen::inRange<index_t>(0, 200);
            const std::int32_t after = *rc::gen::inRange(1, 3);
            graph_pool pool(plan_graphs(uses, buckets, cost, budget), cost, after);
            std::vector<graph_key> there; // on demand, the one used last at the end
            std::map<graph_key, std::int32_t> missed;
            const auto bytes = [&](const auto& keys) {
                index_t n = 0;
                for (const graph_key& k : keys) n += cost(k);
                return n;
            };
            const index_t room = budget - pool.plan().bytes_at_start;
            for (int step = 0; step < 60; ++step) {
                using launch = graph_step::launch;
                const index_t batch = *rc::gen::inRange<index_t>(1, 6);
                const strategy arm = *arms();
                const graph_step s = pool.use(batch, arm);
                RC_ASSERT(s.bucket == (batch == 1 ? 1 : batch == 2 ? 2 : batch <= 4 ? 4 : 0));
                const std::vector<graph_key> keys = graph_keys(arm, s.bucket);
                RC_ASSERT(s.parts.size() == keys.size());
                std::vector<graph_key> mine, dropped;
                for (const graph_key& k : keys)
                    if (std::erase(there, k) > 0) there.push_back(k), mine.push_back(k);
                for (std::size_t i = 0; i < keys.size(); ++i) {
                    const graph_key& k = keys[i];
                    const planned_graph* g = pool.plan().find(k);
                    launch how = launch::eager;
                    if (s.bucket > 0 &&
                        ((g != nullptr && g->at_start) || std::count(there.begin(), there.end(), k) > 0)) {
                        how = launch::replay;
                    } else if (s.bucket > 0 && cost(k) <= room - bytes(mine) && ++missed[k] == after) {
                        while (bytes(there) + cost(k) > room) {
                            const auto oldest = std::find_if(there.begin(), there.end(), [&](const graph_key& x) {
                                return std::count(mine.begin(), mine.end(), x) == 0;
                            });
                            dropped.push_back(*oldest);
                            missed.erase(*oldest);
                            there.erase(oldest);
                        }
                        there.push_back(k), mine.push_back(k);
                        missed.erase(k);
                        how = launch::capture;
                    }
                    RC_ASSERT(s.parts[i].key == k);
                    RC_ASSERT(s.parts[i].how == how);
                    RC_ASSERT(pool.holds(k) == (how != launch::eager));
                }
                for (const graph_key& k : keys) // of those used together the lower key is the first to go
                    if (std::erase(there, k) > 0) there.push_back(k);
                RC_ASSERT(s.drop == dropped);
                RC_ASSERT(pool.bytes() == pool.plan().bytes_at_start + bytes(there));
                RC_ASSERT(pool.bytes() <= budget);
            }
            met += pool.totals().drops;
        },
        {.cases = 60});
    CHECK(met > 60);
}

TEST_CASE("a plan is refused by the argument that is wrong") {
    const std::vector<index_t> one{1}, none, falling{2, 2};
    const linear_graph_bytes cost{1, 1, 1, 1};
    const auto plan = [&](std::vector<graph_use> uses, const std::vector<index_t>& buckets, const graph_bytes& bytes,
                          index_t budget) { return refusal([&] { plan_graphs(uses, buckets, bytes, budget); }); };
    CHECK(plan({}, one, cost, 0) == "");
    CHECK(says(plan({}, none, cost, 0), "buckets"));
    CHECK(says(plan({}, falling, cost, 0), "buckets, row 1"));
    CHECK(says(plan({}, one, cost, -1), "budget"));
    CHECK(says(plan({{}, {{1, 1, 1}, 3, 2}}, one, cost, 0), "uses, row 1"));
    CHECK(says(plan({{{1, 1, 1}, 0}}, one, cost, 0), "uses, row 0"));
    CHECK(says(plan({{{0, 1, 1}}}, one, cost, 0), "uses, row 0"));
    CHECK(says(plan({{{1, 1, 1}, 1, 0, std::nan("")}}, one, cost, 0), "uses, row 0"));
    CHECK(says(plan(
                   {{}}, one, [](const graph_key&) { return index_t{0}; }, 0),
               "bytes_of"));
    graph_pool pool(plan_graphs({}, one, cost, 10), cost);
    CHECK(says(refusal([&] { pool.use(0, {}); }), "batch"));
    CHECK(says(refusal([&] { pool.use(1, {0, 0, 3}); }), "arm"));
    CHECK(says(refusal([&] { graph_pool(plan_graphs({}, one, cost, 10), cost, 0); }), "capture_after"));
    CHECK(pool.use(7, {}).parts.at(0).how == graph_step::launch::eager);
    CHECK(pool.use(1, {}).parts.at(0).how == graph_step::launch::capture);
    CHECK(pool.use(1, {}).parts.at(0).how == graph_step::launch::replay);
    CHECK(pool.totals().replays == 1);
}

namespace {
/// What a device would do: graphs are numbers, of which each stands for what was enqueued while it was captured.
struct device {
    std::vector<graph_key> enqueued;             // at once
    std::map<int, std::vector<graph_key>> alive; // captured, not destroyed
    std::vector<graph_key> being_captured;
    bool captures = false, out_of_memory = false;
    int made = 0, abandoned = 0;

    void enqueue(const graph_key& k) { (captures ? being_captured : enqueued).push_back(k); }
};
struct device_api {
    device* d;
    void begin() {
        REQUIRE(!d->captures);
        d->captures = true, d->being_captured.clear();
    }
    int end() {
        REQUIRE(d->captures);
        d->captures = false;
        if (d->out_of_memory) throw std::runtime_error("no memory");
        d->alive[++d->made] = d->being_captured;
        return d->made;
    }
    void abandon() noexcept { d->captures = false, ++d->abandoned; }
    void launch(int g) {
        for (const graph_key& k : d->alive.at(g)) d->enqueued.push_back(k);
    }
    void destroy(int g) noexcept { d->alive.erase(g); }
};
} // namespace

TEST_CASE("captured graphs: what runs is what was asked for, whatever is captured, dropped, or fails") {
    std::int64_t drops = 0, failures = 0;
    property(
        "as without graphs",
        [&] {
            const std::vector<index_t> buckets{1, 2, 4};
            const std::vector<graph_use> uses{{{2, 2, 4}, 1, 1}, {{}, 4, 4}};
            const linear_graph_bytes cost{*rc::gen::inRange<index_t>(1, 20), 1, *rc::gen::inRange<index_t>(1, 20), 1};
            const index_t budget = *rc::gen::inRange<index_t>(0, 200);
            device d;
            {
                captured_graphs<device_api> graphs(graph_pool(plan_graphs(uses, buckets, cost, budget), cost, 1), {&d});
                const auto record = [&](const graph_key& k, bool captured) {
                    REQUIRE(captured == d.captures);
                    d.enqueue(k);
                };
                graphs.capture_at_start(record);
                graphs.capture_at_start(record);
                RC_ASSERT(d.enqueued.empty());
                const auto at_start = graphs.captured();
                for (const planned_graph& g : graphs.pool().plan().graphs)
                    RC_ASSERT(graphs.pool().holds(g.key) == g.at_start);
                RC_ASSERT(at_start == std::ranges::count(graphs.pool().plan().graphs, true, &planned_graph::at_start));
                for (int step = 0; step < 40; ++step) {
                    const index_t batch = *rc::gen::inRange<index_t>(1, 6);
                    const strategy arm = *arms();
                    const bool throws = *rc::gen::inRange(0, 8) == 0;
                    d.out_of_memory = *rc::gen::inRange(0, 8) == 0;
                    d.enqueued.clear();
                    const int made = d.made, abandoned = d.abandoned;
                    bool failed = false;
                    try {
                        graphs.run(batch, arm, [&](const graph_key& k, bool captured) {
                            if (throws && captured) throw std::runtime_error("of the caller");
                            record(k, captured);
                        });
                    } catch (const std::runtime_error&) {
                        failed = true, ++failures;
                    }
                    RC_ASSERT(!d.captures);
                    RC_ASSERT(graphs.captured() == static_cast<index_t>(d.alive.size()));
                    RC_ASSERT(d.abandoned - abandoned == (failed && throws));
                    if (failed) {
                        RC_ASSERT(d.made == made || !throws);
                        d.out_of_memory = false, d.enqueued.clear();
                        graphs.run(batch, arm, record); // again
                    }
                    RC_ASSERT(d.enqueued == graph_keys(arm, bucket_of(buckets, batch)));
                    for (const auto& [number, keys] : d.alive)
                        RC_ASSERT(keys.size() == 1u && graphs.pool().holds(keys[0]));
                }
                drops += graphs.pool().totals().drops;
            }
            RC_ASSERT(d.alive.empty());
        },
        {.cases = 60});
    CHECK(drops > 60);
    CHECK(failures > 60);
}
