// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A source of rows that hands out single logits and no tiles.
// expect: opd: a source of rows answers rows\(\), vocab\(\), tile_size\(\), tile\(place, begin\), logit\(place, id\)
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
    opd::index_t rows() const { return 1; }
    opd::index_t vocab() const { return 1024; }
    opd::index_t tile_size() const { return 1024; }
    float logit(opd::row_place, opd::index_t) const { return 0; }
#ifdef OPD_CONTROL
    float row[1024] = {};
    const float* tile(opd::row_place, opd::index_t) const { return row; }
#endif
};

void call(opd::cpu_backend& be, opd::student::logits<float> s) {
    opd::evaluate(be, s, constant_teacher{}, opd::reverse_kl{});
}
