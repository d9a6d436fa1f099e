// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The readers of snapshots of the drivers: virtual time with simulated and with real stages, and what the driver on
// threads starts from. Numbers in snapshots of running worlds are changed, the drivers' and, within, the scheduler's;
// both are sealed again. Either a snapshot is refused by invalid_input, or the run goes on, ends or says what is wrong.
#include "fuzz/damage.hpp"
#include "fuzz/player.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/thread_driver.hpp"
#include "opd/sched/timed_stages.hpp"

namespace {

using namespace opd::fuzz;
namespace sched = opd::sched;
using opd::index_t;

/// Changed, of a driver's snapshot: the driver's own fields, or the scheduler's, which are sealed in front of them.
void forge(choices& c, std::string& bytes) {
    sched::archive_reader in(bytes);
    std::string inner;
    in(inner);
    std::string own = bytes.substr(8 + inner.size());
    std::string body(sched::unseal(inner));
    if (c.once_in(4)) nudge(c, body);
    if (!c.once_in(4)) nudge(c, own);
    if (c.once_in(16)) damage(c, own);
    sched::archive_writer out;
    out(sched::seal(body));
    bytes = out.bytes + own;
}

/// Restores and runs a driver. `restore(bytes)`.
template <class Restore>
void drive(choices& c, const std::string& bytes, Restore&& restore) {
    using driver = decltype(restore(bytes));
    std::string other = bytes;
    forge(c, other);
    std::optional<driver> d;
    try {
        d.emplace(restore(sched::seal(other)));
    } catch (const opd::invalid_input&) {
        return need(other != bytes, "a driver's snapshot is refused");
    }
    const std::string again = d->snapshot();
    need(restore(again).snapshot() == again, "a driver that was restored is another one");
    try {
        if (c.once_in(8)) d->introduce();
        if (c.once_in(8)) d->crash(1);
        for (int events = 0; events < 60 && d->step(); ++events) need_invariants(d->scheduler(), "after an event: ");
        d->introduce();
    } catch (const std::exception&) { // which names what does not fit
    }
}

// --- simulated stages that fail, hang and die

struct faulty_cluster : sched::simulated_cluster {
    double often = 0; // faults
    sched::fault some(std::uint64_t a, std::uint64_t b) const {
        numbers n(a * 1000003 + b + seed);
        if (n.uniform() >= often) return {};
        return {static_cast<sched::fault::kind>(1 + n.below(7)), n.uniform(), 2 * n.uniform(), n.next()};
    }
    sched::fault rollout_fault(const sched::ticket& t) const { return some(t.sample, t.attempt); }
    sched::fault teacher_fault(std::uint64_t job, std::int32_t) const { return some(job, 1); }
    sched::fault learner_fault(std::uint64_t job) const { return some(job, 2); }
    sched::fault sync_fault(std::int32_t w, const sched::weights& v, std::uint32_t life) const {
        return some(static_cast<std::uint64_t>(w) + 16 * v.job, life);
    }
    double publication(std::uint64_t job) const {
        const sched::fault f = some(job, 3);
        return f.what == sched::fault::kind::none ? sched::forever : f.after;
    }
    double recovery(sched::stage, std::int32_t, std::uint32_t) const { return 1; }
};
struct watch { // looks at what it is told
    std::int64_t sum = 0;
    void up(sched::stage s, std::int32_t w, double) { sum += static_cast<int>(s) + (w & 1); }
    void down(sched::stage s, std::int32_t w, double) { sum -= static_cast<int>(s) + (w & 1); }
    void begin(sched::stage, std::int32_t w, double, sched::activity) { sum += w & 3; }
    void end(sched::stage, std::int32_t w, double, sched::activity) { sum -= w & 3; }
};
using simulated_driver = sched::virtual_driver<faulty_cluster, watch>;

struct driver_moment {
    sched::settings how;
    std::string bytes;
};
template <class Driver>
void staff(Driver& d) {
    d.bring_up(sched::stage::rollout, 2, 2);
    d.bring_up(sched::stage::teacher, 2);
    d.bring_up(sched::stage::learner, 1);
    d.at(5, sched::event::of(sched::event::kind::pause));
    d.at(6, sched::event::of(sched::event::kind::resume));
    d.at(7, sched::event::up(sched::stage::rollout, 2));
}
/// Drivers in the middle of runs; `make(settings)`.
template <class Make>
std::vector<driver_moment> moments_of(Make&& make) {
    std::vector<driver_moment> r;
    for (const sched::settings& how : small_schedules()) {
        auto d = make(how);
        for (int at = 0; at < 6; ++at) {
            d.run(14);
            r.push_back({how, std::string(sched::unseal(d.snapshot()))});
        }
    }
    return r;
}

void simulated(choices& c) {
    static faulty_cluster model;
    static const std::vector<driver_moment> all = [] {
        model.lengths = {.response = {sched::uniform{1, 20}}, .prompt = {sched::constant{3}}};
        model.speed = {.step = 0.125, .step_per_sequence = 0.01, .prefill = 0.01, .rebuild = 0.001};
        model.lanes = 3;
        model.teacher_time.fixed = model.learner_time.fixed = 0.5;
        model.sync_time.fixed = 0.25;
        model.often = 0.15;
        return moments_of([&](const sched::settings& how) {
            simulated_driver d(how, model);
            staff(d);
            return d;
        });
    }();
    const driver_moment& m = all[c.bytes(1) % all.size()];
    watch seen;
    drive(c, m.bytes, [&](const std::string& bytes) { return simulated_driver::restore(m.how, model, bytes, &seen); });
}

// --- real stages

struct response {
    sched::sample_t sample = 0;
    std::vector<sched::version_t> versions; // of each token
    template <class A>
    void fields(A& a) {
        a(sample, versions);
        if (A::reading && versions.empty()) throw opd::invalid_input("snapshot", "is damaged: a response is empty");
    }
};
struct verdict {
    std::uint64_t value = 0;
    template <class A>
    void fields(A& a) {
        a(value);
    }
};
class generator {
public:
    using rolled_type = response;
    void start(const sched::ticket& t, std::shared_ptr<const response> partial) {
        lanes_.push_back({t, partial ? partial->versions : std::vector<sched::version_t>{}});
    }
    void abort(const sched::ticket& t) {
        std::erase_if(lanes_, [&](const lane& l) { return l.who == t; });
    }
    void install(const sched::weights& w) { version_ = w.version; }
    index_t running() const { return static_cast<index_t>(lanes_.size()); }
    void step(std::vector<sched::finished_rollout<response>>& out, std::stop_token) {
        std::erase_if(lanes_, [&](lane& l) {
            l.versions.push_back(version_);
            if (l.versions.size() <= l.who.sample % 7) return false;
            const sched::token_versions v{l.versions.front(), l.versions.back(), 0,
                                          static_cast<std::int64_t>(l.versions.size())};
            out.push_back({l.who, v, std::make_shared<const response>(response{l.who.sample, l.versions})});
            return true;
        });
    }
    void export_partials(std::vector<sched::partial_rollout<response>>& out) {
        for (const lane& l : lanes_)
            out.push_back({l.who, std::make_shared<const response>(response{l.who.sample, l.versions})});
    }
    template <class A>
    void fields(A& a) {
        a(version_);
        sched::detail::list_fields(a, lanes_, [&](lane& l) { a(l.who, l.versions); });
    }

private:
    struct lane {
        sched::ticket who;
        std::vector<sched::version_t> versions;
    };
    sched::version_t version_ = 0;
    std::vector<lane> lanes_;
};
struct judge { // looks at all that it is given, as does
    using scored_type = verdict;
    std::vector<std::shared_ptr<const verdict>> score(std::span<const std::shared_ptr<const response>> all,
                                                      std::stop_token) {
        std::vector<std::shared_ptr<const verdict>> r;
        for (const auto& s : all)
            r.push_back(std::make_shared<const verdict>(verdict{static_cast<std::uint64_t>(s->versions.back())}));
        return r;
    }
};
struct pupil {
    std::uint64_t sum = 0;
    index_t train(std::span<const sched::sequence_view<response, verdict>> batch, const sched::train_call&,
                  std::stop_token) {
        for (const auto& s : batch) sum += s.scored->value + static_cast<std::uint64_t>(s.rolled->versions.front());
        return 1;
    }
};

using stages = sched::timed_stages<generator, judge, pupil>;
stages some_stages() {
    const auto teacher = std::make_shared<judge>();
    sched::stage_costs<response> costs;
    costs.step = [](std::int32_t worker, index_t running) { return 0.25 * (1 + worker % 2 + double(running)); };
    return stages([](std::int32_t) { return std::make_shared<generator>(); }, {teacher, teacher},
                  std::make_shared<pupil>(), costs);
}
using timed_driver = sched::virtual_driver<stages>;

void timed(choices& c) {
    static const std::vector<driver_moment> all = moments_of([](const sched::settings& how) {
        timed_driver d(how, some_stages());
        staff(d);
        return d;
    });
    const driver_moment& m = all[c.bytes(1) % all.size()];
    drive(c, m.bytes, [&](const std::string& bytes) { return timed_driver::restore(m.how, some_stages(), bytes); });
}

// --- threads

using thread_driver = sched::thread_driver<generator, judge, pupil>;

void threads(choices& c) {
    const auto& all = moments();
    const moment& m = all[c.bytes(2) % all.size()];
    sched::run_snapshot<response, verdict> s;
    using sched::place;
    m.then.s.for_each([&](const sched::outstanding_sequence& q) {
        auto& e = s.sequences.emplace_back();
        e.ticket = q.ticket, e.where = q.where, e.start = q.start;
        if (q.where != place::waiting)
            e.sequence = std::make_shared<const response>(response{q.ticket.sample, {q.start}});
        if (q.where >= place::ready) e.scored = std::make_shared<const verdict>();
    });
    std::string bytes = m.bytes;
    const bool forged = c.once_in(2);
    if (forged) nudge(c, bytes);
    s.weights = m.then.s.weights();
    s.scheduler = sched::seal(bytes);
    const auto edits = c.below(4);
    for (auto edit = edits; edit > 0 && !s.sequences.empty(); --edit) {
        const auto at = static_cast<std::size_t>(c.below(static_cast<std::int64_t>(s.sequences.size())));
        auto& e = s.sequences[at];
        switch (c.below(7)) {
        case 0:
            s.sequences.erase(s.sequences.begin() + static_cast<std::ptrdiff_t>(at));
            break;
        case 1:
            s.sequences.push_back(e);
            break;
        case 2:
            e.ticket.slot = static_cast<std::uint32_t>(c.bytes(4));
            break;
        case 3:
            e.ticket.sample = c.bytes(2);
            break;
        case 4:
            e.sequence.reset();
            break;
        case 5:
            e.scored.reset();
            break;
        default:
            e.where = static_cast<place>(c.below(7));
        }
    }
    try {
        thread_driver d(m.how, s);
        d.add_rollout(std::make_shared<generator>(), 2);
        d.add_teacher(std::make_shared<judge>());
        d.set_learner(std::make_shared<pupil>());
    } catch (const opd::invalid_input& e) {
        need(forged || edits > 0, "a run's snapshot is refused");
        need(e.argument == "snapshot", "a run's snapshot is refused by another name");
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(8)) {
    case 0:
        threads(c);
        break;
    case 1:
    case 2:
    case 3:
        timed(c);
        break;
    default:
        simulated(c);
    }
    return 0;
}
