// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "in_flight.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "config.hpp"
#include "opd/sched/archive.hpp"
#include "task.hpp"

namespace trainer {

namespace {

namespace sched = opd::sched;
using place = sched::outstanding_sequence::place;

// What the stages index by without looking again: one entry a response token in every list, draws for each or for none.
bool fits(const trajectory& t) {
    if (t.prompt_length == 0 || t.prompt_length > t.tokens.size()) return false;
    const std::size_t drawn = t.tokens.size() - t.prompt_length, entries = t.draw_ids.size();
    return t.log_mu.size() == drawn && t.versions.size() == drawn && t.draw_log_mu.size() == entries &&
           t.draw_weight.size() == entries && t.draw_exact.size() == entries &&
           (drawn == 0 ? entries == 0 : entries % drawn == 0) &&
           std::all_of(t.tokens.begin(), t.tokens.end(),
                       [](token id) { return id >= 0 && id < gcd_task::text.vocabulary(); });
}

template <class A>
void fields(A& a, in_flight::entry& e) {
    a(e.ticket.sample, e.ticket.slot, e.ticket.attempt, e.ticket.worker, e.ticket.lane, e.where, e.start);
    bool given = e.sequence != nullptr;
    a(given);
    if (!given) return;
    trajectory t = e.sequence ? *e.sequence : trajectory{};
    a(t);
    if constexpr (A::reading) {
        if (!fits(t) || (e.where >= place::queued && t.tokens.size() == t.prompt_length))
            throw opd::invalid_input("snapshot", "is damaged: a sequence does not fit together");
        e.sequence = std::make_shared<const trajectory>(std::move(t));
    }
}

} // namespace

std::string to_bytes(const in_flight& state) {
    sched::archive_writer w;
    w(state.version, state.scheduler, static_cast<std::uint64_t>(state.sequences.size()));
    for (in_flight::entry e : state.sequences) fields(w, e);
    return std::move(w.bytes);
}

in_flight in_flight_of(std::string_view bytes, const std::function<std::vector<std::shared_ptr<const scored_sequence>>(
                                                   std::span<const std::shared_ptr<const trajectory>>)>& score) {
    in_flight r;
    try {
        sched::archive_reader in(bytes);
        std::uint64_t count = 0;
        in(r.version, r.scheduler, count);
        for (std::uint64_t i = 0; i < count; ++i) fields(in, r.sequences.emplace_back());
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

} // namespace trainer
