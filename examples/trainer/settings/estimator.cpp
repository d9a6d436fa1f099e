// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "settings/estimator.hpp"

#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "nearest.hpp"

namespace trainer {

namespace {

template <class Table>
auto chosen(const char* flag, const Table& table, const std::string& text) {
    if (const auto kind = opd::choice::find(table, text)) return *kind;
    std::vector<std::string> known;
    for (const auto& line : table) known.emplace_back(line.text);
    const std::string near = nearest(text, known);
    throw failure(exit_usage, fmt::format("{}: '{}' is not one of {}{}", flag, text, fmt::join(known, ", "),
                                          near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near)));
}

opd::choice::surrogate surrogate_of(opd::correction_loss loss) {
    switch (loss) {
    case opd::correction_loss::ppo_clip:
        return opd::choice::surrogate::ppo_clip;
    case opd::correction_loss::score_function:
        return opd::choice::surrogate::score_function;
    default:
        return opd::choice::surrogate::unclipped_is;
    }
}

} // namespace

const opd::correction_preset* correction_of(const config& c) {
    const std::string& name = c.distill.correction;
    if (name.empty()) return nullptr;
    (void)chosen("--correction", opd::correction_presets, name);
    for (const opd::correction_preset& p : opd::correction_presets)
        if (p.text == name) return &p;
    return nullptr; // not reached
}

opd::any_sampled drawn_estimator(const config& c) {
    const auto& d = c.distill;
    opd::any_sampled e;
    if (part_estimator_of(c) == part_estimator::lightning) { // opd::lightning: its bias is its choice
        e.of = {opd::choice::objective::clipped, d.advantage_clip};
        e.surrogate.which = opd::choice::surrogate::score_function;
        e.baseline = {opd::choice::baseline::exact_entries};
        e.accept_bias = true;
        return e;
    }
    e.of = {chosen("--shape", opd::choice::objectives, d.shape), d.shape_a, d.shape_b};
    e.surrogate = {.which = chosen("--surrogate", opd::choice::surrogates, d.surrogate),
                   .low = d.clip_low,
                   .high = d.clip_high,
                   .dual = d.dual_clip,
                   .cap = d.ratio_cap};
    const opd::correction_preset* preset = correction_of(c);
    if (preset != nullptr) {
        e.surrogate.which = surrogate_of(preset->loss);
        e.surrogate.correct = preset->which;
        e.surrogate.correct.passed = true; // loss_of_drawn makes the pass
    }
    e.baseline = {chosen("--baseline", opd::choice::baselines, d.baseline)};
    e.weighting = {d.self_normalise};
    e.accept_bias = d.accept_bias;
    try { // the library's own sentences
        e.validate();
        const opd::teacher::samples<std::int32_t> samples{};
        const opd::teacher::weighted<std::int32_t> weighted{};
        const auto check = [&](const auto& cache) {
            if (c.schedule.kind == "sync" && c.distill.mini_batches == 1 && !is_offline(c))
                e.validate_cache(opd::teacher::on_policy{cache});
            else
                e.validate_cache(cache);
        };
        part_estimator_of(c) == part_estimator::mc ? check(samples) : check(weighted);
    } catch (const opd::invalid_input& refused) {
        throw failure(exit_usage,
                      fmt::format("--shape {} {} --baseline {}: {}", d.shape,
                                  preset != nullptr ? "--correction " + d.correction : "--surrogate " + d.surrogate,
                                  d.baseline, refused.what()));
    }
    if (preset != nullptr && preset->which.needs_pass() && d.m != 1)
        throw failure(exit_usage, fmt::format("--correction {}: decides over sequences of one draw a position; needs "
                                              "--m 1",
                                              d.correction));
    if (preset != nullptr && d.m2po > 0)
        throw failure(exit_usage, "--m2po: the tokens that it leaves are unclipped; not with --correction");
    if (e.surrogate.which == opd::choice::surrogate::gspo)
        throw failure(exit_usage,
                      "--surrogate gspo: needs a pass over whole sequences (opd::gspo_fit), which this trainer "
                      "does not make");
    if ((e.reads_columns() & ~opd::column::log_prox) != 0)
        throw failure(exit_usage,
                      fmt::format("--shape {} --surrogate {} --baseline {}: reads what this trainer does not "
                                  "record: a reference policy, a reward, a given baseline",
                                  d.shape, d.surrogate, d.baseline));
    if (d.m2po > 0 && e.surrogate.which != opd::choice::surrogate::unclipped_is)
        throw failure(
            exit_usage,
            fmt::format("--m2po: the tokens that it leaves are unclipped; not with --surrogate {}", d.surrogate));
    e.accept_bias = true; // checked above, for the law that the schedule draws under
    return e;
}

std::optional<opd::any_dense> dense_estimator(const config& c) {
    using kind = opd::choice::objective;
    const auto& d = c.distill;
    const auto which = opd::choice::find(opd::choice::divergences, d.estimator);
    if (!which) return {};
    opd::any_dense e{*which};
    if (*which == kind::jsd) e.a = d.jsd_w, e.b = d.jsd_o;
    if (*which == kind::skew_forward_kl || *which == kind::skew_reverse_kl) e.a = d.skew;
    if (*which == kind::alpha_divergence) e.a = d.alpha;
    return e;
}

row_choice selector_of(const config& c, std::int32_t version) {
    using kind = opd::choice::selector;
    const auto& d = c.distill;
    const kind which = chosen("--selector", opd::choice::selectors, d.selector);
    const auto refuse = [&](const std::string& why) {
        throw failure(exit_usage, fmt::format("--selector {} --estimator {}: {}", d.selector, d.estimator, why));
    };
    const auto part = part_estimator_of(c);
    const bool on_support = part == part_estimator::topk, dense = dense_estimator(c).has_value();
    const unsigned known = dense || on_support ? opd::fact::of_dense
                           : reads_draws(part) ? opd::fact::of_tokens
                                               : opd::fact::of_buckets;
    row_choice out;
    try { // the library's own sentences
        if (which == kind::eopd) {
            if (d.estimator != "reverse_kl" && !on_support) refuse("mixes two divergences: of reverse_kl and topk");
            out.eopd = opd::selector::eopd{d.selector_a, d.selector_b};
            out.eopd->validate();
            return out;
        }
        out.weights = {which, d.selector_a, d.selector_b};
        if (which == kind::prefix && d.selector_b > 0)
            out.weights.a = opd::selector::prefix::at_step(version, d.selector_a, d.selector_b).depth;
        if (which == kind::prefix && !(d.selector_b >= 0)) refuse("--selector-b must be at least 0");
        out.weights.validate();
        out.weights.validate_for(known);
    } catch (const opd::invalid_input& refused) {
        refuse(refused.what());
    }
    return out;
}

const char* estimator_help() {
    const auto names = [](const auto& table) {
        std::vector<std::string_view> r;
        for (const auto& line : table) r.push_back(line.text);
        return fmt::format("{}", fmt::join(r, ", "));
    };
    static const std::string text = fmt::format("dense teacher logits: {}; a part of them: {}",
                                                names(opd::choice::divergences), names(part_estimators));
    return text.c_str();
}

std::string list_estimators() {
    std::string out;
    const auto table = [&](const std::string& title, const auto& lines) {
        out += (out.empty() ? "" : "\n") + title + ":\n";
        for (const auto& line : lines) out += fmt::format("  {:<18} {}\n", line.text, line.says);
    };
    table("--estimator, from dense logits of the teacher (a, b: --jsd-w, --jsd-o, --skew, --alpha)",
          opd::choice::divergences);
    table("--estimator, from a support or drawn tokens", part_estimators);
    const char* of_drawn = " (with --estimator mc or threshold)";
    table(std::string("--shape") + of_drawn, opd::choice::objectives);
    table(std::string("--surrogate") + of_drawn, opd::choice::surrogates);
    out += "\n--correction (with --estimator mc; S: PPO's clip, or what the line says):\n";
    for (const opd::correction_preset& p : opd::correction_presets)
        out += fmt::format("  {:<26} {}{}; {}\n", p.text, opd::says(p.which),
                           p.loss == opd::correction_loss::ppo_clip         ? ""
                           : p.loss == opd::correction_loss::score_function ? ", S = score_function"
                                                                            : ", S = unclipped_is",
                           p.source);
    table(std::string("--baseline") + of_drawn, opd::choice::baselines);
    table("--selector (a, b: --selector-a, --selector-b)", opd::choice::selectors);
    return out + "\nPairs that do not compose are refused with the reason.\n";
}

} // namespace trainer
