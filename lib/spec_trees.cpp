// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rates, trees of drafts and budgets.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "opd/spec/draft_budget.hpp"
#include "opd/spec/draft_tree.hpp"
#include "spec.hpp"
#include "spec_costs.hpp"

namespace spec = opd::spec;

struct opd_follow_rates : opd_c::one_at_a_time<spec::follow_rates> {
    using one_at_a_time::one_at_a_time;
};

struct opd_draft_tree {
    std::mutex turn; // before that of rates
    spec::draft_builder value;
    std::shared_ptr<opd_follow_rates> rates; // of the last begin: the builder reads them
};

namespace {

using namespace opd_c;
constexpr index_t most_imagined = index_t{1} << 22; // nodes

int cell_of(int32_t* cell, auto&& make) {
    return guarded([&] {
        need("cell", cell);
        *cell = make();
    });
}

/// body(builder) of a tree that has begun, while nobody changes its rates.
template <class Body>
auto on_tree(opd_draft_tree* tree, Body&& body) {
    return in_turn("tree", tree, [&](opd_draft_tree& t) {
        if (t.rates == nullptr) refuse("tree", "has not begun: opd_draft_tree_begin gives it its rates");
        const std::lock_guard turn(t.rates->turn);
        return body(t.value);
    });
}

spec::draft_law law_of(const opd_draft_law* of) {
    const opd_draft_law l = read("law", of, true);
    need_zero("law.reserved", l.reserved == 0, "it has no meaning yet");
    spec::draft_law to;
    to.greedy = flag("law.greedy", l.greedy);
    if (to.greedy) {
        constexpr const char* why = "a greedy law has neither filter nor noise";
        need_zero("law.position", l.position == 0, why);
        need_zero("law.seed", l.seed == 0, why);
        need_zero("law.sample", l.sample == 0, why);
        need_zero("law.top_k", l.top_k == 0, why);
        need_zero("law.temperature", l.temperature == 0, why);
        need_zero("law.top_p", l.top_p == 0, why);
        need_zero("law.min_p", l.min_p == 0, why);
        return to;
    }
    to.filter = {.temperature = or_default(l.temperature, 1.f),
                 .top_k = l.top_k,
                 .top_p = or_default(l.top_p, 1.f),
                 .min_p = l.min_p};
    opd::detail::check_filter(to.filter, "law");
    to.seed = l.seed, to.sample = l.sample, to.position = l.position;
    return to;
}

/// body(vector_view) of a row of logits, whatever their type.
template <class Body>
index_t with_logits(const char* name, const DLTensor* t, Body&& body) {
    need(name, t);
    switch (type_of(*t)) {
    case dtype::float32:
        return body(vector<const float>(name, t));
    case dtype::float64:
        return body(vector<const double>(name, t));
    case dtype::bfloat16:
        return body(vector<const opd::bfloat16>(name, t));
    case dtype::half:
        return body(vector<const opd::half>(name, t));
    default:
        detail::refuse_type(name, *t, "float32, float64, bfloat16 or float16");
    }
}

std::vector<double> doubles_of(const char* name, const DLTensor* t) {
    const opd::vector_view<const double> v = vector<const double>(name, t);
    return {v.data, v.data + v.size};
}

} // namespace

extern "C" {

int opd_follow_rates_create(const opd_follow_rates_options* options, opd_follow_rates** out) {
    return create(out, [&] {
        const opd_follow_rates_options o = read("options", options, true);
        return of_member("options", [&] {
            return std::make_shared<opd_follow_rates>(
                spec::follow_rates_options{or_default(o.memory, 200.0), or_default(o.prior_weight, 4.0)});
        });
    });
}
void opd_follow_rates_destroy(opd_follow_rates* rates) { handles<opd_follow_rates>().remove(rates); }

int opd_follow_rates_by_rank(int32_t depth, int32_t rank, double gap, int32_t* cell) {
    return cell_of(cell, [&] {
        if (!(gap >= 0)) refuse("gap", "must be at least 0");
        return spec::follow_rates::by_rank(within("depth", depth, 1, INT32_MAX), within("rank", rank, 0, INT32_MAX),
                                           gap);
    });
}
int opd_follow_rates_by_match(int32_t depth, int32_t matched, int32_t* cell) {
    return cell_of(cell, [&] {
        return spec::follow_rates::by_match(within("depth", depth, 1, INT32_MAX),
                                            within("matched", matched, 1, INT32_MAX));
    });
}
int opd_follow_rates_any_gap(int32_t depth, int32_t rank, int32_t* cell) {
    return cell_of(cell, [&] {
        return spec::follow_rates::any_gap(within("depth", depth, 1, INT32_MAX), within("rank", rank, 0, INT32_MAX));
    });
}
int opd_follow_rates_of(opd_follow_rates* rates, int32_t cell, double* rate, double* tried) {
    return guarded([&] {
        in_turn("rates", rates, [&](opd_follow_rates& r) {
            const double is = r.value.rate(cell), trials = r.value.tried(cell);
            if (rate != nullptr) *rate = is;
            if (tried != nullptr) *tried = trials;
        });
    });
}
int opd_follow_rates_learn(opd_follow_rates* rates, int32_t cell, int followed) {
    return guarded([&] {
        const bool yes = flag("followed", followed);
        in_turn("rates", rates, [&](opd_follow_rates& r) { r.value.learn(cell, yes); });
    });
}
int opd_follow_rates_snapshot(opd_follow_rates* rates, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("rates", rates,
                [&](opd_follow_rates& r) { write_snapshot("follow_rates", r.value, bytes, size, length); });
    });
}
int opd_follow_rates_restore(opd_follow_rates* rates, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("rates", rates, [&](opd_follow_rates& r) {
            spec::follow_rates anew(r.value.options());
            read_snapshot("follow_rates", anew, bytes, size);
            r.value = std::move(anew);
        });
    });
}

int opd_draft_tree_create(opd_draft_tree** out) {
    return create(out, [] { return std::make_shared<opd_draft_tree>(); });
}
void opd_draft_tree_destroy(opd_draft_tree* tree) { handles<opd_draft_tree>().remove(tree); }

int opd_draft_tree_begin(opd_draft_tree* tree, opd_follow_rates* rates) {
    return guarded([&] {
        auto held = handles<opd_follow_rates>().of("rates", rates);
        in_turn("tree", tree, [&](opd_draft_tree& t) {
            t.value.begin(held->value);
            t.rates.swap(held); // the last ones are freed after the turn
        });
    });
}
int opd_draft_tree_grow(opd_draft_tree* tree, int64_t parent, const DLTensor* z, const opd_draft_law* law,
                        int64_t top_k, int64_t* count) {
    return guarded([&] {
        const spec::draft_law of = law_of(law);
        if (top_k < 1) refuse("top_k", "must be at least 1, not " + std::to_string(top_k));
        on_tree(tree, [&](spec::draft_builder& b) {
            if (parent != -1 && (parent < 0 || parent >= b.size()))
                refuse("parent", "there is no node " + std::to_string(parent));
            const index_t n = with_logits("z", z, [&](const auto& row) {
                return b.grow(parent, row, of, std::min(top_k, std::max<index_t>(row.size, 1)));
            });
            if (count != nullptr) *count = n;
        });
    });
}
int opd_draft_tree_graft(opd_draft_tree* tree, const DLTensor* chain, int32_t matched, int64_t* added) {
    return guarded([&] {
        const std::vector<std::int32_t> tokens = tokens_of("chain", chain);
        on_tree(tree, [&](spec::draft_builder& b) {
            const index_t n = b.graft(tokens, matched);
            if (added != nullptr) *added = n;
        });
    });
}
int opd_draft_tree_imagine(opd_draft_tree* tree, int32_t depth, int64_t top_k) {
    return guarded([&] {
        within("depth", depth, 0, INT32_MAX);
        if (top_k < 1) refuse("top_k", "must be at least 1, not " + std::to_string(top_k));
        // top_k children of at most top_k nodes of each depth
        if (top_k > most_imagined || (depth > 0 && top_k * top_k > most_imagined / depth))
            refuse("top_k", "makes a tree of more than 2^22 nodes");
        on_tree(tree, [&](spec::draft_builder& b) { b.imagine(depth, top_k); });
    });
}
int opd_draft_tree_size(opd_draft_tree* tree, int64_t* size) {
    return guarded([&] {
        need("size", size);
        on_tree(tree, [&](spec::draft_builder& b) { *size = b.size(); });
    });
}
int opd_draft_tree_node(opd_draft_tree* tree, int64_t node, opd_draft_node* out) {
    return guarded([&] {
        need("out", out);
        on_tree(tree, [&](spec::draft_builder& b) {
            *out = {b.parent(node), b.reach(node), b.token(node), b.depth(node)};
        });
    });
}
int opd_draft_tree_best_of_depth(opd_draft_tree* tree, int32_t depth, int64_t* nodes, int64_t most, int64_t* count) {
    return guarded([&] {
        need("nodes", nodes);
        need("count", count);
        if (most < 0) refuse("most", "is " + std::to_string(most));
        on_tree(tree, [&](spec::draft_builder& b) {
            std::vector<index_t> found(static_cast<std::size_t>(std::min(most, b.size())));
            *count = b.best_of_depth(depth, found);
            std::copy_n(found.begin(), *count, nodes);
        });
    });
}
int opd_draft_tree_gains(opd_draft_tree* tree, double* gains, int64_t size) {
    return guarded([&] {
        on_tree(tree, [&](spec::draft_builder& b) {
            if (size != b.size())
                refuse("size", "is " + std::to_string(size) + "; the tree has " + std::to_string(b.size()) + " nodes");
            if (size > 0) need("gains", gains);
            std::ranges::copy(b.gains(), gains);
        });
    });
}
int opd_draft_tree_select(opd_draft_tree* tree, int64_t verify, const DLTensor* tokens, const DLTensor* parents,
                          const DLTensor* nodes, int64_t* count) {
    return guarded([&] {
        if (verify < 0) refuse("verify", "must be at least 0, not " + std::to_string(verify));
        on_tree(tree, [&](spec::draft_builder& b) {
            const index_t n = std::min(verify, b.size());
            const auto room = [n](const char* name, const DLTensor* t) -> std::optional<integers> {
                if (t == nullptr) return std::nullopt;
                integers to(name, t);
                if (to.size() < n)
                    refuse(name, "has room for " + std::to_string(to.size()) + " of " + std::to_string(n) + " entries");
                return to;
            };
            const auto t = room("tokens", tokens), p = room("parents", parents), c = room("nodes", nodes);
            const spec::draft_tree chosen = b.select(verify);
            for (index_t i = 0; i < n; ++i) {
                const auto at = static_cast<std::size_t>(i);
                if (t) t->set(i, chosen.tokens[at]);
                if (p) p->set(i, chosen.parents[at]);
                if (c) c->set(i, b.chosen()[at]);
            }
            if (count != nullptr) *count = n;
        });
    });
}
int opd_draft_tree_learn(opd_draft_tree* tree, opd_follow_rates* rates, const opd_verdict* verdict) {
    return guarded([&] {
        need("verdict", verdict);
        const spec::verdict v{verdict->accepted, verdict->node, verdict->next};
        const auto learnt = handles<opd_follow_rates>().of("rates", rates);
        in_turn("tree", tree, [&](opd_draft_tree& t) {
            if (t.rates == nullptr) refuse("tree", "has not begun: opd_draft_tree_begin gives it its rates");
            const std::lock_guard turn(learnt->turn);
            t.value.learn(learnt->value, v);
        });
    });
}

int opd_step_seconds(const opd_cost_point* points, int64_t count, int64_t rows, double* seconds) {
    return guarded([&] {
        need("seconds", seconds);
        within("rows", rows, 0, std::int64_t{1} << 40);
        *seconds = cost_of("points", array("points", points, count, "count")).seconds(rows);
    });
}

int opd_draft_budget_share(const opd_draft_budget* budget, const DLTensor* shares, double* value) {
    return guarded([&] {
        const opd_draft_budget b = read("budget", budget);
        need_zero("budget.reserved", b.reserved == 0, "it has no meaning yet");
        const bool all_alike = flag("budget.all_alike", b.all_alike);
        if (all_alike) need_zero("budget.tail", b.tail == 0, "all sequences are alike");
        const std::vector<double> gains = doubles_of("budget.gains", b.gains),
                                  given = doubles_of("budget.remaining", b.remaining);
        const integers offsets("budget.offsets", b.offsets);
        const index_t n = check_offsets("budget.offsets", offsets, static_cast<index_t>(gains.size()));
        if (b.remaining != nullptr && static_cast<index_t>(given.size()) != n)
            refuse("budget.remaining",
                   "has " + std::to_string(given.size()) + " entries for " + std::to_string(n) + " sequences");
        const integers to("shares", shares);
        if (to.size() != n)
            refuse("shares", "has " + std::to_string(to.size()) + " entries for " + std::to_string(n) + " sequences");
        std::vector<spec::draft_candidate> sequences;
        for (index_t s = 0; s < n; ++s)
            sequences.push_back({std::span(gains).subspan(static_cast<std::size_t>(offsets[s]),
                                                          static_cast<std::size_t>(offsets[s + 1] - offsets[s])),
                                 given.empty() ? 1.0 : given[static_cast<std::size_t>(s)]});
        const spec::step_cost cost =
            cost_of("budget.cost", array("budget.cost", b.cost, b.cost_count, "budget.cost_count"));
        spec::draft_budget memory;
        const std::span<const index_t> found = of_member("budget", [&] {
            return memory.share(sequences, cost,
                                {.tail = all_alike ? 0 : or_default(b.tail, 1.0),
                                 .most_rows = b.most_rows,
                                 .draft_seconds = b.draft_seconds,
                                 .seconds_per_node = b.seconds_per_node});
        });
        for (index_t s = 0; s < n; ++s) to.set(s, found[static_cast<std::size_t>(s)]);
        if (value != nullptr) *value = memory.value();
    });
}

} // extern "C"
