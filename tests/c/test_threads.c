/* The thread pool: every task once, visible results, jobs of several callers, resizing, fork. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "test.h"
#include "threads.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

enum { MAX_TASKS = 512 };

typedef struct job {
    int32_t n_workers;
    int32_t sum[MAX_TASKS];       /* written by tasks without synchronisation */
    atomic_int on_worker[64];     /* tasks that run on a worker right now */
    atomic_int n_shared, n_calls; /* a worker ran two tasks at once; all calls */
} job;

static void count_task(void *ctx, int32_t task_idx, int32_t worker_idx)
{
    job *j = ctx;
    if (worker_idx < 0 || worker_idx >= j->n_workers || atomic_fetch_add(&j->on_worker[worker_idx], 1) != 0)
        atomic_fetch_add(&j->n_shared, 1);
    for (int32_t i = 0; i < task_idx % 7 * 100; i++) j->sum[task_idx] += i;
    j->sum[task_idx] += 1;
    atomic_fetch_add(&j->n_calls, 1);
    atomic_fetch_sub(&j->on_worker[worker_idx], 1);
}

static int32_t expected_sum(int32_t task_idx)
{
    int32_t n = task_idx % 7 * 100;
    return n * (n - 1) / 2 + 1;
}

/* Whether a job of n_tasks ran every task exactly once. */
static int job_is_right(hkv_threads *threads, int32_t n_workers, int32_t n_tasks)
{
    job j = {.n_workers = n_workers};
    int right = 1;
    hkv_threads_run(threads, n_tasks, count_task, &j);
    for (int32_t i = 0; i < n_tasks; i++) right &= j.sum[i] == expected_sum(i);
    return right && atomic_load(&j.n_calls) == n_tasks && atomic_load(&j.n_shared) == 0;
}

static void sleep_us(long us)
{
    struct timespec pause = {0, us * 1000};
    nanosleep(&pause, NULL);
}

static void test_every_task_runs_once(void)
{
    static const int32_t sizes[] = {1, 2, 3, 8};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        hkv_threads *threads;
        CHECK_OK(hkv_threads_create(sizes[s], &threads, NULL));
        CHECK_INT(hkv_threads_count(threads), sizes[s]);
        for (int32_t n_tasks = 0; n_tasks < 40; n_tasks++) CHECK(job_is_right(threads, sizes[s], n_tasks));
        CHECK(job_is_right(threads, sizes[s], MAX_TASKS));
        hkv_threads_destroy(threads);
    }
}

static void test_without_a_pool(void)
{
    CHECK(job_is_right(NULL, 1, 100));
    hkv_threads_destroy(NULL);
}

/* Back to back, after short pauses (workers spin) and after long ones (workers sleep). */
static void test_many_jobs_with_pauses(void)
{
    hkv_threads *threads;
    CHECK_OK(hkv_threads_create(4, &threads, NULL));
    for (int32_t i = 0; i < 2000; i++) {
        if (i % 16 == 0) sleep_us(i % 3 * 80);
        CHECK(job_is_right(threads, 4, 2 + i % 9));
    }
    hkv_threads_destroy(threads);
}

static void wait_task(void *ctx, int32_t task_idx, int32_t worker_idx)
{
    (void)worker_idx;
    sleep_us(task_idx * 2000);
    atomic_fetch_add((atomic_int *)ctx, 1);
}

/* The last task is slow, so the caller goes to sleep and must be woken. */
static void test_caller_waits_for_the_slowest(void)
{
    hkv_threads *threads;
    atomic_int n = 0;
    CHECK_OK(hkv_threads_create(2, &threads, NULL));
    for (int32_t i = 0; i < 5; i++) hkv_threads_run(threads, 2, wait_task, &n);
    CHECK_INT(atomic_load(&n), 10);
    hkv_threads_destroy(threads);
}

typedef struct caller {
    hkv_threads *threads;
    int n_wrong;
} caller;

static void *call_often(void *arg)
{
    caller *c = arg;
    for (int32_t i = 0; i < 200; i++) c->n_wrong += !job_is_right(c->threads, 3, 5 + i % 20);
    return NULL;
}

static void test_several_callers_take_turns(void)
{
    caller callers[4];
    pthread_t ids[4];
    hkv_threads *threads;
    CHECK_OK(hkv_threads_create(3, &threads, NULL));
    for (int i = 0; i < 4; i++) {
        callers[i] = (caller){threads, 0};
        pthread_create(&ids[i], NULL, call_often, &callers[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(ids[i], NULL);
        CHECK_INT(callers[i].n_wrong, 0);
    }
    hkv_threads_destroy(threads);
}

static void test_resize(void)
{
    static const int32_t sizes[] = {1, 6, 2, 2, 5, 1, 3};
    hkv_error error;
    hkv_threads *threads;
    CHECK_OK(hkv_threads_create(4, &threads, NULL));
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        CHECK_OK(hkv_threads_resize(threads, sizes[s], NULL));
        CHECK_INT(hkv_threads_count(threads), sizes[s]);
        CHECK(job_is_right(threads, sizes[s], 100));
    }
    CHECK_ERROR(hkv_threads_resize(threads, -2, &error), HKV_ERR_ARGUMENT, "n_threads", "got -2");
    CHECK_INT(hkv_threads_count(threads), 3);
    hkv_threads_destroy(threads);
}

static void resize_task(void *ctx, int32_t task_idx, int32_t worker_idx)
{
    hkv_error error;
    (void)worker_idx;
    if (task_idx == 0) CHECK_ERROR(hkv_threads_resize(ctx, 3, &error), HKV_ERR_BUSY, "threads", "runs a job");
}

static void test_resize_during_a_job_is_refused(void)
{
    hkv_threads *threads;
    CHECK_OK(hkv_threads_create(2, &threads, NULL));
    hkv_threads_run(threads, 4, resize_task, threads);
    CHECK_INT(hkv_threads_count(threads), 2);
    hkv_threads_destroy(threads);
}

static void test_default_and_wrong_sizes(void)
{
    hkv_error error;
    hkv_threads *threads;
    CHECK_OK(hkv_threads_create(0, &threads, NULL));
    CHECK(hkv_threads_count(threads) >= 1);
    hkv_threads_destroy(threads);
    CHECK_ERROR(hkv_threads_create(-1, &threads, &error), HKV_ERR_ARGUMENT, "n_threads", "got -1");
    CHECK_ERROR(hkv_threads_create(1 << 20, &threads, &error), HKV_ERR_ARGUMENT, "n_threads", "got 1048576");
}

/* 0 if the child is fine. */
static int child_status(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

static void test_pool_works_after_fork(void)
{
    hkv_threads *threads;
    pid_t child;
    CHECK_OK(hkv_threads_create(3, &threads, NULL));
    CHECK(job_is_right(threads, 3, 50));
    fflush(stdout);
    child = fork();
    if (child == 0) { /* twice: workers are started once */
        int right = job_is_right(threads, 3, 50) && job_is_right(threads, 3, 50) && hkv_threads_count(threads) == 3;
        hkv_threads_destroy(threads);
        _exit(!right);
    }
    CHECK_INT(child_status(child), 0);
    child = fork();
    if (child == 0) { /* never used there */
        hkv_threads_destroy(threads);
        _exit(0);
    }
    CHECK_INT(child_status(child), 0);
    CHECK(job_is_right(threads, 3, 50));
    hkv_threads_destroy(threads);
}

static void *run_until_told(void *arg)
{
    caller *c = arg;
    while (job_is_right(c->threads, 3, 64) && !__atomic_load_n(&c->n_wrong, __ATOMIC_RELAXED)) continue;
    return NULL;
}

/* fork() while another thread holds the pool's locks. */
static void test_fork_in_the_middle_of_a_job(void)
{
    hkv_threads *threads;
    caller c;
    pthread_t other;
    CHECK_OK(hkv_threads_create(3, &threads, NULL));
    c = (caller){threads, 0};
    pthread_create(&other, NULL, run_until_told, &c);
    fflush(stdout);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) _exit(!job_is_right(threads, 3, 50));
        CHECK_INT(child_status(child), 0);
    }
    __atomic_store_n(&c.n_wrong, 1, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    hkv_threads_destroy(threads);
}

int main(void)
{
    RUN(test_every_task_runs_once);
    RUN(test_without_a_pool);
    RUN(test_many_jobs_with_pauses);
    RUN(test_caller_waits_for_the_slowest);
    RUN(test_several_callers_take_turns);
    RUN(test_resize);
    RUN(test_resize_during_a_job_is_refused);
    RUN(test_default_and_wrong_sizes);
    if (!UNDER_TSAN) { /* it does not follow threads across fork() */
        RUN(test_pool_works_after_fork);
        RUN(test_fork_in_the_middle_of_a_job);
    }
    return test_report();
}
