// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The trainer's stages under the scheduler, in any order in which a driver could carry its actions out: the schedules
// that promise it end in the weights of a plain loop, bit for bit, whatever answers and weights are lost on the way,
// and no schedule loses or doubles a sequence.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "opd/sched/scheduler_checks.hpp"
#include "pipeline/rollout.hpp"
#include "schedule/stages.hpp"
#include "settings/schedule.hpp"

namespace {

using namespace trainer;
namespace sched = opd::sched;

constexpr std::uint64_t first_sample = std::uint64_t{3} << 56;

const gcd_task& small_task() {
    static const gcd_task task(30, 6, 4);
    return task;
}

config settings(const char* estimator, const char* kind) {
    config c;
    for (model_shape* m : {&c.student_model, &c.teacher_model})
        *m = {.vocabulary = 15,
              .width = 16,
              .layers = 1,
              .heads = 2,
              .kv_heads = 1,
              .head_dim = 8,
              .ffn = 24,
              .max_length = small_task().max_length()};
    c.distill.estimator = estimator;
    c.distill.steps = 9;
    c.distill.prompts = 6;
    c.distill.slots = 7;
    c.distill.warmup = 2;
    c.schedule.kind = kind;
    c.schedule.score_batch = 4;
    return c;
}

transformer<float> model_of(const model_shape& shape, std::uint64_t seed) {
    transformer<float> m(shape);
    m.initialise(seed);
    return m;
}

// What was learnt from: per step the samples, in their order, and how stale their tokens were.
struct history {
    std::vector<float> weights;
    std::vector<std::vector<std::uint64_t>> consumed;
    std::int32_t most_stale = 0;
    index_t stale_tokens = 0, mismatched = 0, from_the_future = 0;
    index_t spanning = 0; // sequences of more than one version
    int retrained = 0;    // batches whose weights were lost
    sched::counters totals = {};
};

// What a run has but for its rollout workers.
struct learner_setup {
    explicit learner_setup(const config& c_, learner_stage::report after = {})
        : c(c_), student(model_of(c.student_model, 1)), teacher(model_of(c.teacher_model, 2)),
          learn(c, student, state, backend), lesson(c, learn, board, std::move(after)) {
        board.publish({}, learn.snapshot(0));
    }
    learner_setup(const learner_setup&) = delete;
    learner_setup& operator=(const learner_setup&) = delete;

    const config c;
    transformer<float> student;
    const transformer<float> teacher;
    adamw_state state;
    opd::cpu_backend backend{.threads = 1};
    learner learn;
    publication board;
    learner_stage lesson;
};

// Step after step: the batch of step v is drawn by the weights after max(0, v - lag) steps.
history plain_loop(const config& c, int lag) {
    history h;
    learner_setup all(c);
    teacher_scorer scorer(all.teacher, all.backend);
    std::vector<policy> versions;
    for (std::int32_t v = 0; v < c.distill.steps; ++v) {
        versions.push_back(all.learn.snapshot(v));
        const policy& mu = versions[static_cast<std::size_t>(std::max(0, v - lag))];
        std::vector<request> requests;
        h.consumed.emplace_back();
        for (int i = 0; i < c.distill.prompts; ++i) {
            h.consumed.back().push_back(first_sample + static_cast<std::uint64_t>(v * c.distill.prompts + i));
            requests.push_back(request_of(small_task(), c.run.seed, h.consumed.back().back()));
        }
        const auto t = roll_out(*mu.model, all.backend.team(), requests, sampling_of(c, small_task()), mu.version);
        const row_batch batch = pack(t, draws_for(c).count);
        teacher_cache cache;
        scorer.score(batch, cache_for(c), cache);
        all.learn.step(batch, cache, cosine_rate(c.distill.rate, 0.1, c.distill.warmup, v, c.distill.steps), v);
    }
    h.weights = all.student.weights;
    return h;
}

using finished = sched::finished_rollout<trajectory>;
using view = sched::sequence_view<trajectory, scored_sequence>;

// What goes wrong of the learner's calls, one in so many; 0: nothing.
struct faults {
    std::uint32_t answers =
        0; // the learner is counted as dead although it has published, and publishes again when it is late
    std::uint32_t weights = 0; // they are lost before everyone has them
};

// A driver that picks at random what happens next.
history driven(const config& c, int rollout_workers, int teachers, std::uint32_t seed, const faults& wrong = {}) {
    std::mt19937 random(seed);
    const auto goes = [&](std::uint32_t one_in) { return one_in > 0 && random() % one_in == 0; };
    history h;
    learner_setup all(c, [&](const learner_result& r, std::span<const view> batch, sched::version_t version) {
        h.mismatched += r.mismatched;
        for (const view& s : batch)
            for (const std::int32_t drawn : s.rolled->versions) {
                const auto age = static_cast<std::int32_t>(version) - drawn;
                h.from_the_future += age < 0;
                h.most_stale = std::max(h.most_stale, age);
                h.stale_tokens += age > 0;
            }
    });

    struct task {
        sched::action action;
        std::vector<sched::ticket> tickets;
    };
    struct rollout_worker {
        rollout_stage stage;
        std::deque<task> inbox;
    };
    const index_t lanes = c.distill.slots / rollout_workers;
    std::vector<std::unique_ptr<rollout_worker>> rollouts;
    for (int w = 0; w < rollout_workers; ++w)
        rollouts.push_back(std::make_unique<rollout_worker>(
            rollout_worker{{small_task(), sampling_of(c, small_task()), first_sample, lanes, all.board}, {}}));
    std::vector<std::unique_ptr<teacher_stage>> scorers;
    for (int w = 0; w < teachers; ++w) scorers.push_back(std::make_unique<teacher_stage>(all.teacher, c, 1));
    std::vector<std::deque<task>> calls(static_cast<std::size_t>(teachers));
    std::deque<task> lessons;
    std::vector<sched::weights> late; // what dead learners will publish

    sched::scheduler machine(schedule_of(c));
    sched::actions out;
    double now = 0;
    std::map<std::uint64_t, view> known; // by the scheduler's number
    const auto carry_out = [&] {
        for (const sched::action& a : out.items) {
            const auto named = [&] { return task{a, {out.of(a).begin(), out.of(a).end()}}; };
            switch (a.what) {
            case sched::action::kind::start:
            case sched::action::kind::abort:
                rollouts[static_cast<std::size_t>(a.worker)]->inbox.push_back({a, {}});
                break;
            case sched::action::kind::sync:
                for (std::size_t w = 0; w < rollouts.size(); ++w)
                    if (a.worker < 0 || a.worker == static_cast<std::int32_t>(w)) rollouts[w]->inbox.push_back({a, {}});
                break;
            case sched::action::kind::score:
                calls[static_cast<std::size_t>(a.worker)].push_back(named());
                break;
            case sched::action::kind::train:
                lessons.push_back(named());
                break;
            case sched::action::kind::park: // nobody asks for it
            case sched::action::kind::finished:
            case sched::action::kind::fail:
            case sched::action::kind::lost:
            case sched::action::kind::step:
                break;
            }
        }
        out.clear();
    };
    const auto tell = [&](const sched::event& e) {
        machine.on(e, now, out);
        machine.check_invariants();
        carry_out();
    };
    for (int w = 0; w < rollout_workers; ++w)
        tell(sched::event::up(sched::stage::rollout, w, static_cast<std::int32_t>(lanes)).of_life(1));
    for (int w = 0; w < teachers; ++w) tell(sched::event::up(sched::stage::teacher, w).of_life(1));
    sched::incarnation_t life = 1; // of the learner
    tell(sched::event::up(sched::stage::learner, 0).of_life(life));

    for (int quanta = 0; !machine.finished(); ++quanta) {
        REQUIRE(quanta < 200000); // a deadlock
        const auto who = random() % static_cast<std::uint32_t>(rollout_workers + teachers + 2);
        if (who < static_cast<std::uint32_t>(rollout_workers)) {
            rollout_worker& w = *rollouts[who];
            if (!w.inbox.empty() && random() % 2) {
                const sched::action a = w.inbox.front().action;
                w.inbox.pop_front();
                if (a.what == sched::action::kind::start) {
                    w.stage.start(a.ticket, nullptr);
                } else if (a.what == sched::action::kind::abort) {
                    w.stage.abort(a.ticket);
                    tell(sched::event::aborted(a.ticket));
                } else if (a.version > machine.version() && goes(wrong.weights)) {
                    for (auto& r : rollouts)
                        std::erase_if(r->inbox, [&](const task& t) {
                            return t.action.what == sched::action::kind::sync && t.action.job == a.job;
                        });
                    tell(sched::event::weights_lost(a.job));
                } else {
                    w.stage.install({a.version, a.job});
                    tell(sched::event::synced(static_cast<std::int32_t>(who), a.job).of_life(1));
                }
                continue;
            }
            std::vector<finished> done;
            w.stage.step(done, {});
            for (auto& d : done) {
                CHECK(d.versions.tokens == static_cast<std::int64_t>(d.sequence->response().size()));
                CHECK(d.sequence->sample == first_sample + d.ticket.sample);
                known[d.ticket.sample] = {
                    .ticket = d.ticket, .versions = d.versions, .rolled = d.sequence, .scored = {}};
                tell(sched::event::rolled_out(d.ticket, d.versions));
            }
        } else if (who < static_cast<std::uint32_t>(rollout_workers + teachers)) {
            const auto w = who - static_cast<std::uint32_t>(rollout_workers);
            if (calls[w].empty()) continue;
            const task t = calls[w].front();
            calls[w].pop_front();
            std::vector<std::shared_ptr<const trajectory>> rolled;
            for (const auto& k : t.tickets) rolled.push_back(known.at(k.sample).rolled);
            const auto scored = scorers[w]->score(rolled);
            for (std::size_t i = 0; i < scored.size(); ++i) known.at(t.tickets[i].sample).scored = scored[i];
            tell(sched::event::scored(t.action.job, t.action.worker).of_life(1));
        } else if (who == static_cast<std::uint32_t>(rollout_workers + teachers)) {
            if (lessons.empty()) continue;
            const task t = lessons.front();
            lessons.pop_front();
            std::vector<view> views;
            for (const auto& k : t.tickets) views.push_back(known.at(k.sample));
            const sched::train_call call{t.action.job, {t.action.version, t.action.from}};
            const index_t updates = all.lesson.train(views, call, {});
            // weights that nobody may see
            for (const auto& name : std::exchange(late, {}))
                all.board.publish(name, {std::make_shared<const transformer<float>>(model_of(c.student_model, 99)),
                                         static_cast<std::int32_t>(name.version)});
            if (goes(wrong.answers)) {
                late.push_back(call.makes());
                tell(sched::event::down(sched::stage::learner, 0).of_life(life));
                tell(sched::event::learned(t.action.job, updates).of_life(life));
                tell(sched::event::up(sched::stage::learner, 0).of_life(++life));
                continue;
            }
            h.retrained += call.from.version + 1 == static_cast<sched::version_t>(h.consumed.size());
            h.consumed.resize(static_cast<std::size_t>(call.from.version) + 1);
            h.consumed.back().clear();
            for (const view& v : views) {
                h.spanning += v.rolled->versions.front() != v.rolled->versions.back();
                h.consumed.back().push_back(v.rolled->sample);
            }
            tell(sched::event::learned(t.action.job, updates).of_life(life));
        } else if (machine.next_deadline() < sched::forever && random() % 8 == 0) {
            now = machine.next_deadline();
            tell({});
        }
    }
    h.weights = all.student.weights;
    h.totals = machine.totals();
    return h;
}

bool each_once(const history& h, const config& c) {
    std::set<std::uint64_t> seen;
    std::size_t count = 0;
    for (const auto& batch : h.consumed)
        for (const std::uint64_t s : batch) {
            seen.insert(s);
            ++count;
        }
    const auto all = static_cast<std::size_t>(c.distill.steps) * static_cast<std::size_t>(c.distill.prompts);
    return count == all && seen.size() == all && *seen.begin() == first_sample &&
           *seen.rbegin() == first_sample + all - 1;
}

} // namespace

TEST_CASE("answers to one prompt share it and nothing else") {
    const config c = settings("mc", "sync");
    const transformer<float> student = model_of(c.student_model, 1);
    opd::thread_team team(1);
    std::vector<request> requests;
    for (std::uint64_t i = 0; i < 24; ++i)
        requests.push_back(request_of(small_task(), c.run.seed, first_sample + i, 4));
    const auto all = roll_out(student, team, requests, sampling_of(c, small_task()), 0);
    std::set<std::vector<token>> prompts;
    int alike = 0;
    for (std::uint64_t i = 0; i < 24; ++i) {
        CHECK(requests[i].sample == first_sample + i);
        CHECK(prompt_of(first_sample + i, 4) == first_sample + i / 4);
        CHECK(prompt_of(first_sample + i, 1) == first_sample + i);
        // the n-th prompt is the n-th whatever answers it
        CHECK(requests[i].prompt == request_of(small_task(), c.run.seed, first_sample + i / 4).prompt);
        prompts.insert(requests[i].prompt);
        for (std::uint64_t other = i / 4 * 4; other < i; ++other) alike += all[i].tokens == all[other].tokens;
        // a response is keyed by its own sample, so it is the same whoever answers beside it
        const request alone{first_sample + i, requests[i].prompt};
        CHECK(roll_out(student, team, {&alone, 1}, sampling_of(c, small_task()), 0)[0] == all[i]);
    }
    CHECK(prompts.size() == 6);
    CHECK(alike <= 2); // of 36 pairs: an answer may end at once
    publication board;
    board.publish({}, {std::make_shared<const transformer<float>>(student), 0});
    const rollout_stage stage(small_task(), sampling_of(c, small_task()), first_sample, 2, board, 4);
    sched::ticket t;
    for (t.sample = 0; t.sample < 24; ++t.sample) CHECK(stage.prompt_of(t) == first_sample + t.sample / 4);
}

TEST_CASE("sync, k = 0 and tau = 0 are the plain loop, bit for bit, whatever happens first") {
    for (const char* estimator : {"reverse_kl", "mc", "threshold", "tail_bucket"}) {
        CAPTURE(estimator);
        const history reference = plain_loop(settings(estimator, "sync"), 0);
        std::vector<config> same = {settings(estimator, "sync"), settings(estimator, "step-off"),
                                    settings(estimator, "controlled")};
        same[1].schedule.k = same[2].schedule.k = 0;
        for (const char* update : {"keep", "abort", "finish_first"})
            for (const char* policy : {"capacity", "edf", "in_order", "drop", "retry", "cohort_fifo", "areal"}) {
                same.push_back(settings(estimator, "async"));
                same.back().schedule.tau = 0;
                same.back().schedule.weight_update = update;
                same.back().schedule.staleness_policy = policy;
            }
        std::uint32_t seed = 0;
        for (const config& c : same) {
            CAPTURE(c.schedule.kind);
            CAPTURE(c.schedule.staleness_policy);
            ++seed;
            const history h = driven(c, 1 + static_cast<int>(seed % 3), 1 + static_cast<int>(seed % 2), seed);
            CHECK(h.weights == reference.weights);
            CHECK(h.consumed == reference.consumed);
            CHECK(h.stale_tokens == 0);
            CHECK(h.from_the_future == 0);
            CHECK(h.mismatched == 0);
        }
        CHECK(plain_loop(settings(estimator, "sync"), 1).weights != reference.weights);
    }
}

TEST_CASE("k updates off is the loop whose batches are drawn k updates earlier, bit for bit") {
    for (int k : {1, 2, 4})
        for (const char* kind : {"step-off", "controlled"})
            for (const char* estimator : {"reverse_kl", "mc"}) {
                CAPTURE(k);
                CAPTURE(kind);
                config c = settings(estimator, kind);
                c.schedule.k = k;
                const history reference = plain_loop(c, k);
                for (std::uint32_t seed = 0; seed < 3; ++seed) {
                    const history h = driven(c, 1 + static_cast<int>(seed), 1 + static_cast<int>(seed % 2), seed);
                    CHECK(h.weights == reference.weights);
                    CHECK(h.consumed == reference.consumed);
                    CHECK(h.most_stale == k);
                    CHECK(h.mismatched == 0);
                }
            }
}

TEST_CASE("lost answers, lost weights and learners that publish late change nothing") {
    int retrained = 0;
    std::int64_t preempted = 0;
    for (const char* kind : {"sync", "step-off", "controlled", "async"}) {
        CAPTURE(kind);
        config c = settings("mc", kind);
        c.schedule.k = 2;
        c.schedule.tau = 0;
        const history reference = plain_loop(c, kind[1] == 't' || kind[0] == 'c' ? 2 : 0);
        for (const char* update : {"keep", "abort", "finish_first"})
            for (std::uint32_t seed = 0; seed < 3; ++seed) {
                CAPTURE(update);
                CAPTURE(seed);
                c.schedule.weight_update = update;
                const history h = driven(c, 1 + static_cast<int>(seed), 1, seed, {.answers = 3, .weights = 4});
                CHECK(h.weights == reference.weights);
                CHECK(h.consumed == reference.consumed);
                CHECK(h.mismatched == 0);
                retrained += h.retrained;
                preempted += h.totals.preempted;
            }
    }
    CHECK(retrained > 100);
    CHECK(preempted > 100);
}

TEST_CASE("a learner publishes in the name of the call; of an empty batch it publishes what it has") {
    int steps = 0;
    learner_setup all(settings("reverse_kl", "sync"), [&](const auto&...) { ++steps; });
    publication& board = all.board;
    const std::vector<float>& now = all.student.weights;
    teacher_stage scorer(all.teacher, all.c, 1);
    const auto batch = [&](std::uint64_t from) {
        std::vector<request> requests;
        for (std::uint64_t i = 0; i < 3; ++i)
            requests.push_back(request_of(small_task(), all.c.run.seed, first_sample + from + i));
        const policy mu = board.latest();
        std::vector<view> views;
        std::vector<std::shared_ptr<const trajectory>> rolled;
        for (auto& t : roll_out(*mu.model, all.backend.team(), requests, sampling_of(all.c, small_task()), mu.version))
            rolled.push_back(std::make_shared<const trajectory>(std::move(t)));
        const auto scored = scorer.score(rolled);
        for (std::size_t i = 0; i < rolled.size(); ++i) views.push_back({{}, 0, {}, rolled[i], scored[i]});
        return views;
    };
    const auto train = [&](const std::vector<view>& views, const sched::weights& from, std::uint64_t job) {
        return all.lesson.train(views, {job, from}, {});
    };
    const std::vector<view> first = batch(0), second = batch(3);
    CHECK(train(first, {0, 0}, 3) == 1);
    const std::vector<float> once = now;
    const policy made = board.get({1, 3});
    CHECK(made.version == 1);
    CHECK(made.model->weights == once);
    // the answer is lost: the same batch again, in another call
    CHECK(train(first, {0, 0}, 5) == 1);
    CHECK(now == once);
    CHECK(steps == 1);
    CHECK(board.get({1, 5}).model == made.model);
    CHECK_THROWS_WITH(board.get({1, 3}),
                      doctest::Contains("version 1 of job 3 was asked for, version 1 of job 5 is published"));
    CHECK(board.get({0, 0}).version == 0); // what it went on from
    // the first call's learner was another one, and is late
    board.publish({1, 3}, {std::make_shared<const transformer<float>>(all.teacher), 1});
    CHECK(board.get({1, 5}).model == made.model);
    CHECK_THROWS_WITH(board.get({1, 3}), doctest::Contains("was asked for"));
    CHECK_THROWS_WITH(train(second, {0, 0}, 6), doctest::Contains("from other sequences"));
    CHECK_THROWS_WITH(train(first, {0, 1}, 6), doctest::Contains("from other sequences or weights"));

    CHECK(train({}, {1, 5}, 7) == 0);
    CHECK(now == once);
    CHECK(board.get({2, 7}).version == 2);
    CHECK(board.get({2, 7}).model->weights == once);
    CHECK(board.get({1, 5}).model == made.model);
    CHECK_THROWS(board.get({0, 0}));
    CHECK(train(second, {2, 7}, 8) == 1);
    CHECK(now != once);
    CHECK(steps == 2);
}

TEST_CASE("workers install exactly the publication that they are told of") {
    const config c = settings("mc", "async");
    const auto model = [&](std::uint64_t seed) {
        return std::make_shared<const transformer<float>>(model_of(c.student_model, seed));
    };
    const sched::ticket ticket{.sample = 4, .slot = 0, .attempt = 1, .worker = 0, .incarnation = 1, .lane = 0};
    // what is drawn after one more install
    const auto drawn = [&](publication& board, const sched::weights& w) {
        rollout_stage stage(small_task(), sampling_of(c, small_task()), first_sample, 1, board);
        stage.install(w);
        stage.start(ticket, nullptr);
        sched::archive_writer written;
        written(stage);
        rollout_stage again(small_task(), sampling_of(c, small_task()), first_sample, 1, board);
        sched::archive_reader in(written.bytes);
        in(again); // with the weights that it had
        std::vector<finished> out;
        while (again.running() > 0) again.step(out, {});
        REQUIRE(out.size() == 1);
        CHECK(out[0].ticket == ticket);
        return *out[0].sequence;
    };
    for (const bool deltas : {false, true}) {
        CAPTURE(deltas);
        publication board({deltas, deltas}), other({deltas, deltas});
        board.publish({1, 3}, {model(1), 1});
        const trajectory of_first = drawn(board, {1, 3});
        board.publish({1, 5}, {model(2), 1}); // of the same version, made again
        board.publish({1, 3}, {model(1), 1}); // late
        const trajectory of_second = drawn(board, {1, 5});
        CHECK_FALSE(of_first == of_second);
        other.publish({1, 1}, {model(2), 1});
        CHECK(of_second == drawn(other, {1, 1}));
        rollout_stage stage(small_task(), sampling_of(c, small_task()), first_sample, 1, board);
        CHECK_THROWS_WITH(stage.install({1, 3}), doctest::Contains("version 1 of job 3 was asked for"));
        CHECK_THROWS_WITH(stage.start(ticket, nullptr), doctest::Contains("before the first weights"));
    }
}

TEST_CASE("deltas: a worker that follows, one that joins late, one that missed the base") {
    const model_shape shape = settings("mc", "async").student_model;
    std::vector<std::shared_ptr<transformer<float>>> models;
    for (std::int32_t v = 0; v < 20; ++v) { // a few weights of each change
        models.push_back(std::make_shared<transformer<float>>(v == 0 ? model_of(shape, 1) : *models.back()));
        for (const opd::data::weight_target& p : parts_of(*models.back())) {
            const std::span w(reinterpret_cast<float*>(p.bytes.data()), p.bytes.size() / sizeof(float));
            for (std::size_t i = static_cast<std::size_t>(v); i < w.size(); i += 97) w[i] += 1e-3f;
        }
        models.back()->weights[0] = v % 2 == 0 ? 0.0f : -0.0f;
        models.back()->weights_changed();
    }
    publication board({true, true});
    weight_receiver follows, naps, sleeps, late;
    const auto take = [&](weight_receiver& r, const sched::weights& name, const transformer<float>& what) {
        const policy p = r.take(board, name);
        CHECK(p.version == name.version);
        CHECK(std::memcmp(p.model->weights.data(), what.weights.data(), what.weights.size() * sizeof(float)) == 0);
        CHECK(p.model->weights.size() == what.weights.size());
        CHECK(p.model.get() != &what); // memory of its own
        const auto a = p.model->layout.head;
        what.with(a, true, [&](const auto* wanted) {
            p.model->with(a, true, [&](const auto* got) {
                REQUIRE(sizeof *got == sizeof *wanted);
                CHECK(std::memcmp(got, wanted, static_cast<std::size_t>(a.size()) * sizeof *wanted) == 0);
            });
        });
        return p;
    };
    for (std::int32_t v = 0; v < 20; ++v) {
        const sched::weights name{v, static_cast<std::uint64_t>(v) + 1};
        board.publish(name, {models[static_cast<std::size_t>(v)], v});
        take(follows, name, *models[static_cast<std::size_t>(v)]);
        if (v % 4 == 0) take(naps, name, *models[static_cast<std::size_t>(v)]);
        if (v == 0 || v == 12) take(sleeps, name, *models[static_cast<std::size_t>(v)]);
    }
    publication_counts c = board.counts();
    CHECK(c.whole == 4); // the first of each of three, and who slept for longer than deltas are kept
    CHECK(c.missed == 1);
    CHECK(c.deltas == 19 + 16);
    CHECK(c.checked == 20 + 5 + 2);
    CHECK(c.whole_bytes / c.whole > 4 * static_cast<std::int64_t>(models[0]->weights.size()));
    CHECK(c.delta_bytes / c.deltas * 8 < c.whole_bytes / c.whole);
    take(late, {19, 20}, *models[19]);
    CHECK(board.counts().whole == 5);
    CHECK(board.counts().missed == 1);
    CHECK(board.counts().deltas == c.deltas);

    // a version that is made again: by the same weights nothing is sent; by others from the version before
    const policy before = follows.take(board, {19, 20});
    board.publish({19, 21}, {models[19], 19});
    CHECK(take(follows, {19, 21}, *models[19]).model == before.model);
    c = board.counts();
    board.publish({19, 22}, {models[5], 19});
    weight_receiver of_18;
    take(follows, {19, 22}, *models[5]);
    CHECK(board.counts().missed == 2);
    CHECK(board.counts().whole == c.whole + 1);
    const std::vector<float> old(before.model->weights);
    CHECK(old == models[19]->weights); // somebody may still draw from them
}

TEST_CASE("deltas: other bits than the learner's are noticed, on either side") {
    const model_shape shape = settings("mc", "async").student_model;
    const auto first = std::make_shared<transformer<float>>(model_of(shape, 1));
    const auto second = std::make_shared<transformer<float>>(*first);
    second->weights[7] += 1;
    for (const bool check : {false, true}) {
        publication board({true, check});
        weight_receiver worker;
        board.publish({0, 1}, {first, 0});
        worker.take(board, {0, 1});
        board.publish({1, 2}, {second, 1});
        second->weights[9] += 1; // after it was published
        if (check)
            CHECK_THROWS_WITH(worker.take(board, {1, 2}), doctest::Contains("--check-publications: version 1"));
        else
            CHECK_NOTHROW(worker.take(board, {1, 2}));
        second->weights[9] = first->weights[9];
    }
    publication board({true, false});
    weight_receiver worker;
    board.publish({0, 1}, {first, 0});
    const policy held = worker.take(board, {0, 1});
    board.publish({1, 2}, {second, 1});
    auto& bits = const_cast<std::vector<float>&>(held.model->weights); // as a stray write would
    bits[40] += 1;
    CHECK_THROWS_AS(worker.take(board, {1, 2}), opd::invalid_input);
    bits[40] = first->weights[40];
    CHECK(worker.take(board, {1, 2}).model->weights == second->weights);
}

TEST_CASE("a rollout stage gives out what runs on it, and another one goes on from that") {
    const config c = settings("mc", "async");
    publication board;
    const sched::weights name{5, 9};
    board.publish(name, {std::make_shared<const transformer<float>>(model_of(c.student_model, 1)), 5});
    const sampling o = sampling_of(c, small_task());
    rollout_stage whole(small_task(), o, first_sample, 3, board), first(small_task(), o, first_sample, 3, board),
        second(small_task(), o, first_sample, 5, board);
    const auto ticket = [](int i, int lane) {
        return sched::ticket{static_cast<sched::sample_t>(i), static_cast<std::uint32_t>(i), 1, 0, 1, lane};
    };
    CHECK_THROWS_WITH(whole.start(ticket(0, 0), nullptr), doctest::Contains("before the first weights"));
    CHECK_THROWS_WITH(whole.install({4, 9}),
                      doctest::Contains("version 4 of job 9 was asked for, version 5 of job 9 is published"));
    for (rollout_stage* s : {&whole, &first, &second}) s->install(name);
    for (int i = 0; i < 3; ++i) {
        whole.start(ticket(i, i), nullptr);
        first.start(ticket(i, i), nullptr);
    }
    std::vector<finished> expected, got;
    while (whole.running() > 0) whole.step(expected, {});
    for (int i = 0; i < 5; ++i) first.step(got, {});
    std::vector<sched::partial_rollout<trajectory>> partials;
    first.export_partials(partials);
    REQUIRE(partials.size() + got.size() == 3);
    REQUIRE(!partials.empty());
    CHECK_THROWS_WITH(second.start(ticket(9, 0), partials[0].sequence), doctest::Contains("a prefix of sample"));
    CHECK(second.running() == 0);
    for (const auto& p : partials) {
        CHECK(p.sequence->response().size() > 0);
        second.start(ticket(static_cast<int>(p.ticket.sample), 4 - p.ticket.lane), p.sequence);
    }
    second.abort(ticket(static_cast<int>(partials[0].ticket.sample), 0)); // not there: another lane
    CHECK(second.running() == static_cast<index_t>(partials.size()));
    while (second.running() > 0) second.step(got, {});
    const auto by_sample = [](const finished& a, const finished& b) { return a.ticket.sample < b.ticket.sample; };
    std::sort(expected.begin(), expected.end(), by_sample);
    std::sort(got.begin(), got.end(), by_sample);
    REQUIRE(got.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(*got[i].sequence == *expected[i].sequence);
        CHECK(got[i].versions == expected[i].versions);
        CHECK(got[i].versions.oldest == 5);
    }
}

TEST_CASE("async learns from every sequence once, within its bound, in every mode") {
    index_t stale_tokens = 0, spanning = 0;
    for (const char* update : {"keep", "abort", "finish_first"})
        for (const char* policy : {"capacity", "cohort_fifo", "edf", "retry", "in_order", "areal"})
            for (std::uint32_t seed = 0; seed < 3; ++seed) {
                CAPTURE(update);
                CAPTURE(policy);
                config c = settings("mc", "async");
                c.schedule.tau = 2;
                c.schedule.weight_update = update;
                c.schedule.staleness_policy = policy;
                const history h = driven(c, 1 + static_cast<int>(seed), 1, seed, {.weights = seed * 3});
                CHECK(each_once(h, c));
                CHECK(h.totals.consumed == c.distill.steps * c.distill.prompts);
                CHECK(h.totals.failed == 0);
                CHECK(static_cast<int>(h.consumed.size()) == c.distill.steps);
                // what the current weights drew, the learner computes again
                CHECK(h.mismatched == 0);
                if (std::string(policy) != "capacity" && std::string(policy) != "areal") CHECK(h.most_stale <= 2);
                stale_tokens += h.stale_tokens;
                CHECK(h.from_the_future == 0);
                if (std::string(update) == "keep")
                    spanning += h.spanning;
                else
                    CHECK(h.spanning == 0);
            }
    CHECK(stale_tokens > 1000);
    CHECK(spanning > 100);
}
