// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "words.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/opd.hpp"
#include "pipeline/rollout.hpp"

namespace compression_study {

namespace {

using trainer::token;
using floats = std::vector<float>;

constexpr int length = 48, prompt_length = 12; // tokens of a text

/// Where a class of words begins, and how many there are. 0 ends a text, which texts of the grammar do not do: they are
/// cut.
struct words_of {
    token first;
    int count;
};
constexpr words_of stop{1, 1}, determiners{2, 8}, prepositions{10, 20}, conjunctions{30, 6}, adjectives{36, 250},
    adverbs{286, 60}, nouns{346, 1200}, verbs{1546, 600};
constexpr int vocabulary = 2146, topics = 12;

class writer {
public:
    explicit writer(std::uint64_t seed) : random_(seed) {}

    std::vector<token> text() {
        std::vector<token> t;
        const int topic = below(topics);
        while (t.size() < length) {
            clause(t, topic);
            if (chance(0.3)) {
                t.push_back(zipf(conjunctions, 1, 0));
                clause(t, topic);
            }
            t.push_back(stop.first);
        }
        t.resize(length);
        return t;
    }

private:
    bool chance(double p) { return std::uniform_real_distribution<double>()(random_) < p; }
    int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }

    /// A word of those that lie `step` apart from the first + offset.
    token zipf(words_of c, int step, int offset) {
        const int n = (c.count - offset + step - 1) / step;
        const double u = std::uniform_real_distribution<double>()(random_);
        const int rank =
            std::min(n - 1, static_cast<int>(std::exp(u * std::log(double(n) + 1)) - 1)); // about 1/(rank + 1)
        return c.first + offset + rank * step;
    }
    /// Nouns and verbs lie as topic · 2 + number, of every `2 · topics`.
    void noun_phrase(std::vector<token>& t, int topic, double faithful, int number) {
        t.push_back(zipf(determiners, 2, number));
        if (chance(0.4)) t.push_back(zipf(adjectives, 1, 0));
        if (!chance(faithful)) topic = below(topics);
        t.push_back(zipf(nouns, 2 * topics, 2 * topic + number));
    }
    void clause(std::vector<token>& t, int topic) {
        const int number = below(2), of_verb = below(topics);
        noun_phrase(t, topic, 0.8, number);
        t.push_back(zipf(verbs, 2 * topics, 2 * of_verb + number));
        noun_phrase(t, of_verb, 0.7, below(2));
        if (chance(0.4)) {
            t.push_back(zipf(prepositions, 1, 0));
            noun_phrase(t, topic, 0.8, below(2));
        }
        if (chance(0.2)) t.push_back(zipf(adverbs, 1, 0));
    }

    std::mt19937_64 random_;
};

trainer::transformer<float> trained(const trainer::model_shape& shape, int steps, int batch, int threads,
                                    std::uint64_t seed) {
    trainer::transformer<float> model(shape);
    model.initialise(seed);
    opd::cpu_backend backend{.threads = threads};
    trainer::training_pass<float> pass(model, backend.team());
    trainer::adamw_state state;
    writer text(seed + 1);
    floats z, gradient;
    std::vector<double> lse;
    for (int step = 0; step < steps; ++step) {
        std::vector<std::vector<token>> inputs;
        std::vector<token> targets;
        for (int i = 0; i < batch; ++i) {
            inputs.push_back(text.text());
            targets.insert(targets.end(), inputs.back().begin() + 1, inputs.back().end());
            inputs.back().pop_back();
        }
        const index_t n = pass.set_sequences(inputs);
        z.resize(static_cast<std::size_t>(n * vocabulary));
        lse.resize(static_cast<std::size_t>(n));
        pass.forward(z.data());
        opd::log_sum_exp(backend, opd::view(std::as_const(z).data(), n, vocabulary), opd::view(lse.data(), n));
        const float share = 1 / static_cast<float>(n);
        backend.team().run(n, [&](index_t r, int) {
            float* const y = z.data() + r * vocabulary;
            for (int v = 0; v < vocabulary; ++v)
                y[v] = share * std::exp(y[v] - static_cast<float>(lse[static_cast<std::size_t>(r)]));
            y[targets[static_cast<std::size_t>(r)]] -= share;
        });
        pass.backward(z.data(), gradient);
        trainer::adamw_step({}, trainer::cosine_rate(3e-3, 0.1, 20, step, steps), gradient, state, model);
    }
    return model;
}

/// What the head reads, and what it makes of it, for each token that was drawn.
struct passed {
    floats states, logits;
};
passed pass_over(const trainer::transformer<float>& model, const std::vector<trainer::trajectory>& texts) {
    passed to;
    const index_t d = model.shape.width;
    trainer::kv_cache<float> cache;
    trainer::forward_state<float> state;
    for (const trainer::trajectory& t : texts) {
        if (t.response().empty()) continue;
        const auto rows = std::ssize(t.tokens) - 1, first = static_cast<index_t>(t.prompt_length) - 1;
        floats z(static_cast<std::size_t>(rows * vocabulary));
        cache.resize(model.shape, 1, rows);
        state.resize(model.shape, rows, cache.capacity(), false);
        const std::array<trainer::segment, 1> all{{{.slot = 0, .start = 0, .count = rows}}};
        trainer::forward_rows(model, all, std::span(t.tokens).first(static_cast<std::size_t>(rows)), cache, state,
                              false, z.data());
        to.states.insert(to.states.end(), state.n.begin() + first * d, state.n.begin() + rows * d);
        to.logits.insert(to.logits.end(), z.begin() + first * vocabulary, z.end());
    }
    return to;
}

} // namespace

world words(const words_size& s, int threads, std::uint64_t seed) {
    const trainer::model_shape of_teacher{.vocabulary = vocabulary, .width = 64, .layers = 2},
        of_student{.vocabulary = vocabulary, .width = 32, .layers = 1};
    const auto teacher = trained(of_teacher, s.teacher_steps, s.batch, threads, seed + 10);
    const auto student = trained(of_student, s.student_steps, s.batch, threads, seed + 20);
    opd::thread_team team(threads);
    const auto write = [&](const trainer::transformer<float>& model, index_t texts, std::uint64_t key) {
        writer prompts(key);
        std::vector<trainer::request> requests;
        for (index_t i = 0; i < texts; ++i) {
            auto prompt = prompts.text();
            prompt.resize(prompt_length);
            requests.push_back({.sample = static_cast<std::uint64_t>(i), .prompt = std::move(prompt)});
        }
        return trainer::roll_out(model, team, requests,
                                 {.seed = key, .end = 0, .max_response = length - prompt_length});
    };
    const auto rollouts = write(student, s.rollouts, seed + 30);
    passed sent = pass_over(teacher, rollouts);
    const index_t d = of_teacher.width, n = std::ssize(sent.states) / d;
    const float* const head = teacher.at(teacher.layout.head);
    world w{.name = "words",
            .title = fmt::format("The trainer's transformer on a grammar, V = {}, D = {}", vocabulary, d),
            .v = vocabulary,
            .d = d,
            .n = n,
            .head = floats(head, head + teacher.layout.head.size()),
            .states = std::move(sent.states),
            .student = pass_over(student, rollouts).logits,
            .seen = opd::calibration(vocabulary, d),
            .numbers = {4, 8, 16, 32, 48, 64}};
    const passed seen = pass_over(teacher, write(teacher, s.calibration, seed + 40)); // the teacher's own texts
    w.seen.add(team, opd::teacher::hidden{opd::view(seen.states.data(), std::ssize(seen.states) / d, d),
                                          opd::view(std::as_const(w.head).data(), vocabulary, d)});
    return w;
}

} // namespace compression_study
