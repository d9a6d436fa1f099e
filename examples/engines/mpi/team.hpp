// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ranks of an MPI program, and the three collectives that a loss in shards and a learner over rows ask for. Results
// have the same bits on every rank: what is added up is added in the order of ranks, everywhere
// (MPI_Allreduce does not promise that).
//
// Errors: MPI's own handler ends the program. A stretch of 2 GiB or more throws std::length_error.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include <mpi.h>

namespace engine {

class team {
public:
    team(int& argc, char**& argv) {
        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
    }
    ~team() { MPI_Finalize(); }
    team(const team&) = delete;
    team& operator=(const team&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    /// Everybody's bytes, equally many, in the order of ranks. (size · mine.size())
    std::vector<std::byte> all_gather(std::span<const std::byte> mine) const {
        std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
        MPI_Allgather(mine.data(), count(mine.size()), MPI_BYTE, all.data(), count(mine.size()), MPI_BYTE,
                      MPI_COMM_WORLD);
        return all;
    }
    /// x becomes the sum over ranks. Memory: size · x.
    void sum(std::span<double> x) const {
        std::vector<double> all(x.size() * static_cast<std::size_t>(size_));
        MPI_Allgather(x.data(), count(x.size()), MPI_DOUBLE, all.data(), count(x.size()), MPI_DOUBLE, MPI_COMM_WORLD);
        for (std::size_t i = 0; i < x.size(); ++i) {
            x[i] = 0;
            for (std::size_t r = i; r < all.size(); r += x.size()) x[i] += all[r];
        }
    }
    /// Everybody has what `root` has.
    void broadcast(std::span<double> x, int root) const {
        MPI_Bcast(x.data(), count(x.size()), MPI_DOUBLE, root, MPI_COMM_WORLD);
    }

private:
    static int count(std::size_t n) {
        if (n > std::numeric_limits<int>::max()) throw std::length_error("opd: a stretch is too long for one MPI call");
        return static_cast<int>(n);
    }
    int rank_ = 0, size_ = 1;
};

} // namespace engine
