/* threads.c - a pool of worker threads that takes the tasks of one job at a time.
 *
 * A step of a model issues one job per layer, tens of microseconds to milliseconds apart, so idle workers look for work
 * for a moment before they sleep, and everything up to there is a few atomic operations:
 *
 *   n_left     tasks that nobody has taken. Taking one is a compare-and-swap n -> n - 1, which also makes the job's
 *              fields visible; they stay put until every task that was taken has ended.
 *   n_pending  tasks that have not ended. The caller returns when it is 0, whether or not a worker that found nothing
 *              to do has woken up by then.
 *
 * Whoever sleeps says so first and looks once more afterwards; whoever changes a counter looks for sleepers afterwards.
 * These accesses are sequentially consistent, hence one of the two sees the other.
 */
#define _GNU_SOURCE
#include "threads.h"

#include "internal.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_THREADS = 1024,
    SPIN_LONG_NS = 50000, /* a sleeping thread needs about this long to wake up */
    SPIN_SHORT_NS = 3000,
    SPINS_PER_CLOCK = 32,
    SPINS_PER_YIELD = 1024
};

typedef struct worker {
    hkv_threads *pool;
    pthread_t thread;
} worker;

struct hkv_threads {
    pthread_mutex_t turn;  /* held while a job runs or the pool changes */
    pthread_mutex_t sleep; /* of both conditions */
    pthread_cond_t work, done;
    atomic_int n_left, n_pending, n_sleeping;
    atomic_bool caller_sleeps;
    atomic_int n_threads;     /* with the caller; worker i leaves when i >= n_threads */
    _Atomic(int64_t) process; /* whose threads the workers are; negative while that process starts them */
    hkv_task_fn fn;           /* the job */
    void *ctx;
    int32_t n_tasks;
    worker workers[MAX_THREADS]; /* [0] stands for the caller */
};

/* ---------------------------------------------------------------------------------------------------------- waiting */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void spin_pause(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#endif
}

/* Look until `holds` or for `limit_ns`; whether it holds. */
static bool spin_until(bool (*holds)(const worker *), const worker *self, int64_t limit_ns)
{
    int64_t end = now_ns() + limit_ns;
    do {
        for (int32_t i = 0; i < SPINS_PER_CLOCK; i++) {
            if (holds(self)) return true;
            spin_pause();
        }
    } while (now_ns() < end);
    return false;
}

/* ---------------------------------------------------------------------------------------------------------- working */

/* The next task, -1 if all are taken. */
static int32_t take_task(hkv_threads *pool)
{
    int n_left = atomic_load_explicit(&pool->n_left, memory_order_relaxed);
    while (n_left > 0)
        if (atomic_compare_exchange_weak(&pool->n_left, &n_left, n_left - 1)) return pool->n_tasks - n_left;
    return -1;
}

static void work_on_job(hkv_threads *pool, int32_t worker_idx)
{
    int32_t task;
    while ((task = take_task(pool)) >= 0) {
        pool->fn(pool->ctx, task, worker_idx);
        if (atomic_fetch_sub(&pool->n_pending, 1) > 1 || !atomic_load(&pool->caller_sleeps)) continue;
        pthread_mutex_lock(&pool->sleep);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->sleep);
    }
}

static bool worker_must_leave(const worker *self)
{
    return self - self->pool->workers >= atomic_load_explicit(&self->pool->n_threads, memory_order_acquire);
}

static bool worker_is_needed(const worker *self)
{
    return atomic_load(&self->pool->n_left) > 0 || worker_must_leave(self);
}

static void worker_sleep(const worker *self)
{
    hkv_threads *pool = self->pool;
    pthread_mutex_lock(&pool->sleep);
    atomic_fetch_add(&pool->n_sleeping, 1);
    while (!worker_is_needed(self)) pthread_cond_wait(&pool->work, &pool->sleep);
    atomic_fetch_sub(&pool->n_sleeping, 1);
    pthread_mutex_unlock(&pool->sleep);
}

/* A worker spins for long while jobs keep coming, and hardly at all when the last pause was long. */
static void *worker_main(void *arg)
{
    worker *self = arg;
    int64_t spin_ns = SPIN_LONG_NS;
    for (;;) {
        int64_t start = now_ns();
        if (!spin_until(worker_is_needed, self, spin_ns)) worker_sleep(self);
        spin_ns = now_ns() - start < 2 * SPIN_LONG_NS ? SPIN_LONG_NS : SPIN_SHORT_NS;
        if (worker_must_leave(self)) return NULL;
        work_on_job(self->pool, (int32_t)(self - self->pool->workers));
    }
}

static bool job_has_ended(const worker *caller)
{
    return atomic_load(&caller->pool->n_pending) == 0;
}

static void wait_for_job(hkv_threads *pool)
{
    if (spin_until(job_has_ended, &pool->workers[0], SPIN_LONG_NS)) return;
    pthread_mutex_lock(&pool->sleep);
    atomic_store(&pool->caller_sleeps, true);
    while (!job_has_ended(&pool->workers[0])) pthread_cond_wait(&pool->done, &pool->sleep);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->sleep);
}

static void wake_workers(hkv_threads *pool)
{
    if (atomic_load(&pool->n_sleeping) == 0) return;
    pthread_mutex_lock(&pool->sleep);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->sleep);
}

/* --------------------------------------------------------------------------------------------- starting and leaving */

/* Start workers first .. end-1 and return the first that could not be started. They take no signals. */
static int32_t start_workers(hkv_threads *pool, int32_t first, int32_t end)
{
    sigset_t all, before;
    int32_t i;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (i = first; i < end; i++)
        if (pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]) != 0) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return i;
}

/* Let workers n_threads .. end-1 leave. */
static void stop_workers(hkv_threads *pool, int32_t n_threads, int32_t end)
{
    atomic_store(&pool->n_threads, n_threads);
    wake_workers(pool);
    for (int32_t i = n_threads; i < end; i++) pthread_join(pool->workers[i].thread, NULL);
}

/* A state in which nobody works, waits or holds anything. */
static void pool_init(hkv_threads *pool)
{
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->sleep, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    atomic_init(&pool->n_left, 0);
    atomic_init(&pool->n_pending, 0);
    atomic_init(&pool->n_sleeping, 0);
    atomic_init(&pool->caller_sleeps, false);
}

/* fork() copies the pool but not its threads, and a lock may have been held by one of them. The first use in the child
 * starts afresh, with as many workers as it can get. */
static void adopt_after_fork(hkv_threads *pool)
{
    int64_t self = getpid(), process = atomic_load(&pool->process);
    int32_t n_threads;
    while (process != self) {
        if (process == -self) { /* another thread of this process is at it */
            sched_yield();
            process = atomic_load(&pool->process);
            continue;
        }
        if (!atomic_compare_exchange_weak(&pool->process, &process, -self)) continue;
        pool_init(pool);
        n_threads = start_workers(pool, 1, atomic_load(&pool->n_threads));
        atomic_store(&pool->n_threads, n_threads);
        atomic_store(&pool->process, self);
        return;
    }
}

static int32_t count_usable_cores(void)
{
    cpu_set_t cores;
    long n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int32_t)n;
}

static hkv_status check_n_threads(int32_t *n_threads, hkv_error *error)
{
    if (*n_threads < 0 || *n_threads > MAX_THREADS)
        return hkv_error_set(error, HKV_ERR_ARGUMENT, "n_threads", "n_threads must be 0..%d, got %d", MAX_THREADS,
                             *n_threads);
    if (*n_threads == 0) *n_threads = count_usable_cores();
    return HKV_OK;
}

static hkv_status cannot_start(int32_t n_started, int32_t n_threads, hkv_error *error)
{
    return hkv_error_set(error, HKV_ERR_NO_MEMORY, "n_threads", "the system gave only %d of %d threads", n_started,
                         n_threads);
}

hkv_status hkv_threads_create(int32_t n_threads, hkv_threads **threads, hkv_error *error)
{
    hkv_threads *pool;
    int32_t n_started;
    HKV_TRY(check_n_threads(&n_threads, error));
    pool = calloc(1, sizeof *pool);
    if (!pool) return hkv_error_set(error, HKV_ERR_NO_MEMORY, "", "no memory for a thread pool");
    for (int32_t i = 0; i < MAX_THREADS; i++) pool->workers[i].pool = pool;
    pool_init(pool);
    atomic_init(&pool->process, (int64_t)getpid());
    atomic_init(&pool->n_threads, n_threads);
    n_started = start_workers(pool, 1, n_threads);
    if (n_started < n_threads) {
        stop_workers(pool, 1, n_started);
        free(pool);
        return cannot_start(n_started, n_threads, error);
    }
    *threads = pool;
    return HKV_OK;
}

void hkv_threads_destroy(hkv_threads *threads)
{
    if (!threads) return;
    if (atomic_load(&threads->process) == getpid()) stop_workers(threads, 1, atomic_load(&threads->n_threads));
    free(threads);
}

int32_t hkv_threads_count(const hkv_threads *threads)
{
    return atomic_load(&threads->n_threads);
}

hkv_status hkv_threads_resize(hkv_threads *threads, int32_t n_threads, hkv_error *error)
{
    hkv_status status = HKV_OK;
    int32_t n_before, n_started;
    HKV_TRY(check_n_threads(&n_threads, error));
    adopt_after_fork(threads);
    if (pthread_mutex_trylock(&threads->turn) != 0)
        return hkv_error_set(error, HKV_ERR_BUSY, "threads", "the pool runs a job; resize it between steps");
    n_before = atomic_load(&threads->n_threads);
    if (n_threads < n_before) {
        stop_workers(threads, n_threads, n_before);
    } else {
        atomic_store(&threads->n_threads, n_threads); /* else new workers would leave at once */
        n_started = start_workers(threads, n_before, n_threads);
        if (n_started < n_threads) {
            stop_workers(threads, n_before, n_started);
            status = cannot_start(n_started, n_threads, error);
        }
    }
    pthread_mutex_unlock(&threads->turn);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------- jobs */

void hkv_threads_run(hkv_threads *threads, int32_t n_tasks, hkv_task_fn fn, void *ctx)
{
    if (threads) adopt_after_fork(threads);
    if (!threads || n_tasks <= 1 || hkv_threads_count(threads) == 1) {
        for (int32_t task = 0; task < n_tasks; task++) fn(ctx, task, 0);
        return;
    }
    pthread_mutex_lock(&threads->turn);
    threads->fn = fn;
    threads->ctx = ctx;
    threads->n_tasks = n_tasks;
    atomic_store(&threads->n_pending, n_tasks);
    atomic_store(&threads->n_left, n_tasks);
    wake_workers(threads);
    work_on_job(threads, 0);
    wait_for_job(threads);
    pthread_mutex_unlock(&threads->turn);
}

void hkv_threads_await(const atomic_int *flag)
{
    for (int32_t i = 1; !atomic_load_explicit(flag, memory_order_acquire); i++) {
        spin_pause();
        if (i % SPINS_PER_YIELD == 0) sched_yield(); /* there may be fewer cores than workers */
    }
}
