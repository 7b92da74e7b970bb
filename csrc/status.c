/* status.c - errors, overflow-checked sizes and host memory. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const char *hkv_status_string(hkv_status status)
{
    switch (status) {
    case HKV_OK:
        return "ok";
    case HKV_ERR_ARGUMENT:
        return "invalid argument";
    case HKV_ERR_TYPE:
        return "wrong type";
    case HKV_ERR_RANGE:
        return "out of range";
    case HKV_ERR_UNKNOWN_KEY:
        return "unknown configuration key";
    case HKV_ERR_UNSUPPORTED:
        return "not supported";
    case HKV_ERR_STATE:
        return "wrong order of calls";
    case HKV_ERR_BUSY:
        return "object in use by another thread";
    case HKV_ERR_STALE:
        return "stale handle";
    case HKV_ERR_NO_MEMORY:
        return "out of memory";
    case HKV_ERR_CACHE_FULL:
        return "cache full";
    case HKV_ERR_BUDGET_SMALL:
        return "memory budget too small";
    case HKV_ERR_NO_DEVICE:
        return "no device";
    case HKV_ERR_DEVICE:
        return "device error";
    }
    return "unknown status";
}

hkv_status hkv_error_set(hkv_error *error, hkv_status status, const char *argument, const char *format, ...)
{
    va_list args;
    if (!error) return status;
    error->status = status;
    snprintf(error->argument, sizeof error->argument, "%s", argument ? argument : "");
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    return status;
}

bool hkv_size_multiply(size_t a, size_t b, size_t *total)
{
    if (b != 0 && a > SIZE_MAX / b) return false;
    *total = a * b;
    return true;
}

bool hkv_size_add(size_t a, size_t b, size_t *total)
{
    if (a > SIZE_MAX - b) return false;
    *total = a + b;
    return true;
}

bool hkv_size_align(size_t n, size_t alignment, size_t *total)
{
    if (!hkv_size_add(n, alignment - 1, &n)) return false;
    *total = n & ~(alignment - 1);
    return true;
}

_Static_assert(HKV_MEMORY_ALIGNMENT == 512, "HKV_MEMORY_LOST says so");
hkv_memory hkv_memory_align(hkv_memory memory)
{
    size_t skew = -(size_t)(uintptr_t)memory.base % HKV_MEMORY_ALIGNMENT;
    if (memory.base == NULL) return memory;
    if (skew > memory.n_bytes) skew = memory.n_bytes;
    return (hkv_memory){(uint8_t *)memory.base + skew, memory.n_bytes - skew};
}

void *hkv_allocate(const hkv_allocator *allocator, size_t n_bytes, size_t alignment)
{
    if (n_bytes == 0) n_bytes = 1;
    if (allocator) return allocator->alloc(allocator->ctx, n_bytes, alignment);
    /* C11 wants the size to be a multiple of the alignment. */
    if (alignment < _Alignof(max_align_t)) alignment = _Alignof(max_align_t);
    if (!hkv_size_align(n_bytes, alignment, &n_bytes)) return NULL;
    return aligned_alloc(alignment, n_bytes);
}

void hkv_release(const hkv_allocator *allocator, void *ptr, size_t n_bytes)
{
    if (!ptr) return;
    if (allocator)
        allocator->release(allocator->ctx, ptr, n_bytes == 0 ? 1 : n_bytes);
    else
        free(ptr);
}
