// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three collectives of team.hpp over NCCL, one GPU a rank; MPI starts the ranks and carries NCCL's id. What comes
// and goes is the host's, by way of the device: hand ncclAllGather pointers of your own where the numbers are there
// already. Sums are in the order of ranks here too. It has been compiled, and has not run on a device yet.
//
// Errors: std::runtime_error with the reason of CUDA or NCCL. A rank that dies ends the others (ncclCommAbort is not
// here).
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "team.hpp"

namespace engine {

class nccl_team {
public:
    nccl_team(int& argc, char**& argv) : ranks_(argc, argv) {
        int devices = 0;
        need(cudaGetDeviceCount(&devices));
        need(cudaSetDevice(ranks_.rank() % devices));
        ncclUniqueId id;
        if (rank() == 0) need(ncclGetUniqueId(&id));
        const std::vector<std::byte> all = ranks_.all_gather(std::as_bytes(std::span(&id, 1)));
        std::copy_n(all.begin(), sizeof id, std::as_writable_bytes(std::span(&id, 1)).begin());
        need(ncclCommInitRank(&peers_, size(), id, rank()));
    }
    ~nccl_team() {
        ncclCommDestroy(peers_);
        for (void* p : {mine_.at, all_.at}) cudaFree(p);
    }
    nccl_team(const nccl_team&) = delete;
    nccl_team& operator=(const nccl_team&) = delete;

    int rank() const { return ranks_.rank(); }
    int size() const { return ranks_.size(); }
    int lost() const { return 0; }
    template <class F>
    bool together(F&& f) {
        f();
        return true;
    }

    std::vector<std::byte> all_gather(std::span<const std::byte> mine) const {
        std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size()));
        mine_.grow(mine.size()), all_.grow(all.size());
        need(cudaMemcpyAsync(mine_.at, mine.data(), mine.size(), cudaMemcpyHostToDevice));
        need(ncclAllGather(mine_.at, all_.at, mine.size(), ncclInt8, peers_, nullptr));
        need(cudaMemcpyAsync(all.data(), all_.at, all.size(), cudaMemcpyDeviceToHost));
        need(cudaStreamSynchronize(nullptr));
        return all;
    }
    void sum(std::span<double> x) const {
        const std::vector<std::byte> all = all_gather(std::as_bytes(x));
        std::vector<double> parts(x.size() * static_cast<std::size_t>(size()));
        std::copy(all.begin(), all.end(), std::as_writable_bytes(std::span(parts)).begin());
        add_in_order(parts, x);
    }
    void broadcast(std::span<double> x, int root) const {
        mine_.grow(x.size_bytes());
        need(cudaMemcpyAsync(mine_.at, x.data(), x.size_bytes(), cudaMemcpyHostToDevice));
        need(ncclBroadcast(mine_.at, mine_.at, x.size(), ncclDouble, root, peers_, nullptr));
        need(cudaMemcpyAsync(x.data(), mine_.at, x.size_bytes(), cudaMemcpyDeviceToHost));
        need(cudaStreamSynchronize(nullptr));
    }

private:
    struct on_device {
        void* at = nullptr;
        std::size_t size = 0;
        void grow(std::size_t n) {
            if (n <= size) return;
            need(cudaFree(at));
            need(cudaMalloc(&at, n));
            size = n;
        }
    };
    static void need(cudaError_t e) {
        if (e != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(e));
    }
    static void need(ncclResult_t e) {
        if (e != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(e));
    }
    team ranks_;
    ncclComm_t peers_ = nullptr;
    mutable on_device mine_, all_;
};

} // namespace engine
