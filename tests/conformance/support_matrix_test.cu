// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-all
//
// The rows of docs/support-matrix.md that say `yes` for the CUDA backend, on a device: each runs and gives the loss of
// the same kernels run on the host. That every such row has a case here is checked without a device; the rest prints
// SKIPPED.
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

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

/// The batch's cache in device memory.
template <cache_kind Kind, class Batch>
auto teacher_on(device_memory& memory, Batch& b) {
    const auto at = [&](auto& v, index_t cols) { return device_view(memory.put(v), rows, cols); };
    if constexpr (Kind == cache_kind::dense)
        return teacher::dense{at(b.y, vocab)};
    else if constexpr (Kind == lumped_dense)
        return teacher::lumped{teacher::dense{device_view(memory.put(b.y), rows, vocab - 1, vocab)}};
    else if constexpr (Kind == cache_kind::support) {
        teacher::support t{at(b.ids, kept), at(b.log_q, kept)};
        t.log_mu = at(b.log_mu, kept), t.chosen_by = teacher::chosen_by::stale_student;
        return t;
    } else if constexpr (Kind == ragged_support) {
        const auto line = [&](auto& v) { return device_view(memory.put(v), index_t(v.size())); };
        std::vector<std::int32_t> offsets(ragged_offsets, ragged_offsets + rows + 1);
        teacher::ragged_support t{line(b.ids), line(b.log_q), row_offsets<space::device>(line(offsets))};
        t.log_mu = line(b.log_mu), t.chosen_by = teacher::chosen_by::stale_student, t.widest = kept;
        return t;
    } else if constexpr (Kind == cache_kind::samples)
        return teacher::samples{at(b.ids, kept), at(b.log_mu, kept), at(b.log_q, kept)};
    else
        return teacher::weighted{at(b.ids, kept), at(b.weight, kept), at(b.log_mu, kept), at(b.log_q, kept),
                                 at(b.exact, kept)};
}
template <bool Sparse, cache_kind Kind, class Z, class G>
auto student_on(Z* z, G* dz) {
    if constexpr (Sparse && Kind == ragged_support)
        return student::on_support{device_view(z, rows, vocab), device_view(dz, 1, rows * kept)};
    else if constexpr (Sparse)
        return student::on_support{device_view(z, rows, vocab), device_view(dz, rows, kept)};
    else
        return student::logits{device_view(z, rows, vocab), device_view(dz, rows, vocab)};
}

template <class T, cache_kind Kind = cache_kind::dense, bool Sparse = false, class Estimator>
void add(const char* name, Estimator estimator) {
    const key k =
        key_of(name, name_of_kind(Kind), Sparse ? "sparse" : "dense", "cuda", name_of<T>, name_of<T>, name_of<T>);
    cases[k] = [estimator]() -> losses {
        losses out{};
        batch<T, T, T> b;
        host_run_backend host;
        out.host = evaluate(host, b.template student<Sparse, Kind>(), b.template teacher<Kind>(), estimator).loss;
        for (T& g : b.dz) g = element<T>::store(0);
        device_memory memory;
        T* dz = memory.put(b.dz);
        out.device = memory
                         .finish(evaluate(memory.backend, student_on<Sparse, Kind>(memory.put(b.z), dz),
                                          teacher_on<Kind>(memory, b), estimator))
                         .loss;
        memory.get(b.dz, dz);
        out.gradient = b.has_gradient();
        return out;
    };
}
/// Tokens with kept sets.
template <class T, cache_kind Kind>
void add_on_sets() {
    cases[key_of("mc{reverse_kl}", on_sets(Kind), "dense", "cuda", name_of<T>, name_of<T>, name_of<T>)] =
        []() -> losses {
        losses out{};
        batch<T, T, T> b;
        kept_sets sets(b.ids);
        host_run_backend host;
        out.host = evaluate(host, b.template student<false, Kind>(),
                            teacher::on_kept_sets{b.template teacher<Kind>(),
                                                  view(std::as_const(sets.ids).data(), index_t(sets.ids.size())),
                                                  row_offsets<>(sets.offsets)},
                            mc{reverse_kl{}})
                       .loss;
        for (T& g : b.dz) g = element<T>::store(0);
        device_memory memory;
        T* dz = memory.put(b.dz);
        const auto offsets = device_view(static_cast<const std::int64_t*>(memory.put(sets.offsets)), rows + 1);
        teacher::on_kept_sets cache{
            teacher_on<Kind>(memory, b),
            device_view(static_cast<const std::int32_t*>(memory.put(sets.ids)), index_t(sets.ids.size())),
            row_offsets<space::device>(offsets)};
        cache.widest = vocab;
        out.device =
            memory
                .finish(evaluate(memory.backend, student_on<false, Kind>(memory.put(b.z), dz), cache, mc{reverse_kl{}}))
                .loss;
        memory.get(b.dz, dz);
        out.gradient = b.has_gradient();
        return out;
    };
}
template <class T>
void add_sparse() {
    add_on_sets<T, cache_kind::samples>();
    add_on_sets<T, cache_kind::weighted>();
    add<T, cache_kind::support, false>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<T, cache_kind::support, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<T, cache_kind::support, false>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add<T, cache_kind::samples, false>("mc{reverse_kl}", mc{reverse_kl{}});
    add<T, cache_kind::weighted, false>("mc{reverse_kl}", mc{reverse_kl{}});
}

void instantiate() {
    add<float>("reverse_kl", reverse_kl{});
    add<float>("forward_kl", forward_kl{});
    add<float>("jsd", jsd{});
    add<float>("skew_forward_kl", skew_forward_kl{});
    add<float>("skew_reverse_kl", skew_reverse_kl{});
    add<float>("total_variation", total_variation{});
    add<float>("alpha_divergence", alpha_divergence{});
    add<float>("chi_squared", chi_squared{});
    add<float>("acceptance", acceptance{});
    add<bfloat16>("reverse_kl", reverse_kl{});
    add<opd::half>("reverse_kl", reverse_kl{});
    add<double>("reverse_kl", reverse_kl{});
    add<float, cache_kind::support>("generalised{reverse_kl}", generalised{reverse_kl{}});
    add<float, cache_kind::support>("truncated_biased{reverse_kl}", truncated_biased{reverse_kl{}});
    add<float, cache_kind::support>("reweighted", reweighted{});
    add<float, lumped_dense>("reverse_kl", reverse_kl{});
    add<float, lumped_dense>("jsd", jsd{});
    add<float>("eopd", eopd(1));
    add<float, lumped_dense>("eopd", eopd(1));
    add<float>("tip{reverse_kl}", selected{reverse_kl{}, selector::tip{1, 0.1}});
    add<float, cache_kind::samples>("band{mc}", selected{mc{}, selector::band{1}});
    add<float, cache_kind::weighted>("band{mc}", selected{mc{}, selector::band{1}});
    add<float, ragged_support>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<float, ragged_support, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<float, ragged_support>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add<float, ragged_support>("generalised{reverse_kl}", generalised{reverse_kl{}});
    add<float, ragged_support>("truncated_biased{reverse_kl}", truncated_biased{reverse_kl{}});
    add<float, ragged_support>("reweighted", reweighted{});
    add<float, cache_kind::samples>("sampled_forward_kl", sampled_forward_kl{});
    add<float, cache_kind::samples>("any_sampled", any_sampled{});
    add<float, cache_kind::weighted>("any_sampled", any_sampled{});
    add_sparse<float>();
    add_sparse<double>();
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
