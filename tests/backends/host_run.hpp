// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A backend that runs the GPU's kernels on the host: the phases of rows/rows.hpp in a loop over thread indices, one
// block after the other. Slow; it shows that the kernels' logic is right where there is no GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

#include "opd/cuda/jobs.hpp"

namespace opd::test {

/// A block of `threads` threads, one at a time. (OPD_HD so that nvcc, too, compiles a host backend.)
template <class State>
struct host_team {
    int threads;
    bool tree; ///< merge as a tree of neighbours, else one after the other
    State state_ = {};

    OPD_HD void begin(index_t row, std::byte* scratch) {
        state_ = State{};
        state_.row = row;
        state_.scratch = scratch;
    }
    OPD_HD void move_to(index_t row) { state_.row = row; }
    template <class Phase, class Kernel>
    OPD_HD void fold(const Kernel& k) {
        if (!detail::is_due<Phase>(k, state_)) return;
        const auto part = [&](int t) { return Phase::part(k, state_, detail::one_of{t, threads}); };
        using partial = decltype(part(0));
        if constexpr (requires { typename partial::agreed_type; }) { // as block_team has it, each part taken twice
            using agreed = typename partial::agreed_type;
            const agreed all = merged<agreed>([&](int t) { return part(t).proposed(); }, agreed::merge, 0, threads);
            const auto moved = [&](int t) {
                partial p = part(t);
                p.agree(all);
                return p;
            };
            using sums = typename partial::addends;
            partial p = moved(0);
            p.take(merged<sums>([&](int t) { return moved(t).summed(); }, sums::merge, 0, threads));
            Phase::finish(k, state_, p);
        } else {
            Phase::finish(k, state_, merged<partial>(part, Phase::merge, 0, threads));
        }
    }
    template <class Phase, class Kernel>
    OPD_HD void repeat(const Kernel& k) {
        while (detail::is_due<Phase>(k, state_)) fold<Phase>(k);
    }
    template <class Phase, class Kernel, class... Extra>
    OPD_HD void each(const Kernel& k, Extra... extra) {
        if (!detail::is_due<Phase>(k, state_)) return;
        for (int t = 0; t < threads; ++t) Phase::run(k, state_, detail::one_of{t, threads}, extra...);
    }

private:
    /// Threads first to first + count - 1.
    template <class T, class Of, class Merge>
    OPD_HD T merged(const Of& of, const Merge& merge, int first, int count) {
        if (count == 1) return of(first);
        const int left = tree ? count / 2 : count - 1;
        return merge(merged<T>(of, merge, first, left), merged<T>(of, merge, first + left, count - left));
    }
};

struct host_run_backend {
    static constexpr space memory_space = space::host;
    int threads = 128;
    bool tree = true;
    std::vector<std::byte> arena = {};

    template <class Job>
    result for_rows(const Job& job);
};

template <class Job>
result host_run_backend::for_rows(const Job& job) {
    if constexpr (requires { job.env; }) detail::refuse_options(job.env);
    const detail::device_plan plan = detail::plan_of(job);
    arena.assign(plan.bytes + 64, std::byte{0xa5}); // nothing may rest on what the memory held
    void* p = arena.data();
    std::size_t room = arena.size();
    auto* memory = static_cast<std::byte*>(std::align(64, plan.bytes, p, room));
    auto* out = reinterpret_cast<result*>(memory);
    detail::run_job(job, memory, out, [this](const auto& kernel, index_t blocks) {
        for (index_t b = 0; b < blocks; ++b) {
            host_team<typename std::remove_cvref_t<decltype(kernel)>::state_type> team{threads, tree};
            kernel.run(b, team);
        }
    });
    return *out;
}

} // namespace opd::test
