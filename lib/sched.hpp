// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the structs of include/opd/c/sched.h to the schedulers' and back. Structured bindings name every member of the
// C++ struct: one that is added there does not compile here. Enumerators are the same numbers, which static_asserts
// hold.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "opd/c/sched.h"
#include "opd/sched/metrics.hpp"
#include "opd/sched/scheduler.hpp"
#include "sched_names.hpp"
#include "structs.hpp"

namespace opd_c {

namespace sched = opd::sched;

// ---- enumerators

#define OPD_SAME(c, cxx) static_assert(static_cast<int>(c) == static_cast<int>(cxx), #c)
OPD_SAME(OPD_ROLLOUT, sched::stage::rollout);
OPD_SAME(OPD_TEACHER, sched::stage::teacher);
OPD_SAME(OPD_LEARNER, last_of(sched::stage{}));

OPD_SAME(OPD_PLACE_NONE, sched::place::none);
OPD_SAME(OPD_WAITING, sched::place::waiting);
OPD_SAME(OPD_IN_ROLLOUT, sched::place::rollout);
OPD_SAME(OPD_QUEUED, sched::place::queued);
OPD_SAME(OPD_SCORING, sched::place::scoring);
OPD_SAME(OPD_READY, sched::place::ready);
OPD_SAME(OPD_TRAINING, last_of(sched::place{}));

OPD_SAME(OPD_FAILED_ROLLOUT, sched::failure::rollout);
OPD_SAME(OPD_FAILED_TEACHER, sched::failure::teacher);
OPD_SAME(OPD_FAILED_LEARNER, sched::failure::learner);
OPD_SAME(OPD_FAILED_STALE, sched::failure::stale);
OPD_SAME(OPD_FAILED_STOPPED, last_of(sched::failure{}));
OPD_SAME(OPD_FAILURES - 1, last_of(sched::failure{}));

using event_kind = sched::event::kind;
OPD_SAME(OPD_EVENT_WORKER_UP, event_kind::worker_up);
OPD_SAME(OPD_EVENT_WORKER_DOWN, event_kind::worker_down);
OPD_SAME(OPD_EVENT_ROLLED_OUT, event_kind::rolled_out);
OPD_SAME(OPD_EVENT_ROLLOUT_FAILED, event_kind::rollout_failed);
OPD_SAME(OPD_EVENT_ABORTED, event_kind::aborted);
OPD_SAME(OPD_EVENT_PARKED, event_kind::parked);
OPD_SAME(OPD_EVENT_SCORED, event_kind::scored);
OPD_SAME(OPD_EVENT_SCORE_FAILED, event_kind::score_failed);
OPD_SAME(OPD_EVENT_LEARNED, event_kind::learned);
OPD_SAME(OPD_EVENT_LEARN_FAILED, event_kind::learn_failed);
OPD_SAME(OPD_EVENT_SYNCED, event_kind::synced);
OPD_SAME(OPD_EVENT_WEIGHTS_LOST, event_kind::weights_lost);
OPD_SAME(OPD_EVENT_TICK, event_kind::tick);
OPD_SAME(OPD_EVENT_PAUSE, event_kind::pause);
OPD_SAME(OPD_EVENT_RESUME, event_kind::resume);
OPD_SAME(OPD_EVENT_PARK, event_kind::park);
OPD_SAME(OPD_EVENT_RESIZE, event_kind::resize);
OPD_SAME(OPD_EVENT_CLOSE, event_kind::close);
OPD_SAME(OPD_EVENT_STOP, event_kind::stop);
OPD_SAME(OPD_EVENT_PAYLOAD_LOST, last_of(event_kind{}));

using action_kind = sched::action::kind;
OPD_SAME(OPD_ACTION_START, action_kind::start);
OPD_SAME(OPD_ACTION_ABORT, action_kind::abort);
OPD_SAME(OPD_ACTION_PARK, action_kind::park);
OPD_SAME(OPD_ACTION_SCORE, action_kind::score);
OPD_SAME(OPD_ACTION_TRAIN, action_kind::train);
OPD_SAME(OPD_ACTION_SYNC, action_kind::sync);
OPD_SAME(OPD_ACTION_LOST, action_kind::lost);
OPD_SAME(OPD_ACTION_STEP, action_kind::step);
OPD_SAME(OPD_ACTION_FAIL, action_kind::fail);
OPD_SAME(OPD_ACTION_FINISHED, last_of(action_kind{}));

OPD_SAME(OPD_BY_POLICY, sched::by_policy);
OPD_SAME(OPD_AUTOMATIC, sched::automatic);
OPD_SAME(OPD_WIDEST, sched::widest);
#undef OPD_SAME

/// An enumerator of the caller's, which may be any int.
template <class Kind>
Kind enumerator(const std::string& name, int value) {
    constexpr int last = static_cast<int>(last_of(Kind{}));
    if (value < 0 || value > last)
        refuse(name, "is " + std::to_string(value) + "; it has the values 0 to " + std::to_string(last));
    return static_cast<Kind>(value);
}
inline bool flag(const std::string& name, int value) {
    if (value != 0 && value != 1) refuse(name, "is " + std::to_string(value) + "; it is 0 or 1");
    return value != 0;
}
/// 0: the default; OPD_ZERO: 0 itself.
template <class Number>
Number or_zero(Number value, Number by_default) {
    return value == Number(0) ? by_default : value == Number(OPD_ZERO) ? Number(0) : value;
}

// ---- values

inline sched::ticket from_c(const opd_ticket& t) {
    sched::ticket r;
    auto& [sample, slot, attempt, worker, incarnation, lane] = r;
    sample = t.sample, slot = t.slot, attempt = t.attempt;
    worker = t.worker, incarnation = t.incarnation, lane = t.lane;
    return r;
}
inline opd_ticket to_c(const sched::ticket& t) {
    const auto& [sample, slot, attempt, worker, incarnation, lane] = t;
    return {sample, slot, attempt, worker, incarnation, lane};
}
inline sched::token_versions from_c(const opd_token_versions& v) {
    sched::token_versions r;
    auto& [oldest, newest, mean, tokens] = r;
    oldest = v.oldest, newest = v.newest, mean = v.mean, tokens = v.tokens;
    return r;
}
inline opd_token_versions to_c(const sched::token_versions& v) {
    const auto& [oldest, newest, mean, tokens] = v;
    return {oldest, newest, mean, tokens};
}
inline opd_consumed to_c(const sched::consumed_sequence& s) {
    const auto& [ticket, start, versions] = s;
    return {to_c(ticket), start, to_c(versions)};
}
inline opd_scheduler_counters to_c(const sched::counters& c) {
    const auto& [admitted, consumed, consumed_tokens, failed, failed_by, retries, preempted, restarts, parked, late,
                 duplicates, lost_workers, lost_weights, updates, short_batches, empty_batches, lost_payloads] = c;
    opd_scheduler_counters r = {sizeof r,     admitted,     consumed, consumed_tokens, failed,        {},
                                retries,      preempted,    restarts, parked,          late,          duplicates,
                                lost_workers, lost_weights, updates,  short_batches,   empty_batches, lost_payloads};
    static_assert(std::tuple_size_v<std::remove_cvref_t<decltype(failed_by)>> == OPD_FAILURES);
    std::copy(failed_by.begin(), failed_by.end(), r.failed_by);
    return r;
}
/// Tickets point into `scratch`, which must outlive the event.
inline sched::event event_of(const std::string& name, const opd_event& e, std::vector<sched::ticket>& scratch) {
    sched::event r;
    auto& [what, stage, worker, incarnation, slots, ticket, versions, job, count, elasticity, tickets] = r;
    what = enumerator<event_kind>(name + ".kind", e.kind);
    const auto by = [&](sched::stage s) { stage = s, worker = e.worker, incarnation = e.incarnation; };
    const auto list = [&] {
        if (e.tickets == nullptr && e.ticket_count != 0) refuse(name + ".tickets", "is a null pointer");
        scratch.clear();
        for (std::size_t i = 0; i < e.ticket_count; ++i) scratch.push_back(from_c(e.tickets[i]));
        tickets = scratch;
    };
    const auto about = [&] {
        ticket = from_c(e.ticket);
        stage = sched::stage::rollout, worker = ticket.worker, incarnation = ticket.incarnation;
    };
    switch (what) {
    case event_kind::worker_up:
    case event_kind::worker_down:
        by(enumerator<sched::stage>(name + ".stage", e.stage));
        if (what == event_kind::worker_up) slots = e.slots;
        break;
    case event_kind::rolled_out:
    case event_kind::parked:
        about();
        versions = from_c(e.versions);
        break;
    case event_kind::rollout_failed:
    case event_kind::aborted:
        about();
        break;
    case event_kind::scored:
        by(sched::stage::teacher);
        job = e.job;
        list();
        break;
    case event_kind::payload_lost:
        ticket = from_c(e.ticket);
        job = e.job;
        list();
        break;
    case event_kind::score_failed:
        by(sched::stage::teacher);
        job = e.job;
        break;
    case event_kind::learned:
    case event_kind::learn_failed:
        by(sched::stage::learner);
        job = e.job;
        if (what == event_kind::learned) count = e.count;
        break;
    case event_kind::synced:
        by(sched::stage::rollout);
        job = e.job;
        if (flag(name + ".has_elasticity", e.has_elasticity)) {
            if (!(e.elasticity >= -1 && e.elasticity <= 1))
                refuse(name + ".elasticity", "is " + std::to_string(e.elasticity) + "; it must lie in [-1, 1]");
            elasticity = e.elasticity;
        }
        break;
    case event_kind::weights_lost:
        stage = sched::stage::learner;
        job = e.job;
        break;
    case event_kind::park:
        ticket = from_c(e.ticket);
        break;
    case event_kind::resize:
        count = e.count;
        break;
    case event_kind::tick:
    case event_kind::pause:
    case event_kind::resume:
    case event_kind::close:
    case event_kind::stop:
        break;
    }
    return r;
}

/// Elements of an array of structs, which may be larger or smaller than this library's.
template <class Struct>
class strided {
public:
    strided(const char* name, Struct* first, std::size_t count) : first_(first) {
        if (count == 0) return;
        if (first == nullptr) refuse(name, "is a null pointer");
        size_ = first->struct_size;
        if (size_ < sizeof(std::size_t) || size_ > 65536 || size_ % alignof(Struct) != 0)
            refuse(std::string(name) + "[0].struct_size",
                   "is " + std::to_string(size_) + "; set it to sizeof the struct");
    }
    Struct* operator[](std::size_t i) const {
        using byte = std::conditional_t<std::is_const_v<Struct>, const char, char>;
        return reinterpret_cast<Struct*>(reinterpret_cast<byte*>(first_) + i * size_);
    }
    std::size_t size() const { return size_; }

private:
    Struct* first_;
    std::size_t size_ = sizeof(Struct);
};

// ---- settings

/// What it says after the argument and the row.
inline std::string text_of(const opd::invalid_input& e) {
    std::string text = e.what();
    const std::string before = opd::invalid_input(e.argument, "", e.row).what();
    if (text.starts_with(before)) text.erase(0, before.size());
    return text;
}

/// body(), with arguments of the C++ settings under the caller's names: `prefix` and a dot before them.
template <class Body>
auto with_names(const std::string& prefix, Body&& body) {
    try {
        return body();
    } catch (const opd::invalid_input& e) {
        if (e.argument == "snapshot") throw;
        std::string name = e.argument;
        if (name.starts_with("schedule.")) name.erase(0, std::string("schedule.").size());
        throw opd::invalid_input(prefix + "." + name, text_of(e), e.row);
    }
}

/// Refuses what this choice does not read.
inline void unread(bool is_set, const std::string& argument, const std::string& belongs_to) {
    if (is_set) refuse(argument, "belongs to " + belongs_to);
}

/// `measures`: metrics are kept whether or not settings.measure says so.
inline sched::settings settings_of(const char* prefix, const opd_scheduler_settings& s, bool measures = false) {
    const auto name = [&](const char* member) { return std::string(prefix) + "." + member; };
    sched::settings r;
    auto& [batch, schedule, group, sequences, available, first_version, first_sample, teacher_batch, teacher_flush,
           rollout_attempts, teacher_attempts, learner_attempts, payload_attempts, fruitless_steps, rollout_deadline,
           abort_deadline, teacher_deadline, learner_deadline, sync_deadline, most_workers, most_slots] = r;
    const schedule_kind kind = choose(name("schedule"), s.schedule, schedules, schedule_kind::async);
    const bool whole = kind == schedule_kind::step_off || kind == schedule_kind::controlled;
    unread(!whole && s.k != 0, name("k"), "the schedules step_off and controlled");
    if (kind != schedule_kind::async) {
        const std::string async = "the schedule async";
        unread(s.tau != 0, name("tau"), async), unread(s.outstanding != 0, name("outstanding"), async);
        unread(s.policy != nullptr, name("policy"), async), unread(s.update != nullptr, name("update"), async);
        unread(s.concurrency != 0, name("concurrency"), async);
        unread(s.negative_control != 0, name("negative_control"), async);
    }
    switch (kind) {
    case schedule_kind::sync:
        schedule = sched::sync{};
        break;
    case schedule_kind::step_off: {
        sched::step_off o;
        auto& [k] = o;
        k = or_zero<std::int64_t>(s.k, k);
        schedule = o;
        break;
    }
    case schedule_kind::controlled: {
        sched::controlled o;
        auto& [k] = o;
        k = or_zero<std::int64_t>(s.k, k);
        schedule = o;
        break;
    }
    case schedule_kind::async: {
        sched::async o;
        auto& [tau, outstanding, policy, update, concurrency, negative_control] = o;
        tau = or_zero<std::int64_t>(s.tau, tau), outstanding = s.outstanding, concurrency = s.concurrency;
        policy = choose(name("policy"), s.policy, staleness_policies, policy);
        update = choose(name("update"), s.update, weight_updates, update);
        negative_control = flag(name("negative_control"), s.negative_control);
        schedule = o;
        break;
    }
    }
    batch = or_default(s.batch, batch), group = or_default(s.group, group);
    sequences = s.sequences, available = s.available;
    first_version = s.first_version, first_sample = s.first_sample;
    teacher_batch = or_default(s.teacher_batch, teacher_batch);
    teacher_flush = or_zero(s.teacher_flush, teacher_flush);
    rollout_attempts = or_default(s.rollout_attempts, rollout_attempts);
    teacher_attempts = or_default(s.teacher_attempts, teacher_attempts);
    learner_attempts = or_default(s.learner_attempts, learner_attempts);
    payload_attempts = or_default(s.payload_attempts, payload_attempts);
    if (s.reserved != 0) refuse(name("reserved"), "is " + std::to_string(s.reserved) + "; it must be 0");
    fruitless_steps = or_zero(s.fruitless_steps, fruitless_steps);
    rollout_deadline = s.rollout_deadline, abort_deadline = s.abort_deadline, teacher_deadline = s.teacher_deadline;
    learner_deadline = s.learner_deadline, sync_deadline = s.sync_deadline;
    most_workers = or_default(s.most_workers, most_workers), most_slots = or_default(s.most_slots, most_slots);
    if (!flag(name("measure"), s.measure) && !measures) {
        const std::string metrics = "the metrics, which measure = 1 keeps";
        unread(s.warmup != 0, name("warmup"), metrics), unread(s.lag_bound != 0, name("lag_bound"), metrics);
        unread(s.earlier_updates != 0, name("earlier_updates"), metrics);
    }
    (void)with_names(prefix, [&] { return sched::plan_of(r); }); // so that all of it is checked before anything is made
    return r;
}

/// No worker is present before the driver says so.
inline sched::run_metrics_options metrics_of(const char* prefix, const opd_scheduler_settings& s) {
    sched::run_metrics_options r;
    auto& [rollouts, teachers, learners, version, earlier_updates, warmup, lag_bound] = r;
    rollouts = teachers = learners = 0;
    version = s.first_version;
    earlier_updates = or_zero(s.earlier_updates, earlier_updates);
    warmup = or_default(s.warmup, warmup), lag_bound = or_default(s.lag_bound, lag_bound);
    (void)with_names(prefix, [&] { return sched::throughput_meter(warmup).steps(); });
    if (lag_bound < 1 || lag_bound > (std::int64_t{1} << 32))
        refuse(std::string(prefix) + ".lag_bound", "is " + std::to_string(lag_bound) + "; it must lie in [1, 2^32]");
    if (earlier_updates < 0)
        refuse(std::string(prefix) + ".earlier_updates",
               "is " + std::to_string(s.earlier_updates) + ", a negative number");
    return r;
}

// ---- bytes and lists of the caller's

/// Of a result that is written in the end: before the work is done.
template <class Struct>
void check_size(const char* name, const Struct* to) {
    if (to != nullptr && (to->struct_size < sizeof(std::size_t) || to->struct_size > 65536))
        refuse(std::string(name) + ".struct_size",
               "is " + std::to_string(to->struct_size) + "; set it to sizeof the struct");
}

/// As a size query where `to` is null; `unit`: what a size is of.
inline void hand_out(const char* name, std::string_view from, void* to, std::size_t capacity, std::size_t* size,
                     bool ends_with_0 = false) {
    const char* const counted = ends_with_0 ? "length" : "size";
    if (size == nullptr) refuse(counted, "is a null pointer");
    if (to == nullptr && capacity != 0) refuse(name, "is a null pointer, with a capacity");
    const std::size_t needed = from.size() + ends_with_0;
    if (to != nullptr) {
        if (capacity < needed)
            refuse("capacity", "is " + std::to_string(capacity) + " bytes for " + std::to_string(needed));
        std::memcpy(to, from.data(), from.size());
        if (ends_with_0) static_cast<char*>(to)[from.size()] = '\0';
    }
    *size = from.size();
}
inline std::string_view bytes_of(const void* bytes, std::size_t size) {
    if (bytes == nullptr) refuse("bytes", "is a null pointer");
    return {static_cast<const char*>(bytes), size};
}
/// Checked before a call changes anything.
template <class T>
void check_room(const char* name, const T* to, std::size_t capacity, const std::size_t* count) {
    if (count == nullptr) refuse("count", "is a null pointer");
    if (to == nullptr && capacity != 0) refuse(name, "is a null pointer, with a capacity");
}

} // namespace opd_c
