// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A regular expression of a pre-tokenizer. tokenizer.json has them in Oniguruma's syntax, and PCRE2 runs them here;
// taken is the part of the language that means the same in both, which the patterns of GPT-2, Qwen, Llama-3 and their
// like are made of:
//
//   characters  |  ( )  (?: )  (?= )  (?! )      * + ? {n} {n,} {n,m}, the first three also lazy or possessive
//   [ ] and [^ ] of characters, ranges and what stands in the next two lines, without \S
//   \s (Unicode's White_Space)  \S  \d  \r  \n  \t      \ before ASCII punctuation
//   \p{L} and the other general categories, \P{L}
//   (?i:'s|'t|'re|'ve|'m|'ll|'d), (?i:[sdmt]|ll|ve|re)
//
// All else is refused by name, and so is what matches the empty string. Unicode is that of PCRE2 (10.42: Unicode 14).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace trainer {

/// The same expression for PCRE2; a failure of kind exit_input that names `whose` and the place.
std::string pcre2_pattern(std::string_view oniguruma, const std::string& whose);

/// To be used by one thread at a time.
class pattern {
public:
    /// `pcre2`: an expression for PCRE2. `whose`: what errors call it.
    pattern(const std::string& pcre2, std::string whose);
    ~pattern();
    pattern(pattern&&) noexcept;

    struct match {
        std::size_t begin = 0, end = 0;
        bool found = false;
    };
    /// The first match in `text`, which must be UTF-8, that begins at `from` or later.
    match find(std::string_view text, std::size_t from) const;

private:
    struct compiled;
    std::unique_ptr<compiled> compiled_;
};

} // namespace trainer
