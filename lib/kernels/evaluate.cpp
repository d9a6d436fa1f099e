// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd_evaluate of one place (place.hpp): from the caller's structs to the kind of call that they are.
#include <string>

#include "call.hpp"
#include "diagnostics.hpp"

namespace opd_c::kernel {
namespace {

opd::basic_env<where> env_of(const opd_env& e) {
    opd::basic_env<where> to;
    using opd::reduce;
    to.reduction =
        one_of("env.reduction", e.reduction,
               {reduce::token_mean, reduce::sum, reduce::sequence_mean, reduce::sequence_sum_mean, reduce::constant});
    to.mask = mask("env.mask", e.mask, e.has_ignore != 0, e.ignore);
    to.weights = weights("env.weights", e.weights), to.offsets = offsets("env.offsets", e.offsets);
    to.versions = vector<const std::int32_t>("env.versions", e.versions), to.version = e.version;
    to.normaliser = e.normaliser;
    to.beta = static_cast<float>(e.beta), to.beta_loss = static_cast<float>(e.beta_loss);
    to.losses = vector<float>("env.losses", e.losses), to.lse = vector<double>("env.lse", e.lse);
    to.given_lse = vector<const double>("env.given_lse", e.given_lse);
    to.frozen.keep = flags("env.frozen_keep", e.frozen_keep);
    to.frozen.weight = matrix<const double>("env.frozen_weight", e.frozen_weight);
    to.frozen.sequence_log_ratio = vector<const double>("env.frozen_sequence_log_ratio", e.frozen_sequence_log_ratio);
    to.frozen.advantage = matrix<const double>("env.frozen_advantage", e.frozen_advantage);
    using act = opd::infinite::action;
    to.on_infinite = {one_of("env.on_infinite", e.on_infinite, {act::floor, act::skip, act::raise}),
                      or_default(e.floor_at, -30.0)};
    if (e.raise_bad) to.on_bad = e.bad_share == 0 ? opd::bad::raise() : opd::bad::raise_above(e.bad_share);
    to.on_overflow = one_of("env.on_overflow", e.on_overflow, {opd::overflow::skip_row, opd::overflow::saturate});
    to.loss_clamp = e.loss_clamp;
    to.checks = e.check_contents ? opd::check::contents : opd::check::count;
    using opd::determinism;
    to.level = one_of("env.determinism", e.determinism,
                      {determinism::run_to_run, determinism::not_guaranteed, determinism::tiling_invariant});
    to.vocab = e.drop_and_renormalise ? opd::vocabulary::drop_and_renormalise : opd::vocabulary::must_match;
    to.measure.entropy = e.measure_entropy != 0;
    to.measure.ratios = vector<opd::index_t>("env.ratios", e.ratios);
    return to;
}

/// What the caller's estimator is, of a cache of this kind.
form form_of(const opd_estimator& e, int kind) {
    if (e.estimator != nullptr) return named("estimator.estimator", estimators, e.estimator, "");
    if (kind == OPD_DENSE || kind == OPD_TEACHER_HIDDEN) return form::dense;
    return kind == OPD_SUPPORT || kind == OPD_RAGGED_SUPPORT ? form::renormalised : form::mc;
}

opd::result run(const call& c) {
    const int kind = c.teacher.kind, side = c.student.kind;
    if (kind < OPD_DENSE || kind > OPD_TEACHER_HIDDEN)
        refuse("teacher.kind", "is " + std::to_string(kind) + "; it has the values 0 to 5");
    if (side < OPD_LOGITS || side > OPD_HIDDEN)
        refuse("student.kind", "is " + std::to_string(side) + "; it has the values 0 to 2");
    const auto expects = [&](bool fits, const char* what) {
        if (!fits)
            refuse("estimator.estimator", std::string("'") + estimators[static_cast<std::size_t>(c.what)].text.data() +
                                              "' does not read this cache: it reads " + what);
    };
    const bool of_support = kind == OPD_SUPPORT || kind == OPD_RAGGED_SUPPORT,
               of_drawn = kind == OPD_SAMPLES || kind == OPD_WEIGHTED;
    if (side == OPD_ON_SUPPORT && c.what != form::renormalised)
        refuse("student.kind", "is OPD_ON_SUPPORT, a sparse gradient, which \"renormalised\" alone has");
    if (c.teacher.lumped && kind != OPD_DENSE) refuse("teacher.lumped", "is of OPD_DENSE alone");
    if (c.student.padding < 0) refuse("student.padding", "is negative");
    switch (c.what) {
    case form::dense:
        expects(!of_support && !of_drawn, "OPD_DENSE or OPD_TEACHER_HIDDEN");
        if (kind == OPD_TEACHER_HIDDEN || side == OPD_HIDDEN) {
            if (c.teacher.lumped)
                throw opd::unsupported("opd: teacher.lumped: this library has it without hidden states");
            return hidden_dense(c);
        }
        return c.teacher.lumped ? lumped(c) : dense(c);
    case form::renormalised:
        expects(of_support, "OPD_SUPPORT or OPD_RAGGED_SUPPORT");
        if (side == OPD_HIDDEN) return hidden_renormalised(c);
        return renormalised(c);
    case form::tail_bucket:
    case form::generalised:
    case form::truncated_biased:
    case form::reweighted:
        expects(of_support, "OPD_SUPPORT or OPD_RAGGED_SUPPORT");
        return side == OPD_HIDDEN ? hidden_entries(c) : support(c);
    default:
        expects(of_drawn, "OPD_SAMPLES or OPD_WEIGHTED");
        return side == OPD_HIDDEN ? hidden_entries(c) : sampled(c);
    }
}

/// Where env.totals lies, whose words are a result's.
opd::result* totals_of(const opd_env& e) {
    static_assert(sizeof(opd::result) == 8 * OPD_TOTALS);
    const DLTensor* const t = e.totals;
    if (t == nullptr) return nullptr;
    const dtype type = opd_c::type_of(*t);
    if (type != dtype::int64 && type != dtype::float64) detail::refuse_type("env.totals", *t, "int64 or float64");
    const any_vector v = vector_of("env.totals", *t, tensors_place);
    if (v.size != static_cast<index_t>(OPD_TOTALS))
        refuse("env.totals", "has " + std::to_string(v.size) + " numbers, not " + std::to_string(OPD_TOTALS));
    if (reinterpret_cast<std::uintptr_t>(v.data) % 8 != 0) refuse("env.totals", "is not aligned to its element type");
    return static_cast<opd::result*>(v.data);
}

} // namespace

int evaluate(void* engine, const opd_student& student, const opd_teacher& teacher, const opd_estimator& estimator,
             const opd_env& env, opd_result* result, std::uint64_t* workspace) {
    return guarded([&] {
        backend& be = *static_cast<backend*>(engine);
        [[maybe_unused]] const turn of_device(be);
        opd::result* const totals = totals_of(env);
        const auto hand_out = [&](const opd::result& r) {
            if (workspace != nullptr) return;
            if (!enqueues && totals != nullptr) *totals = r;
            if (result != nullptr) store(r, *result);
        };
        try {
            const form what = form_of(estimator, teacher.kind);
            if (on_device && env.raise_bad && result == nullptr && workspace == nullptr)
                refuse("env.raise_bad", "is set, and nobody waits for the result of a device's call");
            hand_out(run({be, student, teacher, estimator, what, env_of(env), workspace, totals, result != nullptr}));
            return int{OPD_OK};
        } catch (const opd::bad_contents& e) {
            hand_out(e.result);
            opd_c_set_error(OPD_BAD_CONTENTS, e.what(), "", e.result.diagnostics.first_bad_row);
            return int{OPD_BAD_CONTENTS};
        } catch (const opd::infinite_result& e) {
            hand_out(e.result);
            throw;
#if defined(OPD_KERNELS_CUDA)
        } catch (const opd::cuda_error& e) {
            opd_c_set_error(OPD_DEVICE_ERROR, e.what(), "", -1);
            return int{OPD_DEVICE_ERROR};
#endif
        }
    });
}

} // namespace opd_c::kernel
