// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A user whose logits are Eigen matrices: reverse KL of (1/2, 1/2) against (3/4, 1/4), as in core_only.cpp.
#include <cmath>
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>

int main() {
    using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    matrix z = matrix::Zero(1, 2), y = z, dz = z;
    y(0, 0) = std::log(3.0f);
    opd::eigen_backend be{};
    const auto r = opd::evaluate(be, opd::student::logits{opd::view(z), opd::view(dz)},
                                 opd::teacher::dense{opd::view(y)}, opd::reverse_kl{});
    const float slope = std::log(3.0f) / 4;
    const bool right =
        std::abs(r.loss - 0.143841) < 1e-5 && std::abs(dz(0, 0) + slope) < 1e-5f && std::abs(dz(0, 1) - slope) < 1e-5f;
    return right ? 0 : 1;
}
