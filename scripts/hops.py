#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How far a call travels through the headers: the files and rooms of include/opd that a program enters.

Compiles each program with g++ -O0 -finstrument-functions, runs it, and follows its calls on every thread. A call counts
once for each pair of functions; what the standard library or the program itself does between two of our functions
counts as a call from the one to the other.

  files    of include/opd that hold a called function
  rooms    their folders
  hops     pairs of files of which one calls the other
  climbs   hops into a file that includes the caller's, itself or through others: the callee is handed up, not named

Example: scripts/hops.py examples/01_dense_kl.cpp examples/10_hidden_states.cpp
         scripts/hops.py --root ../older examples/01_dense_kl.cpp    (another checkout)
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

RUNTIME = r"""
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <set>
#include <utility>
#define QUIET __attribute__((no_instrument_function))
namespace {
struct edges {
    std::mutex mutex;
    std::set<std::pair<void*, void*>> all;
    QUIET edges();
};
QUIET edges& found() {
    static edges* const one = new edges;
    return *one;
}
QUIET void write() {
    std::FILE* out = std::fopen(HOPS_OUT, "w");
    for (const auto& e : found().all) std::fprintf(out, "%p %p\n", e.first, e.second);
    std::fclose(out);
}
// what a thread has told already, by a hash that forgets
struct thread_calls {
    void* stack[4096] = {};
    std::size_t depth = 0;
    std::pair<void*, void*> told[65536] = {};
};
thread_local thread_calls* calls = nullptr;
}
extern "C" int atexit(void (*)(void));
edges::edges() { atexit(write); }
extern "C" QUIET void __cyg_profile_func_enter(void* f, void*) {
    if (!calls) calls = new thread_calls;
    void* const from = calls->depth ? calls->stack[(calls->depth - 1) % 4096] : nullptr;
    calls->stack[calls->depth++ % 4096] = f;
    const auto a = reinterpret_cast<std::uintptr_t>(from), b = reinterpret_cast<std::uintptr_t>(f);
    const std::uintptr_t mix = (a * 31 + b) * 0x9E3779B97F4A7C15u;
    auto& told = calls->told[mix >> 48];
    if (told.first == from && told.second == f) return;
    told.first = from, told.second = f;
    const std::lock_guard lock(found().mutex);
    found().all.insert({from, f});
}
extern "C" QUIET void __cyg_profile_func_exit(void*, void*) {
    if (calls && calls->depth) --calls->depth;
}
"""


def followed(root: pathlib.Path, program: str, work: pathlib.Path, compiler: str, flags: list[str]):
    """The calls of a program, as pairs of files below include/opd or None."""
    edges, runtime, binary = work / "edges", work / "runtime.cpp", work / "program"
    runtime.write_text(RUNTIME)
    base = [compiler, "-std=c++20"]
    subprocess.run([*base, "-O2", f'-DHOPS_OUT="{edges}"', "-c", runtime, "-o", work / "runtime.o"], check=True)
    # by DWARF 5 addr2line names other files
    subprocess.run([*base, "-O0", "-g1", "-gdwarf-4", "-finstrument-functions",
                    "-finstrument-functions-exclude-file-list=/usr/", "-no-pie", f"-I{root / 'include'}",
                    "-isystem", "/usr/include/eigen3", *flags, root / program, work / "runtime.o", "-pthread",
                    "-o", binary], check=True)  # fmt: skip
    subprocess.run([binary], check=True, stdout=subprocess.DEVNULL, cwd=work)
    pairs = [line.split() for line in edges.read_text().splitlines()]
    addresses = sorted({a for pair in pairs for a in pair if a != "(nil)"})
    places = subprocess.run(["addr2line", "-e", binary], input="\n".join(addresses), check=True, capture_output=True,
                            text=True).stdout.splitlines()  # fmt: skip
    home = (root / "include" / "opd").resolve()

    def place(text: str):
        path = pathlib.Path(text.rsplit(":", 1)[0]).resolve()
        return str(path.relative_to(home)) if path.is_relative_to(home) else None

    file = dict(zip(addresses, map(place, places)), **{"(nil)": None})
    return pairs, file


def includes(root: pathlib.Path):
    """Every header's includes, through others too."""
    home = root / "include" / "opd"
    direct = {}
    for path in home.rglob("*.hpp"):
        named = re.findall(r'#include [<"](?:opd/)?([\w/.-]+)[">]', path.read_text())
        direct[str(path.relative_to(home))] = {
            str(p.resolve().relative_to(home.resolve()))
            for n in named
            for p in (home / n, path.parent / n)
            if p.is_file() and p.resolve().is_relative_to(home.resolve())
        }
    whole = {}

    def reach(name, on_way=()):
        if name not in whole:
            whole[name] = set(direct.get(name, ()))
            for other in direct.get(name, ()):
                if other not in on_way:
                    whole[name] |= reach(other, (*on_way, name))
        return whole[name]

    for name in list(direct):
        reach(name)
    return whole


def counted(pairs, file, whole):
    """(files, rooms, hops, [climb]). A function outside of include/opd hands its caller on to what it calls."""
    callers: dict[str, set[str]] = {}
    for a, b in pairs:
        callers.setdefault(b, set()).add(a)

    def ours(address, on_way):
        if address in on_way:
            return set()
        if file[address]:
            return {file[address]}
        return set().union(*(ours(c, on_way | {address}) for c in callers.get(address, ())))

    hops = set()
    for a, b in pairs:
        if file[b]:
            hops |= {(from_file, file[b]) for from_file in ours(a, frozenset()) if from_file != file[b]}
    files = {f for f in file.values() if f}
    rooms = {str(pathlib.PurePath(f).parent) for f in files}
    return len(files), len(rooms), len(hops), sorted((a, b) for a, b in hops if a in whole.get(b, ()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", help="below the root")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--climbs", action="store_true", help="list them")
    parser.add_argument("--flag", action="append", default=[], help="one more for the compiler")
    given = parser.parse_args()
    whole = includes(given.root)
    print(f"{'':34}{'files':>6}{'rooms':>6}{'hops':>6}{'climbs':>7}")
    for program in given.programs:
        with tempfile.TemporaryDirectory() as work:
            pairs, file = followed(given.root.resolve(), program, pathlib.Path(work), given.compiler, given.flag)
            files, rooms, hops, climbs = counted(pairs, file, whole)
            print(f"{program:34}{files:6}{rooms:6}{hops:6}{len(climbs):7}", flush=True)
            for a, b in climbs if given.climbs else ():
                print(f"    {a} -> {b}")


if __name__ == "__main__":
    sys.exit(main())
