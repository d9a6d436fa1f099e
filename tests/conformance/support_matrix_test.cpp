// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// docs/support-matrix.md against the code: every row says `yes`, `throws`, `does not compile` or `not yet`, and that is
// what happens. Each table is read into cells, each row expanded into its combinations; a combination must be one that
// this program instantiates, and every combination that it instantiates must be listed. CUDA's kernels run on the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/host_run.hpp"
#include "conformance/support_matrix.hpp"
#include "opd/backends/cpu.hpp"
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

// --- what this program instantiates ----------------------------------------------------------------------------------

/// evaluate's pairing rules as a value (evaluate itself refuses with a sentence: tests/compile_fail).
template <class Estimator, cache_kind Kind, bool Sparse>
constexpr bool pairs() {
    const bool cache =
        kind_of(Kind) == cache_kind::dense ? divergence<Estimator> : detail::reads_cache<Estimator, kind_of(Kind)>();
    return cache && (!Sparse || detail::offers_sparse_gradient<Estimator>());
}

struct outcome {
    std::string status = ""; ///< as in the page
    double loss = 0;
    bool gradient = false;
    std::vector<std::byte> bits = {}; ///< loss and dz
    std::vector<double> dz = {}, lse = {}, exact_lse = {};
    std::vector<float> losses = {};
    opd::diagnostics diagnostics = {};
};

/// A change to the call: env, estimator options.
struct call_options {
    determinism level = determinism::run_to_run;
    std::string option = "";
    bool felt =
        false; ///< numbers that the option must act upon: a bad or infinite row, a loss beyond the clamp, another lse
    int threads = 1;
};

/// Sets `o.option` on a call; false if this kind of estimator has no such option.
template <class Batch, class Student, class Teacher, class Estimator>
bool apply(const call_options& o, env& e, Batch& b, Student& s, Teacher& t, Estimator& est) {
    (void)s;
    const std::string& name = o.option;
    if (name.empty()) return true;
    if (o.felt && (name == "check::contents" || name.rfind("infinite::", 0) == 0)) { // in row 1
        const double x = name == "check::contents" ? std::numeric_limits<double>::quiet_NaN()
                                                   : -std::numeric_limits<double>::infinity();
        b.y[vocab + 3] = b.to(std::type_identity<std::remove_cvref_t<decltype(b.y[0])>>{}, x);
        b.log_q[kept] = b.to(std::type_identity<std::remove_cvref_t<decltype(b.y[0])>>{}, x);
    }
    if (o.felt && name == "env.given_lse")
        for (double& l : b.given) l += 0.5;
    if (name == "env.lse") return e.lse = b.lse, true;
    if (name == "env.given_lse") return e.given_lse = b.given, true;
    if (name == "env.losses") return e.losses = b.losses, true;
    if (name == "env.loss_clamp") return e.loss_clamp = o.felt ? 1e-6 : 100, true;
    if (name == "env.beta") {
        std::fill(b.dz.begin(), b.dz.end(), b.to(std::type_identity<std::remove_cvref_t<decltype(b.dz[0])>>{}, 0.5));
        return e.beta = 1, true;
    }
    if (name == "env.frozen") { // row 1's tokens are dropped
        static std::vector<std::uint8_t> keep(std::size_t(rows * kept), 1);
        std::fill_n(keep.begin() + kept, kept, std::uint8_t{0});
        return e.frozen.keep = view(keep.data(), rows, index_t{kept}), true;
    }
    if (name == "infinite::skip") return e.on_infinite = infinite::skip(), true;
    if (name == "infinite::raise") return e.on_infinite = infinite::raise(), true;
    if (name == "check::contents") return e.checks = check::contents, true;
    if constexpr (requires { t.y; })
        if (name == "vocabulary::drop_and_renormalise") {
            e.vocab = vocabulary::drop_and_renormalise;
            return t.y.cols -= 1, true;
        }
    if constexpr (requires { est.baseline; }) // types: `under` has seen to them
        return name.rfind("baseline::", 0) == 0 || name.rfind("advantage::", 0) == 0;
    return false;
}

/// run(estimator) with the policy that an option names.
template <cache_kind Kind, class Estimator, class Run>
outcome under(const std::string&, const Estimator& e, const Run& run) {
    return run(e);
}
template <cache_kind Kind, class Run>
outcome under(const std::string& option, const mc<>& e, const Run& run) {
    const auto with = [&](auto b) {
        if constexpr (decltype(b)::reads(Kind))
            return run(mc{.baseline = b});
        else
            return outcome{.status = "does not compile"};
    };
    if (option == "baseline::none") return with(baseline::none{});
    if (option == "baseline::exact_entries") return with(baseline::exact_entries{});
    if (option == "baseline::leave_one_out") return with(baseline::leave_one_out{});
    if (option == "baseline::self_normalised") return with(baseline::self_normalised{});
    if (option == "baseline::minimum_variance") return with(baseline::minimum_variance{});
    if (option == "baseline::value") return with(baseline::value{});
    if (option == "advantage::old") return run(accept_bias{mc{advantage::old{}}});
    return run(e);
}

/// The batch's cache, bare or with kept sets.
struct bare {
    template <class Cache>
    Cache operator()(const Cache& c, const kept_sets&) const {
        return c;
    }
};
struct with_sets {
    template <class Cache>
    auto operator()(const Cache& c, const kept_sets& sets) const {
        return teacher::on_kept_sets{c, view(sets.ids.data(), index_t(sets.ids.size())), row_offsets<>(sets.offsets)};
    }
};

template <class Backend, cache_kind Kind, bool Sparse, class Z, class G, class L, class As = bare, class Estimator>
outcome run_with(Backend& backend, Estimator estimator, const call_options& o) {
    batch<Z, G, L> b;
    const kept_sets sets(b.ids);
    auto student = b.template student<Sparse, Kind>();
    auto teacher = As{}(b.template teacher<Kind>(), sets);
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
        for (const G& g : b.dz) out.dz.push_back(double(element<G>::load(g)));
        out.lse = b.lse, out.exact_lse = b.given, out.losses = b.losses;
        out.diagnostics = r.diagnostics;
        out.status = r.diagnostics.kept == rows && r.diagnostics.bad_rows == 0 ? "yes" : "runs, but drops rows";
    } catch (const unsupported&) {
        out.status = "throws";
    } catch (const invalid_input&) {
        out.status = "throws";
    } catch (const infinite_value&) {
        out.status = "infinite";
    }
    return out;
}

/// Options are tried on float alone.
template <class Backend, cache_kind Kind, bool Sparse, class Z, class G, class L, class Estimator>
outcome run(Backend& backend, const Estimator& estimator, const call_options& o) {
    const auto go = [&](const auto& e) { return run_with<Backend, Kind, Sparse, Z, G, L>(backend, e, o); };
    if constexpr (std::is_same_v<Z, float> && std::is_same_v<G, float> && std::is_same_v<L, float>)
        return under<Kind>(o.option, estimator, go);
    else
        return go(estimator);
}

std::map<key, std::function<outcome(const call_options&)>> instantiated;

enum class on { cpu, eigen, cuda };

template <cache_kind Kind, bool Sparse, class Z, class G, class L, on Backend, class Estimator>
void add_on(const char* name, Estimator estimator) {
    const char* const names[] = {"cpu", "eigen", "cuda"};
    const key k = key_of(name, name_of_kind(Kind), Sparse ? "sparse" : "dense", names[int(Backend)], name_of<Z>,
                         name_of<G>, name_of<L>);
    instantiated[k] = [estimator](const call_options& o) -> outcome {
        (void)estimator, (void)o; // where nothing is called
        if constexpr (!pairs<Estimator, Kind, Sparse>())
            return {.status = "does not compile"};
        else if constexpr (Backend != on::cuda) {
            using type = std::conditional_t<Backend == on::cpu, cpu_backend, eigen_backend>;
            type backend{.threads = o.threads};
            return run<type, Kind, Sparse, Z, G, L>(backend, estimator, o);
        } else {
            using student_type = decltype(std::declval<batch<Z, G, L>&>().template student<Sparse, Kind>());
            using teacher_type = decltype(std::declval<batch<Z, G, L>&>().template teacher<Kind>());
            if constexpr (!detail::has_kernel<row_job<student_type, teacher_type, Estimator, space::host>>)
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
    add_on<Kind, Sparse, Z, G, L, on::cpu>(name, estimator);
    add_on<Kind, Sparse, Z, G, L, on::eigen>(name, estimator);
}
template <cache_kind Kind, bool Sparse, class Z, class G, class L, class Estimator>
void add_all(const char* name, Estimator estimator) {
    add<Kind, Sparse, Z, G, L>(name, estimator);
    add_on<Kind, Sparse, Z, G, L, on::cuda>(name, estimator);
}
/// Tokens with kept sets, which have no gradient outside them.
template <cache_kind Kind, class T, class L, on Backend, class Estimator>
void add_on_sets(const char* name, Estimator estimator) {
    const char* const names[] = {"cpu", "eigen", "cuda"};
    const key k = key_of(name, on_sets(Kind), "dense", names[int(Backend)], name_of<T>, name_of<T>, name_of<L>);
    instantiated[k] = [estimator](const call_options& o) {
        using type = std::conditional_t<Backend == on::cpu, cpu_backend,
                                        std::conditional_t<Backend == on::eigen, eigen_backend, host_run_backend>>;
        type backend{.threads = Backend == on::cuda ? 32 : o.threads};
        outcome out = run_with<type, Kind, false, T, T, L, with_sets>(backend, estimator, o);
        if (o.option.empty() && out.status == "yes") CHECK(out.dz.at(29) == 0); // row 0 keeps multiples of 4 and of 7
        return out;
    };
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
    f("chi_squared", chi_squared{}), f("acceptance", acceptance{});
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
        add_on<dense, false, float, float, float, on::cuda>(name, d);
        add_all<dense, true, float, float, float>(name, d);
        add_all<support, false, float, float, float>(name, d);
        add_all<samples, false, float, float, float>(name, d);
        add_all<weighted, false, float, float, float>(name, d);
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
    for_types([]<class T>(T) { add_on<dense, false, T, T, T, on::cuda>("reverse_kl", reverse_kl{}); });

    add_types<support, false>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add_types<support, true>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add<support, true, float, float, float>("renormalised{jsd}", renormalised{jsd{}});
    add<support, true, float, float, float>("renormalised{forward_kl}", renormalised{forward_kl{}});
    add<support, true, float, float, float>("renormalised{total_variation}", renormalised{total_variation{}});
    add<support, true, float, float, float>("renormalised{alpha_divergence}", renormalised{alpha_divergence{}});
    add<support, true, float, float, float>("renormalised{chi_squared}", renormalised{chi_squared{}});
    add<support, true, float, float, float>("renormalised{acceptance}", renormalised{acceptance{}});

    add_types<support, false>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add<support, false, float, float, float>("tail_bucket{forward_kl}", tail_bucket{forward_kl{}});
    add<support, false, float, float, float>("tail_bucket{jsd}", tail_bucket{jsd{}});
    add<support, false, float, float, float>("tail_bucket{total_variation}", tail_bucket{total_variation{}});
    add<support, false, float, float, float>("tail_bucket{alpha_divergence}", tail_bucket{alpha_divergence{}});
    add<support, false, float, float, float>("tail_bucket{chi_squared}", tail_bucket{chi_squared{}});
    add<support, false, float, float, float>("tail_bucket{acceptance}", tail_bucket{acceptance{}});

    add_types<samples, false>("mc{reverse_kl}", mc{reverse_kl{}});
    add_types<samples, false>("mc{score_function}", accept_bias{mc{reverse_kl{}, score_function{}}});
    add_types<weighted, false>("mc{reverse_kl}", mc{reverse_kl{}});

    const auto on_sets_of = []<cache_kind Kind>() {
        const mc e{reverse_kl{}};
        for_types([&]<class T>(T) {
            add_on_sets<Kind, T, float, on::cpu>("mc{reverse_kl}", e);
            add_on_sets<Kind, T, float, on::eigen>("mc{reverse_kl}", e);
        });
        add_on_sets<Kind, double, double, on::cpu>("mc{reverse_kl}", e);
        add_on_sets<Kind, double, double, on::eigen>("mc{reverse_kl}", e);
        add_on_sets<Kind, float, float, on::cuda>("mc{reverse_kl}", e);
        add_on_sets<Kind, double, double, on::cuda>("mc{reverse_kl}", e);
    };
    on_sets_of.operator()<samples>();
    on_sets_of.operator()<weighted>();

    const auto everywhere = []<cache_kind Kind>(const char* name, auto est) {
        add_all<Kind, false, float, float, float>(name, est);
    };
    everywhere.operator()<support>("generalised{reverse_kl}", generalised{reverse_kl{}});
    everywhere.operator()<support>("truncated_biased{reverse_kl}", truncated_biased{reverse_kl{}});
    everywhere.operator()<support>("reweighted", reweighted{});
    everywhere.operator()<ragged_support>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    everywhere.operator()<ragged_support>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    everywhere.operator()<ragged_support>("generalised{reverse_kl}", generalised{reverse_kl{}});
    everywhere.operator()<ragged_support>("truncated_biased{reverse_kl}", truncated_biased{reverse_kl{}});
    everywhere.operator()<ragged_support>("reweighted", reweighted{});
    add_all<ragged_support, true, float, float, float>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    add_all<ragged_support, true, float, float, float>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add_all<ragged_support, false, float, float, float>("reverse_kl", reverse_kl{});
    add_all<ragged_support, false, float, float, float>("mc{reverse_kl}", mc{reverse_kl{}});
    add_all<ragged_support, false, float, float, float>("any_sampled", any_sampled{});
    everywhere.operator()<lumped_dense>("reverse_kl", reverse_kl{});
    everywhere.operator()<lumped_dense>("jsd", jsd{});
    everywhere.operator()<dense>("eopd", eopd(1));
    everywhere.operator()<lumped_dense>("eopd", eopd(1));
    everywhere.operator()<samples>("eopd", eopd(1));
    everywhere.operator()<dense>("tip{reverse_kl}", selected{reverse_kl{}, selector::tip{1, 0.1}});
    everywhere.operator()<samples>("band{mc}", selected{mc{}, selector::band{1}});
    everywhere.operator()<weighted>("band{mc}", selected{mc{}, selector::band{1}});
    everywhere.operator()<samples>("sampled_forward_kl", sampled_forward_kl{});
    everywhere.operator()<samples>("any_sampled", any_sampled{});
    everywhere.operator()<weighted>("any_sampled", any_sampled{});
    add_all<samples, true, float, float, float>("any_sampled", any_sampled{});
    add_all<dense, false, float, float, float>("any_sampled", any_sampled{});

    add_all<support, true, float, float, float>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add_all<samples, true, float, float, float>("mc{reverse_kl}", mc{reverse_kl{}});
    add_all<weighted, true, float, float, float>("mc{reverse_kl}", mc{reverse_kl{}});
    const auto elsewhere = []<cache_kind A, cache_kind B, cache_kind C>(const char* name, auto est) {
        add_all<A, false, float, float, float>(name, est);
        add_all<B, false, float, float, float>(name, est);
        add_all<C, false, float, float, float>(name, est);
    };
    elsewhere.operator()<dense, samples, weighted>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
    elsewhere.operator()<dense, samples, weighted>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
    add_all<dense, false, float, float, float>("mc{reverse_kl}", mc{reverse_kl{}});
    add_all<support, false, float, float, float>("mc{reverse_kl}", mc{reverse_kl{}});

    const auto cuda = []<class T>(T) {
        add_on<support, false, T, T, T, on::cuda>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
        add_on<support, true, T, T, T, on::cuda>("renormalised{reverse_kl}", renormalised{reverse_kl{}});
        add_on<support, false, T, T, T, on::cuda>("tail_bucket{reverse_kl}", tail_bucket{reverse_kl{}});
        add_on<samples, false, T, T, T, on::cuda>("mc{reverse_kl}", mc{reverse_kl{}});
        add_on<weighted, false, T, T, T, on::cuda>("mc{reverse_kl}", mc{reverse_kl{}});
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
        const key in_double = key_of(row.at("estimator"), row.at("cache"), row.at("gradient"), row.at("backend"),
                                     "double", "double", "double");
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

using call = std::function<outcome(const call_options&)>;

/// The rows of a gradient that are not all 0.
std::vector<bool> moved_rows(const outcome& o) {
    std::vector<bool> moved(std::size_t(rows), false);
    for (std::size_t i = 0; i < o.dz.size(); ++i)
        if (o.dz[i] != 0) moved[i / (o.dz.size() / std::size_t(rows))] = true;
    return moved;
}

/// What `option` does, beside not being refused.
void acts(const call& run, const std::string& option, const std::string& estimator, bool weighted) {
    const bool bounded = estimator == "jsd"; // finite where the teacher gives nothing
    const outcome plain = run({}), got = run({.option = option});
    const auto felt = [&] { return run({.option = option, .felt = true}); };
    const auto near = [](const std::vector<double>& a, const std::vector<double>& b, double more) {
        bool same = a.size() == b.size();
        for (std::size_t i = 0; same && i < a.size(); ++i) same = std::abs(a[i] - b[i] - more) <= 1e-6;
        return same;
    };
    if (option == "env.lse") {
        CHECK(got.bits == plain.bits);
        CHECK(near(got.lse, got.exact_lse, 0));
    } else if (option == "env.given_lse" && estimator.rfind("renormalised", 0) == 0) {
        CHECK(got.bits == plain.bits); // it tells the mass of the support, no more
        CHECK(plain.diagnostics.student_mass_sum == 0);
        CHECK(got.diagnostics.student_mass() > 0.01);
    } else if (option == "env.given_lse") {
        CHECK(got.loss == doctest::Approx(plain.loss).epsilon(1e-6));
        CHECK(near(got.dz, plain.dz, 0));
        CHECK(std::abs(felt().loss - plain.loss) > 0.01 * std::abs(plain.loss));
    } else if (option == "env.losses") {
        CHECK(got.bits == plain.bits);
        double sum = 0;
        for (const float l : got.losses) sum += double(l);
        CHECK(sum / double(rows) == doctest::Approx(plain.loss).epsilon(1e-6));
    } else if (option == "env.loss_clamp") {
        CHECK(got.bits == plain.bits);
        const outcome cut = felt();
        CHECK(cut.diagnostics.clamped_rows == rows);
        CHECK_FALSE(cut.gradient);
    } else if (option == "env.beta") {
        CHECK(got.loss == plain.loss);
        CHECK(near(got.dz, plain.dz, 0.5));
    } else if (option == "env.frozen") {
        CHECK(got.diagnostics.dropped == kept);
        CHECK(moved_rows(got) == std::vector<bool>{true, false, true});
    } else if (option == "infinite::skip") {
        CHECK(got.bits == plain.bits);
        const outcome skipped = felt();
        CHECK(skipped.diagnostics.first_infinite_row == (bounded ? -1 : 1));
        CHECK(moved_rows(skipped) == std::vector<bool>{true, bounded, true});
    } else if (option == "infinite::raise") {
        CHECK(got.bits == plain.bits);
        CHECK(felt().status == (bounded ? "yes" : "infinite"));
    } else if (option == "check::contents") {
        CHECK(got.bits == plain.bits);
        CHECK(felt().status == "throws");
    } else if (option == "vocabulary::drop_and_renormalise") {
        CHECK(got.loss != plain.loss);
        for (std::size_t i = 0; i < got.dz.size(); ++i)
            CHECK((got.dz[i] == 0) ==
                  ((i + 1) % std::size_t(vocab) == 0)); // the student's last token has left the softmax
    } else { // a baseline or an advantage: another gradient, unless it is the default
        const bool same = option == "baseline::exact_entries" || (option == "baseline::none" && !weighted);
        CHECK((got.bits == plain.bits) == same);
        CHECK(got.gradient == !(weighted && option == "advantage::old")); // of log mu = log q - 1/16: a constant
    }
}

TEST_CASE("options") {
    for (const cells& row : table("Options")) {
        CAPTURE(described(row));
        const call& run = case_of(float_key(row));
        const std::string& option = row.at("option");
        const std::string status = run({.option = option}).status;
        CHECK(status == row.at("status"));
        if (status == "yes") acts(run, option, row.at("estimator"), row.at("cache") == "weighted");
    }
}

} // namespace
