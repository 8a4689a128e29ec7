/* What the files of exported functions share: checks of handles, one line each. */
#ifndef FSDP_API_CHECKS_H
#define FSDP_API_CHECKS_H

#include "abi_check.h"

#include "base/mem.h"
#include "fsdp/fsdp.h"
#include "state/state.h"

#define CHECK_HANDLE(is, handle, name)                                                                                 \
    do {                                                                                                               \
        CHECK_ARG(handle, name " is NULL");                                                                            \
        CHECK_ARG(is(handle), name " is not a live %s: released already, or of another kind", #handle);                \
    } while (0)
#define CHECK_OWN(is, handle, name)                                                                                    \
    do {                                                                                                               \
        CHECK_HANDLE(is, handle, name);                                                                                \
        if (ref_forked((const struct ref *)(const void *)(handle)))                                                    \
            return err(FSDP_ERR_FORKED,                                                                                \
                       "this " name " was made before fork(): a child process can only release it; make "              \
                       "what it needs in the child");                                                                  \
    } while (0)
#define CHECK_STORE(store) CHECK_OWN(store_is, store, "store")
#define CHECK_GROUP(group) CHECK_OWN(group_is, group, "group")
#define CHECK_WORK(work) CHECK_OWN(work_is, work, "work")
#define CHECK_MODEL(model) CHECK_OWN(model_is, model, "model")
#define CHECK_UNIT(unit) CHECK_OWN(unit_is, unit, "unit")
#define CHECK_MESH(mesh) CHECK_OWN(mesh_is, mesh, "mesh")
#define CHECK_SCALER(scaler) CHECK_OWN(scaler_is, scaler, "scaler")
#define CHECK_CHECKPOINT(checkpoint) CHECK_OWN(checkpoint_is, checkpoint, "checkpoint")
#define CHECK_SAVE(save) CHECK_OWN(save_is, save, "save")
/* Several in one call: each is named as the argument is. */
#define CHECK_STATE_DICT(dict)                                                                                         \
    do {                                                                                                               \
        CHECK_ARG(dict, #dict " is NULL: a state dict is needed");                                                     \
        CHECK_ARG(state_dict_is(dict), #dict " is not a live state dict: released already, or of another kind");       \
        if (ref_forked(&(dict)->ref))                                                                                  \
            return err(FSDP_ERR_FORKED, #dict " was made before fork(): make the state dict in the child");            \
    } while (0)
#define CHECK_OUT(pointer) CHECK_ARG(pointer, #pointer " is NULL: there is nowhere to write the result")

#endif
