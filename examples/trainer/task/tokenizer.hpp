// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One character, one token. Ids beyond the symbols are padding of a model's vocabulary: they read as '?', which no text
// has.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trainer {

using token = std::int32_t;

struct tokenizer {
    std::string_view symbols;

    int vocabulary() const { return static_cast<int>(symbols.size()); }
    token id(char c) const {
        const auto at = symbols.find(c);
        if (at == std::string_view::npos) throw std::invalid_argument(std::string("no token for '") + c + "'");
        return static_cast<token>(at);
    }
    void append(std::string_view text, std::vector<token>& to) const {
        for (char c : text) to.push_back(id(c));
    }
    std::vector<token> encode(std::string_view text) const {
        std::vector<token> r;
        append(text, r);
        return r;
    }
    std::string decode(std::span<const token> tokens) const {
        std::string r;
        for (token t : tokens) r += t < vocabulary() ? symbols[static_cast<std::size_t>(t)] : '?';
        return r;
    }
};

} // namespace trainer
