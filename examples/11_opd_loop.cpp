// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// On-policy distillation from top to bottom, with a real model: what happens in a step, and how the same code runs
// under the scheduler.
//
//   sample    the student answers prompts                                   trajectories
//   score     the teacher reads the answers                                 its logits at every token
//   evaluate  opd::evaluate: KL(student ‖ teacher) of every token           a loss, and its gradient over the student's
//                                                                           logits
//   backward  the model carries that gradient to its weights
//   step      AdamW
//   publish   rollout draws from the new weights: version + 1
//
//   example_11_opd_loop                                         a small teacher and student, made here in seconds
//   example_11_opd_loop start/checkpoints/student.ckpt run/checkpoints/latest.ckpt
//                                                               the run of opd-train that ended in the second, again
//                                                               from the first: this program must end in the same
//                                                               weights, bit for bit
//
// Model, task, rollout and optimiser are the reference trainer's (examples/trainer); all that a trainer of your own
// does with the library is here. First the steps by themselves, then the same three stages under the scheduler, in
// turns (sync) and overlapped (async).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "opd/opd.hpp"
#include "opd/sched/recorder.hpp"
#include "opd/sched/thread_driver.hpp"

#include "model/publication.hpp"
#include "pipeline/rollout_engine.hpp"
#include "pipeline/supervised.hpp"
#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/stages.hpp"

namespace sched = opd::sched;
using opd::index_t;
using opd::view;
using trainer::row_batch, trainer::trajectory;
using model = trainer::transformer<float>;

// What both ways read and neither changes.
struct world {
    trainer::config c;
    std::unique_ptr<const trainer::any_task> task;
    model teacher, start; // start: the student before the first step
    std::uint64_t first_sample = (std::uint64_t(trainer::stage::distill) + 1) << 56; // keys prompts and noise

    trainer::sampling how() const { return trainer::sampling_of(c, *task); }
    index_t batch() const { return trainer::batch_of(c); }
    index_t steps() const { return c.distill.steps; }
};

// --- what a step is made of -----------------------------------------------------------------------------------------

// The teacher's logits at every row of some sequences. (N,V)
class scorer {
public:
    explicit scorer(const world& w) : scorer_(w.teacher, backend_) {}
    scorer(const scorer&) = delete; // scorer_ refers to backend_
    std::vector<float> score(const row_batch& rows) {
        std::vector<float> logits;
        scorer_.logits(rows.inputs, logits);
        return logits;
    }

private:
    opd::cpu_backend backend_{.threads = 2};
    trainer::teacher_scorer scorer_;
};

// The student that learns.
class learner {
public:
    explicit learner(const world& w) : w_(w), student_(w.start), pass_(student_, backend_.team()) {}

    /// One update from rows of sequences (N of them, the prompts' masked) and the teacher's logits (N,V).
    opd::result learn(const row_batch& rows, const std::vector<float>& teacher, std::int64_t step) {
        const index_t v = student_.shape.vocabulary, n = pass_.set_sequences(rows.inputs);
        logits_.resize(std::size_t(n * v));
        pass_.forward(logits_.data());

        // [evaluate]
        const auto t = float(w_.c.distill.temperature);
        opd::env env;
        env.mask = opd::row_mask(rows.mask);       // 1 where the token is the student's own
        env.reduction = opd::reduce::token_mean;   // over these
        env.on_bad = opd::bad::raise_above(0.01);  // of rows with NaN: no training with a gradient of 0
        const auto z = view(logits_.data(), n, v); // (N,V)
        const auto y = view(teacher.data(), n, v); // (N,V)
        const opd::result loss = opd::evaluate(backend_, opd::student::logits{z, z, t}, // the gradient takes z's place
                                               opd::teacher::dense{y, t}, opd::reverse_kl{}, env);
        // [/evaluate]

        pass_.backward(logits_.data(), gradient_);
        const double rate = trainer::cosine_rate(w_.c.distill.rate, 0.1, w_.c.distill.warmup, step, w_.steps());
        trainer::adamw_step(w_.c.optimizer, rate, gradient_, optimizer_, student_);
        return loss;
    }
    const model& student() const { return student_; }
    /// A copy that no later step changes, for rollout.
    trainer::policy published(std::int64_t version) const {
        return {std::make_shared<const model>(student_), std::int32_t(version)};
    }

private:
    const world& w_;
    opd::cpu_backend backend_{.threads = 2};
    model student_;
    trainer::adamw_state optimizer_;
    trainer::training_pass<float> pass_;
    std::vector<float> logits_, gradient_;
};

// --- in turns -------------------------------------------------------------------------------------------------------

model distil_in_turns(const world& w) {
    learner learn(w);
    scorer teacher(w);
    opd::thread_team team(2);
    for (std::int64_t step = 0; step < w.steps(); ++step) {
        // sample
        std::vector<trainer::request> prompts;
        for (index_t i = 0; i < w.batch(); ++i)
            prompts.push_back(trainer::request_of(
                *w.task, w.c.run.seed, w.first_sample + std::uint64_t(step * w.batch() + i), w.c.distill.answers));
        const std::vector<trajectory> answers =
            trainer::roll_out(learn.student(), team, prompts, w.how(), std::int32_t(step));
        const row_batch rows = trainer::pack(answers, 0);
        // score, evaluate, backward, step; the next rollout reads the new weights where they lie: published
        const opd::result loss = learn.learn(rows, teacher.score(rows), step);
        if (step % std::max<index_t>(1, w.steps() / 5) == 0 || step + 1 == w.steps())
            std::printf("  step %3lld: KL(student, teacher) %.4f nats a token, over %lld tokens\n",
                        static_cast<long long>(step), double(loss.loss), static_cast<long long>(loss.diagnostics.kept));
    }
    return learn.student();
}

// --- the same as three stages under the scheduler -------------------------------------------------------------------

// [stages]
struct rollout {
    using rolled_type = trajectory;
    const world& w;
    const trainer::publication& weights;
    index_t lanes;
    std::vector<sched::ticket> tickets = std::vector<sched::ticket>(std::size_t(lanes)); // what runs, by lane
    std::optional<trainer::rollout_engine> engine = {};
    std::vector<trainer::lane_trajectory> finished = {};

    void install(const sched::weights& name) { // running answers go on, each token under the weights that drew it
        const trainer::policy p = weights.get(name);
        engine ? engine->install(p) : void(engine.emplace(p, w.how(), lanes, w.task->max_length()));
    }
    void start(const sched::ticket& t, std::shared_ptr<const trajectory> prefix) {
        const std::uint64_t sample = w.first_sample + t.sample;
        engine->start(t.lane, prefix ? *prefix
                                     : trainer::begin_response(
                                           trainer::request_of(*w.task, w.c.run.seed, sample, w.c.distill.answers)));
        tickets[std::size_t(t.lane)] = t;
    }
    void abort(const sched::ticket& t) { engine->abort(t.lane); }
    index_t running() const { return engine ? engine->running() : 0; }
    void step(std::vector<sched::finished_rollout<trajectory>>& out, std::stop_token) { // a token for everyone
        finished.clear();
        engine->step(finished);
        for (auto& f : finished) {
            auto t = std::make_shared<const trajectory>(std::move(f.sequence));
            const sched::token_versions drawn = trainer::versions_of(*t);
            out.push_back({tickets[std::size_t(f.lane)], drawn, std::move(t)});
        }
    }
};

struct teacher {
    using scored_type = std::vector<float>; // logits (N,V)
    scorer of;
    explicit teacher(const world& w) : of(w) {}
    std::vector<std::shared_ptr<const scored_type>> score(std::span<const std::shared_ptr<const trajectory>> answers,
                                                          std::stop_token) {
        std::vector<std::shared_ptr<const scored_type>> scores;
        for (const auto& t : answers)
            scores.push_back(std::make_shared<const scored_type>(of.score(trainer::pack(std::span(&*t, 1), 0))));
        return scores;
    }
};

struct student {
    using view = sched::sequence_view<trajectory, teacher::scored_type>;
    learner& learn;
    trainer::publication& weights;
    double loss = 0;
    index_t train(std::span<const view> batch, const sched::train_call& call, std::stop_token) {
        std::vector<const trajectory*> answers;
        std::vector<float> scores;
        for (const view& s : batch) {
            answers.push_back(s.rolled.get());
            scores.insert(scores.end(), s.scored->begin(), s.scored->end());
        }
        if (!batch.empty()) loss = double(learn.learn(trainer::pack(answers, 0), scores, call.from.version).loss);
        weights.publish(call.makes(), learn.published(call.makes().version));
        return batch.empty() ? 0 : 1; // updates
    }
};
// [/stages]

model distil_under_the_scheduler(const world& w, const sched::schedule& schedule) {
    trainer::publication weights;
    learner learn(w);
    weights.publish({.version = 0}, learn.published(0));

    // [run]
    sched::settings settings{.batch = w.batch(), .schedule = schedule, .sequences = w.batch() * w.steps()};
    sched::thread_driver<rollout, teacher, student> driver(settings);
    for (int worker = 0; worker < 2; ++worker) driver.add_rollout(std::make_shared<rollout>(w, weights, 8), 8);
    driver.add_teacher(std::make_shared<teacher>(w));
    const auto last = std::make_shared<student>(learn, weights);
    driver.set_learner(last);
    sched::run_metrics metrics(sched::recorded());
    sched::recorder recorder(metrics);
    driver.observe(recorder);
    const sched::run_report report = driver.run();
    // [/run]

    if (report.first_exception) std::rethrow_exception(report.first_exception);
    std::printf("  %lld sequences, KL %.4f, overlap %.2f, lag of a sequence at its start: mean %.2f, at most %.0f\n",
                static_cast<long long>(report.totals.consumed), last->loss, metrics.stages.overlap().value_or(0),
                metrics.lags(sched::lag::start).mean(), metrics.lags(sched::lag::start).max());
    return learn.student();
}

// --- two ways to begin ----------------------------------------------------------------------------------------------

// A teacher that has seen more solutions than the student.
world made_here() {
    world w{.c = {}, .task = nullptr, .teacher = model({.vocabulary = 1}), .start = model({.vocabulary = 1})};
    w.c.task.max_operand = 99, w.c.task.max_steps = 6;
    w.c.distill.steps = 40, w.c.distill.prompts = 16, w.c.distill.warmup = 5, w.c.distill.rate = 4e-3;
    w.task = trainer::task_of(w.c);
    w.c = trainer::with_task_shapes(w.c, *w.task);
    opd::cpu_backend backend{.threads = 2};
    const auto taught = [&](const trainer::model_shape& shape, std::uint64_t seed, int steps) {
        model m(shape);
        m.initialise(seed);
        trainer::adamw_state state;
        trainer::supervised teach(*w.task, m, state, backend);
        for (int s = 0; s < steps; ++s)
            teach.step(seed, std::uint64_t(s) * 32, 32, trainer::cosine_rate(4e-3, 0.1, 10, s, steps), w.c.optimizer);
        return m;
    };
    w.teacher = taught(w.c.teacher_model, 1, 200);
    w.start = taught(w.c.student_model, 2, 40);
    return w;
}

// The start of a run of opd-train, with the settings of its end.
world of_checkpoints(const char* start, const trainer::loaded_run& run) {
    trainer::loaded_run from = trainer::load_run(start);
    const trainer::config& c = run.settings;
    return {.c = c,
            .task = trainer::task_of(c),
            .teacher = trainer::model_with(c.teacher_model, std::move(from.state.teacher_weights), start),
            .start = trainer::model_with(c.student_model, std::move(from.state.student_weights), start)};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

int main(int count, char** arguments) try {
    std::optional<trainer::loaded_run> run;
    if (count == 3) run = trainer::load_run(arguments[2]);
    const world w = run ? of_checkpoints(arguments[1], *run) : made_here();

    std::printf("in turns\n");
    const model in_turns = distil_in_turns(w);
    std::printf("the same steps under the scheduler, sync\n");
    const model in_sync = distil_under_the_scheduler(w, sched::sync{});
    if (!same_bits(in_turns.weights, in_sync.weights)) {
        std::fprintf(stderr, "the scheduler's sync ended in other weights\n");
        return 1;
    }
    std::printf("  the same weights, bit for bit\n");
    if (run) {
        if (!same_bits(in_turns.weights, run->state.student_weights)) {
            std::fprintf(stderr, "opd-train ended in other weights\n");
            return 1;
        }
        std::printf("  and opd-train's\n");
        return 0;
    }
    std::printf("overlapped: async, every sequence at most 2 versions old at its start\n");
    distil_under_the_scheduler(w, sched::async{.tau = 2, .policy = sched::staleness_policy::edf});
    return 0;
} catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
