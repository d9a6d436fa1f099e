// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/set_source.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "settings/files.hpp"

namespace trainer {

set_source::set_source(const config& c, int longest)
    : c_(c), longest_(longest), lists_(cache_for(c).what == teacher_cache::kind::support),
      set_(of_set(exit_input, [&] { return std::make_unique<opd::data::rollout_set>(c.distill.offline); })),
      print_(hash128(read_file(c.distill.offline + "/index.jsonl"))) { // its sums take in every byte of the set
    of_set(exit_input, [&] { set_->verify(); });
    if (set_->description().vocab > c.student_model.vocabulary)
        throw failure(exit_input, fmt::format("--offline: {} has ids up to {}, the student knows {}", folder(),
                                              set_->description().vocab, c.student_model.vocabulary));
    go_to({});
}

std::vector<std::string> set_source::check(const opd::data::fingerprints& mine) const {
    opd::data::allowed_mismatches allow;
    for (const std::string& name : accepted_mismatches(c_)) {
        if (name == "scoring_teacher") allow.scoring_teacher = allow.teachers = true;
        if (name == "sft_teacher") allow.sft_teacher = true;
        if (name == "tokenizer") allow.tokenizer = true;
        if (name == "reference_policy") allow.reference_policy = true;
    }
    try {
        return set_->check(mine, allow);
    } catch (const opd::invalid_input& e) {
        std::string what = e.what(), name = e.argument.substr(e.argument.find('.') + 1);
        what = what.substr(0, what.find("; to go on, set allow."));
        throw failure(exit_usage,
                      fmt::format("--offline: {}: {}; to go on, --accept-mismatch {}", folder(), what, name));
    }
}

void set_source::go_to(const std::string& kept) {
    opd::data::reader_place place;
    if (!kept.empty()) {
        const auto j = nlohmann::json::parse(kept, nullptr, false);
        if (!j.is_object() || j.value("set", "") != print_)
            throw failure(exit_input, fmt::format("--offline: {} is not the set that the checkpoint's run has read "
                                                  "from so far",
                                                  folder()));
        place.epoch = j.value("epoch", place.epoch);
        place.next = j.value("next", place.next);
        place.sequences = j.value("sequences", place.sequences);
    }
    of_set(exit_input, [&] { reader_.emplace(*set_, opd::data::read_order{.seed = c_.run.seed}, place); });
}

std::string set_source::place() const {
    const opd::data::reader_place p = reader_->place();
    return nlohmann::ordered_json({{"set", print_}, {"epoch", p.epoch}, {"next", p.next}, {"sequences", p.sequences}})
        .dump();
}

std::vector<opd::index_t> set_source::next(opd::index_t count) {
    std::vector<opd::index_t> numbers;
    while (std::ssize(numbers) < count)
        for (const opd::index_t i : reader_->next_numbers(count - std::ssize(numbers)))
            if (i < sequences() - held_out_) numbers.push_back(i);
    return numbers;
}

std::vector<opd::index_t> set_source::held_out() const {
    std::vector<opd::index_t> numbers;
    for (opd::index_t i = sequences() - held_out_; i < sequences(); ++i) numbers.push_back(i);
    return numbers;
}

offline_batch set_source::read(std::span<const opd::index_t> numbers) const {
    return of_set(exit_input, [&] { return batch(set_->read(numbers)); });
}

std::vector<std::vector<token>> set_source::prompts(std::span<const opd::index_t> numbers) const {
    return of_set(exit_input, [&] {
        opd::data::rollouts some = set_->read(numbers);
        const auto tokens = some.tokens();
        const auto rows = some.row_offsets(), at = some.token_offsets();
        std::vector<std::vector<token>> r;
        for (opd::index_t s = 0; s < some.sequences(); ++s) {
            const opd::index_t n = rows[s + 1] - rows[s];
            if (n < 1 || n >= at[s + 1] - at[s]) refuse(some, s, "has no response, or no prompt");
            r.emplace_back(tokens.data + at[s], tokens.data + at[s + 1] - n);
        }
        return r;
    });
}

opd::index_t set_source::longest() const {
    constexpr opd::index_t some = 256; // at once
    opd::index_t most = 0;
    for (opd::index_t first = 0; first < sequences(); first += some)
        of_set(exit_input, [&] {
            const opd::data::rollouts few = set_->read(first, std::min(some, sequences() - first));
            const auto at = few.token_offsets();
            for (opd::index_t s = 0; s < few.sequences(); ++s) most = std::max(most, index_t{at[s + 1] - at[s]});
        });
    return most;
}

learner_result set_source::learn(learner& learn, std::span<const opd::index_t> numbers, double rate,
                                 std::int32_t version) const {
    const auto shares = static_cast<std::size_t>(c_.distill.mini_batches);
    const std::size_t share = numbers.size() / shares, micro = static_cast<std::size_t>(c_.distill.micro_batch);
    const std::size_t at_once = micro > 0 ? std::min(micro, share) : share;
    std::vector<std::vector<offline_batch>> updates(shares); // looked back from before the first of them
    for (std::size_t i = 0; i < shares; ++i) {
        index_t kept = 0;
        for (std::size_t first = 0; first < share; first += at_once) {
            offline_batch& part =
                updates[i].emplace_back(read(numbers.subspan(i * share + first, std::min(at_once, share - first))));
            learn.look_back(part.rows);
            kept += part.rows.kept;
        }
        if (updates[i].size() > 1)
            for (offline_batch& part : updates[i]) part.rows.normaliser = static_cast<std::int32_t>(kept);
    }
    learner_result r;
    for (const std::vector<offline_batch>& parts : updates) {
        learner_result update;
        double loss = 0;
        for (const offline_batch& part : parts) {
            const learner_result of_part = learn.accumulate(part.rows, part.cache, version, r.updates);
            loss += of_part.loss; // each its share of the update's
            update.add(of_part);
        }
        update.loss = loss;
        learn.finish(update, rate);
        r.add(update);
    }
    return r;
}

void set_source::refuse(const opd::data::rollouts& some, opd::index_t s, const std::string& what) const {
    throw failure(exit_input, fmt::format("--offline: {}: sequence {} {}", folder(),
                                          some.numbers()[static_cast<std::size_t>(s)], what));
}

offline_batch set_source::batch(opd::data::rollouts some) const {
    const auto samples = some.cache<opd::teacher::samples<std::int32_t>>();
    const auto refuse = [&](std::size_t s, const std::string& what) {
        this->refuse(some, static_cast<opd::index_t>(s), what);
    };
    if (samples.ids.cols != 1 || samples.log_mu.rows != some.rows() || samples.log_q.rows != some.rows())
        refuse(0, "has not the log-probs of one drawn token a row, under pi_ref and the teacher");
    const index_t k = lists_ ? c_.distill.k : 0; // of the teacher's best ids
    opd::teacher::support<std::int32_t> lists{};
    if (lists_) lists = some.cache<opd::teacher::support<std::int32_t>>();
    if (lists_ && (lists.ids.rows != some.rows() || lists.log_tail.size != some.rows() || lists.ids.cols != k))
        refuse(0, fmt::format("has {} of the teacher's best ids a row, not --k {}", lists.ids.cols, k));
    const auto tokens = some.tokens();
    const auto mask = some.mask();
    std::vector<trajectory> drawn(static_cast<std::size_t>(some.sequences()));
    for (std::size_t s = 0; s < drawn.size(); ++s) {
        trajectory& t = drawn[s];
        const auto row = [&](std::size_t i) { return some.row_offsets()[static_cast<opd::index_t>(i)]; };
        const auto at = [&](std::size_t i) { return some.token_offsets()[static_cast<opd::index_t>(i)]; };
        t.sample = static_cast<std::uint64_t>(some.numbers()[s]);
        t.tokens.assign(tokens.data + at(s), tokens.data + at(s + 1));
        const opd::index_t n = row(s + 1) - row(s);
        if (n < 1 || n >= std::ssize(t.tokens)) refuse(s, "has no response, or no prompt");
        if (std::ssize(t.tokens) > longest_)
            refuse(s, fmt::format("has {} tokens, more than the {} that can be", t.tokens.size(), longest_));
        for (const token id : t.tokens)
            if (id < 0 || id >= c_.student_model.vocabulary) refuse(s, "has ids that the student does not know");
        t.prompt_length = t.tokens.size() - static_cast<std::size_t>(n);
        t.log_mu.assign(samples.log_mu.row(row(s)), samples.log_mu.row(row(s)) + n);
        t.draw_ids.assign(samples.ids.row(row(s)), samples.ids.row(row(s)) + n);
        if (!std::ranges::equal(t.draw_ids, t.response())) refuse(s, "has draws that are not its own tokens");
        t.versions.assign(static_cast<std::size_t>(n), 0); // pi_ref is where the student begins
        t.draw_log_mu = t.log_mu;
        t.draw_weight.assign(static_cast<std::size_t>(n), 1.0f);
        t.draw_exact.assign(static_cast<std::size_t>(n), 0);
    }
    offline_batch b{pack(drawn, draws_for(c_).count), {}};
    b.cache.what = lists_ ? teacher_cache::kind::support : teacher_cache::kind::samples;
    b.cache.entries = lists_ ? static_cast<int>(k) : 1;
    if (lists_) {
        b.cache.ids.assign(static_cast<std::size_t>(b.rows.rows * k), -1);
        b.cache.log_q.assign(b.cache.ids.size(), 0.0f);
        b.cache.log_tail.assign(static_cast<std::size_t>(b.rows.rows), 0.0f);
    } else {
        b.cache.ids = b.rows.ids;
    }
    b.cache.next_log_q.assign(static_cast<std::size_t>(b.rows.rows), 0.0f);
    for (std::size_t s = 0, r = 0; s < drawn.size(); ++s) {
        auto to = static_cast<std::size_t>(b.rows.offsets[s]) + drawn[s].prompt_length - 1;
        for (std::size_t i = 0; i < drawn[s].log_mu.size(); ++i, ++r, ++to) {
            const auto row = static_cast<opd::index_t>(r);
            b.cache.next_log_q[to] = *samples.log_q.row(row);
            if (lists_) {
                const auto first = static_cast<std::ptrdiff_t>(to) * k;
                std::copy_n(lists.ids.row(row), k, b.cache.ids.begin() + first);
                std::copy_n(lists.log_q.row(row), k, b.cache.log_q.begin() + first);
                b.cache.log_tail[to] = lists.log_tail[row];
            }
            if (mask.empty() || mask[row] != 0) continue;
            b.rows.mask[to] = 0, --b.rows.kept;
        }
    }
    if (!lists_) b.cache.log_q = b.cache.next_log_q;
    return b;
}

} // namespace trainer
