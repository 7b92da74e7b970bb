/* threads.h - run the tasks of a job on a pool. */
#ifndef HKV_THREADS_H
#define HKV_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

#include "hkv.h"

/* One task. worker_idx is below hkv_threads_count() and no two tasks that run at the same time share it. */
typedef void (*hkv_task_fn)(void *ctx, int32_t task_idx, int32_t worker_idx);

/* Call fn for every task 0 .. n_tasks-1 and return when all have ended; what they wrote is visible then. Tasks start in
 * ascending order on whichever worker is free; the calling thread is worker 0. threads = NULL runs them all here.
 * Jobs of several callers take turns. A task must not start a job on its own pool. */
void hkv_threads_run(hkv_threads *threads, int32_t n_tasks, hkv_task_fn fn, void *ctx);

/* For a task that needs what an earlier one of its job does: return once that task has set the flag; what it wrote
 * before is visible then. Since tasks start in order, the earlier one is at work and ends. */
void hkv_threads_await(const atomic_int *flag);

#endif
