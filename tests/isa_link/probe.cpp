// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled three times, for three instruction sets, under three names: a program that has its fast files compiled for a
// newer machine. OPD_PROBE is the function's name. Returns a few numbers that use the lanes.
#ifdef OPD_PLANTED // what check.cmake must find
float planted_caller(float x);
namespace opd {
[[gnu::noinline]] inline float planted(float x) { return x + 1; }
} // namespace opd
float planted_caller(float x) { return opd::planted(x); }
#else
#include <cstddef>
#include <opd/backends/eigen.hpp>
#include <opd/opd.hpp>
#include <opd/product.hpp>
#include <vector>

std::vector<float> OPD_PROBE();

std::vector<float> OPD_PROBE() {
    constexpr opd::index_t rows = 5, columns = 37, depth = 19, vocab = 3000;
    std::vector<float> a(rows * depth), b(depth * columns), r(rows * columns); // (M,K), (K,N), (M,N)
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = 0.01f * static_cast<float>(i % 101) - 0.5f;
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = 0.02f * static_cast<float>(i % 53) - 0.4f;
    opd::product(opd::serial_executor{},
                 opd::product_nn<float>(rows, columns, depth, a.data(), depth, b.data(), columns, r.data(), columns));

    std::vector<float> z(rows * vocab), y(rows * vocab), dz(rows * vocab); // (N,V)
    for (std::size_t i = 0; i < z.size(); ++i) {
        z[i] = 0.05f * static_cast<float>(i % 127);
        y[i] = 0.04f * static_cast<float>(i % 151);
    }
    opd::eigen_backend be{.threads = 2};
    const auto both = [&](const auto& divergence) {
        const auto loss =
            opd::evaluate(be, opd::student::logits{opd::view(z.data(), rows, vocab), opd::view(dz.data(), rows, vocab)},
                          opd::teacher::dense{opd::view(y.data(), rows, vocab)}, divergence);
        r.push_back(static_cast<float>(loss.loss));
        r.insert(r.end(), dz.begin(), dz.begin() + 200);
    };
    both(opd::reverse_kl{});
    both(opd::jsd{});

    std::vector<int> ids;
    std::vector<float> log_q, log_mu; // (N,k)
    constexpr opd::index_t k = 8;
    for (int i = 0; i < rows * k; ++i) ids.push_back(37 * i % vocab), log_q.push_back(-3), log_mu.push_back(-2.5f);
    const auto of = [](const auto& x) { return opd::view(x.data(), rows, k); };
    const opd::student::logits<float> student{opd::view(static_cast<const float*>(z.data()), rows, vocab),
                                              opd::view(dz.data(), rows, vocab)};
    const opd::teacher::support support{of(ids), of(log_q)};
    const opd::teacher::samples samples{of(ids), of(log_mu), of(log_q)};
    r.push_back(static_cast<float>(opd::evaluate(be, student, support, opd::tail_bucket{opd::forward_kl{}}).loss));
    r.push_back(static_cast<float>(opd::evaluate(be, student, support, opd::renormalised{opd::jsd{}}).loss));
    r.push_back(static_cast<float>(opd::evaluate(be, student, samples, opd::mc{opd::reverse_kl{}}).loss));
    r.insert(r.end(), dz.begin(), dz.begin() + 200);
    return r;
}
#endif
