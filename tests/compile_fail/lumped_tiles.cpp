// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A bucket for other vocabularies wants whole rows: of logits or hidden states, not of a source in tiles.
// expect: opd: this backend has no rows for this student, cache and estimator
// errors: 1
// control: OPD_CONTROL
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

struct constant_teacher {
    using logit_type = float;
    static constexpr opd::cache_kind kind = opd::cache_kind::dense;
    static constexpr opd::space memory_space = opd::space::host;
    static constexpr bool one_tile = false;
    float temperature = 1;
    float row[1024] = {};
    opd::index_t rows() const { return 1; }
    opd::index_t vocab() const { return 1024; }
    opd::index_t tile_size() const { return 1024; }
    const float* tile(opd::row_place, opd::index_t begin) const { return row + begin; }
    float logit(opd::row_place, opd::index_t id) const { return row[id]; }
};

#ifdef OPD_CONTROL
using teacher = opd::teacher::hidden<float>;
#else
using teacher = constant_teacher;
#endif

void call(opd::cpu_backend& be, opd::student::logits<float> s, const teacher& t) {
    opd::evaluate(be, s, opd::teacher::lumped<teacher>{t}, opd::reverse_kl{});
}
