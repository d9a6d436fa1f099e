// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd: unknown element type: specialise opd::element
// errors: 1
// control: FIXED
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

struct mine {
    std::uint16_t bits;
};
#ifdef FIXED
template <>
struct opd::element<mine> : opd::same_bits<mine, opd::bfloat16> {};
#endif

int main() {
    const mine z[4] = {};
    const float y[4] = {};
    float dz[4];
    opd::eigen_backend backend;
    const opd::teacher::dense teacher{opd::view(y, 1, 4)};
    const opd::student::logits student{opd::view(z, 1, 4), opd::view(dz, 1, 4)};
    opd::evaluate(backend, student, teacher, opd::reverse_kl{});
}
