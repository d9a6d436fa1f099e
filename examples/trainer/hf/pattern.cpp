// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/pattern.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "hf/strict_json.hpp"
#include "hf/utf8.hpp"

namespace trainer {

namespace {

// PCRE2's own \s also has U+180E.
constexpr std::string_view white_space =
    R"(\t-\r\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
// Without regard to case some letters match pairs of others in Oniguruma, as in "st" and U+FB06; not in these two.
constexpr std::string_view caseless[] = {"(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class translation {
public:
    translation(std::string_view in, const std::string& whose) : in_(in), whose_(whose) {}

    std::string done() {
        while (at_ < in_.size()) step();
        if (!groups_.empty()) refuse("has an open '('");
        return std::move(out_);
    }

private:
    [[noreturn]] void refuse(const std::string& what) const {
        throw failure(exit_input, whose_ + ": " + shown(in_) + " " + what + ", at byte " +
                                      std::to_string(std::min(at_, in_.size())));
    }
    bool next_is(std::string_view what) const { return in_.substr(at_).starts_with(what); }
    bool take(std::string_view what) {
        if (!next_is(what)) return false;
        at_ += what.size();
        return true;
    }

    void step() {
        for (const std::string_view known : caseless)
            if (take(known)) {
                out_ += known;
                repeatable_ = true;
                return;
            }
        switch (const char c = in_[at_]) {
        case '(':
            open();
            return;
        case ')':
            if (groups_.empty()) refuse("has a ')' too many");
            repeatable_ = groups_.back();
            groups_.pop_back();
            break;
        case '|':
            repeatable_ = false;
            break;
        case '[':
            set();
            repeatable_ = true;
            return;
        case '\\':
            escape(false);
            repeatable_ = true;
            return;
        case '*':
        case '+':
        case '?':
            repeat();
            return;
        case '{':
            counted();
            return;
        case '^':
        case '$':
        case '.':
        case ']':
        case '}':
            refuse(std::string("has '") + c + "', which is not supported");
        default:
            character();
            repeatable_ = true;
            return;
        }
        out_ += in_[at_++];
    }
    void character() {
        const std::size_t bytes = utf8_at(in_, at_).bytes; // JSON is UTF-8
        out_.append(in_, at_, bytes);
        at_ += bytes;
    }
    void open() {
        if (groups_.size() == 30) refuse("has groups within 30 others");
        bool repeatable = true;
        if (take("(?=") || take("(?!")) {
            repeatable = false;
            out_ += in_.substr(at_ - 3, 3);
        } else if (take("(?:")) {
            out_ += "(?:";
        } else if (next_is("(?")) {
            refuse("has a group " + shown(in_.substr(at_, 4)) + ", which is not supported");
        } else {
            out_ += '(', ++at_;
        }
        groups_.push_back(repeatable);
        repeatable_ = false;
    }
    void need_repeatable() const {
        if (!repeatable_) refuse("repeats what cannot be repeated");
    }
    void repeat() {
        need_repeatable();
        out_ += in_[at_++];
        if (at_ < in_.size() && (in_[at_] == '?' || in_[at_] == '+')) out_ += in_[at_++];
        repeatable_ = false;
    }
    void number() {
        const std::size_t begin = at_;
        while (at_ < in_.size() && is_digit(in_[at_])) ++at_;
        if (at_ == begin || at_ - begin > 3) refuse("has a '{' without numbers of at most three digits");
        out_ += in_.substr(begin, at_ - begin);
    }
    void counted() {
        need_repeatable();
        ++at_;
        out_ += '{';
        number();
        if (take(",")) {
            out_ += ',';
            if (!next_is("}")) number();
        }
        if (!take("}")) refuse("has a '{' without '}'");
        // lazy and possessive mean something else in Oniguruma
        if (next_is("?") || next_is("+")) refuse("has a '?' or '+' after '}', which is not supported");
        out_ += '}';
        repeatable_ = false;
    }
    // Returns whether it is one character.
    bool escape(bool in_set) {
        const char c = at_ + 1 < in_.size() ? in_[at_ + 1] : '\0';
        if (c == 's') {
            out_ += in_set ? std::string(white_space) : '[' + std::string(white_space) + ']';
        } else if (c == 'S' && !in_set) {
            out_ += "[^" + std::string(white_space) + ']';
        } else if (c == 'p' || c == 'P') {
            category();
            return false;
        } else if (c == 'd' || c == 'r' || c == 'n' || c == 't' ||
                   (c > ' ' && c < 127 && !is_digit(c) && !is_letter(c))) {
            out_ += in_.substr(at_, 2);
        } else {
            refuse("has the escape " + shown(in_.substr(at_, 2)) + ", which is not supported here");
        }
        at_ += 2;
        return c != 's' && c != 'S' && c != 'd';
    }
    void category() { // \p{L}, \P{Lu}
        constexpr std::string_view kinds = "LMNPSZC";
        const std::size_t end = in_.find('}', at_);
        const std::string_view name = next_is("\\p{") || next_is("\\P{")
                                          ? in_.substr(at_ + 3, end == in_.npos ? 0 : end - at_ - 3)
                                          : std::string_view();
        if (name.empty() || name.size() > 2 || kinds.find(name[0]) == kinds.npos ||
            (name.size() == 2 && !(name[1] >= 'a' && name[1] <= 'z')))
            refuse("has the property " + shown(in_.substr(at_, 12)) + ", which is no general category");
        out_ += in_.substr(at_, end + 1 - at_);
        at_ = end + 1;
    }
    void set() {
        const auto more = [&] {
            if (at_ >= in_.size()) refuse("has an open '['");
        };
        out_ += '[', ++at_;
        if (take("^")) out_ += '^';
        more();
        if (next_is("]")) refuse("has an empty [ ]");
        bool single = false; // whether a range may begin at what came before
        for (bool first = true;; first = false) {
            more();
            if (take("]")) break;
            if (next_is("-")) {
                const bool last = in_.substr(at_).starts_with("-]");
                if (first || last) {
                    out_ += "\\-", ++at_;
                    single = false;
                    continue;
                }
                if (!single) refuse("has a '-' that is no range");
                out_ += '-', ++at_;
                more();
                if (next_is("-") || next_is("[") || next_is("&") || !member()) refuse("has a range without an end");
                single = false;
                continue;
            }
            if (next_is("[") || next_is("&&")) refuse("has a set within a set, which is not supported");
            single = member();
        }
        out_ += ']';
    }
    bool member() {
        if (in_[at_] == '\\') return escape(true);
        character();
        return true;
    }

    std::string_view in_;
    const std::string& whose_;
    std::size_t at_ = 0;
    std::string out_;
    std::vector<bool> groups_; // that are open: whether each may be repeated
    bool repeatable_ = false;  // what came last
};

} // namespace

std::string pcre2_pattern(std::string_view oniguruma, const std::string& whose) {
    return translation(oniguruma, whose).done();
}

struct pattern::compiled {
    std::string whose;
    pcre2_code* code = nullptr;
    pcre2_match_data* data = nullptr;
    ~compiled() {
        pcre2_match_data_free(data);
        pcre2_code_free(code);
    }
    [[noreturn]] void fail(int error) const {
        PCRE2_UCHAR why[200];
        pcre2_get_error_message(error, why, sizeof why);
        throw failure(exit_input, whose + ": PCRE2: " + reinterpret_cast<const char*>(why));
    }
};

pattern::pattern(const std::string& pcre2, std::string whose) : compiled_(new compiled) {
    compiled& c = *compiled_;
    c.whose = std::move(whose);
    int error = 0;
    PCRE2_SIZE where = 0;
    c.code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre2.data()), pcre2.size(), PCRE2_UTF | PCRE2_UCP, &error,
                           &where, nullptr);
    if (!c.code) c.fail(error);
    std::uint32_t empty = 0;
    pcre2_pattern_info(c.code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty != 0) throw failure(exit_input, c.whose + ": matches the empty string, which is not supported");
    pcre2_jit_compile(c.code, PCRE2_JIT_COMPLETE); // where the system allows it; else it is interpreted
    c.data = pcre2_match_data_create(1, nullptr);
    if (!c.data) throw std::bad_alloc();
}
pattern::~pattern() = default;
pattern::pattern(pattern&&) noexcept = default;

pattern::match pattern::find(std::string_view text, std::size_t from) const {
    const auto run = [&](std::uint32_t options) {
        return pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                           PCRE2_NO_UTF_CHECK | options, compiled_->data, nullptr);
    };
    int found = run(0);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = run(PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) return {};
    if (found < 0) compiled_->fail(found);
    const PCRE2_SIZE* at = pcre2_get_ovector_pointer(compiled_->data);
    return {at[0], at[1], true};
}

} // namespace trainer
