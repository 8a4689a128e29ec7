/* Exported functions of checkpoints: check arguments, call the module, return. */
#include "api.h"

/* ---- saving */

fsdp_status fsdp_save_options_init(fsdp_save_options *options, size_t struct_size)
{
    return ABI_INIT(fsdp_save_options, options, struct_size);
}

fsdp_status fsdp_checkpoint_save(fsdp_group *group, fsdp_state_dict *dict, const char *path,
                                 const fsdp_save_options *options, fsdp_save **save)
{
    if (group) CHECK_GROUP(group);
    CHECK_STATE_DICT(dict);
    CHECK_ARG(path, "path is NULL: the folder or file to write");
    fsdp_save_options known;
    TRY(ABI_READ(fsdp_save_options, options, &known));
    return checkpoint_save(group, dict, path, &known, save);
}

fsdp_status fsdp_save_query(fsdp_save *save, fsdp_save_info *info)
{
    CHECK_SAVE(save);
    TRY(ABI_WRITE_CHECK(fsdp_save_info, info));
    fsdp_save_info now;
    save_query(save, &now);
    return ABI_WRITE(fsdp_save_info, info, &now);
}

fsdp_status fsdp_save_wait(fsdp_save *save, int64_t timeout_ms)
{
    CHECK_SAVE(save);
    return save_wait(save, timeout_ms);
}

fsdp_status fsdp_save_retain(fsdp_save *save)
{
    CHECK_SAVE(save);
    ref_get((struct ref *)save);
    return FSDP_OK;
}

void fsdp_save_release(fsdp_save *save)
{
    if (save_is(save)) save_release(save);
}

/* ---- reading */

fsdp_status fsdp_checkpoint_open(const char *path, fsdp_checkpoint **checkpoint)
{
    CHECK_ARG(path, "path is NULL: the folder or file to read");
    CHECK_OUT(checkpoint);
    return checkpoint_open(path, checkpoint);
}

fsdp_status fsdp_checkpoint_retain(fsdp_checkpoint *checkpoint)
{
    CHECK_CHECKPOINT(checkpoint);
    ref_get((struct ref *)checkpoint);
    return FSDP_OK;
}

void fsdp_checkpoint_release(fsdp_checkpoint *checkpoint)
{
    if (checkpoint_is(checkpoint)) checkpoint_release(checkpoint);
}

fsdp_status fsdp_checkpoint_query(fsdp_checkpoint *checkpoint, fsdp_checkpoint_info *info)
{
    CHECK_CHECKPOINT(checkpoint);
    TRY(ABI_WRITE_CHECK(fsdp_checkpoint_info, info));
    fsdp_checkpoint_info now;
    checkpoint_query(checkpoint, &now);
    return ABI_WRITE(fsdp_checkpoint_info, info, &now);
}

fsdp_status fsdp_checkpoint_entry(fsdp_checkpoint *checkpoint, int64_t index, fsdp_entry *entry)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_OUT(entry);
    TRY(ABI_WRITE_CHECK(fsdp_entry, entry));
    fsdp_entry now;
    TRY(checkpoint_entry(checkpoint, index, &now));
    return ABI_WRITE(fsdp_entry, entry, &now);
}

fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *checkpoint, const char *name, int32_t rank, int64_t *index)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_ARG(name, "name is NULL");
    CHECK_OUT(index);
    return checkpoint_find(checkpoint, name, rank, index);
}

fsdp_status fsdp_checkpoint_json(fsdp_checkpoint *checkpoint, int64_t index, const char **name, const char **text)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_OUT(name);
    CHECK_OUT(text);
    return checkpoint_json(checkpoint, index, name, text);
}

fsdp_status fsdp_checkpoint_n_parts(fsdp_checkpoint *checkpoint, int64_t index, int64_t *n)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_OUT(n);
    return checkpoint_n_parts(checkpoint, index, n);
}

fsdp_status fsdp_checkpoint_part_of(fsdp_checkpoint *checkpoint, int64_t index, int64_t part, fsdp_checkpoint_part *out)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_OUT(out);
    TRY(ABI_WRITE_CHECK(fsdp_checkpoint_part, out));
    fsdp_checkpoint_part now;
    TRY(checkpoint_part_of(checkpoint, index, part, &now));
    return ABI_WRITE(fsdp_checkpoint_part, out, &now);
}

fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, int64_t index, const int64_t *offset,
                                 const DLTensor *tensor)
{
    CHECK_CHECKPOINT(checkpoint);
    struct tensor out;
    struct box want;
    TRY(tensor_import_output(tensor, "tensor", &out));
    box_make(&want, out.ndim, offset, out.shape);
    return checkpoint_read(checkpoint, index, &want, &out);
}

fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *checkpoint, fsdp_state_dict *into, const fsdp_load_options *options)
{
    CHECK_CHECKPOINT(checkpoint);
    CHECK_STATE_DICT(into);
    fsdp_load_options known;
    TRY(ABI_READ(fsdp_load_options, options, &known));
    CHECK_ARG(!known.from_rank0, "options.from_rank0 is %d: each rank reads a checkpoint for itself", known.from_rank0);
    return checkpoint_load(checkpoint, into, &known);
}

fsdp_status fsdp_checkpoint_verify(fsdp_checkpoint *checkpoint, fsdp_progress_fn on_progress, void *user)
{
    CHECK_CHECKPOINT(checkpoint);
    return checkpoint_verify(checkpoint, on_progress, user);
}
