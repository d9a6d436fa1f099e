// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize tsan
//
// The schedulers of the C interface beside those of C++: random worlds with faults drive both, and every action,
// deadline, counter, figure and snapshot is compared; so are the queue's answers and the virtual cluster's figures. And
// what is refused, by which sentence.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../examples/describe_json.hpp"
#include "opd/c/sched.h"
#include "opd/sched/recorder.hpp"
#include "opd/sched/staleness_queue.hpp"
#include "support/world.hpp"

namespace {

using namespace opd::sched;
using namespace opd::test;
using opd::index_t;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// ---- from C++ to C: what the library does the other way round

template <class Number>
Number zero_said(Number value) {
    return value == Number(0) ? Number(OPD_ZERO) : value;
}

opd_scheduler_settings to_c(const opd::sched::settings& s) {
    opd_scheduler_settings r = {};
    r.struct_size = sizeof r;
    r.batch = s.batch, r.group = s.group, r.sequences = s.sequences, r.available = s.available;
    r.first_version = s.first_version, r.first_sample = s.first_sample;
    r.teacher_batch = s.teacher_batch, r.teacher_flush = zero_said(s.teacher_flush);
    r.rollout_attempts = s.rollout_attempts, r.teacher_attempts = s.teacher_attempts;
    r.payload_attempts = s.payload_attempts;
    r.learner_attempts = s.learner_attempts, r.fruitless_steps = zero_said(s.fruitless_steps);
    r.rollout_deadline = s.rollout_deadline, r.abort_deadline = s.abort_deadline;
    r.teacher_deadline = s.teacher_deadline, r.learner_deadline = s.learner_deadline, r.sync_deadline = s.sync_deadline;
    r.most_workers = s.most_workers, r.most_slots = s.most_slots;
    if (std::holds_alternative<opd::sched::sync>(s.schedule)) r.schedule = "sync";
    if (const auto* o = std::get_if<step_off>(&s.schedule)) r.schedule = "step_off", r.k = zero_said(o->k);
    if (const auto* o = std::get_if<controlled>(&s.schedule)) r.schedule = "controlled", r.k = zero_said(o->k);
    if (const auto* o = std::get_if<async>(&s.schedule)) {
        r.schedule = "async", r.tau = zero_said(o->tau), r.outstanding = o->outstanding;
        r.policy = name_of(o->policy), r.update = name_of(o->update);
        r.concurrency = o->concurrency, r.negative_control = o->negative_control;
    }
    return r;
}
opd_ticket to_c(const ticket& t) { return {t.sample, t.slot, t.attempt, t.worker, t.incarnation, t.lane}; }
ticket from_c(const opd_ticket& t) { return {t.sample, t.slot, t.attempt, t.worker, t.incarnation, t.lane}; }
opd_token_versions to_c(const token_versions& v) { return {v.oldest, v.newest, v.mean, v.tokens}; }
token_versions from_c(const opd_token_versions& v) { return {v.oldest, v.newest, v.mean, v.tokens}; }
struct c_event {
    opd_event e = {};
    std::vector<opd_ticket> tickets;
    explicit c_event(const event& of) {
        e.struct_size = sizeof e;
        e.kind = static_cast<int>(of.what), e.stage = static_cast<int>(of.stage), e.worker = of.worker;
        e.incarnation = of.incarnation, e.slots = of.slots, e.ticket = to_c(of.ticket);
        e.versions = to_c(of.versions), e.job = of.job, e.count = of.count;
        if (of.elasticity != untold) e.has_elasticity = 1, e.elasticity = of.elasticity;
        for (const ticket& t : of.tickets) tickets.push_back(to_c(t));
        e.tickets = tickets.data(), e.ticket_count = tickets.size();
    }
};
opd_event c_event_of(const event& of) { return c_event(of).e; } // without tickets

template <class T>
std::string bytes_of(const T& x) {
    archive_writer w;
    w(x);
    return w.bytes;
}
opd_action sized() {
    opd_action a = {};
    a.struct_size = sizeof a;
    return a;
}
template <class Struct>
Struct zeroed() {
    Struct s = {};
    s.struct_size = sizeof s;
    return s;
}

void require(bool holds, const std::string& what) {
    if (!holds) throw violation(what + " (" + opd_last_error() + ")");
}

/// An action with the lists that it names, which are the scheduler's only until the next call.
struct kept_action {
    opd_action a;
    std::vector<opd_ticket> tickets;
    std::vector<opd_consumed> consumed;
    explicit kept_action(const opd_action& from) : a(from) {
        if (a.tickets != nullptr) tickets.assign(a.tickets, a.tickets + a.count);
        if (a.consumed != nullptr) consumed.assign(a.consumed, a.consumed + a.count);
    }
};
/// All that are there, in pieces of at most `capacity`.
void take_rest(opd_scheduler* s, std::size_t capacity, std::vector<kept_action>& out) {
    std::vector<opd_action> some(capacity, sized());
    for (std::size_t n = 1; n > 0;) {
        require(opd_scheduler_actions(s, some.data(), capacity, &n) == OPD_OK, "actions are there");
        for (std::size_t i = 0; i < n; ++i) out.emplace_back(some[i]);
    }
}
/// Compares with what C++ made, from the given items on: by the archive's bytes, which fields() lists.
void same_actions(const actions& made, std::size_t first, const std::vector<kept_action>& got) {
    require(made.items.size() - first == got.size(), "as many actions");
    for (std::size_t i = 0; i < got.size(); ++i) {
        const action& a = made.items[first + i];
        const opd_action& c = got[i].a;
        action back;
        back.what = static_cast<action::kind>(c.kind), back.stage = static_cast<stage>(c.stage);
        back.why = static_cast<failure>(c.why), back.where = static_cast<place>(c.where);
        back.worker = c.worker, back.incarnation = c.incarnation, back.ticket = from_c(c.ticket);
        back.version = c.version, back.job = c.job, back.from = c.from;
        back.first = a.first, back.count = static_cast<std::uint32_t>(c.count);
        require(c.struct_size == sizeof c && bytes_of(back) == bytes_of(a), "the same action");
        const bool tickets = a.what == action::kind::score || a.what == action::kind::train;
        require(got[i].tickets.size() == (tickets ? a.count : 0), "as many tickets");
        for (std::size_t t = 0; t < got[i].tickets.size(); ++t)
            require(from_c(got[i].tickets[t]) == made.of(a)[t], "the same ticket");
        require(got[i].consumed.size() == (a.what == action::kind::step ? a.count : 0), "as many consumed");
        for (std::size_t t = 0; t < got[i].consumed.size(); ++t) {
            const opd_consumed& x = got[i].consumed[t];
            const consumed_sequence& y = made.consumed_by(a)[t];
            require(from_c(x.ticket) == y.ticket && x.start == y.start && from_c(x.versions) == y.versions,
                    "the same consumed sequence");
        }
    }
}

std::shared_ptr<opd_scheduler> shared(opd_scheduler* s) { return {s, opd_scheduler_destroy}; }

std::string snapshot_of(opd_scheduler* s) {
    std::size_t size = 0;
    require(opd_scheduler_snapshot(s, nullptr, 0, &size) == OPD_OK, "a size");
    std::string bytes(size, '\0');
    require(opd_scheduler_snapshot(s, bytes.data(), size, &size) == OPD_OK && size == bytes.size(), "a snapshot");
    return bytes;
}

/// The C++ scheduler, and the C one beside it: whoever drives it drives both, and they must answer alike.
class both : public scheduler {
public:
    explicit both(const opd::sched::settings& s) : scheduler(s), settings_(s) {
        opd_scheduler_settings c = to_c(s);
        c.measure = 1;
        opd_scheduler* made = nullptr;
        require(opd_scheduler_create(&c, &made) == OPD_OK, "it is made");
        c_ = shared(made);
    }
    opd_scheduler* c() const { return c_.get(); }
    std::uint64_t restored() const { return restored_; }

    void on(const event& e, double now, actions& out) {
        const std::size_t first = out.items.size();
        std::optional<std::string> refused;
        try {
            scheduler::on(e, now, out);
        } catch (const opd::invalid_input& x) {
            refused = x.what();
        }
        const c_event c(e);
        ++events_;
        const std::size_t capacity = std::array<std::size_t, 4>{64, 0, 1, 2}[events_ % 4];
        std::vector<opd_action> some(capacity, sized());
        std::size_t n = 99, taken = 99;
        const int result = events_ % 3 == 0
                               ? opd_scheduler_on_many(c_.get(), &c.e, 1, now, some.data(), capacity, &n, &taken)
                               : opd_scheduler_on(c_.get(), &c.e, now, some.data(), capacity, &n);
        if (refused) {
            require(result == OPD_INVALID_INPUT && n == 99, "the same refusal");
            if (events_ % 3 != 0 && e.what != event::kind::resize)
                require(opd_last_error() == *refused, "the same sentence: " + *refused);
            throw opd::invalid_input("event", *refused);
        }
        require(result == OPD_OK, "it is taken");
        std::vector<kept_action> got;
        for (std::size_t i = 0; i < n; ++i) got.emplace_back(some[i]);
        take_rest(c_.get(), 3, got);
        same_actions(out, first, got);
        compare();
        if (events_ % 37 == 0) { // the C scheduler goes on from bytes
            opd_scheduler_settings s = to_c(settings_);
            const std::string bytes = snapshot_of(c_.get());
            opd_scheduler* again = nullptr;
            require(opd_scheduler_restore(&s, bytes.data(), bytes.size(), &again) == OPD_OK, "it is restored");
            c_ = shared(again);
            ++restored_;
            compare();
        }
    }
    void abandon_workers(bool keep_prefixes = false, bool reopen = false) {
        scheduler::abandon_workers(keep_prefixes, reopen);
        require(opd_scheduler_abandon_workers(c_.get(), keep_prefixes, reopen) == OPD_OK, "workers are abandoned");
        compare();
    }

private:
    void compare() const {
        opd_scheduler* const c = c_.get();
        double deadline = -1;
        require(opd_scheduler_next_deadline(c, &deadline) == OPD_OK && deadline == next_deadline(),
                "the same deadline");
        require(snapshot_of(c) == snapshot(), "the same snapshot");
        require(opd_scheduler_check(c) == OPD_OK, "invariants");
        auto n = zeroed<opd_scheduler_counters>();
        require(opd_scheduler_totals(c, &n) == OPD_OK, "totals");
        counters back = {n.admitted,      n.consumed,     n.consumed_tokens, n.failed,  {},
                         n.retries,       n.preempted,    n.restarts,        n.parked,  n.late,
                         n.duplicates,    n.lost_workers, n.lost_weights,    n.updates, n.short_batches,
                         n.empty_batches, n.lost_payloads};
        std::copy(std::begin(n.failed_by), std::end(n.failed_by), back.failed_by.begin());
        require(bytes_of(back) == bytes_of(totals()), "the same counters");
        auto s = zeroed<opd_scheduler_state>();
        require(opd_scheduler_look(c, &s) == OPD_OK, "a state");
        const census w = {s.waiting, s.rollout, s.queued, s.scoring, s.ready, s.training};
        require(w == where() && s.version == version() && s.weights_job == weights().job &&
                    s.needed_from == needed_from() && s.cursor == cursor() && s.permits == resolved().permits &&
                    s.slack == slack() && s.pending == 0 && s.gate_open == gate_open() && s.finished == finished() &&
                    s.held_back == held_back() && s.failed_stage == (failed() ? static_cast<int>(*failed()) : -1),
                "the same state");
        std::size_t count = 0;
        require(opd_scheduler_outstanding(c, nullptr, 0, &count) == OPD_OK, "a count");
        std::vector<opd_outstanding> all(count + 1);
        require(opd_scheduler_outstanding(c, all.data(), all.size(), &count) == OPD_OK, "what is outstanding");
        std::size_t i = 0;
        for_each([&](const outstanding_sequence& q) {
            require(i < count && from_c(all[i].ticket) == q.ticket && all[i].start == q.start &&
                        all[i].where == static_cast<int>(q.where) && from_c(all[i].versions) == versions_of(q.ticket),
                    "the same outstanding sequence");
            ++i;
        });
        require(i == count, "as many outstanding");
        for (const stage who : {stage::rollout, stage::teacher, stage::learner})
            for (std::int32_t number = -1; number < 4; ++number) {
                std::uint32_t life = 99;
                std::int32_t up = 99;
                require(opd_scheduler_worker(c, static_cast<int>(who), number, &life, &up) == OPD_OK &&
                            life == incarnation_of(who, number) && up == is_up(who, number),
                        "the same worker");
            }
    }
    opd::sched::settings settings_;
    std::shared_ptr<opd_scheduler> c_;
    std::uint64_t events_ = 0, restored_ = 0;
};

/// Returns how many sequences were consumed or given up.
std::int64_t run_both(std::uint64_t seed, const world_options& options, std::uint64_t* restored = nullptr) {
    const world w = world_of(seed, options);
    auto d = driver_of<no_observer, both>(w, nullptr);
    for (std::uint64_t i = 0; i < 3000 && !d.finished(); ++i) {
        if (i % 200 == 150 && seed % 5 == 0) d.crash(0.5);
        if (!d.step()) break;
    }
    if (restored) *restored += d.scheduler().restored();
    return d.scheduler().totals().consumed + d.scheduler().totals().failed;
}

} // namespace

TEST_CASE("in random worlds the C scheduler answers as the C++ one does, for every policy") {
    std::uint64_t restored = 0;
    for (int p = 0; p <= static_cast<int>(last_of(staleness_policy{})); ++p)
        for (const weight_update u : {weight_update::keep, weight_update::abort, weight_update::finish_first}) {
            async a;
            a.policy = static_cast<staleness_policy>(p), a.update = u;
            a.negative_control = traits_of(a.policy).deadlock != nullptr;
            std::int64_t done = 0;
            for (std::uint64_t seed = 1; seed <= 12 / worlds_share; ++seed) {
                CAPTURE(name_of(a.policy));
                CAPTURE(seed);
                CHECK(outcome([&] { done += run_both(seed, {.schedule = a}, &restored); }) == "");
            }
            CHECK(done > 20);
        }
    CHECK(restored > 20);
}

TEST_CASE("likewise under whole batches, and whatever the world draws") {
    std::int64_t done = 0;
    for (std::uint64_t seed = 100; seed < 100 + 60 / worlds_share; ++seed) {
        CAPTURE(seed);
        CHECK(outcome([&] { done += run_both(seed, {.schedule = opd::sched::sync{}}); }) == "");
        CHECK(outcome([&] { done += run_both(seed, {.schedule = step_off{}}); }) == "");
        CHECK(outcome([&] { done += run_both(seed, {.schedule = controlled{}}); }) == "");
        CHECK(outcome([&] { done += run_both(seed, {}); }) == "");
    }
    CHECK(done > 500 / static_cast<std::int64_t>(worlds_share));
}

TEST_CASE("a mutation of the comparison is noticed") {
    world w = world_of(3, {.schedule = async{}});
    w.settings.teacher_batch = 1;
    both b(w.settings);
    actions out;
    const event up = event::up(stage::rollout, 0, 2).of_life(1);
    b.on(up, 0, out);
    std::vector<kept_action> got;
    REQUIRE(!out.items.empty()); // it is told to install the first weights
    opd_action a = sized();
    a.kind = static_cast<int>(out.items[0].what), a.worker = out.items[0].worker, a.incarnation = 1;
    a.ticket = to_c(ticket{}), a.version = out.items[0].version, a.job = out.items[0].job;
    a.why = OPD_FAILED_STOPPED;
    got.emplace_back(a);
    out.items.resize(1);
    CHECK_NOTHROW(same_actions(out, 0, got));
    got[0].a.incarnation = 2;
    CHECK_THROWS_AS(same_actions(out, 0, got), violation);
}

namespace {

/// Metrics on both sides, told the same.
struct measured {
    run_metrics metrics{recorded()};
    recorder record{metrics};
    opd_scheduler* c = nullptr;
    bool begun = false;
    double latest = 0;

    void tell(int change, stage s, std::int32_t w, double t) {
        latest = std::max(latest, t);
        require(opd_scheduler_observe(c, change, static_cast<int>(s), w, t) == OPD_OK, "it is told");
    }
    void up(stage s, std::int32_t w, double t) { record.up(s, w, t), tell(OPD_WORKER_UP, s, w, t); }
    void down(stage s, std::int32_t w, double t) { record.down(s, w, t), tell(OPD_WORKER_DOWN, s, w, t); }
    void begin(stage s, std::int32_t w, double t, activity a) {
        record.begin(s, w, t, a), tell(a == activity::spare ? OPD_SPARE_BEGINS : OPD_WORK_BEGINS, s, w, t);
    }
    void end(stage s, std::int32_t w, double t, activity a) {
        record.end(s, w, t, a), tell(a == activity::spare ? OPD_SPARE_ENDS : OPD_WORK_ENDS, s, w, t);
    }
    void event(double t, const opd::sched::event& e, const actions& out, const scheduler& s) {
        if (!std::exchange(begun, true)) metrics.start(t);
        latest = std::max(latest, t);
        record.event(t, e, out, s);
    }
};

/// The C++ scheduler's stand-in without the comparison's restores, which begin metrics anew.
class beside : public scheduler {
public:
    explicit beside(const opd::sched::settings& s) : scheduler(s) {
        opd_scheduler_settings c = to_c(s);
        c.measure = 1;
        opd_scheduler* made = nullptr;
        require(opd_scheduler_create(&c, &made) == OPD_OK, "it is made");
        c_ = shared(made);
    }
    opd_scheduler* c() const { return c_.get(); }
    void on(const event& e, double now, actions& out) {
        scheduler::on(e, now, out);
        const c_event c(e);
        std::size_t n = 0;
        require(opd_scheduler_on(c_.get(), &c.e, now, nullptr, 0, &n) == OPD_OK, "it is taken");
        std::vector<kept_action> got;
        take_rest(c_.get(), 16, got);
    }

private:
    std::shared_ptr<opd_scheduler> c_;
};

std::string metrics_of(opd_scheduler* s, double now) {
    std::size_t length = 0;
    require(opd_scheduler_metrics(s, now, nullptr, 0, &length) == OPD_OK, "a length");
    std::string text(length + 1, 'x');
    require(opd_scheduler_metrics(s, now, text.data(), text.size(), &length) == OPD_OK, "metrics");
    require(text[length] == '\0', "a final 0");
    text.resize(length);
    return text;
}

} // namespace

TEST_CASE("metrics are those of a C++ recorder that was told the same") {
    int known = 0;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CAPTURE(seed);
        const world w = world_of(seed, {});
        measured m;
        auto d = driver_of<measured, beside>(w, &m);
        m.c = d.scheduler().c();
        d.run(2000);
        const double now = m.latest + 1;
        m.metrics.observe(now);
        const auto theirs = nlohmann::ordered_json::parse(metrics_of(m.c, now));
        const bool same = theirs.dump() == nlohmann::ordered_json::parse(examples::described(m.metrics).dump()).dump();
        CHECK(same); // without their kilobytes
        known += !theirs["throughput"].is_null();
        CHECK(theirs["busy_seconds"]["rollout"].get<double>() == m.metrics.stages.stage_time(stage::rollout));
    }
    CHECK(known > 3);

    opd_scheduler_settings s = to_c(world_of(1, {}).settings);
    s.measure = 1;
    opd_scheduler* fresh = nullptr;
    REQUIRE(opd_scheduler_create(&s, &fresh) == OPD_OK);
    CHECK(nlohmann::json::parse(metrics_of(fresh, 1e6))["time"] == 0);
    opd_scheduler_destroy(fresh);
}

// ---- one call

namespace {

opd_scheduler_settings small() {
    auto s = zeroed<opd_scheduler_settings>();
    s.batch = 2, s.teacher_batch = 1, s.policy = "edf", s.tau = 1, s.sequences = 8, s.outstanding = OPD_WIDEST;
    return s;
}
std::shared_ptr<opd_scheduler> make(const opd_scheduler_settings& s) {
    opd_scheduler* made = nullptr;
    REQUIRE(opd_scheduler_create(&s, &made) == OPD_OK);
    return shared(made);
}
/// The call was refused, by this argument and a sentence with these words.
void refused(int result, const std::string& argument, const std::string& words, opd_status status = OPD_INVALID_INPUT,
             std::int64_t row = -1) {
    CAPTURE(argument);
    CHECK(result == status);
    CHECK(opd_last_error_code() == status);
    CHECK(opd_last_error_argument() == argument);
    CHECK_MESSAGE(std::string(opd_last_error()).find(words) != std::string::npos, opd_last_error());
    CHECK(opd_last_error_row() == row);
}
const event rollout_up = event::up(stage::rollout, 0, 4).of_life(1);
const event teacher_up = event::up(stage::teacher, 0, 1).of_life(1);
const event learner_up = event::up(stage::learner, 0, 1).of_life(1);

/// Takes an event, returns all actions.
std::vector<kept_action> on(opd_scheduler* s, const event& e, double now) {
    const c_event c(e);
    std::size_t n = 0;
    REQUIRE_MESSAGE(opd_scheduler_on(s, &c.e, now, nullptr, 0, &n) == OPD_OK, opd_last_error());
    CHECK(n == 0);
    std::vector<kept_action> got;
    take_rest(s, 4, got);
    return got;
}

} // namespace

TEST_CASE("what does not fit stays, in order, and lists are good until the next call") {
    const auto one = make(small()), other = make(small());
    for (const event& e : {learner_up, teacher_up, rollout_up}) on(one.get(), e, 0), on(other.get(), e, 0);
    const c_event synced(event::synced(0, 0).of_life(1));
    std::vector<opd_action> all(64, sized());
    std::size_t n = 0;
    REQUIRE(opd_scheduler_on(one.get(), &synced.e, 1, all.data(), all.size(), &n) == OPD_OK);
    CHECK(n == 4); // four starts
    std::vector<kept_action> expected(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n));
    for (const kept_action& a : expected) CHECK(a.a.kind == OPD_ACTION_START);

    // one at a time; an event that follows adds behind
    std::vector<kept_action> got;
    opd_action a = sized();
    REQUIRE(opd_scheduler_on(other.get(), &synced.e, 1, &a, 1, &n) == OPD_OK);
    CHECK(n == 1);
    got.emplace_back(a);
    auto state = zeroed<opd_scheduler_state>();
    REQUIRE(opd_scheduler_look(other.get(), &state) == OPD_OK);
    CHECK(state.pending == 3);
    const ticket first = from_c(expected[0].a.ticket);
    const c_event rolled(event::rolled_out(first, {0, 0, 0, 5}));
    REQUIRE(opd_scheduler_on(one.get(), &rolled.e, 2, all.data(), all.size(), &n) == OPD_OK);
    for (std::size_t i = 0; i < n; ++i) expected.emplace_back(all[i]);
    REQUIRE(opd_scheduler_on(other.get(), &rolled.e, 2, &a, 1, &n) == OPD_OK);
    CHECK(n == 1);
    got.emplace_back(a);
    take_rest(other.get(), 1, got);
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(got[i].a.kind == expected[i].a.kind);
        CHECK(from_c(got[i].a.ticket) == from_c(expected[i].a.ticket));
        CHECK(got[i].tickets.size() == expected[i].tickets.size());
    }
    CHECK(got.back().a.kind == OPD_ACTION_SCORE);
    REQUIRE(got.back().tickets.size() == 1);
    CHECK(from_c(got.back().tickets[0]).sample == first.sample);
}

TEST_CASE("several events in one call are the events one by one") {
    const auto one = make(small()), many = make(small());
    std::vector<kept_action> expected, got;
    std::vector<opd_event> events;
    for (const event& e : {learner_up, teacher_up, rollout_up, event::synced(0, 0).of_life(1)}) {
        for (auto& a : on(one.get(), e, 3)) expected.push_back(std::move(a));
        events.push_back(c_event_of(e));
    }
    std::vector<opd_action> some(2, sized());
    std::size_t n = 0, taken = 0;
    REQUIRE(opd_scheduler_on_many(many.get(), events.data(), events.size(), 3, some.data(), 2, &n, &taken) == OPD_OK);
    CHECK(n == 2);
    CHECK(taken == 4);
    for (const opd_action& a : some) got.emplace_back(a);
    take_rest(many.get(), 64, got);
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i].a.kind == expected[i].a.kind);
    CHECK(snapshot_of(one.get()) == snapshot_of(many.get()));

    // what no event could be is found before any is taken
    const std::string before = snapshot_of(many.get());
    std::vector<opd_event> bad = {c_event_of(event::of(event::kind::close)), c_event_of(event::of(event::kind::tick))};
    bad[1].kind = 20;
    n = taken = 7;
    refused(opd_scheduler_on_many(many.get(), bad.data(), 2, 4, some.data(), 2, &n, &taken), "events.kind",
            "is 20; it has the values 0 to 19", OPD_INVALID_INPUT, 1);
    CHECK(n == 7);
    CHECK(taken == 0);
    CHECK(snapshot_of(many.get()) == before);
    // what this scheduler cannot take, when its turn comes
    bad[1] = c_event_of(event::up(stage::rollout, 1, 4).of_life(0));
    refused(opd_scheduler_on_many(many.get(), bad.data(), 2, 4, some.data(), 2, &n, &taken), "events",
            "workers count from 0", OPD_INVALID_INPUT, 1);
    CHECK(taken == 1);
    CHECK(n == 7);
    got.clear();
    take_rest(many.get(), 8, got);
    CHECK(opd_scheduler_on_many(many.get(), nullptr, 0, 4, nullptr, 0, &n, nullptr) == OPD_OK);
}

TEST_CASE("the tables are the library's") {
    const auto table = [](const char* name) {
        std::vector<std::string> names;
        for (int i = 0; opd_name(name, i) != nullptr; ++i) {
            names.emplace_back(opd_name(name, i));
            CHECK(std::string(opd_says(name, i)) != "");
        }
        return names;
    };
    CHECK(table("schedule") == std::vector<std::string>{"sync", "step_off", "controlled", "async"});
    std::vector<std::string> policies, updates;
    for (int p = 0; p <= static_cast<int>(last_of(staleness_policy{})); ++p)
        policies.emplace_back(name_of(static_cast<staleness_policy>(p)));
    for (int u = 0; u <= static_cast<int>(last_of(weight_update{})); ++u)
        updates.emplace_back(name_of(static_cast<weight_update>(u)));
    CHECK(table("staleness_policy") == policies);
    CHECK(table("weight_update") == updates);
    CHECK(table("law").size() == std::variant_size_v<decltype(distribution::law)>);
}

TEST_CASE("settings that cannot work are refused by the caller's names") {
    const auto says = [](auto change, const std::string& argument, const std::string& words,
                         opd_status status = OPD_INVALID_INPUT) {
        auto s = small();
        change(s);
        opd_scheduler* made = nullptr;
        refused(opd_scheduler_create(&s, &made), argument, words, status);
        CHECK(made == nullptr);
    };
    using settings = opd_scheduler_settings;
    says([](settings& s) { s.schedule = "asynch"; }, "settings.schedule",
         "\"asynch\"; it is one of sync, step_off, controlled, async");
    says([](settings& s) { s.policy = "lifo"; }, "settings.policy", "one of capacity, cohort_fifo, edf, drop, retry");
    says([](settings& s) { s.update = ""; }, "settings.update", "one of keep, abort, finish_first");
    says([](settings& s) { s.batch = -3; }, "settings.batch", "must be at least 1, not -3");
    says([](settings& s) { s.tau = -2; }, "settings.tau", "must be at least 0, not -2");
    says([](settings& s) { s.outstanding = 1; }, "settings.outstanding", "no batch would ever fill");
    says([](settings& s) { s.outstanding = 9; }, "settings.outstanding", "no order of consumption");
    says([](settings& s) { s.policy = "naive_wait"; }, "settings.policy", "negative control");
    says([](settings& s) { s.negative_control = 2; }, "settings.negative_control", "is 2; it is 0 or 1");
    says([](settings& s) { s.concurrency = 4; }, "settings.concurrency", "belongs to the policy areal");
    says([](settings& s) { s.teacher_flush = not_a_number; }, "settings.teacher_flush", "must be at least");
    says([](settings& s) { s.teacher_flush = -0.5; }, "settings.teacher_flush", "must be at least");
    says([](settings& s) { s.sync_deadline = infinity; }, "settings.sync_deadline", "at most 1e9 seconds");
    says([](settings& s) { s.k = 1; }, "settings.k", "belongs to the schedules step_off and controlled");
    says([](settings& s) { s.schedule = "sync"; }, "settings.tau", "belongs to the schedule async");
    says([](settings& s) { s.schedule = "sync", s.tau = s.outstanding = 0; }, "settings.policy", "belongs to");
    says([](settings& s) { s.warmup = 1; }, "settings.warmup", "measure = 1");
    says([](settings& s) { s.measure = 1, s.warmup = -1; }, "settings.warmup", "at least one is discarded");
    says([](settings& s) { s.measure = 1, s.lag_bound = -1; }, "settings.lag_bound", "is -1; it must lie in [1, 2^32]");
    says([](settings& s) { s.measure = 1, s.earlier_updates = -2; }, "settings.earlier_updates", "negative");
    says([](settings& s) { s.group = 3; }, "settings.sequences", "must be a multiple of group, 3");
    says([](settings& s) { s.struct_size = 4; }, "settings.struct_size", "is 4; set it to sizeof the struct");
    opd_scheduler* made = nullptr;
    refused(opd_scheduler_create(nullptr, &made), "settings", "is a null pointer");
    const auto s = small();
    refused(opd_scheduler_create(&s, nullptr), "out", "is a null pointer");

    // a later header's member
    struct {
        opd_scheduler_settings s;
        std::uint64_t later;
    } longer = {small(), 1};
    longer.s.struct_size = sizeof longer;
    refused(opd_scheduler_create(&longer.s, &made), "", "does not know", OPD_UNSUPPORTED);
    longer.later = 0;
    REQUIRE(opd_scheduler_create(&longer.s, &made) == OPD_OK);
    opd_scheduler_destroy(made);
}

TEST_CASE("events that nobody could mean are refused, and change nothing") {
    auto o = small();
    o.measure = 1;
    const auto s = make(o);
    for (const event& e : {learner_up, teacher_up, rollout_up, event::synced(0, 0).of_life(1)}) on(s.get(), e, 5);
    const std::string before = snapshot_of(s.get());
    std::vector<opd_action> some(4, sized());
    std::size_t n = 77;
    const auto hand = [&](opd_event e, double now) {
        e.struct_size = sizeof e;
        return opd_scheduler_on(s.get(), &e, now, some.data(), some.size(), &n);
    };
    const opd_event tick = c_event_of(event::of(event::kind::tick));
    const auto with = [](opd_event e, auto change) {
        change(e);
        return e;
    };
    refused(hand(tick, not_a_number), "now", "time is finite and never decreases");
    refused(hand(tick, infinity), "now", "time is finite and never decreases");
    refused(hand(tick, 4), "now", "is 4.000000 after 5.000000");
    refused(hand(with(tick, [](opd_event& e) { e.kind = -1; }), 6), "event.kind", "is -1; it has the values 0 to 19");
    refused(hand(with(tick, [](opd_event& e) { e.kind = 1000; }), 6), "event.kind", "is 1000");
    const opd_event up = c_event_of(rollout_up);
    refused(hand(with(up, [](opd_event& e) { e.stage = 3; }), 6), "event.stage", "is 3; it has the values 0 to 2");
    refused(hand(with(up, [](opd_event& e) { e.incarnation = 0; }), 6), "event", "in life 0");
    refused(hand(with(up, [](opd_event& e) { e.worker = -1; }), 6), "event", "workers count from 0");
    refused(hand(with(up, [](opd_event& e) { e.worker = 1 << 20; }), 6), "event", "most_workers");
    refused(hand(with(up,
                      [](opd_event& e) {
                          e.slots = -1;
                          e.worker = 1;
                      }),
                 6),
            "event", "-1 slots");
    const opd_event synced = c_event_of(event::synced(0, 0).of_life(1));
    refused(hand(with(synced, [](opd_event& e) { e.has_elasticity = 2; }), 6), "event.has_elasticity", "0 or 1");
    refused(hand(with(synced, [](opd_event& e) { e.has_elasticity = 1, e.elasticity = not_a_number; }), 6),
            "event.elasticity", "must lie in [-1, 1]");
    refused(hand(with(c_event_of(event::of(event::kind::resize)), [](opd_event& e) { e.count = 1000; }), 6),
            "event.count", "no order of consumption");
    const opd_event scored = c_event_of(event::scored(1, 0).of_life(1));
    refused(hand(with(scored, [](opd_event& e) { e.tickets = nullptr, e.ticket_count = 2; }), 6), "event.tickets",
            "is a null pointer");
    // versions from the future, of a sequence that runs
    std::vector<opd_outstanding> all(8);
    std::size_t count = 0;
    REQUIRE(opd_scheduler_outstanding(s.get(), all.data(), all.size(), &count) == OPD_OK);
    REQUIRE(count == 4);
    const ticket runs = from_c(all[0].ticket);
    refused(hand(c_event_of(event::rolled_out(runs, {0, 7, 3, 5})), 6), "event", "version");
    // sizes and pointers
    opd_event e = tick;
    e.struct_size = 0;
    refused(opd_scheduler_on(s.get(), &e, 6, some.data(), 4, &n), "event.struct_size", "is 0");
    refused(opd_scheduler_on(s.get(), nullptr, 6, some.data(), 4, &n), "event", "is a null pointer");
    refused(opd_scheduler_on(s.get(), &tick, 6, nullptr, 4, &n), "actions", "is a null pointer");
    refused(opd_scheduler_on(s.get(), &tick, 6, some.data(), 4, nullptr), "count", "is a null pointer");
    some[0].struct_size = 3;
    refused(opd_scheduler_on(s.get(), &tick, 6, some.data(), 4, &n), "actions[0].struct_size", "is 3");
    some[0] = sized();
    refused(opd_scheduler_outstanding(s.get(), all.data(), 3, &count), "capacity", "is 3 for 4 sequences");
    std::uint32_t life = 0;
    std::int32_t is_up = 0;
    refused(opd_scheduler_worker(s.get(), 3, 0, &life, &is_up), "stage", "is 3");
    refused(opd_scheduler_observe(s.get(), 6, OPD_ROLLOUT, 0, 6), "change", "is 6; it has the values 0 to 5");
    refused(opd_scheduler_observe(s.get(), OPD_WORK_BEGINS, OPD_ROLLOUT, 9, 6), "worker", "rollout worker 9 is not up");
    refused(opd_scheduler_observe(s.get(), OPD_WORKER_UP, OPD_ROLLOUT, 0, not_a_number), "now", "a time is finite");
    refused(opd_scheduler_observe(s.get(), OPD_SPARE_BEGINS, OPD_LEARNER, 0, 6), "stage", "is no rollout");
    std::size_t length = 0;
    refused(opd_scheduler_metrics(s.get(), not_a_number, nullptr, 0, &length), "now", "time is finite");
    char text[8] = "1234567";
    refused(opd_scheduler_metrics(s.get(), 6, text, sizeof text, &length), "capacity", "is 8 bytes for ");
    CHECK(std::string(text) == "1234567");
    const auto unmeasured = make(small());
    refused(opd_scheduler_metrics(unmeasured.get(), 6, nullptr, 0, &length), "settings.measure", "keeps no metrics");
    refused(opd_scheduler_observe(unmeasured.get(), 0, 0, 0, 6), "settings.measure", "keeps no metrics");
    CHECK(n == 77);
    CHECK(snapshot_of(s.get()) == before);

    // ids out of order are no mistake: replies to nobody are counted
    CHECK(on(s.get(), event::learned(9).of_life(1), 6).empty());
    CHECK(on(s.get(),
             event::rolled_out({.sample = 900, .slot = 3, .attempt = 1, .worker = 0, .incarnation = 1, .lane = 0},
                               {0, 0, 0, 5}),
             6)
              .empty());
    auto totals = zeroed<opd_scheduler_counters>();
    REQUIRE(opd_scheduler_totals(s.get(), &totals) == OPD_OK);
    CHECK(totals.late + totals.duplicates == 2);
}

TEST_CASE("handles that were freed or never made are refused") {
    const auto settings = small();
    opd_scheduler* s = nullptr;
    REQUIRE(opd_scheduler_create(&settings, &s) == OPD_OK);
    opd_scheduler_destroy(s);
    opd_scheduler_destroy(s);
    opd_scheduler_destroy(nullptr);
    const opd_event tick = c_event_of(event::of(event::kind::tick));
    std::size_t n = 0;
    double deadline = 0;
    for (opd_scheduler* h : {s, static_cast<opd_scheduler*>(nullptr), reinterpret_cast<opd_scheduler*>(&n)}) {
        const std::string words = h == nullptr ? "is a null pointer" : "is not a live handle";
        refused(opd_scheduler_on(h, &tick, 0, nullptr, 0, &n), "scheduler", words);
        refused(opd_scheduler_on_many(h, &tick, 1, 0, nullptr, 0, &n, nullptr), "scheduler", words);
        refused(opd_scheduler_actions(h, nullptr, 0, &n), "scheduler", words);
        refused(opd_scheduler_next_deadline(h, &deadline), "scheduler", words);
        refused(opd_scheduler_snapshot(h, nullptr, 0, &n), "scheduler", words);
        refused(opd_scheduler_check(h), "scheduler", words);
    }
    opd_queue_settings q = zeroed<opd_queue_settings>();
    opd_queue* queue = nullptr;
    REQUIRE(opd_queue_create(&q, &queue) == OPD_OK);
    refused(opd_scheduler_check(reinterpret_cast<opd_scheduler*>(queue)), "scheduler", "is not a live handle");
    opd_queue_destroy(queue);
    opd_queue_destroy(queue);
    opd_queue_destroy(nullptr);
    refused(opd_queue_close(queue), "queue", "is not a live handle");
    CHECK(opd_report_json(nullptr) == nullptr);
    opd_report_destroy(nullptr);
}

TEST_CASE("snapshots: sizes, damage, other settings, and actions that wait") {
    const auto settings = small();
    const auto s = make(settings);
    for (const event& e : {learner_up, teacher_up}) on(s.get(), e, 0);
    const opd_event up = c_event_of(rollout_up);
    std::size_t n = 0, size = 0;
    REQUIRE(opd_scheduler_on(s.get(), &up, 0, nullptr, 0, &n) == OPD_OK);
    refused(opd_scheduler_snapshot(s.get(), nullptr, 0, &size), "scheduler", "has 1 actions that no call has returned");
    refused(opd_scheduler_abandon_workers(s.get(), 0, 0), "scheduler", "has 1 actions");
    std::vector<kept_action> got;
    take_rest(s.get(), 4, got);
    const std::string bytes = snapshot_of(s.get());
    std::string room(bytes.size() - 1, 'x');
    refused(opd_scheduler_snapshot(s.get(), room.data(), room.size(), &size), "capacity", " bytes for ");
    CHECK(room == std::string(bytes.size() - 1, 'x'));
    refused(opd_scheduler_snapshot(s.get(), nullptr, 0, nullptr), "size", "is a null pointer");
    refused(opd_scheduler_snapshot(s.get(), nullptr, 9, &size), "bytes", "is a null pointer");
    refused(opd_scheduler_abandon_workers(s.get(), 2, 0), "keep_prefixes", "is 2; it is 0 or 1");
    opd_scheduler* again = nullptr;
    for (std::size_t i = 0; i < bytes.size(); i += 7) {
        std::string damaged = bytes;
        damaged[i] = static_cast<char>(damaged[i] ^ 4);
        refused(opd_scheduler_restore(&settings, damaged.data(), damaged.size(), &again), "snapshot", "is ");
    }
    refused(opd_scheduler_restore(&settings, bytes.data(), 5, &again), "snapshot", "ends too early");
    refused(opd_scheduler_restore(&settings, nullptr, 5, &again), "bytes", "is a null pointer");
    auto changed = settings;
    changed.batch = 4, changed.outstanding = OPD_WIDEST;
    refused(opd_scheduler_restore(&changed, bytes.data(), bytes.size(), &again), "snapshot", "is of another batch");
    CHECK(again == nullptr);
    REQUIRE(opd_scheduler_restore(&settings, bytes.data(), bytes.size(), &again) == OPD_OK);
    CHECK(snapshot_of(again) == bytes);
    opd_scheduler_destroy(again);
}

// ---- the queue

namespace {

std::shared_ptr<opd_queue> make(const opd_queue_settings& s) {
    opd_queue* made = nullptr;
    REQUIRE_MESSAGE(opd_queue_create(&s, &made) == OPD_OK, opd_last_error());
    return {made, opd_queue_destroy};
}
opd_queue_settings queue_of(const char* policy, std::int64_t batch, std::int64_t tau, std::int64_t group = 1) {
    auto s = zeroed<opd_queue_settings>();
    s.batch = batch, s.tau = zero_said(tau), s.policy = policy, s.group = group;
    s.negative_control = policy == std::string("naive_wait");
    return s;
}
opd_queue_state look(opd_queue* q) {
    auto s = zeroed<opd_queue_state>();
    require(opd_queue_look(q, &s) == OPD_OK, "a state");
    return s;
}
std::string snapshot_of(opd_queue* q) {
    std::size_t size = 0;
    require(opd_queue_snapshot(q, nullptr, 0, &size) == OPD_OK, "a size");
    std::string bytes(size, '\0');
    require(opd_queue_snapshot(q, bytes.data(), size, &size) == OPD_OK, "a snapshot");
    return bytes;
}

/// A C++ queue and a C one, and the same calls of both.
class both_queues {
    using core = staleness_queue<std::int64_t>;
    core ours_;
    std::shared_ptr<opd_queue> theirs_;
    std::map<std::uint64_t, permit> permits_;
    std::optional<core::batch> batch_;
    std::optional<core::update> update_;
    std::uint64_t out_ = 0;
    std::int64_t next_item_ = 0;
    dice& d_;
    index_t batch_size_, group_;

public:
    std::map<std::string, int> seen; // what happened

    both_queues(dice& d, staleness_policy p, index_t batch, index_t tau, index_t group)
        : ours_({.batch = batch,
                 .schedule = {.tau = tau, .policy = p, .negative_control = p == staleness_policy::naive_wait},
                 .group = group}),
          theirs_(make(queue_of(name_of(p), batch, tau, group))), d_(d), batch_size_(batch), group_(group) {}

    void acquire() {
        const auto n = static_cast<std::size_t>(d_.of(1, group_));
        std::vector<permit> ours(n);
        std::vector<opd_permit> theirs(n);
        std::int32_t got = 9;
        const bool any = ours_.try_acquire(std::span(ours));
        require(opd_queue_acquire(theirs_.get(), n, 0, theirs.data(), &got) == OPD_OK && got == any, "as many permits");
        for (std::size_t i = 0; any && i < n; ++i) {
            require(theirs[i].version == ours[i].version() && theirs[i].slot == ours[i].slot() && theirs[i].permit != 0,
                    "the same permit");
            permits_.emplace(theirs[i].permit, std::move(ours[i]));
        }
        ++seen[any ? "acquired" : "none"];
    }
    auto any_permit() { return std::next(permits_.begin(), d_.of(0, static_cast<index_t>(permits_.size()) - 1)); }
    void push() {
        const auto p = any_permit();
        std::int64_t item = next_item_++, copy = item;
        const push_result ours = ours_.push(p->second, std::move(copy));
        std::int32_t theirs = 9;
        require(opd_queue_push(theirs_.get(), &p->first, &item, 1, &theirs) == OPD_OK &&
                    theirs == static_cast<int>(ours),
                "the same push");
        ++seen[ours == push_result::queued ? "queued" : ours == push_result::stale ? "stale" : "aborted"];
        if (ours == push_result::queued) permits_.erase(p);
    }
    void release() {
        const auto p = any_permit();
        require(opd_queue_release(theirs_.get(), p->first) == OPD_OK, "released");
        require(opd_queue_release(theirs_.get(), p->first) == OPD_INVALID_INPUT, "but once");
        permits_.erase(p);
    }
    void restart() {
        const auto p = any_permit();
        std::int64_t version = -9;
        const bool waits = update_.has_value() && !ours_.aborted();
        const bool again = !waits && p->second.restart();
        require(opd_queue_restart(theirs_.get(), p->first, waits ? d_(0.1) * 0.001 : 0.0, &version) == OPD_OK,
                "it is asked");
        require(version == (again ? p->second.version() : -1), "the same version");
        ++seen[again ? "restarted" : "not restarted"];
    }
    void pop() {
        batch_ = ours_.try_pop();
        std::vector<std::int64_t> items(static_cast<std::size_t>(batch_size_)), versions(items.size());
        auto b = zeroed<opd_queue_batch>();
        require(opd_queue_pop(theirs_.get(), 0, items.data(), versions.data(), items.size(), &b) == OPD_OK, "popped");
        require((b.batch != 0) == batch_.has_value(), "a batch, or none");
        if (!batch_) return;
        out_ = b.batch;
        require(b.version == batch_->version() && b.count == batch_->size(), "the same batch");
        for (std::size_t i = 0; i < b.count; ++i)
            require(items[i] == (*batch_)[i] && versions[i] == batch_->version_of(i), "the same item");
        ++seen["popped"];
    }
    void train() {
        require(opd_queue_synchronised(theirs_.get(), out_) == OPD_INVALID_INPUT, "not before it is trained");
        update_.emplace(std::move(*batch_).trained());
        batch_.reset();
        require(opd_queue_trained(theirs_.get(), out_) == OPD_OK, "trained");
        require(opd_queue_trained(theirs_.get(), out_) == OPD_INVALID_INPUT, "but once");
    }
    void synchronise() {
        auto stale = std::move(*update_).synchronised();
        update_.reset();
        require(opd_queue_synchronised(theirs_.get(), out_) == OPD_OK, "synchronised");
        std::vector<opd_stale> theirs;
        for (std::size_t n = 1; n > 0;) {
            opd_stale some[2];
            require(opd_queue_stale(theirs_.get(), some, 2, &n) == OPD_OK, "what became stale");
            theirs.insert(theirs.end(), some, some + n);
        }
        require(theirs.size() == stale.size(), "as much became stale");
        for (std::size_t i = 0; i < stale.size(); ++i) {
            ++seen["became stale"];
            require(theirs[i].item == stale[i].item && theirs[i].version == stale[i].version &&
                        (theirs[i].permit.permit != 0) == static_cast<bool>(stale[i].permit),
                    "the same item");
            if (!stale[i].permit) continue;
            require(theirs[i].permit.version == stale[i].permit.version(), "the same permit");
            permits_.emplace(theirs[i].permit.permit, std::move(stale[i].permit));
        }
    }
    void give_up() {
        ++seen[batch_ ? "put back" : "given up"];
        batch_.reset();
        update_.reset();
        require(opd_queue_give_up(theirs_.get(), out_) == OPD_OK, "given up");
        require(opd_queue_give_up(theirs_.get(), out_) == OPD_INVALID_INPUT, "but once");
    }
    void abort() {
        const auto ours = ours_.abort();
        require(opd_queue_abort(theirs_.get()) == OPD_OK, "aborted");
        std::vector<std::int64_t> theirs(ours.size() + 1);
        std::size_t n = 0;
        require(opd_queue_aborted_items(theirs_.get(), theirs.data(), theirs.size(), &n) == OPD_OK &&
                    n == ours.size() && std::equal(ours.begin(), ours.end(), theirs.begin()),
                "the same items back");
    }
    void restore() { // both go on from the C queue's bytes, which forget who is out
        const std::string bytes = snapshot_of(theirs_.get());
        require(bytes == ours_.snapshot([](archive_writer& to, const std::int64_t& x) { to(x); }), "the same snapshot");
    }
    void step() {
        const double u = d_();
        if (u < 0.35)
            acquire();
        else if (u < 0.65 && !permits_.empty())
            push();
        else if (u < 0.69 && !permits_.empty())
            release();
        else if (u < 0.74 && !permits_.empty())
            restart();
        else if (u < 0.9 && !batch_ && !update_)
            pop();
        else if (batch_)
            d_(0.9) ? train() : give_up();
        else if (update_)
            d_(0.995) ? synchronise() : give_up();
        compare();
    }
    void end(bool aborts) {
        if (aborts) {
            abort();
        } else {
            ours_.close();
            require(opd_queue_close(theirs_.get()) == OPD_OK, "closed");
        }
        compare();
        for (int i = 0; i < 60; ++i) step();
        restore();
    }
    void compare() {
        const queue_counts n = ours_.counts();
        const opd_queue_state s = look(theirs_.get());
        require(s.acquired == n.acquired && s.consumed == n.consumed && s.returned == n.returned &&
                    s.dropped == n.dropped && s.discarded == n.discarded && s.retried == n.retried &&
                    s.put_back == n.put_back && s.batches == n.batches && s.outstanding == n.outstanding &&
                    s.ready == n.ready && s.training == n.training && s.waiting_producers == 0 &&
                    s.waiting_learners == 0 && s.version == ours_.version() && s.closed == ours_.closed() &&
                    s.aborted == ours_.aborted(),
                "the same counts");
        require(s.acquired == s.consumed + s.returned + s.dropped + s.discarded + s.outstanding, "every permit");
        if (n.acquired % 5 == 0) restore();
    }
};

} // namespace

TEST_CASE("the C queue answers as the C++ one does, for every policy") {
    std::map<std::string, int> seen;
    for (int p = 0; p <= static_cast<int>(last_of(staleness_policy{})); ++p)
        for (std::uint64_t seed = 1; seed <= 30; ++seed) {
            CAPTURE(p);
            CAPTURE(seed);
            dice d{seed};
            const index_t group = d.of(1, 2), batch = group * d.of(1, 3);
            CHECK(outcome([&] {
                      both_queues q(d, static_cast<staleness_policy>(p), batch, d.of(0, 3), group);
                      for (int i = 0; i < 300; ++i) q.step();
                      q.end(seed % 2 == 0);
                      for (const auto& [what, n] : q.seen) seen[what] += n;
                  }) == "");
        }
    for (const std::string what : {"acquired", "none", "queued", "stale", "aborted", "restarted", "not restarted",
                                   "popped", "became stale", "put back", "given up"}) {
        CAPTURE(what);
        CHECK(seen[what] > 0);
    }
}

TEST_CASE("a queue goes on from its bytes") {
    const auto settings = queue_of("cohort_fifo", 2, 1);
    const auto q = make(settings);
    std::vector<opd_permit> p(3);
    std::int32_t got = 0, pushed = 9;
    for (auto& one : p) REQUIRE(opd_queue_acquire(q.get(), 1, 0, &one, &got) == OPD_OK);
    const std::uint64_t numbers[2] = {p[2].permit, p[0].permit};
    const std::int64_t items[2] = {70, -5};
    for (int i = 0; i < 2; ++i) REQUIRE(opd_queue_push(q.get(), &numbers[i], &items[i], 1, &pushed) == OPD_OK);
    const std::string bytes = snapshot_of(q.get());
    opd_queue* again = nullptr;
    REQUIRE(opd_queue_restore(&settings, bytes.data(), bytes.size(), &again) == OPD_OK);
    CHECK(look(again).ready == 2);
    CHECK(look(again).outstanding == 2);
    std::int64_t out[2] = {}, versions[2] = {};
    auto b = zeroed<opd_queue_batch>();
    REQUIRE(opd_queue_pop(again, 0, out, versions, 2, &b) == OPD_OK);
    CHECK(b.count == 2);
    CHECK(out[0] + out[1] == 65);
    opd_queue_destroy(again);
    again = nullptr;
    std::string damaged = bytes;
    damaged[20] = static_cast<char>(damaged[20] ^ 1);
    refused(opd_queue_restore(&settings, damaged.data(), damaged.size(), &again), "snapshot", "is damaged");
    const auto others = queue_of("cohort_fifo", 2, 2);
    refused(opd_queue_restore(&others, bytes.data(), bytes.size(), &again), "snapshot",
            "was taken under other options");
    CHECK(again == nullptr);
}

TEST_CASE("what a queue refuses") {
    const auto says = [](auto change, const std::string& argument, const std::string& words) {
        auto s = queue_of("edf", 2, 1);
        change(s);
        opd_queue* made = nullptr;
        refused(opd_queue_create(&s, &made), argument, words);
        CHECK(made == nullptr);
    };
    says([](auto& s) { s.policy = "fifo"; }, "settings.policy", "is one of capacity");
    says([](auto& s) { s.batch = -1; }, "settings.batch", "must be at least 1");
    says([](auto& s) { s.outstanding = OPD_AUTOMATIC; }, "settings.outstanding", "cannot be automatic in a queue");
    says([](auto& s) { s.outstanding = 1; }, "settings.outstanding", "no batch would ever fill");
    says([](auto& s) { s.concurrency = 1; }, "settings.concurrency", "belongs to the policy areal");
    says([](auto& s) { s.reserved = 1; }, "settings.reserved", "must be 0");
    says([](auto& s) { s.struct_size = 0; }, "settings.struct_size", "is 0");

    const auto q = make(queue_of("edf", 2, 1, 2));
    opd_permit p[3];
    std::int32_t got = 5, pushed = 5;
    refused(opd_queue_acquire(q.get(), 3, 0, p, &got), "permits", "at most group = 2 at once, not 3");
    refused(opd_queue_acquire(q.get(), 0, 0, p, &got), "n", "is 0");
    refused(opd_queue_acquire(q.get(), 1, -1, p, &got), "seconds", "0 or longer");
    refused(opd_queue_acquire(q.get(), 1, not_a_number, p, &got), "seconds", "0 or longer");
    refused(opd_queue_acquire(q.get(), 1, 0, nullptr, &got), "permits", "is a null pointer");
    refused(opd_queue_acquire(q.get(), 1, 0, p, nullptr), "got", "is a null pointer");
    CHECK(got == 5);
    CHECK(look(q.get()).acquired == 0);
    REQUIRE(opd_queue_acquire(q.get(), 2, 0, p, &got) == OPD_OK);
    const std::uint64_t numbers[2] = {p[0].permit, 1234};
    const std::int64_t items[2] = {1, 2};
    refused(opd_queue_push(q.get(), numbers, items, 2, &pushed), "permits", "is 1234, which is no permit that is out",
            OPD_INVALID_INPUT, 1);
    const std::uint64_t twice[2] = {p[0].permit, p[0].permit};
    refused(opd_queue_push(q.get(), twice, items, 2, &pushed), "permits", "which is no permit that is out",
            OPD_INVALID_INPUT, 1);
    CHECK(look(q.get()).ready == 0);
    const std::uint64_t good[2] = {p[0].permit, p[1].permit}; // they are still out
    REQUIRE(opd_queue_push(q.get(), good, items, 2, &pushed) == OPD_OK);
    CHECK(pushed == OPD_PUSHED);
    refused(opd_queue_push(q.get(), good, items, 1, &pushed), "permits", "it was pushed or released");
    refused(opd_queue_release(q.get(), good[0]), "permit", "it was pushed or released");
    std::int64_t version = 0, out[2] = {};
    refused(opd_queue_restart(q.get(), good[0], 0, &version), "permit", "it was pushed or released");
    auto b = zeroed<opd_queue_batch>();
    refused(opd_queue_pop(q.get(), 0, out, nullptr, 1, &b), "capacity", "is 1; a batch has 2 items");
    b.struct_size = 1;
    refused(opd_queue_pop(q.get(), 0, out, nullptr, 2, &b), "out.struct_size", "is 1");
    CHECK(look(q.get()).training == 0);
    b.struct_size = sizeof b;
    REQUIRE(opd_queue_pop(q.get(), 0, out, nullptr, 2, &b) == OPD_OK);
    refused(opd_queue_trained(q.get(), b.batch + 1), "batch", "which is not out");
    refused(opd_queue_synchronised(q.get(), b.batch), "batch", "is not trained yet");
    REQUIRE(opd_queue_trained(q.get(), b.batch) == OPD_OK);
    refused(opd_queue_trained(q.get(), b.batch), "batch", "is trained already");
    REQUIRE(opd_queue_synchronised(q.get(), b.batch) == OPD_OK);
    refused(opd_queue_synchronised(q.get(), b.batch), "batch", "which is not out");
    CHECK(look(q.get()).version == 1);
}

TEST_CASE("producers and a learner in threads: bounds, and every item once") {
    for (const char* policy : {"edf", "capacity", "retry", "drop"}) {
        CAPTURE(policy);
        constexpr std::int64_t batch = 8, tau = 2, most = 600;
        const auto q = make(queue_of(policy, batch, tau));
        std::atomic<std::int64_t> next{0};
        std::atomic<int> stale{0}, faults{0};
        const auto good = [&](int result) {
            if (result != OPD_OK) ++faults;
            return result == OPD_OK;
        };
        const auto produce = [&](unsigned seed) {
            for (std::int64_t item = next++; item < most;) {
                opd_permit p;
                std::int32_t got = 0, pushed = 0;
                if (!good(opd_queue_acquire(q.get(), 1, infinity, &p, &got)) || got == 0) return;
                if ((static_cast<unsigned>(item) * 7 + seed) % 13 == 0) {
                    std::this_thread::sleep_for(std::chrono::microseconds(300));
                }
                if ((static_cast<unsigned>(item) + seed++) % 31 == 0) { // its rollout failed; it is tried again
                    if (!good(opd_queue_release(q.get(), p.permit))) return;
                    continue;
                }
                for (bool again = true; again;) {
                    again = false;
                    if (!good(opd_queue_push(q.get(), &p.permit, &item, 1, &pushed))) return;
                    if (pushed == OPD_PUSHED) break;
                    ++stale;
                    std::int64_t version = 0;
                    if (!good(opd_queue_restart(q.get(), p.permit, infinity, &version))) return;
                    again = version >= 0;
                }
                item = next++;
            }
        };
        std::map<std::int64_t, int> times;
        std::int64_t worst = 0;
        std::vector<opd_stale> given_back;
        std::thread learner([&] {
            for (;;) {
                std::int64_t items[batch], versions[batch];
                auto b = zeroed<opd_queue_batch>();
                if (!good(opd_queue_pop(q.get(), infinity, items, versions, batch, &b)) || b.batch == 0) return;
                for (std::size_t i = 0; i < b.count; ++i)
                    ++times[items[i]], worst = std::max(worst, b.version - versions[i]);
                if (!good(opd_queue_trained(q.get(), b.batch)) || !good(opd_queue_synchronised(q.get(), b.batch)))
                    return;
                opd_stale s;
                for (std::size_t n = 1; good(opd_queue_stale(q.get(), &s, 1, &n)) && n > 0;) {
                    given_back.push_back(s);
                    if (s.permit.permit == 0) continue;
                    std::int32_t pushed = 0; // as if it were rolled out again at once
                    good(opd_queue_push(q.get(), &s.permit.permit, &s.item, 1, &pushed));
                }
            }
        });
        std::vector<std::thread> producers;
        for (unsigned seed = 1; seed <= 4; ++seed) producers.emplace_back(produce, seed);
        for (auto& p : producers) p.join();
        good(opd_queue_close(q.get()));
        learner.join();
        CHECK(faults == 0);
        const bool drops = policy == std::string("drop");
        std::size_t lost = 0;
        for (const opd_stale& s : given_back) lost += s.permit.permit == 0;
        CHECK(times.size() + (drops ? lost : 0) == most);
        for (const auto& [item, n] : times) CHECK(n == 1);
        if (policy != std::string("capacity")) CHECK(worst <= tau);
        const opd_queue_state s = look(q.get());
        CHECK(s.outstanding == 0);
        CHECK(s.acquired == s.consumed + s.returned + s.dropped);
    }
}

TEST_CASE("waits end in time, and when the queue ends") {
    const auto settings = queue_of("edf", 2, 1);
    opd_queue* q = nullptr;
    REQUIRE(opd_queue_create(&settings, &q) == OPD_OK);
    opd_permit p[4];
    std::int32_t got = 0;
    for (auto& one : p) REQUIRE(opd_queue_acquire(q, 1, 0, &one, &got) == OPD_OK);
    const auto began = std::chrono::steady_clock::now();
    opd_permit more;
    REQUIRE(opd_queue_acquire(q, 1, 0.05, &more, &got) == OPD_OK);
    CHECK(got == 0);
    std::int64_t items[2];
    auto b = zeroed<opd_queue_batch>();
    b.batch = 7;
    REQUIRE(opd_queue_pop(q, 0.05, items, nullptr, 2, &b) == OPD_OK);
    CHECK(b.batch == 0);
    CHECK(std::chrono::steady_clock::now() - began >= std::chrono::milliseconds(100));
    CHECK(look(q).waiting_producers == 0);

    // a permit that comes while somebody waits
    std::thread waits([&] {
        std::int32_t came = 0;
        CHECK(opd_queue_acquire(q, 1, 60, &more, &came) == OPD_OK);
        CHECK(came == 1);
    });
    while (look(q).waiting_producers == 0) std::this_thread::yield();
    REQUIRE(opd_queue_release(q, p[0].permit) == OPD_OK);
    waits.join();
    CHECK(more.slot == p[0].slot);

    // destroyed under a producer and a learner that wait
    std::atomic<int> ended{0};
    std::thread producer([&] {
        opd_permit none;
        std::int32_t came = 9;
        CHECK(opd_queue_acquire(q, 1, infinity, &none, &came) == OPD_OK);
        CHECK(came == 0);
        ++ended;
    });
    std::thread learner([&] {
        std::int64_t some[2];
        auto none = zeroed<opd_queue_batch>();
        CHECK(opd_queue_pop(q, infinity, some, nullptr, 2, &none) == OPD_OK);
        CHECK(none.batch == 0);
        ++ended;
    });
    while (look(q).waiting_producers == 0 || look(q).waiting_learners == 0) std::this_thread::yield();
    opd_queue_destroy(q);
    producer.join();
    learner.join();
    CHECK(ended == 2);
    refused(opd_queue_close(q), "queue", "is not a live handle");
}

// ---- the virtual cluster

namespace {

/// Adds up the tokens of attempts that were aborted, whatever the library counts.
struct counting_engine {
    simulated_rollout sim;
    double *aborted, *aborts;
    bool abort(const ticket& t) {
        ++*aborts;
        const double before = sim.done().discarded;
        const bool ran = sim.abort(t);
        *aborted += sim.done().discarded - before;
        return ran;
    }
    template <class Parked>
    void park(const ticket& t, Parked&& parked) {
        sim.park(t, parked);
    }
    void install(const weights& w) { sim.install(w); }
    double elasticity() { return sim.elasticity(); }
    double next() const { return sim.next(); }
    template <class Out, class Parked>
    void advance(double dt, Out&& finished, Parked&& parked) {
        sim.advance(dt, finished, parked);
    }
    template <class Out>
    void advance(double dt, Out&& finished) {
        sim.advance(dt, finished);
    }
    index_t running() const { return sim.running(); }
};
struct counting_cluster : simulated_cluster {
    double *aborted = nullptr, *aborts = nullptr;
    counting_engine rollout(std::int32_t w) const { return {simulated_cluster::rollout(w), aborted, aborts}; }
    void start(counting_engine& e, const ticket& t, version_t v, bool keeps) {
        simulated_cluster::start(e.sim, t, v, keeps);
    }
};
/// A recorder that adds up what was rolled out.
struct counting_recorder : recorder {
    double rolled = 0;
    using recorder::recorder;
    void event(double t, const opd::sched::event& e, const actions& out, const scheduler& s) {
        if (e.what == event::kind::rolled_out) rolled += static_cast<double>(e.versions.tokens);
        recorder::event(t, e, out, s);
    }
    using event_type = opd::sched::event;
};

/// A law that both sides have.
struct law {
    distribution ours;
    opd_distribution theirs;
};
law any_law(dice& d, double mean) {
    law l = {{}, zeroed<opd_distribution>()};
    switch (d.of(0, 4)) {
    case 0:
        l.ours.law = constant{mean}, l.theirs.law = "constant", l.theirs.a = mean;
        break;
    case 1:
        l.ours.law = uniform{mean / 2, 2 * mean}, l.theirs.law = "uniform";
        l.theirs.a = mean / 2, l.theirs.b = 2 * mean;
        break;
    case 2:
        l.ours.law = exponential{mean}, l.theirs.law = "exponential", l.theirs.a = mean;
        break;
    case 3:
        l.ours.law = lognormal{mean, 0.8}, l.theirs.law = "lognormal", l.theirs.a = mean, l.theirs.b = 0.8;
        break;
    default:
        l.ours.law = pareto{1.3, mean / 3, 100 * mean}, l.theirs.law = "pareto";
        l.theirs.a = 1.3, l.theirs.b = mean / 3, l.theirs.c = 100 * mean;
    }
    if (d(0.5)) {
        l.ours.at_least = l.theirs.at_least = mean / 4;
        l.ours.at_most = l.theirs.at_most = 20 * mean;
    }
    return l;
}

} // namespace

TEST_CASE("the simulation's figures are those of the C++ simulation") {
    int discards = 0, losses = 0, unfinished = 0, parks = 0;
    for (std::uint64_t seed = 1; seed <= 160 / worlds_share; ++seed) {
        CAPTURE(seed);
        const world w = world_of(seed, {.schedule = {}, .faults = false});
        dice d{seed + 5000};
        opd::sched::settings s = w.settings;
        const law response = any_law(d, 30), prompt = any_law(d, 5), factor = any_law(d, 1), noise = any_law(d, 1);
        auto c = zeroed<opd_cluster>();
        counting_cluster model;
        c.seed = model.seed = model.lengths.seed = seed;
        model.lengths.group = s.group;
        model.lengths.response = response.ours, model.lengths.prompt = prompt.ours, model.factor = factor.ours;
        c.response = &response.theirs, c.prompt = &prompt.theirs, c.worker_factor = &factor.theirs;
        model.lengths.by_attempt = d(0.5), c.redraw = model.lengths.by_attempt;
        model.lanes = c.lanes = static_cast<std::int32_t>(d.of(1, 6));
        model.budget = c.park_after = d(0.3) ? d.of(5, 20) : 0;
        model.speed = {0.1, d(0.5) ? 0.01 : 0, d(0.5) ? 0.001 : 0, d(0.5) ? 0.0005 : 0, 1.5};
        c.step = model.speed.step, c.step_per_sequence = model.speed.step_per_sequence;
        c.prefill = model.speed.prefill, c.rebuild = model.speed.rebuild, c.speed_factor = 1.5;
        auto teacher = zeroed<opd_job>(), learner = zeroed<opd_job>(), sync = zeroed<opd_job>();
        teacher.fixed = 0.2, teacher.per_token = 0.001, teacher.noise = &noise.theirs;
        learner.fixed = 1, learner.per_item = 0.1;
        sync.fixed = d(0.5) ? 0.3 : 0;
        model.teacher_time = {0.2, 0, 0.001, noise.ours, draw_of::teacher_time, seed};
        model.learner_time = {1, 0.1, 0, {}, draw_of::learner_time, seed};
        model.sync_time = {sync.fixed, 0, 0, {}, draw_of::sync_time, seed};
        c.teacher = &teacher, c.learner = &learner, c.sync = &sync;
        c.rollout_workers = w.rollout_workers, c.teachers = w.teachers, c.teacher_slots = w.teacher_slots;
        // deaths, and wishes
        std::vector<std::pair<double, event>> outside;
        if (seed % 4 == 0) {
            outside.emplace_back(3.5, event::down(stage::rollout, 0));
            outside.emplace_back(5.25, event::up(stage::rollout, 0, c.lanes));
        }
        if (seed % 5 == 0) outside.emplace_back(2.0, event::of(event::kind::pause));
        if (seed % 5 == 0) outside.emplace_back(4.0, event::of(event::kind::resume));
        std::vector<opd_event> events;
        std::vector<double> times;
        for (const auto& [t, e] : outside) events.push_back(c_event_of(e)), times.push_back(t);
        c.events = events.data(), c.times = times.data(), c.event_count = events.size();
        const bool limited = seed % 3 == 0;
        if (limited) c.steps = 2 + static_cast<std::int64_t>(seed % 3);

        run_metrics metrics(recorded());
        counting_recorder record(metrics);
        const auto lengths = model.lengths;
        record.prompt_tokens = [&](sample_t n) { return static_cast<std::int64_t>(lengths.of({.sample = n}).prompt); };
        metrics.start(0);
        double aborted = 0, aborts = 0; // what an engine cut off has a fraction of a token
        model.aborted = &aborted, model.aborts = &aborts;
        virtual_driver<counting_cluster, counting_recorder> ours(s, model, &record);
        ours.bring_up(stage::learner, 1);
        ours.bring_up(stage::teacher, w.teachers, w.teacher_slots);
        ours.bring_up(stage::rollout, w.rollout_workers, c.lanes);
        for (const auto& [t, e] : outside) ours.at(t, e);
        while (!ours.finished() && !(limited && metrics.tokens.steps() >= c.steps) && ours.step()) {}
        metrics.observe(ours.now());

        const opd_scheduler_settings settings = to_c(s);
        auto l = zeroed<opd_ledger>();
        opd_report* report = nullptr;
        REQUIRE_MESSAGE(opd_simulate(&c, &settings, &l, &report) == OPD_OK, opd_last_error());
        const auto json = nlohmann::ordered_json::parse(opd_report_json(report));
        const bool same =
            json["metrics"].dump() == nlohmann::ordered_json::parse(examples::described(metrics).dump()).dump();
        CHECK(same);
        CHECK(l.seconds == ours.now());
        CHECK(l.events == ours.events());
        CHECK(l.finished == ours.finished());
        CHECK(l.stuck ==
              (!ours.finished() && ours.next() == infinity)); // a deadline took a worker that does not come back
        CHECK(l.failed_stage == -1);
        CHECK(l.steps == metrics.tokens.steps());
        CHECK(l.sequences == metrics.sequences());
        CHECK(l.version == ours.scheduler().version());
        CHECK(l.permits == ours.scheduler().resolved().permits);
        CHECK(l.throughput == metrics.tokens.throughput().value_or(0));
        CHECK(l.overlap == metrics.stages.overlap().value_or(0));
        CHECK(l.held_seconds == metrics.depths.held_time());
        for (int i = 0; i < lag_count; ++i) {
            CHECK(l.lag_mean[i] == metrics.lags(static_cast<lag>(i)).mean());
            CHECK(l.lag_max[i] == metrics.lags(static_cast<lag>(i)).max());
        }
        for (int i = 0; i < stage_count; ++i) {
            CHECK(l.busy_seconds[i] == metrics.stages.stage_time(static_cast<stage>(i)));
            CHECK(l.idle[i] == 1 - l.busy_seconds[i] / l.seconds);
        }
        const counters& n = ours.scheduler().totals();
        CHECK(l.counters.admitted == n.admitted);
        CHECK(l.counters.consumed == n.consumed);
        CHECK(l.counters.failed == n.failed);
        CHECK(l.counters.restarts == n.restarts);
        CHECK(l.counters.preempted == n.preempted);
        CHECK(l.consumed_tokens == static_cast<double>(n.consumed_tokens));
        CHECK(json["ledger"]["tokens"]["discarded"].get<double>() == l.discarded_tokens);
        CHECK(json["ledger"]["idle"]["teacher"].get<double>() == l.idle[OPD_TEACHER]);
        CHECK(json["ledger"]["counters"]["failed_by"]["stale"].get<std::int64_t>() == n.failed_by[3]);
        CHECK(json["ledger"]["finished"].get<bool>() == (l.finished != 0));
        opd_report_destroy(report);

        const double sum = l.consumed_tokens + l.discarded_tokens + l.lost_tokens + l.outstanding_tokens;
        CHECK(sum == l.generated_tokens);
        if (c.park_after == 0 && seed % 4 != 0 && l.finished) { // nobody died, and nothing is under way
            const double drawn = record.rolled + aborted, thrown = l.discarded_tokens + l.lost_tokens;
            CHECK(l.generated_tokens <= drawn + 1e-6 * drawn);
            CHECK(l.generated_tokens > drawn - aborts - 1e-6 * drawn - 1e-9);
            CHECK(thrown <= drawn - l.consumed_tokens + 1e-6 * drawn);
            CHECK(thrown > drawn - l.consumed_tokens - aborts - 1e-6 * drawn - 1e-9);
            CHECK(l.outstanding_tokens == 0);
        }
        const bool faulty = n.retries + n.lost_workers + n.failed - n.failed_by[3] > 0; // deadlines, here
        if (seed % 4 != 0 && !faulty) CHECK(l.lost_tokens == 0);
        discards += l.discarded_tokens > 0, losses += l.lost_tokens > 0, unfinished += !l.finished;
        parks += l.counters.parked > 0;
    }
    CHECK(discards > 2);
    CHECK(losses > 2);
    CHECK(unfinished > 2);
    CHECK(parks > 2);
}

namespace {

/// Two lanes, ten tokens of a second each: figures by hand.
struct plain_run {
    opd_cluster c = zeroed<opd_cluster>();
    opd_scheduler_settings s = zeroed<opd_scheduler_settings>();
    opd_distribution ten = zeroed<opd_distribution>();
    opd_job learner = zeroed<opd_job>();
    plain_run() {
        ten.law = "constant", ten.a = 10;
        learner.fixed = 5;
        c.lanes = 2, c.step = 1, c.response = &ten, c.learner = &learner;
        s.batch = 2, s.schedule = "sync", s.sequences = 4, s.teacher_batch = 2;
    }
    opd_ledger run() {
        auto l = zeroed<opd_ledger>();
        REQUIRE_MESSAGE(opd_simulate(&c, &s, &l, nullptr) == OPD_OK, opd_last_error());
        return l;
    }
};

} // namespace

TEST_CASE("a simulated run by hand") {
    plain_run r;
    opd_ledger l = r.run();
    CHECK(l.finished == 1);
    CHECK(l.seconds == 30); // 10 of rollout and 5 of the learner, twice
    CHECK(l.steps == 2);
    CHECK(l.consumed_tokens == 40);
    CHECK(l.generated_tokens == 40);
    CHECK(l.busy_seconds[OPD_ROLLOUT] == 20);
    CHECK(l.busy_seconds[OPD_LEARNER] == 10);
    CHECK(l.idle[OPD_TEACHER] == 1);
    CHECK(l.lag_mean[0] == 0);

    // the worker dies after 4 seconds, and is back after 6
    auto down = zeroed<opd_event>(), up = zeroed<opd_event>();
    down.kind = OPD_EVENT_WORKER_DOWN, up.kind = OPD_EVENT_WORKER_UP, up.slots = 2;
    const opd_event events[2] = {down, up};
    const double times[2] = {4, 6};
    r.c.events = events, r.c.times = times, r.c.event_count = 2;
    l = r.run();
    CHECK(l.seconds == 36);
    CHECK(l.lost_tokens == 8);
    CHECK(l.generated_tokens == 48);
    CHECK(l.discarded_tokens == 0);
    CHECK(l.counters.preempted == 2);

    // one lane, a second from 3 seconds on; it dies after 4: four tokens of one sequence and one of the other
    auto one = up, two = up;
    one.slots = 1;
    const opd_event lanes[4] = {one, two, down, up};
    const double at[4] = {0, 3, 4, 6};
    r.c.events = lanes, r.c.times = at, r.c.event_count = 4;
    l = r.run();
    CHECK(l.lost_tokens == 5);
    CHECK(l.generated_tokens == 45);
    CHECK(l.discarded_tokens == 0);

    // it ends with the learner's first call under way
    r.c.event_count = 0;
    r.c.seconds = 12;
    l = r.run();
    CHECK(l.finished == 0);
    CHECK(l.stuck == 0);
    CHECK(l.seconds == 12);
    CHECK(l.outstanding_tokens == 20);
    CHECK(l.busy_seconds[OPD_LEARNER] == 2);
    r.c.seconds = 4; // in the middle of a response
    l = r.run();
    CHECK(l.outstanding_tokens == 8);
    CHECK(l.generated_tokens == 8);
    // or after its first events
    r.c.seconds = 0, r.c.most_events = 3;
    CHECK(r.run().events == 3);
}

TEST_CASE("laws with lists, and a deadlock") {
    plain_run r;
    const double values[3] = {12, 4, 8}, weights[2] = {0, 1}, u[3] = {0, 0.5, 1}, x[3] = {3, 3, 3};
    auto measured = zeroed<opd_distribution>(), mixed = zeroed<opd_distribution>(), table = zeroed<opd_distribution>();
    measured.law = "empirical", measured.x = values, measured.n = 3;
    table.law = "quantile_table", table.u = u, table.x = x, table.n = 3;
    const opd_distribution parts[2] = {measured, table};
    mixed.law = "mixture", mixed.parts = parts, mixed.weights = weights, mixed.n = 2;
    r.c.response = &table;
    CHECK(r.run().consumed_tokens == 12);
    r.c.response = &mixed;
    CHECK(r.run().consumed_tokens == 12);
    r.c.response = &measured;
    const double tokens = r.run().consumed_tokens;
    CHECK(tokens >= 16);
    CHECK(tokens <= 48);
    CHECK(std::fmod(tokens, 4) == 0);

    bool found = false;
    for (std::uint64_t seed = 1; seed <= 200 && !found; ++seed) {
        auto slow = zeroed<opd_distribution>();
        slow.law = "pareto", slow.a = 1.1, slow.b = 1;
        r.c.response = &slow, r.c.seed = seed, r.c.lanes = 8;
        r.s.schedule = "async", r.s.policy = "naive_wait", r.s.negative_control = 1, r.s.tau = 2, r.s.sequences = 400;
        const opd_ledger l = r.run();
        found = l.stuck == 1;
        CHECK(l.stuck + l.finished == 1);
    }
    CHECK(found);
}

TEST_CASE("what a simulation refuses") {
    const auto says = [](auto change, const std::string& argument, const std::string& words, std::int64_t row = -1) {
        plain_run r;
        change(r);
        auto l = zeroed<opd_ledger>();
        l.seconds = 77;
        opd_report* report = nullptr;
        refused(opd_simulate(&r.c, &r.s, &l, &report), argument, words, OPD_INVALID_INPUT, row);
        CHECK(l.seconds == 77);
        CHECK(report == nullptr);
    };
    using run = plain_run;
    says([](run& r) { r.ten.law = "gamma"; }, "cluster.response.law", "one of constant, uniform, exponential");
    says([](run& r) { r.ten.law = nullptr; }, "cluster.response.law", "is a null pointer");
    says([](run& r) { r.ten.a = -1; }, "cluster.response", "value must be finite and at least 0");
    says([](run& r) { r.ten.a = not_a_number; }, "cluster.response", "value must be finite");
    says([](run& r) { r.ten.b = 1; }, "cluster.response.b", "belongs to another law");
    says([](run& r) { r.ten.law = "empirical", r.ten.a = 0; }, "cluster.response.x", "has no values");
    says([](run& r) { r.ten.at_most = 5, r.ten.at_least = 6; }, "cluster.response", "at_most");
    says([](run& r) { r.ten.law = "mixture", r.ten.a = 0; }, "cluster.response.weights", "has no values");
    says([](run& r) { r.ten.struct_size = 2; }, "cluster.response.struct_size", "is 2");
    says([](run& r) { r.learner.fixed = infinity; }, "cluster.learner.fixed", "must be finite");
    says([](run& r) { r.c.step = OPD_ZERO; }, "cluster.step", "a decode step must take time");
    says([](run& r) { r.c.rebuild = not_a_number; }, "cluster.rebuild", "must be finite");
    says([](run& r) { r.c.speed_factor = -1; }, "cluster.speed_factor", "must be finite and positive");
    says([](run& r) { r.c.lanes = -4; }, "cluster.lanes", "is -4; it must lie in [1, 65536]");
    says([](run& r) { r.c.rollout_workers = 70000; }, "cluster.rollout_workers", "is 70000");
    says([](run& r) { r.c.redraw = 3; }, "cluster.redraw", "0 or 1");
    says([](run& r) { r.c.park_after = -1; }, "cluster.park_after", "negative");
    says([](run& r) { r.c.seconds = not_a_number; }, "cluster.seconds", "at least 0");
    says([](run& r) { r.c.steps = -1; }, "cluster.steps", "negative");
    says([](run& r) { r.s.sequences = 0; }, "cluster.steps", "nothing else ends the run");
    says([](run& r) { r.s.batch = -1; }, "settings.batch", "must be at least 1");
    says([](run& r) { r.c.event_count = 1; }, "cluster.events", "is a null pointer");
    opd_event e[2] = {c_event_of(event::of(event::kind::pause)), c_event_of(event::of(event::kind::tick))};
    double times[2] = {1, not_a_number};
    const auto with = [&](run& r) { r.c.events = e, r.c.times = times, r.c.event_count = 2; };
    says([&](run& r) { with(r); }, "cluster.times", "a time is finite", 1);
    times[1] = 2;
    says([&](run& r) { with(r), r.c.times = nullptr; }, "cluster.times", "is a null pointer");
    e[1].kind = OPD_EVENT_LEARNED;
    says([&](run& r) { with(r); }, "cluster.events.kind", "what the cluster itself says", 1);
    e[1].kind = OPD_EVENT_WORKER_DOWN, e[1].incarnation = 2;
    says([&](run& r) { with(r); }, "cluster.events.incarnation", "the driver numbers lives", 1);
    plain_run r;
    opd_ledger small_one = zeroed<opd_ledger>();
    small_one.struct_size = 1;
    refused(opd_simulate(&r.c, &r.s, &small_one, nullptr), "ledger.struct_size", "is 1");
    refused(opd_simulate(nullptr, &r.s, nullptr, nullptr), "cluster", "is a null pointer");
    refused(opd_simulate(&r.c, nullptr, nullptr, nullptr), "settings", "is a null pointer");
    CHECK(opd_simulate(&r.c, &r.s, nullptr, nullptr) == OPD_OK);
}
