// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize, whole-compiler
//
// How far a policy has moved from the one that drew an offline data set: every figure against sums over all sequences
// (V ≤ 4, at most 4 tokens, with and without an end token), standard errors against the exact variance over all pairs,
// numbers by hand, cuts, bad numbers, gaps to 1,000 nats. Lightning OPD's theorems 3.5, 3.7, 3.9 and 3.13 by the same
// enumeration, gradients being those of Σ_t A_t ∇log p(a_t|s_t):
//
//   3.5: |∇J_on - ∇J_off| <= G σ_A √chi²            with σ_A² = E[(Σ_t |A_t|)²]. As printed, with |Σ_t A_t|, it fails,
//                                                   by up to 3.2 times
//   3.7: both objectives have the same stationary   where the students include the teacher
//   points
//   3.7: every stationary point has the least       not without that, even online: the sum leaves out what a token
//   KL(p‖q)                                         does to later ones; `credit` puts it back
//   3.9: ∇J_off = ∇J_on - Cov(w, f)                 exactly. Remark 3.10, that this covariance opposes drift: not in
//                                                   general
//   3.13: a wrong teacher puts the online gradient  with σ_Δ² = E[(Σ_t |Δ_t|)²] under the gradient's own policy. As
//   off by at most G σ_Δ                            printed, with |Σ_t Δ_t| under pi_ref, it fails
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <opd/offline_drift.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using row = std::vector<double>;

row log_softmax(const row& z) {
    double sum = 0;
    const double top = *std::max_element(z.begin(), z.end());
    for (const double x : z) sum += std::exp(x - top);
    row out;
    for (const double x : z) out.push_back(x - top - std::log(sum));
    return out;
}

/// A sequence: its tokens, and the number of the prefix before each.
struct path {
    std::vector<std::size_t> ids, prefixes;
};

/// Every sequence of exactly `length` tokens, or up to it where id 0 ends one.
struct tree {
    std::size_t vocab, length;
    bool ends;
    std::size_t prefixes = 0;
    std::vector<path> paths = {};

    tree(std::size_t v, std::size_t l, bool e) : vocab(v), length(l), ends(e) {
        path x;
        grow(x);
    }

private:
    void grow(path& x) {
        const std::size_t here = prefixes++;
        for (std::size_t a = 0; a < vocab; ++a) {
            x.ids.push_back(a), x.prefixes.push_back(here);
            if (x.ids.size() == length || (ends && a == 0))
                paths.push_back(x);
            else
                grow(x);
            x.ids.pop_back(), x.prefixes.pop_back();
        }
    }
};

/// Log-probs at each prefix of a tree.
struct policy {
    std::vector<row> at;
    policy(const tree& t, numbers& u, double spread) {
        for (std::size_t s = 0; s < t.prefixes; ++s) {
            row z;
            for (std::size_t a = 0; a < t.vocab; ++a) z.push_back(spread * u.normal());
            at.push_back(log_softmax(z));
        }
    }
    policy(const tree& t, const row& z) : at(t.prefixes, log_softmax(z)) {} // blind to its prefix
    row on(const path& x) const {
        row out;
        for (std::size_t i = 0; i < x.ids.size(); ++i) out.push_back(at[x.prefixes[i]][x.ids[i]]);
        return out;
    }
    double log_of(const path& x) const {
        double sum = 0;
        for (const double l : on(x)) sum += l;
        return sum;
    }
    double of(const path& x) const { return std::exp(log_of(x)); }
};

/// f(x) = Σ_t A_t ∇log p(a_t|s_t) in the logits: (prefixes·V), or (V) where all prefixes share them.
row direction(const tree& t, const path& x, const policy& p, const policy& q, bool shared) {
    row f((shared ? 1 : t.prefixes) * t.vocab, 0.0);
    for (std::size_t i = 0; i < x.ids.size(); ++i) {
        const std::size_t s = x.prefixes[i], base = shared ? 0 : s * t.vocab;
        const double a = q.at[s][x.ids[i]] - p.at[s][x.ids[i]];
        for (std::size_t v = 0; v < t.vocab; ++v)
            f[base + v] += a * ((v == x.ids[i] ? 1.0 : 0.0) - std::exp(p.at[s][v]));
    }
    return f;
}
void add_to(row& sum, const row& x, double by) {
    if (sum.empty()) sum.assign(x.size(), 0.0);
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += by * x[i];
}
double dot(const row& a, const row& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}
double norm(const row& a) { return std::sqrt(dot(a, a)); }

/// E over sequences of `under` of f: the paper's ∇J_on under p, ∇J_off under pi_ref.
row mean_direction(const tree& t, const policy& under, const policy& p, const policy& q, bool shared) {
    row sum;
    for (const path& x : t.paths) add_to(sum, direction(t, x, p, q, shared), under.of(x));
    return sum;
}

vector_view<const double> view_of(const row& x) { return view(x.data(), x.size()); }

/// The figures of a data set of these sequences.
offline_drift measured(const std::vector<path>& paths, const policy& p, const policy& ref, const policy* q = nullptr) {
    row lp, lr, lq;
    std::vector<std::int64_t> offsets{0};
    for (const path& x : paths) {
        const auto append = [](row& to, const row& from) { to.insert(to.end(), from.begin(), from.end()); };
        append(lp, p.on(x)), append(lr, ref.on(x));
        if (q != nullptr) append(lq, q->on(x));
        offsets.push_back(std::int64_t(lp.size()));
    }
    offline_drift d;
    d.add(view_of(lp), view_of(lr), offsets, {}, q != nullptr ? view_of(lq) : vector_view<const double>());
    return d;
}

bool near(double a, double b, double scale = 0) {
    return std::abs(a - b) <= 1e-11 * std::max({1.0, std::abs(a), std::abs(b), scale});
}

struct three {
    tree t;
    policy p, ref, q;
    three(numbers& u, std::size_t vocab, std::size_t length, bool ends, double spread)
        : t(vocab, length, ends), p(t, u, spread), ref(t, u, spread), q(t, u, spread) {}
};
three any_three(numbers& u, index_t longest) {
    return {u, std::size_t(2 + u.below(3)), std::size_t(1 + u.below(longest)), u.below(2) == 0, 0.2 + 2 * u.uniform()};
}

} // namespace

TEST_CASE("over all sequences, every estimate has the mean that it estimates") {
    property("unbiased", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const three w = any_three(u, 4);
        double ratio = 0, square = 0, k1 = 0, k3 = 0, whole = 0, whole_square = 0, log_ratio = 0, advantage = 0;
        double tokens_square = 0, kl = 0, chi = -1, gaps = 0, all = 0;
        for (const path& x : w.t.paths) {
            const offline_drift d = measured({x}, w.p, w.ref, &w.q);
            const double weight = w.ref.of(x), n = double(x.ids.size());
            RC_ASSERT(d.tokens == index_t(n));
            all += weight;
            ratio += weight * n * (d.ratio_mean() - 1), square += weight * n * d.chi_squared();
            k1 += weight * n * d.k1(), k3 += weight * n * d.k3();
            whole += weight * d.sequence_ratio_mean(), whole_square += weight * d.sequence_chi_squared();
            log_ratio += weight * d.log_ratio_mean, advantage += weight * d.sigma_a() * d.sigma_a();
            // what they should be
            const row p = w.p.on(x), ref = w.ref.on(x), q = w.q.on(x);
            double gap = 0;
            for (std::size_t i = 0; i < p.size(); ++i) gap += std::abs(q[i] - p[i]);
            gaps += weight * gap * gap;
            chi += w.p.of(x) * w.p.of(x) / weight, kl += weight * (w.ref.log_of(x) - w.p.log_of(x));
        }
        std::vector<double> reach(w.t.prefixes, 0.0); // of pi_ref, from the first sequence through each prefix
        std::vector<bool> seen(w.t.prefixes, false);
        for (const path& x : w.t.paths) {
            double before = 1;
            for (std::size_t i = 0; i < x.ids.size(); ++i) {
                const std::size_t s = x.prefixes[i];
                if (!seen[s]) reach[s] = before, seen[s] = true;
                before *= std::exp(w.ref.at[s][x.ids[i]]);
            }
        }
        for (std::size_t s = 0; s < w.t.prefixes; ++s) {
            double at = -1;
            for (std::size_t v = 0; v < w.t.vocab; ++v) at += std::exp(2 * w.p.at[s][v] - w.ref.at[s][v]);
            tokens_square += reach[s] * at;
        }
        RC_ASSERT(near(all, 1));
        RC_ASSERT(near(ratio, 0, tokens_square));
        RC_ASSERT(near(square, tokens_square));
        RC_ASSERT(near(k1, kl));
        RC_ASSERT(near(k3, kl, tokens_square));
        RC_ASSERT(near(whole, 1, chi));
        RC_ASSERT(near(whole_square, chi));
        RC_ASSERT(near(log_ratio, -kl));
        RC_ASSERT(near(advantage, gaps));
    });
}

TEST_CASE("over all pairs of sequences, the squared standard error has the variance of the mean as its mean") {
    property("errors", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const three w(u, std::size_t(2 + u.below(2)), std::size_t(1 + u.below(2)), false, 1.0);
        struct moments {
            double mean = 0, square = 0, error = 0;
            void add(double weight, double x, double e) {
                mean += weight * x, square += weight * x * x, error += weight * e * e;
            }
            bool right() const { return near(error, square - mean * mean, square); }
        };
        moments ratio, chi, k1, k3, whole, whole_chi;
        for (const path& a : w.t.paths)
            for (const path& b : w.t.paths) {
                const offline_drift d = measured({a, b}, w.p, w.ref);
                const double weight = w.ref.of(a) * w.ref.of(b);
                ratio.add(weight, d.ratio_mean(), d.ratio_mean_error());
                chi.add(weight, d.chi_squared(), d.chi_squared_error());
                k1.add(weight, d.k1(), d.k1_error()), k3.add(weight, d.k3(), d.k3_error());
                whole.add(weight, d.sequence_ratio_mean(), d.sequence_ratio_mean_error());
                whole_chi.add(weight, d.sequence_chi_squared(), d.sequence_chi_squared_error());
            }
        for (const moments* m : {&ratio, &chi, &k1, &k3, &whole, &whole_chi}) RC_ASSERT(m->right());
        RC_ASSERT(near(ratio.mean, 1));
    });
}

TEST_CASE("by hand: masks, bad tokens, tokens without mass, an error of sequences of different length") {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    const double l2 = std::log(2.0), l3 = std::log(3.0);
    //                    w =  2  (masked)  1/2 |  3 |  bad, 2 |   0   | nothing kept
    const std::vector<float> ref{-2, -1, -2, -3, -1, -2, -1, -1};
    const row p{-2 + l2, nan, -2 - l2, -3 + l3, nan, -2 + l2, -inf, nan};
    const row q{-2 + l2 + 1, nan, -2 - l2 - 2, -3 + l3 - .5, -1, -2, -1, nan};
    const std::vector<std::int32_t> offsets{0, 3, 4, 6, 7, 8};
    const std::vector<std::uint8_t> mask{1, 0, 1, 1, 1, 1, 1, 0};
    offline_drift d{.clip = 1.5};
    d.add(view_of(p), view(ref.data(), ref.size()), offsets, mask, view_of(q));
    CHECK(d.tokens == 5);
    CHECK(d.bad_tokens == 1);
    CHECK(d.first_bad_token == 4);
    CHECK(d.sequences == 3);
    CHECK(d.bad_sequences == 1);
    CHECK(d.no_mass == 1);
    CHECK(d.no_mass_sequences == 1);
    CHECK(d.saturated == 0);
    const double mean = 7.5 / 5; // of 2, 1/2, 3, 2, 0
    CHECK(d.ratio_mean() == doctest::Approx(mean).epsilon(1e-14));
    CHECK(d.ratio_deviation() ==
          doctest::Approx(std::sqrt((4 + .25 + 9 + 4 + 0 - 5 * mean * mean) / 4)).epsilon(1e-14));
    CHECK(d.chi_squared() == doctest::Approx((1 + .25 + 4 + 1 + 1) / 5).epsilon(1e-14));
    CHECK(d.effective_sample_size() == doctest::Approx(7.5 * 7.5 / 17.25).epsilon(1e-14));
    CHECK(d.effective_share() == doctest::Approx(7.5 * 7.5 / 17.25 / 5).epsilon(1e-14));
    CHECK(d.k1() == doctest::Approx((l2 - l2 - l3 - l2) / 4).epsilon(1e-14));
    CHECK(d.k3() == doctest::Approx((1 - l2 - .5 + l2 + 2 - l3 + 1 - l2) / 4).epsilon(1e-14));
    // sums of w by sequence 2.5, 3, 2, 0 over 2, 1, 1, 1 tokens: residuals about 1.5 a token
    CHECK(d.ratio_mean_error() == doctest::Approx(std::sqrt(4.0 / 3 * (.25 + 2.25 + .25 + 2.25)) / 5).epsilon(1e-14));
    CHECK(d.sequence_ratio_mean() == doctest::Approx(4.0 / 3).epsilon(1e-14)); // of 1, 3, 0
    CHECK(d.sequence_chi_squared() == doctest::Approx(5.0 / 3).epsilon(1e-14));
    CHECK(d.sequence_ratio_deviation() == doctest::Approx(std::sqrt(7.0 / 3)).epsilon(1e-14));
    CHECK(d.sequence_effective_share() == doctest::Approx(16.0 / 10 / 3).epsilon(1e-14));
    CHECK(d.log_ratio_mean == doctest::Approx(l3 / 2).epsilon(1e-14));
    CHECK(d.log_ratio_deviation() == doctest::Approx(l3 / std::sqrt(2.0)).epsilon(1e-14));
    CHECK(d.log_ratio_least == doctest::Approx(0).epsilon(1e-14));
    CHECK(d.log_ratio_most == doctest::Approx(l3).epsilon(1e-14));
    CHECK(d.sigma_a() ==
          doctest::Approx(std::sqrt((2.5 * 2.5 + .25 + 1.5 * 1.5) / 3)).epsilon(1e-14)); // 1 + 1.5, .5, cut
    CHECK(d.gradient_gap_bound() == doctest::Approx(std::sqrt(2 * 8.75 / 3 * 5 / 3)).epsilon(1e-14));
    CHECK(to_string(d).find("5 tokens: mean ratio 1.5 ") == 0);
    CHECK(to_string(d).find("1 bad tokens, left out; 1 tokens of which the student has no mass") != std::string::npos);

    for (const double off : {0.5, -0.5}) { // extremes of log W are not held against 0
        const row one{-1 + off}, zero{-1};
        offline_drift e;
        e.add(view_of(one), view_of(zero), std::vector<std::int64_t>{0, 1});
        CHECK(e.log_ratio_least == off);
        CHECK(e.log_ratio_most == off);
    }

    offline_drift open; // the advantage of the token without mass is infinite
    open.add(view_of(p), view(ref.data(), ref.size()), offsets, mask, view_of(q));
    CHECK(open.infinite_advantages == 1);
    CHECK(std::isinf(open.gradient_gap_bound()));
}

TEST_CASE("each kind of bad number is counted, none is summed") {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    struct bad {
        double p, ref, q;
    };
    for (const bad b : {bad{nan, -1, -1}, bad{-1, nan, -1}, bad{-1, -1, nan}, bad{inf, -1, -1}, bad{-1, inf, -1},
                        bad{-1, -1, inf}, bad{.5, -1, -1}, bad{-1, .5, -1}, bad{-1, -1, .5}, bad{-9999, -1, -1},
                        bad{-1, -9999, -1}, bad{-1, -1, -9999}, bad{-1, -inf, -1}, bad{-1, -1e300, -1}}) {
        const row p{-1, -2, b.p}, ref{-1.5, -2, b.ref}, q{-1, -1, b.q};
        offline_drift d, good;
        d.add(view_of(p), view_of(ref), std::vector<std::int64_t>{0, 2, 3}, {}, view_of(q));
        good.add(view(p.data(), 2), view(ref.data(), 2), std::vector<std::int64_t>{0, 2}, {}, view(q.data(), 2));
        CHECK(d.bad_tokens == 1);
        CHECK(d.first_bad_token == 2);
        CHECK(d.bad_sequences == 1);
        CHECK(d.tokens == 2);
        CHECK(d.ratio_mean() == good.ratio_mean());
        CHECK(d.sequence_chi_squared() == good.sequence_chi_squared());
        CHECK(d.gradient_gap_bound() == good.gradient_gap_bound());
    }
}

TEST_CASE("gaps of 0 to 1,000 nats: finite, or counted") {
    property("extremes", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        row p, ref, q;
        std::vector<std::int64_t> offsets{0};
        index_t beyond = 0;
        for (index_t s = 0; s < 4; ++s) {
            const index_t length = 1 + u.below(6);
            double sum = 0;
            for (index_t i = 0; i < length; ++i) {
                const double size = u.below(3) == 0 ? 1000 * u.uniform() : std::pow(10, -12 + 15 * u.uniform());
                const bool up = u.below(2) == 0;
                p.push_back(up ? -1e-3 : -size), ref.push_back(up ? -size : -1e-3), q.push_back(-1000 * u.uniform());
                beyond += p.back() - ref.back() > 150, sum += p.back() - ref.back();
            }
            beyond += sum > 150 + 1e-9;
            offsets.push_back(std::int64_t(p.size()));
        }
        offline_drift d;
        d.add(view_of(p), view_of(ref), offsets, {}, view_of(q));
        RC_ASSERT(d.saturated == beyond);
        RC_ASSERT(d.bad_tokens == 0);
        for (const double x : {d.ratio_mean(),
                               d.ratio_mean_error(),
                               d.ratio_deviation(),
                               d.chi_squared(),
                               d.chi_squared_error(),
                               d.k1(),
                               d.k1_error(),
                               d.k3(),
                               d.k3_error(),
                               d.effective_sample_size(),
                               d.sequence_ratio_mean(),
                               d.sequence_ratio_mean_error(),
                               d.sequence_ratio_deviation(),
                               d.sequence_chi_squared(),
                               d.sequence_chi_squared_error(),
                               d.sequence_effective_sample_size(),
                               d.log_ratio_mean,
                               d.log_ratio_deviation(),
                               d.log_ratio_least,
                               d.log_ratio_most,
                               d.sigma_a(),
                               d.gradient_gap_bound()})
            RC_ASSERT(std::isfinite(x));
        RC_ASSERT(d.effective_share() > 0 && d.effective_share() <= 1 + 1e-12);
        RC_ASSERT(d.k3() >= 0);
    });
    // near 1, where w - 1 is what counts: chi-squared 1e-20, not what 1 + 1e-10 rounds to
    const row p(8, -1 + 0x1p-33), ref(8, -1);
    offline_drift d;
    d.add(view_of(p), view_of(ref), std::vector<std::int64_t>{0, 4, 8});
    CHECK(d.chi_squared() / 0x1p-66 == doctest::Approx(1).epsilon(1e-9)); // Approx alone is absolute below 1
    CHECK(d.k3() / 0x1p-67 == doctest::Approx(1).epsilon(1e-5));
    CHECK(d.sequence_chi_squared() / 0x1p-62 == doctest::Approx(1).epsilon(1e-8));
}

TEST_CASE("any cut into batches gives the same figures") {
    property("cuts", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const three w = any_three(u, 3);
        std::vector<path> drawn;
        for (index_t i = 0; i < 12; ++i) drawn.push_back(w.t.paths[std::size_t(u.below(index_t(w.t.paths.size())))]);
        const offline_drift all = measured(drawn, w.p, w.ref, &w.q);
        offline_drift cut;
        for (auto from = drawn.begin(); from != drawn.end();) {
            const auto to = from + (1 + u.below(drawn.end() - from));
            cut.merge(measured({from, to}, w.p, w.ref, &w.q)), from = to;
        }
        cut.merge({});
        RC_ASSERT(cut.tokens == all.tokens);
        RC_ASSERT(cut.sequences == all.sequences);
        RC_ASSERT(near(cut.ratio_mean(), all.ratio_mean()));
        RC_ASSERT(std::abs(cut.chi_squared_error() - all.chi_squared_error()) <= 1e-7 * (1 + all.chi_squared()));
        RC_ASSERT(near(cut.k1(), all.k1()));
        RC_ASSERT(near(cut.sequence_chi_squared(), all.sequence_chi_squared()));
        RC_ASSERT(near(cut.log_ratio_mean, all.log_ratio_mean));
        RC_ASSERT(near(cut.log_ratio_squares, all.log_ratio_squares));
        RC_ASSERT(cut.log_ratio_least == all.log_ratio_least);
        RC_ASSERT(cut.log_ratio_most == all.log_ratio_most);
        RC_ASSERT(near(cut.gradient_gap_bound(), all.gradient_gap_bound()));
    });
}

TEST_CASE("fresh samples under another law than recorded are found, their own are not") {
    numbers u(11);
    row p, ref;
    std::vector<std::int64_t> offsets{0};
    const auto draw = [&](double log_recorded) { // heads with 0.7
        const bool head = u.uniform() < 0.7;
        p.push_back(std::log(head ? 0.8 : 0.2));
        ref.push_back(std::log(head ? std::exp(log_recorded) : 1 - std::exp(log_recorded)));
        if (p.size() % 5 == 0) offsets.push_back(std::int64_t(p.size()));
    };
    const auto mismatch = [&](double recorded) {
        p.clear(), ref.clear(), offsets = {0};
        for (int i = 0; i < 5000; ++i) draw(std::log(recorded));
        offline_drift d;
        d.add(view_of(p), view_of(ref), offsets);
        return d.reference_mismatch();
    };
    CHECK(!mismatch(0.7));
    CHECK(mismatch(0.5));
    CHECK(!offline_drift{}.reference_mismatch());
}

TEST_CASE("what docs/offline.md shows") {
    numbers u(21);
    const three w(u, 4, 4, true, 0.3);
    row p, ref, q;
    std::vector<std::int64_t> offsets{0};
    for (const path& x : w.t.paths) {
        for (std::size_t i = 0; i < x.ids.size(); ++i) {
            const std::size_t s = x.prefixes[i];
            p.push_back(w.p.at[s][x.ids[i]]), ref.push_back(w.ref.at[s][x.ids[i]]), q.push_back(w.q.at[s][x.ids[i]]);
        }
        offsets.push_back(std::int64_t(p.size()));
    }
    const std::vector<std::uint8_t> mask(p.size(), 1);
    const vector_view<const double> log_p = view_of(p), log_ref = view_of(ref), log_q = view_of(q);
    // [drift]
    opd::offline_drift drift{.clip = 5};             // as lightning(5) clips
    drift.add(log_p, log_ref, offsets, mask, log_q); // every batch; merge() threads and ranks
    const double chi_squared = drift.chi_squared(), effective = drift.sequence_effective_share();
    const double off_by_at_most = drift.gradient_gap_bound();
    const std::string line = to_string(drift); // for the log
    // [/drift]
    CHECK(chi_squared > 0);
    CHECK(effective < 1);
    CHECK(off_by_at_most > 0);
    CHECK(line.find("chi-squared") != std::string::npos);
}

TEST_CASE("refused, with nothing added") {
    const row three{-1, -1, -1}, two{-1, -1};
    const std::vector<std::int64_t> offsets{0, 3}, beyond{0, 4}, back{0, 2, 1};
    offline_drift d;
    const auto refused = [&](const char* words, auto&& call) {
        CHECK_THROWS_WITH_AS(call(), doctest::Contains(words), invalid_input);
        CHECK(d.tokens == 0);
        CHECK(d.sequences == 0);
    };
    refused("log_ref: has 2 entries, not 3", [&] { d.add(view_of(three), view_of(two), offsets); });
    refused("log_ref: has 0 entries", [&] { d.add(view_of(three), vector_view<const double>(), offsets); });
    refused("log_q: has 2 entries", [&] { d.add(view_of(three), view_of(three), offsets, {}, view_of(two)); });
    refused("mask", [&] { d.add(view_of(three), view_of(three), offsets, std::vector<std::uint8_t>{1, 1}); });
    refused("offsets: are left out", [&] { d.add(view_of(three), view_of(three), {}); });
    refused("offsets, row 0: from 0 to 4 of 3 rows", [&] { d.add(view_of(three), view_of(three), beyond); });
    refused("offsets, row 1: from 2 to 1", [&] { d.add(view_of(three), view_of(three), back); });
    refused("log_q: was never given", [&] { (void)d.gradient_gap_bound(); });
    refused("chi_squared", [] { (void)gradient_gap_bound(1, -1); });
    refused("sigma_a", [] { (void)gradient_gap_bound(std::numeric_limits<double>::quiet_NaN(), 1); });
    refused("score_norm", [] { (void)gradient_gap_bound(1, 1, -1); });
    d.clip = -1;
    refused("offline_drift.clip", [&] { d.add(view_of(three), view_of(three), offsets); });
    d.clip = 0;
    d.add(vector_view<const double>(), vector_view<const double>(), {});
    CHECK(d.ratio_mean() == 1);
    CHECK(std::isnan(d.ratio_mean_error()));
}

// --- Lightning OPD's theorems ---------------------------------------------------------------------------------------

TEST_CASE("theorem 3.5 holds with Σ|A| and fails as printed, with |ΣA|") {
    // G = √2 in the logits: |e_a - p|² ≤ 2
    numbers u(35);
    int printed_fails = 0;
    double closest = 0, worst = 0;
    constexpr int cases = 20000;
    for (int i = 0; i < cases; ++i) {
        const three w(u, std::size_t(2 + u.below(2)), std::size_t(1 + u.below(3)), u.below(2) == 0,
                      0.1 + 3 * u.uniform());
        const bool shared = i % 2 == 0;
        const policy p = shared ? policy(w.t, w.p.at[0]) : w.p; // else each prefix has logits of its own
        double chi = -1, absolute = 0, printed = 0;
        row gap;
        for (const path& x : w.t.paths) {
            const double ref = w.ref.of(x), a = w.q.log_of(x) - p.log_of(x);
            const double sigma = measured({x}, p, w.ref, &w.q).sigma_a();
            chi += p.of(x) * p.of(x) / ref, absolute += ref * sigma * sigma, printed += ref * a * a;
            add_to(gap, direction(w.t, x, p, w.q, shared), p.of(x) - ref);
        }
        chi = std::max(chi, 0.0); // rounding
        const double bound = gradient_gap_bound(std::sqrt(absolute), chi), size = norm(gap);
        CHECK(size <= bound * (1 + 1e-9));
        closest = std::max(closest, size / bound);
        const double as_printed = gradient_gap_bound(std::sqrt(printed), chi);
        printed_fails += size > as_printed * (1 + 1e-9), worst = std::max(worst, size / as_printed);
    }
    MESSAGE("as printed it fails in ", printed_fails, " of ", cases, " cases, by up to ", worst,
            "; with absolute values the gap is at most ", closest, " of the bound");
    CHECK(printed_fails > 0);
    CHECK(closest < 1);
}

TEST_CASE("theorem 3.5 on a sample: the bound of its own figures holds for its own gradients") {
    property("of a sample", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const three w = any_three(u, 3);
        std::vector<path> drawn;
        const index_t n = 1 + u.below(10);
        for (index_t i = 0; i < n; ++i) drawn.push_back(w.t.paths[std::size_t(u.below(index_t(w.t.paths.size())))]);
        row gap;
        for (const path& x : drawn)
            add_to(gap, direction(w.t, x, w.p, w.q, false), (w.p.of(x) / w.ref.of(x) - 1) / double(n));
        RC_ASSERT(norm(gap) <= measured(drawn, w.p, w.ref, &w.q).gradient_gap_bound() * (1 + 1e-9));
    });
}

TEST_CASE("theorem 3.13 holds with Σ|Δ| under the gradient's own policy, and fails as printed") {
    numbers u(313);
    int printed_fails = 0;
    constexpr int cases = 5000;
    for (int i = 0; i < cases; ++i) {
        const three w(u, std::size_t(2 + u.below(2)), std::size_t(1 + u.below(3)), u.below(2) == 0,
                      0.1 + 3 * u.uniform());
        const policy other(w.t, u, 0.1 + 3 * u.uniform()), p = policy(w.t, w.p.at[0]);
        row off;
        double right = 0, printed = 0;
        for (const path& x : w.t.paths) {
            add_to(off, direction(w.t, x, p, w.q, true), p.of(x));
            add_to(off, direction(w.t, x, p, other, true), -p.of(x));
            const row a = w.q.on(x), b = other.on(x);
            double size = 0;
            for (std::size_t k = 0; k < a.size(); ++k) size += std::abs(a[k] - b[k]);
            right += p.of(x) * size * size;
            printed += w.ref.of(x) * std::pow(w.q.log_of(x) - other.log_of(x), 2);
        }
        CHECK(norm(off) <= std::sqrt(2 * right) * (1 + 1e-9));
        printed_fails += norm(off) > std::sqrt(2 * printed) * (1 + 1e-9);
    }
    MESSAGE("as printed it fails in ", printed_fails, " of ", cases, " cases");
    CHECK(printed_fails > 0);
}

TEST_CASE("theorem 3.9: the offline gradient is the online one less a covariance, which pushes either way") {
    numbers u(39);
    int opposes = 0, favours = 0;
    for (int i = 0; i < 2000; ++i) {
        const three w = any_three(u, 3);
        row weighted, plain, towards;
        for (const path& x : w.t.paths) {
            const double ref = w.ref.of(x), ratio = w.p.of(x) / ref;
            const row f = direction(w.t, x, w.p, w.q, false);
            add_to(weighted, f, ref * ratio), add_to(plain, f, ref);
            row score((w.t.prefixes) * w.t.vocab, 0.0); // ∇log p(x)
            for (std::size_t k = 0; k < x.ids.size(); ++k)
                for (std::size_t v = 0; v < w.t.vocab; ++v)
                    score[x.prefixes[k] * w.t.vocab + v] +=
                        (v == x.ids[k] ? 1.0 : 0.0) - std::exp(w.p.at[x.prefixes[k]][v]);
            add_to(towards, score, w.p.of(x) * std::log(ratio)); // ∇KL(p‖pi_ref)
        }
        row covariance = weighted; // E[w f] - E[w] E[f], E[w] = 1
        add_to(covariance, plain, -1);
        row right = mean_direction(w.t, w.p, w.p, w.q, false);
        add_to(right, covariance, -1), add_to(right, mean_direction(w.t, w.ref, w.p, w.q, false), -1);
        CHECK(norm(right) < 1e-11);
        // remark 3.10: -covariance would lead back to pi_ref if it had a negative product with the drift's gradient
        (dot(covariance, towards) > 0 ? opposes : favours) += 1;
    }
    MESSAGE("of 2,000 cases the covariance opposes drift in ", opposes, ", adds to it in ", favours);
    CHECK(opposes > 100);
    CHECK(favours > 100);
    // at p = pi_ref there is none
    const tree t(3, 2, true);
    const policy p(t, u, 1), q(t, u, 1);
    row gap = mean_direction(t, p, p, q, false);
    CHECK(norm(gap) > 0.01);
    CHECK(measured(t.paths, p, p, &q).gradient_gap_bound() == 0);
}

TEST_CASE("theorem 3.7 with a realisable teacher: both gradients are 0 at p = q, and in free logits nowhere else") {
    property("shared", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const three w = any_three(u, 3);
        RC_ASSERT(norm(mean_direction(w.t, w.ref, w.q, w.q, false)) == 0);
        RC_ASSERT(norm(mean_direction(w.t, w.q, w.q, w.q, false)) == 0);
        RC_ASSERT(norm(mean_direction(w.t, w.ref, w.p, w.q, false)) > 0);
        RC_ASSERT(norm(mean_direction(w.t, w.p, w.p, w.q, false)) > 0);
    });
    // ascent along either ends at q
    numbers u(37);
    const tree t(3, 2, false);
    const policy ref(t, u, .7), q(t, u, .7);
    for (const bool online : {true, false}) {
        policy p = ref;
        for (int step = 0; step < 20000; ++step) {
            const row g = mean_direction(t, online ? p : ref, p, q, false);
            for (std::size_t s = 0; s < t.prefixes; ++s) {
                row z = p.at[s];
                for (std::size_t v = 0; v < t.vocab; ++v) z[v] += 2 * g[s * t.vocab + v];
                p.at[s] = log_softmax(z);
            }
        }
        double off = 0;
        for (const path& x : t.paths) off = std::max(off, std::abs(p.of(x) - q.of(x)));
        CHECK(off < 1e-6);
    }
}

TEST_CASE("theorem 3.7 without one: the fixed points differ, and neither is the minimum of KL(p‖q)") {
    // two tokens of two ids, one logit for both prefixes; the teacher's second token depends on its first
    const tree t(2, 2, false);
    policy q(t, row{0, 0}), ref(t, row{0, 0});
    const auto two = [](double p) { return row{std::log(p), std::log(1 - p)}; };
    q.at = {two(.6), two(.95), two(.1)};
    ref.at = {two(.2), two(.5), two(.5)};
    const auto student = [&](double z) { return policy(t, row{z, 0}); };
    const auto root = [&](auto&& f) { // f falls
        double low = -4, high = 4;
        REQUIRE(f(low) > 0);
        REQUIRE(f(high) < 0);
        for (int i = 0; i < 200; ++i) (f((low + high) / 2) > 0 ? low : high) = (low + high) / 2;
        return low;
    };
    const auto online = [&](double z) { return mean_direction(t, student(z), student(z), q, true)[0]; };
    const auto offline = [&](double z) { return mean_direction(t, ref, student(z), q, true)[0]; };
    const auto kl = [&](double z) {
        double sum = 0;
        const policy p = student(z);
        for (const path& x : t.paths) sum += p.of(x) * (p.log_of(x) - q.log_of(x));
        return sum;
    };
    const double on = root(online), off = root(offline);
    double best = -4;
    for (double z = -4; z < 4; z += 1e-3)
        if (kl(z) < kl(best)) best = z;
    MESSAGE("fixed points: online ", on, ", offline ", off, "; least KL(p‖q) at ", best, ": KL ", kl(on), ", ", kl(off),
            ", ", kl(best));
    CHECK(std::abs(on - off) > 0.1);
    CHECK(std::abs(online(off)) > 0.01);
    CHECK(kl(best) < kl(on) - 1e-3); // ∇J_on leaves out what a token does to the tokens after it
    CHECK(kl(best) < kl(off) - 1e-3);
    // with each token's advantage and those after it, the online gradient is -∇KL(p‖q)
    for (const double z : {-1.0, 0.3, best}) {
        const policy p = student(z);
        double gradient = 0;
        for (const path& x : t.paths)
            for (std::size_t i = 0; i < x.ids.size(); ++i)
                for (std::size_t l = i; l < x.ids.size(); ++l)
                    gradient += p.of(x) * (q.at[x.prefixes[l]][x.ids[l]] - p.at[x.prefixes[l]][x.ids[l]]) *
                                ((x.ids[i] == 0 ? 1.0 : 0.0) - std::exp(p.at[0][0]));
        CHECK(std::abs(gradient + (kl(z + 1e-5) - kl(z - 1e-5)) / 2e-5) < 1e-8);
    }
}
