// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CUDA graphs for opd/spec/captured_graphs.hpp: launches on one stream, captured. Needs CUDA's headers but no nvcc. All
// of the CUDA backend's calls but `fetch` may be captured; so may draws, with their arena, and cuBLAS calls whose
// handle has a workspace (cublasSetWorkspace).
//
//   spec::captured_graphs graphs(spec::graph_pool(plan, bytes_of), cuda_graph_api{stream});
//
// Errors: cuda_error, with the call that failed. Capture is thread-local: what other threads do to the device meanwhile
// is their own.
#pragma once

#include <cuda_runtime_api.h>

#include "opd/backends/cuda.hpp"

namespace opd {

/// The Api of spec::captured_graphs on one CUDA stream. `end` returns an executable graph, which `destroy` frees.
class cuda_graph_api {
public:
    explicit cuda_graph_api(cudaStream_t stream) : stream_(stream) {}

    void begin() {
        detail::cuda_check("cudaStreamBeginCapture", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    }
    cudaGraphExec_t end() {
        cudaGraph_t graph = nullptr;
        detail::cuda_check("cudaStreamEndCapture", cudaStreamEndCapture(stream_, &graph));
        cudaGraphExec_t ready = nullptr;
        const cudaError_t e = cudaGraphInstantiate(&ready, graph, 0);
        cudaGraphDestroy(graph);
        detail::cuda_check("cudaGraphInstantiate", e);
        return ready;
    }
    void abandon() noexcept {
        cudaGraph_t graph = nullptr;
        if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
        (void)cudaGetLastError(); // of a capture that an error had ended
    }
    void launch(cudaGraphExec_t ready) { detail::cuda_check("cudaGraphLaunch", cudaGraphLaunch(ready, stream_)); }
    void destroy(cudaGraphExec_t ready) noexcept { cudaGraphExecDestroy(ready); }

private:
    cudaStream_t stream_;
};

} // namespace opd
