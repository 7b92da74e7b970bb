/* test_plan.c again, planned by a team of several lanes as on a GPU. */
#define HKV_TEST_TEAM
#include "test_plan.c"
