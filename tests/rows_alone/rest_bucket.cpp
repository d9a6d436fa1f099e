// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense rows of two vocabularies of different size.
#include <opd/rows/rest_bucket.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Program>
void walk_bucket() {
    walk(dense_rows<engine, frame, logits, opd::teacher::lumped<dense>, Program, rest_bucket>({}, {}, {}, {}, 1));
}
void all() {
    walk_bucket<divergence>(), walk_bucket<whole_divergence>(), walk_bucket<selected_divergence>(),
        walk_bucket<mixed_divergence>();
}
} // namespace fake
