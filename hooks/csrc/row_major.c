#include "row_major.h"

#include <string.h>

/* Rows and columns of a tile: one cache line of elements each way, so that what lies beside an element is still
 * near when its turn comes. */
#define TILE_BYTES 64

typedef struct {
    uint64_t halves[2];
} Wide;

#define DEFINE_COPY_TILE(NAME, TYPE)                                                                                   \
    static void NAME(uint8_t *out, const uint8_t *in, int64_t rows, int64_t columns, int64_t row_stride,               \
                     int64_t column_stride, int64_t out_columns)                                                       \
    {                                                                                                                  \
        for (int64_t row = 0; row < rows; row++)                                                                       \
            for (int64_t column = 0; column < columns; column++)                                                       \
                memcpy(out + (row * out_columns + column) * (int64_t)sizeof(TYPE),                                     \
                       in + row * row_stride + column * column_stride, sizeof(TYPE));                                  \
    }

DEFINE_COPY_TILE(copy_tile_1, uint8_t)
DEFINE_COPY_TILE(copy_tile_2, uint16_t)
DEFINE_COPY_TILE(copy_tile_4, uint32_t)
DEFINE_COPY_TILE(copy_tile_8, uint64_t)
DEFINE_COPY_TILE(copy_tile_16, Wide)

typedef void (*CopyTile)(uint8_t *, const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t);

static CopyTile tile_copier(size_t itemsize)
{
    switch (itemsize) {
    case 1:
        return copy_tile_1;
    case 2:
        return copy_tile_2;
    case 4:
        return copy_tile_4;
    case 8:
        return copy_tile_8;
    default:
        return copy_tile_16;
    }
}

static void copy_plane(uint8_t *out, const uint8_t *in, const int64_t *shape, const int64_t *strides, size_t itemsize)
{
    int64_t rows = shape[0], columns = shape[1], size = (int64_t)itemsize;
    if (strides[1] == size) {
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + row * columns * size, in + row * strides[0], (size_t)(columns * size));
        return;
    }
    CopyTile copy_tile = tile_copier(itemsize);
    int64_t tile = TILE_BYTES / size;
    for (int64_t row = 0; row < rows; row += tile)
        for (int64_t column = 0; column < columns; column += tile)
            copy_tile(out + (row * columns + column) * size, in + row * strides[0] + column * strides[1],
                      rows - row < tile ? rows - row : tile, columns - column < tile ? columns - column : tile,
                      strides[0], strides[1], columns);
}

static void copy_planes(uint8_t *out, const uint8_t *in, int num_dimensions, const int64_t *shape,
                        const int64_t *strides, size_t itemsize)
{
    if (num_dimensions == 2) {
        copy_plane(out, in, shape, strides, itemsize);
        return;
    }
    int64_t inner_bytes = (int64_t)itemsize;
    for (int dimension = 1; dimension < num_dimensions; dimension++)
        inner_bytes *= shape[dimension];
    for (int64_t index = 0; index < shape[0]; index++)
        copy_planes(out + index * inner_bytes, in + index * strides[0], num_dimensions - 1, shape + 1, strides + 1,
                    itemsize);
}

void copy_row_major(uint8_t *out, const uint8_t *in, int num_dimensions, const int64_t *shape, const int64_t *strides,
                    size_t itemsize)
{
    /* Two dimensions at least; those of one element left out, those that lie as one joined. */
    int64_t extents[MAX_DIMENSIONS + 2] = {1, 1}, steps[MAX_DIMENSIONS + 2] = {0, 0};
    int last = 1;
    for (int dimension = 0; dimension < num_dimensions; dimension++) {
        int64_t extent = shape[dimension], stride = strides[dimension];
        if (extent == 1)
            continue;
        if (extents[last] > 1 && steps[last] == extent * stride) {
            extents[last] *= extent;
            steps[last] = stride;
        } else {
            if (extents[last] > 1)
                last++;
            extents[last] = extent;
            steps[last] = stride;
        }
    }
    int first = last > 1 ? 1 : 0; /* a lone dimension is the columns of one row */
    if (extents[last] == 1)
        steps[last] = (int64_t)itemsize;
    copy_planes(out, in, last - first + 1, extents + first, steps + first, itemsize);
}
