// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Weights of rows and tokens by the rules of 2026, and a teacher's stream of versions: numbers by hand, definitions by
// brute force.
#include "support/property.hpp"
#include "support/refusal.hpp"
#include "support/textbook.hpp"

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <opd/estimators/row_rules.hpp>
#include <opd/sched/teacher_stream.hpp>

using namespace opd;
using opd::sched::teacher_stream;
using opd::test::refusal;
using opd::test::says;
using doubles = std::vector<double>;

TEST_CASE("IW-OPD: weights fall with the gap behind a token") {
    // the numbers of TRL's own test of its trainer
    const doubles a{0.2, -0.3, 0.5, 0.4};
    const std::vector<std::int64_t> first{0, 3, 4};
    doubles w(4);
    fill_iw_opd(vector_view<const double>(a), row_offsets<>(first), 0.5, vector_view<double>(w));
    for (const auto& [i, expected] : {std::pair{0, 1.5}, {1, 1.4}, {2, 1.25}, {3, 1.5}})
        CHECK(w[std::size_t(i)] == doctest::Approx(expected).epsilon(1e-12));
    const doubles gaps{0.2, NAN, -0.3, 0.5, 0};
    const std::vector<int> mask{1, 0, 1, 1, 1};
    const std::vector<std::int64_t> two{0, 4, 5};
    doubles masked(5, -1);
    fill_iw_opd(vector_view<const double>(gaps), row_offsets<>(two), 0.5, vector_view<double>(masked), mask);
    CHECK(masked[1] == -1);
    CHECK(masked[2] == doctest::Approx(1.4).epsilon(1e-12));
    CHECK(masked[4] == 1.5);
    CHECK(says(refusal([&] {
                   fill_iw_opd(vector_view<const double>(gaps), row_offsets<>(two), 0.5, vector_view<double>(masked));
               }),
               "row 1"));
    CHECK(says(
        refusal([&] { fill_iw_opd(vector_view<const double>(a), row_offsets<>(first), -1, vector_view<double>(w)); }),
        "gamma"));
}

TEST_CASE("IDA-OPD: what raises the entropy is kept whole") {
    // H by central differences of a step along A ∇log p(a), for tokens whose own term outweighs the sum over the others
    const doubles z{2.5, 0.3, -0.2, -4};
    const auto law = [](const doubles& x) {
        const auto l = test::textbook::log_softmax(test::textbook::reals(x.begin(), x.end()));
        return doubles(l.begin(), l.end());
    };
    const auto entropy = [&](const doubles& x) {
        double h = 0;
        for (const double l : law(x)) h -= std::exp(l) * l;
        return h;
    };
    const doubles log_p = law(z), h{entropy(z)};
    for (const std::size_t token : {0u, 3u})
        for (const double gap : {-1.0, 0.8}) {
            doubles up = z, down = z;
            for (std::size_t v = 0; v < z.size(); ++v) {
                const double step = 1e-4 * gap * ((v == token ? 1 : 0) - std::exp(log_p[v]));
                up[v] += step, down[v] -= step;
            }
            const bool grows = entropy(up) > entropy(down);
            const double lp = log_p[token], lq = lp + gap;
            double w = -1;
            fill_ida<double>(view(&lp, 1, 1), view(&lq, 1, 1), vector_view<const double>(h), 0.1, view(&w, 1, 1));
            if (token == 0 || grows) CHECK(w == (grows ? 1 : doctest::Approx(std::exp(-std::abs(gap))).epsilon(1e-12)));
        }
    const double lp = -0.1, lq = -30;
    double w = -1;
    const doubles high{2};
    fill_ida<double>(view(&lq, 1, 1), view(&lp, 1, 1), vector_view<const double>(high), 0.1, view(&w, 1, 1));
    CHECK(w == 1); // a rare token that the teacher likes
    fill_ida<double>(view(&lp, 1, 1), view(&lq, 1, 1), vector_view<const double>(high), 0.1, view(&w, 1, 1));
    CHECK(w == 1); // a likely one that it does not
    const double likes = -0.01;
    fill_ida<double>(view(&lp, 1, 1), view(&likes, 1, 1), vector_view<const double>(high), 0.95, view(&w, 1, 1));
    CHECK(w == 0.95);
    CHECK(says(refusal([&] {
                   fill_ida<double>(view(&lp, 1, 1), view(&lq, 1, 1), vector_view<const double>(high), 2,
                                    view(&w, 1, 1));
               }),
               "least"));
}

TEST_CASE("a coefficient that moves with the version") {
    const ramp c{.from = 1, .to = 0.2, .begin = 10, .end = 30};
    CHECK(c.at(-3) == 1);
    CHECK(c.at(10) == 1);
    CHECK(c.at(20) == doctest::Approx(0.6));
    CHECK(c.at(30) == 0.2);
    CHECK(c.at(1000) == 0.2);
    const ramp at_once{.from = 0, .to = 1, .begin = 5, .end = 5};
    CHECK(at_once.at(4) == 0);
    CHECK(at_once.at(5) == 1);
}

TEST_CASE("a teacher that lags: the lag is bounded, and what is kept is enough") {
    test::property("against a learner that keeps weights by hand", [] {
        const auto behind = *rc::gen::inRange<std::int64_t>(0, 12), every = *rc::gen::inRange<std::int64_t>(1, 9);
        const teacher_stream stream = teacher_stream::lagged(behind, every);
        std::deque<std::int64_t> kept; // student versions whose weights the learner has beside its own
        std::int64_t teacher = 0, version = 0;
        for (std::int64_t v = 1; v < 60; ++v) {
            if (stream.keeps(v)) kept.push_back(v);
            if (const auto u = stream.at(v)) {
                RC_ASSERT(u->version == version + 1);
                RC_ASSERT(u->keep == 0);
                RC_ASSERT(u->from == v - behind);
                if (behind > 0) {
                    RC_ASSERT(!kept.empty());
                    RC_ASSERT(kept.front() == u->from);
                    kept.pop_front();
                }
                teacher = u->from, version = u->version;
            }
            RC_ASSERT(stream.version(v) == version);
            RC_ASSERT(stream.source(v) == teacher);
            RC_ASSERT(std::int64_t(kept.size()) <= stream.kept());
            if (v >= behind) {
                RC_ASSERT(v - teacher >= behind);
                RC_ASSERT(v - teacher < behind + every);
            }
        }
    });
    CHECK(says(refusal([] { teacher_stream::lagged(-1); }), "behind"));
    CHECK(says(refusal([] { teacher_stream::lagged(1, 0); }), "every"));
    CHECK(says(refusal([] { teacher_stream::averaged(1); }), "decay"));
}

TEST_CASE("a teacher that is an average") {
    const teacher_stream stream = teacher_stream::averaged(0.75, 2);
    std::vector<float> teacher{1, -2}, student{0, 0};
    double by_hand = 1;
    for (std::int64_t v = 1; v <= 7; ++v) {
        student = {float(v), 4};
        const auto u = stream.at(v);
        CHECK(u.has_value() == (v % 2 == 0));
        if (!u) continue;
        sched::apply(*u, student, teacher);
        by_hand = 0.75 * by_hand + 0.25 * double(v);
        CHECK(teacher[0] == doctest::Approx(by_hand));
    }
    CHECK(stream.version(7) == 3);
    sched::apply(*teacher_stream::lagged(0).at(1), student, teacher);
    CHECK(teacher == student);
    std::vector<float> one(1);
    CHECK(says(refusal([&] { sched::apply({1, 1, 0}, student, one); }), "teacher"));
}
