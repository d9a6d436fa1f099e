// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "model/publication.hpp"

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>

namespace trainer {

namespace data = opd::data;

namespace {

// f(name, place) of every tensor, in the order of the weights.
template <class F>
void each_tensor(const model_layout& l, F&& f) {
    static constexpr std::string_view names[] = {"norm1", "wqkv", "bqkv",  "q_norm", "k_norm",
                                                 "wo",    "bo",   "norm2", "wgu",    "wdown"};
    f("embedding", l.embedding);
    for (const layer_tensors& t : l.layers) {
        const auto tensors = t.all();
        for (std::size_t i = 0; i < std::size(names); ++i)
            if (tensors[i]->size() > 0) f(names[i], *tensors[i]);
    }
    f("norm_f", l.norm_f);
    if (l.head.offset != l.embedding.offset) f("head", l.head);
}

template <class Part, class Bytes>
std::vector<Part> parts_at(const model_layout& l, Bytes all) {
    std::vector<Part> r;
    each_tensor(l, [&](std::string_view name, const tensor& t) {
        r.push_back({name, data::weight_type::f32,
                     all.subspan(static_cast<std::size_t>(t.offset) * sizeof(float),
                                 static_cast<std::size_t>(t.size()) * sizeof(float))});
    });
    return r;
}

} // namespace

std::vector<data::weight_target> parts_of(transformer<float>& model) {
    return parts_at<data::weight_target>(model.layout, std::as_writable_bytes(std::span(model.weights)));
}
std::vector<data::weight_part> parts_of(const transformer<float>& model) {
    return parts_at<data::weight_part>(model.layout, std::as_bytes(std::span(model.weights)));
}

// From the version before, if that is published; what a late learner makes may be the same once more.
void publication::add_delta(entry& next) const {
    entry base;
    {
        const std::lock_guard lock(mutex_);
        if (next.name.job < latest_.name.job) return;
        if (latest_.what.model == next.what.model) {
            next.made = latest_.made, next.chain = latest_.chain;
            return;
        }
        base = next.name.version != latest_.name.version ? latest_ : previous_;
    }
    const auto parts = parts_of(*next.what.model);
    next.made = data::version_of(parts, next.name.version);
    if (!base.what.model || base.what.model->weights.size() != next.what.model->weights.size()) return;
    auto made = std::make_shared<delta>();
    made->base = base.made;
    made->bytes = data::weight_delta(base.made, parts_of(*base.what.model), parts, next.name.version);
    next.chain = std::move(base.chain);
    if (next.chain.size() == kept_deltas) next.chain.erase(next.chain.begin());
    next.chain.push_back(std::move(made));
}

parcel publication::send(const name_type& name, const data::weight_version& held) const {
    const std::lock_guard lock(mutex_);
    const entry& e = find(name);
    parcel r{{}, e.what, e.made};
    if (held == e.made) return r;
    std::size_t first = e.chain.size();
    while (first > 0 && !(e.chain[first - 1]->base == held)) --first;
    if (first == 0) first = e.chain.size();
    for (std::size_t i = std::max<std::size_t>(first, 1) - 1; i < e.chain.size(); ++i)
        r.deltas.emplace_back(e.chain[i], &e.chain[i]->bytes);
    return r;
}

void publication::count(const publication_counts& c) const {
    const std::lock_guard lock(mutex_);
    counts_.deltas += c.deltas, counts_.whole += c.whole;
    counts_.delta_bytes += c.delta_bytes, counts_.whole_bytes += c.whole_bytes;
    counts_.missed += c.missed, counts_.checked += c.checked;
}

policy weight_receiver::take(const publication& from, const publication::name_type& name) {
    const parcel sent = from.send(name, held_);
    publication_counts c;
    if (!model_ || !(held_ == sent.made)) { // else the same bits by another name
        auto next =
            std::make_shared<transformer<float>>(model_ ? *model_ : transformer<float>(sent.weights.model->shape));
        const auto parts = parts_of(*next);
        data::weight_version held = held_;
        try {
            if (!model_) throw data::missed_base(held, {});
            for (const auto& bytes : sent.deltas) {
                held = data::apply_weight_delta(*bytes, held, parts);
                ++c.deltas, c.delta_bytes += static_cast<std::int64_t>(bytes->size());
            }
            if (!(held == sent.made)) throw data::missed_base(held, sent.made); // there was no delta at all
        } catch (const data::missed_base&) {
            if (model_) ++c.missed;
            const parcel::bytes bytes = data::whole_weights(parts_of(*sent.weights.model), name.version);
            held = data::apply_weight_delta(bytes, {}, {}, parts);
            ++c.whole, c.whole_bytes += static_cast<std::int64_t>(bytes.size());
        }
        next->weights_changed();
        model_ = std::move(next), held_ = held;
    }
    if (from.how().check) {
        const auto ours = parts_of(*model_), theirs = parts_of(*sent.weights.model); // not what lies between tensors
        for (std::size_t i = 0; i < ours.size(); ++i)
            if (!std::ranges::equal(ours[i].bytes, theirs[i].bytes))
                throw std::logic_error(fmt::format(
                    "--check-publications: version {} was received with other bits of {} than the learner's",
                    name.version, ours[i].name));
        ++c.checked;
    }
    from.count(c);
    return {model_, static_cast<std::int32_t>(name.version)};
}

} // namespace trainer
