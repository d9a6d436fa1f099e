// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Distillation: rollout workers, teachers and the learner under the library's scheduler, which lets them take turns or
// overlap, run by one of two drivers.
//
//   threads   every worker on a thread of its own. A checkpoint holds the scheduler and the sequences in flight, if
//             there are any, and no clock; rollout goes on from the responses as far as they were
//   virtual   one call after the other, at times that follow from --cost-*: the same run wherever it runs. A checkpoint
//             holds the driver with everything in it, to the half-filled cache of a prompt, and the resumed run is the
//             same run
//
// Under sync nothing is in flight between two steps: a checkpoint holds the weights alone, and a scheduler begins
// there.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "describe_json.hpp"
#include "opd/sched/meters/token_ledger.hpp"
#include "opd/sched/recorder.hpp"
#include "opd/sched/thread_driver.hpp"
#include "opd/sched/timed_stages.hpp"
#include "pipeline/codec.hpp"
#include "pipeline/served.hpp"
#include "run/run.hpp"
#include "schedule/faults.hpp"
#include "schedule/in_flight.hpp"
#include "schedule/stages.hpp"
#include "settings/estimator.hpp"
#include "settings/schedule.hpp"
#include "timeline/timeline.hpp"

namespace trainer {

namespace sched = opd::sched;

// What both drivers need: the stages, what is measured, what is told after a step, what is kept in a checkpoint.
class run::distillation {
public:
    distillation(run& r, int threads_a_teacher)
        : run_(r), threads_a_teacher_(threads_a_teacher), codec_(codec_for(r)),
          learn_(r.settings_, r.student_, r.state_.student_optimizer,
                 r.learner_backend_ ? *r.learner_backend_ : r.backend_,
                 codec_ ? head_of(*codec_) : head_of(r.teacher_)),
          weights_({r.settings_.schedule.publish == "deltas", r.settings_.schedule.check_publications}),
          keeps_flight(r.settings_.schedule.kind != "sync"), schedule(schedule_for(r)),
          workers(rollout_workers_of(r.settings_)), lanes(std::max(1, r.settings_.distill.slots / workers)),
          teachers(teachers_of(r.settings_)), faults(faults_of(r.settings_)),
          lesson(std::make_shared<learner_stage>(
              r.settings_, learn_, weights_,
              [this](const learner_result& result, auto&&...) {
                  run_.check_numbers(result); // before anybody draws from such weights
                  last_ = result;
              },
              r.state_.rate)),
          metrics(sched::recorded()), recorder(metrics, &trace_) {
        metrics.transfers.bytes = static_cast<double>(r.student_.weights.size() * sizeof(float));
        recorder.prompt_tokens = [this](sched::sample_t) { return run_.task_->prompt_length(); };
        recorder.after_step = [this](sched::version_t version, double) { measure(version); };
        run_.shown_seconds_ = 0;
        run_.shown_step_ = run_.state_.step;
        run_.state_.drafter.clear(); // until the next checkpoint
    }
    distillation(const distillation&) = delete;
    distillation& operator=(const distillation&) = delete;

    /// Of a stage's class, which may want to be told more before that.
    template <class Stage, class... More>
    std::shared_ptr<Stage> rollout(std::int32_t worker, More&&... more) {
        return std::make_shared<Stage>(std::forward<More>(more)..., *run_.task_, sampling_, run_.sample_base(), lanes,
                                       weights_, run_.settings_.distill.answers, run_.settings_.schedule.park_after,
                                       drafts_, spot_, worker);
    }

    template <class Stage, class... More>
    std::shared_ptr<Stage> teacher(More&&... more) {
        return std::make_shared<Stage>(std::forward<More>(more)..., run_.teacher_, run_.settings_, threads_a_teacher_,
                                       codec_, meter_, run_.served_);
    }

    /// The student's weights, by the name that the sequences in flight of its checkpoint have for them.
    void publish(const sched::weights& name) {
        if (name.version != run_.state_.step)
            throw failure(exit_input, fmt::format("the checkpoint's sequences in flight are those of step {}, not {}",
                                                  name.version, run_.state_.step));
        weights_.publish(name, learn_.snapshot(static_cast<std::int32_t>(name.version)));
    }

    /// The last step is made. Something may be outstanding still: where the scheduler gives sequences up it makes up
    /// for them by whole prompts.
    bool ended() const { return run_.state_.step == run_.settings_.distill.steps; }

    /// A step is complete, and the next one has not begun: on the learner's thread.
    void stepped(sched::version_t version, const std::vector<std::uint64_t>& sequences, const sched::counters& totals,
                 double seconds) {
        if (left || ended()) return;
        figures f;
        {
            const std::lock_guard lock(figures_mutex_);
            f = std::move(measured_.at(version));
            measured_.erase(measured_.begin(), measured_.upper_bound(version));
        }
        for (std::size_t i = 0; i < clocks.size(); ++i)
            run_.seconds_[static_cast<std::size_t>(clocks[i])] = before_[i] + f.busy[i];
        const std::int64_t over = keeps_flight ? totals.admitted : totals.consumed + totals.failed;
        run_.state_.next_sample = run_.sample_base() + schedule.first_sample + static_cast<std::uint64_t>(over);
        const speculation_counts drafts = drafts_->take();
        if (!f.line.is_null() && sampling_.speculate.on()) {
            f.line["speculation"] = described(drafts, sampling_.speculate);
            if (spot_) f.line["speculation"]["drafter"] = described(drafts, spot_->counts());
        }
        all_drafts_.add(drafts);
        run_.distilled(last_, weights_.latest(), sequences, seconds, f.line);
    }

    /// After stepped(): writes a checkpoint where one is due. False: it is time to leave.
    template <class Bytes>
    bool checkpoint(sched::version_t version, Bytes&& in_flight) {
        if (left) return false;
        const auto bytes = [&] { return keeps_flight ? in_flight() : std::string(); };
        if (version == run_.settings_.distill.steps) { // --resume with more steps goes on from it
            at_end_ = bytes();
            drafter_at_end_ = drafter_state();
        }
        if (version >= run_.settings_.distill.steps) return true;
        if (run_.steps_left_ > 0 && --run_.steps_left_ == 0) interrupted = true;
        left = interrupted;
        if (left || run_.state_.step % run_.settings_.run.checkpoint_every == 0) {
            if (left) run_.progress_.clear();
            run_.state_.in_flight = bytes();
            run_.state_.drafter = drafter_state();
            run_.save("latest.ckpt");
        }
        return !left;
    }

    /// The driver has returned at `time`.
    void finish(std::exception_ptr error, std::int64_t given_up, double time) {
        run_.progress_.clear();
        try {
            trace_.write(run_.directory_ + "/trace.json");
        } catch (const opd::error& e) {
            if (!error) throw failure(exit_io, e.what());
        }
        if (error) std::rethrow_exception(error); // what came first
        if (spot_) spot_->save();
        if (left) return;
        if (!ended())
            throw std::runtime_error(fmt::format("distillation ended at step {} of {}: {} sequences were given up",
                                                 run_.state_.step, run_.settings_.distill.steps, given_up));
        metrics.observe(time), ledger.observe(time);
        auto described_run = examples::described(metrics);
        described_run["ledger"] = examples::described(ledger);
        all_drafts_.add(drafts_->take());
        if (sampling_.speculate.on()) described_run["speculation"] = described(all_drafts_, sampling_.speculate);
        if (spot_) {
            auto& j = described_run["speculation"]["drafter"] = described(all_drafts_, spot_->counts());
            // what rollout left of its workers' time, and how much of that was used
            const double idle =
                workers * (metrics.stages.wall_time() - metrics.stages.stage_time(sched::stage::rollout));
            j["idle_seconds"] = idle;
            j["idle_used"] =
                idle > 0 ? nlohmann::ordered_json(metrics.spare_seconds() / idle) : nlohmann::ordered_json();
            j["held_seconds"] = spot_->held_seconds(); // that rollout waited for slices in hand
        }
        const evaluation_result after = run_.evaluate(run_.student_, "after");
        run_.evaluations_["after"] = to_json(after);
        described_run["teacher_cache"] = described_cache(after);
        if (weights_.how().deltas) described_run["publications"] = described(weights_.counts());
        if (run_.served_) {
            described_run["served_teacher"] = run_.served_->described();
            described_run["served_teacher"]["probe"] = run_.probed_;
        }
        write_file(run_.directory_ + "/schedule.json", described_run.dump() + "\n");
        if (run_.settings_.schedule.kind != "sync" && trace_.spans() > 0) draw_timeline(time);
        run_.finish_stage(trainer::stage::finished, std::move(at_end_), std::move(drafter_at_end_));
    }

private:
    // Of about the last dozen steps.
    void draw_timeline(double end) {
        const double step = metrics.stages.wall_time() / std::max(1, run_.settings_.distill.steps);
        if (!(step > 0)) return; // nothing took time
        make_directory(run_.directory_ + "/plots");
        write_file(run_.directory_ + "/plots/timeline.svg",
                   examples::timeline_svg(examples::timeline_of(trace_), {.title = "What ran when, in the last steps",
                                                                          .from = end - 12 * step,
                                                                          .to = end,
                                                                          .width = 800,
                                                                          .max_lanes = 4,
                                                                          .labels = false}));
    }
    // A scheduler that begins at the run's step, where nothing is in flight there.
    static sched::settings schedule_for(const run& r) {
        sched::settings s = schedule_of(r.settings_);
        if (r.settings_.schedule.kind != "sync" && !r.state_.in_flight.empty()) return s;
        s.first_version = r.state_.step;
        s.first_sample = r.state_.next_sample - r.sample_base();
        s.sequences -= s.batch * r.state_.step;
        return s;
    }
    static constexpr std::array clocks = {clock_name::rollout, clock_name::teacher_scoring, clock_name::learner};
    std::array<double, 3> clock_values() const {
        std::array<double, 3> r;
        for (std::size_t i = 0; i < clocks.size(); ++i) r[i] = run_.seconds_[static_cast<std::size_t>(clocks[i])];
        return r;
    }
    // Where the driver calls its observer; stepped() may come later, on another thread.
    void measure(sched::version_t version) {
        const config& c = run_.settings_;
        const bool due = version % c.run.log_every == 0 || version == c.distill.steps;
        const std::array busy = {metrics.stages.stage_time(sched::stage::rollout),
                                 metrics.stages.stage_time(sched::stage::teacher),
                                 metrics.stages.stage_time(sched::stage::learner)};
        const std::lock_guard lock(figures_mutex_);
        measured_[version] = {due ? examples::described(metrics.last_step()) : nlohmann::ordered_json(), busy};
    }

    static std::shared_ptr<const teacher_codec> codec_for(run& r) {
        if (r.settings_.distill.teacher_cache != "hidden-lowrank" || !dense_estimator(r.settings_)) return {};
        auto made =
            std::make_shared<const teacher_codec>(calibrated_codec(r.settings_, *r.task_, r.teacher_, r.backend_));
        spdlog::info("teacher cache: {} numbers a token in place of {}, chosen on {} of the teacher's own; KL(teacher, "
                     "coded) {:.3g} on others",
                     made->codes.rank, made->codes.width, made->rows, made->kl_teacher);
        return made;
    }

    run& run_; // while the driver runs, its student, optimizer, state and logs are the learner's thread's
    const int threads_a_teacher_;
    const std::shared_ptr<const teacher_codec> codec_; // of hidden-lowrank
    learner learn_;
    publication weights_;
    learner_result last_;
    std::string at_end_, drafter_at_end_;
    struct figures {
        nlohmann::ordered_json line;
        std::array<double, 3> busy;
    };
    static nlohmann::ordered_json described(const speculation_counts& c, const speculation_options& o) {
        nlohmann::ordered_json j;
        j["drafted"] = c.drafted;
        j["verified"] = c.verified;
        j["accepted"] = c.accepted;
        const auto if_any = [](std::int64_t steps, double x) { // null: of no steps there is no mean
            return steps > 0 ? nlohmann::ordered_json(x) : nlohmann::ordered_json();
        };
        j["accepted_per_step"] = if_any(c.verified_steps, c.accepted_per_step());
        j["tokens_per_step"] = if_any(c.steps, c.tokens_per_step());
        const std::int64_t drafted = c.timed.sequences;
        j["with_drafts"] = {{"tokens_per_step", if_any(drafted, c.timed_tokens_per_step())},
                            {"break_even", if_any(drafted, c.break_even())},
                            {"tokens_per_second", if_any(drafted, c.tokens_per_second())},
                            {"tokens_per_second_without", if_any(drafted, c.tokens_per_second_without())}};
        auto& choices = j["choices"] = nlohmann::ordered_json::object();
        for (std::size_t i = 0; i < c.chosen.size(); ++i)
            if (c.chosen[i] > 0) choices[choice_name(o, i)] = c.chosen[i];
        return j;
    }
    static nlohmann::ordered_json described(const speculation_counts& c, const spot_counts& s) {
        return {{"updates", s.updates},
                {"age", c.aged > 0 ? nlohmann::ordered_json(c.mean_age()) : nlohmann::ordered_json()},
                {"recorded", s.recorded},
                {"slices", s.slices},
                {"stopped", s.stopped},
                {"rows", s.rows},
                {"loss", s.loss},
                {"acceptance", s.acceptance}};
    }
    std::shared_ptr<spot_trainer> spot_for() const {
        if (!run_.settings_.speculation.adapt || !sampling_.speculate.learned) return {};
        const std::string file = run_.directory_ + "/checkpoints/drafter.ckpt";
        drafter_progress came;
        std::optional<draft_model> before;
        const bool anew = !run_.arguments_.resume || in_virtual_time(run_.settings_);
        if (!anew && std::filesystem::exists(file)) before = load_drafter(file, &came);
        auto r = std::make_shared<spot_trainer>(run_.settings_, sampling_.speculate.learned, workers, file);
        try {
            if (before) r->go_on(std::move(*before), std::move(came));
            if (anew && !run_.state_.drafter.empty()) r->restore(run_.state_.drafter);
        } catch (const std::exception& e) {
            throw failure(exit_input, fmt::format("the drafter of the run that is resumed: {}", e.what()));
        }
        return r;
    }
    // Of a run that can be repeated.
    std::string drafter_state() const {
        return spot_ && in_virtual_time(run_.settings_) ? spot_->state() : std::string();
    }
    static nlohmann::ordered_json described(const publication_counts& c) {
        return {{"deltas", c.deltas},           {"delta_bytes", c.delta_bytes}, {"whole", c.whole},
                {"whole_bytes", c.whole_bytes}, {"missed", c.missed},           {"checked", c.checked}};
    }
    // What the learner is sent of the teacher, and how wide its memory is.
    nlohmann::ordered_json described_cache(const evaluation_result& after) const {
        const auto rows = static_cast<double>(std::max<std::int64_t>(1, meter_->rows()));
        nlohmann::ordered_json j;
        j["kind"] = codec_ ? "hidden-lowrank" : name_of(cache_for(run_.settings_).what);
        j["bytes_a_token"] = static_cast<double>(meter_->bytes()) / rows;
        j["most_bytes_in_flight"] = meter_->most_in_flight();
        j["learner_logit_bytes"] = learn_.logits_at_once();
        if (codec_) {
            j["rank"] = codec_->codes.rank;
            j["calibration_rows"] = codec_->rows;
            j["kl_on_teacher"] = codec_->kl_teacher;
            j["kl_on_student"] =
                kl_of_codec(run_.settings_, codec_->codes, run_.teacher_, run_.backend_, pack(after.responses, 0));
        }
        return j;
    }
    const std::shared_ptr<cache_meter> meter_ = std::make_shared<cache_meter>();
    std::mutex figures_mutex_;
    std::map<sched::version_t, figures> measured_;
    const std::array<double, 3> before_ = clock_values();
    const std::shared_ptr<shared_counts> drafts_ = std::make_shared<shared_counts>();
    speculation_counts all_drafts_;                                      // of the steps before
    const sampling sampling_ = sampling_of(run_.settings_, *run_.task_); // all workers share its drafter
    sched::trace trace_{{.first = 20000, .last = 20000}};

public:
    const bool keeps_flight; // a checkpoint holds what is between the stages
    sched::settings schedule;
    const int workers;
    const index_t lanes; // of a rollout worker
    const int teachers;
    const fault_plan faults;
    const std::shared_ptr<learner_stage> lesson;
    const std::shared_ptr<spot_trainer> spot_ = spot_for(); // null: the drafter stays as it is
    sched::run_metrics metrics;
    sched::recorder recorder;
    sched::token_ledger ledger;
    sched::observers<sched::recorder, sched::token_ledger> figures_of_run{recorder, ledger};
    bool left = false; // interrupted, and a checkpoint is written
};

void run::distill() {
    if (is_served(settings_)) meet_teacher();
    in_virtual_time(settings_) ? distill_in_virtual_time() : distill_on_threads();
}

// The served teacher, probed beside that of --start-from before anything is learnt from it.
void run::meet_teacher() {
    served_ = std::make_shared<served_teacher>(settings_);
    recall_teacher(true);
    const served_probe probe = served_->probe(*task_, student_, &teacher_, backend_);
    recall_teacher(false);
    spdlog::info("teacher probe: {}", probe.told());
    for (const std::string& sentence : probe.accepted) spdlog::warn("teacher probe: accepted: {}", sentence);
    if (!probe.identity.teacher.empty() && !scoring_print_.empty() && probe.identity.teacher != scoring_print_)
        spdlog::warn("the served teacher has other weights than that of --start-from, with which models are evaluated");
    probed_ = probe.described();
    log_.write(nlohmann::ordered_json({{"teacher_probe", probed_}}).dump());
}

// --- threads --------------------------------------------------------------------------------------------------------

void run::distill_on_threads() {
    using driver_type = sched::thread_driver<unreliable_rollout, unreliable_teacher, unreliable_learner>;
    distillation all(*this, 1);
    const double begin = now();
    if (all.ended()) { // --steps 0, which to the scheduler is no end
        all.metrics.start(sched::steady_seconds());
        return all.finish({}, 0, sched::steady_seconds());
    }
    driver_type* running = nullptr;
    driver_type::hooks_type hooks;
    hooks.on_step = [&](const driver_type::report_type& report) {
        std::vector<std::uint64_t> sequences;
        for (const auto& s : report.consumed) sequences.push_back(s.ticket.sample);
        all.stepped(report.version, sequences, report.totals, now() - begin);
    };
    hooks.on_checkpoint = [&](in_flight state) {
        if (all.left) return;
        const bool goes_on = all.checkpoint(state.weights.version, [&] { return kept(all.schedule, state); });
        if (!goes_on || (all.ended() && !state.sequences.empty())) running->stop_now();
    };
    // each step may be the one after which it is time to leave
    const sched::thread_options how{.shutdown_seconds = 120, .stop_on_error = true, .checkpoint_every = 1};
    std::unique_ptr<driver_type> driver;
    if (all.keeps_flight && !state_.in_flight.empty()) {
        const auto teacher = all.teacher<teacher_stage>();
        const in_flight from = in_flight_of(
            state_.in_flight, [&](auto t) { return teacher->score(t); }, settings_.student_model.vocabulary);
        all.publish(from.weights);
        all.schedule = going_on(all.schedule, from);
        driver = std::make_unique<driver_type>(all.schedule, from, how, hooks);
    } else {
        all.publish({.version = state_.step});
        driver = std::make_unique<driver_type>(all.schedule, how, hooks);
    }
    running = driver.get();
    std::shared_ptr<reaper> faults;
    const struct calm {
        const std::shared_ptr<reaper>& faults;
        ~calm() {
            if (faults) faults->stop();
        }
    } before_the_driver_goes{faults};
    if (!settings_.schedule.inject.empty())
        faults = std::make_shared<reaper>(
            all.faults, [&](sched::stage s, std::int32_t w) { running->kill(s, w); },
            [&](sched::stage s, std::int32_t w) { running->revive(s, w); });
    for (int w = 0; w < all.workers; ++w)
        driver->add_rollout(all.rollout<unreliable_rollout>(w, w, faults), static_cast<std::int32_t>(all.lanes));
    for (int w = 0; w < all.teachers; ++w) driver->add_teacher(all.teacher<unreliable_teacher>(w, faults));
    driver->set_learner(std::make_shared<unreliable_learner>(all.lesson, faults));
    driver->observe(all.figures_of_run);
    all.metrics.start(sched::steady_seconds());
    const sched::run_report report = driver->run();
    if (report.observer_exceptions > 0)
        spdlog::warn("{} events could not be recorded: the figures are incomplete", report.observer_exceptions);
    if (!report.left_behind.empty()) { // they use what would be destroyed now
        spdlog::error("{} threads did not return", report.left_behind.size());
        std::_Exit(all.left ? exit_interrupted : 1);
    }
    all.finish(report.first_exception, report.totals.failed, sched::steady_seconds());
}

// --- virtual time ---------------------------------------------------------------------------------------------------

namespace {

using costs_type = sched::stage_costs<trajectory, rollout_work, slice_work>;

costs_type costs_of(const config& c) {
    const auto s = c.schedule;
    const auto rows = [](sched::stage_costs<trajectory>::batch sequences) {
        std::size_t r = 0;
        for (const auto& t : sequences) r += t->tokens.size() - 1;
        return static_cast<double>(r);
    };
    costs_type r;
    r.spare = [s](std::int32_t, const slice_work& w) {
        return s.cost_adapt + s.cost_adapt_row * static_cast<double>(w.rows);
    };
    r.step = [s](std::int32_t, const rollout_work& w) {
        return s.cost_step + s.cost_step_row * static_cast<double>(w.rows) +
               s.cost_draft * static_cast<double>(w.drafting.passes) +
               s.cost_draft_row * static_cast<double>(w.drafting.rows);
    };
    r.score = [s, rows](auto sequences) { return s.cost_score + s.cost_score_row * rows(sequences); };
    r.train = [s, rows](auto sequences) { return s.cost_train + s.cost_train_row * rows(sequences); };
    r.install = [s](std::int32_t, sched::version_t) { return s.cost_sync; };
    return r;
}

// Remembers the steps until they are told.
struct step_watch {
    struct step {
        sched::version_t version;
        std::vector<std::uint64_t> sequences;
    };
    std::vector<step> steps = {};

    void event(double, const sched::event&, const sched::actions& out, const sched::scheduler&) {
        for (const sched::action& a : out.items) {
            if (a.what != sched::action::kind::step) continue;
            steps.push_back({a.version, {}});
            for (const auto& s : out.consumed_by(a)) steps.back().sequences.push_back(s.ticket.sample);
        }
    }
};

using virtual_model = unreliable_stages<sched::timed_stages<rollout_stage, teacher_stage, learner_stage>>;
using onlookers = sched::observers<sched::recorder, sched::token_ledger, step_watch>;
using virtual_run = sched::virtual_driver<virtual_model, onlookers>;

std::string to_bytes(const virtual_run& driver) {
    sched::archive_writer w;
    w(driver.scheduler().weights(), driver.snapshot());
    return std::move(w.bytes);
}

// `publish` is told of the weights that the stages will ask for.
template <class Publish>
virtual_run virtual_run_of(std::string_view bytes, const sched::settings& s, virtual_model m, Publish&& publish) {
    try {
        sched::archive_reader in(bytes);
        sched::weights weights;
        std::string snapshot;
        in(weights, snapshot);
        if (!in.done()) throw opd::invalid_input("snapshot", "is too long");
        publish(weights);
        return virtual_run::restore(s, std::move(m), snapshot);
    } catch (const failure&) {
        throw;
    } catch (const std::exception& e) { // of the archive, the driver or a stage that cannot go on from that
        throw failure(exit_input, fmt::format("the checkpoint's sequences in flight: {}", e.what()));
    }
}

} // namespace

void run::distill_in_virtual_time() {
    distillation all(*this, threads_of(settings_)); // the teacher is alone while it scores
    // one call at a time: all teachers are one
    virtual_model model(
        all.faults, [&](std::int32_t w) { return all.rollout<rollout_stage>(w); },
        std::vector(static_cast<std::size_t>(all.teachers), all.teacher<teacher_stage>()), all.lesson,
        costs_of(settings_));
    const bool resumed = all.keeps_flight && !state_.in_flight.empty();
    const auto publish = [&](const sched::weights& name) { all.publish(name); };
    if (!resumed) publish({.version = state_.step});
    virtual_run driver = resumed ? virtual_run_of(state_.in_flight, all.schedule, std::move(model), publish)
                                 : virtual_run(all.schedule, std::move(model));
    if (driver.finished()) driver.crash(0, true); // more steps: the workers come again
    step_watch watch;
    onlookers seen(all.recorder, all.ledger, watch);
    driver.observe(&seen);
    const double begin = driver.now();
    all.metrics.start(begin);
    driver.introduce();
    if (!resumed) {
        driver.bring_up(sched::stage::rollout, all.workers, static_cast<std::int32_t>(all.lanes));
        driver.bring_up(sched::stage::teacher, all.teachers);
        driver.bring_up(sched::stage::learner, 1);
    }
    while (!all.left && !all.ended() && !driver.first_exception() && !driver.finished() && driver.step()) {
        for (const auto& s : std::exchange(watch.steps, {})) {
            all.stepped(s.version, s.sequences, driver.scheduler().totals(), driver.now() - begin);
            all.checkpoint(s.version, [&] { return to_bytes(driver); });
        }
    }
    all.finish(driver.first_exception(), driver.scheduler().totals().failed, driver.now());
}

} // namespace trainer
