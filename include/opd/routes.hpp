// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Several teachers in one call: which row has which.
//
//   row_routes routes(which, teachers);                      which[r]: the teacher of row r, -1: none
//   auto r = evaluate_routed(be, student, routes, env, route{t0, e0}, route{t1, e1}, …);
//
//   L = Σ_i w_i L_i,   L_i = Σ_{r: which[r] = i} w_r f_r L_r     f by env.reduction over the rows of teacher i alone
//
// Each teacher has a cache of any kind, an estimator, a weight w_i > 0, a normaliser and diagnostics of its own. So a
// teacher of few rows counts as much as one of many; to weigh rows alike instead give env.normaliser, the count of
// all, which holds for every route without one of its own. A cut into micro-batches passes each route's count of the
// whole batch: then no bit of a gradient depends on the cut.
//
//   evaluate_mean(be, student, env, route{t0, e0, w0}, route{t1, e1, w1}, …)     L = Σ_i w_i L_i, every row has them
//                                                                                all
//
// is the mean of divergences, Σ_i w_i D(p ‖ q_i); the divergence of the mixture is mixture.hpp's. The weights are
// taken as they are.
//
// No cache is copied: a call reads the rows that are its own. teacher::at_rows (teacher.hpp) finds them where a cache
// holds the scored rows alone; `routes.places()` is its map then, `routes.rows_of(i)` says which rows to score. A
// teacher of no row costs nothing: its head makes no logits.
//
// Shapes: which (N), signed integers; the caches' and env's as of evaluate. Costs the sum of the calls of each route
// alone, and of a mean a read of dz for every route but the first.
//
// Throws invalid_input before anything is written: as evaluate does, of every route; `which` where a number is no
// route; route i's weight and normaliser; env.mask, which row_routes takes; of a mean dz on z, and env.losses beside
// weights other than 1. env.on_bad and on_infinite throw once all routes are done. On the host. A row's position, for
// a selector that reads it, is that among the rows of its route.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/view.hpp"

namespace opd {

/// Which rows are whose. Owns its tables and keeps their memory from `assign` to `assign`.
class row_routes {
public:
    row_routes() = default;
    /// which[r] in [0, teachers), or -1: of no teacher; as is a row that `mask` leaves out.
    template <std::signed_integral Number>
    row_routes(vector_view<const Number> which, index_t teachers, row_mask<> mask = {}) {
        assign(which, teachers, mask);
    }
    template <detail::iterable R>
    row_routes(const R& which, index_t teachers, row_mask<> mask = {})
        : row_routes(detail::whole_range(which), teachers, mask) {}

    template <std::signed_integral Number>
    void assign(vector_view<const Number> which, index_t teachers, row_mask<> mask = {}) {
        const index_t n = which.size;
        if (teachers < 1) throw invalid_input("teachers", "must be at least 1");
        detail::check_vector("which", which, n);
        detail::check_vector("mask", mask, n);
        for (index_t r = 0; r < n; ++r)
            if (which[r] < -1 || which[r] >= teachers)
                throw invalid_input(
                    "which", "is " + std::to_string(which[r]) + " for " + std::to_string(teachers) + " teachers", r);
        routes_.resize(std::size_t(n)), places_.resize(std::size_t(n)), rows_.resize(std::size_t(n));
        first_.assign(std::size_t(teachers) + 1, 0);
        for (index_t r = 0; r < n; ++r) {
            const auto to = mask.kept(r) ? static_cast<std::int32_t>(which[r]) : -1;
            routes_[std::size_t(r)] = to;
            places_[std::size_t(r)] = to < 0 ? -1 : first_[std::size_t(to) + 1]++;
        }
        for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
        for (index_t r = 0; r < n; ++r)
            if (const std::int32_t of = routes_[std::size_t(r)]; of >= 0)
                rows_[std::size_t(first_[std::size_t(of)] + places_[std::size_t(r)])] = r;
    }

    index_t rows() const { return static_cast<index_t>(routes_.size()); }
    index_t teachers() const { return first_.empty() ? 0 : static_cast<index_t>(first_.size()) - 1; }
    /// How many rows a teacher has.
    index_t count(index_t teacher) const { return first_[std::size_t(teacher) + 1] - first_[std::size_t(teacher)]; }
    /// They, ascending: what to send to it.
    vector_view<const index_t> rows_of(index_t teacher) const {
        return {rows_.data() + first_[std::size_t(teacher)], count(teacher)};
    }
    /// (N) the place of each row among those of its teacher, -1 of none: the map of teacher::at_rows for caches that
    /// hold the rows of rows_of(teacher) alone.
    vector_view<const index_t> places() const { return {places_.data(), rows()}; }
    /// The mask of a teacher's call. `clears`: the call that clears the gradient of rows of no teacher.
    row_mask<> mask_of(index_t teacher, bool clears) const {
        return row_mask<>::of_route(vector_view<const std::int32_t>(routes_.data(), rows()), teacher, clears);
    }

private:
    std::vector<std::int32_t> routes_;
    std::vector<index_t> places_, rows_, first_;
};

/// A teacher of several: what is known of it, what is made of that, and how much it counts.
template <class Teacher, class Estimator>
struct route {
    Teacher teacher;
    Estimator estimator;
    double weight = 1;     ///< w_i, above 0
    double normaliser = 0; ///< count to divide by; 0: env.normaliser, or the count of this batch's rows
};
template <class Teacher, class Estimator, std::convertible_to<double>... Numbers>
route(Teacher, Estimator, Numbers...) -> route<Teacher, Estimator>;

/// What a call with K teachers returns: the sum, and each teacher's share of it.
template <std::size_t K>
struct routed_result : result {
    std::array<result, K> of = {};
};

namespace detail {
inline namespace OPD_ISA {

template <class T>
inline constexpr bool is_route = false;
template <class Teacher, class Estimator>
inline constexpr bool is_route<route<Teacher, Estimator>> = true;

/// A route's env: its factors are w_i times those of its own reduction.
inline env env_of_route(env e, double weight, double normaliser, const char* name, index_t n) {
    if (!is_finite(weight) || !(weight > 0 && weight <= largest_factor && weight >= 1 / largest_factor))
        throw invalid_input(std::string(name) + ".weight", "must be above 0, and between 1e-30 and 1e30");
    if (!is_finite(normaliser) || normaliser < 0)
        throw invalid_input(std::string(name) + ".normaliser", "must be a positive count, or 0");
    if (normaliser > 0) e.normaliser = normaliser;
    check_env(e, n), check_env_contents(e, n);
    if (weight == 1) return e;
    const double count = count_of(e, n) / weight;
    if (e.reduction == reduce::sum) e.reduction = reduce::constant;
    e.normaliser = count;
    return e;
}
/// The head's gradients collect what the calls before have left there.
template <class Student>
Student collects(Student s, bool first) {
    if constexpr (requires { s.beta_head = 1.0f; })
        if (!first) s.beta_head = 1;
    return s;
}

/// Calls of several routes: all are checked, then run one after the other. `runs(i)`: whether one is.
template <class Backend, class Student, class Runs, class EnvOf, class... Routes, std::size_t... I>
auto run_routes(Backend& be, const Student& student, Runs&& runs, EnvOf&& env_of, std::index_sequence<I...>,
                const Routes&... routes) {
    routed_result<sizeof...(Routes)> all;
    const auto jobs = std::make_tuple(
        checked_job(be, collects(student, I == 0), routes.teacher, routes.estimator, env_of(I, routes))...);
    const auto one = [&](const auto& job, result& to) {
        to = be.for_rows(job);
        all.loss += to.loss;
        all.diagnostics.merge(to.diagnostics);
    };
    ((runs(I) ? one(std::get<I>(jobs), all.of[I]) : void()), ...);
    return all;
}
template <std::size_t K, space S>
void raise_for(const routed_result<K>& all, const basic_env<S>& e) {
    raise_infinite(all, e.on_infinite), raise_bad(all, e.on_bad);
}

template <class Backend, class Student, class... Routes>
constexpr bool routes_fit() {
    static_assert((is_route<Routes> && ...), "opd: a teacher of several is opd::route{teacher, estimator}");
    static_assert(!Student::sparse_gradient, "opd: student::on_support has a gradient by the slots of one cache; with "
                                             "several teachers use student::logits");
    static_assert(space_of<std::remove_cvref_t<Backend>>() == space::host,
                  "opd: several teachers in one call are for the host's backends; on a device make a call for each "
                  "with row_mask::of_route");
    if constexpr (sizeof...(Routes) > 0 && (is_route<Routes> && ...) &&
                  space_of<std::remove_cvref_t<Backend>>() == space::host)
        return (types_fit<std::remove_cvref_t<Backend>, Student, decltype(Routes::teacher),
                          decltype(Routes::estimator)>() &&
                ...);
    else
        return false;
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Each row from the teacher that `routes` gives it; as many `parts` as there are teachers. See the head of this file.
template <class Backend, class Student, class... Teachers, class... Estimators>
auto evaluate_routed(Backend&& be, Student student, const row_routes& routes, env e,
                     const route<Teachers, Estimators>&... parts) {
    routed_result<sizeof...(parts)> all;
    if constexpr (detail::routes_fit<Backend, Student, route<Teachers, Estimators>...>()) {
        if (index_t(sizeof...(parts)) != routes.teachers())
            throw invalid_input("routes", "are of " + std::to_string(routes.teachers()) + " teachers; the call has " +
                                              std::to_string(sizeof...(parts)));
        if (routes.rows() != student.rows())
            throw invalid_input("routes", "have " + std::to_string(routes.rows()) + " rows; the student has " +
                                              std::to_string(student.rows()));
        if (!e.mask.empty()) throw invalid_input("env.mask", "is the business of row_routes(which, teachers, mask)");
        all = detail::run_routes(
            be, student, [&](std::size_t i) { return i == 0 || routes.count(index_t(i)) > 0; },
            [&](std::size_t i, const auto& part) {
                env own = e;
                own.mask = routes.mask_of(index_t(i), i == 0);
                return detail::env_of_route(own, part.weight, part.normaliser, ("route " + std::to_string(i)).c_str(),
                                            routes.rows());
            },
            std::index_sequence_for<Teachers...>(), parts...);
        detail::raise_for(all, e);
    }
    return all;
}

/// Each row from all teachers: Σ_i w_i L_i, the mean of divergences where the weights sum to 1. dz is collected over
/// the routes, so it may not lie on z.
template <class Backend, class Student, class... Teachers, class... Estimators>
auto evaluate_mean(Backend&& be, Student student, env e, const route<Teachers, Estimators>&... parts) {
    routed_result<sizeof...(parts)> all;
    if constexpr (detail::routes_fit<Backend, Student, route<Teachers, Estimators>...>()) {
        if constexpr (sizeof...(parts) > 1 && requires {
                          student.dz;
                          student.z;
                      })
            if (!student.dz.empty() && static_cast<const void*>(student.dz.data) == student.z.data)
                throw invalid_input("student.dz", "is student.z, which the next teacher still reads");
        // of the sum each row's loss is w_i times what a route says: by weights, which env.losses has
        if (!e.losses.empty())
            for (const double w : {parts.weight...})
                if (w != 1)
                    throw invalid_input("env.losses", "are not weighted by the routes: leave them out, or give weights "
                                                      "of 1 and scale env.weights");
        all = detail::run_routes(
            be, student, [](std::size_t) { return true; },
            [&](std::size_t i, const auto& part) {
                env own = e;
                if (i > 0) own.beta = own.beta_loss = 1;
                return detail::env_of_route(own, part.weight, part.normaliser, ("route " + std::to_string(i)).c_str(),
                                            student.rows());
            },
            std::index_sequence_for<Teachers...>(), parts...);
        detail::raise_for(all, e);
    }
    return all;
}

} // namespace OPD_ISA

} // namespace opd
