// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The reference trainer's transformer on text from a grammar of 2,146 words: a teacher of width 64 and a student of
// width 32 are trained here, the student writes, and the teacher's hidden states along what it wrote are what is sent.
//
//   text      sentence {"." sentence} …      sentence   np vp [pp] [adverb] [conjunction np vp]
//   np        determiner [adjective] noun    vp         verb np          pp   preposition np
//
// Determiner, noun and verb agree in number. A text has one of 12 topics: four nouns in five are of it. An object goes
// with its verb: seven in ten are of the verb's topic. Within a class words are Zipf-distributed, so that many
// positions have few likely words and some have hundreds.
#pragma once

#include <cstdint>

#include "study.hpp"

namespace compression_study {

struct words_size {
    int teacher_steps = 600, student_steps = 150, batch = 32;
    index_t rollouts = 60, calibration = 240; ///< texts
};
world words(const words_size& s, int threads, std::uint64_t seed);

} // namespace compression_study
