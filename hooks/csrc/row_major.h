/* A strided tensor's elements in row-major order, as the digest covers them. */
#ifndef BITCHECK_ROW_MAJOR_H
#define BITCHECK_ROW_MAJOR_H

#include <stddef.h>
#include <stdint.h>

#define MAX_DIMENSIONS 64 /* that PyTorch allows */

/* Copy elements of 1, 2, 4, 8 or 16 bytes with strides in bytes, none negative, to `out`, one after the other. */
void copy_row_major(uint8_t *out, const uint8_t *in, int num_dimensions, const int64_t *shape, const int64_t *strides,
                    size_t itemsize);

#endif
