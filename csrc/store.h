/* store.h - what managed mode needs of a store beyond hkv.h. */
#ifndef HKV_STORE_H
#define HKV_STORE_H

#include "backend.h"
#include "hkv.h"

/* The group behind a store, for hkv_backend.upload. */
hkv_group *hkv_store_group(hkv_store *store);

#endif
