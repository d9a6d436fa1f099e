// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// log p of given ids:
//
//   sweep · gather                                                             1 read
#pragma once

#include <cstddef>

#include "opd/config.hpp"
#include "opd/detail/entry_rows.hpp"
#include "opd/detail/rows.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/element.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Engine, class Frame, class Job>
struct logp_rows {
    using Z = typename Job::logit_type;
    using L = typename Job::log_type;
    using G = Z;
    using state_type = entry_state;
    using sweep = student_sweep<Engine, logp_rows, false>;
    static constexpr bool one_tile = true;

    Frame frame;
    Job job;
    index_t vocab;
    double inv_s;

    logp_rows(const Frame& frame_, const Job& job_)
        : frame(frame_), job(job_), vocab(job_.z.cols), inv_s(1 / double(job_.temperature)) {}

    std::size_t scratch_bytes() const { return 0; }
    OPD_HD row_tile<Z, Z, G> tile(const state_type& st, index_t begin, index_t count) const {
        return {job.z.row(st.row) + begin, nullptr, nullptr, begin, count};
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<sweep>(*this);
        team.template fold<store>(*this);
    }
    OPD_HD static bool sweeps(const state_type& st) { return st.kept; }
    /// Writes its share and says whether an id was out of range; a bad id says nothing of its neighbours.
    struct store : finds_bad {
        OPD_HD static bool due(const logp_rows&, const state_type& st) { return st.kept; }
        template <class At>
        OPD_HD static int part(const logp_rows& k, const state_type& st, At at) {
            int bad = 0;
            for (index_t j = at.id; j < k.job.ids.cols; j += at.count) {
                const auto id = static_cast<index_t>(k.job.ids(st.row, j));
                const bool in = id >= 0 && id < k.vocab;
                bad |= !in;
                const double lp =
                    in && !st.report.bad ? log_p_of(k.job.z(st.row, id), k.inv_s, st.report.lse) : neg_inf<double>();
                k.job.out(st.row, j) = element<L>::store(static_cast<arithmetic_t<L>>(lp));
            }
            return bad;
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
