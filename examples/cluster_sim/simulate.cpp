// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "simulate.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "opd/sched/meters/token_ledger.hpp"
#include "opd/sched/metrics.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

// What is known of the sequence in a slot.
struct sequence {
    sample_t sample = 0;
    double response = 0, prompt = 0; // tokens
    double begun = 0;
};

// The stages' times. Lengths are looked up in the slots that the observer fills: drawing them anew costs more.
struct stages {
    const config* c;
    const entry* e;
    const std::vector<sequence>* slots;
    std::vector<bool> joined; // rollout workers that came late, and have had weights
    simulated_job teacher_time, learner_time, sync_time;

    stages(const config& config_, const entry& entry_, const std::vector<sequence>& slots_)
        : c(&config_), e(&entry_), slots(&slots_), joined(static_cast<std::size_t>(entry_.rollout_workers)),
          teacher_time(config_.teacher.job), learner_time(config_.learner.job), sync_time(config_.sync) {
        teacher_time.what = draw_of::teacher_time;
        learner_time.what = draw_of::learner_time;
        sync_time.what = draw_of::sync_time;
        teacher_time.seed = learner_time.seed = sync_time.seed = c->seed;
        learner_time.per_item /= e->learner_gpus;
        learner_time.per_token /= e->learner_gpus;
    }

    simulated_rollout rollout(std::int32_t worker) const {
        engine_speed speed = c->rollout.speed;
        speed.factor *= draw(c->rollout.factor, c->seed, draw_of::worker_speed, static_cast<std::uint64_t>(worker));
        return {speed, c->rollout.lanes};
    }
    void start(simulated_rollout& engine, const ticket& t) const {
        const sequence& s = (*slots)[t.slot];
        engine.start(t, s.response, s.prompt);
    }
    double teacher(std::uint64_t job, std::int32_t, std::span<const ticket> tickets) const {
        return teacher_time.seconds(job, 0, static_cast<index_t>(tickets.size()), tokens(tickets));
    }
    double learner(std::uint64_t job, const weights& w, std::span<const ticket> tickets) const {
        if (tickets.empty()) return 0; // it publishes what it has
        const double turn = e->sharing == sharing::none ? 0 : c->learner.turn;
        double load = 1;
        for (const auto& [from, factor] : c->learner.load)
            if (w.version >= from) load = factor;
        return turn + load * learner_time.seconds(job, 0, static_cast<index_t>(tickets.size()), tokens(tickets));
    }
    // Whoever is there from the start has the first weights.
    double transfer(std::int32_t worker, const weights& w) const {
        return c->weights.meanwhile && must_come(worker, w) ? transfer_seconds(*c, *e, worker) : 0;
    }
    double sync(std::int32_t worker, const weights& w) {
        if (!must_come(worker, w)) return 0;
        double seconds = sync_time.seconds(static_cast<std::uint64_t>(w.version), 0, e->rollout_workers, 0);
        if (!c->weights.meanwhile) seconds += transfer_seconds(*c, *e, worker);
        if (std::vector<bool>::reference had = joined[static_cast<std::size_t>(worker)]; comes_late(worker) && !had) {
            had = true;
            seconds += c->rollout.joiners.install;
        }
        return seconds;
    }

private:
    bool comes_late(std::int32_t worker) const { return worker >= e->rollout_workers - c->rollout.joiners.count; }
    bool must_come(std::int32_t worker, const weights& w) const { return w.version > 0 || comes_late(worker); }
    double tokens(std::span<const ticket> tickets) const {
        double sum = 0;
        for (const ticket& t : tickets) sum += (*slots)[t.slot].response + (*slots)[t.slot].prompt;
        return sum;
    }
};

// Meters and the trace.
class observer {
public:
    run_metrics metrics;
    std::vector<sequence> slots;
    token_ledger ledger;
    struct {
        double since = -1, waited = 0;   // from the end of the warm-up on
        double running = 0, scoring = 0; // sequence-seconds in rollout; with or before the teacher
        double lag_sum = 0, consumed = 0;
        std::vector<index_t> permits;
    } settled;

    observer(const config& c, opd::sched::trace* recorded)
        : metrics(run_metrics_options{
              .rollout_workers = 0, .teacher_workers = 0, .learner_workers = 0, .warmup = c.warmup}),
          lengths_{c.lengths.response, c.lengths.prompt, c.seed, c.group, c.lengths.redraw}, lanes_(c.rollout.lanes),
          warmup_(c.warmup), trace_(recorded) {
        metrics.start(0);
    }

    void up(stage s, std::int32_t w, double t) { metrics.stages.up(s, w, t), ledger.up(s, w, t); }
    void down(stage s, std::int32_t w, double t) { metrics.stages.down(s, w, t), ledger.down(s, w, t); }
    void drawn(const ticket& which, std::int64_t tokens, double t) { ledger.drawn(which, tokens, t); }
    void begin(stage s, std::int32_t w, double t, activity what) {
        ledger.begin(s, w, t, what);
        metrics.stages.begin(s, w, t);
        if (trace_ && s != stage::rollout) begun_[{s, w}] = t;
    }
    void end(stage s, std::int32_t w, double t, activity what) {
        ledger.end(s, w, t, what);
        metrics.stages.end(s, w, t);
        if (trace_ && s != stage::rollout)
            trace_->span(s, w, s == stage::teacher ? "score" : "train", begun_[{s, w}], t);
    }

    void event(double t, const opd::sched::event& e, const actions& list, const scheduler& s) {
        ledger.event(t, e, list, s);
        if (trace_ && e.what == event::kind::rolled_out && e.ticket.slot < slots.size())
            trace_->span(lane_track(stage::rollout, e.ticket.worker, e.ticket.lane, lanes_),
                         fmt::format("{}", e.ticket.sample), slots[e.ticket.slot].begun, t,
                         {{"tokens", e.versions.tokens}, {"oldest", e.versions.oldest}, {"newest", e.versions.newest}});
        for (const action& a : list.items) {
            if (a.what == action::kind::start) {
                if (a.ticket.slot >= slots.size()) slots.resize(a.ticket.slot + std::size_t{1});
                const auto size = lengths_.of(a.ticket);
                slots[a.ticket.slot] = {a.ticket.sample, size.response, size.prompt, t};
            } else if (a.what == action::kind::step) {
                for (const consumed_sequence& c : list.consumed_by(a)) {
                    metrics.consumed(c.start, c.versions, static_cast<std::int64_t>(slots[c.ticket.slot].prompt));
                    if (a.version > warmup_)
                        settled.lag_sum += static_cast<double>(a.version - 1 - c.start), ++settled.consumed;
                }
                metrics.step(t, 1);
                settled.permits.push_back(s.resolved().permits);
            }
        }
        const census& w = s.where();
        metrics.depths.set(queue::running, w.rollout, t);
        metrics.depths.set(queue::teacher, w.queued + w.scoring, t);
        metrics.depths.set(queue::ready, w.ready, t);
        if (trace_ && t >= counted_ + 0.5) {
            counted_ = t;
            trace_->counter("sequences", t,
                            {{"running", w.rollout}, {"teacher", w.queued + w.scoring}, {"ready", w.ready}});
        }
        if (settled.since >= 0) {
            if (waits_) settled.waited += t - seen_;
            settled.running += (t - seen_) * running_, settled.scoring += (t - seen_) * scoring_;
        }
        if (settled.since < 0 && s.version() >= warmup_) settled.since = t;
        seen_ = t;
        waits_ = s.gate_open() && w.training == 0;
        running_ = static_cast<double>(w.rollout), scoring_ = static_cast<double>(w.queued + w.scoring);
        if (const bool held = s.held_back(); held != held_) {
            held_ = held;
            held ? metrics.depths.hold(t) : metrics.depths.release(t);
            if (!held && trace_) trace_->hold(held_since_, t);
            held_since_ = t;
        }
        if (const bool closed = !s.gate_open(); closed != closed_) {
            closed_ = closed;
            if (!closed && trace_) trace_->gate(closed_since_, t, s.version());
            closed_since_ = t;
        }
    }

private:
    simulated_lengths lengths_;
    std::int32_t lanes_;
    index_t warmup_;
    opd::sched::trace* trace_;
    double seen_ = 0;
    bool waits_ = false; // the learner, for a batch
    double running_ = 0, scoring_ = 0;
    std::map<std::pair<stage, std::int32_t>, double> begun_;
    bool held_ = false, closed_ = false;
    double held_since_ = 0, closed_since_ = 0, counted_ = -1;
};

} // namespace

outcome simulate(const config& c, const entry& e, opd::sched::trace* recorded) {
    const auto began = std::chrono::steady_clock::now();
    settings s;
    s.batch = c.batch, s.group = c.group, s.schedule = e.schedule;
    s.most_slots = std::max<std::int32_t>(s.most_slots, c.rollout.lanes);
    s.teacher_batch = c.teacher.batch, s.teacher_flush = c.teacher.flush;
    observer seen(c, recorded);
    virtual_driver<stages, observer> driver(s, stages(c, e, seen.slots), &seen);
    driver.bring_up(stage::learner, 1);
    driver.bring_up(stage::teacher, teacher_workers_of(c, e));
    const auto& late = c.rollout.joiners;
    driver.bring_up(stage::rollout, e.rollout_workers - late.count, c.rollout.lanes);
    for (int i = 0; i < late.count; ++i)
        driver.at(late.after + late.every * i,
                  event::up(stage::rollout, e.rollout_workers - late.count + i, c.rollout.lanes));

    const double end = c.seconds > 0 ? c.seconds : forever;
    const auto enough = [&] { return c.steps > 0 && seen.metrics.tokens.steps() >= c.steps; };
    bool stuck = false, full = false; // the teacher's cache
    double full_since = 0, full_time = 0;
    const auto press = [&] {
        if (c.teacher.cache == 0 || full == (double(seen.ledger.totals().outstanding) >= c.teacher.cache)) return;
        full = !full;
        driver.at(driver.now(), event::of(full ? event::kind::pause : event::kind::resume));
        if (full)
            full_since = driver.now();
        else
            full_time += driver.now() - full_since;
    };
    while (!enough() && driver.next() <= end && !stuck) {
        stuck = !driver.step();
        press();
    }
    stuck |= !enough() && driver.next() == forever;
    const double now = enough() || stuck ? driver.now() : end;

    run_metrics& m = seen.metrics;
    m.observe(now);
    outcome r;
    r.what = e;
    r.gpus = gpus_of(c, e);
    r.steps = m.tokens.steps();
    r.sequences = m.sequences();
    r.seconds = now;
    r.throughput = m.tokens.throughput().value_or(0);
    r.overlap = m.stages.overlap().value_or(0);
    const double wall = m.stages.wall_time();
    for (int i = 0; i < stage_count; ++i)
        r.busy[static_cast<std::size_t>(i)] = wall > 0 ? m.stages.stage_time(static_cast<stage>(i)) / wall : 0;
    for (int i = 0; i < queue_count; ++i) r.depth[static_cast<std::size_t>(i)] = m.depths(static_cast<queue>(i)).mean();
    for (int i = 0; i < lag_count; ++i) {
        const lag_histogram& h = m.lags(static_cast<lag>(i));
        r.lags[i].mean = h.mean(), r.lags[i].max = h.max(), r.lags[i].p99 = h.quantile(0.99);
        const auto unit = static_cast<std::size_t>(h.divisions());
        r.lags[i].bins.assign((h.bins().size() + unit - 1) / unit, 0);
        for (std::size_t b = 0; b < h.bins().size(); ++b) r.lags[i].bins[b / unit] += h.bins()[b];
    }
    r.held = now > 0 ? m.depths.held_time() / now : 0;
    r.waits =
        seen.settled.since >= 0 && now > seen.settled.since ? seen.settled.waited / (now - seen.settled.since) : 0;
    r.settled_lag = seen.settled.consumed > 0 ? seen.settled.lag_sum / seen.settled.consumed : 0;
    if (const double settled = now - seen.settled.since; seen.settled.since >= 0 && settled > 0)
        r.running = seen.settled.running / settled, r.scoring = seen.settled.scoring / settled;
    r.permits = std::move(seen.settled.permits);
    r.blocked = now > 0 ? (full_time + (full ? now - full_since : 0)) / now : 0;
    r.ready = r.sequences > 0 ? r.depth[2] * now / static_cast<double>(r.sequences) : 0; // Little
    r.failed = driver.scheduler().totals().failed;
    r.restarts = driver.scheduler().totals().restarts;
    seen.ledger.observe(now);
    const token_totals then = seen.ledger.totals();
    r.generated = static_cast<double>(then.generated);
    r.wasted = static_cast<double>(then.discarded + then.lost);
    r.events = static_cast<std::int64_t>(driver.events());
    if (stuck) {
        const census& w = driver.scheduler().where();
        r.stuck = fmt::format("at version {}, {} in rollout, {} with the teacher, {} scored{}",
                              driver.scheduler().version(), w.waiting + w.rollout, w.queued + w.scoring, w.ready,
                              full ? "; the teacher's cache is full" : "");
    }
    driver.at(driver.now(), event::of(event::kind::stop)); // what is under way has drawn tokens, too
    while (!driver.finished() && driver.step()) {}
    r.ledger = seen.ledger.totals();
    r.ledger.busy_seconds = then.busy_seconds, r.ledger.idle_seconds = then.idle_seconds;
    r.host_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return r;
}

} // namespace cluster_sim
