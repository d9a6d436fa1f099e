// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/bpe.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <utf8proc.h>

#include "hf/pattern.hpp"
#include "hf/strict_json.hpp"
#include "hf/utf8.hpp"

namespace trainer {

namespace {

constexpr token most_ids =
    1 << 24; // real vocabularies have less than 2^19; a table of this size is memory that any machine has
constexpr token none = -1;
constexpr std::size_t most_text = std::size_t{1} << 30; // so that places in it fit in 32 bits

constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// \w of Rust's regex, in which `tokenizers` asks for a token's neighbours.
constexpr const char* word_character = R"(\A[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}])";

void append_utf8(std::string& to, char32_t c) {
    std::array<utf8proc_uint8_t, 4> bytes{};
    const auto n = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes.data());
    to.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(n));
}

// GPT-2's alphabet: the 188 bytes that are printable in Latin-1 stand for themselves, the others for U+0100, U+0101, …
// in their order.
struct byte_alphabet {
    std::array<char32_t, 256> character{};
    std::array<int, 0x144> byte{}; // of a character; -1 where it is none
    byte_alphabet() {
        byte.fill(-1);
        char32_t next = 0x100;
        for (int b = 0; b < 256; ++b) {
            const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
            const char32_t c = printable ? static_cast<char32_t>(b) : next++;
            character[static_cast<std::size_t>(b)] = c;
            byte[c] = b;
        }
    }
};
const byte_alphabet& alphabet() {
    static const byte_alphabet one;
    return one;
}

/// The bytes that a token's characters stand for; nothing where one is not of the alphabet.
std::optional<std::string> bytes_behind(std::string_view content) {
    const auto& byte = alphabet().byte;
    std::string r;
    for (std::size_t i = 0; i < content.size();) {
        const utf8_step step = utf8_at(content, i);
        if (step.kind != utf8_step::whole || step.code >= byte.size() || byte[step.code] < 0) return std::nullopt;
        r += static_cast<char>(byte[step.code]);
        i += step.bytes;
    }
    return r;
}

std::string nfc(std::string_view s) {
    // below U+0300 nothing combines, and all is composed
    if (std::none_of(s.begin(), s.end(), [](char c) { return static_cast<unsigned char>(c) >= 0xCC; }))
        return std::string(s);
    constexpr auto options = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE);
    std::vector<utf8proc_int32_t> codes;
    codes.reserve(s.size());
    for (std::size_t i = 0; i < s.size();) {
        const utf8_step step = utf8_at(s, i);
        i += step.bytes;
        utf8proc_int32_t parts[8];
        const auto n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code), parts, 8, options, nullptr);
        if (n < 0 || n > 8) throw std::logic_error("utf8proc: a character decomposes into more than eight");
        codes.insert(codes.end(), parts, parts + n);
    }
    // utf8proc's own ordering takes quadratic time where many marks follow one another
    const auto combines = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
    for (auto at = codes.begin(); at != codes.end();) {
        const auto end = std::find_if(at, codes.end(), [&](auto c) { return combines(c) == 0; });
        std::stable_sort(at, end, [&](auto a, auto b) { return combines(a) < combines(b); });
        at = end == codes.end() ? end : end + 1;
    }
    const auto n = utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
                                            static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    std::string r;
    for (utf8proc_ssize_t i = 0; i < n; ++i) append_utf8(r, static_cast<char32_t>(codes[static_cast<std::size_t>(i)]));
    return r;
}

struct added_token {
    std::string content;
    token id = none;
    bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
};

/// Texts to be found in others: at each place the longest.
class finder {
public:
    void insert(std::string_view text, std::size_t what) {
        std::size_t node = 0;
        for (const char c : text) {
            auto& next = nodes_[node].next;
            const auto at = std::find_if(next.begin(), next.end(), [&](const auto& edge) { return edge.first == c; });
            if (at != next.end()) {
                node = at->second;
                continue;
            }
            next.emplace_back(c, nodes_.size());
            node = nodes_.size();
            nodes_.emplace_back();
        }
        begins_[static_cast<unsigned char>(text.front())] = true;
        nodes_[node].what = what;
    }
    struct hit {
        std::size_t begin, end, what;
    };
    std::optional<hit> find(std::string_view text, std::size_t from) const {
        for (; from < text.size(); ++from) {
            if (!begins_[static_cast<unsigned char>(text[from])]) continue;
            std::optional<hit> best;
            std::size_t node = 0;
            for (std::size_t i = from; i < text.size(); ++i) {
                const auto& next = nodes_[node].next;
                const auto at =
                    std::find_if(next.begin(), next.end(), [&](const auto& edge) { return edge.first == text[i]; });
                if (at == next.end()) break;
                node = at->second;
                if (nodes_[node].what) best = hit{from, i + 1, *nodes_[node].what};
            }
            if (best) return best;
        }
        return std::nullopt;
    }

private:
    struct node {
        std::vector<std::pair<char, std::size_t>> next;
        std::optional<std::size_t> what;
    };
    std::vector<node> nodes_ = std::vector<node>(1);
    std::array<bool, 256> begins_{};
};

/// What a pre-tokenizer does to a piece of text: splits it at matches, which stay as pieces of their own or which alone
/// stay, or which are left out; or, without a pattern, puts a space before it.
struct stage {
    std::optional<pattern> at;
    bool keeps_matches = true, keeps_gaps = true;
};

struct merge {
    std::int32_t rank;
    token into;
};
std::uint64_t pair_of(token left, token right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

struct text_hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
template <class T>
using text_map = std::unordered_map<std::string, T, text_hash, std::equal_to<>>;

} // namespace

struct bpe_tokenizer::parts {
    // of the model
    std::vector<std::int32_t> index_of_id; // into bytes_of; -1 where an id has no token
    std::vector<std::string> bytes_of;
    std::vector<bool> special_at; // by index
    text_map<token> id_of_content;
    text_map<token> id_of_bytes; // of the tokens that a word can be, where merges may be ignored
    std::array<token, 256> id_of_byte{};
    std::unordered_map<std::uint64_t, merge> merges;
    bool ignore_merges = false;
    // around it
    std::vector<added_token> added;
    finder before_normalizer, after_normalizer; // of added tokens
    bool normalizes = false;
    std::vector<stage> stages;
    std::vector<token> prefix, suffix;
    pattern letter = pattern(word_character, "a word's character");

    // what encode() works with
    struct symbol {
        token id; // none: merged into the one before
        std::uint32_t previous, next;
    };
    struct candidate {
        std::int32_t rank;
        std::uint32_t at;
        token into;
        bool operator>(const candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
    };
    struct words_seen {
        text_map<std::pair<std::uint32_t, std::uint32_t>> where; // begin and length in `tokens`
        std::vector<token> tokens;
    };
    std::mutex mutex; // of all below, and of the patterns
    std::vector<symbol> symbols;
    std::vector<candidate> heap;
    words_seen seen;

    void read(const json_value& file);
    void read_model(const json_value& model);
    void read_merges(const json_value& list, const text_map<token>& vocab);
    void read_added(const json_value& list);
    void read_normalizer(const json_value& n);
    void read_pre_tokenizer(const json_value& p, bool& done);
    void read_post_processor(const json_value& p, bool& around);
    void read_template(const json_value& p);
    void add_token(token id, const std::string& content);

    template <class Piece>
    void cut_out_added(const finder& find, std::string_view text, std::vector<token>& to, Piece&& piece);
    void pre_tokenize(std::string_view piece, std::size_t stage, std::vector<token>& to);
    void encode_word(std::string_view word, std::vector<token>& to);
    void merge_word(std::string_view word, std::vector<token>& to);
    bool begins_word(std::string_view text) const { return letter.find(text, 0).found; }
};

// --- reading
// ------------------------------------------------------------------------------------------------------------

namespace {

const std::string& type_of(const json_value& j) { return j.at("type").text(); }

void read_byte_level(const json_value& j) {
    j.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) j.truth_of(key, true);
}

} // namespace

void bpe_tokenizer::parts::add_token(token id, const std::string& content) {
    if (static_cast<std::size_t>(id) >= index_of_id.size()) index_of_id.resize(static_cast<std::size_t>(id) + 1, -1);
    index_of_id[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(bytes_of.size());
    bytes_of.push_back(bytes_behind(content).value_or(content));
    special_at.push_back(false);
    id_of_content.emplace(content, id);
}

void bpe_tokenizer::parts::read(const json_value& file) {
    file.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
               "decoder", "model"});
    if (file.has("version") && file.at("version").text() != "1.0")
        file.at("version").refuse("is " + shown(file.at("version").text()) + "; supported is \"1.0\"");
    for (const char* key : {"truncation", "padding"})
        if (file.has(key)) file.at(key).refuse("is not supported; set it to null");
    if (file.has("normalizer")) read_normalizer(file.at("normalizer"));
    bool bytes = false, around = false;
    if (!file.has("pre_tokenizer")) file.refuse("has no pre_tokenizer; supported is byte-level BPE alone");
    read_pre_tokenizer(file.at("pre_tokenizer"), bytes);
    if (!bytes) file.at("pre_tokenizer").refuse("has no ByteLevel; supported is byte-level BPE alone");
    read_model(file.at("model"));
    if (file.has("added_tokens")) read_added(file.at("added_tokens"));
    if (file.has("post_processor")) read_post_processor(file.at("post_processor"), around);
    if (!file.has("decoder")) file.refuse("has no decoder; supported is ByteLevel");
    const json_value decoder = file.at("decoder");
    if (type_of(decoder) != "ByteLevel")
        decoder.refuse("the type " + shown(type_of(decoder)) + " is not supported; ByteLevel is");
    read_byte_level(decoder);
}

void bpe_tokenizer::parts::read_model(const json_value& model) {
    model.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (model.has("type") && type_of(model) != "BPE")
        model.at("type").refuse("is " + shown(type_of(model)) + "; supported is BPE");
    if (model.has("dropout")) model.at("dropout").refuse("is not supported; set it to null");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
        if (model.has(key) && !model.at(key).text().empty())
            model.at(key).refuse("is not supported; byte-level BPE has none");
    // all bytes have tokens, so nothing is unknown: these three say nothing
    if (model.has("unk_token")) model.at("unk_token").text();
    for (const char* key : {"fuse_unk", "byte_fallback"}) model.truth_of(key, false);
    ignore_merges = model.truth_of("ignore_merges", false);

    const json_value vocab = model.at("vocab");
    for (const auto& [content, j] : vocab.object().raw().items()) {
        if (!j.is_number_unsigned() || j.get<std::uint64_t>() >= static_cast<std::uint64_t>(most_ids))
            vocab.at(content).id(most_ids - 1); // refuses
        const auto id = j.get<token>();
        if (static_cast<std::size_t>(id) < index_of_id.size() && index_of_id[static_cast<std::size_t>(id)] >= 0)
            vocab.refuse("the id " + std::to_string(id) + " is there twice, once of " + shown(content));
        add_token(id, content);
        if (const auto bytes = bytes_behind(content)) id_of_bytes.emplace(*bytes, id);
    }
    for (int b = 0; b < 256; ++b) {
        const auto found = id_of_bytes.find(std::string(1, static_cast<char>(b)));
        id_of_byte[static_cast<std::size_t>(b)] = found == id_of_bytes.end() ? none : found->second;
        const bool in_utf8 = b < 0xC0 || (b >= 0xC2 && b <= 0xF4);
        if (in_utf8 && found == id_of_bytes.end()) {
            std::string c;
            append_utf8(c, alphabet().character[static_cast<std::size_t>(b)]);
            vocab.refuse("has no token " + shown(c) + " for the byte " + std::to_string(b));
        }
    }
    read_merges(model.at("merges"), id_of_content);
    if (!ignore_merges) id_of_bytes.clear();
}

void bpe_tokenizer::parts::read_merges(const json_value& list, const text_map<token>& vocab) {
    std::int32_t rank = 0;
    list.list();
    merges.reserve(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
        const nlohmann::json& j = list.raw()[i];
        std::string left, right;
        if (j.is_string()) { // "a b"
            const auto& both = j.get_ref<const std::string&>();
            if (both.starts_with("#version")) continue; // merges.txt begins so
            const auto space = both.find(' ');
            if (space == both.npos || both.find(' ', space + 1) != both.npos)
                list.at(i).refuse("is " + shown(both) + ", not two tokens and a space");
            left = both.substr(0, space);
            right = both.substr(space + 1);
        } else {
            if (!j.is_array() || j.size() != 2 || !j[0].is_string() || !j[1].is_string())
                list.at(i).refuse("is neither a string nor a pair of strings");
            left = j[0].get<std::string>();
            right = j[1].get<std::string>();
        }
        const auto id = [&](const std::string& content) {
            const auto found = vocab.find(content);
            if (content.empty() || found == vocab.end())
                list.at(i).refuse("the token " + shown(content) + " is not in the vocabulary");
            return found->second;
        };
        const token into = id(left + right);
        if (!merges.emplace(pair_of(id(left), id(right)), merge{rank++, into}).second)
            list.at(i).refuse("merges " + shown(left) + " and " + shown(right) + " a second time");
    }
}

void bpe_tokenizer::parts::read_added(const json_value& list) {
    const std::size_t of_model = bytes_of.size();
    token largest = none; // of the added tokens
    std::unordered_set<std::string> contents, as_normalised;
    list.list();
    for (std::size_t i = 0; i < list.size(); ++i) {
        const json_value j = list.at(i);
        j.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
        added_token t;
        t.content = j.at("content").text();
        t.id = j.at("id").id(most_ids - 1);
        t.single_word = j.at("single_word").truth();
        t.lstrip = j.at("lstrip").truth();
        t.rstrip = j.at("rstrip").truth();
        t.normalized = j.at("normalized").truth();
        t.special = j.at("special").truth();
        if (t.content.empty()) j.refuse("has no content");
        if (!contents.insert(t.content).second) j.refuse("the token " + shown(t.content) + " is there twice");
        // the id that `tokenizers` gives it, whatever the file says
        const auto known = id_of_content.find(t.content);
        const auto size = static_cast<token>(of_model);
        const token id = known != id_of_content.end() ? known->second : largest >= size ? largest + 1 : size;
        if (id != t.id)
            j.refuse("the token " + shown(t.content) + " has the id " + std::to_string(t.id) +
                     ", but tokenizers would give it " + std::to_string(id));
        if (known == id_of_content.end()) {
            if (static_cast<std::size_t>(id) < index_of_id.size() && index_of_id[static_cast<std::size_t>(id)] >= 0)
                j.refuse("the id " + std::to_string(id) + " is another token's");
            add_token(id, t.content);
        }
        const std::string found_as = t.normalized && normalizes ? nfc(t.content) : t.content;
        if (t.special && found_as != t.content) // which tokenizers would not take for special when it decodes
            j.refuse("the token " + shown(t.content) + " is special and changes when it is normalised: give it in NFC");
        if (t.normalized && !as_normalised.insert(found_as).second)
            j.refuse("the token " + shown(t.content) + " is another one when it is normalised");
        const auto at = static_cast<std::size_t>(index_of_id[static_cast<std::size_t>(id)]);
        bytes_of[at] = bytes_behind(found_as).value_or(found_as);
        special_at[at] = t.special;
        (t.normalized ? after_normalizer : before_normalizer).insert(found_as, added.size());
        largest = std::max(largest, id);
        added.push_back(std::move(t));
    }
}

void bpe_tokenizer::parts::read_normalizer(const json_value& n) {
    const std::string& type = type_of(n);
    if (type == "NFC") {
        n.only({"type"});
        normalizes = true;
    } else if (type == "Sequence") {
        n.only({"type", "normalizers"});
        const json_value list = n.at("normalizers");
        list.list();
        for (std::size_t i = 0; i < list.size(); ++i) read_normalizer(list.at(i));
    } else {
        n.refuse("the type " + shown(type) + " is not supported; null and NFC are");
    }
}

void bpe_tokenizer::parts::read_pre_tokenizer(const json_value& p, bool& done) {
    constexpr std::size_t most_stages = 32;
    if (done) p.refuse("comes after ByteLevel, which must be the last");
    if (stages.size() >= most_stages) p.refuse("has more than " + std::to_string(most_stages) + " steps");
    const auto split = [&](std::string_view oniguruma, const json_value& whose, bool matches, bool gaps) {
        stages.push_back({pattern(pcre2_pattern(oniguruma, whose.name()), whose.name()), matches, gaps});
    };
    const std::string& type = type_of(p);
    if (type == "Sequence") {
        p.only({"type", "pretokenizers"});
        const json_value list = p.at("pretokenizers");
        list.list();
        for (std::size_t i = 0; i < list.size(); ++i) read_pre_tokenizer(list.at(i), done);
    } else if (type == "ByteLevel") {
        read_byte_level(p);
        if (p.truth_of("add_prefix_space", true)) stages.push_back({});
        if (p.truth_of("use_regex", true)) split(gpt2_pattern, p, true, true);
        done = true;
    } else if (type == "Split") {
        p.only({"type", "pattern", "behavior", "invert"});
        const json_value of = p.at("pattern"), behavior = p.at("behavior");
        of.only({"Regex"});
        const bool removed = behavior.text() == "Removed", inverted = p.at("invert").truth();
        if (!removed && behavior.text() != "Isolated")
            behavior.refuse("is " + shown(behavior.text()) + "; supported are Isolated and Removed");
        split(of.at("Regex").text(), of, !removed || inverted, !removed || !inverted);
    } else if (type == "Digits") {
        p.only({"type", "individual_digits"});
        split(p.at("individual_digits").truth() ? R"(\p{N})" : R"(\p{N}+)", p, true, true);
    } else {
        p.refuse("the type " + shown(type) + " is not supported; ByteLevel, Split, Digits and Sequence are");
    }
}

void bpe_tokenizer::parts::read_post_processor(const json_value& p, bool& around) {
    const std::string& type = type_of(p);
    if (type == "Sequence") {
        p.only({"type", "processors"});
        const json_value list = p.at("processors");
        list.list();
        for (std::size_t i = 0; i < list.size(); ++i) read_post_processor(list.at(i), around);
    } else if (type == "ByteLevel") { // moves offsets, which nobody asks for here
        read_byte_level(p);
    } else if (type == "TemplateProcessing") {
        if (std::exchange(around, true)) p.refuse("is a second template, which is not supported");
        read_template(p);
    } else {
        p.refuse("the type " + shown(type) + " is not supported; ByteLevel, TemplateProcessing and Sequence are");
    }
}

void bpe_tokenizer::parts::read_template(const json_value& p) {
    p.only({"type", "single", "pair", "special_tokens"}); // pairs of texts are not encoded here
    const json_value single = p.at("single"), tokens = p.at("special_tokens");
    bool text = false;
    single.list();
    tokens.object();
    for (std::size_t i = 0; i < single.size(); ++i) {
        const json_value item = single.at(i);
        item.only({"SpecialToken", "Sequence"});
        if (item.size() != 1) item.refuse("is not one of SpecialToken and Sequence");
        if (item.has("Sequence")) {
            const json_value of = item.at("Sequence");
            of.only({"id", "type_id"});
            if (of.at("id").text() != "A") of.at("id").refuse("is " + shown(of.at("id").text()) + ", not \"A\"");
            if (std::exchange(text, true)) of.refuse("has the text a second time, which is not supported");
            continue;
        }
        const json_value of = item.at("SpecialToken");
        of.only({"id", "type_id"});
        const json_value found = tokens.at(of.at("id").text());
        found.only({"id", "ids", "tokens"});
        const json_value ids = found.at("ids");
        ids.list();
        for (std::size_t k = 0; k < ids.size(); ++k) {
            const token id = ids.at(k).id(static_cast<token>(index_of_id.size()) - 1);
            if (index_of_id[static_cast<std::size_t>(id)] < 0) ids.at(k).refuse("is an id without a token");
            (text ? suffix : prefix).push_back(id);
        }
    }
    if (!text) single.refuse("has no place for the text");
}

// --- encoding
// -----------------------------------------------------------------------------------------------------------

/// Calls piece(text) for what is between added tokens, in turn with their ids.
template <class Piece>
void bpe_tokenizer::parts::cut_out_added(const finder& find, std::string_view text, std::vector<token>& to,
                                         Piece&& piece) {
    std::size_t done = 0, from = 0;
    while (const auto hit = find.find(text, from)) {
        from = hit->end;
        const added_token& t = added[hit->what];
        std::size_t begin = hit->begin, end = hit->end;
        if (t.single_word && ((begin > 0 && begins_word(text.substr(last_character(text.substr(0, begin))))) ||
                              (end < text.size() && begins_word(text.substr(end)))))
            continue;
        if (t.lstrip)
            while (begin > done) {
                const std::size_t last = last_character(text.substr(0, begin));
                if (!is_white_space(utf8_at(text, last).code)) break;
                begin = last;
            }
        if (t.rstrip)
            while (end < text.size() && is_white_space(utf8_at(text, end).code)) end += utf8_at(text, end).bytes;
        if (done < begin) piece(text.substr(done, begin - done));
        to.push_back(t.id);
        done = end;
    }
    if (done < text.size()) piece(text.substr(done));
}

void bpe_tokenizer::parts::pre_tokenize(std::string_view piece, std::size_t i, std::vector<token>& to) {
    if (piece.empty()) return;
    if (i == stages.size()) return encode_word(piece, to);
    const stage& s = stages[i];
    if (!s.at)
        return piece.front() == ' ' ? pre_tokenize(piece, i + 1, to)
                                    : pre_tokenize(' ' + std::string(piece), i + 1, to);
    std::size_t done = 0;
    while (done < piece.size()) {
        const pattern::match m = s.at->find(piece, done);
        const std::size_t gap = m.found ? m.begin : piece.size();
        if (s.keeps_gaps) pre_tokenize(piece.substr(done, gap - done), i + 1, to);
        if (!m.found) return;
        if (s.keeps_matches) pre_tokenize(piece.substr(m.begin, m.end - m.begin), i + 1, to);
        done = m.end;
    }
}

void bpe_tokenizer::parts::encode_word(std::string_view word, std::vector<token>& to) {
    constexpr std::size_t longest = 256, most_words = 1u << 17,
                          most_tokens = 1u << 21; // that are remembered: 30 MB at most
    if (const auto found = seen.where.find(word); found != seen.where.end()) {
        const auto [begin, n] = found->second;
        to.insert(to.end(), seen.tokens.begin() + begin, seen.tokens.begin() + begin + n);
        return;
    }
    const std::size_t before = to.size();
    const auto whole = ignore_merges ? id_of_bytes.find(word) : id_of_bytes.end();
    if (whole != id_of_bytes.end())
        to.push_back(whole->second);
    else
        merge_word(word, to);
    if (word.size() > longest) return;
    if (seen.where.size() >= most_words || seen.tokens.size() >= most_tokens) seen = {};
    seen.where.emplace(word, std::pair(static_cast<std::uint32_t>(seen.tokens.size()),
                                       static_cast<std::uint32_t>(to.size() - before)));
    seen.tokens.insert(seen.tokens.end(), to.begin() + static_cast<std::ptrdiff_t>(before), to.end());
}

void bpe_tokenizer::parts::merge_word(std::string_view word, std::vector<token>& to) {
    const auto n = static_cast<std::uint32_t>(word.size());
    symbols.clear();
    heap.clear();
    for (std::uint32_t i = 0; i < n; ++i)
        symbols.push_back({id_of_byte[static_cast<unsigned char>(word[i])], i - 1, i + 1});
    const auto consider = [&](std::uint32_t left, std::uint32_t right) {
        if (left >= n || right >= n) return;
        const auto found = merges.find(pair_of(symbols[left].id, symbols[right].id));
        if (found == merges.end()) return;
        heap.push_back({found->second.rank, left, found->second.into});
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
    };
    for (std::uint32_t i = 0; i + 1 < n; ++i) consider(i, i + 1);
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        const candidate best = heap.back();
        heap.pop_back();
        symbol& left = symbols[best.at];
        if (left.id == none || left.next >= n) continue;
        symbol& right = symbols[left.next];
        const auto found = merges.find(pair_of(left.id, right.id));
        if (found == merges.end() || found->second.into != best.into) continue; // its pair is no more
        left.id = best.into;
        left.next = right.next;
        right.id = none;
        if (left.next < n) symbols[left.next].previous = best.at;
        consider(left.previous, best.at);
        consider(best.at, left.next);
    }
    for (std::uint32_t i = 0; i < n; i = symbols[i].next) to.push_back(symbols[i].id);
}

// --- the tokenizer
// ------------------------------------------------------------------------------------------------------

bpe_tokenizer::bpe_tokenizer(std::string_view json, const std::string& name) : parts_(new parts) {
    const nlohmann::json file = strict_json(json, name);
    parts_->read({file, name});
}
bpe_tokenizer::~bpe_tokenizer() = default;
bpe_tokenizer::bpe_tokenizer(bpe_tokenizer&&) noexcept = default;

std::vector<token> bpe_tokenizer::encode(std::string_view text, bool add_special) const {
    if (const std::size_t at = not_utf8(text); at != text.npos)
        throw failure(exit_input, "text: is not UTF-8 at byte " + std::to_string(at));
    if (text.size() >= most_text) throw failure(exit_input, "text: is of more than 1 GiB");
    parts& p = *parts_;
    const std::lock_guard lock(p.mutex);
    std::vector<token> to;
    if (add_special) to = p.prefix;
    p.cut_out_added(p.before_normalizer, text, to, [&](std::string_view piece) {
        const std::string normalised = p.normalizes ? nfc(piece) : std::string();
        p.cut_out_added(p.after_normalizer, p.normalizes ? normalised : piece, to,
                        [&](std::string_view part) { p.pre_tokenize(part, 0, to); });
    });
    if (add_special) to.insert(to.end(), p.suffix.begin(), p.suffix.end());
    return to;
}

std::string bpe_tokenizer::bytes(std::span<const token> ids, bool skip_special) const {
    std::string r;
    for (const token id : ids) {
        if (id < 0) throw failure(exit_input, "ids: " + std::to_string(id) + " is no token");
        if (id >= vocabulary()) continue;
        const std::int32_t at = parts_->index_of_id[static_cast<std::size_t>(id)];
        if (at < 0 || (skip_special && parts_->special_at[static_cast<std::size_t>(at)])) continue;
        r += parts_->bytes_of[static_cast<std::size_t>(at)];
    }
    return r;
}
std::string bpe_tokenizer::decode(std::span<const token> ids, bool skip_special) const {
    return utf8_repaired(bytes(ids, skip_special));
}

token bpe_tokenizer::vocabulary() const { return static_cast<token>(parts_->index_of_id.size()); }
std::optional<token> bpe_tokenizer::id_of(std::string_view content) const {
    const auto found = parts_->id_of_content.find(content);
    return found == parts_->id_of_content.end() ? std::nullopt : std::optional(found->second);
}
bool bpe_tokenizer::is_special(token id) const {
    if (id < 0 || id >= vocabulary()) return false;
    const std::int32_t at = parts_->index_of_id[static_cast<std::size_t>(id)];
    return at >= 0 && parts_->special_at[static_cast<std::size_t>(at)];
}

std::string text_stream::add(token id) {
    held_ += tokenizer_.bytes({&id, 1}, skip_special_);
    std::size_t cut = 0;
    std::string r = utf8_repaired(held_, &cut);
    held_.erase(0, cut);
    return r;
}
std::string text_stream::finish() { return utf8_repaired(std::exchange(held_, {})); }

} // namespace trainer
