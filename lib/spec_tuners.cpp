// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tuners, the elastic switch and the drafter selector.
#include <memory>
#include <variant>
#include <vector>

#include "opd/spec/any_tuner.hpp"
#include "opd/spec/drafter_selector.hpp"
#include "spec.hpp"
#include "spec_costs.hpp"

namespace spec = opd::spec;

struct opd_tuner {
    std::mutex turn;
    const opd_c::tuner_kind kind;
    std::vector<spec::strategy> arms; // in the caller's order; a snapshot is of these
    spec::any_tuner value;
};
struct opd_elastic_switch : opd_c::one_at_a_time<spec::elastic_switch> {
    spec::elastic_switch::options_type options;
    explicit opd_elastic_switch(const spec::elastic_switch::options_type& o) : one_at_a_time(o), options(o) {}
};
struct opd_drafter_selector : opd_c::one_at_a_time<spec::drafter_selector> {
    using one_at_a_time::one_at_a_time;
};

namespace {

using namespace opd_c;
constexpr std::int32_t most_of_strategy = std::int32_t{1} << 30;
constexpr std::int32_t most_window = std::int32_t{1} << 24;
constexpr std::int64_t most_batch = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t most_drafters = std::int64_t{1} << 20;

spec::strategy strategy_of(const opd_strategy& s) { return {s.depth, s.top_k, s.verify}; }
opd_strategy of_cpp(const spec::strategy& s) { return {s.depth, s.top_k, s.verify}; }
index_t batch_of(std::int64_t batch) { return within("batch", batch, 1, most_batch); }

const char* name_of(tuner_kind kind) {
    for (const auto& line : tuners)
        if (line.which == kind) return line.text.data();
    return "";
}

/// The caller's options, of which each member is read by the tuners that have it and must be 0 for others.
struct reading {
    opd_tuner_options o;
    tuner_kind kind;

    template <class... Kinds>
    void of(const char* member, bool set, Kinds... kinds) const {
        if (set && !((kinds == kind) || ...))
            refuse(std::string("options.") + member, std::string("is set: ") + name_of(kind) + " has no such option");
    }
    void check() const {
        using enum tuner_kind;
        of("arms", o.arms != nullptr || o.arm_count != 0, beg_mab, published_beg_mab, ucb1, cost_profile);
        of("thresholds", o.thresholds != nullptr || o.threshold_count != 0, beg_mab, published_beg_mab, ucb1);
        of("epsilon", o.epsilon != 0, beg_mab, published_beg_mab);
        of("bonus", o.bonus != 0, ucb1);
        of("no_exploration", o.no_exploration != 0, beg_mab, published_beg_mab, ucb1);
        of("window", o.window != 0, beg_mab, published_beg_mab, ucb1);
        of("tries", o.tries != 0, beg_mab, published_beg_mab, ucb1);
        of("reward", o.reward != 0, beg_mab, ucb1);
        of("most_tokens", o.most_tokens != 0, beg_mab, ucb1, cost_profile);
        of("lines", o.lines != nullptr || o.line_count != 0, fixed_table);
        of("target", o.target != nullptr || o.target_count != 0, cost_profile);
        of("drafter", o.drafter != nullptr || o.drafter_count != 0, cost_profile);
        of("memory", o.memory != 0, cost_profile);
        of("doubt", o.doubt != 0, cost_profile);
    }

    std::vector<spec::strategy> arms() const {
        const auto given = array("options.arms", o.arms, o.arm_count, "options.arm_count");
        if (given.empty()) return spec::tuner_options{}.arms;
        std::vector<spec::strategy> to;
        for (const opd_strategy& s : given) {
            to.push_back(strategy_of(s));
            if (s.depth > most_of_strategy || s.top_k > most_of_strategy || s.verify > most_of_strategy)
                throw opd::invalid_input("options.arms", "depth, top_k and verify are at most 2^30",
                                         static_cast<index_t>(to.size()) - 1);
        }
        return to;
    }
    spec::tuner_options bandit() const {
        spec::tuner_options to;
        to.arms = arms();
        const auto t = array("options.thresholds", o.thresholds, o.threshold_count, "options.threshold_count");
        if (!t.empty()) to.thresholds.assign(t.begin(), t.end());
        const bool still = flag("options.no_exploration", o.no_exploration);
        if (still) {
            need_zero("options.epsilon", o.epsilon == 0, "no_exploration says that it is none");
            need_zero("options.bonus", o.bonus == 0, "no_exploration says that it is none");
        }
        to.epsilon = still ? 0 : or_default(o.epsilon, to.epsilon);
        to.bonus = still ? 0 : or_default(o.bonus, to.bonus);
        to.window = or_default(within("options.window", o.window, 0, most_window), to.window);
        to.tries = or_default(o.tries, to.tries);
        to.most_tokens = o.most_tokens;
        to.reward =
            one_of("options.reward", o.reward, {spec::reward_kind::per_sequence, spec::reward_kind::tokens_per_second});
        return to;
    }
    spec::fixed_table table() const {
        std::vector<spec::fixed_table::line> to;
        for (const opd_table_line& l : array("options.lines", o.lines, o.line_count, "options.line_count")) {
            const spec::strategy s = strategy_of(l.strategy);
            if (s.depth < 0 || s.top_k < 0 || s.verify < 0)
                throw opd::invalid_input("options.lines", "depth, top_k and verify are at least 0",
                                         static_cast<index_t>(to.size()));
            to.push_back({l.batch, s});
        }
        return spec::fixed_table(std::move(to));
    }
    spec::cost_profile profile() const {
        spec::cost_profile_options to;
        to.arms = arms();
        if (const auto p = array("options.target", o.target, o.target_count, "options.target_count"); !p.empty())
            to.target = cost_of("options.target", p);
        if (const auto p = array("options.drafter", o.drafter, o.drafter_count, "options.drafter_count"); !p.empty())
            to.drafter = cost_of("options.drafter", p);
        to.most_tokens = o.most_tokens;
        to.memory = or_default(o.memory, to.memory);
        to.doubt = or_default(o.doubt, to.doubt);
        return spec::cost_profile(std::move(to));
    }
    spec::any_tuner::chooser make() const {
        try {
            switch (kind) {
            case tuner_kind::beg_mab:
                return spec::beg_mab(bandit());
            case tuner_kind::published_beg_mab:
                return spec::published_beg_mab(bandit());
            case tuner_kind::ucb1:
                return spec::ucb1(bandit());
            case tuner_kind::fixed_table:
                return table();
            default:
                return profile();
            }
        } catch (const opd::invalid_input& e) {
            if (e.argument.starts_with("options.")) throw;
            again(e, "options." + e.argument, e.row);
        }
    }
};

/// Numbers of the caller's, or keyed ones from where the struct says on.
class numbers {
public:
    explicit numbers(const opd_uniforms* of)
        : there_(of != nullptr), of_(read("uniforms", of, true)), keyed_(of_.seed, of_.step) {
        need_zero("uniforms.reserved", of_.reserved == 0, "it has no meaning yet");
        if (of_.draw == nullptr) {
            need_zero("uniforms.context", of_.context == nullptr, "it is of draw, which is a null pointer");
            if (of_.asked > 65536)
                refuse("uniforms.asked", "is " + std::to_string(of_.asked) + "; a step has at most 65536 numbers");
            for (std::uint32_t i = 0; i < of_.asked; ++i) (void)keyed_();
        } else {
            constexpr const char* why = "the caller's numbers have no key";
            need_zero("uniforms.seed", of_.seed == 0, why);
            need_zero("uniforms.step", of_.step == 0, why);
        }
    }
    /// Refuses to go on without any.
    void required(tuner_kind kind) const {
        if (!there_) refuse("uniforms", std::string("is a null pointer: ") + name_of(kind) + " draws numbers");
    }
    double operator()() {
        const double x = of_.draw == nullptr ? keyed_() : of_.draw(of_.context);
        if (!(x > 0 && x < 1)) refuse("uniforms.draw", "returned a number that does not lie in (0, 1)");
        ++of_.asked;
        return x;
    }
    void write(opd_uniforms* to) const { opd_c::write("uniforms", to, of_); }

private:
    bool there_;
    opd_uniforms of_;
    spec::keyed_uniforms keyed_;
};

std::string snapshot_kind(const opd_tuner& t) { return std::string("tuner ") + name_of(t.kind); }

/// A tuner's state with the arms that it is of.
struct tuner_state {
    const std::vector<spec::strategy>& arms;
    spec::any_tuner& tuner;
    template <class A>
    void fields(A& a) {
        if constexpr (A::reading) {
            std::vector<spec::strategy> found;
            a(found);
            if (found != arms) throw opd::invalid_input("snapshot", "is of other arms");
        } else {
            a(arms);
        }
        tuner.fields(a);
    }
};

} // namespace

extern "C" {

int opd_tuner_create(const opd_tuner_options* options, opd_tuner** out) {
    return create(out, [&] {
        reading of{read("options", options, true), tuner_kind::beg_mab};
        if (of.o.tuner != nullptr) of.kind = named("options.tuner", of.o.tuner, tuners);
        of.check();
        return std::shared_ptr<opd_tuner>(
            new opd_tuner{{},
                          of.kind,
                          of.kind == tuner_kind::fixed_table ? std::vector<spec::strategy>{} : of.arms(),
                          spec::any_tuner(of.make())});
    });
}
void opd_tuner_destroy(opd_tuner* tuner) { handles<opd_tuner>().remove(tuner); }

int opd_tuner_choose(opd_tuner* tuner, int64_t batch, opd_uniforms* uniforms, opd_strategy* chosen) {
    return guarded([&] {
        need("chosen", chosen);
        const index_t b = batch_of(batch);
        numbers n(uniforms);
        in_turn("tuner", tuner, [&](opd_tuner& t) {
            if (t.kind == tuner_kind::beg_mab || t.kind == tuner_kind::published_beg_mab) n.required(t.kind);
            *chosen = of_cpp(t.value.choose(b, n));
        });
        n.write(uniforms);
    });
}
int opd_tuner_heard(opd_tuner* tuner, const opd_strategy* strategy, int64_t batch, double accepted, double seconds,
                    opd_uniforms* uniforms) {
    return guarded([&] {
        need("strategy", strategy);
        const index_t b = batch_of(batch);
        spec::detail::check_step(b, accepted, seconds);
        numbers n(uniforms);
        in_turn("tuner", tuner, [&](opd_tuner& t) {
            if (t.kind == tuner_kind::published_beg_mab) n.required(t.kind);
            t.value.heard(strategy_of(*strategy), b, accepted, seconds, n);
        });
        n.write(uniforms);
    });
}
int opd_tuner_predict(opd_tuner* tuner, const opd_strategy* strategy, int64_t batch, double* tokens_per_second,
                      double* accepted, double* seconds) {
    return guarded([&] {
        need("strategy", strategy);
        const index_t b = batch_of(batch);
        const spec::strategy s = strategy_of(*strategy);
        within("strategy.depth", s.depth, 0, most_of_strategy);
        within("strategy.top_k", s.top_k, 0, most_of_strategy);
        within("strategy.verify", s.verify, 0, most_of_strategy);
        in_turn("tuner", tuner, [&](opd_tuner& t) {
            const auto* const profile = std::get_if<spec::cost_profile>(&t.value.get());
            if (profile == nullptr)
                throw opd::unsupported(std::string("opd: opd_tuner_predict is of cost_profile, not of ") +
                                       name_of(t.kind));
            if (tokens_per_second != nullptr) *tokens_per_second = profile->tokens_per_second(s, b);
            if (accepted != nullptr) *accepted = profile->accepted(s);
            if (seconds != nullptr) *seconds = profile->seconds(s, b);
        });
    });
}
int opd_tuner_snapshot(opd_tuner* tuner, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("tuner", tuner, [&](opd_tuner& t) {
            tuner_state state{t.arms, t.value};
            write_snapshot(snapshot_kind(t), state, bytes, size, length);
        });
    });
}
int opd_tuner_restore(opd_tuner* tuner, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("tuner", tuner, [&](opd_tuner& t) {
            spec::any_tuner anew = t.value;
            tuner_state state{t.arms, anew};
            read_snapshot(snapshot_kind(t), state, bytes, size);
            t.value = std::move(anew);
        });
    });
}

int opd_step_merged(const opd_step_observation* ranks, int64_t count, opd_step_observation* merged) {
    return guarded([&] {
        need("merged", merged);
        std::vector<spec::step_observation> all;
        for (const opd_step_observation& r : array("ranks", ranks, count, "count"))
            all.push_back({r.batch, r.accepted, r.seconds});
        try {
            const spec::step_observation m = spec::merged(all);
            *merged = {m.batch, m.accepted, m.seconds};
        } catch (const opd::invalid_input& e) {
            again(e, e.argument == "batch" ? "ranks.batch" : e.argument, e.row);
        }
    });
}

int opd_elastic_switch_create(const opd_elastic_options* options, opd_elastic_switch** out) {
    return create(out, [&] {
        const opd_elastic_options o = read("options", options, true);
        need_zero("options.reserved", o.reserved == 0, "it has no meaning yet");
        spec::elastic_switch::options_type to;
        to.on_at = or_default(o.on_at, to.on_at), to.off_at = or_default(o.off_at, to.off_at);
        to.checks = or_default(o.checks, to.checks);
        return of_member("options", [&] { return std::make_shared<opd_elastic_switch>(to); });
    });
}
void opd_elastic_switch_destroy(opd_elastic_switch* elastic) { handles<opd_elastic_switch>().remove(elastic); }
int opd_elastic_switch_check(opd_elastic_switch* elastic, int64_t running, int32_t* on) {
    return guarded([&] {
        need("on", on);
        if (running < 0) refuse("running", "is " + std::to_string(running));
        in_turn("elastic", elastic, [&](opd_elastic_switch& e) { *on = e.value.check(running); });
    });
}
int opd_elastic_switch_snapshot(opd_elastic_switch* elastic, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("elastic", elastic,
                [&](opd_elastic_switch& e) { write_snapshot("elastic_switch", e.value, bytes, size, length); });
    });
}
int opd_elastic_switch_restore(opd_elastic_switch* elastic, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("elastic", elastic, [&](opd_elastic_switch& e) {
            spec::elastic_switch anew(e.options);
            read_snapshot("elastic_switch", anew, bytes, size);
            e.value = anew;
        });
    });
}

int opd_drafter_selector_create(const opd_drafter_selector_options* options, opd_drafter_selector** out) {
    return create(out, [&] {
        const opd_drafter_selector_options o = read("options", options, true);
        spec::drafter_selector_options to;
        to.drafters = or_default(within("options.drafters", o.drafters, 0, most_drafters), to.drafters);
        to.memory = or_default(o.memory, to.memory);
        to.tries = or_default(o.tries, to.tries), to.again = or_default(o.again, to.again);
        return of_member("options", [&] { return std::make_shared<opd_drafter_selector>(to); });
    });
}
void opd_drafter_selector_destroy(opd_drafter_selector* selector) { handles<opd_drafter_selector>().remove(selector); }
int opd_drafter_selector_set_exists(opd_drafter_selector* selector, int64_t drafter, int now) {
    return guarded([&] {
        const bool yes = flag("now", now);
        in_turn("selector", selector, [&](opd_drafter_selector& s) { s.value.exists(drafter, yes); });
    });
}
int opd_drafter_selector_exists(opd_drafter_selector* selector, int64_t drafter, int32_t* now) {
    return guarded([&] {
        need("now", now);
        in_turn("selector", selector, [&](opd_drafter_selector& s) { *now = s.value.exists(drafter); });
    });
}
int opd_drafter_selector_choose(opd_drafter_selector* selector, int64_t batch, int64_t* drafter) {
    return guarded([&] {
        need("drafter", drafter);
        in_turn("selector", selector, [&](opd_drafter_selector& s) { *drafter = s.value.choose(batch); });
    });
}
int opd_drafter_selector_heard(opd_drafter_selector* selector, int64_t drafter, int64_t batch, double accepted,
                               double seconds) {
    return guarded([&] {
        in_turn("selector", selector,
                [&](opd_drafter_selector& s) { s.value.heard(drafter, batch, accepted, seconds); });
    });
}
int opd_drafter_selector_predicted(opd_drafter_selector* selector, int64_t drafter, int64_t batch,
                                   double* tokens_per_second) {
    return guarded([&] {
        need("tokens_per_second", tokens_per_second);
        in_turn("selector", selector,
                [&](opd_drafter_selector& s) { *tokens_per_second = s.value.predicted(drafter, batch); });
    });
}
int opd_drafter_selector_snapshot(opd_drafter_selector* selector, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("selector", selector,
                [&](opd_drafter_selector& s) { write_snapshot("drafter_selector", s.value, bytes, size, length); });
    });
}
int opd_drafter_selector_restore(opd_drafter_selector* selector, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("selector", selector, [&](opd_drafter_selector& s) {
            spec::drafter_selector anew(s.value.options());
            read_snapshot("drafter_selector", anew, bytes, size);
            s.value = std::move(anew);
        });
    });
}

} // extern "C"
