// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// What a worker makes of its messages: each reply as a word, and what the stage was told as another.
#include <deque>
#include <doctest/doctest.h>
#include <set>
#include <string>

#include "opd/sched/worker_loop.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;
using command = worker_command<std::string, int>;
using reply = worker_reply<std::string, int>;
using order = command::kind;

std::string said;                // by the worker, and by its stage in brackets
std::set<std::string> throwing;  // calls that fail
std::set<std::uint64_t> forgets; // sequences that the stage loses
std::set<std::uint64_t> ends;    // sequences that are finished by the next step
std::set<std::uint64_t> fails;   // sequences that it gives up alone
std::stop_token seen;            // by the last call

void say(const std::string& word) { said += (said.empty() ? "" : " ") + word; }
void call(const std::string& word) {
    say("[" + word + "]");
    if (throwing.count(word) + throwing.count(word.substr(0, word.find(' '))) > 0) throw std::runtime_error(word);
}
std::string number(std::uint64_t n) { return std::to_string(n); }

struct scribe {
    using rolled_type = std::string;
    std::vector<ticket> lanes;
    std::int32_t answers_as = 0;
    void start(const ticket& t, std::shared_ptr<const std::string>) {
        call("start " + number(t.sample));
        lanes.push_back(t);
    }
    void abort(const ticket& t) {
        std::erase(lanes, t);
        call("abort " + number(t.sample));
    }
    void install(const weights& w) { call("install j" + number(w.job)); }
    void step(std::vector<finished_rollout<std::string>>& out, std::stop_token stop) {
        seen = stop;
        std::erase_if(lanes, [&](const ticket& t) {
            if (forgets.count(t.sample) > 0) return true;
            if (fails.count(t.sample) > 0) {
                auto& f = out.emplace_back();
                f.ticket = t, f.failed = std::make_exception_ptr(std::runtime_error("alone"));
                return true;
            }
            if (ends.count(t.sample) == 0) return false;
            ticket of = t;
            of.worker += answers_as;
            out.push_back({of, {}, std::make_shared<const std::string>("done")});
            return true;
        });
        call("step");
    }
    index_t running() const { return static_cast<index_t>(lanes.size()); }
};
struct judge {
    using scored_type = int;
    int scores = 2, of = 2;
    std::vector<std::shared_ptr<const int>> score(std::span<const std::shared_ptr<const std::string>>,
                                                  std::stop_token stop) {
        seen = stop;
        call("score");
        std::vector<std::shared_ptr<const int>> all;
        for (int i = 0; i < of; ++i) all.push_back(i < scores ? std::make_shared<const int>(i) : nullptr);
        return all;
    }
};
struct pupil {
    index_t train(std::span<const sequence_view<std::string, int>>, const train_call& c, std::stop_token stop) {
        seen = stop;
        call("train j" + number(c.job));
        return 1;
    }
};

void hear(const reply& r) {
    using kind = event::kind;
    const event& e = r.what;
    if (r.failed) say("error");
    const std::string life = "/" + number(e.incarnation);
    if (e.what == kind::worker_up) say("up" + life);
    if (e.what == kind::worker_down) say("down" + life);
    if (e.what == kind::rolled_out) say("rolled " + number(e.ticket.sample));
    if (e.what == kind::rollout_failed) say("failed " + number(e.ticket.sample));
    if (e.what == kind::aborted) say("aborted " + number(e.ticket.sample));
    if (e.what == kind::parked)
        say("parked " + number(e.ticket.sample) + ":" + (r.sequence ? *r.sequence : std::string("nothing")));
    if (e.what == kind::synced) say("synced j" + number(e.job) + life);
    if (e.what == kind::scored) say("scored " + number(r.tickets.size()) + life);
    if (e.what == kind::score_failed) say("not scored" + life);
    if (e.what == kind::learned) say("learned j" + number(e.job) + life);
    if (e.what == kind::learn_failed) say("not learned j" + number(e.job) + life);
}

command begin(incarnation_t life, std::stop_token stop = {}) {
    return {.what = order::begin, .life = life, .stop = stop};
}
command start(sample_t n, incarnation_t life) {
    return {.what = order::start, .life = life, .ticket = {.sample = n, .worker = 0, .incarnation = life, .lane = 0}};
}
command abort(sample_t n, incarnation_t life) {
    command c = start(n, life);
    c.what = order::abort;
    return c;
}
command park(sample_t n, incarnation_t life) {
    command c = start(n, life);
    c.what = order::park;
    return c;
}
command install(std::uint64_t job, incarnation_t life) {
    return {.what = order::install, .life = life, .weights = {1, job}};
}

struct rollout {
    std::shared_ptr<scribe> stage = std::make_shared<scribe>();
    rollout_actor<scribe, int> actor{stage, 0};
    rollout() { throwing = {}, forgets = ends = fails = {}, seen = {}; }
    std::string obey(command c) {
        said.clear();
        actor.obey(c, hear);
        return said;
    }
    std::string step() {
        said.clear();
        actor.step(hear);
        return said;
    }
};

/// Nothing comes for once to a worker that does not wait.
const command silence{.what = order::halt};

/// Gives one message at a time. Who waits when nothing will come is told to halt.
struct channel {
    std::deque<command> mail;
    void receive(std::vector<command>& out, bool wait) {
        const bool silent = !mail.empty() && mail.front().what == order::halt;
        if (silent) mail.pop_front();
        if ((mail.empty() || silent) && !wait) return;
        if (mail.empty()) say("(waits)");
        out.push_back(mail.empty() ? command{.what = order::halt} : std::move(mail.front()));
        if (!mail.empty()) mail.pop_front();
    }
    void send(const reply& r) const { hear(r); }
};
command score_call(std::uint64_t job, incarnation_t life) {
    return {.what = order::score,
            .life = life,
            .job = job,
            .tickets = std::vector<ticket>(2),
            .sequences = {nullptr, nullptr}};
}
command train_order(std::uint64_t job, incarnation_t life) {
    return {.what = order::train, .life = life, .call = {job, {}}};
}

} // namespace

TEST_CASE("a rollout worker obeys commands of its present life alone") {
    rollout w;
    CHECK(w.obey(begin(2)) == "up/2");
    CHECK(w.obey(start(1, 1)) == "");
    CHECK(w.obey(install(4, 1)) == "");
    CHECK(w.obey(start(1, 2)) == "[start 1]");
    CHECK(w.obey(abort(1, 1)) == "");
    CHECK(w.obey(begin(3)) == "[abort 1] up/3"); // and forgets what ran
    CHECK(w.actor.idle());
    CHECK(w.obey(start(1, 3)) == "[start 1]");
    CHECK(w.obey(abort(1, 3)) == "[abort 1] aborted 1");
    CHECK(w.obey(abort(1, 3)) == ""); // was answered
}

TEST_CASE("a worker parks as it is told to, or on its own") {
    struct scribe_that_parks : scribe {
        std::int64_t tokens = 2;
        finished_rollout<std::string> park(const ticket& t) {
            call("park " + number(t.sample));
            std::erase(lanes, t);
            return {t, {0, 0, 0, tokens}, tokens > 0 ? std::make_shared<const std::string>("half") : nullptr, true};
        }
        void step(std::vector<finished_rollout<std::string>>& out, std::stop_token) {
            while (!lanes.empty()) out.push_back(park(ticket(lanes[0])));
        }
    };
    throwing = {};
    const auto stage = std::make_shared<scribe_that_parks>();
    rollout_actor<scribe_that_parks, int> actor(stage, 0);
    const auto obey = [&](command c) {
        said.clear();
        actor.obey(c, hear);
        return said;
    };
    obey(begin(1));
    obey(start(3, 1));
    CHECK(obey(park(3, 2)) == "");
    CHECK(obey(park(3, 1)) == "[park 3] parked 3:half");
    CHECK(actor.idle());
    CHECK(obey(park(3, 1)) == ""); // was answered
    obey(start(4, 1));
    stage->tokens = 0;
    CHECK(obey(park(4, 1)) == "[park 4] parked 4:nothing");
    obey(start(5, 1)), obey(start(6, 1));
    said.clear();
    actor.step(hear);
    CHECK(said == "[park 5] [park 6] parked 5:nothing parked 6:nothing");
    CHECK(actor.idle());
    obey(start(7, 1));
    throwing = {"park"};
    CHECK(obey(park(7, 1)) == "[park 7] error failed 7");
    CHECK(actor.idle());
    throwing = {};
    rollout w; // whose stage cannot
    w.obey(begin(1));
    w.obey(start(8, 1));
    CHECK(w.obey(park(8, 1)) == "[abort 8] error failed 8");
}

TEST_CASE("a stage hears how long its quantum took before anybody hears what came of it") {
    struct scribe_with_a_clock : scribe {
        std::vector<double> took_;
        struct record {
            int rows = 0;
        };
        record step(std::vector<finished_rollout<std::string>>& out, std::stop_token stop) {
            const int rows = static_cast<int>(lanes.size());
            scribe::step(out, stop);
            return {rows};
        }
        void took(double seconds) {
            took_.push_back(seconds);
            call("took");
        }
    };
    throwing = {}, forgets = {}, ends = {2};
    const auto stage = std::make_shared<scribe_with_a_clock>();
    rollout_actor<scribe_with_a_clock, int> actor(stage, 0);
    const auto step = [&] {
        said.clear();
        actor.step(hear);
        return said;
    };
    for (command c : {begin(1), start(1, 1), start(2, 1)}) actor.obey(c, hear);
    CHECK(step() == "[step] [took] rolled 2");
    CHECK(actor.work().rows == 2);
    throwing = {"took"};
    ends = {};
    CHECK(step() == "[step] [took] error"); // and no sequence fails
    CHECK(!actor.idle());
    CHECK(actor.work().rows == 1);
    throwing = {"step"};
    CHECK(step() == "[step] [abort 1] error failed 1"); // a quantum that failed took no time worth telling
    throwing = {};
    for (const double t : stage->took_) CHECK((t >= 0 && t < 60));
    CHECK(stage->took_.size() == 2);
    for (command c : {start(3, 1)}) actor.obey(c, hear);
    actor.run();
    said.clear();
    actor.tell(4.5, hear); // as in virtual time
    CHECK(said == "[took]");
    CHECK(stage->took_.back() == 4.5);
}

TEST_CASE("with the news that it has the weights a worker says what more sequences would do to its pace") {
    struct elastic_scribe : scribe {
        double elasticity() { return -0.25; }
    };
    throwing = {}, forgets = {}, ends = {};
    rollout_actor<elastic_scribe, int> tells(std::make_shared<elastic_scribe>(), 0);
    rollout_actor<scribe, int> silent(std::make_shared<scribe>(), 0);
    const auto said_by = [](auto& actor) {
        double e = 0;
        for (command c : {begin(1), install(3, 1)})
            actor.obey(c, [&](auto&& r) {
                if (r.what.what == event::kind::synced) e = r.what.elasticity;
            });
        return e;
    };
    CHECK(said_by(tells) == -0.25);
    CHECK(said_by(silent) == untold);
}

TEST_CASE("weights never go back within a life") {
    rollout w;
    w.obey(begin(1));
    CHECK(w.obey(install(0, 1)) == "[install j0] synced j0/1");
    CHECK(w.obey(install(7, 1)) == "[install j7] synced j7/1");
    CHECK(w.obey(install(5, 1)) == "");
    CHECK(w.obey(install(7, 1)) == "synced j7/1"); // told twice
    w.obey(begin(2));                              // of a scheduler that went back to an earlier state, for one
    CHECK(w.obey(install(5, 2)) == "[install j5] synced j5/2");
}

TEST_CASE("a worker that cannot install has no weights to go on with: its life is over") {
    rollout w;
    w.obey(begin(1));
    w.obey(start(3, 1));
    throwing = {"install"};
    CHECK(w.obey(install(1, 1)) == "[install j1] [abort 3] error down/1");
    CHECK(w.actor.idle());
    CHECK(w.obey(start(4, 1)) == "");
    throwing = {};
    CHECK(w.obey(begin(2)) == "up/2");
    CHECK(w.obey(install(1, 2)) == "[install j1] synced j1/2");
}

TEST_CASE("weights that cannot be installed are passed over if others or a new life have been asked for since") {
    const auto with = [](std::deque<command> mail) {
        rollout w;
        throwing = {"install j1"};
        channel line{std::move(mail)};
        said.clear();
        run_rollout(w.actor, line);
        return said;
    };
    CHECK(with({begin(1), install(1, 1), silence, install(2, 1)}) ==
          "up/1 [install j1] [install j2] synced j2/1 (waits)");
    CHECK(with({begin(1), install(1, 1), silence, begin(2)}) == "up/1 [install j1] up/2 (waits)");
    CHECK(with({begin(1), install(1, 1), silence, start(3, 1)}) == "up/1 [install j1] error down/1 (waits)");
    // a failed installation may have left anything: what was there before is installed again
    rollout w;
    w.obey(begin(1));
    w.obey(install(1, 1));
    throwing = {"install j2"};
    struct {
        bool others() const { return true; }
        void drop() const {}
    } more;
    said.clear();
    command second = install(2, 1);
    w.actor.obey(second, hear, more);
    CHECK(said == "[install j2]");
    CHECK(w.obey(install(1, 1)) == "[install j1] synced j1/1");
}

TEST_CASE("weights that are superseded before their turn are not installed, and who has installed some is asked anew") {
    const auto with = [](std::deque<command> mail) {
        rollout w;
        channel line{std::move(mail)};
        said.clear();
        run_rollout(w.actor, line);
        return said;
    };
    CHECK(with({begin(1), install(1, 1), install(2, 1)}) == "up/1 [install j2] synced j2/1 (waits)");
    CHECK(with({begin(1), install(1, 1), begin(2), install(1, 2)}) == "up/1 up/2 [install j1] synced j1/2 (waits)");
    CHECK(with({begin(1), install(1, 1), install(2, 2)}) == "up/1 [install j1] synced j1/1 (waits)"); // another's
    CHECK(with({begin(1), install(5, 1), install(3, 1)}) == "up/1 [install j5] synced j5/1 (waits)"); // late
    // what came while it was installing waits for the scheduler's word, and nothing else does
    CHECK(with({begin(1), install(1, 1), silence, install(2, 1), silence, start(3, 1), install(2, 1), abort(3, 1)}) ==
          "up/1 [install j1] synced j1/1 [start 3] [install j2] synced j2/1 [abort 3] aborted 3 (waits)");
    // told twice of the same it installs nothing, so what came meanwhile is obeyed
    CHECK(with({begin(1), install(1, 1), silence, silence, install(1, 1), silence, install(2, 1)}) ==
          "up/1 [install j1] synced j1/1 synced j1/1 [install j2] synced j2/1 (waits)");
    struct prompt : channel { // says what is next as soon as it has heard
        bool more = true;
        void send(const reply& r) {
            hear(r);
            if (r.what.what == event::kind::synced && std::exchange(more, false)) mail.push_back(install(2, 1));
        }
    };
    rollout w;
    prompt line;
    line.mail = {begin(1), install(1, 1)};
    said.clear();
    run_rollout(w.actor, line);
    CHECK(said == "up/1 [install j1] synced j1/1 [install j2] synced j2/1 (waits)");
}

TEST_CASE("a start or an abort that throws is answered") {
    rollout w;
    w.obey(begin(1));
    throwing = {"start", "abort"};
    CHECK(w.obey(start(3, 1)) == "[start 3] error failed 3");
    CHECK(w.actor.idle());
    throwing = {"abort"};
    w.obey(start(3, 1));
    CHECK(w.obey(abort(3, 1)) == "[abort 3] error aborted 3");
    CHECK(w.actor.idle());
}

TEST_CASE("a quantum: what is finished is told, and what cannot be is a failure") {
    rollout w;
    std::stop_source stop;
    w.obey(begin(1, stop.get_token()));
    for (const sample_t n : {1, 2, 3}) w.obey(start(n, 1));
    ends = {1};
    CHECK(w.step() == "[step] rolled 1");
    stop.request_stop();
    CHECK(seen.stop_requested()); // it was its life's
    ends = {2};
    throwing = {"step"};
    CHECK(w.step() == "[step] [abort 3] error rolled 2 failed 3"); // 2 was finished before
    CHECK(w.actor.idle());
    throwing = {};
    w.obey(start(4, 1)), w.obey(start(5, 1));
    forgets = {4};
    CHECK(w.step() == "[step] [abort 4] [abort 5] error failed 4 failed 5");
    w.obey(start(6, 1));
    ends = {6};
    w.stage->answers_as = 1;
    CHECK(w.step() == "[step] [abort 6] error error failed 6"); // another's: its own is lost
}

TEST_CASE("a stage that gives one sequence up fails that one alone; one that throws, all") {
    rollout w;
    w.obey(begin(1));
    for (const sample_t n : {7, 8, 9}) w.obey(start(n, 1));
    fails = {8}, ends = {9};
    CHECK(w.step() == "[step] error rolled 9 failed 8");
    CHECK_FALSE(w.actor.idle());
    fails = ends = {};
    CHECK(w.step() == "[step]");
    w.obey(start(10, 1));
    fails = {7}, throwing = {"step"};
    CHECK(w.step() == "[step] [abort 7] [abort 10] error failed 7 failed 10");
    CHECK(w.actor.idle());
}

TEST_CASE("a rollout worker sleeps when nothing runs, and only then") {
    rollout w;
    channel line{{begin(1), install(1, 1), start(1, 1), abort(9, 1)}};
    ends = {1};
    said.clear();
    run_rollout(w.actor, line);
    CHECK(said == "up/1 [install j1] synced j1/1 [start 1] [step] rolled 1 (waits)");
}

TEST_CASE("a teacher: calls of its life, one entry a sequence, none where there is no score") {
    throwing = {};
    const auto with = [](judge stage, std::deque<command> mail) {
        said.clear();
        channel line{std::move(mail)};
        run_teacher<judge, std::string>(stage, 0, line);
        return said;
    };
    std::stop_source stop;
    CHECK(with({}, {begin(2, stop.get_token()), score_call(1, 1), score_call(2, 2)}) ==
          "up/2 [score] scored 2/2 (waits)");
    stop.request_stop();
    CHECK(seen.stop_requested());
    CHECK(with({.scores = 1}, {begin(1), score_call(1, 1)}) == "up/1 [score] scored 1/1 (waits)");
    CHECK(with({.scores = 0}, {begin(1), score_call(1, 1)}) ==
          "up/1 [score] not scored/1 (waits)"); // not "all of them"
    CHECK(with({.of = 1}, {begin(1), score_call(1, 1)}) == "up/1 [score] error not scored/1 (waits)");
    throwing = {"score"};
    CHECK(with({}, {begin(1), score_call(1, 1)}) == "up/1 [score] error not scored/1 (waits)");
}

TEST_CASE("the learner: calls of its life, and hooks in any") {
    throwing = {};
    const auto with = [](std::deque<command> mail) {
        said.clear();
        pupil stage;
        channel line{std::move(mail)};
        run_learner<pupil, std::string, int>(stage, line);
        return said;
    };
    const command hook{.what = order::hook, .life = 7, .hook = [] { call("hook"); }};
    std::stop_source stop;
    CHECK(with({begin(2, stop.get_token()), train_order(3, 1), hook, train_order(4, 2)}) ==
          "up/2 [hook] [train j4] learned j4/2 (waits)");
    stop.request_stop();
    CHECK(seen.stop_requested());
    throwing = {"train", "hook"};
    CHECK(with({begin(2), hook, train_order(4, 2)}) == "up/2 [hook] error [train j4] error not learned j4/2 (waits)");
}
