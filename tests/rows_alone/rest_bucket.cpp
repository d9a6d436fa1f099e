// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense rows of two vocabularies of different size.
#include <opd/rows/rest_bucket.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Program>
void walk_lumped() {
    walk(dense_rows<engine, frame, logits, opd::teacher::lumped<dense>, Program, rest_bucket>({}, {}, {}, {}, 1));
}
void all() {
    walk_lumped<divergence>(), walk_lumped<whole_divergence>();
    walk_lumped<selected_divergence>(), walk_lumped<mixed_divergence>();
}
} // namespace fake
