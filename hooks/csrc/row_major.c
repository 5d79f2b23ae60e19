#include "row_major.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

#if defined(__SSE2__)
static __m128i load(const uint8_t *in)
{
    return _mm_loadu_si128((const __m128i *)in);
}

static void store(uint8_t *out, __m128i low, __m128i high, int64_t stride)
{
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi64(low, high));
    _mm_storeu_si128((__m128i *)(out + stride), _mm_unpackhi_epi64(low, high));
}

/* Copy 8 rows and columns of 2 bytes each, of which a column lies in one piece. */
static void copy_block_2(uint8_t *out, int64_t out_stride, const uint8_t *in, int64_t in_stride)
{
    __m128i pairs[8], fours[8];
    for (int pair = 0; pair < 4; pair++) {
        __m128i even = load(in + 2 * pair * in_stride), odd = load(in + (2 * pair + 1) * in_stride);
        pairs[2 * pair] = _mm_unpacklo_epi16(even, odd);
        pairs[2 * pair + 1] = _mm_unpackhi_epi16(even, odd);
    }
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 2; part++) {
            __m128i left = pairs[4 * half + part], right = pairs[4 * half + 2 + part];
            fours[4 * half + 2 * part] = _mm_unpacklo_epi32(left, right);
            fours[4 * half + 2 * part + 1] = _mm_unpackhi_epi32(left, right);
        }
    for (int rows = 0; rows < 4; rows++)
        store(out + 2 * rows * out_stride, fours[rows], fours[4 + rows], out_stride);
}

/* Copy 4 rows and columns of 4 bytes each, of which a column lies in one piece. */
static void copy_block_4(uint8_t *out, int64_t out_stride, const uint8_t *in, int64_t in_stride)
{
    __m128i first = load(in), second = load(in + in_stride), third = load(in + 2 * in_stride);
    __m128i fourth = load(in + 3 * in_stride);
    store(out, _mm_unpacklo_epi32(first, second), _mm_unpacklo_epi32(third, fourth), out_stride);
    store(out + 2 * out_stride, _mm_unpackhi_epi32(first, second), _mm_unpackhi_epi32(third, fourth), out_stride);
}

/* As `copy_tile_...` where a column lies in one piece: whole blocks, and then what is left beside and below them. */
#define DEFINE_TURN_TILE(NAME, SIZE, BLOCK)                                                                            \
    static void NAME(uint8_t *out, const uint8_t *in, int64_t rows, int64_t columns, int64_t row_stride,               \
                     int64_t column_stride, int64_t out_columns)                                                       \
    {                                                                                                                  \
        int64_t whole_rows = rows - rows % BLOCK, whole_columns = columns - columns % BLOCK;                           \
        for (int64_t row = 0; row < whole_rows; row += BLOCK)                                                          \
            for (int64_t column = 0; column < whole_columns; column += BLOCK)                                          \
                copy_block_##SIZE(out + (row * out_columns + column) * SIZE, out_columns * SIZE,                       \
                                  in + row * SIZE + column * column_stride, column_stride);                            \
        if (whole_columns < columns)                                                                                   \
            copy_tile_##SIZE(out + whole_columns * SIZE, in + whole_columns * column_stride, rows,                     \
                             columns - whole_columns, row_stride, column_stride, out_columns);                         \
        if (whole_rows < rows)                                                                                         \
            copy_tile_##SIZE(out + whole_rows * out_columns * SIZE, in + whole_rows * SIZE, rows - whole_rows,         \
                             whole_columns, row_stride, column_stride, out_columns);                                   \
    }

DEFINE_TURN_TILE(turn_tile_2, 2, 8)
DEFINE_TURN_TILE(turn_tile_4, 4, 4)
#else
#define turn_tile_2 copy_tile_2
#define turn_tile_4 copy_tile_4
#endif

typedef void (*CopyTile)(uint8_t *, const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t);

static CopyTile tile_copier(size_t itemsize, int is_turned)
{
    switch (itemsize) {
    case 1:
        return copy_tile_1;
    case 2:
        return is_turned ? turn_tile_2 : copy_tile_2;
    case 4:
        return is_turned ? turn_tile_4 : copy_tile_4;
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
    CopyTile copy_tile = tile_copier(itemsize, strides[0] == size);
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
