// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The rows of docs/support-matrix.md that say `yes` for the CUDA backend, on a device: each runs and gives the loss of the same
// kernels run on the host. That every such row has a case here is checked without a device; the rest prints SKIPPED.
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>
#include <functional>
#include <map>
#include <string>

#include "backends/cuda_device.cuh"
#include "backends/host_run.hpp"
#include "conformance/support_matrix.hpp"
#include "opd/backends/cuda.cuh"

namespace {

using namespace opd;
using namespace opd::test;
using namespace opd::test::matrix;

struct losses {
    double device, host;
    bool gradient;
};
std::map<key, std::function<losses()>> cases;

template <class Z, class G, class L, class Estimator>
void add(const char* name, Estimator estimator) {
    const key k = key_of(name, "dense", "dense", "cuda", name_of<Z>, name_of<G>, name_of<L>);
    cases[k] = [estimator]() -> losses {
        losses out{};
        batch<Z, G, L> b;
        host_run_backend host;
        out.host = evaluate(host, b.template student<false>(), b.template teacher<cache_kind::dense>(), estimator).loss;
        device_memory memory;
        G* dz = memory.put(b.dz);
        const student::logits student{device_view(memory.put(b.z), rows, vocab), device_view(dz, rows, vocab)};
        const teacher::dense teacher{device_view(memory.put(b.y), rows, vocab)};
        for (G& g : b.dz) g = element<G>::store(0);
        out.device = memory.finish(evaluate(memory.backend, student, teacher, estimator)).loss;
        memory.get(b.dz, dz);
        out.gradient = b.has_gradient();
        return out;
    };
}

void instantiate() {
    add<float, float, float>("reverse_kl", reverse_kl{});
    add<float, float, float>("forward_kl", forward_kl{});
    add<float, float, float>("jsd", jsd{});
    add<float, float, float>("skew_forward_kl", skew_forward_kl{});
    add<float, float, float>("skew_reverse_kl", skew_reverse_kl{});
    add<float, float, float>("total_variation", total_variation{});
    add<float, float, float>("alpha_divergence", alpha_divergence{});
    add<float, float, float>("chi_squared", chi_squared{});
    add<bfloat16, bfloat16, bfloat16>("reverse_kl", reverse_kl{});
    add<opd::half, opd::half, opd::half>("reverse_kl", reverse_kl{});
    add<double, double, double>("reverse_kl", reverse_kl{});
    add<bfloat16, bfloat16, bfloat16>("jsd", jsd{});
    add<opd::half, opd::half, opd::half>("jsd", jsd{});
    add<double, double, double>("jsd", jsd{});
}

TEST_CASE("what the page promises for CUDA") {
    instantiate();
    int promised = 0;
    for (const cells& row : table("Estimators, caches, backends, element types")) {
        if (row.at("backend") != "cuda" || row.at("status") != "yes") continue;
        ++promised;
        const bool known = cases.count(key_of(row.at("estimator"), row.at("cache"), row.at("gradient"), "cuda",
                                              row.at("z"), row.at("dz"), row.at("teacher"))) > 0;
        CHECK_MESSAGE(known, "no case for ", described(row));
    }
    CHECK(promised > 0);
    if (!device_present()) return;
    for (const auto& [k, run] : cases) {
        CAPTURE(k);
        const losses r = run();
        CHECK(r.gradient);
        CHECK(r.device == doctest::Approx(r.host).epsilon(1e-6));
    }
}

} // namespace
