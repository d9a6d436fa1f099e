// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// What goes wrong in virtual time, one fault at a time: when the scheduler hears what of it. A response, a scoring call
// and a train step take a second each, a transfer of weights none.
#include <doctest/doctest.h>
#include <functional>
#include <map>
#include <string>

#include "opd/sched/virtual_driver.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;
using kind = event::kind;

struct cluster {
    std::function<fault(const ticket&)> attempt = [](const ticket&) { return fault{}; };
    std::map<std::uint64_t, fault> calls = {};         // by job
    std::map<std::uint64_t, double> publications = {}; // likewise
    simulated_rollout rollout(std::int32_t) const { return simulated_rollout({.step = 1}, 4); }
    void start(simulated_rollout& w, const ticket& t) const { w.start(t, 1, 1); }
    double teacher(std::uint64_t, std::int32_t, std::span<const ticket>) const { return 1; }
    double learner(std::uint64_t, const weights&, std::span<const ticket>) const { return 1; }
    double sync(std::int32_t, const weights&) const { return 0; }
    fault rollout_fault(const ticket& t) const { return attempt(t); }
    fault of(std::uint64_t job) const { return calls.count(job) > 0 ? calls.at(job) : fault{}; }
    fault teacher_fault(std::uint64_t job, std::int32_t) const { return of(job); }
    fault learner_fault(std::uint64_t job) const { return of(job); }
    double publication(std::uint64_t job) const { return publications.count(job) > 0 ? publications.at(job) : forever; }
};

/// What the scheduler hears, each at its time.
struct listener {
    std::string heard;
    void event(double now, const opd::sched::event& e, const actions& out, const scheduler&) {
        const auto say = [&](const std::string& what) {
            std::string time = std::to_string(now);
            time.erase(time.find('.') + 3);
            heard += (heard.empty() ? "" : ", ") + time + " " + what;
        };
        if (e.what == kind::worker_up && now > 0) say("up");
        if (e.what == kind::worker_down) say("down");
        if (e.what == kind::rolled_out) say("rolled " + std::to_string(e.ticket.sample));
        if (e.what == kind::rollout_failed) say("failed " + std::to_string(e.ticket.sample));
        if (e.what == kind::aborted) say("aborted " + std::to_string(e.ticket.sample));
        if (e.what == kind::scored) {
            std::string which;
            for (const ticket& t : e.tickets) which += " " + std::to_string(t.sample);
            say("scored" + which);
        }
        if (e.what == kind::learned) say("learned");
        if (e.what == kind::weights_lost) say("weights lost");
        for (const action& a : out.items)
            if (a.what == action::kind::lost) say("lost");
    }
};
using driver = virtual_driver<cluster, listener>;

struct run {
    listener ears;
    settings how;
    driver d;
    run(const settings& s, const cluster& c, std::int32_t slots = 1) : how(s), d(s, c, &ears) {
        d.bring_up(stage::rollout, 1, slots);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
    }
    std::string until(double t) {
        d.run_until(t);
        return std::exchange(ears.heard, {});
    }
};
settings few(index_t sequences, index_t batch = 1) {
    return {.batch = batch, .schedule = async{.tau = 0}, .sequences = sequences, .teacher_batch = batch};
}
std::vector<schedule> schedules() {
    std::vector<schedule> all{opd::sched::sync{}, step_off{1}, step_off{3}, controlled{2}};
    for (const auto p :
         {staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf, staleness_policy::drop,
          staleness_policy::retry, staleness_policy::in_order, staleness_policy::areal})
        for (const auto u : {weight_update::keep, weight_update::abort, weight_update::finish_first})
            all.push_back(async{.policy = p, .update = u});
    return all;
}
/// Of a sequence's first attempt.
auto first(const fault& f) {
    return [f](const ticket& t) { return t.attempt == 1 ? f : fault{}; };
}

} // namespace

TEST_CASE("nothing goes wrong, and run_until(t) runs what happens at t") {
    run r(few(1), {});
    CHECK(r.until(0.99) == "");
    CHECK(r.until(1) == "1.00 rolled 0");
    CHECK(r.until(3) == "2.00 scored, 3.00 learned");
    CHECK(r.d.finished());
}

TEST_CASE("what comes at its deadline is in time") {
    settings s = few(1);
    s.rollout_deadline = s.teacher_deadline = s.learner_deadline = 1;
    run r(s, {});
    CHECK(r.until(9) == "1.00 rolled 0, 2.00 scored, 3.00 learned");
    CHECK(r.d.scheduler().totals().lost_workers == 0);
}

TEST_CASE("twice: a second answer after the first") {
    const fault twice{.what = fault::kind::twice, .after = 0.25};
    run r(few(2), {.attempt = first(twice), .calls = {{1, twice}, {2, twice}}});
    CHECK(r.until(3.5) == "1.00 rolled 0, 1.25 rolled 0, 2.00 scored, 2.25 scored, 3.00 learned, 3.25 learned");
    CHECK(r.d.scheduler().totals().duplicates + r.d.scheduler().totals().late == 3);
}

TEST_CASE("late: the answer comes, even after its worker is gone") {
    const fault late{.what = fault::kind::late, .after = 2};
    run r(few(1), {.attempt = first(late)});
    r.d.at(1.5, event::down(stage::rollout, 0));
    CHECK(r.until(4) == "1.50 down, 3.00 rolled 0");
    CHECK(r.d.scheduler().totals().late == 1);
}

TEST_CASE("partial: those are scored whose bit is set") {
    run r(few(3, 3), {.calls = {{1, {.what = fault::kind::partial, .which = 0b101}}}}, 3);
    CHECK(r.until(3) == "1.00 rolled 0, 1.00 rolled 1, 1.00 rolled 2, 2.00 scored 0 2, 3.00 scored");
}

TEST_CASE("death: of this life alone, and back in another") {
    run r(few(1), {.attempt = first({.what = fault::kind::death, .after = 0.5, .back = 2})});
    CHECK(r.until(4) == "0.50 down, 2.50 up, 3.50 rolled 0");
    // one that has come back meanwhile lives
    run s(few(1), {.attempt = first({.what = fault::kind::death, .after = 0.5, .back = 2})});
    s.d.at(0.25, event::down(stage::rollout, 0));
    s.d.at(0.375, event::up(stage::rollout, 0));
    CHECK(s.until(2) == "0.25 down, 0.37 up, 1.37 rolled 0");
}

TEST_CASE("silence: only a deadline finds out, and from then on the worker is away as long as was said") {
    settings s = few(1);
    s.rollout_deadline = 2;
    s.abort_deadline = 1;
    // in its second life it hangs, and nobody brings it back
    run r(s, {.attempt = [](const ticket& t) {
              return t.attempt == 1   ? fault{.what = fault::kind::silence, .after = 0.5, .back = 4}
                     : t.attempt == 2 ? fault{.what = fault::kind::death, .after = 0.25}
                                      : fault{};
          }});
    CHECK(r.until(100) == "3.00 lost, 7.00 up, 7.25 down");
    CHECK_FALSE(r.d.scheduler().is_up(stage::rollout, 0));
}

TEST_CASE("a call that hangs: its worker is lost, and stays away unless the model brings it back") {
    settings s = few(1);
    s.teacher_deadline = 2;
    s.rollout_deadline = 2, s.abort_deadline = 1;
    run r(s,
          {.calls = {{1, {.what = fault::kind::silence, .after = 0.5, .back = 4}}, {2, {.what = fault::kind::hang}}}});
    CHECK(r.until(100) == "1.00 rolled 0, 3.00 lost, 7.00 up, 9.00 lost");
}

TEST_CASE("hang: an attempt that hangs can be aborted, in a driver that was restored too") {
    settings s = few(1);
    s.rollout_deadline = 2;
    s.abort_deadline = 1;
    const cluster c{.attempt = first({.what = fault::kind::hang})};
    run r(s, c);
    CHECK(r.until(1) == "");
    r.d = driver::restore(s, c, r.d.snapshot(), &r.ears);
    CHECK(r.until(9) == "2.00 aborted 0, 3.00 rolled 0, 4.00 scored, 5.00 learned");
    CHECK(r.d.scheduler().totals().lost_workers == 0);
}

TEST_CASE("a publication that is lost while it is installed is made again") {
    run r(few(1), {.publications = {{2, 0.0}}});
    CHECK(r.until(9) == "1.00 rolled 0, 2.00 scored, 3.00 learned, 3.00 weights lost, 4.00 learned");
    CHECK(r.d.scheduler().totals().lost_weights == 1);
}

TEST_CASE("a stage that always fails ends the run, under every schedule, and is named") {
    const fault fails{.what = fault::kind::fail};
    struct bad_cluster : cluster {
        stage bad = stage::rollout;
        fault how;
        fault rollout_fault(const ticket&) const { return bad == stage::rollout ? how : fault{}; }
        fault teacher_fault(std::uint64_t, std::int32_t) const { return bad == stage::teacher ? how : fault{}; }
        fault learner_fault(std::uint64_t) const { return bad == stage::learner ? how : fault{}; }
    };
    for (const schedule& how : schedules())
        for (const stage bad : {stage::rollout, stage::teacher, stage::learner})
            for (const fault& f : {fails, fault{.what = fault::kind::partial, .which = 0}}) {
                if (f.what == fault::kind::partial && bad != stage::teacher) continue;
                INFO("schedule " << how.index() << " stage " << name_of(bad));
                bad_cluster c;
                c.bad = bad, c.how = f;
                settings s{.batch = 2, .schedule = how}; // all else by default
                virtual_driver<bad_cluster> d(s, c);
                d.bring_up(stage::rollout, 2, 2);
                d.bring_up(stage::teacher, 1);
                d.bring_up(stage::learner, 1);
                CHECK(d.run(5000));
                CHECK(d.scheduler().failed() == bad);
                CHECK(d.scheduler().totals().consumed == 0);
                CHECK(d.scheduler().totals().failed <= 5 * 2 + 2 * 6 + 2); // what counted, and what was outstanding
                CHECK(d.first_exception() != nullptr);
            }
}
