// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: always
//
// Workers in other processes (support/remote_world.hpp): over a transport that does what it likes runs end, nothing is
// lost or learnt from twice; over one that does nothing wrong the scheduler decides as it does in one process; who says
// what he may not say is refused, and takes no memory.
//
// A failure names its world's seed; OPD_WORLD=<seed> runs that one alone, OPD_WORLDS=<n> runs n of them.
#include <cstdlib>
#include <deque>
#include <doctest/doctest.h>
#include <functional>
#include <string>
#include <vector>

#include "support/remote_world.hpp"

namespace {

using namespace opd::test;
using opd::index_t;

TEST_CASE("worlds of remote workers end, and nothing is lost or learnt from twice") {
    const bool one = std::getenv("OPD_WORLD") != nullptr;
    const std::uint64_t first = number_from("OPD_WORLD", 0),
                        last = one ? first + 1 : number_from("OPD_WORLDS", 2000 / worlds_share);
    remote_counts met;
    token_totals tokens;
    std::int64_t told = 0;
    std::uint64_t crashes = 0, frames = 0, processes = 0;
    for (std::uint64_t seed = first; seed < last; ++seed) {
        INFO("OPD_WORLD=" << seed);
        std::uint64_t c = 0, f = 0, n = 0;
        remote_counts t;
        const std::string wrong = outcome([&] {
            remote_world w(seed, remote_faults_of(seed));
            w.run();
            c = w.crashes(), f = w.frames(), n = w.deaths(), t = w.totals();
            publications::require(w.tokens().outstanding == 0 && w.tokens().busy_seconds > 0,
                                  "the run is over, and tokens are outstanding, or nobody was busy");
            tokens = tokens.then(w.tokens());
            told += w.told();
        });
        REQUIRE(wrong == "");
        crashes += c, frames += f, processes += n;
        met.sessions += t.sessions, met.silent += t.silent, met.overdue += t.overdue, met.replaced += t.replaced;
        met.broken += t.broken, met.stale += t.stale, met.repeated += t.repeated, met.late += t.late;
    }
    MESSAGE(frames << " frames, " << processes << " processes, " << met.sessions << " sessions, " << crashes
                   << " deaths of the scheduler; " << met.silent << " silent, " << met.overdue << " overdue, "
                   << met.replaced << " replaced; frames: " << met.broken << " broken, " << met.stale << " stale, "
                   << met.repeated << " repeated; " << met.late << " late replies; tokens: " << tokens.learnt
                   << " learnt, " << tokens.discarded << " discarded, " << tokens.lost << " lost, "
                   << tokens.idle_seconds << " s idle");
    if (last - first < 100) return;
    for (const std::int64_t n : {met.silent, met.overdue, met.replaced, met.broken, met.stale, met.repeated,
                                 static_cast<std::int64_t>(crashes), tokens.discarded, tokens.lost, told})
        CHECK(n > 5);
}

TEST_CASE("over a transport that does nothing wrong the scheduler decides as in one process") {
    std::uint64_t events = 0;
    for (std::uint64_t seed = 0; seed < 200 / worlds_share; ++seed) {
        INFO("OPD_WORLD=" << seed);
        remote_faults none;
        none.fails = seed % 3 == 0 && seed % 2 == 1; // without deadlines: with them stages hang, and workers are lost
        direct_world direct(seed, none.fails);
        direct.run();
        remote_world remote(seed, none);
        remote.run();
        const auto &a = direct.log(), &b = remote.log();
        // after the end workers leave, of which the other has none
        REQUIRE(b.size() >= a.size());
        std::size_t same = 0;
        while (same < a.size() && a[same] == b[same]) ++same;
        REQUIRE(same == a.size());
        events += same;
    }
    MESSAGE(events << " events");
}

// --- one session by hand

struct sink {
    std::vector<std::pair<std::string, std::string>> sent;
    void send(const std::string& peer, std::string f) { sent.emplace_back(peer, std::move(f)); }
};
struct notes {
    std::vector<std::string> saved, heard;
    std::size_t sent_before_save = 0;
    sink* wire = nullptr;
    void save(const remote_snapshot& s) {
        archive_writer out;
        out(s);
        if (saved.empty()) sent_before_save = wire->sent.size();
        saved.push_back(out.bytes);
    }
    void said(stage, std::int32_t, const std::string& what) { heard.push_back(what); }
};
using hand_driver = remote_driver<remote_drawn, remote_score, sink, notes>;

settings small(index_t sequences = 4) {
    settings s;
    s.batch = 2, s.schedule = async{.tau = 0, .policy = staleness_policy::in_order}, s.sequences = sequences;
    s.most_workers = 8, s.most_slots = 4, s.teacher_batch = 1;
    return s;
}
/// A worker whose frames a test writes.
struct hand {
    hand_driver& driver;
    sink& wire;
    std::string name;
    stage what;
    std::int32_t number = 0;
    remote_head head = {};
    std::uint64_t sent = 0, got = 0; // numbers of this session's frames

    std::vector<remote_frame> frames(std::vector<std::string>& keep) {
        std::vector<remote_frame> r;
        for (auto& [peer, bytes] : wire.sent)
            if (peer == name) keep.push_back(bytes);
        std::erase_if(wire.sent, [&](const auto& s) { return s.first == name; });
        for (const std::string& b : keep) r.push_back(read_frame(b, 1 << 20));
        return r;
    }
    std::string hello(std::uint64_t session, std::int32_t slots = 1) const {
        return frame_bytes({.what = remote_kind::hello, .stage = what, .worker = number, .number = session},
                           {reinterpret_cast<const char*>(&slots), sizeof slots});
    }
    /// What the last frame to it says.
    remote_head last() {
        std::vector<std::string> keep;
        const auto all = frames(keep);
        REQUIRE(!all.empty());
        return all.back().head;
    }
    void join(std::uint64_t session, double now) {
        driver.hear(name, hello(session), now);
        head = last();
        REQUIRE(head.what == remote_kind::welcome);
        CHECK(head.number == session);
        sent = got = 0;
        say({.what = event::up(what, number, 1).of_life(head.life)}, now);
    }
    std::string data(std::string_view message) {
        const auto size = static_cast<std::uint32_t>(message.size() << 1 | 1);
        std::string body(reinterpret_cast<const char*>(&size), sizeof size);
        return raw(body.append(message));
    }
    std::string raw(const std::string& body) {
        remote_head h = head;
        h.what = remote_kind::data, h.number = ++sent, h.heard = got;
        return frame_bytes(h, body);
    }
    std::string data(const remote_reply& r) {
        archive_writer out;
        out(remote_word::content, r);
        return data(out.bytes);
    }
    void say(const remote_reply& r, double now) { driver.hear(name, data(r), now); }
    /// Commands that it was sent, after a tick.
    std::vector<remote_command> commands(double now) {
        driver.tick(now);
        std::vector<std::string> keep;
        std::vector<remote_command> r;
        for (const remote_frame& f : frames(keep)) {
            if (f.head.what != remote_kind::data || f.head.number <= got) continue;
            got = f.head.number;
            for (std::string_view rest = f.body; !rest.empty();) {
                std::uint32_t size = 0;
                std::memcpy(&size, rest.data(), sizeof size);
                archive_reader in(rest.substr(sizeof size, size >> 1));
                remote_word word{};
                in(word);
                if (word == remote_word::content) in(r.emplace_back());
                rest.remove_prefix(sizeof size + (size >> 1));
            }
        }
        return r;
    }
};
struct desk {
    sink wire;
    notes told;
    hand_driver driver;
    hand rollout, teacher, learner;
    explicit desk(const remote_options& o = {}, index_t sequences = 4)
        : told{.saved = {}, .heard = {}, .sent_before_save = 0, .wire = &wire},
          driver(small(sequences), o, 5, wire, told), rollout{driver, wire, "r", stage::rollout},
          teacher{driver, wire, "t", stage::teacher}, learner{driver, wire, "l", stage::learner} {}
    remote_reply rolled(const ticket& t, version_t v = 0) {
        return {.what = event::rolled_out(t, {v, v, double(v), 3}),
                .sequence = std::make_shared<const remote_drawn>(remote_drawn{t.sample, t.attempt, {}})};
    }
    ticket first(double now) {
        rollout.join(1, now);
        rollout.commands(now);
        rollout.say({.what = event::synced(0, 0).of_life(rollout.head.life)}, now);
        const auto all = rollout.commands(now);
        REQUIRE(all.size() == 1);
        REQUIRE(all[0].what == remote_command::kind::start);
        return all[0].ticket;
    }
};

TEST_CASE("what is no frame is counted, and nothing else") {
    desk d;
    const std::string good = d.rollout.hello(1);
    for (std::size_t n = 0; n < good.size(); ++n) d.driver.hear("r", good.substr(0, n), 0);
    for (std::size_t n = 0; n < good.size(); ++n) {
        std::string bad = good;
        bad[n] = static_cast<char>(bad[n] ^ 4);
        d.driver.hear("r", bad, 0);
    }
    d.driver.hear("r", std::string((256 << 10) + 1, 'x'), 0);
    CHECK(d.driver.counts().broken == static_cast<std::int64_t>(2 * good.size() + 1));
    CHECK(d.wire.sent.empty());
    // frames that are ours to send, workers that cannot be
    for (const remote_kind k : {remote_kind::welcome, remote_kind::gone, remote_kind::over})
        d.driver.hear("r", frame_bytes({.what = k, .stage = stage::rollout, .worker = 0, .epoch = 5, .number = 1}), 0);
    for (hand w : {hand{d.driver, d.wire, "r", stage::rollout, 8}, hand{d.driver, d.wire, "r", stage::rollout, -1},
                   hand{d.driver, d.wire, "r", stage::learner, 1}})
        d.driver.hear("r", w.hello(1), 0);
    d.driver.hear("r", d.rollout.hello(0), 0);
    d.driver.hear("r", d.rollout.hello(1, 0), 0);
    d.driver.hear("r", d.rollout.hello(1, 5), 0);
    CHECK(d.driver.counts().broken == static_cast<std::int64_t>(2 * good.size() + 10));
    CHECK(d.driver.counts().sessions == 0);
    CHECK(d.wire.sent.empty());
}

TEST_CASE("a session: a hello that comes again, an older one, another process, other epochs") {
    desk d;
    d.rollout.join(3, 1);
    CHECK(d.rollout.head.life == 1);
    CHECK(d.rollout.head.epoch == 5);
    CHECK(d.driver.scheduler().is_up(stage::rollout, 0));
    d.driver.hear("r", d.rollout.hello(3), 1); // again: the same answer
    CHECK(d.rollout.last() == d.rollout.head);
    d.driver.hear("r", d.rollout.hello(2), 1); // of before: none
    CHECK(d.wire.sent.empty());
    CHECK(d.driver.counts().repeated == 2);
    // a frame that comes again
    const std::string again = d.rollout.data({.what = event::down(stage::rollout, 0).of_life(1)});
    std::string other = again; // one of another epoch
    d.rollout.sent = 0;
    d.driver.hear("r", d.rollout.data({.what = event::down(stage::rollout, 0).of_life(1)}), 1);
    CHECK(d.driver.scheduler().is_up(stage::rollout, 0));
    remote_head old = d.rollout.head;
    old.what = remote_kind::data, old.epoch = 4, old.number = 2;
    d.driver.hear("r", frame_bytes(old), 1);
    CHECK(d.driver.counts().stale == 1);
    CHECK(d.rollout.last().what == remote_kind::gone);
    // another process takes the number over; the old one's frames count for nothing, and it does not take it back
    hand next{d.driver, d.wire, "s", stage::rollout};
    next.join(1, 2);
    CHECK(next.head.life == 2);
    CHECK(d.driver.counts().replaced == 1);
    CHECK(d.rollout.last().what == remote_kind::gone);
    d.driver.hear("r", again, 2);
    CHECK(d.driver.counts().stale == 2);
    d.driver.hear("r", d.rollout.hello(4), 2);
    CHECK(d.driver.counts().sessions == 2);
    CHECK(d.driver.scheduler().incarnation_of(stage::rollout, 0) == 2);
    // until that one falls silent
    for (double t = 2; t < 8; t += 0.5) d.driver.tick(t);
    CHECK(d.driver.counts().silent == 1);
    CHECK(!d.driver.scheduler().is_up(stage::rollout, 0));
    d.rollout.join(4, 8);
    CHECK(d.rollout.head.life == 3);
    // a process that was stopped has not listened: nobody was silent
    d.driver.tick(100);
    CHECK(d.driver.scheduler().is_up(stage::rollout, 0));
    // it leaves
    remote_head bye = d.rollout.head;
    bye.what = remote_kind::bye;
    d.driver.hear("r", frame_bytes(bye), 100);
    CHECK(d.driver.counts().left == 1);
    CHECK(!d.driver.scheduler().is_up(stage::rollout, 0));
}

TEST_CASE("so many processes, and no more") {
    remote_options o;
    o.peers = 2;
    desk d(o);
    d.rollout.join(1, 0);
    d.teacher.join(1, 0);
    d.driver.hear("x", hand{d.driver, d.wire, "x", stage::rollout, 3}.hello(1), 0);
    CHECK(d.driver.counts().crowded == 1);
    CHECK(d.wire.sent.empty());
    for (int i = 0; i < 100; ++i) { // each is forgotten for the next
        hand h{d.driver, d.wire, "p" + std::to_string(i), stage::teacher};
        h.join(1, 1);
        d.wire.sent.clear();
    }
    CHECK(d.driver.counts().sessions == 102);
    CHECK(d.driver.counts().crowded == 1);
}

TEST_CASE("who says what he may not ends his session; what he was not asked counts for nothing") {
    using make = std::function<std::string(desk&, const ticket&)>;
    const auto reply_of = [](std::function<remote_reply(desk&, const ticket&)> f) {
        return make([f](desk& d, const ticket& t) { return d.rollout.data(f(d, t)); });
    };
    const std::vector<make> wrong = {
        [](desk& d, const ticket&) { return d.rollout.data(std::string_view()); },
        [](desk& d, const ticket&) { return d.rollout.data("\x09"); },
        [](desk& d, const ticket&) { return d.rollout.data(std::string_view("\0", 1)); },
        [](desk& d, const ticket&) { return d.rollout.data(std::string("\x01") + std::string(8, '\0')); }, // keep_from
        [](desk& d, const ticket&) { return d.rollout.raw("abc"); },                  // a part without a length
        [](desk& d, const ticket&) { return d.rollout.raw(std::string(4, '\xff')); }, // longer than its frame
        reply_of([](desk&, const ticket& t) {
            return remote_reply{.what = event::rolled_out(t, {0, 0, 0, 3})};
        }),
        reply_of([](desk& d, const ticket& t) {
            remote_reply r = d.rolled(t);
            r.what.worker = 1;
            return r;
        }),
        reply_of([](desk& d, const ticket& t) {
            remote_reply r = d.rolled(t);
            r.what.incarnation = 2;
            return r;
        }),
        reply_of([](desk& d, const ticket& t) {
            remote_reply r = d.rolled(t);
            r.what.versions.mean = std::nan("");
            return r;
        }),
        reply_of([](desk& d, const ticket& t) {
            remote_reply r = d.rolled(t);
            r.prefixes.resize(1);
            return r;
        }),
        reply_of([](desk& d, const ticket& t) {
            remote_reply r = d.rolled(t);
            r.what = event::parked(t, {});
            return r;
        }),
        reply_of([](desk& d, const ticket& t) { // both drawn and lost
            remote_reply r = d.rolled(t);
            r.lost = {t};
            return r;
        }),
        reply_of([](desk&, const ticket& t) { // another's
            remote_reply r{.what = event::rollout_failed(t), .lost = {t}};
            ++r.lost[0].sample;
            return r;
        }),
        reply_of([](desk& d, const ticket&) {
            return remote_reply{.what = event::learned(1).of_life(d.rollout.head.life)};
        }),
        reply_of([](desk& d, const ticket&) {
            remote_reply r{.what = event::of(event::kind::stop)};
            r.what.stage = stage::rollout, r.what.worker = 0, r.what.incarnation = d.rollout.head.life;
            return r;
        }),
        [](desk& d, const ticket& t) {
            archive_writer out;
            out(remote_word::content, d.rolled(t), true); // a byte more
            return d.rollout.data(out.bytes);
        },
        [](desk& d, const ticket&) {
            remote_head h = d.rollout.head;
            h.what = remote_kind::data, h.number = ++d.rollout.sent, h.heard = 1000; // of what was never sent
            return frame_bytes(h);
        }};
    for (std::size_t i = 0; i < wrong.size(); ++i) {
        INFO("case " << i);
        desk d;
        const ticket t = d.first(0);
        d.driver.hear("r", wrong[i](d, t), 1);
        CHECK(d.driver.counts().refused == 1);
        CHECK(d.told.heard.size() == 1);
        CHECK(!d.driver.scheduler().is_up(stage::rollout, 0));
        CHECK(d.rollout.last().what == remote_kind::gone);
        d.driver.scheduler().check_invariants();
        d.rollout.join(2, 2);
        CHECK(d.driver.scheduler().is_up(stage::rollout, 0));
    }
    SUBCASE("an attempt that is another's, or was answered") {
        desk d;
        const ticket t = d.first(0);
        ticket other = t;
        ++other.attempt;
        d.rollout.say(d.rolled(other), 1);
        other = t, other.lane = 77;
        d.rollout.say(d.rolled(other), 1);
        CHECK(d.driver.counts().late == 2);
        CHECK(d.driver.payloads().view(t).rolled == nullptr);
        d.rollout.say(d.rolled(t), 1);
        CHECK(d.driver.payloads().view(t).rolled->sample == t.sample);
        d.rollout.say(d.rolled(t), 1);
        CHECK(d.driver.counts().late == 3);
        CHECK(d.driver.counts().refused == 0);
    }
    SUBCASE("versions that it cannot have: the attempt has failed, as in one process") {
        desk d;
        const ticket t = d.first(0);
        remote_reply r = d.rolled(t);
        r.what.versions = {0, 9, 4, 3};
        d.rollout.say(r, 1);
        CHECK(d.driver.counts().unfit == 1);
        const auto again = d.rollout.commands(1);
        REQUIRE(again.size() == 1);
        CHECK(again[0].ticket.attempt == t.attempt + 1);
    }
    SUBCASE("a score for what it was not asked about") {
        desk d;
        const ticket t = d.first(0);
        d.teacher.join(1, 0);
        d.rollout.say(d.rolled(t), 1);
        const auto asked = d.teacher.commands(1);
        REQUIRE(asked.size() == 1);
        REQUIRE(asked[0].tickets.size() == 1);
        CHECK(asked[0].tickets[0].sample == t.sample);
        CHECK(asked[0].sequences.at(0)->sample == t.sample);
        const auto score = std::make_shared<const remote_score>();
        remote_reply r{
            .what = event::scored(asked[0].job + 7, 0).of_life(1), .tickets = asked[0].tickets, .scores = {score}};
        d.teacher.say(r, 1); // another call
        CHECK(d.driver.counts().late == 1);
        r.what.job = asked[0].job;
        ++r.tickets[0].sample;
        d.teacher.say(r, 1);
        CHECK(d.driver.counts().refused == 1);
        CHECK(!d.driver.scheduler().is_up(stage::teacher, 0));
    }
    SUBCASE("the loss of what it was not asked about") {
        desk d;
        const ticket t = d.first(0);
        d.teacher.join(1, 0);
        d.rollout.say(d.rolled(t), 1);
        const auto asked = d.teacher.commands(1);
        REQUIRE(asked.size() == 1);
        remote_reply r{.what = event::score_failed(asked[0].job, 0).of_life(1), .lost = asked[0].tickets};
        ++r.lost[0].attempt;
        d.teacher.say(r, 1);
        CHECK(d.driver.counts().refused == 1);
        CHECK(d.driver.scheduler().totals().lost_payloads == 0);
    }
}

TEST_CASE("nothing is sent before a snapshot of the epoch is saved, and only a saved one lets publications go") {
    desk d({}, 8);
    CHECK(d.told.saved.size() == 1);
    CHECK(d.told.sent_before_save == 0);
    d.learner.join(1, 0);
    d.teacher.join(1, 0);
    ticket t = d.first(0);
    for (int step = 1; step <= 2; ++step) {
        std::vector<remote_command> asked;
        for (int i = 0; i < 2; ++i) {
            d.rollout.say(d.rolled(t, step - 1), step);
            asked = d.teacher.commands(step);
            REQUIRE(asked.size() == 1);
            d.teacher.say({.what = event::scored(asked[0].job, 0).of_life(1),
                           .tickets = asked[0].tickets,
                           .scores = {std::make_shared<const remote_score>()}},
                          step);
            if (i == 0) t = d.rollout.commands(step).at(0).ticket;
        }
        asked = d.learner.commands(step);
        REQUIRE(asked.size() == 1);
        REQUIRE(asked[0].batch.size() == 2);
        const std::uint64_t job = asked[0].call.job;
        d.learner.say({.what = event::learned(job).of_life(1)}, step);
        REQUIRE(d.rollout.commands(step).at(0).weights == weights{step, job});
        d.rollout.say({.what = event::synced(0, job).of_life(1)}, step);
        CHECK(d.told.saved.size() == static_cast<std::size_t>(step) + 1);
        remote_snapshot s;
        archive_reader in(d.told.saved.back());
        in(s);
        CHECK(s.weights == weights{step, job});
        t = d.rollout.commands(step).at(0).ticket;
        // the learner is told, by the name of those weights
        std::vector<std::string> keep;
        d.driver.tick(step);
        bool said = false;
        for (const remote_frame& f : d.learner.frames(keep))
            said = said || (f.body.size() == 13 && static_cast<remote_word>(f.body[4]) == remote_word::keep_from &&
                            std::memcmp(f.body.data() + 5, &job, sizeof job) == 0);
        CHECK(said);
        CHECK(t.sample == static_cast<sample_t>(2 * step));
    }
}

TEST_CASE("messages arrive once each and in order, whatever their lengths and whatever the channel does") {
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        dice d{seed};
        remote_options o;
        o.frame = static_cast<std::uint32_t>(d.of(256, 2000)), o.window = static_cast<std::uint32_t>(d.of(1, 8));
        o.message = 20000;
        remote_link from(o), to(o);
        std::vector<std::string> sent, got;
        std::deque<std::string> there, back;
        double now = 0;
        for (int turns = 0; turns < 3000 && (turns < 20 || !from.settled()); ++turns) {
            if (turns < 20)
                for (index_t n = d.of(0, 3); n > 0; --n) {
                    sent.emplace_back(static_cast<std::size_t>(d(0.1) ? d.of(0, 20000) : d.of(0, 90)),
                                      static_cast<char>(d.of(0, 255)));
                    from.post(sent.back());
                }
            const auto put = [&](std::deque<std::string>& box) {
                return [&](std::uint64_t number, std::uint64_t heard, std::string_view body) {
                    std::string f = frame_bytes({.number = number, .heard = heard}, body);
                    CHECK(f.size() <= o.frame);
                    for (index_t n = d(0.2) ? d.of(0, 2) : 1; n > 0; --n)
                        box.insert(box.begin() + (d(0.2) ? d.of(0, static_cast<index_t>(box.size()))
                                                         : static_cast<index_t>(box.size())),
                                   f);
                };
            };
            from.flush(now, put(there));
            to.flush(now, put(back));
            for (index_t n = d.of(0, 6); n > 0 && !there.empty(); --n, there.pop_front())
                to.take(read_frame(there.front(), o.frame), now, [&](std::string_view m) {
                    got.emplace_back(m);
                    return true;
                });
            for (index_t n = d.of(0, 6); n > 0 && !back.empty(); --n, back.pop_front())
                from.take(read_frame(back.front(), o.frame), now, [](std::string_view) { return true; });
            now += 0.3 * d();
        }
        REQUIRE(got == sent);
        CHECK(from.settled());
    }
}

TEST_CASE("options, and messages that are too long") {
    const auto refused = [](auto change) {
        remote_options o;
        change(o);
        try {
            o.check();
        } catch (const opd::invalid_input& e) {
            return e.argument;
        }
        return std::string();
    };
    CHECK(refused([](remote_options&) {}) == "");
    CHECK(refused([](remote_options& o) { o.resend = 0; }) == "resend");
    CHECK(refused([](remote_options& o) { o.resend = 5; }) == "resend");
    CHECK(refused([](remote_options& o) { o.beat = 5; }) == "beat");
    CHECK(refused([](remote_options& o) { o.silence = forever; }) == "beat");
    CHECK(refused([](remote_options& o) { o.frame = 255; }) == "frame");
    CHECK(refused([](remote_options& o) { o.message = 63; }) == "message");
    CHECK(refused([](remote_options& o) { o.waiting = o.message - 1; }) == "waiting");
    CHECK(refused([](remote_options& o) { o.window = 0; }) == "window");
    CHECK(refused([](remote_options& o) { o.peers = 0; }) == "peers");
    CHECK(refused([](remote_options& o) { o.save_every = -1; }) == "save_every");
    remote_options o;
    o.message = 100;
    remote_link link(o);
    link.post(std::string(100, 'x'));
    CHECK_THROWS_AS(link.post(std::string(101, 'x')), opd::invalid_input);
    // parts that together exceed what a message may have
    remote_link other(o);
    std::string body;
    for (int i = 0; i < 2; ++i) {
        const std::uint32_t part = 60 << 1;
        body.append(reinterpret_cast<const char*>(&part), sizeof part).append(60, 'x');
    }
    const std::string f = frame_bytes({.number = 1}, body);
    CHECK_THROWS_AS(other.take(read_frame(f, 1000), 0, [](std::string_view) { return true; }), opd::invalid_input);
    CHECK_THROWS_AS(
        (remote_worker<remote_drawn, remote_score, sink>(stage::learner, 1, 1, {}, *std::make_unique<sink>())),
        opd::invalid_input);
    payload_ref long_name{.where = std::string(513, 'x')};
    archive_writer out;
    CHECK_THROWS_AS(out(long_name), opd::invalid_input);
}

} // namespace
