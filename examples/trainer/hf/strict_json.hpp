// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// JSON of files that anybody may have written. What is no JSON, has a key twice, is nested too deep, or is of another
// type than is asked for, is a failure of kind exit_input that names the file and the key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "settings/failure.hpp"
#include "task/tokenizer.hpp"

namespace trainer {

/// As an error shows it: in ASCII, at most some 60 characters of it.
inline std::string shown(std::string_view text) {
    using nlohmann::json;
    const std::string whole = json(std::string(text.substr(0, 60))).dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() > 60 ? whole + "…" : whole;
}

inline nlohmann::json strict_json(std::string_view text, const std::string& name, std::size_t deepest = 32) {
    using nlohmann::json;
    using event = json::parse_event_t;
    std::vector<std::unordered_set<std::string>> keys; // of the objects and lists that are open
    const auto look = [&](int, event what, json& value) {
        if (what == event::object_start || what == event::array_start) {
            if (keys.size() == deepest)
                throw failure(exit_input, name + ": is nested deeper than " + std::to_string(deepest) + " levels");
            keys.emplace_back();
        } else if (what == event::object_end || what == event::array_end) {
            keys.pop_back();
        } else if (what == event::key && !keys.back().insert(value.get_ref<const std::string&>()).second) {
            throw failure(exit_input, name + ": has the key " + shown(value.get_ref<const std::string&>()) + " twice");
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), look);
    } catch (const json::exception& e) {
        std::string why = e.what();
        for (char& c : why) // the parser quotes what it read
            if (static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126) c = '?';
        throw failure(exit_input, name + ": is no JSON: " + why.substr(0, 200));
    }
}

/// A value, and how an error names it: "tokenizer.json: model.vocab".
class json_value {
public:
    /// All of a file, or of a line.
    json_value(const nlohmann::json& j, std::string name) : json_value(j, std::move(name), ": ") {}

    [[noreturn]] void refuse(const std::string& what) const { throw failure(exit_input, name_ + ": " + what); }
    const nlohmann::json& raw() const { return j_; }
    const std::string& name() const { return name_; }

    /// Whether an object has the key, with another value than null.
    bool has(const char* key) const {
        const auto at = object().j_.find(key);
        return at != j_.end() && !at->is_null();
    }
    json_value at(const std::string& key) const {
        const auto found = object().j_.find(key);
        const bool plain = std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < 127; });
        if (found == j_.end()) refuse("has no '" + (plain ? key : shown(key)) + "'");
        return {*found, name_ + before_key_ + (plain ? key : shown(key)), "."};
    }
    json_value at(std::size_t i) const { return {j_.at(i), name_ + "[" + std::to_string(i) + "]", "."}; }

    const json_value& object() const {
        if (!j_.is_object()) refuse(std::string("is ") + j_.type_name() + ", not an object");
        return *this;
    }
    const json_value& list() const {
        if (!j_.is_array()) refuse(std::string("is ") + j_.type_name() + ", not a list");
        return *this;
    }
    std::size_t size() const { return j_.size(); }
    /// An object with no other keys than these.
    const json_value& only(std::initializer_list<std::string_view> known) const {
        for (const auto& [key, value] : object().j_.items()) {
            bool found = false;
            for (const std::string_view k : known) found = found || k == key;
            if (!found) refuse("the key " + shown(key) + " is not supported");
        }
        return *this;
    }
    const std::string& text() const {
        if (!j_.is_string()) refuse(std::string("is ") + j_.type_name() + ", not a string");
        return j_.get_ref<const std::string&>();
    }
    bool truth() const {
        if (!j_.is_boolean()) refuse(std::string("is ") + j_.type_name() + ", not true or false");
        return j_.get<bool>();
    }
    /// true or false where the key is there, else `otherwise`.
    bool truth_of(const char* key, bool otherwise) const { return has(key) ? at(key).truth() : otherwise; }
    /// A token id from 0 to `most`.
    token id(token most) const {
        // the parser keeps what is not negative as unsigned
        if (!j_.is_number_unsigned() || j_.get<std::uint64_t>() > static_cast<std::uint64_t>(most))
            refuse("must be an id from 0 to " + std::to_string(most) + ", not " +
                   shown(j_.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)));
        return static_cast<token>(j_.get<std::uint64_t>());
    }

private:
    json_value(const nlohmann::json& j, std::string name, const char* before_key)
        : j_(j), name_(std::move(name)), before_key_(before_key) {}

    const nlohmann::json& j_;
    std::string name_;
    const char* before_key_;
};

} // namespace trainer
