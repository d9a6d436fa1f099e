// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// docs/support-matrix.md against the code: every row says `yes`, `throws`, `does not compile` or `not yet`, and that is what
// happens. Each table is read into cells, each row expanded into its combinations; a combination must be one that this
// program instantiates, and every combination that it instantiates must be listed. CUDA's kernels run on the host.
#include <cstring>
#include <doctest/doctest.h>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/host_run.hpp"
#include "conformance/support_matrix.hpp"
#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"

namespace {

using namespace opd;
using namespace opd::test::matrix;
using opd::test::host_run_backend;

// --- what this program instantiates -------------------------------------------------------------------------------------

/// evaluate's pairing rules as a value (evaluate itself refuses with a sentence: tests/compile_fail).
template <class Estimator, cache_kind Kind, bool Sparse>
constexpr bool pairs() {
    const bool cache = Kind == cache_kind::dense ? divergence<Estimator> : detail::reads_cache<Estimator, Kind>();
    return cache && (!Sparse || detail::offers_sparse_gradient<Estimator>());
}

struct outcome {
    std::string status = ""; ///< as in the page
    double loss = 0;
    bool gradient = false;
    std::vector<std::byte> bits = {}; ///< loss and dz
};

/// A change to the call: env, estimator options.
struct call_options {
    determinism level = determinism::run_to_run;
    std::string option = "";
    int threads = 1;
};

/// Sets `o.option` on a call; false if this kind of estimator has no such option.
template <class Batch, class Student, class Teacher, class Estimator>
bool apply(const call_options& o, env& e, Batch& b, Student& s, Teacher& t, Estimator& est) {
    (void)s;
    const std::string& name = o.option;
    if (name.empty()) return true;
    if (name == "env.lse") return e.lse = b.lse, true;
    if (name == "env.given_lse") return e.given_lse = b.given, true;
    if (name == "env.losses") return e.losses = b.losses, true;
    if (name == "env.loss_clamp") return e.loss_clamp = 100, true;
    if (name == "env.beta") return e.beta = 1, true;
    if (name == "infinite::skip") return e.on_infinite = infinite::skip(), true;
    if (name == "infinite::raise") return e.on_infinite = infinite::raise(), true;
    if (name == "check::contents") return e.checks = check::contents, true;
    if constexpr (requires { t.y; })
        if (name == "vocabulary::drop_and_renormalise") {
            e.vocab = vocabulary::drop_and_renormalise;
            return t.y.cols -= 1, true;
        }
    if constexpr (requires { est.baseline; }) {
        if (name == "baseline::none") return est.baseline = baseline::none, true;
        if (name == "baseline::leave_one_out") return est.baseline = baseline::leave_one_out, true;
        if (name == "baseline::self_normalised") return est.baseline = baseline::self_normalised, true;
        if (name == "baseline::exact_entries") return est.baseline = baseline::exact_entries, true;
        if (name == "advantage::old") return est.advantage = advantage::old, true;
    }
    return false;
}

template <class Backend, cache_kind Kind, bool Sparse, class Z, class G, class L, class Estimator>
outcome run(Backend& backend, Estimator estimator, const call_options& o) {
    batch<Z, G, L> b;
    auto student = b.template student<Sparse>();
    auto teacher = b.template teacher<Kind>();
    env e;
    e.level = o.level;
    if (!apply(o, e, b, student, teacher, estimator)) return {.status = "no option " + o.option};
    outcome out;
    try {
        const result r = evaluate(backend, student, teacher, estimator, e);
        out.loss = r.loss;
        out.gradient = b.has_gradient();
        out.bits.resize(sizeof r.loss + sizeof(G) * b.dz.size());
        std::memcpy(out.bits.data(), &r.loss, sizeof r.loss);
        std::memcpy(out.bits.data() + sizeof r.loss, b.dz.data(), sizeof(G) * b.dz.size());
        out.status = r.diagnostics.kept == rows && r.diagnostics.bad_rows == 0 ? "yes" : "runs, but drops rows";
    } catch (const unsupported&) {
        out.status = "throws";
    } catch (const invalid_input&) {
        out.status = "throws";
    }
    return out;
}

/// Whether the CUDA backend has a kernel for a job.
template <class Job>
constexpr bool has_kernel = requires(const Job& job) {
    detail::kernel_of(job, detail::row_frame<space::host>{});
};

std::map<key, std::function<outcome(const call_options&)>> instantiated;

template <cache_kind Kind, bool Sparse, class Z, class G, class L, bool Cuda, class Estimator>
void add_on(const char* name, Estimator estimator) {
    const key k = key_of(name, name_of_kind(Kind), Sparse ? "sparse" : "dense", Cuda ? "cuda" : "eigen", name_of<Z>,
                         name_of<G>, name_of<L>);
    instantiated[k] = [estimator](const call_options& o) -> outcome {
        (void)estimator, (void)o; // where nothing is called
        if constexpr (!pairs<Estimator, Kind, Sparse>())
            return {.status = "does not compile"};
        else if constexpr (!Cuda) {
            eigen_backend backend{.threads = o.threads};
            return run<eigen_backend, Kind, Sparse, Z, G, L>(backend, estimator, o);
        } else {
            using student_type = decltype(std::declval<batch<Z, G, L>&>().template student<Sparse>());
            using teacher_type = decltype(std::declval<batch<Z, G, L>&>().template teacher<Kind>());
            if constexpr (!has_kernel<row_job<student_type, teacher_type, Estimator, space::host>>)
                return {.status = "not yet"};
            else {
                host_run_backend backend;
                backend.threads = 32;
                return run<host_run_backend, Kind, Sparse, Z, G, L>(backend, estimator, o);
            }
        }
    };
}
template <cache_kind Kind, bool Sparse, class Z, class G, class L, class Estimator>
void add(const char* name, Estimator estimator) {
    add_on<Kind, Sparse, Z, G, L, false>(name, estimator);
}
template <cache_kind Kind, bool Sparse, class Z, class G, class L, class Estimator>
void add_both(const char* name, Estimator estimator) {
    add_on<Kind, Sparse, Z, G, L, false>(name, estimator);
    add_on<Kind, Sparse, Z, G, L, true>(name, estimator);
}
template <class Visit>
void for_types(Visit f) {
    f(float{}), f(bfloat16{}), f(half{}), f(double{});
}
template <class Visit>
void for_divergences(Visit f) {
    f("reverse_kl", reverse_kl{}), f("forward_kl", forward_kl{}), f("jsd", jsd{});
    f("skew_forward_kl", skew_forward_kl{}), f("skew_reverse_kl", skew_reverse_kl{});
    f("total_variation", total_variation{}), f("alpha_divergence", alpha_divergence{});
    f("chi_squared", chi_squared{});
}

/// Sparse caches: all types of z with log-probs in float, and all in double.
template <cache_kind Kind, bool Sparse, class Estimator>
void add_types(const char* name, Estimator estimator) {
    for_types([&]<class Z>(Z) { add<Kind, Sparse, Z, Z, float>(name, estimator); });
    add<Kind, Sparse, double, double, double>(name, estimator);
}

void instantiate() {
    using enum cache_kind;
    for_divergences([]<class D>(const char* name, D d) {
        add<dense, false, float, float, float>(name, d);
        add<dense, false, double, double, double>(name, d);
        add_on<dense, false, float, float, float, true>(name, d);
        add_both<dense, true, float, float, float>(name, d);
        add_both<support, false, float, float, float>(name, d);
        add_both<samples, false, float, float, float>(name, d);
        add_both<weighted, false, float, float, float>(name, d);
    });
    const auto mixed = []<class D>(const char* name, D d) {
        for_types([&]<class Y>(Y) {
            const auto z = [&]<class Z>(Z) {
                add<dense, false, Z, float, Y>(name, d);
                add<dense, false, Z, bfloat16, Y>(name, d);
            };
            z(float{}), z(bfloat16{});
        });
    };
    mixed("reverse_kl", reverse_kl{});
    const auto short_types = []<class D>(const char* name, D d) {
        add<dense, false, bfloat16, bfloat16, bfloat16>(name, d);
        add<dense, false, opd::half, opd::half, opd::half>(name, d);
    };
    short_types("reverse_kl", reverse_kl{}), short_types("jsd", jsd{});
    for_types([]<class T>(T) { add_on<dense, false, T, T, T, true>("reverse_kl", reverse_kl{}); });

    add_types<support, false>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add_types<support, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<support, true, float, float, float>("renormalised{jsd}", renormalised{jsd{}});
    add<support, true, float, float, float>("renormalised{forward_kl}", renormalised{forward_kl{}});
    add<support, true, float, float, float>("renormalised{total_variation}", renormalised{total_variation{}});
    add<support, true, float, float, float>("renormalised{alpha_divergence}", renormalised{alpha_divergence{}});
    add<support, true, float, float, float>("renormalised{chi_squared}", renormalised{chi_squared{}});

    add_types<support, false>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add<support, false, float, float, float>("tail_bucket{forward_kl}", tail_bucket{forward_kl{}});
    add<support, false, float, float, float>("tail_bucket{jsd}", tail_bucket{jsd{}});
    add<support, false, float, float, float>("tail_bucket{total_variation}", tail_bucket{total_variation{}});
    add<support, false, float, float, float>("tail_bucket{alpha_divergence}", tail_bucket{alpha_divergence{}});
    add<support, false, float, float, float>("tail_bucket{chi_squared}", tail_bucket{chi_squared{}});

    add_types<samples, false>("mc_reverse_kl", mc_reverse_kl{});
    add_types<samples, false>("mc_reverse_kl{score_function}", mc_reverse_kl{score_function{}});
    add_types<weighted, false>("weighted_reverse_kl", weighted_reverse_kl{});

    add_both<support, true, float, float, float>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add_both<samples, true, float, float, float>("mc_reverse_kl", mc_reverse_kl{});
    add_both<weighted, true, float, float, float>("weighted_reverse_kl", weighted_reverse_kl{});
    const auto elsewhere = []<cache_kind A, cache_kind B, cache_kind C>(const char* name, auto est) {
        add_both<A, false, float, float, float>(name, est);
        add_both<B, false, float, float, float>(name, est);
        add_both<C, false, float, float, float>(name, est);
    };
    elsewhere.operator()<dense, samples, weighted>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    elsewhere.operator()<dense, samples, weighted>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    elsewhere.operator()<dense, support, weighted>("mc_reverse_kl", mc_reverse_kl{});
    elsewhere.operator()<dense, support, samples>("weighted_reverse_kl", weighted_reverse_kl{});

    const auto cuda = []<class T>(T) {
        add_on<support, false, T, T, T, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
        add_on<support, true, T, T, T, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
        add_on<support, false, T, T, T, true>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
        add_on<samples, false, T, T, T, true>("mc_reverse_kl", mc_reverse_kl{});
        add_on<weighted, false, T, T, T, true>("weighted_reverse_kl", weighted_reverse_kl{});
    };
    cuda(float{}), cuda(double{});
}

const std::function<outcome(const call_options&)>& case_of(const key& k) {
    if (instantiated.empty()) instantiate();
    const auto found = instantiated.find(k);
    REQUIRE_MESSAGE(found != instantiated.end(), "the page lists what this test does not instantiate: ", k);
    return found->second;
}
key float_key(const cells& row) {
    return key_of(row.at("estimator"), row.at("cache"), "dense", row.at("backend"), "float", "float", "float");
}

TEST_CASE("estimators, caches, backends and element types") {
    std::set<key> listed;
    for (const cells& row : table("Estimators, caches, backends, element types")) {
        CAPTURE(described(row));
        const key k = key_of(row.at("estimator"), row.at("cache"), row.at("gradient"), row.at("backend"), row.at("z"),
                             row.at("dz"), row.at("teacher"));
        listed.insert(k);
        const outcome got = case_of(k)({});
        CHECK(got.status == row.at("status"));
        if (got.status != "yes") continue;
        CHECK(got.gradient);
        // the same loss in double; log-probs of a 16-bit cache are rounded in the cache
        const bool on_cuda = row.at("backend") == "cuda";
        const key in_double = key_of(row.at("estimator"), row.at("cache"), row.at("gradient"),
                                     on_cuda ? "cuda" : "eigen", "double", "double", "double");
        if (instantiated.count(in_double))
            CHECK(got.loss == doctest::Approx(case_of(in_double)({}).loss).epsilon(2e-6));
    }
    for (const auto& [k, run] : instantiated) {
        const bool known = listed.count(k) > 0;
        CHECK_MESSAGE(known, "the page does not list ", k);
    }
}

TEST_CASE("determinism") {
    const std::map<std::string, determinism> levels{{"not_guaranteed", determinism::not_guaranteed},
                                                    {"run_to_run", determinism::run_to_run},
                                                    {"tiling_invariant", determinism::tiling_invariant}};
    for (const cells& row : table("Determinism")) {
        CAPTURE(described(row));
        REQUIRE(levels.count(row.at("level")));
        const auto& call = case_of(float_key(row));
        const determinism level = levels.at(row.at("level"));
        const outcome got = call({.level = level});
        CHECK(got.status == row.at("status"));
        if (level != determinism::run_to_run) continue;
        CHECK(call({.level = level}).bits == got.bits);
        CHECK(call({.level = level, .threads = 3}).bits == got.bits);
    }
}

TEST_CASE("options") {
    for (const cells& row : table("Options")) {
        CAPTURE(described(row));
        const outcome got = case_of(float_key(row))({.option = row.at("option")});
        CHECK(got.status == row.at("status"));
    }
}

} // namespace
