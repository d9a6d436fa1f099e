# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conan 2: `conan create packaging/conan`. The package is what `cmake --install` installs: headers and opd's own CMake
package, so find_package(opd CONFIG COMPONENTS …) asks for the same components as elsewhere. It takes Eigen,
nlohmann-json and cpp-httplib from wherever the caller has them."""
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load

required_conan_version = ">=2.0"


class Opd(ConanFile):
    name = "opd"
    description = "Losses, schedulers and speculation of on-policy distillation: a C++20 header-only library"
    license = "Apache-2.0 WITH LLVM-exception"
    topics = ("distillation", "reinforcement-learning", "language-models", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def _root(self):
        return os.path.join(self.recipe_folder, os.pardir, os.pardir)

    def set_version(self):
        text = load(self, os.path.join(self._root(), "include", "opd", "version.hpp"))
        numbers = (re.search(rf"OPD_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))
        self.version = ".".join(numbers)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, src=self._root(), dst=self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def generate(self):
        tc = CMakeToolchain(self)
        for part in ("TESTS", "EXAMPLES", "BENCHMARKS"):
            tc.cache_variables[f"OPD_BUILD_{part}"] = "OFF"
        tc.cache_variables["OPD_WITH_CUDA"] = "OFF"  # of opd's own programs: opd::cuda is found where it is used
        tc.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("pkg_config_name", "opd-headers")
        self.cpp_info.set_property("cmake_find_mode", "none")  # opd's own package, which has all its components
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "opd")]
        if self.settings.get_safe("os") in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
