// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The payloads between the stages: what was drawn and scored of each outstanding sequence, by slot and attempt, so
// that what an attempt made that was given up is dropped. Drivers on threads and in virtual time keep one; with the
// scheduler's state it is all that a run needs to go on (run_snapshot).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/scheduler.hpp"
#include "opd/sched/stages.hpp"

namespace opd::sched {

namespace detail {

/// Shared values in a snapshot: each once, and who shared one shares it again.
template <class T>
class shared_fields {
public:
    template <class A>
    void operator()(A& a, std::shared_ptr<const T>& p, bool may_be_null = true) {
        std::uint32_t number = 0; // null
        if constexpr (!A::reading) {
            if (p)
                number = numbers_.try_emplace(p.get(), static_cast<std::uint32_t>(numbers_.size() + 1)).first->second;
        }
        a(number);
        needs(number > 0 || may_be_null, "there is no payload");
        if (number > all_.size() + 1) throw invalid_input("snapshot", "is damaged: it shares what it does not have");
        if (number == all_.size() + 1) {
            if constexpr (A::reading) {
                auto read = std::make_shared<T>();
                a(*read);
                all_.push_back(std::move(read));
            } else {
                a(*p);
                all_.push_back(p);
            }
        }
        if constexpr (A::reading) p = number > 0 ? all_[number - 1] : nullptr;
    }

private:
    std::map<const T*, std::uint32_t> numbers_; // from 1
    std::vector<std::shared_ptr<const T>> all_;
};

} // namespace detail

/// All that a run needs to go on from a completed step, but for the user's own weights and optimizer.
template <class Rolled, class Scored>
struct run_snapshot {
    struct entry {
        sched::ticket ticket;
        sched::place where = place::waiting;
        version_t start = -1;                   ///< of its start; -1: none yet
        std::shared_ptr<const Rolled> sequence; ///< waiting, rollout: what is drawn so far, or null; else all of it
        std::shared_ptr<const Scored> scored;   ///< ready, training
    };
    sched::weights weights; ///< of its version: those that the workers will be told to install
    std::string scheduler;  ///< scheduler::snapshot()
    std::vector<entry> sequences;

    template <class A>
    void fields(A& a) {
        detail::shared_fields<Rolled> rolled;
        detail::shared_fields<Scored> scores;
        a(weights, scheduler);
        detail::list_fields(a, sequences, [&](entry& e) {
            a(e.ticket, e.where, e.start);
            rolled(a, e.sequence);
            scores(a, e.scored);
        });
    }
};

/// The payloads of all outstanding sequences, one entry a permit's slot. One thread's.
template <class Rolled, class Scored>
class conveyor {
public:
    using rolled_type = Rolled;
    using scored_type = Scored;
    using view_type = sequence_view<Rolled, Scored>;
    using snapshot_type = run_snapshot<Rolled, Scored>;

    /// A new attempt, of a sequence whose first token is of `start`. Returns what it has drawn before, if it goes on
    /// from that. `keeps`: the scheduler knows of tokens that were parked; else none are gone on from.
    std::shared_ptr<const Rolled> start(const ticket& t, version_t start, bool keeps = true) {
        payload& p = at(t.slot);
        // a prefix that was parked, or of before a snapshot, unless the sequence was made to start again since: then
        // at another version
        const bool goes_on =
            (p.resumed || (p.parked && keeps)) && p.what.ticket.sample == t.sample && p.what.start == start;
        const bool parked = goes_on && p.parked;
        auto prefix = goes_on ? std::move(p.prefix) : nullptr;
        p = {};
        p.known = true;
        p.parked = parked; // if this attempt fails, the next goes on from there again
        p.what.ticket = t, p.what.start = start;
        p.prefix = prefix; // until the worker exports a longer one
        return prefix;
    }
    void exported(const ticket& t, std::shared_ptr<const Rolled> prefix) {
        if (payload* p = find(t)) p->prefix = std::move(prefix);
    }
    /// It goes on from there later. Returns what it would have gone on from before: to be parked again if the
    /// scheduler refuses.
    std::shared_ptr<const Rolled> parked(const ticket& t, std::shared_ptr<const Rolled> prefix) {
        payload* p = find(t);
        if (!p || p->what.rolled) return nullptr;
        auto before = p->parked ? std::move(p->prefix) : nullptr;
        p->parked = prefix != nullptr;
        p->prefix = std::move(prefix);
        return before;
    }
    void rolled(const ticket& t, const token_versions& versions, std::shared_ptr<const Rolled> sequence) {
        payload* p = find(t);
        if (!p || p->what.rolled) return;
        p->what.rolled = std::move(sequence);
        p->what.versions = versions;
        if (!p->parked) p->prefix.reset(); // else it may be too late, and the next attempt goes on from there
    }
    void scored(const ticket& t, std::shared_ptr<const Scored> score) {
        if (payload* p = find(t)) p->what.scored = std::move(score);
    }
    const view_type& view(const ticket& t) const { return payloads_.at(t.slot).what; }
    void forget(const ticket& t) {
        payload& p = at(t.slot);
        if (p.known && p.what.ticket.sample == t.sample) p = {};
    }

    snapshot_type snapshot(const scheduler& s) const {
        snapshot_type r;
        r.weights = s.weights();
        r.scheduler = s.snapshot();
        s.for_each([&](const outstanding_sequence& q) {
            typename snapshot_type::entry e{q.ticket, q.where, q.start, nullptr, nullptr};
            const payload* p = q.ticket.slot < payloads_.size() ? &payloads_[q.ticket.slot] : nullptr;
            if (p && p->known && p->what.ticket.sample == q.ticket.sample) {
                if (q.where == place::waiting)
                    e.sequence = (p->resumed || p->parked) && q.start == p->what.start ? p->prefix : nullptr;
                else if (q.where == place::rollout)
                    e.sequence = p->what.ticket.attempt == q.ticket.attempt ? p->prefix : nullptr;
                else
                    e.sequence = p->what.rolled;
                if (q.where >= place::ready) e.scored = p->what.scored;
            }
            r.sequences.push_back(std::move(e));
        });
        return r;
    }
    /// The scheduler is that of the snapshot, its workers abandoned. Throws invalid_input where the two do not fit.
    void resume(const scheduler& s, const snapshot_type& from) {
        std::map<std::uint32_t, const typename snapshot_type::entry*> by_slot;
        for (const auto& e : from.sequences) by_slot[e.ticket.slot] = &e;
        s.for_each([&](const outstanding_sequence& q) {
            const auto found = by_slot.find(q.ticket.slot);
            const auto* e = found != by_slot.end() ? found->second : nullptr;
            const auto refuse = [&](const char* why) {
                throw invalid_input("snapshot", "sequence " + std::to_string(q.ticket.sample) + " " + why);
            };
            if (!e || e->ticket.sample != q.ticket.sample) return refuse("is not among the payloads");
            payload& p = at(q.ticket.slot);
            p.known = true;
            p.what.ticket = q.ticket, p.what.start = q.start;
            p.what.versions = s.versions_of(q.ticket);
            if (q.where == place::waiting) {
                const bool has = e->sequence && q.start >= 0;
                (p.what.versions.tokens > 0 ? p.parked : p.resumed) =
                    has; // as the scheduler, which knows what was parked
                if (has) p.prefix = e->sequence;
                return;
            }
            if (!e->sequence) refuse("has no payload");
            p.what.rolled = e->sequence;
            if (q.where != place::ready) return;
            if (!e->scored) refuse("has no score");
            p.what.scored = e->scored;
        });
    }
    /// For archives of which payloads that are shared elsewhere are part.
    template <class A>
    void fields(A& a, detail::shared_fields<Rolled>& rolled, detail::shared_fields<Scored>& scored) {
        detail::list_fields(a, payloads_, [&](payload& p) {
            a(p.known, p.resumed, p.parked);
            rolled(a, p.prefix);
            view_fields(a, p.what, rolled, scored);
        });
    }
    template <class A>
    static void view_fields(A& a, view_type& v, detail::shared_fields<Rolled>& rolled,
                            detail::shared_fields<Scored>& scored, bool may_be_null = true) {
        a(v.ticket, v.start, v.versions);
        rolled(a, v.rolled, may_be_null);
        scored(a, v.scored, may_be_null);
    }

private:
    struct payload {
        bool known = false;
        bool resumed = false; // prefix is for the next start
        bool parked = false;  // prefix is for every start to come
        std::shared_ptr<const Rolled> prefix;
        view_type what;
    };
    payload& at(std::uint32_t slot) {
        if (slot >= payloads_.size()) payloads_.resize(slot + std::size_t{1});
        return payloads_[slot];
    }
    /// Of this attempt; null if it is not the present one of its slot.
    payload* find(const ticket& t) {
        if (t.slot >= payloads_.size()) return nullptr;
        payload& p = payloads_[t.slot];
        return p.known && p.what.ticket.sample == t.sample && p.what.ticket.attempt == t.attempt ? &p : nullptr;
    }
    std::vector<payload> payloads_; // by slot
};

} // namespace opd::sched
