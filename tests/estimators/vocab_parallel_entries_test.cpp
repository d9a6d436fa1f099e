// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: no
//
// A vocabulary in shards beyond dense logits: supports and drawn tokens whose ids lie in some shard, hidden states
// whose head lies in shards, the call as its page has it, and what is refused.
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/entry_cases.hpp"
#include "support/entry_judges.hpp"
#include "support/generators.hpp"
#include "support/shards.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using floats = std::vector<float>;
const float nan_f = std::bit_cast<float>(0x7fc00000u);
const float minus_inf = detail::neg_inf<float>();

} // namespace

TEST_CASE("supports: a row's ids lie in any shard, the tail in all of them") {
    entry_cases::supports<sharded_backend>("reverse KL", tail_bucket{reverse_kl{}}, 80);
    entry_cases::supports<sharded_backend>("JSD", tail_bucket{jsd{}}, 80);
}

TEST_CASE("supports: unused slots, ids out of range, ids that repeat, and rows of different length") {
    entry_cases::odd_supports<sharded_backend>();
}

TEST_CASE("drawn tokens: their logit comes from the shard that has it") {
    entry_cases::drawn_tokens<sharded_backend>(100);
    entry_cases::weighted_tokens<sharded_backend>(60);
}

TEST_CASE("drawn tokens: a shard without them has the softmax's share alone; what is bad is bad on every rank") {
    entry_cases::lonely_and_bad_tokens<sharded_backend>();
}

namespace {

floats normals(index_t n, std::uint64_t seed, double deviation = 1) {
    numbers u(seed);
    floats x;
    for (index_t i = 0; i < n; ++i) x.push_back(float(deviation * u.normal()));
    return x;
}
/// One side in hidden states, and what a call leaves of its gradients.
struct side {
    index_t n, v, d;
    floats x, w, bias, dx, dw, db;
    float cap;
    side(index_t n_, index_t v_, index_t d_, std::uint64_t seed, float cap_ = 0)
        : n(n_), v(v_), d(d_), x(normals(n * d, seed)), w(normals(v * d, seed + 1, 2 / std::sqrt(double(d)))),
          bias(normals(v, seed + 2)), dx(x.size(), 3.0f), dw(w.size(), 3.0f), db(bias.size(), 3.0f), cap(cap_) {}
    /// The shard's rows of head, bias and their gradients; dx is the shard's own.
    student::hidden<float> student(index_t first, index_t count, float* own_dx, std::size_t budget) {
        return {.x = view(x.data(), n, d),
                .w = view(w.data() + first * d, count, d),
                .dx = view(own_dx, n, d),
                .dw = view(dw.data() + first * d, count, d),
                .temperature = 0.8f,
                .bias = view(std::as_const(bias).data() + first, count),
                .db = view(db.data() + first, count),
                .soft_cap = cap,
                .budget = budget};
    }
    teacher::hidden<float> teacher(index_t first, index_t count, std::size_t budget) const {
        return {.x = view(x.data(), n, d),
                .w = view(w.data() + first * d, count, d),
                .temperature = 1.5f,
                .bias = view(bias.data() + first, count),
                .soft_cap = cap,
                .budget = budget};
    }
};
constexpr std::size_t plenty = std::size_t{1} << 30;

double distance(const floats& a, const floats& b) {
    double far = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        far += double(a[i] - b[i]) * double(a[i] - b[i]), size += double(b[i]) * double(b[i]);
    return std::sqrt(far / std::max(size, 1e-300));
}

struct hidden_answer {
    result r;
    floats dx, dw, db;
    exchanged said;
};
/// Ranks of a head in shards; dx is added up as an all-reduce would. `known`: the rank's teacher; `rows`: of a block,
/// 0: all.
template <class Known, class Estimator>
hidden_answer in_shards(side s, const Known& known, const Estimator& estimator, const std::vector<index_t>& cuts,
                        index_t rows, env e = {}, bool threads = false) {
    const std::size_t ranks = cuts.size() - 1;
    std::vector<cpu_backend> backends(ranks);
    std::vector<floats> dx(ranks, floats(s.dx.size(), 3.0f));
    const auto make = [&](std::size_t i) {
        const index_t first = cuts[i], count = cuts[i + 1] - first;
        auto mine = s.student(first, count, dx[i].data(), plenty);
        if (rows > 0) mine.budget = budget_of_rows(mine, rows);
        return vocab_parallel(backends[i], {.first = first, .total = s.v}, mine, known(first, count), estimator, e);
    };
    using call = decltype(make(0));
    std::vector<std::unique_ptr<call>> calls;
    for (std::size_t i = 0; i < ranks; ++i) calls.push_back(std::make_unique<call>(make(i)));
    hidden_answer out;
    out.said = run_rounds(calls, threads);
    for (auto& c : calls) out.r = c->finish();
    for (auto& c : calls) c->backward();
    out.dx.assign(s.dx.size(), 0.0f);
    for (const floats& part : dx)
        for (std::size_t i = 0; i < part.size(); ++i) out.dx[i] += part[i];
    out.dw = s.dw, out.db = s.db;
    return out;
}
template <class Known, class Estimator>
void hidden_agrees(const side& s, const Known& known, const Estimator& estimator, env e = {}) {
    side one = s;
    cpu_backend be;
    const result want = evaluate(be, one.student(0, s.v, one.dx.data(), plenty), known(0, s.v), estimator, e);
    for (const std::vector<index_t>& cuts : std::vector<std::vector<index_t>>{
             {0, s.v}, {0, s.v / 3, s.v / 3, s.v}, random_cuts(s.v, 4), random_cuts(s.v, 7)}) {
        const hidden_answer first = in_shards(s, known, estimator, cuts, 0, e);
        CHECK(near_number(first.r.loss, want.loss, 1 + std::abs(want.loss)));
        CHECK(first.r.diagnostics.bad_rows == want.diagnostics.bad_rows);
        CHECK(distance(first.dx, one.dx) < 4e-6);
        CHECK(distance(first.dw, one.dw) < 4e-6);
        CHECK(distance(first.db, one.db) < 4e-6);
        for (const index_t rows : {1, 3}) { // logits made again in each round: no bit changes
            const hidden_answer again = in_shards(s, known, estimator, cuts, rows, e, rows == 3);
            CHECK(equal_bits(again.r.loss, first.r.loss));
            CHECK(again.said.rounds == first.said.rounds);
            CHECK(again.dx == first.dx);
            CHECK(again.dw == first.dw);
            CHECK(again.db == first.db);
        }
    }
}

} // namespace

TEST_CASE("hidden states: dx is the sum over shards, dw and db are the shard's") {
    for (const float cap : {0.0f, 3.0f}) {
        side s(7, 1500, 12, 1, cap);
        const side t(7, 1500, 20, 2, cap);
        const auto known = [&](index_t first, index_t count) { return t.teacher(first, count, plenty); };
        const auto tight = [&](index_t first, index_t count) {
            auto k = t.teacher(first, count, plenty);
            k.budget = budget_of_rows(k, 2);
            return k;
        };
        hidden_agrees(s, known, reverse_kl{});
        hidden_agrees(s, tight, jsd{}); // two rounds
        std::vector<std::uint8_t> mask{1, 0, 1, 1, 0, 1, 1};
        hidden_agrees(s, known, reverse_kl{}, {.reduction = reduce::sum, .mask = mask});
        s.x[2 * 12 + 3] = nan_f;
        hidden_agrees(s, known, jsd{});
    }
    side near_teacher(5, 600, 16, 3); // a value near 0, of which float asks again
    side t = near_teacher;
    for (float& x : t.x) x *= 1.0001f;
    for (auto* x : {&near_teacher, &t}) x->cap = 2;
    const auto known = [&](index_t first, index_t count) {
        auto k = t.teacher(first, count, plenty);
        k.temperature = 0.8f;
        return k;
    };
    CHECK(in_shards(near_teacher, known, reverse_kl{}, {0, 100, 600}, 1).said.rounds == 2);
}

TEST_CASE(
    "a head with an update: each rank has B's rows of its ids and all of A, whose gradient is the sum over shards") {
    const index_t n = 7, v = 900, d = 12, rank = 3;
    side s(n, v, d, 1);
    const side t(n, v, 20, 2);
    const floats b = normals(v * rank, 5), a = normals(rank * d, 6);
    floats db(b.size()), da(a.size());
    const auto student = [&](index_t first, index_t count, float* dx, float* of_b, float* of_a) {
        lora_head head{view(std::as_const(s.w).data() + first * d, count, d),
                       view(b.data() + first * rank, count, rank), view(a.data(), rank, d)};
        head.scale = 0.5f, head.db = view(of_b + first * rank, count, rank), head.da = view(of_a, rank, d);
        return student::hidden{view(std::as_const(s.x).data(), n, d), head, view(dx, n, d)};
    };
    cpu_backend be;
    const double want =
        evaluate(be, student(0, v, s.dx.data(), db.data(), da.data()), t.teacher(0, v, plenty), reverse_kl{}).loss;
    const std::vector<index_t> cuts{0, 250, 900};
    floats dx(s.dx.size()), sharded_b(b.size()), sum_a(a.size());
    std::vector<floats> own_x(2, floats(dx.size())), own_a(2, floats(a.size()));
    for (const index_t rows : {0, 2}) {
        std::vector<cpu_backend> backends(2);
        const auto make = [&](std::size_t i) {
            const index_t first = cuts[i], count = cuts[i + 1] - first;
            auto mine = student(first, count, own_x[i].data(), sharded_b.data(), own_a[i].data());
            if (rows > 0) mine.budget = budget_of_rows(mine, rows);
            return vocab_parallel(backends[i], {.first = first, .total = v}, mine, t.teacher(first, count, plenty),
                                  reverse_kl{});
        };
        std::vector<std::unique_ptr<decltype(make(0))>> calls;
        for (std::size_t i = 0; i < 2; ++i) calls.push_back(std::make_unique<decltype(make(0))>(make(i)));
        run_rounds(calls, false);
        for (auto& c : calls) CHECK(near_number(c->finish().loss, want, 1 + want));
        for (auto& c : calls) c->backward();
        for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = own_x[0][i] + own_x[1][i];
        for (std::size_t i = 0; i < sum_a.size(); ++i) sum_a[i] = own_a[0][i] + own_a[1][i];
        CHECK(distance(dx, s.dx) < 4e-6);
        CHECK(distance(sharded_b, db) < 4e-6);
        CHECK(distance(sum_a, da) < 4e-6);
    }
}

TEST_CASE("hidden students of supports and of drawn tokens") {
    const side s(6, 900, 16, 5);
    std::vector<std::int32_t> ids;
    floats log_q, log_mu;
    numbers u(6);
    for (index_t i = 0; i < 6 * 5; ++i) {
        ids.push_back(std::int32_t(i % 5 * 180 + u.below(180)));
        log_q.push_back(float(-2 - u.uniform())), log_mu.push_back(float(-2 - u.uniform()));
    }
    const auto m = [](const auto& x) { return view(x.data(), 6, 5); };
    hidden_agrees(
        s,
        [&](index_t, index_t) {
            return teacher::support{m(ids), m(log_q)};
        },
        tail_bucket{reverse_kl{}});
    hidden_agrees(
        s,
        [&](index_t, index_t) {
            return teacher::samples{m(ids), m(log_mu), m(log_q)};
        },
        mc{});
    env e;
    e.measure.entropy = true;
    hidden_agrees(
        s,
        [&](index_t, index_t) {
            return teacher::samples{m(ids), m(log_mu), m(log_q)};
        },
        mc{}, e);
}

TEST_CASE("hidden students of few ids: each rank makes the logits of its own alone") {
    for (const float cap : {0.0f, 3.0f}) {
        side s(7, 900, 12, 1);
        s.cap = cap;
        std::vector<std::int32_t> ids, one;
        floats log_q, log_one, log_mu;
        numbers u(3);
        for (index_t r = 0; r < s.n; ++r) {
            std::vector<std::int32_t> of_row;
            while (of_row.size() < 6) {
                const auto id = std::int32_t(u.below(s.v));
                if (std::find(of_row.begin(), of_row.end(), id) == of_row.end()) of_row.push_back(id);
            }
            std::sort(of_row.begin(), of_row.end());
            one.push_back(of_row[std::size_t(u.below(6))]), log_one.push_back(-2), log_mu.push_back(-1.5f);
            for (const auto id : of_row) ids.push_back(id), log_q.push_back(float(-1 - u.uniform()));
        }
        const std::vector<std::int64_t> offsets{0, 6, 12, 18, 24, 30, 36, 42};
        const auto support = [&](index_t, index_t) {
            return teacher::support{view(std::as_const(ids).data(), s.n, 6), view(std::as_const(log_q).data(), s.n, 6)};
        };
        const auto sets = [&](index_t, index_t) {
            return teacher::on_kept_sets{teacher::samples{view(std::as_const(one).data(), s.n, 1),
                                                          view(std::as_const(log_mu).data(), s.n, 1),
                                                          view(std::as_const(log_one).data(), s.n, 1)},
                                         view(std::as_const(ids).data(), s.n * 6), row_offsets<>(offsets)};
        };
        hidden_agrees(s, support, renormalised{jsd{}});
        hidden_agrees(s, sets, mc{reverse_kl{}});
        s.x[2 * 12 + 3] = nan_f;
        hidden_agrees(s, support, renormalised{reverse_kl{}}, {.reduction = reduce::sum});
    }
}

TEST_CASE("a row that is asked for again does not make its block's logits whole") {
    for (const std::size_t again : {1, 4}) {
        side s(6, 600, 16, 3), t(6, 600, 16, 4);
        t.w = s.w, t.bias = s.bias;
        for (std::size_t i = again * 16; i < (again + 1) * 16; ++i) t.x[i] = 1.0001f * s.x[i]; // a value near 0
        const auto known = [&](index_t first, index_t count) {
            auto k = t.teacher(first, count, plenty);
            k.temperature = 0.8f;
            return k;
        };
        const std::uint8_t early = again == 1; // row 4: no other block's logits come between
        const std::vector<std::uint8_t> mask{early, early, early, 1, 1, 1};
        const auto with = [&](index_t rows) {
            return in_shards(s, known, reverse_kl{}, {0, 250, 600}, rows, {.mask = mask});
        };
        const hidden_answer whole = with(0), blocks = with(3);
        CHECK(whole.said.rounds == 2);
        CHECK(blocks.said.rounds == 2);
        for (const std::size_t row : {3, 5}) CHECK(std::abs(whole.dx[row * 16]) > 1e-3f);
        CHECK(blocks.dx == whole.dx);
        CHECK(blocks.dw == whole.dw);
    }
}

TEST_CASE("gradients of hidden states are collected, each rank's of its own") {
    const side s(4, 300, 8, 1), t(4, 300, 8, 2);
    const auto known = [&](index_t first, index_t count) { return t.teacher(first, count, plenty); };
    const hidden_answer once = in_shards(s, known, reverse_kl{}, {0, 100, 300}, 0);
    const hidden_answer twice = in_shards(s, known, reverse_kl{}, {0, 100, 300}, 0, {.beta = 2});
    for (std::size_t i = 0; i < once.dx.size(); ++i) // each of two ranks had 3
        CHECK(twice.dx[i] == doctest::Approx(once.dx[i] + 2 * (3 + 3)).epsilon(1e-6));
    CHECK(twice.dw == once.dw);
}

TEST_CASE("the page's call") {
    const index_t n = 6, v = 100;
    const buffers<float> b({.rows = n, .vocab = v, .seed = 1});
    const float *z = b.z.data(), *y = b.y.data();
    floats gradient(b.z.size());
    const int ranks = 3;
    std::vector<std::vector<std::byte>> gathered(std::size_t(ranks), std::vector<std::byte>{});
    meeting barrier{std::size_t(ranks)};
    std::vector<double> losses(std::size_t(ranks), 0.0);
    /// What MPI_Allgather does, of ranks that are threads.
    const auto all_gather = [&](int rank, std::span<const std::byte> mine) {
        gathered[std::size_t(rank)].assign(mine.begin(), mine.end());
        barrier.arrive_and_wait();
        auto all = gathered;
        barrier.arrive_and_wait();
        return all;
    };
    const auto run = [&](int rank) {
        const index_t first = rank * v / ranks, count = (rank + 1) * v / ranks - first;
        const float *own_z = z + first, *own_y = y + first;
        float* own_dz = gradient.data() + first;
        cpu_backend backend;
        // clang-format off
        auto call = vocab_parallel(backend, {.first = first, .total = v}, // this rank has the ids [first, first + count)
                                   student::logits{view(own_z, n, count, v), view(own_dz, n, count, v)},
                                   teacher::dense{view(own_y, n, count, v)}, jsd{});
        while (call.local()) {                                            // sums over its own ids
            const auto all = all_gather(rank, call.partials());           // yours: MPI, NCCL, sockets, threads
            std::copy(all[0].begin(), all[0].end(), call.partials().begin());
            for (std::size_t r = 1; r < all.size(); ++r) merge_partials(call.partials(), all[r]);
        }
        const auto result = call.finish();                                // the same on every rank
        call.backward();                                                  // dz of its own ids
        // clang-format on
        losses[std::size_t(rank)] = result.loss;
    };
    std::vector<std::thread> team;
    for (int rank = 0; rank < ranks; ++rank) team.emplace_back(run, rank);
    for (std::thread& t : team) t.join();
    cpu_backend one;
    floats dz(gradient.size());
    const double loss =
        evaluate(one, student::logits{view(z, n, v), view(dz.data(), n, v)}, teacher::dense{view(y, n, v)}, jsd{}).loss;
    CHECK(losses[0] == doctest::Approx(loss).epsilon(1e-6));
    CHECK(losses[1] == losses[0]);
    CHECK(losses[2] == losses[0]);
    CHECK(distance(gradient, dz) < 2e-6);
}

TEST_CASE("an arena of the bytes that are asked for does, and a smaller one is refused") {
    buffers<float> b({.rows = 20, .vocab = 50, .seed = 1});
    cpu_backend be;
    const vocab_shard whole{.first = 0, .total = 50};
    const std::size_t bytes = vocab_parallel_bytes(be, whole, b.student(), b.teacher(), reverse_kl{});
    std::vector<std::byte> memory(bytes);
    auto call = vocab_parallel(be, whole, b.student(), b.teacher(), reverse_kl{}, {}, memory);
    while (call.local()) {}
    CHECK(call.finish().loss > 0);
    CHECK_THROWS_WITH_AS(
        vocab_parallel(be, whole, b.student(), b.teacher(), reverse_kl{}, {}, std::span(memory).first(bytes - 128)),
        doctest::Contains("workspace"), invalid_input);
    // the state of rows and their partials, but nothing of N·V
    buffers<float> wide({.rows = 20, .vocab = 5000, .seed = 1});
    CHECK(vocab_parallel_bytes(be, {.first = 0, .total = 5000}, wide.student(), wide.teacher(), reverse_kl{}) == bytes);
    CHECK(vocab_parallel_bytes(be, {.first = 0, .total = 5000}, wide.student(), wide.teacher(), jsd{}) <
          bytes + 2 * sizeof(float) * (5000 + 2048)); // p and c of one row, a worker
}

namespace {

/// Two ranks of reverse KL over 20 ids, when all rounds are done.
template <class Student>
auto two_ranks(const buffers<float>& b, std::vector<cpu_backend>& backends, const Student& of_ids, env e) {
    const auto make = [&](index_t first) {
        return vocab_parallel(backends[std::size_t(first / 10)], {.first = first, .total = 20}, of_ids(first),
                              teacher::dense{view(b.y.data() + first, 3, 10, 20)}, reverse_kl{}, e);
    };
    using call = decltype(make(0));
    std::vector<std::unique_ptr<call>> calls;
    for (const index_t first : {0, 10}) calls.push_back(std::make_unique<call>(make(first)));
    run_rounds(calls, false);
    return calls;
}

} // namespace

TEST_CASE("infinite rows raise on every rank before anything is written, bad ones when all is") {
    buffers<float> b({.rows = 3, .vocab = 20, .seed = 1});
    std::vector<cpu_backend> backends(2);
    const auto with_gradient = [&](index_t first) {
        return student::logits{view(std::as_const(b.z).data() + first, 3, 10, 20),
                               view(b.dz.data() + first, 3, 10, 20)};
    };
    const auto value_only = [&](index_t first) {
        return student::logits{view(std::as_const(b.z).data() + first, 3, 10, 20)};
    };
    b.y[20 + 13] = minus_inf; // on the second rank
    floats losses(3, 5.0f);
    env e;
    e.on_infinite = infinite::raise(), e.losses = losses;
    for (auto& rank : two_ranks(b, backends, with_gradient, e)) {
        try {
            rank->finish();
            CHECK(false);
        } catch (const infinite_value& x) {
            CHECK(x.row == 1);
        }
    }
    CHECK(losses == floats(3, 5.0f));
    CHECK(std::count(b.dz.begin(), b.dz.end(), 777.0f) == std::ptrdiff_t(b.dz.size()));

    b.y[20 + 13] = 0, b.z[20 + 2] = nan_f; // on the first
    e = {};
    e.on_bad = bad::raise();
    for (auto& rank : two_ranks(b, backends, value_only, e)) CHECK_THROWS_AS(rank->finish(), bad_contents);
    for (auto& rank : two_ranks(b, backends, with_gradient, e)) {
        CHECK(rank->finish().diagnostics.first_bad_row == 1);
        CHECK_THROWS_AS(rank->backward(), bad_contents);
    }
    CHECK(std::count(b.dz.begin(), b.dz.begin() + 60, 777.0f) == 0); // all is written
    CHECK(std::count(b.dz.begin() + 20, b.dz.begin() + 40, 0.0f) == 20);
}

TEST_CASE("what cannot be is refused by name, before anything is written") {
    buffers<float> b({.rows = 3, .vocab = 10, .seed = 1});
    cpu_backend be, other;
    const auto refused = [&](const char* argument, const char* why, auto&& f) {
        CAPTURE(why);
        try {
            f();
            CHECK(false);
        } catch (const invalid_input& e) {
            CHECK(e.argument == argument);
            CHECK(std::string(e.what()).find(why) != std::string::npos);
        }
    };
    const auto open = [&](vocab_shard shard, env e = {}) {
        return vocab_parallel(be, shard, b.student(), b.teacher(), reverse_kl{}, e);
    };
    refused("shard.first", "is -1", [&] { open({.first = -1, .total = 20}); });
    refused("shard.first", "is 11 for 10 ids of 20", [&] { open({.first = 11, .total = 20}); });
    refused("shard.total", "at least 1", [&] { open({}); });
    refused("env.level", "tiling_invariant", [&] { open({0, 10}, {.level = determinism::tiling_invariant}); });
    CHECK_THROWS_AS(open({0, 10}, {.checks = check::contents}), unsupported);
    refused("env.beta", "finite", [&] { open({0, 10}, {.beta = nan_f}); });
    refused("teacher.y", "has 9 ids of this shard, the student 10", [&] {
        vocab_parallel(be, {0, 10}, b.student(), teacher::dense{view(b.y.data(), 3, 9)}, reverse_kl{});
    });
    refused("student.dz", "overlaps student.z", [&] {
        auto s = b.student();
        s.dz = {b.z.data() + 1, 3, 10, 10};
        vocab_parallel(be, {0, 10}, s, b.teacher(), reverse_kl{});
    });
    const std::vector<std::int32_t> ids{1, 2, 3};
    const floats log_q{-1, -1, -1};
    refused("teacher.ids", "has 3 columns for a vocabulary of 2", [&] {
        vocab_parallel(be, {0, 2}, student::logits{view(b.z.data(), 1, 2)},
                       teacher::support{view(ids.data(), 1, 3), view(log_q.data(), 1, 3)}, tail_bucket{reverse_kl{}});
    });
    // ranks that do not make up the vocabulary, or have not added up
    const auto after_a_round = [&](vocab_shard mine, const vocab_shard* theirs) {
        auto call = open(mine);
        CHECK(call.local());
        if (theirs) {
            auto rest = vocab_parallel(other, *theirs, b.value_only(), b.teacher(), reverse_kl{});
            rest.local();
            merge_partials(call.partials(), rest.partials());
        }
        call.local();
    };
    refused("shard", "have 10 ids together", [&] { after_a_round({0, 20}, nullptr); });
    const vocab_shard twice{0, 20}, next{10, 20}, too_many{10, 30};
    refused("shard", "have 20 ids together: they are to hold each", [&] { after_a_round({0, 20}, &twice); });
    refused("shard", "have 20 ids", [&] { after_a_round({0, 30}, &too_many); });
    after_a_round({0, 20}, &next);
    // rounds that do not fit
    buffers<float> more({.rows = 4, .vocab = 10, .seed = 1});
    auto call = open({0, 10}), longer = vocab_parallel(other, {0, 10}, more.student(), more.teacher(), reverse_kl{});
    refused("finish", "after local()", [&] { call.finish(); });
    refused("backward", "after finish()", [&] { call.backward(); });
    call.local(), longer.local();
    refused("partials", "differ in length", [&] { merge_partials(call.partials(), longer.partials()); });
    refused("partials", "shorter than their head",
            [&] { merge_partials(call.partials().first(8), call.partials().first(8)); });
    std::vector<std::byte> odd(call.partials().begin(), call.partials().end());
    const auto change = [&](std::size_t at, auto value) { std::memcpy(odd.data() + at, &value, sizeof value); };
    change(0, std::uint64_t{2});
    refused("partials", "same round", [&] { merge_partials(call.partials(), odd); });
    change(0, std::uint64_t{1});
    change(8, std::uint64_t{1} << 60);
    refused("partials", "same round", [&] { merge_partials(odd, odd); });
    change(8, std::uint64_t{3});
    change(sizeof(detail::partials_head), std::int64_t{1});
    refused("partials", "other rows", [&] { merge_partials(call.partials(), odd); });
    const std::vector<std::byte> right(call.partials().begin(), call.partials().end());
    for (const std::size_t at : {std::size_t{0}, sizeof(detail::partials_head)}) { // another round, another row
        call.partials()[at] = std::byte{7};
        refused("partials", "not of the round that this rank is in", [&] { call.local(); });
        std::copy(right.begin(), right.end(), call.partials().begin());
    }
    CHECK(!call.local());
    refused("finish", "after local()", [&] { longer.finish(); });
    CHECK(std::count(b.dz.begin(), b.dz.end(), 777.0f) == std::ptrdiff_t(b.dz.size())); // nothing yet
    call.finish();
    refused("finish", "once", [&] { call.finish(); });
    refused("local", "after finish", [&] { call.local(); });
    call.backward();
    refused("backward", "once", [&] { call.backward(); });
    refused("local", "after finish", [&] { call.local(); });
}

TEST_CASE("vocabularies of different size: the common ids, of which a rank may have none") {
    buffers<float> b({.rows = 4, .vocab = 60, .seed = 2});
    const index_t common = 33;
    const env e{.vocab = vocabulary::drop_and_renormalise};
    buffers<float> split = b;
    cpu_backend one;
    const double want =
        evaluate(one, b.student(), teacher::dense{view(b.y.data(), 4, common, 60)}, reverse_kl{}, e).loss;
    const std::vector<index_t> cuts{0, 20, 40, 60};
    std::vector<cpu_backend> backends(3);
    const auto make = [&](std::size_t i) {
        const index_t first = cuts[i], count = 20, known = std::clamp<index_t>(common - first, 0, 20);
        auto s = split.student();
        s.z = {split.z.data() + first, 4, count, 60}, s.dz = {split.dz.data() + first, 4, count, 60};
        return vocab_parallel(backends[i], {.first = known > 0 ? first : common, .total = common}, s,
                              teacher::dense{view(std::as_const(split.y).data() + first, 4, known, 60)}, reverse_kl{},
                              e);
    };
    std::vector<std::unique_ptr<decltype(make(0))>> calls;
    for (std::size_t i = 0; i < 3; ++i) calls.push_back(std::make_unique<decltype(make(0))>(make(i)));
    run_rounds(calls, false);
    for (auto& c : calls) CHECK(c->finish().loss == doctest::Approx(want).epsilon(1e-6));
    for (auto& c : calls) c->backward();
    CHECK(distance(split.dz, b.dz) < 2e-6);
}

TEST_CASE("no rows, and none that is kept: no round, loss 0, the head's gradient is none") {
    side s(2, 40, 3, 1);
    const side t(2, 40, 3, 2);
    const std::vector<std::uint8_t> none{0, 0};
    const hidden_answer r = in_shards(s, [&](index_t first, index_t count) { return t.teacher(first, count, plenty); },
                                      reverse_kl{}, {0, 15, 40}, 0, {.mask = none});
    CHECK(r.said.rounds == 0);
    CHECK(r.r.loss == 0);
    for (const floats* g : {&r.dx, &r.dw, &r.db})
        CHECK(std::count(g->begin(), g->end(), 0.0f) == std::ptrdiff_t(g->size()));
    buffers<float> empty({.rows = 0, .vocab = 4, .seed = 1});
    cpu_backend be;
    auto call = vocab_parallel(be, {0, 4}, empty.student(), empty.teacher(), reverse_kl{});
    CHECK(!call.local());
    CHECK(call.finish().loss == 0);
    call.backward();
}
