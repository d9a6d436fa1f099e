// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "study.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "gnuplot.hpp"

namespace variance_study {

namespace {

constexpr double floor_of_ratios = 1e-6;
constexpr double rounding = 1e-11; ///< a squared bias that floats leave: 3e-6 of the gradient

std::string number(double x) {
    if (std::isnan(x)) return "-";
    return fmt::format("{:.2g}", x);
}
std::string ratio_with_range(const cell& c) {
    const auto one = [](double x) {
        return x <= 1.0001 * floor_of_ratios ? std::string("<1e-6") : fmt::format("{:.2g}", x);
    };
    return fmt::format("{} ({} to {})", one(c.ratio), one(c.least), one(c.most));
}
/// Columns as wide as they must be: a table of markdown.
std::string markdown(const std::vector<std::vector<std::string>>& rows) {
    std::vector<std::size_t> widths(rows[0].size());
    for (const auto& row : rows)
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    std::string t;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        for (std::size_t i = 0; i < widths.size(); ++i) t += fmt::format("| {:<{}} ", rows[r][i], widths[i]);
        t += "|\n";
        if (r > 0) continue;
        for (const std::size_t w : widths) t += fmt::format("|{:-<{}}", "", w + 2);
        t += "|\n";
    }
    return t;
}

} // namespace

void write_file(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    if (!file.flush()) throw std::runtime_error(fmt::format("cannot write {}", path));
}

study::study(const study_settings& s, opd::thread_team& team) : s_(s), all_(contenders()) {
    for (int f = 0; f < 4; ++f)
        for (int h = 0; h < int(s.entropies.size()); ++h)
            for (int p = 0; p < s.policies; ++p)
                for (int k = 0; k < int(s.staleness.size()); ++k)
                    places_.push_back({.family = f, .entropy = h, .age = k, .policy = p, .kl = 0, .chi2 = 0, .of = {}});
    const auto ages = std::ssize(s.staleness);
    team.run(std::ssize(places_) / ages, [&](index_t i, int) { // a policy and all its earlier versions
        const place& first = places_[std::size_t(i * ages)];
        const policy at = make_policy(s_.world, families[first.family], s_.entropies[std::size_t(first.entropy)],
                                      s_.staleness, s_.trials.seed, std::uint64_t(first.policy));
        const reals log_p = log_softmax(at.z);
        for (index_t k = 0; k < ages; ++k) {
            place& to = places_[std::size_t(i * ages + k)];
            const floats& mu = at.stale[std::size_t(k)];
            const reals log_mu = log_softmax(mu);
            to.kl = kl(log_p, log_mu), to.chi2 = chi2(log_p, log_mu);
            to.of = measure(all_, at, mu, s_.trials, std::uint64_t(i), s_.staleness[std::size_t(k)]);
        }
    });
    ratios_ = measure_ratios(team, s_.world, s_.ratios);
}

cell study::over(std::size_t which, int family, int entropy, int age) const {
    const contender& c = all_[which];
    const std::size_t plain = index(c.forward ? "forward_mc" : "mc");
    cell out{.least = 1e300};
    double logs = 0, log_errors = 0, variances = 0, bias2 = 0, bias2_errors = 0, zs = 0, z_errors = 0, along_zs = 0;
    int exact = 0, tested = 0, tested_along = 0;
    const bool draws = c.support == on_support::none;
    for (const place& at : places_) {
        if ((family >= 0 && at.family != family) || (entropy >= 0 && at.entropy != entropy) ||
            (age >= 0 && at.age != age))
            continue;
        const figures &f = at.of[which], &mc = at.of[plain];
        ++out.prefixes;
        const double raw = f.variance / mc.variance, ratio = std::max(raw, floor_of_ratios);
        logs += std::log(ratio), out.least = std::min(out.least, ratio), out.most = std::max(out.most, ratio);
        if (draws && which != plain && raw > floor_of_ratios) {
            const double own = f.variance_error / f.variance, its = mc.variance_error / mc.variance;
            log_errors += own * own + its * its; // as if independent: no less than it is
        }
        variances += std::log(std::max(f.variance, 1e-30));
        const bool known = !std::isnan(f.exact_bias2);
        exact += known, bias2 += known ? f.exact_bias2 : f.bias2;
        out.along += f.along, out.distinct += f.distinct;
        if (!known) bias2_errors += f.bias2_error * f.bias2_error;
        if (f.bias2_error > rounding) { // each policy by the size of its own noise
            const double error = f.bias2_error / f.variance;
            ++tested, zs += f.bias2 / f.variance, z_errors += error * error;
        }
        if (f.along_error > 3e-6) ++tested_along, along_zs += (f.along - 1) / f.along_error; // more than floats round
    }
    const double n = out.prefixes;
    out.ratio = draws ? std::exp(logs / n) : 0;
    if (!draws) out.least = out.most = 0;
    out.ratio_error = std::sqrt(log_errors) / n;
    out.variance = draws ? std::exp(variances / n) : 0;
    out.bias = std::sqrt(std::max(0.0, bias2 / n)), out.bias_is_exact = exact == out.prefixes;
    out.bias_most = std::sqrt(std::max(0.0, bias2 / n) + 2 * std::sqrt(bias2_errors) / n);
    if (tested > 0) out.bias_z = zs / std::sqrt(z_errors);
    if (tested_along > 0) out.along_z = along_zs / std::sqrt(tested_along);
    out.along /= n, out.distinct /= n;
    return out;
}

double study::kl_of(int family, int entropy, int age) const {
    double sum = 0;
    int n = 0;
    for (const place& at : places_)
        if ((family < 0 || at.family == family) && (entropy < 0 || at.entropy == entropy) && at.age == age)
            sum += at.kl, ++n;
    return sum / n;
}

std::size_t study::index(const std::string& name) const {
    const auto at = std::find_if(all_.begin(), all_.end(), [&](const contender& c) { return c.name == name; });
    if (at == all_.end()) throw std::runtime_error(fmt::format("no contender is called {}", name));
    return std::size_t(at - all_.begin());
}

std::string study::prefixes_csv() const {
    std::string t = "family,entropy,policy,staleness,kl_p_mu,chi2_p_mu,estimator,target,variance,variance_error,"
                    "ratio,bias2,bias2_error,bias2_enumerated,along,along_error,ids_scored\n";
    for (const place& at : places_)
        for (std::size_t i = 0; i < all_.size(); ++i) {
            const figures &f = at.of[i], &mc = at.of[index(all_[i].forward ? "forward_mc" : "mc")];
            t += fmt::format(
                "{},{},{},{},{:.4g},{:.4g},{},{},{:.5g},{:.2g},{:.4g},{:.4g},{:.2g},{:.4g},{:.5g},{:.2g},{:.4g}\n",
                name_of(families[at.family]), s_.entropies[std::size_t(at.entropy)], at.policy,
                s_.staleness[std::size_t(at.age)], at.kl, at.chi2, all_[i].name,
                all_[i].forward ? "forward_kl" : "reverse_kl", f.variance, f.variance_error, f.variance / mc.variance,
                f.bias2, f.bias2_error, f.exact_bias2, f.along, f.along_error, f.distinct);
        }
    return t;
}

std::string study::cells_csv() const {
    std::string t = "family,entropy,staleness,kl_p_mu,estimator,target,unbiased,policies,ratio,ratio_least,ratio_most,"
                    "ratio_error,variance,bias,bias_from,bias_z,along,along_z,ids_scored\n";
    for (int f = -1; f < 4; ++f)
        for (int h = 0; h < int(s_.entropies.size()); ++h)
            for (int k = 0; k < int(s_.staleness.size()); ++k)
                for (std::size_t i = 0; i < all_.size(); ++i) {
                    const contender& c = all_[i];
                    const cell x = over(i, f, h, k);
                    t += fmt::format("{},{},{},{:.4g},{},{},{},{},{:.4g},{:.4g},{:.4g},{:.2g},{:.4g},{:.4g},{},{:.3g},{"
                                     ":.5g},{:.3g},{:.4g}\n",
                                     f < 0 ? "all" : name_of(families[f]), s_.entropies[std::size_t(h)],
                                     s_.staleness[std::size_t(k)], kl_of(f, h, k), c.name,
                                     c.forward ? "forward_kl" : "reverse_kl",
                                     c.unbiased       ? "always"
                                     : c.unbiased_now ? "fresh"
                                                      : "no",
                                     x.prefixes, x.ratio, x.least, x.most, x.ratio_error, x.variance, x.bias,
                                     c.support != on_support::none || x.bias_is_exact ? "enumeration" : "trials",
                                     x.bias_z, x.along, x.along_z, x.distinct);
                }
    return t;
}

std::string study::ratios_csv() const {
    std::string t = "m,one_over_m,local,local_error,local_threshold,local_threshold_error,seq_fixed,seq_fixed_error,"
                    "seq_mixed,seq_mixed_error,seq_mixed_expected,seq_prompts,seq_prompts_error,seq_prompts_expected\n";
    for (const ratios& r : ratios_.all)
        t += fmt::format(
            "{},{:.6g},{:.5g},{:.2g},{:.5g},{:.2g},{:.5g},{:.2g},{:.5g},{:.2g},{:.5g},{:.5g},{:.2g},{:.5g}\n", r.m,
            1.0 / r.m, r.local.value, r.local.error, r.threshold.value, r.threshold.error, r.fixed.value, r.fixed.error,
            r.mixed.value, r.mixed.error, r.mixed_expected, r.prompts.value, r.prompts.error, r.prompts_expected);
    return t;
}

std::string study::tables() const {
    using rows = std::vector<std::vector<std::string>>;
    const int entropies = int(s_.entropies.size()), ages = int(s_.staleness.size());
    std::string t =
        "## Variance\n\nVariance of the gradient at 64 ids that the teacher scores, relative to 64 i.i.d. "
        "draws with IS (of the same objective); geometric mean over policies and ages, in brackets the least "
        "and the most. Unbiased estimators.\n";
    for (int f = 0; f < 4; ++f) {
        rows r{{std::string(name_of(families[f])) + ": nats"}};
        for (const double h : s_.entropies) r[0].push_back(number(h));
        for (std::size_t i = 0; i < all_.size(); ++i) {
            const contender& c = all_[i];
            if (!c.unbiased || c.name == "mc" || c.name == "forward_mc") continue;
            r.push_back({c.says + (c.knows_value ? " *" : "")});
            for (int h = 0; h < entropies; ++h) r.back().push_back(ratio_with_range(over(i, f, h, -1)));
        }
        t += fmt::format("\n{}", markdown(r));
    }
    t += "\n* is told E_p[A], which 64 ids do not say: a bound.\n\n## Variance by age\n\nthreshold(64), all families; "
         "KL(p|mu) beside it.\n\n";
    {
        rows r{{"age"}};
        for (const double h : s_.entropies) r[0].push_back(number(h) + " nats");
        for (int k = 0; k < ages; ++k) {
            r.push_back({fmt::format("{}", s_.staleness[std::size_t(k)])});
            for (int h = 0; h < entropies; ++h)
                r.back().push_back(fmt::format("{}; KL {:.2g}", ratio_with_range(over(index("threshold"), -1, h, k)),
                                               kl_of(-1, h, k)));
        }
        t += markdown(r);
    }
    t += "\n## Bias\n\nDistance of the mean gradient from the dense one, relative to its norm; root mean square over "
         "all "
         "policies. By enumeration, or from the trials (~; <: less than that, if any). At age 0 and at the oldest; "
         "beside it the variance of one "
         "row, relative to the square of the same norm.\n";
    for (const int k : {0, ages - 1}) {
        rows r{{fmt::format("age {}: nats", s_.staleness[std::size_t(k)])}};
        for (const double h : s_.entropies) r[0].push_back(number(h));
        for (std::size_t i = 0; i < all_.size(); ++i) {
            const contender& c = all_[i];
            if (c.unbiased) continue;
            r.push_back({c.says});
            for (int h = 0; h < entropies; ++h) {
                const cell x = over(i, -1, h, k);
                const bool measured = c.support == on_support::none && !x.bias_is_exact;
                r.back().push_back(measured && x.bias_z < 3
                                       ? fmt::format("< {:.1g}", x.bias_most)
                                       : fmt::format("{}{:.2g}", measured ? "~" : "", x.bias < 3e-6 ? 0 : x.bias));
                if (c.support == on_support::none) r.back().back() += fmt::format(" var {:.2g}", x.variance);
            }
        }
        t += fmt::format("\n{}", markdown(r));
    }
    t += "\n## Are the unbiased ones unbiased?\n\nThe largest distance of a measured bias from 0, in standard errors, "
         "over families, entropies and ages "
         "(one cell each).\n\n";
    rows z{{"estimator", "|bias|^2", "along the gradient"}};
    for (std::size_t i = 0; i < all_.size(); ++i) {
        if (!all_[i].unbiased) continue;
        double worst = 0, worst_along = 0;
        for (int f = 0; f < 4; ++f)
            for (int h = 0; h < entropies; ++h)
                for (int k = 0; k < ages; ++k) {
                    const cell x = over(i, f, h, k);
                    if (std::abs(x.bias_z) > std::abs(worst)) worst = x.bias_z;
                    if (std::abs(x.along_z) > std::abs(worst_along)) worst_along = x.along_z;
                }
        z.push_back({all_[i].says, fmt::format("{:.1f}", worst), fmt::format("{:.1f}", worst_along)});
    }
    t += markdown(z);
    t += fmt::format("\n{} cells each: of so many normal numbers the largest is about {:.1f}.\n", 4 * entropies * ages,
                     std::sqrt(2 * std::log(2.0 * 4 * entropies * ages)));

    t += "\n## m draws a token\n\nVariance of the loss that m draws leave of one's (AsyncOPD eq. 16, 17). R_seq with "
         "fixed paths, and over "
         "sequences with paths of their own: walks over 48 prefixes of all kinds, and within groups of "
         "hard and easy ones; in brackets what enumeration expects.\n\n";
    rows r{{"m", "1/m", "R_local", "R_local of threshold(m)", "R_seq, paths fixed", "R_seq, over walks",
            "R_seq, over prompts"}};
    const auto with_error = [](ratio x) { return fmt::format("{:.3g} +- {:.1g}", x.value, x.error); };
    for (const ratios& x : ratios_.all)
        r.push_back({fmt::format("{}", x.m), fmt::format("{:.3g}", 1.0 / x.m), with_error(x.local),
                     with_error(x.threshold), with_error(x.fixed),
                     fmt::format("{} ({:.3g})", with_error(x.mixed), x.mixed_expected),
                     fmt::format("{} ({:.3g})", with_error(x.prompts), x.prompts_expected)});
    t += markdown(r);
    const auto share = [](double left) { return (left - 1.0 / 64) / (1 - 1.0 / 64); };
    t += fmt::format("\nOf one draw's variance over sequences {:.2g} (walks) and {:.2g} (prompts) lie between paths, "
                     "where no draw reaches. The "
                     "paper's .112 at m = 64 is what {:.2g} between paths makes; with paths fixed, as its text says, "
                     "it would be {:.3g}.\n",
                     ratios_.mixed_between, ratios_.prompts_between, share(0.112), 1.0 / 64);

    t += "\n## The bars\n\nthreshold(64) relative to MC-64 with IS, geometric mean over policies and ages.\n\n";
    rows bars{{"nats", "bar", "zipf", "gaussian", "model_like", "spike", "all"}};
    for (const auto& [nats, bar] : {std::pair{5.8, 0.5}, std::pair{3.0, 0.06}, std::pair{1.0, 0.001}}) {
        const auto at = std::find(s_.entropies.begin(), s_.entropies.end(), nats);
        if (at == s_.entropies.end()) continue;
        bars.push_back({number(nats), number(bar)});
        for (const int f : {0, 1, 2, 3, -1}) {
            const cell x = over(index("threshold"), f, int(at - s_.entropies.begin()), -1);
            bars.back().push_back(ratio_with_range(x) + (x.ratio <= bar ? ": reached" : ": NOT reached"));
        }
    }
    return t + markdown(bars);
}

std::string study::plots(const std::string& directory) const {
    const int entropies = int(s_.entropies.size()), ages = int(s_.staleness.size());
    const auto run = [&](const std::string& name, const std::string& script) {
        write_file(directory + "/" + name + ".gnuplot", script);
        return examples::run_gnuplot(directory, name + ".gnuplot");
    };
    const auto begin = [](const std::string& name, const std::string& title) {
        return fmt::format("set terminal svg size 1100,560 background rgb 'white'\nset output '{}.svg'\n", name) +
               fmt::format(
                   "set multiplot layout 1,2 title \"{}\"\nset grid\nset key below maxrows 5\nset format y '%g'\n",
                   title);
    };
    const auto curve = [](const std::string& name, const std::string& points) {
        return fmt::format("${} << EOD\n{}EOD\n", name, points);
    };

    std::string script =
        begin("variance-budget", "Variance of the gradient at 64 scored ids, relative to MC-64 with IS");
    script += "set logscale y\nset xlabel 'entropy of the student, nats'\nset yrange [1e-6:10]\n";
    for (const int f : {0, 3}) {
        std::string plots;
        for (const char* name :
             {"mc_leave_one_out", "mc_minimum_variance", "mc_distinct", "head_32_tail_32", "gumbel_top", "threshold"}) {
            std::string points;
            for (int h = 0; h < entropies; ++h) {
                const cell c = over(index(name), f, h, -1);
                points += fmt::format("{} {} {} {}\n", s_.entropies[std::size_t(h)], c.ratio, c.least, c.most);
            }
            const std::string data = fmt::format("f{}_{}", f, name);
            script += curve(data, points);
            plots += fmt::format("{}${} using 1:2 with linespoints lw 2 title \"{}\"", plots.empty() ? "" : ", ", data,
                                 all_[index(name)].says);
            if (std::string(name) == "threshold")
                plots += fmt::format(", ${} using 1:2:3:4 with yerrorbars lt 8 notitle", data);
        }
        script += fmt::format("set title '{}'\nplot {}\n",
                              f == 0 ? "Zipf-like policies" : "one token above a wide tail", plots);
    }
    const std::string first = run("variance-budget", script + "unset multiplot\n");

    script = begin("variance-bias", "What does not average out");
    const int middle = std::min(entropies - 1, entropies / 2);
    script += fmt::format("set logscale y\nset xlabel 'versions since the rollout + 1'\nset logscale x 2\nset title "
                          "'|bias| / |dense gradient|, {} nats'\n",
                          s_.entropies[std::size_t(middle)]);
    std::string plots;
    for (const char* name : {"mc_uncorrected", "mc_old", "mc_ppo", "mc_truncated", "mc_cispo", "mc_decoupled",
                             "mc_estr", "stale_tail_bucket", "top_tail_bucket"}) {
        std::string points;
        for (int k = 0; k < ages; ++k) {
            const double bias = over(index(name), -1, middle, k).bias;
            if (bias > 1e-5) points += fmt::format("{} {}\n", s_.staleness[std::size_t(k)] + 1, bias);
        }
        if (points.empty()) continue;
        script += curve(name, points);
        const bool nine = std::string(name) == "top_tail_bucket"; // gnuplot has eight colours
        plots += fmt::format("{}${} using 1:2 with linespoints lw 2 {} title \"{}\"", plots.empty() ? "" : ", ", name,
                             nine ? "lc 'gray40'" : "", all_[index(name)].says);
    }
    script += fmt::format("plot {}", plots) + "\nset logscale x 2\nset xlabel 'm'\n"
                                              "set title 'variance that m draws leave of one (AsyncOPD, eq. 16, 17)'\n";
    std::string points;
    for (const ratios& r : ratios_.all)
        points += fmt::format("{} {} {} {} {} {}\n", r.m, r.local.value, r.threshold.value, r.fixed.value,
                              r.mixed.value, r.prompts.value);
    script +=
        curve("m", points) +
        "plot $m using 1:2 with linespoints lw 2 title 'R local', $m using 1:3 with linespoints lw 2 title "
        "'R local of threshold(m)', $m using 1:4 with points lw 2 title 'R seq, paths fixed', $m using 1:5 with "
        "linespoints lw 2 title 'R seq over walks', $m using 1:6 with linespoints lw 2 title 'R seq over prompts', "
        "1/x lc 'grey' title '1/m'\n";
    const std::string second = run("variance-bias", script + "unset multiplot\n");
    return first.empty() ? second : first;
}

} // namespace variance_study
