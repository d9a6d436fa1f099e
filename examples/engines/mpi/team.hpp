// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ranks of an MPI program, and the three collectives that a loss in shards and a learner over rows ask for. Results
// have the same bits on every rank: what is added up is added in the order of ranks, everywhere
// (MPI_Allreduce does not promise that).
//
// Errors: MPI's own handler ends the program. A stretch of 2 GiB or more throws std::length_error. With Open MPI 5
// under mpirun --with-ft ulfm a rank may die: its team's collectives throw rank_died, and together() goes on without
// it. Source: Bland et al. 2013, "Post-failure recovery of MPI communication capability" (ULFM).
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

namespace engine {

struct rank_died : std::runtime_error {
    rank_died() : std::runtime_error("a rank has died") {}
};

/// x[i] = sum of parts[r·x.size() + i] over r, from r = 0 on.
inline void add_in_order(std::span<const double> parts, std::span<double> x) {
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = 0;
        for (std::size_t r = i; r < parts.size(); r += x.size()) x[i] += parts[r];
    }
}

class team {
public:
    team(int& argc, char**& argv) {
        MPI_Init(&argc, &argv);
        MPI_Comm_dup(MPI_COMM_WORLD, &ranks_);
        begin();
    }
    ~team() { MPI_Finalize(); }
    team(const team&) = delete;
    team& operator=(const team&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    /// Ranks that died.
    int lost() const { return lost_; }

    /// Runs f, and says whether it came to its end on every rank: then what it computed counts. Else a rank has died,
    /// those that are left are the team from here on, on each of them the answer is false, and f is to be done again.
    template <class F>
    bool together(F&& f) {
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
        int all = 1;
        try {
            f();
        } catch (const rank_died&) {
            MPIX_Comm_revoke(ranks_); // whoever still waits for the dead one
            all = 0;
        }
        const int died = MPIX_Comm_agree(ranks_, &all); // the same answer everywhere
        if (died == MPI_SUCCESS && all) return true;
        MPI_Comm left;
        MPIX_Comm_shrink(ranks_, &left);
        MPI_Comm_free(&ranks_);
        ranks_ = left;
        const int before = size_;
        begin();
        lost_ += before - size_;
        return false;
#else
        f();
        return true;
#endif
    }

    /// Everybody's bytes, equally many, in the order of ranks. (size · mine.size())
    std::vector<std::byte> all_gather(std::span<const std::byte> mine) const {
        std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
        done(
            MPI_Allgather(mine.data(), count(mine.size()), MPI_BYTE, all.data(), count(mine.size()), MPI_BYTE, ranks_));
        return all;
    }
    /// x becomes the sum over ranks. Memory: size · x.
    void sum(std::span<double> x) const {
        std::vector<double> all(x.size() * static_cast<std::size_t>(size_));
        done(MPI_Allgather(x.data(), count(x.size()), MPI_DOUBLE, all.data(), count(x.size()), MPI_DOUBLE, ranks_));
        add_in_order(all, x);
    }
    /// Everybody has what `root` has.
    void broadcast(std::span<double> x, int root) const {
        done(MPI_Bcast(x.data(), count(x.size()), MPI_DOUBLE, root, ranks_));
    }

private:
    void begin() {
        MPI_Comm_rank(ranks_, &rank_);
        MPI_Comm_size(ranks_, &size_);
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN);
#endif
    }
    static void done(int error) {
        if (error == MPI_SUCCESS) return;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
        int kind = 0;
        MPI_Error_class(error, &kind);
        if (kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_REVOKED) throw rank_died();
#endif
        char text[MPI_MAX_ERROR_STRING];
        int length = 0;
        MPI_Error_string(error, text, &length);
        throw std::runtime_error(std::string(text, static_cast<std::size_t>(length)));
    }
    static int count(std::size_t n) {
        if (n > std::numeric_limits<int>::max()) throw std::length_error("opd: a stretch is too long for one MPI call");
        return static_cast<int>(n);
    }
    MPI_Comm ranks_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 1, lost_ = 0;
};

} // namespace engine
