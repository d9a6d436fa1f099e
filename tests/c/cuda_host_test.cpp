// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of libopd_cuda, compiled for the processor and run one thread after the other (lib/kernels/place.hpp), on
// tensors that say that they lie on a device: beside what opd_evaluate makes of the same numbers on the CPU. And what a
// device's call refuses.
// optimise: no
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <opd/c/opd.h>
#include <opd/element.hpp>
#include <opd/view.hpp>

#include "backends/host_run.hpp"
#include "c/tensors.hpp"
#include "kernels.hpp"
#include "support/generators.hpp"

namespace {
struct {
    std::string text, argument;
    int code = OPD_OK;
} last;
} // namespace
void opd_c_set_error(int code, const char* text, const char* argument, std::int64_t) noexcept {
    last = {text, argument, code};
}
namespace opd_c::kernel {
int evaluate(void* backend, const opd_student& student, const opd_teacher& teacher, const opd_estimator& estimator,
             const opd_env& env, opd_result* result, std::uint64_t* workspace);
}

namespace {

using namespace opd;
using namespace opd::test;

/// One call's structs and memory; `device` is what its tensors say.
struct problem_call {
    DLDeviceType device;
    std::vector<std::unique_ptr<tensor>> tensors = {};
    opd_student student = {};
    opd_teacher teacher = {};
    opd_estimator estimator = {};
    opd_env env = {};
    opd_result result = {};
    std::vector<unsigned char> dz = {};
    std::vector<float> losses = {};
    std::vector<double> lse = {};
    std::vector<std::int64_t> totals = std::vector<std::int64_t>(OPD_TOTALS, -7);

    explicit problem_call(DLDeviceType where) : device(where) {
        student.struct_size = sizeof student, teacher.struct_size = sizeof teacher;
        estimator.struct_size = sizeof estimator, env.struct_size = sizeof env, result.struct_size = sizeof result;
    }
    template <class T>
    const DLTensor* of(std::vector<T>& numbers, std::vector<std::int64_t> shape) {
        tensors.push_back(std::make_unique<tensor>(numbers.data(), std::move(shape)));
        tensors.back()->device = {device, 0};
        return tensors.back().get();
    }
    int run(bool wants_result = true) {
        if (device == kDLCPU) {
            const opd_call call{sizeof(opd_call), nullptr, &student, &teacher, &estimator, &env};
            return opd_evaluate(&call, &result);
        }
        host_run_backend be{64};
        last = {};
        return opd_c::kernel::evaluate(&be, student, teacher, estimator, env, wants_result ? &result : nullptr,
                                       nullptr);
    }
};

/// Numbers of a batch, from a seed.
template <class Z>
struct batch {
    index_t n, v, k;
    std::vector<Z> z, y, sparse;
    std::vector<float> log_q, log_mu, log_tail, weight, log_prox;
    std::vector<std::int64_t> ids, begins, kept, kept_begins;
    std::vector<std::uint8_t> mask, exact;

    batch(std::uint64_t seed, index_t n_, index_t v_, index_t k_) : n(n_), v(v_), k(k_) {
        numbers u(seed);
        const auto fill = [&](auto& to, index_t size, auto&& make) {
            for (index_t i = 0; i < size; ++i)
                to.push_back(static_cast<typename std::remove_reference_t<decltype(to)>::value_type>(make()));
        };
        const auto normal = [&] { return static_cast<float>(2 * u.normal()); };
        fill(z, n * v, normal), fill(y, n * v, normal), fill(sparse, n * k, [] { return 0.F; });
        const auto log_of_some = [&] { return static_cast<float>(-.05 - std::abs(u.normal())); };
        fill(log_q, n * k, log_of_some), fill(log_mu, n * k, log_of_some), fill(log_prox, n * k, log_of_some);
        fill(log_tail, n, [] { return -3.F; });
        fill(weight, n * k, [&] { return static_cast<float>(.1 + std::abs(u.normal())); });
        fill(exact, n * k, [&] { return u.below(2); }), fill(mask, n, [&] { return u.below(8) > 0; });
        for (index_t r = 0; r <= n; ++r)
            begins.push_back(r * k), kept_begins.push_back(r * std::min<index_t>(v, 2 * k));
        for (index_t r = 0; r < n; ++r) {
            const index_t first = u.below(v - k + 1); // distinct, ascending
            for (index_t j = 0; j < k; ++j)
                ids.push_back(first + j), log_q[std::size_t(r * k + j)] -= float(std::log(k));
            const index_t width = std::min<index_t>(v, 2 * k), begin = std::min(first, v - width);
            for (index_t j = 0; j < width; ++j) kept.push_back(begin + j);
        }
    }
};

struct kind_of_call {
    std::string name;
    std::function<void(problem_call&)> fill;
};

/// Near enough: sums over threads are taken in another order.
bool near(double a, double b, double scale) {
    return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= 4e-6 * (scale + std::abs(a) + std::abs(b));
}

template <class Z>
void check_same(batch<Z>& b, const std::function<void(problem_call&, batch<Z>&)>& fill, const std::string& name) {
    INFO(name);
    problem_call cpu{kDLCPU}, device{kDLCUDA};
    std::vector<Z> of[2];
    for (problem_call* c : {&cpu, &device}) {
        std::vector<Z>& dz = of[c == &device];
        dz.assign(std::size_t(b.n * b.v), Z(7.F));
        c->student.z = c->of(b.z, {b.n, b.v}), c->student.dz = c->of(dz, {b.n, b.v});
        c->losses.assign(std::size_t(b.n), 7.F), c->env.losses = c->of(c->losses, {b.n});
        c->lse.assign(std::size_t(b.n), 7.), c->env.lse = c->of(c->lse, {b.n});
        c->env.totals = c->of(c->totals, {index_t(OPD_TOTALS)});
        fill(*c, b);
    }
    const int want = cpu.run(), got = device.run();
    INFO(std::string(opd_last_error()) << " / " << last.text);
    REQUIRE(want == got);
    if (want != OPD_OK) {
        CHECK(std::string(opd_last_error()) == last.text);
        CHECK(std::memcmp(of[0].data(), of[1].data(), of[0].size() * sizeof(Z)) == 0);
        return;
    }
    CHECK(near(cpu.result.loss, device.result.loss, 1));
    CHECK(cpu.result.diagnostics.kept == device.result.diagnostics.kept);
    CHECK(cpu.result.diagnostics.bad_rows == device.result.diagnostics.bad_rows);
    CHECK(cpu.result.diagnostics.tokens == device.result.diagnostics.tokens);
    CHECK(cpu.result.diagnostics.selector_rows == device.result.diagnostics.selector_rows);
    CHECK(near(cpu.result.diagnostics.kept_loss, device.result.diagnostics.kept_loss, 1));
    for (problem_call* c : {&cpu, &device}) { // totals are the result
        CHECK(std::memcmp(c->totals.data(), &c->result.loss, 8) == 0);
        CHECK(std::memcmp(c->totals.data() + 1, &c->result.diagnostics, sizeof(opd_diagnostics)) == 0);
    }
    const double step = sizeof(Z) == 4 ? 0 : std::is_same_v<Z, half> ? 1e-3 : 8e-3; // of a last digit
    index_t wrong = 0;
    for (std::size_t i = 0; i < of[0].size(); ++i) {
        const double a = double(float(of[0][i])), g = double(float(of[1][i]));
        wrong += !near(a, g, 1. / double(b.n)) && std::abs(a - g) > step * (std::abs(a) + 1e-4);
    }
    CHECK(wrong == 0);
    for (index_t r = 0; r < b.n; ++r) {
        CHECK(near(double(cpu.losses[std::size_t(r)]), double(device.losses[std::size_t(r)]), 1));
        CHECK(near(cpu.lse[std::size_t(r)], device.lse[std::size_t(r)], 1));
    }
}

template <class Z>
using filler = std::function<void(problem_call&, batch<Z>&)>;

/// docs/bindings/c-cuda.md: enqueues a call on a stream, or says why not.
const char* enqueue(void* stream, const opd_student& student, const opd_teacher& teacher, const opd_env& env) {
    opd_engine_options options = {};
    options.struct_size = sizeof options;
    options.device_type = kDLCUDA, options.device_id = 0;
    options.stream = stream; // a cudaStream_t
    opd_engine* engine = nullptr;
    if (opd_engine_create(&options, &engine) != OPD_OK) return opd_last_error();
    const opd_call call = {sizeof call, engine, &student, &teacher, nullptr, &env};
    if (opd_evaluate(&call, nullptr) != OPD_OK) return opd_last_error(); // enqueued; nobody waits
    opd_engine_destroy(engine);
    return "";
}

} // namespace

TEST_CASE_TEMPLATE("dense rows: every divergence and selector, as on the CPU", Z, float, bfloat16, half) {
    std::uint64_t seed = 20250601;
    for (int i = 0; opd_name("divergence", i) != nullptr; ++i)
        for (int s = 0; opd_name("selector", s) != nullptr; ++s) {
            const std::string of = opd_name("divergence", i), selector = opd_name("selector", s);
            if (s > 0 && i != s % 9) continue; // each selector once
            batch<Z> b(++seed, 5, 700 + 41 * i, 4);
            check_same<Z>(
                b,
                [&](problem_call& c, batch<Z>& x) {
                    c.teacher.y = c.of(x.y, {x.n, x.v});
                    if (selector != "eopd") c.estimator.of = of.c_str();
                    c.estimator.a = .3, c.estimator.b = .6, c.estimator.selector = selector.c_str();
                    c.estimator.selector_a = .5, c.estimator.selector_b = .5;
                    c.env.mask = c.of(x.mask, {x.n});
                },
                of + " " + selector);
        }
}

TEST_CASE_TEMPLATE("supports, even and ragged, with dense and sparse gradients, as on the CPU", Z, float, bfloat16,
                   half) {
    std::uint64_t seed = 77;
    for (const char* form : {"renormalised", "tail_bucket", "generalised", "truncated_biased"})
        for (const char* of : {"reverse_kl", "forward_kl", "jsd", "total_variation"})
            for (const bool ragged : {false, true}) {
                if (form == std::string("truncated_biased") && std::string(of).find("_kl") == std::string::npos)
                    continue;
                batch<Z> b(++seed, 4, 300, 6);
                check_same<Z>(
                    b,
                    [&](problem_call& c, batch<Z>& x) {
                        const std::vector<std::int64_t> shape =
                            ragged ? std::vector<std::int64_t>{x.n * x.k} : std::vector<std::int64_t>{x.n, x.k};
                        c.teacher.kind = ragged ? OPD_RAGGED_SUPPORT : OPD_SUPPORT;
                        c.teacher.ids = c.of(x.ids, shape), c.teacher.log_q = c.of(x.log_q, shape);
                        c.teacher.log_tail = c.of(x.log_tail, {x.n});
                        if (ragged) c.teacher.offsets = c.of(x.begins, {x.n + 1}), c.teacher.widest = x.k;
                        c.estimator.estimator = form, c.estimator.of = of, c.estimator.a = .3, c.estimator.b = .6;
                    },
                    std::string(form) + " " + of + (ragged ? ", ragged" : ""));
            }
    for (const bool ragged : {false, true}) { // a sparse gradient
        batch<Z> b(++seed, 4, 300, 6);
        std::vector<Z> of[2];
        double loss[2];
        for (const bool device : {false, true}) {
            problem_call c{device ? kDLCUDA : kDLCPU};
            const std::vector<std::int64_t> shape =
                ragged ? std::vector<std::int64_t>{b.n * b.k} : std::vector<std::int64_t>{b.n, b.k};
            of[device] = b.sparse;
            c.student.kind = OPD_ON_SUPPORT, c.student.z = c.of(b.z, {b.n, b.v});
            c.student.dz = c.of(of[device], shape);
            c.teacher.kind = ragged ? OPD_RAGGED_SUPPORT : OPD_SUPPORT;
            c.teacher.ids = c.of(b.ids, shape), c.teacher.log_q = c.of(b.log_q, shape);
            if (ragged) c.teacher.offsets = c.of(b.begins, {b.n + 1}), c.teacher.widest = b.k;
            REQUIRE(c.run() == OPD_OK);
            loss[device] = c.result.loss;
        }
        CHECK(near(loss[0], loss[1], 1));
        double largest = 0;
        for (std::size_t i = 0; i < of[0].size(); ++i) {
            const double a = double(float(of[0][i])), g = double(float(of[1][i]));
            CHECK((near(a, g, .25) || std::abs(a - g) <= 8e-3 * std::abs(a)));
            largest = std::max(largest, std::abs(a));
        }
        CHECK(largest > 0);
    }
}

TEST_CASE_TEMPLATE("drawn tokens: surrogates, baselines, caches and wrappers, as on the CPU", Z, float, bfloat16,
                   half) {
    std::uint64_t seed = 5;
    const auto check = [&](const std::string& name, const filler<Z>& then) {
        batch<Z> b(++seed, 6, 260, 5);
        check_same<Z>(
            b,
            [&](problem_call& c, batch<Z>& x) {
                c.teacher.kind = OPD_SAMPLES;
                c.teacher.ids = c.of(x.ids, {x.n, x.k}), c.teacher.log_q = c.of(x.log_q, {x.n, x.k});
                c.teacher.log_mu = c.of(x.log_mu, {x.n, x.k});
                c.estimator.a = .3, c.estimator.b = .6, c.estimator.accept_bias = 1;
                then(c, x);
            },
            name);
    };
    const auto weighted = [](problem_call& c, batch<Z>& x) {
        c.teacher.kind = OPD_WEIGHTED;
        c.teacher.weight = c.of(x.weight, {x.n, x.k}), c.teacher.exact = c.of(x.exact, {x.n, x.k});
    };
    for (int i = 0; opd_name("surrogate", i) != nullptr; ++i) {
        const std::string surrogate = opd_name("surrogate", i);
        for (const bool of_weighted : {false, true})
            check(surrogate, [&](problem_call& c, batch<Z>& x) {
                c.estimator.surrogate = surrogate.c_str();
                if (of_weighted) weighted(c, x);
                c.teacher.log_prox = c.of(x.log_prox, {x.n, x.k});
            });
    }
    for (int i = 0; opd_name("baseline", i) != nullptr; ++i) {
        const std::string baseline = opd_name("baseline", i);
        check(baseline, [&](problem_call& c, batch<Z>&) { c.estimator.baseline = baseline.c_str(); });
    }
    for (const char* of : {"forward_kl", "jsd", "total_variation", "clipped"})
        check(of, [&](problem_call& c, batch<Z>&) { c.estimator.of = of; });
    check("sampled_forward_kl", [&](problem_call& c, batch<Z>&) {
        c.teacher.law = OPD_OF_TEACHER, c.estimator.estimator = "sampled_forward_kl";
    });
    check("missing_mu", [&](problem_call& c, batch<Z>& x) {
        x.log_mu[3] = std::numeric_limits<float>::quiet_NaN(), c.teacher.missing_mu = 1;
    });
    check("kept sets", [&](problem_call& c, batch<Z>& x) {
        c.teacher.kept_ids = c.of(x.kept, {index_t(x.kept.size())});
        c.teacher.kept_offsets = c.of(x.kept_begins, {x.n + 1}), c.teacher.widest = 10;
    });
}

TEST_CASE("bad rows are counted, and what a device cannot promise is refused by name") {
    batch<float> b(9, 5, 90, 4);
    b.z[3 * 90 + 1] = std::numeric_limits<float>::quiet_NaN();
    check_same<float>(
        b,
        [](problem_call& c, batch<float>& x) {
            c.teacher.y = c.of(x.y, {x.n, x.v});
        },
        "a bad row");

    std::vector<float> dz(5 * 90, 7.F);
    const auto refused = [&](int code, const std::string& text, auto&& change, bool wants_result = true) {
        problem_call c{kDLCUDA};
        c.student.z = c.of(b.z, {5, 90}), c.student.dz = c.of(dz, {5, 90}), c.teacher.y = c.of(b.y, {5, 90});
        change(c);
        INFO(text);
        CHECK(c.run(wants_result) == code);
        INFO(last.text);
        CHECK(last.text.find(text) != std::string::npos);
        CHECK(std::all_of(dz.begin(), dz.end(), [](float f) { return f == 7.F; }));
    };
    refused(OPD_INVALID_INPUT, "lies in the CPU's memory", [&](problem_call& c) {
        c.tensors.back()->device = {kDLCPU, 0}; // the teacher's
    });
    refused(OPD_INVALID_INPUT, "lies on device 1", [&](problem_call& c) { c.tensors.back()->device = {kDLCUDA, 1}; });
    refused(OPD_UNSUPPORTED, "built without its part 'hidden'", [&](problem_call& c) { c.student.kind = OPD_HIDDEN; });
    refused(OPD_UNSUPPORTED, "float32, bfloat16 or float16 on a device", [&](problem_call& c) {
        static std::vector<double> wide(5 * 90);
        c.student.z = c.of(wide, {5, 90}), c.student.dz = nullptr;
    });
    refused(OPD_UNSUPPORTED, "on a device ids are int64", [&](problem_call& c) {
        static std::vector<std::int32_t> ids(5 * 4);
        c.teacher.kind = OPD_SUPPORT, c.teacher.ids = c.of(ids, {5, 4}), c.teacher.log_q = c.of(b.log_q, {5, 4});
    });
    refused(OPD_UNSUPPORTED, "tiling_invariant", [](problem_call& c) { c.env.determinism = OPD_TILING_INVARIANT; });
    refused(OPD_UNSUPPORTED, "raise", [](problem_call& c) { c.env.on_infinite = OPD_RAISE; });
    refused(
        OPD_INVALID_INPUT, "nobody waits", [](problem_call& c) { c.env.raise_bad = 1; }, false);
    refused(OPD_INVALID_INPUT, "widest", [&](problem_call& c) {
        c.teacher.kind = OPD_RAGGED_SUPPORT, c.teacher.widest = 91, c.teacher.ids = c.of(b.ids, {20});
        c.teacher.log_q = c.of(b.log_q, {20}), c.teacher.offsets = c.of(b.begins, {6});
    });
    refused(OPD_INVALID_INPUT, "env.totals", [&](problem_call& c) { c.env.totals = c.of(b.ids, {3}); });
    // a call without a result writes its totals alone
    problem_call c{kDLCUDA};
    c.student.z = c.of(b.z, {5, 90}), c.teacher.y = c.of(b.y, {5, 90});
    c.env.totals = c.of(c.totals, {index_t(OPD_TOTALS)});
    CHECK(c.run(false) == OPD_OK);
    CHECK(c.result.diagnostics.rows == 0);
    double loss = 0;
    std::memcpy(&loss, c.totals.data(), 8);
    CHECK(loss > 0);
}

TEST_CASE("an engine of a device where there is none, and what a CPU's engine refuses of it") {
    opd_engine_options o = {};
    o.struct_size = sizeof o, o.device_type = kDLCUDA;
    opd_engine* e = nullptr;
    const int status = opd_engine_create(&o, &e);
    if (status == OPD_OK) // there is one, and libopd_cuda
        opd_engine_destroy(e);
    else
        CHECK((status == OPD_UNSUPPORTED || status == OPD_DEVICE_ERROR || status == OPD_INVALID_INPUT));
    if (status == OPD_UNSUPPORTED) CHECK(std::string(opd_last_error()).find("libopd_cuda") != std::string::npos);
    o.device_type = 10;
    CHECK(opd_engine_create(&o, &e) == OPD_UNSUPPORTED);
    o.device_type = kDLCPU, o.device_id = 1;
    CHECK(opd_engine_create(&o, &e) == OPD_INVALID_INPUT);
    o.device_type = kDLCUDA, o.device_id = 0, o.threads = 2;
    CHECK(opd_engine_create(&o, &e) == OPD_INVALID_INPUT);
    batch<float> b(1, 2, 10, 2);
    problem_call c{kDLCPU};
    c.student.z = c.of(b.z, {2, 10}), c.teacher.y = c.of(b.y, {2, 10}); // of the CPU, which no device's engine takes
    CHECK(std::string(enqueue(nullptr, c.student, c.teacher, c.env)) != "");
    // the CPU's call refuses a device's tensors
    c.tensors[0]->device = {kDLCUDA, 0};
    CHECK(c.run() == OPD_UNSUPPORTED);
    CHECK(std::string(opd_last_error()).find("takes an engine of that device") != std::string::npos);
}
