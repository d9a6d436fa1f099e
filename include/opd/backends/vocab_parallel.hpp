// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses over a vocabulary in shards: every rank calls the same stages on the ids that it holds, and between them the
// caller adds up what ranks have found (vocab_parallel.hpp). No collective is called here.
//
//   auto call = opd::vocab_parallel(be, {.first = first, .total = V}, student, teacher, estimator, env);
//   while (call.local())              // this rank's part of the next round; false: there is none
//       all_reduce(call.partials());  // yours: bytes that opd::merge_partials adds up, in the order of ranks
//   const auto r = call.finish();     // the same on every rank
//   call.backward();                  // this rank's dz; of hidden states dx's part (sum it over ranks), its dw and db
//
//   student    student::logits{view(z,N,count), view(dz,N,count)} of the shard's columns, or student::hidden with the
//              shard's rows of the head (and of its bias); dx has this shard's part of Σ over the vocabulary
//   teacher    teacher::dense or teacher::hidden of the same ids; support, samples, weighted or kept sets with all
//              their slots, ids of the whole vocabulary, on every rank alike. teacher::lumped{…, common}: `total` is
//              the larger vocabulary, `common` of the whole; a rank has those of the ids [first, …) that either side
//              has
//   env        the same on every rank. given_lse is over the whole vocabulary. infinite::raise throws from finish, on
//              every rank
//
// What `evaluate` computes is computed, for every divergence of a dense teacher, supports with a tail and renormalised
// ones, and drawn tokens, with the ids that a filter kept or without. Sums over the ids of a shard are folded where its
// first id is, not at multiples of 1,024 of the whole: another split is another rounding of the same sums
// (docs/estimators/vocab-parallel.md). Rows that sums in float do not carry take more rounds; all ranks agree which.
//
// Memory: some 1.6 kB a row, state and partials, which `vocab_parallel_bytes` says exactly; nothing of N·V. Logits of
// hidden states are made in blocks of at most `.budget` bytes: where that holds all rows they are made once, else
// again in each round that reads them.
//
// Throws invalid_input before anything is written, from local also where ranks disagree or their shards do not make
// up the vocabulary. env.on_bad throws at the end of backward, or of finish where no gradient is asked for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "opd/caches.hpp"
#include "opd/checks/types.hpp"
#include "opd/config.hpp"
#include "opd/cpu/batch.hpp"
#include "opd/cpu/lane_engine.hpp"
#include "opd/evaluate.hpp"
#include "opd/logits/makers.hpp"
#include "opd/rows/row_kinds.hpp"
#include "opd/rows/workspace.hpp"
#include "opd/shards/shard_checks.hpp"
#include "opd/shards/shard_team.hpp"
#include "opd/source.hpp"
#include "opd/threads.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

/// A job as its rows see it: hidden states in blocks, but where rows ask for the logits of few ids.
template <class Job>
auto job_in_blocks(const Job& job, const std::optional<makers<Job>>& sides) {
    if constexpr (has_blocks<Job>)
        return sides->template job_of_rows<false>(job);
    else
        return job_of_rows(job);
}

/// Whether the types of a call can be run in shards; if not, one sentence says why.
template <class Backend, class Student, class Teacher, class Estimator>
constexpr bool fits_shards() {
    if constexpr (!types_fit<Backend, Student, Teacher, Estimator>())
        return false; // it has said why
    else if constexpr (!requires(Backend & be) { be.team().size(); })
        static_assert(never<Backend>,
                      "opd: this call of shards of a vocabulary is the CPU backends'; with ranks and an "
                      "all-gather it is cuda_backend's, of opd/backends/cuda_vocab_parallel.cuh");
    else if constexpr (Student::sparse_gradient)
        static_assert(never<Student>,
                      "opd: a gradient of slots is not a shard's: of a vocabulary in shards the student "
                      "is student::logits of its columns, or student::hidden of its head's rows");
    else if constexpr (has_scratch<Student> && Teacher::kind != cache_kind::dense)
        static_assert(never<Student>, "opd: of a source that makes its tiles in scratch, shards of the vocabulary take "
                                      "divergences of a dense teacher alone");
    else
        return true;
    return false;
}

/// Of a call that does not fit, so that one sentence is all there is.
struct no_call {
    bool local() { return false; }
    std::span<std::byte> partials() const { return {}; }
    result finish() { return {}; }
    index_t backward() { return 0; }
};

/// The stages of one call; made by vocab_parallel().
template <class Job>
class sharded_call {
    using Student = decltype(Job::student);
    using Teacher = decltype(Job::teacher);
    using Rows = decltype(rows_of<lane_engine>(job_in_blocks(std::declval<const Job&>(), {}),
                                               std::declval<const shard_frame<host_frame>&>()));
    using State = typename Rows::state_type;
    using stage = shard_progress::stage;
    static constexpr bool blocks = has_blocks<Job>, few_ids = gathers<Job>;
    static constexpr bool keeps_scratch = exchanges_logits<Rows>; ///< entries; of dense rows nothing is in it

public:
    sharded_call(const vocab_shard& shard, const Job& job, thread_team& team, std::span<std::byte> arena)
        : job_(job), team_(&team) {
        owned_ = std::make_unique<workspace>();
        place(carver{owned_->get(plan(job, shard, team.size()), arena).data()});
        row_factors(frame_.env, job.rows, factors_);
        frame_.factors = factors_;
    }

    /// Bytes of arena.
    static std::size_t bytes(const Job& job, const vocab_shard& shard, int threads) {
        return sharded_call(job, shard, std::max(threads, 1)).bytes_ + 64;
    }

    /// This rank's part of the next round, or false: all rounds are done. Before each but the first the partials have
    /// become those of all ranks.
    bool local() {
        if (at_ == progress::reduced) return false;
        if (at_ > progress::reduced) throw invalid_input("local", "is called after finish");
        const bool first = at_ == progress::fresh;
        first ? begin() : take();
        for_blocks([&](index_t begin, index_t end, bool resident) {
            if constexpr (blocks) {
                if (!first) walk(begin, end, false); // to the next phase that reads logits, if there is one
                if (!resident)
                    fill_block(begin, end, [&](index_t r) {
                        return first ? frame_.env.mask.kept(r) : progress_[r].now == stage::wants_tiles;
                    });
            }
            walk(begin, end, true);
        });
        return collect();
    }
    /// After local(): the bytes to add up over all ranks.
    std::span<std::byte> partials() const { return {wire_, wire_bytes_}; }

    /// Loss and diagnostics, env.losses and env.lse. Once, after local() was false.
    result finish() {
        if (at_ != progress::reduced) throw invalid_input("finish", "is called once, after local() has returned false");
        if (frame_.env.on_infinite.act == infinite::action::raise)
            for (index_t r = 0; r < job_.rows; ++r)
                if (states_[r].report.infinite && !states_[r].report.bad) throw infinite_value(r);
        const auto k = rows();
        const host_plan groups(job_.rows, 0);
        for (index_t r = 0; r < job_.rows;) { // in groups, as `evaluate` adds up
            result of_group;
            for (const index_t end = std::min(r + groups.group, job_.rows); r < end; ++r) {
                end_row<Rows>::run(k, states_[r], alone{});
                of_group.loss += states_[r].partial.loss;
                of_group.diagnostics.merge(states_[r].partial.diagnostics);
            }
            all_.loss += of_group.loss;
            all_.diagnostics.merge(of_group.diagnostics);
        }
        at_ = progress::finished;
        if (!job_.student.has_gradient()) raise_bad(all_, frame_.env.on_bad);
        return all_;
    }

    /// The gradient. Once, after finish(); nothing where the student asks for none. Returns in how many rows this
    /// rank's part was more than its type holds: those entries are the largest finite number, for the loss has been
    /// told.
    index_t backward() {
        if (at_ != progress::finished) throw invalid_input("backward", "is called once, after finish()");
        if (!job_.student.has_gradient()) return 0;
        at_ = progress::written;
        for_blocks([&](index_t begin, index_t end, bool resident) {
            if constexpr (blocks)
                if (!resident) fill_block(begin, end, [&, k = rows()](index_t r) { return k.live(states_[r]); });
            filled_ = -1; // a block's gradient lies where its logits were, and the next block's are to come
            const auto k = rows();
            each_row(begin, end, [&](index_t r, int worker) {
                states_[r].scratch = scratch_of(r, worker);
                shard_writer<State> writer{states_[r]};
                k.row(writer);
                if constexpr (stores_gradient<Rows>) saturate_row(k, states_[r]);
            });
            if constexpr (few_ids)
                drain_gathered(rows().student, rows(), begin, end, job_.env.beta, begin == 0, few_ + block_ * width_,
                               *team_);
            if constexpr (blocks) makers_->begin_back(job_.env.beta), makers_->back_all(), makers_->finish();
        });
        raise_bad(all_, frame_.env.on_bad);
        index_t unfit = 0;
        for (index_t r = 0; r < job_.rows; ++r) unfit += states_[r].report.unfit;
        return unfit;
    }

private:
    enum class progress { fresh, exchanging, reduced, finished, written };
    Job job_;
    shard_frame<host_frame> frame_ = {};
    thread_team* team_ = nullptr;
    std::unique_ptr<workspace> owned_;
    progress at_ = progress::fresh;
    std::uint64_t round_ = 0;
    result all_ = {};
    // sizes
    int threads_ = 1;
    index_t total_ = 0;             ///< ids of all shards
    index_t block_ = 0, first_ = 0; ///< rows of a block, and the first of the one at hand
    index_t width_ = 0;             ///< ids a row whose logits are made one by one
    index_t filled_ = -1;           ///< the first of the one whose logits are there
    std::size_t row_scratch_ = 0, worker_scratch_ = 0, few_bytes_ = 0, slot_ = 0, stride_ = 0, bytes_ = 0,
                wire_bytes_ = 0;
    // memory
    double* factors_ = nullptr;          ///< (N)
    State* states_ = nullptr;            ///< (N)
    shard_progress* progress_ = nullptr; ///< (N)
    std::byte* kept_ = nullptr;          ///< (N) row_scratch_
    std::byte* scratch_ = nullptr;       ///< (threads) worker_scratch_
    std::byte* slots_ = nullptr;         ///< (N) slot_: what rows send, by row
    std::byte* wire_ = nullptr;          ///< the same without gaps, as it goes out and comes back
    std::optional<makers<Job>> makers_;  ///< of a block
    float* few_ = nullptr; ///< of a block: gradients of width_ ids a row, then what a head with an update needs

    sharded_call(const Job& job, const vocab_shard& shard, int threads) : job_(job) { (void)plan(job, shard, threads); }

    Rows rows() const {
        auto made = job_in_blocks(job_, makers_);
        if constexpr (few_ids) made.student.width = width_, made.student.gradient = few_, made.student.first = first_;
        return rows_of<lane_engine>(made, frame_);
    }

    std::size_t plan(const Job& job, const vocab_shard& shard, int threads) {
        frame_.shard = shard, total_ = shard.total;
        if constexpr (is_lumped<Teacher>) frame_.shard.total = job.teacher.common; // of the divergence's entries
        static_cast<host_frame&>(frame_) = {job.env, job.rows};
        carver nowhere;
        if constexpr (blocks) makers_.emplace(job, 0, 0, nowhere, team_, worker_floats{});
        const auto k = rows();
        (keeps_scratch ? row_scratch_ : worker_scratch_) = host_plan::aligned(shard_scratch_bytes(k));
        std::size_t logits = 0;
        if constexpr (keeps_scratch) logits = sizeof(double) * most_exchanged(k);
        slot_ = sizeof(partial_item) + most_partial_bytes + logits;
        threads_ = threads;
        block_ = std::max<index_t>(job.rows, 1);
        if constexpr (blocks) {
            host_plan sizes(job.rows, 0, true);
            plan_blocks(job, sizes, false); // whole rows: ranks take what rounds there are together
            block_ = sizes.block;
            worker_scratch_ = std::max(worker_scratch_, sizes.scratch);
        }
        if constexpr (few_ids) {
            host_plan sizes(job.rows, 0, true);
            width_ = k.width();
            plan_gathered(job.student, width_, sizes);
            block_ = sizes.block, few_bytes_ = sizes.blocks;
        }
        bytes_ = place({});
        return bytes_;
    }
    /// Everything's place in memory; without a base, how much that is.
    std::size_t place(carver memory) {
        const index_t n = job_.rows;
        const auto bytes = [&](std::size_t count, std::size_t size) {
            return memory.take<std::byte>(static_cast<index_t>(count * size));
        };
        const auto rows = static_cast<std::size_t>(n);
        factors_ = memory.take<double>(n);
        states_ = memory.take<State>(n);
        progress_ = memory.take<shard_progress>(n);
        kept_ = bytes(rows, row_scratch_);
        scratch_ = bytes(static_cast<std::size_t>(threads_), worker_scratch_);
        slots_ = bytes(rows, slot_);
        wire_ = bytes(1, sizeof(partials_head) + rows * slot_);
        if constexpr (few_ids) {
            few_ = reinterpret_cast<float*>(bytes(1, few_bytes_));
            frame_.env.beta = 0; // of the block; what goes back has the caller's
        }
        if constexpr (blocks) {
            makers_.emplace(job_, block_, 0, memory, team_, worker_floats{scratch_, worker_scratch_});
            if constexpr (in_blocks<Student>) frame_.env.beta = 0; // of the block; what goes back has the caller's
        }
        return memory.used;
    }
    std::byte* scratch_of(index_t r, int worker) const {
        return keeps_scratch ? kept_ + static_cast<std::size_t>(r) * row_scratch_
                             : scratch_ + static_cast<std::size_t>(worker) * worker_scratch_;
    }
    template <class Body>
    void each_row(index_t begin, index_t end, Body&& body) {
        const index_t chunk = std::max<index_t>(1, (end - begin + 255) / 256);
        team_->run((end - begin + chunk - 1) / chunk, [&](index_t c, int worker) {
            for (index_t r = begin + c * chunk; r < std::min(begin + (c + 1) * chunk, end); ++r) body(r, worker);
        });
    }
    /// body(first row, last, whether its logits are there) for each block; without blocks for all rows at once.
    template <class Body>
    void for_blocks(Body&& body) {
        for (index_t begin = 0; begin == 0 || begin < job_.rows; begin += block_) {
            first_ = begin;
            if constexpr (blocks) makers_->move_to(begin, std::min(begin + block_, job_.rows));
            body(begin, std::min(begin + block_, job_.rows), filled_ == begin);
        }
    }
    /// Logits of the rows of a block that are wanted. Only of a first round, in which all are, will they do for later
    /// ones.
    template <class Wanted>
    void fill_block(index_t begin, index_t end, Wanted&& wanted) {
        bool any = false;
        for (index_t r = begin; r < end; ++r) any |= wanted(r);
        if (!any) return;
        filled_ = at_ == progress::fresh ? begin : -1;
        makers_->ready(wanted), makers_->make_all();
    }

    void begin() {
        const auto k = rows();
        for (index_t r = 0; r < job_.rows; ++r) {
            new (progress_ + r) shard_progress{};
            new (states_ + r) State{};
            states_[r].row = r;
            begin_row<Rows>::run(k, states_[r], alone{});
            if (!states_[r].kept) progress_[r].now = stage::done;
        }
    }
    /// What has become of the partials.
    void take() {
        const auto head = read_as<partials_head>(wire_);
        const auto total = static_cast<std::uint64_t>(total_);
        if (head.ids != total || head.sum_of_ids != sum_of_ids(job_.teacher, 0, total_))
            throw invalid_input("shard", "the ranks' shards have " + std::to_string(head.ids) +
                                             " ids together: they are to hold each of the " + std::to_string(total) +
                                             " ids of shard.total once, and every rank's partials to be added up");
        bool same = head.round == round_ && head.stride == stride_;
        for (index_t r = 0; r < job_.rows; ++r) // what came back is of what went out
            if (progress_[r].now == stage::waiting)
                same = same &&
                       std::memcmp(item_of(r), slots_ + static_cast<std::size_t>(r) * slot_, sizeof(partial_item)) == 0;
        if (!same) throw invalid_input("partials", "are not of the round that this rank is in");
    }
    std::byte* item_of(index_t r) const {
        return wire_ + sizeof(partials_head) + static_cast<std::size_t>(progress_[r].item) * stride_;
    }
    void walk(index_t begin, index_t end, bool may_read) {
        const auto k = rows();
        each_row(begin, end, [&](index_t r, int worker) {
            shard_progress& p = progress_[r];
            if (p.now == stage::done) return;
            states_[r].scratch = scratch_of(r, worker);
            const std::byte* const merged = item_of(r);
            shard_team<State> team{states_[r], p, merged, slots_ + static_cast<std::size_t>(r) * slot_, may_read};
            k.row(team);
        });
    }
    /// What rows send, one behind the other, and whether that is anything.
    bool collect() {
        std::size_t stride = 0;
        index_t items = 0;
        const auto slot = [&](index_t r) { return slots_ + static_cast<std::size_t>(r) * slot_; };
        for (index_t r = 0; r < job_.rows; ++r) {
            if (progress_[r].now != stage::waiting) continue;
            const auto item = read_as<partial_item>(slot(r));
            stride = std::max(stride, sizeof item + bytes_of(item.kind) + 8 * static_cast<std::size_t>(item.logits));
            progress_[r].item = items++;
        }
        at_ = items > 0 ? progress::exchanging : progress::reduced;
        if (items == 0) return false;
        stride_ = stride, ++round_;
        wire_bytes_ = sizeof(partials_head) + static_cast<std::size_t>(items) * stride;
        write_as(wire_, head_of_shard(job_, frame_.shard.first, round_, items, stride));
        for (index_t r = 0; r < job_.rows; ++r)
            if (progress_[r].now == stage::waiting) std::copy_n(slot(r), stride, item_of(r));
        return true;
    }
};

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// The stages of a loss over a vocabulary in shards; see the head of this file. Keeps a reference to the backend's
/// threads and no more of it. `arena`: memory of `vocab_parallel_bytes` bytes that is the call's until it is done;
/// empty: the call's own.
template <class Backend, class Student, class Teacher, class Estimator>
auto vocab_parallel(Backend& be, vocab_shard shard, Student student, Teacher teacher, const Estimator& estimator,
                    env e = {}, std::span<std::byte> arena = {}) {
    if constexpr (detail::fits_shards<Backend, Student, Teacher, Estimator>()) {
        const auto job = detail::checked_shard_job(shard, student, teacher, estimator, e);
        return detail::sharded_call<std::remove_cvref_t<decltype(job)>>(shard, job, be.team(), arena);
    } else {
        return detail::no_call{};
    }
}

/// Bytes of arena that the same call to `vocab_parallel` needs.
template <class Backend, class Student, class Teacher, class Estimator>
std::size_t vocab_parallel_bytes(const Backend& be, vocab_shard shard, Student student, Teacher teacher,
                                 const Estimator& estimator, env e = {}) {
    if constexpr (detail::fits_shards<Backend, Student, Teacher, Estimator>()) {
        const auto job = detail::checked_shard_job(shard, student, teacher, estimator, e);
        return detail::sharded_call<std::remove_cvref_t<decltype(job)>>::bytes(job, shard, be.threads);
    } else {
        return 0;
    }
}

} // namespace OPD_ISA

} // namespace opd
