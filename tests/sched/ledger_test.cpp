// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ledger against a transcription of its theorems: random histories of admissions, starts, interruptions, scores in
// any order, restarts, failures, batches put back, saves and loads. After every event the ledger agrees with the model,
// census and places included; every consumed batch keeps
// the policy's bound; from every state, once all that is outstanding is scored, batches follow until nothing is left.
#include <algorithm>
#include <doctest/doctest.h>
#include <map>
#include <optional>
#include <vector>

#include "opd/sched/ledger.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

settings streaming(index_t batch, async a) {
    if (a.outstanding == by_policy) a.outstanding = widest; // automatic M: outstanding_test.cpp, and random worlds
    return {.batch = batch, .schedule = a};
}

/// What is known of one outstanding sequence.
struct sequence {
    place where = place::waiting;
    int admitted = 0;       // number of its admission
    version_t version = -1; // of its start; -1: none yet
    bool unscored() const { return version >= 0 && where < place::ready; }
};

/// The rules, written down as they are stated. `completed` lists ready sequences by the time of their scoring.
struct model {
    plan p;
    version_t version = 0;
    bool gate = true;
    int admissions = 0;
    index_t accepted = 0; // rolled out in the whole run and not given up
    std::map<slot_t, sequence> out;
    std::vector<slot_t> completed;

    index_t count(auto&& is) const {
        return std::count_if(out.begin(), out.end(), [&](const auto& e) { return is(e.second); });
    }
    index_t free() const {
        if (!gate) return 0;
        if (p.policy != staleness_policy::areal)
            return std::max<index_t>(0, p.permits - static_cast<index_t>(out.size()));
        const index_t running = count([](const sequence& s) { return s.where <= place::rollout; });
        const index_t limit = p.concurrency > 0 ? p.concurrency - running : p.permits;
        return std::max<index_t>(0, std::min(limit, (p.depth + version + 1) * p.batch - (accepted + running)));
    }
    void unlist(slot_t s) { completed.erase(std::find(completed.begin(), completed.end(), s)); }

    /// The batch of n that the policy allows now, in its order; none if it allows none.
    std::optional<std::vector<slot_t>> pick(index_t n) const {
        const auto size = static_cast<std::size_t>(n);
        const auto at = [&](slot_t s) -> const sequence& { return out.at(s); };
        const auto by_version = [&] { // and of one version by completion
            std::multimap<version_t, slot_t> sorted;
            for (const slot_t s : completed) sorted.emplace(at(s).version, s);
            std::vector<slot_t> sequence;
            for (const auto& e : sorted) sequence.push_back(e.second);
            return sequence;
        };
        std::vector<slot_t> list = completed;
        switch (p.policy) {
        case staleness_policy::in_order: { // the n that were admitted first; all of them are ready
            list.clear();
            for (const auto& [s, q] : out)
                if (q.where != place::training) list.push_back(s);
            std::sort(list.begin(), list.end(), [&](slot_t a, slot_t b) { return at(a).admitted < at(b).admitted; });
            if (list.size() < size) return {};
            list.resize(size);
            for (const slot_t s : list)
                if (at(s).where != place::ready) return {};
            return list;
        }
        case staleness_policy::cohort_fifo: { // nothing unscored is of lower version than any of the batch
            list = by_version();
            if (list.size() < size) return {};
            list.resize(size);
            for (const slot_t s : list)
                for (const auto& [t, q] : out)
                    if (q.unscored() && q.version < at(s).version) return {};
            return list;
        }
        case staleness_policy::edf: { // the others, B a step in order of their deadlines, all meet them
            list = by_version();
            if (list.size() < size) return {};
            list.resize(size);
            std::vector<version_t> deadlines;
            for (const auto& [t, q] : out)
                if (q.version >= 0 && q.where != place::training &&
                    std::find(list.begin(), list.end(), t) == list.end())
                    deadlines.push_back(q.version + p.depth);
            std::sort(deadlines.begin(), deadlines.end());
            for (std::size_t i = 0; i < deadlines.size(); ++i)
                if (version + 1 + static_cast<version_t>(i) / p.batch > deadlines[i]) return {};
            return list;
        }
        case staleness_policy::naive_wait: { // whoever would exceed tau at the next version is in the batch
            std::vector<slot_t> urgent, rest;
            for (const auto& [t, q] : out)
                if (q.unscored() && q.version + p.depth <= version) return {};
            for (const slot_t s : list) (at(s).version + p.depth <= version ? urgent : rest).push_back(s);
            if (urgent.size() > size || list.size() < size) return {};
            urgent.insert(urgent.end(), rest.begin(), rest.end());
            urgent.resize(size);
            return urgent;
        }
        default: // completion
            if (list.size() < size) return {};
            list.resize(size);
            return list;
        }
    }
    /// Of a full batch consumed now; -1: none.
    version_t lag_bound() const {
        switch (p.policy) {
        case staleness_policy::cohort_fifo:
        case staleness_policy::in_order:
            return (p.permits + p.batch - 1) / p.batch - 1;
        case staleness_policy::edf:
        case staleness_policy::drop:
        case staleness_policy::retry:
            return p.depth;
        default:
            return -1;
        }
    }
};

/// Ledger and model, driven together.
struct pair_of {
    model m;
    ledger l;
    std::vector<slot_t> batch; // in training
    index_t steps = 0, lag_sum = 0, consumed = 0;
    std::vector<index_t> step_sums, step_lags; // of each step: the sum of lag + 1, the largest lag

    explicit pair_of(const settings& s) : m{.p = plan_of(s), .out = {}, .completed = {}}, l(m.p) {}

    void compare() const {
        RC_ASSERT(l.version() == m.version);
        RC_ASSERT(l.gate_open() == m.gate);
        RC_ASSERT(l.outstanding() == static_cast<index_t>(m.out.size()));
        RC_ASSERT(l.ready_count() == static_cast<index_t>(m.completed.size()));
        RC_ASSERT(l.free() == m.free());
        census counted;
        for (const auto& [s, q] : m.out) {
            ++counted[q.where];
            RC_ASSERT(l.in_use(s));
            RC_ASSERT(l.version_of(s) == q.version);
        }
        RC_ASSERT(l.where() == counted);
        for (slot_t s = 0; s < l.slots() + 1; ++s) {
            const auto known = m.out.find(s);
            RC_ASSERT(l.place_of(s) == (known == m.out.end() ? place::none : known->second.where));
        }
    }
    std::vector<slot_t> in(std::initializer_list<place> places) const {
        std::vector<slot_t> list;
        for (const auto& [s, q] : m.out)
            if (std::find(places.begin(), places.end(), q.where) != places.end()) list.push_back(s);
        return list;
    }
    std::vector<slot_t> started() const { // and not in training
        std::vector<slot_t> list;
        for (const auto& [s, q] : m.out)
            if (q.version >= 0 && q.where != place::training) list.push_back(s);
        return list;
    }
    void admit() {
        const slot_t s = l.admit();
        RC_ASSERT(!m.out.contains(s));
        m.out[s] = {place::waiting, m.admissions++, -1};
    }
    void start(slot_t s) {
        l.started(s);
        sequence& q = m.out[s];
        q.where = place::rollout;
        if (q.version < 0) q.version = m.version; // else it goes on with the tokens that it has
    }
    void interrupt(slot_t s) {
        l.interrupted(s);
        m.out[s].where = place::waiting;
    }
    void roll(slot_t s) {
        l.queued(s);
        m.out[s].where = place::queued;
        ++m.accepted;
    }
    void call(slot_t s) {
        l.scoring(s);
        m.out[s].where = place::scoring;
    }
    void call_fails(slot_t s) {
        l.queued(s);
        m.out[s].where = place::queued;
    }
    void score(slot_t s) {
        l.ready(s);
        m.out[s].where = place::ready;
        m.completed.push_back(s);
    }
    void roll_and_score(slot_t s) {
        if (m.out[s].where == place::rollout) roll(s);
        if (m.out[s].where == place::queued) call(s);
        score(s);
    }
    void restart(slot_t s) {
        sequence& q = m.out[s];
        if (q.where == place::ready) {
            l.unready(s);
            m.unlist(s);
        }
        if (q.where > place::rollout) --m.accepted;
        l.restarted(s);
        q.where = place::waiting;
        q.version = -1;
    }
    void release(slot_t s) {
        l.release(s);
        if (m.out[s].where == place::ready) m.unlist(s);
        if (m.out[s].where > place::rollout) --m.accepted;
        m.out.erase(s);
        std::erase(batch, s);
    }
    /// Over the first J steps, and over the last J, the sum of lag + 1 is what the theorem allows.
    void windows_keep_the_mean() const {
        RC_ASSERT(lag_sum <= m.p.permits * steps);
        index_t sum = 0, most = 0;
        for (std::size_t j = 1; j <= step_sums.size(); ++j) {
            sum += step_sums[step_sums.size() - j];
            most = std::max(most, step_lags[step_lags.size() - j]);
            RC_ASSERT(sum <= m.p.permits * (static_cast<index_t>(j) + most));
        }
    }
    bool pick(index_t n) {
        const auto expected = m.pick(n);
        std::vector<slot_t> got{7777}; // pick appends
        const bool picked = l.pick(n, got);
        RC_ASSERT(picked == expected.has_value());
        RC_ASSERT(got.front() == 7777U);
        got.erase(got.begin());
        if (!picked) {
            RC_ASSERT(got.empty());
            return false;
        }
        RC_ASSERT(got == *expected);
        batch = got;
        for (const slot_t s : batch) {
            m.unlist(s);
            m.out[s].where = place::training;
        }
        return true;
    }
    void put_back() {
        l.put_back(batch);
        m.completed.insert(m.completed.begin(), batch.begin(), batch.end());
        for (const slot_t s : batch) m.out[s].where = place::ready;
        batch.clear();
    }
    void advance() {
        step_sums.push_back(0), step_lags.push_back(0);
        for (const slot_t s : batch) {
            const version_t lag = m.version - m.out[s].version;
            RC_ASSERT(lag >= 0);
            if (m.lag_bound() >= 0) RC_ASSERT(lag <= m.lag_bound());
            lag_sum += lag + 1;
            step_sums.back() += lag + 1;
            step_lags.back() = std::max(step_lags.back(), lag);
            ++consumed;
            m.out.erase(s);
        }
        ++steps;
        if (m.p.policy == staleness_policy::capacity || m.p.policy == staleness_policy::areal) windows_keep_the_mean();
        l.advance(batch);
        batch.clear();
        ++m.version;
        m.gate = true;

        const bool gives_up = m.p.policy == staleness_policy::drop || m.p.policy == staleness_policy::retry;
        std::vector<slot_t> stale, expected;
        l.stale(stale);
        if (gives_up)
            for (const auto& [s, q] : m.out)
                if (q.version >= 0 && q.version + m.p.depth < m.version) expected.push_back(s);
        RC_ASSERT(stale == expected);
        for (const slot_t s : stale)
            if (m.p.policy == staleness_policy::drop)
                release(s);
            else
                restart(s);
    }
    void reload() {
        archive_writer to;
        to(l);
        ledger other(m.p);
        archive_reader from(to.bytes);
        from(other);
        RC_ASSERT(from.done());
        archive_writer again;
        again(other);
        RC_ASSERT(again.bytes == to.bytes);
        l = other;
    }
    void fill() {
        while (l.free() > 0) admit();
    }
    /// Everything that is out becomes scored.
    void score_all() {
        for (const slot_t s : in({place::waiting})) start(s);
        for (const slot_t s : in({place::rollout})) roll(s);
        for (const slot_t s : in({place::queued})) call(s);
        for (const slot_t s : in({place::scoring})) score(s);
    }
    /// Batches follow each other as soon as all is scored; returns whether they did.
    bool drains() {
        if (!batch.empty() || !m.gate) advance();
        for (int i = 0; i < 6; ++i) {
            do { // areal admits as others are rolled out
                fill();
                score_all();
            } while (l.free() > 0);
            if (!pick(m.p.batch)) return false;
            advance();
        }
        score_all();
        while (!m.out.empty()) {
            if (!pick(std::min<index_t>(m.p.batch, l.ready_count()))) return false;
            advance();
            score_all();
        }
        return true;
    }
};

/// One history: the numbers choose event and sequence. Scores favour the youngest, which overtakes as much as a policy
/// allows.
void follow(pair_of& x, const std::vector<std::uint16_t>& events) {
    for (const std::uint16_t e : events) {
        const auto any = [&](const std::vector<slot_t>& list) { return list[(e >> 4) % list.size()]; };
        switch (e % 16) {
        case 0:
        case 1:
        case 2:
            while (x.l.free() > 0 && (e % 16 == 0 || x.in({place::waiting}).empty())) x.admit();
            break;
        case 3:
        case 4:
            for (const slot_t s : x.in({place::waiting})) x.start(s);
            break;
        case 5:
            if (const auto list = x.in({place::waiting}); !list.empty()) x.start(any(list));
            break;
        case 6:
        case 7:
        case 8: { // the youngest few are scored
            auto list = x.in({place::rollout, place::queued, place::scoring});
            std::sort(list.begin(), list.end(),
                      [&](slot_t a, slot_t b) { return x.m.out[a].admitted > x.m.out[b].admitted; });
            list.resize(std::min<std::size_t>(list.size(), 1 + (e >> 4) % 4));
            for (const slot_t s : list) x.roll_and_score(s);
            break;
        }
        case 9:
            if (const auto list = x.in({place::rollout}); !list.empty())
                (e & 0x1000 ? x.interrupt(any(list)) : x.roll(any(list)));
            break;
        case 10:
            if (const auto list = x.in({place::queued, place::scoring}); !list.empty()) {
                const slot_t s = any(list);
                if (x.m.out[s].where == place::queued)
                    x.call(s);
                else if (e & 0x1000)
                    x.call_fails(s);
                else
                    x.score(s);
            }
            break;
        case 11:
            if (const auto list = x.started(); !list.empty()) x.restart(any(list));
            break;
        case 12:
            if (const auto list = x.in(
                    {place::waiting, place::rollout, place::queued, place::scoring, place::ready, place::training});
                !list.empty()) {
                if (x.m.out[any(list)].where != place::training)
                    x.release(any(list));
                else if (x.m.gate) // a step fails as a whole
                    while (!x.batch.empty()) x.release(x.batch.back());
            }
            break;
        case 13:
            if (!x.batch.empty() && x.m.gate) x.put_back();
            break;
        case 14:
            if (x.batch.empty()) {
                x.pick(x.m.p.batch);
            } else if (x.m.gate) {
                x.l.close_gate();
                x.m.gate = false;
            } else {
                x.advance();
            }
            break;
        default:
            if (x.batch.empty() && x.pick(x.m.p.batch))
                x.advance();
            else
                x.reload();
            break;
        }
        x.compare();
    }
}

settings drawn_settings(staleness_policy policy) {
    const index_t batch = *rc::gen::inRange<index_t>(1, 5);
    async a{.tau = *rc::gen::inRange<index_t>(0, 4), .policy = policy, .negative_control = true};
    if (policy == staleness_policy::areal) {
        if (*rc::gen::arbitrary<bool>()) a.concurrency = *rc::gen::inRange<index_t>(1, 6);
    } else if (*rc::gen::arbitrary<bool>()) {
        const bool gives_up = policy == staleness_policy::drop || policy == staleness_policy::retry;
        a.outstanding = *rc::gen::inRange<index_t>(batch, (gives_up ? 3 : 1) * (a.tau + 1) * batch + 1);
    }
    return streaming(batch, a);
}

std::vector<std::uint16_t> drawn_events() {
    const auto n = *rc::gen::inRange<std::size_t>(0, 300);
    return *rc::gen::container<std::vector<std::uint16_t>>(n, rc::gen::arbitrary<std::uint16_t>());
}

constexpr staleness_policy kept[] = {
    staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf,  staleness_policy::drop,
    staleness_policy::retry,    staleness_policy::in_order,    staleness_policy::areal};

} // namespace

TEST_CASE("every policy follows its rule, keeps its bound and never deadlocks") {
    for (const staleness_policy policy : kept)
        property(name_of(policy),
                 [policy] {
                     const settings s = drawn_settings(policy);
                     const auto events = drawn_events();
                     pair_of x(s);
                     follow(x, events);
                     RC_ASSERT(x.drains());
                     RC_ASSERT(x.l.outstanding() == 0);
                 },
                 {.cases = 400});
}

TEST_CASE("naive_wait follows its rule and is caught deadlocking") {
    const auto result =
        opd::test::check_property("naive_wait drains",
                                  [] {
                                      const settings s = drawn_settings(staleness_policy::naive_wait);
                                      pair_of x(s);
                                      follow(x, drawn_events());
                                      if (!x.drains())
                                          throw std::runtime_error("deadlock"); // anything else would be an assertion
                                  },
                                  {.cases = 2000});
    CHECK_FALSE(result.holds);
    CHECK(result.message.find("deadlock") != std::string::npos);
    CHECK(result.message.find("RC_ASSERT") == std::string::npos);
}

TEST_CASE("the shortest deadlock of naive_wait: four share a deadline that two can meet") {
    const auto run = [](staleness_policy policy) {
        pair_of x(streaming(2, {.tau = 2, .policy = policy, .negative_control = true}));
        x.fill();
        x.score_all();
        REQUIRE(x.pick(2));
        x.advance();
        for (const slot_t s : x.in({place::ready})) x.restart(s); // four, slow from now on
        for (const slot_t s : x.in({place::waiting})) x.start(s);
        const auto slow = x.in({place::rollout});
        for (int step = 0; step < 2; ++step) { // two overtake them at each of two steps, if they may
            x.fill();
            for (const slot_t s : x.in({place::waiting})) {
                x.start(s);
                x.roll_and_score(s);
            }
            if (!x.pick(2)) break;
            x.advance();
        }
        x.fill();
        x.score_all();
        return x.pick(2);
    };
    CHECK_FALSE(run(staleness_policy::naive_wait));
    CHECK(run(staleness_policy::edf));
    CHECK(run(staleness_policy::cohort_fifo));
    CHECK(run(staleness_policy::capacity));
}

TEST_CASE("capacity lets one sequence be overtaken without end, the others do not") {
    const auto worst = [](staleness_policy policy) {
        pair_of x(streaming(2, {.tau = 1, .policy = policy}));
        x.fill();
        x.score_all();
        const slot_t slow = 0;
        x.restart(slow);
        x.start(slow);
        for (int step = 0; step < 50; ++step) {
            x.fill();
            for (const slot_t s : x.in({place::waiting})) {
                x.start(s);
                x.roll_and_score(s);
            }
            if (!x.pick(2)) break;
            x.advance();
        }
        return x.m.version - x.m.out[slow].version; // its lag if it were consumed now
    };
    CHECK(worst(staleness_policy::capacity) == 50);
    CHECK(worst(staleness_policy::edf) == 1);
    CHECK(worst(staleness_policy::cohort_fifo) <= 1);
    CHECK(worst(staleness_policy::in_order) <= 1);
}

TEST_CASE("edf says how much slack its last batch had") {
    pair_of x(streaming(2, {.tau = 2, .policy = staleness_policy::edf}));
    x.fill(); // 6 of version 0
    x.score_all();
    REQUIRE(x.pick(2)); // 4 others are due within two steps of 2
    CHECK(x.l.slack() == 0);
    x.advance();
    REQUIRE(x.pick(2));
    CHECK(x.l.slack() == 0);
    x.advance();
    REQUIRE(x.pick(2)); // none is left
    CHECK(x.l.slack() == 0);
    pair_of y(streaming(2, {.tau = 2, .outstanding = 4, .policy = staleness_policy::edf}));
    y.fill();
    y.score_all();
    REQUIRE(y.pick(2)); // two steps of 2 for 2 others
    CHECK(y.l.slack() == 2);
    archive_writer to;
    to(y.l);
    ledger again(y.m.p);
    archive_reader{to.bytes}(again);
    CHECK(again.slack() == 2);
    CHECK(ledger(plan_of(streaming(2, {}))).slack() == -1);
}

TEST_CASE("an archive that is cut or damaged is refused") {
    pair_of x(streaming(2, {.tau = 1, .policy = staleness_policy::cohort_fifo}));
    x.fill();
    x.score_all();
    archive_writer to;
    to(x.l);
    for (std::size_t n = 0; n < to.bytes.size(); n += 3) {
        ledger other(x.m.p);
        archive_reader from(std::string_view(to.bytes).substr(0, n));
        CHECK_THROWS_AS(from(other), opd::invalid_input);
    }
}

TEST_CASE("a byte that is no flag and a number that is no enumerator are refused") {
    const auto refused = [](auto value, int byte) {
        archive_writer to;
        to(value);
        to.bytes[0] = static_cast<char>(byte);
        archive_reader from(to.bytes);
        CHECK_THROWS_AS(from(value), opd::invalid_input);
    };
    const auto taken = [](auto value, int byte) {
        auto read = decltype(value){};
        const std::string bytes(sizeof value, static_cast<char>(byte));
        archive_reader from(bytes);
        from(read);
        CHECK(read == value);
    };
    taken(false, 0), taken(true, 1), taken(stage::learner, 2), taken(weight_update::finish_first, 2);
    refused(true, 2), refused(false, 255);
    refused(stage::rollout, 3), refused(stage::rollout, 255);
    refused(staleness_policy::capacity, static_cast<int>(last_of(staleness_policy{})) + 1);
}

TEST_CASE("a slot queue behaves as a list") {
    property("slot_fifo", [](const std::vector<std::uint8_t>& events) {
        slot_fifo q;
        std::vector<slot_t> list;
        slot_t next = 0;
        for (const std::uint8_t e : events) {
            if (e % 4 == 0) {
                q.push_front(next);
                list.insert(list.begin(), next++);
            } else if (e % 4 == 1 && !list.empty()) {
                RC_ASSERT(q.front() == list.front());
                RC_ASSERT(q.pop() == list.front());
                list.erase(list.begin());
            } else if (e % 8 == 2 && !list.empty()) {
                const slot_t s = list[e % list.size()];
                q.erase(s);
                std::erase(list, s);
            } else {
                q.push(next);
                list.push_back(next++);
            }
            RC_ASSERT(q.empty() == list.empty());
            RC_ASSERT(std::vector<slot_t>(q.begin(), q.end()) == list);
        }
    });
}

TEST_CASE("capacity: a window of steps may be older on average than the run, by what was there before it") {
    // one sequence is passed by ten others; the step that takes it has a mean lag of 10, with M/B - 1 = 1
    ledger l(plan_of({.batch = 1, .schedule = async{.tau = 1}}));
    const slot_t slow = l.admit();
    l.started(slow);
    index_t lags = 0, steps = 0;
    std::vector<slot_t> batch;
    const auto consume = [&](slot_t s) {
        l.queued(s);
        l.scoring(s);
        l.ready(s);
        batch.clear();
        REQUIRE(l.pick(1, batch));
        REQUIRE(batch.front() == s);
        const version_t lag = l.version() - l.version_of(s);
        lags += lag, ++steps;
        l.close_gate();
        l.advance(batch);
        CHECK(lags <= steps); // over the first J steps the mean is at most M/B - 1 = 1
        return lag;
    };
    for (int i = 0; i < 10; ++i) {
        const slot_t quick = l.admit();
        l.started(quick);
        CHECK(consume(quick) == 0);
    }
    CHECK(consume(slow) == 10);
}
