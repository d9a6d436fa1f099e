// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: opd: a gradient of slots is not a shard's
// control: FIXED
#include <opd/backends/cuda_vocab_parallel.cuh>
#include <opd/opd.hpp>

using teacher = opd::teacher::support<int, float, opd::space::device>;
#ifdef FIXED
using student = opd::student::logits<float, float, opd::space::device>;
#else
using student = opd::student::on_support<float, float, opd::space::device>;
#endif

opd::device_result call(opd::cuda_backend& be, const student& s, const teacher& t) {
    return opd::vocab_parallel(be, {0, 8}, s, t, opd::renormalised{opd::reverse_kl{}}, opd::device_env{}, 2,
                               [](const void*, void*, std::size_t, cudaStream_t) {});
}
