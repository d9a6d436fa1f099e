// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "task/grammar.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/rng.hpp"

namespace trainer {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("grammar: " + why); }

bool ends_with_any(std::string_view word, std::initializer_list<std::string_view> ends) {
    return std::any_of(ends.begin(), ends.end(), [word](std::string_view e) { return word.ends_with(e); });
}
bool vowel(char c) { return std::string_view("aeiou").find(c) != std::string_view::npos; }
// "berry", not "boy"
bool ends_with_y(std::string_view stem) {
    return stem.size() > 1 && stem.back() == 'y' && !vowel(stem[stem.size() - 2]);
}
std::string with_s(const std::string& stem) {
    if (ends_with_y(stem)) return stem.substr(0, stem.size() - 1) + "ies";
    return stem + (ends_with_any(stem, {"s", "x", "z", "ch", "sh"}) ? "es" : "s");
}
std::string with_ed(const std::string& stem) {
    if (ends_with_y(stem)) return stem.substr(0, stem.size() - 1) + "ied";
    return stem + (stem.ends_with("e") ? "d" : "ed");
}
std::string with_ly(const std::string& stem) {
    if (ends_with_y(stem)) return stem.substr(0, stem.size() - 1) + "ily";
    if (stem.ends_with("ic")) return stem + "ally";
    if (stem.size() > 2 && stem.ends_with("le") && !vowel(stem[stem.size() - 3]))
        return stem.substr(0, stem.size() - 1) + "y";
    return stem + "ly";
}

// The classes of a kind of stem, and the form in each; verbs in the past have no number.
struct form {
    const char* stems;
    const char* name;
    std::string (*make)(const std::string&);
};
std::string as_it_is(const std::string& stem) { return stem; }
constexpr form forms[] = {
    {"noun", "noun.sg", as_it_is},   {"noun", "noun.pl", with_s},     {"act", "act.sg.now", with_s},
    {"act", "act.pl.now", as_it_is}, {"act", "act.sg.past", with_ed}, {"act", "act.pl.past", with_ed},
    {"do", "do.sg.now", with_s},     {"do", "do.pl.now", as_it_is},   {"do", "do.sg.past", with_ed},
    {"do", "do.pl.past", with_ed},   {"adj", "adj", as_it_is},        {"adj", "adverb", with_ly},
    {"name", "name", as_it_is},
};

std::vector<double> cumulative_zipf(std::size_t n, double exponent) {
    std::vector<double> r;
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) r.push_back(sum += std::pow(static_cast<double>(i + 1), -exponent));
    return r;
}

struct feature {
    std::string_view variable;
    std::string_view values[2];
    double weights[2];
};
constexpr feature features[] = {
    {"n", {"sg", "pl"}, {0.6, 0.4}}, {"m", {"sg", "pl"}, {0.6, 0.4}}, {"t", {"now", "past"}, {0.5, 0.5}}};

std::vector<std::string> split(std::string_view text, char at) {
    std::vector<std::string> r{""};
    for (const char c : text) c == at ? void(r.emplace_back()) : r.back().push_back(c);
    return r;
}
bool has_variable(std::string_view symbol, std::string_view variable) {
    const auto parts = split(symbol, '.');
    return symbol.front() != '\'' && std::find(parts.begin() + 1, parts.end(), variable) != parts.end();
}
std::string bound(const std::string& symbol, std::string_view variable, std::string_view value) {
    if (symbol.front() == '\'') return symbol;
    const auto parts = split(symbol, '.');
    std::string r = parts.front();
    for (std::size_t i = 1; i < parts.size(); ++i) r += "." + (parts[i] == variable ? std::string(value) : parts[i]);
    return r;
}

struct alternative_text {
    double weight;
    bool nests;
    std::vector<std::string> symbols;
};

} // namespace

double dice::next() {
    return opd::keyed_uniform(opd::noise_row(seed_, opd::noise_stream::tail, sample_, purpose_), drawn_++);
}
std::size_t dice::pick(std::span<const double> cumulative) {
    const double at = next() * cumulative.back();
    const auto found = std::upper_bound(cumulative.begin(), cumulative.end(), at);
    return static_cast<std::size_t>(std::min(found - cumulative.begin(), std::ssize(cumulative) - 1));
}
std::uint64_t dice::bits() {
    const opd::philox_block b = opd::noise_row(seed_, opd::noise_stream::tail, sample_, purpose_).block(drawn_++, 1);
    return static_cast<std::uint64_t>(b.word[0]) << 32 | b.word[1];
}

// --- reading --------------------------------------------------------------------------------------------------------

token grammar::word_of(const std::string& text) {
    const auto [at, fresh] = ids_.try_emplace(text, static_cast<token>(words_.size()));
    if (fresh) words_.push_back(text), classes_of_.push_back(0);
    return at->second;
}

token grammar::id(std::string_view word) const {
    const auto found = ids_.find(word);
    if (found == ids_.end()) throw std::invalid_argument(fmt::format("no token for '{}'", word));
    return found->second;
}

std::string grammar::text(std::span<const token> tokens) const {
    std::string r;
    for (const token t : tokens) {
        if (!r.empty()) r += ' ';
        r += t >= 0 && t < vocabulary() ? word(t) : "?"; // padding of a model's vocabulary
    }
    return r;
}

int grammar::class_named(std::string_view name) const {
    for (std::size_t i = 0; i < classes_.size(); ++i)
        if (classes_[i].name == name) return static_cast<int>(i);
    refuse(fmt::format("there is no class of words '{}'", name));
}

int grammar::rule_named(std::string_view name) const {
    for (std::size_t i = 0; i < rules_.size(); ++i)
        if (rules_[i].name == name) return static_cast<int>(i);
    refuse(fmt::format("there is no rule for '{}'", name));
}

void grammar::read_words(std::string_view text) {
    for (const form& f : forms) classes_.push_back({f.name, {}, {}, {}, {}});
    std::istringstream lines{std::string(text)};
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string what, stem;
        if (!(words >> what)) continue;
        if (what == "topic") {
            ++topics_;
            for (word_class& c : classes_) c.by_topic.emplace_back();
            continue;
        }
        const auto of_these = [&](const form& f) { return f.stems == what; };
        if (topics_ == 0 || std::none_of(std::begin(forms), std::end(forms), of_these))
            refuse(fmt::format("a line of words begins with '{}'", what));
        while (words >> stem)
            for (std::size_t i = 0; i < std::size(forms); ++i)
                if (of_these(forms[i])) {
                    const token id = word_of(forms[i].make(stem));
                    classes_of_[static_cast<std::size_t>(id)] |= std::uint64_t{1} << i;
                    classes_[i].by_topic.back().push_back(id);
                }
    }
    if (topics_ == 0) refuse("there are no words");
    for (word_class& c : classes_) {
        std::size_t most = 0;
        for (const auto& words : c.by_topic) {
            if (words.size() < 2) refuse(fmt::format("a topic has fewer than two words of class {}", c.name));
            c.cumulative.push_back(cumulative_zipf(words.size(), 1));
            most = std::max(most, words.size());
        }
        for (std::size_t rank = 0; rank < most; ++rank)
            for (const auto& words : c.by_topic)
                if (rank < words.size()) c.all.push_back(words[rank]);
        c.all_cumulative = cumulative_zipf(c.all.size(), 0.5);
    }
}

void grammar::read_rules(std::string_view text) {
    struct open_rule {
        std::string left;
        std::vector<alternative_text> alternatives;
    };
    std::vector<open_rule> all;
    std::istringstream lines{std::string(text)};
    for (std::string line; std::getline(lines, line);) {
        std::istringstream in(line);
        std::string left, word;
        if (!(in >> left)) continue;
        if (!(in >> word) || word != "=") refuse(fmt::format("the rule for '{}' has no =", left));
        std::vector<open_rule> made{{left, {}}};
        bool begins = true;
        while (in >> word) {
            auto& alternatives = made.front().alternatives;
            if (word == "|") {
                begins = true;
            } else if (begins) {
                const bool nests = word.front() == '^';
                const std::string number = word.substr(nests);
                char* stop = nullptr;
                const double weight = std::strtod(number.c_str(), &stop);
                if (*stop != '\0' || !(weight > 0)) refuse(fmt::format("'{}' of '{}' is no weight", word, left));
                alternatives.push_back({weight, nests, {}});
                begins = false;
            } else {
                alternatives.back().symbols.push_back(word);
            }
        }
        if (begins) refuse(fmt::format("the rule for '{}' ends too early", left));
        // the features of the left side: a rule for each value
        for (const feature& f : features) {
            std::vector<open_rule> next;
            for (const open_rule& r : made) {
                if (!has_variable(r.left, f.variable)) {
                    next.push_back(r);
                    continue;
                }
                for (const std::string_view value : f.values) {
                    open_rule one{bound(r.left, f.variable, value), r.alternatives};
                    for (alternative_text& a : one.alternatives)
                        for (std::string& s : a.symbols) s = bound(s, f.variable, value);
                    next.push_back(std::move(one));
                }
            }
            made = std::move(next);
        }
        // those of the right side alone: an alternative for each
        for (open_rule& r : made) {
            for (const feature& f : features) {
                std::vector<alternative_text> next;
                for (const alternative_text& a : r.alternatives) {
                    if (std::none_of(a.symbols.begin(), a.symbols.end(),
                                     [&](const std::string& s) { return has_variable(s, f.variable); })) {
                        next.push_back(a);
                        continue;
                    }
                    for (int i = 0; i < 2; ++i) {
                        alternative_text one = a;
                        one.weight *= f.weights[i];
                        for (std::string& s : one.symbols) s = bound(s, f.variable, f.values[i]);
                        next.push_back(std::move(one));
                    }
                }
                r.alternatives = std::move(next);
            }
            all.push_back(std::move(r));
        }
    }
    for (const open_rule& r : all) rules_.push_back({r.left, {}});
    for (std::size_t i = 0; i < all.size(); ++i) {
        for (const alternative_text& a : all[i].alternatives) {
            alternative made{a.weight, a.nests, {}};
            for (const std::string& s : a.symbols) {
                if (s.size() > 2 && s.front() == '\'' && s.back() == '\'')
                    made.symbols.push_back({symbol::kind::word, word_of(s.substr(1, s.size() - 2))});
                else if (s.front() >= 'a' && s.front() <= 'z')
                    made.symbols.push_back({symbol::kind::word_class, class_named(s)});
                else
                    made.symbols.push_back({symbol::kind::rule, rule_named(s)});
            }
            rules_[i].alternatives.push_back(std::move(made));
        }
        if (std::none_of(rules_[i].alternatives.begin(), rules_[i].alternatives.end(),
                         [](const alternative& a) { return !a.nests; }))
            refuse(fmt::format("the rule for '{}' nests without end", rules_[i].name));
    }
}

grammar::grammar(std::string_view rules, std::string_view words) {
    for (const char* own : {"<end>", ":", "and"}) word_of(own); // of titles and ends
    read_words(words);
    read_rules(rules);
    for (const char* start : {"TEXT.now", "TEXT.past"}) rule_named(start);
}

const grammar& grammar::shipped() {
    static const grammar one(grammar_rules, grammar_words);
    return one;
}

// --- writing --------------------------------------------------------------------------------------------------------

title grammar::draw_title(dice& d) const {
    const auto rank = [&](const char* name, int topic) {
        const word_class& c = classes_[static_cast<std::size_t>(class_named(name))];
        return static_cast<int>(d.pick(c.cumulative[static_cast<std::size_t>(topic)]));
    };
    title t;
    t.topic = std::min(topics_ - 1, static_cast<int>(d.next() * topics_));
    t.adjective = rank("adj", t.topic);
    t.noun[0] = rank("noun.sg", t.topic);
    do t.noun[1] = rank("noun.sg", t.topic);
    while (t.noun[1] == t.noun[0]);
    for (int& plural : t.plural) plural = d.next() < 0.4;
    return t;
}

std::vector<token> grammar::tokens(const title& t) const {
    const auto word = [&](const char* name, int rank) {
        const word_class& c = classes_[static_cast<std::size_t>(class_named(name))];
        return c.by_topic.at(static_cast<std::size_t>(t.topic)).at(static_cast<std::size_t>(rank));
    };
    const auto noun = [&](std::size_t i) { return word(t.plural[i] == 0 ? "noun.sg" : "noun.pl", t.noun[i]); };
    return {word("adj", t.adjective), noun(0), id("and"), noun(1), id(":")};
}

// A text while it is written.
struct grammar::pen {
    const title& about;
    dice& d;
    std::size_t most;
    std::vector<token> words = {};
};

token grammar::draw_word(int which, pen& p) const {
    const word_class& c = classes_[static_cast<std::size_t>(which)];
    const auto own = static_cast<std::size_t>(p.about.topic);
    if (c.name == "adverb") return c.all[p.d.pick(c.all_cumulative)];
    if (c.name.starts_with("noun.") && p.d.next() < 0.3) {
        const std::size_t i = p.d.next() < 0.6 ? 0 : 1;
        return c.by_topic[own][static_cast<std::size_t>(p.about.noun[i])];
    }
    std::size_t topic = own;
    if (p.d.next() < 0.2)
        topic = std::min(c.by_topic.size() - 1,
                         static_cast<std::size_t>(p.d.next() * static_cast<double>(c.by_topic.size())));
    return c.by_topic[topic][p.d.pick(c.cumulative[topic])];
}

// False: the text is too long.
bool grammar::expand(int which, int depth, pen& p) const {
    constexpr int deepest = 3;
    const rule& r = rules_[static_cast<std::size_t>(which)];
    std::vector<double> cumulative;
    double sum = 0;
    for (const alternative& a : r.alternatives)
        cumulative.push_back(sum += !a.nests ? a.weight : depth >= deepest ? 0.0 : std::ldexp(a.weight, -depth));
    const alternative& a = r.alternatives[p.d.pick(cumulative)];
    for (const symbol& s : a.symbols) {
        if (s.what == symbol::kind::rule) {
            if (!expand(s.id, depth + a.nests, p)) return false;
            continue;
        }
        if (p.words.size() == p.most) return false;
        p.words.push_back(s.what == symbol::kind::word ? static_cast<token>(s.id) : draw_word(s.id, p));
    }
    return true;
}

std::vector<token> grammar::write(const title& t, dice& d, int most) const {
    const int starts[] = {rule_named("TEXT.now"), rule_named("TEXT.past")};
    for (int attempt = 0; attempt < 100'000; ++attempt) {
        pen p{t, d, static_cast<std::size_t>(most)};
        if (expand(starts[d.next() < 0.5 ? 0 : 1], 0, p)) return std::move(p.words);
    }
    refuse(fmt::format("no text of at most {} words", most));
}

// --- parsing --------------------------------------------------------------------------------------------------------

namespace {

// Where a rule ends that begins at a position: bits of positions. Each is found once.
template <class Grammar>
struct chart {
    const Grammar& rules;
    std::span<const token> words;
    std::vector<std::uint64_t> ends; // (rules, positions)
    std::vector<std::uint8_t> known;

    chart(const Grammar& g, std::span<const token> text)
        : rules(g), words(text), ends(g.size() * (text.size() + 1)), known(ends.size()) {}

    template <class Step>
    std::uint64_t of(std::size_t rule, std::size_t begin, const Step& word_fits) {
        const std::size_t cell = rule * (words.size() + 1) + begin;
        if (known[cell] != 0) return ends[cell];
        known[cell] = 1; // a rule that begins with itself finds nothing more
        std::uint64_t found = 0;
        for (const auto& a : rules[rule].alternatives) {
            std::uint64_t at = std::uint64_t{1} << begin;
            for (const auto& s : a.symbols) {
                std::uint64_t next = 0;
                for (std::size_t i = begin; i <= words.size() && at != 0; ++i) {
                    if ((at >> i & 1) == 0) continue;
                    if (s.what == decltype(s.what)::rule)
                        next |= of(static_cast<std::size_t>(s.id), i, word_fits);
                    else if (i < words.size() && word_fits(s, words[i]))
                        next |= std::uint64_t{1} << (i + 1);
                }
                at = next;
            }
            found |= at;
        }
        return ends[cell] = found;
    }
};

} // namespace

bool grammar::parses(std::string_view name, std::span<const token> words) const {
    if (words.empty() || words.size() > longest) return false;
    for (const token t : words)
        if (t < 0 || t >= vocabulary()) return false;
    chart<std::vector<rule>> c(rules_, words);
    const auto fits = [this](const symbol& s, token word) {
        return s.what == symbol::kind::word ? s.id == word
                                            : (classes_of_[static_cast<std::size_t>(word)] >> s.id & 1) != 0;
    };
    bool any = false;
    for (std::size_t i = 0; i < rules_.size(); ++i) {
        if (rules_[i].name != name && !rules_[i].name.starts_with(std::string(name) + ".")) continue;
        any = true;
        if ((c.of(i, 0, fits) >> words.size() & 1) != 0) return true;
    }
    if (!any) refuse(fmt::format("there is no rule for '{}'", name));
    return false;
}

} // namespace trainer
