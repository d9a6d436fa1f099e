// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "trainer_stages.hpp"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "run/run.hpp"
#include "run/scoring.hpp"
#include "schedule/stages.hpp"
#include "settings/checkpoint.hpp"
#include "settings/command_line.hpp"
#include "settings/schedule.hpp"
#include "workers.hpp"

namespace engine {

namespace {

using trainer::failure;
using trainer::scored_sequence;
using trainer::trajectory;

// The sequences of distillation come after those of the stages before it (trainer::run).
constexpr std::uint64_t first_sample = (static_cast<std::uint64_t>(trainer::stage::distill) + 1) << 56;

trainer::config settings_of(const std::string& file) {
    const trainer::config c = trainer::parse_command_line({"--config=" + file}).settings;
    const auto refuse = [&](bool it, const char* setting, const char* why) {
        if (it) throw failure(trainer::exit_usage, file + ": " + setting + " " + why);
    };
    const char* alone = "is for a run in one process";
    refuse(c.run.start_from.empty(), "run.start_from", "is not set: the checkpoint of a warm student");
    refuse(!c.run.scoring_teacher.empty(), "run.scoring_teacher", alone);
    refuse(is_offline(c), "distill.offline", alone);
    refuse(is_served(c), "served.url", alone);
    refuse(c.distill.teacher_cache == "hidden-lowrank", "distill.teacher_cache: hidden-lowrank", alone);
    refuse(c.speculation.adapt, "speculation.adapt", alone);
    refuse(in_virtual_time(c), "schedule.driver: virtual", alone);
    refuse(c.schedule.publish != "shared", "schedule.publish: deltas", alone);
    refuse(!c.schedule.inject.empty(), "schedule.inject", alone);
    return c;
}

// What every process of the run begins with.
struct beginning {
    std::string file;
    trainer::config c;
    std::unique_ptr<const trainer::any_task> task;
    trainer::run_state state;
    bool comparable = false; // what start_from's models were judged by is what these settings would judge them by

    explicit beginning(const std::string& config) : file(config), c(settings_of(config)), task(trainer::task_of(c)) {
        c = trainer::with_task_shapes(c, *task);
        auto start = trainer::load_run(c.run.start_from);
        const auto theirs = trainer::results_json(start.settings), mine = trainer::results_json(c);
        for (const char* group : {"task", "teacher_model", "student_model"})
            if (theirs.at(group) != mine.at(group))
                throw failure(trainer::exit_usage, config + ": run.start_from was made with another " + group);
        if (start.state.stage != trainer::stage::distill || start.state.step != 0)
            throw failure(trainer::exit_usage, config + ": run.start_from is no warm student");
        const auto &a = start.settings.evaluation, &b = c.evaluation;
        comparable = a.prompts == b.prompts && a.samples == b.samples;
        state = std::move(start.state);
    }
    trainer::transformer<float> model(bool teacher) const {
        return trainer::model_with(teacher ? c.teacher_model : c.student_model,
                                   teacher ? state.teacher_weights : state.student_weights, c.run.start_from);
    }
};

template <class T>
std::string bytes_of(const T& x) {
    sched::archive_writer out;
    out(x);
    return std::move(out.bytes);
}
template <class T>
std::shared_ptr<const T> read(const run_folder& folder, const payload_ref& p, std::size_t place) {
    const std::string bytes = folder.get(p, place);
    auto x = std::make_shared<T>();
    sched::archive_reader in(bytes);
    in(*x);
    if (!in.done()) throw std::runtime_error(p.where + " is longer than it says");
    return x;
}
rolled_ptr put(const run_folder& folder, const std::string& name, const std::string& bytes) {
    return std::make_shared<const payload_ref>(folder.put(name, bytes));
}

// Weights and optimizer as a job published them; job 0: those that the run begins with.
struct publication_files {
    const run_folder& folder;
    const beginning& start;

    void write(const char* kind, std::uint64_t job, std::string bytes) const {
        folder.write(kind + ("/" + std::to_string(job)), sched::seal(std::move(bytes)));
    }
    template <class... T>
    void read(const char* kind, std::uint64_t job, T&... into) const {
        const std::string sealed = folder.read(kind + ("/" + std::to_string(job)));
        sched::archive_reader in(sched::unseal(sealed));
        in(into...);
        if (!in.done()) throw std::runtime_error(std::string(kind) + " are longer than they say");
    }
    std::vector<float> weights(const sched::weights& of) const {
        if (of.job == 0) return start.state.student_weights;
        sched::version_t version = 0;
        std::vector<float> r;
        read("weights", of.job, version, r);
        if (version != of.version || r.size() != start.state.student_weights.size())
            throw std::runtime_error("weights of job " + std::to_string(of.job) + " are of another version or model");
        return r;
    }
    trainer::adamw_state optimizer(std::uint64_t job) const {
        trainer::adamw_state r;
        if (job != 0) read("optimizer", job, r.step, r.m, r.v);
        return r;
    }
};

class rollout_worker {
public:
    using rolled_type = payload_ref;
    rollout_worker(const beginning& start, const run_folder& folder, std::int32_t number, std::int32_t slots)
        : files_{folder, start},
          stage_(*start.task, trainer::sampling_of(start.c, *start.task), first_sample, slots, weights_,
                 start.c.distill.answers, start.c.schedule.park_after, {}, {}, number) {}

    void start(const sched::ticket& t, const rolled_ptr& prefix) {
        stage_.start(t, prefix ? read<trajectory>(files_.folder, *prefix, 0) : nullptr);
    }
    void abort(const sched::ticket& t) { stage_.abort(t); }
    sched::finished_rollout<payload_ref> park(const sched::ticket& t) { return told(stage_.park(t)); }
    // Under a name of this process, since jobs may go back when a scheduler's earlier state comes back.
    void install(const sched::weights& w) {
        const sched::weights name{w.version, ++installed_};
        auto model = trainer::model_with(files_.start.c.student_model, files_.weights(w), "weights");
        weights_.publish(name, {std::make_shared<const trainer::transformer<float>>(std::move(model)),
                                static_cast<std::int32_t>(w.version)});
        stage_.install(name);
    }
    void step(std::vector<sched::finished_rollout<payload_ref>>& out, std::stop_token stop) {
        std::vector<sched::finished_rollout<trajectory>> finished;
        stage_.step(finished, std::move(stop));
        for (const auto& f : finished) out.push_back(told(f));
    }
    void took(double seconds) { stage_.took(seconds); }
    double elasticity() { return stage_.elasticity(); }
    opd::index_t running() const { return stage_.running(); }
    std::int64_t drawn(const sched::ticket& t) const { return stage_.drawn(t); }

private:
    sched::finished_rollout<payload_ref> told(const sched::finished_rollout<trajectory>& f) const {
        const std::string name =
            "payload/" + std::to_string(f.ticket.sample) + (f.parked ? "/p" : "/r") + std::to_string(f.ticket.attempt);
        return {f.ticket, f.versions, f.sequence ? put(files_.folder, name, bytes_of(*f.sequence)) : nullptr, f.parked,
                f.failed};
    }
    publication_files files_;
    trainer::publication weights_;
    std::uint64_t installed_ = 0;
    trainer::rollout_stage stage_;
};

class teacher_worker {
public:
    using scored_type = payload_ref;
    teacher_worker(const beginning& start, const run_folder& folder)
        : folder_(folder), teacher_(start.model(true)), stage_(teacher_, start.c, trainer::threads_of(start.c)) {}
    std::vector<rolled_ptr> score(std::span<const rolled_ptr> rolled, std::stop_token stop) {
        std::vector<std::shared_ptr<const trajectory>> all;
        for (const rolled_ptr& p : rolled) all.push_back(read<trajectory>(folder_, *p, all.size()));
        std::vector<rolled_ptr> r;
        for (const auto& s : stage_.score(all, std::move(stop))) {
            std::string name = rolled[r.size()]->where; // …/r<attempt>
            name[name.rfind('/') + 1] = 's';
            r.push_back(s ? put(folder_, name, bytes_of(*s)) : nullptr);
        }
        return r;
    }

private:
    const run_folder& folder_;
    trainer::transformer<float> teacher_;
    trainer::teacher_stage stage_;
};

class learner_worker {
public:
    learner_worker(const beginning& start, const run_folder& folder, const std::atomic<std::uint64_t>& keep_from)
        : files_{folder, start}, kept_(folder, keep_from, {"weights", "optimizer"}), teacher_(start.model(true)),
          student_(start.model(false)), backend_{.threads = trainer::learner_threads_of(start.c)},
          learn_(start.c, student_, optimizer_, backend_, trainer::head_of(teacher_)),
          stage_(start.c, learn_, nobody_, {}) {}
    learner_worker(const learner_worker&) = delete; // its members refer to one another
    learner_worker& operator=(const learner_worker&) = delete;

    opd::index_t train(std::span<const sched::sequence_view<payload_ref, payload_ref>> batch,
                       const sched::train_call& call, std::stop_token) {
        kept_.forget();
        std::vector<trainer::learner_stage::view> all;
        std::string made;
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const auto& v = batch[i];
            all.push_back({v.ticket, v.start, v.versions, read<trajectory>(files_.folder, *v.rolled, i),
                           read<scored_sequence>(files_.folder, *v.scored, i)});
            if (all[i].rolled->sample != first_sample + v.ticket.sample ||
                all[i].scored->sample != all[i].rolled->sample)
                throw std::runtime_error("a payload is of another sequence");
            made += "sequence " + std::to_string(v.ticket.sample) + ' ' + std::to_string(v.start) + " 0\n";
        }
        load(call.from);
        at_.version = -1; // until it is published: what throws leaves the weights between two versions
        trainer::learner_result r;
        if (!all.empty()) {
            r = stage_.learn(all, call.from.version);
            if (!std::isfinite(r.loss) || !std::isfinite(r.gradient_norm))
                throw failure(trainer::exit_numeric, "the loss or the gradient is no number; a lower rate may help");
        }
        sched::archive_writer weights, optimizer;
        weights(call.makes().version, student_.weights);
        optimizer(optimizer_.step, optimizer_.m, optimizer_.v);
        kept_.line(call, sched::detail::checksum(weights.bytes), made);
        files_.write("optimizer", call.job, std::move(optimizer.bytes));
        files_.write("weights", call.job, std::move(weights.bytes)); // the last: these are what others ask for
        at_ = call.makes();
        return r.updates;
    }

private:
    void load(const sched::weights& from) {
        if (at_ == from) return;
        at_.version = -1;
        student_.weights = files_.weights(from);
        student_.weights_changed();
        optimizer_ = files_.optimizer(from.job);
    }
    publication_files files_;
    published kept_;
    trainer::transformer<float> teacher_, student_;
    trainer::adamw_state optimizer_;
    opd::cpu_backend backend_;
    trainer::publication nobody_; // who learns from it reads the files
    trainer::learner learn_;
    trainer::learner_stage stage_;
    sched::weights at_{.version = -1}; // what is in memory
};

} // namespace

sched::settings trainer_schedule(const std::string& config) { return trainer::schedule_of(settings_of(config)); }

void run_trainer_stage(sched::stage s, const std::string& config, const run_folder& folder, std::int32_t number,
                       std::int32_t slots, channel& between, const std::atomic<std::uint64_t>& keep_from) {
    const beginning start(config);
    if (s == sched::stage::rollout) {
        sched::rollout_actor<rollout_worker, payload_ref> actor(
            std::make_shared<rollout_worker>(start, folder, number, slots), number);
        run_rollout(actor, between);
    } else if (s == sched::stage::teacher) {
        teacher_worker teacher(start, folder);
        sched::run_teacher<teacher_worker, payload_ref>(teacher, number, between);
    } else {
        learner_worker student(start, folder, keep_from);
        sched::run_learner<learner_worker, payload_ref, payload_ref>(student, between);
    }
}

void write_student(const std::string& config, const run_folder& folder, const std::string& checkpoint) {
    const beginning start(config);
    if (!start.comparable)
        throw failure(trainer::exit_usage,
                      config + ": evaluation.prompts and .samples are other than run.start_from's");
    std::uint64_t job = 0, consumed = 0;
    std::istringstream in(folder.read("finished"));
    if (!(in >> job >> consumed)) throw std::runtime_error("finished: is damaged");
    const publication_files files{folder, start};
    trainer::run_state end = start.state;
    if (job != 0) {
        sched::version_t version = 0;
        files.read("weights", job, version, end.student_weights);
        end.step = version;
        end.student_optimizer = files.optimizer(job);
    }
    end.next_sample = first_sample + consumed;
    const std::filesystem::path to = checkpoint;
    if (to.has_parent_path()) std::filesystem::create_directories(to.parent_path());
    trainer::save_checkpoint(checkpoint, end, trainer::results_json(start.c).dump());
}

} // namespace engine
