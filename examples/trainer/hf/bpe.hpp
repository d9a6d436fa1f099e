// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Byte-level BPE from a Hugging Face tokenizer.json: text to token ids and back, as the Python package `tokenizers` has
// them.
//
//   encode   cut out added tokens; normalise what is between them (nothing, or NFC); split it into words by the
//            pre-tokenizer's patterns; write a word's bytes as tokens; merge the pair of neighbours of the lowest rank,
//            the leftmost of these, until no pair has a rank; put the post-processor's tokens around all
//   decode   the tokens' bytes, one after another; what is not UTF-8 becomes U+FFFD
//
// A word of n bytes takes O(n log n): a heap of pairs over a linked list. Words are remembered.
//
// Taken: model BPE with `ignore_merges`, merges as strings or pairs; pre-tokenizers ByteLevel, Split by a pattern
// (hf/pattern.hpp; behaviours Isolated and Removed), Digits, Sequence with ByteLevel last; normalizers null, NFC and
// sequences of it; post-processors ByteLevel and TemplateProcessing; added tokens with all their flags. All else is
// refused by its name: a file is read as `tokenizers` reads it, or not at all. Further than `tokenizers` go refusals of
// what is surely a mistake: keys, ids or merges that are there twice, ids of added tokens that `tokenizers` would not
// give them, unknown keys.
//
// Sources: Sennrich, Haddow, Birch (arXiv 1508.07909), section 3.2; the byte alphabet is GPT-2's (Radford et al. 2019).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "task/tokenizer.hpp"

namespace trainer {

/// May be used by several threads; encode() lets one in at a time.
class bpe_tokenizer {
public:
    /// `json`: the text of a tokenizer.json. A failure of kind exit_input names `name` and the key that it is about.
    explicit bpe_tokenizer(std::string_view json, const std::string& name = "tokenizer.json");
    ~bpe_tokenizer();
    bpe_tokenizer(bpe_tokenizer&&) noexcept;

    /// `add_special`: with what the post-processor puts around a text, as Llama-3's <|begin_of_text|>. Text that is not
    /// UTF-8 is a failure of kind exit_input that names the byte.
    std::vector<token> encode(std::string_view text, bool add_special = true) const;

    /// UTF-8. `skip_special`: without special tokens. Ids that have no token, as in the padding of a model's
    /// vocabulary, give no text; a negative one is refused.
    std::string decode(std::span<const token> ids, bool skip_special = false) const;
    /// The same before it is made UTF-8.
    std::string bytes(std::span<const token> ids, bool skip_special = false) const;

    /// One more than the largest id.
    token vocabulary() const;
    /// The id of a token as tokenizer.json writes it: "<|im_end|>", "Ġthe".
    std::optional<token> id_of(std::string_view content) const;
    bool is_special(token id) const;

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

/// Decodes as tokens come: what add() and finish() return, one after another, is decode() of all tokens. The bytes of a
/// character that is not complete yet are held back.
class text_stream {
public:
    explicit text_stream(const bpe_tokenizer& tokenizer, bool skip_special = false)
        : tokenizer_(tokenizer), skip_special_(skip_special) {}
    std::string add(token id);
    /// What is still held back, as U+FFFD; the next add() begins a new text.
    std::string finish();

private:
    const bpe_tokenizer& tokenizer_;
    bool skip_special_;
    std::string held_;
};

} // namespace trainer
