/* internal.h - what the C files share and the public header does not show: errors, sizes, host memory.
 */
#ifndef HKV_INTERNAL_H
#define HKV_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define HKV_PRINTF(format_idx, args_idx) __attribute__((format(printf, format_idx, args_idx)))
#else
#define HKV_PRINTF(format_idx, args_idx)
#endif

/* Leave the function with the status of `call` unless it is HKV_OK. */
#define HKV_TRY(call)                                                                                                  \
    do {                                                                                                               \
        hkv_status hkv_try_status = (call);                                                                            \
        if (hkv_try_status != HKV_OK) return hkv_try_status;                                                           \
    } while (0)

/* Describe a failure and return `status`, so that a function can end with it. error and argument may be NULL. */
hkv_status hkv_error_set(hkv_error *error, hkv_status status, const char *argument, const char *format, ...)
    HKV_PRINTF(4, 5);

/* *total = a * b or a + b. False, with *total untouched, if that does not fit. */
bool hkv_size_multiply(size_t a, size_t b, size_t *total);
bool hkv_size_add(size_t a, size_t b, size_t *total);
/* n rounded up to a multiple of alignment, a power of two. */
bool hkv_size_align(size_t n, size_t alignment, size_t *total);

/* The part of a caller's memory that is used: from the first multiple of HKV_MEMORY_ALIGNMENT on. */
hkv_memory hkv_memory_align(hkv_memory memory);
/* After the number of bytes that memory lacks. */
#define HKV_MEMORY_LOST ", and up to 511 more to begin at a multiple of 512"

/* Host memory from `allocator`, NULL = malloc. NULL if there is none; n_bytes = 0 gives a pointer like any other. */
void *hkv_allocate(const hkv_allocator *allocator, size_t n_bytes, size_t alignment);
/* ptr may be NULL; n_bytes as it was asked for. */
void hkv_release(const hkv_allocator *allocator, void *ptr, size_t n_bytes);

#ifdef __cplusplus
}
#endif
#endif
