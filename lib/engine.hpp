// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Engines: a backend of the chosen kernels and whose turn it is.
#pragma once

#include <array>
#include <memory>
#include <mutex>

#include "handles.hpp"
#include "kernels.hpp"
#include "opd/estimators/any.hpp"

struct opd_engine {
    std::mutex turn;
    const opd_kernels& kernels;
    void* backend = nullptr;
    explicit opd_engine(const opd_engine_options& o)
        : kernels(o.device_type == kDLCUDA ? opd_c::cuda_kernels() : opd_c::kernels()) {
        if (const int status = kernels.make(o, &backend); status != OPD_OK) throw opd_c::reported{status};
    }
    opd_engine(const opd_engine&) = delete;
    ~opd_engine() { kernels.unmake(backend); }
};

namespace opd_c {

/// What an estimator's struct may name, by the cache it reads.
enum class form { dense, renormalised, tail_bucket, generalised, truncated_biased, reweighted, mc, sampled_forward_kl };
inline constexpr auto estimators = std::to_array<opd::choice::name<form>>({
    {"dense", form::dense, "a divergence of dense logits"},
    {"renormalised", form::renormalised, "a divergence on a support, both sides renormalised there"},
    {"tail_bucket", form::tail_bucket, "a divergence over a support and one bucket for the rest (ghost token)"},
    {"generalised", form::generalised, "the Bregman terms of a divergence on a support, without the rest"},
    {"truncated_biased", form::truncated_biased, "the sum over a support as several trainers ship it: no divergence"},
    {"reweighted", form::reweighted, "reverse KL on a stale student's support, reweighted by p/mu: biased"},
    {"mc", form::mc, "a divergence from drawn tokens: objective, surrogate, baseline"},
    {"sampled_forward_kl", form::sampled_forward_kl, "forward KL from the teacher's own draws"},
});

/// body(kernels, backend) of an engine of the caller's, or, for NULL, of the calling thread's.
template <class Body>
auto with_engine(const char* name, opd_engine* engine, Body&& body) {
    if (engine == nullptr) {
        thread_local std::unique_ptr<opd_engine> own;
        if (!own) own = std::make_unique<opd_engine>(opd_engine_options{});
        return body(own->kernels, own->backend);
    }
    const auto held = handles<opd_engine>().of(name, engine);
    const std::lock_guard turn(held->turn);
    return body(held->kernels, held->backend);
}

} // namespace opd_c
