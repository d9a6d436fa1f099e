// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Supports that differ in length from row to row: bit for bit the support filled up with -1, for every estimator of a
// support and for sparse gradients, on both engines, whatever the rows hold; what is refused, and what a device finds
// for itself.
#include "backends/both_engines.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class T>
T stored(double x) {
    return element<T>::store(static_cast<arithmetic_t<T>>(x));
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), sizeof(T) * a.size()) == 0);
}

/// A batch whose rows have a different number of ids, as a line and as a matrix filled up with -1.
template <class Z, class Id, class L>
struct batch {
    index_t n, v, width, total = 0;
    std::vector<Z> z;
    std::vector<index_t> offsets{0};
    std::vector<std::int32_t> short_offsets;
    std::vector<Id> ids, filled_ids;
    std::vector<L> log_q, filled_q, log_mu, filled_mu, log_tail;
    std::vector<std::int32_t> mask;
    std::vector<float> weights;
    std::vector<double> lse;
    env e;
    float temperature;
    bool short_ones;

    explicit batch(numbers& u) : n(1 + u.below(5)) {
        const index_t sizes[] = {1, 2, 5, 33, 700, 1500, 2600};
        v = sizes[u.below(7)], temperature = float(0.5 + u.uniform()), short_ones = u.below(2) == 0;
        const L nan = stored<L>(std::numeric_limits<double>::quiet_NaN());
        const double scale = u.below(3) == 0 ? 8 : 2;
        index_t widest = 1;
        for (index_t r = 0; r < n; ++r) {
            const index_t kinds[] = {0, v, u.below(v + 1), u.below(std::min<index_t>(v, 8) + 1), 1};
            const index_t k = kinds[u.below(5)];
            offsets.push_back(offsets.back() + k), widest = std::max(widest, k);
        }
        width = widest + u.below(std::min<index_t>(v - widest, 3) + 1), total = offsets.back();
        short_offsets.assign(offsets.begin(), offsets.end());
        filled_ids.assign(std::size_t(n * width), Id(-1));
        filled_q.assign(std::size_t(n * width), nan), filled_mu = filled_q;
        for (index_t r = 0; r < n; ++r) {
            std::vector<double> y;
            double sum_z = 0, sum_y = 0;
            for (index_t i = 0; i < v; ++i) {
                const double x = u.below(40) == 0 ? double(detail::neg_inf<float>()) : scale * u.normal();
                z.push_back(stored<Z>(x)), y.push_back(scale * u.normal());
                sum_z += std::exp(double(element<Z>::load(z.back())) / double(temperature)),
                    sum_y += std::exp(y.back());
            }
            lse.push_back(std::log(sum_z));
            std::vector<index_t> order(static_cast<std::size_t>(v));
            std::iota(order.begin(), order.end(), index_t{0});
            for (index_t i = v - 1; i > 0; --i) std::swap(order[std::size_t(i)], order[std::size_t(u.below(i + 1))]);
            double inside = 0;
            for (index_t j = 0; j < offsets[std::size_t(r + 1)] - offsets[std::size_t(r)]; ++j) {
                const index_t id = order[std::size_t(j)];
                const double lq = std::min(0.0, y[std::size_t(id)] - std::log(sum_y));
                inside += std::exp(lq);
                const bool unused = u.below(12) == 0;
                ids.push_back(unused ? Id(-1) : Id(id));
                log_q.push_back(unused ? nan : stored<L>(u.below(60) == 0 ? double(detail::neg_inf<float>()) : lq));
                log_mu.push_back(unused ? nan : stored<L>(std::min(0.0, lq + 0.1 * u.normal())));
            }
            log_tail.push_back(stored<L>(std::log(std::max(1e-9, 1 - inside))));
            mask.push_back(std::int32_t(u.below(5))), weights.push_back(float(u.normal()));
        }
        if (total > 0 && u.below(4) == 0) { // bad contents
            const auto at = std::size_t(u.below(total));
            const index_t what = u.below(4);
            if (what == 0) ids[at] = Id(-2);
            if (what == 1) ids[at] = Id(v);
            if (what == 2) ids[at] = ids[std::size_t(u.below(total))];
            if (what == 3) log_q[at] = stored<L>(0.5);
        }
        for (index_t r = 0; r < n; ++r)
            for (index_t i = offsets[std::size_t(r)]; i < offsets[std::size_t(r + 1)]; ++i) {
                const auto to = std::size_t(r * width + i - offsets[std::size_t(r)]), from = std::size_t(i);
                filled_ids[to] = ids[from], filled_q[to] = log_q[from], filled_mu[to] = log_mu[from];
            }
        e.beta = u.below(2) ? 0.F : 0.5F;
        e.loss_clamp = u.below(3) ? 0 : 0.7;
        e.on_infinite = u.below(2) ? infinite::floor(-15) : infinite::skip();
        if (u.below(2)) e.mask = row_mask<>(mask);
        if (u.below(2)) e.weights = weights;
        if (u.below(2)) e.reduction = reduce::sum;
        if (u.below(3) == 0) e.given_lse = lse;
        e.measure.entropy = u.below(2) == 0;
        if (u.below(2)) std::vector<L>().swap(log_tail); // null: left out
    }

    teacher::ragged_support<Id, L> ragged() const {
        return {ids,      log_q,  short_ones ? row_offsets<>(short_offsets) : row_offsets<>(offsets),
                log_tail, log_mu, teacher::chosen_by::stale_student};
    }
    teacher::support<Id, L> filled() const {
        return {view(filled_ids.data(), n, width), view(filled_q.data(), n, width), log_tail,
                view(filled_mu.data(), n, width), teacher::chosen_by::stale_student};
    }
};

struct outcome {
    result r;
    std::vector<float> losses;
    std::vector<double> lse;
};
template <class Backend, class Student, class Teacher, class E>
outcome call(Backend& be, const Student& student, const Teacher& cache, const E& estimator, env e, bool with_lse) {
    outcome out{
        {}, std::vector<float>(std::size_t(student.rows()), 3.F), std::vector<double>(std::size_t(student.rows()))};
    e.losses = out.losses;
    if (with_lse) e.lse = out.lse;
    out.r = evaluate(be, student, cache, estimator, e);
    return out;
}
std::string different_field(const diagnostics& a, const diagnostics& b) {
    std::string which;
    diagnostics::fields([&](const char* name, auto member, auto) {
        if (std::memcmp(&(a.*member), &(b.*member), sizeof(a.*member)) != 0) which += std::string(name) + " ";
    });
    return which;
}
void assert_same(const outcome& got, const outcome& want) {
    RC_ASSERT(std::memcmp(&got.r.loss, &want.r.loss, sizeof got.r.loss) == 0);
    RC_ASSERT(same_bits(got.losses, want.losses));
    RC_ASSERT(same_bits(got.lse, want.lse));
    RC_ASSERT(different_field(got.r.diagnostics, want.r.diagnostics) == "");
}

template <class Z, class Id, class L, class E>
void same_as_filled(const batch<Z, Id, L>& b, const char* name, const E& estimator) {
    constexpr bool sparse = detail::offers_sparse_gradient<E>();
    on_both([&](auto& be, const char* engine) {
        RC_TAG(std::string(engine));
        (void)name;
        const auto on = [&](std::vector<Z>& dz) {
            return student::logits<Z>{
                .z = view(b.z.data(), b.n, b.v), .dz = view(dz.data(), b.n, b.v), .temperature = b.temperature};
        };
        std::vector<Z> dz(std::size_t(b.n * b.v), stored<Z>(0.25)), want_dz = dz;
        const outcome got = call(be, on(dz), b.ragged(), estimator, b.e, !sparse);
        const outcome want = call(be, on(want_dz), b.filled(), estimator, b.e, !sparse);
        assert_same(got, want);
        RC_ASSERT(same_bits(dz, want_dz));
        if constexpr (sparse) {
            std::vector<Z> line(std::size_t(b.total), stored<Z>(0.25)),
                columns(std::size_t(b.n * b.width), stored<Z>(0.25));
            const auto student = [&](std::vector<Z>& to, index_t rows, index_t cols) {
                return student::on_support<Z>{
                    .z = view(b.z.data(), b.n, b.v), .dz = view(to.data(), rows, cols), .temperature = b.temperature};
            };
            assert_same(call(be, student(line, 1, b.total), b.ragged(), estimator, b.e, false), got);
            call(be, student(columns, b.n, b.width), b.filled(), estimator, b.e, false);
            for (index_t r = 0; r < b.n; ++r)
                for (index_t i = b.offsets[std::size_t(r)]; i < b.offsets[std::size_t(r + 1)]; ++i)
                    RC_ASSERT(std::memcmp(&line[std::size_t(i)],
                                          &columns[std::size_t(r * b.width + i - b.offsets[std::size_t(r)])],
                                          sizeof(Z)) == 0);
        }
    });
}

/// A small batch by hand: rows of 2, 0 and 3 ids over 5.
struct by_hand {
    std::vector<float> z{0.5F, -1, 2, 0, 1, 1, 1, 0, 0, 2, -1, 0.25F, 3, 1, 0}, dz = std::vector<float>(15, 7.F);
    std::vector<std::int32_t> ids{3, 0, 1, 4, 2, 0, 3, 1, 4, 2}; // the cache's are the first five
    std::vector<float> log_q{-1, -2, -3, -0.5F, -1.5F, -1, -1, -1, -1, -1}, losses = std::vector<float>(3, 7.F),
                                                                            line = std::vector<float>(5, 7.F);
    std::vector<std::int64_t> offsets{0, 2, 2, 5};
    teacher::ragged_support<std::int32_t> cache() const {
        return {view(ids.data(), 5), view(log_q.data(), 5), row_offsets<>(offsets)};
    }
    student::logits<float> student() { return {view(std::as_const(z).data(), 3, 5), view(dz.data(), 3, 5)}; }
    student::on_support<float> sparse() { return {view(std::as_const(z).data(), 3, 5), view(line.data(), 1, 5)}; }
    bool untouched() const {
        const auto is = [](float x) { return x == 7; };
        return std::all_of(dz.begin(), dz.end(), is) && std::all_of(losses.begin(), losses.end(), is) &&
               std::all_of(line.begin(), line.end(), is);
    }
};

} // namespace

TEST_CASE("bit for bit the support filled up with -1") {
    property("every estimator", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const batch<float, std::int32_t, float> b(u);
        same_as_filled(b, "renormalised reverse_kl", renormalised{reverse_kl{}});
        same_as_filled(b, "renormalised jsd", renormalised{jsd{.3, .6}});
        same_as_filled(b, "renormalised total_variation", renormalised{total_variation{}});
        same_as_filled(b, "tail_bucket reverse_kl", tail_bucket{reverse_kl{}});
        same_as_filled(b, "tail_bucket forward_kl", tail_bucket{forward_kl{}});
        same_as_filled(b, "generalised", generalised{reverse_kl{}});
        same_as_filled(b, "truncated", truncated_biased{forward_kl{}});
        same_as_filled(b, "reweighted", reweighted{});
    });
    property("ids of 64 bits, numbers of 64",
             [] {
                 numbers u(*rc::gen::arbitrary<std::uint64_t>());
                 const batch<double, std::int64_t, double> b(u);
                 same_as_filled(b, "renormalised", renormalised{forward_kl{}});
                 same_as_filled(b, "tail_bucket", tail_bucket{jsd{}});
             },
             {.cases = 40});
    property("ids of 16 bits, logits of 16",
             [] {
                 numbers u(*rc::gen::arbitrary<std::uint64_t>());
                 const batch<bfloat16, std::int16_t, opd::half> b(u);
                 same_as_filled(b, "renormalised", renormalised{reverse_kl{}});
                 same_as_filled(b, "tail_bucket", tail_bucket{reverse_kl{}});
             },
             {.cases = 40});
}

TEST_CASE("a row without an id is bad, the others are not; what lies between the rows' stretches is left alone") {
    on_both([](auto& be, const char*) {
        by_hand s;
        const result r = evaluate(be, s.student(), s.cache(), tail_bucket{reverse_kl{}}, {.reduction = reduce::sum});
        CHECK(r.diagnostics.bad_rows == 1);
        CHECK(r.diagnostics.first_bad_row == 1);
        CHECK(r.diagnostics.support_rows == 2);
        CHECK(std::all_of(s.dz.begin() + 5, s.dz.begin() + 10, [](float x) { return x == 0; }));
        CHECK(s.dz[0] != 0);
        // the line is longer than the rows: its first and its last slot belong to nobody
        s.offsets = {1, 2, 2, 4};
        evaluate(be, s.sparse(), s.cache(), renormalised{reverse_kl{}});
        CHECK(s.line[0] == 7);
        CHECK(s.line[1] == 0); // one id: nothing to move
        CHECK(s.line[2] != 7);
        CHECK(s.line[3] == -s.line[2]);
        CHECK(s.line[4] == 7);
        // no row has an id: nothing to point at
        const teacher::ragged_support<std::int32_t> none{{}, {}, row_offsets<>(std::vector<std::int64_t>(4, 0))};
        const std::vector<std::int64_t> zeros(4, 0);
        auto empty = none;
        empty.offsets = row_offsets<>(zeros);
        CHECK(evaluate(be, s.student(), empty, renormalised{jsd{}}).diagnostics.bad_rows == 3);
        CHECK(evaluate(be, s.student(), empty, tail_bucket{jsd{}}).diagnostics.bad_rows == 3);
        CHECK(s.dz == std::vector<float>(15, 0.F));
    });
}

TEST_CASE("refused before anything is written") {
    by_hand s;
    cpu_backend be;
    const auto refused = [&](const char* words, const auto& cache, const env& given = {}) {
        env e = given;
        e.losses = s.losses;
        CHECK_THROWS_WITH_AS(evaluate(be, s.student(), cache, tail_bucket{reverse_kl{}}, e), doctest::Contains(words),
                             invalid_input);
        CHECK_THROWS_WITH_AS(evaluate(be, s.sparse(), cache, renormalised{reverse_kl{}}, e), doctest::Contains(words),
                             invalid_input);
        CHECK(s.untouched());
    };
    const auto with = [&](std::vector<std::int64_t> offsets) { return s.offsets = std::move(offsets), s.cache(); };
    refused("teacher.offsets, row 0: from -1 to 2", with({-1, 2, 2, 5}));
    refused("teacher.offsets, row 1: from 3 to 2", with({0, 3, 2, 5}));
    refused("teacher.offsets, row 2: from 2 to 6", with({0, 2, 2, 6}));
    refused("teacher.offsets: has 3 entries", with({0, 2, 5}));
    s.offsets = {0, 2, 2, 5};
    auto cache = s.cache();
    cache.offsets = {};
    refused("teacher.offsets: is a null pointer", cache);
    cache = s.cache(), cache.widest = 2;
    refused("teacher.widest, row 2: is 2 where a row has 3 ids", cache);
    cache.widest = -1;
    refused("teacher.widest: must be at least 0", cache);
    cache = s.cache(), cache.log_q.size = 4;
    refused("teacher.log_q: has 4 entries for 5 ids", cache);
    cache = s.cache(), cache.log_mu = view(s.log_q.data(), 3);
    refused("teacher.log_mu: has 3 entries for 5 ids", cache);
    cache = s.cache(), cache.log_q.data = nullptr;
    refused("teacher.log_q: is a null pointer", cache);
    cache = s.cache(), cache.log_tail = view(s.log_q.data(), 2);
    refused("teacher.log_tail: has 2 entries", cache);
    const std::vector<std::int32_t> many(6, 1);
    const std::vector<float> as_many(6, -2.F);
    const std::vector<std::int64_t> wide{0, 0, 0, 6};
    CHECK_THROWS_WITH_AS(evaluate(be, s.student(),
                                  teacher::ragged_support<std::int32_t>{many, as_many, row_offsets<>(wide)},
                                  tail_bucket{reverse_kl{}}),
                         doctest::Contains("teacher.offsets, row 2: 6 ids for a vocabulary of 5"), invalid_input);
    // the gradient has the shape of the line
    const auto onto = [&](auto dz) {
        return evaluate(be, student::on_support<float>{view(std::as_const(s.z).data(), 3, 5), dz}, s.cache(),
                        renormalised{reverse_kl{}});
    };
    CHECK_THROWS_WITH_AS(onto(view(s.line.data(), 1, 4)), doctest::Contains("student.dz: has shape"), invalid_input);
    CHECK_THROWS_WITH_AS(onto(view(s.dz.data(), 3, 5)), doctest::Contains("student.dz: has shape"), invalid_input);
    CHECK_THROWS_WITH_AS(onto(padded_view(s.dz.data(), 1, 5, 8)), doctest::Contains("student.dz: has padding"),
                         invalid_input);
    CHECK_THROWS_WITH_AS(onto(view(s.log_q.data(), 1, 5)), doctest::Contains("student.dz: overlaps teacher.log_q"),
                         invalid_input);
    CHECK(s.untouched());
    // contents, where asked for
    const env contents{.checks = check::contents};
    refused("teacher.ids, row 1: has no used slot", s.cache(), contents);
    s.offsets = {0, 1, 2, 5}, s.ids[3] = 1;
    refused("teacher.ids, row 2: id 1 twice", s.cache(), contents);
    s.ids[3] = 9;
    refused("teacher.ids, row 2: id 9 in column 1", s.cache(), contents);
    s.ids[3] = 4, s.log_q[1] = 0.5F;
    refused("teacher.log_q, row 1: is not a log-probability in column 0", s.cache(), contents);
    s.log_q[1] = detail::neg_inf<float>();
    CHECK_THROWS_AS(evaluate(be, s.student(), s.cache(), tail_bucket{reverse_kl{}}, {.on_infinite = infinite::raise()}),
                    infinite_value);
    CHECK(s.untouched());
}

TEST_CASE("offsets that only a device sees: its rows are bad, and nothing else") {
    by_hand s;
    host_run_backend be{.threads = 32};
    const auto run = [&](auto student, const auto& estimator) {
        auto cache = s.cache();
        cache.widest = 3; // and on either side of the line is more memory
        cache.ids = view(std::as_const(s.ids).data() + 3, 5), cache.log_q = view(std::as_const(s.log_q).data() + 3, 5);
        env e;
        e.reduction = reduce::sum;
        using job = row_job<decltype(student), decltype(cache), std::remove_cvref_t<decltype(estimator)>, space::host>;
        return be.for_rows(job{student, cache, estimator, e, 3, 5}); // as after the checks that a device can make
    };
    for (const auto& offsets : {std::vector<std::int64_t>{0, 2, 1, 4}, std::vector<std::int64_t>{0, 2, -3, 9},
                                std::vector<std::int64_t>{0, 4, 6, 5}, std::vector<std::int64_t>{-2, 1, 3, 5}}) {
        s.offsets = offsets;
        index_t bad = 0;
        for (std::size_t r = 0; r < 3; ++r) {
            const std::int64_t k = offsets[r + 1] - offsets[r];
            bad += k < 1 || k > 3 || offsets[r] < 0 || offsets[r + 1] > 5;
        }
        CHECK(bad >= 1);
        CHECK(run(s.student(), tail_bucket{reverse_kl{}}).diagnostics.bad_rows == bad);
        CHECK(run(s.student(), renormalised{reverse_kl{}}).diagnostics.bad_rows == bad);
        CHECK(run(s.sparse(), renormalised{reverse_kl{}}).diagnostics.bad_rows == bad);
    }
}
