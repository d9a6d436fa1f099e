// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// Scores and draws from hidden states: every output has the bits that the materialised logits give, whatever the budget
// and the threads.
#include "support/compiled/hidden_sides.hpp"
#include "support/property.hpp"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>
#include <opd/score.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Everything that score writes.
struct scored {
    index_t n, m, k;
    floats log_p, log_tail, top_log_p, top_tail;
    std::vector<std::int32_t> top;
    std::vector<double> lse, entropy;
    scored(index_t n_, index_t m_, index_t k_)
        : n(n_), m(m_), k(k_), log_p(std::size_t(n * m), 7), log_tail(std::size_t(n), 7),
          top_log_p(std::size_t(n * k), 7), top_tail(std::size_t(n), 7), top(std::size_t(n * k), 7),
          lse(std::size_t(n), 7), entropy(std::size_t(n), 7) {}
    scores<> into(const std::vector<std::int32_t>& ids) {
        return {.ids = view(ids.data(), n, m),
                .log_p = view(log_p.data(), n, m),
                .log_tail = log_tail,
                .top_ids = view(top.data(), n, k),
                .top_log_p = view(top_log_p.data(), n, k),
                .top_log_tail = top_tail,
                .lse = lse,
                .entropy = entropy};
    }
    bool operator==(const scored& o) const {
        return same(log_p, o.log_p) && same(log_tail, o.log_tail) && same(top_log_p, o.top_log_p) &&
               same(top_tail, o.top_tail) && top == o.top && same(lse, o.lse) && same(entropy, o.entropy);
    }
};

/// Everything that draw writes.
struct taken {
    std::vector<std::int32_t> ids;
    floats log_mu, weight;
    std::vector<std::uint8_t> exact;
    std::vector<double> lse, log_kept, log_tail, kappa;
    std::vector<filter_cut> cut;
    std::vector<index_t> kept;
    taken(index_t n, index_t m)
        : ids(std::size_t(n * m), 7), log_mu(ids.size(), 7), weight(ids.size(), 7), exact(ids.size(), 7),
          lse(std::size_t(n), 7), log_kept(lse), log_tail(lse), kappa(lse), cut(lse.size()), kept(lse.size(), 7) {}
    template <class Design>
    drawn<> to(const Design& d) {
        const index_t m = d.columns(), n = index_t(lse.size());
        return {view(ids.data(), n, m), view(log_mu.data(), n, m), view(weight.data(), n, m), view(exact.data(), n, m)};
    }
    template <class Design>
    draw_options<> options(const filter& f, const row_mask<>& mask) {
        draw_options<> o{.filter = f, .mask = mask, .lse = lse, .log_kept = log_kept, .cut = cut, .kept = kept};
        if constexpr (std::is_same_v<Design, design::threshold> || std::is_same_v<Design, design::head_tail>)
            o.log_tail = log_tail;
        if constexpr (std::is_same_v<Design, design::gumbel_top>) o.kappa = kappa;
        return o;
    }
    bool operator==(const taken& o) const {
        bool cuts = true;
        for (std::size_t r = 0; r < cut.size(); ++r) cuts &= cut[r].z == o.cut[r].z && cut[r].id == o.cut[r].id;
        return ids == o.ids && same(log_mu, o.log_mu) && same(weight, o.weight) && exact == o.exact &&
               same(lse, o.lse) && same(log_kept, o.log_kept) && same(log_tail, o.log_tail) && same(kappa, o.kappa) &&
               kept == o.kept && cuts;
    }
};

/// f(backend, budget) for threads and for budgets of few rows of v logits.
template <class F>
void each_budget(index_t v, F&& f) {
    for (const int threads : {1, 2})
        for (const std::size_t rows : {std::size_t{1}, std::size_t{4}, std::size_t{1000}}) {
            cpu_backend be{.threads = threads};
            f(be, sizeof(float) * std::size_t(v) * rows + (std::size_t{1} << 15)); // and the products' own
        }
}

} // namespace

TEST_CASE("scores of hidden states are those of their logits") {
    for (const index_t v : {30, 2500})
        for (const bool more : {false, true}) {
            CAPTURE(v);
            const index_t n = 9, m = 5, k = 7;
            side s(n, v, 20, unsigned(v), more, more ? 4.0f : 0);
            if (more) s.x[20 * 5 + 3] = std::numeric_limits<float>::quiet_NaN(); // row 5 is bad
            std::vector<std::int32_t> ids;
            for (index_t i = 0; i < n * m; ++i) ids.push_back(std::int32_t((i * 13) % v));
            ids[1] = -1, ids[std::size_t(3 * m)] = std::int32_t(v);
            std::vector<std::uint8_t> mask(std::size_t(n), 1);
            mask[2] = 0;
            const floats z = s.logits();
            const auto logits = view(z.data(), n, v);
            cpu_backend plain;
            scored expected(n, m, k);
            const result r = score(plain, logits, expected.into(ids), 0.7f, mask);
            each_budget(v, [&](cpu_backend& be, std::size_t budget) {
                gradients g(s, 3);
                const gradients untouched(s, 3);
                auto mine = student_of(s, g, 2 * budget);
                auto theirs = teacher_of(s, budget);
                mine.temperature = theirs.temperature = 0.7f;
                for (int whose = 0; whose < 2; ++whose) {
                    scored got(n, m, k);
                    const result x =
                        whose ? score(be, mine, got.into(ids), mask) : score(be, theirs, got.into(ids), mask);
                    CHECK(got == expected);
                    CHECK(x.diagnostics.bad_rows == r.diagnostics.bad_rows);
                    CHECK(x.diagnostics.kept == r.diagnostics.kept);
                }
                CHECK(g == untouched); // its gradient is no part of it
            });
            // sources that are logits
            scored of_dense(n, m, k), of_student(n, m, k);
            score(plain, teacher::dense{logits, 0.7f}, of_dense.into(ids), mask);
            score(plain, student::logits<float>{.z = logits, .temperature = 0.7f}, of_student.into(ids), mask);
            CHECK(of_dense == expected);
            CHECK(of_student == expected);
        }
}

TEST_CASE("token_logp, top_k and log_sum_exp") {
    const index_t n = 6, v = 1100, m = 4;
    const side s(n, v, 12, 1, true);
    const floats z = s.logits();
    const auto logits = view(z.data(), n, v);
    auto theirs = teacher_of(s);
    theirs.temperature = 2;
    std::vector<std::int32_t> ids(std::size_t(n * m), 5), top(ids.size()), same_top(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(37 * i % 1100);
    const auto asked = view(std::as_const(ids).data(), n, m);
    floats a(ids.size()), b(ids.size()), tail_a(std::size_t(n), 0.0f), tail_b(tail_a);
    std::vector<double> lse_a(tail_a.size()), lse_b(tail_a.size());
    const auto of = [&](floats& x) { return view(x.data(), n, m); };
    cpu_backend be;
    token_logp(be, logits, asked, of(a), 2, {}, lse_a, tail_a);
    token_logp(be, theirs, asked, of(b), {}, lse_b, tail_b);
    CHECK(same(a, b));
    CHECK(same(lse_a, lse_b));
    CHECK(same(tail_a, tail_b));
    log_sum_exp(be, theirs, lse_b);
    CHECK(same(lse_a, lse_b));
    top_k(be, logits, view(top.data(), n, m), of(a), 2, {}, tail_a);
    top_k(be, theirs, view(same_top.data(), n, m), of(b), {}, tail_b);
    CHECK(top == same_top);
    CHECK(same(a, b));
    CHECK(same(tail_a, tail_b));
    // of a cache
    const floats log_q(ids.size(), -2.0f);
    const teacher::samples cache{asked, view(log_q.data(), n, m), view(log_q.data(), n, m)};
    token_logp(be, logits, cache, of(a), 2);
    token_logp(be, theirs, cache, of(b));
    CHECK(same(a, b));
    // with the lse that it gives, drawn tokens are scored and learned from in one
    gradients with(s), without(s);
    auto mine = student_of(s, with);
    evaluate(be, mine, teacher::on_policy{cache}, mc{reverse_kl{}});
    CHECK(with.dx != without.dx);
}

TEST_CASE("log p on kept sets makes their logits alone") {
    const index_t n = 5, v = 400, m = 2;
    for (const float cap : {0.0f, 3.0f}) {
        side s(n, v, 150, 1, cap > 0, cap);
        s.x[150 * 3] = std::numeric_limits<float>::infinity();
        const std::vector<std::int32_t> kept{1, 5, 9, 0, 399, 7, 8, 9, 10, 3, 5, 2};
        const std::vector<std::int64_t> offsets{0, 3, 5, 9, 10, 12}; // the last set does not ascend
        const std::vector<std::int32_t> ids{5, 1, 399, 0, 11, 7, 3, -1, 5, 2};
        const floats log_q(ids.size(), -2.0f), z = s.logits();
        const teacher::on_kept_sets cache{
            teacher::samples{view(ids.data(), n, m), view(log_q.data(), n, m), view(log_q.data(), n, m)},
            view(kept.data(), index_t(kept.size())), row_offsets<>(offsets)};
        floats a(ids.size(), 3), b(ids.size(), 3);
        std::vector<double> lse_a(std::size_t(n), 3.0), lse_b(lse_a);
        cpu_backend be{.threads = 2};
        auto theirs = teacher_of(s);
        theirs.temperature = 0.5f;
        std::vector<std::uint8_t> mask(std::size_t(n), 1);
        mask[0] = 0;
        const result plain = token_logp(be, view(z.data(), n, v), cache, view(a.data(), n, m), 0.5f, mask, lse_a);
        const result r = token_logp(be, theirs, cache, view(b.data(), n, m), mask, lse_b);
        CHECK(same(a, b));
        CHECK(same(lse_a, lse_b));
        CHECK(r.diagnostics.bad_rows == plain.diagnostics.bad_rows);
        CHECK(r.diagnostics.outside_kept == plain.diagnostics.outside_kept);
        CHECK(r.diagnostics.bad_rows >= 2);
    }
}

TEST_CASE("draws from hidden states are those from their logits") {
    const index_t n = 7, v = 2300;
    side s(n, v, 16, 3, true);
    s.x[16 * 4] = std::numeric_limits<float>::quiet_NaN();
    const floats z = s.logits();
    std::vector<std::uint64_t> sample;
    std::vector<std::uint32_t> position;
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[1] = 0;
    for (index_t r = 0; r < n; ++r) sample.push_back(std::uint64_t(100 + r)), position.push_back(std::uint32_t(r));
    const draw_keys<> keys{.seed = 7, .sample = sample, .position = position};
    const auto designs = [&](auto design) {
        using D = decltype(design);
        for (const filter& f : {filter{}, filter{.temperature = 0.7f, .top_k = 50, .top_p = 0.9f}}) {
            cpu_backend plain;
            taken expected(n, design.columns());
            const result r =
                draw(plain, view(z.data(), n, v), design, keys, expected.to(design), expected.options<D>(f, mask));
            CHECK(r.diagnostics.bad_rows == 1);
            each_budget(v, [&](cpu_backend& be, std::size_t budget) {
                auto source = teacher_of(s, budget);
                for (const float t : {1.0f, f.temperature}) {
                    source.temperature = t;
                    taken got(n, design.columns());
                    draw(be, source, design, keys, got.to(design), got.options<D>(f, mask));
                    CHECK(got == expected);
                }
            });
        }
    };
    designs(design::greedy{}), designs(design::gumbel{}), designs(design::iid{4}), designs(design::threshold{6});
    designs(design::head_tail{3, 4}), designs(design::gumbel_top{5});

    // what a filter kept
    const filter f{.temperature = 0.7f, .top_p = 0.8f};
    taken t(n, 1);
    cpu_backend be;
    const auto source = teacher_of(s, sizeof(float) * std::size_t(2 * v));
    draw(be, source, design::gumbel{}, keys, t.to(design::gumbel{}), t.options<design::gumbel>(f, {}));
    std::vector<std::int64_t> offsets{0};
    for (const index_t k : t.kept) offsets.push_back(offsets.back() + k);
    std::vector<std::int32_t> of_logits(std::size_t(offsets.back()), 7), of_hidden(of_logits);
    kept_ids(be, view(z.data(), n, v), t.cut, offsets, view(of_logits.data(), index_t(of_logits.size())));
    kept_ids(be, source, t.cut, offsets, view(of_hidden.data(), index_t(of_hidden.size())));
    CHECK(of_hidden == of_logits);
    CHECK(of_logits.size() > 10);
}

TEST_CASE("the page's calls") {
    const index_t n = 4, v = 60, d = 5, m = 3;
    const side t(n, v, d, 1);
    const teacher::hidden theirs{t.states(), t.head()};
    const student::hidden mine{t.states(), t.head()};
    std::vector<std::int32_t> some(std::size_t(n * m), 7), drawn_ids(some.size());
    floats log_p(some.size(), 1.0f), log_mu(some.size());
    const auto ids = view(std::as_const(some).data(), n, m);
    const auto log_q = view(log_p.data(), n, m);
    const drawn<> out{view(drawn_ids.data(), n, m), view(log_mu.data(), n, m)};
    const std::vector<std::uint64_t> sample(std::size_t(n), 1);
    const std::vector<std::uint32_t> position{0, 1, 2, 3};
    const draw_keys<> keys{.seed = 1, .sample = sample, .position = position};
    cpu_backend backend;
    // clang-format off
    token_logp(backend, theirs, ids, log_q);             // log q of given ids
    draw(backend, mine, design::threshold{m}, keys, out); // ids to score, from the student's
    // clang-format on
    CHECK(log_p[0] < 0);
    CHECK(log_mu[0] < 0);
}

TEST_CASE("arenas, and what is refused") {
    const index_t n = 8, v = 500, m = 3;
    const side s(n, v, 6, 1);
    std::vector<std::int32_t> ids(std::size_t(n * m), 4);
    scored to(n, m, 5);
    cpu_backend be;
    auto source = teacher_of(s);
    source.budget = budget_of_rows(source, 3);
    const std::size_t bytes = score_workspace_bytes(be, source, to.into(ids));
    const floats z = s.logits();
    const std::size_t plain = score_workspace_bytes(be, view(z.data(), n, v), to.into(ids)),
                      block = source.budget + opd::detail::worker_floats::bytes(3, 6);
    CHECK(bytes >= block);
    CHECK(bytes <= plain + block + 64 * std::size_t(n)); // a partial result and a factor for each row
    std::vector<std::byte> memory(bytes);
    be.arena = memory;
    CHECK(score(be, source, to.into(ids)).diagnostics.kept == n);
    const std::size_t to_draw = draw_workspace_bytes(be, source, design::threshold{4});
    CHECK(to_draw >= block); // rows and products use a worker's memory in turn
    CHECK(to_draw <=
          draw_workspace_bytes(be, view(z.data(), n, v), design::threshold{4}) + block + 64 * std::size_t(n));

    // a student's gradient, for which a soft-cap keeps the logits, is no part of it
    const side capped(n, v, 6, 1, false, 2.0f);
    gradients g(capped);
    auto mine_capped = student_of(capped, g, 2 * block);
    const std::size_t with_sinks = score_workspace_bytes(be, mine_capped, to.into(ids));
    mine_capped.dx = mine_capped.dw = {}, mine_capped.db = {};
    CHECK(with_sinks == score_workspace_bytes(be, mine_capped, to.into(ids)));

    be.arena = {};
    const auto refused = [&](auto&& call, const std::string& argument, const std::string& why) {
        try {
            call();
            FAIL("was taken: " << argument);
        } catch (const std::exception& error) {
            const std::string text = error.what();
            CHECK_MESSAGE(text.find(argument) != std::string::npos, text);
            CHECK_MESSAGE(text.find(why) != std::string::npos, text);
        }
    };
    scored other(n, m, 5);
    auto warm = source;
    warm.temperature = 0.5f;
    taken t(n, 1);
    refused([&] { draw(be, warm, design::greedy{}, {}, t.to(design::greedy{})); }, "teacher.temperature", "filter");
    refused([&] { (void)draw_workspace_bytes(be, warm, design::greedy{}); }, "teacher.temperature", "filter");
    warm.temperature = 0;
    refused([&] { score(be, warm, other.into(ids)); }, "teacher.temperature", "1e-6");
    auto few = source;
    few.budget = 10;
    refused([&] { score(be, few, other.into(ids)); }, "teacher.budget",
            ("is 10 bytes; a row takes " + std::to_string(budget_of_rows(few, 1))).c_str());
    auto nothing = source;
    nothing.w.data = nullptr;
    refused([&] { draw(be, nothing, design::greedy{}, {}, t.to(design::greedy{})); }, "teacher.w", "null");
    auto into_states = other.into(ids);
    into_states.log_p = view(const_cast<float*>(s.x.data()), n, m);
    refused([&] { score(be, source, into_states); }, "log_p", "overlaps teacher.x");
    const student::hidden mine{s.states(), s.head()};
    refused([&] { score(be, mine, into_states); }, "log_p", "overlaps student.x");
    refused([&] { token_logp(be, source, view(std::as_const(ids).data(), n - 1, m), view(to.log_p.data(), n, m)); },
            "ids", "shape");
}
