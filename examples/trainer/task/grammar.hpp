// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A probabilistic context-free grammar with features, its words, and a topic that makes words depend on far context.
//
//   expansion   each rule is one rule for each value of its features (number, time): "NP.n" becomes NP.sg and NP.pl
//   write       top down: alternatives by weight, nesting ones at weight · 2^-depth and at depth 3 not at all;
//               words by rank r in their topic, ~ 1/r, from the text's own topic in four of five cases, a noun from
//               the title in three of ten; adverbs by rank in all topics, ~ 1/sqrt(r), which makes them the
//               positions of the largest entropy
//   parses      a chart of (rule, position) -> set of ends, as bits: exact, for texts of at most 63 words
//
// A title is "ADJ NOUN and NOUN :", of one topic. The words are made of the stems in grammar_text.cpp; a word of two
// classes is one token.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "task/tokenizer.hpp"

namespace trainer {

extern const char* const grammar_rules;
extern const char* const grammar_words;

/// What a text is about. Ranks are places in the topic's lists.
struct title {
    int topic = 0;
    int adjective = 0;
    std::array<int, 2> noun = {};   ///< ranks, not the same
    std::array<int, 2> plural = {}; ///< 0 or 1
    bool operator==(const title&) const = default;
};

/// Uniform numbers in (0,1), a pure function of what they are for.
class dice {
public:
    dice(std::uint64_t seed, std::uint64_t sample, std::uint32_t purpose)
        : seed_(seed), sample_(sample), purpose_(purpose) {}
    double next();
    /// An index, by cumulative weights whose last is the whole.
    std::size_t pick(std::span<const double> cumulative);
    std::uint64_t bits();

private:
    std::uint64_t seed_, sample_;
    std::uint32_t purpose_, drawn_ = 0;
};

class grammar {
public:
    /// Rules and words as text; what does not fit together is an std::invalid_argument that names it.
    grammar(std::string_view rules, std::string_view words);

    /// The one in grammar_text.cpp.
    static const grammar& shipped();

    static constexpr token end = 0;
    static constexpr int longest = 63; ///< words of a text that can be parsed
    int vocabulary() const { return static_cast<int>(words_.size()); }
    int topics() const { return topics_; }
    const std::string& word(token id) const { return words_[static_cast<std::size_t>(id)]; }
    token id(std::string_view word) const; ///< throws for a word that is not there
    std::string text(std::span<const token> tokens) const;

    title draw_title(dice& d) const;
    std::vector<token> tokens(const title& t) const; ///< five

    /// A text of at most `most` words, without its end.
    std::vector<token> write(const title& t, dice& d, int most) const;

    /// Whether a symbol ("TEXT", "LINE", with whatever features) makes exactly these words.
    bool parses(std::string_view symbol, std::span<const token> words) const;

private:
    struct symbol {
        enum class kind { word, word_class, rule } what;
        int id;
    };
    struct alternative {
        double weight;
        bool nests;
        std::vector<symbol> symbols;
    };
    struct rule {
        std::string name;
        std::vector<alternative> alternatives;
    };
    struct word_class {
        std::string name;
        std::vector<std::vector<token>> by_topic; // by rank
        std::vector<std::vector<double>> cumulative;
        std::vector<token> all; // by rank, then topic
        std::vector<double> all_cumulative;
    };
    struct pen;
    void read_words(std::string_view text);
    void read_rules(std::string_view text);
    token word_of(const std::string& text);
    int class_named(std::string_view name) const;
    int rule_named(std::string_view name) const;
    bool expand(int rule, int depth, pen& p) const;
    token draw_word(int word_class, pen& p) const;

    int topics_ = 0;
    std::vector<std::string> words_;
    std::map<std::string, token, std::less<>> ids_;
    std::vector<word_class> classes_;
    std::vector<std::uint64_t> classes_of_; // by word: bits
    std::vector<rule> rules_;
};

} // namespace trainer
