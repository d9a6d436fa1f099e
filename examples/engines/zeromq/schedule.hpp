// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler's process: the remote driver over a ROUTER socket. Its state is one file, written anew after steps; a
// process that finds one goes on from it. SIGTERM ends it there and then, SIGUSR1 lets nothing more begin, so that the
// run ends when what is outstanding is learnt from.
//
//   schedule.state         epoch, run_snapshot, token_totals
//   ledger.json, ledger    at the end: where the tokens of the whole run went, for programs and for people. What a
//                          process that died was told after its last state is in no figure
//   record/<epoch>         with --record: the machine as the process began with it, then every event and what it led to
//                          (record.hpp)
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>

#include "describe_json.hpp"
#include "ledger_table.hpp"
#include "opd/sched/meters/token_ledger.hpp"
#include "opd/sched/remote_driver.hpp"
#include "record.hpp"
#include "workers.hpp"

namespace engine {

inline double cpu_seconds() {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

using run_state = sched::run_snapshot<payload_ref, payload_ref>;

/// The state's file, and the lock that keeps a second scheduler away from it.
class state_file {
public:
    explicit state_file(const std::filesystem::path& folder) : path_(folder / "schedule.state") {
        std::filesystem::create_directories(folder);
        lock_ = ::open((folder / "schedule.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
        if (lock_ < 0 || ::flock(lock_, LOCK_EX | LOCK_NB) != 0)
            throw std::runtime_error(folder.string() + ": another scheduler runs there");
    }
    ~state_file() { ::close(lock_); }
    state_file(const state_file&) = delete;
    state_file& operator=(const state_file&) = delete;

    bool there() const { return std::filesystem::exists(path_); }
    void read(std::uint64_t& epoch, run_state& state, sched::token_totals& tokens) const {
        std::ifstream in(path_, std::ios::binary);
        std::ostringstream bytes;
        bytes << in.rdbuf();
        const std::string sealed = std::move(bytes).str();
        sched::archive_reader from(sched::unseal(sealed));
        from(epoch, state, tokens);
    }
    void tell(const sched::token_totals& tokens) const {
        const run_folder folder(path_.parent_path());
        folder.write("ledger.json", examples::described(tokens).dump() + '\n');
        folder.write("ledger", examples::ledger_table({{"run", tokens}}));
    }
    void write(std::uint64_t epoch, const run_state& state, const sched::token_totals& tokens) const {
        sched::archive_writer out;
        out(epoch, state, tokens);
        const std::string sealed = sched::seal(std::move(out.bytes)), half = path_.string() + ".new";
        const int file = ::open(half.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
        bool whole = file >= 0;
        for (std::size_t at = 0; whole && at < sealed.size();) {
            const auto n = ::write(file, sealed.data() + at, sealed.size() - at);
            whole = n > 0;
            at += whole ? static_cast<std::size_t>(n) : 0;
        }
        whole = whole && ::fsync(file) == 0; // before the name is its: power may fail
        if (file >= 0) ::close(file);
        if (!whole) throw std::runtime_error(half + ": cannot be written");
        std::filesystem::rename(half, path_);
    }

private:
    std::filesystem::path path_;
    int lock_ = -1;
};

/// What the driver tells: as an observer to the ledger, which is one.
struct schedule_hooks : sched::token_ledger {
    const state_file* file = nullptr;  ///< null: nothing is kept
    decision_record* record = nullptr; ///< likewise
    bool resumed = false;
    sched::token_totals before; ///< of the processes before this one, where it goes on
    std::uint64_t epoch = 0;
    bool talks = true;
    double largest_lag = 0;
    std::int64_t promised = -1; ///< -1: nothing
    std::int64_t consumed = 0;
    double first = 0, last = 0, cpu_first = 0, cpu_last = 0; // at the end of the first and of the last step
    std::int64_t consumed_first = 0;
    bool broken = false;

    sched::token_totals tokens() {
        observe(now());
        return resumed ? before.then(totals()) : totals();
    }
    void save(const run_state& s) {
        file->write(epoch, s, tokens()); // save() is asked for where a file is kept
        if (record) record->saved(s.scheduler);
    }
    void took(const sched::event& e, double time, const sched::actions& out) const {
        if (record) record->took(e, time, out);
    }
    void step(const sched::action& a, std::span<const sched::consumed_sequence> all, const auto&) {
        for (const sched::consumed_sequence& c : all) {
            const auto lag = static_cast<double>(a.version - 1 - c.start);
            largest_lag = std::max(largest_lag, lag);
            broken = broken || (promised >= 0 && lag > static_cast<double>(promised));
        }
        consumed += static_cast<std::int64_t>(all.size());
        last = now(), cpu_last = cpu_seconds();
        if (first == 0) first = last, cpu_first = cpu_last, consumed_first = consumed;
    }
    void said(sched::stage s, std::int32_t worker, const std::string& what) const {
        if (talks) std::fprintf(stderr, "%s %d: %s\n", name_of(s), worker, what.c_str());
    }
};

/// What opd-schedule is told of the schedule.
struct schedule_options {
    sched::settings settings;
    std::string kind = "async", policy = "in_order";
    std::int64_t depth = 2;
    double deadline = 60;
    int attempts = 3;
    std::string config; // of the trainer

    explicit schedule_options(CLI::App& app) {
        settings.batch = 16, settings.sequences = 1600, settings.teacher_batch = 8;
        std::vector<std::string> policies;
        for (const sched::staleness_policy p : sched::staleness_policies()) policies.emplace_back(name_of(p));
        CLI::Option* const all = app.add_option(
            "--config", config, "Settings of opd-train, whose schedule this is; its own deadlines, where it has some");
        app.add_option("--batch", settings.batch, "Sequences a step")->capture_default_str()->excludes(all);
        app.add_option("--sequences", settings.sequences, "Of the run")->capture_default_str()->excludes(all);
        app.add_option("--teacher-batch", settings.teacher_batch, "Sequences a call of a teacher")
            ->capture_default_str()
            ->excludes(all);
        app.add_option("--schedule", kind)
            ->capture_default_str()
            ->check(CLI::IsMember({"sync", "step_off", "async"}))
            ->excludes(all);
        app.add_option("--tau", depth, "Largest lag of async; the k of step_off")->capture_default_str()->excludes(all);
        app.add_option("--policy", policy, "Of async")
            ->capture_default_str()
            ->check(CLI::IsMember(policies))
            ->excludes(all);
        app.add_option("--deadline", deadline,
                       "Seconds of a call, an attempt: for a stage that hangs; processes that die are silent")
            ->capture_default_str();
        app.add_option("--attempts", attempts, "At a sequence, a batch; under --config at a batch")
            ->capture_default_str();
    }
    /// Once the command line is read.
    sched::settings of() const {
        sched::settings s = config.empty() ? settings : trainer_schedule(config);
        if (!config.empty()) {
        } else if (kind == "sync") {
            s.schedule = sched::sync{};
        } else if (kind == "step_off") {
            s.schedule = sched::step_off{depth};
        } else {
            sched::async how{.tau = depth};
            for (const sched::staleness_policy p : sched::staleness_policies())
                if (policy == name_of(p)) how.policy = p;
            s.schedule = how;
        }
        for (double* const d :
             {&s.rollout_deadline, &s.abort_deadline, &s.teacher_deadline, &s.learner_deadline, &s.sync_deadline})
            if (*d == 0) *d = deadline;
        s.learner_attempts = attempts;
        if (config.empty()) s.rollout_attempts = s.teacher_attempts = attempts;
        s.most_workers = 4096, s.most_slots = 4096;
        return s;
    }
};
/// The largest lag that the schedule promises each sequence; -1: none.
inline std::int64_t promised_lag(const sched::settings& s) {
    const sched::plan p = plan_of(s);
    if (!p.streaming) return p.depth;
    return p.policy == sched::staleness_policy::capacity || p.policy == sched::staleness_policy::areal ? -1 : p.depth;
}

inline int run_schedule(int count, char** words) try {
    CLI::App app(
        "Schedules a run whose rollout, teachers and learner are processes (opd-rollout, opd-teacher, opd-learn).");
    connection c(app);
    schedule_options told(app);
    std::string folder = "run", keys_to_make;
    double gather = 0.001;
    app.add_option("--folder", folder, "Where the run's state is; goes on from one that is there")
        ->capture_default_str();
    app.add_option("--save-every", c.options.save_every, "Steps between two states on disk; 0: nothing is kept")
        ->default_val(1);
    app.add_option("--gather", gather, "Seconds: what comes within them is answered together")->capture_default_str();
    bool records = false, replays = false;
    app.add_flag("--record", records, "Keep every event and decision, for --replay");
    app.add_flag("--replay", replays,
                 "Decide again in one process what was recorded, by the same settings, and compare");
    app.add_option("--make-keys", keys_to_make, "Write keys into this folder, and end");
    CLI11_PARSE(app, count, words)
    if (!keys_to_make.empty()) {
        make_keys(keys_to_make);
        return 0;
    }
    c.check();
    const sched::settings how = told.of();
    const bool keeps = c.options.save_every > 0;
    if (records && !keeps) throw std::invalid_argument("--record needs --save-every");
    const std::filesystem::path recorded = std::filesystem::path(folder) / "record";
    if (replays) {
        replayed all;
        int processes = 0;
        for (const auto& entry : std::filesystem::directory_iterator(recorded)) {
            const replayed r = replay(entry.path(), how);
            all.events += r.events, all.actions += r.actions, ++processes;
        }
        std::printf("replayed %d processes, %lld events, %lld actions: the same\n", processes,
                    static_cast<long long>(all.events), static_cast<long long>(all.actions));
        return 0;
    }
    on_signals();

    const state_file file(folder);
    schedule_hooks hooks;
    hooks.file = keeps ? &file : nullptr;
    hooks.promised = promised_lag(how);
    run_state state;
    const bool resumes = keeps && file.there();
    hooks.resumed = resumes;
    if (resumes) file.read(hooks.epoch, state, hooks.before);
    // Higher than every epoch before: after the last one, and by the clock where the state was thrown away.
    hooks.epoch =
        std::max(hooks.epoch + 1, static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                                                 std::chrono::system_clock::now().time_since_epoch())
                                                                 .count()));

    std::unique_ptr<decision_record> record;
    if (records) record = std::make_unique<decision_record>(recorded / std::to_string(hooks.epoch));
    hooks.record = record.get();

    zmq::context_t context(1);
    std::unique_ptr<gate> door;
    if (!c.keys.empty()) door = std::make_unique<gate>(context, c.keys);
    {
        router wire(context, c.endpoint, c.keys, c.options.frame);
        std::fprintf(stderr, "opd-schedule: %s, %s%s\n", c.endpoint.c_str(),
                     c.keys.empty() ? "no keys: loopback alone" : "by keys alone", resumes ? ", goes on" : "");
        using driver_type = sched::remote_driver<payload_ref, payload_ref, router, schedule_hooks>;
        const auto driver = resumes ? std::make_unique<driver_type>(how, state, c.options, hooks.epoch, wire, hooks)
                                    : std::make_unique<driver_type>(how, c.options, hooks.epoch, wire, hooks);
        while (!driver->done(now()) && !asked_to_stop && !hooks.broken) {
            std::vector<zmq::pollitem_t> items = {wire.item()};
            wait_for(items, driver->next_deadline() - now());
            if (items[0].revents != 0) std::this_thread::sleep_for(std::chrono::duration<double>(gather));
            double time = now();
            wire.receive(10000,
                         [&](const std::string& peer, std::string_view bytes) { driver->hear(peer, bytes, time); });
            if (asked_to_close) {
                asked_to_close = 0;
                driver->tell(sched::event::of(sched::event::kind::close), now());
            }
            driver->tick(now());
        }
        const sched::counters& t = driver->scheduler().totals();
        const sched::remote_counts n = driver->counts();
        const double sequences = static_cast<double>(hooks.consumed - hooks.consumed_first);
        std::printf("%s version %lld job %llu consumed %lld failed %lld lag %g\n",
                    driver->scheduler().finished() ? "finished" : "stopped",
                    static_cast<long long>(driver->scheduler().version()),
                    static_cast<unsigned long long>(driver->scheduler().weights().job),
                    static_cast<long long>(t.consumed), static_cast<long long>(t.failed), hooks.largest_lag);
        std::printf("frames %lld in, %lld out; sessions %lld, silent %lld, replaced %lld, overdue %lld, refused %lld; "
                    "broken %lld, stale %lld, repeated %lld\n",
                    static_cast<long long>(n.received), static_cast<long long>(n.sent),
                    static_cast<long long>(n.sessions), static_cast<long long>(n.silent),
                    static_cast<long long>(n.replaced), static_cast<long long>(n.overdue),
                    static_cast<long long>(n.refused), static_cast<long long>(n.broken),
                    static_cast<long long>(n.stale), static_cast<long long>(n.repeated));
        std::fputs(examples::ledger_table({{"run", hooks.tokens()}}).c_str(), stdout);
        if (keeps) file.tell(hooks.tokens());
        if (sequences > 0 && hooks.last > hooks.first)
            std::printf("%.0f sequences/s, %.2f us of CPU a sequence in this process\n",
                        sequences / (hooks.last - hooks.first), 1e6 * (hooks.cpu_last - hooks.cpu_first) / sequences);
        if (hooks.broken) {
            std::fprintf(stderr, "opd-schedule: a sequence was staler than the schedule promises\n");
            return 3;
        }
        if (driver->scheduler().finished())
            run_folder(folder).write("finished", std::to_string(driver->scheduler().weights().job) + ' ' +
                                                     std::to_string(t.consumed) + ' ' + std::to_string(t.failed) +
                                                     '\n');
    }
    return 0;
} catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", words[0], e.what());
    return 1;
}

} // namespace engine
