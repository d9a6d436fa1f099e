// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Commands, replies and snapshots of a run are after a journey as bytes what they were; bytes that end too early or
// contradict themselves are refused.
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/commands.hpp"
#include "opd/sched/conveyor.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;
using opd::test::property;

struct drawn {
    std::vector<int> tokens;
    bool operator==(const drawn&) const = default;
    template <class A>
    void fields(A& a) {
        a(tokens);
    }
};
using command = worker_command<drawn, std::string>;
using reply = worker_reply<drawn, std::string>;
using snapshot = run_snapshot<drawn, std::string>;
using view = sequence_view<drawn, std::string>;

// --- anything

template <class Int>
Int any() {
    return *rc::gen::arbitrary<Int>();
}
template <class T>
std::vector<T> some(T (*make)()) {
    std::vector<T> r(static_cast<std::size_t>(*rc::gen::inRange(0, 4)));
    for (T& x : r) x = make();
    return r;
}
ticket any_ticket() {
    return {any<sample_t>(),     any<std::uint32_t>(), any<std::uint32_t>(),
            any<std::int32_t>(), any<incarnation_t>(), any<std::int32_t>()};
}
weights any_weights() { return {any<version_t>(), any<std::uint64_t>()}; }
token_versions any_versions() { return {any<version_t>(), any<version_t>(), any<int>() / 8.0, any<std::int64_t>()}; }
std::shared_ptr<const drawn> any_drawn() {
    return any<bool>() ? std::make_shared<const drawn>(drawn{*rc::gen::arbitrary<std::vector<int>>()}) : nullptr;
}
std::shared_ptr<const std::string> any_score() {
    return any<bool>() ? std::make_shared<const std::string>(*rc::gen::arbitrary<std::string>()) : nullptr;
}
view any_view() { return {any_ticket(), any<version_t>(), any_versions(), any_drawn(), any_score()}; }
partial_rollout<drawn> any_partial() { return {any_ticket(), any_drawn()}; }
template <class Enum>
Enum any_of(Enum last) {
    return static_cast<Enum>(*rc::gen::inRange(0, static_cast<int>(last) + 1));
}
command any_command() {
    command c;
    do c.what = any_of(last_of(command::kind{}));
    while (c.what == command::kind::hook);
    c.life = any<incarnation_t>(), c.slots = any<std::int32_t>(), c.ticket = any_ticket(), c.prefix = any_drawn();
    c.weights = any_weights(), c.exports = any<bool>(), c.job = any<std::uint64_t>();
    c.tickets = some(any_ticket);
    for (std::size_t i = 0; i < c.tickets.size(); ++i) c.sequences.push_back(any_drawn());
    c.call = {any<std::uint64_t>(), any_weights()}, c.batch = some(any_view);
    return c;
}
reply any_reply() {
    reply r;
    r.what.what = any_of(last_of(event::kind{})), r.what.stage = any_of(stage::learner);
    r.what.worker = any<std::int32_t>(), r.what.incarnation = any<incarnation_t>(), r.what.slots = any<std::int32_t>();
    r.what.ticket = any_ticket(), r.what.versions = any_versions(), r.what.job = any<std::uint64_t>();
    r.what.count = any<int>(), r.what.elasticity = any<int>() / 8.0;
    r.sequence = any_drawn(), r.prefixes = some(any_partial), r.tickets = some(any_ticket);
    for (std::size_t i = 0; i < r.tickets.size(); ++i) r.scores.push_back(any_score());
    if (any<bool>()) r.failed = std::make_exception_ptr(std::runtime_error("it threw " + std::to_string(any<int>())));
    r.of_hook = any<bool>(), r.spared = any<bool>();
    r.drawn = some(+[] { return std::pair(any_ticket(), any<std::int64_t>()); });
    return r;
}
snapshot any_snapshot() {
    snapshot s;
    s.weights = any_weights(), s.scheduler = *rc::gen::arbitrary<std::string>();
    const auto shared = any_drawn();
    for (int n = *rc::gen::inRange(0, 5); n > 0; --n)
        s.sequences.push_back({any_ticket(), any_of(last_of(place{})), any<version_t>(),
                               any<bool>() ? shared : any_drawn(), any_score()});
    return s;
}

// --- what must be equal

template <class T>
bool same(const std::shared_ptr<const T>& a, const std::shared_ptr<const T>& b) {
    return a && b ? *a == *b : !a && !b;
}
bool same(const snapshot::entry& a, const snapshot::entry& b);
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
        if (!same(a[i], b[i])) return false;
    return true;
}
bool same(const view& a, const view& b) {
    return std::tie(a.ticket, a.start, a.versions) == std::tie(b.ticket, b.start, b.versions) &&
           same(a.rolled, b.rolled) && same(a.scored, b.scored);
}
bool same(const partial_rollout<drawn>& a, const partial_rollout<drawn>& b) {
    return a.ticket == b.ticket && same(a.sequence, b.sequence);
}
bool same(const snapshot::entry& a, const snapshot::entry& b) {
    return std::tie(a.ticket, a.where, a.start) == std::tie(b.ticket, b.where, b.start) &&
           same(a.sequence, b.sequence) && same(a.scored, b.scored);
}
bool same(const command& a, const command& b) {
    return std::tie(a.what, a.life, a.slots, a.ticket, a.weights, a.exports, a.job, a.call.job, a.call.from) ==
               std::tie(b.what, b.life, b.slots, b.ticket, b.weights, b.exports, b.job, b.call.job, b.call.from) &&
           same(a.prefix, b.prefix) && a.tickets == b.tickets && same(a.sequences, b.sequences) &&
           same(a.batch, b.batch);
}
std::string text_of(const std::exception_ptr& p) {
    try {
        if (p) std::rethrow_exception(p);
    } catch (const std::exception& e) {
        return e.what();
    }
    return {};
}
bool same(const reply& a, const reply& b) {
    const event &x = a.what, &y = b.what;
    return std::tie(x.what, x.stage, x.worker, x.incarnation, x.slots, x.ticket, x.versions, x.job, x.count,
                    x.elasticity) == std::tie(y.what, y.stage, y.worker, y.incarnation, y.slots, y.ticket, y.versions,
                                              y.job, y.count, y.elasticity) &&
           same(a.sequence, b.sequence) && same(a.prefixes, b.prefixes) && a.tickets == b.tickets &&
           same(a.scores, b.scores) && text_of(a.failed) == text_of(b.failed) && a.of_hook == b.of_hook &&
           a.spared == b.spared && a.drawn == b.drawn;
}
bool same(const snapshot& a, const snapshot& b) {
    return a.weights == b.weights && a.scheduler == b.scheduler && same(a.sequences, b.sequences);
}

template <class T>
std::string bytes_of(const T& x) {
    archive_writer out;
    out(x);
    return out.bytes;
}
template <class T>
bool refused(const std::string& bytes) {
    T x;
    try {
        archive_reader in(bytes);
        in(x);
    } catch (const opd::invalid_input&) {
        return true;
    }
    return false;
}
template <class T>
void travels(const T& x) {
    const std::string bytes = bytes_of(x);
    T y;
    archive_reader in(bytes);
    in(y);
    RC_ASSERT(in.done());
    RC_ASSERT(same(x, y));
    RC_ASSERT(
        refused<T>(bytes.substr(0, static_cast<std::size_t>(*rc::gen::inRange(0, static_cast<int>(bytes.size()))))));
}

} // namespace

TEST_CASE("messages") {
    property("a command is after its journey what it was", [] { travels(any_command()); });
    property("a reply is after its journey what it was", [] { travels(any_reply()); });
    property("a snapshot of a run is after its journey what it was", [] { travels(any_snapshot()); });
}

TEST_CASE("who shared a payload in a snapshot shares it again, and it is there once") {
    const auto shared = std::make_shared<const drawn>(drawn{std::vector<int>(1000, 7)});
    snapshot s;
    s.sequences.resize(3);
    for (auto& e : s.sequences) e.sequence = shared;
    const std::string bytes = bytes_of(s);
    CHECK(bytes.size() < 2 * 1000 * sizeof(int));
    snapshot t;
    archive_reader in(bytes);
    in(t);
    REQUIRE(t.sequences.size() == 3);
    CHECK(*t.sequences[0].sequence == *shared);
    CHECK(t.sequences[0].sequence == t.sequences[2].sequence);
}

TEST_CASE("messages that contradict themselves are refused") {
    command hook{.what = command::kind::hook};
    CHECK_THROWS_AS(bytes_of(hook), opd::invalid_input);
    command score{.what = command::kind::score, .tickets = {{}}};
    CHECK_THROWS_AS(bytes_of(score), opd::invalid_input);
    reply scored;
    scored.tickets.resize(2);
    CHECK_THROWS_AS(bytes_of(scored), opd::invalid_input);
    std::string halt = bytes_of(command{});
    halt[0] = static_cast<char>(command::kind::hook);
    CHECK(refused<command>(halt));
    halt[0] = 100; // no kind
    CHECK(refused<command>(halt));
}
