/* test_team.h - a team of many lanes on one CPU, for test_plan.c.
 *
 * Every lane is a coroutine that runs until the next hkv_team_sync. Between two syncs the lanes run in a new order each
 * time, so a result that depends on who comes first differs from what one lane makes; a sync that some lanes miss is
 * seen at once.
 */
#ifndef HKV_TEST_TEAM_H
#define HKV_TEST_TEAM_H

#include <ucontext.h>

#include "test.h"

enum { N_LANES = 5, N_SEEDS = 3, LANE_STACK = 256 << 10 };

static struct {
    ucontext_t scheduler, lane[N_LANES];
    char stack[N_LANES][LANE_STACK];
    int64_t n_syncs[N_LANES];
    int32_t is_running[N_LANES];
    int32_t flags[N_LANES];
    int64_t n_rounds;
} team_of_test;

static void hkv_test_team_sync(int32_t lane)
{
    team_of_test.n_syncs[lane]++;
    swapcontext(&team_of_test.lane[lane], &team_of_test.scheduler);
}

static int32_t hkv_test_team_rank(int32_t lane, int32_t n_lanes, int32_t flag, int32_t *total)
{
    int32_t before = 0, sum = 0;
    team_of_test.flags[lane] = flag;
    hkv_test_team_sync(lane);
    for (int32_t i = 0; i < n_lanes; i++) {
        if (i < lane) before += team_of_test.flags[i];
        sum += team_of_test.flags[i];
    }
    hkv_test_team_sync(lane);
    *total = sum;
    return before;
}

#include "plan.h"

static const hkv_plan_job *job_of_team;
static int32_t *shared_of_team;

static void run_lane(int lane)
{
    const hkv_team team = {lane, N_LANES, shared_of_team};
    hkv_plan_step(job_of_team, &team);
    team_of_test.is_running[lane] = 0;
    hkv_test_team_sync(lane);
}

/* Let every lane run to its next sync: upwards, downwards, or from the middle. */
static void run_round(void)
{
    for (int32_t i = 0; i < N_LANES; i++) {
        int64_t n = team_of_test.n_rounds % 3;
        int32_t lane = n == 0 ? i : n == 1 ? N_LANES - 1 - i : (i + N_LANES / 2) % N_LANES;
        swapcontext(&team_of_test.scheduler, &team_of_test.lane[lane]);
    }
    team_of_test.n_rounds++;
}

static void start_lane(int32_t lane)
{
    ucontext_t *context = &team_of_test.lane[lane];
    getcontext(context);
    context->uc_stack.ss_sp = team_of_test.stack[lane];
    context->uc_stack.ss_size = LANE_STACK;
    makecontext(context, (void (*)(void))run_lane, 1, lane);
    team_of_test.is_running[lane] = 1;
    team_of_test.n_syncs[lane] = 0;
}

static void run_team(const hkv_plan_job *job, int32_t *shared)
{
    int32_t n_running;
    job_of_team = job;
    shared_of_team = shared;
    for (int32_t lane = 0; lane < N_LANES; lane++) start_lane(lane);
    do {
        run_round();
        n_running = 0;
        for (int32_t lane = 0; lane < N_LANES; lane++) {
            n_running += team_of_test.is_running[lane];
            CHECK_INT(team_of_test.n_syncs[lane], team_of_test.n_syncs[0]);
        }
        CHECK(n_running == 0 || n_running == N_LANES);
    } while (n_running == N_LANES);
}

#endif
