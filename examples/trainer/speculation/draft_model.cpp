// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/draft_model.hpp"

#include <utility>

#include <fmt/format.h>

#include "opd/sched/archive.hpp"
#include "settings/files.hpp"

namespace trainer {

namespace {

model_shape shape_of(const config& c, const model_shape& target) {
    const auto& d = c.drafter;
    const model_shape own{.vocabulary = target.vocabulary,
                          .width = d.width,
                          .layers = d.layers,
                          .heads = d.heads,
                          .kv_heads = d.kv_heads,
                          .head_dim = d.head_dim,
                          .ffn = d.ffn,
                          .max_length = target.max_length};
    return d.kind == "hidden"   ? hidden_drafter_shape(target, own)
           : d.kind == "eagle3" ? fused_drafter_shape(target, own)
                                : own;
}

drafter_kind kind_of(const config& c) {
    return c.drafter.kind == "hidden"   ? drafter_kind::hidden
           : c.drafter.kind == "eagle3" ? drafter_kind::eagle3
                                        : drafter_kind::model;
}

// The second also says what models of other families than Qwen3 have (model.hpp).
constexpr std::string_view mark = "OPDDRAFT 1\n", mark_of_families = "OPDDRAFT 2\n";

template <class A>
void list(A& a, model_shape& s) {
    a(s.vocabulary, s.width, s.layers, s.heads, s.kv_heads, s.head_dim, s.ffn, s.tied, s.max_length);
}
template <class A>
void list_family(A& a, model_shape& s) {
    a(s.qk_norm, s.attention_bias, s.output_bias, s.norm_epsilon, s.rope.base, s.rope.how, s.rope.factor, s.rope.low,
      s.rope.high, s.rope.original_length);
}
bool is_of_family(const model_shape& s) {
    model_shape plain = s;
    const model_shape none;
    plain.qk_norm = none.qk_norm, plain.attention_bias = none.attention_bias, plain.output_bias = none.output_bias;
    plain.norm_epsilon = none.norm_epsilon, plain.rope = none.rope;
    return !(plain == s);
}
bool is_sound_family(const model_shape& s) {
    const auto in = [](double x, double least) { return x >= least && x <= 1e12; };
    return in(s.norm_epsilon, 0) && in(s.rope.base, 1) && in(s.rope.factor, 1) && in(s.rope.low, 0) &&
           in(s.rope.high - s.rope.low, 1e-6) && in(s.rope.original_length, 1) && s.rope.how <= rope::scaling::llama3;
}

} // namespace

draft_model::draft_model(const config& c, const model_shape& of) : draft_model(kind_of(c), of, shape_of(c, of)) {
    weights.initialise(c.run.seed + 2);
}

std::string drafter_bytes(const draft_model& d, const drafter_progress* progress) {
    opd::sched::archive_writer w;
    model_shape target = d.target, own = d.weights.shape;
    w(d.kind);
    list(w, target);
    list(w, own);
    const bool families = is_of_family(target) || is_of_family(own);
    if (families) list_family(w, target), list_family(w, own);
    w(d.weights.weights);
    if (progress)
        w(progress->updates, progress->trained_on, progress->optimizer.m, progress->optimizer.v,
          progress->optimizer.step);
    std::string out = std::string(families ? mark_of_families : mark) + w.bytes;
    return out + hash128(out);
}

draft_model drafter_of(std::string_view file, const std::string& path, drafter_progress* progress) {
    const auto refuse = [&](const std::string& why) { return failure(exit_input, fmt::format("{}: {}", path, why)); };
    const bool families = file.substr(0, mark.size()) == mark_of_families;
    if (!families && file.substr(0, mark.size()) != mark) throw refuse("not a drafter of opd-train");
    if (file.size() < mark.size() + 32 || hash128(file.substr(0, file.size() - 32)) != file.substr(file.size() - 32))
        throw refuse("damaged drafter (its checksum does not fit)");
    try {
        opd::sched::archive_reader r(file.substr(mark.size(), file.size() - 32 - mark.size()));
        drafter_kind kind{};
        model_shape target, own;
        std::vector<float> weights;
        r(kind);
        list(r, target);
        list(r, own);
        if (families) list_family(r, target), list_family(r, own);
        r(weights);
        drafter_progress came;
        if (!r.done()) r(came.updates, came.trained_on, came.optimizer.m, came.optimizer.v, came.optimizer.step);
        if (!r.done()) throw refuse("damaged drafter (it is too long)");
        if (came.updates < 0 || came.optimizer.step < 0 || came.optimizer.m.size() != came.optimizer.v.size() ||
            (!came.optimizer.m.empty() && came.optimizer.m.size() != weights.size()))
            throw refuse("damaged drafter (its optimizer is that of another)");
        const bool sound = own.heads > 0 && own.kv_heads > 0 && own.heads % own.kv_heads == 0 && own.head_dim > 0 &&
                           own.head_dim % 2 == 0 && own.width > 0 && own.ffn > 0 && own.layers > 0 &&
                           own.layers <= 1024 && own.max_length == target.max_length && target.width > 0 &&
                           (kind == drafter_kind::hidden   ? own == hidden_drafter_shape(target, own)
                            : kind == drafter_kind::eagle3 ? own == fused_drafter_shape(target, own)
                                                           : own.vocabulary == target.vocabulary);
        if (!sound || !is_sound_family(target) || !is_sound_family(own) ||
            model_layout(own).size != static_cast<index_t>(weights.size()))
            throw refuse("damaged drafter (its weights are of no such model)");
        draft_model d(kind, target, own);
        d.weights.weights = std::move(weights);
        d.weights.weights_changed();
        if (progress) *progress = std::move(came);
        return d;
    } catch (const opd::invalid_input& e) {
        throw refuse(fmt::format("damaged drafter ({})", e.what()));
    }
}

void save_drafter(const std::string& path, const draft_model& d) { write_file(path, drafter_bytes(d)); }
draft_model load_drafter(const std::string& path, drafter_progress* progress) {
    return drafter_of(read_file(path), path, progress);
}

} // namespace trainer
