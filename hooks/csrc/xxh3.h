/* XXH3-128, seed 0, default secret: the hash of bitcheck's digest (bitcheck/digest.py), on a CPU.
 *
 * After the specification: xxHash doc/xxhash_spec.md, "XXH3 Algorithm". Any xxHash library gives the same
 * values; the tests compare with one at every length. Inputs of less than 17 bytes are left out, for a
 * digest's are never so short.
 */
#ifndef BITCHECK_XXH3_H
#define BITCHECK_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH3_MIN_BYTES 17
#define XXH3_DIGEST_BYTES 16

/* Write the 16 canonical (big-endian) bytes of the hash of `length` bytes, XXH3_MIN_BYTES at least. */
void xxh3_128(const uint8_t *input, size_t length, uint8_t *digest);

/* Choose the quickest form that this processor has; called once, before the first hash. Returns its name.
 * `limit` names the widest form to take: "avx512", "avx2", or "portable". */
const char *xxh3_choose(const char *limit);

#endif
