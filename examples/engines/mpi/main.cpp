// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-mpi: one small distillation, twice, on as many ranks as mpirun starts.
//
//   vocabulary   every rank has the head's rows of some ids, and all tokens: the loss over the whole vocabulary
//                (opd/backends/vocab_parallel.hpp), and the gradient of its own rows
//   data         every rank has the whole head, and some tokens: the loss of its own, then sums over ranks
//
// The student is a linear head W (V,D) over states x (N,D), the teacher's logits are given, the loss is reverse KL,
// mean over tokens. Both print the same losses, whatever the ranks: test.sh compares them. `naive` is the first loss by
// its formula.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/backends/vocab_parallel.hpp>
#include <opd/estimators/divergences.hpp>

#include "team.hpp"

namespace {

using doubles = std::vector<double>;
constexpr long N = 24, D = 16, V = 1500, steps = 6;
constexpr double rate = 4.0;

struct share { // [first, first + count) of n, of one rank
    long first, count;
    share(long n, const engine::team& t)
        : first(n * t.rank() / t.size()), count(n * (t.rank() + 1) / t.size() - first) {}
};

struct problem {
    doubles x, y, w;
    explicit problem(const engine::team& team) : x(N * D), y(N * V), w(V * D) {
        std::uint64_t state = 17;
        const auto draw = [&] { // in [-1, 1)
            state = state * 6364136223846793005u + 1442695040888963407u;
            return static_cast<double>(state >> 11) * 0x1p-52 - 1;
        };
        for (doubles* each : {&x, &y, &w})
            for (double& e : *each) e = 3 * draw();
        for (doubles* each : {&x, &y, &w}) team.broadcast(*each, 0); // all begin alike, whatever made it
    }
};

/// z = x wᵀ of some rows and some ids. (rows, ids)
doubles logits(std::span<const double> x, std::span<const double> w) {
    const std::size_t rows = x.size() / D, ids = w.size() / D;
    doubles z(rows * ids);
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t v = 0; v < ids; ++v)
            for (std::size_t d = 0; d < D; ++d) z[r * ids + v] += x[r * D + d] * w[v * D + d];
    return z;
}

/// dw = dzᵀ x. (ids, D)
doubles head_gradient(std::span<const double> dz, std::span<const double> x, std::size_t ids) {
    doubles dw(ids * D);
    for (std::size_t r = 0; r < x.size() / D; ++r)
        for (std::size_t v = 0; v < ids; ++v)
            for (std::size_t d = 0; d < D; ++d) dw[v * D + d] += dz[r * ids + v] * x[r * D + d];
    return dw;
}

void descend(doubles& w, const doubles& dw) {
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= rate * dw[i];
}

void say(const engine::team& team, const char* what, long step, double loss) {
    if (team.rank() == 0) std::printf("%s %ld %.17g\n", what, step, loss);
}

/// Throws where a rank has other bits.
void agree(const engine::team& team, std::span<const double> x, const char* what) {
    const std::span<const std::byte> mine = std::as_bytes(x);
    const std::vector<std::byte> all = team.all_gather(mine);
    for (std::size_t at = 0; at < all.size(); at += mine.size())
        if (!std::equal(mine.begin(), mine.end(), all.begin() + static_cast<std::ptrdiff_t>(at)))
            throw std::runtime_error(std::string("ranks disagree about the ") + what);
}

void naive(const engine::team& team, const problem& p) {
    const doubles z = logits(p.x, p.w);
    const auto lse = [](const double* a) {
        long double sum = 0;
        const double top = *std::max_element(a, a + V);
        for (long v = 0; v < V; ++v) sum += std::exp(static_cast<long double>(a[v]) - top);
        return top + std::log(sum);
    };
    long double loss = 0;
    for (long r = 0; r < N; ++r) {
        const double *a = &z[static_cast<std::size_t>(r * V)], *b = &p.y[static_cast<std::size_t>(r * V)];
        const long double la = lse(a), lb = lse(b);
        for (long v = 0; v < V; ++v) loss += std::exp(a[v] - la) * (a[v] - la - (b[v] - lb));
    }
    say(team, "naive", 0, static_cast<double>(loss / N));
}

void over_vocabulary(const engine::team& team, problem p) {
    opd::cpu_backend be;
    const share mine(V, team);
    const std::size_t ids = static_cast<std::size_t>(mine.count);
    doubles w(p.w.begin() + mine.first * D, p.w.begin() + (mine.first + mine.count) * D), dz(N * ids);
    const double* y = p.y.data() + mine.first; // its columns of the teacher's rows
    for (long step = 0; step < steps; ++step) {
        doubles z = logits(p.x, w);
        auto call = opd::vocab_parallel(be, {.first = mine.first, .total = V},
                                        opd::student::logits{opd::view(z.data(), N, mine.count, mine.count),
                                                             opd::view(dz.data(), N, mine.count, mine.count)},
                                        opd::teacher::dense{opd::view(y, N, mine.count, V)}, opd::reverse_kl{});
        while (call.local()) {
            const std::span<std::byte> partials = call.partials();
            const std::vector<std::byte> all = team.all_gather(partials);
            const std::span<const std::byte> every(all);
            std::copy_n(all.begin(), partials.size(), partials.begin());
            for (std::size_t at = partials.size(); at < all.size(); at += partials.size())
                opd::merge_partials(partials, every.subspan(at, partials.size()));
        }
        const double loss = call.finish().loss;
        agree(team, {&loss, 1}, "loss");
        say(team, "vocabulary", step, loss);
        call.backward();
        descend(w, head_gradient(dz, p.x, ids));
    }
}

void over_data(const engine::team& team, problem p) {
    opd::cpu_backend be;
    const share mine(N, team);
    const std::span<const double> x(p.x.data() + mine.first * D, static_cast<std::size_t>(mine.count * D));
    for (long step = 0; step < steps; ++step) {
        doubles z = logits(x, p.w), dz(z.size());
        double loss = 0;
        if (mine.count > 0)
            loss =
                opd::evaluate(
                    be, opd::student::logits{opd::view(z.data(), mine.count, V), opd::view(dz.data(), mine.count, V)},
                    opd::teacher::dense{opd::view(p.y.data() + mine.first * V, mine.count, V)}, opd::reverse_kl{},
                    opd::env{.normaliser = double(N)}) // of all ranks: parts add up to the mean
                    .loss;
        doubles dw = head_gradient(dz, x, V);
        team.sum(dw);
        team.sum({&loss, 1});
        say(team, "data", step, loss);
        descend(p.w, dw);
        agree(team, p.w, "weights");
    }
}

} // namespace

int main(int argc, char** argv) {
    engine::team team(argc, argv);
    try {
        const problem p(team);
        naive(team, p);
        over_vocabulary(team, p);
        over_data(team, p);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", team.rank(), e.what());
        MPI_Abort(MPI_COMM_WORLD, 1); // the others wait in a collective
    }
}
