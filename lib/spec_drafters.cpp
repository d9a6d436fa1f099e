// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drafters without a model.
#include <memory>
#include <vector>

#include "opd/spec/ngram_table.hpp"
#include "opd/spec/prompt_groups.hpp"
#include "opd/spec/suffix_automaton.hpp"
#include "spec.hpp"

namespace spec = opd::spec;

struct opd_ngram_table : opd_c::one_at_a_time<spec::ngram_table> {
    using one_at_a_time::one_at_a_time;
};
struct opd_suffix_automaton : opd_c::one_at_a_time<spec::suffix_automaton> {
    opd::index_t most_tokens;
    explicit opd_suffix_automaton(opd::index_t most) : one_at_a_time(most), most_tokens(most) {}
};
struct opd_prompt_groups : opd_c::one_at_a_time<spec::prompt_groups> {
    using one_at_a_time::one_at_a_time;
};

namespace {

using namespace opd_c;

opd_match match_of(const spec::suffix_automaton::match& m) { return {m.length, m.text, m.position}; }

/// Room for drafts, and where the caller wants them.
class draft_room {
public:
    explicit draft_room(const DLTensor* out) : out_("out", out), drafts_(static_cast<std::size_t>(out_.size())) {}
    std::span<std::int32_t> span() { return drafts_; }
    void write(index_t count, std::int64_t* to) const {
        for (index_t i = 0; i < count; ++i) out_.set(i, drafts_[static_cast<std::size_t>(i)]);
        *to = count;
    }

private:
    integers out_;
    std::vector<std::int32_t> drafts_;
};

std::int32_t least_of(std::int32_t least) {
    return or_default(within("least", least, 0, std::numeric_limits<std::int32_t>::max()), 1);
}
index_t most_tokens_of(const opd_memory_options* options, index_t otherwise) {
    return or_default(read("options", options, true).most_tokens, otherwise);
}
/// A snapshot has its limit within, which would become the handle's.
std::string snapshot_kind(const char* kind, index_t most_tokens) {
    return std::string(kind) + " of at most " + std::to_string(most_tokens) + " tokens";
}
spec::prompt_groups::text_id text_of(const opd_text_id* text) {
    need("text", text);
    return {text->prompt, text->number};
}

} // namespace

extern "C" {

int opd_ngram_table_create(const opd_ngram_options* options, opd_ngram_table** out) {
    return create(out, [&] {
        const opd_ngram_options o = read("options", options, true);
        spec::ngram_options to;
        to.bytes = static_cast<std::size_t>(or_default(o.bytes, std::uint64_t{1} << 20));
        to.longest = or_default(o.longest, to.longest);
        to.shortest = or_default(o.shortest, to.shortest);
        return of_member("options", [&] { return std::make_shared<opd_ngram_table>(to); });
    });
}
void opd_ngram_table_destroy(opd_ngram_table* table) { handles<opd_ngram_table>().remove(table); }

int opd_ngram_table_learn(opd_ngram_table* table, const DLTensor* text, int64_t first) {
    return guarded([&] {
        const std::vector<std::int32_t> tokens = tokens_of("text", text);
        within("first", first, 0, static_cast<std::int64_t>(tokens.size()));
        in_turn("table", table,
                [&](opd_ngram_table& t) { t.value.learn_text(tokens, static_cast<std::size_t>(first)); });
    });
}
int opd_ngram_table_draft(opd_ngram_table* table, const DLTensor* before, int32_t least, const DLTensor* out,
                          int64_t* count, int32_t* matched) {
    return guarded([&] {
        need("count", count);
        const std::vector<std::int32_t> tokens = tokens_of("before", before);
        draft_room room(out);
        in_turn("table", table, [&](opd_ngram_table& t) {
            const auto d = t.value.draft(tokens, room.span(), least_of(least));
            room.write(d.count, count);
            if (matched != nullptr) *matched = d.matched;
        });
    });
}
int opd_ngram_table_clear(opd_ngram_table* table) {
    return guarded([&] { in_turn("table", table, [](opd_ngram_table& t) { t.value.clear(); }); });
}
int opd_ngram_table_capacity(opd_ngram_table* table, int64_t* keys, uint64_t* bytes) {
    return guarded([&] {
        in_turn("table", table, [&](opd_ngram_table& t) {
            if (keys != nullptr) *keys = t.value.capacity();
            if (bytes != nullptr) *bytes = t.value.bytes();
        });
    });
}
int opd_ngram_table_snapshot(opd_ngram_table* table, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("table", table,
                [&](opd_ngram_table& t) { write_snapshot("ngram_table", t.value, bytes, size, length); });
    });
}
int opd_ngram_table_restore(opd_ngram_table* table, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("table", table, [&](opd_ngram_table& t) {
            spec::ngram_table anew(t.value.options());
            read_snapshot("ngram_table", anew, bytes, size);
            t.value = std::move(anew);
        });
    });
}

int opd_suffix_automaton_create(const opd_memory_options* options, opd_suffix_automaton** out) {
    return create(out, [&] {
        const index_t most = most_tokens_of(options, index_t{1} << 20);
        return of_member("options", [&] { return std::make_shared<opd_suffix_automaton>(most); });
    });
}
void opd_suffix_automaton_destroy(opd_suffix_automaton* automaton) {
    handles<opd_suffix_automaton>().remove(automaton);
}
int opd_suffix_automaton_begin(opd_suffix_automaton* automaton, int32_t* text) {
    return guarded([&] {
        need("text", text);
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) { *text = a.value.begin(); });
    });
}
int opd_suffix_automaton_append(opd_suffix_automaton* automaton, int32_t text, const DLTensor* tokens,
                                int32_t* learnt) {
    return guarded([&] {
        const std::vector<std::int32_t> more = tokens_of("tokens", tokens);
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) {
            (void)a.value.open(text); // refuses a text that there is not, if it gets no tokens too
            const bool all = a.value.append(text, more);
            if (learnt != nullptr) *learnt = all;
        });
    });
}
int opd_suffix_automaton_end(opd_suffix_automaton* automaton, int32_t text) {
    return guarded([&] { in_turn("automaton", automaton, [&](opd_suffix_automaton& a) { a.value.close(text); }); });
}
int opd_suffix_automaton_longest(opd_suffix_automaton* automaton, int32_t text, opd_match* match) {
    return guarded([&] {
        need("match", match);
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) { *match = match_of(a.value.longest(text)); });
    });
}
int opd_suffix_automaton_draft(opd_suffix_automaton* automaton, int32_t text, int32_t least, const DLTensor* out,
                               int64_t* count) {
    return guarded([&] {
        need("count", count);
        draft_room room(out);
        in_turn("automaton", automaton,
                [&](opd_suffix_automaton& a) { room.write(a.value.draft(text, room.span(), least_of(least)), count); });
    });
}
int opd_suffix_automaton_forget(opd_suffix_automaton* automaton, int32_t count) {
    return guarded([&] { in_turn("automaton", automaton, [&](opd_suffix_automaton& a) { a.value.forget(count); }); });
}
int opd_suffix_automaton_holds(opd_suffix_automaton* automaton, int64_t* tokens, int32_t* texts, uint64_t* bytes) {
    return guarded([&] {
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) {
            if (tokens != nullptr) *tokens = a.value.tokens();
            if (texts != nullptr) *texts = a.value.texts();
            if (bytes != nullptr) *bytes = a.value.bytes();
        });
    });
}
int opd_suffix_automaton_snapshot(opd_suffix_automaton* automaton, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) {
            write_snapshot(snapshot_kind("suffix_automaton", a.most_tokens), a.value, bytes, size, length);
        });
    });
}
int opd_suffix_automaton_restore(opd_suffix_automaton* automaton, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("automaton", automaton, [&](opd_suffix_automaton& a) {
            spec::suffix_automaton anew;
            read_snapshot(snapshot_kind("suffix_automaton", a.most_tokens), anew, bytes, size);
            a.value = std::move(anew);
        });
    });
}

int opd_prompt_groups_create(const opd_memory_options* options, opd_prompt_groups** out) {
    return create(out, [&] {
        const index_t most = most_tokens_of(options, index_t{1} << 22);
        return of_member("options", [&] { return std::make_shared<opd_prompt_groups>(most); });
    });
}
void opd_prompt_groups_destroy(opd_prompt_groups* groups) { handles<opd_prompt_groups>().remove(groups); }
int opd_prompt_groups_begin(opd_prompt_groups* groups, uint64_t prompt, int64_t epoch, const DLTensor* tokens,
                            opd_text_id* text) {
    return guarded([&] {
        need("text", text);
        std::vector<std::int32_t> so_far;
        if (tokens != nullptr) so_far = tokens_of("tokens", tokens);
        in_turn("groups", groups, [&](opd_prompt_groups& g) {
            const auto id = g.value.begin(prompt, epoch, so_far);
            *text = {id.prompt, id.number};
        });
    });
}
int opd_prompt_groups_append(opd_prompt_groups* groups, const opd_text_id* text, const DLTensor* tokens,
                             int32_t* learnt) {
    return guarded([&] {
        const auto id = text_of(text);
        const std::vector<std::int32_t> more = tokens_of("tokens", tokens);
        in_turn("groups", groups, [&](opd_prompt_groups& g) {
            bool all = true;
            for (const std::int32_t t : more) all = g.value.append(id, t);
            if (learnt != nullptr) *learnt = all;
        });
    });
}
int opd_prompt_groups_end(opd_prompt_groups* groups, const opd_text_id* text) {
    return guarded([&] {
        const auto id = text_of(text);
        in_turn("groups", groups, [&](opd_prompt_groups& g) { g.value.end(id); });
    });
}
int opd_prompt_groups_longest(opd_prompt_groups* groups, const opd_text_id* text, opd_match* match) {
    return guarded([&] {
        need("match", match);
        const auto id = text_of(text);
        in_turn("groups", groups, [&](opd_prompt_groups& g) { *match = match_of(g.value.longest(id)); });
    });
}
int opd_prompt_groups_draft(opd_prompt_groups* groups, const opd_text_id* text, int32_t least, const DLTensor* out,
                            int64_t* count) {
    return guarded([&] {
        need("count", count);
        const auto id = text_of(text);
        draft_room room(out);
        in_turn("groups", groups,
                [&](opd_prompt_groups& g) { room.write(g.value.draft(id, room.span(), least_of(least)), count); });
    });
}
int opd_prompt_groups_holds(opd_prompt_groups* groups, int64_t* groups_now, int64_t* tokens, uint64_t* bytes) {
    return guarded([&] {
        in_turn("groups", groups, [&](opd_prompt_groups& g) {
            if (groups_now != nullptr) *groups_now = g.value.groups();
            if (tokens != nullptr) *tokens = g.value.tokens();
            if (bytes != nullptr) *bytes = g.value.bytes();
        });
    });
}
int opd_prompt_groups_snapshot(opd_prompt_groups* groups, void* bytes, size_t size, size_t* length) {
    return guarded([&] {
        in_turn("groups", groups, [&](opd_prompt_groups& g) {
            write_snapshot(snapshot_kind("prompt_groups", g.value.most_tokens()), g.value, bytes, size, length);
        });
    });
}
int opd_prompt_groups_restore(opd_prompt_groups* groups, const void* bytes, size_t size) {
    return guarded([&] {
        in_turn("groups", groups, [&](opd_prompt_groups& g) {
            spec::prompt_groups anew;
            read_snapshot(snapshot_kind("prompt_groups", g.value.most_tokens()), anew, bytes, size);
            g.value = std::move(anew);
        });
    });
}

} // extern "C"
