// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/drafter.hpp"

#include <stdexcept>

#include "opd/sched/archive.hpp"

namespace trainer {

namespace {

std::uint64_t prompt_number(std::span<const token> prompt) {
    std::uint64_t h = prompt.size();
    for (const token t : prompt) {
        h = (h ^ static_cast<std::uint32_t>(t)) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return h;
}

} // namespace

void retrieval_drafter::begin(index_t lane, const trajectory& t) {
    const std::span<const token> all(t.tokens);
    const auto visit = static_cast<std::int64_t>(t.sample / options_.answers);
    place& p = of(lane);
    p.text = memory_.begin(prompt_number(all.first(t.prompt_length)), visit, {});
    p.whole = true;
    for (const token id : all) p.whole = p.whole && memory_.append(p.text, id);
}

void retrieval_drafter::hear(std::span<const lane_news> news, const policy&) {
    for (const lane_news& n : news) {
        place& p = of(n.lane);
        for (const token id : n.drawn) p.whole = p.whole && memory_.append(p.text, id);
    }
}

void retrieval_drafter::end(index_t lane, const trajectory&, bool) {
    memory_.end(of(lane).text);
    of(lane) = {};
}

draft_work retrieval_drafter::propose(std::span<const draft_wish> wishes) {
    for (const draft_wish& w : wishes) {
        const place& p = of(w.lane);
        if (!p.whole) continue;
        chain_.resize(static_cast<std::size_t>(w.depth));
        const index_t n = memory_.draft(p.text, chain_, options_.least);
        if (n > 0)
            w.tree->graft(std::span<const token>(chain_).first(static_cast<std::size_t>(n)),
                          memory_.longest(p.text).length);
    }
    return {};
}

std::string retrieval_drafter::state() const {
    opd::sched::archive_writer w;
    auto& self = const_cast<retrieval_drafter&>(*this); // fields() reads and writes
    w(self.lanes_, self.memory_);
    return std::move(w.bytes);
}

void retrieval_drafter::restore(std::string_view state) {
    opd::sched::archive_reader r(state);
    r(lanes_, memory_);
    if (!r.done()) throw std::invalid_argument("drafter: its state is too long");
}

} // namespace trainer
