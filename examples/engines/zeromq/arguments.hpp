// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// `--name value` on a command line. Who names what no program reads, or gives it no value, is told so.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace engine {

class arguments {
public:
    arguments(int count, char** words) {
        for (int i = 1; i < count; i += 2) {
            const std::string name = words[i];
            if (name.rfind("--", 0) != 0 || i + 1 == count)
                throw std::invalid_argument("'" + name + "': options are --name value");
            if (!given_.emplace(name.substr(2), words[i + 1]).second)
                throw std::invalid_argument(name + " is given twice");
        }
    }
    std::string text(const std::string& name, const std::string& otherwise) {
        const auto found = given_.find(name);
        if (found == given_.end()) return otherwise;
        const std::string value = found->second;
        given_.erase(found);
        return value;
    }
    std::int64_t integer(const std::string& name, std::int64_t otherwise) {
        return number(name, otherwise, [](const std::string& s, std::size_t* end) { return std::stoll(s, end); });
    }
    double seconds(const std::string& name, double otherwise) {
        return number(name, otherwise, [](const std::string& s, std::size_t* end) { return std::stod(s, end); });
    }
    /// All that there was has been read.
    void done() const {
        if (!given_.empty()) throw std::invalid_argument("there is no option --" + given_.begin()->first);
    }

private:
    template <class T, class Read>
    T number(const std::string& name, T otherwise, Read read) {
        const std::string s = text(name, "");
        if (s.empty()) return otherwise;
        std::size_t end = 0;
        try {
            const T value = static_cast<T>(read(s, &end));
            if (end == s.size()) return value;
        } catch (const std::exception&) { // said below
        }
        throw std::invalid_argument("--" + name + " " + s + " is no number");
    }
    std::map<std::string, std::string> given_;
};

} // namespace engine
