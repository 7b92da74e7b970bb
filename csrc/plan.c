/* plan.c - why a step was refused, in words. */
#include "plan.h"

#include "internal.h"

hkv_status hkv_plan_report(const int32_t *failure_value, hkv_error *error)
{
    hkv_plan_fault fault = (hkv_plan_fault)failure_value[0];
    hkv_status status = hkv_plan_fault_status(fault);
    int index = failure_value[1], value = failure_value[2], limit = failure_value[3];
    switch (fault) {
    case HKV_PLAN_OK:
        break;
    case HKV_PLAN_CU_TOKENS:
        return hkv_error_set(error, status, "cu_new_tokens",
                             "cu_new_tokens must ascend from 0 to n_new_tokens = %d; entry %d is %d", limit, index,
                             value);
    case HKV_PLAN_LENGTH:
        return hkv_error_set(error, status, "seq_lens",
                             "seq_lens must count the new tokens too; row %d has length %d and %d new tokens", index,
                             value, limit);
    case HKV_PLAN_TOO_LONG:
        return hkv_error_set(error, status, "seq_lens",
                             "seq_lens must be at most the %d tokens that a row can have; row %d has length %d", limit,
                             index, value);
    case HKV_PLAN_ROW_TOKENS:
        return hkv_error_set(error, status, "max_row_tokens",
                             "max_row_tokens = %d must be at least the new tokens of every row; row %d has %d", limit,
                             index, value);
    case HKV_PLAN_STRIDE:
        return hkv_error_set(error, status, "block_table_stride",
                             "block_table_stride must be at least the blocks of every row; row %d has %d, got %d",
                             index, value, limit);
    case HKV_PLAN_COPY_SOURCE:
        return hkv_error_set(error, status, "copy_sources",
                             "copy_sources must be below the %d blocks of the pool; row %d names block %d", limit,
                             index, value);
    case HKV_PLAN_TABLE:
        return hkv_error_set(error, status, "block_table",
                             "block_table entries of a row's tokens must be 0..%d; row %d names block %d", limit - 1,
                             index, value);
    case HKV_PLAN_SLOT:
        return hkv_error_set(error, status, "slot_mapping",
                             "slots must lie in blocks 0..%d; token %d is to be written to block %d", limit - 1, index,
                             value);
    case HKV_PLAN_SLOT_BLOCK:
        return hkv_error_set(error, status, "slot_mapping",
                             "a token's slot must be where the row's block table puts its position; token %d has slot "
                             "%d instead of %d",
                             index, value, limit);
    case HKV_PLAN_SLOT_HOLES:
        return hkv_error_set(error, status, "slot_mapping",
                             "the slots of a row must be consecutive within a block; there are %d runs, more than %d",
                             value, limit);
    case HKV_PLAN_TWO_WRITERS:
        return hkv_error_set(error, status, "slot_mapping",
                             "a block must be written at one place of a step; block %d is written twice", value);
    case HKV_PLAN_NO_PAGE:
        return hkv_error_set(error, status, "n_hot_pages",
                             "this step needs %d more hot pages than the pool of %d can give", value, limit);
    }
    return status;
}
