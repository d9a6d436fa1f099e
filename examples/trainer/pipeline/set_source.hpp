// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A data set (opd/data/) as what the learner learns from: tokens that a reference policy pi_ref drew, one draw a row,
// with log pi_ref and the teacher's log q; where the estimator asks for them the teacher's best ids, too.
//
// Sequences come in a shuffle by --seed, epoch after epoch; those that are held out are left to whoever asks for them
// by number. What is learnt depends on the set, its shuffle and the settings.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/teacher.hpp"
#include "opd/data/rollout_reader.hpp"
#include "pipeline/learner.hpp"
#include "settings/config.hpp"

namespace trainer {

/// Work that reads or writes a set. What the library says of the set is an input failure; of a disk that takes nothing
/// more, `otherwise`.
template <class Work>
auto of_set(exit_code otherwise, Work&& work) {
    try {
        return work();
    } catch (const opd::invalid_input& e) {
        throw failure(exit_input, e.what());
    } catch (const opd::error& e) {
        throw failure(otherwise, e.what());
    }
}

/// What the learner is given of some sequences.
struct offline_batch {
    row_batch rows;
    teacher_cache cache;
};

/// The set of --offline, and where in it the run is. Damage, and what the student cannot learn from, are failures of
/// kind exit_input that name the set and the sequence.
class set_source {
public:
    /// `longest`: most tokens of a sequence. Reads every byte once.
    set_source(const config& c, int longest);

    const std::string& folder() const { return c_.distill.offline; }
    opd::index_t sequences() const { return set_->sequences(); }
    opd::index_t response_tokens() const { return set_->rows(); }
    /// Of its index, whose sums take in every byte.
    const std::string& print() const { return print_; }

    /// What differs, and is accepted; what differs and is not is a failure that names it.
    std::vector<std::string> check(const opd::data::fingerprints& mine) const;

    /// The last `count` sequences are never next() from now on; fewer than there are.
    void hold_out(opd::index_t count) { held_out_ = count; }
    std::vector<opd::index_t> held_out() const;

    /// The place of a checkpoint, or the beginning.
    void go_to(const std::string& kept);
    std::string place() const;

    /// The next sequences of the shuffle; a batch goes on into the next epoch.
    std::vector<opd::index_t> next(opd::index_t count);
    offline_batch read(std::span<const opd::index_t> numbers) const;
    /// Their tokens before the first row.
    std::vector<std::vector<token>> prompts(std::span<const opd::index_t> numbers) const;
    /// Tokens of the longest sequence.
    opd::index_t longest() const;

    /// A step of --mini-batches updates, each from an equal share of these sequences, --micro-batch of them at once.
    learner_result learn(learner& learn, std::span<const opd::index_t> numbers, double rate,
                         std::int32_t version) const;

private:
    [[noreturn]] void refuse(const opd::data::rollouts& some, opd::index_t s, const std::string& what) const;
    offline_batch batch(opd::data::rollouts some) const;

    const config& c_;
    const int longest_;
    const bool lists_;
    opd::index_t held_out_ = 0;
    std::unique_ptr<const opd::data::rollout_set> set_;
    std::string print_;
    std::optional<opd::data::rollout_reader> reader_;
};

} // namespace trainer
