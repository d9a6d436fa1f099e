// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "schedule/in_flight.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "opd/sched/archive.hpp"
#include "settings/config.hpp"

namespace trainer {

namespace {

namespace sched = opd::sched;
using sched::place;

bool known(const std::vector<token>& ids, int vocabulary) {
    return std::all_of(ids.begin(), ids.end(), [=](token id) { return id >= 0 && id < vocabulary; });
}

// What a filter left of each row: none, or at least the token.
bool sets_fit(const trajectory& t, std::size_t drawn, int vocabulary) {
    if (t.kept_counts.empty()) return t.kept_ids.empty();
    std::int64_t all = 0;
    for (const std::int32_t n : t.kept_counts) {
        if (n < 1 || n > vocabulary) return false;
        all += n;
    }
    return t.kept_counts.size() == drawn && all == std::ssize(t.kept_ids) && known(t.kept_ids, vocabulary);
}

// What the stages index by without looking again: one entry a response token in every list, draws for each or for none.
bool fits(const trajectory& t, int vocabulary) {
    if (t.prompt_length == 0 || t.prompt_length > t.tokens.size()) return false;
    const std::size_t drawn = t.tokens.size() - t.prompt_length, entries = t.draw_ids.size();
    return t.log_mu.size() == drawn && t.versions.size() == drawn && t.draw_log_mu.size() == entries &&
           t.draw_weight.size() == entries && t.draw_exact.size() == entries &&
           (drawn == 0 ? entries == 0 : entries % drawn == 0) && sets_fit(t, drawn, vocabulary) &&
           (t.top_ids.empty() || t.top_ids.size() == drawn) && known(t.top_ids, vocabulary) &&
           known(t.tokens, vocabulary);
}

template <class A>
void fields(A& a, in_flight& state, int vocabulary) {
    sched::detail::shared_fields<trajectory> sequences;
    a(state.weights, state.scheduler);
    sched::detail::list_fields(a, state.sequences, [&](in_flight::entry& e) {
        a(e.ticket, e.where, e.start);
        sequences(a, e.sequence);
        if (A::reading && e.sequence &&
            (!fits(*e.sequence, vocabulary) || (e.where >= place::queued && e.sequence->response().empty())))
            throw opd::invalid_input("snapshot", "is damaged: a sequence does not fit together");
    });
}

} // namespace

std::string to_bytes(in_flight state) {
    sched::archive_writer w;
    fields(w, state, 0);
    return std::move(w.bytes);
}

in_flight in_flight_of(std::string_view bytes,
                       const std::function<std::vector<std::shared_ptr<const scored_sequence>>(
                           std::span<const std::shared_ptr<const trajectory>>)>& score,
                       int vocabulary) {
    in_flight r;
    try {
        sched::archive_reader in(bytes);
        fields(in, r, vocabulary);
        if (!in.done()) throw opd::invalid_input("snapshot", "is too long");
    } catch (const opd::invalid_input& e) {
        throw failure(exit_input, fmt::format("the checkpoint's sequences in flight: {}", e.what()));
    }
    std::vector<std::shared_ptr<const trajectory>> scored;
    for (const auto& e : r.sequences)
        if (e.where >= place::ready && e.sequence) scored.push_back(e.sequence);
    const auto scores = score(scored);
    std::size_t next = 0;
    for (auto& e : r.sequences)
        if (e.where >= place::ready && e.sequence) e.scored = scores[next++];
    return r;
}

std::string kept(const sched::settings& schedule, in_flight state) {
    sched::scheduler machine = sched::scheduler::restore(schedule, state.scheduler);
    const auto learnt = static_cast<sched::sample_t>(schedule.batch * state.weights.version);
    if (state.sequences.empty() && machine.cursor() == learnt) return {};
    machine.abandon_workers(true, true);
    state.scheduler = machine.snapshot();
    return to_bytes(std::move(state));
}

sched::settings going_on(sched::settings schedule, const in_flight& state) {
    const sched::scheduler machine = sched::scheduler::restore(schedule, state.scheduler);
    schedule.first_sample = machine.cursor() - static_cast<sched::sample_t>(machine.totals().admitted);
    schedule.sequences -= static_cast<index_t>(schedule.first_sample);
    return schedule;
}

} // namespace trainer
