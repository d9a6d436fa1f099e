// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Weights as folders of a file system that learner and servers share, each complete once its marker is there:
//
//   root/opd-7-12/          of version 7, made by the train job 12: label-version-job
//     model.safetensors …   whatever the server loads
//     STABLE                written last; has the folder's name
//
//   publish_weights(root, "opd", {7, 12}, [&](const std::filesystem::path& folder) { write the files into it });
//   is_stable(root / weights_name("opd", {7, 12}))
//   retire_weights(root, "opd", driver.needed_from());      // those of lower jobs
//
// The files are written under another name, then renamed; a reader that looks for STABLE never sees half of them. A
// crash on the way leaves no folder, or one without marker, which the next publication of that name replaces. Power
// loss is not provided for. One writer at a time.
//
// Source: the step folders of prime-rl and surogate (field survey: weights go as folders with a marker).
#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "opd/error.hpp"
#include "opd/sched/types.hpp"

namespace opd::serve {

/// label-version-job: of a folder, and what a server calls these weights.
inline std::string weights_name(std::string_view label, const sched::weights& w) {
    return std::string(label).append("-").append(std::to_string(w.version)).append("-").append(std::to_string(w.job));
}

/// Whether all files of this publication are there: STABLE exists and has the folder's name.
inline bool is_stable(const std::filesystem::path& folder) {
    std::ifstream in(folder / "STABLE");
    std::string name;
    return in && std::getline(in, name) && name == folder.filename().string();
}

/// write(folder) puts the files there; what it throws is thrown, and nothing is published. A name that is published
/// already stays as it is: it is of the same job. Returns the folder.
template <class Write>
std::filesystem::path publish_weights(const std::filesystem::path& root, std::string_view label,
                                      const sched::weights& w, Write&& write) {
    namespace fs = std::filesystem;
    const fs::path folder = root / weights_name(label, w), part = fs::path(folder).concat(".part");
    if (is_stable(folder)) return folder;
    fs::remove_all(part);
    fs::create_directories(part);
    write(std::as_const(part));
    fs::remove_all(folder);
    fs::rename(part, folder);
    const fs::path marker = folder / "STABLE", unsure = folder / "STABLE.part";
    {
        std::ofstream out(unsure);
        out << folder.filename().string() << '\n' << std::flush;
        if (!out) throw error("opd: cannot write " + unsure.string());
    }
    fs::rename(unsure, marker);
    return folder;
}

/// Removes the folders of jobs below `needed_from`, markers first. Other names stay.
inline void retire_weights(const std::filesystem::path& root, std::string_view label, std::uint64_t needed_from) {
    namespace fs = std::filesystem;
    const std::string begin = std::string(label) + "-";
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(root, none)) {
        const std::string name = entry.path().filename().string();
        const auto last = name.rfind('-');
        std::uint64_t job = 0;
        if (name.rfind(begin, 0) != 0 || last < begin.size()) continue;
        const char* const end = name.data() + name.size();
        const auto [to, wrong] = std::from_chars(name.data() + last + 1, end, job);
        if (wrong != std::errc() || to != end || job >= needed_from) continue;
        fs::remove(entry.path() / "STABLE", none);
        fs::remove_all(entry.path(), none);
    }
}

} // namespace opd::serve
