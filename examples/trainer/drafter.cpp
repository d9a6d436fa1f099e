// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "drafter.hpp"

#include <algorithm>
#include <stdexcept>

#include "opd/sched/archive.hpp"

namespace trainer {

std::int32_t retrieval_drafter::new_text(group& g, std::uint64_t sample) {
    g.samples.push_back(sample);
    return g.automaton.begin();
}

void retrieval_drafter::append(group& g, std::int32_t text, std::span<const token> more) {
    for (const token t : more)
        if (g.automaton.append(text, t)) g.appended.emplace_back(text, t);
}

std::int32_t retrieval_drafter::group_of(const tokens& prompt) {
    std::int32_t unused = -1;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        if (groups_[i].running == 0)
            unused = static_cast<std::int32_t>(i);
        else if (groups_[i].prompt == prompt)
            return static_cast<std::int32_t>(i);
    }
    if (unused < 0) {
        unused = static_cast<std::int32_t>(groups_.size());
        groups_.push_back({{}, opd::spec::suffix_automaton(options_.group_tokens), {}, {}, {}, 0});
    }
    group& g = groups_[static_cast<std::size_t>(unused)];
    g.prompt = prompt;
    g.automaton.clear();
    g.appended.clear(), g.samples.clear(), g.finished.clear();
    if (const auto known = history_.find(prompt); known != history_.end()) {
        by_use_.erase(known->second.used);
        by_use_[known->second.used = ++uses_] = &known->first;
        for (const tokens& t : known->second.texts) append(g, new_text(g, no_sample), t);
    }
    return unused;
}

void retrieval_drafter::begin(index_t lane, const trajectory& t) {
    if (static_cast<std::size_t>(lane) >= lanes_.size()) lanes_.resize(static_cast<std::size_t>(lane) + 1);
    place& p = lanes_[static_cast<std::size_t>(lane)];
    p.group = group_of({t.tokens.begin(), t.tokens.begin() + static_cast<std::ptrdiff_t>(t.prompt_length)});
    group& g = groups_[static_cast<std::size_t>(p.group)];
    ++g.running;
    // one that was here before goes on: as a new text it would find nothing but itself
    for (std::size_t i = 0; i < g.samples.size(); ++i) {
        const auto text = static_cast<std::int32_t>(i);
        const auto had = g.automaton.text(text);
        if (g.samples[i] != t.sample || had.size() > t.tokens.size() ||
            !std::equal(had.begin(), had.end(), t.tokens.begin()))
            continue;
        p.text = text;
        return append(g, text, std::span(t.tokens).subspan(had.size()));
    }
    p.text = new_text(g, t.sample);
    append(g, p.text, t.tokens);
}

void retrieval_drafter::hear(std::span<const lane_news> news, const policy&) {
    for (const lane_news& n : news) {
        const place& p = lanes_[static_cast<std::size_t>(n.lane)];
        append(groups_[static_cast<std::size_t>(p.group)], p.text, n.drawn);
    }
}

void retrieval_drafter::end(index_t lane, const trajectory&, bool finished) {
    place& p = lanes_[static_cast<std::size_t>(lane)];
    group& g = groups_[static_cast<std::size_t>(p.group)];
    if (finished) g.finished.push_back(p.text);
    p = {};
    if (--g.running > 0) return;
    close(g);
    g.prompt.clear(), g.appended.clear(), g.samples.clear(), g.finished.clear();
}

// Nobody answers this prompt any more: what was finished is kept, the automaton is not.
void retrieval_drafter::close(group& g) {
    if (g.finished.empty()) return;
    const auto [at, fresh] = history_.try_emplace(g.prompt);
    record& r = at->second;
    if (!fresh) by_use_.erase(r.used);
    by_use_[r.used = ++uses_] = &at->first;
    for (const std::int32_t text : g.finished) {
        const auto t = g.automaton.text(text);
        const auto same = [&](const tokens& other) {
            return std::equal(t.begin(), t.end(), other.begin(), other.end());
        };
        const auto old = std::find_if(r.texts.begin(), r.texts.end(), same);
        if (old != r.texts.end()) {
            std::rotate(r.texts.begin(), old, old + 1);
            continue;
        }
        r.texts.insert(r.texts.begin(), tokens(t.begin(), t.end()));
        kept_tokens_ += static_cast<index_t>(t.size());
        if (r.texts.size() <= static_cast<std::size_t>(options_.texts)) continue;
        kept_tokens_ -= static_cast<index_t>(r.texts.back().size());
        r.texts.pop_back();
    }
    while (kept_tokens_ > options_.history_tokens) forget_oldest();
}

void retrieval_drafter::forget_oldest() {
    const auto oldest = history_.find(*by_use_.begin()->second);
    by_use_.erase(by_use_.begin());
    for (const tokens& t : oldest->second.texts) kept_tokens_ -= static_cast<index_t>(t.size());
    history_.erase(oldest);
}

void retrieval_drafter::propose(std::span<const draft_wish> wishes) {
    for (const draft_wish& w : wishes) {
        const place& p = lanes_[static_cast<std::size_t>(w.lane)];
        const auto& automaton = groups_[static_cast<std::size_t>(p.group)].automaton;
        const auto found = automaton.longest(p.text);
        if (found.length < options_.least || automaton.text(p.text).size() != w.sequence->tokens.size())
            continue; // or there was no room for all of the text
        chain_.resize(static_cast<std::size_t>(w.depth));
        const index_t n = automaton.draft(p.text, chain_, options_.least);
        if (n > 0) w.tree->graft(std::span<const token>(chain_).first(static_cast<std::size_t>(n)), found.length);
    }
}

// --- state ----------------------------------------------------------------------------------------------------------

template <class A>
void retrieval_drafter::list(A& a) {
    a(lanes_);
    std::uint64_t count = groups_.size(), prompts = history_.size();
    a(count);
    if constexpr (A::reading) {
        groups_.clear();
        for (std::uint64_t i = 0; i < count; ++i)
            groups_.push_back({{}, opd::spec::suffix_automaton(options_.group_tokens), {}, {}, {}, 0});
    }
    for (group& g : groups_) a(g);
    a(prompts, uses_);
    if constexpr (A::reading) {
        history_.clear(), by_use_.clear();
        kept_tokens_ = 0;
        for (std::uint64_t i = 0; i < prompts; ++i) {
            tokens prompt;
            record r;
            a(prompt, r);
            for (const tokens& t : r.texts) kept_tokens_ += static_cast<index_t>(t.size());
            const auto [at, fresh] = history_.emplace(std::move(prompt), std::move(r));
            if (!fresh || !by_use_.emplace(at->second.used, &at->first).second)
                throw std::invalid_argument("drafter: a prompt is there twice");
        }
    } else {
        for (auto& [prompt, r] : history_) a(prompt, r);
    }
}

std::string retrieval_drafter::state() const {
    opd::sched::archive_writer w;
    const_cast<retrieval_drafter*>(this)->list(w);
    return std::move(w.bytes);
}

void retrieval_drafter::restore(std::string_view state) {
    const auto need = [](bool ok, const char* what) {
        if (!ok) throw std::invalid_argument(std::string("drafter: ") + what);
    };
    opd::sched::archive_reader r(state);
    list(r);
    need(r.done(), "its state is too long");
    for (group& g : groups_) {
        for (std::size_t i = 0; i < g.samples.size(); ++i) g.automaton.begin();
        for (const auto& [text, t] : g.appended) {
            need(text >= 0 && static_cast<std::size_t>(text) < g.samples.size(), "a token of no text");
            need(g.automaton.append(text, t), "more tokens than a prompt's texts may have");
        }
        for (const std::int32_t text : g.finished)
            need(text >= 0 && static_cast<std::size_t>(text) < g.samples.size(), "a finished text that is none");
    }
    for (const place& p : lanes_)
        need(p.group == -1 ||
                 (p.group >= 0 && static_cast<std::size_t>(p.group) < groups_.size() && p.text >= 0 &&
                  static_cast<std::size_t>(p.text) < groups_[static_cast<std::size_t>(p.group)].samples.size()),
             "a lane with a text that is none");
}

} // namespace trainer
