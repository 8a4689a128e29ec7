/* A disk that fails: the calls by which a save changes a file system are counted, and the k-th of them fails, or ends
 * the process. They are the test's own functions of the C library's names, which the linker takes for the library under
 * test. */
#ifndef FSDP_TEST_DISK_FAULT_H
#define FSDP_TEST_DISK_FAULT_H

enum disk_fault {
    DISK_SOUND,
    DISK_FAILS,  /* no space for what needs some, else EIO */
    DISK_KILLS,  /* before the call is made */
    DISK_TEARS,  /* half of what is to be written is, and then the process ends; as KILLS for other calls */
    DISK_SLOW,   /* from then on each write takes 150 ms more, */
    DISK_STALLS, /* or each fsync, and each folder that is made, 700 ms */
};

/* From now on in this process. at: 1 is the next call. */
void disk_fault_set(enum disk_fault fault, int at);
extern void (*disk_fault_on_hit)(const char *call); /* told the call, "pwrite" say, just before */
/* What was called so far, a letter each: w pwrite (several in a row: once), s fsync (which does not wait for the disk),
 * r renameat, u unlinkat. */
extern char disk_fault_calls[256];

#endif
