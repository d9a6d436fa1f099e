// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Estimators chosen at run time: the same bits as the static form for every objective, surrogate and baseline, row by
// row; every pair of an objective and a surrogate on both engines against that row and a pullback in double; refusals
// in the static form's sentences; the tables are whole.
#include "backends/both_engines.hpp"
#include "support/drawn.hpp"

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <opd/estimators/any.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 7;

any_objective with_parameters(choice::objective which) {
    if (which == choice::objective::jsd) return {which, .3, .6};
    if (which == choice::objective::with_outside) return {which, .5, 2};
    return {which, .7, 1};
}
any_surrogate with_bounds(choice::surrogate which) {
    any_surrogate s{.which = which, .low = .1, .high = .3};
    if (which == choice::surrogate::truncated_is || which == choice::surrogate::decoupled_ppo) s.cap = 1.2;
    return s;
}
/// What all columns hold.
void fill(const policies& w, sampled_entry& x, entry_facts& facts) {
    const auto v = std::size_t(x.id);
    x.log_prox = w.log_mu[v] * 0.9, x.log_ref = w.log_mu[v] * 1.1, x.outside = 0.3 * double(v) - 1;
    facts.age = 3, facts.baseline = 0.4, facts.mu_entropy = 0.8;
    facts.has_sequence = true, facts.sequence_log_ratio = 0.05;
}
bool same(const drawn_mean& a, const drawn_mean& b) { return a.loss == b.loss && a.dz == b.dz; }

} // namespace

TEST_CASE("the static form's bits") {
    const policies w(vocab, 3, true);
    const std::vector<std::int64_t> ids{4, 1, 4};
    const fill_in columns = [&](sampled_entry& x, entry_facts& facts) { fill(w, x, facts); };
    const auto row = [&](const auto& e) { return drawn_row(w, law::stale, ids, e, columns); };
    for (const auto& line : choice::objectives) {
        CAPTURE(line.text);
        const any_objective of = with_parameters(line.which);
        of.validate();
        of.visit([&](auto objective) {
            CHECK(same(row(any_sampled{.of = of}), row(mc{objective})));
            CHECK(same(row(any_sampled{.of = of, .surrogate = with_bounds(choice::surrogate::ppo_clip)}),
                       row(mc{objective, ppo_clip{.1, .3}})));
            const any_sampled e{.of = of};
            CHECK(e.reads_columns() == mc{objective}.reads_columns());
            CHECK(e.infinite_where_teacher_zero() == mc{objective}.infinite_where_teacher_zero());
            CHECK(e.infinite_where_student_zero() == mc{objective}.infinite_where_student_zero());
            for (const law drawn : {law::stale, law::on_policy}) {
                const auto a = e.traits_under(drawn), b = decltype(mc{objective})::traits(drawn);
                CHECK(a.mean == b.mean);
                CHECK(a.value == b.value);
                CHECK(a.descends == b.descends);
                CHECK(a.exact_zero_at_equality == b.exact_zero_at_equality);
            }
        });
    }
    for (const auto& line : choice::surrogates) {
        CAPTURE(line.text);
        const any_surrogate chosen = with_bounds(line.which);
        chosen.visit([&](auto s) {
            const any_sampled e{.surrogate = chosen, .baseline = {choice::baseline::none}};
            const mc<reverse_kl, decltype(s), baseline::none> fixed{{}, s};
            CHECK(same(row(e), row(fixed)));
            CHECK(e.reads_columns() == fixed.reads_columns());
            CHECK(e.traits_under(law::stale).descends == decltype(fixed)::traits(law::stale).descends);
            CHECK(e.traits_under(law::on_policy).mean == decltype(fixed)::traits(law::on_policy).mean);
            any_sampled masked = e;
            masked.surrogate.estr_tau = 0.05, masked.surrogate.estr_epsilon = 0.1;
            CHECK(same(row(masked), row(mc{reverse_kl{}, estr{0.05, 0.1, s}, baseline::exact_entries{}})));
            CHECK((masked.reads_columns() & column::mu_entropy) != 0);
        });
    }
    const auto with = [&](choice::baseline which, auto b) {
        const auto got = row(any_sampled{.baseline = {which}}), want = row(mc{.baseline = b});
        CHECK(same(got, want));
        CHECK(drawn_row(w, law::stale, {2}, any_sampled{.baseline = {which}}).seen.baseline_missing ==
              drawn_row(w, law::stale, {2}, mc{.baseline = b}).seen.baseline_missing);
    };
    with(choice::baseline::none, baseline::none{}), with(choice::baseline::exact_entries, baseline::exact_entries{});
    with(choice::baseline::leave_one_out, baseline::leave_one_out{}), with(choice::baseline::given, baseline::given{});
    with(choice::baseline::self_normalised, baseline::self_normalised{});
    with(choice::baseline::minimum_variance, baseline::minimum_variance{});
    CHECK(same(row(any_sampled{.weighting = {true}}), row(mc{.weighting = weighting::self_normalised{}})));
}

TEST_CASE("every objective with every surrogate on both engines") {
    constexpr index_t m = 3;
    const policies w(vocab, 6, true, 0.8F);
    const std::vector<std::int64_t> ids{4, 1, 4};
    std::vector<double> log_mu, log_q, log_prox, log_ref, outside;
    const double told = 0.4, entropy = 0.8, sequence = 0.05;
    for (const auto id : ids) {
        sampled_entry x{};
        entry_facts facts;
        x.id = id;
        fill(w, x, facts);
        log_mu.push_back(w.log_mu[std::size_t(id)]), log_q.push_back(w.log_q[std::size_t(id)]);
        log_prox.push_back(x.log_prox), log_ref.push_back(x.log_ref), outside.push_back(x.outside);
    }
    const auto at = [&](const std::vector<double>& x) { return view(x.data(), 1, m); };
    const teacher::samples<std::int64_t, double> cache{.ids = view(ids.data(), 1, m),
                                                       .log_mu = at(log_mu),
                                                       .log_q = at(log_q),
                                                       .log_prox = at(log_prox),
                                                       .log_ref = at(log_ref),
                                                       .advantage = at(outside),
                                                       .baseline = view(&told, 1),
                                                       .mu_entropy = view(&entropy, 1)};
    const std::vector<std::int32_t> versions{4};
    env e;
    e.versions = view(versions.data(), 1), e.version = 7;
    e.frozen.sequence_log_ratio = view(&sequence, 1);
    int ran = 0;
    on_both([&](auto& be, const char* engine) {
        for (const auto& objective : choice::objectives)
            for (const auto& surrogate : choice::surrogates) {
                const bool of_advantage = any_surrogate{surrogate.which}.has_advantage();
                if (objective.which != choice::objective::reverse_kl && !of_advantage) continue;
                any_sampled chosen{
                    .of = with_parameters(objective.which),
                    .surrogate = with_bounds(surrogate.which),
                    .baseline = {of_advantage ? choice::baseline::leave_one_out : choice::baseline::none},
                    .accept_bias = true};
                if (chosen.traits_under(law::stale).descends == descent::none) continue;
                INFO(engine << ": " << objective.text << ", " << surrogate.text);
                std::vector<double> dz(vocab, 9);
                const result r = evaluate(be,
                                          student::logits<double>{.z = view(w.z.data(), 1, vocab),
                                                                  .dz = view(dz.data(), 1, vocab),
                                                                  .temperature = w.temperature},
                                          cache, chosen, e);
                const drawn_mean want = drawn_row(w, law::stale, ids, chosen,
                                                  [&](sampled_entry& x, entry_facts& facts) { fill(w, x, facts); });
                CHECK(r.diagnostics.bad_rows == 0);
                CHECK(r.loss == doctest::Approx(want.loss).epsilon(1e-12));
                CHECK(distance(dz, want.dz) < 1e-12);
                ++ran;
            }
    });
    CHECK(ran >= 2 * (20 * 8 + 5)); // as many as there were when this was written: lists grow
}

TEST_CASE("a dense divergence by name is that divergence") {
    const policies w(40, 8, true);
    cpu_backend be;
    std::vector<double> dz(40, 9);
    const auto run = [&](const auto& d) {
        return evaluate(be, student::logits<double>{.z = view(w.z.data(), 1, 40), .dz = view(dz.data(), 1, 40)},
                        teacher::dense<double>{view(w.y.data(), 1, 40)}, d)
            .loss;
    };
    const auto by_name = [&](const char* name) {
        const any_dense chosen{choice::find(choice::divergences, name).value(), .3, .7};
        return chosen.visit([&](const auto& d) { return run(d); });
    };
    CHECK(by_name("reverse_kl") == run(reverse_kl{}));
    CHECK(by_name("forward_kl") == run(forward_kl{}));
    CHECK(by_name("jsd") == run(jsd{.w = .3, .o = .7}));
    CHECK(by_name("skew_forward_kl") == run(skew_forward_kl{.a = .3}));
    CHECK(by_name("skew_reverse_kl") == run(skew_reverse_kl{.a = .3}));
    CHECK(by_name("total_variation") == run(total_variation{}));
    CHECK(by_name("alpha_divergence") == run(alpha_divergence{.a = .3}));
    CHECK(by_name("chi_squared") == run(chi_squared{}));
    CHECK(by_name("acceptance") == run(acceptance{}));
    CHECK_THROWS_WITH_AS((any_dense{choice::objective::jsd, 2, .5}.visit([&](const auto& d) { return run(d); })),
                         doctest::Contains("jsd.w"), invalid_input);
}

TEST_CASE("refused with the static form's sentence, before anything is written") {
    const double z[] = {0, 1, 2}, log_mu = -1, log_q = -2;
    const std::int64_t id = 1;
    const teacher::samples<std::int64_t, double> cache{view(&id, 1, 1), view(&log_mu, 1, 1), view(&log_q, 1, 1)};
    const double weight = 1;
    const teacher::weighted<std::int64_t, double> entries{view(&id, 1, 1), view(&weight, 1, 1), view(&log_mu, 1, 1),
                                                          view(&log_q, 1, 1)};
    cpu_backend be;
    double dz[3] = {9, 9, 9};
    const student::logits<double> student{view(z, 1, 3), view(dz, 1, 3)};
    const auto refuses = [&](const char* sentence, const auto& on, const any_sampled& e) {
        CHECK_THROWS_WITH_AS(evaluate(be, student, on, e), doctest::Contains(sentence), invalid_input);
        CHECK(dz[0] == 9);
    };
    using choice::objective;
    using kind = choice::surrogate;
    refuses("descends nothing", teacher::on_policy{cache},
            {.surrogate = {kind::k1}, .baseline = {choice::baseline::none}});
    refuses("descends nothing", cache,
            {.surrogate = {kind::k1_ratio}, .baseline = {choice::baseline::none}, .accept_bias = true});
    refuses("descends something else", cache, {.surrogate = {kind::score_function}});
    refuses("descends something else", cache, {.of = {objective::old}});
    refuses("descends something else", cache, {.of = {objective::band, 5}});
    refuses("it has no advantage", teacher::on_policy{cache}, {.surrogate = {kind::k2}});
    refuses("it has no advantage", teacher::on_policy{cache},
            {.of = {objective::jsd, .5, .5}, .surrogate = {kind::k2}, .baseline = {choice::baseline::none}});
    refuses("does not read this cache", entries, {.baseline = {choice::baseline::leave_one_out}});
    refuses("does not read this cache", cache, {.baseline = {choice::baseline::value}});
    refuses("teacher.log_prox", cache, {.surrogate = {kind::decoupled_ppo}});
    refuses("env.frozen.sequence_log_ratio", cache, {.surrogate = {kind::gspo}});
    refuses("teacher.log_ref", cache, {.of = {objective::extrapolated, 2}});
    refuses("teacher.advantage", cache, {.of = {objective::outside}});
    refuses("teacher.baseline", cache, {.baseline = {choice::baseline::given}});
    refuses("teacher.mu_entropy", cache, {.surrogate = {.estr_tau = 1, .estr_epsilon = 1}});
    refuses("estr.epsilon", cache, {.surrogate = {.estr_tau = 1}});
    refuses("ppo_clip", cache, {.surrogate = {.which = kind::ppo_clip, .low = -1}});
    refuses("truncated_is.cap", cache, {.surrogate = {kind::truncated_is}});
    refuses("acceptance is of the whole row", cache, {.of = {objective::acceptance}});
    refuses("shape::clipped.a", cache, {.of = {objective::clipped, -1}});
    evaluate(be, student, teacher::on_policy{cache}, any_sampled{.surrogate = {kind::score_function}});
    CHECK(dz[0] != 9);
    evaluate(be, student, cache, any_sampled{.surrogate = {kind::score_function}, .accept_bias = true});
    evaluate(be, student, entries, any_sampled{.baseline = {choice::baseline::value}});
}

TEST_CASE("the tables: each name once, each choice once, found by name") {
    // `least`: as many as there were when this was written
    const auto check = [](const auto& table, std::size_t least) {
        std::set<std::string> names;
        std::set<int> kinds;
        for (const auto& line : table) {
            names.insert(std::string(line.text)), kinds.insert(int(line.which));
            CHECK(choice::find(table, line.text) == line.which);
            CHECK(!line.says.empty());
        }
        CHECK(table.size() >= least);
        CHECK(names.size() == table.size());
        CHECK(kinds.size() == table.size());
        CHECK(!choice::find(table, "no such thing"));
    };
    CHECK(choice::divergences.back().which == choice::objective::acceptance);
    check(choice::divergences, 9), check(choice::selectors, 6);
    for (const auto& line : choice::divergences) // all but the last are drawn tokens', too
        CHECK((choice::find(choice::objectives, line.text) == line.which) == (line.text != "acceptance"));
    any_dense{choice::divergences.back().which}.validate();
    CHECK_THROWS_WITH_AS(any_dense{choice::objective::clipped}.validate(), doctest::Contains("any_dense.which"),
                         invalid_input);
    check(choice::objectives, 20), check(choice::surrogates, 14), check(choice::baselines, 7);
}
