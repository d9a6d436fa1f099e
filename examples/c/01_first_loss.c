/* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * Reverse KL of (1/2, 1/2) against (3/4, 1/4), and its gradient.
 */
#include <math.h>
#include <stdio.h>

#include <opd/c/opd.h>

static DLTensor matrix(float* data, int64_t* shape) {
    DLTensor t = {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
    return t;
}

int main(void) {
    float z[] = {0, 0}, y[] = {1.0986123f, 0}, dz[2];
    int64_t shape[] = {1, 2};
    DLTensor logits = matrix(z, shape), gradient = matrix(dz, shape), target = matrix(y, shape);
    opd_student student = {.struct_size = sizeof student, .z = &logits, .dz = &gradient};
    opd_teacher teacher = {.struct_size = sizeof teacher, .y = &target};
    opd_call call = {.struct_size = sizeof call, .student = &student, .teacher = &teacher};
    opd_result result = {.struct_size = sizeof result};
    if (opd_evaluate(&call, &result) != OPD_OK) {
        fprintf(stderr, "%s\n", opd_last_error());
        return 1;
    }
    printf("loss %.6f gradient %.6f %.6f\n", result.loss, dz[0], dz[1]);
    return fabs(result.loss - 0.143841) < 1e-6 ? 0 : 1;
}
