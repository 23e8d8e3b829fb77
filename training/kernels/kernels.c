/* The most expensive operations on a shard's values, each in one pass; NumPy needs three to ten.
 *
 * For each value a function computes what the NumPy code of training/encoding/codecs.py or training/shards/outer_rule.py
 * computes: the same operations in the same order, so that both give the same bits. The flags in pyproject.toml forbid
 * fused multiply-adds and reordering, and no function adds up several values.
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
#define CONTRACT 2

/* Each function is compiled for several processors; the loader selects the variant. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define PASS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PASS
#endif

#define BLOCK 1024             /* BLOCK_VALUES in __init__.py */
#define LEVELS 127.0f          /* codecs._LEVELS */
#define SMALLEST 1e-30f        /* codecs._MIN_VALUE */
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

typedef uint16_t __attribute__((aligned(1), may_alias)) half; /* a bfloat16 at any address */

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even: the upper 16 bits of the result are the bfloat16. */
static inline uint32_t raised(uint32_t bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }

int contract(void) { return CONTRACT; }

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

/* Encodes one block: its scale, then its levels. Returns whether all values and all rounding errors are finite. If a
 * value is not finite, all levels are 0. */
static inline int encode_block(const float *restrict delta, float *restrict residual, char *restrict data, size_t count) {
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

static inline void decode_block(const char *restrict data, float *restrict values, size_t count) {
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

/* value += lr * (weight * delta) */
PASS void add(float *restrict value, const float *restrict delta, float weight, float lr, size_t count) {
    for (size_t i = 0; i < count; i++) value[i] += delta[i] * weight * lr;
}

/* The same, and accumulated += weight * delta: the sum of the weights has not reached 1 yet. */
PASS void add_and_accumulate(float *restrict value, float *restrict accumulated, const float *restrict delta, float weight,
                             float lr, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float scaled = delta[i] * weight;
        accumulated[i] += scaled;
        value[i] += scaled * lr;
    }
}

/* The delta with which the sum of the weights reaches 1. momentum = mu * momentum + accumulated + weight * delta;
 * accumulated = 0; value += lr_mu * momentum + lr * weight * delta. */
PASS void add_with_momentum(float *restrict value, float *restrict momentum, float *restrict accumulated,
                            const float *restrict delta, float weight, float lr, float mu, float lr_mu, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float scaled = delta[i] * weight;
        float moved = momentum[i] * mu + (accumulated[i] + scaled);
        momentum[i] = moved;
        accumulated[i] = 0.0f;
        value[i] = (value[i] + moved * lr_mu) + scaled * lr;
    }
}

/* The same if nothing is accumulated. */
PASS void add_with_momentum_alone(float *restrict value, float *restrict momentum, const float *restrict delta,
                                  float weight, float lr, float mu, float lr_mu, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float scaled = delta[i] * weight;
        float moved = momentum[i] * mu + scaled;
        momentum[i] = moved;
        value[i] = (value[i] + moved * lr_mu) + scaled * lr;
    }
}
