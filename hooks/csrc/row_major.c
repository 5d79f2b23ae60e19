#include "row_major.h"

#include <string.h>

#include "team.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Rows and columns of a tile: one cache line of elements each way, so that what lies beside an element is still
 * near when its turn comes. */
#define TILE_BYTES 64
#define MIN_TEAM_BYTES 65536 /* to a thread: below it the others are not worth waking */

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

/* What to copy: two dimensions at least, those of one element left out, those that lie as one joined. */
typedef struct {
    uint8_t *out;
    const uint8_t *in;
    int num_dimensions;
    int64_t shape[MAX_DIMENSIONS + 2], strides[MAX_DIMENSIONS + 2];
    size_t itemsize;
    int64_t index_bytes; /* that one index of the first dimension comes to */
    int64_t at_once;     /* indices of it that make a piece: a tile's rows, where they are rows */
} Copy;

static void copy_pieces(void *context, size_t begin, size_t end)
{
    const Copy *copy = context;
    int64_t shape[MAX_DIMENSIONS + 2], first = (int64_t)begin * copy->at_once, last = (int64_t)end * copy->at_once;
    memcpy(shape, copy->shape, sizeof shape);
    shape[0] = (last < copy->shape[0] ? last : copy->shape[0]) - first;
    copy_planes(copy->out + first * copy->index_bytes, copy->in + first * copy->strides[0], copy->num_dimensions, shape,
                copy->strides, copy->itemsize);
}

void copy_row_major(uint8_t *out, const uint8_t *in, int num_dimensions, const int64_t *shape, const int64_t *strides,
                    size_t itemsize)
{
    Copy copy = {.out = out, .in = in, .shape = {1, 1}, .itemsize = itemsize, .index_bytes = (int64_t)itemsize};
    int last = 0;
    for (int dimension = 0; dimension < num_dimensions; dimension++) {
        int64_t extent = shape[dimension], stride = strides[dimension];
        if (extent == 1)
            continue;
        if (copy.shape[last] > 1 && copy.strides[last] == extent * stride) {
            copy.shape[last] *= extent;
            copy.strides[last] = stride;
        } else {
            if (copy.shape[last] > 1)
                last++;
            copy.shape[last] = extent;
            copy.strides[last] = stride;
        }
    }
    if (last == 0) { /* a lone dimension is the columns of one row */
        copy.shape[1] = copy.shape[0];
        copy.strides[1] = copy.shape[0] > 1 ? copy.strides[0] : (int64_t)itemsize;
        copy.shape[0] = 1;
        copy.strides[0] = 0;
        last = 1;
    }
    copy.num_dimensions = last + 1;
    for (int dimension = 1; dimension <= last; dimension++)
        copy.index_bytes *= copy.shape[dimension];
    copy.at_once = last == 1 ? TILE_BYTES / (int64_t)itemsize : 1;
    int64_t piece_bytes = copy.at_once * copy.index_bytes, count = (copy.shape[0] + copy.at_once - 1) / copy.at_once;
    in_team(copy_pieces, &copy, (size_t)count, (size_t)((MIN_TEAM_BYTES + piece_bytes - 1) / piece_bytes));
}
