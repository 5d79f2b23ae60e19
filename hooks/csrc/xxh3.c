#include "xxh3.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86_FORMS 1
#include <immintrin.h>
#endif

#define STRIPE_BYTES 64
#define BLOCK_STRIPES 16
#define BLOCK_BYTES (STRIPE_BYTES * BLOCK_STRIPES)
#define NUM_LANES 8

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9ULL, PRIME64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5ULL, PRIME_AVALANCHE = 0x165667919E3779F9ULL;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read_64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static void write_canonical(uint64_t low, uint64_t high, uint8_t *digest)
{
    for (int byte = 0; byte < 8; byte++) {
        digest[byte] = (uint8_t)(high >> (56 - 8 * byte));
        digest[8 + byte] = (uint8_t)(low >> (56 - 8 * byte));
    }
}

/* The two halves of the 128-bit product, folded by exclusive or. */
static uint64_t multiply_fold(uint64_t left, uint64_t right)
{
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (left & 0xFFFFFFFF) * (right & 0xFFFFFFFF);
    uint64_t cross_left = (left >> 32) * (right & 0xFFFFFFFF), cross_right = (left & 0xFFFFFFFF) * (right >> 32);
    uint64_t middle = (low >> 32) + (cross_left & 0xFFFFFFFF) + cross_right;
    uint64_t upper = (left >> 32) * (right >> 32) + (cross_left >> 32) + (middle >> 32);
    return ((middle << 32) | (low & 0xFFFFFFFF)) ^ upper;
#endif
}

static uint64_t avalanche(uint64_t hash)
{
    hash = (hash ^ (hash >> 37)) * PRIME_AVALANCHE;
    return hash ^ (hash >> 32);
}

/* --- 17 to 240 bytes */

static uint64_t mix_16(const uint8_t *input, const uint8_t *secret)
{
    return multiply_fold(read_64(input) ^ read_64(secret), read_64(input + 8) ^ read_64(secret + 8));
}

static void mix_32(uint64_t sums[2], const uint8_t *first, const uint8_t *second, const uint8_t *secret)
{
    sums[0] = (sums[0] + mix_16(first, secret)) ^ (read_64(second) + read_64(second + 8));
    sums[1] = (sums[1] + mix_16(second, secret + 16)) ^ (read_64(first) + read_64(first + 8));
}

static void hash_medium(const uint8_t *input, size_t length, uint8_t *digest)
{
    uint64_t sums[2] = {length * PRIME64_1, 0};
    if (length <= 128) {
        for (size_t round = (length - 1) / 32 + 1; round-- > 0;)
            mix_32(sums, input + 16 * round, input + length - 16 * (round + 1), SECRET + 32 * round);
    } else {
        for (size_t start = 0; start < 128; start += 32)
            mix_32(sums, input + start, input + start + 16, SECRET + start);
        sums[0] = avalanche(sums[0]);
        sums[1] = avalanche(sums[1]);
        for (size_t start = 128; start + 32 <= length; start += 32)
            mix_32(sums, input + start, input + start + 16, SECRET + 3 + start - 128);
        mix_32(sums, input + length - 16, input + length - 32, SECRET + 103);
    }
    uint64_t low = sums[0] + sums[1];
    uint64_t high = sums[0] * PRIME64_1 + sums[1] * PRIME64_4 + length * PRIME64_2;
    write_canonical(avalanche(low), 0 - avalanche(high), digest);
}

/* --- longer ones: stripes of 64 bytes into 8 sums, scrambled after each block of 16 stripes */

/* Add `num_blocks` blocks to the sums, scrambled after each, and then `num_stripes` stripes of the next. */
typedef void (*Accumulate)(uint64_t *sums, const uint8_t *input, size_t num_blocks, size_t num_stripes);

static void add_stripe(uint64_t *sums, const uint8_t *input, const uint8_t *secret)
{
    for (int lane = 0; lane < NUM_LANES; lane++) {
        uint64_t word = read_64(input + 8 * lane), key = word ^ read_64(secret + 8 * lane);
        sums[lane ^ 1] += word;
        sums[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static void accumulate_portable(uint64_t *sums, const uint8_t *input, size_t num_blocks, size_t num_stripes)
{
    for (size_t block = 0; block < num_blocks; block++, input += BLOCK_BYTES) {
        for (size_t stripe = 0; stripe < BLOCK_STRIPES; stripe++)
            add_stripe(sums, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
        for (int lane = 0; lane < NUM_LANES; lane++)
            sums[lane] = (sums[lane] ^ (sums[lane] >> 47) ^ read_64(SECRET + 128 + 8 * lane)) * PRIME32_1;
    }
    for (size_t stripe = 0; stripe < num_stripes; stripe++)
        add_stripe(sums, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
}

#ifdef HAS_X86_FORMS
#define IN_AVX2 __attribute__((target("avx2"), always_inline)) static inline
#define IN_AVX512 __attribute__((target("avx512f"), always_inline)) static inline

IN_AVX2 __m256i add_half_avx2(__m256i sums, const uint8_t *input, const uint8_t *secret)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)input);
    __m256i key = _mm256_xor_si256(words, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sums, _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2))), product);
}

IN_AVX2 __m256i scramble_avx2(__m256i sums, const uint8_t *secret)
{
    __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    sums = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    sums = _mm256_xor_si256(sums, _mm256_loadu_si256((const __m256i *)secret));
    __m256i upper = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sums, prime), upper);
}

__attribute__((target("avx2"))) static void accumulate_avx2(uint64_t *sums, const uint8_t *input, size_t num_blocks,
                                                             size_t num_stripes)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)sums), high = _mm256_loadu_si256((const __m256i *)(sums + 4));
    for (size_t block = 0; block < num_blocks; block++, input += BLOCK_BYTES) {
#pragma GCC unroll 16
        for (size_t stripe = 0; stripe < BLOCK_STRIPES; stripe++) {
            low = add_half_avx2(low, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
            high = add_half_avx2(high, input + STRIPE_BYTES * stripe + 32, SECRET + 8 * stripe + 32);
        }
        low = scramble_avx2(low, SECRET + 128);
        high = scramble_avx2(high, SECRET + 160);
    }
    for (size_t stripe = 0; stripe < num_stripes; stripe++) {
        low = add_half_avx2(low, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
        high = add_half_avx2(high, input + STRIPE_BYTES * stripe + 32, SECRET + 8 * stripe + 32);
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
}

IN_AVX512 __m512i add_stripe_avx512(__m512i sums, const uint8_t *input, const uint8_t *secret)
{
    __m512i words = _mm512_loadu_si512(input), key = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i swapped = _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
    return _mm512_add_epi64(_mm512_add_epi64(sums, swapped), product);
}

__attribute__((target("avx512f"))) static void accumulate_avx512(uint64_t *sums, const uint8_t *input,
                                                                  size_t num_blocks, size_t num_stripes)
{
    __m512i all = _mm512_loadu_si512(sums), prime = _mm512_set1_epi64((long long)PRIME32_1);
    for (size_t block = 0; block < num_blocks; block++, input += BLOCK_BYTES) {
#pragma GCC unroll 16
        for (size_t stripe = 0; stripe < BLOCK_STRIPES; stripe++)
            all = add_stripe_avx512(all, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
        all = _mm512_xor_si512(all, _mm512_srli_epi64(all, 47));
        all = _mm512_xor_si512(all, _mm512_loadu_si512(SECRET + 128));
        __m512i upper = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(all, 32), prime), 32);
        all = _mm512_add_epi64(_mm512_mul_epu32(all, prime), upper);
    }
    for (size_t stripe = 0; stripe < num_stripes; stripe++)
        all = add_stripe_avx512(all, input + STRIPE_BYTES * stripe, SECRET + 8 * stripe);
    _mm512_storeu_si512(sums, all);
}
#endif

static Accumulate accumulate = accumulate_portable;

static uint64_t merge(const uint64_t *sums, const uint8_t *secret, uint64_t start)
{
    for (int pair = 0; pair < NUM_LANES; pair += 2)
        start += multiply_fold(sums[pair] ^ read_64(secret + 8 * pair), sums[pair + 1] ^ read_64(secret + 8 * pair + 8));
    return avalanche(start);
}

static void hash_long(const uint8_t *input, size_t length, uint8_t *digest)
{
    uint64_t sums[NUM_LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t num_blocks = (length - 1) / BLOCK_BYTES;
    accumulate(sums, input, num_blocks, (length - 1) % BLOCK_BYTES / STRIPE_BYTES);
    add_stripe(sums, input + length - STRIPE_BYTES, SECRET + 121);
    write_canonical(merge(sums, SECRET + 11, length * PRIME64_1), merge(sums, SECRET + 117, ~(length * PRIME64_2)), digest);
}

void xxh3_128(const uint8_t *input, size_t length, uint8_t *digest)
{
    if (length <= 240)
        hash_medium(input, length, digest);
    else
        hash_long(input, length, digest);
}

const char *xxh3_choose(const char *limit)
{
    accumulate = accumulate_portable;
#ifdef HAS_X86_FORMS
    __builtin_cpu_init();
    if (strcmp(limit, "avx512") == 0 && __builtin_cpu_supports("avx512f")) {
        accumulate = accumulate_avx512;
        return "avx512";
    }
    if (strcmp(limit, "portable") != 0 && __builtin_cpu_supports("avx2")) {
        accumulate = accumulate_avx2;
        return "avx2";
    }
#endif
    (void)limit;
    return "portable";
}
