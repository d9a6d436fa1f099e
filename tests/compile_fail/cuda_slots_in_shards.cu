// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: opd: on a GPU shards of a vocabulary are of dense rows
// control: FIXED
#include <opd/backends/cuda_vocab_parallel.cuh>
#include <opd/opd.hpp>

using student = opd::student::logits<float, float, opd::space::device>;
#ifdef FIXED
using teacher = opd::teacher::dense<float, opd::space::device>;
constexpr opd::reverse_kl estimator;
#else
using teacher = opd::teacher::support<int, float, opd::space::device>;
constexpr opd::tail_bucket<opd::reverse_kl> estimator;
#endif

opd::device_result call(opd::cuda_backend& be, const student& s, const teacher& t) {
    return opd::vocab_parallel(be, {0, 8}, s, t, estimator, opd::device_env{}, 2,
                               [](const void*, void*, std::size_t, cudaStream_t) {});
}
