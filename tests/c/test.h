/* test.h - assertions for the C tests.
 *
 *   static void test_something(void) { CHECK(1 + 1 == 2); CHECK_INT(size(), 64); }
 *   int main(void) { RUN(test_something); return test_report(); }
 *
 * A failed check is printed and counted; the test goes on. The last line is "N passed, M failed", in tests.
 */
#ifndef HKV_TEST_H
#define HKV_TEST_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hkv.h"

static int test_n_failed_checks, test_n_passed, test_n_failed;

static inline void test_fail(const char *file, int line, const char *text)
{
    test_n_failed_checks++;
    printf("%s:%d: %s", file, line, text);
}

static inline void test_check(int holds, const char *text, const char *file, int line)
{
    if (holds) return;
    test_fail(file, line, text);
    printf(" does not hold\n");
}

static inline void test_check_int(int64_t actual, int64_t expected, const char *text, const char *file, int line)
{
    if (actual == expected) return;
    test_fail(file, line, text);
    printf(" is %" PRId64 ", expected %" PRId64 "\n", actual, expected);
}

static inline void test_check_text(const char *actual, const char *part, const char *file, int line)
{
    if (strstr(actual, part)) return;
    test_fail(file, line, "");
    printf("\"%s\" does not contain \"%s\"\n", actual, part);
}

static inline void test_check_status(hkv_status actual, hkv_status expected, const char *text, const char *file,
                                     int line)
{
    if (actual == expected) return;
    test_fail(file, line, text);
    printf(" is %d (%s), expected %d (%s)\n", actual, hkv_status_string(actual), expected, hkv_status_string(expected));
}

#define CHECK(condition)               test_check((condition) != 0, #condition, __FILE__, __LINE__)
#define CHECK_INT(actual, expected)    test_check_int((int64_t)(actual), (int64_t)(expected), #actual, __FILE__, __LINE__)
#define CHECK_TEXT(actual, part)       test_check_text((actual), (part), __FILE__, __LINE__)
#define CHECK_STATUS(actual, expected) test_check_status((actual), (expected), #actual, __FILE__, __LINE__)
#define CHECK_OK(call)                 CHECK_STATUS(call, HKV_OK)
/* The call must fail with `expected`, blaming `name`, with a message that contains `part`; needs hkv_error error. */
#define CHECK_ERROR(call, expected, name, part)                                                                        \
    do {                                                                                                               \
        memset(&error, 0, sizeof error);                                                                               \
        CHECK_STATUS(call, expected);                                                                                  \
        CHECK_INT(error.status, expected);                                                                             \
        CHECK_TEXT(error.argument, name);                                                                              \
        CHECK_TEXT(error.message, part);                                                                               \
    } while (0)

static inline void test_run(void (*test)(void), const char *name)
{
    int n_before = test_n_failed_checks;
    test();
    if (test_n_failed_checks == n_before) {
        test_n_passed++;
    } else {
        test_n_failed++;
        printf("FAILED %s\n", name);
    }
}
#define RUN(test) test_run(test, #test)

/* Print the last line; the exit status of main. */
static inline int test_report(void)
{
    printf("%d passed, %d failed\n", test_n_passed, test_n_failed);
    return test_n_failed != 0;
}

/* splitmix64: the same numbers on every machine. */
static inline uint64_t test_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
/* 0 .. n-1 */
static inline int32_t test_random_int(uint64_t *state, int32_t n)
{
    return (int32_t)(test_random(state) % (uint64_t)n);
}

/* An allocator that counts, poisons what it hands out, and says no on demand. */
typedef struct test_memory {
    size_t n_bytes;      /* in use */
    int64_t n_allocated; /* calls that succeeded */
    int64_t n_live;
    int64_t fail_at; /* this call (from 0) fails; -1 = none */
    int64_t n_calls;
} test_memory;

static inline void *test_memory_alloc(void *ctx, size_t n_bytes, size_t alignment)
{
    test_memory *memory = ctx;
    void *ptr;
    if (memory->n_calls++ == memory->fail_at) return NULL;
    if (alignment < 64) alignment = 64;
    ptr = aligned_alloc(alignment, (n_bytes + alignment - 1) / alignment * alignment);
    if (!ptr) return NULL;
    memset(ptr, 0xcb, n_bytes);
    memory->n_bytes += n_bytes;
    memory->n_allocated++;
    memory->n_live++;
    return ptr;
}
static inline void test_memory_release(void *ctx, void *ptr, size_t n_bytes)
{
    test_memory *memory = ctx;
    memory->n_bytes -= n_bytes;
    memory->n_live--;
    free(ptr);
}
static inline hkv_allocator test_memory_allocator(test_memory *memory)
{
    hkv_allocator allocator = {test_memory_alloc, test_memory_release, memory};
    memset(memory, 0, sizeof *memory);
    memory->fail_at = -1;
    return allocator;
}

#endif
