/* One file of a checkpoint, written. Its layout is known before any value is: sums have a fixed length, so the header
 * has, too. Values are written first, with their sums taken on the way, and the header last; then the file gets its
 * name.
 *
 * What lies in memory as it will lie in the file is written from there; the rest passes through the buffer, as do small
 * tensors, which would be a call of the kernel each. One thread at a time.
 */
#include "state/files.h"

#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Larger elements first, so that all are aligned; else in the order of the dict. */
static int by_layout(const void *a, const void *b)
{
    const struct save_part *x = a, *y = b;
    size_t x_size = dtype_size(x->type), y_size = dtype_size(y->type);
    if (x_size != y_size) return x_size > y_size ? -1 : 1;
    if (x->of_rank != y->of_rank) return x->of_rank ? 1 : -1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* ---- the header */

static void tell_part(struct text *t, const struct save_file *file, const struct save_part *part)
{
    text_string(t, part->name, strlen(part->name));
    text_add(t, ":{\"index\":");
    text_number(t, part->index);
    text_add(t, ",\"dtype\":\"");
    text_add(t, st_dtype_name(part->type));
    text_add(t, "\",\"shape\":");
    text_numbers(t, part->shape, part->ndim);
    if (part->of_rank) text_add(t, ",\"of_rank\":true");
    if (!part->of_rank && file->rank >= 0) {
        text_add(t, ",\"offset\":");
        text_numbers(t, part->box.at, part->ndim);
    }
    text_add(t, ",\"sums\":\"");
    for (int64_t i = 0; i < blocks_of(part->bytes); i++) text_hex(t, file->sums[part->first_sum + i]);
    text_add(t, "\"}");
}

/* All of the file before the data. */
static void tell_header(struct text *t, const struct save_file *file)
{
    struct text fsdp = {0};
    manifest_begin(&fsdp, "", file->save, file->rank, file->ranks);
    if (file->part) text_add(&fsdp, ",\"part\":true");
    text_add(&fsdp, ",\"checksum\":\"xxh3-64\",\"block\":");
    text_number(&fsdp, FILE_BLOCK);
    text_add(&fsdp, ",\"tensors\":{");
    for (int64_t i = 0; i < file->n; i++) {
        if (i) text_add(&fsdp, ",");
        tell_part(&fsdp, file, &file->parts[i]);
    }
    text_add(&fsdp, "}");
    text_add(&fsdp, file->rest);
    manifest_end(&fsdp);
    text_bytes(t, "\0\0\0\0\0\0\0\0", 8);
    text_add(t, file->rank < 0 ? "{\"__metadata__\":{\"format\":\"pt\",\"fsdp\":" : "{\"__metadata__\":{\"fsdp\":");
    if (fsdp.failed)
        t->failed = 1;
    else
        text_string(t, fsdp.at, fsdp.used);
    text_free(&fsdp);
    text_add(t, "}");
    for (int64_t i = 0; i < file->n; i++) {
        const struct save_part *part = &file->parts[i];
        const int64_t offsets[] = {part->begin, part->begin + part->bytes};
        text_add(t, ",");
        text_string(t, part->name, strlen(part->name));
        text_add(t, ":{\"dtype\":\"");
        text_add(t, st_dtype_name(part->type));
        text_add(t, "\",\"shape\":");
        text_numbers(t, part->box.size, part->ndim);
        text_add(t, ",\"data_offsets\":");
        text_numbers(t, offsets, 2);
        text_add(t, "}");
    }
    text_add(t, "}");
    while (t->used % 64 && !t->failed) text_add(t, " "); /* a multiple of 8 would do; copies are faster so */
    for (int i = 0; i < 8 && !t->failed; i++) t->at[i] = (char)((t->used - 8) >> (8 * i) & 0xff);
}

fsdp_status save_file_plan(struct save_file *file)
{
    int64_t begin = 0, sums = 0;
    file->fd = -1;
    if (file->n) qsort(file->parts, (size_t)file->n, sizeof *file->parts, by_layout);
    for (int64_t i = 0; i < file->n; i++) {
        struct save_part *part = &file->parts[i];
        part->begin = begin;
        part->bytes = box_count(&part->box) * (int64_t)dtype_size(part->type);
        part->first_sum = sums;
        begin += part->bytes;
        sums += blocks_of(part->bytes);
    }
    file->sums = mem_array((size_t)sums, sizeof *file->sums);
    if (!file->sums) return mem_none("checksums", (size_t)sums * sizeof *file->sums);
    struct text header = {0};
    tell_header(&header, file);
    fsdp_status status = text_end(&header);
    file->data_at = (int64_t)header.used;
    file->bytes = file->data_at + begin;
    text_free(&header);
    TRY(status);
    if (file->data_at - 8 > FILE_HEADER_MOST)
        return err(FSDP_ERR_UNSUPPORTED,
                   "the header of '%.255s' would have %lld bytes, of which safetensors takes %d: save in the sharded "
                   "format or in several files (max_file_bytes), and keep less in JSON values",
                   file->name, (long long)file->data_at, FILE_HEADER_MOST);
    return FSDP_OK;
}

/* ---- writing */

fsdp_status save_file_begin(struct save_file *file)
{
    snprintf(file->temp, sizeof file->temp, ".%s.partial", file->name);
    snprintf(file->path, sizeof file->path, "%s/%s", file->folder->path, file->temp);
    file->filled = 0;
    file->filled_at = file->begun = file->data_at;
    TRY(os_file_create(file->folder, file->temp, &file->fd));
    return os_file_reserve(file->fd, file->path, file->bytes);
}

#define SYNC_AHEAD (32 * FILE_BLOCK)

static fsdp_status write_out(struct save_file *file, const void *from, int64_t bytes, int64_t at)
{
    TRY(os_file_write(file->fd, file->path, from, (size_t)bytes, at));
    atomic_fetch_add_explicit(file->written, bytes, memory_order_relaxed);
    /* The disk may as well begin while the rest is being written. */
    if (file->sync && at + bytes - file->begun >= SYNC_AHEAD) {
        os_file_begin_sync(file->fd, file->begun, at + bytes - file->begun);
        file->begun = at + bytes;
    }
    return file->pulse ? file->pulse(file->user) : FSDP_OK;
}

static fsdp_status flush(struct save_file *file)
{
    int64_t bytes = file->filled;
    file->filled = 0;
    if (!bytes) return FSDP_OK;
    return write_out(file, file->buffer, bytes, file->filled_at);
}

/* Room for one block more, which will lie at `at` in the file. */
static fsdp_status room_in_buffer(struct save_file *file, int64_t at, int64_t bytes)
{
    if (file->filled && (file->filled_at + file->filled != at || file->filled + bytes > SAVE_BUFFER)) TRY(flush(file));
    if (!file->filled) file->filled_at = at;
    return FSDP_OK;
}

/* Elements [from, from + n) in row-major order, of any strides and dtype, as the part's in a row. */
static void elements_pack(const struct save_part *part, const struct tensor *data, int64_t from, int64_t n, char *to)
{
    struct box whole;
    box_make(&whole, data->ndim, NULL, data->shape);
    size_t size = dtype_size(part->type);
    while (n > 0) {
        struct box rows;
        struct tensor source = *data, packed;
        int64_t now = box_rows(&whole, from, from + n, &rows);
        box_narrow(&source, &whole, &rows);
        tensor_make(&packed, to, part->type, rows.ndim, rows.size);
        tensor_copy(&packed, &source);
        from += now;
        n -= now;
        to += (size_t)now * size;
    }
}

fsdp_status save_file_put(struct save_file *file, int64_t index, const struct tensor *data)
{
    const struct save_part *part = &file->parts[index];
    int direct = data->contiguous && data->type == part->type;
    int64_t size = (int64_t)dtype_size(part->type);
    for (int64_t i = 0; i < blocks_of(part->bytes); i++) {
        int64_t done = i * FILE_BLOCK, at = file->data_at + part->begin + done;
        int64_t bytes = part->bytes - done < FILE_BLOCK ? part->bytes - done : FILE_BLOCK;
        const char *from = direct ? data->data + done : NULL;
        if (!direct || bytes < FILE_BLOCK) {
            TRY(room_in_buffer(file, at, bytes));
            char *to = file->buffer + file->filled;
            if (direct)
                memcpy(to, from, (size_t)bytes);
            else
                elements_pack(part, data, done / size, bytes / size, to);
            file->filled += bytes;
            file->sums[part->first_sum + i] = block_sum(to, (size_t)bytes);
            continue;
        }
        TRY(flush(file));
        file->sums[part->first_sum + i] = block_sum(from, (size_t)bytes);
        TRY(write_out(file, from, bytes, at));
    }
    return FSDP_OK;
}

fsdp_status save_file_finish(struct save_file *file)
{
    TRY(flush(file));
    struct text header = {0};
    tell_header(&header, file);
    fsdp_status status = text_end(&header);
    if (status == FSDP_OK && (int64_t)header.used != file->data_at)
        status = err(FSDP_ERR_INTERNAL, "the header of '%.255s' has another length than planned", file->name);
    if (status == FSDP_OK) file->header_sum = block_sum(header.at, header.used);
    if (status == FSDP_OK) status = os_file_write(file->fd, file->path, header.at, header.used, 0);
    text_free(&header);
    if (status == FSDP_OK) atomic_fetch_add_explicit(file->written, file->data_at, memory_order_relaxed);
    if (status == FSDP_OK && file->sync) status = os_file_sync(file->fd, file->path);
    if (status == FSDP_OK) status = os_file_close(&file->fd, file->path);
    if (status == FSDP_OK) status = os_file_rename(file->folder, file->temp, file->name);
    if (status == FSDP_OK) file->renamed = 1;
    return status;
}

void save_file_drop(struct save_file *file, int remove)
{
    /* A failure to remove is one of the next save's, which finds what is left. */
    fsdp_error_info failure;
    err_save(&failure);
    os_close(&file->fd);
    if (remove && file->temp[0]) (void)os_file_remove(file->folder, file->renamed ? file->name : file->temp);
    (void)err_restore(&failure);
    mem_free(file->parts);
    mem_free(file->sums);
    file->parts = NULL;
    file->sums = NULL;
}

fsdp_status save_text(const struct os_folder *folder, const char *name, const char *text, size_t bytes, int32_t sync,
                      int *renamed)
{
    char temp[SAVE_NAME + 16], path[OS_PATH_MOST + sizeof temp + 2];
    int fd;
    *renamed = 0;
    snprintf(temp, sizeof temp, ".%s.partial", name);
    snprintf(path, sizeof path, "%s/%s", folder->path, temp);
    TRY(os_file_create(folder, temp, &fd));
    fsdp_status status = os_file_reserve(fd, path, (int64_t)bytes);
    if (status == FSDP_OK) status = os_file_write(fd, path, text, bytes, 0);
    if (status == FSDP_OK && sync) status = os_file_sync(fd, path);
    if (status == FSDP_OK) status = os_file_close(&fd, path);
    if (status == FSDP_OK) status = os_file_rename(folder, temp, name);
    if (status == FSDP_OK) {
        *renamed = 1;
        return FSDP_OK;
    }
    fsdp_error_info failure;
    err_save(&failure);
    os_close(&fd);
    (void)os_file_remove(folder, temp);
    return err_restore(&failure);
}
