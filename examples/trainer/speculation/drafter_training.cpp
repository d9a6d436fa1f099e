// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/drafter_training.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/estimators/draft_weights.hpp"
#include "opd/opd.hpp"
#include "speculation/learned_drafter.hpp"

namespace trainer {

namespace {

// Steps of the training-time test, and what each counts of the one before.
std::pair<index_t, double> test_of(const config& c) {
    const auto& d = c.drafter;
    const index_t published = d.loss == "hass" ? 3 : d.loss == "eagle3" ? 7 : 1;
    return {published > 1 && d.test_steps > 0 ? d.test_steps : published, d.loss == "eagle3" ? 0.8 : 1};
}

} // namespace

// --- a step ---------------------------------------------------------------------------------------------------------

drafter_trainer::drafter_trainer(const config& c, const transformer<float>& target, draft_model& d,
                                 opd::cpu_backend& backend)
    : settings_(c), target_(target), drafter_(d), backend_(backend), pass_(d.weights, backend.team()),
      on_hidden_(d.weights, target, backend.team()) {
    if (!(d.target == target.shape)) throw std::invalid_argument("drafter_trainer: a drafter for another target");
}

namespace {

std::vector<drafter_text> texts_of(std::span<const trajectory* const> responses) {
    std::vector<drafter_text> r;
    for (const trajectory* t : responses) r.push_back({t->tokens, t->prompt_length, {}, t->sample});
    return r;
}

} // namespace

// Both laws at the rows that the drafter has: of a layer, those that have a position before them.
void drafter_trainer::forward(std::span<const drafter_text> texts, index_t steps) {
    const index_t v = target_.shape.vocabulary, d = target_.shape.width, width = drafter_.features();
    inputs_.clear(), hidden_.clear();
    bool known = !texts.empty();
    for (const drafter_text& t : texts) {
        if (t.prompt_length < 1 || t.tokens.size() <= t.prompt_length)
            throw std::invalid_argument("drafter_trainer: a text without prompt or response");
        if (!t.hidden.empty() && t.hidden.size() != (t.tokens.size() - 1) * static_cast<std::size_t>(width))
            throw std::invalid_argument("drafter_trainer: hidden states of another number of positions");
        inputs_.emplace_back(t.tokens.begin(), t.tokens.end() - 1);
        known = known && !t.hidden.empty();
    }
    if (known) {
        for (const drafter_text& t : texts) hidden_.insert(hidden_.end(), t.hidden.begin(), t.hidden.end());
        const auto rows = static_cast<index_t>(hidden_.size()) / width;
        std::vector<float> n(static_cast<std::size_t>(rows * d)); // what the head reads, of each row the first
        for (index_t r = 0; r < rows; ++r) std::copy_n(hidden_.data() + r * width, d, n.data() + r * d);
        target_logits_.resize(static_cast<std::size_t>(rows * v));
        head_logits(target_, n.data(), rows, target_logits_.data());
    } else {
        target_rows(target_, backend_.team(), std::span<const std::vector<token>>(inputs_), target_logits_, hidden_,
                    width > d);
    }
    q_.clear(), mask_.clear(), expected_.clear();
    firsts_.assign(1, 0);
    const bool layer = drafter_.is_layer();
    std::vector<along<float>> hidden;
    std::vector<std::uint8_t> counts;
    index_t first = 0;
    for (std::size_t s = 0; s < inputs_.size(); ++s) {
        const auto n = static_cast<index_t>(inputs_[s].size());
        const auto part = [&](const std::vector<float>& all, index_t columns) {
            return along<float>{0, columns,
                                std::span(all).subspan(static_cast<std::size_t>(first * columns),
                                                       static_cast<std::size_t>(n * columns))};
        };
        counts.assign(inputs_[s].size(), 1);
        std::fill_n(counts.begin(), texts[s].prompt_length - 1, std::uint8_t{0});
        const along<std::uint8_t> kept{0, 1, counts};
        const auto take = [&](const auto& logits, const auto& counted) {
            q_.insert(q_.end(), logits.data(), logits.data() + logits.rows() * v);
            mask_.insert(mask_.end(), counted.data(), counted.data() + counted.rows());
            firsts_.push_back(firsts_.back() + logits.rows());
        };
        if (layer) {
            hidden.push_back(part(hidden_, width));
            const auto expected = around<1>(hidden.back(), 0, n - 1);
            for (index_t r = 0; r < n - 1; ++r) expected_.insert(expected_.end(), expected.row(r), expected.row(r) + d);
            take(around<1>(part(target_logits_, v), 0, n - 1), around<1>(kept, 0, n - 1));
        } else {
            take(around<0>(part(target_logits_, v), 0, n), around<0>(kept, 0, n));
        }
        first += n;
    }
    rows_ = layer ? on_hidden_.set_sequences(hidden, inputs_, steps, settings_.drafter.loss == "eagle3")
                  : pass_.set_sequences(inputs_);
    z_.resize(static_cast<std::size_t>(rows_ * v));
    layer ? on_hidden_.forward(z_.data()) : pass_.forward(z_.data());
}

// f(row, its number among those of the step): rows of step j are those of a sequence but the first j.
template <class F>
void drafter_trainer::each_row_of(index_t step, F&& f) const {
    index_t at = 0;
    for (std::size_t s = 0; s + 1 < firsts_.size(); ++s)
        for (auto row = firsts_[s] + step; row < firsts_[s + 1]; ++row) f(static_cast<index_t>(row), at++);
}

// The next step of the training-time test; rows that it has not do not count from here on.
void drafter_trainer::forward_step(index_t step) {
    const index_t v = target_.shape.vocabulary;
    std::vector<float> z(static_cast<std::size_t>(on_hidden_.rows(step) * v));
    on_hidden_.forward(step, z.data());
    std::fill(z_.begin(), z_.end(), 0.0f);
    each_row_of(step, [&](index_t row, index_t at) { std::copy_n(z.data() + at * v, v, z_.data() + row * v); });
    for (std::size_t s = 0; s + 1 < firsts_.size(); ++s)
        for (auto row = firsts_[s]; row < std::min(firsts_[s] + step, firsts_[s + 1]); ++row)
            mask_[static_cast<std::size_t>(row)] = 0;
}

// -log Σ min(p, q) of each row
std::vector<float> drafter_trainer::losses() {
    std::vector<float> out(static_cast<std::size_t>(rows_));
    const index_t v = target_.shape.vocabulary;
    const auto t = static_cast<float>(settings_.distill.temperature);
    opd::env e{.reduction = opd::reduce::sum};
    e.mask = opd::row_mask<>(mask_);
    e.losses = out;
    e.on_bad = most_bad;
    opd::evaluate(backend_, opd::student::logits<float>{opd::view(std::as_const(z_).data(), rows_, v), {}, t},
                  opd::teacher::dense<float>{opd::view(std::as_const(q_).data(), rows_, v), t}, opd::acceptance{}, e);
    return out;
}

drafter_step drafter_trainer::step(std::span<const trajectory* const> responses, double rate, std::int64_t number) {
    drafter_step r = gradient(texts_of(responses), number, gradient_);
    if (r.rows > 0) r.gradient_norm = adamw_step(settings_.optimizer, rate, gradient_, state_, drafter_.weights);
    return r;
}

// The token of which a row is the law.
token drafter_trainer::next_of(std::span<const drafter_text> texts, std::size_t text, std::int64_t row) const {
    const std::int64_t ahead = drafter_.is_layer() ? 2 : 1;
    return texts[text].tokens[static_cast<std::size_t>(row - firsts_[text] + ahead)];
}

// Of the rows those alone whose token the drafter would not have drafted.
void drafter_trainer::keep_rejected(std::span<const drafter_text> texts) {
    const index_t v = target_.shape.vocabulary, ahead = drafter_.is_layer() ? 2 : 1;
    const opd::spec::follow_rates rates;
    opd::spec::draft_builder tree;
    for (std::size_t s = 0; s + 1 < firsts_.size(); ++s)
        for (auto row = firsts_[s]; row < firsts_[s + 1]; ++row) {
            if (!mask_[static_cast<std::size_t>(row)]) continue;
            const opd::spec::draft_law law{.filter = {.temperature = static_cast<float>(settings_.distill.temperature)},
                                           .seed = settings_.run.seed,
                                           .sample = texts[s].sample,
                                           .position = static_cast<std::uint32_t>(row - firsts_[s] + ahead)};
            tree.begin(rates);
            tree.grow(-1, opd::vector_view<const float>(z_.data() + row * v, v), law, 1);
            mask_[static_cast<std::size_t>(row)] = tree.token(0) != next_of(texts, s, row);
        }
}

// Of the rows that count; z_ is its gradient then.
double drafter_trainer::loss_of_laws(std::span<const drafter_text> texts, const std::vector<float>& refused,
                                     std::int64_t number) {
    const auto& d = settings_.drafter;
    const index_t v = target_.shape.vocabulary;
    const auto t = static_cast<float>(settings_.distill.temperature);
    const auto counted = static_cast<std::int64_t>(std::count(mask_.begin(), mask_.end(), 1));
    if (d.loss == "eagle" || d.loss == "hass") {
        // -log p[x], p at the temperature; and of HASS, -Σ q[v] log p[v] of the ids v that are likeliest of q
        double sum = 0;
        const double share = d.ce / static_cast<double>(counted), of_top = 1 / static_cast<double>(counted);
        const auto top = static_cast<std::ptrdiff_t>(d.loss == "hass" ? std::min<index_t>(d.top_k, v) : 0);
        likeliest_.resize(static_cast<std::size_t>(v));
        std::vector<double> wanted(static_cast<std::size_t>(v));
        for (std::size_t s = 0; s + 1 < firsts_.size(); ++s)
            for (auto row = firsts_[s]; row < firsts_[s + 1]; ++row) {
                float* z = z_.data() + row * v;
                if (!mask_[static_cast<std::size_t>(row)]) {
                    std::fill_n(z, v, 0.0f);
                    continue;
                }
                const token x = next_of(texts, s, row);
                const double most = *std::max_element(z, z + v), of_x = z[x];
                double all = 0;
                for (index_t i = 0; i < v; ++i) all += std::exp((static_cast<double>(z[i]) - most) / t);
                sum += share * (std::log(all) - (of_x - most) / t);
                // weights of -log p, by id
                std::fill(wanted.begin(), wanted.end(), 0.0);
                wanted[static_cast<std::size_t>(x)] = share;
                double weight = share;
                if (top > 0) {
                    const float* q = q_.data() + row * v;
                    const double peak = *std::max_element(q, q + v);
                    double mass = 0;
                    for (index_t i = 0; i < v; ++i) mass += std::exp((static_cast<double>(q[i]) - peak) / t);
                    std::iota(likeliest_.begin(), likeliest_.end(), index_t{0});
                    std::partial_sort(likeliest_.begin(), likeliest_.begin() + top, likeliest_.end(),
                                      [q](index_t a, index_t b) { return q[a] != q[b] ? q[a] > q[b] : a < b; });
                    for (std::ptrdiff_t k = 0; k < top; ++k) {
                        const index_t i = likeliest_[static_cast<std::size_t>(k)];
                        const double p = of_top * std::exp((static_cast<double>(q[i]) - peak) / t) / mass;
                        sum += p * (std::log(all) - (static_cast<double>(z[i]) - most) / t);
                        wanted[static_cast<std::size_t>(i)] += p, weight += p;
                    }
                }
                for (index_t i = 0; i < v; ++i)
                    z[i] = static_cast<float>((weight * std::exp((static_cast<double>(z[i]) - most) / t) / all -
                                               wanted[static_cast<std::size_t>(i)]) /
                                              t);
            }
        return sum;
    }
    weights_.assign(refused.size(), 1.0f);
    if (d.loss == "lk") {
        // drafts: a prompt is one, and none of its rows counts; the first of a response is shorter, elsewhere in every
        // step
        std::vector<std::int64_t> drafts{0};
        for (std::size_t s = 0; s + 1 < firsts_.size(); ++s) {
            const auto end = firsts_[s + 1];
            auto at = firsts_[s];
            while (at < end && !mask_[static_cast<std::size_t>(at)]) ++at;
            if (at > drafts.back()) drafts.push_back(at);
            at += 1 + (number * 5 + static_cast<std::int64_t>(s) * 3) % d.depth;
            for (; at < end; at += d.depth) drafts.push_back(at);
            if (end > drafts.back()) drafts.push_back(end);
        }
        const std::span<const std::int64_t> offsets(drafts);
        if (d.weights == "decaying") opd::fill_draft_weights(opd::decaying{d.gamma}, offsets, weights_);
        if (d.weights == "accepted_length")
            opd::fill_draft_weights(opd::accepted_length{d.smoothing}, offsets, refused, weights_);
        double all = 0;
        for (std::size_t i = 0; i < mask_.size(); ++i) all += mask_[i] ? static_cast<double>(weights_[i]) : 0;
        for (float& w : weights_) w *= static_cast<float>(static_cast<double>(counted) / all);
    }
    const double kl = d.loss == "lk" ? d.kl : 1, acceptance = d.loss == "lk" ? d.acceptance : 0;
    opd::env e{.reduction = opd::reduce::token_mean};
    e.mask = opd::row_mask<>(mask_);
    e.weights = weights_;
    e.on_bad = most_bad;
    return opd::evaluate(backend_,
                         opd::student::logits<float>{opd::view(std::as_const(z_).data(), rows_, v),
                                                     opd::view(z_.data(), rows_, v), t},
                         opd::teacher::dense<float>{opd::view(std::as_const(q_).data(), rows_, v), t},
                         opd::weighted_sum{opd::forward_kl{}, opd::acceptance{}, kl, acceptance}, e)
        .loss;
}

// Of what the step expects of the target's h, smooth L1, mean over the rows that count and columns; apart_ is its
// gradient then, and empty where it is not asked for.
double drafter_trainer::distance(index_t step) {
    const auto& d = settings_.drafter;
    std::vector<float>& apart = apart_[static_cast<std::size_t>(step)];
    apart.clear();
    const auto counted = static_cast<std::int64_t>(std::count(mask_.begin(), mask_.end(), 1));
    if (!(d.hidden > 0) || d.loss == "eagle3" || drafter_.kind != drafter_kind::hidden || counted == 0) return 0;
    const index_t width = target_.shape.width;
    const auto share = static_cast<float>(d.hidden / static_cast<double>(counted * width));
    double sum = 0;
    apart.assign(static_cast<std::size_t>(on_hidden_.rows(step) * width), 0.0f);
    each_row_of(step, [&](index_t row, index_t at) {
        if (!mask_[static_cast<std::size_t>(row)]) return;
        for (index_t i = 0; i < width; ++i) {
            const float gap = on_hidden_.predicted(step)[at * width + i] -
                              expected_[static_cast<std::size_t>(row * width + i)],
                        size = std::abs(gap);
            sum += static_cast<double>(size < 1 ? 0.5f * gap * gap : size - 0.5f);
            apart[static_cast<std::size_t>(at * width + i)] = share * std::clamp(gap, -1.0f, 1.0f);
        }
    });
    return sum * static_cast<double>(share);
}

drafter_step drafter_trainer::gradient(std::span<const drafter_text> texts, std::int64_t number,
                                       std::vector<float>& out, const std::stop_token& stop) {
    const auto& d = settings_.drafter;
    const auto [steps, decay] = test_of(settings_);
    drafter_step r;
    const auto over = [&] { return r.stopped = stop.stop_requested(); };
    if (over()) return r;
    forward(texts, steps);
    if (over()) return r;
    const std::vector<float> refused = losses();
    for (std::size_t i = 0; i < mask_.size(); ++i)
        if (mask_[i]) ++r.rows, r.acceptance += std::exp(-static_cast<double>(refused[i]));
    if (r.rows == 0) return r;
    r.acceptance /= static_cast<double>(r.rows);
    if (d.loss == "osd") {
        keep_rejected(texts);
        r.rows = std::count(mask_.begin(), mask_.end(), 1);
        if (r.rows == 0) return r; // it would have drafted all of it
    }
    if (!drafter_.is_layer()) {
        r.loss = loss_of_laws(texts, refused, number);
        if (over()) return r;
        pass_.backward(z_.data(), out);
        return r;
    }
    const index_t v = target_.shape.vocabulary;
    d_logits_.resize(static_cast<std::size_t>(steps)), apart_.resize(d_logits_.size());
    double all = 0;
    for (index_t step = 0; step < steps; ++step) all += std::pow(decay, step);
    for (index_t step = 0; step < steps; ++step) {
        if (over()) return r;
        if (step > 0) forward_step(step);
        std::vector<float>& dz = d_logits_[static_cast<std::size_t>(step)];
        dz.assign(static_cast<std::size_t>(on_hidden_.rows(step) * v), 0.0f);
        const double share = std::pow(decay, step) / all;
        const double apart = distance(step);
        if (std::count(mask_.begin(), mask_.end(), 1) == 0) continue; // all responses are over
        r.loss += share * (loss_of_laws(texts, refused, number) + apart);
        each_row_of(step, [&](index_t row, index_t at) {
            for (index_t i = 0; i < v; ++i)
                dz[static_cast<std::size_t>(at * v + i)] =
                    static_cast<float>(share) * z_[static_cast<std::size_t>(row * v + i)];
        });
        for (float& x : apart_[static_cast<std::size_t>(step)]) x *= static_cast<float>(share);
    }
    for (index_t step = steps - 1; step >= 0; --step) {
        if (over()) return r;
        const std::vector<float>& apart = apart_[static_cast<std::size_t>(step)];
        on_hidden_.backward(step, d_logits_[static_cast<std::size_t>(step)].data(),
                            apart.empty() ? nullptr : apart.data());
    }
    if (over()) return r;
    on_hidden_.gradient(out);
    return r;
}

expected_acceptance drafter_trainer::measure(std::span<const trajectory* const> responses) {
    const auto depth = static_cast<std::size_t>(settings_.drafter.depth);
    std::vector<double> reached(depth), followed(depth);
    double sum = 0, rows = 0, among_3 = 0;
    const index_t v = target_.shape.vocabulary;
    const auto at_once = static_cast<std::size_t>(settings_.drafter.batch);
    for (std::size_t i = 0; i < responses.size(); i += at_once) {
        const auto texts = texts_of(responses.subspan(i, std::min(at_once, responses.size() - i)));
        forward(texts);
        const std::vector<float> refused = losses();
        for (std::size_t s = 0; s + 1 < firsts_.size(); ++s)
            for (auto at = firsts_[s]; at < firsts_[s + 1]; ++at) {
                if (!mask_[static_cast<std::size_t>(at)]) continue;
                double reach = 1;
                for (std::size_t k = 0; k < depth && at + static_cast<std::int64_t>(k) < firsts_[s + 1]; ++k) {
                    reached[k] += reach;
                    reach *= std::exp(-static_cast<double>(refused[static_cast<std::size_t>(at) + k]));
                    followed[k] += reach;
                }
                sum += std::exp(-static_cast<double>(refused[static_cast<std::size_t>(at)])), ++rows;
                const float* z = z_.data() + at * v;
                const token next = next_of(texts, s, at);
                among_3 += std::count_if(z, z + v, [&](float x) { return x > z[next]; }) < 3;
            }
    }
    expected_acceptance r;
    if (rows == 0) return r;
    r.mean = sum / rows, r.top_3 = among_3 / rows;
    double reach = 1;
    for (std::size_t k = 0; k < depth && reached[k] > 0; ++k) {
        r.by_depth.push_back(followed[k] / reached[k]);
        r.length += reach *= r.by_depth.back();
    }
    return r;
}

followed_drafts follow_drafts(const config& c, const transformer<float>& target, std::shared_ptr<const draft_model> d,
                              opd::thread_team& threads, std::span<const trajectory* const> responses, index_t stride) {
    const auto depth = static_cast<std::size_t>(c.drafter.depth), width = static_cast<std::size_t>(d->features());
    const policy weights{{std::shared_ptr<void>(), &target}, 0}; // the caller keeps the model
    const opd::spec::follow_rates rates;
    const auto pieces = static_cast<std::size_t>(threads.size());
    std::vector<std::vector<double>> reached(pieces, std::vector<double>(depth)), followed = reached;
    std::vector<index_t> drafts(pieces);
    // each thread a drafter and its share of the responses, all of which it drafts for together
    threads.run(threads.size(), [&](index_t piece, int) {
        const auto own = static_cast<std::size_t>(piece);
        learned_drafter drafter(d, 0);
        std::vector<const trajectory*> mine;
        for (std::size_t i = own; i < responses.size(); i += pieces) mine.push_back(responses[i]);
        opd::thread_team alone(1);
        std::vector<std::vector<float>> hidden(mine.size());
        std::vector<float> logits;
        std::size_t longest = 0;
        std::vector<trajectory> seen(mine.size());
        std::vector<index_t> heard(mine.size(), 0);
        std::vector<opd::spec::draft_builder> trees(mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
            const std::vector<token> inputs(mine[i]->tokens.begin(), mine[i]->tokens.end() - 1);
            target_rows(target, alone, std::span(&inputs, 1), logits, hidden[i],
                        width > static_cast<std::size_t>(target.shape.width));
            longest = std::max(longest, mine[i]->response().size());
            drafter.begin(static_cast<index_t>(i), *mine[i]);
        }
        std::vector<draft_wish> wishes;
        for (std::size_t drawn = 0; drawn < longest; drawn += static_cast<std::size_t>(stride)) {
            wishes.clear();
            for (std::size_t i = 0; i < mine.size(); ++i) {
                const trajectory& t = *mine[i];
                if (t.response().size() <= drawn) continue;
                const std::size_t length = t.prompt_length + drawn;
                const auto lane = static_cast<index_t>(i), rows = static_cast<index_t>(length) - 1 - heard[i];
                const lane_news news{lane,
                                     heard[i],
                                     rows,
                                     {},
                                     std::span(hidden[i]).subspan(static_cast<std::size_t>(heard[i]) * width,
                                                                  static_cast<std::size_t>(rows) * width)};
                drafter.hear(std::span(&news, 1), weights);
                heard[i] += rows;
                seen[i].sample = t.sample, seen[i].prompt_length = t.prompt_length;
                seen[i].tokens.assign(t.tokens.begin(), t.tokens.begin() + static_cast<std::ptrdiff_t>(length));
                trees[i].begin(rates);
                const opd::spec::draft_law law{.filter = {.temperature = static_cast<float>(c.distill.temperature)},
                                               .seed = c.run.seed,
                                               .sample = t.sample,
                                               .position = static_cast<std::uint32_t>(length)};
                wishes.push_back({lane, &seen[i], law, static_cast<std::int32_t>(depth), 1, &trees[i]});
            }
            drafter.propose(wishes);
            for (const draft_wish& w : wishes) {
                const auto& all = mine[static_cast<std::size_t>(w.lane)]->tokens;
                ++drafts[own];
                for (index_t n = 0; n < w.tree->size(); ++n) {
                    const std::size_t at = w.sequence->tokens.size() + static_cast<std::size_t>(n);
                    if (at >= all.size()) break;
                    ++reached[own][static_cast<std::size_t>(n)];
                    if (w.tree->token(n) != all[at]) break;
                    ++followed[own][static_cast<std::size_t>(n)];
                }
            }
        }
    });
    followed_drafts r;
    double tokens = 0;
    for (std::size_t k = 0; k < depth; ++k) {
        double had = 0, kept = 0;
        for (std::size_t i = 0; i < pieces; ++i) had += reached[i][k], kept += followed[i][k];
        if (had == 0) break;
        r.by_depth.push_back(kept / had);
        tokens += kept;
    }
    for (const index_t n : drafts) r.drafts += n;
    r.length = r.drafts > 0 ? tokens / static_cast<double>(r.drafts) : 0;
    return r;
}

} // namespace trainer
