// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize, whole-compiler
// optimise: always
//
// What a served teacher returns, from synthetic teachers: each fault alone is found and named, with the number that
// made it; without one no random pair of models, close or unrelated, raises an alarm. Figures by hand, the error of
// the noise against the noise that was put in, too few tokens, what is unclear, refusals.
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <opd/teacher_probe.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using row = std::vector<double>;

row log_softmax(row z, double temperature = 1) {
    double sum = 0;
    for (double& x : z) x /= temperature;
    const double top = *std::max_element(z.begin(), z.end());
    for (const double x : z) sum += std::exp(x - top);
    for (double& x : z) x -= top + std::log(sum);
    return z;
}
std::size_t drawn_from(const row& log_p, numbers& u) {
    double left = u.uniform();
    std::size_t v = 0;
    while (v + 1 < log_p.size() && (left -= std::exp(log_p[v])) > 0) ++v;
    return v;
}

/// How a teacher lies.
struct faults {
    double noise = 0;        ///< nats, of each score
    double temperature = 1;  ///< log-probs processed with it
    double unnormalised = 1; ///< log-probs divided by it, not normalised again
    bool logits = false;
    index_t shift = 0; ///< answer t is the score of token t + shift
};

/// What a probe hands over: N tokens that the student drew, in sequences, and a list of ids at each of them.
struct answers {
    index_t n, k, vocab, replicas;
    row log_q, log_p, list_log_q, list_log_p;
    std::vector<index_t> list_ids;
    std::vector<std::int64_t> offsets{0};

    /// `apart`: how far the teacher's logits lie from the student's; `same`: the reference is the teacher, raw.
    answers(numbers& u, index_t n_, index_t v, index_t k_, double spread, double apart, bool same, faults bad,
            index_t replicas_ = 2)
        : n(n_), k(k_), vocab(v), replicas(replicas_) {
        row scores(static_cast<std::size_t>(n));
        double mood = 0; // neighbouring tokens are alike
        for (index_t t = 0; t < n; ++t) {
            if (t > 0 && (t == n / 2 || u.below(40) == 0)) offsets.push_back(t);
            mood = 0.7 * mood + 0.7 * u.normal();
            row z, y;
            for (index_t i = 0; i < v; ++i) {
                z.push_back(spread * std::exp(0.5 * mood) * u.normal());
                y.push_back(z.back() + apart * u.normal());
            }
            const row p = log_softmax(same ? y : z), raw = log_softmax(y, bad.temperature);
            const std::size_t token = drawn_from(log_softmax(z), u);
            row q = raw;
            for (std::size_t i = 0; i < q.size(); ++i) q[i] = bad.logits ? y[i] + 2 : q[i] / bad.unnormalised;
            scores[std::size_t(t)] = q[token], log_p.push_back(p[token]);
            std::vector<index_t> order(static_cast<std::size_t>(v));
            std::iota(order.begin(), order.end(), 0);
            std::sort(order.begin(), order.end(),
                      [&](index_t a, index_t b) { return y[std::size_t(a)] > y[std::size_t(b)]; });
            for (index_t j = 0; j < k; ++j) {
                const auto id = order[std::size_t(j)];
                list_ids.push_back(id), list_log_q.push_back(q[std::size_t(id)]),
                    list_log_p.push_back(p[std::size_t(id)]);
            }
        }
        offsets.push_back(n);
        for (index_t r = 0; r < replicas; ++r)
            for (index_t t = 0; t < n; ++t) {
                const index_t from = std::clamp<index_t>(t + bad.shift, 0, n - 1);
                log_q.push_back(std::min(scores[std::size_t(from)] + bad.noise * u.normal(), bad.logits ? 1e3 : 0.0));
            }
    }
    teacher_answers all() const {
        teacher_answers a;
        a.log_q = view(log_q.data(), replicas, n), a.log_p = view(log_p.data(), n), a.offsets = row_offsets<>(offsets);
        a.list_ids = view(list_ids.data(), n, k), a.list_log_q = view(list_log_q.data(), n, k);
        a.list_log_p = view(list_log_p.data(), n, k), a.vocab = vocab;
        return a;
    }
};

/// A teacher of 0.8 nats' logit distance from its student, 600 tokens.
answers teacher_with(faults bad, bool same = false, index_t n = 600, std::uint64_t seed = 5) {
    numbers u(seed);
    return {u, n, 40, 8, 1.5, 0.8, same, bad};
}
void only(const teacher_report& r, const char* bad) {
    const auto check = [&](const std::string& name, probed p) {
        CAPTURE(name);
        CAPTURE(to_string(r));
        CHECK((p == probed::bad) == (name == bad));
    };
    check("noise", r.noise), check("mass", r.mass), check("temperature", r.temperature);
    check("shift", r.shift), check("ids", r.ids);
    if (*bad != 0) {
        CHECK(r.refused());
        CHECK(r.reasons().find(std::string(bad) + ": ") == 0);
        CHECK_THROWS_WITH_AS(r.check(), doctest::Contains(("opd: teacher: " + std::string(bad)).c_str()),
                             invalid_input);
    } else {
        CHECK(!r.refused());
        CHECK(r.reasons().empty());
        CHECK_NOTHROW(r.check());
    }
}

} // namespace

TEST_CASE("an honest teacher is good by every test") {
    for (const bool same : {false, true}) {
        const answers w = teacher_with({.noise = same ? 0 : 1e-3}, same); // against itself any noise is too much
        teacher_answers a = w.all();
        const teacher_report r = probe_teacher(a);
        only(r, "");
        CHECK(r.tokens == 600);
        CHECK(r.replicas == 2);
        CHECK(r.lists == 600);
        CHECK(r.noise == probed::good);
        CHECK(r.shift == probed::good);
        CHECK(r.mass == probed::good);
        CHECK(r.ids == probed::good);
        CHECK(r.temperature == (same ? probed::good : probed::unclear));
        if (same) {
            CHECK(r.estimated_temperature == doctest::Approx(1).epsilon(1e-9));
            CHECK(r.list_correlation == doctest::Approx(1).epsilon(1e-9));
        } else {
            CHECK(r.least_temperature < 1);
            CHECK(r.most_temperature > 1);
        }
    }
}

TEST_CASE("each fault alone is found, named, and measured") {
    SUBCASE("replicas that differ by more than the models do") {
        const teacher_report r = probe_teacher(teacher_with({.noise = 0.9}).all());
        only(r, "noise");
        CHECK(r.sigma_delta > r.noise_limit);
    }
    SUBCASE("pure noise about the student itself: the mean gap alone would be a signal of 0.8 sigma") {
        numbers u(3);
        const answers w(u, 400, 30, 5, 1.5, 0, true, {.noise = 0.05});
        const teacher_report r = probe_teacher(w.all());
        CHECK(r.noise == probed::bad);
        CHECK(r.mean_gap > 0.01);
    }
    SUBCASE("temperatures, by the same model's raw log-probs") {
        for (const double t : {0.6, 0.9, 1.1, 2.0}) {
            const teacher_report r = probe_teacher(teacher_with({.temperature = t}, true).all());
            only(r, "temperature");
            CHECK(r.estimated_temperature == doctest::Approx(t).epsilon(1e-9));
            CHECK(r.least_temperature == doctest::Approx(t).epsilon(1e-9));
            CHECK(r.most_temperature == doctest::Approx(t).epsilon(1e-9));
        }
    }
    SUBCASE("temperatures by a close student: the interval holds the true one") {
        for (const double t : {0.6, 1.6}) {
            numbers u(8);
            const answers w(u, 400, 40, 20, 2, 0.2, false, {.temperature = t});
            const teacher_report r = probe_teacher(w.all());
            CHECK(r.temperature == probed::bad);
            CHECK(r.least_temperature <= t * 1.02);
            CHECK(r.most_temperature >= t / 1.02);
        }
    }
    SUBCASE("log-probs over a temperature, not normalised again: over 1 from T > 1, under it from T < 1") {
        for (const double t : {0.8, 1.25}) {
            numbers u(9);
            const answers w(u, 300, 12, 12, 1.5, 0.5, true, {.unnormalised = t}); // full lists
            const teacher_report r = probe_teacher(w.all());
            CHECK(r.mass == probed::bad);
            CHECK((r.mean_mass > 1) == (t > 1));
            CHECK(r.complete_lists == 300);
            CHECK(r.unnormalised_temperature == doctest::Approx(t).epsilon(1e-9));
            CHECK(r.estimated_temperature == doctest::Approx(t).epsilon(1e-9));
            CHECK(r.reasons().find("not normalised") != std::string::npos);
        }
    }
    SUBCASE("logits instead of log-probs") {
        const teacher_report r = probe_teacher(teacher_with({.logits = true}, true).all());
        CHECK(r.mass == probed::bad);
        CHECK(r.heavy_lists > 500);
        CHECK(r.bad_tokens > 100); // scores above 0
        CHECK(r.reasons().find("logits") != std::string::npos);
        numbers u(12);
        const answers full(u, 100, 12, 12, 1.5, 0.5, true, {.logits = true}); // no T makes log-probs of these
        CHECK(probe_teacher(full.all()).unnormalised_temperature == 0);
    }
    SUBCASE("off by one, either way") {
        for (const index_t by : {-1, 1})
            for (const bool same : {false, true}) {
                const teacher_report r = probe_teacher(teacher_with({.shift = by}, same).all());
                only(r, "shift");
                CHECK(r.shifted_by == by);
                CHECK((by < 0 ? r.correlation_before : r.correlation_after) > r.correlation_here + 0.3);
            }
    }
    SUBCASE("ids of a padded head") {
        answers w = teacher_with({});
        w.vocab = 151936;
        CHECK(probe_teacher(w.all()).ids == probed::good);
        w.list_ids[3] = 151935;
        CHECK(probe_teacher(w.all()).ids == probed::good);
        w.list_ids[8 * 70 + 7] = 152063;
        teacher_report r = probe_teacher(w.all());
        only(r, "ids");
        CHECK(r.largest_id == 152063);
        CHECK(r.outside_ids == 1);
        CHECK(r.first_outside_list == 70);
        CHECK(r.outside_mass == doctest::Approx(std::exp(w.list_log_q[8 * 70 + 7]) / 600));
        w.list_ids[8 * 70 + 7] = 151936;
        CHECK(probe_teacher(w.all()).ids == probed::bad);
        w.list_ids[8 * 70 + 7] = -1; // an unused slot
        CHECK(probe_teacher(w.all()).ids == probed::good);
        w.list_ids[8 * 70 + 7] = -2;
        CHECK(probe_teacher(w.all()).ids == probed::bad);
    }
}

TEST_CASE("no random pair of models, close or unrelated, raises an alarm") {
    property("no false alarm", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t v = 5 + u.below(30), k = u.below(3) == 0 ? v : 2 + u.below(v - 2), n = 250 + u.below(200);
        const double spread = 0.5 + 2 * u.uniform(), apart = std::pow(10, -1 + 1.7 * u.uniform());
        answers w(u, n, v, k, spread, apart, false, {.noise = 1e-3 * u.uniform()}, 1 + u.below(3));
        if (u.below(4) == 0) { // the teacher has nothing to do with the student
            const answers other(u, n, v, k, spread, 1, false, {});
            w.list_log_p = other.list_log_p, w.log_p = other.log_p;
        } else if (u.below(2) == 0) { // or is the clean one of two, its student the noisy one
            for (std::size_t i = 0; i < w.list_log_q.size(); i += std::size_t(k)) {
                const row p(w.list_log_q.begin() + std::ptrdiff_t(i), w.list_log_q.begin() + std::ptrdiff_t(i) + k);
                for (std::size_t j = 0; j < p.size(); ++j)
                    w.list_log_p[i + j] = std::min(p[j] + 0.2 * apart * u.normal(), 0.0);
            }
        }
        const teacher_report r = probe_teacher(w.all());
        RC_ASSERT(r.reasons() == "");
        RC_ASSERT(!r.refused());
        RC_ASSERT(r.heavy_lists == 0);
        RC_ASSERT(r.noise == (w.replicas > 1 ? probed::good : probed::not_asked));
        RC_ASSERT(r.mass == probed::good);
        RC_ASSERT((r.complete_lists == n) == (k == v));
    });
}

TEST_CASE("over random models each fault is found") {
    property("found", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t v = 10 + u.below(30), n = 400 + u.below(200);
        const double spread = 1 + 1.5 * u.uniform(), apart = 0.1 + 0.4 * u.uniform();
        const double t = u.below(2) == 0 ? 0.5 + 0.4 * u.uniform() : 1.1 + u.uniform();
        const auto report = [&](bool same, faults bad, index_t k) {
            return probe_teacher(answers(u, n, v, k, spread, apart, same, bad).all());
        };
        const teacher_report hot = report(true, {.temperature = t}, 6);
        RC_ASSERT(hot.temperature == probed::bad);
        RC_ASSERT(std::abs(hot.estimated_temperature - t) < 1e-9);
        const index_t by = u.below(2) == 0 ? 1 : -1;
        const teacher_report late = report(false, {.shift = by}, 6);
        RC_ASSERT(late.shift == probed::bad);
        RC_ASSERT(late.shifted_by == by);
        RC_ASSERT(report(false, {.noise = 2 * apart}, 6).noise == probed::bad);
        const teacher_report light = report(true, {.unnormalised = t}, v);
        RC_ASSERT(light.mass == probed::bad);
        RC_ASSERT(std::abs(light.unnormalised_temperature - t) < 1e-6);
    });
}

TEST_CASE("sigma_delta lies within its error of what was put in") {
    property("noise", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const double sigma = std::pow(10, -6 + 6 * u.uniform());
        const index_t n = 300 + u.below(300), replicas = 2 + u.below(4);
        row q;
        const row p(std::size_t(n), -20.0);
        for (index_t i = 0; i < n * replicas; ++i) q.push_back(-20 + sigma * u.normal());
        teacher_answers a{.log_q = view(std::as_const(q).data(), replicas, n), .log_p = view(p.data(), n)};
        std::vector<std::int64_t> offsets;
        if (u.below(2) == 0) {
            for (index_t t = 0; t < n; t += 1 + u.below(10)) offsets.push_back(t);
            offsets.push_back(n), a.offsets = row_offsets<>(offsets);
        }
        const teacher_report r = probe_teacher(a);
        const double truth = std::sqrt(2.0) * sigma;
        RC_ASSERT(std::abs(r.sigma_delta - truth) < 6 * r.sigma_delta_error);
        RC_ASSERT(r.sigma_delta_error < 0.15 * truth); // 1/√(2·300·(R-1)) is 0.04
        RC_ASSERT(r.noise == probed::bad);
    });
}

TEST_CASE("by hand") {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    // three tokens count: differences of .1, -.2, .3; the others are masked, absent, placeholders or no log-probs
    const row q{-1.0, -2.0, -3.0, nan, -1.0, 0.5, -9999, -1, -1.0, //
                -1.1, -1.8, -3.3, nan, nan,  0.5, -1,    -1, -inf};
    const row p{-1.5, -1.5, -3.0, -1, -1, -1, -1, nan, -1};
    const std::vector<std::uint8_t> mask{1, 1, 1, 0, 1, 1, 1, 1, 1};
    const teacher_answers a{.log_q = view(q.data(), 2, 9), .log_p = view(p.data(), 9), .mask = row_mask<>(mask)};
    teacher_report r = probe_teacher(a, {.least_tokens = 3});
    CHECK(r.tokens == 3);
    CHECK(r.bad_tokens == 5);
    CHECK(r.first_bad_token == 4);
    CHECK(r.sigma_delta == doctest::Approx(std::sqrt((.01 + .04 + .09) / 3)).epsilon(1e-12));
    const double m = .14 / 3, s = (.01 - m) * (.01 - m) + (.04 - m) * (.04 - m) + (.09 - m) * (.09 - m);
    CHECK(r.sigma_delta_error == doctest::Approx(std::sqrt(s / 6) / (2 * r.sigma_delta)).epsilon(1e-12));
    CHECK(r.mean_gap == doctest::Approx((.45 + .4 + .15) / 3).epsilon(1e-12));
    CHECK(r.noise_limit == doctest::Approx(r.mean_gap / 2).epsilon(1e-12));
    CHECK(r.noise == probed::bad); // .216 of .167
    CHECK(probe_teacher(a, {.most_noise = 0.7, .least_tokens = 3}).noise == probed::good);
    CHECK(probe_teacher(a, {.least_tokens = 4}).noise == probed::too_few);
    // ranks of q: 2, 1, 0; of p: 1.5/2 …: 0.5, 0.5 and 0 with the tie shared, so 1.5, 1.5, 0
    CHECK(r.correlation_here == doctest::Approx(1.5 / std::sqrt(2 * 1.5)).epsilon(1e-12));

    // two sequences of two tokens: the error is theirs, no pair of neighbours spans them, and ties share a rank
    const row q2{-1, -2, -3, -4, -1.1, -2.1, -3.3, -4.3}, p2{-1, -1, -2, -3};
    const std::vector<std::int64_t> halves{0, 2, 4};
    const teacher_answers b{.log_q = view(q2.data(), 2, 4), .log_p = view(p2.data(), 4), .offsets = halves};
    r = probe_teacher(b);
    CHECK(r.sigma_delta == doctest::Approx(std::sqrt(.05)).epsilon(1e-12));
    CHECK(r.sigma_delta_error ==
          doctest::Approx(std::sqrt(2 * 2 * .08 * .08) / 4 / (2 * std::sqrt(.05))).epsilon(1e-12));
    CHECK(r.correlation_here == doctest::Approx(4.5 / std::sqrt(5 * 4.5)).epsilon(1e-12)); // 3 2 1 0 with 2.5 2.5 1 0
    CHECK(r.correlation_after == doctest::Approx(1).epsilon(1e-12));
    CHECK(r.correlation_before == doctest::Approx(1).epsilon(1e-12));

    const std::vector<std::int64_t> inner{1, 3}, none{0}; // tokens of no sequence do not count
    const auto with_offsets = [&](const std::vector<std::int64_t>& offsets) {
        teacher_answers c = b;
        c.offsets = row_offsets<>(offsets);
        return probe_teacher(c);
    };
    CHECK(with_offsets(inner).tokens == 2);
    CHECK(with_offsets(inner).sigma_delta == doctest::Approx(std::sqrt(.05)).epsilon(1e-12)); // of .1 and .3
    CHECK(with_offsets(inner).mean_gap == doctest::Approx((1.05 + 1.15) / 2).epsilon(1e-12));
    CHECK(with_offsets(none).tokens == 0);
    CHECK(with_offsets(none).noise == probed::too_few);

    const std::vector<index_t> ids{4, 7, 4, -1, 0, 1, 2, 3};
    const row list_q{std::log(.5), std::log(.25), std::log(.5), nan, std::log(.5), nan, -inf, std::log(.2)};
    const row tail{std::log(.25), std::log(.3)};
    r = probe_teacher({.list_ids = view(ids.data(), 2, 4),
                       .list_log_q = view(list_q.data(), 2, 4),
                       .list_log_tail = view(tail.data(), 2)});
    CHECK(r.lists == 2);
    CHECK(r.repeats == 1);
    CHECK(r.bad_entries == 1);
    CHECK(r.most_mass == doctest::Approx(1).epsilon(1e-14));
    CHECK(r.mean_mass == doctest::Approx(1).epsilon(1e-14));
    CHECK(r.complete_lists == 2);
    CHECK(r.largest_id == 7);
    CHECK(r.mass == probed::too_few);
    CHECK(r.ids == probed::not_asked); // no vocabulary
    CHECK(r.noise == probed::not_asked);
    CHECK(r.temperature == probed::not_asked);
    CHECK(probe_teacher({}).reasons().empty());
}

TEST_CASE("too few tokens or lists: says so; one list above 1, one id outside is enough") {
    const answers w = teacher_with({.noise = 5, .temperature = 3, .shift = 1}, true, 20);
    teacher_answers a = w.all();
    teacher_report r = probe_teacher(a);
    CHECK(r.noise == probed::too_few);
    CHECK(r.shift == probed::too_few);
    CHECK(r.temperature == probed::too_few);
    CHECK(r.mass == probed::too_few);
    CHECK(r.ids == probed::too_few);
    CHECK(r.sigma_delta > 1); // numbers stand there all the same
    CHECK(!r.refused());
    CHECK(to_string(r).find("noise too few") != std::string::npos);
    const answers none = teacher_with({.shift = 1}, true, 199), enough = teacher_with({.shift = 1}, true, 200);
    CHECK(probe_teacher(none.all()).shift == probed::too_few);
    CHECK(probe_teacher(enough.all()).shift == probed::bad);
    // sequences of one token have no neighbours
    std::vector<std::int64_t> single(601);
    std::iota(single.begin(), single.end(), 0);
    const answers many = teacher_with({});
    a = many.all(), a.offsets = row_offsets<>(single);
    CHECK(probe_teacher(a).shift == probed::too_few);
    answers heavy = teacher_with({}, true, 20);
    heavy.list_log_q[8 * 4] = 0.1;
    r = probe_teacher(heavy.all());
    CHECK(r.mass == probed::bad);
    CHECK(r.first_heavy_list == 4);
    heavy.list_ids[8] = 40;
    CHECK(probe_teacher(heavy.all()).ids == probed::bad);
}

TEST_CASE("what numbers cannot tell apart") {
    // a teacher that is 1.4 times as sure as its student, in every logit, is the student at T = 1/1.4
    const answers w = teacher_with({.temperature = 1 / 1.4}, true);
    CHECK(probe_teacher(w.all()).temperature == probed::bad);
    // a close student at T = 1 leaves room for a temperature of some percent: not good, not bad
    numbers close(6);
    const answers wide(close, 400, 40, 40, 1.5, 0.55, false, {});
    const teacher_report some = probe_teacher(wide.all());
    CAPTURE(some.list_correlation * some.list_correlation);
    CHECK(some.list_correlation * some.list_correlation > 0.9);
    CHECK(some.temperature == probed::unclear);
    CHECK(some.most_temperature > 1.0);
    CHECK(some.least_temperature < 0.95);
    // unrelated scores have no lag
    numbers u(4);
    answers v = teacher_with({});
    for (double& x : v.log_p) x = -3 * u.uniform();
    const teacher_report r = probe_teacher(v.all());
    CHECK(r.shift == probed::unclear);
    // and a pair of random walks, alike at every lag, has none to prefer
    double x = -500;
    for (std::size_t t = 0; t < v.log_p.size(); ++t) {
        x += u.normal(), v.log_p[t] = x;
        for (index_t j = 0; j < 2; ++j) v.log_q[std::size_t(j) * 600 + t] = x + 2 * u.normal();
    }
    CHECK(probe_teacher(v.all()).shift == probed::unclear);
}

TEST_CASE("what docs/offline.md shows") {
    const index_t R = 2, N = 600, L = 600, k = 8, V = 151936;
    const answers w = teacher_with({.noise = 1e-3});
    const row &log_q = w.log_q, &log_p = w.log_p, &list_log_q = w.list_log_q, &list_log_p = w.list_log_p;
    const auto &offsets = w.offsets, &list_ids = w.list_ids;
    // [probe]
    opd::teacher_answers answers;
    answers.log_q = opd::view(log_q.data(), R, N); // the same N tokens, scored R times
    answers.log_p = opd::view(log_p.data(), N);    // by the student
    answers.offsets = opd::row_offsets<>(offsets);
    answers.list_ids = opd::view(list_ids.data(), L, k); // what the server lists at L positions
    answers.list_log_q = opd::view(list_log_q.data(), L, k);
    answers.list_log_p = opd::view(list_log_p.data(), L, k); // by a reference: best the same weights, raw
    answers.vocab = V;                                       // the student's
    const opd::teacher_report report = opd::probe_teacher(answers);
    report.check(); // throws opd::invalid_input: what is wrong, and the number behind it
    // [/probe]
    CHECK(report.noise == probed::good);
    CHECK(report.ids == probed::good);
}

TEST_CASE("refused") {
    const answers w = teacher_with({}, true, 20);
    const auto refused = [&](const char* words, auto&& change, probe_settings settings = {}) {
        teacher_answers a = w.all();
        change(a);
        CHECK_THROWS_WITH_AS(probe_teacher(a, settings), doctest::Contains(words), invalid_input);
    };
    const std::vector<std::int64_t> beyond{0, 21}, back{0, 5, 3};
    const std::vector<std::uint8_t> mask(19, 1);
    const auto same = [](teacher_answers&) {};
    refused("log_p: has 19 entries", [&](auto& a) { a.log_p.size = 19; });
    refused("log_q: is a null pointer", [&](auto& a) { a.log_q.data = nullptr; });
    refused("mask", [&](auto& a) { a.mask = row_mask<>(mask); });
    refused("offsets, row 0: from 0 to 21 of 20 tokens", [&](auto& a) { a.offsets = row_offsets<>(beyond); });
    refused("offsets, row 1: from 5 to 3", [&](auto& a) { a.offsets = row_offsets<>(back); });
    refused("list_log_q: has shape (20,7), expected (20,8)", [&](auto& a) { a.list_log_q.cols = 7; });
    refused("list_log_p: has shape", [&](auto& a) { a.list_log_p.rows = 3; });
    refused("list_log_tail", [&](auto& a) { a.list_log_tail = view(w.log_p.data(), 3); });
    refused("vocab: is negative", [&](auto& a) { a.vocab = -1; });
    refused("settings.most_noise", same, {.most_noise = 0});
    refused("settings.least_tokens", same, {.least_tokens = 0});
    refused("settings.least_lists", same, {.least_lists = -1});
    refused("settings.mass_tolerance", same, {.mass_tolerance = std::numeric_limits<double>::quiet_NaN()});
    refused("settings.temperature_tolerance", same, {.temperature_tolerance = -1});
    refused("settings.errors", same, {.errors = 0});
}

TEST_CASE("the list of fields holds every byte of the report") {
    std::size_t bytes = 0;
    std::vector<std::string> names;
    teacher_report r;
    teacher_report::fields([&](const char* name, auto field) { names.push_back(name), bytes += sizeof(r.*field); });
    CHECK(sizeof(teacher_report) - bytes < 8); // the padding behind five verdicts
    std::sort(names.begin(), names.end());
    CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
}
