// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is to come in a run in virtual time, in the order of its moments: by time, and where times are equal by what
// caused it first. Events that workers or the outside have for the scheduler, calls that end, transfers that begin
// and end, deaths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/fault.hpp"

namespace opd::sched::detail {

struct moment {
    double time = forever;
    std::uint64_t number = 0;
    bool operator<(const moment& o) const { return time != o.time ? time < o.time : number < o.number; }
    template <class A>
    void fields(A& a) {
        a(time, number);
    }
};

inline constexpr std::int32_t most_virtual_workers = 1 << 18; // of a snapshot; likewise their slots

class agenda {
public:
    struct record {
        enum class kind : std::uint8_t {
            deliver,    // `what`
            fail,       // of the attempt what.ticket
            sync_begin, // what.worker
            sync_end,
            sync_answer,
            job_end, // job
            death    // what.stage, what.worker; back
        };
        friend constexpr kind last_of(kind) { return kind::death; }
        kind is = kind::deliver;
        bool outside = false;
        bool bad = false;       // job_end: it failed; death: nobody is told
        std::uint32_t life = 0; // of the worker that it belongs to
        std::uint32_t job = 0;
        double when = 0, back = 0;
        event what;
        fault wrong;
        template <class A>
        void fields(A& a) {
            a(is, outside, bad, life, back, wrong.what, wrong.after, wrong.back, wrong.which, what);
            needs(std::max({what.worker, what.ticket.worker, what.slots}) < most_virtual_workers,
                  "a worker's number is none");
        }
    };
    /// A call of a teacher or the learner that runs.
    struct job {
        weights from;
        std::vector<ticket> tickets;
        template <class A>
        void fields(A& a) {
            a(from, tickets);
        }
    };

    std::uint64_t next_number = 0;

    bool empty() const { return heap_.empty(); }
    /// There must be one.
    const moment& first() const { return heap_.front().when; }
    record& push(double t, typename record::kind k) {
        std::uint32_t at;
        if (vacant_.empty()) {
            at = static_cast<std::uint32_t>(records_.size());
            records_.emplace_back();
        } else {
            at = vacant_.back();
            vacant_.pop_back();
        }
        record& r = records_[at] = {};
        r.is = k;
        r.when = t;
        heap_.push_back({{t, next_number++}, at});
        std::push_heap(heap_.begin(), heap_.end());
        return r;
    }
    record pop() {
        const std::uint32_t at = heap_.front().at;
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
        vacant_.push_back(at);
        return records_[at];
    }
    void reply(double t, const event& e) { push(t, record::kind::deliver).what = e; }
    /// A job for a record.
    job& begin_job(record& r) {
        if (vacant_jobs_.empty()) {
            vacant_jobs_.push_back(static_cast<std::uint32_t>(jobs_.size()));
            jobs_.emplace_back();
        }
        r.job = vacant_jobs_.back();
        vacant_jobs_.pop_back();
        return jobs_[r.job];
    }
    /// Its place is free for the next job that begins.
    const job& end_job(const record& r) {
        vacant_jobs_.push_back(r.job);
        return jobs_[r.job];
    }
    /// f(record), in no order.
    template <class F>
    void each(F&& f) const {
        for (const entry& e : heap_) f(records_[e.at]);
    }
    /// The process dies: what comes from outside is all that still comes. Returned in order.
    std::vector<record> clear() {
        std::vector<record> outside;
        while (!heap_.empty())
            if (const record r = pop(); r.outside) outside.push_back(r);
        records_.clear();
        vacant_.clear();
        jobs_.clear();
        vacant_jobs_.clear();
        return outside;
    }
    /// But for next_number.
    template <class A>
    void fields(A& a) {
        list_fields(a, heap_, [&](entry& e) {
            if constexpr (A::reading) e.at = static_cast<std::uint32_t>(records_.size()), records_.emplace_back();
            record& r = records_[e.at];
            a(e.when, r);
            r.when = e.when.time;
            if (r.is != record::kind::job_end) return;
            if constexpr (A::reading) r.job = static_cast<std::uint32_t>(jobs_.size()), jobs_.emplace_back();
            a(jobs_[r.job]);
        });
    }

private:
    struct entry {
        moment when;
        std::uint32_t at = 0;
        bool operator<(const entry& o) const { return o.when < when; } // std's heaps have the largest first
    };
    std::vector<entry> heap_;
    std::vector<record> records_;
    std::vector<std::uint32_t> vacant_;
    std::vector<job> jobs_;
    std::vector<std::uint32_t> vacant_jobs_;
};

} // namespace opd::sched::detail
