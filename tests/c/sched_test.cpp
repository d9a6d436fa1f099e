// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize tsan
//
// The schedulers of the C interface beside those of C++: random worlds with faults drive both, and every action, deadline, counter, figure
// and snapshot is compared; so are the queue's answers and the virtual cluster's figures. And what is refused, by which sentence.
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
        counters back = {n.admitted,     n.consumed, n.consumed_tokens, n.failed,       {},           n.retries,
                         n.preempted,    n.restarts, n.parked,          n.late,         n.duplicates, n.lost_workers,
                         n.lost_weights, n.updates,  n.short_batches,   n.empty_batches};
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
    bad[1].kind = 19;
    n = taken = 7;
    refused(opd_scheduler_on_many(many.get(), bad.data(), 2, 4, some.data(), 2, &n, &taken), "events.kind",
            "is 19; it has the values 0 to 18", OPD_INVALID_INPUT, 1);
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
    refused(hand(with(tick, [](opd_event& e) { e.kind = -1; }), 6), "event.kind", "is -1; it has the values 0 to 18");
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
