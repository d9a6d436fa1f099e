// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Student logits of -inf, as a filter leaves them, under every estimator and every element type: the loss is a number,
// dz is a number everywhere, exactly 0 at -inf (entries of a cache aside), and sums to 0 over the row.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

/// Leaves with and without -inf: whole leaves of it, the first entries of each, none at all.
enum class pattern { scattered, whole_leaf, ends, all_but_one };

template <class T>
struct filtered_rows {
    static constexpr index_t rows = 3, k = 4;
    index_t vocab;
    std::vector<T> z, y, dz, sparse;
    std::vector<std::int32_t> ids; // of each row, all with mass on both sides
    std::vector<float> log_q, log_mu, log_tail, weight;

    filtered_rows(index_t v, pattern how, std::uint64_t seed) : vocab(v) {
        numbers u(seed);
        for (index_t r = 0; r < rows; ++r) {
            std::vector<index_t> kept;
            for (index_t i = 0; i < vocab; ++i) {
                bool gone = u.uniform() < 0.4;
                if (how == pattern::whole_leaf) gone = i / 1024 == r;
                if (how == pattern::ends) gone = i < 3 || i >= vocab - 3;
                if (how == pattern::all_but_one) gone = true;
                if (i == vocab / 2) gone = false;
                if (!gone) kept.push_back(i);
                const auto cast = [](double x) { return element<T>::store(static_cast<arithmetic_t<T>>(x)); };
                z.push_back(cast(gone ? detail::neg_inf<double>() : 3 * u.normal()));
                y.push_back(cast(gone ? detail::neg_inf<double>() : 3 * u.normal()));
            }
            for (index_t j = 0; j < k; ++j) {
                // distinct where that can be: ids from different parts of what is kept
                const auto n = index_t(kept.size());
                ids.push_back(std::int32_t(n >= k ? kept[std::size_t(j * n / k)] : (kept[0] + j) % vocab));
                log_q.push_back(float(-1 - u.uniform())), log_mu.push_back(float(-1 - u.uniform()));
                weight.push_back(0.3F);
            }
            log_tail.push_back(-2);
        }
        dz.resize(z.size()), sparse.resize(std::size_t(rows * k));
    }

    template <class Teacher, class Estimator>
    std::string violation(const Teacher& t, const Estimator& e) {
        cpu_backend backend;
        std::fill(dz.begin(), dz.end(), element<T>::store(7));
        const student::logits<T> s{view(std::as_const(z).data(), rows, vocab), view(dz.data(), rows, vocab)};
        const result r = evaluate(backend, s, t, e, {.reduction = reduce::sum});
        if (r.diagnostics.bad_rows != 0) return "a bad row";
        if (!detail::is_finite(r.loss)) return "a loss that is no number";
        for (index_t row = 0; row < rows; ++row) {
            double sum = 0, size = 0;
            for (index_t v = 0; v < vocab; ++v) {
                const auto at = std::size_t(row * vocab + v);
                const double g = double(element<T>::load(dz[at]));
                if (!detail::is_finite(g)) return "dz " + std::to_string(v) + " is no number";
                const auto entries = ids.begin() + row * k; // an entry has a c of its own
                const bool entry = std::find(entries, entries + k, v) != entries + k;
                if (detail::is_neg_inf(element<T>::load(z[at])) && !entry && g != 0)
                    return "dz " + std::to_string(v) + " is " + std::to_string(g) + " where the logit is -inf";
                sum += g, size += std::abs(g);
            }
            // a stored gradient is rounded to its type, half's smallest number being 2^-24; float lanes carry an ulp of
            // 1
            const double eps = sizeof(T) == 2 ? 0x1p-8 : (sizeof(T) == 4 ? 1e-6 : 1e-13);
            const double least = sizeof(T) == 2 ? 0x1p-25 * double(vocab) : (sizeof(T) == 4 ? 1e-6 : 1e-13);
            if (!(std::abs(sum) <= eps * size + least + 1e-6 * double(sizeof(T) == 2)))
                return "dz sums to " + std::to_string(sum) + " of " + std::to_string(size);
        }
        return "";
    }
};

template <class T>
void every_estimator(const char* type) {
    std::uint64_t seed = 11;
    for (const index_t vocab : {5, 64, 1100, 3100})
        for (const pattern how : {pattern::scattered, pattern::whole_leaf, pattern::ends, pattern::all_but_one}) {
            if (vocab < 16 && how == pattern::ends) continue;
            if (vocab <= 1024 * 3 && how == pattern::whole_leaf) continue; // a row would have no mass
            filtered_rows<T> f(vocab, how, ++seed);
            const auto n = f.rows, k = f.k;
            const auto ids = view(std::as_const(f.ids).data(), n, k);
            const auto m = [&](const std::vector<float>& x) { return view(x.data(), n, k); };
            const teacher::support<std::int32_t> support{ids, m(f.log_q), f.log_tail};
            const teacher::samples<std::int32_t> samples{ids, m(f.log_mu), m(f.log_q)};
            const teacher::weighted<std::int32_t> weighted{ids, m(f.weight), m(f.log_mu), m(f.log_q)};
            const teacher::dense<T> dense{view(std::as_const(f.y).data(), n, vocab)};
            const auto check = [&](const char* name, const auto& t, const auto& e) {
                INFO(std::string(type) << ", " << std::string(name) << ", V " << vocab << ", pattern " << int(how));
                CHECK(f.violation(t, e) == "");
            };
            check("reverse KL", dense, reverse_kl{});
            check("JSD", dense, jsd{});
            check("renormalised reverse KL", support, renormalised{reverse_kl{}});
            check("tail-bucketed reverse KL", support, tail_bucket{reverse_kl{}});
            check("tail-bucketed forward KL", support, tail_bucket{forward_kl{}});
            check("tail-bucketed total variation", support, tail_bucket{total_variation{}});
            check("samples", samples, mc{.baseline = baseline::leave_one_out{}});
            check("weighted", weighted, mc{reverse_kl{}});
        }
}

} // namespace

TEST_CASE("double") { every_estimator<double>("double"); }
TEST_CASE("float") { every_estimator<float>("float"); }
TEST_CASE("bfloat16") { every_estimator<bfloat16>("bfloat16"); }
TEST_CASE("half") { every_estimator<half>("half"); }
