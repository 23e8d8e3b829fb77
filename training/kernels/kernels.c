/* The most expensive operations on a shard's values, each in one pass; NumPy needs three to ten.
 *
 * For each value a function computes what the NumPy code of training/encoding/codecs.py or training/shards/outer_rule.py
 * computes: the same operations in the same order, so that both give the same bits. The flags in pyproject.toml forbid
 * fused multiply-adds and reordering. Where a function adds up several values, it does so in their order, as doubles.
 *
 * record_ends is the one that is not about values: it replaces a loop in Python over the records of a file.
 *
 * The functions are called through ctypes (training/kernels/__init__.py) and do not use Python's C API. Encoded data is
 * little-endian and may begin at any address. The caller checks all sizes.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The version of the functions. A change of what one computes needs a new number here and in __init__.py (CONTRACT), so
 * that a library compiled before is not used. */
#define CONTRACT 4

/* Each function is compiled for several processors; the loader selects the variant. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define PASS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PASS
#endif

/* A helper that is not inlined would be compiled for the oldest processor alone. */
#define INLINE static inline __attribute__((always_inline))

#define BLOCK 1024             /* BLOCK_VALUES in __init__.py */
#define LEVELS 127.0f          /* codecs._LEVELS */
#define INT4_BLOCK 64          /* INT4_BLOCK_VALUES in __init__.py */
#define INT4_LEVELS 7.0f       /* int4._LEVELS */
#define SPARSE_BLOCK 4096      /* SPARSE_BLOCK_VALUES in __init__.py */
#define SMALLEST 1e-30f        /* codecs._MIN_VALUE */
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

typedef uint16_t __attribute__((aligned(1), may_alias)) half; /* a bfloat16 at any address */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even: the upper 16 bits of the result are the bfloat16. */
INLINE uint32_t raised(uint32_t bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }

int contract(void) { return CONTRACT; }

/* Where each record of a RecordIO payload ends, in bytes: a record is a length (u32) and as many bytes. Writes at most
 * `count` ends and returns how many; stops where no length is left. The last end may lie behind the payload. */
size_t record_ends(const uint8_t *payload, size_t size, size_t count, int64_t *ends) {
    size_t at = 0, found = 0;
    while (found < count && at + sizeof(uint32_t) <= size) {
        uint32_t length;
        memcpy(&length, payload + at, sizeof length);
        at += sizeof length + length;
        ends[found++] = (int64_t)at;
    }
    return found;
}

PASS void encode_bfloat16(const float *restrict values, half *restrict data, size_t count) {
    for (size_t i = 0; i < count; i++) data[i] = (uint16_t)(raised(bits_of(values[i])) >> 16);
}

/* Encodes delta + residual; the new residual is the rounding error. Returns whether every rounding error is finite. */
PASS int encode_bfloat16_with_feedback(const float *restrict delta, float *restrict residual, half *restrict data,
                                       size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float owed = residual[i] + delta[i];
        uint32_t rounded = raised(bits_of(owed));
        float left = owed - float_of(rounded & 0xffff0000u);
        uint32_t magnitude = bits_of(left) & MAGNITUDE;
        data[i] = (uint16_t)(rounded >> 16);
        residual[i] = left;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < INFINITE;
}

PASS void decode_bfloat16(const half *restrict data, float *restrict values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] = float_of((uint32_t)data[i] << 16);
}

/* The largest magnitude of bfloat16 values, as its 15 bits: they are ordered like the floats; then infinity, then NaN. */
PASS uint32_t largest_bfloat16(const half *restrict data, size_t count) {
    uint16_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = data[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Encodes one block: its scale, then its levels. Returns whether all values and all rounding errors are finite. If a
 * value is not finite, all levels are 0. */
INLINE int encode_block(const float *restrict delta, float *restrict residual, char *restrict data, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float owed = residual[i] + delta[i];
        uint32_t magnitude = bits_of(owed) & MAGNITUDE; /* ordered like the floats; then infinity, then NaN */
        residual[i] = owed;
        largest = magnitude > largest ? magnitude : largest;
    }
    float peak = float_of(largest);
    int is_usable = !(peak < SMALLEST);
    float scale = is_usable ? peak / LEVELS : 0.0f;
    float per_level = is_usable ? LEVELS / peak : 0.0f;
    int8_t *restrict levels = (int8_t *)(data + sizeof scale);
    memcpy(data, &scale, sizeof scale);
    if (largest >= INFINITE) {
        memset(levels, 0, count);
        return 0;
    }
    largest = 0;
    for (size_t i = 0; i < count; i++) {
        float level = rintf(residual[i] * per_level);
        float left = residual[i] - level * scale; /* infinite for the largest float */
        uint32_t magnitude = bits_of(left) & MAGNITUDE;
        levels[i] = (int8_t)(int32_t)level;
        residual[i] = left;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < INFINITE;
}

PASS int encode_int8_with_feedback(const float *restrict delta, float *restrict residual, char *restrict data,
                                   size_t count) {
    int is_finite = 1;
    for (; count >= BLOCK; count -= BLOCK) {
        is_finite &= encode_block(delta, residual, data, BLOCK);
        delta += BLOCK;
        residual += BLOCK;
        data += sizeof(float) + BLOCK;
    }
    if (count) is_finite &= encode_block(delta, residual, data, count);
    return is_finite;
}

INLINE void decode_block(const char *restrict data, float *restrict values, size_t count) {
    float scale;
    const int8_t *restrict levels = (const int8_t *)(data + sizeof scale);
    memcpy(&scale, data, sizeof scale);
    for (size_t i = 0; i < count; i++) values[i] = (float)levels[i] * scale;
}

PASS void decode_int8(const char *restrict data, float *restrict values, size_t count) {
    for (; count >= BLOCK; count -= BLOCK) {
        decode_block(data, values, BLOCK);
        values += BLOCK;
        data += sizeof(float) + BLOCK;
    }
    if (count) decode_block(data, values, count);
}

/* Encodes one block: its scale as a bfloat16, then its levels, two to a byte: byte i has the value i in its lower half
 * and the value i + half in its upper half. A block with a value that is not finite has an infinite scale and levels of
 * 0. Returns whether all values and all rounding errors are finite. */
INLINE int encode_int4_block(const float *restrict delta, float *restrict residual, uint8_t *restrict data,
                                    size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float owed = residual[i] + delta[i];
        uint32_t magnitude = bits_of(owed) & MAGNITUDE;
        residual[i] = owed;
        largest = magnitude > largest ? magnitude : largest;
    }
    float peak = float_of(largest);
    size_t half_count = (count + 1) / 2;
    uint32_t rounded = peak < SMALLEST ? 0 : raised(bits_of(peak / INT4_LEVELS)) & 0xffff0000u;
    uint16_t code = (uint16_t)((largest >= INFINITE ? INFINITE : rounded) >> 16);
    memcpy(data, &code, sizeof code);
    data += sizeof code;
    if (largest >= INFINITE) {
        memset(data, 0, half_count);
        return 0;
    }
    float scale = float_of(rounded);
    float per_level = rounded ? 1.0f / scale : 0.0f;
    uint8_t levels[INT4_BLOCK];
    largest = 0;
    for (size_t i = 0; i < count; i++) {
        float level = rintf(residual[i] * per_level);
        float left = residual[i] - level * scale; /* infinite for the largest float */
        uint32_t magnitude = bits_of(left) & MAGNITUDE;
        levels[i] = (uint8_t)((int32_t)level & 15);
        residual[i] = left;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (count % 2) levels[count] = 0;
    for (size_t i = 0; i < half_count; i++) data[i] = (uint8_t)(levels[i] | levels[i + half_count] << 4);
    return largest < INFINITE;
}

PASS int encode_int4_with_feedback(const float *restrict delta, float *restrict residual, uint8_t *restrict data,
                                   size_t count) {
    int is_finite = 1;
    for (; count >= INT4_BLOCK; count -= INT4_BLOCK) {
        is_finite &= encode_int4_block(delta, residual, data, INT4_BLOCK);
        delta += INT4_BLOCK;
        residual += INT4_BLOCK;
        data += sizeof(uint16_t) + INT4_BLOCK / 2;
    }
    if (count) is_finite &= encode_int4_block(delta, residual, data, count);
    return is_finite;
}

INLINE void decode_int4_block(const uint8_t *restrict data, float *restrict values, size_t count) {
    uint16_t code;
    memcpy(&code, data, sizeof code);
    data += sizeof code;
    float scale = float_of((uint32_t)code << 16);
    size_t half_count = (count + 1) / 2;
    for (size_t i = 0; i < half_count; i++) values[i] = (float)(((int32_t)((uint32_t)data[i] << 28)) >> 28) * scale;
    for (size_t i = 0; i < count / 2; i++) values[half_count + i] = (float)((int8_t)data[i] >> 4) * scale;
}

PASS void decode_int4(const uint8_t *restrict data, float *restrict values, size_t count) {
    for (; count >= INT4_BLOCK; count -= INT4_BLOCK) {
        decode_int4_block(data, values, INT4_BLOCK);
        values += INT4_BLOCK;
        data += sizeof(uint16_t) + INT4_BLOCK / 2;
    }
    if (count) decode_int4_block(data, values, count);
}

/* How many of the values have at least this magnitude, which is compared as the bits of a float. */
INLINE uint32_t count_from(const float *restrict values, size_t count, uint32_t threshold) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) found += (int32_t)(bits_of(values[i]) & MAGNITUDE) >= (int32_t)threshold;
    return found;
}

/* Writes the places of the `wanted` largest magnitudes, in order; of equal ones those that come first. Zeros are never
 * among them. Returns how many there are. `largest` is the largest magnitude, above 0. The threshold is searched from
 * `*guess` on, which becomes it: blocks of one tensor are much alike. A count is one pass over values in the cache.
 * Every second step halves the range, so that no distribution of the values takes long. */
INLINE size_t select_largest(const float *restrict values, size_t count, uint32_t largest, size_t wanted,
                                    uint16_t *restrict places, uint32_t *restrict guess) {
    uint32_t low = *guess && *guess <= largest ? *guess : largest, high = largest + 1, step = 1u << 18;
    uint32_t found = count_from(values, count, low), above = 0; /* from `low` on, and from `high` on */
    if (found < wanted) {
        while (found < wanted && low > 1) {
            high = low;
            above = found;
            low = low > step ? low - step : 1;
            step = step < 1u << 29 ? 4 * step : step;
            found = count_from(values, count, low);
        }
    } else {
        while (found > wanted && high - low > step) {
            uint32_t next = count_from(values, count, low + step);
            if (next < wanted) {
                high = low + step;
                above = next;
                break;
            }
            low += step;
            found = next;
            step = step < 1u << 29 ? 4 * step : step;
        }
    }
    for (int is_even = 1; found > wanted && high - low > 1; is_even = !is_even) {
        uint32_t range = high - low, middle = low + range / 2;
        if (is_even) middle = low + (uint32_t)((uint64_t)range * (2 * (found - wanted) + 1) / (2 * (found - above) + 1));
        if (middle <= low) middle = low + 1;
        if (middle >= high) middle = high - 1;
        uint32_t next = count_from(values, count, middle);
        if (next < wanted) {
            high = middle;
            above = next;
        } else {
            low = middle;
            found = next;
        }
    }
    *guess = low;
    uint8_t is_taken[SPARSE_BLOCK];
    for (size_t i = 0; i < count; i++) is_taken[i] = (bits_of(values[i]) & MAGNITUDE) >= low;
    size_t taken = 0, whole = count - count % 8;
    for (size_t i = 0; i < whole; i += 8) {
        uint64_t eight;
        memcpy(&eight, is_taken + i, sizeof eight);
        for (; eight; eight &= eight - 1) places[taken++] = (uint16_t)(i + (size_t)__builtin_ctzll(eight) / 8);
    }
    for (size_t i = whole; i < count; i++)
        if (is_taken[i]) places[taken++] = (uint16_t)i;
    if (taken <= wanted) return taken;
    size_t ties = wanted - above, kept = 0;
    for (size_t j = 0; j < taken; j++) {
        uint32_t magnitude = bits_of(values[places[j]]) & MAGNITUDE;
        if (magnitude == low && ties-- == 0) {
            ties = 0;
            continue;
        }
        places[kept++] = places[j];
    }
    return kept;
}

/* Bytes of a block after its count. */
INLINE size_t sparse_bytes(size_t count) { return count ? 4 + (3 * count + 1) / 2 + (count + 3) / 4 : 0; }

/* Encodes one block, of which the values sent are subtracted; `largest` is its largest magnitude. Returns the bytes
 * written. A block with a value that is not finite is the 8 bytes of one infinite value. */
INLINE size_t encode_sparse_block(float *restrict values, size_t count, uint32_t largest, size_t wanted,
                                         uint8_t *restrict data, uint32_t *restrict guess, int *restrict is_finite) {
    uint16_t places[SPARSE_BLOCK];
    if (largest >= INFINITE) {
        static const uint8_t infinite[8] = {1, 0x80, 0x7f, 0x80, 0x7f, 0, 0, 0};
        memcpy(data, infinite, sizeof infinite);
        *is_finite = 0;
        return sizeof infinite;
    }
    if (float_of(largest) < SMALLEST) {
        *data = 0;
        return 1;
    }
    size_t sent = select_largest(values, count, largest, wanted, places, guess);
    double total = 0.0, sums[2] = {0.0, 0.0};
    size_t counts[2] = {0, 0};
    for (size_t j = 0; j < sent; j++) total += (double)fabsf(values[places[j]]);
    float mean = (float)(total / (double)sent);
    for (size_t j = 0; j < sent; j++) {
        float magnitude = fabsf(values[places[j]]);
        int is_large = magnitude > mean;
        sums[is_large] += (double)magnitude;
        counts[is_large]++;
    }
    uint32_t codes[2];
    for (int i = 0; i < 2; i++) {
        int from = counts[i] ? i : 1 - i;
        codes[i] = raised(bits_of((float)(sums[from] / (double)counts[from]))) & 0xffff0000u;
    }
    uint8_t *at = data;
    if (sent > 0x7f) {
        *at++ = (uint8_t)(sent | 0x80);
        *at++ = (uint8_t)(sent >> 7);
    } else {
        *at++ = (uint8_t)sent;
    }
    for (int i = 0; i < 2; i++) {
        uint16_t code = (uint16_t)(codes[i] >> 16);
        memcpy(at, &code, sizeof code);
        at += sizeof code;
    }
    for (size_t j = 0; j + 1 < sent; j += 2) {
        *at++ = (uint8_t)places[j];
        *at++ = (uint8_t)(places[j] >> 8 | places[j + 1] << 4);
        *at++ = (uint8_t)(places[j + 1] >> 4);
    }
    if (sent % 2) {
        *at++ = (uint8_t)places[sent - 1];
        *at++ = (uint8_t)(places[sent - 1] >> 8);
    }
    memset(at, 0, (sent + 3) / 4);
    for (size_t j = 0; j < sent; j++) {
        float value = values[places[j]];
        uint32_t sign = bits_of(value) >> 31, is_large = fabsf(value) > mean;
        float left = value - float_of(codes[is_large] | sign << 31);
        at[j / 4] |= (uint8_t)((sign | is_large << 1) << 2 * (j % 4));
        values[places[j]] = left;
        *is_finite &= (bits_of(left) & MAGNITUDE) < INFINITE;
    }
    return (size_t)(at - data) + (sent + 3) / 4;
}

/* Encodes decay * residual + delta: of each block the largest values, as many in proportion as `per_block` of a whole
 * one. What was not sent is the new residual. Returns the bytes written, negative if not all of it is finite. */
PASS ptrdiff_t encode_sparse_with_feedback(const float *restrict delta, float *restrict residual, float decay,
                                           uint8_t *restrict data, size_t per_block, size_t count) {
    uint8_t *at = data;
    uint32_t guess = 0;
    int is_finite = 1;
    for (size_t start = 0; start < count; start += SPARSE_BLOCK) {
        size_t values = count - start < SPARSE_BLOCK ? count - start : SPARSE_BLOCK;
        float *restrict owed = residual + start;
        uint32_t largest = 0;
        for (size_t i = 0; i < values; i++) {
            float sum = owed[i] * decay + delta[start + i];
            uint32_t magnitude = bits_of(sum) & MAGNITUDE;
            owed[i] = sum;
            largest = magnitude > largest ? magnitude : largest;
        }
        size_t wanted = (per_block * values + SPARSE_BLOCK - 1) / SPARSE_BLOCK;
        at += encode_sparse_block(owed, values, largest, wanted, at, &guess, &is_finite);
    }
    return is_finite ? at - data : data - at;
}

/* Errors in a sparse encoding, as in training/encoding/sparse.py. */
enum { TRUNCATED = -1, TRAILING = -2, BAD_COUNT = -3, BAD_MAGNITUDE = -4, BAD_INDEX = -5, NOT_RISING = -6, BAD_PADDING = -7 };

INLINE uint32_t index_at(const uint8_t *indices, size_t j) {
    const uint8_t *pair = indices + 3 * (j / 2);
    return j % 2 ? pair[1] >> 4 | (uint32_t)pair[2] << 4 : pair[0] | (uint32_t)(pair[1] & 15) << 8;
}

/* The count that a block begins with; `*at` moves behind it. Negative for an error. */
INLINE ptrdiff_t count_at(const uint8_t *data, size_t bytes, size_t *at) {
    size_t count = data[(*at)++];
    if (count < 0x80) return (ptrdiff_t)count;
    if (*at == bytes) return TRUNCATED;
    size_t upper = data[(*at)++];
    return upper == 0 || upper > 0x7f ? BAD_COUNT : (ptrdiff_t)((count & 0x7f) | upper << 7);
}

/* Returns the number of whole blocks that the bytes are, for an array of `count` values or its beginning. Negative if
 * they are no such blocks. */
ptrdiff_t check_sparse(const uint8_t *data, size_t bytes, size_t count) {
    ptrdiff_t blocks = 0;
    for (size_t at = 0; at < bytes; blocks++) {
        size_t values = count < SPARSE_BLOCK ? count : SPARSE_BLOCK;
        if (!values) return TRAILING;
        count -= values;
        ptrdiff_t sent = count_at(data, bytes, &at);
        if (sent < 0) return sent;
        if ((size_t)sent > values) return BAD_COUNT;
        if (!sent) continue;
        if (bytes - at < sparse_bytes((size_t)sent)) return TRUNCATED;
        for (size_t i = 0; i < 2; i++) {
            uint16_t code;
            memcpy(&code, data + at + 2 * i, sizeof code);
            if (code > INFINITE >> 16) return BAD_MAGNITUDE;
        }
        const uint8_t *indices = data + at + 4;
        ptrdiff_t former = -1;
        for (ptrdiff_t j = 0; j < sent; j++) {
            ptrdiff_t index = (ptrdiff_t)index_at(indices, (size_t)j);
            if (index >= (ptrdiff_t)values) return BAD_INDEX;
            if (index <= former) return NOT_RISING;
            former = index;
        }
        at += sparse_bytes((size_t)sent);
        if (sent % 2 && indices[(3 * sent + 1) / 2 - 1] >> 4) return BAD_PADDING;
        if (sent % 4 && data[at - 1] >> 2 * (sent % 4)) return BAD_PADDING;
    }
    return blocks;
}

/* Returns 0, or what is wrong: then nothing is written. */
ptrdiff_t decode_sparse(const uint8_t *restrict data, size_t bytes, float *restrict values, size_t count) {
    ptrdiff_t blocks = check_sparse(data, bytes, count);
    if (blocks < 0) return blocks;
    if ((size_t)blocks != (count + SPARSE_BLOCK - 1) / SPARSE_BLOCK) return TRUNCATED;
    memset(values, 0, count * sizeof *values);
    for (size_t at = 0; at < bytes; values += SPARSE_BLOCK) {
        size_t sent = (size_t)count_at(data, bytes, &at);
        if (!sent) continue;
        uint16_t codes[2];
        memcpy(codes, data + at, sizeof codes);
        const uint8_t *indices = data + at + 4, *signs = indices + (3 * sent + 1) / 2;
        for (size_t j = 0; j < sent; j++) {
            uint32_t code = signs[j / 4] >> 2 * (j % 4);
            values[index_at(indices, j)] = float_of((uint32_t)codes[code >> 1 & 1] << 16 | code << 31);
        }
        at += sparse_bytes(sent);
    }
    return 0;
}

/* The larger one of `largest` and the magnitude of a value, as the bits of a float. */
INLINE uint32_t larger(uint32_t largest, float value) {
    uint32_t magnitude = bits_of(value) & MAGNITUDE;
    return magnitude > largest ? magnitude : largest;
}

/* value += lr * (weight * delta). Returns the largest magnitude of what was written, as the bits of a float: the pass
 * waits for the memory, and this costs it nothing. */
PASS uint32_t add(float *restrict value, const float *restrict delta, float weight, float lr, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float sum = value[i] + delta[i] * weight * lr;
        value[i] = sum;
        largest = larger(largest, sum);
    }
    return largest;
}

/* The same, and momentum += weight * delta. */
PASS uint32_t add_and_accumulate(float *restrict value, float *restrict momentum, const float *restrict delta,
                                 float weight, float lr, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float scaled = delta[i] * weight;
        float moved = momentum[i] + scaled, sum = value[i] + scaled * lr;
        momentum[i] = moved;
        value[i] = sum;
        largest = larger(larger(largest, moved), sum);
    }
    return largest;
}

/* momentum = decay * momentum + weight * delta; value += moves * momentum + lr * weight * delta. Returns as `add`. */
PASS uint32_t add_with_momentum_alone(float *restrict value, float *restrict momentum, const float *restrict delta,
                                      float weight, float lr, float decay, float moves, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float scaled = delta[i] * weight;
        float moved = momentum[i] * decay + scaled, sum = (value[i] + moved * moves) + scaled * lr;
        momentum[i] = moved;
        value[i] = sum;
        largest = larger(larger(largest, moved), sum);
    }
    return largest;
}
