// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Scores read whole rows: a source in tiles has none.
// expect: opd: scores and draws read whole rows: of a view, student::logits, teacher::dense
// errors: 1
// control: OPD_CONTROL
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

struct constant_teacher {
    using logit_type = float;
    static constexpr opd::cache_kind kind = opd::cache_kind::dense;
    static constexpr opd::space memory_space = opd::space::host;
#ifdef OPD_CONTROL
    static constexpr bool one_tile = true;
#else
    static constexpr bool one_tile = false;
#endif
    float temperature = 1;
    float row[1024] = {};
    opd::index_t rows() const { return 1; }
    opd::index_t vocab() const { return 1024; }
    opd::index_t tile_size() const { return 1024; }
    const float* tile(opd::row_place, opd::index_t begin) const { return row + begin; }
    float logit(opd::row_place, opd::index_t id) const { return row[id]; }
};

void call(opd::cpu_backend& be, opd::vector_view<double> lse) { opd::log_sum_exp(be, constant_teacher{}, lse); }
