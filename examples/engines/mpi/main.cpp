// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-mpi [WAY STEP RANK]: one small distillation, twice, on as many ranks as mpirun starts. In that step of that way
// that rank kills itself: with Open MPI 5 under mpirun --with-ft ulfm the others do the step again.
//
//   vocabulary   every rank has the head's rows of some ids, and all tokens: the loss over the whole vocabulary
//                (opd/backends/vocab_parallel.hpp), and the gradient of its own rows
//   data         every rank has the whole head, and some tokens: the loss of its own, then sums over ranks
//
// The student is a linear head W (V,D) over states x (N,D), the teacher's logits are given, the loss is reverse KL,
// mean over tokens. Both print the same losses, whatever the ranks: test.sh compares them. `naive` is the first loss by
// its formula. opd-mpi-nccl is the same over NCCL.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/backends/vocab_parallel.hpp>
#include <opd/estimators/divergences.hpp>

#ifdef OPD_EXAMPLE_NCCL
#include "nccl_team.hpp"
using team_of_ranks = engine::nccl_team;
#else
#include "team.hpp"
using team_of_ranks = engine::team;
#endif

namespace {

using doubles = std::vector<double>;
constexpr long N = 24, D = 16, V = 1500, steps = 6;
constexpr double rate = 4.0;

struct share { // [first, first + count) of n, of one rank
    long first, count;
    share(long n, const team_of_ranks& t)
        : first(n * t.rank() / t.size()), count(n * (t.rank() + 1) / t.size() - first) {}
};

struct problem {
    doubles x, y, w;
    explicit problem(const team_of_ranks& team) : x(N * D), y(N * V), w(V * D) {
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

void say(const team_of_ranks& team, const char* what, long step, double loss) {
    if (team.rank() == 0) std::printf("%s %ld %.17g\n", what, step, loss);
}

/// Throws where a rank has other bits.
void agree(const team_of_ranks& team, std::span<const double> x, const char* what) {
    const std::span<const std::byte> mine = std::as_bytes(x);
    const std::vector<std::byte> all = team.all_gather(mine);
    for (std::size_t at = 0; at < all.size(); at += mine.size())
        if (!std::equal(mine.begin(), mine.end(), all.begin() + static_cast<std::ptrdiff_t>(at)))
            throw std::runtime_error(std::string("ranks disagree about the ") + what);
}

void naive(const team_of_ranks& team, const problem& p) {
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

struct death {
    std::string way;
    long step = -1, rank = -1;
    void at(const char* here, long now, const team_of_ranks& team) const {
        if (way == here && step == now && rank == team.rank() && team.lost() == 0) std::raise(SIGKILL);
    }
};

// Each step of a way from the weights before it: what a rank's death breaks off is done again by those that are left.
template <class Step>
void descended(team_of_ranks& team, const char* way, Step&& step) {
    for (long at = 0; at < steps;) {
        double loss = 0;
        doubles next;
        if (!team.together([&] { loss = step(at, next); })) continue;
        step.w = std::move(next);
        say(team, way, at++, loss);
    }
}

struct descent {
    const team_of_ranks& team;
    const death& dies;
    const problem& p;
    doubles w = p.w; // the head
    opd::cpu_backend be = {};
};

// A rank computes with its shard alone. That every one keeps all shards as they were before the step is for the dead
// one's; a large head's next rank does, or a checkpoint.
struct over_vocabulary : descent {
    double operator()(long step, doubles& next) {
        const share mine(V, team);
        const std::size_t ids = static_cast<std::size_t>(mine.count);
        const auto begin = static_cast<std::ptrdiff_t>(mine.first * D),
                   end = begin + static_cast<std::ptrdiff_t>(ids * D);
        doubles own(w.begin() + begin, w.begin() + end), dz(N * ids), z = logits(p.x, own);
        const double* y = p.y.data() + mine.first; // its columns of the teacher's rows
        auto call = opd::vocab_parallel(be, {.first = mine.first, .total = V},
                                        opd::student::logits{opd::view(z.data(), N, mine.count, mine.count),
                                                             opd::view(dz.data(), N, mine.count, mine.count)},
                                        opd::teacher::dense{opd::view(y, N, mine.count, V)}, opd::reverse_kl{});
        while (call.local()) {
            dies.at("vocabulary", step, team);
            const std::span<std::byte> partials = call.partials();
            const std::vector<std::byte> all = team.all_gather(partials);
            const std::span<const std::byte> every(all);
            std::copy_n(all.begin(), partials.size(), partials.begin());
            for (std::size_t at = partials.size(); at < all.size(); at += partials.size())
                opd::merge_partials(partials, every.subspan(at, partials.size()));
        }
        const double loss = call.finish().loss;
        agree(team, {&loss, 1}, "loss");
        call.backward();
        descend(own, head_gradient(dz, p.x, ids));
        next.assign(w.size(), 0.0);
        std::copy(own.begin(), own.end(), next.begin() + begin);
        team.sum(next); // of each shard one rank has other numbers than 0
        return loss;
    }
};

struct over_data : descent {
    double operator()(long step, doubles& next) {
        const share mine(N, team);
        const std::span<const double> x(p.x.data() + mine.first * D, static_cast<std::size_t>(mine.count * D));
        doubles z = logits(x, w), dz(z.size());
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
        dies.at("data", step, team);
        team.sum({&loss, 1});
        next = w;
        descend(next, dw);
        agree(team, next, "weights");
        return loss;
    }
};

} // namespace

int main(int argc, char** argv) {
    team_of_ranks team(argc, argv);
    try {
        death dies;
        if (argc == 4) dies = {argv[1], std::stol(argv[2]), std::stol(argv[3])};
        const problem p(team);
        naive(team, p);
        descended(team, "vocabulary", over_vocabulary{{team, dies, p}});
        descended(team, "data", over_data{{team, dies, p}});
        if (team.lost() > 0) { // MPI_Finalize of Open MPI 5.0.11 waits for the dead at times
            if (team.rank() == 0) std::printf("left %d\n", team.size());
            std::fflush(nullptr);
            std::_Exit(0);
        }
    } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", team.rank(), e.what());
        MPI_Abort(MPI_COMM_WORLD, 1); // the others wait in a collective
    }
}
